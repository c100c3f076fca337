// matmul.cpp - the three matrix products of a linear layer.
#include "vector_math.h"

namespace cpu {

void linear_forward(Tensor out, Tensor inp, Tensor w, Tensor bias, Tensor residual, Tensor pre_gelu, Stream stream) {
    (void)stream;
    const int64_t N = tensor_rows(inp), C = tensor_columns(inp), OC = tensor_columns(out);
    const char *kernel = "linear_forward";
    check_act(kernel, "out", out, N, OC, inp.dtype);
    check_act(kernel, "w", w, OC, C, inp.dtype);
    if (bias.data) check_act(kernel, "bias", bias, 1, OC, inp.dtype);
    if (residual.data) check_act(kernel, "residual", residual, N, OC, inp.dtype);
    if (pre_gelu.data) check_act(kernel, "pre_gelu", pre_gelu, N, OC, inp.dtype);
#pragma omp parallel
    {
        float *scratch = scratch_floats(2 * C + 4 * OC), *bs = scratch + 2 * C, *rs = bs + OC, *os = rs + OC, *ps = os + OC;
#pragma omp for
        for (int64_t i = 0; i < N; i++) {
            const float *x = row_load(inp, i * C, C, scratch), *b = bias.data ? row_load(bias, 0, OC, bs) : NULL;
            const float *r = residual.data ? row_load(residual, i * OC, OC, rs) : NULL;
            for (int64_t o = 0; o < OC; o++) {
                const float *wr = row_load(w, o * C, C, scratch + C);
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t c = 0; c < C; c++) sum += x[c] * wr[c];
                sum += b ? b[o] : 0;
                ps[o] = sum;
                os[o] = pre_gelu.data ? gelu(sum) : sum + (r ? r[o] : 0);
            }
            if (pre_gelu.data) row_store(pre_gelu, i * OC, OC, ps);
            row_store(out, i * OC, OC, os);
        }
        free(scratch);
    }
}

void linear_backward_input(Tensor dinp, Tensor dout, Tensor w, Tensor pre_gelu, Stream stream) {
    (void)stream;
    const int64_t N = tensor_rows(dout), OC = tensor_columns(dout), C = tensor_columns(dinp);
    const char *kernel = "linear_backward_input";
    check_act(kernel, "dinp", dinp, N, C, dout.dtype);
    check_act(kernel, "w", w, OC, C, dout.dtype);
    if (pre_gelu.data) check_act(kernel, "pre_gelu", pre_gelu, N, C, dout.dtype);
#pragma omp parallel
    {
        float *scratch = scratch_floats(3 * C + OC), *sum = scratch + C, *pre = sum + C, *ds = pre + C;
#pragma omp for
        for (int64_t i = 0; i < N; i++) {
            const float *d = row_load(dout, i * OC, OC, ds);
            memset(sum, 0, (size_t)C * 4);
            for (int64_t o = 0; o < OC; o++) {
                const float *wr = row_load(w, o * C, C, scratch);
                for (int64_t c = 0; c < C; c++) sum[c] += d[o] * wr[c];
            }
            if (pre_gelu.data) {
                const float *p = row_load(pre_gelu, i * C, C, pre);
                for (int64_t c = 0; c < C; c++) sum[c] *= gelu_derivative(p[c]);
            }
            row_store(dinp, i * C, C, sum);
        }
        free(scratch);
    }
}

void linear_backward_weight(Tensor dw, Tensor dbias, Tensor dout, Tensor inp, bool accumulate, Stream stream) {
    const int64_t N = tensor_rows(dout), OC = tensor_columns(dout), C = tensor_columns(inp);
    const char *kernel = "linear_backward_weight";
    check_f32(kernel, "dw", dw, OC, C);
    check_act(kernel, "inp", inp, N, C, dout.dtype);
    if (dbias.data) bias_backward(dbias, dout, accumulate, stream);
#pragma omp parallel
    {
        float *scratch = scratch_floats(3 * C), *sum = scratch + C;
#pragma omp for
        for (int64_t o = 0; o < OC; o++) {
            memset(sum, 0, (size_t)C * 4);
            for (int64_t i = 0; i < N; i++) {
                const float *x = row_load(inp, i * C, C, scratch);
                const float d = dtype_load(dout.data, dout.dtype, i * OC + o);
                for (int64_t c = 0; c < C; c++) sum[c] += d * x[c];
            }
            float *row = (float *)dw.data + o * C;
            for (int64_t c = 0; c < C; c++) row[c] = sum[c] + (accumulate ? row[c] : 0);
        }
        free(scratch);
    }
}

} // namespace cpu
