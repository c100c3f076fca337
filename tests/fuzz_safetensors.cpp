// fuzz_safetensors.cpp - libFuzzer target: the safetensors reader, and the matching of its names and shapes with a model.
//
//     clang++ -std=gnu++17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all tests/fuzz_safetensors.cpp -o fuzz_safetensors
//     ./fuzz_safetensors -max_total_time=60 -max_len=4096 corpus/
//
// An input is a whole file. Three mutations share the work: bytes anywhere; bytes of the header, whose length field is then
// put right; and headers made from the grammar, mostly well-formed, with one thing wrong here and there.
//
// An accepted file must keep the promises of safetensors.h, and what the writer makes of its tensors must be accepted and
// mean the same. Broken promises abort.
#include "../huggingface.cu"
#include <sys/mman.h>

extern "C" size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define PROMISE(cond)                                                                                                  \
    do {                                                                                                               \
        if (!(cond)) { fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #cond); abort(); }                    \
    } while (0)

// ---------------------------------------------------------------------------------------------------------------
// The target

static void check_message(const char *why) { // must be safe for a terminal
    PROMISE(why[0] != 0);
    for (; *why; why++) PROMISE((unsigned char)*why >= 0x20 && *why != 0x7f);
}

static void check_tensors(const SafeTensors *st) {
    int64_t at = st->data_begin;
    float values[64];
    char why[512];
    for (int i = 0; i < st->n_tensors; i++) {
        const SafeTensor *t = &st->tensor[i];
        PROMISE(t->begin == at && t->end >= t->begin && t->end <= st->file_bytes);
        PROMISE(t->end - t->begin == safetensors_numel(t) * safetensors_types[t->type].bytes);
        PROMISE(t->name[0] && safetensors_find(st, t->name) == t);
        PROMISE(i == 0 || strcmp(st->by_name[i - 1]->name, st->by_name[i]->name) < 0);
        at = t->end;
        int64_t n = safetensors_numel(t), take = min_i64(n, 64);
        bool read = safetensors_read(st, t, n - take, take, values, why, sizeof why);
        PROMISE(read == (t->type < SAFE_FIRST_WITHOUT_FP32));
        if (!read) check_message(why);
    }
    PROMISE(at == st->file_bytes);
    for (int i = 1; i < st->n_metadata; i++) PROMISE(strcmp(st->metadata[i - 1].key, st->metadata[i].key) < 0);
}

// The header that our writer makes for the same tensors reads back as the same.
static void check_writer(const SafeTensors *st) {
    int64_t bytes;
    char why[512];
    SafeTensor *copy = (SafeTensor *)host_alloc((size_t)st->n_tensors * sizeof *copy);
    for (int i = 0; i < st->n_tensors; i++) copy[i] = st->tensor[i];
    char *header = safetensors_header(copy, st->n_tensors, st->metadata, st->n_metadata, &bytes);
    SafeTensors again;
    memset(&again, 0, sizeof again);
    again.fd = -1;
    again.data_begin = bytes;
    again.file_bytes = bytes + st->file_bytes - st->data_begin;
    PROMISE(bytes % SAFETENSORS_DATA_ALIGNMENT == 0);
    PROMISE(safetensors_parse(&again, header + 8, bytes - 8, why, sizeof why));
    PROMISE(again.n_tensors == st->n_tensors && again.n_metadata == st->n_metadata);
    for (int i = 0; i < st->n_tensors; i++) {
        const SafeTensor *a = &st->tensor[i], *b = safetensors_find(&again, a->name);
        PROMISE(b && a->type == b->type && a->ndim == b->ndim && memcmp(a->shape, b->shape, sizeof a->shape) == 0);
        PROMISE(a->begin - st->data_begin == b->begin - again.data_begin);
    }
    for (int i = 0; i < st->n_metadata; i++)
        PROMISE(strcmp(st->metadata[i].key, again.metadata[i].key) == 0 && strcmp(st->metadata[i].value, again.metadata[i].value) == 0);
    safetensors_close(&again);
    free(header);
    free(copy);
}

static void check_match(const SafeTensors *st) {
    ModelConfig m;
    ParamTable table;
    memset(&m, 0, sizeof m);
    m.n_layer = m.n_head = 1;
    m.n_embd = m.n_positions = m.vocab_size = m.n_inner = 2;
    model_build_table(&table, &m, model_whole);
    HfFile file;
    memset(&file, 0, sizeof file);
    file.st = *st;
    HfSource source;
    memset(&source, 0, sizeof source);
    source.n_files = 1;
    source.file = &file;
    HfProblems problems = {0, 0, 0, ""};
    HfPlace *place = (HfPlace *)host_alloc((size_t)table.n_rows * sizeof *place);
    hf_match(&source, &table, place, &problems);
    if (problems.n) check_message(hf_problems_text(&problems));
    else for (int i = 0; i < table.n_rows; i++) PROMISE(!place[i].tensor ||
        safetensors_numel(place[i].tensor) == param_numel(&table.row[i]));
    free(place);
    table_free(&table);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int fd = -1; // one file for all inputs
    static char path[64];
    if (fd < 0) {
        fd = memfd_create("input", MFD_CLOEXEC);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    PROMISE(fd >= 0 && ftruncate(fd, (off_t)size) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
    SafeTensors st;
    char why[512] = "";
    if (!safetensors_open(&st, path, why, sizeof why)) {
        check_message(why);
        PROMISE(st.fd == -1 && !st.tensor);
        return 0;
    }
    check_tensors(&st);
    check_writer(&st);
    check_match(&st);
    safetensors_close(&st);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Mutations

typedef struct {
    uint8_t *start, *at, *end;
    uint64_t seed, count;
} Maker;

static uint64_t maker_below(Maker *m, uint64_t n) { return rng_bits(m->seed, 1, m->count++) % n; }
static bool maker_rarely(Maker *m) { return maker_below(m, 24) == 0; }

static void maker_put(Maker *m, const char *text) {
    size_t n = strlen(text);
    if (n > (size_t)(m->end - m->at)) n = (size_t)(m->end - m->at);
    memcpy(m->at, text, n);
    m->at += n;
}
static void maker_number(Maker *m, uint64_t value) {
    static const char *const odd[] = {"-1", "00", "1.0", "1e3", "9223372036854775807", "9223372036854775808", "18446744073709551616",
        "null", "\"1\"", "4294967296", ""};
    char text[32];
    snprintf(text, sizeof text, "%" PRIu64, value);
    maker_put(m, maker_rarely(m) && maker_rarely(m) ? odd[maker_below(m, sizeof odd / sizeof *odd)] : text);
}
static void maker_name(Maker *m, uint64_t number) {
    static const char *const names[] = {"wte.weight", "transformer.wpe.weight", "h.0.ln_1.weight", "h.0.attn.c_attn.weight",
        "h.0.attn.bias", "lm_head.weight", "a", "\\u0061", "", "\\u0000", "\\ud83d\\ude00", "../x", "\\u001b[m", "\xc3\xa9", "\xff"};
    char text[32];
    snprintf(text, sizeof text, "t%" PRIu64, number);
    maker_put(m, maker_below(m, 4) ? text : names[maker_below(m, sizeof names / sizeof *names)]);
}

// A header from the grammar, tensors in order, then their data; sizes small so that several fit.
static size_t make_file(uint8_t *data, size_t max_size, uint64_t seed) {
    Maker m = {data, data + 8, data + max_size, seed, 0};
    uint64_t at = 0, n = maker_below(&m, 7);
    maker_put(&m, "{");
    if (maker_below(&m, 3) == 0)
        maker_put(&m, maker_rarely(&m) ? "\"__metadata__\":{\"a\":{\"b\":1}}" : "\"__metadata__\":{\"format\":\"pt\"}");
    else if (n == 0) maker_put(&m, maker_rarely(&m) ? "," : "");
    for (uint64_t i = 0; i < n; i++) {
        uint64_t type = maker_below(&m, SAFETENSORS_TYPES), dims = maker_rarely(&m) ? maker_below(&m, 12) : maker_below(&m, 4),
            bytes = (uint64_t)safetensors_types[type].bytes, shape[12];
        for (uint64_t d = 0; d < dims; d++) bytes *= shape[d] = maker_below(&m, 4);
        if (m.at[-1] != '{') maker_put(&m, ",");
        maker_put(&m, "\"");
        maker_name(&m, i);
        maker_put(&m, "\":{\"dtype\":\"");
        maker_put(&m, maker_rarely(&m) ? "F4" : safetensors_types[type].name);
        maker_put(&m, "\",\"shape\":[");
        for (uint64_t d = 0; d < dims; d++) {
            if (d) maker_put(&m, ",");
            maker_number(&m, shape[d]);
        }
        maker_put(&m, maker_rarely(&m) && maker_rarely(&m) ? "],\"shape\":[],\"data_offsets\":[" : "],\"data_offsets\":[");
        if (maker_rarely(&m)) at += maker_below(&m, 3) - 1;
        maker_number(&m, at);
        maker_put(&m, ",");
        maker_number(&m, at += bytes);
        maker_put(&m, "]}");
    }
    maker_put(&m, maker_rarely(&m) && maker_rarely(&m) ? "}}" : "}");
    for (uint64_t i = maker_below(&m, 4); i > 0; i--) maker_put(&m, " ");
    uint64_t header = (uint64_t)(m.at - data) - 8;
    memcpy(data, &header, 8);
    if (maker_rarely(&m)) at += maker_below(&m, 3) - 1;
    while (at > 0 && at < 2048 && m.at < m.end) { *m.at++ = (uint8_t)maker_below(&m, 256); at--; }
    return (size_t)(m.at - data);
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    if (max_size < 64 || seed % 3 == 0) return LLVMFuzzerMutate(data, size, max_size);
    if (seed % 3 == 1) return make_file(data, max_size, seed);
    uint64_t header = 0;
    if (size >= 8) memcpy(&header, data, 8);
    if (size < 8 || header > size - 8) return make_file(data, max_size, seed);
    // the header grows or shrinks in a buffer of its own; the data follow it
    size_t rest = size - 8 - (size_t)header, room = max_size - 8 - rest;
    uint8_t *text = (uint8_t *)host_alloc(room + 1);
    memcpy(text, data + 8, (size_t)header);
    size_t longer = room ? LLVMFuzzerMutate(text, (size_t)header, room) : 0;
    memmove(data + 8 + longer, data + 8 + header, rest);
    memcpy(data + 8, text, longer);
    free(text);
    header = longer;
    memcpy(data, &header, 8);
    return 8 + longer + rest;
}
