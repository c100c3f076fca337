// layernorm.cu - LayerNorm over the last dimension, alone and fused with the residual sum in front of it.
//
// A warp handles a row. Lane l owns vectors l, l + 32, ... of the row in every pass, so a row that a warp has put into
// shared memory is read back by the lane that wrote it and needs no barrier.
#include "common.cuh"

// Warps for which `bytes_per_warp` fit a block, at most 8.
static int warps_that_fit(int64_t bytes_per_warp, int64_t budget) { return (int)max_i64(1, min_i64(8, budget / bytes_per_warp)); }

// ---------------------------------------------------------------------------------------------------------------
// Forward

template <typename T, int W, bool RESIDUAL>
__global__ void __launch_bounds__(256)
layernorm_forward_kernel(T *residual, T *out, float *mean, float *rstd, const T *x, const T *delta, const T *w, const T *b,
                         int64_t rows, int C, float eps) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T *row = reinterpret_cast<T *>(shared_bytes) + (int64_t)warp * C;
    int64_t r = (int64_t)blockIdx.x * (blockDim.x / 32) + warp;
    if (r >= rows) return; // a whole warp at a time, and there is no barrier below
    x += r * C;
    out += r * C;

    float sum = 0;
    for (int c = lane * W; c < C; c += 32 * W) {
        Vec<T, W> v = vec_load<W>(x + c);
        if (RESIDUAL) {
            Vec<T, W> d = vec_load<W>(delta + r * C + c);
#pragma unroll
            for (int i = 0; i < W; i++) v.set(i, v.at(i) + d.at(i));
            vec_store<W>(residual + r * C + c, v);
        }
#pragma unroll
        for (int i = 0; i < W; i++) sum += v.at(i);
        vec_store<W>(row + c, v);
    }
    float m = warp_sum(sum) / (float)C;
    float squares = 0;
    for (int c = lane * W; c < C; c += 32 * W) {
        Vec<T, W> v = vec_load<W>(row + c);
#pragma unroll
        for (int i = 0; i < W; i++) squares += (v.at(i) - m) * (v.at(i) - m);
    }
    float s = 1.0f / sqrtf(warp_sum(squares) / (float)C + eps);
    for (int c = lane * W; c < C; c += 32 * W) {
        Vec<T, W> v = vec_load<W>(row + c), wv = vec_load<W>(w + c), bv = vec_load<W>(b + c);
#pragma unroll
        for (int i = 0; i < W; i++) v.set(i, (v.at(i) - m) * s * wv.at(i) + bv.at(i));
        vec_store<W>(out + c, v);
    }
    if (lane == 0) {
        mean[r] = m;
        rstd[r] = s;
    }
}

// residual and delta are not given for the plain form.
static void layernorm_forward_launch(const char *name, Tensor residual, Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor delta,
                                     Tensor w, Tensor b, float eps, Stream stream) {
    const int64_t rows = tensor_rows(x), C = tensor_columns(x), row_bytes = C * dtype_bytes(x.dtype);
    const cudaStream_t s = (cudaStream_t)stream;
    const bool fused = residual.data != NULL;
    check_act(name, "out", out, rows, C, x.dtype);
    check_act(name, "w", w, 1, C, x.dtype);
    check_act(name, "b", b, 1, C, x.dtype);
    check_f32(name, "mean", mean, 1, rows);
    check_f32(name, "rstd", rstd, 1, rows);
    if (fused) {
        check_act(name, "residual", residual, rows, C, x.dtype);
        check_act(name, "delta", delta, rows, C, x.dtype);
    }
    if (rows == 0) return;
    const int warps = warps_that_fit(row_bytes, 48 * 1024);
    const bool aligned = row_bytes % 16 == 0 && is_aligned(x.data, 16) && is_aligned(out.data, 16) && is_aligned(w.data, 16) &&
                         is_aligned(b.data, 16) && is_aligned(residual.data, 16) && is_aligned(delta.data, 16);
    FLOATX_SWITCH(x.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(), {
        auto kernel = fused ? layernorm_forward_kernel<floatX, W, true> : layernorm_forward_kernel<floatX, W, false>;
        shared_bytes_allow(kernel, warps * row_bytes);
        kernel<<<grid_blocks(ceil_div(rows, warps)), 32 * warps, (size_t)(warps * row_bytes), s>>>(
            elements<floatX>(residual), elements<floatX>(out), elements<float>(mean), elements<float>(rstd), elements<const floatX>(x),
            elements<const floatX>(delta), elements<const floatX>(w), elements<const floatX>(b), rows, (int)C, eps);
        launch_check();
    }));
}

void cuda::layernorm_forward(Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor w, Tensor b, float eps, Stream stream) {
    layernorm_forward_launch("layernorm_forward", tensor_none(), out, mean, rstd, x, tensor_none(), w, b, eps, stream);
}

void cuda::residual_layernorm_forward(Tensor residual, Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor delta, Tensor w, Tensor b,
                                      float eps, Stream stream) {
    CHECK(residual.data != NULL, "residual_layernorm_forward: residual is not given");
    layernorm_forward_launch("residual_layernorm_forward", residual, out, mean, rstd, x, delta, w, b, eps, stream);
}

// ---------------------------------------------------------------------------------------------------------------
// Backward
//
// With n = (x - mean) rstd and g = dout * w:  dx = dresidual + rstd (g - mean_C(g) - n mean_C(g n)).
// dw = sum over rows of dout * n, db = sum over rows of dout: each warp adds up its own rows in its own shared memory,
// a block adds its warps in order and writes one partial row, columns_reduce adds the blocks in order.

// Where lane `lane` keeps element i of its vector number `vector`: neighbouring lanes in neighbouring banks.
template <int W> __device__ static inline int sum_slot(int vector, int i, int lane) { return (vector * W + i) * 32 + lane; }

// partial is (blocks, 2C): dw, then db. slots = C rounded up to 32 * W.
template <typename T, int W>
__global__ void __launch_bounds__(256)
layernorm_backward_kernel(T *dx, float *partial, const T *dout, const T *x, const T *w, const float *mean, const float *rstd, const T *dresidual,
                          int64_t rows, int C, int slots) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    float *sums = reinterpret_cast<float *>(shared_bytes); // [warps][2][slots]
    float *dw = sums + (int64_t)warp * 2 * slots, *db = dw + slots;
    for (int i = lane; i < 2 * slots; i += 32) dw[i] = 0; // slots are a multiple of 32: each lane clears its own

    for (int64_t r = (int64_t)blockIdx.x * warps + warp; r < rows; r += (int64_t)gridDim.x * warps) {
        const T *dout_row = dout + r * C, *x_row = x + r * C;
        float m = mean[r], s = rstd[r], sum_g = 0, sum_gn = 0;
        for (int c = lane * W, k = 0; c < C; c += 32 * W, k++) {
            Vec<T, W> dv = vec_load<W>(dout_row + c), xv = vec_load<W>(x_row + c), wv = vec_load<W>(w + c);
#pragma unroll
            for (int i = 0; i < W; i++) {
                float d = dv.at(i), n = (xv.at(i) - m) * s, g = d * wv.at(i);
                sum_g += g;
                sum_gn += g * n;
                dw[sum_slot<W>(k, i, lane)] += d * n;
                db[sum_slot<W>(k, i, lane)] += d;
            }
        }
        float mean_g = warp_sum(sum_g) / (float)C, mean_gn = warp_sum(sum_gn) / (float)C;
        for (int c = lane * W; c < C; c += 32 * W) { // the second read of the row comes from the cache
            Vec<T, W> dv = vec_load<W>(dout_row + c), xv = vec_load<W>(x_row + c), wv = vec_load<W>(w + c), y;
            float base[W];
            if (dresidual) {
                Vec<T, W> rv = vec_load<W>(dresidual + r * C + c);
#pragma unroll
                for (int i = 0; i < W; i++) base[i] = rv.at(i);
            } else {
#pragma unroll
                for (int i = 0; i < W; i++) base[i] = 0;
            }
#pragma unroll
            for (int i = 0; i < W; i++) {
                float n = (xv.at(i) - m) * s;
                y.set(i, base[i] + s * (dv.at(i) * wv.at(i) - mean_g - n * mean_gn));
            }
            vec_store<W>(dx + r * C + c, y);
        }
    }
    __syncthreads(); // the sums of all warps are complete
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        int slot = sum_slot<W>(c / (32 * W), c % W, c / W % 32);
        float total_w = 0, total_b = 0;
        for (int k = 0; k < warps; k++) {
            total_w += sums[(int64_t)(2 * k) * slots + slot];
            total_b += sums[(int64_t)(2 * k + 1) * slots + slot];
        }
        partial[(int64_t)blockIdx.x * 2 * C + c] = total_w;
        partial[(int64_t)blockIdx.x * 2 * C + C + c] = total_b;
    }
}

void cuda::layernorm_backward(Tensor dx, Tensor dw, Tensor db, Tensor dout, Tensor x, Tensor w, Tensor mean, Tensor rstd, Tensor dresidual,
                              bool accumulate, Stream stream) {
    const char *const name = "layernorm_backward";
    const int64_t rows = tensor_rows(x), C = tensor_columns(x);
    const cudaStream_t s = (cudaStream_t)stream;
    check_act(name, "dx", dx, rows, C, x.dtype);
    check_act(name, "dout", dout, rows, C, x.dtype);
    check_act(name, "w", w, 1, C, x.dtype);
    check_f32(name, "dw", dw, 1, C);
    check_f32(name, "db", db, 1, C);
    check_f32(name, "mean", mean, 1, rows);
    check_f32(name, "rstd", rstd, 1, rows);
    if (dresidual.data) check_act(name, "dresidual", dresidual, rows, C, x.dtype);
    const bool aligned = C * dtype_bytes(x.dtype) % 16 == 0 && is_aligned(dx.data, 16) && is_aligned(dout.data, 16) && is_aligned(x.data, 16) &&
                         is_aligned(w.data, 16) && is_aligned(dresidual.data, 16);
    FLOATX_SWITCH(x.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(), {
        const int64_t slots = round_up(C, 32 * W), warp_bytes = 2 * slots * (int64_t)sizeof(float);
        const int warps = warps_that_fit(warp_bytes, 100 * 1024);
        const int64_t shared = warps * warp_bytes, per_sm = max_i64(1, min_i64(4, 200 * 1024 / shared));
        const int64_t blocks = max_i64(1, min_i64(ceil_div(rows, warps), sm_count() * per_sm));
        float *partial = (float *)scratch_get(blocks * 2 * C * (int64_t)sizeof(float), stream);
        shared_bytes_allow(layernorm_backward_kernel<floatX, W>, shared);
        layernorm_backward_kernel<floatX, W><<<grid_blocks(blocks), 32 * warps, (size_t)shared, s>>>(
            elements<floatX>(dx), partial, elements<const floatX>(dout), elements<const floatX>(x), elements<const floatX>(w),
            elements<const float>(mean), elements<const float>(rstd), elements<const floatX>(dresidual), rows, (int)C, (int)slots);
        launch_check();
        columns_reduce(elements<float>(dw), partial, (int)blocks, 2 * C, C, accumulate, s);
        columns_reduce(elements<float>(db), partial + C, (int)blocks, 2 * C, C, accumulate, s);
    }));
}
