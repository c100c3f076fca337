// embedding.cpp - token and position embeddings. Forward is a gather; backward is a scatter turned into a gather: positions
// are sorted by token first (counting sort, stable), so that each row of dwte has one owner and a fixed order of terms.
#include "rows.h"

namespace cpu {

void embedding_forward(Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, Stream stream) {
    KERNEL_WRITES(stream, out);
    KERNEL_READS(stream, tokens, wte, wpe);
    const int64_t C = tensor_columns(out), N = tensor_rows(out), T = out.shape[1], V = tensor_rows(wte);
    CHECK(out.ndim == 3 && tensor_rows(wpe) >= T, "embedding_forward: out has %d dimensions, T %" PRId64 ", wpe %" PRId64 " rows", out.ndim, T, tensor_rows(wpe));
    check_act("embedding_forward", "wte", wte, V, C, out.dtype);
    check_act("embedding_forward", "wpe", wpe, tensor_rows(wpe), C, out.dtype);
#pragma omp parallel if (N * C > PARALLEL_MIN)
    {
        float *scratch = scratch_floats(3 * C);
#pragma omp for
        for (int64_t i = 0; i < N; i++) {
            CHECK(tokens[i] >= 0 && tokens[i] < V, "embedding_forward: token %" PRId32 " at %" PRId64 " of a vocabulary of %" PRId64, tokens[i], i, V);
            const float *e = row_load(wte, tokens[i] * C, C, scratch), *p = row_load(wpe, i % T * C, C, scratch + C);
            float *o = row_target(out, i * C, scratch + 2 * C);
            for (int64_t c = 0; c < C; c++) o[c] = e[c] + p[c];
            row_store(out, i * C, C, o);
        }
        free(scratch);
    }
}

// Adds the rows `index[0..n-1]` (or from, from+stride, .. when index is null) of dout to sum, which has C doubles.
static void add_rows(double *__restrict sum, Tensor dout, const int32_t *index, int64_t from, int64_t stride, int64_t n, int64_t C, float *scratch) {
    for (int64_t k = 0; k < n; k++) {
        const float *d = row_load(dout, (index ? index[k] : from + k * stride) * C, C, scratch);
        for (int64_t c = 0; c < C; c++) sum[c] += d[c];
    }
}

static void finish_row(float *__restrict dst, const double *__restrict sum, int64_t C, bool accumulate) {
    for (int64_t c = 0; c < C; c++) dst[c] = (float)(sum[c] + (accumulate ? (double)dst[c] : 0.0));
}

void embedding_backward(Tensor dwte, Tensor dwpe, const int32_t *tokens, Tensor dout, bool accumulate_wte, bool accumulate_wpe, Stream stream) {
    KERNEL_WRITES(stream, dwte, dwpe);
    KERNEL_READS(stream, tokens, dout);
    const int64_t C = tensor_columns(dout), N = tensor_rows(dout), T = dout.shape[1], B = N / T, V = tensor_rows(dwte), P = tensor_rows(dwpe);
    CHECK(dout.ndim == 3 && P >= T && N < INT32_MAX, "embedding_backward: dout has %d dimensions, T %" PRId64 ", dwpe %" PRId64 " rows", dout.ndim, T, P);
    check_f32("embedding_backward", "dwte", dwte, V, C);
    check_f32("embedding_backward", "dwpe", dwpe, P, C);

    int32_t *start = (int32_t *)host_alloc((size_t)(V + 1) * 4), *order = (int32_t *)host_alloc((size_t)N * 4);
    for (int64_t i = 0; i < N; i++) {
        CHECK(tokens[i] >= 0 && tokens[i] < V, "embedding_backward: token %" PRId32 " at %" PRId64 " of a vocabulary of %" PRId64, tokens[i], i, V);
        start[tokens[i] + 1]++;
    }
    for (int64_t v = 0; v < V; v++) start[v + 1] += start[v];
    for (int64_t i = 0; i < N; i++) order[start[tokens[i]]++] = (int32_t)i; // start[v] ends as the start of v+1
#pragma omp parallel if (N * C > PARALLEL_MIN)
    {
        double *sum = (double *)scratch_floats(3 * C);
        float *scratch = (float *)(sum + C);
#pragma omp for schedule(dynamic, 16) nowait // frequent tokens are long rows
        for (int64_t v = 0; v < V; v++) {
            const int64_t first = v ? start[v - 1] : 0, n = start[v] - first;
            if (n == 0 && accumulate_wte) continue;
            memset(sum, 0, (size_t)C * 8);
            add_rows(sum, dout, order + first, 0, 0, n, C, scratch);
            finish_row((float *)dwte.data + v * C, sum, C, accumulate_wte);
        }
#pragma omp for
        for (int64_t t = 0; t < P; t++) {
            if (t >= T && accumulate_wpe) continue;
            memset(sum, 0, (size_t)C * 8);
            if (t < T) add_rows(sum, dout, NULL, t, T, B, C, scratch);
            finish_row((float *)dwpe.data + t * C, sum, C, accumulate_wpe);
        }
        free(sum);
    }
    free(start);
    free(order);
}

} // namespace cpu
