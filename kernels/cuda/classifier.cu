// classifier.cu - softmax, cross-entropy and its gradient in one kernel; the logits are read and overwritten in place.
#include "common.cuh"

// A running softmax denominator: the largest value seen, and the sum of exp(x - largest).
typedef struct {
    float largest, sum;
} Denominator;

// The start is finite so that the difference of two of them is never NaN, even for logits of minus infinity.
__device__ static inline Denominator denominator_empty(void) { return {-FLT_MAX, 0.0f}; }

__device__ static inline Denominator denominator_join(Denominator a, Denominator b) {
    float largest = fmaxf(a.largest, b.largest);
    return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
}

// One block a row. loss = log sum exp(x) - x[target];  dx_j = (softmax_j - [j = target]) dloss.
template <typename T, int W>
__global__ void __launch_bounds__(1024)
classifier_kernel(T *logits, float *losses, const int32_t *targets, int64_t V, int64_t Vp, float dloss, bool write_dlogits) {
    __shared__ Denominator of_warp[32];
    T *row = logits + (int64_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x];
    if (target < 0) { // the same for the whole block: nobody waits at the barrier below
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        if (write_dlogits) {
            Vec<T, W> zero;
#pragma unroll
            for (int i = 0; i < W; i++) zero.set(i, 0.0f);
            for (int64_t c = (int64_t)threadIdx.x * W; c < Vp; c += (int64_t)blockDim.x * W) vec_store<W>(row + c, zero);
        }
        return;
    }

    Denominator mine = denominator_empty();
    for (int64_t c = (int64_t)threadIdx.x * W; c < V; c += (int64_t)blockDim.x * W) {
        Vec<T, W> x = vec_load<W>(row + c);
        float largest = mine.largest;
#pragma unroll
        for (int i = 0; i < W; i++) if (c + i < V) largest = fmaxf(largest, x.at(i));
        float sum = mine.sum * expf(mine.largest - largest);
#pragma unroll
        for (int i = 0; i < W; i++) if (c + i < V) sum += expf(x.at(i) - largest);
        mine = {largest, sum};
    }
    for (int offset = 16; offset > 0; offset >>= 1) {
        Denominator other = {__shfl_xor_sync(0xffffffffu, mine.largest, offset), __shfl_xor_sync(0xffffffffu, mine.sum, offset)};
        mine = denominator_join(mine, other);
    }
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
    float at_target = threadIdx.x == 0 ? to_float(row[target]) : 0.0f; // before anybody overwrites it
    __syncthreads();
    Denominator all = of_warp[0]; // every thread joins the warps in the same order
    for (int k = 1; k < (int)blockDim.x / 32; k++) all = denominator_join(all, of_warp[k]);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(all.sum) + all.largest - at_target;
    if (!write_dlogits) return;

    float scale = 1.0f / all.sum;
    for (int64_t c = (int64_t)threadIdx.x * W; c < Vp; c += (int64_t)blockDim.x * W) {
        Vec<T, W> x = vec_load<W>(row + c);
#pragma unroll
        for (int i = 0; i < W; i++) {
            float p = expf(x.at(i) - all.largest) * scale;
            x.set(i, c + i < V ? (p - (c + i == target ? 1.0f : 0.0f)) * dloss : 0.0f);
        }
        vec_store<W>(row + c, x);
    }
}

void cuda::classifier_forward_backward(Tensor logits, Tensor losses, const int32_t *targets, int64_t V, float dloss, bool write_dlogits,
                                       Stream stream) {
    const int64_t rows = tensor_rows(logits), Vp = tensor_columns(logits);
    const cudaStream_t s = (cudaStream_t)stream;
    CHECK(V >= 1 && V <= Vp, "classifier_forward_backward: V is %" PRId64 " with %" PRId64 " columns", V, Vp);
    check_f32("classifier_forward_backward", "losses", losses, 1, rows);
    if (rows == 0) return;
    FLOATX_SWITCH(logits.dtype, WIDTH_SWITCH(Vp % vec_width<floatX>() == 0 && is_aligned(logits.data, 16), vec_width<floatX>(), {
        const int threads = (int)min_i64(1024, round_up(ceil_div(Vp, W), 32));
        classifier_kernel<floatX, W><<<grid_blocks(rows), threads, 0, s>>>(
            elements<floatX>(logits), elements<float>(losses), targets, V, Vp, dloss, write_dlogits);
        launch_check();
    }));
}
