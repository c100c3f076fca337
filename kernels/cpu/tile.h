// tile.h - the inner product of the CPU backend: a small tile of C = A B kept in vector registers, and the packing that feeds
// it. Linear layers and attention are loops around tile_multiply.
//
// A tile has TILE_ROWS x TILE_COLUMNS elements. Each step of k broadcasts TILE_ROWS elements of A against two vectors of B
// (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication"). The shape follows the registers:
// 8 x 32 in 16 of AVX-512's 32, 6 x 16 in 12 of AVX's 16, 4 x 8 in 8 of SSE's 16 (32 of NEON).
//
// The value of an element depends on its row of A and its column of B only, not on the tile it falls in: terms are added in
// the order of k, by the same instructions. So blocks may be cut by the number of threads without changing a bit.
#pragma once
#include "rows.h"

#if defined(__AVX512F__)
enum { VECTOR_FLOATS = 16, TILE_ROWS = 8 };
#elif defined(__AVX__)
enum { VECTOR_FLOATS = 8, TILE_ROWS = 6 };
#else
enum { VECTOR_FLOATS = 4, TILE_ROWS = 4 };
#endif
enum { TILE_COLUMNS = 2 * VECTOR_FLOATS, TILE = TILE_ROWS * TILE_COLUMNS };

typedef float Vector __attribute__((vector_size(VECTOR_FLOATS * 4), aligned(4), may_alias)); // loads from any address
typedef float Vector4 __attribute__((vector_size(16), aligned(4), may_alias));

// out[r*out_row + c] = init[r*out_row + c] + sum over k < K of a[r*a_row + k*a_k] * b[k*b_k + c].
// init null = 0; it may be out. Always TILE_ROWS rows of A and TILE_COLUMNS columns of B: callers pad.
static inline __attribute__((always_inline)) void tile_multiply(float *out, int64_t out_row, const float *init, const float *a, int64_t a_row, int64_t a_k,
                                                                const float *b, int64_t b_k, int64_t K) {
    UNINITIALIZED Vector sum[TILE_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) sum[r][0] = sum[r][1] = Vector{};
    for (int64_t k = 0; k < K; k++) {
        const Vector b0 = *(const Vector *)(b + k * b_k), b1 = *(const Vector *)(b + k * b_k + VECTOR_FLOATS);
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; r++) {
            const float x = a[k * a_k + r * a_row];
            sum[r][0] += x * b0;
            sum[r][1] += x * b1;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) {
        if (init) { // last, not first: sums of pieces err less than one long sum
            sum[r][0] += *(const Vector *)(init + r * out_row);
            sum[r][1] += *(const Vector *)(init + r * out_row + VECTOR_FLOATS);
        }
        *(Vector *)(out + r * out_row) = sum[r][0];
        *(Vector *)(out + r * out_row + VECTOR_FLOATS) = sum[r][1];
    }
}

// Transposes a 4 x 4 block: src rows src_row apart, dst rows dst_row apart.
static inline __attribute__((always_inline)) void transpose4(float *dst, int64_t dst_row, const float *src, int64_t src_row) {
    const Vector4 r0 = *(const Vector4 *)src, r1 = *(const Vector4 *)(src + src_row);
    const Vector4 r2 = *(const Vector4 *)(src + 2 * src_row), r3 = *(const Vector4 *)(src + 3 * src_row);
#if defined(__clang__)
#define SHUFFLE4(x, y, a, b, c, d) __builtin_shufflevector(x, y, a, b, c, d)
#else
    typedef int32_t Mask __attribute__((vector_size(16)));
#define SHUFFLE4(x, y, a, b, c, d) __builtin_shuffle(x, y, (Mask){a, b, c, d})
#endif
    const Vector4 low01 = SHUFFLE4(r0, r1, 0, 4, 1, 5), high01 = SHUFFLE4(r0, r1, 2, 6, 3, 7);
    const Vector4 low23 = SHUFFLE4(r2, r3, 0, 4, 1, 5), high23 = SHUFFLE4(r2, r3, 2, 6, 3, 7);
    *(Vector4 *)dst = SHUFFLE4(low01, low23, 0, 1, 4, 5);
    *(Vector4 *)(dst + dst_row) = SHUFFLE4(low01, low23, 2, 3, 6, 7);
    *(Vector4 *)(dst + 2 * dst_row) = SHUFFLE4(high01, high23, 0, 1, 4, 5);
    *(Vector4 *)(dst + 3 * dst_row) = SHUFFLE4(high01, high23, 2, 3, 6, 7);
#undef SHUFFLE4
}

// dst[k*dst_row + i] = src[i*src_row + k] for i < lines, k < K.
static inline void transpose(float *dst, int64_t dst_row, const float *src, int64_t src_row, int64_t lines, int64_t K) {
    int64_t i = 0;
    for (; i + 4 <= lines; i += 4) {
        int64_t k = 0;
        for (; k + 4 <= K; k += 4) transpose4(dst + k * dst_row + i, dst_row, src + i * src_row + k, src_row);
        for (; k < K; k++)
            for (int64_t j = i; j < i + 4; j++) dst[k * dst_row + j] = src[j * src_row + k];
    }
    for (; i < lines; i++)
        for (int64_t k = 0; k < K; k++) dst[k * dst_row + i] = src[i * src_row + k];
}
