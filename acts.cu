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
// Nothing of all this changes a bit of any result: what is made again is made by the same calls (block_calls).
// Read next: pipeline.cu.
#pragma once
#include "model.cu"

typedef enum {
    ACTS_FORWARD,
    ACTS_AGAIN,    // forward once more, in backward
    ACTS_BACKWARD,
} ActPass;

typedef struct {
    int unit;
    ActPass pass;
} ActVisit;

typedef struct {
    int64_t B, T;           // of the micro-batch that is in the slot now; at most the sizes given to acts_init
    ForwardMode mode;
    int32_t *tokens, *targets; // (B,T) in the backend's memory
    void **x;               // by unit: the residual stream that enters it, (B,T,C); null for the embedding
    void *dx;               // gradient of the residual stream, (B,T,C)
    void **saved;           // [unit * ACT_COUNT + role], null where the unit has no such activation
    char *host;             // checkpoints of all segments, (n_segments,B,T,C) in pinned memory; null without cpu_checkpointing
    bool host_pinned;
} ActSlot;

// What decides how much memory a store takes: room for n_slots micro-batches of (B,T). Without backward there is no dx, and
// all blocks share one set of activations.
typedef struct {
    const Model *model;
    int n_slots;
    int64_t B, T;
    bool with_backward;
    RecomputePolicy policy;
    int n_segments;         // of the blocks: what lies between two checkpoints; in 1..L, and L but for policy block
    bool cpu_checkpointing;
} ActLayout;

// Checkpoints on their way between the host and the device.
enum { CHECKPOINT_BUFFERS = 2 };
typedef struct {
    void *data;             // (B,T,C)
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
    CheckpointBuffer buffer[CHECKPOINT_BUFFERS];
    Stream copies;          // null without cpu_checkpointing
    Event computed;         // orders the copies behind the computation: recorded, and at once waited for
    ActVisit *forward, *backward; // the passes over all units
    int n_forward, n_backward;
    bool synchronize;       // the host waits for the device at each boundary between segments
    Event *mark[2];         // forward and backward: n_segments + 1 boundaries each, as they are passed; null without profile
    float dloss;            // see Acts.dloss
    int64_t allocated;      // bytes
} ActStore;

// ---------------------------------------------------------------------------------------------------------------
// Segments: as even as can be, those with one block more spread over the model

static int acts_segment_first(const ActLayout *l, int segment) { return 1 + (int)(segment * l->model->L / l->n_segments); }
static int acts_segment_last(const ActLayout *l, int segment) { return acts_segment_first(l, segment + 1) - 1; }
static int acts_segment_of(const ActLayout *l, int unit) { return (int)(((int64_t)unit * l->n_segments - 1) / l->model->L); }
static int acts_position(const ActLayout *l, int unit) { return unit - acts_segment_first(l, acts_segment_of(l, unit)); }
static int acts_segment_length(const ActLayout *l) { return (int)ceil_div(l->model->L, l->n_segments); } // of the longest

static bool acts_is_block(const ActLayout *l, int unit) { return l->model->table.unit[unit].kind == UNIT_BLOCK; }

// The layout that a configuration asks for.
static ActLayout acts_layout(const Config *cfg, const Model *m, int n_slots, int64_t B, bool with_backward) {
    const ActivationCheckpointingConfig *c = &cfg->activation_checkpointing;
    int64_t segments = c->activation_checkpoint_interval > 0 ? ceil_div(m->L, c->activation_checkpoint_interval) : c->number_checkpoints;
    ActLayout l = {m, n_slots, B, cfg->run.seq_len, with_backward, with_backward ? c->policy : RECOMPUTE_NONE, (int)m->L, false};
    if (l.policy < RECOMPUTE_BLOCK) return l;
    if (segments > 0) l.n_segments = (int)min_i64(segments, m->L);
    l.cpu_checkpointing = c->cpu_checkpointing;
    return l;
}

// The units of a pass over the model, in order, into visit[0..2 * n_units); returns how many.
static int acts_visits(const ActLayout *l, bool forward, ActVisit *visit) {
    int head = l->model->table.n_units - 1, n = 0;
    for (int u = 0; forward && u <= head; u++) visit[n++] = {u, ACTS_FORWARD};
    if (forward) return n;
    visit[n++] = {head, ACTS_BACKWARD};
    for (int s = l->n_segments - 1; s >= 0; s--) {
        int first = acts_segment_first(l, s), last = acts_segment_last(l, s);
        for (int u = first; u < last; u++) visit[n++] = {u, ACTS_AGAIN};
        for (int u = last; u >= first; u--) visit[n++] = {u, ACTS_BACKWARD};
    }
    visit[n++] = {0, ACTS_BACKWARD};
    return n;
}

// ---------------------------------------------------------------------------------------------------------------
// The layout: bytes of each buffer, 0 where there is none or a unit uses another's. A planner needs no more than this.

static int64_t acts_scratch_bytes(const ActLayout *l, int role) {
    return act_descs[role].keep == ACT_SCRATCH ? tensor_bytes(act_tensor(l->model, (ActRole)role, l->B, l->T, NULL)) : 0;
}

static int64_t acts_tokens_bytes(const ActLayout *l) { return l->B * l->T * 4; }

static int64_t acts_stream_bytes(const ActLayout *l) { return l->B * l->T * l->model->C * dtype_bytes(l->model->dtype); } // one x
static int64_t acts_dx_bytes(const ActLayout *l) { return l->with_backward ? acts_stream_bytes(l) : 0; }

// The residual stream that enters a unit. Without backward two buffers take turns: a unit reads one and writes the other.
static int64_t acts_x_bytes(const ActLayout *l, int unit) {
    if (unit == 0 || (!l->with_backward && unit > 2)) return 0;
    if (acts_is_block(l, unit) && (acts_position(l, unit) > 0 || l->cpu_checkpointing)) return 0; // shared
    return acts_stream_bytes(l);
}

static bool acts_recomputes(const ActLayout *l, int role) { return act_descs[role].keep == ACT_SAVED && act_descs[role].recomputed_from <= l->policy; }

static int64_t acts_saved_bytes(const ActLayout *l, int unit, int role) {
    UnitKind kind = l->model->table.unit[unit].kind;
    if (act_descs[role].keep != ACT_SAVED || act_descs[role].unit != kind || acts_recomputes(l, role)) return 0;
    if (!l->with_backward && kind == UNIT_BLOCK && unit > 1) return 0; // the first block's
    return tensor_bytes(act_tensor(l->model, (ActRole)role, l->B, l->T, NULL));
}

// What is recomputed of a block at a position in its segment.
static int64_t acts_shared_bytes(const ActLayout *l, int role) {
    return acts_recomputes(l, role) ? tensor_bytes(act_tensor(l->model, (ActRole)role, l->B, l->T, NULL)) : 0;
}

static int acts_n_buffers(const ActLayout *l) { return l->cpu_checkpointing ? (int)min_i64(CHECKPOINT_BUFFERS, l->n_segments) : 0; }

// All that acts_init allocates on the device.
static int64_t acts_bytes(const ActLayout *l) {
    int64_t shared = 0, slot = 2 * acts_tokens_bytes(l) + acts_dx_bytes(l), length = acts_segment_length(l);
    for (int r = 0; r < ACT_COUNT; r++) shared += acts_scratch_bytes(l, r) + length * acts_shared_bytes(l, r);
    shared += (length - 1 + acts_n_buffers(l)) * acts_stream_bytes(l);
    for (int u = 0; u < l->model->table.n_units; u++) {
        slot += acts_x_bytes(l, u);
        for (int r = 0; r < ACT_COUNT; r++) slot += acts_saved_bytes(l, u, r);
    }
    return shared + l->n_slots * slot;
}

// And in host memory.
static int64_t acts_slot_host_bytes(const ActLayout *l) { return l->cpu_checkpointing ? l->n_segments * acts_stream_bytes(l) : 0; }
static int64_t acts_host_bytes(const ActLayout *l) { return l->n_slots * acts_slot_host_bytes(l); }

// Floating-point operations that recomputation adds to one token's forward and backward: what blocks do again, and in all but the
// last of a segment the last product, too, whose result the next one starts from.
static double acts_flops_per_token(const ActLayout *l) {
    const Model *m = l->model;
    return (double)m->L * recompute_flops_per_token(m, l->policy, l->T) + (double)(m->L - l->n_segments) * 2 * (double)m->C * (double)m->F;
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
    all.n_segments = (int)l->model->L;
    all.cpu_checkpointing = false;
    ActCost c = {acts_bytes(l), acts_bytes(&all) - acts_bytes(l), acts_host_bytes(l), l->B * l->T * l->model->L * recompute_bytes_per_token(l->model, l->policy),
                 acts_flops_per_token(l) / model_flops_per_token(l->model, l->T)};
    return c;
}

// ---------------------------------------------------------------------------------------------------------------
// Setting up

static void *acts_alloc(ActStore *a, int64_t bytes) {
    a->allocated += bytes;
    return bytes ? device_malloc(bytes) : NULL;
}

static void acts_init_slot(ActStore *a, ActSlot *s) {
    const ActLayout *l = &a->layout;
    const Model *m = a->model;
    int n_units = m->table.n_units;
    s->B = l->B;
    s->T = l->T;
    s->tokens = (int32_t *)acts_alloc(a, acts_tokens_bytes(l));
    s->targets = (int32_t *)acts_alloc(a, acts_tokens_bytes(l));
    s->x = (void **)host_alloc(sizeof(void *) * (size_t)(n_units + 1));
    s->saved = (void **)host_alloc(sizeof(void *) * (size_t)(n_units * ACT_COUNT));
    s->dx = acts_alloc(a, acts_dx_bytes(l));
    for (int u = 0; u < n_units; u++) {
        bool block = acts_is_block(l, u);
        int position = block ? acts_position(l, u) : 0;
        s->x[u] = acts_alloc(a, acts_x_bytes(l, u));
        if (!s->x[u] && !l->with_backward && u > 2) s->x[u] = s->x[u - 2];
        else if (!s->x[u] && block) s->x[u] = position > 0 ? a->shared_x[position] : a->buffer[acts_segment_of(l, u) % CHECKPOINT_BUFFERS].data;
        for (int r = 0; r < ACT_COUNT; r++) {
            void **saved = &s->saved[u * ACT_COUNT + r];
            *saved = acts_alloc(a, acts_saved_bytes(l, u, r));
            if (!*saved && block) *saved = acts_recomputes(l, r) ? a->shared[position * ACT_COUNT + r] : s->saved[1 * ACT_COUNT + r];
        }
    }
    if (!l->cpu_checkpointing) return;
    s->host_pinned = true;
    s->host = (char *)pinned_region_malloc(acts_slot_host_bytes(l), &s->host_pinned);
    if (!s->host_pinned)
        note("activation_checkpointing.cpu_checkpointing: the system refuses to pin %.1f MiB of host memory; training goes on without, and waits for the copies; raise the limit on locked memory", (double)acts_slot_host_bytes(l) / (1 << 20));
}

// profile, synchronize: see ActStore.mark and synchronize.
static void acts_init(ActStore *a, ActLayout layout, bool profile, bool synchronize) {
    const Model *m = layout.model;
    const ActLayout *l = &a->layout;
    memset(a, 0, sizeof *a);
    a->layout = layout;
    a->model = m;
    a->n_slots = layout.n_slots;
    a->synchronize = synchronize && l->policy != RECOMPUTE_NONE;
    CHECK(l->n_segments >= 1 && l->n_segments <= m->L && (l->policy == RECOMPUTE_BLOCK || l->n_segments == m->L), "%d segments of %" PRId64 " blocks", l->n_segments, m->L);
    CHECK(l->policy != RECOMPUTE_GELU || m->gelu_apart, "GELU is computed from values that are not stored");
    size_t visits = sizeof(ActVisit) * 2 * (size_t)m->table.n_units;
    a->forward = (ActVisit *)host_alloc(visits);
    a->backward = (ActVisit *)host_alloc(visits);
    a->n_forward = acts_visits(l, true, a->forward);
    if (l->with_backward) a->n_backward = acts_visits(l, false, a->backward);
    int length = acts_segment_length(l);
    a->shared = (void **)host_alloc(sizeof(void *) * (size_t)(length * ACT_COUNT));
    a->shared_x = (void **)host_alloc(sizeof(void *) * (size_t)length);
    for (int r = 0; r < ACT_COUNT; r++) a->scratch[r] = acts_alloc(a, acts_scratch_bytes(l, r));
    for (int i = 0; i < length; i++) {
        a->shared_x[i] = i > 0 ? acts_alloc(a, acts_stream_bytes(l)) : NULL;
        for (int r = 0; r < ACT_COUNT; r++) a->shared[i * ACT_COUNT + r] = acts_alloc(a, acts_shared_bytes(l, r));
    }
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
    for (int r = 0; r < ACT_COUNT; r++) device_free(a->scratch[r]);
    for (int i = 0; i < acts_segment_length(l); i++) {
        device_free(a->shared_x[i]);
        for (int r = 0; r < ACT_COUNT; r++) device_free(a->shared[i * ACT_COUNT + r]);
    }
    for (int i = 0; i < a->n_slots; i++) {
        ActSlot *s = &a->slot[i];
        device_free(s->tokens);
        device_free(s->targets);
        for (int u = 0; u < a->model->table.n_units; u++) {
            if (acts_x_bytes(l, u)) device_free(s->x[u]);
            for (int r = 0; r < ACT_COUNT; r++)
                if (acts_saved_bytes(l, u, r)) device_free(s->saved[u * ACT_COUNT + r]);
        }
        device_free(s->dx);
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
    free(a->forward);
    free(a->backward);
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

static int64_t checkpoint_bytes(const ActStore *a, const ActSlot *s) { return s->B * s->T * a->model->C * dtype_bytes(a->model->dtype); }

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

// Starts to bring a checkpoint back, unless it is there still. Whoever computed with what the buffer holds is done by the time
// that the computation comes to this point.
static void checkpoint_fetch(ActStore *a, ActSlot *s, int segment) {
    CheckpointBuffer *b = checkpoint_buffer(a, segment);
    if (b->holds == checkpoint_number(a, s, segment)) return;
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
    if (boundary >= 0 && a->mark[0]) event_record(a->mark[v.pass != ACTS_FORWARD][boundary], a->model->stream);
    if (boundary >= 0 && a->synchronize) stream_sync(a->model->stream);
    if (!a->copies || v.pass == ACTS_FORWARD) return;
    if (v.unit == a->model->table.n_units - 1) checkpoint_fetch(a, s, l->n_segments - 1); // the head takes long enough
    if (boundary < 0 || v.unit == 0) return;
    int segment = acts_segment_of(l, v.unit);
    checkpoint_fetch(a, s, segment);
    stream_wait_event(a->model->stream, checkpoint_buffer(a, segment)->copied);
    if (segment > 0) checkpoint_fetch(a, s, segment - 1);
}

// The segment whose checkpoint this visit writes into a buffer, or -1.
static int acts_written_checkpoint(const ActStore *a, ActVisit v) {
    int next = v.unit + 1;
    bool writes = a->copies && v.pass == ACTS_FORWARD && next < a->model->table.n_units && acts_is_block(&a->layout, next) && acts_position(&a->layout, next) == 0;
    return writes ? acts_segment_of(&a->layout, next) : -1;
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
    acts.tokens = s->tokens;
    acts.targets = s->targets;
    if (s->x[unit]) acts.x_in = tensor3(s->x[unit], m->dtype, s->B, s->T, m->C);
    if (unit + 1 < m->table.n_units) acts.x_out = tensor3(s->x[unit + 1], m->dtype, s->B, s->T, m->C);
    if (s->dx) acts.dx = tensor3(s->dx, m->dtype, s->B, s->T, m->C);
    for (int r = 0; r < ACT_COUNT; r++) {
        void *data = act_descs[r].keep == ACT_SCRATCH ? a->scratch[r] : s->saved[unit * ACT_COUNT + r];
        if (data) acts.act[r] = act_tensor(m, (ActRole)r, s->B, s->T, data);
    }
    // Of a segment that has run forward again, only the last block's activations are still to be made.
    if (v.pass == ACTS_BACKWARD && acts_is_block(l, unit) && unit == acts_segment_last(l, acts_segment_of(l, unit))) acts.recompute = l->policy;
    return acts;
}

// The unit's forward or backward is enqueued. What is saved stays where it is; a checkpoint leaves for the host.
static void acts_end(ActStore *a, ActSlot *s, ActVisit v) {
    int written = acts_written_checkpoint(a, v);
    if (written >= 0 && s->mode == FORWARD_TRAIN) checkpoint_store(a, s, written);
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
