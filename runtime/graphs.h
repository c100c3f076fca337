// graphs.h - work that comes again is handed to the device as a whole.
//
// The kernels of a unit cost the host a few microseconds each to launch, which is more than a small one computes. graph_run
// does a job that it has seen before as one launch (device.h, Graph). It must not be told what stays the same: a job is a
// function and the bytes of its arguments, and equal bytes are equal work. So a buffer that moved, a gradient that is now added
// to, another loss scale are other jobs, and nothing can be replayed that has changed.
//
//     first time:   the job launches its kernels one by one, chooses algorithms, grows scratch memory
//     second time:  recorded, and launched as a graph
//     from then on: launched as a graph
//
// Invariants:
//  1. A job enqueues on the stream of its cache alone, never waits, and depends on nothing but the bytes of its arguments, what these
//     point to in the device's memory, and what does not change while the cache lives.
//  2. A graph holds addresses, scratch memory's among them. Once any of the device's memory is given back, graphs from before are
//     recorded anew (device_frees).
//  3. At most `room` graphs are kept; the one that was used longest ago goes first.
#pragma once
#include "device.h"

typedef struct {
    uint64_t hash;        // of job and arguments
    DeviceJob job;        // null: free
    char *args;           // (bytes) of their own
    int64_t bytes;
    int64_t used;         // GraphCache.runs at the last use
    int64_t frees;        // device_frees when it was first done, or recorded
    Graph graph;          // null until the second time
} GraphEntry;

typedef struct {
    Stream stream;
    int room, n;
    GraphEntry *entry;    // (room), n in use
    int64_t runs, launched, recorded; // jobs so far; of them as graphs; graphs made
} GraphCache;

static GraphCache *graphs_create(Stream stream, int room) {
    GraphCache *c = (GraphCache *)host_alloc(sizeof *c);
    c->stream = stream;
    c->room = room;
    c->entry = (GraphEntry *)host_alloc(sizeof(GraphEntry) * (size_t)room);
    return c;
}

static void graphs_free(GraphCache *c) {
    if (!c) return;
    for (int i = 0; i < c->n; i++) {
        graph_free(c->entry[i].graph);
        free(c->entry[i].args);
    }
    free(c->entry);
    free(c);
}

// FNV-1a (Fowler, Noll, Vo) over 64-bit words; the bytes are compared as well.
static uint64_t graph_hash(DeviceJob job, const void *args, int64_t bytes) {
    uint64_t hash = 0xcbf29ce484222325u ^ (uint64_t)(uintptr_t)job, word;
    for (int64_t i = 0; i + 8 <= bytes; i += 8) {
        memcpy(&word, (const char *)args + i, 8);
        hash = (hash ^ word) * 0x100000001b3u;
    }
    return hash ^ hash >> 32;
}

// The entry of a job that is seen for the first time.
static GraphEntry *graph_add(GraphCache *c, uint64_t hash, DeviceJob job, const void *args, int64_t bytes) {
    GraphEntry *e = &c->entry[0];
    if (c->n < c->room) e = &c->entry[c->n++];
    else
        for (int i = 1; i < c->n; i++) if (c->entry[i].used < e->used) e = &c->entry[i];
    graph_free(e->graph);
    free(e->args);
    GraphEntry fresh = {hash, job, (char *)host_alloc((size_t)bytes), bytes, 0, -1, NULL};
    memcpy(fresh.args, args, (size_t)bytes);
    *e = fresh;
    return e;
}

// Does the job on c's stream; without a cache, launch by launch. bytes: a multiple of 8.
static void graph_run(GraphCache *c, DeviceJob job, const void *args, int64_t bytes) {
    if (!c) { job(args); return; }
    CHECK(bytes % 8 == 0, "%" PRId64 " bytes of arguments", bytes);
    uint64_t hash = graph_hash(job, args, bytes);
    GraphEntry *e = NULL;
    for (int i = 0; i < c->n && !e; i++)
        if (c->entry[i].hash == hash && c->entry[i].job == job && c->entry[i].bytes == bytes && memcmp(c->entry[i].args, args, (size_t)bytes) == 0) e = &c->entry[i];
    if (!e) e = graph_add(c, hash, job, args, bytes);
    e->used = ++c->runs;
    if (e->frees != device_frees()) { // new, or memory has gone since
        graph_free(e->graph);
        e->graph = NULL;
        job(args);
        e->frees = device_frees();
        return;
    }
    if (!e->graph) {
        e->graph = graph_record(job, args, bytes, c->stream);
        c->recorded++;
    }
    graph_launch(e->graph, c->stream);
    c->launched++;
}
