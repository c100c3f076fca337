// plan_report.cu - --plan: what planner.cu and plan_time.cu know, printed; and where a world does not fit, what to change.
//
// A row for each number of ranks, in three tables: memory of the rank that needs most (with a pipeline also of each stage), bytes that
// a rank moves in an update, and an estimate of its time. Then what each policy of activation checkpointing would bring. Where memory is
// known and does not suffice, degrees, micro-batch, stage, offload and policy are tried together, each as it is and in each direction that needs
// less, and those that fit are printed as the overrides that ask for them, the fastest first. docs/planner.md reads an example.
// Read next: trainer.cu.
#pragma once
#include "plan_time.cu"

// Does anything of the model lie in host memory?
static bool plan_uses_host(const Config *cfg) { return cfg->zero.offload_optimizer.device || cfg->zero.offload_param.device || cfg->activation_checkpointing.cpu_checkpointing || cfg->checkpoint.decoupled; }

// ---------------------------------------------------------------------------------------------------------------
// Memory

typedef struct {
    double unit, room;   // bytes of the unit that is printed; of the device that may be used, -1 if that is not known
    double host_room;    // of the host for all ranks on it, 0 if that is not limited
    bool host;           // there is a column for host memory
} PlanTable;

static void print_memory(const PlanTable *table, const Config *cfg, const MemoryUse *use, const MemoryUse *host) {
    const double total = (double)memory_total(use), together = plan_host_together(cfg, (double)memory_total(host)), room = table->room;
    const bool lacks_device = room >= 0 && total > room, lacks_host = table->host && table->host_room > 0 && together > table->host_room;
    for (int k = 0; k < MEMORY_KINDS; k++) printf(" %10.2f", (double)use->bytes[k] / table->unit);
    printf(" %10.2f", total / table->unit);
    if (table->host) printf(" %10.2f", (double)memory_total(host) / table->unit);
    if (lacks_device) printf("  %.2f too much", (total - room) / table->unit);
    if (lacks_host) printf("%s %.2f too much for the host", lacks_device ? "," : " ", (together - table->host_room) / table->unit);
    if (room >= 0 && !lacks_device && !lacks_host) printf("  fits");
    putchar('\n');
}

static void print_memory_header(const PlanTable *table) {
    printf("%s of memory a rank\n%7s %6s %6s %7s ", table->unit > 1024 * 1024 ? "GiB" : "MiB", "ranks", "micro", "accum", "batch");
    for (int k = 0; k < MEMORY_KINDS; k++) printf(" %10.10s", k == MEMORY_OPTIMIZER_STATES ? "states" : k == MEMORY_ACTIVATIONS ? "activat." : memory_names[k]);
    printf(" %10s", "total");
    if (table->host) printf(" %10s", "host");
    if (table->room >= 0) printf("  of %.2f", table->room / table->unit);
    putchar('\n');
}

static void print_memory_row(const PlanTable *table, const Plan *p) {
    const Config *cfg = p->cfg;
    const BatchConfig *b = &cfg->batch;
    MemoryUse host, use;
    plan_fullest(p, &use, &host);
    printf("%7" PRId64 " %6" PRId64 " %6" PRId64 " %7" PRId64 "%s", cfg->world, b->train_micro_batch_size_per_gpu, b->gradient_accumulation_steps, b->train_batch_size, cfg->batch_follows ? "*" : " ");
    print_memory(table, cfg, &use, &host);
    for (int s = 0; s < p->size.pp && p->size.pp > 1; s++) {
        char name[40];
        int blocks = 0;
        for (int u = 0; u < p->model[s].table.n_units; u++) blocks += p->stage[u] == s && p->model[s].table.unit[u].kind == UNIT_BLOCK;
        snprintf(name, sizeof name, "stage %d, %d blocks", s, blocks);
        use = plan_stage_memory(p, s, &host);
        printf("%30s", name);
        print_memory(table, cfg, &use, &host);
    }
}

// The ladder of activation checkpointing: what each policy saves on the fullest stage, and what it costs a micro-batch there.
static void print_ladder(const Plan *p, double unit) {
    MemoryUse use;
    const int stage = plan_fullest(p, &use, NULL);
    const StageActs set = plan_stage_acts_under(p, stage, &p->cfg->activation_checkpointing);
    char where[64] = "";
    if (p->size.pp > 1) snprintf(where, sizeof where, " on stage %d, which needs most", stage);
    printf("activation checkpointing of a micro-batch of %" PRId64 "%s; recomputed operations as a share of the update's own, traffic once more in memory\n%22s %10s %10s %10s %10s %10s\n",
           p->cfg->batch.train_micro_batch_size_per_gpu, where, "policy", "activat.", "saved", "on host", "operations", "traffic");
    for (int policy = 0; policy <= RECOMPUTE_POLICIES; policy++) {
        char name[64];
        if (policy == RECOMPUTE_POLICIES && set.segments == set.blocks && !set.cpu_checkpointing) continue;
        const StageActs a = policy == RECOMPUTE_POLICIES ? set : plan_stage_policy(p, stage, (RecomputePolicy)policy);
        bool chosen = a.policy == set.policy && a.segments == set.segments && a.cpu_checkpointing == set.cpu_checkpointing;
        if (a.segments == a.blocks) snprintf(name, sizeof name, "%s", recompute_names[a.policy]);
        else snprintf(name, sizeof name, "%s, %d segments", recompute_names[a.policy], a.segments);
        printf("%22s %10.2f %10.2f %10.2f %8.1f %% %10.2f%s\n", name, (double)a.cost.bytes / unit, (double)a.cost.saved_bytes / unit, (double)a.cost.host_bytes / unit, 100 * a.cost.flops_share,
               (double)a.cost.traffic_bytes / unit, chosen ? "  <- this one" : "");
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Bytes and time

// Figure by figure of the rank that has most.
static PlanMoves plan_most_moves(const Plan *p) {
    PlanMoves most = plan_moves(p, 0);
    for (int s = 1; s < p->size.pp; s++) {
        PlanMoves m = plan_moves(p, s);
        for (int k = 0; k < MOVE_KINDS; k++) most.bytes[k] = fmax(most.bytes[k], m.bytes[k]);
    }
    return most;
}

static void print_moves(const Plan *plan, int n, double unit) {
    bool any[MOVE_KINDS] = {false}, some = false;
    for (int i = 0; i < n; i++) {
        PlanMoves m = plan_most_moves(&plan[i]);
        for (int k = 0; k < MOVE_KINDS; k++) some |= any[k] |= m.bytes[k] > 0;
    }
    if (!some) return;
    printf("%s that a rank sends or copies in an update, at most\n%7s", unit > 1024 * 1024 ? "GiB" : "MiB", "");
    for (int k = 0; k < MOVE_KINDS; k++) if (any[k]) printf(" %10s", move_names[k].axis);
    printf("\n%7s", "ranks");
    for (int k = 0; k < MOVE_KINDS; k++) if (any[k]) printf(" %10s", move_names[k].what);
    putchar('\n');
    for (int i = 0; i < n; i++) {
        PlanMoves m = plan_most_moves(&plan[i]);
        printf("%7" PRId64, plan[i].cfg->world);
        for (int k = 0; k < MOVE_KINDS; k++) if (any[k]) printf(" %10.2f", m.bytes[k] / unit);
        putchar('\n');
    }
}

// What messages cost, by axis, of those that there are.
static void print_messages(const Plan *plan, const PlanTime *time, int n) {
    bool any[AXES] = {false}, some = false;
    for (int i = 0; i < n; i++)
        for (int a = 0; a < AXES; a++) some |= any[a] |= time[i].exposed[a] + time[i].hidden[a] > 0;
    if (!some) return;
    printf("ms of messages in it: those that the update is longer by, and those hidden behind its computation (of sequence parallelism, and of tensor parallelism in one piece, none is)\n%7s", "");
    for (int a = 0; a < AXES; a++) if (any[a]) printf(" %21s", axis_names[a]);
    printf("\n%7s", "ranks");
    for (int a = 0; a < AXES; a++) if (any[a]) printf(" %11s %9s", "exposed", "hidden");
    putchar('\n');
    for (int i = 0; i < n; i++) {
        printf("%7" PRId64, plan[i].cfg->world);
        for (int a = 0; a < AXES; a++) if (any[a]) printf(" %11.1f %9.1f", 1e3 * time[i].exposed[a], 1e3 * time[i].hidden[a]);
        putchar('\n');
    }
}

// What the stages do in an update, where it is small enough to be drawn: of more micro-batches as many as are.
static void print_schedule(const Plan *p) {
    const int stages = p->size.pp, most = DRAWING_DIGITS / stages * stages, n = (int)min_i64(p->cfg->batch.gradient_accumulation_steps, most);
    if (stages == 1 || stages > DRAWING_STAGES || p->n_chunks > DRAWING_DIGITS) return;
    char *text = pipeline_drawing(p->pipe[0].schedule, stages, p->n_chunks, n);
    printf("%s with %d micro-batches, if F (forward), B (backward) and w (gradients of weights) take equally long; beneath each its micro-batch%s\n%s", pipeline_names[p->pipe[0].schedule], n,
           p->n_chunks > 1 ? " and the stage's chunk" : "", text);
    free(text);
}

static void print_times(const Plan *plan, int n) {
    if (plan[0].cfg->dtype == DTYPE_FP32) {
        printf("no time is estimated: the rates known are those of 16 bits; set bf16.enabled\n");
        return;
    }
    printf("estimated, not measured, for H200 GPUs (docs/planner.md has the rates); ms of an update: where they go, on the rank that computes most\n%7s %11s %11s %9s %7s %7s %10s %9s %9s %9s\n", "ranks", "ms", "tokens/s", "TFLOP/s", "of peak",
           "bubble", "computing", "messages", "offload", "update");
    PlanTime *time = (PlanTime *)host_alloc(sizeof(PlanTime) * (size_t)n);
    for (int i = 0; i < n; i++) {
        PlanTime t = time[i] = plan_time(&plan[i]);
        printf("%7" PRId64 " %11.1f %11.0f %9.0f %5.1f %% %5.1f %% %10.1f %9.1f %9.1f %9.1f\n", plan[i].cfg->world, 1e3 * t.step, t.tokens_per_second, t.tflops, 100 * t.share_of_peak, 100 * t.bubble,
               1e3 * t.compute, 1e3 * total_exposed(&t), 1e3 * t.offload, 1e3 * t.update);
    }
    print_messages(plan, time, n);
    free(time);
}

// ---------------------------------------------------------------------------------------------------------------
// What to change where it does not fit

enum { PROPOSALS_MAX = 4 };

// What is tried.
typedef struct {
    ParallelConfig parallel;
    BatchConfig batch;
    int64_t stage;
    OffloadDevice optimizer, param;
    RecomputePolicy policy;
} Choice;

static Choice choice_of(const Config *c) { return {c->parallel, c->batch, c->zero.stage, c->zero.offload_optimizer.device, c->zero.offload_param.device, c->activation_checkpointing.policy}; }

typedef struct {
    Choice choice;
    double seconds, bytes, host_bytes; // of an update (0 in fp32, where no rates are known); of the fullest rank
} Proposal;

// The fastest that fit. Of those that differ in the policy alone the best stands for all. And what needs least, if none fits.
typedef struct {
    Proposal fits[PROPOSALS_MAX], least;
    int n;
} Proposals;

static bool choices_alike(const Choice *a, const Choice *b) {
    return a->parallel.tensor == b->parallel.tensor && a->parallel.pipeline == b->parallel.pipeline && a->batch.train_micro_batch_size_per_gpu == b->batch.train_micro_batch_size_per_gpu &&
           a->stage == b->stage && a->optimizer == b->optimizer && a->param == b->param;
}

static void proposals_add(Proposals *all, const Proposal *p) {
    int at = 0;
    for (; at < all->n && all->fits[at].seconds <= p->seconds; at++) if (choices_alike(&all->fits[at].choice, &p->choice)) return;
    int gone = at; // the one whose place is taken: alike and slower, or the last
    while (gone < all->n && !choices_alike(&all->fits[gone].choice, &p->choice)) gone++;
    if (gone == PROPOSALS_MAX) gone--;
    else if (gone == all->n) all->n++;
    if (at > gone) return;
    memmove(&all->fits[at + 1], &all->fits[at], sizeof(Proposal) * (size_t)(gone - at));
    all->fits[at] = *p;
}

// Stages, offload and policies in the degrees and the micro-batch of a plan, whose configuration c is.
static void propose_within(Plan *p, Config *c, const Config *given, const PlanTable *table, Proposals *all) {
    const ZeroConfig *z = &given->zero;
    const bool alone = p->size.dp * p->size.sp == 1; // no stage shares anything
    const bool whole_sums = z->reduce_scatter && (z->prescale_gradients || z->gradient_predivide_factor != 1); // not from stage 2 on
    for (int64_t stage = z->stage; stage <= 3; stage++) {
        if ((stage >= 2 && z->stage < 2 && whole_sums) || (stage == 3 && z->stage < 3 && z->gradient_allreduce_op)) continue;
        for (int offload = 0; offload < 3; offload++) {
            const int64_t least = offload == 0 ? 0 : offload == 1 ? 1 : 3; // the stage that it needs
            if (stage < least || (alone && stage > max_i64(least, z->stage)) || (offload == 1 && z->offload_optimizer.device) || (offload == 2 && z->offload_param.device)) continue;
            c->zero = *z;
            c->zero.stage = stage;
            if (!config_given(given, "zero_optimization.overlap_comm")) c->zero.overlap_comm = stage == 3;
            if (offload > 0 && !z->offload_optimizer.device) c->zero.offload_optimizer.device = OFFLOAD_CPU;
            if (offload == 2) c->zero.offload_param.device = OFFLOAD_CPU;
            plan_shard(p);
            for (int policy = given->activation_checkpointing.policy; policy < RECOMPUTE_POLICIES; policy++) {
                MemoryUse host, use;
                c->activation_checkpointing.policy = (RecomputePolicy)policy;
                plan_fullest(p, &use, &host);
                Proposal found = {choice_of(c), 0, (double)memory_total(&use), (double)memory_total(&host)};
                if (found.bytes < all->least.bytes) all->least = found;
                if (found.bytes > table->room || (table->host_room > 0 && plan_host_together(c, found.host_bytes) > table->host_room)) continue;
                if (c->dtype != DTYPE_FP32) found.seconds = plan_time_below(p, all->n == PROPOSALS_MAX ? all->fits[PROPOSALS_MAX - 1].seconds : INFINITY).step;
                if (found.seconds < INFINITY) proposals_add(all, &found);
            }
        }
    }
}

// The samples of an update stay; false if they cannot be had so.
static bool propose_batch(Config *c) {
    BatchConfig *b = &c->batch;
    int64_t each = b->train_micro_batch_size_per_gpu * c->parallel.data;
    b->gradient_accumulation_steps = b->train_batch_size / each;
    if (b->train_batch_size % each != 0) return false;
    return c->parallel.pipeline == 1 || c->parallel.pipeline_schedule != PIPELINE_INTERLEAVED || b->gradient_accumulation_steps % c->parallel.pipeline == 0;
}

static Proposals proposals_make(const Config *given, const PlanTable *table) {
    const ModelConfig *m = &given->model;
    const bool interleaved = given->parallel.pipeline_schedule == PIPELINE_INTERLEAVED;
    Proposals all;
    Config *c = (Config *)host_alloc(sizeof *c);
    memset(&all, 0, sizeof all);
    all.least.bytes = INFINITY;
    for (int64_t tensor = 1; tensor <= PLAN_HOST_RANKS; tensor *= 2) {
        const int64_t pieces = tensor > 1 ? given->run.tensor_parallel_pieces : 1;
        for (int64_t pipeline = 1; pipeline * tensor * given->parallel.sequence <= given->world; pipeline++)
            for (int64_t micro = given->batch.train_micro_batch_size_per_gpu; micro > 0; micro /= 2) {
                *c = *given;
                ParallelConfig *n = &c->parallel;
                n->tensor = tensor;
                n->pipeline = pipeline;
                n->data = given->world / (tensor * pipeline * n->sequence);
                if (pipeline != given->parallel.pipeline) n->virtual_pipeline = interleaved && pipeline > 1 ? 2 : 1;
                c->batch.train_micro_batch_size_per_gpu = micro;
                if (given->world % (tensor * pipeline * n->sequence) != 0 || m->n_head % (tensor * n->sequence) != 0 || m->n_inner % tensor != 0 || given->run.seq_len % (tensor * n->sequence * pieces) != 0) continue;
                if (m->n_layer < pipeline * pipeline_n_chunks(n->pipeline_schedule, (int)pipeline, (int)n->virtual_pipeline) || !propose_batch(c)) continue;
                Plan p;
                plan_open(&p, c);
                propose_within(&p, c, given, table, &all);
                plan_close(&p);
            }
    }
    free(c);
    return all;
}

// What of a choice differs from what is given, as overrides.
static void overrides_text(const Config *given, const Choice *c, char *text, size_t room) {
    const ParallelConfig *n = &c->parallel, *was = &given->parallel;
    const BatchConfig *b = &c->batch;
    const Choice old = choice_of(given);
    const bool batch = b->train_micro_batch_size_per_gpu != old.batch.train_micro_batch_size_per_gpu || b->gradient_accumulation_steps != old.batch.gradient_accumulation_steps;
    const struct { bool differs; const char *key; int64_t value; const char *word; } row[] = {
        {n->tensor != was->tensor, "tensor_model_parallel_size", n->tensor, NULL},
        {n->pipeline != was->pipeline, "pipeline_model_parallel_size", n->pipeline, NULL},
        {n->virtual_pipeline != was->virtual_pipeline, "virtual_pipeline_model_parallel_size", n->virtual_pipeline, NULL},
        {n->tensor != was->tensor && given->compat.sequence_parallel, "sequence_parallel_size", n->sequence, NULL}, // else it would follow
        {n->data != was->data && config_given(given, "data_parallel_size"), "data_parallel_size", n->data, NULL},
        {batch, "train_batch_size", b->train_batch_size, NULL},
        {batch, "train_micro_batch_size_per_gpu", b->train_micro_batch_size_per_gpu, NULL},
        {batch, "gradient_accumulation_steps", b->gradient_accumulation_steps, NULL},
        {c->stage != old.stage, "zero_optimization.stage", c->stage, NULL},
        {c->optimizer != old.optimizer, "zero_optimization.offload_optimizer.device", 0, "cpu"},
        {c->param != old.param, "zero_optimization.offload_param.device", 0, "cpu"},
        {c->policy != old.policy, "activation_checkpointing.policy", 0, recompute_names[c->policy]},
    };
    size_t at = 0;
    text[0] = 0;
    for (size_t i = 0; i < sizeof row / sizeof *row && at < room; i++) {
        if (!row[i].differs) continue;
        if (row[i].word) at += (size_t)snprintf(text + at, room - at, "%s%s=%s", at ? " " : "", row[i].key, row[i].word);
        else at += (size_t)snprintf(text + at, room - at, "%s%s=%" PRId64, at ? " " : "", row[i].key, row[i].value);
    }
}

static void print_proposals(const Plan *p, const PlanTable *table) {
    const double unit = table->unit;
    MemoryUse use, host;
    plan_fullest(p, &use, &host);
    if (table->room < 0 || ((double)memory_total(&use) <= table->room && (table->host_room <= 0 || plan_host_together(p->cfg, (double)memory_total(&host)) <= table->host_room))) return;
    Proposals all = proposals_make(p->cfg, table);
    if (all.n) printf("what would fit on %" PRId64 " ranks, the fastest by estimate first\n", p->cfg->world);
    else printf("nothing was found that fits on %" PRId64 " ranks: take more of them, or a smaller model; what needs least is\n", p->cfg->world);
    for (int i = 0; i < (all.n ? all.n : 1); i++) {
        const Proposal *f = all.n ? &all.fits[i] : &all.least;
        char overrides[1024];
        overrides_text(p->cfg, &f->choice, overrides, sizeof overrides);
        printf("    %.2f %s", f->bytes / unit, unit > 1024 * 1024 ? "GiB" : "MiB");
        if (f->host_bytes > 0) printf(", %.2f of the host", f->host_bytes / unit);
        if (f->seconds > 0) printf(", about %.*f ms an update", f->seconds < 0.1 ? 2 : 0, 1e3 * f->seconds);
        printf("\n        %s\n", overrides);
    }
}

// ---------------------------------------------------------------------------------------------------------------

static void print_plan_header(const Config *first, const DeviceInfo *device) {
    const ModelConfig *c = &first->model;
    Model m;
    model_init(&m, c, model_whole, first->dtype, first->run.logits_bytes, first->run.gelu_apart, NULL);
    printf("%s: n_layer %" PRId64 ", n_head %" PRId64 ", n_embd %" PRId64 ", n_inner %" PRId64 ", vocab_size %" PRId64 ", %" PRId64 " parameters; %s, %s, ZeRO stage %" PRId64 ", %" PRId64 " tokens a sample\n",
           m.arch->name, c->n_layer, c->n_head, c->n_embd, c->n_inner, c->vocab_size, table_param_count(&m.table), dtype_name(first->dtype), optimizer_rules[first->optimizer.type].name, first->zero.stage, first->run.seq_len);
    model_free(&m);
    const ParallelConfig *n = &first->parallel;
    if (n->tensor * n->pipeline * n->sequence > 1) printf("tensor %" PRId64 " x pipeline %" PRId64 " (%s) x sequence %" PRId64 "; the other ranks are data parallel\n", n->tensor, n->pipeline, pipeline_names[n->pipeline_schedule], n->sequence);
    if (device) printf("device: %s, %.1f GiB\n", device->name, (double)device->memory_bytes / (1 << 30));
}

// Prints a row for each number of ranks, from `first` on; returns the exit code.
static int plan_print(Config *first) {
    const double gib = 1024.0 * 1024 * 1024, mib = 1024.0 * 1024;
    bool refused = false, follows = false;
    int n = 0, worlds = 0;
    for (Config *c = first; c; c = c->next_world, worlds++) {
        refused |= c->refused, follows |= c->batch_follows;
        if (!c->refused) resolve_model(c);
    }
    if (message_rank > 0) return refused ? EXIT_CONFIG : EXIT_OK;
    DeviceInfo device;
    bool present = first->device_memory == 0 && device_probe(0, &device);
    double room = first->device_memory > 0 ? first->device_memory * gib : present ? (double)device.memory_bytes : -1;
    Plan *plan = (Plan *)host_alloc(sizeof(Plan) * (size_t)worlds);
    for (Config *c = first; c; c = c->next_world) {
        if (c->refused) continue;
        config_fit_channels(c, layernorm_backward_channels_max(!present), !present);
        plan_open(&plan[n++], c);
    }
    MemoryUse largest;
    plan_fullest(&plan[0], &largest, NULL);
    PlanTable table = {memory_total(&largest) >= 1e9 ? gib : mib, room < 0 ? room : fmax(0, room - (double)PLAN_OTHERS_BYTES), first->host_memory * gib, plan_uses_host(first)};
    print_plan_header(first, present ? &device : NULL);
    if (table.room >= 0 && PLAN_OTHERS_BYTES > 0) printf("%.1f GiB of the device are left to its context and libraries\n", (double)PLAN_OTHERS_BYTES / gib);
    print_memory_header(&table);
    int i = 0;
    for (Config *c = first; c; c = c->next_world)
        if (c->refused) printf("%7" PRId64 " refused: see above\n", c->world);
        else print_memory_row(&table, &plan[i++]);
    if (follows) printf("* train_batch_size cannot be had with this micro-batch on so many ranks: micro-batch and accumulation are kept, and it follows\n");
    print_moves(plan, n, table.unit);
    print_times(plan, n);
    print_schedule(&plan[0]);
    for (i = 0; i < n; i++)
        if (i == 0 || plan[i].cfg->batch.train_micro_batch_size_per_gpu != first->batch.train_micro_batch_size_per_gpu) print_ladder(&plan[i], table.unit);
    for (i = 0; i < n; i++) print_proposals(&plan[i], &table);
    for (i = 0; i < n; i++) plan_close(&plan[i]);
    free(plan);
    output_flush();
    return refused ? EXIT_CONFIG : EXIT_OK;
}
