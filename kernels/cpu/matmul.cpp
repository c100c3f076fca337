// matmul.cpp - the three matrix products of a linear layer, as one blocked product C = A B with epilogues.
//
// Blocks: K is cut into pieces of BLOCK_K, so that a panel of B (BLOCK_K x TILE_COLUMNS) stays in the L1 cache while the
// panels of A pass by; rows and columns are cut into pieces that bound the packed copies. For each block the threads
// together pack A into panels [k][TILE_ROWS] and B into panels [k][TILE_COLUMNS] (conversion from 16 bits happens
// there), then share the tiles. Until the last piece of K, tiles are kept as they are in a buffer; then the epilogue turns
// them into results, while they are in the L1 cache.
#include "tile.h"
#include "vector_math.h"
#include <omp.h>

namespace cpu {

enum {
    BLOCK_K = 256,
    BLOCK_M = 4096 / TILE_ROWS * TILE_ROWS,   // rows packed at a time
    BLOCK_N = 1024,                           // columns packed at a time
    TASK_M = 96,                              // most rows and columns of a thread's piece of work: its part of A stays in L2;
    TASK_N = 256,                             // both are whole tiles after halving twice as well
    PACK_M = 48, PACK_N = 64,                 // lines that a thread packs at a time
    PACK_SCRATCH = TILE_COLUMNS * BLOCK_K,
    SERIAL_FMAS = 1 << 20,                    // products smaller than this stay on the calling thread
};

// One factor: element (line, k) of A, or (k, line) of B, is element line*line_stride + k*k_stride of t. One stride is 1.
typedef struct {
    Tensor t;
    int64_t line_stride, k_stride, lines;
} Factor;

// What becomes of a finished row piece x of C, in this order; tensors whose data is null are skipped.
typedef struct {
    Tensor out;         // (M,N): the result
    Tensor bias;        // (N): x += bias
    Tensor pre_gelu;    // (M,N): pre_gelu = x, x = gelu(x)
    Tensor residual;    // (M,N): x += residual
    Tensor gelu_input;  // (M,N): x *= gelu'(gelu_input)
    bool accumulate;    // x += out
} Epilogue;

static inline __attribute__((always_inline)) void finish_row(const Epilogue *e, float *__restrict x, int64_t at, int64_t column, int64_t n) {
    UNINITIALIZED float scratch[TILE_COLUMNS];
    if (e->bias.data) {
        const float *b = row_load(e->bias, column, n, scratch);
        for (int64_t j = 0; j < n; j++) x[j] += b[j];
    }
    if (e->pre_gelu.data) {
        row_store(e->pre_gelu, at, n, x);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) x[j] = gelu(x[j]);
    }
    if (e->residual.data) {
        const float *r = row_load(e->residual, at, n, scratch);
        for (int64_t j = 0; j < n; j++) x[j] += r[j];
    }
    if (e->gelu_input.data) {
        const float *g = row_load(e->gelu_input, at, n, scratch);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) x[j] *= gelu_derivative(g[j]);
    }
    if (e->accumulate) {
        const float *o = row_load(e->out, at, n, scratch);
        for (int64_t j = 0; j < n; j++) x[j] += o[j];
    }
    row_store(e->out, at, n, x);
}

static void finish_tile(const Epilogue *e, float *tile, int64_t m, int64_t n, int64_t rows, int64_t columns) {
    const int64_t N = tensor_columns(e->out);
    for (int64_t r = 0; r < rows; r++) {
        if (columns == TILE_COLUMNS) finish_row(e, tile + r * TILE_COLUMNS, (m + r) * N + n, n, TILE_COLUMNS);
        else finish_row(e, tile + r * TILE_COLUMNS, (m + r) * N + n, n, columns);
    }
}

// Packs lines first .. first+count-1, elements k0 .. k0+K-1, into panels of `width` lines: dst[panel][k][line]. Lines that the
// factor does not have are zero. count is a multiple of width and scratch has PACK_SCRATCH floats.
static inline __attribute__((always_inline)) void pack(float *dst, const Factor *f, int64_t first, int64_t count, int64_t width,
                                                       int64_t k0, int64_t K, float *scratch) {
    const int64_t there = min_i64(count, f->lines - first), whole = there / width * width;
    if (there < count) memset(dst + whole * K, 0, (size_t)((count - whole) * K) * 4);
    if (f->line_stride == 1) {
        for (int64_t k = 0; k < K; k++) {
            const float *src = row_load(f->t, first + (k0 + k) * f->k_stride, there, scratch);
            for (int64_t i = 0; i < whole; i += width) memcpy(dst + i * K + k * width, src + i, (size_t)width * 4);
            for (int64_t i = whole; i < there; i++) dst[whole * K + k * width + i - whole] = src[i];
        }
        return;
    }
    for (int64_t i = 0; i < there; i += width) {
        const int64_t lines = min_i64(width, there - i), at = (first + i) * f->line_stride + k0;
        if (f->t.dtype == DTYPE_FP32) {
            transpose(dst + i * K, width, (const float *)f->t.data + at, f->line_stride, lines, K);
        } else {
            for (int64_t j = 0; j < lines; j++) floats_load(scratch + j * K, f->t.data, f->t.dtype, at + j * f->line_stride, K);
            transpose(dst + i * K, width, scratch, K, lines, K);
        }
    }
}

static_assert(TASK_M / 4 % TILE_ROWS == 0 && TASK_N / 4 % TILE_COLUMNS == 0 && PACK_M % TILE_ROWS == 0 && PACK_N % TILE_COLUMNS == 0, "whole tiles");
static_assert(PACK_SCRATCH >= PACK_M && PACK_SCRATCH >= PACK_N, "a row of lines fits");

// A block of the product: operands that are packed, and what its tiles are.
typedef struct {
    const float *a, *b;      // packed panels
    float *partial;          // tiles between pieces of K, [tile row][tile column][TILE]
    int64_t m0, n0, m, n, K; // first row and column in C; rows, columns and terms of the block
    bool first, last;        // piece of K
    int64_t task_m, task_n;  // rows and columns that a thread takes at a time
} Block;

// Pieces of work: large, but at least three a thread if they can be had.
static void size_tasks(Block *k, int64_t threads) {
    k->task_m = TASK_M;
    k->task_n = TASK_N;
    for (int halvings = 0; halvings < 4 && ceil_div(k->m, k->task_m) * ceil_div(k->n, k->task_n) < 3 * threads; halvings++) {
        if (k->task_n > TASK_N / 4) k->task_n /= 2;
        else k->task_m /= 2;
    }
}

// Tiles of rows i0 .. i1-1, columns j0 .. j1-1 of the block; i0 and j0 are multiples of the tile's sides.
static void multiply_tiles(const Block *k, const Epilogue *e, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    UNINITIALIZED float finished[TILE];
    const int64_t tiles_across = ceil_div(k->n, TILE_COLUMNS);
    for (int64_t j = j0; j < j1; j += TILE_COLUMNS)
        for (int64_t i = i0; i < i1; i += TILE_ROWS) {
            float *kept = k->partial + (i / TILE_ROWS * tiles_across + j / TILE_COLUMNS) * TILE;
            float *tile = k->last ? finished : kept;
            const float *a = k->a + i * k->K, *b = k->b + j * k->K;
            if (k->first) tile_multiply(tile, TILE_COLUMNS, NULL, a, 1, TILE_ROWS, b, TILE_COLUMNS, k->K);
            else tile_multiply(tile, TILE_COLUMNS, kept, a, 1, TILE_ROWS, b, TILE_COLUMNS, k->K);
            if (k->last) finish_tile(e, tile, k->m0 + i, k->n0 + j, min_i64(TILE_ROWS, i1 - i), min_i64(TILE_COLUMNS, j1 - j));
        }
}

// C = A B with C of a->lines x b->lines, K terms each.
static void multiply(const Factor *a, const Factor *b, int64_t K, const Epilogue *e) {
    const int64_t M = a->lines, N = b->lines, step_k = min_i64(K, BLOCK_K);
    const int64_t room_m = round_up(min_i64(M, BLOCK_M), TILE_ROWS), room_n = round_up(min_i64(N, BLOCK_N), TILE_COLUMNS);
    float *packed_a = scratch_floats(room_m * step_k), *packed_b = scratch_floats(room_n * step_k);
    float *partial = scratch_floats(K > BLOCK_K ? room_m * room_n : 1);
#pragma omp parallel if (M * N * K > SERIAL_FMAS)
    {
        float *scratch = scratch_floats(PACK_SCRATCH);
        for (int64_t m0 = 0; m0 < M; m0 += BLOCK_M)
            for (int64_t n0 = 0; n0 < N; n0 += BLOCK_N)
                for (int64_t k0 = 0; k0 < K; k0 += BLOCK_K) {
                    Block block = {packed_a, packed_b, partial, m0, n0, min_i64(BLOCK_M, M - m0), min_i64(BLOCK_N, N - n0),
                                         min_i64(BLOCK_K, K - k0), k0 == 0, k0 + BLOCK_K >= K, 0, 0};
                    size_tasks(&block, omp_get_num_threads());
                    if (m0 + n0 + k0 > 0) {
#pragma omp barrier // the packed copies of the block before are still being read
                    }
#pragma omp for schedule(dynamic) nowait
                    for (int64_t i = 0; i < block.m; i += PACK_M)
                        pack(packed_a + i * block.K, a, m0 + i, round_up(min_i64(PACK_M, block.m - i), TILE_ROWS), TILE_ROWS, k0, block.K, scratch);
#pragma omp for schedule(dynamic)
                    for (int64_t j = 0; j < block.n; j += PACK_N)
                        pack(packed_b + j * block.K, b, n0 + j, round_up(min_i64(PACK_N, block.n - j), TILE_COLUMNS), TILE_COLUMNS, k0, block.K, scratch);
#pragma omp for collapse(2) schedule(dynamic) nowait
                    for (int64_t i = 0; i < block.m; i += block.task_m)
                        for (int64_t j = 0; j < block.n; j += block.task_n)
                            multiply_tiles(&block, e, i, min_i64(i + block.task_m, block.m), j, min_i64(j + block.task_n, block.n));
                }
        free(scratch);
    }
    free(packed_a);
    free(packed_b);
    free(partial);
}

// The (rows, K) tensor as a factor that is multiplied over its columns, or over its rows.
static Factor over_columns(Tensor t) { return {t, tensor_columns(t), 1, tensor_rows(t)}; }
static Factor over_rows(Tensor t) { return {t, 1, tensor_columns(t), tensor_columns(t)}; }

void linear_forward(Tensor out, Tensor inp, Tensor w, Tensor bias, Tensor residual, Tensor pre_gelu, Stream stream) {
    KERNEL_WRITES(stream, out, pre_gelu);
    KERNEL_READS(stream, inp, w, bias, residual);
    const int64_t N = tensor_rows(inp), C = tensor_columns(inp), OC = tensor_columns(out);
    const char *kernel = "linear_forward";
    check_act(kernel, "out", out, N, OC, inp.dtype);
    check_act(kernel, "w", w, OC, C, inp.dtype);
    if (bias.data) check_act(kernel, "bias", bias, 1, OC, inp.dtype);
    if (residual.data) check_act(kernel, "residual", residual, N, OC, inp.dtype);
    if (pre_gelu.data) check_act(kernel, "pre_gelu", pre_gelu, N, OC, inp.dtype);
    CHECK(!residual.data || !pre_gelu.data, "linear_forward: residual %p and pre_gelu %p", residual.data, pre_gelu.data);
    const Factor a = over_columns(inp), b = over_columns(w);
    const Epilogue e = {out, bias, pre_gelu, residual, tensor_none(), false};
    multiply(&a, &b, C, &e);
}

void linear_gelu_forward(Tensor out, Tensor pre_gelu, Tensor inp, Tensor w, Tensor bias, Stream stream) {
    linear_forward(pre_gelu, inp, w, bias, tensor_none(), tensor_none(), stream);
    gelu_forward(out, pre_gelu, stream);
}

void linear_backward_input(Tensor dinp, Tensor sum_dinp, Tensor dout, Tensor w, Tensor pre_gelu, bool accumulate, Stream stream) {
    KERNEL_WRITES(stream, dinp);
    KERNEL_READS(stream, dout, w, pre_gelu);
    const int64_t N = tensor_rows(dout), OC = tensor_columns(dout), C = tensor_columns(dinp);
    const char *kernel = "linear_backward_input";
    check_act(kernel, "dinp", dinp, N, C, dout.dtype);
    check_act(kernel, "w", w, OC, C, dout.dtype);
    if (pre_gelu.data) check_act(kernel, "pre_gelu", pre_gelu, N, C, dout.dtype);
    const Factor a = over_columns(dout), b = over_rows(w);
    const Epilogue e = {dinp, tensor_none(), tensor_none(), tensor_none(), pre_gelu, false};
    multiply(&a, &b, OC, &e);
    if (sum_dinp.data) bias_backward(sum_dinp, dinp, accumulate, stream);
}

void linear_backward_weight(Tensor dw, Tensor dbias, Tensor dout, Tensor inp, bool accumulate, Stream stream) {
    KERNEL_WRITES(stream, dw, dbias);
    KERNEL_READS(stream, dout, inp);
    const int64_t N = tensor_rows(dout), OC = tensor_columns(dout), C = tensor_columns(inp);
    const char *kernel = "linear_backward_weight";
    check_weight_grad(kernel, "dw", dw, OC, C, dout.dtype);
    check_act(kernel, "inp", inp, N, C, dout.dtype);
    if (dbias.data) bias_backward(dbias, dout, accumulate, stream);
    const Factor a = over_rows(dout), b = over_rows(inp);
    const Epilogue e = {dw, tensor_none(), tensor_none(), tensor_none(), tensor_none(), accumulate};
    multiply(&a, &b, N, &e);
}

void matmul_search(bool on, const char *cache_path) { (void)on; (void)cache_path; }

} // namespace cpu
