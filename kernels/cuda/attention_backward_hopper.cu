// attention_backward_hopper.cu - the backward of attention for compute capability 9.0, on the pieces of hopper.cuh (Dao 2023,
// "FlashAttention-2"; Shah et al. 2024, "FlashAttention-3"): one kernel, five products, dqkv written once.
//
// A task is 128 keys of one head. It walks over the query tiles from the diagonal to the end. Scores are computed with keys
// down and queries across, so that P^T and dS^T come out of wgmma in the layout in which they go in again:
//
//     S^T = K Q^T     dP^T = V dout^T     P^T = exp(S^T - lse)     dS^T = P^T * (dP^T - D)     dv += P^T dout     dk += dS^T Q
//
// dk and dv stay in registers. dq = dS K is a sum over tasks: each adds its part to fp32 sums in global memory, which the
// L2 holds. For equal bits in every run the parts of a query tile have an order: the task on its diagonal first (it stores
// instead of adding: nothing needs zeroing), then upwards to the task of the first keys (it rounds and writes dqkv: nothing
// needs converting). A counter for each query tile says whose turn it is.
//
//                  query tile   0   1   2   3      The number is the round of the task in which it meets that query tile. Tasks are
//     keys   0..127  (task 3)   1   2   3   4      dealt in the order of their numbers: those of a head that begin together
//     keys 128..255  (task 2)       1   2   3      never meet in a query tile, and its diagonal has the smallest round:
//     keys 256..383  (task 1)           1   2      blocks that keep step wait for nobody's turn. A task waits only
//     keys 384..511  (task 0)               1      for tasks with smaller numbers, all of which are done or in work.
//
// A block has four warpgroups. One of its threads draws tasks and loads tiles. Two score groups have 64 keys each and do all but
// dq; they pass dS on through shared memory. The dq group multiplies it with K and waits for turns.
//
//     load        K, V, Q, dout, lse, D  ->  shared memory, two stages
//     score 0, 1  S^T, dP^T -> dS^T in shared memory, two stages; dk, dv -> dqkv
//     dq          dS K -> sums in global memory -> dqkv
#include "attention.cuh"
#include "hopper.cuh"

// ---------------------------------------------------------------------------------------------------------------
// Sizes

template <int HEAD> struct HopperBackward {
    static constexpr int D = HEAD;                        // head size, rounded up: 64 or 128
    static constexpr int KEYS = 128;                      // of a task: two score groups of 64
    static constexpr int QUERIES = D == 64 ? 128 : 64;    // of a tile
    static constexpr int STEP = D == 64 ? 64 : 32;        // queries that a score group has in registers: all that 208 registers allow
    static constexpr int PANELS = D / PANEL_COLUMNS;
    static constexpr int KEY_PANEL = KEYS * PANEL_ROW_BYTES, QUERY_PANEL = QUERIES * PANEL_ROW_BYTES; // bytes
    static constexpr int KEY_TILE = PANELS * KEY_PANEL, QUERY_TILE = PANELS * QUERY_PANEL, DS_TILE = KEYS * QUERIES * 2;
    static constexpr int STATISTICS = QUERIES * (int)sizeof(float);
    static constexpr int DQ_FLOATS = QUERIES * D;         // of a query tile, as two products of 64 x 64
};

template <int D> struct alignas(1024) HopperBackwardShared {
    using Sizes = HopperBackward<D>;
    char k[2][Sizes::KEY_TILE], v[2][Sizes::KEY_TILE];            // of this task and the next
    char q[2][Sizes::QUERY_TILE], dout[2][Sizes::QUERY_TILE];
    char ds[2][Sizes::DS_TILE];                                   // keys down, panels of 64 queries
    float lse2[2][Sizes::QUERIES], rowsum[2][Sizes::QUERIES];
    uint64_t kv_full[2], kv_empty[2], q_full[2], dout_full[2], query_empty[2], ds_full[2], ds_empty[2];
    int task[2];                                                  // whose keys these are; negative: there are no more
};

enum { ROLE_LOAD, ROLE_DQ, ROLE_SCORES, BACKWARD_THREADS = 4 * WARPGROUP, BARRIER_DQ = 1, SCORE_WARPS = 8, DQ_WARPS = 4 };
enum { REGISTERS_LOAD = 24, REGISTERS_DQ = 72, REGISTERS_SCORES = 208 }; // 24 + 72 + 2 * 208 = 4 * 128

template <typename T> struct BackwardWork {
    T *dqkv;
    const float *lse2, *rowsum;   // (B*NH, rows)
    float *sums;                  // dq of the heads in work: (slots, query_tiles, DQ_FLOATS)
    unsigned *turns;              // (slots, query_tiles): parts added so far, by all heads that had the slot
    unsigned *ticket;             // the next task
    AttentionShape shape;
    int rows, key_tiles, query_tiles, slots, tasks; // rows: T rounded up to whole tiles of keys
    float scale, scale_log2;
};

struct BackwardTask {
    int head, b, h, key_tile, first; // first: the query tile on the diagonal
};
template <typename Sizes, typename T> __device__ static inline BackwardTask backward_task(const BackwardWork<T> &work, int task) {
    const int head = task / work.key_tiles, key_tile = work.key_tiles - 1 - task % work.key_tiles;
    return {head, head / work.shape.NH, head % work.shape.NH, key_tile, key_tile * Sizes::KEYS / Sizes::QUERIES};
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
__device__ static inline void store_release(unsigned *p, unsigned x) { asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(x) : "memory"); }

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
        for (int i = task.first; i < work.query_tiles; i++, ring_next<2>(walk)) {
            const int s = walk.stage, query0 = i * Sizes::QUERIES;
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
// Role: scores. A group works in steps of STEP queries. Products are asynchronous, and a step overlaps with the next:
//
//     exp                              while dP^T of this step and dk of the step before are under way
//     starts S^T of the next step, dv
//     dS                               while these two are under way
//     starts dP^T of the next step, dk
//
// Two groups of products are open at most; each wait closes the older one. (ptxas wants the loop to begin with one open, and
// S^T and dP^T to be the same registers in every step: hence a loop that runs at least once, and accumulators that are
// overwritten with wgmma's `add` off instead of being declared anew.)

template <typename Sizes> struct ScoreRegisters {
    float dk[Sizes::D / 2], dv[Sizes::D / 2], s[Sizes::STEP / 2], dp[Sizes::STEP / 2]; // S^T and dP^T
    uint32_t p[Sizes::STEP / 16][4], ds[Sizes::STEP / 16][4];                          // P^T and dS^T, rounded: A operands
};

// S^T or dP^T: the group's 64 keys times STEP queries, over the head size.
template <typename T, typename Sizes> __device__ static inline void scores_start(float (&s)[Sizes::STEP / 2], uint64_t own, uint64_t walk) {
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < Sizes::D / 16; kk++)
        wgmma<T, false, false>(s, wgmma_advance(own, kk / 4 * Sizes::KEY_PANEL + kk % 4 * 32), wgmma_advance(walk, kk / 4 * Sizes::QUERY_PANEL + kk % 4 * 32), kk > 0);
}

// dv or dk (+)= P^T dout or dS^T Q, over STEP queries.
template <typename T, typename Sizes> __device__ static inline void gradient_start(float (&d)[Sizes::D / 2], const uint32_t (&a)[Sizes::STEP / 16][4], uint64_t walk, bool add) {
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < Sizes::STEP / 16; kk++) wgmma<T, true>(d, a[kk], wgmma_advance(walk, kk * 16 * PANEL_ROW_BYTES), kk > 0 || add);
}

// Step `step` of the query tile in walk.stage; its first query is query0, the warp's first key key0, which is row `own_row` of the
// key tile. NEXT: another step follows.
template <typename T, typename Sizes, bool NEXT>
__device__ static inline void score_step(HopperBackwardShared<Sizes::D> &sh, ScoreRegisters<Sizes> &r, uint64_t k, uint64_t v, Ring walk, int step, int query0, int key0,
                                         int own_row, bool first, float scale_log2) {
    constexpr int STEP = Sizes::STEP, STEPS = Sizes::QUERIES / STEP, STEP_BYTES = STEP * PANEL_ROW_BYTES;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, stage = walk.stage;
    const float *lse2 = sh.lse2[stage] + step * STEP, *rowsum = sh.rowsum[stage] + step * STEP;
    Ring next = walk;
    const int next_step = (step + 1) % STEPS;
    if (next_step == 0) ring_next<2>(next);

    if (query0 < key0 + 15) { // on the diagonal; keys beyond the sequence come after every query too
#pragma unroll
        for (int n = 0; n < STEP / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (query0 + 8 * n + 2 * t + e % 2 < key0 + g + e / 2 * 8) r.s[4 * n + e] = -INFINITY;
    }
#pragma unroll
    for (int n = 0; n < STEP / 8; n++) {
        const float2 l = *reinterpret_cast<const float2 *>(lse2 + 8 * n + 2 * t);
        r.p[n / 2][n % 2 * 2] = pack2<T>(exp2_fast(r.s[4 * n] * scale_log2 - l.x), exp2_fast(r.s[4 * n + 1] * scale_log2 - l.y));
        r.p[n / 2][n % 2 * 2 + 1] = pack2<T>(exp2_fast(r.s[4 * n + 2] * scale_log2 - l.x), exp2_fast(r.s[4 * n + 3] * scale_log2 - l.y));
    }
    wgmma_hold(r.p);
    if (NEXT) {
        if (next_step == 0) barrier_wait(&sh.q_full[next.stage], next.parity);
        scores_start<T, Sizes>(r.s, k, wgmma_rows(sh.q[next.stage] + next_step * STEP_BYTES));
    }
    gradient_start<T, Sizes>(r.dv, r.p, wgmma_columns(sh.dout[stage] + step * STEP_BYTES, Sizes::QUERY_PANEL), !first);
    wgmma_commit();

    wgmma_wait<1>(); // for dP^T of this step and dk of the one before
    wgmma_hold(r.dp);
    wgmma_hold(r.ds);
    if (step == 0 && !first && lane == 0) barrier_arrive(&sh.query_empty[stage ^ 1]);
#pragma unroll
    for (int n = 0; n < STEP / 8; n++) {
        const float2 d = *reinterpret_cast<const float2 *>(rowsum + 8 * n + 2 * t);
        const float2 p0 = unpack2<T>(r.p[n / 2][n % 2 * 2]), p1 = unpack2<T>(r.p[n / 2][n % 2 * 2 + 1]);
        r.ds[n / 2][n % 2 * 2] = pack2<T>(p0.x * (r.dp[4 * n] - d.x), p0.y * (r.dp[4 * n + 1] - d.y));
        r.ds[n / 2][n % 2 * 2 + 1] = pack2<T>(p1.x * (r.dp[4 * n + 2] - d.x), p1.y * (r.dp[4 * n + 3] - d.y));
    }
    wgmma_hold(r.ds);
    if (NEXT) {
        if (next_step == 0) barrier_wait(&sh.dout_full[next.stage], next.parity);
        scores_start<T, Sizes>(r.dp, v, wgmma_rows(sh.dout[next.stage] + next_step * STEP_BYTES));
    }
    if (step == 0) barrier_wait(&sh.ds_empty[stage], walk.parity ^ 1);
#pragma unroll
    for (int kk = 0; kk < STEP / 16; kk++) {
        const int q16 = step * (STEP / 16) + kk; // 16 queries: two pieces of a panel's four times two
        stmatrix_x4(panel_piece(sh.ds[stage] + q16 / 4 * Sizes::KEY_PANEL, own_row + lane % 16, q16 % 4 * 2 + lane / 16), r.ds[kk][0], r.ds[kk][1], r.ds[kk][2], r.ds[kk][3]);
    }
    if (step == STEPS - 1) {
        shared_written();
        __syncwarp();
        if (lane == 0) barrier_arrive(&sh.ds_full[stage]);
    }
    gradient_start<T, Sizes>(r.dk, r.ds, wgmma_columns(sh.q[stage] + step * STEP_BYTES, Sizes::QUERY_PANEL), !first);
    wgmma_commit();
    wgmma_wait<NEXT>(); // for S^T of the next step and dv of this one, or for all
    wgmma_hold(r.s);
    wgmma_hold(r.p);
}

template <typename T, int D> __device__ static void backward_scores(HopperBackwardShared<D> &sh, const BackwardWork<T> &work, int group) {
    using Sizes = HopperBackward<D>;
    constexpr int STEP = Sizes::STEP;
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
        barrier_wait(&sh.q_full[walk.stage], walk.parity);
        scores_start<T, Sizes>(r.s, k, wgmma_rows(sh.q[walk.stage]));
        wgmma_commit();
        barrier_wait(&sh.dout_full[walk.stage], walk.parity);
        scores_start<T, Sizes>(r.dp, v, wgmma_rows(sh.dout[walk.stage]));
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_hold(r.s);
        int query0 = task.first * Sizes::QUERIES, step = 0;
        bool first = true;
#pragma unroll 1
        do { // a tile has at least two steps
            score_step<T, Sizes, true>(sh, r, k, v, walk, step, query0, key0, own_row, first, work.scale_log2);
            first = false;
            query0 += STEP;
            if (++step == Sizes::QUERIES / STEP) {
                step = 0;
                ring_next<2>(walk);
            }
        } while (query0 + STEP < work.rows);
        score_step<T, Sizes, false>(sh, r, k, v, walk, step, query0, key0, own_row, false, work.scale_log2);
        wgmma_hold(r.dk);
        wgmma_hold(r.dv);
        if (lane == 0) {
            barrier_arrive(&sh.query_empty[walk.stage]);
            barrier_arrive(&sh.kv_empty[own.stage]);
        }
        ring_next<2>(walk);
        const int row0 = task.key_tile * Sizes::KEYS + 64 * group;
        T *dk = work.dqkv + ((int64_t)task.b * work.shape.T + row0) * work.shape.qkv_stride + work.shape.out_stride + (int64_t)task.h * work.shape.HS;
        store_product<T>(dk, work.shape.qkv_stride, work.shape.T - row0, work.shape.HS, r.dk, work.scale);
        store_product<T>(dk + work.shape.out_stride, work.shape.qkv_stride, work.shape.T - row0, work.shape.HS, r.dv, 1.0f);
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
        const int slot = task.head % work.slots, earlier = task.head / work.slots; // heads that had the slot
#pragma unroll 1
        for (int i = task.first; i < work.query_tiles; i++, ring_next<2>(walk)) {
            const int diagonal = i * Sizes::QUERIES / Sizes::KEYS; // the key tiles diagonal .. 0 add to this query tile
            const unsigned turn = (unsigned)(earlier * (diagonal + 1) + diagonal - task.key_tile);
            unsigned *turns = work.turns + (int64_t)slot * work.query_tiles + i;
            float4 *sums = reinterpret_cast<float4 *>(work.sums + ((int64_t)slot * work.query_tiles + i) * Sizes::DQ_FLOATS) + thread;
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
                    if (i == work.query_tiles - 1) barrier_arrive(&sh.kv_empty[own.stage]);
                }
                if (half == 0) {
                    if (thread == 0) while (load_acquire(turns) != turn) {}
                    named_sync(BARRIER_DQ, WARPGROUP);
                }
                if (task.key_tile == 0) {
                    if (diagonal > 0) {
#pragma unroll
                        for (int f = 0; f < 8; f++) {
                            const float4 x = __ldcg(sums + (half * 8 + f) * WARPGROUP);
                            dq[4 * f] += x.x;
                            dq[4 * f + 1] += x.y;
                            dq[4 * f + 2] += x.z;
                            dq[4 * f + 3] += x.w;
                        }
                    }
                    const int row0 = i * Sizes::QUERIES + half * ROWS, column0 = half * COLUMNS;
                    T *dst = work.dqkv + ((int64_t)task.b * work.shape.T + row0) * work.shape.qkv_stride + (int64_t)task.h * work.shape.HS + column0;
                    store_product<T>(dst, work.shape.qkv_stride, work.shape.T - row0, work.shape.HS - column0, dq, work.scale);
                } else if (task.key_tile == diagonal) {
#pragma unroll
                    for (int f = 0; f < 8; f++) __stcg(sums + (half * 8 + f) * WARPGROUP, make_float4(dq[4 * f], dq[4 * f + 1], dq[4 * f + 2], dq[4 * f + 3]));
                } else {
#pragma unroll
                    for (int f = 0; f < 8; f++) add_float4(sums + (half * 8 + f) * WARPGROUP, make_float4(dq[4 * f], dq[4 * f + 1], dq[4 * f + 2], dq[4 * f + 3]));
                }
            }
            named_sync(BARRIER_DQ, WARPGROUP); // all have added
            if (thread == 0) store_release(turns, turn + 1);
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
            barrier_init(&sh.kv_empty[i], SCORE_WARPS + DQ_WARPS);
            barrier_init(&sh.q_full[i], 1);
            barrier_init(&sh.dout_full[i], 1);
            barrier_init(&sh.query_empty[i], SCORE_WARPS);
            barrier_init(&sh.ds_full[i], SCORE_WARPS);
            barrier_init(&sh.ds_empty[i], DQ_WARPS);
        }
        barrier_init_done();
    }
    __syncthreads();
    const int role = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
    if (role == ROLE_LOAD) {
        registers_decrease<REGISTERS_LOAD>();
        if (threadIdx.x == 0) backward_load<T, D>(sh, &map_keys, &map_queries, &map_dout, work);
    } else if (role == ROLE_DQ) {
        registers_decrease<REGISTERS_DQ>();
        backward_dq<T, D>(sh, work);
    } else {
        registers_increase<REGISTERS_SCORES>();
        backward_scores<T, D>(sh, work, role - ROLE_SCORES);
    }
#endif
}

// lse2 = lse * log2(e) and rowsum = rowsum(dout * out), both (B*NH, rows); beyond T infinity and 0, which makes P = dS = 0
// there. LANES neighbouring lanes handle one row of one head, 16 bytes each. Sets n_zero words of `zero` to 0.
template <typename T, int LANES>
__global__ void __launch_bounds__(256) attention_backward_prepare_kernel(float *lse2, float *rowsum, unsigned *zero, int64_t n_zero, const T *dout, const T *out,
                                                                         const float *lse, int rows, AttentionShape shape) {
    const int64_t thread = (int64_t)blockIdx.x * 256 + threadIdx.x, i = thread / LANES, head = i / rows, b = head / shape.NH, h = head % shape.NH;
    const int t = (int)(i % rows), c = threadIdx.x % LANES * 8;
    if (thread < n_zero) zero[thread] = 0;
    if (b >= shape.B) return; // whole warps: rows is a multiple of 32
    float sum = 0;
    if (t < shape.T && c < shape.HS) {
        const int64_t at = (b * shape.T + t) * shape.out_stride + h * shape.HS + c;
        const Vec<T, 8> x = vec_load<8>(dout + at), y = vec_load<8>(out + at);
#pragma unroll
        for (int k = 0; k < 8; k++) sum += x.at(k) * y.at(k);
    }
    for (int offset = LANES / 2; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (c == 0) {
        rowsum[i] = sum;
        lse2[i] = t < shape.T ? lse[head * shape.T + t] * LOG2E : INFINITY;
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Host

// How a launch divides its work and its scratch: lse2 and rowsum (heads, rows), then the sums and the counters.
typedef struct {
    int64_t rows, key_tiles, query_tiles, tasks, blocks, slots, statistics, sums, counters; // the last three: words of 4 bytes
} BackwardPlan;

template <int D> static BackwardPlan backward_plan(int64_t heads, int64_t seq, int64_t sms) {
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
    p.statistics = heads * p.rows;
    p.sums = p.slots * p.query_tiles * Sizes::DQ_FLOATS;
    p.counters = p.slots * p.query_tiles + 1;
    return p;
}

int64_t attention_backward_hopper_scratch(int64_t heads, int64_t T, int64_t HS, int64_t sms) {
    const BackwardPlan p = HS <= 64 ? backward_plan<64>(heads, T, sms) : backward_plan<128>(heads, T, sms);
    return (2 * p.statistics + p.sums + p.counters) * (int64_t)sizeof(float);
}

template <typename T, int D> static void backward_launch(Tensor dqkv, Tensor dout, Tensor qkv, Tensor out, Tensor lse, AttentionShape shape, Stream stream) {
    using Sizes = HopperBackward<D>;
    const cudaStream_t s = (cudaStream_t)stream;
    const int64_t B = shape.B, NH = shape.NH, seq = shape.T, HS = shape.HS;
    const BackwardPlan p = backward_plan<D>(B * NH, seq, sm_count());
    CHECK(p.tasks <= INT32_MAX / 2, "attention_backward: %" PRId64 " tiles of keys", p.tasks);
    float *lse2 = (float *)scratch_get(attention_backward_hopper_scratch(B * NH, seq, HS, sm_count()), stream), *rowsum = lse2 + p.statistics;
    float *sums = rowsum + p.statistics;
    unsigned *turns = (unsigned *)(sums + p.sums);
    const float scale = 1.0f / sqrtf((float)HS);
    const BackwardWork<T> work = {elements<T>(dqkv), lse2, rowsum, sums, turns, turns + p.counters - 1, shape, (int)p.rows, (int)p.key_tiles,
                                  (int)p.query_tiles, (int)p.slots, (int)p.tasks, scale, scale * LOG2E};

    constexpr int LANES = D / 8;
    attention_backward_prepare_kernel<T, LANES><<<grid_blocks(ceil_div(max_i64(p.statistics * LANES, p.counters), 256)), 256, 0, s>>>(
        lse2, rowsum, turns, p.counters, elements<const T>(dout), elements<const T>(out), elements<const float>(lse), (int)p.rows, shape);
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

template <typename T> static void backward_launch_head_size(Tensor dqkv, Tensor dout, Tensor qkv, Tensor out, Tensor lse, AttentionShape shape, Stream stream) {
    if (shape.HS <= 64) backward_launch<T, 64>(dqkv, dout, qkv, out, lse, shape, stream);
    else backward_launch<T, 128>(dqkv, dout, qkv, out, lse, shape, stream);
}

void attention_backward_hopper(Tensor dqkv, Tensor dout, Tensor qkv, Tensor out, Tensor lse, AttentionShape shape, Stream stream) {
    if (qkv.dtype == DTYPE_BF16) backward_launch_head_size<__nv_bfloat16>(dqkv, dout, qkv, out, lse, shape, stream);
    else backward_launch_head_size<__half>(dqkv, dout, qkv, out, lse, shape, stream);
}
