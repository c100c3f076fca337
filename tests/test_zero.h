// test_zero.h - the keys of zero_optimization, communication_data_type and their like: what each of them changes in the
// collectives that are started (trace.h) and in memory, and that it changes nothing else. Run with mpirun -n 1, 2, 3, 4.
//
// Reports of other trainers' users, and the rows here and in test_parallel.h that would notice (DS: DeepSpeed):
//     stages differ in loss or norm, most of all with accumulation   DS 1488, 4298, 7839, 5154   stages, stages accumulation
//     the last micro-batch is added after the reduction               DS 7985                     gradients on their way
//     16-bit accumulators lose small contributions                    DS 1800, 2847, 4713         many micro-batches
//     overlapped communication reuses buffers too early               DS 5545, 7965, 8061         buckets; DEBUG's race checks
//     convergence depends on bucket sizes                             DS 6351, 5347               buckets, keys that change no bit
//     stage 2 communicates at every micro-step, unsaid                DS 373                      traffic
//     overlap that does not overlap                                   DS 7804                     overlap
//     a checkpoint loads under its own number of ranks only           DS 787, 2898, 3810          resume across ranks, across stages
//     masters are rebuilt from 16-bit weights at resume               llm.c 522, 715              load_from_fp32_weights
//     the logged loss is one rank's, or the last micro-batch's        DS 1107, llm.c 551          golden run, all stages
#pragma once
#include "test_parallel.h"

// A trainer on all ranks of the test, with data and initial weights.
static Trainer *zero_trainer(Config *c) {
    Trainer *t = (Trainer *)host_alloc(sizeof(Trainer));
    c->batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / test_world.world;
    trainer_init_core(t, c, test_grid(), true, c->batch.train_micro_batch_size_per_gpu);
    t->metrics.log_fd = -1;
    dataloader_open(&t->train, tiny_tokens, 131, c->run.seq_len, c->batch.train_batch_size, false, false, 1, "data.train");
    t->has_train = true;
    zero_init_weights(&t->zero, (uint64_t)c->run.seed);
    return t;
}
static void zero_trainer_free(Trainer *t) {
    trainer_free(t);
    free(t);
}

// The elements of a whole unit with its padding, and of all of them.
static int64_t whole_numel(const Trainer *t, int unit) { return t->zero.unit[unit].whole; }
static int64_t whole_total(const Trainer *t) {
    int64_t sum = 0;
    for (int u = 0; u < t->model.table.n_units; u++) sum += whole_numel(t, u);
    return sum;
}

// ---------------------------------------------------------------------------------------------------------------
// Values

// Runs that must be the same to the last bit.
static void test_keys_without_a_bit(Test *t) {
    for (int stage = 0; stage < 4; stage++) {
        Config *c = parallel_config(2);
        c->zero.stage = stage;
        StepStats want[PARALLEL_UPDATES], got[PARALLEL_UPDATES];
        int64_t n, block;
        Trainer *first = zero_trainer(c);
        block = first->model.table.unit[1].numel;
        zero_trainer_free(first);
        float *want_weights = parallel_run(c, test_grid(), want, &n, NULL, NULL);
        static const int64_t sizes[] = {0, 2, 1000, 20000};
        const bool power_of_two = (test_world.world & (test_world.world - 1)) == 0;
        for (int k = 0; k < 12; k += KERNELS_ON_GPU ? 3 : 1) {
            Config v = *c;
            const char *what = "";
            if (k < 4) v.zero.allgather_bucket_size = sizes[k], what = "allgather_bucket_size";
            else if (k < 8) { // none, one block, two, all stay whole
                v.zero.param_persistence_threshold = block + 1;
                v.zero.model_persistence_threshold = (k - 4) * block * test_world.world;
                what = "stage3_model_persistence_threshold";
            }
            else if (k == 8) v.zero.reduce_scatter = false, what = "reduce_scatter";
            else if (k == 9) v.zero.reduce_scatter = false, v.zero.reduce_bucket_size = 1000, v.zero.overlap_comm = false, what = "reduce_scatter, small buckets";
            else if (k == 10) v.zero.prescale_gradients = true, what = "prescale_gradients";
            else v.zero.gradient_predivide_factor = 4, what = "gradient_predivide_factor"; // a power of two: exact
            if ((k < 4 && (stage == 0 || stage == 3)) || (k >= 4 && k < 8 && stage < 3) || (k == 10 && !power_of_two)) continue;
            if ((k == 8 || k == 9) && KERNELS_ON_GPU && test_world.world > 2) continue; // NCCL's all-reduce adds in another order
            float *weights = parallel_run(&v, test_grid(), got, &n, NULL, NULL);
            expect_same_run(t, what, got, weights, want, want_weights, n);
            free(weights);
        }
        free(want_weights);
        free(c);
    }
}

// Read from outside, a gradient is the shards' values in fp32.
static void expect_gradient_read(Test *t, Zero *z, Stream s) {
    const ParamDesc *row = &z->model->table.row[0];
    float *seen = (float *)host_alloc((size_t)param_numel(row) * 4), *there = (float *)host_alloc((size_t)param_numel(row) * 4);
    int64_t first, last;
    zero_tensor_read(z, 0, STATE_GRAD, seen);
    zero_row_range(z, row, &first, &last);
    if (first < last) {
        Tensor part = zero_grad_part(z, row->unit, row->offset + first - z->unit[row->unit].update_first, last - first);
        device_copy(there, part.data, (last - first) * dtype_bytes(part.dtype), COPY_TO_HOST, s);
        stream_sync(s);
        for (int64_t i = 0; i < last - first; i++)
            expect_true(t, seen[first + i] == dtype_load(there, part.dtype, i), "element %" PRId64 " reads %g", i, (double)seen[first + i]);
    }
    free(seen);
    free(there);
}

// The way of a gradient, bit for bit: what this rank computed (g), in fp32, is rounded to communication_data_type, summed over
// the ranks, and added to the shard, which is rounded to grad_accum_dtype. g comes from a run that sends fp32. Where a model's
// own type travels, its kernels do the rounding; a GPU's may then have taken another algorithm for a product, whose sums in
// another order round elsewhere: by a step of the type in the sum over the ranks, 2^-7 of the value for bf16.
static void gradient_way(Test *t, DType model, int stage, DType communication, DType accumulation, bool reduce_scatter, int64_t micro_batches) {
    Config *c = parallel_config(micro_batches);
    config_set_dtype(c, model);
    c->fp16.loss_scale = 128; // so that nothing overflows
    c->zero.stage = stage;
    c->zero.reduce_bucket_size = 20000; // buckets of one block, and of several units
    Trainer *plain = NULL, *rounds;
    const bool travels = test_world.world > 1 || accumulation != DTYPE_FP32;
    if (!travels) { free(c); return; }
    if (test_world.world == 1) c->zero.grad_accum_dtype = accumulation; // one rank has no sums without
    c->zero.direct_exchange = false;
    plain = zero_trainer(c);
    trace_begin(true);
    train_step(plain);
    trace_end();
    const int units = plain->model.table.n_units, sums = (int)trace_count(TRACE_REDUCE_SCATTER), rounds_of = stage < 2 ? 1 : (int)micro_batches;
    expect_equal_i64(t, "sums of gradients in an update", sums, units * rounds_of);
    float **own = (float **)host_alloc(sizeof(float *) * (size_t)sums); // [micro-batch][unit, from the head]
    for (int i = 0, k = 0; i < trace.n; i++)
        if (trace.row[i].kind == TRACE_REDUCE_SCATTER) own[k++] = (float *)trace.row[i].given, trace.row[i].given = NULL;
    Config *v = parallel_config(micro_batches);
    config_set_dtype(v, model);
    v->fp16 = c->fp16;
    v->zero = c->zero;
    v->zero.communication_data_type = communication;
    v->zero.grad_accum_dtype = accumulation;
    v->zero.reduce_scatter = reduce_scatter;
    v->zero.direct_exchange = stage != 1; // both ways must come to the same
    rounds = zero_trainer(v);
    train_step(rounds);

    Zero *z = &rounds->zero;
    const DType wire = test_world.world > 1 ? communication : DTYPE_FP32, shard = stage < 2 ? DTYPE_FP32 : accumulation;
    int *ranks = (int *)host_alloc(sizeof(int) * (size_t)test_world.world);
    for (int r = 0; r < test_world.world; r++) ranks[r] = r;
    Group g = comm_group_create(ranks, test_world.world, false);
    free(ranks);
    Stream s = stream_create();
    for (int u = 0; u < units; u++) {
        const bool direct = wire != DTYPE_FP32 && wire == model && stage >= 2 && u > 0 && u < units - 1;
        expect_true(t, z->unit[u].grad_dtype == (direct ? wire : DTYPE_FP32), "unit %d: its gradient is written in %s", u, dtype_name(z->unit[u].grad_dtype));
        const int64_t whole = whole_numel(rounds, u), n = z->unit[u].shard_numel;
        char *sent = (char *)device_malloc(whole * 4), *host = (char *)host_alloc((size_t)whole * 4);
        float *sum = (float *)host_alloc((size_t)n * 4);
        for (int m = 0; m < rounds_of; m++) {
            for (int64_t i = 0; i < whole; i++) dtype_store(host, wire, i, own[m * units + units - 1 - u][i]);
            device_copy(sent, host, whole * dtype_bytes(wire), COPY_TO_DEVICE, s);
            char *mine = sent + n * g.rank * dtype_bytes(wire);
            if (reduce_scatter) comm_reduce_scatter(g, mine, sent, n, wire, s);
            else comm_all_reduce(g, sent, whole, wire, s);
            device_copy(host, mine, n * dtype_bytes(wire), COPY_TO_HOST, s);
            stream_sync(s);
            for (int64_t i = 0; i < n; i++) {
                float x = dtype_load(host, wire, i);
                dtype_store(&x, shard, 0, m == 0 ? x : sum[i] + x);
                sum[i] = dtype_load(&x, shard, 0);
            }
        }
        Tensor part = zero_grad_part(z, u, 0, n);
        expect_true(t, part.dtype == shard, "the shard is %s, expected %s", dtype_name(part.dtype), dtype_name(shard));
        char *got = (char *)host_alloc((size_t)(n * dtype_bytes(shard)));
        device_copy(got, part.data, n * dtype_bytes(shard), COPY_TO_HOST, s);
        stream_sync(s);
        char what[160];
        snprintf(what, sizeof what, "stage %d, sent in %s by %s, summed in %s: gradient of unit %d", stage, dtype_name(wire),
                 reduce_scatter ? "reduce-scatter" : "all-reduce", dtype_name(shard), u);
        t->compared += n;
        float largest = 0;
        for (int64_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(sum[i]));
        const float bound = direct && KERNELS_ON_GPU ? ldexpf(largest, model == DTYPE_BF16 ? -7 : -10) : 0;
        for (int64_t i = 0; i < n; i++)
            if (!(fabsf(sum[i] - dtype_load(got, shard, i)) <= bound)) {
                test_fail(t, "%s: element %" PRId64 " is %g, expected %g", what, i, (double)dtype_load(got, shard, i), (double)sum[i]);
                break;
            }
        free(got);
        free(sum);
        free(host);
        device_free(sent);
    }
    if (stage > 0) expect_gradient_read(t, z, s);
    for (int k = 0; k < sums; k++) free(own[k]);
    free(own);
    stream_destroy(s);
    comm_group_free(&g);
    zero_trainer_free(plain);
    zero_trainer_free(rounds);
    free(c);
    free(v);
}

static void test_gradients_on_their_way(Test *t) {
    for (int stage = 0; stage < 4; stage++)
        for (int sent = 0; sent < DTYPE_COUNT; sent++)
            for (int reduce_scatter = 0; reduce_scatter < 2; reduce_scatter++)
                for (int micro_batches = 1; micro_batches <= 3; micro_batches += 2) {
                    gradient_way(t, DTYPE_FP32, stage, (DType)sent, DTYPE_FP32, reduce_scatter, micro_batches);
                    if (stage < 2) continue;
                    gradient_way(t, DTYPE_FP32, stage, (DType)sent, DTYPE_BF16, reduce_scatter, micro_batches);
                    if (sent != DTYPE_FP32) gradient_way(t, (DType)sent, stage, (DType)sent, micro_batches == 1 ? DTYPE_FP32 : DTYPE_BF16, reduce_scatter, micro_batches);
                }
    if (t->compared == 0) test_fail(t, "nothing travelled");
}

// Training by rounded gradients stays near: a relative error of 2^-9 of each rank's part and of the sum. 1e-2 of loss and norm
// is the bound for 16 bits everywhere in these tests.
static void test_rounded_runs(Test *t) {
    Config *c = parallel_config(2);
    config_set_dtype(c, DTYPE_BF16);
    StepStats want[PARALLEL_UPDATES], got[PARALLEL_UPDATES];
    int64_t n;
    free(parallel_run(c, test_grid(), want, &n, NULL, NULL));
    for (int stage = 0; stage < 4; stage++)
        for (int accumulation = 0; accumulation < (stage < 2 ? 1 : 2); accumulation++) {
            c->zero.stage = stage;
            c->zero.communication_data_type = DTYPE_BF16;
            c->zero.grad_accum_dtype = accumulation ? DTYPE_BF16 : DTYPE_FP32;
            free(parallel_run(c, test_grid(), got, &n, NULL, NULL));
            expect_near_run(t, "gradients in bf16", got, want, 1e-2);
            const bool differs = memcmp(&got[9].loss, &want[9].loss, 8) != 0;
            expect_true(t, differs == (test_world.world > 1 || accumulation), "stage %d: rounding %s", stage, differs ? "of nothing changed a loss" : "changed nothing");
        }
    free(c);
}

// Many equal micro-batches: in fp32 their mean is one of them to 1e-6, and in bf16 it stops growing where a summand is half a
// step of the sum: the sum of 512 equal numbers in bf16, one after the other, is 256 of them (8 bits, ties to even).
static void test_many_micro_batches(Test *t) {
    enum { MANY = 512 };
    Stream s = stream_create();
    const float x = 1;
    uint16_t small = float_to_bf16(x), got;
    float sum = 0, *at = (float *)device_malloc(12);
    Tensor bf16 = tensor1((uint16_t *)at, DTYPE_BF16, 1), fp32 = tensor1(at + 1, DTYPE_FP32, 1), summand = tensor1((uint16_t *)(at + 2), DTYPE_BF16, 1);
    device_memset(at, 0, 12, s);
    device_copy(summand.data, &small, 2, COPY_TO_DEVICE, s);
    for (int k = 0; k < MANY; k++) {
        add_inplace(bf16, summand, s);
        add_inplace(fp32, summand, s);
    }
    device_copy(&got, bf16.data, 2, COPY_TO_HOST, s);
    device_copy(&sum, fp32.data, 4, COPY_TO_HOST, s);
    stream_sync(s);
    expect_near(t, "512 in fp32", sum, MANY * x, 0);
    expect_near(t, "512 in bf16", bf16_to_float(got), 256 * x, 0);
    device_free(at);
    stream_destroy(s);
}

// ---------------------------------------------------------------------------------------------------------------
// What is started

// Bytes and messages of an update, as the table at the top of zero.cu has them; at stage 3 with all blocks live.
static void test_traffic(Test *t) {
    const int N = test_world.world;
    for (int stage = 0; stage < 4; stage++)
        for (int way = 0; way < 6; way++) { // sums by reduce-scatter, by all-reduce, by exchange; each in fp32 and bf16
            Config *c = parallel_config(3);
            const int64_t micro_batches = 3;
            config_set_dtype(c, DTYPE_BF16);
            c->zero.stage = stage;
            c->zero.reduce_scatter = way / 2 != 1;
            c->zero.direct_exchange = way / 2 == 2;
            c->zero.communication_data_type = way % 2 ? DTYPE_BF16 : DTYPE_FP32;
            Trainer *trainer = zero_trainer(c);
            train_step(trainer);
            trace_begin(false);
            train_step(trainer); // the second update, whose weights the first has changed
            trace_end();
            const int64_t all = whole_total(trainer), units = trainer->model.table.n_units, sums = (stage < 2 ? 1 : micro_batches) * (N > 1), wire = way % 2 ? 2 : 4;
            const TraceKind kinds[] = {TRACE_REDUCE_SCATTER, TRACE_ALL_REDUCE, TRACE_ALL_TO_ALL}, sum = kinds[way / 2];
            expect_equal_i64(t, "bytes of gradients summed", trace_bytes(sum), sums * all * wire);
            expect_equal_i64(t, "sums", trace_count(sum), sums * units);
            for (int other = 0; other < 3; other++) if (other != way / 2) expect_equal_i64(t, "sums of another kind", trace_count(kinds[other]), 0);
            int64_t gathered = N == 1 ? 0 : stage == 0 ? (way / 2 != 1) * all * wire : all * 2; // gradients at stage 0, else weights, here all live
            expect_equal_i64(t, "bytes gathered", trace_bytes(TRACE_ALL_GATHER), gathered);
            zero_trainer_free(trainer);
            free(c);
        }
}

// Gathers of blocks in an update of m micro-batches at stage 3, when `live` of L blocks have room: every sweep over the blocks,
// up or down, finds those that the last one has left.
static void test_live_parameters(Test *t) {
    enum { L = 3, MICRO_BATCHES = 3 };
    for (int64_t live = 2; live <= L && test_world.world > 1; live++)
        for (int reuse = 0; reuse < 2; reuse++)
            for (int64_t ahead = 0; ahead < 2; ahead++) {
                Config *c = parallel_config(MICRO_BATCHES);
                c->zero.stage = 3;
                Trainer *trainer = zero_trainer(c);
                const int64_t block = whole_numel(trainer, 1);
                zero_trainer_free(trainer);
                c->zero.max_live_parameters = live * block;
                c->zero.prefetch_bucket_size = ahead ? 1 << 30 : 0;
                if (!reuse) c->zero.max_reuse_distance = 0;
                trainer = zero_trainer(c);
                expect_equal_i64(t, "blocks with room", trainer->zero.n_param_pool, live);
                train_step(trainer);
                trace_begin(false);
                train_step(trainer);
                trace_end();
                int64_t blocks = reuse ? L + (2 * MICRO_BATCHES - 1) * (L - live) : 2 * MICRO_BATCHES * L;
                expect_equal_i64(t, reuse ? "gathers, blocks that stay" : "gathers, stage3_max_reuse_distance 0", trace_count(TRACE_ALL_GATHER), blocks + 2);
                zero_trainer_free(trainer);
                free(c);
            }
    if (test_world.world == 1) test_skip(t, "one rank gathers nothing");
}

// Small blocks stay whole, as many as the cap allows: they have memory of their own and are gathered once an update.
static void test_persistence(Test *t) {
    enum { L = 3, MICRO_BATCHES = 2 };
    if (test_world.world == 1) { test_skip(t, "one rank has everything whole"); return; }
    Config *c = parallel_config(MICRO_BATCHES);
    c->zero.stage = 3;
    Trainer *trainer = zero_trainer(c);
    const int64_t block = trainer->model.table.unit[1].numel;
    zero_trainer_free(trainer);
    c->zero.max_reuse_distance = 0;
    for (int stay = 0; stay <= L; stay++) {
        c->zero.param_persistence_threshold = block + 1;
        c->zero.model_persistence_threshold = stay * block * test_world.world + 5;
        trainer = zero_trainer(c);
        for (int u = 1; u <= L; u++) expect_true(t, trainer->zero.unit[u].dedicated == (u <= stay), "%d blocks shall stay whole: block %d", stay, u);
        train_step(trainer);
        trace_begin(false);
        train_step(trainer);
        trace_end();
        expect_equal_i64(t, "gathers of an update", trace_count(TRACE_ALL_GATHER), 2 + stay + 2 * MICRO_BATCHES * (L - stay));
        zero_trainer_free(trainer);
    }
    c->zero.param_persistence_threshold = block; // smaller, not as small
    trainer = zero_trainer(c);
    for (int u = 1; u <= L; u++) expect_true(t, !trainer->zero.unit[u].dedicated, "block %d stays whole at the threshold itself", u);
    zero_trainer_free(trainer);
    free(c);
}

// What is gathered before anything has computed: the units that begin within the look-ahead of the first.
static void test_look_ahead(Test *t) {
    if (test_world.world == 1) { test_skip(t, "one rank gathers nothing"); return; }
    for (int stage = 1; stage < 4; stage++)
        for (int units = 0; units <= 5; units++) {
            Config *c = parallel_config(1);
            c->zero.stage = stage;
            Trainer *trainer = zero_trainer(c);
            int64_t begin = 0; // of the last unit that shall be gathered
            for (int u = 0; u + 1 < units; u++) begin += whole_numel(trainer, u);
            zero_trainer_free(trainer);
            c->zero.allgather_bucket_size = c->zero.prefetch_bucket_size = 0;
            *(stage < 3 ? &c->zero.allgather_bucket_size : &c->zero.prefetch_bucket_size) = units == 0 ? 0 : begin + 1;
            *(stage < 3 ? &c->zero.prefetch_bucket_size : &c->zero.allgather_bucket_size) = 1 << 30; // the other stages' key
            trainer = zero_trainer(c);
            zero_set_uses(&trainer->zero, trainer->train_uses, trainer->n_train_uses);
            trace_begin(false);
            zero_begin_step(&trainer->zero);
            trace_end();
            expect_equal_i64(t, "units gathered ahead", trace_count(TRACE_ALL_GATHER), units);
            zero_trainer_free(trainer);
            free(c);
        }
}

// Sums start while backward is still to do, in buckets: what is written and not yet on its way never exceeds the bucket, or one
// unit that is larger, and a larger bucket waits longer. The verbs alone, without computing.
static void test_reduce_buckets(Test *t) {
    if (test_world.world == 1) { test_skip(t, "one rank sums nothing"); return; }
    int64_t started_early[4] = {0};
    for (int stage = 1; stage < 4; stage++)
        for (int blocks = 0; blocks <= 3; blocks++) {
            Config *c = parallel_config(1);
            c->zero.stage = stage;
            Trainer *trainer = zero_trainer(c);
            const int64_t block = whole_numel(trainer, 1), bucket = blocks * block;
            zero_trainer_free(trainer);
            c->zero.reduce_bucket_size = bucket;
            trainer = zero_trainer(c);
            Zero *z = &trainer->zero;
            const int units = trainer->model.table.n_units;
            if (stage >= 2) expect_equal_i64(t, "gradients of blocks that have room", z->n_grad_pool, min_i64(3, max_i64(1, blocks) + 1));
            zero_begin_step(z);
            z->last_micro_batch = true;
            int64_t written = 0;
            trace_begin(false);
            for (int u = units - 1; u >= 0; u--) {
                zero_grad_begin(z, u);
                zero_grad_end(z, u, PHASE_BOTH);
                if (u == 0) zero_reduce_bucket(z);
                written += whole_numel(trainer, u);
                int64_t started = (trace_bytes(TRACE_REDUCE_SCATTER) + trace_bytes(TRACE_ALL_TO_ALL)) / 4, waiting = written - started;
                expect_true(t, waiting <= max_i64(bucket, whole_numel(trainer, u)) && (u > 0 || waiting == 0),
                            "stage %d, bucket of %d blocks: after unit %d %" PRId64 " elements wait", stage, blocks, u, waiting);
                if (u == 2) started_early[blocks] = started;
            }
            trace_end();
            zero_finish_grads(z);
            zero_trainer_free(trainer);
            free(c);
        }
    for (int blocks = 2; blocks <= 3; blocks++)
        expect_true(t, started_early[blocks] < started_early[1], "a bucket of %d blocks starts as early as one of one block", blocks);
}

static void test_overlap(Test *t) {
    for (int overlap = 0; overlap < 2; overlap++) {
        Config *c = parallel_config(1);
        c->zero.stage = 3;
        c->zero.overlap_comm = overlap;
        c->zero.grad_accum_dtype = test_world.world == 1 ? DTYPE_BF16 : DTYPE_FP32; // one rank: so that something is reduced
        Trainer *trainer = zero_trainer(c);
        trace_begin(false);
        train_step(trainer);
        trace_end();
        expect_true(t, trace.n > 0, "nothing was started");
        for (int i = 0; i < trace.n; i++)
            expect_true(t, (trace.row[i].stream != trainer->stream) == overlap, "overlap_comm %d: collective %d is on the %s stream", overlap, i,
                        trace.row[i].stream == trainer->stream ? "computation's" : "other");
        zero_trainer_free(trainer);
        free(c);
    }
}

// Before the sum, a rank's gradients are divided by the ranks (prescale_gradients), by gradient_predivide_factor, or by
// nothing, and by the rest when the update reads them; norms and losses are those of the mean.
static void test_prescale(Test *t) {
    const int N = test_world.world;
    if (N == 1) { test_skip(t, "one rank sends nothing"); return; }
    float *first = NULL;
    double norm = 0;
    for (int way = 0; way < 3; way++) {
        Config *c = parallel_config(1);
        c->zero.prescale_gradients = way == 1;
        c->zero.gradient_predivide_factor = way == 2 ? 5 : 1;
        Trainer *trainer = zero_trainer(c);
        trace_begin(true);
        StepStats s = train_step(trainer);
        trace_end();
        expect_true(t, trace.n > 0 && trace.row[0].kind == (trainer->zero.opt.direct_exchange ? TRACE_ALL_TO_ALL : TRACE_REDUCE_SCATTER), "no sum came first");
        float *given = (float *)trace.row[0].given, largest = 0; // the head's: its layer norm
        const int64_t n = trace.row[0].n;
        trace.row[0].given = NULL;
        if (way == 0) first = given, norm = s.grad_norm;
        for (int64_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(first[i]));
        expect_true(t, largest > 0, "no gradient");
        for (int64_t i = 0; i < n; i++) expect_near(t, "a gradient before the sum", (double)given[i] * (way == 1 ? N : way == 2 ? 5 : 1), first[i], 1e-5 * largest);
        expect_near(t, "gradient norm", s.grad_norm, norm, 1e-5 * norm);
        if (way > 0) free(given);
        zero_trainer_free(trainer);
        free(c);
    }
    free(first);
}

// gradient_allreduce_op = sum: the update's gradient is the mean's times the ranks, whatever was divided before the sum.
static void test_allreduce_op(Test *t) {
    double norm = 0, loss = 0;
    for (int way = 0; way < 6; way++) {
        Config *c = parallel_config(1);
        c->zero.stage = way / 2;
        c->zero.gradient_allreduce_op = way > 0;
        c->zero.prescale_gradients = way == 1;
        Trainer *trainer = zero_trainer(c);
        StepStats s = train_step(trainer);
        if (way == 0) norm = s.grad_norm, loss = s.loss;
        expect_near(t, "gradient norm of a sum", s.grad_norm, norm * (way > 0 ? test_world.world : 1), 1e-5 * norm * test_world.world);
        expect_near(t, "loss", s.loss, loss, 1e-6 * loss);
        zero_trainer_free(trainer);
        free(c);
    }
}

// Bytes of gradients: 4 a parameter of the shard, or 2; the buffers of 16-bit messages are accounted for. Blocks of a model
// whose own type travels write into what travels: their buffers are half as large, and nothing of them is converted.
static void test_gradient_bytes(Test *t) {
    for (int way = 0; way < 3; way++) {
        Config *c = parallel_config(1);
        if (way == 2) config_set_dtype(c, DTYPE_BF16);
        c->zero.stage = 2;
        c->zero.reduce_bucket_size = 0; // of one unit
        c->zero.communication_data_type = c->zero.grad_accum_dtype = way ? DTYPE_BF16 : DTYPE_FP32;
        int64_t before = device_allocated_bytes();
        Trainer *trainer = zero_trainer(c);
        const Zero *z = &trainer->zero;
        expect_equal_i64(t, "bytes of gradients", z->allocated.bytes[MEMORY_GRADIENTS], whole_total(trainer) / test_world.world * (way ? 2 : 4));
        expect_true(t, (z->wire != NULL) == (way && test_world.world > 1), "a buffer for 16-bit messages: %p", (void *)z->wire);
        if (test_world.world > 1) {
            const int last = trainer->model.table.n_units - 1;
            const int64_t block = whole_numel(trainer, 1), outer = max_i64(whole_numel(trainer, 0), whole_numel(trainer, last));
            expect_equal_i64(t, "bytes of a block's gradient", z->layout.grad_buffer_bytes, block * (way == 2 ? 2 : 4));
            expect_equal_i64(t, "bytes of converted gradients", z->layout.wire_bytes, way == 0 ? 0 : 2 * (way == 2 ? outer : max_i64(outer, block)));
        }
        expect_true(t, device_allocated_bytes() - before >= memory_total(&z->allocated), "less is allocated than is said");
        zero_trainer_free(trainer);
        free(c);
    }
}

// With everything sharded and gradients in bf16, a parameter takes 2 bytes of weight, 2 of the master's remainder, 2 of gradient
// and 8 of AdamW's states: 14, divided by the ranks.
static void test_fourteen_bytes(Test *t) {
    Config *c = parallel_config(1);
    config_set_dtype(c, DTYPE_BF16);
    c->zero.stage = 3;
    c->zero.grad_accum_dtype = DTYPE_BF16;
    Trainer *trainer = zero_trainer(c);
    const int64_t *bytes = trainer->zero.allocated.bytes;
    expect_equal_i64(t, "bytes of model states", bytes[MEMORY_WEIGHTS] + bytes[MEMORY_MASTERS] + bytes[MEMORY_GRADIENTS] + bytes[MEMORY_OPTIMIZER_STATES],
                     14 * whole_total(trainer) / test_world.world);
    zero_trainer_free(trainer);
    free(c);
}

// Masters after a load: those that were saved, or with load_from_fp32_weights = false their 16-bit weights.
static void test_load_from_fp32_weights(Test *t) {
    char folder[64] = "/tmp/test_gpt_XXXXXX";
    if (test_world.rank == 0) CHECK(mkdtemp(folder), "mkdtemp: %s", strerror(errno));
    comm_host_broadcast(folder, sizeof folder, 0);
    Config *c = parallel_config(1);
    config_set_dtype(c, DTYPE_BF16);
    snprintf(c->run.resume, sizeof c->run.resume, "auto");
    snprintf(c->checkpoint.save_dir, sizeof c->checkpoint.save_dir, "%s", folder);
    int64_t n = 0, rounded = 0;
    float *saved = NULL;
    for (int way = 0; way < 9; way++) { // 0 trains and saves; then all stages with the key true and false
        c->zero.stage = way == 0 ? 3 : (way - 1) / 2;
        c->zero.load_from_fp32_weights = way % 2;
        Trainer *trainer = zero_trainer(c);
        if (way == 0) {
            trainer->store = trainer_store(trainer, folder);
            for (int k = 0; k < 3; k++) train_step(trainer);
            save(trainer, true);
            saved = trainer_weights(trainer, &n);
        } else {
            expect_true(t, trainer_load(trainer), "no checkpoint");
            float *loaded = trainer_weights(trainer, &n);
            for (int64_t i = 0; i < n; i++) {
                float want = way % 2 ? saved[i] : bf16_to_float(master_to_bf16(saved[i]));
                rounded += want != saved[i];
                expect_true(t, loaded[i] == want, "stage %d, load_from_fp32_weights %d: master %" PRId64 " is %.9g, expected %.9g",
                            (int)c->zero.stage, way % 2, i, (double)loaded[i], (double)want);
            }
            free(loaded);
        }
        zero_trainer_free(trainer);
    }
    expect_true(t, rounded > n, "only %" PRId64 " masters had more digits than their weights", rounded);
    double done = 1;
    comm_host_all_reduce(&done, 1, COMM_SUM); // nobody reads any more
    if (test_world.rank == 0) remove_folder(folder);
    free(saved);
    free(c);
}

static const TestRow zero_tests[] = {
    {"keys that change no bit", test_keys_without_a_bit}, {"gradients on their way", test_gradients_on_their_way}, {"rounded runs", test_rounded_runs},
    {"many micro-batches", test_many_micro_batches}, {"traffic", test_traffic}, {"live parameters", test_live_parameters}, {"persistence", test_persistence},
    {"look-ahead", test_look_ahead}, {"reduce_bucket_size", test_reduce_buckets}, {"overlap", test_overlap},
    {"prescale_gradients", test_prescale}, {"gradient_allreduce_op", test_allreduce_op},
    {"bytes of gradients", test_gradient_bytes}, {"fourteen bytes", test_fourteen_bytes}, {"load_from_fp32_weights", test_load_from_fp32_weights}, {NULL, NULL},
};
