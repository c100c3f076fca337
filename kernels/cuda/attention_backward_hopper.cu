// attention_backward_hopper.cu - the backward of attention for compute capability 9.0, on the pieces of hopper.cuh (Dao 2023,
// "FlashAttention-2"; Shah et al. 2024, "FlashAttention-3"): one kernel, five products, dqkv written once.
//
// A task is 128 keys of one head. It walks over the query tiles from the diagonal to the last that sees one of its keys. Scores are computed with keys
// down and queries across, so that P^T and dS^T come out of wgmma in the layout in which they go in again:
//
//     S^T = K Q^T     dP^T = V dout^T     P^T = exp(S^T - lse)     dS^T = P^T * (dP^T - D)     dv += P^T dout     dk += dS^T Q
//
// dk and dv stay in registers. dq = dS K is a sum over tasks: each adds its part to fp32 sums in global memory, which the
// L2 holds. For equal bits in every run the parts of a query tile have an order: the task on its diagonal first (it stores
// instead of adding: nothing needs zeroing), then upwards to the task of the first keys (it rounds and writes dqkv: nothing
// needs converting). A counter for each query tile says whose turn it is. Whoever can do without equal bits lets the parts between
// the first and the last come in any order.
//
//                  query tile   0   1   2   3      The number is the round of the task in which it meets that query tile. Tasks are
//     keys   0..127  (task 3)   1   2   3   4      dealt in the order of their numbers: those of a head that begin together
//     keys 128..255  (task 2)       1   2   3      never meet in a query tile, and its diagonal has the smallest round:
//     keys 256..383  (task 1)           1   2      blocks that keep step wait for nobody's turn. A task waits only
//     keys 384..511  (task 0)               1      for tasks with smaller numbers, all of which are done or in work.
//
// So a head's longest task is its last. For blocks to end together, the last heads go the other way round: their tasks are dealt
// from the first keys on, a task of each head in turn, and walk from the last query tile down to the diagonal; the task of the
// first keys is the first to add, the one on the diagonal the last.
//
// A block has four warpgroups. Three threads of the first draw tasks and load tiles, wait for turns, and give them on. Two score
// groups have 64 keys each and do all but dq; they pass dS on through shared memory. The dq group multiplies it with K.
//
//     load        K, V, Q, dout, lse, D  ->  shared memory, two stages
//     score 0, 1  S^T, dP^T -> dS^T in shared memory, two stages; dk, dv -> dqkv
//     turns       counter of a query tile -> the dq group may add to it;  it has added -> counter
//     dq          dS K -> sums in global memory -> dqkv
#include "attention.cuh"
#include "hopper.cuh"

// ---------------------------------------------------------------------------------------------------------------
// Sizes

template <int HEAD> struct HopperBackward {
    static constexpr int D = HEAD;                        // head size, rounded up: 64 or 128
    static constexpr int KEYS = 128;                      // of a task: two score groups of 64
    static constexpr int QUERIES = D == 64 ? 128 : 64;    // of a tile
    static constexpr int PANELS = D / PANEL_COLUMNS;
    static constexpr int KEY_PANEL = KEYS * PANEL_ROW_BYTES, QUERY_PANEL = QUERIES * PANEL_ROW_BYTES; // bytes
    static constexpr int KEY_TILE = PANELS * KEY_PANEL, QUERY_TILE = PANELS * QUERY_PANEL, DS_TILE = KEYS * QUERIES * 2;
    static constexpr int STATISTICS = QUERIES * (int)sizeof(float);
    static constexpr int DQ_FLOATS = QUERIES * D;         // of a query tile, as two products of 64 x 64
};

// What a task adds to the dq of a query tile: which one, and whether it is the first to add or the last.
struct DqPart {
    int tile, query0, b, h; // in `sums`; the tile's first query, sequence and head
    bool first, last;
};

template <int D> struct alignas(1024) HopperBackwardShared {
    using Sizes = HopperBackward<D>;
    char k[2][Sizes::KEY_TILE], v[2][Sizes::KEY_TILE];            // of this task and the next
    char q[2][Sizes::QUERY_TILE], dout[2][Sizes::QUERY_TILE];
    char ds[2][Sizes::DS_TILE];                                   // keys down, panels of 64 queries
    float lse2[2][Sizes::QUERIES], rowsum[2][Sizes::QUERIES];
    uint64_t kv_full[2], kv_empty[2], q_full[2], dout_full[2], query_empty[2], ds_full[2], ds_empty[2], turn_come[2], added[2], told[2];
    int task[2];                                                  // whose keys these are; negative: there are no more
    DqPart part[2];
};

enum { ROLE_LOAD, ROLE_DQ, ROLE_SCORES, BACKWARD_THREADS = 4 * WARPGROUP, SCORE_WARPS = 8, DQ_WARPS = 4, TURN_THREADS = 2 };
enum { REGISTERS_LOAD = 24, REGISTERS_DQ = 72, REGISTERS_SCORES = 208 }; // 24 + 72 + 2 * 208 = 4 * 128

template <typename T> struct BackwardWork {
    T *dqkv;
    const float *lse2, *rowsum;   // (B*NH, rows)
    float *sums;                  // dq of the heads in work: (slots, query_tiles, DQ_FLOATS)
    unsigned *turns;              // (slots, query_tiles): parts added so far, by all heads that had the slot
    unsigned *ticket;             // the next task
    AttentionShape shape;
    int rows, key_tiles, query_tiles, slots, tasks; // rows: T rounded up to whole tiles of keys
    int heads, heads_down;        // the last heads_down of them go the other way round
    float scale, scale_log2;
    bool deterministic;           // parts of dq are added in order
};

struct BackwardTask {
    int head, b, h, key_tile, first, end; // first: the query tile on the diagonal; end: behind the last that sees one of the keys
    bool down;                            // walks from the last to the first
};
__device__ inline int task_tile(const BackwardTask &task, int n) { return task.down ? task.end - 1 - n : task.first + n; } // the n-th that it meets
template <typename Sizes, typename T> __device__ static inline BackwardTask backward_task(const BackwardWork<T> &work, int task) {
    const int up = work.heads - work.heads_down, rest = task - up * work.key_tiles;
    const bool down = rest >= 0;
    const int head = down ? up + rest % work.heads_down : task / work.key_tiles;
    const int key_tile = down ? rest / work.heads_down : work.key_tiles - 1 - task % work.key_tiles;
    const int end = ((key_tile + 1) * Sizes::KEYS + work.shape.window - 2) / Sizes::QUERIES + 1;
    return {head, head / work.shape.NH, head % work.shape.NH, key_tile, key_tile * Sizes::KEYS / Sizes::QUERIES, min(end, work.query_tiles), down};
}

#ifdef HOPPER_CODE
// ---------------------------------------------------------------------------------------------------------------
// Pieces

template <typename T> __device__ static inline float2 unpack2(uint32_t bits);
template <> __device__ inline float2 unpack2<__nv_bfloat16>(uint32_t bits) { return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)}; }
template <> __device__ inline float2 unpack2<__half>(uint32_t bits) {
    __half2 h;
    memcpy(&h, &bits, 4);
    return __half22float2(h);
}

// Turns: whoever sees a count sees what was added before it was raised to that.
__device__ static inline unsigned load_acquire(const unsigned *p) {
    unsigned x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ static inline void count_release(unsigned *p) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(p) : "memory"); }

// *p += x in the L2, without waiting for it.
__device__ static inline void add_float4(float4 *p, float4 x) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" :: "l"(p), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

// Writes a warpgroup's product (64 x N/2), times `factor`, rounded: rows below `rows` and columns below `columns`. The four lanes of
// a row hold two neighbouring columns of every 8; they trade them, so that each writes 8 columns at once.
template <typename T, int N>
__device__ static inline void store_product(T *dst, int64_t stride, int rows, int columns, const float (&d)[N], float factor) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x % WARPGROUP / 32;
#pragma unroll
    for (int m = 0; m < N / 16; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t w[4]; // of columns 32 m + 8 i + 2 t; then of columns 32 m + 8 t + 2 i
#pragma unroll
            for (int i = 0; i < 4; i++) w[i] = pack2<T>(d[16 * m + 4 * i + 2 * half] * factor, d[16 * m + 4 * i + 2 * half + 1] * factor);
#pragma unroll
            for (int i = 0; i < 4; i += 2) { // a 4 x 4 transpose: single elements, then blocks of 2 x 2
                uint32_t x = __shfl_xor_sync(0xffffffffu, t & 1 ? w[i] : w[i + 1], 1);
                if (t & 1) w[i] = x;
                else w[i + 1] = x;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t x = __shfl_xor_sync(0xffffffffu, t & 2 ? w[i] : w[i + 2], 2);
                if (t & 2) w[i] = x;
                else w[i + 2] = x;
            }
            const int row = 16 * warp + g + 8 * half, column = 32 * m + 8 * t;
            if (row < rows && column < columns) *reinterpret_cast<uint4 *>(dst + row * stride + column) = {w[0], w[1], w[2], w[3]};
        }
}

// ---------------------------------------------------------------------------------------------------------------
// Role: load. One thread.

template <typename T, int D>
__device__ static void backward_load(HopperBackwardShared<D> &sh, const CUtensorMap *map_keys, const CUtensorMap *map_queries, const CUtensorMap *map_dout,
                                     const BackwardWork<T> &work) {
    using Sizes = HopperBackward<D>;
    const int NH = work.shape.NH;
    Ring own = {0, 0}, walk = {0, 0};
    for (;; ring_next<2>(own)) {
        const unsigned ticket = atomicAdd(work.ticket, 1u); // which block does a task does not change its result
        barrier_wait(&sh.kv_empty[own.stage], own.parity ^ 1);
        if (ticket >= (unsigned)work.tasks) {
            sh.task[own.stage] = -1;
            barrier_arrive(&sh.kv_full[own.stage]);
            return;
        }
        const BackwardTask task = backward_task<Sizes>(work, (int)ticket);
        sh.task[own.stage] = (int)ticket;
        barrier_arrive_expect(&sh.kv_full[own.stage], 2 * Sizes::KEY_TILE);
        for (int p = 0; p < Sizes::PANELS; p++) {
            tile_fetch(sh.k[own.stage] + p * Sizes::KEY_PANEL, map_keys, p * PANEL_COLUMNS, NH + task.h, task.key_tile * Sizes::KEYS, task.b, &sh.kv_full[own.stage]);
            tile_fetch(sh.v[own.stage] + p * Sizes::KEY_PANEL, map_keys, p * PANEL_COLUMNS, 2 * NH + task.h, task.key_tile * Sizes::KEYS, task.b, &sh.kv_full[own.stage]);
        }
        for (int n = 0; n < task.end - task.first; n++, ring_next<2>(walk)) {
            const int s = walk.stage, query0 = task_tile(task, n) * Sizes::QUERIES;
            const int64_t row = (int64_t)task.head * work.rows + query0;
            barrier_wait(&sh.query_empty[s], walk.parity ^ 1);
            barrier_arrive_expect(&sh.q_full[s], Sizes::QUERY_TILE + Sizes::STATISTICS);
            for (int p = 0; p < Sizes::PANELS; p++) tile_fetch(sh.q[s] + p * Sizes::QUERY_PANEL, map_queries, p * PANEL_COLUMNS, task.h, query0, task.b, &sh.q_full[s]);
            bytes_fetch(sh.lse2[s], work.lse2 + row, Sizes::STATISTICS, &sh.q_full[s]);
            barrier_arrive_expect(&sh.dout_full[s], Sizes::QUERY_TILE + Sizes::STATISTICS);
            for (int p = 0; p < Sizes::PANELS; p++) tile_fetch(sh.dout[s] + p * Sizes::QUERY_PANEL, map_dout, p * PANEL_COLUMNS, task.h, query0, task.b, &sh.dout_full[s]);
            bytes_fetch(sh.rowsum[s], work.rowsum + row, Sizes::STATISTICS, &sh.dout_full[s]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Role: scores. A group takes a query tile at once, its products and its exponentials one after the other:
//
//     S^T, dP^T started;  exp, while dP^T is under way;  dv started;  dS, while dv is under way;  dk
//
// While one group computes exponentials, the other one and the dq group multiply.

template <typename Sizes> struct ScoreRegisters {
    float dk[Sizes::D / 2], dv[Sizes::D / 2], s[Sizes::QUERIES / 2], dp[Sizes::QUERIES / 2]; // S^T and dP^T
    uint32_t p[Sizes::QUERIES / 16][4], ds[Sizes::QUERIES / 16][4];                          // P^T and dS^T, rounded: A operands
};

// S^T or dP^T: the group's 64 keys times the tile's queries, over the head size.
template <typename T, typename Sizes> __device__ static inline void scores_start(float (&s)[Sizes::QUERIES / 2], uint64_t own, uint64_t walk) {
    wgmma_fence();
    wgmma_begin<T, false, false>(s, own, walk);
#pragma unroll
    for (int kk = 1; kk < Sizes::D / 16; kk++)
        wgmma<T, false, false>(s, wgmma_advance(own, kk / 4 * Sizes::KEY_PANEL + kk % 4 * 32), wgmma_advance(walk, kk / 4 * Sizes::QUERY_PANEL + kk % 4 * 32), true);
    wgmma_commit();
}

// dv or dk (+)= P^T dout or dS^T Q, over the tile's queries.
template <typename T, typename Sizes> __device__ static inline void gradient_start(float (&d)[Sizes::D / 2], const uint32_t (&a)[Sizes::QUERIES / 16][4], uint64_t walk, bool add) {
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < Sizes::QUERIES / 16; kk++) wgmma<T, true>(d, a[kk], wgmma_advance(walk, kk * 16 * PANEL_ROW_BYTES), kk > 0 || add);
    wgmma_commit();
}

// The query tile in walk.stage; its first query is query0, the warp's first key key0, which is row `own_row` of the key tile.
template <typename T, typename Sizes>
__device__ static inline void score_tile(HopperBackwardShared<Sizes::D> &sh, ScoreRegisters<Sizes> &r, uint64_t k, uint64_t v, Ring walk, int query0, int key0, int own_row,
                                         bool first, int window, float scale_log2) {
    constexpr int QUERIES = Sizes::QUERIES;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, stage = walk.stage;
    const float *lse2 = sh.lse2[stage], *rowsum = sh.rowsum[stage];
    barrier_wait(&sh.q_full[stage], walk.parity);
    scores_start<T, Sizes>(r.s, k, wgmma_rows(sh.q[stage]));
    wgmma_wait<0>();
    wgmma_hold(r.s);
    if (query0 < key0 + 15) { // on the diagonal; keys beyond the sequence come after every query too
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (query0 + 8 * n + 2 * t + e % 2 < key0 + g + e / 2 * 8) r.s[4 * n + e] = -INFINITY;
    }
    if (query0 + QUERIES > key0 + window) { // queries that have left a key behind
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (query0 + 8 * n + 2 * t + e % 2 >= key0 + window + g + e / 2 * 8) r.s[4 * n + e] = -INFINITY;
    }
#pragma unroll
    for (int n = 0; n < QUERIES / 8; n++) {
        const float2 l = *reinterpret_cast<const float2 *>(lse2 + 8 * n + 2 * t);
        r.p[n / 2][n % 2 * 2] = pack2<T>(exp2_fast(r.s[4 * n] * scale_log2 - l.x), exp2_fast(r.s[4 * n + 1] * scale_log2 - l.y));
        r.p[n / 2][n % 2 * 2 + 1] = pack2<T>(exp2_fast(r.s[4 * n + 2] * scale_log2 - l.x), exp2_fast(r.s[4 * n + 3] * scale_log2 - l.y));
    }
    wgmma_hold(r.p);
    barrier_wait(&sh.dout_full[stage], walk.parity);
    scores_start<T, Sizes>(r.dp, v, wgmma_rows(sh.dout[stage]));
    gradient_start<T, Sizes>(r.dv, r.p, wgmma_columns(sh.dout[stage], Sizes::QUERY_PANEL), !first);
    wgmma_wait<1>(); // for dP^T
    wgmma_hold(r.dp);
#pragma unroll
    for (int n = 0; n < QUERIES / 8; n++) {
        const float2 d = *reinterpret_cast<const float2 *>(rowsum + 8 * n + 2 * t);
        const float2 p0 = unpack2<T>(r.p[n / 2][n % 2 * 2]), p1 = unpack2<T>(r.p[n / 2][n % 2 * 2 + 1]);
        r.ds[n / 2][n % 2 * 2] = pack2<T>(p0.x * (r.dp[4 * n] - d.x), p0.y * (r.dp[4 * n + 1] - d.y));
        r.ds[n / 2][n % 2 * 2 + 1] = pack2<T>(p1.x * (r.dp[4 * n + 2] - d.x), p1.y * (r.dp[4 * n + 3] - d.y));
    }
    wgmma_hold(r.ds);
    barrier_wait(&sh.ds_empty[stage], walk.parity ^ 1);
#pragma unroll
    for (int q16 = 0; q16 < QUERIES / 16; q16++) // 16 queries: two pieces of a panel's four times two
        stmatrix_x4(panel_piece(sh.ds[stage] + q16 / 4 * Sizes::KEY_PANEL, own_row + lane % 16, q16 % 4 * 2 + lane / 16), r.ds[q16][0], r.ds[q16][1], r.ds[q16][2], r.ds[q16][3]);
    shared_written();
    __syncwarp();
    if (lane == 0) barrier_arrive(&sh.ds_full[stage]);
    gradient_start<T, Sizes>(r.dk, r.ds, wgmma_columns(sh.q[stage], Sizes::QUERY_PANEL), !first);
    wgmma_wait<0>();
    wgmma_hold(r.p);
    wgmma_hold(r.ds);
    if (lane == 0) barrier_arrive(&sh.query_empty[stage]);
}

template <typename T, int D> __device__ static void backward_scores(HopperBackwardShared<D> &sh, const BackwardWork<T> &work, int group) {
    using Sizes = HopperBackward<D>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32, own_row = 64 * group + 16 * warp;
    Ring own = {0, 0}, walk = {0, 0};
    for (;; ring_next<2>(own)) {
        barrier_wait(&sh.kv_full[own.stage], own.parity);
        const int id = __shfl_sync(0xffffffffu, sh.task[own.stage], 0); // the same in all lanes; so the compiler sees it
        if (id < 0) return;
        const BackwardTask task = backward_task<Sizes>(work, id);
        const uint64_t k = wgmma_rows(sh.k[own.stage] + group * 64 * PANEL_ROW_BYTES), v = wgmma_rows(sh.v[own.stage] + group * 64 * PANEL_ROW_BYTES);
        const int key0 = task.key_tile * Sizes::KEYS + own_row;
        ScoreRegisters<Sizes> r;
        int n = 0;
#pragma unroll 1
        do { // a task has at least one tile: ptxas wants to know it
            score_tile<T, Sizes>(sh, r, k, v, walk, task_tile(task, n) * Sizes::QUERIES, key0, own_row, n == 0, work.shape.window, work.scale_log2);
            ring_next<2>(walk);
        } while (++n < task.end - task.first);
        wgmma_hold(r.dk);
        wgmma_hold(r.dv);
        if (lane == 0) barrier_arrive(&sh.kv_empty[own.stage]);
        const int row0 = task.key_tile * Sizes::KEYS + 64 * group;
        T *dk = work.dqkv + ((int64_t)task.b * work.shape.T + row0) * work.shape.qkv_stride + work.shape.out_stride + (int64_t)task.h * work.shape.HS;
        store_product<T>(dk, work.shape.qkv_stride, work.shape.T - row0, work.shape.HS, r.dk, work.scale);
        store_product<T>(dk + work.shape.out_stride, work.shape.qkv_stride, work.shape.T - row0, work.shape.HS, r.dv, 1.0f);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Roles: turns. Two threads go over the query tiles with the dq group, so that it never waits for global memory: one tells it
// when its turn has come and what to do then, the other tells the world when it has added.

template <typename T, int D> __device__ static void backward_turns(HopperBackwardShared<D> &sh, const BackwardWork<T> &work, bool give) {
    using Sizes = HopperBackward<D>;
    Ring own = {0, 0}, walk = {0, 0};
    for (;; ring_next<2>(own)) {
        barrier_wait(&sh.kv_full[own.stage], own.parity);
        const int id = sh.task[own.stage];
        if (id < 0) return;
        barrier_arrive(&sh.kv_empty[own.stage]);
        const BackwardTask task = backward_task<Sizes>(work, id);
        for (int n = 0; n < task.end - task.first; n++, ring_next<2>(walk)) {
            const int i = task_tile(task, n);
            unsigned *turns = work.turns + task.head % work.slots * work.query_tiles + i;
            if (give) {
                barrier_wait(&sh.added[walk.stage], walk.parity);
                count_release(turns);
                barrier_arrive(&sh.told[walk.stage]);
                continue;
            }
            // The key tiles lowest .. diagonal add to this query tile, `last` + 1 of them; `before` of these come before this one.
            const int query0 = i * Sizes::QUERIES, diagonal = query0 / Sizes::KEYS, lowest = max(query0 - work.shape.window + 1, 0) / Sizes::KEYS;
            const int last = diagonal - lowest, before = task.down ? task.key_tile - lowest : diagonal - task.key_tile, earlier = task.head / work.slots; // heads that had the slot
            const unsigned from = (unsigned)(earlier * (last + 1) + (work.deterministic || before == last ? before : min(before, 1)));
            barrier_wait(&sh.told[walk.stage], walk.parity ^ 1);
            sh.part[walk.stage] = {task.head % work.slots * work.query_tiles + i, query0, task.b, task.h, before == 0, before == last};
            while ((int)(load_acquire(turns) - from) < 0) {}
            barrier_arrive(&sh.turn_come[walk.stage]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Role: dq. The dq of a query tile is two products of 64 x 64: two halves of its queries, or of the head size. Sums are kept
// as lanes hold them: the layout of `sums` is that of the registers.

template <typename T, int D> __device__ static void backward_dq(HopperBackwardShared<D> &sh, const BackwardWork<T> &work) {
    using Sizes = HopperBackward<D>;
    constexpr int ROWS = D == 64 ? 64 : 0, COLUMNS = D == 64 ? 0 : 64; // from the first half to the second
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    Ring own = {0, 0}, walk = {0, 0};
    for (;; ring_next<2>(own)) {
        barrier_wait(&sh.kv_full[own.stage], own.parity);
        const int id = __shfl_sync(0xffffffffu, sh.task[own.stage], 0);
        if (id < 0) return;
        const BackwardTask task = backward_task<Sizes>(work, id);
#pragma unroll 1
        for (int left = task.end - task.first; left > 0; left--, ring_next<2>(walk)) {
            barrier_wait(&sh.ds_full[walk.stage], walk.parity);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float dq[32];
                const uint64_t a = wgmma_columns(sh.ds[walk.stage] + (ROWS ? half * Sizes::KEY_PANEL : 0), Sizes::KEY_PANEL);
                const uint64_t b = wgmma_columns(sh.k[own.stage] + (COLUMNS ? half * Sizes::KEY_PANEL : 0), Sizes::KEY_PANEL);
                wgmma_fence();
                wgmma_begin<T, true, true>(dq, a, b);
#pragma unroll
                for (int kk = 1; kk < Sizes::KEYS / 16; kk++)
                    wgmma<T, true, true>(dq, wgmma_advance(a, kk * 16 * PANEL_ROW_BYTES), wgmma_advance(b, kk * 16 * PANEL_ROW_BYTES), true);
                wgmma_commit();
                wgmma_wait<0>();
                wgmma_hold(dq);
                if (half == 1 && lane == 0) {
                    barrier_arrive(&sh.ds_empty[walk.stage]);
                    if (left == 1) barrier_arrive(&sh.kv_empty[own.stage]);
                }
                if (half == 0) barrier_wait(&sh.turn_come[walk.stage], walk.parity);
                const DqPart &part = sh.part[walk.stage];
                float4 *sums = reinterpret_cast<float4 *>(work.sums + (int64_t)part.tile * Sizes::DQ_FLOATS) + thread;
                if (part.last) {
                    if (!part.first) {
#pragma unroll
                        for (int f = 0; f < 8; f++) {
                            const float4 x = __ldcg(sums + (half * 8 + f) * WARPGROUP);
                            dq[4 * f] += x.x;
                            dq[4 * f + 1] += x.y;
                            dq[4 * f + 2] += x.z;
                            dq[4 * f + 3] += x.w;
                        }
                    }
                    const int row0 = part.query0 + half * ROWS, column0 = half * COLUMNS;
                    T *dst = work.dqkv + ((int64_t)part.b * work.shape.T + row0) * work.shape.qkv_stride + part.h * work.shape.HS + column0;
                    store_product<T>(dst, work.shape.qkv_stride, work.shape.T - row0, work.shape.HS - column0, dq, work.scale);
                } else if (part.first) {
#pragma unroll
                    for (int f = 0; f < 8; f++) __stcg(sums + (half * 8 + f) * WARPGROUP, make_float4(dq[4 * f], dq[4 * f + 1], dq[4 * f + 2], dq[4 * f + 3]));
                } else {
#pragma unroll
                    for (int f = 0; f < 8; f++) add_float4(sums + (half * 8 + f) * WARPGROUP, make_float4(dq[4 * f], dq[4 * f + 1], dq[4 * f + 2], dq[4 * f + 3]));
                }
            }
            __syncwarp(); // all lanes have added
            if (lane == 0) barrier_arrive(&sh.added[walk.stage]);
        }
    }
}
#endif

// ---------------------------------------------------------------------------------------------------------------
// The kernel, and one before it

template <typename T, int D>
__global__ void __launch_bounds__(BACKWARD_THREADS, 1)
attention_backward_hopper_kernel(const __grid_constant__ CUtensorMap map_keys, const __grid_constant__ CUtensorMap map_queries,
                                 const __grid_constant__ CUtensorMap map_dout, const __grid_constant__ BackwardWork<T> work) {
#ifdef HOPPER_CODE
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    HopperBackwardShared<D> &sh = *reinterpret_cast<HopperBackwardShared<D> *>(shared_bytes);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(&sh.kv_full[i], 1);
            barrier_init(&sh.kv_empty[i], SCORE_WARPS + DQ_WARPS + TURN_THREADS);
            barrier_init(&sh.q_full[i], 1);
            barrier_init(&sh.dout_full[i], 1);
            barrier_init(&sh.query_empty[i], SCORE_WARPS);
            barrier_init(&sh.ds_full[i], SCORE_WARPS);
            barrier_init(&sh.ds_empty[i], DQ_WARPS);
            barrier_init(&sh.turn_come[i], 1);
            barrier_init(&sh.added[i], DQ_WARPS);
            barrier_init(&sh.told[i], 1);
        }
        barrier_init_done();
    }
    __syncthreads();
    const int role = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
    if (role == ROLE_LOAD) {
        registers_decrease<REGISTERS_LOAD>();
        if (threadIdx.x == 0) backward_load<T, D>(sh, &map_keys, &map_queries, &map_dout, work);
        else if (threadIdx.x == 32 || threadIdx.x == 64) backward_turns<T, D>(sh, work, threadIdx.x == 64); // warps of their own
    } else if (role == ROLE_DQ) {
        registers_decrease<REGISTERS_DQ>();
        backward_dq<T, D>(sh, work);
    } else {
        registers_increase<REGISTERS_SCORES>();
        backward_scores<T, D>(sh, work, role - ROLE_SCORES);
    }
#endif
}

enum { PREPARE_WARPS = 8, PREPARE_ROWS = 32, PREPARE_STEPS = PREPARE_ROWS / PREPARE_WARPS };

// lse2 = lse * log2(e) and rowsum = rowsum(dout * out), both (B*NH, rows); beyond T infinity and 0, which makes P = dS = 0
// there. LANES neighbouring lanes handle a row of a head, 16 bytes each; a block has 32 rows of as many neighbouring heads as a warp holds.
// Sets n_zero words of `zero` to 0.
template <typename T, int LANES>
__global__ void __launch_bounds__(32 * PREPARE_WARPS)
attention_backward_prepare_kernel(float *lse2, float *rowsum, unsigned *zero, int64_t n_zero, const T *dout, const T *out, const float *lse, int rows, int head_groups,
                                  AttentionShape shape) {
    constexpr int HEADS = 32 / LANES;
    __shared__ float sums[HEADS][PREPARE_ROWS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane % LANES * 8;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n_zero; i += (int64_t)gridDim.x * blockDim.x) zero[i] = 0;
    const int64_t block = blockIdx.x / head_groups, first_head = blockIdx.x % head_groups * HEADS;
    const int64_t b = block / (rows / PREPARE_ROWS), t0 = block % (rows / PREPARE_ROWS) * PREPARE_ROWS, head = first_head + lane / LANES;
    const int64_t at = (b * shape.T + t0 + warp) * shape.out_stride + head * shape.HS + c, step = PREPARE_WARPS * shape.out_stride;
    Vec<T, 8> x[PREPARE_STEPS], y[PREPARE_STEPS];
#pragma unroll
    for (int k = 0; k < PREPARE_STEPS; k++) {
        const bool inside = t0 + warp + k * PREPARE_WARPS < shape.T && head < shape.NH && c < shape.HS;
        x[k] = vec_load_if<8>(inside, dout + at + k * step);
        y[k] = vec_load_if<8>(inside, out + at + k * step);
    }
#pragma unroll
    for (int k = 0; k < PREPARE_STEPS; k++) {
        float sum = 0;
#pragma unroll
        for (int e = 0; e < 8; e++) sum += x[k].at(e) * y[k].at(e);
        for (int offset = LANES / 2; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (c == 0) sums[lane / LANES][warp + k * PREPARE_WARPS] = sum;
    }
    __syncthreads();
    if (warp >= HEADS || first_head + warp >= shape.NH) return;
    const int64_t mine = b * shape.NH + first_head + warp, t = t0 + lane;
    rowsum[mine * rows + t] = sums[warp][lane];
    lse2[mine * rows + t] = t < shape.T ? lse[mine * shape.T + t] * LOG2E : INFINITY;
}

// ---------------------------------------------------------------------------------------------------------------
// Host

// How a launch divides its work and its scratch: lse2 and rowsum (heads, rows), then the sums and the counters.
typedef struct {
    int64_t rows, key_tiles, query_tiles, tasks, blocks, heads_down, slots, statistics, sums, counters; // the last three: words of 4 bytes
} BackwardPlan;

template <int D> static BackwardPlan backward_plan(int64_t heads, int64_t seq, int64_t window, int64_t sms) {
    using Sizes = HopperBackward<D>;
    BackwardPlan p;
    p.rows = round_up(seq, Sizes::KEYS);
    p.key_tiles = p.rows / Sizes::KEYS;
    p.query_tiles = p.rows / Sizes::QUERIES;
    p.tasks = heads * p.key_tiles;
    p.blocks = min_i64(sms, p.tasks);
    // Heads in work at a time: blocks are within about one task of each other, and each may have drawn its next. More slots
    // would leave the L2; fewer would let heads wait for each other.
    p.slots = min_i64(heads, ceil_div(3 * p.blocks, p.key_tiles) + 2);
    // Two tasks for each block; with a window, tasks are equal. All these heads are in work together, and none may wait for another
    // to leave its slot.
    p.heads_down = window < seq ? 0 : min_i64(heads, max_i64(1, 2 * p.blocks / p.key_tiles));
    p.slots = max_i64(p.slots, min_i64(heads, p.heads_down + ceil_div(2 * p.blocks, p.key_tiles) + 1));
    p.statistics = heads * p.rows;
    p.sums = p.slots * p.query_tiles * Sizes::DQ_FLOATS;
    p.counters = p.slots * p.query_tiles + 1;
    return p;
}

int64_t attention_backward_hopper_scratch(int64_t heads, int64_t T, int64_t HS, int64_t sms) {
    const BackwardPlan p = HS <= 64 ? backward_plan<64>(heads, T, T, sms) : backward_plan<128>(heads, T, T, sms);
    return (2 * p.statistics + p.sums + p.counters) * (int64_t)sizeof(float);
}

template <typename T, int D> static void backward_launch(Tensor dqkv, Tensor dout, Tensor qkv, Tensor out, Tensor lse, AttentionShape shape, bool deterministic, Stream stream) {
    using Sizes = HopperBackward<D>;
    const cudaStream_t s = (cudaStream_t)stream;
    const int64_t B = shape.B, NH = shape.NH, seq = shape.T, HS = shape.HS;
    const BackwardPlan p = backward_plan<D>(B * NH, seq, shape.window, sm_count());
    CHECK(p.tasks <= INT32_MAX / 2, "attention_backward: %" PRId64 " tiles of keys", p.tasks);
    float *lse2 = (float *)scratch_get(attention_backward_hopper_scratch(B * NH, seq, HS, sm_count()), stream), *rowsum = lse2 + p.statistics;
    float *sums = rowsum + p.statistics;
    unsigned *turns = (unsigned *)(sums + p.sums);
    const float scale = 1.0f / sqrtf((float)HS);
    const BackwardWork<T> work = {elements<T>(dqkv), lse2, rowsum, sums, turns, turns + p.counters - 1, shape, (int)p.rows, (int)p.key_tiles,
                                  (int)p.query_tiles, (int)p.slots, (int)p.tasks, (int)(B * NH), (int)p.heads_down, scale, scale * LOG2E, deterministic};

    constexpr int LANES = D / 8;
    const int64_t head_groups = ceil_div(NH, 32 / LANES);
    attention_backward_prepare_kernel<T, LANES><<<grid_blocks(B * (p.rows / PREPARE_ROWS) * head_groups), 32 * PREPARE_WARPS, 0, s>>>(
        lse2, rowsum, turns, p.counters, elements<const T>(dout), elements<const T>(out), elements<const float>(lse), (int)p.rows, (int)head_groups, shape);
    launch_check();

    const int64_t size_qkv[4] = {HS, 3 * NH, seq, B}, stride_qkv[3] = {HS, shape.qkv_stride, seq * shape.qkv_stride};
    const int64_t size_out[4] = {HS, NH, seq, B}, stride_out[3] = {HS, shape.out_stride, seq * shape.out_stride};
    const int box_keys[4] = {PANEL_COLUMNS, 1, Sizes::KEYS, 1}, box_queries[4] = {PANEL_COLUMNS, 1, Sizes::QUERIES, 1};
    shared_bytes_allow(attention_backward_hopper_kernel<T, D>, sizeof(HopperBackwardShared<D>));
    attention_backward_hopper_kernel<T, D><<<(unsigned)p.blocks, BACKWARD_THREADS, sizeof(HopperBackwardShared<D>), s>>>(
        tensor_map_make(qkv, 0, size_qkv, stride_qkv, box_keys), tensor_map_make(qkv, 0, size_qkv, stride_qkv, box_queries),
        tensor_map_make(dout, 0, size_out, stride_out, box_queries), work);
    launch_check();
}

template <typename T> static void backward_launch_head_size(Tensor dqkv, Tensor dout, Tensor qkv, Tensor out, Tensor lse, AttentionShape shape, bool deterministic, Stream stream) {
    if (shape.HS <= 64) backward_launch<T, 64>(dqkv, dout, qkv, out, lse, shape, deterministic, stream);
    else backward_launch<T, 128>(dqkv, dout, qkv, out, lse, shape, deterministic, stream);
}

void attention_backward_hopper(Tensor dqkv, Tensor dout, Tensor qkv, Tensor out, Tensor lse, AttentionShape shape, bool deterministic, Stream stream) {
    if (qkv.dtype == DTYPE_BF16) backward_launch_head_size<__nv_bfloat16>(dqkv, dout, qkv, out, lse, shape, deterministic, stream);
    else backward_launch_head_size<__half>(dqkv, dout, qkv, out, lse, shape, deterministic, stream);
}
