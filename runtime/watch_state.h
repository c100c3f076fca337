// watch_state.h - what the files of the watch share: the frames on the wire, the state of this process, text without stdio.
// Part of watch.cpp; nobody else includes it.
#pragma once
#include "flight.h"
#include "watch.h"

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
    WORDS_MS = 300,       // from last words to the end of that process
    RECENT = 256,         // collectives of a channel whose description is at hand
    BUSY_STEPS = 20,      // medians for stragglers
    SLOW_BEATS = 3,       // in a row make a straggler
    LONG_STEPS = 50,      // steps that the limit looks back on
    OUT_BYTES = 2048,
    LINE_BYTES = 448,
};
static const double STRAGGLER_RATIO = 1.15, STRAGGLER_BACK = 1.10, STRAGGLER_FLOOR_S = 0.005;

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
    bool has_beat, ended; // ended: its connection has
    BeatFrame beat;       // the newest
    const FlightHeader *left; // its recorder, if it is on this host
    size_t in_n, out_n;
    Frame in;
    uint8_t out[OUT_BYTES];
    int64_t words_ns;     // when its last words came; 0: none
    int32_t words_code;
    char words[LINE_BYTES];
    int32_t slow_beats;   // in a row
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
