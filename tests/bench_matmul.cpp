// bench_matmul.cpp - the CPU's matrix products beside OpenBLAS's sgemm (with -DWITH_OPENBLAS): GFLOP/s of both, by turns, on
// the same cores. Built and run by scripts/bench_matmul.sh. The best of several rounds counts, since other programs run too.
#include "../kernels/kernels.h"
#include <omp.h>
#ifdef WITH_OPENBLAS
#include <cblas.h>
extern "C" char *openblas_get_corename(void);
#endif

typedef enum { FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT } Product;

typedef struct {
    int64_t N, C, OC;
    float *x, *w, *y; // (N,C), (OC,C), (N,OC)
} Layer;

static void run_ours(const Layer *l, Product p) {
    Tensor x = tensor2(l->x, DTYPE_FP32, l->N, l->C), w = tensor2(l->w, DTYPE_FP32, l->OC, l->C), y = tensor2(l->y, DTYPE_FP32, l->N, l->OC);
    if (p == FORWARD) cpu::linear_forward(y, x, w, tensor_none(), tensor_none(), tensor_none(), NULL);
    else if (p == BACKWARD_INPUT) cpu::linear_backward_input(x, tensor_none(), y, w, tensor_none(), false, NULL);
    else cpu::linear_backward_weight(w, tensor_none(), y, x, false, NULL);
}

static void run_openblas(const Layer *l, Product p) {
#ifdef WITH_OPENBLAS
    const int N = (int)l->N, C = (int)l->C, OC = (int)l->OC;
    if (p == FORWARD) cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, N, OC, C, 1, l->x, C, l->w, C, 0, l->y, OC);
    else if (p == BACKWARD_INPUT) cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, N, C, OC, 1, l->y, OC, l->w, C, 0, l->x, C);
    else cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, OC, C, N, 1, l->y, OC, l->x, C, 0, l->w, C);
#else
    (void)l;
    (void)p;
#endif
}

// GFLOP/s of the fastest of a few calls, for each of the two.
static void measure(const Layer *l, Product p, double best[2]) {
    const double flops = 2.0 * (double)l->N * (double)l->C * (double)l->OC;
    const int calls = (int)(2e8 / flops) + 1;
    best[0] = best[1] = 0;
    for (int round = 0; round < 14; round++) {
        const double start = clock_seconds();
        for (int i = 0; i < calls; i++) round % 2 ? run_openblas(l, p) : run_ours(l, p);
        best[round % 2] = fmax(best[round % 2], flops * calls * 1e-9 / (clock_seconds() - start));
    }
}

int main(void) {
    static const int64_t shapes[][3] = { // N, C, OC
        {64, 192, 256}, {64, 64, 256}, {512, 128, 512}, {512, 512, 512}, {1024, 1024, 1024}, {1024, 768, 2304}, {1024, 768, 3072}, {1024, 3072, 768}, {256, 768, 50304}, {211, 257, 131},
    };
    static const char *const names[] = {"forward", "backward input", "backward weight"};
    device_init(0);
#ifdef WITH_OPENBLAS
    printf("%s, %d threads, OpenBLAS kernels for %s\n", device_info().name, omp_get_max_threads(), openblas_get_corename());
#else
    printf("%s, %d threads, without OpenBLAS\n", device_info().name, omp_get_max_threads());
#endif
    printf("%6s %6s %6s  %-16s %10s %10s %6s   (GFLOP/s)\n", "N", "C", "OC", "product", "ours", "OpenBLAS", "ratio");
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        Layer l = {shapes[s][0], shapes[s][1], shapes[s][2], NULL, NULL, NULL};
        float **data[3] = {&l.x, &l.w, &l.y};
        const int64_t n[3] = {l.N * l.C, l.OC * l.C, l.N * l.OC};
        for (int k = 0; k < 3; k++) {
            *data[k] = (float *)device_malloc(n[k] * 4);
            for (int64_t i = 0; i < n[k]; i++) (*data[k])[i] = (float)rng_uniform(1, (uint64_t)k, (uint64_t)i) - 0.5f;
        }
        for (int p = 0; p < 3; p++) {
            double best[2];
            measure(&l, (Product)p, best);
#ifdef WITH_OPENBLAS
            printf("%6d %6d %6d  %-16s %10.1f %10.1f %6.2f\n", (int)l.N, (int)l.C, (int)l.OC, names[p], best[0], best[1], best[0] / best[1]);
#else
            printf("%6d %6d %6d  %-16s %10.1f\n", (int)l.N, (int)l.C, (int)l.OC, names[p], best[0]);
#endif
        }
        for (int k = 0; k < 3; k++) device_free(*data[k]);
    }
    return 0;
}
