// fuzz_checkpoint.cpp - libFuzzer target: the reader of checkpoints, manifest and shard together.
//
//     clang++ -std=gnu++17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all tests/fuzz_checkpoint.cpp -o fuzz_checkpoint
//     ./fuzz_checkpoint -max_total_time=60 -max_len=16384 corpus/
//
// An input is one byte of choices, two bytes with the length of the manifest, the manifest without its last line, and the
// shard. Bits of the first byte say which checksums are made right before the reader sees the files (without that, no
// mutation would get past the first of them). Mutations aim at the manifest, the used bytes of the header, and the table;
// an input too short to mean anything is replaced by a sound checkpoint, of this version or of the first. It needs no corpus to begin with.
//
// An accepted checkpoint must keep the promises of checkpoint_format.cu: sizes agree, every tensor can be put together, whole or
// by columns, no weight is NaN. A refusal must have a reason that is safe to print. Broken promises abort.
#include "../checkpoint.cu"

extern "C" size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
extern "C" int LLVMFuzzerInitialize(int *argc, char ***argv);
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define PROMISE(cond)                                                                                                  \
    do {                                                                                                               \
        if (!(cond)) { fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #cond); abort(); }                    \
    } while (0)

enum { RIGHT_MANIFEST = 1, RIGHT_TABLE = 2, RIGHT_HEADER = 4, RIGHT_PIECES = 8, RIGHT_BYTES = 16, RIGHT_ALL = 31 };
enum { PREFIX = 3, LAST_LINE = 22, HEADER_USED = 72 };

// A folder of this process, removed when it ends, and a sound input.
static struct {
    char path[64];
    int fd;
    struct {
        uint8_t data[16384];
        size_t bytes;
    } sound[CHECKPOINT_VERSION]; // by version
} fuzz;

static void spill(const char *name, const void *data, size_t bytes) {
    int fd = openat(fuzz.fd, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    PROMISE(fd >= 0 && file_write_all(fd, data, (int64_t)bytes));
    close(fd);
}

// Overwrites the characters after `key` in the manifest with a text, if there are as many.
static void put_text(uint8_t *manifest, size_t bytes, const char *key, const char *text) {
    uint8_t *at = (uint8_t *)memmem(manifest, bytes, key, strlen(key));
    size_t length = strlen(text);
    if (at && at + strlen(key) + length <= manifest + bytes) memcpy(at + strlen(key), text, length);
}

// The target is built without a device: the reader copies no state, so that nothing is there to be given back.
void pinned_region_free(void *p, int64_t bytes, bool pinned) {
    (void)pinned;
    PROMISE(!p && bytes == 0);
}

// ---------------------------------------------------------------------------------------------------------------
// A sound input: two tensors of two kinds

static void sound_get(void *ctx, int row, int kind, int64_t first, int64_t n, float *values) {
    (void)ctx;
    for (int64_t i = 0; i < n; i++) values[i] = (float)(row + 10 * kind) + (float)(first + i) / 16;
}

static void sound_owned(void *ctx, int row, int64_t *first, int64_t *last) {
    *first = 0;
    *last = param_numel(&((const ParamTable *)ctx)->row[row]);
}

// Keeps the saved files as a sound input of one version: in the first the runs are ranges; in the second the runs of the matrix are cut
// into its columns 0 to 1 and 2 to 3. (Which values are whose is nothing to the reader.) The table still fits into what rounds the file up.
static void sound_keep(int version, char *manifest, int64_t manifest_bytes, char *shard, int64_t shard_bytes) {
    ShardHeader *h = (ShardHeader *)shard;
    char text[16], *table = shard + SHARD_ALIGN + h->data_bytes;
    ShardRun old[4], run[6];
    ShardRange range[4];
    char kept[SHARD_ALIGN];
    int64_t table_bytes = shard_bytes - SHARD_ALIGN - h->data_bytes, n = 0;
    PROMISE(h->n_runs == 4 && table_bytes <= SHARD_ALIGN);
    memcpy(old, table, sizeof old);
    memcpy(kept, table, (size_t)table_bytes);
    for (int i = 0; i < 4; i++) {
        range[i] = {old[i].tensor, old[i].kind, old[i].global_offset, old[i].numel, old[i].data_offset};
        run[n++] = old[i];
        if (old[i].tensor > 0) continue;
        run[n - 1] = {0, old[i].kind, 0, 2, 5, 4, old[i].data_offset};
        run[n++] = {0, old[i].kind, 2, 2, 5, 4, old[i].data_offset + 40};
    }
    PROMISE(n == 6);
    memset(table, 0, (size_t)table_bytes);
    memcpy(table, version == 1 ? (void *)range : (void *)run, version == 1 ? sizeof range : sizeof run);
    h->version = (uint32_t)version;
    h->n_runs = version == 1 ? 4 : 6;
    snprintf(text, sizeof text, "%d", version);
    put_text((uint8_t *)manifest, (size_t)manifest_bytes, "\"version\": ", text);
    size_t bytes = (size_t)(PREFIX + manifest_bytes + shard_bytes);
    uint8_t *to = fuzz.sound[version - 1].data;
    PROMISE(bytes <= sizeof fuzz.sound[0].data);
    to[0] = RIGHT_ALL;
    to[1] = (uint8_t)manifest_bytes;
    to[2] = (uint8_t)(manifest_bytes >> 8);
    memcpy(to + PREFIX, manifest, (size_t)manifest_bytes);
    memcpy(to + PREFIX + manifest_bytes, shard, (size_t)shard_bytes);
    fuzz.sound[version - 1].bytes = bytes;
    h->version = CHECKPOINT_VERSION;
    h->n_runs = 4;
    memcpy(table, kept, (size_t)table_bytes);
}

static void sound_make(void) {
    ParamDesc row[2];
    UnitDesc unit[1];
    memset(row, 0, sizeof row);
    memset(unit, 0, sizeof unit);
    strcpy(row[0].name, "wte.weight");
    row[0].ndim = 2; row[0].shape[0] = row[0].local[0] = 5; row[0].shape[1] = row[0].local[1] = 4; row[0].numel = 20; row[0].tied_to = -1;
    strcpy(row[1].name, "h.0.ln_1.bias");
    row[1].ndim = 1; row[1].shape[0] = row[1].local[0] = 6; row[1].shape[1] = row[1].local[1] = 1; row[1].numel = 6; row[1].tied_to = -1;
    ParamTable table = {2, 1, 1, 0, row, unit};
    ModelConfig model;
    memset(&model, 0, sizeof model);
    model.n_layer = model.n_head = model.n_embd = model.n_positions = model.vocab_size = model.n_inner = 1;
    CheckpointTensors tensors = {&table, &model, 2, {"master", "exp_avg", NULL, NULL}, &table, sound_owned, NULL, sound_get, NULL};
    TrainingState state;
    memset(&state, 0, sizeof state);
    state.loss_scale = 1;
    CheckpointStore *store = checkpoint_open(&checkpoint_alone, fuzz.path, false);
    SaveResult r = checkpoint_save(store, &state, &tensors, 0, 0);
    PROMISE(r.durable);
    checkpoint_close(store);
    char path[128], why[128];
    int64_t manifest_bytes, shard_bytes;
    snprintf(path, sizeof path, "%s/%s/" MANIFEST_FILE, fuzz.path, r.name);
    char *manifest = file_read_all(path, false, 8192, &manifest_bytes, why, sizeof why);
    unlink(path);
    snprintf(path, sizeof path, "%s/%s/shard-0.bin", fuzz.path, r.name);
    char *shard = file_read_all(path, false, 8192, &shard_bytes, why, sizeof why);
    unlink(path);
    snprintf(path, sizeof path, "%s/%s", fuzz.path, r.name);
    PROMISE(manifest && shard && rmdir(path) == 0);
    for (int version = 1; version <= CHECKPOINT_VERSION; version++) sound_keep(version, manifest, manifest_bytes - LAST_LINE, shard, shard_bytes);
    free(manifest);
    free(shard);
}

static void fuzz_end(void) {
    char path[128];
    static const char *const names[] = {"c/manifest.json", "c/shard-0.bin", ".lock", "latest", "c"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", fuzz.path, names[i]);
        remove(path);
    }
    rmdir(fuzz.path);
}

// ---------------------------------------------------------------------------------------------------------------
// The target

// Writes both files, with the checksums that the choices ask for made right.
static void write_files(uint8_t choices, uint8_t *manifest, size_t manifest_bytes, uint8_t *shard, size_t shard_bytes) {
    char text[64];
    if (shard_bytes >= SHARD_ALIGN) {
        ShardHeader h;
        memcpy(&h, shard, sizeof h);
        int64_t left = (int64_t)shard_bytes - SHARD_ALIGN;
        bool sane = h.data_bytes >= 0 && h.data_bytes <= left && h.n_runs >= 0 && h.n_runs <= 1 << 20 && stored_shard_table_bytes((int)h.version, h.data_bytes, h.n_runs) <= left - h.data_bytes;
        if (sane && choices & RIGHT_PIECES && h.data_bytes > 0) { // at most one piece: inputs are short
            uint32_t crc = crc32c_extend(0, shard + SHARD_ALIGN, (size_t)h.data_bytes);
            memcpy(shard + SHARD_ALIGN + h.data_bytes + h.n_runs * stored_run_bytes((int)h.version), &crc, 4);
        }
        if (choices & RIGHT_HEADER) {
            h.crc = crc32c_extend(0, shard, offsetof(ShardHeader, crc));
            memcpy(shard, &h, sizeof h);
        }
        if (sane && choices & RIGHT_TABLE) {
            snprintf(text, sizeof text, "%08x", crc32c_extend(0, shard + SHARD_ALIGN + h.data_bytes, (size_t)(left - h.data_bytes)));
            put_text(manifest, manifest_bytes, "\"table_crc32c\": \"", text);
        }
    }
    if (choices & RIGHT_BYTES) {
        snprintf(text, sizeof text, "%zu", shard_bytes);
        put_text(manifest, manifest_bytes, "\"bytes\": ", text);
    }
    spill("shard-0.bin", shard, shard_bytes);
    snprintf(text, sizeof text, MANIFEST_LAST_LINE, choices & RIGHT_MANIFEST ? crc32c_extend(0, manifest, manifest_bytes) : 0);
    memcpy(manifest + manifest_bytes, text, LAST_LINE); // the caller left room
    spill(MANIFEST_FILE, manifest, manifest_bytes + LAST_LINE);
}

static void check_message(const char *why) {
    PROMISE(why[0] != 0);
    for (; *why; why++) PROMISE((unsigned char)*why >= 0x20 && *why != 0x7f);
}

static void check_accepted(Checkpoint *c) {
    struct stat st;
    PROMISE(c->n_shards == 1 && fstat(c->shard[0].fd, &st) == 0 && st.st_size == c->shard[0].file_bytes);
    int64_t elements = 0;
    for (int i = 0; i < c->n_tensors; i++) {
        int64_t numel = c->tensor[i].numel;
        PROMISE(numel >= 1 && numel <= c->shard[0].data_bytes / 4 && numel == c->tensor[i].shape[0] * c->tensor[i].shape[1]);
        float *values = (float *)malloc((size_t)numel * 4); // exactly this size: the sanitizer watches its end
        for (int k = 0; k < c->n_kinds; k++) {
            memset(values, 0xff, (size_t)numel * 4);
            const int64_t width = c->tensor[i].shape[1], column = width / 3, columns = width - column;
            ParamRun whole = {0, 0, numel, 1, numel}, right = {0, column, columns, c->tensor[i].shape[0], width};
            PROMISE(stored_values_read(c, i, k, &whole, 1, values));
            PROMISE(first_bad_value(values, numel, k) < 0);
            elements += numel;
            float *part = (float *)malloc((size_t)(columns * right.count) * 4);
            PROMISE(stored_values_read(c, i, k, &right, 1, part));
            for (int64_t row = 0; row < right.count; row++) PROMISE(memcmp(part + row * columns, values + row * width + column, (size_t)columns * 4) == 0);
            free(part);
        }
        free(values);
    }
    PROMISE(elements * 4 == c->shard[0].data_bytes);
}

static bool accepted(const uint8_t *data, size_t size) {
    if (size < PREFIX) return false;
    size_t manifest_bytes = data[1] | (size_t)data[2] << 8, rest = size - PREFIX;
    if (manifest_bytes > rest) manifest_bytes = rest;
    uint8_t *manifest = (uint8_t *)malloc(manifest_bytes + LAST_LINE + 1), *shard = (uint8_t *)malloc(rest - manifest_bytes + 1);
    memcpy(manifest, data + PREFIX, manifest_bytes);
    memcpy(shard, data + PREFIX + manifest_bytes, rest - manifest_bytes);
    write_files(data[0], manifest, manifest_bytes, shard, rest - manifest_bytes);
    free(manifest);
    free(shard);
    int folder = openat(fuzz.fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    Checkpoint c;
    bool good = checkpoint_read(&c, folder, "c") && values_check(&c, 0, 1);
    if (good) check_accepted(&c);
    else check_message(c.why);
    checkpoint_free(&c);
    close(folder);
    return good;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    accepted(data, size);
    return 0;
}

extern "C" int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc; (void)argv;
    snprintf(fuzz.path, sizeof fuzz.path, "/dev/shm/fuzz_checkpoint_XXXXXX"); // in memory: two files an input
    if (!mkdtemp(fuzz.path)) {
        snprintf(fuzz.path, sizeof fuzz.path, "/tmp/fuzz_checkpoint_XXXXXX");
        PROMISE(mkdtemp(fuzz.path));
    }
    sound_make();
    char path[128];
    snprintf(path, sizeof path, "%s/c", fuzz.path);
    PROMISE(mkdir(path, 0700) == 0);
    fuzz.fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    PROMISE(fuzz.fd >= 0);
    atexit(fuzz_end);
    for (int v = 0; v < CHECKPOINT_VERSION; v++) PROMISE(accepted(fuzz.sound[v].data, fuzz.sound[v].bytes));
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Mutations

// Mutates length bytes at `at` in place of the input, without changing the length of anything else.
static size_t mutate_part(uint8_t *data, size_t size, size_t at, size_t length) {
    if (at >= size) return size;
    if (length > size - at) length = size - at;
    uint8_t part[SHARD_ALIGN];
    if (length > sizeof part) length = sizeof part;
    memcpy(part, data + at, length);
    LLVMFuzzerMutate(part, length, length);
    memcpy(data + at, part, length);
    return size;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    const int version = seed / 2048 % 4 ? CHECKPOINT_VERSION : 1;
    if ((size < 64 || seed / 128 % 16 == 0) && fuzz.sound[version - 1].bytes <= max_size) {
        size = fuzz.sound[version - 1].bytes;
        memcpy(data, fuzz.sound[version - 1].data, size);
    }
    if (size < PREFIX) return LLVMFuzzerMutate(data, size, max_size);
    if (seed % 16 == 0) data[0] = (uint8_t)(seed >> 8);
    size_t manifest_bytes = data[1] | (size_t)data[2] << 8;
    if (manifest_bytes > size - PREFIX) return LLVMFuzzerMutate(data, size, max_size);
    size_t shard = PREFIX + manifest_bytes, table = 0;
    if (size - shard >= SHARD_ALIGN) {
        ShardHeader h;
        memcpy(&h, data + shard, sizeof h);
        if (h.data_bytes >= 0 && (uint64_t)h.data_bytes < size - shard - SHARD_ALIGN) table = shard + SHARD_ALIGN + (size_t)h.data_bytes;
    }
    switch (seed / 16 % 8) {
    case 0: case 1: case 2: { // the manifest, which may change its length
        size_t room = max_size - (size - manifest_bytes);
        uint8_t *text = (uint8_t *)malloc(room + 1);
        if (manifest_bytes > room) manifest_bytes = room;
        memcpy(text, data + PREFIX, manifest_bytes);
        size_t length = LLVMFuzzerMutate(text, manifest_bytes, room < 65535 ? room : 65535);
        memmove(data + PREFIX + length, data + shard, size - shard);
        memcpy(data + PREFIX, text, length);
        free(text);
        data[1] = (uint8_t)length;
        data[2] = (uint8_t)(length >> 8);
        return size - (shard - PREFIX) + length;
    }
    case 3: return mutate_part(data, size, shard, HEADER_USED);
    case 4: case 5: return table ? mutate_part(data, size, table, 6 * sizeof(ShardRun) + 8) : size;
    case 6: return mutate_part(data, size, shard + SHARD_ALIGN, 256);
    default: return LLVMFuzzerMutate(data, size, max_size);
    }
}
