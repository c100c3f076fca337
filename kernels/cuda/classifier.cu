// classifier.cu - softmax, cross-entropy and its gradient in one kernel; the logits are read and overwritten in place. At the
// end, the same in two kernels, between which the parts of a split vocabulary exchange their statistics.
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

// ---------------------------------------------------------------------------------------------------------------
// In two steps, for columns that are a part of the vocabulary. The parts of a row are narrow enough for the caches that what the first step
// reads the second mostly finds there, so rows do not pass through shared memory.

// statistics[row] = {largest, sum of exp(x - largest), x at the target, if it is one of these `count` columns, else 0}.
template <typename T, int W>
__global__ void __launch_bounds__(CLASSIFIER_THREADS)
classifier_statistics_kernel(float *statistics, const T *logits, const int32_t *targets, int count, int width, int64_t first_column) {
    __shared__ Denominator of_warp[32];
    const T *row = logits + (int64_t)blockIdx.x * width;
    Denominator mine = denominator_empty();
    for (int c = threadIdx.x * W; c < count; c += blockDim.x * W) mine = denominator_add<T, W>(mine, vec_load<W>(row + c), min(W, count - c));
    const Denominator all = denominator_of_block(mine, of_warp);
    if (threadIdx.x > 0) return;
    const int64_t target = targets[blockIdx.x] < 0 ? -1 : targets[blockIdx.x] - first_column;
    float *s = statistics + 3 * (int64_t)blockIdx.x;
    s[0] = all.largest;
    s[1] = all.sum;
    s[2] = target >= 0 && target < count ? to_float(row[target]) : 0.0f;
}

// Every thread joins the parts by itself, in the same order.
template <typename T, int W>
__global__ void __launch_bounds__(CLASSIFIER_THREADS)
classifier_gradient_kernel(T *logits, float *losses, const float *statistics, int parts, const int32_t *targets, int count, int width, int64_t first_column,
                           float dloss, bool write_dlogits) {
    T *row = logits + (int64_t)blockIdx.x * width;
    const bool masked = targets[blockIdx.x] < 0;
    const int64_t target = targets[blockIdx.x] - first_column;
    Denominator all = denominator_empty();
    float at_target = 0;
    for (int p = 0; p < parts; p++) {
        const float *s = statistics + 3 * ((int64_t)p * gridDim.x + blockIdx.x);
        all = denominator_join(all, {s[0], s[1]});
        at_target += s[2];
    }
    if (threadIdx.x == 0) losses[blockIdx.x] = masked ? 0.0f : logf(all.sum) + all.largest - at_target;
    if (!write_dlogits) return;
    const float scale = dloss / all.sum;
    for (int c = threadIdx.x * W; c < width; c += blockDim.x * W) {
        Vec<T, W> x = vec_load<W>(row + c), y;
#pragma unroll
        for (int i = 0; i < W; i++) {
            const float e = exp_fast(x.at(i) - all.largest);
            y.set(i, masked || c + i >= count ? 0.0f : c + i == target ? (e / all.sum - 1.0f) * dloss : e * scale);
        }
        vec_store<W>(row + c, y);
    }
}

// Columns of a part of `width` that are tokens.
static int64_t columns_below(int64_t V, int64_t first, int64_t width) { return max_i64(0, min_i64(width, V - first)); }

void cuda::classifier_statistics(Tensor statistics, Tensor logits, const int32_t *targets, int64_t V, int64_t first, Stream stream) {
    const int64_t rows = tensor_rows(logits), width = tensor_columns(logits);
    const cudaStream_t s = (cudaStream_t)stream;
    CHECK(V >= 1 && first >= 0 && width < INT32_MAX / 2, "classifier_statistics: %" PRId64 " columns from %" PRId64 ", V is %" PRId64, width, first, V);
    check_f32("classifier_statistics", "statistics", statistics, rows, 3);
    if (rows == 0) return;
    const bool aligned = width * dtype_bytes(logits.dtype) % 16 == 0 && is_aligned(logits.data, 16);
    FLOATX_SWITCH(logits.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(), {
        const int threads = (int)min_i64(CLASSIFIER_THREADS, round_up(ceil_div(width, W), 32));
        classifier_statistics_kernel<floatX, W><<<grid_blocks(rows), threads, 0, s>>>(
            elements<float>(statistics), elements<const floatX>(logits), targets, (int)columns_below(V, first, width), (int)width, first);
    }));
    launch_check();
}

void cuda::classifier_from_statistics(Tensor logits, Tensor losses, Tensor statistics, const int32_t *targets, int64_t V, int64_t first, float dloss,
                                      bool write_dlogits, Stream stream) {
    const int64_t rows = tensor_rows(logits), width = tensor_columns(logits), parts = statistics.shape[0];
    const char *const name = "classifier_from_statistics";
    const cudaStream_t s = (cudaStream_t)stream;
    CHECK(V >= 1 && first >= 0 && width < INT32_MAX / 2 && statistics.ndim == 3, "%s: %" PRId64 " columns from %" PRId64 ", V is %" PRId64 ", statistics have %d dimensions",
          name, width, first, V, statistics.ndim);
    check_f32(name, "statistics", statistics, parts * rows, 3);
    check_f32(name, "losses", losses, 1, rows);
    if (rows == 0) return;
    const bool aligned = width * dtype_bytes(logits.dtype) % 16 == 0 && is_aligned(logits.data, 16);
    FLOATX_SWITCH(logits.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(), {
        const int threads = (int)min_i64(CLASSIFIER_THREADS, round_up(ceil_div(width, W), 32));
        classifier_gradient_kernel<floatX, W><<<grid_blocks(rows), threads, 0, s>>>(
            elements<floatX>(logits), elements<float>(losses), elements<const float>(statistics), (int)parts, targets, (int)columns_below(V, first, width),
            (int)width, first, dloss, write_dlogits);
    }));
    launch_check();
}
