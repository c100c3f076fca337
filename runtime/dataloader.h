// dataloader.h - token files on disk become micro-batches.
//
// The files that match one pattern, sorted by name, form ONE stream of tokens: they are read as if they were
// concatenated, so that the cut into shards has no influence on training. Over the stream of N tokens lies a grid of
// samples of T tokens:
//
//     token     0       T       2T      3T          N-1
//               |-------|-------|-------|--- ... ---|
//     inputs     sample 0 sample 1 sample 2           sample i: tokens  [i*T,     (i+1)*T)
//     targets     one to the right of the inputs                targets [i*T + 1, (i+1)*T + 1)
//
// There are S = (N-1) / T samples; inputs tile the stream with no gap and no repeat, and only the last (N-1) mod T
// tokens are never an input. Training walks a counter s = 0, 1, 2, ... over epochs; update u of global batch G takes
// s = u*G .. u*G + G-1. An epoch has S samples, and an update may straddle two epochs; with drop_last an epoch has
// S/G*G samples, and no update does. With shuffle, each epoch has its own order: a keyed permutation that is computed
// and not stored. The counter alone names the sample, whatever the micro-batches, ranks and restarts.
//
// Files: llm.c's token shards (.bin: 1024 bytes of header, then 16-bit tokens, or 32-bit ones in the Llama 3 variant)
// and text (.txt: every byte is a token). What is refused at the start and what during the run is in the functions'
// comments; every message names the configuration key, the file, the place and the numbers.
//
// Invariants:
//   1. Files are read with pread and never mapped: a file that gets shorter is an error line, not a SIGBUS.
//   2. At most DATA_OPEN_FILES descriptors are held, however many shards there are.
//   3. No token outside the vocabulary leaves this file: each batch is checked when read. A set of at most
//      DATA_SCAN_TOKENS is checked as a whole at the start, so that a bad token is found before hours have passed.
//   4. The prefetch thread and the caller never read at the same time: `state` says whose turn it is.
#pragma once
#include "utils.h"
#include <glob.h>
#include <pthread.h>
#include <signal.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum {
    DATA_HEADER_BYTES = 1024,
    DATA_MAGIC_16 = 20240520, DATA_VERSION_16 = 1, // llm.c's GPT-2 shards: uint16 tokens
    DATA_MAGIC_32 = 20240801, DATA_VERSION_32 = 7, // llm.c's Llama 3 shards: uint32 tokens
    DATA_OPEN_FILES = 8,
    DATA_SCAN_TOKENS = 256 << 20,
    DATA_CHUNK_TOKENS = 1 << 20,                   // unit of work of the check at the start
    DATA_SCAN_THREADS = 16,                        // each holds one descriptor
    DATA_READ_TRIES = 3,
    DATA_WHY_BYTES = 1536,
};

typedef struct {
    char *path;
    int64_t size_bytes;   // of the file, when it was opened first; a file that changes its size is refused
    int64_t first_token;  // position in the stream
    int64_t n_tokens;
    int64_t body_bytes;   // offset of the first token in the file
    int token_bytes;      // 1, 2 or 4
} Shard;

typedef struct {
    int fd;               // -1 = free
    int64_t shard;
    int64_t last_use;     // of DataLoader.uses; the smallest one is closed first
} OpenShard;

typedef enum { PREFETCH_IDLE, PREFETCH_BUSY, PREFETCH_READY } PrefetchState;

typedef struct DataLoader {
    char key[64];                     // configuration key, for messages
    int64_t vocab_size, seq_len, global_batch;
    bool shuffle, drop_last;
    uint64_t seed;
    Shard *shard;
    int64_t n_shards;
    int64_t total_tokens;             // of the stream
    int64_t n_samples;                // S: samples in the stream
    int64_t samples_per_epoch;        // S, or the largest multiple of the global batch in it (drop_last)
    uint64_t fingerprint;             // of names, sizes, headers and contents; equal on every rank and across restarts
    double wait_seconds;              // time that dataloader_fetch has kept its caller waiting, in total
    ssize_t (*read_at)(int fd, void *dst, size_t bytes, off_t offset); // pread; tests put a failing one here
    // Reading (whoever's turn it is)
    OpenShard open[DATA_OPEN_FILES];
    int64_t uses;
    uint8_t *raw;                     // (T+1) * 4 bytes
    int32_t *window;                  // T+1 tokens of one sample
    // Prefetch; all of it under `lock`, but the buffers, which belong to the thread while BUSY and to the caller otherwise
    pthread_t thread;
    bool thread_runs, thread_ends;
    pthread_mutex_t lock;             // without it, the caller could see READY before the tokens
    pthread_cond_t changed;           // `state` or `thread_ends` has changed
    PrefetchState state;
    int64_t ahead_first, ahead_n;     // the request, in samples
    int32_t *ahead_tokens, *ahead_targets; // (ahead_room, T)
    int64_t ahead_room;
    bool ahead_ok;
    char ahead_why[DATA_WHY_BYTES];
} DataLoader;

// ---------------------------------------------------------------------------------------------------------------
// Messages

static const char *data_show(char *dst, size_t room, const char *path) { return text_escape(dst, room, path, strlen(path)); }

PRINTF_LIKE(3, 4) static bool data_refuse(char *why, const char *path, const char *format, ...) {
    char shown[768];
    int n = snprintf(why, DATA_WHY_BYTES, "%s: ", data_show(shown, sizeof shown, path));
    va_list args;
    va_start(args, format);
    vsnprintf(why + n, DATA_WHY_BYTES - (size_t)n, format, args);
    va_end(args);
    return false;
}

// ---------------------------------------------------------------------------------------------------------------
// The order of samples

// Position i of a permutation of 0..n-1 chosen by key: a Feistel network (Luby and Rackoff 1988, "How to construct
// pseudorandom permutations from pseudorandom functions") over the smallest even number of bits that holds n, applied
// again while the result lies outside (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
// The domain is at most 4n, so that fewer than four rounds of walking are needed on average. No memory, O(1) time.
static int64_t data_permute(int64_t i, int64_t n, uint64_t key) {
    int half = 1;
    while (half < 31 && ((int64_t)1 << (2 * half)) < n) half++;
    uint64_t mask = ((uint64_t)1 << half) - 1, x = (uint64_t)i;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < 8; round++) {
            uint64_t mixed = left ^ (rng_bits(key, round, right) & mask);
            left = right;
            right = mixed;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

// Epoch of sample counter s.
static inline int64_t dataloader_epoch(const DataLoader *d, int64_t s) { return s / d->samples_per_epoch; }

// Place in the stream, in samples, of sample counter s.
static int64_t dataloader_sample_index(const DataLoader *d, int64_t s) {
    int64_t i = s % d->samples_per_epoch;
    if (!d->shuffle) return i;
    return data_permute(i, d->n_samples, rng_bits(d->seed, text_hash("dataloader.shuffle"), (uint64_t)dataloader_epoch(d, s)));
}

// ---------------------------------------------------------------------------------------------------------------
// Headers

static bool data_name_ends(const char *path, const char *end) {
    size_t a = strlen(path), b = strlen(end);
    return a > b && strcmp(path + a - b, end) == 0;
}

// Fills the shard from the header of a .bin file of size_bytes, or says why it is refused. Header words: [0] magic,
// [1] version, [2] number of tokens, [3] size of the vocabulary that the tokens come from (an extension of data/prepare.py;
// 0, as in llm.c's files, = unknown). The other words have no meaning here, nor in llm.c.
static bool data_header_read(Shard *shard, const uint8_t header[DATA_HEADER_BYTES], int64_t size_bytes, int64_t vocab_size, char *why) {
    int32_t word[4];
    memcpy(word, header, sizeof word);
    bool wide = word[0] == DATA_MAGIC_32;
    if (!wide && word[0] != DATA_MAGIC_16)
        return data_refuse(why, shard->path, "first word is %d, but a token shard begins with %d (16-bit) or %d (32-bit)%s", word[0], DATA_MAGIC_16, DATA_MAGIC_32,
                           word[0] == 20240326 || word[0] == 20240803 ? ": this is an llm.c model" : word[0] == 20240328 ? ": this is an llm.c tokenizer"
                           : word[0] == 20240522 ? ": this is an llm.c evaluation set" : memcmp(header, "BIN.TOK\n", 8) == 0 ? ": this is an LLM.Q token file"
                           : "; data/prepare.py makes shards from text");
    int version = wide ? DATA_VERSION_32 : DATA_VERSION_16, token_bytes = wide ? 4 : 2;
    if (word[1] != version) return data_refuse(why, shard->path, "version %d of the %d-bit token format, but only version %d is known", word[1], 8 * token_bytes, version);
    int64_t count = word[2], body = size_bytes - DATA_HEADER_BYTES;
    if (count <= 0) return data_refuse(why, shard->path, "header counts %" PRId64 " tokens, must be at least 1", count);
    if (body != count * token_bytes)
        return data_refuse(why, shard->path, "header counts %" PRId64 " tokens of %d bytes, so the file must have %" PRId64 " bytes, but it has %" PRId64 "%s", count, token_bytes,
                           DATA_HEADER_BYTES + count * token_bytes, size_bytes, body == count * (6 - token_bytes) ? ": its tokens look like the other width" : "; it was cut or is damaged, make it again");
    if (word[3] != 0 && (vocab_size < word[3] || vocab_size > round_up(word[3], 128))) // a model may pad its vocabulary to a multiple of 128
        return data_refuse(why, shard->path, "made with a vocabulary of %d tokens, but the model's has %" PRId64 "; use the shards of the model's tokenizer, or set train_gpt.model.vocab_size=%d", word[3], vocab_size, word[3]);
    shard->token_bytes = token_bytes;
    shard->body_bytes = DATA_HEADER_BYTES;
    shard->n_tokens = count;
    return true;
}

// ---------------------------------------------------------------------------------------------------------------
// Reading

// True for errors of the medium or the network that may pass; the caller opens the file again.
static bool data_error_may_pass(int error) { return error == EIO || error == ESTALE || error == ETIMEDOUT || error == EAGAIN; }

static void data_pause(int tries) { // before try number `tries`
    struct timespec t = {tries == 1 ? 0 : 1, tries == 1 ? 200000000 : 0};
    nanosleep(&t, NULL);
}

// Opens a shard and insists on the size that it had at the start.
static int data_open_again(const Shard *shard, char *why) {
    int64_t size = 0;
    char reason[128];
    int fd = file_open_read(shard->path, true, &size, reason, sizeof reason);
    if (fd < 0) {
        int error = errno; // the caller decides by it
        data_refuse(why, shard->path, "cannot be opened any more: %s", reason);
        errno = error;
        return -1;
    }
    if (size != shard->size_bytes) {
        data_refuse(why, shard->path, "has %" PRId64 " bytes now, but had %" PRId64 " when the run began; do not change data files during a run", size, shard->size_bytes);
        close(fd);
        errno = 0;
        return -1;
    }
    return fd;
}

// Reads exactly `bytes` at `offset` through a descriptor of its own, with DATA_READ_TRIES tries where trying again can help.
static bool data_read_alone(const Shard *shard, uint8_t *dst, int64_t bytes, int64_t offset, char *why) {
    for (int tries = 0; tries < DATA_READ_TRIES; tries++) {
        if (tries) data_pause(tries);
        int fd = data_open_again(shard, why), error = errno;
        if (fd >= 0) {
            bool ok = file_read_at(fd, dst, bytes, offset);
            error = errno;
            close(fd);
            if (ok) return true;
            data_refuse(why, shard->path, "cannot be read at byte %" PRId64 ": %s (%d tries)", offset, error ? strerror(error) : "it got shorter", tries + 1);
        }
        if (!data_error_may_pass(error)) return false;
    }
    return false;
}

// A descriptor of shard number s, from those held open or in place of the one longest unused. -1 with a reason.
static int data_descriptor(DataLoader *d, int64_t s, char *why) {
    OpenShard *oldest = &d->open[0];
    for (int i = 0; i < DATA_OPEN_FILES; i++) {
        OpenShard *o = &d->open[i];
        if (o->fd >= 0 && o->shard == s) { o->last_use = ++d->uses; return o->fd; }
        if (o->last_use < oldest->last_use) oldest = o;
    }
    if (oldest->fd >= 0) close(oldest->fd);
    oldest->fd = data_open_again(&d->shard[s], why);
    oldest->shard = s;
    oldest->last_use = oldest->fd >= 0 ? ++d->uses : 0;
    return oldest->fd;
}

static void data_forget_descriptor(DataLoader *d, int64_t s) {
    for (int i = 0; i < DATA_OPEN_FILES; i++)
        if (d->open[i].fd >= 0 && d->open[i].shard == s) { close(d->open[i].fd); d->open[i].fd = -1; d->open[i].last_use = 0; }
}

// Reads exactly `bytes` at `offset` in shard s, with DATA_READ_TRIES tries where trying again can help.
static bool data_read_at(DataLoader *d, int64_t s, uint8_t *dst, int64_t bytes, int64_t offset, char *why) {
    for (int tries = 0; tries < DATA_READ_TRIES; tries++) {
        if (tries) data_pause(tries);
        errno = 0;
        int fd = data_descriptor(d, s, why);
        if (fd < 0) {
            if (data_error_may_pass(errno)) continue;
            return false;
        }
        int64_t done = 0;
        ssize_t n = 1;
        while (done < bytes) {
            n = d->read_at(fd, dst + done, (size_t)(bytes - done), offset + done);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) break;
            done += n;
        }
        if (done == bytes) return true;
        if (n == 0) return data_refuse(why, d->shard[s].path, "ends at byte %" PRId64 ", but had %" PRId64 " bytes when the run began; it was cut during the run", offset + done, d->shard[s].size_bytes);
        int error = errno;
        data_refuse(why, d->shard[s].path, "cannot be read at byte %" PRId64 ": %s (%d tries)", offset + done, strerror(error), tries + 1);
        if (!data_error_may_pass(error)) return false;
        data_forget_descriptor(d, s); // a stale handle of a network file system stays stale
    }
    return false;
}

// Widens n raw tokens to int32. Returns the number of the first one that is outside the vocabulary, n if none is.
static int64_t data_widen(int32_t *dst, const uint8_t *raw, int64_t n, int token_bytes, int64_t vocab_size) {
    uint32_t largest = 0, limit = (uint32_t)min_i64(vocab_size, INT32_MAX);
    if (token_bytes == 1) for (int64_t i = 0; i < n; i++) { uint32_t x = raw[i]; dst[i] = (int32_t)x; if (x > largest) largest = x; }
    else if (token_bytes == 2) for (int64_t i = 0; i < n; i++) { uint16_t x; memcpy(&x, raw + 2 * i, 2); dst[i] = x; if (x > largest) largest = x; }
    else for (int64_t i = 0; i < n; i++) { uint32_t x; memcpy(&x, raw + 4 * i, 4); dst[i] = (int32_t)x; if (x > largest) largest = x; }
    if (largest < limit) return n;
    for (int64_t i = 0; i < n; i++) if ((uint32_t)dst[i] >= limit) return i;
    return n;
}

static bool data_refuse_token(char *why, const Shard *shard, int64_t token, uint32_t id, int64_t vocab_size) {
    return data_refuse(why, shard->path, "token %" PRId64 " (at byte %" PRId64 ") is %u, outside the vocabulary of %" PRId64 "%s", token, shard->body_bytes + token * shard->token_bytes, id, vocab_size,
                       shard->token_bytes == 1 ? "; a text is read as bytes and needs a vocabulary of 256" : "; model and data need the same tokenizer");
}

// Reads n tokens of the stream from position `at`, across shards.
static bool data_read_stream(DataLoader *d, int64_t at, int64_t n, int32_t *dst, char *why) {
    int64_t low = 0, high = d->n_shards - 1; // the last shard whose first token is not behind `at`
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (d->shard[middle].first_token <= at) low = middle;
        else high = middle - 1;
    }
    for (int64_t s = low; n > 0; s++) {
        const Shard *shard = &d->shard[s];
        int64_t from = at - shard->first_token, take = min_i64(n, shard->n_tokens - from);
        if (!data_read_at(d, s, d->raw, take * shard->token_bytes, shard->body_bytes + from * shard->token_bytes, why)) return false;
        int64_t good = data_widen(dst, d->raw, take, shard->token_bytes, d->vocab_size);
        if (good < take) return data_refuse_token(why, shard, from + good, (uint32_t)dst[good], d->vocab_size);
        at += take; dst += take; n -= take;
    }
    return true;
}

static bool data_read_samples(DataLoader *d, int64_t first, int64_t n, int32_t *tokens, int32_t *targets, char *why) {
    int64_t T = d->seq_len;
    for (int64_t j = 0; j < n; j++) {
        if (!data_read_stream(d, dataloader_sample_index(d, first + j) * T, T + 1, d->window, why)) return false;
        memcpy(tokens + j * T, d->window, (size_t)T * sizeof(int32_t));
        memcpy(targets + j * T, d->window + 1, (size_t)T * sizeof(int32_t));
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------
// Opening: find, check, count, fingerprint

static int data_compare_paths(const void *a, const void *b) { return strcmp(((const Shard *)a)->path, ((const Shard *)b)->path); }

// The files that match, sorted by the bytes of their names: neither the locale nor the order of the folder decides. A
// pattern that is the name of an existing file means this file, whatever characters it has. No shell, no ~, no $.
static void data_find(DataLoader *d, const char *pattern) {
    char shown[1024];
    struct stat st;
    glob_t found = {};
    char *single[1] = {(char *)pattern};
    char **path = single;
    size_t n = 1;
    if (lstat(pattern, &st) != 0) {
        if (errno != ENOENT && !strpbrk(pattern, "*?[")) die(EXIT_DATA, "%s: %s: %s", d->key, data_show(shown, sizeof shown, pattern), strerror(errno));
        int result = glob(pattern, GLOB_NOSORT | GLOB_ERR, NULL, &found);
        if (result == GLOB_NOSPACE) die(EXIT_DATA, "%s: out of memory while looking for %s", d->key, data_show(shown, sizeof shown, pattern));
        if (result == GLOB_ABORTED) die(EXIT_DATA, "%s: a folder of %s cannot be read: %s", d->key, data_show(shown, sizeof shown, pattern), strerror(errno));
        path = found.gl_pathv;
        n = found.gl_pathc;
    }
    if (n == 0)
        die(EXIT_DATA, "%s: %s \"%s\"; give token shards such as \"data/*_train_*.bin\" (data/prepare.py makes them) or a .txt file", d->key,
            strpbrk(pattern, "*?[") ? "no file matches" : "there is no file", data_show(shown, sizeof shown, pattern));
    d->n_shards = (int64_t)n;
    d->shard = (Shard *)host_alloc(n * sizeof(Shard));
    for (size_t i = 0; i < n; i++) {
        d->shard[i].path = strdup(path[i]);
        if (!d->shard[i].path) die(EXIT_INTERNAL, "out of host memory for %zu file names", n);
    }
    qsort(d->shard, n, sizeof(Shard), data_compare_paths);
    globfree(&found);
}

// Mixes a run of bytes into a hash, 8 bytes a step.
static uint64_t data_hash(uint64_t h, const uint8_t *p, int64_t n) {
    uint64_t word;
    for (; n >= 8; p += 8, n -= 8) { memcpy(&word, p, 8); h = rng_mix(h ^ word); }
    word = (uint64_t)n << 56;
    memcpy(&word, p, (size_t)n);
    return rng_mix(h ^ word);
}

// Checks one file's kind, size and header, and begins the fingerprint: name without its folder, size, header.
static bool data_open_shard(DataLoader *d, Shard *shard, char *why) {
    char reason[128];
    uint8_t header[DATA_HEADER_BYTES];
    int fd = file_open_read(shard->path, true, &shard->size_bytes, reason, sizeof reason);
    if (fd < 0) return data_refuse(why, shard->path, "%s%s", reason, strstr(reason, "folder") ? "; name the files in it, such as FOLDER/*.bin" : "");
    close(fd);
    int64_t header_bytes = 0;
    bool ok = true;
    if (shard->size_bytes == 0) ok = data_refuse(why, shard->path, "is empty");
    else if (data_name_ends(shard->path, ".txt")) {
        shard->token_bytes = 1;
        shard->n_tokens = shard->size_bytes;
    } else if (!data_name_ends(shard->path, ".bin")) ok = data_refuse(why, shard->path, "must be a token shard (.bin) or a text (.txt)");
    else if (shard->size_bytes < DATA_HEADER_BYTES) ok = data_refuse(why, shard->path, "has %" PRId64 " bytes, fewer than the %d of a shard's header", shard->size_bytes, DATA_HEADER_BYTES);
    else {
        header_bytes = DATA_HEADER_BYTES;
        ok = data_read_alone(shard, header, header_bytes, 0, why) && data_header_read(shard, header, shard->size_bytes, d->vocab_size, why);
    }
    if (!ok) return false;
    const char *slash = strrchr(shard->path, '/'), *name = slash ? slash + 1 : shard->path;
    d->fingerprint = rng_mix(d->fingerprint ^ text_hash(name));
    d->fingerprint = rng_mix(d->fingerprint ^ (uint64_t)shard->size_bytes);
    if (header_bytes) d->fingerprint = data_hash(d->fingerprint, header, header_bytes);
    return true;
}

// Checks every token and hashes the contents, in parallel. On failure `why` describes the first bad place of the stream,
// the same one whatever the number of threads.
static bool data_scan(DataLoader *d, char *why) {
    int64_t *first_chunk = (int64_t *)host_alloc((size_t)(d->n_shards + 1) * sizeof(int64_t));
    for (int64_t s = 0; s < d->n_shards; s++) first_chunk[s + 1] = first_chunk[s] + ceil_div(d->shard[s].n_tokens, DATA_CHUNK_TOKENS);
    int64_t n_chunks = first_chunk[d->n_shards], bad_chunk = n_chunks;
    uint64_t sum = 0; // addition, so that the order of the threads does not matter
    int threads = 1;
#ifdef _OPENMP
    threads = (int)min_i64(n_chunks, min_i64(DATA_SCAN_THREADS, omp_get_max_threads()));
#endif
#pragma omp parallel reduction(+ : sum) num_threads(threads)
    {
        uint8_t *raw = (uint8_t *)host_alloc(DATA_CHUNK_TOKENS * 4);
        int32_t *token = (int32_t *)host_alloc(DATA_CHUNK_TOKENS * sizeof(int32_t));
        char reason[DATA_WHY_BYTES];
#pragma omp for schedule(dynamic, 1)
        for (int64_t c = 0; c < n_chunks; c++) {
            int64_t low = 0, high = d->n_shards - 1;
            while (low < high) {
                int64_t middle = (low + high + 1) / 2;
                if (first_chunk[middle] <= c) low = middle;
                else high = middle - 1;
            }
            const Shard *shard = &d->shard[low];
            int64_t from = (c - first_chunk[low]) * DATA_CHUNK_TOKENS, n = min_i64(DATA_CHUNK_TOKENS, shard->n_tokens - from);
            int64_t offset = shard->body_bytes + from * shard->token_bytes;
            bool ok = data_read_alone(shard, raw, n * shard->token_bytes, offset, reason);
            if (ok) {
                sum += data_hash((uint64_t)c, raw, n * shard->token_bytes);
                int64_t good = data_widen(token, raw, n, shard->token_bytes, d->vocab_size);
                if (good < n) ok = data_refuse_token(reason, shard, from + good, (uint32_t)token[good], d->vocab_size);
            }
            if (!ok) {
#pragma omp critical(data_scan_failure)
                if (c < bad_chunk) { bad_chunk = c; memcpy(why, reason, sizeof reason); }
            }
        }
        free(raw);
        free(token);
    }
    free(first_chunk);
    d->fingerprint = rng_mix(d->fingerprint ^ sum);
    return bad_chunk == n_chunks;
}

// The fingerprint of a set too large to be read whole: three pages of each file.
static bool data_hash_pages(DataLoader *d, char *why) {
    uint8_t page[4096];
    for (int64_t s = 0; s < d->n_shards; s++) {
        int64_t size = d->shard[s].size_bytes, n = min_i64(size, (int64_t)sizeof page);
        int64_t offset[3] = {0, (size - n) / 2, size - n};
        for (int i = 0; i < 3; i++) {
            if (!data_read_at(d, s, page, n, offset[i], why)) return false;
            d->fingerprint = data_hash(d->fingerprint, page, n);
        }
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------
// What the trainer calls

// Opens the files that match `pattern`: token shards (.bin) or texts (.txt). Dies with EXIT_DATA when none matches; when
// one is missing, empty, unreadable, no regular file, or no token shard; when its header, size or any token is wrong
// (tokens: at once in sets of up to DATA_SCAN_TOKENS, else when they are read); or when there are fewer tokens than
// one update needs. `key` is the configuration key for the messages. The loader must stay where it is in memory.
static void dataloader_open(DataLoader *d, const char *pattern, int64_t vocab_size, int64_t seq_len, int64_t global_batch, bool shuffle, bool drop_last, uint64_t seed, const char *key) {
    CHECK(vocab_size > 0 && seq_len > 0 && global_batch > 0, "vocab_size %" PRId64 ", seq_len %" PRId64 ", global_batch %" PRId64, vocab_size, seq_len, global_batch);
    memset(d, 0, sizeof *d);
    snprintf(d->key, sizeof d->key, "%s", key);
    d->vocab_size = vocab_size; d->seq_len = seq_len; d->global_batch = global_batch;
    d->shuffle = shuffle; d->drop_last = drop_last; d->seed = seed;
    d->read_at = pread;
    for (int i = 0; i < DATA_OPEN_FILES; i++) d->open[i].fd = -1;
    char why[DATA_WHY_BYTES] = "";
    data_find(d, pattern);
    for (int64_t s = 0; s < d->n_shards; s++) {
        Shard *shard = &d->shard[s];
        if (!data_open_shard(d, shard, why)) die(EXIT_DATA, "%s: %s", d->key, why);
        if ((shard->token_bytes == 1) != (d->shard[0].token_bytes == 1)) {
            data_refuse(why, shard->path, "the pattern mixes texts (.txt) and token shards (.bin); give one kind");
            die(EXIT_DATA, "%s: %s", d->key, why);
        }
        shard->first_token = d->total_tokens;
        d->total_tokens += shard->n_tokens;
    }
    d->n_samples = (d->total_tokens - 1) / seq_len;
    if (d->n_samples < global_batch) {
        char shown[1024];
        die(EXIT_DATA, "%s: \"%s\" has %" PRId64 " tokens in %" PRId64 " file%s, but one update of %" PRId64 " samples of %" PRId64 " tokens needs %.0f; give more data, or lower the batch or train_gpt.run.seq_len",
            d->key, data_show(shown, sizeof shown, pattern), d->total_tokens, d->n_shards, d->n_shards == 1 ? "" : "s", global_batch, seq_len, (double)global_batch * (double)seq_len + 1);
    }
    if (d->shard[0].token_bytes == 1 && vocab_size > 512)
        note("%s: a text is read as bytes, so that %" PRId64 " of the model's %" PRId64 " tokens never occur; data/prepare.py --tokenizer gpt2 makes GPT-2's tokens of it", d->key, vocab_size - 256, vocab_size);
    d->samples_per_epoch = drop_last ? d->n_samples / global_batch * global_batch : d->n_samples;
    d->raw = (uint8_t *)host_alloc((size_t)(seq_len + 1) * 4);
    d->window = (int32_t *)host_alloc((size_t)(seq_len + 1) * sizeof(int32_t));
    bool good = d->total_tokens <= DATA_SCAN_TOKENS ? data_scan(d, why) : data_hash_pages(d, why);
    if (!good) die(EXIT_DATA, "%s: %s", d->key, why);
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->changed, NULL);
}

// The thread: waits for a request, reads, says so.
static void *data_prefetch_thread(void *arg) {
    DataLoader *d = (DataLoader *)arg;
    pthread_mutex_lock(&d->lock);
    for (;;) {
        while (d->state != PREFETCH_BUSY && !d->thread_ends) pthread_cond_wait(&d->changed, &d->lock);
        if (d->state != PREFETCH_BUSY) break;
        pthread_mutex_unlock(&d->lock);
        d->ahead_ok = data_read_samples(d, d->ahead_first, d->ahead_n, d->ahead_tokens, d->ahead_targets, d->ahead_why);
        pthread_mutex_lock(&d->lock);
        d->state = PREFETCH_READY;
        pthread_cond_broadcast(&d->changed);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

// Waits until the thread reads nothing; afterwards the files and the buffers are the caller's.
static void data_wait_for_thread(DataLoader *d) {
    if (!d->thread_runs) return;
    pthread_mutex_lock(&d->lock);
    while (d->state == PREFETCH_BUSY) pthread_cond_wait(&d->changed, &d->lock);
    pthread_mutex_unlock(&d->lock);
}

// Starts reading samples [first_sample, first_sample + n_samples) in the background. The next dataloader_fetch of exactly
// these takes the result; a fetch of others leaves it waiting; another prefetch replaces it. A failure is kept
// and reported by the fetch that wants these samples, so that the end of a run does not fail over samples it never uses.
static void dataloader_prefetch(DataLoader *d, int64_t first_sample, int64_t n_samples) {
    CHECK(first_sample >= 0 && n_samples > 0, "samples %" PRId64 " + %" PRId64, first_sample, n_samples);
    data_wait_for_thread(d);
    if (n_samples > d->ahead_room) {
        free(d->ahead_tokens);
        free(d->ahead_targets);
        d->ahead_tokens = (int32_t *)host_alloc((size_t)(n_samples * d->seq_len) * sizeof(int32_t));
        d->ahead_targets = (int32_t *)host_alloc((size_t)(n_samples * d->seq_len) * sizeof(int32_t));
        d->ahead_room = n_samples;
    }
    if (!d->thread_runs) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); // inherited by the thread: signals are the main thread's business
        d->thread_runs = pthread_create(&d->thread, NULL, data_prefetch_thread, d) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (!d->thread_runs) return; // no thread to be had: fetch reads by itself, only slower
    }
    pthread_mutex_lock(&d->lock);
    d->ahead_first = first_sample;
    d->ahead_n = n_samples;
    d->state = PREFETCH_BUSY;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
}

// Samples [first_sample, first_sample + n_samples) of the counter: tokens and targets (n_samples, T). Dies with EXIT_DATA
// when a file cannot be read any more or holds a token outside the vocabulary.
static void dataloader_fetch(DataLoader *d, int64_t first_sample, int64_t n_samples, int32_t *tokens, int32_t *targets) {
    CHECK(first_sample >= 0 && n_samples > 0, "samples %" PRId64 " + %" PRId64, first_sample, n_samples);
    double start = clock_seconds();
    data_wait_for_thread(d);
    if (d->state == PREFETCH_READY && d->ahead_first == first_sample && d->ahead_n == n_samples) {
        d->state = PREFETCH_IDLE;
        if (!d->ahead_ok) die(EXIT_DATA, "%s: %s", d->key, d->ahead_why);
        size_t bytes = (size_t)(n_samples * d->seq_len) * sizeof(int32_t);
        memcpy(tokens, d->ahead_tokens, bytes);
        memcpy(targets, d->ahead_targets, bytes);
    } else {
        char why[DATA_WHY_BYTES] = "";
        if (!data_read_samples(d, first_sample, n_samples, tokens, targets, why)) die(EXIT_DATA, "%s: %s", d->key, why);
    }
    d->wait_seconds += clock_seconds() - start;
}

// One line for the start of a run: files, tokens, samples, epochs' length.
static const char *dataloader_describe(const DataLoader *d, char *dst, size_t room) {
    snprintf(dst, room, "%" PRId64 " file%s, %" PRId64 " tokens, %" PRId64 " samples of %" PRId64 " an epoch%s", d->n_shards, d->n_shards == 1 ? "" : "s", d->total_tokens,
             d->samples_per_epoch, d->seq_len, d->shuffle ? ", shuffled" : "");
    return dst;
}

static void dataloader_close(DataLoader *d) {
    if (d->thread_runs) {
        pthread_mutex_lock(&d->lock);
        d->thread_ends = true;
        pthread_cond_broadcast(&d->changed);
        pthread_mutex_unlock(&d->lock);
        pthread_join(d->thread, NULL);
    }
    pthread_cond_destroy(&d->changed);
    pthread_mutex_destroy(&d->lock);
    for (int i = 0; i < DATA_OPEN_FILES; i++) if (d->open[i].fd >= 0) close(d->open[i].fd);
    for (int64_t s = 0; s < d->n_shards; s++) free(d->shard[s].path);
    free(d->shard);
    free(d->raw);
    free(d->window);
    free(d->ahead_tokens);
    free(d->ahead_targets);
    memset(d, 0, sizeof *d);
}
