// layernorm.cu - LayerNorm over the last dimension, alone and fused with the residual sum in front of it.
//
// Forward: a warp handles a row. Lane l owns vectors l, l + 32, ... of the row in every pass, so a row that a warp has put into
// shared memory is read back by the lane that wrote it and needs no barrier.
#include "common.cuh"

// Warps for which `bytes_per_warp` fit a block, at most 8.
static int warps_that_fit(int64_t bytes_per_warp, int64_t budget) { return (int)max_i64(1, min_i64(8, budget / bytes_per_warp)); }

// ---------------------------------------------------------------------------------------------------------------
// Forward

template <typename T, int W, bool RESIDUAL>
__global__ void __launch_bounds__(256)
layernorm_forward_kernel(T *residual, T *out, float *mean, float *rstd, const T *x, const T *delta, const T *bias, const T *w, const T *b,
                         int64_t rows, int C, float eps) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T *row = reinterpret_cast<T *>(shared_bytes) + (int64_t)warp * C;
    int64_t r = (int64_t)blockIdx.x * (blockDim.x / 32) + warp;
    if (r >= rows) return; // a whole warp at a time, and there is no barrier below
    x += r * C;
    out += r * C;

    float sum = 0;
    for (int c = lane * W; c < C; c += 32 * W) {
        Vec<T, W> v = vec_load<W>(x + c);
        if (RESIDUAL) {
            Vec<T, W> d = vec_load<W>(delta + r * C + c), bv;
            if (bias) bv = vec_load<W>(bias + c);
#pragma unroll
            for (int i = 0; i < W; i++) v.set(i, v.at(i) + (d.at(i) + (bias ? bv.at(i) : 0.0f)));
            vec_store<W>(residual + r * C + c, v);
        }
#pragma unroll
        for (int i = 0; i < W; i++) sum += v.at(i);
        vec_store<W>(row + c, v);
    }
    float m = warp_sum(sum) / (float)C;
    float squares = 0;
    for (int c = lane * W; c < C; c += 32 * W) {
        Vec<T, W> v = vec_load<W>(row + c);
#pragma unroll
        for (int i = 0; i < W; i++) squares += (v.at(i) - m) * (v.at(i) - m);
    }
    float s = 1.0f / sqrtf(warp_sum(squares) / (float)C + eps);
    for (int c = lane * W; c < C; c += 32 * W) {
        Vec<T, W> v = vec_load<W>(row + c), wv = vec_load<W>(w + c), bv = vec_load<W>(b + c);
#pragma unroll
        for (int i = 0; i < W; i++) v.set(i, (v.at(i) - m) * s * wv.at(i) + bv.at(i));
        vec_store<W>(out + c, v);
    }
    if (lane == 0) {
        mean[r] = m;
        rstd[r] = s;
    }
}

// residual, delta and bias are not given for the plain form.
static void layernorm_forward_launch(const char *name, Tensor residual, Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor delta,
                                     Tensor bias, Tensor w, Tensor b, float eps, Stream stream) {
    const int64_t rows = tensor_rows(x), C = tensor_columns(x), row_bytes = C * dtype_bytes(x.dtype);
    const cudaStream_t s = (cudaStream_t)stream;
    const bool fused = residual.data != NULL;
    check_act(name, "out", out, rows, C, x.dtype);
    check_act(name, "w", w, 1, C, x.dtype);
    check_act(name, "b", b, 1, C, x.dtype);
    check_f32(name, "mean", mean, 1, rows);
    check_f32(name, "rstd", rstd, 1, rows);
    if (fused) {
        check_act(name, "residual", residual, rows, C, x.dtype);
        check_act(name, "delta", delta, rows, C, x.dtype);
        if (bias.data) check_act(name, "bias", bias, 1, C, x.dtype);
    }
    if (rows == 0) return;
    const int warps = warps_that_fit(row_bytes, 48 * 1024);
    const bool aligned = row_bytes % 16 == 0 && is_aligned(x.data, 16) && is_aligned(out.data, 16) && is_aligned(w.data, 16) &&
                         is_aligned(b.data, 16) && is_aligned(residual.data, 16) && is_aligned(delta.data, 16) && is_aligned(bias.data, 16);
    FLOATX_SWITCH(x.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(), {
        auto kernel = fused ? layernorm_forward_kernel<floatX, W, true> : layernorm_forward_kernel<floatX, W, false>;
        shared_bytes_allow(kernel, warps * row_bytes);
        kernel<<<grid_blocks(ceil_div(rows, warps)), 32 * warps, (size_t)(warps * row_bytes), s>>>(
            elements<floatX>(residual), elements<floatX>(out), elements<float>(mean), elements<float>(rstd), elements<const floatX>(x),
            elements<const floatX>(delta), elements<const floatX>(bias), elements<const floatX>(w), elements<const floatX>(b), rows, (int)C, eps);
        launch_check();
    }));
}

void cuda::layernorm_forward(Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor w, Tensor b, float eps, Stream stream) {
    layernorm_forward_launch("layernorm_forward", tensor_none(), out, mean, rstd, x, tensor_none(), tensor_none(), w, b, eps, stream);
}

void cuda::residual_layernorm_forward(Tensor residual, Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor delta, Tensor bias, Tensor w,
                                      Tensor b, float eps, Stream stream) {
    CHECK(residual.data != NULL, "residual_layernorm_forward: residual is not given");
    layernorm_forward_launch("residual_layernorm_forward", residual, out, mean, rstd, x, delta, bias, w, b, eps, stream);
}

// ---------------------------------------------------------------------------------------------------------------
// Backward
//
// With n = (x - mean) rstd and g = dout * w:  dx = dresidual + rstd (g - mean_C(g) - n mean_C(g n)).
// dw = sum over rows of dout * n, db = sum over rows of dout.
//
// The rows that pass are also what the gradients of two biases add up, so it sums the columns of dresidual and dx where asked to.
//
// A team of threads (one warp, or several) goes over its rows, ROWS neighbours at a time. A thread owns the same columns in each, as
// VECTORS vectors that lie a team apart, so its share of the sums stays in registers:
//
//     row      [ v v v ... v | v v v ... v | ... ]
//     thread     0 1 2 ... t   0 1 2 ... t
//
// Instructions are as scarce as memory's bandwidth: hence one vector a thread where the row is short enough, so that no threads idle and
// what is computed in front of the team's sums stays in registers, and two rows that share the exchange of these sums.
//
// Rows come through shared memory by asynchronous copies, each thread's vectors by its own, STEPS_AHEAD times ROWS before they are
// needed; so the memory is busy while a row's sums are exchanged, and no barrier guards the copies. At the end a block adds
// its teams in order and writes one partial row, and columns_reduce adds the blocks in order.

enum { TEAM_MAX = 512, TEAM_WARPS_MAX = TEAM_MAX / 32, STEPS_AHEAD = 2 };
// Columns of a thread: the fewest that a team of TEAM_MAX covers the row with.
enum { OWN_COLUMNS = 8, OWN_COLUMNS_WIDE = 16, OWN_COLUMNS_MAX = 32 };
// What is summed over the rows; the last two only where one of them is wanted.
enum { SUM_DW, SUM_DB, SUM_DRESIDUAL, SUM_DX };

// The sums of N values over a warp, N a power of two; lane l gets that of value l / (32 / N). At first lanes halve their values, then they add.
template <int N> __device__ static inline float warp_sums(float (&v)[N]) {
    int offset = 16;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2, offset /= 2) lanes_halve(v, half, offset);
#pragma unroll
    for (; offset > 0; offset /= 2) v[0] += __shfl_xor_sync(0xffffffffu, v[0], offset);
    return v[0];
}

// The sums of N values over a team, in a fixed order, for all its threads. of_warp: a place for each warp of the block's teams, those of a team
// filled up with zeros to fours. The next call needs another.
template <int N> __device__ static inline void team_sums(float (&v)[N], int team, int team_threads, float4 (&of_warp)[N][TEAM_WARPS_MAX]) {
    const int quads = (team_threads / 32 + 3) / 4, lane = threadIdx.x % 32;
    const float sum = warp_sums(v);
    if (lane % (32 / N) == 0) reinterpret_cast<float *>(of_warp[lane / (32 / N)] + team * quads)[threadIdx.x % team_threads / 32] = sum;
    if (team_threads == 32) __syncwarp();
    else asm volatile("bar.sync %0, %1;" :: "r"(team + 1), "r"(team_threads) : "memory"); // barrier 0 is the block's
#pragma unroll
    for (int k = 0; k < N; k++) v[k] = 0;
    for (int q = 0; q < quads; q++)
#pragma unroll
        for (int k = 0; k < N; k++) {
            const float4 four = of_warp[k][team * quads + q];
            v[k] += (four.x + four.y) + (four.z + four.w);
        }
}

// partial is (blocks, SUMS, C), SUMS 2 or 4. AHEAD: rows come through shared memory (W is 16 bytes), else straight from memory.
// Shared memory: the rows of each team, [teams][STEPS_AHEAD][ROWS][3][C] of T; in the end [teams][2][C] sums.
template <typename T, int W, int VECTORS, int ROWS, int SUMS, bool AHEAD>
__global__ void __launch_bounds__(TEAM_MAX)
layernorm_backward_kernel(T *dx, float *partial, const T *dout, const T *x, const T *w, const float *mean, const float *rstd, const T *dresidual,
                          int rows, int C, int team_threads) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    __shared__ float4 of_warp[2][2 * ROWS][TEAM_WARPS_MAX];
    const int team = threadIdx.x / team_threads, teams = blockDim.x / team_threads, rank = threadIdx.x % team_threads;
    const int step = gridDim.x * teams * ROWS;
    T *ring = reinterpret_cast<T *>(shared_bytes) + team * (STEPS_AHEAD * ROWS * 3 * C);
    float sum[SUMS][VECTORS][W] = {};

    const float per_column = 1.0f / (float)C;
    Vec<T, W> wv[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) wv[v] = vec_load_if<W>((v * team_threads + rank) * W < C, w + (v * team_threads + rank) * W);
    auto copy_ahead = [&](int first, T *to) {
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const int64_t row = (int64_t)(first + k) * C;
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                const int c = (v * team_threads + rank) * W;
                if (c >= C || first + k >= rows) continue;
                copy_async_16(to + 3 * k * C + c, dout + row + c, true);
                copy_async_16(to + (3 * k + 1) * C + c, x + row + c, true);
                if (dresidual) copy_async_16(to + (3 * k + 2) * C + c, dresidual + row + c, true);
            }
        }
        copy_async_group();
    };
    float next_m[ROWS], next_s[ROWS];
    auto load_statistics = [&](int first) { // zeros for rows that are none: they add nothing
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            next_m[k] = first + k < rows ? mean[first + k] : 0;
            next_s[k] = first + k < rows ? rstd[first + k] : 0;
        }
    };
    for (int i = threadIdx.x; i < 2 * 2 * ROWS * TEAM_WARPS_MAX; i += blockDim.x) (&of_warp[0][0][0])[i] = {0, 0, 0, 0};
    int r = ((int)blockIdx.x * teams + team) * ROWS;
    if constexpr (AHEAD)
        for (int k = 0; k < STEPS_AHEAD; k++) copy_ahead(r + k * step, ring + k * (ROWS * 3 * C));
    load_statistics(r);
    __syncthreads();
    for (int place = 0, turn = 0; r < rows; r += step, turn ^= 1) {
        T *const here = ring + place * (ROWS * 3 * C);
        if constexpr (AHEAD) copy_async_wait_but<STEPS_AHEAD - 1>();
        float n[ROWS][VECTORS][W], g[ROWS][VECTORS][W], s[ROWS], sums_g[2 * ROWS] = {}; // of g and of g n
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const int64_t row = (int64_t)(r + k) * C;
            const float ms = next_m[k] * next_s[k];
            s[k] = next_s[k];
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                const int c = (v * team_threads + rank) * W;
                const bool inside = c < C && r + k < rows;
                Vec<T, W> dv = vec_load_if<W>(inside, AHEAD ? here + 3 * k * C + c : dout + row + c);
                Vec<T, W> xv = vec_load_if<W>(inside, AHEAD ? here + (3 * k + 1) * C + c : x + row + c);
#pragma unroll
                for (int i = 0; i < W; i++) {
                    const float d = dv.unpacked(i);
                    n[k][v][i] = fmaf(xv.unpacked(i), s[k], -ms);
                    g[k][v][i] = d * wv[v].unpacked(i);
                    sums_g[2 * k] += g[k][v][i];
                    sums_g[2 * k + 1] += g[k][v][i] * n[k][v][i];
                    sum[SUM_DW][v][i] += d * n[k][v][i];
                    sum[SUM_DB][v][i] += d;
                }
            }
        }
        load_statistics(r + step);
        team_sums(sums_g, team, team_threads, of_warp[turn]);
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const int64_t row = (int64_t)(r + k) * C;
            const float of_one = -s[k] * sums_g[2 * k] * per_column, of_n = -s[k] * sums_g[2 * k + 1] * per_column;
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                const int c = (v * team_threads + rank) * W;
                if (c >= C || r + k >= rows) continue;
                Vec<T, W> rv = vec_load_if<W>(dresidual != NULL, AHEAD ? here + (3 * k + 2) * C + c : dresidual + row + c), y;
#pragma unroll
                for (int i = 0; i < W; i++) {
                    const float base = rv.unpacked(i), d = fmaf(g[k][v][i], s[k], fmaf(n[k][v][i], of_n, base + of_one));
                    y.set(i, d);
                    if constexpr (SUMS > 2) {
                        sum[SUM_DRESIDUAL][v][i] += base;
                        sum[SUM_DX][v][i] += d;
                    }
                }
                vec_store<W>(dx + row + c, y);
            }
        }
        if constexpr (AHEAD) {
            copy_ahead(r + STEPS_AHEAD * step, here);
            place = (place + 1) % STEPS_AHEAD;
        }
    }
    copy_async_wait_all();
    float *sums = reinterpret_cast<float *>(shared_bytes);
#pragma unroll
    for (int first = 0; first < SUMS; first += 2) {
        __syncthreads(); // nobody needs what is there any more: the rows, or two other sums
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int c = (v * team_threads + rank) * W;
            if (c >= C) continue;
#pragma unroll
            for (int i = 0; i < W; i++) {
                sums[(team * 2) * C + c + i] = sum[first][v][i];
                sums[(team * 2 + 1) * C + c + i] = sum[first + 1][v][i];
            }
        }
        __syncthreads();
        for (int c = threadIdx.x; c < 2 * C; c += blockDim.x) {
            float total = 0;
            for (int k = 0; k < teams; k++) total += sums[k * 2 * C + c];
            partial[((int64_t)blockIdx.x * SUMS + first) * C + c] = total;
        }
    }
}

// Shared memory of a block beside what its kernel declares.
static int64_t shared_budget(int rows) { return shared_bytes_max() - 2 * 2 * rows * TEAM_WARPS_MAX * (int64_t)sizeof(float4); }

// One team's two sums of each column must fit.
int64_t cuda::layernorm_backward_channels_max(bool any) {
    const int64_t most = TEAM_MAX * OWN_COLUMNS_MAX;
    return any ? most : min_i64(most, shared_budget(1) / (2 * (int64_t)sizeof(float)));
}

// out: where each of the SUMS goes, those that are given. OWN: columns of a thread.
template <typename T, int W, int OWN, int ROWS, int SUMS>
static void layernorm_backward_launch(T *dx, const Tensor (&out)[COLUMN_SUMS], const T *dout, const T *x, const T *w, const float *mean, const float *rstd,
                                      const T *dresidual, int64_t rows, int64_t C, bool accumulate, Stream stream) {
    const int64_t team_threads = round_up(ceil_div(C, OWN), 32), ring = STEPS_AHEAD * ROWS * 3 * C * (int64_t)sizeof(T); // of a team
    const int64_t budget = shared_budget(ROWS);
    constexpr bool vectors = W == vec_width<T>();
    const bool ahead = vectors && ring <= budget;
    const int64_t teams_fit = TEAM_MAX / team_threads, teams = ahead ? min_i64(teams_fit, budget / ring) : teams_fit, threads = teams * team_threads;
    const int64_t shared = teams * max_i64(ahead ? ring : 0, 2 * C * (int64_t)sizeof(float));
    auto kernel = ahead ? layernorm_backward_kernel<T, W, OWN / W, ROWS, SUMS, vectors> : layernorm_backward_kernel<T, W, OWN / W, ROWS, SUMS, false>;
    shared_bytes_allow(kernel, shared);
    const int64_t at_once = min_i64(blocks_at_once(kernel, (int)threads, shared), 4 * sm_count()); // scratch_bytes counts on 4
    const int64_t blocks = max_i64(1, min_i64(ceil_div(rows, teams * ROWS), at_once));
    float *partial = (float *)scratch_get(blocks * SUMS * C * (int64_t)sizeof(float), stream);
    kernel<<<grid_blocks(blocks), (unsigned)threads, (size_t)shared, (cudaStream_t)stream>>>(dx, partial, dout, x, w, mean, rstd, dresidual, (int)rows, (int)C,
                                                                                             (int)team_threads);
    launch_check();
    columns_reduce(out, SUMS, partial, (int)blocks, C, accumulate, (cudaStream_t)stream);
}

template <typename T, int W, int SUMS>
static void layernorm_backward_by_width(T *dx, const Tensor (&out)[COLUMN_SUMS], const T *dout, const T *x, const T *w, const float *mean, const float *rstd,
                                        const T *dresidual, int64_t rows, int64_t C, bool accumulate, Stream stream) {
    auto launch = C <= TEAM_MAX * OWN_COLUMNS        ? layernorm_backward_launch<T, W, OWN_COLUMNS, 2, SUMS>
                  : C <= TEAM_MAX * OWN_COLUMNS_WIDE ? layernorm_backward_launch<T, W, OWN_COLUMNS_WIDE, 1, SUMS>
                                                     : layernorm_backward_launch<T, W, OWN_COLUMNS_MAX, 1, SUMS>;
    launch(dx, out, dout, x, w, mean, rstd, dresidual, rows, C, accumulate, stream);
}

void cuda::layernorm_backward(Tensor dx, Tensor dw, Tensor db, Tensor sum_dresidual, Tensor sum_dx, Tensor dout, Tensor x, Tensor w, Tensor mean,
                              Tensor rstd, Tensor dresidual, bool accumulate, Stream stream) {
    const char *const name = "layernorm_backward";
    const int64_t rows = tensor_rows(x), C = tensor_columns(x);
    check_act(name, "dx", dx, rows, C, x.dtype);
    check_act(name, "dout", dout, rows, C, x.dtype);
    check_act(name, "w", w, 1, C, x.dtype);
    check_weight_grad(name, "dw", dw, 1, C, x.dtype);
    check_weight_grad(name, "db", db, 1, C, x.dtype);
    check_f32(name, "mean", mean, 1, rows);
    check_f32(name, "rstd", rstd, 1, rows);
    if (dresidual.data) check_act(name, "dresidual", dresidual, rows, C, x.dtype);
    if (sum_dresidual.data) check_weight_grad(name, "sum_dresidual", sum_dresidual, 1, C, x.dtype);
    if (sum_dx.data) check_weight_grad(name, "sum_dx", sum_dx, 1, C, x.dtype);
    CHECK(dresidual.data || !sum_dresidual.data, "layernorm_backward: the sum of a dresidual that is not given");
    const Tensor out[COLUMN_SUMS] = {dw, db, sum_dresidual, sum_dx};
    const bool more = sum_dresidual.data || sum_dx.data;
    const bool aligned = C * dtype_bytes(x.dtype) % 16 == 0 && is_aligned(dx.data, 16) && is_aligned(dout.data, 16) && is_aligned(x.data, 16) &&
                         is_aligned(w.data, 16) && is_aligned(dresidual.data, 16);
    CHECK(C <= cuda::layernorm_backward_channels_max(false), "layernorm_backward: %" PRId64 " channels, of at most %" PRId64, C, cuda::layernorm_backward_channels_max(false));
    CHECK(rows <= 1 << 30, "layernorm_backward: %" PRId64 " rows, of at most %d", rows, 1 << 30); // numbers of rows are ints, STEPS_AHEAD beyond the end too
    FLOATX_SWITCH(x.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(), {
        auto launch = more ? layernorm_backward_by_width<floatX, W, 4> : layernorm_backward_by_width<floatX, W, 2>;
        launch(elements<floatX>(dx), out, elements<const floatX>(dout), elements<const floatX>(x), elements<const floatX>(w), elements<const float>(mean),
               elements<const float>(rstd), elements<const floatX>(dresidual), rows, C, accumulate, stream);
    }));
}
