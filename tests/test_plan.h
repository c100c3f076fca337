// test_plan.h - tests of plan_time.cu and plan_report.cu: bytes against the collectives of a run, memory and time against closed formulas and
// measurements, and what is proposed against the planner itself.
#pragma once

// A resolved configuration of overrides, separated by '|', for so many ranks.
static Config *plan_config(Test *t, const char *overrides, int64_t world) {
    Parsed p = {(Config *)host_alloc(sizeof(Config)), {}};
    char *copy = strdup(overrides), *save = NULL;
    const char *list[64];
    int n = 0;
    for (char *one = strtok_r(copy, "| ", &save); one && n < 64; one = strtok_r(NULL, "| ", &save)) list[n++] = one;
    config_parse(NULL, 0, "", list, n, world, false, p.c, &p.report);
    for (int i = 0; i < p.report.count; i++)
        expect_true(t, p.report.message[i].kind != CONFIG_PROBLEM && p.report.message[i].kind != CONFIG_UNBUILT, "%s: %s", overrides, p.report.message[i].text);
    config_report_free(&p.report);
    free(copy);
    resolve_model(p.c);
    return p.c;
}

// ---------------------------------------------------------------------------------------------------------------
// Bytes

// What this rank sent in the collectives that were traced, by what their groups are there for.
static void sent_in_trace(const GridGroups *g, double sent[MOVE_KINDS]) {
    const struct { const Group *group; MoveKind kind; } row[] = {{&g->reduce, MOVE_GRADIENTS}, {&g->gather, MOVE_WEIGHTS}, {&g->tp, MOVE_TENSOR}, {&g->tp_grads, MOVE_TENSOR_GRADIENTS}, {&g->sp, MOVE_SEQUENCE}, {&g->twin, MOVE_TIED}};
    memset(sent, 0, sizeof(double) * MOVE_KINDS);
    for (int i = 0; i < trace.n; i++) {
        const TraceRow *r = &trace.row[i];
        const double bytes = (double)(r->n * dtype_bytes(r->type)) * share_sent(r->group.size) * (r->kind == TRACE_ALL_REDUCE ? 2 : 1);
        if (r->kind == TRACE_SEND) sent[MOVE_STAGES] += (double)(r->n * dtype_bytes(r->type));
        for (int k = 0; k < 6 && r->kind != TRACE_SEND; k++) if (row[k].group->size > 1 && row[k].group->channel == r->group.channel) sent[row[k].kind] += bytes;
    }
}

// One update of a run on a grid of all ranks, its second, beside what the planner says of it.
static void expect_moves_as_planned(Test *t, const char *what, Config *c, GridAxes size) {
    ProcessGrid grid = grid_make(test_world.rank, size);
    c->world = grid.world;
    c->parallel.data = size.dp, c->parallel.tensor = size.tp, c->parallel.sequence = size.sp, c->parallel.pipeline = size.pp;
    c->batch.train_micro_batch_size_per_gpu = 2;
    c->batch.train_batch_size = 2 * c->batch.gradient_accumulation_steps * size.dp;
    Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
    trainer_init_core(trainer, c, grid, true, 2);
    trainer->metrics.log_fd = -1;
    dataloader_open(&trainer->train, tiny_tokens, 131, c->run.seq_len, c->batch.train_batch_size, false, false, 1, "data.train");
    trainer->has_train = true;
    zero_init_weights(&trainer->zero, (uint64_t)c->run.seed);
    train_step(trainer);
    trace_begin(false);
    train_step(trainer);
    trace_end();
    double sent[MOVE_KINDS];
    sent_in_trace(&trainer->groups, sent);
    Plan p;
    plan_open(&p, c);
    PlanMoves m = plan_moves(&p, grid.coord.pp);
    plan_close(&p);
    for (int k = 0; k < MOVE_KINDS; k++) {
        char text[200];
        snprintf(text, sizeof text, "%s: %s, %s", what, move_names[k].axis, move_names[k].what);
        bool of_some = grid.zero_size > 1 && (k == MOVE_TENSOR_GRADIENTS || k == MOVE_TIED), in_turns = size.pp > 1 && c->zero.stage == 3 && k == MOVE_WEIGHTS;
        if (of_some || in_turns) expect_true(t, sent[k] <= m.bytes[k], "%s: %.0f bytes sent, at most %.0f planned", text, sent[k], m.bytes[k]); // not every rank's shard holds such; some blocks are there still
        else expect_near(t, text, m.bytes[k], sent[k], 1e-9 * sent[k]); // shares of blocks are no whole numbers
    }
    trainer_free(trainer);
    free(trainer);
}

static void test_moves(Test *t) {
    for (int variant = 0; variant < 64; variant++) {
        char what[100];
        Config *c = parallel_config(1 + variant / 4 % 2);
        config_set_dtype(c, DTYPE_BF16);
        c->model.n_layer = 5;
        c->zero.stage = variant % 4;
        c->zero.reduce_scatter = variant / 8 % 2 == 0;
        c->zero.communication_data_type = variant / 16 % 2 ? DTYPE_FP16 : DTYPE_FP32;
        if (variant / 32) c->zero.max_live_parameters = 45000; // three blocks
        snprintf(what, sizeof what, "stage %d, %d micro-batches, reduce_scatter %d, %s, %s", variant % 4, 1 + variant / 4 % 2, c->zero.reduce_scatter, dtype_name(c->zero.communication_data_type), variant / 32 ? "blocks take turns" : "room for all");
        GridAxes size = {1, test_world.world, 1, 1};
        expect_moves_as_planned(t, what, c, size);
        free(c);
    }
}

// Tensor and sequence parallelism with every policy, and data parallelism where there are ranks for it.
static void test_split_planned(Test *t) {
    if (one_rank_only(t)) return;
    for (ProcessGrid g = {}; next_grid(&g);)
        for (int policy = 0; policy <= RECOMPUTE_POLICIES; policy++) {
            char what[96];
            Config *c = tensor_config(2);
            config_set_dtype(c, DTYPE_BF16);
            c->zero.stage = policy % 4;
            c->zero.reduce_scatter = true;
            c->activation_checkpointing.policy = (RecomputePolicy)min_i64(policy, RECOMPUTE_BLOCK);
            if (policy == RECOMPUTE_GELU) c->run.gelu_apart = true;
            c->run.tensor_parallel_pieces = legal_pieces(c, &g, 1 + policy % 2);
            if (policy == RECOMPUTE_POLICIES) c->activation_checkpointing.number_checkpoints = 2;
            expect_moves_as_planned(t, grid_text(what, &g, recompute_names[c->activation_checkpointing.policy]), c, g.size);
            free(c);
        }
}

// Stages of a pipeline, by all schedules, and data parallelism: bytes, and memory as it is allocated.
static void test_stages_planned(Test *t) {
    const int world = test_world.world;
    if (world == 1) { test_skip(t, "one rank is one stage"); return; }
    for (int pp = 2; pp <= world; pp++)
        for (int variant = 0; variant < 20 && world % pp == 0; variant++) {
            char what[100];
            Config *c = parallel_config(2 * pp);
            GridAxes size = {pp, world / pp, 1, 1};
            config_set_dtype(c, DTYPE_BF16);
            c->model.n_layer = 2 * pp + 1;
            c->zero.reduce_scatter = true;
            c->zero.stage = variant / 5;
            c->parallel.pipeline_schedule = (PipelineSchedule)(variant % 5);
            c->parallel.virtual_pipeline = c->parallel.pipeline_schedule == PIPELINE_INTERLEAVED ? 2 : 1;
            if (variant / 5 % 2) c->activation_checkpointing.policy = RECOMPUTE_BLOCK;
            snprintf(what, sizeof what, "pipeline %d x data %d, %s, stage %d", size.pp, size.dp, pipeline_names[variant % 5], variant / 5);
            expect_moves_as_planned(t, what, c, size);
            expect_as_planned(t, c, grid_make(test_world.rank, size), true);
            free(c);
        }
}

// What the ladder of activation checkpointing says of this rank's stage, and which stage it names, beside what a run allocates. More micro-batches than a plan's programs have.
static void test_ladder(Test *t) {
    const int world = test_world.world;
    if (world == 1) { test_skip(t, "one rank is one stage"); return; }
    for (int pp = 2; pp <= world; pp++)
        for (int variant = 0; variant < 5 * (RECOMPUTE_POLICIES + 1) && world % pp == 0; variant++) {
            const int schedule = variant / (RECOMPUTE_POLICIES + 1), policy = variant % (RECOMPUTE_POLICIES + 1);
            static int64_t everything; // what is allocated if all is kept, of the schedule before whose ladder this is
            int64_t activations = 0;
            Config *c = parallel_config(6 * pp);
            GridAxes size = {pp, world / pp, 1, 1};
            ProcessGrid grid = grid_make(test_world.rank, size);
            config_set_dtype(c, DTYPE_BF16);
            c->model.n_layer = 3 * pp + 1;
            c->run.gelu_apart = true;
            c->world = world;
            c->parallel.data = size.dp, c->parallel.tensor = c->parallel.sequence = 1, c->parallel.pipeline = pp;
            c->parallel.pipeline_schedule = (PipelineSchedule)schedule;
            c->parallel.virtual_pipeline = schedule == PIPELINE_INTERLEAVED ? 2 : 1;
            c->activation_checkpointing.policy = (RecomputePolicy)min_i64(policy, RECOMPUTE_BLOCK);
            if (policy == RECOMPUTE_POLICIES) c->activation_checkpointing.activation_checkpoint_interval = 2;
            Trainer *trainer = (Trainer *)host_alloc(sizeof(Trainer));
            trainer_init_core(trainer, c, grid, true, c->batch.train_micro_batch_size_per_gpu);
            for (int k = 0; k < trainer->pipe.n_chunks; k++) activations += trainer->acts[k].allocated;
            double used = (double)(memory_total(&trainer->zero.allocated) + activations), most = used;
            comm_host_all_reduce(&most, 1, COMM_MAX);
            if (policy == RECOMPUTE_NONE) everything = activations;
            trainer->metrics.log_fd = -1;
            trainer_free(trainer);
            free(trainer);
            Plan p;
            MemoryUse use;
            plan_open(&p, c);
            const StageActs a = policy == RECOMPUTE_POLICIES ? plan_stage_acts_under(&p, grid.coord.pp, &c->activation_checkpointing) : plan_stage_policy(&p, grid.coord.pp, (RecomputePolicy)policy);
            const int fullest = plan_fullest(&p, &use, NULL);
            expect_equal_i64(t, "activations", a.cost.bytes, activations);
            expect_equal_i64(t, "saved", a.cost.saved_bytes, everything - activations);
            if (grid.coord.pp == fullest) expect_equal_i64(t, "the fullest stage", (int64_t)used, (int64_t)most);
            plan_close(&p);
            free(c);
        }
}

// ---------------------------------------------------------------------------------------------------------------
// Memory: closed formulas for models that nobody allocates here

#define TEN_BILLION "model.n_layer=48|model.n_embd=4096|model.n_head=32|model.n_positions=2048|model.vocab_size=50257|bf16.enabled=true|train_micro_batch_size_per_gpu=1"
#define THIRTY_BILLION "model.n_layer=48|model.n_embd=7168|model.n_head=56|model.n_positions=2048|model.vocab_size=50257|bf16.enabled=true|train_micro_batch_size_per_gpu=1"
#define SETTINGS_GUIDE "model.n_layer=96|model.n_embd=12288|model.n_head=96|model.n_positions=2048|model.vocab_size=50257|bf16.enabled=true|tensor_model_parallel_size=8|pipeline_model_parallel_size=4|train_batch_size=2048|gradient_accumulation_steps=16"

static Plan plan_of(Test *t, const char *overrides, int64_t world, Config **c) {
    Plan p;
    *c = plan_config(t, overrides, world);
    plan_open(&p, *c);
    return p;
}

static void plan_end(Plan *p, Config *c) {
    plan_close(p);
    free(c);
}

// Weights, masters, gradients and states on 8 ranks: of P parameters 2, 2, 4 and 8 bytes, divided as the stage says.
static void test_plan_eight(Test *t) {
    for (int size = 0; size < 2; size++)
        for (int stage = 0; stage < 4; stage++) {
            char overrides[400];
            Config *c;
            snprintf(overrides, sizeof overrides, "%s|zero_optimization.stage=%d", size ? THIRTY_BILLION : TEN_BILLION, stage);
            Plan p = plan_of(t, overrides, 8, &c);
            MemoryUse use = plan_stage_memory(&p, 0, NULL);
            const double C = (double)c->model.n_embd, L = 48, P = L * (12 * C * C + 13 * C) + 2 * C + (50257 + 2048) * C;
            const struct { MemoryKind kind; int bytes, from_stage; } row[] = {{MEMORY_WEIGHTS, 2, 3}, {MEMORY_MASTERS, 2, 1}, {MEMORY_GRADIENTS, 4, 2}, {MEMORY_OPTIMIZER_STATES, 8, 1}};
            for (int i = 0; i < 4; i++) {
                double want = row[i].bytes * P / (stage >= row[i].from_stage ? 8 : 1);
                expect_near(t, memory_names[row[i].kind], (double)use.bytes[row[i].kind], want, 1e-3 * want); // padding
            }
            plan_end(&p, c);
        }
}

// 175 billion on 64 ranks as tensor 8 x pipeline 4 x data 2: what a stage holds of blocks, split by 8, and the ends of the model beside them.
static void test_plan_settings_guide(Test *t) {
    for (int stage = 0; stage < 4; stage++) {
        char overrides[400];
        Config *c;
        snprintf(overrides, sizeof overrides, SETTINGS_GUIDE "|zero_optimization.stage=%d", stage);
        Plan p = plan_of(t, overrides, 64, &c);
        const double C = 12288, matrices = 12 * C * C / 8, vectors = (3 * C + 4 * C) / 8 + 6 * C, table = 51200 * C / 8; // 50,257 tokens, padded to a multiple of 8 x 128
        int blocks = 0;
        expect_true(t, p.size.tp == 8 && p.size.pp == 4 && p.size.dp == 2 && p.size.sp == 1, "tensor %d, pipeline %d, data %d, sequence %d", p.size.tp, p.size.pp, p.size.dp, p.size.sp);
        for (int s = 0; s < 4; s++) {
            MemoryUse use = plan_stage_memory(&p, s, NULL);
            int held = 0;
            for (int u = 1; u <= 96; u++) held += p.stage[u] == s;
            blocks += held;
            double numel = held * (matrices + vectors) + (s == 0 ? table + 2048 * C : s == 3 ? table + 2 * C : 0);
            if (s == 3) numel += 2046 * C; // as long as the first stage's unit, which holds the same table
            expect_near(t, "states of a stage", (double)use.bytes[MEMORY_OPTIMIZER_STATES], 8 * numel / (stage >= 1 ? 2 : 1), 1e-3 * 8 * numel);
            expect_near(t, "weights of a stage", (double)use.bytes[MEMORY_WEIGHTS], 2 * numel / (stage >= 3 ? 2 : 1), 1e-3 * 2 * numel);
            expect_true(t, held >= 23 && held <= 25, "stage %d has %d blocks", s, held);
        }
        expect_equal_i64(t, "blocks", blocks, 96);
        plan_end(&p, c);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Time

// Updates that were measured on H200 GPUs (docs/benchmarks.md, docs/memory.md, docs/offload.md), in ms.
static void test_plan_measured(Test *t) {
#define LARGE "model.preset=gpt2-1558M|bf16.enabled=true|train_micro_batch_size_per_gpu=16"
#define SMALL "model.preset=gpt2-124M|bf16.enabled=true"
#define OFFLOADED "|train_batch_size=64|zero_optimization.stage=3|zero_optimization.offload_"
#define THIRD "model.preset=gpt3-6.7B|bf16.enabled=true|run.seq_len=1024|train_batch_size=32"
    static const struct { const char *overrides; int world; double ms; } row[] = {
        {SMALL "|train_micro_batch_size_per_gpu=64", 1, 101.7}, {SMALL "|train_micro_batch_size_per_gpu=8", 1, 15.43}, {SMALL "|train_micro_batch_size_per_gpu=4", 1, 8.80}, {SMALL "|train_micro_batch_size_per_gpu=1", 1, 4.395},
        {"model.preset=gpt2-355M|bf16.enabled=true|train_micro_batch_size_per_gpu=32", 1, 147.5}, {"model.preset=gpt2-774M|bf16.enabled=true|train_micro_batch_size_per_gpu=16", 1, 158.0},
        {LARGE, 1, 305.1}, {LARGE "|train_batch_size=64", 1, 1170.9},
        {LARGE "|activation_checkpointing.policy=norms", 1, 304.0}, {LARGE "|activation_checkpointing.policy=gelu", 1, 314.0}, {LARGE "|activation_checkpointing.policy=ffn", 1, 336.3},
        {LARGE "|activation_checkpointing.policy=qkv", 1, 358.1}, {LARGE "|activation_checkpointing.policy=block", 1, 368.6}, {LARGE "|activation_checkpointing.policy=block|activation_checkpointing.cpu_checkpointing=true", 1, 370.0},
        {LARGE "|train_batch_size=128|zero_optimization.overlap_comm=true|zero_optimization.stage=1", 2, 1181.3}, {LARGE "|train_batch_size=128|zero_optimization.overlap_comm=true|zero_optimization.stage=2", 2, 1210.4},
        {LARGE "|train_batch_size=128|zero_optimization.overlap_comm=true|zero_optimization.stage=3", 2, 1225.0},
        {LARGE OFFLOADED "optimizer.device=cpu|zero_optimization.offload_optimizer.ratio=0.5", 1, 1301.5}, {LARGE OFFLOADED "optimizer.device=cpu", 1, 1544.1}, {LARGE OFFLOADED "param.device=cpu", 1, 1282.6},
        {LARGE OFFLOADED "param.device=cpu|zero_optimization.offload_optimizer.device=cpu", 1, 1511.9},
        {THIRD "|train_micro_batch_size_per_gpu=16|activation_checkpointing.policy=gelu|zero_optimization.stage=2|data_types.grad_accum_dtype=bf16", 1, 2217.1},
        {THIRD "|train_micro_batch_size_per_gpu=8|zero_optimization.stage=3", 2, 1172.5},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        Config *c;
        Plan p = plan_of(t, row[i].overrides, row[i].world, &c);
        PlanTime time = plan_time(&p);
        expect_near(t, row[i].overrides, 1e3 * time.step, row[i].ms, 0.06 * row[i].ms); // updates of one call scatter by 2 to 4 %
        expect_near(t, "rates agree", time.tokens_per_second * model_flops_per_token(&p.model[0], c->run.seq_len) / (double)c->world, 1e12 * time.tflops, 1e6);
        plan_end(&p, c);
    }
}

// Of the rows that blocks of tensor parallelism exchange, all but one of the pieces travel beside the products, at the price of a hidden byte: 10 messages a
// block, each as long as the residual stream, of which half is sent with two ranks.
static void test_plan_pieces(Test *t) {
    const double rows = 12.0 * 10 * 64 * 1024 * 768 * 2 / 2, price = 1 / RATE_NVLINK - HIDDEN_SECONDS;
    double seconds[5];
    for (int pieces = 1; pieces <= 4; pieces++) {
        char overrides[400];
        Config *c;
        snprintf(overrides, sizeof overrides, SMALL "|train_micro_batch_size_per_gpu=64|tensor_model_parallel_size=2|run.tensor_parallel_pieces=%d", pieces == 3 ? 8 : pieces);
        Plan p = plan_of(t, overrides, 2, &c);
        PlanTime time = plan_time(&p);
        seconds[pieces] = time.exposed[AXIS_TENSOR];
        const double hidden = rows * (1 - 1.0 / (double)c->run.tensor_parallel_pieces);
        expect_near(t, overrides, seconds[1] - seconds[pieces], hidden * price, 1e-9);
        expect_near(t, overrides, time.hidden[AXIS_TENSOR], hidden / RATE_NVLINK, 1e-9);
        plan_end(&p, c);
    }
    expect_true(t, seconds[3] < seconds[4] && seconds[4] < seconds[2] && seconds[2] < seconds[1], "more pieces do not take less: %g, %g, %g, %g s", seconds[1], seconds[2], seconds[4], seconds[3]);
}

// The bubble of even stages is what the schedules' formulas say; more micro-batches than are simulated count as they would.
static void test_plan_bubble(Test *t) {
    static const struct { const char *schedule; int chunks; } row[] = {{"1F1B", 1}, {"GPipe", 1}, {"Interleaved", 2}};
    for (int i = 0; i < 3; i++)
        for (int n = 4; n <= 256; n *= 4) {
            char overrides[600];
            Config *c;
            // A vocabulary of 128 and 64 blocks: the ends weigh next to nothing.
            snprintf(overrides, sizeof overrides, "model.n_layer=64|model.n_embd=1024|model.n_head=16|model.n_positions=1024|model.vocab_size=128|bf16.enabled=true|train_micro_batch_size_per_gpu=8|gradient_accumulation_steps=%d|"
                     "pipeline_model_parallel_size=4|pipeline_schedule=%s", n, row[i].schedule);
            Plan p = plan_of(t, overrides, 4, &c);
            PlanTime time = plan_time(&p);
            double idle = 3.0 / row[i].chunks / n;
            expect_near(t, overrides, time.bubble, idle / (1 + idle), 0.01);
            plan_end(&p, c);
        }
}

// Messages by axis. Those of tensor and sequence parallelism are bytes over a rate, and all exposed; those of data parallelism exposed without overlap_comm; with it what does not
// fit beside the computation, and what the rest slows it by.
static void test_plan_axes(Test *t) {
#define WIDE "model.preset=gpt3-6.7B|bf16.enabled=true|train_micro_batch_size_per_gpu=8"
    static const struct { const char *overrides; int world; Axis axis; double rate; bool overlap; } row[] = {
        {WIDE "|tensor_model_parallel_size=2", 2, AXIS_TENSOR, RATE_NVLINK, false}, {WIDE "|sequence_parallel_size=4", 4, AXIS_SEQUENCE, RATE_NVLINK, false},
        {LARGE "|zero_optimization.stage=1", 8, AXIS_DATA, RATE_NVLINK, false}, {LARGE "|zero_optimization.stage=1", 16, AXIS_DATA, RATE_NETWORK * 8, false},
        {LARGE "|zero_optimization.stage=3|zero_optimization.overlap_comm=true", 8, AXIS_DATA, RATE_NVLINK, true},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        Config *c;
        Plan p = plan_of(t, row[i].overrides, row[i].world, &c);
        const PlanTime time = plan_time(&p);
        const PlanMoves m = plan_moves(&p, 0);
        const MoveKind kind[AXES][2] = {{MOVE_TENSOR, MOVE_TENSOR_GRADIENTS}, {MOVE_SEQUENCE, MOVE_SEQUENCE}, {MOVE_GRADIENTS, MOVE_WEIGHTS}, {MOVE_STAGES, MOVE_TIED}};
        const double bytes = m.bytes[kind[row[i].axis][0]] + (row[i].axis == AXIS_SEQUENCE ? 0 : m.bytes[kind[row[i].axis][1]]), seconds = bytes / fmin(row[i].rate, RATE_NVLINK);
        const double hidden = row[i].overlap ? seconds : 0, exposed = row[i].overlap ? HIDDEN_SECONDS * bytes : seconds;
        expect_near(t, row[i].overrides, time.exposed[row[i].axis], exposed, 1e-9 * exposed);
        expect_near(t, row[i].overrides, time.hidden[row[i].axis], hidden, 1e-9 * seconds);
        plan_end(&p, c);
    }
}

// Messages between stages: as the schedule is simulated with all micro-batches, and within a fifth where a plan simulates some and counts the others by these.
static void test_plan_pipeline_messages(Test *t) {
    for (int schedule = PIPELINE_1F1B; schedule <= PIPELINE_ZB_V; schedule++)
        for (int n = 4; n <= 128; n *= 2) {
            char overrides[600];
            Config *c;
            snprintf(overrides, sizeof overrides, "model.n_layer=64|model.n_embd=1024|model.n_head=16|model.n_positions=1024|model.vocab_size=128|model.tie_word_embeddings=false|bf16.enabled=true|train_micro_batch_size_per_gpu=8|"
                     "gradient_accumulation_steps=%d|pipeline_model_parallel_size=4|pipeline_schedule=%s", n, pipeline_names[schedule]);
            Plan p = plan_of(t, overrides, 4, &c);
            const int chunks = 4 * p.n_chunks;
            ChunkCost *cost = (ChunkCost *)host_alloc(sizeof(ChunkCost) * (size_t)chunks);
            Pipeline all[4];
            double work, ends, message = 0, seconds[2];
            for (int s = 0; s < 4; s++) {
                stage_time(&p, s, cost, &work, &ends);
                pipeline_make(&all[s], (PipelineSchedule)schedule, 4, p.n_chunks, s, n);
            }
            for (int k = 0; k < 2; k++) {
                for (int i = 0; i < chunks && k == 1; i++) message = fmax(message, cost[i].message), cost[i].message = 0;
                seconds[k] = pipeline_simulate(all, cost, pipeline_channels).time;
            }
            expect_near(t, "a message", message, 8 * 1024 * 1024 * 2 / RATE_NVLINK, 1e-12);
            const PlanTime time = plan_time(&p);
            const double waits = seconds[0] - seconds[1];
            expect_near(t, overrides, time.exposed[AXIS_PIPELINE], waits, n <= plan_micro_batches(c) ? 1e-9 * waits : 0.2 * waits);
            for (int s = 0; s < 4; s++) pipeline_free(&all[s]);
            free(cost);
            plan_end(&p, c);
        }
}

// A search is told of no step that is not faster than its limit, and of the others all.
static void test_plan_limit(Test *t) {
    static const char *const overrides[] = {LARGE, TEN_BILLION "|pipeline_model_parallel_size=4|gradient_accumulation_steps=4", TEN_BILLION "|pipeline_model_parallel_size=8|gradient_accumulation_steps=64|pipeline_schedule=ZB-V"};
    for (int i = 0; i < 3; i++) {
        Config *c;
        Plan p = plan_of(t, overrides[i], 8, &c);
        const double step = plan_time(&p).step;
        expect_near(t, "a step below its limit", plan_time_below(&p, step * (1 + 1e-9)).step, step, 0);
        expect_true(t, plan_time_below(&p, step / 2).step == INFINITY, "%s: half the step is no limit", overrides[i]);
        plan_end(&p, c);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Proposals

// Each is what it says when it is read back: it fits, takes as much and as long; the fastest come first, and differ in more than their policy.
static void expect_proposals(Test *t, const char *overrides, int64_t world, double gib, Proposals *all) {
    Config *c = plan_config(t, overrides, world);
    const double room = gib * (1 << 30);
    const PlanTable table = {1, room, 0, false};
    *all = proposals_make(c, &table);
    for (int i = 0; i < (all->n ? all->n : 1); i++) {
        const Proposal *f = all->n ? &all->fits[i] : &all->least;
        char text[1024], both[2048];
        Config *again;
        overrides_text(c, &f->choice, text, sizeof text);
        snprintf(both, sizeof both, "%s|%s", overrides, text);
        Plan p = plan_of(t, both, world, &again);
        MemoryUse host, use;
        plan_fullest(&p, &use, &host);
        expect_near(t, text, (double)memory_total(&use), f->bytes, 0);
        expect_near(t, text, (double)memory_total(&host), f->host_bytes, 0);
        expect_true(t, (f->bytes <= room) == (all->n > 0), "%s: %.0f bytes of %.0f", text, f->bytes, room);
        if (all->n) expect_near(t, text, plan_time(&p).step, f->seconds, 1e-9 * f->seconds);
        if (i > 0) expect_true(t, all->fits[i - 1].seconds <= f->seconds, "%s: is faster than the one before", text);
        for (int k = 0; k < i; k++) expect_true(t, !choices_alike(&all->fits[k].choice, &f->choice), "%s: differs from another in its policy alone", text);
        plan_end(&p, again);
    }
    free(c);
}

// The fastest of all stages, policies and homes that fit, each planned by itself.
static double fastest_by_hand(Test *t, const char *overrides, int64_t world, double gib) {
    static const char *const offload[] = {"", "|zero_optimization.offload_optimizer.device=cpu", "|zero_optimization.offload_optimizer.device=cpu|zero_optimization.offload_param.device=cpu"};
    double best = INFINITY;
    for (int stage = 0; stage < 4; stage++)
        for (int policy = 0; policy < RECOMPUTE_POLICIES; policy++)
            for (int home = 0; home <= (stage == 0 ? 0 : stage == 3 ? 2 : 1); home++) {
                char text[2048];
                Config *c;
                snprintf(text, sizeof text, "%s|zero_optimization.stage=%d|activation_checkpointing.policy=%s%s", overrides, stage, recompute_names[policy], offload[home]);
                Plan p = plan_of(t, text, world, &c);
                MemoryUse use;
                plan_fullest(&p, &use, NULL);
                if ((double)memory_total(&use) <= gib * (1 << 30)) best = fmin(best, plan_time(&p).step);
                plan_end(&p, c);
            }
    return best;
}

static void test_proposals(Test *t) {
    Proposals all;
    static const struct { const char *overrides; double gib; } row[] = {{TEN_BILLION, 79}, {THIRTY_BILLION, 140}, {THIRTY_BILLION, 79}};
    for (int i = 0; i < 3; i++) {
        expect_proposals(t, row[i].overrides, 8, row[i].gib, &all);
        double best = fastest_by_hand(t, row[i].overrides, 8, row[i].gib);
        expect_true(t, all.n > 0 && all.fits[0].seconds <= best * (1 + 1e-9), "the first takes %g s, and one found by hand %g", all.n ? all.fits[0].seconds : INFINITY, best);
    }
    expect_proposals(t, SETTINGS_GUIDE "|pipeline_schedule=Interleaved", 64, 140, &all);
    expect_true(t, all.n == PROPOSALS_MAX, "%d proposals", all.n);
    expect_proposals(t, THIRTY_BILLION, 2, 10, &all);
    expect_true(t, all.n == 0, "%d proposals for 30 billion parameters in 20 GiB", all.n);
}

static const TestRow plan_tests[] = {
    {"bytes of a run", test_moves}, {"split by tensors and sequences", test_split_planned}, {"stages of a run", test_stages_planned}, {"ladder of a run", test_ladder}, {"10 and 30 billion on 8", test_plan_eight}, {"175 billion on 64", test_plan_settings_guide}, {"measured updates", test_plan_measured}, {"rows in pieces", test_plan_pieces}, {"bubbles", test_plan_bubble}, {"messages by axis", test_plan_axes}, {"messages between stages", test_plan_pipeline_messages}, {"limit of a search", test_plan_limit}, {"proposals", test_proposals}, {NULL, NULL},
};
