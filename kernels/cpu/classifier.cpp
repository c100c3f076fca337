// classifier.cpp - softmax and cross-entropy of a row of logits in one kernel, its gradient written over the logits; and in
// two, for columns that are a part of the vocabulary.
#include "vector_math.h"
#include <float.h>

namespace cpu {

static void check_target(const char *kernel, const int32_t *targets, int64_t i, int64_t V) {
    CHECK(targets[i] < V, "%s: target %" PRId32 " at %" PRId64 " of a vocabulary of %" PRId64, kernel, targets[i], i, V);
}

// e = exp(row - largest); returns their sum.
static double exponentials(float *__restrict e, const float *__restrict row, float largest, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; j++) {
        e[j] = exp_fast(row[j] - largest);
        sum += (double)e[j];
    }
    return sum;
}

// row = the gradient of n columns of `width`, of which `target` may be one: softmax - [j = target], times dloss.
static void gradient_row(float *__restrict row, const float *__restrict e, double sum, float dloss, int64_t target, int64_t n, int64_t width) {
    const float scale = (float)((double)dloss / sum);
    for (int64_t j = 0; j < n; j++) row[j] = e[j] * scale;
    // softmax - 1 without its cancellation when the target is nearly certain: minus the others' share
    if (target >= 0 && target < n) row[target] = (float)(((double)e[target] - sum) * ((double)dloss / sum));
    memset(row + n, 0, (size_t)(width - n) * 4);
}

void classifier_forward_backward(Tensor logits, Tensor losses, const int32_t *targets, int64_t V, float dloss, bool write_dlogits, Stream stream) {
    KERNEL_WRITES(stream, logits, losses);
    KERNEL_READS(stream, targets);
    const int64_t Vp = tensor_columns(logits), N = tensor_rows(logits);
    CHECK(logits.data && V > 0 && V <= Vp, "classifier_forward_backward: V %" PRId64 ", padded %" PRId64, V, Vp);
    check_f32("classifier_forward_backward", "losses", losses, 1, N);
#pragma omp parallel if (N * Vp > PARALLEL_MIN)
    {
        float *scratch = scratch_floats(2 * Vp), *e = scratch + Vp;
#pragma omp for
        for (int64_t i = 0; i < N; i++) {
            const int32_t target = targets[i];
            check_target("classifier_forward_backward", targets, i, V);
            float loss = 0.0f;
            float *row = row_target(logits, i * Vp, scratch);
            if (target < 0) {
                if (write_dlogits) memset(row, 0, (size_t)Vp * 4);
            } else {
                row_load(logits, i * Vp, V, scratch);
                const float largest = largest_of(row, V);
                const double sum = exponentials(e, row, largest, V);
                loss = (float)(log(sum) + (double)largest - (double)row[target]);
                if (write_dlogits) gradient_row(row, e, sum, dloss, target, V, Vp);
            }
            if (write_dlogits) row_store(logits, i * Vp, Vp, row);
            ((float *)losses.data)[i] = loss;
        }
        free(scratch);
    }
}

// Columns of a part of W that are tokens.
static int64_t columns_below(int64_t V, int64_t first, int64_t W) { return max_i64(0, min_i64(W, V - first)); }

void classifier_statistics(Tensor statistics, Tensor logits, const int32_t *targets, int64_t V, int64_t first, Stream stream) {
    KERNEL_WRITES(stream, statistics);
    KERNEL_READS(stream, logits, targets);
    const int64_t W = tensor_columns(logits), N = tensor_rows(logits), n = columns_below(V, first, W);
    check_f32("classifier_statistics", "statistics", statistics, N, 3);
#pragma omp parallel if (N * W > PARALLEL_MIN)
    {
        float *scratch = scratch_floats(2 * W);
#pragma omp for
        for (int64_t i = 0; i < N; i++) {
            check_target("classifier_statistics", targets, i, V);
            const float *row = row_load(logits, i * W, W, scratch);
            const int64_t target = targets[i] < 0 ? -1 : targets[i] - first;
            const float largest = n > 0 ? largest_of(row, n) : -FLT_MAX;
            float *s = (float *)statistics.data + 3 * i;
            s[0] = largest;
            s[1] = (float)exponentials(scratch + W, row, largest, n);
            s[2] = target >= 0 && target < n ? row[target] : 0.0f;
        }
        free(scratch);
    }
}

void classifier_from_statistics(Tensor logits, Tensor losses, Tensor statistics, const int32_t *targets, int64_t V, int64_t first, float dloss,
                                bool write_dlogits, Stream stream) {
    KERNEL_WRITES(stream, logits, losses);
    KERNEL_READS(stream, statistics, targets);
    const int64_t W = tensor_columns(logits), N = tensor_rows(logits), P = statistics.shape[0], n = columns_below(V, first, W);
    const char *kernel = "classifier_from_statistics";
    CHECK(statistics.ndim == 3, "%s: statistics of %d dimensions", kernel, statistics.ndim);
    check_f32(kernel, "statistics", statistics, P * N, 3);
    check_f32(kernel, "losses", losses, 1, N);
#pragma omp parallel if (N * W > PARALLEL_MIN)
    {
        float *scratch = scratch_floats(2 * W), *e = scratch + W;
#pragma omp for
        for (int64_t i = 0; i < N; i++) {
            const float *s = (const float *)statistics.data + 3 * i;
            float largest = s[0];
            double sum = 0, at_target = 0;
            check_target(kernel, targets, i, V);
            for (int64_t p = 1; p < P; p++) if (s[3 * N * p] > largest) largest = s[3 * N * p];
            for (int64_t p = 0; p < P; p++) {
                sum += (double)s[3 * N * p + 1] * exp((double)s[3 * N * p] - (double)largest);
                at_target += (double)s[3 * N * p + 2];
            }
            ((float *)losses.data)[i] = targets[i] < 0 ? 0.0f : (float)(log(sum) + (double)largest - at_target);
            if (!write_dlogits) continue;
            float *row = row_target(logits, i * W, scratch);
            if (targets[i] < 0) memset(row, 0, (size_t)W * 4);
            else {
                row_load(logits, i * W, W, scratch);
                exponentials(e, row, largest, n);
                gradient_row(row, e, sum, dloss, targets[i] - first, n, W);
            }
            row_store(logits, i * W, W, row);
        }
        free(scratch);
    }
}

} // namespace cpu
