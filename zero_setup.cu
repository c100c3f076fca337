// zero_setup.cu - what each rank has room for: shards, pools and shared buffers as bytes (ZeroLayout, which the planner asks as well),
// then as memory (zero_init).
//
// A part of zero.cu, which includes it after its types.
#pragma once

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
    z->divisor = z->postdivide / (opt.gradient_allreduce_op ? groups->grid.size.dp : 1); // ranks that share samples' tokens add up to one gradient
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
