// classifier.cpp - softmax and cross-entropy of a row of logits in one kernel, its gradient written over the logits.
#include "vector_math.h"

namespace cpu {

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
            CHECK(target < V, "classifier_forward_backward: target %" PRId32 " at %" PRId64 " of a vocabulary of %" PRId64, target, i, V);
            float loss = 0.0f;
            float *row = row_target(logits, i * Vp, scratch);
            if (target < 0) {
                if (write_dlogits) memset(row, 0, (size_t)Vp * 4);
            } else {
                row_load(logits, i * Vp, V, scratch);
                const float largest = largest_of(row, V);
                double sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t j = 0; j < V; j++) {
                    e[j] = exp_fast(row[j] - largest);
                    sum += (double)e[j];
                }
                loss = (float)(log(sum) + (double)largest - (double)row[target]);
                if (write_dlogits) {
                    const float scale = (float)((double)dloss / sum);
                    for (int64_t j = 0; j < V; j++) row[j] = e[j] * scale;
                    // softmax - 1 without its cancellation when the target is nearly certain: minus the others' share
                    row[target] = (float)(((double)e[target] - sum) * ((double)dloss / sum));
                    memset(row + V, 0, (size_t)(Vp - V) * 4);
                }
            }
            if (write_dlogits) row_store(logits, i * Vp, Vp, row);
            ((float *)losses.data)[i] = loss;
        }
        free(scratch);
    }
}

} // namespace cpu
