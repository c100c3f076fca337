// common.cuh - what the CUDA kernels share: error checks, the dtype switch, vector loads, reductions, scratch memory.
//
// Rules of this folder: every CUDA call is wrapped in cudaCheck, every launch is followed by launch_check; element
// counts are 64-bit; no atomics that leave the order of a sum open, but where the caller says deterministic = false: equal inputs
// give equal bits; a launcher has one dtype switch.
#pragma once
#include "../kernels.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <float.h>
#include <type_traits>

#define cudaCheck(call) cuda_check((call), __FILE__, __LINE__)
#define launch_check() cuda_check(cudaGetLastError(), __FILE__, __LINE__)

static inline void cuda_check(cudaError_t error, const char *file, int line) {
    if (error != cudaSuccess) die(EXIT_INTERNAL, "%s:%d: CUDA error %d, %s", file, line, (int)error, cudaGetErrorString(error));
}

// Runs the statements with floatX standing for the element type.
#define FLOATX_SWITCH(dtype, ...)                                                                                      \
    switch (dtype) {                                                                                                   \
    case DTYPE_FP32: { using floatX = float; __VA_ARGS__; break; }                                                     \
    case DTYPE_BF16: { using floatX = __nv_bfloat16; __VA_ARGS__; break; }                                             \
    case DTYPE_FP16: { using floatX = __half; __VA_ARGS__; break; }                                                    \
    default: CHECK(false, "dtype %d", (int)(dtype));                                                                   \
    }

// Runs the statements with floatG standing for the element type of a gradient: fp32, or bf16 as
// data_types.grad_accum_dtype may say.
#define GRAD_SWITCH(dtype, ...)                                                                                        \
    switch (dtype) {                                                                                                   \
    case DTYPE_FP32: { using floatG = float; __VA_ARGS__; break; }                                                     \
    case DTYPE_BF16: { using floatG = __nv_bfloat16; __VA_ARGS__; break; }                                             \
    default: CHECK(false, "dtype %d of a gradient", (int)(dtype));                                                     \
    }

// Runs the statements with W, the elements that a thread moves at once: `full` where the data is aligned for it, else 1.
#define WIDTH_SWITCH(aligned, full, ...)                                                                               \
    if (aligned) { constexpr int W = (full); __VA_ARGS__; }                                                            \
    else { constexpr int W = 1; __VA_ARGS__; }

// Elements of T in the widest load, 16 bytes.
template <typename T> constexpr int vec_width() { return 16 / (int)sizeof(T); }

// ---------------------------------------------------------------------------------------------------------------
// Host side

// Scratch memory of one stream: at least `bytes`, 256-byte aligned, contents undefined. The next launcher on the same
// stream gets the same memory, so a launcher may use it only for what its own kernels pass to each other. It grows
// when a larger piece is asked for (then the host waits for the stream), and is never given back.
void *scratch_get(int64_t bytes, Stream stream);

// out[k][c] (+)= sum over p < n_partials of partial[p][k][c], k < n_sums, c < columns, in a fixed order. Each sum is fp32 and rounded once, to
// the dtype that all of them have. Sums whose out[k] is not given are dropped.
enum { COLUMN_SUMS = 4 };
void columns_reduce(const Tensor (&out)[COLUMN_SUMS], int n_sums, const float *partial, int n_partials, int64_t columns, bool accumulate,
                    cudaStream_t stream);

// Sorts n pairs by the low key_bits of non-negative keys; equal keys keep their order. Without `temporary` it only stores
// the bytes that a sort of n needs there.
cudaError_t sort_pairs(void *temporary, size_t *temporary_bytes, const int32_t *keys, int32_t *keys_sorted, const int32_t *values,
                       int32_t *values_sorted, int n, int key_bits, cudaStream_t stream);

static inline bool is_aligned(const void *p, int64_t bytes) { return (uintptr_t)p % (uintptr_t)bytes == 0; }

// The elements of a tensor, whose dtype the caller has checked.
template <typename T> static inline T *elements(Tensor t) { return (T *)t.data; }

// Shape checks: a mismatch is a bug of the caller. A vector (rows = 1) may come in any shape with the right number of elements.
static inline void check_shape(const char *kernel, const char *name, Tensor t, int64_t rows, int64_t columns) {
    CHECK(t.data != NULL && tensor_numel(t) == rows * columns && (rows == 1 || tensor_columns(t) == columns),
          "%s: %s has %" PRId64 " rows of %" PRId64 ", data %p, wanted %" PRId64 " rows of %" PRId64, kernel, name,
          tensor_rows(t), tensor_columns(t), t.data, rows, columns);
}
static inline void check_act(const char *kernel, const char *name, Tensor t, int64_t rows, int64_t columns, DType wanted) {
    check_shape(kernel, name, t, rows, columns);
    CHECK(t.dtype == wanted, "%s: %s is %s, wanted %s", kernel, name, dtype_name(t.dtype), dtype_name(wanted));
}
static inline void check_f32(const char *kernel, const char *name, Tensor t, int64_t rows, int64_t columns) {
    check_act(kernel, name, t, rows, columns, DTYPE_FP32);
}
// A parameter gradient: fp32, or rounded to the type of the activations.
static inline void check_weight_grad(const char *kernel, const char *name, Tensor t, int64_t rows, int64_t columns, DType act) {
    check_act(kernel, name, t, rows, columns, t.dtype == DTYPE_FP32 ? DTYPE_FP32 : act);
}

// Number of blocks of a one-dimensional grid.
static inline unsigned grid_blocks(int64_t blocks) {
    CHECK(blocks >= 0 && blocks <= INT32_MAX, "%" PRId64 " blocks", blocks);
    return (unsigned)blocks;
}

// Attributes of the current device, read once.
static inline int sm_count(void) {
    static int count = 0;
    if (count == 0) {
        int device;
        cudaCheck(cudaGetDevice(&device));
        cudaCheck(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    }
    return count;
}
static inline int64_t shared_bytes_max(void) {
    static int bytes = 0;
    if (bytes == 0) {
        int device;
        cudaCheck(cudaGetDevice(&device));
        cudaCheck(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    }
    return bytes;
}

// Blocks of a kernel that the device holds at once: the grid of a kernel whose blocks share out the work.
template <typename Kernel> static inline int64_t blocks_at_once(Kernel kernel, int threads, int64_t shared) {
    int per_sm = 0;
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, (size_t)shared));
    return (int64_t)sm_count() * max_i64(1, per_sm);
}

// Lets a kernel have `bytes` of dynamic shared memory. Above 48 KB that must be asked for, and what the kernel declares itself
// (at most a few KB) counts: exactly 48 KB are too many for a kernel that declares 256 bytes.
template <typename Kernel> static inline void shared_bytes_allow(Kernel kernel, int64_t bytes) {
    CHECK(bytes <= shared_bytes_max(), "%" PRId64 " bytes of shared memory, of %" PRId64, bytes, shared_bytes_max());
    if (bytes > 32 * 1024) cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

// ---------------------------------------------------------------------------------------------------------------
// Device side: conversions, vectors

__device__ static inline float to_float(float x) { return x; }
__device__ static inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ static inline float to_float(__half x) { return __half2float(x); }

template <typename T> __device__ static inline T from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ inline __half from_float<__half>(float x) { return __float2half_rn(x); }

// W neighbouring elements, moved by one instruction.
template <typename T, int W> struct alignas(sizeof(T) * W) Vec {
    T v[W];
    __device__ float at(int i) const { return to_float(v[i]); }
    // The same with one instruction where two bf16 lie in a register. It helps where instructions are scarce, and changes how the
    // compiler groups loads, which makes LayerNorm's forward slower.
    __device__ float unpacked(int i) const {
        if constexpr (std::is_same<T, __nv_bfloat16>::value && W % 2 == 0) {
            uint32_t pair;
            memcpy(&pair, v + i / 2 * 2, sizeof pair);
            return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
        }
        return to_float(v[i]);
    }
    __device__ void set(int i, float x) { v[i] = from_float<T>(x); }
};

template <int BYTES> struct Word;
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned int; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

// Where not `valid`, zeros, and `p` is not read.
template <int W, typename T> __device__ static inline Vec<T, W> vec_load_if(bool valid, const T *p) {
    using word = typename Word<(int)sizeof(T) * W>::type;
    word bits = {};
    if (valid) bits = *reinterpret_cast<const word *>(p);
    Vec<T, W> r;
    memcpy(&r, &bits, sizeof r);
    return r;
}
template <int W, typename T> __device__ static inline Vec<T, W> vec_load(const T *p) { return vec_load_if<W>(true, p); }
template <int W, typename T> __device__ static inline void vec_store(T *p, Vec<T, W> x) {
    using word = typename Word<(int)sizeof(T) * W>::type;
    word bits;
    memcpy(&bits, &x, sizeof x);
    *reinterpret_cast<word *>(p) = bits;
}

// ---------------------------------------------------------------------------------------------------------------
// Device side: copies to shared memory that pass no registers. A thread's copies end in the order of their groups.

__device__ static inline uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// 16 bytes; where not `valid`, zeros are written and `src` is not read.
__device__ static inline void copy_async_16(void *dst, const void *src, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared_address(dst)), "l"(src), "r"(valid ? 16 : 0) : "memory");
}
__device__ static inline void copy_async_group(void) { asm volatile("cp.async.commit_group;" ::: "memory"); } // ends a group, which may be empty
__device__ static inline void copy_async_wait_all(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Waits for this thread's groups, all but the newest GROUPS.
template <int GROUPS> __device__ static inline void copy_async_wait_but(void) { asm volatile("cp.async.wait_group %0;" :: "n"(GROUPS) : "memory"); }

__device__ static inline float exp2_fast(float x) { // one instruction, 2 ulp; 2^-inf = 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ static inline float reciprocal_fast(float x) { // one instruction, 1 ulp; 1 / inf = 0
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---------------------------------------------------------------------------------------------------------------
// Device side: GELU, tanh form: 0.5 x (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3), written with the logistic function, since
// 0.5 (1 + tanh u) = 1 / (1 + e^-2u) has full relative precision where tanh is close to -1

// Products and sums are written so that they are rounded alike wherever this stands: what is recomputed must have its first bits.
__device__ static inline float gelu_gate(float x) { // 1 / (1 + e^-2u)
    const float a = -2.0f * 0.7978845608028654f * 1.4426950408889634f; // e^-2u = 2^(a (x + 0.044715 x^3))
    return reciprocal_fast(1.0f + exp2_fast(x * fmaf(a * 0.044715f, x * x, a)));
}
__device__ static inline float gelu(float x) { return x * gelu_gate(x); }
__device__ static inline float gelu_slope(float x) {
    const float a = 2.0f * 0.7978845608028654f, gate = gelu_gate(x); // d(2u)/dx = a (1 + 3 * 0.044715 x^2)
    return fmaf(x * gate * (1.0f - gate), fmaf(a * 3.0f * 0.044715f, x * x, a), gate);
}

// ---------------------------------------------------------------------------------------------------------------
// Device side: reductions, each in a fixed order

__device__ static inline float warp_sum(float x) {
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Lanes that differ in the bit `offset` add their 2 `half` values, and share the work and the sums: the lane without the bit has those of the lower
// half then, in its first `half` values, and the other one those of the upper half.
__device__ static inline void lanes_halve(float *x, int half, int offset) {
    const bool upper = threadIdx.x & offset;
#pragma unroll
    for (int i = 0; i < half; i++) {
        const float kept = upper ? x[i + half] : x[i], given = upper ? x[i] : x[i + half];
        x[i] = kept + __shfl_xor_sync(0xffffffffu, given, offset);
    }
}
