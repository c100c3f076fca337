// one_gpu.cpp - a stand-in for NCCL between ranks that share a GPU, which NCCL refuses, so that every layout runs in tests where there is
// only one. Kernels, streams, events and graphs are the program's own; what travels goes through host memory and sockets (members.h), which
// says nothing of NCCL, and nothing of time. tests/one_gpu.sh puts it in the place of libnccl.so.2.
//
// As with NCCL, a call returns at once and the work is the stream's: what is sent is copied to the host, a thread of the communicator
// exchanges it in the order of the calls, and the stream waits at a number in host memory until that is done.
//
//     stream of the call    copy to the host, event              wait for number n, copy to the device
//     communicator's thread                    event, exchange, n
//
// Sends have a thread of their own and wait for nobody. In a group (ncclGroupStart), whose work goes on together, all copies to the host come before
// the first wait, at the group's end.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <nccl.h>
#include "members.h"

#define cudaCheck(call) CHECK((call) == cudaSuccess, "%s", cudaGetErrorString(cudaGetLastError()))

// The driver's cuStreamWaitValue32, found at run time; 0: until the value is at least so much.
typedef int (*StreamWait)(cudaStream_t stream, unsigned long long address, uint32_t value, unsigned flags);

// ARENA_BYTES are taken at the start: to take or give back pinned memory may wait for the whole device, also for streams that wait for other ranks.
enum { BUFFERS_MAX = 4096, ARENA_BYTES = 256 << 20 };

// Host memory for what an operation moves, used again but never given back.
typedef struct {
    char *data;
    size_t bytes;
    cudaEvent_t passed; // the stream's copy from it or to it is done
    int busy;           // the communicator's thread still needs it, or the stream's copy is not enqueued yet
} Buffer;

typedef struct Job {
    Collective c;
    Buffer *out, *in; // what leaves and what arrives; null: nothing
    uint32_t number;  // for the stream to wait for; 0: it does not
    struct Job *next;
} Job;

// Jobs for a thread, in order.
typedef struct {
    ncclComm *comm;
    Job *first, *last; // not yet begun
    bool sends, ends;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t news;
} Queue;

struct ncclComm {
    Members members;
    int state;             // an ncclResult_t
    uint32_t calls, *done; // numbers given; the last one that is done, in pinned memory
    Queue queue[2];        // of sends; of all else
};

// What a stream waits for, and takes then.
typedef struct {
    ncclComm *comm;
    uint32_t number;
    Buffer *from;
    void *receive;
    size_t bytes;
    cudaStream_t stream;
} Arrival;

static Buffer buffers[BUFFERS_MAX];
static Arrival arrivals[BUFFERS_MAX]; // of the group that is being collected
static int n_buffers, n_arrivals, group_depth;
static char *arena;
static size_t arena_used;

static char *pinned(size_t bytes) {
    char *p = NULL;
    cudaCheck(cudaHostAlloc((void **)&p, bytes, cudaHostAllocPortable));
    return p;
}

static Buffer *buffer_get(size_t wanted) {
    size_t bytes = 256;
    while (bytes < wanted) bytes *= 2;
    for (int i = 0; i < n_buffers; i++)
        if (buffers[i].bytes == bytes && !__atomic_load_n(&buffers[i].busy, __ATOMIC_ACQUIRE) && cudaEventQuery(buffers[i].passed) == cudaSuccess) {
            buffers[i].busy = 1;
            return &buffers[i];
        }
    cudaGetLastError(); // "not ready" is none
    CHECK(n_buffers < BUFFERS_MAX, "%d buffers in use", n_buffers);
    Buffer *b = &buffers[n_buffers++];
    b->bytes = bytes;
    b->busy = 1;
    b->data = arena_used + bytes <= ARENA_BYTES ? arena + arena_used : pinned(bytes);
    if (b->data == arena + arena_used) arena_used += bytes;
    cudaCheck(cudaEventCreateWithFlags(&b->passed, cudaEventDisableTiming));
    return b;
}

// ---------------------------------------------------------------------------------------------------------------
// The communicator's threads

static void job_run(ncclComm *comm, bool sends, Job *j) {
    Collective c = j->c;
    ncclResult_t result = ncclSuccess;
    if (j->out) cudaCheck(cudaEventSynchronize(j->out->passed));
    c.send = j->out ? j->out->data : NULL;
    c.receive = j->in ? j->in->data : NULL;
    if (sends) message_send(&comm->members, c.send, c.call.n * type_bytes(c.call.type), c.call.root);
    else result = c.call.kind == RECEIVE ? message_receive(&c) : collective_run(&c);
    if (result != ncclSuccess) __atomic_store_n(&comm->state, (int)result, __ATOMIC_RELEASE);
    if (j->out) __atomic_store_n(&j->out->busy, 0, __ATOMIC_RELEASE);
    if (j->number) __atomic_store_n(comm->done, j->number, __ATOMIC_RELEASE);
}

static void *queue_work(void *arg) {
    Queue *q = (Queue *)arg;
    pthread_mutex_lock(&q->lock);
    while (q->first || !q->ends) {
        Job *j = q->first;
        if (!j) {
            pthread_cond_wait(&q->news, &q->lock);
            continue;
        }
        q->first = j->next;
        pthread_mutex_unlock(&q->lock);
        job_run(q->comm, q->sends, j);
        free(j);
        pthread_mutex_lock(&q->lock);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

static void queue_start(Queue *q, ncclComm *comm, bool sends) {
    q->comm = comm;
    q->sends = sends;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->news, NULL);
    CHECK(pthread_create(&q->thread, NULL, queue_work, q) == 0, "no thread");
}

static void queue_add(Queue *q, Job *j) {
    pthread_mutex_lock(&q->lock);
    if (q->first) q->last->next = j;
    else q->first = j;
    q->last = j;
    pthread_cond_signal(&q->news);
    pthread_mutex_unlock(&q->lock);
}

static void queue_finish(Queue *q) {
    pthread_mutex_lock(&q->lock);
    q->ends = true;
    pthread_cond_signal(&q->news);
    pthread_mutex_unlock(&q->lock);
    pthread_join(q->thread, NULL);
}

// ---------------------------------------------------------------------------------------------------------------
// Operations

static StreamWait stream_wait(void) {
    static void *entry;
    cudaDriverEntryPointQueryResult found;
    if (!entry) cudaCheck(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &entry, 12000, cudaEnableDefault, &found));
    return (StreamWait)entry;
}

static void arrivals_wait(void) {
    for (int i = 0; i < n_arrivals; i++) {
        const Arrival *a = &arrivals[i];
        CHECK(stream_wait()(a->stream, (unsigned long long)(uintptr_t)a->comm->done, a->number, 0) == 0, "cuStreamWaitValue32");
        cudaCheck(cudaMemcpyAsync(a->receive, a->from->data, a->bytes, cudaMemcpyHostToDevice, a->stream));
        cudaCheck(cudaEventRecord(a->from->passed, a->stream));
        __atomic_store_n(&a->from->busy, 0, __ATOMIC_RELEASE);
    }
    n_arrivals = 0;
}

// n elements of each of out_parts leave, and of each of in_parts arrive. sends: a message to `root`.
static ncclResult_t begin(Kind kind, bool sends, const void *send, int out_parts, void *receive, int in_parts, size_t n, ncclDataType_t type, int op, int root, ncclComm *comm,
                          cudaStream_t stream) {
    const size_t element = type_bytes(type), out = (size_t)out_parts * n * element, in = (size_t)in_parts * n * element;
    if (__atomic_load_n(&comm->state, __ATOMIC_ACQUIRE) != ncclSuccess) return (ncclResult_t)comm->state;
    Job *j = (Job *)host_alloc(sizeof *j);
    j->c = {{kind, type, op, root, n}, &comm->members, NULL, NULL};
    if (out) {
        j->out = buffer_get(out);
        cudaCheck(cudaMemcpyAsync(j->out->data, send, out, cudaMemcpyDeviceToHost, stream));
        cudaCheck(cudaEventRecord(j->out->passed, stream));
    }
    if (in) {
        CHECK(n_arrivals < BUFFERS_MAX, "%d operations in a group", n_arrivals);
        j->in = buffer_get(in);
        j->number = ++comm->calls;
        arrivals[n_arrivals++] = {comm, j->number, j->in, receive, in, stream};
    }
    queue_add(&comm->queue[!sends], j); // whose thread frees it
    if (group_depth == 0) arrivals_wait();
    return ncclSuccess;
}

extern "C" {
ncclResult_t ncclAllGather(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) { return begin(ALL_GATHER, false, s, 1, r, c->members.size, n, t, 0, 0, c, st); }
ncclResult_t ncclAlltoAll(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) { return begin(ALL_TO_ALL, false, s, c->members.size, r, c->members.size, n, t, 0, 0, c, st); }
ncclResult_t ncclReduceScatter(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t st) {
    return begin(REDUCE_SCATTER, false, s, c->members.size, r, 1, n, t, op, 0, c, st);
}
ncclResult_t ncclAllReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t st) { return begin(ALL_REDUCE, false, s, 1, r, 1, n, t, op, 0, c, st); }
ncclResult_t ncclBroadcast(const void *s, void *r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st) { return begin(BROADCAST, false, s, 1, r, 1, n, t, 0, root, c, st); }
ncclResult_t ncclRecv(void *r, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t st) { return begin(RECEIVE, false, NULL, 0, r, 1, n, t, 0, peer, c, st); }
ncclResult_t ncclSend(const void *s, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t st) { return begin(RECEIVE, true, s, 1, NULL, 0, n, t, 0, peer, c, st); }

ncclResult_t ncclGroupStart(void) {
    group_depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void) {
    if (--group_depth == 0) arrivals_wait();
    return ncclSuccess;
}

// ---------------------------------------------------------------------------------------------------------------
// Communicators

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    members_id(id);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *) {
    ncclComm *c = (ncclComm *)host_alloc(sizeof *c);
    c->members.size = size;
    c->members.rank = rank;
    c->members.id = id;
    *comm = c;
    if (!members_join(&c->members)) return ncclRemoteError;
    if (!arena) arena = pinned(ARENA_BYTES);
    c->done = (uint32_t *)pinned(sizeof *c->done);
    *c->done = 0;
    for (int sends = 0; sends < 2; sends++) queue_start(&c->queue[!sends], c, sends == 1);
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t c) {
    for (int i = 0; i < 2; i++) queue_finish(&c->queue[i]);
    members_leave(&c->members);
    free(c); // but not c->done: a stream may still look there
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *error) {
    *error = (ncclResult_t)__atomic_load_n(&c->state, __ATOMIC_ACQUIRE);
    return ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t r) { return result_text(r); }
const char *ncclGetLastError(ncclComm_t) { return last_error; }
ncclResult_t ncclGetVersion(int *version) {
    *version = 22800; // before copy engines
    return ncclSuccess;
}

// Copy engines, which this has none of; named because the program is linked with them.
ncclResult_t ncclMemAlloc(void **data, size_t bytes) { return cudaMalloc(data, bytes) == cudaSuccess ? ncclSuccess : ncclSystemError; }
ncclResult_t ncclMemFree(void *data) { return cudaFree(data) == cudaSuccess ? ncclSuccess : ncclSystemError; }
ncclResult_t ncclCommWindowRegister(ncclComm_t, void *, size_t, ncclWindow_t *window, int) {
    *window = NULL;
    return ncclSuccess;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclInvalidUsage; }

// ---------------------------------------------------------------------------------------------------------------
// The runtime's functions that know a device by its number: as many as there are ranks, and each is the first.

cudaError_t cudaGetDeviceCount(int *count) {
    *count = MEMBERS_MAX;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return ((cudaError_t(*)(int))dlsym(RTLD_NEXT, "cudaSetDevice"))(0); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
    return ((cudaError_t(*)(cudaDeviceProp *, int))dlsym(RTLD_NEXT, "cudaGetDeviceProperties"))(properties, 0);
}
}
