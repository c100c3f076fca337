// huggingface.cu - model files of other programs: Hugging Face folders in and out, llm.c's model files in.
//
// A Hugging Face folder is a config.json, weights in safetensors (one file, or shards under an index), and a tokenizer.
// An llm.c model is one .bin file. Neither is trusted:
//   1. No file can run code: pickles (pytorch_model.bin, .pt) are recognised and refused, never read.
//   2. Names of files come from the fixed list below or, as plain names, from the index; links inside the folder are not
//      followed. Nothing is read before its place in the file is known to exist.
//   3. A configuration that asks for mathematics that we do not have is refused by the name of the key. Nothing is
//      approximated in silence.
//   4. All names and shapes are compared with the table before the first weight is handed over, and everything that
//      differs is listed at once. Weights that are not finite are refused by name.
//   5. One tensor is in memory at a time.
//   6. An exported folder appears under its name complete and on disk, or not at all; nothing that exists is replaced.
//
// Weights move through two callbacks, so that this file knows nothing about how they are stored or sharded: `put` takes and
// `get` fills a whole tensor, fp32, in the layout of the table: rows are output features, no padding. Hugging Face's GPT-2
// stores linear layers the other way round (its Conv1D: input features are rows); ParamDesc.hf_transposed says where.
#pragma once
#include "model.cu"
#include "runtime/json.h"
#include "runtime/safetensors.h"

enum {
    HF_JSON_BYTES_MAX = 16 << 20,    // config.json and the index
    HF_SHARDS_MAX = 512,             // files of one model; all are open at once
    HF_BLOCK_NUMEL = 1 << 18,        // elements moved at a time
    HF_TOKENIZER_BYTES_MAX = 1 << 28,
};
#define HF_SHARD_BYTES 5000000000ll  // exported files are split above this size, as transformers does

#define HF_CONFIG "config.json"
#define HF_WEIGHTS "model.safetensors"
#define HF_INDEX "model.safetensors.index.json"

// What travels with a model so that text can be made into its tokens.
static const char *const hf_tokenizer_files[] = {
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
};

// ---------------------------------------------------------------------------------------------------------------
// A list of everything that is wrong, for one line of output

typedef struct {
    int n, listed;
    size_t used;
    char text[1300];
} HfProblems;

PRINTF_LIKE(2, 3) static void hf_problem(HfProblems *p, const char *format, ...) {
    p->n++;
    char one[600];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(one, sizeof one, format, args);
    va_end(args);
    if (p->listed < p->n - 1 || p->used + (size_t)min_i64(length, sizeof one) + 40 > sizeof p->text) return; // only counted
    p->used += (size_t)snprintf(p->text + p->used, sizeof p->text - p->used, "%s%s", p->listed++ ? "; " : "", one);
}

// The list with what it leaves out.
static const char *hf_problems_text(HfProblems *p) {
    if (p->n > p->listed) snprintf(p->text + p->used, sizeof p->text - p->used, "; and %d more", p->n - p->listed);
    return p->text;
}

static const char *hf_shown(char room[512], const char *path) { return text_escape(room, 512, path, strlen(path)); }
static const char *hf_short(char room[100], const char *name) { return text_escape(room, 100, name, strlen(name)); }

// ---------------------------------------------------------------------------------------------------------------
// JSON files of a folder

// Reads and parses folder/name. Dies with EXIT_DATA unless it is strict JSON, an object, without a key twice.
static void hf_json_read(Json *j, int folder, const char *shown, const char *name) {
    char why[256], key[100];
    int64_t bytes = 0;
    int fd = file_open_at(folder, name, false, &bytes, why, sizeof why);
    if (fd < 0) die(EXIT_DATA, "%s/%s: %s", shown, name, why);
    if (bytes > HF_JSON_BYTES_MAX)
        die(EXIT_DATA, "%s/%s: has %" PRId64 " bytes, more than the limit of %d", shown, name, bytes, HF_JSON_BYTES_MAX);
    char *text = (char *)host_alloc((size_t)bytes + 1);
    if (!file_read_at(fd, text, bytes, 0))
        die(EXIT_IO, "%s/%s: %s", shown, name, errno ? strerror(errno) : "became shorter while it was read");
    close(fd);
    if (!json_parse(j, text, bytes, JSON_STRICT)) die(EXIT_DATA, "%s/%s:%d: %s", shown, name, j->line, j->error);
    free(text);
    if (j->node[0].type != JSON_OBJECT) die(EXIT_DATA, "%s/%s: is %s, not an object", shown, name, json_type_name(j->node[0].type));
    for (int i = 0; i < j->count; i++) {
        if (j->node[i].twin >= 0)
            die(EXIT_DATA, "%s/%s:%d: the key \"%s\" occurs twice", shown, name, j->node[i].line, hf_short(key, json_key(j, i)));
    }
}

typedef struct {
    Json json;
    HfProblems *problems;
} HfConfig;

// The value of a key; null counts as absent. -1 = not there.
static int hf_config_find(const HfConfig *c, const char *key) {
    int n = json_find(&c->json, 0, key);
    return n >= 0 && c->json.node[n].type == JSON_NULL ? -1 : n;
}

static void hf_config_wrong(HfConfig *c, int n, const char *wanted) {
    char shown[100];
    const JsonNode *node = &c->json.node[n];
    bool has_text = node->type == JSON_STRING || node->type == JSON_NUMBER;
    const char *value = node->type == JSON_BOOL ? (node->truth ? "true" : "false") : json_type_name(node->type);
    if (has_text) value = text_escape(shown, sizeof shown, json_text(&c->json, n), (size_t)node->length);
    const char *quote = node->type == JSON_STRING ? "\"" : "";
    hf_problem(c->problems, "line %d: %s = %s%s%s: must be %s", node->line, json_key(&c->json, n), quote, value, quote, wanted);
}

// A whole number from 1 to most, under its GPT-2 name or the general one; `fallback` when absent, where 0 means: required.
// As transformers 5 does, no other spelling of a number is taken.
static int64_t hf_config_count(HfConfig *c, const char *key, const char *other, int64_t most, int64_t fallback) {
    int64_t value = 0;
    char wanted[64];
    int n = hf_config_find(c, key);
    if (n < 0 && other) n = hf_config_find(c, other);
    if (n < 0) {
        if (fallback == 0) hf_problem(c->problems, "%s is missing", key);
        return fallback;
    }
    const JsonNode *node = &c->json.node[n];
    bool digits = node->type == JSON_NUMBER && strspn(json_text(&c->json, n), "0123456789") == (size_t)node->length;
    if (!digits || json_to_i64(json_text(&c->json, n), node->length, &value) != JSON_WHOLE || value < 1 || value > most) {
        snprintf(wanted, sizeof wanted, "a whole number from 1 to %" PRId64, most);
        hf_config_wrong(c, n, wanted);
        return 0;
    }
    return value;
}

static double hf_config_number(HfConfig *c, const char *key, double fallback) {
    double value = fallback;
    int n = hf_config_find(c, key);
    if (n >= 0 && (c->json.node[n].type != JSON_NUMBER || !json_to_double(json_text(&c->json, n), &value)))
        hf_config_wrong(c, n, "a finite number");
    return value;
}

static bool hf_config_flag(HfConfig *c, const char *key, bool fallback) {
    int n = hf_config_find(c, key);
    if (n < 0) return fallback;
    if (c->json.node[n].type == JSON_BOOL) return c->json.node[n].truth;
    hf_config_wrong(c, n, "true or false");
    return fallback;
}

// The text of a key, or `fallback`.
static const char *hf_config_text(HfConfig *c, const char *key, const char *fallback) {
    int n = hf_config_find(c, key);
    if (n < 0) return fallback;
    const char *text = json_text(&c->json, n);
    if (c->json.node[n].type == JSON_STRING && strlen(text) == (size_t)c->json.node[n].length) return text;
    hf_config_wrong(c, n, "a text");
    return fallback;
}

// Token number `key` of a configuration if it is one of a vocabulary of V, else -1.
static int64_t hf_config_token(const HfConfig *c, const char *key, int64_t V) {
    int64_t value;
    int n = hf_config_find(c, key);
    if (n < 0 || c->json.node[n].type != JSON_NUMBER) return -1;
    return json_to_i64(json_text(&c->json, n), c->json.node[n].length, &value) == JSON_WHOLE && value >= 0 && value < V ? value : -1;
}

// Switches of GPT-2 that change its mathematics, and the only value that is built.
static const struct {
    const char *key;
    bool built;
} hf_gpt2_flags[] = {
    {"scale_attn_weights", true}, {"scale_attn_by_inverse_layer_idx", false}, {"reorder_and_upcast_attn", false},
    {"add_cross_attention", false}, {"is_encoder_decoder", false},
};

// Sizes that a model of ours can have; larger ones in a file are damage or malice.
enum { HF_LAYERS_MAX = 10000, HF_WIDTH_MAX = 1 << 20, HF_POSITIONS_MAX = 1 << 28, HF_VOCAB_MAX = 1 << 28 };

// Fills the sizes of *m from config.json, in the forms of transformers 4 and 5. Dies with EXIT_DATA listing what it cannot be.
static void hf_config_json_read(int folder, const char *shown, ModelConfig *m) {
    HfProblems problems = {0, 0, 0, ""};
    HfConfig c = {{0}, &problems};
    char text[100];
    hf_json_read(&c.json, folder, shown, HF_CONFIG);
    const char *type = hf_config_text(&c, "model_type", ""), *built_type = model_arch(m)->name;
    if (strcmp(type, built_type) != 0)
        die(EXIT_DATA, "%s/" HF_CONFIG ": model_type is \"%s\"; only \"%s\" is built", shown, hf_short(text, type), built_type);
    m->n_layer = hf_config_count(&c, "n_layer", "num_hidden_layers", HF_LAYERS_MAX, 0);
    m->n_head = hf_config_count(&c, "n_head", "num_attention_heads", HF_WIDTH_MAX, 0);
    m->n_embd = hf_config_count(&c, "n_embd", "hidden_size", HF_WIDTH_MAX, 0);
    m->n_positions = hf_config_count(&c, "n_positions", "max_position_embeddings", HF_POSITIONS_MAX, 0);
    m->vocab_size = hf_config_count(&c, "vocab_size", NULL, HF_VOCAB_MAX, 0);
    m->n_inner = hf_config_count(&c, "n_inner", NULL, 4 * HF_WIDTH_MAX, max_i64(1, 4 * m->n_embd));
    m->layer_norm_epsilon = hf_config_number(&c, "layer_norm_epsilon", 1e-5);
    m->tie_word_embeddings = hf_config_flag(&c, "tie_word_embeddings", true);
    if (!(m->layer_norm_epsilon > 0)) hf_problem(&problems, "layer_norm_epsilon = %g: must be above 0", m->layer_norm_epsilon);
    if (m->n_embd > 0 && m->n_head > 0 && m->n_embd % m->n_head != 0)
        hf_problem(&problems, "n_embd = %" PRId64 " is no multiple of n_head = %" PRId64, m->n_embd, m->n_head);
    // gelu_new and gelu_pytorch_tanh are two names of the tanh form; "gelu" is the erf form, another function
    const char *activation = hf_config_text(&c, "activation_function", "gelu_new");
    if (strcmp(activation, "gelu_new") != 0 && strcmp(activation, "gelu_pytorch_tanh") != 0)
        hf_problem(&problems, "activation_function = \"%s\" is not built; gelu_new (the tanh form) is", hf_short(text, activation));
    for (size_t i = 0; i < sizeof hf_gpt2_flags / sizeof *hf_gpt2_flags; i++) {
        bool built = hf_gpt2_flags[i].built;
        if (hf_config_flag(&c, hf_gpt2_flags[i].key, built) != built)
            hf_problem(&problems, "%s = %s is not built", hf_gpt2_flags[i].key, built ? "false" : "true");
    }
    if (hf_config_find(&c, "quantization_config") >= 0)
        hf_problem(&problems, "quantization_config: quantized weights are not read; import the original model");
    int pruned = hf_config_find(&c, "pruned_heads");
    if (pruned >= 0 && c.json.node[pruned].count > 0) hf_problem(&problems, "pruned_heads is not built");
    double dropout = 0;
    static const char *const dropouts[] = {"resid_pdrop", "embd_pdrop", "attn_pdrop"};
    for (int i = 0; i < 3; i++) dropout = fmax(dropout, hf_config_number(&c, dropouts[i], 0));
    if (problems.n) die(EXIT_DATA, "%s/" HF_CONFIG ": %s", shown, hf_problems_text(&problems));
    if (dropout > 0) note("%s/" HF_CONFIG " has dropout %g; this program trains without dropout", shown, dropout);
    json_free(&c.json);
}

// ---------------------------------------------------------------------------------------------------------------
// llm.c model files: 256 int32 (magic, version, T, V, L, NH, C, padded V), then 16 tensors, each for all layers together, in
// fp32 (version 3) or bf16 (version 5). Rows are output features.

enum { LLMC_MAGIC = 20240326, LLMC_FP32 = 3, LLMC_BF16 = 5, LLMC_HEADER_BYTES = 1024 };

static const struct {
    int magic;
    const char *what;
} llmc_other_magics[] = {
    {20240803, "a Llama 3 model of llm.c; only GPT-2 is built"}, {20240520, "a token file of llm.c; it goes to data.train"},
    {20240801, "a token file of llm.c; it goes to data.train"}, {20240527, "an optimizer state of llm.c; name the model_*.bin beside it"},
    {20240328, "a tokenizer of llm.c"}, {20240327, "a debug state of llm.c; name the model .bin beside it"},
};

// In file order; sizes are letters: P padded vocabulary, T positions, C width, Q 3C, F 4C, 1 for vectors.
static const struct {
    const char *name;
    bool in_block;
    char rows, columns;
} llmc_tensors[] = {
    {"wte.weight", false, 'P', 'C'}, {"wpe.weight", false, 'T', 'C'},
    {"ln_1.weight", true, 'C', '1'}, {"ln_1.bias", true, 'C', '1'},
    {"attn.c_attn.weight", true, 'Q', 'C'}, {"attn.c_attn.bias", true, 'Q', '1'}, {"attn.c_proj.weight", true, 'C', 'C'},
        {"attn.c_proj.bias", true, 'C', '1'},
    {"ln_2.weight", true, 'C', '1'}, {"ln_2.bias", true, 'C', '1'},
    {"mlp.c_fc.weight", true, 'F', 'C'}, {"mlp.c_fc.bias", true, 'F', '1'}, {"mlp.c_proj.weight", true, 'C', 'F'}, {"mlp.c_proj.bias", true,
        'C', '1'},
    {"ln_f.weight", false, 'C', '1'}, {"ln_f.bias", false, 'C', '1'},
};
enum { LLMC_TENSORS = sizeof llmc_tensors / sizeof *llmc_tensors };

// What a file that is no llm.c model seems to be.
static const char *hf_guess_format(const int32_t header[4], int64_t file_bytes) {
    const unsigned char *b = (const unsigned char *)header;
    uint64_t n;
    memcpy(&n, b, 8);
    for (size_t i = 0; i < sizeof llmc_other_magics / sizeof *llmc_other_magics; i++)
        if (header[0] == llmc_other_magics[i].magic) return llmc_other_magics[i].what;
    if (header[0] == (int32_t)__builtin_bswap32(LLMC_MAGIC))
        return "an llm.c model written on a machine of the other byte order; write it again on a little-endian one";
    if (memcmp(b, "GGUF", 4) == 0) return "a GGUF file; import the model's Hugging Face folder instead";
    if (memcmp(b, "PK\3\4", 4) == 0 || (b[0] == 0x80 && b[1] <= 5))
        return "a PyTorch file (a pickle, which can run code and is never read); save the model with safe_serialization=True and name that folder";
    if (n < (uint64_t)file_bytes && b[8] == '{') return "a safetensors file; name the folder that holds it and its config.json";
    return "no model file of llm.c (magic 20240326, version 3 or 5) and no folder of Hugging Face";
}

static int64_t llmc_size(const ModelConfig *m, int64_t padded_vocab, char letter) {
    switch (letter) {
    case 'P': return padded_vocab;
    case 'T': return m->n_positions;
    case 'C': return m->n_embd;
    case 'Q': return 3 * m->n_embd;
    case 'F': return 4 * m->n_embd;
    default: return 1;
    }
}

// Opens a model of llm.c and fills the sizes of *m. Unless st is null, it becomes a view of the file as if each layer's
// tensor had a name and a place of its own (close it with safetensors_close). Dies with EXIT_DATA.
static void llmc_open(const char *path, const char *shown, ModelConfig *m, SafeTensors *st) {
    int32_t header[LLMC_HEADER_BYTES / 4];
    char why[256];
    int64_t file_bytes = 0;
    int fd = file_open_at(AT_FDCWD, path, true, &file_bytes, why, sizeof why);
    if (fd < 0) die(EXIT_DATA, "model.init_from = %s: %s", shown, why);
    memset(header, 0, sizeof header);
    if (!file_read_at(fd, header, min_i64(file_bytes, sizeof header), 0))
        die(EXIT_IO, "%s: %s", shown, errno ? strerror(errno) : "became shorter while it was read");
    if (header[0] != LLMC_MAGIC) die(EXIT_DATA, "model.init_from = %s: is %s", shown, hf_guess_format(header, file_bytes));
    if (header[1] != LLMC_FP32 && header[1] != LLMC_BF16)
        die(EXIT_DATA, "%s: an llm.c model of version %d; this program reads 3 (fp32) and 5 (bf16)", shown, header[1]);
    const int64_t T = header[2], V = header[3], L = header[4], NH = header[5], C = header[6], Vp = header[7];
    if (T < 1 || T > HF_POSITIONS_MAX || V < 1 || Vp > HF_VOCAB_MAX || L < 1 || L > HF_LAYERS_MAX || NH < 1 ||
        C < 1 || C > HF_WIDTH_MAX || Vp < V || C % NH != 0)
        die(EXIT_DATA, "%s: sizes that no model has: positions %" PRId64 ", vocabulary %" PRId64 " (padded %" PRId64 "), layers %" PRId64
            ", heads %" PRId64 ", width %" PRId64 "; the file is damaged", shown, T, V, Vp, L, NH, C);
    m->n_positions = T;
    m->vocab_size = V;
    m->n_layer = L;
    m->n_head = NH;
    m->n_embd = C;
    m->n_inner = 4 * C;
    m->layer_norm_epsilon = 1e-5; // llm.c's constant, as the next line is its only form
    m->tie_word_embeddings = true;
    SafeTensors all;
    memset(&all, 0, sizeof all);
    enum { NAME_ROOM = 48 };
    size_t room = LLMC_TENSORS * (size_t)L;
    all.fd = fd;
    all.file_bytes = file_bytes;
    all.data_begin = LLMC_HEADER_BYTES;
    all.tensor = (SafeTensor *)host_alloc(room * sizeof *all.tensor);
    all.by_name = (SafeTensor **)host_alloc(room * sizeof *all.by_name);
    all.pool = (char *)host_alloc(room * NAME_ROOM);
    int64_t at = LLMC_HEADER_BYTES; // 10000 layers of 12 * 2^40 elements stay below 2^63 bytes
    for (int k = 0; k < LLMC_TENSORS; k++) {
        for (int l = 0; l < (llmc_tensors[k].in_block ? L : 1); l++) {
            char *name = all.pool + (size_t)all.n_tensors * NAME_ROOM;
            SafeTensor *t = &all.tensor[all.n_tensors];
            if (llmc_tensors[k].in_block) snprintf(name, NAME_ROOM, "h.%d.%s", l, llmc_tensors[k].name);
            else snprintf(name, NAME_ROOM, "%s", llmc_tensors[k].name);
            t->name = name;
            t->type = header[1] == LLMC_FP32 ? SAFE_F32 : SAFE_BF16;
            t->ndim = llmc_tensors[k].columns == '1' ? 1 : 2;
            t->shape[0] = llmc_size(m, Vp, llmc_tensors[k].rows);
            t->shape[1] = llmc_size(m, Vp, llmc_tensors[k].columns);
            t->begin = at;
            t->end = at += t->shape[0] * t->shape[1] * safetensors_types[t->type].bytes;
            if (llmc_tensors[k].rows == 'P') t->shape[0] = V; // the padding follows, and is skipped
            all.by_name[all.n_tensors++] = t;
        }
    }
    if (file_bytes != at)
        die(EXIT_DATA, "%s: has %" PRId64 " bytes, but a model of its sizes has %" PRId64 "; the file is cut or damaged", shown, file_bytes,
            at);
    qsort(all.by_name, (size_t)all.n_tensors, sizeof *all.by_name, safetensors_by_name);
    if (st) *st = all;
    else safetensors_close(&all);
}

// ---------------------------------------------------------------------------------------------------------------
// Configuration

// Opens init_from if it is a folder; -1 if it is a file. Dies with EXIT_DATA if it is neither.
static int hf_open_folder(const char *init_from, const char *shown) {
    struct stat st;
    if (stat(init_from, &st) != 0)
        die(EXIT_DATA, "model.init_from = %s: %s; name a Hugging Face folder or a model .bin of llm.c on this machine (models are not "
            "downloaded here: hf download ID --local-dir DIR)", shown, strerror(errno));
    if (!S_ISDIR(st.st_mode)) return -1;
    int folder = open(init_from, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) die(EXIT_DATA, "model.init_from = %s: %s", shown, strerror(errno));
    return folder;
}

static void hf_agree(HfProblems *p, const char *key, int64_t *mine, int64_t found) {
    if (*mine == 0) *mine = found;
    else if (*mine != found) hf_problem(p, "%s is %" PRId64 " in the configuration, %" PRId64 " in the model", key, *mine, found);
}

// Fills the sizes of *m from a folder's config.json or the header of a model of llm.c. Sizes that are given already (not 0)
// must agree, else EXIT_CONFIG with all that differ; tie_word_embeddings has no such value and is overwritten.
static void hf_config_read(const char *init_from, ModelConfig *m) {
    char shown[512];
    hf_shown(shown, init_from);
    ModelConfig found = *m;
    int folder = hf_open_folder(init_from, shown);
    if (folder >= 0) {
        hf_config_json_read(folder, shown, &found);
        close(folder);
    } else llmc_open(init_from, shown, &found, NULL);
    HfProblems problems = {0, 0, 0, ""};
    hf_agree(&problems, "n_layer", &m->n_layer, found.n_layer);
    hf_agree(&problems, "n_head", &m->n_head, found.n_head);
    hf_agree(&problems, "n_embd", &m->n_embd, found.n_embd);
    hf_agree(&problems, "n_positions", &m->n_positions, found.n_positions);
    hf_agree(&problems, "vocab_size", &m->vocab_size, found.vocab_size);
    hf_agree(&problems, "n_inner", &m->n_inner, found.n_inner);
    if (m->layer_norm_epsilon == 0) m->layer_norm_epsilon = found.layer_norm_epsilon;
    else if (m->layer_norm_epsilon != found.layer_norm_epsilon)
        hf_problem(&problems, "layer_norm_epsilon is %g in the configuration, %g in the model", m->layer_norm_epsilon,
            found.layer_norm_epsilon);
    m->tie_word_embeddings = found.tie_word_embeddings;
    if (problems.n)
        die(EXIT_CONFIG, "train_gpt.model differs from model.init_from = %s: %s; remove these keys or name another model", shown,
            hf_problems_text(&problems));
}

// ---------------------------------------------------------------------------------------------------------------
// Import

typedef struct {
    char name[256];       // within the folder
    SafeTensors st;
} HfFile;

typedef struct {
    char shown[512];      // the path, to print
    bool is_llmc;         // one file, no folder; its matrices are laid out as ours
    int n_files;
    HfFile *file;
} HfSource;

// Where a row of the table lies. tensor is null while it has not been found.
typedef struct {
    const HfFile *file;
    const SafeTensor *tensor;
} HfPlace;

typedef struct {
    const char *name;     // of a tensor
    int file;             // index into HfSource.file
} HfMapEntry;

static int hf_map_by_name(const void *a, const void *b) { return strcmp(((const HfMapEntry *)a)->name, ((const HfMapEntry *)b)->name); }

static bool hf_is_plain_name(const char *name, int32_t length) {
    return length > 0 && length < 256 && strlen(name) == (size_t)length && name[0] != '.' && !strchr(name, '/');
}

static void hf_open_file(HfSource *s, int folder, HfFile *f) {
    char why[512], name[512];
    if (!safetensors_open_at(&f->st, folder, f->name, false, why, sizeof why))
        die(EXIT_DATA, "%s/%s: %s", s->shown, hf_shown(name, f->name), why);
}

// Opens the shards that the index names. The map is what counts: a tensor that lies elsewhere than it says, or that it does
// not list, is a problem.
static void hf_open_shards(HfSource *s, int folder, HfProblems *problems) {
    Json j;
    hf_json_read(&j, folder, s->shown, HF_INDEX);
    int map_node = json_find(&j, 0, "weight_map");
    if (map_node < 0 || j.node[map_node].type != JSON_OBJECT) die(EXIT_DATA, "%s/" HF_INDEX ": has no object weight_map", s->shown);
    char shown[100], where[100];
    int n = 0;
    HfMapEntry *map = (HfMapEntry *)host_alloc((size_t)j.node[map_node].count * sizeof *map);
    s->file = (HfFile *)host_alloc(HF_SHARDS_MAX * sizeof *s->file);
    for (int i = j.node[map_node].first; i >= 0; i = j.node[i].next) {
        const char *file = json_text(&j, i);
        text_escape(shown, sizeof shown, json_key(&j, i), (size_t)j.node[i].key_length);
        text_escape(where, sizeof where, file, j.node[i].type == JSON_STRING ? (size_t)j.node[i].length : 0);
        if (j.node[i].type != JSON_STRING || !hf_is_plain_name(file, j.node[i].length))
            die(EXIT_DATA, "%s/" HF_INDEX ":%d: tensor \"%s\" is said to be in \"%s\"; only plain names of files beside the index "
                "are opened", s->shown, j.node[i].line, shown, where);
        if (strlen(json_key(&j, i)) != (size_t)j.node[i].key_length)
            die(EXIT_DATA, "%s/" HF_INDEX ":%d: the name \"%s\" holds a zero byte", s->shown, j.node[i].line, shown);
        int f = 0;
        while (f < s->n_files && strcmp(s->file[f].name, file) != 0) f++;
        if (f == s->n_files) {
            if (f == HF_SHARDS_MAX) die(EXIT_DATA, "%s/" HF_INDEX ": names more than %d files", s->shown, HF_SHARDS_MAX);
            snprintf(s->file[s->n_files++].name, sizeof s->file->name, "%s", file);
        }
        map[n++] = (HfMapEntry){json_key(&j, i), f};
    }
    qsort(map, (size_t)n, sizeof *map, hf_map_by_name);
    for (int f = 0; f < s->n_files; f++) {
        hf_open_file(s, folder, &s->file[f]);
        hf_short(where, s->file[f].name);
        for (int i = 0; i < s->file[f].st.n_tensors; i++) {
            HfMapEntry key = {s->file[f].st.tensor[i].name, 0};
            const HfMapEntry *entry = (const HfMapEntry *)bsearch(&key, map, (size_t)n, sizeof *map, hf_map_by_name);
            if (!entry) hf_problem(problems, "%s holds %s, which the index does not list", where, hf_short(shown, key.name));
            else if (entry->file != f)
                hf_problem(problems, "%s holds %s, which the index places elsewhere", where, hf_short(shown, key.name));
        }
    }
    for (int i = 0; i < n; i++) {
        const HfFile *f = &s->file[map[i].file];
        if (safetensors_find(&f->st, map[i].name)) continue;
        hf_problem(problems, "the index places %s in %s, which lacks it", hf_short(shown, map[i].name), hf_short(where, f->name));
    }
    free(map);
    json_free(&j);
}

// Opens all files of a model and reads their headers.
static void hf_source_open(HfSource *s, const char *init_from, HfProblems *problems) {
    memset(s, 0, sizeof *s);
    hf_shown(s->shown, init_from);
    int folder = hf_open_folder(init_from, s->shown);
    struct stat st;
    if (folder < 0) {
        ModelConfig unused;
        memset(&unused, 0, sizeof unused);
        s->is_llmc = true;
        s->n_files = 1;
        s->file = (HfFile *)host_alloc(sizeof *s->file);
        llmc_open(init_from, s->shown, &unused, &s->file->st);
        return;
    }
    if (fstatat(folder, HF_WEIGHTS, &st, AT_SYMLINK_NOFOLLOW) == 0) { // as transformers: the single file wins over an index
        s->n_files = 1;
        s->file = (HfFile *)host_alloc(sizeof *s->file);
        snprintf(s->file->name, sizeof s->file->name, HF_WEIGHTS);
        hf_open_file(s, folder, s->file);
    } else if (fstatat(folder, HF_INDEX, &st, AT_SYMLINK_NOFOLLOW) == 0) hf_open_shards(s, folder, problems);
    else if (fstatat(folder, "pytorch_model.bin", &st, AT_SYMLINK_NOFOLLOW) == 0 ||
             fstatat(folder, "pytorch_model.bin.index.json", &st, AT_SYMLINK_NOFOLLOW) == 0)
        die(EXIT_DATA, "model.init_from = %s: holds only pytorch_model.bin, a pickle, which can run code and is never read; save the model "
            "again with safe_serialization=True", s->shown);
    else die(EXIT_DATA, "model.init_from = %s: has neither " HF_WEIGHTS " nor " HF_INDEX, s->shown);
    close(folder);
}

static void hf_source_close(HfSource *s) {
    for (int f = 0; f < s->n_files; f++) safetensors_close(&s->file[f].st);
    free(s->file);
}

// Buffers of old GPT-2 files that are no weights: h.N.attn.bias is the causal mask, masked_bias its filler.
static bool hf_is_mask(const char *name) {
    if (strncmp(name, "h.", 2) != 0) return false;
    name += 2;
    size_t digits = strspn(name, "0123456789");
    return digits > 0 && (strcmp(name + digits, ".attn.bias") == 0 || strcmp(name + digits, ".attn.masked_bias") == 0);
}

static int hf_rows_by_name(const void *a, const void *b) {
    return strcmp((*(const ParamDesc *const *)a)->name, (*(const ParamDesc *const *)b)->name);
}

// The row of that name in a sorted list of n, or null.
static const ParamDesc *hf_find_row(const ParamDesc **sorted, int n, const char *name) {
    int low = 0, high = n;
    while (low < high) {
        int middle = low + (high - low) / 2, order = strcmp(sorted[middle]->name, name);
        if (order == 0) return sorted[middle];
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return NULL;
}

// Shape of a row in the file.
static void hf_row_shape(const ParamDesc *r, bool transposed, int64_t shape[2]) {
    shape[0] = r->shape[transposed ? 1 : 0];
    shape[1] = r->shape[transposed ? 0 : 1];
}

// Finds the place of every row. Adds to the problems what is missing, unexpected, named twice, or of another shape or type.
static void hf_match(const HfSource *s, const ParamTable *table, HfPlace *place, HfProblems *problems) {
    const ParamDesc **sorted = (const ParamDesc **)host_alloc((size_t)table->n_rows * sizeof *sorted);
    for (int i = 0; i < table->n_rows; i++) sorted[i] = &table->row[i];
    qsort(sorted, (size_t)table->n_rows, sizeof *sorted, hf_rows_by_name);
    char shown[100], have[200], need[60];
    for (int f = 0; f < s->n_files; f++) {
        for (int i = 0; i < s->file[f].st.n_tensors; i++) {
            const SafeTensor *t = &s->file[f].st.tensor[i];
            const char *name = t->name;
            if (!s->is_llmc && strncmp(name, "transformer.", 12) == 0) name += 12; // the original files of the hub lack it
            const ParamDesc *r = hf_find_row(sorted, table->n_rows, name);
            hf_short(shown, t->name);
            if (!r) {
                if (!hf_is_mask(name)) hf_problem(problems, "unexpected %s", shown);
                continue;
            }
            HfPlace *p = &place[r - table->row];
            if (p->tensor) { hf_problem(problems, "%s is there twice, with and without \"transformer.\"", shown); continue; }
            p->file = &s->file[f];
            p->tensor = t;
            int64_t shape[2];
            hf_row_shape(r, r->hf_transposed && !s->is_llmc, shape);
            if (t->ndim != r->ndim || t->shape[0] != shape[0] || (t->ndim == 2 && t->shape[1] != shape[1]))
                hf_problem(problems, "%s is %s, must be %s", shown, safetensors_shape_text(have, sizeof have, t->ndim, t->shape),
                    safetensors_shape_text(need, sizeof need, r->ndim, shape));
            if (t->type >= SAFE_FIRST_WITHOUT_FP32)
                hf_problem(problems, "%s has type %s; " SAFETENSORS_READABLE, shown, safetensors_types[t->type].name);
        }
    }
    for (int i = 0; i < table->n_rows; i++)
        if (!place[i].tensor && table->row[i].tied_to < 0) hf_problem(problems, "missing %s", table->row[i].name);
    free(sorted);
}

// Reads elements [first, first + n) of a tensor, all of which must be finite.
static void hf_read(const HfSource *s, const HfPlace *p, int64_t first, int64_t n, float *dst) {
    char why[300], shown[100];
    if (!safetensors_read(&p->file->st, p->tensor, first, n, dst, why, sizeof why))
        die(EXIT_IO, "%s%s%s: %s", s->shown, s->is_llmc ? "" : "/", hf_short(shown, p->file->name), why);
    for (int64_t i = 0; i < n; i++) {
        if (isfinite(dst[i])) continue;
        int64_t columns = p->tensor->ndim == 2 ? p->tensor->shape[1] : 1, at = first + i;
        die(EXIT_DATA, "%s: tensor \"%s\" has %s at [%" PRId64 ", %" PRId64 "]; the model is damaged, take another copy of it", s->shown,
            hf_short(shown, p->tensor->name), isnan(dst[i]) ? "NaN" : "an infinity", at / columns, at % columns);
    }
}

// Reads a whole tensor of shape (rows, columns) as the table has it; block is as hf_buffers says.
static void hf_read_tensor(const HfSource *s, const HfPlace *p, const ParamDesc *r, float *values, float *block) {
    int64_t OC = r->shape[0], C = r->shape[1];
    if (!r->hf_transposed || s->is_llmc) {
        hf_read(s, p, 0, OC * C, values);
        return;
    }
    int64_t step = max_i64(1, HF_BLOCK_NUMEL / OC); // rows of the file, which are columns of ours
    for (int64_t c = 0; c < C; c += step) {
        int64_t n = min_i64(step, C - c);
        hf_read(s, p, c * OC, n * OC, block);
        for (int64_t o = 0; o < OC; o++)
            for (int64_t k = 0; k < n; k++) values[o * C + c + k] = block[k * OC + o];
    }
}

// A tied model may carry its head as a second copy of the embedding; then the copies must be equal.
static void hf_check_tied(const HfSource *s, const HfPlace *head, const HfPlace *wte, int64_t numel, float *a, float *b) {
    for (int64_t at = 0; at < numel; at += HF_BLOCK_NUMEL) {
        int64_t n = min_i64(HF_BLOCK_NUMEL, numel - at);
        hf_read(s, head, at, n, a);
        hf_read(s, wte, at, n, b);
        for (int64_t i = 0; i < n; i++)
            if (a[i] != b[i])
                die(EXIT_DATA, "%s: config.json ties the head to the embedding, but lm_head.weight and wte.weight differ, at element %" PRId64
                    " by %g; if they are meant to differ, set tie_word_embeddings to false there", s->shown, at + i, (double)(a[i] - b[i]));
    }
}

// Elements of the largest tensor, and of the largest block: at least one row of any tensor, either way round.
static void hf_buffers(const ParamTable *table, int64_t *tensor_numel, int64_t *block_numel) {
    *tensor_numel = *block_numel = HF_BLOCK_NUMEL;
    for (int i = 0; i < table->n_rows; i++) {
        *tensor_numel = max_i64(*tensor_numel, param_numel(&table->row[i]));
        *block_numel = max_i64(*block_numel, max_i64(table->row[i].shape[0], table->row[i].shape[1]));
    }
}

// Hands every stored row of the table to put(ctx, row, values), values being (shape[0], shape[1]) in fp32. Dies with EXIT_DATA
// listing every name and shape that does not fit, before the first call; later only for NaN, infinity or a failing disk.
static void hf_import(const char *init_from, const ModelConfig *m, const ParamTable *table,
                      void (*put)(void *ctx, int row, const float *values), void *ctx) {
    HfSource s;
    HfProblems problems = {0, 0, 0, ""};
    (void)m; // the table is the model
    hf_source_open(&s, init_from, &problems);
    HfPlace *place = (HfPlace *)host_alloc((size_t)table->n_rows * sizeof *place);
    hf_match(&s, table, place, &problems);
    if (problems.n)
        die(EXIT_DATA, "model.init_from = %s: the weights are not those of this model: %s", s.shown, hf_problems_text(&problems));
    int64_t most, block_most;
    hf_buffers(table, &most, &block_most);
    float *values = (float *)host_alloc((size_t)most * sizeof(float));
    float *block = (float *)host_alloc((size_t)block_most * sizeof(float));
    for (int i = 0; i < table->n_rows; i++) {
        const ParamDesc *r = &table->row[i];
        if (r->tied_to >= 0) {
            if (place[i].tensor) hf_check_tied(&s, &place[i], &place[r->tied_to], param_numel(r), values, block);
            continue;
        }
        hf_read_tensor(&s, &place[i], r, values, block);
        put(ctx, i, values);
    }
    free(values);
    free(block);
    free(place);
    hf_source_close(&s);
}

// ---------------------------------------------------------------------------------------------------------------
// Export

typedef struct {
    Io *io;
    char shown[512];      // the folder that is to appear
    char base[IO_NAME_MAX]; // its last component
    char temporary[64];   // name while it is being filled; "" = not made yet
    IoHandle parent, folder; // the folder above, and the temporary one
} HfExport;

// Ends the program after removing what was written.
__attribute__((noreturn)) PRINTF_LIKE(3, 4) static void hf_export_fail(HfExport *e, int code, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    Io cleaning; // its failures would hide the reason
    memset(&cleaning, 0, sizeof cleaning);
    if (e->temporary[0]) io_remove(&cleaning, &e->parent, e->temporary);
    die(code, "export to %s: %s", e->shown, text);
}

// A call that failed: the exit code says whether something could not be made or not be written.
__attribute__((noreturn)) static void hf_export_io(HfExport *e) {
    bool create = e->io->error == EACCES || e->io->error == EPERM || e->io->error == EROFS;
    hf_export_fail(e, create ? EXIT_CANTCREAT : EXIT_IO, "%s", e->io->why);
}

static void hf_count_entry(void *ctx, const char *name) {
    (void)name;
    ++*(int *)ctx;
}

// Takes the path apart, opens the folder above, and makes sure that nothing would be replaced.
static void hf_export_begin(HfExport *e, Io *io, const char *dir) {
    char path[CONFIG_PATH_MAX];
    memset(e, 0, sizeof *e);
    e->io = io;
    hf_shown(e->shown, dir);
    size_t n = strlen(dir);
    if (n >= sizeof path) die(EXIT_CONFIG, "export to %s: the path has %zu bytes, more than %d", e->shown, n, CONFIG_PATH_MAX - 1);
    memcpy(path, dir, n + 1);
    while (n > 1 && path[n - 1] == '/') path[--n] = 0;
    char *slash = strrchr(path, '/');
    const char *base = slash ? slash + 1 : path;
    if (*base == 0 || strcmp(base, ".") == 0 || strcmp(base, "..") == 0 || strlen(base) >= sizeof e->base)
        die(EXIT_CONFIG, "export to \"%s\": name a folder that is to be made", e->shown);
    memcpy(e->base, base, strlen(base) + 1);
    if (slash) slash[slash == path ? 1 : 0] = 0; // "/x" is below "/"
    e->parent.fd = open(slash ? path : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (e->parent.fd < 0) die(EXIT_CANTCREAT, "export to %s: the folder above it: %s", e->shown, strerror(errno));
    struct stat st;
    if (fstatat(e->parent.fd, e->base, &st, AT_SYMLINK_NOFOLLOW) != 0) return;
    int existing = S_ISDIR(st.st_mode) ? openat(e->parent.fd, e->base, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW) : -1, entries = 0;
    if (existing < 0 || !folder_each(existing, hf_count_entry, &entries) || entries > 0)
        die(EXIT_CANTCREAT, "export to %s: already there and not an empty folder; nothing is overwritten: name another one, or remove it first", e->shown);
    close(existing);
}

// Makes the temporary folder, if the disk has room for what will be in it.
static void hf_export_make(HfExport *e, int64_t bytes) {
    int64_t space;
    if (!io_space(e->io, &e->parent, &space)) hf_export_io(e);
    if (space < bytes) die(EXIT_IO, "export to %s: needs %" PRId64 " bytes, the disk has %" PRId64 " free", e->shown, bytes, space);
    char name[sizeof e->temporary];
    snprintf(name, sizeof name, ".tmp-export-%016" PRIx64, io_nonce());
    if (!io_mkdir(e->io, &e->parent, name)) hf_export_io(e);
    memcpy(e->temporary, name, sizeof name); // from here on it is ours to remove
    if (!io_open_folder(e->io, &e->parent, e->temporary, &e->folder)) hf_export_io(e);
}

// Gives the finished folder its name: replaces an empty folder, and fails on anything else that came up there meanwhile.
static void hf_export_publish(HfExport *e) {
    if (!io_sync(e->io, &e->folder) || !io_rename(e->io, &e->parent, e->temporary, e->base, IO_RENAME_OVER)) hf_export_io(e);
    if (!io_sync(e->io, &e->parent)) die(EXIT_IO, "export to %s: is there, but perhaps not on disk yet: %s", e->shown, e->io->why);
    close(e->folder.fd);
    close(e->parent.fd);
}

// Writes a small file of the new folder.
static void hf_export_text(HfExport *e, const char *name, const char *text, int64_t bytes) {
    IoHandle file;
    bool good = io_create(e->io, &e->folder, name, &file) && io_write(e->io, &file, text, bytes, 0);
    if (!good || !io_sync(e->io, &file) || !io_close(e->io, &file)) hf_export_io(e);
}

// The table and the configuration must say the same: the configuration is what the reader of the export believes.
static void hf_check_table(const ModelConfig *m, const ParamTable *table) {
    int64_t blocks = 0;
    bool own_head = false;
    CHECK(m->n_layer > 0 && m->n_head > 0 && m->n_embd % m->n_head == 0, "n_layer %" PRId64 ", n_head %" PRId64 ", n_embd %" PRId64,
        m->n_layer, m->n_head, m->n_embd);
    CHECK(m->layer_norm_epsilon > 0, "layer_norm_epsilon %g", m->layer_norm_epsilon);
    for (int i = 0; i < table->n_rows; i++) {
        const ParamDesc *r = &table->row[i];
        int64_t rows = r->shape[0], columns = r->shape[1], want_rows = m->n_embd, want_columns = r->ndim == 1 ? 1 : m->n_embd;
        const char *part = strncmp(r->name, "h.", 2) == 0 ? r->name + 2 + strspn(r->name + 2, "0123456789") + 1 : r->name;
        if (strcmp(part, "wte.weight") == 0 || strcmp(part, "lm_head.weight") == 0) want_rows = m->vocab_size;
        else if (strcmp(part, "wpe.weight") == 0) want_rows = m->n_positions;
        else if (strncmp(part, "attn.c_attn.", 12) == 0) want_rows = 3 * m->n_embd;
        else if (strncmp(part, "mlp.c_fc.", 9) == 0) want_rows = m->n_inner;
        else if (strcmp(part, "mlp.c_proj.weight") == 0) want_columns = m->n_inner;
        CHECK(rows == want_rows && columns == want_columns,
            "%s is (%" PRId64 ", %" PRId64 "), by the configuration (%" PRId64 ", %" PRId64 ")",
              r->name, rows, columns, want_rows, want_columns);
        blocks += strcmp(part, "ln_1.weight") == 0;
        own_head |= strcmp(part, "lm_head.weight") == 0 && r->tied_to < 0;
    }
    CHECK(blocks == m->n_layer, "%" PRId64 " blocks, n_layer is %" PRId64, blocks, m->n_layer);
    CHECK(own_head == !m->tie_word_embeddings, "tie_word_embeddings is %d", m->tie_word_embeddings);
}

// Begin and end of text: those of the source folder where they are tokens, GPT-2's own for its vocabulary, else none (-1).
static void hf_export_ids(const ModelConfig *m, int64_t *bos, int64_t *eos) {
    char shown[512];
    struct stat st;
    *bos = *eos = m->vocab_size >= 50257 && m->vocab_size <= vocab_padded(50257, 1) ? 50256 : -1;
    int folder = m->init_from[0] ? open(m->init_from, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (folder < 0) return;
    if (fstatat(folder, HF_CONFIG, &st, AT_SYMLINK_NOFOLLOW) == 0) {
        HfConfig c = {{0}, NULL};
        hf_json_read(&c.json, folder, hf_shown(shown, m->init_from), HF_CONFIG);
        *bos = hf_config_token(&c, "bos_token_id", m->vocab_size);
        *eos = hf_config_token(&c, "eos_token_id", m->vocab_size);
        json_free(&c.json);
    }
    close(folder);
}

// config.json for transformers 4 and 5 and for converters that read n_ctx, and generation_config.json.
static void hf_export_config(HfExport *e, const ModelConfig *m, DType dtype, int64_t bos, int64_t eos) {
    static const char *const type_names[] = {"float32", "bfloat16", "float16"}; // by DType
    const char *type = type_names[dtype];
    char text[2048], inner[32] = "null", bos_text[32] = "null", eos_text[32] = "null", epsilon[32];
    if (m->n_inner != 4 * m->n_embd) snprintf(inner, sizeof inner, "%" PRId64, m->n_inner);
    if (bos >= 0) snprintf(bos_text, sizeof bos_text, "%" PRId64, bos);
    if (eos >= 0) snprintf(eos_text, sizeof eos_text, "%" PRId64, eos);
    config_format_double(epsilon, sizeof epsilon, m->layer_norm_epsilon);
    int n = snprintf(text, sizeof text,
                     "{\n  \"activation_function\": \"gelu_new\",\n  \"add_cross_attention\": false,\n  \"architectures\": [\"GPT2LMHeadModel\"],\n"
                     "  \"attn_pdrop\": 0.0,\n  \"bos_token_id\": %s,\n  \"dtype\": \"%s\",\n  \"embd_pdrop\": 0.0,\n  \"eos_token_id\": %s,\n"
                     "  \"initializer_range\": 0.02,\n  \"layer_norm_epsilon\": %s,\n  \"model_type\": \"gpt2\",\n  \"n_ctx\": %" PRId64 ",\n"
                     "  \"n_embd\": %" PRId64 ",\n  \"n_head\": %" PRId64 ",\n  \"n_inner\": %s,\n  \"n_layer\": %" PRId64 ",\n  \"n_positions\": %" PRId64 ",\n"
                     "  \"reorder_and_upcast_attn\": false,\n  \"resid_pdrop\": 0.0,\n  \"scale_attn_by_inverse_layer_idx\": false,\n"
                     "  \"scale_attn_weights\": true,\n  \"tie_word_embeddings\": %s,\n  \"torch_dtype\": \"%s\",\n  \"use_cache\": true,\n  \"vocab_size\": %" PRId64 "\n}\n",
                     bos_text, type, eos_text, epsilon, m->n_positions, m->n_embd, m->n_head, inner, m->n_layer, m->n_positions,
                     m->tie_word_embeddings ? "true" : "false", type, m->vocab_size);
    CHECK(n > 0 && (size_t)n < sizeof text, "config.json of %d bytes", n);
    hf_export_text(e, HF_CONFIG, text, n);
    n = snprintf(text, sizeof text, "{\n  \"_from_model_config\": true,\n  \"bos_token_id\": %s,\n  \"eos_token_id\": %s\n}\n", bos_text,
        eos_text);
    hf_export_text(e, "generation_config.json", text, n);
}

// Copies the tokenizer of the folder that the model came from. What cannot be copied is said, and is no failure: the
// weights are what took the time.
static void hf_export_tokenizer(HfExport *e, const char *init_from) {
    char why[256];
    int copied = 0;
    int source = init_from[0] ? open(init_from, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    for (size_t i = 0; source >= 0 && i < sizeof hf_tokenizer_files / sizeof *hf_tokenizer_files; i++) {
        const char *name = hf_tokenizer_files[i];
        int64_t bytes = 0;
        int fd = file_open_at(source, name, false, &bytes, why, sizeof why);
        if (fd < 0) {
            struct stat st;
            if (fstatat(source, name, &st, AT_SYMLINK_NOFOLLOW) == 0) note("export to %s: %s is not copied: %s", e->shown, name, why);
            continue;
        }
        char *text = bytes <= HF_TOKENIZER_BYTES_MAX ? (char *)host_alloc((size_t)bytes) : NULL;
        if (text && file_read_at(fd, text, bytes, 0)) {
            hf_export_text(e, name, text, bytes);
            copied++;
        } else {
            const char *reason = !text ? "it is too large" : errno ? strerror(errno) : "it became shorter while it was read";
            note("export to %s: %s is not copied: %s", e->shown, name, reason);
        }
        free(text);
        close(fd);
    }
    if (source >= 0) close(source);
    if (copied == 0) note("export to %s: no tokenizer beside the weights; copy tokenizer.json there to use the model with text", e->shown);
}

// Appends one row to the file being written: rounded to dtype as masters are rounded into weights, and turned where Hugging
// Face wants it. block is as hf_buffers says, of dtype.
static void hf_export_row(HfExport *e, SafeWriter *w, const ParamDesc *r, DType dtype, const float *values, void *block) {
    int64_t OC = r->shape[0], C = r->shape[1];
    int64_t width = r->hf_transposed ? OC : C, height = r->hf_transposed ? C : OC; // of the tensor in the file
    int64_t step = max_i64(1, HF_BLOCK_NUMEL / width);
    for (int64_t top = 0; top < height; top += step) {
        int64_t n = min_i64(step, height - top);
        for (int64_t i = 0; i < n; i++) {
            for (int64_t k = 0; k < width; k++) {
                float x = values[r->hf_transposed ? k * C + top + i : (top + i) * C + k];
                if (dtype == DTYPE_BF16) ((uint16_t *)block)[i * width + k] = master_to_bf16(x);
                else dtype_store(block, dtype, i * width + k, x);
                if (!isfinite(dtype_load(block, dtype, i * width + k)))
                    hf_export_fail(e, EXIT_NUMERICS, "%s has %g at [%" PRId64 ", %" PRId64 "], which %s cannot hold%s", r->name, (double)x,
                        top + i, k, dtype_name(dtype), isfinite(x) ? "; export as bf16 or fp32" : "");
            }
        }
        if (!safetensors_append(w, block, n * width * dtype_bytes(dtype))) hf_export_io(e);
    }
}

// Which file each row goes to: a new one where the last would pass shard_bytes. Returns the number of files.
static int hf_export_plan(const ParamTable *table, DType dtype, int64_t shard_bytes, int *shard_of, int64_t *total_bytes) {
    int n = 0;
    int64_t used = 0;
    *total_bytes = 0;
    for (int i = 0; i < table->n_rows; i++) {
        shard_of[i] = -1;
        if (table->row[i].tied_to >= 0) continue;
        int64_t bytes = param_numel(&table->row[i]) * dtype_bytes(dtype);
        if (n == 0 || used + bytes > shard_bytes) { n++; used = 0; }
        used += bytes;
        *total_bytes += bytes;
        shard_of[i] = n - 1;
    }
    return n;
}

static void hf_shard_name(char name[64], int shard, int n_shards) {
    if (n_shards == 1) snprintf(name, 64, HF_WEIGHTS);
    else snprintf(name, 64, "model-%05d-of-%05d.safetensors", shard + 1, n_shards);
}

// Name of a row in the file: everything but the head belongs to the module "transformer".
static void hf_row_name(char name[96], const ParamDesc *r) {
    snprintf(name, 96, "%s%s", strncmp(r->name, "lm_head.", 8) == 0 ? "" : "transformer.", r->name);
}

static void hf_export_index(HfExport *e, const ParamTable *table, const int *shard_of, int n_shards, int64_t total_bytes) {
    size_t room = 256 + (size_t)table->n_rows * 192, used;
    char *text = (char *)host_alloc(room), name[96], file[64];
    used = (size_t)snprintf(text, room, "{\n  \"metadata\": {\"total_size\": %" PRId64 "},\n  \"weight_map\": {", total_bytes);
    const char *separator = "\n";
    for (int i = 0; i < table->n_rows; i++) {
        if (shard_of[i] < 0) continue;
        hf_row_name(name, &table->row[i]);
        hf_shard_name(file, shard_of[i], n_shards);
        used += (size_t)snprintf(text + used, room - used, "%s    \"%s\": \"%s\"", separator, name, file);
        separator = ",\n";
    }
    used += (size_t)snprintf(text + used, room - used, "\n  }\n}\n");
    CHECK(used < room, "index of %zu bytes", used);
    hf_export_text(e, HF_INDEX, text, (int64_t)used);
    free(text);
}

// Writes one file of weights.
static void hf_export_shard(HfExport *e, const ParamTable *table, const int *shard_of, int shard, int n_shards, DType dtype,
                            void (*get)(void *, int, float *), void *ctx, float *values, void *block) {
    char file[64];
    int n = 0;
    SafeTensor *tensor = (SafeTensor *)host_alloc((size_t)table->n_rows * sizeof *tensor);
    char(*name)[96] = (char(*)[96])host_alloc((size_t)table->n_rows * sizeof *name);
    for (int i = 0; i < table->n_rows; i++) {
        const ParamDesc *r = &table->row[i];
        if (shard_of[i] != shard) continue;
        hf_row_name(name[n], r);
        tensor[n].name = name[n];
        tensor[n].type = (int)dtype;
        tensor[n].ndim = r->ndim;
        hf_row_shape(r, r->hf_transposed, tensor[n++].shape);
    }
    static const SafeMetadata metadata[] = {{"format", "pt"}}; // some releases of transformers insist on it
    SafeWriter w;
    hf_shard_name(file, shard, n_shards);
    if (!safetensors_create(&w, e->io, &e->folder, file, tensor, n, metadata, 1)) hf_export_io(e);
    for (int i = 0; i < table->n_rows; i++) {
        if (shard_of[i] != shard) continue;
        get(ctx, i, values);
        hf_export_row(e, &w, &table->row[i], dtype, values, block);
    }
    if (!safetensors_finish(&w)) hf_export_io(e);
    free(tensor);
    free(name);
}

// hf_export with the size above which files are split, and with the seam of durable.h.
static void hf_export_with(Io *io, const char *dir, const ModelConfig *m, const ParamTable *table, DType dtype, int64_t shard_bytes,
                           void (*get)(void *ctx, int row, float *values), void *ctx) {
    HfExport e;
    int64_t bos, eos, total_bytes, most, block_most;
    hf_check_table(m, table);
    hf_export_ids(m, &bos, &eos);
    hf_buffers(table, &most, &block_most);
    int *shard_of = (int *)host_alloc((size_t)table->n_rows * sizeof *shard_of);
    int n_shards = hf_export_plan(table, dtype, shard_bytes, shard_of, &total_bytes);
    float *values = (float *)host_alloc((size_t)most * sizeof(float));
    void *block = host_alloc((size_t)(block_most * dtype_bytes(dtype)));
    hf_export_begin(&e, io, dir);
    hf_export_make(&e, total_bytes);
    for (int shard = 0; shard < n_shards; shard++) hf_export_shard(&e, table, shard_of, shard, n_shards, dtype, get, ctx, values, block);
    if (n_shards > 1) hf_export_index(&e, table, shard_of, n_shards, total_bytes);
    hf_export_config(&e, m, dtype, bos, eos);
    hf_export_tokenizer(&e, m->init_from);
    hf_export_publish(&e);
    free(values);
    free(block);
    free(shard_of);
}

// Writes a folder `dir` that transformers loads: config.json, generation_config.json, weights of type dtype, and the tokenizer
// of m->init_from. get(ctx, row, values) fills values with row's (shape[0], shape[1]) in fp32; it is called once for each
// stored row, in the order of the table. Dies with EXIT_CONFIG, EXIT_CANTCREAT or EXIT_IO, with EXIT_NUMERICS for weights that
// the type cannot hold.
static void hf_export(const char *dir, const ModelConfig *m, const ParamTable *table, DType dtype,
                      void (*get)(void *ctx, int row, float *values), void *ctx) {
    Io io;
    memset(&io, 0, sizeof io);
    hf_export_with(&io, dir, m, table, dtype, HF_SHARD_BYTES, get, ctx);
}
