// fake_nccl.cpp - a stand-in for NCCL on host memory, so that runtime/comm_nccl.cpp runs in tests without a GPU.
//
// It keeps the rules of non-blocking communicators: every call that talks to peers returns ncclInProgress, a thread does the
// work, and a communicator that is used before ncclCommGetAsyncError has said ncclSuccess refuses. Beyond NCCL it notices
// ranks that do not make the same calls (members.h). A collective is done before its call settles, so a
// forgotten wait goes unnoticed here (comm_mpi.cpp finds those). A send is over when its bytes are copied, a receive when
// they are there.
//
// FAKE_GPUS is what cudaGetDeviceCount says. FAKE_NCCL injects a fault, on the rank FAKE_RANK alone if that is set:
//     nowindow memory cannot be registered; nowindow_here: by FAKE_RANK
//     init     communicators never get ready        usage   collectives refuse, as with two ranks on one GPU
//     async    the third collective of a communicator fails in the background while its call hangs
//     lost     at the third collective the process of FAKE_RANK ends with code 75, and the others hang in the call
#include "nccl.h"
#include "members.h"

enum { BATCH_MAX = 256, FAULT_AT = 3 };

struct ncclComm {
    Members members;
    int state;                // an ncclResult_t, read and written by several threads
    int collectives, windows; // started; registered now
};

typedef struct {
    int n;
    Collective at[BATCH_MAX];
    ncclComm *comm[BATCH_MAX];
} Batch;

static Batch collected;
static int group_depth;

static bool fault_here(void) {
    const char *rank = getenv("FAKE_RANK"), *mine = getenv("RANK");
    return !rank || (mine && strcmp(rank, mine) == 0);
}
static bool fault_anywhere(const char *name) {
    const char *wanted = getenv("FAKE_NCCL");
    return wanted && strcmp(wanted, name) == 0;
}
static bool fault(const char *name) { return fault_anywhere(name) && fault_here(); }

static void state_set(ncclComm *c, ncclResult_t state) { __atomic_store_n(&c->state, (int)state, __ATOMIC_RELEASE); }
static ncclResult_t state_of(ncclComm *c) { return (ncclResult_t)__atomic_load_n(&c->state, __ATOMIC_ACQUIRE); }

// ---------------------------------------------------------------------------------------------------------------
// Collectives

static void *batch_run(void *arg) {
    Batch *b = (Batch *)arg;
    ncclResult_t result[BATCH_MAX];
    usleep(20); // callers that do not ask find the communicator busy
    for (int i = 0; i < b->n; i++) result[i] = b->at[i].call.kind == RECEIVE ? message_receive(&b->at[i]) : collective_run(&b->at[i]);
    for (int i = 0; i < b->n; i++)
        if (result[i] == ncclSuccess) state_set(b->comm[i], ncclSuccess);
    for (int i = 0; i < b->n; i++)
        if (result[i] != ncclSuccess) state_set(b->comm[i], result[i]);
    free(b);
    return NULL;
}

static ncclResult_t batch_launch(void) {
    if (collected.n == 0) return ncclSuccess;
    Batch *b = (Batch *)host_alloc(sizeof *b);
    *b = collected;
    collected.n = 0;
    for (int i = 0; i < b->n; i++) state_set(b->comm[i], ncclInProgress);
    thread_run(batch_run, b);
    return ncclInProgress;
}

static ncclResult_t collective_begin(Kind kind, const void *send, void *receive, size_t n, ncclDataType_t type, int op, int root, ncclComm *comm) {
    if (state_of(comm) != ncclSuccess) {
        if (state_of(comm) != ncclInProgress) return state_of(comm);
        snprintf(last_error, sizeof last_error, "communicator used before the operation before returned ncclSuccess");
        return ncclInvalidArgument;
    }
    comm->collectives++;
    if (fault("usage")) {
        snprintf(last_error, sizeof last_error, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000\n");
        return ncclInvalidUsage;
    }
    if (fault_anywhere("lost") && comm->collectives == FAULT_AT) {
        if (fault_here()) _exit(EXIT_PEER);
        sleep(30);
    }
    if (fault("async") && comm->collectives == FAULT_AT) {
        snprintf(last_error, sizeof last_error, "NET/IB: Got completion from peer with status=12\n");
        state_set(comm, ncclRemoteError);
        sleep(30);
    }
    CHECK(collected.n < BATCH_MAX, "%d collectives in a group", collected.n);
    collected.comm[collected.n] = comm;
    collected.at[collected.n++] = {{kind, type, op, root, n}, &comm->members, send, receive};
    return group_depth ? ncclSuccess : batch_launch();
}

ncclResult_t ncclAllGather(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t) { return collective_begin(ALL_GATHER, s, r, n, t, 0, 0, c); }
ncclResult_t ncclAlltoAll(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t) { return collective_begin(ALL_TO_ALL, s, r, n, t, 0, 0, c); }
ncclResult_t ncclReduceScatter(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t) { return collective_begin(REDUCE_SCATTER, s, r, n, t, op, 0, c); }
ncclResult_t ncclAllReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t) { return collective_begin(ALL_REDUCE, s, r, n, t, op, 0, c); }
ncclResult_t ncclBroadcast(const void *s, void *r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t) { return collective_begin(BROADCAST, s, r, n, t, 0, root, c); }

ncclResult_t ncclRecv(void *r, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t) { return collective_begin(RECEIVE, NULL, r, n, t, 0, peer, c); }
ncclResult_t ncclSend(const void *s, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t) {
    if (state_of(c) != ncclSuccess || peer < 0 || peer >= c->members.size || peer == c->members.rank) return ncclInvalidArgument;
    message_send(&c->members, s, n * type_bytes(t), peer);
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void) { group_depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { return --group_depth ? ncclSuccess : batch_launch(); }

// ---------------------------------------------------------------------------------------------------------------
// Communicators

static void *comm_join(void *arg) {
    ncclComm *c = (ncclComm *)arg;
    if (fault("init")) for (;;) pause();
    state_set(c, members_join(&c->members) ? ncclSuccess : ncclRemoteError);
    return NULL;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    if (config->blocking != (config->CTAPolicy == NCCL_CTA_POLICY_ZERO) || !id.internal[0] || size < 1 || size > MEMBERS_MAX || rank < 0 || rank >= size) return ncclInvalidArgument;
    ncclComm *c = (ncclComm *)host_alloc(sizeof *c);
    c->members.size = size;
    c->members.rank = rank;
    c->members.id = id;
    c->state = ncclInProgress;
    *comm = c;
    thread_run(comm_join, c);
    return ncclInProgress;
}

ncclResult_t ncclCommFinalize(ncclComm_t c) { return state_of(c); }

// Windows: any memory does.
ncclResult_t ncclMemAlloc(void **data, size_t bytes) {
    *data = aligned_alloc(256, bytes);
    return *data ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclMemFree(void *data) { free(data); return ncclSuccess; }
ncclResult_t ncclCommWindowRegister(ncclComm_t c, void *data, size_t, ncclWindow_t *window, int) {
    *window = fault_anywhere("nowindow") || fault("nowindow_here") ? NULL : (ncclWindow_t)data;
    c->windows += *window != NULL;
    return ncclSuccess;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t c, ncclWindow_t window) {
    CHECK(window && c->windows > 0, "window %p of %d", (void *)window, c->windows);
    c->windows--;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t c) {
    CHECK(c->windows == 0, "%d windows are left", c->windows);
    members_leave(&c->members);
    free(c);
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { members_id(id); return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *error) { *error = state_of(c); return ncclSuccess; }
ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
const char *ncclGetLastError(ncclComm_t) { return last_error; }

const char *ncclGetErrorString(ncclResult_t r) { return result_text(r); }

// cuStreamWriteValue64, on a stream that has nothing else to do. The numbers of one place grow, or begin again.
int64_t fake_stream_writes;

static int stream_write(cudaStream_t, unsigned long long address, uint64_t value, unsigned) {
    uint64_t *at = (uint64_t *)(uintptr_t)address;
    CHECK(value > *at, "%" PRIu64 " is written where %" PRIu64 " was", value, *at);
    *at = value;
    fake_stream_writes++;
    return 0;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **entry, unsigned, unsigned long long, cudaDriverEntryPointQueryResult *found) {
    *found = strcmp(symbol, "cuStreamWriteValue64") == 0 ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (*found == cudaDriverEntryPointSuccess) *entry = (void *)stream_write;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
    const char *gpus = getenv("FAKE_GPUS");
    *count = gpus ? atoi(gpus) : MEMBERS_MAX;
    return cudaSuccess;
}
