// zero.cu - where weights, gradients and optimizer states live, and how a unit gets them when it computes.
//
// N ranks that compute on different data hold the same weights, and would hold N copies of everything. ZeRO (Rajbhandari et
// al. 2020) removes the copies: of P parameters each rank keeps 1/N of the masters and optimizer states (stage 1), of the
// gradients (2), of the weights (3), and the whole exists only while somebody computes with it. In bytes a rank, for bf16
// weights, fp32 masters and gradients, and AdamW, and in bytes of the messages of an update of m micro-batches (of which
// a rank sends and receives (N-1)/N):
//
//              weights   gradients   masters + states   summed         gathered
//     stage 0    2 P        4 P          10 P           4 P            4 P (sums)     sums go to everybody
//     stage 1    2 P        4 P          10 P / N       4 P            2 P            each rank updates its part, then the parts are gathered
//     stage 2    2 P        4 P / N      10 P / N       4 P m          2 P            a unit's gradient is summed into its parts as soon as it is whole
//     stage 3    2 P / N    4 P / N      10 P / N       4 P m          up to 4 P m    a unit's weights are gathered before it computes, dropped after
//
// plus a few whole units in flight (Zero.param_pool, Zero.grad_pool). Of those 10 bytes the masters take 2, since a master is
// its bf16 weight and a remainder, exact to the last bit (runtime/tensor.h); in fp16, which has fewer exponents, they take 4.
// Gradients that travel in 16 bits (communication_data_type) are 2 P of messages instead of 4 P, and shards of them in bf16
// (grad_accum_dtype) 2 P of memory. From stage 2 on the backward pass writes those of blocks as they travel, if that is the
// model's type, too: then they never exist in fp32. Without reduce_scatter each sum is an all-reduce, which moves twice the bytes and gives
// the same sums.
//
// The model sees none of this. It asks for a unit through four verbs:
//
//     zero_fetch(z, u)       weights of unit u, whole and current; starts to gather those that come next
//     zero_release(z, u)     done with them
//     zero_grad_begin(z, u)  room for the gradients of unit u, and whether to add to it or to overwrite it
//     zero_grad_end(z, u)    they are written: reduce them to their parts, now or when all micro-batches have added theirs; and
//                            zero_reduce_bucket behind the last unit of a backward pass
//
// The life of a unit's weights:
//
//               gather_start                 zero_fetch              zero_release
//     SHARDED ----------------> GATHERING ----------------> IN_USE ----------------> GATHERED
//        ^                                      ^                                      |  |
//        |                                      +------------- zero_fetch -------------+  |
//        +------- evict (stage 3: the buffer is needed), or the optimizer changed it -----+
//
// and of its gradient (stages 0 and 1 keep `grad` until all micro-batches have added to it, then go the same way once):
//
//         zero_grad_begin         zero_grad_end             zero_reduce_bucket             zero_take_sum
//     FREE --------------> WRITTEN -------------> IN THE BUCKET ------------------> ON ITS WAY ------------> FREE
//
//     grad (fp32, whole) --convert--> wire (whole) --sum over the ranks--> this rank's part of it --add, or convert--> grad_shard
//       or written in 16 bits, as --^ communication_data_type                                                   grad_accum_dtype
//
// Everything of a unit lies in flat buffers of `whole` elements (ParamDesc.offset says where a row starts), cut into N equal
// parts: a shard is a range of elements, and needs no list of tensors.
//
//     param  [ shard 0 | shard 1 | ... | shard N-1 ]   model's dtype
//     grad   [ shard 0 | shard 1 | ... | shard N-1 ]   fp32, or as it travels (layout_grad_dtype)
//     master, states: the elements that this rank updates: its shard (stage >= 1) or all of them (stage 0)
//
// Which unit comes next needs no tracing: the program of an update is known, so the list of uses is, too (use_list). The
// cursor is where the run is in it. Gathers look ahead of the cursor, by allgather_bucket_size after an update of stages 1 and 2,
// by prefetch_bucket_size at stage 3; a buffer is taken from the unit whose next use is furthest (Belady 1966), which keeps
// the last blocks of forward for the first of backward.
//
// Stages differ in the size of shards and in which buffers are shared, not in functions; with one rank every gather is
// void. Gathers and reductions run on streams of their own, next to the computation. The host waits once an update, for the sums
// that decide it (optimizer.cu).
//
// Where the ranks reach each other's memory (direct_exchange: the GPUs of one host) a sum over them is an exchange, by which each
// gets all ranks' parts of its own shard, and one kernel that adds these in the order of the ranks; what moves, moves by copy
// engine. A reduction that NCCL does by kernels holds processors that products were cut to fill, and hiding it behind them costs
// more than it takes alone. Between hosts the library reduces: it knows which of them are near.
//
// A unit's masters and states, and at stage 3 its shard of the weights, may live in host memory or in files, and the CPU update them
// (offload.cu). Then the sum goes on from grad_shard to the host, a fetch waits for the CPU before anything else, and a gather begins with a copy,
// or with a read before that.
//
// Invariants:
//  1. A unit IN_USE is never evicted; uses nest (the head uses the embedding's table when they are tied).
//  2. Every rank starts the same gathers and reductions in the same order: the decisions depend on the list, the cursor
//     and sizes only, which are the same everywhere.
//  3. A whole buffer is valid only while its version is the version of the weights.
//  4. A buffer is filled again only after its last reader: gathers wait for UnitState.released, gradients for
//     UnitState.reduced and GradBuffer.reduced. Zero.wire has one reader and one writer, the reduce stream.
//  5. Gathered elements of the blocks that take turns never exceed stage3_max_live_parameters, unless two blocks alone do; the
//     blocks that stay whole are counted by stage3_model_persistence_threshold.
//  6. A gradient row is overwritten by its first writer and added to by the later ones; rows that share storage share
//     that state. From stage 2 on, each micro-batch begins anew, since its sum has left for the shard.
//  7. Each element counts once in the norm: a rank sums the squares of its own shard, at every stage, but for what other ranks
//     hold as well and count: see zero_counted.
//  8. Padding (between rows, of the vocabulary, at the end of the last shard) is zero in every buffer, for ever.
//  9. No size and no stream changes a bit: every element is rounded at the same places (into the wire, whether its kernel or
//     convert does it; after the sum; into the shard), and the ranks' parts of it are added in an order that does not depend on what else is in the message. (On the CPU
//     that is the order of the ranks. NCCL's order follows from its algorithm, which may change with a message's size.)
// 10. What the sums are still to be divided by to be the mean's gradient (postdivide) is in the gradient of the loss already:
//     prescale_gradients and gradient_predivide_factor move a factor from one side of the sum to the other.
// Parts: zero_setup.cu (what a rank has room for), zero_tensors.cu (tensors seen from outside). Read next: acts.cu.
#pragma once
#include "model.cu"
#include "offload.cu"
#include "runtime/groups.h"
#include "runtime/watch.h"
#include "runtime/memory.h"

enum { ZERO_STATES_MAX = OFFLOAD_STATES_MAX };
// Beyond this many elements a longer message is not faster (NCCL's bandwidth levels off near 64 MB), so buckets need not grow.
enum { BUCKET_ENOUGH_NUMEL = 16 << 20 };

typedef enum { UNIT_SHARDED, UNIT_GATHERING, UNIT_GATHERED, UNIT_IN_USE } UnitStatus;

typedef struct {
    UnitStatus status;
    int64_t version;      // of the weights in `param`
    int uses;             // nested fetches
    bool dedicated;       // `param` is the unit's own for ever; otherwise it comes from the pool
    int64_t shard_numel;  // elements of a rank's shard
    int64_t whole;        // shard_numel * ranks
    int64_t update_first, update_numel; // elements of the unit that this rank updates
    bool update_on_host;  // by the CPU: `master` and `state` lie in host memory, with a mirror of the weights (Zero.offload)
    bool param_on_host;   // `param_shard` lies in host memory or in a file, and is copied to its place in `param` when the unit is gathered
    bool updating;        // the CPU has been given the unit's update, and the program has not fetched the unit since
    void *param;          // (whole) model's dtype; null while the unit is sharded and has no buffer
    void *param_shard;    // (shard_numel) inside `param`, or at stage 3 of its own
    void *master;         // (update_numel) of master_dtype; the same memory as the weights when the model is fp32
    float *state[ZERO_STATES_MAX]; // (update_numel) fp32
    void *grad;           // (whole) of grad_dtype; from stage 2 on only between grad_begin and the end of the reduction
    DType grad_dtype;     // see layout_grad_dtype
    void *grad_shard;     // (shard_numel) fp32 inside `grad`, or from stage 2 on of its own, in grad_accum_dtype
    void *wire;           // (whole) communication_data_type: what travels while the unit is in the bucket; `grad` itself where that has the type
    int grad_buffer;      // which one of grad_pool `grad` is, or -1
    bool shard_written;   // grad_shard holds the sum of some micro-batches of this update
    Event gathered;       // recorded on the gather stream
    Event released;       // recorded on the compute stream at the last zero_release
    Event reduced;        // recorded on the reduce stream when a dedicated `grad` may be written again
} UnitState;

// Room for the weights, or for the gradient, of any block: blocks take turns.
typedef struct {
    void *data;
    int unit;             // whose weights it holds, or -1
} ParamBuffer;

typedef struct {
    void *data;
    Event reduced;        // its last reduction is done: it may be written again
} GradBuffer;

// What zero.cu takes from the configuration; the keys' names, see --help-config.
typedef struct {
    int stage;
    int64_t reduce_bucket_size, allgather_bucket_size, prefetch_bucket_size, max_live_parameters, max_reuse_distance; // elements
    int64_t param_persistence_threshold, model_persistence_threshold; // elements, the second over all ranks
    bool overlap_comm, reduce_scatter;
    bool direct_exchange;          // wanted; whether it is done, layout_direct says
    DType communication_data_type; // in which gradients travel
    DType grad_accum_dtype;        // of the shards in which they are summed from stage 2 on
    bool prescale_gradients, gradient_allreduce_op; // the second: sum instead of mean
    double gradient_predivide_factor;
    bool offload_optimizer, offload_param, pin_memory;
    double offload_ratio;          // share of the elements whose update is offloaded
    OffloadFiling offload_filing;  // what of it is in files, and how
    int64_t sub_group_size;        // elements of an update on the CPU at a time, at most
    bool split_backward;           // a unit's gradient becomes whole in two phases, between which other micro-batches come: it is kept, and summed once
} ZeroOptions;

static OffloadFiling zero_filing(const ZeroConfig *c) {
    const OffloadConfig *section[OFFLOAD_FILES] = {&c->offload_optimizer, &c->offload_param};
    OffloadFiling f;
    memset(&f, 0, sizeof f);
    for (int i = 0; i < OFFLOAD_FILES; i++) {
        f.used[i] = section[i]->device == OFFLOAD_NVME;
        f.folder[i] = section[i]->nvme_path;
        f.makes_folder[i] = section[i]->nvme_derived;
    }
    f.buffer_count = f.used[FILE_UPDATE] ? (int)c->offload_optimizer.buffer_count : OFFLOAD_BUFFERS; // the keys are the optimizer's
    f.pipeline_read = !f.used[FILE_UPDATE] || c->offload_optimizer.pipeline_read;
    f.pipeline_write = !f.used[FILE_UPDATE] || c->offload_optimizer.pipeline_write;
    f.weight_buffer_count = (int)c->offload_param.buffer_count;
    f.weight_buffer_numel = c->offload_param.buffer_size;
    f.weights_in_memory = c->offload_param.max_in_cpu;
    f.aio.block_size = c->aio.block_size;
    f.aio.queue_depth = (int)c->aio.queue_depth;
    f.aio.intra_op_parallelism = (int)c->aio.intra_op_parallelism;
    f.aio.single_submit = c->aio.single_submit;
    f.aio.overlap_events = c->aio.overlap_events;
    return f;
}

static ZeroOptions zero_options(const ZeroConfig *c) {
    ZeroOptions o;
    memset(&o, 0, sizeof o);
    o.stage = (int)c->stage;
    o.reduce_bucket_size = c->reduce_bucket_size;
    o.allgather_bucket_size = c->allgather_bucket_size;
    o.prefetch_bucket_size = c->prefetch_bucket_size;
    o.max_live_parameters = c->max_live_parameters;
    o.max_reuse_distance = c->max_reuse_distance;
    o.param_persistence_threshold = c->param_persistence_threshold;
    o.model_persistence_threshold = c->model_persistence_threshold;
    o.overlap_comm = c->overlap_comm;
    o.reduce_scatter = c->reduce_scatter;
    o.direct_exchange = c->direct_exchange;
    o.communication_data_type = c->communication_data_type;
    o.grad_accum_dtype = c->grad_accum_dtype;
    o.prescale_gradients = c->prescale_gradients;
    o.gradient_allreduce_op = c->gradient_allreduce_op;
    o.gradient_predivide_factor = c->gradient_predivide_factor;
    o.offload_optimizer = c->offload_optimizer.device != OFFLOAD_NONE;
    o.offload_filing = zero_filing(c);
    o.offload_ratio = c->offload_optimizer.ratio;
    o.offload_param = c->offload_param.device != OFFLOAD_NONE;
    o.pin_memory = (!o.offload_optimizer || c->offload_optimizer.pin_memory) && (!o.offload_param || c->offload_param.pin_memory);
    o.sub_group_size = c->sub_group_size;
    return o;
}

// How a unit lies on one rank. The *_bytes are pieces of memory; 0: there is none, or it lies inside another.
typedef struct {
    int64_t shard_numel, whole, update_first, update_numel; // elements, see UnitState
    bool dedicated;
    int64_t param_bytes;        // whole, of the unit's own
    int64_t param_shard_bytes;  // beside `param`
    int64_t master_bytes;
    int64_t state_bytes;        // of each state
    int64_t grad_bytes;         // whole, of the unit's own
    int64_t grad_shard_bytes;   // beside `grad`
    bool update_on_host;        // masters and states are there, and nothing of them here
    bool param_on_host;         // so is the shard of the weights, or in a file
    int64_t host_element[HOST_ARRAYS]; // bytes of an element of what host memory holds of the update_numel; see host_elements
    int64_t file_element[HOST_ARRAYS]; // and of what files do
} UnitLayout;

// Everything that zero.cu allocates on one rank. A function of sizes alone (zero_layout), so that a planner can ask for any
// rank of any world.
typedef struct {
    ZeroOptions opt;            // up to n_states: what it follows from
    int ranks, rank;            // that share the weights
    bool with_gradients;
    int n_states;               // of the optimizer; 0 without gradients
    UnitLayout *unit;           // by unit
    int n_param_pool, n_grad_pool;
    int64_t param_buffer_bytes, grad_buffer_bytes; // of each buffer in the pools: any block fits
    int64_t bucket_limit;       // elements
    int64_t wire_bytes;         // what a bucket holds of fp32 gradients, in a communication_data_type of 16 bits
    int64_t parts_bytes;        // with direct exchange, what all ranks have for this one
    int64_t staging_numel;      // fp32, of the largest unit
    int64_t update_room_bytes;  // of the largest shard whose weights live in host memory and whose update on the device
    MemoryUse bytes, host_bytes; // all of it, by kind: of the device, and of host memory
    FileRoom file_room;         // of host memory, for what is in files
    int64_t file_bytes[OFFLOAD_FILES]; // but for what the pieces are rounded up to
} ZeroLayout;

typedef struct {
    ZeroOptions opt;
    Group gather_group, reduce_group; // the same ranks, as two channels: gathers and reductions may be in flight together
    Group tp_group;        // tensor parallelism: ranks that hold the same of what is not split
    Group twin_group;      // the two that hold a tied table on two stages of the pipeline
    Group job_group;       // all ranks of the grid
    ProcessGrid grid;
    const Model *model;
    Stream stream, gather_stream, reduce_stream;
    Stream keep_stream;    // of copies for checkpoints
    bool keeping;          // some may be under way
    Event computed;        // orders one stream behind another: recorded, and at once waited for, so it may be used again
    int n_states;
    UnitState *unit;       // by unit
    bool *grad_written;    // by row, see invariant 6
    bool last_micro_batch;
    double postdivide;     // ranks / what gradients are divided by before they are summed: their sums are the mean's times this
    double divisor;        // what the update divides the sums by: postdivide, or less by the data-parallel ranks for gradient_allreduce_op = sum
    int64_t version;       // of the weights: grows with every update
    // The list of uses: units in the order in which the program will fetch them, over and over.
    const int *use_list;
    int n_uses, cursor;    // cursor: the next use, n_uses at the end
    // Buffers that blocks share at stage 3, and gradients from stage 2 on.
    ParamBuffer *param_pool;
    int n_param_pool;
    GradBuffer *grad_pool;
    int n_grad_pool, next_grad_buffer;
    // Units whose gradient is written and whose reduction has not started: a bucket
    int *bucket;
    int n_bucket;
    int64_t bucket_numel, bucket_limit;
    void *parts;           // (ZeroLayout.parts_bytes; `wire` lies behind it) where, with direct exchange, the parts of a unit's gradient arrive
    float *staging;        // (ZeroLayout.staging_numel) for tensors on their way out
    void *update_room;     // (ZeroLayout.update_room_bytes) weights from host memory, while the device updates them
    char *wire;            // (ZeroLayout.wire_bytes) the fp32 gradients of a bucket, rounded for their way; null where they travel in fp32
    ZeroLayout layout;
    Offload offload;       // what lives in host memory
    MemoryUse allocated;   // of the device, on this rank, so far
} Zero;

#include "zero_setup.cu"

// ---------------------------------------------------------------------------------------------------------------
// Gathering weights

static int zero_use_at(const Zero *z, int64_t position) { return z->use_list[position % z->n_uses]; }

// Elements of other units that are used before `unit` is used again; INT64_MAX if it is not in the list.
static int64_t zero_reuse_distance(const Zero *z, int unit) {
    int64_t elements = 0;
    for (int i = 0; i < z->n_uses; i++) {
        int u = zero_use_at(z, z->cursor + i);
        if (u == unit) return elements;
        elements += z->unit[u].whole;
    }
    return INT64_MAX;
}

static void zero_evict(Zero *z, ParamBuffer *b) {
    UnitState *s = &z->unit[b->unit];
    CHECK(s->uses == 0 && s->status != UNIT_IN_USE, "unit %d is in use", b->unit);
    s->param = NULL;
    s->status = UNIT_SHARDED;
    b->unit = -1;
}

// A buffer for a block that is to be gathered, or null. A buffer that holds current weights is given up only for a use that
// comes earlier than its own.
static ParamBuffer *zero_take_buffer(Zero *z, int64_t distance) {
    ParamBuffer *furthest = NULL;
    int64_t furthest_distance = distance;
    for (int i = 0; i < z->n_param_pool; i++) {
        ParamBuffer *b = &z->param_pool[i];
        if (b->unit < 0) return b;
        const UnitState *s = &z->unit[b->unit];
        if (s->uses > 0) continue;
        int64_t d = s->version == z->version ? zero_reuse_distance(z, b->unit) : INT64_MAX;
        if (d > furthest_distance) furthest = b, furthest_distance = d;
    }
    return furthest;
}

// The CPU has made its update of a unit, and what is enqueued from here on sees the weights. Before that nobody may touch them.
static void zero_await_update(Zero *z, int unit) {
    if (!z->unit[unit].updating) return;
    offload_wait(&z->offload, unit);
    stream_wait_event(z->stream, z->offload.unit[unit].returned);
    stream_wait_event(z->gather_stream, z->offload.unit[unit].returned);
}

// The CPU begins to update what lives in host memory, by update(context, ...); see offload.cu.
static void zero_update_on_host(Zero *z, OffloadUpdate update, void *context) {
    offload_update_begin(&z->offload, update, context);
    for (int u = 0; u < z->model->table.n_units; u++) z->unit[u].updating = z->unit[u].update_on_host;
}

// Enqueues the gather of a unit whose copy is missing or stale. False if there is no buffer for it now.
static bool gather_start(Zero *z, int unit, int64_t distance) {
    UnitState *s = &z->unit[unit];
    CHECK(s->uses == 0, "unit %d changed while in use", unit);
    if (!s->param) {
        ParamBuffer *b = zero_take_buffer(z, distance);
        if (!b) return false;
        if (b->unit >= 0) {
            stream_wait_event(z->gather_stream, z->unit[b->unit].released); // invariant 4
            zero_evict(z, b);
        }
        b->unit = unit;
        s->param = b->data;
    }
    watch_unit(unit);
    const void *shard = s->param_shard;
    if (s->param_on_host) {
        int64_t bytes = s->shard_numel * dtype_bytes(z->model->dtype);
        shard = (char *)s->param + z->gather_group.rank * bytes;
        offload_fetch_weights(&z->offload, unit, (void *)shard, z->gather_stream);
    }
    if (z->gather_group.size > 1) comm_all_gather(z->gather_group, s->param, shard, s->shard_numel, z->model->dtype, z->gather_stream);
    event_record(s->gathered, z->gather_stream);
    s->version = z->version;
    s->status = UNIT_GATHERING;
    return true;
}

static bool zero_is_current(const Zero *z, int unit) { return z->unit[unit].status != UNIT_SHARDED && z->unit[unit].version == z->version; }

// Starts the gathers that come next: those of the units that begin within so many elements of the cursor, stopping at the
// first that has no buffer, so that a nearer unit never waits behind a further one. It does not look past the end of the
// list: what comes after is another update, and its weights are not written yet. Nor does it look past a unit that the CPU may still
// be updating: waiting for it would keep the launching thread from the unit before it, whose work the device is to do meanwhile.
// (That the CPU has finished already must not matter, by invariant 2; its unit is then gathered when it is fetched, still well ahead of
// the device.)
static void zero_prefetch(Zero *z) {
    int64_t ahead = 0, limit = zero_shards_params(z) ? z->opt.prefetch_bucket_size : z->opt.allgather_bucket_size;
    for (int i = 0; z->cursor + i < z->n_uses && ahead < limit; i++) {
        int u = z->use_list[z->cursor + i];
        ahead += z->unit[u].whole;
        if (z->unit[u].updating) return;
        if (!zero_is_current(z, u) && !gather_start(z, u, zero_reuse_distance(z, u))) return;
    }
}

// Weights in a file are read further ahead, as far as there are buffers for them. That is this rank's own affair: it may depend on what the
// CPU has updated by now.
static void zero_read_ahead(Zero *z) {
    for (int i = 0; i < 2 * z->model->table.n_units && z->cursor + i < z->n_uses && z->offload.n_weights > 0; i++) {
        int u = z->use_list[z->cursor + i];
        if (!zero_is_current(z, u) && !offload_read_ahead(&z->offload, u)) return;
    }
}

static void zero_use(Zero *z, int unit) {
    UnitState *s = &z->unit[unit];
    if (z->n_uses) {
        if (z->cursor == z->n_uses) z->cursor = 0;
        CHECK(z->use_list[z->cursor] == unit, "unit %d is fetched where the program says %d", unit, z->use_list[z->cursor]);
        z->cursor++;
    }
    zero_await_update(z, unit);
    s->updating = false; // here alone: who reads states waits for units of its own, and gathers must not depend on that (invariant 2)
    // A nested use finds the unit current: weights change only between updates.
    if (!zero_is_current(z, unit)) CHECK(gather_start(z, unit, -1), "no buffer for unit %d", unit);
    if (s->status == UNIT_GATHERING) stream_wait_event(z->stream, s->gathered);
    s->status = UNIT_IN_USE;
    s->uses++;
}

static void zero_unuse(Zero *z, int unit) {
    UnitState *s = &z->unit[unit];
    CHECK(s->status == UNIT_IN_USE && s->uses > 0, "unit %d released without a fetch", unit);
    if (--s->uses > 0) return;
    s->status = UNIT_GATHERED;
    if (s->dedicated) return;
    event_record(s->released, z->stream);
    if (zero_reuse_distance(z, unit) <= z->opt.max_reuse_distance) return;
    for (int i = 0; i < z->n_param_pool; i++)
        if (z->param_pool[i].unit == unit) {
            stream_wait_event(z->gather_stream, s->released); // whoever takes the buffer finds it free
            zero_evict(z, &z->param_pool[i]);
        }
}

// ---------------------------------------------------------------------------------------------------------------
// The verbs: weights

// Units that a unit's weights come from, itself first: its own rows, then those that it is tied to.
static int zero_units_of(const ParamTable *table, int unit, int units[2]) {
    int n = 0;
    units[n++] = unit;
    for (int i = table->unit[unit].first_row; i < table->unit[unit].first_row + table->unit[unit].n_rows; i++)
        if (table->row[i].storage != i) {
            CHECK(n < 2, "unit %d is tied to more than one other", unit);
            units[n++] = table->row[table->row[i].storage].unit;
        }
    return n;
}

// Weights of a unit; rows that are tied to another unit's come from there. Valid until zero_release.
static Weights zero_fetch(Zero *z, int unit) {
    const ParamTable *table = &z->model->table;
    int units[2], n = zero_units_of(table, unit, units);
    Weights w;
    memset(&w, 0, sizeof w);
    watch_tick();
    for (int i = 0; i < n; i++) zero_use(z, units[i]);
    if (z->n_uses) zero_prefetch(z);
    zero_read_ahead(z);
    for (int i = table->unit[unit].first_row; i < table->unit[unit].first_row + table->unit[unit].n_rows; i++) {
        const ParamDesc *stored = &table->row[table->row[i].storage];
        char *at = (char *)z->unit[stored->unit].param + stored->offset * dtype_bytes(z->model->dtype);
        w.t[table->row[i].role] = tensor_make(at, z->model->dtype, stored->ndim, stored->local[0], stored->local[1], 1, 1);
    }
    return w;
}

static void zero_release(Zero *z, int unit) {
    int units[2], n = zero_units_of(&z->model->table, unit, units);
    for (int i = 0; i < n; i++) zero_unuse(z, units[i]);
}

// The optimizer, or a load, has written new weights into the shards on the compute stream: whole copies are stale, but at
// stage 0, where every rank has written all of them.
static void zero_weights_changed(Zero *z) {
    z->version++;
    if (!zero_shards_updates(z) || z->gather_group.size == 1) {
        for (int u = 0; u < z->model->table.n_units; u++) if (z->unit[u].dedicated) z->unit[u].version = z->version, z->unit[u].status = UNIT_GATHERED;
        if (!zero_shards_params(z)) return;
    }
    event_record(z->computed, z->stream);
    stream_wait_event(z->gather_stream, z->computed); // gathers read what the optimizer writes
}

// ---------------------------------------------------------------------------------------------------------------
// The verbs: gradients

// A new update begins: all gradients count as empty.
static void zero_begin_step(Zero *z) {
    memset(z->grad_written, 0, sizeof(bool) * (size_t)z->model->table.n_rows);
    for (int u = 0; u < z->model->table.n_units; u++) z->unit[u].shard_written = false;
    z->last_micro_batch = false;
    CHECK(z->cursor == 0 || z->cursor == z->n_uses, "the last program ended at use %d of %d", z->cursor, z->n_uses);
    z->cursor = 0;
    zero_prefetch(z);
    zero_read_ahead(z);
}

static Grads zero_grad_begin(Zero *z, int unit) {
    const ParamTable *table = &z->model->table;
    UnitState *s = &z->unit[unit];
    Grads g;
    memset(&g, 0, sizeof g);
    int units[2], n = zero_units_of(table, unit, units);
    for (int i = 0; i < n && zero_shards_grads(z); i++) stream_wait_event(z->stream, z->unit[units[i]].reduced); // invariant 4
    if (!s->grad) { // blocks take turns
        s->grad_buffer = z->next_grad_buffer;
        z->next_grad_buffer = (z->next_grad_buffer + 1) % z->n_grad_pool;
        s->grad = z->grad_pool[s->grad_buffer].data;
        stream_wait_event(z->stream, z->grad_pool[s->grad_buffer].reduced); // invariant 4
    }
    for (int i = table->unit[unit].first_row; i < table->unit[unit].first_row + table->unit[unit].n_rows; i++) {
        int storage = table->row[i].storage, role = table->row[i].role;
        const ParamDesc *stored = &table->row[storage];
        const UnitState *owner = &z->unit[stored->unit];
        char *at = (char *)owner->grad + stored->offset * dtype_bytes(owner->grad_dtype);
        g.t[role] = tensor_make(at, owner->grad_dtype, stored->ndim, stored->local[0], stored->local[1], 1, 1);
        g.accumulate[role] = z->grad_written[storage];
    }
    return g;
}

// Does a sum over the ranks add to that of earlier micro-batches?
static bool zero_sum_adds(const Zero *z, const UnitState *s) { return zero_shards_grads(z) && s->shard_written; }

// Where this rank's part of the sum arrives: in its shard if nothing has to be done with it on the way, else in the part of
// what travels that belongs to this rank.
static void *zero_sum_place(const Zero *z, const UnitState *s) {
    DType wire = layout_wire(&z->layout);
    if (z->opt.reduce_scatter && wire == zero_shard_dtype(z) && z->reduce_group.size > 1 && !zero_sum_adds(z, s)) return s->grad_shard;
    return (char *)s->wire + s->shard_numel * z->reduce_group.rank * dtype_bytes(wire);
}

// Elements [from, to) of a unit's buffer, as far as this rank updates them, of the gradient; of 0 elements if it does not.
static Tensor zero_grad_range(const Zero *z, int unit, int64_t from, int64_t to) {
    const UnitState *s = &z->unit[unit];
    from = max_i64(from, s->update_first);
    to = min_i64(to, s->update_first + s->update_numel);
    return zero_grad_part(z, unit, from - s->shard_numel * z->gather_group.rank, max_i64(0, to - from));
}

// What this rank counts of a unit in sums over all ranks: its shard, without what is the same on all ranks of tensor parallelism
// unless it is the first of them, and without the copy of a table that the stage that the table belongs to counts. It is one range, since
// the one comes last in a unit and the other first.
static Tensor zero_counted(const Zero *z, int unit) {
    const UnitState *s = &z->unit[unit];
    const UnitDesc *d = &z->model->table.unit[unit];
    int64_t first = s->shard_numel * z->gather_group.rank, from = first, to = first + s->shard_numel;
    if (z->model->table.tp_rank > 0) to = min_i64(to, d->split_numel);
    if (d->kind == UNIT_HEAD) from = max_i64(from, d->twin_numel);
    return zero_grad_part(z, unit, from - first, max_i64(0, to - from));
}

// If the CPU updates the unit, its gradient goes there.
static void zero_grad_leaves(Zero *z, int unit, Stream s) {
    const UnitState *u = &z->unit[unit];
    if (u->update_on_host) offload_take_gradient(&z->offload, unit, zero_grad_range(z, unit, 0, u->whole).data, s);
}

// All micro-batches and all ranks that share the unit's weights are in its gradient, on stream s. Each rank of tensor parallelism saw
// its own rows of the residual stream only: of what is not split their gradients are summands.
static void zero_grad_is_final(Zero *z, int unit, Stream s) {
    const UnitDesc *d = &z->model->table.unit[unit];
    if (!z->last_micro_batch) return;
    Tensor same = zero_grad_range(z, unit, d->split_numel, d->numel);
    if (z->tp_group.size > 1 && tensor_numel(same) > 0) comm_all_reduce(z->tp_group, same.data, tensor_numel(same), same.dtype, s);
    if (!d->twin_numel) zero_grad_leaves(z, unit, s);
}

// The gradient of a table that two stages of the pipeline hold is the sum of theirs. It is taken when all else is done: the first stage
// is ready for it last of all, and the last one must not wait for that while others wait for its messages.
static void zero_sum_twins(Zero *z) {
    for (int u = 0; u < z->model->table.n_units; u++) {
        int64_t numel = z->model->table.unit[u].twin_numel;
        if (numel == 0) continue;
        Tensor shared = zero_grad_range(z, u, 0, numel);
        watch_unit(u);
        if (tensor_numel(shared) > 0) comm_all_reduce(z->twin_group, shared.data, tensor_numel(shared), shared.dtype, z->stream);
        zero_grad_leaves(z, u, z->stream);
    }
}

// The sum has arrived: into the shard with it, and the unit's gradient may be written again.
static void zero_take_sum(Zero *z, UnitState *s) {
    DType wire = layout_wire(&z->layout);
    Tensor sum = tensor1(zero_sum_place(z, s), wire, s->shard_numel), shard = tensor1(s->grad_shard, zero_shard_dtype(z), s->shard_numel);
    if (z->opt.stage == 0) { // the shard is the whole
        if (wire != DTYPE_FP32) convert(tensor1(s->grad, DTYPE_FP32, s->whole), tensor1(s->wire, wire, s->whole), z->reduce_stream);
    } else if (layout_direct(&z->layout)) { // zero_exchange has done it
    } else if (zero_sum_adds(z, s)) add_inplace(shard, sum, z->reduce_stream);
    else if (sum.data != shard.data) convert(shard, sum, z->reduce_stream);
    s->shard_written = true;
    zero_grad_is_final(z, (int)(s - z->unit), z->reduce_stream);
    event_record(s->reduced, z->reduce_stream);
    if (s->grad_buffer < 0) return;
    event_record(z->grad_pool[s->grad_buffer].reduced, z->reduce_stream);
    s->grad_buffer = -1;
    s->grad = NULL;
}

// The ranks' parts of this rank's shard arrive by copy engine and are added here, in the order of the ranks.
static void zero_exchange(Zero *z, UnitState *s) {
    DType wire = layout_wire(&z->layout);
    bool into_shard = z->opt.stage > 0; // stage 0 gathers the sums in what travels
    Tensor parts = tensor2(z->parts, wire, z->reduce_group.size, s->shard_numel);
    Tensor sum = into_shard ? tensor1(s->grad_shard, zero_shard_dtype(z), s->shard_numel) : tensor1(zero_sum_place(z, s), wire, s->shard_numel);
    comm_all_to_all(z->reduce_group, z->parts, s->wire, s->shard_numel, wire, z->reduce_stream);
    sum_parts(sum, parts, into_shard && zero_sum_adds(z, s), z->reduce_stream);
}

// Sums the gradients of the bucket over the ranks and puts the sums into their shards, on the reduce stream.
static void zero_reduce_bucket(Zero *z) {
    if (z->n_bucket == 0) return;
    DType wire = layout_wire(&z->layout);
    char *at = z->wire;
    event_record(z->computed, z->stream);
    stream_wait_event(z->reduce_stream, z->computed); // the gradients are written
    for (int i = 0; i < z->n_bucket; i++) {
        UnitState *s = &z->unit[z->bucket[i]];
        s->wire = wire == s->grad_dtype ? s->grad : at;
        if (wire == s->grad_dtype) continue;
        convert(tensor1(s->wire, wire, s->whole), tensor1(s->grad, DTYPE_FP32, s->whole), z->reduce_stream);
        at += s->whole * dtype_bytes(wire);
    }
    // What the copy engines do gains nothing from starting together.
    bool direct = layout_direct(&z->layout);
    if (!direct) comm_batch_begin();
    for (int i = 0; i < z->n_bucket; i++) {
        UnitState *s = &z->unit[z->bucket[i]];
        watch_unit(z->bucket[i]);
        if (direct) zero_exchange(z, s);
        else if (z->opt.reduce_scatter) comm_reduce_scatter(z->reduce_group, zero_sum_place(z, s), s->wire, s->shard_numel, wire, z->reduce_stream);
        else comm_all_reduce(z->reduce_group, s->wire, s->whole, wire, z->reduce_stream);
    }
    if (!direct) comm_batch_end();
    if (z->opt.stage == 0 && z->opt.reduce_scatter) { // every rank updates everything
        if (!direct) comm_batch_begin();
        for (int i = 0; i < z->n_bucket; i++) {
            UnitState *s = &z->unit[z->bucket[i]];
            watch_unit(z->bucket[i]);
            comm_all_gather(z->reduce_group, s->wire, zero_sum_place(z, s), s->shard_numel, wire, z->reduce_stream);
        }
        if (!direct) comm_batch_end();
    }
    for (int i = 0; i < z->n_bucket; i++) zero_take_sum(z, &z->unit[z->bucket[i]]);
    z->n_bucket = 0;
    z->bucket_numel = 0;
}

// phases: those whose gradients have been written.
static void zero_grad_end(Zero *z, int unit, BackwardPhase phases) {
    const ParamTable *table = &z->model->table;
    bool each = zero_shards_grads(z); // the whole gradient is not kept: every micro-batch is reduced
    for (int i = table->unit[unit].first_row; i < table->unit[unit].first_row + table->unit[unit].n_rows; i++) {
        if (!(param_phase(table->unit[unit].kind, table->row[i].role) & phases)) continue;
        if (table->row[i].storage != i) z->grad_written[table->row[i].storage] = true; // its owner, visited later, adds to it
        else z->grad_written[i] = !each;
    }
    if (phases == PHASE_INPUT && table->unit[unit].kind == UNIT_BLOCK) return; // the weights' are still to come
    if (!each && !z->last_micro_batch) return;
    if (!each && z->reduce_group.size == 1) { zero_grad_is_final(z, unit, z->stream); return; } // the shard is the whole
    // A bucket: as many units as fit, at least one; no more than wait while another is written.
    if (z->n_bucket > 0 && (z->bucket_numel + z->unit[unit].whole > z->bucket_limit || (each && z->n_bucket + 1 >= z->n_grad_pool))) zero_reduce_bucket(z);
    z->bucket[z->n_bucket++] = unit;
    z->bucket_numel += z->unit[unit].whole;
    if (z->bucket_numel >= z->bucket_limit) zero_reduce_bucket(z);
}

// After the last micro-batch: the compute stream goes on when all sums have arrived.
static void zero_finish_grads(Zero *z) {
    CHECK(z->n_bucket == 0, "%d units were not reduced", z->n_bucket);
    if (zero_shards_grads(z) || z->reduce_group.size > 1) {
        event_record(z->computed, z->reduce_stream);
        stream_wait_event(z->stream, z->computed);
    }
    zero_sum_twins(z);
}

#include "zero_tensors.cu"
