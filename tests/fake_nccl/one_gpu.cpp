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
// A send waits for nobody. In a group (ncclGroupStart) sends go before receives, as all of a group's work goes on together.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <nccl.h>
#include "members.h"

#define cudaCheck(call) CHECK((call) == cudaSuccess, "%s", cudaGetErrorString(cudaGetLastError()))

// The driver's cuStreamWaitValue32, found at run time; 0: until the value is at least so much.
typedef int (*StreamWait)(cudaStream_t stream, unsigned long long address, uint32_t value, unsigned flags);

enum { BUFFERS_MAX = 4096 };

// Host memory for what an operation moves. It is never given back: that would wait for the whole device, also for streams that wait for other
// ranks.
typedef struct {
    char *data;
    size_t bytes;
    cudaEvent_t passed; // the stream's copy from it or to it is done
    int busy;           // the communicator's thread still needs it
} Buffer;

typedef struct Job {
    Collective c;
    bool sends;        // a message to c.call.root
    Buffer *out, *in;  // what leaves and what arrives; null: nothing
    uint32_t number;   // for the stream to wait for; 0: it does not
    struct Job *next;
} Job;

struct ncclComm {
    Members members;
    int state;                   // an ncclResult_t
    uint32_t calls, *done;       // numbers given; the last one that is done, in pinned memory
    Job *first, *last;           // not yet begun
    bool ends;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t news;
};

typedef struct {
    ncclComm *comm;
    Job *job;
} Pending;

static Buffer buffers[BUFFERS_MAX];
static int n_buffers, group_depth, n_pending;
static Pending pending[BUFFERS_MAX];

static Buffer *buffer_get(size_t bytes) {
    for (int i = 0; i < n_buffers; i++)
        if (buffers[i].bytes >= bytes && buffers[i].bytes <= 4 * bytes && !__atomic_load_n(&buffers[i].busy, __ATOMIC_ACQUIRE) && cudaEventQuery(buffers[i].passed) == cudaSuccess) {
            buffers[i].busy = 1;
            return &buffers[i];
        }
    cudaGetLastError(); // "not ready" is none
    CHECK(n_buffers < BUFFERS_MAX, "%d buffers in use", n_buffers);
    Buffer *b = &buffers[n_buffers++];
    b->bytes = bytes;
    b->busy = 1;
    cudaCheck(cudaHostAlloc((void **)&b->data, bytes, cudaHostAllocPortable));
    cudaCheck(cudaEventCreateWithFlags(&b->passed, cudaEventDisableTiming));
    return b;
}

// ---------------------------------------------------------------------------------------------------------------
// The communicator's thread

static void job_run(ncclComm *comm, Job *j) {
    Collective c = j->c;
    ncclResult_t result = ncclSuccess;
    if (j->out) cudaCheck(cudaEventSynchronize(j->out->passed));
    c.send = j->out ? j->out->data : NULL;
    c.receive = j->in ? j->in->data : NULL;
    if (j->sends) message_send(&comm->members, c.send, c.call.n * type_bytes(c.call.type), c.call.root);
    else result = c.call.kind == RECEIVE ? message_receive(&c) : collective_run(&c);
    if (result != ncclSuccess) __atomic_store_n(&comm->state, (int)result, __ATOMIC_RELEASE);
    if (j->out) __atomic_store_n(&j->out->busy, 0, __ATOMIC_RELEASE);
    if (j->in) __atomic_store_n(&j->in->busy, 0, __ATOMIC_RELEASE);
    if (j->number) __atomic_store_n(comm->done, j->number, __ATOMIC_RELEASE);
}

static void *comm_work(void *arg) {
    ncclComm *comm = (ncclComm *)arg;
    pthread_mutex_lock(&comm->lock);
    while (comm->first || !comm->ends) {
        Job *j = comm->first;
        if (!j) {
            pthread_cond_wait(&comm->news, &comm->lock);
            continue;
        }
        comm->first = j->next;
        pthread_mutex_unlock(&comm->lock);
        job_run(comm, j);
        free(j);
        pthread_mutex_lock(&comm->lock);
    }
    pthread_mutex_unlock(&comm->lock);
    return NULL;
}

static void job_give(ncclComm *comm, Job *j) {
    pthread_mutex_lock(&comm->lock);
    if (comm->first) comm->last->next = j;
    else comm->first = j;
    comm->last = j;
    pthread_cond_signal(&comm->news);
    pthread_mutex_unlock(&comm->lock);
}

// ---------------------------------------------------------------------------------------------------------------
// Operations

static StreamWait stream_wait(void) {
    static void *entry;
    cudaDriverEntryPointQueryResult found;
    if (!entry) cudaCheck(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &entry, 12000, cudaEnableDefault, &found));
    return (StreamWait)entry;
}

// n elements of each of out_parts leave, and of each of in_parts arrive. sends: a message to `root`.
static ncclResult_t begin(Kind kind, bool sends, const void *send, int out_parts, void *receive, int in_parts, size_t n, ncclDataType_t type, int op, int root, ncclComm *comm,
                          cudaStream_t stream) {
    const size_t element = type_bytes(type), out = (size_t)out_parts * n * element, in = (size_t)in_parts * n * element;
    if (__atomic_load_n(&comm->state, __ATOMIC_ACQUIRE) != ncclSuccess) return (ncclResult_t)comm->state;
    Job *j = (Job *)host_alloc(sizeof *j);
    j->c = {{kind, type, op, root, n}, &comm->members, NULL, NULL};
    j->sends = sends;
    if (out) {
        j->out = buffer_get(out);
        cudaCheck(cudaMemcpyAsync(j->out->data, send, out, cudaMemcpyDeviceToHost, stream));
        cudaCheck(cudaEventRecord(j->out->passed, stream));
    }
    if (in) {
        j->in = buffer_get(in);
        j->number = ++comm->calls;
        CHECK(stream_wait()(stream, (unsigned long long)(uintptr_t)comm->done, j->number, 0) == 0, "cuStreamWaitValue32");
        cudaCheck(cudaMemcpyAsync(receive, j->in->data, in, cudaMemcpyHostToDevice, stream));
        cudaCheck(cudaEventRecord(j->in->passed, stream));
    }
    CHECK(n_pending < BUFFERS_MAX, "%d operations in a group", n_pending);
    pending[n_pending++] = {comm, j};
    if (group_depth == 0) {
        n_pending = 0;
        job_give(comm, j);
    }
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
    if (--group_depth) return ncclSuccess;
    for (int sends = 1; sends >= 0; sends--)
        for (int i = 0; i < n_pending; i++)
            if (pending[i].job && pending[i].job->sends == (sends == 1)) {
                job_give(pending[i].comm, pending[i].job);
                pending[i].job = NULL;
            }
    n_pending = 0;
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
    cudaCheck(cudaHostAlloc((void **)&c->done, sizeof *c->done, cudaHostAllocPortable));
    *c->done = 0;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->news, NULL);
    CHECK(pthread_create(&c->thread, NULL, comm_work, c) == 0, "no thread");
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t c) {
    pthread_mutex_lock(&c->lock);
    c->ends = true;
    pthread_cond_signal(&c->news);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->thread, NULL);
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
