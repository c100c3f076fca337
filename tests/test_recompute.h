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
        c->run.cuda_graphs = i % 2; // the same kernels by another launch, whatever lies where
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

// Two micro-batches in flight share what is recomputed and the buffers of checkpoints: forward, forward, backward, backward gives
// the bits of one after the other.
static void test_recompute_slots(Test *t) {
    Config *c = parallel_config(2);
    c->model.n_layer = 5;
    c->zero.stage = 3;
    c->zero.max_live_parameters = 0;
    c->activation_checkpointing.policy = RECOMPUTE_BLOCK;
    c->batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / test_world.world;
    for (int variant = 0; variant < 4; variant++) {
        c->activation_checkpointing.cpu_checkpointing = variant % 2;
        c->activation_checkpointing.number_checkpoints = variant / 2 ? 2 : 0;
        StepStats s[2];
        float *weights[2];
        int64_t n;
        for (int flight = 0; flight < 2; flight++) {
            Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
            trainer_init_core(trainer, c, test_grid(), true, c->batch.train_micro_batch_size_per_gpu);
            trainer->metrics.log_fd = -1;
            if (flight) {
                static const Instr both[] = {{OP_LOAD, 0, 0}, {OP_FWD, 0, 0}, {OP_LOAD, 1, 0}, {OP_FWD, 1, 0}, {OP_BWD, 0, 0}, {OP_BWD, 1, 0}};
                memcpy(trainer->pipe.prog, both, sizeof both);
                trainer->pipe.n_slots[0] = 2;
                const ChunkCost cost = {1, 1, 1};
                PipelineReport r = pipeline_simulate(&trainer->pipe, &cost, pipeline_channels);
                expect_true(t, !r.wrong[0], "%s", r.wrong);
                acts_free(trainer->acts);
                acts_init(trainer->acts, acts_layout(c, &trainer->model, 2, c->batch.train_micro_batch_size_per_gpu, true), NULL, false, false);
                free(trainer->train_uses);
                free(trainer->eval_uses);
                trainer->n_train_uses = 0;
                trainer_list_uses(trainer);
                expect_equal_i64(t, "bytes of two slots", trainer->acts->allocated, acts_bytes(&trainer->acts->layout));
            }
            dataloader_open(&trainer->train, tiny_tokens, 131, c->run.seq_len, c->batch.train_batch_size, false, false, 1, "data.train");
            trainer->has_train = true;
            zero_init_weights(&trainer->zero, (uint64_t)c->run.seed);
            for (int k = 0; k < 3; k++) s[flight] = train_step(trainer);
            weights[flight] = trainer_weights(trainer, &n);
            trainer_free(trainer);
            free(trainer);
        }
        expect_same_bytes(t, "loss", &s[1].loss, &s[0].loss, 8);
        expect_same_bytes(t, "gradient norm", &s[1].grad_norm, &s[0].grad_norm, 8);
        expect_same_bytes(t, "weights", weights[1], weights[0], n * 4);
        free(weights[0]);
        free(weights[1]);
    }
    free(c);
}

// Of all numbers of blocks and segments: segments follow each other without a gap and differ by a block at most; a backward pass
// visits each unit once in descending order, and before a segment's all its blocks but the last go forward again.
static void test_recompute_visits(Test *t) {
    for (int L = 1; L <= 13; L++) {
        Config *c = tiny_config();
        c->model.n_layer = L;
        Model m;
        model_init(&m, &c->model, model_whole, DTYPE_FP32, 1 << 20, false, NULL);
        ActVisit *visit = (ActVisit *)host_alloc(sizeof(ActVisit) * 2 * (size_t)m.table.n_units);
        for (int n = 1; n <= L; n++) {
            ActLayout l = {&m, 1, 1, 4, true, RECOMPUTE_BLOCK, n, false, 0, L + 1, 0, false, false, (int)ceil_div(L, n)};
            int next = 1, shortest = L;
            for (int s = 0; s < n; s++) {
                int first = acts_segment_first(&l, s), last = acts_segment_last(&l, s);
                expect_equal_i64(t, "first of a segment", first, next);
                for (int u = first; u <= last; u++) expect_equal_i64(t, "segment of a unit", acts_segment_of(&l, u), s);
                shortest = (int)min_i64(shortest, last - first + 1);
                next = last + 1;
            }
            expect_equal_i64(t, "end of the last segment", next, L + 1);
            expect_true(t, l.longest - shortest <= 1, "%d blocks, %d segments: of %d to %d", L, n, shortest, l.longest);
            int visits = acts_visits(&l, ACTS_BACKWARD, visit), expected = L + 1, ready = L + 1;
            for (int i = 0; i < visits; i++) {
                if (visit[i].pass == ACTS_AGAIN) {
                    int segment = acts_segment_of(&l, expected); // that of the next unit to go backward
                    expect_equal_i64(t, "goes forward again in order", visit[i].unit, ready > expected ? acts_segment_first(&l, segment) : ready);
                    ready = visit[i].unit + 1;
                    continue;
                }
                expect_equal_i64(t, "goes backward", visit[i].unit, expected);
                if (acts_is_block(&l, expected) && expected == acts_segment_last(&l, acts_segment_of(&l, expected)))
                    expect_true(t, acts_position(&l, expected) == 0 || ready == expected, "unit %d goes backward with unit %d not made again", expected, ready);
                expected--;
                if (visit[i].unit == acts_segment_first(&l, acts_segment_of(&l, (int)max_i64(1, visit[i].unit)))) ready = L + 1;
            }
            expect_equal_i64(t, "all units went backward", expected, -1);
            expect_equal_i64(t, "visits", visits, L + 2 + L - n);
        }
        free(visit);
        model_free(&m);
        free(c);
    }
}

// What each step of the ladder saves and costs, against counts by hand: of a block, in elements of the model's type and in fp32
// numbers a token. And it is what is allocated; 8 blocks that keep their inputs alone take less than half.
static void test_recompute_memory(Test *t) {
    Config *c = parallel_config(1);
    c->model.n_layer = 8;
    c->batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / test_world.world;
    for (int half = 0; half < 2; half++) {
        config_set_dtype(c, half ? DTYPE_BF16 : DTYPE_FP32);
        c->zero.stage = half ? 3 : 0;
        Model m;
        model_init(&m, &c->model, model_whole, c->dtype, c->run.logits_bytes, true, NULL);
        const int64_t N = c->batch.train_micro_batch_size_per_gpu * c->run.seq_len, C = m.C, F = m.F, L = m.L, e = dtype_bytes(m.dtype), NH = m.NH;
        const int64_t gone[RECOMPUTE_POLICIES] = {0, 2 * C, 2 * C + F, 2 * C + 2 * F, 5 * C + 2 * F, 7 * C + 2 * F};
        const double flops[RECOMPUTE_POLICIES] = {0, 0, 0, 2.0 * (double)(C * F), (double)(2 * C * F + 6 * C * C), (double)(2 * C * F + 8 * C * C + 2 * c->run.seq_len * C)};
        int64_t everything = 0;
        c->run.gelu_apart = true;
        for (int k = 0; k < RECOMPUTE_POLICIES + 3; k++) {
            int policy = (int)min_i64(k, RECOMPUTE_BLOCK), segments = k == RECOMPUTE_POLICIES + 1 ? 3 : (int)L, longest = (int)ceil_div(L, segments);
            c->activation_checkpointing.policy = (RecomputePolicy)policy;
            c->activation_checkpointing.number_checkpoints = segments;
            c->activation_checkpointing.cpu_checkpointing = k == RECOMPUTE_POLICIES + 2;
            ActLayout l = acts_layout(c, &m, 1, c->batch.train_micro_batch_size_per_gpu, true);
            int64_t of_block = N * (gone[policy] * e + (policy == RECOMPUTE_BLOCK ? (4 + NH) * 4 : 0)), want;
            if (k == 0) everything = acts_bytes(&l);
            want = everything - L * of_block + longest * of_block - (L - segments - (longest - 1)) * N * C * e;
            if (k == RECOMPUTE_POLICIES + 2) want -= (L - CHECKPOINT_BUFFERS) * N * C * e;
            expect_equal_i64(t, recompute_names[policy], acts_bytes(&l), want);
            expect_equal_i64(t, "on the host", acts_host_bytes(&l), k == RECOMPUTE_POLICIES + 2 ? L * N * C * e : 0);
            double again = (double)L * flops[policy] + (double)((L - segments) * 2 * C * F);
            expect_near(t, "operations", acts_flops_per_token(&l), again, 1e-9 * again);
            if (policy == RECOMPUTE_BLOCK) expect_true(t, 2 * acts_bytes(&l) < everything, "%" PRId64 " bytes of %" PRId64, acts_bytes(&l), everything);
            expect_as_planned(t, c, test_grid(), true);
            expect_as_planned(t, c, test_grid(), false);
        }
        model_free(&m);
    }
    free(c);
}

// profile: every segment has a time, forward and backward, and together they take no longer than the update.
static void test_recompute_times(Test *t) {
    Config *c = parallel_config(1);
    c->model.n_layer = 5;
    c->batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / test_world.world;
    c->activation_checkpointing.policy = RECOMPUTE_BLOCK;
    c->activation_checkpointing.profile = true;
    for (int n = 1; n <= 5; n += 2) {
        c->activation_checkpointing.number_checkpoints = n;
        Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
        trainer_init_core(trainer, c, test_grid(), true, c->batch.train_micro_batch_size_per_gpu);
        trainer->metrics.log_fd = -1;
        dataloader_open(&trainer->train, tiny_tokens, 131, c->run.seq_len, c->batch.train_batch_size, false, false, 1, "data.train");
        trainer->has_train = true;
        zero_init_weights(&trainer->zero, (uint64_t)c->run.seed);
        StepStats s = train_step(trainer);
        double forward[5], backward[5], sum = 0;
        acts_times(trainer->acts, forward, backward);
        for (int i = 0; i < n; i++) {
            expect_true(t, forward[i] > 0 && backward[i] > 0, "segment %d of %d: %g ms forward, %g backward", i, n, forward[i], backward[i]);
            sum += forward[i] + backward[i];
        }
        expect_true(t, sum < s.step_ms, "%g ms in segments, %g in the update", sum, s.step_ms);
        log_checkpoint_times(trainer);
        trainer_free(trainer);
        free(trainer);
    }
    free(c);
}

static const TestRow recompute_tests[] = {
    {"visits", test_recompute_visits}, {"memory and operations", test_recompute_memory}, {"times", test_recompute_times}, {"two micro-batches in flight", test_recompute_slots},
    {"no bit changes, stage 0, fp32", test_recompute_fp32}, {"no bit changes, stage 3, bf16", test_recompute_bf16},
    {"no bit changes, stage 2, fp16", test_recompute_fp16}, {"no bit changes, stage 3, fp32", test_recompute_stage_3},
    {NULL, NULL},
};
