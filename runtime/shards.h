// shards.h - files of tokens, checked and read as one stream.
//
// The files that match one pattern, sorted by name, form ONE stream of tokens: they are read as if they were
// concatenated. Files are llm.c's token shards (.bin: 1024 bytes of header, then 16-bit tokens, or 32-bit ones in the
// Llama 3 variant) or texts (.txt: every byte is a token). What is refused at the start and what during the run is in
// the functions' comments; every message names the file, the place and the numbers. runtime/dataloader.h makes samples of
// the stream.
//
// Invariants:
//   1. Files are read with pread and never mapped: a file that gets shorter is an error line, not a SIGBUS.
//   2. At most DATA_OPEN_FILES descriptors are held, however many files there are.
//   3. No token outside the vocabulary leaves this file: each one is checked when read. A set of at most
//      DATA_SCAN_TOKENS is checked as a whole at the start, so that a bad token is found before hours have passed.
#pragma once
#include "utils.h"
#include <glob.h>
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
    DATA_PIECE_TOKENS = 1 << 14,                   // read at once during the run
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

typedef struct {
    int64_t vocab_size;
    Shard *shard;
    int64_t n_shards;
    int64_t total_tokens;             // of the stream
    uint64_t fingerprint;             // of names, sizes, headers and contents; equal on every rank and across restarts
    ssize_t (*read_at)(int fd, void *dst, size_t bytes, off_t offset); // pread; tests put a failing one here
    OpenShard open[DATA_OPEN_FILES];
    int64_t uses;                     // of descriptors
    uint8_t *raw;                     // room for DATA_PIECE_TOKENS of the largest kind, as they are in the file
} TokenFiles;

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
static int data_descriptor(TokenFiles *f, int64_t s, char *why) {
    OpenShard *oldest = &f->open[0];
    for (int i = 0; i < DATA_OPEN_FILES; i++) {
        OpenShard *o = &f->open[i];
        if (o->fd >= 0 && o->shard == s) { o->last_use = ++f->uses; return o->fd; }
        if (o->last_use < oldest->last_use) oldest = o;
    }
    if (oldest->fd >= 0) close(oldest->fd);
    oldest->fd = data_open_again(&f->shard[s], why);
    oldest->shard = s;
    oldest->last_use = oldest->fd >= 0 ? ++f->uses : 0;
    return oldest->fd;
}

static void data_forget_descriptor(TokenFiles *f, int64_t s) {
    for (int i = 0; i < DATA_OPEN_FILES; i++)
        if (f->open[i].fd >= 0 && f->open[i].shard == s) { close(f->open[i].fd); f->open[i].fd = -1; f->open[i].last_use = 0; }
}

// Reads exactly `bytes` at `offset` in shard s, with DATA_READ_TRIES tries where trying again can help.
static bool data_read_at(TokenFiles *f, int64_t s, uint8_t *dst, int64_t bytes, int64_t offset, char *why) {
    for (int tries = 0; tries < DATA_READ_TRIES; tries++) {
        if (tries) data_pause(tries);
        errno = 0;
        int fd = data_descriptor(f, s, why);
        if (fd < 0) {
            if (data_error_may_pass(errno)) continue;
            return false;
        }
        int64_t done = 0;
        ssize_t n = 1;
        while (done < bytes) {
            n = f->read_at(fd, dst + done, (size_t)(bytes - done), offset + done);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) break;
            done += n;
        }
        if (done == bytes) return true;
        if (n == 0) return data_refuse(why, f->shard[s].path, "ends at byte %" PRId64 ", but had %" PRId64 " bytes when the run began; it was cut during the run", offset + done, f->shard[s].size_bytes);
        int error = errno;
        data_refuse(why, f->shard[s].path, "cannot be read at byte %" PRId64 ": %s (%d tries)", offset + done, strerror(error), tries + 1);
        if (!data_error_may_pass(error)) return false;
        data_forget_descriptor(f, s); // a stale handle of a network file system stays stale
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

// Reads n tokens of the stream from position `at`, across files; false with a reason.
static bool shards_read(TokenFiles *f, int64_t at, int64_t n, int32_t *dst, char *why) {
    int64_t low = 0, high = f->n_shards - 1; // the last shard whose first token is not behind `at`
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (f->shard[middle].first_token <= at) low = middle;
        else high = middle - 1;
    }
    for (int64_t s = low; n > 0;) {
        const Shard *shard = &f->shard[s];
        int64_t from = at - shard->first_token, take = min_i64(n, shard->n_tokens - from);
        take = min_i64(take, DATA_PIECE_TOKENS);
        if (!data_read_at(f, s, f->raw, take * shard->token_bytes, shard->body_bytes + from * shard->token_bytes, why)) return false;
        int64_t good = data_widen(dst, f->raw, take, shard->token_bytes, f->vocab_size);
        if (good < take) return data_refuse_token(why, shard, from + good, (uint32_t)dst[good], f->vocab_size);
        at += take; dst += take; n -= take;
        if (from + take == shard->n_tokens) s++;
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------
// Opening: find, check, count, fingerprint

static int data_compare_paths(const void *a, const void *b) { return strcmp(((const Shard *)a)->path, ((const Shard *)b)->path); }

// The files that match, sorted by the bytes of their names: neither the locale nor the order of the folder decides. A
// pattern that is the name of an existing file means this file, whatever characters it has. No shell, no ~, no $.
static void data_find(TokenFiles *f, const char *pattern, const char *key) {
    char shown[1024];
    struct stat st;
    glob_t found = {};
    char *single[1] = {(char *)pattern};
    char **path = single;
    size_t n = 1;
    if (lstat(pattern, &st) != 0) {
        if (errno != ENOENT && !strpbrk(pattern, "*?[")) die_alike(EXIT_DATA, "%s: %s: %s", key, data_show(shown, sizeof shown, pattern), strerror(errno));
        int result = glob(pattern, GLOB_NOSORT | GLOB_ERR, NULL, &found);
        if (result == GLOB_NOSPACE) die_alike(EXIT_DATA, "%s: out of memory while looking for %s", key, data_show(shown, sizeof shown, pattern));
        if (result == GLOB_ABORTED) die_alike(EXIT_DATA, "%s: a folder of %s cannot be read: %s", key, data_show(shown, sizeof shown, pattern), strerror(errno));
        path = found.gl_pathv;
        n = found.gl_pathc;
    }
    if (n == 0)
        die_alike(EXIT_DATA, "%s: %s \"%s\"; give token shards such as \"data/*_train_*.bin\" (data/prepare.py makes them) or a .txt file (make quickstart writes data/corpus)", key,
            strpbrk(pattern, "*?[") ? "no file matches" : "there is no file", data_show(shown, sizeof shown, pattern));
    f->n_shards = (int64_t)n;
    f->shard = (Shard *)host_alloc(n * sizeof(Shard));
    for (size_t i = 0; i < n; i++) {
        f->shard[i].path = strdup(path[i]);
        if (!f->shard[i].path) die(EXIT_INTERNAL, "out of host memory for %zu file names", n);
    }
    qsort(f->shard, n, sizeof(Shard), data_compare_paths);
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
static bool data_open_shard(TokenFiles *f, Shard *shard, char *why) {
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
        ok = data_read_alone(shard, header, header_bytes, 0, why) && data_header_read(shard, header, shard->size_bytes, f->vocab_size, why);
    }
    if (!ok) return false;
    const char *slash = strrchr(shard->path, '/'), *name = slash ? slash + 1 : shard->path;
    f->fingerprint = rng_mix(f->fingerprint ^ text_hash(name));
    f->fingerprint = rng_mix(f->fingerprint ^ (uint64_t)shard->size_bytes);
    if (header_bytes) f->fingerprint = data_hash(f->fingerprint, header, header_bytes);
    return true;
}

// Checks every token and hashes the contents, in parallel. On failure `why` describes the first bad place of the stream,
// the same one whatever the number of threads.
static bool data_scan(TokenFiles *f, char *why) {
    int64_t *first_chunk = (int64_t *)host_alloc((size_t)(f->n_shards + 1) * sizeof(int64_t));
    for (int64_t s = 0; s < f->n_shards; s++) first_chunk[s + 1] = first_chunk[s] + ceil_div(f->shard[s].n_tokens, DATA_CHUNK_TOKENS);
    int64_t n_chunks = first_chunk[f->n_shards], bad_chunk = n_chunks;
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
            int64_t low = 0, high = f->n_shards - 1;
            while (low < high) {
                int64_t middle = (low + high + 1) / 2;
                if (first_chunk[middle] <= c) low = middle;
                else high = middle - 1;
            }
            const Shard *shard = &f->shard[low];
            int64_t from = (c - first_chunk[low]) * DATA_CHUNK_TOKENS, n = min_i64(DATA_CHUNK_TOKENS, shard->n_tokens - from);
            int64_t offset = shard->body_bytes + from * shard->token_bytes;
            bool ok = data_read_alone(shard, raw, n * shard->token_bytes, offset, reason);
            if (ok) {
                sum += data_hash((uint64_t)c, raw, n * shard->token_bytes);
                int64_t good = data_widen(token, raw, n, shard->token_bytes, f->vocab_size);
                if (good < n) ok = data_refuse_token(reason, shard, from + good, (uint32_t)token[good], f->vocab_size);
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
    f->fingerprint = rng_mix(f->fingerprint ^ sum);
    return bad_chunk == n_chunks;
}

// The fingerprint of a set too large to be read whole: three pages of each file.
static bool data_hash_pages(TokenFiles *f, char *why) {
    uint8_t page[4096];
    for (int64_t s = 0; s < f->n_shards; s++) {
        int64_t size = f->shard[s].size_bytes, n = min_i64(size, (int64_t)sizeof page);
        int64_t offset[3] = {0, (size - n) / 2, size - n};
        for (int i = 0; i < 3; i++) {
            if (!data_read_at(f, s, page, n, offset[i], why)) return false;
            f->fingerprint = data_hash(f->fingerprint, page, n);
        }
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------
// What the loader calls

// Opens the files that match `pattern`: token shards (.bin) or texts (.txt). Dies with EXIT_DATA when none matches; when
// one is missing, empty, unreadable, no regular file, or no token shard; when its header or size is wrong. `key` is the
// configuration key for the messages.
static void shards_open(TokenFiles *f, const char *pattern, int64_t vocab_size, const char *key) {
    memset(f, 0, sizeof *f);
    f->vocab_size = vocab_size;
    f->read_at = pread;
    f->raw = (uint8_t *)host_alloc(4 * DATA_PIECE_TOKENS);
    for (int i = 0; i < DATA_OPEN_FILES; i++) f->open[i].fd = -1;
    char why[DATA_WHY_BYTES] = "";
    data_find(f, pattern, key);
    for (int64_t s = 0; s < f->n_shards; s++) {
        Shard *shard = &f->shard[s];
        if (!data_open_shard(f, shard, why)) die_alike(EXIT_DATA, "%s: %s", key, why);
        if ((shard->token_bytes == 1) != (f->shard[0].token_bytes == 1)) {
            data_refuse(why, shard->path, "the pattern mixes texts (.txt) and token shards (.bin); give one kind");
            die_alike(EXIT_DATA, "%s: %s", key, why);
        }
        shard->first_token = f->total_tokens;
        f->total_tokens += shard->n_tokens;
    }
}

// Checks the tokens of a set of up to DATA_SCAN_TOKENS, and completes the fingerprint. Dies with EXIT_DATA.
static void shards_check(TokenFiles *f, const char *key) {
    char why[DATA_WHY_BYTES] = "";
    bool good = f->total_tokens <= DATA_SCAN_TOKENS ? data_scan(f, why) : data_hash_pages(f, why);
    if (!good) die_alike(EXIT_DATA, "%s: %s", key, why);
}

static void shards_close(TokenFiles *f) {
    for (int i = 0; i < DATA_OPEN_FILES; i++) if (f->open[i].fd >= 0) close(f->open[i].fd);
    for (int64_t s = 0; s < f->n_shards; s++) free(f->shard[s].path);
    free(f->shard);
    free(f->raw);
    memset(f, 0, sizeof *f);
}
