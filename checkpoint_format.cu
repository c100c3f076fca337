// checkpoint_format.cu - the files of a checkpoint: how they are laid out, how they are composed, how they are doubted.
//
//     step-00000100/
//         shard-0.bin ...    the values that each rank owns, one file a rank, and an index of them
//         manifest.json      the rest: state of the run, model, names and shapes of the tensors, list of the shards, configuration
//
// Every stored run of elements is addressed by tensor name, kind of state ("master" weights, the optimizer's states) and
// offset in the global, unsharded, unpadded tensor. So the files say nothing about the layout that wrote them, and loading
// under another one is arithmetic on offsets. Equal states of equal configurations give equal folders, byte for byte.
//
// A run is a range of elements, or the same columns of some rows of a matrix, which is what tensor parallelism leaves of it. Either is
// at most three blocks of rows x columns (RunBlock), and blocks are easy to intersect, and to count:
//
//     . . . a a a    the end of a row        . . . . . .
//     a a a a a a    whole rows              . . b b b .    the same columns of some rows
//     a a . . . .    the start of one        . . b b b .
//
//     shard    | header, 4096 bytes | values: runs without gaps | table: ShardRun x runs, crc32c x pieces | zeros to 4096 |
//     piece      1 MiB of the values (the last one shorter), its crc32c taken from memory before it was written
//     checksums  pieces: in the table; table and zeros: in the manifest; header: its own; manifest: its own last line
//
// No byte is left out, so no bit of a checkpoint can flip unseen. Whoever can write the files can also forge checksums:
// every number is checked against what it counts before it is used, by subtraction, so that a forged file can give wrong
// weights, but never a wrong access.
//
// Bytes are in the order of the machine, little-endian on all that we know; the header's mark refuses the other order.
// Read next: checkpoint.cu, which says when these files are written, moved and deleted.
#pragma once
#include "model.cu"
#include "runtime/crc32c.h"
#include "runtime/json.h"

#define CHECKPOINT_FORMAT "train_gpt checkpoint"
#define CHECKPOINT_VERSION 2                      // 1 had ranges only: it is read as well
#define CHECKPOINT_KINDS_MAX 4
#define CHECKPOINT_NAME_MAX 64                    // of a tag, with its final zero
#define SHARD_MAGIC "GPTSHARD"
#define SHARD_ALIGN 4096                          // of file sizes and of the start of the values: direct I/O will want it
#define SHARD_BYTE_ORDER 0x01020304u              // reads differently on a machine of the other byte order
#define PIECE_BYTES ((int64_t)1 << 20)
#define MANIFEST_FILE "manifest.json"
#define MANIFEST_BYTES_MAX ((int64_t)16 << 20)
#define MANIFEST_LAST_LINE "\"crc32c\": \"%08x\"}\n" // covers all bytes before this line
#define STORED_TENSORS_MAX 1000000
#define STORED_SHARDS_MAX 65536
#define STORED_RUNS_MAX (16 << 20)                // a shard

// What a run needs to go on, besides the tensors.
typedef struct {
    int64_t step, applied_updates, tokens, skipped;
    double loss_scale;
    int64_t scaler_iteration, scaler_last_overflow, scaler_hysteresis_left, consecutive_skipped;
    uint64_t seed, data_fingerprint;
    int64_t data_samples;    // consumed so far
    // Not needed to go on, but to say what has changed since: the configuration that wrote it, as the text of a JSON object (null: not
    // known), and for how many ranks it was. Of a state that was loaded, the text belongs to the caller.
    const char *config;
    int64_t config_ranks;
} TrainingState;

// Where the tensors come from and go to. All ranks have the same rows, held or not; one that is tied to another is not a tensor of its
// own, and where it has storage nevertheless (on another stage of the pipeline) that is filled from the other's. A rank deals with one
// range, maybe an empty one, of what it holds of a row: elements are counted in that order, and param_runs says where the tensor has them.
typedef struct {
    const ParamTable *table;
    const ModelConfig *model;
    int n_kinds;
    const char *kind[CHECKPOINT_KINDS_MAX]; // "master", then the optimizer's states by name
    void *ctx;
    // Elements [first, last) of this rank's part of a row that it saves (every element has one such rank), and that it needs to go on.
    void (*owned)(void *ctx, int row, int64_t *first, int64_t *last);
    void (*needed)(void *ctx, int row, int64_t *first, int64_t *last);
    // n values of one kind, from `first` on, inside these ranges. A null `get` says that nothing will be trained with what is
    // loaded: then a checkpoint may hold more kinds than are asked for.
    void (*get)(void *ctx, int row, int kind, int64_t first, int64_t n, float *values);
    void (*put)(void *ctx, int row, int kind, int64_t first, int64_t n, const float *values);
    // For saves in the background: begins to copy what makes up n values, which may go on in the rows that follow in the unit's buffer, into
    // 4 n bytes of host memory; waits until all of that is there; and says, in any thread, what `count` of these values are, from `from` on.
    void (*keep)(void *ctx, int row, int kind, int64_t first, int64_t n, void *kept);
    void (*keep_end)(void *ctx);
    void (*kept_get)(void *ctx, int row, int kind, int64_t n, const void *kept, int64_t from, int64_t count, float *values);
} CheckpointTensors;

// The first bytes of a shard file.
typedef struct {
    char magic[8];
    uint32_t version, byte_order;
    int64_t step, rank, world;
    int64_t data_bytes, n_runs, file_bytes;
    unsigned char zero[SHARD_ALIGN - 68];
    uint32_t crc;        // of everything before it
} ShardHeader;
static_assert(sizeof(ShardHeader) == SHARD_ALIGN, "the header fills its place");

// One entry of a shard's index: `count` pieces of `numel` elements of a tensor, the first at global_offset, each `stride` after the one
// before. Of more than one piece, the stride is the length of the tensor's rows, and a piece lies within a row.
typedef struct {
    uint32_t tensor, kind; // places in the manifest's lists
    int64_t global_offset, numel, count, stride;
    int64_t data_offset;   // bytes from the start of the shard's values, where the pieces follow each other without gaps
} ShardRun;
static_assert(sizeof(ShardRun) == 48, "no padding in stored structs");

// The same in version 1.
typedef struct {
    uint32_t tensor, kind;
    int64_t global_offset, numel, data_offset;
} ShardRange;
static_assert(sizeof(ShardRange) == 32, "no padding in stored structs");

static int64_t stored_run_bytes(int version) { return version == 1 ? (int64_t)sizeof(ShardRange) : (int64_t)sizeof(ShardRun); }
static int64_t stored_shard_pieces(int64_t data_bytes) { return ceil_div(data_bytes, PIECE_BYTES); }
static int64_t stored_shard_table_bytes(int version, int64_t data_bytes, int64_t n_runs) { return n_runs * stored_run_bytes(version) + stored_shard_pieces(data_bytes) * 4; }
static int64_t stored_shard_file_bytes(int version, int64_t data_bytes, int64_t n_runs) {
    return round_up(SHARD_ALIGN + data_bytes + stored_shard_table_bytes(version, data_bytes, n_runs), SHARD_ALIGN);
}

// The whole numbers of the manifest, by name: written, read and compared by these tables.
typedef struct {
    const char *name;
    size_t offset;
    int64_t least;
} NumberField;

static const NumberField state_numbers[] = {
    {"step", offsetof(TrainingState, step), 0},
    {"applied_updates", offsetof(TrainingState, applied_updates), 0},
    {"tokens", offsetof(TrainingState, tokens), 0},
    {"skipped", offsetof(TrainingState, skipped), 0},
    {"data_samples", offsetof(TrainingState, data_samples), 0},
    {"scaler_iteration", offsetof(TrainingState, scaler_iteration), INT64_MIN},
    {"scaler_last_overflow", offsetof(TrainingState, scaler_last_overflow), INT64_MIN},
    {"scaler_hysteresis_left", offsetof(TrainingState, scaler_hysteresis_left), INT64_MIN},
    {"consecutive_skipped", offsetof(TrainingState, consecutive_skipped), 0},
};

static const NumberField model_numbers[] = {
    {"n_layer", offsetof(ModelConfig, n_layer), 1}, {"n_head", offsetof(ModelConfig, n_head), 1},
    {"n_embd", offsetof(ModelConfig, n_embd), 1}, {"n_positions", offsetof(ModelConfig, n_positions), 1},
    {"vocab_size", offsetof(ModelConfig, vocab_size), 1}, {"n_inner", offsetof(ModelConfig, n_inner), 1},
};

enum { STATE_NUMBERS = sizeof state_numbers / sizeof *state_numbers, MODEL_NUMBERS = sizeof model_numbers / sizeof *model_numbers };

static int64_t *number_of(const void *record, const NumberField *f) { return (int64_t *)((char *)record + f->offset); }

// ---------------------------------------------------------------------------------------------------------------
// Names

static bool name_is_plain(const char *s, const char *more) { // letters, digits and the characters of `more`; not empty
    for (const char *p = s; *p; p++)
        if (!((*p >= 'a' && *p <= 'z') || (*p >= 'A' && *p <= 'Z') || (*p >= '0' && *p <= '9') || strchr(more, *p))) return false;
    return *s != 0;
}

// Tags come from the command line: one plain component, nothing hidden, no way out of the folder.
static bool tag_is_valid(const char *tag) { return name_is_plain(tag, "._-") && tag[0] != '.' && strlen(tag) < CHECKPOINT_NAME_MAX; }

static void step_name(char dst[CHECKPOINT_NAME_MAX], int64_t step) { snprintf(dst, CHECKPOINT_NAME_MAX, "step-%08" PRId64, step); }

// The step of a folder's name, or -1 when it is not exactly what step_name makes.
static int64_t step_of_name(const char *name) {
    if (strncmp(name, "step-", 5) != 0 || strlen(name) < 13 || strlen(name) > 24) return -1;
    errno = 0;
    int64_t step = strtoll(name + 5, NULL, 10);
    char again[CHECKPOINT_NAME_MAX];
    step_name(again, step);
    return errno == 0 && step >= 0 && strcmp(again, name) == 0 ? step : -1;
}

// ---------------------------------------------------------------------------------------------------------------
// Values

// First value that a checkpoint may not hold, or -1: NaN anywhere; infinity among the weights (kind 0).
static int64_t first_bad_value(const float *v, int64_t n, int kind) {
    const uint32_t infinity = 0x7f800000u, limit = kind == 0 ? infinity - 1 : infinity;
    for (int64_t i = 0; i < n;) {
        int64_t end = min_i64(n, i + 4096);
        uint32_t worst = 0, bits;
        for (int64_t k = i; k < end; k++) { // no branch, so that it is done in vectors
            memcpy(&bits, v + k, 4);
            bits &= 0x7fffffffu;
            worst = bits > worst ? bits : worst;
        }
        if (worst <= limit) { i = end; continue; }
        for (;; i++) {
            memcpy(&bits, v + i, 4);
            if ((bits & 0x7fffffffu) > limit) return i;
        }
    }
    return -1;
}

// ---------------------------------------------------------------------------------------------------------------
// Blocks: runs as parts of the matrix

// Rows x columns of a matrix (a vector has one column), as part of a run: its elements, row after row, are those of the run from `at` on.
typedef struct {
    int64_t row, column, rows, columns, at;
} RunBlock;

enum { RUN_BLOCKS_MAX = 3 };

static int run_block_add(RunBlock *block, int n, int64_t row, int64_t column, int64_t rows, int64_t columns, int64_t at) {
    if (rows <= 0 || columns <= 0) return n;
    block[n] = {row, column, rows, columns, at};
    return n + 1;
}

// The blocks of `count` pieces of `numel` elements from `offset` on, in a matrix with rows of `width`; returns how many.
static int run_blocks(int64_t width, int64_t offset, int64_t numel, int64_t count, RunBlock block[RUN_BLOCKS_MAX]) {
    int64_t row = offset / width, column = offset % width;
    if (count > 1 || numel <= width - column) return run_block_add(block, 0, row, column, count, numel, 0);
    int64_t head = column ? width - column : 0, rows = (numel - head) / width;
    int n = run_block_add(block, 0, row, column, 1, head, 0);
    n = run_block_add(block, n, row + (head > 0), 0, rows, width, head);
    return run_block_add(block, n, row + (head > 0) + rows, 0, 1, numel - head - rows * width, head + rows * width);
}

// What two blocks of the same matrix share; false if nothing. `at` is not set.
static bool run_block_meet(const RunBlock *a, const RunBlock *b, RunBlock *both) {
    both->row = max_i64(a->row, b->row);
    both->column = max_i64(a->column, b->column);
    both->rows = min_i64(a->row + a->rows, b->row + b->rows) - both->row;
    both->columns = min_i64(a->column + a->columns, b->column + b->columns) - both->column;
    return both->rows > 0 && both->columns > 0;
}

static int64_t run_block_place(const RunBlock *b, int64_t row, int64_t column) { return b->at + (row - b->row) * b->columns + column - b->column; }

static int run_block_order(const void *a, const void *b) {
    const RunBlock *x = (const RunBlock *)a, *y = (const RunBlock *)b;
    if (x->row != y->row) return x->row < y->row ? -1 : 1;
    return (x->column > y->column) - (x->column < y->column);
}

// From `column` up to the next step's, the rows before `row` are covered.
typedef struct {
    int64_t column, row;
} CoverStep;

// Do blocks cover each element of a matrix exactly once? Laid from the top down, each must lie on what was laid before, all along its
// upper edge. -1 if they do, else the first element found missing or covered twice. The blocks are sorted; room for 2 n + 1 steps.
static int64_t blocks_cover(RunBlock *block, int64_t n, int64_t rows, int64_t width, CoverStep *step) {
    int64_t n_steps = 1, first, last;
    step[0] = {0, 0};
    qsort(block, (size_t)n, sizeof *block, run_block_order);
    for (int64_t i = 0; i < n; i++) {
        const RunBlock *b = &block[i];
        const int64_t end = b->column + b->columns;
        for (first = 0; first + 1 < n_steps && step[first + 1].column <= b->column;) first++;
        for (last = first; last < n_steps && step[last].column < end; last++)
            if (step[last].row != b->row) return min_i64(step[last].row, b->row) * width + max_i64(step[last].column, b->column);
        // steps [first, last) make way for what is left of them on the left, the block's own, and what is left on the right
        bool left = step[first].column < b->column, right = end < (last < n_steps ? step[last].column : width);
        int64_t own = first + left, moved = own + 1 + right - last;
        memmove(step + last + moved, step + last, (size_t)(n_steps - last) * sizeof *step);
        n_steps += moved;
        step[own] = {b->column, b->row + b->rows};
        if (right) step[own + 1] = {end, b->row};
    }
    for (int64_t i = 0; i < n_steps; i++) if (step[i].row != rows) return step[i].row * width + step[i].column;
    return -1;
}

// ---------------------------------------------------------------------------------------------------------------
// Reading: everything in a file is doubted, and checked before it is used

typedef struct {
    char name[64];
    int ndim;
    int64_t shape[2], numel;
} StoredTensor;

typedef struct {
    char file[32];
    int64_t file_bytes;        // as the manifest says, and as it is
    uint32_t table_crc;        // as the manifest says
    int fd;
    int64_t data_bytes, n_runs;
    ShardRun *run;             // (n_runs)
    unsigned char *table;
    const uint32_t *piece_crc; // (stored_shard_pieces) in the table
    unsigned char *piece;      // the piece read last, checked
    int64_t piece_at;          // which one; -1 = none
} StoredShard;

typedef struct {
    const ShardRun *run;
    StoredShard *shard;
} StoredRun;

// A checkpoint that is being read.
typedef struct {
    char why[400];             // what is wrong with it
    int fd;
    uint32_t manifest_crc;     // of the manifest, which holds the checksums of everything else
    int version;
    TrainingState state;
    ModelConfig model;         // the fields of model_numbers, layer_norm_epsilon, tie_word_embeddings
    int n_kinds, n_tensors, n_shards;
    char kind[CHECKPOINT_KINDS_MAX][32];
    StoredTensor *tensor;
    StoredShard *shard;
    StoredRun *run;            // of all shards, by kind and tensor
    int64_t n_runs;
    int64_t *first_run;        // of kind k and tensor i: runs from [k * n_tensors + i] to the next
} Checkpoint;

PRINTF_LIKE(2, 3) static bool checkpoint_bad(Checkpoint *c, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(c->why, sizeof c->why, format, args);
    va_end(args);
    return false;
}

static void checkpoint_free(Checkpoint *c) {
    free((char *)c->state.config);
    for (int i = 0; i < c->n_shards; i++) {
        if (c->shard[i].fd >= 0) close(c->shard[i].fd);
        free(c->shard[i].run);
        free(c->shard[i].table);
        free(c->shard[i].piece);
    }
    free(c->shard);
    free(c->tensor);
    free(c->run);
    free(c->first_run);
    if (c->fd >= 0) close(c->fd);
}

// Opens a regular file of the checkpoint's folder. -1 with the reason in c->why.
static int stored_open(Checkpoint *c, const char *name, int64_t *bytes) {
    int fd = openat(c->fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC); // NONBLOCK: a FIFO must not wait for a writer
    struct stat st;
    if (fd < 0) checkpoint_bad(c, "%s: %s", name, errno == ELOOP ? "is a symbolic link" : errno == ENOENT ? "is missing" : strerror(errno));
    else if (fstat(fd, &st) != 0) checkpoint_bad(c, "%s: %s", name, strerror(errno));
    else if (!S_ISREG(st.st_mode)) checkpoint_bad(c, "%s: is not a regular file", name);
    else { *bytes = st.st_size; return fd; }
    if (fd >= 0) close(fd);
    return -1;
}

static bool stored_read(Checkpoint *c, const char *name, int fd, void *dst, int64_t bytes, int64_t offset) {
    if (file_read_at(fd, dst, bytes, offset)) return true;
    return checkpoint_bad(c, "%s: %s at offset %" PRId64, name, errno ? strerror(errno) : "became shorter while it was read", offset);
}

// The manifest's members. Each returns false (or -1) with the reason in c->why.
static int manifest_find(Checkpoint *c, const Json *j, int object, const char *key, JsonType type) {
    int n = json_find(j, object, key);
    if (n >= 0 && j->node[n].type == type) return n;
    checkpoint_bad(c, MANIFEST_FILE ":%d: \"%s\" %s %s", n < 0 ? j->node[object].line : j->node[n].line, key,
                   n < 0 ? "is missing; it must be" : "must be", json_type_name(type));
    return -1;
}

static bool manifest_whole(Checkpoint *c, const Json *j, int n, const char *what, int64_t least, int64_t most, int64_t *value) {
    if (j->node[n].type == JSON_NUMBER && json_to_i64(json_text(j, n), j->node[n].length, value) == JSON_WHOLE && *value >= least &&
        *value <= most) return true;
    return checkpoint_bad(c, MANIFEST_FILE ":%d: \"%s\" must be a whole number from %" PRId64 " to %" PRId64, j->node[n].line, what, least, most);
}

static bool manifest_number(Checkpoint *c, const Json *j, int object, const char *key, int64_t least, int64_t *value) {
    int n = manifest_find(c, j, object, key, JSON_NUMBER);
    return n >= 0 && manifest_whole(c, j, n, key, least, INT64_MAX, value);
}

static bool manifest_real(Checkpoint *c, const Json *j, int object, const char *key, double *value) {
    int n = manifest_find(c, j, object, key, JSON_NUMBER);
    if (n < 0) return false;
    return json_to_double(json_text(j, n), value) || checkpoint_bad(c, MANIFEST_FILE ":%d: \"%s\" must be finite", j->node[n].line, key);
}

static bool manifest_text_of(Checkpoint *c, const Json *j, int object, const char *key, const char *more, char *dst, size_t room) {
    int n = manifest_find(c, j, object, key, JSON_STRING);
    if (n < 0) return false;
    const char *text = json_text(j, n);
    if (strlen(text) != (size_t)j->node[n].length || strlen(text) >= room || (*text && !name_is_plain(text, more)))
        return checkpoint_bad(c, MANIFEST_FILE ":%d: \"%s\" must be at most %zu letters, digits and \"%s\"", j->node[n].line, key, room - 1, more);
    memcpy(dst, text, strlen(text) + 1);
    return true;
}

static bool manifest_hex(Checkpoint *c, const Json *j, int object, const char *key, size_t digits, uint64_t *value) {
    char text[20];
    if (!manifest_text_of(c, j, object, key, "", text, sizeof text)) return false;
    *value = 0;
    for (size_t i = 0; text[i]; i++) {
        char ch = text[i];
        int d = ch >= '0' && ch <= '9' ? ch - '0' : ch >= 'a' && ch <= 'f' ? ch - 'a' + 10 : -1;
        if (d < 0 || i >= digits) { digits = 0; break; }
        *value = *value << 4 | (uint64_t)d;
    }
    return strlen(text) == digits || checkpoint_bad(c, MANIFEST_FILE ": \"%s\" must be a hexadecimal number of its full length", key);
}

static bool manifest_tensor(Checkpoint *c, const Json *j, int n, StoredTensor *t) {
    int shape = manifest_find(c, j, n, "shape", JSON_ARRAY);
    if (shape < 0 || !manifest_text_of(c, j, n, "name", "._-", t->name, sizeof t->name)) return false;
    t->ndim = j->node[shape].count;
    if (!t->name[0] || t->ndim < 1 || t->ndim > 2)
        return checkpoint_bad(c, MANIFEST_FILE ":%d: a tensor needs a name and one or two dimensions", j->node[n].line);
    t->shape[1] = 1;
    int d = 0;
    for (int e = j->node[shape].first; e >= 0; e = j->node[e].next)
        if (!manifest_whole(c, j, e, "shape", 1, INT64_MAX, &t->shape[d++])) return false;
    int64_t bytes;
    if (__builtin_mul_overflow(t->shape[0], t->shape[1], &t->numel) || __builtin_mul_overflow(t->numel, (int64_t)4 * CHECKPOINT_KINDS_MAX, &bytes))
        return checkpoint_bad(c, MANIFEST_FILE ":%d: tensor %s has too many elements", j->node[n].line, t->name);
    return true;
}

static bool manifest_shard(Checkpoint *c, const Json *j, int n, int rank, StoredShard *s) {
    uint64_t crc;
    char expected[32];
    snprintf(expected, sizeof expected, "shard-%d.bin", rank);
    if (!manifest_text_of(c, j, n, "file", "._-", s->file, sizeof s->file) || !manifest_number(c, j, n, "bytes", 0, &s->file_bytes) ||
        !manifest_hex(c, j, n, "table_crc32c", 8, &crc)) return false;
    s->table_crc = (uint32_t)crc;
    if (strcmp(s->file, expected) == 0) return true;
    return checkpoint_bad(c, MANIFEST_FILE ":%d: \"file\" is \"%s\", expected \"%s\"", j->node[n].line, s->file, expected);
}

static int stored_by_name(const void *a, const void *b) { return strcmp((*(StoredTensor *const *)a)->name, (*(StoredTensor *const *)b)->name); }

static bool manifest_lists(Checkpoint *c, const Json *j) {
    int kinds = manifest_find(c, j, 0, "kinds", JSON_ARRAY);
    int tensors = kinds < 0 ? -1 : manifest_find(c, j, 0, "tensors", JSON_ARRAY);
    int shards = tensors < 0 ? -1 : manifest_find(c, j, 0, "shards", JSON_ARRAY);
    if (shards < 0) return false;
    int n_kinds = j->node[kinds].count, n_tensors = j->node[tensors].count, n_shards = j->node[shards].count;
    if (n_kinds < 1 || n_kinds > CHECKPOINT_KINDS_MAX || n_tensors < 1 || n_tensors > STORED_TENSORS_MAX || n_shards < 1 ||
        n_shards > STORED_SHARDS_MAX)
        return checkpoint_bad(c, MANIFEST_FILE ": %d kinds, %d tensors and %d shards; allowed are 1 to %d, %d and %d", n_kinds, n_tensors,
                              n_shards, CHECKPOINT_KINDS_MAX, STORED_TENSORS_MAX, STORED_SHARDS_MAX);
    for (int n = j->node[kinds].first; n >= 0; n = j->node[n].next) {
        char dtype[8];
        if (!manifest_text_of(c, j, n, "name", "_", c->kind[c->n_kinds], sizeof c->kind[0]) ||
            !manifest_text_of(c, j, n, "dtype", "", dtype, sizeof dtype)) return false;
        if (strcmp(dtype, "fp32") != 0) return checkpoint_bad(c, MANIFEST_FILE ":%d: dtype %s; this build reads fp32", j->node[n].line, dtype);
        for (int k = 0; k < c->n_kinds; k++)
            if (strcmp(c->kind[k], c->kind[c->n_kinds]) == 0)
                return checkpoint_bad(c, MANIFEST_FILE ":%d: kind %s is listed twice", j->node[n].line, c->kind[k]);
        c->n_kinds++;
    }
    c->tensor = (StoredTensor *)host_alloc(sizeof(StoredTensor) * (size_t)n_tensors);
    StoredTensor **by_name = (StoredTensor **)host_alloc(sizeof(StoredTensor *) * (size_t)n_tensors);
    bool good = true;
    for (int n = j->node[tensors].first; n >= 0 && good; n = j->node[n].next) {
        good = manifest_tensor(c, j, n, &c->tensor[c->n_tensors]);
        by_name[c->n_tensors] = &c->tensor[c->n_tensors];
        c->n_tensors++;
    }
    if (good) qsort(by_name, (size_t)n_tensors, sizeof *by_name, stored_by_name);
    for (int i = 1; i < n_tensors && good; i++)
        if (strcmp(by_name[i - 1]->name, by_name[i]->name) == 0)
            good = checkpoint_bad(c, MANIFEST_FILE ": tensor %s is listed twice", by_name[i]->name);
    free(by_name);
    c->shard = (StoredShard *)host_alloc(sizeof(StoredShard) * (size_t)n_shards);
    for (int n = j->node[shards].first; n >= 0 && good; n = j->node[n].next) {
        StoredShard *s = &c->shard[c->n_shards++];
        s->fd = -1;
        s->piece_at = -1;
        good = manifest_shard(c, j, n, c->n_shards - 1, s);
    }
    return good;
}

// Earlier builds wrote a digest instead. The text will be printed: a terminal shall not take any of it for a command.
static bool manifest_config(Checkpoint *c, const Json *j, const char *text) {
    if (json_find(j, 0, "config") < 0) return true;
    int n = manifest_find(c, j, 0, "config", JSON_OBJECT);
    if (n < 0 || !manifest_number(c, j, 0, "config_ranks", 1, &c->state.config_ranks)) return false;
    int64_t bytes = j->node[n].end - j->node[n].begin;
    char *config = (char *)host_alloc((size_t)bytes + 1);
    c->state.config = (char *)memcpy(config, text + j->node[n].begin, (size_t)bytes);
    for (const char *p = config; *p; p++)
        if (*p == 0x7f || (*p == '\xc2' && (unsigned char)p[1] < 0xa0)) return checkpoint_bad(c, MANIFEST_FILE ":%d: \"config\" holds a control character", j->node[n].line);
    return true;
}

static bool manifest_members(Checkpoint *c, const Json *j, const char *text) {
    char format[32];
    int64_t version, world;
    if (j->node[0].type != JSON_OBJECT) return checkpoint_bad(c, MANIFEST_FILE ": is no JSON object");
    for (int n = 0; n < j->count; n++) if (j->node[n].twin >= 0) return checkpoint_bad(c, MANIFEST_FILE ":%d: a key occurs twice", j->node[n].line);
    if (!manifest_text_of(c, j, 0, "format", " _", format, sizeof format) || !manifest_number(c, j, 0, "version", 0, &version)) return false;
    if (strcmp(format, CHECKPOINT_FORMAT) != 0 || version < 1 || version > CHECKPOINT_VERSION)
        return checkpoint_bad(c, MANIFEST_FILE ": format \"%s\" version %" PRId64 "; this build reads \"" CHECKPOINT_FORMAT "\" versions 1 to %d",
                              format, version, CHECKPOINT_VERSION);
    c->version = (int)version;
    int state = manifest_find(c, j, 0, "state", JSON_OBJECT), model = state < 0 ? -1 : manifest_find(c, j, 0, "model", JSON_OBJECT);
    if (model < 0) return false;
    for (int i = 0; i < STATE_NUMBERS; i++)
        if (!manifest_number(c, j, state, state_numbers[i].name, state_numbers[i].least, number_of(&c->state, &state_numbers[i]))) return false;
    for (int i = 0; i < MODEL_NUMBERS; i++)
        if (!manifest_number(c, j, model, model_numbers[i].name, model_numbers[i].least, number_of(&c->model, &model_numbers[i]))) return false;
    int tied = manifest_find(c, j, model, "tie_word_embeddings", JSON_BOOL);
    if (tied < 0) return false;
    c->model.tie_word_embeddings = j->node[tied].truth;
    if (!manifest_real(c, j, model, "layer_norm_epsilon", &c->model.layer_norm_epsilon) ||
        !manifest_real(c, j, state, "loss_scale", &c->state.loss_scale) ||
        !manifest_hex(c, j, state, "seed", 16, &c->state.seed) || !manifest_hex(c, j, state, "data_fingerprint", 16, &c->state.data_fingerprint) ||
        !manifest_number(c, j, 0, "world", 1, &world) || !manifest_lists(c, j) || !manifest_config(c, j, text)) return false;
    return world == c->n_shards || checkpoint_bad(c, MANIFEST_FILE ": %d shards of %" PRId64 " ranks", c->n_shards, world);
}

static bool manifest_read(Checkpoint *c) {
    int64_t bytes;
    int fd = stored_open(c, MANIFEST_FILE, &bytes);
    if (fd < 0) return false;
    char last[48], expected[48];
    int64_t last_bytes = snprintf(last, sizeof last, MANIFEST_LAST_LINE, 0u);
    bool good = bytes > last_bytes && bytes <= MANIFEST_BYTES_MAX;
    if (!good)
        checkpoint_bad(c, MANIFEST_FILE ": has %" PRId64 " bytes; allowed are %" PRId64 " to %" PRId64, bytes, last_bytes + 1, MANIFEST_BYTES_MAX);
    char *text = good ? (char *)host_alloc((size_t)bytes + 1) : NULL;
    good = good && stored_read(c, MANIFEST_FILE, fd, text, bytes, 0);
    close(fd);
    if (good) {
        c->manifest_crc = crc32c_extend(0, text, (size_t)(bytes - last_bytes));
        snprintf(expected, sizeof expected, MANIFEST_LAST_LINE, c->manifest_crc);
        if (memcmp(text + bytes - last_bytes, expected, (size_t)last_bytes) != 0)
            good = checkpoint_bad(c, MANIFEST_FILE ": its checksum (last line) does not match: the file is damaged or was edited");
    }
    Json j;
    if (good && !json_parse(&j, text, bytes, JSON_STRICT)) good = checkpoint_bad(c, MANIFEST_FILE ":%d: %s", j.line, j.error);
    else if (good) {
        good = manifest_members(c, &j, text);
        json_free(&j);
    }
    free(text);
    return good;
}

// The table's entries, as those of this version. What they say is checked elsewhere.
static void stored_runs_unpack(const Checkpoint *c, StoredShard *s) {
    s->run = (ShardRun *)host_alloc(sizeof(ShardRun) * (size_t)s->n_runs);
    const ShardRange *range = (const ShardRange *)s->table;
    if (c->version > 1) memcpy(s->run, s->table, sizeof(ShardRun) * (size_t)s->n_runs);
    else for (int64_t i = 0; i < s->n_runs; i++) s->run[i] = {range[i].tensor, range[i].kind, range[i].global_offset, range[i].numel, 1, range[i].numel, range[i].data_offset};
}

// Does a run lie in its tensor, the next one in its shard, whose values before `at` are those of other runs?
static bool stored_run_fits(const Checkpoint *c, const StoredShard *s, const ShardRun *r, int64_t at) {
    if (r->tensor >= (uint32_t)c->n_tensors || r->kind >= (uint32_t)c->n_kinds) return false;
    const StoredTensor *t = &c->tensor[r->tensor];
    const int64_t width = t->shape[1];
    if (r->numel < 1 || r->count < 1 || r->global_offset < 0 || r->numel > t->numel || r->global_offset > t->numel - r->numel) return false;
    if (r->count == 1 ? r->stride != r->numel
                      : r->stride != width || r->numel > width - r->global_offset % width || r->count > t->shape[0] - r->global_offset / width) return false;
    return r->data_offset == at && r->numel * r->count <= (s->data_bytes - at) / 4; // at most the tensor's elements, as many as can be counted
}

// Reads the table of a shard whose header is sound. Its runs must tile its values.
static bool stored_shard_table(Checkpoint *c, StoredShard *s) {
    int64_t table_at = SHARD_ALIGN + s->data_bytes, table_bytes = s->file_bytes - table_at, at = 0;
    s->table = (unsigned char *)host_alloc((size_t)table_bytes);
    if (!stored_read(c, s->file, s->fd, s->table, table_bytes, table_at)) return false;
    if (crc32c_extend(0, s->table, (size_t)table_bytes) != s->table_crc)
        return checkpoint_bad(c, "%s: the checksum of its table does not match the manifest's", s->file);
    stored_runs_unpack(c, s);
    s->piece_crc = (const uint32_t *)(s->table + s->n_runs * stored_run_bytes(c->version));
    for (int64_t i = 0; i < s->n_runs; i++) {
        const ShardRun *r = &s->run[i];
        if (!stored_run_fits(c, s, r, at))
            return checkpoint_bad(c, "%s: run %" PRId64 " of its table (tensor %u, kind %u, %" PRId64 " x %" PRId64 " elements from %" PRId64 ", %" PRId64 " apart, at byte %" PRId64 ") is impossible",
                                  s->file, i, r->tensor, r->kind, r->count, r->numel, r->global_offset, r->stride, r->data_offset);
        at += r->numel * r->count * 4;
    }
    return at == s->data_bytes || checkpoint_bad(c, "%s: its runs cover %" PRId64 " of %" PRId64 " bytes of values", s->file, at, s->data_bytes);
}

// Opens a shard and reads its header and table.
static bool stored_shard_open(Checkpoint *c, int rank) {
    StoredShard *s = &c->shard[rank];
    int64_t bytes;
    s->fd = stored_open(c, s->file, &bytes);
    if (s->fd < 0) return false;
    if (bytes != s->file_bytes) return checkpoint_bad(c, "%s: has %" PRId64 " bytes, but the manifest says %" PRId64, s->file, bytes, s->file_bytes);
    if (bytes < SHARD_ALIGN) return checkpoint_bad(c, "%s: %" PRId64 " bytes hold no header", s->file, bytes);
    s->piece = (unsigned char *)host_alloc((size_t)max_i64(PIECE_BYTES, SHARD_ALIGN));
    if (!stored_read(c, s->file, s->fd, s->piece, SHARD_ALIGN, 0)) return false;
    const ShardHeader *h = (const ShardHeader *)s->piece;
    if (memcmp(h->magic, SHARD_MAGIC, sizeof h->magic) != 0)
        return checkpoint_bad(c, "%s: is no shard of a checkpoint (its first bytes are not " SHARD_MAGIC ")", s->file);
    if (h->byte_order != SHARD_BYTE_ORDER)
        return checkpoint_bad(c, "%s: byte-order mark 0x%08x; this machine reads 0x%08x", s->file, h->byte_order, SHARD_BYTE_ORDER);
    if (h->version != (uint32_t)c->version) return checkpoint_bad(c, "%s: version %u; the manifest's is %d", s->file, h->version, c->version);
    if (h->crc != crc32c_extend(0, h, offsetof(ShardHeader, crc))) return checkpoint_bad(c, "%s: the checksum of its header does not match", s->file);
    if (h->step != c->state.step || h->rank != rank || h->world != c->n_shards)
        return checkpoint_bad(c, "%s: belongs to rank %" PRId64 " of %" PRId64 " at step %" PRId64 ", not to rank %d of %d at step %" PRId64,
                              s->file, h->rank, h->world, h->step, rank, c->n_shards, c->state.step);
    s->data_bytes = h->data_bytes;
    s->n_runs = h->n_runs;
    if (s->data_bytes < 0 || s->data_bytes > bytes - SHARD_ALIGN || s->data_bytes % 4 || s->n_runs < 0 || s->n_runs > STORED_RUNS_MAX ||
        h->file_bytes != bytes ||
        stored_shard_file_bytes(c->version, s->data_bytes, s->n_runs) != bytes)
        return checkpoint_bad(c, "%s: %" PRId64 " bytes of values and %" PRId64 " runs do not fit into its %" PRId64 " bytes", s->file,
                              s->data_bytes, s->n_runs, bytes);
    return stored_shard_table(c, s);
}

// Do the runs of one kind of a tensor hold each of its elements exactly once?
static bool runs_cover(Checkpoint *c, int kind, int tensor) {
    const StoredTensor *t = &c->tensor[tensor];
    const int64_t *first = &c->first_run[(int64_t)kind * c->n_tensors + tensor], n_runs = first[1] - first[0];
    RunBlock *block = (RunBlock *)host_alloc(sizeof(RunBlock) * (size_t)(RUN_BLOCKS_MAX * n_runs + 1));
    int64_t n = 0;
    for (int64_t i = first[0]; i < first[1]; i++) {
        const ShardRun *r = c->run[i].run;
        n += run_blocks(t->shape[1], r->global_offset, r->numel, r->count, block + n);
    }
    CoverStep *step = (CoverStep *)host_alloc(sizeof(CoverStep) * (size_t)(2 * n + 1));
    int64_t bad = blocks_cover(block, n, t->shape[0], t->shape[1], step);
    free(step);
    free(block);
    return bad < 0 || checkpoint_bad(c, "%s of tensor %s: elements from %" PRId64 " on are missing or stored twice", c->kind[kind], t->name, bad);
}

// Lists the runs of all shards by kind and tensor; together they must hold every element exactly once.
static bool runs_check(Checkpoint *c) {
    int64_t groups = (int64_t)c->n_kinds * c->n_tensors;
    for (int i = 0; i < c->n_shards; i++) c->n_runs += c->shard[i].n_runs;
    c->run = (StoredRun *)host_alloc(sizeof(StoredRun) * (size_t)c->n_runs);
    c->first_run = (int64_t *)host_alloc(sizeof(int64_t) * (size_t)(groups + 2));
    int64_t *next = c->first_run + 1; // of each group the place of its next run; in the end that is where the next group begins
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < c->n_shards; i++)
            for (int64_t k = 0; k < c->shard[i].n_runs; k++) {
                const ShardRun *r = &c->shard[i].run[k];
                int64_t group = (int64_t)r->kind * c->n_tensors + r->tensor;
                if (pass == 0) next[group + 1]++;
                else c->run[next[group]++] = {r, &c->shard[i]};
            }
        for (int64_t g = 0; g < groups && pass == 0; g++) next[g + 1] += next[g];
    }
    for (int kind = 0; kind < c->n_kinds; kind++)
        for (int tensor = 0; tensor < c->n_tensors; tensor++) if (!runs_cover(c, kind, tensor)) return false;
    return true;
}

// A folder whose name says a step is of that step.
static bool checkpoint_named(Checkpoint *c, const char *name) {
    int64_t step = step_of_name(name);
    char right[CHECKPOINT_NAME_MAX];
    step_name(right, c->state.step);
    return step < 0 || step == c->state.step || checkpoint_bad(c, MANIFEST_FILE ": is of step %" PRId64 ", not of the step in the folder's name; if somebody renamed the folder, name it %s", c->state.step, right);
}

// Opens the checkpoint `name` of a folder and checks everything but the values. False with the reason in c->why; to be
// freed in either case.
static bool checkpoint_read(Checkpoint *c, int folder, const char *name) {
    memset(c, 0, sizeof *c);
    c->fd = openat(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (c->fd < 0) return checkpoint_bad(c, "%s", errno == ELOOP ? "is a symbolic link" : errno == ENOTDIR ? "is not a folder" : errno == EBADF ? "the folder that it lies in cannot be opened" : strerror(errno));
    if (!manifest_read(c)) return false;
    if (!checkpoint_named(c, name)) return false;
    for (int i = 0; i < c->n_shards; i++) if (!stored_shard_open(c, i)) return false;
    return runs_check(c);
}

// Says which bytes, and so which tensors, a damaged piece holds.
static bool piece_bad(Checkpoint *c, const StoredShard *s, int64_t start, int64_t length) {
    int64_t first = 0, last;
    while (s->run[first].data_offset + 4 * s->run[first].numel * s->run[first].count <= start) first++;
    for (last = first; last + 1 < s->n_runs && s->run[last + 1].data_offset < start + length;) last++;
    const ShardRun *a = &s->run[first], *b = &s->run[last];
    return checkpoint_bad(c, "%s: the checksum of bytes %" PRId64 " to %" PRId64 " does not match: %s of tensor %s to %s of tensor %s",
                          s->file, SHARD_ALIGN + start,
                          SHARD_ALIGN + start + length - 1, c->kind[a->kind], c->tensor[a->tensor].name, c->kind[b->kind], c->tensor[b->tensor].name);
}

// Reads bytes [offset, offset + bytes) of a shard's values. Every piece is checked when it is read.
static bool stored_shard_values(Checkpoint *c, StoredShard *s, void *dst, int64_t bytes, int64_t offset) {
    char *out = (char *)dst;
    while (bytes > 0) {
        int64_t piece = offset / PIECE_BYTES, start = piece * PIECE_BYTES, length = min_i64(PIECE_BYTES, s->data_bytes - start);
        if (piece != s->piece_at) {
            s->piece_at = -1;
            if (!stored_read(c, s->file, s->fd, s->piece, length, SHARD_ALIGN + start)) return false;
            if (crc32c_extend(0, s->piece, (size_t)length) != s->piece_crc[piece])
                return piece_bad(c, s, start, length);
            s->piece_at = piece;
        }
        int64_t n = min_i64(bytes, start + length - offset);
        memcpy(out, s->piece + (offset - start), (size_t)n);
        out += n; offset += n; bytes -= n;
    }
    return true;
}

// Reads part `part` of `parts` of all values once: their checksums must match and none may be NaN. The parts are ranges of
// bytes, shard after shard, so that ranks which come back in the layout of the save check what they will read. The runs
// tile the files, so together the parts leave no piece out.
static bool values_check(Checkpoint *c, int part, int parts) {
    float *values = (float *)host_alloc((size_t)PIECE_BYTES);
    int64_t total = 0, before = 0; // elements: of all shards, and of those already passed
    bool good = true;
    for (int i = 0; i < c->n_shards; i++) total += c->shard[i].data_bytes / 4;
    int64_t from = (int64_t)((__int128)total * part / parts), to = (int64_t)((__int128)total * (part + 1) / parts);
    for (int i = 0; i < c->n_shards && good; i++) {
        StoredShard *s = &c->shard[i];
        for (int64_t k = 0; k < s->n_runs && good; k++) {
            const ShardRun *r = &s->run[k];
            int64_t start = before + r->data_offset / 4, first = max_i64(0, from - start), last = min_i64(r->numel * r->count, to - start);
            for (int64_t n; first < last && good; first += n) {
                n = min_i64(last - first, PIECE_BYTES / 4);
                good = stored_shard_values(c, s, values, n * 4, r->data_offset + first * 4);
                int64_t bad = good ? first_bad_value(values, n, (int)r->kind) : -1;
                if (bad >= 0)
                    good = checkpoint_bad(c, "%s: %s of tensor %s is %s at element %" PRId64, s->file, c->kind[r->kind], c->tensor[r->tensor].name,
                                          isnan(values[bad]) ? "NaN" : "infinite", r->global_offset + (first + bad) / r->numel * r->stride + (first + bad) % r->numel);
            }
        }
        before += s->data_bytes / 4;
    }
    free(values);
    return good;
}

// Reads what one block of a stored run and one of those wanted share. Where both have whole rows, and so without gaps, in one piece.
static bool stored_block_read(Checkpoint *c, const StoredRun *s, const RunBlock *stored, const RunBlock *wanted, float *values) {
    RunBlock both;
    if (!run_block_meet(stored, wanted, &both)) return true;
    bool whole = both.columns == stored->columns && both.columns == wanted->columns;
    int64_t rows = whole ? 1 : both.rows, numel = whole ? both.rows * both.columns : both.columns;
    for (int64_t i = 0; i < rows; i++) {
        int64_t from = run_block_place(stored, both.row + i, both.column), to = run_block_place(wanted, both.row + i, both.column);
        if (!stored_shard_values(c, s->shard, values + to, numel * 4, s->run->data_offset + from * 4)) return false;
    }
    return true;
}

// Puts one kind of a tensor's elements together, those of `n` wanted runs, from the runs that hold them, wherever they lie; in `values`
// they follow each other from the first run's first on. One stored run after the other, so that a shard is read from front to back.
static bool stored_values_read(Checkpoint *c, int tensor, int kind, const ParamRun *want, int n, float *values) {
    const int64_t *first = &c->first_run[(int64_t)kind * c->n_tensors + tensor], width = c->tensor[tensor].shape[1];
    for (int64_t i = first[0]; i < first[1]; i++) {
        const ShardRun *r = c->run[i].run;
        RunBlock stored[RUN_BLOCKS_MAX], wanted[RUN_BLOCKS_MAX];
        int n_stored = run_blocks(width, r->global_offset, r->numel, r->count, stored);
        for (int w = 0; w < n; w++) {
            int n_wanted = run_blocks(width, want[w].global_offset, want[w].numel, want[w].count, wanted);
            for (int k = 0; k < n_stored * n_wanted; k++)
                if (!stored_block_read(c, &c->run[i], &stored[k / n_wanted], &wanted[k % n_wanted], values + want[w].local_first - want[0].local_first)) return false;
        }
    }
    return true;
}

// Complete as far as can be seen without reading values: what retention counts and may delete.
static bool checkpoint_looks_complete(int folder, const char *name) {
    Checkpoint c;
    bool good = checkpoint_read(&c, folder, name);
    checkpoint_free(&c);
    return good;
}

// ---------------------------------------------------------------------------------------------------------------
// Composing

// What the manifest says about a shard.
typedef struct {
    char file[32];
    int64_t bytes;
    uint32_t table_crc;
} ShardRecord;

static void manifest_print_real(FILE *f, const char *key, double value) {
    char text[40];
    snprintf(text, sizeof text, "%.17g", value);
    for (char *p = text; *p; p++) if (*p == ',') *p = '.'; // some library may have set a locale with a decimal comma
    fprintf(f, "\"%s\": %s", key, text);
}

// The text of the manifest, to be freed; its length in *bytes.
static char *manifest_compose(const TrainingState *state, const CheckpointTensors *t, const ShardRecord *shard, int n_shards, int64_t *bytes) {
    char *text = NULL, last[48];
    size_t length = 0;
    FILE *f = open_memstream(&text, &length);
    if (!f) die(EXIT_INTERNAL, "out of host memory for the manifest of a checkpoint");
    CHECK(isfinite(state->loss_scale), "loss scale %g", state->loss_scale);
    fprintf(f, "{\n\"format\": \"" CHECKPOINT_FORMAT "\",\n\"version\": %d,\n\"world\": %d,\n\"state\": {", CHECKPOINT_VERSION, n_shards);
    for (int i = 0; i < STATE_NUMBERS; i++) fprintf(f, "\"%s\": %" PRId64 ", ", state_numbers[i].name, *number_of(state, &state_numbers[i]));
    manifest_print_real(f, "loss_scale", state->loss_scale);
    fprintf(f, ", \"seed\": \"%016" PRIx64 "\", \"data_fingerprint\": \"%016" PRIx64 "\"},\n\"model\": {", state->seed, state->data_fingerprint);
    for (int i = 0; i < MODEL_NUMBERS; i++) fprintf(f, "\"%s\": %" PRId64 ", ", model_numbers[i].name, *number_of(t->model, &model_numbers[i]));
    manifest_print_real(f, "layer_norm_epsilon", t->model->layer_norm_epsilon);
    fprintf(f, ", \"tie_word_embeddings\": %s},\n\"kinds\": [", t->model->tie_word_embeddings ? "true" : "false");
    for (int k = 0; k < t->n_kinds; k++) {
        CHECK(name_is_plain(t->kind[k], "_") && strlen(t->kind[k]) < sizeof ((Checkpoint *)0)->kind[0], "kind %s", t->kind[k]);
        fprintf(f, "%s{\"name\": \"%s\", \"dtype\": \"fp32\"}", k ? ", " : "", t->kind[k]);
    }
    fprintf(f, "],\n\"tensors\": [");
    const char *comma = "";
    for (int row = 0; row < t->table->n_rows; row++) {
        const ParamDesc *r = &t->table->row[row];
        if (r->tied_to >= 0) continue;
        CHECK(name_is_plain(r->name, "._-"), "name of tensor %s", r->name);
        fprintf(f, "%s\n{\"name\": \"%s\", \"shape\": [%" PRId64, comma, r->name, r->shape[0]);
        if (r->ndim == 2) fprintf(f, ", %" PRId64, r->shape[1]);
        fprintf(f, "]}");
        comma = ",";
    }
    fprintf(f, "],\n\"shards\": [");
    for (int i = 0; i < n_shards; i++)
        fprintf(f, "%s\n{\"file\": \"%s\", \"bytes\": %" PRId64 ", \"table_crc32c\": \"%08x\"}", i ? "," : "", shard[i].file,
                shard[i].bytes, shard[i].table_crc);
    fprintf(f, "],\n");
    if (state->config) fprintf(f, "\"config_ranks\": %" PRId64 ",\n\"config\": %s,\n", state->config_ranks, state->config);
    fflush(f);
    snprintf(last, sizeof last, MANIFEST_LAST_LINE, crc32c_extend(0, text, length));
    fputs(last, f);
    if (fclose(f) != 0) die(EXIT_INTERNAL, "out of host memory for the manifest of a checkpoint");
    CHECK((int64_t)length <= MANIFEST_BYTES_MAX, "manifest of %zu bytes", length);
    *bytes = (int64_t)length;
    return text;
}
