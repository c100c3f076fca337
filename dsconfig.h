// dsconfig.h - the configuration: one JSON file in DeepSpeed's schema, overrides from the command line, one struct.
//
// The way of a value: json.h reads the text into nodes that know their lines; config_walk looks up each key in the table of
// dsconfig_keys.h and stores, translates, notes or refuses it; config_resolve works out what was left open (batch triangle,
// "auto", presets, defaults that depend on others) and checks what only several keys together can tell. Nothing stops at the
// first problem: all of them are collected in a ConfigReport, as "file:line: key = value: what is wrong; what to do".
//
// Invariants
// 1. No key is ever ignored in silence: after the walk every node of the file was visited exactly once, or the program stops.
// 2. Reading depends on the text, the overrides and the number of ranks only: not on the locale, the clock or the device.
// 3. A file that is refused has changed nothing on disk.
//
// Reading next: dsconfig_keys.h (the keys), dsconfig_read.h (from nodes to fields), dsconfig_rules.h (what several keys together mean),
// dsconfig_command.h (the command line), runtime/json.h (the text forms).
#pragma once
#include "runtime/json.h"
#include "runtime/tensor.h"

#define CONFIG_PATH_MAX 4096
#define CONFIG_NAME_MAX 128
#define CONFIG_FILE_MAX (16 << 20) // bytes
#define CONFIG_OVERRIDE_MAX (1 << 16)
#define CONFIG_KEY_ROOM 512        // rows that the table may have
#define CONFIG_VERSION "0.1"
#define CONFIG_WORLDS_MAX 64       // rows of --plan

typedef enum { OPTIMIZER_ADAMW, OPTIMIZER_LION, OPTIMIZER_SGD } OptimizerType; // "Adam" is ADAMW with adam_w_mode
typedef enum {
    SCHEDULE_CONSTANT, SCHEDULE_WARMUP_LR, SCHEDULE_WARMUP_DECAY_LR, SCHEDULE_WARMUP_COSINE_LR,
    SCHEDULE_ONE_CYCLE, SCHEDULE_LR_RANGE_TEST, SCHEDULE_COSINE, // the last one is train_gpt.run.lr_schedule
} ScheduleType;

// A field has the name of its key; a section's prefix is the struct's name.
typedef struct {
    int64_t train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps; // solved by the batch triangle
    bool dataloader_drop_last;
    int64_t vocabulary_size; // 0 = not given
} BatchConfig;

typedef struct {
    char preset[CONFIG_NAME_MAX];    // "" = none
    char init_from[CONFIG_PATH_MAX]; // "" = random weights; a Hugging Face folder or an llm.c model .bin
    int64_t n_layer, n_head, n_embd, n_positions, vocab_size, n_inner; // 0 only with init_from, which then tells them
    double layer_norm_epsilon;
    bool tie_word_embeddings;
    int64_t attention_window_size; // of section sequence_parallel; 0 = each token sees all before it
} ModelConfig;

typedef struct {
    char name[CONFIG_NAME_MAX]; // "AdamW", ..., however the user spelt it
    OptimizerType type;
    double lr, betas[2], eps, weight_decay;
    bool bias_correction, adam_w_mode; // adam_w_mode is true unless type Adam says false
    double momentum, dampening;
    bool nesterov;
} OptimizerConfig;

typedef struct {
    char name[CONFIG_NAME_MAX]; // "WarmupLR", ..., however the user spelt it; "" = no scheduler
    ScheduleType type;
    double warmup_min_lr, warmup_max_lr;
    int64_t warmup_num_steps, total_num_steps;
    bool warmup_log; // warmup_type: log or linear
    double warmup_min_ratio, cos_min_ratio;
    double lr_range_test_min_lr, lr_range_test_step_rate;
    int64_t lr_range_test_step_size;
    bool lr_range_test_staircase;
    double cycle_min_lr, cycle_max_lr, decay_lr_rate, cycle_min_mom, cycle_max_mom, decay_mom_rate;
    int64_t cycle_first_step_size, cycle_second_step_size, cycle_first_stair_count, cycle_second_stair_count, decay_step_size;
    bool cycle_momentum;
    int64_t last_batch_iteration;
    bool lr_schedule; // train_gpt.run.lr_schedule: cosine instead of constant
    int64_t warmup_steps, total_steps;
    double final_lr_frac;
} SchedulerConfig;

typedef struct {
    bool enabled;
    double loss_scale; // 0 = dynamic
    int64_t initial_scale_power, loss_scale_window, hysteresis;
    bool consecutive_hysteresis;
    double min_loss_scale;
} Fp16Config;

typedef struct {
    bool enabled, check_grad_overflow;
} Bf16Config;

typedef enum { OFFLOAD_NONE, OFFLOAD_CPU, OFFLOAD_NVME } OffloadDevice;

typedef struct {
    OffloadDevice device;
    char nvme_path[CONFIG_PATH_MAX];
    bool nvme_derived; // it is the output folder's, and made when it is needed
    int64_t buffer_count, buffer_size, max_in_cpu; // the last two of parameters only, in elements
    bool pin_memory, pipeline_read, pipeline_write; // the last two of the optimizer only
    double ratio; // of the optimizer only
} OffloadConfig;

typedef struct {
    int64_t block_size; // bytes
    int64_t queue_depth, intra_op_parallelism;
    bool single_submit, overlap_events;
} AioConfig;

typedef struct {
    int64_t stage;
    int64_t timeout; // seconds
    bool direct_exchange, reduce_scatter, overlap_comm, load_from_fp32_weights, gather_16bit_weights_on_model_save, prescale_gradients;
    double gradient_predivide_factor;
    bool gradient_allreduce_op;    // sum instead of mean
    DType communication_data_type, grad_accum_dtype; // in which gradients travel, and are summed; the latter's section is data_types
    int64_t reduce_bucket_size, allgather_bucket_size, sub_group_size; // elements, as the next two lines
    int64_t prefetch_bucket_size, param_persistence_threshold, model_persistence_threshold;
    int64_t max_live_parameters, max_reuse_distance;
    OffloadConfig offload_param, offload_optimizer;
    AioConfig aio; // the section is a top-level one
} ZeroConfig;

// What backward computes again instead of finding it stored; each step includes those before it. See act_descs.
typedef enum { RECOMPUTE_NONE, RECOMPUTE_NORMS, RECOMPUTE_GELU, RECOMPUTE_FFN, RECOMPUTE_QKV, RECOMPUTE_BLOCK, RECOMPUTE_POLICIES } RecomputePolicy;

typedef struct {
    RecomputePolicy policy;
    bool enabled, partition_activations, cpu_checkpointing, synchronize_checkpoint_boundary, profile;
    int64_t number_checkpoints;             // segments of blocks; 0 = every block is one
    int64_t activation_checkpoint_interval; // blocks in a segment, the other way to say it; 0 = not given
} ActivationCheckpointingConfig;

typedef enum { PIPELINE_1F1B, PIPELINE_GPIPE, PIPELINE_INTERLEAVED, PIPELINE_ZB_H1, PIPELINE_ZB_V } PipelineSchedule;
typedef enum { PARTITION_BEST, PARTITION_UNIFORM, PARTITION_PARAMETERS } PipelinePartition; // the first is the last

typedef struct {
    int64_t tensor, pipeline, sequence, data; // degrees; their product is the number of ranks
    PipelineSchedule pipeline_schedule;
    PipelinePartition pipeline_partition;
    int64_t virtual_pipeline;                 // model chunks a stage; 1 unless Interleaved or ZB-V
} ParallelConfig;

typedef struct {
    char train[CONFIG_PATH_MAX], val[CONFIG_PATH_MAX]; // glob of shards, or a text file; "" = none
    bool shuffle;
    char tokenizer[CONFIG_PATH_MAX];
} DataConfig;

typedef struct {
    int64_t steps, seq_len, seed; // seq_len 0 = the model's n_positions
    int64_t logits_bytes;         // most memory for the logits of a micro-batch at once
    bool matmul_search, cuda_graphs, gelu_apart;
    char matmul_cache[CONFIG_PATH_MAX]; // "auto", "none" or a path
    int64_t tensor_parallel_pieces; // in which rows travel between tensor-parallel ranks
    char output_dir[CONFIG_PATH_MAX];
    int64_t eval_every, eval_batches, sample_every, sample_tokens; // 0 = never; eval_batches 0 = all
    char sample_prompt[CONFIG_PATH_MAX];
    int64_t checkpoint_every; // 0 = only at the end
    bool checkpoint_at_end;
    int64_t replica_check_every; // 0 = never
    char resume[CONFIG_NAME_MAX]; // "auto", "none" or a tag
    bool deterministic;
} RunConfig;

typedef enum { TAGS_IGNORE, TAGS_WARN, TAGS_FAIL } TagValidation;

typedef struct {
    char save_dir[CONFIG_PATH_MAX];  // "" = <output_dir>/checkpoints
    char load_path[CONFIG_PATH_MAX]; // "" = save_dir
    int64_t keep_n_most_recent, num_checkpoints_to_keep; // 0 = no limit
    bool decoupled; // write while training goes on
    bool zero_checkpoint; // every rank writes what it owns; otherwise rank 0 all of it
    TagValidation tag_validation;
} CheckpointConfig;

// Values that are only compared with others, translated into them, or refused as not built yet: the trainer does not look here.
typedef struct {
    bool fp32_optimizer_states, bf16_master_weights_and_grads, bf16_optimizer_states;
    DType param_dtype, buffer_dtype, tensor_parallel_dtype;
    int64_t zero_hpz_partition_size;
    bool zero_quantized_weights, zero_quantized_gradients, cpu_offload, cpu_offload_param, cpu_offload_use_pin_memory;
    bool sequence_parallel;
    int64_t profile_step;
    bool checkpoint_type, writer_statistics, memory_breakdown, flops_profiler, comms_logger, csv_monitor;
    uint32_t compile_passes;
    char backend[CONFIG_NAME_MAX];
} CompatConfig;

typedef enum { ORIGIN_DEFAULT, ORIGIN_FILE, ORIGIN_COMMAND_LINE, ORIGIN_AUTO, ORIGIN_DERIVED, ORIGIN_PRESET } ConfigOrigin;

typedef struct {
    uint8_t origin; // ConfigOrigin of the value in force
    bool refused;   // a problem was reported for it
    int16_t alias;  // row of the other spelling under which it came, + 1; 0 = none
    int32_t line;   // in the file; 0 = not there
} ConfigKeyState;

typedef struct Config {
    BatchConfig batch;
    ModelConfig model;
    OptimizerConfig optimizer;
    SchedulerConfig scheduler;
    double gradient_clipping; // 0 = off
    Fp16Config fp16;
    Bf16Config bf16;
    DType dtype; // what fp16 and bf16 say: the type of weights, activations and their gradients
    ZeroConfig zero;
    ActivationCheckpointingConfig activation_checkpointing;
    ParallelConfig parallel;
    DataConfig data;
    RunConfig run;
    CheckpointConfig checkpoint;
    CompatConfig compat;
    int64_t steps_per_print;
    bool wall_clock_breakdown, dump_state;
    bool precision_is_auto;                 // fp16 and bf16 were both left to the program: see config_fit_device
    // Command line
    char file[CONFIG_PATH_MAX];
    bool generate;                          // --generate "PROMPT"
    char generate_prompt[CONFIG_PATH_MAX];
    char export_dir[CONFIG_PATH_MAX];       // --export DIR, "" = no
    char load_dir[CONFIG_PATH_MAX];         // --load_dir DIR, "" = checkpoint.load_path, else where this run saves
    char load_tag[CONFIG_NAME_MAX];         // --load_tag TAG, "" = newest
    int64_t world, local_rank;              // ranks of this job, and this one's number on its host
    bool plan;                              // --plan [RANKS]: this is the first of a list of configurations, by world
    double device_memory;                   // --device-memory GIB, 0 = that of the device that is here
    double host_memory;                     // --host-memory GIB, 0 = not limited
    ConfigKeyState key[CONFIG_KEY_ROOM];    // of each row of the table; two configurations can be compared up to here
    // Of --plan's list
    bool refused;                           // for this world; every problem was told
    bool batch_follows;                     // train_batch_size as given does not fit this world, and was worked out anew
    struct Config *next_world;
} Config;

// Reads the command line, the file that it names and its overrides. Lists every problem on stderr and ends with
// EXIT_CONFIG when there is one. The result belongs to the caller (config_free); it is null when --help, --version, --help-config
// or --check-config have printed what they were asked for.
static Config *config_load(int argc, char **argv);

// ---------------------------------------------------------------------------------------------------------------
// Rows of the table (see dsconfig_keys.h)

typedef enum { KEY_ANY, KEY_BOOL, KEY_INT, KEY_FLOAT, KEY_TEXT, KEY_CHOICE, KEY_PAIR, KEY_WORDS, KEY_OBJECT } KeyType;
typedef enum {
    TREAT_HEADING, TREAT_USE, TREAT_LATER, TREAT_ALIAS, TREAT_NOTE, TREAT_REFUSE, TREAT_REFUSE_ON, TREAT_DETAIL, TREAT_SECTION, TREAT_FEATURE,
} KeyTreatment;

enum { // flags of a row
    AUTO = 1,           // "auto" stands for the default, or for what config_resolve works out
    NULL_OK = 2,        // null is a documented value and means "not given"; elsewhere a notice says that it does
    FALSE_OK = 4,       // so does false
    SAY = 8,            // whoever gives this key is told the row's text, as a notice
    TELL = 8192,        // the same, but --strict does not mind
    V19 = 16,           // came with DeepSpeed 0.19
    EXCLUSIVE = 32,     // an alias that must not stand beside its target, even with an equal value
    ZERO_ABSENT = 64,   // an alias for which 0 means "not given"
    LIST1 = 128,        // a list of one number is accepted
    WORD_AUTO = 256,    // "auto" is an ordinary text for this key
    WITH_ONLY = 512,    // refused, not only noted, without the optimizers that it belongs to
    SECRET = 1024,      // the value is never shown
    NOT_YET = 2048,     // a feature that will come
    BOOL_OK = 4096,     // a section with an old form: true or false
};

typedef struct {
    const char *path;
    KeyType type;
    KeyTreatment treatment;
    uint32_t offset, size;  // of the field in Config; size 0 = none
    const char *initial;    // default; "" = worked out by config_resolve, else zero
    const char *accepts;    // range or words; an alias: its target; a section: its switch
    const char *with;       // optimizers or schedulers that the key belongs to; "" = all
    int flags;
    const char *text;
} ConfigKey;

#include "dsconfig_keys.h"

static_assert(sizeof config_keys / sizeof *config_keys <= CONFIG_KEY_ROOM, "raise CONFIG_KEY_ROOM");

static int config_find_key(const char *path) { // row of this path, or -1
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) if (config_keys[i].path[0] == path[0] && strcmp(config_keys[i].path, path) == 0) return i;
    return -1;
}

static bool config_has_word(const char *words, const char *word) { // words are separated by blanks
    size_t n = strlen(word);
    for (const char *at = words; n > 0 && (at = strstr(at, word)); at += n)
        if ((at == words || at[-1] == ' ') && (at[n] == ' ' || at[n] == 0)) return true;
    return false;
}

static char config_lower(char c) { return c >= 'A' && c <= 'Z' ? (char)(c + 32) : c; } // of ASCII, in every locale
static bool config_same_word(const char *a, const char *b) { // but for the letter case
    for (; *a && config_lower(*a) == config_lower(*b); a++) b++;
    return config_lower(*a) == config_lower(*b);
}

// ---------------------------------------------------------------------------------------------------------------
// The report: everything that is to be said about a configuration

typedef enum {
    CONFIG_PROBLEM,  // refused
    CONFIG_UNBUILT,  // correct, but "not built yet": refused as well
    CONFIG_NOTICE,   // accepted without the effect that the user may expect; --strict refuses it
    CONFIG_INFO,     // a choice that the program made
    CONFIG_KINDS
} ConfigMessageKind;

typedef struct {
    ConfigMessageKind kind;
    char *text;
} ConfigMessage;

#define CONFIG_MESSAGES_MAX 1000 // kept; the others are only counted

typedef struct {
    ConfigMessage *message;
    int count, room;
    int64_t of[CONFIG_KINDS]; // messages of each kind, those not kept included
    bool about[CONFIG_KEY_ROOM]; // rows of the table on which there is a message
} ConfigReport;

static void config_report_free(ConfigReport *report) {
    for (int i = 0; i < report->count; i++) free(report->message[i].text);
    free(report->message);
    memset(report, 0, sizeof *report);
}

static int64_t config_refusals(const ConfigReport *report) { return report->of[CONFIG_PROBLEM] + report->of[CONFIG_UNBUILT]; }

typedef struct {
    Config *config;
    ConfigReport *report;
    const Json *json;
    const char *source;   // file name, escaped
    bool command_line;    // json is an override
    bool strict;          // notices are problems
    uint8_t *visits;      // of each node of json
    const ConfigKey *sorted[CONFIG_KEY_ROOM]; // by path
    int suggestions_left; // looking for similar keys takes time: not for thousands of them
    bool foreign;         // a run file of another trainer, said once
    bool said_python, said_quotes, said_version;
} ConfigReader;

// Adds a message. line: in the file; 0 = none, -1 = it is about the command line. key and value may be "".
PRINTF_LIKE(6, 7) static void config_say(ConfigReader *r, ConfigMessageKind kind, int line, const char *key, const char *value,
                                         const char *format, ...) {
    ConfigReport *report = r->report;
    char text[1600], shown_key[200], shown_value[128], place[32] = "";
    if (kind == CONFIG_NOTICE && r->strict) kind = CONFIG_PROBLEM;
    if (report->of[kind]++ >= CONFIG_MESSAGES_MAX || report->count >= 4 * CONFIG_MESSAGES_MAX) return;
    if (line > 0) snprintf(place, sizeof place, ":%d", line);
    int n = snprintf(text, sizeof text, "%.400s%s: ", line < 0 ? "command line" : r->source, place);
    text_escape(shown_key, sizeof shown_key, key, strlen(key));
    text_escape(shown_value, sizeof shown_value, value, strlen(value)); // safe already; but it is cut between two characters
    if (key[0]) n += snprintf(text + n, sizeof text - (size_t)n, "%s%s%s: ", shown_key, value[0] ? " = " : "", shown_value);
    va_list args;
    va_start(args, format);
    vsnprintf(text + n, sizeof text - (size_t)n, format, args);
    va_end(args);
    if (report->count == report->room) {
        report->room = report->room ? report->room * 2 : 16;
        report->message = (ConfigMessage *)realloc(report->message, (size_t)report->room * sizeof *report->message);
        CHECK(report->message, "out of host memory for %d messages", report->room);
    }
    ConfigMessage *m = &report->message[report->count++];
    m->kind = kind;
    m->text = strdup(text);
    CHECK(m->text, "out of host memory for message %d", report->count);
}

#include "dsconfig_read.h"

#include "dsconfig_rules.h"

// ---------------------------------------------------------------------------------------------------------------
// Reading as a whole

static void config_add_quoted(char *dst, size_t room, size_t *used, const char *src, size_t length) { // as a string of JSON
    if (*used + 6 * length + 3 >= room) return; // the text then does not parse, and that is reported
    dst[(*used)++] = '"';
    for (size_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)src[i];
        if (c < 0x20 || c == 0x7f) *used += (size_t)snprintf(dst + *used, room - *used, "\\u%04x", c);
        else {
            if (c == '"' || c == '\\') dst[(*used)++] = '\\';
            dst[(*used)++] = (char)c;
        }
    }
    dst[(*used)++] = '"';
    dst[*used] = 0;
}

// Writes "a.b=value" as {"a": {"b": value}}. A value that is no JSON is a text, so that quotes are rarely needed. False with a reason.
static bool config_override_text(const char *override, char *dst, size_t room, char *why, size_t why_room) {
    const char *equals = strchr(override, '=');
    size_t path_length = equals ? (size_t)(equals - override) : strlen(override), used = 0, value_length, first = strcspn(override, ".=");
    char ours[CONFIG_NAME_MAX + 16], top[CONFIG_NAME_MAX];
    if (!equals) {
        snprintf(why, why_room, "is neither an option nor an override; a configuration file is named with -c, overrides look like run.steps=100");
        return false;
    }
    if (path_length == 0) { snprintf(why, why_room, "has no key before the '='; write key.path=value"); return false; }
    if (equals[1] == 0) { snprintf(why, why_room, "has no value after the '='; give one, or null to take back what the file says"); return false; }
    if (strlen(override) > CONFIG_OVERRIDE_MAX) { snprintf(why, why_room, "is longer than %d bytes; put it into the file", CONFIG_OVERRIDE_MAX); return false; }
    int depth = 1;
    dst[used++] = '{';
    snprintf(top, sizeof top, "%.*s", (int)min_i64((int64_t)first, 100), override);
    snprintf(ours, sizeof ours, "train_gpt.%s", top);
    if (config_find_key(top) < 0 && config_find_key(ours) >= 0) {
        used += (size_t)snprintf(dst + used, room - used, "\"train_gpt\":{");
        depth++;
    }
    for (const char *at = override;;) {
        size_t n = strcspn(at, ".=");
        config_add_quoted(dst, room, &used, at, n);
        dst[used++] = ':';
        at += n;
        if (at >= equals) break;
        at++;
        if (++depth > JSON_DEPTH) { snprintf(why, why_room, "has too many parts; see --help-config for the keys"); return false; }
        dst[used++] = '{';
    }
    value_length = strlen(equals + 1);
    Json j;
    bool plain = json_parse(&j, equals + 1, (int64_t)value_length, JSON_TOLERANT) && j.node[0].type != JSON_BAD;
    json_free(&j);
    if (plain) used += (size_t)snprintf(dst + used, room - used, "%s\n", equals + 1); // it may end in a comment
    else config_add_quoted(dst, room, &used, equals + 1, value_length);
    while (depth-- > 0) dst[used++] = '}';
    dst[used] = 0;
    return true;
}

// Walks over one text: the file, or an override.
static bool config_read_text(ConfigReader *r, const char *text, int64_t length) {
    Json j;
    r->json = &j;
    if (!json_parse(&j, text, length, JSON_TOLERANT)) {
        if (r->command_line) config_say(r, CONFIG_PROBLEM, -1, "", "", "%s", j.error);
        else if (length == 0) config_say(r, CONFIG_PROBLEM, 0, "", "", "the file is empty; write at least {}");
        else config_say(r, CONFIG_PROBLEM, j.line, "", "", "column %d, byte %" PRId64 ": %s", j.column, j.offset, j.error);
        return false;
    }
    bool object = j.node[0].type == JSON_OBJECT;
    if (!object)
        config_say(r, CONFIG_PROBLEM, j.node[0].line, "", "", "the whole is %s; a configuration is an object, {...}",
                   json_type_name(j.node[0].type));
    else {
        r->visits = (uint8_t *)host_alloc((size_t)j.count);
        r->visits[0] = 1;
        int hyphens = 0, first = -1;
        for (int c = j.node[0].first; c >= 0; c = j.node[c].next)
            if (strchr(json_key(&j, c), '-') && !config_is_comment(&j, c)) { if (first < 0) first = c; hyphens++; }
        if (hyphens >= 2) {
            r->foreign = true;
            config_say_node(r, CONFIG_PROBLEM, first, "this is a run file of gpt-neox, of which only the DeepSpeed sections can be used "
                            "here; remove the keys with hyphens, and give the model's shape in train_gpt.model");
        }
        config_walk(r, 0, "");
        for (int i = 0; i < j.count; i++) CHECK(r->visits[i] == 1, "line %d: value %d was visited %d times", j.node[i].line, i, r->visits[i]);
        free(r->visits);
        r->visits = NULL;
    }
    json_free(&j);
    return object;
}

// Reads text[0..length) (null: no file) and the overrides for a job of `world` ranks into *config, and everything that is to be said
// into *report, which must be zeroed or freed before, and be freed after. The configuration is good if config_refusals(report) is 0.
static void config_parse(const char *text, int64_t length, const char *name, const char *const *override, int n_overrides, int64_t world,
                         bool strict, Config *config, ConfigReport *report) {
    char source[400], why[300];
    ConfigReader r = {};
    memset(config, 0, sizeof *config);
    r.config = config;
    r.report = report;
    r.strict = strict;
    r.suggestions_left = 50;
    r.source = text ? text_escape(source, sizeof source, name, strlen(name)) : "defaults";
    config->world = world;
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
        r.sorted[i] = &config_keys[i];
        if (config_keys[i].size) config_set_initial(config, &config_keys[i]);
    }
    qsort(r.sorted, CONFIG_KEY_COUNT, sizeof *r.sorted, config_compare_path);
    if (text && !config_read_text(&r, text, length)) return;
    r.command_line = true;
    r.foreign = false;
    for (int i = 0; i < n_overrides; i++) {
        size_t room = 6 * strlen(override[i]) + 1024; // each byte may become an escape; the rest is for brackets
        char *line = (char *)host_alloc(room);
        if (config_override_text(override[i], line, room, why, sizeof why)) config_read_text(&r, line, (int64_t)strlen(line));
        else config_say(&r, CONFIG_PROBLEM, -1, override[i], "", "%s", why);
        free(line);
    }
    r.command_line = false;
    config_resolve(&r);
}

#include "dsconfig_command.h"
