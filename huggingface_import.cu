// huggingface_import.cu - weights of a Hugging Face folder or an llm.c model, tensor by tensor, into the table's layout.
//
// A part of huggingface.cu.
#pragma once

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
