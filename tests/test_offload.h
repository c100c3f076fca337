// test_offload.h - what lives in host memory trains as if it lived on the device: bit for bit where both updates are the same
// code (the CPU backend), to the last bits of fp32 elsewhere. Run with mpirun -n 1, 2, 3 ./test_gpt offload.
//
// Reports of other trainers' users, and the rows that would notice (DS: DeepSpeed, TT: torchtitan, MLM: Megatron-LM):
//     the CPU's optimizer decays, or corrects, otherwise            DS 668, 844, 5214     optimizers
//     gradients are read before they have arrived                   DS 7310               every row, in DEBUG
//     the device computes with weights that are not back yet        DS 5545               every row
//     host memory grows until the kernel ends the job               DS 1891, 4239         nothing grows
//     the device still holds what was offloaded                     DS 7309               bytes
//     a checkpoint of an offloaded run loads under offload only     DS 7549, TT 620       resume
#pragma once
#include "test_zero.h"

static void offload_config(Config *c, int64_t stage, double ratio) {
    c->zero.stage = stage;
    c->zero.offload_optimizer.device = OFFLOAD_CPU;
    c->zero.offload_optimizer.ratio = ratio;
    c->zero.offload_optimizer.pin_memory = true;
}

// Equal where the arithmetic is the same, else near: 16-bit weights may take the neighbouring value.
static void expect_offloaded_run(Test *t, const char *what, const Config *c, const StepStats *got, const float *got_weights, const StepStats *want, const float *want_weights, int64_t n) {
    if (!KERNELS_ON_GPU) expect_same_run(t, what, got, got_weights, want, want_weights, n);
    double bound = c->dtype == DTYPE_FP32 ? 1e-5 : 1e-2;
    for (int k = 0; k < PARALLEL_UPDATES && KERNELS_ON_GPU; k++) {
        expect_near(t, what, got[k].loss, want[k].loss, bound * want[k].loss);
        if (!want[k].skipped) expect_near(t, what, got[k].grad_norm, want[k].grad_norm, bound * want[k].grad_norm);
    }
    for (int k = 0; k < PARALLEL_UPDATES; k++) expect_true(t, got[k].skipped == want[k].skipped, "%s: update %d is skipped %d, expected %d", what, k, got[k].skipped, want[k].skipped);
}

// Units that the CPU updates.
static int offloaded_units(const Zero *z) {
    int n = 0;
    for (int u = 0; u < z->model->table.n_units; u++) n += z->unit[u].update_on_host;
    return n;
}

// Stages, types, ratios, one micro-batch and three, an evaluation after the fifth update; in fp16 the first updates overflow.
static void test_offload_stages(Test *t) {
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++)
        for (int stage = 1; stage < 4; stage++)
            for (int64_t accumulation = 1; accumulation <= 3; accumulation += 2) {
                Config *c = parallel_config(accumulation);
                config_set_dtype(c, (DType)dtype);
                c->fp16.initial_scale_power = 26;
                c->zero.stage = stage;
                c->zero.overlap_comm = accumulation > 1;
                StepStats want[PARALLEL_UPDATES], got[PARALLEL_UPDATES];
                int64_t n;
                double val_want, val_got;
                float *want_weights = parallel_run(c, test_grid(), want, &n, &val_want, NULL);
                expect_true(t, want[0].skipped == (dtype == DTYPE_FP16) && !want[PARALLEL_UPDATES - 1].skipped, "the scale overflows at first, and only then");
                for (int half = 0; half <= 2; half++) {
                    if (half < 2 && stage < 3) continue;
                    Config v = *c;
                    offload_config(&v, stage, half / 2.0);
                    char what[96];
                    snprintf(what, sizeof what, "%s, stage %d, accumulation %d, ratio %g", dtype_name((DType)dtype), stage, (int)accumulation, half / 2.0);
                    float *weights = parallel_run(&v, test_grid(), got, &n, &val_got, NULL);
                    expect_offloaded_run(t, what, c, got, weights, want, want_weights, n);
                    if (!KERNELS_ON_GPU) expect_same_bytes(t, "validation loss", &val_got, &val_want, 8);
                    free(weights);
                }
                free(want_weights);
                free(c);
            }
}

// Weights in host memory: with the update on the device, half of it, and all of it on the CPU; two blocks that take turns or room for
// all, with and without look-ahead; a block that is small enough to stay.
static void test_offload_weights(Test *t) {
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++)
        for (int64_t accumulation = 1; accumulation <= 2; accumulation++) {
            Config *c = parallel_config(accumulation);
            config_set_dtype(c, (DType)dtype);
            c->fp16.initial_scale_power = 26;
            c->zero.stage = 3;
            c->model.tie_word_embeddings = dtype != DTYPE_BF16;
            StepStats want[PARALLEL_UPDATES], got[PARALLEL_UPDATES];
            int64_t n;
            double val_want, val_got;
            float *want_weights = parallel_run(c, test_grid(), want, &n, &val_want, NULL);
            Trainer *first = zero_trainer(c);
            int64_t block = first->model.table.unit[1].numel;
            zero_trainer_free(first);
            for (int way = 0; way < 6; way++) {
                Config v = *c;
                v.zero.offload_param.device = OFFLOAD_CPU;
                v.zero.offload_param.pin_memory = way != 4;
                if (way > 0) offload_config(&v, 3, way == 1 ? 0 : way == 2 ? 0.5 : 1);
                if (way % 2) v.zero.max_live_parameters = 0;
                if (way == 3) v.zero.prefetch_bucket_size = 0;
                if (way == 4) v.zero.param_persistence_threshold = block + 1, v.zero.model_persistence_threshold = block * test_world.world;
                if (way == 5) v.zero.max_reuse_distance = 0, v.zero.overlap_comm = false;
                char what[96];
                snprintf(what, sizeof what, "%s, accumulation %d, way %d", dtype_name((DType)dtype), (int)accumulation, way);
                float *weights = parallel_run(&v, test_grid(), got, &n, &val_got, NULL);
                expect_offloaded_run(t, what, c, got, weights, want, want_weights, n);
                if (!KERNELS_ON_GPU) expect_same_bytes(t, "validation loss", &val_got, &val_want, 8);
                free(weights);
                // Memory: no block's shard on the device, every one on the host, and the plan to the byte.
                v.batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / test_world.world;
                Trainer *trainer = zero_trainer(&v);
                const Zero *z = &trainer->zero;
                int64_t shards = 0, other = 0;
                for (int u = 0; u < z->model->table.n_units; u++) {
                    bool stays = z->model->table.unit[u].kind != UNIT_BLOCK || (way == 4 && u == 1);
                    expect_true(t, z->unit[u].param_on_host == !stays, "way %d: the weights of unit %d are on the %s", way, u, stays ? "host" : "device");
                    if (z->unit[u].param_on_host) shards += z->unit[u].shard_numel * dtype_bytes(z->model->dtype);
                    else if (z->unit[u].update_on_host) other += z->unit[u].shard_numel * dtype_bytes(z->model->dtype);
                }
                expect_equal_i64(t, "weights on the host", trainer->planned_host.bytes[MEMORY_WEIGHTS], shards + other);
                expect_equal_i64(t, "host memory, planned", memory_total(&trainer->planned_host), z->offload.bytes);
                if (v.zero.max_live_parameters == 0) expect_equal_i64(t, "buffers of blocks", z->n_param_pool, 2);
                zero_trainer_free(trainer);
                expect_as_planned(t, &v, test_grid(), true);
                expect_as_planned(t, &v, test_grid(), false);
            }
            free(want_weights);
            free(c);
        }
}

// Every rule, an untied head, small pieces, gradients summed in bf16, all kinds of buckets.
static void test_offload_optimizers(Test *t) {
    for (int way = 0; way < 8; way++) {
        Config *c = parallel_config(1 + way % 2);
        config_set_dtype(c, way % 3 == 0 ? DTYPE_BF16 : DTYPE_FP32);
        c->optimizer.type = (OptimizerType)(way % 3);
        c->optimizer.momentum = way == 5 ? 0 : 0.9;
        c->optimizer.lr = c->optimizer.type == OPTIMIZER_SGD ? 0.05 : 1e-3;
        c->optimizer.adam_w_mode = way != 3;
        c->model.tie_word_embeddings = way < 4;
        c->zero.stage = 1 + way % 3;
        if (way == 4) c->zero.reduce_bucket_size = 0;
        if (way == 6) c->zero.stage = 3, c->zero.max_live_parameters = 0, c->zero.grad_accum_dtype = DTYPE_BF16;
        if (way == 7) c->zero.stage = 2, c->zero.overlap_comm = false, c->zero.grad_accum_dtype = DTYPE_BF16;
        StepStats want[PARALLEL_UPDATES], got[PARALLEL_UPDATES];
        int64_t n;
        float *want_weights = parallel_run(c, test_grid(), want, &n, NULL, NULL);
        offload_config(c, c->zero.stage, 1);
        c->zero.sub_group_size = way % 2 ? 1000 : way == 2 ? 64 : 1 << 30;
        c->zero.offload_optimizer.pin_memory = way != 1;
        float *weights = parallel_run(c, test_grid(), got, &n, NULL, NULL);
        char what[96];
        snprintf(what, sizeof what, "%s, way %d", optimizer_rules[c->optimizer.type].name, way);
        expect_offloaded_run(t, what, c, got, weights, want, want_weights, n);
        free(weights);
        free(want_weights);
        free(c);
    }
}

// What is read between updates, while the CPU may be at work, is what it will be: masters and states after each update.
static void test_offload_states(Test *t) {
    if (KERNELS_ON_GPU) { test_skip(t, "the GPU's update rounds otherwise"); return; }
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++) {
        Config *c = parallel_config(1);
        config_set_dtype(c, (DType)dtype);
        c->fp16.initial_scale_power = 26;
        c->zero.stage = 3;
        Trainer *plain = zero_trainer(c);
        Config v = *c;
        offload_config(&v, 3, 0.7);
        if (dtype != DTYPE_BF16) v.zero.offload_param.device = OFFLOAD_CPU;
        Trainer *offloads = zero_trainer(&v);
        expect_true(t, offloaded_units(&offloads->zero) > 0 && !offloads->zero.unit[0].update_on_host, "%d units are offloaded", offloaded_units(&offloads->zero));
        for (int k = 0; k < 12; k++) {
            StepStats a = train_step(plain), b = train_step(offloads);
            int64_t n;
            expect_true(t, a.skipped == b.skipped && (dtype != DTYPE_FP16 || k > 0 || a.skipped), "update %d", k);
            if (k % 3 == 1) continue; // the next forward pass is the first to wait
            float *want = trainer_states(plain, &n), *got = trainer_states(offloads, &n);
            expect_same_bytes(t, "masters and states", got, want, n * 4);
            free(want);
            free(got);
        }
        zero_trainer_free(plain);
        zero_trainer_free(offloads);
        free(c);
    }
}

// Saved with one home, loaded into another: the same bits go on. Masters are taken from the weights alike.
static void test_offload_resume(Test *t) {
    char folder[64] = "/tmp/test_gpt_XXXXXX";
    if (test_world.rank == 0) CHECK(mkdtemp(folder), "mkdtemp: %s", strerror(errno));
    comm_host_broadcast(folder, sizeof folder, 0);
    for (int from_weights = 0; from_weights < 2; from_weights++)
        for (int saver = 0; saver < 2; saver++) {
            char own[96];
            StepStats want[4];
            snprintf(own, sizeof own, "%s/%d%d", folder, from_weights, saver);
            for (int way = -1; way < 4; way++) { // -1 trains and saves; then loads without offload, half of it, all, at stage 1
                Config *c = parallel_config(1);
                config_set_dtype(c, saver ? DTYPE_BF16 : DTYPE_FP16);
                snprintf(c->run.resume, sizeof c->run.resume, "auto");
                snprintf(c->checkpoint.save_dir, sizeof c->checkpoint.save_dir, "%s", own);
                c->zero.load_from_fp32_weights = !from_weights;
                c->zero.stage = 3;
                if (way < 0 ? saver : way > 0) offload_config(c, way == 3 ? 1 : 3, way == 1 ? 0.5 : 1);
                if (way == 1 || way == 2) c->zero.offload_param.device = OFFLOAD_CPU;
                Trainer *trainer = zero_trainer(c);
                if (way < 0) {
                    trainer->store = trainer_store(trainer, own);
                    for (int k = 0; k < 3; k++) train_step(trainer);
                    save(trainer, true);
                } else expect_true(t, trainer_load(trainer) && trainer->step == 3, "step %" PRId64, trainer->step);
                for (int k = 0; k < 4; k++) {
                    StepStats s = train_step(trainer);
                    const bool first = way < 0 || (from_weights && way == 0); // rounded masters go on otherwise than those that were saved
                    if (first) want[k] = s;
                    if (KERNELS_ON_GPU) expect_near(t, "loss", s.loss, want[k].loss, 1e-2 * want[k].loss);
                    else {
                        expect_same_bytes(t, "loss", &s.loss, &want[k].loss, 8);
                        expect_same_bytes(t, "gradient norm", &s.grad_norm, &want[k].grad_norm, 8);
                    }
                }
                zero_trainer_free(trainer);
                free(c);
            }
        }
    double done = 1;
    comm_host_all_reduce(&done, 1, COMM_SUM); // nobody reads any more
    if (test_world.rank == 0) remove_folder(folder);
}

// Bytes: what is offloaded is not on the device, the plan knows both memories, and the host holds what the table in offload.cu says.
static void test_offload_bytes(Test *t) {
    static const int want[3][2] = {{4 + 8 + 4, 4 + 8 + 4}, {2 + 2 + 8 + 4, 2 + 2 + 8 + 2}, {2 + 4 + 8 + 4, 2 + 4 + 8 + 2}}; // by type; gradients in fp32, in bf16
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++)
        for (int stage = 1; stage < 4; stage++)
            for (int half = 0; half < 3; half++) {
                Config *c = parallel_config(1);
                config_set_dtype(c, (DType)dtype);
                offload_config(c, stage, half / 2.0);
                bool small = dtype > 0 && stage > 1;
                if (small) c->zero.grad_accum_dtype = DTYPE_BF16;
                c->batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / test_world.world;
                Trainer *trainer = zero_trainer(c);
                const Zero *z = &trainer->zero;
                int64_t elements = 0;
                for (int u = 0; u < z->model->table.n_units; u++) elements += z->unit[u].update_on_host ? z->unit[u].update_numel : 0;
                expect_true(t, half == 1 || (elements > 0) == (half == 2), "ratio %g offloads %" PRId64 " elements", half / 2.0, elements);
                if (half == 2) expect_equal_i64(t, "states on the device", z->allocated.bytes[MEMORY_OPTIMIZER_STATES] + z->allocated.bytes[MEMORY_MASTERS], 0);
                expect_equal_i64(t, "host memory", z->offload.bytes, elements * want[dtype][small]);
                // Copies reach weights and gradients: these, and nothing else, lie in the part that is pinned.
                expect_equal_i64(t, "host memory that copies reach", z->offload.travels, elements * ((dtype == DTYPE_FP32 ? 4 : 2) + (small ? 2 : 4)));
                for (int u = 0; u < z->model->table.n_units; u++)
                    for (int k = 0; k < HOST_ARRAYS && z->unit[u].update_on_host; k++) {
                        const int64_t at = z->offload.unit[u].array[k] ? z->offload.unit[u].array[k] - z->offload.region : 0;
                        const bool first = k == HOST_WEIGHT || k == HOST_GRAD || (k == HOST_MASTER && dtype == DTYPE_FP32);
                        expect_true(t, !z->offload.unit[u].array[k] || (at < z->offload.travels) == first, "unit %d: array %d begins at %" PRId64 " of %" PRId64, u, k, at, z->offload.travels);
                    }
                expect_equal_i64(t, "host memory, planned", memory_total(&trainer->planned_host), z->offload.bytes);
                zero_trainer_free(trainer);
                expect_as_planned(t, c, test_grid(), true);
                expect_as_planned(t, c, test_grid(), false);
                free(c);
            }
}

// The border that the ratio draws lies between units, as near as can be, and what comes first stays.
static void test_offload_ratio(Test *t) {
    Config *c = parallel_config(1);
    c->model.n_layer = 8;
    for (int k = 0; k <= 20; k++) {
        offload_config(c, 3, k / 20.0);
        Trainer *trainer = zero_trainer(c);
        const ParamTable *table = &trainer->model.table;
        int64_t all = 0, host = 0, largest = 0;
        for (int u = 0; u < table->n_units; u++) {
            all += table->unit[u].numel;
            largest = max_i64(largest, table->unit[u].numel);
            if (trainer->zero.unit[u].update_on_host) host += table->unit[u].numel;
            else expect_true(t, host == 0, "unit %d stays on the device behind one that does not", u);
        }
        expect_near(t, "share on the host", (double)host / (double)all, k / 20.0, 0.5 * (double)largest / (double)all + 1e-9);
        zero_trainer_free(trainer);
    }
    free(c);
}

// Memory that the process holds. AddressSanitizer keeps what is freed for a while: there its allocator says what is in use.
#ifdef __SANITIZE_ADDRESS__
extern "C" size_t __sanitizer_get_current_allocated_bytes(void);
static int64_t held_bytes(void) { return (int64_t)__sanitizer_get_current_allocated_bytes(); }
#else
static int64_t held_bytes(void) {
    long pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (!f || fscanf(f, "%*d %ld", &pages) != 1) pages = 0;
    if (f) fclose(f);
    return (int64_t)pages * sysconf(_SC_PAGESIZE);
}
#endif

// 200 updates, with evaluations, leave memory and descriptors as they were after the first 20.
static void test_offload_nothing_grows(Test *t) {
    Config *c = parallel_config(2);
    config_set_dtype(c, DTYPE_BF16);
    offload_config(c, 3, 1);
    Trainer *trainer = zero_trainer(c);
    dataloader_open(&trainer->val, tiny_tokens, 131, c->run.seq_len, 1, false, false, 1, "data.val");
    trainer->has_val = true;
    c->run.eval_batches = 1;
    int64_t held = 0, descriptors = 0, device = 0;
    for (int k = 0; k < 200; k++) {
        train_step(trainer);
        if (k % 10 == 0) evaluate(trainer);
        if (k == 20) held = held_bytes(), descriptors = open_descriptors(), device = device_allocated_bytes();
    }
    // A megabyte is a thousandth of what one leaked copy of this model's states an update would come to.
    expect_true(t, held_bytes() <= held + (1 << 20), "memory grew from %" PRId64 " to %" PRId64 " bytes", held, held_bytes());
    expect_equal_i64(t, "descriptors", open_descriptors(), descriptors);
    expect_equal_i64(t, "device memory", device_allocated_bytes(), device);
    zero_trainer_free(trainer);
    free(c);
}

static const TestRow offload_tests[] = {
    {"stages, types, ratios", test_offload_stages}, {"weights", test_offload_weights}, {"optimizers", test_offload_optimizers}, {"states between updates", test_offload_states},
    {"resume", test_offload_resume}, {"bytes", test_offload_bytes}, {"ratio", test_offload_ratio}, {"nothing grows", test_offload_nothing_grows},
    {NULL, NULL},
};
