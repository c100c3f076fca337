// test_graphs.h - graphs stand for the kernels that were recorded and for no others: the cache by itself, and whole runs that are equal
// bit for bit to runs which launch kernel by kernel. A graph of the CPU backend calls its job with the arguments of when it
// was recorded, so what a graph must not be used for fails there as on a GPU.
#pragma once
#include "test_parallel.h"

// ---------------------------------------------------------------------------------------------------------------
// The cache

typedef struct {
    void *at;
    int64_t bytes, value;
    Stream stream;
} FillJob;

static void fill_job(const void *args) {
    const FillJob *f = (const FillJob *)args;
    device_memset(f->at, (int)f->value, f->bytes, f->stream);
}
static void other_job(const void *args) {
    const FillJob *f = (const FillJob *)args;
    device_memset(f->at, (int)f->value + 100, f->bytes, f->stream);
}

// Runs the job, and expects its value, and that so many jobs of the cache were recorded and launched as graphs by then.
static void expect_fill(Test *t, GraphCache *c, DeviceJob job, FillJob f, int64_t recorded, int64_t launched) {
    unsigned char got[8] = {0};
    graph_run(c, job, &f, sizeof f);
    device_copy(got, f.at, sizeof got, COPY_TO_HOST, f.stream);
    stream_sync(f.stream);
    for (int i = 0; i < 8; i++) expect_equal_i64(t, "value", got[i], f.value + (job == other_job ? 100 : 0));
    if (!c) return;
    expect_equal_i64(t, "recorded", c->recorded, recorded);
    expect_equal_i64(t, "launched", c->launched, launched);
}

static void test_graph_cache(Test *t) {
    Stream s = stream_create();
    GraphCache *c = graphs_create(s, 3);
    FillJob f = {device_malloc(8), 8, 1, s}, g = f, h = f, other;
    g.value = 2, h.value = 3;
    expect_fill(t, NULL, fill_job, f, 0, 0);
    expect_fill(t, c, fill_job, f, 0, 0); // kernel by kernel
    expect_fill(t, c, fill_job, g, 0, 0);
    expect_fill(t, c, fill_job, f, 1, 1); // recorded
    expect_fill(t, c, fill_job, g, 2, 2);
    expect_fill(t, c, fill_job, f, 2, 3);
    expect_fill(t, c, fill_job, g, 2, 4);
    expect_fill(t, c, fill_job, f, 2, 5);
    expect_fill(t, c, other_job, f, 2, 5); // the same arguments, another job
    expect_fill(t, c, fill_job, h, 2, 5);  // room for three: g was used longest ago
    expect_fill(t, c, fill_job, f, 2, 6);
    expect_fill(t, c, other_job, f, 3, 7);
    expect_fill(t, c, fill_job, h, 4, 8);
    expect_fill(t, c, fill_job, g, 4, 8);  // begins anew; f goes
    expect_fill(t, c, other_job, f, 4, 9);
    expect_fill(t, c, fill_job, h, 4, 10);
    device_free(device_malloc(8)); // all graphs may hold its address
    expect_fill(t, c, fill_job, h, 4, 10);
    expect_fill(t, c, fill_job, h, 5, 11);
    expect_fill(t, c, fill_job, h, 5, 12);
    // What a graph was recorded with stays.
    other = h;
    other.value = 9;
    Graph graph = graph_record(fill_job, &other, sizeof other, s);
    unsigned char got = 0;
    other.value = 10;
    graph_launch(graph, s);
    device_copy(&got, other.at, 1, COPY_TO_HOST, s);
    stream_sync(s);
    expect_equal_i64(t, "recorded value", got, 9);
    graph_free(graph);
    graph_free(NULL);
    graphs_free(c);
    graphs_free(NULL);
    device_free(f.at);
    stream_destroy(s);
}

// ---------------------------------------------------------------------------------------------------------------
// Runs

enum { GRAPH_UPDATES = 7, GRAPH_EVALUATIONS = 2 };

typedef struct {
    StepStats stats[GRAPH_UPDATES];
    double val[GRAPH_EVALUATIONS];
    float *states;                  // masters and states of the optimizer
    int64_t n;
    int64_t runs, launched, recorded; // of the cache, in training
} GraphRun;

// Updates with evaluations between them, on the ranks of a grid.
static void graph_run_updates(const Config *config, ProcessGrid grid, bool graphs, GraphRun *r) {
    Config c = *config;
    c.run.cuda_graphs = graphs;
    c.run.eval_batches = 2;
    c.batch.train_micro_batch_size_per_gpu = PARALLEL_SAMPLES / grid.world;
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    trainer_init_core(trainer, &c, grid, true, c.batch.train_micro_batch_size_per_gpu);
    trainer->metrics.log_fd = -1;
    dataloader_open(&trainer->train, tiny_tokens, c.model.vocab_size, c.run.seq_len, c.batch.train_batch_size, false, false, 1, "data.train");
    dataloader_open(&trainer->val, tiny_tokens, c.model.vocab_size, c.run.seq_len, 1, false, false, 1, "data.val");
    trainer->has_train = trainer->has_val = true;
    zero_init_weights(&trainer->zero, (uint64_t)c.run.seed);
    CHECK(!trainer->model.graphs == !graphs, "the key does not act");
    memset(r, 0, sizeof *r);
    for (int k = 0; k < GRAPH_UPDATES; k++) {
        r->stats[k] = train_step(trainer);
        const GraphCache *cache = trainer->model.graphs;
        if (k % 3 == 2) r->val[k / 3] = evaluate(trainer);
        else if (cache) r->runs = cache->runs, r->launched = cache->launched, r->recorded = cache->recorded;
    }
    r->states = trainer_states(trainer, &r->n);
    trainer_free(trainer);
    free(trainer);
}

static void expect_same_with_graphs(Test *t, const char *what, const Config *c, ProcessGrid grid, GraphRun *with) {
    GraphRun without;
    graph_run_updates(c, grid, false, &without);
    graph_run_updates(c, grid, true, with);
    for (int k = 0; k < GRAPH_UPDATES; k++) {
        expect_same_bytes(t, what, &with->stats[k].loss, &without.stats[k].loss, 8);
        expect_same_bytes(t, what, &with->stats[k].grad_norm, &without.stats[k].grad_norm, 8);
        expect_equal_i64(t, what, with->stats[k].skipped, without.stats[k].skipped);
    }
    expect_same_bytes(t, what, with->val, without.val, sizeof without.val);
    expect_same_bytes(t, what, with->states, without.states, without.n * 4);
    free(with->states);
    free(without.states);
}

// Types and stages, with accumulation for every other one; sums in bf16, blocks that take turns in two buffers, blocks that are
// computed again.
static void test_graph_runs(Test *t) {
    for (int variant = 0; variant < 12; variant++) {
        int stage = variant / 3;
        bool accumulates = (variant + stage) % 2;
        Config *c = parallel_config(accumulates ? 3 : 1);
        config_set_dtype(c, (DType)(variant % 3));
        c->zero.stage = stage;
        c->zero.grad_accum_dtype = stage >= 2 && accumulates ? DTYPE_BF16 : DTYPE_FP32;
        if (stage == 3) c->zero.max_live_parameters = c->zero.reduce_bucket_size = 1;
        if (variant % 4 == 3) c->activation_checkpointing.policy = RECOMPUTE_BLOCK, c->activation_checkpointing.number_checkpoints = 2;
        char what[80];
        snprintf(what, sizeof what, "%s, stage %d, accumulation %d", dtype_name(c->dtype), stage, accumulates ? 3 : 1);
        GraphRun with;
        expect_same_with_graphs(t, what, c, test_grid(), &with);
        expect_true(t, with.launched > 0, "%s: nothing was launched as a graph", what);
        free(c);
    }
}

// Of 5 units, forward and backward, of the micro-batches of an update: the first update's launch kernels, all later ones graphs. With
// accumulation 3 the second and the third micro-batch are equal work, but the first is not.
static void test_graph_counts(Test *t) {
    for (int64_t accumulation = 1; accumulation <= 3; accumulation += 2) {
        Config *c = parallel_config(accumulation);
        GraphRun with;
        const int64_t units = 5, forward = units, backward = accumulation == 1 ? units : 2 * units;
        expect_same_with_graphs(t, "counts", c, grid_of_one(), &with);
        const int64_t evaluated = GRAPH_EVALUATIONS * 2 * units; // two passes each
        expect_equal_i64(t, "jobs", with.runs, GRAPH_UPDATES * accumulation * 2 * units + evaluated);
        expect_equal_i64(t, "recorded", with.recorded, forward + backward + units);
        expect_equal_i64(t, "launched as graphs", with.launched, with.runs - with.recorded);
        free(c);
    }
}

// The loss scale is an argument of the head's kernels, and each new one is other work.
static void test_graph_loss_scale(Test *t) {
    Config *c = parallel_config(1);
    config_set_dtype(c, DTYPE_FP16);
    c->fp16.initial_scale_power = 6;
    c->fp16.loss_scale_window = 3;
    GraphRun with;
    expect_same_with_graphs(t, "growing loss scale", c, grid_of_one(), &with);
    expect_near(t, "last loss scale", with.stats[GRAPH_UPDATES - 1].loss_scale, 256, 0);
    expect_true(t, with.launched > 0, "nothing was launched as a graph");
    c->fp16.initial_scale_power = 32; // overflows
    expect_same_with_graphs(t, "falling loss scale", c, grid_of_one(), &with);
    expect_true(t, with.stats[0].skipped && with.stats[GRAPH_UPDATES - 1].loss_scale < 0x1p30, "loss scale %g", with.stats[GRAPH_UPDATES - 1].loss_scale);
    free(c);
}

static const TestRow graph_tests[] = {
    {"cache", test_graph_cache}, {"runs", test_graph_runs}, {"counts", test_graph_counts}, {"loss scale", test_graph_loss_scale}, {NULL, NULL},
};
