// members.h - how the stand-ins for NCCL move what they are given: ranks of one host, over Unix sockets whose name is in the communicator's
// identifier. Member 0 collects, adds in the order of the ranks, and sends back. Messages between two members have a socket each.
//
// Includes come first in the file that includes this: nccl.h, NCCL's own or that of fake_nccl.cpp. All memory here is the host's.
#pragma once
#include "../../runtime/tensor.h"
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>

enum { MEMBERS_MAX = 64 };

typedef struct {
    int size, rank;
    int fd[MEMBERS_MAX]; // member 0: of each other; the others: fd[0]
    int sent[MEMBERS_MAX], received[MEMBERS_MAX]; // messages, by the other member
    ncclUniqueId id;
} Members;

typedef enum { ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, ALL_REDUCE, BROADCAST, RECEIVE } Kind;

typedef struct {
    int kind, type, op, root;
    size_t n;
} Call; // equal on all members

typedef struct {
    Call call;
    Members *members;
    const void *send;
    void *receive;
} Collective;

static char last_error[128];

static const char *result_text(ncclResult_t r) {
    switch (r) {
    case ncclSuccess: return "no error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    default: return "NCCL operation in progress";
    }
}

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
    Members *comm = c->members;
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

static struct sockaddr_un message_address(const Members *m, int from, int to, int number) {
    struct sockaddr_un a;
    memset(&a, 0, sizeof a);
    a.sun_family = AF_UNIX;
    snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "%.64s %d %d %d", m->id.internal, from, to, number);
    return a;
}

static void *message_carry(void *arg) {
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
    Members *const here = c->members;
    struct sockaddr_un a = message_address(here, c->call.root, here->rank, here->received[c->call.root]++);
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

// The bytes are copied, and go on their way without being waited for.
static void message_send(Members *from, const void *data, size_t bytes, int peer) {
    Message *m = (Message *)host_alloc(sizeof *m + bytes);
    m->address = message_address(from, from->rank, peer, from->sent[peer]++);
    m->bytes = bytes;
    memcpy(m->data, data, bytes);
    thread_run(message_carry, m);
}

// ---------------------------------------------------------------------------------------------------------------
// Who they are

static void members_id(ncclUniqueId *id) {
    static int made;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, 64, "fake-nccl-%d-%d-%.9f", (int)getpid(), made++, clock_seconds());
}

// Connects the members; false if one goes away meanwhile.
static bool members_join(Members *c) {
    struct sockaddr_un a;
    memset(&a, 0, sizeof a);
    a.sun_family = AF_UNIX;
    memcpy(a.sun_path + 1, c->id.internal, 64); // a name without a file
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
    return ok;
}

static void members_leave(Members *c) {
    for (int i = 0; i < c->size; i++)
        if (i != c->rank && (c->rank == 0 || i == 0)) close(c->fd[i]);
}
