// classifier.cu - softmax, cross-entropy and its gradient in one kernel; the logits are read and overwritten in place.
//
// One block a row. The softmax's denominator must be known before the first gradient, so a row is needed twice; a block
// keeps it in shared memory in between, where it fits (50,304 bf16 are 100 KB), and two blocks share a processor: one
// reads while the other writes. Memory then sees each logit read once and written once. Each thread copies, reduces and
// overwrites the same vectors, so that only the denominator passes between threads.
#include "common.cuh"

enum { CLASSIFIER_THREADS = 512, COPIES_AHEAD = 8 }; // vectors of a thread on their way

#define LOG2_E 1.4426950408889634f

// A running softmax denominator (Milakov and Gimelshein 2018): the largest value seen, and the sum of exp(x - largest).
typedef struct {
    float largest, sum;
} Denominator;

// The start is finite so that the difference of two of them is never NaN, even for logits of minus infinity.
__device__ static inline Denominator denominator_empty(void) { return {-FLT_MAX, 0.0f}; }

__device__ static inline float exp_fast(float x) { return exp2_fast(x * LOG2_E); }

__device__ static inline Denominator denominator_join(Denominator a, Denominator b) {
    float largest = fmaxf(a.largest, b.largest);
    return {largest, a.sum * exp_fast(a.largest - largest) + b.sum * exp_fast(b.largest - largest)};
}

// Adds the first `count` elements of x.
template <typename T, int W> __device__ static inline Denominator denominator_add(Denominator d, Vec<T, W> x, int count) {
    float largest = d.largest;
#pragma unroll
    for (int i = 0; i < W; i++) if (i < count) largest = fmaxf(largest, x.at(i));
    float sum = d.sum * exp_fast(d.largest - largest);
#pragma unroll
    for (int i = 0; i < W; i++) if (i < count) sum += exp_fast(x.at(i) - largest);
    return {largest, sum};
}

// The joint denominator of the block's threads; all get it, joined in the same order. of_warp holds 32.
__device__ static inline Denominator denominator_of_block(Denominator mine, Denominator *of_warp) {
    const int lane = threadIdx.x % 32, warps = (blockDim.x + 31) / 32;
    for (int offset = 16; offset > 0; offset >>= 1)
        mine = denominator_join(mine, {__shfl_xor_sync(0xffffffffu, mine.largest, offset), __shfl_xor_sync(0xffffffffu, mine.sum, offset)});
    if (lane == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    mine = lane < warps ? of_warp[lane] : denominator_empty();
    for (int offset = 16; offset > 0; offset >>= 1)
        mine = denominator_join(mine, {__shfl_xor_sync(0xffffffffu, mine.largest, offset), __shfl_xor_sync(0xffffffffu, mine.sum, offset)});
    return mine;
}

// loss = log sum exp(x) - x[target];  dx_j = (softmax_j - [j = target]) dloss. KEPT: the row lies in shared memory between
// the passes; otherwise it is read twice.
template <typename T, int W, bool KEPT>
__global__ void __launch_bounds__(CLASSIFIER_THREADS)
classifier_kernel(T *logits, float *losses, const int32_t *targets, int V, int Vp, float dloss, bool write_dlogits) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    __shared__ Denominator of_warp[32];
    T *kept = reinterpret_cast<T *>(shared_bytes), *row = logits + (int64_t)blockIdx.x * Vp;
    const int target = targets[blockIdx.x], first = threadIdx.x * W, step = blockDim.x * W;
    if (target < 0) { // the same for the whole block: nobody waits at the barrier below
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        Vec<T, W> zero;
#pragma unroll
        for (int i = 0; i < W; i++) zero.set(i, 0.0f);
        for (int c = first; c < Vp && write_dlogits; c += step) vec_store<W>(row + c, zero);
        return;
    }

    Denominator mine = denominator_empty();
    const float at_target = threadIdx.x == 0 ? to_float(row[target]) : 0.0f; // before anybody overwrites it
    if constexpr (KEPT) {
        for (int k = 0; k < COPIES_AHEAD; k++) {
            const int c = first + k * step;
            if (c < Vp) copy_async_16(kept + c, row + c, true);
            copy_async_group();
        }
    }
    for (int c = first; c < Vp; c += step) {
        if constexpr (KEPT) {
            const int ahead = c + COPIES_AHEAD * step;
            if (ahead < Vp) copy_async_16(kept + ahead, row + ahead, true);
            copy_async_group();
            copy_async_wait_but<COPIES_AHEAD>();
        }
        Vec<T, W> x = vec_load<W>((KEPT ? kept : row) + c);
        if (c + W <= V) mine = denominator_add<T, W>(mine, x, W);
        else if (c < V) mine = denominator_add<T, W>(mine, x, V - c);
    }
    const Denominator all = denominator_of_block(mine, of_warp);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(all.sum) + all.largest - at_target;
    if (!write_dlogits) return;

    const float scale = dloss / all.sum;
#pragma unroll 4
    for (int c = first; c < Vp; c += step) {
        Vec<T, W> x = vec_load<W>((KEPT ? kept : row) + c), y;
#pragma unroll
        for (int i = 0; i < W; i++) y.set(i, exp_fast(x.at(i) - all.largest) * scale);
        if (target - c < W && target >= c) {
#pragma unroll
            for (int i = 0; i < W; i++) if (c + i == target) y.set(i, (exp_fast(x.at(i) - all.largest) / all.sum - 1.0f) * dloss);
        }
        if (c + W > V) {
#pragma unroll
            for (int i = 0; i < W; i++) if (c + i >= V) y.set(i, 0.0f);
        }
        vec_store<W>(row + c, y);
    }
}

void cuda::classifier_forward_backward(Tensor logits, Tensor losses, const int32_t *targets, int64_t V, float dloss, bool write_dlogits,
                                       Stream stream) {
    const int64_t rows = tensor_rows(logits), Vp = tensor_columns(logits), row_bytes = Vp * dtype_bytes(logits.dtype);
    const cudaStream_t s = (cudaStream_t)stream;
    CHECK(V >= 1 && V <= Vp && Vp < INT32_MAX / 2, "classifier_forward_backward: V is %" PRId64 " with %" PRId64 " columns", V, Vp);
    check_f32("classifier_forward_backward", "losses", losses, 1, rows);
    if (rows == 0) return;
    const bool aligned = row_bytes % 16 == 0 && is_aligned(logits.data, 16), fits = row_bytes <= shared_bytes_max() - 1024;
    FLOATX_SWITCH(logits.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(), {
        constexpr bool vectors = W == vec_width<floatX>();
        const bool kept = vectors && fits;
        const int threads = (int)min_i64(CLASSIFIER_THREADS, round_up(ceil_div(Vp, W), 32));
        auto kernel = kept ? classifier_kernel<floatX, W, vectors> : classifier_kernel<floatX, W, false>;
        const int64_t shared = kept ? row_bytes : 0;
        shared_bytes_allow(kernel, shared);
        kernel<<<grid_blocks(rows), threads, (size_t)shared, s>>>(
            elements<floatX>(logits), elements<float>(losses), targets, (int)V, (int)Vp, dloss, write_dlogits);
        launch_check();
    }));
}
