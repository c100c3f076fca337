// watch_exit.h - the way out: of the beat thread that has a verdict, of a process that crashes or has an error of its own.
// Part of watch.cpp.
//
// Nobody waits for anybody here but for moments: the verdict is said, sent and recorded, and _exit takes the rest along,
// whatever the main thread is inside of. A timer ends the process should one of these steps hang (a disk, a terminal).
#pragma once
#include "watch_state.h"

// ---------------------------------------------------------------------------------------------------------------
// The way out (beat thread)

static int64_t exit_code; // for on_last_resort

static void on_last_resort(int) { _exit((int)LOAD(exit_code)); }

static void send_frame(Peer *p, const void *frame, size_t bytes, bool may_drop);

// Writes all of it or what fits within 0.1 s: standard error may be a pipe that nobody reads.
static void say(const char *line, size_t n) {
    struct pollfd p = {STDERR_FILENO, POLLOUT, 0};
    if (poll(&p, 1, 100) > 0) n = (size_t)write(STDERR_FILENO, line, n);
}

// Of the ranks that share a flight folder the first to come here; without a folder everybody.
static bool elected(const char *line, size_t n) {
    if (!w.flight_dir[0]) return true;
    char path[4096 + 64];
    Line l = {path, 0, sizeof path};
    put(&l, w.flight_dir);
    put(&l, "/verdict-");
    put_hex(&l, w.address.job);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0666);
    if (fd < 0) return errno != EEXIST;
    ssize_t written = write(fd, line, n);
    (void)written;
    close(fd);
    return true;
}

typedef enum { SAY_NOTHING, SAY_ONCE, SAY } Voice;

// Sends the verdict to whom this rank is connected with, says it, records it, leaves.
__attribute__((noreturn)) static void leave(int culprit, int code, const char *text, Voice voice) {
    STORE(exit_code, code);
    struct sigaction last = {};
    last.sa_handler = on_last_resort;
    sigaction(SIGALRM, &last, NULL);
    struct itimerval five = {{0, 0}, {5, 0}};
    setitimer(ITIMER_REAL, &five, NULL);
    char line[LINE_BYTES + 160];
    Line l = {line, 0, sizeof line};
    put(&l, "error: ");
    put(&l, text);
    if (code == EXIT_PEER) put(&l, "; started again, the job resumes from its newest checkpoint");
    put(&l, "\n");
    if (voice == SAY || (voice == SAY_ONCE && elected(line, l.n))) say(line, l.n);
    // The launcher reports the code of the process whose end it sees first: that shall be the culprit's.
    struct timespec after_it = {0, 20000000};
    if (culprit >= 0 && w.peer && w.peer[culprit].ended) nanosleep(&after_it, NULL);

    WordsFrame v;
    memset(&v, 0, sizeof v);
    v.head = frame_head(FRAME_VERDICT);
    v.culprit = culprit;
    v.code = code;
    Line t = {v.text, 0, sizeof v.text};
    put(&t, text);
    bool tell = is_hub() || voice != SAY_NOTHING; // who was told by the hub need not tell it
    for (int r = 0; tell && w.peer && r < w.job.world; r++) {
        Peer *p = &w.peer[r];
        if (p->fd < 0 || p->state == PEER_ABSENT) continue;
        send_frame(p, &v, sizeof v, false);
        shutdown(p->fd, SHUT_WR);
    }

    Flight *f = w.flight;
    if (f) {
        f->h.culprit = culprit;
        f->h.code = code;
        memcpy(f->h.text, v.text, sizeof v.text);
        STORE(f->h.end, (uint32_t)FLIGHT_VERDICT);
    }
    // A close with unread bytes would be a reset, which may overtake the verdict: read until the others have closed.
    int64_t until = now_ns() + 100 * MILLISECOND;
    for (bool open = tell; open && now_ns() < until;) {
        open = false;
        for (int r = 0; w.peer && r < w.job.world; r++) {
            Peer *p = &w.peer[r];
            if (p->fd < 0 || p->state == PEER_ABSENT || r == culprit) continue;
            char rest[4096];
            ssize_t n;
            while ((n = recv(p->fd, rest, sizeof rest, MSG_DONTWAIT)) > 0) {}
            if (n < 0 && errno == EAGAIN) open = true;
        }
        struct timespec ms = {0, 1000000};
        if (open) nanosleep(&ms, NULL);
    }
    if (LOAD(w.words_state)) { // the thread that has an error of its own ends the process its own way
        struct timespec moment = {0, 500000000};
        nanosleep(&moment, NULL);
    }
    _exit(code);
}

// "rank 2 on node7 (pid 4242)"
static void put_rank(Line *l, int r) {
    put(l, "rank ");
    put_int(l, r);
    if (!w.peer || !w.peer[r].host[0]) return;
    put(l, " on ");
    put(l, w.peer[r].host);
    put(l, " (pid ");
    put_int(l, w.peer[r].pid);
    put(l, ")");
}

static void put_collective(Line *l, uint32_t op, int unit, int64_t bytes, uint32_t number) {
    put(l, watch_op_name(op));
    put(l, " ");
    put_int(l, number);
    if (unit >= 0) {
        put(l, " of unit ");
        put_int(l, unit);
    }
    put(l, " (");
    put_int(l, bytes);
    put(l, " bytes)");
}

static void put_state(Line *l, int64_t step, int micro_batch, uint32_t phase) {
    put(l, "; it was at step ");
    put_int(l, step);
    put(l, ", micro-batch ");
    put_int(l, micro_batch);
    put(l, ", ");
    put(l, watch_phase_name(phase));
}

// "; it was at step 12, micro-batch 3, backward, in all_gather 1234 of unit 5 (1048576 bytes)". A rank of this host left
// that in its recorder to the last store; of the others we have the last beat.
static void put_where(Line *l, int r) {
    const Peer *p = &w.peer[r];
    const BeatFrame *b = &p->beat;
    const FlightHeader *h = LOAD(p->left);
    bool on_gpu = false, inside = false;
    for (int c = 0; h && c < WATCH_CHANNELS; c++) on_gpu = on_gpu || h->channel[c].on_gpu;
    if (h) put_state(l, h->step, h->micro_batch, h->phase);
    else if (p->has_beat) put_state(l, b->step, b->micro_batch, b->phase);
    else {
        put(l, "; it had not begun");
        return;
    }
    if (h && !on_gpu) {
        for (int c = 0; c < WATCH_CHANNELS && !inside; c++) {
            const FlightChannel *ch = &h->channel[c];
            if (!ch->open || ch->queued == ch->done) continue;
            inside = true;
            put(l, ", in ");
            put_collective(l, ch->op, ch->unit, ch->bytes, (uint32_t)ch->queued);
        }
    } else if (p->has_beat && b->wait_number && (!h || h->step == b->step)) { // an older beat says nothing about where it was
        inside = true;
        put(l, ", in ");
        put_collective(l, b->wait_op, b->wait_unit, b->wait_bytes, b->wait_number);
    }
    if (!inside) put(l, ", outside collectives");
}

static Voice own_voice(void) { return is_hub() ? SAY : SAY_ONCE; }

static void verdict(int r, const char *what) {
    char text[LINE_BYTES];
    Line l = {text, 0, sizeof text};
    put_rank(&l, r);
    put(&l, what);
    put_where(&l, r);
    leave(r, EXIT_PEER, text, own_voice());
}

// ---------------------------------------------------------------------------------------------------------------
// Crashes and last words (any thread)

void watch_last_words(int code, const char *line) {
    if (LOAD(w.stage) < STAGE_JOIN || LOAD(w.stage) == STAGE_OVER || w.job.world == 1 || pthread_equal(pthread_self(), w.thread)) return;
    int none = 0;
    if (!__atomic_compare_exchange_n(&w.words_state, &none, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return;
    w.words_code = code;
    Line l = {w.words, 0, sizeof w.words};
    put(&l, line);
    STORE(w.words_state, 2);
    wake();
    struct timespec ms = {0, 1000000};
    for (int i = 0; i < 200 && LOAD(w.words_state) != 3; i++) nanosleep(&ms, NULL);
}

static const char *signal_name(int s) {
    return s == SIGSEGV ? "SIGSEGV" : s == SIGBUS ? "SIGBUS" : s == SIGABRT ? "SIGABRT" : s == SIGFPE ? "SIGFPE" : s == SIGILL ? "SIGILL" : "signal";
}

// A library's own thread has crashed after everything was saved and freed: Open MPI 4.1 does so in one of about 1,000 calls
// of MPI_Finalize (open-mpi/ompi issue 10117). The work is done, so the end is the one that was under way: this thread
// stands still while the main thread ends the process, unless that waits for this one.
__attribute__((noreturn)) static void end_despite(int number) {
    char line[LINE_BYTES];
    Line l = {line, 0, sizeof line};
    put(&l, "note: rank ");
    put_int(&l, w.job.rank);
    put(&l, ": a thread of a library crashed (");
    put(&l, signal_name(number));
    put(&l, ") after all work was done; the result is not touched by that\n");
    say(line, l.n);
    struct timespec ms = {0, 1000000};
    for (int i = 0; i < 2000 && LOAD(w.stage) == STAGE_JOIN; i++) nanosleep(&ms, NULL); // the main thread may get through
    int32_t join = STAGE_JOIN;
    if (!__atomic_compare_exchange_n(&w.stage, &join, (int32_t)STAGE_END, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        for (;;) pause(); // it did
    wake();
    for (int i = 0; i < 5000 && !LOAD(w.bye_done); i++) nanosleep(&ms, NULL);
    _exit(EXIT_OK);
}

// Everything here is async-signal-safe: backtrace() has been called once before, so that it need not load its library.
static void on_crash(int number, siginfo_t *info, void *) {
    int saved = errno;
    bool is_main = gettid() == getpid(), is_beat = pthread_equal(pthread_self(), w.thread);
    if (LOAD(w.phase) == WATCH_END && !is_main && !is_beat && LOAD(w.stage) >= STAGE_JOIN) end_despite(number);
    struct sigaction normal = {};
    normal.sa_handler = SIG_DFL;
    sigaction(number, &normal, NULL); // a second fault, or our return, ends the process as the signal does
    char line[LINE_BYTES];
    Line l = {line, 0, sizeof line};
    put(&l, "crashed by ");
    put(&l, signal_name(number));
    if (info && (number == SIGSEGV || number == SIGBUS) && info->si_code > 0) {
        put(&l, " at address ");
        put_hex(&l, (uint64_t)(uintptr_t)info->si_addr);
    }
    put(&l, is_main ? " in the main thread" : is_beat ? " in the beat thread" : " in another thread");
    put(&l, ", step ");
    put_int(&l, LOAD(w.step));
    put(&l, ", micro-batch ");
    put_int(&l, LOAD(w.micro_batch));
    put(&l, ", ");
    put(&l, watch_phase_name((uint32_t)LOAD(w.phase)));
    char shown[LINE_BYTES + 160];
    Line s = {shown, 0, sizeof shown};
    put(&s, "error: rank ");
    put_int(&s, w.job.rank);
    put(&s, " on ");
    put(&s, w.host);
    put(&s, " (pid ");
    put_int(&s, getpid());
    put(&s, ") ");
    put(&s, line);
    put(&s, "; this is a bug of train_gpt or of a library; please report it with these lines:\n");
    say(shown, s.n);
    void *frame[48];
    backtrace_symbols_fd(frame, backtrace(frame, 48), STDERR_FILENO);
    Flight *f = w.flight;
    if (f) {
        f->h.code = 128 + number;
        f->h.culprit = w.job.rank;
        memcpy(f->h.text, line, sizeof line);
        STORE(f->h.end, (uint32_t)FLIGHT_CRASHED);
    }
    watch_last_words(EXIT_PEER, line);
    errno = saved;
    if (!info || info->si_code <= 0) raise(number); // sent, not caused: it would not come again by itself
}

static void crash_handlers(void) {
#if !defined(__SANITIZE_ADDRESS__) // it has better ones
    static char stack[65536]; // for an overflow of the main thread's own
    stack_t alternative = {};
    alternative.ss_sp = stack;
    alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, NULL);
    void *frame[2];
    backtrace(frame, 2);
    struct sigaction crash = {};
    crash.sa_sigaction = on_crash;
    crash.sa_flags = SA_SIGINFO | SA_ONSTACK;
    const int fatal[] = {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL};
    for (int i = 0; i < 5; i++) sigaction(fatal[i], &crash, NULL);
#endif
}
