// watch_ranks.cpp - a trainer without a model, to test runtime/watch.h: steps of some sleep and one all-reduce.
//
// Two ways to have ranks: `ranks=N` forks N processes whose all-reduce is a barrier in shared memory (so that the only
// network is the watch's own), injects a fault and measures; or mpirun starts the ranks and the all-reduce is MPI's
// (compiled with -DWITH_MPI). Settings are name=value; the forking parent prints one line:
//     codes=75,137,75,75 gone_ms=12 steps=400 lateness=0
// exit codes by rank (128 + n: signal n), time from the fault to the end of the last process that could end by itself,
// steps that rank 0 finished, and how often a rank's deadlines were moved. The rank at fault is woken (STOP) or killed
// (FREEZE) when all others are gone, as a launcher would do.
#include "../runtime/watch.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#ifdef WITH_MPI
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#endif

enum { MAX_RANKS = 64 };

typedef struct {
    WatchAddress address;
    int32_t address_ready, started, in_loop;
    int64_t fault_ns, steps, lateness, last_step;
    int64_t arrived[MAX_RANKS]; // at the barrier, times
} Shared;

typedef struct {
    int ranks, steps, work_ms, evaluate_ms;
    const char *flight, *fault, *signal, *netns, *command;
    int launcher; // whether the parent counts as one
    int target, at_step, after_ms, cont_ms, times, late_ms, late_end_ms, claim, gpu, blink;
    double silent, floor, ceiling, first, start, end;
} Settings;

static Settings o = {0, 100, 2, 0, NULL, "", "", "", "", 0, -1, 10, 200, 2000, 1, 0, 0, -1, 0, 0, 5, 10, 1800, 300, 60, 60};
static Shared *shared;
static int rank, world;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
static void sleep_ms(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {}
}
static bool is(const char *a, const char *b) { return strcmp(a, b) == 0; }

static void setting(const char *arg) {
    static const struct { const char *name; void *at; char type; } row[] = {
        {"ranks", &o.ranks, 'i'}, {"steps", &o.steps, 'i'}, {"work_ms", &o.work_ms, 'i'}, {"evaluate_ms", &o.evaluate_ms, 'i'}, {"flight", &o.flight, 's'}, {"fault", &o.fault, 's'},
        {"signal", &o.signal, 's'}, {"netns", &o.netns, 's'}, {"command", &o.command, 's'}, {"target", &o.target, 'i'}, {"at_step", &o.at_step, 'i'}, {"after_ms", &o.after_ms, 'i'},
        {"cont_ms", &o.cont_ms, 'i'}, {"times", &o.times, 'i'}, {"late_ms", &o.late_ms, 'i'}, {"late_end_ms", &o.late_end_ms, 'i'}, {"claim", &o.claim, 'i'}, {"launcher", &o.launcher, 'i'}, {"gpu", &o.gpu, 'i'}, {"blink", &o.blink, 'i'}, {"silent", &o.silent, 'd'}, {"floor", &o.floor, 'd'},
        {"ceiling", &o.ceiling, 'd'}, {"first", &o.first, 'd'}, {"start", &o.start, 'd'}, {"end", &o.end, 'd'},
    };
    for (size_t i = 0; i < sizeof row / sizeof row[0]; i++) {
        size_t n = strlen(row[i].name);
        if (strncmp(arg, row[i].name, n) != 0 || arg[n] != '=') continue;
        const char *value = arg + n + 1;
        if (row[i].type == 'i') *(int *)row[i].at = atoi(value);
        if (row[i].type == 'd') *(double *)row[i].at = atof(value);
        if (row[i].type == 's') *(const char **)row[i].at = value;
        return;
    }
    die(EXIT_CONFIG, "watch_ranks: %s is no setting", arg);
}

// ---------------------------------------------------------------------------------------------------------------
// A rank

static void broadcast_address(WatchAddress *a) {
#ifdef WITH_MPI
    if (!shared) { MPI_Bcast(a, (int)sizeof *a, MPI_BYTE, 0, MPI_COMM_WORLD); return; }
#endif
    if (rank == 0) {
        shared->address = *a;
        __atomic_store_n(&shared->address_ready, 1, __ATOMIC_RELEASE);
    }
    while (!__atomic_load_n(&shared->address_ready, __ATOMIC_ACQUIRE)) usleep(200);
    *a = shared->address;
}

static void all_reduce(void) {
#ifdef WITH_MPI
    if (!shared) {
        static double x[512];
        MPI_Allreduce(MPI_IN_PLACE, x, 512, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        return;
    }
#endif
    int64_t mine = __atomic_add_fetch(&shared->arrived[rank], 1, __ATOMIC_ACQ_REL);
    for (int r = 0; r < world; r++) while (__atomic_load_n(&shared->arrived[r], __ATOMIC_ACQUIRE) < mine) usleep(100);
}

static volatile int *volatile nowhere = NULL;

// Bytes that are no frame, on this rank's connection to the hub.
static void send_garbage(int port) {
    for (int fd = 3; fd < 64; fd++) {
        struct sockaddr_in a;
        socklen_t n = sizeof a;
        char rubbish[256];
        memset(rubbish, 0xee, sizeof rubbish);
        if (getpeername(fd, (struct sockaddr *)&a, &n) == 0 && a.sin_family == AF_INET && ntohs(a.sin_port) == port && send(fd, rubbish, sizeof rubbish, 0) < 0) perror("send");
    }
}

static void fault_now(int port) {
    if (shared) __atomic_store_n(&shared->fault_ns, now_ns(), __ATOMIC_RELEASE);
    else sleep_ms(30); // the test's other half reads the process numbers from the recorders
    if (is(o.fault, "kill") || is(o.fault, "kill_inside")) raise(SIGKILL);
    if (is(o.fault, "stop")) raise(SIGSTOP);
    if (is(o.fault, "loop") || is(o.fault, "network") || is(o.fault, "order") || is(o.fault, "stuck_evaluation")) for (volatile bool on = true; on;) sleep_ms(1);
    if (is(o.fault, "segv")) *nowhere = 1;
    if (is(o.fault, "abort")) abort();
    if (is(o.fault, "exit")) _exit(0);
    if (is(o.fault, "garbage")) send_garbage(port);
    if (is(o.fault, "die")) {
        watch_last_words(EXIT_IO, "cannot write shard 7: No space left on device");
        die(EXIT_IO, "cannot write shard 7: No space left on device");
    }
}

static void *crash_later(void *) { // as a library's own thread
    if (!shared) usleep(o.late_end_ms * 1000);
    *nowhere = 1;
    return NULL;
}

// Faults that strike before the collective of their step; the others have a place of their own.
static bool at_start_of_step(void) {
    static const char *const name[] = {"kill", "stop", "loop", "segv", "abort", "exit", "die", "garbage"};
    for (size_t i = 0; i < sizeof name / sizeof name[0]; i++) if (is(o.fault, name[i])) return true;
    return false;
}

static void on_stop(int) {}

static int run_rank(void) {
    if (o.netns[0]) { // a comma-separated list: one name for each rank, by turns
        char list[512], path[600];
        snprintf(list, sizeof list, "%s", o.netns);
        int n = 0;
        char *name[MAX_RANKS], *save = NULL;
        for (char *p = strtok_r(list, ",", &save); p && n < MAX_RANKS; p = strtok_r(NULL, ",", &save)) name[n++] = p;
        snprintf(path, sizeof path, "/var/run/netns/%s", name[rank % n]);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || setns(fd, CLONE_NEWNET) != 0) die(EXIT_INTERNAL, "%s: %s", path, strerror(errno));
        close(fd);
    }
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTERM, on_stop); // as the trainer does: a launcher that winds the job up must be able to wait for us
    const char *mpi_rank = getenv("OMPI_COMM_WORLD_RANK");
    if (is(o.fault, "before_init") && mpi_rank && atoi(mpi_rank) == o.target) sleep_ms(100000);
    watch_arm(o.start);
    if (is(o.fault, "disarmed")) {
        watch_disarm();
        sleep_ms((int)(3e3 * o.start));
        _exit(EXIT_OK);
    }
#ifdef WITH_MPI
    if (!shared) {
        MPI_Init(NULL, NULL);
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &world);
    }
#endif
    WatchLimits l = watch_default_limits(o.ceiling);
    l.silent_s = o.silent;
    l.progress_floor_s = o.floor;
    l.first_step_s = o.first;
    l.start_s = o.start;
    l.end_s = o.end;
    bool at_fault = rank == o.target;
    WatchJob job = {at_fault && o.claim >= 0 ? o.claim : rank, world, 0, !o.netns[0], o.flight, o.launcher ? getppid() : 0, l};
    if (getenv("WATCH_HOSTS")) job.one_host = false;
    WatchAddress address;
    watch_prepare(&job, &address);
    broadcast_address(&address);
    if (rank == 0) {
        FILE *f = fopen("port", "w");
        if (f) { fprintf(f, "%d\n", address.port); fclose(f); }
    }
    if (at_fault && o.late_ms) sleep_ms(o.late_ms);
    watch_start(&address);
    watch_record();
    if (shared) __atomic_add_fetch(&shared->started, 1, __ATOMIC_ACQ_REL);

    WatchCounter counter = {0, 0}; // as a GPU would write it: a step late
    int channel = watch_channel_open(7, o.gpu ? &counter : NULL);
    int stragglers = 0;
    watch_announce(WATCH_LOAD, 5);
    for (int step = 0; step < (shared ? __atomic_load_n(&shared->last_step, __ATOMIC_ACQUIRE) : o.steps); step++) {
        if (o.evaluate_ms && step == o.steps / 2) {
            watch_announce(WATCH_EVALUATE, 1e-3 * o.evaluate_ms + 1);
            sleep_ms(o.evaluate_ms);
        }
        if (at_fault && is(o.fault, "stuck_evaluation") && step == o.at_step) {
            watch_announce(WATCH_EVALUATE, 3);
            fault_now(0);
        }
        watch_progress(step, 0, WATCH_FORWARD);
        sleep_ms(at_fault && is(o.fault, "slow") && step >= o.at_step ? 2 * o.work_ms : o.work_ms);
        if (at_fault && step == o.at_step && at_start_of_step()) fault_now(address.port);
        watch_progress(step, 0, WATCH_BACKWARD);
        watch_unit(step % 12);
        if (at_fault && is(o.fault, "order") && step == o.at_step) { // the others wait in the first channel
            watch_collective_enter(watch_channel_open(8, NULL), WATCH_BROADCAST, 64);
            fault_now(0);
        }
        uint64_t number = watch_collective_enter(channel, WATCH_ALL_REDUCE, 4096);
        double start = clock_seconds();
        __atomic_store_n(&counter.started, number, __ATOMIC_RELEASE);
        if (at_fault && is(o.fault, "kill_inside") && step == o.at_step) fault_now(0);
        if (is(o.fault, "network") && step == o.at_step) fault_now(0);
        all_reduce();
        __atomic_store_n(&counter.done, number, __ATOMIC_RELEASE);
        watch_waited(clock_seconds() - start);
        if (!o.gpu) watch_collective_done(channel, number);
        WatchStraggler s;
        while (watch_straggler(&s)) {
            stragglers++;
            note("rank %d on %s is slow since about step %d: %.2f times the median busy time, %.1f ms a step", s.rank, s.host, step, s.ratio, 1e3 * s.lost_s);
        }
        if (shared && rank == 0) __atomic_store_n(&shared->steps, (int64_t)step + 1, __ATOMIC_RELEASE);
    }
    watch_announce(WATCH_END, 10);
    if (at_fault && is(o.fault, "late_end")) sleep_ms(o.late_end_ms);
    pthread_t thread;
    if (at_fault && is(o.fault, "end_crash") && (pthread_create(&thread, NULL, crash_later, NULL) != 0 || (shared && pthread_join(thread, NULL) != 0))) return EXIT_INTERNAL;
#ifdef WITH_MPI
    if (!shared) MPI_Finalize();
#endif
    if (shared) __atomic_add_fetch(&shared->lateness, watch_lateness(), __ATOMIC_ACQ_REL);
    watch_goodbye();
    if (at_fault && is(o.fault, "no_end")) sleep_ms(100000);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// The parent of forked ranks

static pid_t beat_thread_of(pid_t pid) { // the second thread: the ranks have no others
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *d = opendir(path);
    pid_t found = 0;
    for (struct dirent *e; d && (e = readdir(d));) {
        pid_t t = (pid_t)atoi(e->d_name);
        if (t > 0 && t != pid) found = t;
    }
    if (d) closedir(d);
    return found;
}

static int run_parent(void) {
    shared = (Shared *)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED || o.ranks > MAX_RANKS) return EXIT_INTERNAL;
    shared->last_step = o.steps;
    pid_t pid[MAX_RANKS], command = 0;
    int code[MAX_RANKS], alive = o.ranks;
    world = o.ranks;
    for (int r = 0; r < world; r++) {
        code[r] = -1;
        pid[r] = fork();
        if (pid[r] == 0) {
            rank = r;
            _exit(run_rank());
        }
    }
    int64_t begin = now_ns(), started = 0, gone = 0, disturbed = 0; // disturbed: when a disturbance that is none for the ranks was over
    int done = 0; // signals sent
    bool stopped = false, woken = false;
    while (alive > 0) {
        int status;
        for (pid_t p; (p = waitpid(-1, &status, WNOHANG | __WALL)) > 0;) {
            if (WIFSTOPPED(status)) continue; // the frozen thread
            if (p == command && o.blink) disturbed = now_ns();
            for (int r = 0; r < world; r++) {
                if (pid[r] != p || code[r] >= 0) continue;
                code[r] = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
                alive--;
                if (!woken) gone = now_ns();
            }
        }
        int64_t t = now_ns();
        if (!started && __atomic_load_n(&shared->started, __ATOMIC_ACQUIRE) == world) started = t;
        bool due = started && t - started >= (int64_t)1000000 * (o.after_ms + done / 2 * (o.cont_ms + 1000) + done % 2 * o.cont_ms);
        if (o.signal[0] && due && done < 2 * o.times && code[max_i64(0, o.target)] < 0) {
            bool cont = done % 2 == 1;
            if (!cont) __atomic_store_n(&shared->fault_ns, t, __ATOMIC_RELEASE);
            if (is(o.signal, "KILL")) kill(pid[o.target], SIGKILL);
            if (is(o.signal, "STOP")) stopped = true, kill(pid[o.target], SIGSTOP);
            if (is(o.signal, "STOPCONT")) kill(pid[o.target], cont ? SIGCONT : SIGSTOP);
            for (int r = 0; r < world && is(o.signal, "STOPALL"); r++) kill(pid[r], cont ? SIGCONT : SIGSTOP);
            if (is(o.signal, "FREEZE")) {
                pid_t thread = beat_thread_of(pid[o.target]);
                if (ptrace(PTRACE_SEIZE, thread, 0, 0) != 0 || ptrace(PTRACE_INTERRUPT, thread, 0, 0) != 0) die(EXIT_INTERNAL, "ptrace: %s", strerror(errno));
            }
            done = is(o.signal, "STOPCONT") || is(o.signal, "STOPALL") ? done + 1 : 2 * o.times;
            if (cont && done == 2 * o.times) disturbed = t;
        }
        if (o.command[0] && due && done == 0) {
            done = 1;
            __atomic_store_n(&shared->fault_ns, t, __ATOMIC_RELEASE);
            if ((command = fork()) == 0) {
                execl("/bin/sh", "sh", "-c", o.command, (char *)NULL);
                _exit(127);
            }
        }
        if (alive == 1 && world > 1 && o.target >= 0 && code[o.target] < 0 && !woken && (stopped || is(o.fault, "stop") || is(o.fault, "loop") || is(o.signal, "FREEZE"))) {
            woken = true;
            kill(pid[o.target], SIGCONT);
            if (is(o.signal, "FREEZE")) kill(pid[o.target], SIGKILL);
        }
        if (disturbed && t - disturbed > (int64_t)700 * 1000000 && shared->last_step == o.steps) // nobody is more than a step away
            __atomic_store_n(&shared->last_step, shared->steps + 20, __ATOMIC_RELEASE);
        if (t - begin > (int64_t)120 * 1000000000) { // a test that hangs is a finding
            for (int r = 0; r < world; r++) if (code[r] < 0) kill(pid[r], SIGKILL);
            printf("hangs: ");
        }
        usleep(500);
    }
    printf("codes=");
    for (int r = 0; r < world; r++) printf("%s%d", r ? "," : "", code[r]);
    printf(" gone_ms=%" PRId64 " steps=%" PRId64 " lateness=%" PRId64 "\n", shared->fault_ns ? (gone - shared->fault_ns) / 1000000 : -1, shared->steps, shared->lateness);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3 && is(argv[1], "--flight")) return flight_print(argv[2]);
    for (int i = 1; i < argc; i++) setting(argv[i]);
    return o.ranks > 0 ? run_parent() : run_rank();
}
