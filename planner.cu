// planner.cu - the memory that a run takes, known before it begins: for the table at the start, and for --plan.
//
// Everything is arithmetic on the layouts of zero.cu and acts.cu, by which the trainer allocates, too. So no device, no data
// and no other rank is needed, and any rank of any world can be asked for. docs/memory.md says where each byte goes.
// Read next: trainer.cu.
#pragma once
#include "acts.cu"
#include "huggingface.cu"
#include "optimizer.cu"
#include "pipeline.cu"
#include "replicas.cu"
#include "runtime/host_memory.h"

// What --plan takes for the size of a host, where no launcher tells.
enum { PLAN_HOST_RANKS = 8 };

// Completes the model's sizes from the folder that it starts from, and checks what only the whole can tell.
static void resolve_model(Config *cfg) {
    ModelConfig *m = &cfg->model;
    bool tied = m->tie_word_embeddings;
    if (m->init_from[0]) hf_config_read(m->init_from, m);
    if (tied != m->tie_word_embeddings && config_given(cfg, "train_gpt.model.tie_word_embeddings"))
        die_alike(EXIT_CONFIG, "train_gpt.model.tie_word_embeddings = %s: the model in model.init_from has a head that is %s; remove the key", tied ? "true" : "false", tied ? "not tied" : "tied");
    if (m->n_inner == 0) m->n_inner = 4 * m->n_embd;
    if (cfg->run.seq_len == 0) cfg->run.seq_len = m->n_positions;
    if (cfg->run.seq_len > m->n_positions)
        die_alike(EXIT_CONFIG, "train_gpt.run.seq_len = %" PRId64 ": the model has %" PRId64 " positions; lower seq_len or raise model.n_positions", cfg->run.seq_len, m->n_positions);
    if (m->n_embd % m->n_head != 0)
        die_alike(EXIT_CONFIG, "train_gpt.model.n_embd = %" PRId64 ": not divisible by n_head = %" PRId64 "; change one of them", m->n_embd, m->n_head);
    int64_t HS = m->n_embd / m->n_head;
    if (KERNELS_ON_GPU && (HS % 8 != 0 || HS > 128))
        die_alike(EXIT_CONFIG, "train_gpt.model.n_embd / n_head = %" PRId64 ": the GPU's attention takes head sizes that are multiples of 8 up to 128; change n_head", HS);
    if (cfg->batch.vocabulary_size && cfg->batch.vocabulary_size != m->vocab_size)
        die_alike(EXIT_CONFIG, "vocabulary_size = %" PRId64 ": the model's vocabulary has %" PRId64 " tokens; remove the key or make them equal", cfg->batch.vocabulary_size, m->vocab_size);
}

// What device_malloc will have given to rank grid.rank at its peak. cfg and m are resolved; B: samples of a micro-batch;
// with_backward: to train; one_host: all ranks are on one, and reach each other's memory. *host, unless null: what the rank will
// have of host memory for what lies there.
static MemoryUse plan_memory(const Config *cfg, const Model *m, ProcessGrid grid, bool one_host, int64_t B, bool with_backward, MemoryUse *host) {
    int64_t T = cfg->run.seq_len;
    ZeroOptions options = zero_options(&cfg->zero);
    options.direct_exchange = options.direct_exchange && one_host;
    ZeroLayout zero = zero_layout(m, options, grid.zero_size, grid.zero_rank, optimizer_n_states(&cfg->optimizer), with_backward);
    ActLayout acts = acts_layout(cfg, m, pipeline_n_slots(), B, with_backward);
    MemoryUse use = zero.bytes;
    if (host) *host = zero.host_bytes, host->bytes[MEMORY_ACTIVATIONS] += acts_host_bytes(&acts);
    zero_layout_free(&zero);
    use.bytes[MEMORY_ACTIVATIONS] = acts_bytes(&acts);
    use.bytes[MEMORY_SCRATCH] = scratch_bytes(B, T, m->C, m->NH) + optimizer_bytes() + (int64_t)sizeof(double); // the last: Trainer.eval_sum
    if (cfg->run.replica_check_every > 0) use.bytes[MEMORY_SCRATCH] += replicas_bytes(m, grid.zero_size);
    return use;
}

// What the driver's context, the code of kernels and libraries and the rounding of pieces to 2 MiB take of a GPU beside all this:
// 0.58 to 0.74 GiB on an H200 with one rank (docs/memory.md). NCCL takes more with many.
static const int64_t PLAN_OTHERS_BYTES = KERNELS_ON_GPU ? (int64_t)1 << 30 : 0;

// Host memory that a rank's offloaded arrays take, by kind, in one line: "weights 1.00, masters 1.00, ...", in GiB.
static const char *plan_host_text(char *text, size_t room, const MemoryUse *host) {
    int n = 0;
    text[0] = 0;
    for (int k = 0; k < MEMORY_KINDS && n < (int)room; k++)
        if (host->bytes[k]) n += snprintf(text + n, room - (size_t)n, "%s%s %.2f", n ? ", " : "", k == MEMORY_OPTIMIZER_STATES ? "optimizer states" : memory_names[k], (double)host->bytes[k] / (1 << 30));
    return text;
}

// ---------------------------------------------------------------------------------------------------------------
// --plan

// Does anything of the model lie in host memory?
static bool plan_uses_host(const Config *cfg) { return cfg->zero.offload_optimizer.device || cfg->zero.offload_param.device || cfg->activation_checkpointing.cpu_checkpointing; }

static void plan_print_row(const Config *cfg, const Model *m, double unit, double room) {
    const BatchConfig *b = &cfg->batch;
    GridAxes axes = {1, (int)cfg->world, 1, 1};
    // All ranks hold parts of the same size: what holds for the first holds for all.
    MemoryUse host, use = plan_memory(cfg, m, grid_make(0, axes), cfg->world <= PLAN_HOST_RANKS, b->train_micro_batch_size_per_gpu, true, &host);
    double total = (double)memory_total(&use);
    printf("%7" PRId64 " %6" PRId64 " %6" PRId64 " %7" PRId64 "%s", cfg->world, b->train_micro_batch_size_per_gpu, b->gradient_accumulation_steps, b->train_batch_size, cfg->batch_follows ? "*" : " ");
    for (int k = 0; k < MEMORY_KINDS; k++) printf(" %10.2f", (double)use.bytes[k] / unit);
    printf(" %10.2f", total / unit);
    if (plan_uses_host(cfg)) printf(" %10.2f", (double)memory_total(&host) / unit);
    if (room > 0 && total <= room) printf("  fits");
    else if (room > 0) printf("  %.2f too much", (total - room) / unit);
    putchar('\n');
}

// The ladder of activation checkpointing for one micro-batch of a configuration: what each policy saves, and what it costs.
static void plan_print_ladder(const Config *cfg, const Model *m, double unit) {
    const int64_t B = cfg->batch.train_micro_batch_size_per_gpu;
    Config *c = (Config *)host_alloc(sizeof *c);
    *c = *cfg;
    ActLayout set = acts_layout(cfg, m, pipeline_n_slots(), B, true);
    printf("activation checkpointing of a micro-batch of %" PRId64 "; recomputed operations as a share of the update's own, traffic once more in memory\n%22s %10s %10s %10s %10s %10s\n",
           B, "policy", "activat.", "saved", "on host", "operations", "traffic");
    for (int policy = 0; policy <= RECOMPUTE_POLICIES; policy++) {
        char name[64];
        ActLayout l = set;
        if (policy < RECOMPUTE_POLICIES) {
            c->activation_checkpointing = {};
            c->activation_checkpointing.policy = (RecomputePolicy)policy;
            l = acts_layout(c, m, pipeline_n_slots(), B, true);
        } else if (set.n_segments == m->L && !set.cpu_checkpointing) continue;
        ActCost cost = acts_cost(&l);
        bool chosen = policy == RECOMPUTE_POLICIES || (l.policy == set.policy && l.n_segments == set.n_segments && l.cpu_checkpointing == set.cpu_checkpointing);
        if (l.n_segments == m->L) snprintf(name, sizeof name, "%s", recompute_names[l.policy]);
        else snprintf(name, sizeof name, "%s, %d segments", recompute_names[l.policy], l.n_segments);
        printf("%22s %10.2f %10.2f %10.2f %8.1f %% %10.2f%s\n", name, (double)cost.bytes / unit, (double)cost.saved_bytes / unit, (double)cost.host_bytes / unit, 100 * cost.flops_share,
               (double)cost.traffic_bytes / unit, chosen ? "  <- this one" : "");
    }
    free(c);
}

// Prints a row for each number of ranks, from `first` on; returns the exit code.
static int plan_print(Config *first) {
    const double gib = 1024.0 * 1024 * 1024, mib = 1024.0 * 1024;
    bool refused = false, follows = false;
    for (Config *c = first; c; c = c->next_world) {
        refused |= c->refused, follows |= c->batch_follows;
        if (!c->refused) resolve_model(c);
    }
    if (message_rank > 0) return refused ? EXIT_CONFIG : EXIT_OK;
    DeviceInfo device;
    bool present = first->device_memory == 0 && device_probe(0, &device);
    double room = first->device_memory > 0 ? first->device_memory * gib : present ? (double)device.memory_bytes : 0;
    room = fmax(0, room - (double)PLAN_OTHERS_BYTES);
    const ModelConfig *c = &first->model;
    Model m;
    model_init(&m, c, model_whole, first->dtype, first->run.logits_bytes, first->run.gelu_apart, NULL);
    GridAxes one = {1, 1, 1, 1};
    MemoryUse largest = plan_memory(first, &m, grid_make(0, one), true, first->batch.train_micro_batch_size_per_gpu, true, NULL);
    double unit = memory_total(&largest) >= 1e9 ? gib : mib;
    printf("%s: n_layer %" PRId64 ", n_head %" PRId64 ", n_embd %" PRId64 ", n_inner %" PRId64 ", vocab_size %" PRId64 ", %" PRId64 " parameters; %s, %s, ZeRO stage %" PRId64 ", %" PRId64 " tokens a sample\n",
           m.arch->name, c->n_layer, c->n_head, c->n_embd, c->n_inner, c->vocab_size, table_param_count(&m.table), dtype_name(first->dtype), optimizer_rules[first->optimizer.type].name, first->zero.stage, first->run.seq_len);
    if (present) printf("device: %s, %.1f GiB\n", device.name, (double)device.memory_bytes / gib);
    if (room > 0 && PLAN_OTHERS_BYTES > 0) printf("%.1f GiB of the device are left to its context and libraries\n", (double)PLAN_OTHERS_BYTES / gib);
    printf("%s of memory a rank\n%7s %6s %6s %7s ", unit == gib ? "GiB" : "MiB", "ranks", "micro", "accum", "batch");
    for (int k = 0; k < MEMORY_KINDS; k++) printf(" %10.10s", k == MEMORY_OPTIMIZER_STATES ? "states" : k == MEMORY_ACTIVATIONS ? "activat." : memory_names[k]);
    printf(" %10s", "total");
    if (plan_uses_host(first)) printf(" %10s", "host");
    if (room > 0) printf("  of %.2f", room / unit);
    putchar('\n');
    for (Config *w = first; w; w = w->next_world)
        if (w->refused) printf("%7" PRId64 " refused: see above\n", w->world);
        else plan_print_row(w, &m, unit, room);
    if (follows) printf("* train_batch_size cannot be had with this micro-batch on so many ranks: micro-batch and accumulation are kept, and it follows\n");
    for (Config *w = first; w; w = w->next_world)
        if (!w->refused && (w == first || w->batch.train_micro_batch_size_per_gpu != first->batch.train_micro_batch_size_per_gpu)) plan_print_ladder(w, &m, unit);
    model_free(&m);
    fflush(stdout);
    return refused ? EXIT_CONFIG : EXIT_OK;
}
