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
#include "watch.h"
#include "flight.h"

#include <arpa/inet.h>
#include <execinfo.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>

#define LOAD(x) __atomic_load_n(&(x), __ATOMIC_ACQUIRE)
#define STORE(x, value) __atomic_store_n(&(x), (value), __ATOMIC_RELEASE)

static const int64_t SECOND = 1000000000, MILLISECOND = 1000000;

enum {
    MAX_STRANGERS = 64,   // connections that have not proved themselves, at once
    STRANGER_S = 2,       // and how long each may take
    RETURN_S = 2,         // a rank whose connection broke before the start may come back within
    RECENT = 256,         // collectives of a channel whose description is at hand
    BUSY_STEPS = 20,      // medians for stragglers
    LONG_STEPS = 50,      // steps that the limit looks back on
    OUT_BYTES = 2048,
    LINE_BYTES = 448,
};
static const double STRAGGLER_RATIO = 1.15, STRAGGLER_BACK = 1.10, STRAGGLER_FLOOR_S = 0.001;

// ---------------------------------------------------------------------------------------------------------------
// What goes over the wire: frames of a fixed size for each type, in the machine's own byte order.

enum FrameType { FRAME_HELLO = 1, FRAME_WELCOME, FRAME_GO, FRAME_BEAT, FRAME_WORDS, FRAME_VERDICT, FRAME_GOODBYE, FRAME_FAREWELL, FRAME_TYPES };
static const uint32_t FRAME_MAGIC = 0x74616562; // "beat"

typedef struct {
    uint32_t magic;
    uint16_t bytes;
    uint16_t type;
} FrameHead;

typedef struct { // HELLO to the hub, WELCOME back
    FrameHead head;
    uint8_t nonce[16];
    uint64_t id; // of the process: random
    int32_t rank, world, role, pid;
    char host[FLIGHT_HOST];
} HelloFrame;

typedef struct {
    FrameHead head;
    int64_t step, wait_bytes;
    int32_t micro_batch, wait_unit;
    uint32_t stalled_ms, limit_ms, ceiling_ms; // since the last progress; limits of the phase
    uint32_t busy_us, busy_steps;              // median busy time, of how many steps
    uint32_t wait_number;                      // the oldest collective begun and not done; 0: none
    uint16_t phase, wait_op;
    struct { uint32_t group, started, done; } channel[WATCH_CHANNELS]; // group 0: closed; low 32 bits
} BeatFrame;

typedef struct { // WORDS: a rank about its own end. VERDICT: about a rank's.
    FrameHead head;
    int32_t culprit, code;
    char text[LINE_BYTES];
} WordsFrame;

typedef union {
    FrameHead head;
    HelloFrame hello;
    BeatFrame beat;
    WordsFrame words;
} Frame;

static size_t frame_bytes(int type) {
    switch (type) {
    case FRAME_HELLO: case FRAME_WELCOME: return sizeof(HelloFrame);
    case FRAME_BEAT: return sizeof(BeatFrame);
    case FRAME_WORDS: case FRAME_VERDICT: return sizeof(WordsFrame);
    case FRAME_GO: case FRAME_GOODBYE: case FRAME_FAREWELL: return sizeof(FrameHead);
    }
    return 0;
}
static FrameHead frame_head(int type) {
    FrameHead h = {FRAME_MAGIC, (uint16_t)frame_bytes(type), (uint16_t)type};
    return h;
}
static bool frame_valid(const FrameHead *h) { return h->magic == FRAME_MAGIC && h->type < FRAME_TYPES && h->bytes != 0 && h->bytes == frame_bytes(h->type); }

// ---------------------------------------------------------------------------------------------------------------
// State

typedef enum { STAGE_OFF, STAGE_ARMED, STAGE_JOIN, STAGE_END, STAGE_OVER } Stage; // JOIN: until the goodbye
typedef enum { PEER_ABSENT, PEER_IN, PEER_BYE } PeerState;

typedef struct { // one for each rank; connections: the hub's to all others, the others' to the hub
    int fd;
    int32_t state, pid, role;
    uint64_t id;
    char host[FLIGHT_HOST];
    int64_t heard_ns;     // last byte; when state is ABSENT: when the connection broke, 0 if there was none
    bool has_beat;
    BeatFrame beat;       // the newest
    const FlightHeader *left; // its recorder, if it is on this host
    size_t in_n, out_n;
    Frame in;
    uint8_t out[OUT_BYTES];
    int32_t straggler;    // 0 no, 1 since now, 2 and reported
    double ratio, lost_s;
} Peer;

typedef struct {
    int fd;
    int64_t since_ns;
    size_t n;
    HelloFrame hello;
} Stranger;

typedef struct {
    uint64_t number; // 0: being written
    int64_t bytes, time_ns;
    int32_t unit;
    uint32_t op;
} Recent;

typedef struct {
    uint32_t open, group;
    uint64_t queued, done;
    const WatchCounter *counter;
    Recent recent[RECENT];
} Channel;

static struct {
    WatchJob job;
    WatchAddress address;
    char host[FLIGHT_HOST], flight_dir[4096];
    uint64_t id;
    pthread_t thread;
    int32_t stage;            // Stage; main thread writes
    int32_t go, bye_done;     // beat thread writes: all ranks are in; goodbyes are exchanged
    int wake_fd;              // an eventfd: the beat thread shall look
    int64_t deadline_ns;      // of STAGE_ARMED, JOIN, OVER
    Flight *flight;

    // published by the main thread
    int64_t step, progress_ns, announced_ms;
    int32_t micro_batch, phase, unit;
    Channel channel[WATCH_CHANNELS];
    uint32_t step_us[LONG_STEPS], busy_us[BUSY_STEPS];
    uint64_t steps;           // measured so far
    // private to the main thread
    double step_s, waited_s;  // of the step under way
    int64_t last_call_ns;
    bool in_step;

    // last words
    int32_t words_state;      // 0 none, 1 being written, 2 ready, 3 sent
    int32_t words_code;
    char words[LINE_BYTES];

    // private to the beat thread
    int listen_fd;
    Peer *peer;
    Stranger stranger[MAX_STRANGERS];
    struct pollfd *poll;
    int64_t next_beat_ns, gpu_progress_ns, credit_ns, credit_for_ns;
    uint64_t gpu_seen;
    int64_t lateness;
    bool said_goodbye;
    uint32_t *group_table;    // (2 * group_slots): group, largest number waited for
    uint32_t group_slots;
    float *sort;              // (world)
} w;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}
static int64_t to_ns(double seconds) { return (int64_t)(seconds * 1e9); }

static bool is_hub(void) { return w.job.rank == 0; }

static void wake(void) {
    uint64_t one = 1;
    ssize_t n = write(w.wake_fd, &one, sizeof one); // a full counter wakes as well
    (void)n;
}

// ---------------------------------------------------------------------------------------------------------------
// Text without stdio

typedef struct {
    char *s;
    size_t n, room;
} Line;

static void put(Line *l, const char *text) {
    while (*text && l->n + 1 < l->room) l->s[l->n++] = *text++;
    l->s[l->n] = 0;
}
static void put_int(Line *l, int64_t v) {
    char digits[24];
    int i = sizeof digits - 1;
    uint64_t u = v < 0 ? 0 - (uint64_t)v : (uint64_t)v;
    digits[i] = 0;
    do digits[--i] = (char)('0' + u % 10); while (u /= 10);
    if (v < 0) digits[--i] = '-';
    put(l, digits + i);
}
static void put_hex(Line *l, uint64_t v) {
    char digits[20];
    int i = sizeof digits - 1;
    digits[i] = 0;
    do digits[--i] = "0123456789abcdef"[v % 16]; while (v /= 16);
    put(l, "0x");
    put(l, digits + i);
}
static void put_seconds(Line *l, int64_t ms) { // one decimal
    put_int(l, ms / 1000);
    put(l, ".");
    put_int(l, ms % 1000 / 100);
    put(l, " s");
}

// ---------------------------------------------------------------------------------------------------------------
// Recorder and progress: called by the trainer

static void record(FlightEvent event, int channel, uint32_t op, int64_t bytes, uint64_t number, double seconds, int64_t time_ns) {
    Flight *f = LOAD(w.flight);
    if (!f) return;
    uint64_t i = __atomic_fetch_add(&f->h.head, 1, __ATOMIC_RELAXED);
    FlightRecord *r = &f->record[i % FLIGHT_RECORDS];
    STORE(r->sequence, 0);
    r->time_ns = time_ns;
    r->step = w.step;
    r->bytes = bytes;
    r->number = number;
    r->micro_batch = w.micro_batch;
    r->unit = w.unit;
    r->group = channel >= 0 ? w.channel[channel].group : 0;
    r->channel = (uint8_t)(channel >= 0 ? channel : 255);
    r->op = (uint8_t)op;
    r->phase = (uint8_t)w.phase;
    r->event = (uint8_t)event;
    r->seconds = (float)seconds;
    STORE(r->sequence, i + 1);
}

static void publish_progress(int64_t time_ns) {
    STORE(w.progress_ns, time_ns);
    Flight *f = w.flight;
    if (!f) return;
    f->h.step = w.step;
    f->h.micro_batch = w.micro_batch;
    f->h.phase = (uint32_t)w.phase;
    f->h.unit = w.unit;
    f->h.progress_ns = time_ns;
    for (int c = 0; c < WATCH_CHANNELS; c++) { // a GPU's counters are elsewhere; this is the copy that a kill leaves
        const WatchCounter *counter = w.channel[c].counter;
        if (!w.channel[c].open || !counter) continue;
        f->h.channel[c].started = counter->started;
        f->h.channel[c].done = counter->done;
    }
}

// Time since the last call belongs to the step, unless a phase of another scale was announced.
static void measure(int64_t time_ns) {
    if (w.in_step && w.announced_ms == 0) w.step_s += 1e-9 * (double)(time_ns - w.last_call_ns);
    w.last_call_ns = time_ns;
}

void watch_progress(int64_t step, int micro_batch, WatchPhase phase) {
    if (w.stage == STAGE_OFF) return;
    int64_t t = now_ns();
    measure(t);
    if (step != w.step || !w.in_step) {
        if (w.in_step) {
            double busy = fmax(0, w.step_s - w.waited_s);
            w.step_us[w.steps % LONG_STEPS] = (uint32_t)fmin(1e6 * w.step_s, 4e9);
            w.busy_us[w.steps % BUSY_STEPS] = (uint32_t)fmin(1e6 * busy, 4e9);
            STORE(w.steps, w.steps + 1);
        }
        w.in_step = true;
        w.step_s = w.waited_s = 0;
    }
    STORE(w.step, step);
    STORE(w.micro_batch, micro_batch);
    STORE(w.phase, (int32_t)phase);
    STORE(w.announced_ms, 0);
    publish_progress(t);
    record(FLIGHT_PROGRESS, -1, 0, 0, 0, 0, t);
}

void watch_announce(WatchPhase phase, double seconds) {
    if (w.stage == STAGE_OFF) return;
    int64_t t = now_ns();
    measure(t);
    STORE(w.phase, (int32_t)phase);
    STORE(w.announced_ms, max_i64(1, (int64_t)(1e3 * fmin(seconds, 1e9))));
    publish_progress(t);
    record(FLIGHT_ANNOUNCE, -1, 0, 0, 0, seconds, t);
}

void watch_tick(void) {
    if (w.stage != STAGE_OFF) STORE(w.progress_ns, now_ns());
}
void watch_unit(int unit) { STORE(w.unit, unit); }
void watch_waited(double seconds) { w.waited_s += seconds; }

int watch_channel_open(uint32_t group, const WatchCounter *counter) {
    for (int c = 0; c < WATCH_CHANNELS; c++) {
        Channel *ch = &w.channel[c];
        if (ch->open) continue;
        ch->group = group ? group : 1;
        ch->queued = ch->done = 0;
        ch->counter = counter;
        memset(ch->recent, 0, sizeof ch->recent);
        STORE(ch->open, 1);
        return c;
    }
    return -1;
}
void watch_channel_close(int channel) {
    if (channel >= 0) STORE(w.channel[channel].open, 0);
}

uint64_t watch_collective_enter(int channel, WatchOp op, int64_t bytes) {
    if (channel < 0) return 0;
    Channel *ch = &w.channel[channel];
    int64_t t = now_ns();
    uint64_t number = ch->queued + 1;
    Recent *e = &ch->recent[number % RECENT];
    STORE(e->number, 0);
    e->bytes = bytes;
    e->time_ns = t;
    e->unit = w.unit;
    e->op = op;
    STORE(e->number, number);
    STORE(ch->queued, number);
    STORE(w.progress_ns, t);
    Flight *f = LOAD(w.flight);
    if (f) {
        FlightChannel *c = &f->h.channel[channel];
        c->group = ch->group;
        c->open = 1;
        c->on_gpu = ch->counter != NULL;
        c->op = (uint16_t)op;
        c->unit = w.unit;
        c->bytes = bytes;
        STORE(c->queued, number);
        if (!ch->counter) STORE(c->started, number);
    }
    record(FLIGHT_ENTER, channel, op, bytes, number, 0, t);
    return number;
}

void watch_collective_done(int channel, uint64_t number) {
    if (channel < 0) return;
    Channel *ch = &w.channel[channel];
    int64_t t = now_ns();
    STORE(ch->done, number);
    STORE(w.progress_ns, t);
    Flight *f = LOAD(w.flight);
    if (f) STORE(f->h.channel[channel].done, number);
    const Recent *e = &ch->recent[number % RECENT];
    record(FLIGHT_DONE, channel, e->op, e->bytes, number, 0, t);
}

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
    uint64_t number;
    memcpy(&number, w.address.nonce, sizeof number);
    put_hex(&l, number);
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

    char line[LINE_BYTES + 160];
    Line l = {line, 0, sizeof line};
    put(&l, "error: ");
    put(&l, text);
    if (code == EXIT_PEER) put(&l, "; started again, the job resumes from its newest checkpoint");
    put(&l, "\n");
    if (voice == SAY || (voice == SAY_ONCE && elected(line, l.n))) say(line, l.n);
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
    } else if (p->has_beat && b->wait_number) {
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

static void on_words(int r, const WordsFrame *f) {
    char text[LINE_BYTES];
    Line l = {text, 0, sizeof text};
    put_rank(&l, r);
    put(&l, " left with an error of its own: ");
    put(&l, f->text);
    leave(r, f->code, text, SAY_NOTHING);
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
        if (f->head.type == FRAME_WORDS) on_words(r, &f->words);
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
    if (now < w.deadline_ns) return;
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
// Beats and verdicts (beat thread)

static uint32_t median_u32(const uint32_t *x, int n) { // n <= LONG_STEPS
    uint32_t s[LONG_STEPS];
    for (int i = 0; i < n; i++) {
        int k = i;
        for (; k > 0 && s[k - 1] > x[i]; k--) s[k] = s[k - 1];
        s[k] = x[i];
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
        uint64_t done = ch->counter ? ch->counter->done : LOAD(ch->done); // before started: never seen above it
        uint64_t started = ch->counter ? ch->counter->started : LOAD(ch->queued);
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
        for (int i = 0; i < n; i++) if (w.step_us[i] > longest) longest = w.step_us[i];
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
    put(&l, worst > 0 && worst < (int64_t)1 << 40 ? " holds up the others, who wait in collectives that it has not entered: no progress for " : " makes no progress: nothing for ");
    put_seconds(&l, max_i64(stalled_ms, w.peer[culprit].beat.stalled_ms));
    put(&l, " (limit ");
    put_seconds(&l, limit_ms);
    put(&l, "), the others wait for it");
    if (alive == 1) l.n -= strlen(", the others wait for it");
    put_where(&l, culprit);
    leave(culprit, EXIT_PEER, text, SAY);
}

static void judge(int64_t now) {
    int64_t silent_ns = to_ns(w.job.limits.silent_s + (is_hub() ? 0 : 1));
    for (int r = 0; r < w.job.world; r++) {
        Peer *p = &w.peer[r];
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
        if (slow && LOAD(p->straggler) == 0) STORE(p->straggler, 1);
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
    f.head = frame_head(is_hub() ? FRAME_VERDICT : FRAME_WORDS);
    f.culprit = w.job.rank;
    f.code = w.words_code;
    Line l = {f.text, 0, sizeof f.text};
    if (is_hub()) {
        put_rank(&l, 0);
        put(&l, " left with an error of its own: ");
    }
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
    w.deadline_ns += late;
    for (int r = 0; w.peer && r < w.job.world; r++) if (w.peer[r].state != PEER_ABSENT || w.peer[r].heard_ns) w.peer[r].heard_ns += late;
    for (int i = 0; i < MAX_STRANGERS; i++) w.stranger[i].since_ns += late;
    STORE(w.lateness, w.lateness + 1);
}

// Before watch_start: nothing to listen to, only a deadline.
static void judge_start(int64_t now, Stage stage) {
    if (now < w.deadline_ns) return;
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
    put(&l, rank && strlen(rank) < 12 ? rank : "?");
    put(&l, " on ");
    put(&l, w.host);
    put(&l, " (pid ");
    put_int(&l, getpid());
    put(&l, ") has waited ");
    put_seconds(&l, (int64_t)(1e3 * w.job.limits.start_s));
    put(&l, " for the launcher's start of all ranks; the rank that does not print this line is the one to look at");
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

// Everything here is async-signal-safe: backtrace() has been called once before, so that it need not load its library.
static void on_crash(int number, siginfo_t *info, void *) {
    int saved = errno;
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
    memset(a, 0, sizeof *a);
    if (getrandom(a->nonce, sizeof a->nonce, 0) != (ssize_t)sizeof a->nonce) die(EXIT_INTERNAL, "no random bytes from the kernel: %s", strerror(errno));
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

void watch_prepare(const WatchJob *job, WatchAddress *address) {
    begin(job->limits.start_s);
    CHECK(w.stage == STAGE_ARMED, "watch_prepare in stage %d", w.stage);
    w.job = *job;
    CHECK(job->rank >= 0 && job->rank < job->world, "rank %d of %d", job->rank, job->world);
    w.flight_dir[0] = 0;
    if (job->flight_dir) snprintf(w.flight_dir, sizeof w.flight_dir, "%s", job->flight_dir);
    if (getrandom(&w.id, sizeof w.id, 0) != (ssize_t)sizeof w.id) w.id = (uint64_t)now_ns() ^ (uint64_t)getpid() << 40;

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
    if (job->world > 1) hub_listen(address);
    else if (getrandom(address->nonce, sizeof address->nonce, 0) < 0) memset(address->nonce, 0, sizeof address->nonce);
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
    for (int k = 0;; k = (k + 1) % max_i64(1, a->n)) {
        int fd = try_join(a->addr[k].family, a->addr[k].bytes, a->port, &welcome);
        if (fd >= 0) {
            peer_introduce(&w.peer[0], &welcome);
            w.peer[0].fd = fd;
            w.peer[0].state = PEER_IN;
            w.peer[0].heard_ns = now_ns();
            return;
        }
        int why = errno;
        char shown[INET6_ADDRSTRLEN] = "?";
        inet_ntop(a->addr[k].family == 4 ? AF_INET : AF_INET6, a->addr[k].bytes, shown, sizeof shown);
        if (now_ns() > deadline) die(EXIT_PEER, "rank %d on %s cannot reach rank 0 at %s, port %d: %s; see to the network and its filters between the hosts", w.job.rank, w.host, shown, a->port, strerror(why));
        usleep(100000);
    }
}

void watch_start(const WatchAddress *address) {
    CHECK(w.stage == STAGE_ARMED && w.peer, "watch_start in stage %d", w.stage);
    w.address = *address;
    STORE(w.flight, flight_open(w.flight_dir[0] ? w.flight_dir : NULL, w.job.rank, w.job.world, w.address.nonce, w.host));
    int64_t t = now_ns();
    STORE(w.progress_ns, t);
    STORE(w.deadline_ns, t + to_ns(w.job.limits.start_s + (is_hub() ? 0 : 10)));
    if (!is_hub()) join_hub();
    STORE(w.stage, (int32_t)STAGE_JOIN);
    wake();
    while (!LOAD(w.go)) usleep(1000);
    for (int r = 0; w.flight_dir[0] && r < w.job.world; r++) // everybody's is there, since everybody is
        if (is_hub() || r == 0) STORE(w.peer[r].left, flight_watch(w.flight_dir, r, w.address.nonce, w.host));
    STORE(w.progress_ns, now_ns());
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
