// fuzz_config.cpp - libFuzzer target: the JSON reader and everything that dsconfig.h makes of a text and its overrides.
//
//     clang++ -std=gnu++17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all tests/fuzz_config.cpp -o fuzz_config
//     ./fuzz_config -max_total_time=60 -max_len=4096 corpus/ tests/config/
//
// An input is the text of a configuration; what follows a zero byte are overrides, one after each zero byte. So every file of
// tests/config is a seed. Half of the mutations put keys of the table, and values that they may take, where they might go: a
// mutation of bytes alone would rarely spell one.
//
// Whatever is read, it must keep these promises: the same text gives the same result; strict JSON is a part of tolerant JSON;
// --strict refuses exactly what is noted; messages are safe for a terminal; and an accepted configuration has a batch that
// multiplies up, a shape that fits, and an effective table that reads back as the same configuration. Broken promises abort.
#include "test_config.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define PROMISE(cond)                                                                                                  \
    do {                                                                                                               \
        if (!(cond)) { fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #cond); abort(); }                    \
    } while (0)

static void check_messages(const ConfigReport *report, bool input_is_utf8) { // overrides may hold any byte
    for (int i = 0; i < report->count; i++) {
        const char *text = report->message[i].text;
        PROMISE(text[0] != 0 && (!input_is_utf8 || json_utf8_fault(text, (int64_t)strlen(text)) < 0));
        for (; *text; text++) PROMISE((unsigned char)*text >= 0x20 && *text != 0x7f && !(*text == '\xc2' && (unsigned char)text[1] < 0xa0));
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    // a copy of its own size, so that the sanitizer sees each byte that is read too much
    char *text = (char *)malloc(size ? size : 1);
    memcpy(text, data, size);
    size_t length = strnlen(text, size);
    const char *override[8];
    char *tail = (char *)calloc(1, size - length + 1);
    memcpy(tail, text + length, size - length);
    int n = 0;
    for (size_t at = 1; at < size - length && n < 8; at += strlen(tail + at) + 1) override[n++] = tail + at;
    int64_t world = INT64_C(1) << (size + length) % 4;

    Json strict, tolerant;
    bool is_strict = json_parse(&strict, text, (int64_t)length, JSON_STRICT), is_tolerant = json_parse(&tolerant, text, (int64_t)length, JSON_TOLERANT);
    PROMISE(!is_strict || is_tolerant);
    if (is_strict) PROMISE(strict.count == tolerant.count);
    else PROMISE(strict.error[0] && strict.line > 0 && strict.column > 0 && strict.offset <= (int64_t)length);
    json_free(&strict);
    json_free(&tolerant);

    Config *a = (Config *)host_alloc(sizeof *a), *b = (Config *)host_alloc(sizeof *b);
    ConfigReport first = {}, second = {};
    config_parse(text, (int64_t)length, "f.json", override, n, world, false, a, &first);
    config_parse(text, (int64_t)length, "f.json", override, n, world, true, b, &second);
    PROMISE(memcmp(a, b, offsetof(Config, key)) == 0);
    PROMISE(config_refusals(&second) == config_refusals(&first) + first.of[CONFIG_NOTICE]);
    check_messages(&first, json_utf8_fault((const char *)data, (int64_t)size) < 0);
    if (config_refusals(&first) == 0) {
        PROMISE(a->batch.train_batch_size == a->batch.train_micro_batch_size_per_gpu * a->batch.gradient_accumulation_steps * a->parallel.data);
        PROMISE(a->parallel.data * a->parallel.tensor * a->parallel.pipeline * a->parallel.sequence == world && a->batch.train_batch_size > 0);
        PROMISE(a->model.init_from[0] || (a->model.n_layer > 0 && a->model.n_head > 0 && a->model.n_embd % a->model.n_head == 0 && a->run.seq_len > 0 && a->run.seq_len <= a->model.n_positions));
        PROMISE(isfinite(a->optimizer.lr) && a->optimizer.lr >= 0 && a->optimizer.betas[0] < 1 && isfinite(a->gradient_clipping) && a->fp16.loss_scale >= 0);
        Test t = {"fuzz", "round trip", 0, 0, 0, false, ""};
        expect_round_trip(&t, a, world, "effective table");
        if (t.failures) { fprintf(stderr, "%s\n", t.message); abort(); }
    }
    config_report_free(&first);
    config_report_free(&second);
    free(a);
    free(b);
    free(tail);
    free(text);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Mutation

static size_t insert(uint8_t *data, size_t size, size_t max_size, size_t at, const char *piece) {
    size_t n = strlen(piece);
    if (size + n > max_size) return size;
    memmove(data + at + n, data + at, size - at);
    memcpy(data + at, piece, n);
    return size + n;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    static const char *const values[] = {"true", "false", "null", "0", "1", "2", "64", "-1", "5e8", "0.5", "1e400", "\"auto\"", "\"cpu\"", "\"nvme\"", "\"x\"", "[0.9, 0.95]", "[1]", "{}", "True", "auto", ".5", "9223372036854775807", "\"SGD\"", "\"WarmupDecayLR\"", "\"OneCycle\"", "\"cosine\""};
    uint64_t bits = rng_bits(seed, 0, size);
    if (bits & 1) return LLVMFuzzerMutate(data, size, max_size);
    const ConfigKey *k = &config_keys[(bits >> 8) % (uint64_t)CONFIG_KEY_COUNT];
    const char *value = values[(bits >> 24) % (sizeof values / sizeof *values)], *dot = strrchr(k->path, '.');
    char piece[600], word[64];
    if (k->type == KEY_CHOICE && (bits & 2)) {
        config_word_at(k->accepts, (int)(bits >> 40 & 3), word, sizeof word - 2);
        value = word;
    }
    if (bits & 4) { // an override at the end
        piece[0] = 0; // the zero byte in front of it is written below
        snprintf(piece + 1, sizeof piece - 1, "%s=%s", k->path, value);
        size_t n = 1 + strlen(piece + 1);
        if (size + n > max_size) return size;
        memcpy(data + size, piece, n);
        return size + n;
    }
    // a member behind some '{' or ','
    size_t spots = 0, at = 0;
    for (size_t i = 0; i < size; i++) spots += data[i] == '{' || data[i] == ',';
    if (!spots) { // a whole text
        size_t n = (size_t)snprintf(piece, sizeof piece, "{\"train_batch_size\": 8, \"%s\": %s}", k->path, value);
        if (n > max_size) return LLVMFuzzerMutate(data, size, max_size);
        memcpy(data, piece, n);
        return n;
    }
    size_t wanted = (size_t)(bits >> 44) % spots;
    for (size_t i = 0; i < size; i++)
        if ((data[i] == '{' || data[i] == ',') && wanted-- == 0) { at = i + 1; break; }
    if (dot && (bits & 8)) { // with its sections around it
        char nested[500];
        nest(k->path, value, nested, sizeof nested);
        nested[strlen(nested) - 1] = 0;
        snprintf(piece, sizeof piece, "%s,", nested + 1);
    } else snprintf(piece, sizeof piece, "\"%s\": %s,", dot && !(bits & 16) ? dot + 1 : k->path, value);
    return insert(data, size, max_size, at, piece);
}
