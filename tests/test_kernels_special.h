// test_kernels_special.h - kernels on values that are no ordinary numbers, on masters in two parts, and by every path of an update.
//
// A part of test_kernels.h.
#pragma once

// ---------------------------------------------------------------------------------------------------------------
// Special values

// Errors of the CPU's exponential and GELU over their range, against the C library in double.
static void test_vector_math(Test *t) {
    double worst_exp = 0, worst_gelu = 0, worst_slope = 0;
    int64_t n = 0;
    for (float x = -87.3f; x < 88.7f; x += 0.0007f, n++) worst_exp = fmax(worst_exp, fabs((double)exp_fast(x) / exp((double)x) - 1));
    for (float x = -9.0f; x < 9.0f; x += 0.0001f, n++) {
        const double want = (double)x / (1 + exp(-2 * sqrt(2 / M_PI) * ((double)x + 0.044715 * pow((double)x, 3)))); // no cancellation
        if (fabsf(x) > 1e-6f) worst_gelu = fmax(worst_gelu, fabs((double)gelu(x) / want - 1) * (x < -3.0f ? 0.1 : 1));
        worst_slope = fmax(worst_slope, fabs((double)gelu_derivative(x) - reference_gelu_slope((double)x)));
    }
    t->compared += n;
    // exp: half an ulp each from the last multiplication and addition (1.2e-7), and a little from the polynomial.
    expect_near(t, "relative error of exp_fast", worst_exp, 0, 1.5e-7);
    // GELU: the error of the exponent enters as such; below -3 the exponent is large, and so is the relative error (but not the value).
    expect_near(t, "relative error of gelu", worst_gelu, 0, 1.2e-6);
    expect_near(t, "error of gelu_derivative", worst_slope, 0, 5e-7);
    expect_true(t, exp_fast(-INFINITY) == 0 && exp_fast(-1e30f) == 0 && exp_fast(-1e7f) == 0 && exp_fast(-88.0f) == 0, "exp_fast far below is not 0");
    expect_true(t, exp_fast(0.0f) == 1, "exp_fast(0) is %.9g", (double)exp_fast(0.0f));
    expect_true(t, exp_fast(1e9f) > 3e38f && exp_fast(INFINITY) > 3e38f && exp_fast(INFINITY) < INFINITY, "exp_fast far above is %g", (double)exp_fast(1e9f));
    expect_true(t, isnan(exp_fast(NAN)) && isnan(gelu(NAN)) && isnan(gelu_derivative(NAN)), "NaN is lost");
    expect_true(t, gelu(-1e30f) <= 0 && gelu(-1e30f) > -1e-7f && gelu(1e30f) == 1e30f, "gelu far out is %g, %g", (double)gelu(-1e30f), (double)gelu(1e30f));
}

// One kernel on operands given as bytes: copies them to the backend's memory, calls, and copies back.
typedef struct {
    void *bytes, *memory;
    int64_t n_bytes;
} RawOperand;
static void raw_run(void (*call)(RawOperand *op, bool backend, Stream s), RawOperand *op, int n, bool backend) {
    Stream s = stream_create();
    for (int i = 0; i < n; i++) {
        op[i].memory = op[i].bytes;
        if (!backend) continue;
        op[i].memory = device_malloc(op[i].n_bytes);
        device_copy(op[i].memory, op[i].bytes, op[i].n_bytes, COPY_TO_DEVICE, s);
    }
    call(op, backend, s);
    for (int i = 0; i < n && backend; i++) device_copy(op[i].bytes, op[i].memory, op[i].n_bytes, COPY_TO_HOST, s);
    stream_sync(s);
    for (int i = 0; i < n && backend; i++) device_free(op[i].memory);
    stream_destroy(s);
}

static void call_sum_squares_raw(RawOperand *op, bool backend, Stream s) {
    const Tensor x = tensor1(op[1].memory, DTYPE_FP32, op[1].n_bytes / 4);
    KERNEL_CALL(sum_squares_to_double, (double *)op[0].memory, &x, 1, false, s);
}
// One bad element, anywhere, must show in the norm; and squares beyond fp32 must not overflow.
static void test_sum_squares_special(Test *t) {
    enum { N = 40001 };
    static float x[N];
    static const int place[] = {0, 1, 16383, 16384, N - 1};
    for (int backend = 0; backend < 2; backend++)
        for (int p = 0; p < 5; p++)
            for (int kind = 0; kind < 4; kind++) {
                double sum = -1;
                for (int i = 0; i < N; i++) x[i] = 0.5f;
                x[place[p]] = kind == 0 ? NAN : kind == 1 ? INFINITY : kind == 2 ? -INFINITY : 3e30f;
                RawOperand op[2] = {{&sum, NULL, 8}, {x, NULL, sizeof x}};
                raw_run(call_sum_squares_raw, op, 2, backend);
                const bool right = kind == 0 ? isnan(sum) : kind < 3 ? isinf(sum) && sum > 0 : fabs(sum / 9e60 - 1) < 1e-6;
                expect_true(t, right, "sum of squares with %g at %d is %g", (double)x[place[p]], place[p], sum);
            }
}

static void call_update_control_raw(RawOperand *op, bool backend, Stream s) {
    const double *arg = (const double *)op[2].bytes; // loss scale, gradient clipping
    const double *sum = (const double *)op[1].memory;
    KERNEL_CALL(update_control, (UpdateControl *)op[0].memory, &sum[0], &sum[1], arg[0], arg[1], s);
}
// What an update is to do, by its sums: every bit as the formula in double says, and nothing to apply where a sum is not finite.
static void test_update_control(Test *t) {
    static const struct { double squares, loss, scale, clipping, norm, factor; bool apply; } rows[] = {
        {9, 7, 1, 0, 3, 1, true},                                  // clipping off
        {9, 7, 1, 3, 3, 1, true},                                  // at the limit
        {9, 7, 1, 1, 3, 1.0 / 3, true},                            // beyond it
        {9 * 0x1p32, 7, 0x1p16, 1, 3, 1.0 / 3, true},              // with a loss scale
        {9 * 0x1p32, -7, 0x1p16, 4, 3, 1, true},
        {0, 0, 1, 1, 0, 1, true},
        {2, 1, 1, 1, (double)(float)sqrt(2.0), 1 / (double)(float)sqrt(2.0), true}, // the norm is rounded, then used
        {INFINITY, 7, 1, 1, INFINITY, 1, false},
        {NAN, 7, 1, 1, NAN, 1, false},
        {1e80, 7, 1, 1, INFINITY, 1, false},                       // a norm beyond fp32
        {1e80, 7, 0x1p100, 0, (double)(float)(1e40 / 0x1p100), 1, true},
        {9, INFINITY, 1, 1, 3, 1, false},
        {9, -INFINITY, 1, 0, 3, 1, false},
        {9, NAN, 1, 1, 3, 1, false},
    };
    for (int backend = 0; backend < 2; backend++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            UpdateControl got = {};
            double sums[2] = {rows[i].squares, rows[i].loss}, args[2] = {rows[i].scale, rows[i].clipping};
            RawOperand op[3] = {{&got, NULL, sizeof got}, {sums, NULL, sizeof sums}, {args, NULL, sizeof args}};
            raw_run(call_update_control_raw, op, 3, backend);
            const float scale = (float)(rows[i].factor / rows[i].scale);
            expect_true(t, got.grad_norm == rows[i].norm || (isnan(rows[i].norm) && isnan(got.grad_norm)), "row %d: norm %.17g, expected %.17g", (int)i, got.grad_norm, rows[i].norm);
            expect_true(t, got.clip_factor == rows[i].factor && got.grad_scale == scale, "row %d: factor %.17g, scale %.9g, expected %.17g, %.9g", (int)i, got.clip_factor, (double)got.grad_scale, rows[i].factor, (double)scale);
            expect_equal_i64(t, "apply", got.apply, rows[i].apply);
        }
}

static int64_t hash_first; // of call_hash_raw
static bool hash_accumulate;
static void call_hash_raw(RawOperand *op, bool backend, Stream s) {
    KERNEL_CALL(hash_words, (uint64_t *)op[0].memory, tensor1(op[1].memory, DTYPE_BF16, op[1].n_bytes / 2), hash_first, hash_accumulate, s);
}
static uint64_t hash_of(const uint32_t *word, int64_t n, int64_t first, uint64_t before, bool accumulate, bool backend) {
    uint64_t hash = before;
    RawOperand op[2] = {{&hash, NULL, 8}, {(void *)word, NULL, n * 4}};
    hash_first = first;
    hash_accumulate = accumulate;
    raw_run(call_hash_raw, op, 2, backend);
    return hash;
}
// Against the formula with whole numbers of 128 bits; pieces add up; one and two flipped bits, anywhere, change it.
static void test_hash_words(Test *t) {
    enum { N = 70001, FEW = 37 };
    uint32_t *x = (uint32_t *)host_alloc(N * 4);
    for (int i = 0; i < N; i++) x[i] = (uint32_t)rng_bits(5, 5, (uint64_t)i);
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 7, 8, 1023, 1024, 1025, 16384, 70000, N}, firsts[] = {0, 1, 12345, ((int64_t)1 << 31) - N};
    for (int backend = 0; backend < 2; backend++) {
        for (int k = 0; k < 13; k++)
            for (int f = 0; f < 4; f++) {
                unsigned __int128 want = 0;
                for (int64_t i = 0; i < sizes[k]; i++) want += (unsigned __int128)x[i] * (unsigned __int128)(2 * (firsts[f] + i) + 1);
                uint64_t got = hash_of(x, sizes[k], firsts[f], 77, false, backend);
                expect_true(t, got == (uint64_t)want, "hash of %" PRId64 " words from %" PRId64 " is %" PRIx64 ", expected %" PRIx64, sizes[k], firsts[f], got, (uint64_t)want);
                got = hash_of(x, sizes[k], firsts[f], 77, true, backend);
                expect_true(t, got == (uint64_t)(want + 77), "hash of %" PRId64 " words, added to 77, is %" PRIx64, sizes[k], got);
            }
        uint64_t whole = hash_of(x, N, 0, 0, false, backend), sum = 0;
        for (int64_t at = 0; at < N; at += 4096) sum = hash_of(x + at, min_i64(4096, N - at), at, sum, true, backend);
        expect_true(t, sum == whole, "the hashes of pieces add up to %" PRIx64 ", not %" PRIx64, sum, whole);
        for (int i = 0; i < (backend && KERNELS_ON_GPU ? 40 : 400); i++) { // in a large one
            int64_t at = (int64_t)(rng_bits(6, 6, (uint64_t)i) % N);
            x[at] ^= 1u << i % 32;
            expect_true(t, hash_of(x, N, 0, 0, false, backend) != whole, "bit %d of word %" PRId64 " does not change the hash", i % 32, at);
            x[at] ^= 1u << i % 32;
        }
    }
    uint64_t whole = hash_of(x, FEW, 0, 0, false, false); // every bit and every pair of bits of a small one
    int64_t same = 0;
    for (int i = 0; i < 32 * FEW; i++)
        for (int j = 0; j <= i; j++) { // j = i: one bit
            x[i / 32] ^= 1u << i % 32;
            if (j < i) x[j / 32] ^= 1u << j % 32;
            uint64_t hash = 0;
            for (int64_t k = 0; k < FEW; k++) hash += (uint64_t)x[k] * (uint64_t)(2 * k + 1);
            same += hash == whole;
            x[i / 32] ^= 1u << i % 32;
            if (j < i) x[j / 32] ^= 1u << j % 32;
        }
    t->compared += 16 * FEW * (32 * FEW + 1);
    expect_equal_i64(t, "pairs of flipped bits that leave the hash as it is", same, 0);
    free(x);
}

// Of the 65536 masters with that high half, those whose halves do not join to the same bits, or whose weight is not its
// rounding to even, but for ties, which move away from zero. NaN becomes the quiet NaN of its sign.
__attribute__((noinline)) static int split_errors(uint32_t high) { // apart, or the compiler does not vectorise it
    int errors = 0;
    for (uint32_t low = 0; low < 1 << 16; low++) {
        const uint32_t bits = high << 16 | low, sign = high & 0x8000u;
        const float master = bits_float(bits);
        const uint32_t weight = master_to_bf16(master), remainder = master_remainder(master), even = float_to_bf16(master);
        const uint32_t joined = float_bits(master_join((uint16_t)weight, (uint16_t)remainder)), want = low == 0x8000u ? high + 1 : even;
        const int wrong_nan = (weight != (sign | 0x7fc0u)) | (remainder != 0), wrong = (weight != want) | (joined != bits);
        errors += (bits & 0x7fffffffu) > 0x7f800000u ? wrong_nan : wrong;
    }
    return errors;
}
// Every fp32 there is (where the compiler optimises less: every low half beside some of the high ones, the edges among them).
static void test_split_masters(Test *t) {
#if defined(DEBUG) || defined(__SANITIZE_ADDRESS__)
    const uint32_t step = 509;
#else
    const uint32_t step = 1;
#endif
    int64_t wrong = 0, n = 0;
#pragma omp parallel for reduction(+ : wrong, n)
    for (uint32_t high = 0; high < 1 << 16; high++) {
        const uint32_t magnitude = high & 0x7fffu;
        if (high % step && magnitude > 2 && magnitude < 0x7f7e) continue;
        wrong += split_errors(high);
        n += 1 << 16;
    }
    t->compared += n;
    expect_true(t, wrong == 0, "%" PRId64 " of %" PRId64 " masters are not what their halves say", wrong, n);
    expect_true(t, master_to_bf16(FLT_MAX) == 0x7f80 && master_join(0x7f80, master_remainder(FLT_MAX)) == FLT_MAX, "the largest master is %g", (double)master_join(0x7f80, master_remainder(FLT_MAX)));
    expect_true(t, master_to_bf16(-INFINITY) == 0xff80 && master_remainder(-INFINITY) == 0 && isnan(bf16_to_float(master_to_bf16(-NAN))), "infinity or NaN");
}

// Masters of all kinds, by place: ordinary ones, ties of bf16, those beyond its range, subnormal ones, zeros, infinity.
static float split_master_value(int64_t i) {
    const uint32_t random = (uint32_t)rng_bits(5, 6, (uint64_t)i);
    const uint32_t kinds[] = {0, 0, (random & 0xbfff0000u) | 0x8000u, 0x7f7f8000u | (random & 0x80007fffu), random & 0x807fffffu, random & 0x80000000u, 0x7f800000u | (random & 0x80000000u)};
    return i % 7 > 1 ? bits_float(kinds[i % 7]) : (float)rng_normal(5, 7, (uint64_t)i);
}

typedef struct {
    int rule, shift; // elements that all arrays start after an aligned address
    DType grad;
} SplitCase;
enum { SPLIT_WHOLE, SPLIT_WHOLE_MASTER, SPLIT_M, SPLIT_V, SPLIT_WEIGHT, SPLIT_REMAINDER, SPLIT_M2, SPLIT_V2, SPLIT_GRAD, SPLIT_CONTROL, SPLIT_CASE, SPLIT_OPERANDS };

static Tensor raw_tensor(const RawOperand *o, DType type, int shift) {
    const int64_t size = dtype_bytes(type);
    return tensor1((char *)o->memory + shift * size, type, o->n_bytes / size - shift);
}
// Four updates of masters in fp32, then four of the same masters split.
static void call_split_updates(RawOperand *op, bool backend, Stream s) {
    const SplitCase *c = (const SplitCase *)op[SPLIT_CASE].bytes;
    const UpdateControl *control = (const UpdateControl *)op[SPLIT_CONTROL].memory;
    const Tensor grad = raw_tensor(&op[SPLIT_GRAD], c->grad, c->shift);
    for (int step = 0; step < 8; step++) {
        RawOperand *o = step < 4 ? &op[SPLIT_WHOLE] : &op[SPLIT_WEIGHT];
        const Tensor weight = raw_tensor(&o[0], DTYPE_BF16, c->shift), master = raw_tensor(&o[1], step < 4 ? DTYPE_FP32 : DTYPE_REMAINDER, c->shift);
        const Tensor m = raw_tensor(&o[2], DTYPE_FP32, c->shift), v = raw_tensor(&o[3], DTYPE_FP32, c->shift);
        const AdamWArgs adamw = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f, c->shift > 0};
        const SgdArgs sgd = {1e-3f, 0.9f, 0.1f, 0.1f, c->shift > 0, step % 4 == 0};
        const UpdateRange r = {weight, master, grad, {m, v}, tensor_numel(weight)};
        if (c->rule == 0) KERNEL_CALL(adamw_update, &r, 1, adamw, control, s);
        else if (c->rule == 1) KERNEL_CALL(lion_update, &r, 1, lion_args, control, s);
        else KERNEL_CALL(sgd_update, &r, 1, sgd, control, s);
    }
}
static bool same_float(float a, float b) { return float_bits(a) == float_bits(b) || (isnan(a) && isnan(b)); }
static void split_updates_row(Test *t, SplitCase c, bool backend) {
    enum { N = 5003 };
    static uint16_t weight[2][N], remainder[N];
    static float master[N], m[2][N], v[2][N], grad[N];
    for (int64_t i = 0; i < N; i++) {
        master[i] = split_master_value(i);
        weight[0][i] = weight[1][i] = master_to_bf16(master[i]);
        remainder[i] = master_remainder(master[i]);
        m[0][i] = m[1][i] = 0.01f * (float)rng_normal(5, 8, (uint64_t)i);
        v[0][i] = v[1][i] = 0.01f * (float)rng_uniform(5, 9, (uint64_t)i);
        dtype_store(grad, c.grad, i, i % 11 ? (float)rng_normal(5, 10, (uint64_t)i) : 0.0f);
    }
    UpdateControl control = {1, 1, 0.3f, 1};
    RawOperand op[SPLIT_OPERANDS] = {{weight[0], NULL, N * 2}, {master, NULL, N * 4}, {m[0], NULL, N * 4}, {v[0], NULL, N * 4}, {weight[1], NULL, N * 2}, {remainder, NULL, N * 2},
                                     {m[1], NULL, N * 4}, {v[1], NULL, N * 4}, {grad, NULL, N * dtype_bytes(c.grad)}, {&control, NULL, sizeof control}, {&c, NULL, sizeof c}};
    raw_run(call_split_updates, op, SPLIT_OPERANDS, backend);
    int64_t wrong = 0, example = 0, moved = 0;
    for (int64_t i = 0; i < N; i++) {
        const bool same = weight[0][i] == weight[1][i] && same_float(master[i], master_join(weight[1][i], remainder[i])) && same_float(m[0][i], m[1][i]) && same_float(v[0][i], v[1][i]);
        if (!same) wrong++, example = i;
        moved += !same_float(master[i], split_master_value(i));
    }
    t->compared += 3 * N;
    expect_true(t, wrong == 0, "rule %d, %s gradients: %" PRId64 " elements differ, such as %" PRId64 ": %.9g in fp32, %.9g split", c.rule, dtype_name(c.grad), wrong, example,
                (double)master[example], (double)master_join(weight[1][example], remainder[example]));
    expect_true(t, moved > N / 2, "rule %d: only %" PRId64 " masters moved", c.rule, moved);
}
// Split masters and fp32 masters go through the same bits, whatever the rule.
static void test_split_updates(Test *t) {
    for (int k = 0; k < 2 * 3 * 2 * 2; k++) split_updates_row(t, {k / 2 % 3, k / 6 % 2, k / 12 ? DTYPE_BF16 : DTYPE_FP32}, k % 2);
}

// fp32 arithmetic of which each result is rounded: a call each, across which no compiler fuses.
__attribute__((noinline)) static float plus(float a, float b) { return a + b; }
__attribute__((noinline)) static float minus(float a, float b) { return a - b; }
__attribute__((noinline)) static float times(float a, float b) { return a * b; }
__attribute__((noinline)) static float over(float a, float b) { return a / b; }
__attribute__((noinline)) static float root(float a) { return sqrtf(a); }

enum { RULE_ADAMW, RULE_ADAM_L2, RULE_LION, RULE_SGD_FIRST, RULE_SGD_NESTEROV, RULE_SGD_PLAIN, RULE_COUNT };
static const AdamWArgs path_adamw = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.19f, 0.0975f, true}, path_adam = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.19f, 0.0975f, false};
static const SgdArgs path_sgd[] = {{1e-2f, 0.9f, 0.1f, 0.1f, false, true}, {1e-2f, 0.9f, 0.2f, 0.1f, true, false}, {1e-2f, 0, 0, 0.1f, false, false}};

// One element by the formulas of kernel_list.h; returns the new master.
static float rule_by_hand(int rule, float w, float g, float *m, float *v) {
    if (rule == RULE_LION) {
        const LionArgs a = lion_args;
        const float direction = plus(times(a.beta1, *m), times(minus(1, a.beta1), g)), sign = direction > 0 ? 1 : direction < 0 ? -1 : direction;
        *m = plus(times(a.beta2, *m), times(minus(1, a.beta2), g));
        return minus(minus(w, times(times(a.lr, a.weight_decay), w)), times(a.lr, sign));
    }
    if (rule < RULE_LION) {
        const AdamWArgs a = rule == RULE_ADAMW ? path_adamw : path_adam;
        if (a.decoupled_decay) w = minus(w, times(times(a.lr, a.weight_decay), w));
        else g = plus(g, times(a.weight_decay, w));
        *m = plus(times(a.beta1, *m), times(minus(1, a.beta1), g));
        *v = plus(times(a.beta2, *v), times(times(minus(1, a.beta2), g), g));
        return minus(w, over(times(a.lr, over(*m, a.bias_correction1)), plus(root(over(*v, a.bias_correction2)), a.eps)));
    }
    const SgdArgs a = path_sgd[rule - RULE_SGD_FIRST];
    g = plus(g, times(a.weight_decay, w));
    if (a.momentum != 0) {
        *m = a.first_update ? g : plus(times(a.momentum, *m), times(minus(1, a.dampening), g));
        g = a.nesterov ? plus(g, times(a.momentum, *m)) : *m;
    }
    return minus(w, times(a.lr, g));
}

// Masters in fp32 that are the weights, or beside weights in 16 bits, or split.
typedef struct {
    int rule, n;
    DType param, master, grad;
} PathCase;
enum { PATH_PARAM, PATH_MASTER, PATH_GRAD, PATH_M, PATH_V, PATH_CONTROL, PATH_CASE, PATH_OPERANDS };

// Arrays start in the middle of lines, each elsewhere, unless n is a multiple of 64.
static int path_shift(const PathCase *c, int operand) { return c->n % 64 ? (c->n + operand) % 7 : 0; }
static Tensor path_tensor(RawOperand *op, int operand, DType t) {
    const PathCase *c = (const PathCase *)op[PATH_CASE].bytes;
    return tensor1((char *)op[operand].memory + path_shift(c, operand) * dtype_bytes(t), t, c->n);
}
static void call_path(RawOperand *op, bool backend, Stream s) {
    const PathCase *c = (const PathCase *)op[PATH_CASE].bytes;
    const UpdateControl *control = (const UpdateControl *)op[PATH_CONTROL].memory;
    const Tensor master = path_tensor(op, PATH_MASTER, c->master), param = c->param == DTYPE_FP32 ? master : path_tensor(op, PATH_PARAM, c->param);
    const Tensor grad = path_tensor(op, PATH_GRAD, c->grad), m = path_tensor(op, PATH_M, DTYPE_FP32), v = path_tensor(op, PATH_V, DTYPE_FP32);
    const UpdateRange r = {param, master, grad, {c->rule == RULE_SGD_PLAIN ? tensor_none() : m, v}, tensor_numel(param)};
    if (c->rule <= RULE_ADAM_L2) KERNEL_CALL(adamw_update, &r, 1, c->rule == RULE_ADAMW ? path_adamw : path_adam, control, s);
    else if (c->rule == RULE_LION) KERNEL_CALL(lion_update, &r, 1, lion_args, control, s);
    else KERNEL_CALL(sgd_update, &r, 1, path_sgd[c->rule - RULE_SGD_FIRST], control, s);
}

enum { PATH_MOST = 40007, PATH_ROOM = PATH_MOST + 8 };
// Path `path` of the CPU, or with backend the CUDA twin, against the formulas, every bit (but NaN's).
static void path_row(Test *t, PathCase c, int path, bool backend) {
    static float param[PATH_ROOM], master[PATH_ROOM], grad[PATH_ROOM], m[PATH_ROOM], v[PATH_ROOM], want_w[PATH_ROOM], want_m[PATH_ROOM], want_v[PATH_ROOM];
    static const float gradients[] = {0, -0.0f, 1e-42f, -3e38f, INFINITY, NAN, 1e-30f};
    UpdateControl control = {1, 1, 0.3f, 1};
    RawOperand op[PATH_OPERANDS] = {{param, NULL, sizeof param}, {master, NULL, sizeof master}, {grad, NULL, sizeof grad}, {m, NULL, sizeof m}, {v, NULL, sizeof v}, {&control, NULL, sizeof control}, {&c, NULL, sizeof c}};
    for (int i = 0; i < PATH_OPERANDS; i++) op[i].memory = op[i].bytes;
    const bool split = c.master == DTYPE_REMAINDER;
    const Tensor p = path_tensor(op, PATH_PARAM, c.param), w = path_tensor(op, PATH_MASTER, c.master), g = path_tensor(op, PATH_GRAD, c.grad), ms = path_tensor(op, PATH_M, DTYPE_FP32), vs = path_tensor(op, PATH_V, DTYPE_FP32);
    for (int64_t i = 0; i < c.n; i++) {
        const float start = split_master_value(i), gradient = i % 5 == 4 ? gradients[i / 5 % 7] : (float)rng_normal(6, 1, (uint64_t)i);
        want_w[i] = start;
        want_m[i] = i % 13 ? 0.01f * (float)rng_normal(6, 2, (uint64_t)i) : 0;
        want_v[i] = i % 17 ? 0.01f * (float)rng_uniform(6, 3, (uint64_t)i) : 0;
        if (split) {
            ((uint16_t *)p.data)[i] = master_to_bf16(start);
            ((uint16_t *)w.data)[i] = master_remainder(start);
        } else ((float *)w.data)[i] = start;
        dtype_store(g.data, c.grad, i, gradient);
        ((float *)ms.data)[i] = c.rule == RULE_SGD_FIRST ? NAN : want_m[i];
        ((float *)vs.data)[i] = want_v[i];
        want_w[i] = rule_by_hand(c.rule, start, times(dtype_load(g.data, c.grad, i), control.grad_scale), &want_m[i], &want_v[i]);
    }
    if (!backend) cpu::update_path(path);
    raw_run(call_path, op, PATH_OPERANDS, backend);
    cpu::update_path(-1);
    int64_t wrong = 0, example = -1;
    for (int64_t i = 0; i < c.n; i++) {
        const uint16_t weight = c.param == DTYPE_FP32 ? 0 : ((const uint16_t *)p.data)[i];
        const float got = split ? master_join(weight, ((const uint16_t *)w.data)[i]) : ((const float *)w.data)[i];
        bool same = same_float(got, want_w[i]) && same_float(((float *)ms.data)[i], want_m[i]) && same_float(((float *)vs.data)[i], want_v[i]);
        if (c.param == DTYPE_BF16) same = same && same_float(bf16_to_float(weight), bf16_to_float(master_to_bf16(want_w[i])));
        if (c.param == DTYPE_FP16) same = same && same_float(fp16_to_float(weight), fp16_to_float(float_to_fp16(want_w[i])));
        if (!same) { wrong++; example = i; }
    }
    t->compared += 4 * c.n;
    expect_true(t, wrong == 0, "%s, rule %d, %s weights, %s masters, %s gradients: %" PRId64 " of %d elements differ, such as %" PRId64 ", expected %.9g", backend ? "CUDA" : cpu::update_path(path), c.rule,
                dtype_name(c.param), dtype_name(c.master), dtype_name(c.grad), wrong, c.n, example, (double)want_w[max_i64(example, 0)]);
    cpu::update_path(-1);
}
// However the CPU's loops are compiled, and on the GPU: the same bits, at odd lengths and starts, for values of all kinds.
static void test_update_paths(Test *t) {
    static const int lengths[] = {1, 37, 4096, 5003, PATH_MOST};
    static const struct { DType param, master; } kinds[] = {{DTYPE_FP32, DTYPE_FP32}, {DTYPE_BF16, DTYPE_FP32}, {DTYPE_FP16, DTYPE_FP32}, {DTYPE_BF16, DTYPE_REMAINDER}};
    int paths = 0;
    for (int path = 0; path < 4; path++) { // 3: the CUDA twin
        if (path == 3 ? !KERNELS_ON_GPU : !cpu::update_path(path)) continue;
        paths++;
        for (int k = 0; k < RULE_COUNT * 4 * 2 * 5; k++) {
            const int kind = k / RULE_COUNT % 4;
            path_row(t, {k % RULE_COUNT, lengths[k / RULE_COUNT / 8], kinds[kind].param, kinds[kind].master, k / RULE_COUNT / 4 % 2 ? DTYPE_BF16 : DTYPE_FP32}, path, path == 3);
        }
    }
    cpu::update_path(-1);
    expect_true(t, paths > 0, "no path");
}

// x rounded to `bits` bits of mantissa, smallest exponent e_min, largest value max: computed in double with nearbyint.
static double reference_round_bits(double x, int bits, int e_min, double max) {
    if (isnan(x) || isinf(x) || x == 0) return x;
    const double q = ldexp(1, (ilogb(x) < e_min ? e_min : ilogb(x)) - (bits - 1)), r = nearbyint(x / q) * q;
    return fabs(r) > max ? copysign(INFINITY, x) : r;
}

static void call_convert_raw(RawOperand *op, bool backend, Stream s) {
    const int64_t n = op[0].n_bytes / 4;
    Tensor x = tensor1(op[0].memory, DTYPE_FP32, n), bf16 = tensor1(op[1].memory, DTYPE_BF16, n), fp16 = tensor1(op[2].memory, DTYPE_FP16, n);
    KERNEL_CALL(convert, bf16, x, s);
    KERNEL_CALL(convert, fp16, x, s);
    KERNEL_CALL(convert, tensor1(op[3].memory, DTYPE_FP32, n), bf16, s);
    KERNEL_CALL(convert, tensor1(op[4].memory, DTYPE_FP32, n), fp16, s);
}
// fp32 values of all magnitudes, ties, overflows, subnormals, NaN and infinity: to 16 bits and back, against rounding in double.
static void test_convert_special(Test *t) {
    enum { N = 3 << 16 };
    float *x = (float *)host_alloc(N * 4), *from_bf16 = (float *)host_alloc(N * 4), *from_fp16 = (float *)host_alloc(N * 4);
    uint16_t *bf16 = (uint16_t *)host_alloc(N * 2), *fp16 = (uint16_t *)host_alloc(N * 2);
    for (uint32_t i = 0; i < 1 << 16; i++) {
        uint32_t random = (uint32_t)rng_bits(9, 9, i), tie = i << 16 | 0x8000u; // halfway between neighbours of bf16
        memcpy(x + 3 * i, &random, 4);
        memcpy(x + 3 * i + 1, &tie, 4);
        const float a = fp16_to_float((uint16_t)i), b = fp16_to_float((uint16_t)(i + 1)); // halfway between neighbours of fp16
        x[3 * i + 2] = (i & 0x7fff) < 0x7bff ? 0.5f * (a + b) : (i & 0x7fff) == 0x7bff ? copysignf(65520.0f, a) : a;
    }
    for (int backend = 0; backend < 2; backend++) {
        RawOperand op[5] = {{x, NULL, N * 4}, {bf16, NULL, N * 2}, {fp16, NULL, N * 2}, {from_bf16, NULL, N * 4}, {from_fp16, NULL, N * 4}};
        raw_run(call_convert_raw, op, 5, backend);
        int64_t wrong_bf16 = 0, wrong_fp16 = 0, example = 0;
        for (int64_t i = 0; i < N; i++) {
            const double want_bf16 = reference_round_bits((double)x[i], 8, -126, 0x1.fep127), want_fp16 = reference_round_bits((double)x[i], 11, -14, 65504);
            const bool good_bf16 = isnan(x[i]) ? isnan(from_bf16[i]) != 0 : (double)from_bf16[i] == want_bf16 && signbit(from_bf16[i]) == signbit(x[i]);
            const bool good_fp16 = isnan(x[i]) ? isnan(from_fp16[i]) != 0 : (double)from_fp16[i] == want_fp16 && signbit(from_fp16[i]) == signbit(x[i]);
            wrong_bf16 += !good_bf16;
            wrong_fp16 += !good_fp16;
            if (!good_bf16 || !good_fp16) example = i;
        }
        t->compared += 2 * N;
        expect_true(t, wrong_bf16 + wrong_fp16 == 0, "%" PRId64 " wrong bf16, %" PRId64 " wrong fp16, such as %.9g -> %.9g, %.9g",
                    wrong_bf16, wrong_fp16, (double)x[example], (double)from_bf16[example], (double)from_fp16[example]);
    }
    free(x);
    free(from_bf16);
    free(from_fp16);
    free(bf16);
    free(fp16);
}

static void call_classifier_raw(RawOperand *op, bool backend, Stream s) {
    KERNEL_CALL(classifier_forward_backward, tensor2(op[0].memory, DTYPE_FP32, 4, 64), tensor1(op[1].memory, DTYPE_FP32, 4), (const int32_t *)op[2].memory, 63, 1.0f, true, s);
}
// Logits whose exponentials overflow and underflow, equal logits, and a NaN, which must reach the loss.
static void test_classifier_special(Test *t) {
    for (int backend = 0; backend < 2; backend++) {
        float logits[4][64], losses[4];
        int32_t targets[4] = {3, 5, 0, 1};
        for (int j = 0; j < 64; j++) {
            logits[0][j] = j == 3 ? 30000.0f : -30000.0f;
            logits[1][j] = j == 3 ? 30000.0f : -30000.0f;
            logits[2][j] = -1e30f;
            logits[3][j] = j == 62 ? NAN : 0.0f;
        }
        RawOperand op[3] = {{logits, NULL, sizeof logits}, {losses, NULL, sizeof losses}, {targets, NULL, sizeof targets}};
        raw_run(call_classifier_raw, op, 3, backend);
        expect_near(t, "loss of a certain and right row", (double)losses[0], 0, 0);
        expect_near(t, "loss of a certain and wrong row", (double)losses[1], 60000, 0);
        // adding log(63) to a logit of -1e30 and taking it away again may leave 0
        expect_true(t, losses[2] >= 0 && losses[2] <= 4.2f, "loss of a row of equal logits is %g", (double)losses[2]);
        expect_true(t, isnan(losses[3]), "loss of a row with a NaN is %g", (double)losses[3]);
        expect_near(t, "gradient of a certain and right row", (double)logits[0][3], 0, 0);
        expect_near(t, "gradient at the wrong choice", (double)logits[1][3], 1, 1e-6);
        expect_near(t, "gradient at the target", (double)logits[1][5], -1, 1e-6);
        expect_near(t, "gradient of equal logits", (double)logits[2][62], 1.0 / 63, 1e-8);
        expect_near(t, "gradient in the padding", (double)logits[2][63], 0, 0);
    }
}
