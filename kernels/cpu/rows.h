// rows.h - the only place of the CPU kernels that knows element types: pieces of tensors as fp32, and back.
//
// Every CPU kernel is written once, for floats. It asks row_load for a piece of a tensor (a pointer into the tensor
// itself when that is fp32, else a converted copy in the caller's scratch), computes, and hands the result to row_store,
// which rounds it. row_target is where to compute a result: in the tensor itself when it is fp32, else in scratch.
//
// Threads: loops over rows or blocks are OpenMP loops in which every result has one owner. Sums that cross rows are cut
// into pieces by sizes that depend on the shape only, never on the number of threads, and added in the order of the pieces.
#pragma once
#include "../kernels.h"
#ifndef USE_CUDA
#include "../../runtime/device_cpu.h"
#endif

// Loops with fewer elements than this run on the calling thread: waking the others costs about as much.
#define PARALLEL_MIN 32768

// Locals that are written before they are read need no zeros from -ftrivial-auto-var-init; only for hot inner functions.
#if defined(__has_attribute) && __has_attribute(uninitialized)
#define UNINITIALIZED __attribute__((uninitialized))
#else
#define UNINITIALIZED
#endif

// Every kernel begins by naming what it writes and what it reads. That is its place on the stream: work that is pending there
// is finished first, and in DEBUG the arguments become addresses that can be used and are checked for missing waits. In a
// CUDA build these kernels are the oracle and compute on the host's own memory, in the order of the calls.
#define KERNEL_WRITES(stream, ...) kernel_arguments(__func__, stream, true, __VA_ARGS__)
#define KERNEL_READS(stream, ...) kernel_arguments(__func__, stream, false, __VA_ARGS__)

static inline void *kernel_address(const char *kernel, Stream s, bool written, void *at, int64_t bytes) {
#ifdef USE_CUDA
    (void)kernel, (void)s, (void)written, (void)bytes;
    return at;
#else
    return device_cpu_touch(kernel, s, at, bytes, written);
#endif
}
static inline void kernel_argument(const char *kernel, Stream s, bool written, Tensor &t) {
    t.data = kernel_address(kernel, s, written, t.data, tensor_bytes(t));
}
template <class T> static inline void kernel_argument(const char *kernel, Stream s, bool written, T *&p) { // an array: its first element stands for it
    p = (T *)kernel_address(kernel, s, written, (void *)p, sizeof(T));
}
template <class... Arguments> static inline void kernel_arguments(const char *kernel, Stream s, bool written, Arguments &...argument) {
    (kernel_argument(kernel, s, written, argument), ...);
}

// n floats, 64-byte aligned, contents undefined; freed with free().
static inline float *scratch_floats(int64_t n) {
    void *p = aligned_alloc(64, (size_t)round_up(max_i64(n, 1) * 4, 64));
    if (!p) die(EXIT_INTERNAL, "out of host memory: %" PRId64 " bytes of kernel scratch asked for; lower the model or batch size", n * 4);
    return (float *)p;
}

static inline void floats_load(float *__restrict dst, const void *data, DType t, int64_t at, int64_t n) {
    if (t == DTYPE_FP32) memcpy(dst, (const float *)data + at, (size_t)n * 4);
    else if (t == DTYPE_BF16) for (int64_t i = 0; i < n; i++) dst[i] = bf16_to_float(((const uint16_t *)data)[at + i]);
    else for (int64_t i = 0; i < n; i++) dst[i] = fp16_to_float(((const uint16_t *)data)[at + i]);
}

static inline void floats_store(void *data, DType t, int64_t at, const float *__restrict src, int64_t n) {
    if (t == DTYPE_FP32) memcpy((float *)data + at, src, (size_t)n * 4);
    else if (t == DTYPE_BF16) for (int64_t i = 0; i < n; i++) ((uint16_t *)data)[at + i] = float_to_bf16(src[i]);
    else for (int64_t i = 0; i < n; i++) ((uint16_t *)data)[at + i] = float_to_fp16(src[i]);
}

// Elements at .. at+n-1 of t as floats.
static inline const float *row_load(Tensor t, int64_t at, int64_t n, float *scratch) {
    if (t.dtype == DTYPE_FP32) return (const float *)t.data + at;
    floats_load(scratch, t.data, t.dtype, at, n);
    return scratch;
}

// Where to compute elements from `at` on.
static inline float *row_target(Tensor t, int64_t at, float *scratch) {
    return t.dtype == DTYPE_FP32 ? (float *)t.data + at : scratch;
}

// Stores n computed floats as elements at .. at+n-1; nothing to do if they were computed in place.
static inline void row_store(Tensor t, int64_t at, int64_t n, const float *row) {
    if (t.dtype == DTYPE_FP32 && (const float *)t.data + at == row) return;
    floats_store(t.data, t.dtype, at, row, n);
}

// Elements at .. at+n-1 of t (+)= sums that were taken in double: as fp32, then rounded to t's dtype.
static inline void sums_store(Tensor t, int64_t at, int64_t n, const double *sum, bool accumulate) {
    for (int64_t i = 0; i < n; i++) dtype_store(t.data, t.dtype, at + i, (float)(sum[i] + (accumulate ? (double)dtype_load(t.data, t.dtype, at + i) : 0.0)));
}

// Shape checks: a mismatch is a bug of the caller. A vector (rows = 1) may come in any shape with the right number of elements.
static inline void check_shape(const char *kernel, const char *name, Tensor t, int64_t rows, int64_t columns) {
    CHECK(t.data != NULL && tensor_numel(t) == rows * columns && (rows == 1 || tensor_columns(t) == columns),
          "%s: %s has %" PRId64 " rows of %" PRId64 ", data %p, wanted %" PRId64 " rows of %" PRId64, kernel, name,
          tensor_rows(t), tensor_columns(t), t.data, rows, columns);
}
static inline void check_dtype(const char *kernel, const char *name, Tensor t, DType wanted) {
    CHECK(t.dtype == wanted, "%s: %s is %s, wanted %s", kernel, name, dtype_name(t.dtype), dtype_name(wanted));
}
static inline void check_f32(const char *kernel, const char *name, Tensor t, int64_t rows, int64_t columns) {
    check_shape(kernel, name, t, rows, columns);
    check_dtype(kernel, name, t, DTYPE_FP32);
}
// fp32, or bf16 as data_types.grad_accum_dtype may say.
static inline void check_grad(const char *kernel, const char *name, Tensor t, int64_t n) {
    check_shape(kernel, name, t, 1, n);
    CHECK(t.dtype == DTYPE_FP32 || t.dtype == DTYPE_BF16, "%s: %s is %s, wanted fp32 or bf16", kernel, name, dtype_name(t.dtype));
}
// A parameter gradient: fp32, or rounded to the type of the activations.
static inline void check_weight_grad(const char *kernel, const char *name, Tensor t, int64_t rows, int64_t columns, DType act) {
    check_shape(kernel, name, t, rows, columns);
    if (t.dtype != DTYPE_FP32) check_dtype(kernel, name, t, act);
}
static inline void check_act(const char *kernel, const char *name, Tensor t, int64_t rows, int64_t columns, DType wanted) {
    check_shape(kernel, name, t, rows, columns);
    check_dtype(kernel, name, t, wanted);
}
