// dsconfig_rules.h - what only several keys together can tell: the batch triangle, presets, precision, schedules, ZeRO.
//
// Each config_resolve_* works out the fields that the user left open and then checks one group of keys. It runs after all keys are
// stored, so that a rule sees the whole configuration whatever the order in the file. A rule says who is to blame, with the value and
// the remedy, and goes on. Rules that depend on a key which was refused already keep silent: one mistake, one message.
//
// A part of dsconfig.h, which includes it after the functions that it calls.
#pragma once

// ---------------------------------------------------------------------------------------------------------------
// The batch triangle: train = micro x accumulation x D, where D = world / (tensor x pipeline x sequence)

typedef struct {
    int64_t world, tensor, pipeline, sequence;
    int64_t train, micro, accumulation; // 0 = not given
} BatchTriangle;

static const char *config_ranks_text(const BatchTriangle *g, int64_t D, char *dst, size_t room) { // how D comes about
    snprintf(dst, room, "%" PRId64 " data-parallel rank%s (%" PRId64 " / tensor %" PRId64 " / pipeline %" PRId64 " / sequence %" PRId64 ")", D,
             D == 1 ? "" : "s", g->world, g->tensor, g->pipeline, g->sequence);
    return dst;
}

// Solves for what is 0. Returns null and fills the rest, with D in *data, or returns the key to blame, with a reason in `why`.
// micro_default is taken where neither total nor micro is given.
static const char *config_solve_batch(const BatchTriangle *given, int64_t micro_default, BatchTriangle *solved, int64_t *data, char *why,
                                      size_t room) {
    int64_t train = given->train, micro = given->micro, accumulation = given->accumulation, degrees, D, product;
    char ranks[200];
    *solved = *given;
    *data = 1;
    bool huge = __builtin_mul_overflow(given->tensor, given->pipeline, &degrees) || __builtin_mul_overflow(degrees, given->sequence, &degrees);
    if (huge || given->world % degrees != 0) {
        size_t n = (size_t)snprintf(why, room, "%" PRId64 " rank%s cannot be divided into tensor %" PRId64 " x pipeline %" PRId64
                                    " x sequence %" PRId64 "; the product of the degrees must be a divisor of %" PRId64 ":", given->world,
                                    given->world == 1 ? "" : "s", given->tensor, given->pipeline, given->sequence, given->world);
        for (int64_t d = 1, listed = 0; d <= given->world && listed < 12; d++) {
            if (given->world % d != 0 || n + 24 >= room) continue;
            n += (size_t)snprintf(why + n, room - n, "%s %" PRId64, listed ? "," : "", d);
            listed++;
        }
        return given->tensor > 1 ? "tensor_model_parallel_size" : given->pipeline > 1 ? "pipeline_model_parallel_size" : "sequence_parallel_size";
    }
    D = *data = given->world / degrees;
    config_ranks_text(given, D, ranks, sizeof ranks);
    if (micro == 0 && train == 0) micro = micro_default;
    if (accumulation == 0 && (micro == 0 || train == 0)) accumulation = 1;
    if (train == 0) {
        if (__builtin_mul_overflow(micro, accumulation, &product) || __builtin_mul_overflow(product, D, &train)) {
            snprintf(why, room, "x gradient_accumulation_steps %" PRId64 " x %s does not fit into 64 bits; lower it", accumulation, ranks);
            return "train_micro_batch_size_per_gpu";
        }
    } else if (micro != 0 && accumulation != 0) {
        if (__builtin_mul_overflow(micro, accumulation, &product) || __builtin_mul_overflow(product, D, &product)) product = 0;
        if (product != train) {
            snprintf(why, room, "is not train_micro_batch_size_per_gpu %" PRId64 " x gradient_accumulation_steps %" PRId64 " x %s = %" PRId64
                     "; set it to %" PRId64 ", or remove one of the three keys (or say \"auto\") to have it worked out", micro, accumulation, ranks,
                     product, product);
            return "train_batch_size";
        }
    } else { // one of the two is open
        int64_t known = micro ? micro : accumulation, unit, below, above;
        if (__builtin_mul_overflow(known, D, &unit)) unit = INT64_MAX;
        below = train / unit * unit;
        if (train != below) {
            if (__builtin_add_overflow(below, unit, &above)) above = 0;
            size_t n = (size_t)snprintf(why, room, "cannot be divided by %s %" PRId64 " x %s = %" PRId64 "; the nearest values that can:",
                                        micro ? "train_micro_batch_size_per_gpu" : "gradient_accumulation_steps", known, ranks, unit);
            if (below) n += (size_t)snprintf(why + n, room - n, " %" PRId64 "%s", below, above ? " and" : "");
            if (above) snprintf(why + n, room - n, " %" PRId64, above);
            return "train_batch_size";
        }
        if (micro) accumulation = train / unit;
        else micro = train / unit;
    }
    solved->train = train;
    solved->micro = micro;
    solved->accumulation = accumulation;
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------
// Resolution: what was left open, and what only several keys together can tell

typedef struct {
    const char *name;
    int64_t n_layer, n_head, n_embd, n_positions;
} ConfigPreset;

// Radford et al. 2019, and table 2.1 of Brown et al. 2020 with the three corrections that others made too, where heads x head size is
// not the width: 1.3B has 16 heads of 128, 760M 16 of 96, and 13B is 5120 wide.
static const ConfigPreset config_presets[] = {
    {"gpt2-124M", 12, 12, 768, 1024},  {"gpt2-355M", 24, 16, 1024, 1024}, {"gpt2-774M", 36, 20, 1280, 1024}, {"gpt2-1558M", 48, 25, 1600, 1024},
    {"gpt3-125M", 12, 12, 768, 2048},  {"gpt3-350M", 24, 16, 1024, 2048}, {"gpt3-760M", 24, 16, 1536, 2048}, {"gpt3-1.3B", 24, 16, 2048, 2048},
    {"gpt3-2.7B", 32, 32, 2560, 2048}, {"gpt3-6.7B", 32, 32, 4096, 2048}, {"gpt3-13B", 40, 40, 5120, 2048},  {"gpt3-175B", 96, 96, 12288, 2048},
};
static const ConfigPreset config_small_model = {"", 4, 4, 256, 256}; // when nobody says anything: learns on a laptop

#define MODEL_KEY(name) "train_gpt.model." name
#define RUN_KEY(name) "train_gpt.run." name
#define SCHEDULER_KEY(name) "scheduler.params." name
#define ZERO_KEY(name) "zero_optimization." name
#define WINDOW_KEY "sequence_parallel.attention_window_size"

// One setting has one spelling in force, so that settings can be compared.
static void config_set_word(char word[CONFIG_NAME_MAX], const char *name) {
    memset(word, 0, CONFIG_NAME_MAX);
    memcpy(word, name, strlen(name));
}

static bool config_refused(const Config *c, const char *path) { return c->key[config_find_key(path)].refused; }

// Neither given, nor left to the program, nor given in a form that was refused already.
static bool config_missing(const Config *c, const char *path) {
    const ConfigKeyState *state = &c->key[config_find_key(path)];
    return !config_given(c, path) && state->origin != ORIGIN_AUTO && !state->refused;
}

static void config_resolve_model(ConfigReader *r) {
    Config *c = r->config;
    ModelConfig *m = &c->model;
    const ConfigPreset *p = NULL;
    bool sized = config_given(c, MODEL_KEY("n_layer")) || config_given(c, MODEL_KEY("n_head")) || config_given(c, MODEL_KEY("n_embd"));
    if (m->preset[0]) {
        for (size_t i = 0; i < sizeof config_presets / sizeof *config_presets; i++)
            if (config_same_word(m->preset, config_presets[i].name)) p = &config_presets[i];
        if (p) config_set_word(m->preset, p->name);
        else
            config_say_key(r, CONFIG_PROBLEM, MODEL_KEY("preset"), "is no preset; give %s",
                           config_keys[config_find_key(MODEL_KEY("preset"))].text);
        if (m->init_from[0])
            config_say_key(r, CONFIG_PROBLEM, MODEL_KEY("preset"),
                           "stands beside train_gpt.model.init_from, which tells the shape already; remove one of them");
    } else if (!m->init_from[0] && !sized) {
        p = &config_small_model;
        config_say(r, CONFIG_INFO, 0, "", "", "no model is given: a small GPT-2 of %" PRId64 " layers, %" PRId64 " heads, width %" PRId64 "; "
                   "set train_gpt.model.preset, .init_from or .n_layer, .n_head and .n_embd", p->n_layer, p->n_head, p->n_embd);
    } else if (!m->init_from[0]) {
        static const char *const shape[] = {MODEL_KEY("n_layer"), MODEL_KEY("n_head"), MODEL_KEY("n_embd")};
        for (int i = 0; i < 3; i++)
            if (config_missing(c, shape[i]))
                config_say_key(r, CONFIG_PROBLEM, shape[i], "is missing; a shape needs n_layer, n_head and n_embd, or a preset");
    }
    if (p) {
        const struct { const char *key; int64_t *field, value; } fill[] = {
            {MODEL_KEY("n_layer"), &m->n_layer, p->n_layer},
            {MODEL_KEY("n_head"), &m->n_head, p->n_head},
            {MODEL_KEY("n_embd"), &m->n_embd, p->n_embd},
            {MODEL_KEY("n_positions"), &m->n_positions, p->n_positions},
        };
        for (size_t i = 0; i < sizeof fill / sizeof *fill; i++) { // what the user says beats the preset
            if (*fill[i].field == 0) { *fill[i].field = fill[i].value; config_derive(r, fill[i].key, ORIGIN_PRESET); }
            else if (m->preset[0] && *fill[i].field != fill[i].value)
                config_say_key(r, CONFIG_INFO, fill[i].key, "instead of the %" PRId64 " of preset %s", fill[i].value, p->name);
        }
        if (!m->preset[0] && !config_given(c, MODEL_KEY("n_positions")) && c->run.seq_len) m->n_positions = c->run.seq_len;
    }
    if (m->init_from[0]) return; // its config.json tells what is still open
    size_t length = strlen(c->data.train);
    bool bytes = length == 0 || (length > 4 && strcmp(c->data.train + length - 4, ".txt") == 0);
    if (m->n_positions == 0) { m->n_positions = c->run.seq_len ? c->run.seq_len : 1024; config_derive(r, MODEL_KEY("n_positions"), ORIGIN_DERIVED); }
    if (m->vocab_size == 0) {
        m->vocab_size = bytes && !m->preset[0] ? 256 : 50257;
        config_derive(r, MODEL_KEY("vocab_size"), m->preset[0] ? ORIGIN_PRESET : ORIGIN_DERIVED);
    }
    if (m->n_inner == 0 && m->n_embd) { m->n_inner = 4 * m->n_embd; config_derive(r, MODEL_KEY("n_inner"), ORIGIN_DERIVED); }
    if (c->run.seq_len == 0) { c->run.seq_len = m->n_positions; config_derive(r, RUN_KEY("seq_len"), ORIGIN_DERIVED); }
    if (c->run.seq_len > m->n_positions)
        config_say_key(r, CONFIG_PROBLEM, RUN_KEY("seq_len"),
                       "is more than the model's %" PRId64 " positions; lower it, or raise train_gpt.model.n_positions", m->n_positions);
    if (m->n_head && m->n_embd % m->n_head != 0)
        config_say_key(r, CONFIG_PROBLEM, MODEL_KEY("n_embd"), "cannot be divided by n_head = %" PRId64 "; change one of them", m->n_head);
    if (c->batch.vocabulary_size && c->batch.vocabulary_size != m->vocab_size) {
        if (!config_given(c, MODEL_KEY("vocab_size")) && !m->preset[0]) m->vocab_size = c->batch.vocabulary_size;
        else
            config_say_key(r, CONFIG_PROBLEM, "vocabulary_size",
                           "is not train_gpt.model.vocab_size = %" PRId64 "; make them equal, or remove one", m->vocab_size);
    }
}

// What parallel degrees must divide. Each degree by itself first, so that the product is only blamed for what it alone does.
typedef struct {
    const char *key;
    int64_t value;
    const char *verb, *what;
    int64_t degree, size;
} SplitRule;

enum { SPLIT_RULES = 9 };

static void config_split_rules(const Config *c, SplitRule rule[SPLIT_RULES]) {
    const ParallelConfig *p = &c->parallel;
    const ModelConfig *m = &c->model;
    const char *tensor = "tensor_model_parallel_size", *sequence = "sequence_parallel_size", *alone = "does not divide", *both = "times tensor_model_parallel_size does not divide";
    const int64_t T = c->run.seq_len, t = p->tensor, s = p->sequence, pieces = t > 1 ? c->run.tensor_parallel_pieces : 1;
    const bool fits = m->n_head % t == 0 && m->n_head % s == 0 && T % t == 0 && T % s == 0, both_fit = fits && T % (t * s) == 0;
    const SplitRule all[SPLIT_RULES] = {
        {tensor, t, alone, "heads", t, m->n_head}, {tensor, t, alone, "channels", t, m->n_embd}, {tensor, t, alone, "channels inside the MLP", t, m->n_inner},
        {tensor, t, alone, "tokens of a sample", t, T}, {sequence, s, alone, "heads", s, m->n_head}, {sequence, s, alone, "tokens of a sample", s, T},
        {sequence, s, both, "heads", fits ? t * s : 1, m->n_head}, {sequence, s, both, "tokens of a sample", fits ? t * s : 1, T},
        {RUN_KEY("tensor_parallel_pieces"), pieces, "times the tensor and sequence degrees does not divide", "tokens of a sample", both_fit ? t * s * pieces : 1, T},
    };
    memcpy(rule, all, sizeof all);
}

static void config_resolve_parallel(ConfigReader *r) {
    Config *c = r->config;
    ParallelConfig *p = &c->parallel;
    const ModelConfig *m = &c->model;
    if (c->compat.sequence_parallel && !config_given(c, "sequence_parallel_size")) {
        int64_t ranks = c->world / max_i64(1, p->pipeline), T = c->run.seq_len;
        p->sequence = 1;
        if (p->tensor == 1) for (int64_t d = 1; d <= ranks; d++) if (ranks % d == 0 && m->n_head % d == 0 && T % d == 0) p->sequence = d;
        const int64_t square = p->tensor * p->tensor; // else the tensor-parallel ranks share the tokens outside attention between them, and that is all
        if (p->tensor > 1 && ranks % square == 0 && m->n_head % square == 0 && T % square == 0) p->sequence = p->tensor;
        config_derive(r, "sequence_parallel_size", ORIGIN_DERIVED);
        config_say_key(r, CONFIG_INFO, "sequence_parallel.enabled", "without a degree: sequence_parallel_size = %" PRId64, p->sequence);
    }
    bool interleaved = p->pipeline_schedule == PIPELINE_INTERLEAVED && p->pipeline > 1;
    bool comes_back = p->pipeline_schedule == PIPELINE_ZB_V && p->pipeline > 1, zero_bubble = comes_back || p->pipeline_schedule == PIPELINE_ZB_H1;
    int64_t chunks = interleaved || comes_back ? 2 : 1;
    if (p->virtual_pipeline == 0) {
        p->virtual_pipeline = chunks;
        config_derive(r, "virtual_pipeline_model_parallel_size", ORIGIN_DERIVED);
    } else if (!interleaved && p->virtual_pipeline != chunks) {
        config_say_key(r, CONFIG_NOTICE, "virtual_pipeline_model_parallel_size", comes_back ? "has no effect: with pipeline_schedule ZB-V each stage has two chunks" :
                       "has no effect: it belongs to pipeline_schedule Interleaved with more than one stage");
        p->virtual_pipeline = chunks;
    }
    BatchConfig *b = &c->batch;
    static const char *const corners[] = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"};
    for (int i = 0; i < 3; i++) if (config_refused(c, corners[i])) return;
    BatchTriangle solved, given = {c->world, p->tensor, p->pipeline, p->sequence, b->train_batch_size, b->train_micro_batch_size_per_gpu,
                                   b->gradient_accumulation_steps};
    char why[800];
    int64_t D;
    const char *blame = config_solve_batch(&given, 4, &solved, &D, why, sizeof why);
    if (blame) {
        config_say_key(r, CONFIG_PROBLEM, blame, "%s", why);
        if (strncmp(blame, "train_", 6) != 0) r->config->key[config_find_key(blame)].refused = false; // "not built yet" is worth saying too
        return;
    }
    if (given.train == 0 && given.micro == 0)
        config_say_key(r, CONFIG_NOTICE, "train_micro_batch_size_per_gpu",
                       "is not given, nor is train_batch_size: %" PRId64 " samples a rank, so %" PRId64 " an update", solved.micro,
                       solved.train);
    b->train_batch_size = solved.train;
    b->train_micro_batch_size_per_gpu = solved.micro;
    b->gradient_accumulation_steps = solved.accumulation;
    if (given.train == 0) config_derive(r, "train_batch_size", ORIGIN_DERIVED);
    if (given.micro == 0) config_derive(r, "train_micro_batch_size_per_gpu", ORIGIN_DERIVED);
    if (given.accumulation == 0) config_derive(r, "gradient_accumulation_steps", ORIGIN_DERIVED);
    enum { ACCUMULATION_MAX = 1000000 }; // as for a given one
    if (given.accumulation == 0 && solved.accumulation > ACCUMULATION_MAX)
        config_say_key(r, CONFIG_PROBLEM, "gradient_accumulation_steps", "comes to %" PRId64 ", which is more than %d; raise train_micro_batch_size_per_gpu, or lower train_batch_size",
                       solved.accumulation, ACCUMULATION_MAX);
    if (config_given(c, "data_parallel_size") && p->data != D)
        config_say_key(r, CONFIG_PROBLEM, "data_parallel_size", "is not %" PRId64 " ranks / (tensor %" PRId64 " x pipeline %" PRId64 " x "
                       "sequence %" PRId64 ") = %" PRId64 "; remove the key, or correct a degree", c->world, p->tensor, p->pipeline,
                       p->sequence, D);
    else if (!config_given(c, "data_parallel_size")) { p->data = D; config_derive(r, "data_parallel_size", ORIGIN_DERIVED); }
    if (interleaved && solved.accumulation % p->pipeline != 0)
        config_say_key(r, CONFIG_PROBLEM, "gradient_accumulation_steps",
                       "must be a multiple of the %" PRId64 " stages with pipeline_schedule Interleaved; the next one is %" PRId64,
                       p->pipeline, round_up(solved.accumulation, p->pipeline));
    else if (p->pipeline > 1 && solved.accumulation < p->pipeline)
        config_say_key(r, CONFIG_NOTICE, "gradient_accumulation_steps", // as pipeline.cu simulates it, with F = B = w
                       "is less than the %" PRId64 " stages: %.0f %% of the time is idle (the bubble is %s)", p->pipeline,
                       100.0 * (double)(zero_bubble ? 2 * p->pipeline - 1 - solved.accumulation : p->pipeline - 1) / (double)((zero_bubble ? 2 * solved.accumulation + p->pipeline : solved.accumulation) + p->pipeline - 1),
                       zero_bubble ? "(2p-1-m)/(2m+2p-1)" : "(p-1)/(m+p-1)");
    if (m->n_layer && p->pipeline > 1 && m->n_layer < p->pipeline * p->virtual_pipeline)
        config_say_key(r, CONFIG_PROBLEM, "pipeline_model_parallel_size",
                       "x %" PRId64 " chunks is more than the model's %" PRId64 " layers; lower it", p->virtual_pipeline, m->n_layer);
    if (p->tensor == 1 && c->run.tensor_parallel_pieces > 1) config_say_key(r, CONFIG_NOTICE, RUN_KEY("tensor_parallel_pieces"), "has no effect without tensor_model_parallel_size");
    SplitRule rule[SPLIT_RULES];
    config_split_rules(c, rule);
    for (int i = 0; i < SPLIT_RULES; i++)
        if (rule[i].size % rule[i].degree != 0)
            config_say_key(r, CONFIG_PROBLEM, rule[i].key, "%s the model's %" PRId64 " %s; choose a divisor", rule[i].verb, rule[i].size, rule[i].what);
}

static void config_resolve_precision(ConfigReader *r) {
    Config *c = r->config;
    bool fp16_auto = c->key[config_find_key("fp16.enabled")].origin == ORIGIN_AUTO;
    bool bf16_auto = c->key[config_find_key("bf16.enabled")].origin == ORIGIN_AUTO;
    if (c->fp16.enabled && c->bf16.enabled)
        config_say_key(r, CONFIG_PROBLEM, "fp16.enabled",
                       "bf16.enabled is true as well; keep one of them (bf16 on GPUs of compute capability 8.0 and newer)");
    if (bf16_auto && !c->fp16.enabled) c->bf16.enabled = true;
    else if (fp16_auto && !c->bf16.enabled) c->fp16.enabled = true;
    c->precision_is_auto = fp16_auto && bf16_auto;
    c->dtype = c->bf16.enabled ? DTYPE_BF16 : c->fp16.enabled ? DTYPE_FP16 : DTYPE_FP32;
    if (fp16_auto || bf16_auto) config_say(r, CONFIG_INFO, 0, "", "", "precision \"auto\": %s", dtype_name(c->dtype));
    const struct { const char *key; DType *value; } copies[] = {
        {"data_types.param_dtype", &c->compat.param_dtype},
        {"data_types.buffer_dtype", &c->compat.buffer_dtype},
        {"tensor_parallel.dtype", &c->compat.tensor_parallel_dtype},
    };
    for (size_t i = 0; i < sizeof copies / sizeof *copies; i++) {
        if (!config_given(c, copies[i].key)) *copies[i].value = c->dtype;
        else if (*copies[i].value == c->dtype) config_say_key(r, CONFIG_NOTICE, copies[i].key, "has no effect: fp16 and bf16 say the same");
        else config_say_key(r, CONFIG_PROBLEM, copies[i].key, "fp16 and bf16 say %s; remove the key, or make them agree", dtype_name(c->dtype));
    }
    if (c->fp16.min_loss_scale == 0 && config_given(c, "fp16.min_loss_scale"))
        config_say_key(r, CONFIG_NOTICE, "fp16.min_loss_scale", "no floor: overflows never end the run");
    if (c->compat.bf16_optimizer_states && !c->compat.bf16_master_weights_and_grads)
        config_say_key(r, CONFIG_PROBLEM, "bf16.bf16_optimizer_states", "needs bf16.bf16_master_weights_and_grads; remove it");
}

// Keys with a `with` column that the optimizer or scheduler of that name does not know.
static void config_check_with(ConfigReader *r, const char *prefix, const char *name) {
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
        const ConfigKey *k = &config_keys[i];
        if (!k->with[0] || strncmp(k->path, prefix, strlen(prefix)) != 0 || !config_row_given(r->config, i) || config_has_word(k->with, name))
            continue;
        if (k->flags & WITH_ONLY) config_say_key(r, CONFIG_PROBLEM, k->path, "belongs to %s, but the optimizer is %s; remove it", k->with, name);
        else config_say_key(r, CONFIG_NOTICE, k->path, "has no effect: %s does not use it", name);
        config_set_initial(r->config, k);
    }
}

// A tag names a folder of checkpoints, so it must not lead anywhere else.
static bool config_tag_valid(const char *tag) {
    size_t n = strspn(tag, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-");
    return n > 0 && tag[n] == 0 && n < CONFIG_NAME_MAX && tag[0] != '.' && tag[0] != '-';
}

static const char *config_optimizer_name(OptimizerType type) { return type == OPTIMIZER_LION ? "Lion" : type == OPTIMIZER_SGD ? "SGD" : "AdamW"; }
static const char *config_scheduler_name(ScheduleType type) {
    static const char *const name[] = {"", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest", ""};
    return name[type];
}

static void config_resolve_optimizer(ConfigReader *r) {
    Config *c = r->config;
    OptimizerConfig *o = &c->optimizer;
    o->type = OPTIMIZER_ADAMW;
    if (config_same_word(o->name, "SGD")) o->type = OPTIMIZER_SGD;
    else if (config_same_word(o->name, "Lion")) o->type = OPTIMIZER_LION;
    else if (config_same_word(o->name, "AdamW")) {
        if (!o->adam_w_mode)
            config_say_key(r, CONFIG_NOTICE, "optimizer.params.adam_w_mode", "has no effect with AdamW; type Adam has the other form");
        o->adam_w_mode = true;
    } else if (config_same_word(o->name, "Adagrad") || config_same_word(o->name, "Lamb") || config_same_word(o->name, "Muon"))
        config_say_key(r, CONFIG_UNBUILT, "optimizer.type", "not built yet; use AdamW, Adam, SGD or Lion");
    else if (!config_same_word(o->name, "Adam"))
        config_say_key(r, CONFIG_PROBLEM, "optimizer.type", "is not part of this program; use AdamW, Adam, SGD or Lion");
    if (config_same_word(o->name, "Adam") || config_same_word(o->name, config_optimizer_name(o->type)))
        config_set_word(o->name, o->type == OPTIMIZER_ADAMW && !o->adam_w_mode ? "Adam" : config_optimizer_name(o->type));
    if (o->betas[0] == 0 && o->betas[1] == 0 && !config_given(c, "optimizer.params.betas")) {
        o->betas[0] = 0.9;
        o->betas[1] = o->type == OPTIMIZER_LION ? 0.99 : 0.999;
        config_derive(r, "optimizer.params.betas", ORIGIN_DERIVED);
    }
    config_check_with(r, "optimizer.", config_optimizer_name(o->type));
    if (o->nesterov && (o->momentum <= 0 || o->dampening != 0))
        config_say_key(r, CONFIG_PROBLEM, "optimizer.params.nesterov",
                       "needs a momentum above 0 and no dampening; set optimizer.params.momentum");
}

static void config_resolve_scheduler(ConfigReader *r) {
    Config *c = r->config;
    SchedulerConfig *s = &c->scheduler;
    RunConfig *run = &c->run;
    bool steps_given = config_given(c, RUN_KEY("steps")), cosine = s->lr_schedule;
    s->type = SCHEDULE_CONSTANT;
    for (int type = SCHEDULE_WARMUP_LR; type <= SCHEDULE_LR_RANGE_TEST && s->name[0]; type++) {
        const char *name = config_scheduler_name((ScheduleType)type);
        if (!config_same_word(s->name, name)) continue;
        s->type = (ScheduleType)type;
        if (strcmp(s->name, name) != 0) config_say_key(r, CONFIG_NOTICE, "scheduler.type", "taken as %s", name);
        config_set_word(s->name, name);
    }
    bool any = false;
    for (int i = 0; i < CONFIG_KEY_COUNT; i++)
        any |= strncmp(config_keys[i].path, "scheduler.params.", 17) == 0 && config_keys[i].size && config_row_given(c, i);
    if (s->type == SCHEDULE_CONSTANT && (s->name[0] || any) && !config_refused(c, "scheduler.type")) {
        config_say_key(r, CONFIG_PROBLEM, "scheduler.type", "%s; give one of WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest",
                       s->name[0] ? "is no scheduler of this program" : "is missing");
        return;
    }
    bool decays = s->type == SCHEDULE_WARMUP_DECAY_LR || s->type == SCHEDULE_WARMUP_COSINE_LR;
    if (!steps_given) {
        run->steps = decays && s->total_num_steps ? s->total_num_steps : 1000;
        config_derive(r, RUN_KEY("steps"), ORIGIN_DERIVED);
    }
    bool missing = decays && config_missing(c, SCHEDULER_KEY("total_num_steps"));
    if (missing)
        config_say_key(r, CONFIG_PROBLEM, SCHEDULER_KEY("total_num_steps"),
                       "is missing, and %s needs it; give a number, or \"auto\" for train_gpt.run.steps", config_scheduler_name(s->type));
    if (s->total_num_steps == 0) s->total_num_steps = max_i64(1, run->steps);
    if (decays && !missing && s->total_num_steps <= s->warmup_num_steps)
        config_say_key(r, CONFIG_NOTICE, SCHEDULER_KEY("total_num_steps"),
                       "is not more than warmup_num_steps = %" PRId64 ": after the ramp the rate stays at its lower end",
                       s->warmup_num_steps);
    if (decays && steps_given && s->total_num_steps != run->steps)
        config_say_key(r, CONFIG_NOTICE, SCHEDULER_KEY("total_num_steps"),
                       "differs from train_gpt.run.steps = %" PRId64 ": the rate follows the former", run->steps);
    if (!config_given(c, SCHEDULER_KEY("warmup_max_lr"))) {
        s->warmup_max_lr = c->optimizer.lr;
        config_derive(r, SCHEDULER_KEY("warmup_max_lr"), ORIGIN_DERIVED);
    }
    if (s->type == SCHEDULE_ONE_CYCLE) {
        static const char *const required[] = {SCHEDULER_KEY("cycle_min_lr"), SCHEDULER_KEY("cycle_max_lr")};
        for (int i = 0; i < 2; i++)
            if (config_missing(c, required[i])) config_say_key(r, CONFIG_PROBLEM, required[i], "is missing, and OneCycle needs it; give a number");
        if (s->cycle_min_lr > s->cycle_max_lr) config_say_key(r, CONFIG_PROBLEM, required[0], "is above cycle_max_lr; exchange them");
        if (s->cycle_momentum) config_say_key(r, CONFIG_INFO, SCHEDULER_KEY("cycle_momentum"), "cycles beta1 and sets beta2 to 0.99");
    }
    if (!config_given(c, SCHEDULER_KEY("cycle_second_step_size"))) {
        s->cycle_second_step_size = s->cycle_first_step_size;
        config_derive(r, SCHEDULER_KEY("cycle_second_step_size"), ORIGIN_DERIVED);
    }
    if (!config_given(c, SCHEDULER_KEY("cycle_second_stair_count"))) {
        s->cycle_second_stair_count = s->cycle_first_stair_count;
        config_derive(r, SCHEDULER_KEY("cycle_second_stair_count"), ORIGIN_DERIVED);
    }
    config_check_with(r, "scheduler.", config_scheduler_name(s->type));
    if (cosine && s->type != SCHEDULE_CONSTANT)
        config_say_key(r, CONFIG_PROBLEM, RUN_KEY("lr_schedule"), "stands beside a scheduler (%s); remove one of them", s->name);
    else if (cosine) s->type = SCHEDULE_COSINE;
    static const char *const of_cosine[] = {RUN_KEY("warmup_steps"), RUN_KEY("total_steps"), RUN_KEY("final_lr_frac")};
    for (int i = 0; i < 3; i++)
        if (!cosine && config_given(c, of_cosine[i]))
            config_say_key(r, CONFIG_NOTICE, of_cosine[i], "has no effect without train_gpt.run.lr_schedule = cosine");
    if (s->total_steps == 0) { s->total_steps = max_i64(1, run->steps); config_derive(r, RUN_KEY("total_steps"), ORIGIN_DERIVED); }
    if (cosine && s->warmup_steps > s->total_steps)
        config_say_key(r, CONFIG_NOTICE, RUN_KEY("warmup_steps"), "is more than total_steps = %" PRId64 ": the ramp is cut short",
                       s->total_steps);
}

// One of the two offload sections. Its old form is a boolean beside it.
static void config_resolve_offload(ConfigReader *r, OffloadConfig *o, const char *device_key, const char *old_key, bool old,
                                   const char *path_key, const char *pin_key) {
    Config *c = r->config;
    if (config_given(c, old_key)) {
        if (config_given(c, device_key))
            config_say_key(r, CONFIG_PROBLEM, old_key, "is the old form of %s, which is given too; keep the latter", device_key);
        else {
            config_say_key(r, CONFIG_NOTICE, old_key, "the old form; taken as %s = %s", device_key, old ? "cpu" : "none");
            o->device = old ? OFFLOAD_CPU : OFFLOAD_NONE;
            c->key[config_find_key(device_key)] = c->key[config_find_key(old_key)];
            c->key[config_find_key(device_key)].alias = (int16_t)(config_find_key(old_key) + 1);
        }
    }
    if (config_given(c, ZERO_KEY("cpu_offload_use_pin_memory")) && !config_given(c, pin_key)) {
        o->pin_memory = c->compat.cpu_offload_use_pin_memory;
        config_derive(r, pin_key, ORIGIN_DERIVED);
    }
    if (o->device != OFFLOAD_NVME) return;
    char own[CONFIG_PATH_MAX] = {}; // no byte of the table is left to chance: texts are compared whole
    snprintf(own, sizeof own, "%.4000s/nvme", c->run.output_dir);
    o->nvme_derived = !o->nvme_path[0] || strcmp(o->nvme_path, own) == 0; // who names the folder that the run makes itself need not make it
    if (o->nvme_derived && o->nvme_path[0]) return;
    if (o->nvme_derived) {
        memcpy(o->nvme_path, own, sizeof own);
        config_derive(r, path_key, ORIGIN_DERIVED);
        config_say_key(r, CONFIG_NOTICE, device_key, "without nvme_path: the files go to train_gpt.run.output_dir, in the folder nvme");
        return;
    }
    struct stat st = {};
    int reason = stat(o->nvme_path, &st) != 0 || access(o->nvme_path, W_OK | X_OK) != 0 ? errno : S_ISDIR(st.st_mode) ? 0 : ENOTDIR;
    if (reason) config_say_key(r, CONFIG_PROBLEM, path_key, "is no folder that can be written to (%s); make it, or name another", strerror(reason));
}

static void config_resolve_zero(ConfigReader *r) {
    Config *c = r->config;
    ZeroConfig *z = &c->zero;
    const CompatConfig *o = &c->compat;
    const int64_t sharers = max_i64(1, c->parallel.data) * c->parallel.sequence; // ranks that hold the same weights
    config_resolve_offload(r, &z->offload_param, ZERO_KEY("offload_param.device"), ZERO_KEY("cpu_offload_param"), o->cpu_offload_param,
                           ZERO_KEY("offload_param.nvme_path"), ZERO_KEY("offload_param.pin_memory"));
    config_resolve_offload(r, &z->offload_optimizer, ZERO_KEY("offload_optimizer.device"), ZERO_KEY("cpu_offload"), o->cpu_offload,
                           ZERO_KEY("offload_optimizer.nvme_path"), ZERO_KEY("offload_optimizer.pin_memory"));
    if (config_given(c, ZERO_KEY("cpu_offload_use_pin_memory")))
        config_say_key(r, CONFIG_NOTICE, ZERO_KEY("cpu_offload_use_pin_memory"),
                       "the old form; taken as pin_memory of both offload sections");
    if (config_refused(c, ZERO_KEY("stage"))) return; // the rest depends on it
    bool offloads = z->offload_param.device || z->offload_optimizer.device, adam = c->optimizer.type == OPTIMIZER_ADAMW;
    if (!config_given(c, ZERO_KEY("overlap_comm"))) { z->overlap_comm = z->stage == 3; config_derive(r, ZERO_KEY("overlap_comm"), ORIGIN_DERIVED); }
    if (z->stage >= 1 && sharers == 1) config_say_key(r, CONFIG_NOTICE, ZERO_KEY("stage"), "one data-parallel rank: there is nothing to shard");
    bool split_backward = c->parallel.pipeline > 1 && (c->parallel.pipeline_schedule == PIPELINE_ZB_H1 || c->parallel.pipeline_schedule == PIPELINE_ZB_V);
    if (z->stage >= 2 && split_backward)
        config_say_key(r, CONFIG_NOTICE, ZERO_KEY("stage"), "with pipeline_schedule %s whole gradients are kept until the last micro-batch, as at stage 1, since they are made in two "
                       "phases%s", c->parallel.pipeline_schedule == PIPELINE_ZB_V ? "ZB-V" : "ZB-H1", z->stage == 3 ? "; weights travel for each micro-batch" : "");
    else if (z->stage >= 2 && c->parallel.pipeline > 1)
        config_say_key(r, CONFIG_NOTICE, ZERO_KEY("stage"), "with a pipeline the gradients%s travel for each of the %" PRId64 " "
                       "micro-batches of an update; stage 1 moves them once", z->stage == 3 ? " and weights" : "",
                       c->batch.gradient_accumulation_steps);
    if (z->grad_accum_dtype == DTYPE_FP16)
        config_say_key(r, CONFIG_PROBLEM, "data_types.grad_accum_dtype", "has too small a range to add up gradients in; give bf16 or fp32");
    else if (z->grad_accum_dtype == DTYPE_BF16 && z->stage < 2)
        config_say_key(r, CONFIG_PROBLEM, "data_types.grad_accum_dtype", "needs zero_optimization.stage 2 or 3, and it is %" PRId64
                       ": before, kernels add to whole gradients, which are fp32; raise the stage, or remove the key", z->stage);
    else if (z->grad_accum_dtype == DTYPE_BF16 && split_backward)
        config_say_key(r, CONFIG_PROBLEM, "data_types.grad_accum_dtype", "has no place in a pipeline whose backward pass is split: kernels add to whole gradients, which are fp32; take another "
                       "pipeline_schedule, or remove the key");
    bool sends = sharers > 1;
    if ((z->stage == 0 || z->stage == 3) && config_given(c, ZERO_KEY("allgather_bucket_size")))
        config_say_key(r, CONFIG_INFO, ZERO_KEY("allgather_bucket_size"), z->stage == 0 ? "has no effect at stage 0, which gathers no weights" :
                       "has no effect at stage 3, where stage3_prefetch_bucket_size has its place");
    if (!z->load_from_fp32_weights && c->dtype == DTYPE_FP32)
        config_say_key(r, CONFIG_INFO, ZERO_KEY("load_from_fp32_weights"), "has no effect in fp32, where weights are their own masters");
    if (!sends && config_given(c, "communication_data_type"))
        config_say_key(r, CONFIG_NOTICE, "communication_data_type", "has no effect with one data-parallel rank");
    else if (sends && c->dtype != DTYPE_FP32 && !config_given(c, "communication_data_type"))
        config_say(r, CONFIG_INFO, 0, "", "", "communication_data_type is not given: fp32, so that all stages train alike (DeepSpeed takes %s)",
                   dtype_name(c->dtype));
    else if (sends && z->communication_data_type == DTYPE_FP16 && c->dtype != DTYPE_FP16)
        config_say_key(r, CONFIG_NOTICE, "communication_data_type",
                       "without a loss scale gradients below 6e-8 are lost on their way; bf16 keeps them");
    if (z->offload_param.device && z->stage < 3)
        config_say_key(r, CONFIG_PROBLEM, ZERO_KEY("offload_param.device"), "needs zero_optimization.stage 3, and it is %" PRId64 " "
                       "(DeepSpeed ignores the section then); set the stage to 3, or the device to none", z->stage);
    if (z->offload_optimizer.device && z->stage == 0)
        config_say_key(r, CONFIG_PROBLEM, ZERO_KEY("offload_optimizer.device"),
                       "needs zero_optimization.stage 1 to 3, and it is 0; set a stage, or the device to none");
    else if (z->offload_optimizer.device == OFFLOAD_NVME && z->stage < 3)
        config_say_key(r, CONFIG_PROBLEM, ZERO_KEY("offload_optimizer.device"), "needs zero_optimization.stage 3, and it is %" PRId64 " "
                       "(DeepSpeed takes cpu then); set the stage to 3, or the device to cpu", z->stage);
    if (z->offload_optimizer.ratio < 1 && z->stage < 3)
        config_say_key(r, CONFIG_PROBLEM, ZERO_KEY("offload_optimizer.ratio"),
                       "needs zero_optimization.stage 3, and it is %" PRId64 "; remove it", z->stage);
    if (z->offload_param.device && z->offload_param.buffer_count < 2)
        config_say_key(r, CONFIG_PROBLEM, ZERO_KEY("offload_param.buffer_count"), "is less than the 2 that are needed; raise it to 2");
    if (z->offload_optimizer.device && z->offload_optimizer.buffer_count < (adam ? 4 : 3))
        config_say_key(r, CONFIG_PROBLEM, ZERO_KEY("offload_optimizer.buffer_count"),
                       "is less than the %d arrays of a tensor; raise it to %d", adam ? 4 : 3, adam ? 4 : 3);
    if (z->stage >= 2 && z->reduce_scatter && z->prescale_gradients)
        config_say_key(r, CONFIG_PROBLEM, "prescale_gradients",
                       "cannot be with zero_optimization.stage %" PRId64 " and reduce_scatter; remove it", z->stage);
    if (z->stage >= 2 && z->reduce_scatter && z->gradient_predivide_factor != 1)
        config_say_key(r, CONFIG_PROBLEM, "gradient_predivide_factor",
                       "cannot be with zero_optimization.stage %" PRId64 " and reduce_scatter; remove it", z->stage);
    if (z->gradient_predivide_factor < 1e-18 || z->gradient_predivide_factor > 1e18)
        config_say_key(r, CONFIG_PROBLEM, "gradient_predivide_factor", "takes gradients out of the range of fp32; give a number between 1e-18 and 1e18");
    if (z->stage == 3 && z->gradient_allreduce_op)
        config_say_key(r, CONFIG_PROBLEM, "gradient_allreduce_op",
                       "cannot be with zero_optimization.stage 3, as in DeepSpeed; remove it, or lower the stage");
    if (z->prescale_gradients && z->gradient_predivide_factor != 1)
        config_say_key(r, CONFIG_NOTICE, "gradient_predivide_factor", "has no effect with prescale_gradients");
    if (o->zero_quantized_gradients && !z->reduce_scatter)
        config_say_key(r, CONFIG_PROBLEM, ZERO_KEY("zero_quantized_gradients"), "needs zero_optimization.reduce_scatter; remove one of them");
    if ((z->stage == 1 || z->stage == 2) && z->allgather_bucket_size % 2 != 0)
        config_say_key(r, CONFIG_PROBLEM, ZERO_KEY("allgather_bucket_size"), "is odd; give %" PRId64, z->allgather_bucket_size - 1);
    static const struct { const char *key; bool of_param; } of_files[] = {{ZERO_KEY("offload_param.buffer_count"), true}, {ZERO_KEY("offload_param.buffer_size"), true}, {ZERO_KEY("offload_param.max_in_cpu"), true},
        {ZERO_KEY("offload_optimizer.buffer_count"), false}, {ZERO_KEY("offload_optimizer.pipeline_read"), false}, {ZERO_KEY("offload_optimizer.pipeline_write"), false}};
    for (int i = 0; i < 6; i++)
        if ((of_files[i].of_param ? z->offload_param.device : z->offload_optimizer.device) == OFFLOAD_CPU && config_given(c, of_files[i].key))
            config_say_key(r, CONFIG_INFO, of_files[i].key, "has no effect with device cpu, where nothing has to be brought to memory");
    if (z->offload_param.device != OFFLOAD_NVME && z->offload_optimizer.device != OFFLOAD_NVME)
        for (int i = 0; i < CONFIG_KEY_COUNT; i++)
            if (strncmp(config_keys[i].path, "aio.", 4) == 0 && config_keys[i].treatment == TREAT_USE && config_given(c, config_keys[i].path))
                config_say_key(r, CONFIG_NOTICE, config_keys[i].path, "has no effect without an offload device nvme");
    if (!offloads && config_given(c, ZERO_KEY("sub_group_size")))
        config_say_key(r, CONFIG_NOTICE, ZERO_KEY("sub_group_size"), "has no effect without offload");
    for (int i = 0; i < CONFIG_KEY_COUNT && z->stage < 3; i++)
        if (strncmp(config_keys[i].path, ZERO_KEY("stage3_"), 25) == 0 && config_keys[i].size && config_row_given(c, i))
            config_say_key(r, CONFIG_NOTICE, config_keys[i].path, "has no effect below zero_optimization.stage 3");
    if (offloads && !config_given(c, "optimizer.type"))
        config_say_key(r, CONFIG_NOTICE, "optimizer.type", "is not given beside offload: AdamW on the CPU");
    int64_t h = c->model.n_embd;
    const struct { const char *key; int64_t *field, value; } sizes[] = { // what "auto" stands for
        {ZERO_KEY("reduce_bucket_size"), &z->reduce_bucket_size, h * h},
        {ZERO_KEY("stage3_prefetch_bucket_size"), &z->prefetch_bucket_size, 9 * h * h / 10},
        {ZERO_KEY("stage3_param_persistence_threshold"), &z->param_persistence_threshold, 10 * h},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (h && c->key[config_find_key(sizes[i].key)].origin == ORIGIN_AUTO) *sizes[i].field = sizes[i].value;
}

#define ACT_KEY(key) "activation_checkpointing." key

// The switch is not DeepSpeed's: there the model's code decides whether it recomputes at all.
static void config_resolve_activation_checkpointing(ConfigReader *r) {
    Config *c = r->config;
    ActivationCheckpointingConfig *a = &c->activation_checkpointing;
    const struct { const char *key; bool on, of_checkpoints; } asks[] = {
        {ACT_KEY("enabled"), a->enabled, false},
        {ACT_KEY("partition_activations"), a->partition_activations, false},
        {ACT_KEY("cpu_checkpointing"), a->cpu_checkpointing, true},
        {ACT_KEY("number_checkpoints"), a->number_checkpoints > 0, true},
        {"pipeline.activation_checkpoint_interval", a->activation_checkpoint_interval > 0, true},
    };
    bool given = config_given(c, ACT_KEY("policy"));
    for (size_t i = 0; i < sizeof asks / sizeof *asks; i++) {
        if (!asks[i].on) continue;
        if (!given) {
            a->policy = RECOMPUTE_BLOCK;
            config_derive(r, ACT_KEY("policy"), ORIGIN_DERIVED);
        } else if (a->policy == RECOMPUTE_NONE)
            config_say_key(r, CONFIG_PROBLEM, ACT_KEY("policy"), "is none, but %s asks for recomputation; remove one of them", asks[i].key);
        else if (asks[i].of_checkpoints && a->policy != RECOMPUTE_BLOCK)
            config_say_key(r, CONFIG_PROBLEM, asks[i].key, "is about the inputs of blocks, which alone are stored with " ACT_KEY("policy") " = block; give that, or remove this key");
    }
    if (a->number_checkpoints > 0 && a->activation_checkpoint_interval > 0)
        config_say_key(r, CONFIG_PROBLEM, "pipeline.activation_checkpoint_interval", "says what " ACT_KEY("number_checkpoints") " says in another way; remove one of them");
    if (a->partition_activations && c->parallel.tensor == 1)
        config_say_key(r, CONFIG_NOTICE, ACT_KEY("partition_activations"), "one tensor-parallel rank: nothing to split");
    else if (a->partition_activations)
        config_say_key(r, CONFIG_INFO, ACT_KEY("partition_activations"), "each of the %" PRId64 " tensor-parallel ranks keeps its own rows of a checkpoint, with or without this key", c->parallel.tensor);
    if (a->policy == RECOMPUTE_NONE && a->profile) config_say_key(r, CONFIG_NOTICE, ACT_KEY("profile"), "has no effect without recomputation");
    if (a->policy == RECOMPUTE_NONE && a->synchronize_checkpoint_boundary)
        config_say_key(r, CONFIG_NOTICE, ACT_KEY("synchronize_checkpoint_boundary"), "has no effect without recomputation");
    // Only from what is stored, the rounded pre-activation, can the same bits be computed again.
    if (a->policy != RECOMPUTE_GELU) return;
    if (config_given(c, RUN_KEY("gelu_apart")) && !c->run.gelu_apart)
        config_say_key(r, CONFIG_PROBLEM, RUN_KEY("gelu_apart"), "is false, and with " ACT_KEY("policy") " = gelu the GELU is computed from stored values; remove the key");
    c->run.gelu_apart = true;
    if (!config_given(c, RUN_KEY("gelu_apart"))) config_derive(r, RUN_KEY("gelu_apart"), ORIGIN_DERIVED);
}

static void config_resolve_rest(ConfigReader *r) {
    Config *c = r->config;
    const CompatConfig *o = &c->compat;
    CheckpointConfig *k = &c->checkpoint;
    if (!config_given(c, "gradient_clipping")) config_say(r, CONFIG_INFO, 0, "", "", "gradient_clipping is not given: 1.0 (0 switches it off)");
    if (k->num_checkpoints_to_keep && k->keep_n_most_recent > k->num_checkpoints_to_keep)
        config_say_key(r, CONFIG_PROBLEM, "checkpoint.keep_n_most_recent",
                       "is more than checkpoint.num_checkpoints_to_keep = %" PRId64 "; lower it", k->num_checkpoints_to_keep);
    if (k->decoupled && !k->zero_checkpoint && c->world > 1) {
        config_say_key(r, CONFIG_NOTICE, "checkpoint.writer.decoupled", "has no effect: with checkpoint.zero_checkpoint = false rank 0 collects what it writes from the others, and training waits");
        k->decoupled = false;
    }
    if (c->batch.vocabulary_size % 8 != 0)
        config_say_key(r, CONFIG_NOTICE, "vocabulary_size", "is not a multiple of 8; the buffers are padded to one");
    if (o->flops_profiler && o->profile_step > c->run.steps)
        config_say_key(r, CONFIG_NOTICE, "flops_profiler.profile_step", "is beyond the last update, %" PRId64, c->run.steps);
    if (config_given(c, "compile.passes")) {
        bool sequence = (o->compile_passes >> 2 & 1) && c->parallel.sequence == 1, tensor = (o->compile_passes >> 3 & 1) && c->parallel.tensor == 1;
        if (sequence || tensor)
            config_say_key(r, CONFIG_PROBLEM, "compile.passes", "stands for a degree that is not given; set %s",
                           sequence ? "sequence_parallel_size" : "tensor_model_parallel_size");
        else config_say_key(r, CONFIG_NOTICE, "compile.passes", "has no effect: the kernels are compiled already");
    }
    if (config_given(c, "backend")) {
        if (config_same_word(o->backend, "nccl")) config_say_key(r, CONFIG_NOTICE, "backend", "has no effect: the build decides");
        else config_say_key(r, CONFIG_PROBLEM, "backend", "is not a transport of this program; remove it");
    }
    int64_t *window = &c->model.attention_window_size;
    if (*window && config_given(c, "sequence_parallel.enabled") && !o->sequence_parallel) {
        config_say_key(r, CONFIG_NOTICE, WINDOW_KEY, "has no effect: sequence_parallel.enabled is false; remove that one to have the window");
        *window = 0;
    } else if (*window && c->run.seq_len && *window >= c->run.seq_len)
        config_say_key(r, CONFIG_INFO, WINDOW_KEY, "is not below train_gpt.run.seq_len = %" PRId64 ": each token sees all before it", c->run.seq_len);
    RunConfig *run = &c->run;
    if (!config_given(c, RUN_KEY("eval_every"))) {
        run->eval_every = c->data.val[0] ? 100 : 0;
        config_derive(r, RUN_KEY("eval_every"), ORIGIN_DERIVED);
    }
    if (!run->output_dir[0]) config_say_key(r, CONFIG_PROBLEM, RUN_KEY("output_dir"), "is empty; name a folder");
    if (!config_tag_valid(run->resume))
        config_say_key(r, CONFIG_PROBLEM, RUN_KEY("resume"),
                       "is no tag; a tag has letters, digits, '.', '_' and '-', and begins with neither '.' nor '-'");
}

static void config_refuse_unbuilt(ConfigReader *r) {
    Config *c = r->config;
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
        const ConfigKey *k = &config_keys[i];
        char initial[CONFIG_VALUE_MAX];
        if (k->treatment != TREAT_LATER || c->key[i].refused) continue;
        config_initial(k, initial);
        if (memcmp(initial, (const char *)c + k->offset, k->size) == 0) continue;
        if (k->initial[0]) config_say_key(r, CONFIG_UNBUILT, k->path, "not built yet (%s); set it to %s", k->text, k->initial);
        else config_say_key(r, CONFIG_UNBUILT, k->path, "not built yet (%s); remove it", k->text);
    }
}

// Works out what is open and checks what only several keys together can tell.
static void config_resolve(ConfigReader *r) {
    config_resolve_model(r);
    config_resolve_parallel(r);
    config_resolve_precision(r);
    config_resolve_optimizer(r);
    config_resolve_scheduler(r);
    config_resolve_zero(r);
    config_resolve_activation_checkpointing(r);
    config_resolve_rest(r);
    config_refuse_unbuilt(r);
}
