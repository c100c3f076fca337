// train_gpt.cu - the trainer: ./train_gpt -c ds_config.json [key=value ...]
//
// Start reading at the bottom: main, then train_step, which executes one update as a program of instructions, then
// forward_chunk and backward_chunk, which walk over the units of the model. Everything else hides behind six verbs:
//
//     zero_fetch, zero_release, zero_grad_begin, zero_grad_end   (zero.cu: where weights and gradients live)
//     acts_begin, acts_end                                       (acts.cu: where activations live)
//
// A feature enters through a row of a table, a schedule, a policy, or behind a verb; train_step stays as it is.

#include "runtime/utils.h"      // die, CHECK, note, safe files, rng_*
#include "runtime/tensor.h"     // Tensor, 16-bit floats
#include "runtime/device.h"     // memory, streams, events, copies
#include "dsconfig.h"           // Config, config_load
#include "kernels/kernels.h"    // the mathematics, cpu:: and cuda::
#include "runtime/dataloader.h" // DataLoader: shards, order of samples, prefetch
#include "runtime/tokenizer.h"  // Tokenizer: tokens to text and back
#include "runtime/metrics.h"    // console line and log.jsonl
#include "runtime/comm.h"       // groups and collectives
#include "runtime/watch.h"      // beat between the ranks, flight recorder, verdicts
#include "model.cu"             // ParamTable, ActTable, unit_forward, unit_backward
#include "zero.cu"              // sharded weights, gradients, optimizer states
#include "acts.cu"              // activation slots
#include "pipeline.cu"          // the program of one update
#include "optimizer.cu"         // update rules, schedules, loss scaling, clipping
#include "checkpoint.cu"        // save and resume
#include "huggingface.cu"       // import and export of model folders
#include <omp.h>
#include <sched.h>
#include <signal.h>

typedef struct {
    Config *cfg;
    ProcessGrid grid;
    Group gather_group, reduce_group; // the grid's zero ranks, as two channels
    Stream stream;
    Model model;
    Zero zero;
    ActStore acts;
    Pipeline pipe;
    int *train_uses, *eval_uses; // units in the order in which an update, or a forward pass, fetches them
    int n_train_uses, n_eval_uses;
    Optimizer opt;
    DataLoader train, val;
    bool has_train, has_val;
    Tokenizer tokenizer;
    Metrics metrics;
    CheckpointStore *store;  // null when this run does not save
    // Two staging buffers take turns, so that the host fills one while the other is still being copied.
    int32_t *staging[2];     // pinned, tokens then targets of one micro-batch
    Event staging_free[2];   // recorded when the copy from it is enqueued
    int64_t staged;          // micro-batches staged so far
    Event *mark;             // (pipe.n + 2): before the update, after each instruction, after the optimizer
    double *eval_sum;        // one double in the backend's memory
    int64_t step;            // updates done, skipped ones included
    int64_t tokens, samples; // consumed by them
    int64_t start_step;      // where this process began
    bool stop, save;         // some rank was asked to, as all ranks know since the last update
} Trainer;

// ---------------------------------------------------------------------------------------------------------------
// Signals. A handler sets a flag; the loop looks at it between updates.

static volatile sig_atomic_t stop_signal, save_signal;

static void on_stop_signal(int number) {
    if (stop_signal) _exit(128 + number); // the second one does not wait
    stop_signal = number;
}
static void on_save_signal(int number) { save_signal = number; }

static void signals_install(void) {
    struct sigaction stop = {}, save = {}, ignore = {};
    stop.sa_handler = on_stop_signal;
    save.sa_handler = on_save_signal;
    stop.sa_flags = save.sa_flags = SA_RESTART;
    ignore.sa_handler = SIG_IGN;
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    sigaction(SIGUSR2, &stop, NULL);
    sigaction(SIGUSR1, &save, NULL);
    sigaction(SIGPIPE, &ignore, NULL); // a reader that goes away must not end training
    sigaction(SIGXFSZ, &ignore, NULL); // a write past the limit returns an error instead
}

// Descriptors 0 to 2 exist, so that no checkpoint becomes descriptor 1 and receives what is printed.
static void descriptors_ensure(void) {
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", O_RDWR) != fd) _exit(EXIT_INTERNAL);
}

// mpirun ties each rank to one core unless it is told otherwise. That suits the CPU backend, where a rank computes on its
// core; a rank with a GPU has host work (initial weights, data, checkpoints) for its share of all cores.
static void cores_take_share(CommWorld world) {
    if (!KERNELS_ON_GPU || !getenv("OMPI_COMM_WORLD_SIZE")) return;
    cpu_set_t all;
    memset(&all, 0xff, sizeof all); // the kernel keeps those that this process may use
    if (sched_setaffinity(0, sizeof all, &all) != 0 || sched_getaffinity(0, sizeof all, &all) != 0) return;
    if (!getenv("OMP_NUM_THREADS")) omp_set_num_threads((int)max_i64(1, CPU_COUNT(&all) / world.local_world));
}

static bool trainer_only_reads(const Config *cfg) { return cfg->generate || cfg->export_dir[0]; }

// Connects the ranks' beats. The flight recorder lies in the output folder; runs that only read leave none.
static void watch_begin(const Config *cfg, CommWorld world) {
    char folder[CONFIG_PATH_MAX + 16];
    snprintf(folder, sizeof folder, "%s/flight", cfg->run.output_dir);
    WatchJob job;
    memset(&job, 0, sizeof job);
    job.rank = world.rank;
    job.world = world.world;
    job.one_host = world.local_world == world.world;
    job.flight_dir = trainer_only_reads(cfg) || world.world == 1 ? NULL : folder;
    job.limits = watch_default_limits((double)cfg->zero.timeout);
    if (job.flight_dir) make_folders(cfg->run.output_dir, "train_gpt.run.output_dir");
    WatchAddress address;
    memset(&address, 0, sizeof address);
    watch_prepare(&job, &address);
    comm_host_broadcast(&address, sizeof address, 0);
    watch_start(&address);
    watch_announce(WATCH_LOAD, 1800); // model, data, checkpoint: their times depend on sizes and disks
}

// ---------------------------------------------------------------------------------------------------------------
// Setting up

// What checkpoint.cu and huggingface.cu call on rank 0; kind 0 = masters, then the optimizer's states.
static void trainer_weights_get(void *zero, int row, float *values) { zero_ask_read(zero, row, STATE_MASTER, values); }
static void trainer_weights_put(void *zero, int row, const float *values) { zero_ask_write(zero, row, STATE_MASTER, values); }

static CheckpointTensors trainer_tensors(Trainer *t) {
    CheckpointTensors c;
    memset(&c, 0, sizeof c);
    c.table = &t->model.table;
    c.model = &t->model.c;
    c.n_kinds = 1 + t->zero.n_states;
    c.kind[0] = "master";
    for (int i = 0; i < t->zero.n_states; i++) c.kind[1 + i] = t->opt.rule->state_name[i];
    c.ctx = &t->zero;
    c.get = zero_ask_read;
    c.put = zero_ask_write;
    if (!trainer_only_reads(t->cfg)) return c;
    c.n_kinds = 1; // no optimizer here: whatever trained the model, its weights are enough
    c.get = NULL;
    return c;
}

// Where this run saves, and where it looks for something to resume from.
static const char *trainer_save_dir(const Config *cfg, char *room, size_t size) {
    if (cfg->checkpoint.save_dir[0]) return cfg->checkpoint.save_dir;
    snprintf(room, size, "%s/checkpoints", cfg->run.output_dir);
    return room;
}
static const char *trainer_load_dir(const Config *cfg, char *room, size_t size) {
    if (cfg->load_dir[0]) return cfg->load_dir;
    return cfg->checkpoint.load_path[0] ? cfg->checkpoint.load_path : trainer_save_dir(cfg, room, size);
}

// Completes the model's sizes from the folder that it starts from, and checks what only the whole can tell.
static void trainer_resolve_model(Config *cfg) {
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

static void trainer_open_data(Trainer *t) {
    const Config *cfg = t->cfg;
    const DataConfig *d = &cfg->data;
    int64_t V = cfg->model.vocab_size, T = cfg->run.seq_len;
    if (!d->train[0]) die_alike(EXIT_CONFIG, "train_gpt.data.train: no training data given; say data.train=FILE (a text file, or a glob of .bin token shards)");
    dataloader_open(&t->train, d->train, V, T, cfg->batch.train_batch_size, d->shuffle, cfg->batch.dataloader_drop_last, (uint64_t)cfg->run.seed, "train_gpt.data.train");
    t->has_train = true;
    if (!d->val[0]) return;
    dataloader_open(&t->val, d->val, V, T, 1, false, false, 0, "train_gpt.data.val");
    t->has_val = true;
}

static void print_table_row(const char *what, const char *format, ...) PRINTF_LIKE(2, 3);
static void print_table_row(const char *what, const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("  %-14s ", what);
    vprintf(format, args);
    putchar('\n');
    va_end(args);
}

static void trainer_print_start(const Trainer *t) {
    const Config *cfg = t->cfg;
    const ModelConfig *m = &t->model.c;
    DeviceInfo d = device_info();
    double mib = 1024.0 * 1024.0;
    printf("train_gpt\n");
    print_table_row("device", "%s, %.1f GiB%s", d.name, (double)d.memory_bytes / mib / 1024, d.is_gpu ? "" : " of memory");
    print_table_row("model", "%s: n_layer %" PRId64 ", n_head %" PRId64 ", n_embd %" PRId64 ", n_inner %" PRId64 ", vocab_size %" PRId64 " (padded %" PRId64 "), n_positions %" PRId64 "; %" PRId64 " parameters",
                    t->model.arch->name, m->n_layer, m->n_head, m->n_embd, m->n_inner, m->vocab_size, t->model.Vp, m->n_positions, table_param_count(&t->model.table));
    print_table_row("precision", "%s weights and activations, fp32 masters, gradients and optimizer states%s", dtype_name(t->model.dtype),
                    !cfg->fp16.enabled ? "" : t->opt.scaler.dynamic ? ", dynamic loss scale" : ", static loss scale");
    if (!trainer_only_reads(cfg)) {
        print_table_row("batch", "%" PRId64 " samples of %" PRId64 " tokens an update = %" PRId64 " micro-batches of %" PRId64, cfg->batch.train_batch_size, cfg->run.seq_len,
                        cfg->batch.gradient_accumulation_steps, cfg->batch.train_micro_batch_size_per_gpu);
        print_table_row("optimizer", "%s, lr %g, weight decay %g on matrices only, gradient clipping %g%s; ZeRO stage %d on %d rank%s", t->opt.rule->name, cfg->optimizer.lr,
                        cfg->optimizer.weight_decay, cfg->gradient_clipping, cfg->gradient_clipping > 0 ? "" : " (off)", t->zero.opt.stage, t->zero.gather_group.size, t->zero.gather_group.size == 1 ? "" : "s");
        print_table_row("data", "%" PRId64 " tokens, %" PRId64 " samples an epoch, %s", t->train.total_tokens, t->train.samples_per_epoch, cfg->data.shuffle ? "shuffled" : "in file order");
    }
    const Zero *z = &t->zero;
    print_table_row("memory (MiB)", "weights %.1f, masters %.1f, gradients %.1f, optimizer states %.1f, shared buffers %.1f, activations %.1f; allocated on the device %.1f", (double)z->param_bytes / mib,
                    (double)z->master_bytes / mib, (double)z->grad_bytes / mib, (double)z->state_bytes / mib, (double)z->buffer_bytes / mib, (double)t->acts.bytes / mib, (double)device_allocated_bytes() / mib);
    fflush(stdout);
}

// The units that one pass over the model fetches, appended to use[0..n); returns the new n.
static int list_pass(const ParamTable *table, bool forward, int *use, int n) {
    for (int i = 0; i < table->n_units; i++) n += zero_units_of(table, forward ? i : table->n_units - 1 - i, use + n);
    return n;
}

static void trainer_list_uses(Trainer *t) {
    const ParamTable *table = &t->model.table;
    size_t pass = sizeof(int) * 2 * (size_t)table->n_units; // a unit fetches at most itself and one that it is tied to
    t->eval_uses = (int *)host_alloc(pass);
    t->n_eval_uses = list_pass(table, true, t->eval_uses, 0);
    t->train_uses = (int *)host_alloc(pass * (size_t)t->pipe.n);
    for (int i = 0; i < t->pipe.n; i++)
        if (t->pipe.prog[i].op != OP_LOAD) t->n_train_uses = list_pass(table, t->pipe.prog[i].op == OP_FWD, t->train_uses, t->n_train_uses);
}

// Everything but data and files: what a test needs, too. with_backward false: for sampling and export.
static void trainer_init_core(Trainer *t, Config *cfg, ProcessGrid grid, bool with_backward, int64_t B) {
    memset(t, 0, sizeof *t);
    t->cfg = cfg;
    t->grid = grid;
    int *ranks = (int *)host_alloc(sizeof(int) * (size_t)grid.world);
    for (int r = 0; r < grid.world; r++) ranks[r] = grid.first_rank + r; // data parallelism is the only axis: everybody shares the weights
    t->gather_group = comm_group_create(ranks, grid.zero_size);
    t->reduce_group = comm_group_create(ranks, grid.zero_size);
    free(ranks);
    t->stream = stream_create();
    trainer_resolve_model(cfg);
    model_init(&t->model, &cfg->model, cfg->dtype, t->stream);
    pipeline_init(&t->pipe, (int)cfg->batch.gradient_accumulation_steps);
    ZeroOptions options = {(int)cfg->zero.stage, cfg->zero.reduce_bucket_size, cfg->zero.prefetch_bucket_size, cfg->zero.max_live_parameters,
                           cfg->zero.max_reuse_distance, cfg->zero.param_persistence_threshold, cfg->zero.overlap_comm};
    zero_init(&t->zero, &t->model, options, t->gather_group, t->reduce_group, optimizer_n_states(&cfg->optimizer), with_backward);
    trainer_list_uses(t);
    acts_init(&t->acts, &t->model, t->pipe.n_slots, B, cfg->run.seq_len, with_backward);
    optimizer_init(&t->opt, cfg, t->stream);
    for (int i = 0; i < 2; i++) {
        t->staging[i] = (int32_t *)pinned_malloc(2 * B * cfg->run.seq_len * 4);
        t->staging_free[i] = event_create();
    }
    t->mark = (Event *)host_alloc(sizeof(Event) * (size_t)(t->pipe.n + 2));
    for (int i = 0; i < t->pipe.n + 2; i++) t->mark[i] = event_create();
    t->eval_sum = (double *)device_malloc(sizeof(double));
}

static void trainer_init_weights(Trainer *t) {
    if (!t->cfg->model.init_from[0]) { zero_init_weights(&t->zero, (uint64_t)t->cfg->run.seed); return; }
    if (t->grid.rank > 0) { zero_serve(&t->zero); return; }
    hf_import(t->cfg->model.init_from, &t->model.c, &t->model.table, trainer_weights_put, &t->zero);
    zero_ask(ASK_DONE, 0, 0);
}

static void trainer_init(Trainer *t, Config *cfg, CommWorld world) {
    bool reads = trainer_only_reads(cfg);
    GridAxes axes = {1, world.world, 1, 1};
    trainer_resolve_model(cfg);
    device_init(world.local_rank);
    config_fit_device(cfg, device_info().compute_capability);
    trainer_init_core(t, cfg, grid_make(world.rank, axes), !reads, reads ? 1 : cfg->batch.train_micro_batch_size_per_gpu);
    tokenizer_open(&t->tokenizer, cfg->data.tokenizer, cfg->model.vocab_size);
    t->metrics.log_fd = -1;
    if (reads) return;
    trainer_open_data(t);
    if (t->grid.rank > 0) return; // rank 0 keeps the log and the checkpoints
    make_folders(cfg->run.output_dir, "train_gpt.run.output_dir");
    metrics_init(&t->metrics, cfg->run.output_dir, cfg->run.steps, cfg->steps_per_print, t->grid.world,
                 model_flops_per_token(&t->model, cfg->run.seq_len), t->model.dtype);
    char room[CONFIG_PATH_MAX + 16];
    t->store = checkpoint_open(trainer_save_dir(cfg, room, sizeof room), false);
}

static void trainer_free(Trainer *t) {
    if (t->has_train) dataloader_close(&t->train);
    if (t->has_val) dataloader_close(&t->val);
    if (t->store) checkpoint_close(t->store);
    tokenizer_close(&t->tokenizer);
    metrics_free(&t->metrics);
    for (int i = 0; i < 2; i++) {
        pinned_free(t->staging[i]);
        event_destroy(t->staging_free[i]);
    }
    for (int i = 0; i < t->pipe.n + 2; i++) event_destroy(t->mark[i]);
    free(t->mark);
    device_free(t->eval_sum);
    optimizer_free(&t->opt);
    acts_free(&t->acts);
    zero_free(&t->zero);
    pipeline_free(&t->pipe);
    model_free(&t->model);
    free(t->train_uses);
    free(t->eval_uses);
    comm_group_free(&t->gather_group);
    comm_group_free(&t->reduce_group);
    stream_destroy(t->stream);
}

// ---------------------------------------------------------------------------------------------------------------
// Forward and backward of the units of a chunk

// Copies n samples, from `first` on, into the slot; rows up to B that the set does not have are filled with tokens
// that carry no loss.
static void load_samples(Trainer *t, DataLoader *d, ActSlot *a, int64_t first, int64_t n, int64_t B) {
    int64_t T = t->cfg->run.seq_len, side = t->staged++ % 2;
    int32_t *tokens = t->staging[side], *targets = tokens + B * T;
    event_sync(t->staging_free[side]); // without it the host would overwrite tokens that are still being copied
    if (n > 0) dataloader_fetch(d, first, n, tokens, targets);
    for (int64_t i = n * T; i < B * T; i++) tokens[i] = 0, targets[i] = -1;
    a->B = B;
    a->T = T;
    device_copy(a->tokens, tokens, B * T * 4, COPY_TO_DEVICE, t->stream);
    device_copy(a->targets, targets, B * T * 4, COPY_TO_DEVICE, t->stream);
    event_record(t->staging_free[side], t->stream);
}

// Micro-batch mb of this update: samples of the global batch in order, the ranks' shares side by side.
static void load_micro_batch(Trainer *t, int mb, ActSlot *a) {
    int64_t B = t->cfg->batch.train_micro_batch_size_per_gpu, D = t->grid.zero_size;
    int64_t first = t->samples + (mb * D + t->grid.zero_rank) * B;
    load_samples(t, &t->train, a, first, B, B);
    dataloader_prefetch(&t->train, first + D * B, B);
    a->mode = FORWARD_TRAIN;
}

static void forward_chunk(Trainer *t, int chunk, ActSlot *a) {
    (void)chunk; // one stage: the chunk is the whole model
    for (int u = 0; u < t->model.table.n_units; u++) {
        Weights w = zero_fetch(&t->zero, u);
        Acts s = acts_begin(&t->acts, a, u);
        unit_forward(&t->model, u, &w, &s);
        if (s.act[ACT_LOSSES].data && a->mode == FORWARD_TRAIN)
            sum_to_double(&t->opt.sums[SUM_LOSS], s.act[ACT_LOSSES], true, t->stream);
        acts_end(&t->acts, a, u);
        zero_release(&t->zero, u);
    }
}

static void backward_chunk(Trainer *t, int chunk, ActSlot *a) {
    (void)chunk;
    for (int u = t->model.table.n_units - 1; u >= 0; u--) {
        Weights w = zero_fetch(&t->zero, u);
        Grads g = zero_grad_begin(&t->zero, u);
        Acts s = acts_begin(&t->acts, a, u);
        unit_backward(&t->model, u, &w, &g, &s);
        acts_end(&t->acts, a, u);
        zero_grad_end(&t->zero, u);
        zero_release(&t->zero, u);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// One update

// wall_clock_breakdown: where the time of the update that was just enqueued went. The host waits for its end.
static void measure_phases(Trainer *t, StepStats *s) {
    if (!t->cfg->wall_clock_breakdown) return;
    double ms[OP_BWD + 1] = {0};
    event_sync(t->mark[t->pipe.n + 1]);
    for (int i = 0; i < t->pipe.n; i++) ms[t->pipe.prog[i].op] += event_elapsed_ms(t->mark[i], t->mark[i + 1]);
    s->has_phases = true;
    s->load_ms = ms[OP_LOAD];
    s->forward_ms = ms[OP_FWD];
    s->backward_ms = ms[OP_BWD];
    s->update_ms = event_elapsed_ms(t->mark[t->pipe.n], t->mark[t->pipe.n + 1]);
}

static StepStats train_step(Trainer *t) {
    double start = clock_seconds(), waited = t->train.wait_seconds;
    int64_t n_tokens = t->cfg->batch.train_batch_size * t->cfg->run.seq_len;
    zero_set_uses(&t->zero, t->train_uses, t->n_train_uses);
    zero_begin_step(&t->zero);
    t->acts.dloss = (float)(t->opt.scaler.scale / (double)n_tokens); // the mean over the global batch, times the loss scale
    device_memset(&t->opt.sums[SUM_LOSS], 0, sizeof(double), t->stream);
    event_record(t->mark[0], t->stream);

    for (int i = 0; i < t->pipe.n; i++) {
        Instr in = t->pipe.prog[i];
        ActSlot *a = &t->acts.slot[in.mb % t->pipe.n_slots];
        watch_progress(t->step, in.mb, in.op == OP_LOAD ? WATCH_DATA : in.op == OP_FWD ? WATCH_FORWARD : WATCH_BACKWARD);
        switch (in.op) {
        case OP_LOAD: load_micro_batch(t, in.mb, a); break;
        case OP_FWD: forward_chunk(t, in.chunk, a); break;
        case OP_BWD:
            t->zero.last_micro_batch = in.mb == t->pipe.n_micro_batches - 1;
            backward_chunk(t, in.chunk, a);
            break;
        }
        event_record(t->mark[i + 1], t->stream);
    }
    watch_progress(t->step, t->pipe.n_micro_batches, WATCH_UPDATE);
    zero_finish_grads(&t->zero);
    OptimizerStats o = optimizer_step(&t->opt, &t->zero, n_tokens, t->step, stop_signal != 0, save_signal != 0);
    event_record(t->mark[t->pipe.n + 1], t->stream);

    StepStats s;
    memset(&s, 0, sizeof s);
    s.step = t->step++;
    t->tokens += n_tokens;
    t->samples += t->cfg->batch.train_batch_size;
    s.loss = o.loss_sum / (double)n_tokens;
    s.grad_norm = o.grad_norm;
    s.clip_factor = o.clip_factor;
    s.lr = o.lr;
    s.loss_scale = o.loss_scale;
    s.skipped = o.skipped;
    t->stop = o.stop;
    t->save = o.save;
    s.tokens = t->tokens;
    s.step_tokens = n_tokens;
    s.data_wait_ms = 1e3 * (t->train.wait_seconds - waited);
    measure_phases(t, &s);
    s.step_ms = 1e3 * (clock_seconds() - start);
    return s;
}

// ---------------------------------------------------------------------------------------------------------------
// Once in a while: evaluation, samples, checkpoints

// Mean loss over the first eval_batches micro-batches of each rank of the validation set (0 = all of it). The set is fixed,
// and nothing that training reads afterwards is touched: no gradient, no weight, no position in the training data. The
// ranks run equally many passes, whatever is left for the last one: a pass without samples computes, and counts nothing.
static double evaluate(Trainer *t) {
    int64_t B = t->cfg->batch.train_micro_batch_size_per_gpu, T = t->cfg->run.seq_len, D = t->grid.zero_size, samples = t->val.n_samples;
    if (t->cfg->run.eval_batches > 0) samples = min_i64(samples, t->cfg->run.eval_batches * B * D);
    ActSlot *a = &t->acts.slot[0];
    a->mode = FORWARD_EVAL;
    zero_set_uses(&t->zero, t->eval_uses, t->n_eval_uses);
    device_memset(t->eval_sum, 0, sizeof(double), t->stream);
    watch_announce(WATCH_EVALUATE, 600);
    for (int64_t pass = 0; pass < samples; pass += B * D) {
        watch_tick();
        int64_t first = min_i64(samples, pass + t->grid.zero_rank * B);
        load_samples(t, &t->val, a, first, min_i64(B, samples - first), B);
        forward_chunk(t, 0, a);
        Acts head = acts_begin(&t->acts, a, t->model.table.n_units - 1);
        sum_to_double(t->eval_sum, head.act[ACT_LOSSES], true, t->stream);
    }
    comm_all_reduce_double(t->reduce_group, t->eval_sum, 1, COMM_SUM, t->stream);
    double sum;
    device_copy(&sum, t->eval_sum, sizeof sum, COPY_TO_HOST, t->stream);
    stream_sync(t->stream);
    return sum / (double)(samples * T);
}

static void evaluate_and_log(Trainer *t) {
    char number[32];
    double start = clock_seconds(), loss = evaluate(t);
    if (t->grid.rank > 0) return;
    printf("step %6" PRId64 "/%" PRId64 "         | val loss %8.5f | %.1f s\n", t->step, t->cfg->run.steps, loss, clock_seconds() - start);
    fflush(stdout);
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

// Continues the prompt by n tokens and prints both. The text is a function of (weights, prompt, seed). Each token is a
// forward pass over the text so far, its length rounded up; beyond the model's positions the older half is forgotten.
static void generate_text(Trainer *t, const char *prompt, int64_t n, uint64_t seed) {
    int64_t T = t->cfg->run.seq_len, row_bytes = t->model.Vp * dtype_bytes(t->model.dtype);
    int64_t prompt_bytes = (int64_t)strlen(prompt);
    int32_t *text = (int32_t *)host_alloc((size_t)(prompt_bytes + 1 + T) * 4);
    void *logits = host_alloc((size_t)row_bytes);
    TokenText shown = {NULL, 0, 0}; // what is decoded and not printed yet
    int64_t length = prompt_encode(t, prompt, text);
    for (int64_t i = 0; i < length; i++) tokenizer_decode_append(&t->tokenizer, text[i], &shown);
    if (length == 0) text[length++] = t->tokenizer.end_of_text >= 0 ? t->tokenizer.end_of_text : (int32_t)min_i64('\n', t->model.V - 1);
    ActSlot *a = &t->acts.slot[0];
    a->mode = FORWARD_LOGITS;
    zero_set_uses(&t->zero, t->eval_uses, t->n_eval_uses);
    watch_announce(WATCH_SAMPLE, 600);
    int64_t from = max_i64(0, length - T); // the window starts here
    memmove(text, text + from, (size_t)(length - from) * 4);
    length -= from;
    for (int64_t k = 0; k < n && !(stop_signal && t->grid.world == 1); k++) {
        if (length == T) {
            length = max_i64(1, T / 2);
            memmove(text, text + T - length, (size_t)length * 4);
        }
        a->B = 1;
        a->T = min_i64(T, round_up(length, 32));
        for (int64_t i = length; i < a->T; i++) text[i] = 0; // causal attention: nothing before sees them
        device_copy(a->tokens, text, a->T * 4, COPY_TO_DEVICE, t->stream);
        forward_chunk(t, 0, a);
        Acts head = acts_begin(&t->acts, a, t->model.table.n_units - 1);
        device_copy(logits, (char *)head.act[ACT_LOGITS].data + (length - 1) * row_bytes, row_bytes, COPY_TO_HOST, t->stream);
        stream_sync(t->stream);
        text[length] = sample_token(logits, t->model.dtype, t->model.V, rng_uniform(seed, text_hash("sample"), (uint64_t)k));
        tokenizer_decode_append(&t->tokenizer, text[length++], &shown);
        if (t->grid.rank > 0) continue; // every rank computes and draws the same; one prints
        int64_t printed = tokenizer_print(stdout, shown.data, shown.length, k + 1 < n); // all but a character that is not whole yet
        memmove(shown.data, shown.data + printed, (size_t)(shown.length - printed));
        shown.length -= printed;
        fflush(stdout);
    }
    if (t->grid.rank == 0) putchar('\n');
    fflush(stdout);
    free(shown.data);
    free(text);
    free(logits);
}

static TrainingState trainer_state(const Trainer *t) {
    TrainingState s;
    memset(&s, 0, sizeof s);
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

// Saves; a failure warns and leaves the older checkpoints as they are, unless this is the last chance.
static void save(Trainer *t, bool last_chance) {
    watch_announce(WATCH_SAVE, 1800);
    if (t->grid.rank > 0) { zero_serve(&t->zero); return; }
    TrainingState state = trainer_state(t);
    CheckpointTensors tensors = trainer_tensors(t);
    SaveResult r = checkpoint_save(t->store, &state, &tensors, t->cfg->checkpoint.keep_n_most_recent, t->cfg->checkpoint.num_checkpoints_to_keep);
    zero_ask(ASK_DONE, 0, 0);
    metrics_log(&t->metrics, "{\"event\":\"checkpoint\",\"at_step\":%" PRId64 ",\"durable\":%s,\"bytes\":%" PRId64 ",\"seconds\":%.4f}", t->step, r.durable ? "true" : "false", r.bytes, r.seconds);
    if (r.durable) printf("step %6" PRId64 "/%" PRId64 "         | saved %s: %.1f MB in %.2f s\n", t->step, t->cfg->run.steps, r.name, (double)r.bytes / 1e6, r.seconds);
    else if (last_chance) die(EXIT_IO, "the last checkpoint, of step %" PRId64 ", could not be saved: %s; make room and resume from the checkpoint before it", t->step, r.why);
    else if (t->store->failed_in_a_row >= 3) die(EXIT_IO, "three checkpoints in a row could not be saved, the last one of step %" PRId64 ": %s; make room and resume from the newest one", t->step, r.why);
    else note("the checkpoint of step %" PRId64 " could not be saved: %s; earlier ones are intact, training goes on", t->step, r.why);
    fflush(stdout);
}

// Loads the checkpoint that the configuration asks for; false when `auto` finds none. Rank 0 reads, all learn.
static bool trainer_load(Trainer *t) {
    const Config *cfg = t->cfg;
    const char *which = cfg->load_tag[0] ? cfg->load_tag : cfg->run.resume;
    char room[CONFIG_PATH_MAX + 16], name[CONFIG_NAME_MAX] = "";
    if (strcmp(which, "none") == 0) return false;
    TrainingState s;
    double found = 0;
    const char *dir = trainer_load_dir(cfg, room, sizeof room);
    if (access(dir, F_OK) != 0 && (cfg->load_dir[0] || cfg->checkpoint.load_path[0]))
        die_alike(EXIT_CHECKPOINT, "%s = %s: %s; name a folder with checkpoints", cfg->load_dir[0] ? "--load_dir" : "checkpoint.load_path", dir, strerror(errno));
    if (t->grid.rank > 0) zero_serve(&t->zero);
    else {
        CheckpointTensors tensors = trainer_tensors(t);
        found = checkpoint_load(dir, which, &s, &tensors, name, sizeof name);
        zero_ask(ASK_DONE, 0, 0);
    }
    comm_host_broadcast(&found, sizeof found, 0);
    if (found == 0) return false;
    comm_host_broadcast(&s, sizeof s, 0);
    if (t->has_train && s.data_fingerprint != t->train.fingerprint)
        die_alike(EXIT_DATA, "train_gpt.data.train: the files are not those that checkpoint %s was trained on; resume with the same files, or --export the model and start a new run with model.init_from", name);
    if (cfg->scheduler.last_batch_iteration != -1)
        die_alike(EXIT_CONFIG, "scheduler.params.last_batch_iteration = %" PRId64 ": a checkpoint was loaded, and it knows where the schedule is; remove the key, or say run.resume=none", cfg->scheduler.last_batch_iteration);
    t->step = s.step;
    t->tokens = s.tokens;
    t->samples = s.data_samples;
    t->opt.applied_updates = s.applied_updates;
    t->opt.skipped = s.skipped;
    t->opt.consecutive_skipped = s.consecutive_skipped;
    if (t->opt.scaler.dynamic) {
        t->opt.scaler.scale = s.loss_scale;
        t->opt.scaler.iteration = s.scaler_iteration;
        t->opt.scaler.last_overflow = s.scaler_last_overflow;
        t->opt.scaler.hysteresis_left = s.scaler_hysteresis_left;
    }
    if (t->grid.rank == 0) printf("resumed from %s: step %" PRId64 ", %" PRId64 " tokens\n", name, t->step, t->tokens);
    return true;
}

static bool due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

// --generate and --export: the newest checkpoint, else the model that the configuration starts from.
static void run_reader(Trainer *t) {
    const Config *cfg = t->cfg;
    if (!trainer_load(t)) {
        if (!cfg->model.init_from[0])
            die_alike(EXIT_CHECKPOINT, "%s: there is no checkpoint in this run's folder and no train_gpt.model.init_from; train first, or name a model", cfg->generate ? "--generate" : "--export");
        trainer_init_weights(t);
    }
    if (cfg->export_dir[0] && t->grid.rank > 0) zero_serve(&t->zero);
    else if (cfg->export_dir[0]) {
        hf_export(cfg->export_dir, &t->model.c, &t->model.table, t->model.dtype, trainer_weights_get, &t->zero);
        zero_ask(ASK_DONE, 0, 0);
        printf("exported to %s\n", cfg->export_dir);
    }
    if (cfg->generate) generate_text(t, cfg->generate_prompt, cfg->run.sample_tokens > 0 ? cfg->run.sample_tokens : 256, (uint64_t)cfg->run.seed);
}

// ---------------------------------------------------------------------------------------------------------------
// The main loop

static void train(Trainer *t) {
    const RunConfig *run = &t->cfg->run;
    int64_t saved_at = -1;
    if (trainer_load(t)) saved_at = t->step;
    else trainer_init_weights(t);
    t->start_step = t->step;
    if (run->sample_every > 0) { // a prompt that cannot be encoded is refused now, not at the first sample
        int32_t *tokens = (int32_t *)host_alloc((strlen(run->sample_prompt) + 1) * 4);
        prompt_encode(t, run->sample_prompt, tokens);
        free(tokens);
    }
    double start = clock_seconds();
    metrics_log(&t->metrics, "{\"event\":\"start\",\"at_step\":%" PRId64 ",\"parameters\":%" PRId64 ",\"seed\":%" PRId64 "}", t->step, table_param_count(&t->model.table), run->seed);
    if (t->step >= run->steps) note("train_gpt.run.steps = %" PRId64 ": step %" PRId64 " is reached already; raise it to go on", run->steps, t->step);

    while (t->step < run->steps && !t->stop) {
        // once in a while: evaluate on the fixed set
        if (t->has_val && due(t->step, run->eval_every)) evaluate_and_log(t);

        // the update itself
        StepStats s = train_step(t);
        if (t->grid.rank == 0) metrics_step(&t->metrics, &s);

        // once in a while: show what the model writes
        if (due(t->step, run->sample_every)) generate_text(t, run->sample_prompt, run->sample_tokens, (uint64_t)(run->seed + t->step));

        // once in a while, or on SIGUSR1: save
        if (due(t->step, run->checkpoint_every) || t->save) {
            save(t, false);
            saved_at = t->step;
            save_signal = 0;
        }
    }
    if (t->stop && t->grid.rank == 0) printf("signal %s: update %" PRId64 " is finished, saving\n", stop_signal ? strsignal(stop_signal) : "to another rank", t->step);
    if (!t->stop && t->has_val && run->eval_every > 0) evaluate_and_log(t);
    if (saved_at != t->step) save(t, true);
    if (t->grid.rank > 0) return;

    char time[32];
    double seconds = clock_seconds() - start;
    metrics_log(&t->metrics, "{\"event\":\"%s\",\"at_step\":%" PRId64 ",\"tokens\":%" PRId64 ",\"skipped\":%" PRId64 ",\"seconds\":%.3f}", t->stop ? "stopped" : "done", t->step, t->tokens, t->opt.skipped, seconds);
    printf("%s: %" PRId64 " updates in %s, %" PRId64 " tokens (%.2f epochs), %" PRId64 " updates skipped; log %s\n", t->stop ? "stopped, resume with the same command" : "done",
           t->step - t->start_step, duration_text(time, sizeof time, seconds), t->tokens, (double)t->samples / (double)t->train.samples_per_epoch, t->opt.skipped, t->metrics.log_path);
}

#ifndef TESTING
int main(int argc, char **argv) {
    descriptors_ensure();
    signals_install();
    watch_arm(60);
    CommWorld world = comm_start();
    message_rank = world.rank;
    cores_take_share(world);
    Config *cfg = config_load(argc, argv); // JSON to structs, or the list of what is wrong and exit 2
    if (cfg->world != world.world)
        die_alike(EXIT_CONFIG, "the launcher started %" PRId64 " ranks, but this binary was built without MPI or NCCL and runs one; install them (make install-deps), build again, or start one process", cfg->world);
    watch_begin(cfg, world);
    Trainer t;
    trainer_init(&t, cfg, world);          // tables, shards, slots, program, in that order
    if (world.rank == 0) trainer_print_start(&t);
    if (trainer_only_reads(cfg)) run_reader(&t);
    else train(&t);
    trainer_free(&t);
    free(cfg);
    comm_finish();
    watch_goodbye();
    return EXIT_OK;
}
#endif
