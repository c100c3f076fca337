// trainer.cu - the Trainer: everything that a run owns, how it is set up and taken down.
//
// All state hangs from the Trainer; nothing here is global but the flags that signal handlers set. trainer_init_core makes
// what a test needs, trainer_init adds data, log and checkpoints. Read next: train_gpt.cu, which uses it.
#pragma once
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
    double busy_ms, pipeline_ms; // of the update before, with several stages: what this rank's took, and the time from its begin to its end
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
    bool stop, save;         // some rank was asked to, as all ranks know since the last update
    bool written;            // all ranks have done their part of the save in the background, likewise
} Trainer;

// ---------------------------------------------------------------------------------------------------------------
// Signals. A handler sets a flag; the loop looks at it between updates.

static volatile sig_atomic_t stop_signal, save_signal;

static void on_stop_signal(int number) {
    static time_t first; // wrappers such as timeout(1) signal the process and then its group: that counts once
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (stop_signal && now.tv_sec - first < 2) return;
    if (!stop_signal) first = now.tv_sec;
    if (stop_signal) { // the second one does not wait
        watch_last_words(128 + number, "stopped by a second signal");
        _exit(128 + number);
    }
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

// Dies on all ranks if a number differs between them.
static void ranks_agree(double value, const char *otherwise) {
    double least = value, most = value;
    comm_host_all_reduce(&least, 1, COMM_MIN);
    comm_host_all_reduce(&most, 1, COMM_MAX);
    if (least != most) die_alike(EXIT_CONFIG, "%s", otherwise);
}

// 52 bits of a hash of a key's effective value; 0 if it has none.
static double config_value_hash(const Config *cfg, int key) {
    if (!config_in_table(cfg, key)) return 0;
    char *value = (char *)host_alloc(CONFIG_SHOWN_MAX);
    uint64_t hash = text_hash(config_show_field(cfg, &config_keys[key], value, CONFIG_SHOWN_MAX));
    free(value);
    return (double)(hash >> 12);
}

// 52 bits of a hash of the effective configuration.
static double config_digest(const Config *cfg) {
    uint64_t hash = 0;
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) hash = rng_mix(hash ^ (uint64_t)config_value_hash(cfg, i));
    return (double)(hash >> 12);
}

// The words for a key's value on a rank, which it tells the others.
static void config_show_told(const void *config, int key, int rank, double value, char text[AGREE_VALUE]) {
    const Config *cfg = (const Config *)config;
    snprintf(text, AGREE_VALUE, "without a value");
    if (value == 0) return;
    char *shown = (char *)host_alloc(CONFIG_SHOWN_MAX);
    if (rank == message_rank) snprintf(text, AGREE_VALUE, "%.*s", AGREE_VALUE - 1, config_show_field(cfg, &config_keys[key], shown, CONFIG_SHOWN_MAX));
    free(shown);
    comm_host_broadcast(text, AGREE_VALUE, rank);
}

// Ranks that trained by different settings would wait for each other for ever, or learn something that no file says. All ranks
// come here; the message names keys, ranks and values.
static void configurations_agree(const Config *cfg, CommWorld world) {
    double digest = config_digest(cfg), least = digest, most = digest;
    comm_host_all_reduce(&least, 1, COMM_MIN);
    comm_host_all_reduce(&most, 1, COMM_MAX);
    if (least == most) return;
    const char *name[CONFIG_KEY_COUNT];
    double value[CONFIG_KEY_COUNT];
    char text[AGREE_TEXT];
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) name[i] = config_keys[i].path, value[i] = config_value_hash(cfg, i);
    double *all = agree_gather(value, CONFIG_KEY_COUNT, world.rank, world.world);
    agree_describe(text, all, name, CONFIG_KEY_COUNT, world.world, config_show_told, cfg);
    die_alike(EXIT_CONFIG, "the ranks have different configurations: %s; give all hosts the same file and the same command line", text);
}

// ---------------------------------------------------------------------------------------------------------------
// TrainingState.config_digest: which settings that shape the training a checkpoint was made with, in 64 characters. Numbers stand
// for themselves, sections as 5 digits of a hash of their lines in the effective table: "1.b64.s1024.o1f3a0..."

enum { DIGEST_TEXT = 512 };

static const struct {
    char mark;
    const char *keys; // paths, or beginnings that end in a point, separated by blanks
    const char *name;
    bool is_number;
} digest_parts[] = {
    {'b', "train_batch_size", "train_batch_size", true},
    {'a', "gradient_accumulation_steps", "gradient_accumulation_steps", true},
    {'s', "train_gpt.run.seq_len", "train_gpt.run.seq_len", true},
    {'o', "optimizer.", "optimizer", false},
    {'l', "scheduler. train_gpt.run.lr_schedule train_gpt.run.warmup_steps train_gpt.run.total_steps train_gpt.run.final_lr_frac", "learning-rate schedule", false},
    {'c', "gradient_clipping", "gradient_clipping", false},
    {'p', "fp16. bf16. communication_data_type data_types.grad_accum_dtype gradient_predivide_factor prescale_gradients", "precision (fp16, bf16, types and factors of gradients)", false},
    {'w', "sequence_parallel.attention_window_size", "attention window", false},
    {'d', "train_gpt.data.shuffle dataloader_drop_last", "order of the data (shuffle, dataloader_drop_last)", false},
};
enum { DIGEST_PARTS = sizeof digest_parts / sizeof *digest_parts };

static bool digest_has(const char *keys, const char *path) {
    for (const char *k = keys; *k; k += strcspn(k, " "), k += *k == ' ') {
        size_t n = strcspn(k, " ");
        if (strncmp(path, k, n) == 0 && (path[n] == 0 || k[n - 1] == '.')) return true;
    }
    return false;
}

static void digest_part(const Config *cfg, int part, char text[16]) {
    char *value = (char *)host_alloc(CONFIG_SHOWN_MAX);
    uint64_t hash = 0;
    value[0] = 0;
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
        if (!config_in_table(cfg, i) || !digest_has(digest_parts[part].keys, config_keys[i].path)) continue;
        config_show_field(cfg, &config_keys[i], value, CONFIG_SHOWN_MAX);
        hash = rng_mix(hash ^ text_hash(config_keys[i].path) ^ rng_mix(text_hash(value)));
    }
    if (digest_parts[part].is_number && strlen(value) < 6) snprintf(text, 16, "%.15s", value);
    else snprintf(text, 16, "%05x", (unsigned)(hash >> 44));
    free(value);
}

static void digest_write(const Config *cfg, char digest[65]) {
    char part[16];
    int n = snprintf(digest, 65, "1");
    for (int i = 0; i < DIGEST_PARTS; i++) {
        digest_part(cfg, i, part);
        n += snprintf(digest + n, (size_t)(65 - n), ".%c%s", digest_parts[i].mark, part);
    }
    CHECK(n < 65, "a digest of %d characters", n);
}

// What a checkpoint with this digest was trained with, where it is something else: "train_batch_size 64 (now 32), another optimizer".
// Returns how many parts differ; 0 for a digest of another kind.
static int digest_compare(const Config *cfg, const char *digest, char text[DIGEST_TEXT]) {
    int differ = 0, n = 0;
    text[0] = 0;
    if (strncmp(digest, "1.", 2) != 0) return 0;
    for (int i = 0; i < DIGEST_PARTS; i++) {
        char now[16], mark[3] = {'.', digest_parts[i].mark, 0};
        const char *then = strstr(digest, mark);
        if (!then) continue;
        then += 2;
        int length = (int)strcspn(then, ".");
        digest_part(cfg, i, now);
        if (strlen(now) == (size_t)length && strncmp(now, then, (size_t)length) == 0) continue;
        const char *comma = differ++ ? ", " : "";
        if (digest_parts[i].is_number) n += snprintf(text + n, (size_t)(DIGEST_TEXT - n), "%s%s %.*s (now %s)", comma, digest_parts[i].name, length, then, now);
        else n += snprintf(text + n, (size_t)(DIGEST_TEXT - n), "%sanother %s", comma, digest_parts[i].name);
    }
    return differ;
}

// How long reading or writing so many bytes may go without a sign of progress: a slow disk's 10 MB/s, for what is not cut
// into pieces (an fsync of all, a checksum before anything is used), and a minute for the rest.
static double seconds_for_bytes(int64_t bytes) { return 60 + (double)bytes / 10e6; }

// Connects the ranks' beats. The flight recorder will lie in the output folder; runs that only read leave none.
static void watch_begin(const Config *cfg, CommWorld world) {
    char folder[CONFIG_PATH_MAX + 16];
    snprintf(folder, sizeof folder, "%s/flight", cfg->run.output_dir);
    comm_set_timeout((double)cfg->zero.timeout + 5); // the watch, which can say who is at fault, comes first
    WatchJob job;
    memset(&job, 0, sizeof job);
    job.rank = world.rank;
    job.world = world.world;
    const ParallelConfig *p = &cfg->parallel;
    const GridAxes axes = {(int)p->pipeline, (int)p->data, (int)p->sequence, (int)p->tensor};
    job.role = grid_coords(world.rank, axes).pp; // stages may have more or less to do
    job.one_host = world.local_world == world.world;
    job.flight_dir = trainer_only_reads(cfg) || world.world == 1 ? NULL : folder;
    // Whoever starts ranks by hand may leave; a launcher's end is the job's.
    bool launched = getenv("OMPI_COMM_WORLD_SIZE") || getenv("TORCHELASTIC_RUN_ID") || getenv("SLURM_STEP_ID");
    job.launcher = launched && world.world > 1 && getppid() > 1 ? getppid() : 0;
    job.limits = watch_default_limits((double)cfg->zero.timeout);
    WatchAddress address;
    memset(&address, 0, sizeof address);
    watch_prepare(&job, &address);
    comm_host_broadcast(&address, sizeof address, 0);
    watch_start(&address);
    watch_announce(WATCH_LOAD, 300); // devices, groups, allocations, data; a checkpoint announces its own time
}

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
static const char *trainer_load_dir(const Config *cfg, char *room, size_t size) {
    if (cfg->load_dir[0]) return cfg->load_dir;
    return cfg->checkpoint.load_path[0] ? cfg->checkpoint.load_path : trainer_save_dir(cfg, room, size);
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
        bool pinned = (t->zero.offload.bytes == 0 || t->zero.offload.pinned) && (!t->acts->slot[0].host || t->acts->slot[0].host_pinned) && (!t->store || !t->store->copy.memory || t->store->copy.pinned);
        char updates[64] = "";
        if (t->zero.offload.bytes > 0) snprintf(updates, sizeof updates, "; the CPU updates by %d threads", offload_threads());
        print_table_row("host (MiB)", "%.1f a rank%s: weights %.1f, masters %.1f, gradients %.1f, optimizer states %.1f, activations %.1f, buffers %.1f%s", memory.host_total / mib, pinned ? ", pinned" : "",
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

// Everything but data and files: what a test needs, too. cfg is resolved. with_backward false: for sampling and export.
static void trainer_init_core(Trainer *t, Config *cfg, ProcessGrid grid, bool with_backward, int64_t B) {
    memset(t, 0, sizeof *t);
    t->cfg = cfg;
    t->grid = grid;
    t->ideal_bubble = plan_pipeline(cfg, &cfg->model, grid, &t->pipe);
    int *stage = plan_unit_stages(&t->pipe), last = t->pipe.first[pipeline_last(&t->pipe) + 1] - 1;
    t->groups = groups_create(grid, 0, cfg->model.tie_word_embeddings ? stage[last] : 0, cfg->zero.direct_exchange);
    links_create(&t->links, &t->pipe, &grid);
    t->stream = stream_create();
    matmul_search(cfg->run.matmul_search);
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
    bool reads = trainer_only_reads(cfg);
    const ParallelConfig *p = &cfg->parallel;
    GridAxes axes = {(int)p->pipeline, (int)p->data, (int)p->sequence, (int)p->tensor};
    resolve_model(cfg);
    device_init(world.local_rank);
    config_fit_device(cfg, device_info().compute_capability);
    trainer_init_core(t, cfg, grid_make(world.rank, axes), !reads, reads ? 1 : cfg->batch.train_micro_batch_size_per_gpu);
    t->config_digest = config_digest(cfg);
    tokenizer_open(&t->tokenizer, cfg->data.tokenizer, cfg->model.vocab_size);
    t->metrics.log_fd = -1;
    if (reads) return;
    trainer_open_data(t);
    trainer_open_files(t);
    double claimed = 1;
    comm_host_broadcast(&claimed, sizeof claimed, 0); // the folder's lock is ours: another run's recorders are not touched before
    if (t->grid.world > 1) make_folders(cfg->run.output_dir, "train_gpt.run.output_dir"); // hosts may have folders of their own
    watch_record();
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
    free(t->train_uses);
    free(t->eval_uses);
    groups_free(&t->groups);
    stream_destroy(t->stream);
}
