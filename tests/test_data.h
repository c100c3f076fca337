// test_data.h - tests of runtime/dataloader.h and runtime/tokenizer.h.
//
// The oracle of the loader is the stream itself: tokens whose value is a function of their position, so that every batch
// can be predicted without reading a file.
#pragma once
#include "../runtime/dataloader.h"
#include "../runtime/tokenizer.h"
#include "dies.h"
#include <sys/resource.h>

// ---------------------------------------------------------------------------------------------------------------
// Temporary folders and files

typedef struct {
    char path[512];
} TestFolder;

static TestFolder folder_make(void) {
    TestFolder f;
    const char *tmp = getenv("TMPDIR");
    snprintf(f.path, sizeof f.path, "%.400s/test_data_XXXXXX", tmp && tmp[0] ? tmp : "/tmp");
    CHECK(mkdtemp(f.path), "no temporary folder below %s: %s", f.path, strerror(errno));
    return f;
}

static const char *folder_file(const TestFolder *f, char *dst, const char *name) { // dst: 1024 bytes
    snprintf(dst, 1024, "%s/%s", f->path, name);
    return dst;
}

static void folder_remove(const TestFolder *f) { // one level, as the tests make it
    char all[1024];
    glob_t found = {};
    if (glob(folder_file(f, all, "*"), GLOB_NOSORT, NULL, &found) == 0)
        for (size_t i = 0; i < found.gl_pathc; i++) if (remove(found.gl_pathv[i]) != 0) note("%s stays: %s", found.gl_pathv[i], strerror(errno));
    globfree(&found);
    if (rmdir(f->path) != 0) note("%s stays: %s", f->path, strerror(errno));
}

static void file_put(const char *path, const void *bytes, int64_t n) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && file_write_all(fd, bytes, n), "%s: %s", path, strerror(errno));
    close(fd);
}

// A shard of n tokens value(first + i), of 2 or 4 bytes each.
static int32_t token_at(int64_t position, int64_t vocab) { return (int32_t)(rng_bits(7, 7, (uint64_t)position) % (uint64_t)vocab); }

static int64_t shard_bytes(uint8_t **bytes, int64_t first, int64_t n, int token_bytes, int64_t vocab) {
    int64_t size = DATA_HEADER_BYTES + n * token_bytes;
    int32_t header[256] = {token_bytes == 2 ? DATA_MAGIC_16 : DATA_MAGIC_32, token_bytes == 2 ? DATA_VERSION_16 : DATA_VERSION_32, (int32_t)n};
    *bytes = (uint8_t *)host_alloc((size_t)size);
    memcpy(*bytes, header, sizeof header);
    for (int64_t i = 0; i < n; i++) {
        int32_t token = token_at(first + i, vocab);
        memcpy(*bytes + DATA_HEADER_BYTES + i * token_bytes, &token, (size_t)token_bytes); // little endian
    }
    return size;
}

static void shard_put(const char *path, int64_t first, int64_t n, int token_bytes, int64_t vocab) {
    uint8_t *bytes;
    int64_t size = shard_bytes(&bytes, first, n, token_bytes, vocab);
    file_put(path, bytes, size);
    free(bytes);
}

static int open_descriptors(void) {
    int n = 0;
    for (int fd = 0; fd < 256; fd++) n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

typedef struct { // what a child opens, and then reads
    const char *pattern;
    int64_t vocab, T, G, fetch_first, fetch_n;
    bool as_nobody;  // root may read everything, so it becomes another user first
} OpenCase;

static void open_case(void *arg) {
    const OpenCase *c = (const OpenCase *)arg;
    DataLoader d;
    if (c->as_nobody && geteuid() == 0 && setuid(65534) != 0) die(EXIT_INTERNAL, "setuid: %s", strerror(errno));
    dataloader_open(&d, c->pattern, c->vocab, c->T, c->G, false, false, 1, "train_gpt.data.train");
    if (c->fetch_n > 0) {
        int32_t *tokens = (int32_t *)host_alloc((size_t)(c->fetch_n * c->T) * 4), *targets = (int32_t *)host_alloc((size_t)(c->fetch_n * c->T) * 4);
        dataloader_fetch(&d, c->fetch_first, c->fetch_n, tokens, targets);
    }
}

// Every value of a batch against the stream, for an unshuffled loader over tokens token_at(0..total).
static void expect_stream_batch(Test *t, DataLoader *d, int64_t first, int64_t n, int64_t vocab) {
    int64_t T = d->seq_len;
    int32_t *tokens = (int32_t *)host_alloc((size_t)(n * T) * 4), *targets = (int32_t *)host_alloc((size_t)(n * T) * 4);
    dataloader_fetch(d, first, n, tokens, targets);
    for (int64_t j = 0; j < n; j++)
        for (int64_t k = 0; k < T; k++) {
            int64_t at = (first + j) % d->samples_per_epoch * T + k;
            if (tokens[j * T + k] != token_at(at, vocab) || targets[j * T + k] != token_at(at + 1, vocab))
                test_fail(t, "sample %" PRId64 " position %" PRId64 ": %d -> %d, expected %d -> %d", first + j, k, tokens[j * T + k], targets[j * T + k], token_at(at, vocab), token_at(at + 1, vocab));
        }
    t->compared += 2 * n * T;
    free(tokens);
    free(targets);
}

// ---------------------------------------------------------------------------------------------------------------
// Which tokens make which sample

// With B=2 and T=8, N = 16k+1 tokens give k batches an epoch and N = 16k give k-1; both kinds of shard.
static void test_data_tiling(Test *t) {
    TestFolder f = folder_make();
    char path[1024];
    folder_file(&f, path, "a.bin");
    for (int token_bytes = 2; token_bytes <= 4; token_bytes += 2)
        for (int64_t k = 2; k <= 5; k++)
            for (int64_t extra = -1; extra <= 2; extra++) {
                int64_t N = 16 * k + extra, vocab = token_bytes == 2 ? 50257 : 128256;
                shard_put(path, 0, N, token_bytes, vocab);
                DataLoader d;
                dataloader_open(&d, path, vocab, 8, 2, false, true, 1, "train");
                expect_equal_i64(t, "batches of an epoch", d.samples_per_epoch / 2, extra >= 1 ? k : k - 1);
                expect_equal_i64(t, "tokens", d.total_tokens, N);
                for (int64_t batch = 0; batch < d.samples_per_epoch / 2; batch++) expect_stream_batch(t, &d, 2 * batch, 2, vocab); // tiles 0 .. 16k
                dataloader_close(&d);
            }
    folder_remove(&f);
}

// The end of an epoch: drop_last false wraps inside an update, true drops the samples that fill no update.
static void test_data_wrap(Test *t) {
    TestFolder f = folder_make();
    char path[1024];
    shard_put(folder_file(&f, path, "a.bin"), 0, 8 * 7 + 5, 2, 1000); // 7 samples of 8
    DataLoader d;
    dataloader_open(&d, path, 1000, 8, 3, false, false, 1, "train");
    expect_equal_i64(t, "samples of a wrapping epoch", d.samples_per_epoch, 7);
    for (int64_t update = 0; update < 6; update++) expect_stream_batch(t, &d, 3 * update, 3, 1000);
    expect_equal_i64(t, "place of counter 7", dataloader_sample_index(&d, 7), 0);
    expect_equal_i64(t, "epoch of counter 6", dataloader_epoch(&d, 6), 0);
    expect_equal_i64(t, "epoch of counter 7", dataloader_epoch(&d, 7), 1);
    expect_equal_i64(t, "epoch of counter 14", dataloader_epoch(&d, 14), 2);
    dataloader_close(&d);
    dataloader_open(&d, path, 1000, 8, 3, false, true, 1, "train");
    expect_equal_i64(t, "samples of a dropping epoch", d.samples_per_epoch, 6);
    expect_equal_i64(t, "place of counter 6", dataloader_sample_index(&d, 6), 0);
    for (int64_t update = 0; update < 6; update++) expect_stream_batch(t, &d, 3 * update, 3, 1000);
    dataloader_close(&d);
    folder_remove(&f);
}

// A batch does not depend on how it is asked for: at once, by micro-batches, in another order, ahead by the thread.
static void test_data_split_and_prefetch(Test *t) {
    enum { T = 16, G = 12, SAMPLES = 50 };
    TestFolder f = folder_make();
    char path[1024];
    shard_put(folder_file(&f, path, "a.bin"), 0, T * SAMPLES + 1, 2, 5000);
    int32_t whole[2][G * T], parts[2][G * T];
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        DataLoader d, ahead;
        dataloader_open(&d, path, 5000, T, G, shuffle, false, 11, "train");
        dataloader_open(&ahead, path, 5000, T, G, shuffle, false, 11, "train");
        for (int64_t update = 0; update < 9; update++) { // 108 samples: more than two epochs
            dataloader_prefetch(&ahead, update * G, 4);
            dataloader_fetch(&d, update * G, G, whole[0], whole[1]);
            for (int64_t m = 0; m < 3; m++) {
                dataloader_fetch(&ahead, update * G + 4 * m, 4, parts[0] + 4 * m * T, parts[1] + 4 * m * T);
                if (m < 2) dataloader_prefetch(&ahead, update * G + 4 * (m + 1), 4);
            }
            expect_same_bytes(t, "inputs in micro-batches, read ahead", parts[0], whole[0], sizeof whole[0]);
            expect_same_bytes(t, "targets in micro-batches, read ahead", parts[1], whole[1], sizeof whole[1]);
        }
        dataloader_prefetch(&ahead, 24, 3); // asked ahead, then something else is wanted first, then it is wanted
        dataloader_fetch(&ahead, 0, G, parts[0], parts[1]);
        dataloader_fetch(&d, 0, G, whole[0], whole[1]);
        expect_same_bytes(t, "a fetch beside a request", parts[0], whole[0], sizeof whole[0]);
        dataloader_fetch(&ahead, 24, 3, parts[0], parts[1]);
        dataloader_fetch(&d, 24, 3, whole[0], whole[1]);
        expect_same_bytes(t, "the request, fetched later", parts[1], whole[1], 3 * T * 4);
        dataloader_prefetch(&ahead, 5, 2); // two requests: the second one counts; one larger than before
        dataloader_prefetch(&ahead, 6, G);
        dataloader_fetch(&ahead, 6, G, parts[0], parts[1]);
        dataloader_fetch(&d, 6, G, whole[0], whole[1]);
        expect_same_bytes(t, "the second of two requests", parts[0], whole[0], sizeof whole[0]);
        dataloader_prefetch(&ahead, 1, 2); // never fetched: closing must not hang
        dataloader_close(&ahead);
        dataloader_close(&d);
    }
    folder_remove(&f);
}

// Samples of many pages, across files: what is read in pieces is put together in order.
static void test_data_long_samples(Test *t) {
    TestFolder f = folder_make();
    char path[1024];
    const int64_t cut[] = {0, 70001, 70002, 150000, 200001};
    for (int s = 0; s < 4; s++) {
        char name[32];
        snprintf(name, sizeof name, "%d.bin", s);
        shard_put(folder_file(&f, path, name), cut[s], cut[s + 1] - cut[s], 2, 50257);
    }
    DataLoader d;
    dataloader_open(&d, folder_file(&f, path, "*.bin"), 50257, 40000, 1, false, false, 1, "train");
    for (int64_t sample = 0; sample < 5; sample++) expect_stream_batch(t, &d, sample, 1, 50257);
    dataloader_close(&d);
    folder_remove(&f);
}

// The permutation: onto for every size, different by key, and no visible order.
static void test_data_permutation(Test *t) {
    enum { LARGEST = 300 };
    for (int64_t n = 1; n <= LARGEST; n++)
        for (uint64_t key = 1; key <= 3; key++) {
            bool seen[LARGEST] = {};
            for (int64_t i = 0; i < n; i++) {
                int64_t p = data_permute(i, n, key);
                expect_true(t, p >= 0 && p < n && !seen[p], "permutation of %" PRId64 ", key %" PRIu64 ": %" PRId64 " -> %" PRId64 " twice or outside", n, key, i, p);
                if (p >= 0 && p < n) seen[p] = true;
            }
        }
    // Large sizes: images inside; the correlation of place and image of 100,000 points is 0 +- 1/sqrt(n), bound 5 sigma
    const int64_t sizes[] = {100000, (int64_t)1 << 20, ((int64_t)1 << 20) + 1, 3000000019, (int64_t)1 << 40};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        int64_t n = sizes[k], points = 100000, fixed = 0;
        double sum = 0;
        for (int64_t i = 0; i < points; i++) {
            int64_t at = (int64_t)((double)n / (double)points * (double)i), p = data_permute(at, n, 42);
            if (p < 0 || p >= n) test_fail(t, "permutation of %" PRId64 ": %" PRId64 " -> %" PRId64, n, at, p);
            fixed += p == at;
            sum += ((double)at / (double)n - 0.5) * ((double)p / (double)n - 0.5) * 12;
        }
        expect_near(t, "correlation of place and image", sum / (double)points, 0, 5 / sqrt((double)points));
        expect_true(t, fixed <= 10, "%" PRId64 " of 100000 places stay where they are (1 expected at most)", fixed);
    }
    // 24 permutations of 4: 8 rounds on bits reach the even ones at least; all images of 0 are about equally frequent
    int64_t image[4] = {};
    for (uint64_t key = 0; key < 4000; key++) image[data_permute(0, 4, rng_mix(key))]++;
    for (int i = 0; i < 4; i++) expect_near(t, "keys of 4000 that send 0 to one of 4", (double)image[i], 1000, 5 * sqrt(4000 * 0.25 * 0.75));
}

// Shuffled epochs: permutations of one set, unequal to each other and to the file's order, equal for equal seeds and wherever
// reading begins.
static void test_data_shuffle(Test *t) {
    enum { S = 41, T = 4 };
    TestFolder f = folder_make();
    char path[1024];
    shard_put(folder_file(&f, path, "a.bin"), 0, S * T + 3, 4, 1 << 30);
    DataLoader a, b, c;
    dataloader_open(&a, path, 1 << 30, T, 5, true, false, 1, "train");
    dataloader_open(&b, path, 1 << 30, T, 5, true, false, 2, "train");
    dataloader_open(&c, path, 1 << 30, T, 5, true, true, 1, "train");
    int64_t same_epoch = 0, same_seed = 0, same_file = 0;
    for (int epoch = 0; epoch < 2; epoch++) {
        bool seen[S] = {};
        for (int64_t i = 0; i < S; i++) {
            int64_t p = dataloader_sample_index(&a, epoch * S + i);
            expect_true(t, p >= 0 && p < S && !seen[p], "epoch %d visits sample %" PRId64 " twice or outside", epoch, p);
            if (p >= 0 && p < S) seen[p] = true;
            same_file += p == i;
        }
    }
    for (int64_t i = 0; i < S; i++) {
        same_epoch += dataloader_sample_index(&a, i) == dataloader_sample_index(&a, S + i);
        same_seed += dataloader_sample_index(&a, i) == dataloader_sample_index(&b, i);
    }
    // two random permutations of 41 agree in 1 +- 1 places
    expect_true(t, same_epoch < 8 && same_seed < 8 && same_file < 12, "places that agree: %" PRId64 " of two epochs, %" PRId64 " of two seeds, %" PRId64 " with the file", same_epoch, same_seed, same_file);
    for (int64_t i = 0; i < 40; i++) expect_equal_i64(t, "place with drop_last, first epoch", dataloader_sample_index(&c, i), dataloader_sample_index(&a, i));
    int32_t run[2][10 * T], again[2][10 * T]; // the contents follow the places, and a restart in the middle changes nothing
    dataloader_fetch(&a, 35, 10, run[0], run[1]);
    for (int64_t j = 0; j < 10; j++)
        for (int64_t k = 0; k < T; k++) expect_equal_i64(t, "shuffled token", run[0][j * T + k], token_at(dataloader_sample_index(&a, 35 + j) * T + k, 1 << 30));
    dataloader_close(&a);
    dataloader_open(&a, path, 1 << 30, T, 5, true, false, 1, "train");
    dataloader_fetch(&a, 35, 10, again[0], again[1]);
    expect_same_bytes(t, "after a restart", again, run, sizeof run);
    dataloader_close(&a);
    dataloader_close(&b);
    dataloader_close(&c);
    folder_remove(&f);
}

// Shards of any sizes equal one shard: 200 files, many of one token, both widths, written from the last name to the first,
// and few descriptors to be had.
static void test_data_many_shards(Test *t) {
    enum { FILES = 200, T = 32 };
    TestFolder f = folder_make();
    char path[1024], name[64];
    int64_t total = 0, first[FILES + 1];
    for (int s = 0; s < FILES; s++) { first[s] = total; total += s % 3 ? 1 + (int64_t)(rng_bits(3, 3, (uint64_t)s) % 97) : 1; }
    first[FILES] = total;
    for (int s = FILES - 1; s >= 0; s--) {
        snprintf(name, sizeof name, "part_%06d.bin", s);
        shard_put(folder_file(&f, path, name), first[s], first[s + 1] - first[s], s % 2 ? 2 : 4, 60000);
    }
    file_put(folder_file(&f, path, "other.bin"), "x", 1); // does not match
    folder_file(&f, path, "part_*.bin");
    int threads = omp_get_max_threads(), held = open_descriptors();
    struct rlimit before, few;
    getrlimit(RLIMIT_NOFILE, &before);
    few = before;
    few.rlim_cur = 0;
    for (int fd = 0; fd < 256; fd++) if (fcntl(fd, F_GETFD) >= 0) few.rlim_cur = (rlim_t)fd + 1; // the limit is on the number, not on the count
    few.rlim_cur += DATA_OPEN_FILES + 2;
    setrlimit(RLIMIT_NOFILE, &few);
    omp_set_num_threads(2);
    DataLoader d;
    dataloader_open(&d, path, 60000, T, 4, false, false, 1, "train");
    expect_equal_i64(t, "files", d.files.n_shards, FILES);
    expect_equal_i64(t, "tokens", d.total_tokens, total);
    for (int64_t sample = 0; sample < d.n_samples; sample += 4) expect_stream_batch(t, &d, sample, 4, 60000);
    held = open_descriptors() - held;
    expect_true(t, held > 0 && held <= DATA_OPEN_FILES, "%d descriptors held, 1 to %d expected", held, DATA_OPEN_FILES);
    uint64_t print = d.fingerprint;
    dataloader_close(&d);
    omp_set_num_threads(1);
    dataloader_open(&d, path, 60000, T, 4, true, true, 2, "train"); // neither threads nor order change the fingerprint
    expect_true(t, d.fingerprint == print, "fingerprints %" PRIx64 " and %" PRIx64 " of the same files", print, d.fingerprint);
    dataloader_close(&d);
    setrlimit(RLIMIT_NOFILE, &before);
    omp_set_num_threads(threads);
    folder_remove(&f);
}

// Anything that changes what would be read changes the fingerprint: a token, a name, one more file.
static void test_data_fingerprint(Test *t) {
    TestFolder f = folder_make();
    char a[1024], b[1024], all[1024];
    folder_file(&f, all, "*.bin");
    shard_put(folder_file(&f, a, "a.bin"), 0, 100, 2, 1000);
    uint64_t print[5];
    for (int i = 0; i < 5; i++) {
        if (i == 1) shard_put(a, 1, 100, 2, 1000);
        if (i == 2) { shard_put(a, 0, 100, 2, 1000); shard_put(folder_file(&f, b, "b.bin"), 9, 1, 2, 1000); }
        if (i == 3) { remove(b); CHECK(rename(a, folder_file(&f, b, "c.bin")) == 0, "rename: %s", strerror(errno)); }
        if (i == 4) CHECK(rename(b, a) == 0, "rename: %s", strerror(errno));
        DataLoader d;
        dataloader_open(&d, all, 1000, 8, 2, false, false, 1, "train");
        print[i] = d.fingerprint;
        dataloader_close(&d);
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < i; j++) expect_true(t, print[i] != print[j], "cases %d and %d have the same fingerprint", i, j);
    expect_true(t, print[4] == print[0], "the first case again has another fingerprint");
    folder_remove(&f);
}

// ---------------------------------------------------------------------------------------------------------------
// Bad files

static void expect_open_dies(Test *t, const char *pattern, int64_t vocab, int64_t T, int64_t G, const char *const *parts, int n_parts) {
    OpenCase c = {pattern, vocab, T, G, 0, 0, false};
    expect_dies_parts(t, EXIT_DATA, parts, n_parts, open_case, &c);
}

// Each bit of the words that mean something, and a bit of each byte of the others: refused naming the file, or no change.
static void test_data_header_flips(Test *t) {
    TestFolder f = folder_make();
    char path[1024];
    folder_file(&f, path, "a.bin");
    for (int token_bytes = 2; token_bytes <= 4; token_bytes += 2) {
        uint8_t *bytes;
        int64_t size = shard_bytes(&bytes, 0, 65, token_bytes, 300);
        int refused = 0;
        Shard shard = {path, size, 0, 0, 0, 0};
        char why[DATA_WHY_BYTES];
        for (int at = 0; at < DATA_HEADER_BYTES; at++)
            for (int bit = 0; bit < 8; bit++) {
                bytes[at] ^= (uint8_t)(1 << bit);
                bool good = data_header_read(&shard, bytes, size, 300, why);
                if (at < 12) expect_true(t, !good, "bit %d of header byte %d flipped, and accepted", bit, at);
                if (good) expect_true(t, shard.n_tokens == 65 && shard.token_bytes == token_bytes, "bit %d of header byte %d changes the tokens", bit, at);
                else { refused++; expect_contains(t, "refusal", why, path); }
                bytes[at] ^= (uint8_t)(1 << bit);
            }
        expect_true(t, refused >= 96 && refused <= 128, "%d flips refused; 96 of magic, version and count must be", refused);
        bytes[1] ^= 1; // and through the front door
        file_put(path, bytes, size);
        const char *parts[] = {"train_gpt.data.train", path, "first word"};
        expect_open_dies(t, path, 300, 8, 2, parts, 3);
        free(bytes);
    }
    folder_remove(&f);
}

static void test_data_bad_sizes(Test *t) {
    TestFolder f = folder_make();
    char path[1024];
    folder_file(&f, path, "a.bin");
    uint8_t *bytes;
    int64_t size = shard_bytes(&bytes, 0, 100, 2, 300);
    const struct { int64_t size; const char *part; } cut[] = {{size - 1, "header counts 100 tokens of 2 bytes, so the file must have 1224 bytes, but it has 1223"},
        {DATA_HEADER_BYTES, "but it has 1024"}, {DATA_HEADER_BYTES - 1, "has 1023 bytes, fewer than the 1024"}, {1, "has 1 bytes"}, {0, "is empty"}};
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
        file_put(path, bytes, cut[i].size);
        const char *parts[] = {path, cut[i].part};
        expect_open_dies(t, path, 300, 8, 2, parts, 2);
    }
    free(bytes);
    // 32-bit tokens under the 16-bit magic and the reverse
    for (int token_bytes = 2; token_bytes <= 4; token_bytes += 2) {
        size = shard_bytes(&bytes, 0, 100, token_bytes, 300);
        int32_t wrong[2] = {token_bytes == 4 ? DATA_MAGIC_16 : DATA_MAGIC_32, token_bytes == 4 ? DATA_VERSION_16 : DATA_VERSION_32};
        memcpy(bytes, wrong, sizeof wrong);
        file_put(path, bytes, size);
        const char *parts[] = {path, "look like the other width"};
        expect_open_dies(t, path, 300, 8, 2, parts, 2);
        free(bytes);
    }
    // a count of 0, and a negative one
    size = shard_bytes(&bytes, 0, 100, 2, 300);
    for (int32_t count = 0; count >= -1; count--) {
        memcpy(bytes + 8, &count, 4);
        file_put(path, bytes, size);
        const char *parts[] = {path, count ? "counts -1 tokens" : "counts 0 tokens"};
        expect_open_dies(t, path, 300, 8, 2, parts, 2);
    }
    // a vocabulary written by data/prepare.py that is not the model's
    int32_t n = 100, vocab = 50257;
    memcpy(bytes + 8, &n, 4);
    memcpy(bytes + 12, &vocab, 4);
    file_put(path, bytes, size);
    const char *parts[] = {path, "vocabulary of 50257", "has 300"};
    expect_open_dies(t, path, 300, 8, 2, parts, 3);
    DataLoader d;
    dataloader_open(&d, path, 50304, 8, 2, false, false, 1, "train"); // padded to a multiple of 128
    expect_equal_i64(t, "tokens", d.total_tokens, 100);
    dataloader_close(&d);
    free(bytes);
    folder_remove(&f);
}

// One bad token: first, last, anywhere, in a later file, in a later chunk of the check at the start.
static void test_data_token_range(Test *t) {
    TestFolder f = folder_make();
    char path[1024], all[1024], part[96];
    folder_file(&f, all, "*.bin");
    const int64_t at[] = {0, 57, 98, 99};
    for (int token_bytes = 2; token_bytes <= 4; token_bytes += 2)
        for (int i = 0; i < 4; i++) {
            uint8_t *bytes;
            int64_t size = shard_bytes(&bytes, 100, 100, token_bytes, 211), offset = DATA_HEADER_BYTES + at[i] * token_bytes;
            uint32_t bad = i == 2 && token_bytes == 4 ? 0xffffffffu : 211; // the size of the vocabulary, and a negative int32
            shard_put(folder_file(&f, path, "a.bin"), 0, 100, token_bytes, 211);
            memcpy(bytes + offset, &bad, (size_t)token_bytes);
            file_put(folder_file(&f, path, "b.bin"), bytes, size);
            snprintf(part, sizeof part, "token %" PRId64 " (at byte %" PRId64 ") is %u, outside the vocabulary of 211", at[i], offset, bad);
            const char *parts[] = {path, part};
            expect_open_dies(t, all, 211, 8, 2, parts, 2);
            if (bad == 211) { // and it is the vocabulary that decides
                DataLoader d;
                dataloader_open(&d, all, 212, 8, 2, false, false, 1, "train");
                expect_equal_i64(t, "tokens with a vocabulary of 212", d.total_tokens, 200);
                dataloader_close(&d);
            }
            free(bytes);
        }
    // a text of three chunks: byte 211 in the third one, and 212 later, which is not the first
    int64_t size = 2 * DATA_CHUNK_TOKENS + 1000;
    char *text = (char *)host_alloc((size_t)size);
    memset(text, 'a', (size_t)size);
    text[2 * DATA_CHUNK_TOKENS + 77] = (char)211;
    text[2 * DATA_CHUNK_TOKENS + 500] = (char)212;
    file_put(folder_file(&f, path, "long.txt"), text, size);
    const char *parts[] = {path, "token 2097229 (at byte 2097229) is 211, outside the vocabulary of 211", "needs a vocabulary of 256"};
    expect_open_dies(t, path, 211, 8, 2, parts, 3);
    free(text);
    folder_remove(&f);
}

// Names that are no data: each is refused at once, by name; a FIFO or a device must not block the opening.
static void test_data_bad_files(Test *t) {
    TestFolder f = folder_make();
    char path[1024], target[1024];
    struct { const char *name; const char *part; } kinds[] = {{"missing.bin", "there is no file"}, {"missing*.bin", "no file matches"}, {"folder.bin", "is a folder"},
        {"fifo.bin", "is not a regular file"}, {"loop.bin", "symbolic link"}, {"dangling.bin", "No such file"}, {"zero.bin", "is not a regular file"},
        {"empty.txt", "is empty"}, {"noise.bin", "first word is"}, {"notes.md", "must be a token shard (.bin) or a text (.txt)"}, {"model.bin", "this is an llm.c model"}};
    CHECK(mkdir(folder_file(&f, path, "folder.bin"), 0700) == 0, "mkdir: %s", strerror(errno));
    CHECK(mkfifo(folder_file(&f, path, "fifo.bin"), 0600) == 0, "mkfifo: %s", strerror(errno));
    CHECK(symlink("loop.bin", folder_file(&f, path, "loop.bin")) == 0, "symlink: %s", strerror(errno));
    CHECK(symlink("nowhere", folder_file(&f, path, "dangling.bin")) == 0, "symlink: %s", strerror(errno));
    CHECK(symlink("/dev/zero", folder_file(&f, path, "zero.bin")) == 0, "symlink: %s", strerror(errno));
    file_put(folder_file(&f, path, "empty.txt"), "", 0);
    int32_t words[512] = {20240326, 3};
    file_put(folder_file(&f, path, "model.bin"), words, sizeof words);
    for (int i = 0; i < 512; i++) words[i] = (int32_t)rng_bits(1, 1, (uint64_t)i);
    file_put(folder_file(&f, path, "noise.bin"), words, sizeof words);
    file_put(folder_file(&f, path, "notes.md"), "# no", 4);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const char *parts[] = {"train_gpt.data.train", folder_file(&f, path, kinds[i].name), kinds[i].part};
        expect_open_dies(t, path, 256, 8, 2, parts, 3);
    }
    shard_put(folder_file(&f, path, "locked.bin"), 0, 100, 2, 256);
    CHECK(chmod(path, 0) == 0 && chmod(f.path, 0755) == 0, "chmod: %s", strerror(errno));
    const char *locked[] = {path, "Permission denied"};
    OpenCase c = {path, 256, 8, 2, 0, 0, true};
    expect_dies_parts(t, EXIT_DATA, locked, 2, open_case, &c);
    // one bad file among good ones; a text among shards; names with control bytes are escaped; a link to a good file is one
    shard_put(folder_file(&f, target, "good_1.bin"), 0, 100, 2, 256);
    file_put(folder_file(&f, path, "good_2.bin"), "", 0);
    const char *empty[] = {path, "is empty"};
    expect_open_dies(t, folder_file(&f, target, "good_*.bin"), 256, 8, 2, empty, 2);
    file_put(folder_file(&f, path, "good_2.txt"), "text", 4);
    remove(folder_file(&f, path, "good_2.bin"));
    const char *mixed[] = {"good_2.txt", "mixes texts"};
    expect_open_dies(t, folder_file(&f, target, "good_*"), 256, 8, 2, mixed, 2);
    file_put(folder_file(&f, path, "red\033[31m.bin"), "x", 1);
    const char *escaped[] = {"red\\x1b[31m.bin: has 1 bytes"};
    expect_open_dies(t, path, 256, 8, 2, escaped, 1);
    CHECK(symlink("good_1.bin", folder_file(&f, path, "link[1].bin")) == 0, "symlink: %s", strerror(errno)); // a pattern that is a name
    DataLoader d;
    dataloader_open(&d, path, 256, 8, 2, false, false, 1, "train");
    expect_stream_batch(t, &d, 0, 12, 256);
    dataloader_close(&d);
    folder_remove(&f);
}

// Sets that are too small say what is needed and what is there; the smallest that is enough works.
static void test_data_tiny_sets(Test *t) {
    TestFolder f = folder_make();
    char path[1024];
    folder_file(&f, path, "a.bin");
    const struct { int64_t n, T, G; const char *found, *needed; } small[] = {{1, 8, 1, "has 1 tokens", "needs 9;"}, {8, 8, 1, "has 8 tokens", "needs 9;"},
        {32, 8, 4, "has 32 tokens", "needs 33;"}, {2, 1, 2, "has 2 tokens", "needs 3;"}};
    for (size_t i = 0; i < sizeof small / sizeof *small; i++) {
        shard_put(path, 0, small[i].n, 2, 256);
        const char *parts[] = {path, small[i].found, small[i].needed};
        expect_open_dies(t, path, 256, small[i].T, small[i].G, parts, 3);
        shard_put(path, 0, small[i].n + (i == 0 ? 8 : 1), 2, 256);
        DataLoader d;
        dataloader_open(&d, path, 256, small[i].T, small[i].G, true, true, 1, "train");
        expect_equal_i64(t, "samples", d.samples_per_epoch, small[i].G);
        dataloader_close(&d);
    }
    folder_remove(&f);
}

// Text: bytes are bytes, with NUL, CRLF and invalid UTF-8, with and without a last line's end.
static void test_data_text(Test *t) {
    TestFolder f = folder_make();
    char path[1024];
    uint8_t text[8 * 64 + 1];
    for (int i = 0; i < (int)sizeof text; i++) text[i] = (uint8_t)(i * 7); // every byte value twice
    memcpy(text, "\r\n\0\xff\xfe\n", 6);
    file_put(folder_file(&f, path, "a.txt"), text, sizeof text);
    DataLoader d;
    dataloader_open(&d, path, 256, 64, 4, false, false, 1, "train");
    int32_t tokens[8 * 64], targets[8 * 64];
    dataloader_fetch(&d, 0, 8, tokens, targets);
    for (int i = 0; i < 8 * 64; i++) {
        expect_equal_i64(t, "byte", tokens[i], text[i]);
        expect_equal_i64(t, "next byte", targets[i], text[i + 1]);
    }
    dataloader_close(&d);
    folder_remove(&f);
}

// Offsets beyond 4 GiB: a sparse text with marks behind 2^32 and at its end; too large for the check at the start, so a
// byte outside the vocabulary is found when it is read.
static void test_data_huge_text(Test *t) {
    const int64_t size = (int64_t)5 << 30, T = 1000, mark[] = {((int64_t)1 << 32) + 12345, (int64_t)5 * 1000 * 1000 * 1000, size - 3};
    TestFolder f = folder_make();
    char path[1024];
    int fd = open(folder_file(&f, path, "a.txt"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    bool made = fd >= 0 && ftruncate(fd, size) == 0;
    for (int i = 0; i < 3 && made; i++) made = pwrite(fd, "\xee", 1, mark[i]) == 1;
    if (made) {
        DataLoader d;
        double start = clock_seconds();
        dataloader_open(&d, path, 256, T, 8, false, false, 1, "train");
        expect_true(t, clock_seconds() - start < 5, "opening took %.1f s; a set of this size must not be read whole", clock_seconds() - start);
        expect_equal_i64(t, "tokens", d.total_tokens, size);
        int32_t *tokens = (int32_t *)host_alloc((size_t)T * 4), *targets = (int32_t *)host_alloc((size_t)T * 4);
        for (int i = 0; i < 3; i++) {
            int64_t sample = mark[i] / T;
            if (sample >= d.n_samples) continue; // among the last (N-1) mod T tokens
            dataloader_fetch(&d, sample, 1, tokens, targets);
            for (int64_t k = 0; k < T; k++) expect_equal_i64(t, "byte behind 2^32", tokens[k], sample * T + k == mark[i] ? 0xee : 0);
        }
        free(tokens);
        free(targets);
        dataloader_close(&d);
        OpenCase c = {path, 200, T, 8, mark[0] / T, 1, false};
        expect_dies(t, EXIT_DATA, "token 4294979641 (at byte 4294979641) is 238, outside the vocabulary of 200", open_case, &c);
    } else test_skip(t, "no room for a sparse file of 5 GiB: %s", strerror(errno));
    if (fd >= 0) close(fd);
    folder_remove(&f);
}

// ---------------------------------------------------------------------------------------------------------------
// Files that change or fail while they are read

typedef enum { HARM_CUT, HARM_DELETE, HARM_GROW, HARM_TOKEN, HARM_EIO, HARM_EIO_ONCE, HARM_ENXIO } Harm;
typedef struct {
    const TestFolder *folder;
    Harm harm;
    bool ahead; // through the prefetch thread
} HarmCase;

static ssize_t read_eio(int, void *, size_t, off_t) { errno = EIO; return -1; }
static ssize_t read_enxio(int, void *, size_t, off_t) { errno = ENXIO; return -1; }
static int failing_reads; // how many of the next reads fail; a hook for read_at has no other way to know
static ssize_t read_flaky(int fd, void *dst, size_t bytes, off_t offset) {
    if (failing_reads-- > 0) { errno = failing_reads % 2 ? EIO : ESTALE; return -1; }
    return pread(fd, dst, bytes > 7 ? 7 : bytes, offset); // and short reads, as the system may give
}

static void harm_case(void *arg) {
    const HarmCase *c = (const HarmCase *)arg;
    char path[1024];
    uint16_t bad = 60000;
    DataLoader d;
    int32_t tokens[4 * 8], targets[4 * 8];
    dataloader_open(&d, folder_file(c->folder, path, "*.bin"), 256, 8, 4, false, false, 1, "train_gpt.data.train");
    dataloader_fetch(&d, 0, 4, tokens, targets); // the first file only
    folder_file(c->folder, path, "b.bin");
    if (c->harm == HARM_CUT && truncate(path, DATA_HEADER_BYTES + 33) != 0) die(EXIT_INTERNAL, "truncate: %s", strerror(errno));
    if (c->harm == HARM_GROW && truncate(path, 1 << 20) != 0) die(EXIT_INTERNAL, "truncate: %s", strerror(errno));
    if (c->harm == HARM_DELETE && remove(path) != 0) die(EXIT_INTERNAL, "remove: %s", strerror(errno));
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (c->harm == HARM_TOKEN && pwrite(fd, &bad, 2, DATA_HEADER_BYTES + 2 * 11) != 2) die(EXIT_INTERNAL, "pwrite: %s", strerror(errno));
    if (c->harm == HARM_EIO) d.files.read_at = read_eio;
    if (c->harm == HARM_ENXIO) d.files.read_at = read_enxio;
    if (c->ahead) dataloader_prefetch(&d, 8, 4);
    dataloader_fetch(&d, 4, 2, tokens, targets); // still the first file, and not what was asked for
    dataloader_fetch(&d, 8, 4, tokens, targets);
}

static void test_data_harm(Test *t) {
    char path[1024];
    const struct { Harm harm; const char *file, *part; } harms[] = {{HARM_CUT, "b.bin", "has 1057 bytes now, but had 1224 when the run began"}, {HARM_DELETE, "b.bin", "cannot be opened any more: No such file"},
        {HARM_GROW, "b.bin", "has 1048576 bytes now"}, {HARM_TOKEN, "b.bin", "token 11 (at byte 1046) is 60000, outside the vocabulary of 256"},
        {HARM_ENXIO, "a.bin", "(1 tries)"}, {HARM_EIO, "a.bin", "Input/output error (3 tries)"}};
    for (size_t i = 0; i < sizeof harms / sizeof *harms; i++)
        for (int ahead = 0; ahead < 2; ahead++) {
            TestFolder f = folder_make();
            shard_put(folder_file(&f, path, "a.bin"), 0, 70, 2, 256);
            shard_put(folder_file(&f, path, "b.bin"), 70, 100, 2, 256);
            HarmCase c = {&f, harms[i].harm, ahead == 1};
            const char *parts[] = {"train_gpt.data.train", harms[i].file, harms[i].part};
            expect_dies_parts(t, EXIT_DATA, parts, 3, harm_case, &c);
            folder_remove(&f);
        }
}

// A file cut while it is held open ends in a line with the place; reads that fail twice and then work change nothing.
static void cut_while_open(void *arg) {
    DataLoader d;
    int32_t tokens[4 * 8], targets[4 * 8];
    dataloader_open(&d, (const char *)arg, 256, 8, 4, false, false, 1, "train_gpt.data.train");
    dataloader_fetch(&d, 0, 1, tokens, targets);
    if (truncate((const char *)arg, DATA_HEADER_BYTES + 150) != 0) die(EXIT_INTERNAL, "truncate: %s", strerror(errno));
    dataloader_fetch(&d, 8, 4, tokens, targets);
}

static void test_data_flaky(Test *t) {
    TestFolder f = folder_make();
    char path[1024];
    shard_put(folder_file(&f, path, "a.bin"), 0, 100, 2, 256);
    DataLoader d;
    dataloader_open(&d, path, 256, 8, 4, false, false, 1, "train");
    d.files.read_at = read_flaky;
    failing_reads = 2;
    expect_stream_batch(t, &d, 0, 1, 256);
    expect_true(t, failing_reads < 0, "%d failures were not met", failing_reads);
    expect_stream_batch(t, &d, 4, 6, 256);
    expect_true(t, d.wait_seconds > 0.2, "waited %.3f s, but two failing reads pause for more than 0.2 s", d.wait_seconds);
    dataloader_close(&d);
    const char *parts[] = {path, "ends at byte 1174, but had 1224 bytes"};
    expect_dies_parts(t, EXIT_DATA, parts, 2, cut_while_open, path);
    folder_remove(&f);
}

// ---------------------------------------------------------------------------------------------------------------
// Tokenizer

// A tokenizer file of the given strings, on the heap; null ends the list. lengths of strings are those of C.
static uint8_t *tokenizer_bytes(const char *const *string, int version, int32_t end_of_text, int64_t *size) {
    int32_t header[256] = {TOKENIZER_MAGIC, version, 0, end_of_text};
    *size = TOKENIZER_HEADER_BYTES;
    for (int i = 0; string[i]; i++) { header[2]++; *size += 1 + (int64_t)strlen(string[i]); }
    uint8_t *bytes = (uint8_t *)host_alloc((size_t)*size), *at = bytes + TOKENIZER_HEADER_BYTES;
    memcpy(bytes, header, sizeof header);
    for (int i = 0; string[i]; i++) {
        size_t n = strlen(string[i]);
        *at++ = (uint8_t)n;
        memcpy(at, string[i], n);
        at += n;
    }
    return bytes;
}

static const char *const LITTLE_VOCAB[] = {"a", "b", "c", " ", "'", "s", "\xc3", "\xa9", "ab", " a", "abc", "'s", "\xc3\xa9", " ab", "<|endoftext|>", "zz", NULL};

static void test_tokenizer_strings(Test *t) {
    int64_t size;
    char why[TOKENIZER_WHY_BYTES] = "";
    Tokenizer k;
    uint8_t *bytes = tokenizer_bytes(LITTLE_VOCAB, 2, 14, &size);
    bool ok = tokenizer_load(&k, bytes, size, 16, why);
    expect_true(t, ok, "refused: %s", why);
    if (!ok) return;
    expect_equal_i64(t, "end of text", k.end_of_text, 14);
    // worked by hand: words are cut before blanks and apostrophes; the pair of the lowest token is joined first
    const struct { const char *text; int n; int32_t token[8]; } cases[] = {{"", 0, {}}, {"abc", 1, {10}}, {"abcab", 2, {10, 8}}, {"ab abc", 3, {8, 3, 10}}, {"aab", 2, {0, 8}},
        {"a's", 2, {0, 11}}, {"s's", 2, {5, 11}}, {"\xc3\xa9" "a", 2, {12, 0}}, {"\xc3 ", 2, {6, 3}}, {"  a", 2, {3, 9}}, {"   ", 3, {3, 3, 3}}, {"zz", 1, {15}}, {"azz", 2, {0, 15}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t token[16];
        int64_t n = tokenizer_encode(&k, cases[i].text, (int64_t)strlen(cases[i].text), token);
        expect_equal_i64(t, cases[i].text, n, cases[i].n);
        for (int j = 0; j < cases[i].n && j < n; j++) expect_equal_i64(t, cases[i].text, token[j], cases[i].token[j]);
        TokenText text = {};
        for (int64_t j = 0; j < n; j++) tokenizer_decode_append(&k, token[j], &text);
        expect_equal_i64(t, "bytes of the text again", text.length, (int64_t)strlen(cases[i].text));
        if (n > 0) expect_same_bytes(t, "the text again", text.data, cases[i].text, text.length);
        free(text.data);
    }
    int32_t token[32];
    expect_equal_i64(t, "a byte without a token", tokenizer_encode(&k, "ab x", 4, token), -1 - 2);
    expect_equal_i64(t, "the name of the end of text", tokenizer_encode(&k, "<|endoftext|>", 13, token), -1);
    TokenText text = {};
    tokenizer_decode_append(&k, 14, &text);
    tokenizer_decode_append(&k, 99, &text);
    tokenizer_decode_append(&k, -1, &text);
    token_text_append(&text, "", 1);
    expect_equal_text(t, "special, outside and negative tokens", text.data, "<|endoftext|><|99|><|-1|>");
    free(text.data);
    tokenizer_close(&k);
}

// Words as GPT-2's pattern cuts them (the cuts below are those of the regex and tokenizers packages).
static void test_tokenizer_words(Test *t) {
    const char *const cut[][12] = {{"Hello", " world", "!", NULL}, {"I", "'m", " sure", " they", "'ll", " say", " '", "tis", NULL}, {"a", "   ", " b", NULL}, {"a", " ", "\n", "b", NULL},
        {"x", "   ", NULL}, {"1234", "abc", "56", NULL}, {" 12", "ab", NULL}, {"na\xc3\xafve", " caf\xc3\xa9", NULL}, {"\xe4\xbd\xa0\xe5\xa5\xbd", "\xef\xbc\x81", NULL},
        {"\xc2\xbd", "x", NULL}, {"a", "\xc2\xa0", "b", NULL}, {"a", " ", "\xc2\xa0", "b", NULL}, {"'", "S", NULL}, {"...", "\n\n", NULL}, {"\n", "\n", "a", NULL}, {"\t", "\tb", NULL}};
    for (size_t i = 0; i < sizeof cut / sizeof *cut - 1; i++) {
        char whole[128] = "";
        for (int j = 0; cut[i][j]; j++) strcat(whole, cut[i][j]);
        int64_t at = 0, length = (int64_t)strlen(whole);
        for (int j = 0; cut[i][j]; j++) {
            char word[128] = "";
            int64_t n = at < length ? tokenizer_word(whole + at, length - at) : 0;
            memcpy(word, whole + at, (size_t)n);
            expect_equal_text(t, whole, word, cut[i][j]);
            at += n;
        }
        expect_equal_i64(t, "bytes cut", at, length);
    }
}

// Every way to damage the file is refused with a reason: each cut, each header bit, a length that points beyond the end.
static void test_tokenizer_damage(Test *t) {
    int64_t size, n;
    char why[TOKENIZER_WHY_BYTES];
    Tokenizer k;
    for (int64_t cut = 0; ; cut++) {
        uint8_t *bytes = tokenizer_bytes(LITTLE_VOCAB, 2, 14, &size);
        if (cut == size) { free(bytes); break; }
        why[0] = 0;
        bool ok = tokenizer_load(&k, bytes, cut, 16, why);
        expect_true(t, !ok && why[0], "accepted when cut to %" PRId64 " of %" PRId64 " bytes", cut, size);
    }
    for (int at = 0; at < 16; at++)
        for (int bit = 0; bit < 8; bit++) {
            uint8_t *bytes = tokenizer_bytes(LITTLE_VOCAB, 2, 14, &size);
            bytes[at] ^= (uint8_t)(1 << bit);
            why[0] = 0;
            bool ok = tokenizer_load(&k, bytes, size, 16, why);
            if (ok) { expect_true(t, k.n_tokens == 16, "bit %d of byte %d changes the tokens", bit, at); tokenizer_close(&k); }
            else expect_true(t, why[0] != 0, "refused without a reason");
            if (at < 12 && !(at == 4 && ok)) expect_true(t, !ok, "bit %d of header byte %d flipped, and accepted", bit, at);
        }
    uint8_t *bytes = tokenizer_bytes(LITTLE_VOCAB, 2, 14, &size);
    bytes[size - 3] = 255; // the last string's length
    expect_true(t, !tokenizer_load(&k, bytes, size, 16, why), "a string beyond the end was accepted");
    expect_contains(t, "reason", why, "within token 15 of 16");
    bytes = tokenizer_bytes(LITTLE_VOCAB, 2, 14, &size);
    expect_true(t, !tokenizer_load(&k, bytes, size, 15, why), "a vocabulary of 15 took 16 tokens");
    bytes = tokenizer_bytes(LITTLE_VOCAB, 2, 14, &size);
    expect_true(t, !tokenizer_load(&k, bytes, size, 129, why), "a vocabulary of 129 took 16 tokens");
    bytes = tokenizer_bytes(LITTLE_VOCAB, 1, 0, &size);
    expect_true(t, tokenizer_load(&k, bytes, size, 128, why) && k.end_of_text == -1, "version 1, padded vocabulary: %s", why);
    n = k.n_tokens;
    expect_equal_i64(t, "tokens", n, 16);
    tokenizer_close(&k);
}

static void open_tokenizer(void *arg) {
    Tokenizer k;
    tokenizer_open(&k, (const char *)arg, 50257);
}

static void test_tokenizer_open(Test *t) {
    TestFolder f = folder_make();
    char path[1024];
    int64_t size;
    uint8_t *bytes = tokenizer_bytes(LITTLE_VOCAB, 2, 14, &size);
    file_put(folder_file(&f, path, "little.bin"), bytes, size);
    free(bytes);
    const char *parts[] = {"train_gpt.data.tokenizer", path, "has 16 tokens, but the model's vocabulary has 50257"};
    expect_dies_parts(t, EXIT_DATA, parts, 3, open_tokenizer, path);
    const char *missing[] = {"none.bin", "No such file"};
    expect_dies_parts(t, EXIT_DATA, missing, 2, open_tokenizer, (void *)folder_file(&f, path, "none.bin"));
    CHECK(mkfifo(folder_file(&f, path, "fifo.bin"), 0600) == 0, "mkfifo: %s", strerror(errno));
    expect_dies(t, EXIT_DATA, "is not a regular file", open_tokenizer, path);
    Tokenizer k;
    tokenizer_open(&k, folder_file(&f, path, "little.bin"), 16);
    expect_equal_i64(t, "tokens", k.n_tokens, 16);
    tokenizer_close(&k);
    // no file: bytes, or numbers
    int32_t token[8];
    TokenText text = {};
    tokenizer_open(&k, "", 256);
    expect_equal_i64(t, "bytes of a text", tokenizer_encode(&k, "a\xff\n", 3, token), 3);
    expect_true(t, token[0] == 'a' && token[1] == 255 && token[2] == '\n', "tokens %d %d %d", token[0], token[1], token[2]);
    for (int i = 0; i < 3; i++) tokenizer_decode_append(&k, token[i], &text);
    expect_same_bytes(t, "bytes again", text.data, "a\xff\n", 3);
    tokenizer_close(&k);
    tokenizer_open(&k, "", 211);
    expect_equal_i64(t, "a byte outside a vocabulary of 211", tokenizer_encode(&k, "ab\xff", 3, token), -1 - 2);
    tokenizer_close(&k);
    tokenizer_open(&k, "", 50257);
    expect_equal_i64(t, "text without a tokenizer", tokenizer_encode(&k, "a", 1, token), -1);
    expect_equal_i64(t, "no text without a tokenizer", tokenizer_encode(&k, "", 0, token), 0);
    text.length = 0;
    tokenizer_decode_append(&k, 65, &text);
    token_text_append(&text, "", 1);
    expect_equal_text(t, "a token without a string", text.data, "<|65|>");
    free(text.data);
    tokenizer_close(&k);
    folder_remove(&f);
}

// What reaches a terminal: lines and whole characters; escapes are shown, not obeyed; an unfinished character waits.
static void test_tokenizer_print(Test *t) {
    const struct { const char *text; bool more; int64_t taken; const char *shown; } cases[] = {{"line\n\ttab", false, 9, "line\n\ttab"}, {"\033[31mred", false, 8, "\\x1b[31mred"},
        {"caf\xc3\xa9", false, 5, "caf\xc3\xa9"}, {"caf\xc3", true, 3, "caf"}, {"caf\xc3", false, 4, "caf\\xc3"}, {"\xf0\x9f\x99", true, 0, ""}, {"\xf0\x9f(", true, 3, "\\xf0\\x9f("},
        {"\xff\r", true, 2, "\\xff\\x0d"}, {"\xc2\x9b" "1m", false, 4, "\\xc2\\x9b1m"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *shown = NULL;
        size_t room = 0;
        FILE *out = open_memstream(&shown, &room);
        int64_t taken = tokenizer_print(out, cases[i].text, (int64_t)strlen(cases[i].text), cases[i].more);
        fclose(out);
        expect_equal_text(t, "shown", shown, cases[i].shown);
        expect_equal_i64(t, "bytes shown", taken, cases[i].taken);
        free(shown);
    }
}

static const TestRow data_tests[] = {
    {"tiling", test_data_tiling},
    {"wrap", test_data_wrap},
    {"split_and_prefetch", test_data_split_and_prefetch},
    {"long_samples", test_data_long_samples},
    {"permutation", test_data_permutation},
    {"shuffle", test_data_shuffle},
    {"many_shards", test_data_many_shards},
    {"fingerprint", test_data_fingerprint},
    {"header_flips", test_data_header_flips},
    {"bad_sizes", test_data_bad_sizes},
    {"token_range", test_data_token_range},
    {"bad_files", test_data_bad_files},
    {"tiny_sets", test_data_tiny_sets},
    {"text", test_data_text},
    {"huge_text", test_data_huge_text},
    {"harm", test_data_harm},
    {"flaky", test_data_flaky},
    {"tokenizer_strings", test_tokenizer_strings},
    {"tokenizer_words", test_tokenizer_words},
    {"tokenizer_damage", test_tokenizer_damage},
    {"tokenizer_open", test_tokenizer_open},
    {"tokenizer_print", test_tokenizer_print},
    {NULL, NULL},
};
