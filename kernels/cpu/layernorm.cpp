// layernorm.cpp - LayerNorm (Ba, Kiros and Hinton 2016), alone and after the residual addition. Statistics are summed in double.
#include "rows.h"

namespace cpu {

// One row: statistics and normalised output. All pointers to C floats.
static void normalize_row(float *__restrict out, float *mean, float *rstd, const float *__restrict x, const float *__restrict w,
                          const float *__restrict b, int64_t C, float eps) {
    double sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < C; c++) sum += (double)x[c];
    const double m = sum / (double)C;
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < C; c++) squares += ((double)x[c] - m) * ((double)x[c] - m);
    const float r = (float)(1.0 / sqrt(squares / (double)C + (double)eps)), mf = (float)m;
    for (int64_t c = 0; c < C; c++) out[c] = (x[c] - mf) * r * w[c] + b[c];
    *mean = mf;
    *rstd = r;
}

// With delta: residual = x + delta (+ bias) first. x and residual may be the same memory.
static void layernorm_rows(const char *kernel, Tensor residual, Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor delta, Tensor bias, Tensor w, Tensor b,
                           float eps) {
    const int64_t C = tensor_columns(out), N = tensor_rows(out);
    check_act(kernel, "x", x, N, C, out.dtype);
    check_act(kernel, "w", w, 1, C, out.dtype);
    check_act(kernel, "b", b, 1, C, out.dtype);
    check_f32(kernel, "mean", mean, 1, N);
    check_f32(kernel, "rstd", rstd, 1, N);
    if (delta.data) {
        check_act(kernel, "delta", delta, N, C, out.dtype);
        check_act(kernel, "residual", residual, N, C, out.dtype);
        if (bias.data) check_act(kernel, "bias", bias, 1, C, out.dtype);
    }
#pragma omp parallel if (N * C > PARALLEL_MIN)
    {
        float *scratch = scratch_floats(6 * C), *sum_row = scratch + 3 * C, *out_row = scratch + 4 * C;
        const float *wf = row_load(w, 0, C, scratch), *bf = row_load(b, 0, C, scratch + C);
        const float *biasf = bias.data ? row_load(bias, 0, C, scratch + 5 * C) : NULL;
#pragma omp for
        for (int64_t i = 0; i < N; i++) {
            const float *xr = row_load(x, i * C, C, sum_row);
            if (delta.data) {
                const float *dr = row_load(delta, i * C, C, scratch + 2 * C);
                float *rr = row_target(residual, i * C, sum_row);
                for (int64_t c = 0; c < C; c++) rr[c] = xr[c] + (dr[c] + (biasf ? biasf[c] : 0.0f));
                row_store(residual, i * C, C, rr);
                xr = row_load(residual, i * C, C, sum_row); // backward will see the rounded sum, so forward does too
            }
            float *o = row_target(out, i * C, out_row);
            normalize_row(o, (float *)mean.data + i, (float *)rstd.data + i, xr, wf, bf, C, eps);
            row_store(out, i * C, C, o);
        }
        free(scratch);
    }
}

void layernorm_forward(Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor w, Tensor b, float eps, Stream stream) {
    KERNEL_WRITES(stream, out, mean, rstd);
    KERNEL_READS(stream, x, w, b);
    layernorm_rows("layernorm_forward", tensor_none(), out, mean, rstd, x, tensor_none(), tensor_none(), w, b, eps);
}

void residual_layernorm_forward(Tensor residual, Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor delta, Tensor bias, Tensor w, Tensor b, float eps,
                                Stream stream) {
    KERNEL_WRITES(stream, residual, out, mean, rstd);
    KERNEL_READS(stream, x, delta, bias, w, b);
    layernorm_rows("residual_layernorm_forward", residual, out, mean, rstd, x, delta, bias, w, b, eps);
}

// Sums over rows, each of C doubles, one after another.
enum { SUM_DW, SUM_DB, SUM_DRESIDUAL, SUM_DX, ROW_SUMS };

// One row of dx; adds the row's share to the piece's sums.
static void backward_row(float *dx, double *__restrict sums, const float *dout, const float *__restrict x, const float *__restrict w, float mean, float rstd,
                         const float *dresidual, int64_t C) {
    double *__restrict dw = sums + SUM_DW * C, *__restrict db = sums + SUM_DB * C, *__restrict dr = sums + SUM_DRESIDUAL * C, *__restrict ds = sums + SUM_DX * C;
    double sum_g = 0, sum_gn = 0;
#pragma omp simd reduction(+ : sum_g, sum_gn)
    for (int64_t c = 0; c < C; c++) {
        const float n = (x[c] - mean) * rstd, g = dout[c] * w[c];
        sum_g += (double)g;
        sum_gn += (double)(g * n);
        dw[c] += (double)(dout[c] * n);
        db[c] += (double)dout[c];
    }
    const float mean_g = (float)(sum_g / (double)C), mean_gn = (float)(sum_gn / (double)C);
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
        const float n = (x[c] - mean) * rstd, g = dout[c] * w[c];
        const float r = dresidual ? dresidual[c] : 0.0f, d = r + rstd * (g - mean_g - n * mean_gn);
        dr[c] += (double)r;
        ds[c] += (double)d;
        dx[c] = d;
    }
}

int64_t layernorm_backward_channels_max(bool) { return INT64_MAX; }

void layernorm_backward(Tensor dx, Tensor dw, Tensor db, Tensor sum_dresidual, Tensor sum_dx, Tensor dout, Tensor x, Tensor w, Tensor mean, Tensor rstd,
                        Tensor dresidual, bool accumulate, Stream stream) {
    KERNEL_WRITES(stream, dx, dw, db, sum_dresidual, sum_dx);
    KERNEL_READS(stream, dout, x, w, mean, rstd, dresidual);
    const int64_t C = tensor_columns(dout), N = tensor_rows(dout);
    const char *kernel = "layernorm_backward";
    check_act(kernel, "dx", dx, N, C, dout.dtype);
    check_act(kernel, "x", x, N, C, dout.dtype);
    check_act(kernel, "w", w, 1, C, dout.dtype);
    check_weight_grad(kernel, "dw", dw, 1, C, dout.dtype);
    check_weight_grad(kernel, "db", db, 1, C, dout.dtype);
    check_f32(kernel, "mean", mean, 1, N);
    check_f32(kernel, "rstd", rstd, 1, N);
    if (dresidual.data) check_act(kernel, "dresidual", dresidual, N, C, dout.dtype);

    if (sum_dresidual.data) check_weight_grad(kernel, "sum_dresidual", sum_dresidual, 1, C, dout.dtype);
    if (sum_dx.data) check_weight_grad(kernel, "sum_dx", sum_dx, 1, C, dout.dtype);
    CHECK(dresidual.data || !sum_dresidual.data, "layernorm_backward: the sum of a dresidual that is not given");

    // Sums over rows: at most 64 pieces of at least 16 rows each have their own, added in order at the end.
    const int64_t piece = max_i64(16, ceil_div(N, 64)), pieces = ceil_div(N, piece);
    double *sums = (double *)host_alloc((size_t)(pieces * ROW_SUMS * C) * 8);
#pragma omp parallel if (N * C > PARALLEL_MIN)
    {
        float *scratch = scratch_floats(5 * C);
        const float *wf = row_load(w, 0, C, scratch);
#pragma omp for
        for (int64_t p = 0; p < pieces; p++) {
            for (int64_t i = p * piece; i < min_i64(N, (p + 1) * piece); i++) {
                const float *d = row_load(dout, i * C, C, scratch + C), *xr = row_load(x, i * C, C, scratch + 2 * C);
                const float *r = dresidual.data ? row_load(dresidual, i * C, C, scratch + 3 * C) : NULL;
                float *o = row_target(dx, i * C, scratch + 4 * C);
                backward_row(o, sums + p * ROW_SUMS * C, d, xr, wf, ((const float *)mean.data)[i], ((const float *)rstd.data)[i], r, C);
                row_store(dx, i * C, C, o);
            }
        }
        free(scratch);
    }
    for (int64_t p = 1; p < pieces; p++)
        for (int64_t c = 0; c < ROW_SUMS * C; c++) sums[c] += sums[p * ROW_SUMS * C + c];
    const Tensor out[ROW_SUMS] = {dw, db, sum_dresidual, sum_dx};
    for (int k = 0; k < ROW_SUMS; k++) if (out[k].data) sums_store(out[k], 0, C, sums + k * C, accumulate);
    free(sums);
}

} // namespace cpu
