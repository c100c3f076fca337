// device_races.h - finds missing waits between streams in DEBUG builds of the CPU backend, whatever the timing was.
//
// On a GPU, two pieces of work that touch the same memory on two streams, one of them writing, must be ordered by an event
// or by the host; else the result depends on luck, and mostly the luck is good. Here every stream carries a vector clock
// (Fidge 1988, Mattern 1989): clock[i] is how much of stream i's work is known to come before. Work ticks its own stream's
// clock; an event carries its stream's clock to those who wait for it; the host has a clock too, which joins every stream
// that it gives work to. Each access to device memory is compared with the earlier accesses to the same bytes: if its
// stream's clock does not reach one of them, the program ends and names both.
//
// The check sees what kernels, copies and collectives say that they touch, in one run; it needs no bad luck, and has no false
// alarms except for memory that a kernel names and leaves alone. Included by device_cpu.cpp only.
#pragma once
#include "device.h"

enum { RACE_STREAMS_MAX = 32 };

typedef struct {
    uint64_t at[RACE_STREAMS_MAX]; // by stream: how many pieces of its work come before
} RaceClock;

typedef struct {
    const char *at;
    int64_t bytes;
    const char *name; // of the work
    uint64_t tick;    // of its stream
    int stream;
    bool written;
} RaceAccess;

// Accesses that later ones must still be compared with.
static RaceAccess *race_access;
static int64_t race_accesses, race_room;
static RaceClock race_host;

static void race_join(RaceClock *to, const RaceClock *from) {
    for (int i = 0; i < RACE_STREAMS_MAX; i++)
        if (from->at[i] > to->at[i]) to->at[i] = from->at[i];
}

static bool race_covers(const RaceAccess *a, const RaceAccess *b) { return a->at <= b->at && b->at + b->bytes <= a->at + a->bytes; }

// Work `name` on a stream, whose clock this is, touches these bytes.
static void race_touch(RaceClock *clock, int stream, const char *name, const void *at, int64_t bytes, bool written) {
    if (bytes <= 0) return;
    race_join(clock, &race_host);
    const RaceAccess now = {(const char *)at, bytes, name, ++clock->at[stream], stream, written};
    int64_t kept = 0;
    for (int64_t i = 0; i < race_accesses; i++) {
        const RaceAccess old = race_access[i];
        const bool overlap = old.at < now.at + now.bytes && now.at < old.at + old.bytes;
        CHECK(!overlap || (!old.written && !now.written) || clock->at[old.stream] >= old.tick,
              "missing wait: %s %s memory that %s %s on another stream, and nothing orders the two (%" PRId64 " and %" PRId64 " bytes at %p and %p)",
              now.name, now.written ? "writes" : "reads", old.name, old.written ? "writes" : "reads", now.bytes, old.bytes,
              (const void *)now.at, (const void *)old.at);
        // Whoever is ordered behind this access is ordered behind an older one below it, which need not be kept.
        const bool superseded = race_covers(&now, &old) && (now.written || (old.stream == stream && !old.written));
        if (!superseded) race_access[kept++] = old;
    }
    race_accesses = kept;
    if (race_accesses == race_room) {
        race_room = 2 * race_room + 64;
        race_access = (RaceAccess *)realloc(race_access, (size_t)race_room * sizeof *race_access);
        CHECK(race_access, "no memory for %" PRId64 " accesses", race_room);
    }
    race_access[race_accesses++] = now;
}

// These bytes are given back: the next owner starts afresh.
static void race_forget(const void *at, int64_t bytes) {
    const char *from = (const char *)at;
    int64_t kept = 0;
    for (int64_t i = 0; i < race_accesses; i++)
        if (race_access[i].at + race_access[i].bytes <= from || race_access[i].at >= from + bytes) race_access[kept++] = race_access[i];
    race_accesses = kept;
}
