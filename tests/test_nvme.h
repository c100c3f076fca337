// test_nvme.h - section "nvme": masters and states that live in a file train as if they lived on the device, bit for bit on the CPU
// backend. Run with mpirun -n 1, 2, 3 ./test_gpt nvme.
//
// Reports of other trainers' users, and the rows that would notice (DS: DeepSpeed):
//     swap files are short, or empty                                DS 1070, 1627, 4888   aio/refusals, aio/short_transfers, a failing disk
//     a save reads files that are being rewritten                   DS 7613, 7549         resume, which saves after each update
//     two runs on one path destroy each other                                             two runs
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
    for (int way = 0; way < 6; way++) {
        Config *c = parallel_config(1);
        config_set_dtype(c, (DType)(way % 3));
        c->zero.stage = 3;
        Trainer *plain = zero_trainer(c);
        Config v = *c, w = *c;
        nvme_config(&v, way < 3 ? 1 : 0.7, way);
        nvme_config(&w, 1, way + 1);
        Trainer *filed = zero_trainer(&v), *beside = zero_trainer(&w);
        expect_true(t, filed->zero.offload.aio != NULL && filed->zero.offload.file.bytes > 0, "nothing is filed");
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
            for (int way = -1; way < 4; way++) { // -1 trains and saves; then loads to a file, half of it, to host memory, to the device
                Config *c = parallel_config(1);
                config_set_dtype(c, saver ? DTYPE_BF16 : DTYPE_FP16);
                snprintf(c->run.resume, sizeof c->run.resume, "auto");
                snprintf(c->checkpoint.save_dir, sizeof c->checkpoint.save_dir, "%s", own);
                c->zero.load_from_fp32_weights = !from_weights;
                c->zero.stage = 3;
                if (way < 0 ? saver : way < 2) nvme_config(c, way == 1 ? 0.5 : 1, way + 4);
                else if (way == 2) offload_config(c, 3, 1);
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
            int64_t elements = 0;
            for (int u = 0; u < z->model->table.n_units; u++) elements += z->unit[u].update_on_host ? z->unit[u].update_numel : 0;
            expect_equal_i64(t, "bytes for the file", z->layout.file_bytes, elements * filed[dtype]);
            expect_true(t, elements == 0 || (z->offload.file.bytes >= z->layout.file_bytes && z->offload.file.bytes <= z->layout.file_bytes + z->offload.n_pieces * (AIO_ALIGN + 256)),
                        "the file has %" PRId64 " bytes for %" PRId64, z->offload.file.bytes, z->layout.file_bytes);
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
    Trainer *trainer = zero_trainer(c);
    int64_t resident = 0, descriptors = 0;
    for (int k = 0; k < 200; k++) {
        train_step(trainer);
        if (k == 20) resident = resident_bytes(), descriptors = open_descriptors();
    }
#ifndef __SANITIZE_ADDRESS__ // which keeps freed memory for a while, and finds leaks itself
    expect_true(t, resident_bytes() <= resident + (1 << 20), "resident memory grew from %" PRId64 " to %" PRId64 " bytes", resident, resident_bytes());
#else
    (void)resident;
#endif
    expect_equal_i64(t, "descriptors", open_descriptors(), descriptors);
    int entries = 0, at = open(nvme_folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    folder_each(at, aio_count_entry, &entries);
    close(at);
    expect_equal_i64(t, "files in the folder", entries, 0);
    zero_trainer_free(trainer);
    free(c);
    nvme_end();
}

// A disk that fails in the middle of the third update ends the run, naming folder, file, offset and reason.
static void nvme_fails(void *arg) {
    Config *c = parallel_config(1);
    nvme_config(c, 1, 3);
    Trainer *trainer = zero_trainer(c);
    Offload *o = &trainer->zero.offload;
    train_step(trainer);
    train_step(trainer);
    offload_wait(o, -1);
    for (int i = 0; i < o->filing.buffer_count; i++) buffer_wait(o, &o->buffer[i]);
    AioOptions options = o->filing.aio;
    options.before = aio_fail_hook;
    options.ctx = arg;
    aio_free(o->aio);
    o->aio = aio_create(&options);
    train_step(trainer);
    train_step(trainer);
}
static void test_nvme_failing_disk(Test *t) {
    if (test_world.world > 1 || KERNELS_ON_GPU) { test_skip(t, "in a child process of one rank"); return; }
    nvme_begin();
    AioCall at = {true, 8192, EIO};
    const char *parts[] = {nvme_folder, "the file of optimizer states and masters", "write of", "at offset", "Input/output error", "its last checkpoint is as good as it was"};
    expect_dies_parts(t, EXIT_IO, parts, 6, nvme_fails, &at);
    at.write = false;
    at.bytes = ENXIO;
    parts[2] = "read of";
    parts[4] = "No such device or address";
    expect_dies_parts(t, EXIT_IO, parts, 6, nvme_fails, &at);
    nvme_end();
}

static const TestRow nvme_tests[] = {
    {"runs", test_nvme_runs}, {"states between updates, two runs", test_nvme_states}, {"resume", test_nvme_resume}, {"bytes", test_nvme_bytes},
    {"nothing grows", test_nvme_nothing_grows}, {"a failing disk", test_nvme_failing_disk}, {NULL, NULL},
};
