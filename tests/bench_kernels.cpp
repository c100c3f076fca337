// bench_kernels.cpp - how long each kernel takes at the sizes of a GPT, and what a training step adds up to.
// Built and run by scripts/bench_kernels.sh. Data are random (zeros would run faster), tensors are larger than the cache,
// times are medians between events. Rates count what the mathematics needs: causal attention as half of the square, five
// products backward; memory as each operand read or written once. Shares are of the GPU's 16-bit peak, and of the rate at which
// the device copies.
#include "../kernels/kernels.h"
#include "../runtime/metrics.h"

enum { BENCH_HEAD_ROWS = 8192 }; // what train_gpt.run.logits_bytes' default makes of 50,304 logits in 16 bits

typedef struct {
    int64_t B, T, C, NH, L, V, Vp, N, window; // window: of attention
    DType act;
    Stream stream;
    int repeats;
    double step_ms;                       // sum of what was measured, times how often a step does it
    double peak_tflops, copy_tbs;         // limits: of the data sheet (0 = unknown), and measured
    int64_t n_head;                       // rows that the head works on at once
    Tensor x, y, dx, narrow;              // (B,T,C)
    Tensor qkv, dqkv, wide, gelu;         // (B,T,3C), (B,T,4C)
    Tensor logits, losses, lse, mean, rstd;
    Tensor wte, wpe, w, vector;           // w: the largest weight of a block, (4C,C)
    Tensor dw, dvector, dwpe;             // fp32
    Tensor param, master, grad, m, v;     // flat, as many as the model has
    int32_t *tokens;
    double *sum;
    UpdateControl *control;
} Bench;

// ---------------------------------------------------------------------------------------------------------------
// Memory, filled with random numbers

enum { POOL = 1 << 20 };

static void fill_random(const Bench *b, Tensor t, double mean, double deviation) {
    static float values[POOL];
    uint8_t *bytes = (uint8_t *)host_alloc((size_t)(POOL * dtype_bytes(t.dtype)));
    for (int64_t i = 0; i < POOL; i++) values[i] = (float)(mean + deviation * rng_normal(1, (uint64_t)(uintptr_t)t.data, (uint64_t)i));
    for (int64_t i = 0; i < POOL; i++) dtype_store(bytes, t.dtype, i, values[i]);
    const int64_t total = tensor_bytes(t), piece = POOL * dtype_bytes(t.dtype);
    device_copy(t.data, bytes, min_i64(piece, total), COPY_TO_DEVICE, b->stream);
    for (int64_t done = piece; done < total; done *= 2) device_copy((char *)t.data + done, t.data, min_i64(done, total - done), COPY_ON_DEVICE, b->stream);
    stream_sync(b->stream);
    free(bytes);
}

static Tensor random_tensor(const Bench *b, DType t, int64_t r0, int64_t r1, int64_t columns, double mean, double deviation) {
    Tensor x = tensor3(NULL, t, r0, r1, columns);
    x.data = device_malloc(tensor_bytes(x));
    fill_random(b, x, mean, deviation);
    return x;
}

static void bench_init(Bench *b, int64_t B, int64_t T, int64_t L, int64_t NH, int64_t C) {
    memset(b, 0, sizeof *b);
    b->B = B; b->T = T; b->C = C; b->NH = NH; b->L = L; b->V = 50257; b->Vp = 50304; b->N = B * T;
    b->n_head = min_i64(b->N, BENCH_HEAD_ROWS);
    b->act = DTYPE_BF16;
    b->repeats = 20;
    b->stream = stream_create();
    const int64_t parameters = (b->Vp + T + 2) * C + L * (12 * C * C + 13 * C);
    b->x = random_tensor(b, b->act, B, T, C, 0, 1);
    b->y = random_tensor(b, b->act, B, T, C, 0, 1);
    b->dx = random_tensor(b, b->act, B, T, C, 0, 0.01);
    b->narrow = random_tensor(b, b->act, B, T, C, 0, 0.01);
    b->qkv = random_tensor(b, b->act, B, T, 3 * C, 0, 1);
    b->dqkv = random_tensor(b, b->act, B, T, 3 * C, 0, 0.01);
    b->wide = random_tensor(b, b->act, B, T, 4 * C, 0, 1);
    b->gelu = random_tensor(b, b->act, B, T, 4 * C, 0, 1);
    b->logits = random_tensor(b, b->act, 1, b->n_head, b->Vp, 0, 1);
    b->losses = random_tensor(b, DTYPE_FP32, 1, 1, b->N, 0, 1);
    b->lse = random_tensor(b, DTYPE_FP32, B, b->NH, T, 0, 1);
    b->mean = random_tensor(b, DTYPE_FP32, 1, 1, b->N, 0, 0.1);
    b->rstd = random_tensor(b, DTYPE_FP32, 1, 1, b->N, 1, 0.01);
    b->wte = random_tensor(b, b->act, 1, b->Vp, C, 0, 0.02);
    b->wpe = random_tensor(b, b->act, 1, T, C, 0, 0.02);
    b->w = random_tensor(b, b->act, 1, 4 * C, C, 0, 0.02);
    b->vector = random_tensor(b, b->act, 1, 1, 4 * C, 1, 0.02);
    b->dw = random_tensor(b, DTYPE_FP32, 1, b->Vp, C, 0, 0.02);
    b->dvector = random_tensor(b, DTYPE_FP32, 1, 1, 4 * C, 0, 0.02);
    b->dwpe = random_tensor(b, DTYPE_FP32, 1, T, C, 0, 0.02);
    b->param = random_tensor(b, b->act, 1, 1, parameters, 0, 0.02);
    b->master = random_tensor(b, DTYPE_FP32, 1, 1, parameters, 0, 0.02);
    b->grad = random_tensor(b, DTYPE_FP32, 1, 1, parameters, 0, 0.02);
    b->m = random_tensor(b, DTYPE_FP32, 1, 1, parameters, 0, 0.001);
    b->v = random_tensor(b, DTYPE_FP32, 1, 1, parameters, 1, 0.001);
    b->sum = (double *)device_malloc(8);
    static const UpdateControl control = {1, 1, 1, 1};
    b->control = (UpdateControl *)device_malloc(sizeof control);
    device_copy(b->control, &control, sizeof control, COPY_TO_DEVICE, b->stream);
    int32_t *tokens = (int32_t *)host_alloc((size_t)b->N * 4);
    for (int64_t i = 0; i < b->N; i++) tokens[i] = (int32_t)((double)b->V * pow(rng_uniform(1, 2, (uint64_t)i), 4)); // some are frequent, as in text
    b->tokens = (int32_t *)device_malloc(b->N * 4);
    device_copy(b->tokens, tokens, b->N * 4, COPY_TO_DEVICE, b->stream);
    stream_sync(b->stream);
    free(tokens);
}

// A tensor's memory as (rows, columns).
static Tensor view(Tensor t, int64_t rows, int64_t columns) { return tensor2(t.data, t.dtype, rows, columns); }
static Tensor first(Tensor t, int64_t n) { return tensor1(t.data, t.dtype, n); }

// ---------------------------------------------------------------------------------------------------------------
// The kernels. Each function enqueues one call.

static Tensor rows_of(const Bench *b, Tensor t, int64_t columns) { return view(t, b->N, columns); }

static void run_embedding_forward(Bench *b) { embedding_forward(b->x, b->tokens, b->wte, b->wpe, b->V, 0, 0, b->stream); }
static void run_layernorm_forward(Bench *b) { layernorm_forward(b->y, b->mean, b->rstd, b->x, first(b->vector, b->C), first(b->vector, b->C), 1e-5f, b->stream); }
static void run_residual_layernorm(Bench *b) { residual_layernorm_forward(b->narrow, b->y, b->mean, b->rstd, b->x, b->dx, first(b->vector, b->C), first(b->vector, b->C), first(b->vector, b->C), 1e-5f, b->stream); }
static void run_layernorm_backward(Bench *b) {
    layernorm_backward(b->dx, first(b->dvector, b->C), first(b->dvector, b->C), tensor_none(), tensor_none(), b->narrow, b->x, first(b->vector, b->C), b->mean, b->rstd, b->dx, true, b->stream);
}
static void run_layernorm_backward_sums(Bench *b) {
    Tensor sum[4];
    for (int k = 0; k < 4; k++) sum[k] = tensor1((float *)b->dvector.data + k * b->C, DTYPE_FP32, b->C);
    layernorm_backward(b->dx, sum[0], sum[1], sum[2], sum[3], b->narrow, b->x, first(b->vector, b->C), b->mean, b->rstd, b->dx, true, b->stream);
}
static void run_attention_forward(Bench *b) { attention_forward(b->y, b->lse, b->qkv, (int)b->NH, b->window, b->stream); }
static void run_attention_backward(Bench *b) { attention_backward(b->dqkv, b->narrow, b->qkv, b->y, b->lse, (int)b->NH, b->window, true, b->stream); }
static void run_attention_backward_any_order(Bench *b) { attention_backward(b->dqkv, b->narrow, b->qkv, b->y, b->lse, (int)b->NH, b->window, false, b->stream); }
static void run_attention_forward_128(Bench *b) { attention_forward(b->y, tensor3(b->lse.data, DTYPE_FP32, b->B, b->NH / 2, b->T), b->qkv, (int)b->NH / 2, 0, b->stream); }
static void run_attention_backward_128(Bench *b) { attention_backward(b->dqkv, b->narrow, b->qkv, b->y, tensor3(b->lse.data, DTYPE_FP32, b->B, b->NH / 2, b->T), (int)b->NH / 2, 0, true, b->stream); }
static void run_classifier(Bench *b) { classifier_forward_backward(b->logits, first(b->losses, b->n_head), b->tokens, b->V, 1.0f, true, b->stream); }
static void run_embedding_backward(Bench *b) { embedding_backward(b->dw, b->dwpe, b->tokens, b->narrow, b->V, 0, 0, true, false, b->stream); }
static void run_sum_squares(Bench *b) { sum_squares_to_double(b->sum, &b->grad, 1, false, b->stream); }
static void run_hash_words(Bench *b) { hash_words((uint64_t *)b->sum, b->param, 0, false, b->stream); }
static const AdamWArgs adamw_args = {1e-6f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f, 0.5f, true};
static Tensor as_type(Tensor t, DType type) { return tensor1(t.data, type, tensor_numel(t)); }
static void update_as(Bench *b, DType master, DType grad) {
    const UpdateRange r = {b->param, as_type(b->master, master), as_type(b->grad, grad), {b->m, b->v}, tensor_numel(b->param)};
    adamw_update(&r, 1, adamw_args, b->control, b->stream);
}
static void run_adamw(Bench *b) { update_as(b, DTYPE_REMAINDER, DTYPE_FP32); }
static void run_adamw_bf16_grad(Bench *b) { update_as(b, DTYPE_REMAINDER, DTYPE_BF16); }
static void run_adamw_fp32_masters(Bench *b) { update_as(b, DTYPE_FP32, DTYPE_FP32); }
static void run_sum_squares_bf16(Bench *b) {
    const Tensor half = as_type(b->grad, DTYPE_BF16);
    sum_squares_to_double(b->sum, &half, 1, false, b->stream);
}
static void run_gelu_forward(Bench *b) { gelu_forward(b->gelu, b->wide, b->stream); }
static void run_gelu_backward(Bench *b) { gelu_backward(b->wide, b->wide, b->gelu, b->stream); }
static void run_bias_backward(Bench *b) { bias_backward(first(b->dvector, 4 * b->C), rows_of(b, b->wide, 4 * b->C), true, b->stream); }
static void run_fc_forward(Bench *b) { linear_forward(rows_of(b, b->gelu, 4 * b->C), b->x, view(b->w, 4 * b->C, b->C), first(b->vector, 4 * b->C), tensor_none(), rows_of(b, b->wide, 4 * b->C), b->stream); }
static void run_fc_forward_no_gelu(Bench *b) { linear_forward(rows_of(b, b->gelu, 4 * b->C), b->x, view(b->w, 4 * b->C, b->C), first(b->vector, 4 * b->C), tensor_none(), tensor_none(), b->stream); }
static void run_fc_backward_input(Bench *b) { linear_backward_input(b->dx, tensor_none(), rows_of(b, b->wide, 4 * b->C), view(b->w, 4 * b->C, b->C), tensor_none(), false, b->stream); }
static void run_fc_backward_weight(Bench *b) { linear_backward_weight(view(b->dw, 4 * b->C, b->C), tensor_none(), rows_of(b, b->wide, 4 * b->C), b->x, true, b->stream); }
static void run_fcproj_forward(Bench *b) { linear_forward(b->y, rows_of(b, b->gelu, 4 * b->C), view(b->w, b->C, 4 * b->C), first(b->vector, b->C), b->x, tensor_none(), b->stream); }
static void run_fcproj_backward_input(Bench *b) { linear_backward_input(rows_of(b, b->wide, 4 * b->C), first(b->dvector, 4 * b->C), b->narrow, view(b->w, b->C, 4 * b->C), rows_of(b, b->gelu, 4 * b->C), true, b->stream); }
static void run_fcproj_backward_input_no_gelu(Bench *b) { linear_backward_input(rows_of(b, b->wide, 4 * b->C), tensor_none(), b->narrow, view(b->w, b->C, 4 * b->C), tensor_none(), false, b->stream); }
static void run_fcproj_backward_weight(Bench *b) { linear_backward_weight(view(b->dw, b->C, 4 * b->C), tensor_none(), b->narrow, rows_of(b, b->gelu, 4 * b->C), true, b->stream); }
static void run_qkv_forward(Bench *b) { linear_forward(b->qkv, b->x, view(b->w, 3 * b->C, b->C), first(b->vector, 3 * b->C), tensor_none(), tensor_none(), b->stream); }
static void run_qkv_backward_input(Bench *b) { linear_backward_input(b->dx, tensor_none(), b->dqkv, view(b->w, 3 * b->C, b->C), tensor_none(), false, b->stream); }
static void run_qkv_backward_weight(Bench *b) { linear_backward_weight(view(b->dw, 3 * b->C, b->C), first(b->dvector, 3 * b->C), b->dqkv, b->x, true, b->stream); }
static void run_proj_forward(Bench *b) { linear_forward(b->y, b->x, view(b->w, b->C, b->C), tensor_none(), tensor_none(), tensor_none(), b->stream); }
static void run_proj_backward_input(Bench *b) { linear_backward_input(b->dx, tensor_none(), b->narrow, view(b->w, b->C, b->C), tensor_none(), false, b->stream); }
static void run_proj_backward_weight(Bench *b) { linear_backward_weight(view(b->dw, b->C, b->C), tensor_none(), b->narrow, b->x, true, b->stream); }
static void run_head_forward(Bench *b) { linear_forward(b->logits, view(b->x, b->n_head, b->C), b->wte, tensor_none(), tensor_none(), tensor_none(), b->stream); }
static void run_head_backward_input(Bench *b) { linear_backward_input(view(b->dx, b->n_head, b->C), tensor_none(), b->logits, b->wte, tensor_none(), false, b->stream); }
static void run_head_backward_weight(Bench *b) { linear_backward_weight(b->dw, tensor_none(), b->logits, view(b->x, b->n_head, b->C), true, b->stream); }
static void run_copy(Bench *b) { device_copy(b->gelu.data, b->wide.data, tensor_bytes(b->wide), COPY_ON_DEVICE, b->stream); }

// ---------------------------------------------------------------------------------------------------------------
// Measuring

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Runs the call, prints its median, and adds it `per_step` times to the step. Rates are printed where flops or bytes are given.
static void measure(Bench *b, const char *name, void (*run)(Bench *), double per_step, double flops, double bytes) {
    enum { REPEATS_MAX = 100 };
    double ms[REPEATS_MAX];
    CHECK(b->repeats <= REPEATS_MAX, "%d repeats", b->repeats);
    Event from = event_create(), to = event_create();
    for (int i = 0; i < 3; i++) run(b);
    for (int i = 0; i < b->repeats; i++) {
        event_record(from, b->stream);
        run(b);
        event_record(to, b->stream);
        event_sync(to);
        ms[i] = event_elapsed_ms(from, to);
    }
    event_destroy(from);
    event_destroy(to);
    qsort(ms, (size_t)b->repeats, sizeof *ms, compare_doubles);
    const double median = ms[b->repeats / 2];
    b->step_ms += per_step * median;
    printf("%-38s %9.4f ms", name, median);
    if (flops > 0) printf("  %7.1f TFLOP/s", flops / median * 1e-9);
    if (bytes > 0) printf("  %7.3f TB/s", bytes / median * 1e-9);
    if (flops > 0 && b->peak_tflops > 0) printf("  %5.1f %% of peak", 100 * flops / median * 1e-9 / b->peak_tflops);
    if (bytes > 0 && !b->copy_tbs) b->copy_tbs = bytes / median * 1e-9; // the first one measured is the copy
    if (bytes > 0 && !flops) printf("  %5.1f %% of copy", 100 * bytes / median * 1e-9 / b->copy_tbs);
    if (per_step > 0) printf("  x %4.1f = %8.3f ms a step", per_step, per_step * median);
    printf("\n");
    fflush(stdout);
}

// Attention at other sizes: B sequences of T, NH heads of HS; window 0 = all. Operations are counted as in model_flops_per_token.
static void measure_attention(const Bench *b, int64_t B, int64_t NH, int64_t T, int64_t HS, int64_t window) {
    Bench at = *b; // with tensors of its own
    const int64_t C = NH * HS;
    at.NH = NH;
    at.window = window;
    at.qkv = random_tensor(b, b->act, B, T, 3 * C, 0, 1);
    at.dqkv = random_tensor(b, b->act, B, T, 3 * C, 0, 0.01);
    at.y = random_tensor(b, b->act, B, T, C, 0, 1);
    at.narrow = random_tensor(b, b->act, B, T, C, 0, 0.01);
    at.lse = random_tensor(b, DTYPE_FP32, B, NH, T, 0, 1);
    const double row = 2 * (double)(B * T * C), W = (double)(window ? window : T), flops = 4 * (double)(B * T * C) * (W - W * W / (2 * (double)T));
    char name[3][64], size[40];
    int n = snprintf(size, sizeof size, "(%d,%d,%d,%d)", (int)B, (int)NH, (int)T, (int)HS);
    if (window) snprintf(size + n, sizeof size - (size_t)n, " of %d", (int)window);
    snprintf(name[0], sizeof name[0], "attention_forward %s", size);
    snprintf(name[1], sizeof name[1], "attention_backward %s", size);
    snprintf(name[2], sizeof name[2], "  the same in any order");
    measure(&at, name[0], run_attention_forward, 0, flops, 4 * row);
    measure(&at, name[1], run_attention_backward, 0, 2.5 * flops, 8 * row);
    measure(&at, name[2], run_attention_backward_any_order, 0, 2.5 * flops, 8 * row);
    Tensor *const own[] = {&at.qkv, &at.dqkv, &at.y, &at.narrow, &at.lse};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) device_free(own[i]->data);
}

int main(int argc, char **argv) {
    int64_t sizes[5] = {64, 1024, 12, 12, 768}; // B, T, L, NH, C
    for (int i = 1; i < argc; i++) {
        if (i > 5 || atoll(argv[i]) < 1) die(EXIT_CONFIG, "usage: bench_kernels [B [T [L [NH [C]]]]], each at least 1");
        sizes[i - 1] = atoll(argv[i]);
    }
    if (sizes[4] % sizes[3] != 0) die(EXIT_CONFIG, "C = %" PRId64 " is no multiple of NH = %" PRId64, sizes[4], sizes[3]);
    device_init(0);
    static Bench bench;
    Bench *b = &bench;
    bench_init(b, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]);
    const DeviceInfo info = device_info();
    b->peak_tflops = device_peak_flops(info.name, b->act) * 1e-12;
    printf("%s, driver CUDA %d, runtime %d; bf16, B %" PRId64 ", T %" PRId64 ", %" PRId64 " blocks, %" PRId64 " heads, C %" PRId64 ", head in pieces of %" PRId64 "\n",
           info.name, info.driver_version, info.runtime_version, b->B, b->T, b->L, b->NH, b->C, b->n_head);
    const double N = (double)b->N, C = (double)b->C, L = (double)b->L, n = (double)tensor_numel(b->grad), row = 2 * N * C; // bytes of (N,C) in bf16
    const double pieces = N / (double)b->n_head, block = 2 * N * C * C, head = 2 * (double)b->n_head * C * (double)b->Vp, attention = 2 * N * (double)b->T * C;

    printf("-- memory\n");
    measure(b, "copy on the device", run_copy, 0, 0, 8 * row);
    measure(b, "embedding_forward", run_embedding_forward, 1, 0, 2 * row);
    measure(b, "layernorm_forward", run_layernorm_forward, L + 1, 0, 2 * row);
    measure(b, "residual_layernorm_forward", run_residual_layernorm, L, 0, 4 * row);
    measure(b, "layernorm_backward", run_layernorm_backward, L + 1, 0, 4 * row);
    measure(b, "layernorm_backward, biases of two", run_layernorm_backward_sums, L, 0, 4 * row);
    measure(b, "classifier, a piece", run_classifier, pieces, 0, 4 * (double)b->n_head * (double)b->Vp);
    measure(b, "embedding_backward", run_embedding_backward, 1, 0, 2 * row);
    measure(b, "bias_backward 4C", run_bias_backward, 0, 0, 4 * row);
    measure(b, "gelu_forward", run_gelu_forward, 0, 0, 8 * row);
    measure(b, "gelu_backward", run_gelu_backward, 0, 0, 12 * row);
    measure(b, "sum_squares", run_sum_squares, 1, 0, 4 * n);
    measure(b, "hash_words of bf16 weights", run_hash_words, 0, 0, 2 * n);
    measure(b, "sum_squares of bf16", run_sum_squares_bf16, 0, 0, 2 * n);
    measure(b, "adamw", run_adamw, 1, 0, 28 * n);
    measure(b, "adamw, gradients in bf16", run_adamw_bf16_grad, 0, 0, 26 * n);
    measure(b, "adamw, fp32 masters", run_adamw_fp32_masters, 0, 0, 30 * n);
    printf("-- attention\n");
    measure(b, "attention_forward", run_attention_forward, L, attention, 4 * row);
    measure(b, "attention_backward", run_attention_backward, L, 2.5 * attention, 8 * row);
    if (b->NH % 2 == 0 && b->C / b->NH <= 64) {
        measure(b, "attention_forward, half the heads", run_attention_forward_128, 0, attention, 4 * row);
        measure(b, "attention_backward, half the heads", run_attention_backward_128, 0, 2.5 * attention, 8 * row);
    }
    printf("-- attention at (B, heads, T, head size)\n");
    measure_attention(b, 64, 12, 1024, 64, 0);
    measure_attention(b, 16, 25, 1024, 64, 0);
    measure_attention(b, 2, 16, 16384, 64, 0);
    measure_attention(b, 8, 32, 2048, 128, 0);
    measure_attention(b, 1, 32, 16384, 128, 0);
    measure_attention(b, 32, 16, 1024, 80, 0);
    measure_attention(b, 32, 16, 1024, 96, 0);
    measure_attention(b, 32, 16, 1024, 128, 0);
    printf("-- attention of a window\n");
    measure_attention(b, 2, 16, 16384, 64, 1024);
    measure_attention(b, 2, 16, 16384, 64, 4096);
    measure_attention(b, 1, 32, 16384, 128, 1024);
    measure_attention(b, 1, 32, 16384, 128, 4096);
    printf("-- products, each with what its unit lets it do for biases\n");
    measure(b, "qkv forward", run_qkv_forward, L, 3 * block, 0);
    measure(b, "qkv backward input", run_qkv_backward_input, L, 3 * block, 0);
    measure(b, "qkv backward weight", run_qkv_backward_weight, L, 3 * block, 0);
    measure(b, "proj forward", run_proj_forward, L, block, 0);
    measure(b, "proj backward input", run_proj_backward_input, L, block, 0);
    measure(b, "proj backward weight", run_proj_backward_weight, L, block, 0);
    measure(b, "fc forward, gelu", run_fc_forward, L, 4 * block, 0);
    measure(b, "fc forward without gelu", run_fc_forward_no_gelu, 0, 4 * block, 0);
    measure(b, "fc backward input", run_fc_backward_input, L, 4 * block, 0);
    measure(b, "fc backward weight", run_fc_backward_weight, L, 4 * block, 0);
    measure(b, "fcproj forward, residual", run_fcproj_forward, L, 4 * block, 0);
    measure(b, "fcproj backward input, gelu, bias", run_fcproj_backward_input, L, 4 * block, 0);
    measure(b, "fcproj backward input without gelu", run_fcproj_backward_input_no_gelu, 0, 4 * block, 0);
    measure(b, "fcproj backward weight", run_fcproj_backward_weight, L, 4 * block, 0);
    measure(b, "head forward, a piece", run_head_forward, pieces, head, 0);
    measure(b, "head backward input, a piece", run_head_backward_input, pieces, head, 0);
    measure(b, "head backward weight, a piece", run_head_backward_weight, pieces, head, 0);
    printf("kernels of a step: %.2f ms, %.0f tokens/s\n", b->step_ms, N / b->step_ms * 1e3);
    return 0;
}
