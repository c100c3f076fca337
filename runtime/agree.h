// agree.h - do all ranks still hold the same? What every rank works out for itself (step, learning rate, loss scale, place in
// the data, ...) must come out alike, and so must what they were told together (loss, norm). A rank whose memory, processor
// or library fails in silence would train on beside the others, and their checkpoint would be worth nothing.
//
// Each update asks, at the cost of 16 bytes in a sum over the ranks that there is anyway: every rank adds h and h^2, h a hash of
// its RankState in AGREE_BITS bits. By Cauchy and Schwarz D * sum h^2 >= (sum h)^2, with equality only if all h are equal;
// both sums are whole and below 2^53 for up to 2^17 ranks, so doubles hold them exactly. Two states that differ have the
// same hash once in 2^18; the loss and the norm of the next update then differ as well.
//
// Only when the sums disagree are the values themselves exchanged, so that the ranks and the values can be named. All
// ranks see the same sums, so all come to that exchange; a rank whose copy of the sums alone is wrong waits there for the
// others, and the watch names it.
#pragma once
#include "comm.h"
#include <float.h>

enum { AGREE_BITS = 18, AGREE_TEXT = 1500, AGREE_VALUE = 96 };

// Puts a rank's value into words, where they are other words than its number. All ranks call it for the same ranks in the same
// order, so the rank that knows them may broadcast them.
typedef void (*AgreeShow)(const void *ctx, int field, int rank, double value, char text[AGREE_VALUE]);

// What all ranks hold alike when an update ends in its sums. The host's own numbers; no collective makes them equal.
typedef struct {
    double step, applied_updates, skipped_updates, samples; // counts before this update; samples: place in the training data
    double lr, loss_scale;                                  // of this update
    double loss, grad_norm;                                 // of the update before, as all were told
    double config_digest;                                   // 52 bits of a hash
} RankState;

static const char *const agree_names[] = {"step", "applied updates", "skipped updates", "place in the data (samples)", "lr", "loss scale", "loss of the update before",
                                          "gradient norm of the update before", "digest of the configuration"};
enum { AGREE_FIELDS = sizeof agree_names / sizeof *agree_names };
static_assert(sizeof(RankState) == AGREE_FIELDS * sizeof(double), "a name for each field");

// The fields as they are compared: one zero and one NaN.
static void agree_values(const RankState *s, double *value) {
    memcpy(value, s, sizeof *s);
    for (int i = 0; i < AGREE_FIELDS; i++) value[i] = isnan(value[i]) ? -DBL_MAX : value[i] + 0.0;
}

// In [0, 2^AGREE_BITS), as a double.
static double agree_hash(const RankState *s) {
    double value[AGREE_FIELDS];
    uint64_t bits[AGREE_FIELDS], h = 0;
    agree_values(s, value);
    memcpy(bits, value, sizeof bits);
    for (int i = 0; i < AGREE_FIELDS; i++) h = rng_mix(h ^ bits[i]);
    return (double)(h >> (64 - AGREE_BITS));
}

// Are all hashes equal, of which there are `ranks`, with these sums?
static bool agree_sums(double sum, double sum_squares, int ranks) {
    if (!(sum >= 0 && sum <= 0x1p53 && sum_squares >= 0 && sum_squares <= 0x1p53)) return false; // no sums of hashes
    unsigned __int128 s = (uint64_t)sum, q = (uint64_t)sum_squares;
    return (unsigned __int128)(uint64_t)ranks * q == s * s;
}

PRINTF_LIKE(3, 4) static void agree_put(char *text, size_t *length, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text + *length, AGREE_TEXT - *length, format, args);
    va_end(args);
    *length = (size_t)min_i64(AGREE_TEXT - 1, (int64_t)*length + n);
}

static void agree_show_number(const void *ctx, int field, int rank, double value, char text[AGREE_VALUE]) {
    (void)ctx, (void)field, (void)rank;
    if (value == -DBL_MAX) snprintf(text, AGREE_VALUE, "nan");
    else snprintf(text, AGREE_VALUE, "%.17g", value);
}

// What differs, in words: "lr is 0.001 on rank 2 and 0.002 on the 3 others". value: (n_values, world), a column a rank.
// Without a majority each rank's value is told. show may be null. Returns how many of the values differ.
static int agree_describe(char *text, const double *value, const char *const *name, int n_values, int world, AgreeShow show, const void *ctx) {
    char shown[AGREE_VALUE];
    size_t length = 0;
    int differ = 0;
    text[0] = 0;
    for (int f = 0; f < n_values; f++) {
        const double *v = value + (int64_t)f * world;
        double candidate = v[0];
        int votes = 0, same = 0, one = 0; // one: a rank of the majority
        for (int r = 0; r < world; r++) { // Boyer and Moore 1981: whoever has the majority survives
            if (votes == 0) candidate = v[r];
            votes += v[r] == candidate ? 1 : -1;
        }
        for (int r = 0; r < world; r++) {
            same += v[r] == candidate;
            if (v[r] == candidate) one = r;
        }
        if (same == world) continue;
        bool majority = 2 * same > world;
        agree_put(text, &length, "%s%s is ", differ++ ? "; " : "", name[f]);
        for (int r = 0, told = 0; r < world; r++) {
            if (majority && v[r] == candidate) continue;
            if (told++ == 8) { agree_put(text, &length, ", ..."); break; }
            (show ? show : agree_show_number)(ctx, f, r, v[r], shown);
            agree_put(text, &length, "%s%s on rank %d", told > 1 ? ", " : "", shown, r);
        }
        if (!majority) continue;
        (show ? show : agree_show_number)(ctx, f, one, candidate, shown);
        agree_put(text, &length, " and %s on the other %d", shown, same);
    }
    return differ;
}

// All of n values, world x n, as every rank gave them: all[i * world + r] is rank r's value i. The caller frees it.
static double *agree_gather(const double *value, int n, int rank, int world) {
    double *all = (double *)host_alloc(sizeof(double) * (size_t)n * (size_t)world);
    for (int i = 0; i < n; i++) all[(int64_t)i * world + rank] = value[i]; // the others add zeros
    comm_host_all_reduce(all, n * world, COMM_SUM);
    return all;
}

#define AGREE_ADVICE "no checkpoint was written from this state; start again from the newest one, and without its host if the same rank is named again"

// Blocking, on all ranks: ends the program, naming ranks and fields, unless all hold the same.
static void agree_require(const RankState *s, int rank, int world) {
    if (world == 1) return;
    double value[AGREE_FIELDS], least[AGREE_FIELDS], most[AGREE_FIELDS];
    agree_values(s, value);
    memcpy(least, value, sizeof least);
    memcpy(most, value, sizeof most);
    comm_host_all_reduce(least, AGREE_FIELDS, COMM_MIN);
    comm_host_all_reduce(most, AGREE_FIELDS, COMM_MAX);
    if (memcmp(least, most, sizeof least) == 0) return;
    double *all = agree_gather(value, AGREE_FIELDS, rank, world);
    char text[AGREE_TEXT];
    agree_describe(text, all, agree_names, AGREE_FIELDS, world, NULL, NULL);
    die_alike(EXIT_NUMERICS, "step %.0f: the ranks no longer hold the same: %s; " AGREE_ADVICE, all[0], text);
}
