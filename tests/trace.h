// trace.h - what the tests see of communication: the collectives that the program starts on streams, in order, and on demand
// what they were given. Included before the program, whose calls then go through here.
#pragma once
#include "../runtime/comm.h"

enum { TRACE_MAX = 4096 };

typedef enum { TRACE_ALL_GATHER, TRACE_REDUCE_SCATTER, TRACE_ALL_TO_ALL, TRACE_ALL_REDUCE, TRACE_SEND } TraceKind;

typedef struct {
    TraceKind kind;
    Group group;
    DType type;
    int64_t n;       // elements of the whole: what every rank has afterwards, or had before
    Stream stream;
    char *given;     // the whole before a sum, on the host; null unless trace.keeps
} TraceRow;

static struct {
    bool on, keeps;
    int n;
    TraceRow row[TRACE_MAX];
} trace;

// Forgets everything and begins anew.
static void trace_begin(bool keeps) {
    for (int i = 0; i < trace.n; i++) free(trace.row[i].given);
    trace.n = 0;
    trace.on = true;
    trace.keeps = keeps;
}
static void trace_end(void) { trace.on = false; }

static void trace_add(TraceKind kind, Group g, int64_t n, DType t, const void *given, Stream s) {
    if (!trace.on) return;
    CHECK(trace.n < TRACE_MAX, "%d collectives", trace.n);
    TraceRow *r = &trace.row[trace.n++];
    memset(r, 0, sizeof *r);
    r->kind = kind;
    r->group = g;
    r->type = t;
    r->n = n;
    r->stream = s;
    if (!trace.keeps || !given) return;
    r->given = (char *)host_alloc((size_t)(n * dtype_bytes(t)));
    device_copy(r->given, given, n * dtype_bytes(t), COPY_TO_HOST, s);
    stream_sync(s);
}

static int64_t trace_count(TraceKind kind) {
    int64_t count = 0;
    for (int i = 0; i < trace.n; i++) count += trace.row[i].kind == kind;
    return count;
}
static int64_t trace_bytes(TraceKind kind) {
    int64_t bytes = 0;
    for (int i = 0; i < trace.n; i++) bytes += trace.row[i].kind == kind ? trace.row[i].n * dtype_bytes(trace.row[i].type) : 0;
    return bytes;
}

static void traced_all_gather(Group g, void *full, const void *shard, int64_t n, DType t, Stream s) {
    trace_add(TRACE_ALL_GATHER, g, n * g.size, t, NULL, s);
    comm_all_gather(g, full, shard, n, t, s);
}
static void traced_reduce_scatter(Group g, void *shard, void *full, int64_t n, DType t, Stream s) {
    trace_add(TRACE_REDUCE_SCATTER, g, n * g.size, t, full, s);
    comm_reduce_scatter(g, shard, full, n, t, s);
}
static void traced_all_to_all(Group g, void *parts, const void *full, int64_t n, DType t, Stream s) {
    trace_add(TRACE_ALL_TO_ALL, g, n * g.size, t, full, s);
    comm_all_to_all(g, parts, full, n, t, s);
}
static void traced_all_reduce(Group g, void *x, int64_t n, DType t, Stream s) {
    trace_add(TRACE_ALL_REDUCE, g, n, t, x, s);
    comm_all_reduce(g, x, n, t, s);
}
static void traced_send(Group g, const void *x, int64_t bytes, int peer, Stream s) {
    trace_add(TRACE_SEND, g, bytes / 2, DTYPE_BF16, NULL, s); // of whatever type: as many elements of two bytes
    comm_send(g, x, bytes, peer, s);
}
#define comm_send traced_send
#define comm_all_gather traced_all_gather
#define comm_reduce_scatter traced_reduce_scatter
#define comm_all_to_all traced_all_to_all
#define comm_all_reduce traced_all_reduce
