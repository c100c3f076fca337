// test_tensor.h - ranks that share matrices, sequences and batches against one rank that has all, in the same process. Run with
// mpirun -n 2, 3, 4, 6 or 8 ./test_gpt tensor: every way to cut so many ranks into data x sequence x tensor is tried.
//
// Sums of products are cut in other places than on one rank, so that bits differ (class B): in fp32 losses and norms agree to 1e-5
// over 20 updates. Within one grid what only moves data changes no bit (class A): recomputation, and stages of ZeRO as elsewhere; pieces only of matrices.
#pragma once
#include "test_parallel.h"

enum { TENSOR_UPDATES = 20 }; // at most: cfg->run.steps of them

typedef struct {
    StepStats stats[TENSOR_UPDATES];
    int updates;
    double val_loss; // after the second one
    float *weights;
    int64_t n;
} TensorRun;

// Sizes that divide by 2, 3, 4, 6 and 8; a vocabulary that leaves the last of several ranks nothing but padding. Adam divides by
// a gradient's size: of those that are 0 but for rounding (k's biases, which softmax does not see) a small eps would make updates
// of full size, whose signs are rounding's.
static Config *tensor_config(int64_t accumulation) {
    Config *c = tiny_config();
    c->model.n_layer = 2;
    c->model.n_head = 24, c->model.n_embd = KERNELS_ON_GPU ? 192 : 48, c->model.n_inner = 120;
    c->model.vocab_size = 131;
    c->run.seq_len = 24;
    c->optimizer.eps = 1e-3;
    c->run.steps = TENSOR_UPDATES;
    c->batch.gradient_accumulation_steps = accumulation;
    c->batch.train_batch_size = PARALLEL_SAMPLES * accumulation;
    return c;
}

static void tensor_trainer(Trainer *trainer, Config *c, ProcessGrid grid) {
    c->batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / grid.size.dp;
    trainer_init_core(trainer, c, grid, true, c->batch.train_micro_batch_size_per_gpu);
    trainer->metrics.log_fd = -1;
    dataloader_open(&trainer->train, tiny_tokens, 131, c->run.seq_len, c->batch.train_batch_size, false, false, 1, "data.train");
    dataloader_open(&trainer->val, tiny_tokens, 131, c->run.seq_len, 1, false, false, 1, "data.val");
    trainer->has_train = trainer->has_val = true;
    zero_init_weights(&trainer->zero, (uint64_t)c->run.seed);
}

static TensorRun tensor_run(const Config *config, ProcessGrid grid) {
    TensorRun r;
    Config c = *config;
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    tensor_trainer(trainer, &c, grid);
    for (r.updates = 0; r.updates < (int)c.run.steps; r.updates++) {
        r.stats[r.updates] = train_step(trainer);
        if (r.updates == 1) r.val_loss = evaluate(trainer);
    }
    r.weights = trainer_weights(trainer, &r.n);
    trainer_free(trainer);
    free(trainer);
    return r;
}

static void expect_near_runs(Test *t, const char *what, const TensorRun *got, const TensorRun *want, double bound, double norm_bound, double weight_bound) {
    for (int k = 0; k < want->updates; k++) {
        expect_near(t, what, got->stats[k].loss, want->stats[k].loss, bound * want->stats[k].loss);
        expect_near(t, what, got->stats[k].grad_norm, want->stats[k].grad_norm, norm_bound * want->stats[k].grad_norm);
    }
    expect_near(t, what, got->val_loss, want->val_loss, bound * want->val_loss);
    expect_close_array(t, what, got->weights, want->weights, want->n, weight_bound * weight_bound, weight_bound);
}

static void expect_same_runs(Test *t, const char *what, const TensorRun *got, const TensorRun *want) {
    for (int k = 0; k < want->updates; k++) {
        expect_same_bytes(t, what, &got->stats[k].loss, &want->stats[k].loss, 8);
        expect_same_bytes(t, what, &got->stats[k].grad_norm, &want->stats[k].grad_norm, 8);
    }
    expect_same_bytes(t, what, &got->val_loss, &want->val_loss, 8);
    expect_same_bytes(t, what, got->weights, want->weights, want->n * 4);
}

// All ways to cut the ranks of this test into axes, but for data parallelism alone: the next one after `g`, or false.
static bool next_grid(ProcessGrid *g) {
    int world = test_world.world, code = g->world ? g->size.sp * (world + 1) + g->size.tp : world + 1;
    while (++code < (world + 1) * (world + 1)) {
        int sp = code / (world + 1), tp = code % (world + 1);
        if (tp == 0 || sp * tp == 1 || world % (sp * tp) != 0) continue;
        GridAxes axes = {1, world / (sp * tp), sp, tp};
        *g = grid_make(test_world.rank, axes);
        return true;
    }
    return false;
}

static const char *grid_text(char text[96], const ProcessGrid *g, const char *what) {
    snprintf(text, 96, "data %d x sequence %d x tensor %d, %s", g->size.dp, g->size.sp, g->size.tp, what);
    return text;
}

static bool one_rank_only(Test *t) {
    if (test_world.world == 1) test_skip(t, "one rank shares nothing");
    return test_world.world == 1;
}

// Every grid, the stages of a mask, against one rank.
static void tensor_row(Test *t, DType dtype, int64_t accumulation, bool tied, int64_t updates, unsigned stages, double bound, double norm_bound, double weight_bound) {
    if (one_rank_only(t)) return;
    Config *c = tensor_config(accumulation);
    config_set_dtype(c, dtype);
    c->model.tie_word_embeddings = tied;
    c->run.steps = updates;
    TensorRun one = tensor_run(c, grid_of_one());
    for (ProcessGrid g = {}; next_grid(&g);)
        for (int stage = 0; stage < 4; stage++) {
            char text[96], what[32];
            if (!(stages >> stage & 1)) continue;
            c->zero.stage = stage;
            snprintf(what, sizeof what, "stage %d", stage);
            TensorRun got = tensor_run(c, g);
            expect_near_runs(t, grid_text(text, &g, what), &got, &one, bound, norm_bound, weight_bound);
            free(got.weights);
        }
    free(one.weights);
    free(c);
}
static void test_tensor_fp32(Test *t) { tensor_row(t, DTYPE_FP32, 1, true, TENSOR_UPDATES, 0x9, 1e-5, 1e-5, 1e-5); }
static void test_tensor_accumulation(Test *t) { tensor_row(t, DTYPE_FP32, 2, false, 6, 0x6, 1e-5, 1e-5, 1e-5); }
// A sum that is cut elsewhere is rounded elsewhere: some 40 times on a token's way, by 2^-9. Losses are means over 576 tokens, and
// masters keep what is below a rounding, so there most of it cancels: 1/4 of these bounds was measured.
static void test_tensor_bf16(Test *t) { tensor_row(t, DTYPE_BF16, 1, true, 10, 0x8, 2e-4, 4e-3, 1e-3); }

// Activation checkpointing recomputes what other ranks had a part in, too: no bit changes.
static void test_tensor_recompute(Test *t) {
    if (one_rank_only(t)) return;
    static const struct { RecomputePolicy policy; int64_t segments; bool host; } row[] = {
        {RECOMPUTE_NORMS, 0, false}, {RECOMPUTE_GELU, 0, false}, {RECOMPUTE_FFN, 0, false}, {RECOMPUTE_QKV, 0, false}, {RECOMPUTE_BLOCK, 0, false}, {RECOMPUTE_BLOCK, 1, true},
    };
    for (ProcessGrid g = {}; next_grid(&g);) {
        TensorRun want[2];
        for (int i = -2; i < (int)(sizeof row / sizeof *row); i++) { // first two runs that keep all
            int half = (i + 2) % 2;
            char text[96];
            Config *c = tensor_config(1 + half);
            config_set_dtype(c, half ? DTYPE_BF16 : DTYPE_FP32);
            c->zero.stage = half ? 3 : 1;
            c->run.steps = 3;
            c->run.gelu_apart = true;
            if (i >= 0) {
                c->activation_checkpointing.policy = row[i].policy;
                c->activation_checkpointing.number_checkpoints = row[i].segments;
                c->activation_checkpointing.cpu_checkpointing = row[i].host;
            }
            TensorRun got = tensor_run(c, g);
            free(c);
            if (i < 0) {
                want[half] = got;
                continue;
            }
            expect_same_runs(t, grid_text(text, &g, recompute_names[row[i].policy]), &got, &want[half]);
            free(got.weights);
        }
        free(want[0].weights);
        free(want[1].weights);
    }
}

// The most pieces up to so many that a grid's rows can be cut into.
static int64_t legal_pieces(const Config *c, const ProcessGrid *g, int64_t most) {
    while (c->run.seq_len % (g->size.tp * g->size.sp * most) != 0) most--;
    return g->size.tp == 1 ? 1 : most;
}

// A run of one update in pieces beside one without, on the same grid. Which rows are summed in which order is another for norms, positions and biases
// of rows; but of matrices each gradient is one product of all rows in their order, and without clipping what they become has the same bits, but
// for fp32 on a GPU, whose library adds up a product of fewer rows in another order.
// In the trace: with pieces as many more collectives, on another stream than the computation's, of as many bytes.
static int64_t expect_pieces_alike(Test *t, const char *what, const Config *config, ProcessGrid g, int64_t pieces) {
    Config c = *config;
    float *weights[2];
    double losses[2];
    const int64_t statistics = 3 * g.size.tp * PARALLEL_SAMPLES / g.size.dp * c.run.seq_len / g.size.sp; // numbers that the classifier gathers
    int64_t n, compared = 0, bytes[2], collectives[2], heads[2];
    c.optimizer.type = OPTIMIZER_SGD, c.optimizer.lr = 0.1, c.optimizer.momentum = c.optimizer.weight_decay = 0, c.gradient_clipping = 0;
    for (int k = 0; k < 2; k++) {
        Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
        c.run.tensor_parallel_pieces = k == 0 ? 1 : pieces;
        tensor_trainer(trainer, &c, g);
        trace_begin(false);
        losses[k] = train_step(trainer).loss;
        trace_end();
        bytes[k] = collectives[k] = heads[k] = 0;
        for (int i = 0; i < trace.n; i++) {
            const TraceRow *r = &trace.row[i];
            if (r->group.channel != trainer->groups.tp.channel) continue;
            if (r->n == statistics && r->stream == trainer->stream) { heads[k]++; continue; }
            bytes[k] += r->n * dtype_bytes(r->type), collectives[k]++;
            expect_true(t, (r->stream == trainer->stream) == (k == 0), "%s: a collective of rows, with pieces %d, is on the %s stream", what, k, k == 0 ? "other" : "computation's");
        }
        weights[k] = trainer_weights(trainer, &n);
        const ParamTable *table = &trainer->model.table;
        for (int64_t i = 0, at = 0; k == 1 && i < table->n_rows; i++) {
            const ParamDesc *r = &table->row[i];
            if (r->tied_to >= 0) continue;
            const float *got = weights[1] + at, *want = weights[0] + at;
            const bool matrix = r->ndim == 2 && strcmp(r->name, "wpe.weight") != 0;
            char text[160];
            snprintf(text, sizeof text, "%s: %s", what, r->name);
            compared += matrix;
            if (matrix && !(KERNELS_ON_GPU && c.dtype == DTYPE_FP32)) expect_same_bytes(t, text, got, want, param_numel(r) * 4);
            else expect_close_array(t, text, got, want, param_numel(r), 1e-9, c.dtype == DTYPE_FP32 ? 1e-6 : 1e-3);
            at += param_numel(r);
        }
        trainer_free(trainer);
        free(trainer);
    }
    expect_near(t, what, losses[1], losses[0], (KERNELS_ON_GPU ? 1e-6 : 1e-12) * losses[0]); // on the CPU a sum of the same losses; on a GPU of losses that differ as products do in fp32
    expect_equal_i64(t, what, bytes[1], bytes[0]);
    expect_equal_i64(t, what, collectives[1], pieces * collectives[0]);
    expect_equal_i64(t, what, heads[1], heads[0]);
    expect_true(t, collectives[0] > 0, "%s: no rows travelled", what);
    free(weights[0]);
    free(weights[1]);
    return compared;
}

static void test_tensor_pieces(Test *t) {
    if (one_rank_only(t)) return;
    int64_t compared = 0, wanted = 0;
    for (ProcessGrid g = {}; next_grid(&g);)
        for (int variant = 0; variant < 8; variant++) {
            char text[96], what[48];
            Config *c = tensor_config(1 + variant % 2);
            const int64_t pieces = g.size.tp == 1 ? 1 : variant % 4 < 2 ? 2 : 8; // of eight none is whole samples
            config_set_dtype(c, variant < 4 ? DTYPE_FP32 : DTYPE_BF16);
            c->zero.stage = variant % 4;
            c->zero.overlap_comm = variant != 5;
            c->model.tie_word_embeddings = variant % 3 != 0;
            c->activation_checkpointing.policy = variant % 3 == 1 ? RECOMPUTE_BLOCK : variant % 3 == 2 ? RECOMPUTE_QKV : RECOMPUTE_NONE;
            c->activation_checkpointing.number_checkpoints = variant % 3 == 1;
            snprintf(what, sizeof what, "variant %d, %" PRId64 " pieces", variant, pieces);
            if (pieces > 1) compared += expect_pieces_alike(t, grid_text(text, &g, what), c, g, pieces), wanted += 4 * c->model.n_layer + 2 - c->model.tie_word_embeddings;
            free(c);
        }
    expect_equal_i64(t, "matrices compared", compared, wanted);
    expect_true(t, wanted > 0, "nothing to compare");
}

// What else a run may have: the head in pieces, a window, an offloaded optimizer, gradients in other types, small buckets.
static void test_tensor_combinations(Test *t) {
    if (one_rank_only(t)) return;
    for (int variant = 0; variant < 5; variant++) {
        Config *c = tensor_config(1);
        c->run.steps = 6;
        switch (variant) {
        case 0: c->run.logits_bytes = 1, c->run.gelu_apart = true; break; // pieces of 128 rows
        case 1: c->model.attention_window_size = 5; break;
        case 2: c->zero.stage = 2, c->zero.offload_optimizer.device = OFFLOAD_CPU, c->zero.offload_optimizer.ratio = 1, c->zero.sub_group_size = 1000; break;
        case 3: c->zero.stage = 3, c->zero.reduce_bucket_size = 0, c->zero.max_live_parameters = 0, c->optimizer.type = OPTIMIZER_SGD, c->optimizer.momentum = 0.9; break;
        case 4: c->zero.stage = 0, c->zero.reduce_scatter = false, c->zero.overlap_comm = false, c->optimizer.type = OPTIMIZER_ADAMW; break;
        }
        TensorRun one = tensor_run(c, grid_of_one());
        for (ProcessGrid g = {}; next_grid(&g);) {
            char text[96], what[32];
            snprintf(what, sizeof what, "variant %d", variant);
            c->run.tensor_parallel_pieces = legal_pieces(c, &g, 1 + variant % 4);
            TensorRun got = tensor_run(c, g);
            expect_near_runs(t, grid_text(text, &g, what), &got, &one, 1e-5, 1e-5, 1e-5);
            free(got.weights);
        }
        free(one.weights);
        free(c);
    }
}

// What follows a text, whatever its length: the logits of one rank, on all ranks. And sampling changes nothing of training.
static void test_tensor_logits(Test *t) {
    if (one_rank_only(t)) return;
    Config *c = tensor_config(1);
    static const int64_t lengths[] = {1, 2, 11, 12, 13, 23, 24};
    const int64_t Vp_most = vocab_padded(131, test_world.world);
    float *want = (float *)host_alloc((size_t)Vp_most * 4 * 7), *got = (float *)host_alloc((size_t)Vp_most * 4);
    int32_t text[24];
    StepStats next_want, next;
    ProcessGrid g = grid_of_one();
    for (bool first = true; first || next_grid(&g); first = false) {
        if (first) g = grid_of_one();
        c->run.tensor_parallel_pieces = legal_pieces(c, &g, 3);
        Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
        tensor_trainer(trainer, c, g);
        train_step(trainer);
        zero_set_uses(&trainer->zero, trainer->eval_uses, trainer->n_eval_uses);
        for (int i = 0; i < 7; i++) {
            for (int k = 0; k < 24; k++) text[k] = (int32_t)(7 * k % 131);
            next_logits(trainer, text, lengths[i], first ? want + i * Vp_most : got);
            char what[96], words[32];
            snprintf(words, sizeof words, "logits after %d", (int)lengths[i]);
            if (!first) expect_close_array(t, grid_text(what, &g, words), got, want + i * Vp_most, 131, 1e-10, 1e-5);
        }
        next = train_step(trainer);
        if (first) next_want = next;
        else expect_near(t, "loss after sampling", next.loss, next_want.loss, 1e-5 * next_want.loss);
        if (first) g = {};
        trainer_free(trainer);
        free(trainer);
    }
    free(want);
    free(got);
    free(c);
}

// Memory as planned; and of what is split or shared each rank has its part: blocks' matrices, activations.
static void test_tensor_memory(Test *t) {
    if (one_rank_only(t)) return;
    for (ProcessGrid g = {}; next_grid(&g);)
        for (int stage = 0; stage < 4; stage++) {
            Config *c = tensor_config(1);
            c->zero.stage = stage;
            c->run.tensor_parallel_pieces = legal_pieces(c, &g, 1 + stage % 3);
            c->batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / g.size.dp;
            expect_as_planned(t, c, g, true);
            expect_as_planned(t, c, g, false);
            Model m;
            model_init(&m, &c->model, {g.size.tp, g.coord.tp, 0, NULL}, DTYPE_FP32, 1 << 30, false, NULL);
            m.sp.size = g.size.sp;
            const int64_t B = c->batch.train_micro_batch_size_per_gpu, share = g.size.tp * g.size.sp, whole = B * c->run.seq_len;
            const int64_t kept = whole * (8 * m.C + 2 * m.F + m.NH + 4) * 4; // of each token on one rank: with the block's input
            ActLayout l = acts_layout(c, &m, 1, B, true);
            int64_t got = acts_stream_bytes(&l);
            for (int r = 0; r < ACT_COUNT; r++) got += acts_saved_bytes(&l, 1, r);
            expect_equal_i64(t, "activations of a block", got * share, kept);
            int64_t matrices = 0;
            for (int i = 0; i < m.table.unit[1].n_rows; i++) matrices += m.table.row[m.table.unit[1].first_row + i].ndim == 2 ? m.table.row[m.table.unit[1].first_row + i].numel : 0;
            expect_equal_i64(t, "matrices of a block", matrices * g.size.tp, 4 * m.C * m.C + 2 * m.C * m.F);
            model_free(&m);
            free(c);
        }
}

static const TestRow tensor_tests[] = {
    {"against one rank, fp32", test_tensor_fp32}, {"against one rank, accumulation, not tied", test_tensor_accumulation}, {"against one rank, bf16", test_tensor_bf16},
    {"recomputation changes no bit", test_tensor_recompute}, {"pieces change no bit of a product", test_tensor_pieces}, {"combinations", test_tensor_combinations}, {"logits of a sample", test_tensor_logits},
    {"memory", test_tensor_memory},
    {NULL, NULL},
};
