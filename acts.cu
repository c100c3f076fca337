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

typedef struct {
    const Model *model;
    int n_slots;
    ActSlot *slot;
    void *scratch[ACT_COUNT];
    float dloss;            // see Acts.dloss
    int64_t bytes;          // on this rank, for the start-up table
} ActStore;

static void *acts_alloc(ActStore *a, int64_t bytes) {
    a->bytes += bytes;
    return device_malloc(bytes);
}

// Room for n_slots micro-batches of (B,T). Without backward there is no dx, and all blocks share one set of activations.
static void acts_init(ActStore *a, const Model *m, int n_slots, int64_t B, int64_t T, bool with_backward) {
    memset(a, 0, sizeof *a);
    a->model = m;
    a->n_slots = n_slots;
    a->slot = (ActSlot *)host_alloc(sizeof(ActSlot) * (size_t)n_slots);
    int n_units = m->table.n_units;
    int64_t x_bytes = B * T * m->C * dtype_bytes(m->dtype);
    for (int r = 0; r < ACT_COUNT; r++)
        if (act_descs[r].keep == ACT_SCRATCH) a->scratch[r] = acts_alloc(a, tensor_bytes(act_tensor(m, (ActRole)r, B, T, NULL)));
    for (int i = 0; i < n_slots; i++) {
        ActSlot *s = &a->slot[i];
        s->B = B;
        s->T = T;
        s->tokens = (int32_t *)acts_alloc(a, B * T * 4);
        s->targets = (int32_t *)acts_alloc(a, B * T * 4);
        s->x = (void **)host_alloc(sizeof(void *) * (size_t)(n_units + 1));
        s->saved = (void **)host_alloc(sizeof(void *) * (size_t)(n_units * ACT_COUNT));
        if (with_backward) s->dx = acts_alloc(a, x_bytes);
        for (int u = 0; u < n_units; u++) {
            bool shared = !with_backward && m->table.unit[u].kind == UNIT_BLOCK && u > 1;
            // Without backward two buffers of the residual stream take turns: a unit reads one and writes the other.
            if (u > 0) s->x[u] = !with_backward && u > 2 ? s->x[u - 2] : acts_alloc(a, x_bytes);
            for (int r = 0; r < ACT_COUNT; r++) {
                if (act_descs[r].keep != ACT_SAVED || act_descs[r].unit != m->table.unit[u].kind) continue;
                s->saved[u * ACT_COUNT + r] = shared ? s->saved[1 * ACT_COUNT + r] : acts_alloc(a, tensor_bytes(act_tensor(m, (ActRole)r, B, T, NULL)));
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
            if (u <= 2 || s->dx) device_free(s->x[u]);
            bool shared = !s->dx && a->model->table.unit[u].kind == UNIT_BLOCK && u > 1;
            for (int r = 0; r < ACT_COUNT && !shared; r++) device_free(s->saved[u * ACT_COUNT + r]);
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
