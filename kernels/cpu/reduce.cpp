// reduce.cpp - sums over whole buffers and over rows. Partial sums are of blocks whose size is fixed, in double, and are
// added in order, so that no result depends on the number of threads.
#include "rows.h"

namespace cpu {

#define SUM_BLOCK 2048 // elements of one partial sum

static double block_sum(const float *x, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += (double)x[i];
    return sum;
}

static double block_sum_squares(const float *x, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}

static void sum_blocks(double *out, Tensor x, bool accumulate, double (*block)(const float *, int64_t)) {
    const int64_t n = tensor_numel(x), blocks = ceil_div(n, SUM_BLOCK);
    double *partial = (double *)host_alloc((size_t)blocks * 8), sum = accumulate ? *out : 0.0;
#pragma omp parallel for if (n > PARALLEL_MIN)
    for (int64_t k = 0; k < blocks; k++) {
        UNINITIALIZED float scratch[SUM_BLOCK];
        const int64_t at = k * SUM_BLOCK, m = min_i64(SUM_BLOCK, n - at);
        partial[k] = block(row_load(x, at, m, scratch), m);
    }
    for (int64_t k = 0; k < blocks; k++) sum += partial[k];
    *out = sum;
    free(partial);
}

void sum_to_double(double *out, Tensor x, bool accumulate, Stream stream) {
    KERNEL_WRITES(stream, out);
    KERNEL_READS(stream, x);
    check_f32("sum_to_double", "x", x, 1, tensor_numel(x));
    sum_blocks(out, x, accumulate, block_sum);
}

void sum_squares_to_double(double *out, const Tensor *x, int n, bool accumulate, Stream stream) {
    KERNEL_WRITES(stream, out);
    CHECK(n >= 1, "squares of %d tensors", n);
    for (int k = 0; k < n; k++) {
        Tensor t = x[k];
        KERNEL_READS(stream, t);
        check_grad("sum_squares_to_double", "x", t, tensor_numel(t));
        sum_blocks(out, t, accumulate || k > 0, block_sum_squares);
    }
}

void hash_words(uint64_t *out, Tensor x, int64_t first, bool accumulate, Stream stream) {
    KERNEL_WRITES(stream, out);
    KERNEL_READS(stream, x);
    const int64_t n = tensor_bytes(x) / 4;
    CHECK(tensor_bytes(x) % 4 == 0 && first >= 0 && first + n <= (int64_t)1 << 31, "hash of %" PRId64 " bytes from word %" PRId64, tensor_bytes(x), first);
    const uint32_t *word = (const uint32_t *)x.data;
    uint64_t sum = accumulate ? *out : 0;
#pragma omp parallel for simd reduction(+ : sum) if (n > PARALLEL_MIN)
    for (int64_t i = 0; i < n; i++) sum += (uint64_t)word[i] * (uint32_t)(2 * (first + i) + 1);
    *out = sum;
}

// Each block of columns has one owner, who walks all rows.
void bias_backward(Tensor dbias, Tensor dout, bool accumulate, Stream stream) {
    KERNEL_WRITES(stream, dbias);
    KERNEL_READS(stream, dout);
    enum { COLUMNS = 64 };
    const int64_t OC = tensor_columns(dout), N = tensor_rows(dout);
    check_weight_grad("bias_backward", "dbias", dbias, 1, OC, dout.dtype);
#pragma omp parallel for if (N * OC > PARALLEL_MIN)
    for (int64_t c = 0; c < OC; c += COLUMNS) {
        const int64_t n = min_i64(COLUMNS, OC - c);
        double sum[COLUMNS] = {0};
        UNINITIALIZED float scratch[COLUMNS];
        for (int64_t i = 0; i < N; i++) {
            const float *d = row_load(dout, i * OC + c, n, scratch);
            for (int64_t j = 0; j < n; j++) sum[j] += (double)d[j];
        }
        sums_store(dbias, c, n, sum, accumulate);
    }
}

} // namespace cpu
