// attention.cpp - causal self-attention, one head of one sequence at a time, on the tiles of tile.h.
//
// Nothing of size T x T is ever stored. Forward holds the scores of TILE_ROWS queries (O(T)); backward holds the
// probabilities of one block of queries against one block of keys and recomputes them from the saved logarithm of the
// denominator (Dao et al. 2022). Blocks above the diagonal and beyond the window are skipped; in those on their edges, masked
// scores become -infinity.
//
// A head's q, k, v and so on are copied to fp32 rows of HSp = HS rounded up to whole tiles, Tp rows; the rest is zero.
#include "tile.h"
#include "vector_math.h"
#include <omp.h>

namespace cpu {

// Queries and keys of a block: a multiple of both sides of a tile. Queries of a part when heads are few. Work (T^2 C) below
// which one thread does it all.
enum { ATTENTION_BLOCK = TILE_ROWS == 6 ? 48 : 64, SPLIT_QUERIES = 2 * ATTENTION_BLOCK, SERIAL_PRODUCTS = 1 << 20 };
static_assert(ATTENTION_BLOCK % TILE_ROWS == 0 && ATTENTION_BLOCK % TILE_COLUMNS == 0, "whole tiles");

// Copies rows 0 .. n-1 of a head: element d of row t is element at + t*row + d of x.
static void load_head(float *dst, int64_t HSp, Tensor x, int64_t at, int64_t row, int64_t n, int64_t HS) {
    for (int64_t t = 0; t < n; t++) floats_load(dst + t * HSp, x.data, x.dtype, at + t * row, HS);
}

// ---------------------------------------------------------------------------------------------------------------
// Forward

// x becomes exp((x - largest) * scale) for elements first .. n-1 of room and 0 elsewhere. Returns the sum; *lse is its
// logarithm, with the largest put back.
static double softmax_row(float *__restrict x, int64_t first, int64_t n, int64_t room, float scale, float *lse) {
    double sum = 0;
    for (int64_t j = 0; j < first; j++) x[j] = -INFINITY;
    for (int64_t j = n; j < room; j++) x[j] = -INFINITY;
    const float largest = largest_of(x, room);
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < room; j++) {
        x[j] = exp_fast((x[j] - largest) * scale);
        sum += (double)x[j];
    }
    *lse = (float)((double)largest * (double)scale + log(sum));
    return sum;
}

// Queries t0 .. t1-1 of head h of sequence b. t0 is a multiple of TILE_ROWS.
static void forward_head(Tensor out, Tensor lse, Tensor qkv, int64_t NH, int64_t window, int64_t b, int64_t h, int64_t t0, int64_t t1) {
    const int64_t T = qkv.shape[1], C = tensor_columns(out), HS = C / NH, HSp = round_up(HS, TILE_COLUMNS), Tp = round_up(t1, ATTENTION_BLOCK);
    const int64_t at = b * T * 3 * C + h * HS, floats = 3 * Tp * HSp + Tp * HS + TILE_ROWS * Tp;
    float *q = scratch_floats(floats), *k = q + Tp * HSp, *v = k + Tp * HSp, *k_t = v + Tp * HSp, *scores = k_t + Tp * HS;
    memset(q, 0, (size_t)floats * 4);
    load_head(q + t0 * HSp, HSp, qkv, at + t0 * 3 * C, 3 * C, t1 - t0, HS);
    load_head(k, HSp, qkv, at + C, 3 * C, t1, HS);
    load_head(v, HSp, qkv, at + 2 * C, 3 * C, t1, HS);
    transpose(k_t, Tp, k, HSp, t1, HS);
    const float scale = 1.0f / sqrtf((float)HS);
    for (int64_t t = t0; t < t1; t += TILE_ROWS) {
        const int64_t rows = min_i64(TILE_ROWS, t1 - t), end = t + rows, oldest = max_i64(0, t - window + 1); // keys that these queries see
        const int64_t first = oldest / TILE_COLUMNS * TILE_COLUMNS, keys = end - first, room = round_up(keys, TILE_COLUMNS);
        UNINITIALIZED float tile[TILE];
        double sum[TILE_ROWS];
        for (int64_t s = first; s < end; s += TILE_COLUMNS) tile_multiply(scores + s - first, Tp, NULL, q + t * HSp, HSp, 1, k_t + s, Tp, HS);
        for (int64_t r = 0; r < rows; r++)
            sum[r] = softmax_row(scores + r * Tp, max_i64(0, t + r - window + 1 - first), t + r + 1 - first, room, scale, (float *)lse.data + (b * NH + h) * T + t + r);
        for (int64_t d = 0; d < HS; d += TILE_COLUMNS) {
            const int64_t n = min_i64(TILE_COLUMNS, HS - d);
            tile_multiply(tile, TILE_COLUMNS, NULL, scores, Tp, 1, v + first * HSp + d, HSp, keys);
            for (int64_t r = 0; r < rows; r++) {
                float *row = tile + r * TILE_COLUMNS;
                const float factor = (float)(1.0 / sum[r]);
                for (int64_t j = 0; j < TILE_COLUMNS; j++) row[j] *= factor;
                row_store(out, (b * T + t + r) * C + h * HS + d, n, row);
            }
        }
    }
    free(q);
}

void attention_forward(Tensor out, Tensor lse, Tensor qkv, int NH, int64_t window, Stream stream) {
    KERNEL_WRITES(stream, out, lse);
    KERNEL_READS(stream, qkv);
    const int64_t B = qkv.shape[0], T = qkv.shape[1], C = tensor_columns(out);
    CHECK(qkv.ndim == 3 && NH > 0 && C % NH == 0 && window >= 0, "attention_forward: C %" PRId64 ", NH %d, window %" PRId64, C, NH, window);
    check_act("attention_forward", "out", out, B * T, C, qkv.dtype);
    check_shape("attention_forward", "qkv", qkv, B * T, 3 * C);
    check_f32("attention_forward", "lse", lse, B * NH, T);
    // With few heads, queries are split as well; each part then loads the keys for itself.
    const int64_t step = B * NH >= 2 * omp_get_max_threads() ? T : (int64_t)SPLIT_QUERIES;
#pragma omp parallel for collapse(2) schedule(dynamic) if (B * T * T * C > SERIAL_PRODUCTS)
    for (int64_t t0 = (T - 1) / step * step; t0 >= 0; t0 -= step) // the last queries see most keys: first
        for (int64_t bh = 0; bh < B * NH; bh++) forward_head(out, lse, qkv, NH, window ? min_i64(window, T) : T, bh / NH, bh % NH, t0, min_i64(T, t0 + step));
}

// ---------------------------------------------------------------------------------------------------------------
// Backward

// One head's operands, each Tp rows of HSp; k_t and v_t are HS rows of Tp; lse and D have Tp elements; p and ds are one block.
typedef struct {
    int64_t T, HS, HSp, Tp, window;
    float scale, *memory, *q, *k, *v, *dout, *dq, *dk, *dv, *k_t, *v_t, *lse, *D, *p, *ds;
} Head;

static float *take(float **from, int64_t n) {
    float *p = *from;
    *from += n;
    return p;
}

static Head head_make(int64_t T, int64_t HS, int64_t window) {
    const int64_t HSp = round_up(HS, TILE_COLUMNS), Tp = round_up(T, ATTENTION_BLOCK), rows = Tp * HSp, block = ATTENTION_BLOCK * ATTENTION_BLOCK;
    const int64_t floats = 7 * rows + 2 * Tp * HS + 2 * Tp + 2 * block;
    float *at = scratch_floats(floats);
    memset(at, 0, (size_t)floats * 4);
    Head h = {T, HS, HSp, Tp, window, 1.0f / sqrtf((float)HS), at};
    float **const wide[] = {&h.q, &h.k, &h.v, &h.dout, &h.dq, &h.dk, &h.dv};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) *wide[i] = take(&at, rows);
    h.k_t = take(&at, Tp * HS);
    h.v_t = take(&at, Tp * HS);
    h.p = take(&at, block);
    h.ds = take(&at, block);
    h.lse = take(&at, Tp);
    h.D = take(&at, Tp);
    return h;
}

// P and dS of queries t0 .. t0+ATTENTION_BLOCK-1 against keys s0 .. likewise; tiles wholly above the diagonal are not touched.
static void block_probabilities(const Head *h, int64_t t0, int64_t s0) {
    UNINITIALIZED float score[TILE], dp[TILE];
    for (int64_t t = t0; t < t0 + ATTENTION_BLOCK; t += TILE_ROWS)
        for (int64_t s = s0; s < min_i64(s0 + ATTENTION_BLOCK, t + TILE_ROWS); s += TILE_COLUMNS) {
            tile_multiply(score, TILE_COLUMNS, NULL, h->q + t * h->HSp, h->HSp, 1, h->k_t + s, h->Tp, h->HS);
            tile_multiply(dp, TILE_COLUMNS, NULL, h->dout + t * h->HSp, h->HSp, 1, h->v_t + s, h->Tp, h->HS);
            for (int r = 0; r < TILE_ROWS; r++) {
                const float lse = h->lse[t + r], D = h->D[t + r];
                const int visible = (int)min_i64(t + r - s + 1, TILE_COLUMNS); // keys s .. t+r, from the oldest on
                const int oldest = (int)min_i64(max_i64(t + r - s + 1 - h->window, 0), TILE_COLUMNS);
                float *__restrict p = h->p + (t - t0 + r) * ATTENTION_BLOCK + s - s0, *__restrict ds = h->ds + (p - h->p);
#pragma omp simd
                for (int j = 0; j < TILE_COLUMNS; j++) {
                    const float e = exp_fast(score[r * TILE_COLUMNS + j] * h->scale - lse);
                    p[j] = j < visible && j >= oldest ? e : 0.0f;
                    ds[j] = p[j] * (dp[r * TILE_COLUMNS + j] - D) * h->scale;
                }
            }
        }
}

// dv, dk of the block's keys and dq of its queries, from P and dS.
static void block_gradients(const Head *h, int64_t t0, int64_t s0) {
    for (int64_t d = 0; d < h->HS; d += TILE_COLUMNS) {
        for (int64_t s = s0; s < s0 + ATTENTION_BLOCK; s += TILE_ROWS) {
            const int64_t t = max_i64(t0, s), n = t0 + ATTENTION_BLOCK - t, at = (t - t0) * ATTENTION_BLOCK + s - s0; // earlier queries do not see key s
            float *dv = h->dv + s * h->HSp + d, *dk = h->dk + s * h->HSp + d;
            tile_multiply(dv, h->HSp, dv, h->p + at, 1, ATTENTION_BLOCK, h->dout + t * h->HSp + d, h->HSp, n);
            tile_multiply(dk, h->HSp, dk, h->ds + at, 1, ATTENTION_BLOCK, h->q + t * h->HSp + d, h->HSp, n);
        }
        for (int64_t t = t0; t < t0 + ATTENTION_BLOCK; t += TILE_ROWS) {
            const int64_t keys = min_i64(ATTENTION_BLOCK, t + TILE_ROWS - s0);
            float *dq = h->dq + t * h->HSp + d;
            tile_multiply(dq, h->HSp, dq, h->ds + (t - t0) * ATTENTION_BLOCK, ATTENTION_BLOCK, 1, h->k + s0 * h->HSp + d, h->HSp, keys);
        }
    }
}

static void backward_head(Tensor dqkv, Tensor dout, Tensor qkv, Tensor out, Tensor lse, int64_t NH, int64_t window, int64_t b, int64_t n) {
    const int64_t T = qkv.shape[1], C = tensor_columns(out), HS = C / NH, at = b * T * 3 * C + n * HS, at_out = b * T * C + n * HS;
    Head h = head_make(T, HS, window);
    load_head(h.q, h.HSp, qkv, at, 3 * C, T, HS);
    load_head(h.k, h.HSp, qkv, at + C, 3 * C, T, HS);
    load_head(h.v, h.HSp, qkv, at + 2 * C, 3 * C, T, HS);
    load_head(h.dout, h.HSp, dout, at_out, C, T, HS);
    load_head(h.dq, h.HSp, out, at_out, C, T, HS); // for D; zero again below
    transpose(h.k_t, h.Tp, h.k, h.HSp, T, HS);
    transpose(h.v_t, h.Tp, h.v, h.HSp, T, HS);
    for (int64_t t = 0; t < h.Tp; t++) {
        double D = 0;
        for (int64_t d = 0; d < HS; d++) D += (double)h.dout[t * h.HSp + d] * (double)h.dq[t * h.HSp + d];
        h.D[t] = (float)D;
        h.lse[t] = t < T ? ((const float *)lse.data)[(b * NH + n) * T + t] : INFINITY; // rows of padding: P = 0
    }
    memset(h.dq, 0, (size_t)(T * h.HSp) * 4);
    for (int64_t s0 = 0; s0 < T; s0 += ATTENTION_BLOCK)
        for (int64_t t0 = s0; t0 < min_i64(T, s0 + ATTENTION_BLOCK + window - 1); t0 += ATTENTION_BLOCK) {
            block_probabilities(&h, t0, s0);
            block_gradients(&h, t0, s0);
        }
    for (int64_t t = 0; t < T; t++) {
        row_store(dqkv, at + t * 3 * C, HS, h.dq + t * h.HSp);
        row_store(dqkv, at + t * 3 * C + C, HS, h.dk + t * h.HSp);
        row_store(dqkv, at + t * 3 * C + 2 * C, HS, h.dv + t * h.HSp);
    }
    free(h.memory);
}

void attention_backward(Tensor dqkv, Tensor dout, Tensor qkv, Tensor out, Tensor lse, int NH, int64_t window, bool deterministic, Stream stream) {
    (void)deterministic; // one thread sums a head, always in the same order
    KERNEL_WRITES(stream, dqkv);
    KERNEL_READS(stream, dout, qkv, out, lse);
    const int64_t B = qkv.shape[0], T = qkv.shape[1], C = tensor_columns(out);
    CHECK(qkv.ndim == 3 && NH > 0 && C % NH == 0 && window >= 0, "attention_backward: C %" PRId64 ", NH %d, window %" PRId64, C, NH, window);
    check_act("attention_backward", "dqkv", dqkv, B * T, 3 * C, qkv.dtype);
    check_act("attention_backward", "dout", dout, B * T, C, qkv.dtype);
    check_act("attention_backward", "out", out, B * T, C, qkv.dtype);
    check_shape("attention_backward", "qkv", qkv, B * T, 3 * C);
    check_f32("attention_backward", "lse", lse, B * NH, T);
#pragma omp parallel for schedule(dynamic) if (B * T * T * C > SERIAL_PRODUCTS)
    for (int64_t bh = 0; bh < B * NH; bh++) backward_head(dqkv, dout, qkv, out, lse, NH, window ? min_i64(window, T) : T, bh / NH, bh % NH);
}

} // namespace cpu
