// test_kernels.h - every kernel against something that computes the same in another way.
//
// The chain of trust: a naive reference in double for each kernel, below; backward references are checked against central
// finite differences of the forward ones; the CPU kernels are checked against the references, in fp32, bf16 and fp16, over
// tables of odd shapes; the kernels of a GPU build are checked against the CPU kernels. 16-bit operands are rounded before
// the reference sees them, so that what is measured is the kernel's own error.
//
// A Kernel has a set-up, a reference and a call; kernel_cases.h does the rest, once, for all. To test a new kernel: those three
// functions, a table of shapes, and one line in kernel_tests.
#pragma once
#include "kernel_cases.h"
#include <sys/resource.h>

// ---------------------------------------------------------------------------------------------------------------
// Embedding

// Tokens that repeat: the first of a hundred-odd is frequent, and the last of the vocabulary occurs.
static void setup_tokens(KernelCase *c, const char *name, int64_t V) {
    Operand *o = operand_add(c, name, ROLE_IN, OPERAND_INT32, c->s.B, c->s.T, 0, 0, 0);
    for (int64_t i = 0; i < o->n; i++) o->value[i] = (double)(rng_uniform(1, 2, (uint64_t)i) < 0.3 ? V - 1 : (int64_t)(rng_uniform(1, 3, (uint64_t)i) * (double)V));
}

static int64_t part_of(const KernelShape *s, int64_t all) { return s->part ? s->part : all; }

static void setup_embedding_forward(KernelCase *c) {
    const KernelShape s = c->s;
    operand_add(c, "out", ROLE_OUT, c->act, s.B, s.T, s.C, 0, 0);
    setup_tokens(c, "tokens", s.V);
    operand_add(c, "wte", ROLE_IN, c->act, part_of(&s, s.Vp), s.C, 0, 0, 1);
    if (!(s.flags & NO_POSITIONS)) operand_add(c, "wpe", ROLE_IN, c->act, s.position + s.T + 3, s.C, 0, 0, 1);
}
static void reference_embedding_forward(KernelCase *c) {
    const KernelShape s = c->s;
    const double *tokens = value_of(c, "tokens"), *wte = value_of(c, "wte"), *wpe = value_of(c, "wpe");
    double *out = want_of(c, "out");
    for (int64_t i = 0; i < s.B * s.T; i++) {
        const int64_t row = (int64_t)tokens[i] - s.first;
        const bool here = row >= 0 && row < part_of(&s, s.Vp);
        for (int64_t k = 0; k < s.C; k++) out[i * s.C + k] = (here ? wte[row * s.C + k] : 0) + (wpe ? wpe[(s.position + i % s.T) * s.C + k] : 0);
    }
}
static void call_embedding_forward(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(embedding_forward, tensor_of(c, "out"), ints_of(c, "tokens"), tensor_of(c, "wte"), tensor_of(c, "wpe"), c->s.V, c->s.first, c->s.position, stream);
}

static void setup_embedding_backward(KernelCase *c) {
    const KernelShape s = c->s;
    operand_add(c, "dwte", s.flags & ACCUMULATE ? ROLE_INOUT : ROLE_OUT, DTYPE_FP32, part_of(&s, s.Vp), s.C, 0, 0, 1);
    if (!(s.flags & NO_POSITIONS)) operand_add(c, "dwpe", s.flags & ACCUMULATE_WPE ? ROLE_INOUT : ROLE_OUT, DTYPE_FP32, s.position + s.T + 3, s.C, 0, 0, 1);
    setup_tokens(c, "tokens", s.V);
    operand_add(c, "dout", ROLE_IN, c->act, s.B, s.T, s.C, 0, 1);
}
static void reference_embedding_backward(KernelCase *c) {
    const KernelShape s = c->s;
    const double *tokens = value_of(c, "tokens"), *dout = value_of(c, "dout");
    double *dwte = want_of(c, "dwte"), *dwpe = want_of(c, "dwpe");
    if (!(s.flags & ACCUMULATE)) memset(dwte, 0, (size_t)operand_find(c, "dwte")->n * 8);
    if (dwpe && !(s.flags & ACCUMULATE_WPE)) memset(dwpe, 0, (size_t)operand_find(c, "dwpe")->n * 8);
    for (int64_t i = 0; i < s.B * s.T; i++) {
        const int64_t row = (int64_t)tokens[i] - s.first;
        for (int64_t k = 0; k < s.C; k++) {
            if (row >= 0 && row < part_of(&s, s.Vp)) dwte[row * s.C + k] += dout[i * s.C + k];
            if (dwpe) dwpe[(s.position + i % s.T) * s.C + k] += dout[i * s.C + k];
        }
    }
}
static void call_embedding_backward(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(embedding_backward, tensor_of(c, "dwte"), tensor_of(c, "dwpe"), ints_of(c, "tokens"), tensor_of(c, "dout"), c->s.V, c->s.first, c->s.position,
                (c->s.flags & ACCUMULATE) != 0, (c->s.flags & ACCUMULATE_WPE) != 0, stream);
}

static const KernelShape embedding_shapes[] = {
    {.B = 1, .T = 1, .C = 8, .V = 1, .Vp = 1},
    {.B = 3, .T = 17, .C = 64, .V = 211, .Vp = 256, .flags = ACCUMULATE},
    {.B = 3, .T = 40, .C = 24, .V = 257, .Vp = 320, .flags = ACCUMULATE_WPE},
    {.B = 2, .T = 255, .C = 96, .V = 257, .Vp = 257, .flags = ACCUMULATE | ACCUMULATE_WPE},
    {.B = 5, .T = 64, .C = 16, .V = 50257, .Vp = 50304},
    {.B = 2, .T = 9, .C = 7, .V = 5, .Vp = 6, .flags = CPU_ONLY},
    {.B = 3, .T = 17, .C = 64, .V = 211, .Vp = 256, .part = 128, .position = 17, .flags = ACCUMULATE},   // the first half of the vocabulary, the second of the sequence
    {.B = 3, .T = 97, .C = 24, .V = 211, .Vp = 256, .first = 128, .part = 128, .flags = NO_POSITIONS},   // the half with the frequent token
    {.B = 2, .T = 255, .C = 96, .V = 257, .Vp = 320, .first = 40, .part = 80, .position = 5, .flags = ACCUMULATE_WPE},
    {.B = 2, .T = 255, .C = 96, .V = 257, .Vp = 320, .first = 256, .part = 64, .flags = ACCUMULATE | NO_POSITIONS},
    {.B = 2, .T = 40, .C = 16, .V = 60, .Vp = 128, .first = 64, .part = 64, .flags = NO_POSITIONS},      // nothing but padding
    {0},
};
static const Kernel kernel_embedding_forward = {"embedding_forward", setup_embedding_forward, reference_embedding_forward, call_embedding_forward, embedding_shapes};
static const Kernel kernel_embedding_backward = {"embedding_backward", setup_embedding_backward, reference_embedding_backward, call_embedding_backward, embedding_shapes};

// Rows first .. first + part - 1 of (B*T,C).
static void setup_position_forward(KernelCase *c) {
    const KernelShape s = c->s;
    operand_add(c, "out", ROLE_INOUT, c->act, part_of(&s, s.B * s.T), s.C, 0, 0, 1);
    operand_add(c, "wpe", ROLE_IN, c->act, s.position + s.T + 3, s.C, 0, 0, 1);
}
static void reference_position_forward(KernelCase *c) {
    const KernelShape s = c->s;
    const double *x = value_of(c, "out"), *wpe = value_of(c, "wpe");
    double *out = want_of(c, "out");
    for (int64_t i = 0; i < part_of(&s, s.B * s.T); i++)
        for (int64_t k = 0; k < s.C; k++) out[i * s.C + k] = x[i * s.C + k] + wpe[(s.position + (s.first + i) % s.T) * s.C + k];
}
static void call_position_forward(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(position_forward, tensor_of(c, "out"), tensor_of(c, "wpe"), c->s.first, c->s.T, c->s.position, stream);
}
static void setup_position_backward(KernelCase *c) {
    const KernelShape s = c->s;
    operand_add(c, "dwpe", s.flags & ACCUMULATE_WPE ? ROLE_INOUT : ROLE_OUT, DTYPE_FP32, s.position + s.T + 3, s.C, 0, 0, 1);
    operand_add(c, "dout", ROLE_IN, c->act, part_of(&s, s.B * s.T), s.C, 0, 0, 1);
}
static void reference_position_backward(KernelCase *c) {
    const KernelShape s = c->s;
    const double *dout = value_of(c, "dout");
    double *dwpe = want_of(c, "dwpe");
    if (!(s.flags & ACCUMULATE_WPE)) memset(dwpe, 0, (size_t)operand_find(c, "dwpe")->n * 8);
    for (int64_t i = 0; i < part_of(&s, s.B * s.T); i++)
        for (int64_t k = 0; k < s.C; k++) dwpe[(s.position + (s.first + i) % s.T) * s.C + k] += dout[i * s.C + k];
}
static void call_position_backward(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(position_backward, tensor_of(c, "dwpe"), tensor_of(c, "dout"), c->s.first, c->s.T, c->s.position, (c->s.flags & ACCUMULATE_WPE) != 0, stream);
}
static const KernelShape position_shapes[] = {
    {.B = 1, .T = 1, .C = 8},
    {.B = 3, .T = 17, .C = 64, .flags = ACCUMULATE_WPE},
    {.B = 6, .T = 40, .C = 24, .first = 80, .part = 80, .position = 40}, // whole samples
    {.B = 3, .T = 40, .C = 24, .first = 60, .part = 30},                 // less than one, and across a border
    {.B = 9, .T = 33, .C = 96, .first = 99, .part = 198, .position = 7, .flags = ACCUMULATE_WPE},
    {.B = 1, .T = 255, .C = 96, .first = 85, .part = 85, .flags = ACCUMULATE_WPE},
    {.B = 5, .T = 9, .C = 7, .first = 40, .part = 5, .flags = CPU_ONLY},
    {0},
};
static const Kernel kernel_position_forward = {"position_forward", setup_position_forward, reference_position_forward, call_position_forward, position_shapes};
static const Kernel kernel_position_backward = {"position_backward", setup_position_backward, reference_position_backward, call_position_backward, position_shapes};

// ---------------------------------------------------------------------------------------------------------------
// LayerNorm

#define TEST_LN_EPS 1e-5f

// Rows of x (N,C) -> mean, rstd and, if asked for, out.
static void reference_layernorm(double *out, double *mean, double *rstd, const double *x, const double *w, const double *b, int64_t N, int64_t C) {
    for (int64_t i = 0; i < N; i++) {
        double m = 0, v = 0;
        for (int64_t k = 0; k < C; k++) m += x[i * C + k] / (double)C;
        for (int64_t k = 0; k < C; k++) v += (x[i * C + k] - m) * (x[i * C + k] - m) / (double)C;
        mean[i] = m;
        rstd[i] = 1 / sqrt(v + (double)TEST_LN_EPS);
        for (int64_t k = 0; out && k < C; k++) out[i * C + k] = (x[i * C + k] - m) * rstd[i] * w[k] + b[k];
    }
}

static void setup_layernorm_forward(KernelCase *c) {
    const int64_t N = c->s.B * c->s.T, C = c->s.C;
    operand_add(c, "out", ROLE_OUT, c->act, N, C, 0, 0, 0);
    operand_add(c, "mean", ROLE_OUT, DTYPE_FP32, N, 0, 0, 0, 0);
    operand_add(c, "rstd", ROLE_OUT, DTYPE_FP32, N, 0, 0, 0, 0);
    operand_add(c, "x", ROLE_IN, c->act, N, C, 0, 0.5, 2);
    operand_add(c, "w", ROLE_IN, c->act, C, 0, 0, 1, 0.3);
    operand_add(c, "b", ROLE_IN, c->act, C, 0, 0, 0, 0.3);
}
static void reference_layernorm_forward(KernelCase *c) {
    reference_layernorm(want_of(c, "out"), want_of(c, "mean"), want_of(c, "rstd"), value_of(c, "x"), value_of(c, "w"), value_of(c, "b"), c->s.B * c->s.T, c->s.C);
}
static void call_layernorm_forward(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(layernorm_forward, tensor_of(c, "out"), tensor_of(c, "mean"), tensor_of(c, "rstd"), tensor_of(c, "x"), tensor_of(c, "w"), tensor_of(c, "b"), TEST_LN_EPS, stream);
}

static void setup_residual_layernorm_forward(KernelCase *c) {
    setup_layernorm_forward(c);
    operand_add(c, "delta", ROLE_IN, c->act, c->s.B * c->s.T, c->s.C, 0, 0, 1);
    operand_add(c, "residual", ROLE_OUT, c->act, c->s.B * c->s.T, c->s.C, 0, 0, 0);
    if (c->s.flags & BIAS) operand_add(c, "bias", ROLE_IN, c->act, c->s.C, 0, 0, 0, 1);
    if (c->s.flags & ALIAS) alias_with(c, "residual", "x");
    if (c->s.flags & ALIAS_OTHER) alias_with(c, "residual", "delta");
}
static void reference_residual_layernorm_forward(KernelCase *c) {
    double *residual = want_of(c, "residual");
    const double *x = value_of(c, "x"), *delta = value_of(c, "delta"), *bias = value_of(c, "bias");
    for (int64_t i = 0; i < operand_find(c, "x")->n; i++) residual[i] = operand_round(c->act, x[i] + delta[i] + (bias ? bias[i % c->s.C] : 0));
    reference_layernorm(want_of(c, "out"), want_of(c, "mean"), want_of(c, "rstd"), residual, value_of(c, "w"), value_of(c, "b"), c->s.B * c->s.T, c->s.C);
}
static void call_residual_layernorm_forward(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(residual_layernorm_forward, tensor_of(c, "residual"), tensor_of(c, "out"), tensor_of(c, "mean"), tensor_of(c, "rstd"),
                tensor_of(c, "x"), tensor_of(c, "delta"), tensor_of(c, "bias"), tensor_of(c, "w"), tensor_of(c, "b"), TEST_LN_EPS, stream);
}

static void setup_residual_forward(KernelCase *c) {
    const int64_t N = c->s.B * c->s.T, C = c->s.C;
    operand_add(c, "out", ROLE_OUT, c->act, N, C, 0, 0, 0);
    operand_add(c, "x", ROLE_IN, c->act, N, C, 0, 0.5, 2);
    operand_add(c, "delta", ROLE_IN, c->act, N, C, 0, 0, 1);
    if (c->s.flags & BIAS) operand_add(c, "bias", ROLE_IN, c->act, C, 0, 0, 0, 1);
    if (c->s.flags & ALIAS) alias_with(c, "out", "x");
    if (c->s.flags & ALIAS_OTHER) alias_with(c, "out", "delta");
}
static void reference_residual_forward(KernelCase *c) {
    const double *x = value_of(c, "x"), *delta = value_of(c, "delta"), *bias = value_of(c, "bias");
    double *out = want_of(c, "out");
    for (int64_t i = 0; i < operand_find(c, "x")->n; i++) out[i] = x[i] + delta[i] + (bias ? bias[i % c->s.C] : 0);
}
static void call_residual_forward(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(residual_forward, tensor_of(c, "out"), tensor_of(c, "x"), tensor_of(c, "delta"), tensor_of(c, "bias"), stream);
}

static void setup_layernorm_backward(KernelCase *c) {
    const int64_t N = c->s.B * c->s.T, C = c->s.C;
    const OperandRole sums = c->s.flags & ACCUMULATE ? ROLE_INOUT : ROLE_OUT;
    operand_add(c, "dx", ROLE_OUT, c->act, N, C, 0, 0, 0);
    operand_add(c, "dw", sums, param_grad_type(c), C, 0, 0, 0, 1);
    operand_add(c, "db", sums, param_grad_type(c), C, 0, 0, 0, 1);
    operand_add(c, "dout", ROLE_IN, c->act, N, C, 0, 0.1, 1);
    operand_add(c, "x", ROLE_IN, c->act, N, C, 0, 0.5, 2);
    operand_add(c, "w", ROLE_IN, c->act, C, 0, 0, 1, 0.3);
    operand_add(c, "mean", ROLE_IN, DTYPE_FP32, N, 0, 0, 0, 0);
    operand_add(c, "rstd", ROLE_IN, DTYPE_FP32, N, 0, 0, 0, 0);
    if (c->s.flags & RESIDUAL) operand_add(c, "dresidual", ROLE_IN, c->act, N, C, 0, 0, 1);
    if (c->s.flags & BIAS && c->s.flags & RESIDUAL) operand_add(c, "sum_dresidual", sums, param_grad_type(c), C, 0, 0, 0, 1);
    if (c->s.flags & BIAS) operand_add(c, "sum_dx", sums, param_grad_type(c), C, 0, 0, 0, 1);
    if (c->s.flags & ALIAS) alias_with(c, "dx", "dresidual");
    double *mean = value_of(c, "mean"), *rstd = value_of(c, "rstd");
    reference_layernorm(NULL, mean, rstd, value_of(c, "x"), NULL, NULL, N, C);
    for (int64_t i = 0; i < N && !c->exact; i++) { mean[i] = operand_round(DTYPE_FP32, mean[i]); rstd[i] = operand_round(DTYPE_FP32, rstd[i]); }
}
static void reference_layernorm_backward(KernelCase *c) {
    const int64_t N = c->s.B * c->s.T, C = c->s.C;
    const double *dout = value_of(c, "dout"), *x = value_of(c, "x"), *w = value_of(c, "w"), *mean = value_of(c, "mean"), *rstd = value_of(c, "rstd");
    const double *dresidual = value_of(c, "dresidual");
    double *dx = want_of(c, "dx"), *dw = want_of(c, "dw"), *db = want_of(c, "db"), *sum_dresidual = want_of(c, "sum_dresidual"), *sum_dx = want_of(c, "sum_dx");
    for (int64_t k = 0; k < C && !(c->s.flags & ACCUMULATE); k++) {
        dw[k] = db[k] = 0;
        if (sum_dresidual) sum_dresidual[k] = 0;
        if (sum_dx) sum_dx[k] = 0;
    }
    for (int64_t i = 0; i < N; i++) {
        double g_mean = 0, gn_mean = 0;
        for (int64_t k = i * C; k < (i + 1) * C; k++) {
            const double n = (x[k] - mean[i]) * rstd[i], g = dout[k] * w[k - i * C];
            g_mean += g / (double)C;
            gn_mean += g * n / (double)C;
            dw[k - i * C] += dout[k] * n;
            db[k - i * C] += dout[k];
        }
        for (int64_t k = i * C; k < (i + 1) * C; k++) {
            const double n = (x[k] - mean[i]) * rstd[i], g = dout[k] * w[k - i * C];
            dx[k] = (dresidual ? dresidual[k] : 0) + rstd[i] * (g - g_mean - n * gn_mean);
            if (sum_dresidual) sum_dresidual[k - i * C] += dresidual[k];
            if (sum_dx) sum_dx[k - i * C] += dx[k];
        }
    }
}
static void call_layernorm_backward(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(layernorm_backward, tensor_of(c, "dx"), tensor_of(c, "dw"), tensor_of(c, "db"), tensor_of(c, "sum_dresidual"), tensor_of(c, "sum_dx"),
                tensor_of(c, "dout"), tensor_of(c, "x"), tensor_of(c, "w"), tensor_of(c, "mean"), tensor_of(c, "rstd"), tensor_of(c, "dresidual"), (c->s.flags & ACCUMULATE) != 0, stream);
}

static const KernelShape layernorm_shapes[] = {
    {.B = 1, .T = 1, .C = 8},
    {.B = 3, .T = 17, .C = 64, .flags = RESIDUAL | BIAS},
    {.B = 3, .T = 40, .C = 96, .flags = RESIDUAL | ALIAS | ACCUMULATE},
    {.B = 1, .T = 257, .C = 768, .flags = ACCUMULATE | RESIDUAL | ALIAS | BIAS},
    {.B = 8, .T = 255, .C = 128, .flags = RESIDUAL},
    {.B = 8, .T = 255, .C = 128, .flags = RESIDUAL | BIAS | ACT_GRAD},
    {.B = 2, .T = 9, .C = 1600, .flags = ACCUMULATE | BIAS},
    {.B = 2, .T = 9, .C = 1600, .flags = ACCUMULATE | ACT_GRAD},
    {.B = 8, .T = 4096, .C = 16, .flags = RESIDUAL | ALIAS}, // so many rows that a GPU's warps have several each
    {.B = 1, .T = 1500, .C = 1032, .flags = RESIDUAL | BIAS},     // the same where warps share a row
    {.B = 3, .T = 40, .C = 3072, .flags = RESIDUAL | ALIAS},
    {.B = 1, .T = 300, .C = 4096, .flags = RESIDUAL},        // in 16 bits exactly 48 KB of rows in shared memory
    {.B = 3, .T = 5, .C = 5120, .flags = RESIDUAL | BIAS},  // wider teams than one vector a thread makes
    {.B = 1, .T = 3, .C = 8208, .flags = RESIDUAL | BIAS},
    {.B = 2, .T = 9, .C = 211, .flags = RESIDUAL | ALIAS | BIAS | CPU_ONLY},
    {.B = 1, .T = 5, .C = 7, .flags = CPU_ONLY},
    {0},
};
static const KernelShape residual_layernorm_shapes[] = {
    {.B = 1, .T = 1, .C = 8},
    {.B = 3, .T = 17, .C = 64, .flags = ALIAS | BIAS},
    {.B = 3, .T = 40, .C = 96, .flags = ALIAS_OTHER},
    {.B = 1, .T = 257, .C = 768, .flags = BIAS},
    {.B = 2, .T = 9, .C = 1600, .flags = ALIAS},
    {.B = 2, .T = 9, .C = 211, .flags = ALIAS_OTHER | BIAS | CPU_ONLY},
    {0},
};
static const Kernel kernel_layernorm_forward = {"layernorm_forward", setup_layernorm_forward, reference_layernorm_forward, call_layernorm_forward, layernorm_shapes};
static const Kernel kernel_residual_layernorm_forward = {"residual_layernorm_forward", setup_residual_layernorm_forward, reference_residual_layernorm_forward, call_residual_layernorm_forward, residual_layernorm_shapes};
static const Kernel kernel_residual_forward = {"residual_forward", setup_residual_forward, reference_residual_forward, call_residual_forward, residual_layernorm_shapes};
static const Kernel kernel_layernorm_backward = {"layernorm_backward", setup_layernorm_backward, reference_layernorm_backward, call_layernorm_backward, layernorm_shapes};

// ---------------------------------------------------------------------------------------------------------------
// GELU

static double reference_gelu(double x) { return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
static double reference_gelu_slope(double x) {
    const double t = tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}

static void setup_gelu_forward(KernelCase *c) {
    operand_add(c, "out", ROLE_OUT, c->act, c->s.B * c->s.T, c->s.C, 0, 0, 0);
    operand_add(c, "x", ROLE_IN, c->act, c->s.B * c->s.T, c->s.C, 0, 0, 2);
    if (c->s.flags & ALIAS) alias_with(c, "out", "x");
}
static void reference_gelu_forward(KernelCase *c) {
    for (int64_t i = 0; i < operand_find(c, "x")->n; i++) want_of(c, "out")[i] = reference_gelu(value_of(c, "x")[i]);
}
static void call_gelu_forward(KernelCase *c, bool backend, Stream stream) { KERNEL_CALL(gelu_forward, tensor_of(c, "out"), tensor_of(c, "x"), stream); }

static void setup_gelu_backward(KernelCase *c) {
    operand_add(c, "dx", ROLE_OUT, c->act, c->s.B * c->s.T, c->s.C, 0, 0, 0);
    operand_add(c, "dout", ROLE_IN, c->act, c->s.B * c->s.T, c->s.C, 0, 0, 1);
    operand_add(c, "x", ROLE_IN, c->act, c->s.B * c->s.T, c->s.C, 0, 0, 2);
    if (c->s.flags & ALIAS) alias_with(c, "dx", "dout");
}
static void reference_gelu_backward(KernelCase *c) {
    for (int64_t i = 0; i < operand_find(c, "x")->n; i++) want_of(c, "dx")[i] = value_of(c, "dout")[i] * reference_gelu_slope(value_of(c, "x")[i]);
}
static void call_gelu_backward(KernelCase *c, bool backend, Stream stream) { KERNEL_CALL(gelu_backward, tensor_of(c, "dx"), tensor_of(c, "dout"), tensor_of(c, "x"), stream); }

static const KernelShape elementwise_shapes[] = {
    {.B = 1, .T = 1, .C = 8},
    {.B = 3, .T = 17, .C = 64, .flags = ALIAS},
    {.B = 3, .T = 257, .C = 96},
    {.B = 1, .T = 7, .C = 211, .flags = OFFSET},
    {.B = 1, .T = 1, .C = 1, .flags = ALIAS},
    {0},
};
static const Kernel kernel_gelu_forward = {"gelu_forward", setup_gelu_forward, reference_gelu_forward, call_gelu_forward, elementwise_shapes};
static const Kernel kernel_gelu_backward = {"gelu_backward", setup_gelu_backward, reference_gelu_backward, call_gelu_backward, elementwise_shapes};

// ---------------------------------------------------------------------------------------------------------------
// Linear layers

static void setup_linear_forward(KernelCase *c) {
    const int64_t N = c->s.B * c->s.T, C = c->s.C, OC = c->s.OC;
    operand_add(c, "out", ROLE_OUT, c->act, N, OC, 0, 0, 0);
    operand_add(c, "inp", ROLE_IN, c->act, N, C, 0, 0, 1);
    operand_add(c, "w", ROLE_IN, c->act, OC, C, 0, 0, 1 / sqrt((double)C));
    if (c->s.flags & BIAS) operand_add(c, "bias", ROLE_IN, c->act, OC, 0, 0, 0, 1);
    if (c->s.flags & RESIDUAL) operand_add(c, "residual", ROLE_IN, c->act, N, OC, 0, 0, 1);
    if (c->s.flags & PRE_GELU) operand_add(c, "pre_gelu", ROLE_OUT, c->act, N, OC, 0, 0, 0);
    if (c->s.flags & ALIAS) alias_with(c, "out", "residual");
}
static void reference_linear_forward(KernelCase *c) {
    const int64_t N = c->s.B * c->s.T, C = c->s.C, OC = c->s.OC;
    const double *inp = value_of(c, "inp"), *w = value_of(c, "w"), *bias = value_of(c, "bias"), *residual = value_of(c, "residual");
    double *out = want_of(c, "out"), *pre_gelu = want_of(c, "pre_gelu");
    for (int64_t i = 0; i < N; i++)
        for (int64_t o = 0; o < OC; o++) {
            double sum = bias ? bias[o] : 0;
            for (int64_t k = 0; k < C; k++) sum += inp[i * C + k] * w[o * C + k];
            if (pre_gelu) pre_gelu[i * OC + o] = sum;
            out[i * OC + o] = pre_gelu ? reference_gelu(sum) : sum + (residual ? residual[i * OC + o] : 0);
        }
}
static void call_linear_forward(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(linear_forward, tensor_of(c, "out"), tensor_of(c, "inp"), tensor_of(c, "w"), tensor_of(c, "bias"), tensor_of(c, "residual"), tensor_of(c, "pre_gelu"), stream);
}

// The same with GELU of the rounded values, beside what gelu_forward makes of them.
static void setup_linear_gelu_forward(KernelCase *c) {
    setup_linear_forward(c);
    operand_add(c, "gelu", ROLE_OUT, c->act, c->s.B * c->s.T, c->s.OC, 0, 0, 0);
}
static void reference_linear_gelu_forward(KernelCase *c) {
    reference_linear_forward(c);
    const Operand *out = operand_find(c, "out");
    memcpy(want_of(c, "gelu"), out->want, (size_t)out->n * sizeof *out->want);
}
static void call_linear_gelu_forward(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(linear_gelu_forward, tensor_of(c, "out"), tensor_of(c, "pre_gelu"), tensor_of(c, "inp"), tensor_of(c, "w"), tensor_of(c, "bias"), stream);
    KERNEL_CALL(gelu_forward, tensor_of(c, "gelu"), tensor_of(c, "pre_gelu"), stream);
}

static void setup_linear_backward_input(KernelCase *c) {
    const int64_t N = c->s.B * c->s.T, C = c->s.C, OC = c->s.OC;
    operand_add(c, "dinp", ROLE_OUT, c->act, N, C, 0, 0, 0);
    operand_add(c, "dout", ROLE_IN, c->act, N, OC, 0, 0, 1);
    operand_add(c, "w", ROLE_IN, c->act, OC, C, 0, 0, 1 / sqrt((double)C));
    if (c->s.flags & PRE_GELU) operand_add(c, "pre_gelu", ROLE_IN, c->act, N, C, 0, 0, 1);
    if (c->s.flags & BIAS) operand_add(c, "sum_dinp", c->s.flags & ACCUMULATE ? ROLE_INOUT : ROLE_OUT, param_grad_type(c), C, 0, 0, 0, 1)->precision = c->act;
}
static void reference_linear_backward_input(KernelCase *c) {
    const int64_t N = c->s.B * c->s.T, C = c->s.C, OC = c->s.OC;
    const double *dout = value_of(c, "dout"), *w = value_of(c, "w"), *pre_gelu = value_of(c, "pre_gelu");
    double *dinp = want_of(c, "dinp"), *sum_dinp = want_of(c, "sum_dinp");
    for (int64_t k = 0; k < C && sum_dinp && !(c->s.flags & ACCUMULATE); k++) sum_dinp[k] = 0;
    for (int64_t i = 0; i < N; i++) {
        double *row = dinp + i * C;
        for (int64_t k = 0; k < C; k++) row[k] = 0;
        for (int64_t o = 0; o < OC; o++)
            for (int64_t k = 0; k < C; k++) row[k] += dout[i * OC + o] * w[o * C + k];
        for (int64_t k = 0; k < C && pre_gelu; k++) row[k] *= reference_gelu_slope(pre_gelu[i * C + k]);
        for (int64_t k = 0; k < C && sum_dinp; k++) sum_dinp[k] += row[k];
    }
}
static void call_linear_backward_input(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(linear_backward_input, tensor_of(c, "dinp"), tensor_of(c, "sum_dinp"), tensor_of(c, "dout"), tensor_of(c, "w"), tensor_of(c, "pre_gelu"),
                (c->s.flags & ACCUMULATE) != 0, stream);
}

static void setup_linear_backward_weight(KernelCase *c) {
    const int64_t N = c->s.B * c->s.T, C = c->s.C, OC = c->s.OC;
    const OperandRole sums = c->s.flags & ACCUMULATE ? ROLE_INOUT : ROLE_OUT;
    operand_add(c, "dw", sums, param_grad_type(c), OC, C, 0, 0, 1);
    if (c->s.flags & BIAS) operand_add(c, "dbias", sums, param_grad_type(c), OC, 0, 0, 0, 1);
    operand_add(c, "dout", ROLE_IN, c->act, N, OC, 0, 0, 1);
    operand_add(c, "inp", ROLE_IN, c->act, N, C, 0, 0, 1);
}
static void reference_linear_backward_weight(KernelCase *c) {
    const int64_t N = c->s.B * c->s.T, C = c->s.C, OC = c->s.OC;
    const double *dout = value_of(c, "dout"), *inp = value_of(c, "inp");
    double *dw = want_of(c, "dw"), *dbias = want_of(c, "dbias");
    if (!(c->s.flags & ACCUMULATE)) {
        memset(dw, 0, (size_t)(OC * C) * 8);
        if (dbias) memset(dbias, 0, (size_t)OC * 8);
    }
    for (int64_t i = 0; i < N; i++)
        for (int64_t o = 0; o < OC; o++) {
            for (int64_t k = 0; k < C; k++) dw[o * C + k] += dout[i * OC + o] * inp[i * C + k];
            if (dbias) dbias[o] += dout[i * OC + o];
        }
}
static void call_linear_backward_weight(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(linear_backward_weight, tensor_of(c, "dw"), tensor_of(c, "dbias"), tensor_of(c, "dout"), tensor_of(c, "inp"), (c->s.flags & ACCUMULATE) != 0, stream);
}

// N = B*T, C, OC around and across the sizes of blocks and panels of a blocked product, and much smaller.
static const KernelShape linear_shapes[] = {
    {.B = 1, .T = 1, .C = 8, .OC = 8, .flags = BIAS},
    {.B = 1, .T = 64, .C = 192, .OC = 256, .flags = BIAS | PRE_GELU},
    {.B = 3, .T = 17, .C = 96, .OC = 288, .flags = BIAS | ACCUMULATE},
    {.B = 3, .T = 40, .C = 256, .OC = 64, .flags = BIAS | RESIDUAL | ALIAS | ACCUMULATE},
    {.B = 1, .T = 257, .C = 520, .OC = 264, .flags = PRE_GELU | ACCUMULATE},
    {.B = 1, .T = 400, .C = 200, .OC = 520, .flags = PRE_GELU | BIAS | ACCUMULATE | ACT_GRAD},
    {.B = 1, .T = 4099, .C = 16, .OC = 1032, .flags = PRE_GELU | BIAS},              // so many tiles that a GPU's processors have several each
    {.B = 1, .T = 4099, .C = 1032, .OC = 16, .flags = PRE_GELU | BIAS | ACCUMULATE}, // the same backward
    {.B = 4, .T = 255, .C = 264, .OC = 136, .flags = RESIDUAL | BIAS},
    {.B = 4, .T = 255, .C = 264, .OC = 136, .flags = BIAS | ACT_GRAD},
    {.B = 1, .T = 33, .C = 72, .OC = 1032, .flags = BIAS | ACT_GRAD | ACCUMULATE},
    {.B = 1, .T = 24, .C = 1032, .OC = 40, .flags = BIAS | RESIDUAL},
    {.B = 1, .T = 1, .C = 1, .OC = 1, .flags = BIAS | RESIDUAL | CPU_ONLY},
    {.B = 1, .T = 7, .C = 13, .OC = 5, .flags = BIAS | PRE_GELU | ACCUMULATE | CPU_ONLY},
    {.B = 1, .T = 33, .C = 257, .OC = 211, .flags = BIAS | RESIDUAL | ALIAS | CPU_ONLY},
    {.B = 1, .T = 33, .C = 257, .OC = 211, .flags = BIAS | ACT_GRAD | CPU_ONLY},
    {.B = 1, .T = 211, .C = 1, .OC = 97, .flags = ACCUMULATE | CPU_ONLY},
    {.B = 1, .T = 1, .C = 211, .OC = 1031, .flags = PRE_GELU | CPU_ONLY},
    {.B = 1, .T = 1031, .C = 31, .OC = 1, .flags = BIAS | CPU_ONLY},
    {.B = 1, .T = 4099, .C = 16, .OC = 24, .flags = BIAS | RESIDUAL},
    {0},
};
static const Kernel kernel_linear_forward = {"linear_forward", setup_linear_forward, reference_linear_forward, call_linear_forward, linear_shapes};
static const KernelShape linear_gelu_shapes[] = {
    {.B = 1, .T = 64, .C = 192, .OC = 256, .flags = BIAS | PRE_GELU},
    {.B = 1, .T = 300, .C = 1288, .OC = 264, .flags = BIAS | PRE_GELU},
    {.B = 1, .T = 4099, .C = 16, .OC = 1032, .flags = PRE_GELU},
    {.B = 1, .T = 7, .C = 13, .OC = 5, .flags = BIAS | PRE_GELU | CPU_ONLY},
    {0},
};
static const Kernel kernel_linear_gelu_forward = {"linear_gelu_forward", setup_linear_gelu_forward, reference_linear_gelu_forward, call_linear_gelu_forward, linear_gelu_shapes};
static const Kernel kernel_linear_backward_input = {"linear_backward_input", setup_linear_backward_input, reference_linear_backward_input, call_linear_backward_input, linear_shapes};
static const Kernel kernel_linear_backward_weight = {"linear_backward_weight", setup_linear_backward_weight, reference_linear_backward_weight, call_linear_backward_weight, linear_shapes};

static void setup_bias_backward(KernelCase *c) {
    operand_add(c, "dbias", c->s.flags & ACCUMULATE ? ROLE_INOUT : ROLE_OUT, param_grad_type(c), c->s.OC, 0, 0, 0, 1);
    operand_add(c, "dout", ROLE_IN, c->act, c->s.B * c->s.T, c->s.OC, 0, 0, 1);
}
static void reference_bias_backward(KernelCase *c) {
    const int64_t OC = c->s.OC;
    double *dbias = want_of(c, "dbias");
    for (int64_t o = 0; o < OC; o++) {
        if (!(c->s.flags & ACCUMULATE)) dbias[o] = 0;
        for (int64_t i = 0; i < c->s.B * c->s.T; i++) dbias[o] += value_of(c, "dout")[i * OC + o];
    }
}
static void call_bias_backward(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(bias_backward, tensor_of(c, "dbias"), tensor_of(c, "dout"), (c->s.flags & ACCUMULATE) != 0, stream);
}
static const Kernel kernel_bias_backward = {"bias_backward", setup_bias_backward, reference_bias_backward, call_bias_backward, linear_shapes};

// ---------------------------------------------------------------------------------------------------------------
// Attention

static void reference_attention(double *out, double *lse, const double *qkv, int64_t B, int64_t T, int64_t C, int64_t NH, int64_t window) {
    const int64_t HS = C / NH;
    double *p = (double *)host_alloc((size_t)T * 8);
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < NH; h++) {
            const double *q = qkv + b * T * 3 * C + h * HS, *k = q + C, *v = k + C;
            for (int64_t t = 0; t < T; t++) {
                const int64_t oldest = window ? max_i64(0, t - window + 1) : 0;
                double largest = -INFINITY, sum = 0;
                for (int64_t s = oldest; s <= t; s++) {
                    p[s] = 0;
                    for (int64_t d = 0; d < HS; d++) p[s] += q[t * 3 * C + d] * k[s * 3 * C + d] / sqrt((double)HS);
                    if (p[s] > largest) largest = p[s];
                }
                for (int64_t s = oldest; s <= t; s++) sum += p[s] = exp(p[s] - largest);
                double *o = out + (b * T + t) * C + h * HS;
                for (int64_t d = 0; d < HS; d++) o[d] = 0;
                for (int64_t s = oldest; s <= t; s++)
                    for (int64_t d = 0; d < HS; d++) o[d] += p[s] / sum * v[s * 3 * C + d];
                lse[(b * NH + h) * T + t] = largest + log(sum);
            }
        }
    free(p);
}

// Scores of deviation 2 make a softmax that is neither flat nor a choice of one.
#define ATTENTION_DEVIATION 1.4

static void setup_attention_forward(KernelCase *c) {
    const KernelShape s = c->s;
    operand_add(c, "out", ROLE_OUT, c->act, s.B, s.T, s.C, 0, 0);
    operand_add(c, "lse", ROLE_OUT, DTYPE_FP32, s.B, s.NH, s.T, 0, 0);
    operand_add(c, "qkv", ROLE_IN, c->act, s.B, s.T, 3 * s.C, 0, ATTENTION_DEVIATION);
}
static void reference_attention_forward(KernelCase *c) {
    reference_attention(want_of(c, "out"), want_of(c, "lse"), value_of(c, "qkv"), c->s.B, c->s.T, c->s.C, c->s.NH, c->s.window);
}
static void call_attention_forward(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(attention_forward, tensor_of(c, "out"), tensor_of(c, "lse"), tensor_of(c, "qkv"), (int)c->s.NH, c->s.window, stream);
}

static void setup_attention_backward(KernelCase *c) {
    const KernelShape s = c->s;
    operand_add(c, "dqkv", ROLE_OUT, c->act, s.B, s.T, 3 * s.C, 0, 0);
    operand_add(c, "dout", ROLE_IN, c->act, s.B, s.T, s.C, 0, 1);
    operand_add(c, "qkv", ROLE_IN, c->act, s.B, s.T, 3 * s.C, 0, ATTENTION_DEVIATION);
    Operand *out = operand_add(c, "out", ROLE_IN, c->act, s.B, s.T, s.C, 0, 0);
    Operand *lse = operand_add(c, "lse", ROLE_IN, DTYPE_FP32, s.B, s.NH, s.T, 0, 0);
    reference_attention(out->value, lse->value, value_of(c, "qkv"), s.B, s.T, s.C, s.NH, s.window);
    for (int64_t i = 0; i < out->n && !c->exact; i++) out->value[i] = operand_round(out->type, out->value[i]);
    for (int64_t i = 0; i < lse->n && !c->exact; i++) lse->value[i] = operand_round(lse->type, lse->value[i]);
}
static void reference_attention_backward(KernelCase *c) {
    const int64_t B = c->s.B, T = c->s.T, C = c->s.C, NH = c->s.NH, HS = C / NH;
    const double *dout = value_of(c, "dout"), *qkv = value_of(c, "qkv"), *out = value_of(c, "out"), *lse = value_of(c, "lse"), scale = 1 / sqrt((double)HS);
    double *dqkv = want_of(c, "dqkv");
    memset(dqkv, 0, (size_t)(B * T * 3 * C) * 8);
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < NH; h++)
            for (int64_t t = 0; t < T; t++) {
                const double *q = qkv + (b * T + t) * 3 * C + h * HS, *d = dout + (b * T + t) * C + h * HS, *o = out + (b * T + t) * C + h * HS;
                double *dq = dqkv + (q - qkv), D = 0;
                for (int64_t i = 0; i < HS; i++) D += d[i] * o[i];
                for (int64_t s = c->s.window ? max_i64(0, t - c->s.window + 1) : 0; s <= t; s++) {
                    const double *k = qkv + (b * T + s) * 3 * C + C + h * HS, *v = k + C;
                    double *dk = dqkv + (k - qkv), *dv = dk + C, score = 0, dp = 0;
                    for (int64_t i = 0; i < HS; i++) {
                        score += q[i] * k[i] * scale;
                        dp += d[i] * v[i];
                    }
                    const double p = exp(score - lse[(b * NH + h) * T + t]), ds = p * (dp - D) * scale;
                    for (int64_t i = 0; i < HS; i++) {
                        dq[i] += ds * k[i];
                        dk[i] += ds * q[i];
                        dv[i] += p * d[i];
                    }
                }
            }
}
static void call_attention_backward(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(attention_backward, tensor_of(c, "dqkv"), tensor_of(c, "dout"), tensor_of(c, "qkv"), tensor_of(c, "out"), tensor_of(c, "lse"), (int)c->s.NH, c->s.window,
                !(c->s.flags & ANY_ORDER), stream);
}

static const KernelShape attention_shapes[] = {
    {.B = 3, .T = 17, .C = 4 * 8, .NH = 4},
    {.B = 1, .T = 1, .C = 2 * 32, .NH = 2},
    {.B = 1, .T = 257, .C = 32, .NH = 1},
    {.B = 3, .T = 40, .C = 2 * 48, .NH = 2},
    {.B = 1, .T = 255, .C = 2 * 64, .NH = 2},
    {.B = 1, .T = 64, .C = 3 * 80, .NH = 3},
    {.B = 1, .T = 129, .C = 96, .NH = 1},
    {.B = 1, .T = 65, .C = 128, .NH = 1},
    {.B = 2, .T = 391, .C = 2 * 128, .NH = 2},
    {.B = 4, .T = 260, .C = 60 * 8, .NH = 60}, // more heads than a GPU has in work at a time, and more tiles than blocks
    {.B = 9, .T = 130, .C = 8 * 104, .NH = 8}, // likewise
    {.B = 1, .T = 577, .C = 64, .NH = 1},      // a first tile of queries that begins before the sequence
    {.B = 3, .T = 17, .C = 4 * 8, .NH = 4, .window = 5},
    {.B = 1, .T = 257, .C = 32, .NH = 1, .window = 7},
    {.B = 3, .T = 40, .C = 2 * 48, .NH = 2, .window = 1},       // each token sees itself alone
    {.B = 1, .T = 255, .C = 2 * 64, .NH = 2, .window = 100},
    {.B = 1, .T = 300, .C = 3 * 80, .NH = 3, .window = 65},
    {.B = 1, .T = 129, .C = 96, .NH = 1, .window = 128},        // all but one of the last token's
    {.B = 1, .T = 65, .C = 128, .NH = 1, .window = 65},         // all
    {.B = 1, .T = 130, .C = 2 * 32, .NH = 2, .window = 1000},   // more than all
    {.B = 2, .T = 391, .C = 2 * 128, .NH = 2, .window = 130},
    {.B = 4, .T = 260, .C = 60 * 8, .NH = 60, .window = 64},
    {.B = 9, .T = 260, .C = 8 * 104, .NH = 8, .window = 127},
    {.B = 1, .T = 577, .C = 64, .NH = 1, .window = 193},
    {.B = 1, .T = 257, .C = 3, .NH = 3, .window = 50, .flags = CPU_ONLY},
    {.B = 3, .T = 40, .C = 3 * 20, .NH = 3, .window = 39, .flags = CPU_ONLY},
    {.B = 3, .T = 40, .C = 3 * 20, .NH = 3, .flags = CPU_ONLY},
    {.B = 1, .T = 257, .C = 3, .NH = 3, .flags = CPU_ONLY},
    {.B = 1, .T = 64, .C = 33, .NH = 1, .flags = CPU_ONLY},
    {0},
};
static const Kernel kernel_attention_forward = {"attention_forward", setup_attention_forward, reference_attention_forward, call_attention_forward, attention_shapes};
static const Kernel kernel_attention_backward = {"attention_backward", setup_attention_backward, reference_attention_backward, call_attention_backward, attention_shapes};

// A window that leaves nothing out gives the bits of no window.
static void attention_whole_window(Test *t, const Kernel *k, bool backend) {
    static const KernelShape shapes[] = {{.B = 2, .T = 65, .C = 2 * 16, .NH = 2}, {.B = 1, .T = 300, .C = 2 * 64, .NH = 2}, {.B = 1, .T = 257, .C = 80, .NH = 1}, {.B = 1, .T = 130, .C = 128, .NH = 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int act = 0; act < DTYPE_COUNT; act++) {
            double **none = NULL;
            const int64_t windows[] = {0, shapes[i].T, shapes[i].T + 1, INT64_MAX};
            for (int w = 0; w < 4; w++) {
                KernelShape s = shapes[i];
                s.window = windows[w];
                KernelCase *c = case_make(k, s, (DType)act, false);
                case_run(k, c, backend);
                if (w == 0) none = results_keep(c);
                else compare_bits(t, k, c, none, "a window of all tokens");
                if (w == 3) results_free(c, none);
                case_free(c);
            }
        }
}
static void test_attention_whole_window(Test *t) {
    for (int backend = 0; backend <= KERNELS_ON_GPU; backend++) {
        attention_whole_window(t, &kernel_attention_forward, backend);
        attention_whole_window(t, &kernel_attention_backward, backend);
    }
}

// With dq added up in any order, the GPU is as close to its CPU twin as in order.
static void test_attention_any_order(Test *t) {
    static const KernelShape shapes[] = {{.B = 2, .T = 1000, .C = 3 * 64, .NH = 3}, {.B = 1, .T = 900, .C = 4 * 128, .NH = 4}, {.B = 3, .T = 700, .C = 60 * 8, .NH = 60, .window = 600}, {.B = 1, .T = 100, .C = 96, .NH = 1}};
    if (!KERNELS_ON_GPU) { test_skip(t, "this build has no GPU kernels"); return; }
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int act = 0; act < DTYPE_COUNT; act++) {
            KernelShape s = shapes[i];
            s.flags = ANY_ORDER;
            KernelCase *c = case_make(&kernel_attention_backward, s, (DType)act, false);
            case_run(&kernel_attention_backward, c, false);
            double **twin = results_keep(c);
            for (int run = 0; run < 3; run++) {
                case_run(&kernel_attention_backward, c, true);
                compare_operand(t, &kernel_attention_backward, c, operand_find(c, "dqkv"), twin[0], gpu_bounds);
            }
            results_free(c, twin);
            case_free(c);
        }
}

// ---------------------------------------------------------------------------------------------------------------
// Softmax and cross-entropy

#define TEST_DLOSS 0.37f

static void setup_classifier(KernelCase *c) {
    const KernelShape s = c->s;
    operand_add(c, "logits", ROLE_INOUT, c->act, s.B, s.T, s.Vp, 0, 3);
    operand_add(c, "losses", ROLE_OUT, DTYPE_FP32, s.B, s.T, 0, 0, 0);
    setup_tokens(c, "targets", s.V);
    for (int64_t i = 0; i < s.B * s.T; i += 5) if (i) value_of(c, "targets")[i] = i % 2 ? -1 : -100; // rows that are masked out
}
// logits (N,Vp) -> losses (N) and, if asked for, dlogits (N,Vp).
static void reference_cross_entropy(double *losses, double *dlogits, const double *logits, const double *targets, int64_t N, int64_t V, int64_t Vp) {
    for (int64_t i = 0; i < N; i++) {
        const double *x = logits + i * Vp;
        double sum = 0, largest = -INFINITY;
        for (int64_t j = 0; j < V; j++) largest = fmax(largest, x[j]);
        for (int64_t j = 0; j < V; j++) sum += exp(x[j] - largest);
        losses[i] = targets[i] < 0 ? 0 : log(sum) + largest - x[(int64_t)targets[i]];
        for (int64_t j = 0; j < Vp && dlogits; j++)
            dlogits[i * Vp + j] = targets[i] < 0 || j >= V ? 0 : (exp(x[j] - largest) / sum - (j == (int64_t)targets[i])) * (double)TEST_DLOSS;
    }
}
static void reference_classifier(KernelCase *c) {
    reference_cross_entropy(want_of(c, "losses"), c->s.flags & NO_WRITE ? NULL : want_of(c, "logits"), value_of(c, "logits"), value_of(c, "targets"), c->s.B * c->s.T, c->s.V, c->s.Vp);
}
static void call_classifier(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(classifier_forward_backward, tensor_of(c, "logits"), tensor_of(c, "losses"), ints_of(c, "targets"), c->s.V, TEST_DLOSS, !(c->s.flags & NO_WRITE), stream);
}
static const KernelShape classifier_shapes[] = {
    {.B = 1, .T = 7, .V = 1, .Vp = 64},
    {.B = 3, .T = 17, .V = 211, .Vp = 256},
    {.B = 3, .T = 17, .V = 211, .Vp = 256, .flags = NO_WRITE},
    {.B = 1, .T = 40, .V = 257, .Vp = 320},
    {.B = 1, .T = 4, .V = 50257, .Vp = 50304},
    {.B = 1, .T = 2, .V = 130003, .Vp = 130048}, // a row does not fit a GPU's shared memory
    {.B = 1, .T = 6, .V = 1000, .Vp = 1000, .flags = NO_WRITE},
    {.B = 1, .T = 9, .V = 211, .Vp = 211, .flags = CPU_ONLY},
    {0},
};
static const Kernel kernel_classifier = {"classifier_forward_backward", setup_classifier, reference_classifier, call_classifier, classifier_shapes};

// The same in two steps, the vocabulary in parts of `part` columns: logits (P,N,part). Each part has losses of its own.
static void setup_classifier_parts(KernelCase *c) {
    const KernelShape s = c->s;
    const int64_t N = s.B * s.T, P = s.Vp / s.part;
    operand_add(c, "logits", ROLE_INOUT, c->act, P, N, s.part, 0, 3);
    operand_add(c, "statistics", ROLE_OUT, DTYPE_FP32, P, N, 3, 0, 0);
    operand_add(c, "losses", ROLE_OUT, DTYPE_FP32, P, N, 0, 0, 0);
    setup_tokens(c, "targets", s.V);
    for (int64_t i = 3; i < N; i += 5) value_of(c, "targets")[i] = i % 2 ? -1 : -100;
}
static void reference_classifier_parts(KernelCase *c) {
    const KernelShape s = c->s;
    const int64_t N = s.B * s.T, P = s.Vp / s.part;
    const double *logits = value_of(c, "logits"), *targets = value_of(c, "targets");
    double *losses = want_of(c, "losses"), *dlogits = want_of(c, "logits"), *statistics = want_of(c, "statistics");
    double *whole = (double *)host_alloc((size_t)(N * s.Vp) * 8), *dwhole = (double *)host_alloc((size_t)(N * s.Vp) * 8);
    for (int64_t p = 0; p < P; p++)
        for (int64_t i = 0; i < N; i++) {
            const double *x = logits + (p * N + i) * s.part;
            const int64_t n = max_i64(0, min_i64(s.part, s.V - p * s.part)), target = (int64_t)targets[i] - p * s.part;
            double largest = n > 0 ? x[0] : -(double)FLT_MAX, sum = 0;
            memcpy(whole + i * s.Vp + p * s.part, x, (size_t)s.part * 8);
            for (int64_t j = 0; j < n; j++) largest = fmax(largest, x[j]);
            for (int64_t j = 0; j < n; j++) sum += exp(x[j] - largest);
            statistics[(p * N + i) * 3] = largest;
            statistics[(p * N + i) * 3 + 1] = sum;
            statistics[(p * N + i) * 3 + 2] = targets[i] >= 0 && target >= 0 && target < n ? x[target] : 0;
        }
    reference_cross_entropy(losses, dwhole, whole, targets, N, s.V, s.Vp);
    for (int64_t p = 0; p < P; p++) {
        memcpy(losses + p * N, losses, (size_t)N * 8);
        for (int64_t i = 0; i < N && !(s.flags & NO_WRITE); i++) memcpy(dlogits + (p * N + i) * s.part, dwhole + i * s.Vp + p * s.part, (size_t)s.part * 8);
    }
    free(whole);
    free(dwhole);
}
static void call_classifier_parts(KernelCase *c, bool backend, Stream stream) {
    const KernelShape s = c->s;
    const int64_t N = s.B * s.T, P = s.Vp / s.part;
    const Tensor logits = tensor_of(c, "logits"), statistics = tensor_of(c, "statistics");
    float *losses = (float *)tensor_of(c, "losses").data;
    for (int step = 0; step < 2; step++)
        for (int64_t p = 0; p < P; p++) {
            const Tensor x = tensor2((char *)logits.data + p * N * s.part * dtype_bytes(logits.dtype), logits.dtype, N, s.part);
            if (step == 0) KERNEL_CALL(classifier_statistics, tensor2((float *)statistics.data + p * N * 3, DTYPE_FP32, N, 3), x, ints_of(c, "targets"), s.V, p * s.part, stream);
            else KERNEL_CALL(classifier_from_statistics, x, tensor1(losses + p * N, DTYPE_FP32, N), statistics, ints_of(c, "targets"), s.V, p * s.part, TEST_DLOSS, !(s.flags & NO_WRITE), stream);
        }
}
static const KernelShape classifier_parts_shapes[] = {
    {.B = 1, .T = 7, .V = 1, .Vp = 64, .part = 32}, // the second has padding only
    {.B = 3, .T = 17, .V = 211, .Vp = 256, .part = 128},
    {.B = 3, .T = 17, .V = 211, .Vp = 256, .part = 64, .flags = NO_WRITE},
    {.B = 1, .T = 40, .V = 257, .Vp = 320, .part = 40},
    {.B = 1, .T = 4, .V = 50257, .Vp = 50304, .part = 16768},
    {.B = 1, .T = 6, .V = 1000, .Vp = 1000, .part = 1000},
    {.B = 1, .T = 9, .V = 200, .Vp = 211 * 3, .part = 211, .flags = CPU_ONLY},
    {0},
};
static const Kernel kernel_classifier_parts = {"classifier in parts", setup_classifier_parts, reference_classifier_parts, call_classifier_parts, classifier_parts_shapes};

// ---------------------------------------------------------------------------------------------------------------
// Flat buffers: sums, conversions, optimizers. n = C elements.

static int grad_type(const KernelCase *c) { return c->s.flags & BF16_GRAD ? DTYPE_BF16 : DTYPE_FP32; }

static void setup_sum(KernelCase *c) {
    operand_add(c, "out", c->s.flags & ACCUMULATE ? ROLE_INOUT : ROLE_OUT, OPERAND_DOUBLE, 1, 0, 0, 5, 1);
    operand_add(c, "x", ROLE_IN, DTYPE_FP32, c->s.C, 0, 0, 0.5, 1);
}
static void setup_sum_squares(KernelCase *c) {
    operand_add(c, "out", c->s.flags & ACCUMULATE ? ROLE_INOUT : ROLE_OUT, OPERAND_DOUBLE, 1, 0, 0, 5, 1);
    operand_add(c, "x", ROLE_IN, grad_type(c), c->s.C, 0, 0, 0.5, 1);
}
static void reference_sum_of(KernelCase *c, bool squares) {
    double *out = want_of(c, "out");
    const double *x = value_of(c, "x");
    if (!(c->s.flags & ACCUMULATE)) *out = 0;
    for (int64_t i = 0; i < c->s.C; i++) *out += squares ? x[i] * x[i] : x[i];
}
static void reference_sum(KernelCase *c) { reference_sum_of(c, false); }
static void reference_sum_squares(KernelCase *c) { reference_sum_of(c, true); }
static void call_sum(KernelCase *c, bool backend, Stream stream) {
    KERNEL_CALL(sum_to_double, (double *)operand_find(c, "out")->memory, tensor_of(c, "x"), (c->s.flags & ACCUMULATE) != 0, stream);
}
// x as 100 tensors of different lengths, more than a launch takes, where it has elements for them.
static void call_sum_squares(KernelCase *c, bool backend, Stream stream) {
    const Tensor x = tensor_of(c, "x");
    enum { PIECES = 100 };
    Tensor piece[PIECES];
    const int n = c->s.C < 10000 ? 1 : PIECES;
    int64_t at = 0;
    for (int k = 0; k < n; k++) {
        const int64_t length = k == n - 1 ? c->s.C - at : c->s.C < 50000 ? 2 * k + k % 3 : 8 * k; // the latter aligned
        piece[k] = tensor1((char *)x.data + at * dtype_bytes(x.dtype), x.dtype, length);
        at += length;
    }
    KERNEL_CALL(sum_squares_to_double, (double *)operand_find(c, "out")->memory, piece, n, (c->s.flags & ACCUMULATE) != 0, stream);
}
static const KernelShape flat_shapes[] = {
    {.B = 1, .C = 1},
    {.B = 1, .C = 7, .flags = ACCUMULATE | OFFSET | DECOUPLED},
    {.B = 1, .C = 4096, .flags = ACCUMULATE | DECOUPLED},
    {.B = 1, .C = 100003, .flags = DECOUPLED},
    {.B = 1, .C = 16391, .flags = OFFSET},
    {.B = 1, .C = 7, .flags = ACCUMULATE | OFFSET | BF16_GRAD},
    {.B = 1, .C = 70001, .flags = BF16_GRAD},
    {0},
};
static const Kernel kernel_sum = {"sum_to_double", setup_sum, reference_sum, call_sum, flat_shapes};
static const Kernel kernel_sum_squares = {"sum_squares_to_double", setup_sum_squares, reference_sum_squares, call_sum_squares, flat_shapes};

// From the case's element type to all three.
static void setup_convert(KernelCase *c) {
    operand_add(c, "x", ROLE_IN, c->act, c->s.C, 0, 0, 0, 3);
    operand_add(c, "to fp32", ROLE_OUT, DTYPE_FP32, c->s.C, 0, 0, 0, 0);
    operand_add(c, "to bf16", ROLE_OUT, DTYPE_BF16, c->s.C, 0, 0, 0, 0);
    operand_add(c, "to fp16", ROLE_OUT, DTYPE_FP16, c->s.C, 0, 0, 0, 0);
}
static void reference_convert(KernelCase *c) {
    for (int k = 1; k < 4; k++)
        for (int64_t i = 0; i < c->s.C; i++) c->op[k].want[i] = operand_round(c->op[k].type, value_of(c, "x")[i]);
}
static void call_convert(KernelCase *c, bool backend, Stream stream) {
    for (int k = 1; k < 4; k++) KERNEL_CALL(convert, tensor_of(c, c->op[k].name), tensor_of(c, "x"), stream);
}
static const Kernel kernel_convert = {"convert", setup_convert, reference_convert, call_convert, flat_shapes};

// The case's element type added to all three, each sum rounded once.
static void setup_add_inplace(KernelCase *c) {
    operand_add(c, "x", ROLE_IN, c->act, c->s.C, 0, 0, 0, 1);
    operand_add(c, "fp32 y", ROLE_INOUT, DTYPE_FP32, c->s.C, 0, 0, 0, 1);
    operand_add(c, "bf16 y", ROLE_INOUT, DTYPE_BF16, c->s.C, 0, 0, 0, 1);
    operand_add(c, "fp16 y", ROLE_INOUT, DTYPE_FP16, c->s.C, 0, 0, 0, 1);
}
static void reference_add_inplace(KernelCase *c) {
    for (int k = 1; k < 4; k++)
        for (int64_t i = 0; i < c->s.C; i++) c->op[k].want[i] = operand_round(c->op[k].type, c->op[k].value[i] + value_of(c, "x")[i]);
}
static void call_add_inplace(KernelCase *c, bool backend, Stream stream) {
    for (int k = 1; k < 4; k++) KERNEL_CALL(add_inplace, tensor_of(c, c->op[k].name), tensor_of(c, "x"), stream);
}
static const Kernel kernel_add_inplace = {"add_inplace", setup_add_inplace, reference_add_inplace, call_add_inplace, flat_shapes};

// Three parts of the case's element type, summed in fp32, rounded to that type, then stored or added.
static void setup_sum_parts(KernelCase *c) {
    operand_add(c, "parts", ROLE_IN, c->act, 3, c->s.C, 0, 0, 1);
    OperandRole role = c->s.flags & ACCUMULATE ? ROLE_INOUT : ROLE_OUT;
    operand_add(c, "fp32 y", role, DTYPE_FP32, c->s.C, 0, 0, 0, 1);
    operand_add(c, "bf16 y", role, DTYPE_BF16, c->s.C, 0, 0, 0, 1);
}
static void reference_sum_parts(KernelCase *c) {
    const int64_t n = c->s.C;
    const double *x = value_of(c, "parts");
    for (int k = 1; k < 3; k++)
        for (int64_t i = 0; i < n; i++) {
            double sum = operand_round(c->act, (float)x[i] + (float)x[n + i] + (float)x[2 * n + i]);
            c->op[k].want[i] = operand_round(c->op[k].type, (c->s.flags & ACCUMULATE ? (float)c->op[k].value[i] : 0.0f) + (float)sum);
        }
}
static void call_sum_parts(KernelCase *c, bool backend, Stream stream) {
    for (int k = 1; k < 3; k++) KERNEL_CALL(sum_parts, tensor_of(c, c->op[k].name), tensor_of(c, "parts"), (c->s.flags & ACCUMULATE) != 0, stream);
}
static const Kernel kernel_sum_parts = {"sum_parts", setup_sum_parts, reference_sum_parts, call_sum_parts, flat_shapes};

// B x T blocks of C elements.
static void setup_swap_blocks(KernelCase *c) {
    operand_add(c, "out", ROLE_OUT, c->act, c->s.T, c->s.B, c->s.C, 0, 0);
    operand_add(c, "inp", ROLE_IN, c->act, c->s.B, c->s.T, c->s.C, 0, 1);
}
static void reference_swap_blocks(KernelCase *c) {
    const int64_t n1 = c->s.B, n2 = c->s.T, inner = c->s.C;
    for (int64_t i = 0; i < n1; i++)
        for (int64_t j = 0; j < n2; j++) memcpy(want_of(c, "out") + (j * n1 + i) * inner, value_of(c, "inp") + (i * n2 + j) * inner, (size_t)inner * 8);
}
static void call_swap_blocks(KernelCase *c, bool backend, Stream stream) { KERNEL_CALL(swap_blocks, tensor_of(c, "out"), tensor_of(c, "inp"), stream); }
static const KernelShape swap_shapes[] = {
    {.B = 1, .T = 1, .C = 1},
    {.B = 51, .T = 2, .C = 24},
    {.B = 4, .T = 33, .C = 256},
    {.B = 300, .T = 7, .C = 20}, // 16 bits: not whole words of 16 bytes
    {.B = 17, .T = 4, .C = 3},
    {.B = 5, .T = 3, .C = 64, .flags = OFFSET},
    {0},
};
static const Kernel kernel_swap_blocks = {"swap_blocks", setup_swap_blocks, reference_swap_blocks, call_swap_blocks, swap_shapes};

static void setup_fill(KernelCase *c) { operand_add(c, "out", ROLE_OUT, c->act, c->s.C, 0, 0, 0, 0); }
static void reference_fill(KernelCase *c) {
    for (int64_t i = 0; i < c->s.C; i++) want_of(c, "out")[i] = operand_round(c->act, -1.7);
}
static void call_fill(KernelCase *c, bool backend, Stream stream) { KERNEL_CALL(fill, tensor_of(c, "out"), -1.7f, stream); }
static const Kernel kernel_fill = {"fill", setup_fill, reference_fill, call_fill, flat_shapes};

// Optimizers make OPTIMIZER_STEPS updates with one gradient, scaled differently each time, and before each of them one that
// is to be skipped and must change nothing.
enum { OPTIMIZER_STEPS = 4, OPTIMIZER_SKIP = OPTIMIZER_STEPS };
static float optimizer_grad_scale(int step) { return step == 2 ? -0.5f : 0.25f + 0.5f * (float)step; }

static void setup_optimizer(KernelCase *c, int states) {
    operand_add(c, "master", ROLE_INOUT, DTYPE_FP32, c->s.C, 0, 0, 0, 1);
    operand_add(c, "param", ROLE_OUT, c->act, c->s.C, 0, 0, 0, 0);
    operand_add(c, "grad", ROLE_IN, grad_type(c), c->s.C, 0, 0, 0, 0.5);
    if (states > 0) operand_add(c, "m", ROLE_INOUT, DTYPE_FP32, c->s.C, 0, 0, 0, 0.1);
    if (states > 1) {
        Operand *v = operand_add(c, "v", ROLE_INOUT, DTYPE_FP32, c->s.C, 0, 0, 0, 0.1);
        for (int64_t i = 0; i < v->n; i++) v->value[i] = fabs(v->value[i]);
    }
    if (c->act == DTYPE_FP32) alias_with(c, "param", "master");
    Operand *control = operand_add(c, "control", ROLE_IN, OPERAND_DOUBLE, (OPTIMIZER_STEPS + 1) * sizeof(UpdateControl) / 8, 0, 0, 0, 0);
    for (int step = 0; step <= OPTIMIZER_STEPS; step++) {
        UpdateControl u = {1, 1, step == OPTIMIZER_SKIP ? NAN : optimizer_grad_scale(step), step != OPTIMIZER_SKIP};
        memcpy((char *)control->value + (size_t)step * sizeof u, &u, sizeof u);
    }
}
static const UpdateControl *control_of(KernelCase *c, int step) { return (const UpdateControl *)operand_find(c, "control")->memory + step; }

// Element i lies in one of B ranges, of which all, half or nothing decays, by turns.
static int64_t optimizer_first(const KernelCase *c, int64_t k) { return c->s.C * k / c->s.B; }
static int64_t optimizer_decays(const KernelCase *c, int64_t k) { return (optimizer_first(c, k + 1) - optimizer_first(c, k)) * (2 - k % 3) / 2; }
static double optimizer_decay(const KernelCase *c, int64_t i, float weight_decay) {
    int64_t k = 0;
    while (i >= optimizer_first(c, k + 1)) k++;
    return i - optimizer_first(c, k) < optimizer_decays(c, k) ? (double)weight_decay : 0;
}
static UpdateRange *optimizer_ranges(KernelCase *c) {
    UpdateRange *r = (UpdateRange *)host_alloc(sizeof *r * (size_t)c->s.B);
    for (int64_t k = 0; k < c->s.B; k++) {
        const int64_t first = optimizer_first(c, k), n = optimizer_first(c, k + 1) - first;
        const char *const names[] = {"param", "master", "grad", "m", "v"};
        Tensor part[5];
        for (int i = 0; i < 5; i++) {
            const Tensor whole = tensor_of(c, names[i]);
            part[i] = whole.data ? tensor1(n > 0 ? (char *)whole.data + first * dtype_bytes(whole.dtype) : NULL, whole.dtype, n) : tensor_none();
        }
        r[k] = {part[0], part[1], part[2], {part[3], part[4]}, optimizer_decays(c, k)};
    }
    return r;
}

static AdamWArgs adamw_args(const KernelCase *c, int step) {
    AdamWArgs a = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1, (c->s.flags & DECOUPLED) != 0};
    if (!(c->s.flags & NO_CORRECTION)) {
        a.bias_correction1 = (float)(1 - pow(0.9, step + 1));
        a.bias_correction2 = (float)(1 - pow(0.95, step + 1));
    }
    return a;
}
static void setup_adamw(KernelCase *c) { setup_optimizer(c, 2); }
static void reference_adamw(KernelCase *c) {
    double *w = want_of(c, "master"), *m = want_of(c, "m"), *v = want_of(c, "v");
    for (int step = 0; step < OPTIMIZER_STEPS; step++) {
        const AdamWArgs a = adamw_args(c, step);
        const double lr = (double)a.lr, b1 = (double)a.beta1, b2 = (double)a.beta2;
        for (int64_t i = 0; i < c->s.C; i++) {
            const double wd = optimizer_decay(c, i, a.weight_decay);
            double g = value_of(c, "grad")[i] * (double)optimizer_grad_scale(step);
            if (a.decoupled_decay) w[i] -= lr * wd * w[i];
            else g += wd * w[i];
            m[i] = b1 * m[i] + (1 - b1) * g;
            v[i] = b2 * v[i] + (1 - b2) * g * g;
            w[i] -= lr * (m[i] / (double)a.bias_correction1) / (sqrt(v[i] / (double)a.bias_correction2) + (double)a.eps);
        }
    }
    for (int64_t i = 0; i < c->s.C; i++) want_of(c, "param")[i] = operand_round(c->act, w[i]);
}
static void call_adamw(KernelCase *c, bool backend, Stream stream) {
    UpdateRange *r = optimizer_ranges(c);
    for (int k = 0; k < 2 * OPTIMIZER_STEPS; k++) {
        const int step = k / 2;
        KERNEL_CALL(adamw_update, r, (int)c->s.B, adamw_args(c, step), control_of(c, k % 2 ? step : OPTIMIZER_SKIP), stream);
    }
    free(r);
}

static const LionArgs lion_args = {0.01f, 0.9f, 0.99f, 0.1f};
static void setup_lion(KernelCase *c) { setup_optimizer(c, 1); }
static void reference_lion(KernelCase *c) {
    double *w = want_of(c, "master"), *m = want_of(c, "m");
    for (int step = 0; step < OPTIMIZER_STEPS; step++) {
        const LionArgs a = lion_args;
        for (int64_t i = 0; i < c->s.C; i++) {
            const double g = value_of(c, "grad")[i] * (double)optimizer_grad_scale(step), direction = (double)a.beta1 * m[i] + (1 - (double)a.beta1) * g;
            w[i] -= (double)a.lr * optimizer_decay(c, i, a.weight_decay) * w[i];
            w[i] -= (double)a.lr * (direction > 0 ? 1 : direction < 0 ? -1 : 0);
            m[i] = (double)a.beta2 * m[i] + (1 - (double)a.beta2) * g;
        }
    }
    for (int64_t i = 0; i < c->s.C; i++) want_of(c, "param")[i] = operand_round(c->act, w[i]);
}
static void call_lion(KernelCase *c, bool backend, Stream stream) {
    UpdateRange *r = optimizer_ranges(c);
    for (int k = 0; k < 2 * OPTIMIZER_STEPS; k++) {
        const int step = k / 2;
        KERNEL_CALL(lion_update, r, (int)c->s.B, lion_args, control_of(c, k % 2 ? step : OPTIMIZER_SKIP), stream);
    }
    free(r);
}

static SgdArgs sgd_args(const KernelCase *c, int step) {
    return {0.05f, c->s.flags & MOMENTUM ? 0.9f : 0.0f, c->s.flags & NESTEROV ? 0.0f : 0.2f, 0.1f, (c->s.flags & NESTEROV) != 0, step == 0};
}
static void setup_sgd(KernelCase *c) {
    setup_optimizer(c, c->s.flags & MOMENTUM ? 1 : 0);
    for (int64_t i = 0; i < c->s.C && c->s.flags & MOMENTUM; i++) value_of(c, "m")[i] = NAN; // the first update must not read it
}
static void reference_sgd(KernelCase *c) {
    double *w = want_of(c, "master"), *m = want_of(c, "m");
    for (int step = 0; step < OPTIMIZER_STEPS; step++) {
        const SgdArgs a = sgd_args(c, step);
        for (int64_t i = 0; i < c->s.C; i++) {
            double g = value_of(c, "grad")[i] * (double)optimizer_grad_scale(step) + optimizer_decay(c, i, a.weight_decay) * w[i];
            if (m) {
                m[i] = a.first_update ? g : (double)a.momentum * m[i] + (1 - (double)a.dampening) * g;
                g = a.nesterov ? g + (double)a.momentum * m[i] : m[i];
            }
            w[i] -= (double)a.lr * g;
        }
    }
    for (int64_t i = 0; i < c->s.C; i++) want_of(c, "param")[i] = operand_round(c->act, w[i]);
}
static void call_sgd(KernelCase *c, bool backend, Stream stream) {
    UpdateRange *r = optimizer_ranges(c);
    for (int k = 0; k < 2 * OPTIMIZER_STEPS; k++) {
        const int step = k / 2;
        KERNEL_CALL(sgd_update, r, (int)c->s.B, sgd_args(c, step), control_of(c, k % 2 ? step : OPTIMIZER_SKIP), stream);
    }
    free(r);
}
// B: ranges.
static const KernelShape optimizer_shapes[] = {
    {.B = 1, .C = 1},
    {.B = 3, .C = 7, .flags = OFFSET | DECOUPLED | MOMENTUM},
    {.B = 1, .C = 4096, .flags = NO_CORRECTION | DECOUPLED | MOMENTUM | NESTEROV},
    {.B = 2, .C = 16391, .flags = OFFSET | MOMENTUM | NESTEROV},
    {.B = 3, .C = 3 * 4104, .flags = MOMENTUM},       // aligned, and parts of blocks
    {.B = 70, .C = 50000, .flags = DECOUPLED},        // more ranges than one launch of the GPU takes
    {.B = 140, .C = 100, .flags = DECOUPLED},         // some are empty, and have no memory
    {.B = 4, .C = 9, .flags = OFFSET | DECOUPLED | MOMENTUM | BF16_GRAD},
    {.B = 3, .C = 40003, .flags = DECOUPLED | MOMENTUM | BF16_GRAD},
    {0},
};
static const Kernel kernel_adamw = {"adamw_update", setup_adamw, reference_adamw, call_adamw, optimizer_shapes};
static const Kernel kernel_lion = {"lion_update", setup_lion, reference_lion, call_lion, optimizer_shapes};
static const Kernel kernel_sgd = {"sgd_update", setup_sgd, reference_sgd, call_sgd, optimizer_shapes};

// ---------------------------------------------------------------------------------------------------------------
// Backward references against central finite differences of the forward references, all in double: with h = 1e-5 and values
// of order 1 the truncation is of order 1e-10 and the rounding of order 1e-10, so 1e-7 of the largest slope leaves room.

enum { SLOPE_SAMPLES = 60 };

// Loss of a forward case: the sum of out * dout (of the losses, where those are the result).
static double forward_loss(const Kernel *forward, KernelCase *f, const double *dout) {
    forward->reference(f);
    Operand *out = operand_find(f, dout ? "out" : "losses");
    double loss = 0;
    for (int64_t i = 0; i < out->n; i++) loss += out->want[i] * (dout ? dout[i] : (double)TEST_DLOSS);
    return loss;
}

// The slopes that the backward case b has for `gradient`, against differences of f's loss over `input`.
static void check_slopes(Test *t, const Kernel *forward, KernelCase *f, KernelCase *b, const char *input, const char *gradient) {
    const double h = 1e-5, *dout = value_of(b, "dout");
    double *x = value_of(f, input), *slope = want_of(b, gradient), largest = 0;
    const int64_t n = operand_find(f, input)->n;
    for (int64_t i = 0; i < n; i++) largest = fmax(largest, fabs(slope[i]));
    for (int64_t k = 0; k < min_i64(n, SLOPE_SAMPLES); k++) {
        const int64_t i = n <= SLOPE_SAMPLES ? k : (int64_t)(rng_uniform(7, text_hash(gradient), (uint64_t)k) * (double)n);
        const double kept = x[i];
        x[i] = kept + h;
        const double above = forward_loss(forward, f, dout);
        x[i] = kept - h;
        const double below = forward_loss(forward, f, dout);
        x[i] = kept;
        char what[96];
        snprintf(what, sizeof what, "%s %s[%" PRId64 "]", forward->name, gradient, i);
        expect_near(t, what, slope[i], (above - below) / (2 * h), 1e-7 * largest);
    }
}

static void check_backward(Test *t, const Kernel *forward, const Kernel *backward, KernelShape s, const char *const *pairs) {
    KernelCase *f = case_make(forward, s, DTYPE_FP32, true), *b = case_make(backward, s, DTYPE_FP32, true);
    backward->reference(b);
    for (; *pairs; pairs += 2) check_slopes(t, forward, f, b, pairs[0], pairs[1]);
    case_free(f);
    case_free(b);
}

static void test_references(Test *t) {
    const char *const embedding[] = {"wte", "dwte", "wpe", "dwpe", NULL}, *const norm[] = {"x", "dx", "w", "dw", "b", "db", NULL};
    const char *const linear_input[] = {"inp", "dinp", NULL}, *const linear_weight[] = {"w", "dw", "bias", "dbias", NULL};
    const char *const gelu_pair[] = {"x", "dx", NULL}, *const attention[] = {"qkv", "dqkv", NULL}, *const classifier[] = {"logits", "logits", NULL};
    check_backward(t, &kernel_embedding_forward, &kernel_embedding_backward, {.B = 3, .T = 5, .C = 4, .V = 6, .Vp = 7}, embedding);
    check_backward(t, &kernel_embedding_forward, &kernel_embedding_backward, {.B = 3, .T = 5, .C = 4, .V = 6, .Vp = 7, .first = 3, .part = 4, .position = 2}, embedding);
    check_backward(t, &kernel_position_forward, &kernel_position_backward, {.B = 3, .T = 5, .C = 4, .first = 4, .part = 8, .position = 2}, embedding + 2);
    check_backward(t, &kernel_layernorm_forward, &kernel_layernorm_backward, {.B = 1, .T = 5, .C = 9}, norm);
    check_backward(t, &kernel_gelu_forward, &kernel_gelu_backward, {.B = 1, .T = 5, .C = 9}, gelu_pair);
    check_backward(t, &kernel_linear_forward, &kernel_linear_backward_input, {.B = 1, .T = 5, .C = 7, .OC = 4}, linear_input);
    check_backward(t, &kernel_linear_forward, &kernel_linear_backward_weight, {.B = 1, .T = 5, .C = 7, .OC = 4, .flags = BIAS}, linear_weight);
    check_backward(t, &kernel_attention_forward, &kernel_attention_backward, {.B = 2, .T = 6, .C = 10, .NH = 2}, attention);
    check_backward(t, &kernel_attention_forward, &kernel_attention_backward, {.B = 1, .T = 40, .C = 8, .NH = 1}, attention);
    check_backward(t, &kernel_attention_forward, &kernel_attention_backward, {.B = 2, .T = 23, .C = 10, .NH = 2, .window = 7}, attention);
    check_backward(t, &kernel_attention_forward, &kernel_attention_backward, {.B = 1, .T = 6, .C = 8, .NH = 1, .window = 1}, attention);
    check_backward(t, &kernel_classifier, &kernel_classifier, {.B = 2, .T = 4, .V = 5, .Vp = 7}, classifier);
}

#include "test_kernels_special.h"

// ---------------------------------------------------------------------------------------------------------------
// The device, and what kernels refuse

static void test_device_memory(Test *t) {
    const DeviceInfo info = device_info();
    expect_true(t, info.name[0] != 0 && info.memory_bytes > 0 && info.threads > 0, "device \"%s\", %" PRId64 " bytes, %d threads", info.name, info.memory_bytes, info.threads);
    expect_true(t, device_free_bytes() > 0 && device_free_bytes() <= info.memory_bytes, "%" PRId64 " bytes free of %" PRId64, device_free_bytes(), info.memory_bytes);
    const int64_t before = device_allocated_bytes();
    Stream s = stream_create();
    Event from = event_create(), to = event_create();
    unsigned char out[1000], back[1000];
    for (int i = 0; i < 1000; i++) { out[i] = (unsigned char)(i * 7); back[i] = 0; }
    void *a = device_malloc(1000), *b = device_malloc(1), *c = device_malloc(0);
    expect_true(t, (uintptr_t)a % 256 == 0 && (uintptr_t)b % 256 == 0 && c != NULL, "addresses %p, %p, %p", a, b, c);
    expect_equal_i64(t, "allocated bytes", device_allocated_bytes() - before >= 1001, 1);
    event_record(from, s);
    device_copy(a, out, 1000, COPY_TO_DEVICE, s);
    device_memset(a, 0x5a, 10, s);
    device_copy(back, a, 1000, COPY_TO_HOST, s);
    event_record(to, s);
    stream_wait_event(s, to);
    event_sync(to);
    memset(out, 0x5a, 10);
    expect_same_bytes(t, "copy to the device and back", back, out, 1000);
    const double ms = event_elapsed_ms(from, to);
    expect_true(t, ms >= 0 && ms < 10000, "%g ms between events", ms);
    device_free(a);
    device_free(b);
    device_free(c);
    device_free(NULL);
    expect_equal_i64(t, "allocated bytes after freeing", device_allocated_bytes(), before);
    event_destroy(from);
    event_destroy(to);
    stream_destroy(s);
}

// GELU that comes out of its product is what gelu_forward makes of the product, bit for bit: it may be computed again from that.
static void test_gelu_of_rounded_values(Test *t) {
    const Kernel *const k = &kernel_linear_gelu_forward;
    for (const KernelShape *s = k->shapes; s->B; s++)
        for (int act = 0; act < DTYPE_COUNT; act++) {
            if (KERNELS_ON_GPU && s->flags & CPU_ONLY) continue;
            KernelCase *c = case_make(k, *s, (DType)act, false);
            case_run(k, c, true);
            const Operand *out = operand_find(c, "out"), *gelu = operand_find(c, "gelu");
            t->compared += out->n;
            for (int64_t i = 0; i < out->n; i++)
                if (out->got[i] != gelu->got[i]) {
                    test_fail(t, "%s, %" PRId64 " x %" PRId64 " of depth %" PRId64 ": out[%" PRId64 "] is %.9g, gelu_forward makes %.9g", dtype_name((DType)act), s->B * s->T, s->OC, s->C, i, out->got[i], gelu->got[i]);
                    break;
                }
            case_free(c);
        }
}

// A gradient that a kernel writes in 16 bits is the fp32 one, rounded: bit for bit, except that a GPU's library may add the
// terms of a product in another order.
static void test_gradients_in_16_bits(Test *t) {
    const Kernel *const kernels[] = {&kernel_layernorm_backward, &kernel_bias_backward, &kernel_linear_backward_weight};
    for (int k = 0; k < (KERNELS_ON_GPU ? 2 : 3); k++)
        for (const KernelShape *s = kernels[k]->shapes; s->B; s++)
            for (int act = DTYPE_BF16; act < DTYPE_COUNT; act++) {
                if (!(s->flags & ACT_GRAD) || s->flags & ACCUMULATE || (KERNELS_ON_GPU && s->flags & CPU_ONLY)) continue;
                KernelShape fp32 = *s;
                fp32.flags &= ~(unsigned)ACT_GRAD;
                KernelCase *want = case_make(kernels[k], fp32, (DType)act, false), *got = case_make(kernels[k], *s, (DType)act, false);
                case_run(kernels[k], want, true);
                case_run(kernels[k], got, true);
                for (int i = 0; i < got->n; i++) {
                    const Operand *o = &got->op[i];
                    t->compared += o->n;
                    for (int64_t j = 0; j < o->n; j++)
                        if (o->got[j] != operand_round(o->type, want->op[i].got[j])) {
                            test_fail(t, "%s %s: %s at %" PRId64 " is %.9g, rounded from %.9g in fp32", kernels[k]->name, dtype_name((DType)act), o->name, j, o->got[j], want->op[i].got[j]);
                            break;
                        }
                }
                case_free(want);
                case_free(got);
            }
    if (t->compared == 0) test_fail(t, "nothing was compared");
}

static void die_of_token(void *arg) {
    (void)arg;
    float x[16] = {0};
    int32_t tokens[2] = {1, 4};
    cpu::embedding_forward(tensor3(x, DTYPE_FP32, 1, 2, 2), tokens, tensor2(x + 4, DTYPE_FP32, 4, 2), tensor2(x + 12, DTYPE_FP32, 2, 2), 4, 0, 0, NULL);
}
static void die_of_target(void *arg) {
    (void)arg;
    float x[8] = {0};
    int32_t target = 4;
    cpu::classifier_forward_backward(tensor2(x, DTYPE_FP32, 1, 5), tensor1(x + 5, DTYPE_FP32, 1), &target, 4, 1.0f, true, NULL);
}
static void die_of_shape(void *arg) {
    (void)arg;
    float x[16] = {0};
    cpu::gelu_forward(tensor2(x, DTYPE_FP32, 2, 2), tensor2(x + 8, DTYPE_FP32, 2, 3), NULL);
}
static void die_of_dtype(void *arg) {
    (void)arg;
    float x[16] = {0};
    cpu::gelu_forward(tensor2(x, DTYPE_FP32, 2, 2), tensor2(x + 8, DTYPE_BF16, 2, 2), NULL);
}
static void die_of_memory(void *arg) {
    (void)arg;
    device_malloc((int64_t)1 << 50);
}
static void die_of_ulimit(void *arg) {
    (void)arg;
    const struct rlimit space = {(rlim_t)4 << 30, RLIM_INFINITY};
    setrlimit(RLIMIT_AS, &space);
    device_init(0);
    device_malloc((int64_t)5 << 30);
}
static void test_refusals(Test *t) {
    expect_dies(t, EXIT_INTERNAL, "token 4 at 1 of a vocabulary of 4", die_of_token, NULL);
    expect_dies(t, EXIT_INTERNAL, "target 4 at 0 of a vocabulary of 4", die_of_target, NULL);
    expect_dies(t, EXIT_INTERNAL, "gelu_forward: out has 2 rows of 2", die_of_shape, NULL);
    expect_dies(t, EXIT_INTERNAL, "gelu_forward: out is fp32, wanted bf16", die_of_dtype, NULL);
    if (!KERNELS_ON_GPU) {
        expect_dies(t, EXIT_CONFIG, "out of memory: 1125899.91 GB", die_of_memory, NULL);
#ifndef __SANITIZE_ADDRESS__ // whose shadow memory needs more address space than any limit leaves
        expect_dies(t, EXIT_CONFIG, "may have 4.29 GB", die_of_ulimit, NULL);
#endif
    }
}

// ---------------------------------------------------------------------------------------------------------------

#define KERNEL_TESTS(kernel)                                                                                           \
    static void test_cpu_##kernel(Test *t) { kernel_test_cpu(t, &kernel_##kernel); }                                   \
    static void test_gpu_##kernel(Test *t) { kernel_test_gpu(t, &kernel_##kernel); }
#define KERNEL_TEST_ROWS(kernel) {"cpu_" #kernel, test_cpu_##kernel}, {"gpu_" #kernel, test_gpu_##kernel}

KERNEL_TESTS(embedding_forward)
KERNEL_TESTS(embedding_backward)
KERNEL_TESTS(position_forward)
KERNEL_TESTS(position_backward)
KERNEL_TESTS(layernorm_forward)
KERNEL_TESTS(residual_layernorm_forward)
KERNEL_TESTS(residual_forward)
KERNEL_TESTS(layernorm_backward)
KERNEL_TESTS(gelu_forward)
KERNEL_TESTS(gelu_backward)
KERNEL_TESTS(linear_forward)
KERNEL_TESTS(linear_gelu_forward)
KERNEL_TESTS(linear_backward_input)
KERNEL_TESTS(linear_backward_weight)
KERNEL_TESTS(bias_backward)
KERNEL_TESTS(attention_forward)
KERNEL_TESTS(attention_backward)
KERNEL_TESTS(classifier)
KERNEL_TESTS(classifier_parts)
KERNEL_TESTS(sum)
KERNEL_TESTS(sum_squares)
KERNEL_TESTS(convert)
KERNEL_TESTS(add_inplace)
KERNEL_TESTS(sum_parts)
KERNEL_TESTS(swap_blocks)
KERNEL_TESTS(fill)
KERNEL_TESTS(adamw)
KERNEL_TESTS(lion)
KERNEL_TESTS(sgd)

static const TestRow kernel_tests[] = {
    {"device_memory", test_device_memory},
    {"refusals", test_refusals},
    {"references", test_references},
    {"vector_math", test_vector_math},
    KERNEL_TEST_ROWS(embedding_forward),
    KERNEL_TEST_ROWS(embedding_backward),
    KERNEL_TEST_ROWS(position_forward),
    KERNEL_TEST_ROWS(position_backward),
    KERNEL_TEST_ROWS(layernorm_forward),
    KERNEL_TEST_ROWS(residual_layernorm_forward),
    KERNEL_TEST_ROWS(residual_forward),
    KERNEL_TEST_ROWS(layernorm_backward),
    KERNEL_TEST_ROWS(gelu_forward),
    KERNEL_TEST_ROWS(gelu_backward),
    KERNEL_TEST_ROWS(linear_forward),
    KERNEL_TEST_ROWS(linear_gelu_forward),
    KERNEL_TEST_ROWS(linear_backward_input),
    KERNEL_TEST_ROWS(linear_backward_weight),
    KERNEL_TEST_ROWS(bias_backward),
    KERNEL_TEST_ROWS(attention_forward),
    KERNEL_TEST_ROWS(attention_backward),
    {"attention_whole_window", test_attention_whole_window},
    {"gpu_attention_any_order", test_attention_any_order},
    KERNEL_TEST_ROWS(classifier),
    KERNEL_TEST_ROWS(classifier_parts),
    KERNEL_TEST_ROWS(sum),
    KERNEL_TEST_ROWS(sum_squares),
    KERNEL_TEST_ROWS(convert),
    KERNEL_TEST_ROWS(add_inplace),
    KERNEL_TEST_ROWS(sum_parts),
    KERNEL_TEST_ROWS(swap_blocks),
    KERNEL_TEST_ROWS(fill),
    KERNEL_TEST_ROWS(adamw),
    KERNEL_TEST_ROWS(lion),
    KERNEL_TEST_ROWS(sgd),
    {"sum_squares_special", test_sum_squares_special},
    {"gelu_of_rounded_values", test_gelu_of_rounded_values},
    {"gradients_in_16_bits", test_gradients_in_16_bits},
    {"update_control", test_update_control},
    {"hash_words", test_hash_words},
    {"split_masters", test_split_masters},
    {"split_updates", test_split_updates},
    {"update_paths", test_update_paths},
    {"convert_special", test_convert_special},
    {"classifier_special", test_classifier_special},
    {NULL, NULL},
};
