// convert.cpp - element type conversions, sums of two arrays, fills, and blocks that change places.
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

void residual_forward(Tensor out, Tensor x, Tensor delta, Tensor bias, Stream stream) {
    KERNEL_WRITES(stream, out);
    KERNEL_READS(stream, x, delta, bias);
    const char *kernel = "residual_forward";
    const int64_t N = tensor_rows(out), C = tensor_columns(out);
    check_act(kernel, "x", x, N, C, out.dtype);
    check_act(kernel, "delta", delta, N, C, out.dtype);
    if (bias.data) check_act(kernel, "bias", bias, 1, C, out.dtype);
#pragma omp parallel if (N * C > PARALLEL_MIN)
    {
        float *scratch = scratch_floats(3 * C);
        const float *b = bias.data ? row_load(bias, 0, C, scratch) : NULL;
#pragma omp for
        for (int64_t i = 0; i < N; i++) {
            const float *xr = row_load(x, i * C, C, scratch + C), *d = row_load(delta, i * C, C, scratch + 2 * C);
            float *o = row_target(out, i * C, scratch + C);
            for (int64_t c = 0; c < C; c++) o[c] = xr[c] + (d[c] + (b ? b[c] : 0.0f));
            row_store(out, i * C, C, o);
        }
        free(scratch);
    }
}

void swap_blocks(Tensor out, Tensor inp, Stream stream) {
    KERNEL_WRITES(stream, out);
    KERNEL_READS(stream, inp);
    const int64_t n1 = inp.shape[0], n2 = inp.shape[1], block = inp.shape[2] * dtype_bytes(inp.dtype);
    CHECK(inp.ndim == 3 && out.ndim == 3 && out.dtype == inp.dtype && out.shape[0] == n2 && out.shape[1] == n1 && out.shape[2] == inp.shape[2],
          "swap_blocks: %" PRId64 " x %" PRId64 " blocks of %" PRId64 " from %" PRId64 " x %" PRId64 " of %" PRId64, out.shape[0], out.shape[1], out.shape[2], n1, n2, inp.shape[2]);
#pragma omp parallel for if (tensor_numel(inp) > PARALLEL_MIN)
    for (int64_t i = 0; i < n1; i++)
        for (int64_t j = 0; j < n2; j++) memcpy((char *)out.data + (j * n1 + i) * block, (const char *)inp.data + (i * n2 + j) * block, (size_t)block);
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
