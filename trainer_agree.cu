// trainer_agree.cu - before anything is set up: signals, descriptors, cores, and whether all ranks, and a checkpoint, mean the same run.
//
// A part of trainer.cu, which includes it after its types.
#pragma once

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

// Did mpirun start this process itself? A command of a script that it started may be the second of its rank, and MPI lets one join.
static bool started_by_mpirun(void) {
    char path[32], name[32];
    snprintf(path, sizeof path, "/proc/%d/status", (int)getppid());
    return getenv("OMPI_COMM_WORLD_RANK") && proc_field(path, "Name", name, sizeof name) && config_has_word("mpirun mpiexec orterun orted prterun prted", name);
}

static void request_show(const void *request, int field, int rank, double value, char text[AGREE_VALUE]) {
    (void)field, (void)value;
    if (rank == message_rank) text_escape(text, AGREE_VALUE, (const char *)request, strlen((const char *)request));
    comm_host_broadcast(text, AGREE_VALUE, rank);
}

// Ranks that were started for different things would wait for each other in different places. All ranks come here, before they look at a file.
static void requests_agree(int argc, char **argv, CommWorld world) {
    const char *name = "what they are asked for";
    char request[CONFIG_PATH_MAX + 64], text[AGREE_TEXT];
    if (world.world == 1) return;
    config_request(argc, argv, request, sizeof request);
    double value = (double)(text_hash(request) >> 12), *all = agree_gather(&value, 1, world.rank, world.world);
    if (agree_describe(text, all, &name, 1, world.world, request_show, request) > 0) die_alike(EXIT_CONFIG, "the ranks were not started alike: %s; give all of them the same command line", text);
    free(all);
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

static void tag_show(const void *config, int field, int rank, double value, char text[AGREE_VALUE]) {
    (void)field, (void)value;
    if (rank == message_rank) snprintf(text, AGREE_VALUE, "\"%.80s\"", ((const Config *)config)->load_tag);
    comm_host_broadcast(text, AGREE_VALUE, rank);
}

// Do all ranks name the same checkpoint to load? All come here, and take rank 0's, unless checkpoint.tag_validation is Fail.
static void tags_agree(Config *cfg, CommWorld world) {
    if (world.world == 1) return;
    const TagValidation validation = cfg->checkpoint.tag_validation;
    const char *name = "--load_tag";
    char text[AGREE_TEXT];
    double value = (double)(text_hash(cfg->load_tag) >> 12), *all = agree_gather(&value, 1, world.rank, world.world);
    if (validation != TAGS_IGNORE && agree_describe(text, all, &name, 1, world.world, tag_show, cfg) > 0) {
        if (validation == TAGS_FAIL) die_alike(EXIT_CONFIG, "the ranks name different checkpoints: %s; give all of them the same tag (checkpoint.tag_validation = Fail)", text);
        note("the ranks name different checkpoints: %s; all take rank 0's (checkpoint.tag_validation = Warn)", text);
    }
    free(all);
    comm_host_broadcast(cfg->load_tag, sizeof cfg->load_tag, 0);
}

// ---------------------------------------------------------------------------------------------------------------
// TrainingState.config: what a checkpoint was made with

static char *config_text(const Config *cfg) {
    char *text = NULL;
    size_t length = 0;
    FILE *f = open_memstream(&text, &length);
    if (f) config_print_json(f, cfg, NULL);
    if (!f || fclose(f) != 0) die(EXIT_INTERNAL, "out of host memory for the text of the configuration");
    return text;
}

enum { CHANGES_TEXT = 4096, CHANGE_TEXT = 320 };

// Settings that shape the training, whatever the ranks, the files and the machine: paths, or beginnings that end in a point. How many
// micro-batches an update has counts where it was given; else it follows from the batch and the ranks.
static bool config_shapes(const Config *cfg, int key) {
    const char *path = config_keys[key].path;
    static const char *const shaping[] = {
        "train_batch_size", "gradient_accumulation_steps", "train_gpt.run.seq_len", "optimizer.", "scheduler.", "train_gpt.run.lr_schedule", "train_gpt.run.warmup_steps",
        "train_gpt.run.total_steps", "train_gpt.run.final_lr_frac", "gradient_clipping", "fp16.", "bf16.", "communication_data_type", "data_types.grad_accum_dtype",
        "gradient_predivide_factor", "prescale_gradients", "gradient_allreduce_op", "sequence_parallel.attention_window_size", "train_gpt.data.shuffle", "dataloader_drop_last",
    };
    for (size_t i = 0; i < sizeof shaping / sizeof *shaping; i++) {
        size_t n = strlen(shaping[i]);
        if (strncmp(path, shaping[i], n) == 0 && (path[n] == 0 || shaping[i][n - 1] == '.')) return strcmp(path, "gradient_accumulation_steps") != 0 || config_row_given(cfg, key);
    }
    return false;
}

static const char *config_show_in_table(const Config *cfg, int key, char *dst) {
    if (!config_in_table(cfg, key)) return "none";
    return config_show_field(cfg, &config_keys[key], dst, CONFIG_SHOWN_MAX);
}

// Which of these settings a state was trained with, where it is something else now: "gradient_clipping 1 (now 0.5), ...". Returns how many
// differ; 0 where the state does not know. A key that is newer than the state had its default.
static int config_changes(const Config *now, const TrainingState *state, char text[CHANGES_TEXT]) {
    int differ = 0, left_out = 0;
    size_t n = 0;
    text[0] = 0;
    if (!state->config) return 0;
    Config *then = (Config *)host_alloc(sizeof *then);
    ConfigReport report = {}; // of another version's text: what can be read counts
    config_parse(state->config, (int64_t)strlen(state->config), "checkpoint", NULL, 0, state->config_ranks, false, then, &report);
    char *a = (char *)host_alloc(2 * CONFIG_SHOWN_MAX), *b = a + CONFIG_SHOWN_MAX;
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
        if (!config_shapes(now, i)) continue;
        const char *was = config_show_in_table(then, i, a), *is = config_show_in_table(now, i, b);
        if (strcmp(was, is) == 0) continue;
        char change[CHANGE_TEXT];
        snprintf(change, sizeof change, "%s%s %.80s (now %.80s)", differ++ ? ", " : "", config_keys[i].path, was, is);
        if (n + strlen(change) + 32 > CHANGES_TEXT) left_out++; // room for how many are left out
        else n += (size_t)snprintf(text + n, CHANGES_TEXT - n, "%s", change);
    }
    if (left_out) snprintf(text + n, CHANGES_TEXT - n, " and %d more", left_out);
    free(a);
    config_report_free(&report);
    free(then);
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
