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
// Read next: acts.cu.
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
    double divisor;        // what the update divides the sums by: postdivide, or less by the ranks for gradient_allreduce_op = sum
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

// ---------------------------------------------------------------------------------------------------------------
// Setting up

// What is cut into parts; the rest every rank holds whole.
static bool layout_shards_params(const ZeroLayout *l) { // of one rank the shard is the whole, in another memory
    return l->opt.stage >= 3 && (l->ranks > 1 || l->opt.offload_param);
}
static bool layout_shards_grads(const ZeroLayout *l) { // of one rank the shard is the whole, in another type
    return l->opt.stage >= 2 && !l->opt.split_backward && (l->ranks > 1 || l->opt.grad_accum_dtype != DTYPE_FP32);
}
static bool layout_shards_updates(const ZeroLayout *l) { return l->opt.stage >= 1; }

// What gradients travel in. A single rank sends nothing and rounds nothing.
static DType layout_wire(const ZeroLayout *l) { return l->ranks > 1 ? l->opt.communication_data_type : DTYPE_FP32; }

// In what backward writes the gradient of a unit. Where it leaves after every micro-batch nothing is added to it, so its
// kernels may round it for its way themselves; they do so into their own type. The embedding's and the head's stay in fp32:
// tied, both add to one table.
static DType layout_grad_dtype(const ZeroLayout *l, const Model *m, int unit) {
    bool leaves = layout_shards_grads(l) && m->table.unit[unit].kind == UNIT_BLOCK;
    return leaves && layout_wire(l) == m->dtype ? m->dtype : DTYPE_FP32;
}

static bool zero_shards_params(const Zero *z) { return layout_shards_params(&z->layout); }
static bool zero_shards_grads(const Zero *z) { return layout_shards_grads(&z->layout); }
static bool zero_shards_updates(const Zero *z) { return layout_shards_updates(&z->layout); }
static DType zero_shard_dtype(const Zero *z) { return zero_shards_grads(z) ? z->opt.grad_accum_dtype : DTYPE_FP32; }

// Elements [from, from + n) of the shard of a unit's gradient.
static Tensor zero_grad_part(const Zero *z, int unit, int64_t from, int64_t n) {
    DType t = zero_shard_dtype(z);
    return tensor1((char *)z->unit[unit].grad_shard + from * dtype_bytes(t), t, n);
}

// fp32, or what bf16 weights lack of it.
static DType master_dtype(const Model *m) { return m->dtype == DTYPE_BF16 ? DTYPE_REMAINDER : DTYPE_FP32; }

// Are gradients exchanged as parts and added by the ranks themselves, instead of by the library's reductions?
static bool layout_direct(const ZeroLayout *l) { return l->ranks > 1 && l->opt.direct_exchange && l->opt.reduce_scatter; }

// Tensors leave between updates, when no gradients travel: they may use the same memory, the parts' and behind it the wire's.
static bool layout_staging_in_parts(const ZeroLayout *l) { return l->parts_bytes + l->wire_bytes >= max_i64(1, l->staging_numel * 4); }

// What the next forward pass needs first is updated on the device; the border between units that comes nearest to the ratio parts it
// from what the CPU updates.
static bool layout_updates_on_host(const ZeroLayout *l, const Model *m, int unit) {
    int64_t before = 0, all = 0, numel = m->table.unit[unit].numel;
    if (!l->opt.offload_optimizer || !l->with_gradients || !layout_shards_updates(l)) return false;
    for (int u = 0; u < m->table.n_units; u++) {
        all += m->table.unit[u].numel;
        if (u < unit) before += m->table.unit[u].numel;
    }
    return (double)before + 0.5 * (double)numel > (1 - l->opt.offload_ratio) * (double)all;
}

// `kept`: elements of the blocks before this one that stay whole.
static UnitLayout layout_unit(const ZeroLayout *l, const Model *m, int unit, int64_t kept) {
    bool is_block = m->table.unit[unit].kind == UNIT_BLOCK;
    int64_t element = dtype_bytes(m->dtype), numel = m->table.unit[unit].numel;
    UnitLayout u;
    memset(&u, 0, sizeof u);
    u.shard_numel = round_up(ceil_div(numel, l->ranks), ROW_ALIGN);
    u.whole = u.shard_numel * l->ranks;
    u.update_first = layout_shards_updates(l) ? u.shard_numel * l->rank : 0;
    u.update_numel = layout_shards_updates(l) ? u.shard_numel : u.whole;
    // The embedding is needed at both ends of a micro-batch and, when tied, in the middle: it stays. So do small blocks, as many
    // as model_persistence_threshold has room for. DeepSpeed's unit is a tensor, so that there small tensors stay and spare
    // gathers of their own; here they travel with their block, and would spare one part in C of the traffic.
    bool small = numel < l->opt.param_persistence_threshold && kept + numel <= l->opt.model_persistence_threshold / l->ranks;
    u.dedicated = !layout_shards_params(l) || !is_block || small;
    u.param_bytes = u.dedicated ? u.whole * element : 0;
    u.param_on_host = l->opt.offload_param && !u.dedicated; // what stays whole need not come
    u.param_shard_bytes = layout_shards_params(l) && l->ranks > 1 && !u.param_on_host ? u.shard_numel * element : 0;
    u.update_on_host = layout_updates_on_host(l, m, unit);
    u.master_bytes = m->dtype == DTYPE_FP32 || u.update_on_host ? 0 : u.update_numel * dtype_bytes(master_dtype(m)); // fp32 weights are their own masters
    u.state_bytes = l->n_states > 0 && !u.update_on_host ? u.update_numel * 4 : 0;
    u.grad_bytes = l->with_gradients && !(layout_shards_grads(l) && is_block) ? u.whole * 4 : 0;
    u.grad_shard_bytes = l->with_gradients && layout_shards_grads(l) ? u.shard_numel * dtype_bytes(l->opt.grad_accum_dtype) : 0;
    if (u.update_on_host || u.param_on_host) host_elements(u.host_element, m->dtype, l->n_states, layout_shards_grads(l) ? l->opt.grad_accum_dtype : DTYPE_FP32, u.update_on_host);
    if (u.update_on_host && l->opt.offload_filing.used[FILE_UPDATE]) host_elements_file(u.host_element, u.file_element, FILE_UPDATE);
    return u;
}

// Shared buffers: as many whole blocks as the options allow, at least two, so that one can be filled while the other is read.
static void layout_pools(ZeroLayout *l, const Model *m) {
    int64_t block = 0, largest = 0, all = 0, largest_fp32 = 0, all_fp32 = 0; // the latter two: whose gradients are converted
    DType block_grad = DTYPE_FP32;
    int n_blocks = 0, n_turns = 0; // blocks, and those whose weights take turns
    for (int u = 0; u < m->table.n_units; u++) {
        all += l->unit[u].whole;
        largest = max_i64(largest, l->unit[u].whole);
        if (layout_grad_dtype(l, m, u) == DTYPE_FP32) {
            all_fp32 += l->unit[u].whole;
            largest_fp32 = max_i64(largest_fp32, l->unit[u].whole);
        }
        if (m->table.unit[u].kind != UNIT_BLOCK || !m->table.unit[u].held) continue;
        n_blocks++;
        block_grad = layout_grad_dtype(l, m, u);
        n_turns += !l->unit[u].dedicated;
        block = max_i64(block, l->unit[u].whole);
    }
    l->param_buffer_bytes = block * dtype_bytes(m->dtype);
    l->grad_buffer_bytes = block * dtype_bytes(block_grad);
    l->bucket_limit = min_i64(min_i64(l->opt.reduce_bucket_size, BUCKET_ENOUGH_NUMEL), all);
    l->n_param_pool = (int)min_i64(n_turns, max_i64(2, l->opt.max_live_parameters / block));
    if (layout_shards_updates(l) && (l->ranks > 1 || layout_shards_grads(l))) l->staging_numel = largest;
    if (!l->with_gradients) return;
    if (layout_direct(l)) l->parts_bytes = largest * dtype_bytes(layout_wire(l));
    if (layout_wire(l) != DTYPE_FP32) l->wire_bytes = min_i64(max_i64(l->bucket_limit, largest_fp32), all_fp32) * dtype_bytes(layout_wire(l));
    if (!layout_shards_grads(l)) return;
    // A bucket of blocks that waits, and one more to write meanwhile.
    l->n_grad_pool = (int)min_i64(n_blocks, max_i64(1, l->bucket_limit / block) + 1);
}

// The layout of rank `rank` of the `ranks` that share the weights; with_gradients: to train. To be freed by zero_layout_free.
static ZeroLayout zero_layout(const Model *m, ZeroOptions opt, int ranks, int rank, int n_states, bool with_gradients) {
    ZeroLayout l;
    memset(&l, 0, sizeof l);
    l.opt = opt;
    l.ranks = ranks;
    l.rank = rank;
    l.with_gradients = with_gradients;
    l.n_states = with_gradients ? n_states : 0;
    l.unit = (UnitLayout *)host_alloc(sizeof(UnitLayout) * (size_t)m->table.n_units);
    int64_t kept = 0, in_memory = 0;
    for (int i = 0; i < m->table.n_units; i++) {
        UnitLayout *u = &l.unit[i];
        *u = layout_unit(&l, m, i, kept);
        if (u->dedicated && m->table.unit[i].kind == UNIT_BLOCK) kept += m->table.unit[i].numel;
        if (!u->param_on_host || !opt.offload_filing.used[FILE_WEIGHTS]) continue;
        if (in_memory + u->shard_numel <= opt.offload_filing.weights_in_memory) in_memory += u->shard_numel;
        else host_elements_file(u->host_element, u->file_element, FILE_WEIGHTS);
    }
    layout_pools(&l, m);
    int64_t *bytes = l.bytes.bytes;
    for (int i = 0; i < m->table.n_units; i++) {
        const UnitLayout *u = &l.unit[i];
        bytes[MEMORY_WEIGHTS] += u->param_shard_bytes ? u->param_shard_bytes : u->param_bytes;
        bytes[MEMORY_MASTERS] += u->master_bytes;
        bytes[MEMORY_OPTIMIZER_STATES] += l.n_states * u->state_bytes;
        bytes[MEMORY_GRADIENTS] += u->grad_shard_bytes ? u->grad_shard_bytes : u->grad_bytes;
        bytes[MEMORY_BUFFERS] += (u->param_shard_bytes ? u->param_bytes : 0) + (u->grad_shard_bytes ? u->grad_bytes : 0);
        if (with_gradients && u->param_on_host && !u->update_on_host) l.update_room_bytes = max_i64(l.update_room_bytes, u->update_numel * dtype_bytes(m->dtype));
        for (int k = 0; k < HOST_ARRAYS; k++) {
            l.host_bytes.bytes[host_array_kinds[k]] += u->update_numel * u->host_element[k];
            l.file_bytes[array_file(k)] += u->update_numel * u->file_element[k];
        }
        file_room_add(&l.file_room, u->update_numel, offload_piece_numel(opt.sub_group_size), u->file_element);
    }
    if (l.file_room.view > 0) l.host_bytes.bytes[MEMORY_BUFFERS] = file_room_bytes(&l.file_room, &opt.offload_filing);
    bytes[MEMORY_BUFFERS] += l.n_param_pool * l.param_buffer_bytes + l.n_grad_pool * l.grad_buffer_bytes + l.wire_bytes + l.parts_bytes + l.update_room_bytes + (layout_staging_in_parts(&l) ? 0 : l.staging_numel * 4);
    return l;
}

static void zero_layout_free(ZeroLayout *l) { free(l->unit); }

// Zeros (invariant 8), or null for no bytes.
static void *zero_alloc_for(Zero *z, const Group *g, int64_t bytes, MemoryKind kind) {
    if (bytes == 0) return NULL;
    void *p = g ? comm_malloc(*g, bytes) : device_malloc(bytes);
    device_memset(p, 0, bytes, z->stream);
    z->allocated.bytes[kind] += bytes;
    return p;
}
static void *zero_alloc(Zero *z, int64_t bytes, MemoryKind kind) { return zero_alloc_for(z, NULL, bytes, kind); }

static void zero_init_unit(Zero *z, int u) {
    UnitState *s = &z->unit[u];
    const UnitLayout *l = &z->layout.unit[u];
    int rank = z->gather_group.rank;
    int64_t element = dtype_bytes(z->model->dtype);
    s->shard_numel = l->shard_numel;
    s->whole = l->whole;
    s->update_first = l->update_first;
    s->update_numel = l->update_numel;
    s->dedicated = l->dedicated;
    s->grad_buffer = -1;
    s->gathered = event_create();
    s->released = event_create();
    s->reduced = event_create();
    s->param = zero_alloc_for(z, &z->gather_group, l->param_bytes, l->param_shard_bytes ? MEMORY_BUFFERS : MEMORY_WEIGHTS);
    s->param_shard = l->param_shard_bytes ? zero_alloc_for(z, &z->gather_group, l->param_shard_bytes, MEMORY_WEIGHTS) : (char *)s->param + s->shard_numel * rank * element;
    s->grad_dtype = layout_grad_dtype(&z->layout, z->model, u);
    s->grad = zero_alloc_for(z, &z->reduce_group, l->grad_bytes, l->grad_shard_bytes ? MEMORY_BUFFERS : MEMORY_GRADIENTS);
    s->grad_shard = zero_alloc(z, l->grad_shard_bytes, MEMORY_GRADIENTS);
    if (s->grad && !s->grad_shard) s->grad_shard = (float *)s->grad + s->shard_numel * rank;
    s->update_on_host = l->update_on_host;
    s->param_on_host = l->param_on_host;
    if (l->update_on_host) return; // the rest is zero_init_offload's
    s->master = zero_alloc(z, l->master_bytes, MEMORY_MASTERS);
    if (!s->master && !s->param_on_host) s->master = (l->param_shard_bytes ? s->param_shard : (char *)s->param + s->update_first * element);
    for (int i = 0; i < z->n_states; i++) s->state[i] = (float *)zero_alloc(z, l->state_bytes, MEMORY_OPTIMIZER_STATES);
}

// The weights that this rank updates: element update_first of the unit, and on.
static void *zero_updated_param(const Zero *z, const UnitState *s) {
    return (char *)s->param_shard + (s->update_first - s->shard_numel * z->gather_group.rank) * dtype_bytes(z->model->dtype);
}

// Elements of what this rank updates of a unit that decay: the first so many.
static int64_t zero_decay_border(const Zero *z, int unit) {
    const UnitState *s = &z->unit[unit];
    return min_i64(max_i64(z->model->table.unit[unit].decay_numel - s->update_first, 0), s->update_numel);
}

static void zero_init_offload(Zero *z) {
    int n_units = z->model->table.n_units;
    int64_t *border = (int64_t *)host_alloc(sizeof(int64_t) * (size_t)n_units);
    offload_init(&z->offload, n_units, z->opt.offload_filing, z->opt.sub_group_size);
    for (int u = 0; u < n_units; u++) {
        const UnitLayout *l = &z->layout.unit[u];
        border[u] = zero_decay_border(z, u);
        if (l->update_on_host || l->param_on_host) offload_add_unit(&z->offload, u, l->update_numel, l->host_element, l->file_element);
    }
    offload_start(&z->offload, border, z->opt.pin_memory);
    free(border);
    for (int u = 0; u < n_units; u++) {
        UnitState *s = &z->unit[u];
        HostUnit *h = &z->offload.unit[u];
        if (s->param_on_host) {
            s->param_shard = h->array[HOST_WEIGHT];
            if (!s->master) s->master = s->param_shard; // in fp32; with the update here it is the same
        } else if (s->update_on_host) h->device_weight = (char *)zero_updated_param(z, s);
        if (!s->update_on_host) continue;
        s->master = h->array[HOST_MASTER];
        for (int i = 0; i < z->n_states; i++) s->state[i] = (float *)h->array[HOST_STATE_0 + i];
    }
}

static void zero_init_pools(Zero *z) {
    const ZeroLayout *l = &z->layout;
    z->bucket = (int *)host_alloc(sizeof(int) * (size_t)z->model->table.n_units);
    z->bucket_limit = l->bucket_limit;
    z->n_param_pool = l->n_param_pool;
    z->param_pool = (ParamBuffer *)host_alloc(sizeof(ParamBuffer) * (size_t)z->n_param_pool);
    for (int i = 0; i < z->n_param_pool; i++) {
        z->param_pool[i].data = zero_alloc_for(z, &z->gather_group, l->param_buffer_bytes, MEMORY_BUFFERS);
        z->param_pool[i].unit = -1;
    }
    z->n_grad_pool = l->n_grad_pool;
    z->grad_pool = (GradBuffer *)host_alloc(sizeof(GradBuffer) * (size_t)z->n_grad_pool);
    for (int i = 0; i < z->n_grad_pool; i++) {
        z->grad_pool[i].data = zero_alloc_for(z, &z->reduce_group, l->grad_buffer_bytes, MEMORY_BUFFERS);
        z->grad_pool[i].reduced = event_create();
        event_record(z->grad_pool[i].reduced, z->reduce_stream);
    }
    z->parts = zero_alloc_for(z, &z->reduce_group, l->parts_bytes + l->wire_bytes, MEMORY_BUFFERS);
    z->wire = l->wire_bytes ? (char *)z->parts + l->parts_bytes : NULL;
    z->staging = (float *)(layout_staging_in_parts(l) ? z->parts : zero_alloc(z, l->staging_numel * 4, MEMORY_BUFFERS)); // now: a save must not be the first to find no memory
    z->update_room = zero_alloc(z, l->update_room_bytes, MEMORY_BUFFERS);
}

// n_states: of the optimizer, 0 without gradients.
static void zero_init(Zero *z, const Model *m, ZeroOptions opt, const GridGroups *groups, int n_states, bool with_gradients) {
    memset(z, 0, sizeof *z);
    CHECK(n_states <= ZERO_STATES_MAX, "%d optimizer states", n_states);
    Group gather_group = groups->gather;
    opt.direct_exchange = opt.direct_exchange && groups->reduce.direct;
    z->opt = opt;
    z->gather_group = gather_group;
    z->reduce_group = groups->reduce;
    z->tp_group = groups->tp_grads;
    z->twin_group = groups->twin;
    z->job_group = groups->job;
    z->grid = groups->grid;
    z->model = m;
    z->stream = m->stream;
    // Urgent, or the blocks of a large product would take every free place before those of a collective.
    z->gather_stream = opt.overlap_comm ? stream_create_urgent() : m->stream;
    z->reduce_stream = opt.overlap_comm ? stream_create_urgent() : m->stream;
    z->keep_stream = stream_create();
    z->computed = event_create();
    z->layout = zero_layout(m, opt, gather_group.size, gather_group.rank, n_states, with_gradients);
    int64_t needed = z->layout.file_room.weights_numel, given = opt.offload_filing.weight_buffer_numel;
    if (needed > given)
        die_alike(EXIT_CONFIG, "zero_optimization.offload_param.buffer_size = %" PRId64 ": a buffer takes a rank's shard of a block, which has %" PRId64 " elements; raise it to %" PRId64, given, needed, needed);
    z->n_states = z->layout.n_states;
    z->postdivide = opt.prescale_gradients ? 1 : gather_group.size / opt.gradient_predivide_factor;
    z->divisor = z->postdivide / (opt.gradient_allreduce_op ? gather_group.size : 1);
    z->unit = (UnitState *)host_alloc(sizeof(UnitState) * (size_t)m->table.n_units);
    z->grad_written = (bool *)host_alloc(sizeof(bool) * (size_t)m->table.n_rows);
    for (int u = 0; u < m->table.n_units; u++) zero_init_unit(z, u);
    zero_init_pools(z);
    zero_init_offload(z);
    stream_sync(z->stream); // the zeros are there before another stream writes
}

static void zero_free(Zero *z) {
    stream_sync(z->stream);
    stream_sync(z->gather_stream);
    stream_sync(z->reduce_stream);
    stream_destroy(z->keep_stream);
    offload_free(&z->offload);
    for (int u = 0; u < z->model->table.n_units; u++) {
        UnitState *s = &z->unit[u];
        if (z->model->dtype != DTYPE_FP32 && !s->update_on_host) device_free(s->master);
        if (z->layout.unit[u].param_shard_bytes) comm_free(z->gather_group, s->param_shard);
        if (s->dedicated) comm_free(z->gather_group, s->param);
        if (zero_shards_grads(z)) device_free(s->grad_shard);
        if (s->grad_buffer < 0) comm_free(z->reduce_group, s->grad);
        for (int i = 0; i < z->n_states && !s->update_on_host; i++) device_free(s->state[i]);
        event_destroy(s->gathered);
        event_destroy(s->released);
        event_destroy(s->reduced);
    }
    for (int i = 0; i < z->n_param_pool; i++) comm_free(z->gather_group, z->param_pool[i].data);
    for (int i = 0; i < z->n_grad_pool; i++) {
        comm_free(z->reduce_group, z->grad_pool[i].data);
        event_destroy(z->grad_pool[i].reduced);
    }
    comm_free(z->reduce_group, z->parts);
    if (!layout_staging_in_parts(&z->layout)) device_free(z->staging);
    device_free(z->update_room);
    if (z->opt.overlap_comm) {
        stream_destroy(z->gather_stream);
        stream_destroy(z->reduce_stream);
    }
    event_destroy(z->computed);
    free(z->param_pool);
    free(z->grad_pool);
    free(z->bucket);
    free(z->unit);
    free(z->grad_written);
    zero_layout_free(&z->layout);
}

// The units that the program will fetch, in this order and then over again. The list stays the caller's. Without a list
// (n_uses 0) fetches may come in any order, and nothing is gathered ahead.
static void zero_set_uses(Zero *z, const int *use, int n_uses) {
    z->use_list = use;
    z->n_uses = n_uses;
    z->cursor = 0;
}

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
static void zero_write_masters(Zero *z, int unit, int64_t from, int64_t n, const float *values) {
    const UnitState *s = &z->unit[unit];
    DType type = z->model->dtype;
    int64_t element = dtype_bytes(type), kept = dtype_bytes(master_dtype(z->model));
    char *weight = (char *)host_alloc((size_t)(n * element)), *master = (char *)host_alloc((size_t)(n * kept));
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) {
        if (type == DTYPE_BF16) ((uint16_t *)weight)[i] = master_to_bf16(values[i]), ((uint16_t *)master)[i] = master_remainder(values[i]);
        else dtype_store(weight, type, i, values[i]), ((float *)master)[i] = values[i];
    }
    zero_put(z, zero_updated_param(z, s), s->param_on_host, from * element, weight, n * element);
    if (s->update_on_host && !s->param_on_host) zero_put(z, z->offload.unit[unit].array[HOST_WEIGHT], true, from * element, weight, n * element); // the mirror
    if (type != DTYPE_FP32) zero_put(z, s->master, s->update_on_host, from * kept, master, n * kept);
    free(weight);
    free(master);
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

// Begins to copy what zero_kept_get makes elements [first, first + n) of this rank's part of a row's masters or states from: 4 n bytes.
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

// Fills the weights with their initial values, a function of (seed, name, global index).
static void zero_init_weights(Zero *z, uint64_t seed) {
    const ParamTable *table = &z->model->table;
    for (int i = 0; i < table->n_rows; i++) {
        const ParamDesc *r = &table->row[i];
        ParamRun run[PARAM_RUNS_MAX];
        int64_t first, last;
        if (r->numel == 0) continue;
        zero_row_range(z, r, &first, &last);
        if (first >= last) continue;
        float *values = (float *)host_alloc((size_t)(last - first) * 4);
        int n_runs = param_runs(r, table->tp_rank, first, last, run);
        watch_tick();
        for (int j = 0; j < n_runs; j++)
#pragma omp parallel for schedule(static)
            for (int64_t k = 0; k < run[j].count * run[j].numel; k++)
                values[run[j].local_first - first + k] = param_initial_value(table, r, seed, run[j].global_offset + k / run[j].numel * run[j].stride + k % run[j].numel);
        zero_range_write(z, i, STATE_MASTER, first, last - first, values);
        free(values);
    }
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
