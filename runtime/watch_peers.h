// watch_peers.h - connections: frames out and in, the start at the hub (beat thread), and joining it (main thread).
// Part of watch.cpp.
//
// Whoever connects is a stranger until a whole HELLO with the job's nonce has come from him: at most MAX_STRANGERS at a
// time, STRANGER_S each, and a crowd pushes out the oldest, so that silent ones cannot keep the ranks out. When all are
// in, the listener closes for good. No length that arrives is believed: a frame has the size of its type, or its
// sender counts as lost.
#pragma once
#include "watch_exit.h"

// ---------------------------------------------------------------------------------------------------------------
// Connections (beat thread)

static void flush_out(Peer *p) {
    while (p->out_n > 0) {
        ssize_t n = send(p->fd, p->out, p->out_n, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n <= 0) return; // an error shows when reading, too
        p->out_n -= (size_t)n;
        memmove(p->out, p->out + n, p->out_n);
    }
}

static void send_frame(Peer *p, const void *frame, size_t bytes, bool may_drop) {
    if (p->fd < 0) return;
    flush_out(p);
    if (p->out_n + bytes > OUT_BYTES || (may_drop && p->out_n > 0)) return;
    memcpy(p->out + p->out_n, frame, bytes);
    p->out_n += bytes;
    flush_out(p);
}
static void send_simple(Peer *p, int type) {
    FrameHead h = frame_head(type);
    send_frame(p, &h, sizeof h, false);
}

// Rank r has announced its end by an error of its own, and now it has ended (or had the time to): the launcher reports
// the code of whoever ends first.
static void leave_after(int r) {
    char text[LINE_BYTES];
    Line l = {text, 0, sizeof text};
    put_rank(&l, r);
    put(&l, " left with an error of its own: ");
    put(&l, w.peer[r].words);
    leave(r, w.peer[r].words_code, text, SAY_NOTHING);
}

// Takes over a frame of rank r.
static void on_frame(int r, Frame *f) {
    Peer *p = &w.peer[r];
    switch (f->head.type) {
    case FRAME_BEAT:
        if (f->beat.phase >= WATCH_PHASES || f->beat.wait_op >= WATCH_OPS) verdict(r, " sent a beat that makes no sense");
        p->beat = f->beat;
        p->has_beat = true;
        return;
    case FRAME_WORDS:
    case FRAME_VERDICT:
        f->words.text[LINE_BYTES - 1] = 0;
        for (char *c = f->words.text; *c; c++) if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
        if (f->words.code < 1 || f->words.code > 255) f->words.code = EXIT_PEER;
        if (f->head.type == FRAME_WORDS) {
            p->words_ns = p->heard_ns;
            p->words_code = f->words.code;
            memcpy(p->words, f->words.text, sizeof p->words);
            return;
        }
        leave(f->words.culprit >= 0 && f->words.culprit < w.job.world ? f->words.culprit : -1, f->words.code, f->words.text, SAY_NOTHING);
    case FRAME_GO:
        if (is_hub()) break;
        STORE(w.go, 1);
        return;
    case FRAME_GOODBYE:
        if (!is_hub()) break;
        p->state = PEER_BYE;
        send_simple(p, FRAME_FAREWELL);
        return;
    case FRAME_FAREWELL:
        if (is_hub()) break;
        p->state = PEER_BYE;
        return;
    }
    verdict(r, " sent a frame that does not belong here");
}

// The connection of rank r has ended.
static void on_close(int r, int64_t now, int why) {
    Peer *p = &w.peer[r];
    close(p->fd);
    p->fd = -1;
    p->ended = true;
    if (p->state == PEER_BYE || w.said_goodbye) {
        p->state = PEER_BYE;
        return;
    }
    if (is_hub() && !w.go) { // it may only have been impatient
        p->state = PEER_ABSENT;
        p->heard_ns = now;
        p->in_n = p->out_n = 0;
        return;
    }
    if (p->words_ns) leave_after(r);
    if (why == ETIMEDOUT || why == EHOSTUNREACH || why == ENETUNREACH) verdict(r, " cannot be reached any more");
    verdict(r, " is gone: its connection closed without a goodbye");
}

static void receive(int r, int64_t now) {
    Peer *p = &w.peer[r];
    for (;;) {
        size_t want = p->in_n < sizeof(FrameHead) ? sizeof(FrameHead) : p->in.head.bytes;
        if (p->in_n < want) {
            ssize_t n = recv(p->fd, (char *)&p->in + p->in_n, want - p->in_n, MSG_DONTWAIT);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0 && errno == EAGAIN) return;
            if (n <= 0) { on_close(r, now, n < 0 ? errno : 0); return; }
            p->in_n += (size_t)n;
            p->heard_ns = now;
            if (p->in_n == sizeof(FrameHead) && !frame_valid(&p->in.head)) verdict(r, " sent bytes that are no beat");
        }
        if (p->in_n >= sizeof(FrameHead) && p->in_n == p->in.head.bytes) {
            p->in_n = 0;
            on_frame(r, &p->in);
            if (p->fd < 0) return;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The start at the hub (beat thread)

static void socket_options(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    // After an interruption the next beat comes with the next regular retransmission, not after a doubled pause.
    setsockopt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &on, sizeof on);
}

static void hello_fill(HelloFrame *h, int type) {
    memset(h, 0, sizeof *h);
    h->head = frame_head(type);
    memcpy(h->nonce, w.address.nonce, sizeof h->nonce);
    h->id = w.id;
    h->rank = w.job.rank;
    h->world = w.job.world;
    h->role = w.job.role;
    h->pid = getpid();
    memcpy(h->host, w.host, sizeof h->host);
}

static void peer_introduce(Peer *p, const HelloFrame *h) {
    p->id = h->id;
    p->pid = h->pid;
    p->role = h->role;
    memcpy(p->host, h->host, sizeof p->host);
    p->host[sizeof p->host - 1] = 0;
    for (char *c = p->host; *c; c++) if ((unsigned char)*c <= 0x20 || (unsigned char)*c >= 0x7f) *c = '?';
}

// A whole hello with the right nonce: the stranger becomes a peer.
static void admit(Stranger *s, int64_t now) {
    HelloFrame *h = &s->hello;
    int fd = s->fd;
    s->fd = -1;
    char text[LINE_BYTES];
    Line l = {text, 0, sizeof text};
    Peer *p = h->rank > 0 && h->rank < w.job.world ? &w.peer[h->rank] : NULL;
    Peer claimed = {};
    peer_introduce(&claimed, h);
    bool twice = p && p->state != PEER_ABSENT && p->id != h->id;
    if (!p || h->world != w.job.world || twice) {
        put(&l, claimed.host);
        put(&l, " (pid ");
        put_int(&l, h->pid);
        put(&l, ") says that it is rank ");
        put_int(&l, h->rank);
        put(&l, " of ");
        put_int(&l, h->world);
        if (twice) {
            put(&l, ", and so does ");
            put(&l, p->host);
            put(&l, " (pid ");
            put_int(&l, p->pid);
            put(&l, ")");
        } else {
            put(&l, ", but this job has ");
            put_int(&l, w.job.world);
            put(&l, " ranks");
        }
        put(&l, "; give each process its own RANK and all the same WORLD_SIZE");
        WordsFrame v;
        memset(&v, 0, sizeof v);
        v.head = frame_head(FRAME_VERDICT);
        v.culprit = -1;
        v.code = EXIT_CONFIG;
        memcpy(v.text, text, sizeof v.text);
        ssize_t n = send(fd, &v, sizeof v, MSG_DONTWAIT | MSG_NOSIGNAL);
        (void)n;
        leave(-1, EXIT_CONFIG, text, SAY);
    }
    if (p->fd >= 0) close(p->fd);
    peer_introduce(p, h);
    p->fd = fd;
    p->in_n = p->out_n = 0;
    p->state = PEER_IN;
    p->heard_ns = now;
    HelloFrame welcome;
    hello_fill(&welcome, FRAME_WELCOME);
    send_frame(p, &welcome, sizeof welcome, false);
}

static void stranger_accept(int64_t now) {
    for (int k = 0; k < MAX_STRANGERS; k++) { // bounded: a flood must not keep the thread from its beats
        int fd = accept4(w.listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) return;
        socket_options(fd);
        int slot = 0;
        for (int i = 0; i < MAX_STRANGERS; i++) {
            if (w.stranger[i].fd < 0) { slot = i; break; }
            if (w.stranger[i].since_ns < w.stranger[slot].since_ns) slot = i; // all taken: the oldest makes room
        }
        Stranger *s = &w.stranger[slot];
        if (s->fd >= 0) close(s->fd);
        s->fd = fd;
        s->since_ns = now;
        s->n = 0;
    }
}

static void stranger_drop(Stranger *s) {
    close(s->fd);
    s->fd = -1;
}

static void stranger_read(Stranger *s, int64_t now) {
    ssize_t n = recv(s->fd, (char *)&s->hello + s->n, sizeof s->hello - s->n, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) { stranger_drop(s); return; }
    s->n += (size_t)n;
    if (s->n >= sizeof(FrameHead) && (!frame_valid(&s->hello.head) || s->hello.head.type != FRAME_HELLO)) { stranger_drop(s); return; }
    if (s->n < sizeof s->hello) return;
    if (memcmp(s->hello.nonce, w.address.nonce, sizeof s->hello.nonce) != 0) { stranger_drop(s); return; }
    admit(s, now);
}

static void listener_close(void) {
    if (w.listen_fd >= 0) close(w.listen_fd);
    w.listen_fd = -1;
    for (int i = 0; i < MAX_STRANGERS; i++) if (w.stranger[i].fd >= 0) stranger_drop(&w.stranger[i]);
}

static void hub_join(int64_t now) {
    int missing = 0;
    for (int r = 1; r < w.job.world; r++) {
        Peer *p = &w.peer[r];
        if (p->state == PEER_ABSENT) missing++;
        if (p->state == PEER_ABSENT && p->heard_ns && now - p->heard_ns > RETURN_S * SECOND) verdict(r, " is gone: its connection closed before all ranks had come");
    }
    for (int i = 0; i < MAX_STRANGERS; i++)
        if (w.stranger[i].fd >= 0 && now - w.stranger[i].since_ns > STRANGER_S * SECOND) stranger_drop(&w.stranger[i]);
    if (missing == 0) {
        listener_close();
        for (int r = 1; r < w.job.world; r++) send_simple(&w.peer[r], FRAME_GO);
        STORE(w.go, 1);
        return;
    }
    if (now < LOAD(w.deadline_ns)) return;
    char text[LINE_BYTES];
    Line l = {text, 0, sizeof text};
    put(&l, missing == 1 ? "rank " : "ranks ");
    for (int r = 1, named = 0; r < w.job.world && named < 16; r++) {
        if (w.peer[r].state != PEER_ABSENT) continue;
        if (named++) put(&l, ", ");
        put_int(&l, r);
    }
    if (missing > 16) {
        put(&l, " and ");
        put_int(&l, missing - 16);
        put(&l, " more");
    }
    put(&l, missing == 1 ? " has" : " have");
    put(&l, " not come within ");
    put_seconds(&l, (int64_t)(1e3 * w.job.limits.start_s));
    put(&l, ", all others of ");
    put_int(&l, w.job.world);
    put(&l, " have; see what became of the processes, and whether their hosts reach ");
    put(&l, w.host);
    leave(-1, EXIT_PEER, text, SAY);
}

// ---------------------------------------------------------------------------------------------------------------
// The start, main thread: opening the hub's port, joining the hub

static void random_bytes(void *x, size_t n) {
    if (getrandom(x, n, 0) != (ssize_t)n) die(EXIT_INTERNAL, "no random bytes from the kernel: %s", strerror(errno));
}

// Addresses under which other hosts may reach this one, IPv4 first.
static void list_addresses(WatchAddress *a) {
    struct ifaddrs *list = NULL;
    if (getifaddrs(&list) != 0) return;
    for (int family = 4; family <= 6; family += 2)
        for (struct ifaddrs *i = list; i; i = i->ifa_next) {
            if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK) || a->n == 8) continue;
            const struct sockaddr_in *v4 = (const struct sockaddr_in *)i->ifa_addr;
            const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)i->ifa_addr;
            if (family == 4 && i->ifa_addr->sa_family == AF_INET) memcpy(a->addr[a->n].bytes, &v4->sin_addr, 4);
            else if (family == 6 && i->ifa_addr->sa_family == AF_INET6 && !IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) memcpy(a->addr[a->n].bytes, &v6->sin6_addr, 16);
            else continue;
            a->addr[a->n++].family = (uint8_t)family;
        }
    freeifaddrs(list);
}

static socklen_t make_sockaddr(struct sockaddr_storage *s, int family, const uint8_t *bytes, uint16_t port) {
    memset(s, 0, sizeof *s);
    if (family == 4) {
        struct sockaddr_in *v4 = (struct sockaddr_in *)s;
        v4->sin_family = AF_INET;
        v4->sin_port = htons(port);
        memcpy(&v4->sin_addr, bytes, 4);
        return sizeof *v4;
    }
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)s;
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    memcpy(&v6->sin6_addr, bytes, 16);
    return sizeof *v6;
}

static int try_listen(int family, const uint8_t *bytes, uint16_t *port) {
    struct sockaddr_storage s;
    int fd = socket(family == 4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), off = 0;
    if (fd < 0) return -1;
    if (family == 6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    socklen_t n = make_sockaddr(&s, family, bytes, 0);
    if (bind(fd, (struct sockaddr *)&s, n) != 0 || listen(fd, 1024) != 0) {
        int saved = errno;
        close(fd);
        errno = saved;
        return -1;
    }
    n = sizeof s;
    getsockname(fd, (struct sockaddr *)&s, &n);
    *port = ntohs(family == 4 ? ((struct sockaddr_in *)&s)->sin_port : ((struct sockaddr_in6 *)&s)->sin6_port);
    return fd;
}

static void hub_listen(WatchAddress *a) {
    static const uint8_t loopback[16] = {127, 0, 0, 1}, any[16] = {0};
    if (!w.job.one_host) list_addresses(a);
    if (a->n == 0) {
        a->addr[0].family = 4;
        memcpy(a->addr[0].bytes, loopback, 4);
        a->n = 1;
    }
    if (w.job.one_host) w.listen_fd = try_listen(4, loopback, &a->port);
    else {
        w.listen_fd = try_listen(6, any, &a->port); // takes IPv4 as well
        if (w.listen_fd < 0) w.listen_fd = try_listen(4, any, &a->port);
    }
    if (w.listen_fd < 0)
        die(EXIT_PEER, "rank 0 on %s cannot open a port for the other ranks: %s; see to the %s, and to net.ipv4.ip_local_port_range", w.host, strerror(errno), w.job.one_host ? "loopback interface" : "network");
}

// Reads exactly `bytes` within the time; false otherwise.
static bool read_within(int fd, void *dst, size_t bytes, double seconds) {
    int64_t until = now_ns() + to_ns(seconds);
    for (size_t n = 0; n < bytes;) {
        struct pollfd p = {fd, POLLIN, 0};
        int64_t left = until - now_ns();
        if (left <= 0) { errno = ETIMEDOUT; return false; }
        if (poll(&p, 1, (int)(left / MILLISECOND) + 1) <= 0) continue;
        ssize_t got = recv(fd, (char *)dst + n, bytes - n, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (got <= 0) { if (got == 0) errno = ECONNRESET; return false; }
        n += (size_t)got;
    }
    return true;
}

// One attempt at one of the hub's addresses. Returns the connection, or -1 with errno.
static int try_join(int family, const uint8_t *bytes, uint16_t port, HelloFrame *welcome) {
    struct sockaddr_storage s;
    socklen_t n = make_sockaddr(&s, family, bytes, port);
    int error = 0, fd = socket(family == 4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    HelloFrame hello;
    hello_fill(&hello, FRAME_HELLO);
    if (connect(fd, (struct sockaddr *)&s, n) != 0 && errno != EINPROGRESS) error = errno;
    if (!error) {
        struct pollfd p = {fd, POLLOUT, 0};
        socklen_t size = sizeof error;
        if (poll(&p, 1, 1000) <= 0) error = ETIMEDOUT;
        else getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    socket_options(fd);
    if (!error && send(fd, &hello, sizeof hello, MSG_NOSIGNAL) != (ssize_t)sizeof hello) error = errno ? errno : EPIPE;
    if (!error && !read_within(fd, &welcome->head, sizeof welcome->head, 5)) error = errno;
    if (!error && frame_valid(&welcome->head) && welcome->head.type == FRAME_VERDICT) _exit(EXIT_CONFIG); // refused; rank 0 says why
    if (!error && (!frame_valid(&welcome->head) || welcome->head.type != FRAME_WELCOME)) error = EPROTO;
    if (!error && !read_within(fd, (char *)welcome + sizeof welcome->head, sizeof *welcome - sizeof welcome->head, 5)) error = errno;
    if (!error && memcmp(welcome->nonce, w.address.nonce, sizeof welcome->nonce) != 0) error = EPROTO;
    if (!error) return fd;
    close(fd);
    errno = error;
    return -1;
}

static void join_hub(void) {
    const WatchAddress *a = &w.address;
    int64_t deadline = now_ns() + to_ns(w.job.limits.start_s + 5); // rank 0 is the first to say who is missing
    HelloFrame welcome;
    int64_t refused = 0, attempts = max_i64(1, min_i64(a->n, 8));
    for (int64_t k = 0;; k++) {
        int family = a->addr[k % attempts].family;
        const uint8_t *bytes = a->addr[k % attempts].bytes;
        int fd = try_join(family, bytes, a->port, &welcome);
        if (fd >= 0) {
            peer_introduce(&w.peer[0], &welcome);
            w.peer[0].fd = fd;
            w.peer[0].state = PEER_IN;
            w.peer[0].heard_ns = now_ns();
            return;
        }
        int why = errno;
        char shown[INET6_ADDRSTRLEN] = "?";
        inet_ntop(family == 4 ? AF_INET : AF_INET6, bytes, shown, sizeof shown);
        refused = why == ECONNREFUSED ? refused + 1 : 0;
        // The port was open when its number was sent: refused everywhere, again and again, means that rank 0 has left.
        if (now_ns() > deadline || refused >= 10 * attempts)
            die(EXIT_PEER, "rank %d on %s cannot reach rank 0 at %s, port %d: %s; see whether rank 0 says why it left, then to the network and its filters between the hosts", w.job.rank, w.host, shown, a->port, strerror(why));
        usleep(100000);
    }
}
