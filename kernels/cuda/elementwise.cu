// elementwise.cu - kernels that see one element at a time: GELU, conversions, sums, fill, and blocks that change places.
#include "common.cuh"

enum { ELEMENT_THREADS = 256 };

// First element of this thread when each thread handles W, and the last block may be partly idle.
template <int W> __device__ static inline int64_t element_index(void) { return ((int64_t)blockIdx.x * ELEMENT_THREADS + threadIdx.x) * W; }
static inline unsigned element_blocks(int64_t n, int W) { return grid_blocks(ceil_div(n, (int64_t)ELEMENT_THREADS * W)); }

// ---------------------------------------------------------------------------------------------------------------
// GELU, by the formulas of common.cuh

template <typename T, int W> __global__ void __launch_bounds__(ELEMENT_THREADS) gelu_forward_kernel(T *out, const T *inp, int64_t n) {
    int64_t at = element_index<W>();
    if (at >= n) return;
    Vec<T, W> x = vec_load<W>(inp + at), y;
#pragma unroll
    for (int i = 0; i < W; i++) y.set(i, gelu(x.at(i)));
    vec_store<W>(out + at, y);
}

template <typename T, int W> __global__ void __launch_bounds__(ELEMENT_THREADS) gelu_backward_kernel(T *dx, const T *dout, const T *inp, int64_t n) {
    int64_t at = element_index<W>();
    if (at >= n) return;
    Vec<T, W> x = vec_load<W>(inp + at), dy = vec_load<W>(dout + at), d;
#pragma unroll
    for (int i = 0; i < W; i++) d.set(i, dy.at(i) * gelu_slope(x.at(i)));
    vec_store<W>(dx + at, d);
}

void cuda::gelu_forward(Tensor out, Tensor x, Stream stream) {
    const int64_t n = tensor_numel(x);
    const cudaStream_t s = (cudaStream_t)stream;
    check_act("gelu_forward", "out", out, tensor_rows(x), tensor_columns(x), x.dtype);
    const bool aligned = tensor_bytes(x) % 16 == 0 && is_aligned(x.data, 16) && is_aligned(out.data, 16);
    if (n == 0) return;
    FLOATX_SWITCH(x.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(),
        gelu_forward_kernel<floatX, W><<<element_blocks(n, W), ELEMENT_THREADS, 0, s>>>(elements<floatX>(out), elements<const floatX>(x), n)));
    launch_check();
}

void cuda::gelu_backward(Tensor dx, Tensor dout, Tensor x, Stream stream) {
    const int64_t n = tensor_numel(x);
    const cudaStream_t s = (cudaStream_t)stream;
    check_act("gelu_backward", "dout", dout, tensor_rows(x), tensor_columns(x), x.dtype);
    check_act("gelu_backward", "dx", dx, tensor_rows(x), tensor_columns(x), x.dtype);
    const bool aligned = tensor_bytes(x) % 16 == 0 && is_aligned(x.data, 16) && is_aligned(dout.data, 16) && is_aligned(dx.data, 16);
    if (n == 0) return;
    FLOATX_SWITCH(x.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(),
        gelu_backward_kernel<floatX, W><<<element_blocks(n, W), ELEMENT_THREADS, 0, s>>>(
            elements<floatX>(dx), elements<const floatX>(dout), elements<const floatX>(x), n)));
    launch_check();
}

// ---------------------------------------------------------------------------------------------------------------
// Conversions and fill

template <typename D, typename S, int W> __global__ void __launch_bounds__(ELEMENT_THREADS) convert_kernel(D *dst, const S *src, int64_t n) {
    int64_t at = element_index<W>();
    if (at + W <= n) {
        Vec<S, W> x = vec_load<W>(src + at);
        Vec<D, W> y;
#pragma unroll
        for (int i = 0; i < W; i++) y.set(i, x.at(i));
        vec_store<W>(dst + at, y);
    } else
        for (int64_t i = at; i < n; i++) dst[i] = from_float<D>(to_float(src[i]));
}

template <typename D, typename S> static void convert_launch(Tensor dst, Tensor src, Stream stream) {
    const int64_t n = tensor_numel(src);
    const cudaStream_t s = (cudaStream_t)stream;
    WIDTH_SWITCH(is_aligned(dst.data, 16) && is_aligned(src.data, 16), 4,
        convert_kernel<D, S, W><<<element_blocks(n, W), ELEMENT_THREADS, 0, s>>>(elements<D>(dst), elements<const S>(src), n));
    launch_check();
}

void cuda::convert(Tensor dst, Tensor src, Stream stream) {
    check_shape("convert", "dst", dst, 1, tensor_numel(src));
    if (tensor_numel(src) == 0) return;
    if (dst.dtype == src.dtype) { device_copy(dst.data, src.data, tensor_bytes(src), COPY_ON_DEVICE, stream); return; }
    switch (dst.dtype * DTYPE_COUNT + src.dtype) {
    case DTYPE_FP32 * DTYPE_COUNT + DTYPE_BF16: convert_launch<float, __nv_bfloat16>(dst, src, stream); break;
    case DTYPE_FP32 * DTYPE_COUNT + DTYPE_FP16: convert_launch<float, __half>(dst, src, stream); break;
    case DTYPE_BF16 * DTYPE_COUNT + DTYPE_FP32: convert_launch<__nv_bfloat16, float>(dst, src, stream); break;
    case DTYPE_BF16 * DTYPE_COUNT + DTYPE_FP16: convert_launch<__nv_bfloat16, __half>(dst, src, stream); break;
    case DTYPE_FP16 * DTYPE_COUNT + DTYPE_FP32: convert_launch<__half, float>(dst, src, stream); break;
    case DTYPE_FP16 * DTYPE_COUNT + DTYPE_BF16: convert_launch<__half, __nv_bfloat16>(dst, src, stream); break;
    default: CHECK(false, "dtypes %d and %d", (int)dst.dtype, (int)src.dtype);
    }
}

template <typename Y, typename X, int W> __global__ void __launch_bounds__(ELEMENT_THREADS) add_inplace_kernel(Y *y, const X *x, int64_t n) {
    int64_t at = element_index<W>();
    if (at + W <= n) {
        Vec<Y, W> sum = vec_load<W>(y + at);
        Vec<X, W> more = vec_load<W>(x + at);
#pragma unroll
        for (int i = 0; i < W; i++) sum.set(i, sum.at(i) + more.at(i));
        vec_store<W>(y + at, sum);
    } else
        for (int64_t i = at; i < n; i++) y[i] = from_float<Y>(to_float(y[i]) + to_float(x[i]));
}

template <typename Y> static void add_inplace_launch(Tensor y, Tensor x, Stream stream) {
    const int64_t n = tensor_numel(x);
    const cudaStream_t s = (cudaStream_t)stream;
    FLOATX_SWITCH(x.dtype, WIDTH_SWITCH(is_aligned(y.data, 16) && is_aligned(x.data, 16), 4,
        add_inplace_kernel<Y, floatX, W><<<element_blocks(n, W), ELEMENT_THREADS, 0, s>>>(elements<Y>(y), elements<const floatX>(x), n)));
    launch_check();
}

void cuda::add_inplace(Tensor y, Tensor x, Stream stream) {
    check_shape("add_inplace", "y", y, 1, tensor_numel(x));
    if (tensor_numel(x) == 0) return;
    FLOATX_SWITCH(y.dtype, add_inplace_launch<floatX>(y, x, stream));
}

template <typename Y, typename X, int W> __global__ void __launch_bounds__(ELEMENT_THREADS) sum_parts_kernel(Y *y, const X *parts, int64_t P, int64_t n, bool accumulate) {
    int64_t at = element_index<W>();
    if (at >= n) return;
    Vec<X, W> sum;
    float wide[W] = {0};
    for (int64_t p = 0; p < P; p++) {
        Vec<X, W> part = vec_load<W>(parts + p * n + at);
#pragma unroll
        for (int i = 0; i < W; i++) wide[i] = p == 0 ? part.at(i) : wide[i] + part.at(i);
    }
    Vec<Y, W> out;
    if (accumulate) out = vec_load<W>(y + at);
#pragma unroll
    for (int i = 0; i < W; i++) {
        sum.set(i, wide[i]);
        out.set(i, accumulate ? out.at(i) + sum.at(i) : sum.at(i));
    }
    vec_store<W>(y + at, out);
}

template <typename Y> static void sum_parts_launch(Tensor y, Tensor parts, bool accumulate, Stream stream) {
    const int64_t P = tensor_rows(parts), n = tensor_columns(parts);
    const cudaStream_t s = (cudaStream_t)stream;
    FLOATX_SWITCH(parts.dtype, WIDTH_SWITCH(n % 4 == 0 && is_aligned(y.data, 16) && is_aligned(parts.data, 16), 4,
        sum_parts_kernel<Y, floatX, W><<<element_blocks(n, W), ELEMENT_THREADS, 0, s>>>(elements<Y>(y), elements<const floatX>(parts), P, n, accumulate)));
    launch_check();
}

void cuda::sum_parts(Tensor y, Tensor parts, bool accumulate, Stream stream) {
    check_shape("sum_parts", "y", y, 1, tensor_columns(parts));
    if (tensor_numel(parts) == 0) return;
    FLOATX_SWITCH(y.dtype, sum_parts_launch<floatX>(y, parts, accumulate, stream));
}

// A thread's W elements lie in one row of C.
template <typename T, int W>
__global__ void __launch_bounds__(ELEMENT_THREADS) residual_forward_kernel(T *out, const T *x, const T *delta, const T *bias, int64_t n, int C) {
    int64_t at = element_index<W>();
    if (at >= n) return;
    Vec<T, W> v = vec_load<W>(x + at), d = vec_load<W>(delta + at), b;
    if (bias) b = vec_load<W>(bias + at % C);
#pragma unroll
    for (int i = 0; i < W; i++) v.set(i, v.at(i) + (d.at(i) + (bias ? b.at(i) : 0.0f)));
    vec_store<W>(out + at, v);
}

void cuda::residual_forward(Tensor out, Tensor x, Tensor delta, Tensor bias, Stream stream) {
    const int64_t rows = tensor_rows(out), C = tensor_columns(out), n = rows * C;
    const cudaStream_t s = (cudaStream_t)stream;
    check_act("residual_forward", "x", x, rows, C, out.dtype);
    check_act("residual_forward", "delta", delta, rows, C, out.dtype);
    if (bias.data) check_act("residual_forward", "bias", bias, 1, C, out.dtype);
    const bool aligned = C * dtype_bytes(out.dtype) % 16 == 0 && is_aligned(out.data, 16) && is_aligned(x.data, 16) && is_aligned(delta.data, 16) && is_aligned(bias.data, 16);
    if (n == 0) return;
    FLOATX_SWITCH(out.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(),
        residual_forward_kernel<floatX, W><<<element_blocks(n, W), ELEMENT_THREADS, 0, s>>>(
            elements<floatX>(out), elements<const floatX>(x), elements<const floatX>(delta), elements<const floatX>(bias), n, (int)C)));
    launch_check();
}

// out[j,i,:] = inp[i,j,:] for words of any type; `inner` words a block. Reads are in order.
template <typename WORD>
__global__ void __launch_bounds__(ELEMENT_THREADS) swap_blocks_kernel(WORD *out, const WORD *inp, int64_t n1, int64_t n2, int64_t inner) {
    const int64_t at = element_index<1>(), block = at / inner;
    if (at >= n1 * n2 * inner) return;
    out[(block % n2 * n1 + block / n2) * inner + at % inner] = inp[at];
}

void cuda::swap_blocks(Tensor out, Tensor inp, Stream stream) {
    const int64_t n1 = inp.shape[0], n2 = inp.shape[1], inner = inp.shape[2], n = tensor_numel(inp), block = inner * dtype_bytes(inp.dtype);
    const cudaStream_t s = (cudaStream_t)stream;
    CHECK(inp.ndim == 3 && out.ndim == 3 && out.dtype == inp.dtype && out.shape[0] == n2 && out.shape[1] == n1 && out.shape[2] == inner,
          "swap_blocks: %" PRId64 " x %" PRId64 " blocks of %" PRId64 " from %" PRId64 " x %" PRId64 " of %" PRId64, out.shape[0], out.shape[1], out.shape[2], n1, n2, inner);
    if (n == 0) return;
    if (block % 16 == 0 && is_aligned(out.data, 16) && is_aligned(inp.data, 16))
        swap_blocks_kernel<uint4><<<element_blocks(n1 * n2 * block / 16, 1), ELEMENT_THREADS, 0, s>>>((uint4 *)out.data, (const uint4 *)inp.data, n1, n2, block / 16);
    else if (dtype_bytes(inp.dtype) == 4)
        swap_blocks_kernel<uint32_t><<<element_blocks(n, 1), ELEMENT_THREADS, 0, s>>>((uint32_t *)out.data, (const uint32_t *)inp.data, n1, n2, inner);
    else
        swap_blocks_kernel<uint16_t><<<element_blocks(n, 1), ELEMENT_THREADS, 0, s>>>((uint16_t *)out.data, (const uint16_t *)inp.data, n1, n2, inner);
    launch_check();
}

template <typename T, int W> __global__ void __launch_bounds__(ELEMENT_THREADS) fill_kernel(T *out, float value, int64_t n) {
    int64_t at = element_index<W>();
    if (at + W <= n) {
        Vec<T, W> y;
#pragma unroll
        for (int i = 0; i < W; i++) y.set(i, value);
        vec_store<W>(out + at, y);
    } else
        for (int64_t i = at; i < n; i++) out[i] = from_float<T>(value);
}

void cuda::fill(Tensor t, float value, Stream stream) {
    const int64_t n = tensor_numel(t);
    const cudaStream_t s = (cudaStream_t)stream;
    if (n == 0) return;
    FLOATX_SWITCH(t.dtype, WIDTH_SWITCH(is_aligned(t.data, 16), vec_width<floatX>(),
        fill_kernel<floatX, W><<<element_blocks(n, W), ELEMENT_THREADS, 0, s>>>(elements<floatX>(t), value, n)));
    launch_check();
}
