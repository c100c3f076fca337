// plan_time.cu - what the ranks of a plan move in an update, and about how long it takes. Arithmetic, as planner.cu is.
//
// Bytes follow from the layouts of zero.cu and the programs of pipeline.cu, and the tests compare them with the collectives of a run. Time is an
// estimate for H200 GPUs: operations and bytes, divided by rates that were measured on one or two of them (docs/planner.md has the table,
// and beside each other what is estimated and what was measured).
//
//     a micro-batch in a chunk = products + attention + what kernels between them read and write
//                                + messages of tensor and sequence parallelism, for which the computation waits, but for what comes in pieces beside it
//                                + gathers and sums of ZeRO, so far as they do not fit beside the computation
//     an update                = the micro-batches in the pipeline, its bubble and the wait for its messages included
//                                + the update of what the rank keeps, and what travels only before the first or after the last micro-batch
//
// Read next: plan_report.cu.
#pragma once
#include "planner.cu"

// ---------------------------------------------------------------------------------------------------------------
// Rates

// A product of so many operations runs at so many TFLOP/s: the operations of a block's smallest product, rows x C x C / tensor, stand for
// all of the block. So that updates of GPT-2 124M with 1, 4, 8 and 64 samples, of 1558M and of GPT-3 6.7B take as long as they took.
static const double product_rates[][2] = {{1.2e9, 251}, {4.8e9, 481}, {9.7e9, 530}, {54e9, 605}, {84e9, 620}, {550e9, 653}};
// Attention: tokens, TFLOP/s forward and backward (causal, half of the square).
static const double attention_rates_64[][3] = {{1024, 390, 340}, {16384, 558, 477}};                      // head sizes up to 64
static const double attention_rates_128[][3] = {{1024, 481, 370}, {2048, 581, 452}, {16384, 660, 533}};   // above

// Bytes a second.
static const double RATE_KERNELS = 3.5e12; // norms, GELU's backward, the classifier: what they read and write
static const double RATE_UPDATE = 4.1e12;  // AdamW
static const double RATE_NVLINK = 260e9;   // what a GPU sends to others of its host
static const double RATE_NETWORK = 45e9;   // to other hosts: assumed, a network of 400 Gbit/s for each GPU
static const double RATE_HOST = 54e9;      // between a GPU and host memory
static const double RATE_DISK = 2.8e9;     // read and written together
static const double RATE_CPU_PARAMETERS = 3.6e9; // updated a second by 16 cores while copies run
static const double HIDDEN_SECONDS = 2.5e-12;      // what a byte sent beside the computation takes of the latter's time
static const double PEAK_FLOPS = 989e12;

// The column of a table of rates at x, straight between its rows on a logarithmic axis and constant beyond.
static double rate_at(const double *table, int rows, int columns, int column, double x) {
    for (int i = 0; i < rows; i++) {
        const double *row = table + i * columns, *before = row - columns;
        if (x > row[0] && i + 1 < rows) continue;
        if (i == 0 || x >= row[0]) return row[column];
        return before[column] + (row[column] - before[column]) * log(x / before[0]) / log(row[0] / before[0]);
    }
    return 0;
}

// A product smaller than the smallest one takes as long as that.
static double product_rate(double operations) { return 1e12 * rate_at(product_rates[0], 6, 2, 1, operations) * fmin(1, operations / product_rates[0][0]); }
static double attention_rate(int64_t head_size, int64_t T, bool backward) {
    return 1e12 * (head_size <= 64 ? rate_at(attention_rates_64[0], 2, 3, 1 + backward, (double)T) : rate_at(attention_rates_128[0], 3, 3, 1 + backward, (double)T));
}

// What a rank sends a second to n ranks, itself included, that are `stride` apart. Between hosts each of its members on a host
// brings its own network.
static double link_rate(int stride, int n) {
    if (stride * n <= PLAN_HOST_RANKS) return RATE_NVLINK;
    return fmin(RATE_NVLINK, RATE_NETWORK * (double)max_i64(1, PLAN_HOST_RANKS / stride));
}

// Of a message that n ranks gather or sum, what each of them sends.
static double share_sent(int n) { return (double)(n - 1) / n; }

// ---------------------------------------------------------------------------------------------------------------
// What a rank sends or copies in an update

typedef enum { MOVE_GRADIENTS, MOVE_WEIGHTS, MOVE_TENSOR, MOVE_TENSOR_GRADIENTS, MOVE_SEQUENCE, MOVE_STAGES, MOVE_TIED, MOVE_TO_HOST, MOVE_FROM_HOST, MOVE_DISK, MOVE_KINDS } MoveKind;

static const struct {
    const char *axis, *what;
} move_names[MOVE_KINDS] = {
    {"data", "gradients"}, {"data", "weights"}, {"tensor", "activat."}, {"tensor", "gradients"}, {"sequence", "activat."}, {"pipeline", "activat."}, {"pipeline", "tied table"},
    {"host", "to it"}, {"host", "from it"}, {"disk", "both ways"},
};

typedef struct {
    double bytes[MOVE_KINDS];
} PlanMoves;

// One chunk's part of it for one micro-batch, by pass: forward 0, backward 1. And its computation, in seconds.
typedef struct {
    ChunkCost compute;
    double tensor[2], sequence[2];
    double beside[2];               // of tensor: all but one of the pieces that rows travel in, while products of the others are computed
    double gathered[2], fetched[2], read[2]; // of weights: sent, before that copied from host memory, and before that read from a file
    double reduced, stored, sent;   // gradients; checkpoints to the host, which come back backward; to the next chunk and as much back
} ChunkWork;

// Everything about a plan's stage that both bytes and time are made of.
typedef struct {
    const Plan *plan;
    const Model *m;
    ZeroLayout zero;      // the plan's own
    ActLayout *acts;      // by chunk
    double rows;          // tokens of a micro-batch that a rank multiplies with weights
    double stream_bytes;  // of the residual stream of so many tokens
} StagePlan;

static StagePlan stage_plan_open(const Plan *p, int stage) {
    StagePlan s;
    memset(&s, 0, sizeof s);
    s.plan = p;
    s.m = &p->model[stage];
    s.zero = p->zero[stage];
    s.acts = plan_stage_acts(p, stage);
    s.rows = (double)(p->cfg->batch.train_micro_batch_size_per_gpu * p->cfg->run.seq_len) / p->size.sp;
    s.stream_bytes = s.rows * (double)(s.m->C * dtype_bytes(s.m->dtype));
    return s;
}
static void stage_plan_close(StagePlan *s) { free(s->acts); }

// Messages of tensor parallelism (tensor_parallel.cu), each as long as the residual stream of all rows. A block gathers its two norms' outputs and scatters the sums
// of its two products by rows; backward is the mirror, and gathers the norms' outputs once more for the gradients of weights. What is recomputed
// gathers, and scatters, again; and blocks that run forward again to come to the next one's input do all of it.
static double tensor_messages(const ActLayout *l, UnitKind kind, bool backward) {
    const double inside = 1 - (double)l->n_segments / acts_n_blocks(l); // of the blocks, those that are not the last of a segment
    const double again = (l->policy >= RECOMPUTE_QKV) + (l->policy >= RECOMPUTE_FFN) + (l->policy >= RECOMPUTE_BLOCK) + inside;
    if (kind == UNIT_EMBED) return 1;
    if (kind == UNIT_HEAD) return backward ? 2 : 0; // in training the head does all of its work there
    return backward ? 6 + again : 4;
}

// Of sequence parallelism, each as long as all rows' share of one of q, k, v and the attention's output: these change places, backward the output once more, for
// the gradient of the projection, and all their gradients.
static double sequence_messages(const ActLayout *l, UnitKind kind, bool backward) {
    return kind != UNIT_BLOCK ? 0 : !backward ? 4 : 5 + (l->policy >= RECOMPUTE_QKV ? 3 : 0) + (l->policy >= RECOMPUTE_BLOCK ? 1 : 0);
}

// Of the blocks of a pass over the model, the share that is gathered: at each of the 2 n - 1 turns between the passes of an update as many are there
// still as there are buffers, for the last of a pass are the first of the next. In a pipeline passes of other micro-batches come between.
static double gathered_share(const StagePlan *s) {
    const double passes = 2 * (double)s->plan->cfg->batch.gradient_accumulation_steps;
    int turns = 0;
    for (int u = 0; u < s->m->table.n_units; u++) turns += s->m->table.unit[u].held && !s->zero.unit[u].dedicated;
    return s->plan->size.pp > 1 || turns == 0 ? 1 : 1 - (passes - 1) / passes * s->zero.n_param_pool / turns;
}

static bool unit_takes_turns(const StagePlan *s, int unit) { return !s->zero.unit[unit].dedicated; }
static double unit_gathered(const StagePlan *s, int unit) { return (double)(s->zero.unit[unit].whole * dtype_bytes(s->m->dtype)) * share_sent(s->zero.ranks); }
static double unit_reduced(const StagePlan *s, int unit) {
    const ZeroLayout *z = &s->zero;
    bool twice = z->opt.stage == 0 || !z->opt.reduce_scatter; // an all-reduce, or the sums go to everybody
    return (twice ? 2 : 1) * (double)(z->unit[unit].whole * dtype_bytes(layout_wire(z))) * share_sent(z->ranks);
}

// Seconds of a unit's computation for a micro-batch.
static ChunkCost unit_compute(const StagePlan *s, const ActLayout *l, int unit) {
    const Model *m = s->m;
    const int64_t T = s->plan->cfg->run.seq_len;
    const double N = s->rows, C = (double)m->C, F = (double)m->F, tp = s->plan->size.tp, e = (double)dtype_bytes(m->dtype), local = N / tp;
    const double rate = product_rate(2 * N * C * C / tp);
    const int64_t head_size = m->C / m->NH;
    ChunkCost c = {0, 0, 0};
    switch (m->table.unit[unit].kind) {
    case UNIT_EMBED:
        c.forward = local * 2 * C * e / RATE_KERNELS;
        c.weights = local * 8 * C * e / RATE_KERNELS;
        break;
    case UNIT_BLOCK: {
        double products = 2 * local * (4 * C * C + 2 * C * F) / rate, attention = 4 * local * attention_seen(m, T) * C;
        double again = acts_flops_per_token(l) / acts_n_blocks(l) * local / rate + (double)recompute_bytes_per_token(m, l->policy) * N / RATE_KERNELS;
        c.forward = products + attention / attention_rate(head_size, T, false) + local * 6 * C * e / RATE_KERNELS;                  // two norms, one with a sum
        c.backward = products + 2.5 * attention / attention_rate(head_size, T, true) + local * 8 * C * e / RATE_KERNELS + again; // two norms
        c.weights = products + local * (F + 3 * C) * e / RATE_KERNELS;                                                                     // biases
        break;
    }
    case UNIT_HEAD: {
        double product = 2 * local * (double)m->V * C / rate;
        c.forward = local * 2 * C * e / RATE_KERNELS;
        c.backward = 2 * product + local * (2 * (double)m->Vp + 4 * C) * e / RATE_KERNELS; // the logits are made here
        c.weights = product;
        break;
    }
    }
    return c;
}

static void chunk_add_unit(ChunkWork *w, const StagePlan *s, const ActLayout *l, int unit, double gathered) {
    const GridAxes n = s->plan->size;
    const UnitKind kind = s->m->table.unit[unit].kind;
    ChunkCost c = unit_compute(s, l, unit);
    w->compute.forward += c.forward;
    w->compute.backward += c.backward;
    w->compute.weights += c.weights;
    if (layout_shards_grads(&s->zero)) w->reduced += unit_reduced(s, unit);
    for (int pass = 0; pass < 2; pass++) {
        const double rows = tensor_messages(l, kind, pass == 1) * s->stream_bytes * share_sent(n.tp);
        w->tensor[pass] += rows;
        if (kind == UNIT_BLOCK) w->beside[pass] += rows * (1 - 1.0 / s->m->overlap.pieces);
        if (kind == UNIT_HEAD && pass == 1) w->tensor[pass] += 3 * 4 * s->rows * (n.tp - 1); // statistics of the classifier
        w->sequence[pass] += sequence_messages(l, kind, pass == 1) * s->stream_bytes / n.tp * share_sent(n.sp);
        if (!unit_takes_turns(s, unit)) continue;
        w->gathered[pass] += gathered * unit_gathered(s, unit);
        const UnitLayout *u = &s->zero.unit[unit];
        if (u->param_on_host) w->fetched[pass] += gathered * (double)(u->shard_numel * dtype_bytes(s->m->dtype));
        w->read[pass] += gathered * (double)(u->shard_numel * u->file_element[HOST_WEIGHT]);
    }
}

// whole: number of the chunk, over the model.
static ChunkWork chunk_work(const StagePlan *s, int whole) {
    const Plan *p = s->plan;
    const Pipeline *pipe = &p->pipe[0];
    const ActLayout *l = &s->acts[pipeline_chunk_of(pipe, whole)];
    ChunkWork w;
    memset(&w, 0, sizeof w);
    double gathered = gathered_share(s);
    for (int u = pipe->first[whole]; u < pipe->first[whole + 1]; u++) chunk_add_unit(&w, s, l, u, gathered);
    w.stored = (double)acts_slot_host_bytes(l);
    if (whole < pipeline_last(pipe) && plan_stage_of(p, whole + 1) != plan_stage_of(p, whole)) w.sent = s->stream_bytes / p->size.tp;
    return w;
}

// Elements [from, to) of a unit that a rank has the gradient of when it is summed: its shard's, or all. Of the rank that has most.
static double unit_final_numel(const StagePlan *s, int unit, int64_t from, int64_t to) {
    return (double)min_i64(max_i64(0, to - from), layout_shards_updates(&s->zero) ? s->zero.unit[unit].shard_numel : s->zero.unit[unit].whole);
}

// What moves only once an update, whatever the micro-batches.
static void moves_once(PlanMoves *moves, const StagePlan *s) {
    const GridAxes n = s->plan->size;
    const double grad = (double)dtype_bytes(layout_shards_grads(&s->zero) ? s->zero.opt.grad_accum_dtype : DTYPE_FP32);
    for (int u = 0; u < s->m->table.n_units; u++) {
        const UnitDesc *d = &s->m->table.unit[u];
        const UnitLayout *l = &s->zero.unit[u];
        if (!d->held) continue;
        if (!layout_shards_grads(&s->zero)) moves->bytes[MOVE_GRADIENTS] += unit_reduced(s, u);
        if (layout_shards_updates(&s->zero) && !unit_takes_turns(s, u)) moves->bytes[MOVE_WEIGHTS] += unit_gathered(s, u);
        moves->bytes[MOVE_TENSOR_GRADIENTS] += 2 * share_sent(n.tp) * grad * unit_final_numel(s, u, d->split_numel, d->numel);
        if (d->twin_numel) moves->bytes[MOVE_TIED] += grad * unit_final_numel(s, u, 0, d->twin_numel);
        if (l->update_on_host) moves->bytes[MOVE_TO_HOST] += grad * (double)l->update_numel;
        if (l->update_on_host && !l->param_on_host) moves->bytes[MOVE_FROM_HOST] += (double)(l->update_numel * dtype_bytes(s->m->dtype));
        if (l->param_on_host && !l->update_on_host) // the device updates what lives on the host: there and back
            for (int k = 0; k < 2; k++) moves->bytes[k ? MOVE_TO_HOST : MOVE_FROM_HOST] += (double)(l->update_numel * dtype_bytes(s->m->dtype));
    }
    for (int f = 0; f < OFFLOAD_FILES; f++) moves->bytes[MOVE_DISK] += 2 * (double)s->zero.file_bytes[f];
}

// What a rank of the stage moves in an update.
static PlanMoves plan_moves(const Plan *p, int stage) {
    PlanMoves m;
    StagePlan s = stage_plan_open(p, stage);
    const double n = (double)p->cfg->batch.gradient_accumulation_steps;
    memset(&m, 0, sizeof m);
    moves_once(&m, &s);
    for (int whole = 0; whole < p->n_chunks * p->size.pp; whole++) {
        if (plan_stage_of(p, whole) != stage) continue;
        ChunkWork w = chunk_work(&s, whole);
        m.bytes[MOVE_GRADIENTS] += n * w.reduced;
        m.bytes[MOVE_WEIGHTS] += n * (w.gathered[0] + w.gathered[1]);
        m.bytes[MOVE_TENSOR] += n * (w.tensor[0] + w.tensor[1]);
        m.bytes[MOVE_SEQUENCE] += n * (w.sequence[0] + w.sequence[1]);
        m.bytes[MOVE_TO_HOST] += n * w.stored;
        m.bytes[MOVE_FROM_HOST] += n * (w.fetched[0] + w.fetched[1] + w.stored);
        m.bytes[MOVE_DISK] += n * (w.read[0] + w.read[1]);
        m.bytes[MOVE_STAGES] += n * w.sent;
        if (whole > 0 && plan_stage_of(p, whole - 1) != stage) m.bytes[MOVE_STAGES] += n * s.stream_bytes / p->size.tp; // the gradient
    }
    stage_plan_close(&s);
    return m;
}

// ---------------------------------------------------------------------------------------------------------------
// Time

// Axes of the grid along which messages travel.
typedef enum { AXIS_TENSOR, AXIS_SEQUENCE, AXIS_DATA, AXIS_PIPELINE, AXES } Axis;
static const char *const axis_names[AXES] = {"tensor", "sequence", "data", "pipeline"};

// Seconds of an update, and whose they are: of the rank that computes most. Of messages what the update is longer by, and what passes while it computes.
typedef struct {
    double step;
    double compute, exposed[AXES], hidden[AXES];
    double offload, update;
    double bubble;                          // share of the pipeline's time, if messages between stages took none
    double tokens_per_second, tflops, share_of_peak; // of the job; of a GPU
} PlanTime;

// Messages of so many bytes and seconds, n times, that may travel beside `room` seconds of computation. Returns the seconds that each time takes.
static double add_messages(PlanTime *t, Axis axis, double n, double bytes, double seconds, double room) {
    const double hidden = fmin(seconds, room);
    const double exposed = seconds - hidden + (hidden > 0 ? HIDDEN_SECONDS * bytes * hidden / seconds : 0);
    t->exposed[axis] += n * exposed;
    t->hidden[axis] += n * hidden;
    return exposed;
}

// Those of ZeRO have room only if the configuration says so.
static double zero_room(const Config *cfg, double room) { return cfg->zero.overlap_comm ? room : 0; }

static double total_exposed(const PlanTime *t) {
    double sum = 0;
    for (int a = 0; a < AXES; a++) sum += t->exposed[a];
    return sum;
}

// Seconds of a chunk, and what of them goes where, added to t for so many micro-batches.
static ChunkCost chunk_seconds(const StagePlan *s, const ChunkWork *w, double n, PlanTime *t) {
    const Plan *p = s->plan;
    const double tensor = link_rate(1, p->size.tp), sequence = link_rate(p->size.tp, p->size.sp), zero = link_rate(p->size.tp, s->zero.ranks);
    const double computes[2] = {w->compute.forward, w->compute.backward + w->compute.weights};
    double waits[2];
    for (int pass = 0; pass < 2; pass++) {
        const double sent = w->gathered[pass] + (pass ? w->reduced : 0), host = fmax(0, fmax((w->fetched[pass] + w->stored) / RATE_HOST, w->read[pass] / RATE_DISK) - computes[pass]);
        const double alone = w->tensor[pass] - w->beside[pass], beside = w->beside[pass] / tensor;
        waits[pass] = host + add_messages(t, AXIS_TENSOR, n, alone, alone / tensor, 0) + add_messages(t, AXIS_TENSOR, n, w->beside[pass], beside, computes[pass]) +
                      add_messages(t, AXIS_SEQUENCE, n, w->sequence[pass], w->sequence[pass] / sequence, 0) +
                      add_messages(t, AXIS_DATA, n, sent, sent / zero, zero_room(p->cfg, fmax(0, computes[pass] - beside)));
        t->compute += n * computes[pass];
        t->offload += n * host;
    }
    return {w->compute.forward + waits[0], w->compute.backward + waits[1], w->compute.weights, w->sent / link_rate(p->size.tp * p->size.sp * p->size.dp, p->size.pp)};
}

// The update itself, and what of communication has only the first forward or the last backward pass to hide behind.
static void stage_ends(const StagePlan *s, double forward, double backward, PlanTime *t) {
    const Plan *p = s->plan;
    const Config *cfg = p->cfg;
    const double zero = link_rate(p->size.tp, s->zero.ranks), element = (double)dtype_bytes(s->m->dtype), grad = (double)dtype_bytes(layout_shards_grads(&s->zero) ? s->zero.opt.grad_accum_dtype : DTYPE_FP32);
    const double master = s->m->dtype == DTYPE_FP32 ? 0 : (double)dtype_bytes(master_dtype(s->m));
    PlanMoves m;
    double on_device = 0, on_host = 0;
    memset(&m, 0, sizeof m);
    moves_once(&m, s);
    for (int u = 0; u < s->m->table.n_units; u++) *(s->zero.unit[u].update_on_host ? &on_host : &on_device) += (double)s->zero.unit[u].update_numel;
    add_messages(t, AXIS_DATA, 1, m.bytes[MOVE_GRADIENTS], m.bytes[MOVE_GRADIENTS] / zero, zero_room(cfg, backward));
    add_messages(t, AXIS_DATA, 1, m.bytes[MOVE_WEIGHTS], m.bytes[MOVE_WEIGHTS] / zero, zero_room(cfg, forward));
    add_messages(t, AXIS_TENSOR, 1, m.bytes[MOVE_TENSOR_GRADIENTS], m.bytes[MOVE_TENSOR_GRADIENTS] / link_rate(1, p->size.tp), 0);
    add_messages(t, AXIS_PIPELINE, 1, m.bytes[MOVE_TIED], m.bytes[MOVE_TIED] / link_rate(p->size.tp * s->zero.ranks, p->size.pp), 0);
    t->update += on_device * (2 * grad + 2 * element + 2 * master + 8 * s->zero.n_states) / RATE_UPDATE; // the norm reads the gradient, too
    double host = on_host / RATE_CPU_PARAMETERS, disk = m.bytes[MOVE_DISK] / RATE_DISK;
    t->offload += fmax(0, (s->zero.opt.offload_filing.pipeline_read && s->zero.opt.offload_filing.pipeline_write ? fmax(host, disk) : host + disk) - forward);
    for (int u = 0; u < s->m->table.n_units; u++) // weights that come and go for an update on the device, one block after the other
        if (s->zero.unit[u].param_on_host && !s->zero.unit[u].update_on_host) t->offload += 2 * (double)s->zero.unit[u].update_numel * element / RATE_HOST;
}

// The update of one stage, in seconds that are its own: what it computes in a micro-batch is added to `work`, by chunk to `cost`.
static PlanTime stage_time(const Plan *p, int stage, ChunkCost *cost, double *work, double *ends) {
    const double n = (double)p->cfg->batch.gradient_accumulation_steps;
    StagePlan s = stage_plan_open(p, stage);
    PlanTime t;
    double forward = 0, backward = 0;
    memset(&t, 0, sizeof t);
    for (int whole = 0; whole < p->n_chunks * p->size.pp; whole++) {
        if (plan_stage_of(p, whole) != stage) continue;
        ChunkWork w = chunk_work(&s, whole);
        cost[whole] = chunk_seconds(&s, &w, n, &t);
        forward += cost[whole].forward;
        backward += cost[whole].backward + cost[whole].weights;
    }
    *work = forward + backward;
    const double before = total_exposed(&t) + t.offload;
    stage_ends(&s, forward, backward, &t);
    *ends = total_exposed(&t) + t.offload + t.update - before;
    stage_plan_close(&s);
    return t;
}

// What stages wait for messages from each other in n micro-batches, `without` being the time of those that are simulated if messages take none. What the first on its way
// there and back is waited for comes once, all else in each.
static double pipeline_exposed(const Plan *p, const ChunkCost *cost, double n, double without) {
    PipelineReport r = pipeline_simulate(p->pipe, cost, pipeline_channels);
    double once = 0;
    for (int whole = 0; whole < p->n_chunks * p->size.pp; whole++) once += 2 * cost[whole].message;
    once = fmin(once, r.time - without);
    return once + (r.time - without - once) * n / plan_micro_batches(p->cfg);
}

// Of a stage, in n micro-batches: seconds of its messages to others.
static double stage_sends(const Plan *p, const ChunkCost *cost, int stage, double n) {
    double sum = 0;
    for (int whole = 0; whole < p->n_chunks * p->size.pp; whole++)
        if (plan_stage_of(p, whole) == stage) sum += n * (cost[whole].message + (whole > 0 ? cost[whole - 1].message : 0));
    return sum;
}

// How long an update takes. If that is `limit` or more, only the step is said, and that it is infinite: for a search, which need not know by how much.
static PlanTime plan_time_below(const Plan *p, double limit) {
    const Config *cfg = p->cfg;
    const double n = (double)cfg->batch.gradient_accumulation_steps;
    ChunkCost *cost = (ChunkCost *)host_alloc(sizeof(ChunkCost) * (size_t)(p->n_chunks * p->size.pp));
    PlanTime most;
    double ends = 0, slowest = 0, all = 0; // of one micro-batch: on the slowest stage, and on all
    int of = 0;
    memset(&most, 0, sizeof most);
    for (int stage = 0; stage < p->size.pp; stage++) {
        double work, end;
        PlanTime t = stage_time(p, stage, cost, &work, &end);
        slowest = fmax(slowest, work);
        all += work;
        ends = fmax(ends, end);
        if (t.compute > most.compute) most = t, of = stage;
    }
    most.step = INFINITY;
    if (n * slowest + ends < limit) {
        ChunkCost *silent = (ChunkCost *)host_alloc(sizeof(ChunkCost) * (size_t)(p->n_chunks * p->size.pp));
        for (int whole = 0; whole < p->n_chunks * p->size.pp; whole++) silent[whole] = {cost[whole].forward, cost[whole].backward, cost[whole].weights, 0};
        PipelineReport r = pipeline_simulate(p->pipe, silent, pipeline_channels);
        CHECK(!r.wrong[0], "%s", r.wrong);
        free(silent);
        const double pipeline = r.time + (n - plan_micro_batches(cfg)) * slowest, exposed = p->size.pp > 1 ? pipeline_exposed(p, cost, n, r.time) : 0;
        most.bubble = 1 - n * all / p->size.pp / pipeline;
        most.exposed[AXIS_PIPELINE] += exposed;
        most.hidden[AXIS_PIPELINE] += fmax(0, stage_sends(p, cost, of, n) - exposed);
        most.step = pipeline + exposed + ends;
    }
    free(cost);
    const double tokens = (double)(cfg->batch.train_batch_size * cfg->run.seq_len);
    most.tokens_per_second = tokens / most.step;
    most.tflops = 1e-12 * model_flops_per_token(&p->model[0], cfg->run.seq_len) * most.tokens_per_second / (double)cfg->world;
    most.share_of_peak = 1e12 * most.tflops / PEAK_FLOPS;
    return most;
}

static PlanTime plan_time(const Plan *p) { return plan_time_below(p, INFINITY); }
