// test_formats.h - files of other programs: safetensors, Hugging Face folders, llm.c models; good ones, and hostile ones.
//
// Oracles: the golden model's raw bytes, indexed by hand; files that the tests write themselves, byte by byte; rounding
// done with rint() on scaled doubles; and, where Python has it, the safetensors library itself.
#pragma once
#include "test_safetensors.h"
#include <signal.h>
#include <sys/resource.h>

// ---------------------------------------------------------------------------------------------------------------
// A model in memory, for import and export

typedef struct {
    ModelConfig m;
    ParamTable table;
    float **row;          // one array a row; null for tied rows
    int calls;
} FormatsModel;

static ModelConfig formats_config(int64_t L, int64_t NH, int64_t C, int64_t T, int64_t V, int64_t F, bool tied) {
    ModelConfig m;
    memset(&m, 0, sizeof m);
    m.n_layer = L;
    m.n_head = NH;
    m.n_embd = C;
    m.n_positions = T;
    m.vocab_size = V;
    m.n_inner = F;
    m.layer_norm_epsilon = 1e-5;
    m.tie_word_embeddings = tied;
    return m;
}

// Values are a function of (name, index); purpose 0 leaves zeros.
static FormatsModel *formats_model(ModelConfig m, uint64_t purpose) {
    FormatsModel *f = (FormatsModel *)host_alloc(sizeof *f);
    f->m = m;
    model_build_table(&f->table, &m, model_whole);
    f->row = (float **)host_alloc((size_t)f->table.n_rows * sizeof *f->row);
    for (int i = 0; i < f->table.n_rows; i++) {
        const ParamDesc *r = &f->table.row[i];
        if (r->tied_to >= 0) continue;
        f->row[i] = (float *)host_alloc((size_t)param_numel(r) * sizeof(float));
        for (int64_t k = 0; purpose && k < param_numel(r); k++) f->row[i][k] = (float)rng_normal(purpose, text_hash(r->name), (uint64_t)k);
    }
    return f;
}

static void formats_model_free(FormatsModel *f) {
    for (int i = 0; i < f->table.n_rows; i++) free(f->row[i]);
    free(f->row);
    table_free(&f->table);
    free(f);
}

static void formats_get(void *ctx, int row, float *values) {
    FormatsModel *f = (FormatsModel *)ctx;
    CHECK(f->row[row], "row %d is tied", row);
    memcpy(values, f->row[row], (size_t)param_numel(&f->table.row[row]) * sizeof(float));
    f->calls++;
}

static void formats_put(void *ctx, int row, const float *values) {
    FormatsModel *f = (FormatsModel *)ctx;
    CHECK(f->row[row], "row %d is tied", row);
    memcpy(f->row[row], values, (size_t)param_numel(&f->table.row[row]) * sizeof(float));
    f->calls++;
}

static void expect_same_model(Test *t, const FormatsModel *got, const FormatsModel *want) {
    for (int i = 0; i < want->table.n_rows; i++)
        if (want->row[i]) expect_same_bytes(t, want->table.row[i].name, got->row[i], want->row[i], param_numel(&want->table.row[i]) * 4);
}

static int formats_stored_rows(const FormatsModel *f) {
    int n = 0;
    for (int i = 0; i < f->table.n_rows; i++) n += f->row[i] != NULL;
    return n;
}

// Writes the weights as Hugging Face does, with code of the tests' own: rows [first, last) into one file. Flags pick what is
// unusual about it.
enum { HF_NO_PREFIX = 1, HF_WITH_MASKS = 2, HF_WITH_HEAD = 4, HF_HEAD_DIFFERS = 8, HF_DOUBLE = 16, HF_BF16 = 32 };

static void formats_write_hf(const FormatsModel *f, const char *path, int first, int last, int flags) {
    int type = flags & HF_DOUBLE ? SAFE_F64 : flags & HF_BF16 ? SAFE_BF16 : SAFE_F32, width = safetensors_types[type].bytes;
    size_t room = 4096 + (size_t)f->table.n_rows * 256, o = 0;
    int64_t at = 0, data_room = 64;
    for (int i = 0; i < f->table.n_rows; i++) data_room += param_numel(&f->table.row[i]) * 8;
    char *json = (char *)host_alloc(room), *data = (char *)host_alloc((size_t)data_room + 4096);
    o += (size_t)snprintf(json, room, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (int i = first; i < last; i++) {
        const ParamDesc *r = &f->table.row[i];
        bool head = strcmp(r->name, "lm_head.weight") == 0;
        if (!f->row[i] && !(flags & (HF_WITH_HEAD | HF_HEAD_DIFFERS))) continue;
        const float *x = f->row[i] ? f->row[i] : f->row[r->tied_to];
        int64_t OC = r->shape[0], C = r->shape[1];
        char shape[64];
        if (r->ndim == 1) snprintf(shape, sizeof shape, "%" PRId64, OC);
        else snprintf(shape, sizeof shape, "%" PRId64 ",%" PRId64, r->hf_transposed ? C : OC, r->hf_transposed ? OC : C);
        o += (size_t)snprintf(json + o, room - o, ",\"%s%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}",
            head || (flags & HF_NO_PREFIX) ? "" : "transformer.", r->name, safetensors_types[type].name, shape, at, at + OC * C * width);
        for (int64_t k = 0; k < OC * C; k++) {
            float v = r->hf_transposed ? x[k % OC * C + k / OC] : x[k];
            if (head && (flags & HF_HEAD_DIFFERS) && k == OC * C - 1) v += 1;
            double wide = v;
            uint16_t half = float_to_bf16(v);
            memcpy(data + at + k * width, type == SAFE_F64 ? (void *)&wide : type == SAFE_BF16 ? (void *)&half : (void *)&v, (size_t)width);
        }
        at += OC * C * width;
    }
    if (flags & HF_WITH_MASKS) {
        int64_t T = f->m.n_positions;
        for (int l = 0; l < f->m.n_layer; l++, at += 4) {
            o += (size_t)snprintf(json + o, room - o,
                ",\"h.%d.attn.bias\":{\"dtype\":\"U8\",\"shape\":[1,1,%" PRId64 ",%" PRId64 "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}",
                l, T, T, at, at + T * T);
            at += T * T;
            o += (size_t)snprintf(json + o, room - o,
                ",\"h.%d.attn.masked_bias\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", l, at, at + 4);
            CHECK(at + 4 < data_room + 4096, "no room for masks");
        }
    }
    json[o++] = '}';
    uint64_t n = o;
    char *all = (char *)host_alloc(8 + o + (size_t)at);
    memcpy(all, &n, 8);
    memcpy(all + 8, json, o);
    memcpy(all + 8 + o, data, (size_t)at);
    formats_write(path, all, (int64_t)o + 8 + at);
    free(json);
    free(data);
    free(all);
}

static void formats_write_config(const FormatsFolder *f, const ModelConfig *m, const char *more) {
    char text[2048];
    snprintf(text, sizeof text, "{\"model_type\":\"gpt2\",\"n_layer\":%" PRId64 ",\"n_head\":%" PRId64 ",\"n_embd\":%" PRId64 ",\"n_positions\":%" PRId64 ",\"vocab_size\":%" PRId64 ",\"n_inner\":%" PRId64 ",\"tie_word_embeddings\":%s%s}",
             m->n_layer, m->n_head, m->n_embd, m->n_positions, m->vocab_size, m->n_inner, m->tie_word_embeddings ? "true" : "false", more);
    formats_write_text(f, "config.json", text);
}

typedef struct {
    const char *path;
    FormatsModel *model;
    DType dtype;
    int64_t shard_bytes;
} FormatsCase;

static void case_import(void *arg) {
    FormatsCase *c = (FormatsCase *)arg;
    hf_import(c->path, &c->model->m, &c->model->table, formats_put, c->model);
}
static void case_export(void *arg) {
    FormatsCase *c = (FormatsCase *)arg;
    hf_export(c->path, &c->model->m, &c->model->table, c->dtype, formats_get, c->model);
}
static void case_config(void *arg) {
    FormatsCase *c = (FormatsCase *)arg;
    hf_config_read(c->path, &c->model->m);
}

// ---------------------------------------------------------------------------------------------------------------
// Import

// Folders that transformers wrote, and their sizes.
static const struct {
    const char *folder;
    int64_t L, NH, C, T, V;
} formats_golden[] = {{"data/golden/gpt2-tiny", 3, 4, 64, 64, 256}, {"data/golden/gpt2-odd", 2, 5, 40, 40, 211}};

static void import_golden(Test *t, int which) {
    const char *folder = formats_golden[which].folder;
    ModelConfig sizes = formats_config(formats_golden[which].L, formats_golden[which].NH, formats_golden[which].C, formats_golden[which].T,
                                       formats_golden[which].V, 4 * formats_golden[which].C, true), m;
    memset(&m, 0, sizeof m);
    hf_config_read(folder, &m);
    expect_true(t, memcmp(&m, &sizes, sizeof m) == 0, "%s: the configuration differs", folder);
    FormatsModel *model = formats_model(m, 0);
    hf_import(folder, &m, &model->table, formats_put, model);
    expect_equal_i64(t, "tensors handed over", model->calls, formats_stored_rows(model));
    int64_t bytes;
    char path[600], why[256], name[128];
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    char *file = formats_read(path, &bytes);
    SafeTensors st;
    CHECK(safetensors_open(&st, path, why, sizeof why), "%s", why);
    for (int i = 0; i < model->table.n_rows; i++) {
        const ParamDesc *r = &model->table.row[i];
        if (!model->row[i]) continue;
        snprintf(name, sizeof name, "transformer.%s", r->name);
        const SafeTensor *s = safetensors_find(&st, name);
        CHECK(s, "%s", name);
        int64_t OC = r->shape[0], C = r->shape[1], differ = 0;
        for (int64_t o = 0; o < OC; o++)
            for (int64_t c = 0; c < C; c++) {
                float want;
                memcpy(&want, file + s->begin + 4 * (r->hf_transposed ? c * OC + o : o * C + c), 4);
                differ += memcmp(&want, &model->row[i][o * C + c], 4) != 0;
            }
        t->compared += OC * C;
        if (differ) test_fail(t, "%s: %" PRId64 " of %" PRId64 " values differ", r->name, differ, OC * C);
    }
    safetensors_close(&st);
    free(file);
    formats_model_free(model);
}

static void test_import_golden(Test *t) {
    for (int i = 0; i < 2; i++) import_golden(t, i);
}

// Forms of a folder that all mean the same model.
static void test_import_forms(Test *t) {
    static const struct { int flags; bool tied; } forms[] = {
        {0, true}, {HF_NO_PREFIX, true}, {HF_NO_PREFIX | HF_WITH_MASKS, true}, {HF_WITH_MASKS, true}, {HF_WITH_HEAD, true}, {0, false},
        {HF_NO_PREFIX, false}, {HF_DOUBLE, true}, {HF_DOUBLE | HF_WITH_HEAD, true},
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        FormatsFolder f = formats_folder();
        char path[600];
        FormatsModel *want = formats_model(formats_config(2, 3, 24, 40, 211, 100, forms[i].tied), 3), *got = formats_model(want->m, 0);
        formats_write_hf(want, formats_path(path, &f, "model.safetensors"), 0, want->table.n_rows, forms[i].flags);
        formats_write_config(&f, &want->m, "");
        ModelConfig read;
        memset(&read, 0, sizeof read);
        hf_config_read(f.path, &read);
        expect_true(t, memcmp(&read, &want->m, sizeof read) == 0, "form %zu: the configuration differs", i);
        hf_import(f.path, &read, &got->table, formats_put, got);
        expect_same_model(t, got, want);
        formats_model_free(want);
        formats_model_free(got);
        formats_remove(&f);
    }
}

// Splits rows over three files with names that say nothing, and an index.
static void formats_write_shards(const FormatsFolder *f, const FormatsModel *m, const char *const *names, int n_shards) {
    char path[600], *index = (char *)host_alloc(65536);
    size_t o = (size_t)snprintf(index, 65536, "{\"metadata\":{\"total_size\":1},\"weight_map\":{");
    int per = (m->table.n_rows + n_shards - 1) / n_shards;
    for (int s = 0; s < n_shards; s++) {
        int first = s * per, last = (int)min_i64(first + per, m->table.n_rows);
        formats_write_hf(m, formats_path(path, f, names[s]), first, last, 0);
        for (int i = first; i < last; i++)
            if (m->row[i])
                o += (size_t)snprintf(index + o, 65536 - o, "%s\"%s%s\":\"%s\"", i ? "," : "",
                                      strncmp(m->table.row[i].name, "lm_head", 7) == 0 ? "" : "transformer.", m->table.row[i].name, names[s]);
    }
    snprintf(index + o, 65536 - o, "}}");
    formats_write_text(f, HF_INDEX, index);
    free(index);
}

static void test_import_shards(Test *t) {
    FormatsFolder f = formats_folder();
    static const char *const names[] = {"zz.safetensors", "model-00009-of-00002.safetensors", "aa"};
    FormatsModel *want = formats_model(formats_config(2, 3, 24, 40, 211, 96, false), 3), *got = formats_model(want->m, 0);
    FormatsCase c = {f.path, got, DTYPE_FP32, 0};
    formats_write_shards(&f, want, names, 3);
    formats_write_config(&f, &want->m, "");
    hf_import(f.path, &want->m, &got->table, formats_put, got);
    expect_same_model(t, got, want);
    // the index is at odds with the files
    char path[600];
    formats_write_hf(want, formats_path(path, &f, names[2]), 19, want->table.n_rows, 0);
    expect_dies(t, EXIT_DATA, "aa holds transformer.h.1.attn.c_proj.bias", case_import, &c);
    expect_dies(t, EXIT_DATA, "which the index places elsewhere", case_import, &c);
    formats_write_hf(want, path, 20, want->table.n_rows, HF_WITH_MASKS);
    expect_dies(t, EXIT_DATA, "aa holds h.0.attn.bias, which the index does not list", case_import, &c);
    formats_write_hf(want, path, want->table.n_rows - 2, want->table.n_rows, 0);
    expect_dies(t, EXIT_DATA, "in aa, which lacks it", case_import, &c);
    CHECK(unlink(path) == 0, "%s", strerror(errno));
    expect_dies(t, EXIT_DATA, "/aa: No such file", case_import, &c);
    formats_write_hf(want, formats_path(path, &f, HF_WEIGHTS), 0, want->table.n_rows, 0);
    hf_import(f.path, &want->m, &got->table, formats_put, got); // the single file wins
    expect_same_model(t, got, want);
    formats_model_free(want);
    formats_model_free(got);
    formats_remove(&f);
}

// An index may name plain files beside it, and nothing else.
static void test_index_faults(Test *t) {
    FormatsFolder f = formats_folder(), outside = formats_folder();
    char path[600], target[600], text[2000];
    FormatsModel *m = formats_model(formats_config(1, 1, 8, 8, 16, 32, true), 3);
    FormatsCase c = {f.path, m, DTYPE_FP32, 0};
    formats_write_hf(m, formats_path(target, &outside, "x.safetensors"), 0, m->table.n_rows, 0);
    const char *base = strrchr(outside.path, '/') + 1;
    char up[400];
    snprintf(up, sizeof up, "../%s/x.safetensors", base);
    CHECK(symlink(target, formats_path(path, &f, "link.safetensors")) == 0, "%s", strerror(errno));
    CHECK(symlink(outside.path, formats_path(path, &f, "linked")) == 0, "%s", strerror(errno));
    CHECK(mkfifo(formats_path(path, &f, "fifo.safetensors"), 0600) == 0, "%s", strerror(errno));
    CHECK(mkdir(formats_path(path, &f, "sub.safetensors"), 0700) == 0, "%s", strerror(errno));
    const struct { const char *file, *part; } rows[] = {
        {up, "only plain names"}, {target, "only plain names"}, {"linked/x.safetensors", "only plain names"}, {"..", "only plain names"},
        {".", "only plain names"}, {"", "only plain names"}, {".hidden", "only plain names"},
        {"a\\u0000b", "only plain names"}, {"link.safetensors", "symbolic link"}, {"fifo.safetensors", "not a regular file"},
        {"sub.safetensors", "not a regular file"}, {"missing", "No such file"}, {"\\u001b[2J", "\\x1b[2J: No such file"},
        {HF_INDEX, "safetensors file"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(text, sizeof text, "{\"weight_map\":{\"transformer.wte.weight\":\"%s\"}}", rows[i].file);
        formats_write_text(&f, HF_INDEX, text);
        expect_dies(t, EXIT_DATA, rows[i].part, case_import, &c);
    }
    static const struct { const char *json, *part; } forms[] = {
        {"{}", "no object weight_map"}, {"{\"weight_map\":[]}", "no object weight_map"}, {"{\"weight_map\":null}", "no object weight_map"},
        {"[]", "is a list, not an object"}, {"", "there is nothing in it"},
        {"{\"weight_map\":{\"a\":3}}", "only plain names"},
        {"{\"weight_map\":{\"a\":\"x\",\"a\":\"x\"}}", ":1: the key \"a\" occurs twice"},
        {"{\"weight_map\":{\"a\":\"x\",\n\"\\u0061\":\"y\"}}", ":2: the key \"a\" occurs twice"},
        {"{\"weight_map\":{}}", "missing wte.weight"}, {"{\"weight_map\":{\"a\":\"x\",}}", "expected a key"},
        {"{\"weight_map\":{'a':'x'}}", "expected a key"}, {"{\"weight_map\":{\"a\\u0000\":\"x\"}}", "zero byte"},
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        formats_write_text(&f, HF_INDEX, forms[i].json);
        expect_dies(t, EXIT_DATA, forms[i].part, case_import, &c);
    }
    // a million entries do not fit below it
    CHECK(truncate(formats_path(path, &f, HF_INDEX), HF_JSON_BYTES_MAX + 1) == 0, "%s", strerror(errno));
    expect_dies(t, EXIT_DATA, "more than the limit", case_import, &c);
    char *many = (char *)host_alloc(HF_SHARDS_MAX * 32 + 100);
    size_t o = (size_t)snprintf(many, 100, "{\"weight_map\":{\"a\":\"b\"");
    for (int i = 0; i < HF_SHARDS_MAX; i++) o += (size_t)snprintf(many + o, 32, ",\"%d\":\"f%d\"", i, i);
    snprintf(many + o, 3, "}}");
    formats_write_text(&f, HF_INDEX, many);
    free(many);
    expect_dies(t, EXIT_DATA, "names more than 512 files", case_import, &c);
    unlink(path);
    expect_dies(t, EXIT_DATA, "has neither model.safetensors nor", case_import, &c);
    CHECK(symlink(target, formats_path(path, &f, HF_WEIGHTS)) == 0, "%s", strerror(errno));
    expect_dies(t, EXIT_DATA, "model.safetensors: is a symbolic link", case_import, &c);
    unlink(path);
    formats_write_text(&f, "pytorch_model.bin", "PK");
    expect_dies(t, EXIT_DATA, "a pickle, which can run code and is never read", case_import, &c);
    expect_equal_i64(t, "tensors handed over by refused models", m->calls, 0);
    formats_model_free(m);
    formats_remove(&f);
    formats_remove(&outside);
}

// Weights of another model: everything that differs, in one line.
static void test_import_mismatches(Test *t) {
    FormatsFolder f = formats_folder();
    char path[600];
    formats_path(path, &f, "model.safetensors");
    FormatsModel *have = formats_model(formats_config(2, 2, 16, 20, 50, 64, true), 3);
    formats_write_hf(have, path, 0, have->table.n_rows, 0);
    FormatsModel *other = formats_model(formats_config(3, 2, 16, 24, 51, 64, true), 0);
    FormatsCase c = {f.path, other, DTYPE_FP32, 0};
    static const char *const parts[] = {"transformer.wte.weight is [50, 16], must be [51, 16]",
        "transformer.wpe.weight is [20, 16], must be [24, 16]", "missing h.2.ln_1.weight", "missing h.2.mlp.c_proj.bias"};
    expect_dies_parts(t, EXIT_DATA, parts, 4, case_import, &c);
    FormatsModel *small = formats_model(formats_config(1, 2, 16, 20, 50, 80, true), 0);
    c.model = small;
    static const char *const few[] = {"h.0.mlp.c_fc.weight is [16, 64], must be [16, 80]", "h.0.mlp.c_fc.bias is [64], must be [80]",
        "h.0.mlp.c_proj.weight is [64, 16], must be [80, 16]", "unexpected transformer.h.1.ln_1.weight"};
    expect_dies_parts(t, EXIT_DATA, few, 4, case_import, &c);
    FormatsModel *wide = formats_model(formats_config(30, 2, 32, 20, 50, 128, true), 0);
    c.model = wide;
    static const char *const many[] = {"transformer.wte.weight is [50, 16], must be [50, 32]", "more"};
    expect_dies_parts(t, EXIT_DATA, many, 2, case_import, &c);
    FormatsModel *untied = formats_model(formats_config(2, 2, 16, 20, 50, 64, false), 0);
    c.model = untied;
    expect_dies(t, EXIT_DATA, "model: missing lm_head.weight", case_import, &c);
    c.model = have;
    formats_write_hf(have, path, 0, have->table.n_rows, HF_HEAD_DIFFERS);
    expect_dies(t, EXIT_DATA, "differ, at element 799 by 1", case_import, &c);
    static const struct { const char *json; int64_t bytes; const char *part; } rows[] = {
        {"{\"transformer.wte.weight\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"wte.weight\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8, "is there twice, with and without"},
        {"{\"transformer.transformer.wte.weight\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
            "unexpected transformer.transformer.wte.weight"},
        {"{\"wte.weight\":{\"dtype\":\"I32\",\"shape\":[50,16],\"data_offsets\":[0,3200]}}", 3200,
            "wte.weight has type I32; weights are read from"},
        {"{\"h.0.ln_1.weight\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, "h.0.ln_1.weight is [], must be [16]"},
        {"{\"h.0.ln_1.weight\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0, "h.0.ln_1.weight is [0], must be [16]"},
        {"{\"h.0.ln_1.weight\":{\"dtype\":\"F32\",\"shape\":[1,16],\"data_offsets\":[0,64]}}", 64,
            "h.0.ln_1.weight is [1, 16], must be [16]"},
        {"{\"h.00.ln_1.weight\":{\"dtype\":\"F32\",\"shape\":[16],\"data_offsets\":[0,64]}}", 64, "unexpected h.00.ln_1.weight"},
        {"{\"h..attn.bias\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, "unexpected h..attn.bias"},
        {"{\"../\\u001b]0;x\\u0007\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, "unexpected ../\\x1b]0;x\\x07"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        formats_write_json(path, rows[i].json, rows[i].bytes);
        expect_dies(t, EXIT_DATA, rows[i].part, case_import, &c);
    }
    formats_write_text(&f, "model.safetensors", "\x80\x02}q\x01.PICKLE");
    expect_dies(t, EXIT_DATA, "/model.safetensors: says that its header has", case_import, &c);
    formats_model_free(have);
    formats_model_free(other);
    formats_model_free(small);
    formats_model_free(wide);
    formats_model_free(untied);
    formats_remove(&f);
}

static void test_import_not_finite(Test *t) {
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    static const char *const words[] = {"has NaN at", "has an infinity at", "has an infinity at"};
    FormatsFolder f = formats_folder();
    char path[600];
    FormatsModel *m = formats_model(formats_config(1, 2, 16, 20, 50, 64, true), 3), *got = formats_model(m->m, 0);
    FormatsCase c = {f.path, got, DTYPE_FP32, 0};
    static const char *const names[] = {"wte.weight", "h.0.attn.c_attn.weight", "h.0.mlp.c_proj.bias", "ln_f.bias"};
    for (int k = 0; k < 3; k++) {
        for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
            int row = 0;
            while (strcmp(m->table.row[row].name, names[n]) != 0) row++;
            const ParamDesc *r = &m->table.row[row];
            int64_t at = param_numel(r) - 1 - (r->ndim == 2 ? r->shape[1] : 0);
            float old = m->row[row][at];
            m->row[row][at] = bad[k];
            formats_write_hf(m, formats_path(path, &f, "model.safetensors"), 0, m->table.n_rows, k == 1 ? HF_BF16 : k == 2 ? HF_DOUBLE : 0);
            m->row[row][at] = old;
            int64_t y = at / r->shape[1], x = at % r->shape[1];
            char part[128];
            snprintf(part, sizeof part, "\"transformer.%s\" %s [%" PRId64 ", %" PRId64 "]", names[n], words[k], r->hf_transposed ? x : y,
                r->hf_transposed ? y : x);
            expect_dies(t, EXIT_DATA, part, case_import, &c);
        }
    }
    formats_model_free(m);
    formats_model_free(got);
    formats_remove(&f);
}

// ---------------------------------------------------------------------------------------------------------------
// config.json

static void test_config_faults(Test *t) {
    static const char good[] = "\"n_layer\":2,\"n_head\":2,\"n_embd\":16,\"n_positions\":20,\"vocab_size\":50";
    static const struct { const char *json, *part; } rows[] = {
        {"{\"model_type\":\"llama\",%s}", "model_type is \"llama\"; only \"gpt2\" is built"}, {"{%s}", "model_type is \"\""},
        {"{\"model_type\":3,%s}", "model_type is \"\""},
        {"{\"model_type\":\"\\u001b[1m\",%s}", "model_type is \"\\x1b[1m\""},
        {"{\"model_type\":\"gpt2\"}", "n_layer is missing; n_head is missing; n_embd is missing; n_positions is missing; vocab_size is missing"},
        {"{\"model_type\":\"gpt2\",%s,\"activation_function\":\"gelu\"}", "activation_function = \"gelu\" is not built; gelu_new"},
        {"{\"model_type\":\"gpt2\",%s,\"activation_function\":\"relu\"}", "\"relu\" is not built"},
        {"{\"model_type\":\"gpt2\",%s,\"activation_function\":7}", "activation_function = 7: must be a text"},
        {"{\"model_type\":\"gpt2\\u0000\",%s}", "model_type is \"\""},
        {"{\"model_type\":\"gpt2\",%s,\"activation_function\":\"gelu_new\\u0000x\"}", "\"gelu_new\\x00x\": must be a text"},
        {"{\"model_type\":\"gpt2\",%s,\"scale_attn_weights\":false}", "scale_attn_weights = false is not built"},
        {"{\"model_type\":\"gpt2\",%s,\"scale_attn_by_inverse_layer_idx\":true}", "scale_attn_by_inverse_layer_idx = true is not built"},
        {"{\"model_type\":\"gpt2\",%s,\"reorder_and_upcast_attn\":true}", "reorder_and_upcast_attn = true is not built"},
        {"{\"model_type\":\"gpt2\",%s,\"add_cross_attention\":true}", "add_cross_attention = true is not built"},
        {"{\"model_type\":\"gpt2\",%s,\"reorder_and_upcast_attn\":\"yes\"}", "reorder_and_upcast_attn = \"yes\": must be true or false"},
        {"{\"model_type\":\"gpt2\",%s,\"quantization_config\":{\"bits\":4}}", "quantized weights are not read"},
        {"{\"model_type\":\"gpt2\",%s,\"pruned_heads\":{\"0\":[1]}}", "pruned_heads is not built"},
        {"{\"model_type\":\"gpt2\",%s,\"layer_norm_epsilon\":0}", "layer_norm_epsilon = 0: must be above 0"},
        {"{\"model_type\":\"gpt2\",%s,\"layer_norm_epsilon\":\"1e-5\"}", "must be a finite number"},
        {"{\"model_type\":\"gpt2\",%s,\"layer_norm_epsilon\":1e999}", "must be a finite number"},
        {"{\"model_type\":\"gpt2\",%s,\"tie_word_embeddings\":1}", "tie_word_embeddings = 1: must be true or false"},
        {"{\"model_type\":\"gpt2\",%s,\"n_inner\":64.0}", "n_inner = 64.0: must be a whole number"},
        {"{\"model_type\":\"gpt2\",%s,\"n_inner\":\"64\"}", "n_inner = \"64\": must be a whole number"},
        {"{\"model_type\":\"gpt2\",%s,\"n_inner\":-1}", "n_inner = -1"},
        {"{\"model_type\":\"gpt2\",%s,\"n_inner\":99999999999999999999}", "must be a whole number"},
        {"{\"model_type\":\"gpt2\",\n\"n_layer\":0,\"n_head\":3,\"n_embd\":16,\n\"n_positions\":true,\"vocab_size\":[50]}",
            "line 2: n_layer = 0: must be a whole number from 1 to 10000; line 3: n_positions = true: must be"},
        {"{\"model_type\":\"gpt2\",\"n_layer\":1,\"n_head\":3,\"n_embd\":16,\"n_positions\":4,\"vocab_size\":50}",
            "n_embd = 16 is no multiple of n_head = 3"},
        {"{\"model_type\":\"gpt2\",\"n_layer\":1000000000,\"n_head\":2,\"n_embd\":16,\"n_positions\":4,\"vocab_size\":50}",
            "n_layer = 1000000000"},
        {"{\"model_type\":\"gpt2\",\"n_layer\":1e1,\"n_head\":2,\"n_embd\":16,\"n_positions\":4,\"vocab_size\":50}", "n_layer = 1e1"},
        {"{\"model_type\":\"gpt2\",%s,\"n_layer\":3}", "the key \"n_layer\" occurs twice"},
        {"{\"model_type\":\"gpt2\",%s,\"n\\u005flayer\":3}", "the key \"n_layer\" occurs twice"},
        {"{\"model_type\":\"gpt2\",%s} x", "config.json:1: expected the end"},
        {"{\"model_type\":\"gpt2\", # comment\n%s}", "config.json:1:"}, {"[1]", "is a list, not an object"}, {"", "nothing in it"},
        {"{\"model_type\":\"gpt2\",%s,}", "expected a key"}, {"{\"model_type\":\"gpt2\",\"x\":NaN}", "expected a value"},
    };
    FormatsFolder f = formats_folder();
    FormatsModel m;
    memset(&m, 0, sizeof m);
    FormatsCase c = {f.path, &m, DTYPE_FP32, 0};
    char text[2048], path[600];
    expect_dies(t, EXIT_DATA, "config.json: No such file", case_config, &c);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *hole = strstr(rows[i].json, "%s");
        if (hole) snprintf(text, sizeof text, "%.*s%s%s", (int)(hole - rows[i].json), rows[i].json, good, hole + 2);
        else snprintf(text, sizeof text, "%s", rows[i].json);
        formats_write_text(&f, "config.json", text);
        expect_dies(t, EXIT_DATA, rows[i].part, case_config, &c);
    }
    char *deep = (char *)host_alloc(200001);
    memset(deep, '[', 200000);
    formats_write_text(&f, "config.json", deep);
    free(deep);
    expect_dies(t, EXIT_DATA, "nested brackets", case_config, &c);
    CHECK(truncate(formats_path(path, &f, "config.json"), HF_JSON_BYTES_MAX + 1) == 0, "%s", strerror(errno));
    expect_dies(t, EXIT_DATA, "more than the limit", case_config, &c);
    c.path = "no/such/folder";
    expect_dies(t, EXIT_DATA, "model.init_from = no/such/folder: No such file or directory; name a Hugging Face folder", case_config, &c);
    formats_remove(&f);
}

static void config_with_dropout(void *arg) {
    FormatsCase *c = (FormatsCase *)arg;
    hf_config_read(c->path, &c->model->m);
    die(EXIT_OK, "read");
}

static void test_config_forms(Test *t) {
    FormatsFolder f = formats_folder();
    FormatsModel m;
    memset(&m, 0, sizeof m);
    FormatsCase c = {f.path, &m, DTYPE_FP32, 0};
    char text[DIES_TEXT_BYTES];
    // transformers 5, with the general names, nulls and keys of no concern
    formats_write_text(&f, "config.json", "\xef\xbb\xbf{\"model_type\":\"gpt2\",\"num_hidden_layers\":2,\"num_attention_heads\":2,\"hidden_size\":16,\"max_position_embeddings\":20,\"vocab_size\":50,"
                       "\"n_inner\":null,\"tie_word_embeddings\":false,\"layer_norm_epsilon\":1e-06,\"dtype\":\"bfloat16\",\"activation_function\":\"gelu_pytorch_tanh\",\"x\":{\"y\":[]},\"pruned_heads\":{}}");
    hf_config_read(f.path, &m.m);
    ModelConfig want = formats_config(2, 2, 16, 20, 50, 64, false);
    want.layer_norm_epsilon = 1e-6;
    expect_true(t, memcmp(&want, &m.m, sizeof want) == 0,
        "general names: L %" PRId64 " NH %" PRId64 " C %" PRId64 " T %" PRId64 " V %" PRId64 " F %" PRId64, m.m.n_layer, m.m.n_head,
        m.m.n_embd, m.m.n_positions, m.m.vocab_size, m.m.n_inner);
    hf_config_read(f.path, &m.m); // now all sizes are given, and agree
    expect_true(t, memcmp(&want, &m.m, sizeof want) == 0, "reading twice changed something");
    m.m.n_layer = 3;
    m.m.n_head = 4;
    m.m.n_embd = 32;
    m.m.n_positions = 21;
    m.m.vocab_size = 51;
    m.m.n_inner = 65;
    m.m.layer_norm_epsilon = 1e-5;
    static const char *const parts[] = {"train_gpt.model differs from model.init_from = ",
        "n_layer is 3 in the configuration, 2 in the model", "n_head is 4 in the configuration, 2 in the model", "n_embd is 32",
        "n_positions is 21", "vocab_size is 51", "n_inner is 65", "layer_norm_epsilon is 1e-05 in the configuration, 1e-06 in the model"};
    expect_dies_parts(t, EXIT_CONFIG, parts, 8, case_config, &c);
    memset(&m, 0, sizeof m);
    formats_write_text(&f, "config.json", "{\"model_type\":\"gpt2\",\"n_layer\":2,\"n_head\":2,\"n_embd\":16,\"n_positions\":20,\"vocab_size\":50,\"attn_pdrop\":0.1}");
    expect_equal_i64(t, "exit code", run_in_child(config_with_dropout, &c, text), EXIT_OK);
    expect_contains(t, "note", text, "has dropout 0.1; this program trains without dropout");
    formats_write_text(&f, "config.json", "{\"model_type\":\"gpt2\",\"n_layer\":2,\"n_head\":2,\"n_embd\":16,\"n_positions\":20,\"vocab_size\":50}");
    hf_config_read(f.path, &m.m);
    expect_equal_i64(t, "n_inner by default", m.m.n_inner, 64);
    expect_equal_i64(t, "tied by default", m.m.tie_word_embeddings, true);
    formats_remove(&f);
}

// ---------------------------------------------------------------------------------------------------------------
// llm.c

// Writes a model .bin with code of the tests' own: all layers of a tensor together.
static void formats_write_llmc(const FormatsModel *f, const char *path, int version, int64_t Vp) {
    static const char *const order[] = {
        "wte.weight", "wpe.weight", "ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight",
        "attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias",
        "ln_f.weight", "ln_f.bias",
    };
    const ModelConfig *m = &f->m;
    const int32_t header[256] = {20240326, version, (int32_t)m->n_positions, (int32_t)m->vocab_size, (int32_t)m->n_layer,
        (int32_t)m->n_head, (int32_t)m->n_embd, (int32_t)Vp};
    FILE *out = fopen(path, "wb");
    CHECK(out, "%s", strerror(errno));
    fwrite(header, 4, 256, out);
    for (size_t k = 0; k < sizeof order / sizeof *order; k++) {
        for (int l = 0; l < m->n_layer; l++) {
            char name[64];
            bool in_block = k >= 2 && k < 14;
            if (in_block) snprintf(name, sizeof name, "h.%d.%s", l, order[k]);
            else snprintf(name, sizeof name, "%s", order[k]);
            int row = 0;
            while (strcmp(f->table.row[row].name, name) != 0) row++;
            int64_t n = param_numel(&f->table.row[row]), padding = k == 0 ? (Vp - m->vocab_size) * m->n_embd : 0;
            for (int64_t i = 0; i < n + padding; i++) {
                float x = i < n ? f->row[row][i] : NAN; // padding must not be looked at
                uint16_t b = float_to_bf16(x);
                if (version == 5) fwrite(&b, 2, 1, out);
                else fwrite(&x, 4, 1, out);
            }
            if (!in_block) break;
        }
    }
    fclose(out);
}

static void test_import_llmc(Test *t) {
    FormatsFolder f = formats_folder();
    char path[600];
    formats_path(path, &f, "gpt2_tiny.bin");
    for (int version = 3; version <= 5; version += 2) {
        FormatsModel *want = formats_model(formats_config(3, 3, 24, 40, 211, 96, true), 3), *got = formats_model(want->m, 0);
        formats_write_llmc(want, path, version, 256);
        ModelConfig read;
        memset(&read, 0, sizeof read);
        hf_config_read(path, &read);
        expect_true(t, memcmp(&read, &want->m, sizeof read) == 0, "version %d: the configuration differs", version);
        hf_import(path, &read, &got->table, formats_put, got);
        for (int i = 0; version == 5 && i < want->table.n_rows; i++)
            for (int64_t k = 0; want->row[i] && k < param_numel(&want->table.row[i]); k++)
                want->row[i][k] = (float)round_to(want->row[i][k], 8, -126);
        expect_same_model(t, got, want);
        formats_model_free(want);
        formats_model_free(got);
    }
    formats_remove(&f);
}

static void test_llmc_faults(Test *t) {
    FormatsFolder f = formats_folder();
    char path[600];
    formats_path(path, &f, "model.bin");
    FormatsModel *m = formats_model(formats_config(2, 2, 16, 20, 50, 64, true), 3);
    FormatsModel *other = formats_model(formats_config(2, 4, 16, 20, 50, 64, true), 3);
    FormatsModel none;
    memset(&none, 0, sizeof none);
    FormatsCase c = {path, &none, DTYPE_FP32, 0};
    formats_write_llmc(m, path, 3, 128);
    int64_t bytes;
    char *good = formats_read(path, &bytes);
    static const struct { int at; int32_t value; const char *part; } flips[] = {
        {1, 0, "an llm.c model of version 0; this program reads 3 (fp32) and 5 (bf16)"}, {1, 1, "version 1"}, {1, 4, "version 4"},
        {1, 6, "version 6"}, {1, -1, "version -1"}, {1, INT32_MAX, "version 2147483647"},
        {0, 20240803, "is a Llama 3 model of llm.c"}, {0, 20240520, "is a token file of llm.c; it goes to data.train"},
        {0, 20240801, "is a token file"}, {0, 20240527, "is an optimizer state of llm.c"}, {0, 20240328, "is a tokenizer"},
        {0, 20240327, "is a debug state"}, {0, (int32_t)__builtin_bswap32(20240326), "other byte order"},
        {0, 0, "is no model file of llm.c"}, {0, 0x46554747, "is a GGUF file"}, {0, 0x04034b50, "is a PyTorch file"},
        {0, 0x7d710280, "is a PyTorch file"},
        {2, 0, "sizes that no model has"}, {2, -1, "sizes that no model has"}, {2, INT32_MAX, "sizes that no model has"},
        {2, 21, "but a model of its sizes has"}, {3, 0, "sizes"}, {3, 129, "sizes that no model has"}, {3, INT32_MAX, "sizes"},
        {4, 0, "sizes"}, {4, INT32_MAX, "sizes"}, {4, 10000, "but a model of its sizes has"}, {5, 0, "sizes"}, {5, 3, "sizes"},
        {6, 0, "sizes"}, {6, INT32_MIN, "sizes"}, {6, 1 << 20, "but a model of its sizes has"}, {7, 49, "sizes"}, {7, INT32_MAX, "sizes"},
        {7, 256, "but a model"},
    };
    for (size_t i = 0; i < sizeof flips / sizeof *flips; i++) {
        int32_t old;
        memcpy(&old, good + 4 * flips[i].at, 4);
        memcpy(good + 4 * flips[i].at, &flips[i].value, 4);
        formats_write(path, good, bytes);
        expect_dies(t, EXIT_DATA, flips[i].part, case_config, &c);
        memcpy(good + 4 * flips[i].at, &old, 4);
    }
    static const int64_t cuts[] = {0, 3, 4, 1023, 1024};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        formats_write(path, good, cuts[i]);
        expect_dies(t, EXIT_DATA, cuts[i] < 4 ? "is no model file" : "", case_config, &c);
    }
    formats_write(path, good, bytes - 1);
    expect_dies(t, EXIT_DATA, "the file is cut or damaged", case_config, &c);
    good[bytes - 1] = 0x7f; // 0x7fxxxxxx with a full exponent: NaN in the last bias
    good[bytes - 2] = (char)0xff;
    formats_write(path, good, bytes);
    c.model = m;
    expect_dies(t, EXIT_DATA, "tensor \"ln_f.bias\" has NaN at [15, 0]", case_import, &c);
    c.model = other;
    expect_dies(t, EXIT_CONFIG, "n_head is 4 in the configuration, 2 in the model", case_config, &c);
    FormatsModel *untied = formats_model(formats_config(2, 2, 16, 20, 50, 64, false), 0);
    c.model = untied;
    expect_dies(t, EXIT_DATA, "missing lm_head.weight", case_import, &c);
    formats_write_hf(m, path, 0, m->table.n_rows, 0);
    c.model = &none;
    expect_dies(t, EXIT_DATA, "is a safetensors file; name the folder", case_config, &c);
    free(good);
    formats_model_free(m);
    formats_model_free(other);
    formats_model_free(untied);
    formats_remove(&f);
}

// ---------------------------------------------------------------------------------------------------------------
// Export

// Exports a model; the notes about its tokenizer are not for the log of the tests.
static void formats_export(FormatsModel *f, const char *dir, DType dtype, int64_t shard_bytes) {
    int quiet = open("/dev/null", O_WRONLY | O_CLOEXEC), old = dup(STDERR_FILENO);
    Io io;
    memset(&io, 0, sizeof io);
    dup2(quiet, STDERR_FILENO);
    hf_export_with(&io, dir, &f->m, &f->table, dtype, shard_bytes, formats_get, f);
    dup2(old, STDERR_FILENO);
    close(quiet);
    close(old);
}

static char *formats_export_text(const char *folder, const char *name) {
    char path[900];
    int64_t bytes;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return formats_read(path, &bytes);
}

static void expect_config_value(Test *t, const Json *j, const char *key, const char *want) {
    int n = json_find(j, 0, key);
    const JsonNode *node = n < 0 ? NULL : &j->node[n];
    const char *got = !node ? "absent" : node->type == JSON_NULL ? "null" : json_text(j, n);
    if (node && node->type == JSON_BOOL) got = node->truth ? "true" : "false";
    expect_equal_text(t, key, got, want);
}

// Imports a golden model, exports it in every type, and compares all tensors with the original's bytes or their rounding.
static void export_golden(Test *t, int which) {
    static const char *const types[] = {"float32", "bfloat16", "float16"};
    const char *folder = formats_golden[which].folder;
    ModelConfig m;
    memset(&m, 0, sizeof m);
    hf_config_read(folder, &m);
    snprintf(m.init_from, sizeof m.init_from, "%s", folder);
    FormatsModel *model = formats_model(m, 0); // its sizes, and where it came from
    hf_import(folder, &m, &model->table, formats_put, model);
    char why[512], dir[600], path[900];
    SafeTensors original;
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    CHECK(safetensors_open(&original, path, why, sizeof why), "%s", why);
    float *a = (float *)host_alloc(1 << 20), *b = (float *)host_alloc(1 << 20);
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++) {
        FormatsFolder f = formats_folder();
        formats_path(dir, &f, "out");
        model->calls = 0;
        formats_export(model, dir, (DType)dtype, HF_SHARD_BYTES);
        expect_equal_i64(t, "rows fetched", model->calls, formats_stored_rows(model));
        expect_equal_i64(t, "names beside the export", formats_entries(f.path), 1);
        expect_equal_i64(t, "files", formats_entries(dir), 3);
        SafeTensors st;
        snprintf(path, sizeof path, "%s/model.safetensors", dir);
        CHECK(safetensors_open(&st, path, why, sizeof why), "%s", why);
        expect_equal_i64(t, "tensors", st.n_tensors, original.n_tensors);
        expect_true(t, st.n_metadata == 1 && strcmp(st.metadata[0].key, "format") == 0 && strcmp(st.metadata[0].value, "pt") == 0,
            "metadata is not format=pt");
        expect_equal_i64(t, "bytes of data", st.file_bytes - st.data_begin,
            (original.file_bytes - original.data_begin) / 4 * dtype_bytes((DType)dtype));
        for (int i = 0; i < original.n_tensors; i++) {
            const SafeTensor *want = &original.tensor[i], *got = safetensors_find(&st, want->name);
            int64_t n = safetensors_numel(want);
            expect_true(t, got && got->type == dtype && got->ndim == want->ndim && memcmp(got->shape, want->shape, sizeof got->shape) == 0,
                "%s: type or shape differs", want->name);
            if (!got) continue;
            bool read = safetensors_read(&original, want, 0, n, a, why, sizeof why) && safetensors_read(&st, got, 0, n, b, why, sizeof why);
            CHECK(read, "%s", why);
            for (int64_t k = 0; k < n; k++) a[k] = round_as_exported(a[k], (DType)dtype);
            expect_same_bytes(t, want->name, b, a, n * 4);
        }
        safetensors_close(&st);
        char *text = formats_export_text(dir, "config.json");
        Json j;
        expect_true(t, json_parse(&j, text, (int64_t)strlen(text), JSON_STRICT), "config.json: %s", j.error);
        char sizes[5][24];
        const int64_t size[] = {m.n_layer, m.n_head, m.n_embd, m.n_positions, m.vocab_size};
        for (int i = 0; i < 5; i++) snprintf(sizes[i], sizeof sizes[i], "%" PRId64, size[i]);
        const char *const wanted[][2] = {
            {"model_type", "gpt2"}, {"n_layer", sizes[0]}, {"n_head", sizes[1]}, {"n_embd", sizes[2]}, {"n_positions", sizes[3]},
            {"n_ctx", sizes[3]}, {"vocab_size", sizes[4]}, {"n_inner", "null"}, {"activation_function", "gelu_new"},
            {"attn_pdrop", "0.0"}, {"resid_pdrop", "0.0"}, {"embd_pdrop", "0.0"}, {"layer_norm_epsilon", "1e-05"},
            {"tie_word_embeddings", "true"}, {"bos_token_id", "0"}, {"eos_token_id", "0"}, {"dtype", types[dtype]},
            {"torch_dtype", types[dtype]}, {"scale_attn_weights", "true"}, {"scale_attn_by_inverse_layer_idx", "false"},
            {"reorder_and_upcast_attn", "false"},
        };
        for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) expect_config_value(t, &j, wanted[i][0], wanted[i][1]);
        int architectures = json_find(&j, 0, "architectures");
        expect_equal_text(t, "architecture", architectures < 0 ? "" : json_text(&j, j.node[architectures].first), "GPT2LMHeadModel");
        json_free(&j);
        free(text);
        // and in again
        FormatsModel *again = formats_model(m, 0);
        ModelConfig read;
        memset(&read, 0, sizeof read);
        hf_config_read(dir, &read);
        snprintf(read.init_from, sizeof read.init_from, "%s", m.init_from);
        expect_true(t, memcmp(&read, &m, sizeof m) == 0, "the exported configuration differs");
        hf_import(dir, &read, &again->table, formats_put, again);
        if (dtype == DTYPE_FP32) expect_same_model(t, again, model);
        formats_model_free(again);
        formats_remove(&f);
    }
    free(a);
    free(b);
    safetensors_close(&original);
    formats_model_free(model);
}

static void test_export_golden(Test *t) {
    for (int i = 0; i < 2; i++) export_golden(t, i);
}

// Rounding of awkward values, both of shards and layers beyond 100, tied and not.
static void test_export_round_trips(Test *t) {
    static const struct { int64_t L, NH, C, T, V, F; bool tied; int64_t shard_bytes; } rows[] = {
        {101, 2, 16, 8, 11, 64, true, 1 << 30}, // names of layer 10 and of layer 100
        {3, 3, 24, 40, 211, 100, false, 20000},
        {2, 1, 8, 5, 7, 32, true, 1},           // every tensor alone
        {1, 1, 1, 1, 1, 1, false, 1 << 30},
        {1, 2, 600, 3, 1000, 2400, true, 4000000}, // tensors of several blocks
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        FormatsFolder f = formats_folder();
        char dir[600], path[900], why[512];
        ModelConfig m = formats_config(rows[i].L, rows[i].NH, rows[i].C, rows[i].T, rows[i].V, rows[i].F, rows[i].tied);
        FormatsModel *want = formats_model(m, 5 + i), *got = formats_model(m, 0);
        formats_export(want, formats_path(dir, &f, "out"), DTYPE_FP32, rows[i].shard_bytes);
        // every file but those of one tensor keeps the limit, and none could have taken the next one's first tensor
        int64_t total = 0, last_bytes = 0;
        for (int r = 0; r < want->table.n_rows; r++) total += want->row[r] ? 4 * param_numel(&want->table.row[r]) : 0;
        int files = total <= rows[i].shard_bytes ? 1 : formats_entries(dir) - 3;
        for (int k = 0; k < files; k++) {
            SafeTensors st;
            if (files == 1) snprintf(path, sizeof path, "%s/model.safetensors", dir);
            else snprintf(path, sizeof path, "%s/model-%05d-of-%05d.safetensors", dir, k + 1, files);
            CHECK(safetensors_open(&st, path, why, sizeof why), "%s: %s", path, why);
            expect_true(t, st.file_bytes - st.data_begin <= rows[i].shard_bytes || st.n_tensors == 1, "case %zu, file %d: too large", i, k);
            expect_true(t, k == 0 || last_bytes + st.tensor[0].end - st.tensor[0].begin > rows[i].shard_bytes,
                "case %zu, file %d: had room in the file before", i, k);
            last_bytes = st.file_bytes - st.data_begin;
            safetensors_close(&st);
        }
        ModelConfig read;
        memset(&read, 0, sizeof read);
        hf_config_read(dir, &read);
        expect_true(t, memcmp(&read, &want->m, sizeof read) == 0, "case %zu: the configuration differs", i);
        hf_import(dir, &read, &got->table, formats_put, got);
        expect_same_model(t, got, want);
        if (files > 1) { // the index lists each tensor once, and the bytes of all
            char *index = formats_export_text(dir, HF_INDEX);
            Json j;
            expect_true(t, json_parse(&j, index, (int64_t)strlen(index), JSON_STRICT), "index: %s", j.error);
            int64_t said = 0;
            int size = json_find(&j, json_find(&j, 0, "metadata"), "total_size");
            json_to_i64(json_text(&j, size), j.node[size].length, &said);
            expect_equal_i64(t, "total_size", said, total);
            expect_equal_i64(t, "tensors in the index", j.node[json_find(&j, 0, "weight_map")].count, formats_stored_rows(want));
            json_free(&j);
            free(index);
        }
        formats_model_free(want);
        formats_model_free(got);
        formats_remove(&f);
    }
}

static void test_export_rounding(Test *t) {
    FormatsFolder f = formats_folder();
    char dir[600], path[900], why[512];
    FormatsModel *m = formats_model(formats_config(1, 1, 40, 100, 50, 160, true), 3);
    for (int i = 0; i < m->table.n_rows; i++)
        for (int64_t k = 0; m->row[i] && k < param_numel(&m->table.row[i]); k++) m->row[i][k] = awkward_value(k);
    for (int dtype = DTYPE_BF16; dtype <= DTYPE_FP16; dtype++) {
        snprintf(dir, sizeof dir, "%s/%s", f.path, dtype_name((DType)dtype));
        formats_export(m, dir, (DType)dtype, HF_SHARD_BYTES);
        snprintf(path, sizeof path, "%s/model.safetensors", dir);
        SafeTensors st;
        CHECK(safetensors_open(&st, path, why, sizeof why), "%s", why);
        const SafeTensor *s = safetensors_find(&st, "transformer.wte.weight");
        CHECK(s, "no wte");
        float got[2000];
        CHECK(safetensors_read(&st, s, 0, 2000, got, why, sizeof why), "%s", why);
        for (int64_t k = 0; k < 2000; k++) {
            float want = round_as_exported(awkward_value(k), (DType)dtype);
            expect_true(t, memcmp(&got[k], &want, 4) == 0, "%s of %.9g is %.9g, expected %.9g", dtype_name((DType)dtype),
                (double)awkward_value(k), (double)got[k], (double)want);
        }
        safetensors_close(&st);
    }
    formats_model_free(m);
    formats_remove(&f);
}

// Fails call number `fail_at` of an export.
typedef struct {
    FormatsCase c;
    int fail_at, error, calls;
} FailingCase;

static int failing_before(void *ctx, IoCall *call) {
    FailingCase *f = (FailingCase *)ctx;
    (void)call;
    return f->calls++ == f->fail_at ? f->error : 0;
}

static void case_export_failing(void *arg) {
    FailingCase *f = (FailingCase *)arg;
    Io io;
    memset(&io, 0, sizeof io);
    io.before = failing_before;
    io.ctx = f;
    hf_export_with(&io, f->c.path, &f->c.model->m, &f->c.model->table, f->c.dtype, f->c.shard_bytes, formats_get, f->c.model);
    if (f->calls <= f->fail_at) die(EXIT_OK, "all %d calls made", f->calls);
}

// Every call that changes something fails once: one line, an exit code, and either no folder at all, or (after the rename)
// the complete one.
static void test_export_failing_calls(Test *t) {
    FormatsModel *m = formats_model(formats_config(1, 1, 8, 8, 16, 32, true), 3);
    FormatsFolder f = formats_folder();
    char dir[600], text[DIES_TEXT_BYTES], dir_index[700];
    FailingCase c = {{formats_path(dir, &f, "out"), m, DTYPE_FP32, 2000}, 0, ENOSPC, 0};
    snprintf(dir_index, sizeof dir_index, "%s/config.json", dir);
    int ends = 0;
    for (; ends == 0 && c.fail_at < 200; c.fail_at++) {
        int code = run_in_child(case_export_failing, &c, text);
        bool published = access(dir, F_OK) == 0;
        if (code == EXIT_OK) ends = c.fail_at;
        expect_true(t, code == EXIT_OK || code == EXIT_IO, "call %d: exit code %d, \"%.200s\"", c.fail_at, code, text);
        expect_true(t, code != EXIT_IO || strstr(text, "No space left on device"), "call %d: \"%.200s\"", c.fail_at, text);
        expect_equal_i64(t, "names left behind", formats_entries(f.path), published);
        bool complete = access(dir_index, F_OK) == 0 && strstr(text, code == EXIT_OK ? "calls made" : "perhaps not on disk yet");
        expect_true(t, !published || complete, "call %d: published, \"%.200s\"", c.fail_at, text);
        if (published) formats_remove_path(dir);
    }
    expect_true(t, ends > 30, "an export makes %d calls", ends);
    formats_model_free(m);
    formats_remove(&f);
}

static void case_export_limited(void *arg) { // as on a disk that fills up: no file may pass 20,000 bytes
    struct rlimit limit = {20000, 20000};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    case_export(arg);
}

static void test_export_faults(Test *t) {
    FormatsFolder f = formats_folder();
    char path[600], dir[600];
    FormatsModel *m = formats_model(formats_config(2, 2, 16, 20, 50, 64, true), 3);
    FormatsCase c = {path, m, DTYPE_FP16, 0};
    // nothing is replaced
    formats_write_text(&f, "file", "mine");
    formats_path(path, &f, "file");
    expect_dies(t, EXIT_CANTCREAT, "already there and not an empty folder", case_export, &c);
    CHECK(mkdir(formats_path(path, &f, "full"), 0777) == 0, "%s", strerror(errno));
    formats_write_text(&f, "full/mine", "mine");
    expect_dies(t, EXIT_CANTCREAT, "already there and not an empty folder", case_export, &c);
    CHECK(mkdir(formats_path(dir, &f, "empty"), 0777) == 0 && symlink(dir, formats_path(path, &f, "link")) == 0, "%s", strerror(errno));
    expect_dies(t, EXIT_CANTCREAT, "already there and not an empty folder", case_export, &c);
    expect_equal_i64(t, "files behind the link", formats_entries(dir), 0);
    formats_export(m, dir, DTYPE_FP32, HF_SHARD_BYTES);
    expect_equal_i64(t, "files in what was an empty folder", formats_entries(dir), 3);
    snprintf(path, sizeof path, "%s/slashes///", f.path);
    formats_export(m, path, DTYPE_FP32, HF_SHARD_BYTES);
    expect_equal_i64(t, "files behind slashes", formats_entries(path), 3);
    int names = formats_entries(f.path);
    formats_path(path, &f, "no/such");
    expect_dies(t, EXIT_CANTCREAT, "the folder above it: No such file", case_export, &c);
    static const char *const odd[] = {"", ".", "..", "/"};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        c.path = odd[i];
        expect_dies(t, EXIT_CONFIG, "name a folder that is to be made", case_export, &c);
    }
    c.path = path;
    // values that the type cannot hold
    formats_path(path, &f, "new");
    float old = m->row[3][5];
    m->row[3][5] = 65520.0f;
    expect_dies(t, EXIT_NUMERICS, "which fp16 cannot hold; export as bf16 or fp32", case_export, &c);
    static const float bad[] = {NAN, INFINITY};
    for (int i = 0; i < 2; i++) {
        m->row[3][5] = bad[i];
        c.dtype = DTYPE_FP32;
        expect_dies(t, EXIT_NUMERICS, i ? "has inf at" : "has nan at", case_export, &c);
    }
    m->row[3][5] = old;
    // the disk fails
    expect_dies(t, EXIT_IO, "model.safetensors: allocate", case_export_limited, &c);
    expect_equal_i64(t, "names left behind by failures", formats_entries(f.path), names);
    // a configuration that says something else than the table
    ModelConfig good = m->m;
    static const struct { size_t field; int64_t value; } broken[] = {
        {offsetof(ModelConfig, n_layer), 3}, {offsetof(ModelConfig, n_layer), 1}, {offsetof(ModelConfig, n_head), 3},
        {offsetof(ModelConfig, n_embd), 32}, {offsetof(ModelConfig, n_positions), 21}, {offsetof(ModelConfig, vocab_size), 64},
        {offsetof(ModelConfig, n_inner), 65},
    };
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        memcpy((char *)&m->m + broken[i].field, &broken[i].value, sizeof(int64_t));
        expect_dies(t, EXIT_INTERNAL, "this is a bug", case_export, &c);
        m->m = good;
    }
    m->m.tie_word_embeddings = false;
    expect_dies(t, EXIT_INTERNAL, "tie_word_embeddings", case_export, &c);
    m->m = good;
    m->m.layer_norm_epsilon = 0;
    expect_dies(t, EXIT_INTERNAL, "layer_norm_epsilon", case_export, &c);
    expect_equal_i64(t, "names after refusals", formats_entries(f.path), names);
    formats_model_free(m);
    formats_remove(&f);
}

static void test_export_companions(Test *t) {
    FormatsFolder f = formats_folder(), source = formats_folder();
    char dir[600], path[600], secret[600];
    FormatsModel *m = formats_model(formats_config(1, 2, 16, 20, 50, 64, true), 3);
    snprintf(m->m.init_from, sizeof m->m.init_from, "%s", source.path);
    formats_write_config(&source, &m->m, ",\"bos_token_id\":49,\"eos_token_id\":50");
    formats_write_text(&source, "tokenizer.json", "{\"a\":1}");
    formats_write_text(&source, "merges.txt", "");
    formats_write_text(&source, "training_args.bin", "pickle");
    formats_write_text(&f, "secret", "secret");
    CHECK(symlink(formats_path(secret, &f, "secret"), formats_path(path, &source, "vocab.json")) == 0, "%s", strerror(errno));
    CHECK(mkdir(formats_path(path, &source, "tokenizer_config.json"), 0777) == 0, "%s", strerror(errno));
    formats_path(dir, &f, "out");
    formats_export(m, dir, DTYPE_BF16, HF_SHARD_BYTES);
    expect_equal_i64(t, "files", formats_entries(dir), 5);
    char *text = formats_export_text(dir, "tokenizer.json");
    expect_equal_text(t, "tokenizer.json", text, "{\"a\":1}");
    free(text);
    static const char *const jsons[] = {"config.json", "generation_config.json"};
    for (int i = 0; i < 2; i++) {
        Json j;
        text = formats_export_text(dir, jsons[i]);
        expect_true(t, json_parse(&j, text, (int64_t)strlen(text), JSON_STRICT), "%s", j.error);
        expect_config_value(t, &j, "bos_token_id", "49");
        expect_config_value(t, &j, "eos_token_id", "null"); // 50 is no token
        json_free(&j);
        free(text);
    }
    // GPT-2's vocabulary without a source: GPT-2's end of text
    FormatsModel *gpt2 = formats_model(formats_config(1, 1, 1, 1, 50257, 4, true), 3);
    formats_path(dir, &f, "gpt2");
    formats_export(gpt2, dir, DTYPE_BF16, HF_SHARD_BYTES);
    Json j;
    text = formats_export_text(dir, "config.json");
    expect_true(t, json_parse(&j, text, (int64_t)strlen(text), JSON_STRICT), "%s", j.error);
    expect_config_value(t, &j, "eos_token_id", "50256");
    json_free(&j);
    free(text);
    formats_model_free(gpt2);
    formats_model_free(m);
    formats_remove(&f);
    formats_remove(&source);
}

// The library that everybody reads these files with, where Python has it.
static void test_export_library(Test *t) {
    FormatsFolder f = formats_folder();
    char dir[600];
    FormatsModel *m = formats_model(formats_config(2, 3, 24, 40, 211, 100, false), 3);
    formats_path(dir, &f, "out");
    formats_export(m, dir, DTYPE_FP16, 20000);
    pid_t child = fork();
    if (child == 0) {
        int quiet = open("/dev/null", O_WRONLY);
        dup2(quiet, STDOUT_FILENO);
        const char *python = getenv("PYTHON") ? getenv("PYTHON") : "python3";
        execlp(python, python, "scripts/check_export.py", "--format-only", dir, (char *)NULL);
        _exit(127);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child, "%s", strerror(errno));
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (code == 77 || code == 127) test_skip(t, "Python has no safetensors library");
    else expect_equal_i64(t, "exit code of scripts/check_export.py", code, 0);
    formats_model_free(m);
    formats_remove(&f);
}

static const TestRow format_tests[] = {
    {"header lengths", test_header_lengths}, {"header faults", test_header_faults}, {"legal headers", test_header_legal},
    {"a million tensors", test_large_header},
    {"data types", test_data_types}, {"writer", test_writer}, {"import golden", test_import_golden}, {"import forms", test_import_forms},
    {"import shards", test_import_shards},
    {"index faults", test_index_faults}, {"import mismatches", test_import_mismatches}, {"import not finite", test_import_not_finite},
    {"config faults", test_config_faults},
    {"config forms", test_config_forms}, {"import llm.c", test_import_llmc}, {"llm.c faults", test_llmc_faults},
    {"export golden", test_export_golden}, {"export round trips", test_export_round_trips},
    {"export rounding", test_export_rounding}, {"export faults", test_export_faults},
    {"export, every call fails", test_export_failing_calls}, {"export companions", test_export_companions},
    {"export and the library", test_export_library},
    {NULL, NULL},
};
