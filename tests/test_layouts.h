// test_layouts.h - checkpoints across layouts: what ranks save under one split of the model, ranks under any other load.
//
// As in test_shards.h the ranks are threads with fake runs; but here each holds its part of a grid's layout (pipeline, data, sequence,
// tensor parallelism, ZeRO's stage), and zero.cu's own rules say what it owns and needs. The values tell step, kind, tensor and
// element, so that one that came to another place is noticed.
#pragma once
#include "test_shards.h"

typedef struct {
    GridAxes axes;
    int stage;            // of ZeRO
} TestLayout;

static const TestLayout test_layouts[] = { // pp, dp, sp, tp
    {{1, 1, 1, 1}, 0}, {{1, 3, 1, 1}, 0}, {{1, 4, 1, 1}, 3}, {{1, 1, 1, 2}, 0}, {{1, 2, 1, 2}, 3}, {{1, 1, 1, 4}, 0}, {{1, 2, 1, 3}, 1}, {{1, 2, 2, 2}, 2},
    {{2, 1, 1, 1}, 0}, {{2, 1, 1, 2}, 1}, {{2, 2, 1, 2}, 3}, {{3, 1, 1, 1}, 0}, {{4, 1, 1, 2}, 2},
};
enum { TEST_LAYOUTS = sizeof test_layouts / sizeof *test_layouts };

static int layout_world(TestLayout l) { return l.axes.pp * l.axes.dp * l.axes.sp * l.axes.tp; }
static const char *test_layout_text(char dst[64], TestLayout l) {
    snprintf(dst, 64, "pp %d dp %d sp %d tp %d stage %d", l.axes.pp, l.axes.dp, l.axes.sp, l.axes.tp, l.stage);
    return dst;
}

// A model whose sizes 2, 3 and 4 divide, with a vocabulary that leaves padding to some ranks and nothing else to others.
static ModelConfig layout_model(bool tied) {
    ModelConfig m = fake_model(2, 24, 300);
    m.n_head = 12;
    m.tie_word_embeddings = tied;
    return m;
}

// As much of a Zero as says who owns what.
static Zero *placed_make(const FakeRun *f, TestLayout l, ProcessGrid grid) {
    Zero *z = (Zero *)host_alloc(sizeof *z);
    Model *m = (Model *)host_alloc(sizeof *m);
    m->table = f->table;
    m->dtype = DTYPE_FP32;
    z->model = m;
    z->opt.stage = l.stage;
    z->gather_group.size = grid.zero_size;
    z->gather_group.rank = grid.zero_rank;
    z->layout.opt = z->opt;
    z->layout.ranks = grid.zero_size;
    z->layout.rank = grid.zero_rank;
    z->unit = (UnitState *)host_alloc(sizeof(UnitState) * (size_t)f->table.n_units);
    for (int u = 0; u < f->table.n_units; u++) {
        UnitLayout unit = layout_unit(&z->layout, m, u, 0);
        z->unit[u].shard_numel = unit.shard_numel;
        z->unit[u].update_first = unit.update_first;
        z->unit[u].update_numel = unit.update_numel;
    }
    return z;
}

static ShardsRank *layout_make(TestLayout l, ModelConfig m, int n_kinds, const char *folder) {
    FakeRun *run[SHARDS_WORLD_MAX] = {NULL};
    int stage[8], n_units = (int)m.n_layer + 2;
    CHECK(n_units <= 8 && layout_world(l) <= SHARDS_WORLD_MAX, "%d units", n_units);
    for (int u = 0; u < n_units; u++) stage[u] = u * l.axes.pp / n_units;
    for (int r = 0; r < layout_world(l); r++) {
        ProcessGrid grid = grid_make(r, l.axes);
        run[r] = fake_make_part(m, {l.axes.tp, grid.coord.tp, grid.coord.pp, stage}, n_kinds, 1);
        run[r]->placed = placed_make(run[r], l, grid);
    }
    return shards_make_runs(run, layout_world(l), folder);
}

static void layout_free(ShardsRank *rank) {
    for (int r = 0; r < rank->job->world; r++) {
        Zero *z = rank[r].run->placed;
        free((void *)z->model);
        free(z->unit);
        free(z);
    }
    shards_free(rank);
}

static void layout_pair(Test *t, TestLayout from, TestLayout to, ModelConfig m, const char *folder, int64_t step) {
    CkptCaptured c;
    char what[160], a[64], b[64];
    snprintf(what, sizeof what, "%s to %s", test_layout_text(a, from), test_layout_text(b, to));
    ShardsRank *reader = layout_make(to, m, 2, folder);
    shards_expect_loaded(t, what, reader, false, step, &c);
    expect_equal_text(t, what, c.text, "");
    layout_free(reader);
}

static void layout_save(Test *t, TestLayout l, ModelConfig m, const char *folder, int64_t step) {
    char what[64];
    ShardsRank *writer = layout_make(l, m, 2, folder);
    shards_save(writer, 1, step, 0);
    for (int r = 0; r < layout_world(l); r++) {
        expect_true(t, writer[r].result.durable, "%s, rank %d: %s", test_layout_text(what, l), r, writer[r].result.why);
        expect_true(t, writer[r].result.bytes <= checkpoint_bytes(&writer[r].run->tensors, layout_world(l)), "%s: more bytes than foreseen", test_layout_text(what, l));
    }
    layout_free(writer);
}

// Each layout saves, every layout loads what it needs and nothing else, bit for bit.
static void test_layouts_pairs(Test *t) {
    for (int i = 0; i < TEST_LAYOUTS; i++) {
        CkptPath folder;
        ckpt_folder_fast(folder);
        layout_save(t, test_layouts[i], layout_model(true), folder, 5);
        for (int k = 0; k < TEST_LAYOUTS; k++) layout_pair(t, test_layouts[i], test_layouts[k], layout_model(true), folder, 5);
        ckpt_remove(folder);
    }
}

// A head of its own.
static void test_layouts_untied(Test *t) {
    for (int i = 0; i < TEST_LAYOUTS; i++) {
        CkptPath folder;
        ckpt_folder_fast(folder);
        layout_save(t, test_layouts[i], layout_model(false), folder, 5);
        for (int k = 1; k < 4; k++) layout_pair(t, test_layouts[i], test_layouts[(i + 3 * k + 1) % TEST_LAYOUTS], layout_model(false), folder, 5);
        ckpt_remove(folder);
    }
}

// Tensors of several slices and pieces, whose rows no border between ranks or pieces respects.
static void test_layouts_large(Test *t) {
    static const TestLayout layout[] = {{{1, 3, 1, 2}, 3}, {{1, 1, 1, 4}, 0}, {{1, 1, 1, 1}, 0}, {{2, 2, 1, 2}, 2}};
    ModelConfig m = fake_model(1, 24, 88001);
    m.n_inner = 8760;
    for (int i = 0; i < 4; i++) {
        CkptPath folder;
        ckpt_folder_fast(folder);
        layout_save(t, layout[i], m, folder, 3);
        layout_pair(t, layout[i], layout[(i + 1) % 4], m, folder, 3);
        ckpt_remove(folder);
    }
}

// How often the ranks of a layout together read what another has saved: once to check it, then each what it needs, whatever its part is;
// but checksums are those of pieces, so that of shorter columns two ranks read the same pieces.
static void test_layouts_bytes_read(Test *t) {
    static const struct { TestLayout from, to; double times; } row[] = {
        {{{1, 2, 1, 2}, 3}, {{1, 2, 1, 2}, 3}, 2}, {{{1, 2, 1, 2}, 3}, {{1, 1, 1, 1}, 0}, 2}, {{{1, 1, 1, 4}, 0}, {{2, 1, 1, 2}, 0}, 2}, {{{1, 1, 1, 2}, 0}, {{1, 1, 1, 4}, 0}, 2.5}, {{{2, 2, 1, 2}, 3}, {{1, 1, 1, 2}, 0}, 2},
    };
    ModelConfig m = fake_model(1, 160, 3000);
    m.n_inner = 16000;
    m.tie_word_embeddings = false;
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        CkptPath folder;
        CkptCaptured c;
        char what[160], a[64], b[64];
        ckpt_folder_fast(folder);
        layout_save(t, row[i].from, m, folder, 3);
        ShardsRank *reader = layout_make(row[i].to, m, 2, folder);
        double total = (double)table_param_count(&reader[0].run->table) * 8;
        int64_t before = shards_bytes_read();
        ckpt_capture_begin(&c);
        shards_together(reader, shards_load_thread);
        ckpt_capture_end(&c);
        double times = (double)(shards_bytes_read() - before) / total;
        snprintf(what, sizeof what, "%s to %s", test_layout_text(a, row[i].from), test_layout_text(b, row[i].to));
        if (before < 0) test_skip(t, "no /proc/self/io");
        else expect_true(t, times > 0.95 * row[i].times && times < 1.25 * row[i].times + 0.3, "%s: %.2f times the checkpoint is read, expected about %g", what, times, row[i].times);
        layout_free(reader);
        ckpt_remove(folder);
    }
}

// Blocks that cover a matrix, and the same with one of them moved, cut, missing or twice, against counting.
static void test_layouts_cover(Test *t) {
    enum { TRIES = 20000, MOST = 7 };
    uint64_t at = 0;
    int64_t good = 0, bad = 0;
    for (int i = 0; i < TRIES; i++) {
#define PICK(n) ((int64_t)(rng_bits(11, (uint64_t)i, at++) % (uint64_t)(n)))
        RunBlock block[64];
        CoverStep step[129];
        int count[MOST][MOST] = {{0}};
        int64_t rows = 1 + PICK(MOST), width = 1 + PICK(MOST), n = 1, wrong = 0;
        block[0] = {0, 0, rows, width, 0};
        for (int cuts = (int)PICK(12); cuts > 0; cuts--) { // cut any block in two
            RunBlock *b = &block[PICK(n)], rest = *b;
            bool across = PICK(2);
            int64_t length = across ? b->columns : b->rows, border = PICK(length);
            if (border == 0) continue;
            if (across) b->columns = border, rest.column += border, rest.columns -= border;
            else b->rows = border, rest.row += border, rest.rows -= border;
            block[n++] = rest;
        }
        RunBlock *b = &block[PICK(n)], harmed = *b;
        switch (PICK(6)) {
        case 0: harmed.row += PICK(3) - 1; break;
        case 1: harmed.column += PICK(3) - 1; break;
        case 2: harmed.rows += PICK(3) - 1; break;
        case 3: harmed.columns += PICK(3) - 1; break;
        case 4: *b = block[--n]; harmed = n ? *b : harmed; break;
        }
        if (harmed.row >= 0 && harmed.column >= 0 && harmed.rows > 0 && harmed.columns > 0 && harmed.row + harmed.rows <= rows && harmed.column + harmed.columns <= width && n > 0) *b = harmed;
        for (int64_t k = 0; k < n; k++)
            for (int64_t y = block[k].row; y < block[k].row + block[k].rows; y++)
                for (int64_t x = block[k].column; x < block[k].column + block[k].columns; x++) count[y][x]++;
        for (int64_t y = 0; y < rows; y++) for (int64_t x = 0; x < width; x++) wrong += count[y][x] != 1;
        int64_t found = blocks_cover(block, n, rows, width, step);
        expect_true(t, (found < 0) == (wrong == 0), "try %d: %" PRId64 " elements are wrong, found %" PRId64, i, wrong, found);
        if (found >= 0 && wrong) expect_true(t, found < rows * width && count[found / width][found % width] != 1, "try %d: element %" PRId64 " is not wrong", i, found);
        good += wrong == 0;
        bad += wrong > 0;
#undef PICK
    }
    expect_true(t, good > TRIES / 5 && bad > TRIES / 5, "%" PRId64 " good, %" PRId64 " bad", good, bad);
}

// Numbers of a run of columns overwritten, all checksums made right: refused, and the reason says why.
static void test_layouts_forged(Test *t) {
    enum { W = 12 }; // h.0.attn.c_proj.weight of 24 x 24 on two ranks: 24 pieces of 12
    static const struct { size_t offset; int64_t value; const char *why; } row[] = {
#define IN_RUN_(field) offsetof(ShardRun, field)
        {IN_RUN_(count), 0, "is impossible"}, {IN_RUN_(count), -1, "is impossible"}, {IN_RUN_(count), INT64_MAX, "is impossible"}, {IN_RUN_(count), 25, "is impossible"},
        {IN_RUN_(count), 23, "is impossible"}, {IN_RUN_(count), 1, "is impossible"}, {IN_RUN_(count), (int64_t)1 << 61, "is impossible"},
        {IN_RUN_(numel), 0, "is impossible"}, {IN_RUN_(numel), -1, "is impossible"}, {IN_RUN_(numel), 13, "is impossible"}, {IN_RUN_(numel), 24, "is impossible"},
        {IN_RUN_(numel), 25, "is impossible"}, {IN_RUN_(numel), INT64_MAX, "is impossible"}, {IN_RUN_(numel), 11, "is impossible"},
        {IN_RUN_(stride), 0, "is impossible"}, {IN_RUN_(stride), -24, "is impossible"}, {IN_RUN_(stride), 12, "is impossible"}, {IN_RUN_(stride), 23, "is impossible"},
        {IN_RUN_(stride), 25, "is impossible"}, {IN_RUN_(stride), INT64_MAX, "is impossible"}, {IN_RUN_(stride), INT64_MIN, "is impossible"},
        {IN_RUN_(global_offset), 1, "are missing or stored twice"}, {IN_RUN_(global_offset), 12, "are missing or stored twice"}, {IN_RUN_(global_offset), 13, "is impossible"},
        {IN_RUN_(global_offset), 24, "is impossible"}, {IN_RUN_(global_offset), -1, "is impossible"}, {IN_RUN_(global_offset), INT64_MAX, "is impossible"}, {IN_RUN_(global_offset), INT64_MAX - 23, "is impossible"},
        {IN_RUN_(data_offset), 0, "is impossible"}, {IN_RUN_(data_offset), INT64_MAX - 3, "is impossible"},
#undef IN_RUN_
    };
    CkptPath folder, checkpoint, path;
    ckpt_folder_fast(folder);
    layout_save(t, {{1, 1, 1, 2}, 0}, layout_model(true), folder, 5);
    ckpt_reseal(ckpt_join(checkpoint, folder, "step-00000005"));
    expect_true(t, ckpt_verdict(folder, "step-00000005") == NULL, "resealing breaks it: %s", ckpt_verdict(folder, "step-00000005"));
    int64_t bytes, place = -1;
    char *good = ckpt_slurp(ckpt_join(path, checkpoint, "shard-0.bin"), &bytes);
    const ShardHeader *h = (const ShardHeader *)good;
    const ShardRun *run = (const ShardRun *)(good + SHARD_ALIGN + h->data_bytes);
    for (int64_t i = 0; i < h->n_runs && place < 0; i++) if (run[i].count > 1) place = SHARD_ALIGN + h->data_bytes + i * (int64_t)sizeof *run, run += i;
    CHECK(place > 0 && run->count == 24 && run->numel == W && run->stride == 24 && run->global_offset == 0, "no run of columns");
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        char *forged = (char *)host_alloc((size_t)bytes), what[32];
        memcpy(forged, good, (size_t)bytes);
        memcpy(forged + place + row[i].offset, &row[i].value, 8);
        ckpt_spill(path, forged, bytes);
        free(forged);
        ckpt_reseal(checkpoint);
        const char *why = ckpt_verdict(folder, "step-00000005");
        snprintf(what, sizeof what, "row %zu", i);
        expect_contains(t, what, why ? why : "(taken for good)", row[i].why);
    }
    // a range of as many elements instead of the columns
    ShardRun range = *run;
    range.numel = range.stride = run->numel * run->count;
    range.count = 1;
    memcpy(good + place, &range, sizeof range);
    ckpt_spill(path, good, bytes);
    ckpt_reseal(checkpoint);
    const char *why = ckpt_verdict(folder, "step-00000005");
    expect_contains(t, "a range", why ? why : "(taken for good)", "tensor h.0.attn.c_proj.weight: elements from 12 on are missing or stored twice");
    free(good);
    ckpt_remove(folder);
}

// A bit flipped anywhere in the index of columns, or its end missing: the checkpoint is skipped, under another layout, too.
static void test_layouts_damage(Test *t) {
    CkptPath folder, path;
    CkptCaptured c;
    ckpt_folder_fast(folder);
    const TestLayout from = {{1, 2, 1, 2}, 3}, to = {{2, 1, 1, 2}, 0};
    layout_save(t, from, layout_model(true), folder, 6);
    ShardsRank *reader = layout_make(to, layout_model(true), 2, folder);
    int64_t bytes;
    char *good = ckpt_slurp(ckpt_join(path, folder, "step-00000006/shard-3.bin"), &bytes);
    const ShardHeader *h = (const ShardHeader *)good;
    int64_t first = SHARD_ALIGN + h->data_bytes, last = first + stored_shard_table_bytes(CHECKPOINT_VERSION, h->data_bytes, h->n_runs);
    for (int64_t at = first; at < last; at += 5) {
        good[at] ^= (char)(1 << at % 8);
        ckpt_spill(path, good, bytes);
        good[at] ^= (char)(1 << at % 8);
        const char *why = ckpt_verdict(folder, "step-00000006");
        expect_contains(t, "a flipped bit", why ? why : "(taken for good)", "shard-3.bin: the checksum of its table");
    }
    ckpt_spill(path, good, last - 8);
    const char *why = ckpt_verdict(folder, "step-00000006");
    expect_contains(t, "cut", why ? why : "(taken for good)", "shard-3.bin: has ");
    ckpt_spill(path, good, bytes);
    shards_expect_loaded(t, "mended", reader, false, 6, &c);
    layout_free(reader);
    free(good);
    ckpt_remove(folder);
}

// Files that version 1 wrote (two ranks, fake_model(1, 4, 3), step 5) load, under this layout and others.
static void test_layouts_version_1(Test *t) {
    static const TestLayout layout[] = {{{1, 1, 1, 1}, 0}, {{1, 2, 1, 2}, 3}, {{3, 1, 1, 1}, 0}};
    CkptCaptured c;
    for (int i = 0; i < 3; i++) {
        ShardsRank *reader = layout_make(layout[i], fake_model(1, 4, 3), 2, "tests/checkpoint_version_1");
        shards_expect_loaded(t, "version 1", reader, false, 5, &c);
        expect_equal_text(t, "printed", c.text, "");
        layout_free(reader);
    }
}

static const TestRow layouts_tests[] = {
    {"pairs", test_layouts_pairs}, {"untied", test_layouts_untied}, {"large", test_layouts_large}, {"bytes_read", test_layouts_bytes_read},
    {"cover", test_layouts_cover}, {"forged", test_layouts_forged}, {"damage", test_layouts_damage}, {"version_1", test_layouts_version_1}, {NULL, NULL},
};
