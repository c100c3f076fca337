// embedding.cu - token and position embeddings. Backward sorts the positions by token, so that each row of dwte has one
// writer and the order of its sum is fixed.
#include "common.cuh"

// ---------------------------------------------------------------------------------------------------------------
// Forward

enum { EMBEDDING_THREADS = 128 };

// One block a row of out. A token whose row is not here adds 0; wpe may be null.
template <typename T, int W>
__global__ void __launch_bounds__(EMBEDDING_THREADS)
embedding_forward_kernel(T *out, const int32_t *tokens, const T *wte, const T *wpe, int64_t rows, int64_t first_token, int64_t first_position, int T_, int C) {
    const int64_t r = blockIdx.x, row = tokens[r] - first_token, position = first_position + r % T_;
    const bool here = row >= 0 && row < rows;
    for (int c = threadIdx.x * W; c < C; c += EMBEDDING_THREADS * W) {
        Vec<T, W> a, b;
        if (here) a = vec_load<W>(wte + row * C + c);
        if (wpe) b = vec_load<W>(wpe + position * C + c);
#pragma unroll
        for (int i = 0; i < W; i++) a.set(i, (here ? a.at(i) : 0.0f) + (wpe ? b.at(i) : 0.0f));
        vec_store<W>(out + r * C + c, a);
    }
}

static void check_embedding(const char *kernel, Tensor rows, Tensor wpe, int64_t V, int64_t first_token, int64_t first_position) {
    CHECK(rows.ndim == 3 && V <= INT32_MAX && first_token >= 0 && first_position >= 0 && (!wpe.data || tensor_rows(wpe) >= first_position + rows.shape[1]),
          "%s: %d dimensions, T %" PRId64 ", tokens from %" PRId64 ", positions from %" PRId64 " of %" PRId64, kernel, rows.ndim, rows.shape[1], first_token,
          first_position, tensor_rows(wpe));
}

void cuda::embedding_forward(Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t V, int64_t first_token, int64_t first_position, Stream stream) {
    const int64_t rows = tensor_rows(out), T = out.shape[1], C = tensor_columns(out);
    const cudaStream_t s = (cudaStream_t)stream;
    check_embedding("embedding_forward", out, wpe, V, first_token, first_position);
    check_act("embedding_forward", "wte", wte, tensor_rows(wte), C, out.dtype);
    if (wpe.data) check_act("embedding_forward", "wpe", wpe, tensor_rows(wpe), C, out.dtype);
    const bool aligned = C * dtype_bytes(out.dtype) % 16 == 0 && is_aligned(out.data, 16) && is_aligned(wte.data, 16) && is_aligned(wpe.data, 16);
    if (rows == 0) return;
    FLOATX_SWITCH(out.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(),
        embedding_forward_kernel<floatX, W><<<grid_blocks(rows), EMBEDDING_THREADS, 0, s>>>(
            elements<floatX>(out), tokens, elements<const floatX>(wte), elements<const floatX>(wpe), tensor_rows(wte), first_token, first_position,
            (int)T, (int)C)));
    launch_check();
}

// One block a row of x.
template <typename T, int W>
__global__ void __launch_bounds__(EMBEDDING_THREADS)
position_forward_kernel(T *x, const T *wpe, int64_t first_row, int64_t T_, int64_t first_position, int C) {
    const int64_t r = blockIdx.x, position = first_position + (first_row + r) % T_;
    for (int c = threadIdx.x * W; c < C; c += EMBEDDING_THREADS * W) {
        Vec<T, W> a = vec_load<W>(x + r * C + c), b = vec_load<W>(wpe + position * C + c);
#pragma unroll
        for (int i = 0; i < W; i++) a.set(i, a.at(i) + b.at(i));
        vec_store<W>(x + r * C + c, a);
    }
}

static void check_positions(const char *kernel, Tensor wpe, int64_t first_row, int64_t T, int64_t first_position) {
    CHECK(first_row >= 0 && T > 0 && first_position >= 0 && tensor_rows(wpe) >= first_position + T,
          "%s: rows from %" PRId64 ", T %" PRId64 ", positions from %" PRId64 " of %" PRId64, kernel, first_row, T, first_position, tensor_rows(wpe));
}

void cuda::position_forward(Tensor x, Tensor wpe, int64_t first_row, int64_t T, int64_t first_position, Stream stream) {
    const int64_t rows = tensor_rows(x), C = tensor_columns(x);
    const cudaStream_t s = (cudaStream_t)stream;
    check_positions("position_forward", wpe, first_row, T, first_position);
    check_act("position_forward", "wpe", wpe, tensor_rows(wpe), C, x.dtype);
    const bool aligned = C * dtype_bytes(x.dtype) % 16 == 0 && is_aligned(x.data, 16) && is_aligned(wpe.data, 16);
    if (rows == 0) return;
    FLOATX_SWITCH(x.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(),
        position_forward_kernel<floatX, W><<<grid_blocks(rows), EMBEDDING_THREADS, 0, s>>>(
            elements<floatX>(x), elements<const floatX>(wpe), first_row, T, first_position, (int)C)));
    launch_check();
}

// W floats at p, 16 bytes at a time where W allows it.
template <int W> __device__ static inline void floats_load(float (&x)[W], const float *p) {
    constexpr int S = W % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int i = 0; i < W; i += S) {
        Vec<float, S> v = vec_load<S>(p + i);
#pragma unroll
        for (int j = 0; j < S; j++) x[i + j] = v.v[j];
    }
}
template <int W> __device__ static inline void floats_store(float *p, const float (&x)[W]) {
    constexpr int S = W % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int i = 0; i < W; i += S) {
        Vec<float, S> v;
#pragma unroll
        for (int j = 0; j < S; j++) v.v[j] = x[i + j];
        vec_store<S>(p + i, v);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Backward of the positions: dwpe[first_position + t] (+)= sum of the rows of dout at t. The other rows get nothing.

// One block a row of dwpe.
template <typename T, int W>
__global__ void __launch_bounds__(EMBEDDING_THREADS)
position_backward_kernel(float *dwpe, const T *dout, int64_t rows, int64_t first_row, int64_t T_, int64_t first_position, int C, bool accumulate) {
    const int64_t p = blockIdx.x, t = p - first_position;
    int64_t first = 0, n = 0; // rows first, first + T_, ... are at this position
    if (t >= 0 && t < T_) {
        first = (t - first_row % T_ + T_) % T_;
        n = first < rows ? (rows - first + T_ - 1) / T_ : 0;
    }
    for (int c = threadIdx.x * W; c < C; c += EMBEDDING_THREADS * W) {
        float sum[W] = {};
        if (accumulate) floats_load<W>(sum, dwpe + p * C + c);
#pragma unroll 8
        for (int64_t b = 0; b < n; b++) {
            Vec<T, W> d = vec_load<W>(dout + (b * T_ + first) * C + c);
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] += d.at(i);
        }
        floats_store<W>(dwpe + p * C + c, sum);
    }
}

static void position_backward_launch(Tensor dwpe, Tensor dout, int64_t first_row, int64_t T, int64_t first_position, bool accumulate, cudaStream_t s) {
    const int64_t C = tensor_columns(dout);
    const bool aligned = C * dtype_bytes(dout.dtype) % 16 == 0 && is_aligned(dout.data, 16) && is_aligned(dwpe.data, 16);
    FLOATX_SWITCH(dout.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(),
        position_backward_kernel<floatX, W><<<grid_blocks(tensor_rows(dwpe)), EMBEDDING_THREADS, 0, s>>>(
            elements<float>(dwpe), elements<const floatX>(dout), tensor_rows(dout), first_row, T, first_position, (int)C, accumulate)));
    launch_check();
}

void cuda::position_backward(Tensor dwpe, Tensor dout, int64_t first_row, int64_t T, int64_t first_position, bool accumulate, Stream stream) {
    check_positions("position_backward", dwpe, first_row, T, first_position);
    check_f32("position_backward", "dwpe", dwpe, tensor_rows(dwpe), tensor_columns(dout));
    position_backward_launch(dwpe, dout, first_row, T, first_position, accumulate, (cudaStream_t)stream);
}

// ---------------------------------------------------------------------------------------------------------------
// Backward of the tokens
//
// The sorted positions are cut into chunks of fixed length, and equal tokens form runs:
//
//     chunk        |---- 0 ----|---- 1 ----|---- 2 ----|
//     token         a a b b b b c c c c c c c c c d d e
//                               ^ starts in 1, ends in 2
//
// A block adds up one chunk in order. A run that lies within the chunk goes to dwte straight away: nobody else has this
// token. Of a run that crosses a border, a chunk holds the beginning (it comes last there) and later chunks the
// continuation (it comes first, and may fill the chunk): these sums go to scratch, and a second kernel lets the chunk
// where the run begins add the continuations in order.
//
// Where dwte has a part of the vocabulary, tokens are numbered from its first row, and the others sort to the end, as one
// token behind its last: chunks and runs of it are passed over.

enum { CHUNK = 32, BATCH = 4 }; // positions of a block; of them, those whose rows are read at once

// Whether the run at sorted place i continues what was before the chunk, or goes on after it.
__device__ static inline bool run_came_in(const int32_t *sorted, int64_t first) { return first > 0 && sorted[first - 1] == sorted[first]; }
__device__ static inline bool run_goes_on(const int32_t *sorted, int64_t last, int64_t n) {
    return last + 1 < n && sorted[last + 1] == sorted[last];
}

// scratch: (chunks, 2, C), [0] the sum of the run that came in, [1] of the run that begins here and goes on.
template <typename T, int W>
__global__ void __launch_bounds__(EMBEDDING_THREADS)
token_chunk_kernel(float *dwte, float *sums, const int32_t *sorted, const int32_t *place, const T *dout, int64_t n, int64_t rows, int C, int column_blocks) {
    __shared__ int32_t token[CHUNK], from[CHUNK];
    int64_t chunk = blockIdx.x / column_blocks, first = chunk * CHUNK;
    int count = first + CHUNK < n ? CHUNK : (int)(n - first);
    if ((int)threadIdx.x < count) {
        token[threadIdx.x] = sorted[first + threadIdx.x];
        from[threadIdx.x] = place[first + threadIdx.x];
    }
    __syncthreads();
    while (count > 0 && token[count - 1] >= rows) count--;
    int last = count - 1, c = ((int)(blockIdx.x % column_blocks) * EMBEDDING_THREADS + threadIdx.x) * W;
    if (c >= C || count == 0) return;
    const bool came_in = run_came_in(sorted, first), goes_on = run_goes_on(sorted, first + last, n);
    float sum[W] = {};
    for (int at = 0; at < count; at += BATCH) {
        Vec<T, W> d[BATCH];
        float old[BATCH][W];
        bool ends[BATCH], continued[BATCH], continues[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const int i = at + k;
            if (i >= count) break;
            ends[k] = i == last || token[i + 1] != token[i];
            continued[k] = came_in && token[i] == token[0]; // also when it fills the chunk and goes on
            continues[k] = goes_on && token[i] == token[last];
            d[k] = vec_load<W>(dout + (int64_t)from[i] * C + c);
            if (ends[k] && !continued[k] && !continues[k]) floats_load<W>(old[k], dwte + (int64_t)token[i] * C + c);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (at + k >= count) break;
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] += d[k].at(i);
            if (!ends[k]) continue;
            if (continued[k]) floats_store<W>(sums + chunk * 2 * C + c, sum);
            else if (continues[k]) floats_store<W>(sums + (chunk * 2 + 1) * C + c, sum);
            else {
#pragma unroll
                for (int i = 0; i < W; i++) sum[i] += old[k][i];
                floats_store<W>(dwte + (int64_t)token[at + k] * C + c, sum);
            }
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] = 0;
        }
    }
}

// The chunk in which a crossing run begins adds it up.
__global__ void __launch_bounds__(EMBEDDING_THREADS)
token_join_kernel(float *dwte, const float *sums, const int32_t *sorted, int64_t n, int64_t rows, int C, int column_blocks) {
    int64_t chunk = blockIdx.x / column_blocks;
    int c = (int)(blockIdx.x % column_blocks) * EMBEDDING_THREADS + threadIdx.x;
    int64_t last = chunk * CHUNK + CHUNK - 1;
    if (last >= n - 1 || !run_goes_on(sorted, last, n) || sorted[last] >= rows) return;
    int32_t token = sorted[last];
    if (sorted[chunk * CHUNK] == token && run_came_in(sorted, chunk * CHUNK)) return; // began earlier
    int64_t end = chunk + 1; // the first chunk that does not begin with this token; a warp looks at 32 at once
    for (unsigned same = ~0u; same == ~0u;) {
        int64_t k = end + threadIdx.x % 32;
        same = __ballot_sync(0xffffffffu, k * CHUNK < n && sorted[k * CHUNK] == token);
        end += same == ~0u ? 32 : __ffs((int)~same) - 1;
    }
    if (c >= C) return;
    float sum = sums[(chunk * 2 + 1) * C + c];
#pragma unroll 8
    for (int64_t k = chunk + 1; k < end; k++) sum += sums[k * 2 * C + c];
    dwte[(int64_t)token * C + c] += sum;
}

// order = 0, 1, ...; and, unless keys is null, the rows of tokens in dwte, or `rows` where it has none.
__global__ void __launch_bounds__(256) sort_input_kernel(int32_t *order, int32_t *keys, const int32_t *tokens, int64_t rows, int64_t first_token, int n) {
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    order[i] = i;
    if (!keys) return;
    int64_t row = tokens[i] - first_token;
    keys[i] = (int32_t)(row >= 0 && row < rows ? row : rows);
}

static void tokens_backward(Tensor dwte, const int32_t *tokens, Tensor dout, int64_t V, int64_t first_token, Stream stream) {
    const int64_t n = tensor_rows(dout), C = tensor_columns(dout), rows = tensor_rows(dwte);
    const cudaStream_t s = (cudaStream_t)stream;
    const bool part = first_token > 0 || rows < V; // else tokens are their own keys
    int bits = 1; // of a key
    while (bits < 31 && rows + (part ? 1 : 0) > (1ll << bits)) bits++;
    size_t sort_bytes = 0;
    cudaCheck(sort_pairs(NULL, &sort_bytes, tokens, NULL, NULL, NULL, (int)n, bits, s));
    const int64_t chunks = ceil_div(n, CHUNK), list_bytes = round_up(n * 4, 256), lists = part ? 4 : 3, sums_bytes = round_up(chunks * 2 * C * 4, 256);
    char *memory = (char *)scratch_get(lists * list_bytes + sums_bytes + (int64_t)sort_bytes, stream);
    int32_t *order = (int32_t *)memory, *sorted = (int32_t *)(memory + list_bytes), *place = (int32_t *)(memory + 2 * list_bytes);
    int32_t *keys = part ? (int32_t *)(memory + 3 * list_bytes) : NULL;
    float *sums = (float *)(memory + lists * list_bytes);
    void *sort_memory = memory + lists * list_bytes + sums_bytes;
    sort_input_kernel<<<grid_blocks(ceil_div(n, 256)), 256, 0, s>>>(order, keys, tokens, rows, first_token, (int)n);
    launch_check();
    cudaCheck(sort_pairs(sort_memory, &sort_bytes, part ? keys : tokens, sorted, order, place, (int)n, bits, s));
    const int join_blocks = (int)ceil_div(C, EMBEDDING_THREADS);
    const bool aligned = C * dtype_bytes(dout.dtype) % 16 == 0 && is_aligned(dout.data, 16) && is_aligned(dwte.data, 16);
    FLOATX_SWITCH(dout.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(), {
        const int column_blocks = (int)ceil_div(C, EMBEDDING_THREADS * W);
        token_chunk_kernel<floatX, W><<<grid_blocks(chunks * column_blocks), EMBEDDING_THREADS, 0, s>>>(
            elements<float>(dwte), sums, sorted, place, elements<const floatX>(dout), n, rows, (int)C, column_blocks);
        launch_check();
        token_join_kernel<<<grid_blocks(chunks * join_blocks), EMBEDDING_THREADS, 0, s>>>(
            elements<float>(dwte), sums, sorted, n, rows, (int)C, join_blocks);
        launch_check();
    }));
}

void cuda::embedding_backward(Tensor dwte, Tensor dwpe, const int32_t *tokens, Tensor dout, int64_t V, int64_t first_token, int64_t first_position,
                              bool accumulate_wte, bool accumulate_wpe, Stream stream) {
    const int64_t n = tensor_rows(dout), C = tensor_columns(dout);
    const cudaStream_t s = (cudaStream_t)stream;
    check_embedding("embedding_backward", dout, dwpe, V, first_token, first_position);
    check_f32("embedding_backward", "dwte", dwte, tensor_rows(dwte), C);
    if (dwpe.data) check_f32("embedding_backward", "dwpe", dwpe, tensor_rows(dwpe), C);
    CHECK(n < INT32_MAX, "embedding_backward: %" PRId64 " tokens", n);
    if (!accumulate_wte) cudaCheck(cudaMemsetAsync(dwte.data, 0, (size_t)tensor_bytes(dwte), s));
    if (dwpe.data) position_backward_launch(dwpe, dout, 0, dout.shape[1], first_position, accumulate_wpe, s);
    if (n > 0) tokens_backward(dwte, tokens, dout, V, first_token, stream);
}
