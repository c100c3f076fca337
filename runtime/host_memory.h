// host_memory.h - how much memory and processor time this process may have: the machine's, less what its container grants.
//
// A container does not show its limits in /proc/meminfo: they are in the control groups of the process. Whoever ignores them is
// ended by the kernel's out-of-memory killer, without a word.
#pragma once
#include "utils.h"
#include <sys/mman.h>
#include <sys/resource.h>

// The value of "key : value" or "key: value unit" in a file of /proc, as text. False if it is not there.
static bool proc_field(const char *path, const char *key, char *value, size_t room) {
    FILE *f = fopen(path, "re");
    char line[512];
    bool found = false;
    while (f && !found && fgets(line, sizeof line, f)) {
        const size_t n = strlen(key);
        const char *colon = strchr(line, ':');
        if (strncmp(line, key, n) != 0 || !colon || (line[n] != ':' && line[n] != ' ' && line[n] != '\t')) continue;
        colon += 1 + strspn(colon + 1, " \t");
        snprintf(value, room, "%.*s", (int)strcspn(colon, "\n"), colon);
        found = true;
    }
    if (f) fclose(f);
    return found;
}

// The first one or two numbers in a file; -1 for what is not there ("max" is no number).
static void file_numbers(const char *folder, const char *name, int64_t *first, int64_t *second) {
    char path[1280];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "re");
    int64_t n[2] = {-1, -1};
    if (f && fscanf(f, "%" SCNd64 " %" SCNd64, &n[0], &n[1]) < 1) n[0] = -1;
    if (f) fclose(f);
    *first = n[0];
    if (second) *second = n[1];
}

static int64_t meminfo_bytes(const char *key) {
    char value[64];
    return proc_field("/proc/meminfo", key, value, sizeof value) ? (int64_t)strtoll(value, NULL, 10) * 1024 : 0;
}

// Calls look(folder, v2, result) for the control group of this process that rules `controller`, and for all above it, in
// version 2 (one hierarchy) and version 1 (one for each controller). In a container the topmost is the container's.
static void cgroup_each(const char *controller, void (*look)(const char *folder, bool v2, int64_t *result), int64_t *result) {
    FILE *f = fopen("/proc/self/cgroup", "re");
    char line[1024];
    while (f && fgets(line, sizeof line, f)) { // number:controllers:path
        line[strcspn(line, "\n")] = 0;
        char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;
        if (!path) continue;
        *names++ = 0;
        *path++ = 0;
        const bool v2 = names[0] == 0;
        bool ours = v2;
        for (char *rest = NULL, *name = strtok_r(names, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) ours |= strcmp(name, controller) == 0;
        while (ours) {
            char folder[1200];
            snprintf(folder, sizeof folder, "/sys/fs/cgroup%s%s%s", v2 ? "" : "/", v2 ? "" : controller, path);
            look(folder, v2, result);
            char *slash = strrchr(path, '/');
            if (!slash) break;
            *slash = 0;
        }
    }
    if (f) fclose(f);
}

// result[0] and [1]: bytes allowed and bytes left. Version 1 says something near 2^63 for no limit.
static void look_at_memory(const char *folder, bool v2, int64_t *result) {
    int64_t max, used;
    file_numbers(folder, v2 ? "memory.max" : "memory.limit_in_bytes", &max, NULL);
    file_numbers(folder, v2 ? "memory.current" : "memory.usage_in_bytes", &used, NULL);
    if (max < 0) return;
    result[0] = min_i64(result[0], max);
    if (used >= 0) result[1] = min_i64(result[1], max_i64(0, max - used));
}

// *result: processors whose time we may use.
static void look_at_cpu(const char *folder, bool v2, int64_t *result) {
    int64_t quota, period;
    file_numbers(folder, v2 ? "cpu.max" : "cpu.cfs_quota_us", &quota, &period);
    if (!v2) file_numbers(folder, "cpu.cfs_period_us", &period, NULL);
    if (quota > 0 && period > 0) *result = min_i64(*result, ceil_div(quota, period));
}

// *limit: bytes that this process may have at most, by the machine, ulimit -v and all control groups above it. *available: what of
// them is free, or would be if the system wanted it back from its caches.
static void host_memory_now(int64_t *limit, int64_t *available) {
    *limit = meminfo_bytes("MemTotal");
    *available = meminfo_bytes("MemAvailable");
    if (*limit == 0) { // no /proc: ask the C library
        *limit = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
        *available = *limit;
    }
    struct rlimit space; // ulimit -v
    if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY && space.rlim_cur < (rlim_t)*limit) {
        *limit = (int64_t)space.rlim_cur;
        *available = min_i64(*available, *limit);
    }
    int64_t bytes[2] = {*limit, *available};
    cgroup_each("memory", look_at_memory, bytes);
    *limit = bytes[0];
    *available = bytes[1];
}

// So many bytes of zeros on whole pages, every one of them touched, by all threads: the first touch of a page costs the kernel more
// than anything that is done with it later, and one thread gets no more than some 3 GB/s of it. To be given back by munmap.
static void *host_pages_malloc(int64_t bytes) {
    const int64_t huge = 2 << 20;
    char *p = (char *)mmap(NULL, (size_t)max_i64(bytes, 1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == (char *)MAP_FAILED) die(EXIT_CONFIG, "%.2f GiB of host memory cannot be had: %s; offload less, or give the process more", (double)bytes / (1 << 30), strerror(errno));
    if (bytes >= huge) madvise(p, (size_t)bytes, MADV_HUGEPAGE); // fewer pages to make, pin and look up; refused without harm
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < bytes; at += 4096) ((volatile char *)p)[at] = 0;
    return p;
}
