// gelu.cpp - the GELU in its tanh form, element by element; the arithmetic is in vector_math.h.
#include "vector_math.h"

namespace cpu {

#define GELU_BLOCK 1024 // elements: a block's scratch stays in the L1 cache

void gelu_forward(Tensor out, Tensor x, Stream stream) {
    KERNEL_WRITES(stream, out);
    KERNEL_READS(stream, x);
    const int64_t n = tensor_numel(x);
    check_act("gelu_forward", "out", out, tensor_rows(x), tensor_columns(x), x.dtype);
#pragma omp parallel for if (n > PARALLEL_MIN)
    for (int64_t at = 0; at < n; at += GELU_BLOCK) {
        UNINITIALIZED float in_scratch[GELU_BLOCK], out_scratch[GELU_BLOCK];
        const int64_t m = min_i64(GELU_BLOCK, n - at);
        const float *in = row_load(x, at, m, in_scratch);
        float *o = row_target(out, at, out_scratch);
#pragma omp simd
        for (int64_t i = 0; i < m; i++) o[i] = gelu(in[i]);
        row_store(out, at, m, o);
    }
}

void gelu_backward(Tensor dx, Tensor dout, Tensor x, Stream stream) {
    KERNEL_WRITES(stream, dx);
    KERNEL_READS(stream, dout, x);
    const int64_t n = tensor_numel(x);
    check_act("gelu_backward", "dout", dout, tensor_rows(x), tensor_columns(x), x.dtype);
    check_act("gelu_backward", "dx", dx, tensor_rows(x), tensor_columns(x), x.dtype);
#pragma omp parallel for if (n > PARALLEL_MIN)
    for (int64_t at = 0; at < n; at += GELU_BLOCK) {
        UNINITIALIZED float x_scratch[GELU_BLOCK], dout_scratch[GELU_BLOCK], dx_scratch[GELU_BLOCK];
        const int64_t m = min_i64(GELU_BLOCK, n - at);
        const float *in = row_load(x, at, m, x_scratch), *d = row_load(dout, at, m, dout_scratch);
        float *o = row_target(dx, at, dx_scratch);
#pragma omp simd
        for (int64_t i = 0; i < m; i++) o[i] = d[i] * gelu_derivative(in[i]);
        row_store(dx, at, m, o);
    }
}

} // namespace cpu
