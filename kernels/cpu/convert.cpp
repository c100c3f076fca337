// convert.cpp - element type conversions, sums of two arrays, fills.
#include "rows.h"

namespace cpu {

#define CONVERT_BLOCK 1024 // elements: a thread's scratch stays in the L1 cache

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

void sum_parts(Tensor y, Tensor parts, bool accumulate, Stream stream) {
    KERNEL_WRITES(stream, y);
    KERNEL_READS(stream, parts);
    const int64_t P = tensor_rows(parts), n = tensor_columns(parts);
    check_shape("sum_parts", "y", y, 1, n);
#pragma omp parallel for if (n > PARALLEL_MIN)
    for (int64_t at = 0; at < n; at += CONVERT_BLOCK) {
        UNINITIALIZED float scratch[CONVERT_BLOCK], sums[CONVERT_BLOCK], before[CONVERT_BLOCK];
        const int64_t m = min_i64(CONVERT_BLOCK, n - at);
        memcpy(sums, row_load(parts, at, m, scratch), sizeof(float) * (size_t)m);
        for (int64_t p = 1; p < P; p++) {
            const float *part = row_load(parts, p * n + at, m, scratch);
#pragma omp simd
            for (int64_t i = 0; i < m; i++) sums[i] += part[i];
        }
        for (int64_t i = 0; i < m && parts.dtype != DTYPE_FP32; i++) sums[i] = dtype_round(parts.dtype, sums[i]);
        const float *old = accumulate ? row_load(y, at, m, before) : NULL;
        float *row = row_target(y, at, scratch);
        for (int64_t i = 0; i < m; i++) row[i] = old ? old[i] + sums[i] : sums[i];
        row_store(y, at, m, row);
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
