// layernorm.cu - LayerNorm over the last dimension, alone and fused with the residual sum in front of it.
//
// A warp handles a row. Lane l owns vectors l, l + 32, ... of the row in every pass, so a row that a warp has put into
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
// A team of threads (one warp, or several) goes over its rows. A thread owns the same columns in each, as VECTORS vectors
// that lie a team apart, so its share of the sums stays in registers:
//
//     row      [ v v v ... v | v v v ... v | ... ]
//     thread     0 1 2 ... t   0 1 2 ... t
//
// Rows come through shared memory by asynchronous copies, each thread's vectors by its own, ROWS_AHEAD rows before they are
// needed; so the memory is busy while a row's sums are exchanged, and no barrier guards the copies. At the end a block adds
// its teams in order and writes one partial row, and columns_reduce adds the blocks in order.

// A block has 256 threads, and 512 where a row has a thousand columns: at 768 the one is 5 % faster, from 1024 on the other.
enum { TEAM_MAX = 512, BLOCK_THREADS = 256, BLOCK_THREADS_WIDE = 512, WIDE_COLUMNS = 1000, ROWS_AHEAD = 2 };
// Columns of a thread. More would keep more of the row's sums within a warp, but leave too few threads on a processor.
enum { OWN_COLUMNS = 16, OWN_COLUMNS_WIDE = 32 };
// What is summed over the rows; the last two only where one of them is wanted.
enum { SUM_DW, SUM_DB, SUM_DRESIDUAL, SUM_DX };

// Sums of a and b over a team, in a fixed order, for all its threads. of_warp: [2][warps], of which `turn` is used now.
__device__ static inline float2 team_sum(float a, float b, int team, int team_threads, float2 (*of_warp)[TEAM_MAX / 32], int turn) {
    float2 sum = {warp_sum(a), warp_sum(b)};
    if (team_threads == 32) return sum;
    if (threadIdx.x % 32 == 0) of_warp[turn][threadIdx.x / 32] = sum;
    asm volatile("bar.sync %0, %1;" :: "r"(team + 1), "r"(team_threads) : "memory"); // barrier 0 is the block's
    const int first = team * team_threads / 32;
    sum = of_warp[turn][first];
    for (int k = 1; k < team_threads / 32; k++) {
        sum.x += of_warp[turn][first + k].x;
        sum.y += of_warp[turn][first + k].y;
    }
    return sum;
}

// The three rows that the gradient of a row needs; dresidual may be null.
template <typename T> struct BackwardRow {
    const T *dout, *x, *dresidual;
};

// partial is (blocks, SUMS, C), SUMS 2 or 4. AHEAD: rows come through shared memory (W is 16 bytes), else straight from memory.
// Shared memory: the rows of each team, [teams][ROWS_AHEAD][3][C] of T; in the end [teams][2][C] sums.
template <typename T, int W, int VECTORS, int SUMS, bool AHEAD>
__global__ void __launch_bounds__(TEAM_MAX)
layernorm_backward_kernel(T *dx, float *partial, const T *dout, const T *x, const T *w, const float *mean, const float *rstd, const T *dresidual,
                          int64_t rows, int C, int team_threads) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    __shared__ float2 of_warp[2][TEAM_MAX / 32];
    const int team = threadIdx.x / team_threads, teams = blockDim.x / team_threads, rank = threadIdx.x % team_threads;
    const int64_t step = (int64_t)gridDim.x * teams;
    T *ring = reinterpret_cast<T *>(shared_bytes) + (int64_t)team * ROWS_AHEAD * 3 * C;
    float sum[SUMS][VECTORS][W] = {};

    auto copy_ahead = [&](int64_t r, int place) {
        for (int c = rank * W; c < C && r < rows; c += team_threads * W) {
            T *to = ring + place * 3 * C + c;
            copy_async_16(to, dout + r * C + c, true);
            copy_async_16(to + C, x + r * C + c, true);
            if (dresidual) copy_async_16(to + 2 * C, dresidual + r * C + c, true);
        }
        copy_async_group();
    };
    int64_t r = (int64_t)blockIdx.x * teams + team;
    if constexpr (AHEAD)
        for (int k = 0; k < ROWS_AHEAD; k++) copy_ahead(r + k * step, k);
    float next_m = r < rows ? mean[r] : 0, next_s = r < rows ? rstd[r] : 0;
    for (int place = 0, turn = 0; r < rows; r += step, turn ^= 1) {
        const float m = next_m, s = next_s;
        if (r + step < rows) {
            next_m = mean[r + step];
            next_s = rstd[r + step];
        }
        BackwardRow<T> row = {dout + r * C, x + r * C, dresidual ? dresidual + r * C : NULL};
        if constexpr (AHEAD) {
            copy_async_wait_but<ROWS_AHEAD - 1>();
            const T *here = ring + place * 3 * C;
            row = {here, here + C, dresidual ? here + 2 * C : NULL};
        }
        float sum_g = 0, sum_gn = 0;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int c = (k * team_threads + rank) * W;
            if (c >= C) continue;
            Vec<T, W> dv = vec_load<W>(row.dout + c), xv = vec_load<W>(row.x + c), wv = vec_load<W>(w + c);
#pragma unroll
            for (int i = 0; i < W; i++) {
                float d = dv.at(i), n = (xv.at(i) - m) * s, g = d * wv.at(i);
                sum_g += g;
                sum_gn += g * n;
                sum[SUM_DW][k][i] += d * n;
                sum[SUM_DB][k][i] += d;
            }
        }
        const float2 sums = team_sum(sum_g, sum_gn, team, team_threads, of_warp, turn);
        const float mean_g = sums.x / (float)C, mean_gn = sums.y / (float)C;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int c = (k * team_threads + rank) * W;
            if (c >= C) continue;
            Vec<T, W> dv = vec_load<W>(row.dout + c), xv = vec_load<W>(row.x + c), wv = vec_load<W>(w + c), y;
            float base[W] = {};
            if (row.dresidual) {
                Vec<T, W> rv = vec_load<W>(row.dresidual + c);
#pragma unroll
                for (int i = 0; i < W; i++) base[i] = rv.at(i);
            }
#pragma unroll
            for (int i = 0; i < W; i++) {
                float n = (xv.at(i) - m) * s, d = base[i] + s * (dv.at(i) * wv.at(i) - mean_g - n * mean_gn);
                y.set(i, d);
                if constexpr (SUMS > 2) {
                    sum[SUM_DRESIDUAL][k][i] += base[i];
                    sum[SUM_DX][k][i] += d;
                }
            }
            vec_store<W>(dx + r * C + c, y);
        }
        if constexpr (AHEAD) {
            copy_ahead(r + ROWS_AHEAD * step, place);
            place = (place + 1) % ROWS_AHEAD;
        }
    }
    copy_async_wait_all();
    float *sums = reinterpret_cast<float *>(shared_bytes);
#pragma unroll
    for (int first = 0; first < SUMS; first += 2) {
        __syncthreads(); // nobody needs what is there any more: the rows, or two other sums
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int c = (k * team_threads + rank) * W;
            if (c >= C) continue;
#pragma unroll
            for (int i = 0; i < W; i++) {
                sums[(team * 2) * C + c + i] = sum[first][k][i];
                sums[(team * 2 + 1) * C + c + i] = sum[first + 1][k][i];
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

// out: where each of the SUMS goes, those that are given.
template <typename T, int W, int VECTORS, int SUMS>
static void layernorm_backward_launch(T *dx, const Tensor (&out)[COLUMN_SUMS], const T *dout, const T *x, const T *w, const float *mean, const float *rstd,
                                      const T *dresidual, int64_t rows, int64_t C, bool accumulate, Stream stream) {
    const int team_threads = (int)round_up(ceil_div(C, VECTORS * W), 32);
    const int teams = max(1, (C < WIDE_COLUMNS ? BLOCK_THREADS : BLOCK_THREADS_WIDE) / team_threads), threads = teams * team_threads;
    const int64_t ring = teams * ROWS_AHEAD * 3 * C * (int64_t)sizeof(T), sums = teams * 2 * C * (int64_t)sizeof(float);
    constexpr bool vectors = W == vec_width<T>();
    const bool ahead = vectors && ring <= shared_bytes_max() - 1024;
    const int64_t shared = ahead ? max_i64(ring, sums) : sums;
    auto kernel = ahead ? layernorm_backward_kernel<T, W, VECTORS, SUMS, vectors> : layernorm_backward_kernel<T, W, VECTORS, SUMS, false>;
    shared_bytes_allow(kernel, shared);
    const int64_t at_once = min_i64(blocks_at_once(kernel, threads, shared), 4 * sm_count()); // scratch_bytes counts on 4
    const int64_t blocks = max_i64(1, min_i64(ceil_div(rows, teams), at_once));
    float *partial = (float *)scratch_get(blocks * SUMS * C * (int64_t)sizeof(float), stream);
    kernel<<<grid_blocks(blocks), threads, (size_t)shared, (cudaStream_t)stream>>>(dx, partial, dout, x, w, mean, rstd, dresidual, rows, (int)C, team_threads);
    launch_check();
    columns_reduce(out, SUMS, partial, (int)blocks, C, accumulate, (cudaStream_t)stream);
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
    const bool more = sum_dresidual.data || sum_dx.data, wide = C > TEAM_MAX * OWN_COLUMNS;
    const bool aligned = C * dtype_bytes(x.dtype) % 16 == 0 && is_aligned(dx.data, 16) && is_aligned(dout.data, 16) && is_aligned(x.data, 16) &&
                         is_aligned(w.data, 16) && is_aligned(dresidual.data, 16);
    CHECK(C <= TEAM_MAX * OWN_COLUMNS_WIDE, "layernorm_backward: %" PRId64 " channels, of at most %d", C, TEAM_MAX * OWN_COLUMNS_WIDE);
    FLOATX_SWITCH(x.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(), {
        auto launch = wide ? (more ? layernorm_backward_launch<floatX, W, OWN_COLUMNS_WIDE / W, 4> : layernorm_backward_launch<floatX, W, OWN_COLUMNS_WIDE / W, 2>)
                           : (more ? layernorm_backward_launch<floatX, W, OWN_COLUMNS / W, 4> : layernorm_backward_launch<floatX, W, OWN_COLUMNS / W, 2>);
        launch(elements<floatX>(dx), out, elements<const floatX>(dout), elements<const floatX>(x), elements<const floatX>(w), elements<const float>(mean),
               elements<const float>(rstd), elements<const floatX>(dresidual), rows, C, accumulate, stream);
    }));
}
