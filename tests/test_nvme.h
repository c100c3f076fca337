// test_nvme.h - section "nvme": masters and states, and weights, that live in files train as if they lived on the device, bit for bit on
// the CPU backend. Run with mpirun -n 1, 2, 3 ./test_gpt nvme.
//
// Reports of other trainers' users, and the rows that would notice (DS: DeepSpeed):
//     swap files are short, or empty                                DS 1070, 1627, 4888   aio/refusals, aio/short_transfers, a failing disk
//     a save reads files that are being rewritten                   DS 7613, 7549         resume, which saves after each update
//     two runs on one path destroy each other                                             two runs
// And of this one: ranks that save different units gathered different weights ahead, each the other's (resume, on 3 ranks)
#pragma once
#include "test_offload.h"
#include "test_aio.h"

static char nvme_folder[64]; // all ranks'
static void nvme_begin(void) {
    snprintf(nvme_folder, sizeof nvme_folder, "/tmp/test_gpt_XXXXXX");
    if (test_world.rank == 0) CHECK(mkdtemp(nvme_folder), "mkdtemp: %s", strerror(errno));
    comm_host_broadcast(nvme_folder, sizeof nvme_folder, 0);
}
static void nvme_end(void) {
    double done = 1;
    comm_host_all_reduce(&done, 1, COMM_SUM); // nobody needs it any more
    if (test_world.rank == 0) remove_folder(nvme_folder);
}

// way: a number from which the details follow.
static void nvme_config(Config *c, double ratio, int way) {
    offload_config(c, 3, ratio);
    OffloadConfig *o = &c->zero.offload_optimizer;
    o->device = OFFLOAD_NVME;
    snprintf(o->nvme_path, sizeof o->nvme_path, "%s", nvme_folder);
    o->pipeline_read = way & 1;
    o->pipeline_write = way & 2;
    o->buffer_count = 4 + way % 3;
    c->zero.sub_group_size = way % 5 == 0 ? 1 << 30 : way % 5 == 1 ? 1000 : way % 5 == 2 ? 448 : 5000;
    c->zero.aio.block_size = way % 4 == 0 ? 4096 : 1 << 20;
    c->zero.aio.queue_depth = 1 + way % 9;
    c->zero.aio.intra_op_parallelism = 1 + way % 2;
    c->zero.aio.single_submit = way % 3 == 0;
    c->zero.aio.overlap_events = way % 4 != 1;
}

// The same for the weights. home: of masters and states. in_memory: elements whose weights stay in host memory.
static void nvme_weights_config(Config *c, OffloadDevice home, double ratio, int64_t in_memory, int way) {
    if (home == OFFLOAD_NVME) nvme_config(c, ratio, way);
    else if (home == OFFLOAD_CPU) offload_config(c, 3, ratio);
    c->zero.stage = 3;
    OffloadConfig *o = &c->zero.offload_param;
    o->device = OFFLOAD_NVME;
    snprintf(o->nvme_path, sizeof o->nvme_path, "%s", nvme_folder);
    o->buffer_count = 2 + way % 4;
    o->buffer_size = 1 << 20;
    o->max_in_cpu = in_memory;
    c->zero.sub_group_size = way % 3 == 0 ? 1 << 30 : way % 3 == 1 ? 1000 : 448;
    c->zero.aio.block_size = way % 2 ? 4096 : 1 << 20;
    if (way % 4 < 2) c->zero.max_live_parameters = 0; // two buffers on the device, else room for all blocks
    if (way % 5 == 3) c->zero.prefetch_bucket_size = 0;
    if (way % 5 == 4) c->zero.max_reuse_distance = 0, c->zero.overlap_comm = false;
}

// Elements of this rank whose weights are in a file, or in host memory.
static int64_t nvme_weights(const Zero *z, bool filed) {
    int64_t n = 0;
    for (int u = 0; u < z->model->table.n_units; u++)
        if (z->offload.unit[u].numel > 0 && z->offload.unit[u].filed[HOST_WEIGHT] == filed) n += z->unit[u].shard_numel;
    return n;
}

// Weights in a file; masters and states on the device, in host memory, in another file; of one kind of unit or of two. Then what the
// memories and the disk hold, planned and measured.
static void test_nvme_weights(Test *t) {
    static const struct { OffloadDevice home; double ratio; int blocks_in_memory; } ways[] = {
        {OFFLOAD_NONE, 1, 0}, {OFFLOAD_CPU, 1, 0}, {OFFLOAD_NVME, 1, 0}, {OFFLOAD_CPU, 0.5, 1}, {OFFLOAD_NVME, 0.5, 0}, {OFFLOAD_NVME, 1, 2}, {OFFLOAD_NONE, 1, 1}, {OFFLOAD_CPU, 1, 3}};
    nvme_begin();
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
            const int64_t block = first->zero.unit[1].shard_numel;
            zero_trainer_free(first);
            for (int way = 0; way < 8; way++) {
                Config v = *c;
                nvme_weights_config(&v, ways[way].home, ways[way].ratio, ways[way].blocks_in_memory * block, way + 8 * (int)(accumulation - 1) + dtype);
                char what[96];
                snprintf(what, sizeof what, "%s, accumulation %d, way %d", dtype_name((DType)dtype), (int)accumulation, way);
                float *weights = parallel_run(&v, test_grid(), got, &n, &val_got, NULL);
                expect_offloaded_run(t, what, c, got, weights, want, want_weights, n);
                if (!KERNELS_ON_GPU) expect_same_bytes(t, "validation loss", &val_got, &val_want, 8);
                free(weights);
                Trainer *trainer = zero_trainer(&v);
                const Zero *z = &trainer->zero;
                const Offload *o = &z->offload;
                int64_t filed = nvme_weights(z, true), element = dtype_bytes((DType)dtype), file = o->file[FILE_WEIGHTS].bytes;
                expect_equal_i64(t, "elements whose weights are in a file", filed, (3 - ways[way].blocks_in_memory) * block);
                expect_equal_i64(t, "planned for the file", z->layout.file_bytes[FILE_WEIGHTS], filed * element);
                expect_true(t, filed == 0 || (file >= filed * element && file <= filed * element + o->n_pieces * (AIO_ALIGN + 64)), "the file has %" PRId64 " bytes for %" PRId64, file, filed * element);
                expect_equal_i64(t, "host memory, planned", memory_total(&trainer->planned_host), o->bytes);
                expect_equal_i64(t, "weights in host memory", trainer->planned_host.bytes[MEMORY_WEIGHTS], element * nvme_weights(z, false));
                zero_trainer_free(trainer);
                expect_as_planned(t, &v, test_grid(), true);
                expect_as_planned(t, &v, test_grid(), false);
            }
            free(want_weights);
            free(c);
        }
    nvme_end();
}

static void test_nvme_runs(Test *t) {
    nvme_begin();
    for (int way = 0; way < 18; way++) {
        Config *c = parallel_config(1 + way % 2);
        config_set_dtype(c, (DType)(way % 3));
        c->fp16.initial_scale_power = 26; // the first updates are skipped
        c->optimizer.type = way < 9 ? OPTIMIZER_ADAMW : way < 12 ? OPTIMIZER_LION : way < 15 ? OPTIMIZER_SGD : OPTIMIZER_ADAMW;
        c->optimizer.momentum = way == 13 ? 0 : 0.9;
        c->optimizer.lr = c->optimizer.type == OPTIMIZER_SGD ? 0.05 : 1e-3;
        c->zero.stage = 3;
        if (way == 7) c->zero.grad_accum_dtype = DTYPE_BF16;
        StepStats want[PARALLEL_UPDATES], got[PARALLEL_UPDATES];
        int64_t n;
        double val_want, val_got;
        float *want_weights = parallel_run(c, test_grid(), want, &n, &val_want, NULL);
        nvme_config(c, way % 4 == 3 ? 0.5 : 1, way);
        if (way >= 15) c->zero.offload_param.device = OFFLOAD_CPU; // weights in host memory, masters in the file
        float *weights = parallel_run(c, test_grid(), got, &n, &val_got, NULL);
        char what[96];
        snprintf(what, sizeof what, "%s, %s, way %d", optimizer_rules[c->optimizer.type].name, dtype_name(c->dtype), way);
        expect_offloaded_run(t, what, c, got, weights, want, want_weights, n);
        if (!KERNELS_ON_GPU) expect_same_bytes(t, "validation loss", &val_got, &val_want, 8);
        free(weights);
        free(want_weights);
        free(c);
    }
    nvme_end();
}

// Masters and states, read between updates, are what they are without a file; and so is the run of a second trainer in the same folder.
static void test_nvme_states(Test *t) {
    if (KERNELS_ON_GPU) { test_skip(t, "compares bits of the CPU's update"); return; }
    nvme_begin();
    for (int way = 0; way < 9; way++) {
        Config *c = parallel_config(1);
        config_set_dtype(c, (DType)(way % 3));
        c->zero.stage = 3;
        Trainer *plain = zero_trainer(c);
        Config v = *c, w = *c;
        nvme_config(&v, way < 3 ? 1 : 0.7, way);
        nvme_config(&w, 1, way + 1);
        if (way >= 6) nvme_weights_config(&v, OFFLOAD_NVME, 1 - 0.3 * (way % 2), 0, way), nvme_weights_config(&w, way == 7 ? OFFLOAD_NONE : OFFLOAD_CPU, 1, 0, way + 2);
        Trainer *filed = zero_trainer(&v), *beside = zero_trainer(&w);
        expect_true(t, filed->zero.offload.aio != NULL && filed->zero.offload.file[FILE_UPDATE].bytes > 0, "nothing is filed");
        for (int k = 0; k < 9; k++) {
            train_step(plain);
            train_step(filed);
            train_step(beside);
            if (k % 3 == 1) continue;
            int64_t n;
            float *want = trainer_states(plain, &n), *got = trainer_states(filed, &n), *other = trainer_states(beside, &n);
            expect_same_bytes(t, "masters and states", got, want, n * 4);
            expect_same_bytes(t, "masters and states of a second run", other, want, n * 4);
            free(want);
            free(got);
            free(other);
        }
        zero_trainer_free(plain);
        zero_trainer_free(filed);
        zero_trainer_free(beside);
        free(c);
    }
    nvme_end();
}

// Saved after each update from one home, loaded into another: the same bits go on.
static void test_nvme_resume(Test *t) {
    nvme_begin();
    for (int from_weights = 0; from_weights < 2; from_weights++)
        for (int saver = 0; saver < 2; saver++) { // on the device, or in a file
            char own[96];
            StepStats want[4];
            snprintf(own, sizeof own, "%s/%d%d", nvme_folder, from_weights, saver);
            for (int way = -1; way < 6; way++) { // -1 trains and saves; then loads to a file, half of it, to host memory, to the device; weights to a file
                Config *c = parallel_config(1);
                config_set_dtype(c, saver ? DTYPE_BF16 : DTYPE_FP16);
                snprintf(c->run.resume, sizeof c->run.resume, "auto");
                snprintf(c->checkpoint.save_dir, sizeof c->checkpoint.save_dir, "%s", own);
                c->zero.load_from_fp32_weights = !from_weights;
                c->zero.stage = 3;
                if (way < 0 ? saver : way < 2) nvme_config(c, way == 1 ? 0.5 : 1, way + 4);
                else if (way == 2) offload_config(c, 3, 1);
                if (way < 0 ? saver : way >= 4) nvme_weights_config(c, way == 4 ? OFFLOAD_NONE : OFFLOAD_NVME, 1, 0, way + 5);
                Trainer *trainer = zero_trainer(c);
                if (way < 0) {
                    trainer->store = trainer_store(trainer, own);
                    for (int k = 0; k < 3; k++) {
                        train_step(trainer);
                        save(trainer, true);
                    }
                } else expect_true(t, trainer_load(trainer) && trainer->step == 3, "step %" PRId64, trainer->step);
                for (int k = 0; k < 4; k++) {
                    StepStats s = train_step(trainer);
                    if (way < 0 || (from_weights && way == 0)) want[k] = s; // rounded masters go on otherwise than those that were saved
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
    nvme_end();
}

// Neither host memory nor the device holds what is filed; buffers and view are as planned.
static void test_nvme_bytes(Test *t) {
    nvme_begin();
    static const int filed[3] = {8, 2 + 8, 4 + 8}, kept[3] = {4 + 4, 2 + 4, 2 + 4}; // bytes an element, by type
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++)
        for (int half = 0; half < 3; half++) {
            Config *c = parallel_config(1);
            config_set_dtype(c, (DType)dtype);
            nvme_config(c, half / 2.0, 3);
            c->batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / test_world.world;
            Trainer *trainer = zero_trainer(c);
            const Zero *z = &trainer->zero;
            int64_t elements = 0, file = z->offload.file[FILE_UPDATE].bytes;
            for (int u = 0; u < z->model->table.n_units; u++) elements += z->unit[u].update_on_host ? z->unit[u].update_numel : 0;
            expect_equal_i64(t, "bytes for the file", z->layout.file_bytes[FILE_UPDATE], elements * filed[dtype]);
            expect_true(t, elements == 0 || (file >= z->layout.file_bytes[FILE_UPDATE] && file <= z->layout.file_bytes[FILE_UPDATE] + z->offload.n_pieces * (AIO_ALIGN + 256)),
                        "the file has %" PRId64 " bytes for %" PRId64, file, z->layout.file_bytes[FILE_UPDATE]);
            expect_equal_i64(t, "arrays in host memory", z->offload.bytes - z->layout.host_bytes.bytes[MEMORY_BUFFERS], elements * kept[dtype]);
            expect_equal_i64(t, "host memory, planned", memory_total(&trainer->planned_host), z->offload.bytes);
            if (half == 2) expect_equal_i64(t, "states on the device", z->allocated.bytes[MEMORY_OPTIMIZER_STATES] + z->allocated.bytes[MEMORY_MASTERS], 0);
            zero_trainer_free(trainer);
            free(c);
        }
    nvme_end();
}

// 200 updates leave memory, descriptors and the folder as they were after the first 20.
static void test_nvme_nothing_grows(Test *t) {
    nvme_begin();
    Config *c = parallel_config(1);
    config_set_dtype(c, DTYPE_BF16);
    nvme_config(c, 1, 3);
    nvme_weights_config(c, OFFLOAD_NVME, 1, 0, 3);
    Trainer *trainer = zero_trainer(c);
    dataloader_open(&trainer->val, tiny_tokens, 131, c->run.seq_len, 1, false, false, 1, "data.val");
    trainer->has_val = true;
    c->run.eval_batches = 1;
    int64_t held = 0, descriptors = 0;
    for (int k = 0; k < 200; k++) {
        train_step(trainer);
        if (k % 10 == 0) evaluate(trainer);
        if (k == 20) held = held_bytes(), descriptors = open_descriptors();
    }
    expect_true(t, held_bytes() <= held + (1 << 20), "memory grew from %" PRId64 " to %" PRId64 " bytes", held, held_bytes());
    expect_equal_i64(t, "descriptors", open_descriptors(), descriptors);
    int entries = 0, at = open(nvme_folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    folder_each(at, aio_count_entry, &entries);
    close(at);
    expect_equal_i64(t, "files in the folder", entries, 0);
    zero_trainer_free(trainer);
    free(c);
    nvme_end();
}

// From now on a hook sees each request.
static void nvme_hook(Trainer *trainer, int (*hook)(void *, AioCall *), void *ctx) {
    Offload *o = &trainer->zero.offload;
    offload_wait(o, -1);
    offload_close_unit(o);
    for (int i = 0; i < o->filing.buffer_count; i++) buffer_wait(o, &o->buffer[i]);
    for (int i = 0; i < o->n_weights; i++) {
        weights_settle(o, &o->weights[i]);
        transfer_wait(o, &o->weights[i].transfer, FILE_WEIGHTS);
    }
    AioOptions options = o->filing.aio;
    options.before = hook;
    options.ctx = ctx;
    aio_free(o->aio);
    o->aio = aio_create(&options);
}

// Requests take up to 4 ms, each its own time: who does not wait for what it needs finds something else.
static int nvme_slow_hook(void *ctx, AioCall *call) {
    usleep((useconds_t)(rng_bits(3, 1, (uint64_t)__atomic_fetch_add((int64_t *)ctx, 1, __ATOMIC_RELAXED)) % 4000) >> !call->write);
    return 0;
}
static void test_nvme_slow_disk(Test *t) {
    if (KERNELS_ON_GPU) { test_skip(t, "compares bits of the CPU's update"); return; }
    nvme_begin();
    for (int way = 0; way < 4; way++) {
        int64_t requests = 0;
        Config *c = parallel_config(1);
        config_set_dtype(c, (DType)(way % 3));
        c->zero.stage = 3;
        Trainer *plain = zero_trainer(c);
        Config v = *c;
        nvme_weights_config(&v, way == 0 ? OFFLOAD_NONE : way == 1 ? OFFLOAD_NVME : OFFLOAD_CPU, 1, 0, way);
        v.zero.offload_optimizer.pipeline_read = v.zero.offload_optimizer.pipeline_write = true;
        v.zero.aio.intra_op_parallelism = 4; // so that one request overtakes another
        Trainer *slow = zero_trainer(&v);
        nvme_hook(slow, nvme_slow_hook, &requests);
        for (int k = 0; k < 5; k++) {
            StepStats want = train_step(plain), got = train_step(slow);
            expect_same_bytes(t, "loss", &got.loss, &want.loss, 8);
            expect_same_bytes(t, "gradient norm", &got.grad_norm, &want.grad_norm, 8);
        }
        int64_t n;
        float *want = trainer_states(plain, &n), *got = trainer_states(slow, &n);
        expect_same_bytes(t, "masters and states", got, want, n * 4);
        expect_true(t, requests > 30, "only %" PRId64 " requests", requests);
        free(want);
        free(got);
        zero_trainer_free(plain);
        zero_trainer_free(slow);
        free(c);
    }
    nvme_end();
}

// A disk that fails in the middle of the third update ends the run, naming folder, file, offset and reason.
static void nvme_fails(Config *c, void *arg) {
    Trainer *trainer = zero_trainer(c);
    train_step(trainer);
    train_step(trainer);
    nvme_hook(trainer, aio_fail_hook, arg);
    train_step(trainer);
    train_step(trainer);
}
static void nvme_states_fail(void *arg) {
    Config *c = parallel_config(1);
    nvme_config(c, 1, 3);
    nvme_fails(c, arg);
}
static void nvme_weights_fail(void *arg) {
    Config *c = parallel_config(1);
    nvme_weights_config(c, OFFLOAD_CPU, 1, 0, 3);
    nvme_fails(c, arg);
}
static void test_nvme_failing_disk(Test *t) {
    if (test_world.world > 1 || KERNELS_ON_GPU) { test_skip(t, "in a child process of one rank"); return; }
    nvme_begin();
    for (int weights = 0; weights < 2; weights++)
        for (int write = 0; write < 2; write++) {
            AioCall at = {write == 1, 8192, write ? EIO : ENXIO};
            const char *parts[] = {nvme_folder, weights ? "the file of weights" : "the file of optimizer states and masters", write ? "write of" : "read of", "at offset", write ? "Input/output error" : "No such device or address",
                                   "its last checkpoint is as good as it was", weights ? "offload_param.nvme_path" : "offload_optimizer.nvme_path"};
            expect_dies_parts(t, EXIT_IO, parts, 7, weights ? nvme_weights_fail : nvme_states_fail, &at);
        }
    nvme_end();
}

static const TestRow nvme_tests[] = {
    {"runs", test_nvme_runs}, {"weights", test_nvme_weights}, {"states between updates, two runs", test_nvme_states}, {"resume", test_nvme_resume}, {"bytes", test_nvme_bytes},
    {"nothing grows", test_nvme_nothing_grows}, {"a slow disk", test_nvme_slow_disk}, {"a failing disk", test_nvme_failing_disk}, {NULL, NULL},
};
