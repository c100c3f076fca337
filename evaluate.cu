// evaluate.cu - what happens once in a while beside training: evaluation, samples, checkpoints, export.
//
// With several ranks all of them come here together: each computes, saves and loads its share, and rank 0 alone prints, logs,
// and reads and writes model folders (see zero_serve).
#pragma once
#include "trainer.cu"

static void execute(Trainer *t, Instr in, ForwardMode mode); // train_gpt.cu
static void load_samples(Trainer *t, DataLoader *d, ActSlot *a, int64_t first, int64_t n, int64_t B);

// All ranks: has any of them been asked to stop? Evaluations and samples end early then.
static bool stop_asked(Trainer *t) {
    double stop = stop_signal != 0;
    if (t->grid.world > 1) comm_host_all_reduce(&stop, 1, COMM_MAX);
    t->stop |= stop > 0;
    return t->stop;
}

// One pass forward through all chunks of this stage, of what is loaded in the first slot of each.
static void forward_all(Trainer *t, ForwardMode mode) {
    Instr *pass = (Instr *)host_alloc(sizeof(Instr) * 3 * (size_t)t->pipe.n_chunks);
    int n = pipeline_pass(&t->pipe, pass);
    for (int i = 0; i < n; i++) execute(t, pass[i], mode);
    free(pass);
}

// The store of the chunk with the head; null if it is on another stage.
static ActStore *head_store(Trainer *t) {
    ActStore *last = &t->acts[t->pipe.n_chunks - 1];
    return acts_has_head(&last->layout) ? last : NULL;
}

// Mean loss over the first eval_batches micro-batches of each rank of the validation set (0 = all of it). The set is fixed,
// and nothing that training reads afterwards is touched: no gradient, no weight, no position in the training data. The
// ranks run equally many passes, whatever is left for the last one: a pass without samples computes, and counts nothing.
// NaN, with t->stop, when a signal has cut it short.
static double evaluate(Trainer *t) {
    int64_t B = t->cfg->batch.train_micro_batch_size_per_gpu, T = t->cfg->run.seq_len, D = t->grid.size.dp, samples = t->val.n_samples;
    if (t->cfg->run.eval_batches > 0) samples = min_i64(samples, t->cfg->run.eval_batches * B * D);
    ActStore *last = head_store(t);
    zero_set_uses(&t->zero, t->eval_uses, t->n_eval_uses);
    device_memset(t->eval_sum, 0, sizeof(double), t->stream);
    watch_announce(WATCH_EVALUATE, 300); // without a sign: as long as a first update, which is at new sizes as well
    for (int64_t pass = 0; pass < samples; pass += B * D) {
        if (stop_asked(t)) return NAN;
        int64_t first = min_i64(samples, pass + t->grid.coord.dp * B);
        for (int c = 0; c < t->pipe.n_chunks; c++) load_samples(t, &t->val, &t->acts[c].slot[0], first, min_i64(B, samples - first), B);
        forward_all(t, FORWARD_EVAL);
        if (!last) continue;
        Acts head = acts_begin(last, &last->slot[0], {last->layout.last, ACTS_FORWARD});
        sum_to_double(t->eval_sum, head_counted_losses(&t->model, &head), true, t->stream);
    }
    comm_all_reduce_double(t->groups.job, t->eval_sum, 1, COMM_SUM, t->stream);
    double sum;
    device_copy(&sum, t->eval_sum, sizeof sum, COPY_TO_HOST, t->stream);
    stream_sync(t->stream);
    return sum / (double)(samples * T);
}

static void evaluate_and_log(Trainer *t) {
    char number[32];
    double start = clock_seconds(), loss = evaluate(t);
    if (t->grid.rank > 0 || t->stop) return;
    printf("step %6" PRId64 "/%" PRId64 "         | val loss %8.5f | %.1f s\n", t->step, t->cfg->run.steps, loss, clock_seconds() - start);
    console_flush();
    metrics_log(&t->metrics, "{\"event\":\"eval\",\"at_step\":%" PRId64 ",\"val_loss\":%s,\"tokens\":%" PRId64 "}", t->step, json_number(number, sizeof number, loss), t->tokens);
}

// Draws one token from softmax(logits[0..V)); `at` is uniform in [0, 1).
static int32_t sample_token(const void *logits, DType dtype, int64_t V, double at) {
    double largest = -INFINITY, sum = 0;
    for (int64_t i = 0; i < V; i++) largest = fmax(largest, dtype_load(logits, dtype, i));
    for (int64_t i = 0; i < V; i++) sum += exp(dtype_load(logits, dtype, i) - largest);
    at *= sum;
    for (int64_t i = 0; i < V; i++) if ((at -= exp(dtype_load(logits, dtype, i) - largest)) < 0) return (int32_t)i;
    return (int32_t)(V - 1);
}

// Tokens of a prompt, at most one a byte; dies when the vocabulary cannot say it.
static int64_t prompt_encode(const Trainer *t, const char *prompt, int32_t *tokens) {
    int64_t n = tokenizer_encode(&t->tokenizer, prompt, (int64_t)strlen(prompt), tokens);
    if (n < 0)
        die_alike(EXIT_CONFIG, "the prompt cannot be written in this model's vocabulary of %" PRId64 " tokens, from byte %" PRId64 " on; give the tokens' strings with train_gpt.data.tokenizer=FILE, or leave the prompt empty",
            t->model.V, -1 - n);
    return n;
}

// One sample of the ranks that share it has gone forward: row `at` of the computed logits, on those ranks of the last stage that have
// sequence-parallel rank sp_rank, who tell all others the columns that they have.
static void collect_logits(Trainer *t, int64_t at, int sp_rank, void *logits) {
    const Model *m = &t->model;
    const GridAxes *size = &t->grid.size;
    ActStore *last = head_store(t);
    int64_t bytes = m->Vp / size->tp * dtype_bytes(m->dtype);
    for (int tp_rank = 0; tp_rank < size->tp; tp_rank++) {
        char *part = (char *)logits + tp_rank * bytes;
        GridAxes owner = {pipeline_stage_of(&t->pipe, pipeline_last(&t->pipe)), 0, sp_rank, tp_rank};
        if (last && t->grid.coord.tp == tp_rank && t->grid.coord.sp == sp_rank) {
            Acts head = acts_begin(last, &last->slot[0], {last->layout.last, ACTS_FORWARD});
            device_copy(part, (char *)head.act[ACT_LOGITS].data + at * bytes, bytes, COPY_TO_HOST, t->stream);
        }
        stream_sync(t->stream); // on the others, too: the text is copied, and may grow
        if (size->tp * size->sp * size->pp > 1) comm_host_broadcast(part, bytes, t->grid.first_rank + grid_rank(owner, *size));
    }
}

// logits (Vp) of what follows a text of 1..T tokens, by a forward pass; there is room for T tokens in it.
static void next_logits(Trainer *t, int32_t *text, int64_t length, void *logits) {
    int64_t T = t->cfg->run.seq_len, tp = t->grid.size.tp, sp = t->grid.size.sp;
    int64_t computed = min_i64(T, round_up(length, round_up(32, tp * sp * t->model.overlap.pieces))), own = computed / sp, row = (length - 1) % own;
    int64_t first_logits = min_i64(row, own - head_rows(&t->model, own));
    for (int64_t i = length; i < computed; i++) text[i] = 0; // causal attention: nothing before sees them
    for (int c = 0; c < t->pipe.n_chunks; c++) {
        ActSlot *a = &t->acts[c].slot[0];
        acts_set_size(a, 1, own);
        a->first_logits = first_logits;
    }
    if (t->acts->slot[0].tokens) device_copy(t->acts->slot[0].tokens, text + t->grid.coord.sp * own, own * 4, COPY_TO_DEVICE, t->stream);
    forward_all(t, FORWARD_LOGITS);
    collect_logits(t, row - first_logits, (int)((length - 1) / own), logits);
    // Micro-batches are what they were, also in chunks between the first and the last, which load nothing.
    for (int c = 0; c < t->pipe.n_chunks; c++) acts_set_size(&t->acts[c].slot[0], t->acts[c].layout.B, t->acts[c].layout.T);
}

// --generate was started for its text alone; a sample beside training is not worth its end.
static void sample_flush(const Trainer *t) {
    if (t->cfg->generate) output_flush();
    else console_flush();
}

// Continues the prompt by n tokens and prints both. The text is a function of (weights, prompt, seed). Each token is a
// forward pass over the text so far, its length rounded up; beyond the model's positions the older half is forgotten.
static void generate_text(Trainer *t, const char *prompt, int64_t n, uint64_t seed) {
    int64_t T = t->cfg->run.seq_len;
    int64_t prompt_bytes = (int64_t)strlen(prompt);
    int32_t *text = (int32_t *)host_alloc((size_t)(prompt_bytes + 1 + T) * 4);
    void *logits = host_alloc((size_t)(t->model.Vp * dtype_bytes(t->model.dtype)));
    TokenText shown = {NULL, 0, 0}; // what is decoded and not printed yet
    int64_t length = prompt_encode(t, prompt, text);
    for (int64_t i = 0; i < length; i++) tokenizer_decode_append(&t->tokenizer, text[i], &shown);
    if (length == 0) text[length++] = t->tokenizer.end_of_text >= 0 ? t->tokenizer.end_of_text : (int32_t)min_i64('\n', t->model.V - 1);
    zero_set_uses(&t->zero, t->eval_uses, t->n_eval_uses);
    watch_announce(WATCH_SAMPLE, 300);
    int64_t from = max_i64(0, length - T); // the window starts here
    memmove(text, text + from, (size_t)(length - from) * 4);
    length -= from;
    for (int64_t k = 0; k < n && !stop_asked(t); k++) {
        if (length > T || (length == T && T > 1)) { // with one position only the newest token stays
            int64_t keep = max_i64(1, T / 2);
            memmove(text, text + length - keep, (size_t)keep * 4);
            length = keep;
        }
        next_logits(t, text, length, logits);
        text[length] = sample_token(logits, t->model.dtype, t->model.V, rng_uniform(seed, text_hash("sample"), (uint64_t)k));
        tokenizer_decode_append(&t->tokenizer, text[length++], &shown);
        if (t->grid.rank > 0) continue; // every rank computes and draws the same; one prints
        int64_t printed = tokenizer_print(stdout, shown.data, shown.length, k + 1 < n); // all but a character that is not whole yet
        memmove(shown.data, shown.data + printed, (size_t)(shown.length - printed));
        shown.length -= printed;
        sample_flush(t);
    }
    if (t->grid.rank == 0) putchar('\n');
    sample_flush(t);
    free(shown.data);
    free(text);
    free(logits);
}

// What the other ranks must hold as well.
static RankState trainer_rank_state(const Trainer *t) {
    const Optimizer *o = &t->opt;
    RankState s = {(double)t->step, (double)o->applied_updates, (double)o->skipped, (double)t->samples, schedule_lr(t->cfg, o->applied_updates), o->scaler.scale, t->loss, t->grad_norm, t->config_digest};
    return s;
}

static TrainingState trainer_state(const Trainer *t) {
    TrainingState s;
    memset(&s, 0, sizeof s);
    s.config = t->config_text;
    s.config_ranks = t->cfg->world;
    s.step = t->step;
    s.applied_updates = t->opt.applied_updates;
    s.tokens = t->tokens;
    s.skipped = t->opt.skipped;
    s.loss_scale = t->opt.scaler.scale;
    s.scaler_iteration = t->opt.scaler.iteration;
    s.scaler_last_overflow = t->opt.scaler.last_overflow;
    s.scaler_hysteresis_left = t->opt.scaler.hysteresis_left;
    s.consecutive_skipped = t->opt.consecutive_skipped;
    s.seed = (uint64_t)t->cfg->run.seed;
    s.data_fingerprint = t->has_train ? t->train.fingerprint : 0;
    s.data_samples = t->samples;
    return s;
}

// A failure warns and leaves the older checkpoints as they are, unless this is the last chance.
static void save_failed(Trainer *t, const SaveResult *r, bool last_chance) {
    char newest[CHECKPOINT_NAME_MAX], resume[CHECKPOINT_NAME_MAX + 32] = "start again, as there is none here yet";
    const bool gives_up = last_chance || t->store->failed_in_a_row >= 3, some = t->grid.rank == 0 && checkpoint_newest(t->store, newest); // rank 0 speaks
    if (some) snprintf(resume, sizeof resume, "resume from %s", newest);
    if (r->not_a_number && gives_up) die_told(EXIT_NUMERICS, "the checkpoint of step %" PRId64 " was not saved: %s; %s, with a lower learning rate or other data", r->step, r->why, resume);
    if (last_chance) die_told(EXIT_IO, "the last checkpoint, of step %" PRId64 ", could not be saved: %s; mend that and %s", r->step, r->why, resume);
    if (gives_up) die_told(EXIT_IO, "three checkpoints in a row could not be saved, the last one of step %" PRId64 ": %s; mend that and %s", r->step, r->why, resume);
    note("the checkpoint of step %" PRId64 " could not be saved: %s; %s, training goes on", r->step, r->why, some ? "earlier ones are intact" : "there is none yet");
}

// A save has ended: what it means for the run.
static void save_tell(Trainer *t, const SaveResult *r, bool last_chance) {
    double rate = r->write_seconds > 0 ? (double)r->bytes / 1e6 / r->write_seconds : 0;
    metrics_log(&t->metrics, "{\"event\":\"checkpoint\",\"at_step\":%" PRId64 ",\"durable\":%s,\"bytes\":%" PRId64 ",\"seconds\":%.4f,\"stall_ms\":%.2f,\"write_mb_s\":%.1f}", r->step, r->durable ? "true" : "false", r->bytes, r->seconds, 1e3 * r->stall_seconds, rate);
    if (r->durable && t->grid.rank == 0) {
        printf("step %6" PRId64 "/%" PRId64 "         | saved %s: %.1f MB in %.2f s", t->step, t->cfg->run.steps, r->name, (double)r->bytes / 1e6, r->seconds);
        if (r->stall_seconds < r->seconds) printf(", for %.3f s of which training waited", r->stall_seconds);
        putchar('\n');
    }
    if (!r->durable) save_failed(t, r, last_chance);
    console_flush();
}

static void save_announce(const Trainer *t) { watch_announce(WATCH_SAVE, seconds_for_bytes(4 * (1 + t->zero.n_states) * table_param_count(&t->model.table))); }

// Waits for the save in the background, if there is one.
static void save_finish(Trainer *t) {
    if (!checkpoint_saving(t->store)) return;
    save_announce(t);
    checkpoint_finish(t->store);
    save_tell(t, &t->store->job.result, false);
}

// After an update: what the save in the background needs of the main thread.
static void save_goes_on(Trainer *t) {
    checkpoint_copied(t->store);
    if (t->written && checkpoint_go_on(t->store)) save_tell(t, &t->store->job.result, false);
}

// All of the model, as one rank saves it that asks the others for each tensor (see zero_serve).
typedef struct {
    Zero *zero;
    ParamTable table;
    int row, kind;  // of the tensor that was asked for last; row -1 = none
    float *values;
} GatheredTensors;

static void gathered_owned(void *ctx, int row, int64_t *first, int64_t *last) {
    *first = 0;
    *last = param_numel(&((GatheredTensors *)ctx)->table.row[row]);
}

static void gathered_get(void *ctx, int row, int kind, int64_t first, int64_t n, float *values) {
    GatheredTensors *g = (GatheredTensors *)ctx;
    if (g->row != row || g->kind != kind) {
        free(g->values);
        g->values = (float *)host_alloc((size_t)param_numel(&g->table.row[row]) * 4);
        zero_ask_read(g->zero, row, kind, g->values);
        g->row = row;
        g->kind = kind;
    }
    memcpy(values, g->values + first, (size_t)n * 4);
}

// checkpoint.zero_checkpoint = false: rank 0 saves, alone, and all learn how it went.
static void save_gathered(Trainer *t, const TrainingState *state) {
    CheckpointStore *s = t->store;
    if (t->grid.rank > 0) zero_serve(&t->zero);
    else {
        GatheredTensors g = {&t->zero, {}, -1, 0, NULL};
        CheckpointTensors tensors = trainer_tensors(t);
        const CheckpointPeers ranks = s->peers;
        model_build_table(&g.table, &t->model.c, model_whole);
        tensors.table = &g.table;
        tensors.ctx = &g;
        tensors.owned = gathered_owned;
        tensors.get = gathered_get;
        s->peers = checkpoint_alone;
        checkpoint_save(s, state, &tensors, t->cfg->checkpoint.keep_n_most_recent, t->cfg->checkpoint.num_checkpoints_to_keep);
        s->peers = ranks;
        zero_ask(ASK_DONE, 0, 0);
        table_free(&g.table);
        free(g.values);
    }
    comm_host_broadcast(&s->job.result, sizeof s->job.result, 0);
    comm_host_broadcast(&s->failed_in_a_row, sizeof s->failed_in_a_row, 0);
}

// Saves: in the background, if the configuration says so and there will be time for it.
static void save(Trainer *t, bool last_chance) {
    const CheckpointConfig *c = &t->cfg->checkpoint;
    if (checkpoint_saving(t->store)) {
        if (t->grid.rank == 0 && !last_chance)
            note("the checkpoint of step %" PRId64 " waits for that of step %" PRId64 ", which is still being written; a larger train_gpt.run.checkpoint_every would spare that", t->step, t->store->job.state.step);
        save_finish(t);
    }
    save_announce(t);
    RankState held = trainer_rank_state(t);
    agree_require(&held, t->grid.rank, t->grid.world);
    if (t->cfg->run.replica_check_every > 0) replicas_check(&t->replicas, &t->zero, t->step); // at stage 0; the others' copies are older than the masters now
    TrainingState state = trainer_state(t);
    CheckpointTensors tensors = trainer_tensors(t);
    if (!c->zero_checkpoint && t->grid.world > 1) save_gathered(t, &state);
    else if (t->store->copy.memory && !last_chance) {
        checkpoint_begin(t->store, &state, &tensors, c->keep_n_most_recent, c->num_checkpoints_to_keep);
        if (checkpoint_saving(t->store)) return;
    } else checkpoint_save(t->store, &state, &tensors, c->keep_n_most_recent, c->num_checkpoints_to_keep);
    save_tell(t, &t->store->job.result, last_chance);
}

// What was loaded is the same on all ranks: the numbers, and the weights that every rank holds whole.
static void trainer_verify_loaded(Trainer *t) {
    RankState held = trainer_rank_state(t);
    agree_require(&held, t->grid.rank, t->grid.world);
    replicas_check(&t->replicas, &t->zero, t->step);
    if (t->cfg->run.replica_check_every > 0) return;
    replicas_free(&t->replicas); // its memory is planned only for runs that go on comparing
    memset(&t->replicas, 0, sizeof t->replicas);
}

// Not inlined: its rooms for paths would add to the stack that loading takes.
__attribute__((noinline)) static void note_earlier_run(const Config *cfg) {
    char room[CONFIG_PATH_MAX + 16], latest[CONFIG_PATH_MAX + 32];
    snprintf(latest, sizeof latest, "%s/latest", trainer_save_dir(cfg, room, sizeof room));
    if (access(latest, F_OK) == 0)
        note("train_gpt.run.resume = none: the folder of %s holds checkpoints of an earlier run; those of equal steps will be replaced, and a later resume=auto takes the highest step; another run.output_dir keeps the two apart", latest);
}

__attribute__((noinline)) static void note_changes(const Config *cfg, const TrainingState *loaded, const char *name) {
    char changed[CHANGES_TEXT];
    if (!trainer_only_reads(cfg) && config_changes(cfg, loaded, changed) > 0)
        note("checkpoint %s was trained with %s; from here on this run's settings hold", name, changed);
}

// `auto` finds no checkpoint: an error where a folder was named for it, and where the one that is meant has a name of its own and there is nothing else to read.
__attribute__((noinline)) static void none_found(const Config *cfg, const char *dir) {
    const char *option = cfg->load_dir[0] ? "--load_dir = " : cfg->checkpoint.load_path[0] ? "checkpoint.load_path = " : "";
    char renamed[CHECKPOINT_NAME_MAX];
    checkpoint_renamed(dir, renamed);
    if (renamed[0] && (option[0] || (trainer_only_reads(cfg) && !cfg->model.init_from[0])))
        die_alike(EXIT_CHECKPOINT, "%s%s: no checkpoint in this folder is named by its step; name the one that is meant, such as --load_tag %s", option, dir, renamed);
    if (option[0]) die_alike(EXIT_CHECKPOINT, "%s%s: there is no checkpoint in this folder; name one that holds step-* folders", option, dir);
    if (renamed[0])
        note("train_gpt.run.resume = auto: no checkpoint in %s is named by its step, as auto wants it, and the run begins without one; --load_tag %s takes the one of that name", dir, renamed);
}

// Loads the checkpoint that the configuration asks for; false when `auto` finds none. All ranks read, each what it needs.
static bool trainer_load(Trainer *t) {
    const Config *cfg = t->cfg;
    const char *which = cfg->load_tag[0] ? cfg->load_tag : cfg->run.resume;
    char room[CONFIG_PATH_MAX + 16], name[CONFIG_NAME_MAX] = "";
    if (strcmp(which, "none") == 0) {
        note_earlier_run(cfg);
        return false;
    }
    TrainingState s;
    watch_announce(WATCH_LOAD, seconds_for_bytes(4 * (1 + optimizer_n_states(&cfg->optimizer)) * table_param_count(&t->model.table)));
    const char *dir = trainer_load_dir(cfg, room, sizeof room);
    if (access(dir, F_OK) != 0 && (cfg->load_dir[0] || cfg->checkpoint.load_path[0]))
        die_alike(EXIT_CHECKPOINT, "%s = %s: %s; name a folder with checkpoints", cfg->load_dir[0] ? "--load_dir" : "checkpoint.load_path", dir, strerror(errno));
    CheckpointTensors tensors = trainer_tensors(t);
    CheckpointPeers peers = trainer_peers(t);
    bool found = checkpoint_load(&peers, dir, which, &s, &tensors, name, sizeof name);
    if (!found) {
        none_found(cfg, dir);
        return false;
    }
    zero_weights_changed(&t->zero);
    if (t->has_train && s.data_fingerprint != t->train.fingerprint)
        die_alike(EXIT_DATA, "train_gpt.data.train: the files are not those that checkpoint %s was trained on; resume with the same files, or --export the model and start a new run with model.init_from", name);
    if (cfg->scheduler.last_batch_iteration != -1)
        die_alike(EXIT_CONFIG, "scheduler.params.last_batch_iteration = %" PRId64 ": a checkpoint was loaded, and it knows where the schedule is; remove the key, or say run.resume=none", cfg->scheduler.last_batch_iteration);
    note_changes(cfg, &s, name);
    if (s.seed != (uint64_t)cfg->run.seed) note("train_gpt.run.seed = %" PRId64 ": the checkpoint was trained with seed %" PRIu64 "; the order of shuffled data changes from here on", cfg->run.seed, s.seed);
    if (cfg->model.init_from[0] && !trainer_only_reads(cfg)) note("train_gpt.model.init_from has no effect: the weights come from checkpoint %s", name);
    if (!cfg->zero.load_from_fp32_weights) zero_masters_from_weights(&t->zero);
    t->step = s.step;
    t->tokens = s.tokens;
    t->samples = s.tokens / cfg->run.seq_len; // of the length that samples have from here on: the data goes on where it was
    t->opt.applied_updates = s.applied_updates;
    t->opt.skipped = s.skipped;
    t->opt.consecutive_skipped = s.consecutive_skipped;
    if (t->opt.scaler.dynamic) {
        t->opt.scaler.scale = s.loss_scale;
        t->opt.scaler.iteration = s.scaler_iteration;
        t->opt.scaler.last_overflow = s.scaler_last_overflow;
        t->opt.scaler.hysteresis_left = s.scaler_hysteresis_left;
    }
    free((char *)s.config);
    trainer_verify_loaded(t);
    if (t->grid.rank == 0 && !trainer_only_reads(cfg)) printf("resumed from %s: step %" PRId64 ", %" PRId64 " tokens\n", name, t->step, t->tokens);
    console_flush();
    return true;
}

// Ranks that have become slow, as rank 0 sees them; nobody is stopped for it.
static void note_stragglers(void) {
    for (WatchStraggler s; watch_straggler(&s);)
        note("rank %d on %s is slow: %.2f times the others' work time, %.1f ms lost an update", s.rank, s.host, s.ratio, 1e3 * s.lost_s);
}

static bool due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

// All ranks: the weights as a Hugging Face folder.
static void export_model(Trainer *t, const char *dir) {
    const ModelConfig *m = &t->model.c;
    if (t->grid.rank > 0) { zero_serve(&t->zero); return; }
    hf_export(dir, m, &t->model.table, t->model.dtype, trainer_weights_get, &t->zero);
    zero_ask(ASK_DONE, 0, 0);
    if (m->attention_window_size > 0 && m->attention_window_size < m->n_positions)
        note("sequence_parallel.attention_window_size = %" PRId64 ": a GPT-2 folder cannot say this; whoever loads %s elsewhere lets each token see all before it, and gets other results for longer texts", m->attention_window_size, dir);
    printf("exported to %s\n", dir);
}

// Gives way to a model of the same step that another training has left: its folder gets the first number that is free. Not 0 if that failed.
static int export_move_aside(const char *dir) {
    char aside[CONFIG_PATH_MAX + 96];
    int k = 1;
    do snprintf(aside, sizeof aside, "%s.%d", dir, k);
    while (access(aside, F_OK) == 0 && k++ < 1000000);
    if (rename(dir, aside) != 0) {
        note("%s is there from another training, and cannot be moved to %s: %s; this model is not exported, --export does it", dir, aside, strerror(errno));
        return 1;
    }
    note("%s was there from another training: now it is %s", dir, aside);
    return 0;
}

// zero_optimization.stage3_gather_16bit_weights_on_model_save: the model that a run ends with, unless it had ended so before.
static void export_last(Trainer *t, bool trained) {
    const ZeroConfig *zero = &t->cfg->zero;
    char dir[CONFIG_PATH_MAX + 64];
    if (zero->stage < 3 || !zero->gather_16bit_weights_on_model_save) return;
    snprintf(dir, sizeof dir, "%s/model-step-%08" PRId64, t->cfg->run.output_dir, t->step);
    double stays = access(dir, F_OK) == 0;
    if (t->grid.rank == 0 && stays > 0 && trained) stays = export_move_aside(dir);
    comm_host_broadcast(&stays, sizeof stays, 0);
    if (stays > 0) return;
    save_announce(t);
    export_model(t, dir);
}

// --generate and --export: the newest checkpoint, else the model that the configuration starts from.
static void run_reader(Trainer *t) {
    const Config *cfg = t->cfg;
    if (!trainer_load(t)) {
        if (!cfg->model.init_from[0])
            die_alike(EXIT_CHECKPOINT, "%s: there is no checkpoint in this run's folder and no train_gpt.model.init_from; train first, or name a model", cfg->generate ? "--generate" : "--export");
        trainer_init_weights(t);
    }
    if (cfg->export_dir[0]) export_model(t, cfg->export_dir);
    if (cfg->generate) generate_text(t, cfg->generate_prompt, cfg->run.sample_tokens > 0 ? cfg->run.sample_tokens : 256, (uint64_t)cfg->run.seed);
    output_flush();
}
