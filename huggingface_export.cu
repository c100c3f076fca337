// huggingface_export.cu - a folder that transformers loads: config.json, safetensors, the tokenizer's files.
//
// A part of huggingface.cu.
#pragma once

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
