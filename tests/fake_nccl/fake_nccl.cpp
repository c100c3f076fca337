// fake_nccl.cpp - a stand-in for NCCL on host memory, so that runtime/comm_nccl.cpp runs in tests without a GPU.
//
// It keeps the rules of non-blocking communicators: every call that talks to peers returns ncclInProgress, a thread does the
// work, and a communicator that is used before ncclCommGetAsyncError has said ncclSuccess refuses. Beyond NCCL it notices
// ranks that do not make the same calls. Members of a communicator talk over Unix sockets whose name is in the identifier;
// member 0 collects, adds in the order of the ranks, and sends back. A collective is done before its call settles, so a
// forgotten wait goes unnoticed here (comm_mpi.cpp finds those). Messages between two members have a socket each; a send is over when
// its bytes are copied, a receive when they are there.
//
// FAKE_GPUS is what cudaGetDeviceCount says. FAKE_NCCL injects a fault, on the rank FAKE_RANK alone if that is set:
//     nowindow memory cannot be registered; nowindow_here: by FAKE_RANK
//     init     communicators never get ready        usage   collectives refuse, as with two ranks on one GPU
//     async    the third collective of a communicator fails in the background while its call hangs
//     lost     at the third collective the process of FAKE_RANK ends with code 75, and the others hang in the call
#include "nccl.h"
#include "../../runtime/tensor.h"
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>

enum { MEMBERS_MAX = 64, BATCH_MAX = 256, FAULT_AT = 3 };

struct ncclComm {
    int size, rank, state; // state: an ncclResult_t, read and written by several threads
    int fd[MEMBERS_MAX];   // member 0: of each other; the others: fd[0]
    int collectives, windows; // started; registered now
    int sent[MEMBERS_MAX], received[MEMBERS_MAX]; // messages, by the other member
    ncclUniqueId id;
};

typedef enum { ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, ALL_REDUCE, BROADCAST, RECEIVE } Kind;

typedef struct {
    int kind, type, op, root;
    size_t n;
} Call; // equal on all members

typedef struct {
    Call call;
    ncclComm *comm;
    const void *send;
    void *receive;
} Collective;

typedef struct {
    int n;
    Collective at[BATCH_MAX];
} Batch;

static Batch collected;
static int group_depth;
static char last_error[128];

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

static void thread_run(void *(*work)(void *), void *arg) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, work, arg) == 0, "no thread");
    pthread_detach(thread);
}

// ---------------------------------------------------------------------------------------------------------------
// Collectives

static bool move_bytes(int fd, void *data, size_t bytes, bool sending) {
    for (char *p = (char *)data; bytes > 0;) {
        ssize_t n = sending ? send(fd, p, bytes, MSG_NOSIGNAL) : recv(fd, p, bytes, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) { snprintf(last_error, sizeof last_error, "socketProgress: connection closed by remote peer\n"); return false; }
        p += n;
        bytes -= (size_t)n;
    }
    return true;
}

static size_t type_bytes(int type) { return type == ncclUint8 ? 1 : type == ncclFloat32 ? 4 : type == ncclFloat64 ? 8 : 2; }

// out[i] = over members of all[member * n + i].
static void reduce(void *out, const void *all, size_t n, int members, int type, int op) {
    DType t = type == ncclFloat32 ? DTYPE_FP32 : type == ncclBfloat16 ? DTYPE_BF16 : DTYPE_FP16;
    for (size_t i = 0; i < n; i++) {
        double wide = 0;
        float sum = 0;
        for (int m = 0; m < members; m++) {
            size_t at = (size_t)m * n + i;
            if (type != ncclFloat64) { sum = m == 0 ? dtype_load(all, t, (int64_t)at) : sum + dtype_load(all, t, (int64_t)at); continue; }
            double x = ((const double *)all)[at];
            if (m == 0) wide = x;
            else if (op == ncclSum) wide += x;
            else if (isnan(wide) || isnan(x)) wide = NAN;
            else wide = op == ncclMax ? fmax(wide, x) : fmin(wide, x);
        }
        if (type == ncclFloat64) ((double *)out)[i] = wide;
        else dtype_store(out, t, (int64_t)i, sum);
    }
}

static ncclResult_t collective_run(const Collective *c) {
    ncclComm *comm = c->comm;
    size_t members = (size_t)comm->size, element = type_bytes(c->call.type), n = c->call.n;
    bool to_all = c->call.kind == ALL_TO_ALL;
    size_t in = (c->call.kind == REDUCE_SCATTER || to_all ? members : 1) * n * element, out = (c->call.kind == ALL_GATHER || to_all ? members : 1) * n * element;
    if (comm->rank != 0) {
        Call call = c->call;
        bool ok = move_bytes(comm->fd[0], &call, sizeof call, true) && move_bytes(comm->fd[0], (void *)(uintptr_t)c->send, in, true) && move_bytes(comm->fd[0], c->receive, out, false);
        return ok ? ncclSuccess : ncclRemoteError;
    }
    char *all = (char *)host_alloc(members * in), *sum = (char *)host_alloc(in);
    memcpy(all, c->send, in);
    ncclResult_t result = ncclSuccess;
    for (int m = 1; m < comm->size && result == ncclSuccess; m++) {
        Call call;
        if (!move_bytes(comm->fd[m], &call, sizeof call, false)) result = ncclRemoteError;
        else if (memcmp(&call, &c->call, sizeof call) != 0) {
            snprintf(last_error, sizeof last_error, "member %d called kind %d with %zu elements, member 0 kind %d with %zu", m, call.kind, call.n, c->call.kind, n);
            result = ncclInternalError;
        } else if (!move_bytes(comm->fd[m], all + (size_t)m * in, in, false)) result = ncclRemoteError;
    }
    char *answer = c->call.kind == ALL_GATHER ? all : c->call.kind == BROADCAST ? all + (size_t)c->call.root * in : sum;
    if (to_all) { // member m's answer at m * in: piece m of each
        char *turned = (char *)host_alloc(members * in);
        for (size_t m = 0; m < members; m++)
            for (size_t r = 0; r < members; r++) memcpy(turned + m * in + r * n * element, all + r * in + m * n * element, n * element);
        free(all);
        answer = all = turned;
    } else if (answer == sum) reduce(sum, all, in / element, comm->size, c->call.type, c->call.op);
    for (int m = 1; m < comm->size && result == ncclSuccess; m++)
        if (!move_bytes(comm->fd[m], answer + (c->call.kind == REDUCE_SCATTER || to_all ? (size_t)m * out : 0), out, true)) result = ncclRemoteError;
    memcpy(c->receive, answer, out);
    free(all);
    free(sum);
    return result;
}

// A message of its own: from and to are members, number counts those between them.
typedef struct {
    struct sockaddr_un address;
    size_t bytes;
    char data[];
} Message;

static struct sockaddr_un message_address(const ncclComm *comm, int from, int to, int number) {
    struct sockaddr_un a;
    memset(&a, 0, sizeof a);
    a.sun_family = AF_UNIX;
    snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "%.64s %d %d %d", comm->id.internal, from, to, number);
    return a;
}

static void *message_send(void *arg) {
    Message *m = (Message *)arg;
    int fd;
    while ((fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0 && connect(fd, (struct sockaddr *)&m->address, sizeof m->address) != 0) {
        close(fd);
        usleep(200);
    }
    move_bytes(fd, &m->bytes, sizeof m->bytes, true);
    move_bytes(fd, m->data, m->bytes, true);
    close(fd);
    free(m);
    return NULL;
}

static ncclResult_t message_receive(const Collective *c) {
    struct sockaddr_un a = message_address(c->comm, c->call.root, c->comm->rank, c->comm->received[c->call.root]++);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(listener, (struct sockaddr *)&a, sizeof a) == 0 && listen(listener, 1) == 0, "%s", strerror(errno));
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    size_t bytes = 0, want = c->call.n * type_bytes(c->call.type);
    bool ok = move_bytes(fd, &bytes, sizeof bytes, false);
    if (ok && bytes != want) snprintf(last_error, sizeof last_error, "member %d sends %zu bytes, and %zu are received", c->call.root, bytes, want);
    ok = ok && bytes == want && move_bytes(fd, c->receive, bytes, false);
    close(fd);
    close(listener);
    return ok ? ncclSuccess : ncclRemoteError;
}

static void *batch_run(void *arg) {
    Batch *b = (Batch *)arg;
    ncclResult_t result[BATCH_MAX];
    usleep(20); // callers that do not ask find the communicator busy
    for (int i = 0; i < b->n; i++) result[i] = b->at[i].call.kind == RECEIVE ? message_receive(&b->at[i]) : collective_run(&b->at[i]);
    for (int i = 0; i < b->n; i++)
        if (result[i] == ncclSuccess) state_set(b->at[i].comm, ncclSuccess);
    for (int i = 0; i < b->n; i++)
        if (result[i] != ncclSuccess) state_set(b->at[i].comm, result[i]);
    free(b);
    return NULL;
}

static ncclResult_t batch_launch(void) {
    if (collected.n == 0) return ncclSuccess;
    Batch *b = (Batch *)host_alloc(sizeof *b);
    *b = collected;
    collected.n = 0;
    for (int i = 0; i < b->n; i++) state_set(b->at[i].comm, ncclInProgress);
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
    Collective c = {{kind, type, op, root, n}, comm, send, receive};
    collected.at[collected.n++] = c;
    return group_depth ? ncclSuccess : batch_launch();
}

ncclResult_t ncclAllGather(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t) { return collective_begin(ALL_GATHER, s, r, n, t, 0, 0, c); }
ncclResult_t ncclAlltoAll(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t) { return collective_begin(ALL_TO_ALL, s, r, n, t, 0, 0, c); }
ncclResult_t ncclReduceScatter(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t) { return collective_begin(REDUCE_SCATTER, s, r, n, t, op, 0, c); }
ncclResult_t ncclAllReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t) { return collective_begin(ALL_REDUCE, s, r, n, t, op, 0, c); }
ncclResult_t ncclBroadcast(const void *s, void *r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t) { return collective_begin(BROADCAST, s, r, n, t, 0, root, c); }

ncclResult_t ncclRecv(void *r, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t) { return collective_begin(RECEIVE, NULL, r, n, t, 0, peer, c); }
ncclResult_t ncclSend(const void *s, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t) {
    size_t bytes = n * type_bytes(t);
    if (state_of(c) != ncclSuccess || peer < 0 || peer >= c->size || peer == c->rank) return ncclInvalidArgument;
    Message *m = (Message *)host_alloc(sizeof *m + bytes);
    m->address = message_address(c, c->rank, peer, c->sent[peer]++);
    m->bytes = bytes;
    memcpy(m->data, s, bytes);
    thread_run(message_send, m);
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void) { group_depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { return --group_depth ? ncclSuccess : batch_launch(); }

// ---------------------------------------------------------------------------------------------------------------
// Communicators

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static int made;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, 64, "fake-nccl-%d-%d-%.9f", (int)getpid(), made++, clock_seconds());
    return ncclSuccess;
}

static void *comm_join(void *arg) {
    ncclComm *c = (ncclComm *)arg;
    struct sockaddr_un a;
    memset(&a, 0, sizeof a);
    a.sun_family = AF_UNIX;
    memcpy(a.sun_path + 1, c->id.internal, 64); // a name without a file
    if (fault("init")) for (;;) pause();
    bool ok = true;
    if (c->rank == 0) {
        int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        CHECK(bind(listener, (struct sockaddr *)&a, sizeof a) == 0 && listen(listener, MEMBERS_MAX) == 0, "%s", strerror(errno));
        for (int i = 1; i < c->size; i++) {
            int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC), rank = 0;
            ok &= move_bytes(fd, &rank, sizeof rank, false);
            c->fd[rank] = fd;
        }
        close(listener);
    } else {
        while ((c->fd[0] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0 && connect(c->fd[0], (struct sockaddr *)&a, sizeof a) != 0) {
            close(c->fd[0]);
            usleep(1000);
        }
        ok = move_bytes(c->fd[0], &c->rank, sizeof c->rank, true);
    }
    state_set(c, ok ? ncclSuccess : ncclRemoteError);
    return NULL;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    if (config->blocking != (config->CTAPolicy == NCCL_CTA_POLICY_ZERO) || !id.internal[0] || size < 1 || size > MEMBERS_MAX || rank < 0 || rank >= size) return ncclInvalidArgument;
    ncclComm *c = (ncclComm *)host_alloc(sizeof *c);
    c->size = size;
    c->rank = rank;
    c->id = id;
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
    for (int i = 0; i < c->size; i++)
        if (i != c->rank && (c->rank == 0 || i == 0)) close(c->fd[i]);
    free(c);
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *error) { *error = state_of(c); return ncclSuccess; }
ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
const char *ncclGetLastError(ncclComm_t) { return last_error; }

const char *ncclGetErrorString(ncclResult_t r) {
    const char *text[] = {"no error", "unhandled system error", "internal error", "invalid argument", "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
    return text[r];
}

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
