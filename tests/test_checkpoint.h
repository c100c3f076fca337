// test_checkpoint.h - what checkpoints hold, and which one is loaded: tests of checkpoint.cu, checkpoint_format.cu and runtime/crc32c.h.
//
// The run that is saved is a fake: arrays filled from (step, kind, row, index), so that a loaded checkpoint tells by its
// values which save it came from, and whether anything is missing.
#pragma once
#include "../checkpoint.cu"
#include "../zero.cu"
#include "dies.h"
#include <ftw.h>
#include <sys/mman.h>

// ---------------------------------------------------------------------------------------------------------------
// A fake run

enum { FAKE_KEEPS_MAX = 512 };
#define FAKE_CONFIG "{\n    \"gradient_clipping\": 1.5\n}"

typedef struct {
    ModelConfig model;
    ParamTable table;
    struct { int row, kind; int64_t first, n; float *kept; } keeps[FAKE_KEEPS_MAX]; // ranges that are being copied
    int n_keeps, copies;                 // so many of them, and at the last keep_end
    int n_kinds;
    float **value[CHECKPOINT_KINDS_MAX]; // [kind][row], unpadded
    int puts;                            // calls of put
    int poison_row, poison_kind;         // get gives poison in the middle of this tensor; row -1 = nowhere
    float poison;
    int rank, world;                     // of the ranks that save it together; 0 and 1 unless said otherwise
    bool needs_owned;                    // loads what it owns; otherwise everything, as every rank does at stage 0
    Zero *placed;                        // by whose rules it owns and needs, in a layout of several axes (test_layouts.h); or null
    TrainingState state;
    const char *loaded_config;           // as it came with what was loaded last
    CheckpointTensors tensors;
} FakeRun;

// n values of a rank's part of a row, from `first` on, out of the whole tensor, or into it.
static void fake_copy(const FakeRun *f, int row, int64_t first, int64_t n, float *whole, float *part, bool out) {
    ParamRun run[PARAM_RUNS_MAX];
    int n_runs = param_runs(&f->table.row[row], f->table.tp_rank, first, first + n, run);
    for (int i = 0; i < n_runs; i++)
        for (int64_t k = 0; k < run[i].count; k++) {
            float *there = whole + run[i].global_offset + k * run[i].stride, *here = part + run[i].local_first - first + k * run[i].numel;
            memcpy(out ? here : there, out ? there : here, (size_t)run[i].numel * 4);
        }
}

static void fake_get(void *ctx, int row, int kind, int64_t first, int64_t n, float *values) {
    FakeRun *f = (FakeRun *)ctx;
    int64_t poisoned = param_numel(&f->table.row[row]) / 2;
    fake_copy(f, row, first, n, f->value[kind][row], values, true);
    if (row == f->poison_row && kind == f->poison_kind && poisoned >= first && poisoned < first + n) values[poisoned - first] = f->poison;
}

static void fake_put(void *ctx, int row, int kind, int64_t first, int64_t n, const float *values) {
    FakeRun *f = (FakeRun *)ctx;
    fake_copy(f, row, first, n, f->value[kind][row], (float *)values, false);
    f->puts++;
}

// The row that begins where another one ends in its unit's buffer.
static int fake_row_behind(const FakeRun *f, int row) {
    const ParamDesc *r = &f->table.row[row];
    for (int i = 0; i < f->table.n_rows; i++)
        if (f->table.row[i].unit == r->unit && f->table.row[i].numel && f->table.row[i].offset == r->offset + param_local_numel(&f->table, r)) return i;
    CHECK(false, "nothing follows %s", r->name);
    return -1;
}

// A copy that is complete at keep_end only.
static void fake_keep(void *ctx, int row, int kind, int64_t first, int64_t n, void *kept) {
    FakeRun *f = (FakeRun *)ctx;
    CHECK(f->n_keeps < FAKE_KEEPS_MAX, "too many ranges to keep");
    f->keeps[f->n_keeps++] = {row, kind, first, n, (float *)kept};
}

static void fake_keep_end(void *ctx) {
    FakeRun *f = (FakeRun *)ctx;
    f->copies = f->n_keeps;
    for (int i = 0; i < f->n_keeps; i++) {
        int64_t first = f->keeps[i].first, done = 0, n;
        for (int row = f->keeps[i].row;; row = fake_row_behind(f, row), first = 0) {
            n = min_i64(f->keeps[i].n - done, param_local_numel(&f->table, &f->table.row[row]) - first);
            fake_get(f, row, f->keeps[i].kind, first, n, f->keeps[i].kept + done);
            done += n;
            if (done == f->keeps[i].n) break;
        }
    }
    f->n_keeps = 0;
}

static void fake_kept_get(void *ctx, int row, int kind, int64_t n, const void *kept, int64_t from, int64_t count, float *values) {
    (void)ctx; (void)row; (void)kind;
    CHECK(from >= 0 && from + count <= n, "%" PRId64 " of %" PRId64 " values from %" PRId64, count, n, from);
    memcpy(values, (const float *)kept + from, (size_t)count * 4);
}

// Rank r of N owns the r-th N-th of each row, counted from another rank for each: some ranges are empty, some rows are one rank's.
static void fake_owned(void *ctx, int row, int64_t *first, int64_t *last) {
    const FakeRun *f = (const FakeRun *)ctx;
    if (f->placed) { zero_row_owned(f->placed, &f->table.row[row], first, last); return; }
    int64_t numel = param_numel(&f->table.row[row]), part = (f->rank + row) % f->world;
    *first = numel * part / f->world;
    *last = numel * (part + 1) / f->world;
}

static void fake_needed(void *ctx, int row, int64_t *first, int64_t *last) {
    const FakeRun *f = (const FakeRun *)ctx;
    if (f->placed) { zero_row_range(f->placed, &f->table.row[row], first, last); return; }
    if (f->needs_owned) { fake_owned(ctx, row, first, last); return; }
    *first = 0;
    *last = param_numel(&f->table.row[row]);
}

static float fake_value(int64_t step, int kind, int row, int64_t i) {
    uint32_t bits = (uint32_t)rng_bits((uint64_t)step, (uint64_t)(kind * 1000 + row), (uint64_t)i);
    if ((bits & 0x7f800000u) == 0x7f800000u) bits &= ~0x40000000u; // any finite value, subnormal and -0 too
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

static void fake_fill(FakeRun *f, int64_t step) {
    for (int k = 0; k < f->n_kinds; k++)
        for (int row = 0; row < f->table.n_rows; row++)
            for (int64_t i = 0; f->table.row[row].tied_to < 0 && i < param_numel(&f->table.row[row]); i++)
                f->value[k][row][i] = fake_value(step, k, row, i);
    TrainingState s = {step, step - 1, step * 1000, 1, 65536.0 / 3.0, step + 7, -1, 2, 0, 0xfedcba9876543210ull, 0x8000000000000001ull,
                       step * 8, FAKE_CONFIG, 1};
    f->state = s;
}

static ModelConfig fake_model(int64_t L, int64_t C, int64_t V) {
    ModelConfig m;
    memset(&m, 0, sizeof m);
    m.n_layer = L; m.n_head = 2; m.n_embd = C; m.n_positions = 12; m.vocab_size = V; m.n_inner = 4 * C;
    m.layer_norm_epsilon = 1e-5;
    m.tie_word_embeddings = true;
    return m;
}

static const char *const fake_kind_names[CHECKPOINT_KINDS_MAX] = {"master", "exp_avg", "exp_avg_sq", "spare"};

static FakeRun *fake_make_part(ModelConfig m, ModelPart part, int n_kinds, int64_t step) {
    FakeRun *f = (FakeRun *)host_alloc(sizeof *f);
    f->model = m;
    f->n_kinds = n_kinds;
    f->poison_row = -1;
    f->world = 1;
    model_build_table(&f->table, &f->model, part);
    for (int k = 0; k < n_kinds; k++) {
        f->value[k] = (float **)host_alloc(sizeof(float *) * (size_t)f->table.n_rows);
        for (int row = 0; row < f->table.n_rows; row++) f->value[k][row] = (float *)host_alloc((size_t)param_numel(&f->table.row[row]) * 4);
    }
    CheckpointTensors t = {&f->table, &f->model, n_kinds, {fake_kind_names[0], fake_kind_names[1], fake_kind_names[2], fake_kind_names[3]},
                           f, fake_owned, fake_needed, fake_get, fake_put, fake_keep, fake_keep_end, fake_kept_get};
    f->tensors = t;
    fake_fill(f, step);
    return f;
}

static FakeRun *fake_make(ModelConfig m, int n_kinds, int64_t step) { return fake_make_part(m, model_whole, n_kinds, step); }

static void fake_free(FakeRun *f) {
    for (int k = 0; k < f->n_kinds; k++) {
        for (int row = 0; row < f->table.n_rows; row++) free(f->value[k][row]);
        free(f->value[k]);
    }
    table_free(&f->table);
    free((char *)f->loaded_config);
    free(f);
}

static bool fake_load(FakeRun *f, const CheckpointPeers *p, const char *folder, const char *which, char *name, size_t room) {
    if (!checkpoint_load(p, folder, which, &f->state, &f->tensors, name, room)) return false;
    free((char *)f->loaded_config);
    f->loaded_config = f->state.config;
    return true;
}

// Whether the run holds exactly what fake_fill(step) makes. Compares every value and every field of the state.
static bool fake_holds(Test *t, const FakeRun *f, int64_t step) {
    bool same = true;
    for (int k = 0; k < f->n_kinds; k++)
        for (int row = 0; row < f->table.n_rows; row++)
            for (int64_t i = 0; f->table.row[row].tied_to < 0 && i < param_numel(&f->table.row[row]); i++) {
                float want = fake_value(step, k, row, i);
                same &= memcmp(&want, &f->value[k][row][i], 4) == 0;
                t->compared++;
            }
    const TrainingState *s = &f->state;
    return same && s->step == step && s->applied_updates == step - 1 && s->tokens == step * 1000 && s->skipped == 1 &&
           s->loss_scale == 65536.0 / 3.0 && s->scaler_iteration == step + 7 &&
           s->scaler_last_overflow == -1 && s->scaler_hysteresis_left == 2 && s->consecutive_skipped == 0 && s->seed == 0xfedcba9876543210ull && s->data_fingerprint == 0x8000000000000001ull &&
           s->data_samples == step * 8 && s->config_ranks == 1 && s->config && strcmp(s->config, FAKE_CONFIG) == 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Folders, files, and what is printed

typedef char CkptPath[512];

static void ckpt_folder(CkptPath path) {
    const char *tmp = getenv("TMPDIR");
    snprintf(path, sizeof(CkptPath), "%.400s/test_checkpoint_XXXXXX", tmp && tmp[0] ? tmp : "/tmp");
    CHECK(mkdtemp(path), "no temporary folder at %s: %s", path, strerror(errno));
}

// The same for tests of hundreds of saves, in memory where that can be had: a fsync costs milliseconds on a disk.
static void ckpt_folder_fast(CkptPath path) {
    snprintf(path, sizeof(CkptPath), "/dev/shm/test_checkpoint_XXXXXX");
    if (!mkdtemp(path)) ckpt_folder(path);
}

static int ckpt_remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw) {
    (void)st; (void)type; (void)ftw;
    return remove(path);
}
static void ckpt_remove(const char *path) { nftw(path, ckpt_remove_entry, 16, FTW_DEPTH | FTW_PHYS); }

static const char *ckpt_join(CkptPath dst, const char *a, const char *b) {
    int n = snprintf(dst, sizeof(CkptPath), "%s/%s", a, b);
    CHECK(n < (int)sizeof(CkptPath), "path too long");
    return dst;
}

static char *ckpt_slurp(const char *path, int64_t *bytes) {
    char why[256];
    char *text = file_read_all(path, false, (int64_t)1 << 30, bytes, why, sizeof why);
    CHECK(text, "%s: %s", path, why);
    return text;
}

static void ckpt_spill(const char *path, const void *data, int64_t bytes) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    CHECK(fd >= 0 && file_write_all(fd, data, bytes), "%s: %s", path, strerror(errno));
    close(fd);
}

static bool ckpt_exists(const char *folder, const char *name) {
    CkptPath path;
    struct stat st;
    return lstat(ckpt_join(path, folder, name), &st) == 0;
}

static void ckpt_count_visit(void *ctx, const char *name) { (void)name; ++*(int *)ctx; }
static void ckpt_hidden_visit(void *ctx, const char *name) { *(int *)ctx += name[0] == '.' && strcmp(name, ".lock") != 0; }
static int ckpt_count(const char *folder, void (*visit)(void *, const char *)) {
    int n = 0, fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(fd >= 0 && folder_each(fd, visit, &n), "%s: %s", folder, strerror(errno));
    close(fd);
    return n;
}

// stderr into a buffer, for notes: begin, do something, end.
typedef struct {
    int saved, file;
    char text[8192];
} CkptCaptured;

static void ckpt_capture_begin(CkptCaptured *c) {
    fflush(stderr);
    c->saved = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
    c->file = memfd_create("stderr", MFD_CLOEXEC);
    CHECK(c->saved >= 0 && c->file >= 0 && dup2(c->file, STDERR_FILENO) >= 0, "cannot capture stderr: %s", strerror(errno));
}

static const char *ckpt_capture_end(CkptCaptured *c) {
    fflush(stderr);
    dup2(c->saved, STDERR_FILENO);
    close(c->saved);
    ssize_t n = pread(c->file, c->text, sizeof c->text - 1, 0);
    c->text[n > 0 ? n : 0] = 0;
    close(c->file);
    return c->text;
}

// Saves fake steps into a folder, with a store of its own.
static void ckpt_save_steps(const char *folder, FakeRun *f, const int64_t *steps, int n) {
    CheckpointStore *s = checkpoint_open(&checkpoint_alone, folder, false);
    for (int i = 0; i < n; i++) {
        fake_fill(f, steps[i]);
        SaveResult r = checkpoint_save(s, &f->state, &f->tensors, 0, 0);
        CHECK(r.durable, "save of step %" PRId64 ": %s", steps[i], r.why);
    }
    checkpoint_close(s);
}

// The verdict on one checkpoint as checkpoint_load would reach it. Null = good, else the reason (static).
static const char *ckpt_verdict(const char *folder, const char *name) {
    static char why[400];
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    Checkpoint c;
    bool good = checkpoint_read(&c, fd, name) && values_check(&c, 0, 1);
    snprintf(why, sizeof why, "%s", c.why);
    checkpoint_free(&c);
    close(fd);
    return good ? NULL : why;
}

typedef struct {
    const char *folder, *which;
    FakeRun *run;
} CkptLoadCall;

static void ckpt_load_call(void *arg) {
    CkptLoadCall *l = (CkptLoadCall *)arg;
    char name[64];
    fake_load(l->run, &checkpoint_alone, l->folder, l->which, name, sizeof name);
    if (l->run->puts) _exit(99); // must not have reached the model before dying
}

// Loads quietly; returns the name, or "" when there was none. The result is static.
static const char *ckpt_load_quietly(const char *folder, const char *which, FakeRun *f, CkptCaptured *c) {
    static char name[64];
    ckpt_capture_begin(c);
    bool found = fake_load(f, &checkpoint_alone, folder, which, name, sizeof name);
    ckpt_capture_end(c);
    return found ? name : "";
}

// ---------------------------------------------------------------------------------------------------------------
// Checksums and round trips

static void test_checkpoint_crc32c(Test *t) {
    // Vectors of RFC 3720, appendix B.4, and the check value of the catalogue of CRCs.
    unsigned char zeros[32] = {0}, ones[32], up[32], down[32];
    memset(ones, 0xff, sizeof ones);
    for (int i = 0; i < 32; i++) { up[i] = (unsigned char)i; down[i] = (unsigned char)(31 - i); }
    static const unsigned char pdu[48] = {0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x14, 0, 0, 0, 0, 0, 0x04, 0, 0, 0, 0, 0x14,
                                          0, 0, 0, 0x18, 0x28, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0, 0, 0, 0};
    const struct { const void *p; size_t n; uint32_t want; } row[] = {
        {"", 0, 0}, {"123456789", 9, 0xe3069283u}, {zeros, 32, 0x8a9136aau}, {ones, 32, 0x62a8ab43u}, {up, 32, 0x46dd794eu}, {down, 32, 0x113fdb5cu}, {pdu, 48, 0xd9963a56u},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        expect_true(t, crc32c_extend(0, row[i].p, row[i].n) == row[i].want, "vector %zu", i);
        expect_true(t, crc32c_software(0, row[i].p, row[i].n) == row[i].want, "vector %zu in software", i);
    }
    // The two versions against each other, at lengths around the three chains' limit, at odd addresses, in two halves.
    enum { LARGEST = 3 * 4096 + 200 };
    unsigned char *b = (unsigned char *)host_alloc(LARGEST + 8);
    for (int i = 0; i < LARGEST + 8; i++) b[i] = (unsigned char)rng_bits(1, 2, (uint64_t)i);
    for (size_t n = 0; n <= LARGEST; n += n < 100 ? 1 : n > 12200 ? 3 : 97) {
        const unsigned char *p = b + n % 8;
        uint32_t whole = crc32c_software(12345, p, n), half = crc32c_extend(12345, p, n / 3);
        expect_true(t, crc32c_extend(12345, p, n) == whole, "%zu bytes", n);
        expect_true(t, crc32c_extend(half, p + n / 3, n - n / 3) == whole, "%zu bytes in two parts", n);
        expect_true(t, (crc32c_shift(half, n - n / 3) ^ crc32c_extend(0, p + n / 3, n - n / 3)) == whole, "%zu bytes joined", n);
    }
    free(b);
}

static void test_checkpoint_round_trip(Test *t) {
    // One model whose values fill several pieces and one that is smaller than a piece; all numbers of kinds.
    const struct { int64_t L, C, V; int kinds; } row[] = {{1, 8, 5, 1}, {2, 16, 37, 2}, {2, 16, 37, 4}, {2, 96, 211, 3}};
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        CkptPath folder, other, a, b;
        ckpt_folder(folder);
        ckpt_folder(other);
        ModelConfig m = fake_model(row[i].L, row[i].C, row[i].V);
        FakeRun *f = fake_make(m, row[i].kinds, 1), *g = fake_make(m, row[i].kinds, 99);
        const int64_t steps[] = {7};
        CheckpointStore *s = checkpoint_open(&checkpoint_alone, folder, false);
        fake_fill(f, 7);
        SaveResult r = checkpoint_save(s, &f->state, &f->tensors, 0, 0);
        checkpoint_close(s);
        expect_true(t, r.durable && r.why[0] == 0, "not durable: %s", r.why);
        expect_equal_text(t, "name", r.name, "step-00000007");
        char name[64];
        expect_true(t, fake_load(g, &checkpoint_alone, folder, "auto", name, sizeof name), "nothing found");
        expect_equal_text(t, "loaded name", name, "step-00000007");
        expect_true(t, fake_holds(t, g, 7), "values or state differ after loading");
        expect_equal_i64(t, "calls of put", g->puts, row[i].kinds * (g->table.n_rows - 1));
        // What was loaded, saved elsewhere, gives the same bytes.
        CheckpointStore *o = checkpoint_open(&checkpoint_alone, other, false);
        SaveResult again = checkpoint_save(o, &g->state, &g->tensors, 0, 0);
        checkpoint_close(o);
        expect_true(t, again.durable, "not durable: %s", again.why);
        int64_t bytes = 0;
        static const char *const files[] = {"step-00000007/shard-0.bin", "step-00000007/manifest.json", "latest"};
        for (int k = 0; k < 3; k++) {
            int64_t n, n2;
            char *x = ckpt_slurp(ckpt_join(a, folder, files[k]), &n), *y = ckpt_slurp(ckpt_join(b, other, files[k]), &n2);
            expect_equal_i64(t, files[k], n2, n);
            if (n == n2) expect_same_bytes(t, files[k], x, y, n);
            if (k < 2) bytes += n;
            else expect_equal_text(t, "latest", x, "step-00000007\n");
            free(x);
            free(y);
        }
        expect_equal_i64(t, "bytes reported", r.bytes, bytes);
        expect_true(t, r.bytes <= checkpoint_bytes(&f->tensors, 1), "%" PRId64 " bytes written, %" PRId64 " foreseen", r.bytes,
                    checkpoint_bytes(&f->tensors, 1));
        // The same step again, with other values: replaced in one step, nothing left over.
        ckpt_save_steps(other, f, steps, 1);
        fake_fill(f, 8);
        f->state.step = 7;
        o = checkpoint_open(&checkpoint_alone, other, false);
        again = checkpoint_save(o, &f->state, &f->tensors, 0, 0);
        checkpoint_close(o);
        expect_true(t, again.durable, "not durable: %s", again.why);
        expect_true(t, fake_load(g, &checkpoint_alone, other, "step-00000007", name, sizeof name) && g->state.tokens == 8000,
                    "the old state of step 7 is still there");
        expect_equal_i64(t, "entries", ckpt_count(other, ckpt_count_visit), 3); // .lock, latest, step-00000007
        fake_free(f);
        fake_free(g);
        ckpt_remove(folder);
        ckpt_remove(other);
    }
}

// The manifest must be JSON for other programs too, with numbers that lose nothing.
static void test_checkpoint_manifest_text(Test *t) {
    CkptPath folder, path;
    ckpt_folder(folder);
    FakeRun *f = fake_make(fake_model(1, 8, 5), 2, 1);
    const int64_t steps[] = {123456789};
    ckpt_save_steps(folder, f, steps, 1);
    int64_t bytes;
    char *text = ckpt_slurp(ckpt_join(path, folder, "step-123456789/manifest.json"), &bytes);
    Json j;
    bool good = json_parse(&j, text, bytes, JSON_STRICT);
    expect_true(t, good, "line %d: %s", j.line, j.error);
    if (good) {
        int tensors = json_find(&j, 0, "tensors"), state = json_find(&j, 0, "state");
        expect_equal_i64(t, "tensors", j.node[tensors].count, f->table.n_rows - 1);
        expect_equal_text(t, "first tensor", json_text(&j, json_find(&j, j.node[tensors].first, "name")), "wte.weight");
        expect_equal_text(t, "seed", json_text(&j, json_find(&j, state, "seed")), "fedcba9876543210");
        expect_equal_text(t, "step", json_text(&j, json_find(&j, state, "step")), "123456789");
        json_free(&j);
    }
    free(text);
    fake_free(f);
    ckpt_remove(folder);
}

// ---------------------------------------------------------------------------------------------------------------
// Damage

// Which tensors a message about a damaged piece names, as places in file order; -1 = none found.
static void ckpt_named(const FakeRun *f, const char *why, int place[2]) {
    place[0] = place[1] = -1;
    int n = 0;
    for (int k = 0; k < f->n_kinds; k++)
        for (int row = 0; row < f->table.n_rows; row++) {
            if (f->table.row[row].tied_to >= 0) continue;
            char from[160], to[160];
            snprintf(from, sizeof from, ": %s of tensor %s to ", f->tensors.kind[k], f->table.row[row].name);
            snprintf(to, sizeof to, " to %s of tensor %s", f->tensors.kind[k], f->table.row[row].name);
            if (strstr(why, from)) place[0] = n;
            const char *last = strstr(why, to);
            if (last && last[strlen(to)] == 0) place[1] = n;
            n++;
        }
}

// Every bit of the manifest, of the header's used bytes and of the table's first runs; and thousands of places over the
// rest of the shard. Each flip must be found, and the message must name the file, and the tensors if it was in a value.
static void test_checkpoint_bit_flips(Test *t) {
    CkptPath folder, path;
    ckpt_folder_fast(folder);
    const int64_t steps[] = {5};
    FakeRun *f = fake_make(fake_model(1, 8, 21), 3, 1);
    ckpt_save_steps(folder, f, steps, 1);
    expect_true(t, ckpt_verdict(folder, "step-00000005") == NULL, "bad before any damage: %s", ckpt_verdict(folder, "step-00000005"));
    static const char *const files[] = {"manifest.json", "shard-0.bin"};
    int64_t data_bytes = stored_shard_plan(&f->tensors).data_bytes, missed = 0, misnamed = 0, flips = 0;
    for (int file = 0; file < 2; file++) {
        char name[64];
        snprintf(name, sizeof name, "step-00000005/%s", files[file]);
        int64_t bytes;
        char *whole = ckpt_slurp(ckpt_join(path, folder, name), &bytes);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        // manifest: every bit. Shard: every bit of the first 80 bytes and of the table's first 128, else every 29th.
        for (int64_t bit = 0; bit < 8 * bytes; bit++) {
            int64_t at = bit / 8, table = SHARD_ALIGN + data_bytes;
            bool every = file == 0 || at < 80 || (at >= SHARD_ALIGN - 4 && at < SHARD_ALIGN) || (at >= table && at < table + 128) || bit % 29 == 0;
            if (!every) continue;
            char byte = (char)(whole[at] ^ (1 << (bit & 7)));
            CHECK(pwrite(fd, &byte, 1, at) == 1, "pwrite: %s", strerror(errno));
            const char *why = ckpt_verdict(folder, "step-00000005");
            flips++;
            t->compared++;
            if (!why) { missed++; test_fail(t, "%s: flip of bit %" PRId64 " not found", files[file], bit); }
            else if (!strstr(why, files[file])) { misnamed++; test_fail(t, "%s: flip of bit %" PRId64 ": \"%s\" does not name the file",
                                                                        files[file], bit, why); }
            else if (file == 1 && at >= SHARD_ALIGN && at < table) {
                int place[2];
                ckpt_named(f, why, place);
                // this model's values are one piece, so the damage lies between its first tensor and its last
                if (place[0] != 0 || place[1] != f->n_kinds * (f->table.n_rows - 1) - 1)
                    test_fail(t, "flip of bit %" PRId64 ": \"%s\" does not name the tensors", bit, why);
            }
            CHECK(pwrite(fd, whole + at, 1, at) == 1, "pwrite: %s", strerror(errno));
        }
        close(fd);
        free(whole);
    }
    expect_true(t, flips > 10000 && missed == 0 && misnamed == 0, "%" PRId64 " flips, %" PRId64 " missed, %" PRId64 " misnamed", flips,
                missed, misnamed);
    expect_true(t, ckpt_verdict(folder, "step-00000005") == NULL, "bad after the damage was undone");
    fake_free(f);
    ckpt_remove(folder);
}

// In a shard of several pieces the message's two tensors enclose the damaged one, and neither is outside the piece.
static void test_checkpoint_flips_name_tensors(Test *t) {
    CkptPath folder, path;
    ckpt_folder(folder);
    const int64_t steps[] = {5};
    FakeRun *f = fake_make(fake_model(2, 96, 211), 3, 1);
    ckpt_save_steps(folder, f, steps, 1);
    int fd = open(ckpt_join(path, folder, "step-00000005/shard-0.bin"), O_RDWR | O_CLOEXEC);
    int64_t data_bytes = stored_shard_plan(&f->tensors).data_bytes;
    expect_true(t, data_bytes > 2 * PIECE_BYTES, "the model is too small for this test");
    for (int i = 0; i < 60; i++) {
        int64_t at = (int64_t)(rng_bits(3, 4, (uint64_t)i) % (uint64_t)data_bytes), piece = at / PIECE_BYTES, first = -1, damaged = -1, last = -1, n = 0, place_bytes = 0;
        for (int k = 0; k < f->n_kinds; k++)
            for (int row = 0; row < f->table.n_rows; row++) {
                if (f->table.row[row].tied_to >= 0) continue;
                int64_t end = place_bytes + 4 * param_numel(&f->table.row[row]);
                if (first < 0 && end > piece * PIECE_BYTES) first = n;
                if (at >= place_bytes && at < end) damaged = n;
                if (place_bytes < min_i64(data_bytes, (piece + 1) * PIECE_BYTES)) last = n;
                place_bytes = end;
                n++;
            }
        unsigned char byte, flipped;
        CHECK(pread(fd, &byte, 1, SHARD_ALIGN + at) == 1, "pread");
        flipped = byte ^ 0x10;
        CHECK(pwrite(fd, &flipped, 1, SHARD_ALIGN + at) == 1, "pwrite");
        const char *why = ckpt_verdict(folder, "step-00000005");
        int place[2] = {-1, -1};
        if (why) ckpt_named(f, why, place);
        expect_true(t, why && place[0] == first && place[1] == last && first <= damaged && damaged <= last,
                    "flip at %" PRId64 ": \"%s\" names %d and %d, expected %" PRId64 " and %" PRId64, at, why ? why : "not found", place[0], place[1], first, last);
        CHECK(pwrite(fd, &byte, 1, SHARD_ALIGN + at) == 1, "pwrite");
    }
    close(fd);
    fake_free(f);
    ckpt_remove(folder);
}

typedef enum { CKPT_HARM_CUT_1, CKPT_HARM_CUT_HALF, CKPT_HARM_CUT_ALL, CKPT_HARM_GROW_1, CKPT_HARM_GROW_BLOCK, CKPT_HARM_REMOVE,
              CKPT_HARM_LINK, CKPT_HARM_FIFO, CKPT_HARM_FOLDER, CKPT_HARM_ZEROS, CKPT_HARM_COUNT } CkptHarm;

static void ckpt_harm(const char *path, CkptHarm harm) {
    int64_t bytes;
    CkptPath aside;
    char *whole = ckpt_slurp(path, &bytes);
    if (harm <= CKPT_HARM_GROW_BLOCK) {
        int64_t to = harm == CKPT_HARM_CUT_1 ? bytes - 1 : harm == CKPT_HARM_CUT_HALF ? bytes / 2 : harm == CKPT_HARM_CUT_ALL ? 0 : harm == CKPT_HARM_GROW_1 ? bytes + 1 : bytes + SHARD_ALIGN;
        CHECK(truncate(path, to) == 0, "truncate");
    } else if (harm == CKPT_HARM_ZEROS) {
        memset(whole, 0, (size_t)bytes);
        ckpt_spill(path, whole, bytes);
    } else if (harm == CKPT_HARM_LINK) { // even to a perfect file
        snprintf(aside, sizeof aside, "%.500s.x", path);
        CHECK(rename(path, aside) == 0 && symlink(strrchr(aside, '/') + 1, path) == 0, "symlink");
    } else {
        CHECK(unlink(path) == 0, "unlink");
        if (harm == CKPT_HARM_FIFO) CHECK(mkfifo(path, 0666) == 0, "mkfifo");
        if (harm == CKPT_HARM_FOLDER) CHECK(mkdir(path, 0777) == 0, "mkdir");
    }
    free(whole);
}

// Each kind of harm to each file of the newest checkpoint: "auto" says so and takes the one before; asked for by name, it dies.
static void test_checkpoint_damaged_files(Test *t) {
    static const char *const files[] = {"manifest.json", "shard-0.bin"};
    const int64_t steps[] = {10, 20};
    FakeRun *f = fake_make(fake_model(1, 8, 5), 2, 1);
    for (int file = 0; file < 2; file++)
        for (int harm = 0; harm < CKPT_HARM_COUNT; harm++) {
            CkptPath folder, path, step;
            CkptCaptured c;
            ckpt_folder_fast(folder);
            ckpt_save_steps(folder, f, steps, 2);
            ckpt_harm(ckpt_join(path, ckpt_join(step, folder, "step-00000020"), files[file]), (CkptHarm)harm);
            const char *name = ckpt_load_quietly(folder, "auto", f, &c);
            expect_equal_text(t, "chosen", name, "step-00000010");
            expect_true(t, fake_holds(t, f, 10), "values after %d", harm);
            expect_contains(t, "note", c.text, "step-00000020 is skipped");
            expect_contains(t, "note", c.text, files[file]);
            f->puts = 0;
            CkptLoadCall call = {folder, "step-00000020", f};
            const char *const parts[] = {"step-00000020", files[file]};
            expect_dies_parts(t, EXIT_CHECKPOINT, parts, 2, ckpt_load_call, &call);
            ckpt_remove(folder);
        }
    fake_free(f);
}

static void test_checkpoint_choice(Test *t) {
    CkptPath folder, path, sub;
    CkptCaptured c;
    FakeRun *f = fake_make(fake_model(1, 8, 5), 2, 1);
    ckpt_folder(folder);
    // nothing at all: fresh start, and only then
    expect_equal_text(t, "empty folder", ckpt_load_quietly(folder, "auto", f, &c), "");
    expect_equal_text(t, "missing folder", ckpt_load_quietly(ckpt_join(path, folder, "no/such"), "auto", f, &c), "");
    CkptLoadCall missing = {folder, "step-00000001", f};
    const char *const none[] = {"is missing", "none"};
    expect_dies_parts(t, EXIT_CHECKPOINT, none, 2, ckpt_load_call, &missing);
    // By step, not by name, time or what `latest` says; nothing else in the folder disturbs.
    const int64_t steps[] = {100000000, 3, 99999999, 20};
    ckpt_save_steps(folder, f, steps, 4);
    static const char *const foreign[] = {"notes.txt", "step-", "step-12", "step-000000020", "step-00000020x", "step--0000020",
                                          "step-99999999999999999999", "step-best", ".hidden"};
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) ckpt_spill(ckpt_join(path, folder, foreign[i]), "x", 1);
    CHECK(mkdir(ckpt_join(path, folder, ".tmp-step-00000777-0"), 0777) == 0, "mkdir");
    f->puts = 0;
    expect_equal_text(t, "newest", ckpt_load_quietly(folder, "auto", f, &c), "step-100000000");
    expect_true(t, fake_holds(t, f, 100000000) && c.text[0] == 0, "wrong values, or an unasked note: %s", c.text);
    expect_equal_text(t, "by name", ckpt_load_quietly(folder, "step-00000003", f, &c), "step-00000003");
    expect_true(t, fake_holds(t, f, 3), "values of step 3");
    const char *const there[] = {"step-00000004", "is missing", "step-100000000, step-99999999, step-00000020, step-00000003"};
    CkptLoadCall wrong = {folder, "step-00000004", f};
    f->puts = 0;
    expect_dies_parts(t, EXIT_CHECKPOINT, there, 3, ckpt_load_call, &wrong);
    // A copy under another name is one as well; a copy under another step's name is not.
    CHECK(rename(ckpt_join(path, folder, "step-00000003"), ckpt_join(sub, folder, "best_so.far")) == 0, "rename");
    expect_equal_text(t, "renamed", ckpt_load_quietly(folder, "best_so.far", f, &c), "best_so.far");
    expect_true(t, fake_holds(t, f, 3), "values of step 3");
    CHECK(rename(sub, ckpt_join(path, folder, "step-00000555")) == 0, "rename");
    expect_contains(t, "verdict", ckpt_verdict(folder, "step-00000555"), "not of the step in the folder's name");
    // The folder of a checkpoint itself; a foreign file in it gets a word.
    ckpt_join(path, folder, "step-00000020");
    expect_equal_text(t, "itself", ckpt_load_quietly(path, "auto", f, &c), "step-00000020");
    ckpt_spill(ckpt_join(sub, path, "my\x1bnotes"), "x", 1);
    CkptPath slashed;
    snprintf(slashed, sizeof slashed, "%.500s///", path);
    expect_equal_text(t, "itself, with slashes", ckpt_load_quietly(slashed, "auto", f, &c), "step-00000020");
    expect_contains(t, "note", c.text, "1 foreign files ignored, such as my\\x1bnotes");
    // Names that lead out of the folder or hide in it.
    static const char *const tags[] = {"", ".", "..", "../x", "/tmp", "a/b", ".tmp-step-00000777-0", "a b", "a\n", "\xff", "step-00000020/",
                                       "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"};
    f->puts = 0;
    for (size_t i = 0; i < sizeof tags / sizeof *tags; i++) {
        CkptLoadCall call = {folder, tags[i], f};
        expect_dies(t, EXIT_CHECKPOINT, "is no name of a checkpoint", ckpt_load_call, &call);
    }
    // A step that is a link, a file, an empty folder: named and skipped.
    CHECK(symlink("step-00000020", ckpt_join(path, folder, "step-200000000")) == 0, "symlink");
    ckpt_spill(ckpt_join(path, folder, "step-200000001"), "x", 1);
    CHECK(mkdir(ckpt_join(path, folder, "step-200000002"), 0777) == 0, "mkdir");
    expect_equal_text(t, "past links", ckpt_load_quietly(folder, "auto", f, &c), "step-100000000");
    expect_contains(t, "note", c.text, "step-200000000 is skipped: is ");
    expect_contains(t, "note", c.text, "step-200000001 is skipped: is not a folder");
    expect_contains(t, "note", c.text, "step-200000002 is skipped: manifest.json: is missing");
    ckpt_remove(folder);
    fake_free(f);
}

// `latest` is a hint: whatever stands in it, the newest good checkpoint is taken, and the folder is not left.
static void test_checkpoint_latest(Test *t) {
    FakeRun *f = fake_make(fake_model(1, 8, 5), 1, 1);
    const int64_t steps[] = {1, 2};
    static char zeros[1 << 20];
    const struct { const char *text; int64_t bytes; const char *word; } row[] = {
        {NULL, 0, ""}, {"", 0, ""}, {"step-00000001\n", 14, ""}, {"step-00000009\n", 14, "latest names step-00000009, which is not there"},
        {"../../x", 7, ""}, {"/etc/passwd\n", 12, ""}, {"\n\n", 2, ""}, {zeros, sizeof zeros, ""}, {"\x1b[31m", 5, ""},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        CkptPath folder, path;
        CkptCaptured c;
        ckpt_folder_fast(folder);
        ckpt_save_steps(folder, f, steps, 2);
        ckpt_join(path, folder, "latest");
        if (row[i].text) ckpt_spill(path, row[i].text, row[i].bytes);
        else unlink(path);
        expect_equal_text(t, "chosen", ckpt_load_quietly(folder, "auto", f, &c), "step-00000002");
        if (row[i].word[0]) expect_contains(t, "note", c.text, row[i].word);
        else expect_equal_text(t, "notes", c.text, "");
        // a folder in its place costs a warning, not the save
        unlink(path);
        CHECK(mkdir(path, 0777) == 0, "mkdir");
        ckpt_capture_begin(&c);
        CheckpointStore *s = checkpoint_open(&checkpoint_alone, folder, false);
        fake_fill(f, 3);
        SaveResult r = checkpoint_save(s, &f->state, &f->tensors, 0, 0);
        checkpoint_close(s);
        ckpt_capture_end(&c);
        expect_true(t, r.durable && strstr(c.text, "latest could not be updated"), "durable %d, said %s", r.durable, c.text);
        ckpt_remove(folder);
    }
    fake_free(f);
}

static void test_checkpoint_all_broken(Test *t) {
    CkptPath folder, path;
    ckpt_folder(folder);
    FakeRun *f = fake_make(fake_model(1, 8, 5), 1, 1);
    const int64_t steps[] = {1, 2, 3};
    static const char *const files[] = {"step-00000001/manifest.json", "step-00000002/shard-0.bin", "step-00000003/manifest.json"};
    ckpt_save_steps(folder, f, steps, 3);
    for (int i = 0; i < 3; i++) ckpt_harm(ckpt_join(path, folder, files[i]), i == 1 ? CKPT_HARM_ZEROS : CKPT_HARM_CUT_1);
    CkptLoadCall call = {folder, "auto", f};
    const char *const parts[] = {"none of its 3 checkpoints", "step-00000003: manifest.json"};
    expect_dies_parts(t, EXIT_CHECKPOINT, parts, 2, ckpt_load_call, &call);
    ckpt_remove(folder);
    fake_free(f);
}

// ---------------------------------------------------------------------------------------------------------------
// Forged files: all checksums right, contents impossible

// Makes all checksums of a checkpoint right again, from the shard as it is. The manifest's text may be edited between.
static void ckpt_reseal(const char *checkpoint) {
    CkptPath path;
    int64_t bytes;
    unsigned char *b = (unsigned char *)ckpt_slurp(ckpt_join(path, checkpoint, "shard-0.bin"), &bytes);
    ShardHeader *h = (ShardHeader *)b;
    bool sane = h->data_bytes >= 0 && h->data_bytes <= bytes - SHARD_ALIGN && h->n_runs >= 0 && h->n_runs < bytes / (int64_t)sizeof(ShardRun);
    int64_t table = sane ? SHARD_ALIGN + h->data_bytes : 0, crcs = sane ? table + h->n_runs * (int64_t)sizeof(ShardRun) : 0;
    sane = sane && crcs + stored_shard_pieces(h->data_bytes) * 4 <= bytes;
    for (int64_t i = 0; sane && i < stored_shard_pieces(h->data_bytes); i++) {
        int64_t start = i * PIECE_BYTES, length = min_i64(PIECE_BYTES, h->data_bytes - start);
        uint32_t crc = crc32c_software(0, b + SHARD_ALIGN + start, (size_t)length);
        memcpy(b + crcs + 4 * i, &crc, 4);
    }
    h->crc = crc32c_software(0, b, SHARD_ALIGN - 4);
    ckpt_spill(path, b, bytes);
    uint32_t table_crc = sane ? crc32c_software(0, b + table, (size_t)(bytes - table)) : 0;
    free(b);
    char *m = ckpt_slurp(ckpt_join(path, checkpoint, "manifest.json"), &bytes), hex[16];
    char *at = strstr(m, "table_crc32c\": \"");
    snprintf(hex, sizeof hex, "%08x", table_crc);
    if (at) memcpy(at + 16, hex, 8);
    int64_t last = bytes - 22; // "crc32c": "01234567"} and a newline
    snprintf(hex, sizeof hex, "%08x", crc32c_software(0, m, (size_t)last));
    memcpy(m + last + 11, hex, 8);
    ckpt_spill(path, m, bytes);
    free(m);
}

// Replaces the first `from` in the manifest, whose last line is at the end of the text.
static void ckpt_edit_manifest(const char *checkpoint, const char *from, const char *to) {
    CkptPath path;
    int64_t bytes;
    char *m = ckpt_slurp(ckpt_join(path, checkpoint, "manifest.json"), &bytes), *at = strstr(m, from);
    CHECK(at, "no %s in the manifest", from);
    int fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);
    CHECK(file_write_all(fd, m, at - m) && file_write_all(fd, to, (int64_t)strlen(to)) &&
          file_write_all(fd, at + strlen(from), m + bytes - at - (int64_t)strlen(from)), "write");
    close(fd);
    free(m);
}

static void test_checkpoint_forged_manifest(Test *t) {
    static const struct { const char *from, *to, *why; } row[] = {
        {"\"version\": 2", "\"version\": 0", "version 0; this build reads"},
        {"\"version\": 2", "\"version\": 3", "version 3; this build reads"},
        {"\"version\": 2", "\"version\": 1", "shard-0.bin: version 2; the manifest's is 1"},
        {"\"version\": 2", "\"version\": 4294967297", "version 4294967297; this build reads"},
        {"\"version\": 2", "\"version\": -1", "must be a whole number"},
        {"train_gpt checkpoint", "another program", "format \"another program\""},
        {"\"step\": 5", "\"step\": 6", "not of the step in the folder's name"},
        {"\"step\": 5", "\"step\": -5", "\"step\" must be a whole number"},
        {"\"step\": 5", "\"step\": 5.5", "\"step\" must be a whole number"},
        {"\"step\": 5", "\"step\": 99999999999999999999", "\"step\" must be a whole number"},
        {"\"step\": 5", "\"step\": \"5\"", "\"step\" must be a number"},
        {"\"step\": 5", "\"stop\": 5", "\"step\" is missing"},
        {"\"step\": 5", "\"step\": 5, \"step\": 6", "a key occurs twice"},
        {"\"step\": 5", "\"step\": 5, \"st\\u0065p\": 6", "a key occurs twice"},
        {"\"step\": 5", "\"step\": NaN", "expected a value"},
        {"\"loss_scale\": ", "\"loss_scale\": 1e999, \"x\": ", "must be finite"},
        {"fedcba9876543210", "fedcba987654321", "full length"},
        {"fedcba9876543210", "fedcba98765432100", "full length"},
        {"fedcba9876543210", "FEDCBA9876543210", "full length"},
        {"\"config\": {", "\"config\": [], \"x\": {", "\"config\" must be an object"},
        {"1.5\n}", "1.5, \"x\": \"\x7f\"\n}", "\"config\" holds a control character"},
        {"1.5\n}", "1.5, \"x\": \"\xc2\x9b\"\n}", "\"config\" holds a control character"},
        {"1.5\n}", "1.5, \"gradient_clipping\": 1\n}", "a key occurs twice"},
        {"\"config_ranks\": 1", "\"config_ranks\": 0", "\"config_ranks\" must be a whole number"},
        {"\"world\": 1", "\"world\": 2", "1 shards of 2 ranks"},
        {"\"world\": 1", "\"world\": 0", "\"world\" must be"},
        {"shard-0.bin", "../shard-0.bin", "letters, digits"},
        {"shard-0.bin", "/etc/passwd", "letters, digits"},
        {"shard-0.bin", "shard-1.bin", "expected \"shard-0.bin\""},
        {"\"bytes\": ", "\"bytes\": 1", "but the manifest says 1"},
        {"\"bytes\": ", "\"bytes\": -1", "\"bytes\" must be a whole number"},
        {"\"kinds\": [", "\"kinds\": [], \"x\": [", "0 kinds"},
        {"\"name\": \"master\"", "\"name\": \"exp_avg\"", "kind exp_avg is listed twice"},
        {"\"name\": \"master\"", "\"name\": \"mas\\u0000ter\"", "letters, digits"},
        {"\"name\": \"master\"", "\"name\": \"\\u001b[31m\"", "letters, digits"},
        {"fp32", "fp4", "this build reads fp32"},
        {"\"name\": \"wte.weight\"", "\"name\": \"wpe.weight\"", "tensor wpe.weight is listed twice"},
        {"\"name\": \"wte.weight\"", "\"name\": \"\"", "needs a name"},
        {"\"name\": \"wte.weight\"", "\"name\": \"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\"", "letters, digits"},
        {"\"shape\": [21, 8]", "\"shape\": []", "one or two dimensions"},
        {"\"shape\": [21, 8]", "\"shape\": [1, 21, 8]", "one or two dimensions"},
        {"\"shape\": [21, 8]", "\"shape\": [0, 8]", "\"shape\" must be a whole number"},
        {"\"shape\": [21, 8]", "\"shape\": [4294967296, 4294967296]", "too many elements"},
        {"\"shape\": [21, 8]", "\"shape\": [9223372036854775807, 1]", "too many elements"},
        {"\"shape\": [21, 8]", "\"shape\": [22, 8]", "master of tensor wte.weight: elements from 168 on are missing"},
        {"\"shape\": [21, 8]", "\"shape\": [20, 8]", "is impossible"},
        {"\"shape\": [21, 8]", "\"shape\": [[21], 8]", "\"shape\" must be a whole number"},
        {"\"tensors\": [", "\"tensors\": {}, \"x\": [", "\"tensors\" must be a list"},
        {"{\n\"format\"", "[{\n\"format\"", "the text ends before"},
        {"{\n\"format\"", "{{\n\"format\"", "expected"},
    };
    const int64_t steps[] = {5};
    FakeRun *f = fake_make(fake_model(1, 8, 21), 2, 1);
    CkptPath folder, checkpoint, path;
    ckpt_folder_fast(folder);
    ckpt_save_steps(folder, f, steps, 1);
    int64_t bytes;
    char *good = ckpt_slurp(ckpt_join(path, ckpt_join(checkpoint, folder, "step-00000005"), "manifest.json"), &bytes);
    ckpt_reseal(checkpoint);
    expect_true(t, ckpt_verdict(folder, "step-00000005") == NULL, "resealing breaks it: %s", ckpt_verdict(folder, "step-00000005"));
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        ckpt_spill(path, good, bytes);
        ckpt_edit_manifest(checkpoint, row[i].from, row[i].to);
        if (strncmp(row[i].from, "\"bytes\": ", 9) == 0)
            ckpt_edit_manifest(checkpoint, row[i].to, strcmp(row[i].to,
                                                             "\"bytes\": 1") == 0 ? "\"bytes\": 1, \"x\": " : "\"bytes\": -1, \"x\": ");
        ckpt_reseal(checkpoint);
        const char *why = ckpt_verdict(folder, "step-00000005");
        expect_contains(t, row[i].to, why ? why : "(taken for good)", row[i].why);
    }
    free(good);
    fake_free(f);
    ckpt_remove(folder);
}

static void test_checkpoint_forged_shard(Test *t) {
    // A field of the shard is overwritten with a number, then all checksums are made right.
    enum { HEADER, RUN0, RUN1, LAST_RUN };
#define IN_HEADER(field) HEADER, offsetof(ShardHeader, field)
#define IN_RUN(which, field) which, offsetof(ShardRun, field)
    static const struct { int where; size_t offset; int bytes; int64_t value; const char *why; } row[] = {
        {IN_HEADER(magic), 8, 0x4141414141414141, "is no shard"},
        {IN_HEADER(version), 4, 0, "version 0; the manifest's is 2"},
        {IN_HEADER(version), 4, 1, "version 1; the manifest's is 2"},
        {IN_HEADER(version), 4, 0xffffffff, "version 4294967295; the manifest's is 2"},
        {IN_HEADER(byte_order), 4, 0x04030201, "byte-order mark"},
        {IN_HEADER(step), 8, 6, "at step 6, not to rank 0 of 1 at step 5"},
        {IN_HEADER(rank), 8, 1, "belongs to rank 1"},
        {IN_HEADER(world), 8, 2, "rank 0 of 2"},
        {IN_HEADER(data_bytes), 8, -4, "do not fit"},
        {IN_HEADER(data_bytes), 8, INT64_MAX, "do not fit"},
        {IN_HEADER(data_bytes), 8, INT64_MAX - 3, "do not fit"},
        {IN_HEADER(data_bytes), 8, 0, "do not fit"},
        {IN_HEADER(n_runs), 8, 0, "its runs cover 0 of"},
        {IN_HEADER(n_runs), 8, -1, "do not fit"},
        {IN_HEADER(n_runs), 8, INT64_MAX, "do not fit"},
        {IN_HEADER(n_runs), 8, INT64_MAX / 48, "do not fit"},
        {IN_HEADER(file_bytes), 8, 0, "do not fit"},
        {IN_RUN(RUN0, tensor), 4, 0xffffffff, "run 0 of its table"},
        {IN_RUN(RUN0, tensor), 4, 1, "run 0 of its table"},        // larger than that tensor
        {IN_RUN(RUN0, kind), 4, 2, "run 0 of its table"},
        {IN_RUN(RUN0, kind), 4, 1, "are missing or stored twice"},
        {IN_RUN(RUN0, global_offset), 8, 1, "run 0 of its table"},
        {IN_RUN(RUN0, global_offset), 8, -1, "run 0 of its table"},
        {IN_RUN(RUN0, global_offset), 8, INT64_MAX, "run 0 of its table"},
        {IN_RUN(RUN0, numel), 8, 0, "run 0 of its table"},
        {IN_RUN(RUN0, numel), 8, -1, "run 0 of its table"},
        {IN_RUN(RUN0, numel), 8, INT64_MAX, "run 0 of its table"},
        {IN_RUN(RUN0, numel), 8, 167, "run 0 of its table"},       // and the stride is still 168
        {IN_RUN(RUN0, count), 8, 0, "run 0 of its table"},
        {IN_RUN(RUN0, count), 8, -1, "run 0 of its table"},
        {IN_RUN(RUN0, count), 8, 2, "run 0 of its table"},         // 168 elements are no part of a row
        {IN_RUN(RUN0, stride), 8, 8, "run 0 of its table"},        // one piece has no stride but its length
        {IN_RUN(RUN0, data_offset), 8, 4, "run 0 of its table"},
        {IN_RUN(RUN1, tensor), 4, 0, "are missing or stored twice"}, // 96 elements of wte again
        {IN_RUN(RUN1, data_offset), 8, 0, "run 1 of its table"},   // overlapping
        {IN_RUN(RUN1, data_offset), 8, -4, "run 1 of its table"},
        {IN_RUN(LAST_RUN, numel), 8, 9, "of its table"},           // longer than the values
        {IN_RUN(LAST_RUN, global_offset), 8, INT64_MIN, "of its table"},
    };
    const int64_t steps[] = {5};
    FakeRun *f = fake_make(fake_model(1, 8, 21), 2, 1);
    CkptPath folder, checkpoint, path;
    ckpt_folder_fast(folder);
    ckpt_save_steps(folder, f, steps, 1);
    int64_t bytes;
    char *good = ckpt_slurp(ckpt_join(path, ckpt_join(checkpoint, folder, "step-00000005"), "shard-0.bin"), &bytes);
    StoredShardPlan plan = stored_shard_plan(&f->tensors);
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        int64_t table = SHARD_ALIGN + plan.data_bytes, run = row[i].where == RUN1 ? 1 : row[i].where == LAST_RUN ? plan.n_runs - 1 : 0;
        int64_t at = (row[i].where == HEADER ? 0 : table + (int64_t)sizeof(ShardRun) * run) + (int64_t)row[i].offset;
        ckpt_spill(path, good, bytes);
        int fd = open(path, O_WRONLY | O_CLOEXEC);
        CHECK(pwrite(fd, &row[i].value, (size_t)row[i].bytes, at) == row[i].bytes, "pwrite");
        close(fd);
        ckpt_reseal(checkpoint);
        const char *why = ckpt_verdict(folder, "step-00000005");
        char what[64];
        snprintf(what, sizeof what, "row %zu", i);
        expect_contains(t, what, why ? why : "(taken for good)", row[i].why);
        if (why) expect_contains(t, what, row[i].why[0] == 'a' && row[i].why[1] == 'r' ? "shard-0.bin" : why, "shard-0.bin");
    }
    free(good);
    fake_free(f);
    ckpt_remove(folder);
}

// NaN anywhere and infinite weights are neither written nor loaded; the message names the tensor. Other odd values are fine.
static void test_checkpoint_not_finite(Test *t) {
    CkptPath folder, checkpoint, path;
    ckpt_folder(folder);
    const int64_t steps[] = {5};
    FakeRun *f = fake_make(fake_model(1, 8, 21), 2, 1);
    ckpt_save_steps(folder, f, steps, 1);
    StoredShardPlan plan = stored_shard_plan(&f->tensors);
    int row = 0;
    while (strcmp(f->table.row[row].name, "h.0.mlp.c_fc.weight") != 0) row++;
    const struct { int kind; float value; const char *word; } cases[] = {
        {0, NAN, "master of tensor h.0.mlp.c_fc.weight is NaN"}, {0, -NAN, "master of tensor h.0.mlp.c_fc.weight is NaN"},
        {0, INFINITY, "master of tensor h.0.mlp.c_fc.weight is infinite"}, {0, -INFINITY, "master of tensor h.0.mlp.c_fc.weight is infinite"},
        {1, NAN, "exp_avg of tensor h.0.mlp.c_fc.weight is NaN"}, {1, INFINITY, NULL}, {0, 3.4e38f, NULL}, {0, 1e-45f, NULL},
    };
    CheckpointStore *s = checkpoint_open(&checkpoint_alone, folder, false);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fake_fill(f, 6);
        f->poison_row = row; f->poison_kind = cases[i].kind; f->poison = cases[i].value;
        SaveResult r = checkpoint_save(s, &f->state, &f->tensors, 0, 1);
        expect_true(t, r.durable == !cases[i].word, "case %zu: durable %d, %s", i, r.durable, r.why);
        expect_true(t, r.not_a_number == !!cases[i].word, "case %zu: not_a_number %d", i, r.not_a_number);
        if (cases[i].word) expect_contains(t, "why", r.why, cases[i].word);
        expect_true(t, ckpt_exists(folder, "step-00000005") == !!cases[i].word, "case %zu: older one %d", i, ckpt_exists(folder, "step-00000005"));
        f->poison_row = -1;
        if (!cases[i].word) { ckpt_remove(ckpt_join(path, folder, "step-00000006")); checkpoint_close(s); ckpt_save_steps(folder, f, steps,
                1); s = checkpoint_open(&checkpoint_alone, folder, false); }
        // the same value put into a stored checkpoint, under right checksums
        int64_t at = SHARD_ALIGN, place = param_numel(&f->table.row[row]) / 2;
        for (int k = 0; k <= cases[i].kind; k++)
            for (int r2 = 0; r2 < f->table.n_rows && (k < cases[i].kind || r2 < row); r2++)
                if (f->table.row[r2].tied_to < 0) at += 4 * param_numel(&f->table.row[r2]);
        int64_t bytes;
        ckpt_join(path, ckpt_join(checkpoint, folder, "step-00000005"), "shard-0.bin");
        char *good = ckpt_slurp(path, &bytes);
        int fd = open(path, O_WRONLY | O_CLOEXEC);
        CHECK(pwrite(fd, &cases[i].value, 4, at + 4 * place) == 4 && at + 4 * place < SHARD_ALIGN + plan.data_bytes, "pwrite");
        close(fd);
        ckpt_reseal(checkpoint);
        const char *why = ckpt_verdict(folder, "step-00000005");
        if (cases[i].word) expect_contains(t, "verdict", why ? why : "(taken for good)", cases[i].word);
        else expect_true(t, why == NULL, "case %zu refused: %s", i, why);
        ckpt_spill(path, good, bytes);
        ckpt_reseal(checkpoint);
        free(good);
    }
    checkpoint_close(s);
    fake_free(f);
    ckpt_remove(folder);
}

// Runs of a tensor spread over several shards, in any order, are put together by their offsets: the reader is ready for
// checkpoints of many ranks. The files are composed here, from one of a single rank.
static void test_checkpoint_many_shards(Test *t) {
    enum { WORLD = 3 };
    CkptPath folder, checkpoint, path;
    ckpt_folder(folder);
    const int64_t steps[] = {5};
    FakeRun *f = fake_make(fake_model(1, 8, 21), 2, 1);
    ckpt_save_steps(folder, f, steps, 1);
    ckpt_join(checkpoint, folder, "step-00000005");
    int64_t bytes, manifest_bytes;
    unsigned char *whole = (unsigned char *)ckpt_slurp(ckpt_join(path, checkpoint, "shard-0.bin"), &bytes);
    const ShardHeader *h = (const ShardHeader *)whole;
    const ShardRun *run = (const ShardRun *)(whole + SHARD_ALIGN + h->data_bytes);
    ShardRecord record[WORLD];
    for (int rank = 0; rank < WORLD; rank++) {
        // each run of elements is cut into thirds; rank r owns third (r + place of the run) modulo 3
        unsigned char *b = (unsigned char *)host_alloc((size_t)bytes);
        ShardRun *own = (ShardRun *)host_alloc((size_t)h->n_runs * sizeof *own);
        int64_t n = 0, at = 0;
        for (int64_t i = 0; i < h->n_runs; i++) {
            int third = (int)((rank + i) % WORLD);
            int64_t from = run[i].numel * third / WORLD, to = run[i].numel * (third + 1) / WORLD;
            if (from == to) continue;
            ShardRun r = {run[i].tensor, run[i].kind, run[i].global_offset + from, to - from, 1, to - from, at};
            memcpy(b + SHARD_ALIGN + at, whole + SHARD_ALIGN + run[i].data_offset + 4 * from, (size_t)(to - from) * 4);
            at += (to - from) * 4;
            own[n++] = r;
        }
        ShardHeader *o = (ShardHeader *)b;
        *o = *h;
        o->rank = rank; o->world = WORLD; o->data_bytes = at; o->n_runs = n; o->file_bytes = stored_shard_file_bytes(CHECKPOINT_VERSION, at, n);
        o->crc = crc32c_software(0, o, SHARD_ALIGN - 4);
        memset(b + SHARD_ALIGN + at, 0, (size_t)(bytes - SHARD_ALIGN - at));
        memcpy(b + SHARD_ALIGN + at, own, (size_t)n * sizeof *own);
        uint32_t crc = crc32c_software(0, b + SHARD_ALIGN, (size_t)at); // one piece
        CHECK(at <= PIECE_BYTES, "too large for this test");
        memcpy(b + SHARD_ALIGN + at + n * (int64_t)sizeof *own, &crc, 4);
        snprintf(record[rank].file, sizeof record[rank].file, "shard-%d.bin", rank);
        record[rank].bytes = o->file_bytes;
        record[rank].table_crc = crc32c_software(0, b + SHARD_ALIGN + at, (size_t)(o->file_bytes - SHARD_ALIGN - at));
        ckpt_spill(ckpt_join(path, checkpoint, record[rank].file), b, o->file_bytes);
        free(b);
        free(own);
    }
    char *manifest = manifest_compose(&f->state, &f->tensors, record, WORLD, &manifest_bytes);
    ckpt_spill(ckpt_join(path, checkpoint, "manifest.json"), manifest, manifest_bytes);
    free(manifest);
    free(whole);
    fake_fill(f, 77);
    CkptCaptured c;
    expect_equal_text(t, "chosen", ckpt_load_quietly(folder, "auto", f, &c), "step-00000005");
    expect_true(t, fake_holds(t, f, 5), "values differ when put together from %d shards", WORLD);
    // two shards exchanged, one missing
    CkptPath a, b, x;
    ckpt_join(a, checkpoint, "shard-0.bin"); ckpt_join(b, checkpoint, "shard-2.bin"); ckpt_join(x, checkpoint, "aside");
    CHECK(rename(a, x) == 0 && rename(b, a) == 0 && rename(x, b) == 0, "rename");
    const char *why = ckpt_verdict(folder, "step-00000005");
    expect_true(t, why && strstr(why, "shard-0.bin"), "exchanged shards: %s", why ? why : "taken for good");
    CHECK(rename(a, x) == 0 && rename(b, a) == 0 && rename(x, b) == 0, "rename");
    expect_true(t, ckpt_verdict(folder, "step-00000005") == NULL, "not good again");
    CHECK(unlink(ckpt_join(path, checkpoint, "shard-1.bin")) == 0, "unlink");
    why = ckpt_verdict(folder, "step-00000005");
    expect_true(t, why && strstr(why, "shard-1.bin: is missing"), "missing shard: %s", why ? why : "taken for good");
    fake_free(f);
    ckpt_remove(folder);
}

// ---------------------------------------------------------------------------------------------------------------
// Another model, another optimizer

static void test_checkpoint_mismatch(Test *t) {
    CkptPath folder;
    ckpt_folder(folder);
    const int64_t steps[] = {5};
    FakeRun *f = fake_make(fake_model(2, 16, 37), 3, 1);
    ckpt_save_steps(folder, f, steps, 1);
    static const struct { int64_t L, C, V; int64_t heads; double eps; bool tied; int kinds; const char *part[4]; } row[] = {
        {2, 16, 38, 2, 1e-5, true, 3, {"vocab_size is 37 in the checkpoint, 38 in this run", "wte.weight: (37, 16) in the checkpoint, (38, 16) in this run"}},
        {1, 16, 37, 2, 1e-5, true, 3, {"n_layer is 2 in the checkpoint, 1", "h.1.ln_1.weight: in the checkpoint, not in this run", "h.1.mlp.c_proj.bias: in the checkpoint"}},
        {3, 16, 37, 2, 1e-5, true, 3, {"n_layer is 2 in the checkpoint, 3", "h.2.attn.c_attn.weight: not in the checkpoint", "h.2.mlp.c_proj.bias: not"}},
        {2, 8, 37, 2, 1e-5, true, 3, {"n_embd is 16 in the checkpoint, 8", "ln_f.bias: (16) in the checkpoint, (8) in this run"}},
        {2, 16, 37, 4, 1e-5, true, 3, {"n_head is 2 in the checkpoint, 4 in this run"}}, // all shapes agree
        {2, 16, 37, 2, 1e-6, true, 3, {"layer_norm_epsilon is 1e-05 in the checkpoint, 1e-06"}},
        {2, 16, 37, 2, 1e-5, false, 3, {"tie_word_embeddings is 1 in the checkpoint, 0", "lm_head.weight: not in the checkpoint"}},
        {2, 16, 37, 2, 1e-5, true, 2, {"optimizer state exp_avg_sq: in the checkpoint, not used"}},
        {2, 16, 37, 2, 1e-5, true, 4, {"optimizer state spare: not in the checkpoint"}},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        ModelConfig m = fake_model(row[i].L, row[i].C, row[i].V);
        m.n_head = row[i].heads;
        m.layer_norm_epsilon = row[i].eps;
        m.tie_word_embeddings = row[i].tied;
        FakeRun *g = fake_make(m, row[i].kinds, 1);
        static const char *const modes[] = {"auto", "step-00000005"};
        for (int mode = 0; mode < 2; mode++) { // a sound checkpoint of another model is never skipped
            CkptLoadCall call = {folder, modes[mode], g};
            char text[DIES_TEXT_BYTES];
            int code = run_in_child(ckpt_load_call, &call, text);
            expect_equal_i64(t, "exit code", code, EXIT_CHECKPOINT);
            expect_contains(t, "last line", text, "checkpoint of another model or optimizer");
            for (int k = 0; k < 4 && row[i].part[k]; k++) expect_contains(t, "stderr", text, row[i].part[k]);
        }
        fake_free(g);
    }
    // Weights alone, for a run that trains nothing.
    FakeRun *g = fake_make(fake_model(2, 16, 37), 1, 1);
    g->tensors.get = NULL;
    CkptCaptured c;
    expect_equal_text(t, "weights alone", ckpt_load_quietly(folder, "auto", g, &c), "step-00000005");
    expect_true(t, fake_holds(t, g, 5), "weights differ");
    fake_free(g);
    fake_free(f);
    ckpt_remove(folder);
}

// A layer number is a prefix of another one: names must match whole.
static void test_checkpoint_many_layers(Test *t) {
    CkptPath folder;
    ckpt_folder(folder);
    const int64_t steps[] = {5};
    FakeRun *f = fake_make(fake_model(101, 4, 3), 2, 1);
    ckpt_save_steps(folder, f, steps, 1);
    fake_fill(f, 9);
    CkptCaptured c;
    expect_equal_text(t, "chosen", ckpt_load_quietly(folder, "auto", f, &c), "step-00000005");
    expect_true(t, fake_holds(t, f, 5), "values differ");
    fake_free(f);
    ckpt_remove(folder);
}
