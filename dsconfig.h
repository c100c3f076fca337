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
// Reading next: dsconfig_keys.h (the keys), dsconfig_rules.h (what several keys together mean), runtime/json.h (the text forms).
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
    char name[CONFIG_NAME_MAX]; // type as the user wrote it
    OptimizerType type;
    double lr, betas[2], eps, weight_decay;
    bool bias_correction, adam_w_mode; // adam_w_mode is true unless type Adam says false
    double momentum, dampening;
    bool nesterov;
} OptimizerConfig;

typedef struct {
    char name[CONFIG_NAME_MAX]; // type as the user wrote it; "" = no scheduler
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
    char output_dir[CONFIG_PATH_MAX];
    int64_t eval_every, eval_batches, sample_every, sample_tokens; // 0 = never; eval_batches 0 = all
    char sample_prompt[CONFIG_PATH_MAX];
    int64_t checkpoint_every; // 0 = only at the end
    bool checkpoint_at_end;
    int64_t replica_check_every; // 0 = never
    char resume[CONFIG_NAME_MAX]; // "auto", "none" or a tag
    bool deterministic;
} RunConfig;

typedef struct {
    char save_dir[CONFIG_PATH_MAX];  // "" = <output_dir>/checkpoints
    char load_path[CONFIG_PATH_MAX]; // "" = save_dir
    int64_t keep_n_most_recent, num_checkpoints_to_keep; // 0 = no limit
    bool decoupled; // write while training goes on
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

// ---------------------------------------------------------------------------------------------------------------
// Values

// A value as the file has it, shortened, for a message.
static const char *config_show_node(const Json *j, int node, char *dst, size_t room) {
    const JsonNode *n = &j->node[node];
    switch (n->type) {
    case JSON_OBJECT: snprintf(dst, room, "{...}"); break;
    case JSON_ARRAY: snprintf(dst, room, "[...]"); break;
    case JSON_STRING:
        text_escape(dst + 1, room - 2, json_text(j, node), (size_t)n->length);
        dst[0] = '"';
        memcpy(dst + strlen(dst), "\"", 2);
        break;
    default: text_escape(dst, room, json_text(j, node), (size_t)n->length);
    }
    return dst;
}

static void config_format_double(char *dst, size_t room, double x) { // the shortest decimal that reads back the same
    locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0), old = uselocale(c);
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(dst, room, "%.*g", digits, x);
        if (strtod(dst, NULL) == x) break;
    }
    uselocale(old);
    freelocale(c);
}

// Word number `index` of "a=b|c", its first spelling.
static void config_word_at(const char *words, int index, char *dst, size_t room) {
    for (; index > 0 && *words; index--) { words += strcspn(words, "|"); words += *words == '|'; }
    snprintf(dst, room, "%.*s", (int)strcspn(words, "=|"), words);
}

static int config_word_index(const char *words, const char *word) { // in any letter case and spelling; -1 = none of them
    size_t n = strlen(word);
    for (int index = 0; *words; index++) {
        for (;;) {
            size_t length = strcspn(words, "=|"), k = 0;
            while (k < length && k < n && config_lower(words[k]) == config_lower(word[k])) k++;
            if (k == length && k == n) return index;
            words += length;
            if (*words != '=') break;
            words++;
        }
        if (*words == '|') words++;
    }
    return -1;
}

enum { CONFIG_SHOWN_MAX = 6 * CONFIG_PATH_MAX + 16 }; // room for any value as text: a byte of a text may take six as an escape

// The value in force of a row with a field, in a form that config_parse reads back as an override.
static const char *config_show_field(const Config *config, const ConfigKey *k, char *dst, size_t room) {
    const char *p = (const char *)config + k->offset;
    char a[40], b[40];
    size_t used = 0;
    dst[0] = 0;
    switch (k->type) {
    case KEY_BOOL: snprintf(dst, room, "%s", *(const bool *)p ? "true" : "false"); break;
    case KEY_INT: snprintf(dst, room, "%" PRId64, *(const int64_t *)p); break;
    case KEY_FLOAT: config_format_double(dst, room, *(const double *)p); break;
    case KEY_PAIR:
        config_format_double(a, sizeof a, ((const double *)p)[0]);
        config_format_double(b, sizeof b, ((const double *)p)[1]);
        snprintf(dst, room, "[%s, %s]", a, b);
        break;
    case KEY_CHOICE: config_word_at(k->accepts, k->size == 1 ? *(const bool *)p : *(const int32_t *)p, dst, room); break;
    case KEY_WORDS:
        used = (size_t)snprintf(dst, room, "[");
        for (int i = 0; i < 32; i++) {
            if (!(*(const uint32_t *)p >> i & 1)) continue;
            config_word_at(k->accepts, i, a, sizeof a);
            used += (size_t)snprintf(dst + used, room - used, "%s\"%s\"", used > 1 ? ", " : "", a);
        }
        snprintf(dst + used, room - used, "]");
        break;
    case KEY_TEXT: // quotes and backslashes inside are escaped, the rest is what a terminal can show
        dst[used++] = '"';
        for (const char *s = p; *s && used + 8 < room; s++) {
            if (*s == '"' || *s == '\\') dst[used++] = '\\';
            bool c1 = *s == '\xc2' && (unsigned char)s[1] >= 0x80 && (unsigned char)s[1] < 0xa0; // control characters beyond ASCII
            if (c1) s++;
            if (c1 || (unsigned char)*s < 0x20 || *s == 0x7f)
                used += (size_t)snprintf(dst + used, room - used, "\\u%04x", (unsigned)(unsigned char)*s);
            else dst[used++] = *s;
        }
        dst[used++] = '"';
        dst[used] = 0;
        break;
    default: break;
    }
    return dst;
}

static const char *config_type_name(const ConfigKey *k) {
    switch (k->type) {
    case KEY_BOOL: return "true or false";
    case KEY_INT: return "a whole number";
    case KEY_FLOAT: return "a number";
    case KEY_TEXT: return "a text";
    case KEY_CHOICE: return "a word";
    case KEY_PAIR: return "a list of two numbers";
    case KEY_WORDS: return "a list of words";
    case KEY_OBJECT: return "an object {...}";
    default: return "any value";
    }
}

// Whether x is in a range such as "0<..", "0..3" or "0..<1"; `why` gets the rule otherwise.
static bool config_in_range(const char *range, double x, char *why, size_t room) {
    const char *dots = strstr(range, "..");
    if (!dots) return true;
    bool has_low = dots > range, has_high = dots[2] != 0, open_low = has_low && dots[-1] == '<', open_high = dots[2] == '<';
    double low = has_low ? strtod(range, NULL) : 0, high = has_high ? strtod(dots + 2 + open_high, NULL) : 0; // digits only: no locale matters
    bool good = (!has_low || (open_low ? x > low : x >= low)) && (!has_high || (open_high ? x < high : x <= high));
    if (good) return true;
    size_t n = (size_t)snprintf(why, room, "must be");
    if (has_low) n += (size_t)snprintf(why + n, room - n, open_low ? " above %g" : " at least %g", low);
    if (has_high) n += (size_t)snprintf(why + n, room - n, "%s%s%.10g", has_low ? " and" : "", open_high ? " below " : " at most ", high);
    snprintf(why + n, room - n, "; give such a number");
    return false;
}

#define CONFIG_VALUE_MAX CONFIG_PATH_MAX // bytes of the largest field

static bool config_number(const ConfigReader *r, int node, const char **text, const char **remark) { // a number, quoted or not
    const JsonNode *n = &r->json->node[node];
    *text = json_text(r->json, node);
    if (n->type == JSON_STRING && json_number_valid(*text, n->length)) { *remark = "a number in quotes"; return true; }
    return n->type == JSON_NUMBER;
}

// Reads a node as row k wants it into value[], in the form of the field. False with a reason in why. `remark` is set when the form
// was tolerated only.
static bool config_convert(const ConfigReader *r, const ConfigKey *k, int node, char *value, char *why, size_t room, const char **remark) {
    const Json *j = r->json;
    const JsonNode *n = &j->node[node];
    const char *text = json_text(j, node);
    char words[200];
    if (n->type == JSON_ARRAY && (k->flags & LIST1)) {
        if (n->count != 1) {
            snprintf(why, room, "is a list of %d numbers; there is one group of weights here: give one number", n->count);
            return false;
        }
        node = n->first;
        n = &j->node[node];
    }
    switch (k->type) {
    case KEY_BOOL: {
        bool yes = n->type == JSON_STRING && config_same_word(text, "true"), no = n->type == JSON_STRING && config_same_word(text, "false");
        int64_t number = -1;
        bool whole = n->type == JSON_NUMBER && json_to_i64(text, n->length, &number) == JSON_WHOLE;
        if (whole && (number == 0 || number == 1)) { yes = number == 1; no = !yes; }
        if (n->type != JSON_BOOL && !yes && !no) break;
        if (n->type != JSON_BOOL) *remark = n->type == JSON_STRING ? "a boolean in quotes" : "a number as a boolean";
        *(bool *)value = n->type == JSON_BOOL ? n->truth : yes;
        return true;
    }
    case KEY_INT: {
        int64_t whole;
        if (!config_number(r, node, &text, remark)) break;
        JsonWhole kind = json_to_i64(text, n->length, &whole);
        double x;
        bool finite = json_to_double(text, &x);
        if (kind == JSON_FRACTION) {
            if (fabs(x) < 1e15) snprintf(why, room, "is not a whole number; give %.0f or %.0f", floor(x), floor(x) + 1);
            else snprintf(why, room, "is not a whole number; give one");
            return false;
        }
        if (kind == JSON_TOO_LARGE || !finite) { snprintf(why, room, "does not fit into 64 bits; give a number below 9.2e18"); return false; }
        *(int64_t *)value = whole;
        return config_in_range(k->accepts, (double)whole, why, room);
    }
    case KEY_FLOAT:
        if (!config_number(r, node, &text, remark)) break;
        if (!json_to_double(text, (double *)value)) { snprintf(why, room, "is not finite as a 64-bit number; give a smaller one"); return false; }
        return config_in_range(k->accepts, *(double *)value, why, room);
    case KEY_PAIR: {
        if (n->type != JSON_ARRAY) break;
        if (n->count != 2) { snprintf(why, room, "is a list of %d; give a list of two numbers", n->count); return false; }
        int element = n->first;
        for (int i = 0; i < 2; i++, element = j->node[element].next) {
            double *x = (double *)value + i;
            if (!config_number(r, element, &text, remark)) {
                snprintf(why, room, "holds %s; give a list of two numbers", json_type_name(j->node[element].type));
                return false;
            }
            if (!json_to_double(text, x)) { snprintf(why, room, "holds a number that is not finite; give a smaller one"); return false; }
            if (!config_in_range(k->accepts, *x, why, room)) return false;
        }
        return true;
    }
    case KEY_TEXT: {
        uint32_t bytes = k->size ? k->size : CONFIG_PATH_MAX;
        if (n->type != JSON_STRING && !(r->command_line && (n->type == JSON_NUMBER || n->type == JSON_BOOL))) break; // there quotes are rare
        if (memchr(text, 0, (size_t)n->length)) { snprintf(why, room, "holds a zero byte; remove it"); return false; }
        if (n->length >= (int32_t)bytes) { snprintf(why, room, "is longer than %u bytes; shorten it", bytes - 1); return false; }
        memset(value, 0, bytes);
        memcpy(value, text, (size_t)n->length);
        return true;
    }
    case KEY_CHOICE: {
        if (n->type != JSON_STRING && !r->command_line) break;
        int index = memchr(text, 0, (size_t)n->length) ? -1 : config_word_index(k->accepts, text);
        if (index < 0) {
            size_t used = 0;
            for (const char *at = k->accepts; *at && used < sizeof words - 32; at += strcspn(at, "|"), at += *at == '|')
                used += (size_t)snprintf(words + used, sizeof words - used, "%s%.*s", used ? ", " : "", (int)strcspn(at, "=|"), at);
            snprintf(why, room, "is not one of the words of this key; give %s%s", strchr(k->accepts, '|') ? "one of " : "", words);
            return false;
        }
        if (k->size == 1) *(bool *)value = index;
        else *(int32_t *)value = index;
        return true;
    }
    case KEY_WORDS:
        if (n->type != JSON_ARRAY) break;
        *(uint32_t *)value = 0;
        for (int element = n->first; element >= 0; element = j->node[element].next) {
            int index = j->node[element].type == JSON_STRING ? config_word_index(k->accepts, json_text(j, element)) : -1;
            if (index < 0) { snprintf(why, room, "holds something else than %s; remove that", k->accepts); return false; }
            *(uint32_t *)value |= 1u << index;
        }
        return true;
    case KEY_OBJECT:
        if (n->type == JSON_OBJECT) return true;
        break;
    case KEY_ANY: return true;
    }
    bool quotes = (k->type == KEY_TEXT || k->type == KEY_CHOICE) && (n->type == JSON_NUMBER || n->type == JSON_BOOL);
    snprintf(why, room, "is %s, but this key takes %s; %s", json_type_name(n->type), config_type_name(k), quotes ? "put it in quotes" : "give that");
    return false;
}

// The value of a row's `initial`, in the form of the field.
static void config_initial(const ConfigKey *k, char *value) {
    char quoted[CONFIG_NAME_MAX], why[128];
    const char *remark = NULL;
    memset(value, 0, k->size ? k->size : sizeof(double));
    if (!k->initial[0]) return;
    snprintf(quoted, sizeof quoted, k->type == KEY_TEXT || k->type == KEY_CHOICE ? "\"%s\"" : "%s", k->initial);
    Json j;
    ConfigReader reader = {};
    reader.json = &j;
    CHECK(json_parse(&j, quoted, (int64_t)strlen(quoted), JSON_STRICT) && config_convert(&reader, k, 0, value, why, sizeof why, &remark),
          "default %s of %s", k->initial, k->path);
    json_free(&j);
}

static void config_set_initial(Config *config, const ConfigKey *k) {
    char value[CONFIG_VALUE_MAX];
    config_initial(k, value);
    memcpy((char *)config + k->offset, value, k->size);
}

static int config_index(const ConfigKey *k) { return (int)(k - config_keys); }

// Whether the user gave the key of this row ("auto" and null do not count).
static bool config_row_given(const Config *config, int row) {
    return config->key[row].origin == ORIGIN_FILE || config->key[row].origin == ORIGIN_COMMAND_LINE;
}

static bool config_given(const Config *config, const char *path) {
    int row = config_find_key(path);
    CHECK(row >= 0, "no row for %s", path);
    return config_row_given(config, row);
}

// Says something about a key that has a field, where the user gave it and with the value in force.
PRINTF_LIKE(4, 5) static void config_say_key(ConfigReader *r, ConfigMessageKind kind, const char *path, const char *format, ...) {
    int i = config_find_key(path);
    CHECK(i >= 0, "no row for %s", path);
    ConfigKeyState *state = &r->config->key[i];
    char value[CONFIG_PATH_MAX + 16], text[1200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    const ConfigKey *k = &config_keys[i];
    bool has_value = k->size > 0 && (state->origin != ORIGIN_DEFAULT || k->initial[0]) && !(k->type == KEY_TEXT && !((const char *)r->config)[k->offset]);
    if (kind == CONFIG_PROBLEM) state->refused = true;
    if (state->alias) path = config_keys[state->alias - 1].path; // as the user knows it
    config_say(r, kind, state->origin == ORIGIN_COMMAND_LINE ? -1 : state->line, path,
               has_value ? config_show_field(r->config, &config_keys[i], value, sizeof value) : "", "%s", text);
}

static void config_derive(ConfigReader *r, const char *path, ConfigOrigin origin) { // notes that config_resolve set the field
    int i = config_find_key(path);
    CHECK(i >= 0, "no row for %s", path);
    ConfigKeyState *state = &r->config->key[i];
    if (state->origin != ORIGIN_AUTO) state->origin = (uint8_t)origin;
}

// ---------------------------------------------------------------------------------------------------------------
// Unknown keys: what may have been meant

#define CONFIG_WORD_MAX 48

// Damerau-Levenshtein distance (insert, delete, replace, swap two neighbours), in its restricted form: no part is edited twice.
static int config_distance(const char *a, const char *b) {
    int row[3][CONFIG_WORD_MAX + 1], n = (int)strlen(a), m = (int)strlen(b);
    if (n > CONFIG_WORD_MAX || m > CONFIG_WORD_MAX) return CONFIG_WORD_MAX;
    for (int j = 0; j <= m; j++) row[0][j] = j;
    for (int i = 1; i <= n; i++) {
        int *now = row[i % 3], *last = row[(i + 2) % 3], *before = row[(i + 1) % 3];
        now[0] = i;
        for (int j = 1; j <= m; j++) {
            int best = last[j - 1] + (a[i - 1] != b[j - 1]);
            if (last[j] + 1 < best) best = last[j] + 1;
            if (now[j - 1] + 1 < best) best = now[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && before[j - 2] + 1 < best) best = before[j - 2] + 1;
            now[j] = best;
        }
    }
    return row[n % 3][m];
}

// Folds what people mix up: letter case, blanks at the ends, '-' for '_', plural, the stage3_ prefix.
static void config_fold(char *dst, const char *src) {
    while (*src == ' ') src++;
    size_t n = 0;
    for (; *src && n < CONFIG_WORD_MAX; src++) dst[n++] = *src == '-' || *src == ' ' ? '_' : config_lower(*src);
    while (n > 0 && dst[n - 1] == '_') n--;
    if (n > 3 && dst[n - 1] == 's') n--;
    dst[n] = 0;
    if (strncmp(dst, "stage3_", 7) == 0) memmove(dst, dst + 7, strlen(dst + 7) + 1);
}

// Up to three keys that resemble `word` in section `prefix` ("" or "a.b."), as a question; "" if there is none.
static void config_suggest(const char *prefix, const char *word, char *dst, size_t room) {
    const ConfigKey *best[3];
    int score[3], count = 0;
    char folded[CONFIG_WORD_MAX + 1], other[CONFIG_WORD_MAX + 1];
    size_t length = strlen(prefix), word_length = strlen(word);
    int limit = word_length / 3 > 2 ? (int)(word_length / 3) : 2;
    if (limit >= (int)word_length) limit = (int)word_length - 1;
    config_fold(folded, word);
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
        const ConfigKey *k = &config_keys[i];
        if (k->treatment == TREAT_HEADING || k->treatment == TREAT_REFUSE || strchr(k->path, '*')) continue;
        const char *dot = strrchr(k->path, '.'), *last = dot ? dot + 1 : k->path;
        bool here = strncmp(k->path, prefix, length) == 0 && k->path + length == last;
        config_fold(other, last);
        int s = 1000;
        if (here && strcmp(folded, other) == 0) s = 0;
        else if (strcmp(last, word) == 0) s = 1;
        else if (here && config_distance(folded, other) <= limit) s = 2 + config_distance(folded, other);
        else if (strcmp(folded, other) == 0) s = 50;
        if (s == 1000) continue;
        int at = count < 3 ? count++ : 3;
        while (at > 0 && s < score[at - 1]) {
            if (at < 3) { best[at] = best[at - 1]; score[at] = score[at - 1]; }
            at--;
        }
        if (at < 3) { best[at] = k; score[at] = s; }
    }
    size_t n = 0;
    dst[0] = 0;
    for (int i = 0; i < count; i++) {
        if (i > 0 && score[i] == 50 && score[0] < 50) break; // much less alike than the first
        n += (size_t)snprintf(dst + n, room - n, "%s\"%s\"", i ? ", " : "did you mean ", best[i]->path);
    }
    if (count) snprintf(dst + n, room - n, "%s", "?");
}

// ---------------------------------------------------------------------------------------------------------------
// The walk over the nodes

static int config_compare_path(const void *a, const void *b) {
    return strcmp((*(const ConfigKey *const *)a)->path, (*(const ConfigKey *const *)b)->path);
}

static const ConfigKey *config_look_up(const ConfigReader *r, const char *path) {
    ConfigKey wanted = {};
    wanted.path = path;
    const ConfigKey *p = &wanted;
    const ConfigKey *const *found = (const ConfigKey *const *)bsearch(&p, r->sorted, CONFIG_KEY_COUNT, sizeof *r->sorted, config_compare_path);
    return found ? *found : NULL;
}

static int config_line(const ConfigReader *r, int node) { return r->command_line ? -1 : r->json->node[node].line; }

// The path of a node as the user wrote it.
static const char *config_node_path(const ConfigReader *r, int node, char *dst, size_t room) {
    int chain[JSON_DEPTH + 1], n = 0;
    for (int i = node; i > 0 && n <= JSON_DEPTH; i = r->json->node[i].parent) chain[n++] = i;
    size_t used = 0;
    dst[0] = 0;
    while (n > 0 && used + 1 < room) {
        int i = chain[--n];
        if (r->json->node[i].key < 0) continue; // an element of a list goes by the name of the list
        if (used) dst[used++] = '.';
        text_escape(dst + used, room - used, json_key(r->json, i), (size_t)r->json->node[i].key_length);
        used += strlen(dst + used);
        if (room - used < 8) break;
    }
    return dst;
}

PRINTF_LIKE(4, 5) static void config_say_node(ConfigReader *r, ConfigMessageKind kind, int node, const char *format, ...) {
    char path[300], value[100], text[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    config_say(r, kind, config_line(r, node), config_node_path(r, node, path, sizeof path),
               config_show_node(r->json, node, value, sizeof value), "%s", text);
}

// Counts the visit of a node and reports what is wrong with its form. False: there is no value to be used.
static bool config_visit(ConfigReader *r, int node) {
    const JsonNode *n = &r->json->node[node];
    char text[256];
    r->visits[node]++;
    if (n->twin >= 0) {
        config_say_node(r, CONFIG_PROBLEM, node, "the key is already on line %d; keep one of them", r->json->node[n->twin].line);
        return false;
    }
    if (n->fault) config_say_node(r, CONFIG_PROBLEM, node, "%s", json_fault_text(r->json, node, text, sizeof text));
    if (n->type == JSON_BAD) return false;
    const char *dollar = n->type == JSON_STRING ? strstr(json_text(r->json, node), "${") : NULL;
    if (dollar && strchr(dollar, '}')) {
        config_say_node(r, CONFIG_PROBLEM, node, "looks like a template whose variables were not filled in, and variables of the environment "
                        "are not read; put the value itself here");
        return false;
    }
    if (r->command_line) return true;
    if (n->remark == JSON_REMARK_PYTHON && !r->said_python) {
        r->said_python = true;
        config_say_node(r, CONFIG_NOTICE, node, "Python's spelling; taken as the true, false or null of JSON here and in the rest of the file");
    }
    if (n->remark == JSON_REMARK_QUOTES && !r->said_quotes) {
        r->said_quotes = true;
        config_say_node(r, CONFIG_NOTICE, node, "single quotes; taken as the double quotes of JSON here and in the rest of the file");
    }
    return true;
}

static void config_swallow(ConfigReader *r, int node) { // a node whose contents have no rows
    if (!config_visit(r, node)) { // nothing below is worth a word either
        for (int i = node + 1; i < r->json->count && r->json->node[i].parent >= node; i++) r->visits[i]++;
        return;
    }
    for (int c = r->json->node[node].first; c >= 0; c = r->json->node[c].next) config_swallow(r, c);
}

static bool config_is_comment(const Json *j, int node) { return json_key(j, node)[0] == '_' || strcmp(json_key(j, node), "comment") == 0; }

static bool config_is_on(const Json *j, int node) { // of a switch
    const JsonNode *n = &j->node[node];
    if (n->type == JSON_BOOL) return n->truth;
    if (n->type == JSON_NULL) return false;
    const char *text = json_text(j, node);
    if (n->type == JSON_STRING) return !config_same_word(text, "false") && !config_same_word(text, "auto");
    int64_t number;
    return !(n->type == JSON_NUMBER && json_to_i64(text, n->length, &number) == JSON_WHOLE && number == 0);
}

static int config_any_enabled(const Json *j, int node) { // the first "enabled" below that is on, or -1
    for (int c = j->node[node].first; c >= 0; c = j->node[c].next) {
        if (strcmp(json_key(j, c), "enabled") == 0 && config_is_on(j, c)) return c;
        int found = config_any_enabled(j, c);
        if (found >= 0) return found;
    }
    return -1;
}

// A section that is refused as a whole when it is on.
static void config_feature(ConfigReader *r, const ConfigKey *k, int node) {
    const Json *j = r->json;
    const JsonNode *n = &j->node[node];
    int on = -1; // the node that switches it on
    bool off = n->type == JSON_NULL || (n->type == JSON_BOOL && !n->truth);
    if (off) on = -1;
    else if (n->type != JSON_OBJECT || k->accepts[0] == 0) on = node;
    else if (strcmp(k->accepts, "*") == 0) on = config_any_enabled(j, node);
    else {
        int child = json_find(j, node, k->accepts);
        if (strcmp(k->accepts, "mode") == 0)
            on = child < 0 ? node : strcmp(json_text(j, child), "dense") == 0 && j->node[child].type == JSON_STRING ? -1 : child;
        else if (child >= 0 && config_is_on(j, child)) on = child;
    }
    if (on < 0) config_say_node(r, CONFIG_NOTICE, node, "is off; nothing in it has an effect (%s)", k->text);
    else if (k->flags & NOT_YET) config_say_node(r, CONFIG_UNBUILT, on, "not built yet (%s); remove the section, or switch it off", k->text);
    else
        config_say_node(r, CONFIG_PROBLEM, on, "is not part of this program (%s); remove the section%s", k->text,
                        strcmp(k->accepts, "enabled") == 0 ? ", or set \"enabled\" to false" : "");
    for (int c = n->first; c >= 0; c = j->node[c].next) config_swallow(r, c);
}

// Stores the value of a node in the field of row k. `alias`: the row of the spelling that was used, if it was another.
static void config_store(ConfigReader *r, const ConfigKey *k, const ConfigKey *alias, int node) {
    char value[CONFIG_VALUE_MAX] = {}, why[320];
    const char *remark = NULL;
    ConfigKeyState *state = &r->config->key[config_index(k)];
    const JsonNode *n = &r->json->node[node];
    if (alias && (alias->flags & ZERO_ABSENT) && n->type == JSON_NUMBER && !config_is_on(r->json, node)) return;
    if (!config_convert(r, k, node, value, why, sizeof why, &remark)) {
        state->refused = true;
        config_say_node(r, CONFIG_PROBLEM, node, "%s", why);
        return;
    }
    if (remark && !r->command_line) config_say_node(r, CONFIG_NOTICE, node, "%s; accepted", remark);
    if (k->treatment == TREAT_REFUSE_ON) {
        char inert[CONFIG_VALUE_MAX];
        config_initial(k, inert);
        if (memcmp(value, inert, k->type == KEY_BOOL ? 1 : 8) != 0) config_say_node(r, CONFIG_PROBLEM, node, "%s", k->text);
        else config_say_node(r, CONFIG_NOTICE, node, "has no effect: it is off here in any case");
    }
    if (k->treatment == TREAT_NOTE) config_say_node(r, CONFIG_NOTICE, node, "has no effect: %s", k->text);
    if (!k->size) return;
    char *field = (char *)r->config + k->offset;
    ConfigOrigin origin = r->command_line ? ORIGIN_COMMAND_LINE : ORIGIN_FILE;
    if (state->origin == origin && !r->command_line) { // the same key under another spelling
        if (memcmp(field, value, k->size) != 0)
            config_say_node(r, CONFIG_PROBLEM, node, "differs from the same setting on line %d (%s); keep one of them", state->line, k->path);
        else config_say_node(r, CONFIG_NOTICE, node, "repeats the setting on line %d (%s)", state->line, k->path);
        return;
    }
    if (state->origin == origin) config_say_node(r, CONFIG_INFO, node, "given more than once; the last one counts");
    memcpy(field, value, k->size);
    *state = {(uint8_t)origin, false, (int16_t)(alias ? config_index(alias) + 1 : 0), r->command_line ? 0 : n->line};
    if (alias && (alias->flags & SAY)) config_say_node(r, CONFIG_NOTICE, node, "taken as %s (%s)", k->path, alias->text);
    if (k->flags & (SAY | TELL)) config_say_node(r, k->flags & SAY ? CONFIG_NOTICE : CONFIG_INFO, node, "%s", k->text);
}

static void config_walk(ConfigReader *r, int object, const char *section);

static void config_section(ConfigReader *r, const ConfigKey *k, int node) {
    const Json *j = r->json;
    const JsonNode *n = &j->node[node];
    if (n->type == JSON_BOOL && (k->flags & BOOL_OK)) { // the old form of zero_optimization
        ConfigKeyState *stage = &r->config->key[config_find_key("zero_optimization.stage")];
        r->config->zero.stage = n->truth;
        stage->origin = r->command_line ? ORIGIN_COMMAND_LINE : ORIGIN_FILE;
        stage->alias = (int16_t)(config_index(k) + 1);
        stage->line = r->command_line ? 0 : n->line;
        config_say_node(r, CONFIG_NOTICE, node, "the old form; taken as {\"stage\": %d}", n->truth);
        return;
    }
    if (n->type == JSON_NULL) {
        if (!(k->flags & NULL_OK)) config_say_node(r, CONFIG_NOTICE, node, "null counts as not given");
        return;
    }
    if (n->type != JSON_OBJECT) {
        config_say_node(r, CONFIG_PROBLEM, node, "is %s, but this section is an object; write {...}", json_type_name(n->type));
        for (int c = n->first; c >= 0; c = j->node[c].next) config_swallow(r, c);
        return;
    }
    if (k->flags & SAY) config_say_node(r, CONFIG_NOTICE, node, "taken as %s (%s)", k->path, k->text);
    if (k->accepts[0] && !r->command_line) {
        int on = json_find(j, node, k->accepts);
        if ((on < 0 || !config_is_on(j, on)) && n->count > (on >= 0))
            config_say_node(r, CONFIG_NOTICE, node, "is off; its other keys have no effect (%s)", k->text);
    }
    config_walk(r, node, k->path);
}

// One member of an object. `path` is its key in the words of the table.
static void config_member(ConfigReader *r, int node, const char *path, const char *prefix) {
    const Json *j = r->json;
    const JsonNode *n = &j->node[node];
    const ConfigKey *k = config_look_up(r, path), *alias = NULL;
    char wildcard[260];
    if (!k) {
        snprintf(wildcard, sizeof wildcard, "%s*", prefix);
        k = config_look_up(r, wildcard);
    }
    if (r->foreign && prefix[0] == 0 && (!k || (k->treatment == TREAT_REFUSE && strchr(k->path, '-')))) { // already said for all of them
        config_swallow(r, node);
        return;
    }
    if (!k) {
        char help[600] = "";
        if (r->suggestions_left-- > 0) config_suggest(prefix, json_key(j, node), help, sizeof help);
        config_say_node(r, CONFIG_PROBLEM, node, "is no key%s; %s", prefix[0] ? " of this section" : "",
                        help[0] ? help : "remove it (--help-config lists all keys)");
        config_swallow(r, node);
        return;
    }
    if (k->treatment == TREAT_REFUSE) {
        config_say_node(r, CONFIG_PROBLEM, node, "%s", k->text);
        config_swallow(r, node);
        return;
    }
    if (!config_visit(r, node)) {
        for (int c = n->first; c >= 0; c = j->node[c].next) config_swallow(r, c);
        if (k->size) r->config->key[config_index(k)].refused = true;
        return;
    }
    if ((k->flags & V19) && !r->said_version) {
        r->said_version = true;
        config_say_node(r, CONFIG_INFO, node, "a key of DeepSpeed 0.19, which older versions do not know");
    }
    if (k->treatment == TREAT_ALIAS) {
        const char *dot = strrchr(k->accepts, '.');
        int both = (k->flags & EXCLUSIVE) ? json_find(j, n->parent, dot ? dot + 1 : k->accepts) : -1;
        if (both >= 0) {
            config_say_node(r, CONFIG_PROBLEM, node, "is another spelling of %s on line %d; keep one of them", k->accepts, j->node[both].line);
            for (int c = n->first; c >= 0; c = j->node[c].next) config_swallow(r, c);
            return;
        }
        alias = k;
        k = config_look_up(r, k->accepts);
        CHECK(k, "alias %s has no target", alias->path);
    }
    int flags = k->flags | (alias ? alias->flags : 0);
    if (k->treatment == TREAT_FEATURE) config_feature(r, k, node);
    else if (k->treatment == TREAT_SECTION) {
        if (alias && (alias->flags & SAY)) config_say_node(r, CONFIG_NOTICE, node, "taken as %s (%s)", k->path, alias->text);
        config_section(r, k, node);
    } else if (n->type == JSON_NULL || ((flags & FALSE_OK) && n->type == JSON_BOOL && !n->truth)) {
        if (r->command_line && k->size) { // takes back what the file says
            config_set_initial(r->config, k);
            r->config->key[config_index(k)] = {};
        }
        if (!(flags & NULL_OK)) config_say_node(r, CONFIG_NOTICE, node, "null counts as not given");
        else if (k->treatment == TREAT_NOTE) config_say_node(r, CONFIG_NOTICE, node, "has no effect: %s", k->text);
    } else if (n->type == JSON_STRING && strcmp(json_text(j, node), "auto") == 0 && k->type != KEY_ANY && !(flags & WORD_AUTO)) {
        if (!(flags & AUTO)) {
            config_say_node(r, CONFIG_PROBLEM, node, "\"auto\" has no meaning for this key; give a value, or remove the key");
            r->config->key[config_index(k)].refused = true;
        } else if (k->treatment == TREAT_NOTE) config_say_node(r, CONFIG_NOTICE, node, "has no effect: %s", k->text);
        else if (k->size && !(alias && r->config->key[config_index(k)].origin == ORIGIN_FILE)) {
            config_set_initial(r->config, k);
            r->config->key[config_index(k)] = {ORIGIN_AUTO, false, 0, r->command_line ? 0 : n->line};
        }
    } else if (k->treatment == TREAT_NOTE && k->type == KEY_ANY) {
        int enabled = json_find(j, node, "enabled");
        char place[100];
        bool off = enabled >= 0 && !config_is_on(j, enabled);
        const char *said = off ? "it is off" : k->text;
        if (flags & SECRET)
            config_say(r, CONFIG_NOTICE, config_line(r, node), config_node_path(r, node, place, sizeof place), "", "has no effect: %s", said);
        else config_say_node(r, CONFIG_NOTICE, node, "has no effect: %s", said);
        for (int c = n->first; c >= 0; c = j->node[c].next) config_swallow(r, c);
        return;
    } else config_store(r, k, alias, node);
    if (k->treatment != TREAT_SECTION && k->treatment != TREAT_FEATURE) for (int c = n->first; c >= 0; c = j->node[c].next) config_swallow(r, c);
}

static void config_walk(ConfigReader *r, int object, const char *section) {
    const Json *j = r->json;
    char prefix[256], path[256];
    snprintf(prefix, sizeof prefix, "%s%s", section, section[0] ? "." : "");
    for (int c = j->node[object].first; c >= 0; c = j->node[c].next) {
        const JsonNode *n = &j->node[c];
        if (config_is_comment(j, c)) {
            r->visits[c]++;
            for (int i = c + 1; i < j->count && j->node[i].parent >= c; i++) r->visits[i]++;
            continue;
        }
        int length = snprintf(path, sizeof path, "%s%.*s", prefix, n->key_length, json_key(j, c));
        bool plain = strlen(json_key(j, c)) == (size_t)n->key_length && !strpbrk(json_key(j, c), ".*"); // else it could pass for a path
        config_member(r, c, plain && length < (int)sizeof path ? path : "?", prefix);
    }
}

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

// ---------------------------------------------------------------------------------------------------------------
// What is printed on request

static const char *config_origin_text(const ConfigKeyState *state, char *dst, size_t room) {
    static const char *const name[] = {"default", "file", "command line", "auto", "derived", "preset"};
    size_t n = (size_t)snprintf(dst, room, "%s", name[state->origin]);
    if (state->line) n += (size_t)snprintf(dst + n, room - n, ", line %d", state->line);
    if (state->alias) snprintf(dst + n, room - n, ", alias %s", config_keys[state->alias - 1].path);
    return dst;
}

// Whether a row is part of the effective table: it has a value in force that means something.
static bool config_in_table(const Config *c, int i) {
    const ConfigKey *k = &config_keys[i];
    if (!k->size || (k->treatment == TREAT_LATER && c->key[i].origin == ORIGIN_DEFAULT) || strncmp(k->path, "zero_optimization.cpu_offload", 29) == 0)
        return false;
    bool of_optimizer = strncmp(k->path, "optimizer.", 10) == 0;
    const char *with = of_optimizer ? config_optimizer_name(c->optimizer.type) : config_scheduler_name(c->scheduler.type);
    if (k->with[0] && !config_has_word(k->with, with)) return false;
    if (k->type == KEY_TEXT && !((const char *)c)[k->offset]) return false;
    bool compat = k->offset >= offsetof(Config, compat) && k->offset < offsetof(Config, compat) + sizeof c->compat;
    if (compat && c->key[i].origin == ORIGIN_DEFAULT) return false;
    if (strstr(k->path, ".offload_param.") && !c->zero.offload_param.device) return false;
    if (strstr(k->path, ".offload_optimizer.") && !c->zero.offload_optimizer.device) return false;
    if (strncmp(k->path, "aio.", 4) == 0 && c->zero.offload_param.device != OFFLOAD_NVME && c->zero.offload_optimizer.device != OFFLOAD_NVME) return false;
    bool cosine_only = k->offset >= offsetof(Config, scheduler.warmup_steps) && k->offset < offsetof(Config, scheduler) + sizeof c->scheduler;
    if (cosine_only && c->scheduler.type != SCHEDULE_COSINE) return false;
    if (!c->scheduler.name[0] && strncmp(k->path, "scheduler.", 10) == 0) return false;
    return c->key[i].origin != ORIGIN_DEFAULT || k->initial[0]; // a size that is still open is no value
}

// The effective table: "key = value  # origin". Without the origins, each line is an override that gives the same configuration.
static void config_print_table(FILE *out, const Config *c) {
    const char *heading = NULL;
    char *value = (char *)host_alloc(CONFIG_SHOWN_MAX), origin[160];
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
        const ConfigKey *k = &config_keys[i];
        if (k->treatment == TREAT_HEADING) heading = k->text;
        if (!config_in_table(c, i)) continue;
        if (heading) fprintf(out, "# %s\n", heading);
        heading = NULL;
        int width = (int)max_i64(1, 70 - (int64_t)strlen(k->path));
        config_show_field(c, k, value, CONFIG_SHOWN_MAX);
        fprintf(out, "%s = %-*s # %s\n", k->path, width, value, config_origin_text(&c->key[i], origin, sizeof origin));
    }
    free(value);
}

static void config_print_help(FILE *out) {
    fprintf(out, "All keys. Values in the file are JSON; on the command line write key.path=value. \"auto\" is accepted where it says auto.\n");
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
        const ConfigKey *k = &config_keys[i];
        static const char *const type_name[] = {"any", "bool", "int", "float", "text", "word", "[float, float]", "[word, ...]", "object"};
        if (k->treatment == TREAT_HEADING) { fprintf(out, "\n%s\n", k->text); continue; }
        fprintf(out, "  %-56s ", k->path);
        char accepts[160];
        snprintf(accepts, sizeof accepts, "%s%s%s%s", type_name[k->type], k->accepts[0] ? " " : "", k->accepts, k->flags & AUTO ? ", auto" : "");
        switch (k->treatment) {
        case TREAT_USE:
            fprintf(out, "%s; %s%s%s%s: %s\n", accepts, k->initial[0] ? "default " : "no fixed default", k->initial, k->with[0] ? "; with " : "", k->with, k->text);
            break;
        case TREAT_LATER: fprintf(out, "%s; default %s: %s [not built yet]\n", accepts, k->initial, k->text); break;
        case TREAT_ALIAS: fprintf(out, "another spelling of %s\n", k->accepts); break;
        case TREAT_NOTE: fprintf(out, "no effect: %s\n", k->text); break;
        case TREAT_REFUSE: fprintf(out, "refused: %s\n", k->text); break;
        case TREAT_REFUSE_ON: fprintf(out, "refused unless %s: %s\n", k->initial, k->text); break;
        case TREAT_DETAIL: fprintf(out, "%s: %s\n", accepts, k->text); break;
        case TREAT_SECTION: fprintf(out, "section: %s\n", k->text); break;
        case TREAT_FEATURE: fprintf(out, "refused when on: %s%s\n", k->text, k->flags & NOT_YET ? " [not built yet]" : ""); break;
        case TREAT_HEADING: break;
        }
    }
}

static void config_print_usage(FILE *out) {
    fprintf(out,
            "usage: train_gpt [-c FILE] [key.path=value ...]\n\n"
            "  -c, --config FILE        configuration in DeepSpeed's schema; - reads standard input, base64:TEXT is the text itself\n"
            "  --deepspeed_config FILE, --deepspeed FILE   the same, as DeepSpeed's launcher writes it\n"
            "  key.path=value           overrides the file; the prefix train_gpt. may be left out: run.steps=100 data.train=book.txt\n"
            "  --check-config           check everything, print the table of effective values with their origins, train nothing\n"
            "  --world N                with --check-config: check for N ranks\n"
            "  --plan [RANKS]           print the memory that a rank needs, what it moves and an estimate of the time, and train nothing; no device, data or launcher is needed.\n"
            "                           RANKS is a list of numbers of ranks, a row each: --plan 1,2,4,8\n"
            "  --device-memory GIB      with --plan: what a device has, instead of the one that is here\n"
            "  --help-config            print all keys\n"
            "  --strict                 refuse keys that have no effect, instead of noting them\n"
            "  --generate \"PROMPT\"      print a continuation of PROMPT by the newest checkpoint\n"
            "  --export DIR             write the newest checkpoint as a Hugging Face folder\n"
            "  --load_dir DIR           folder of checkpoints to resume from, generate with or export\n"
            "  --load_tag TAG           one checkpoint of it instead of the newest\n"
            "  --flight DIR             print the flight recorders that a run of several ranks left in OUTPUT_DIR/flight\n"
            "  --inspect DIR            print what a checkpoint holds, or each of a folder, and verify all checksums\n"
            "  --local_rank N           set by launchers\n"
            "  --help, --version\n\n"
            "Exit codes: 0 done, 2 configuration refused, 65 data, 66 checkpoint, 70 a bug here, 73 and 74 files, 75 a rank was lost, 76 numerics.\n");
}

// ---------------------------------------------------------------------------------------------------------------
// The command line

// Fits a configuration whose precision is open to the device: bf16 needs a GPU of compute capability 8.0 (capability 80). The CPU
// backend, capability 0, has all types. To be called once the device is known.
static void config_fit_device(Config *c, int capability) {
    if (c->dtype != DTYPE_BF16 || capability == 0 || capability >= 80) return;
    if (!c->precision_is_auto)
        die_alike(EXIT_CONFIG, "bf16.enabled = true: this GPU has compute capability %d.%d, and bf16 needs 8.0; use fp16.enabled", capability / 10,
            capability % 10);
    c->bf16.enabled = false;
    c->fp16.enabled = true;
    c->dtype = DTYPE_FP16;
    note("precision \"auto\": fp16, because this GPU has compute capability %d.%d, and bf16 needs 8.0", capability / 10, capability % 10);
}

static bool config_read_int(const char *text, int64_t low, int64_t high, int64_t *value) { // plain digits
    int64_t v;
    if (!text || !json_number_valid(text, (int64_t)strlen(text)) || json_to_i64(text, (int64_t)strlen(text), &v) != JSON_WHOLE || v < low || v > high)
        return false;
    *value = v;
    return true;
}

// "--name VALUE" or "--name=VALUE" at argv[*i]: stores the value, or null where it is missing, and moves *i to the last argument used.
static bool config_option(int argc, char **argv, int *i, const char *name, const char **value) {
    size_t n = strlen(name);
    if (strncmp(argv[*i], name, n) != 0 || (argv[*i][n] != 0 && argv[*i][n] != '=')) return false;
    if (argv[*i][n] == '=') *value = argv[*i] + n + 1;
    else *value = *i + 1 < argc ? argv[++*i] : NULL;
    return true;
}

static void config_set_text(const char **dst, const char *option, const char *value) {
    if (!value || !value[0]) die_alike(EXIT_CONFIG, "%s needs a value after it; see --help", option);
    if ((*dst)[0] && strcmp(*dst, value) != 0) die_alike(EXIT_CONFIG, "%s is given twice with different values; give it once", option);
    *dst = value;
}

static char *config_read_stdin(int64_t *length) {
    char *text = (char *)host_alloc(CONFIG_FILE_MAX + 1);
    *length = 0;
    for (;;) {
        ssize_t n = read(0, text + *length, (size_t)(CONFIG_FILE_MAX + 1 - *length));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) die_alike(EXIT_CONFIG, "standard input: %s", strerror(errno));
        if (n == 0) return text;
        *length += n;
        if (*length > CONFIG_FILE_MAX) die_alike(EXIT_CONFIG, "standard input: more than the limit of %d bytes for a configuration", CONFIG_FILE_MAX);
    }
}

static char *config_read_base64(const char *src, int64_t *length) { // of RFC 4648, either alphabet
    static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_";
    char *text = (char *)host_alloc(strlen(src) + 1);
    uint32_t bits = 0;
    int held = 0;
    *length = 0;
    for (const char *s = src; *s && *s != '='; s++) {
        const char *found = strchr(alphabet, *s);
        if (!found) die_alike(EXIT_CONFIG, "-c base64: byte %td is no base64; give the text of the file encoded by base64", s - src);
        int64_t digit = found - alphabet;
        bits = bits << 6 | (uint32_t)(digit < 64 ? digit : digit - 2);
        held += 6;
        if (held >= 8) text[(*length)++] = (char)(bits >> (held -= 8) & 0xff);
    }
    return text;
}

// Ranks that a launcher started. Without a launcher: 1.
static int64_t config_world(void) {
    bool pmi = getenv("PMI_RANK") || getenv("PMIX_RANK"), step = getenv("SLURM_STEP_ID"); // else a batch script, which is no rank
    const struct { const char *name; bool counts; } names[] = {{"OMPI_COMM_WORLD_SIZE", true}, {"WORLD_SIZE", true}, {"SLURM_STEP_NUM_TASKS", step}, {"SLURM_NTASKS", pmi}};
    for (int i = 0; i < 4; i++) {
        const char *text = getenv(names[i].name);
        int64_t world;
        if (!text || !names[i].counts) continue;
        char shown[80];
        if (config_read_int(text, 1, 1000000, &world)) return world;
        note("the environment variable %s = \"%s\" is no number of ranks; ignored", names[i].name, text_escape(shown, sizeof shown, text, strlen(text)));
    }
    return 1;
}

static int64_t config_environment_rank(const char *openmpi, const char *other) {
    int64_t rank = 0, second;
    bool first = config_read_int(getenv(openmpi), 0, 1000000, &rank);
    if (!config_read_int(getenv(other), 0, 1000000, &second)) return rank;
    if (first && rank != second)
        die_alike(EXIT_CONFIG, "the environment says %s = %" PRId64 ", but %s = %" PRId64 "; unset one of them", openmpi, rank, other, second);
    return second;
}

// What the command line says besides the configuration.
typedef struct {
    const char *file;         // "" = none, "-" = standard input, "base64:..."
    const char **override;    // as many as n_overrides, and room for one more
    int n_overrides;
    bool strict, check, plan, world_given, generate;
    const char *prompt, *export_dir, *load_dir, *load_tag;
    int64_t world[CONFIG_WORLDS_MAX], local_rank;
    int n_worlds;             // more than one only with plan
    double device_memory;     // GiB
    void (*print)(FILE *out); // instead of everything else
} CommandLine;

static void config_print_version(FILE *out) { fprintf(out, "train_gpt %s\n", CONFIG_VERSION); }

// "1,2,4": numbers of ranks. False if it is no such list.
static bool config_read_worlds(const char *text, int64_t *world, int *n) {
    *n = 0;
    for (const char *at = text;; at++) {
        char number[16];
        size_t digits = strcspn(at, ",");
        if (digits == 0 || digits >= sizeof number || *n == CONFIG_WORLDS_MAX) return false;
        memcpy(number, at, digits);
        number[digits] = 0;
        if (!config_read_int(number, 1, 1000000, &world[(*n)++])) return false;
        at += digits;
        if (!*at) return true;
    }
}

static CommandLine config_read_arguments(int argc, char **argv) {
    CommandLine l = {};
    const char *value;
    l.file = l.prompt = l.export_dir = l.load_dir = l.load_tag = "";
    l.override = (const char **)host_alloc(((size_t)argc + 1) * sizeof *l.override);
    l.world[0] = config_world();
    l.n_worlds = 1;
    l.local_rank = config_environment_rank("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK");
    for (int i = 1; i < argc; i++) {
        char shown[200];
        const char *arg = argv[i];
        text_escape(shown, sizeof shown, arg, strlen(arg));
        bool bare_deepspeed = strcmp(arg, "--deepspeed") == 0 && (i + 1 == argc || argv[i + 1][0] == '-' || strchr(argv[i + 1], '='));
        if (strcmp(arg, "--help") == 0 || strcmp(arg, "-h") == 0) l.print = config_print_usage;
        else if (strcmp(arg, "--version") == 0) l.print = config_print_version;
        else if (strcmp(arg, "--help-config") == 0) l.print = config_print_help;
        if (l.print) return l;
        if (strcmp(arg, "--check-config") == 0) l.check = true;
        else if (strcmp(arg, "--strict") == 0) l.strict = true;
        else if (strcmp(arg, "--inspect") == 0) die_alike(EXIT_CONFIG, "%s takes a folder and stands alone: train_gpt --inspect DIR", shown);
        else if (strcmp(arg, "--plan") == 0 && (i + 1 == argc || argv[i + 1][0] < '0' || argv[i + 1][0] > '9')) l.plan = true; // for the ranks that are here
        else if (config_option(argc, argv, &i, "--plan", &value)) {
            if (!config_read_worlds(value, l.world, &l.n_worlds))
                die_alike(EXIT_CONFIG, "--plan takes numbers of ranks with commas between them, 1 to 1000000, at most %d of them: --plan 1,2,4,8", CONFIG_WORLDS_MAX);
            l.plan = true;
        }
        else if (config_option(argc, argv, &i, "--device-memory", &value)) {
            char *end;
            l.device_memory = value ? strtod(value, &end) : 0;
            if (!(l.device_memory > 0) || !isfinite(l.device_memory) || *end)
                die_alike(EXIT_CONFIG, "--device-memory needs a number of GiB after it, such as 80");
        }
        else if (bare_deepspeed) note("--deepspeed without a file has no effect; name the configuration after it, or with -c");
        else if (config_option(argc, argv, &i, "-c", &value) || config_option(argc, argv, &i, "--config", &value) ||
                 config_option(argc, argv, &i, "--deepspeed_config", &value) || config_option(argc, argv, &i, "--deepspeed", &value))
            config_set_text(&l.file, "-c", value);
        else if (config_option(argc, argv, &i, "--generate", &value)) {
            if (!value) die_alike(EXIT_CONFIG, "--generate needs a prompt after it; it may be empty: \"\"");
            l.generate = true;
            l.prompt = value;
        }
        else if (config_option(argc, argv, &i, "--export", &value)) config_set_text(&l.export_dir, "--export", value);
        else if (config_option(argc, argv, &i, "--load_dir", &value)) config_set_text(&l.load_dir, "--load_dir", value);
        else if (config_option(argc, argv, &i, "--load_tag", &value)) config_set_text(&l.load_tag, "--load_tag", value);
        else if (config_option(argc, argv, &i, "--local_rank", &value) || config_option(argc, argv, &i, "--local-rank", &value)) {
            if (!config_read_int(value, 0, 1000000, &l.local_rank)) die_alike(EXIT_CONFIG, "%s: --local_rank needs a number after it", shown);
        }
        else if (config_option(argc, argv, &i, "--world", &value)) {
            if (!config_read_int(value, 1, 1000000, &l.world[0])) die_alike(EXIT_CONFIG, "%s: --world needs a number of ranks after it, 1 to 1000000", shown);
            l.world_given = true;
        }
        else if (arg[0] == '-') die_alike(EXIT_CONFIG, "%s is no option%s; see --help", shown, strchr(arg, '=') ? " (overrides such as run.steps=100 have no dashes)" : "");
        else l.override[l.n_overrides++] = arg;
    }
    if (l.world_given && !l.check) die_alike(EXIT_CONFIG, "--world belongs to --check-config; start the ranks with a launcher, such as mpirun, or say --plan RANKS");
    if (l.device_memory > 0 && !l.plan) die_alike(EXIT_CONFIG, "--device-memory belongs to --plan");
    if (l.plan && (l.check || l.generate || l.export_dir[0])) die_alike(EXIT_CONFIG, "--plan and %s cannot be in one run; give one of them", l.check ? "--check-config" : l.generate ? "--generate" : "--export");
    if (l.generate && l.export_dir[0]) die_alike(EXIT_CONFIG, "--generate and --export cannot be in one run; give one of them");
    if (l.load_tag[0] && !config_tag_valid(l.load_tag))
        die_alike(EXIT_CONFIG, "--load_tag: a tag has letters, digits, '.', '_' and '-', and begins with neither '.' nor '-'");
    return l;
}

// The text of the configuration; null when none is named.
static char *config_read_source(const CommandLine *l, const char **name, int64_t *length) {
    char why[200], shown[400];
    *name = l->file;
    *length = 0;
    if (!l->file[0]) return NULL;
    if (strcmp(l->file, "-") == 0) { *name = "standard input"; return config_read_stdin(length); }
    if (strncmp(l->file, "base64:", 7) == 0) { *name = "base64"; return config_read_base64(l->file + 7, length); }
    char *text = file_read_all(l->file, true, CONFIG_FILE_MAX, length, why, sizeof why);
    if (!text) die_alike(EXIT_CONFIG, "%s: %s; name a configuration file after -c", text_escape(shown, sizeof shown, l->file, strlen(l->file)), why);
    return text;
}

static void config_apply_environment(Config *config) {
    char shown[100];
    const char *timeout = getenv("DEEPSPEED_TIMEOUT");
    int64_t minutes;
    if (!timeout || config_given(config, "zero_optimization.timeout")) return;
    if (config_read_int(timeout, 1, 1000000, &minutes)) {
        config->zero.timeout = 60 * minutes;
        config->key[config_find_key("zero_optimization.timeout")].origin = ORIGIN_DERIVED;
    } else {
        text_escape(shown, sizeof shown, timeout, strlen(timeout));
        note("the environment variable DEEPSPEED_TIMEOUT = \"%s\" is no number of minutes; ignored", shown);
    }
}

// Prints the report; a configuration that is refused ends the program. Every rank comes to the same verdict, and one tells it
// (see rank_tells).
// trains: choices that the program made for training are worth a line.
static void config_tell(const ConfigReport *report, bool trains) {
    bool refused = config_refusals(report) > 0, speaks = message_rank == 0 || (refused && rank_tells());
    char rank[32] = "";
    if (message_rank > 0) snprintf(rank, sizeof rank, "rank %d: ", message_rank);
    int64_t listed = 0;
    for (int i = 0; i < report->count && speaks; i++) {
        bool refusal = report->message[i].kind == CONFIG_PROBLEM || report->message[i].kind == CONFIG_UNBUILT;
        listed += refusal;
        if (refusal) fprintf(stderr, "%s%s\n", rank, report->message[i].text);
        else if (!refused && (trains || report->message[i].kind != CONFIG_INFO)) note("%s", report->message[i].text);
    }
    if (!refused) return;
    if (speaks && listed < config_refusals(report)) fprintf(stderr, "%s%" PRId64 " more problems are not listed\n", rank, config_refusals(report) - listed);
    fflush(stderr);
    _exit(EXIT_CONFIG);
}

static void config_free(Config *config) {
    for (Config *next; config; config = next) {
        next = config->next_world;
        free(config);
    }
}

// What the command line and the text say for `world` ranks. Ends the program when it is refused, but for the later worlds of a plan.
static Config *config_for_world(CommandLine *l, const char *text, int64_t length, const char *name, int64_t world, bool first) {
    Config *config = (Config *)host_alloc(sizeof *config);
    ConfigReport report = {};
    config_parse(text, length, name, l->override, l->n_overrides, world, l->strict, config, &report);
    // A plan may ask for worlds that the file was not written for: there micro-batch and accumulation hold.
    if (l->plan && config_refusals(&report) > 0 && config_given(config, "train_micro_batch_size_per_gpu") && config_given(config, "train_batch_size")) {
        l->override[l->n_overrides] = "train_batch_size=auto";
        config_report_free(&report);
        config_parse(text, length, name, l->override, l->n_overrides + 1, world, l->strict, config, &report);
        config->batch_follows = true;
    }
    const struct { const char *option; char *dst; size_t room; const char *value; } texts[] = {
        {"-c", config->file, sizeof config->file, strncmp(l->file, "base64:", 7) == 0 ? "base64" : l->file},
        {"--generate", config->generate_prompt, sizeof config->generate_prompt, l->prompt},
        {"--export", config->export_dir, sizeof config->export_dir, l->export_dir},
        {"--load_dir", config->load_dir, sizeof config->load_dir, l->load_dir},
        {"--load_tag", config->load_tag, sizeof config->load_tag, l->load_tag},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (strlen(texts[i].value) >= texts[i].room) die_alike(EXIT_CONFIG, "%s: the value is longer than %zu bytes; shorten it", texts[i].option, texts[i].room - 1);
        strcpy(texts[i].dst, texts[i].value);
    }
    config->generate = l->generate;
    config->local_rank = l->local_rank;
    config->plan = l->plan;
    config->device_memory = l->device_memory;
    config_apply_environment(config);
    if (first) config_tell(&report, !l->generate && !l->export_dir[0] && !l->plan);
    config->refused = config_refusals(&report) > 0; // only a later world comes here so
    for (int i = 0; i < report.count && config->refused && message_rank == 0; i++)
        if (report.message[i].kind == CONFIG_PROBLEM || report.message[i].kind == CONFIG_UNBUILT) fprintf(stderr, "%" PRId64 " ranks: %s\n", world, report.message[i].text);
    config_report_free(&report);
    return config;
}

static Config *config_load(int argc, char **argv) {
    CommandLine l = config_read_arguments(argc, argv);
    const char *name;
    int64_t length;
    if (l.print) {
        if (message_rank == 0) l.print(stdout);
        fflush(stdout);
        free(l.override);
        return NULL;
    }
    char *text = config_read_source(&l, &name, &length);
    Config *config = config_for_world(&l, text, length, name, l.world[0], true), *last = config;
    for (int i = 1; i < l.n_worlds; i++) last = last->next_world = config_for_world(&l, text, length, name, l.world[i], false);
    free(text);
    free(l.override);
    if ((l.check || (config->dump_state && !l.plan)) && message_rank == 0) config_print_table(stdout, config);
    if (!l.check) return config;
    fflush(stdout);
    config_free(config);
    return NULL;
}
