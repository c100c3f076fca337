// star.h - small exchanges between the hosts of a job over TCP: every rank has one connection, to rank 0.
//
// For what happens seldom and is small: names, identifiers, totals. Each message is a Frame and its data. The receiver
// knows what must come, so no length that arrives is ever believed: a Frame is right or it is not. rendezvous.h makes
// the connections.
//
// Invariants:
//  1. Nothing blocks without a deadline, and no peer can kill us: no SIGPIPE, no allocation by a peer's word.
//  2. A rank that is lost ends all ranks with EXIT_PEER; rank 0 passes on who it was, so that nobody accuses rank 0.
//  3. Sums are taken on rank 0 in the order of the ranks.
#pragma once
#include "comm.h"
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

enum { CALL_SECONDS = 1800, SILENT_HOST_SECONDS = 8, LAST_WORDS_SECONDS = 1, HOST_BYTES = 64 };

static const uint32_t FRAME_MAGIC = 0x46545047u; // "GPTF"

typedef enum { FRAME_BROADCAST = 1, FRAME_GATHER, FRAME_LOST } FrameKind;

typedef struct {
    uint32_t magic, kind;
    uint32_t sequence;               // of the exchange, counted by every rank
    int32_t rank;                    // root of a broadcast, sender of a gather, the lost rank
    int64_t bytes;                   // that follow
} Frame;

static_assert(sizeof(Frame) == 24, "a message has no padding");

typedef struct {
    int fd;                  // -1: not here
    int32_t pid;
    char host[HOST_BYTES];   // printable
} Peer;

typedef struct {
    int rank, world, local_rank, local_world, n_hosts;
    Peer *peer;              // rank 0: by rank; the others: peer[0] is rank 0
    uint32_t sequence;
    double call_seconds;     // ceiling of one exchange
    pthread_mutex_t in_call; // an exchange and star_watch keep out of each other's way
} Star;

// ---------------------------------------------------------------------------------------------------------------
// Sockets

static int poll_until(struct pollfd *p, int n, double deadline) { // as poll, with a point in time; 0 = it has passed
    for (;;) {
        double left = deadline - clock_seconds();
        int ms = left <= 0 ? 0 : left > 3600 ? 3600000 : (int)(left * 1000) + 1;
        int ready = poll(p, (nfds_t)n, ms);
        if (ready > 0 || (ready == 0 && clock_seconds() >= deadline)) return ready;
        if (ready < 0 && errno != EINTR && errno != EAGAIN) die(EXIT_INTERNAL, "poll of %d sockets: %s", n, strerror(errno));
    }
}

static void socket_prepare(int fd) {
    int on = 1, idle = SILENT_HOST_SECONDS - 5, interval = 1, count = 5; // an idle connection fails when its host is silent
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

// Is the other host silent although we have sent something? Keep-alives look at idle connections only, and TCP_USER_TIMEOUT
// would also end a connection to a host that answers, but whose rank is slow to read.
static bool socket_host_silent(int fd) {
    struct tcp_info info;
    socklen_t size = sizeof info;
    memset(&info, 0, sizeof info);
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && info.tcpi_unacked > 0 && info.tcpi_retransmits >= 3 &&
           info.tcpi_last_ack_recv >= 1000 * SILENT_HOST_SECONDS;
}

// Sends or receives exactly `bytes`. Null, or the reason why not ("" when the other side has closed).
static const char *socket_exactly(int fd, void *data, size_t bytes, bool sending, double deadline) {
    for (size_t done = 0; done < bytes;) {
        char *at = (char *)data + done;
        ssize_t n = sending ? send(fd, at, bytes - done, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(fd, at, bytes - done, MSG_DONTWAIT);
        if (n > 0) { done += (size_t)n; continue; }
        if (n == 0) return "";
        if (errno == EINTR) continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK) return strerror(errno);
        struct pollfd p = {fd, (short)(sending ? POLLOUT : POLLIN), 0};
        if (poll_until(&p, 1, deadline) == 0) return "no answer in time";
    }
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------
// Exchanges

typedef enum { FRAME_EXPECTED, FRAME_OF_OTHER_CALL, FRAME_SAYS_LOST, FRAME_GARBAGE } FrameVerdict;

static FrameVerdict frame_check(const Frame *got, const Frame *want, int world) {
    if (got->magic != FRAME_MAGIC || got->kind < FRAME_BROADCAST || got->kind > FRAME_LOST) return FRAME_GARBAGE;
    if (got->rank < 0 || got->rank >= world || got->bytes < 0) return FRAME_GARBAGE;
    if (got->kind == FRAME_LOST) return FRAME_SAYS_LOST;
    return memcmp(got, want, sizeof *got) == 0 ? FRAME_EXPECTED : FRAME_OF_OTHER_CALL;
}

typedef struct {
    Peer *peer;
    bool sending;
    Frame frame;            // what is sent, or what must come
    char *data;             // frame.bytes
    int64_t done;           // of the frame and the data
} Transfer;

static int star_rank_of(const Star *s, const Peer *p) { return s->rank == 0 ? (int)(p - s->peer) : 0; }

// Everybody ends because this peer is lost. On rank 0 the news travels behind what is half sent (t[0..n)), which gets
// LAST_WORDS_SECONDS to be read.
__attribute__((noreturn)) static void star_lost(Star *s, const Peer *lost, const char *during, const char *why, Transfer *t, int n) {
    int rank = star_rank_of(s, lost);
    if (s->rank == 0) {
        Frame news = {FRAME_MAGIC, FRAME_LOST, s->sequence, rank, 0};
        double deadline = clock_seconds() + LAST_WORDS_SECONDS;
        for (int i = 0; i < n; i++) {
            int64_t head = (int64_t)sizeof(Frame);
            if (t[i].peer == lost || !t[i].sending || t[i].done == 0) continue;
            if (t[i].done < head) socket_exactly(t[i].peer->fd, (char *)&t[i].frame + t[i].done, (size_t)(head - t[i].done), true, deadline);
            int64_t sent = max_i64(t[i].done - head, 0);
            socket_exactly(t[i].peer->fd, t[i].data + sent, (size_t)(t[i].frame.bytes - sent), true, deadline);
        }
        for (int r = 1; r < s->world; r++)
            if (&s->peer[r] != lost) socket_exactly(s->peer[r].fd, &news, sizeof news, true, 0);
        die(EXIT_PEER, "rank %d (host %s, process %d) is lost: %s, during %s", rank, lost->host, lost->pid,
            why[0] ? why : "it closed its connection", during);
    }
    Frame news; // rank 0's last words may lie behind the end of the connection
    bool whole = recv(lost->fd, &news, sizeof news, MSG_DONTWAIT) == (ssize_t)sizeof news;
    if (whole && frame_check(&news, &news, s->world) == FRAME_SAYS_LOST) rank = news.rank;
    if (rank != 0) die_told(EXIT_PEER, "rank %d is lost, says rank 0, during %s", rank, during);
    die(EXIT_PEER, "rank 0 (host %s) is lost: %s, during %s", lost->host, why[0] ? why : "it closed its connection", during);
}

// Moves one transfer on as far as it goes now. True when it is complete.
static bool transfer_step(Star *s, Transfer *all, int n, Transfer *t, Frame *room, const char *during) {
    const int64_t head = (int64_t)sizeof(Frame), total = head + t->frame.bytes;
    while (t->done < total) {
        char *at = t->done >= head ? t->data + (t->done - head) : t->sending ? (char *)&t->frame + t->done : (char *)room + t->done;
        size_t bytes = (size_t)min_i64((t->done < head ? head : total) - t->done, 1 << 30);
        ssize_t k = t->sending ? send(t->peer->fd, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(t->peer->fd, at, bytes, MSG_DONTWAIT);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
        if (k <= 0) star_lost(s, t->peer, during, k == 0 ? "" : strerror(errno), all, n);
        t->done += k;
        if (t->sending || t->done != head) continue;
        switch (frame_check(room, &t->frame, s->world)) {
            case FRAME_EXPECTED: break;
            case FRAME_SAYS_LOST:
                if (s->rank != 0) die_told(EXIT_PEER, "rank %d is lost, says rank 0, during %s", room->rank, during);
                star_lost(s, t->peer, during, "what it sent makes no sense", all, n);
            case FRAME_OF_OTHER_CALL:
                die(EXIT_INTERNAL, "rank %d is at exchange %u (kind %u, %" PRId64 " bytes, rank %d), rank %d at exchange %u (%s, %" PRId64
                    " bytes, rank %d); do all ranks run the same program with the same configuration?", star_rank_of(s, t->peer), room->sequence,
                    room->kind, room->bytes, room->rank, s->rank, t->frame.sequence, during, t->frame.bytes, t->frame.rank);
            case FRAME_GARBAGE: star_lost(s, t->peer, during, "what it sent makes no sense", all, n);
        }
    }
    return true;
}

// Runs all transfers at once until the last is complete.
static void star_run(Star *s, Transfer *t, int n, const char *during) {
    double deadline = clock_seconds() + s->call_seconds;
    struct pollfd *p = (struct pollfd *)host_alloc(sizeof(struct pollfd) * (size_t)n);
    Frame *room = (Frame *)host_alloc(sizeof(Frame) * (size_t)n);
    for (int i = 0; i < n; i++) {
        p[i].fd = t[i].peer->fd;
        p[i].events = t[i].sending ? POLLOUT : POLLIN;
    }
    for (int left = n; left > 0;) {
        double look = clock_seconds() + 1;
        if (poll_until(p, n, look < deadline ? look : deadline) == 0)
            for (int i = 0; i < n; i++) {
                if (p[i].fd < 0) continue;
                if (socket_host_silent(p[i].fd)) star_lost(s, t[i].peer, during, "its host is silent", t, n);
                if (clock_seconds() >= deadline) star_lost(s, t[i].peer, during, "no answer in time", t, n);
            }
        for (int i = 0; i < n; i++) {
            if (p[i].fd < 0 || !p[i].revents) continue;
            if (!transfer_step(s, t, n, &t[i], &room[i], during)) continue;
            p[i].fd = -1;
            left--;
        }
    }
    free(p);
    free(room);
}

static Transfer transfer_make(Peer *peer, bool sending, FrameKind kind, uint32_t sequence, int rank, void *data, int64_t bytes) {
    Transfer t = {peer, sending, {FRAME_MAGIC, (uint32_t)kind, sequence, rank, bytes}, (char *)data, 0};
    return t;
}

// x of rank `root` to all ranks; host memory, the same bytes on all.
static void star_broadcast(Star *s, void *x, int64_t bytes, int root) {
    if (s->world == 1) return;
    CHECK(root >= 0 && root < s->world && bytes >= 0, "root %d, %" PRId64 " bytes", root, bytes);
    pthread_mutex_lock(&s->in_call);
    uint32_t sequence = ++s->sequence;
    Transfer *t = (Transfer *)host_alloc(sizeof(Transfer) * (size_t)s->world);
    int n = 0;
    if (s->rank != 0) t[n++] = transfer_make(&s->peer[0], s->rank == root, FRAME_BROADCAST, sequence, root, x, bytes);
    else if (root != 0) {
        t[0] = transfer_make(&s->peer[root], false, FRAME_BROADCAST, sequence, root, x, bytes);
        star_run(s, t, 1, "a broadcast");
    }
    for (int r = 1; s->rank == 0 && r < s->world; r++)
        if (r != root) t[n++] = transfer_make(&s->peer[r], true, FRAME_BROADCAST, sequence, root, x, bytes);
    star_run(s, t, n, "a broadcast");
    free(t);
    pthread_mutex_unlock(&s->in_call);
}

// `bytes` of each rank to rank 0, in the order of the ranks; `all` (world x bytes) may be null on the others.
static void star_gather(Star *s, void *all, const void *mine, int64_t bytes) {
    if (s->rank == 0 && bytes > 0) memcpy(all, mine, (size_t)bytes);
    if (s->world == 1) return;
    pthread_mutex_lock(&s->in_call);
    uint32_t sequence = ++s->sequence;
    Transfer *t = (Transfer *)host_alloc(sizeof(Transfer) * (size_t)s->world);
    int n = 0;
    if (s->rank != 0) t[n++] = transfer_make(&s->peer[0], true, FRAME_GATHER, sequence, s->rank, (void *)(uintptr_t)mine, bytes);
    for (int r = 1; s->rank == 0 && r < s->world; r++)
        t[n++] = transfer_make(&s->peer[r], false, FRAME_GATHER, sequence, r, (char *)all + r * bytes, bytes);
    star_run(s, t, n, "a gather");
    free(t);
    pthread_mutex_unlock(&s->in_call);
}

// x[n] = sum, largest or smallest over the ranks, on all of them; a NaN anywhere gives NaN.
static void star_all_reduce(Star *s, double *x, int n, CommOp op) {
    if (s->world == 1) return;
    double *all = s->rank == 0 ? (double *)host_alloc(sizeof(double) * (size_t)n * (size_t)s->world) : NULL;
    star_gather(s, all, x, (int64_t)sizeof(double) * n);
    for (int r = 1; s->rank == 0 && r < s->world; r++)
        for (int i = 0; i < n; i++) {
            double y = all[(int64_t)r * n + i]; // x itself is rank 0's
            if (op == COMM_SUM) x[i] += y;
            else if (isnan(x[i]) || isnan(y)) x[i] = NAN;
            else if (op == COMM_MAX ? y > x[i] : y < x[i]) x[i] = y;
        }
    free(all);
    star_broadcast(s, x, (int64_t)sizeof(double) * n, 0);
}

// Returns when all ranks have come here.
static void star_barrier(Star *s) {
    double nothing = 0;
    star_all_reduce(s, &nothing, 1, COMM_SUM);
}

// Looks, from another thread, whether a peer is gone while no exchange is under way; ends the program if so.
static void star_watch(Star *s) {
    if (s->world == 1 || pthread_mutex_trylock(&s->in_call) != 0) return; // an exchange looks for itself
    for (int r = s->rank == 0 ? 1 : 0; r < (s->rank == 0 ? s->world : 1); r++) {
        Frame f;
        if (socket_host_silent(s->peer[r].fd)) star_lost(s, &s->peer[r], "training", "its host is silent", NULL, 0);
        ssize_t k = recv(s->peer[r].fd, &f, sizeof f, MSG_PEEK | MSG_DONTWAIT); // data that is there belongs to the next exchange
        bool gone = k == 0 || (k < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
        bool news = s->rank != 0 && k == (ssize_t)sizeof f && frame_check(&f, &f, s->world) == FRAME_SAYS_LOST;
        if (gone || news) star_lost(s, &s->peer[r], "training", k < 0 ? strerror(errno) : "", NULL, 0);
    }
    pthread_mutex_unlock(&s->in_call);
}

// The normal end: all ranks call it, after star_watch has been called for the last time anywhere (a star_barrier sees to that).
static void star_close(Star *s) {
    if (s->world > 1)
        for (int r = 0; r < (s->rank == 0 ? s->world : 1); r++)
            if (s->peer[r].fd >= 0) close(s->peer[r].fd);
    free(s->peer);
    s->peer = NULL;
    s->world = 1;
    pthread_mutex_destroy(&s->in_call);
}
