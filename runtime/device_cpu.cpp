// device_cpu.cpp - the device of the CPU backend: host memory, and streams on which kernels run the moment they are called.
//
// What is not done at once are the collectives of comm_mpi.cpp; streams keep them until a wait asks for them (device_cpu.h).
// Memory is limited as on a GPU: device_malloc refuses what this machine, or the container that we run in, does not have,
// with a message instead of a visit of the kernel's out-of-memory killer.
#include "device_cpu.h"
#include "device_races.h"
#include "host_memory.h"
#include <malloc.h>
#include <omp.h>

// Each block is preceded by a header that says how long it is.
#define DEVICE_ALIGNMENT 256

// Private state of this file: what device_init found, and bytes handed out (atomic: loader threads allocate too).
static DeviceInfo device_cpu;
static int64_t device_cpu_allocated, device_cpu_peak, device_cpu_frees;

// ---------------------------------------------------------------------------------------------------------------
// What machine is this

bool device_probe(int index, DeviceInfo *info) {
    (void)index; // ranks of one host share its CPU
    int64_t available;
    memset(info, 0, sizeof *info);
    char model[256];
    if (!proc_field("/proc/cpuinfo", "model name", model, sizeof model)) snprintf(model, sizeof model, "CPU");
    text_escape(info->name, sizeof info->name, model, strlen(model));
    host_memory_now(&info->memory_bytes, &available);
    return true;
}

void device_init(int index) {
    device_probe(index, &device_cpu);
    int64_t processors = omp_get_max_threads();
    if (!getenv("OMP_NUM_THREADS")) cgroup_each("cpu", look_at_cpu, &processors); // threads beyond the quota would only wait for each other
    processors = min_i64(processors, 4 * (int64_t)omp_get_num_procs()); // a slip in OMP_NUM_THREADS must not end in libgomp's memory
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
// Order: kernels, copies and fills are done when their call returns; other work waits in its stream's queue, oldest first,
// until something that is ordered behind it calls for it. Tickets number all queued work, so that an event needs to keep
// no more than the last ticket before it, and stays valid when its stream goes.

// The host's end of a copy, in DEBUG: until the host has waited, what it gets is not there, and what it gives must stay.
typedef struct HostCopy {
    char *host, *bytes_kept; // bytes_kept: what the host gets, or what it gave
    int64_t bytes;
    bool to_host;
    uint64_t ticket;
    struct HostCopy *next;
} HostCopy;

typedef struct CpuStream {
    DeviceWork *first, *last;
    HostCopy *first_copy, *last_copy;
    int number;       // below RACE_STREAMS_MAX, unique among the streams that live
    RaceClock clock;
    struct CpuStream *next; // all streams
} CpuStream;

typedef struct {
    CpuStream *stream; // on which it was recorded; null before that
    uint64_t ticket;   // it covers the stream's work up to this one
    double seconds;    // when that was done, as far as the host has noticed; 0: not yet
    RaceClock clock;   // what comes before it
} CpuEvent;

static CpuStream *streams;
static uint64_t last_ticket;
static RaceClock ended_streams; // a number that is used again goes on counting

static void finish_work(CpuStream *s, uint64_t until) {
    while (s->first && s->first->ticket <= until) {
        DeviceWork *w = s->first;
        s->first = w->next;
        w->finish(w);
    }
}

// The host has waited for s up to a ticket.
static void finish_copies(CpuStream *s, uint64_t until) {
    while (s->first_copy && s->first_copy->ticket <= until) {
        HostCopy *c = s->first_copy;
        s->first_copy = c->next;
        if (c->to_host) memcpy(c->host, c->bytes_kept, (size_t)c->bytes);
        else
            CHECK(memcmp(c->host, c->bytes_kept, (size_t)c->bytes) == 0,
                  "%" PRId64 " bytes of host memory were written before the copy from them was waited for", c->bytes);
        free(c->bytes_kept);
        free(c);
    }
}

static bool ranges_conflict(DeviceRange a, DeviceRange b) {
    const char *a_at = (const char *)a.at, *b_at = (const char *)b.at;
    return (a.written || b.written) && a.bytes > 0 && b.bytes > 0 && a_at < b_at + b.bytes && b_at < a_at + a.bytes;
}

void device_cpu_order(const char *name, Stream s, const DeviceRange *range, int n) {
    CpuStream *stream = (CpuStream *)s;
    uint64_t until = 0;
    for (int i = 0; i < n; i++) {
        if (DEVICE_STRICT) race_touch(&stream->clock, stream->number, name, range[i].at, range[i].bytes, range[i].written);
        for (const DeviceWork *w = stream->first; w; w = w->next)
            if (w->ticket > until && (ranges_conflict(range[i], w->range[0]) || ranges_conflict(range[i], w->range[1]))) until = w->ticket;
    }
    finish_work(stream, until);
}

void device_cpu_enqueue(Stream s, DeviceWork *w) {
    CpuStream *stream = (CpuStream *)s;
    w->ticket = ++last_ticket;
    w->next = NULL;
    if (stream->first) stream->last->next = w;
    else stream->first = w;
    stream->last = w;
}

void *device_cpu_touch(const char *name, Stream s, const void *at, int64_t bytes, bool written) {
    CpuStream *stream = (CpuStream *)s;
    void *p = device_cpu_address(at);
    if (stream && DEVICE_STRICT && device_cpu_is_device(at)) race_touch(&stream->clock, stream->number, name, p, bytes, written);
    if (stream) finish_work(stream, UINT64_MAX);
    return p;
}

Stream stream_create(void) {
    CpuStream *s = (CpuStream *)host_alloc(sizeof *s);
    for (CpuStream *other = streams; other;) {
        if (other->number == s->number) { s->number++; other = streams; }
        else other = other->next;
    }
    CHECK(s->number < RACE_STREAMS_MAX, "more than %d streams", RACE_STREAMS_MAX);
    s->clock.at[s->number] = ended_streams.at[s->number];
    s->next = streams;
    streams = s;
    return s;
}
Stream stream_create_urgent(void) { return stream_create(); }

void stream_destroy(Stream s) {
    if (!s) return;
    CpuStream *stream = (CpuStream *)s, **link = &streams;
    stream_sync(s);
    race_join(&ended_streams, &stream->clock);
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
    free(s);
}

void stream_sync(Stream s) {
    CpuStream *stream = (CpuStream *)s;
    if (!s) return;
    finish_work(stream, UINT64_MAX);
    finish_copies(stream, UINT64_MAX);
    race_join(&race_host, &stream->clock);
}

static void event_finish(CpuEvent *event) {
    CpuStream *s = streams;
    while (s && s != event->stream) s = s->next; // a stream that is gone was waited for before it went
    if (s) {
        finish_work(s, event->ticket);
        finish_copies(s, event->ticket);
    }
    if (event->stream && event->seconds == 0) event->seconds = clock_seconds();
}

// The host waits where a GPU's stream would, since the work that follows on s is the host's own.
void stream_wait_event(Stream s, Event e) {
    event_finish((CpuEvent *)e);
    if (s) race_join(&((CpuStream *)s)->clock, &((CpuEvent *)e)->clock);
}

void event_sync(Event e) {
    event_finish((CpuEvent *)e);
    race_join(&race_host, &((CpuEvent *)e)->clock);
}

Event event_create(void) { return host_alloc(sizeof(CpuEvent)); }
void event_destroy(Event e) { free(e); }

void event_record(Event e, Stream s) {
    CpuEvent *event = (CpuEvent *)e;
    CpuStream *stream = (CpuStream *)s;
    event->stream = stream;
    event->ticket = last_ticket;
    event->seconds = stream && stream->first ? 0 : clock_seconds();
    if (stream) event->clock = stream->clock;
}

double event_elapsed_ms(Event from, Event to) {
    event_sync(from);
    event_sync(to);
    return 1e3 * (((const CpuEvent *)to)->seconds - ((const CpuEvent *)from)->seconds);
}

// ---------------------------------------------------------------------------------------------------------------
// Memory

static void peak_note(int64_t allocated) {
    int64_t peak = __atomic_load_n(&device_cpu_peak, __ATOMIC_RELAXED);
    while (peak < allocated && !__atomic_compare_exchange_n(&device_cpu_peak, &peak, allocated, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

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
    peak_note(before + bytes);
#ifdef DEBUG
    memset(p + DEVICE_ALIGNMENT, 0xff, (size_t)bytes); // NaN in every element type: reading what nobody wrote shows
#endif
    return (void *)((uintptr_t)(p + DEVICE_ALIGNMENT) | DEVICE_MARK);
}

void device_free(void *p) {
    if (!p) return;
    CHECK(device_cpu_is_device(p), "device_free of host memory at %p", p);
    char *block = (char *)device_cpu_address(p) - DEVICE_ALIGNMENT;
    int64_t bytes;
    memcpy(&bytes, block, sizeof bytes);
    for (CpuStream *s = streams; s; s = s->next) finish_work(s, UINT64_MAX); // as on a GPU: nothing may be in flight to this memory
    if (DEVICE_STRICT) race_forget(block + DEVICE_ALIGNMENT, bytes);
    __atomic_fetch_sub(&device_cpu_allocated, bytes, __ATOMIC_RELAXED);
    __atomic_fetch_add(&device_cpu_frees, 1, __ATOMIC_RELAXED);
    free(block);
}

void *pinned_malloc(int64_t bytes) { return host_alloc((size_t)bytes); }
void pinned_free(void *p) { free(p); }
void *pinned_region_malloc(int64_t bytes, int64_t pinned_bytes, bool *pin) {
    (void)pinned_bytes, (void)pin; // there is nobody to copy behind the host's back
    return host_pages_malloc(bytes);
}
void pinned_region_free(void *p, int64_t bytes, bool pinned) {
    (void)pinned;
    if (p) munmap(p, (size_t)max_i64(bytes, 1));
}
int64_t device_allocated_bytes(void) { return __atomic_load_n(&device_cpu_allocated, __ATOMIC_RELAXED); }
int64_t device_peak_bytes(void) { return __atomic_load_n(&device_cpu_peak, __ATOMIC_RELAXED); }
int64_t device_frees(void) { return __atomic_load_n(&device_cpu_frees, __ATOMIC_RELAXED); }
void device_peak_reset(void) { __atomic_store_n(&device_cpu_peak, device_allocated_bytes(), __ATOMIC_RELAXED); }
void device_count(int64_t bytes) { peak_note(__atomic_add_fetch(&device_cpu_allocated, bytes, __ATOMIC_RELAXED)); }

int64_t device_free_bytes(void) {
    int64_t limit, available;
    host_memory_now(&limit, &available);
    return available;
}

// Copies on one stream may hand host memory on to each other without the host: what one brought, or was given, the next may
// read or overwrite.
static void host_copies_order(CpuStream *s, const void *host, int64_t bytes, bool written) {
    uint64_t until = 0;
    const DeviceRange range = {host, bytes, written};
    for (const HostCopy *c = s->first_copy; c; c = c->next) {
        const DeviceRange earlier = {c->host, c->bytes, c->to_host};
        if (ranges_conflict(range, earlier)) until = c->ticket;
    }
    finish_copies(s, until);
}

static void host_copy_keep(CpuStream *s, void *host, int64_t bytes, bool to_host) {
    HostCopy *c = (HostCopy *)host_alloc(sizeof *c);
    c->host = (char *)host;
    c->bytes_kept = (char *)host_alloc((size_t)bytes);
    memcpy(c->bytes_kept, host, (size_t)bytes);
    c->bytes = bytes;
    c->to_host = to_host;
    c->ticket = ++last_ticket;
    if (s->first_copy) s->last_copy->next = c;
    else s->first_copy = c;
    s->last_copy = c;
    if (to_host) memset(host, 0xff, (size_t)bytes);
}

void device_copy(void *dst, const void *src, int64_t bytes, CopyKind kind, Stream s) {
    CpuStream *stream = (CpuStream *)s;
    if (bytes <= 0) return;
    CHECK((kind == COPY_TO_HOST ? device_cpu_is_host(dst) : device_cpu_is_device(dst)) &&
              (kind == COPY_TO_DEVICE ? device_cpu_is_host(src) : device_cpu_is_device(src)),
          "device_copy: copy kind %d, but the target is at %p and the source at %p", (int)kind, dst, src);
    void *to = device_cpu_touch("device_copy", s, dst, bytes, true);
    const void *from = device_cpu_touch("device_copy", s, src, bytes, false);
    const bool strict = DEVICE_STRICT && stream && kind != COPY_ON_DEVICE, to_host = kind == COPY_TO_HOST;
    void *host = to_host ? to : (void *)from;
    if (strict) host_copies_order(stream, host, bytes, to_host);
    memcpy(to, from, (size_t)bytes);
    if (strict) host_copy_keep(stream, host, bytes, to_host);
}

void device_memset(void *p, int byte, int64_t bytes, Stream s) {
    if (bytes <= 0) return;
    CHECK(device_cpu_is_device(p), "device_memset of host memory at %p", p);
    memset(device_cpu_touch("device_memset", s, p, bytes, true), byte, (size_t)bytes);
}

// ---------------------------------------------------------------------------------------------------------------
// Graphs: a job and the arguments that it was recorded with

typedef struct {
    DeviceJob job;
    void *args; // a copy
} CpuGraph;

Graph graph_record(DeviceJob job, const void *args, int64_t bytes, Stream s) {
    (void)s;
    CpuGraph *g = (CpuGraph *)host_alloc(sizeof *g);
    g->job = job;
    g->args = host_alloc((size_t)bytes);
    memcpy(g->args, args, (size_t)bytes);
    return g;
}

void graph_launch(Graph g, Stream s) {
    (void)s; // the arguments hold it
    ((CpuGraph *)g)->job(((CpuGraph *)g)->args);
}

void graph_free(Graph g) {
    if (!g) return;
    free(((CpuGraph *)g)->args);
    free(g);
}
