// test_parallel.h - several ranks train as one: ZeRO stages, buckets and look-ahead against each other bit for bit, and
// against a trainer of one rank that runs in the same process. Run with mpirun -n 1, 2, 3, 4, 6 or 8 ./test_gpt parallel.
//
// Class A, bit for bit (sums run in the order of the ranks): what is sharded, bucket sizes, look-ahead, live elements,
// streams. With one micro-batch an update all stages; with several, 0 = 1 and 2 = 3, since 0 and 1 add micro-batches
// before ranks, 2 and 3 ranks before micro-batches. Class B, 1e-5 relative in fp32: the number of ranks, 1 against 2.
#pragma once
#include "test_model.h"

enum {
    PARALLEL_UPDATES = 10,
    PARALLEL_SAMPLES = 24, // an update: they divide by 1, 2, 3, 4, 6 and 8 ranks
};

// Widths and a vocabulary that no number of ranks divides.
static Config *parallel_config(int64_t accumulation) {
    Config *c = tiny_config();
    c->model.n_layer = 3;
    c->model.n_head = 3, c->model.n_embd = KERNELS_ON_GPU ? 24 : 33, c->model.n_inner = KERNELS_ON_GPU ? 56 : 37;
    c->model.vocab_size = 131;
    c->run.seq_len = 19;
    c->batch.gradient_accumulation_steps = accumulation;
    c->batch.train_batch_size = PARALLEL_SAMPLES * accumulation;
    return c;
}

// PARALLEL_UPDATES updates on the ranks of a grid; the caller frees the weights.
static float *parallel_run(const Config *config, ProcessGrid grid, StepStats *stats, int64_t *n, double *val_loss, Zero *bytes) {
    Config c = *config;
    c.batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / grid.world;
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    trainer_init_core(trainer, &c, grid, true, c.batch.train_micro_batch_size_per_gpu);
    trainer->metrics.log_fd = -1;
    dataloader_open(&trainer->train, tiny_tokens, 131, c.run.seq_len, c.batch.train_batch_size, false, false, 1, "data.train");
    trainer->has_train = true;
    dataloader_open(&trainer->val, tiny_tokens, 131, c.run.seq_len, 1, false, false, 1, "data.val");
    trainer->has_val = true;
    zero_init_weights(&trainer->zero, (uint64_t)c.run.seed);
    for (int k = 0; k < PARALLEL_UPDATES; k++) {
        stats[k] = train_step(trainer);
        if (k == 4 && val_loss) *val_loss = evaluate(trainer);
    }
    float *w = trainer_weights(trainer, n);
    if (bytes) *bytes = trainer->zero;
    trainer_free(trainer);
    free(trainer);
    return w;
}

static void expect_same_run(Test *t, const char *what, const StepStats *got, const float *got_weights, const StepStats *want, const float *want_weights, int64_t n) {
    for (int k = 0; k < PARALLEL_UPDATES; k++) {
        expect_same_bytes(t, what, &got[k].loss, &want[k].loss, 8);
        expect_same_bytes(t, what, &got[k].grad_norm, &want[k].grad_norm, 8);
    }
    expect_same_bytes(t, what, got_weights, want_weights, n * 4);
}

static void expect_near_run(Test *t, const char *what, const StepStats *got, const StepStats *want, double bound) {
    for (int k = 0; k < PARALLEL_UPDATES; k++) {
        expect_near(t, what, got[k].loss, want[k].loss, bound * want[k].loss);
        expect_near(t, what, got[k].grad_norm, want[k].grad_norm, bound * want[k].grad_norm);
    }
}

// Stages 0 to 3 in one type, one micro-batch: all bits equal; fp32 against one rank. `wire`: in which gradients travel.
static void stages_row(Test *t, DType dtype, int64_t accumulation, DType wire) {
    Config *c = parallel_config(accumulation);
    c->zero.communication_data_type = wire;
    config_set_dtype(c, dtype);
    StepStats one[PARALLEL_UPDATES], stats[4][PARALLEL_UPDATES];
    float *weights[4];
    double val_one, val;
    int64_t n;
    free(parallel_run(c, grid_of_one(), one, &n, &val_one, NULL));
    for (int stage = 0; stage < 4; stage++) {
        c->zero.stage = stage;
        weights[stage] = parallel_run(c, test_grid(), stats[stage], &n, &val, NULL);
        double bound = dtype == DTYPE_FP32 ? 1e-5 : 1e-2;
        expect_near_run(t, "against one rank", stats[stage], one, bound);
        expect_near(t, "validation loss", val, val_one, bound * val_one);
        // Where gradients travel in 16 bits, kernels of stages 2 and 3 write them, for which a GPU's library may take another algorithm.
        int same_as = accumulation == 1 && !(KERNELS_ON_GPU && wire != DTYPE_FP32) ? 0 : stage / 2 * 2;
        char what[64];
        snprintf(what, sizeof what, "stage %d against stage %d", stage, same_as);
        expect_same_run(t, what, stats[stage], weights[stage], stats[same_as], weights[same_as], n);
    }
    for (int stage = 0; stage < 4; stage++) free(weights[stage]);
    free(c);
}
static void test_stages_fp32(Test *t) { stages_row(t, DTYPE_FP32, 1, DTYPE_FP32); }
static void test_stages_bf16(Test *t) { stages_row(t, DTYPE_BF16, 1, DTYPE_FP32); }
static void test_stages_fp16(Test *t) { stages_row(t, DTYPE_FP16, 1, DTYPE_FP32); }
static void test_stages_accumulation(Test *t) { stages_row(t, DTYPE_FP32, 3, DTYPE_FP32); }
static void test_stages_bf16_sent(Test *t) { stages_row(t, DTYPE_BF16, 1, DTYPE_BF16); }
static void test_stages_bf16_sent_accumulation(Test *t) { stages_row(t, DTYPE_BF16, 3, DTYPE_BF16); }

// Sizes of buckets, look-ahead and live elements, and whether communication has streams of its own, change no bit.
static void buckets_row(Test *t, DType dtype) {
    for (int stage = dtype == DTYPE_FP32 ? 1 : 2; stage < 4; stage++) {
        Config *c = parallel_config(2);
        config_set_dtype(c, dtype);
        c->zero.communication_data_type = dtype;
        c->zero.stage = stage;
        StepStats want[PARALLEL_UPDATES], got[PARALLEL_UPDATES];
        int64_t n;
        float *want_weights = parallel_run(c, test_grid(), want, &n, NULL, NULL);
        static const int64_t sizes[] = {0, 1, 1000, 20000, 500000000};
        for (int k = 0; k < 5 * 7; k += KERNELS_ON_GPU ? 3 : 1) { // making NCCL's channels takes most of a second
            Config v = *c;
            int64_t size = sizes[k % 5];
            const char *what = "";
            switch (k / 5) {
            case 0: v.zero.reduce_bucket_size = size, what = "reduce_bucket_size"; break;
            case 1: v.zero.prefetch_bucket_size = size, what = "stage3_prefetch_bucket_size"; break;
            case 2: v.zero.max_live_parameters = size, what = "stage3_max_live_parameters"; break;
            case 3: v.zero.max_reuse_distance = size, what = "stage3_max_reuse_distance"; break;
            case 4: v.zero.param_persistence_threshold = size, what = "stage3_param_persistence_threshold"; break;
            case 5: v.zero.overlap_comm = false, v.zero.reduce_bucket_size = v.zero.max_live_parameters = size, what = "overlap_comm false"; break;
            case 6: v.zero.direct_exchange = false, v.zero.reduce_bucket_size = size, what = "direct_exchange false"; break;
            }
            if ((stage < 3 || dtype != DTYPE_FP32) && k / 5 >= 1 && k / 5 <= 4) continue;
            if (k / 5 == 6 && KERNELS_ON_GPU && test_world.world > 2) continue; // NCCL adds in an order of its own
            float *weights = parallel_run(&v, test_grid(), got, &n, NULL, NULL);
            expect_same_run(t, what, got, weights, want, want_weights, n);
            free(weights);
        }
        free(want_weights);
        free(c);
    }
}

static void test_buckets(Test *t) { buckets_row(t, DTYPE_FP32); }
static void test_buckets_bf16(Test *t) { buckets_row(t, DTYPE_BF16); }

// Every optimizer under sharding: the states follow the shards.
static void test_optimizers_sharded(Test *t) {
    for (int type = 0; type < 3; type++) {
        Config *c = parallel_config(1);
        c->optimizer.type = (OptimizerType)type;
        c->optimizer.momentum = 0.9;
        c->optimizer.lr = type == OPTIMIZER_SGD ? 0.05 : 1e-3;
        StepStats want[PARALLEL_UPDATES], got[PARALLEL_UPDATES];
        int64_t n;
        float *want_weights = parallel_run(c, test_grid(), want, &n, NULL, NULL);
        c->zero.stage = 3;
        float *weights = parallel_run(c, test_grid(), got, &n, NULL, NULL);
        expect_same_run(t, optimizer_rules[type].name, got, weights, want, want_weights, n);
        free(weights);
        free(want_weights);
        free(c);
    }
}

// Bytes that the accounting claims: states are whole / N from stage 1 on, gradients from 2, weights from 3.
static void test_sharded_bytes(Test *t) {
    Config *c = parallel_config(1);
    config_set_dtype(c, DTYPE_BF16);
    int64_t n, N = test_world.world;
    StepStats stats[PARALLEL_UPDATES];
    for (int stage = 0; stage < 4; stage++) {
        Zero z;
        c->zero.stage = stage;
        free(parallel_run(c, test_grid(), stats, &n, NULL, &z));
        // Rounding to ROW_ALIGN elements a shard: at most 64 elements of 4 bytes a unit, 5 units.
        double slack = 5 * 64 * 8 * (double)N, padded = (double)z.allocated.bytes[MEMORY_OPTIMIZER_STATES] / 8 * (stage >= 1 ? (double)N : 1);
        expect_true(t, padded >= (double)n, "states of %g elements for %" PRId64 " parameters", padded, n);
        expect_near(t, "masters", (double)z.allocated.bytes[MEMORY_MASTERS], padded * 2 / (stage >= 1 ? (double)N : 1), slack);
        expect_near(t, "gradients", (double)z.allocated.bytes[MEMORY_GRADIENTS], padded * 4 / (stage >= 2 ? (double)N : 1), slack);
        expect_near(t, "weights", (double)z.allocated.bytes[MEMORY_WEIGHTS], padded * 2 / (stage >= 3 ? (double)N : 1), slack);
    }
    free(c);
}

// Trains two updates, evaluates and reads a tensor out, or only the last two without backward, and compares what was allocated
// with the plan: by kind, to the byte. base: allocated before.
static void expect_as_planned(Test *t, Config *c, ProcessGrid grid, bool trains) {
    int64_t base = device_allocated_bytes(), B = trains ? c->batch.train_micro_batch_size_per_gpu : 1, n;
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    device_peak_reset();
    trainer_init_core(trainer, c, grid, trains, B);
    trainer->metrics.log_fd = -1;
    dataloader_open(&trainer->train, tiny_tokens, 131, c->run.seq_len, c->batch.train_batch_size, false, false, 1, "data.train");
    trainer->has_train = true;
    zero_init_weights(&trainer->zero, (uint64_t)c->run.seed);
    for (int k = 0; k < 2 && trains; k++) train_step(trainer);
    free(trainer_weights(trainer, &n));
    for (int k = 0; k <= MEMORY_BUFFERS; k++) expect_equal_i64(t, memory_names[k], trainer->zero.allocated.bytes[k], trainer->planned.bytes[k]);
    int64_t activations = 0;
    for (int chunk = 0; chunk < trainer->pipe.n_chunks; chunk++) activations += trainer->acts[chunk].allocated;
    expect_equal_i64(t, "activations", activations, trainer->planned.bytes[MEMORY_ACTIVATIONS]);
    int64_t planned = memory_total(&trainer->planned), peak = device_peak_bytes() - base;
    expect_equal_i64(t, "peak", peak, planned);
    trainer_free(trainer);
    free(trainer);
}

static void test_memory_planned(Test *t) {
    for (int variant = 0; variant < (KERNELS_ON_GPU ? 8 : 48); variant++) {
        Config *c = parallel_config(1 + variant % 2);
        c->zero.stage = variant / 2 % 4;
        config_set_dtype(c, variant / 8 % 2 ? DTYPE_BF16 : DTYPE_FP32);
        c->batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / test_world.world;
        switch (variant / 16) {
        case 1: c->zero.reduce_bucket_size = c->zero.max_live_parameters = 20000, c->optimizer.type = OPTIMIZER_LION, c->zero.communication_data_type = DTYPE_BF16; break;
        case 2: c->zero.param_persistence_threshold = 1 << 30, c->zero.reduce_bucket_size = 0, c->model.tie_word_embeddings = false; break;
        }
        expect_as_planned(t, c, test_grid(), true);
        expect_as_planned(t, c, test_grid(), false);
        free(c);
    }
}

// Saved under one stage, loaded under another: the same bits go on.
static void resume_across_stages(Test *t, DType dtype) {
    if (!test_world.world) return;
    char folder[64] = "/tmp/test_gpt_XXXXXX";
    if (test_world.rank == 0) CHECK(mkdtemp(folder), "mkdtemp: %s", strerror(errno));
    comm_host_broadcast(folder, sizeof folder, 0);
    Config *c = parallel_config(1);
    config_set_dtype(c, dtype);
    snprintf(c->run.resume, sizeof c->run.resume, "auto");
    snprintf(c->checkpoint.save_dir, sizeof c->checkpoint.save_dir, "%s", folder);
    c->zero.stage = 3;
    c->batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / test_world.world;
    StepStats want[4];
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    for (int way = -1; way < 4; way++) { // -1 trains and saves; 0..3 load under that stage
        c->zero.stage = way < 0 ? 3 : way;
        trainer_init_core(trainer, c, test_grid(), true, c->batch.train_micro_batch_size_per_gpu);
        trainer->metrics.log_fd = -1;
        dataloader_open(&trainer->train, tiny_tokens, 131, c->run.seq_len, PARALLEL_SAMPLES, false, false, 1, "data.train");
        trainer->has_train = true;
        if (way < 0) {
            zero_init_weights(&trainer->zero, 7);
            trainer->store = trainer_store(trainer, folder);
            for (int k = 0; k < 3; k++) train_step(trainer);
            save(trainer, true);
        } else expect_true(t, trainer_load(trainer) && trainer->step == 3, "step %" PRId64, trainer->step);
        for (int k = 0; k < 4; k++) {
            StepStats s = train_step(trainer);
            if (way < 0) want[k] = s;
            expect_same_bytes(t, "loss", &s.loss, &want[k].loss, 8);
            expect_same_bytes(t, "gradient norm", &s.grad_norm, &want[k].grad_norm, 8);
        }
        trainer_free(trainer);
    }
    double done = 1;
    comm_host_all_reduce(&done, 1, COMM_SUM); // nobody reads any more
    if (test_world.rank == 0) remove_folder(folder);
    free(trainer);
    free(c);
}

static void test_resume_across_stages(Test *t) { resume_across_stages(t, DTYPE_FP32); }
static void test_resume_across_stages_bf16(Test *t) { resume_across_stages(t, DTYPE_BF16); }

// The sums of equal hashes are told from those of any others, whatever the number of ranks; every field changes the hash; who differs
// is put into words. That a rank which differs ends the job is tests/test_watch.sh's matter.
static void test_agreement(Test *t) {
    static const int worlds[] = {2, 3, 8, 1000, 1 << 16};
    const double largest = (double)((1 << AGREE_BITS) - 1);
    for (int w = 0; w < 5; w++)
        for (int k = 0; k < 50; k++) {
            double h = k == 0 ? 0 : k == 1 ? largest : floor(rng_uniform(1, 2, (uint64_t)k) * (largest + 1)), D = worlds[w];
            expect_true(t, agree_sums(D * h, D * h * h, worlds[w]), "%d ranks of hash %g are told apart", worlds[w], h);
            double other = h == 0 ? 1 : h - 1; // one rank, by the least
            expect_true(t, !agree_sums((D - 1) * h + other, (D - 1) * h * h + other * other, worlds[w]), "%d ranks of hash %g and one of %g count as equal", worlds[w], h, other);
        }
    expect_true(t, !agree_sums(NAN, 1, 2) && !agree_sums(2, INFINITY, 2) && !agree_sums(-2, 2, 2), "what is no sum of hashes is taken for one");

    RankState a = {12, 11, 1, 96, 1e-3, 65536, 3.25, 0.5, 4242};
    double *field = (double *)&a, h = agree_hash(&a);
    for (int i = 0; i < AGREE_FIELDS; i++)
        for (int k = 0; k < 3; k++) { // in its last bit, to nothing, to no number. Two of 27 by chance: once in 10^8
            double before = field[i];
            field[i] = k == 0 ? nextafter(before, 1e300) : k == 1 ? 0 : NAN;
            expect_true(t, agree_hash(&a) != h && agree_hash(&a) <= largest, "another %s gives the same hash", agree_names[i]);
            field[i] = before;
        }
    RankState zero = {}, minus = {};
    minus.loss = -0.0;
    expect_true(t, agree_hash(&zero) == agree_hash(&minus), "0 and -0 count as different");

    char text[AGREE_TEXT];
    static const char *const name[] = {"lr", "loss", "step"};
    const double three[] = {1, 2, 1, /**/ 5, 5, 5, /**/ 7, 7, -DBL_MAX}, two[] = {1, 2, /**/ 5, 5, /**/ 0.1, 0.5};
    expect_equal_i64(t, "fields that differ", agree_describe(text, three, name, 3, 3, NULL, NULL), 2);
    expect_equal_text(t, "three ranks", text, "lr is 2 on rank 1 and 1 on the other 2; step is nan on rank 2 and 7 on the other 2");
    expect_equal_i64(t, "fields that differ", agree_describe(text, two, name, 3, 2, NULL, NULL), 2);
    expect_equal_text(t, "two ranks", text, "lr is 1 on rank 0, 2 on rank 1; step is 0.10000000000000001 on rank 0, 0.5 on rank 1");
    const double halves[] = {1, 1, 9, 1, /**/ 3, 3, 3, 4};
    const int ranks[] = {0, 1, 2, 3};
    replicas_name(text, halves, ranks, 4);
    expect_equal_text(t, "who holds other weights", text, "ranks 0, 1, 2, 3 (no majority among 4)");
    const double most[] = {1, 1, 9, 1, /**/ 3, 3, 3, 3};
    replicas_name(text, most, ranks, 4);
    expect_equal_text(t, "who holds other weights", text, "rank 2 from the other 3");
}

// Comparing the copies finds nothing where nothing is wrong, at every stage, and changes no bit of the run.
static void test_replicas_equal(Test *t) {
    Config *c = parallel_config(2);
    config_set_dtype(c, DTYPE_BF16);
    StepStats want[PARALLEL_UPDATES], got[PARALLEL_UPDATES];
    for (int stage = 0; stage < 4; stage++) {
        int64_t n;
        c->zero.stage = stage;
        c->run.replica_check_every = 0;
        float *want_weights = parallel_run(c, test_grid(), want, &n, NULL, NULL);
        c->run.replica_check_every = 1;
        float *weights = parallel_run(c, test_grid(), got, &n, NULL, NULL);
        expect_same_run(t, "with replica_check_every", got, weights, want, want_weights, n);
        free(want_weights);
        free(weights);
    }
    free(c);
}

// A window of attention: all ranks together against one rank; another model than without a window, and the same one, bit for
// bit, when the window is as long as the samples.
static void test_attention_window(Test *t) {
    Config *c = parallel_config(1);
    StepStats all[PARALLEL_UPDATES], one[PARALLEL_UPDATES], got[PARALLEL_UPDATES];
    int64_t n;
    double val_all, val_one, val;
    float *all_weights = parallel_run(c, grid_of_one(), all, &n, &val_all, NULL);
    c->model.attention_window_size = c->run.seq_len;
    float *weights = parallel_run(c, grid_of_one(), got, &n, &val, NULL);
    expect_same_run(t, "with a window of the whole sample", got, weights, all, all_weights, n);
    free(weights);
    c->model.attention_window_size = 3;
    free(parallel_run(c, grid_of_one(), one, &n, &val_one, NULL));
    expect_true(t, fabs(one[0].grad_norm - all[0].grad_norm) > 1e-3 * all[0].grad_norm && fabs(val_one - val_all) > 1e-6 * val_all,
                "a window of 3 changes nothing: gradient norm %g and %g, validation loss %g and %g", one[0].grad_norm, all[0].grad_norm, val_one, val_all);
    for (int stage = 0; stage < 4; stage += 3) {
        c->zero.stage = stage;
        free(parallel_run(c, test_grid(), got, &n, &val, NULL));
        expect_near_run(t, "with a window, against one rank", got, one, 1e-5);
        expect_near(t, "validation loss with a window", val, val_one, 1e-5 * val_one);
    }
    free(all_weights);
    free(c);
}

// The grid of n consecutive ranks that this rank belongs to; all such grids do the same work beside each other. Ranks that are
// too few for a last one have a grid each.
static ProcessGrid grid_of(int n) {
    int first = test_world.rank / n * n;
    if (first + n > test_world.world) first = test_world.rank, n = 1;
    GridAxes axes = {1, n, 1, 1};
    ProcessGrid g = grid_make(test_world.rank - first, axes);
    g.first_rank = first;
    return g;
}

// A rank whose grid is itself has nobody to compare n values with; the others' sums go on without it.
static void sit_out(const ProcessGrid *grid, int grid_ranks, int n) {
    if (grid->world == grid_ranks) return;
    double *none = (double *)host_alloc(sizeof(double) * (size_t)n);
    for (int way = 0; way < 2; way++) {
        for (int i = 0; i < n; i++) none[i] = way ? -INFINITY : INFINITY;
        comm_host_all_reduce(none, n, way ? COMM_MAX : COMM_MIN);
    }
    free(none);
}

// Masters and states, all bits equal, through a chain of layouts: each loads what the one before it saved and saves it again.
// Ranks that are left over do the same alone, and read the first grid's files.
static void resume_through_layouts(Test *t, DType dtype) {
    static const struct { int ranks, stage; } layout[] = {{4, 3}, {1, 0}, {3, 2}, {2, 1}, {4, 0}, {2, 3}, {1, 3}, {3, 1}, {4, 2}};
    char folder[64] = "/tmp/test_gpt_XXXXXX", own[96];
    if (test_world.rank == 0) CHECK(mkdtemp(folder), "mkdtemp: %s", strerror(errno));
    comm_host_broadcast(folder, sizeof folder, 0);
    Config *c = parallel_config(1);
    config_set_dtype(c, dtype);
    snprintf(c->run.resume, sizeof c->run.resume, "auto");
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    float *want = NULL;
    int64_t numel;
    int before = -1;
    for (int i = 0; i < (int)(sizeof layout / sizeof *layout); i++) {
        int n = layout[i].ranks;
        if (n > test_world.world) continue;
        c->zero.stage = layout[i].stage;
        c->batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / grid_of(n).world;
        trainer_init_core(trainer, c, grid_of(n), true, c->batch.train_micro_batch_size_per_gpu);
        trainer->metrics.log_fd = -1;
        dataloader_open(&trainer->train, tiny_tokens, 131, c->run.seq_len, PARALLEL_SAMPLES, false, false, 1, "data.train");
        trainer->has_train = true;
        if (before < 0) {
            zero_init_weights(&trainer->zero, 7);
            for (int k = 0; k < 2; k++) train_step(trainer);
        } else {
            snprintf(c->checkpoint.save_dir, sizeof c->checkpoint.save_dir, "%s/%d-0", folder, before);
            expect_true(t, trainer_load(trainer) && trainer->step == 2, "step %" PRId64, trainer->step);
            sit_out(&trainer->grid, n, AGREE_FIELDS);
            sit_out(&trainer->grid, n, 2 * trainer->model.table.n_units);
        }
        float *got = trainer_states(trainer, &numel);
        char what[96];
        snprintf(what, sizeof what, "saved in layout %d, loaded by %d ranks at stage %d", before, n, layout[i].stage);
        if (want) expect_same_bytes(t, what, got, want, numel * 4);
        if (want) free(got);
        else want = got;
        snprintf(own, sizeof own, "%s/%d-%d", folder, i, trainer->grid.first_rank);
        trainer->store = trainer_store(trainer, own);
        sit_out(&trainer->grid, n, AGREE_FIELDS);
        save(trainer, true);
        if (before < 0 && test_world.rank >= n) { // trained in another grid, maybe to other bits: compares with what it loads next
            free(want);
            want = NULL;
        }
        trainer_free(trainer);
        double done = 1;
        comm_host_all_reduce(&done, 1, COMM_SUM);
        // one shard a rank, and no rank has all
        char file[160];
        struct stat st;
        int64_t bytes = 0;
        for (int r = 0; r < 5; r++) {
            snprintf(file, sizeof file, "%s/%d-0/step-00000002/shard-%d.bin", folder, i, r);
            bool there = stat(file, &st) == 0;
            expect_true(t, there == (r < n), "%s: %d", file, there);
            if (there) bytes += st.st_size;
        }
        snprintf(file, sizeof file, "%s/%d-0/step-00000002/shard-0.bin", folder, i);
        expect_true(t, stat(file, &st) == 0 && (double)st.st_size < 1.3 * (double)bytes / n, "rank 0 of %d wrote %" PRId64 " of %" PRId64 " bytes", n, (int64_t)st.st_size, bytes);
        before = i;
    }
    if (test_world.rank == 0) remove_folder(folder);
    free(want);
    free(trainer);
    free(c);
}
static void test_resume_through_layouts(Test *t) { resume_through_layouts(t, DTYPE_FP32); }
static void test_resume_through_layouts_bf16(Test *t) { resume_through_layouts(t, DTYPE_BF16); }
static void test_resume_through_layouts_fp16(Test *t) { resume_through_layouts(t, DTYPE_FP16); }

// Saved by n ranks, loaded by another number of them: the losses of the run that was not stopped, to 1e-5, as in class B.
static void test_resume_across_ranks(Test *t) {
    char folder[64] = "/tmp/test_gpt_XXXXXX", own[96];
    StepStats want[4];
    if (test_world.rank == 0) CHECK(mkdtemp(folder), "mkdtemp: %s", strerror(errno));
    comm_host_broadcast(folder, sizeof folder, 0);
    Config *c = parallel_config(1);
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    snprintf(c->run.resume, sizeof c->run.resume, "auto");
    for (int saver = 1; saver <= test_world.world; saver++)
        for (int loader = 0; loader <= test_world.world && test_world.world % saver == 0; loader++) { // 0: train and save
            const int n = loader ? loader : saver;
            if (test_world.world % n != 0) continue;
            snprintf(own, sizeof own, "%s/%d-%d", folder, saver, loader ? 0 : grid_of(n).first_rank); // each grid writes a copy, all read the first
            snprintf(c->checkpoint.save_dir, sizeof c->checkpoint.save_dir, "%s", own);
            c->zero.stage = loader ? 1 + (saver + loader) % 3 : 2;
            c->batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / n;
            trainer_init_core(trainer, c, grid_of(n), true, c->batch.train_micro_batch_size_per_gpu);
            trainer->metrics.log_fd = -1;
            dataloader_open(&trainer->train, tiny_tokens, 131, c->run.seq_len, PARALLEL_SAMPLES, false, false, 1, "data.train");
            trainer->has_train = true;
            if (loader == 0) {
                zero_init_weights(&trainer->zero, 7);
                trainer->store = trainer_store(trainer, own);
                for (int k = 0; k < 3; k++) train_step(trainer);
                save(trainer, true);
            } else expect_true(t, trainer_load(trainer) && trainer->step == 3, "step %" PRId64, trainer->step);
            for (int k = 0; k < 4; k++) {
                StepStats s = train_step(trainer);
                if (loader == 0) want[k] = s;
                char what[64];
                snprintf(what, sizeof what, "saved by %d ranks, loaded by %d", saver, loader);
                expect_near(t, what, s.loss, want[k].loss, 1e-5 * want[k].loss);
                expect_near(t, what, s.grad_norm, want[k].grad_norm, 1e-4 * want[k].grad_norm);
            }
            trainer_free(trainer);
            double done = 1;
            comm_host_all_reduce(&done, 1, COMM_SUM);
        }
    if (test_world.rank == 0) remove_folder(folder);
    free(trainer);
    free(c);
}

// PyTorch's run by all ranks together: the global batch of 8 (or 9) shared among them, where it divides.
static void golden_together(Test *t, const char *name, int64_t batch, DType dtype, GoldenBounds bound) {
    if (batch % test_world.world != 0) { test_skip(t, "a global batch of %" PRId64 " does not divide by %d ranks", batch, test_world.world); return; }
    for (int stage = 0; stage < 4; stage++) golden_run_on(t, name, dtype, test_grid(), stage, bound);
}
static void test_golden_together(Test *t) { golden_together(t, "gpt2-tiny", 8, DTYPE_FP32, golden_fp32); }
static void test_golden_together_bf16(Test *t) { golden_together(t, "gpt2-tiny", 8, DTYPE_BF16, golden_bf16); }
static void test_golden_odd_together(Test *t) { golden_together(t, "gpt2-odd", 9, DTYPE_FP32, golden_fp32); }

// A trainer that has saved a checkpoint to load. Rows of section "hang", as they end the job.
static Trainer *differs_trainer(void) {
    char folder[] = "test_gpt_XXXXXX"; // in the caller's folder: nobody here lives to remove it
    if (test_world.rank == 0) CHECK(mkdtemp(folder), "mkdtemp: %s", strerror(errno));
    comm_host_broadcast(folder, sizeof folder, 0);
    Config *c = parallel_config(1);
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    c->zero.stage = 0;
    c->batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / test_world.world;
    snprintf(c->run.resume, sizeof c->run.resume, "auto");
    snprintf(c->checkpoint.save_dir, sizeof c->checkpoint.save_dir, "%s", folder);
    trainer_init_core(trainer, c, test_grid(), true, c->batch.train_micro_batch_size_per_gpu);
    trainer->metrics.log_fd = -1;
    zero_init_weights(&trainer->zero, 7);
    trainer->store = trainer_store(trainer, folder);
    save(trainer, true);
    return trainer;
}

// One rank's weights are others when a checkpoint has been loaded: all end, and it is named.
static void test_weights_differ_after_loading(Test *t) {
    Trainer *trainer = differs_trainer();
    CHECK(trainer_load(trainer), "nothing was loaded");
    unsigned char *weight = (unsigned char *)trainer->zero.unit[1].param, bit;
    device_copy(&bit, weight, 1, COPY_TO_HOST, trainer->stream);
    stream_sync(trainer->stream);
    bit ^= test_world.rank == test_world.world - 1;
    device_copy(weight, &bit, 1, COPY_TO_DEVICE, trainer->stream);
    stream_sync(trainer->stream);
    trainer_verify_loaded(trainer);
    expect_true(t, false, "nobody noticed that a rank has loaded other weights");
}

// One rank holds another number: loading itself notices.
static void test_state_differs_after_loading(Test *t) {
    Trainer *trainer = differs_trainer();
    trainer->config_digest = test_world.rank == test_world.world - 1;
    trainer_load(trainer);
    expect_true(t, false, "nobody noticed that a rank goes on with another state");
}

static const TestRow differs_tests[] = {{"weights that differ after loading", test_weights_differ_after_loading}, {"state that differs after loading", test_state_differs_after_loading}, {NULL, NULL}};

// ---------------------------------------------------------------------------------------------------------------
// Import in little memory

// A line of /proc/self/status in bytes: VmRSS, what this process has in memory, or VmHWM, the most that it had; -1 if it is not there.
static int64_t status_bytes(const char *key) {
    char line[256];
    int64_t kib = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f)) if (strncmp(line, key, strlen(key)) == 0) kib = strtoll(line + strlen(key) + 1, NULL, 10);
    if (f) fclose(f);
    return kib < 0 ? -1 : kib * 1024;
}

static bool status_forget_most(void) { // VmHWM becomes VmRSS
    int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
    bool good = fd >= 0 && write(fd, "5", 1) == 1;
    if (fd >= 0) close(fd);
    return good;
}

static float import_mark(int row) { return 1 + (float)row / 1024; }

// A model.safetensors of zeros, of which the disk holds only what is written here: the header, and a mark in the first place of each tensor.
static void import_write_sparse(const FormatsFolder *f, const ParamTable *table) {
    char path[600];
    size_t room = 4096 + (size_t)table->n_rows * 256, length = 0;
    char *header = (char *)host_alloc(room);
    int64_t at = 0;
    for (int i = 0; i < table->n_rows; i++) {
        const ParamDesc *r = &table->row[i];
        if (r->tied_to >= 0) continue;
        char shape[64];
        if (r->ndim == 1) snprintf(shape, sizeof shape, "%" PRId64, r->shape[0]);
        else snprintf(shape, sizeof shape, "%" PRId64 ",%" PRId64, r->shape[r->hf_transposed], r->shape[!r->hf_transposed]);
        length += (size_t)snprintf(header + length, room - length, "%s\"transformer.%s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}",
                                   length ? "," : "{", r->name, shape, at, at + 4 * param_numel(r));
        at += 4 * param_numel(r);
    }
    header[length++] = '}';
    const uint64_t n = length;
    int fd = open(formats_path(path, f, "model.safetensors"), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    CHECK(fd >= 0 && file_write_all(fd, &n, 8) && file_write_all(fd, header, (int64_t)length) && ftruncate(fd, 8 + (int64_t)length + at) == 0, "%s: %s", path, strerror(errno));
    at = 8 + (int64_t)length;
    for (int i = 0; i < table->n_rows; i++) {
        if (table->row[i].tied_to >= 0) continue;
        const float mark = import_mark(i);
        CHECK(pwrite(fd, &mark, 4, at) == 4, "%s: %s", path, strerror(errno));
        at += 4 * param_numel(&table->row[i]);
    }
    close(fd);
    free(header);
}

// While a model comes out of a Hugging Face folder, no rank needs more than a few tensors' memory beside what it keeps, whatever the layout.
static void test_import_streams(Test *t) {
    const int world = test_world.world;
    const GridAxes layout[] = {{1, world, 1, 1}, {1, world / 2, 1, 2}, {2, world / 2, 1, 1}};
    FormatsFolder f = {""};
    for (int i = 0; i < (world % 2 == 0 ? 3 : 1); i++) {
        Config *c = parallel_config(1);
        c->model.n_layer = 24, c->model.n_head = 4, c->model.n_embd = 256, c->model.n_inner = 1024, c->model.n_positions = 64;
        c->zero.stage = layout[i].dp > 1 ? 3 : 0;
        c->parallel.data = layout[i].dp, c->parallel.tensor = layout[i].tp, c->parallel.pipeline = layout[i].pp;
        ParamTable whole;
        model_build_table(&whole, &c->model, model_whole);
        if (i == 0 && test_world.rank == 0) {
            f = formats_folder();
            import_write_sparse(&f, &whole);
        }
        snprintf(c->model.init_from, sizeof c->model.init_from, "%s", test_world.rank == 0 ? f.path : "known to rank 0");
        Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
        trainer_init_core(trainer, c, grid_make(test_world.rank, layout[i]), false, 1);
        zero_init_weights(&trainer->zero, 1); // all that is kept has been touched
        double measured = !KERNELS_ON_GPU && status_forget_most() && status_bytes("VmHWM") > 0; // a GPU's driver takes what it likes
#ifdef __SANITIZE_ADDRESS__
        measured = 0; // it keeps memory that was freed
#endif
        comm_host_all_reduce(&measured, 1, COMM_MIN);
        if (measured == 0) test_skip(t, "neither this kernel nor a sanitized build tells the most memory that a part of a process has taken");
        const int64_t before = status_bytes("VmHWM"), model = 4 * table_param_count(&whole);
        trainer_init_weights(trainer);
        const int64_t more = status_bytes("VmHWM") - before;
        if (measured > 0) expect_true(t, more < model / 5, "layout %d: importing %.1f MB took %.1f MB of memory", i, (double)model / 1e6, (double)more / 1e6);
        float *values = (float *)host_alloc((size_t)(4 * 256 * 1024));
        for (int row = 0; row < whole.n_rows; row += 17) {
            if (whole.row[row].tied_to >= 0) continue;
            double rest = 0;
            zero_tensor_read(&trainer->zero, row, STATE_MASTER, values);
            for (int64_t k = 1; k < param_numel(&whole.row[row]); k++) rest += fabs((double)values[k]);
            expect_true(t, values[0] == import_mark(row) && rest == 0, "layout %d: %s begins with %g, and the rest adds up to %g", i, whole.row[row].name, values[0], rest);
        }
        free(values);
        trainer_free(trainer);
        free(trainer);
        table_free(&whole);
        free(c);
    }
    if (f.path[0]) formats_remove(&f);
}

static const TestRow parallel_tests[] = {
    {"golden run, all stages", test_golden_together}, {"golden run, all stages, bf16", test_golden_together_bf16}, {"odd golden run, all stages", test_golden_odd_together},
    {"stages, fp32", test_stages_fp32}, {"stages, bf16", test_stages_bf16}, {"stages, fp16", test_stages_fp16}, {"stages, accumulation", test_stages_accumulation},
    {"stages, bf16, sent in bf16", test_stages_bf16_sent}, {"stages, bf16, sent in bf16, accumulation", test_stages_bf16_sent_accumulation},
    {"buckets", test_buckets}, {"buckets, bf16", test_buckets_bf16}, {"optimizers, sharded", test_optimizers_sharded}, {"bytes", test_sharded_bytes}, {"memory as planned", test_memory_planned}, {"resume across stages", test_resume_across_stages}, {"resume across stages, bf16", test_resume_across_stages_bf16}, {"resume across ranks", test_resume_across_ranks},
    {"resume through layouts", test_resume_through_layouts}, {"resume through layouts, bf16", test_resume_through_layouts_bf16}, {"resume through layouts, fp16", test_resume_through_layouts_fp16},
    {"agreement", test_agreement}, {"replicas, equal", test_replicas_equal}, {"attention window", test_attention_window},
    {"import streams", test_import_streams},
    {NULL, NULL},
};
