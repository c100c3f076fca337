// optimizer.cu - from gradients to new weights: update rules, learning-rate schedules, loss scaling, clipping.
//
// An update rule is a row of optimizer_rules: its name, the names of its states, and a function that launches the
// kernel on ranges of the units' shards. ZeRO, checkpoints and tests loop over the row; adding an optimizer is a kernel,
// a row and a test.
//
// One update (optimizer_step), with the gradients of S*loss in zero's shards, S the loss scale times what zero.cu leaves to be
// divided (Zero.divisor). All of it is enqueued:
//
//     norm = |grads| / S, over all ranks, squares summed in double
//     update_control: not finite: skip; clip: factor = min(1, gradient_clipping / norm)
//     every unit: weights and states from grad * factor / S, unless skipped
//
// The decision is made where the gradients are (UpdateControl). The host waits for it alone, never for the weights: while it
// moves the counts, logs and enqueues the next forward, the kernels of the update still run. So nothing is decided a step
// late: the host knows of a skip before it asks for the next loss scale or learning rate. What lives in host memory is
// updated from then on by the CPU, beside the next forward pass (offload.cu).
//
// Invariants:
//  1. A skipped update changes no weight, no state, no count but Optimizer.skipped, the consecutive ones and the loss scaler;
//     the schedule and the moments' step count do not move.
//  2. The norm is the same whatever the sharding: squares are summed in double and rounded once.
//  3. Weight decay applies to matrices only (ParamDesc.decay).
// Read next: checkpoint.cu.
#pragma once
#include "zero.cu"
#include "runtime/agree.h"

// ---------------------------------------------------------------------------------------------------------------
// Dynamic loss scaling of fp16 (Micikevicius et al. 2018, section 3.2), with DeepSpeed's hysteresis

typedef struct {
    bool dynamic;
    double scale;
    int64_t iteration;          // updates seen, skipped ones included
    int64_t last_overflow;      // iteration of the last overflow; -1 = none yet
    int64_t hysteresis_left;    // overflows that are still forgiven before the scale halves
    Fp16Config cfg;
} LossScaler;

static void loss_scaler_init(LossScaler *s, const Fp16Config *cfg) {
    memset(s, 0, sizeof *s);
    s->cfg = *cfg;
    s->dynamic = cfg->enabled && cfg->loss_scale == 0;
    s->scale = !cfg->enabled ? 1.0 : s->dynamic ? ldexp(1.0, (int)cfg->initial_scale_power) : cfg->loss_scale;
    s->last_overflow = -1;
    s->hysteresis_left = cfg->hysteresis;
}

// Takes note of one update. Returns false when an overflow happens at the floor of a dynamic scale: nothing is left to try.
static bool loss_scaler_update(LossScaler *s, bool overflow) {
    if (!s->dynamic) return true;
    bool alive = true;
    if (overflow) {
        if (s->hysteresis_left > 1) s->hysteresis_left--;
        else if (s->cfg.min_loss_scale > 0 && s->scale <= s->cfg.min_loss_scale) alive = false;
        else s->scale = fmax(s->scale / 2, fmax(s->cfg.min_loss_scale, 0x1p-126)); // stays a normal fp32 without a floor
        s->last_overflow = s->iteration;
    } else {
        bool grow = (s->iteration - s->last_overflow) % s->cfg.loss_scale_window == 0;
        if (grow || s->cfg.consecutive_hysteresis) s->hysteresis_left = s->cfg.hysteresis;
        if (grow) s->scale = fmin(s->scale * 2, 0x1p126);
    }
    s->iteration++;
    return alive;
}

// ---------------------------------------------------------------------------------------------------------------
// Learning-rate schedules. `u` counts applied updates from 0. DeepSpeed's schedulers are stepped after an update, so
// its laws, functions of i = u - 1, first act on update 1, and update 0 has the initial value.

// Share of the ramp at i < N: logarithmic (DeepSpeed's default) or linear.
static double warmup_share(const SchedulerConfig *c, double i, double N) { return c->warmup_log ? log(i + 1) / log(N) : i / N; }

// A share of one side of OneCycle's triangle, held flat over each of n stairs if n > 0.
static double cycle_stairs(double share, int64_t n) { return n > 0 ? floor(share * (double)n) / (double)n : share; }

// How far OneCycle is up its triangle at i, which lies inside the cycle. As in DeepSpeed the first step is taken at i = 0
// already, so the last i of the cycle is at the foot again; and stairs lie below the ramps on both sides.
static double one_cycle_height(const SchedulerConfig *c, double i) {
    double first = (double)c->cycle_first_step_size, second = (double)c->cycle_second_step_size;
    if (i + 1 <= first) return cycle_stairs((i + 1) / first, c->cycle_first_stair_count);
    return cycle_stairs((first + second - (i + 1)) / second, c->cycle_second_stair_count);
}

static double schedule_lr(const Config *cfg, int64_t u) {
    const SchedulerConfig *c = &cfg->scheduler;
    double base = cfg->optimizer.lr, pi = 3.14159265358979323846;
    if (c->type == SCHEDULE_CONSTANT) return base;
    if (c->type == SCHEDULE_COSINE) {
        if (u < c->warmup_steps) return base * (double)(u + 1) / (double)c->warmup_steps;
        double share = (double)(u - c->warmup_steps) / (double)max_i64(1, c->total_steps - c->warmup_steps);
        return base * (c->final_lr_frac + (1 - c->final_lr_frac) * 0.5 * (1 + cos(pi * fmin(1.0, share))));
    }
    double i = (double)(u + c->last_batch_iteration); // last_batch_iteration is -1 for a fresh start
    double N = fmax(2.0, (double)c->warmup_num_steps), T = (double)c->total_num_steps;
    switch (c->type) {
    case SCHEDULE_WARMUP_LR:
    case SCHEDULE_WARMUP_DECAY_LR: {
        double span = c->warmup_max_lr - c->warmup_min_lr;
        if (i < 0) return c->warmup_min_lr;
        if (i < N) return c->warmup_min_lr + span * warmup_share(c, i, N);
        if (c->type == SCHEDULE_WARMUP_LR) return c->warmup_max_lr;
        return c->warmup_min_lr + span * fmax(0.0, (T - i) / fmax(1.0, T - N));
    }
    case SCHEDULE_WARMUP_COSINE_LR: {
        if (i < 0) return 0;
        if (i < N) return base * (c->warmup_min_ratio + (1 - c->warmup_min_ratio) * warmup_share(c, i, N));
        double share = T > N ? fmin(1.0, (i - N + 1) / (T - N)) : 1.0;
        return base * (c->cos_min_ratio + (1 - c->cos_min_ratio) * 0.5 * (1 + cos(pi * share)));
    }
    case SCHEDULE_ONE_CYCLE: {
        double length = (double)(c->cycle_first_step_size + c->cycle_second_step_size);
        if (i < 0) return c->cycle_min_lr;
        if (i < length) return c->cycle_min_lr + (c->cycle_max_lr - c->cycle_min_lr) * one_cycle_height(c, i);
        double interval = c->decay_step_size > 0 ? (i - length + 1) / (double)c->decay_step_size : 0;
        return c->cycle_min_lr / (1 + c->decay_lr_rate * interval);
    }
    case SCHEDULE_LR_RANGE_TEST: {
        double interval = (i + 1) / (double)c->lr_range_test_step_size;
        if (c->lr_range_test_staircase) interval = floor(interval);
        return c->lr_range_test_min_lr * (1 + c->lr_range_test_step_rate * interval);
    }
    case SCHEDULE_CONSTANT:
    case SCHEDULE_COSINE: break;
    }
    return base;
}

// Betas of update u: the optimizer's own, unless OneCycle moves beta1 against the rate and, as in DeepSpeed, holds beta2 at 0.99.
static void schedule_betas(const Config *cfg, int64_t u, double betas[2]) {
    const SchedulerConfig *c = &cfg->scheduler;
    betas[0] = cfg->optimizer.betas[0];
    betas[1] = cfg->optimizer.betas[1];
    if (c->type != SCHEDULE_ONE_CYCLE || !c->cycle_momentum) return;
    double i = (double)(u + c->last_batch_iteration), length = (double)(c->cycle_first_step_size + c->cycle_second_step_size);
    betas[1] = 0.99;
    if (i < 0) betas[0] = c->cycle_min_mom;
    else if (i < length) betas[0] = c->cycle_max_mom - (c->cycle_max_mom - c->cycle_min_mom) * one_cycle_height(c, i);
    else betas[0] = fmin(0.999999, c->cycle_max_mom * (1 + c->decay_mom_rate * (c->decay_step_size > 0 ? (i - length + 1) / (double)c->decay_step_size : 0)));
}

// ---------------------------------------------------------------------------------------------------------------
// Update rules

// What a rule needs for one update, the same for all tensors.
typedef struct {
    double lr, betas[2];
    int64_t update; // applied updates before this one
    const UpdateControl *control; // in the backend's memory, or on_host in the host's
    const OptimizerConfig *cfg;
    bool on_host;   // the ranges lie in host memory: the kernels of the CPU
} UpdateArgs;

typedef struct {
    const char *name;
    int n_states;                             // of them, sgd uses none without momentum
    const char *state_name[ZERO_STATES_MAX];  // keys in checkpoints
    void (*update)(const UpdateRange *r, int ranges, const UpdateArgs *a, Stream s);
} OptimizerRule;

// Function pointers choose between the twins of a kernel: cpu:: is the backend's own where that is the CPU.

static void update_adamw(const UpdateRange *r, int ranges, const UpdateArgs *a, Stream s) {
    double t = (double)(a->update + 1);
    bool correct = a->cfg->bias_correction;
    AdamWArgs k = {};
    k.lr = (float)a->lr;
    k.beta1 = (float)a->betas[0];
    k.beta2 = (float)a->betas[1];
    k.eps = (float)a->cfg->eps;
    k.weight_decay = (float)a->cfg->weight_decay;
    k.bias_correction1 = correct ? (float)(1 - pow(a->betas[0], t)) : 1.0f;
    k.bias_correction2 = correct ? (float)(1 - pow(a->betas[1], t)) : 1.0f;
    k.decoupled_decay = a->cfg->adam_w_mode;
    (a->on_host ? cpu::adamw_update : adamw_update)(r, ranges, k, a->control, s);
}

static void update_lion(const UpdateRange *r, int ranges, const UpdateArgs *a, Stream s) {
    LionArgs k = {(float)a->lr, (float)a->betas[0], (float)a->betas[1], (float)a->cfg->weight_decay};
    (a->on_host ? cpu::lion_update : lion_update)(r, ranges, k, a->control, s);
}

static void update_sgd(const UpdateRange *r, int ranges, const UpdateArgs *a, Stream s) {
    SgdArgs k = {(float)a->lr, (float)a->cfg->momentum, (float)a->cfg->dampening, (float)a->cfg->weight_decay, a->cfg->nesterov, a->update == 0};
    (a->on_host ? cpu::sgd_update : sgd_update)(r, ranges, k, a->control, s);
}

// Indexed by OptimizerType.
static const OptimizerRule optimizer_rules[] = {
    {"AdamW", 2, {"exp_avg", "exp_avg_sq"}, update_adamw},
    {"Lion", 1, {"exp_avg", NULL}, update_lion},
    {"SGD", 1, {"momentum_buffer", NULL}, update_sgd},
};

// States that this configuration really needs.
static int optimizer_n_states(const OptimizerConfig *c) {
    if (c->type == OPTIMIZER_SGD && c->momentum == 0) return 0;
    return optimizer_rules[c->type].n_states;
}

// ---------------------------------------------------------------------------------------------------------------
// The optimizer

// What the CPU needs to know of an update that it makes (offload.cu).
typedef struct {
    const Zero *z;                // for types and numbers that do not change
    const OptimizerRule *rule;
    UpdateArgs args;
    UpdateControl control;
} HostUpdate;

typedef struct {
    const Config *cfg;
    const OptimizerRule *rule;
    LossScaler scaler;
    int64_t applied_updates;      // the u of the schedules
    int64_t skipped;              // updates skipped so far
    int64_t consecutive_skipped;
    double *sums;                 // (SUM_COUNT) in the backend's memory; summed over the ranks once an update
    double *host_sums;            // (SUM_COUNT) pinned copy
    UpdateControl *control, *host_control; // of the update in progress, in the backend's memory; its pinned copy
    Event summing;                // this rank has its own sums: from here on it waits for the others'
    Event decided;                // both copies are there
    Tensor *shards;               // (units) whose squares are summed in one launch, of the update in progress
    UpdateRange *ranges;          // (units) what one launch updates, likewise
    HostUpdate on_host;           // the worker's, while it updates
} Optimizer;

// What the ranks add up together: one small message an update.
enum {
    SUM_SQUARES,                  // of the gradients
    SUM_LOSS,                     // over the tokens of the update
    SUM_STOP, SUM_SAVE,           // ranks that were asked to stop, or to save: all agree on the same update
    SUM_WRITTEN,                  // ranks that have done their part of the save that is on its way
    SUM_BUSY,                     // milliseconds that the ranks computed in the update before: see StepStats.bubble
    SUM_HASH, SUM_HASH_SQUARES,   // of the ranks' states: do all hold the same? (agree.h)
    SUM_COUNT,
};

typedef struct {
    double grad_norm;   // of the mean gradient, before clipping; not finite when the update was skipped for it
    double clip_factor; // in (0, 1]
    double lr;          // of this update
    double loss_scale;  // that this update's gradients carried
    double loss_sum;    // over the tokens of the global batch
    bool skipped;
    bool stop, save;    // some rank was asked to
    bool written;       // all ranks have done their part of a save in the background
    double busy_ms;     // that the ranks computed in the update before, all together
} OptimizerStats;

// What a rank tells the others along with its sums.
typedef struct {
    bool stop, save;    // it was asked to
    bool written;       // see SUM_WRITTEN
    double busy_ms;     // see SUM_BUSY
} RankWishes;

// What optimizer_init allocates in the backend's memory; the states of the rule are zero's.
static int64_t optimizer_bytes(void) { return SUM_COUNT * (int64_t)sizeof(double) + (int64_t)sizeof(UpdateControl); }

static void optimizer_init(Optimizer *o, const Config *cfg, int units, Stream stream) {
    memset(o, 0, sizeof *o);
    o->cfg = cfg;
    o->rule = &optimizer_rules[cfg->optimizer.type];
    loss_scaler_init(&o->scaler, &cfg->fp16);
    o->sums = (double *)device_malloc(SUM_COUNT * sizeof(double));
    device_memset(o->sums, 0, SUM_COUNT * sizeof(double), stream);
    o->host_sums = (double *)pinned_malloc(SUM_COUNT * sizeof(double));
    o->control = (UpdateControl *)device_malloc(sizeof(UpdateControl));
    o->host_control = (UpdateControl *)pinned_malloc(sizeof(UpdateControl));
    o->shards = (Tensor *)host_alloc(sizeof(Tensor) * (size_t)units);
    o->ranges = (UpdateRange *)host_alloc(sizeof(UpdateRange) * (size_t)units);
    o->summing = event_create();
    o->decided = event_create();
}

static void optimizer_free(Optimizer *o) {
    device_free(o->sums);
    pinned_free(o->host_sums);
    device_free(o->control);
    pinned_free(o->host_control);
    free(o->shards);
    free(o->ranges);
    event_destroy(o->summing);
    event_destroy(o->decided);
}

// Enqueues the sums of the update over all ranks (each adds the squares of its own shards, its losses, its wishes, the
// hash of its state), what follows from them, and copies of both for the host, which are there at o->decided.
static void optimizer_decide(Optimizer *o, Zero *z, const RankState *state, RankWishes wishes) {
    const int units = z->model->table.n_units;
    int n = 0;
    for (int u = 0; u < units; u++) {
        o->shards[n] = zero_counted(z, u);
        n += tensor_numel(o->shards[n]) > 0;
    }
    if (n > 0) sum_squares_to_double(&o->sums[SUM_SQUARES], o->shards, n, false, z->stream);
    else device_memset(&o->sums[SUM_SQUARES], 0, sizeof(double), z->stream); // all that this rank holds is counted by others; the last update's sum is there
    o->host_sums[SUM_STOP] = wishes.stop;
    o->host_sums[SUM_SAVE] = wishes.save;
    o->host_sums[SUM_WRITTEN] = wishes.written;
    o->host_sums[SUM_BUSY] = wishes.busy_ms;
    o->host_sums[SUM_HASH] = agree_hash(state);
    o->host_sums[SUM_HASH_SQUARES] = o->host_sums[SUM_HASH] * o->host_sums[SUM_HASH];
    device_copy(&o->sums[SUM_STOP], &o->host_sums[SUM_STOP], (SUM_COUNT - SUM_STOP) * sizeof(double), COPY_TO_DEVICE, z->stream);
    event_record(o->summing, z->stream);
    watch_unit(-1);
    comm_all_reduce_double(z->job_group, o->sums, SUM_COUNT, COMM_SUM, z->stream);
    update_control(o->control, &o->sums[SUM_SQUARES], &o->sums[SUM_LOSS], o->scaler.scale * z->divisor, o->cfg->gradient_clipping, z->stream);
    device_copy(o->host_sums, o->sums, SUM_COUNT * sizeof(double), COPY_TO_HOST, z->stream);
    device_copy(o->host_control, o->control, sizeof(UpdateControl), COPY_TO_HOST, z->stream);
    event_record(o->decided, z->stream);
}

// Name of the first tensor, in the order of the table, whose gradient is not finite; null if all are. Slow: for last words.
static const char *optimizer_find_nonfinite(Zero *z) {
    const char *name = NULL;
    for (int i = 0; i < z->model->table.n_rows && !name; i++) {
        const ParamDesc *r = &z->model->table.row[i];
        if (r->tied_to >= 0) continue;
        float *values = (float *)host_alloc((size_t)param_numel(r) * 4);
        zero_tensor_read(z, i, STATE_GRAD, values);
        for (int64_t k = 0; k < param_numel(r) && !name; k++) if (!isfinite(values[k])) name = r->name;
        free(values);
    }
    return name;
}

// An update whose loss or gradient norm is not finite is skipped where the configuration says so, and ends the run where
// trying again cannot help. `step` is for the message.
static void optimizer_judge(Optimizer *o, Zero *z, double loss, double norm, int64_t step) {
    const Config *cfg = o->cfg;
    const char *tensor = isfinite(norm) ? NULL : optimizer_find_nonfinite(z);
    char where[160];
    snprintf(where, sizeof where, "loss %g, gradient norm %g%s%s", loss, norm, tensor ? ", first in " : "", tensor ? tensor : "");
    if (cfg->fp16.enabled) {
        if (!loss_scaler_update(&o->scaler, true))
            die_alike(EXIT_NUMERICS, "step %" PRId64 ": overflow at the floor of the loss scale (fp16.min_loss_scale = %g): %s; no checkpoint was written from this state; lower the learning rate, or use bf16", step, cfg->fp16.min_loss_scale, where);
        if (!o->scaler.dynamic && o->consecutive_skipped >= 100)
            die_alike(EXIT_NUMERICS, "step %" PRId64 ": 100 overflows in a row with the static fp16.loss_scale = %g: %s; lower fp16.loss_scale, or set it to 0 (dynamic)", step, cfg->fp16.loss_scale, where);
        return;
    }
    if (!isfinite(loss))
        die_alike(EXIT_NUMERICS, "step %" PRId64 ": the loss is not finite: %s; no checkpoint was written from this state; lower the learning rate, or look at the data of this step", step, where);
    if (!cfg->bf16.enabled || !cfg->bf16.check_grad_overflow)
        die_alike(EXIT_NUMERICS, "step %" PRId64 ": the gradient is not finite: %s; no checkpoint was written from this state; lower the learning rate%s", step, where, cfg->bf16.enabled ? ", or let bf16.check_grad_overflow skip such updates" : "");
    if (o->consecutive_skipped >= 100)
        die_alike(EXIT_NUMERICS, "step %" PRId64 ": 100 updates in a row had a gradient that is not finite: %s; lower the learning rate", step, where);
}

// What this rank updates of a unit. `param`, `masters`: where its weights and masters are.
static UpdateRange optimizer_range(const Zero *z, int unit, char *param, char *masters) {
    const UnitState *u = &z->unit[unit];
    UpdateRange r;
    memset(&r, 0, sizeof r);
    r.param = tensor1(param, z->model->dtype, u->update_numel);
    r.master = tensor1(masters, master_dtype(z->model), u->update_numel);
    r.grad = zero_grad_part(z, unit, u->update_first - u->shard_numel * z->gather_group.rank, u->update_numel);
    for (int i = 0; i < z->n_states; i++) r.state[i] = tensor1(u->state[i], DTYPE_FP32, u->update_numel);
    r.decays = zero_decay_border(z, unit);
    return r;
}

// Enqueues the kernels of an update of what lives on the device: one for all units whose weights do, and then, as they come, of
// those whose weights have their home in host memory.
static void optimizer_apply(Optimizer *o, Zero *z, const UpdateArgs *a) {
    const int units = z->model->table.n_units;
    int n = 0;
    for (int u = 0; u < units; u++) {
        const UnitState *unit = &z->unit[u];
        if (!unit->update_on_host && !unit->param_on_host) o->ranges[n++] = optimizer_range(z, u, (char *)zero_updated_param(z, unit), (char *)unit->master);
    }
    o->rule->update(o->ranges, n, a, z->stream);
    for (int u = 0; u < units; u++) {
        const UnitState *unit = &z->unit[u];
        if (unit->update_on_host || !unit->param_on_host) continue;
        offload_fetch_weights(&z->offload, u, z->update_room, z->stream);
        for (int next = u + 1; next < units && !z->unit[next].update_on_host && offload_read_ahead(&z->offload, next); next++) continue;
        char *param = (char *)z->update_room;
        const UpdateRange r = optimizer_range(z, u, param, z->model->dtype == DTYPE_FP32 ? param : (char *)unit->master);
        o->rule->update(&r, 1, a, z->stream);
        offload_store_weights(&z->offload, u, param, z->stream);
    }
    zero_weights_changed(z);
}

// The same for a piece of what lives in host memory, by the CPU, in the worker's thread. context: Optimizer.on_host.
static void optimizer_apply_piece(void *context, const OffloadPiece *p, const PieceArrays *arrays) {
    const HostUpdate *u = (const HostUpdate *)context;
    const Model *m = u->z->model;
    UpdateRange r;
    memset(&r, 0, sizeof r);
    r.param = tensor1(arrays->at[HOST_WEIGHT], m->dtype, p->numel);
    r.master = tensor1(arrays->at[HOST_MASTER], master_dtype(m), p->numel);
    r.grad = tensor1(arrays->at[HOST_GRAD], zero_shard_dtype(u->z), p->numel);
    for (int i = 0; i < u->z->n_states; i++) r.state[i] = tensor1(arrays->at[HOST_STATE_0 + i], DTYPE_FP32, p->numel);
    r.decays = p->decays ? p->numel : 0;
    u->rule->update(&r, 1, &u->args, NULL);
}

// Applies the gradients in zero's shards. n_tokens: tokens of the global batch, whose losses the ranks' o->sums[SUM_LOSS] hold.
// state: what this rank holds, and must not differ from the others'.
static OptimizerStats optimizer_step(Optimizer *o, Zero *z, int64_t n_tokens, const RankState *state, RankWishes wishes) {
    const Config *cfg = o->cfg;
    UpdateArgs a = {schedule_lr(cfg, o->applied_updates), {0, 0}, o->applied_updates, o->control, &cfg->optimizer, false};
    schedule_betas(cfg, o->applied_updates, a.betas);
    optimizer_decide(o, z, state, wishes);
    zero_update_waits(z);
    optimizer_apply(o, z, &a);

    event_sync(o->decided); // and the device still has the update to do
    offload_take_gradients_end(&z->offload);
    Group g = z->job_group;
    if (!agree_sums(o->host_sums[SUM_HASH], o->host_sums[SUM_HASH_SQUARES], g.size)) agree_require(state, g.rank, g.size);
    OptimizerStats s;
    memset(&s, 0, sizeof s);
    s.loss_sum = o->host_sums[SUM_LOSS];
    s.stop = o->host_sums[SUM_STOP] > 0;
    s.save = o->host_sums[SUM_SAVE] > 0;
    s.written = o->host_sums[SUM_WRITTEN] == (double)g.size;
    s.busy_ms = o->host_sums[SUM_BUSY];
    s.loss_scale = o->scaler.scale;
    s.lr = a.lr;
    s.grad_norm = o->host_control->grad_norm;
    s.clip_factor = o->host_control->clip_factor;
    s.skipped = !o->host_control->apply;
    if (s.skipped) {
        o->skipped++;
        o->consecutive_skipped++;
        optimizer_judge(o, z, s.loss_sum / (double)n_tokens, s.grad_norm, (int64_t)state->step);
        return s;
    }
    o->on_host.z = z;
    o->on_host.rule = o->rule;
    o->on_host.args = a;
    o->on_host.args.on_host = true;
    o->on_host.args.control = &o->on_host.control;
    o->on_host.control = *o->host_control;
    zero_update_on_host(z, optimizer_apply_piece, &o->on_host);
    loss_scaler_update(&o->scaler, false);
    o->applied_updates++;
    o->consecutive_skipped = 0;
    return s;
}
