// reductions.cu - sums over everything (in double) and over rows (for the gradients of biases and norms).
//
// Each sum of floats has two steps of fixed shape: blocks write partial sums, one small kernel adds them in order. No atomics:
// the result depends on the input alone.
#include "common.cuh"

// ---------------------------------------------------------------------------------------------------------------
// Sums in double

enum { SUM_THREADS = 256, SUM_BLOCKS = 1024 };

template <typename T, bool SQUARE>
__global__ void __launch_bounds__(SUM_THREADS) sum_partial_kernel(double *partial, const T *x, int64_t n) {
    __shared__ double sums[SUM_THREADS];
    double sum = 0;
#pragma unroll 4
    for (int64_t i = (int64_t)blockIdx.x * SUM_THREADS + threadIdx.x; i < n; i += (int64_t)gridDim.x * SUM_THREADS) {
        double v = to_float(x[i]);
        sum += SQUARE ? v * v : v;
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = SUM_THREADS / 2; half > 0; half >>= 1) {
        if ((int)threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) partial[blockIdx.x] = sums[0];
}

__global__ void __launch_bounds__(SUM_BLOCKS) sum_final_kernel(double *out, const double *partial, int n_partials, bool accumulate) {
    __shared__ double sums[SUM_BLOCKS];
    sums[threadIdx.x] = (int)threadIdx.x < n_partials ? partial[threadIdx.x] : 0.0;
    __syncthreads();
    for (int half = SUM_BLOCKS / 2; half > 0; half >>= 1) {
        if ((int)threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *out = accumulate ? *out + sums[0] : sums[0];
}

template <typename T, bool SQUARE> static void sum_launch(double *out, Tensor x, bool accumulate, Stream stream) {
    const cudaStream_t s = (cudaStream_t)stream;
    const int64_t n = tensor_numel(x);
    int blocks = (int)min_i64(SUM_BLOCKS, ceil_div(n, SUM_THREADS * 4)); // a function of n alone
    double *partial = (double *)scratch_get(SUM_BLOCKS * (int64_t)sizeof(double), stream);
    if (blocks > 0) {
        sum_partial_kernel<T, SQUARE><<<blocks, SUM_THREADS, 0, s>>>(partial, elements<const T>(x), n);
        launch_check();
    }
    sum_final_kernel<<<1, SUM_BLOCKS, 0, s>>>(out, partial, blocks, accumulate);
    launch_check();
}

void cuda::sum_to_double(double *out, Tensor x, bool accumulate, Stream stream) {
    check_f32("sum_to_double", "x", x, 1, tensor_numel(x));
    sum_launch<float, false>(out, x, accumulate, stream);
}

void cuda::sum_squares_to_double(double *out, Tensor x, bool accumulate, Stream stream) {
    check_shape("sum_squares_to_double", "x", x, 1, tensor_numel(x));
    GRAD_SWITCH(x.dtype, sum_launch<floatG, true>(out, x, accumulate, stream));
}

// ---------------------------------------------------------------------------------------------------------------
// Hash

// A thread reads 16 bytes at a time, so that memory is the limit: per word one product of 32 bits and an addition of 64.
__global__ void __launch_bounds__(SUM_THREADS) hash_words_kernel(unsigned long long *out, const uint32_t *x, int64_t n, uint32_t first) {
    __shared__ unsigned long long sums[SUM_THREADS / 32];
    unsigned long long sum = 0;
    const int64_t quads = n / 4, step = (int64_t)gridDim.x * SUM_THREADS, at = (int64_t)blockIdx.x * SUM_THREADS + threadIdx.x;
#pragma unroll 4
    for (int64_t q = at; q < quads; q += step) {
        uint4 w = reinterpret_cast<const uint4 *>(x)[q];
        uint32_t m = 2 * (first + (uint32_t)(4 * q)) + 1;
        sum += (unsigned long long)w.x * m + (unsigned long long)w.y * (m + 2) + (unsigned long long)w.z * (m + 4) + (unsigned long long)w.w * (m + 6);
    }
    int64_t rest = 4 * quads + at;
    if (rest < n) sum += (unsigned long long)x[rest] * (2 * (first + (uint32_t)rest) + 1);
    for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int w = 1; w < SUM_THREADS / 32; w++) sum += sums[w];
    atomicAdd(out, sum); // of whole numbers: no order of the blocks gives another sum
}

void cuda::hash_words(uint64_t *out, Tensor x, int64_t first, bool accumulate, Stream stream) {
    const cudaStream_t s = (cudaStream_t)stream;
    const int64_t n = tensor_bytes(x) / 4;
    CHECK(tensor_bytes(x) % 4 == 0 && first >= 0 && first + n <= (int64_t)1 << 31, "hash of %" PRId64 " bytes from word %" PRId64, tensor_bytes(x), first);
    CHECK(is_aligned(x.data, 16), "hash of memory at %p", x.data);
    if (!accumulate) cudaCheck(cudaMemsetAsync(out, 0, sizeof *out, s));
    if (n == 0) return;
    const unsigned blocks = grid_blocks(min_i64((int64_t)sm_count() * 8, ceil_div(n, SUM_THREADS * 4)));
    hash_words_kernel<<<blocks, SUM_THREADS, 0, s>>>((unsigned long long *)out, elements<const uint32_t>(x), n, (uint32_t)first);
    launch_check();
}

// ---------------------------------------------------------------------------------------------------------------
// Sums over rows

enum { REDUCE_GROUPS = 32 }; // warps of a block; warp g adds partials g, g + 32, ...

template <typename T>
__global__ void __launch_bounds__(32 * REDUCE_GROUPS)
columns_reduce_kernel(T *out_a, T *out_b, const float *partial, int n_partials, int64_t columns_a, int64_t columns, bool accumulate) {
    __shared__ float sums[REDUCE_GROUPS][32];
    int lane = threadIdx.x % 32, group = threadIdx.x / 32;
    int64_t c = (int64_t)blockIdx.x * 32 + lane;
    float sum = 0;
    if (c < columns)
        for (int p = group; p < n_partials; p += REDUCE_GROUPS) sum += partial[p * columns + c];
    sums[group][lane] = sum;
    __syncthreads();
    if (group == 0 && c < columns) {
        float total = 0;
        for (int g = 0; g < REDUCE_GROUPS; g++) total += sums[g][lane];
        T *out = c < columns_a ? out_a + c : out_b + (c - columns_a);
        *out = from_float<T>(accumulate ? to_float(*out) + total : total);
    }
}

void columns_reduce(Tensor out_a, Tensor out_b, const float *partial, int n_partials, bool accumulate, cudaStream_t stream) {
    const int64_t columns_a = tensor_numel(out_a), columns = columns_a + tensor_numel(out_b);
    const unsigned blocks = grid_blocks(ceil_div(columns, 32));
    CHECK(!out_b.data || out_b.dtype == out_a.dtype, "columns_reduce: %s and %s", dtype_name(out_a.dtype), dtype_name(out_b.dtype));
    FLOATX_SWITCH(out_a.dtype, columns_reduce_kernel<floatX><<<blocks, 32 * REDUCE_GROUPS, 0, stream>>>(
        elements<floatX>(out_a), elements<floatX>(out_b), partial, n_partials, columns_a, columns, accumulate));
    launch_check();
}

enum { BIAS_WARPS = 8, BIAS_ROWS = 4 }; // rows that a thread reads at once

// A warp covers 32 * W neighbouring columns; the warps of a block and the blocks of a column share the rows.
template <typename T, int W>
__global__ void __launch_bounds__(32 * BIAS_WARPS)
bias_partial_kernel(float *partial, const T *dout, int64_t rows, int64_t columns, int64_t column_blocks) {
    __shared__ float sums[BIAS_WARPS][32 * W];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t row_block = blockIdx.x / column_blocks, row_blocks = gridDim.x / column_blocks;
    int64_t c0 = (blockIdx.x % column_blocks) * 32 * W;
    int64_t c = c0 + lane * W;
    float sum[W] = {};
    const int64_t step = row_blocks * BIAS_WARPS;
    for (int64_t r = row_block * BIAS_WARPS + warp; r < rows && c < columns; r += BIAS_ROWS * step) {
        Vec<T, W> d[BIAS_ROWS];
#pragma unroll
        for (int k = 0; k < BIAS_ROWS; k++) if (r + k * step < rows) d[k] = vec_load<W>(dout + (r + k * step) * columns + c);
#pragma unroll
        for (int k = 0; k < BIAS_ROWS; k++) {
            if (r + k * step >= rows) break;
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] += d[k].at(i);
        }
    }
    for (int i = 0; i < W; i++) sums[warp][i * 32 + lane] = sum[i];
    __syncthreads();
    for (int j = threadIdx.x; j < 32 * W; j += 32 * BIAS_WARPS) {
        int64_t column = c0 + (j % 32) * W + j / 32; // where the store above put it
        if (column >= columns) continue;
        float total = 0;
        for (int w = 0; w < BIAS_WARPS; w++) total += sums[w][j];
        partial[row_block * columns + column] = total;
    }
}

void cuda::bias_backward(Tensor dbias, Tensor dout, bool accumulate, Stream stream) {
    const int64_t rows = tensor_rows(dout), columns = tensor_columns(dout);
    const cudaStream_t s = (cudaStream_t)stream;
    check_weight_grad("bias_backward", "dbias", dbias, 1, columns, dout.dtype);
    FLOATX_SWITCH(dout.dtype, WIDTH_SWITCH(columns % vec_width<floatX>() == 0 && is_aligned(dout.data, 16), vec_width<floatX>(), {
        const int64_t column_blocks = ceil_div(columns, 32 * W);
        const int64_t at_once = blocks_at_once(bias_partial_kernel<floatX, W>, 32 * BIAS_WARPS, 0);
        const int64_t row_blocks = max_i64(1, min_i64(ceil_div(rows, BIAS_ROWS * BIAS_WARPS), at_once / column_blocks));
        const unsigned blocks = grid_blocks(row_blocks * column_blocks);
        float *partial = (float *)scratch_get(row_blocks * columns * (int64_t)sizeof(float), stream);
        bias_partial_kernel<floatX, W><<<blocks, 32 * BIAS_WARPS, 0, s>>>(partial, elements<const floatX>(dout), rows, columns, column_blocks);
        launch_check();
        columns_reduce(dbias, tensor_none(), partial, (int)row_blocks, accumulate, s);
    }));
}
