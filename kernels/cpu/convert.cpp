// convert.cpp - element type conversions, sums of two arrays, fills.
#include "rows.h"

namespace cpu {

#define CONVERT_BLOCK 4096 // elements

void convert(Tensor dst, Tensor src, Stream stream) {
    KERNEL_WRITES(stream, dst);
    KERNEL_READS(stream, src);
    const int64_t n = tensor_numel(src);
    CHECK(tensor_numel(dst) == n, "convert: %" PRId64 " elements from %" PRId64, tensor_numel(dst), n);
#pragma omp parallel for if (n > PARALLEL_MIN)
    for (int64_t at = 0; at < n; at += CONVERT_BLOCK) {
        UNINITIALIZED float scratch[CONVERT_BLOCK];
        const int64_t m = min_i64(CONVERT_BLOCK, n - at);
        row_store(dst, at, m, row_load(src, at, m, scratch));
    }
}

void add_inplace(Tensor y, Tensor x, Stream stream) {
    KERNEL_WRITES(stream, y);
    KERNEL_READS(stream, x);
    const int64_t n = tensor_numel(x);
    check_shape("add_inplace", "y", y, 1, n);
#pragma omp parallel for if (n > PARALLEL_MIN)
    for (int64_t at = 0; at < n; at += CONVERT_BLOCK) {
        UNINITIALIZED float scratch[CONVERT_BLOCK], sums[CONVERT_BLOCK];
        const int64_t m = min_i64(CONVERT_BLOCK, n - at);
        const float *more = row_load(x, at, m, scratch), *old = row_load(y, at, m, sums);
        float *sum = row_target(y, at, sums);
#pragma omp simd
        for (int64_t i = 0; i < m; i++) sum[i] = old[i] + more[i];
        row_store(y, at, m, sum);
    }
}

void fill(Tensor t, float value, Stream stream) {
    KERNEL_WRITES(stream, t);
    const int64_t n = tensor_numel(t);
#pragma omp parallel for if (n > PARALLEL_MIN)
    for (int64_t at = 0; at < n; at += CONVERT_BLOCK) {
        UNINITIALIZED float scratch[CONVERT_BLOCK];
        const int64_t m = min_i64(CONVERT_BLOCK, n - at);
        float *row = row_target(t, at, scratch);
        for (int64_t i = 0; i < m; i++) row[i] = value;
        row_store(t, at, m, row);
    }
}

} // namespace cpu
