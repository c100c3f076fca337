// zero_tensors.cu - weights, gradients and optimizer states as tensors of the model, whatever rank, memory or file they lie in.
//
// A part of zero.cu, which includes it last.
#pragma once

// ---------------------------------------------------------------------------------------------------------------
// Tensors seen from outside. Checkpoints read and write ranges of a row, each rank those that it holds (zero_range_*); import,
// export and tests whole tensors, for which all ranks of the group make the same calls; see zero_serve for callers that run
// on one rank only.

// What a row's values are read from or written to.
typedef enum { STATE_MASTER, STATE_OPTIMIZER_0, STATE_OPTIMIZER_1, STATE_GRAD } StateKind;

// The elements of a row that this rank updates, as a range of its part of the row (param_runs says what that is of the tensor);
// empty if last <= first.
static void zero_row_range(const Zero *z, const ParamDesc *r, int64_t *first, int64_t *last) {
    const UnitState *s = &z->unit[r->unit];
    *first = max_i64(0, s->update_first - r->offset);
    *last = min_i64(param_local_numel(&z->model->table, r), s->update_first + s->update_numel - r->offset);
}

// The elements of a row that this rank saves. All ranks that share the weights have all of them at stage 0, and share them out as from
// stage 1 on; what is not split is saved by the first rank of tensor parallelism, a table on two stages by the one that it belongs to.
static void zero_row_owned(const Zero *z, const ParamDesc *r, int64_t *first, int64_t *last) {
    const ParamTable *table = &z->model->table;
    int64_t shard = z->unit[r->unit].shard_numel, start = shard * z->gather_group.rank;
    *first = max_i64(0, start - r->offset);
    *last = min_i64(param_local_numel(table, r), start + shard - r->offset);
    if (r->tied_to >= 0 || (r->split == SPLIT_NONE && table->tp_rank > 0)) *last = *first;
}

// The whole of an array of a unit, of which this rank updates `part`: gathered into `whole`, in Zero.staging, where it is shared.
static const void *zero_gather_part(Zero *z, const UnitState *s, const void *part, DType type, void *whole) {
    if (z->gather_group.size == 1 || !zero_shards_updates(z)) return part;
    event_record(z->computed, z->gather_stream);
    stream_wait_event(z->stream, z->computed); // the group's channel is free
    watch_unit((int)(s - z->unit));
    comm_all_gather(z->gather_group, whole, part, s->shard_numel, type, z->stream);
    event_record(z->computed, z->stream);
    stream_wait_event(z->gather_stream, z->computed);
    return whole;
}

// Elements [first, first + n) of an array of a unit, of which this rank updates `part`, to host memory. on_host: the part lies there.
static void zero_read_array(Zero *z, const UnitState *s, const void *part, bool on_host, DType type, int64_t first, int64_t n, void *values) {
    int64_t element = dtype_bytes(type);
    if (on_host && z->gather_group.size == 1) { // the part is the whole, as offload needs stage 1 at least
        stream_sync(z->stream); // weights that the device has updated may still be on their way
        memcpy(values, (const char *)part + first * element, (size_t)(n * element));
        return;
    }
    if (on_host) {
        char *mine = (char *)z->staging + s->shard_numel * z->gather_group.rank * element;
        device_copy(mine, part, s->shard_numel * element, COPY_TO_DEVICE, z->stream);
        part = mine;
    }
    const char *whole = (const char *)zero_gather_part(z, s, part, type, z->staging);
    device_copy(values, whole + first * element, n * element, COPY_TO_HOST, z->stream);
    stream_sync(z->stream);
}

// Are the masters (an fp32 weight is its own), the states, the gradients of a unit in host memory?
static bool zero_on_host(const Zero *z, const UnitState *s, StateKind kind) {
    if (kind == STATE_MASTER && z->model->dtype == DTYPE_FP32 && s->param_on_host) return true;
    return kind != STATE_GRAD && s->update_on_host;
}

// The masters of a row, joined from weights and remainders; both are gathered as 16-bit elements.
static void zero_read_split(Zero *z, const ParamDesc *r, float *values) {
    const UnitState *s = &z->unit[r->unit];
    int64_t n = param_local_numel(&z->model->table, r);
    uint16_t *weight = (uint16_t *)host_alloc((size_t)n * 2), *remainder = (uint16_t *)host_alloc((size_t)n * 2);
    zero_read_array(z, s, zero_updated_param(z, s), s->param_on_host, DTYPE_BF16, r->offset, n, weight);
    zero_read_array(z, s, s->master, s->update_on_host, DTYPE_BF16, r->offset, n, remainder);
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) values[i] = master_join(weight[i], remainder[i]);
    free(weight);
    free(remainder);
}

// values = this rank's part of a row (param_local_numel) in host memory. All ranks that share the weights come here.
static void zero_part_read(Zero *z, int row, StateKind kind, float *values) {
    const ParamDesc *r = &z->model->table.row[row];
    const UnitState *s = &z->unit[r->unit];
    CHECK(r->numel > 0, "row %s has no storage here", r->name);
    zero_await_update(z, r->unit);
    if (kind != STATE_GRAD) offload_open_unit(&z->offload, r->unit, false);
    if (kind == STATE_MASTER && master_dtype(z->model) == DTYPE_REMAINDER) { zero_read_split(z, r, values); return; }
    const float *grad = (const float *)(zero_shards_updates(z) ? s->grad_shard : s->grad); // at stage 0 every rank has the whole sum
    const float *part = kind == STATE_MASTER ? (const float *)s->master : kind == STATE_GRAD ? grad : s->state[kind - STATE_OPTIMIZER_0];
    CHECK(part, "state %d is not there", (int)kind);
    if (kind == STATE_GRAD && zero_shard_dtype(z) != DTYPE_FP32) {
        Tensor mine = tensor1(z->staging + s->shard_numel * z->gather_group.rank, DTYPE_FP32, s->shard_numel);
        convert(mine, zero_grad_part(z, r->unit, 0, s->shard_numel), z->stream);
        part = (const float *)mine.data;
    }
    zero_read_array(z, s, part, zero_on_host(z, s, kind), DTYPE_FP32, r->offset, param_local_numel(&z->model->table, r), values);
}

// values = the (shape[0], shape[1]) tensor, without padding, in host memory. All ranks of the grid come here; where they split the
// matrices or the layers, the first of those that hold a part tells the others.
static void zero_tensor_read(Zero *z, int row, StateKind kind, float *values) {
    const ParamTable *table = &z->model->table;
    const ParamDesc *r = &table->row[row];
    CHECK(r->tied_to < 0, "row %s has no storage of its own", r->name);
    if (z->job_group.size == z->gather_group.size) { zero_part_read(z, row, kind, values); return; }
    for (int tp_rank = 0; tp_rank < table->tp; tp_rank++) {
        int64_t n = param_part_numel(r, tp_rank), at = 0;
        float *part = (float *)host_alloc((size_t)max_i64(1, n) * 4);
        ParamRun run[PARAM_RUNS_MAX];
        GridAxes owner = {table->unit[r->unit].stage, 0, 0, tp_rank};
        if (r->numel > 0 && tp_rank == table->tp_rank) zero_part_read(z, row, kind, part);
        comm_host_broadcast(part, n * 4, z->grid.first_rank + grid_rank(owner, z->grid.size));
        int n_runs = param_runs(r, tp_rank, 0, n, run);
        for (int i = 0; i < n_runs; i++)
            for (int64_t k = 0; k < run[i].count; k++, at += run[i].numel) memcpy(values + run[i].global_offset + k * run[i].stride, part + at, (size_t)run[i].numel * 4);
        free(part);
    }
}

// Bytes from the caller's memory into an array of a unit, which lies in host memory or on the device. Waits.
static void zero_put(Zero *z, void *array, bool on_host, int64_t at, const void *from, int64_t bytes) {
    if (on_host) {
        stream_sync(z->stream); // nobody reads or writes it behind our back
        memcpy((char *)array + at, from, (size_t)bytes);
    } else {
        device_copy((char *)array + at, from, bytes, COPY_TO_DEVICE, z->stream);
        stream_sync(z->stream); // the caller's memory may go
    }
}

// n masters become the weights, and what the weights lack of them, of elements [from, from + n) of what this rank updates of a unit.
// What lives in host memory is written where it stays; a mirror goes to the device from there.
static void zero_write_masters(Zero *z, int unit, int64_t from, int64_t n, const float *values) {
    const UnitState *s = &z->unit[unit];
    const DType type = z->model->dtype;
    const int64_t element = dtype_bytes(type), kept = dtype_bytes(master_dtype(z->model));
    const bool mirrored = s->update_on_host && !s->param_on_host, has_weight = mirrored || s->param_on_host, has_master = s->update_on_host || type == DTYPE_FP32;
    char *weight_room = has_weight ? NULL : (char *)host_alloc((size_t)(n * element)), *master_room = has_master ? NULL : (char *)host_alloc((size_t)(n * kept));
    char *weight = mirrored ? (char *)z->offload.unit[unit].array[HOST_WEIGHT] + from * element : s->param_on_host ? (char *)zero_updated_param(z, s) + from * element : weight_room;
    char *master = has_master ? (char *)s->master + from * kept : master_room; // not used in fp32
    stream_sync(z->stream); // nobody reads or writes it behind our back
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) {
        if (type == DTYPE_BF16) ((uint16_t *)weight)[i] = master_to_bf16(values[i]), ((uint16_t *)master)[i] = master_remainder(values[i]);
        else dtype_store(weight, type, i, values[i]);
        if (type == DTYPE_FP16) ((float *)master)[i] = values[i];
    }
    if (!s->param_on_host) device_copy((char *)zero_updated_param(z, s) + from * element, weight, n * element, COPY_TO_DEVICE, z->stream);
    if (!has_master) device_copy((char *)s->master + from * kept, master, n * kept, COPY_TO_DEVICE, z->stream);
    stream_sync(z->stream); // the room may go
    free(weight_room);
    free(master_room);
}

// What this rank has of an array, to host memory. on_host: it lies there.
static void zero_read_own(Zero *z, const void *part, bool on_host, int64_t bytes, void *values) {
    if (!on_host) device_copy(values, part, bytes, COPY_TO_HOST, z->stream);
    stream_sync(z->stream); // weights that the device has updated may still be on their way to the host
    if (on_host) memcpy(values, part, (size_t)bytes);
}

// values = elements [first, first + n) of this rank's part of a row's masters or states, which this rank updates (zero_row_range).
static void zero_range_read(Zero *z, int row, StateKind kind, int64_t first, int64_t n, float *values) {
    const ParamDesc *r = &z->model->table.row[row];
    const UnitState *s = &z->unit[r->unit];
    int64_t at = r->offset + first - s->update_first; // in what this rank has of the unit
    CHECK(r->numel > 0 && kind != STATE_GRAD && at >= 0 && at + n <= s->update_numel, "row %s, state %d, %" PRId64 " elements from %" PRId64, r->name, (int)kind, n, first);
    watch_tick();
    zero_await_update(z, r->unit);
    offload_open_unit(&z->offload, r->unit, false);
    if (kind == STATE_MASTER && master_dtype(z->model) == DTYPE_REMAINDER) {
        uint16_t *weight = (uint16_t *)host_alloc((size_t)n * 2), *remainder = (uint16_t *)host_alloc((size_t)n * 2);
        zero_read_own(z, (uint16_t *)zero_updated_param(z, s) + at, s->param_on_host, n * 2, weight);
        zero_read_own(z, (uint16_t *)s->master + at, s->update_on_host, n * 2, remainder);
#pragma omp parallel for simd
        for (int64_t i = 0; i < n; i++) values[i] = master_join(weight[i], remainder[i]);
        free(weight);
        free(remainder);
        return;
    }
    const float *part = kind == STATE_MASTER ? (const float *)s->master : s->state[kind - STATE_OPTIMIZER_0];
    CHECK(part, "state %d is not there", (int)kind);
    zero_read_own(z, part + at, zero_on_host(z, s, kind), n * 4, values);
}

// Saves in the background copy instead of reading: bytes leave on a stream of their own, behind the update before and beside the next
// one, up to the point where that changes them (zero_update_waits). What lies in host memory, where the CPU may update it at any
// time from then on, is copied at once.

static void zero_keep_own(Zero *z, const void *part, bool on_host, int64_t bytes, void *kept) {
    if (!on_host) { device_copy(kept, part, bytes, COPY_TO_HOST, z->keep_stream); return; }
    const int64_t piece = 1 << 20;
    stream_sync(z->stream); // weights that the device has updated may still be on their way
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < bytes; at += piece) memcpy((char *)kept + at, (const char *)part + at, (size_t)min_i64(piece, bytes - at));
}

// Begins to copy what zero_kept_get makes elements [first, first + n) of this rank's part of a row's masters or states from: 4 n bytes. They may
// reach over the rows that lie behind it in the unit.
static void zero_range_keep(Zero *z, int row, StateKind kind, int64_t first, int64_t n, void *kept) {
    const ParamDesc *r = &z->model->table.row[row];
    const UnitState *s = &z->unit[r->unit];
    int64_t at = r->offset + first - s->update_first;
    CHECK(r->numel > 0 && kind != STATE_GRAD && at >= 0 && at + n <= s->update_numel, "row %s, state %d, %" PRId64 " elements from %" PRId64, r->name, (int)kind, n, first);
    zero_await_update(z, r->unit);
    offload_open_unit(&z->offload, r->unit, false);
    if (!z->keeping) {
        event_record(z->computed, z->stream);
        stream_wait_event(z->keep_stream, z->computed);
        z->keeping = true;
    }
    if (kind == STATE_MASTER && master_dtype(z->model) == DTYPE_REMAINDER) {
        zero_keep_own(z, (uint16_t *)zero_updated_param(z, s) + at, s->param_on_host, n * 2, kept);
        zero_keep_own(z, (uint16_t *)s->master + at, s->update_on_host, n * 2, (uint16_t *)kept + n);
        return;
    }
    const float *part = kind == STATE_MASTER ? (const float *)s->master : s->state[kind - STATE_OPTIMIZER_0];
    CHECK(part, "state %d is not there", (int)kind);
    zero_keep_own(z, part + at, zero_on_host(z, s, kind), n * 4, kept);
}

// An update is about to change what may still be copied.
static void zero_update_waits(Zero *z) {
    if (!z->keeping) return;
    event_record(z->computed, z->keep_stream);
    stream_wait_event(z->stream, z->computed);
}

// The host waits for the copies.
static void zero_keep_end(Zero *z) {
    stream_sync(z->keep_stream);
    z->keeping = false;
}

// `count` of the n values that were copied, from `from` on. Any thread.
static void zero_kept_get(const Zero *z, StateKind kind, int64_t n, const void *kept, int64_t from, int64_t count, float *values) {
    const uint16_t *weight = (const uint16_t *)kept + from, *remainder = weight + n;
    if (kind != STATE_MASTER || master_dtype(z->model) != DTYPE_REMAINDER) memcpy(values, (const float *)kept + from, (size_t)count * 4);
    else for (int64_t i = 0; i < count; i++) values[i] = master_join(weight[i], remainder[i]);
}

// The mirror of zero_range_read. Writing masters also rounds them into the weights; when all are written, zero_weights_changed makes it known.
static void zero_range_write(Zero *z, int row, StateKind kind, int64_t first, int64_t n, const float *values) {
    const ParamDesc *r = &z->model->table.row[row];
    const UnitState *s = &z->unit[r->unit];
    int64_t at = r->offset + first - s->update_first;
    CHECK(r->numel > 0 && kind != STATE_GRAD && (kind == STATE_MASTER || s->state[kind - STATE_OPTIMIZER_0]), "row %s, state %d is not there", r->name, (int)kind);
    CHECK(at >= 0 && at + n <= s->update_numel, "row %s, %" PRId64 " elements from %" PRId64, r->name, n, first);
    watch_tick();
    zero_await_update(z, r->unit);
    offload_open_unit(&z->offload, r->unit, true);
    if (kind == STATE_MASTER) zero_write_masters(z, r->unit, at, n, values);
    else zero_put(z, s->state[kind - STATE_OPTIMIZER_0], s->update_on_host, at * 4, values, n * 4);
}

// What this rank updates of a row, out of the whole tensor; of a table that two stages hold, each writes its own.
static void zero_row_write(Zero *z, int row, StateKind kind, const float *tensor) {
    const ParamDesc *r = &z->model->table.row[row];
    ParamRun run[PARAM_RUNS_MAX];
    int64_t first, last, at = 0;
    zero_row_range(z, r, &first, &last);
    if (first >= last) return;
    float *part = (float *)host_alloc((size_t)(last - first) * 4);
    int n_runs = param_runs(r, z->model->table.tp_rank, first, last, run);
    for (int i = 0; i < n_runs; i++)
        for (int64_t k = 0; k < run[i].count; k++, at += run[i].numel) memcpy(part + at, tensor + run[i].global_offset + k * run[i].stride, (size_t)run[i].numel * 4);
    zero_range_write(z, row, kind, first, last - first, part);
    free(part);
}

// The mirror of zero_tensor_read; `values` are the same on every rank.
static void zero_tensor_write(Zero *z, int row, StateKind kind, const float *values) {
    const ParamTable *table = &z->model->table;
    for (int i = 0; i < table->n_rows; i++)
        if ((i == row || table->row[i].tied_to == row) && table->row[i].numel > 0) zero_row_write(z, i, kind, values);
    if (kind == STATE_MASTER) zero_weights_changed(z);
}

// Masters become what the weights are: the digits that only they had are gone (load_from_fp32_weights false).
static void zero_masters_from_weights(Zero *z) {
    if (z->model->dtype == DTYPE_FP32) return; // they are the weights
    for (int u = 0; u < z->model->table.n_units; u++) {
        const UnitState *s = &z->unit[u];
        zero_await_update(z, u);
        offload_open_unit(&z->offload, u, true);
        if (master_dtype(z->model) == DTYPE_REMAINDER) {
            if (s->update_on_host) memset(s->master, 0, (size_t)s->update_numel * 2);
            else device_memset(s->master, 0, s->update_numel * 2, z->stream);
        } else if (s->update_on_host || s->param_on_host) {
            float *values = (float *)host_alloc((size_t)s->update_numel * 4);
            stream_sync(z->stream);
            for (int64_t i = 0; i < s->update_numel; i++) values[i] = dtype_load(z->offload.unit[u].array[HOST_WEIGHT], z->model->dtype, i);
            zero_put(z, s->master, s->update_on_host, 0, values, s->update_numel * 4);
            free(values);
        } else convert(tensor1(s->master, DTYPE_FP32, s->update_numel), tensor1(zero_updated_param(z, s), z->model->dtype, s->update_numel), z->stream);
    }
}

// Elements whose initial values are made at a time, by all threads, and by one of them: few enough to stay in the caches until they are rounded.
enum { INIT_NUMEL = 2 << 20, INIT_THREAD_NUMEL = 8192 };

// Fills the weights with their initial values, a function of (seed, name, global index).
static void zero_init_weights(Zero *z, uint64_t seed) {
    const ParamTable *table = &z->model->table;
    float *values = (float *)host_alloc((size_t)INIT_NUMEL * 4);
    for (int i = 0; i < table->n_rows; i++) {
        const ParamDesc *r = &table->row[i];
        int64_t first, last;
        if (r->numel == 0) continue;
        zero_row_range(z, r, &first, &last);
        for (int64_t from = first; from < last; from += INIT_NUMEL) {
            ParamRun run[PARAM_RUNS_MAX];
            const int64_t n = min_i64(INIT_NUMEL, last - from);
            const int n_runs = param_runs(r, table->tp_rank, from, from + n, run);
            for (int j = 0; j < n_runs; j++) {
                const int64_t parts = ceil_div(run[j].numel, INIT_THREAD_NUMEL); // of each of its stretches
#pragma omp parallel for schedule(static)
                for (int64_t k = 0; k < run[j].count * parts; k++) {
                    const int64_t stretch = k / parts, at = k % parts * INIT_THREAD_NUMEL;
                    param_initial_values(table, r, seed, run[j].global_offset + stretch * run[j].stride + at, min_i64(INIT_THREAD_NUMEL, run[j].numel - at),
                                         values + (run[j].local_first - from + stretch * run[j].numel + at));
                }
            }
            zero_range_write(z, i, STATE_MASTER, from, n, values);
        }
    }
    free(values);
    zero_weights_changed(z);
}

// Model folders are read and written by rank 0. It asks, by zero_ask_*, and the others answer in zero_serve until it says that it
// is done; so the file code need not know how many ranks there are.
typedef enum { ASK_DONE, ASK_READ, ASK_WRITE } AskKind;

typedef struct {
    int32_t ask, row, kind; // AskKind, row, StateKind
} Ask;

static void zero_ask(AskKind kind, int row, int state) {
    watch_tick();
    Ask a = {(int32_t)kind, (int32_t)row, (int32_t)state};
    comm_host_broadcast(&a, sizeof a, 0);
}

static void zero_ask_read(void *zero, int row, int kind, float *values) {
    zero_ask(ASK_READ, row, kind);
    zero_tensor_read((Zero *)zero, row, (StateKind)kind, values);
}

static void zero_ask_write(void *zero, int row, int kind, const float *values) {
    Zero *z = (Zero *)zero;
    zero_ask(ASK_WRITE, row, kind);
    comm_host_broadcast((void *)values, param_numel(&z->model->table.row[row]) * 4, 0);
    zero_tensor_write(z, row, (StateKind)kind, values);
}

static void zero_serve(Zero *z) {
    for (;;) {
        Ask a;
        comm_host_broadcast(&a, sizeof a, 0);
        watch_tick();
        if (a.ask == ASK_DONE) return;
        int64_t bytes = param_numel(&z->model->table.row[a.row]) * 4;
        float *values = (float *)host_alloc((size_t)bytes);
        if (a.ask == ASK_READ) zero_tensor_read(z, a.row, (StateKind)a.kind, values);
        else {
            comm_host_broadcast(values, bytes, 0);
            zero_tensor_write(z, a.row, (StateKind)a.kind, values);
        }
        free(values);
    }
}
