// bench_optimizer.cpp - how fast the CPU updates parameters, beside the rate of its memory with the same threads. Built and run by
// scripts/bench_optimizer.sh. Arrays are far larger than the caches and hold random numbers; figures are medians. Bytes count
// what the mathematics needs, each array that is read and each that is written once: in place nothing else moves, while a
// copy also reads what it overwrites, unless it writes past the caches.
#include "../kernels/kernels.h"
#include <omp.h>
#include <sys/mman.h>

enum { REPEATS_MAX = 99 };

typedef struct {
    int64_t n;
    int repeats;
    float *w, *grad, *m, *v;      // (n)
    uint16_t *weight, *remainder, *grad_bf16; // (n)
    UpdateControl control;
} Bench;

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Prints the median of a call that moves `bytes` an element; returns GB/s.
static double measure(Bench *b, const char *name, double bytes, void (*run)(Bench *)) {
    double seconds[REPEATS_MAX];
    run(b);
    for (int i = 0; i < b->repeats; i++) {
        const double start = clock_seconds();
        run(b);
        seconds[i] = clock_seconds() - start;
    }
    qsort(seconds, (size_t)b->repeats, sizeof *seconds, compare_doubles);
    const double rate = (double)b->n / seconds[b->repeats / 2];
    printf("%-34s %7.3f G elements/s %7.1f GB/s", name, rate * 1e-9, rate * bytes * 1e-9);
    return rate * bytes * 1e-9;
}

// The memory's rate.
static void run_copy(Bench *b) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < b->n; i++) b->m[i] = b->grad[i];
}
static void run_triad(Bench *b) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < b->n; i++) b->m[i] = b->grad[i] + 0.3f * b->w[i];
}
static void run_in_place(Bench *b) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < b->n; i++) b->m[i] = 0.5f * b->m[i] + b->grad[i];
}

static const AdamWArgs adamw = {1e-6f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f, 0.5f, true};
static const LionArgs lion = {1e-6f, 0.9f, 0.99f, 0.1f};
static const SgdArgs sgd = {1e-6f, 0.9f, 0.1f, 0.1f, false, false};
static Tensor flat(void *p, DType t, const Bench *b) { return tensor1(p, t, b->n); }
// A weight that is its own master, or a split one.
static UpdateRange range(const Bench *b, bool split, bool bf16_grad) {
    const Tensor w = flat(b->w, DTYPE_FP32, b), grad = bf16_grad ? flat(b->grad_bf16, DTYPE_BF16, b) : flat(b->grad, DTYPE_FP32, b);
    return {split ? flat(b->weight, DTYPE_BF16, b) : w, split ? flat(b->remainder, DTYPE_REMAINDER, b) : w, grad, {flat(b->m, DTYPE_FP32, b), flat(b->v, DTYPE_FP32, b)}, b->n};
}
static void run_adamw(Bench *b) { const UpdateRange r = range(b, false, false); cpu::adamw_update(&r, 1, adamw, &b->control, NULL); }
static void run_adamw_split(Bench *b) { const UpdateRange r = range(b, true, false); cpu::adamw_update(&r, 1, adamw, &b->control, NULL); }
static void run_adamw_split_bf16(Bench *b) { const UpdateRange r = range(b, true, true); cpu::adamw_update(&r, 1, adamw, &b->control, NULL); }
static void run_lion_split(Bench *b) { const UpdateRange r = range(b, true, false); cpu::lion_update(&r, 1, lion, &b->control, NULL); }
static void run_sgd_split(Bench *b) { const UpdateRange r = range(b, true, false); cpu::sgd_update(&r, 1, sgd, &b->control, NULL); }

static void *pages(int64_t bytes, bool huge_pages) {
    void *p = aligned_alloc(2 << 20, (size_t)round_up(bytes, 2 << 20));
    if (!p) die(EXIT_CONFIG, "no memory for %" PRId64 " bytes", bytes);
    madvise(p, (size_t)bytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    return p;
}
// n random floats around `mean`, in memory that the threads which will use it touch first.
static float *random_floats(int64_t n, float mean, float spread, bool huge_pages) {
    float *p = (float *)pages(n * 4, huge_pages);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) p[i] = mean + spread * (float)(rng_uniform(1, (uint64_t)(uintptr_t)p, (uint64_t)i) - 0.5);
    return p;
}

int main(int argc, char **argv) {
    static Bench bench;
    Bench *b = &bench;
    b->n = argc > 1 ? atoll(argv[1]) : 100000000;
    b->repeats = argc > 2 ? atoi(argv[2]) : 9;
    const bool huge_pages = argc > 3 && atoi(argv[3]);
    if (b->n < 1 || b->repeats < 1 || b->repeats > REPEATS_MAX) die(EXIT_CONFIG, "usage: bench_optimizer [parameters [repeats [1 = huge pages]]]");
    b->w = random_floats(b->n, 0, 0.1f, huge_pages);
    b->grad = random_floats(b->n, 0, 0.1f, huge_pages);
    b->m = random_floats(b->n, 0, 0.01f, huge_pages);
    b->v = random_floats(b->n, 0.01f, 0.01f, huge_pages);
    b->weight = (uint16_t *)pages(b->n * 2, huge_pages);
    b->remainder = (uint16_t *)pages(b->n * 2, huge_pages);
    b->grad_bf16 = (uint16_t *)pages(b->n * 2, huge_pages);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < b->n; i++) {
        b->weight[i] = master_to_bf16(b->w[i]);
        b->remainder[i] = master_remainder(b->w[i]);
        b->grad_bf16[i] = float_to_bf16(b->grad[i]);
    }
    b->control = {1, 1, 1, 1};
    printf("%" PRId64 " elements, %d threads, %s pages, median of %d\n", b->n, omp_get_max_threads(), huge_pages ? "huge" : "small", b->repeats);
    double best = 0;
    const struct { const char *name; double bytes; void (*run)(Bench *); } memory[] = {
        {"copy", 8, run_copy}, {"triad", 12, run_triad}, {"in place: a = a/2 + b", 12, run_in_place},
    };
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) {
        best = fmax(best, measure(b, memory[i].name, memory[i].bytes, memory[i].run));
        printf("\n");
    }
    const struct { const char *name; double bytes; void (*run)(Bench *); } rule[] = {
        {"AdamW, fp32", 28, run_adamw}, {"AdamW, split masters", 28, run_adamw_split}, {"AdamW, split, bf16 gradients", 26, run_adamw_split_bf16},
        {"Lion, split masters", 20, run_lion_split}, {"SGD, split masters", 20, run_sgd_split},
    };
    for (int path = 0; path < 3; path++) {
        const char *name = cpu::update_path(path);
        if (!name) continue;
        printf("-- %s\n", name);
        for (size_t i = 0; i < sizeof rule / sizeof *rule; i++) {
            const double rate = measure(b, rule[i].name, rule[i].bytes, rule[i].run);
            printf("  %5.1f %% of the memory's\n", 100 * rate / best);
        }
    }
    return 0;
}
