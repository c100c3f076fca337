// trainer.cu - the Trainer: everything that a run owns, how it is set up and taken down.
//
// All state hangs from the Trainer; nothing here is global but the flags that signal handlers set. trainer_init_core makes
// what a test needs, trainer_init adds data, log and checkpoints. Read next: train_gpt.cu, which uses it.
#pragma once
#include "runtime/utils.h"      // die, CHECK, note, safe files, rng_*
#include "runtime/tensor.h"     // Tensor, 16-bit floats
#include "runtime/device.h"     // memory, streams, events, copies
#include "dsconfig.h"           // Config, config_load
#include "runtime/product_cache.h" // where the search for products keeps what it found
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
#include "replicas.cu"          // are the ranks' copies of the weights equal?
#include "checkpoint.cu"        // save and resume
#include "huggingface.cu"       // import and export of model folders
#include "planner.cu"           // memory by kind, before it is allocated
#include <omp.h>
#include <sched.h>
#include <signal.h>

typedef struct {
    Config *cfg;
    ProcessGrid grid;
    GridGroups groups;
    Stream stream;
    Model model;
    Zero zero;
    ActStore *acts;          // by chunk of this stage
    MemoryUse planned, planned_host; // for this rank, of the device and of host memory
    Pipeline pipe;
    double ideal_bubble;     // of the schedule, by operations
    double busy_ms, pipeline_ms; // of the update before, with several stages: what this rank computed, and the time until all stages were through
    PipelineLinks links;
    int *train_uses, *eval_uses; // units in the order in which an update, or a forward pass, fetches them
    int n_train_uses, n_eval_uses;
    Optimizer opt;
    Replicas replicas;
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
    double loss, grad_norm;  // of the last update of this process
    double config_digest;    // see RankState
    char *config_text;       // see TrainingState
    double setup_seconds;    // that trainer_init took
    bool stop, save;         // some rank was asked to, as all ranks know since the last update
    bool written;            // all ranks have done their part of the save in the background, likewise
} Trainer;

#include "trainer_agree.cu"

// ---------------------------------------------------------------------------------------------------------------
// Setting up

// What huggingface.cu calls on rank 0.
static void trainer_weights_get(void *zero, int row, float *values) { zero_ask_read(zero, row, STATE_MASTER, values); }
static void trainer_weights_put(void *zero, int row, const float *values) { zero_ask_write(zero, row, STATE_MASTER, values); }

// What checkpoint.cu calls on every rank; kind 0 = masters, then the optimizer's states.
static void trainer_owned(void *zero, int row, int64_t *first, int64_t *last) { zero_row_owned((Zero *)zero, &((Zero *)zero)->model->table.row[row], first, last); }
static void trainer_needed(void *zero, int row, int64_t *first, int64_t *last) { zero_row_range((Zero *)zero, &((Zero *)zero)->model->table.row[row], first, last); }
static void trainer_values_get(void *zero, int row, int kind, int64_t first, int64_t n, float *values) { zero_range_read((Zero *)zero, row, (StateKind)kind, first, n, values); }
static void trainer_values_put(void *zero, int row, int kind, int64_t first, int64_t n, const float *values) { zero_range_write((Zero *)zero, row, (StateKind)kind, first, n, values); }

// CheckpointPeers.gather by a sum over the job, to which each rank gives its words of 32 bits as doubles, which hold them, and zeros
// for the others. A grid smaller than the job hears its own ranks.
static void trainer_gather(void *grid, const void *mine, int64_t bytes, void *all) {
    const ProcessGrid *g = (const ProcessGrid *)grid;
    double job = 1;
    int64_t words = ceil_div(bytes, 4);
    comm_host_all_reduce(&job, 1, COMM_SUM); // ranks of the job
    double *sum = (double *)host_alloc(sizeof(double) * (size_t)words * (size_t)job);
    for (int64_t i = 0; i < words; i++) {
        uint32_t word = 0;
        memcpy(&word, (const char *)mine + 4 * i, (size_t)min_i64(4, bytes - 4 * i));
        sum[(g->first_rank + g->rank) * words + i] = word;
    }
    comm_host_all_reduce(sum, (int)(words * (int64_t)job), COMM_SUM);
    for (int64_t r = 0; r < g->world; r++)
        for (int64_t i = 0; i < words; i++) {
            uint32_t word = (uint32_t)sum[(g->first_rank + r) * words + i];
            memcpy((char *)all + r * bytes + 4 * i, &word, (size_t)min_i64(4, bytes - 4 * i));
        }
    free(sum);
}

static void trainer_values_keep(void *zero, int row, int kind, int64_t first, int64_t n, void *kept) { zero_range_keep((Zero *)zero, row, (StateKind)kind, first, n, kept); }
static void trainer_keep_end(void *zero) { zero_keep_end((Zero *)zero); }
static void trainer_kept_get(void *zero, int row, int kind, int64_t n, const void *kept, int64_t from, int64_t count, float *values) { (void)row, zero_kept_get((Zero *)zero, (StateKind)kind, n, kept, from, count, values); }

static CheckpointPeers trainer_peers(Trainer *t) {
    CheckpointPeers p = {t->grid.rank, t->grid.world, trainer_gather, &t->grid};
    return p;
}

static CheckpointTensors trainer_tensors(Trainer *t) {
    CheckpointTensors c;
    memset(&c, 0, sizeof c);
    c.table = &t->model.table;
    c.model = &t->model.c;
    c.n_kinds = 1 + t->zero.n_states;
    c.kind[0] = "master";
    for (int i = 0; i < t->zero.n_states; i++) c.kind[1 + i] = t->opt.rule->state_name[i];
    c.ctx = &t->zero;
    c.owned = trainer_owned;
    c.needed = trainer_needed;
    c.get = trainer_values_get;
    c.put = trainer_values_put;
    c.keep = trainer_values_keep;
    c.keep_end = trainer_keep_end;
    c.kept_get = trainer_kept_get;
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
static bool holds_checkpoints(const char *dir) {
    StepList steps = {};
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool holds = fd >= 0 && (faccessat(fd, MANIFEST_FILE, F_OK, 0) == 0 || (steps_list(fd, &steps) && steps.n > 0));
    if (fd >= 0) close(fd);
    free(steps.step);
    return holds;
}
// A run's output folder stands for its checkpoints, as for --inspect.
static const char *trainer_load_dir(const Config *cfg, char *room, size_t size) {
    const char *given = cfg->load_dir[0] ? cfg->load_dir : cfg->checkpoint.load_path;
    if (!given[0]) return trainer_save_dir(cfg, room, size);
    char renamed[CHECKPOINT_NAME_MAX];
    snprintf(room, size, "%s/checkpoints", given);
    checkpoint_renamed(room, renamed);
    return !holds_checkpoints(given) && (holds_checkpoints(room) || renamed[0]) ? room : given;
}

static void trainer_open_data(Trainer *t) {
    const Config *cfg = t->cfg;
    const DataConfig *d = &cfg->data;
    int64_t V = cfg->model.vocab_size, T = cfg->run.seq_len;
    if (!d->train[0]) die_alike(EXIT_CONFIG, "train_gpt.data.train: no training data given; say data.train=FILE (a text file, or a glob of .bin token shards)");
    dataloader_open(&t->train, d->train, V, T, cfg->batch.train_batch_size, d->shuffle, cfg->batch.dataloader_drop_last, (uint64_t)cfg->run.seed, "train_gpt.data.train");
    t->has_train = true;
    ranks_agree((double)(t->train.fingerprint >> 12), "train_gpt.data.train: the ranks see different files at this path; give all hosts the same data");
    if (!d->val[0]) return;
    dataloader_open(&t->val, d->val, V, T, 0, false, false, 0, "train_gpt.data.val");
    t->has_val = true;
}

#include "trainer_tell.cu"

// The units that one pass over the model fetches, appended to use[0..n); returns the new n.
static int list_pass(const ParamTable *table, const ActVisit *visit, int n_visits, int *use, int n) {
    for (int i = 0; i < n_visits; i++) n += zero_units_of(table, visit[i].unit, use + n);
    return n;
}

static void trainer_list_uses(Trainer *t) {
    const ParamTable *table = &t->model.table;
    size_t pass = sizeof(int) * 4 * (size_t)table->n_units; // a unit fetches at most itself and one that it is tied to, and goes forward again at most once
    t->eval_uses = (int *)host_alloc(pass * (size_t)t->pipe.n_chunks);
    for (int c = 0; c < t->pipe.n_chunks; c++) t->n_eval_uses = list_pass(table, t->acts[c].forward, t->acts[c].n_forward, t->eval_uses, t->n_eval_uses);
    t->train_uses = (int *)host_alloc(pass * (size_t)t->pipe.n);
    for (int i = 0; i < t->pipe.n; i++) {
        const ActStore *a = &t->acts[t->pipe.prog[i].chunk];
        if (t->pipe.prog[i].op == OP_FWD) t->n_train_uses = list_pass(table, a->forward, a->n_forward, t->train_uses, t->n_train_uses);
        if (t->pipe.prog[i].op == OP_BWD) t->n_train_uses = list_pass(table, a->backward, a->n_backward, t->train_uses, t->n_train_uses);
    }
}

// Refuses, before anything is allocated, what some rank's device has no room for.
static void memory_must_fit(const Trainer *t) {
    const double gib = 1024.0 * 1024 * 1024;
    const int64_t *b = t->planned.bytes;
    DeviceInfo d = device_info();
    double planned = (double)memory_total(&t->planned), room = (double)(d.is_gpu ? device_free_bytes() : d.memory_bytes - device_allocated_bytes());
    comm_host_all_reduce(&room, 1, COMM_MIN);
    if (planned > room)
        die_alike(EXIT_CONFIG, "out of memory: a rank needs %.2f GiB (weights %.2f, masters %.2f, gradients %.2f, optimizer states %.2f, buffers %.2f, activations %.2f, scratch %.2f), and %.2f are free; "
                  "lower train_micro_batch_size_per_gpu or run.seq_len or set activation_checkpointing.policy (activations), or raise zero_optimization.stage and the number of ranks (the others); --plan shows what that brings", planned / gib, (double)b[MEMORY_WEIGHTS] / gib,
                  (double)b[MEMORY_MASTERS] / gib, (double)b[MEMORY_GRADIENTS] / gib, (double)b[MEMORY_OPTIMIZER_STATES] / gib, (double)b[MEMORY_BUFFERS] / gib, (double)b[MEMORY_ACTIVATIONS] / gib, (double)b[MEMORY_SCRATCH] / gib, room / gib);
}

// Of a unit: forward; backward of the first micro-batch of an update and of the others; evaluation; the same in other buffers of a pool.
enum { GRAPHS_PER_UNIT = 8 };

// What the ranks of a host would take of its memory.
typedef struct {
    int ranks;              // of this rank's host
    double each, together;  // bytes: of this rank, and of these
    int64_t limit, available;
    bool fits;              // on all hosts
} HostMemory;

// All ranks call it.
static HostMemory host_memory_wanted(const Trainer *t) {
    HostMemory h;
    char name[64] = "";
    const int world = t->grid.world, rank = t->grid.rank;
    double *all = (double *)host_alloc(sizeof(double) * 2 * (size_t)world), lack;
    memset(&h, 0, sizeof h);
    h.each = (double)memory_total(&t->planned_host) + (KERNELS_ON_GPU ? 0 : (double)memory_total(&t->planned));
    gethostname(name, sizeof name - 1);
    all[2 * rank] = (double)(text_hash(name) >> 12);
    all[2 * rank + 1] = h.each;
    comm_host_all_reduce(all, 2 * world, COMM_SUM);
    for (int r = 0; r < world; r++) if (all[2 * r] == all[2 * rank]) h.together += all[2 * r + 1], h.ranks++;
    free(all);
    host_memory_now(&h.limit, &h.available);
    lack = h.together - (double)h.available;
    comm_host_all_reduce(&lack, 1, COMM_MAX);
    h.fits = lack <= 0;
    return h;
}

// Saves in the background need room for a copy. Where some host has none, they are made between updates.
static void copy_must_fit(Trainer *t) {
    const double gib = 1024.0 * 1024 * 1024;
    int64_t without;
    if (!t->cfg->checkpoint.decoupled) return;
    HostMemory h = host_memory_wanted(t);
    if (h.fits) return;
    t->cfg->checkpoint.decoupled = false;
    MemoryUse rest;
    plan_memory(t->cfg, &t->model, t->grid, &t->pipe, t->groups.reduce.direct, 1, true, &rest);
    without = rest.bytes[MEMORY_BUFFERS];
    if (t->grid.rank == 0)
        note("checkpoint.writer.decoupled = true: the copies that it writes from take %.2f GiB of host memory a rank, and of the %.2f GiB that a host has available %d rank%s already need%s %.2f; training waits for its checkpoints instead",
             (double)(t->planned_host.bytes[MEMORY_BUFFERS] - without) / gib, (double)h.available / gib, h.ranks, h.ranks == 1 ? "" : "s", h.ranks == 1 ? "s" : "",
             (h.together - (double)h.ranks * (double)(t->planned_host.bytes[MEMORY_BUFFERS] - without)) / gib);
    t->planned_host.bytes[MEMORY_BUFFERS] = without;
}

// Refuses, before any of it is touched, what the ranks of some host would offload beyond that host's memory: the kernel lets a
// process have pages that are not there, and ends it when it uses them.
static void host_memory_must_fit(const Trainer *t) {
    const double gib = 1024.0 * 1024 * 1024;
    char kinds[256];
    double asked = (double)memory_total(&t->planned_host);
    comm_host_all_reduce(&asked, 1, COMM_MAX);
    if (asked == 0) return;
    HostMemory h = host_memory_wanted(t);
    if (!h.fits)
        die_alike(EXIT_CONFIG, "out of host memory: %d rank%s of a host need%s %.2f GiB together (each %.2f: %s%s), and %.2f of %.2f are available (the least of machine and container); "
                  "lower zero_optimization.offload_optimizer.ratio or activation_checkpointing.number_checkpoints, take data_types.grad_accum_dtype = bf16, or more hosts; --plan shows what that brings", h.ranks, h.ranks == 1 ? "" : "s", h.ranks == 1 ? "s" : "", h.together / gib, h.each / gib,
                  plan_host_text(kinds, sizeof kinds, &t->planned_host), KERNELS_ON_GPU ? "" : ", and what the device would hold", (double)h.available / gib, (double)h.limit / gib);
}

static void trainer_begin(Trainer *t, Config *cfg, ProcessGrid grid) {
    memset(t, 0, sizeof *t);
    t->cfg = cfg;
    t->grid = grid;
}

// Everything but data and files. with_backward false: for sampling and export.
static void trainer_build(Trainer *t, bool with_backward, int64_t B) {
    Config *cfg = t->cfg;
    const ProcessGrid grid = t->grid;
    t->ideal_bubble = plan_pipeline(cfg, &cfg->model, grid, &t->pipe);
    int *stage = plan_unit_stages(&t->pipe), last = t->pipe.first[pipeline_last(&t->pipe) + 1] - 1;
    t->groups = groups_create(grid, 0, cfg->model.tie_word_embeddings ? stage[last] : 0, cfg->zero.direct_exchange);
    links_create(&t->links, &t->pipe, &grid);
    t->stream = stream_create();
    char products[4096];
    matmul_search(cfg->run.matmul_search, product_cache_path(products, sizeof products, cfg->run.matmul_cache));
    model_init(&t->model, &cfg->model, plan_part(grid, stage), cfg->dtype, cfg->run.logits_bytes, cfg->run.gelu_apart, t->stream);
    t->model.tp = t->groups.tp;
    t->model.sp = t->groups.sp;
    tp_overlap_init(&t->model.overlap, plan_pieces(cfg, grid.size));
    free(stage);
    int graphs = 0;
    for (int c = 0; c < t->pipe.n_chunks; c++) graphs += GRAPHS_PER_UNIT * t->pipe.n_slots[c] * t->model.table.n_units / grid.size.pp;
    if (cfg->run.cuda_graphs && grid.size.tp * grid.size.sp == 1) t->model.graphs = graphs_create(t->stream, graphs);
    t->model.deterministic = cfg->run.deterministic;
    t->planned = plan_memory(cfg, &t->model, grid, &t->pipe, t->groups.reduce.direct, B, with_backward, &t->planned_host);
    memory_must_fit(t);
    copy_must_fit(t);
    host_memory_must_fit(t);
    scratch_reserve(plan_scratch_bytes(&t->model, B, cfg->run.seq_len), t->stream);
    ZeroOptions options = zero_options(&cfg->zero);
    options.split_backward = t->pipe.split_w;
    zero_init(&t->zero, &t->model, options, &t->groups, optimizer_n_states(&cfg->optimizer), with_backward);
    ActLayout *layout = (ActLayout *)host_alloc(sizeof(ActLayout) * (size_t)t->pipe.n_chunks);
    t->acts = (ActStore *)host_alloc(sizeof(ActStore) * (size_t)t->pipe.n_chunks);
    plan_acts(cfg, &t->model, &t->pipe, B, with_backward, layout);
    for (int c = 0; c < t->pipe.n_chunks; c++) acts_init(&t->acts[c], layout[c], t->acts, cfg->activation_checkpointing.profile, cfg->activation_checkpointing.synchronize_checkpoint_boundary);
    free(layout);
    trainer_list_uses(t);
    optimizer_init(&t->opt, cfg, t->model.table.n_units, t->stream);
    for (int i = 0; i < 2; i++) {
        t->staging[i] = (int32_t *)pinned_malloc(2 * B * cfg->run.seq_len * 4);
        t->staging_free[i] = event_create();
    }
    t->mark = (Event *)host_alloc(sizeof(Event) * (size_t)(t->pipe.n + 2));
    for (int i = 0; i < t->pipe.n + 2; i++) t->mark[i] = event_create();
    t->eval_sum = (double *)device_malloc(sizeof(double));
}

// What a test needs. cfg is resolved.
static void trainer_init_core(Trainer *t, Config *cfg, ProcessGrid grid, bool with_backward, int64_t B) {
    trainer_begin(t, cfg, grid);
    trainer_build(t, with_backward, B);
}

static void trainer_init_weights(Trainer *t) {
    watch_announce(WATCH_LOAD, seconds_for_bytes(4 * table_param_count(&t->model.table)));
    if (!t->cfg->model.init_from[0]) { zero_init_weights(&t->zero, (uint64_t)t->cfg->run.seed); return; }
    if (t->grid.rank > 0) { zero_serve(&t->zero); return; }
    hf_import(t->cfg->model.init_from, &t->model.c, &t->model.table, trainer_weights_put, &t->zero);
    zero_ask(ASK_DONE, 0, 0);
}

// All ranks save, into a folder that rank 0 locks; rank 0 keeps the log.
static void trainer_open_files(Trainer *t) {
    const Config *cfg = t->cfg;
    char room[CONFIG_PATH_MAX + 16];
    CheckpointPeers peers = trainer_peers(t);
    if (t->grid.rank == 0) make_folders(cfg->run.output_dir, "train_gpt.run.output_dir");
    t->store = checkpoint_open(&peers, trainer_save_dir(cfg, room, sizeof room), false);
    CheckpointTensors tensors = trainer_tensors(t);
    if (cfg->checkpoint.decoupled) checkpoint_copy_alloc(t->store, &tensors);
    checkpoint_space_note(t->store, &tensors, cfg->checkpoint.num_checkpoints_to_keep);
    if (t->grid.rank > 0) return;
    metrics_init(&t->metrics, cfg->run.output_dir, cfg->run.steps, cfg->steps_per_print, t->grid.world,
                 model_flops_per_token(&t->model, cfg->run.seq_len), t->model.dtype);
}

static void trainer_init(Trainer *t, Config *cfg, CommWorld world) {
    const bool reads = trainer_only_reads(cfg);
    const double start = clock_seconds();
    const ParallelConfig *p = &cfg->parallel;
    GridAxes axes = {(int)p->pipeline, (int)p->data, (int)p->sequence, (int)p->tensor};
    resolve_model(cfg);
    trainer_begin(t, cfg, grid_make(world.rank, axes));
    tokenizer_open(&t->tokenizer, cfg->data.tokenizer, cfg->model.vocab_size);
    if (!reads) trainer_open_data(t); // what the data cannot give is said before memory is taken and the fastest products are searched for
    device_init(world.local_rank);
    config_fit_device(cfg, device_info().compute_capability);
    if (!reads) config_fit_channels(cfg, layernorm_backward_channels_max(false), false);
    trainer_build(t, !reads, reads ? 1 : cfg->batch.train_micro_batch_size_per_gpu);
    t->config_digest = config_digest(cfg);
    t->config_text = config_text(cfg);
    t->metrics.log_fd = -1;
    if (reads) return;
    trainer_open_files(t);
    double claimed = 1;
    comm_host_broadcast(&claimed, sizeof claimed, 0); // the folder's lock is ours: another run's recorders are not touched before
    if (t->grid.world > 1) make_folders(cfg->run.output_dir, "train_gpt.run.output_dir"); // hosts may have folders of their own
    watch_record();
    t->setup_seconds = clock_seconds() - start;
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
    replicas_free(&t->replicas);
    for (int c = t->pipe.n_chunks - 1; c >= 0; c--) acts_free(&t->acts[c]);
    free(t->acts);
    zero_free(&t->zero);
    links_free(&t->links);
    pipeline_free(&t->pipe);
    graphs_free(t->model.graphs);
    tp_overlap_free(&t->model.overlap);
    model_free(&t->model);
    free(t->config_text);
    free(t->train_uses);
    free(t->eval_uses);
    groups_free(&t->groups);
    scratch_release(t->stream);
    stream_destroy(t->stream);
}
