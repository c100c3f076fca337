// acts.cu - where activations live. The model asks for a unit's activations by acts_begin and gives them back by
// acts_end; what is kept between forward and backward, recomputed or moved away is decided here and nowhere else.
//
// An ActSlot holds what one micro-batch in flight needs: its tokens, the residual stream between the units, and the
// saved activations of every unit. The policy of this file is the simplest: everything that backward reads is kept, and
// scratch is shared by all units and slots, since one unit computes at a time. Read next: pipeline.cu.
#pragma once
#include "model.cu"

typedef struct {
    int64_t B, T;           // of the micro-batch that is in the slot now; at most the sizes given to acts_init
    ForwardMode mode;
    int32_t *tokens, *targets; // (B,T) in the backend's memory
    void **x;               // by unit: the residual stream that enters it, (B,T,C); null for the embedding
    void *dx;               // gradient of the residual stream, (B,T,C)
    void **saved;           // [unit * ACT_COUNT + role], null where the unit has no such activation
} ActSlot;

// What decides how much memory a store takes: room for n_slots micro-batches of (B,T). Without backward there is no dx, and
// all blocks share one set of activations.
typedef struct {
    const Model *model;
    int n_slots;
    int64_t B, T;
    bool with_backward;
} ActLayout;

typedef struct {
    const Model *model;
    ActLayout layout;
    int n_slots;
    ActSlot *slot;
    void *scratch[ACT_COUNT];
    float dloss;            // see Acts.dloss
    int64_t allocated;      // bytes
} ActStore;

// ---------------------------------------------------------------------------------------------------------------
// The layout: bytes of each buffer, 0 where there is none or a unit uses another's. A planner needs no more than this.

static int64_t acts_scratch_bytes(const ActLayout *l, int role) {
    return act_descs[role].keep == ACT_SCRATCH ? tensor_bytes(act_tensor(l->model, (ActRole)role, l->B, l->T, NULL)) : 0;
}

static int64_t acts_tokens_bytes(const ActLayout *l) { return l->B * l->T * 4; }

static int64_t acts_dx_bytes(const ActLayout *l) { return l->with_backward ? l->B * l->T * l->model->C * dtype_bytes(l->model->dtype) : 0; }

// The residual stream that enters a unit. Without backward two buffers take turns: a unit reads one and writes the other.
static int64_t acts_x_bytes(const ActLayout *l, int unit) {
    if (unit == 0 || (!l->with_backward && unit > 2)) return 0;
    return l->B * l->T * l->model->C * dtype_bytes(l->model->dtype);
}

static int64_t acts_saved_bytes(const ActLayout *l, int unit, int role) {
    UnitKind kind = l->model->table.unit[unit].kind;
    if (act_descs[role].keep != ACT_SAVED || act_descs[role].unit != kind) return 0;
    if (!l->with_backward && kind == UNIT_BLOCK && unit > 1) return 0; // the first block's
    return tensor_bytes(act_tensor(l->model, (ActRole)role, l->B, l->T, NULL));
}

// All that acts_init allocates.
static int64_t acts_bytes(const ActLayout *l) {
    int64_t shared = 0, slot = 2 * acts_tokens_bytes(l) + acts_dx_bytes(l);
    for (int r = 0; r < ACT_COUNT; r++) shared += acts_scratch_bytes(l, r);
    for (int u = 0; u < l->model->table.n_units; u++) {
        slot += acts_x_bytes(l, u);
        for (int r = 0; r < ACT_COUNT; r++) slot += acts_saved_bytes(l, u, r);
    }
    return shared + l->n_slots * slot;
}

// ---------------------------------------------------------------------------------------------------------------
// Setting up

static void *acts_alloc(ActStore *a, int64_t bytes) {
    a->allocated += bytes;
    return bytes ? device_malloc(bytes) : NULL;
}

static void acts_init(ActStore *a, ActLayout layout) {
    const Model *m = layout.model;
    const ActLayout *l = &a->layout;
    memset(a, 0, sizeof *a);
    a->layout = layout;
    a->model = m;
    a->n_slots = layout.n_slots;
    a->slot = (ActSlot *)host_alloc(sizeof(ActSlot) * (size_t)a->n_slots);
    int n_units = m->table.n_units;
    for (int r = 0; r < ACT_COUNT; r++) a->scratch[r] = acts_alloc(a, acts_scratch_bytes(l, r));
    for (int i = 0; i < a->n_slots; i++) {
        ActSlot *s = &a->slot[i];
        s->B = l->B;
        s->T = l->T;
        s->tokens = (int32_t *)acts_alloc(a, acts_tokens_bytes(l));
        s->targets = (int32_t *)acts_alloc(a, acts_tokens_bytes(l));
        s->x = (void **)host_alloc(sizeof(void *) * (size_t)(n_units + 1));
        s->saved = (void **)host_alloc(sizeof(void *) * (size_t)(n_units * ACT_COUNT));
        s->dx = acts_alloc(a, acts_dx_bytes(l));
        for (int u = 0; u < n_units; u++) {
            s->x[u] = acts_alloc(a, acts_x_bytes(l, u));
            if (!s->x[u] && u > 2) s->x[u] = s->x[u - 2];
            for (int r = 0; r < ACT_COUNT; r++) {
                void **saved = &s->saved[u * ACT_COUNT + r];
                *saved = acts_alloc(a, acts_saved_bytes(l, u, r));
                if (!*saved && m->table.unit[u].kind == UNIT_BLOCK) *saved = s->saved[1 * ACT_COUNT + r];
            }
        }
    }
}

static void acts_free(ActStore *a) {
    for (int r = 0; r < ACT_COUNT; r++) device_free(a->scratch[r]);
    for (int i = 0; i < a->n_slots; i++) {
        ActSlot *s = &a->slot[i];
        device_free(s->tokens);
        device_free(s->targets);
        for (int u = 0; u < a->model->table.n_units; u++) {
            if (acts_x_bytes(&a->layout, u)) device_free(s->x[u]);
            for (int r = 0; r < ACT_COUNT; r++)
                if (acts_saved_bytes(&a->layout, u, r)) device_free(s->saved[u * ACT_COUNT + r]);
        }
        device_free(s->dx);
        free(s->x);
        free(s->saved);
    }
    free(a->slot);
}

// The activations of a unit for the micro-batch in the slot. Valid until acts_end.
static Acts acts_begin(ActStore *a, ActSlot *s, int unit) {
    const Model *m = a->model;
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
    return acts;
}

// The unit's forward or backward is enqueued. Everything saved stays where it is.
static void acts_end(ActStore *a, ActSlot *s, int unit) { (void)a, (void)s, (void)unit; }
