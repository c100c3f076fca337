// watch.cpp - the beat thread, the verdict and the way out (watch.h says what they promise).
//
// Invariants:
//  1. After watch_start only the beat thread touches sockets, and it never blocks: every descriptor is non-blocking, and
//     what a peer does not take is dropped (beats) or kept until it does (all else).
//  2. The beat thread calls nothing that takes a lock, allocates, or uses stdio: clock_gettime, poll, send, recv, and on
//     its way out write, open, setitimer, _exit. It reads what the main thread publishes by atomic loads, and it does
//     not touch the mapped recorder before a verdict, because a page of a file may wait for a disk.
//  3. Deadlines move by the beat thread's own lateness. A rank that was suspended does not blame the others for it.
//  4. A verdict about progress needs the word of every rank that it did not progress either, or a rank at the ceiling.
//  5. An end that was announced (goodbye, last words, a verdict) is in the connection before its end is: bytes are read
//     before the close that follows them is acted upon.
#include "watch_peers.h"
#include "watch_progress.h"

// ---------------------------------------------------------------------------------------------------------------
// Beats and verdicts (beat thread)

static uint32_t median_u32(const uint32_t *x, int n) { // n <= LONG_STEPS
    uint32_t s[LONG_STEPS];
    for (int i = 0; i < n; i++) {
        int k = i;
        const uint32_t v = LOAD(x[i]);
        for (; k > 0 && s[k - 1] > v; k--) s[k] = s[k - 1];
        s[k] = v;
    }
    return s[n / 2];
}

static void own_beat(BeatFrame *b, int64_t now) {
    memset(b, 0, sizeof *b);
    b->head = frame_head(FRAME_BEAT);
    b->step = LOAD(w.step);
    b->micro_batch = LOAD(w.micro_batch);
    b->phase = (uint16_t)LOAD(w.phase);
    int64_t oldest = INT64_MAX;
    uint64_t gpu_seen = 0;
    for (int c = 0; c < WATCH_CHANNELS; c++) {
        Channel *ch = &w.channel[c];
        if (!LOAD(ch->open)) continue;
        uint64_t done = LOAD(ch->counter ? ch->counter->done : ch->done); // before started: never seen above it
        uint64_t started = LOAD(ch->counter ? ch->counter->started : ch->queued);
        if (ch->counter) gpu_seen += started + done;
        b->channel[c].group = ch->group;
        b->channel[c].started = (uint32_t)started;
        b->channel[c].done = (uint32_t)done;
        const Recent *e = &ch->recent[(done + 1) % RECENT];
        if (started == done || LOAD(e->number) != done + 1 || e->time_ns >= oldest) continue;
        oldest = e->time_ns;
        b->wait_number = (uint32_t)(done + 1);
        b->wait_op = (uint16_t)e->op;
        b->wait_unit = e->unit;
        b->wait_bytes = e->bytes;
    }
    if (gpu_seen != w.gpu_seen) {
        w.gpu_seen = gpu_seen;
        w.gpu_progress_ns = now;
    }
    int64_t progress = max_i64(LOAD(w.progress_ns), w.gpu_progress_ns);
    if (progress != w.credit_for_ns) {
        w.credit_for_ns = progress;
        w.credit_ns = 0;
    }
    b->stalled_ms = (uint32_t)(max_i64(0, now - progress - w.credit_ns) / MILLISECOND);

    uint64_t steps = LOAD(w.steps);
    const WatchLimits *lim = &w.job.limits;
    double limit = lim->progress_floor_s;
    if (steps == 0) limit = fmax(limit, lim->first_step_s);
    else {
        int n = (int)min_i64((int64_t)steps, LONG_STEPS);
        uint32_t longest = 0;
        for (int i = 0; i < n; i++) longest = (uint32_t)max_i64(longest, LOAD(w.step_us[i]));
        limit = fmax(limit, fmax(10e-6 * median_u32(w.step_us, n), 3e-6 * longest));
        int nb = (int)min_i64((int64_t)steps, BUSY_STEPS);
        b->busy_us = median_u32(w.busy_us, nb);
        b->busy_steps = (uint32_t)nb;
    }
    limit = fmax(limit, 1e-3 * (double)LOAD(w.announced_ms));
    if (w.job.world == 1) limit = lim->ceiling_s; // nobody waits for it
    b->limit_ms = (uint32_t)fmin(1e3 * fmin(limit, lim->ceiling_s), 4e9);
    b->ceiling_ms = (uint32_t)fmin(1e3 * lim->ceiling_s, 4e9);
}

static bool counts(int r) { return r == 0 ? !w.said_goodbye : w.peer[r].state == PEER_IN; }
static bool in_collective(const BeatFrame *b) {
    for (int c = 0; c < WATCH_CHANNELS; c++) if (b->channel[c].group && b->channel[c].started != b->channel[c].done) return true;
    return false;
}

// The largest number that somebody waits for in the group; null when the table is full, which its size rules out.
static uint32_t *group_entry(uint32_t group) {
    for (uint32_t k = 0; k < w.group_slots; k++) {
        uint32_t *e = &w.group_table[2 * ((group + k) % w.group_slots)];
        if (e[0] == group || e[0] == 0) return e;
    }
    return NULL;
}

// Nothing moves: the culprit is who is behind in a collective that others wait in, preferably one that waits for nobody.
static void verdict_stuck(int64_t stalled_ms, int64_t limit_ms) {
    memset(w.group_table, 0, 2 * sizeof(uint32_t) * w.group_slots);
    int waiting = 0, alive = 0;
    for (int r = 0; r < w.job.world; r++) {
        if (!counts(r)) continue;
        alive++;
        const BeatFrame *b = &w.peer[r].beat;
        if (in_collective(b)) waiting++;
        for (int c = 0; c < WATCH_CHANNELS; c++) {
            if (!b->channel[c].group || b->channel[c].started == b->channel[c].done) continue;
            uint32_t *e = group_entry(b->channel[c].group);
            if (!e) continue;
            if (e[0] == 0 || (int32_t)(b->channel[c].started - e[1]) > 0) e[1] = b->channel[c].started;
            e[0] = b->channel[c].group;
        }
    }
    int culprit = -1;
    int64_t worst = 0; // how far behind; those who wait for nobody come first
    for (int r = 0; r < w.job.world; r++) {
        if (!counts(r)) continue;
        const BeatFrame *b = &w.peer[r].beat;
        int64_t behind = 0;
        for (int c = 0; c < WATCH_CHANNELS; c++) {
            if (!b->channel[c].group) continue;
            const uint32_t *e = group_entry(b->channel[c].group);
            if (e && e[0]) behind = max_i64(behind, (int32_t)(e[1] - b->channel[c].started));
        }
        if (behind > 0 && !in_collective(b)) behind += (int64_t)1 << 40;
        if (behind > worst) worst = behind, culprit = r;
    }
    char text[LINE_BYTES];
    Line l = {text, 0, sizeof text};
    if (culprit < 0 && waiting == alive && alive > 1) {
        const BeatFrame *b = &w.peer[0].beat;
        put(&l, "communication is stuck: all ranks have entered ");
        for (int r = 0; r < w.job.world; r++) if (counts(r) && w.peer[r].beat.wait_number) { b = &w.peer[r].beat; break; }
        put_collective(&l, b->wait_op, b->wait_unit, b->wait_bytes, b->wait_number);
        put(&l, " at step ");
        put_int(&l, b->step);
        put(&l, ", ");
        put(&l, watch_phase_name(b->phase));
        put(&l, ", and nothing has moved for ");
        put_seconds(&l, stalled_ms);
        put(&l, " (limit ");
        put_seconds(&l, limit_ms);
        put(&l, "); see to the network or the GPUs");
        leave(-1, EXIT_PEER, text, SAY);
    }
    if (culprit < 0) { // outside all collectives known here: the least far, then the longest without progress
        for (int r = 0; r < w.job.world; r++) {
            if (!counts(r)) continue;
            if (culprit < 0) { culprit = r; continue; }
            const BeatFrame *b = &w.peer[r].beat, *c = &w.peer[culprit].beat;
            if (in_collective(b) != in_collective(c)) { if (!in_collective(b)) culprit = r; continue; }
            if (b->step < c->step || (b->step == c->step && b->stalled_ms > c->stalled_ms)) culprit = r;
        }
    }
    put_rank(&l, culprit);
    put(&l, " makes no progress: nothing for ");
    put_seconds(&l, max_i64(stalled_ms, w.peer[culprit].beat.stalled_ms));
    put(&l, " (limit ");
    put_seconds(&l, limit_ms);
    put(&l, ")");
    for (int r = 0; r < w.job.world; r++) {
        const BeatFrame *b = &w.peer[r].beat;
        if (r == culprit || !counts(r) || !b->wait_number) continue;
        put(&l, "; others wait for it in ");
        put_collective(&l, b->wait_op, b->wait_unit, b->wait_bytes, b->wait_number);
        break;
    }
    put_where(&l, culprit);
    leave(culprit, EXIT_PEER, text, SAY);
}

// A launcher that was killed ends nobody: without it a job would train on, unseen, on GPUs that look free to the next one.
static void judge_launcher(void) {
    if (!w.job.launcher || getppid() == w.job.launcher) return;
    char text[LINE_BYTES];
    Line l = {text, 0, sizeof text};
    put(&l, "the launcher (pid ");
    put_int(&l, w.job.launcher);
    put(&l, " on ");
    put(&l, w.host);
    put(&l, ") is gone");
    leave(-1, EXIT_PEER, text, SAY_ONCE); // all find it out
}

static void judge(int64_t now) {
    int64_t silent_ns = to_ns(w.job.limits.silent_s + (is_hub() ? 0 : 1));
    for (int r = 0; r < w.job.world; r++) {
        Peer *p = &w.peer[r];
        if (p->words_ns && now - p->words_ns > WORDS_MS * MILLISECOND) leave_after(r);
        if (p->fd < 0 || p->state != PEER_IN || now - p->heard_ns <= silent_ns) continue;
        char what[96];
        Line l = {what, 0, sizeof what};
        put(&l, " has been silent for ");
        put_seconds(&l, (now - p->heard_ns) / MILLISECOND);
        put(&l, ": stopped, or cut off");
        verdict(r, what);
    }
    if (!is_hub() || !w.go) return;
    int64_t least = INT64_MAX, most = 0, limit = 0;
    for (int r = 0; r < w.job.world; r++) {
        if (!counts(r)) continue;
        const Peer *p = &w.peer[r];
        int64_t stalled = p->has_beat ? p->beat.stalled_ms : 0;
        least = min_i64(least, stalled);
        most = max_i64(most, stalled);
        if (p->has_beat) limit = max_i64(limit, p->beat.limit_ms);
    }
    int64_t ceiling = (int64_t)(1e3 * w.job.limits.ceiling_s);
    if (most == 0 || least == INT64_MAX) return;
    if (least > limit) verdict_stuck(least, limit);
    if (most > ceiling) verdict_stuck(most, ceiling);
}

static void sort_floats(float *x, int n) { // Shell, 1959: in place, no recursion
    for (int gap = n / 2; gap > 0; gap /= 2)
        for (int i = gap; i < n; i++) {
            float v = x[i];
            int k = i;
            for (; k >= gap && x[k - gap] > v; k -= gap) x[k] = x[k - gap];
            x[k] = v;
        }
}

// Compares the ranks of each role. Flags go up above STRAGGLER_RATIO and down below STRAGGLER_BACK.
static void find_stragglers(void) {
    double median = 0;
    for (int r = 0, of_role = -1; r < w.job.world; r++) {
        Peer *p = &w.peer[r];
        if (!counts(r) || !p->has_beat || p->beat.busy_steps < BUSY_STEPS) continue;
        if (p->role != of_role) {
            int n = 0;
            for (int q = 0; q < w.job.world; q++)
                if (counts(q) && w.peer[q].role == p->role && w.peer[q].has_beat && w.peer[q].beat.busy_steps >= BUSY_STEPS) w.sort[n++] = (float)w.peer[q].beat.busy_us;
            sort_floats(w.sort, n);
            median = 1e-6 * w.sort[(n - 1) / 2]; // the lower one: of two ranks one can be slow
            of_role = p->role;
        }
        double busy = 1e-6 * p->beat.busy_us;
        p->ratio = median > 0 ? busy / median : 1;
        p->lost_s = busy - median;
        bool slow = p->ratio > STRAGGLER_RATIO && p->lost_s > STRAGGLER_FLOOR_S;
        p->slow_beats = slow ? p->slow_beats + 1 : 0;
        if (p->slow_beats == SLOW_BEATS && LOAD(p->straggler) == 0) STORE(p->straggler, 1);
        if (p->ratio < STRAGGLER_BACK) STORE(p->straggler, 0);
    }
}

static void send_beats(int64_t now) {
    BeatFrame b;
    own_beat(&b, now);
    Peer *self = &w.peer[w.job.rank];
    self->beat = b;
    self->has_beat = true;
    for (int r = 0; r < w.job.world; r++)
        if (r != w.job.rank && w.peer[r].state == PEER_IN) send_frame(&w.peer[r], &b, sizeof b, true);
}

// Last words of this rank: to the hub, or from the hub to all.
static void send_words(void) {
    if (LOAD(w.words_state) != 2) return;
    WordsFrame f;
    memset(&f, 0, sizeof f);
    f.head = frame_head(FRAME_WORDS);
    f.culprit = w.job.rank;
    f.code = w.words_code;
    Line l = {f.text, 0, sizeof f.text};
    put(&l, w.words);
    for (int r = 0; w.peer && r < w.job.world; r++)
        if (r != w.job.rank && w.peer[r].state == PEER_IN) send_frame(&w.peer[r], &f, sizeof f, false);
    STORE(w.words_state, 3);
}

static void goodbyes(void) {
    if (LOAD(w.stage) != STAGE_END || w.bye_done) return;
    if (!w.said_goodbye && !is_hub()) send_simple(&w.peer[0], FRAME_GOODBYE);
    w.said_goodbye = true;
    for (int r = 0; r < w.job.world; r++)
        if (r != w.job.rank && (is_hub() || r == 0) && w.peer[r].state != PEER_BYE) return;
    STORE(w.bye_done, 1);
}

// This thread woke `late` after it should have: nobody else is to blame for that time.
static void move_deadlines(int64_t late) {
    w.credit_ns += late;
    __atomic_fetch_add(&w.deadline_ns, late, __ATOMIC_ACQ_REL);
    for (int r = 0; w.peer && r < w.job.world; r++) if (w.peer[r].state != PEER_ABSENT || w.peer[r].heard_ns) w.peer[r].heard_ns += late;
    for (int i = 0; i < MAX_STRANGERS; i++) w.stranger[i].since_ns += late;
    STORE(w.lateness, w.lateness + 1);
}

// Before watch_start: nothing to listen to, only a deadline.
static void judge_start(int64_t now, Stage stage) {
    if (now < LOAD(w.deadline_ns)) return;
    char text[LINE_BYTES];
    Line l = {text, 0, sizeof text};
    if (stage == STAGE_OVER) {
        put(&l, "rank ");
        put_int(&l, w.job.rank);
        put(&l, " on ");
        put(&l, w.host);
        put(&l, " has finished, but its process did not end within ");
        put_seconds(&l, (int64_t)(1e3 * w.job.limits.end_s));
        leave(w.job.rank, EXIT_PEER, text, SAY);
    }
    const char *rank = NULL, *const names[] = {"OMPI_COMM_WORLD_RANK", "RANK", "SLURM_PROCID"};
    for (int i = 0; i < 3 && !rank; i++) rank = getenv(names[i]);
    put(&l, "rank ");
    if (w.peer) put_int(&l, w.job.rank);
    else put(&l, rank && strlen(rank) < 12 ? rank : "?");
    put(&l, " on ");
    put(&l, w.host);
    put(&l, " (pid ");
    put_int(&l, getpid());
    put(&l, ") has waited ");
    put_seconds(&l, (int64_t)(1e3 * w.job.limits.start_s));
    put(&l, " for all ranks to start; look at those that do not print this line");
    leave(-1, EXIT_PEER, text, SAY);
}

static void *beat_thread(void *) {
    int64_t now = now_ns();
    int64_t beat_ns = to_ns(0.5);
    w.next_beat_ns = now;
    for (;;) {
        Stage stage = (Stage)LOAD(w.stage);
        // what to wait for
        int n = 0, first_peer, first_stranger, listener = -1, world = stage == STAGE_JOIN || stage == STAGE_END ? w.job.world : 0;
        if (world) beat_ns = to_ns(w.job.limits.beat_s);
        struct pollfd alone[1], *poll_set = world ? w.poll : alone;
        poll_set[n++] = {w.wake_fd, POLLIN, 0};
        first_peer = n;
        for (int r = 0; r < world; r++, n++) poll_set[n] = {w.peer[r].fd, (short)(POLLIN | (w.peer[r].out_n ? POLLOUT : 0)), 0}; // fd < 0: ignored
        first_stranger = n;
        if (world && w.listen_fd >= 0) {
            for (int i = 0; i < MAX_STRANGERS; i++, n++) poll_set[n] = {w.stranger[i].fd, POLLIN, 0};
            listener = n;
            poll_set[n++] = {w.listen_fd, POLLIN, 0};
        }
        int64_t wait = max_i64(0, w.next_beat_ns - now);
        struct timespec t = {wait / SECOND, wait % SECOND};
        if (ppoll(poll_set, (nfds_t)n, &t, NULL) < 0) for (int i = 0; i < n; i++) poll_set[i].revents = 0;
        int64_t woke = now_ns(), late = woke - now - wait; // the work of the last round is in it
        now = woke;
        if (late > 2 * beat_ns) move_deadlines(late);

        uint64_t count;
        ssize_t drained = read(w.wake_fd, &count, sizeof count);
        (void)drained;
        for (int r = 0; r < world; r++) {
            if (w.peer[r].fd < 0) continue;
            if (poll_set[first_peer + r].revents & POLLOUT) flush_out(&w.peer[r]);
            if (poll_set[first_peer + r].revents & ~POLLOUT) receive(r, now);
        }
        if (listener >= 0) {
            for (int i = 0; i < MAX_STRANGERS; i++)
                if (poll_set[first_stranger + i].revents && w.stranger[i].fd == poll_set[first_stranger + i].fd) stranger_read(&w.stranger[i], now);
            if (poll_set[listener].revents) stranger_accept(now);
        }
        send_words();
        if (world == 0) {
            judge_start(now, stage);
            if (now >= w.next_beat_ns) w.next_beat_ns = now + beat_ns;
            continue;
        }
        if (now >= w.next_beat_ns) {
            judge_launcher();
            send_beats(now);
            w.next_beat_ns = max_i64(w.next_beat_ns + beat_ns, now);
            if (is_hub()) find_stragglers();
        }
        if (is_hub() && !w.go) hub_join(now);
        goodbyes();
        if (!w.bye_done) judge(now);
    }
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------
// Starting and ending (main thread)

WatchLimits watch_default_limits(double ceiling_s) {
    WatchLimits l = {0.5, 5, 10, ceiling_s, 300, 60, 60};
    return l;
}

// The thread, its wake-up and the handlers, once.
static void begin(double start_s) {
    if (w.stage != STAGE_OFF) return;
    char name[FLIGHT_HOST] = "";
    if (gethostname(name, sizeof name - 1) != 0 || !name[0]) snprintf(name, sizeof name, "localhost");
    text_escape(w.host, sizeof w.host, name, strlen(name));
    crash_handlers();
    w.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (w.wake_fd < 0) die(EXIT_INTERNAL, "no eventfd: %s; raise the limit of open files (ulimit -n)", strerror(errno));
    w.listen_fd = -1;
    for (int i = 0; i < MAX_STRANGERS; i++) w.stranger[i].fd = -1;
    w.unit = -1;
    w.job.limits.start_s = start_s;
    w.deadline_ns = now_ns() + to_ns(start_s);
    STORE(w.stage, (int32_t)STAGE_ARMED);

    // Signals are the main thread's, but for those that a thread causes itself and the last resort's.
    sigset_t block, before;
    sigfillset(&block);
    const int own[] = {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL, SIGALRM};
    for (int i = 0; i < 6; i++) sigdelset(&block, own[i]);
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 1 << 20);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_BLOCK, &block, &before);
    int error = pthread_create(&w.thread, &attr, beat_thread, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    if (error) die(EXIT_INTERNAL, "no thread for the beat: %s; raise the limit of processes (ulimit -u)", strerror(error));
}

void watch_arm(double start_s) { begin(start_s); }

void watch_disarm(void) { if (w.stage == STAGE_ARMED) STORE(w.deadline_ns, INT64_MAX / 2); }

void watch_prepare(const WatchJob *job, WatchAddress *address) {
    begin(job->limits.start_s);
    CHECK(w.stage == STAGE_ARMED, "watch_prepare in stage %d", w.stage);
    w.job = *job;
    CHECK(job->rank >= 0 && job->rank < job->world, "rank %d of %d", job->rank, job->world);
    w.flight_dir[0] = 0;
    if (job->flight_dir) snprintf(w.flight_dir, sizeof w.flight_dir, "%s", job->flight_dir);
    random_bytes(&w.id, sizeof w.id);

    size_t world = (size_t)job->world;
    w.peer = (Peer *)host_alloc(world * sizeof *w.peer);
    w.poll = (struct pollfd *)host_alloc((world + MAX_STRANGERS + 2) * sizeof *w.poll);
    w.group_slots = (uint32_t)(2 * WATCH_CHANNELS * world);
    w.group_table = (uint32_t *)host_alloc(2 * sizeof(uint32_t) * w.group_slots);
    w.sort = (float *)host_alloc(world * sizeof *w.sort);
    for (int r = 0; r < job->world; r++) w.peer[r].fd = -1;
    HelloFrame self;
    hello_fill(&self, FRAME_HELLO);
    peer_introduce(&w.peer[job->rank], &self);
    memset(address, 0, sizeof *address);
    if (!is_hub()) return;

    struct rlimit files;
    rlim_t need = (rlim_t)(world + MAX_STRANGERS + 256);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < need) {
        files.rlim_cur = files.rlim_max < need ? files.rlim_max : need;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    random_bytes(address->nonce, sizeof address->nonce);
    random_bytes(&address->job, sizeof address->job);
    if (job->world > 1) hub_listen(address);
}

void watch_start(const WatchAddress *address) {
    CHECK(w.stage == STAGE_ARMED && w.peer, "watch_start in stage %d", w.stage);
    w.address = *address;
    STORE(w.flight, flight_open(NULL, w.job.rank, w.job.world, w.address.job, w.host));
    int64_t t = now_ns();
    STORE(w.progress_ns, t);
    STORE(w.deadline_ns, t + to_ns(w.job.limits.start_s + (is_hub() ? 0 : 10)));
    if (!is_hub()) join_hub();
    STORE(w.stage, (int32_t)STAGE_JOIN);
    wake();
    while (!LOAD(w.go)) usleep(1000);
    STORE(w.progress_ns, now_ns());
}

void watch_record(void) {
    if (LOAD(w.stage) != STAGE_JOIN || !w.flight_dir[0]) return;
    Flight *f = flight_open(w.flight_dir, w.job.rank, w.job.world, w.address.job, w.host);
    memcpy(f, w.flight, sizeof *f);
    STORE(w.flight, f); // the old one stays allocated: another thread may be about to write to it
}

void watch_goodbye(void) {
    if (w.stage != STAGE_JOIN) return;
    int64_t t = now_ns();
    STORE(w.phase, (int32_t)WATCH_END);
    publish_progress(t);
    record(FLIGHT_GOODBYE, -1, 0, 0, 0, 0, t);
    STORE(w.stage, (int32_t)STAGE_END);
    wake();
    while (!LOAD(w.bye_done)) usleep(1000);
    STORE(w.flight->h.end, (uint32_t)FLIGHT_ENDED);
    STORE(w.deadline_ns, now_ns() + to_ns(w.job.limits.end_s));
    STORE(w.stage, (int32_t)STAGE_OVER);
}

bool watch_straggler(WatchStraggler *out) {
    if (LOAD(w.stage) != STAGE_JOIN || !is_hub()) return false;
    for (int r = 0; r < w.job.world; r++) {
        Peer *p = &w.peer[r];
        int32_t fresh = 1;
        if (!__atomic_compare_exchange_n(&p->straggler, &fresh, 2, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) continue;
        out->rank = r;
        out->role = p->role;
        out->host = p->host;
        out->ratio = p->ratio;
        out->lost_s = p->lost_s;
        return true;
    }
    return false;
}

int64_t watch_lateness(void) { return LOAD(w.lateness); }
