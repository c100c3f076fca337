// flight.h - the flight recorder: what a rank did last, in a file that outlives it.
//
// <output_dir>/flight/rank-R holds a header of 4,096 bytes and a ring of 4,096 records of 64 bytes. The process maps it
// shared and writes by plain stores: the pages belong to the kernel, so they survive kill -9. A start renames what it
// finds to rank-R.old, so that the evidence of a crash lives through the restart that follows it.
//
// The file's blocks are allocated beforehand: a store into a hole of a full disk would be a SIGBUS. Only threads of the
// trainer proper write while it runs; the beat thread, which must not wait for a disk, writes here only on its way out.
#pragma once
#include "watch.h"

enum { FLIGHT_RECORDS = 4096, FLIGHT_VERSION = 1, FLIGHT_HEADER_BYTES = 4096, FLIGHT_TEXT = 512, FLIGHT_HOST = 64 };
#define FLIGHT_MAGIC "gptflght"

typedef enum { FLIGHT_PROGRESS, FLIGHT_ANNOUNCE, FLIGHT_ENTER, FLIGHT_DONE, FLIGHT_GOODBYE, FLIGHT_EVENTS } FlightEvent;
typedef enum { FLIGHT_RUNNING, FLIGHT_ENDED, FLIGHT_VERDICT, FLIGHT_CRASHED, FLIGHT_ENDS } FlightEnd;

typedef struct {
    uint64_t sequence;  // 1 + the record's number since the start; 0: empty. Written last
    int64_t time_ns;    // CLOCK_MONOTONIC
    int64_t step, bytes;
    uint64_t number;    // of the collective on its channel, from 1
    int32_t micro_batch, unit;
    uint32_t group;
    uint8_t channel, op, phase, event;
    float seconds;      // announced
    uint32_t unused;
} FlightRecord;

typedef struct {
    uint32_t group;
    uint8_t open, on_gpu;            // on_gpu: started and done are as of the last progress
    uint16_t op;                     // op, unit, bytes: of the collective queued last
    uint64_t queued, started, done;
    int64_t bytes;
    int32_t unit, unused;
} FlightChannel;

typedef struct {
    char magic[8];
    uint32_t version, records;
    int32_t rank, world, pid, unused;
    uint64_t job;                // WatchAddress.job
    int64_t start_wall_ns;       // CLOCK_REALTIME and CLOCK_MONOTONIC of the same instant
    int64_t start_ns;
    char host[FLIGHT_HOST];
    // the state now
    int64_t step, progress_ns;
    int32_t micro_batch, unit;
    uint32_t phase, end;         // WatchPhase, FlightEnd
    int32_t code, culprit;       // of a verdict
    uint64_t head;               // records begun
    FlightChannel channel[WATCH_CHANNELS];
    char text[FLIGHT_TEXT];      // the verdict's words
} FlightHeader;

typedef struct {
    union {
        FlightHeader h;
        char room[FLIGHT_HEADER_BYTES];
    };
    FlightRecord record[FLIGHT_RECORDS];
} Flight;

static_assert(sizeof(FlightRecord) == 64 && sizeof(FlightHeader) <= FLIGHT_HEADER_BYTES, "the file format");
static_assert(sizeof(Flight) == FLIGHT_HEADER_BYTES + FLIGHT_RECORDS * 64, "the file format");

static inline const char *watch_phase_name(uint32_t phase) {
    static const char *const name[WATCH_PHASES] = {"start", "load", "data", "forward", "backward", "update", "evaluation", "sampling", "save", "end"};
    return phase < WATCH_PHASES ? name[phase] : "?";
}
static inline const char *watch_op_name(uint32_t op) {
    static const char *const name[WATCH_OPS] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "send", "receive", "all_to_all", "barrier"};
    return op < WATCH_OPS ? name[op] : "?";
}

// Maps the ring of a rank, fresh. Without a folder, or when it cannot be made (then with a note), in memory.
Flight *flight_open(const char *dir, int rank, int world, uint64_t job, const char *host);
// Maps another rank's header, to be read after that rank's death. Null unless it belongs to the same job on this host:
// another host's file would show what had been written back, not what was stored.
const FlightHeader *flight_watch(const char *dir, int rank, uint64_t job, const char *host);
