// test_model.h - tables, schedules, programs, and whole runs of small models against PyTorch's.
#pragma once
#include "dies.h"
#include <dirent.h>

// Removes a folder of files and folders that a test has made.
static void remove_folder(const char *path) {
    DIR *d = opendir(path);
    if (d) {
        for (struct dirent *e; (e = readdir(d));) {
            if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
            char inner[4096];
            snprintf(inner, sizeof inner, "%s/%s", path, e->d_name);
            struct stat st;
            if (lstat(inner, &st) == 0 && S_ISDIR(st.st_mode)) remove_folder(inner);
            else unlink(inner);
        }
        closedir(d);
    }
    rmdir(path);
}

// ---------------------------------------------------------------------------------------------------------------
// Configurations made by hand, so that these tests do not depend on the reader

static Config *tiny_config(void) {
    Config *c = (Config *)host_alloc(sizeof(Config));
    c->model.n_layer = 2;
    c->model.n_head = 2;
    c->model.n_embd = 32;
    c->model.n_positions = 24;
    c->model.vocab_size = 256;
    c->model.n_inner = 128;
    c->model.layer_norm_epsilon = 1e-5;
    c->model.tie_word_embeddings = true;
    c->batch.train_micro_batch_size_per_gpu = 2;
    c->batch.gradient_accumulation_steps = 2;
    c->batch.train_batch_size = 4;
    c->optimizer.type = OPTIMIZER_ADAMW;
    c->optimizer.lr = 1e-3;
    c->optimizer.betas[0] = 0.9;
    c->optimizer.betas[1] = 0.95;
    c->optimizer.eps = 1e-8;
    c->optimizer.weight_decay = 0.1;
    c->optimizer.bias_correction = c->optimizer.adam_w_mode = true;
    c->scheduler.type = SCHEDULE_CONSTANT;
    c->scheduler.last_batch_iteration = -1;
    c->gradient_clipping = 1.0;
    c->checkpoint.zero_checkpoint = true;
    c->fp16.initial_scale_power = 16;
    c->fp16.loss_scale_window = 1000;
    c->fp16.hysteresis = 2;
    c->fp16.min_loss_scale = 1;
    c->bf16.check_grad_overflow = true;
    c->run.seq_len = 24;
    c->run.logits_bytes = 1 << 30;
    c->run.tensor_parallel_pieces = 1;
    c->run.cuda_graphs = true;
    c->run.seed = 7;
    c->run.steps = 10;
    c->zero.reduce_bucket_size = c->zero.prefetch_bucket_size = c->zero.max_live_parameters = c->zero.max_reuse_distance = c->zero.allgather_bucket_size = 1 << 30;
    c->zero.model_persistence_threshold = INT64_MAX;
    c->zero.gradient_predivide_factor = 1;
    c->zero.overlap_comm = c->zero.direct_exchange = c->zero.reduce_scatter = c->zero.load_from_fp32_weights = true;
    return c;
}

static void config_set_dtype(Config *c, DType t) {
    c->dtype = t;
    c->fp16.enabled = t == DTYPE_FP16;
    c->bf16.enabled = t == DTYPE_BF16;
}

// The ranks of this test run, data parallel; and a grid of this rank alone, beside the others.
static ProcessGrid test_grid(void) {
    GridAxes axes = {1, test_world.world, 1, 1};
    return grid_make(test_world.rank, axes);
}
static ProcessGrid grid_of_one(void) {
    GridAxes one = {1, 1, 1, 1};
    ProcessGrid g = grid_make(0, one);
    g.first_rank = test_world.rank;
    return g;
}

static const char *tiny_tokens = "data/golden/gpt2-tiny/tokens.bin"; // bytes of English text in llm.c's format

// A trainer with data and initial weights, but no files of its own.
static void tiny_trainer(Trainer *t, Config *c) {
    trainer_init_core(t, c, grid_of_one(), true, c->batch.train_micro_batch_size_per_gpu);
    t->metrics.log_fd = -1;
    dataloader_open(&t->train, tiny_tokens, c->model.vocab_size, c->run.seq_len, c->batch.train_batch_size, false, false, 1, "data.train");
    t->has_train = true;
    dataloader_open(&t->val, tiny_tokens, c->model.vocab_size, c->run.seq_len, 1, false, false, 1, "data.val");
    t->has_val = true;
    zero_init_weights(&t->zero, (uint64_t)c->run.seed);
}

// A store for a trainer's checkpoints, on all ranks of its grid.
static CheckpointStore *trainer_store(Trainer *t, const char *folder) {
    CheckpointPeers peers = trainer_peers(t);
    return checkpoint_open(&peers, folder, false);
}

// All masters one after another, rows in the order of the table; the caller frees it.
static float *trainer_weights(Trainer *t, int64_t *n) {
    *n = table_param_count(&t->model.table);
    float *all = (float *)host_alloc((size_t)*n * 4), *at = all;
    for (int i = 0; i < t->model.table.n_rows; i++) {
        if (t->model.table.row[i].tied_to >= 0) continue;
        zero_tensor_read(&t->zero, i, STATE_MASTER, at);
        at += param_numel(&t->model.table.row[i]);
    }
    return all;
}

// All that an update changes: the masters, then each state of the optimizer.
static float *trainer_states(Trainer *t, int64_t *n) {
    const ParamTable *table = &t->model.table;
    *n = table_param_count(table) * (1 + t->zero.n_states);
    float *all = (float *)host_alloc((size_t)*n * 4), *at = all;
    for (int kind = STATE_MASTER; kind < STATE_OPTIMIZER_0 + t->zero.n_states; kind++)
        for (int i = 0; i < table->n_rows; i++) {
            if (table->row[i].tied_to >= 0) continue;
            zero_tensor_read(&t->zero, i, (StateKind)kind, at);
            at += param_numel(&table->row[i]);
        }
    return all;
}

// ---------------------------------------------------------------------------------------------------------------
// tables

static ModelConfig model_sizes(int64_t L, int64_t NH, int64_t C, int64_t T, int64_t V, bool tied) {
    ModelConfig m;
    memset(&m, 0, sizeof m);
    m.n_layer = L, m.n_head = NH, m.n_embd = C, m.n_positions = T, m.vocab_size = V, m.n_inner = 4 * C;
    m.layer_norm_epsilon = 1e-5;
    m.tie_word_embeddings = tied;
    return m;
}

// Published counts: GPT-2's four sizes (Radford et al. 2019, as stored in the released weights).
static void test_param_counts(Test *t) {
    static const struct { int64_t L, NH, C, count; } sizes[] = {{12, 12, 768, 124439808}, {24, 16, 1024, 354823168}, {36, 20, 1280, 774030080}, {48, 25, 1600, 1557611200}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        ModelConfig m = model_sizes(sizes[i].L, sizes[i].NH, sizes[i].C, 1024, 50257, true);
        ParamTable p;
        model_build_table(&p, &m, model_whole);
        expect_equal_i64(t, "parameters", table_param_count(&p), sizes[i].count);
        table_free(&p);
    }
}

// Rows tile their unit without overlap, decayed ones first, aligned; hundreds of shapes.
static void test_param_layout(Test *t) {
    for (int k = 0; k < 300; k++) {
        uint64_t r = rng_bits(1, 2, (uint64_t)k);
        int64_t NH = 1 + (int64_t)(r % 7), C = NH * (1 + (int64_t)(r >> 8) % 40), V = 1 + (int64_t)(r >> 20) % 700;
        ModelConfig m = model_sizes(1 + (int64_t)(r >> 32) % 5, NH, C, 1 + (int64_t)(r >> 40) % 99, V, r >> 63);
        ParamTable p;
        model_build_table(&p, &m, model_whole);
        int tied = 0;
        for (int u = 0; u < p.n_units; u++) {
            int64_t covered = 0, slack = 0;
            for (int i = p.unit[u].first_row; i < p.unit[u].first_row + p.unit[u].n_rows; i++) {
                const ParamDesc *a = &p.row[i];
                expect_equal_i64(t, "unit of the row", a->unit, u);
                if (a->tied_to >= 0) { tied++; continue; }
                covered += a->numel;
                slack += round_up(a->numel, ROW_ALIGN) - a->numel;
                expect_true(t, a->offset % ROW_ALIGN == 0, "%s starts at %" PRId64, a->name, a->offset);
                expect_true(t, a->decay ? a->offset + a->numel <= p.unit[u].decay_numel : a->offset >= p.unit[u].decay_numel, "%s is on the wrong side of the decay border", a->name);
                for (int j = p.unit[u].first_row; j < i; j++)
                    expect_true(t, p.row[j].tied_to >= 0 || p.row[j].offset + p.row[j].numel <= a->offset || a->offset + a->numel <= p.row[j].offset, "%s overlaps %s", a->name, p.row[j].name);
            }
            expect_equal_i64(t, "elements of the unit", p.unit[u].numel, covered + slack);
        }
        expect_equal_i64(t, "tied rows", tied, m.tie_word_embeddings);
        table_free(&p);
    }
}

// The parts that tensor parallelism makes of a tensor, each cut at random places as shards would be, hold every element of a split
// tensor once, and each the whole of another; the runs follow each other in the rank's buffer without gaps.
static void test_param_parts(Test *t) {
    for (int k = 0; k < 200; k++) {
        uint64_t bits = rng_bits(3, 4, (uint64_t)k);
        int tp = 1 << (k % 4);
        int64_t NH = tp * (1 + (int64_t)(bits % 3)), C = NH * (1 + (int64_t)(bits >> 8) % 5), V = 1 + (int64_t)(bits >> 20) % 700;
        ModelConfig m = model_sizes(1, NH, C, 9, V, false);
        for (int tp_rank = 0; tp_rank < tp; tp_rank++) {
            ParamTable p;
            model_build_table(&p, &m, {tp, tp_rank, 0, NULL});
            for (int i = 0; i < p.n_rows; i++) {
                const ParamDesc *r = &p.row[i];
                if (tp_rank > 0) continue; // the parts are functions of the row, whoever asks
                int64_t n = param_numel(r);
                int *times = (int *)host_alloc(sizeof(int) * (size_t)n);
                for (int q = 0; q < tp; q++) {
                    int64_t part = param_part_numel(r, q), at = 0;
                    for (int64_t from = 0, to; from < part; from = to) {
                        ParamRun run[PARAM_RUNS_MAX];
                        to = min_i64(part, from + 1 + (int64_t)(rng_bits(5, (uint64_t)(k * 64 + i), (uint64_t)from) % (uint64_t)(2 * C)));
                        int n_runs = param_runs(r, q, from, to, run);
                        for (int j = 0; j < n_runs; j++) {
                            expect_equal_i64(t, "place of a run", run[j].local_first, at);
                            for (int64_t e = 0; e < run[j].count; e++)
                                for (int64_t x = 0; x < run[j].numel; x++) {
                                    int64_t g = run[j].global_offset + e * run[j].stride + x;
                                    if (g >= 0 && g < n) times[g]++;
                                    else expect_true(t, false, "%s: element %" PRId64 " of %" PRId64, r->name, g, n);
                                }
                            at += run[j].numel * run[j].count;
                        }
                        expect_equal_i64(t, "end of a cut", at, to);
                    }
                }
                int want = r->split == SPLIT_NONE ? tp : 1;
                for (int64_t g = 0; g < n; g++) expect_equal_i64(t, r->name, times[g], want);
                free(times);
            }
            const UnitDesc *block = &p.unit[1];
            for (int i = block->first_row; i < block->first_row + block->n_rows; i++)
                expect_true(t, p.row[i].split == SPLIT_NONE ? p.row[i].offset >= block->split_numel : p.row[i].offset + p.row[i].numel <= block->split_numel, "%s is on the wrong side of what is split", p.row[i].name);
            table_free(&p);
        }
    }
}

// Of element `index`.
static float initial_value(const ParamTable *p, const ParamDesc *r, uint64_t seed, int64_t index) {
    float value;
    param_initial_values(p, r, seed, index, 1, &value);
    return value;
}

// Units of other stages take no room. A tied table on two stages lies at the same place in shards of the same size.
static void test_param_stages(Test *t) {
    const int stage[] = {0, 0, 1, 1, 2};
    for (int tied = 0; tied < 2; tied++) {
        ModelConfig m = model_sizes(3, 2, 8, 5, 40, tied);
        int64_t held = 0, twin[2] = {0, 0}, numel[2] = {0, 0};
        for (int s = 0; s < 3; s++) {
            ParamTable p;
            model_build_table(&p, &m, {1, 0, s, stage});
            for (int u = 0; u < 5; u++) expect_true(t, (p.unit[u].numel > 0) == (stage[u] == s), "unit %d on stage %d has %" PRId64 " elements", u, s, p.unit[u].numel);
            for (int i = 0; i < p.n_rows; i++)
                if (p.row[i].tied_to < 0) held += param_local_numel(&p, &p.row[i]);
            if (s != 1) twin[s / 2] = p.unit[s == 0 ? 0 : 4].twin_numel, numel[s / 2] = p.unit[s == 0 ? 0 : 4].numel;
            if (s == 2) expect_equal_i64(t, "place of the head", p.row[p.n_rows - 1].offset, 0);
            if (s == 2) expect_true(t, p.row[p.n_rows - 1].storage == p.n_rows - 1, "the head is stored in row %d", p.row[p.n_rows - 1].storage);
            if (s == 2 && tied) expect_near(t, "initial value of the head", initial_value(&p, &p.row[p.n_rows - 1], 3, 17), initial_value(&p, &p.row[0], 3, 17), 0);
            if (s == 2) expect_equal_i64(t, "parameters on all stages", held, table_param_count(&p));
            table_free(&p);
        }
        expect_equal_i64(t, "elements that the twins share", twin[0], twin[1]);
        expect_equal_i64(t, "whether they share any", twin[0] > 0, tied);
        if (tied) expect_equal_i64(t, "elements of the twins' units", numel[0], numel[1]);
    }
}

// Mean 0, the standard deviation of GPT-2, equal for equal (seed, name, index), different otherwise.
static void test_initial_values(Test *t) {
    ModelConfig m = model_sizes(3, 4, 64, 64, 256, true);
    ParamTable p;
    model_build_table(&p, &m, model_whole);
    for (int i = 0; i < p.n_rows; i++) {
        const ParamDesc *r = &p.row[i];
        if (r->init != INIT_NORMAL || r->tied_to >= 0) continue;
        double sum = 0, squares = 0, want = strstr(r->name, "c_proj") ? 0.02 / sqrt(6.0) : 0.02;
        int64_t n = param_numel(r), same = 0;
        for (int64_t k = 0; k < n; k++) {
            double x = initial_value(&p, r, 7, k);
            sum += x, squares += x * x;
            same += x == initial_value(&p, r, 8, k);
        }
        double std = sqrt(squares / (double)n);
        // Five standard errors of the mean and of the standard deviation.
        expect_near(t, r->name, sum / (double)n, 0, 5 * want / sqrt((double)n));
        expect_near(t, r->name, std, want, 5 * want / sqrt(2.0 * (double)n));
        expect_true(t, same < 3, "%s: %" PRId64 " values do not depend on the seed", r->name, same);
    }
    table_free(&p);
}

// rng_normal computes logarithm and cosine itself: the C library's at the ends, around all changes of branch, and at random.
static void test_normal(Test *t) {
    const uint64_t end = 1ull << 32;
    double worst_log = 0, worst_cos = 0;
    for (int place = 0; place <= 64; place++) // eighths of the circle, and halvings of the largest
        for (int64_t k = -300; k <= 300; k++) {
            const uint64_t turn = (end / 8 * (uint64_t)(place % 9) + (uint64_t)k) & (end - 1), at = (place < 33 ? end >> place : (uint64_t)((double)end * 0.7071067811865476) >> (place - 33)) + (uint64_t)k;
            worst_cos = fmax(worst_cos, fabs(cos_of_turn(turn) - (double)cosl(6.283185307179586476925L * (long double)turn / (long double)end)));
            if (at < 1 || at > end) continue;
            const long double want = logl((long double)at / (long double)end);
            worst_log = fmax(worst_log, at == end ? fabs(log_of_fraction(at)) : (double)fabsl((log_of_fraction(at) - want) / want));
        }
    expect_near(t, "logarithm, relative", worst_log, 0, 4e-16);
    expect_near(t, "cosine", worst_cos, 0, 4e-16);
    for (uint64_t i = 0; i < 100000; i++) {
        const uint64_t bits = rng_bits(3, 4, i);
        const double want = sqrt(-2 * log((double)((bits >> 32) + 1) * 0x1p-32)) * cos(6.283185307179586 * (double)(bits & 0xffffffffu) * 0x1p-32);
        expect_near(t, "standard normal", rng_normal(3, 4, i), want, 1e-14);
    }
    // However a loop is cut, and whatever instructions it is made of, values are the same.
    ModelConfig m = model_sizes(2, 2, 32, 16, 64, true);
    ParamTable p;
    model_build_table(&p, &m, model_whole);
    const ParamDesc *r = &p.row[0];
    float *all = (float *)host_alloc((size_t)param_numel(r) * 4);
    param_initial_values(&p, r, 5, 0, param_numel(r), all);
    int64_t differ = 0;
    for (int64_t i = 0; i < param_numel(r); i++) differ += all[i] != initial_value(&p, r, 5, i);
    expect_equal_i64(t, "values that depend on the cut", differ, 0);
    free(all);
    table_free(&p);
}

static void test_flops(Test *t) {
    Model m;
    ModelConfig c = model_sizes(12, 12, 768, 1024, 50257, true);
    memset(&m, 0, sizeof m);
    m.c = c, m.L = 12, m.C = 768;
    model_build_table(&m.table, &c, model_whole);
    // 6 (124,439,808 - 1024*768) + 6*12*1024*768
    expect_near(t, "FLOP per token", model_flops_per_token(&m, 1024), 6.0 * (124439808 - 786432) + 6.0 * 12 * 1024 * 768, 1);
    // A window W: each token sees W - W^2 / (2 T) others on average.
    const struct { int64_t window; double seen; } row[] = {{256, 224}, {512, 384}, {1, 1 - 1.0 / 2048}, {1024, 512}, {5000, 512}};
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        m.c.attention_window_size = row[i].window;
        expect_near(t, "FLOP per token with a window", model_flops_per_token(&m, 1024), 6.0 * (124439808 - 786432) + 12.0 * 12 * row[i].seen * 768, 1);
    }
    table_free(&m.table);
}

// Any rank of any world: parts add up to the whole of one rank but for their rounding to ROW_ALIGN elements, all ranks hold
// as much, and activations do not depend on the world.
static void test_plan_any_world(Test *t) {
    Config *c = tiny_config();
    ModelConfig sizes = model_sizes(48, 32, 4096, 2048, 50257, true); // 10 billion parameters, none of which is allocated
    Model m;
    config_set_dtype(c, DTYPE_BF16);
    c->run.seq_len = 2048;
    model_init(&m, &sizes, model_whole, c->dtype, 256 << 20, false, NULL);
    GridAxes axes = {1, 1, 1, 1};
    Pipeline pipe;
    plan_pipeline(c, &sizes, grid_make(0, axes), &pipe);
    MemoryUse whole = plan_memory(c, &m, grid_make(0, axes), &pipe, true, 1, true, NULL);
    static const struct { MemoryKind kind; int from_stage; } parts[] = {{MEMORY_OPTIMIZER_STATES, 1}, {MEMORY_MASTERS, 1}, {MEMORY_GRADIENTS, 2}, {MEMORY_WEIGHTS, 3}};
    static const int worlds[] = {2, 3, 7, 64, 1000};
    expect_near(t, "states of one rank", (double)whole.bytes[MEMORY_OPTIMIZER_STATES], 8.0 * (double)table_param_count(&m.table), 1e-3 * (double)whole.bytes[MEMORY_OPTIMIZER_STATES]);
    expect_equal_i64(t, "buffers of one rank", whole.bytes[MEMORY_BUFFERS], 0);
    for (int w = 0; w < 5; w++) {
        int N = axes.dp = worlds[w];
        for (c->zero.stage = 0; c->zero.stage < 4; c->zero.stage++) {
            MemoryUse one = plan_memory(c, &m, grid_make(0, axes), &pipe, N <= 8, 1, true, NULL);
            for (int r = 1; r < N; r += 1 + N / 8) {
                MemoryUse other = plan_memory(c, &m, grid_make(r, axes), &pipe, N <= 8, 1, true, NULL);
                expect_same_bytes(t, "another rank's plan", &other, &one, sizeof one);
            }
            double slack = (double)N * ROW_ALIGN * 8 * m.table.n_units;
            for (int i = 0; i < 4; i++) {
                double all = (double)one.bytes[parts[i].kind] * (c->zero.stage >= parts[i].from_stage ? N : 1), want = (double)whole.bytes[parts[i].kind];
                expect_true(t, all >= want && all <= want + slack, "%d ranks, stage %d: %s are %g, and %g on one rank", N, (int)c->zero.stage, memory_names[parts[i].kind], all, want);
            }
            expect_equal_i64(t, "activations", one.bytes[MEMORY_ACTIVATIONS], whole.bytes[MEMORY_ACTIVATIONS]);
            expect_true(t, (one.bytes[MEMORY_BUFFERS] > 0) == (c->zero.stage > 0 || N <= 8), "stage %d has buffers of %" PRId64, (int)c->zero.stage, one.bytes[MEMORY_BUFFERS]);
        }
    }
    // A block keeps 16 C elements of 2 bytes and 4 + NH numbers of 4 for each token; the rest is shared by 48 of them.
    double kept = 48.0 * 2048 * (16 * 4096 * 2 + (4 + 32) * 4);
    expect_near(t, "activations", (double)whole.bytes[MEMORY_ACTIVATIONS], kept, 0.05 * kept);
    pipeline_free(&pipe);
    model_free(&m);
    free(c);
}

static const TestRow table_tests[] = {
    {"parameter counts", test_param_counts}, {"layout of parameters", test_param_layout}, {"parts of parameters", test_param_parts}, {"stages of parameters", test_param_stages}, {"initial values", test_initial_values}, {"standard normal", test_normal}, {"FLOP per token", test_flops}, {"plans of any world", test_plan_any_world}, {NULL, NULL},
};

// ---------------------------------------------------------------------------------------------------------------
// schedules: learning rates, loss scale, programs

static Config *schedule_config(ScheduleType type) {
    Config *c = tiny_config();
    c->scheduler.type = type;
    c->optimizer.lr = 0.01;
    c->scheduler.warmup_max_lr = 0.01;
    c->scheduler.warmup_num_steps = 4;
    c->scheduler.total_num_steps = 20;
    c->scheduler.cos_min_ratio = 0.0001;
    return c;
}

// Values worked out by hand from the laws (i = u - 1).
static void test_warmup_laws(Test *t) {
    Config *c = schedule_config(SCHEDULE_WARMUP_LR);
    double linear[] = {0, 0, 0.0025, 0.005, 0.0075, 0.01, 0.01};
    for (int u = 0; u < 7; u++) expect_near(t, "WarmupLR linear", schedule_lr(c, u), linear[u], 1e-12);
    c->scheduler.warmup_log = true;
    double logarithmic[] = {0, 0, 0.01 * log(2) / log(4), 0.01 * log(3) / log(4), 0.01, 0.01};
    for (int u = 0; u < 6; u++) expect_near(t, "WarmupLR log", schedule_lr(c, u), logarithmic[u], 1e-12);
    c->scheduler.type = SCHEDULE_WARMUP_DECAY_LR;
    c->scheduler.warmup_log = false;
    c->scheduler.warmup_min_lr = 0.002;
    expect_near(t, "Decay at i = 4", schedule_lr(c, 5), 0.01, 1e-12);
    expect_near(t, "Decay at i = 12", schedule_lr(c, 13), 0.002 + 0.008 * 8 / 16, 1e-12);
    for (int u = 21; u < 40; u++) expect_near(t, "Decay after the end", schedule_lr(c, u), 0.002, 1e-12);
    c->scheduler.type = SCHEDULE_WARMUP_COSINE_LR;
    c->scheduler.warmup_min_ratio = 0.1;
    expect_near(t, "Cosine at update 0", schedule_lr(c, 0), 0, 0);
    expect_near(t, "Cosine at i = 0", schedule_lr(c, 1), 0.001, 1e-12);
    expect_near(t, "Cosine at i = 2", schedule_lr(c, 3), 0.01 * (0.1 + 0.9 * 0.5), 1e-12);
    expect_near(t, "Cosine at i = 11", schedule_lr(c, 12), 0.01 * (0.0001 + 0.9999 * 0.5), 1e-12); // half way: (11-4+1)/16
    for (int u = 20; u < 40; u++) expect_near(t, "Cosine after the end", schedule_lr(c, u), 0.01 * 0.0001, 1e-12);
    free(c);
}

// A warm-up of 0, 1 or 2 updates: finite, not negative, and at the top from the documented update on.
static void test_degenerate_warmups(Test *t) {
    static const ScheduleType types[] = {SCHEDULE_WARMUP_LR, SCHEDULE_WARMUP_DECAY_LR, SCHEDULE_WARMUP_COSINE_LR};
    for (int k = 0; k < 3; k++)
        for (int64_t warmup = 0; warmup <= 2; warmup++)
            for (int shape = 0; shape < 2; shape++) {
                Config *c = schedule_config(types[k]);
                c->scheduler.warmup_num_steps = warmup;
                c->scheduler.warmup_log = shape;
                for (int u = 0; u < 40; u++) {
                    double lr = schedule_lr(c, u);
                    expect_true(t, isfinite(lr) && lr >= 0 && lr <= 0.01, "lr %g at update %d", lr, u);
                }
                if (k < 2) expect_near(t, "top", schedule_lr(c, 3), 0.01, 1e-12);
                c->scheduler.total_num_steps = 1; // T <= N: holds the floor
                expect_true(t, isfinite(schedule_lr(c, 5)), "T <= N");
                free(c);
            }
}

static void test_cycle_and_range(Test *t) {
    Config *c = schedule_config(SCHEDULE_ONE_CYCLE);
    SchedulerConfig *s = &c->scheduler;
    s->cycle_min_lr = 0.001, s->cycle_max_lr = 0.011, s->cycle_first_step_size = 10, s->cycle_second_step_size = 5, s->decay_step_size = 2, s->decay_lr_rate = 0.5;
    s->cycle_momentum = true, s->cycle_min_mom = 0.8, s->cycle_max_mom = 0.9;
    static const struct { int u; double lr, beta1; } want[] = {{0, 0.001, 0.8}, {1, 0.002, 0.89}, {5, 0.006, 0.85}, {10, 0.011, 0.8}, {11, 0.009, 0.82}, {14, 0.003, 0.88}, {15, 0.001, 0.9}, {16, 0.001 / 1.25, 0.9}, {17, 0.001 / 1.5, 0.9}};
    for (size_t k = 0; k < sizeof want / sizeof *want; k++) {
        double betas[2];
        schedule_betas(c, want[k].u, betas);
        expect_near(t, "OneCycle lr", schedule_lr(c, want[k].u), want[k].lr, 1e-12);
        expect_near(t, "OneCycle beta1", betas[0], want[k].beta1, 1e-12);
        expect_near(t, "OneCycle beta2", betas[1], 0.99, 0);
    }
    s->cycle_first_stair_count = 2, s->cycle_second_stair_count = 2;
    static const double stairs[] = {0.001, 0.001, 0.001, 0.001, 0.001, 0.006, 0.006, 0.006, 0.006, 0.006, 0.011, 0.006, 0.006, 0.001, 0.001, 0.001};
    for (int u = 0; u < 16; u++) expect_near(t, "stairs", schedule_lr(c, u), stairs[u], 1e-12);
    free(c);
    c = schedule_config(SCHEDULE_LR_RANGE_TEST);
    s = &c->scheduler;
    s->lr_range_test_min_lr = 0.001, s->lr_range_test_step_size = 4, s->lr_range_test_step_rate = 2;
    for (int u = 0; u < 12; u++) expect_near(t, "range test", schedule_lr(c, u), 0.001 * (1 + 2 * u / 4.0), 1e-12);
    s->lr_range_test_staircase = true;
    for (int u = 0; u < 12; u++) expect_near(t, "range test, stairs", schedule_lr(c, u), 0.001 * (1 + 2 * (u / 4)), 1e-12);
    free(c);
}

// run.lr_schedule = cosine: its end value, constant afterwards, never rising after the warm-up; a shorter run is a prefix.
static void test_run_cosine(Test *t) {
    Config *c = schedule_config(SCHEDULE_COSINE);
    c->scheduler.warmup_steps = 5, c->scheduler.total_steps = 20, c->scheduler.final_lr_frac = 0.1;
    for (int u = 0; u < 5; u++) expect_near(t, "warm-up", schedule_lr(c, u), 0.01 * (u + 1) / 5, 1e-12);
    for (int u = 5; u < 30; u++) expect_true(t, schedule_lr(c, u + 1) <= schedule_lr(c, u), "rises at update %d", u);
    for (int u = 20; u < 30; u++) expect_near(t, "end", schedule_lr(c, u), 0.001, 1e-12);
    c->scheduler.warmup_steps = 0;
    expect_near(t, "no warm-up", schedule_lr(c, 0), 0.01, 1e-12);
    free(c);
}

static void test_loss_scaler(Test *t) {
    Fp16Config c = {true, 0, 16, 3, 2, false, 1};
    LossScaler s;
    loss_scaler_init(&s, &c);
    double tried[] = {65536, 65536, 32768, 16384, 8192};
    for (int i = 0; i < 5; i++) {
        expect_near(t, "scale under overflow", s.scale, tried[i], 0);
        expect_true(t, loss_scaler_update(&s, true), "stopped above the floor");
    }
    // Clean updates: doubles after each window counted from the last overflow, and the allowance is whole again.
    double clean[] = {4096, 4096, 8192, 8192, 8192, 16384};
    for (int i = 0; i < 6; i++) {
        loss_scaler_update(&s, false);
        expect_near(t, "scale after clean updates", s.scale, clean[i], 0);
    }
    loss_scaler_update(&s, true);
    expect_near(t, "first overflow after growth is forgiven", s.scale, 16384, 0);
    // With consecutive_hysteresis a clean update restores the allowance at once.
    c.consecutive_hysteresis = true;
    c.loss_scale_window = 1000;
    loss_scaler_init(&s, &c);
    for (int i = 0; i < 10; i++) {
        loss_scaler_update(&s, true);
        loss_scaler_update(&s, false);
    }
    expect_near(t, "alternating overflows are forgiven", s.scale, 65536, 0);
    // The floor: reached by halving, never passed, and an overflow on it is the end.
    c.consecutive_hysteresis = false;
    c.initial_scale_power = 2, c.hysteresis = 1, c.min_loss_scale = 1.5;
    loss_scaler_init(&s, &c);
    expect_true(t, loss_scaler_update(&s, true) && s.scale == 2, "scale %g", s.scale);
    expect_true(t, loss_scaler_update(&s, true) && s.scale == 1.5, "scale %g", s.scale);
    expect_true(t, !loss_scaler_update(&s, true), "goes on at the floor");
    c.min_loss_scale = 0; // no floor: never the end, and the scale stays a number
    loss_scaler_init(&s, &c);
    for (int i = 0; i < 2000; i++) expect_true(t, loss_scaler_update(&s, true) && s.scale > 0 && (float)s.scale > 0, "scale %g after %d overflows", s.scale, i);
    // Static: the scale never moves.
    c.loss_scale = 128;
    loss_scaler_init(&s, &c);
    for (int i = 0; i < 50; i++) expect_true(t, loss_scaler_update(&s, i % 2) && s.scale == 128, "static scale %g", s.scale);
    // Not fp16: 1.
    c.enabled = false;
    loss_scaler_init(&s, &c);
    expect_near(t, "scale without fp16", s.scale, 1, 0);
}

static const TestRow schedule_tests[] = {
    {"warm-up laws", test_warmup_laws}, {"degenerate warm-ups", test_degenerate_warmups}, {"cycle and range test", test_cycle_and_range},
    {"cosine of the run", test_run_cosine}, {"loss scaler", test_loss_scaler}, {NULL, NULL},
};

// ---------------------------------------------------------------------------------------------------------------
// golden: a run of PyTorch and transformers (data/golden/README.md), reproduced

typedef struct {
    char folder[64];
    Config *cfg;
    Json expected;   // expected.json
    char *text;      // of it
    Trainer *trainer;
} Golden;

static void golden_open(const Golden *g, SafeTensors *st, const char *name) {
    char path[128], why[512];
    snprintf(path, sizeof path, "%s/%s", g->folder, name);
    if (!safetensors_open(st, path, why, sizeof why)) die(EXIT_DATA, "%s: %s", path, why);
}

static int64_t golden_setting(const Golden *g, const char *name) {
    int settings = json_find(&g->expected, 0, "settings"), n = json_find(&g->expected, settings, name);
    CHECK(n >= 0, "%s/expected.json has no setting %s", g->folder, name);
    return strtoll(json_text(&g->expected, n), NULL, 10);
}

static double golden_number(const Golden *g, int step, const char *name) {
    double x;
    int n = json_find(&g->expected, step, name);
    CHECK(n >= 0 && json_to_double(json_text(&g->expected, n), &x), "%s/expected.json has no number %s", g->folder, name);
    return x;
}

// Row i of the table from a Hugging Face file, in our layout.
static void golden_row(const SafeTensors *st, const ParamDesc *r, float *values) {
    char name[128], why[512];
    snprintf(name, sizeof name, "transformer.%s", r->name);
    const SafeTensor *s = safetensors_find(st, name);
    CHECK(s && safetensors_numel(s) == param_numel(r), "%s is missing or has another size", name);
    CHECK(safetensors_read(st, s, 0, param_numel(r), values, why, sizeof why), "%s", why);
    if (!r->hf_transposed) return;
    int64_t OC = r->shape[0], C = r->shape[1];
    float *copy = (float *)host_alloc((size_t)(OC * C) * 4);
    memcpy(copy, values, (size_t)(OC * C) * 4);
    for (int64_t i = 0; i < C; i++)
        for (int64_t o = 0; o < OC; o++) values[o * C + i] = copy[i * OC + o];
    free(copy);
}

static void golden_load_weights(const Golden *g) {
    Trainer *trainer = g->trainer;
    SafeTensors st;
    golden_open(g, &st, "model.safetensors");
    for (int i = 0; i < trainer->model.table.n_rows; i++) {
        const ParamDesc *r = &trainer->model.table.row[i];
        if (r->tied_to >= 0) continue;
        float *values = (float *)host_alloc((size_t)param_numel(r) * 4);
        golden_row(&st, r, values);
        zero_tensor_write(&trainer->zero, i, STATE_MASTER, values);
        free(values);
    }
    safetensors_close(&st);
}

// Compares every tensor of a kind with a file; bound is a share of the tensor's largest value.
static void golden_compare(Test *t, const Golden *g, StateKind kind, const char *file, double scale, double bound) {
    Trainer *trainer = g->trainer;
    SafeTensors st;
    golden_open(g, &st, file);
    for (int i = 0; i < trainer->model.table.n_rows; i++) {
        const ParamDesc *r = &trainer->model.table.row[i];
        if (r->tied_to >= 0) continue;
        int64_t n = param_numel(r);
        float *got = (float *)host_alloc((size_t)n * 4), *want = (float *)host_alloc((size_t)n * 4);
        zero_tensor_read(&trainer->zero, i, kind, got);
        for (int64_t k = 0; k < n; k++) got[k] = (float)(got[k] / scale);
        golden_row(&st, r, want);
        expect_close_array(t, r->name, got, want, n, INFINITY, bound);
        free(got);
        free(want);
    }
    safetensors_close(&st);
}

// The trainer that a golden folder asks for, with its weights and tokens.
static Golden golden_begin(const char *name, DType dtype, ProcessGrid grid, int stage) {
    Golden g;
    memset(&g, 0, sizeof g);
    snprintf(g.folder, sizeof g.folder, "data/golden/%s", name);
    char path[128], why[256];
    int64_t size;
    snprintf(path, sizeof path, "%s/expected.json", g.folder);
    g.text = file_read_all(path, true, 1 << 20, &size, why, sizeof why);
    CHECK(g.text && json_parse(&g.expected, g.text, size, JSON_STRICT), "%s cannot be read", path);
    Config *c = g.cfg = tiny_config();
    config_set_dtype(c, dtype);
    c->model.n_layer = golden_setting(&g, "n_layer");
    c->model.n_head = golden_setting(&g, "n_head");
    c->model.n_embd = golden_setting(&g, "n_embd");
    c->model.vocab_size = golden_setting(&g, "vocab");
    c->model.n_inner = 4 * c->model.n_embd;
    c->model.n_positions = c->run.seq_len = golden_setting(&g, "seq");
    c->batch.train_micro_batch_size_per_gpu = golden_setting(&g, "micro");
    c->batch.gradient_accumulation_steps = golden_setting(&g, "accumulation");
    c->batch.train_batch_size = c->batch.train_micro_batch_size_per_gpu * c->batch.gradient_accumulation_steps;
    if (grid.world > 1) { // the ranks share the global batch
        c->batch.gradient_accumulation_steps = 1;
        c->batch.train_micro_batch_size_per_gpu = c->batch.train_batch_size / grid.world;
    }
    c->zero.stage = stage;
    c->run.steps = golden_setting(&g, "steps");
    c->scheduler.type = SCHEDULE_COSINE;
    c->scheduler.warmup_steps = golden_setting(&g, "warmup");
    c->scheduler.total_steps = golden_setting(&g, "total");
    c->scheduler.final_lr_frac = 0.1;
    g.trainer = (Trainer *)host_alloc(sizeof(Trainer));
    snprintf(path, sizeof path, "%s/tokens.bin", g.folder);
    trainer_init_core(g.trainer, c, grid, true, c->batch.train_micro_batch_size_per_gpu);
    dataloader_open(&g.trainer->train, path, c->model.vocab_size, c->run.seq_len, c->batch.train_batch_size, false, false, 1, "data.train");
    g.trainer->has_train = true;
    g.trainer->metrics.log_fd = -1;
    golden_load_weights(&g);
    return g;
}

static void golden_end(Golden *g) {
    trainer_free(g->trainer);
    json_free(&g->expected);
    free(g->text);
    free(g->trainer);
    free(g->cfg);
}

// Bounds of a golden run: relative for losses and norms, shares of the tensor's largest value for gradients and weights.
typedef struct {
    double loss, norm, grads0, final;
} GoldenBounds;

static void golden_run_on(Test *t, const char *name, DType dtype, ProcessGrid grid, int stage, GoldenBounds bound) {
    Golden g = golden_begin(name, dtype, grid, stage);
    int at = g.expected.node[json_find(&g.expected, 0, "steps")].first;
    for (int k = 0; k < g.cfg->run.steps; k++, at = g.expected.node[at].next) {
        double loss = golden_number(&g, at, "loss_f64"), norm = golden_number(&g, at, "grad_norm_f64");
        StepStats s = train_step(g.trainer);
        expect_near(t, "loss", s.loss, loss, bound.loss * loss);
        expect_near(t, "gradient norm", s.grad_norm, norm, bound.norm * norm);
        expect_near(t, "lr", s.lr, golden_number(&g, at, "lr"), 1e-12);
        expect_true(t, !s.skipped, "update %d was skipped", k);
        if (k == 0) golden_compare(t, &g, STATE_GRAD, "grads0.safetensors", s.loss_scale * g.trainer->zero.postdivide, bound.grads0);
    }
    golden_compare(t, &g, STATE_MASTER, "final.safetensors", 1, bound.final);
    golden_end(&g);
}

static void golden_run(Test *t, const char *name, DType dtype, GoldenBounds bound) { golden_run_on(t, name, dtype, grid_of_one(), 0, bound); }

// fp32: losses 2e-5 relative and norms 1e-4 against PyTorch in fp64, first gradients 1e-5 and final weights 1e-4 of the
// tensor's largest value. 16 bits: 1 % for losses and norms. Final weights in 16 bits: the gradient of the key's bias is
// zero but for rounding, and Adam turns rounding of any size into steps of lr, so two runs may differ there by the sum
// of the rates, 0.012, a tenth of the largest bias; the bound is twice that.
static const GoldenBounds golden_fp32 = {2e-5, 1e-4, 1e-5, 1e-4}, golden_bf16 = {0.01, 0.01, 0.05, 0.2}, golden_fp16 = {0.01, 0.01, 0.01, 0.2};

static void test_golden_fp32(Test *t) { golden_run(t, "gpt2-tiny", DTYPE_FP32, golden_fp32); }
static void test_golden_bf16(Test *t) { golden_run(t, "gpt2-tiny", DTYPE_BF16, golden_bf16); }
static void test_golden_fp16(Test *t) { golden_run(t, "gpt2-tiny", DTYPE_FP16, golden_fp16); }
static void test_golden_odd_fp32(Test *t) { golden_run(t, "gpt2-odd", DTYPE_FP32, golden_fp32); }
static void test_golden_odd_bf16(Test *t) { golden_run(t, "gpt2-odd", DTYPE_BF16, golden_bf16); }

// Logits of the first micro-batch before training.
static void golden_logits(Test *t, const char *name) {
    Golden g = golden_begin(name, DTYPE_FP32, grid_of_one(), 0);
    Trainer *trainer = g.trainer;
    ActSlot *a = &trainer->acts->slot[0];
    load_micro_batch(trainer, 0, a);
    a->mode = FORWARD_LOGITS;
    forward_chunk(trainer, 0, a);
    Acts head = acts_begin(trainer->acts, a, {trainer->model.table.n_units - 1, ACTS_FORWARD});
    int64_t N = a->B * a->T, V = trainer->model.V, Vp = trainer->model.Vp;
    float *padded = (float *)host_alloc((size_t)(N * Vp) * 4), *got = (float *)host_alloc((size_t)(N * V) * 4), *want = (float *)host_alloc((size_t)(N * V) * 4);
    device_copy(padded, head.act[ACT_LOGITS].data, N * Vp * 4, COPY_TO_HOST, trainer->stream);
    stream_sync(trainer->stream);
    for (int64_t i = 0; i < N; i++) memcpy(got + i * V, padded + i * Vp, (size_t)V * 4);
    SafeTensors st;
    char why[256];
    golden_open(&g, &st, "logits0.safetensors");
    CHECK(safetensors_read(&st, safetensors_find(&st, "logits"), 0, N * V, want, why, sizeof why), "%s", why);
    expect_close_array(t, "logits", got, want, N * V, 1e-10, 1e-5);
    safetensors_close(&st);
    free(padded);
    free(got);
    free(want);
    golden_end(&g);
}
static void test_golden_logits(Test *t) { golden_logits(t, "gpt2-tiny"); }
static void test_golden_odd_logits(Test *t) { golden_logits(t, "gpt2-odd"); }

static const TestRow golden_tests[] = {
    {"logits", test_golden_logits}, {"fp32", test_golden_fp32}, {"bf16", test_golden_bf16}, {"fp16", test_golden_fp16},
    {"odd shape, logits", test_golden_odd_logits}, {"odd shape, fp32", test_golden_odd_fp32}, {"odd shape, bf16", test_golden_odd_bf16}, {NULL, NULL},
};

// ---------------------------------------------------------------------------------------------------------------
// trainer: properties of whole updates

// Runs n updates and leaves losses and norms in `stats`; the caller frees the trainer's weights it is given.
static float *run_updates(Config *c, int n, StepStats *stats, int64_t *n_weights) {
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    tiny_trainer(trainer, c);
    for (int k = 0; k < n; k++) stats[k] = train_step(trainer);
    float *w = trainer_weights(trainer, n_weights);
    trainer_free(trainer);
    free(trainer);
    return w;
}

// One update of 8 samples: one micro-batch of 8, or 2, 4, 8 smaller ones, odd sizes of everything. The sums are the same
// numbers in another order: 1e-5 relative.
static void test_accumulation(Test *t) {
    Config *c = tiny_config();
    c->model.n_head = 3, c->model.n_embd = KERNELS_ON_GPU ? 72 : 33, c->model.n_inner = 50, c->model.vocab_size = 256, c->run.seq_len = 17;
    c->batch.train_batch_size = 8;
    StepStats want[5], got[5];
    for (int64_t accumulation = 1; accumulation <= 8; accumulation *= 2) {
        c->batch.gradient_accumulation_steps = accumulation;
        c->batch.train_micro_batch_size_per_gpu = 8 / accumulation;
        int64_t n;
        free(run_updates(c, 5, accumulation == 1 ? want : got, &n));
        for (int k = 0; k < 5 && accumulation > 1; k++) {
            expect_near(t, "loss", got[k].loss, want[k].loss, 1e-5 * want[k].loss);
            expect_near(t, "gradient norm", got[k].grad_norm, want[k].grad_norm, 1e-5 * want[k].grad_norm);
        }
    }
    free(c);
}

// Logits in pieces of 128 tokens (of 192, the last piece is shorter; and of 2 x 192, two micro-batches) or all at once: the
// loss of each token is the same number, and the gradient of the head the same sum in another order. Evaluation and
// samples see the same logits.
static void test_head_pieces(Test *t) {
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++)
        for (int64_t accumulation = 1; accumulation <= 2; accumulation++) {
            Config *c = tiny_config();
            config_set_dtype(c, (DType)dtype);
            c->batch.gradient_accumulation_steps = accumulation;
            c->batch.train_micro_batch_size_per_gpu = 8;
            c->batch.train_batch_size = 8 * accumulation;
            StepStats stats[2][3];
            double val[2];
            for (int pieces = 0; pieces < 2; pieces++) {
                c->run.logits_bytes = pieces ? 1 : 1 << 30;
                Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
                tiny_trainer(trainer, c);
                expect_equal_i64(t, "tokens in a piece", head_rows(&trainer->model, 192), pieces ? 128 : 192);
                for (int k = 0; k < 3; k++) stats[pieces][k] = train_step(trainer);
                val[pieces] = evaluate(trainer);
                trainer_free(trainer);
                free(trainer);
            }
            // The sums differ in the last bits of fp32; a weight that is rounded to 16 bits may take the neighbouring value.
            const double bound = dtype == DTYPE_FP32 ? 1e-6 : 1e-3;
            for (int k = 0; k < 3; k++) {
                expect_near(t, "loss", stats[1][k].loss, stats[0][k].loss, (k == 0 ? 1e-6 : bound) * stats[0][k].loss);
                expect_near(t, "gradient norm", stats[1][k].grad_norm, stats[0][k].grad_norm, (k == 0 ? 1e-6 : bound) * stats[0][k].grad_norm);
            }
            expect_near(t, "validation loss", val[1], val[0], bound * val[0]);
            free(c);
        }
}

// Twice the same run: the same bits.
static void test_repeats(Test *t) {
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++) {
        Config *c = tiny_config();
        config_set_dtype(c, (DType)dtype);
        StepStats a[6], b[6];
        int64_t n;
        float *wa = run_updates(c, 6, a, &n), *wb = run_updates(c, 6, b, &n);
        expect_same_bytes(t, "weights", wa, wb, n * 4);
        for (int k = 0; k < 6; k++) expect_same_bytes(t, "loss", &a[k].loss, &b[k].loss, 8);
        free(wa);
        free(wb);
        free(c);
    }
}

// An evaluation and a sample between updates change no bit of training; the validation loss itself does not depend on
// the micro-batch, and with lr 0 it is the training loss when both read the same tokens.
static void test_evaluation_leaves_no_trace(Test *t) {
    Config *c = tiny_config();
    int64_t n;
    StepStats plain[6];
    float *want = run_updates(c, 6, plain, &n);
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    tiny_trainer(trainer, c);
    for (int k = 0; k < 6; k++) {
        double a = evaluate(trainer), b = evaluate(trainer);
        expect_same_bytes(t, "validation loss", &a, &b, 8);
        StepStats s = train_step(trainer);
        expect_same_bytes(t, "loss", &s.loss, &plain[k].loss, 8);
    }
    float *got = trainer_weights(trainer, &n);
    expect_same_bytes(t, "weights", got, want, n * 4);
    trainer_free(trainer);
    c->optimizer.lr = 0;
    c->run.eval_batches = 2;
    tiny_trainer(trainer, c);
    double val = evaluate(trainer);
    StepStats s = train_step(trainer); // reads the same four samples
    expect_near(t, "validation against training loss", val, s.loss, 1e-12);
    trainer_free(trainer);
    // A set that does not divide: all of its samples count once, whatever the micro-batch.
    double whole[3];
    for (int k = 0; k < 3; k++) {
        c->run.eval_batches = 0;
        c->batch.train_micro_batch_size_per_gpu = 1 + 3 * k;
        c->batch.gradient_accumulation_steps = 1;
        c->batch.train_batch_size = 1 + 3 * k;
        tiny_trainer(trainer, c);
        whole[k] = evaluate(trainer);
        expect_near(t, "validation loss of the whole set", whole[k], whole[0], 1e-6);
        trainer_free(trainer);
    }
    free(trainer);
    free(got);
    free(want);
    free(c);
}

// Sets one element of a weight, through the masters.
static void plant_weight(Trainer *trainer, const char *name, float value) {
    for (int i = 0; i < trainer->model.table.n_rows; i++) {
        const ParamDesc *r = &trainer->model.table.row[i];
        if (strcmp(r->name, name) != 0) continue;
        float *values = (float *)host_alloc((size_t)param_numel(r) * 4);
        zero_tensor_read(&trainer->zero, i, STATE_MASTER, values);
        values[1] = value;
        zero_tensor_write(&trainer->zero, i, STATE_MASTER, values);
        free(values);
        return;
    }
    CHECK(false, "no row %s", name);
}

// fp16 with a scale that overflows at once: updates are skipped without a trace, the scale follows the documented rule,
// and when it fits, training begins with the schedule's first rate.
static void test_overflow_skips(Test *t) {
    Config *c = tiny_config();
    config_set_dtype(c, DTYPE_FP16);
    c->fp16.initial_scale_power = 32; // gradients of 2^32 * loss leave the range of fp16
    c->scheduler.type = SCHEDULE_COSINE;
    c->scheduler.warmup_steps = 4, c->scheduler.total_steps = 20, c->scheduler.final_lr_frac = 0;
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    tiny_trainer(trainer, c);
    int64_t n;
    float *before = trainer_states(trainer, &n);
    double scale = 0x1p32;
    int skipped = 0;
    for (int k = 0; k < 30; k++) {
        StepStats s = train_step(trainer);
        expect_near(t, "loss scale", s.loss_scale, scale, 0);
        expect_near(t, "lr", s.lr, c->optimizer.lr * 0.25, 1e-12);
        expect_true(t, isfinite(s.loss), "loss %g", s.loss);
        if (!s.skipped) break;
        skipped++;
        if (skipped > 1) scale /= 2; // the first overflow is forgiven (hysteresis 2)
        float *after = trainer_states(trainer, &n);
        expect_same_bytes(t, "weights and states after a skipped update", after, before, n * 4);
        free(after);
        expect_equal_i64(t, "applied updates", trainer->opt.applied_updates, 0);
    }
    expect_true(t, skipped >= 2 && skipped < 29, "%d updates skipped", skipped);
    expect_equal_i64(t, "skipped updates counted", trainer->opt.skipped, skipped);
    float *after = trainer_weights(trainer, &n);
    expect_true(t, memcmp(after, before, (size_t)n * 4) != 0, "weights never moved"); // they come first among the states
    free(after);
    free(before);
    trainer_free(trainer);
    free(trainer);
    free(c);
}

typedef struct {
    Config *c;
    const char *row;
    float value;
    int updates;
} Planted;

static void run_planted(void *arg) {
    Planted *p = (Planted *)arg;
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    tiny_trainer(trainer, p->c);
    if (p->row) plant_weight(trainer, p->row, p->value);
    for (int k = 0; k < p->updates; k++) train_step(trainer);
}

// What cannot be trained ends with EXIT_NUMERICS and one line; what may pass is skipped.
static void test_run_not_finite(Test *t) {
    if (KERNELS_ON_GPU) { test_skip(t, "runs in a forked child, which may not use a GPU"); return; }
    Config *c = tiny_config();
    Planted nan_weight = {c, "h.1.ln_2.weight", NAN, 1};
    expect_dies(t, EXIT_NUMERICS, "the loss is not finite", run_planted, &nan_weight);
    config_set_dtype(c, DTYPE_BF16);
    expect_dies(t, EXIT_NUMERICS, "the loss is not finite", run_planted, &nan_weight);
    config_set_dtype(c, DTYPE_FP32);
    c->optimizer.lr = 1e30;
    c->gradient_clipping = 0;
    Planted explodes = {c, NULL, 0, 4};
    expect_dies(t, EXIT_NUMERICS, "step ", run_planted, &explodes);
    // fp16, a floor, and an overflow that never ends: the tensor is named.
    c->optimizer.lr = 1e-3;
    config_set_dtype(c, DTYPE_FP16);
    c->fp16.initial_scale_power = 4;
    Planted floor = {c, "h.0.mlp.c_fc.bias", INFINITY, 20};
    expect_dies(t, EXIT_NUMERICS, "overflow at the floor of the loss scale", run_planted, &floor);
    expect_dies(t, EXIT_NUMERICS, "first in wte.weight", run_planted, &floor);
    free(c);
}

// A gradient that is not finite while the loss is: one infinite element planted in the shards.
static void test_infinite_gradient(Test *t) {
    for (int dtype = 1; dtype < DTYPE_COUNT; dtype++) {
        Config *c = tiny_config();
        config_set_dtype(c, (DType)dtype);
        Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
        tiny_trainer(trainer, c);
        StepStats s = train_step(trainer);
        int64_t n;
        float *before = trainer_states(trainer, &n);
        float infinite = INFINITY;
        device_copy((float *)trainer->zero.unit[1].grad_shard + 3, &infinite, 4, COPY_TO_DEVICE, trainer->stream);
        RankState state = trainer_rank_state(trainer);
        OptimizerStats o = optimizer_step(&trainer->opt, &trainer->zero, s.step_tokens, &state, {false, false, false});
        expect_true(t, o.skipped, "%s: an infinite gradient was applied", dtype_name((DType)dtype));
        float *after = trainer_states(trainer, &n);
        expect_same_bytes(t, "weights and states", after, before, n * 4);
        s = train_step(trainer);
        expect_true(t, !s.skipped && isfinite(s.grad_norm), "training does not go on");
        free(before);
        free(after);
        trainer_free(trainer);
        free(trainer);
        free(c);
    }
}

// All gradients zero: no division by zero, weights move by decay alone.
static void test_zero_gradients(Test *t) {
    Config *c = tiny_config();
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    tiny_trainer(trainer, c);
    int64_t n;
    float *before = trainer_weights(trainer, &n);
    RankState state = trainer_rank_state(trainer);
    OptimizerStats o = optimizer_step(&trainer->opt, &trainer->zero, 1, &state, {false, false, false});
    expect_near(t, "norm", o.grad_norm, 0, 0);
    expect_near(t, "clip factor", o.clip_factor, 1, 0);
    float *after = trainer_weights(trainer, &n), *at = after, *old = before;
    for (int i = 0; i < trainer->model.table.n_rows; i++) {
        const ParamDesc *r = &trainer->model.table.row[i];
        if (r->tied_to >= 0) continue;
        float keep = r->decay ? (float)(1 - c->optimizer.lr * c->optimizer.weight_decay) : 1.0f;
        for (int64_t k = 0; k < param_numel(r); k++) expect_near(t, r->name, at[k], old[k] * keep, 1e-6 * fabs(old[k]));
        at += param_numel(r), old += param_numel(r);
    }
    free(before);
    free(after);
    trainer_free(trainer);
    free(trainer);
    free(c);
}

// The norm in the log is the one before clipping; norm * factor never passes the limit.
static void test_clipping(Test *t) {
    Config *c = tiny_config();
    c->gradient_clipping = 0.1;
    StepStats s[8];
    int64_t n, clipped = 0;
    free(run_updates(c, 8, s, &n));
    for (int k = 0; k < 8; k++) {
        expect_true(t, s[k].clip_factor > 0 && s[k].clip_factor <= 1 && s[k].grad_norm * s[k].clip_factor <= 0.1 * (1 + 1e-5), "norm %g times factor %g", s[k].grad_norm, s[k].clip_factor);
        clipped += s[k].clip_factor < 1;
    }
    expect_true(t, clipped > 0, "nothing was clipped");
    free(c);
}

// Sampling past the model's positions, with as few of them as can be: the window moves, nothing is written beside it (the
// address sanitizer looks), and a second time gives the same weights back untouched.
static void test_short_windows(Test *t) {
    for (int64_t T = 1; T <= 5; T++) {
        Config *c = tiny_config();
        c->model.n_positions = c->run.seq_len = T;
        Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
        tiny_trainer(trainer, c);
        tokenizer_open(&trainer->tokenizer, "", c->model.vocab_size);
        int64_t n;
        float *before = trainer_weights(trainer, &n);
        trainer->grid.rank = 1; // computes, and leaves the printing to rank 0
        generate_text(trainer, "", 40, 1);
        generate_text(trainer, "a longer prompt", 40, 1);
        trainer->grid.rank = 0;
        float *after = trainer_weights(trainer, &n);
        expect_same_bytes(t, "weights", after, before, n * 4);
        free(before);
        free(after);
        trainer_free(trainer);
        free(trainer);
        free(c);
    }
}

// Padding of the vocabulary: rows beyond V stay zero, and the loss is that of the real ids (211 is prime).
static void test_vocabulary_padding(Test *t) {
    Config *c = tiny_config();
    c->model.vocab_size = 251; // a prime above every byte of the text
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    tiny_trainer(trainer, c);
    for (int k = 0; k < 4; k++) train_step(trainer);
    const ParamDesc *wte = &trainer->model.table.row[0];
    int64_t pad = wte->numel - param_numel(wte);
    expect_true(t, pad > 0, "nothing is padded");
    float *values = (float *)host_alloc((size_t)wte->numel * 4);
    for (int kind = STATE_MASTER; kind <= STATE_GRAD; kind++) {
        const UnitState *unit = &trainer->zero.unit[0];
        const float *at = kind == STATE_MASTER ? (const float *)unit->master : kind == STATE_GRAD ? (const float *)unit->grad : unit->state[kind - STATE_OPTIMIZER_0];
        device_copy(values, at + wte->offset, wte->numel * 4, COPY_TO_HOST, trainer->stream);
        stream_sync(trainer->stream);
        for (int64_t k = 0; k < pad; k++) expect_near(t, "padding", values[param_numel(wte) + k], 0, 0);
    }
    free(values);
    trainer_free(trainer);
    free(trainer);
    free(c);
}

// Masters under bf16: what is written is read back, bit for bit, the weights are its rounding, and it takes 2 bytes an element.
static void test_split_storage(Test *t) {
    Config *c = tiny_config();
    config_set_dtype(c, DTYPE_BF16);
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    tiny_trainer(trainer, c);
    Zero *z = &trainer->zero;
    const ParamDesc *r = &z->model->table.row[z->model->table.unit[1].first_row + 2];
    int64_t n = param_numel(r);
    float *values = (float *)host_alloc((size_t)n * 4), *back = (float *)host_alloc((size_t)n * 4);
    uint16_t *weights = (uint16_t *)host_alloc((size_t)n * 2);
    for (int64_t i = 0; i < n; i++) values[i] = split_master_value(i);
    zero_tensor_write(z, (int)(r - z->model->table.row), STATE_MASTER, values);
    zero_tensor_read(z, (int)(r - z->model->table.row), STATE_MASTER, back);
    expect_same_bytes(t, "masters", back, values, n * 4);
    device_copy(weights, (uint16_t *)z->unit[1].param + r->offset, n * 2, COPY_TO_HOST, trainer->stream);
    stream_sync(trainer->stream);
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) wrong += weights[i] != master_to_bf16(values[i]);
    expect_equal_i64(t, "weights that are not the rounded master", wrong, 0);
    zero_masters_from_weights(z);
    zero_tensor_read(z, (int)(r - z->model->table.row), STATE_MASTER, back);
    for (int64_t i = 0; i < n; i++) values[i] = bf16_to_float(weights[i]);
    expect_same_bytes(t, "masters made from the weights", back, values, n * 4);
    expect_equal_i64(t, "bytes of masters, by those of two fp32 states", 4 * z->allocated.bytes[MEMORY_MASTERS], z->allocated.bytes[MEMORY_OPTIMIZER_STATES]);
    free(values);
    free(back);
    free(weights);
    trainer_free(trainer);
    free(trainer);
    free(c);
}

// An untied head trains a table of its own, with the same loss at the start when it holds the same values.
static void test_untied_head(Test *t) {
    StepStats tied[1], untied[3];
    Config *c = tiny_config();
    int64_t n_tied, n_untied;
    free(run_updates(c, 1, tied, &n_tied));
    c->model.tie_word_embeddings = false;
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    tiny_trainer(trainer, c);
    int head = trainer->model.table.unit[3].first_row + 2;
    expect_equal_text(t, "row", trainer->model.table.row[head].name, "lm_head.weight");
    float *wte = (float *)host_alloc(256 * 32 * 4);
    zero_tensor_read(&trainer->zero, 0, STATE_MASTER, wte);
    zero_tensor_write(&trainer->zero, head, STATE_MASTER, wte);
    for (int k = 0; k < 3; k++) untied[k] = train_step(trainer);
    expect_near(t, "first loss", untied[0].loss, tied[0].loss, 1e-7);
    expect_true(t, untied[2].loss < untied[0].loss, "loss %g does not fall from %g", untied[2].loss, untied[0].loss);
    free(trainer_weights(trainer, &n_untied));
    expect_equal_i64(t, "parameters of the head", n_untied - n_tied, 256 * 32);
    free(wte);
    trainer_free(trainer);
    free(trainer);
    free(c);
}

// Every optimizer lowers the loss on one repeated batch.
static void test_optimizers_learn(Test *t) {
    static const struct { OptimizerType type; double lr, momentum; } rows[] = {{OPTIMIZER_ADAMW, 3e-3, 0}, {OPTIMIZER_LION, 1e-3, 0}, {OPTIMIZER_SGD, 0.5, 0}, {OPTIMIZER_SGD, 0.1, 0.9}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Config *c = tiny_config();
        c->optimizer.type = rows[i].type;
        c->optimizer.lr = rows[i].lr;
        c->optimizer.momentum = rows[i].momentum;
        Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
        tiny_trainer(trainer, c);
        double first = 0, last = 0;
        for (int k = 0; k < 40; k++) {
            trainer->samples = 0; // the same four samples again
            StepStats s = train_step(trainer);
            if (k == 0) first = s.loss;
            last = s.loss;
        }
        expect_true(t, last < 0.8 * first, "%s: loss goes from %g to %g", optimizer_rules[rows[i].type].name, first, last);
        trainer_free(trainer);
        free(trainer);
        free(c);
    }
}

// The embedding of equal seeds is equal whatever else changes: initial weights depend on names and indices only.
static void test_initialisation_is_a_function(Test *t) {
    Config *a = tiny_config(), *b = tiny_config();
    b->model.n_layer = 4;
    b->batch.train_micro_batch_size_per_gpu = 1, b->batch.gradient_accumulation_steps = 4;
    Trainer *x = (Trainer *)host_alloc(sizeof(Trainer)), *y = (Trainer *)host_alloc(sizeof(Trainer));
    tiny_trainer(x, a);
    tiny_trainer(y, b);
    float *p = (float *)host_alloc(256 * 32 * 4), *q = (float *)host_alloc(256 * 32 * 4);
    zero_tensor_read(&x->zero, 0, STATE_MASTER, p);
    zero_tensor_read(&y->zero, 0, STATE_MASTER, q);
    expect_same_bytes(t, "wte.weight", p, q, 256 * 32 * 4);
    free(p);
    free(q);
    trainer_free(x);
    trainer_free(y);
    free(x);
    free(y);
    free(a);
    free(b);
}

static const TestRow trainer_tests[] = {
    {"accumulation", test_accumulation}, {"head in pieces", test_head_pieces}, {"repeats bit for bit", test_repeats}, {"evaluation leaves no trace", test_evaluation_leaves_no_trace},
    {"overflow skips", test_overflow_skips}, {"not finite", test_run_not_finite}, {"infinite gradient", test_infinite_gradient}, {"zero gradients", test_zero_gradients},
    {"clipping", test_clipping}, {"short windows", test_short_windows}, {"vocabulary padding", test_vocabulary_padding}, {"split masters", test_split_storage}, {"untied head", test_untied_head}, {"optimizers learn", test_optimizers_learn},
    {"initialisation", test_initialisation_is_a_function}, {NULL, NULL},
};

// ---------------------------------------------------------------------------------------------------------------
// resume: stopping and going on is the same, bit for bit, as not having stopped

// background: the checkpoint is written while training goes on, which must change neither.
static void resume_row(Test *t, DType dtype, OptimizerType type, ScheduleType schedule, bool background) {
    Config *c = tiny_config();
    config_set_dtype(c, dtype);
    c->optimizer.type = type;
    c->optimizer.lr = 1e-3;
    c->optimizer.momentum = 0.9;
    c->scheduler.type = schedule;
    c->scheduler.warmup_steps = 3, c->scheduler.total_steps = 12, c->scheduler.final_lr_frac = 0.1;
    c->fp16.initial_scale_power = 30; // overflows first, so that the scaler has a state worth keeping
    c->fp16.loss_scale_window = 4;
    char folder[] = "/tmp/test_gpt_XXXXXX";
    CHECK(mkdtemp(folder), "mkdtemp: %s", strerror(errno));
    snprintf(c->checkpoint.save_dir, sizeof c->checkpoint.save_dir, "%s", folder);
    snprintf(c->run.resume, sizeof c->run.resume, "auto");
    enum { STOP = 7, END = 14 };
    StepStats want[END];
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    tiny_trainer(trainer, c);
    trainer->store = trainer_store(trainer, folder);
    CheckpointTensors tensors = trainer_tensors(trainer);
    if (background) checkpoint_copy_alloc(trainer->store, &tensors);
    for (int k = 0; k < END; k++) {
        if (k == STOP) save(trainer, !background);
        expect_true(t, checkpoint_saving(trainer->store) == (background && k == STOP) || k > STOP, "update %d: a save is on its way", k);
        want[k] = train_step(trainer);
        save_goes_on(trainer);
    }
    save_finish(trainer);
    expect_true(t, trainer->store->job.result.durable, "not durable: %s", trainer->store->job.result.why);
    int64_t n;
    float *want_weights = trainer_weights(trainer, &n);
    trainer_free(trainer);

    tiny_trainer(trainer, c);
    expect_true(t, trainer_load(trainer), "no checkpoint was found");
    expect_equal_i64(t, "step", trainer->step, STOP);
    for (int k = STOP; k < END; k++) {
        StepStats s = train_step(trainer);
        expect_same_bytes(t, "loss", &s.loss, &want[k].loss, 8);
        expect_same_bytes(t, "gradient norm", &s.grad_norm, &want[k].grad_norm, 8);
        expect_near(t, "lr", s.lr, want[k].lr, 0);
        expect_near(t, "loss scale", s.loss_scale, want[k].loss_scale, 0);
        expect_equal_i64(t, "skipped", s.skipped, want[k].skipped);
        expect_equal_i64(t, "tokens", s.tokens, want[k].tokens);
    }
    float *weights = trainer_weights(trainer, &n);
    expect_same_bytes(t, "weights", weights, want_weights, n * 4);
    trainer_free(trainer);
    remove_folder(folder);
    free(weights);
    free(want_weights);
    free(trainer);
    free(c);
}

static void test_resume_fp32(Test *t) { resume_row(t, DTYPE_FP32, OPTIMIZER_ADAMW, SCHEDULE_COSINE, false); }
static void test_resume_bf16(Test *t) { resume_row(t, DTYPE_BF16, OPTIMIZER_LION, SCHEDULE_CONSTANT, false); }
static void test_resume_fp16(Test *t) { resume_row(t, DTYPE_FP16, OPTIMIZER_SGD, SCHEDULE_COSINE, false); }
static void test_resume_fp16_adamw(Test *t) { resume_row(t, DTYPE_FP16, OPTIMIZER_ADAMW, SCHEDULE_COSINE, false); }

static void test_resume_background(Test *t) { resume_row(t, DTYPE_FP32, OPTIMIZER_ADAMW, SCHEDULE_COSINE, true); }
static void test_resume_background_bf16(Test *t) { resume_row(t, DTYPE_BF16, OPTIMIZER_ADAMW, SCHEDULE_CONSTANT, true); }

static const TestRow resume_tests[] = {
    {"fp32 AdamW", test_resume_fp32}, {"bf16 Lion", test_resume_bf16}, {"fp16 SGD", test_resume_fp16}, {"fp16 AdamW", test_resume_fp16_adamw},
    {"saved in the background", test_resume_background}, {"saved in the background, bf16", test_resume_background_bf16}, {NULL, NULL},
};
