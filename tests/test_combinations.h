// test_combinations.h - the same training under every layout: tensor, pipeline, sequence and data parallelism with every schedule, ZeRO
// stage, recomputation, offload, accumulation, type and pieces of rows, against one rank. Run with mpirun -n 2, 4 or 8 ./test_gpt combinations.
//
// All combinations would take hours. What breaks is nearly always the meeting of two of them (Kuhn et al. 2004), so the rows cover
// every pair of values that some legal combination has: a greedy choice out of all legal ones, the same on all ranks.
#pragma once
#include "test_parallel.h"

enum { COMBINATION_UPDATES = 4, COMBINATION_SAMPLES = 32, COMBINATION_FACTORS = 9, COMBINATION_LEVELS = 24 };

// A combination: one level of each factor.
typedef struct {
    int level[COMBINATION_FACTORS];
} Combination;

enum { FACTOR_AXES, FACTOR_SCHEDULE, FACTOR_STAGE, FACTOR_RECOMPUTE, FACTOR_OFFLOAD, FACTOR_ACCUMULATION, FACTOR_DTYPE, FACTOR_TIED, FACTOR_PIECES };

static const PipelineSchedule combination_schedules[] = {PIPELINE_1F1B, PIPELINE_GPIPE, PIPELINE_INTERLEAVED, PIPELINE_ZB_H1, PIPELINE_ZB_V};
static const char *const combination_schedule_names[] = {"1F1B", "GPipe", "Interleaved", "ZB-H1", "ZB-V"};
static const RecomputePolicy combination_policies[] = {RECOMPUTE_NONE, RECOMPUTE_FFN, RECOMPUTE_BLOCK};
static const char *const combination_offloads[] = {"none", "optimizer", "optimizer and weights"};
static const int64_t combination_accumulations[] = {4, 8};
static const int64_t combination_pieces[] = {1, 2, 4};
static const DType combination_dtypes[] = {DTYPE_FP32, DTYPE_BF16};

// The ways to share a world out over the axes, as far as heads and layers of the model below allow.
static int combination_axes(int world, GridAxes axes[COMBINATION_LEVELS]) {
    int n = 0;
    for (int tp = 1; tp <= 4; tp *= 2)
        for (int sp = 1; sp <= 4; sp *= 2)
            for (int pp = 1; pp <= 4; pp *= 2) {
                if (world % (tp * sp * pp) != 0 || tp * sp > 4) continue;
                CHECK(n < COMBINATION_LEVELS, "%d ways to lay out %d ranks", n, world);
                axes[n++] = {pp, world / (tp * sp * pp), sp, tp};
            }
    return n;
}

static bool combination_is_legal(const Combination *l, const GridAxes *axes) {
    GridAxes a = axes[l->level[FACTOR_AXES]];
    int stage = l->level[FACTOR_STAGE], offload = l->level[FACTOR_OFFLOAD];
    if (a.pp == 1 && l->level[FACTOR_SCHEDULE] != 0) return false; // there is one program then
    if (a.tp == 1 && l->level[FACTOR_PIECES] != 0) return false; // nothing travels
    if (offload > 0 && stage < (offload == 1 ? 1 : 3)) return false;
    return COMBINATION_SAMPLES % (a.dp * combination_accumulations[l->level[FACTOR_ACCUMULATION]]) == 0;
}

// Chooses rows until every pair of levels that a legal row has is in one of them. The caller frees the rows.
static Combination *combination_choose(int world, int *n_rows) {
    GridAxes axes[COMBINATION_LEVELS];
    const int levels[COMBINATION_FACTORS] = {combination_axes(world, axes), 5, 4, 3, 3, 2, 2, 2, 3};
    static bool wanted[COMBINATION_FACTORS][COMBINATION_FACTORS][COMBINATION_LEVELS][COMBINATION_LEVELS];
    memset(wanted, 0, sizeof wanted);
    int all = 1, n_legal = 0;
    for (int f = 0; f < COMBINATION_FACTORS; f++) all *= levels[f];
    Combination *legal = (Combination *)host_alloc(sizeof(Combination) * (size_t)all), *chosen = (Combination *)host_alloc(sizeof(Combination) * (size_t)all);
    for (int i = 0; i < all; i++) {
        Combination l;
        for (int f = 0, rest = i; f < COMBINATION_FACTORS; rest /= levels[f++]) l.level[f] = rest % levels[f];
        if (!combination_is_legal(&l, axes)) continue;
        legal[n_legal++] = l;
        for (int f = 0; f < COMBINATION_FACTORS; f++)
            for (int g = 0; g < f; g++) wanted[f][g][l.level[f]][l.level[g]] = true;
    }
    for (*n_rows = 0;;) {
        int best = -1, most = 0;
        for (int i = 0; i < n_legal; i++) {
            int brings = 0;
            for (int f = 0; f < COMBINATION_FACTORS; f++)
                for (int g = 0; g < f; g++) brings += wanted[f][g][legal[i].level[f]][legal[i].level[g]];
            if (brings > most) best = i, most = brings;
        }
        if (best < 0) break;
        for (int f = 0; f < COMBINATION_FACTORS; f++)
            for (int g = 0; g < f; g++) wanted[f][g][legal[best].level[f]][legal[best].level[g]] = false;
        chosen[(*n_rows)++] = legal[best];
    }
    free(legal);
    return chosen;
}

// Eight layers, so that four stages of two chunks have one each; eight heads and 16 tokens, which 4 ranks share; and a
// vocabulary that nothing divides.
static Config *combination_config(const Combination *l, GridAxes a) {
    Config *c = tiny_config();
    c->model.n_layer = 8;
    const PipelineSchedule schedule = combination_schedules[l->level[FACTOR_SCHEDULE]];
    const int64_t channels = KERNELS_ON_GPU ? 8 : 4; // of a head
    c->model.n_head = 8, c->model.n_embd = 8 * channels;
    c->model.n_inner = schedule == PIPELINE_ZB_H1 || schedule == PIPELINE_ZB_V ? 4 * c->model.n_embd : 12 * channels; // 4: pending gradients have room in the MLP's inner layer
    c->model.vocab_size = 131;
    c->model.tie_word_embeddings = l->level[FACTOR_TIED];
    c->run.seq_len = 16;
    c->batch.train_batch_size = COMBINATION_SAMPLES;
    c->batch.gradient_accumulation_steps = combination_accumulations[l->level[FACTOR_ACCUMULATION]];
    c->batch.train_micro_batch_size_per_gpu = COMBINATION_SAMPLES / c->batch.gradient_accumulation_steps / a.dp;
    c->zero.stage = l->level[FACTOR_STAGE];
    c->zero.offload_optimizer.device = l->level[FACTOR_OFFLOAD] >= 1 ? OFFLOAD_CPU : OFFLOAD_NONE;
    c->zero.offload_param.device = l->level[FACTOR_OFFLOAD] == 2 ? OFFLOAD_CPU : OFFLOAD_NONE;
    c->zero.offload_optimizer.ratio = 1;
    c->zero.offload_optimizer.pin_memory = c->zero.offload_param.pin_memory = true;
    c->zero.sub_group_size = 1 << 30;
    c->activation_checkpointing.policy = combination_policies[l->level[FACTOR_RECOMPUTE]];
    c->activation_checkpointing.activation_checkpoint_interval = c->activation_checkpointing.policy == RECOMPUTE_BLOCK ? 2 : 0;
    c->parallel.tensor = a.tp, c->parallel.pipeline = a.pp, c->parallel.sequence = a.sp, c->parallel.data = a.dp;
    c->parallel.pipeline_schedule = schedule;
    c->parallel.virtual_pipeline = a.pp > 1 && (c->parallel.pipeline_schedule == PIPELINE_INTERLEAVED || c->parallel.pipeline_schedule == PIPELINE_ZB_V) ? 2 : 1;
    c->run.tensor_parallel_pieces = combination_pieces[l->level[FACTOR_PIECES]];
    config_set_dtype(c, combination_dtypes[l->level[FACTOR_DTYPE]]);
    c->zero.communication_data_type = c->dtype;
    return c;
}

static ProcessGrid combination_grid(GridAxes a) { return grid_make(test_world.rank, a); }

static float *combination_run(Config *c, ProcessGrid grid, StepStats *stats, int64_t *n, double *val_loss) {
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    trainer_init_core(trainer, c, grid, true, c->batch.train_micro_batch_size_per_gpu);
    trainer->metrics.log_fd = -1;
    dataloader_open(&trainer->train, tiny_tokens, c->model.vocab_size, c->run.seq_len, c->batch.train_batch_size, false, false, 1, "data.train");
    trainer->has_train = true;
    dataloader_open(&trainer->val, tiny_tokens, c->model.vocab_size, c->run.seq_len, 1, false, false, 1, "data.val");
    trainer->val.n_samples = min_i64(trainer->val.n_samples, 13); // a remainder for every layout
    trainer->has_val = true;
    zero_init_weights(&trainer->zero, (uint64_t)c->run.seed);
    for (int k = 0; k < COMBINATION_UPDATES; k++) {
        stats[k] = train_step(trainer);
        if (k == 1) *val_loss = evaluate(trainer);
    }
    float *w = trainer_weights(trainer, n);
    trainer_free(trainer);
    free(trainer);
    return w;
}

// One rank does the same work, whatever the layout: the same samples, summed in another order.
static Config *combination_reference(const Config *c) {
    Config *one = (Config *)host_alloc(sizeof(Config));
    *one = *c;
    one->parallel.tensor = one->parallel.pipeline = one->parallel.sequence = one->parallel.data = one->parallel.virtual_pipeline = 1;
    one->parallel.pipeline_schedule = PIPELINE_1F1B;
    one->batch.train_micro_batch_size_per_gpu = COMBINATION_SAMPLES / one->batch.gradient_accumulation_steps;
    one->zero.stage = 0;
    one->zero.offload_optimizer.device = one->zero.offload_param.device = OFFLOAD_NONE;
    one->activation_checkpointing.policy = RECOMPUTE_NONE;
    one->activation_checkpointing.activation_checkpoint_interval = 0;
    return one;
}

static void combination_row(Test *t, const Combination *l, GridAxes a) {
    char what[220];
    Config *c = combination_config(l, a), *one = combination_reference(c);
    snprintf(what, sizeof what, "tp %d, pp %d, sp %d, dp %d, %s, stage %d, recompute %s, offload %s, accumulation %" PRId64 ", %s, %s, %" PRId64 " pieces", a.tp, a.pp, a.sp, a.dp, combination_schedule_names[l->level[FACTOR_SCHEDULE]],
             l->level[FACTOR_STAGE], recompute_names[c->activation_checkpointing.policy], combination_offloads[l->level[FACTOR_OFFLOAD]], c->batch.gradient_accumulation_steps, dtype_name(c->dtype), l->level[FACTOR_TIED] ? "tied" : "untied", c->run.tensor_parallel_pieces);
    StepStats got[COMBINATION_UPDATES], want[COMBINATION_UPDATES];
    double val, want_val;
    int64_t n, want_n;
    const bool exact = c->dtype == DTYPE_FP32;
    float *w = combination_run(c, combination_grid(a), got, &n, &val), *want_w = combination_run(one, grid_of_one(), want, &want_n, &want_val);
    // fp32: as house rules for other orders of sums. bf16: 8 bits of mantissa, and sums over ranks rounded once more: a loss averages that
    // out to 2e-3; a norm is dominated by fewer terms.
    const double loss_bound = exact ? 1e-5 : 2e-3, norm_bound = exact ? 1e-5 : 3e-2;
    for (int k = 0; k < COMBINATION_UPDATES; k++) {
        expect_near(t, what, got[k].loss, want[k].loss, loss_bound * want[k].loss);
        expect_near(t, what, got[k].grad_norm, want[k].grad_norm, norm_bound * want[k].grad_norm);
    }
    expect_near(t, what, val, want_val, loss_bound * want_val);
    expect_equal_i64(t, what, n, want_n);
    // Adam moves every weight by about lr an update, whatever its gradient; where that is near zero its sign may be another one.
    double worst = 0, sum = 0;
    for (int64_t i = 0; i < n; i++) worst = fmax(worst, fabs(w[i] - want_w[i])), sum += fabs(w[i] - want_w[i]);
    expect_near(t, what, worst, 0, 2 * COMBINATION_UPDATES * c->optimizer.lr);
    expect_near(t, what, sum / (double)n, 0, (exact ? 1e-3 : 0.1) * COMBINATION_UPDATES * c->optimizer.lr);
    free(w);
    free(want_w);
    free(c);
    free(one);
}

static void combinations_test(Test *t) {
    const int world = test_world.world;
    if (world != 2 && world != 4 && world != 8) { test_skip(t, "for 2, 4 or 8 ranks"); return; }
    GridAxes axes[COMBINATION_LEVELS];
    int n_rows;
    combination_axes(world, axes);
    Combination *row = combination_choose(world, &n_rows);
    const char *only = getenv("COMBINATIONS"); // "first:last" rows, for whoever looks for a fault, or has no time for all
    int first = 0, last = n_rows - 1;
    if (only) CHECK(sscanf(only, "%d:%d", &first, &last) == 2, "COMBINATIONS=%s: give first:last", only);
    for (int i = first; i <= last && i < n_rows; i++) combination_row(t, &row[i], axes[row[i].level[FACTOR_AXES]]);
    free(row);
}

static const TestRow combination_tests[] = {{"pairwise", combinations_test}, {NULL, NULL}};
