// attention.cpp - causal self-attention of one head at a time, row by row; scratch is a few rows of T.
#include "vector_math.h"

namespace cpu {

void attention_forward(Tensor out, Tensor lse, Tensor qkv, int NH, Stream stream) {
    (void)stream;
    const int64_t B = qkv.shape[0], T = qkv.shape[1], C = tensor_columns(out), HS = C / NH;
    CHECK(qkv.ndim == 3 && C % NH == 0, "attention_forward: C %" PRId64 ", NH %d", C, NH);
    check_act("attention_forward", "out", out, B * T, C, qkv.dtype);
    check_shape("attention_forward", "qkv", qkv, B * T, 3 * C);
    check_f32("attention_forward", "lse", lse, B * NH, T);
    const float scale = 1.0f / sqrtf((float)HS);
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < NH; h++) {
            float *scratch = scratch_floats(T + 3 * HS), *q = scratch + T, *k = q + HS, *o = k + HS;
            for (int64_t t = 0; t < T; t++) {
                const float *qr = row_load(qkv, (b * T + t) * 3 * C + h * HS, HS, q);
                float largest = -INFINITY;
                double sum = 0;
                for (int64_t s = 0; s <= t; s++) {
                    const float *kr = row_load(qkv, (b * T + s) * 3 * C + C + h * HS, HS, k);
                    float dot = 0;
                    for (int64_t d = 0; d < HS; d++) dot += qr[d] * kr[d];
                    scratch[s] = dot * scale;
                    largest = fmaxf(largest, scratch[s]);
                }
                for (int64_t s = 0; s <= t; s++) sum += scratch[s] = exp_fast(scratch[s] - largest);
                memset(o, 0, (size_t)HS * 4);
                for (int64_t s = 0; s <= t; s++) {
                    const float *vr = row_load(qkv, (b * T + s) * 3 * C + 2 * C + h * HS, HS, k);
                    for (int64_t d = 0; d < HS; d++) o[d] += scratch[s] * vr[d];
                }
                for (int64_t d = 0; d < HS; d++) o[d] /= (float)sum;
                row_store(out, (b * T + t) * C + h * HS, HS, o);
                ((float *)lse.data)[(b * NH + h) * T + t] = largest + (float)log(sum);
            }
            free(scratch);
        }
}

void attention_backward(Tensor dqkv, Tensor dout, Tensor qkv, Tensor out, Tensor lse, int NH, Stream stream) {
    (void)stream;
    const int64_t B = qkv.shape[0], T = qkv.shape[1], C = tensor_columns(out), HS = C / NH;
    check_act("attention_backward", "dqkv", dqkv, B * T, 3 * C, qkv.dtype);
    check_act("attention_backward", "dout", dout, B * T, C, qkv.dtype);
    check_act("attention_backward", "out", out, B * T, C, qkv.dtype);
    check_f32("attention_backward", "lse", lse, B * NH, T);
    const float scale = 1.0f / sqrtf((float)HS);
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < NH; h++) {
            float *all = scratch_floats(8 * T * HS), *q = all, *k = q + T * HS, *v = k + T * HS, *d = v + T * HS, *o = d + T * HS;
            float *dq = o + T * HS, *dk = dq + T * HS, *dv = dk + T * HS;
            memset(dq, 0, (size_t)(3 * T * HS) * 4);
            for (int64_t t = 0; t < T; t++) {
                const int64_t at = (b * T + t) * 3 * C + h * HS, at_out = (b * T + t) * C + h * HS;
                floats_load(q + t * HS, qkv.data, qkv.dtype, at, HS);
                floats_load(k + t * HS, qkv.data, qkv.dtype, at + C, HS);
                floats_load(v + t * HS, qkv.data, qkv.dtype, at + 2 * C, HS);
                floats_load(d + t * HS, dout.data, qkv.dtype, at_out, HS);
                floats_load(o + t * HS, out.data, qkv.dtype, at_out, HS);
            }
            for (int64_t t = 0; t < T; t++) {
                float D = 0;
                for (int64_t i = 0; i < HS; i++) D += d[t * HS + i] * o[t * HS + i];
                for (int64_t s = 0; s <= t; s++) {
                    float dot = 0, dp = 0;
                    for (int64_t i = 0; i < HS; i++) {
                        dot += q[t * HS + i] * k[s * HS + i];
                        dp += d[t * HS + i] * v[s * HS + i];
                    }
                    const float p = exp_fast(dot * scale - ((const float *)lse.data)[(b * NH + h) * T + t]), ds = p * (dp - D) * scale;
                    for (int64_t i = 0; i < HS; i++) {
                        dq[t * HS + i] += ds * k[s * HS + i];
                        dk[s * HS + i] += ds * q[t * HS + i];
                        dv[s * HS + i] += p * d[t * HS + i];
                    }
                }
            }
            for (int64_t t = 0; t < T; t++)
                for (int j = 0; j < 3; j++)
                    floats_store(dqkv.data, qkv.dtype, (b * T + t) * 3 * C + j * C + h * HS, dq + (j * T + t) * HS, HS);
            free(all);
        }
}

} // namespace cpu
