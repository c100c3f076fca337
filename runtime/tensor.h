// tensor.h - a Tensor is a pointer with a type and a shape, passed by value; it owns nothing.
//
// Why not bare pointers and B,T,C arguments: the precision comes from the configuration at run time, local shapes will
// depend on the parallel layout, and a kernel that derives its sizes from its arguments can check that they agree.
// A Tensor whose data is null means "not given" wherever a prototype says that an argument is optional.
#pragma once
#include "utils.h"

typedef enum {
    DTYPE_FP32, DTYPE_BF16, DTYPE_FP16,
    DTYPE_COUNT,                   // of numbers; what follows is none by itself
    DTYPE_REMAINDER = DTYPE_COUNT, // what a bf16 weight lacks of its fp32 master, see master_join
} DType;

static inline const char *dtype_name(DType t) { return t == DTYPE_FP32 ? "fp32" : t == DTYPE_BF16 ? "bf16" : t == DTYPE_FP16 ? "fp16" : "remainder"; }
static inline int64_t dtype_bytes(DType t) { return t == DTYPE_FP32 ? 4 : 2; }

typedef struct {
    void *data;       // in the memory of the backend that will use it; null = not given
    DType dtype;
    int ndim;         // 1 to 4
    int64_t shape[4]; // elements, slowest dimension first, contiguous; unused ones are 1
} Tensor;

static inline Tensor tensor_make(void *data, DType dtype, int ndim, int64_t a, int64_t b, int64_t c, int64_t d) {
    Tensor t = {data, dtype, ndim, {a, b, c, d}};
    return t;
}
static inline Tensor tensor1(void *data, DType dtype, int64_t a) { return tensor_make(data, dtype, 1, a, 1, 1, 1); }
static inline Tensor tensor2(void *data, DType dtype, int64_t a, int64_t b) { return tensor_make(data, dtype, 2, a, b, 1, 1); }
static inline Tensor tensor3(void *data, DType dtype, int64_t a, int64_t b, int64_t c) { return tensor_make(data, dtype, 3, a, b, c, 1); }
static inline Tensor tensor_none(void) { return tensor_make(NULL, DTYPE_FP32, 0, 0, 0, 0, 0); }

static inline int64_t tensor_numel(Tensor t) { return t.ndim == 0 ? 0 : t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3]; }
static inline int64_t tensor_bytes(Tensor t) { return tensor_numel(t) * dtype_bytes(t.dtype); }

// Elements of the last dimension, and the number of such rows: most kernels see a tensor as (rows, columns).
static inline int64_t tensor_columns(Tensor t) { return t.ndim == 0 ? 0 : t.shape[t.ndim - 1]; }
static inline int64_t tensor_rows(Tensor t) { return tensor_numel(t) == 0 ? 0 : tensor_numel(t) / tensor_columns(t); }

// ---------------------------------------------------------------------------------------------------------------
// 16-bit floats on the host. Both directions round to nearest, ties to even, and keep NaN and infinity.

// The bits of a float, and back. By a union: loops with memcpy stay scalar under _FORTIFY_SOURCE.
static inline uint32_t float_bits(float f) {
    union { float f; uint32_t u; } x;
    x.f = f;
    return x.u;
}
static inline float bits_float(uint32_t u) {
    union { uint32_t u; float f; } x;
    x.u = u;
    return x.f;
}

static inline float bf16_to_float(uint16_t h) {
    return bits_float((uint32_t)h << 16);
}
static inline uint16_t float_to_bf16(float f) {
    uint32_t u = float_bits(f);
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40 : (u + 0x7fffu + ((u >> 16) & 1)) >> 16); // NaN stays NaN
}
static inline float fp16_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, u;
    if (exponent == 31) u = sign | 0x7f800000u | (mantissa << 13);
    else if (exponent != 0) u = sign | ((exponent + 112) << 23) | (mantissa << 13);
    else { // zero or subnormal: mantissa * 2^-24 is exact in fp32
        u = sign | float_bits((float)mantissa * 0x1p-24f);
    }
    return bits_float(u);
}
static inline uint16_t float_to_fp16(float f) {
    uint32_t u = float_bits(f);
    uint16_t sign = (uint16_t)((u >> 16) & 0x8000u);
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);         // NaN
    if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);        // 65520 and above round to infinity
    if (u < 0x38800000u) {                                          // below 2^-14: subnormal, or zero
        uint32_t m = float_bits(bits_float(u) * 0x1p24f + 0x1p23f); // lets the FPU round mantissa to an integer
        return (uint16_t)(sign | (m & 0x7ffu));
    }
    u += 0xc8000fffu + ((u >> 13) & 1);                             // rebias the exponent and round to even
    return (uint16_t)(sign | (u >> 13));
}

// ---------------------------------------------------------------------------------------------------------------
// Split masters: an fp32 master as its bf16 weight and a 16-bit remainder, together the same 32 bits. With the bits of all
// three as integers modulo 2^32:
//
//     master = (weight << 16) + remainder, the remainder as a signed number
//
// The weight is the master rounded to nearest, ties away from zero. Ties to even would not do: a low half of 0x8000 would
// belong now to the weight below, now to the one above. So rounded, the remainder is the master's low half, and its sign says
// which way the weight went. It holds for every master but NaN: integers grow with the magnitude, whatever the sign; a finite
// master beyond bf16's largest has an infinite weight, as under any rounding, and a negative remainder that leads back from it
// (infinity itself has 0). NaN becomes the quiet NaN of its sign, with remainder 0.

static inline uint16_t master_to_bf16(float master) {
    uint32_t u = float_bits(master);
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16 & 0x8000u) | 0x7fc0u : (u + 0x8000u) >> 16);
}
static inline uint16_t master_remainder(float master) {
    uint32_t u = float_bits(master);
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0 : u);
}
static inline float master_join(uint16_t weight, uint16_t remainder) {
    return bits_float(((uint32_t)weight << 16) + (uint32_t)(int32_t)(int16_t)remainder);
}

// Element i of host memory of type t, as fp32.
static inline float dtype_load(const void *data, DType t, int64_t i) {
    return t == DTYPE_FP32 ? ((const float *)data)[i] : t == DTYPE_BF16 ? bf16_to_float(((const uint16_t *)data)[i]) : fp16_to_float(((const uint16_t *)data)[i]);
}
static inline void dtype_store(void *data, DType t, int64_t i, float x) {
    if (t == DTYPE_FP32) ((float *)data)[i] = x;
    else ((uint16_t *)data)[i] = t == DTYPE_BF16 ? float_to_bf16(x) : float_to_fp16(x);
}
static inline float dtype_round(DType t, float x) { return t == DTYPE_FP32 ? x : t == DTYPE_BF16 ? bf16_to_float(float_to_bf16(x)) : fp16_to_float(float_to_fp16(x)); }
