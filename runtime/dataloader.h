// dataloader.h - a stream of tokens becomes micro-batches.
//
// Over the stream of N tokens (runtime/shards.h: all files of one pattern) lies a grid of samples of T tokens:
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
// and not stored. The counter alone names the sample, whatever the files, micro-batches, ranks and restarts.
//
// Invariant: the prefetch thread and the caller never read at the same time; `state` says whose turn it is.
#pragma once
#include "shards.h"
#include "thread.h"

typedef enum { PREFETCH_IDLE, PREFETCH_BUSY, PREFETCH_READY } PrefetchState;

typedef struct DataLoader {
    char key[64];                     // configuration key, for messages
    int64_t seq_len, global_batch;
    bool shuffle, drop_last;
    uint64_t seed;
    TokenFiles files;
    int64_t total_tokens;             // of the stream
    int64_t n_samples;                // S: samples in the stream
    int64_t samples_per_epoch;        // S, or the largest multiple of the global batch in it (drop_last)
    uint64_t fingerprint;             // of the files
    double wait_seconds;              // time that dataloader_fetch has kept its caller waiting, in total
    int32_t *window;                  // T+1 tokens of one sample; theirs whose turn it is
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
// What the trainer calls

// Opens the files that match `pattern`: token shards (.bin) or texts (.txt). Dies with EXIT_DATA when none matches; when
// one is missing, empty, unreadable, no regular file, or no token shard; when its header, size or any token is wrong
// (tokens: at once in sets of up to DATA_SCAN_TOKENS, else when they are read); or when there are fewer tokens than
// one update needs. global_batch: samples of an update; 0: the samples are for evaluation, which one is enough for. `key` is
// the configuration key for the messages. The loader must stay where it is in memory.
static void dataloader_open(DataLoader *d, const char *pattern, int64_t vocab_size, int64_t seq_len, int64_t global_batch, bool shuffle, bool drop_last, uint64_t seed, const char *key) {
    CHECK(vocab_size > 0 && seq_len > 0 && global_batch >= (drop_last ? 1 : 0), "vocab_size %" PRId64 ", seq_len %" PRId64 ", global_batch %" PRId64, vocab_size, seq_len, global_batch);
    memset(d, 0, sizeof *d);
    snprintf(d->key, sizeof d->key, "%s", key);
    d->seq_len = seq_len; d->global_batch = global_batch;
    d->shuffle = shuffle; d->drop_last = drop_last; d->seed = seed;
    shards_open(&d->files, pattern, vocab_size, d->key);
    d->total_tokens = d->files.total_tokens;
    d->n_samples = (d->total_tokens - 1) / seq_len;
    if (d->n_samples < max_i64(global_batch, 1)) {
        char shown[1024], user[64] = "evaluation by one sample";
        if (global_batch > 0) snprintf(user, sizeof user, "one update of %" PRId64 " samples", global_batch);
        die_alike(EXIT_DATA, "%s: \"%s\" has %" PRId64 " tokens in %" PRId64 " file%s, but %s of %" PRId64 " tokens needs %.0f; give more data, or lower %strain_gpt.run.seq_len",
            d->key, data_show(shown, sizeof shown, pattern), d->total_tokens, d->files.n_shards, d->files.n_shards == 1 ? "" : "s", user, seq_len, (double)max_i64(global_batch, 1) * (double)seq_len + 1, global_batch > 0 ? "the batch or " : "");
    }
    if (d->files.shard[0].token_bytes == 1 && vocab_size > 512)
        note("%s: a text is read as bytes, so that %" PRId64 " of the model's %" PRId64 " tokens never occur; data/prepare.py --tokenizer gpt2 makes GPT-2's tokens of it", d->key, vocab_size - 256, vocab_size);
    d->samples_per_epoch = drop_last ? d->n_samples / global_batch * global_batch : d->n_samples;
    d->window = (int32_t *)host_alloc((size_t)(seq_len + 1) * sizeof(int32_t));
    shards_check(&d->files, d->key);
    d->fingerprint = d->files.fingerprint;
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->changed, NULL);
}

static bool data_read_samples(DataLoader *d, int64_t first, int64_t n, int32_t *tokens, int32_t *targets, char *why) {
    int64_t T = d->seq_len;
    for (int64_t j = 0; j < n; j++) {
        if (!shards_read(&d->files, dataloader_sample_index(d, first + j) * T, T + 1, d->window, why)) return false;
        memcpy(tokens + j * T, d->window, (size_t)T * sizeof(int32_t));
        memcpy(targets + j * T, d->window + 1, (size_t)T * sizeof(int32_t));
    }
    return true;
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
        d->thread_runs = thread_start(&d->thread, data_prefetch_thread, d) == 0;
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
    snprintf(dst, room, "%" PRId64 " file%s, %" PRId64 " tokens, %" PRId64 " samples of %" PRId64 " an epoch%s", d->files.n_shards, d->files.n_shards == 1 ? "" : "s", d->total_tokens,
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
    shards_close(&d->files);
    free(d->window);
    free(d->ahead_tokens);
    free(d->ahead_targets);
    memset(d, 0, sizeof *d);
}
