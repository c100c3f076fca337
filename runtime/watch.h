// watch.h - no hang, ever: a beat between the ranks, a flight recorder, a verdict that names the culprit, and the way out.
//
// Each rank has one thread that beats: every half second it sends its state (step, phase, counters of collectives) over a
// TCP connection to rank 0, the hub, and the hub answers with its own. It knows nothing of MPI, NCCL or CUDA, takes no
// lock and allocates nothing, so nothing that hangs can hang it. Four things end a job:
//   gone    a connection closes without a goodbye                                         at once
//   silent  no beat for limits.silent_s (about the hub: one second more)                  stopped, or cut off
//   alone   the launcher, this rank's parent, is gone                                     half a second
//   stuck   no rank has made progress for max(progress_floor_s, 10 x the median step, 3 x the longest of the last 50),
//           or the seconds announced for the phase, or a rank none for ceiling_s          culprit: who is behind
// The hub judges the others, and the others judge the hub. The first verdict is sent to all, one line goes to stderr, and
// everybody leaves by _exit: with EXIT_PEER (75), or with the code of the rank whose error it was. Main threads may
// be anywhere meanwhile, inside a collective or a kernel wait. docs/watchdog.md tells the user's side.
//
// Order of calls on every rank:
//     watch_arm                        before comm_start: a launcher's rendezvous that never ends is a verdict, too
//     watch_prepare                    rank 0 fills the address, which the caller then broadcasts
//     watch_start                      returns when all ranks are connected
//     watch_record                     when flight_dir is known to be this job's alone
//     watch_progress, _announce, ...   from the main thread while it works
//     watch_goodbye                    last of all, after comm_finish
// One process has one watch, as it has one set of signal handlers and one exit: the state is private to watch.cpp. Before
// watch_arm or watch_prepare every other function does nothing, so comm.h's implementations may always call them.
#pragma once
#include "utils.h"

enum { WATCH_CHANNELS = 16 };

typedef enum {
    WATCH_START, WATCH_LOAD, WATCH_DATA, WATCH_FORWARD, WATCH_BACKWARD, WATCH_UPDATE, WATCH_EVALUATE, WATCH_SAMPLE, WATCH_SAVE, WATCH_END, WATCH_PHASES
} WatchPhase;

typedef enum {
    WATCH_ALL_GATHER, WATCH_REDUCE_SCATTER, WATCH_ALL_REDUCE, WATCH_BROADCAST, WATCH_SEND, WATCH_RECEIVE, WATCH_ALL_TO_ALL, WATCH_BARRIER, WATCH_OPS
} WatchOp;

typedef struct { // seconds
    double beat_s;           // between two beats
    double silent_s;         // without a beat of a rank
    double progress_floor_s; // the no-progress limit is never lower ...
    double ceiling_s;        // ... and never higher: zero_optimization.timeout
    double first_step_s;     // the limit until a step has been measured
    double start_s;          // from the first rank to the last, and for comm_start
    double end_s;            // from the goodbye to the end of the process
} WatchLimits;

typedef struct {
    int rank, world;
    int role;               // ranks of one role do the same work and are compared for stragglers (the pipeline stage)
    bool one_host;          // all ranks on this host: the hub listens on loopback only
    const char *flight_dir; // <output_dir>/flight, made if missing; null: the recorder lives in memory only
    int launcher;           // this process's parent, with whose end the job ends; 0: whoever it is does not matter
    WatchLimits limits;
} WatchJob;

// How to reach the hub. Plain bytes, to be broadcast.
typedef struct {
    uint8_t nonce[16]; // proves that a connection belongs to this job; a secret
    uint64_t job;      // names this start of the job; no secret, stands in the flight recorders
    uint16_t port, n;
    struct { uint8_t family, bytes[16]; } addr[8]; // 4 or 6
} WatchAddress;

WatchLimits watch_default_limits(double ceiling_s);

// From now on: crash handlers, and a verdict when watch_start is not reached within start_s.
void watch_arm(double start_s);
// No ranks are to come together after all, as for a plan, which takes as long as it takes: watch_start is not waited for.
void watch_disarm(void);
// Rank 0 opens a port and fills *address; on the others nothing but memory is got ready.
void watch_prepare(const WatchJob *job, WatchAddress *address);
// Connects, returns when all are in; leaves naming the missing ranks otherwise. With one rank there is no network: the
// recorder, the crash handlers and the ceiling remain.
void watch_start(const WatchAddress *address);
// Until now the flight recorder was in memory; it moves into its file, and what an earlier job left there is kept as rank-R.old.
void watch_record(void);
// Before it, when all is saved and freed and only comm_finish is left: watch_announce(WATCH_END, ...).
// Blocks until the peers know that this end is no accident: the hub until all have said goodbye.
void watch_goodbye(void);

// ---------------------------------------------------------------------------------------------------------------
// Progress. Main thread only; a few plain stores and one 64-byte record each.

// What is being done now. Ends an announced phase. A change of `step` closes the measurement of the step before.
void watch_progress(int64_t step, int micro_batch, WatchPhase phase);
// A phase of another scale begins (loading, evaluation, saving): `seconds` without progress are in order, and its time
// counts to no step. It ends with the next call of this or of watch_progress.
void watch_announce(WatchPhase phase, double seconds);
// Still alive, inside a long phase: after each tensor loaded, each unit, each batch evaluated. Any thread.
void watch_tick(void);
// The unit of the model that the next collectives are for; -1: none.
void watch_unit(int unit);
// Part of this step that was spent waiting for other ranks; busy time is the rest.
void watch_waited(double seconds);

// ---------------------------------------------------------------------------------------------------------------
// Collectives. Any thread; the collectives of one channel in order.

// A GPU's stream writes these into pinned memory, before and after each collective; the beat thread only reads them.
typedef struct {
    volatile uint64_t started, done;
} WatchCounter;

// A channel for the collectives of one group. `group` is a number that its members, and no other group, give; counter is
// null when started and done are known to the host. Returns the channel, or -1 when none is free (then nobody watches it).
int watch_channel_open(uint32_t group, const WatchCounter *counter);
void watch_channel_close(int channel);
uint32_t watch_channel_group(int channel); // 0: closed
// The collective was handed over. Returns its number on the channel, from 1: the value for the stream to write.
uint64_t watch_collective_enter(int channel, WatchOp op, int64_t bytes);
// It is finished (without a counter).
void watch_collective_done(int channel, uint64_t number);

// ---------------------------------------------------------------------------------------------------------------
// Ends

// This process is about to leave with an error of its own, whose line is printed already: the others leave with the same
// code instead of calling it lost. Returns within 0.3 s. Safe in a signal handler.
void watch_last_words(int code, const char *line);

typedef struct {
    int rank, role;
    const char *host;
    double ratio;  // busy time over the median of its role, both medians of 20 steps
    double lost_s; // per step: busy time minus that median
} WatchStraggler;

// Rank 0: a rank that has become slow since the last call, if there is one.
bool watch_straggler(WatchStraggler *out);
// How often this rank's beat was so late (a suspended or overloaded machine) that all deadlines were moved.
int64_t watch_lateness(void);

// ---------------------------------------------------------------------------------------------------------------
// The flight recorder, read back

// Prints the rings in `dir`, merged: state of each rank, who is behind in which channel, the last records. Works while
// the job runs and after any end. Returns an exit code.
int flight_print(const char *dir);
