// embedding.cpp - token and position embeddings. Forward is a gather; backward is a scatter turned into a gather: positions
// are sorted by token first (counting sort, stable), so that each row of dwte has one owner and a fixed order of terms.
#include "rows.h"

namespace cpu {

static void check_embedding(const char *kernel, Tensor rows, Tensor wpe, int64_t first_token, int64_t first_position) {
    CHECK(rows.ndim == 3 && first_token >= 0 && first_position >= 0 && (!wpe.data || tensor_rows(wpe) >= first_position + rows.shape[1]),
          "%s: %d dimensions, T %" PRId64 ", tokens from %" PRId64 ", positions from %" PRId64 " of %" PRId64, kernel, rows.ndim, rows.shape[1], first_token,
          first_position, tensor_rows(wpe));
}

static void check_token(const char *kernel, const int32_t *tokens, int64_t i, int64_t V) {
    CHECK(tokens[i] >= 0 && tokens[i] < V, "%s: token %" PRId32 " at %" PRId64 " of a vocabulary of %" PRId64, kernel, tokens[i], i, V);
}

void embedding_forward(Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t V, int64_t first_token, int64_t first_position, Stream stream) {
    KERNEL_WRITES(stream, out);
    KERNEL_READS(stream, tokens, wte, wpe);
    const char *kernel = "embedding_forward";
    const int64_t C = tensor_columns(out), N = tensor_rows(out), T = out.shape[1], rows = tensor_rows(wte);
    check_embedding(kernel, out, wpe, first_token, first_position);
    check_act(kernel, "wte", wte, rows, C, out.dtype);
    if (wpe.data) check_act(kernel, "wpe", wpe, tensor_rows(wpe), C, out.dtype);
#pragma omp parallel if (N * C > PARALLEL_MIN)
    {
        float *scratch = scratch_floats(3 * C);
#pragma omp for
        for (int64_t i = 0; i < N; i++) {
            check_token(kernel, tokens, i, V);
            const int64_t row = tokens[i] - first_token;
            const float *e = row >= 0 && row < rows ? row_load(wte, row * C, C, scratch) : NULL;
            const float *p = wpe.data ? row_load(wpe, (first_position + i % T) * C, C, scratch + C) : NULL;
            float *o = row_target(out, i * C, scratch + 2 * C);
            for (int64_t c = 0; c < C; c++) o[c] = (e ? e[c] : 0.0f) + (p ? p[c] : 0.0f);
            row_store(out, i * C, C, o);
        }
        free(scratch);
    }
}

void position_forward(Tensor x, Tensor wpe, int64_t first_row, int64_t T, int64_t first_position, Stream stream) {
    KERNEL_WRITES(stream, x);
    KERNEL_READS(stream, wpe);
    const int64_t C = tensor_columns(x), N = tensor_rows(x), P = tensor_rows(wpe);
    check_act("position_forward", "wpe", wpe, P, C, x.dtype);
    CHECK(T > 0 && P >= first_position + T, "position_forward: T %" PRId64 ", positions from %" PRId64 " of %" PRId64, T, first_position, P);
#pragma omp parallel if (N * C > PARALLEL_MIN)
    {
        float *scratch = scratch_floats(2 * C);
#pragma omp for
        for (int64_t i = 0; i < N; i++) {
            const float *p = row_load(wpe, (first_position + (first_row + i) % T) * C, C, scratch), *old = row_load(x, i * C, C, scratch + C);
            float *o = row_target(x, i * C, scratch + C);
            for (int64_t c = 0; c < C; c++) o[c] = old[c] + p[c];
            row_store(x, i * C, C, o);
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

static void tokens_backward(Tensor dwte, const int32_t *tokens, Tensor dout, int64_t V, int64_t first_token, bool accumulate) {
    const int64_t C = tensor_columns(dout), N = tensor_rows(dout), rows = tensor_rows(dwte);
    int32_t *start = (int32_t *)host_alloc((size_t)(rows + 1) * 4), *order = (int32_t *)host_alloc((size_t)N * 4);
    for (int64_t i = 0; i < N; i++) {
        check_token("embedding_backward", tokens, i, V);
        const int64_t row = tokens[i] - first_token;
        if (row >= 0 && row < rows) start[row + 1]++;
    }
    for (int64_t v = 0; v < rows; v++) start[v + 1] += start[v];
    for (int64_t i = 0; i < N; i++) {
        const int64_t row = tokens[i] - first_token;
        if (row >= 0 && row < rows) order[start[row]++] = (int32_t)i; // start[v] ends as the start of v+1
    }
#pragma omp parallel if (N * C > PARALLEL_MIN)
    {
        double *sum = (double *)scratch_floats(3 * C);
        float *scratch = (float *)(sum + C);
#pragma omp for schedule(dynamic, 16) nowait // frequent tokens are long rows
        for (int64_t v = 0; v < rows; v++) {
            const int64_t first = v ? start[v - 1] : 0, n = start[v] - first;
            if (n == 0 && accumulate) continue;
            memset(sum, 0, (size_t)C * 8);
            add_rows(sum, dout, order + first, 0, 0, n, C, scratch);
            finish_row((float *)dwte.data + v * C, sum, C, accumulate);
        }
        free(sum);
    }
    free(start);
    free(order);
}

static void positions_backward(Tensor dwpe, Tensor dout, int64_t first_row, int64_t T, int64_t first_position, bool accumulate) {
    const int64_t C = tensor_columns(dout), N = tensor_rows(dout), P = tensor_rows(dwpe);
#pragma omp parallel if (N * C > PARALLEL_MIN)
    {
        double *sum = (double *)scratch_floats(3 * C);
        float *scratch = (float *)(sum + C);
#pragma omp for
        for (int64_t p = 0; p < P; p++) {
            const int64_t t = p - first_position;
            const bool inside = t >= 0 && t < T;
            if (!inside && accumulate) continue;
            memset(sum, 0, (size_t)C * 8);
            const int64_t from = inside ? (t - first_row % T + T) % T : N; // the first row at this position
            if (from < N) add_rows(sum, dout, NULL, from, T, ceil_div(N - from, T), C, scratch);
            finish_row((float *)dwpe.data + p * C, sum, C, accumulate);
        }
        free(sum);
    }
}

void embedding_backward(Tensor dwte, Tensor dwpe, const int32_t *tokens, Tensor dout, int64_t V, int64_t first_token, int64_t first_position,
                        bool accumulate_wte, bool accumulate_wpe, Stream stream) {
    KERNEL_WRITES(stream, dwte, dwpe);
    KERNEL_READS(stream, tokens, dout);
    const char *kernel = "embedding_backward";
    const int64_t C = tensor_columns(dout);
    check_embedding(kernel, dout, dwpe, first_token, first_position);
    CHECK(tensor_rows(dout) < INT32_MAX, "%s: %" PRId64 " tokens", kernel, tensor_rows(dout));
    check_f32(kernel, "dwte", dwte, tensor_rows(dwte), C);
    tokens_backward(dwte, tokens, dout, V, first_token, accumulate_wte);
    if (!dwpe.data) return;
    check_f32(kernel, "dwpe", dwpe, tensor_rows(dwpe), C);
    positions_backward(dwpe, dout, 0, dout.shape[1], first_position, accumulate_wpe);
}

void position_backward(Tensor dwpe, Tensor dout, int64_t first_row, int64_t T, int64_t first_position, bool accumulate, Stream stream) {
    KERNEL_WRITES(stream, dwpe);
    KERNEL_READS(stream, dout);
    const int64_t P = tensor_rows(dwpe);
    check_f32("position_backward", "dwpe", dwpe, P, tensor_columns(dout));
    CHECK(T > 0 && P >= first_position + T, "position_backward: T %" PRId64 ", positions from %" PRId64 " of %" PRId64, T, first_position, P);
    positions_backward(dwpe, dout, first_row, T, first_position, accumulate);
}

} // namespace cpu
