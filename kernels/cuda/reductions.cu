// reductions.cu - sums over everything (in double) and over rows (for the gradients of biases and norms).
//
// Each sum of floats has two steps of fixed shape: blocks write partial sums, one small kernel adds them in order. No atomics:
// the result depends on the input alone.
#include "common.cuh"

// ---------------------------------------------------------------------------------------------------------------
// Sums in double

enum { SUM_THREADS = 256, SUM_BLOCKS = 1024 };

// Tensors whose elements are added by one launch, all of one type.
enum { SUM_TENSORS = 64 };
struct SumList {
    const void *data[SUM_TENSORS];
    int64_t n[SUM_TENSORS]; // elements
    int tensors;
};

// W elements at a time; each thread has the same places in each tensor, whatever the others hold.
template <typename T, int W, bool SQUARE>
__global__ void __launch_bounds__(SUM_THREADS) sum_partial_kernel(double *partial, const __grid_constant__ SumList list) {
    __shared__ double sums[SUM_THREADS];
    const int64_t at = (int64_t)blockIdx.x * SUM_THREADS + threadIdx.x, step = (int64_t)gridDim.x * SUM_THREADS;
    double sum = 0;
    for (int k = 0; k < list.tensors; k++) {
        const T *x = (const T *)list.data[k];
        const int64_t vectors = list.n[k] / W, rest = vectors * W + at;
#pragma unroll 4
        for (int64_t i = at; i < vectors; i += step) {
            Vec<T, W> v = vec_load<W>(x + i * W);
#pragma unroll
            for (int j = 0; j < W; j++) {
                const double d = v.at(j);
                sum += SQUARE ? d * d : d;
            }
        }
        if (rest < list.n[k]) {
            const double d = to_float(x[rest]);
            sum += SQUARE ? d * d : d;
        }
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

// The sum of the first of n tensors and of as many after it as one launch takes; returns how many.
template <typename T, bool SQUARE> static int sum_launch(double *out, const Tensor *x, int n, bool accumulate, Stream stream) {
    const cudaStream_t s = (cudaStream_t)stream;
    SumList list = {};
    bool aligned = true;
    int64_t all = 0;
    int k = 0;
    for (; k < n && k < SUM_TENSORS && x[k].dtype == x[0].dtype; k++) {
        list.data[k] = x[k].data;
        list.n[k] = tensor_numel(x[k]);
        all += list.n[k];
        aligned = aligned && is_aligned(x[k].data, 16);
    }
    list.tensors = k;
    const int blocks = (int)min_i64(SUM_BLOCKS, ceil_div(all, SUM_THREADS * 4)); // a function of shapes alone
    double *partial = (double *)scratch_get(SUM_BLOCKS * (int64_t)sizeof(double), stream);
    if (blocks > 0) {
        WIDTH_SWITCH(aligned, vec_width<T>(), sum_partial_kernel<T, W, SQUARE><<<blocks, SUM_THREADS, 0, s>>>(partial, list));
        launch_check();
    }
    sum_final_kernel<<<1, SUM_BLOCKS, 0, s>>>(out, partial, blocks, accumulate);
    launch_check();
    return k;
}

void cuda::sum_to_double(double *out, Tensor x, bool accumulate, Stream stream) {
    check_f32("sum_to_double", "x", x, 1, tensor_numel(x));
    sum_launch<float, false>(out, &x, 1, accumulate, stream);
}

void cuda::sum_squares_to_double(double *out, const Tensor *x, int n, bool accumulate, Stream stream) {
    for (int k = 0; k < n; k++) check_shape("sum_squares_to_double", "x", x[k], 1, tensor_numel(x[k]));
    for (int k = 0; k < n;) {
        int taken = 0;
        GRAD_SWITCH(x[k].dtype, taken = sum_launch<floatG, true>(out, x + k, n - k, accumulate || k > 0, stream));
        k += taken;
    }
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

template <typename T> struct ColumnSums {
    T *out[COLUMN_SUMS];
};

template <typename T>
__global__ void __launch_bounds__(32 * REDUCE_GROUPS)
columns_reduce_kernel(ColumnSums<T> to, int n_sums, const float *partial, int n_partials, int64_t columns, bool accumulate) {
    __shared__ float sums[REDUCE_GROUPS][32];
    int lane = threadIdx.x % 32, group = threadIdx.x / 32;
    int64_t c = (int64_t)blockIdx.x * 32 + lane, all = n_sums * columns;
    float sum = 0;
    if (c < all)
#pragma unroll 4
        for (int p = group; p < n_partials; p += REDUCE_GROUPS) sum += partial[p * all + c];
    sums[group][lane] = sum;
    __syncthreads();
    if (group > 0 || c >= all) return;
    float total = 0;
    for (int g = 0; g < REDUCE_GROUPS; g++) total += sums[g][lane];
    T *out = NULL;
#pragma unroll
    for (int k = 0; k < COLUMN_SUMS; k++) if (c / columns == k) out = to.out[k];
    if (out == NULL) return;
    out += c % columns;
    *out = from_float<T>(accumulate ? to_float(*out) + total : total);
}

void columns_reduce(const Tensor (&out)[COLUMN_SUMS], int n_sums, const float *partial, int n_partials, int64_t columns, bool accumulate,
                    cudaStream_t stream) {
    const unsigned blocks = grid_blocks(ceil_div(n_sums * columns, 32));
    for (int k = 1; k < n_sums; k++)
        CHECK(!out[k].data || out[k].dtype == out[0].dtype, "columns_reduce: %s and %s", dtype_name(out[0].dtype), dtype_name(out[k].dtype));
    FLOATX_SWITCH(out[0].dtype, {
        ColumnSums<floatX> to = {};
        for (int k = 0; k < n_sums; k++) to.out[k] = elements<floatX>(out[k]);
        columns_reduce_kernel<floatX><<<blocks, 32 * REDUCE_GROUPS, 0, stream>>>(to, n_sums, partial, n_partials, columns, accumulate);
    });
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
        columns_reduce({dbias}, 1, partial, (int)row_blocks, columns, accumulate, s);
    }));
}
