// matmul_hopper.cu - products of the linear layer for compute capability 9.0 that finish their result themselves: bias, residual, GELU with its input
// kept, or GELU' with the sums of columns. On the pieces of hopper.cuh; two consumers by turns as in CUTLASS ("ping-pong").
//
//     D (M,N) = finish(A (M,K) B),      A row-major; B stored (N,K), as a weight in forward, or (K,N), as it is in backward
//
// cuBLASLt's products alone are about as fast, but its epilogues cost up to half as much again, since the tensor cores wait for them
// (docs/benchmarks.md). Here a block has two consumer warpgroups with a tile of 128 x 128 each, and while one finishes its tile the other
// multiplies:
//
//     producer, one thread      fetches tile 0, tile 1, tile 2, ... in steps of 64 k: one ring of stages for both consumers
//     consumer 0                [ multiplies tile 0 ][ finishes 0 ]      [ multiplies tile 2 ][ finishes 2 ] ...
//     consumer 1                                     [ multiplies tile 1 ][ finishes 1 ]      [ multiplies tile 3 ] ...
//
// Two blocks are a cluster. Their tiles lie one below the other and need the same columns of B: each fetches half of those, and the copy
// engine writes it to both. So a stage is free when the consumers of both blocks have read it.
//
// k goes up in steps of 16, each added to fp32 sums: the order of cuBLASLt's kernels that do not split k, and the same bits.
#include "attention.cuh"
#include "hopper.cuh"
#include "matmul_hopper.cuh"

enum { TILE_M = 128, TILE_N = 128, TILE_K = 64, STAGES = 5, CONSUMERS = 2, CLUSTER = 2 };
// A tile is finished in pieces of 64 x 64.
enum { PIECE_ROWS = 64, PANELS = TILE_N / PANEL_COLUMNS, PIECES = TILE_M / PIECE_ROWS * PANELS, PIECE_BYTES = PIECE_ROWS * PANEL_ROW_BYTES };
enum { TILE_A = TILE_M * PANEL_ROW_BYTES, TILE_B = TILE_N * PANEL_ROW_BYTES };
// Named barriers: 1 + consumer among its own threads; TURN + consumer: the other one has begun all its products.
enum { TURN = 1 + CONSUMERS };
enum { MATMUL_THREADS = WARPGROUP * (CONSUMERS + 1), MATMUL_PRODUCER_REGISTERS = 40, MATMUL_CONSUMER_REGISTERS = 232 };

struct alignas(1024) MatmulShared {
    char a[STAGES][TILE_A], b[STAGES][TILE_B];
    char piece[CONSUMERS][PIECES][PIECE_BYTES]; // what a consumer reads and writes to finish its tile
    float sums[CONSUMERS][2][TILE_N];
    uint64_t full[STAGES], empty[STAGES], pre_full[CONSUMERS];
};

struct MatmulShape {
    int M, N;
    int steps;          // of k
    int m_pairs, band;  // pairs of tiles that lie one below the other, and how many of them are made side by side
    int n_tiles, pairs; // tiles of a row of tiles; pairs of tiles of all
};

#ifdef HOPPER_CODE
// ---------------------------------------------------------------------------------------------------------------
// Clusters

__device__ static inline uint32_t cluster_rank(void) {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// All threads of both blocks.
__device__ static inline void cluster_sync(void) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// One arrival at the barrier of that block which lies where `barrier` lies in this one. Nothing is handed over but the place that was read, so it releases
// nothing to the cluster: that would be a fence of the whole device.
__device__ static inline void barrier_arrive_at(uint64_t *barrier, uint32_t block) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}"
                 :: "r"(shared_word(barrier)), "r"(block) : "memory");
}
// As tile_fetch, to the same place of every block that `blocks` names, each of which counts the bytes at its own barrier.
__device__ static inline void tile_fetch_for(void *dst, const CUtensorMap *map, int c0, int c1, uint64_t *barrier, uint16_t blocks) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4, %4}], [%5], %6;"
                 :: "r"(shared_word(dst)), "l"((uint64_t)map), "r"(c0), "r"(c1), "r"(0), "r"(shared_word(barrier)), "h"(blocks) : "memory");
}

// ---------------------------------------------------------------------------------------------------------------
// The producer

// Where this block's tile of a pair lies, in tiles. Pairs follow each other down a band, and then to the right.
struct TilePlace {
    int row, column;
};
__device__ static inline TilePlace tile_place(int pair, MatmulShape shape, int rank) {
    const int first = pair / (shape.band * shape.n_tiles) * shape.band, in_band = pair - first * shape.n_tiles, rows = min(shape.band, shape.m_pairs - first);
    return {(first + in_band % rows) * CLUSTER + rank, in_band / rows};
}

template <bool B_ROWS_ARE_K>
__device__ static inline void matmul_produce(MatmulShared &sh, const CUtensorMap *map_a, const CUtensorMap *map_b, MatmulShape shape, int cluster, int clusters) {
    const int rank = (int)cluster_rank();
    Ring at = {0, 0};
    for (int pair = cluster; pair < shape.pairs; pair += clusters) {
        const TilePlace place = tile_place(pair, shape, rank);
        const int m0 = place.row * TILE_M, n0 = place.column * TILE_N;
        for (int k = 0; k < shape.steps; k++) {
            uint64_t *full = &sh.full[at.stage];
            barrier_wait(&sh.empty[at.stage], at.parity ^ 1);
            barrier_arrive_expect(full, TILE_A + TILE_B);
            tile_fetch(sh.a[at.stage], map_a, k * TILE_K, m0, 0, 0, full);
            char *mine = sh.b[at.stage] + rank * (TILE_B / 2);
            if (B_ROWS_ARE_K) tile_fetch_for(mine, map_b, n0 + rank * PANEL_COLUMNS, k * TILE_K, full, 3);
            else tile_fetch_for(mine, map_b, k * TILE_K, n0 + rank * (TILE_N / 2), full, 3);
            ring_next<STAGES>(at);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The consumers

// Adds over the eight lanes that have the same columns, N values each, and leaves each lane with an eighth of the sums: those from
// lane / 16 % 2 * N/8 + lane / 8 % 2 * N/4 + lane / 4 % 2 * N/2 on are in its first N / 8.
template <int N> __device__ static inline void columns_sum(float (&x)[N]) {
    lanes_halve(x, N / 2, 4);
    lanes_halve(x, N / 4, 8);
    lanes_halve(x, N / 8, 16);
}

template <typename T> __device__ static inline float2 unpack2(uint32_t two) {
    T v[2];
    memcpy(v, &two, sizeof v);
    return make_float2(to_float(v[0]), to_float(v[1]));
}

// Whether the finish reads another matrix, into the memory that the result then takes.
__device__ static constexpr bool finish_reads(MatmulFinish finish) { return finish == MATMUL_GELU_BACKWARD || finish == MATMUL_RESIDUAL; }

// Turns a piece's sums, 8 PANEL_COLUMNS / 2 from d on, into elements in shared memory. `pre`: where GELU's input goes (MATMUL_GELU), or where what is
// read lies and the result goes as well. All is read before anything is written: GELU takes long, and so that of one element goes on while another waits.
template <typename T, MatmulFinish FINISH>
__device__ static inline void finish_piece(const float *d, const T *bias, int columns, float *sums, char *out, char *pre, int warp, int lane) {
    constexpr int BLOCKS = PANEL_COLUMNS / 8; // of 8 columns
    const int row = 16 * warp + (lane & 15);
    uint32_t r[BLOCKS / 2][4], x[BLOCKS / 2][4], b[BLOCKS] = {};
    if (finish_reads(FINISH))
#pragma unroll
        for (int n = 0; n < BLOCKS; n += 2) ldmatrix_x4(x[n / 2], panel_piece(pre, row, n + (lane >> 4)));
    if (FINISH != MATMUL_GELU_BACKWARD && bias != NULL)
#pragma unroll
        for (int n = 0; n < BLOCKS; n++)
            if (8 * n < columns) b[n] = *reinterpret_cast<const uint32_t *>(bias + 8 * n + 2 * (lane % 4));
#pragma unroll
    for (int n = 0; n < BLOCKS; n += 2)
#pragma unroll
        for (int i = 0; i < 4; i++) { // blocks of 8 x 8: rows g and g + 8 of columns 8 n, then of columns 8 (n + 1)
            uint32_t &element = r[n / 2][i], &other = x[n / 2][i];
            float2 v = make_float2(d[4 * n + 2 * i], d[4 * n + 2 * i + 1]);
            if (FINISH == MATMUL_RESIDUAL) {
                const float2 p = unpack2<T>(other);
                v.x += p.x;
                v.y += p.y;
            }
            if (FINISH == MATMUL_GELU_BACKWARD) {
                const float2 p = unpack2<T>(other);
                v.x *= gelu_slope(p.x);
                v.y *= gelu_slope(p.y);
            } else {
                const float2 p = unpack2<T>(b[n + i / 2]);
                v.x += p.x;
                v.y += p.y;
            }
            element = pack2<T>(v.x, v.y);
            const float2 rounded = unpack2<T>(element);
            if (FINISH == MATMUL_GELU) other = pack2<T>(gelu(rounded.x), gelu(rounded.y)); // as gelu_forward would compute it
            if (FINISH == MATMUL_GELU_BACKWARD) {                                          // as bias_backward would add them
                sums[2 * (n + i / 2)] += rounded.x;
                sums[2 * (n + i / 2) + 1] += rounded.y;
            }
        }
#pragma unroll
    for (int n = 0; n < BLOCKS; n += 2) {
        const uint32_t(&e)[4] = r[n / 2], (&g)[4] = x[n / 2];
        const int piece = n + (lane >> 4);
        if (FINISH == MATMUL_GELU) {
            stmatrix_x4(panel_piece(pre, row, piece), e[0], e[1], e[2], e[3]);
            stmatrix_x4(panel_piece(out, row, piece), g[0], g[1], g[2], g[3]);
        } else {
            stmatrix_x4(panel_piece(out, row, piece), e[0], e[1], e[2], e[3]);
        }
    }
}

// The sums over a tile's rows, of four warps: to partial[row of tiles][N], always added in the same order.
__device__ static inline void store_sums(MatmulShared &sh, float (&sums)[TILE_N / 4], float *partial, int group, int warp, int lane, int thread, int n0, int N) {
    constexpr int MINE = TILE_N / 4 / 8;
    columns_sum(sums);
    const int block = (lane / 16 % 2 * MINE + lane / 8 % 2 * 2 * MINE + lane / 4 % 2 * 4 * MINE) / 2; // of 8 columns, of which a lane has two beside each other
    float(&both)[2][TILE_N] = sh.sums[group];
    float2 *const slot = (float2 *)both[warp % 2] + 4 * block + lane % 4;
#pragma unroll
    for (int turn = 1; turn >= 0; turn--) { // warps 2 and 3, then 0 and 1 add theirs
        if (warp / 2 == turn)
#pragma unroll
            for (int n = 0; n < MINE / 2; n++) {
                float2 sum = make_float2(sums[2 * n], sums[2 * n + 1]);
                if (turn == 0) sum.x += slot[4 * n].x, sum.y += slot[4 * n].y;
                slot[4 * n] = sum;
            }
        named_sync(1 + group, WARPGROUP);
    }
    if (n0 + thread < N) partial[n0 + thread] = both[0][thread] + both[1][thread];
    named_sync(1 + group, WARPGROUP); // read, before the next tile's are written
}

template <typename T, bool B_ROWS_ARE_K, MatmulFinish FINISH>
__device__ static inline void matmul_consume(MatmulShared &sh, const CUtensorMap *map_out, const CUtensorMap *map_pre, const T *bias, float *partial,
                                             MatmulShape shape, int group, int cluster, int clusters) {
    const int thread = (int)threadIdx.x % WARPGROUP, warp = __shfl_sync(0xffffffffu, thread / 32, 0), lane = thread % 32, rank = (int)cluster_rank();
    constexpr int A_STEP = 32, B_STEP = B_ROWS_ARE_K ? 16 * PANEL_ROW_BYTES : 32; // bytes of 16 k
    int own = 0; // tiles of this consumer so far
    if (group == 1) named_arrive(TURN, CONSUMERS * WARPGROUP); // consumer 0 begins
    for (int pair = cluster + group * clusters; pair < shape.pairs; pair += CONSUMERS * clusters, own++) {
        const TilePlace place = tile_place(pair, shape, rank);
        const int m0 = place.row * TILE_M, n0 = place.column * TILE_N;
        const int64_t before = (int64_t)(CONSUMERS * own + group) * shape.steps; // the tiles between are the other consumer's
        Ring at = {(int)(before % STAGES), (uint32_t)(before / STAGES) & 1};
        float d0[TILE_N / 2], d1[TILE_N / 2];
        int last = 0;
        for (int i = 0; i < TILE_N / 2; i++) d0[i] = d1[i] = 0;
        // Only now may this consumer look at the stages: two phases earlier a stage looks as it does when it is full.
        named_sync(TURN + group, CONSUMERS * WARPGROUP);
        for (int k = 0; k < shape.steps; k++) {
            barrier_wait(&sh.full[at.stage], at.parity);
            const uint64_t a = wgmma_rows(sh.a[at.stage]);
            const uint64_t b = B_ROWS_ARE_K ? wgmma_columns(sh.b[at.stage], TILE_K * PANEL_ROW_BYTES) : wgmma_rows(sh.b[at.stage]);
            wgmma_hold(d0);
            wgmma_hold(d1);
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < TILE_K / 16; kk++) {
                wgmma<T, false, B_ROWS_ARE_K>(d0, wgmma_advance(a, kk * A_STEP), wgmma_advance(b, kk * B_STEP), true);
                wgmma<T, false, B_ROWS_ARE_K>(d1, wgmma_advance(a, kk * A_STEP + PIECE_BYTES), wgmma_advance(b, kk * B_STEP), true);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (k > 0 && lane < CLUSTER) barrier_arrive_at(&sh.empty[last], (uint32_t)lane);
            last = at.stage;
            ring_next<STAGES>(at);
            // By now the results of the tile before have left shared memory, and its place can be filled.
            if (finish_reads(FINISH) && thread == 0 && k == min(2, shape.steps - 1)) {
                store_wait_read<0>();
                barrier_arrive_expect(&sh.pre_full[group], PIECES * PIECE_BYTES);
                for (int i = 0; i < PIECES; i++)
                    tile_fetch(sh.piece[group][i], map_pre, n0 + i % PANELS * PANEL_COLUMNS, m0 + i / PANELS * PIECE_ROWS, 0, 0, &sh.pre_full[group]);
            }
        }
        named_arrive(TURN + 1 - group, CONSUMERS * WARPGROUP);
        wgmma_wait<0>();
        wgmma_hold(d0);
        wgmma_hold(d1);
        if (lane < CLUSTER) barrier_arrive_at(&sh.empty[last], (uint32_t)lane);

        float sums[TILE_N / 4] = {};
        constexpr bool BOTH = FINISH == MATMUL_GELU; // two results: a piece's lie in memory 0 and 1, the next one's in 2 and 3, and so on
        if (finish_reads(FINISH)) barrier_wait(&sh.pre_full[group], (uint32_t)own & 1);
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const int row = m0 + i / PANELS * PIECE_ROWS, panel = i % PANELS, column = n0 + panel * PANEL_COLUMNS;
            char *const out = sh.piece[group][BOTH ? i % 2 * 2 + 1 : i], *const pre = BOTH ? sh.piece[group][i % 2 * 2] : out;
            if (BOTH || (i == 0 && !finish_reads(FINISH))) { // the results that lay there have left
                if (thread == 0) store_wait_read<BOTH ? 1 : 0>();
                named_sync(1 + group, WARPGROUP);
            }
            finish_piece<T, FINISH>((i / PANELS ? d1 : d0) + panel * PANEL_COLUMNS / 2, bias ? bias + column : NULL, shape.N - column, sums + panel * PANEL_COLUMNS / 4,
                                    out, pre, warp, lane);
            shared_written();
            named_sync(1 + group, WARPGROUP);
            if (thread == 0) {
                if (row < shape.M && column < shape.N) {
                    tile_store(map_out, out, column, row, 0, 0);
                    if (BOTH) tile_store(map_pre, pre, column, row, 0, 0);
                }
                store_commit();
            }
        }
        if (FINISH == MATMUL_GELU_BACKWARD && partial != NULL) store_sums(sh, sums, partial + (int64_t)place.row * shape.N, group, warp, lane, thread, n0, shape.N);
    }
    if (thread == 0) store_wait_read<0>(); // shared memory must outlive the copies
    __syncwarp();
}

#endif // HOPPER_CODE

// The compiler refuses clusters where the code for older GPUs is made, which has no body.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define IN_CLUSTERS __cluster_dims__(CLUSTER)
#else
#define IN_CLUSTERS
#endif

template <typename T, bool B_ROWS_ARE_K, MatmulFinish FINISH>
__global__ void IN_CLUSTERS __launch_bounds__(MATMUL_THREADS, 1)
matmul_hopper_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, const __grid_constant__ CUtensorMap map_out,
                     const __grid_constant__ CUtensorMap map_pre, const T *bias, float *partial, MatmulShape shape) {
#ifdef HOPPER_CODE
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    MatmulShared &sh = *reinterpret_cast<MatmulShared *>(shared_bytes);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&sh.full[i], 1);
            barrier_init(&sh.empty[i], 4 * CLUSTER); // one arrival of each warp of one consumer, in both blocks
        }
        for (int i = 0; i < CONSUMERS; i++) barrier_init(&sh.pre_full[i], 1);
        barrier_init_done();
    }
    cluster_sync();
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP, 0);
    const int cluster = (int)blockIdx.x / CLUSTER, clusters = (int)gridDim.x / CLUSTER;
    if (group == CONSUMERS) {
        registers_decrease<MATMUL_PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS * WARPGROUP) matmul_produce<B_ROWS_ARE_K>(sh, &map_a, &map_b, shape, cluster, clusters);
        __syncwarp();
    } else {
        registers_increase<MATMUL_CONSUMER_REGISTERS>();
        matmul_consume<T, B_ROWS_ARE_K, FINISH>(sh, &map_out, &map_pre, bias, partial, shape, group, cluster, clusters);
    }
    cluster_sync(); // neither block ends while the other may still write to it
#endif
}

// ---------------------------------------------------------------------------------------------------------------
// The host's side

bool matmul_hopper_fits(DType dtype, int64_t M, int64_t N, int64_t K) {
    return dtype != DTYPE_FP32 && hopper_available() && N % 8 == 0 && K % 8 == 0 && M > 0 && N > 0 && K > 0 && M <= INT32_MAX / 2 && N <= INT32_MAX / 2 &&
           K <= INT32_MAX / 2 && ceil_div(M, CLUSTER * TILE_M) * ceil_div(N, TILE_N) <= INT32_MAX / 2;
}

int64_t matmul_hopper_partials(int64_t M) { return CLUSTER * ceil_div(M, CLUSTER * TILE_M); }

// A weight that fits into half of the L2 cache stays there while the rows of A pass by once, and tiles are made row by row. Of a larger one
// as many clusters as there are would read all columns at once; in bands they need fewer rows and columns together.
static int band_rows(int64_t weight_bytes) {
    enum { BAND = 4 };
    return weight_bytes > 24 << 20 ? BAND : 1;
}

// The matrix as the copy engine sees it, and boxes of 64 columns and `rows` rows.
static CUtensorMap matrix_map(Tensor t, int64_t rows, int64_t columns, int box_rows) {
    return tensor_map_make(t, 0, {columns, rows, 1, 1}, {columns, rows * columns, rows * columns}, {PANEL_COLUMNS, box_rows, 1, 1});
}

template <typename T, bool B_ROWS_ARE_K, MatmulFinish FINISH>
static void launch(Tensor out, Tensor a, Tensor b, Tensor bias, Tensor pre, float *partial, int64_t M, int64_t N, int64_t K, Stream stream) {
    const int64_t m_pairs = ceil_div(M, CLUSTER * TILE_M), n_tiles = ceil_div(N, TILE_N);
    const MatmulShape shape = {(int)M, (int)N, (int)ceil_div(K, TILE_K), (int)m_pairs, band_rows(N * K * 2), (int)n_tiles, (int)(m_pairs * n_tiles)};
    const CUtensorMap map_a = matrix_map(a, M, K, TILE_M), map_out = matrix_map(out, M, N, PIECE_ROWS);
    const CUtensorMap map_b = B_ROWS_ARE_K ? matrix_map(b, K, N, TILE_K) : matrix_map(b, N, K, TILE_N / 2);
    const CUtensorMap map_pre = pre.data ? matrix_map(pre, M, N, PIECE_ROWS) : map_out;
    const unsigned blocks = grid_blocks(CLUSTER * min_i64(shape.pairs, sm_count() / CLUSTER));
    auto kernel = matmul_hopper_kernel<T, B_ROWS_ARE_K, FINISH>;
    shared_bytes_allow(kernel, sizeof(MatmulShared));
    kernel<<<blocks, MATMUL_THREADS, sizeof(MatmulShared), (cudaStream_t)stream>>>(map_a, map_b, map_out, map_pre, elements<const T>(bias), partial, shape);
    launch_check();
}

template <typename T>
static void launch_finish(MatmulFinish finish, Tensor out, Tensor a, Tensor b, bool b_rows_are_k, Tensor bias, Tensor pre, float *partial, int64_t M, int64_t N,
                          int64_t K, Stream stream) {
    if (finish == MATMUL_GELU_BACKWARD) launch<T, true, MATMUL_GELU_BACKWARD>(out, a, b, bias, pre, partial, M, N, K, stream);
    else if (finish == MATMUL_GELU) launch<T, false, MATMUL_GELU>(out, a, b, bias, pre, partial, M, N, K, stream);
    else if (finish == MATMUL_RESIDUAL) launch<T, false, MATMUL_RESIDUAL>(out, a, b, bias, pre, partial, M, N, K, stream);
    else if (b_rows_are_k) launch<T, true, MATMUL_BIAS>(out, a, b, bias, pre, partial, M, N, K, stream);
    else launch<T, false, MATMUL_BIAS>(out, a, b, bias, pre, partial, M, N, K, stream);
}

void matmul_hopper(MatmulFinish finish, Tensor out, Tensor a, Tensor b, bool b_rows_are_k, Tensor bias, Tensor pre, float *partial, Stream stream) {
    const int64_t M = tensor_rows(out), N = tensor_columns(out), K = tensor_columns(a);
    CHECK(b_rows_are_k || finish != MATMUL_GELU_BACKWARD, "matmul_hopper: GELU' with a weight stored (N,K)");
    CHECK(!b_rows_are_k || (finish != MATMUL_GELU && finish != MATMUL_RESIDUAL), "matmul_hopper: GELU or a residual with a weight stored (K,N)");
    if (out.dtype == DTYPE_BF16) launch_finish<__nv_bfloat16>(finish, out, a, b, b_rows_are_k, bias, pre, partial, M, N, K, stream);
    else launch_finish<__half>(finish, out, a, b, b_rows_are_k, bias, pre, partial, M, N, K, stream);
}
