// device_cpu.cpp - the device of the CPU backend: host memory, and streams on which work is done the moment it is enqueued.
//
// Because work is done at once, everything recorded before an event has happened when the event is recorded, and waits have
// nothing to wait for. Memory is limited as on a GPU: device_malloc refuses what this machine, or the container that we run
// in, does not have, with a message instead of a visit of the kernel's out-of-memory killer.
#include "device.h"
#include <malloc.h>
#include <omp.h>
#include <sys/resource.h>

// Each block is preceded by a header that says how long it is.
#define DEVICE_ALIGNMENT 256

// Private state of this file: what device_init found, and bytes handed out (atomic: loader threads allocate too).
static DeviceInfo device_cpu;
static int64_t device_cpu_allocated;

// ---------------------------------------------------------------------------------------------------------------
// What machine is this

// The value of "key : value" or "key: value unit" in a file of /proc, as text. False if it is not there.
static bool proc_field(const char *path, const char *key, char *value, size_t room) {
    FILE *f = fopen(path, "r");
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

// A number alone in a file; -1 if there is none ("max" is none).
static int64_t file_number(const char *path) {
    FILE *f = fopen(path, "r");
    int64_t n = -1;
    if (f && fscanf(f, "%" SCNd64, &n) != 1) n = -1;
    if (f) fclose(f);
    return n < 0 ? -1 : n;
}

static int64_t meminfo_bytes(const char *key) {
    char value[64];
    return proc_field("/proc/meminfo", key, value, sizeof value) ? (int64_t)strtoll(value, NULL, 10) * 1024 : 0;
}

// Lowers *limit and *available to what the control groups of this process leave: its own and all above it, in version 2
// (one hierarchy, memory.max) and version 1 (memory.limit_in_bytes, which is near 2^63 when there is no limit).
static void cgroup_memory(int64_t *limit, int64_t *available) {
    FILE *f = fopen("/proc/self/cgroup", "r");
    char line[1024];
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) continue;
        *controllers++ = 0;
        *path++ = 0;
        const bool v2 = controllers[0] == 0;
        if (!v2 && strcmp(controllers, "memory") != 0) continue;
        for (;;) { // from our own group up to the root; in a container the root is the container's
            char name[1200];
            const char *root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
            snprintf(name, sizeof name, "%s%s/%s", root, path, v2 ? "memory.max" : "memory.limit_in_bytes");
            const int64_t max = file_number(name);
            snprintf(name, sizeof name, "%s%s/%s", root, path, v2 ? "memory.current" : "memory.usage_in_bytes");
            const int64_t used = file_number(name);
            if (max >= 0) {
                *limit = min_i64(*limit, max);
                if (used >= 0) *available = min_i64(*available, max_i64(0, max - used));
            }
            char *slash = strrchr(path, '/');
            if (!slash) break;
            *slash = 0;
        }
    }
    if (f) fclose(f);
}

static void memory_now(int64_t *limit, int64_t *available) {
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
    cgroup_memory(limit, available);
}

void device_init(int index) {
    (void)index; // ranks of one host share its CPU
    int64_t available;
    memset(&device_cpu, 0, sizeof device_cpu);
    char model[256];
    if (!proc_field("/proc/cpuinfo", "model name", model, sizeof model)) snprintf(model, sizeof model, "CPU");
    text_escape(device_cpu.name, sizeof device_cpu.name, model, strlen(model));
    memory_now(&device_cpu.memory_bytes, &available);
    device_cpu.threads = omp_get_max_threads();
#ifdef __GLIBC__
    // Kernels allocate scratch in every call. By default the C library gives blocks of this size back to the system when they
    // are freed; faulting their pages in again would cost a small matrix product a quarter of its speed.
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 512 << 20);
#endif
}

DeviceInfo device_info(void) { return device_cpu; }

// ---------------------------------------------------------------------------------------------------------------
// Memory

void *device_malloc(int64_t bytes) {
    CHECK(device_cpu.memory_bytes > 0, "device_malloc before device_init");
    CHECK(bytes >= 0, "device_malloc of %" PRId64 " bytes", bytes);
    const int64_t before = __atomic_fetch_add(&device_cpu_allocated, bytes, __ATOMIC_RELAXED);
    char *p = NULL;
    if (bytes <= device_cpu.memory_bytes - before)
        p = (char *)aligned_alloc(DEVICE_ALIGNMENT, (size_t)round_up(bytes, DEVICE_ALIGNMENT) + DEVICE_ALIGNMENT);
    if (!p)
        die(EXIT_CONFIG, "out of memory: %.2f GB asked for with %.2f GB in use, and this process may have %.2f GB (the least of machine, container and "
            "ulimit -v); lower train_micro_batch_size_per_gpu, run.seq_len or the model's size",
            (double)bytes * 1e-9, (double)before * 1e-9, (double)device_cpu.memory_bytes * 1e-9);
    memcpy(p, &bytes, sizeof bytes);
#ifdef DEBUG
    memset(p + DEVICE_ALIGNMENT, 0xff, (size_t)bytes); // NaN in every element type: reading what nobody wrote shows
#endif
    return p + DEVICE_ALIGNMENT;
}

void device_free(void *p) {
    if (!p) return;
    char *block = (char *)p - DEVICE_ALIGNMENT;
    int64_t bytes;
    memcpy(&bytes, block, sizeof bytes);
    __atomic_fetch_sub(&device_cpu_allocated, bytes, __ATOMIC_RELAXED);
    free(block);
}

void *pinned_malloc(int64_t bytes) { return host_alloc((size_t)bytes); }
void pinned_free(void *p) { free(p); }
int64_t device_allocated_bytes(void) { return __atomic_load_n(&device_cpu_allocated, __ATOMIC_RELAXED); }

int64_t device_free_bytes(void) {
    int64_t limit, available;
    memory_now(&limit, &available);
    return available;
}

// ---------------------------------------------------------------------------------------------------------------
// Order: everything is done when its call returns. An event is the time at which it was recorded.

Stream stream_create(void) { return host_alloc(1); } // only its address matters
void stream_destroy(Stream s) { free(s); }
void stream_sync(Stream s) { (void)s; }
void stream_wait_event(Stream s, Event e) { (void)s; (void)e; }

Event event_create(void) { return host_alloc(sizeof(double)); }
void event_destroy(Event e) { free(e); }
void event_record(Event e, Stream s) { (void)s; *(double *)e = clock_seconds(); }
void event_sync(Event e) { (void)e; }
double event_elapsed_ms(Event from, Event to) { return 1e3 * (*(const double *)to - *(const double *)from); }

void device_copy(void *dst, const void *src, int64_t bytes, CopyKind kind, Stream s) {
    (void)kind;
    (void)s;
    if (bytes > 0) memcpy(dst, src, (size_t)bytes);
}

void device_memset(void *p, int byte, int64_t bytes, Stream s) {
    (void)s;
    if (bytes > 0) memset(p, byte, (size_t)bytes);
}
