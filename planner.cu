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

// Host memory that the ranks of a host take together, if each takes so much.
static double plan_host_together(const Config *cfg, double each) { return each * (double)min_i64(cfg->world, PLAN_HOST_RANKS); }

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
    SplitRule rule[SPLIT_RULES];
    config_split_rules(cfg, rule);
    for (int i = 0; i < SPLIT_RULES; i++)
        if (rule[i].size % rule[i].degree != 0)
            die_alike(EXIT_CONFIG, "%s = %" PRId64 ": %s the model's %" PRId64 " %s; choose a divisor", rule[i].key, rule[i].value, rule[i].verb, rule[i].size, rule[i].what);
    const ParallelConfig *p = &cfg->parallel;
    if (m->n_layer < p->pipeline * p->virtual_pipeline)
        die_alike(EXIT_CONFIG, "pipeline_model_parallel_size = %" PRId64 ": x %" PRId64 " chunk%s is more than the model's %" PRId64 " layers; lower it", p->pipeline, p->virtual_pipeline, p->virtual_pipeline == 1 ? "" : "s", m->n_layer);
    if (cfg->batch.vocabulary_size && cfg->batch.vocabulary_size != m->vocab_size)
        die_alike(EXIT_CONFIG, "vocabulary_size = %" PRId64 ": the model's vocabulary has %" PRId64 " tokens; remove the key or make them equal", cfg->batch.vocabulary_size, m->vocab_size);
}

// Host memory for saves in the background: a copy, in fp32, of what the rank owns of masters and states.
static int64_t plan_copy_bytes(const Config *cfg, const Model *m, const ZeroLayout *l) {
    int64_t numel = 0;
    for (int u = 0; u < m->table.n_units && cfg->checkpoint.decoupled && l->with_gradients; u++) numel += l->unit[u].shard_numel;
    return numel * 4 * (1 + l->n_states);
}

// What a chunk takes for a micro-batch, in floating-point operations of a sample. The embedding takes none that count; logits and losses
// are made in the head's backward, with the gradients of its weights.
static ChunkCost plan_chunk_cost(const Model *m, const ActLayout *chunk) {
    const double C = (double)m->C, linear = 2 * C * (4 * C + 2 * (double)m->F), attention = 4 * attention_seen(m, chunk->T) * C, blocks = acts_n_blocks(chunk);
    ChunkCost cost = {blocks * (linear + attention), blocks * (linear + 2 * attention) + acts_flops_per_token(chunk), blocks * linear};
    if (acts_has_head(chunk)) cost.backward += 6 * C * (double)m->V;
    return cost;
}

// First units of n_chunks chunks of the model, and the number of units; to be freed. Chunks are even in parameters, or in blocks.
static int *plan_cut(const Config *cfg, const Model *whole, int n_chunks) {
    const ParamTable *table = &whole->table;
    int64_t *weight = (int64_t *)host_alloc(sizeof(int64_t) * (size_t)table->n_units);
    for (int i = 0; i < table->n_rows; i++) weight[table->row[i].unit] += param_numel(&table->row[i]); // a tied table is held twice
    for (int u = 0; u < table->n_units && cfg->parallel.pipeline_partition == PARTITION_UNIFORM; u++) weight[u] = table->unit[u].kind == UNIT_BLOCK;
    int *first = (int *)host_alloc(sizeof(int) * (size_t)(n_chunks + 1));
    pipeline_cut(weight, table->n_units, n_chunks, first);
    free(weight);
    return first;
}

// The program of a rank's stage, and which units its chunks have. Returns the ideal bubble. cfg is resolved; to be freed by pipeline_free.
static double plan_pipeline(const Config *cfg, const ModelConfig *sizes, ProcessGrid grid, Pipeline *pipe) {
    const ParallelConfig *p = &cfg->parallel;
    int n_chunks = pipeline_n_chunks(p->pipeline_schedule, grid.size.pp, (int)p->virtual_pipeline), all = grid.size.pp * n_chunks;
    Model whole;
    model_init(&whole, sizes, model_whole, cfg->dtype, cfg->run.logits_bytes, cfg->run.gelu_apart, NULL);
    int *first = plan_cut(cfg, &whole, all);
    ChunkCost *cost = (ChunkCost *)host_alloc(sizeof(ChunkCost) * (size_t)all);
    ActLayout l = acts_layout(cfg, &whole, 1, 1, true);
    for (int c = 0; c < all; c++) {
        l.first = first[c];
        l.last = first[c + 1] - 1;
        acts_cut_segments(&l, &cfg->activation_checkpointing);
        cost[c] = plan_chunk_cost(&whole, &l);
    }
    double bubble = pipeline_init(pipe, p->pipeline_schedule, grid.size.pp, n_chunks, grid.coord.pp, (int)cfg->batch.gradient_accumulation_steps, first, cost);
    model_free(&whole);
    free(first);
    free(cost);
    return bubble;
}

// The stage of each unit, to be freed.
static int *plan_unit_stages(const Pipeline *p) {
    int *stage = (int *)host_alloc(sizeof(int) * (size_t)p->first[pipeline_last(p) + 1]);
    for (int whole = 0; whole <= pipeline_last(p); whole++)
        for (int u = p->first[whole]; u < p->first[whole + 1]; u++) stage[u] = pipeline_stage_of(p, whole);
    return stage;
}

// The part of the model that a rank of the grid holds. stage: see plan_unit_stages.
static ModelPart plan_part(ProcessGrid grid, const int *stage) { return {grid.size.tp, grid.coord.tp, grid.coord.pp, stage}; }

// In how many pieces rows travel between the ranks of tensor parallelism.
static int plan_pieces(const Config *cfg, GridAxes size) { return size.tp == 1 ? 1 : (int)cfg->run.tensor_parallel_pieces; }

// The layouts of the activations of a stage's chunks. To evaluate or to sample, one micro-batch at a time is enough.
static void plan_acts(const Config *cfg, const Model *m, const Pipeline *p, int64_t B, bool with_backward, ActLayout *layout) {
    int longest = 0;
    for (int c = 0; c < p->n_chunks; c++) {
        ActLayout *l = &layout[c];
        int whole = pipeline_whole(p, p->stage, c);
        *l = acts_layout(cfg, m, with_backward ? p->n_slots[c] : 1, B, with_backward);
        l->first = p->first[whole];
        l->last = p->first[whole + 1] - 1;
        l->n_pending = with_backward ? p->n_pending[c] : 0;
        l->taken_over = c > 0 && pipeline_hands_over(p, c - 1);
        l->borrows = c > 0;
        acts_cut_segments(l, &cfg->activation_checkpointing);
        longest = (int)max_i64(longest, l->longest);
    }
    for (int c = 0; c < p->n_chunks; c++) layout[c].longest = longest;
}

// Where a rank has weights, gradients and states. one_host: all ranks are on one, and reach each other's memory; pipe: the program of its stage.
static ZeroLayout plan_zero(const Config *cfg, const Model *m, ProcessGrid grid, const Pipeline *pipe, bool one_host, bool with_backward) {
    ZeroOptions options = zero_options(&cfg->zero);
    options.direct_exchange = options.direct_exchange && one_host;
    options.split_backward = pipe->split_w;
    return zero_layout(m, options, grid.zero_size, grid.zero_rank, optimizer_n_states(&cfg->optimizer), with_backward);
}

// Scratch of the kernels on the compute stream.
static int64_t plan_scratch_bytes(const Model *m, int64_t B, int64_t T) { return scratch_bytes(B * T / m->sp.size, m->C, m->F / m->tp.size, B, T, block_heads(m), m->C / m->NH); }

// What device_malloc will have given to rank grid.rank at its peak. cfg and m are resolved; B: samples of a micro-batch;
// with_backward: to train. *host, unless null: what the rank will have of host memory for what lies there.
static MemoryUse plan_memory_of(const Config *cfg, const Model *m, ProcessGrid grid, const Pipeline *pipe, const ZeroLayout *zero, int64_t B, bool with_backward, MemoryUse *host) {
    int64_t T = cfg->run.seq_len;
    ActLayout *acts = (ActLayout *)host_alloc(sizeof(ActLayout) * (size_t)pipe->n_chunks);
    plan_acts(cfg, m, pipe, B, with_backward, acts);
    MemoryUse use = zero->bytes;
    if (host) *host = zero->host_bytes, host->bytes[MEMORY_BUFFERS] += plan_copy_bytes(cfg, m, zero);
    for (int c = 0; c < pipe->n_chunks; c++) {
        if (host) host->bytes[MEMORY_ACTIVATIONS] += acts_host_bytes(&acts[c]);
        use.bytes[MEMORY_ACTIVATIONS] += acts_bytes(&acts[c]);
    }
    free(acts);
    use.bytes[MEMORY_SCRATCH] = plan_scratch_bytes(m, B, T) + optimizer_bytes() + (int64_t)sizeof(double); // the last: Trainer.eval_sum
    if (cfg->run.replica_check_every > 0) use.bytes[MEMORY_SCRATCH] += replicas_bytes(m, grid.zero_size);
    return use;
}

static MemoryUse plan_memory(const Config *cfg, const Model *m, ProcessGrid grid, const Pipeline *pipe, bool one_host, int64_t B, bool with_backward, MemoryUse *host) {
    ZeroLayout zero = plan_zero(cfg, m, grid, pipe, one_host, with_backward);
    MemoryUse use = plan_memory_of(cfg, m, grid, pipe, &zero, B, with_backward, host);
    zero_layout_free(&zero);
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
// A configuration taken apart: what the ranks of each stage of the pipeline hold and do, though none of them is here

typedef struct {
    const Config *cfg;     // resolved
    GridAxes size;
    int n_chunks;          // on each stage
    int *stage;            // by unit
    Model *model;          // (size.pp) as a rank of each stage holds it
    Pipeline *pipe;        // (size.pp) their programs, of as many micro-batches as it takes to be in full flow: more repeat what is there
    ZeroLayout *zero;      // (size.pp) see plan_shard
} Plan;

// Micro-batches of an update that a plan's programs have.
static int plan_micro_batches(const Config *cfg) {
    int64_t n = cfg->batch.gradient_accumulation_steps;
    return (int)(cfg->parallel.pipeline_schedule == PIPELINE_GPIPE ? n : min_i64(n, 4 * cfg->parallel.pipeline));
}

// Where a chunk of the model is, counted from its beginning.
static int plan_stage_of(const Plan *p, int whole) { return pipeline_stage_of(&p->pipe[0], whole); }

// All ranks of tensor and of data parallelism hold as much as the first.
static ProcessGrid plan_stage_grid(const Plan *p, int stage) {
    GridAxes first = {stage, 0, 0, 0};
    return grid_make(grid_rank(first, p->size), p->size);
}

// Are the ranks that share weights on one host?
static bool plan_one_host(const Plan *p) { return p->size.tp * p->size.sp * p->size.dp <= PLAN_HOST_RANKS; }

static void plan_unshard(Plan *p) {
    for (int s = 0; s < p->size.pp && p->zero; s++) zero_layout_free(&p->zero[s]);
    free(p->zero);
}

// Lays out what the stages' ranks hold, as the configuration says now.
static void plan_shard(Plan *p) {
    plan_unshard(p);
    p->zero = (ZeroLayout *)host_alloc(sizeof(ZeroLayout) * (size_t)p->size.pp);
    for (int s = 0; s < p->size.pp; s++) p->zero[s] = plan_zero(p->cfg, &p->model[s], plan_stage_grid(p, s), &p->pipe[s], plan_one_host(p), true);
}

static void plan_open(Plan *p, const Config *cfg) {
    const ParallelConfig *c = &cfg->parallel;
    memset(p, 0, sizeof *p);
    p->cfg = cfg;
    p->size = {(int)c->pipeline, (int)c->data, (int)c->sequence, (int)c->tensor};
    p->n_chunks = pipeline_n_chunks(c->pipeline_schedule, p->size.pp, (int)c->virtual_pipeline);
    const int chunks = p->n_chunks * p->size.pp;
    Model whole;
    model_init(&whole, &cfg->model, model_whole, cfg->dtype, cfg->run.logits_bytes, cfg->run.gelu_apart, NULL);
    int *first = plan_cut(cfg, &whole, chunks);
    model_free(&whole);
    p->pipe = (Pipeline *)host_alloc(sizeof(Pipeline) * (size_t)p->size.pp);
    for (int s = 0; s < p->size.pp; s++) {
        pipeline_make(&p->pipe[s], c->pipeline_schedule, p->size.pp, p->n_chunks, s, plan_micro_batches(cfg));
        memcpy(p->pipe[s].first, first, sizeof(int) * (size_t)(chunks + 1));
    }
    free(first);
    p->stage = plan_unit_stages(&p->pipe[0]);
    p->model = (Model *)host_alloc(sizeof(Model) * (size_t)p->size.pp);
    for (int s = 0; s < p->size.pp; s++) {
        model_init(&p->model[s], &cfg->model, plan_part(plan_stage_grid(p, s), p->stage), cfg->dtype, cfg->run.logits_bytes, cfg->run.gelu_apart, NULL);
        p->model[s].sp.size = p->size.sp;
        p->model[s].overlap.pieces = plan_pieces(cfg, p->size);
    }
    plan_shard(p);
}

static void plan_close(Plan *p) {
    plan_unshard(p);
    for (int s = 0; s < p->size.pp; s++) {
        model_free(&p->model[s]);
        pipeline_free(&p->pipe[s]);
    }
    free(p->stage);
    free(p->model);
    free(p->pipe);
}

// The layouts of its chunks' activations; to be freed.
static ActLayout *plan_stage_acts(const Plan *p, int stage) {
    ActLayout *layout = (ActLayout *)host_alloc(sizeof(ActLayout) * (size_t)p->n_chunks);
    plan_acts(p->cfg, &p->model[stage], &p->pipe[stage], p->cfg->batch.train_micro_batch_size_per_gpu, true, layout);
    return layout;
}

static MemoryUse plan_stage_memory(const Plan *p, int stage, MemoryUse *host) {
    return plan_memory_of(p->cfg, &p->model[stage], plan_stage_grid(p, stage), &p->pipe[stage], &p->zero[stage], p->cfg->batch.train_micro_batch_size_per_gpu, true, host);
}

// A stage's activations for a micro-batch under a configuration of checkpointing: what its chunks save and cost together. flops_share: of an even share of the
// model's operations.
typedef struct {
    ActCost cost;
    int blocks, segments;
    RecomputePolicy policy;
    bool cpu_checkpointing;
} StageActs;

static StageActs plan_stage_acts_under(const Plan *p, int stage, const ActivationCheckpointingConfig *checkpointing) {
    Config *c = (Config *)host_alloc(sizeof *c);
    Plan other = *p;
    *c = *p->cfg;
    c->activation_checkpointing = *checkpointing;
    other.cfg = c;
    ActLayout *layout = plan_stage_acts(&other, stage);
    StageActs sum;
    memset(&sum, 0, sizeof sum);
    sum.policy = layout->policy;
    sum.cpu_checkpointing = layout->cpu_checkpointing;
    for (int k = 0; k < p->n_chunks; k++) {
        const ActCost cost = acts_cost(&layout[k]);
        sum.cost.bytes += cost.bytes;
        sum.cost.saved_bytes += cost.saved_bytes;
        sum.cost.host_bytes += cost.host_bytes;
        sum.cost.traffic_bytes += cost.traffic_bytes;
        sum.cost.flops_share += cost.flops_share * p->size.pp;
        sum.blocks += acts_n_blocks(&layout[k]);
        sum.segments += layout[k].n_segments;
    }
    free(layout);
    free(c);
    return sum;
}

// The same under a policy alone, without segments.
static StageActs plan_stage_policy(const Plan *p, int stage, RecomputePolicy policy) {
    ActivationCheckpointingConfig alone = {};
    alone.policy = policy;
    return plan_stage_acts_under(p, stage, &alone);
}

// The stage whose ranks need most of the device, what they need of it and, unless null, of host memory.
static int plan_fullest(const Plan *p, MemoryUse *most, MemoryUse *host) {
    int fullest = 0;
    *most = plan_stage_memory(p, 0, host);
    for (int s = 1; s < p->size.pp; s++) {
        MemoryUse there, use = plan_stage_memory(p, s, &there);
        if (memory_total(&use) <= memory_total(most)) continue;
        fullest = s;
        *most = use;
        if (host) *host = there;
    }
    return fullest;
}
