// rendezvous.h - how the ranks of a job find each other without MPI: the start of a star (star.h).
//
//     rank 0   listens on the job's port, takes in one connection a rank, closes the port, tells all to go on
//     others   connect to it, again and again until the start limit
//
//     rank -> 0   Hello    who I am: rank, world, job, host, process
//     0 -> rank   Answer   ACCEPTED at once; later GO when all are in, or REFUSED with rank 0's reason
//
// Both have a fixed size, so that no length is believed, and travel as they lie in memory: another byte order or version
// spoils the magic number. There is no secret: whoever can reach the port in the seconds of the start can get in the way,
// as with the launchers' own stores and with NCCL. Ranks that are all on one host use loopback, which nobody else reaches.
//
// Invariants (star.h's hold as well):
//  1. Whoever does not say a right Hello within STRANGER_SECONDS is dropped, at most STRANGERS_MAX of them are held at a time,
//     and the others wait in the listener's queue. Strangers never end a start.
//  2. A mistake of the start (a rank twice, different worlds, a rank that does not come) ends all ranks with one exit code;
//     rank 0 tells why, and so does a rank that it did not take in.
//  3. Nothing listens any more once all ranks are in.
#pragma once
#include "launch.h"
#include "star.h"
#include <netdb.h>
#include <sys/random.h>

// START_SECONDS: a little less than the watch gives the start, because what is said here is more exact.
enum { STRANGERS_MAX = 64, STRANGER_SECONDS = 2, ANSWER_SECONDS = 3, START_SECONDS = 55 };

static const uint64_t HELLO_MAGIC = 0x315a4452545047ull, ANSWER_MAGIC = 0x31534e41545047ull; // "GPTRDZ1", "GPTANS1"

typedef struct {
    uint64_t magic;
    int32_t rank, world, local_rank; // local_rank -1: the launcher does not say
    int32_t pid;
    uint64_t job;
    uint64_t process;        // random: tells a second try of one process from a second process
    uint64_t machine;        // equal for the ranks of one host
    char host[HOST_BYTES];   // for messages
} Hello;

typedef enum { ANSWER_ACCEPTED = 1, ANSWER_GO, ANSWER_OTHER_JOB, ANSWER_REFUSED } AnswerCode;

typedef struct {
    uint64_t magic;
    int32_t code, exit_code;         // exit_code: of ANSWER_REFUSED
    int32_t local_rank, local_world, n_hosts, reserved;
    char text[480];                  // of ANSWER_REFUSED
} Answer;

static_assert(sizeof(Hello) == 112 && sizeof(Answer) == 512, "messages have no padding");

// ---------------------------------------------------------------------------------------------------------------
// Parsing, without any socket

// Is this a Hello that a rank of some job could have sent? Makes the host's name printable and terminated.
static bool hello_parse(const void *bytes, Hello *h) {
    memcpy(h, bytes, sizeof *h);
    if (h->magic != HELLO_MAGIC || h->world < 2 || h->world > LAUNCH_WORLD_MAX || h->rank < 0 || h->rank >= h->world) return false;
    if (h->local_rank < -1 || h->local_rank >= h->world || h->pid < 0) return false;
    char raw[HOST_BYTES];
    memcpy(raw, h->host, sizeof raw);
    text_escape(h->host, sizeof h->host, raw, strnlen(raw, sizeof raw - 1));
    return true;
}

static bool answer_parse(const void *bytes, Answer *a) {
    memcpy(a, bytes, sizeof *a);
    if (a->magic != ANSWER_MAGIC || a->code < ANSWER_ACCEPTED || a->code > ANSWER_REFUSED) return false;
    bool in_range = a->local_rank >= 0 && a->local_rank < a->local_world && a->local_world <= LAUNCH_WORLD_MAX && a->n_hosts >= 1;
    if (a->code == ANSWER_GO && !in_range) return false;
    if (a->code == ANSWER_REFUSED && (a->exit_code < 1 || a->exit_code > 125)) return false;
    char raw[sizeof a->text];
    memcpy(raw, a->text, sizeof raw);
    text_escape(a->text, sizeof a->text, raw, strnlen(raw, sizeof raw - 1));
    return true;
}

// ---------------------------------------------------------------------------------------------------------------
// Sockets

static bool address_is_loopback(const struct sockaddr *a) {
    if (a->sa_family == AF_INET) return (ntohl(((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr) >> 24) == 127;
    return a->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr);
}

static struct addrinfo *address_look_up(const char *host, int port, int flags, int *error) {
    char service[16];
    struct addrinfo hints, *list = NULL;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV;
    snprintf(service, sizeof service, "%d", port);
    *error = getaddrinfo(host, service, &hints, &list);
    return *error ? NULL : list;
}

// A listening socket on this address, or -1 with errno.
static int listener_open(const struct addrinfo *a) {
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1, off = 0;
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on); // the connections of an earlier run may still be winding down
    if (a->ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off); // IPv4 peers as well
    if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

// Listens on the first free port of the launch: on loopback when rank 0's address is a number there, else on all addresses.
// A name says nothing: systems give a host's own name a loopback number, and some launchers call rank 0's host "localhost".
static int rendezvous_listen(const Launch *l) {
    char shown[LAUNCH_ADDRESS_BYTES];
    text_escape(shown, sizeof shown, l->address, strlen(l->address));
    for (int port = l->port; port < l->port + l->n_ports; port++) {
        int error = 0, fd = -1;
        struct addrinfo *named = address_look_up(l->address, port, AI_NUMERICHOST, &error);
        if (named && address_is_loopback(named->ai_addr)) fd = listener_open(named);
        else {
            const char *everywhere[] = {"::", "0.0.0.0"};
            for (int i = 0; i < 2 && fd < 0; i++) {
                struct addrinfo *a = address_look_up(everywhere[i], port, AI_NUMERICHOST, &error);
                if (!a) continue;
                fd = listener_open(a);
                freeaddrinfo(a);
                if (fd < 0 && errno == EADDRINUSE) break;
            }
        }
        int listen_error = errno;
        if (named) freeaddrinfo(named);
        if (fd >= 0) return fd;
        if (listen_error != EADDRINUSE)
            die(EXIT_CONFIG, "rank 0 cannot listen on port %d for the other ranks (rank 0's address is \"%s\"): %s", port, shown,
                strerror(listen_error));
    }
    if (l->n_ports > 1)
        die(EXIT_CONFIG, "rank 0 cannot listen for the other ranks: ports %d to %d are all taken; choose one with MASTER_PORT",
            l->port, l->port + l->n_ports - 1);
    die(EXIT_CONFIG, "rank 0 cannot listen for the other ranks: port %d is taken; end the program that holds it "
        "(ss -ltnp 'sport = :%d' shows it), or choose another with MASTER_PORT", l->port, l->port);
}

// ---------------------------------------------------------------------------------------------------------------
// The start, rank 0's side

typedef struct {
    int fd;
    double deadline;
    size_t bytes;                // of the Hello, so far
    unsigned char data[sizeof(Hello)];
} Stranger;

typedef struct {
    const Launch *launch;
    Star *star;
    Hello *hello;                // by rank, of those that are in
    bool *left;                  // by rank: came, and went again
    int listener, n_in, n_strangers;
    int64_t n_dropped, n_other_jobs;
    Stranger stranger[STRANGERS_MAX];
} Start;

static Hello hello_make(const Launch *l) {
    Hello h;
    memset(&h, 0, sizeof h);
    h.magic = HELLO_MAGIC;
    h.rank = l->rank;
    h.world = l->world;
    h.local_rank = l->local_rank;
    h.pid = (int32_t)getpid();
    h.job = l->job;
    if (getrandom(&h.process, sizeof h.process, 0) != (ssize_t)sizeof h.process)
        h.process = rng_mix((uint64_t)getpid() ^ (uint64_t)(clock_seconds() * 1e9));
    if (gethostname(h.host, sizeof h.host - 1) != 0) strcpy(h.host, "unknown");
    char why[128];
    int64_t bytes = 0;
    int fd = file_open_read("/proc/sys/kernel/random/boot_id", true, &bytes, why, sizeof why);
    char boot[64] = "";
    if (fd >= 0) {
        if (read(fd, boot, sizeof boot - 1) < 0) boot[0] = 0;
        close(fd);
    }
    h.machine = rng_mix(text_hash(boot) ^ text_hash(h.host)); // containers of one machine have different names
    return h;
}

static Answer answer_make(AnswerCode code) {
    Answer a;
    memset(&a, 0, sizeof a);
    a.magic = ANSWER_MAGIC;
    a.code = code;
    return a;
}

static void answer_send(int fd, Answer a) { // the first bytes of a connection always fit into its buffer: no waiting
    socket_exactly(fd, &a, sizeof a, true, 0);
}

// All ranks that are in, and `also` (a descriptor, or -1), end with this text.
__attribute__((noreturn)) PRINTF_LIKE(4, 5) static void start_refuse(Start *s, int also, int exit_code, const char *format, ...) {
    Answer a = answer_make(ANSWER_REFUSED);
    a.exit_code = exit_code;
    va_list args;
    va_start(args, format);
    vsnprintf(a.text, sizeof a.text, format, args);
    va_end(args);
    if (also >= 0) answer_send(also, a);
    for (int r = 1; r < s->star->world; r++)
        if (s->star->peer[r].fd >= 0) answer_send(s->star->peer[r].fd, a);
    die(exit_code, "%s", a.text);
}

// The ranks that are not in, as "1, 4-7, 9", cut to the room.
static void start_missing(const Start *s, char *text, size_t room) {
    size_t n = 0;
    text[0] = 0;
    for (int r = 1, end; r < s->star->world && n + 32 < room; r = end + 1) {
        for (end = r; end < s->star->world && s->star->peer[end].fd < 0; end++) {}
        if (end == r) continue;
        n += (size_t)snprintf(text + n, room - n, "%s%d", n ? ", " : "", r);
        if (end - r > 1) n += (size_t)snprintf(text + n, room - n, "-%d", end - 1);
        if (n + 32 >= room) snprintf(text + n, room - n, ", ...");
    }
}

static bool start_is_in(const Star *star, int rank) { return rank == 0 || star->peer[rank].fd >= 0; }

// Takes a rank in, or refuses. The descriptor is the star's or closed afterwards.
static void start_hello(Start *s, int fd, const Hello *h) {
    Star *star = s->star;
    const Hello *self = &s->hello[0];
    if (h->job != self->job) {
        answer_send(fd, answer_make(ANSWER_OTHER_JOB));
        close(fd);
        s->n_other_jobs++;
        return;
    }
    if (h->world != star->world)
        start_refuse(s, fd, EXIT_CONFIG, "rank %d (host %s, process %d) was told that there are %d ranks, rank 0 (host %s, "
            "process %d) that there are %d; start all ranks with one command", h->rank, h->host, h->pid, h->world, self->host, self->pid, star->world);
    Peer *p = &star->peer[h->rank];
    const Hello *before = &s->hello[h->rank];
    if (start_is_in(star, h->rank) && before->process != h->process)
        start_refuse(s, fd, EXIT_CONFIG, "rank %d is claimed by two processes: host %s, process %d, and host %s, process %d; is a second job "
            "using port %d (choose another with MASTER_PORT), or a rank started twice?", h->rank, before->host,
            before->pid, h->host, h->pid, s->launch->port);
    for (int r = 0; h->local_rank >= 0 && r < star->world; r++) {
        const Hello *o = &s->hello[r];
        if (r != h->rank && start_is_in(star, r) && o->machine == h->machine && o->local_rank == h->local_rank)
            start_refuse(s, fd, EXIT_CONFIG, "ranks %d and %d on host %s both have local rank %d (processes %d and %d); "
                "each rank of a host needs a number of its own", r, h->rank, h->host, h->local_rank, o->pid, h->pid);
    }
    if (p->fd >= 0) close(p->fd); // the same process tried again
    else s->n_in++;
    p->fd = fd;
    p->pid = h->pid;
    memcpy(p->host, h->host, sizeof p->host);
    s->hello[h->rank] = *h;
    answer_send(fd, answer_make(ANSWER_ACCEPTED));
}

// Reads what a stranger has to say. True when he is one no more: the slot is free.
static bool start_listen_to(Start *s, Stranger *x) {
    for (;;) {
        ssize_t n = recv(x->fd, x->data + x->bytes, sizeof x->data - x->bytes, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
        if (n <= 0) break;
        x->bytes += (size_t)n;
        size_t known = x->bytes < sizeof HELLO_MAGIC ? x->bytes : sizeof HELLO_MAGIC;
        if (memcmp(x->data, &HELLO_MAGIC, known) != 0) break;
        if (x->bytes < sizeof x->data) continue;
        Hello h;
        if (!hello_parse(x->data, &h)) break;
        start_hello(s, x->fd, &h);
        return true;
    }
    close(x->fd);
    s->n_dropped++;
    return true;
}

static void start_accept(Start *s) {
    while (s->n_strangers < STRANGERS_MAX) {
        int fd = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
                start_refuse(s, -1, EXIT_CONFIG, "rank 0 cannot take in %d ranks: %s; raise the limit on open files (ulimit -n)",
                    s->star->world, strerror(errno));
            return; // nobody waits, or he left before his turn
        }
        socket_prepare(fd);
        Stranger *x = &s->stranger[s->n_strangers++];
        x->fd = fd;
        x->bytes = 0;
        x->deadline = clock_seconds() + STRANGER_SECONDS;
    }
}

static void start_gather_ranks(Start *s, double deadline, double limit_s) {
    Star *star = s->star;
    struct pollfd *p = (struct pollfd *)host_alloc(sizeof(struct pollfd) * (size_t)(1 + STRANGERS_MAX + star->world));
    while (s->n_in < star->world) {
        int n = 0, n_asked = s->n_strangers;
        double next = deadline;
        p[n].fd = s->n_strangers < STRANGERS_MAX ? s->listener : -1;
        p[n++].events = POLLIN;
        for (int i = 0; i < n_asked; i++) {
            p[n].fd = s->stranger[i].fd;
            p[n++].events = POLLIN;
            if (s->stranger[i].deadline < next) next = s->stranger[i].deadline;
        }
        for (int r = 1; r < star->world; r++) {
            p[n].fd = star->peer[r].fd;
            p[n++].events = POLLRDHUP;
        }
        poll_until(p, n, next);
        double now = clock_seconds();
        if (now >= deadline) {
            char missing[200], left[160] = "";
            start_missing(s, missing, sizeof missing);
            for (int r = 1; r < star->world && !left[0]; r++)
                if (star->peer[r].fd < 0 && s->left[r])
                    snprintf(left, sizeof left, "; rank %d came and left (host %s, process %d)", r, star->peer[r].host, star->peer[r].pid);
            start_refuse(s, -1, EXIT_PEER, "%d of %d ranks did not come within %.0f s: %s%s; %" PRId64 " other connections were no ranks, %"
                PRId64 " of another job", star->world - s->n_in, star->world, limit_s, missing, left, s->n_dropped, s->n_other_jobs);
        }
        for (int r = 1; r < star->world; r++) {
            Peer *peer = &star->peer[r];
            if (peer->fd < 0 || !p[1 + n_asked + r - 1].revents) continue;
            close(peer->fd); // it may be on its way to try again; if not, it will be missing
            peer->fd = -1;
            s->left[r] = true;
            s->n_in--;
        }
        for (int i = n_asked; i-- > 0;) { // downwards, so that filling a hole with the last one skips nobody
            Stranger *x = &s->stranger[i];
            bool gone = p[1 + i].revents && start_listen_to(s, x);
            if (!gone && now >= x->deadline) {
                close(x->fd);
                s->n_dropped++;
                gone = true;
            }
            if (gone) *x = s->stranger[--s->n_strangers];
        }
        if (p[0].revents) start_accept(s);
    }
    free(p);
}

// What rank r is told when all are in: its place among the ranks of its host, and how many hosts there are.
static Answer start_place(const Start *s, int r) {
    Answer a = answer_make(ANSWER_GO);
    for (int o = 0; o < s->star->world; o++) {
        if (s->hello[o].machine != s->hello[r].machine) continue;
        if (o < r) a.local_rank++;
        a.local_world++;
    }
    a.n_hosts = s->star->n_hosts;
    return a;
}

static void rendezvous_serve(Star *star, const Launch *l, double limit_s) {
    Start s;
    memset(&s, 0, sizeof s);
    s.launch = l;
    s.star = star;
    s.n_in = 1;
    s.hello = (Hello *)host_alloc(sizeof(Hello) * (size_t)star->world);
    s.left = (bool *)host_alloc(sizeof(bool) * (size_t)star->world);
    s.hello[0] = hello_make(l);
    s.listener = rendezvous_listen(l);
    start_gather_ranks(&s, clock_seconds() + limit_s, limit_s);
    close(s.listener);
    for (int i = 0; i < s.n_strangers; i++) close(s.stranger[i].fd);
    for (int r = 0; r < star->world; r++) {
        Answer a = start_place(&s, r);
        if (a.local_rank == 0) star->n_hosts++; // the first rank of its host
        if (r == 0) { star->local_rank = a.local_rank; star->local_world = a.local_world; }
    }
    for (int r = 1; r < star->world; r++) answer_send(star->peer[r].fd, start_place(&s, r));
    free(s.hello);
    free(s.left);
}

// ---------------------------------------------------------------------------------------------------------------
// The start, the other ranks' side

// The system may give a connection the very port that it calls; it then succeeds without anybody listening. Such a one is
// made to leave no trace when it is closed, or it would keep rank 0 from the port for a minute.
static bool socket_met_itself(int fd) {
    struct sockaddr_storage here, there;
    socklen_t n = sizeof here, m = sizeof there;
    if (getsockname(fd, (struct sockaddr *)&here, &n) != 0 || getpeername(fd, (struct sockaddr *)&there, &m) != 0) return false;
    if (n != m || memcmp(&here, &there, n) != 0) return false;
    struct linger at_once = {1, 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    return true;
}

// One try at one address, whose answer may take until `patience`. Returns the accepted connection, or -1 with a reason.
static int call_address(const struct addrinfo *a, Hello hello, double patience, const char **why_not) {
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) { *why_not = strerror(errno); return -1; }
    int error = connect(fd, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
        struct pollfd p = {fd, POLLOUT, 0};
        socklen_t size = sizeof error;
        if (poll_until(&p, 1, clock_seconds() + ANSWER_SECONDS) == 0) error = ETIMEDOUT; // the name's next address may do better
        else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    }
    const char *why = error ? strerror(error) : socket_met_itself(fd) ? "nobody listens there" : NULL;
    unsigned char bytes[sizeof(Answer)];
    Answer answer;
    if (!why) {
        socket_prepare(fd);
        why = socket_exactly(fd, &hello, sizeof hello, true, patience);
        if (!why) why = socket_exactly(fd, bytes, sizeof bytes, false, patience);
        if (why || !answer_parse(bytes, &answer)) why = why && why[0] ? why : "whoever listens there is not rank 0 of this program";
        else if (answer.code == ANSWER_REFUSED) die(answer.exit_code, "%s", answer.text);
        else if (answer.code == ANSWER_OTHER_JOB) why = "rank 0 of another job listens there";
    }
    if (!why) return fd;
    *why_not = why;
    close(fd);
    return -1;
}

// Tries all ports and addresses in turn until rank 0 has taken us in.
static int call_rank_0(const Launch *l, const Hello *hello, double deadline, double limit_s) {
    const char *why = "no address";
    char shown[LAUNCH_ADDRESS_BYTES];
    text_escape(shown, sizeof shown, l->address, strlen(l->address));
    int name_error = 0;
    for (double pause = 0.02;; pause = pause < 0.5 ? 1.5 * pause : pause) {
        for (int port = l->port; port < l->port + l->n_ports; port++) {
            struct addrinfo *list = address_look_up(l->address, port, 0, &name_error);
            int fd = -1;
            for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
                double patience = clock_seconds() + ANSWER_SECONDS; // with one port there is nowhere else to ask
                fd = call_address(a, *hello, l->n_ports == 1 || patience > deadline ? deadline : patience, &why);
            }
            if (list) freeaddrinfo(list);
            if (fd >= 0) return fd;
        }
        if (clock_seconds() + pause >= deadline) break;
        struct timespec sleep = {0, (long)(pause * 1e9)};
        nanosleep(&sleep, NULL);
    }
    if (name_error)
        die(EXIT_CONFIG, "MASTER_ADDR = \"%s\": no such host (%s); give the name or number of rank 0's host", shown, gai_strerror(name_error));
    die(EXIT_PEER, "rank 0 was not reached at %s, port %d%s within %.0f s: %s; did it start, and is MASTER_ADDR its host?", shown, l->port,
        l->n_ports > 1 ? " and the next ones," : "", limit_s, why);
}

static void rendezvous_call(Star *star, const Launch *l, double limit_s) {
    Peer *zero = &star->peer[0];
    Hello hello = hello_make(l);
    text_escape(zero->host, sizeof zero->host, l->address, strlen(l->address));
    zero->fd = call_rank_0(l, &hello, clock_seconds() + limit_s, limit_s);
    unsigned char bytes[sizeof(Answer)];
    Answer answer = answer_make(ANSWER_ACCEPTED);
    // rank 0 decides within its own limit, which began at another time than ours
    const char *why = socket_exactly(zero->fd, bytes, sizeof bytes, false, clock_seconds() + limit_s + 2 * ANSWER_SECONDS);
    if (!why && !answer_parse(bytes, &answer)) why = "its answer makes no sense";
    if (why) die(EXIT_PEER, "rank 0 is lost during the start: %s", why[0] ? why : "it closed the connection");
    if (answer.code == ANSWER_REFUSED) die_told(answer.exit_code, "%s", answer.text);
    star->local_rank = answer.local_rank;
    star->local_world = answer.local_world;
    star->n_hosts = answer.n_hosts;
}

// Joins all ranks of the launch, or ends the program: with EXIT_CONFIG for a mistake, with EXIT_PEER when ranks do not come
// within limit_s seconds. One rank: no sockets.
static void rendezvous(Star *star, const Launch *l, double limit_s) {
    memset(star, 0, sizeof *star);
    star->rank = message_rank = l->rank;
    star->world = l->world;
    star->local_world = star->n_hosts = 1;
    star->call_seconds = CALL_SECONDS;
    pthread_mutex_init(&star->in_call, NULL);
    if (l->world == 1) return;
    int n_peers = l->rank == 0 ? l->world : 1;
    star->peer = (Peer *)host_alloc(sizeof(Peer) * (size_t)n_peers);
    for (int r = 0; r < n_peers; r++) star->peer[r].fd = -1;
    star->n_hosts = 0;
    if (l->rank == 0) rendezvous_serve(star, l, limit_s);
    else rendezvous_call(star, l, limit_s);
    if (l->local_rank >= 0) star->local_rank = l->local_rank;
    if (l->local_world > 0) star->local_world = l->local_world;
}
