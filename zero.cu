// zero.cu - where weights, gradients and optimizer states live, and how a unit gets them when it computes.
//
// ZeRO (Rajbhandari et al. 2020) removes copies: of N ranks that hold the same weights, each keeps 1/N of the optimizer
// states (stage 1), of the gradients (2), of the weights (3), and the whole exists only while a unit computes. The model
// sees none of this. It asks for a unit's weights and for room for its gradients, through four verbs:
//
//     zero_fetch(z, u)       weights of unit u, whole and current
//     zero_release(z, u)     done with them
//     zero_grad_begin(z, u)  room for the gradients of unit u, and whether to add to it or to overwrite it
//     zero_grad_end(z, u)    they are written; after the last micro-batch they are reduced to this rank's shard
//
//     SHARDED --start_gather--> GATHERED --zero_fetch--> IN_USE --zero_release--> GATHERED --evict--> SHARDED
//        ^                                                                            |
//        +------------- zero_weights_changed (optimizer step): version + 1 -----------+
//
// Everything of a unit lies in flat buffers of unit.numel elements (ParamDesc.offset says where a row starts), so that a
// shard is a range of elements and needs no list of tensors:
//
//     param   [ row | row | ... ]  model's dtype, whole while gathered
//     grad    [ row | row | ... ]  fp32, whole during backward
//     master  [ shard ]            fp32; the same memory as param when the model is fp32
//     state   [ shard ] x n        fp32, one per state of the optimizer
//
// With a group of one rank the shard is the whole, the gathered buffer is the shard itself, and a gather moves nothing;
// stages then differ in name only. That is the same path, not another one.
//
// Invariants:
//  1. A unit IN_USE is never evicted; uses nest (the head uses the embedding's table when they are tied).
//  2. A gathered buffer is valid only while its version is the version of the weights.
//  3. A gradient row is overwritten by its first writer of an update and added to by the later ones; rows that share
//     storage share that state.
//  4. Padding (between rows, and of the vocabulary) is zero in every buffer, for ever.
// Read next: acts.cu.
#pragma once
#include "model.cu"
#include "runtime/comm.h"

enum { ZERO_STATES_MAX = 2 };

typedef enum { UNIT_SHARDED, UNIT_GATHERED, UNIT_IN_USE } UnitStatus;

typedef struct {
    UnitStatus status;
    int64_t version;      // of the weights in `param`
    int uses;             // nested fetches
    void *param;          // (numel) whole, model's dtype
    float *grad;          // (numel) whole, fp32
    int64_t shard_numel;  // elements of a rank's shard; the last rank's ends in padding
    void *param_shard;    // (shard_numel) inside param
    float *master;        // (shard_numel)
    float *grad_shard;    // (shard_numel) inside grad
    float *state[ZERO_STATES_MAX]; // (shard_numel)
} UnitState;

typedef struct {
    int stage;
    Group group;
    const Model *model;
    Stream stream;
    int n_states;
    UnitState *unit;      // by unit
    bool *grad_written;   // by row: some micro-batch of this update has written its gradient
    bool last_micro_batch;
    int64_t version;      // of the weights: grows with every update
    int64_t param_bytes, grad_bytes, master_bytes, state_bytes; // on this rank, for the start-up table
} Zero;

static void zero_init(Zero *z, const Model *m, int stage, Group group, int n_states, bool with_gradients) {
    memset(z, 0, sizeof *z);
    CHECK(n_states <= ZERO_STATES_MAX, "%d optimizer states", n_states);
    z->stage = stage;
    z->group = group;
    z->model = m;
    z->stream = m->stream;
    z->n_states = with_gradients ? n_states : 0;
    z->unit = (UnitState *)host_alloc(sizeof(UnitState) * (size_t)m->table.n_units);
    z->grad_written = (bool *)host_alloc(sizeof(bool) * (size_t)m->table.n_rows);
    for (int u = 0; u < m->table.n_units; u++) {
        UnitState *s = &z->unit[u];
        s->shard_numel = ceil_div(m->table.unit[u].numel, group.size);
        int64_t whole = s->shard_numel * group.size, first = s->shard_numel * group.rank, element = dtype_bytes(m->dtype);
        s->param = device_malloc(whole * element);
        s->param_shard = (char *)s->param + first * element;
        device_memset(s->param, 0, whole * element, z->stream); // invariant 4
        z->param_bytes += whole * element;
        if (m->dtype == DTYPE_FP32) s->master = (float *)s->param_shard;
        else {
            s->master = (float *)device_malloc(s->shard_numel * 4);
            device_memset(s->master, 0, s->shard_numel * 4, z->stream);
            z->master_bytes += s->shard_numel * 4;
        }
        if (with_gradients) {
            s->grad = (float *)device_malloc(whole * 4);
            s->grad_shard = s->grad + first;
            device_memset(s->grad, 0, whole * 4, z->stream);
            z->grad_bytes += whole * 4;
        }
        for (int i = 0; i < z->n_states; i++) {
            s->state[i] = (float *)device_malloc(s->shard_numel * 4);
            device_memset(s->state[i], 0, s->shard_numel * 4, z->stream);
            z->state_bytes += s->shard_numel * 4;
        }
    }
}

static void zero_free(Zero *z) {
    for (int u = 0; u < z->model->table.n_units; u++) {
        UnitState *s = &z->unit[u];
        if (s->master != s->param_shard) device_free(s->master);
        device_free(s->param);
        device_free(s->grad);
        for (int i = 0; i < z->n_states; i++) device_free(s->state[i]);
    }
    free(z->unit);
    free(z->grad_written);
}

// ---------------------------------------------------------------------------------------------------------------
// The verbs

static void zero_use(Zero *z, int unit) {
    UnitState *s = &z->unit[unit];
    if (s->status == UNIT_SHARDED || s->version != z->version) {
        CHECK(s->uses == 0, "unit %d changed while in use", unit);
        comm_all_gather(z->group, s->param, s->param_shard, s->shard_numel, z->model->dtype, z->stream);
        s->version = z->version;
    }
    s->status = UNIT_IN_USE;
    s->uses++;
}

static void zero_unuse(Zero *z, int unit) {
    UnitState *s = &z->unit[unit];
    CHECK(s->status == UNIT_IN_USE && s->uses > 0, "unit %d released without a fetch", unit);
    if (--s->uses == 0) s->status = UNIT_GATHERED;
}

// The row that stores row i.
static int zero_storage_row(const Zero *z, int row) {
    int tied = z->model->table.row[row].tied_to;
    return tied >= 0 ? tied : row;
}

// Weights of a unit; rows that are tied to another unit's come from there. Valid until zero_release.
static Weights zero_fetch(Zero *z, int unit) {
    const ParamTable *table = &z->model->table;
    Weights w;
    memset(&w, 0, sizeof w);
    zero_use(z, unit);
    for (int i = table->unit[unit].first_row; i < table->unit[unit].first_row + table->unit[unit].n_rows; i++) {
        const ParamDesc *stored = &table->row[zero_storage_row(z, i)];
        if (stored->unit != unit) zero_use(z, stored->unit);
        char *at = (char *)z->unit[stored->unit].param + stored->offset * dtype_bytes(z->model->dtype);
        w.t[table->row[i].role] = tensor_make(at, z->model->dtype, stored->ndim, stored->padded_rows, stored->shape[1], 1, 1);
    }
    return w;
}

static void zero_release(Zero *z, int unit) {
    const ParamTable *table = &z->model->table;
    zero_unuse(z, unit);
    for (int i = table->unit[unit].first_row; i < table->unit[unit].first_row + table->unit[unit].n_rows; i++) {
        int owner = table->row[zero_storage_row(z, i)].unit;
        if (owner != unit) zero_unuse(z, owner);
    }
}

// A new update begins: all gradients count as empty.
static void zero_begin_step(Zero *z) {
    memset(z->grad_written, 0, sizeof(bool) * (size_t)z->model->table.n_rows);
    z->last_micro_batch = false;
}

static Grads zero_grad_begin(Zero *z, int unit) {
    const ParamTable *table = &z->model->table;
    Grads g;
    memset(&g, 0, sizeof g);
    for (int i = table->unit[unit].first_row; i < table->unit[unit].first_row + table->unit[unit].n_rows; i++) {
        int storage = zero_storage_row(z, i), role = table->row[i].role;
        const ParamDesc *stored = &table->row[storage];
        g.t[role] = tensor_make(z->unit[stored->unit].grad + stored->offset, DTYPE_FP32, stored->ndim, stored->padded_rows, stored->shape[1], 1, 1);
        g.accumulate[role] = z->grad_written[storage];
    }
    return g;
}

static void zero_grad_end(Zero *z, int unit) {
    const ParamTable *table = &z->model->table;
    for (int i = table->unit[unit].first_row; i < table->unit[unit].first_row + table->unit[unit].n_rows; i++)
        z->grad_written[zero_storage_row(z, i)] = true;
    // Backward visits units in descending order and tied rows point downwards, so a unit's own visit is the last write.
    if (z->last_micro_batch)
        comm_reduce_scatter(z->group, z->unit[unit].grad_shard, z->unit[unit].grad, z->unit[unit].shard_numel, DTYPE_FP32, z->stream);
}

// The optimizer has written new weights into the shards: gathered copies are stale.
static void zero_weights_changed(Zero *z) { z->version++; }

// ---------------------------------------------------------------------------------------------------------------
// Tensors seen from outside: checkpoints, import, export and tests read and write whole tensors by row.

// What a row's values are read from or written to.
typedef enum { STATE_MASTER, STATE_OPTIMIZER_0, STATE_OPTIMIZER_1, STATE_GRAD } StateKind;

static float *zero_state_at(const Zero *z, int row, StateKind kind) {
    const ParamDesc *r = &z->model->table.row[row];
    const UnitState *s = &z->unit[r->unit];
    CHECK(r->tied_to < 0, "row %s has no storage of its own", r->name);
    float *base = kind == STATE_MASTER ? s->master : kind == STATE_GRAD ? s->grad_shard : s->state[kind - STATE_OPTIMIZER_0];
    CHECK(base, "state %d is not there", (int)kind);
    return base + r->offset;
}

// values = the (shape[0], shape[1]) tensor, without padding, in host memory.
static void zero_tensor_read(const Zero *z, int row, StateKind kind, float *values) {
    device_copy(values, zero_state_at(z, row, kind), param_numel(&z->model->table.row[row]) * 4, COPY_TO_HOST, z->stream);
    stream_sync(z->stream);
}

// The mirror; writing the masters also rounds them into the weights that the model computes with.
static void zero_tensor_write(Zero *z, int row, StateKind kind, const float *values) {
    const ParamDesc *r = &z->model->table.row[row];
    float *at = zero_state_at(z, row, kind);
    device_copy(at, values, param_numel(r) * 4, COPY_TO_DEVICE, z->stream);
    if (kind == STATE_MASTER && z->model->dtype != DTYPE_FP32) {
        char *param = (char *)z->unit[r->unit].param_shard + r->offset * dtype_bytes(z->model->dtype);
        convert(tensor1(param, z->model->dtype, param_numel(r)), tensor1(at, DTYPE_FP32, param_numel(r)), z->stream);
    }
    stream_sync(z->stream); // the caller's memory may go
    if (kind == STATE_MASTER) zero_weights_changed(z);
}

// Fills the weights with their initial values, a function of (seed, name, global index).
static void zero_init_weights(Zero *z, uint64_t seed) {
    const ParamTable *table = &z->model->table;
    for (int i = 0; i < table->n_rows; i++) {
        const ParamDesc *r = &table->row[i];
        if (r->tied_to >= 0) continue;
        int64_t n = param_numel(r);
        float *values = (float *)host_alloc((size_t)n * 4);
#pragma omp parallel for schedule(static)
        for (int64_t k = 0; k < n; k++) values[k] = param_initial_value(r, seed, k);
        zero_tensor_write(z, i, STATE_MASTER, values);
        free(values);
    }
}
