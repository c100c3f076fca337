// test_recompute.h - activation checkpointing: whatever is kept, recomputed or moved to the host, every bit of a run stays, and the
// memory is what the plan says. For one rank or several.
#pragma once
#include "test_parallel.h"

// Activation checkpointing changes no bit: every step of the ladder, segments of all lengths, checkpoints on the host, against a
// run that keeps everything.
static void recompute_row(Test *t, DType dtype, int64_t stage, int64_t accumulation, int64_t live) {
    Config *c = parallel_config(accumulation);
    config_set_dtype(c, dtype);
    c->model.n_layer = 5;
    c->zero.stage = stage;
    c->zero.max_live_parameters = live;
    StepStats want[2][PARALLEL_UPDATES], got[PARALLEL_UPDATES];
    float *want_weights[2];
    double want_val[2], val;
    int64_t n;
    for (int apart = 0; apart < 2; apart++) {
        c->run.gelu_apart = apart;
        want_weights[apart] = parallel_run(c, test_grid(), want[apart], &n, &want_val[apart], NULL);
    }
    static const struct { RecomputePolicy policy; int64_t segments, interval; bool host; const char *what; } row[] = {
        {RECOMPUTE_NORMS, 0, 0, false, "norms"}, {RECOMPUTE_GELU, 0, 0, false, "gelu"}, {RECOMPUTE_FFN, 0, 0, false, "ffn"}, {RECOMPUTE_QKV, 0, 0, false, "qkv"},
        {RECOMPUTE_BLOCK, 0, 0, false, "block"}, {RECOMPUTE_BLOCK, 1, 0, false, "1 segment"}, {RECOMPUTE_BLOCK, 2, 0, false, "2 segments"}, {RECOMPUTE_BLOCK, 0, 2, false, "segments of 2"},
        {RECOMPUTE_BLOCK, 0, 0, true, "block, on the host"}, {RECOMPUTE_BLOCK, 1, 0, true, "1 segment, on the host"}, {RECOMPUTE_BLOCK, 2, 0, true, "2 segments, on the host"},
        {RECOMPUTE_BLOCK, 100, 0, true, "more segments than blocks, on the host"},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        int apart = row[i].policy == RECOMPUTE_GELU || (row[i].policy > RECOMPUTE_GELU && i % 2);
        c->run.gelu_apart = apart;
        c->activation_checkpointing.policy = row[i].policy;
        c->activation_checkpointing.number_checkpoints = row[i].segments;
        c->activation_checkpointing.activation_checkpoint_interval = row[i].interval;
        c->activation_checkpointing.cpu_checkpointing = row[i].host;
        c->activation_checkpointing.profile = i % 3 == 0;
        c->activation_checkpointing.synchronize_checkpoint_boundary = i % 4 == 0;
        float *weights = parallel_run(c, test_grid(), got, &n, &val, NULL);
        expect_same_run(t, row[i].what, got, weights, want[apart], want_weights[apart], n);
        expect_same_bytes(t, row[i].what, &val, &want_val[apart], 8);
        free(weights);
    }
    for (int apart = 0; apart < 2; apart++) free(want_weights[apart]);
    free(c);
}
static void test_recompute_fp32(Test *t) { recompute_row(t, DTYPE_FP32, 0, 2, 1 << 30); }
static void test_recompute_bf16(Test *t) { recompute_row(t, DTYPE_BF16, 3, 1, 0); }
static void test_recompute_fp16(Test *t) { recompute_row(t, DTYPE_FP16, 2, 1, 1 << 30); }
static void test_recompute_stage_3(Test *t) { recompute_row(t, DTYPE_FP32, 3, 2, 20000); }

static const TestRow recompute_tests[] = {
    {"no bit changes, stage 0, fp32", test_recompute_fp32}, {"no bit changes, stage 3, bf16", test_recompute_bf16},
    {"no bit changes, stage 2, fp16", test_recompute_fp16}, {"no bit changes, stage 3, fp32", test_recompute_stage_3},
    {NULL, NULL},
};
