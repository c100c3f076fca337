// fuzz_checkpoint.cpp - libFuzzer target: the reader of checkpoints, a manifest and two shards together.
//
//     clang++ -std=gnu++17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all tests/fuzz_checkpoint.cpp -o fuzz_checkpoint
//     ./fuzz_checkpoint -max_total_time=60 -max_len=32768 corpus/
//
// An input is one byte of choices, two bytes each with the length of the manifest and of the first shard, the manifest without its last
// line, and the shards. Bits of the first byte say which checksums are made right before the reader sees the files (without that, no
// mutation would get past the first of them). Mutations aim at the manifest, the used bytes of a header, and a table;
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
enum { SHARDS = 2, PREFIX = 5, LAST_LINE = 22, HEADER_USED = 72 };

// A folder of this process, removed when it ends, and a sound input.
static struct {
    char path[64];
    int fd;
    struct {
        uint8_t data[32768];
        size_t bytes;
    } sound[CHECKPOINT_VERSION]; // by version
} fuzz;

static void spill(const char *name, const void *data, size_t bytes) {
    int fd = openat(fuzz.fd, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    PROMISE(fd >= 0 && file_write_all(fd, data, (int64_t)bytes));
    close(fd);
}

// Overwrites the characters after the nth `key` in the manifest, from 0, with a text, if there are as many.
static void put_text(uint8_t *manifest, size_t bytes, const char *key, int nth, const char *text) {
    uint8_t *at = (uint8_t *)memmem(manifest, bytes, key, strlen(key));
    size_t length = strlen(text);
    for (; at && nth > 0; nth--) at = (uint8_t *)memmem(at + 1, (size_t)(manifest + bytes - at - 1), key, strlen(key));
    if (at && at + strlen(key) + length <= manifest + bytes) memcpy(at + strlen(key), text, length);
}

// The target is built without a device: the reader copies no state, so that nothing is there to be given back.
void pinned_region_free(void *p, int64_t bytes, bool pinned) {
    (void)pinned;
    PROMISE(!p && bytes == 0);
}

// ---------------------------------------------------------------------------------------------------------------
// A sound input: two tensors of two kinds, saved by two ranks, which are threads

typedef struct {
    int rank;
    const ParamTable *table;
    const ModelConfig *model;
    SaveResult result;
} SoundRank;

static pthread_barrier_t sound_meeting;
static PeerWord sound_word[SHARDS];

static void sound_gather(void *ctx, const void *mine, int64_t bytes, void *all) {
    PROMISE(bytes == sizeof *sound_word);
    memcpy(&sound_word[((SoundRank *)ctx)->rank], mine, sizeof *sound_word);
    pthread_barrier_wait(&sound_meeting);
    memcpy(all, sound_word, sizeof sound_word);
    pthread_barrier_wait(&sound_meeting);
}

static void sound_get(void *ctx, int row, int kind, int64_t first, int64_t n, float *values) {
    (void)ctx;
    for (int64_t i = 0; i < n; i++) values[i] = (float)(row + 10 * kind) + (float)(first + i) / 16;
}

static void sound_owned(void *ctx, int row, int64_t *first, int64_t *last) {
    const SoundRank *r = (const SoundRank *)ctx;
    const int64_t half = param_numel(&r->table->row[row]) / SHARDS;
    *first = half * r->rank;
    *last = half * (r->rank + 1);
}

static void *sound_save(void *rank) {
    SoundRank *r = (SoundRank *)rank;
    CheckpointTensors tensors = {r->table, r->model, 2, {"master", "exp_avg", NULL, NULL}, r, sound_owned, NULL, sound_get, NULL};
    CheckpointPeers peers = {r->rank, SHARDS, sound_gather, r};
    TrainingState state;
    memset(&state, 0, sizeof state);
    state.loss_scale = 1;
    state.config_ranks = SHARDS;
    state.config = "{\n    \"steps_per_print\": 7\n}";
    CheckpointStore *store = checkpoint_open(&peers, fuzz.path, false);
    r->result = checkpoint_save(store, &state, &tensors, 0, 0);
    checkpoint_close(store);
    return NULL;
}

// Makes a saved shard one of a version: in the first the runs are ranges; in the second the first shard holds columns 0 and 1 of the matrix,
// as a run each, and the second columns 2 and 3. (Which values are whose is nothing to the reader.) The table still fits into what rounds the
// file up.
static void sound_shard(int version, int rank, char *shard, int64_t shard_bytes) {
    ShardHeader *h = (ShardHeader *)shard;
    ShardRun old[4], run[6];
    ShardRange range[4];
    char *table = shard + SHARD_ALIGN + h->data_bytes;
    int64_t table_bytes = shard_bytes - SHARD_ALIGN - h->data_bytes, n = 0;
    PROMISE(h->n_runs == 4 && table_bytes <= SHARD_ALIGN && table_bytes >= (int64_t)sizeof run + 4);
    memcpy(old, table, sizeof old);
    for (int i = 0; i < 4; i++) {
        range[i] = {old[i].tensor, old[i].kind, old[i].global_offset, old[i].numel, old[i].data_offset};
        run[n++] = old[i];
        if (old[i].tensor > 0) continue;
        run[n - 1] = {0, old[i].kind, 2 * rank, rank == 0 ? 1 : 2, 5, 4, old[i].data_offset};
        if (rank == 0) run[n++] = {0, old[i].kind, 1, 1, 5, 4, old[i].data_offset + 20};
    }
    memset(table, 0, (size_t)table_bytes);
    memcpy(table, version == 1 ? (void *)range : (void *)run, version == 1 ? sizeof range : (size_t)n * sizeof *run);
    h->version = (uint32_t)version;
    h->n_runs = version == 1 ? 4 : (int)n;
}

// Keeps the saved files as the sound input of a version. Changes nothing of them but the manifest's version.
static void sound_keep(int version, char *manifest, int64_t manifest_bytes, char *const shard[SHARDS], const int64_t shard_bytes[SHARDS]) {
    char text[16];
    uint8_t *to = fuzz.sound[version - 1].data;
    size_t bytes = (size_t)(PREFIX + manifest_bytes);
    snprintf(text, sizeof text, "%d", version);
    put_text((uint8_t *)manifest, (size_t)manifest_bytes, "\"version\": ", 0, text);
    to[0] = RIGHT_ALL;
    to[1] = (uint8_t)manifest_bytes;
    to[2] = (uint8_t)(manifest_bytes >> 8);
    to[3] = (uint8_t)shard_bytes[0];
    to[4] = (uint8_t)(shard_bytes[0] >> 8);
    memcpy(to + PREFIX, manifest, (size_t)manifest_bytes);
    for (int r = 0; r < SHARDS; r++) {
        PROMISE(bytes + (size_t)shard_bytes[r] <= sizeof fuzz.sound[0].data);
        char *copy = (char *)malloc((size_t)shard_bytes[r]);
        memcpy(copy, shard[r], (size_t)shard_bytes[r]);
        sound_shard(version, r, copy, shard_bytes[r]);
        memcpy(to + bytes, copy, (size_t)shard_bytes[r]);
        free(copy);
        bytes += (size_t)shard_bytes[r];
    }
    fuzz.sound[version - 1].bytes = bytes;
}

// Reads a file of the saved checkpoint, and deletes it.
static char *sound_take(const char *name, const char *file, int64_t *bytes) {
    char path[192], why[128];
    snprintf(path, sizeof path, "%s/%s/%s", fuzz.path, name, file);
    char *text = file_read_all(path, false, 16384, bytes, why, sizeof why);
    PROMISE(text && unlink(path) == 0);
    return text;
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
    SoundRank rank[SHARDS];
    pthread_t thread[SHARDS];
    pthread_barrier_init(&sound_meeting, NULL, SHARDS);
    for (int r = 0; r < SHARDS; r++) {
        rank[r] = {r, &table, &model, {}};
        PROMISE(pthread_create(&thread[r], NULL, sound_save, &rank[r]) == 0);
    }
    for (int r = 0; r < SHARDS; r++) PROMISE(pthread_join(thread[r], NULL) == 0 && rank[r].result.durable);
    pthread_barrier_destroy(&sound_meeting);
    char path[128], name[32], *shard[SHARDS];
    int64_t manifest_bytes, shard_bytes[SHARDS];
    const char *saved = rank[0].result.name;
    char *manifest = sound_take(saved, MANIFEST_FILE, &manifest_bytes);
    for (int r = 0; r < SHARDS; r++) {
        shard_name(name, r);
        shard[r] = sound_take(saved, name, &shard_bytes[r]);
    }
    snprintf(path, sizeof path, "%s/%s", fuzz.path, saved);
    PROMISE(rmdir(path) == 0);
    for (int version = 1; version <= CHECKPOINT_VERSION; version++) sound_keep(version, manifest, manifest_bytes - LAST_LINE, shard, shard_bytes);
    for (int r = 0; r < SHARDS; r++) free(shard[r]);
    free(manifest);
}

static void fuzz_end(void) {
    char path[128];
    static const char *const names[] = {"c/manifest.json", "c/shard-0.bin", "c/shard-1.bin", ".lock", "latest", "c"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", fuzz.path, names[i]);
        remove(path);
    }
    rmdir(fuzz.path);
}

// ---------------------------------------------------------------------------------------------------------------
// The target

// Writes a shard, with those of its checksums right that the choices ask for; its line in the manifest, too.
static void write_shard(uint8_t choices, uint8_t *manifest, size_t manifest_bytes, int which, uint8_t *shard, size_t shard_bytes) {
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
            put_text(manifest, manifest_bytes, "\"table_crc32c\": \"", which, text);
        }
    }
    if (choices & RIGHT_BYTES) {
        snprintf(text, sizeof text, "%zu", shard_bytes);
        put_text(manifest, manifest_bytes, "\"bytes\": ", which, text);
    }
    shard_name(text, which);
    spill(text, shard, shard_bytes);
}

// Behind the shards, whose checksums it holds.
static void write_manifest(uint8_t choices, uint8_t *manifest, size_t manifest_bytes) {
    char text[64];
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
    int64_t elements = 0, stored = 0;
    PROMISE(c->n_shards >= 1 && c->n_shards <= SHARDS);
    for (int i = 0; i < c->n_shards; i++) {
        PROMISE(fstat(c->shard[i].fd, &st) == 0 && st.st_size == c->shard[i].file_bytes);
        stored += c->shard[i].data_bytes / 4;
    }
    for (int i = 0; i < c->n_tensors; i++) {
        int64_t numel = c->tensor[i].numel;
        PROMISE(numel >= 1 && numel <= stored && numel == c->tensor[i].shape[0] * c->tensor[i].shape[1]);
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
    PROMISE(elements == stored);
}

static bool accepted(const uint8_t *data, size_t size) {
    if (size < PREFIX) return false;
    size_t manifest_bytes = data[1] | (size_t)data[2] << 8, first = data[3] | (size_t)data[4] << 8, rest = size - PREFIX;
    if (manifest_bytes > rest) manifest_bytes = rest;
    rest -= manifest_bytes;
    if (first > rest) first = rest;
    uint8_t *manifest = (uint8_t *)malloc(manifest_bytes + LAST_LINE + 1), *shard = (uint8_t *)malloc(rest + 1);
    memcpy(manifest, data + PREFIX, manifest_bytes);
    memcpy(shard, data + PREFIX + manifest_bytes, rest);
    write_shard(data[0], manifest, manifest_bytes, 0, shard, first);
    write_shard(data[0], manifest, manifest_bytes, 1, shard + first, rest - first);
    write_manifest(data[0], manifest, manifest_bytes);
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

// Another digit for one of the manifest's: sizes, shapes, counts and names that no longer agree with the shards.
static void mutate_digit(uint8_t *text, size_t bytes, uint64_t random) {
    for (size_t i = 0; i < bytes; i++) {
        uint8_t *c = &text[(random + i) % bytes];
        if (*c >= '0' && *c <= '9') { *c = (uint8_t)('0' + (random >> 32) % 10); return; }
    }
}

// A number in one of the first runs of a table, a little larger or smaller.
static void mutate_run(uint8_t *table, size_t room, uint64_t random) {
    uint64_t x;
    const size_t at = random % 6 * sizeof(ShardRun) + (random >> 16) % (sizeof(ShardRun) / 8) * 8;
    if (at + sizeof x > room) return;
    memcpy(&x, table + at, sizeof x);
    x += (random >> 32) % 7 - 3;
    memcpy(table + at, &x, sizeof x);
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
    const size_t first = data[3] | (size_t)data[4] << 8, behind = PREFIX + manifest_bytes;
    size_t shard = behind + (seed / 8192 % 2 && first <= size - behind ? first : 0), table = 0;
    if (size - shard >= SHARD_ALIGN) {
        ShardHeader h;
        memcpy(&h, data + shard, sizeof h);
        if (h.data_bytes >= 0 && (uint64_t)h.data_bytes < size - shard - SHARD_ALIGN) table = shard + SHARD_ALIGN + (size_t)h.data_bytes;
    }
    const uint64_t random = rng_bits(seed, 0, 0);
    switch (seed / 16 % 8) {
    case 0: mutate_digit(data + PREFIX, manifest_bytes, random); return size;
    case 1: case 2: { // the manifest, which may change its length
        size_t room = max_size - (size - manifest_bytes);
        uint8_t *text = (uint8_t *)malloc(room + 1);
        if (manifest_bytes > room) manifest_bytes = room;
        memcpy(text, data + PREFIX, manifest_bytes);
        size_t length = LLVMFuzzerMutate(text, manifest_bytes, room < 65535 ? room : 65535);
        memmove(data + PREFIX + length, data + behind, size - behind);
        memcpy(data + PREFIX, text, length);
        free(text);
        data[1] = (uint8_t)length;
        data[2] = (uint8_t)(length >> 8);
        return size - (behind - PREFIX) + length;
    }
    case 3: return mutate_part(data, size, shard, HEADER_USED);
    case 4:
        if (table) mutate_run(data + table, size - table, random);
        return size;
    case 5: return table ? mutate_part(data, size, table, 6 * sizeof(ShardRun) + 8) : size;
    case 6: return mutate_part(data, size, shard + SHARD_ALIGN, 256);
    default: return LLVMFuzzerMutate(data, size, max_size);
    }
}
