// attention_forward.cu - causal attention, streaming over keys (Milakov and Gimelshein 2018; Dao 2023, "FlashAttention-2").
//
// A block owns a tile of queries and walks over the tiles of keys up to the diagonal. Per query row it keeps the largest
// score so far, the sum of exponentials relative to it and the weighted sum of values; when a larger score comes, the
// sums are scaled down. At the end out = sum of values / sum, lse = largest + log(sum).
#include "attention.cuh"
#include "hopper.cuh"

// ---------------------------------------------------------------------------------------------------------------
// 16-bit types, tensor cores. A warp has 16 * MT query rows; the next tile of keys and values is copied while this one
// is used.

template <typename T, int D> struct ForwardSizes {
    static constexpr int MT = D <= 64 ? 2 : 1;              // 16-row pieces of a warp: as many as registers allow
    static constexpr int BM = 16 * MT * ATTENTION_WARPS;    // queries of a block
    static constexpr int BN = 64;                           // keys of a tile
    static constexpr int64_t BYTES = tile_bytes<T, D>(BM) + 4 * tile_bytes<T, D>(BN);
};

template <typename T, int D>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
attention_forward_kernel(T *out, float *lse, const T *qkv, AttentionShape shape, float scale_log2) {
    constexpr int MT = ForwardSizes<T, D>::MT, BM = ForwardSizes<T, D>::BM, BN = ForwardSizes<T, D>::BN;
    constexpr int TILE = BN * TILE_STRIDE<D>;
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    T *tile_q = reinterpret_cast<T *>(shared_bytes);
    T *tiles_k = tile_q + BM * TILE_STRIDE<D>; // two of keys, then two of values
    T *tiles_v = tiles_k + 2 * TILE;

    AttentionTile at = attention_tile(shape, BM, true);
    const int seq = shape.T, HS = shape.HS, lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const T *q = qkv + (int64_t)at.b * seq * shape.qkv_stride + (int64_t)at.h * HS, *k = q + shape.out_stride, *v = k + shape.out_stride;
    const int q0 = at.row0, warp_q0 = q0 + warp * 16 * MT;
    const int window = shape.window, j0 = max(q0 - window + 1, 0) / BN, n_tiles = (min(q0 + BM, seq) + BN - 1) / BN; // key tiles j0 .. n_tiles - 1 are seen

    uint32_t frag_q[MT][D / 16][4];
    float o[MT][D / 8][4], largest[MT][2], sum[MT][2]; // [..][0] for row g, [..][1] for row g + 8 of each piece
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < D / 8; n++) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;
        largest[m][0] = largest[m][1] = -INFINITY;
        sum[m][0] = sum[m][1] = 0;
    }

    tile_load<T, D, BM>(tile_q, q, shape.qkv_stride, q0, seq, HS);
    tile_load<T, D, BN>(tiles_k + j0 % 2 * TILE, k, shape.qkv_stride, j0 * BN, seq, HS);
    tile_load<T, D, BN>(tiles_v + j0 % 2 * TILE, v, shape.qkv_stride, j0 * BN, seq, HS);
    for (int j = j0; j < n_tiles; j++) {
        const T *tile_k = tiles_k + j % 2 * TILE, *tile_v = tiles_v + j % 2 * TILE;
        copy_async_wait_all(); // this thread's part of tile j has come
        __syncthreads();       // everybody's has, and nobody reads tile j - 1 any more: its place takes tile j + 1
        if (j + 1 < n_tiles) {
            tile_load<T, D, BN>(tiles_k + (j + 1) % 2 * TILE, k, shape.qkv_stride, (j + 1) * BN, seq, HS);
            tile_load<T, D, BN>(tiles_v + (j + 1) % 2 * TILE, v, shape.qkv_stride, (j + 1) * BN, seq, HS);
        }
        if (j == j0) {
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int kk = 0; kk < D / 16; kk++) load_a<T, D>(frag_q[m][kk], tile_q, (warp * MT + m) * 16, kk);
        }
        const int k0 = j * BN;
        if (k0 > warp_q0 + 16 * MT - 1 || k0 + BN - 1 + window <= warp_q0) continue; // all queries of this warp come before all keys, or have left them behind

        float s[MT][BN / 8][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < BN / 8; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++)
#pragma unroll
            for (int n = 0; n < BN / 16; n++) {
                uint32_t b[4];
                load_b_rows<T, D>(b, tile_k, n * 16, kk);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma_16816<T>(s[m][2 * n], frag_q[m][kk], b[0], b[1]);
                    mma_16816<T>(s[m][2 * n + 1], frag_q[m][kk], b[2], b[3]);
                }
            }
        if (k0 + BN - 1 > warp_q0) { // on the diagonal; keys beyond the sequence come after every query too
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < BN / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (k0 + n * 8 + 2 * t + e % 2 > warp_q0 + m * 16 + g + e / 2 * 8) s[m][n][e] = -INFINITY;
        }
        if (k0 + window <= warp_q0 + 16 * MT - 1) { // some query has left some key behind
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < BN / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (k0 + n * 8 + 2 * t + e % 2 + window <= warp_q0 + m * 16 + g + e / 2 * 8) s[m][n][e] = -INFINITY;
        }

#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float top = largest[m][half];
#pragma unroll
                for (int n = 0; n < BN / 8; n++) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1)); // the four lanes of a row
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
                // Until a row has seen its first key, `top` is -infinity, and any finite offset makes its exponentials 2^-inf = 0.
                const float reference = top == -INFINITY ? 0.0f : top, offset = reference * scale_log2;
                float shrink = exp2_fast((largest[m][half] - reference) * scale_log2), part = 0;
                largest[m][half] = top;
#pragma unroll
                for (int n = 0; n < BN / 8; n++) {
                    s[m][n][2 * half] = exp2_fast(s[m][n][2 * half] * scale_log2 - offset);
                    s[m][n][2 * half + 1] = exp2_fast(s[m][n][2 * half + 1] * scale_log2 - offset);
                    part += s[m][n][2 * half] + s[m][n][2 * half + 1];
                }
                sum[m][half] = sum[m][half] * shrink + part; // of this lane's keys; joined at the end
#pragma unroll
                for (int n = 0; n < D / 8; n++) {
                    o[m][n][2 * half] *= shrink;
                    o[m][n][2 * half + 1] *= shrink;
                }
            }

#pragma unroll
        for (int kk = 0; kk < BN / 16; kk++) {
            uint32_t p[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++) pack_a<T>(p[m], s[m][2 * kk], s[m][2 * kk + 1]);
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                uint32_t b[4];
                load_b_columns<T, D>(b, tile_v, kk * 16, n);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma_16816<T>(o[m][2 * n], p[m], b[0], b[1]);
                    mma_16816<T>(o[m][2 * n + 1], p[m], b[2], b[3]);
                }
            }
        }
    }

    T *out_head = out + (int64_t)at.b * seq * shape.out_stride + (int64_t)at.h * HS;
#pragma unroll
    for (int m = 0; m < MT; m++) {
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = sum[m][half];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            inverse[half] = 1.0f / total;
            int row = warp_q0 + m * 16 + g + 8 * half;
            if (t == 0 && row < seq)
                lse[((int64_t)at.b * shape.NH + at.h) * seq + row] = largest[m][half] * scale_log2 * LN2 + logf(total);
        }
        // The queries are in registers since the first tile: this warp's rows of their tile are free.
        store_rows<T, D>(out_head, shape.out_stride, tile_q, (warp * MT + m) * 16, q0, seq, HS, o[m], inverse[0], inverse[1]);
    }
}

template <typename T> static void attention_forward_launch(Tensor out, Tensor lse, Tensor qkv, AttentionShape shape, Stream stream) {
    const float scale_log2 = LOG2E / sqrtf((float)shape.HS);
    const cudaStream_t s = (cudaStream_t)stream;
    HEAD_SIZE_SWITCH(shape.HS, {
        using Sizes = ForwardSizes<T, D>;
        shared_bytes_allow(attention_forward_kernel<T, D>, Sizes::BYTES);
        attention_forward_kernel<T, D><<<attention_blocks(shape, Sizes::BM), ATTENTION_THREADS, Sizes::BYTES, s>>>(
            elements<T>(out), elements<float>(lse), elements<const T>(qkv), shape, scale_log2);
    });
    launch_check();
}

// ---------------------------------------------------------------------------------------------------------------
// fp32

__global__ void __launch_bounds__(PLAIN_THREADS)
attention_forward_plain_kernel(float *out, float *lse, const float *qkv, AttentionShape shape, float scale) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const int seq = shape.T, HS = shape.HS, x = threadIdx.x % 16, y = threadIdx.x / 16;
    const int TILE = PLAIN_ROWS * (HS + 1);
    float *tile_q = reinterpret_cast<float *>(shared_bytes), *tile_k = tile_q + TILE, *tile_v = tile_k + TILE, *tile_p = tile_v + TILE;
    AttentionTile at = attention_tile(shape, PLAIN_ROWS, true);
    const float *q = qkv + (int64_t)at.b * seq * shape.qkv_stride + (int64_t)at.h * HS, *k = q + shape.out_stride, *v = k + shape.out_stride;
    const int q0 = at.row0;

    float o[2][PLAIN_COLUMNS], largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < PLAIN_COLUMNS; j++) o[0][j] = o[1][j] = 0;
    plain_tile_load(tile_q, q, shape.qkv_stride, q0, seq, HS);
    for (int k0 = max(q0 - shape.window + 1, 0) / PLAIN_ROWS * PLAIN_ROWS; k0 <= q0; k0 += PLAIN_ROWS) {
        __syncthreads(); // nobody reads the tiles of the round before
        plain_tile_load(tile_k, k, shape.qkv_stride, k0, seq, HS);
        plain_tile_load(tile_v, v, shape.qkv_stride, k0, seq, HS);
        __syncthreads(); // the tiles are complete
        float s[2][2];
        plain_scores(s, tile_q, tile_k, x, y, HS);
        for (int r = 0; r < 2; r++) {
            for (int c = 0; c < 2; c++) {
                const int behind = q0 + 2 * y + r - (k0 + x + 16 * c); // how far the query is behind the key
                s[r][c] = behind >= 0 && behind < shape.window ? s[r][c] * scale : -INFINITY;
            }
            float top = fmaxf(s[r][0], s[r][1]);
            for (int offset = 8; offset > 0; offset >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
            top = fmaxf(top, largest[r]);
            const float reference = top == -INFINITY ? 0.0f : top; // until the row has seen its first key
            float shrink = expf(largest[r] - reference), part = 0;
            largest[r] = top;
            for (int c = 0; c < 2; c++) {
                float p = expf(s[r][c] - reference);
                part += p;
                tile_p[(2 * y + r) * 33 + x + 16 * c] = p;
            }
            sum[r] = sum[r] * shrink + part;
#pragma unroll
            for (int j = 0; j < PLAIN_COLUMNS; j++) o[r][j] *= shrink;
        }
        __syncwarp(); // the rows of p are written and read by one half of a warp
        plain_accumulate(o, tile_p, tile_v, x, y, HS);
    }
    for (int r = 0; r < 2; r++) {
        for (int offset = 8; offset > 0; offset >>= 1) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], offset);
        int row = q0 + 2 * y + r;
        if (x == 0 && row < seq) lse[((int64_t)at.b * shape.NH + at.h) * seq + row] = largest[r] + logf(sum[r]);
    }
    float *out_head = out + (int64_t)at.b * seq * shape.out_stride + (int64_t)at.h * HS;
    plain_store(out_head, shape.out_stride, q0, seq, HS, o, 1.0f / sum[0], 1.0f / sum[1], x, y);
}

static void attention_forward_plain_launch(Tensor out, Tensor lse, Tensor qkv, AttentionShape shape, Stream stream) {
    const float scale = 1.0f / sqrtf((float)shape.HS);
    const int64_t bytes = (3 * PLAIN_ROWS * (shape.HS + 1) + PLAIN_ROWS * 33) * (int64_t)sizeof(float);
    shared_bytes_allow(attention_forward_plain_kernel, bytes);
    attention_forward_plain_kernel<<<attention_blocks(shape, PLAIN_ROWS), PLAIN_THREADS, (size_t)bytes, (cudaStream_t)stream>>>(
        elements<float>(out), elements<float>(lse), elements<const float>(qkv), shape, scale);
    launch_check();
}

void cuda::attention_forward(Tensor out, Tensor lse, Tensor qkv, int NH, int64_t window, Stream stream) {
    const AttentionShape shape = attention_shape("attention_forward", qkv, "out", out, lse, NH, window);
    if (shape.B == 0 || shape.T == 0) return;
    if (qkv.dtype != DTYPE_FP32 && hopper_available()) {
        attention_forward_hopper(out, lse, qkv, shape, stream);
        return;
    }
    switch (qkv.dtype) {
    case DTYPE_BF16: attention_forward_launch<__nv_bfloat16>(out, lse, qkv, shape, stream); break;
    case DTYPE_FP16: attention_forward_launch<__half>(out, lse, qkv, shape, stream); break;
    default: attention_forward_plain_launch(out, lse, qkv, shape, stream);
    }
}
