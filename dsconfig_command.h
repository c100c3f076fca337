// dsconfig_command.h - the command line, and what it can ask to be printed: --help, --help-config, --check-config, the effective table.
//
// A part of dsconfig.h, which includes it last.
#pragma once

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

// Whether a row that was given, and has its default, can be left out for what the reader had to say of it.
static bool config_needless(const Config *c, int i, const ConfigReport *report) {
    const ConfigKey *k = &config_keys[i];
    char initial[CONFIG_VALUE_MAX];
    config_initial(k, initial);
    return report->about[i] && k->initial[0] && memcmp(initial, (const char *)c + k->offset, k->size) == 0;
}

// The same as one JSON object, which can be given back as a configuration file. report: of its reading from such an object, of which then
// only the keys are printed whose being given means something; else null.
static void config_print_json(FILE *out, const Config *c, const ConfigReport *report) {
    const ConfigKey *row[CONFIG_KEY_ROOM];
    char *value = (char *)host_alloc(CONFIG_SHOWN_MAX);
    const char *before = "", *at, *end;
    int n = 0, depth = 1;
    for (int i = 0; i < CONFIG_KEY_COUNT; i++)
        if (config_in_table(c, i) && (!report || (config_row_given(c, i) && !config_needless(c, i, report)))) row[n++] = &config_keys[i];
    qsort(row, (size_t)n, sizeof *row, config_compare_path); // sections are whole then
    fputc('{', out);
    for (int i = 0; i < n; i++) {
        size_t same = 0; // bytes of the sections that this key and the one before share
        for (size_t k = 0; row[i]->path[k] && row[i]->path[k] == before[k]; k++) if (before[k] == '.') same = k + 1;
        for (at = before + same; (at = strchr(at, '.')); at++) fprintf(out, "\n%*s}", 4 * --depth, "");
        if (i) fputc(',', out);
        for (at = row[i]->path + same; (end = strchr(at, '.')); at = end + 1) fprintf(out, "\n%*s\"%.*s\": {", 4 * depth++, "", (int)(end - at), at);
        const char *quote = row[i]->type == KEY_CHOICE ? "\"" : "";
        fprintf(out, "\n%*s\"%s\": %s%s%s", 4 * depth, "", at, quote, config_show_field(c, row[i], value, CONFIG_SHOWN_MAX), quote);
        before = row[i]->path;
    }
    while (depth > 0) fprintf(out, "\n%*s}", 4 * --depth, "");
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
            "  --host-memory GIB        with --plan: what a host has for the ranks on it, up to 8; not limited unless it is given\n"
            "  --help-config            print all keys\n"
            "  --strict                 refuse keys that have no effect, instead of noting them\n"
            "  --generate \"PROMPT\"      print a continuation of PROMPT by the newest checkpoint\n"
            "  --export DIR             write the newest checkpoint as a Hugging Face folder\n"
            "  --load_dir DIR           folder of checkpoints, or a run's output folder, to resume from, generate with or export\n"
            "  --load_tag TAG           one checkpoint of it instead of the newest\n"
            "  --flight DIR             print the flight recorders that a run of several ranks left in OUTPUT_DIR/flight\n"
            "  --inspect DIR            print what a checkpoint holds, or each of a folder, and verify all checksums\n"
            "  --inspect-config DIR     print the configuration that wrote a checkpoint, or the newest of a folder, as a file for -c on as many ranks\n"
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

// Refuses a model that is too wide for the device to train, or, where it is not known, for any. most: layernorm_backward_channels_max(any).
static void config_fit_channels(const Config *c, int64_t most, bool any) {
    if (c->model.n_embd <= most) return;
    die_alike(EXIT_CONFIG, "train_gpt.model.n_embd = %" PRId64 ": LayerNorm's backward pass takes at most %" PRId64 " channels on %s", c->model.n_embd, most,
              any ? "any GPU; lower n_embd" : "this GPU, whose blocks have no more shared memory; lower n_embd, or train on a GPU whose blocks have more (16384 channels are the most on any)");
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

// What of a configuration is written for a number of ranks, as overrides that take it back: the batch, then the degrees.
enum { CONFIG_OF_BATCH = 3, CONFIG_OF_RANKS = 6 };
static const char *const config_of_ranks[CONFIG_OF_RANKS] = {"train_batch_size=auto", "gradient_accumulation_steps=auto", "data_parallel_size=auto",
    "tensor_model_parallel_size=1", "pipeline_model_parallel_size=1", "sequence_parallel_size=1"};

// What the command line says besides the configuration.
typedef struct {
    const char *file;         // "" = none, "-" = standard input, "base64:..."
    const char **override;    // as many as n_overrides, and room for CONFIG_OF_RANKS more
    int n_overrides;
    bool strict, check, plan, world_given, generate;
    const char *prompt, *export_dir, *load_dir, *load_tag;
    int64_t world[CONFIG_WORLDS_MAX], local_rank;
    int n_worlds;             // more than one only with plan
    double device_memory, host_memory; // GiB
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

// A positive number. False if it is none.
static bool config_read_gib(const char *text, double *gib) {
    char *end;
    *gib = text ? strtod(text, &end) : 0;
    return *gib > 0 && isfinite(*gib) && !*end;
}

static CommandLine config_read_arguments(int argc, char **argv) {
    CommandLine l = {};
    const char *value;
    l.file = l.prompt = l.export_dir = l.load_dir = l.load_tag = "";
    l.override = (const char **)host_alloc(((size_t)argc + CONFIG_OF_RANKS) * sizeof *l.override);
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
        else if (strcmp(arg, "--inspect") == 0 || strcmp(arg, "--inspect-config") == 0) die_alike(EXIT_CONFIG, "%s takes a folder and stands alone: train_gpt %s DIR", shown, shown);
        else if (strcmp(arg, "--plan") == 0 && (i + 1 == argc || argv[i + 1][0] < '0' || argv[i + 1][0] > '9')) l.plan = true; // for the ranks that are here
        else if (config_option(argc, argv, &i, "--plan", &value)) {
            if (!config_read_worlds(value, l.world, &l.n_worlds))
                die_alike(EXIT_CONFIG, "--plan takes numbers of ranks with commas between them, 1 to 1000000, at most %d of them: --plan 1,2,4,8", CONFIG_WORLDS_MAX);
            l.plan = true;
        }
        else if (config_option(argc, argv, &i, "--device-memory", &value)) {
            if (!config_read_gib(value, &l.device_memory)) die_alike(EXIT_CONFIG, "--device-memory needs a number of GiB after it, such as 80");
        }
        else if (config_option(argc, argv, &i, "--host-memory", &value)) {
            if (!config_read_gib(value, &l.host_memory)) die_alike(EXIT_CONFIG, "--host-memory needs a number of GiB after it, such as 512");
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
    if ((l.device_memory > 0 || l.host_memory > 0) && !l.plan) die_alike(EXIT_CONFIG, "%s belongs to --plan", l.device_memory > 0 ? "--device-memory" : "--host-memory");
    if (l.plan && (l.check || l.generate || l.export_dir[0])) die_alike(EXIT_CONFIG, "--plan and %s cannot be in one run; give one of them", l.check ? "--check-config" : l.generate ? "--generate" : "--export");
    if (l.generate && l.export_dir[0]) die_alike(EXIT_CONFIG, "--generate and --export cannot be in one run; give one of them");
    if (l.load_tag[0] && !config_tag_valid(l.load_tag))
        die_alike(EXIT_CONFIG, "--load_tag: a tag has letters, digits, '.', '_' and '-', and begins with neither '.' nor '-'");
    return l;
}

// What a command line asks for: "training", or the first option that asks for something else, with the value that its work depends on.
static void config_request(int argc, char **argv, char *dst, size_t room) {
    static const struct { const char *option; bool with_value; } requests[] = {{"--help", false}, {"-h", false}, {"--version", false}, {"--help-config", false}, {"--check-config", false},
        {"--plan", false}, {"--generate", true}, {"--export", true}, {"--inspect", true}, {"--inspect-config", true}, {"--flight", true}};
    const char *value;
    snprintf(dst, room, "training");
    for (int i = 1; i < argc; i++)
        for (size_t k = 0; k < sizeof requests / sizeof *requests; k++) {
            if (!config_option(argc, argv, &i, requests[k].option, &value)) continue;
            snprintf(dst, room, requests[k].with_value && value ? "%s %s" : "%s", requests[k].option, value);
            return;
        }
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

// Parses once more, without the first `n` of what is written for a number of ranks.
static void config_parse_without(CommandLine *l, int n, const char *text, int64_t length, const char *name, int64_t world, Config *config, ConfigReport *report) {
    memcpy(l->override + l->n_overrides, config_of_ranks, (size_t)n * sizeof *l->override);
    config_report_free(report);
    config_parse(text, length, name, l->override, l->n_overrides + n, world, l->strict, config, report);
}

// A checkpoint is read by any number of ranks, under any layout: what a configuration says for the ranks that trained must not
// refuse those that read. What it says for another reason does.
static void config_fit_reader(CommandLine *l, const char *text, int64_t length, const char *name, int64_t world, Config *config, ConfigReport *report) {
    static const int left_out[] = {CONFIG_OF_BATCH, CONFIG_OF_RANKS, 0};
    int tries = 0;
    while (config_refusals(report) > 0 && tries < 3) config_parse_without(l, left_out[tries++], text, length, name, world, config, report);
    if (tries == 0 || config_refusals(report) > 0 || message_rank != 0) return;
    note("%s: the configuration's batch %s not for %" PRId64 " rank%s, and left out: none of it is needed to read a checkpoint", l->generate ? "--generate" : "--export",
         tries == 1 ? "is" : "and degrees of parallelism are", world, world == 1 ? "" : "s");
}

// What the command line and the text say for `world` ranks. Ends the program when it is refused, but for the later worlds of a plan.
static Config *config_for_world(CommandLine *l, const char *text, int64_t length, const char *name, int64_t world, bool first) {
    Config *config = (Config *)host_alloc(sizeof *config);
    ConfigReport report = {};
    config_parse(text, length, name, l->override, l->n_overrides, world, l->strict, config, &report);
    // A plan may ask for worlds that the file was not written for: there micro-batch and accumulation hold.
    if (l->plan && config_refusals(&report) > 0 && config_given(config, "train_micro_batch_size_per_gpu") && config_given(config, "train_batch_size")) {
        config_parse_without(l, 1, text, length, name, world, config, &report);
        config->batch_follows = true;
    }
    if (l->generate || l->export_dir[0]) config_fit_reader(l, text, length, name, world, config, &report);
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
    config->host_memory = l->host_memory;
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
        output_flush();
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
    output_flush();
    config_free(config);
    return NULL;
}
