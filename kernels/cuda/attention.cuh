// attention.cuh - what forward and backward of attention share: tiles in shared memory and tensor-core products.
//
// The 16-bit kernels use mma.sync m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16"), which every GPU since sm_80
// has. With g = lane / 4 and t = lane % 4, a lane holds, in pairs of neighbouring columns,
//
//     A (16 x 16)   a0 = (g, 2t)   a1 = (g + 8, 2t)   a2 = (g, 2t + 8)   a3 = (g + 8, 2t + 8)     row, column
//     B (16 x 8)    b0 = (2t, g)   b1 = (2t + 8, g)                          the pair runs down a column
//     C (16 x 8)    c0, c1 = (g, 2t), (g, 2t + 1)   c2, c3 = (g + 8, 2t), (g + 8, 2t + 1)
//
// so two neighbouring C tiles of one product, rounded to 16 bits, are an A operand of the next, and scores never leave
// the registers. A and B come from shared memory by ldmatrix: four 8 x 8 blocks at once, each row of a block 16 bytes.
//
// Tiles hold `rows` x D elements, D the head size rounded up to 32, 64, 96 or 128; columns beyond the head size and
// rows beyond the sequence are zero. A row takes D + 8 elements, so that the eight rows of a block lie in different
// banks whatever D is.
#pragma once
#include "common.cuh"

enum { ATTENTION_WARPS = 4, ATTENTION_THREADS = 32 * ATTENTION_WARPS };

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

// ---------------------------------------------------------------------------------------------------------------
// Sizes of one launch

typedef struct {
    int64_t B;
    int T, NH, HS;       // sequence, heads, head size
    int window;          // tokens that a query sees, itself and those before it: 1 .. T
    int64_t qkv_stride;  // elements from one row of qkv to the next: 3C
    int64_t out_stride;  // likewise of out: C
} AttentionShape;

// Checks what both directions need of qkv (B,T,3C) and of its companion out or dout (B,T,C).
static inline AttentionShape attention_shape(const char *kernel, Tensor qkv, const char *out_name, Tensor out, Tensor lse, int NH, int64_t window) {
    CHECK(qkv.ndim == 3 && qkv.shape[1] <= INT32_MAX / 2, "%s: qkv has %d dimensions, T is %" PRId64, kernel, qkv.ndim, qkv.shape[1]);
    const int64_t B = qkv.shape[0], T = qkv.shape[1], C = qkv.shape[2] / 3;
    CHECK(NH >= 1 && C % NH == 0 && C / NH % 8 == 0 && C / NH <= 128,
          "%s: head size %" PRId64 "/%d is not a multiple of 8 up to 128", kernel, C, NH);
    check_shape(kernel, "qkv", qkv, B * T, 3 * C);
    check_act(kernel, out_name, out, B * T, C, qkv.dtype);
    check_f32(kernel, "lse", lse, B * NH, T);
    CHECK(window >= 0, "%s: window %" PRId64, kernel, window);
    CHECK(is_aligned(qkv.data, 16) && is_aligned(out.data, 16), "%s: qkv and %s must be aligned to 16 bytes", kernel, out_name);
    AttentionShape s = {B, (int)T, NH, (int)(C / NH), (int)(window == 0 ? T : min_i64(window, T)), 3 * C, C};
    return s;
}

// Compute capability 9.0 has kernels of its own for the 16-bit types (attention_forward_hopper.cu, attention_backward_hopper.cu).
void attention_forward_hopper(Tensor out, Tensor lse, Tensor qkv, AttentionShape shape, Stream stream);
void attention_backward_hopper(Tensor dqkv, Tensor dout, Tensor qkv, Tensor out, Tensor lse, AttentionShape shape, bool deterministic, Stream stream);

// Bytes of scratch that it takes on a GPU of `sms` multiprocessors: 8 for each row and head (T rounded up to 128), and the fp32
// sums of dq of the heads in work, two of them and 4 * sms * 128 rows more: 35 MB (head sizes above 64) on an H200.
int64_t attention_backward_hopper_scratch(int64_t heads, int64_t T, int64_t HS, int64_t sms);

// A block handles one tile of one head of one sequence. Blocks count tiles fastest; `heaviest_last` is for kernels whose
// last tiles have the most work: these start first, so that no long block is left over at the end.
typedef struct {
    int b, h, row0;
} AttentionTile;

__device__ static inline AttentionTile attention_tile(AttentionShape s, int rows, bool heaviest_last) {
    int tiles = (s.T + rows - 1) / rows;
    int tile = blockIdx.x % tiles, head = blockIdx.x / tiles;
    if (heaviest_last) tile = tiles - 1 - tile;
    return {head / s.NH, head % s.NH, tile * rows};
}
static inline unsigned attention_blocks(AttentionShape s, int rows) { return grid_blocks(s.B * s.NH * ceil_div(s.T, rows)); }

// ---------------------------------------------------------------------------------------------------------------
// Tensor cores and copies

template <typename T> __device__ static inline void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> __device__ inline void mma_16816<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ inline void mma_16816<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two neighbouring elements in one register, `low` at the lower address.
template <typename T> __device__ static inline uint32_t pack2(float low, float high);
template <> __device__ inline uint32_t pack2<__nv_bfloat16>(float low, float high) {
    __nv_bfloat162 p = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &p, 4);
    return bits;
}
template <> __device__ inline uint32_t pack2<__half>(float low, float high) {
    __half2 p = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &p, 4);
    return bits;
}

// Four 8 x 8 blocks; lane l gives the address of row l % 8 of block l / 8.
__device__ static inline void ldmatrix_x4(uint32_t (&r)[4], const void *p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}
__device__ static inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void *p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}

// ---------------------------------------------------------------------------------------------------------------
// Tiles

template <int D> constexpr int TILE_STRIDE = D + 8; // elements
template <typename T, int D> constexpr int64_t tile_bytes(int rows) { return (int64_t)rows * TILE_STRIDE<D> * (int64_t)sizeof(T); }

// Starts the copy of rows row0 .. row0 + ROWS - 1 of one head; `src` is the head's first element in row 0.
template <typename T, int D, int ROWS>
__device__ static inline void tile_load(T *tile, const T *src, int64_t stride, int row0, int rows_total, int HS) {
    constexpr int CHUNKS = D / 8; // of 16 bytes, in a row
    static_assert(ROWS * CHUNKS % ATTENTION_THREADS == 0, "every thread copies the same number of chunks");
#pragma unroll
    for (int k = 0; k < ROWS * CHUNKS / ATTENTION_THREADS; k++) {
        int i = k * ATTENTION_THREADS + threadIdx.x, r = i / CHUNKS, c = i % CHUNKS * 8;
        bool valid = row0 + r < rows_total && c < HS;
        copy_async_16(tile + r * TILE_STRIDE<D> + c, valid ? src + (int64_t)(row0 + r) * stride + c : src, valid);
    }
}

// A operand: rows row0 .. + 15, columns 16 kk .. + 15 of the tile.
template <typename T, int D> __device__ static inline void load_a(uint32_t (&a)[4], const T *tile, int row0, int kk) {
    int lane = threadIdx.x % 32;
    ldmatrix_x4(a, tile + (row0 + lane % 16) * TILE_STRIDE<D> + kk * 16 + lane / 16 * 8);
}

// B operands of a product with the tile transposed: n is the tile's row, k its column. Two n tiles: rows row0 .. + 7 in
// b[0], b[1] and row0 + 8 .. + 15 in b[2], b[3]; k = columns 16 kk .. + 15.
template <typename T, int D> __device__ static inline void load_b_rows(uint32_t (&b)[4], const T *tile, int row0, int kk) {
    int lane = threadIdx.x % 32;
    ldmatrix_x4(b, tile + (row0 + lane / 16 * 8 + lane % 8) * TILE_STRIDE<D> + kk * 16 + lane / 8 % 2 * 8);
}

// B operands of a product with the tile as it is: k is the tile's row, n its column. Two n tiles: columns 16 nn .. + 7
// in b[0], b[1] and 16 nn + 8 .. + 15 in b[2], b[3]; k = rows row0 .. + 15.
template <typename T, int D> __device__ static inline void load_b_columns(uint32_t (&b)[4], const T *tile, int row0, int nn) {
    int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(b, tile + (row0 + lane % 16) * TILE_STRIDE<D> + nn * 16 + lane / 16 * 8);
}

// Rounds two neighbouring C tiles (16 columns) to an A operand.
template <typename T> __device__ static inline void pack_a(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack2<T>(left[0], left[1]);
    a[1] = pack2<T>(left[2], left[3]);
    a[2] = pack2<T>(right[0], right[1]);
    a[3] = pack2<T>(right[2], right[3]);
}

// Rounds a warp's accumulators (16 x D, times factor0 in rows 0 to 7 and factor1 in rows 8 to 15) into its own rows
// row0 .. + 15 of a tile, and writes them from there to global memory in 16-byte pieces. `dst` is the head's first
// element in row 0; the tile's first row is row `global0` of the sequence. Nobody but this warp may use these rows.
template <typename T, int D>
__device__ static inline void store_rows(T *dst, int64_t stride, T *tile, int row0, int global0, int rows_total, int HS, const float (&c)[D / 8][4],
                                         float factor0, float factor1) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp(); // lanes still reading these rows are done
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        T *at = tile + (row0 + g) * TILE_STRIDE<D> + n * 8 + 2 * t;
        *reinterpret_cast<uint32_t *>(at) = pack2<T>(c[n][0] * factor0, c[n][1] * factor0);
        *reinterpret_cast<uint32_t *>(at + 8 * TILE_STRIDE<D>) = pack2<T>(c[n][2] * factor1, c[n][3] * factor1);
    }
    __syncwarp(); // the rows are complete
    for (int i = lane; i < 16 * (D / 8); i += 32) {
        int r = row0 + i / (D / 8), column = i % (D / 8) * 8;
        if (global0 + r < rows_total && column < HS)
            vec_store<8>(dst + (int64_t)(global0 + r) * stride + column, vec_load<8>(tile + r * TILE_STRIDE<D> + column));
    }
}

// Runs the statements with D, the head size rounded up to what the kernels are built for.
#define HEAD_SIZE_SWITCH(HS, ...)                                                                                      \
    if ((HS) <= 32) { constexpr int D = 32; __VA_ARGS__; }                                                             \
    else if ((HS) <= 64) { constexpr int D = 64; __VA_ARGS__; }                                                        \
    else if ((HS) <= 96) { constexpr int D = 96; __VA_ARGS__; }                                                        \
    else { constexpr int D = 128; __VA_ARGS__; }

// ---------------------------------------------------------------------------------------------------------------
// The fp32 kernels: 32 x 32 tiles, a block of 16 x 16 threads, plain multiply-adds. Thread (x, y) owns rows 2y, 2y + 1
// and columns x, x + 16 of the scores; columns x, x + 16, ... of the output. A row belongs to one half of a warp.

enum { PLAIN_ROWS = 32, PLAIN_THREADS = 256, PLAIN_COLUMNS = 8 }; // PLAIN_COLUMNS * 16 = 128, the largest head

// Rows are one element longer than the head, which puts neighbouring rows into different banks.
__device__ static inline void plain_tile_load(float *tile, const float *src, int64_t stride, int row0, int rows_total, int HS) {
    for (int i = threadIdx.x; i < PLAIN_ROWS * HS; i += PLAIN_THREADS) {
        int r = i / HS, c = i % HS;
        tile[r * (HS + 1) + c] = row0 + r < rows_total ? src[(int64_t)(row0 + r) * stride + c] : 0.0f;
    }
}

// s[r][c] = row 2y + r of a, times row x + 16 c of b.
__device__ static inline void plain_scores(float (&s)[2][2], const float *a, const float *b, int x, int y, int HS) {
    s[0][0] = s[0][1] = s[1][0] = s[1][1] = 0;
    const float *a0 = a + 2 * y * (HS + 1), *a1 = a0 + HS + 1, *b0 = b + x * (HS + 1), *b1 = b0 + 16 * (HS + 1);
    for (int d = 0; d < HS; d++) {
        s[0][0] += a0[d] * b0[d];
        s[0][1] += a0[d] * b1[d];
        s[1][0] += a1[d] * b0[d];
        s[1][1] += a1[d] * b1[d];
    }
}

// o[r][j] += sum over k of p[2y + r][k] * v[k][x + 16 j]; rows of p are 33 long.
__device__ static inline void plain_accumulate(float (&o)[2][PLAIN_COLUMNS], const float *p, const float *v, int x, int y, int HS) {
    for (int k = 0; k < PLAIN_ROWS; k++) {
        float p0 = p[2 * y * 33 + k], p1 = p[(2 * y + 1) * 33 + k];
#pragma unroll
        for (int j = 0; j < PLAIN_COLUMNS; j++) {
            if (x + 16 * j >= HS) continue;
            float value = v[k * (HS + 1) + x + 16 * j];
            o[0][j] += p0 * value;
            o[1][j] += p1 * value;
        }
    }
}

// dst row row0 + 2y + r, columns x + 16 j = factor * o.
__device__ static inline void plain_store(float *dst, int64_t stride, int row0, int rows_total, int HS, const float (&o)[2][PLAIN_COLUMNS],
                                          float factor0, float factor1, int x, int y) {
    for (int r = 0; r < 2; r++) {
        int row = row0 + 2 * y + r;
        if (row >= rows_total) continue;
#pragma unroll
        for (int j = 0; j < PLAIN_COLUMNS; j++)
            if (x + 16 * j < HS) dst[(int64_t)row * stride + x + 16 * j] = o[r][j] * (r ? factor1 : factor0);
    }
}
