// test_rendezvous.h - tests of launch.h, rendezvous.h and star.h: ranks are child processes of the test on this host.
//
// run_ranks forks one child a rank, in any order, and gives each a function to run; what the children find they leave in
// shared memory, what they say on stderr in a file without a name. A child that hangs is ended by its alarm and fails the
// test. The children do TCP and nothing else, so that the rows need neither MPI nor a GPU.
#pragma once
#include "../runtime/rendezvous.h"
#include "dies.h"
#include <signal.h>
#include <sys/mman.h>

enum { RANKS_MAX = 8, RANK_LEFT_SECONDS = 40 };

typedef struct {
    Launch launch;
    double limit_s;                            // of the start
    int index;                                 // of the child; may differ from its rank
    void (*body)(Star *star, void *shared);    // null: only the start
    void *shared;
} RankTask;

typedef struct {
    pid_t pid;
    int text_fd, code;       // exit code, or 128 + signal
    double seconds;          // from the first fork to its end
    char text[1024];         // stderr
} RankRun;

// ---------------------------------------------------------------------------------------------------------------
// Children

static void *shared_alloc(size_t bytes) { // zeroed, seen by parent and children
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED, "%zu bytes: %s", bytes, strerror(errno));
    return p;
}

static int free_port(void) { // free a moment ago, on loopback
    struct sockaddr_in a;
    socklen_t size = sizeof a;
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && getsockname(fd, (struct sockaddr *)&a, &size) == 0, "%s", strerror(errno));
    close(fd);
    return ntohs(a.sin_port);
}

static Launch test_launch(int rank, int world, int port) {
    Launch l;
    memset(&l, 0, sizeof l);
    l.launcher = "test";
    l.rank = rank;
    l.world = world;
    l.local_rank = l.local_world = -1;
    strcpy(l.address, "127.0.0.1");
    l.port = port;
    l.n_ports = 1;
    return l;
}

static void rank_start(RankRun *run, const RankTask *task) {
    run->text_fd = memfd_create("stderr", MFD_CLOEXEC);
    CHECK(run->text_fd >= 0, "memfd_create: %s", strerror(errno));
    fflush(stdout);
    fflush(stderr);
    run->pid = fork();
    CHECK(run->pid >= 0, "fork: %s", strerror(errno));
    if (run->pid) return;
    dup2(run->text_fd, STDERR_FILENO);
    alarm(RANK_LEFT_SECONDS);
    signal(SIGPIPE, SIG_DFL); // no exchange may need it ignored
    Star star;
    rendezvous(&star, &task->launch, task->limit_s);
    if (task->body) task->body(&star, task->shared);
    star_close(&star);
    _exit(0);
}

static void rank_wait(RankRun *run, double start) {
    int status = 0;
    while (waitpid(run->pid, &status, 0) < 0 && errno == EINTR) {}
    run->seconds = clock_seconds() - start;
    run->code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    ssize_t n = pread(run->text_fd, run->text, sizeof run->text - 1, 0);
    run->text[n > 0 ? n : 0] = 0;
    close(run->text_fd);
}

// All tasks at once, started in the order given (null: as they are) with `pause_s` between two of them.
static void run_ranks(const RankTask *task, int n, const int *order, double pause_s, RankRun *run) {
    double start = clock_seconds();
    for (int i = 0; i < n; i++) {
        int which = order ? order[i] : i;
        rank_start(&run[which], &task[which]);
        if (pause_s > 0) usleep((useconds_t)(pause_s * 1e6));
    }
    for (int i = 0; i < n; i++) rank_wait(&run[i], start);
}

static void tasks_make(RankTask *task, int n, int port, double limit_s, void (*body)(Star *, void *), void *shared) {
    memset(task, 0, sizeof(RankTask) * (size_t)n);
    for (int r = 0; r < n; r++) {
        task[r].launch = test_launch(r, n, port);
        task[r].limit_s = limit_s;
        task[r].body = body;
        task[r].shared = shared;
    }
}

static void expect_code(Test *t, const char *what, const RankRun *run, int code) {
    t->compared++;
    if (run->code != code) test_fail(t, "%s: exit code %d, expected %d; stderr \"%.300s\"", what, run->code, code, run->text);
}

// The run ended with this code and one error line that has all the parts.
static void expect_refused(Test *t, const char *what, const RankRun *run, int code, const char *a, const char *b, const char *c) {
    const char *part[] = {"error: ", a, b, c};
    expect_code(t, what, run, code);
    for (int i = 0; i < 4; i++)
        if (part[i]) expect_contains(t, what, run->text, part[i]);
    t->compared++;
    const char *newline = strchr(run->text, '\n');
    if (!newline || newline[1]) test_fail(t, "%s: not one line on stderr: \"%.300s\"", what, run->text);
}

// Rank 0 has told, and this rank followed: the code, and no words.
static void expect_followed(Test *t, const char *what, const RankRun *run, int code) {
    expect_code(t, what, run, code);
    expect_equal_text(t, what, run->text, "");
}

// ---------------------------------------------------------------------------------------------------------------
// Exchanges

static unsigned char broadcast_byte(int root, int64_t size, int64_t i) { return (unsigned char)(rng_mix((uint64_t)(i / 8 + 1000003 * root + 77 * size)) >> (8 * (i % 8))); }

// Values whose sum depends on the order of addition.
static double reduce_value(int rank, int i) { return (rng_uniform(5, (uint64_t)rank, (uint64_t)i) - 0.5) * (double)(1ll << (i * 7 + rank * 11) % 60); }

typedef struct {
    int64_t wrong_bytes, bytes, wrong_values, values;
    int rank, local_rank, local_world, n_hosts;
    int cloexec, listens;    // the star's descriptors; somebody still listens on the port
    double entered, left;    // of the barrier
    int port;
} ExchangeResult;

static bool port_listens(int port) {
    int error = 0;
    struct addrinfo *a = address_look_up("127.0.0.1", port, AI_NUMERICHOST, &error);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool yes = connect(fd, a->ai_addr, a->ai_addrlen) == 0;
    close(fd);
    freeaddrinfo(a);
    return yes;
}

static void exchange_body(Star *s, void *shared) {
    ExchangeResult *e = &((ExchangeResult *)shared)[s->rank];
    e->rank = s->rank;
    e->local_rank = s->local_rank;
    e->local_world = s->local_world;
    e->n_hosts = s->n_hosts;
    e->cloexec = 1;
    for (int r = 0; s->world > 1 && r < (s->rank == 0 ? s->world : 1); r++)
        if (s->peer[r].fd >= 0 && !(fcntl(s->peer[r].fd, F_GETFD) & FD_CLOEXEC)) e->cloexec = 0;
    const int64_t sizes[] = {0, 1, 7, 4096, 300007};
    for (int root = 0; root < s->world; root++)
        for (int k = 0; k < 5; k++) {
            unsigned char *x = (unsigned char *)host_alloc((size_t)sizes[k]);
            for (int64_t i = 0; i < sizes[k]; i++) x[i] = s->rank == root ? broadcast_byte(root, sizes[k], i) : 0xee;
            star_broadcast(s, x, sizes[k], root);
            for (int64_t i = 0; i < sizes[k]; i++) e->wrong_bytes += x[i] != broadcast_byte(root, sizes[k], i);
            e->bytes += sizes[k];
            free(x);
        }
    enum { N = 101 };
    for (int op = COMM_SUM; op <= COMM_MIN; op++) {
        double x[N], want[N];
        for (int i = 0; i < N; i++) {
            x[i] = reduce_value(s->rank, i);
            want[i] = reduce_value(0, i);
            for (int r = 1; r < s->world; r++) {
                double y = reduce_value(r, i);
                want[i] = op == COMM_SUM ? want[i] + y : op == COMM_MAX ? fmax(want[i], y) : fmin(want[i], y);
            }
        }
        star_all_reduce(s, x, N, (CommOp)op);
        for (int i = 0; i < N; i++) e->wrong_values += memcmp(&x[i], &want[i], sizeof(double)) != 0;
        e->values += N;
        double nan = s->rank == s->world - 1 ? NAN : 1;
        star_all_reduce(s, &nan, 1, (CommOp)op);
        e->wrong_values += !isnan(nan);
        e->values++;
        star_all_reduce(s, NULL, 0, (CommOp)op);
    }
    int64_t mine = 100 + s->rank, all[RANKS_MAX] = {0};
    star_gather(s, all, &mine, sizeof mine);
    for (int r = 0; s->rank == 0 && r < s->world; r++) e->wrong_values += all[r] != 100 + r;
    e->listens = port_listens(e->port);
    usleep((useconds_t)(20000 * ((s->rank * 3) % 5)));
    e->entered = clock_seconds();
    star_barrier(s);
    e->left = clock_seconds();
}

static void test_exchanges(Test *t) {
    const int orders[][RANKS_MAX] = {{0}, {1, 0}, {2, 0, 3, 1}, {7, 3, 5, 1, 0, 6, 2, 4}};
    const int worlds[] = {1, 2, 4, 8};
    for (int w = 0; w < 4; w++) {
        RankTask task[RANKS_MAX];
        RankRun run[RANKS_MAX];
        int world = worlds[w], port = free_port();
        ExchangeResult *e = (ExchangeResult *)shared_alloc(sizeof(ExchangeResult) * RANKS_MAX);
        tasks_make(task, world, port, 20, exchange_body, e);
        for (int r = 0; r < world; r++) e[r].port = port;
        run_ranks(task, world, orders[w], 0.02, run);
        double last_in = 0, first_out = 1e300;
        for (int r = 0; r < world; r++) {
            expect_code(t, "a rank", &run[r], 0);
            expect_equal_i64(t, "wrong bytes of broadcasts", e[r].wrong_bytes, 0);
            expect_equal_i64(t, "wrong values of reductions", e[r].wrong_values, 0);
            expect_equal_i64(t, "bytes looked at", e[r].bytes, world * 304111);
            expect_equal_i64(t, "the local rank", e[r].local_rank, r);
            expect_equal_i64(t, "ranks of this host", e[r].local_world, world);
            expect_equal_i64(t, "hosts", e[r].n_hosts, 1);
            expect_equal_i64(t, "close-on-exec", e[r].cloexec, 1);
            expect_equal_i64(t, "a port that still listens", e[r].listens, 0);
            t->compared += e[r].bytes + e[r].values;
            if (e[r].entered > last_in) last_in = e[r].entered;
            if (e[r].left < first_out) first_out = e[r].left;
        }
        expect_true(t, first_out >= last_in, "a rank left the barrier %.3g s before the last one came", last_in - first_out);
        munmap(e, sizeof(ExchangeResult) * RANKS_MAX);
    }
}

// 64 MB from the first and from the last rank, while one rank is slow to read.
static void large_body(Star *s, void *shared) {
    ExchangeResult *e = &((ExchangeResult *)shared)[s->rank];
    const int64_t n = 64 << 20;
    unsigned char *x = (unsigned char *)host_alloc((size_t)n);
    for (int root = 0; root < s->world; root += s->world - 1) {
        for (int64_t i = 0; i < n; i += 4096) x[i] = s->rank == root ? broadcast_byte(root, n, i) : 0xee;
        if (s->rank == 1) usleep(200000);
        star_broadcast(s, x, n, root);
        for (int64_t i = 0; i < n; i += 4096) e->wrong_bytes += x[i] != broadcast_byte(root, n, i);
        e->bytes += n / 4096;
    }
    free(x);
}

static void test_large_broadcast(Test *t) {
    RankTask task[4];
    RankRun run[4];
    ExchangeResult *e = (ExchangeResult *)shared_alloc(sizeof(ExchangeResult) * 4);
    tasks_make(task, 4, free_port(), 20, large_body, e);
    run_ranks(task, 4, NULL, 0, run);
    for (int r = 0; r < 4; r++) {
        expect_code(t, "a rank", &run[r], 0);
        expect_equal_i64(t, "wrong bytes", e[r].wrong_bytes, 0);
        expect_equal_i64(t, "pages looked at", e[r].bytes, 2 * 16384);
        t->compared += e[r].bytes;
    }
    munmap(e, sizeof(ExchangeResult) * 4);
}

// Rank 0 by the names and numbers that people write, both families.
static void test_addresses(Test *t) {
    const char *address[] = {"localhost", "::1", "127.0.0.1", "127.3.2.1", "0.0.0.0"}; // the last: "all", which calls this host
    for (int k = 0; k < 5; k++) {
        struct sockaddr_in6 six;
        memset(&six, 0, sizeof six);
        six.sin6_family = AF_INET6;
        six.sin6_addr = in6addr_loopback;
        int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
        bool has_six = fd >= 0 && bind(fd, (struct sockaddr *)&six, sizeof six) == 0;
        if (fd >= 0) close(fd);
        if (strcmp(address[k], "::1") == 0 && !has_six) continue;
        RankTask task[2];
        RankRun run[2];
        tasks_make(task, 2, free_port(), 10, NULL, NULL);
        for (int r = 0; r < 2; r++) strcpy(task[r].launch.address, address[k]);
        run_ranks(task, 2, NULL, 0, run);
        for (int r = 0; r < 2; r++) expect_code(t, address[k], &run[r], 0);
    }
}

// What the listener is bound to: loopback for numbers there, all addresses otherwise.
static void test_listener(Test *t) {
    const struct { const char *address; bool loopback; } rows[] = {{"127.0.0.1", true}, {"127.9.9.9", true}, {"localhost", false}, {"head-node", false}, {"10.1.2.3", false}};
    for (int i = 0; i < 5; i++) {
        Launch l = test_launch(0, 2, free_port());
        strcpy(l.address, rows[i].address);
        int fd = rendezvous_listen(&l);
        struct sockaddr_storage a;
        socklen_t size = sizeof a;
        expect_true(t, getsockname(fd, (struct sockaddr *)&a, &size) == 0, "%s", strerror(errno));
        expect_true(t, address_is_loopback((struct sockaddr *)&a) == rows[i].loopback, "rank 0 at %s listens on %s", rows[i].address, rows[i].loopback ? "more than loopback" : "loopback alone");
        expect_true(t, fcntl(fd, F_GETFD) & FD_CLOEXEC, "the listener survives exec");
        close(fd);
    }
}

// A connection that meets itself is nobody's.
static void test_meeting_itself(Test *t) {
    int error = 0, port = free_port(), listener, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct addrinfo *a = address_look_up("127.0.0.1", port, AI_NUMERICHOST, &error);
    expect_true(t, bind(fd, a->ai_addr, a->ai_addrlen) == 0 && connect(fd, a->ai_addr, a->ai_addrlen) == 0, "%s", strerror(errno));
    expect_true(t, socket_met_itself(fd), "a connection to itself went unnoticed");
    close(fd);
    listener = listener_open(a);
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    expect_true(t, listener >= 0 && connect(fd, a->ai_addr, a->ai_addrlen) == 0, "%s", strerror(errno));
    expect_true(t, !socket_met_itself(fd), "a connection to another counts as one to itself");
    close(fd);
    close(listener);
    freeaddrinfo(a);
}

// ---------------------------------------------------------------------------------------------------------------
// Strangers

static int stranger_connect(int port) { // waits until somebody listens
    int error = 0;
    struct addrinfo *a = address_look_up("127.0.0.1", port, AI_NUMERICHOST, &error);
    int fd = -1;
    for (double end = clock_seconds() + 10; fd < 0 && clock_seconds() < end;) {
        fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(fd, a->ai_addr, a->ai_addrlen) == 0) break;
        close(fd);
        fd = -1;
        usleep(5000);
    }
    freeaddrinfo(a);
    return fd;
}

static void stranger_say(int fd, const void *data, size_t bytes) { (void)!send(fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT); }

// Silence, noise, half a Hello, a wrong one, a flood, visitors who leave at once: the job starts all the same, and soon.
static void test_strangers(Test *t) {
    enum { SILENT = 70, VISITORS = 200 };
    RankTask task[4];
    RankRun run[4];
    ExchangeResult *e = (ExchangeResult *)shared_alloc(sizeof(ExchangeResult) * RANKS_MAX);
    int port = free_port(), silent[SILENT], other[6];
    tasks_make(task, 4, port, 30, exchange_body, e);
    for (int r = 0; r < 4; r++) e[r].port = port;
    double start = clock_seconds();
    rank_start(&run[0], &task[0]);
    char noise[1 << 16];
    for (size_t i = 0; i < sizeof noise; i++) noise[i] = (char)rng_bits(3, 4, i);
    Launch wrong = test_launch(3, 4, port);
    Hello h = hello_make(&wrong);
    for (int i = 0; i < 6; i++) other[i] = stranger_connect(port);
    stranger_say(other[0], noise, sizeof noise);
    stranger_say(other[1], "GET / HTTP/1.1\r\nHost: x\r\n\r\n", 27);
    stranger_say(other[2], &h, sizeof h / 2); // and no more
    h.rank = 4;                               // of four
    stranger_say(other[3], &h, sizeof h);
    h.rank = INT32_MIN;
    h.world = INT32_MAX;
    stranger_say(other[4], &h, sizeof h);
    wrong.job = 99;
    h = hello_make(&wrong);
    stranger_say(other[5], &h, sizeof h);
    for (int i = 0; i < VISITORS; i++) close(stranger_connect(port));
    for (int i = 0; i < SILENT; i++) silent[i] = stranger_connect(port);
    Answer a;
    memset(&a, 0, sizeof a);
    expect_true(t, recv(other[5], &a, sizeof a, MSG_WAITALL) == (ssize_t)sizeof a && a.code == ANSWER_OTHER_JOB, "a rank of another job got answer %d", a.code);
    for (int r = 1; r < 4; r++) rank_start(&run[r], &task[r]);
    for (int r = 0; r < 4; r++) {
        rank_wait(&run[r], start);
        expect_code(t, "a rank among strangers", &run[r], 0);
        expect_equal_i64(t, "wrong values", e[r].wrong_bytes + e[r].wrong_values, 0);
        // 70 silent ones are two lots of at most 64, each of which costs two seconds
        expect_true(t, run[r].seconds < 3 * STRANGER_SECONDS + 4, "the job took %.1f s", run[r].seconds);
    }
    for (int i = 0; i < 6; i++) close(other[i]);
    for (int i = 0; i < SILENT; i++) close(silent[i]);
    munmap(e, sizeof(ExchangeResult) * RANKS_MAX);
}

// The answer to one Hello that a test made up, while rank 0 of `world` waits; *code 0: the connection was closed.
static void hello_say(int port, const Hello *h, int *fd) {
    *fd = stranger_connect(port);
    stranger_say(*fd, h, sizeof *h);
}

// A process that loses patience and calls again is one rank, not two.
static void test_second_try(Test *t) {
    RankTask task[3];
    RankRun run[3];
    int port = free_port(), fd[3];
    tasks_make(task, 3, port, 20, NULL, NULL);
    double start = clock_seconds();
    rank_start(&run[0], &task[0]);
    Launch l = test_launch(1, 3, port);
    Hello h = hello_make(&l);
    Answer a;
    for (int i = 0; i < 2; i++) {
        hello_say(port, &h, &fd[i]);
        expect_true(t, recv(fd[i], &a, sizeof a, MSG_WAITALL) == (ssize_t)sizeof a && a.code == ANSWER_ACCEPTED, "try %d got answer %d", i, a.code);
    }
    expect_equal_i64(t, "bytes on the first connection", recv(fd[0], &a, sizeof a, 0), 0); // closed
    close(fd[1]); // leaves, and another process may take its place
    usleep(100000);
    h = hello_make(&l);
    hello_say(port, &h, &fd[2]);
    expect_true(t, recv(fd[2], &a, sizeof a, MSG_WAITALL) == (ssize_t)sizeof a && a.code == ANSWER_ACCEPTED, "the successor got answer %d", a.code);
    rank_start(&run[2], &task[2]);
    expect_true(t, recv(fd[2], &a, sizeof a, MSG_WAITALL) == (ssize_t)sizeof a && a.code == ANSWER_GO, "the successor then got answer %d", a.code);
    rank_wait(&run[0], start);
    rank_wait(&run[2], start);
    expect_code(t, "rank 0", &run[0], 0);
    expect_code(t, "rank 2", &run[2], 0);
    close(fd[0]);
    close(fd[2]);
}

// ---------------------------------------------------------------------------------------------------------------
// Mistakes of the start

static void test_missing_ranks(Test *t) {
    RankTask task[RANKS_MAX];
    RankRun run[RANKS_MAX];
    tasks_make(task, 8, free_port(), 1, NULL, NULL); // only ranks 0, 1, 3 come
    task[2] = task[3];
    run_ranks(task, 3, NULL, 0, run);
    expect_refused(t, "rank 0 without some others", &run[0], EXIT_PEER, "5 of 8 ranks did not come", "2, 4-7", NULL);
    for (int i = 0; i < 3; i++) {
        if (i > 0) expect_followed(t, "a rank that waits for others", &run[i], EXIT_PEER);
        expect_true(t, run[i].seconds > 0.9 && run[i].seconds < 3, "it took %.2f s", run[i].seconds);
    }
    tasks_make(task, 2, free_port(), 1, NULL, NULL); // rank 0 does not come
    run_ranks(task + 1, 1, NULL, 0, run);
    expect_refused(t, "a rank without rank 0", &run[0], EXIT_PEER, "error: rank 1: rank 0 was not reached at 127.0.0.1", "Connection refused", "MASTER_ADDR");
    expect_true(t, run[0].seconds > 0.4 && run[0].seconds < 3, "it took %.2f s", run[0].seconds);

    int port = free_port(), fd; // one comes and goes
    tasks_make(task, 3, port, 2, NULL, NULL);
    double start = clock_seconds();
    rank_start(&run[0], &task[0]);
    Launch l = test_launch(2, 3, port);
    Hello h = hello_make(&l);
    hello_say(port, &h, &fd);
    Answer a;
    expect_true(t, recv(fd, &a, sizeof a, MSG_WAITALL) == (ssize_t)sizeof a, "no answer");
    close(fd);
    usleep(100000); // a rank that leaves at the very moment of the start is missed by the first exchange, not by the start
    rank_start(&run[1], &task[1]);
    for (int i = 0; i < 2; i++) {
        rank_wait(&run[i], start);
        if (i == 0) expect_refused(t, "rank 0 whose peer left", &run[i], EXIT_PEER, "1 of 3 ranks did not come", "rank 2 came and left", h.host);
        else expect_followed(t, "a rank whose peer left", &run[i], EXIT_PEER);
    }
    // rank 0 dies while the others wait
    tasks_make(task, 3, free_port(), 10, NULL, NULL);
    start = clock_seconds();
    rank_start(&run[0], &task[0]);
    rank_start(&run[1], &task[1]);
    usleep(300000);
    kill(run[0].pid, SIGKILL);
    rank_wait(&run[0], start);
    rank_wait(&run[1], start);
    expect_refused(t, "a rank whose rank 0 was killed", &run[1], EXIT_PEER, "rank 0 is lost during the start", NULL, NULL);
    expect_true(t, run[1].seconds < 2, "it took %.2f s", run[1].seconds);
}

static void test_port_taken(Test *t) {
    RankTask task[2];
    RankRun run[2];
    char number[16];
    int error = 0, port = free_port();
    struct addrinfo *a = address_look_up("127.0.0.1", port, AI_NUMERICHOST, &error);
    int holder = listener_open(a);
    freeaddrinfo(a);
    expect_true(t, holder >= 0, "port %d cannot be taken: %s", port, strerror(errno));
    snprintf(number, sizeof number, "port %d", port);
    tasks_make(task, 2, port, 1, NULL, NULL);
    run_ranks(task, 1, NULL, 0, run);
    expect_refused(t, "rank 0", &run[0], EXIT_CONFIG, number, "taken", "MASTER_PORT");
    run_ranks(task + 1, 1, NULL, 0, run); // somebody else listens, and says nothing
    expect_refused(t, "rank 1", &run[0], EXIT_PEER, "rank 0 was not reached", "no answer in time", NULL);
    tasks_make(task, 2, port, 20, NULL, NULL); // with more ports the next one is taken, and found
    for (int r = 0; r < 2; r++) {
        task[r].launch.n_ports = 4;
        task[r].launch.job = 7;
    }
    run_ranks(task, 2, NULL, 0, run);
    for (int r = 0; r < 2; r++) expect_code(t, "a rank with several ports", &run[r], 0);
    close(holder);
}

static void two_jobs_body(Star *s, void *shared) {
    double x = ((double *)shared)[RANKS_MAX]; // differs between the jobs
    star_all_reduce(s, &x, 1, COMM_SUM);
    ((double *)shared)[s->rank] = x;
}

// Two jobs of one host: on ports of their own, then on the same ports, told apart by the job's name.
static void test_two_jobs(Test *t) {
    for (int same = 0; same < 2; same++) {
        RankTask task[8];
        RankRun run[8];
        double *shared = (double *)shared_alloc(4096);
        int port = free_port();
        const int order[] = {0, 5, 1, 4, 6, 2, 7, 3};
        for (int job = 0; job < 2; job++) {
            tasks_make(task + 4 * job, 4, same || job == 0 ? port : free_port(), 20, two_jobs_body, shared + 32 * job);
            for (int r = 0; r < 4; r++) {
                task[4 * job + r].launch.job = (uint64_t)(1 + job);
                task[4 * job + r].launch.n_ports = same ? 4 : 1;
            }
            shared[32 * job + RANKS_MAX] = 10 + job;
        }
        run_ranks(task, 8, order, 0.01, run);
        for (int i = 0; i < 8; i++) {
            expect_code(t, "a rank of two jobs", &run[i], 0);
            expect_near(t, "the job's sum", shared[32 * (i / 4) + i % 4], 4 * (10 + i / 4), 0);
        }
        munmap(shared, 4096);
    }
    RankTask task[3]; // one port, and it is another job's: waited out, never joined
    RankRun run[3];
    tasks_make(task, 3, free_port(), 1, NULL, NULL);
    task[0].limit_s = 2;
    task[1].launch.job = 5;
    run_ranks(task, 2, NULL, 0, run);
    expect_refused(t, "a rank of another job", &run[1], EXIT_PEER, "rank 0 was not reached", "another job", NULL);
    expect_refused(t, "rank 0", &run[0], EXIT_PEER, "2 of 3 ranks did not come within 2 s: 1-2", "of another job", NULL);
}

static void test_contradictions(Test *t) {
    RankTask task[4];
    RankRun run[4];
    char first[64], second[64];
    tasks_make(task, 3, free_port(), 10, NULL, NULL); // rank 1 twice
    task[2] = task[1];
    run_ranks(task, 3, NULL, 0.1, run);
    snprintf(first, sizeof first, "process %d", (int)run[1].pid);
    snprintf(second, sizeof second, "process %d", (int)run[2].pid);
    for (int i = 0; i < 3; i++) {
        if (i == 1) expect_followed(t, "the first of two", &run[i], EXIT_CONFIG);
        else expect_refused(t, "rank 0, and the second of two", &run[i], EXIT_CONFIG, "rank 1 is claimed by two processes", first, second);
        expect_true(t, run[i].seconds < 3, "it took %.2f s", run[i].seconds);
    }
    int port = free_port(), fd; // rank 0 twice; the second one is on another host, or it would have found the port taken
    tasks_make(task, 2, port, 10, NULL, NULL);
    double start = clock_seconds();
    rank_start(&run[0], &task[0]);
    Launch l = test_launch(0, 2, port);
    Hello h = hello_make(&l);
    hello_say(port, &h, &fd);
    rank_wait(&run[0], start);
    expect_refused(t, "rank 0 that is there twice", &run[0], EXIT_CONFIG, "rank 0 is claimed by two processes", "host ", NULL);
    close(fd);

    tasks_make(task, 3, free_port(), 10, NULL, NULL); // worlds of 3 and of 4
    task[1].launch.world = 4;
    run_ranks(task, 2, NULL, 0, run);
    for (int i = 0; i < 2; i++) expect_refused(t, "different worlds", &run[i], EXIT_CONFIG, "rank 1 (host ", "there are 4 ranks, rank 0 (host ", "there are 3");

    tasks_make(task, 3, free_port(), 10, NULL, NULL); // one GPU for two
    for (int r = 0; r < 3; r++) task[r].launch.local_rank = r == 2 ? 0 : r;
    run_ranks(task, 3, NULL, 0.05, run);
    for (int i = 0; i < 3; i++) {
        if (i == 1) expect_followed(t, "a rank with its own local rank", &run[i], EXIT_CONFIG);
        else expect_refused(t, "a local rank twice", &run[i], EXIT_CONFIG, "ranks 0 and 2 on host ", "local rank 0", NULL);
    }

    tasks_make(task, 2, free_port(), 1, NULL, NULL); // a host that does not exist; .invalid is reserved for that
    strcpy(task[1].launch.address, "no-such-host.invalid");
    run_ranks(task + 1, 1, NULL, 0, run);
    expect_refused(t, "a wrong host", &run[0], EXIT_CONFIG, "MASTER_ADDR = \"no-such-host.invalid\"", "no such host", NULL);
}

// ---------------------------------------------------------------------------------------------------------------
// Losses after the start. The culprit is rank 2 of 4; the others must end with EXIT_PEER and name it.

typedef enum { LOSS_EXIT, LOSS_KILL, LOSS_RESET, LOSS_GARBAGE, LOSS_HUGE, LOSS_FALSE_NEWS, LOSS_IN_GATHER, LOSS_SILENCE, LOSS_IDLE, LOSS_MIDDLE, LOSS_COUNT } Loss;
static const char *loss_name[] = {"an exit", "a kill", "a reset connection", "garbage", "a frame with a huge size", "a frame that says rank 1 is lost", "a frame cut short", "silence", "a loss while nothing is exchanged", "a loss in the middle of a large broadcast"};

typedef struct {
    Loss loss;
    double at; // when it happened
} LossCase;

static void loss_cause(Star *s, LossCase *c) {
    int fd = s->peer[0].fd;
    struct linger reset = {1, 0};
    Frame f = {FRAME_MAGIC, FRAME_GATHER, s->sequence + 1, s->rank, sizeof(double)};
    c->at = clock_seconds();
    switch (c->loss) {
        case LOSS_EXIT: case LOSS_IDLE: _exit(0);
        case LOSS_KILL: raise(SIGKILL); break;
        case LOSS_RESET:
            setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
            close(fd);
            break;
        case LOSS_GARBAGE: for (uint64_t i = 0; i < 64; i++) { uint64_t x = rng_bits(1, 2, i); stranger_say(fd, &x, sizeof x); } break;
        case LOSS_HUGE: f.bytes = INT64_MAX; f.rank = -5; stranger_say(fd, &f, sizeof f); break;
        case LOSS_FALSE_NEWS: f.kind = FRAME_LOST; f.rank = 1; f.bytes = 0; stranger_say(fd, &f, sizeof f); break;
        case LOSS_IN_GATHER: stranger_say(fd, &f, sizeof f / 2); _exit(0);
        case LOSS_MIDDLE: { char part[100000]; (void)!recv(fd, part, sizeof part, MSG_WAITALL); _exit(0); }
        default: break;
    }
    for (;;) pause(); // alive, and silent, until the test ends it
}

static void loss_body(Star *s, void *shared) {
    LossCase *c = (LossCase *)shared;
    double x = 1;
    star_all_reduce(s, &x, 1, COMM_SUM); // all is well
    if (c->loss == LOSS_SILENCE) s->call_seconds = s->rank == 0 ? 1 : 3; // rank 0 decides, as with beats
    if (s->rank == 2) loss_cause(s, c);
    if (c->loss == LOSS_IDLE)
        for (;;) {
            star_watch(s);
            usleep(20000);
        }
    if (c->loss == LOSS_MIDDLE) {
        char *large = (char *)host_alloc(32 << 20);
        star_broadcast(s, large, 32 << 20, 0);
        free(large);
    }
    for (;;) star_all_reduce(s, &x, 1, COMM_SUM);
}

static void test_losses(Test *t) {
    for (int k = 0; k < LOSS_COUNT; k++) {
        RankTask task[4];
        RankRun run[4];
        LossCase *c = (LossCase *)shared_alloc(sizeof(LossCase));
        c->loss = (Loss)k;
        tasks_make(task, 4, free_port(), 20, loss_body, c);
        double start = clock_seconds();
        for (int r = 0; r < 4; r++) rank_start(&run[r], &task[r]);
        const int order[] = {0, 1, 3, 2};
        for (int i = 0; i < 4; i++) {
            int r = order[i];
            if (r == 2) kill(run[r].pid, SIGKILL);
            rank_wait(&run[r], start);
            if (r == 2) continue;
            if (r == 0) expect_refused(t, loss_name[k], &run[r], EXIT_PEER, "error: rank 2 (host ", "is lost: ", "process ");
            else expect_followed(t, loss_name[k], &run[r], EXIT_PEER);
            double took = start + run[r].seconds - c->at;
            expect_true(t, took < (k == LOSS_SILENCE ? 2.5 : 1), "%s: rank %d ended %.2f s after it", loss_name[k], r, took); // half a second of it is for rank 0's words
        }
        munmap(c, sizeof(LossCase));
    }
}

// Each field of a frame and of a Hello, spoilt alone.
static void test_messages(Test *t) {
    const Frame want = {FRAME_MAGIC, FRAME_GATHER, 7, 2, 64};
    struct { Frame f; FrameVerdict verdict; } rows[] = {
        {want, FRAME_EXPECTED}, {{0, FRAME_GATHER, 7, 2, 64}, FRAME_GARBAGE}, {{FRAME_MAGIC, 0, 7, 2, 64}, FRAME_GARBAGE}, {{FRAME_MAGIC, FRAME_LOST + 1, 7, 2, 64}, FRAME_GARBAGE},
        {{FRAME_MAGIC, FRAME_GATHER, 7, 4, 64}, FRAME_GARBAGE}, {{FRAME_MAGIC, FRAME_GATHER, 7, -1, 64}, FRAME_GARBAGE}, {{FRAME_MAGIC, FRAME_GATHER, 7, 2, -1}, FRAME_GARBAGE},
        {{FRAME_MAGIC, FRAME_BROADCAST, 7, 2, 64}, FRAME_OF_OTHER_CALL}, {{FRAME_MAGIC, FRAME_GATHER, 8, 2, 64}, FRAME_OF_OTHER_CALL}, {{FRAME_MAGIC, FRAME_GATHER, 7, 1, 64}, FRAME_OF_OTHER_CALL},
        {{FRAME_MAGIC, FRAME_GATHER, 7, 2, INT64_MAX}, FRAME_OF_OTHER_CALL}, {{FRAME_MAGIC, FRAME_LOST, 7, 3, 0}, FRAME_SAYS_LOST}, {{FRAME_MAGIC, FRAME_LOST, 7, 4, 0}, FRAME_GARBAGE},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) expect_equal_i64(t, "the verdict on a frame", frame_check(&rows[i].f, &want, 4), rows[i].verdict);
    Launch l = test_launch(1, 2, 1);
    for (int k = 0; k < 12; k++) {
        Hello h = hello_make(&l), parsed;
        memcpy(h.host, "a\x1b[31mb", 8);
        bool good = k < 3;
        switch (k) {
            case 1: h.local_rank = 1; break;
            case 2: memset(h.host, 'x', sizeof h.host); break; // no end
            case 3: h.magic ^= 1; break;
            case 4: h.world = 1; break;
            case 5: h.world = LAUNCH_WORLD_MAX + 1; break;
            case 6: h.rank = 2; break;
            case 7: h.rank = -1; break;
            case 8: h.local_rank = 2; break;
            case 9: h.local_rank = -2; break;
            case 10: h.pid = -1; break;
            case 11: h.magic = ANSWER_MAGIC; break;
            default: break;
        }
        expect_true(t, hello_parse(&h, &parsed) == good, "Hello %d was %s", k, good ? "refused" : "taken");
        if (good) expect_true(t, memchr(parsed.host, 0, sizeof parsed.host) && !strchr(parsed.host, 27), "the host's name of Hello %d is not fit to print", k);
    }
}

// A rank that makes another call than the others is a mistake of the program, not a loss.
static void other_call_body(Star *s, void *) {
    double x[2] = {1, 2};
    star_all_reduce(s, x, s->rank == 1 ? 2 : 1, COMM_SUM);
}

static void test_other_call(Test *t) {
    RankTask task[2];
    RankRun run[2];
    tasks_make(task, 2, free_port(), 10, other_call_body, NULL);
    run_ranks(task, 2, NULL, 0, run);
    expect_refused(t, "rank 0", &run[0], EXIT_INTERNAL, "rank 1 is at exchange 1", "16 bytes", "same configuration");
}

// The normal end, many times: nobody takes a rank that has finished for one that is lost.
typedef struct {
    Star *star;
    volatile bool runs;
} Watcher;

static void *watcher(void *arg) {
    Watcher *w = (Watcher *)arg;
    while (w->runs) star_watch(w->star);
    return NULL;
}

static void end_body(Star *s, void *) {
    pthread_t thread;
    Watcher w = {s, true};
    pthread_create(&thread, NULL, watcher, &w);
    double x = s->rank;
    for (int i = 0; i < 20; i++) star_all_reduce(s, &x, 1, COMM_MAX);
    w.runs = false;
    pthread_join(thread, NULL);
    star_barrier(s);
}

static void test_normal_end(Test *t) {
    for (int i = 0; i < 25; i++) {
        RankTask task[4];
        RankRun run[4];
        tasks_make(task, 4, free_port(), 20, end_body, NULL);
        run_ranks(task, 4, NULL, 0, run);
        for (int r = 0; r < 4; r++) expect_code(t, "a rank at its end", &run[r], 0);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The launcher's environment

typedef struct {
    const char *env;      // "NAME=value NAME=value"
    int rank, world, local_rank, local_world, port, n_ports;
    const char *address;
    bool job;
    const char *refused;  // part of the message
} LaunchCase;

static const LaunchCase launch_cases[] = {
    {"", 0, 1, 0, 1, 0, 0, "", false, NULL},
    {"HOME=/ SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0", 0, 1, 0, 1, 0, 0, "", false, NULL}, // a batch script
    {"RANK=0 WORLD_SIZE=1 MASTER_ADDR=x", 0, 1, 0, 1, 0, 0, "", false, NULL},
    {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", 0, 1, 0, 1, 0, 0, "", false, NULL},
    {"RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=head MASTER_PORT=1234", 5, 8, 1, 4, 1234, 1, "head", false, NULL},
    {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_SIZE=2 MASTER_ADDR=head MASTER_PORT=29500", 1, 2, 1, 2, 29500, 1, "127.0.0.1", false, NULL}, // deepspeed, one host
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=fd00::7", 1, 2, -1, -1, 29500, 1, "fd00::7", false, NULL},
    {"RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=400 TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True", 1, 4, -1, 2, 401, 16, "h", true, NULL},
    {"RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=65530 TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True", 1, 4, -1, 2, 65514, 16, "h", true, NULL},
    {"RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=400 TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=False", 1, 4, -1, 2, 400, 1, "h", true, NULL},
    {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=676790273", 3, 4, 3, 4, -1, 16, "127.0.0.1", true, NULL},
    {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=a RANK=0 WORLD_SIZE=9", 3, 4, 1, 2, 29500, 1, "a", false, NULL},
    {"SLURM_STEP_ID=0 SLURM_JOB_ID=12 SLURM_PROCID=9 SLURM_STEP_NUM_TASKS=16 SLURM_LOCALID=1 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=gpu[07-08] SLURM_JOB_NODELIST=x", 9, 16, 1, -1, -1, 16, "gpu07", true, NULL},
    {"SLURM_STEP_ID=0 SLURM_JOB_ID=12 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=1 SLURM_STEP_NUM_NODES=1 SLURM_JOB_NODELIST=n1", 1, 2, 1, 2, -1, 16, "127.0.0.1", true, NULL},
    {"SLURM_STEP_ID=0 SLURM_JOB_ID=12 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_LAUNCH_NODE_IPADDR=10.0.0.1", 1, 2, 0, -1, -1, 16, "10.0.0.1", true, NULL},
    {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=h SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1", 1, 2, 0, -1, 29500, 1, "h", false, NULL}, // torchrun in a step
    {"RANK=x WORLD_SIZE=2", 0, 0, 0, 0, 0, 0, NULL, false, "RANK = \"x\": must be a whole number from 0 to 1"},
    {"RANK=2 WORLD_SIZE=2", 0, 0, 0, 0, 0, 0, NULL, false, "RANK = \"2\": must be a whole number from 0 to 1"},
    {"RANK=-1 WORLD_SIZE=2", 0, 0, 0, 0, 0, 0, NULL, false, "RANK = \"-1\""},
    {"RANK=0 WORLD_SIZE=0", 0, 0, 0, 0, 0, 0, NULL, false, "WORLD_SIZE = \"0\""},
    {"RANK=0 WORLD_SIZE=99999999999999999999", 0, 0, 0, 0, 0, 0, NULL, false, "WORLD_SIZE = \"9999"},
    {"RANK=0", 0, 0, 0, 0, 0, 0, NULL, false, "RANK is set and WORLD_SIZE is not"},
    {"WORLD_SIZE=2", 0, 0, 0, 0, 0, 0, NULL, false, "WORLD_SIZE is set and RANK is not"},
    {"RANK=0 WORLD_SIZE=2", 0, 0, 0, 0, 0, 0, NULL, false, "MASTER_ADDR=host"},
    {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 MASTER_ADDR=h", 0, 0, 0, 0, 0, 0, NULL, false, "LOCAL_RANK = \"2\""},
    {"RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3 MASTER_ADDR=h", 0, 0, 0, 0, 0, 0, NULL, false, "LOCAL_WORLD_SIZE = \"3\""},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=65536", 0, 0, 0, 0, 0, 0, NULL, false, "MASTER_PORT = \"65536\""},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=12a", 0, 0, 0, 0, 0, 0, NULL, false, "MASTER_PORT = \"12a\""},
    {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2", 0, 0, 0, 0, 0, 0, NULL, false, "mpirun -x MASTER_ADDR=host"},
    {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 LOCAL_RANK=1", 0, 0, 0, 0, 0, 0, NULL, false, "unset LOCAL_RANK"},
};

typedef struct {
    const LaunchCase *c;
    Launch *found; // shared
} LaunchArg;

static void launch_in_environment(void *arg) {
    LaunchArg *a = (LaunchArg *)arg;
    char env[1024], *rest = NULL;
    clearenv();
    snprintf(env, sizeof env, "%s", a->c->env);
    for (char *word = strtok_r(env, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        char *equals = strchr(word, '=');
        *equals = 0;
        setenv(word, equals + 1, 1);
    }
    *a->found = launch_read();
}

static void test_launch_environment(Test *t) {
    Launch *found = (Launch *)shared_alloc(sizeof(Launch));
    uint64_t jobs[2] = {0, 0};
    for (size_t i = 0; i < sizeof launch_cases / sizeof *launch_cases; i++) {
        const LaunchCase *c = &launch_cases[i];
        LaunchArg arg = {c, found};
        memset(found, 0, sizeof *found);
        if (c->refused) { expect_dies(t, EXIT_CONFIG, c->refused, launch_in_environment, &arg); continue; }
        char text[DIES_TEXT_BYTES];
        expect_true(t, run_in_child(launch_in_environment, &arg, text) == -1, "%s: %s", c->env, text);
        expect_true(t, found->rank == c->rank && found->world == c->world && found->local_rank == c->local_rank && found->local_world == c->local_world,
                    "%s: rank %d of %d, local %d of %d", c->env, found->rank, found->world, found->local_rank, found->local_world);
        expect_equal_text(t, c->env, found->address, c->address);
        if (c->port >= 0) expect_equal_i64(t, c->env, found->port, c->port);
        else expect_true(t, found->port >= LAUNCH_PORT && found->port + LAUNCH_PORTS <= 32768 && found->port % LAUNCH_PORTS == LAUNCH_PORT % LAUNCH_PORTS, "%s: port %d", c->env, found->port);
        expect_equal_i64(t, c->env, found->n_ports, c->n_ports);
        expect_equal_i64(t, c->env, found->job != 0, c->job);
        if (c->job) { jobs[0] = jobs[1]; jobs[1] = found->job; }
        if (c->job && jobs[0]) t->compared++;
    }
    // all ranks of a job agree on job and port, another job differs
    const LaunchCase same[] = {{"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=5", 0, 0, 0, 0, 0, 0, NULL, false, NULL},
                               {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=5", 0, 0, 0, 0, 0, 0, NULL, false, NULL},
                               {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=6", 0, 0, 0, 0, 0, 0, NULL, false, NULL}};
    Launch l[3];
    for (int i = 0; i < 3; i++) {
        char text[DIES_TEXT_BYTES];
        LaunchArg arg = {&same[i], found};
        expect_true(t, run_in_child(launch_in_environment, &arg, text) == -1, "%s", text);
        l[i] = *found;
    }
    expect_true(t, l[0].job == l[1].job && l[0].port == l[1].port, "ranks of one job disagree on port (%d, %d) or job", l[0].port, l[1].port);
    expect_true(t, l[1].job != l[2].job, "two jobs have one name");
    munmap(found, sizeof(Launch));
}

static void test_first_host(Test *t) {
    const char *rows[][2] = {
        {"gpu07", "gpu07"}, {"gpu[07-12,15],cpu3", "gpu07"}, {"a,b", "a"}, {"tux[1-2][0-3]", "tux10"}, {"n[3]", "n3"}, {"rack1-node[001,004-9].site", "rack1-node001.site"},
        {"10.0.0.1", "10.0.0.1"}, {"fd00::7", "fd00::7"}, {"", NULL}, {",a", NULL}, {"n[", NULL}, {"n[]", NULL}, {"n[1", NULL}, {"n[x]", NULL}, {"a b", NULL}, {"n]", NULL}, {"$(x)", NULL},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char host[32];
        bool found = launch_first_host(rows[i][0], host, sizeof host);
        expect_true(t, found == (rows[i][1] != NULL), "\"%s\" %s a host", rows[i][0], found ? "has" : "has not");
        if (found && rows[i][1]) expect_equal_text(t, rows[i][0], host, rows[i][1]);
    }
    char host[8];
    expect_true(t, launch_first_host("1234567", host, sizeof host), "seven characters do not fit into eight bytes");
    expect_true(t, !launch_first_host("12345678", host, sizeof host), "eight characters fit into eight bytes");
    expect_true(t, !launch_first_host("n[12345678]", host, sizeof host), "nine characters fit into eight bytes");
}

static const TestRow rendezvous_tests[] = {
    {"environment", test_launch_environment},
    {"slurm host lists", test_first_host},
    {"messages", test_messages},
    {"exchanges of 1, 2, 4, 8 ranks", test_exchanges},
    {"large broadcast", test_large_broadcast},
    {"addresses", test_addresses},
    {"listener", test_listener},
    {"meeting itself", test_meeting_itself},
    {"strangers", test_strangers},
    {"second try", test_second_try},
    {"missing ranks", test_missing_ranks},
    {"port taken", test_port_taken},
    {"two jobs", test_two_jobs},
    {"contradictions", test_contradictions},
    {"losses", test_losses},
    {"other call", test_other_call},
    {"normal end", test_normal_end},
    {NULL, NULL},
};
