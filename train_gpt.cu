// train_gpt.cu - the trainer: ./train_gpt -c ds_config.json [key=value ...]
//
// Start reading at the bottom: main, then train_step, which executes one update as a program of instructions, then
// forward_chunk and backward_chunk, which walk over the units of the model. Everything else hides behind six verbs:
//
//     zero_fetch, zero_release, zero_grad_begin, zero_grad_end   (zero.cu: where weights and gradients live)
//     acts_begin, acts_end                                       (acts.cu: where activations live)
//
// A feature enters through a row of a table, a schedule, a policy, or behind a verb; train_step stays as it is.

#include "trainer.cu"  // Trainer: the configuration, the model, what shards and keeps it; setting up
#include "evaluate.cu" // once in a while: evaluation, samples, checkpoints
#include "inspect.cu"  // --inspect: what checkpoints hold
#include "plan_report.cu" // --plan: memory, bytes and time of any world

// ---------------------------------------------------------------------------------------------------------------
// Forward and backward of the units of a chunk

// Of B samples of T tokens, those from `first` on, n of each sample, without gaps.
static void keep_tokens(int32_t *tokens, int64_t B, int64_t T, int64_t first, int64_t n) {
    for (int64_t b = 0; b < B && n < T; b++) memmove(tokens + b * n, tokens + b * T + first, (size_t)n * 4);
}

// Copies this rank's tokens of n samples, from `first` on, into the slot, as far as its chunk needs them; rows up to B that the set does
// not have are filled with tokens that carry no loss.
static void load_samples(Trainer *t, DataLoader *d, ActSlot *a, int64_t first, int64_t n, int64_t B) {
    int64_t T = t->cfg->run.seq_len, own = T / t->grid.size.sp, side = t->staged++ % 2;
    int32_t *tokens = t->staging[side], *targets = tokens + B * T;
    if (!a->tokens && !a->targets) return;
    event_sync(t->staging_free[side]); // without it the host would overwrite tokens that are still being copied
    if (n > 0) dataloader_fetch(d, first, n, tokens, targets);
    for (int64_t i = n * T; i < B * T; i++) tokens[i] = 0, targets[i] = -1;
    keep_tokens(tokens, B, T, t->grid.coord.sp * own, own);
    keep_tokens(targets, B, T, t->grid.coord.sp * own, own);
    if (a->tokens) device_copy(a->tokens, tokens, B * own * 4, COPY_TO_DEVICE, t->stream);
    if (a->targets) device_copy(a->targets, targets, B * own * 4, COPY_TO_DEVICE, t->stream);
    event_record(t->staging_free[side], t->stream);
}

// Micro-batch mb of this update: samples of the global batch in order, the ranks' shares side by side.
static void load_micro_batch(Trainer *t, int mb, ActSlot *a) {
    int64_t B = t->cfg->batch.train_micro_batch_size_per_gpu, D = t->grid.size.dp;
    int64_t first = t->samples + (mb * D + t->grid.coord.dp) * B;
    load_samples(t, &t->train, a, first, B, B);
    dataloader_prefetch(&t->train, first + D * B, B);
}

static void forward_unit(Trainer *t, ActStore *store, ActSlot *a, ActVisit v) {
    Weights w = zero_fetch(&t->zero, v.unit);
    Acts s = acts_begin(store, a, v);
    unit_forward(&t->model, v.unit, &w, &s);
    acts_end(store, a, v);
    zero_release(&t->zero, v.unit);
}

static void backward_unit(Trainer *t, ActStore *store, ActSlot *a, ActVisit v, BackwardPhase phases) {
    Weights w = zero_fetch(&t->zero, v.unit);
    Grads g = zero_grad_begin(&t->zero, v.unit);
    Acts s = acts_begin(store, a, v);
    unit_backward(&t->model, v.unit, &w, &g, &s, phases);
    if (s.act[ACT_LOSSES].data) sum_to_double(&t->opt.sums[SUM_LOSS], head_counted_losses(&t->model, &s), true, t->stream);
    acts_end(store, a, v);
    zero_grad_end(&t->zero, v.unit, phases);
    zero_release(&t->zero, v.unit);
}

static void forward_chunk(Trainer *t, int chunk, ActSlot *a) {
    ActStore *store = &t->acts[chunk];
    for (int i = 0; i < store->n_forward; i++) forward_unit(t, store, a, store->forward[i]);
}

// The units in descending order; with activation checkpointing some go forward again before.
static void backward_chunk(Trainer *t, int chunk, ActSlot *a, BackwardPhase phases) {
    ActStore *store = &t->acts[chunk];
    for (int i = 0; i < store->n_backward; i++) {
        ActVisit v = store->backward[i];
        if (v.pass == ACTS_BACKWARD) backward_unit(t, store, a, v, phases);
        else forward_unit(t, store, a, v);
    }
    zero_reduce_bucket(&t->zero);
}

// The phase that needs no weights.
static void backward_chunk_weights(Trainer *t, int chunk, ActSlot *a) {
    ActStore *store = &t->acts[chunk];
    for (int i = 0; i < store->n_weights; i++) {
        ActVisit v = store->weights[i];
        Grads g = zero_grad_begin(&t->zero, v.unit);
        Acts s = acts_begin(store, a, v);
        unit_backward(&t->model, v.unit, NULL, &g, &s, PHASE_WEIGHTS);
        acts_end(store, a, v);
        zero_grad_end(&t->zero, v.unit, PHASE_WEIGHTS);
    }
    zero_reduce_bucket(&t->zero);
}

// ---------------------------------------------------------------------------------------------------------------
// Instructions

// The slot of a micro-batch is its own from its first instruction on. Its last user's input is overwritten when that user is through,
// its output and gradient when they have left.
static void begin_chunk(Trainer *t, Instr in, ActSlot *a, ForwardMode mode) {
    a->mb = in.mb;
    a->mode = mode;
    stream_wait_event(t->stream, a->x_sent);
    stream_wait_event(t->stream, a->dx_sent);
    event_record(a->begun, t->stream);
    ActStore *store = &t->acts[in.chunk];
    if (store->layout.taken_over) {
        ActStore *before = &t->acts[in.chunk - 1];
        acts_take_over(store, a, &before->slot[in.mb % before->n_slots]);
    }
}

// Executes, or enqueues, an instruction of a program.
static void execute(Trainer *t, Instr in, ForwardMode mode) {
    ActStore *store = &t->acts[in.chunk];
    ActSlot *a = &store->slot[in.mb % store->n_slots];
    int64_t bytes = tensor_bytes(stream_tensor(&t->model, a->B, a->T, NULL)); // of this rank's rows of the residual stream
    int first = store->layout.first, next = store->layout.last + 1;
    t->zero.last_micro_batch = in.mb == t->pipe.n_micro_batches - 1;
    switch (in.op) {
    case OP_LOAD: load_micro_batch(t, in.mb, a); break;
    case OP_RECV_F: link_receive(&t->links, &t->pipe, in, a->x[first], bytes, a->through, a->here, t->stream); break;
    case OP_FWD:
        begin_chunk(t, in, a, mode);
        forward_chunk(t, in.chunk, a);
        break;
    case OP_SEND_F: link_send(&t->links, &t->pipe, in, a->x[next], bytes, t->stream, a->x_sent); break;
    case OP_RECV_B: link_receive(&t->links, &t->pipe, in, a->dx, bytes, a->begun, a->here, t->stream); break;
    case OP_BWD: backward_chunk(t, in.chunk, a, t->pipe.split_w ? PHASE_INPUT : PHASE_BOTH); break;
    case OP_SEND_B: link_send(&t->links, &t->pipe, in, a->dx, bytes, t->stream, a->dx_sent); break;
    case OP_WGRAD: backward_chunk_weights(t, in.chunk, a); break;
    case OP_COUNT: break;
    }
    if (in.op == pipeline_last_op(&t->pipe) || mode != FORWARD_TRAIN) event_record(a->through, t->stream);
}

// ---------------------------------------------------------------------------------------------------------------
// One update

// Where the time of the update that was just enqueued went: with wall_clock_breakdown, for which the host waits for its end; with several
// stages how much of it was computing, of which the next update makes a bubble.
static void measure_phases(Trainer *t, StepStats *s) {
    double ms[OP_COUNT] = {0};
    s->has_phases = t->cfg->wall_clock_breakdown;
    if (!s->has_phases && t->pipe.n_stages == 1) return;
    if (s->has_phases) event_sync(t->mark[t->pipe.n + 1]); // what comes before the update is done: the host has read its sums
    for (int i = 0; i < t->pipe.n; i++) ms[t->pipe.prog[i].op] += event_elapsed_ms(t->mark[i], t->mark[i + 1]);
    s->load_ms = ms[OP_LOAD];
    s->forward_ms = ms[OP_FWD];
    s->backward_ms = ms[OP_BWD] + ms[OP_WGRAD];
    s->wait_ms = ms[OP_RECV_F] + ms[OP_RECV_B];
    t->busy_ms = s->load_ms + s->forward_ms + s->backward_ms;
    t->pipeline_ms = event_elapsed_ms(t->mark[0], t->mark[t->pipe.n]) + event_elapsed_ms(t->opt.summing, t->opt.decided);
    if (s->has_phases) s->update_ms = event_elapsed_ms(t->mark[t->pipe.n], t->mark[t->pipe.n + 1]);
}

static StepStats train_step(Trainer *t) {
    double start = clock_seconds(), waited = t->train.wait_seconds;
    int64_t n_tokens = t->cfg->batch.train_batch_size * t->cfg->run.seq_len;
    zero_set_uses(&t->zero, t->train_uses, t->n_train_uses);
    zero_begin_step(&t->zero);
    // The mean over the global batch, times the loss scale and what is left to be divided after the sum over the ranks.
    for (int c = 0; c < t->pipe.n_chunks; c++) t->acts[c].dloss = (float)(t->opt.scaler.scale * t->zero.postdivide / (double)n_tokens);
    device_memset(&t->opt.sums[SUM_LOSS], 0, sizeof(double), t->stream);
    event_record(t->mark[0], t->stream);

    for (int i = 0; i < t->pipe.n; i++) {
        Instr in = t->pipe.prog[i];
        watch_progress(t->step, in.mb, in.op == OP_LOAD ? WATCH_DATA : in.op <= OP_SEND_F ? WATCH_FORWARD : WATCH_BACKWARD);
        execute(t, in, FORWARD_TRAIN);
        event_record(t->mark[i + 1], t->stream);
    }
    watch_progress(t->step, t->pipe.n_micro_batches, WATCH_UPDATE);
    zero_finish_grads(&t->zero);
    if (due(t->step, t->cfg->run.replica_check_every)) replicas_check(&t->replicas, &t->zero, t->step);
    RankState state = trainer_rank_state(t);
    RankWishes wishes = {stop_signal != 0, save_signal != 0, t->store && checkpoint_ready(t->store), t->busy_ms};
    OptimizerStats o = optimizer_step(&t->opt, &t->zero, n_tokens, &state, wishes);
    event_record(t->mark[t->pipe.n + 1], t->stream);

    StepStats s;
    memset(&s, 0, sizeof s);
    s.step = t->step++;
    t->tokens += n_tokens;
    t->samples += t->cfg->batch.train_batch_size;
    s.loss = t->loss = o.loss_sum / (double)n_tokens;
    s.grad_norm = t->grad_norm = o.grad_norm;
    s.clip_factor = o.clip_factor;
    s.lr = o.lr;
    s.loss_scale = o.loss_scale;
    s.skipped = o.skipped;
    t->stop = o.stop;
    t->save = o.save;
    t->written = o.written;
    s.tokens = t->tokens;
    s.step_tokens = n_tokens;
    s.data_wait_ms = 1e3 * (t->train.wait_seconds - waited);
    // All stages begin together, and wait for the last one at the sums. What they computed meanwhile they have told each other just now.
    s.bubble = t->pipe.n_stages > 1 && t->pipeline_ms > 0 ? fmax(0, 1 - o.busy_ms / t->grid.world / t->pipeline_ms) : -1;
    measure_phases(t, &s);
    s.step_ms = 1e3 * (clock_seconds() - start);
    return s;
}

// ---------------------------------------------------------------------------------------------------------------
// The main loop

// What goes on from this run's newest checkpoint.
static const char *how_to_resume(const Config *cfg) {
    if (cfg->load_dir[0] || cfg->load_tag[0] || cfg->checkpoint.load_path[0]) return "run.resume=auto and without --load_dir, --load_tag and checkpoint.load_path";
    return strcmp(cfg->run.resume, "auto") == 0 ? "the same command" : "run.resume=auto";
}

static void train(Trainer *t) {
    const RunConfig *run = &t->cfg->run;
    trainer_print_start(t);
    int64_t loaded_at = -1;
    const double setting_up = clock_seconds();
    if (trainer_load(t)) loaded_at = t->step;
    else trainer_init_weights(t);
    const double weights_seconds = clock_seconds() - setting_up;
    if (t->grid.rank == 0) print_table_row("ready after", "%.1f s for memory, data and files, %.1f for weights", t->setup_seconds, weights_seconds);
    console_flush();
    int64_t start_step = t->step; // where this process began
    if (run->sample_every > 0) { // a prompt that cannot be encoded is refused now, not at the first sample
        int32_t *tokens = (int32_t *)host_alloc((strlen(run->sample_prompt) + 1) * 4);
        prompt_encode(t, run->sample_prompt, tokens);
        free(tokens);
    }
    double start = clock_seconds();
    metrics_log(&t->metrics, "{\"event\":\"start\",\"at_step\":%" PRId64 ",\"parameters\":%" PRId64 ",\"seed\":%" PRId64 ",\"setup_seconds\":%.3f,\"weights_seconds\":%.3f}", t->step, table_param_count(&t->model.table), run->seed,
                t->setup_seconds, weights_seconds);
    if (t->step >= run->steps) note("train_gpt.run.steps = %" PRId64 ": step %" PRId64 " is reached already; raise it to go on", run->steps, t->step);

    while (t->step < run->steps && !t->stop) {
        // once in a while: evaluate on the fixed set
        if (t->has_val && due(t->step, run->eval_every)) evaluate_and_log(t);
        if (t->stop) break; // a signal has cut it short

        // the update itself
        StepStats s = train_step(t);
        if (t->grid.rank == 0) metrics_step(&t->metrics, &s);
        log_checkpoint_times(t);
        save_goes_on(t);
        note_stragglers();
        if (t->step == start_step + 1) tell_memory(t); // all that grows when it is first used has grown

        // once in a while: show what the model writes
        if (due(t->step, run->sample_every)) generate_text(t, run->sample_prompt, run->sample_tokens, (uint64_t)(run->seed + t->step));

        // once in a while, or on SIGUSR1: save
        if (due(t->step, run->checkpoint_every) || t->save) {
            save(t, false);
            save_signal = 0;
        }
    }
    bool stopped = t->stop && t->step < run->steps; // a signal during the last update stops nothing
    if (stopped && t->grid.rank == 0) printf("signal %s: update %" PRId64 " is finished, saving\n", stop_signal ? strsignal(stop_signal) : "to another rank", t->step);
    if (!stopped && t->has_val && run->eval_every > 0) evaluate_and_log(t);
    save_finish(t); // in the background, if one is on its way
    const SaveResult *last = &t->store->job.result;
    const bool saved = t->step == loaded_at || (last->durable && last->step == t->step);
    if (!saved && (stopped || run->checkpoint_at_end)) save(t, true);
    if (!stopped) export_last(t, t->step > start_step);
    tell_memory(t);
    if (t->grid.rank > 0) return;

    char time[32];
    double seconds = clock_seconds() - start;
    metrics_log(&t->metrics, "{\"event\":\"%s\",\"at_step\":%" PRId64 ",\"tokens\":%" PRId64 ",\"skipped\":%" PRId64 ",\"seconds\":%.3f}", stopped ? "stopped" : "done", t->step, t->tokens, t->opt.skipped, seconds);
    printf("%s%s: %" PRId64 " updates in %s, %" PRId64 " tokens (%.2f epochs), %" PRId64 " updates skipped; log %s\n", stopped ? "stopped, resume with " : "done", stopped ? how_to_resume(t->cfg) : "",
           t->step - start_step, duration_text(time, sizeof time, seconds), t->tokens, (double)t->samples / (double)t->train.samples_per_epoch, t->opt.skipped, t->metrics.log_path);
    console_flush();
}

#ifndef TESTING
int main(int argc, char **argv) {
    descriptors_ensure();
    FolderPrint *print = folder_print(argc, argv);
    if (print && !started_by_mpirun()) return print(argv[2]);
    if (!print) {
        signals_install();
        watch_arm(60);
    }
    CommWorld world = comm_start();
    message_rank = world.rank;
    requests_agree(argc, argv, world);
    if (print) {
        comm_finish();
        return world.rank == 0 ? print(argv[2]) : EXIT_OK;
    }
    cores_take_share(world);
    Config *cfg = config_load(argc, argv); // JSON to structs, or the list of what is wrong and exit 2; null after --help and the like
    if (!cfg || cfg->plan) {
        watch_disarm();
        int code = cfg ? plan_print(cfg) : EXIT_OK;
        config_free(cfg);
        comm_finish(); // or mpirun would take this for a crash
        return code;
    }
    if (cfg->world != world.world)
        die_alike(EXIT_CONFIG, "the environment speaks of %" PRId64 " ranks, but %d found each other; leave the variables of one launcher only", cfg->world, world.world);
    configurations_agree(cfg, world);
    tags_agree(cfg, world);
    watch_begin(cfg, world);
    Trainer *t = (Trainer *)host_alloc(sizeof *t);
    trainer_init(t, cfg, world);           // data, device, tables, program, shards, slots, files
    if (trainer_only_reads(cfg)) run_reader(t);
    else train(t);
    trainer_free(t);
    free(t);
    config_free(cfg);
    watch_announce(WATCH_END, 60);
    comm_finish();
    watch_goodbye();
    return EXIT_OK;
}
#endif
