// model.cu - architectures as data: which parameters and activations a model has, and forward and backward of a unit.
//
// A model is a chain of units: the embedding (0), the blocks (1..L), the head (L+1). A unit is what the trainer shards,
// fetches, recomputes and offloads as a whole. Between units flows one tensor, the residual stream x (B,T,C):
//
//     tokens -> [embed] -> x -> [block] -> x -> ... -> [block] -> x -> [head] -> loss
//
// This file sees pointers and local shapes only. It does not know how weights are distributed, where gradients go,
// which activations are kept: unit_forward and unit_backward receive Weights, Grads and Acts filled by zero.cu and acts.cu. It
// must never include either. Where a unit needs what other ranks compute, a pair of tensor_parallel.cu is named, which is the
// identity when there are none.
//
// To add an architecture: a row in arch_specs, which model_arch has to choose. With a new part: an enum value, its rows in
// model_build_table and act_descs, and its branch in the block and the head, which take for granted what has one kind only;
// and what the files of others call it (huggingface*.cu). Read next: zero.cu.
#pragma once
#include "dsconfig.h"
#include "tensor_parallel.cu"
#include "runtime/graphs.h"

// ---------------------------------------------------------------------------------------------------------------
// Architectures

typedef enum { NORM_LAYERNORM } NormKind;
typedef enum { POSITION_LEARNED } PositionKind;
typedef enum { MLP_GELU_TANH } MlpKind;

// What makes one family of models different from another.
typedef struct {
    const char *name;      // model_type of Hugging Face's config.json
    NormKind norm;
    PositionKind position;
    MlpKind mlp;
    bool bias;             // linear layers carry a bias
} ArchSpec;

static const ArchSpec arch_specs[] = {
    {"gpt2", NORM_LAYERNORM, POSITION_LEARNED, MLP_GELU_TANH, true},
};

// ---------------------------------------------------------------------------------------------------------------
// The table of parameters

typedef enum { UNIT_EMBED, UNIT_BLOCK, UNIT_HEAD } UnitKind;
typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL } InitKind;

// How the ranks of tensor parallelism share a parameter.
typedef enum {
    SPLIT_NONE,    // each holds all of it
    SPLIT_ROWS,    // ranges of output features, of each section
    SPLIT_COLUMNS, // ranges of input features
} SplitKind;

// The part that a parameter plays in its unit: Weights and Grads are indexed by it. A role that the architecture lacks
// stays "not given".
typedef enum {
    EMBED_WTE = 0, EMBED_WPE,
    BLOCK_LN_1_W = 0, BLOCK_LN_1_B, BLOCK_QKV_W, BLOCK_QKV_B, BLOCK_PROJ_W, BLOCK_PROJ_B,
    BLOCK_LN_2_W, BLOCK_LN_2_B, BLOCK_FC_W, BLOCK_FC_B, BLOCK_FCPROJ_W, BLOCK_FCPROJ_B,
    HEAD_LN_F_W = 0, HEAD_LN_F_B, HEAD_W,
    ROLES_MAX = 12,
} ParamRole;

// One row of the table of parameters: everything that the trainer knows about a tensor of weights. Whatever concerns
// "all weights" (initialisation, decay, sharding, checkpoints, import and export) loops over these rows.
typedef struct {
    char name[64];        // key in checkpoints: "wte.weight", "h.3.attn.c_attn.bias"
    int unit;             // index into ParamTable.unit
    int role;             // ParamRole within its unit
    int ndim;             // 1 or 2
    int64_t shape[2];     // global: (OC, C) for a matrix, rows are output features; (C, 1) for a vector
    SplitKind split;
    int sections;         // SPLIT_ROWS: equal parts that are split each for itself, one behind the other (q, k and v)
    int64_t local[2];     // rows and columns in this rank's buffer; rows beyond shape[0] stay zero (padding of the vocabulary)
    InitKind init;
    double std;           // of INIT_NORMAL
    bool decay;           // weight decay applies: matrices only
    bool hf_transposed;   // Hugging Face stores (C, OC)
    int tied_to;          // row that this one is the same tensor as, the same on all ranks; or -1
    int storage;          // row in whose place this rank holds it: itself, or tied_to where that one is held here
    int64_t offset;       // elements from the start of its unit's buffer
    int64_t numel;        // elements in the buffer, local[0] * local[1]; 0 if it lies elsewhere
} ParamDesc;

typedef struct {
    UnitKind kind;
    int stage;            // of the pipeline: its ranks compute with the unit
    bool held;            // this rank is one of them; otherwise the unit has no buffers here
    int first_row, n_rows;
    int64_t numel;        // length of its flat buffers: its rows, each rounded up to ROW_ALIGN elements; 0 if not held
    int64_t decay_numel;  // rows with decay come first in the buffer: elements [0, decay_numel) decay
    int64_t split_numel;  // elements [split_numel, numel) are the same on all ranks of tensor parallelism
    int64_t twin_numel;   // elements [0, twin_numel) are, on another stage of the pipeline, another unit's as well (tied); or 0
} UnitDesc;

// Which part of the model a rank holds.
typedef struct {
    int tp, tp_rank;      // tensor parallelism: number of ranks, and which one
    int pp_rank;          // stage of the pipeline
    const int *stage;     // (n_units) where each unit is; null: all on stage 0
} ModelPart;

static const ModelPart model_whole = {1, 0, 0, NULL};

typedef struct {
    int n_rows, n_units;
    int tp, tp_rank;
    ParamDesc *row;
    UnitDesc *unit;       // 0 = embedding, 1..L = blocks, L+1 = head
} ParamTable;

// Rows start at multiples of this many elements: 128 bytes in 16 bits, so that any kernel may use vector loads.
enum { ROW_ALIGN = 64 };
// The vocabulary is padded to a multiple of this, a tile of the matrix product; the padding takes no part in anything.
enum { VOCAB_ALIGN = 128 };

static int64_t vocab_padded(int64_t V, int tp) { return round_up(V, VOCAB_ALIGN * tp); }

static const ArchSpec *model_arch(const ModelConfig *m) { (void)m; return &arch_specs[0]; }

static ParamDesc *table_add(ParamTable *p, int unit, int role, const char *name, int64_t rows, int64_t columns, InitKind init, double std) {
    ParamDesc *r = &p->row[p->n_rows++];
    memset(r, 0, sizeof *r);
    CHECK(p->unit[unit].n_rows < ROLES_MAX && role < ROLES_MAX, "too many rows in unit %d", unit);
    CHECK(strlen(name) < sizeof r->name, "name %s too long", name);
    strncpy(r->name, name, sizeof r->name - 1);
    r->unit = unit;
    r->role = role;
    r->ndim = columns ? 2 : 1;
    r->shape[0] = r->local[0] = rows;
    r->shape[1] = r->local[1] = columns ? columns : 1;
    r->sections = 1;
    r->init = init;
    r->std = std;
    r->decay = r->ndim == 2;
    r->tied_to = -1;
    if (p->unit[unit].n_rows++ == 0) p->unit[unit].first_row = p->n_rows - 1;
    return r;
}

static void table_split(const ParamTable *p, ParamDesc *r, SplitKind split, int sections) {
    r->split = split;
    r->sections = sections;
    if (split != SPLIT_NONE) r->local[split == SPLIT_COLUMNS] /= p->tp;
}

// The vocabulary's table, and the head: rows are shared out after padding.
static void table_split_vocabulary(const ParamTable *p, ParamDesc *r) {
    r->local[0] = vocab_padded(r->shape[0], p->tp);
    table_split(p, r, SPLIT_ROWS, 1);
}

// A linear layer of the block: weight (OC, C) and, where the architecture has them, bias. Split by columns, every rank of tensor
// parallelism has a summand of the output, to which the bias is added once.
static void table_add_linear(ParamTable *p, const ArchSpec *arch, int unit, int role, const char *name, int64_t OC, int64_t C, SplitKind split, int sections, double std) {
    char text[80];
    snprintf(text, sizeof text, "%s.weight", name);
    ParamDesc *weight = table_add(p, unit, role, text, OC, C, INIT_NORMAL, std);
    weight->hf_transposed = true;
    table_split(p, weight, split, sections);
    if (!arch->bias) return;
    snprintf(text, sizeof text, "%s.bias", name);
    table_split(p, table_add(p, unit, role + 1, text, OC, 0, INIT_ZERO, 0), split == SPLIT_ROWS ? SPLIT_ROWS : SPLIT_NONE, sections);
}

static void table_add_norm(ParamTable *p, int unit, int role, const char *name, int64_t C) {
    char text[80];
    snprintf(text, sizeof text, "%s.weight", name);
    table_add(p, unit, role, text, C, 0, INIT_ONE, 0);
    snprintf(text, sizeof text, "%s.bias", name);
    table_add(p, unit, role + 1, text, C, 0, INIT_ZERO, 0);
}

// Gives every row its place: in each unit, rows that decay first, then the others, so that an update of any range of a
// unit is at most two launches; and what tensor parallelism splits before what it does not.
static void table_layout_unit(ParamTable *p, UnitDesc *unit) {
    int64_t at = 0;
    unit->split_numel = -1;
    for (int pass = 0; pass < 4 && unit->held; pass++) {
        for (int i = unit->first_row; i < unit->first_row + unit->n_rows; i++) {
            ParamDesc *r = &p->row[i];
            if (r->storage != i || r->decay != (pass < 2) || (r->split != SPLIT_NONE) != (pass % 2 == 0)) continue;
            CHECK(unit->split_numel < 0 || r->split == SPLIT_NONE, "%s is split, and lies behind what is not", r->name);
            if (r->split == SPLIT_NONE && unit->split_numel < 0) unit->split_numel = at;
            r->offset = at;
            r->numel = r->local[0] * r->local[1];
            at = round_up(at + r->numel, ROW_ALIGN);
        }
        if (pass == 1) unit->decay_numel = at;
    }
    unit->numel = at;
    if (unit->split_numel < 0) unit->split_numel = at;
}

// A tied table whose two units are on different stages of the pipeline exists on both. Its rows come first in both units, which
// get the same length, so that a shard of one is the same range of the table as that of the other.
static void table_layout_twins(ParamTable *p, const ParamDesc *head) {
    const ParamDesc *owner = &p->row[head->tied_to];
    UnitDesc *a = &p->unit[owner->unit], *b = &p->unit[head->unit];
    if (a->held && b->held) return;
    int64_t numel[2] = {0, 0}; // of either, if it were held
    const UnitDesc *unit[2] = {a, b};
    for (int k = 0; k < 2; k++)
        for (int i = unit[k]->first_row; i < unit[k]->first_row + unit[k]->n_rows; i++) numel[k] += round_up(p->row[i].local[0] * p->row[i].local[1], ROW_ALIGN);
    UnitDesc *mine = a->held ? a : b->held ? b : NULL;
    if (!mine) return;
    mine->numel = max_i64(numel[0], numel[1]);
    mine->twin_numel = round_up(owner->local[0] * owner->local[1], ROW_ALIGN);
}

static void table_layout(ParamTable *p) {
    for (int i = 0; i < p->n_rows; i++) {
        ParamDesc *r = &p->row[i];
        r->storage = r->tied_to >= 0 && p->unit[p->row[r->tied_to].unit].held ? r->tied_to : i;
    }
    for (int u = 0; u < p->n_units; u++) table_layout_unit(p, &p->unit[u]);
    for (int i = 0; i < p->n_rows; i++) if (p->row[i].tied_to >= 0) table_layout_twins(p, &p->row[i]);
}

// Builds the table for a resolved configuration (all sizes known). Initialisation as GPT-2: normal 0.02, projections
// into the residual stream scaled by 1/sqrt(2L) (Radford et al. 2019, section 2.3).
static void model_build_table(ParamTable *p, const ModelConfig *m, ModelPart part) {
    const ArchSpec *arch = model_arch(m);
    int64_t L = m->n_layer, C = m->n_embd, F = m->n_inner;
    double std = 0.02, residual_std = 0.02 / sqrt(2.0 * (double)L);
    p->n_units = (int)L + 2;
    p->n_rows = 0;
    p->tp = part.tp;
    p->tp_rank = part.tp_rank;
    p->unit = (UnitDesc *)host_alloc(sizeof(UnitDesc) * (size_t)p->n_units);
    p->row = (ParamDesc *)host_alloc(sizeof(ParamDesc) * (size_t)(ROLES_MAX * p->n_units));
    for (int u = 0; u < p->n_units; u++) {
        p->unit[u].stage = part.stage ? part.stage[u] : 0;
        p->unit[u].held = p->unit[u].stage == part.pp_rank;
    }

    p->unit[0].kind = UNIT_EMBED;
    table_split_vocabulary(p, table_add(p, 0, EMBED_WTE, "wte.weight", m->vocab_size, C, INIT_NORMAL, std));
    table_add(p, 0, EMBED_WPE, "wpe.weight", m->n_positions, C, INIT_NORMAL, std);
    for (int l = 0; l < (int)L; l++) {
        int u = l + 1;
        char name[64];
        p->unit[u].kind = UNIT_BLOCK;
        snprintf(name, sizeof name, "h.%d.ln_1", l);
        table_add_norm(p, u, BLOCK_LN_1_W, name, C);
        snprintf(name, sizeof name, "h.%d.attn.c_attn", l);
        table_add_linear(p, arch, u, BLOCK_QKV_W, name, 3 * C, C, SPLIT_ROWS, 3, std);
        snprintf(name, sizeof name, "h.%d.attn.c_proj", l);
        table_add_linear(p, arch, u, BLOCK_PROJ_W, name, C, C, SPLIT_COLUMNS, 1, residual_std);
        snprintf(name, sizeof name, "h.%d.ln_2", l);
        table_add_norm(p, u, BLOCK_LN_2_W, name, C);
        snprintf(name, sizeof name, "h.%d.mlp.c_fc", l);
        table_add_linear(p, arch, u, BLOCK_FC_W, name, F, C, SPLIT_ROWS, 1, std);
        snprintf(name, sizeof name, "h.%d.mlp.c_proj", l);
        table_add_linear(p, arch, u, BLOCK_FCPROJ_W, name, C, F, SPLIT_COLUMNS, 1, residual_std);
    }
    int head = (int)L + 1;
    p->unit[head].kind = UNIT_HEAD;
    table_add_norm(p, head, HEAD_LN_F_W, "ln_f", C);
    ParamDesc *w = table_add(p, head, HEAD_W, "lm_head.weight", m->vocab_size, C, INIT_NORMAL, std);
    table_split_vocabulary(p, w);
    if (m->tie_word_embeddings) w->tied_to = 0;
    table_layout(p);
}

static void table_free(ParamTable *p) {
    free(p->unit);
    free(p->row);
}

// Elements of a tensor as the world sees it, without padding.
static int64_t param_numel(const ParamDesc *r) { return r->shape[0] * r->shape[1]; }

// Trained parameters: every stored row once, without padding.
static int64_t table_param_count(const ParamTable *p) {
    int64_t n = 0;
    for (int i = 0; i < p->n_rows; i++) if (p->row[i].tied_to < 0) n += param_numel(&p->row[i]);
    return n;
}

// Elements of a row's part on rank tp_rank of tensor parallelism, without padding: the first so many of its buffer.
static int64_t param_part_numel(const ParamDesc *r, int tp_rank) {
    if (r->split != SPLIT_ROWS || r->sections > 1) return r->local[0] * r->local[1];
    return min_i64(max_i64(r->shape[0] - tp_rank * r->local[0], 0), r->local[0]) * r->local[1]; // padding is the last ranks'
}

// The same of what this rank holds.
static int64_t param_local_numel(const ParamTable *p, const ParamDesc *r) { return r->numel ? param_part_numel(r, p->tp_rank) : 0; }

// A range of the elements of a row's part on one rank, as the tensor has them: `count` pieces of `numel` elements, the first one at
// `global_offset` (row-major, no padding), each `stride` after the one before. Where the rank has them they follow each other
// without gaps, from `local_first` on.
typedef struct {
    int64_t local_first, global_offset, numel, count, stride;
} ParamRun;

enum { PARAM_RUNS_MAX = 3 }; // q, k and v; or a first and a last row of which only a part is meant, and those between

static int param_run_add(ParamRun *run, int n, int64_t local_first, int64_t global_offset, int64_t numel, int64_t count, int64_t stride) {
    if (numel <= 0 || count <= 0) return n;
    if (count == 1) stride = numel;
    run[n] = {local_first, global_offset, numel, count, stride};
    return n + 1;
}

// Elements [first, last) of a row's part on rank tp_rank of tensor parallelism, cut into runs in ascending order; returns how many.
static int param_runs(const ParamDesc *r, int tp_rank, int64_t first, int64_t last, ParamRun run[PARAM_RUNS_MAX]) {
    int n = 0;
    last = min_i64(last, param_part_numel(r, tp_rank));
    if (first >= last) return 0;
    if (r->split == SPLIT_COLUMNS && r->local[1] < r->shape[1]) {
        const int64_t columns = r->local[1], stride = r->shape[1], start = tp_rank * columns, first_row = ceil_div(first, columns), last_row = last / columns;
        if (first_row > last_row) return param_run_add(run, n, first, first / columns * stride + start + first % columns, last - first, 1, 0); // inside one
        if (first % columns) n = param_run_add(run, n, first, first / columns * stride + start + first % columns, first_row * columns - first, 1, 0);
        n = param_run_add(run, n, first_row * columns, first_row * stride + start, columns, last_row - first_row, stride);
        return param_run_add(run, n, last_row * columns, last_row * stride + start, last - last_row * columns, 1, 0);
    }
    if (r->split != SPLIT_ROWS || r->local[0] >= r->shape[0]) return param_run_add(run, n, first, first, last - first, 1, 0);
    const int64_t section = r->local[0] / r->sections * r->local[1], whole = r->shape[0] / r->sections * r->shape[1];
    for (int k = 0; k < r->sections; k++) {
        int64_t from = max_i64(first, k * section), to = min_i64(last, (k + 1) * section);
        n = param_run_add(run, n, from, k * whole + tp_rank * section + from - k * section, to - from, 1, 0);
    }
    return n;
}

// Initial values of elements [from, from + n) (row-major in the global, unpadded tensor): functions of (seed, name, index) alone.
static void param_initial_values(const ParamTable *p, const ParamDesc *r, uint64_t seed, int64_t from, int64_t n, float *values) {
    if (r->tied_to >= 0) r = &p->row[r->tied_to];
    const uint64_t purpose = text_hash(r->name);
    const double std = r->std;
    if (r->init == INIT_NORMAL) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) values[i] = (float)(std * rng_normal(seed, purpose, (uint64_t)(from + i)));
    } else
        for (int64_t i = 0; i < n; i++) values[i] = r->init == INIT_ONE ? 1.0f : 0.0f;
}

// ---------------------------------------------------------------------------------------------------------------
// The table of activations

// What a unit computes on its way; Acts is indexed by it.
typedef enum {
    ACT_LN_1, ACT_LN_1_MEAN, ACT_LN_1_RSTD, ACT_QKV, ACT_ATT, ACT_LSE, ACT_RESIDUAL_2, ACT_LN_2, ACT_LN_2_MEAN, ACT_LN_2_RSTD,
    ACT_FC_PRE, ACT_FC_GELU,
    ACT_LN_F, ACT_LN_F_MEAN, ACT_LN_F_RSTD, ACT_LOGITS, ACT_LOSSES,
    ACT_NARROW, ACT_WIDE, ACT_GATHERED, ACT_SUMMED, ACT_STATISTICS,
    ACT_DOUT, ACT_DFC, ACT_DRESIDUAL_2, ACT_DQKV,
    ACT_COUNT,
} ActRole;

typedef enum {
    ACT_SAVED,   // backward reads it: each unit and micro-batch in flight has its own
    ACT_SCRATCH, // dead when the unit's forward or backward returns: all units share one
    ACT_PENDING, // gradients that those of the weights are still to be computed from: only where backward is split in two phases
} ActKeep;

// Which tokens an activation has: of the N = B*T that the rank's micro-batch has, and that it shares with tp - 1 others,
typedef enum {
    ROWS_OWN,   // N / tp: what concerns a token by itself, all channels
    ROWS_ALL,   // N: channels, heads or columns of this rank
    ROWS_HEADS, // those of whole samples, B * T * sp, for 1/sp of the heads: attention
    ROWS_PIECE, // head_rows: the head works in pieces
} ActRows;

// Width of a row of an activation, as a count that depends on the model.
typedef enum { WIDTH_ONE, WIDTH_C, WIDTH_HEADS, WIDTH_3C, WIDTH_F, WIDTH_WIDE, WIDTH_VP, WIDTH_NH, WIDTH_STATISTICS } ActWidth;

typedef struct {
    const char *name;
    UnitKind unit;   // of ACT_SAVED rows; scratch belongs to all
    ActKeep keep;
    ActRows rows;
    ActWidth width;  // fp32 where the kernels say so
    bool is_fp32;
    RecomputePolicy recomputed_from; // of ACT_SAVED rows: from this policy on backward computes it again; RECOMPUTE_POLICIES: never
    bool for_weights; // of ACT_SAVED rows: the gradients of weights are computed from it
} ActDesc;

// The ladder of policies. Every step gives back more memory for more work, and the cheap ones come first: a norm is read and
// written once more, a GELU likewise, then products come, and attention last of all (Korthikanti et al. 2022; what each brings is
// in docs/memory.md). The statistics of norms and attention's lse are so small that they are kept to the last step.

// Indexed by ActRole.
static const ActDesc act_descs[ACT_COUNT] = {
    {"ln_1", UNIT_BLOCK, ACT_SAVED, ROWS_OWN, WIDTH_C, false, RECOMPUTE_NORMS, true},
    {"ln_1_mean", UNIT_BLOCK, ACT_SAVED, ROWS_OWN, WIDTH_ONE, true, RECOMPUTE_BLOCK, false},
    {"ln_1_rstd", UNIT_BLOCK, ACT_SAVED, ROWS_OWN, WIDTH_ONE, true, RECOMPUTE_BLOCK, false},
    {"qkv", UNIT_BLOCK, ACT_SAVED, ROWS_HEADS, WIDTH_3C, false, RECOMPUTE_QKV, false},
    {"att", UNIT_BLOCK, ACT_SAVED, ROWS_HEADS, WIDTH_HEADS, false, RECOMPUTE_BLOCK, true},
    {"lse", UNIT_BLOCK, ACT_SAVED, ROWS_HEADS, WIDTH_NH, true, RECOMPUTE_BLOCK, false},
    {"residual_2", UNIT_BLOCK, ACT_SAVED, ROWS_OWN, WIDTH_C, false, RECOMPUTE_BLOCK, false},
    {"ln_2", UNIT_BLOCK, ACT_SAVED, ROWS_OWN, WIDTH_C, false, RECOMPUTE_NORMS, true},
    {"ln_2_mean", UNIT_BLOCK, ACT_SAVED, ROWS_OWN, WIDTH_ONE, true, RECOMPUTE_BLOCK, false},
    {"ln_2_rstd", UNIT_BLOCK, ACT_SAVED, ROWS_OWN, WIDTH_ONE, true, RECOMPUTE_BLOCK, false},
    {"fc_pre", UNIT_BLOCK, ACT_SAVED, ROWS_ALL, WIDTH_F, false, RECOMPUTE_FFN, false},
    {"fc_gelu", UNIT_BLOCK, ACT_SAVED, ROWS_ALL, WIDTH_F, false, RECOMPUTE_GELU, true},
    {"ln_f", UNIT_HEAD, ACT_SAVED, ROWS_OWN, WIDTH_C, false, RECOMPUTE_POLICIES, false},
    {"ln_f_mean", UNIT_HEAD, ACT_SAVED, ROWS_OWN, WIDTH_ONE, true, RECOMPUTE_POLICIES, false},
    {"ln_f_rstd", UNIT_HEAD, ACT_SAVED, ROWS_OWN, WIDTH_ONE, true, RECOMPUTE_POLICIES, false},
    {"logits", UNIT_HEAD, ACT_SCRATCH, ROWS_PIECE, WIDTH_VP, false, RECOMPUTE_POLICIES, false}, // of head_rows rows, then their gradient
    {"losses", UNIT_HEAD, ACT_SAVED, ROWS_ALL, WIDTH_ONE, true, RECOMPUTE_POLICIES, false},
    {"narrow", UNIT_BLOCK, ACT_SCRATCH, ROWS_ALL, WIDTH_C, false, RECOMPUTE_POLICIES, false},   // output of a projection, or a gradient of width C
    {"wide", UNIT_BLOCK, ACT_SCRATCH, ROWS_ALL, WIDTH_WIDE, false, RECOMPUTE_POLICIES, false},  // gradient of qkv, or of the MLP's inner layer
    {"gathered", UNIT_BLOCK, ACT_SCRATCH, ROWS_ALL, WIDTH_C, false, RECOMPUTE_POLICIES, false}, // the tp ranks' rows together; none with one rank
    {"summed", UNIT_BLOCK, ACT_SCRATCH, ROWS_OWN, WIDTH_C, false, RECOMPUTE_POLICIES, false},   // own rows of a sum over them, where it comes in pieces
    {"statistics", UNIT_HEAD, ACT_SCRATCH, ROWS_PIECE, WIDTH_STATISTICS, true, RECOMPUTE_POLICIES, false}, // of the classifier, of all tp ranks; none with one
    {"dout", UNIT_BLOCK, ACT_PENDING, ROWS_OWN, WIDTH_C, false, RECOMPUTE_POLICIES, false},     // of the block's output
    {"dfc", UNIT_BLOCK, ACT_PENDING, ROWS_ALL, WIDTH_F, false, RECOMPUTE_POLICIES, false},      // of the MLP's inner layer, in `wide` where backward is one
    {"dresidual_2", UNIT_BLOCK, ACT_PENDING, ROWS_OWN, WIDTH_C, false, RECOMPUTE_POLICIES, false}, // of the stream between attention and MLP
    {"dqkv", UNIT_BLOCK, ACT_PENDING, ROWS_ALL, WIDTH_3C, false, RECOMPUTE_POLICIES, false},
};

// ---------------------------------------------------------------------------------------------------------------
// The model, and what a unit receives

typedef struct {
    const ArchSpec *arch;
    ModelConfig c;        // all sizes resolved
    DType dtype;          // of weights, activations and their gradients
    int64_t L, NH, C, F, V, Vp;
    int64_t logits_bytes; // most memory for logits, see head_rows
    bool gelu_apart;      // GELU is that of the rounded pre-activation, as a kernel of its own computes it; else what the product before it makes
    bool deterministic;   // gradients are the same bits in every run; kernels that would lose time by it may be told not to
    ParamTable table;
    Group tp, sp;         // ranks that share its matrices, and its sequences; of one rank by default
    TpOverlap overlap;    // of what the tp ranks exchange with what they compute; one piece by default
    Stream stream;        // where compute runs
    GraphCache *graphs;   // of units' forward and backward; null: their kernels are launched one by one
} Model;

typedef struct {
    Tensor t[ROLES_MAX];  // by ParamRole, dtype of the model; padded rows included
} Weights;

typedef struct {
    Tensor t[ROLES_MAX];        // by ParamRole, fp32; those of a block may have the model's dtype
    bool accumulate[ROLES_MAX]; // add to what is there, or overwrite
} Grads;

typedef enum {
    FORWARD_TRAIN,  // backward follows, and computes the losses
    FORWARD_EVAL,   // losses only
    FORWARD_LOGITS, // logits only, of head_rows rows: sampling. They stay until another unit computes
} ForwardMode;

typedef struct {
    int64_t B, T;             // T: tokens that this rank has of a sample
    ForwardMode mode;
    float dloss;              // gradient of the training loss with respect to one token's loss, loss scale included
    const int32_t *tokens;    // (B,T) in the backend's memory
    const int32_t *targets;   // (B,T); negative = no loss here
    int64_t first_logits;     // FORWARD_LOGITS: of the rows whose logits are wanted, head_rows
    Tensor x_in, x_out;       // residual stream before and after the unit, (B*T/tp,C); x_in is not given to the embedding
    Tensor dx;                // backward: gradient of x_out on entry, of x_in on return, (B*T/tp,C)
    Tensor act[ACT_COUNT];    // by ActRole
    RecomputePolicy recompute; // backward of a block: what is not there yet (act_descs)
} Acts;

static void model_init(Model *m, const ModelConfig *c, ModelPart part, DType dtype, int64_t logits_bytes, bool gelu_apart, Stream stream) {
    memset(m, 0, sizeof *m);
    m->c = *c;
    m->arch = model_arch(c);
    m->dtype = dtype;
    m->L = c->n_layer;
    m->NH = c->n_head;
    m->C = c->n_embd;
    m->F = c->n_inner;
    m->V = c->vocab_size;
    m->Vp = vocab_padded(c->vocab_size, part.tp);
    m->logits_bytes = logits_bytes;
    m->gelu_apart = gelu_apart;
    m->deterministic = true;
    m->stream = stream;
    m->tp.size = part.tp;
    m->tp.rank = part.tp_rank;
    m->sp.size = 1;
    m->overlap.pieces = 1;
    model_build_table(&m->table, c, part);
}

static void model_free(Model *m) { table_free(&m->table); }

// Rows of N whose logits exist at once: the largest power of two that fits logits_bytes, but at least a tile of the
// matrix product.
static int64_t head_rows(const Model *m, int64_t N) {
    int64_t rows = 128;
    while (2 * rows * m->Vp / m->tp.size * dtype_bytes(m->dtype) <= m->logits_bytes) rows *= 2;
    return min_i64(N, rows);
}

// Columns of a row, on this rank: heads, inner channels and the vocabulary are shared.
static int64_t act_columns(const Model *m, ActWidth width) {
    const int64_t tp = m->tp.size;
    switch (width) {
    case WIDTH_ONE: return 1;
    case WIDTH_C: return m->C;
    case WIDTH_HEADS: return m->C / tp;
    case WIDTH_3C: return 3 * m->C / tp;
    case WIDTH_F: return m->F / tp;
    case WIDTH_WIDE: return max_i64(3 * m->C, m->F) / tp;
    case WIDTH_VP: return m->Vp / tp;
    case WIDTH_NH: return m->NH / tp;
    case WIDTH_STATISTICS: return 3 * tp;
    }
    return 0;
}

// The tensor of an activation at `data` for a micro-batch of (B,T).
static Tensor act_tensor(const Model *m, ActRole role, int64_t B, int64_t T, void *data) {
    const ActDesc *d = &act_descs[role];
    const DType t = d->is_fp32 ? DTYPE_FP32 : m->dtype;
    const int64_t N = B * T, tp = m->tp.size, sp = m->sp.size, columns = act_columns(m, d->width);
    if ((role == ACT_GATHERED || role == ACT_STATISTICS) && tp == 1) return tensor_none();
    if (role == ACT_SUMMED && m->overlap.pieces == 1) return tensor_none();
    switch (d->rows) {
    case ROWS_OWN: return columns == 1 ? tensor1(data, t, N / tp) : tensor2(data, t, N / tp, columns);
    case ROWS_ALL: return columns == 1 ? tensor1(data, t, N) : tensor2(data, t, N, columns);
    case ROWS_HEADS: return d->width == WIDTH_NH ? tensor3(data, t, B, columns / sp, T * sp) : tensor3(data, t, B, T * sp, columns / sp);
    case ROWS_PIECE: return tensor2(data, t, head_rows(m, N), columns);
    }
    return tensor_none();
}

// The residual stream: this rank's rows.
static Tensor stream_tensor(const Model *m, int64_t B, int64_t T, void *data) { return tensor2(data, m->dtype, B * T / m->tp.size, m->C); }

// `columns` a row in a scratch tensor, behind `skip` such tensors.
static Tensor act_view(Tensor scratch, int64_t columns, int skip) {
    const int64_t rows = tensor_rows(scratch);
    CHECK(columns * (skip + 1) <= tensor_columns(scratch), "%" PRId64 " columns do not fit scratch of %" PRId64, columns * (skip + 1), tensor_columns(scratch));
    return tensor2((char *)scratch.data + skip * rows * columns * dtype_bytes(scratch.dtype), scratch.dtype, rows, columns);
}

// The same memory in another tensor's shape.
static Tensor act_shaped(Tensor scratch, Tensor as) {
    CHECK(tensor_numel(as) <= tensor_numel(scratch), "%" PRId64 " elements do not fit scratch of %" PRId64, tensor_numel(as), tensor_numel(scratch));
    as.data = scratch.data;
    return as;
}

// Tokens that one sees on average, W - W^2 / (2 T) with W = min(attention_window_size, T): without a window T / 2, half of the square.
static double attention_seen(const Model *m, int64_t T) {
    const double W = (double)(m->c.attention_window_size ? min_i64(m->c.attention_window_size, T) : T);
    return W - W * W / (2 * (double)T);
}

// Floating-point operations of one token's forward and backward: 6 for each weight that takes part in a matrix product
// (the position table does not; a tied token table once, as the head), and 12 C for each token that another one sees in a
// block (Chowdhery et al. 2022, appendix B).
static double model_flops_per_token(const Model *m, int64_t T) {
    double weights = 0;
    for (int i = 0; i < m->table.n_rows; i++) {
        const ParamDesc *r = &m->table.row[i];
        bool lookup = m->table.unit[r->unit].kind == UNIT_EMBED && (r->role == EMBED_WPE || !m->c.tie_word_embeddings);
        if (r->tied_to < 0 && !lookup) weights += (double)param_numel(r);
    }
    return 6.0 * weights + 12.0 * (double)m->L * attention_seen(m, T) * (double)m->C;
}

// The words of activation_checkpointing.policy.
static const char *const recompute_names[RECOMPUTE_POLICIES] = {"none", "norms", "gelu", "ffn", "qkv", "block"};

// Floating-point operations that a policy adds to one token of a block: the matrix products and attention of its forward that
// backward makes once more. Norms and GELU cost memory traffic instead (recompute_bytes_per_token).
static double recompute_flops_per_token(const Model *m, RecomputePolicy policy, int64_t T) {
    const double C = (double)m->C, F = (double)m->F;
    double flops = 0;
    if (act_descs[ACT_FC_PRE].recomputed_from <= policy) flops += 2 * C * F;
    if (act_descs[ACT_QKV].recomputed_from <= policy) flops += 2 * C * 3 * C;
    if (act_descs[ACT_ATT].recomputed_from <= policy) flops += 4 * attention_seen(m, T) * C; // two products
    if (act_descs[ACT_RESIDUAL_2].recomputed_from <= policy) flops += 2 * C * C;
    return flops;
}

// Bytes that what a policy recomputes reads and writes of activations, for one token of a block.
static int64_t recompute_bytes_per_token(const Model *m, RecomputePolicy policy) {
    const int64_t C = m->C, own = C / m->tp.size, F = m->F / m->tp.size; // products read or write all channels of a token, the rest concerns shares
    int64_t elements = 0;
    if (act_descs[ACT_LN_1].recomputed_from <= policy) elements += 2 * own;
    if (act_descs[ACT_LN_2].recomputed_from <= policy) elements += 2 * own;
    if (act_descs[ACT_FC_PRE].recomputed_from <= policy) elements += C + 2 * F;
    else if (act_descs[ACT_FC_GELU].recomputed_from <= policy) elements += 2 * F;
    if (act_descs[ACT_QKV].recomputed_from <= policy) elements += C + 3 * own;
    if (act_descs[ACT_ATT].recomputed_from <= policy) elements += 3 * own + own;
    if (act_descs[ACT_RESIDUAL_2].recomputed_from <= policy) elements += own + C + 2 * own; // its product, and its sum in the norm
    return elements * dtype_bytes(m->dtype);
}

// ---------------------------------------------------------------------------------------------------------------
// Forward

// Does a block's pass compute this activation? Forward computes all; when backward asks again, only what was not kept.
static bool block_computes(const Acts *a, ActRole role, bool again) { return !again || act_descs[role].recomputed_from <= a->recompute; }

// All rows of what this rank has its own rows of, until the next ones are gathered. They come one piece after the other.
static Tensor block_gather_begin(const Model *m, const Acts *a, Tensor rows) { return tp_gather_begin(m->tp, &m->overlap, a->act[ACT_GATHERED], rows, m->stream); }
static void block_gathered(const Model *m) { tp_gathered(&m->overlap, m->overlap.pieces - 1, m->stream); }
static Tensor block_gather(const Model *m, const Acts *a, Tensor rows) { return tp_gather_rows(m->tp, &m->overlap, a->act[ACT_GATHERED], rows, m->stream); }

// Where this rank's rows of the sum over the ranks of ACT_NARROW come; block_summed: when they are there.
static Tensor block_sum_rows(const Model *m, const Acts *a) { return m->overlap.pieces == 1 ? tp_own_rows(m->tp, a->act[ACT_NARROW]) : a->act[ACT_SUMMED]; }
static Tensor block_summed(const Model *m, const Acts *a) {
    tp_summed(&m->overlap, m->stream);
    return block_sum_rows(m, a);
}
static Tensor block_scatter(const Model *m, const Acts *a) {
    tp_scatter_sum(m->tp, &m->overlap, block_sum_rows(m, a), a->act[ACT_NARROW], m->stream);
    return block_sum_rows(m, a);
}

// The two linear layers of a pair, and the gradients of their inputs. The first is split by its outputs and begins with a gather: a piece is
// multiplied when it has come. The second is split by its inputs and ends with a sum, which a piece sets out for when it is computed. Backward
// it is the other way round. With one piece each is one product, and with one rank nothing else.

static void gather_linear(const Model *m, const Acts *a, Tensor out, Tensor rows, Tensor w, Tensor bias, Tensor pre_gelu) {
    const TpOverlap *o = &m->overlap;
    const Tensor all = block_gather_begin(m, a, rows);
    for (int j = 0; j < o->pieces; j++) {
        tp_gathered(o, j, m->stream);
        const Tensor out_j = tp_piece(o, out, j), all_j = tp_piece(o, all, j), pre_j = tp_piece(o, pre_gelu, j);
        if (pre_gelu.data && m->gelu_apart) linear_gelu_forward(out_j, pre_j, all_j, w, bias, m->stream);
        else linear_forward(out_j, all_j, w, bias, tensor_none(), pre_j, m->stream);
    }
}

// Through ACT_NARROW: block_summed has the sum.
static void linear_scatter(const Model *m, const Acts *a, Tensor inp, Tensor w) {
    const TpOverlap *o = &m->overlap;
    for (int j = 0; j < o->pieces; j++) {
        linear_forward(tp_piece(o, a->act[ACT_NARROW], j), tp_piece(o, inp, j), w, tensor_none(), tensor_none(), tensor_none(), m->stream);
        tp_scatter_begin(m->tp, o, block_sum_rows(m, a), a->act[ACT_NARROW], j, m->stream);
    }
}

// Likewise.
static void gather_linear_backward(const Model *m, const Acts *a, Tensor dout, Tensor w) {
    const TpOverlap *o = &m->overlap;
    for (int j = 0; j < o->pieces; j++) {
        linear_backward_input(tp_piece(o, a->act[ACT_NARROW], j), tensor_none(), tp_piece(o, dout, j), w, tensor_none(), false, m->stream);
        tp_scatter_begin(m->tp, o, block_sum_rows(m, a), a->act[ACT_NARROW], j, m->stream);
    }
}

// dout: all rows, from block_gather_begin.
static void linear_scatter_backward(const Model *m, Tensor dinp, Tensor sum_dinp, Tensor dout, Tensor w, Tensor pre_gelu, bool accumulate) {
    const TpOverlap *o = &m->overlap;
    for (int j = 0; j < o->pieces; j++) {
        tp_gathered(o, j, m->stream);
        linear_backward_input(tp_piece(o, dinp, j), sum_dinp, tp_piece(o, dout, j), w, tp_piece(o, pre_gelu, j), accumulate || j > 0, m->stream);
    }
}

// Heads that attention sees here.
static int block_heads(const Model *m) { return (int)(m->NH / m->tp.size / m->sp.size); }

// The attention's output as the projection reads it, in the first of the wide scratch's parts where it is not there already. It is not kept
// beside ACT_ATT: memory is what sequence parallelism is for, and backward's second exchange moves one ninth of what a block exchanges.
static Tensor block_attention_rows(const Model *m, const Acts *a) {
    const int64_t columns = m->C / m->tp.size;
    return heads_to_seq(m->sp, act_view(a->act[ACT_WIDE], columns, 0), a->act[ACT_ATT], a->B, 1, act_view(a->act[ACT_WIDE], columns, 1), m->stream);
}

// Forward of a block; or, again, of what backward lacks. The same calls on the same operands in the same order: what is computed
// again has the bits that it had.
static void block_calls(const Model *m, const Weights *w, const Acts *a, bool again) {
    const Tensor *act = a->act;
    const Tensor none = tensor_none(), mean = act[ACT_LN_2_MEAN], rstd = act[ACT_LN_2_RSTD];
    float eps = (float)m->c.layer_norm_epsilon;
    Stream s = m->stream;
    if (block_computes(a, ACT_LN_1, again)) layernorm_forward(act[ACT_LN_1], act[ACT_LN_1_MEAN], act[ACT_LN_1_RSTD], a->x_in, w->t[BLOCK_LN_1_W], w->t[BLOCK_LN_1_B], eps, s);
    if (block_computes(a, ACT_QKV, again)) {
        Tensor rows = m->sp.size > 1 ? act_view(act[ACT_WIDE], 3 * m->C / m->tp.size, 0) : act[ACT_QKV];
        gather_linear(m, a, rows, act[ACT_LN_1], w->t[BLOCK_QKV_W], w->t[BLOCK_QKV_B], none);
        seq_to_heads(m->sp, act[ACT_QKV], rows, a->B, 3, rows, s);
    }
    if (block_computes(a, ACT_ATT, again)) attention_forward(act[ACT_ATT], act[ACT_LSE], act[ACT_QKV], block_heads(m), m->c.attention_window_size, s);
    if (block_computes(a, ACT_RESIDUAL_2, again)) {
        linear_scatter(m, a, block_attention_rows(m, a), w->t[BLOCK_PROJ_W]); // the norm adds the bias
        residual_layernorm_forward(act[ACT_RESIDUAL_2], act[ACT_LN_2], mean, rstd, a->x_in, block_summed(m, a), w->t[BLOCK_PROJ_B], w->t[BLOCK_LN_2_W],
                                   w->t[BLOCK_LN_2_B], eps, s);
    } else if (block_computes(a, ACT_LN_2, again)) // the sum is there, and its norm has the same bits
        layernorm_forward(act[ACT_LN_2], mean, rstd, act[ACT_RESIDUAL_2], w->t[BLOCK_LN_2_W], w->t[BLOCK_LN_2_B], eps, s);
    if (block_computes(a, ACT_FC_PRE, again)) gather_linear(m, a, act[ACT_FC_GELU], act[ACT_LN_2], w->t[BLOCK_FC_W], w->t[BLOCK_FC_B], act[ACT_FC_PRE]);
    else if (block_computes(a, ACT_FC_GELU, again)) gelu_forward(act[ACT_FC_GELU], act[ACT_FC_PRE], s); // of rounded values: it was so at first, too
    if (again) return; // backward does not need what leaves the block
    // The last residual sum rides in the matrix product, since the next norm belongs to another unit; but a product of summands has to be added up first.
    if (m->tp.size == 1) linear_forward(a->x_out, act[ACT_FC_GELU], w->t[BLOCK_FCPROJ_W], w->t[BLOCK_FCPROJ_B], act[ACT_RESIDUAL_2], none, s);
    else {
        linear_scatter(m, a, act[ACT_FC_GELU], w->t[BLOCK_FCPROJ_W]);
        residual_forward(a->x_out, act[ACT_RESIDUAL_2], block_summed(m, a), w->t[BLOCK_FCPROJ_B], s);
    }
}

static void block_forward(const Model *m, const Weights *w, const Acts *a) { block_calls(m, w, a, false); }

// The head works through its N rows in pieces of head_rows, since the logits are by far the widest activation: at a
// vocabulary of 50,304 those of one token take as much room as all that 4 blocks of GPT-2 124M keep of it. In training
// all of it happens in backward, where the gradients that the losses lead to can be used up piece by piece: nothing is
// computed twice, and no gradient of logits waits for its turn (Hsu et al. 2024, "Liger Kernel", fuse them likewise).

// The logits of a piece of the normalised rows, in the first rows of ACT_LOGITS.
static Tensor head_logits(const Model *m, const Weights *w, const Acts *a, Tensor normalised, int64_t first, int64_t rows) {
    Tensor logits = tensor_piece(a->act[ACT_LOGITS], 0, rows);
    linear_forward(logits, tensor_piece(normalised, first, rows), w->t[HEAD_W], tensor_none(), tensor_none(), tensor_none(), m->stream);
    return logits;
}

// The losses of a piece; returns its logits, in training turned into their gradient.
static Tensor head_losses(const Model *m, const Weights *w, const Acts *a, Tensor normalised, int64_t first, int64_t rows) {
    Tensor logits = head_logits(m, w, a, normalised, first, rows);
    tp_classifier(m->tp, logits, tensor_piece(a->act[ACT_LOSSES], first, rows), a->targets + first, m->V, a->dloss, a->mode == FORWARD_TRAIN, a->act[ACT_STATISTICS], m->stream);
    return logits;
}

static void head_forward(const Model *m, const Weights *w, const Acts *a) {
    const Tensor *act = a->act;
    const int64_t N = a->B * a->T, rows = tensor_rows(act[ACT_LOGITS]);
    layernorm_forward(act[ACT_LN_F], act[ACT_LN_F_MEAN], act[ACT_LN_F_RSTD], a->x_in, w->t[HEAD_LN_F_W], w->t[HEAD_LN_F_B],
                      (float)m->c.layer_norm_epsilon, m->stream);
    if (a->mode == FORWARD_TRAIN) return;
    Tensor normalised = block_gather(m, a, act[ACT_LN_F]);
    if (a->mode == FORWARD_LOGITS) head_logits(m, w, a, normalised, a->first_logits, rows);
    if (a->mode == FORWARD_EVAL)
        for (int64_t first = 0; first < N; first += rows) head_losses(m, w, a, normalised, first, min_i64(rows, N - first));
}

// Losses of the tokens that this rank answers for in a sum over all ranks: all tp ranks know those of all their rows.
static Tensor head_counted_losses(const Model *m, const Acts *a) { return tp_own_rows(m->tp, a->act[ACT_LOSSES]); }

static TokenBatch acts_tokens(const Model *m, const Acts *a) { return {a->tokens, a->B, a->T, m->V, m->sp.rank * a->T}; }

static void embed_forward(const Model *m, const Weights *w, const Acts *a) {
    const TokenBatch b = acts_tokens(m, a);
    tp_embedding_forward(m->tp, &m->overlap, a->x_out, &b, w->t[EMBED_WTE], w->t[EMBED_WPE], a->act[ACT_NARROW], m->stream);
}

static void unit_launch_forward(const Model *m, int unit, const Weights *w, const Acts *a) {
    switch (m->table.unit[unit].kind) {
    case UNIT_EMBED: embed_forward(m, w, a); break;
    case UNIT_BLOCK: block_forward(m, w, a); break;
    case UNIT_HEAD: head_forward(m, w, a); break;
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Phases of backward. A block's can be split: gradients of activations, which others wait for, and gradients of weights, for which nobody
// does (pipeline.cu). What is summed on the way, norms' weights and most biases, belongs to the first phase, and so do the other
// units as a whole.

typedef enum { PHASE_INPUT = 1, PHASE_WEIGHTS = 2, PHASE_BOTH = 3 } BackwardPhase;

static BackwardPhase param_phase(UnitKind unit, int role) {
    bool later = role == BLOCK_QKV_W || role == BLOCK_QKV_B || role == BLOCK_PROJ_W || role == BLOCK_FC_W || role == BLOCK_FCPROJ_W;
    return unit == UNIT_BLOCK && later ? PHASE_WEIGHTS : PHASE_INPUT;
}

// ---------------------------------------------------------------------------------------------------------------
// Backward: the mirror of forward. dx carries the gradient of the residual stream; each branch adds to it through the
// norm at its foot (layernorm_backward with dresidual = dx).

// In two phases the gradients that the second one needs have memory of their own; in one they take turns in scratch, and the stream's is
// changed in place. What the gradients of weights need of other ranks' rows is gathered anew, into the one place for gathered rows, as soon
// as nobody reads that any more: it comes while the gradient of the input is computed, whose sum travels beside the weights' gradient.
static void block_backward(const Model *m, const Weights *w, const Grads *g, const Acts *a, BackwardPhase phases) {
    const Tensor *act = a->act;
    const bool input = phases & PHASE_INPUT, weights = phases & PHASE_WEIGHTS, split = phases != PHASE_BOTH;
    const int64_t F = m->F / m->tp.size, C = m->C / m->tp.size;
    const Stream s = m->stream;
    const Tensor none = tensor_none(), dnarrow = act[ACT_NARROW], dout = split ? act[ACT_DOUT] : a->dx, dresidual = split ? act[ACT_DRESIDUAL_2] : a->dx;
    const Tensor dfc = split ? act[ACT_DFC] : act_view(act[ACT_WIDE], F, 0), qkv_rows = act_view(act[ACT_WIDE], 3 * C, 0);
    Tensor dqkv = split ? act_shaped(act[ACT_DQKV], qkv_rows) : qkv_rows; // by rows of tokens
    for (int role = 0; role < ROLES_MAX; role++) {
        int same = param_phase(UNIT_BLOCK, role) == PHASE_INPUT || !split ? BLOCK_LN_1_W : BLOCK_QKV_W;
        CHECK(!g->t[role].data || g->accumulate[role] == g->accumulate[same], "gradients of role %d and %d of a block disagree", role, same);
    }
    if (input) block_calls(m, w, a, true);
    if (input && split) device_copy(dout.data, a->dx.data, tensor_bytes(dout), COPY_ON_DEVICE, s);
    Tensor all = block_gather_begin(m, a, dout);
    if (input) linear_scatter_backward(m, dfc, g->t[BLOCK_FC_B], all, w->t[BLOCK_FCPROJ_W], act[ACT_FC_PRE], g->accumulate[BLOCK_FC_B]);
    if (weights) {
        block_gathered(m);
        linear_backward_weight(g->t[BLOCK_FCPROJ_W], none, all, act[ACT_FC_GELU], g->accumulate[BLOCK_FCPROJ_W], s);
        all = block_gather_begin(m, a, act[ACT_LN_2]);
    }
    if (input) gather_linear_backward(m, a, dfc, w->t[BLOCK_FC_W]);
    if (weights) {
        block_gathered(m);
        linear_backward_weight(g->t[BLOCK_FC_W], none, dfc, all, g->accumulate[BLOCK_FC_W], s);
    }
    if (input) layernorm_backward(dresidual, g->t[BLOCK_LN_2_W], g->t[BLOCK_LN_2_B], g->t[BLOCK_FCPROJ_B], g->t[BLOCK_PROJ_B], block_summed(m, a), act[ACT_RESIDUAL_2], w->t[BLOCK_LN_2_W],
                                  act[ACT_LN_2_MEAN], act[ACT_LN_2_RSTD], dout, g->accumulate[BLOCK_LN_2_W], s);
    all = block_gather_begin(m, a, dresidual);
    Tensor datt = m->sp.size > 1 ? act_view(act[ACT_WIDE], C, 2) : act_view(dnarrow, C, 0);
    if (input) linear_scatter_backward(m, datt, none, all, w->t[BLOCK_PROJ_W], none, false);
    if (weights) {
        block_gathered(m);
        linear_backward_weight(g->t[BLOCK_PROJ_W], none, all, block_attention_rows(m, a), g->accumulate[BLOCK_PROJ_W], s);
        all = block_gather_begin(m, a, act[ACT_LN_1]);
    }
    if (input) {
        const Tensor dheads = act_shaped(m->sp.size > 1 ? act[ACT_WIDE] : dqkv, act[ACT_QKV]);
        datt = act_shaped(seq_to_heads(m->sp, act_view(dnarrow, C, 0), datt, a->B, 1, datt, s), act[ACT_ATT]);
        attention_backward(dheads, datt, act[ACT_QKV], act[ACT_ATT], act[ACT_LSE], block_heads(m), m->c.attention_window_size, m->deterministic, s);
        // Nobody reads q, k and v any more: their memory takes their gradient, if it has to move and has no place of its own.
        const Tensor place = m->sp.size > 1 && !split ? act_shaped(act[ACT_QKV], qkv_rows) : dqkv;
        dqkv = act_shaped(heads_to_seq(m->sp, place, dheads, a->B, 3, dheads, s), qkv_rows);
        gather_linear_backward(m, a, dqkv, w->t[BLOCK_QKV_W]);
    }
    if (weights) {
        block_gathered(m);
        linear_backward_weight(g->t[BLOCK_QKV_W], g->t[BLOCK_QKV_B], dqkv, all, g->accumulate[BLOCK_QKV_W], s); // and its bias, since it passes dqkv anyway
    }
    if (input) layernorm_backward(a->dx, g->t[BLOCK_LN_1_W], g->t[BLOCK_LN_1_B], none, none, block_summed(m, a), a->x_in, w->t[BLOCK_LN_1_W],
                                  act[ACT_LN_1_MEAN], act[ACT_LN_1_RSTD], dresidual, g->accumulate[BLOCK_LN_1_W], s);
}

static void head_backward(const Model *m, const Weights *w, const Grads *g, const Acts *a) {
    const Tensor *act = a->act;
    const int64_t N = a->B * a->T, rows = tensor_rows(act[ACT_LOGITS]);
    Tensor normalised = block_gather(m, a, act[ACT_LN_F]);
    for (int64_t first = 0; first < N; first += rows) {
        const int64_t n = min_i64(rows, N - first);
        Tensor dlogits = head_losses(m, w, a, normalised, first, n);
        linear_backward_input(tensor_piece(act[ACT_NARROW], first, n), tensor_none(), dlogits, w->t[HEAD_W], tensor_none(), false, m->stream);
        linear_backward_weight(g->t[HEAD_W], tensor_none(), dlogits, tensor_piece(normalised, first, n), g->accumulate[HEAD_W] || first > 0, m->stream);
    }
    layernorm_backward(a->dx, g->t[HEAD_LN_F_W], g->t[HEAD_LN_F_B], tensor_none(), tensor_none(), block_scatter(m, a), a->x_in, w->t[HEAD_LN_F_W],
                       act[ACT_LN_F_MEAN], act[ACT_LN_F_RSTD], tensor_none(), g->accumulate[HEAD_LN_F_W], m->stream);
}

static void embed_backward(const Model *m, const Grads *g, const Acts *a) {
    const TokenBatch b = acts_tokens(m, a);
    tp_embedding_backward(m->tp, &m->overlap, g->t[EMBED_WTE], g->t[EMBED_WPE], &b, a->dx, g->accumulate[EMBED_WTE], g->accumulate[EMBED_WPE], a->act[ACT_GATHERED], m->stream);
}

static void unit_launch_backward(const Model *m, int unit, const Weights *w, const Grads *g, const Acts *a, BackwardPhase phases) {
    switch (m->table.unit[unit].kind) {
    case UNIT_EMBED: embed_backward(m, g, a); break;
    case UNIT_BLOCK: block_backward(m, w, g, a, phases); break;
    case UNIT_HEAD: head_backward(m, w, g, a); break;
    }
}

// ---------------------------------------------------------------------------------------------------------------
// All that a unit's forward or backward follows from is in its arguments, so a graph can stand for its kernels (runtime/graphs.h).

typedef struct {
    const Model *model;
    int64_t unit;
    int64_t backward; // BackwardPhase; 0: forward
    Weights w;        // zeros in the second phase of backward, which does not need them
    Grads g;          // zeros in forward
    Acts a;
} UnitJob;

static void unit_job(const void *args) {
    const UnitJob *j = (const UnitJob *)args;
    if (j->backward) unit_launch_backward(j->model, (int)j->unit, &j->w, &j->g, &j->a, (BackwardPhase)j->backward);
    else unit_launch_forward(j->model, (int)j->unit, &j->w, &j->a);
}

static void unit_run(const Model *m, int unit, const Weights *w, const Grads *g, const Acts *a, int phases) {
    UnitJob j;
    memset(&j, 0, sizeof j); // its bytes are compared
    j.model = m;
    j.unit = unit;
    j.backward = phases;
    if (w) j.w = *w;
    if (g) j.g = *g;
    j.a = *a;
    graph_run(m->graphs, unit_job, &j, sizeof j);
}

static void unit_forward(const Model *m, int unit, const Weights *w, const Acts *a) { unit_run(m, unit, w, NULL, a, 0); }
static void unit_backward(const Model *m, int unit, const Weights *w, const Grads *g, const Acts *a, BackwardPhase phases) { unit_run(m, unit, w, g, a, phases); }
