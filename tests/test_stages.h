// test_stages.h - the model on several stages of a pipeline trains as it does on one. mpirun -n 1, 2, 4 or 8 ./test_gpt stages.
//
// Class A, bit for bit, against one stage with the same number of data-parallel ranks: every schedule, wherever the model is cut, every
// ZeRO stage, with and without activation checkpointing, whether the weights' gradients come later or not. A schedule with split
// backward sums micro-batches before ranks at every ZeRO stage, as stages 0 and 1 do. Class B, 1e-5: a tied table on two stages, whose
// gradient is then added in another order.
#pragma once
#include "test_parallel.h"

enum { STAGES_UPDATES = 3, STAGES_SAMPLES = 8, STAGES_BLOCKS = 9 }; // updates; samples of a micro-batch on all ranks; blocks of the model

// The grid with so many stages, all other ranks data parallel; and the same data-parallel ranks without a pipeline: on the first stage's
// ranks alone, which run it while the others wait.
static ProcessGrid grid_of_stages(int p) {
    GridAxes axes = {p, test_world.world / p, 1, 1};
    return grid_make(test_world.rank, axes);
}

typedef struct {
    PipelineSchedule schedule;
    int p;            // stages
    int v;            // chunks on each, with Interleaved
    int64_t zero_stage, accumulation;
    RecomputePolicy policy;
    int64_t segments;
    bool on_host, uniform, tied, graphs, offload;
    DType dtype;
    bool wide;        // an MLP of 4 C: pending gradients have room in its inner layer
} StagesRow;

static Config *stages_config(const StagesRow *row, int dp) {
    Config *c = parallel_config(row->accumulation);
    config_set_dtype(c, row->dtype);
    c->model.n_layer = STAGES_BLOCKS;
    if (row->wide) c->model.n_inner = 4 * c->model.n_embd;
    c->model.tie_word_embeddings = row->tied;
    c->zero.stage = row->zero_stage;
    c->zero.max_live_parameters = 0;
    c->parallel.pipeline_schedule = row->schedule;
    c->parallel.virtual_pipeline = row->v;
    c->parallel.pipeline_partition = row->uniform ? PARTITION_UNIFORM : PARTITION_BEST;
    c->activation_checkpointing.policy = row->policy;
    c->activation_checkpointing.number_checkpoints = row->segments;
    c->activation_checkpointing.cpu_checkpointing = row->on_host;
    c->run.gelu_apart = row->policy != RECOMPUTE_NONE;
    c->run.cuda_graphs = row->graphs;
    if (row->offload) c->zero.offload_optimizer.device = OFFLOAD_CPU, c->zero.offload_optimizer.ratio = 0.7, c->zero.sub_group_size = 3000;
    c->batch.train_batch_size = STAGES_SAMPLES * row->accumulation;
    c->batch.train_micro_batch_size_per_gpu = STAGES_SAMPLES / dp;
    c->run.seq_len = 11;
    return c;
}



typedef struct {
    StepStats stats[STAGES_UPDATES];
    double val_loss;
    float *weights;
    int64_t n;
} StagesRun;

static StagesRun stages_run(Test *t, Config *c, ProcessGrid grid) {
    StagesRun r;
    memset(&r, 0, sizeof r);
    int64_t base = device_allocated_bytes();
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    trainer_init_core(trainer, c, grid, true, c->batch.train_micro_batch_size_per_gpu);
    trainer->metrics.log_fd = -1;
    dataloader_open(&trainer->train, tiny_tokens, 131, c->run.seq_len, c->batch.train_batch_size, false, false, 1, "data.train");
    trainer->has_train = true;
    dataloader_open(&trainer->val, tiny_tokens, 131, c->run.seq_len, 1, false, false, 1, "data.val");
    trainer->has_val = true;
    zero_init_weights(&trainer->zero, (uint64_t)c->run.seed);
    for (int k = 0; k < STAGES_UPDATES; k++) {
        int64_t frees = device_frees();
        r.stats[k] = train_step(trainer);
        // On a GPU that would wait for all its work, so also for what another stage has not sent yet. (The CPU's scratch gives nothing back.)
        expect_equal_i64(t, "pieces of device memory given back by an update", device_frees(), frees);
        if (k == 0) { // a sample on the way is shorter than a micro-batch, in all chunks
            int32_t text[11] = {1, 2, 3};
            float logits[512];
            CHECK(c->run.seq_len <= 11 && trainer->model.Vp <= 512, "a larger model than there is room for");
            zero_set_uses(&trainer->zero, trainer->eval_uses, trainer->n_eval_uses);
            next_logits(trainer, text, 3, logits);
        }
        if (k == 1) r.val_loss = evaluate(trainer);
    }
    r.weights = trainer_weights(trainer, &r.n);
    int64_t allocated = 0;
    for (int chunk = 0; chunk < trainer->pipe.n_chunks; chunk++) allocated += trainer->acts[chunk].allocated;
    expect_equal_i64(t, "activations", allocated, trainer->planned.bytes[MEMORY_ACTIVATIONS]);
    for (int k = 0; k <= MEMORY_BUFFERS; k++) expect_equal_i64(t, memory_names[k], trainer->zero.allocated.bytes[k], trainer->planned.bytes[k]);
    trainer_free(trainer);
    free(trainer);
    expect_equal_i64(t, "bytes left", device_allocated_bytes(), base);
    return r;
}

// One stage on dp data-parallel ranks: all ranks of the job make the grid, which then has world / dp copies of the same run.
static StagesRun stages_reference(Test *t, Config *c, int dp) {
    GridAxes axes = {1, dp, 1, 1};
    ProcessGrid g = grid_make(test_world.rank % dp, axes);
    g.first_rank = test_world.rank / dp * dp;
    return stages_run(t, c, g);
}

static void stages_row(Test *t, StagesRow row) {
    int dp = test_world.world / row.p;
    char what[200];
    Config *c = stages_config(&row, dp);
    snprintf(what, sizeof what, "%s on %d stages, %d chunks, ZeRO %d on %d, %d micro-batches, %s%s, %s%s%s", pipeline_names[row.schedule], row.p, row.v, (int)row.zero_stage, dp, (int)row.accumulation,
             recompute_names[row.policy], row.on_host ? " on the host" : "", dtype_name(row.dtype), row.tied ? ", tied" : "", row.graphs ? ", graphs" : "");
    StagesRun got = stages_run(t, c, grid_of_stages(row.p));
    bool split = row.schedule == PIPELINE_ZB_H1 || row.schedule == PIPELINE_ZB_V;
    c->zero.stage = split ? min_i64(row.zero_stage, 1) : row.zero_stage;
    StagesRun want = stages_reference(t, c, dp);
    expect_equal_i64(t, "parameters", got.n, want.n);
    for (int k = 0; k < STAGES_UPDATES; k++) {
        if (row.tied) {
            expect_near(t, what, got.stats[k].loss, want.stats[k].loss, 1e-5 * want.stats[k].loss);
            expect_near(t, what, got.stats[k].grad_norm, want.stats[k].grad_norm, 1e-5 * want.stats[k].grad_norm);
        } else {
            expect_same_bytes(t, what, &got.stats[k].loss, &want.stats[k].loss, 8);
            expect_same_bytes(t, what, &got.stats[k].grad_norm, &want.stats[k].grad_norm, 8);
        }
    }
    expect_near(t, what, got.val_loss, want.val_loss, row.tied ? 1e-5 * want.val_loss : 0);
    if (!row.tied) expect_same_bytes(t, what, got.weights, want.weights, want.n * 4);
    if (t->failures && test_world.rank == 0) fprintf(stderr, "in %s\n", what);
    free(got.weights);
    free(want.weights);
    free(c);
}

// Every schedule on as many stages as divide the ranks.
static void test_stages_schedules(Test *t) {
    for (int p = 1; p <= test_world.world; p++) {
        if (test_world.world % p || p == 3) continue;
        for (int schedule = PIPELINE_1F1B; schedule <= PIPELINE_ZB_V; schedule++) {
            if (p * (schedule == PIPELINE_ZB_V || schedule == PIPELINE_INTERLEAVED ? 2 : 1) > STAGES_BLOCKS) continue;
            stages_row(t, {(PipelineSchedule)schedule, p, p == 2 ? 3 : 2, 0, schedule == PIPELINE_INTERLEAVED ? p : 3, RECOMPUTE_NONE, 0, false, false, false, false, false, DTYPE_FP32});
        }
    }
}

// Pairs of everything that a pipeline meets, once or more. Micro-batches: of an update, or with Interleaved for each stage.
static void stages_table(Test *t, int p) {
    static const StagesRow table[] = {
        //                  p  v  ZeRO n  recompute        segments, host, uniform, tied, graphs, offload, type, wide
        {PIPELINE_1F1B,        0, 2, 1, 4, RECOMPUTE_BLOCK, 0, false, true, false, true, true, DTYPE_FP32},
        {PIPELINE_1F1B,        0, 2, 3, 5, RECOMPUTE_BLOCK, 3, true, false, false, false, false, DTYPE_BF16},
        {PIPELINE_1F1B,        0, 2, 2, 1, RECOMPUTE_GELU, 0, false, true, true, false, true, DTYPE_FP32},
        {PIPELINE_GPIPE,       0, 2, 2, 2, RECOMPUTE_QKV, 0, false, false, false, true, false, DTYPE_FP16},
        {PIPELINE_GPIPE,       0, 2, 3, 3, RECOMPUTE_NORMS, 0, false, true, true, false, false, DTYPE_FP32},
        {PIPELINE_INTERLEAVED, 0, 2, 3, 2, RECOMPUTE_BLOCK, 1, true, true, false, true, false, DTYPE_FP32},
        {PIPELINE_INTERLEAVED, 0, 2, 1, 1, RECOMPUTE_FFN, 0, false, false, true, false, true, DTYPE_FP32},
        {PIPELINE_INTERLEAVED, 0, 2, 2, 1, RECOMPUTE_NONE, 0, false, true, false, false, false, DTYPE_BF16},
        {PIPELINE_ZB_H1,       0, 2, 3, 5, RECOMPUTE_FFN, 0, false, false, false, true, false, DTYPE_BF16},
        {PIPELINE_ZB_H1,       0, 2, 1, 2, RECOMPUTE_BLOCK, 2, true, true, false, true, true, DTYPE_FP32},
        {PIPELINE_ZB_H1,       0, 2, 2, 3, RECOMPUTE_NONE, 0, false, false, true, false, false, DTYPE_FP32},
        {PIPELINE_ZB_H1,       0, 2, 0, 5, RECOMPUTE_NONE, 0, false, true, false, true, false, DTYPE_BF16, true},
        {PIPELINE_ZB_V,        0, 2, 3, 7, RECOMPUTE_GELU, 0, false, true, false, false, true, DTYPE_FP32, true},
        {PIPELINE_ZB_V,        0, 2, 2, 3, RECOMPUTE_BLOCK, 0, true, false, true, true, false, DTYPE_FP32},
        {PIPELINE_ZB_V,        0, 2, 1, 4, RECOMPUTE_BLOCK, 3, false, true, false, false, false, DTYPE_FP16},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        StagesRow row = table[i];
        row.p = p;
        if (row.schedule == PIPELINE_INTERLEAVED) row.accumulation *= p;
        if (p * (row.schedule == PIPELINE_ZB_V || row.schedule == PIPELINE_INTERLEAVED ? 2 : 1) <= STAGES_BLOCKS) stages_row(t, row);
    }
}
static void test_stages_two(Test *t) {
    if (test_world.world % 2) { test_skip(t, "two stages do not divide %d ranks", test_world.world); return; }
    stages_table(t, 2);
}
static void test_stages_four(Test *t) {
    if (test_world.world % 4) { test_skip(t, "four stages do not divide %d ranks", test_world.world); return; }
    stages_table(t, 4);
}

static const TestRow stages_tests[] = {{"schedules", test_stages_schedules}, {"two stages", test_stages_two}, {"four stages", test_stages_four}, {NULL, NULL}};
