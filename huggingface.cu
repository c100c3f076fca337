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

#include "huggingface_import.cu"

#include "huggingface_export.cu"
