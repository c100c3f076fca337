// acts.cu - where activations live. The model asks for a unit's activations by acts_begin and gives them back by
// acts_end; what is kept between forward and backward, recomputed or moved away is decided here and nowhere else.
//
// An ActSlot holds what one micro-batch in flight needs: its tokens, the residual stream between the units, and the
// saved activations of every unit. Scratch is shared by all units and slots, since one unit computes at a time.
//
// Activation checkpointing (Chen et al. 2016) keeps less, and computes the rest again in backward. Two things decide:
//
// The policy, a step of the ladder in act_descs. Up to `qkv` a block keeps some of its activations and has the others in
// scratch: forward leaves them there for the next block to overwrite, and backward begins by making them again (Acts.recompute).
//
// With the policy `block` only checkpoints are kept: the residual stream x where it enters a segment of blocks. Backward
// of a segment of three runs forward through the first two again, keeping all, and makes the third's as it comes to it:
//
//     forward      x1 [1] x2 [2] x3 [3] x4 [4] ...            x1, x4, ... are checkpoints and stay
//     backward     ... | again [1] x2 [2] x3 | back [3] [2] [1] | ...
//
// so each block runs forward once more, whatever the length of a segment: what changes is what lies in memory, one x a segment and
// the activations of one segment, which all segments and slots share. Which units a pass visits, in what order, is a
// list (ActVisit), from which the trainer also knows the order in which weights are needed.
//
// With cpu_checkpointing the checkpoints lie in pinned host memory. On the device two buffers take turns: while a segment computes,
// the copy stream takes the last checkpoint out, or brings the next one in:
//
//     compute   [ segment 1 ][ segment 2 ][ segment 3 ] ...  [ back 3 ][ back 2 ][ back 1 ]
//     copies           [ x1 out ]  [ x2 out ]                [ x2 in ]  [ x1 in ]
//
// A rank of a pipeline has a store for each of its chunks (pipeline.cu): a range of units, of whose first the input comes from another
// rank, or from the chunk before if that lies here, too; then the two share the memory between them. Scratch, and what segments
// share, is that of the first chunk. Where backward is split, what the gradients of the weights are computed from later is pending, in memory
// of its own for as many micro-batches as wait between the two phases; but what comes after the MLP's inner gradient lies where that layer was before GELU, if
// the slot has kept it, for nobody reads it any more.
//
// Nothing of all this changes a bit of any result: what is made again is made by the same calls (block_calls).
// Read next: pipeline.cu.
#pragma once
#include "model.cu"

typedef enum {
    ACTS_FORWARD,
    ACTS_AGAIN,    // forward once more, in backward
    ACTS_BACKWARD,
    ACTS_WEIGHTS,  // gradients of the weights, where backward is split
} ActPass;

typedef struct {
    int unit;
    ActPass pass;
} ActVisit;

typedef struct {
    int64_t B, T;           // of what is in the slot now: the sizes given to acts_init, or while a text is sampled smaller ones
    int64_t first_logits;   // of mode FORWARD_LOGITS, see Acts
    ForwardMode mode;
    int mb;                 // of this update
    int32_t *tokens, *targets; // (B,T) in the backend's memory; null in chunks without the embedding, or the head
    void **x;               // by unit: the residual stream that enters it, (B*T/tp,C); null for the embedding
    void *dx;               // gradient of the residual stream, (B*T/tp,C)
    void **saved;           // [unit * ACT_COUNT + role], null where the unit has no such activation
    char *host;             // checkpoints of all segments, (n_segments,B*T/tp,C) in pinned memory; null without cpu_checkpointing
    bool host_pinned;
    Event here;             // with several stages: what was received last has come
    Event x_sent, dx_sent;  // the output has left, the gradient of the input has
    Event begun, through;   // of the computation for the micro-batch
} ActSlot;

// What decides how much memory a store takes: room for n_slots micro-batches of (B,T), T the tokens that this rank has of a sample. Without backward there is no dx, and
// all blocks share one set of activations.
typedef struct {
    const Model *model;
    int n_slots;
    int64_t B, T;
    bool with_backward;
    RecomputePolicy policy;
    int n_segments;         // of the blocks: what lies between two checkpoints; in 1..L, and L but for policy block
    bool cpu_checkpointing;
    int first, last;        // units
    int n_pending;          // micro-batches between the two phases of backward; 0 if it is one
    bool taken_over;        // the input, and its gradient, are those of the chunk before, which lies on this rank
    bool borrows;           // another chunk's scratch, and what its segments share
    int longest;            // blocks in the longest segment of all chunks of this rank
} ActLayout;

// Checkpoints on their way between the host and the device.
enum { CHECKPOINT_BUFFERS = 2 };
typedef struct {
    void *data;             // (B*T/tp,C)
    int64_t holds;          // slot * n_segments + segment whose checkpoint it is, or -1
    Event copied;           // the last copy out of it, or into it, is done
} CheckpointBuffer;

typedef struct {
    const Model *model;
    ActLayout layout;
    int n_slots;
    ActSlot *slot;
    void *scratch[ACT_COUNT];
    void **shared;          // [position in the segment * ACT_COUNT + role]: what is recomputed
    void **shared_x;        // [position]: the residual stream inside a segment; null at position 0
    void **pending;         // [(micro-batch % n_pending * n_units + unit) * ACT_COUNT + role]
    CheckpointBuffer buffer[CHECKPOINT_BUFFERS];
    Stream copies;          // null without cpu_checkpointing
    Event computed;         // orders the copies behind the computation: recorded, and at once waited for
    ActVisit *forward, *backward, *weights; // the passes over the chunk's units
    int n_forward, n_backward, n_weights;
    bool synchronize;       // the host waits for the device at each boundary between segments
    Event *mark[2];         // forward and backward: n_segments + 1 boundaries each, as they are passed; null without profile
    float dloss;            // see Acts.dloss
    int64_t allocated;      // bytes
} ActStore;

// ---------------------------------------------------------------------------------------------------------------
// Segments: as even as can be, those with one block more spread over the model

static int acts_first_block(const ActLayout *l) { return (int)max_i64(1, l->first); }
static int acts_n_blocks(const ActLayout *l) { return (int)min_i64(l->last, l->model->L) - acts_first_block(l) + 1; }
static int acts_segment_first(const ActLayout *l, int segment) { return acts_first_block(l) + segment * acts_n_blocks(l) / l->n_segments; }
static int acts_segment_last(const ActLayout *l, int segment) { return acts_segment_first(l, segment + 1) - 1; }
static int acts_segment_of(const ActLayout *l, int unit) { return (int)(((int64_t)(unit - acts_first_block(l) + 1) * l->n_segments - 1) / acts_n_blocks(l)); }
static int acts_position(const ActLayout *l, int unit) { return unit - acts_segment_first(l, acts_segment_of(l, unit)); }

static bool acts_is_block(const ActLayout *l, int unit) { return l->model->table.unit[unit].kind == UNIT_BLOCK; }
static bool acts_has_head(const ActLayout *l) { return l->last == l->model->table.n_units - 1; }

// Cuts the blocks of a layout's units as the configuration asks for.
static void acts_cut_segments(ActLayout *l, const ActivationCheckpointingConfig *c) {
    int blocks = acts_n_blocks(l);
    l->n_segments = blocks;
    if (l->policy == RECOMPUTE_BLOCK && c->activation_checkpoint_interval > 0) l->n_segments = (int)ceil_div(blocks, c->activation_checkpoint_interval);
    else if (l->policy == RECOMPUTE_BLOCK && c->number_checkpoints > 0) // of the whole model: this chunk's share
        l->n_segments = (int)min_i64(blocks, max_i64(1, c->number_checkpoints * blocks / l->model->L));
    l->longest = (int)ceil_div(blocks, l->n_segments);
}

// The layout that a configuration asks for, of the whole model.
static ActLayout acts_layout(const Config *cfg, const Model *m, int n_slots, int64_t B, bool with_backward) {
    const ActivationCheckpointingConfig *c = &cfg->activation_checkpointing;
    ActLayout l = {m, n_slots, B, cfg->run.seq_len / m->sp.size, with_backward, with_backward ? c->policy : RECOMPUTE_NONE, 0, false, 0, m->table.n_units - 1, 0, false, false, 0};
    l.cpu_checkpointing = l.policy == RECOMPUTE_BLOCK && c->cpu_checkpointing;
    acts_cut_segments(&l, c);
    return l;
}

// The units of a pass over the chunk, in order, into visit[0..2 * n_units); returns how many.
static int acts_visits(const ActLayout *l, ActPass pass, ActVisit *visit) {
    int n = 0;
    for (int u = l->first; pass == ACTS_FORWARD && u <= l->last; u++) visit[n++] = {u, ACTS_FORWARD};
    for (int u = l->last; pass == ACTS_WEIGHTS && u >= l->first; u--) if (acts_is_block(l, u)) visit[n++] = {u, ACTS_WEIGHTS};
    if (pass != ACTS_BACKWARD) return n;
    if (acts_has_head(l)) visit[n++] = {l->last, ACTS_BACKWARD};
    for (int s = l->n_segments - 1; s >= 0; s--) {
        int first = acts_segment_first(l, s), last = acts_segment_last(l, s);
        for (int u = first; u < last; u++) visit[n++] = {u, ACTS_AGAIN};
        for (int u = last; u >= first; u--) visit[n++] = {u, ACTS_BACKWARD};
    }
    if (l->first == 0) visit[n++] = {0, ACTS_BACKWARD};
    return n;
}

// ---------------------------------------------------------------------------------------------------------------
// The layout: bytes of each buffer, 0 where there is none or a unit uses another's. A planner needs no more than this.

static int64_t acts_role_bytes(const ActLayout *l, int role) { return tensor_bytes(act_tensor(l->model, (ActRole)role, l->B, l->T, NULL)); }

static int64_t acts_scratch_bytes(const ActLayout *l, int role) {
    return act_descs[role].keep == ACT_SCRATCH && !l->borrows ? acts_role_bytes(l, role) : 0;
}

static int64_t acts_tokens_bytes(const ActLayout *l) { return l->first == 0 ? l->B * l->T * 4 : 0; }
static int64_t acts_targets_bytes(const ActLayout *l) { return acts_has_head(l) ? l->B * l->T * 4 : 0; }

static int64_t acts_stream_bytes(const ActLayout *l) { return tensor_bytes(stream_tensor(l->model, l->B, l->T, NULL)); } // one x
static int64_t acts_dx_bytes(const ActLayout *l) { return l->with_backward && !l->taken_over ? acts_stream_bytes(l) : 0; }

// The residual stream that enters a unit, or leaves the last one of a chunk. Without backward two buffers take turns: a unit reads one
// and writes the other. What comes from another rank is not the host's to keep.
static int64_t acts_x_bytes(const ActLayout *l, int unit) {
    int first = (int)max_i64(1, l->first);
    if (unit < first || unit > (acts_has_head(l) ? l->last : l->last + 1)) return 0;
    if (unit == l->first) return l->taken_over ? 0 : acts_stream_bytes(l);
    if (!l->with_backward && unit > first + 1) return 0;
    if (unit <= l->last && acts_is_block(l, unit) && (acts_position(l, unit) > 0 || l->cpu_checkpointing)) return 0; // shared
    return acts_stream_bytes(l);
}

static bool acts_recomputes(const ActLayout *l, int role) { return act_descs[role].keep == ACT_SAVED && act_descs[role].recomputed_from <= l->policy; }

static int64_t acts_saved_bytes(const ActLayout *l, int unit, int role) {
    UnitKind kind = l->model->table.unit[unit].kind;
    if (unit < l->first || unit > l->last) return 0;
    if (act_descs[role].keep != ACT_SAVED || act_descs[role].unit != kind || acts_recomputes(l, role)) return 0;
    if (!l->with_backward && kind == UNIT_BLOCK && unit > acts_first_block(l)) return 0; // the first block's
    return acts_role_bytes(l, role);
}

// What is recomputed of a block at a position in its segment.
static int64_t acts_shared_bytes(const ActLayout *l, int role) { return acts_recomputes(l, role) && !l->borrows ? acts_role_bytes(l, role) : 0; }

// Does a block keep this for the gradients of its weights, where these come later?
static bool acts_is_pending(const ActLayout *l, int role) {
    return l->n_pending > 0 && (act_descs[role].keep == ACT_PENDING || (act_descs[role].for_weights && acts_recomputes(l, role)));
}
// Where it begins in ACT_FC_PRE's memory, which is dead when it is written; -1 if it has its own.
static int64_t acts_pending_offset(const ActLayout *l, int role) {
    const int64_t first = round_up(acts_role_bytes(l, ACT_DQKV), 256); // as memory of its own begins: kernels are chosen by it
    if ((role != ACT_DQKV && role != ACT_DRESIDUAL_2) || acts_recomputes(l, ACT_FC_PRE) || first + acts_role_bytes(l, ACT_DRESIDUAL_2) > acts_role_bytes(l, ACT_FC_PRE)) return -1;
    return role == ACT_DQKV ? 0 : first;
}
static int64_t acts_pending_bytes(const ActLayout *l, int unit, int role) {
    return unit >= l->first && unit <= l->last && acts_is_block(l, unit) && acts_is_pending(l, role) && acts_pending_offset(l, role) < 0 ? acts_role_bytes(l, role) : 0;
}

static int acts_n_buffers(const ActLayout *l) { return l->cpu_checkpointing ? (int)min_i64(CHECKPOINT_BUFFERS, l->n_segments) : 0; }

// All that acts_init allocates on the device.
static int64_t acts_bytes(const ActLayout *l) {
    int64_t shared = acts_n_buffers(l) * acts_stream_bytes(l), slot = acts_tokens_bytes(l) + acts_targets_bytes(l) + acts_dx_bytes(l), pending = 0;
    for (int r = 0; r < ACT_COUNT; r++) shared += acts_scratch_bytes(l, r) + l->longest * acts_shared_bytes(l, r);
    if (!l->borrows) shared += (l->longest - 1) * acts_stream_bytes(l);
    for (int u = 0; u <= l->model->table.n_units; u++) {
        slot += acts_x_bytes(l, u);
        for (int r = 0; r < ACT_COUNT && u < l->model->table.n_units; r++) slot += acts_saved_bytes(l, u, r), pending += acts_pending_bytes(l, u, r);
    }
    return shared + l->n_slots * slot + l->n_pending * pending;
}

// And in host memory.
static int64_t acts_slot_host_bytes(const ActLayout *l) { return l->cpu_checkpointing ? l->n_segments * acts_stream_bytes(l) : 0; }
static int64_t acts_host_bytes(const ActLayout *l) { return l->n_slots * acts_slot_host_bytes(l); }

// Floating-point operations that recomputation adds to one token's forward and backward: what blocks do again, and in all but the
// last of a segment the last product, too, whose result the next one starts from.
static double acts_flops_per_token(const ActLayout *l) {
    const Model *m = l->model;
    const double blocks = acts_n_blocks(l);
    return blocks * recompute_flops_per_token(m, l->policy, l->T * m->sp.size) + (blocks - l->n_segments) * 2 * (double)m->C * (double)m->F;
}

// What the policy in force does to a micro-batch, for a table: what it saves of the device's memory against keeping everything, and
// what that costs, in operations (a share of the model's own) and in bytes that are read and written once more.
typedef struct {
    int64_t bytes, saved_bytes, host_bytes, traffic_bytes;
    double flops_share;
} ActCost;

static ActCost acts_cost(const ActLayout *l) {
    ActLayout all = *l;
    all.policy = RECOMPUTE_NONE;
    all.n_segments = acts_n_blocks(l);
    all.longest = 1;
    all.cpu_checkpointing = false;
    ActCost c = {acts_bytes(l), acts_bytes(&all) - acts_bytes(l), acts_host_bytes(l), l->B * l->T * acts_n_blocks(l) * recompute_bytes_per_token(l->model, l->policy),
                 acts_flops_per_token(l) / model_flops_per_token(l->model, l->T * l->model->sp.size)};
    return c;
}

// ---------------------------------------------------------------------------------------------------------------
// Setting up

static void *acts_alloc(ActStore *a, int64_t bytes) {
    a->allocated += bytes;
    return bytes ? device_malloc(bytes) : NULL;
}

static void acts_set_size(ActSlot *s, int64_t B, int64_t T) {
    s->B = B;
    s->T = T;
}

static void acts_init_slot(ActStore *a, ActSlot *s) {
    const ActLayout *l = &a->layout;
    const Model *m = a->model;
    int n_units = m->table.n_units, first_block = acts_first_block(l);
    acts_set_size(s, l->B, l->T);
    s->tokens = (int32_t *)acts_alloc(a, acts_tokens_bytes(l));
    s->targets = (int32_t *)acts_alloc(a, acts_targets_bytes(l));
    s->x = (void **)host_alloc(sizeof(void *) * (size_t)(n_units + 1));
    s->saved = (void **)host_alloc(sizeof(void *) * (size_t)(n_units * ACT_COUNT));
    s->dx = acts_alloc(a, acts_dx_bytes(l));
    Event *events[] = {&s->here, &s->x_sent, &s->dx_sent, &s->begun, &s->through};
    for (int i = 0; i < 5; i++) *events[i] = event_create();
    for (int u = l->first; u <= l->last + 1; u++) {
        bool block = u <= l->last && acts_is_block(l, u);
        int position = block ? acts_position(l, u) : 0;
        s->x[u] = acts_alloc(a, acts_x_bytes(l, u));
        if (!s->x[u] && !l->with_backward && u > first_block + 1 && u < n_units) s->x[u] = s->x[u - 2];
        else if (!s->x[u] && block && u > l->first) s->x[u] = position > 0 ? a->shared_x[position] : a->buffer[acts_segment_of(l, u) % CHECKPOINT_BUFFERS].data;
        for (int r = 0; r < ACT_COUNT && u <= l->last; r++) {
            void **saved = &s->saved[u * ACT_COUNT + r];
            *saved = acts_alloc(a, acts_saved_bytes(l, u, r));
            if (!*saved && block) *saved = acts_recomputes(l, r) ? a->shared[position * ACT_COUNT + r] : s->saved[first_block * ACT_COUNT + r];
        }
    }
    if (!l->cpu_checkpointing) return;
    s->host_pinned = true;
    s->host = (char *)pinned_region_malloc(acts_slot_host_bytes(l), acts_slot_host_bytes(l), &s->host_pinned);
    if (!s->host_pinned)
        note("activation_checkpointing.cpu_checkpointing: the system refuses to pin %.1f MiB of host memory; training goes on without, and waits for the copies; raise the limit on locked memory", (double)acts_slot_host_bytes(l) / (1 << 20));
}

// Scratch, and what segments share: of its own, or the lender's.
static void acts_init_shared(ActStore *a, const ActStore *lender) {
    const ActLayout *l = &a->layout;
    int n_units = a->model->table.n_units;
    a->shared = (void **)host_alloc(sizeof(void *) * (size_t)(l->longest * ACT_COUNT));
    a->shared_x = (void **)host_alloc(sizeof(void *) * (size_t)l->longest);
    for (int r = 0; r < ACT_COUNT; r++) a->scratch[r] = l->borrows ? lender->scratch[r] : acts_alloc(a, acts_scratch_bytes(l, r));
    for (int i = 0; i < l->longest; i++) {
        a->shared_x[i] = l->borrows ? lender->shared_x[i] : i > 0 ? acts_alloc(a, acts_stream_bytes(l)) : NULL;
        for (int r = 0; r < ACT_COUNT; r++) a->shared[i * ACT_COUNT + r] = l->borrows ? lender->shared[i * ACT_COUNT + r] : acts_alloc(a, acts_shared_bytes(l, r));
    }
    a->pending = (void **)host_alloc(sizeof(void *) * (size_t)(l->n_pending * n_units * ACT_COUNT));
    for (int i = 0; i < l->n_pending * n_units * ACT_COUNT; i++) a->pending[i] = acts_alloc(a, acts_pending_bytes(l, i / ACT_COUNT % n_units, i % ACT_COUNT));
}

// lender: the store of this rank's first chunk, for those that borrow. profile, synchronize: see ActStore.mark and synchronize.
static void acts_init(ActStore *a, ActLayout layout, const ActStore *lender, bool profile, bool synchronize) {
    const Model *m = layout.model;
    const ActLayout *l = &a->layout;
    memset(a, 0, sizeof *a);
    a->layout = layout;
    a->model = m;
    a->n_slots = layout.n_slots;
    a->synchronize = synchronize && l->policy != RECOMPUTE_NONE;
    CHECK(l->n_segments >= 1 && l->n_segments <= acts_n_blocks(l) && (l->policy == RECOMPUTE_BLOCK || l->n_segments == acts_n_blocks(l)), "%d segments of %d blocks", l->n_segments, acts_n_blocks(l));
    CHECK(l->policy != RECOMPUTE_GELU || m->gelu_apart, "GELU is computed from values that are not stored");
    size_t visits = sizeof(ActVisit) * 2 * (size_t)m->table.n_units;
    a->forward = (ActVisit *)host_alloc(visits);
    a->backward = (ActVisit *)host_alloc(visits);
    a->weights = (ActVisit *)host_alloc(visits);
    a->n_forward = acts_visits(l, ACTS_FORWARD, a->forward);
    if (l->with_backward) a->n_backward = acts_visits(l, ACTS_BACKWARD, a->backward);
    if (l->n_pending > 0) a->n_weights = acts_visits(l, ACTS_WEIGHTS, a->weights);
    acts_init_shared(a, lender);
    if (l->cpu_checkpointing) a->copies = stream_create();
    a->computed = event_create();
    for (int i = 0; i < acts_n_buffers(l); i++) {
        a->buffer[i].data = acts_alloc(a, acts_stream_bytes(l));
        a->buffer[i].holds = -1;
        a->buffer[i].copied = event_create();
        event_record(a->buffer[i].copied, a->copies);
    }
    for (int p = 0; p < 2 && profile && l->policy != RECOMPUTE_NONE; p++) {
        a->mark[p] = (Event *)host_alloc(sizeof(Event) * (size_t)(l->n_segments + 1));
        for (int i = 0; i <= l->n_segments; i++) a->mark[p][i] = event_create();
    }
    a->slot = (ActSlot *)host_alloc(sizeof(ActSlot) * (size_t)a->n_slots);
    for (int i = 0; i < a->n_slots; i++) acts_init_slot(a, &a->slot[i]);
}

static void acts_free(ActStore *a) {
    const ActLayout *l = &a->layout;
    if (a->copies) stream_sync(a->copies);
    for (int r = 0; r < ACT_COUNT && !l->borrows; r++) device_free(a->scratch[r]);
    for (int i = 0; i < l->n_pending * a->model->table.n_units * ACT_COUNT; i++) device_free(a->pending[i]);
    for (int i = 0; i < l->longest && !l->borrows; i++) {
        device_free(a->shared_x[i]);
        for (int r = 0; r < ACT_COUNT; r++) device_free(a->shared[i * ACT_COUNT + r]);
    }
    for (int i = 0; i < a->n_slots; i++) {
        ActSlot *s = &a->slot[i];
        device_free(s->tokens);
        device_free(s->targets);
        for (int u = l->first; u <= l->last + 1; u++) {
            if (acts_x_bytes(l, u)) device_free(s->x[u]);
            for (int r = 0; r < ACT_COUNT && u <= l->last; r++)
                if (acts_saved_bytes(l, u, r)) device_free(s->saved[u * ACT_COUNT + r]);
        }
        if (acts_dx_bytes(l)) device_free(s->dx);
        Event events[] = {s->here, s->x_sent, s->dx_sent, s->begun, s->through};
        for (int k = 0; k < 5; k++) event_destroy(events[k]);
        pinned_region_free(s->host, acts_slot_host_bytes(l), s->host_pinned);
        free(s->x);
        free(s->saved);
    }
    for (int i = 0; i < acts_n_buffers(l); i++) {
        device_free(a->buffer[i].data);
        event_destroy(a->buffer[i].copied);
    }
    for (int p = 0; p < 2 && a->mark[p]; p++) {
        for (int i = 0; i <= l->n_segments; i++) event_destroy(a->mark[p][i]);
        free(a->mark[p]);
    }
    if (a->copies) stream_destroy(a->copies);
    event_destroy(a->computed);
    free(a->shared);
    free(a->shared_x);
    free(a->pending);
    free(a->forward);
    free(a->backward);
    free(a->weights);
    free(a->slot);
}

// ---------------------------------------------------------------------------------------------------------------
// Checkpoints in host memory. All copies run on one stream, so what one has brought to the host the next may take back.

static CheckpointBuffer *checkpoint_buffer(ActStore *a, int segment) { return &a->buffer[segment % CHECKPOINT_BUFFERS]; }

static int64_t checkpoint_number(const ActStore *a, const ActSlot *s, int segment) { return (s - a->slot) * a->layout.n_segments + segment; }

// The computation so far comes before the copies that follow: it has written what goes out, and read what is overwritten.
static void copies_wait(ActStore *a) {
    event_record(a->computed, a->model->stream);
    stream_wait_event(a->copies, a->computed);
}

static void *checkpoint_host(const ActStore *a, const ActSlot *s, int segment) { return s->host + segment * acts_stream_bytes(&a->layout); }

static int64_t checkpoint_bytes(const ActStore *a, const ActSlot *s) { return tensor_bytes(stream_tensor(a->model, s->B, s->T, NULL)); }

// A unit is about to write this segment's checkpoint: what the buffer held has left it.
static void checkpoint_overwrite(ActStore *a, int segment) {
    CheckpointBuffer *b = checkpoint_buffer(a, segment);
    stream_wait_event(a->model->stream, b->copied);
    b->holds = -1;
}

// It has written it: out with it.
static void checkpoint_store(ActStore *a, ActSlot *s, int segment) {
    CheckpointBuffer *b = checkpoint_buffer(a, segment);
    copies_wait(a);
    device_copy(checkpoint_host(a, s, segment), b->data, checkpoint_bytes(a, s), COPY_TO_HOST, a->copies);
    event_record(b->copied, a->copies);
    b->holds = checkpoint_number(a, s, segment);
}

// The input of a chunk that begins with a block lies in its slot, where it came from another rank: no copy takes it anywhere.
static bool checkpoint_stays(const ActLayout *l, int segment) { return segment == 0 && l->first > 0; }

// Starts to bring a checkpoint back, unless it is there still. Whoever computed with what the buffer holds is done by the time
// that the computation comes to this point.
static void checkpoint_fetch(ActStore *a, ActSlot *s, int segment) {
    CheckpointBuffer *b = checkpoint_buffer(a, segment);
    if (checkpoint_stays(&a->layout, segment) || b->holds == checkpoint_number(a, s, segment)) return;
    copies_wait(a);
    device_copy(b->data, checkpoint_host(a, s, segment), checkpoint_bytes(a, s), COPY_TO_DEVICE, a->copies);
    event_record(b->copied, a->copies);
    b->holds = checkpoint_number(a, s, segment);
}

// ---------------------------------------------------------------------------------------------------------------
// The verbs

// Boundaries between segments, forward: before the first block of each, and before the head. Backward: where the first of its
// units is visited, and before the embedding. Returns which one this visit stands at, or -1.
static int acts_boundary(const ActLayout *l, ActVisit v) {
    bool forward = v.pass == ACTS_FORWARD;
    if (!acts_is_block(l, v.unit)) return (v.unit == 0) != forward ? l->n_segments : -1;
    int segment = acts_segment_of(l, v.unit), first = acts_segment_first(l, segment), last = acts_segment_last(l, segment);
    if (forward) return v.unit == first ? segment : -1;
    bool begins = v.pass == ACTS_AGAIN ? v.unit == first : v.unit == last && first == last;
    return begins ? l->n_segments - 1 - segment : -1;
}

static void acts_pass_boundary(ActStore *a, ActSlot *s, ActVisit v) {
    const ActLayout *l = &a->layout;
    int boundary = acts_boundary(l, v);
    if (v.pass == ACTS_WEIGHTS) return;
    if (boundary >= 0 && a->mark[0]) event_record(a->mark[v.pass != ACTS_FORWARD][boundary], a->model->stream);
    if (boundary >= 0 && a->synchronize) stream_sync(a->model->stream);
    if (!a->copies || v.pass == ACTS_FORWARD) return;
    if (!acts_is_block(l, v.unit) && v.unit > 0) checkpoint_fetch(a, s, l->n_segments - 1); // the head takes long enough
    if (boundary < 0 || v.unit == 0) return;
    int segment = acts_segment_of(l, v.unit);
    checkpoint_fetch(a, s, segment);
    if (!checkpoint_stays(l, segment)) stream_wait_event(a->model->stream, checkpoint_buffer(a, segment)->copied);
    if (segment > 0) checkpoint_fetch(a, s, segment - 1);
}

// The segment whose checkpoint this visit writes into a buffer, or -1.
static int acts_written_checkpoint(const ActStore *a, ActVisit v) {
    int next = v.unit + 1;
    bool writes = a->copies && v.pass == ACTS_FORWARD && next <= a->layout.last && acts_is_block(&a->layout, next) && acts_position(&a->layout, next) == 0;
    return writes ? acts_segment_of(&a->layout, next) : -1;
}

// The chunk goes on with what the chunk before, on this rank, has in its slot: its output, and the memory for the gradient of that.
static void acts_take_over(const ActStore *a, ActSlot *s, const ActSlot *before) {
    s->x[a->layout.first] = before->x[a->layout.first];
    s->dx = before->dx;
}

// The activations of a unit for the micro-batch in the slot. Valid until acts_end.
static Acts acts_begin(ActStore *a, ActSlot *s, ActVisit v) {
    const Model *m = a->model;
    const ActLayout *l = &a->layout;
    int unit = v.unit, written = acts_written_checkpoint(a, v);
    if (s->mode == FORWARD_TRAIN) acts_pass_boundary(a, s, v);
    if (written >= 0) checkpoint_overwrite(a, written);
    Acts acts;
    memset(&acts, 0, sizeof acts);
    acts.B = s->B;
    acts.T = s->T;
    acts.mode = s->mode;
    acts.dloss = a->dloss;
    if (s->mode == FORWARD_LOGITS) acts.first_logits = s->first_logits;
    acts.tokens = s->tokens;
    acts.targets = s->targets;
    if (s->x[unit]) acts.x_in = stream_tensor(m, s->B, s->T, s->x[unit]);
    if (s->x[unit + 1]) acts.x_out = stream_tensor(m, s->B, s->T, s->x[unit + 1]);
    if (s->dx) acts.dx = stream_tensor(m, s->B, s->T, s->dx);
    for (int r = 0; r < ACT_COUNT; r++) {
        void *data = act_descs[r].keep == ACT_SCRATCH ? a->scratch[r] : s->saved[unit * ACT_COUNT + r];
        if (v.pass != ACTS_FORWARD && acts_is_block(l, unit) && acts_is_pending(l, r)) {
            const int64_t offset = acts_pending_offset(l, r);
            data = offset < 0 ? a->pending[(s->mb % l->n_pending * m->table.n_units + unit) * ACT_COUNT + r] : (char *)s->saved[unit * ACT_COUNT + ACT_FC_PRE] + offset;
        }
        if (data) acts.act[r] = act_tensor(m, (ActRole)r, s->B, s->T, data);
    }
    // Of a segment that has run forward again, only the last block's activations are still to be made.
    if (v.pass == ACTS_BACKWARD && acts_is_block(l, unit) && unit == acts_segment_last(l, acts_segment_of(l, unit))) acts.recompute = l->policy;
    return acts;
}

// The unit's forward or backward is enqueued. What is saved stays where it is; a checkpoint leaves for the host.
static void acts_end(ActStore *a, ActSlot *s, ActVisit v) {
    const ActLayout *l = &a->layout;
    int written = acts_written_checkpoint(a, v);
    if (written >= 0 && s->mode == FORWARD_TRAIN) checkpoint_store(a, s, written);
    // The last boundary of a chunk without head, or without embedding, is where it ends.
    bool ends = acts_is_block(l, v.unit) && (v.pass == ACTS_FORWARD ? v.unit == l->last : v.pass == ACTS_BACKWARD && v.unit == l->first);
    if (ends && s->mode == FORWARD_TRAIN && a->mark[0]) event_record(a->mark[v.pass != ACTS_FORWARD][l->n_segments], a->model->stream);
}

// profile: milliseconds of each segment's forward and backward (recomputation included), n_segments each, of the micro-batch that
// went through last. The host waits for the end of its backward.
static void acts_times(const ActStore *a, double *forward, double *backward) {
    int n = a->layout.n_segments;
    for (int i = 0; i < n; i++) {
        forward[i] = event_elapsed_ms(a->mark[0][i], a->mark[0][i + 1]);
        backward[n - 1 - i] = event_elapsed_ms(a->mark[1][i], a->mark[1][i + 1]);
    }
}
