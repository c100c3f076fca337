// attention_forward_hopper.cu - causal attention for compute capability 9.0, on the pieces of hopper.cuh. The mathematics is that
// of attention_forward.cu, the way to keep the tensor cores busy that of FlashAttention-3 (Shah et al. 2024).
//
// A multiprocessor has one block. It takes tiles of queries until there are no more, and for each walks over the tiles of
// keys from the diagonal down to key 0, so that only the first one needs a mask:
//
//     producer, one thread         shared memory                consumers, GROUPS warpgroups of 64 queries each
//     takes the next tile     ->   Q, this tile and the next  ->   S = Q K^T              wgmma, both from shared memory
//     fetches its keys        ->   K, a ring of STAGES        ->   P = 2^(scale S - reference)           in registers
//     and values              ->   V, a ring of STAGES        ->   O += P V               wgmma, P from registers
//                                  out, 64 rows a group       <-   O / sum, which the copy engine writes
//
// Products and exponentials take about the same time (at head size 64 exactly), and both must go on at once:
//
//   - Within a warpgroup, a step begins S of its keys and, behind it, O += P V of the step before. As soon as S has come,
//     the exponentials are computed while the second product runs. The step before may belong to the tile before: there
//     is no pause between tiles.
//   - Warpgroups begin their products in turn. While one computes exponentials, the others multiply.
//
//         group 0   [S 1][P V 0]  exponentials 1   [S 2][P V 1]  exponentials 2
//         group 1            [S 1][P V 0]  exponentials 1   [S 2][P V 1]  exponentials 2
//
// What each step of this brought, and what brought nothing, is in docs/attention.md.
#include "attention.cuh"
#include "hopper.cuh"

// ---------------------------------------------------------------------------------------------------------------
// Sizes

template <int HEAD, int CONSUMERS, int KEYS, int RING, bool IN_TURN> struct HopperForward {
    static constexpr int D = HEAD;                 // head size, rounded up: 64, 80, 96, 128
    static constexpr int GROUPS = CONSUMERS;       // consumer warpgroups
    static constexpr int BM = 64 * GROUPS;         // queries of a block's tile
    static constexpr int BN = KEYS;                // keys of a tile
    static constexpr int STAGES = RING;            // tiles of keys, and of values, in shared memory
    static constexpr bool TURNS = IN_TURN;         // warpgroups begin their products in turn
    static constexpr int PANELS = (D + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
    static constexpr int THREADS = WARPGROUP * (GROUPS + 1);
    // A block begins with 64 K registers / THREADS, rounded down to 8, for each thread; the producer gives of its own.
    static constexpr int PRODUCER_REGISTERS = GROUPS == 2 ? 40 : 32, CONSUMER_REGISTERS = GROUPS == 2 ? 232 : 112;
    static constexpr int PANEL_Q = 64 * PANEL_ROW_BYTES, PANEL_KV = BN * PANEL_ROW_BYTES; // bytes
    static constexpr int TILE_Q = PANELS * PANEL_Q, TILE_KV = PANELS * PANEL_KV;
    static_assert(BN % 64 == 0, "the diagonal of a group's 64 queries lies in one tile of keys");
    static_assert((64 * (GROUPS - 1) + BN - 1) / BN < STAGES, "a group may be that many tiles behind with values");
    static_assert(GROUPS == 2 || GROUPS == 4, "registers");
};

// What is fastest on an H200. At head size 64 four warpgroups, with little in registers each, hide one another's waits better
// than turns do; from 80 on, two are all that registers allow.
typedef HopperForward<64, 4, 64, 4, false> HopperForward64;
typedef HopperForward<80, 2, 128, 2, true> HopperForward80;
typedef HopperForward<96, 2, 128, 2, true> HopperForward96;
typedef HopperForward<128, 2, 128, 2, true> HopperForward128;

// A tile of queries: sequence, head, first query (negative where a head's first tile is not full) and the tiles of keys that
// it sees, first .. end - 1. end = 0: there are no more.
struct ForwardTile {
    int b, h, q0, first, end;
};

template <typename S> struct alignas(1024) HopperForwardShared {
    char q[2][S::GROUPS][S::TILE_Q], out[S::GROUPS][S::TILE_Q], k[S::STAGES][S::TILE_KV], v[S::STAGES][S::TILE_KV];
    ForwardTile tile[2];
    uint64_t q_full[2], q_empty[2], k_full[S::STAGES], k_empty[S::STAGES], v_full[S::STAGES], v_empty[S::STAGES];
};

// The order of tiles. Heads are taken in groups whose keys and values fit the L2 together; within a group the tiles with the
// most keys go first. A block takes the next tile when it is free, so that all end at about the same time. Which block
// computes a tile does not change its result.
typedef struct {
    int heads, q_tiles, group; // B * NH; tiles of a head; heads of a group
    int end;                   // T, rounded up to 64: tiles are counted from there
    unsigned *taken;           // tiles taken beyond the first of each block; 0 at the start
} ForwardOrder;

template <typename S> __device__ static inline ForwardTile forward_tile(const AttentionShape &shape, const ForwardOrder &order, int i) {
    const int in_group = order.group * order.q_tiles, first = i / in_group * order.group, rest = i % in_group;
    const int group = min(order.group, order.heads - first), head = first + rest % group, q0 = order.end - (rest / group + 1) * S::BM;
    return {head / shape.NH, head % shape.NH, q0, max(q0 - shape.window + 1, 0) / S::BN, (min(q0 + S::BM, shape.T) + S::BN - 1) / S::BN};
}

// ---------------------------------------------------------------------------------------------------------------
// The kernel

// Scores s of 64 x BN: keys after the query become -infinity. `row` is this lane's query of rows g, `key` its first key.
template <int N> __device__ static inline void mask_diagonal(float (&s)[N], int row, int key) {
#pragma unroll
    for (int i = 0; i < N; i++)
        if (key + i / 4 * 8 + i % 2 > row + i % 4 / 2 * 8) s[i] = -INFINITY;
}

// Likewise the keys up to `row`, which the window of this lane's query of rows g has left behind.
template <int N> __device__ static inline void mask_window(float (&s)[N], int row, int key) {
#pragma unroll
    for (int i = 0; i < N; i++)
        if (key + i / 4 * 8 + i % 2 <= row + i % 4 / 2 * 8) s[i] = -INFINITY;
}

// What a lane knows of its rows g, [0], and g + 8, [1]: the exponent that everything is relative to, in powers of 2, and the
// sum of this lane's exponentials. The reference follows the largest score only when that has run away from it by more than
// 2^8: until then exponentials are at most 256, which costs no precision, and the output need not be scaled.
struct SoftmaxRows {
    float reference[2], sum[2];
};
enum { REFERENCE_SLACK = 8 };

// Scores become 2^(scaled score - reference). Returns in `shrink` what the output so far is to be multiplied by, and
// whether any row of the warp needs that.
template <bool FIRST, int N> __device__ static inline bool softmax_tile(float (&s)[N], SoftmaxRows &rows, float (&shrink)[2], float scale_log2) {
    bool moved = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top[2] = {s[2 * half], s[2 * half + 1]};
#pragma unroll
        for (int i = 4 + 2 * half; i < N; i += 4) {
            top[0] = fmaxf(top[0], s[i]);
            top[1] = fmaxf(top[1], s[i + 1]);
        }
        top[0] = fmaxf(top[0], top[1]);
        top[0] = fmaxf(top[0], __shfl_xor_sync(0xffffffffu, top[0], 1)); // the four lanes of a row
        top[0] = fmaxf(top[0], __shfl_xor_sync(0xffffffffu, top[0], 2)) * scale_log2;
        const bool move = FIRST || top[0] > rows.reference[half] + REFERENCE_SLACK;
        shrink[half] = move && !FIRST ? exp2_fast(rows.reference[half] - top[0]) : 1;
        if (move) rows.reference[half] = top[0];
        moved |= move;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float part[2] = {0, 0};
#pragma unroll
        for (int i = 2 * half; i < N; i += 4) {
            s[i] = exp2_fast(s[i] * scale_log2 - rows.reference[half]);
            s[i + 1] = exp2_fast(s[i + 1] * scale_log2 - rows.reference[half]);
            part[0] += s[i];
            part[1] += s[i + 1];
        }
        rows.sum[half] = FIRST ? part[0] + part[1] : rows.sum[half] * shrink[half] + (part[0] + part[1]);
    }
    return !FIRST && __any_sync(0xffffffffu, moved);
}

template <typename T, int N> __device__ static inline void pack_p(uint32_t (&p)[N / 8][4], const float (&s)[N]) {
#pragma unroll
    for (int k = 0; k < N / 8; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[k][i] = pack2<T>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
}

// s = q k^T and o += p v, begun; each is one group.
template <typename T, typename S> __device__ static inline void scores_begin(float (&s)[S::BN / 2], const char *q, const char *k) {
    const uint64_t q_rows = wgmma_rows(q), k_rows = wgmma_rows(k);
    wgmma_hold(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::D / 16; i++)
        wgmma<T, false, false>(s, wgmma_advance(q_rows, i / 4 * S::PANEL_Q + i % 4 * 32), wgmma_advance(k_rows, i / 4 * S::PANEL_KV + i % 4 * 32), i > 0);
    wgmma_commit();
}
template <typename T, typename S> __device__ static inline void values_begin(float (&o)[S::D / 2], uint32_t (&p)[S::BN / 16][4], const char *v) {
    const uint64_t v_columns = wgmma_columns(v, S::PANEL_KV);
    wgmma_hold(o);
    wgmma_hold(p);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::BN / 16; i++) wgmma<T, true>(o, p[i], wgmma_advance(v_columns, i * 16 * PANEL_ROW_BYTES), true);
    wgmma_commit();
}

template <typename S> __device__ static inline void forward_produce(HopperForwardShared<S> &m, const CUtensorMap *map_q, const CUtensorMap *map_kv,
                                                                    const AttentionShape &shape, const ForwardOrder &order) {
    Ring q = {0, 0}, at = {0, 0};
    for (int i = blockIdx.x; i < order.heads * order.q_tiles; ring_next<2>(q)) {
        const ForwardTile tile = forward_tile<S>(shape, order, i);
        i = gridDim.x + atomicAdd(order.taken, 1u);
        for (int j = tile.end - 1; j >= tile.first; j--) {
            barrier_wait(&m.k_empty[at.stage], at.parity ^ 1);
            barrier_arrive_expect(&m.k_full[at.stage], S::TILE_KV);
            for (int p = 0; p < S::PANELS; p++)
                tile_fetch(m.k[at.stage] + p * S::PANEL_KV, map_kv, p * 64, shape.NH + tile.h, j * S::BN, tile.b, &m.k_full[at.stage]);
            if (j == tile.end - 1) { // after the keys, whose place is free earlier
                barrier_wait(&m.q_empty[q.stage], q.parity ^ 1);
                m.tile[q.stage] = tile;
                barrier_arrive_expect(&m.q_full[q.stage], S::GROUPS * S::TILE_Q);
                for (int g = 0; g < S::GROUPS; g++)
                    for (int p = 0; p < S::PANELS; p++)
                        tile_fetch(m.q[q.stage][g] + p * S::PANEL_Q, map_q, p * 64, tile.h, tile.q0 + g * 64, tile.b, &m.q_full[q.stage]);
            }
            barrier_wait(&m.v_empty[at.stage], at.parity ^ 1);
            barrier_arrive_expect(&m.v_full[at.stage], S::TILE_KV);
            for (int p = 0; p < S::PANELS; p++)
                tile_fetch(m.v[at.stage] + p * S::PANEL_KV, map_kv, p * 64, 2 * shape.NH + tile.h, j * S::BN, tile.b, &m.v_full[at.stage]);
            ring_next<S::STAGES>(at);
        }
    }
    barrier_wait(&m.q_empty[q.stage], q.parity ^ 1);
    m.tile[q.stage].end = 0;
    barrier_arrive(&m.q_full[q.stage]);
}

// Divides o by the sums and writes it and lse. Called by a whole warpgroup, once the last product is complete.
template <typename T, typename S> __device__ static inline void forward_store(HopperForwardShared<S> &m, float (&o)[S::D / 2], const SoftmaxRows &rows,
                                                                              const ForwardTile &tile, int group, const CUtensorMap *map_out, float *lse, const AttentionShape &shape) {
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, g = thread % 32 / 4, t = thread % 4, together = 1 + S::GROUPS + group;
    const int row = tile.q0 + 64 * group + 16 * warp + g;
    if (thread == 0) store_wait_read<0>(); // the tile before has left
    named_sync(together, WARPGROUP);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float total = rows.sum[half];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        const float inverse = 1.0f / total;
        if (t == 0 && row >= 0 && row + 8 * half < shape.T)
            lse[((int64_t)tile.b * shape.NH + tile.h) * shape.T + row + 8 * half] = rows.reference[half] * LN2 + logf(total);
#pragma unroll
        for (int n = 0; n < S::D / 8; n++)
            *(uint32_t *)(panel_piece(m.out[group] + n / 8 * S::PANEL_Q, 16 * warp + g + 8 * half, n % 8) + 4 * t) =
                pack2<T>(o[4 * n + 2 * half] * inverse, o[4 * n + 2 * half + 1] * inverse);
    }
    shared_written();
    named_sync(together, WARPGROUP);
    if (thread == 0 && tile.q0 + 64 * group >= 0) { // the copy engine writes at no negative row
        for (int i = 0; i < S::PANELS; i++) tile_store(map_out, m.out[group] + i * S::PANEL_Q, i * 64, tile.h, tile.q0 + 64 * group, tile.b);
        store_commit();
    }
}

// One step takes the scores of a tile of keys, and the values of the tile of the step before, which may belong to the block's
// tile before: then that one is complete and is stored.
template <typename T, typename S> __device__ static inline void forward_consume(HopperForwardShared<S> &m, int group, const CUtensorMap *map_out, float *lse,
                                                                                const AttentionShape &shape, float scale_log2) {
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int my_turn = 1 + group, next_turn = 1 + (group + 1) % S::GROUPS; // named barriers
    ForwardTile tile, before;
    Ring q = {0, 0}, k = {0, 0}, v = {0, 0};
    float o[S::D / 2], s[S::BN / 2], shrink[2];
    SoftmaxRows rows, rows_before;
    uint32_t p[S::BN / 16][4];
#pragma unroll
    for (int i = 0; i < S::BN / 16; i++) p[i][0] = p[i][1] = p[i][2] = p[i][3] = 0;

    if (S::TURNS && group == S::GROUPS - 1) named_arrive(next_turn, 2 * WARPGROUP); // group 0 may begin
    for (bool pending = false;; pending = true) {
        barrier_wait(&m.q_full[q.stage], q.parity);
        tile = m.tile[q.stage];
        if (tile.end == 0) break;
        const int row0 = tile.q0 + 64 * group, row = row0 + 16 * warp + g, diagonal = min(max(row0, 0) / S::BN, tile.end - 1);
        int j = tile.end - 1;
        for (; j > diagonal; j--) { // tiles of keys that only the later groups see
            barrier_wait(&m.k_full[k.stage], k.parity);
            if (lane == 0) barrier_arrive(&m.k_empty[k.stage]);
            ring_next<S::STAGES>(k);
            if (S::TURNS) named_sync(my_turn, 2 * WARPGROUP);
            if (S::TURNS) named_arrive(next_turn, 2 * WARPGROUP);
        }
        barrier_wait(&m.k_full[k.stage], k.parity);
        if (S::TURNS) named_sync(my_turn, 2 * WARPGROUP);
        scores_begin<T, S>(s, m.q[q.stage][group], m.k[k.stage]);
        if (pending) barrier_wait(&m.v_full[v.stage], v.parity);
        values_begin<T, S>(o, p, m.v[v.stage]); // the first time without meaning: the result is dropped
        if (S::TURNS) named_arrive(next_turn, 2 * WARPGROUP);
        wgmma_wait<1>();
        wgmma_hold(s);
        if (lane == 0) barrier_arrive(&m.k_empty[k.stage]);
        ring_next<S::STAGES>(k);
        mask_diagonal(s, row, j * S::BN + 2 * t);
        if (j * S::BN + shape.window <= row0 + 63) mask_window(s, row - shape.window, j * S::BN + 2 * t);
        rows_before = rows;
        softmax_tile<true>(s, rows, shrink, scale_log2);
        wgmma_hold(s);
        if (pending) {
            wgmma_wait<0>();
            wgmma_hold(o);
            if (lane == 0) barrier_arrive(&m.v_empty[v.stage]);
            ring_next<S::STAGES>(v);
            forward_store<T, S>(m, o, rows_before, before, group, map_out, lse, shape);
        }
        wgmma_wait<0>();
        wgmma_hold(o);
        pack_p<T>(p, s);
#pragma unroll
        for (int i = 0; i < S::D / 2; i++) o[i] = 0;
        for (int skipped = tile.end - 1 - diagonal; skipped > 0; skipped--) {
            barrier_wait(&m.v_full[v.stage], v.parity);
            if (lane == 0) barrier_arrive(&m.v_empty[v.stage]);
            ring_next<S::STAGES>(v);
        }
        while (--j >= tile.first) {
            barrier_wait(&m.k_full[k.stage], k.parity);
            if (S::TURNS) named_sync(my_turn, 2 * WARPGROUP);
            scores_begin<T, S>(s, m.q[q.stage][group], m.k[k.stage]);
            barrier_wait(&m.v_full[v.stage], v.parity);
            values_begin<T, S>(o, p, m.v[v.stage]);
            if (S::TURNS) named_arrive(next_turn, 2 * WARPGROUP);
            wgmma_wait<1>();
            wgmma_hold(s);
            if (lane == 0) barrier_arrive(&m.k_empty[k.stage]);
            ring_next<S::STAGES>(k);
            if (j * S::BN + shape.window <= row0 + 63) mask_window(s, row - shape.window, j * S::BN + 2 * t);
            const bool moved = softmax_tile<false>(s, rows, shrink, scale_log2);
            wgmma_hold(s);
            if (moved) { // rare, but without a branch here the compiler moves the wait up, over the exponentials
                wgmma_wait<0>();
                wgmma_hold(o);
#pragma unroll
                for (int i = 0; i < S::D / 2; i++) o[i] *= shrink[i % 4 / 2];
            }
            wgmma_wait<0>();
            wgmma_hold(o);
            if (lane == 0) barrier_arrive(&m.v_empty[v.stage]);
            ring_next<S::STAGES>(v);
            pack_p<T>(p, s);
        }
        if (lane == 0) barrier_arrive(&m.q_empty[q.stage]);
        ring_next<2>(q);
        before = tile;
    }
    barrier_wait(&m.v_full[v.stage], v.parity);
    values_begin<T, S>(o, p, m.v[v.stage]);
    wgmma_wait<0>();
    wgmma_hold(o);
    forward_store<T, S>(m, o, rows, before, group, map_out, lse, shape);
    if (thread == 0) store_wait_read<0>(); // shared memory must outlive the copy
}

template <typename T, typename S>
__global__ void __launch_bounds__(S::THREADS, 1)
attention_forward_hopper_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_kv,
                                const __grid_constant__ CUtensorMap map_out, float *lse, AttentionShape shape, ForwardOrder order, float scale_log2) {
#ifdef HOPPER_CODE
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    HopperForwardShared<S> &m = *reinterpret_cast<HopperForwardShared<S> *>(shared_bytes);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(&m.q_full[i], 1);
            barrier_init(&m.q_empty[i], 4 * S::GROUPS); // one arrival of each warp
        }
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(&m.k_full[i], 1);
            barrier_init(&m.v_full[i], 1);
            barrier_init(&m.k_empty[i], 4 * S::GROUPS);
            barrier_init(&m.v_empty[i], 4 * S::GROUPS);
        }
        barrier_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP, 0);
    if (group == S::GROUPS) {
        registers_decrease<S::PRODUCER_REGISTERS>();
        if (threadIdx.x == S::GROUPS * WARPGROUP) forward_produce<S>(m, &map_q, &map_kv, shape, order);
    } else {
        registers_increase<S::CONSUMER_REGISTERS>();
        forward_consume<T, S>(m, group, &map_out, lse, shape, scale_log2);
    }
#endif
}

template <typename T, typename S> static void launch(Tensor out, Tensor lse, Tensor qkv, AttentionShape shape, Stream stream) {
    const int64_t C = shape.out_stride, heads = shape.B * shape.NH, end = round_up(shape.T, 64), q_tiles = ceil_div(end, S::BM);
    const int64_t kv_bytes = 4 * (int64_t)shape.T * shape.HS, L2_SHARE = 16 << 20;
    CHECK(heads * q_tiles <= INT32_MAX / 2, "attention_forward: %" PRId64 " tiles", heads * q_tiles);
    const CUtensorMap map_q = tensor_map_make(qkv, 0, {shape.HS, 3 * shape.NH, shape.T, shape.B}, {shape.HS, 3 * C, 3 * C * shape.T}, {64, 1, 64, 1});
    const CUtensorMap map_kv = tensor_map_make(qkv, 0, {shape.HS, 3 * shape.NH, shape.T, shape.B}, {shape.HS, 3 * C, 3 * C * shape.T}, {64, 1, S::BN, 1});
    const CUtensorMap map_out = tensor_map_make(out, 0, {shape.HS, shape.NH, shape.T, shape.B}, {shape.HS, C, C * shape.T}, {64, 1, 64, 1});
    const ForwardOrder order = {(int)heads, (int)q_tiles, (int)min_i64(heads, max_i64(1, L2_SHARE / kv_bytes)), (int)end,
                                (unsigned *)scratch_get(sizeof(unsigned), stream)};
    cudaCheck(cudaMemsetAsync(order.taken, 0, sizeof(unsigned), (cudaStream_t)stream));
    const unsigned blocks = grid_blocks(min_i64(heads * q_tiles, sm_count()));
    const int64_t bytes = sizeof(HopperForwardShared<S>);
    shared_bytes_allow(attention_forward_hopper_kernel<T, S>, bytes);
    attention_forward_hopper_kernel<T, S><<<blocks, S::THREADS, (size_t)bytes, (cudaStream_t)stream>>>(
        map_q, map_kv, map_out, elements<float>(lse), shape, order, LOG2E / sqrtf((float)shape.HS));
    launch_check();
}
template <typename T> static void launch_head_size(Tensor out, Tensor lse, Tensor qkv, AttentionShape shape, Stream stream) {
    if (shape.HS <= 64) launch<T, HopperForward64>(out, lse, qkv, shape, stream);
    else if (shape.HS <= 80) launch<T, HopperForward80>(out, lse, qkv, shape, stream);
    else if (shape.HS <= 96) launch<T, HopperForward96>(out, lse, qkv, shape, stream);
    else launch<T, HopperForward128>(out, lse, qkv, shape, stream);
}

void attention_forward_hopper(Tensor out, Tensor lse, Tensor qkv, AttentionShape shape, Stream stream) {
    if (qkv.dtype == DTYPE_BF16) launch_head_size<__nv_bfloat16>(out, lse, qkv, shape, stream);
    else launch_head_size<__half>(out, lse, qkv, shape, stream);
}
