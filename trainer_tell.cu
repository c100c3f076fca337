// trainer_tell.cu - what a run says of itself: the table at its start, memory planned and measured, times of recomputation.
//
// A part of trainer.cu.
#pragma once

static void print_table_row(const char *what, const char *format, ...) PRINTF_LIKE(2, 3);
static void print_table_row(const char *what, const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("  %-14s ", what);
    vprintf(format, args);
    putchar('\n');
    va_end(args);
}

// Bytes of the rank that has most, figure by figure. others: what the device says is in use beyond our own allocations (its
// context, libraries, other programs); -1 on the CPU, where that would be the whole machine.
typedef struct {
    double planned[MEMORY_KINDS], planned_total, host[MEMORY_KINDS], host_total, allocated, peak, others;
} MemoryReport;

// All ranks call it.
static MemoryReport trainer_memory(const Trainer *t) {
    DeviceInfo d = device_info();
    MemoryReport r;
    for (int k = 0; k < MEMORY_KINDS; k++) r.planned[k] = (double)t->planned.bytes[k], r.host[k] = (double)t->planned_host.bytes[k];
    r.host_total = (double)(t->zero.offload.bytes + (t->store ? t->store->copy.bytes : 0)); // it is allocated at once
    for (int c = 0; c < t->pipe.n_chunks; c++) r.host_total += (double)acts_host_bytes(&t->acts[c].layout);
    r.planned_total = (double)memory_total(&t->planned);
    r.allocated = (double)device_allocated_bytes();
    r.peak = (double)device_peak_bytes();
    r.others = d.is_gpu ? (double)(d.memory_bytes - device_free_bytes()) - r.allocated : -1;
    comm_host_all_reduce((double *)&r, sizeof r / sizeof(double), COMM_MAX);
    return r;
}

// Plan and truth so far, on the console and in the log.
static void tell_memory(Trainer *t) {
    MemoryReport r = trainer_memory(t);
    if (t->grid.rank > 0) return;
    double mib = 1024.0 * 1024.0;
    char kinds[512] = "", others[32];
    for (int k = 0; k < MEMORY_KINDS; k++) snprintf(kinds + strlen(kinds), sizeof kinds - strlen(kinds), ",\"%s\":%.0f", memory_names[k], r.planned[k]);
    metrics_log(&t->metrics, "{\"event\":\"memory\",\"at_step\":%" PRId64 "%s,\"planned\":%.0f,\"peak\":%.0f,\"host\":%.0f,\"others\":%s}", t->step, kinds, r.planned_total, r.peak, r.host_total,
                json_number(others, sizeof others, r.others < 0 ? NAN : r.others));
    printf("memory: at most %.1f MiB a rank allocated, %.1f planned", r.peak / mib, r.planned_total / mib);
    if (r.host_total > 0) printf("; %.1f of host memory", r.host_total / mib);
    if (r.others >= 0) printf("; others use %.1f of the device", r.others / mib);
    putchar('\n');
    console_flush();
}

// activation_checkpointing.profile: how long each segment took in the last micro-batch of the update. Many segments take several records.
static void log_checkpoint_times(Trainer *t) {
    enum { EACH = 64 };
    const int n = t->acts->layout.n_segments;
    if (!t->acts->mark[0] || t->grid.rank > 0) return;
    double *ms = (double *)host_alloc(sizeof(double) * 2 * (size_t)n);
    acts_times(t->acts, ms, ms + n);
    for (int first = 0; first < n; first += EACH) {
        char text[2][EACH * 12] = {"", ""};
        for (int pass = 0; pass < 2; pass++)
            for (int i = first, at = 0; i < n && i < first + EACH; i++) at += snprintf(text[pass] + at, sizeof text[pass] - (size_t)at, "%s%.6g", i > first ? "," : "", ms[pass * n + i]);
        metrics_log(&t->metrics, "{\"event\":\"checkpoints\",\"at_step\":%" PRId64 ",\"first\":%d,\"forward_ms\":[%s],\"backward_ms\":[%s]}", t->step, first, text[0], text[1]);
    }
    free(ms);
}

// What activation checkpointing does, and what each step of its ladder would: with a pipeline on the stage whose ranks need most memory.
static void print_recompute_row(const Trainer *t) {
    const double mib = 1024.0 * 1024.0;
    MemoryUse most;
    Plan p;
    plan_open(&p, t->cfg);
    const int stage = plan_fullest(&p, &most, NULL);
    const StageActs set = plan_stage_acts_under(&p, stage, &t->cfg->activation_checkpointing);
    char ladder[512] = "", where[64] = "", segments[64] = "";
    for (int policy = RECOMPUTE_NORMS; policy < RECOMPUTE_POLICIES; policy++) {
        const ActCost c = plan_stage_policy(&p, stage, (RecomputePolicy)policy).cost;
        snprintf(ladder + strlen(ladder), sizeof ladder - strlen(ladder), "%s%s %.1f for %.1f %%", policy > RECOMPUTE_NORMS ? ", " : "", recompute_names[policy], (double)c.saved_bytes / mib, 100 * c.flops_share);
    }
    plan_close(&p);
    if (t->pipe.n_stages > 1) snprintf(where, sizeof where, " on stage %d, which needs most", stage);
    if (set.policy == RECOMPUTE_NONE) print_table_row("recompute", "none; in MiB saved for more operations%s: %s", where, ladder);
    else {
        if (set.policy == RECOMPUTE_BLOCK) snprintf(segments, sizeof segments, ", %d segments%s", set.segments, set.cpu_checkpointing ? " in host memory" : "");
        print_table_row("recompute", "%s%s: saves %.1f MiB for %.1f %% more operations%s", recompute_names[set.policy], segments, (double)set.cost.saved_bytes / mib, 100 * set.cost.flops_share, where);
        print_table_row("", "each policy in MiB saved for more operations: %s", ladder);
    }
}

// What it takes that a split backward pass keeps whole gradients at stages that would not.
static void print_whole_gradients_row(const Trainer *t) {
    const double mib = 1024.0 * 1024.0;
    const ZeroLayout *kept = &t->zero.layout;
    ZeroOptions options = kept->opt;
    if (options.stage < 2 || !options.split_backward || kept->ranks == 1) return;
    options.split_backward = false;
    ZeroLayout other = zero_layout(&t->model, options, kept->ranks, kept->rank, kept->n_states, true);
    print_table_row("", "whole until the last micro-batch, since backward is split: %.1f MiB a rank and buffers of %.1f, instead of %.1f and %.1f", (double)kept->bytes.bytes[MEMORY_GRADIENTS] / mib,
                    (double)kept->bytes.bytes[MEMORY_BUFFERS] / mib, (double)other.bytes.bytes[MEMORY_GRADIENTS] / mib, (double)other.bytes.bytes[MEMORY_BUFFERS] / mib);
    zero_layout_free(&other);
}

static void trainer_print_start(const Trainer *t) {
    MemoryReport memory = trainer_memory(t);
    if (t->grid.rank > 0) return;
    const Config *cfg = t->cfg;
    const ModelConfig *m = &t->model.c;
    DeviceInfo d = device_info();
    double mib = 1024.0 * 1024.0;
    printf("train_gpt\n");
    print_table_row("device", "%s, %.1f GiB%s", d.name, (double)d.memory_bytes / mib / 1024, d.is_gpu ? "" : " of memory");
    print_table_row("model", "%s: n_layer %" PRId64 ", n_head %" PRId64 ", n_embd %" PRId64 ", n_inner %" PRId64 ", vocab_size %" PRId64 " (padded %" PRId64 "), n_positions %" PRId64 "; %" PRId64 " parameters",
                    t->model.arch->name, m->n_layer, m->n_head, m->n_embd, m->n_inner, m->vocab_size, t->model.Vp, m->n_positions, table_param_count(&t->model.table));
    if (m->attention_window_size > 0) print_table_row("attention", "each token sees itself and the %" PRId64 " before it (attention_window_size %" PRId64 ")", m->attention_window_size - 1, m->attention_window_size);
    if (!cfg->run.deterministic) print_table_row("deterministic", "false: %s", !d.is_gpu || d.compute_capability / 10 != 9 ? "has no effect on this device, where equal runs give equal bits" : "equal runs, and resumed ones, are equal but for the order in which attention's gradients are added");
    print_table_row("precision", "%s weights and activations, fp32 masters%s and optimizer states%s", dtype_name(t->model.dtype), t->model.dtype == DTYPE_BF16 ? " (weight + 16 bits)" : "",
                    !cfg->fp16.enabled ? "" : t->opt.scaler.dynamic ? ", dynamic loss scale" : ", static loss scale");
    const GridAxes *axes = &t->grid.size;
    char pieces[64] = "";
    if (t->model.overlap.pieces > 1) snprintf(pieces, sizeof pieces, "; rows travel in %d pieces (run.tensor_parallel_pieces)", t->model.overlap.pieces);
    if (axes->tp * axes->sp > 1)
        print_table_row("parallelism", "data %d x sequence %d x tensor %d: %" PRId64 " of %" PRId64 " heads, %" PRId64 " of %" PRId64 " inner channels, %" PRId64 " of %" PRId64 " tokens of a sample a rank%s%s", axes->dp, axes->sp, axes->tp,
                        m->n_head / axes->tp, m->n_head, m->n_inner / axes->tp, m->n_inner, cfg->run.seq_len / axes->sp, cfg->run.seq_len, pieces, cfg->run.cuda_graphs ? "; no graphs (run.cuda_graphs): ranks talk inside units" : "");
    if (!trainer_only_reads(cfg)) {
        print_table_row("batch", "%" PRId64 " samples of %" PRId64 " tokens an update = %" PRId64 " micro-batches of %" PRId64, cfg->batch.train_batch_size, cfg->run.seq_len,
                        cfg->batch.gradient_accumulation_steps, cfg->batch.train_micro_batch_size_per_gpu);
        print_table_row("optimizer", "%s, lr %g, weight decay %g on matrices only, gradient clipping %g%s; ZeRO stage %d on %d rank%s", t->opt.rule->name, cfg->optimizer.lr,
                        cfg->optimizer.weight_decay, cfg->gradient_clipping, cfg->gradient_clipping > 0 ? "" : " (off)", t->zero.opt.stage, t->zero.gather_group.size, t->zero.gather_group.size == 1 ? "" : "s");
        const ZeroOptions *zero = &t->zero.opt;
        char travel[64] = "";
        if (t->zero.reduce_group.size > 1) snprintf(travel, sizeof travel, ", travel in %s (%s)", dtype_name(zero->communication_data_type), layout_direct(&t->zero.layout) ? "direct exchange" : zero->reduce_scatter ? "reduce-scatter" : "all-reduce");
        print_table_row("gradients", "summed in %s%s", dtype_name(zero_shard_dtype(&t->zero)), travel);
        print_whole_gradients_row(t);
        print_recompute_row(t);
        if (t->pipe.n_stages > 1)
            print_table_row("pipeline", "%d stages of %d chunk%s, %s; ideal bubble %.1f %%", t->pipe.n_stages, t->pipe.n_chunks, t->pipe.n_chunks == 1 ? "" : "s", pipeline_names[t->pipe.schedule], 100 * t->ideal_bubble);
        print_table_row("data", "%" PRId64 " tokens, %" PRId64 " samples an epoch, %s", t->train.total_tokens, t->train.samples_per_epoch, cfg->data.shuffle ? "shuffled" : "in file order");
    }
    const double *bytes = memory.planned;
    print_table_row("memory (MiB)", "%.1f a rank: weights %.1f, masters %.1f, gradients %.1f, optimizer states %.1f, buffers %.1f, activations %.1f, scratch %.1f", memory.planned_total / mib,
                    bytes[MEMORY_WEIGHTS] / mib, bytes[MEMORY_MASTERS] / mib, bytes[MEMORY_GRADIENTS] / mib, bytes[MEMORY_OPTIMIZER_STATES] / mib, bytes[MEMORY_BUFFERS] / mib,
                    bytes[MEMORY_ACTIVATIONS] / mib, bytes[MEMORY_SCRATCH] / mib);
    if (memory.host_total > 0) {
        // What copies from and to the device reach: all of it but what the CPU alone updates.
        const bool pinned = (t->zero.offload.bytes == 0 || t->zero.offload.pinned) && (!t->acts->slot[0].host || t->acts->slot[0].host_pinned) && (!t->store || !t->store->copy.memory || t->store->copy.pinned);
        const double stays = (double)(t->zero.offload.bytes - t->zero.offload.travels);
        char pins[64] = "";
        if (pinned && stays > 0) snprintf(pins, sizeof pins, ", %.1f of them pinned", (memory.host_total - stays) / mib);
        else if (pinned) snprintf(pins, sizeof pins, ", pinned");
        char updates[64] = "";
        if (t->zero.offload.bytes > 0) snprintf(updates, sizeof updates, "; the CPU updates by %d threads", offload_threads());
        print_table_row("host (MiB)", "%.1f a rank%s: weights %.1f, masters %.1f, gradients %.1f, optimizer states %.1f, activations %.1f, buffers %.1f%s", memory.host_total / mib, pins,
                        memory.host[MEMORY_WEIGHTS] / mib, memory.host[MEMORY_MASTERS] / mib, memory.host[MEMORY_GRADIENTS] / mib, memory.host[MEMORY_OPTIMIZER_STATES] / mib,
                        memory.host[MEMORY_ACTIVATIONS] / mib, memory.host[MEMORY_BUFFERS] / mib, updates);
    }
    const Offload *o = &t->zero.offload;
    for (int f = 0; f < OFFLOAD_FILES; f++)
        if (o->file[f].bytes > 0)
            print_table_row("nvme (MiB)", "%.1f a rank of %s in %s, by %s; %d buffers of %.1f", (double)o->file[f].bytes / mib, file_holds[f], o->filing.folder[f], aio_is_uring(o->aio) ? "io_uring" : "threads",
                            f == FILE_UPDATE ? o->filing.buffer_count : o->n_weights, (double)(f == FILE_UPDATE ? o->room.piece : o->room.weights) / mib);
    if (memory.others >= 0) print_table_row("", "beside it others use %.1f of the device: its context, libraries, other programs", memory.others / mib);
    console_flush();
}
