// comm_nccl.cpp - comm.h for GPUs: collectives by NCCL, the start and small exchanges between hosts by a TCP star.
//
// No MPI: the launcher's environment says who is who (launch.h), rendezvous.h connects all ranks to rank 0, and over that
// star go the identifiers from which NCCL makes its communicators. One communicator a group (a channel).
//
// Nothing waits for ever. Communicators are non-blocking, so that a call of NCCL that waits for a peer returns
// ncclInProgress and is asked about until it is done or a limit passes. Four times a second a helper thread looks for
// errors that NCCL found in its own threads, and for ranks whose connection to the star has closed. What a GPU does
// meanwhile cannot be stopped and need not be: the program ends, and the driver clears up.
//
// The watch (watch.h) learns what the GPU does from the GPU: around each collective the stream writes its number into
// pinned memory, which the beat thread reads. A thread that asked the driver could block behind the very call that hangs.
//
// Ranks of one host exchange weights and gradients by their GPUs' copy engines (NCCL 2.28: memory registered as a symmetric
// window, CTA policy "zero"), because NCCL's kernels take processors away from products that were cut for all of them: on two
// H200 a reduction hidden behind the backward pass of GPT-2 1558M cost 1.6 times its own duration. NCCL sets the engines up in
// calls that a non-blocking communicator refuses (seen in 2.28.3), so such groups block; the watch ends what hangs in them.
//
// NCCL adds 16-bit types in fp32 and rounds at every hop, so with more than two ranks more than once. Its order of
// addition depends on the sizes and on the GPUs' connections, but is the same in every call and every run.
#include "rendezvous.h"
#include "thread.h"
#include "watch.h"
#include <cuda_runtime.h>
#include <nccl.h>
#include <sched.h>

#if NCCL_VERSION_CODE < 21400
#error "NCCL 2.14 or later is needed (non-blocking communicators)"
#endif

// How long ranks may take to make a group together; a test may lower it.
#ifndef GROUP_SECONDS
#define GROUP_SECONDS 120
#endif
enum { WINDOW_BYTES = 2 << 20 }; // windows take whole pages
// Copy engines came with this version of NCCL.
#define COPY_ENGINES_SINCE 22803
#if NCCL_VERSION_CODE < COPY_ENGINES_SINCE
typedef void *ncclWindow_t;
static ncclResult_t ncclMemAlloc(void **, size_t) { return ncclInvalidUsage; }
static ncclResult_t ncclMemFree(void *) { return ncclInvalidUsage; }
#endif
enum { CHANNELS_MAX = 64, FINISH_SECONDS = 10, HELPER_MS = 250 };

typedef struct {
    ncclComm_t comm; // null: free
    int size, rank;  // of the group
    bool in_batch;   // has a part in the batch being collected
    int watch;       // its number in watch.h
    uint64_t number; // of the last collective, as watch.h counts
    Stream stream;   // of the last collective
} Channel;

// Memory of comm_malloc that is registered with a communicator.
typedef struct {
    void *data; // null: free
    int64_t bytes;
    int channel;
    ncclWindow_t handle;
} Window;

static Star star;
static Window *windows;
static int n_windows;
static Channel channels[CHANNELS_MAX]; // channel 0 stays free: it is what groups of one rank carry
static bool batch;
static WatchCounter *counters; // (CHANNELS_MAX) pinned, for ever: a stream may still write when a group has gone
static pthread_mutex_t channels_lock = PTHREAD_MUTEX_INITIALIZER; // the helper reads what groups come and go
static pthread_cond_t helper_wakes = PTHREAD_COND_INITIALIZER;
static pthread_t helper_thread;
static bool helper_runs;

// ---------------------------------------------------------------------------------------------------------------
// Errors

__attribute__((noreturn)) static void nccl_failed(ncclResult_t result, const Channel *c, const char *call) {
    char text[600], where[64] = "";
    const char *last = ncclGetLastError(c ? c->comm : NULL);
    size_t length = last ? strlen(last) : 0;
    while (length && (last[length - 1] == '\n' || last[length - 1] == ' ')) length--;
    text_escape(text, sizeof text, last ? last : "", length);
    if (c) snprintf(where, sizeof where, " (place %d in a group of %d)", c->rank, c->size);
    int code = result == ncclInvalidUsage ? EXIT_CONFIG : result == ncclInvalidArgument ? EXIT_INTERNAL : EXIT_PEER;
    die(code, "NCCL's %s failed%s: %s%s%s; NCCL_DEBUG=WARN shows more", call, where, ncclGetErrorString(result), length ? ": " : "", text);
}

// Waits until what `call` has begun on the channel is under way, and its stream may be used again.
static void nccl_settle(ncclResult_t result, const Channel *c, const char *call, double limit_s) {
    double start = clock_seconds();
    while (result == ncclInProgress) {
        double waited = clock_seconds() - start;
        if (waited > limit_s)
            die(EXIT_PEER, "NCCL's %s (place %d in a group of %d) did not get through within %.0f s: another rank hangs, or the network "
                "between the GPUs does not work; NCCL_DEBUG=INFO shows more", call, c->rank, c->size, limit_s);
        if (waited < 1e-3) sched_yield(); // the usual case: tens of microseconds
        else {
            struct timespec pause = {0, 100000};
            nanosleep(&pause, NULL);
        }
        ncclResult_t asked = ncclCommGetAsyncError(c->comm, &result);
        if (asked != ncclSuccess) nccl_failed(asked, c, "ncclCommGetAsyncError");
    }
    if (result != ncclSuccess) nccl_failed(result, c, call);
}

// ---------------------------------------------------------------------------------------------------------------
// Progress as the GPU sees it

// The driver's cuStreamWriteValue64, found at run time: nothing else here needs the driver's library. 0: success.
typedef int (*StreamWrite)(cudaStream_t stream, unsigned long long address, uint64_t value, unsigned flags);
static StreamWrite stream_write;

static void counters_make(void) {
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *entry = NULL;
#if CUDART_VERSION >= 12050
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuStreamWriteValue64", &entry, 12000, cudaEnableDefault, &found);
#else
    cudaError_t error = cudaGetDriverEntryPoint("cuStreamWriteValue64", &entry, cudaEnableDefault, &found);
#endif
    if (error == cudaSuccess && found == cudaDriverEntryPointSuccess) stream_write = (StreamWrite)entry;
    counters = (WatchCounter *)pinned_malloc(sizeof(WatchCounter) * CHANNELS_MAX);
}

// The stream writes `number` when it gets here.
static void counter_write(volatile uint64_t *counter, uint64_t number, Stream s) {
    if (number == 0) return; // nobody watches
    int error = stream_write((cudaStream_t)s, (unsigned long long)(uintptr_t)counter, number, 0);
    if (error) die(EXIT_INTERNAL, "CUDA driver error %d from cuStreamWriteValue64", error);
}

// ---------------------------------------------------------------------------------------------------------------
// The helper thread

static void *helper(void *) {
    pthread_mutex_lock(&channels_lock);
    while (helper_runs) {
        for (int i = 1; i < CHANNELS_MAX; i++) {
            ncclResult_t error = ncclSuccess;
            if (!channels[i].comm) continue;
            ncclResult_t asked = ncclCommGetAsyncError(channels[i].comm, &error);
            if (asked != ncclSuccess) nccl_failed(asked, &channels[i], "ncclCommGetAsyncError");
            if (error != ncclSuccess && error != ncclInProgress) nccl_failed(error, &channels[i], "collective");
        }
        star_watch(&star);
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += HELPER_MS * 1000000;
        if (until.tv_nsec >= 1000000000) { until.tv_sec++; until.tv_nsec -= 1000000000; }
        pthread_cond_timedwait(&helper_wakes, &channels_lock, &until);
    }
    pthread_mutex_unlock(&channels_lock);
    return NULL;
}

static void helper_start(void) {
    helper_runs = true;
    int error = thread_start(&helper_thread, helper, NULL);
    if (error) die(EXIT_CONFIG, "cannot make a thread: %s; raise the limit on processes (ulimit -u)", strerror(error));
}

static void helper_stop(void) {
    pthread_mutex_lock(&channels_lock);
    helper_runs = false;
    pthread_cond_signal(&helper_wakes);
    pthread_mutex_unlock(&channels_lock);
    pthread_join(helper_thread, NULL);
}

// ---------------------------------------------------------------------------------------------------------------
// Start and end

// Ends all ranks when one has no GPU of its own; the first of them tells.
static void require_gpu(CommWorld w) {
    int n_gpus = 0;
    bool missing = cudaGetDeviceCount(&n_gpus) == cudaSuccess && w.local_rank >= n_gpus; // other errors: device_init explains them
    double first = missing ? w.rank : w.world;
    star_all_reduce(&star, &first, 1, COMM_MIN);
    if (first == w.world) return;
    if (first == w.rank)
        die(EXIT_CONFIG, "local rank %d of %d on this host, which shows %d GPU%s; start at most one rank a GPU, and let every rank see all GPUs "
            "of its host (CUDA_VISIBLE_DEVICES; with Slurm --gpus-per-node, not --gpus-per-task)", w.local_rank, w.local_world, n_gpus,
            n_gpus == 1 ? "" : "s");
    usleep(500000); // as in die_told
    _exit(EXIT_CONFIG);
}

CommWorld comm_start(void) {
    Launch launch = launch_read();
    // NVLink multicast (NVLS) reserves resources of the whole host's switches; where that goes wrong, all GPUs of the host are out of
    // service, also for others who share it. Whoever has the host to himself may set the variable to 1.
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    // A stream that waits for another rank must not hold up one that this rank waits for: by default streams share eight queues of the
    // GPU, and a stage of a pipeline has more (pipeline.cu).
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    rendezvous(&star, &launch, START_SECONDS);
    CommWorld w = {star.rank, star.world, star.local_rank, star.local_world};
    if (w.world == 1) return w;
    require_gpu(w);
    int version = 0;
    if (w.rank == 0 && ncclGetVersion(&version) == ncclSuccess)
        note("%d ranks on %d host%s, started by %s; NCCL %d.%d.%d", w.world, star.n_hosts, star.n_hosts == 1 ? "" : "s", launch.launcher,
             version / 10000, version / 100 % 100, version % 100);
    helper_start();
    return w;
}

static void channel_free(Channel *c) {
    pthread_mutex_lock(&channels_lock);
    ncclComm_t comm = c->comm;
    c->comm = NULL;
    pthread_mutex_unlock(&channels_lock);
    Channel last = *c;
    last.comm = comm;
    watch_channel_close(c->watch);
    nccl_settle(ncclCommFinalize(comm), &last, "ncclCommFinalize", FINISH_SECONDS);
    ncclResult_t result = ncclCommDestroy(comm);
    if (result != ncclSuccess && result != ncclInProgress) nccl_failed(result, NULL, "ncclCommDestroy");
}

void comm_finish(void) {
    if (star.world > 1) {
        for (int i = 1; i < CHANNELS_MAX; i++)
            if (channels[i].comm) channel_free(&channels[i]);
        helper_stop();
        star_barrier(&star); // behind it nobody watches any more, and connections may close
    }
    star_close(&star);
}

void comm_set_timeout(double seconds) { star.call_seconds = seconds; }

// ---------------------------------------------------------------------------------------------------------------
// Groups

// Has this program's NCCL copy engines to offer, and are all ranks on one host?
static bool copy_engines_usable(void) {
    int version = 0;
    return NCCL_VERSION_CODE >= COPY_ENGINES_SINCE && ncclGetVersion(&version) == ncclSuccess && version >= COPY_ENGINES_SINCE && star.n_hosts == 1;
}

// Registers memory, the same on all ranks of the communicator. Null: the GPUs do not reach each other's memory.
static ncclWindow_t window_register(Channel *c, void *data, int64_t bytes) {
    ncclWindow_t handle = NULL;
#if NCCL_VERSION_CODE >= COPY_ENGINES_SINCE
    nccl_settle(ncclCommWindowRegister(c->comm, data, (size_t)bytes, &handle, NCCL_WIN_COLL_SYMMETRIC), c, "ncclCommWindowRegister", GROUP_SECONDS);
#else
    (void)c, (void)data, (void)bytes;
#endif
    return handle;
}

static void window_deregister(Channel *c, ncclWindow_t handle) {
#if NCCL_VERSION_CODE >= COPY_ENGINES_SINCE
    if (handle) nccl_settle(ncclCommWindowDeregister(c->comm, handle), c, "ncclCommWindowDeregister", GROUP_SECONDS);
#else
    (void)c, (void)handle;
#endif
}

static void *memory_of_nccl(int64_t bytes) {
    void *p = NULL;
    ncclResult_t result = ncclMemAlloc(&p, (size_t)bytes);
    if (result != ncclSuccess)
        die(EXIT_CONFIG, "out of GPU memory: %.1f MB asked for, %.1f MB free; lower the micro-batch, the sequence length or the model", (double)bytes * 1e-6, (double)device_free_bytes() * 1e-6);
    return p;
}

static void nccl_memory_free(void *p, const Channel *c) {
    ncclResult_t result = ncclMemFree(p);
    if (result != ncclSuccess) nccl_failed(result, c, "ncclMemFree");
}

static bool window_possible(Channel *c) {
    void *probe = memory_of_nccl(WINDOW_BYTES);
    ncclWindow_t handle = window_register(c, probe, WINDOW_BYTES);
    window_deregister(c, handle);
    nccl_memory_free(probe, c);
    return handle != NULL;
}

// The communicator of a group. direct: by copy engines.
static ncclResult_t comm_init(Channel *c, ncclUniqueId id, bool direct) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = direct;
#if NCCL_VERSION_CODE >= COPY_ENGINES_SINCE
    if (direct) config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
#endif
    return ncclCommInitRankConfig(&c->comm, c->size, id, c->rank, &config);
}

Group comm_group_create(const int *rank, int n, bool direct) {
    // One call may make several groups that have no rank in common, so every rank offers an identifier if it is its
    // group's first, all see all offers, and each takes that of its own first rank.
    typedef struct {
        int32_t n, first;
        ncclUniqueId id;
    } Offer;
    static uint32_t calls; // the same on all ranks
    calls++;
    const bool wanted = direct && copy_engines_usable();
    Group g = {n, 0, 0, wanted && n > 1};
    for (int i = 0; i < n; i++) {
        CHECK(rank[i] >= 0 && rank[i] < star.world && (i == 0 || rank[i] > rank[i - 1]), "rank %d at %d of a group", rank[i], i);
        if (rank[i] == star.rank) g.rank = i;
    }
    CHECK(n == 0 || rank[g.rank] == star.rank, "rank %d is no member of its group", star.rank);
    if (star.world == 1) return g;
    Offer mine, *offer = (Offer *)host_alloc(sizeof(Offer) * (size_t)star.world);
    memset(&mine, 0, sizeof mine);
    mine.n = n;
    mine.first = n ? rank[0] : -1;
    if (n > 1 && g.rank == 0) {
        ncclResult_t result = ncclGetUniqueId(&mine.id);
        if (result != ncclSuccess) nccl_failed(result, NULL, "ncclGetUniqueId");
    }
    star_gather(&star, offer, &mine, sizeof mine);
    star_broadcast(&star, offer, (int64_t)sizeof(Offer) * star.world, 0);
    for (int i = 0; i < n; i++)
        CHECK(offer[rank[i]].n == n && offer[rank[i]].first == rank[0], "ranks %d and %d have different groups", star.rank, rank[i]);
    if (n > 1) {
        Channel c;
        memset(&c, 0, sizeof c);
        c.size = n;
        c.rank = g.rank;
        for (g.channel = 1; g.channel < CHANNELS_MAX && channels[g.channel].comm; g.channel++) {}
        CHECK(g.channel < CHANNELS_MAX, "%d groups", g.channel);
        nccl_settle(comm_init(&c, offer[rank[0]].id, g.direct), &c, "ncclCommInitRankConfig", GROUP_SECONDS);
        if (g.direct) g.direct = window_possible(&c);
        if (!counters) counters_make();
        counters[g.channel].started = counters[g.channel].done = 0;
        c.watch = stream_write ? watch_channel_open(calls << 16 | (uint32_t)rank[0], &counters[g.channel]) : -1;
        pthread_mutex_lock(&channels_lock);
        channels[g.channel] = c;
        pthread_mutex_unlock(&channels_lock);
    }
    free(offer);
    if (wanted) { // a rank that cannot decides for all: they must use the same collectives
        double possible = n <= 1 || g.direct;
        star_all_reduce(&star, &possible, 1, COMM_MIN);
        g.direct = g.direct && possible > 0;
    }
    return g;
}

void comm_group_free(Group *g) {
    if (g->size > 1) channel_free(&channels[g->channel]);
    g->size = g->channel = 0;
}

void *comm_malloc(Group g, int64_t bytes) {
    if (!g.direct || bytes < WINDOW_BYTES) return device_malloc(bytes);
    Window w = {NULL, round_up(bytes, WINDOW_BYTES), g.channel, NULL};
    w.data = memory_of_nccl(w.bytes);
    w.handle = window_register(&channels[g.channel], w.data, w.bytes);
    device_count(w.bytes);
    int at = 0;
    while (at < n_windows && windows[at].data) at++;
    if (at == n_windows) {
        Window *more = (Window *)host_alloc(sizeof(Window) * (size_t)(2 * n_windows + 16));
        if (n_windows) memcpy(more, windows, sizeof(Window) * (size_t)n_windows);
        free(windows);
        windows = more;
        n_windows = 2 * n_windows + 16;
    }
    windows[at] = w;
    return w.data;
}

void comm_free(Group g, void *p) {
    for (int i = 0; p && i < n_windows; i++) {
        Window *w = &windows[i];
        if (w->data != p) continue;
        CHECK(w->channel == g.channel, "memory of channel %d freed with channel %d", w->channel, g.channel);
        Channel *c = &channels[g.channel];
        window_deregister(c, w->handle);
        nccl_memory_free(p, c);
        device_count(-w->bytes);
        w->data = NULL;
        return;
    }
    device_free(p);
}

// The group's communicator; null when there is nobody to talk to.
static Channel *channel_of(Group g) {
    CHECK(g.size >= 1, "a collective on a group that this rank is no member of");
    if (g.size == 1) return NULL;
    CHECK(g.channel > 0 && g.channel < CHANNELS_MAX, "group of %d on channel %d", g.size, g.channel);
    Channel *c = &channels[g.channel];
    CHECK(c->comm && c->size == g.size, "group of %d on channel %d of %d ranks", g.size, g.channel, c->size);
    return c;
}

// ---------------------------------------------------------------------------------------------------------------
// Collectives

static ncclDataType_t nccl_type(DType t) { return t == DTYPE_FP32 ? ncclFloat32 : t == DTYPE_BF16 ? ncclBfloat16 : ncclFloat16; }

static void copy_unless_same(void *dst, const void *src, int64_t bytes, Stream s) {
    if (dst != src) device_copy(dst, src, bytes, COPY_ON_DEVICE, s);
}

// Before NCCL is called.
static void collective_begin(Channel *c, WatchOp op, int64_t bytes, Stream s) {
    c->number = watch_collective_enter(c->watch, op, bytes);
    c->stream = s;
    counter_write(&counters[c - channels].started, c->number, s);
}

// What NCCL's call returned. Inside a batch nothing has begun yet, so there is nothing to wait for.
static void collective_end(Channel *c, ncclResult_t result, const char *call) {
    if (batch) {
        if (result != ncclSuccess && result != ncclInProgress) nccl_failed(result, c, call);
        c->in_batch = true;
        return;
    }
    nccl_settle(result, c, call, star.call_seconds);
    counter_write(&counters[c - channels].done, c->number, c->stream);
}

void comm_all_gather(Group g, void *full, const void *shard, int64_t n, DType t, Stream s) {
    Channel *c = channel_of(g);
    if (!c) copy_unless_same(full, shard, n * dtype_bytes(t), s);
    if (!c || n == 0) return;
    collective_begin(c, WATCH_ALL_GATHER, n * dtype_bytes(t), s);
    collective_end(c, ncclAllGather(shard, full, (size_t)n, nccl_type(t), c->comm, (cudaStream_t)s), "ncclAllGather");
}

void comm_reduce_scatter(Group g, void *shard, void *full, int64_t n, DType t, Stream s) {
    Channel *c = channel_of(g);
    if (!c) copy_unless_same(shard, full, n * dtype_bytes(t), s);
    if (!c || n == 0) return;
    collective_begin(c, WATCH_REDUCE_SCATTER, n * dtype_bytes(t), s);
    collective_end(c, ncclReduceScatter(full, shard, (size_t)n, nccl_type(t), ncclSum, c->comm, (cudaStream_t)s), "ncclReduceScatter");
}

void comm_all_to_all(Group g, void *parts, const void *full, int64_t n, DType t, Stream s) {
    Channel *c = channel_of(g);
    if (!c) copy_unless_same(parts, full, n * dtype_bytes(t), s);
    if (!c || n == 0) return;
#if NCCL_VERSION_CODE >= COPY_ENGINES_SINCE
    collective_begin(c, WATCH_ALL_TO_ALL, n * dtype_bytes(t), s);
    collective_end(c, ncclAlltoAll(full, parts, (size_t)n, nccl_type(t), c->comm, (cudaStream_t)s), "ncclAlltoAll");
#else
    die(EXIT_CONFIG, "sequence_parallel_size above 1 needs NCCL 2.28.3 or later, and this program was built with %d.%d.%d; take tensor_model_parallel_size instead", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
#endif
}

static void all_reduce(Group g, void *x, int64_t n, int64_t bytes, ncclDataType_t type, ncclRedOp_t op, Stream s) {
    Channel *c = channel_of(g);
    if (!c || n == 0) return;
    collective_begin(c, WATCH_ALL_REDUCE, bytes, s);
    collective_end(c, ncclAllReduce(x, x, (size_t)n, type, op, c->comm, (cudaStream_t)s), "ncclAllReduce");
}

void comm_all_reduce(Group g, void *x, int64_t n, DType t, Stream s) { all_reduce(g, x, n, n * dtype_bytes(t), nccl_type(t), ncclSum, s); }
void comm_all_reduce_double(Group g, double *x, int64_t n, CommOp op, Stream s) {
    all_reduce(g, x, n, n * (int64_t)sizeof(double), ncclDouble, op == COMM_SUM ? ncclSum : op == COMM_MAX ? ncclMax : ncclMin, s);
}

void comm_broadcast(Group g, void *x, int64_t bytes, int root, Stream s) {
    Channel *c = channel_of(g);
    CHECK(root >= 0 && root < g.size, "root %d of a group of %d", root, g.size);
    if (!c || bytes == 0) return;
    collective_begin(c, WATCH_BROADCAST, bytes, s);
    collective_end(c, ncclBroadcast(x, x, (size_t)bytes, ncclUint8, root, c->comm, (cudaStream_t)s), "ncclBroadcast");
}

static Channel *channel_to(Group g, int peer) {
    CHECK(peer >= 0 && peer < g.size && peer != g.rank, "a message between ranks %d and %d of a group of %d", g.rank, peer, g.size);
    return channel_of(g);
}

void comm_send(Group g, const void *x, int64_t bytes, int peer, Stream s) {
    Channel *c = channel_to(g, peer);
    if (bytes == 0) return;
    collective_begin(c, WATCH_SEND, bytes, s);
    collective_end(c, ncclSend(x, (size_t)bytes, ncclUint8, peer, c->comm, (cudaStream_t)s), "ncclSend");
}

void comm_receive(Group g, void *x, int64_t bytes, int peer, Stream s) {
    Channel *c = channel_to(g, peer);
    if (bytes == 0) return;
    collective_begin(c, WATCH_RECEIVE, bytes, s);
    collective_end(c, ncclRecv(x, (size_t)bytes, ncclUint8, peer, c->comm, (cudaStream_t)s), "ncclRecv");
}

void comm_batch_begin(void) {
    CHECK(!batch, "a batch inside a batch");
    ncclResult_t result = star.world > 1 ? ncclGroupStart() : ncclSuccess;
    if (result != ncclSuccess) nccl_failed(result, NULL, "ncclGroupStart");
    batch = true;
}

void comm_batch_end(void) {
    CHECK(batch, "no batch was begun");
    batch = false;
    ncclResult_t result = star.world > 1 ? ncclGroupEnd() : ncclSuccess;
    if (result != ncclSuccess && result != ncclInProgress) nccl_failed(result, NULL, "ncclGroupEnd");
    for (int i = 1; i < CHANNELS_MAX; i++) {
        if (!channels[i].in_batch) continue;
        channels[i].in_batch = false;
        nccl_settle(result, &channels[i], "ncclGroupEnd", star.call_seconds);
        counter_write(&counters[i].done, channels[i].number, channels[i].stream);
    }
}

void comm_host_broadcast(void *x, int64_t bytes, int root) { star_broadcast(&star, x, bytes, root); }
void comm_host_all_reduce(double *x, int n, CommOp op) { star_all_reduce(&star, x, n, op); }
