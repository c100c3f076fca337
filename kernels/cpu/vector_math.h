// vector_math.h - exponential and logistic functions that the compiler can vectorise: no branches, no calls.
//
// exp: x = n ln2 + r with |r| <= ln2/2 (Cody and Waite 1980: ln2 in two parts), e^r by its Taylor polynomial of degree 7
// (remainder 5e-9 at the ends), times 2^n put together from bits. tests/test_kernels.h holds the error bounds.
#pragma once
#include "rows.h"

// e^x. Relative error below 1.5e-7; 0 below -87.3, 3.4e38 above 88.7 (never infinity); NaN stays NaN.
static inline float exp_fast(float x) {
    const float rounder = 12582912.0f; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    float clamped = x > 88.7f ? 88.7f : x;
    float shifted = clamped * 1.44269504f + rounder, n = shifted - rounder;
    float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits, rounder_bits = 0x4b400000;
    memcpy(&bits, &shifted, 4);
    // 2^n in two factors, since 2^128 is no float; unsigned, since x below -87.3 leaves nonsense here
    int32_t half = (int32_t)(bits - rounder_bits) >> 1;
    uint32_t rest = bits - rounder_bits - (uint32_t)half, bits1 = ((uint32_t)half + 127) << 23, bits2 = (rest + 127) << 23;
    float f1, f2;
    memcpy(&f1, &bits1, 4);
    memcpy(&f2, &bits2, 4);
    return x < -87.3f ? 0.0f : p * f1 * f2;
}

// The largest of n >= 1 floats; a NaN may be passed over. Lanes spell out for every compiler what it may do side by side.
static inline float largest_of(const float *x, int64_t n) {
    enum { LANES = 16 };
    float lane[LANES], largest = x[0];
    for (int l = 0; l < LANES; l++) lane[l] = largest;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
    for (; i < n; i++) largest = x[i] > largest ? x[i] : largest;
    for (int l = 0; l < LANES; l++) largest = lane[l] > largest ? lane[l] : largest;
    return largest;
}

// The GELU in its tanh form is x times a logistic function: 0.5 (1 + tanh u) = 1 / (1 + e^(-2u)), which loses no digits
// for negative x and needs no tanh. 2u = 2 sqrt(2/pi) (x + 0.044715 x^3).
#define GELU_A 1.5957691216f  // 2 sqrt(2/pi)
#define GELU_B 0.0713548163f  // GELU_A * 0.044715

static inline float gelu(float x) {
    return x / (1.0f + exp_fast(-x * (GELU_A + GELU_B * x * x)));
}

static inline float gelu_derivative(float x) {
    float e = exp_fast(-x * (GELU_A + GELU_B * x * x)), s = 1.0f / (1.0f + e);
    return s + x * (e * s * s) * (GELU_A + 3.0f * GELU_B * x * x); // 1 - s = e s, without the cancellation
}
