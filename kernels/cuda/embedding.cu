// embedding.cu - token and position embeddings. Backward sorts the positions by token, so that each row of dwte has one
// writer and the order of its sum is fixed.
#include "common.cuh"

// ---------------------------------------------------------------------------------------------------------------
// Forward

enum { EMBEDDING_THREADS = 128 };

// One block a row of out.
template <typename T, int W>
__global__ void __launch_bounds__(EMBEDDING_THREADS)
embedding_forward_kernel(T *out, const int32_t *tokens, const T *wte, const T *wpe, int T_, int C) {
    int64_t r = blockIdx.x, token = tokens[r], t = r % T_;
    for (int c = threadIdx.x * W; c < C; c += EMBEDDING_THREADS * W) {
        Vec<T, W> a = vec_load<W>(wte + token * C + c), b = vec_load<W>(wpe + t * C + c);
#pragma unroll
        for (int i = 0; i < W; i++) a.set(i, a.at(i) + b.at(i));
        vec_store<W>(out + r * C + c, a);
    }
}

void cuda::embedding_forward(Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, Stream stream) {
    CHECK(out.ndim == 3, "embedding_forward: out has %d dimensions", out.ndim);
    CHECK(tensor_rows(wpe) >= out.shape[1], "embedding_forward: wpe has %" PRId64 " rows for %" PRId64, tensor_rows(wpe), out.shape[1]);
    const int64_t rows = tensor_rows(out), T = out.shape[1], C = out.shape[2];
    const cudaStream_t s = (cudaStream_t)stream;
    check_act("embedding_forward", "wte", wte, tensor_rows(wte), C, out.dtype);
    check_act("embedding_forward", "wpe", wpe, tensor_rows(wpe), C, out.dtype);
    const bool aligned = C * dtype_bytes(out.dtype) % 16 == 0 && is_aligned(out.data, 16) && is_aligned(wte.data, 16) && is_aligned(wpe.data, 16);
    if (rows == 0) return;
    FLOATX_SWITCH(out.dtype, WIDTH_SWITCH(aligned, vec_width<floatX>(),
        embedding_forward_kernel<floatX, W><<<grid_blocks(rows), EMBEDDING_THREADS, 0, s>>>(
            elements<floatX>(out), tokens, elements<const floatX>(wte), elements<const floatX>(wpe), (int)T, (int)C)));
    launch_check();
}

// ---------------------------------------------------------------------------------------------------------------
// Backward of the positions: dwpe[t] (+)= sum over b of dout[b,t]. Row t >= T gets nothing.

// One block a row of dwpe.
template <typename T, int W>
__global__ void __launch_bounds__(EMBEDDING_THREADS)
position_backward_kernel(float *dwpe, const T *dout, int64_t B, int64_t T_, int C, bool accumulate) {
    int64_t t = blockIdx.x;
    for (int c = threadIdx.x * W; c < C; c += EMBEDDING_THREADS * W) {
        float sum[W];
#pragma unroll
        for (int i = 0; i < W; i++) sum[i] = accumulate ? dwpe[t * C + c + i] : 0.0f;
        if (t < T_) {
#pragma unroll 4
            for (int64_t b = 0; b < B; b++) {
                Vec<T, W> d = vec_load<W>(dout + (b * T_ + t) * C + c);
#pragma unroll
                for (int i = 0; i < W; i++) sum[i] += d.at(i);
            }
        }
#pragma unroll
        for (int i = 0; i < W; i++) dwpe[t * C + c + i] = sum[i];
    }
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

enum { CHUNK = 32 };

// Whether the run at sorted place i continues what was before the chunk, or goes on after it.
__device__ static inline bool run_came_in(const int32_t *sorted, int64_t first) { return first > 0 && sorted[first - 1] == sorted[first]; }
__device__ static inline bool run_goes_on(const int32_t *sorted, int64_t last, int64_t n) {
    return last + 1 < n && sorted[last + 1] == sorted[last];
}

// scratch: (chunks, 2, C), [0] the sum of the run that came in, [1] of the run that begins here and goes on.
template <typename T, int W>
__global__ void __launch_bounds__(EMBEDDING_THREADS)
token_chunk_kernel(float *dwte, float *sums, const int32_t *sorted, const int32_t *place, const T *dout, int64_t n, int C, int column_blocks) {
    int64_t chunk = blockIdx.x / column_blocks;
    int c = ((int)(blockIdx.x % column_blocks) * EMBEDDING_THREADS + threadIdx.x) * W;
    if (c >= C) return;
    int64_t first = chunk * CHUNK, last = first + CHUNK < n ? first + CHUNK - 1 : n - 1;
    bool came_in = run_came_in(sorted, first);
    float sum[W];
#pragma unroll
    for (int i = 0; i < W; i++) sum[i] = 0;
    for (int64_t at = first; at <= last; at++) {
        Vec<T, W> d = vec_load<W>(dout + (int64_t)place[at] * C + c);
#pragma unroll
        for (int i = 0; i < W; i++) sum[i] += d.at(i);
        bool ends = at == last || sorted[at + 1] != sorted[at];
        if (!ends) continue;
        float *to; // came_in is true only for the first run; it goes to slot 0 also when it fills the chunk
        if (came_in) to = sums + chunk * 2 * C + c;
        else if (at == last && run_goes_on(sorted, last, n)) to = sums + (chunk * 2 + 1) * C + c;
        else to = NULL;
#pragma unroll
        for (int i = 0; i < W; i++) {
            if (to) to[i] = sum[i];
            else dwte[(int64_t)sorted[at] * C + c + i] += sum[i];
            sum[i] = 0;
        }
        came_in = false;
    }
}

// The chunk in which a crossing run begins adds it up.
__global__ void __launch_bounds__(EMBEDDING_THREADS)
token_join_kernel(float *dwte, const float *sums, const int32_t *sorted, int64_t n, int C, int column_blocks) {
    int64_t chunk = blockIdx.x / column_blocks;
    int c = (int)(blockIdx.x % column_blocks) * EMBEDDING_THREADS + threadIdx.x;
    int64_t last = chunk * CHUNK + CHUNK - 1;
    if (c >= C || last >= n - 1 || !run_goes_on(sorted, last, n)) return;
    int32_t token = sorted[last];
    if (sorted[chunk * CHUNK] == token && run_came_in(sorted, chunk * CHUNK)) return; // began earlier
    float sum = sums[(chunk * 2 + 1) * C + c];
    for (int64_t k = chunk + 1; k * CHUNK < n && sorted[k * CHUNK] == token; k++) sum += sums[k * 2 * C + c];
    dwte[(int64_t)token * C + c] += sum;
}

__global__ void __launch_bounds__(256) iota_kernel(int32_t *out, int n) {
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n) out[i] = i;
}

void cuda::embedding_backward(Tensor dwte, Tensor dwpe, const int32_t *tokens, Tensor dout, bool accumulate_wte, bool accumulate_wpe,
                              Stream stream) {
    CHECK(dout.ndim == 3, "embedding_backward: dout has %d dimensions", dout.ndim);
    CHECK(tensor_rows(dwpe) >= dout.shape[1], "embedding_backward: dwpe has %" PRId64 " rows for %" PRId64, tensor_rows(dwpe), dout.shape[1]);
    const int64_t B = dout.shape[0], T = dout.shape[1], C = dout.shape[2], n = B * T;
    const cudaStream_t s = (cudaStream_t)stream;
    check_f32("embedding_backward", "dwte", dwte, tensor_rows(dwte), C);
    check_f32("embedding_backward", "dwpe", dwpe, tensor_rows(dwpe), C);
    CHECK(n < INT32_MAX, "embedding_backward: %" PRId64 " tokens", n);
    if (!accumulate_wte) cudaCheck(cudaMemsetAsync(dwte.data, 0, (size_t)tensor_bytes(dwte), s));
    int bits = 1; // of a token
    while (bits < 31 && tensor_rows(dwte) > (1ll << bits)) bits++;
    size_t sort_bytes = 0;
    cudaCheck(sort_pairs(NULL, &sort_bytes, tokens, NULL, NULL, NULL, (int)n, bits, s));
    const int64_t chunks = ceil_div(n, CHUNK), list_bytes = round_up(n * 4, 256), sums_bytes = round_up(chunks * 2 * C * 4, 256);
    char *memory = (char *)scratch_get(3 * list_bytes + sums_bytes + (int64_t)sort_bytes, stream);
    int32_t *order = (int32_t *)memory, *sorted = (int32_t *)(memory + list_bytes), *place = (int32_t *)(memory + 2 * list_bytes);
    float *sums = (float *)(memory + 3 * list_bytes);
    void *sort_memory = memory + 3 * list_bytes + sums_bytes;
    if (n > 0) {
        iota_kernel<<<grid_blocks(ceil_div(n, 256)), 256, 0, s>>>(order, (int)n);
        launch_check();
        cudaCheck(sort_pairs(sort_memory, &sort_bytes, tokens, sorted, order, place, (int)n, bits, s));
    }
    const int join_blocks = (int)ceil_div(C, EMBEDDING_THREADS);
    FLOATX_SWITCH(dout.dtype, WIDTH_SWITCH(C % vec_width<floatX>() == 0 && is_aligned(dout.data, 16), vec_width<floatX>(), {
        position_backward_kernel<floatX, W><<<grid_blocks(tensor_rows(dwpe)), EMBEDDING_THREADS, 0, s>>>(
            elements<float>(dwpe), elements<const floatX>(dout), B, T, (int)C, accumulate_wpe);
        launch_check();
        if (n > 0) {
            const int column_blocks = (int)ceil_div(C, EMBEDDING_THREADS * W);
            token_chunk_kernel<floatX, W><<<grid_blocks(chunks * column_blocks), EMBEDDING_THREADS, 0, s>>>(
                elements<float>(dwte), sums, sorted, place, elements<const floatX>(dout), n, (int)C, column_blocks);
            launch_check();
            token_join_kernel<<<grid_blocks(chunks * join_blocks), EMBEDDING_THREADS, 0, s>>>(
                elements<float>(dwte), sums, sorted, n, (int)C, join_blocks);
            launch_check();
        }
    }));
}
