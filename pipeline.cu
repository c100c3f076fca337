// pipeline.cu - what happens in one update, as a program: a list of instructions that train_step executes in order.
//
// The model is cut into chunks, each a row of neighbouring units, and the chunks are dealt to p stages. A micro-batch goes
// forward through all chunks and backward through all again, so stages wait for each other when it begins and when it ends: the
// bubble. Schedules differ in what a stage does first when it could do several things, and so in bubble and memory.
//
//     1F1B, two stages, three micro-batches; F forward, B backward of activations, w gradients of weights (--plan draws any schedule so)
//     stage 0        FF..BwFBw.Bw
//       micro-batch  01  00211 22
//     stage 1        .FBwFBwFBw..
//       micro-batch   000111222
//
//     schedule      chunks   bubble (F = B = w = 1)   micro-batches kept      what a stage does
//     GPipe            1     3 (p-1)                  n, all                  everything forward, then everything backward
//     1F1B             1     3 (p-1)                  p - stage               one forward, one backward
//     Interleaved      v     3 (p-1) / v              up to p + (p-1) / v     the same with smaller pieces: v chunks a stage
//     ZB-H1            1     p-1                      p                       w waits until there is nothing better to do
//     ZB-V             2     (p-1) / 2                p                       the second half of the model lies on stages p-1 ... 0
//
// (Huang et al. 2019; Narayanan et al. 2019, 2021; Qi et al. 2023, 2024.) A generator gives the order of computation only;
// pipeline_compute puts loads, sends and receives around it. With one stage the program is LOAD 0, FWD 0, BWD 0, LOAD 1, ...: the
// shortest one, not another code path.
//
// pipeline_simulate runs the programs of all stages together, under the strictest rules that a backend has, and says what is wrong:
//  1. A host enqueues its program in order, and a computation waits for what it needs.
//  2. A send ends when its receive takes it. NCCL's do; MPI's often end before, which hides deadlocks.
//  3. Transfers of one kind (forward or backward, out or in) with one neighbour are a channel, which does one after the other. One channel
//     for all transfers of a stage stands still with every schedule but GPipe, one for each direction with Interleaved, one for each kind
//     with ZB-V of four stages or more.
//  4. A micro-batch of a chunk takes slot mb % n_slots, which must be free: its last user is through, and what that sent has arrived.
// And each micro-batch goes through each chunk exactly once. The same run gives the ideal bubble for any costs of the chunks.
//
// Micro-batches pass each chunk in ascending order, forward, backward and w: sums of gradients do not depend on the schedule.
// Read next: optimizer.cu.
#pragma once
#include "dsconfig.h"
#include "runtime/groups.h"

typedef enum { OP_LOAD, OP_RECV_F, OP_FWD, OP_SEND_F, OP_RECV_B, OP_BWD, OP_SEND_B, OP_WGRAD, OP_COUNT } Op;

static const char *const op_names[OP_COUNT] = {"LOAD", "RECV_F", "FWD", "SEND_F", "RECV_B", "BWD", "SEND_B", "WGRAD"};

typedef struct {
    Op op;
    int mb;    // micro-batch of this update, from 0
    int chunk; // of this stage's chunks, from 0
    int peer;  // the stage that is sent to or received from; else this one
} Instr;

// The program of one stage.
typedef struct {
    PipelineSchedule schedule;
    int n_stages, stage;
    int n_chunks;        // on each stage
    int n_micro_batches;
    bool split_w;        // the gradients of weights are instructions of their own
    Instr *prog;
    int n;
    int *n_slots;        // by chunk: micro-batches in flight at once
    int *n_pending;      // by chunk: of them, between the two phases of backward at once; 0 if it is not split
    int *first;          // [n_stages * n_chunks + 1] first unit of each chunk of the model, and the number of units
} Pipeline;

// ---------------------------------------------------------------------------------------------------------------
// Where chunks lie. `whole` counts them over the model, in the order of the forward pass.

static bool pipeline_turns(const Pipeline *p) { return p->schedule == PIPELINE_ZB_V && p->n_stages > 1; } // the second half comes back

static int pipeline_last(const Pipeline *p) { return p->n_stages * p->n_chunks - 1; }
static int pipeline_whole(const Pipeline *p, int stage, int chunk) { return chunk * p->n_stages + (chunk == 1 && pipeline_turns(p) ? p->n_stages - 1 - stage : stage); }
static int pipeline_chunk_of(const Pipeline *p, int whole) { return whole / p->n_stages; }
static int pipeline_stage_of(const Pipeline *p, int whole) {
    int place = whole % p->n_stages;
    return pipeline_turns(p) && whole >= p->n_stages ? p->n_stages - 1 - place : place;
}

// Chunks that a schedule has on each stage; n_virtual: as configured, for Interleaved.
static int pipeline_n_chunks(PipelineSchedule schedule, int n_stages, int n_virtual) {
    return n_stages == 1 ? 1 : schedule == PIPELINE_INTERLEAVED ? n_virtual : schedule == PIPELINE_ZB_V ? 2 : 1;
}

// ---------------------------------------------------------------------------------------------------------------
// Cutting the model: chunks of whole units, in order, each with a block or more. The embedding stays with the first block, the head with
// the last. weight: by unit, what shall be even: parameters, or 1 for a block and 0 for the two others.

static int64_t cut_weight(const int64_t *weight, int n_units, int block) {
    return weight[block] + (block == 1 ? weight[0] : 0) + (block == n_units - 2 ? weight[n_units - 1] : 0);
}

// Can the blocks from `block` on make so many chunks, none heavier than `most`?
static bool cut_possible(const int64_t *weight, int n_units, int block, int n_chunks, int64_t most) {
    if (n_units - 1 - block < n_chunks) return false;
    int64_t sum = 0;
    int used = block < n_units - 1;
    for (; block < n_units - 1; block++) {
        int64_t w = cut_weight(weight, n_units, block);
        if (w > most) return false;
        if (sum + w > most) sum = 0, used++;
        sum += w;
    }
    return used <= n_chunks; // with fewer, some can be cut again
}

// first[0..n_chunks]: the first unit of each chunk, and n_units. The heaviest chunk is as light as it can be, and the others are as even as
// that allows.
static void pipeline_cut(const int64_t *weight, int n_units, int n_chunks, int *first) {
    CHECK(n_chunks >= 1 && n_units - 2 >= n_chunks, "%d units in %d chunks", n_units, n_chunks);
    int64_t low = 0, high = 0; // the lightest "heaviest chunk" is above low, at most high
    for (int u = 0; u < n_units; u++) high += weight[u];
    low = -1;
    while (high - low > 1) {
        int64_t most = low + (high - low) / 2;
        if (cut_possible(weight, n_units, 1, n_chunks, most)) high = most;
        else low = most;
    }
    int64_t left = 0;
    for (int u = 0; u < n_units; u++) left += weight[u];
    int block = 1;
    first[0] = 0;
    first[n_chunks] = n_units;
    for (int c = 0; c < n_chunks - 1; c++) {
        int64_t sum = 0, best = -1;
        int end = block, chunks = n_chunks - c;
        while (end < n_units - 1 && sum + cut_weight(weight, n_units, end) <= high) {
            sum += cut_weight(weight, n_units, end++);
            if (!cut_possible(weight, n_units, end, chunks - 1, high)) continue;
            bool closer = best < 0 || llabs(sum * chunks - left) < llabs(best * chunks - left); // to an even share of what is left
            if (closer) best = sum, first[c + 1] = end;
        }
        CHECK(best >= 0, "no cut behind block %d", block);
        left -= best;
        block = first[c + 1];
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Writing a program: a computation with what must happen around it

static void pipeline_add(Pipeline *p, Op op, int chunk, int mb, int peer) { p->prog[p->n++] = {op, mb, chunk, peer}; }

// A neighbour on the same stage is handed the slot's memory itself.
static void pipeline_move(Pipeline *p, Op op, int chunk, int mb, int whole) {
    int peer = pipeline_stage_of(p, whole);
    if (peer != p->stage) pipeline_add(p, op, chunk, mb, peer);
}

static void pipeline_compute(Pipeline *p, Op op, int chunk, int mb) {
    int whole = pipeline_whole(p, p->stage, chunk), last = pipeline_last(p);
    if (mb >= p->n_micro_batches) return; // a generator may make a few too many
    if (op == OP_FWD && (whole == 0 || whole == last)) pipeline_add(p, OP_LOAD, chunk, mb, p->stage); // tokens, and targets
    if (op == OP_FWD && whole > 0) pipeline_move(p, OP_RECV_F, chunk, mb, whole - 1);
    if (op == OP_BWD && whole < last) pipeline_move(p, OP_RECV_B, chunk, mb, whole + 1);
    pipeline_add(p, op, chunk, mb, p->stage);
    if (op == OP_FWD && whole < last) pipeline_move(p, OP_SEND_F, chunk, mb, whole + 1);
    if (op == OP_BWD && whole > 0) pipeline_move(p, OP_SEND_B, chunk, mb, whole - 1);
}

// ---------------------------------------------------------------------------------------------------------------
// Generators: the order of computation on one stage

static void order_gpipe(Pipeline *p) {
    for (int mb = 0; mb < p->n_micro_batches; mb++) pipeline_compute(p, OP_FWD, 0, mb);
    for (int mb = 0; mb < p->n_micro_batches; mb++) pipeline_compute(p, OP_BWD, 0, mb);
}

// The earlier the stage, the more micro-batches go forward before the first comes back. ZB-H1 is the same with the gradients of
// weights `stage` micro-batches late, so that all stages keep p of them, and in the end there is work for the time of waiting.
static void order_1f1b(Pipeline *p) {
    int n = p->n_micro_batches, ahead = p->n_stages - 1 - p->stage, late = p->stage, done = 0;
    for (int mb = 0; mb < n + ahead; mb++) {
        pipeline_compute(p, OP_FWD, 0, mb);
        if (mb < ahead) continue;
        pipeline_compute(p, OP_BWD, 0, mb - ahead);
        if (p->split_w && mb - ahead >= late) pipeline_compute(p, OP_WGRAD, 0, done++);
    }
    while (p->split_w && done < n) pipeline_compute(p, OP_WGRAD, 0, done++);
}

// Micro-batches in groups of p: a group goes through the stage's first chunk, then the second, ... then the next group. Backward the same
// from the last chunk on.
static void order_interleaved(Pipeline *p) {
    int stages = p->n_stages, v = p->n_chunks, total = p->n_micro_batches * v;
    CHECK(p->n_micro_batches % stages == 0, "%d micro-batches on %d stages", p->n_micro_batches, stages);
    int ahead = (int)min_i64(total, 2 * (stages - 1 - p->stage) + (v - 1) * stages);
    for (int i = 0; i < total + ahead; i++) {
        int b = i - ahead;
        if (i < total) pipeline_compute(p, OP_FWD, i / stages % v, i / (stages * v) * stages + i % stages);
        if (b >= 0) pipeline_compute(p, OP_BWD, v - 1 - b / stages % v, b / (stages * v) * stages + b % stages);
    }
}

// Stage s has chunk s and, on the way back, chunk 2p-1-s. It goes forward as often as it takes until the first micro-batch comes back
// to it, then does the six computations of a micro-batch in turn, its weights' gradients at once; in the end they fill the gaps. The
// pattern needs 2p-1 micro-batches; with fewer, those that are not there are left out.
static void order_zb_v(Pipeline *p) {
    int stages = p->n_stages, s = p->stage, n = (int)max_i64(p->n_micro_batches, 2 * stages - 1);
    int forward[2] = {0, 0}, back[2] = {0, 0}, weights[2] = {0, 0};
    for (int i = 0; i < 2 * (stages - s) - 1; i++) pipeline_compute(p, OP_FWD, 0, forward[0]++);
    for (int i = 0; i < s; i++) {
        pipeline_compute(p, OP_FWD, 1, forward[1]++);
        pipeline_compute(p, OP_FWD, 0, forward[0]++);
    }
    for (int turn = 0; forward[1] < n; turn++)
        for (int chunk = turn < stages - s; chunk < 2; chunk++) {
            bool both = turn >= stages - s; // before, the first chunk has nothing to take back
            if (both && chunk == 0 && forward[0] < n) pipeline_compute(p, OP_FWD, 0, forward[0]++);
            if (chunk == 1) pipeline_compute(p, OP_FWD, 1, forward[1]++);
            pipeline_compute(p, OP_BWD, chunk, back[chunk]++);
            pipeline_compute(p, OP_WGRAD, chunk, weights[chunk]++);
        }
    for (int i = 0; i < s; i++)
        for (int chunk = 0; chunk < 2; chunk++) pipeline_compute(p, OP_BWD, chunk, back[chunk]++);
    for (int i = 0; i < stages - s; i++) {
        pipeline_compute(p, OP_BWD, 0, back[0]++);
        pipeline_compute(p, OP_WGRAD, 0, weights[0]++);
    }
    for (int chunk = 1; chunk >= 0; chunk--)
        while (weights[chunk] < n) pipeline_compute(p, OP_WGRAD, chunk, weights[chunk]++);
}

static const char *const pipeline_names[] = {"1F1B", "GPipe", "Interleaved", "ZB-H1", "ZB-V"}; // as the configuration calls them

static const struct {
    void (*order)(Pipeline *p);
    bool split_w;
} schedules[] = { // by PipelineSchedule
    {order_1f1b, false}, {order_gpipe, false}, {order_interleaved, false}, {order_1f1b, true}, {order_zb_v, true},
};

// ---------------------------------------------------------------------------------------------------------------
// Slots

static Op pipeline_last_op(const Pipeline *p) { return p->split_w ? OP_WGRAD : OP_BWD; }

// A chunk whose output goes to the next chunk on the same stage keeps its slot until that one is through, which uses its memory.
static bool pipeline_hands_over(const Pipeline *p, int chunk) {
    int whole = pipeline_whole(p, p->stage, chunk);
    return p->n_stages > 1 && whole < pipeline_last(p) && pipeline_stage_of(p, whole + 1) == p->stage;
}

// How many micro-batches are in a chunk at once: they are neighbours, so slot mb % n_slots is free when it is needed.
static void pipeline_count_slots(Pipeline *p) {
    int *in_flight = (int *)host_alloc(sizeof(int) * (size_t)p->n_chunks), *waiting = (int *)host_alloc(sizeof(int) * (size_t)p->n_chunks), *ends = (int *)host_alloc(sizeof(int) * (size_t)p->n_chunks * (size_t)p->n_micro_batches);
    for (int i = 0; i < p->n; i++) {
        Instr in = p->prog[i];
        if (in.op == OP_FWD) p->n_slots[in.chunk] = (int)max_i64(p->n_slots[in.chunk], ++in_flight[in.chunk]);
        if (in.op == OP_BWD && p->split_w) p->n_pending[in.chunk] = (int)max_i64(p->n_pending[in.chunk], ++waiting[in.chunk]);
        if (in.op == OP_WGRAD) waiting[in.chunk]--;
        if (in.op != pipeline_last_op(p)) continue;
        for (int c = in.chunk; c >= 0 && (c == in.chunk || pipeline_hands_over(p, c)); c--)
            if (++ends[c * p->n_micro_batches + in.mb] == 1 + pipeline_hands_over(p, c)) in_flight[c]--;
    }
    free(in_flight);
    free(waiting);
    free(ends);
}

static void pipeline_make(Pipeline *p, PipelineSchedule schedule, int n_stages, int n_chunks, int stage, int n_micro_batches) {
    memset(p, 0, sizeof *p);
    if (n_stages == 1) schedule = PIPELINE_1F1B; // all are this one
    *p = {schedule, n_stages, stage, n_chunks, n_micro_batches, schedules[schedule].split_w, NULL, 0, NULL, NULL, NULL};
    p->n_slots = (int *)host_alloc(sizeof(int) * (size_t)n_chunks);
    p->n_pending = (int *)host_alloc(sizeof(int) * (size_t)n_chunks);
    p->first = (int *)host_alloc(sizeof(int) * (size_t)(n_stages * n_chunks + 1));
    p->prog = (Instr *)host_alloc(sizeof(Instr) * OP_COUNT * (size_t)n_micro_batches * (size_t)n_chunks);
    schedules[schedule].order(p);
    pipeline_count_slots(p);
}

static void pipeline_free(Pipeline *p) {
    free(p->prog);
    free(p->n_slots);
    free(p->n_pending);
    free(p->first);
}

// ---------------------------------------------------------------------------------------------------------------
// All stages together

// What a chunk, counted over the model, takes for one micro-batch, in any unit of time.
typedef struct {
    double forward, backward, weights; // backward: of what goes on to the chunk before
    double message;                    // to the next chunk, and of the gradient from there, where that lies on another stage
} ChunkCost;

typedef struct {
    char wrong[200];  // empty: the programs are right
    double time;      // from the first computation to the last of all stages
    double bubble;    // the share of it in which a stage, on average, has nothing to do
} PipelineReport;

// Which channel a send or a receive takes, by whether the stage on the other side comes before this one, and Op.
enum { PIPELINE_CHANNELS = 8 };
typedef int ChannelMap[2][OP_COUNT];
static const ChannelMap pipeline_channels = {{-1, 0, -1, 1, 2, -1, 3, -1}, {-1, 4, -1, 5, 6, -1, 7, -1}};

typedef struct {
    Instr in;
    double time;                      // when it may begin: what is sent has been computed, what is received has room
} QueuedMove;

// One stage while the programs run.
typedef struct {
    const Pipeline *p;
    int at;                           // next instruction
    double clock, busy;               // its computation is free from now on; and was busy
    QueuedMove *queue[PIPELINE_CHANNELS];
    int enqueued[PIPELINE_CHANNELS], moved[PIPELINE_CHANNELS];
    double idle_from[PIPELINE_CHANNELS]; // the channel has moved what it was given
    unsigned *issued, *done;          // [chunk * n_micro_batches + mb]: bits 1 << op
    double *arrived[2];               // likewise: when the input, and the gradient of the output, came
    int *owner;                       // [chunk * n_micro_batches + slot]: 1 + the micro-batch that has it
    double *through, *left;           // likewise: when its last user was through, and all that this sent had left
    double *start;                    // by instruction: when it begins; null if nobody asks
} StageRun;

PRINTF_LIKE(3, 4) static bool run_wrong(PipelineReport *r, const StageRun *s, const char *format, ...) {
    Instr in = s->p->prog[s->at];
    int n = snprintf(r->wrong, sizeof r->wrong, "stage %d, instruction %d (%s of micro-batch %d, chunk %d): ", s->p->stage, s->at,
                     in.op >= 0 && in.op < OP_COUNT ? op_names[in.op] : "unknown", in.mb, in.chunk);
    va_list args;
    va_start(args, format);
    vsnprintf(r->wrong + n, sizeof r->wrong - (size_t)n, format, args);
    va_end(args);
    return false;
}

// The stage on the other side; this one for what stays here; -1 if there is no such instruction for this chunk.
static int run_peer(const Pipeline *p, Op op, int whole) {
    int last = pipeline_last(p);
    int before = whole > 0 ? pipeline_stage_of(p, whole - 1) : p->stage, after = whole < last ? pipeline_stage_of(p, whole + 1) : p->stage;
    switch (op) {
    case OP_LOAD: return whole == 0 || whole == last ? p->stage : -1;
    case OP_RECV_F:
    case OP_SEND_B: return before == p->stage ? -1 : before;
    case OP_RECV_B:
    case OP_SEND_F: return after == p->stage ? -1 : after;
    case OP_WGRAD: return p->split_w ? p->stage : -1;
    default: return p->stage;
    }
}

// Bits of what must be done before, for the same chunk and micro-batch.
static unsigned run_needs(const Pipeline *p, Op op, int whole) {
    unsigned forward = 1u << OP_FWD, backward = 1u << OP_BWD;
    switch (op) {
    case OP_FWD: return (run_peer(p, OP_LOAD, whole) >= 0) << OP_LOAD | (run_peer(p, OP_RECV_F, whole) >= 0) << OP_RECV_F;
    case OP_BWD: return forward | (run_peer(p, OP_RECV_B, whole) >= 0) << OP_RECV_B;
    case OP_RECV_B:
    case OP_SEND_F: return forward;
    case OP_SEND_B:
    case OP_WGRAD: return backward;
    default: return 0;
    }
}

static unsigned run_done(const StageRun *s, int chunk, int mb) { return s->done[chunk * s->p->n_micro_batches + mb]; }

// The slot is this micro-batch's from now on. False: its last user's sends are still under way, or it is wrong.
static bool run_take_slot(StageRun *s, Instr in, PipelineReport *r) {
    int *owner = &s->owner[in.chunk * s->p->n_micro_batches + in.mb % s->p->n_slots[in.chunk]], before = *owner - 1;
    if (before >= 0 && before != in.mb) {
        for (int c = in.chunk; c == in.chunk || pipeline_hands_over(s->p, c - 1); c++)
            if (!(run_done(s, c, before) >> pipeline_last_op(s->p) & 1)) return run_wrong(r, s, "its slot is still that of micro-batch %d", before);
        if (s->issued[in.chunk * s->p->n_micro_batches + before] != run_done(s, in.chunk, before)) return false;
    }
    *owner = in.mb + 1;
    return true;
}

// Executes, or enqueues, the stage's next instruction. False: it must wait, or it is wrong.
static bool run_step(StageRun *s, const ChunkCost *cost, const ChannelMap channel, PipelineReport *r) {
    const Pipeline *p = s->p;
    if (s->at == p->n) return false;
    Instr in = p->prog[s->at];
    if (in.op < 0 || in.op >= OP_COUNT || in.mb < 0 || in.mb >= p->n_micro_batches || in.chunk < 0 || in.chunk >= p->n_chunks) return run_wrong(r, s, "out of range");
    int i = in.chunk * p->n_micro_batches + in.mb, whole = pipeline_whole(p, p->stage, in.chunk), peer = run_peer(p, in.op, whole);
    unsigned missing = run_needs(p, in.op, whole) & ~s->done[i];
    if (peer < 0) return run_wrong(r, s, "has no place in this chunk");
    if (peer != in.peer) return run_wrong(r, s, "with stage %d, should be %d", in.peer, peer);
    if (s->issued[i] >> in.op & 1) return run_wrong(r, s, "comes twice");
    if (missing & ~s->issued[i]) return run_wrong(r, s, "comes before %s", op_names[__builtin_ctz(missing & ~s->issued[i])]);
    if (in.op == OP_FWD && whole > 0 && run_peer(p, OP_RECV_F, whole) < 0 && !(run_done(s, in.chunk - 1, in.mb) >> OP_FWD & 1)) return run_wrong(r, s, "comes before that of the chunk before");
    if (in.op == OP_BWD && pipeline_hands_over(p, in.chunk) && !(run_done(s, in.chunk + 1, in.mb) >> OP_BWD & 1)) return run_wrong(r, s, "comes before that of the chunk behind");
    if (missing) return false;
    if ((in.op == OP_LOAD || in.op == OP_RECV_F || in.op == OP_FWD) && !run_take_slot(s, in, r)) return false;
    s->issued[i] |= 1u << in.op;
    s->at++;
    int at = channel[in.peer < p->stage][in.op], slot = in.chunk * p->n_micro_batches + in.mb % p->n_slots[in.chunk];
    if (at >= 0) { // the room for a gradient is there since the forward pass
        s->queue[at][s->enqueued[at]++] = {in, in.op == OP_RECV_F ? s->through[slot] : in.op == OP_RECV_B ? 0 : s->clock};
        return true;
    }
    const ChunkCost *c = &cost[whole];
    double takes = in.op == OP_FWD ? c->forward : in.op == OP_BWD ? c->backward + (p->split_w ? 0 : c->weights) : in.op == OP_WGRAD ? c->weights : 0;
    double ready = in.op == OP_FWD ? fmax(s->arrived[0][i], s->left[slot]) : in.op == OP_BWD ? s->arrived[1][i] : 0;
    s->clock = fmax(s->clock, ready);
    if (s->start) s->start[s->at - 1] = s->clock;
    s->clock += takes;
    s->busy += takes;
    if (in.op == pipeline_last_op(p)) s->through[slot] = s->clock;
    s->done[i] |= 1u << in.op;
    return true;
}

// Moves what is first on a channel of sends and, on the other side, first on its channel of receives. False: nothing, or it is wrong.
static bool run_move(StageRun *all, StageRun *from, Op send, bool back, const ChunkCost *cost, const ChannelMap channel, PipelineReport *r) {
    Op receive = send == OP_SEND_F ? OP_RECV_F : OP_RECV_B;
    int out = channel[back][send];
    if (from->moved[out] == from->enqueued[out]) return false;
    QueuedMove a = from->queue[out][from->moved[out]];
    if (a.in.op != send) return false;
    StageRun *to = &all[a.in.peer];
    int in = channel[from->p->stage < a.in.peer][receive];
    if (to->moved[in] == to->enqueued[in]) return false;
    QueuedMove b = to->queue[in][to->moved[in]];
    if (b.in.op != receive || b.in.peer != from->p->stage) return false;
    int whole = pipeline_whole(from->p, from->p->stage, a.in.chunk), next = whole + (send == OP_SEND_F ? 1 : -1), n = from->p->n_micro_batches;
    if (a.in.mb != b.in.mb || next != pipeline_whole(to->p, to->p->stage, b.in.chunk)) {
        snprintf(r->wrong, sizeof r->wrong, "stage %d sends micro-batch %d of chunk %d (%s), stage %d expects micro-batch %d for its chunk %d", from->p->stage, a.in.mb, a.in.chunk,
                 op_names[send], to->p->stage, b.in.mb, b.in.chunk);
        return false;
    }
    double *left = &from->left[a.in.chunk * n + a.in.mb % from->p->n_slots[a.in.chunk]];
    double end = fmax(fmax(a.time, b.time), fmax(from->idle_from[out], to->idle_from[in])) + cost[min_i64(whole, next)].message;
    from->idle_from[out] = to->idle_from[in] = end;
    *left = fmax(*left, end);
    from->moved[out]++;
    to->moved[in]++;
    from->done[a.in.chunk * n + a.in.mb] |= 1u << send;
    to->done[b.in.chunk * n + b.in.mb] |= 1u << receive;
    to->arrived[send == OP_SEND_B][b.in.chunk * n + b.in.mb] = end;
    return true;
}

// All stages stand still: are they through?
static void run_end(const StageRun *s, PipelineReport *r) {
    const Pipeline *p = s->p;
    if (s->at < p->n) run_wrong(r, s, "waits for ever");
    for (int c = 0; c < p->n_chunks && !r->wrong[0]; c++) {
        unsigned must = 0;
        int whole = pipeline_whole(p, p->stage, c);
        for (int op = 0; op < OP_COUNT; op++) must |= (run_peer(p, (Op)op, whole) >= 0) << op;
        for (int mb = 0; mb < p->n_micro_batches && !r->wrong[0]; mb++) {
            unsigned missing = must & ~run_done(s, c, mb);
            if (missing) snprintf(r->wrong, sizeof r->wrong, "stage %d: %s of micro-batch %d, chunk %d, is missing or never ends", p->stage, op_names[__builtin_ctz(missing)], mb, c);
        }
    }
}

static void run_begin(StageRun *s, const Pipeline *p, const ChannelMap channel) {
    size_t all = (size_t)p->n_chunks * (size_t)p->n_micro_batches;
    memset(s, 0, sizeof *s);
    s->p = p;
    for (int c = 0; c < PIPELINE_CHANNELS; c++) {
        size_t ops = 0; // that take the channel, each once for a micro-batch of a chunk
        for (int k = 0; k < 2 * OP_COUNT; k++) ops += channel[k / OP_COUNT][k % OP_COUNT] == c;
        s->queue[c] = (QueuedMove *)host_alloc(sizeof(QueuedMove) * (ops * all + 1));
    }
    s->issued = (unsigned *)host_alloc(sizeof(unsigned) * all);
    s->done = (unsigned *)host_alloc(sizeof(unsigned) * all);
    for (int k = 0; k < 2; k++) s->arrived[k] = (double *)host_alloc(sizeof(double) * all);
    s->owner = (int *)host_alloc(sizeof(int) * all);
    s->through = (double *)host_alloc(sizeof(double) * all);
    s->left = (double *)host_alloc(sizeof(double) * all);
}

static void run_free(StageRun *s) {
    for (int c = 0; c < PIPELINE_CHANNELS; c++) free(s->queue[c]);
    for (int k = 0; k < 2; k++) free(s->arrived[k]);
    free(s->issued);
    free(s->done);
    free(s->owner);
    free(s->through);
    free(s->left);
}

// p: the programs of all stages. cost: by chunk of the model. channel: by Op, as pipeline_channels unless a test wants to see why. start: null, or for
// each stage where the times go at which its instructions begin.
static PipelineReport pipeline_run(const Pipeline *p, const ChunkCost *cost, const ChannelMap channel, double *const *start) {
    PipelineReport r;
    memset(&r, 0, sizeof r);
    int n = p->n_stages;
    StageRun *all = (StageRun *)host_alloc(sizeof(StageRun) * (size_t)n);
    for (int s = 0; s < n; s++) run_begin(&all[s], &p[s], channel);
    for (int s = 0; s < n && start; s++) all[s].start = start[s];
    for (bool moves = true; moves && !r.wrong[0];) {
        moves = false;
        for (int s = 0; s < n; s++) while (!r.wrong[0] && run_step(&all[s], cost, channel, &r)) moves = true;
        for (int s = 0; s < n; s++)
            for (int k = 0; k < 4; k++) while (!r.wrong[0] && run_move(all, &all[s], k % 2 ? OP_SEND_B : OP_SEND_F, k / 2, cost, channel, &r)) moves = true;
    }
    for (int s = 0; s < n && !r.wrong[0]; s++) run_end(&all[s], &r);
    for (int s = 0; s < n; s++) {
        r.time = fmax(r.time, all[s].clock);
        r.bubble += all[s].busy / n;
        run_free(&all[s]);
    }
    r.bubble = r.time > 0 ? 1 - r.bubble / r.time : 0;
    free(all);
    return r;
}

static PipelineReport pipeline_simulate(const Pipeline *p, const ChunkCost *cost, const ChannelMap channel) { return pipeline_run(p, cost, channel, NULL); }

// ---------------------------------------------------------------------------------------------------------------
// A drawing of it: a column is a unit of time, which each of F, B and w takes. To be freed.

enum { DRAWING_STAGES = 8, DRAWING_DIGITS = 16, DRAWING_LABEL = 15 }; // a micro-batch is one digit, of sixteen; so is a chunk

static char *pipeline_drawing(PipelineSchedule schedule, int n_stages, int n_chunks, int n_micro_batches) {
    static const char *const label[] = {"stage %d", "  micro-batch", "  chunk"};
    static const char digit[] = "0123456789abcdef";
    Pipeline *all = (Pipeline *)host_alloc(sizeof(Pipeline) * (size_t)n_stages);
    ChunkCost *cost = (ChunkCost *)host_alloc(sizeof(ChunkCost) * (size_t)(n_stages * n_chunks));
    double *start[DRAWING_STAGES];
    CHECK(n_stages <= DRAWING_STAGES && n_micro_batches <= DRAWING_DIGITS && n_chunks <= DRAWING_DIGITS, "%d stages of %d chunks, %d micro-batches", n_stages, n_chunks, n_micro_batches);
    for (int c = 0; c < n_stages * n_chunks; c++) cost[c] = {1, 1, 1};
    for (int s = 0; s < n_stages; s++) {
        pipeline_make(&all[s], schedule, n_stages, n_chunks, s, n_micro_batches);
        start[s] = (double *)host_alloc(sizeof(double) * (size_t)all[s].n);
    }
    PipelineReport r = pipeline_run(all, cost, pipeline_channels, start);
    CHECK(!r.wrong[0], "%s", r.wrong);
    const int rows = n_chunks > 1 ? 3 : 2, width = DRAWING_LABEL + (int)r.time + 1;
    char *text = (char *)host_alloc((size_t)(n_stages * rows * width + 1));
    for (int line = 0; line < n_stages * rows; line++) {
        char *at = text + line * width;
        memset(at, ' ', (size_t)width);
        if (line % rows == 0) memset(at + DRAWING_LABEL, '.', (size_t)(width - 1 - DRAWING_LABEL));
        at[snprintf(at, DRAWING_LABEL, label[line % rows], line / rows)] = ' ';
    }
    for (int s = 0; s < n_stages; s++)
        for (int i = 0; i < all[s].n; i++) {
            Instr in = all[s].prog[i];
            if (in.op != OP_FWD && in.op != OP_BWD && in.op != OP_WGRAD) continue;
            for (int part = 0; part <= (in.op == OP_BWD && !all[s].split_w); part++) {
                char *cell = text + s * rows * width + DRAWING_LABEL + (int)lround(start[s][i]) + part;
                cell[0] = in.op == OP_FWD ? 'F' : in.op == OP_BWD && part == 0 ? 'B' : 'w';
                cell[width] = digit[in.mb];
                if (rows > 2) cell[2 * width] = digit[in.chunk];
            }
        }
    int end = 0; // blanks that end a line go
    for (int line = 0; line < n_stages * rows; line++) {
        int last = width - 2;
        while (text[line * width + last] == ' ') last--;
        memmove(text + end, text + line * width, (size_t)last + 1);
        end += last + 1;
        text[end++] = '\n';
    }
    text[end] = 0;
    for (int s = 0; s < n_stages; s++) {
        pipeline_free(&all[s]);
        free(start[s]);
    }
    free(all);
    free(cost);
    return text;
}

// ---------------------------------------------------------------------------------------------------------------
// What the trainer calls

// The program of this stage, when those of all stages have been found right together. first, cost: of all chunks of the model. Returns the
// ideal bubble for these costs.
static double pipeline_init(Pipeline *p, PipelineSchedule schedule, int n_stages, int n_chunks, int stage, int n_micro_batches, const int *first, const ChunkCost *cost) {
    Pipeline *all = (Pipeline *)host_alloc(sizeof(Pipeline) * (size_t)n_stages);
    for (int s = 0; s < n_stages; s++) pipeline_make(&all[s], schedule, n_stages, n_chunks, s, n_micro_batches);
    PipelineReport r = pipeline_simulate(all, cost, pipeline_channels);
    CHECK(!r.wrong[0], "%s", r.wrong);
    for (int s = 0; s < n_stages; s++) if (s != stage) pipeline_free(&all[s]);
    *p = all[stage];
    memcpy(p->first, first, sizeof(int) * (size_t)(n_stages * n_chunks + 1));
    free(all);
    return r.bubble;
}

// What one pass over the model is on this stage, without a backward pass: evaluation, sampling. Returns the number of instructions, at
// most 3 a chunk.
static int pipeline_pass(const Pipeline *p, Instr *prog) {
    Pipeline pass = *p;
    int n = 0;
    pass.prog = prog;
    pass.n = 0;
    pass.n_micro_batches = 1;
    for (int c = 0; c < p->n_chunks; c++) pipeline_compute(&pass, OP_FWD, c, 0);
    for (int i = 0; i < pass.n; i++) if (prog[i].op != OP_LOAD) prog[n++] = prog[i];
    return n;
}

// ---------------------------------------------------------------------------------------------------------------
// Links: what each channel goes by. A group is for messages from one stage to another of one kind, forward or backward.

typedef struct {
    Group group[PIPELINE_CHANNELS];   // of two ranks; of none where the channel is not used
    Stream stream[PIPELINE_CHANNELS];
    Event computed;                   // orders a send behind the computation: recorded, and at once waited for
} PipelineLinks;

// All ranks of the job come here.
static void links_create(PipelineLinks *l, const Pipeline *p, const ProcessGrid *grid) {
    memset(l, 0, sizeof *l);
    l->computed = event_create();
    for (int whole = 0; whole < pipeline_last(p); whole++) {
        int from = pipeline_stage_of(p, whole), to = pipeline_stage_of(p, whole + 1);
        bool known = from == to;
        for (int k = 0; k < whole; k++) known = known || (pipeline_stage_of(p, k) == from && pipeline_stage_of(p, k + 1) == to);
        for (int back = 0; back < 2 && !known; back++) {
            int sender = back ? to : from, receiver = back ? from : to;
            Group g = group_of_stages(grid, (int)min_i64(from, to), (int)max_i64(from, to));
            if (p->stage == sender) l->group[pipeline_channels[receiver < sender][back ? OP_SEND_B : OP_SEND_F]] = g;
            if (p->stage == receiver) l->group[pipeline_channels[sender < receiver][back ? OP_RECV_B : OP_RECV_F]] = g;
        }
    }
    for (int c = 0; c < PIPELINE_CHANNELS; c++) if (l->group[c].size) l->stream[c] = stream_create_urgent();
}

static void links_free(PipelineLinks *l) {
    for (int c = 0; c < PIPELINE_CHANNELS; c++) {
        if (l->stream[c]) stream_destroy(l->stream[c]);
        if (l->group[c].size) comm_group_free(&l->group[c]);
    }
    event_destroy(l->computed);
}

// What the computation has made until now goes to the neighbour; `sent` is recorded when it has left.
static void link_send(PipelineLinks *l, const Pipeline *p, Instr in, const void *x, int64_t bytes, Stream compute, Event sent) {
    int c = pipeline_channels[in.peer < p->stage][in.op];
    event_record(l->computed, compute);
    stream_wait_event(l->stream[c], l->computed);
    comm_send(l->group[c], x, bytes, 1 - l->group[c].rank, l->stream[c]);
    event_record(sent, l->stream[c]);
}

// It comes as soon as `room` is reached, and the computation goes on when it is there.
static void link_receive(PipelineLinks *l, const Pipeline *p, Instr in, void *x, int64_t bytes, Event room, Event here, Stream compute) {
    int c = pipeline_channels[in.peer < p->stage][in.op];
    stream_wait_event(l->stream[c], room);
    comm_receive(l->group[c], x, bytes, 1 - l->group[c].rank, l->stream[c]);
    event_record(here, l->stream[c]);
    stream_wait_event(compute, here);
}
