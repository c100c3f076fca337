// bench_save.cpp - the rate at which a save in the background writes a shard, and what it costs. Built and run by scripts/bench_save.sh,
// beside dd with O_DIRECT.
//
// What is saved has the shapes of a GPT-2 model in bf16 with AdamW: masters as 16-bit weights and remainders, and two states, of random
// values, in host memory, as behind the copy of a training run. The folder must hold two such checkpoints.
#include "../checkpoint.cu"

// Random values for all of it; the exponents are those of values around 1.
static void bench_keep(void *ctx, int row, int kind, int64_t first, int64_t n, void *kept) {
    (void)ctx;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = (uint32_t)rng_bits((uint64_t)kind, (uint64_t)row, (uint64_t)(first + i));
        const uint32_t value = (bits & 0x807fffffu) | 0x3f000000u;
        if (kind == 0) ((uint16_t *)kept)[i] = (uint16_t)(value >> 16), ((uint16_t *)kept)[n + i] = (uint16_t)bits;
        else memcpy((char *)kept + i * 4, &value, 4);
    }
}
static void bench_keep_end(void *ctx) { (void)ctx; }

// As zero_kept_get.
static void bench_kept_get(void *ctx, int row, int kind, int64_t n, const void *kept, int64_t from, int64_t count, float *values) {
    (void)ctx, (void)row;
    const uint16_t *weight = (const uint16_t *)kept + from, *remainder = weight + n;
    if (kind > 0) memcpy(values, (const float *)kept + from, (size_t)count * 4);
    else for (int64_t i = 0; i < count; i++) values[i] = master_join(weight[i], remainder[i]);
}

static void bench_owned(void *table, int row, int64_t *first, int64_t *last) {
    *first = 0;
    *last = param_numel(&((const ParamTable *)table)->row[row]);
}

int main(int argc, char **argv) {
    if (argc < 3) die(EXIT_CONFIG, "usage: bench_save FOLDER GB [TIMES]");
    ModelConfig m;
    memset(&m, 0, sizeof m);
    m.n_head = 25, m.n_embd = 1600, m.n_inner = 6400, m.n_positions = 1024, m.vocab_size = 50257, m.layer_norm_epsilon = 1e-5, m.tie_word_embeddings = true;
    const double parameters = atof(argv[2]) * 1e9 / 12, of_block = 12.0 * 1600 * 1600, of_rest = 1600.0 * (50257 + 1024);
    m.n_layer = max_i64(1, (int64_t)((parameters - of_rest) / of_block));
    ParamTable table;
    model_build_table(&table, &m, model_whole);
    CheckpointTensors tensors = {&table, &m, 3, {"master", "exp_avg", "exp_avg_sq"}, &table, bench_owned, bench_owned, NULL, NULL, bench_keep, bench_keep_end, bench_kept_get};
    TrainingState state;
    memset(&state, 0, sizeof state);
    state.loss_scale = 1;
    CheckpointStore *store = checkpoint_open(&checkpoint_alone, argv[1], false);
    checkpoint_copy_alloc(store, &tensors);
    printf("%.1f GB of %d tensors:", (double)store->copy.bytes * 1e-9, table.n_rows);
    for (int k = 0; k < (argc > 3 ? atoi(argv[3]) : 2); k++) {
        state.step++;
        checkpoint_begin(store, &state, &tensors, 0, 1);
        checkpoint_finish(store);
        const SaveResult *r = &store->job.result;
        if (!r->durable) die(EXIT_IO, "%s", r->why);
        printf("  %.2f", (double)r->bytes * 1e-9 / r->write_seconds);
    }
    printf(" GB/s\n");
    checkpoint_close(store);
    table_free(&table);
    return 0;
}
