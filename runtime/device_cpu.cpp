// device_cpu.cpp - the device of the CPU backend: host memory, and streams on which kernels run the moment they are called.
//
// What is not done at once are the collectives of comm_mpi.cpp; streams keep them until a wait asks for them (device_cpu.h).
// Memory is limited as on a GPU: device_malloc refuses what this machine, or the container that we run in, does not have,
// with a message instead of a visit of the kernel's out-of-memory killer.
#include "device_cpu.h"
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

// The first one or two numbers in a file; -1 for what is not there ("max" is no number).
static void file_numbers(const char *folder, const char *name, int64_t *first, int64_t *second) {
    char path[1280];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "r");
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
    FILE *f = fopen("/proc/self/cgroup", "r");
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
    int64_t bytes[2] = {*limit, *available};
    cgroup_each("memory", look_at_memory, bytes);
    *limit = bytes[0];
    *available = bytes[1];
}

void device_init(int index) {
    (void)index; // ranks of one host share its CPU
    int64_t available;
    memset(&device_cpu, 0, sizeof device_cpu);
    char model[256];
    if (!proc_field("/proc/cpuinfo", "model name", model, sizeof model)) snprintf(model, sizeof model, "CPU");
    text_escape(device_cpu.name, sizeof device_cpu.name, model, strlen(model));
    memory_now(&device_cpu.memory_bytes, &available);
    int64_t processors = omp_get_max_threads();
    if (!getenv("OMP_NUM_THREADS")) cgroup_each("cpu", look_at_cpu, &processors); // threads beyond the quota would only wait for each other
    omp_set_num_threads((int)processors);
    device_cpu.threads = (int)processors;
#ifdef __GLIBC__
    // Kernels allocate scratch in every call. By default the C library gives blocks of this size back to the system when they
    // are freed; faulting their pages in again would cost a small matrix product a quarter of its speed.
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 512 << 20);
#endif
}

DeviceInfo device_info(void) { return device_cpu; }

// libgomp's threads spin for about 3 ms whenever they wait for each other, which takes the core from the very thread that they
// wait for where cores are shared: updates of a small model took ten times as long on a busy machine. So they sleep
// after some 15 us instead, unless the user has chosen. libgomp reads the variable once, before main: this runs earlier still if
// libgomp is linked statically, as the Makefile does where it can; else it has no effect.
__attribute__((constructor(101))) static void wait_patiently(void) {
    if (!getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT")) setenv("GOMP_SPINCOUNT", "1000", 1);
}

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
// Order: kernels, copies and fills are done when their call returns; other work waits in its stream's queue, oldest first,
// until something that is ordered behind it calls for it. Tickets number all queued work, so that an event needs to keep
// no more than the last ticket before it, and stays valid when its stream goes.

typedef struct CpuStream {
    DeviceWork *first, *last;
    struct CpuStream *next; // all streams
} CpuStream;

typedef struct {
    CpuStream *stream; // on which it was recorded; null before that
    uint64_t ticket;   // it covers the stream's work up to this one
    double seconds;    // when that was done, as far as the host has noticed; 0: not yet
} CpuEvent;

static CpuStream *streams;
static uint64_t last_ticket;

static void finish_until(CpuStream *s, uint64_t ticket) {
    while (s->first && s->first->ticket <= ticket) {
        DeviceWork *w = s->first;
        s->first = w->next;
        w->finish(w);
    }
}

static bool ranges_conflict(DeviceRange a, DeviceRange b) {
    const char *a_at = (const char *)a.at, *b_at = (const char *)b.at;
    return (a.written || b.written) && a.bytes > 0 && b.bytes > 0 && a_at < b_at + b.bytes && b_at < a_at + a.bytes;
}

void device_cpu_order(Stream s, const DeviceRange *range, int n) {
    uint64_t until = 0;
    for (const DeviceWork *w = ((CpuStream *)s)->first; w; w = w->next)
        for (int i = 0; i < n; i++)
            if (ranges_conflict(range[i], w->range[0]) || ranges_conflict(range[i], w->range[1])) until = w->ticket;
    finish_until((CpuStream *)s, until);
}

void device_cpu_enqueue(Stream s, DeviceWork *w) {
    CpuStream *stream = (CpuStream *)s;
    w->ticket = ++last_ticket;
    w->next = NULL;
    if (stream->first) stream->last->next = w;
    else stream->first = w;
    stream->last = w;
}

void device_cpu_settle(Stream s) {
    if (s) finish_until((CpuStream *)s, UINT64_MAX);
}

void *device_cpu_touch(Stream s, const void *at, int64_t bytes, bool written) {
    (void)bytes;
    (void)written;
    device_cpu_settle(s);
    return (void *)at;
}

Stream stream_create(void) {
    CpuStream *s = (CpuStream *)host_alloc(sizeof *s);
    s->next = streams;
    streams = s;
    return s;
}

void stream_destroy(Stream s) {
    if (!s) return;
    device_cpu_settle(s);
    CpuStream **link = &streams;
    while (*link != (CpuStream *)s) link = &(*link)->next;
    *link = (*link)->next;
    free(s);
}

void stream_sync(Stream s) { device_cpu_settle(s); }

// The host waits where a GPU's stream would, since the work that follows on s is the host's own.
void stream_wait_event(Stream s, Event e) {
    (void)s;
    event_sync(e);
}

Event event_create(void) { return host_alloc(sizeof(CpuEvent)); }
void event_destroy(Event e) { free(e); }

void event_record(Event e, Stream s) {
    CpuEvent *event = (CpuEvent *)e;
    CpuStream *stream = (CpuStream *)s;
    event->stream = stream;
    event->ticket = last_ticket;
    event->seconds = stream && stream->first ? 0 : clock_seconds();
}

void event_sync(Event e) {
    CpuEvent *event = (CpuEvent *)e;
    CpuStream *s = streams;
    while (s && s != event->stream) s = s->next; // a stream that is gone was settled before it went
    if (s) finish_until(s, event->ticket);
    if (event->stream && event->seconds == 0) event->seconds = clock_seconds();
}

double event_elapsed_ms(Event from, Event to) {
    event_sync(from);
    event_sync(to);
    return 1e3 * (((const CpuEvent *)to)->seconds - ((const CpuEvent *)from)->seconds);
}

void device_copy(void *dst, const void *src, int64_t bytes, CopyKind kind, Stream s) {
    (void)kind;
    device_cpu_settle(s);
    if (bytes > 0) memcpy(dst, src, (size_t)bytes);
}

void device_memset(void *p, int byte, int64_t bytes, Stream s) {
    device_cpu_settle(s);
    if (bytes > 0) memset(p, byte, (size_t)bytes);
}
