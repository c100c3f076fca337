// attention_backward.cu - gradients of causal attention, from q, k, v, the output and lse (Dao 2023, "FlashAttention-2").
//
// With S = q k^T / sqrt(HS), P = exp(S - lse) and D = rowsum(dout * out):
//
//     dv = P^T dout      dP = dout v^T      dS = P * (dP - D)      dq = dS k / sqrt(HS)      dk = dS^T q / sqrt(HS)
//
// Two kernels, each of which recomputes S and dP: one owns a tile of keys and walks over queries (dk, dv), the other
// owns a tile of queries and walks over keys (dq). That is 7 products where one kernel would do with 5, but each
// gradient has one writer: no atomics, no fp32 buffer for dq, equal bits in every run. Compute capability 9.0 has a kernel of
// its own for the 16-bit types, attention_backward_hopper.cu.
#include "attention.cuh"
#include "hopper.cuh"

// ---------------------------------------------------------------------------------------------------------------
// D (B,NH,T) = rowsum(dout * out). LANES neighbouring lanes handle one row of one head, 16 bytes each.

template <typename T, int LANES>
__global__ void __launch_bounds__(256) attention_rowsum_kernel(float *rowsum, const T *dout, const T *out, AttentionShape shape) {
    constexpr int W = 16 / (int)sizeof(T);
    int64_t i = ((int64_t)blockIdx.x * 256 + threadIdx.x) / LANES; // (b, t, h), h fastest
    int c = threadIdx.x % LANES * W;
    bool valid = i < shape.B * shape.T * shape.NH && c < shape.HS;
    float sum = 0;
    if (valid) {
        Vec<T, W> a = vec_load<W>(dout + i * shape.HS + c), b = vec_load<W>(out + i * shape.HS + c);
#pragma unroll
        for (int k = 0; k < W; k++) sum += a.at(k) * b.at(k);
    }
    for (int offset = LANES / 2; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (valid && c == 0) {
        int64_t h = i % shape.NH, t = i / shape.NH % shape.T, b = i / shape.NH / shape.T;
        rowsum[(b * shape.NH + h) * shape.T + t] = sum;
    }
}

template <typename T, int LANES>
static void attention_rowsum_launch(float *rowsum, Tensor dout, Tensor out, AttentionShape shape, Stream stream) {
    const unsigned blocks = grid_blocks(ceil_div(shape.B * shape.T * shape.NH * LANES, 256));
    attention_rowsum_kernel<T, LANES><<<blocks, 256, 0, (cudaStream_t)stream>>>(rowsum, elements<const T>(dout), elements<const T>(out), shape);
    launch_check();
}

// ---------------------------------------------------------------------------------------------------------------
// 16-bit types: dk and dv
//
// Scores are computed transposed, keys down and queries across, so that P^T and dS^T come out of the tensor cores in the
// layout in which they go in again as A operands. A warp has 16 * MT keys; a tile of BQ queries is worked off in parts
// of SQ, which bounds the registers that scores take.

template <typename T, int D> struct BackwardSizes {
    static constexpr int MT = D <= 64 ? 2 : 1;
    static constexpr int OWN = 16 * MT * ATTENTION_WARPS; // rows that a block owns: keys here, queries in the kernel for dq
    static constexpr int WALK = D <= 64 ? 64 : 32;        // rows of a tile that it walks over
    static constexpr int PART = 32;                       // of these, worked off at once
    static constexpr int64_t BYTES_Q = 2 * tile_bytes<T, D>(OWN) + 4 * tile_bytes<T, D>(WALK); // for dq
    static constexpr int64_t BYTES_KV = BYTES_Q + 4 * WALK * (int64_t)sizeof(float);           // for dk and dv
};

// Starts the copy of lse and rowsum of a tile of queries. Beyond the sequence lse is infinite, hence P = 0 there.
template <int ROWS>
__device__ static inline void statistics_load(float *tile_lse, float *tile_rowsum, const float *lse, const float *rowsum, int row0, int rows_total) {
    int i = threadIdx.x % ROWS;
    if (threadIdx.x >= 2 * ROWS) return;
    bool valid = row0 + i < rows_total, is_lse = threadIdx.x < ROWS;
    float *to = (is_lse ? tile_lse : tile_rowsum) + i;
    const float *from = (is_lse ? lse : rowsum) + row0 + i;
    if (valid) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(shared_address(to)), "l"(from) : "memory");
    else *to = is_lse ? INFINITY : 0.0f;
}

template <typename T, int D>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
attention_backward_kv_kernel(T *dqkv, const T *dout, const T *qkv, const float *lse, const float *rowsum, AttentionShape shape, float scale) {
    using Sizes = BackwardSizes<T, D>;
    constexpr int MT = Sizes::MT, BK = Sizes::OWN, BQ = Sizes::WALK, SQ = Sizes::PART, TILE = BQ * TILE_STRIDE<D>;
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    T *tile_k = reinterpret_cast<T *>(shared_bytes), *tile_v = tile_k + BK * TILE_STRIDE<D>;
    T *tiles_q = tile_v + BK * TILE_STRIDE<D>, *tiles_do = tiles_q + 2 * TILE; // two of each
    float *tiles_lse = reinterpret_cast<float *>(tiles_do + 2 * TILE), *tiles_rowsum = tiles_lse + 2 * BQ;

    AttentionTile at = attention_tile(shape, BK, false);
    const int seq = shape.T, HS = shape.HS, lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int64_t first = (int64_t)at.b * seq * shape.qkv_stride + (int64_t)at.h * HS;
    const T *q = qkv + first, *k = q + shape.out_stride, *v = k + shape.out_stride;
    const T *dout_head = dout + (int64_t)at.b * seq * shape.out_stride + (int64_t)at.h * HS;
    const int64_t statistics = ((int64_t)at.b * shape.NH + at.h) * seq;
    const float *lse_head = lse + statistics, *rowsum_head = rowsum + statistics;
    const int k0 = at.row0, warp_k0 = k0 + warp * 16 * MT;
    const int window = shape.window; // queries before first_tile and from end_tile on see none of these keys
    const int first_tile = k0 / BQ, end_tile = (min(k0 + BK + window - 1, seq) + BQ - 1) / BQ;
    const float scale_log2 = scale * LOG2E;

    float dk[MT][D / 8][4], dv[MT][D / 8][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) dk[m][n][e] = dv[m][n][e] = 0;

    tile_load<T, D, BK>(tile_k, k, shape.qkv_stride, k0, seq, HS);
    tile_load<T, D, BK>(tile_v, v, shape.qkv_stride, k0, seq, HS);
    tile_load<T, D, BQ>(tiles_q, q, shape.qkv_stride, first_tile * BQ, seq, HS);
    tile_load<T, D, BQ>(tiles_do, dout_head, shape.out_stride, first_tile * BQ, seq, HS);
    statistics_load<BQ>(tiles_lse, tiles_rowsum, lse_head, rowsum_head, first_tile * BQ, seq);
    for (int j = first_tile; j < end_tile; j++) {
        const int now = (j - first_tile) % 2, next = 1 - now;
        const T *tile_q = tiles_q + now * TILE, *tile_do = tiles_do + now * TILE;
        const float *tile_lse = tiles_lse + now * BQ, *tile_rowsum = tiles_rowsum + now * BQ;
        copy_async_wait_all(); // this thread's part of tile j has come
        __syncthreads();       // everybody's has, and nobody reads tile j - 1 any more: its place takes tile j + 1
        if (j + 1 < end_tile) {
            tile_load<T, D, BQ>(tiles_q + next * TILE, q, shape.qkv_stride, (j + 1) * BQ, seq, HS);
            tile_load<T, D, BQ>(tiles_do + next * TILE, dout_head, shape.out_stride, (j + 1) * BQ, seq, HS);
            statistics_load<BQ>(tiles_lse + next * BQ, tiles_rowsum + next * BQ, lse_head, rowsum_head, (j + 1) * BQ, seq);
        }
#pragma unroll 1
        for (int part = 0; part < BQ; part += SQ) {
            const int q0 = j * BQ + part;
            if (q0 + SQ - 1 < warp_k0 || q0 >= warp_k0 + 16 * MT - 1 + window) continue; // all queries come before all keys of this warp, or have left them behind
            float p[MT][SQ / 8][4], ds[MT][SQ / 8][4];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < SQ / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) p[m][n][e] = ds[m][n][e] = 0;
#pragma unroll
            for (int kk = 0; kk < D / 16; kk++) { // S^T = k q^T
                uint32_t a[MT][4], b[4];
#pragma unroll
                for (int m = 0; m < MT; m++) load_a<T, D>(a[m], tile_k, (warp * MT + m) * 16, kk);
#pragma unroll
                for (int n = 0; n < SQ / 16; n++) {
                    load_b_rows<T, D>(b, tile_q, part + n * 16, kk);
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        mma_16816<T>(p[m][2 * n], a[m], b[0], b[1]);
                        mma_16816<T>(p[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
            }
            const bool diagonal = q0 < warp_k0 + 16 * MT - 1; // keys beyond the sequence come after every query too
            const bool edge = q0 + SQ - 1 >= warp_k0 + window; // some query has left some key behind
#pragma unroll
            for (int n = 0; n < SQ / 8; n++) {
                float2 offset = *reinterpret_cast<const float2 *>(tile_lse + part + n * 8 + 2 * t);
                offset.x *= LOG2E;
                offset.y *= LOG2E;
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float x = exp2_fast(p[m][n][e] * scale_log2 - (e % 2 ? offset.y : offset.x));
                        const int query = q0 + n * 8 + 2 * t + e % 2, key = warp_k0 + m * 16 + g + e / 2 * 8;
                        p[m][n][e] = (diagonal && query < key) || (edge && query >= key + window) ? 0.0f : x;
                    }
            }
#pragma unroll
            for (int kk = 0; kk < SQ / 16; kk++) { // dv += P^T dout
                uint32_t a[MT][4], b[4];
#pragma unroll
                for (int m = 0; m < MT; m++) pack_a<T>(a[m], p[m][2 * kk], p[m][2 * kk + 1]);
#pragma unroll
                for (int n = 0; n < D / 16; n++) {
                    load_b_columns<T, D>(b, tile_do, part + kk * 16, n);
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        mma_16816<T>(dv[m][2 * n], a[m], b[0], b[1]);
                        mma_16816<T>(dv[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
            }
#pragma unroll
            for (int kk = 0; kk < D / 16; kk++) { // dP^T = v dout^T
                uint32_t a[MT][4], b[4];
#pragma unroll
                for (int m = 0; m < MT; m++) load_a<T, D>(a[m], tile_v, (warp * MT + m) * 16, kk);
#pragma unroll
                for (int n = 0; n < SQ / 16; n++) {
                    load_b_rows<T, D>(b, tile_do, part + n * 16, kk);
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        mma_16816<T>(ds[m][2 * n], a[m], b[0], b[1]);
                        mma_16816<T>(ds[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < SQ / 8; n++) { // dS = P * (dP - D)
                float2 of_row = *reinterpret_cast<const float2 *>(tile_rowsum + part + n * 8 + 2 * t);
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++) ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - (e % 2 ? of_row.y : of_row.x));
            }
#pragma unroll
            for (int kk = 0; kk < SQ / 16; kk++) { // dk += dS^T q
                uint32_t a[MT][4], b[4];
#pragma unroll
                for (int m = 0; m < MT; m++) pack_a<T>(a[m], ds[m][2 * kk], ds[m][2 * kk + 1]);
#pragma unroll
                for (int n = 0; n < D / 16; n++) {
                    load_b_columns<T, D>(b, tile_q, part + kk * 16, n);
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        mma_16816<T>(dk[m][2 * n], a[m], b[0], b[1]);
                        mma_16816<T>(dk[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
            }
        }
    }

    // Only this warp reads its rows of the key and value tiles, and it is done with them.
    T *dk_head = dqkv + first + shape.out_stride, *dv_head = dk_head + shape.out_stride;
#pragma unroll
    for (int m = 0; m < MT; m++) {
        store_rows<T, D>(dk_head, shape.qkv_stride, tile_k, (warp * MT + m) * 16, k0, seq, HS, dk[m], scale, scale);
        store_rows<T, D>(dv_head, shape.qkv_stride, tile_v, (warp * MT + m) * 16, k0, seq, HS, dv[m], 1.0f, 1.0f);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// 16-bit types: dq. As forward: queries down, keys across.

template <typename T, int D>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
attention_backward_q_kernel(T *dqkv, const T *dout, const T *qkv, const float *lse, const float *rowsum, AttentionShape shape, float scale) {
    using Sizes = BackwardSizes<T, D>;
    constexpr int MT = Sizes::MT, BM = Sizes::OWN, BN = Sizes::WALK, SN = Sizes::PART, TILE = BN * TILE_STRIDE<D>;
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    T *tile_q = reinterpret_cast<T *>(shared_bytes), *tile_do = tile_q + BM * TILE_STRIDE<D>;
    T *tiles_k = tile_do + BM * TILE_STRIDE<D>, *tiles_v = tiles_k + 2 * TILE; // two of each

    AttentionTile at = attention_tile(shape, BM, true);
    const int seq = shape.T, HS = shape.HS, lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int64_t first = (int64_t)at.b * seq * shape.qkv_stride + (int64_t)at.h * HS;
    const T *q = qkv + first, *k = q + shape.out_stride, *v = k + shape.out_stride;
    const int q0 = at.row0, warp_q0 = q0 + warp * 16 * MT;
    const int window = shape.window, j0 = max(q0 - window + 1, 0) / BN, n_tiles = (min(q0 + BM, seq) + BN - 1) / BN;
    const float scale_log2 = scale * LOG2E;

    float dq[MT][D / 8][4], offset[MT][2], of_row[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < D / 8; n++) dq[m][n][0] = dq[m][n][1] = dq[m][n][2] = dq[m][n][3] = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) { // beyond the sequence P = 0
            int row = warp_q0 + m * 16 + g + 8 * half;
            int64_t i = ((int64_t)at.b * shape.NH + at.h) * seq + row;
            offset[m][half] = row < seq ? lse[i] * LOG2E : INFINITY;
            of_row[m][half] = row < seq ? rowsum[i] : 0.0f;
        }
    }

    tile_load<T, D, BM>(tile_q, q, shape.qkv_stride, q0, seq, HS);
    tile_load<T, D, BM>(tile_do, dout + (int64_t)at.b * seq * shape.out_stride + (int64_t)at.h * HS, shape.out_stride, q0, seq, HS);
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
#pragma unroll 1
        for (int part = 0; part < BN; part += SN) {
            const int k0 = j * BN + part;
            if (k0 > warp_q0 + 16 * MT - 1 || k0 + SN - 1 + window <= warp_q0) continue; // all queries of this warp come before all keys, or have left them behind
            float p[MT][SN / 8][4], ds[MT][SN / 8][4];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < SN / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) p[m][n][e] = ds[m][n][e] = 0;
#pragma unroll
            for (int kk = 0; kk < D / 16; kk++) { // S = q k^T and dP = dout v^T
                uint32_t a[MT][4], b[4];
#pragma unroll
                for (int m = 0; m < MT; m++) load_a<T, D>(a[m], tile_q, (warp * MT + m) * 16, kk);
#pragma unroll
                for (int n = 0; n < SN / 16; n++) {
                    load_b_rows<T, D>(b, tile_k, part + n * 16, kk);
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        mma_16816<T>(p[m][2 * n], a[m], b[0], b[1]);
                        mma_16816<T>(p[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
#pragma unroll
                for (int m = 0; m < MT; m++) load_a<T, D>(a[m], tile_do, (warp * MT + m) * 16, kk);
#pragma unroll
                for (int n = 0; n < SN / 16; n++) {
                    load_b_rows<T, D>(b, tile_v, part + n * 16, kk);
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        mma_16816<T>(ds[m][2 * n], a[m], b[0], b[1]);
                        mma_16816<T>(ds[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
            }
            const bool diagonal = k0 + SN - 1 > warp_q0; // keys beyond the sequence come after every query too
            const bool edge = k0 + window <= warp_q0 + 16 * MT - 1; // some query has left some key behind
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < SN / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) { // dS = P * (dP - D)
                        float x = exp2_fast(p[m][n][e] * scale_log2 - offset[m][e / 2]);
                        const int query = warp_q0 + m * 16 + g + e / 2 * 8, key = k0 + n * 8 + 2 * t + e % 2;
                        ds[m][n][e] = (diagonal && query < key) || (edge && query >= key + window) ? 0.0f : x * (ds[m][n][e] - of_row[m][e / 2]);
                    }
#pragma unroll
            for (int kk = 0; kk < SN / 16; kk++) { // dq += dS k
                uint32_t a[MT][4], b[4];
#pragma unroll
                for (int m = 0; m < MT; m++) pack_a<T>(a[m], ds[m][2 * kk], ds[m][2 * kk + 1]);
#pragma unroll
                for (int n = 0; n < D / 16; n++) {
                    load_b_columns<T, D>(b, tile_k, part + kk * 16, n);
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        mma_16816<T>(dq[m][2 * n], a[m], b[0], b[1]);
                        mma_16816<T>(dq[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < MT; m++) // only this warp reads its rows of the query tile, and it is done with them
        store_rows<T, D>(dqkv + first, shape.qkv_stride, tile_q, (warp * MT + m) * 16, q0, seq, HS, dq[m], scale, scale);
}

template <typename T>
static void attention_backward_launch(Tensor dqkv, Tensor dout, Tensor qkv, Tensor out, Tensor lse, float *rowsum, AttentionShape shape,
                                      Stream stream) {
    const float scale = 1.0f / sqrtf((float)shape.HS);
    const cudaStream_t s = (cudaStream_t)stream;
    HEAD_SIZE_SWITCH(shape.HS, {
        using Sizes = BackwardSizes<T, D>;
        constexpr int LANES = D <= 32 ? 4 : D <= 64 ? 8 : 16; // of 8 elements
        attention_rowsum_launch<T, LANES>(rowsum, dout, out, shape, stream);
        const unsigned blocks = attention_blocks(shape, Sizes::OWN);
        shared_bytes_allow(attention_backward_kv_kernel<T, D>, Sizes::BYTES_KV);
        shared_bytes_allow(attention_backward_q_kernel<T, D>, Sizes::BYTES_Q);
        attention_backward_kv_kernel<T, D><<<blocks, ATTENTION_THREADS, Sizes::BYTES_KV, s>>>(
            elements<T>(dqkv), elements<const T>(dout), elements<const T>(qkv), elements<const float>(lse), rowsum, shape, scale);
        launch_check();
        attention_backward_q_kernel<T, D><<<blocks, ATTENTION_THREADS, Sizes::BYTES_Q, s>>>(
            elements<T>(dqkv), elements<const T>(dout), elements<const T>(qkv), elements<const float>(lse), rowsum, shape, scale);
        launch_check();
    });
}

// ---------------------------------------------------------------------------------------------------------------
// fp32. WALK_QUERIES: the block owns keys and walks over queries (dk, dv); otherwise it owns queries and walks over keys
// (dq). Scores have owned rows down and walked rows across.

template <bool WALK_QUERIES>
__global__ void __launch_bounds__(PLAIN_THREADS)
attention_backward_plain_kernel(float *dqkv, const float *dout, const float *qkv, const float *lse, const float *rowsum, AttentionShape shape,
                                float scale) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    const int seq = shape.T, HS = shape.HS, x = threadIdx.x % 16, y = threadIdx.x / 16, TILE = PLAIN_ROWS * (HS + 1);
    float *tile_q = reinterpret_cast<float *>(shared_bytes), *tile_k = tile_q + TILE, *tile_v = tile_k + TILE, *tile_do = tile_v + TILE;
    float *tile_p = tile_do + TILE, *tile_ds = tile_p + PLAIN_ROWS * 33;
    AttentionTile at = attention_tile(shape, PLAIN_ROWS, !WALK_QUERIES);
    const int64_t first = (int64_t)at.b * seq * shape.qkv_stride + (int64_t)at.h * HS;
    const float *q = qkv + first, *k = q + shape.out_stride, *v = k + shape.out_stride;
    const float *dout_head = dout + (int64_t)at.b * seq * shape.out_stride + (int64_t)at.h * HS;
    const int64_t statistics = ((int64_t)at.b * shape.NH + at.h) * seq;
    const float *lse_head = lse + statistics, *rowsum_head = rowsum + statistics;
    const int own0 = at.row0;

    float d0[2][PLAIN_COLUMNS], d1[2][PLAIN_COLUMNS]; // dk and dv, or dq and nothing
#pragma unroll
    for (int j = 0; j < PLAIN_COLUMNS; j++) d0[0][j] = d0[1][j] = d1[0][j] = d1[1][j] = 0;
    if (WALK_QUERIES) {
        plain_tile_load(tile_k, k, shape.qkv_stride, own0, seq, HS);
        plain_tile_load(tile_v, v, shape.qkv_stride, own0, seq, HS);
    } else {
        plain_tile_load(tile_q, q, shape.qkv_stride, own0, seq, HS);
        plain_tile_load(tile_do, dout_head, shape.out_stride, own0, seq, HS);
    }
    const int walk_first = WALK_QUERIES ? own0 : max(own0 - shape.window + 1, 0) / PLAIN_ROWS * PLAIN_ROWS;
    const int walk_end = WALK_QUERIES ? min(own0 + PLAIN_ROWS + shape.window - 1, seq) : own0 + 1;
    for (int walk0 = walk_first; walk0 < walk_end; walk0 += PLAIN_ROWS) {
        __syncthreads(); // nobody reads the tiles of the round before
        if (WALK_QUERIES) {
            plain_tile_load(tile_q, q, shape.qkv_stride, walk0, seq, HS);
            plain_tile_load(tile_do, dout_head, shape.out_stride, walk0, seq, HS);
        } else {
            plain_tile_load(tile_k, k, shape.qkv_stride, walk0, seq, HS);
            plain_tile_load(tile_v, v, shape.qkv_stride, walk0, seq, HS);
        }
        __syncthreads(); // the tiles are complete
        float s[2][2], dp[2][2];
        plain_scores(s, WALK_QUERIES ? tile_k : tile_q, WALK_QUERIES ? tile_q : tile_k, x, y, HS);
        plain_scores(dp, WALK_QUERIES ? tile_v : tile_do, WALK_QUERIES ? tile_do : tile_v, x, y, HS);
        for (int r = 0; r < 2; r++)
            for (int c = 0; c < 2; c++) {
                int own = own0 + 2 * y + r, walk = walk0 + x + 16 * c;
                int query = WALK_QUERIES ? walk : own, key = WALK_QUERIES ? own : walk;
                bool seen = key <= query && query < key + shape.window && query < seq;
                float p = seen ? expf(s[r][c] * scale - lse_head[query]) : 0.0f;
                tile_p[(2 * y + r) * 33 + x + 16 * c] = p;
                tile_ds[(2 * y + r) * 33 + x + 16 * c] = seen ? p * (dp[r][c] - rowsum_head[query]) : 0.0f;
            }
        __syncwarp(); // these rows are written and read by one half of a warp
        plain_accumulate(d0, tile_ds, WALK_QUERIES ? tile_q : tile_k, x, y, HS);
        if (WALK_QUERIES) plain_accumulate(d1, tile_p, tile_do, x, y, HS);
    }
    float *d_first = dqkv + first;
    if (WALK_QUERIES) {
        plain_store(d_first + shape.out_stride, shape.qkv_stride, own0, seq, HS, d0, scale, scale, x, y);
        plain_store(d_first + 2 * shape.out_stride, shape.qkv_stride, own0, seq, HS, d1, 1.0f, 1.0f, x, y);
    } else
        plain_store(d_first, shape.qkv_stride, own0, seq, HS, d0, scale, scale, x, y);
}

static void attention_backward_plain_launch(Tensor dqkv, Tensor dout, Tensor qkv, Tensor out, Tensor lse, float *rowsum, AttentionShape shape,
                                            Stream stream) {
    const float scale = 1.0f / sqrtf((float)shape.HS);
    const cudaStream_t s = (cudaStream_t)stream;
    const int64_t bytes = (4 * PLAIN_ROWS * (shape.HS + 1) + 2 * PLAIN_ROWS * 33) * (int64_t)sizeof(float);
    const unsigned blocks = attention_blocks(shape, PLAIN_ROWS);
    attention_rowsum_launch<float, 32>(rowsum, dout, out, shape, stream);
    shared_bytes_allow(attention_backward_plain_kernel<true>, bytes);
    shared_bytes_allow(attention_backward_plain_kernel<false>, bytes);
    attention_backward_plain_kernel<true><<<blocks, PLAIN_THREADS, (size_t)bytes, s>>>(
        elements<float>(dqkv), elements<const float>(dout), elements<const float>(qkv), elements<const float>(lse), rowsum, shape, scale);
    launch_check();
    attention_backward_plain_kernel<false><<<blocks, PLAIN_THREADS, (size_t)bytes, s>>>(
        elements<float>(dqkv), elements<const float>(dout), elements<const float>(qkv), elements<const float>(lse), rowsum, shape, scale);
    launch_check();
}

void cuda::attention_backward(Tensor dqkv, Tensor dout, Tensor qkv, Tensor out, Tensor lse, int NH, int64_t window, bool deterministic, Stream stream) {
    const AttentionShape shape = attention_shape("attention_backward", qkv, "dout", dout, lse, NH, window);
    check_act("attention_backward", "dqkv", dqkv, shape.B * shape.T, shape.qkv_stride, qkv.dtype);
    check_act("attention_backward", "out", out, shape.B * shape.T, shape.out_stride, qkv.dtype);
    CHECK(is_aligned(dqkv.data, 16) && is_aligned(out.data, 16), "attention_backward: dqkv and out must be aligned to 16 bytes");
    if (shape.B == 0 || shape.T == 0) return;
    if (qkv.dtype != DTYPE_FP32 && hopper_available()) {
        attention_backward_hopper(dqkv, dout, qkv, out, lse, shape, deterministic, stream);
        return;
    }
    float *rowsum = (float *)scratch_get(shape.B * NH * shape.T * (int64_t)sizeof(float), stream);
    switch (qkv.dtype) {
    case DTYPE_BF16: attention_backward_launch<__nv_bfloat16>(dqkv, dout, qkv, out, lse, rowsum, shape, stream); break;
    case DTYPE_FP16: attention_backward_launch<__half>(dqkv, dout, qkv, out, lse, rowsum, shape, stream); break;
    default: attention_backward_plain_launch(dqkv, dout, qkv, out, lse, rowsum, shape, stream);
    }
}
