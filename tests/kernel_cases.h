// kernel_cases.h - the frame of the kernel tests: bounds, operands and their memory, running a case and comparing what comes out.
//
// A Kernel has a set-up (names, shapes and values of its operands), a reference and a call, which test_kernels.h gives;
// everything else (memory, transfers, thread counts, aliases, comparison) is done here, once, for all.
#pragma once
#include "../kernels/cpu/vector_math.h"
#include "dies.h"
#include "harness.h"
#include <float.h>
#include <omp.h>

// ---------------------------------------------------------------------------------------------------------------
// Bounds

typedef struct {
    double nmse;    // sum of squared errors over sum of squares
    double element; // worst error over the largest value
} KernelBound;

// By the type of the result. The CPU kernels compute in fp32 and round once. Rounding to bf16 (8 bits) errs by at most
// 2^-8 of the value, so no element may be worse than that; the NMSE is below 2^-16/3 = 5e-6 on average (2.6e-6 measured), and
// a few values by themselves can have twice that. fp16 (11 bits) is 64 times better. fp32 results show the order of
// summation, of up to some thousand terms here, and of exponents: four times the worst measured (4e-13 and 1e-6, attention's
// gradient).
static const KernelBound cpu_bounds[DTYPE_COUNT] = {
    {1.7e-12, 4e-6},  // fp32
    {1e-5, 4e-3},     // bf16
    {1.6e-7, 5e-4},   // fp16
};
// The GPU is compared with the CPU kernels: both round, and attention rounds probabilities on the way as well.
static const KernelBound gpu_bounds[DTYPE_COUNT] = {
    {1e-10, 1e-4},
    {5e-5, 1.6e-2},
    {1e-6, 2e-3},
};

// ---------------------------------------------------------------------------------------------------------------
// Cases: a kernel, a shape, an element type, and the operands made for them

typedef enum { ROLE_IN, ROLE_OUT, ROLE_INOUT } OperandRole;
enum { OPERAND_INT32 = DTYPE_COUNT + 1, OPERAND_DOUBLE, OPERANDS_MAX = 12 };

typedef struct {
    const char *name;
    OperandRole role;
    int type;          // a DType or one of the two above
    int precision;     // the type whose bounds hold: its own, or for a sum of results that were rounded on the way, theirs
    int ndim;
    int64_t shape[3], n;
    double *value;     // before the kernel; NaN where it is to be written
    double *want;      // after it, by the reference
    double *got;       // after it, by the kernel
    int alias;         // this operand lies in the memory of that one; -1 = in its own
    void *memory;      // of the run in progress
} Operand;

typedef struct {
    int64_t B, T, C, NH, OC, V, Vp, window; // as in kernel_list.h; a kernel uses what it needs
    int64_t first, part, position;          // a part of the rows, or of the vocabulary: where it begins, how many (0: all); the first position
    unsigned flags;
} KernelShape;

enum {
    ACCUMULATE = 1, ACCUMULATE_WPE = 2, BIAS = 4, RESIDUAL = 8, PRE_GELU = 16, ALIAS = 32, ALIAS_OTHER = 64,
    OFFSET = 128,      // operands start one element after an aligned address, as shards may
    NO_WRITE = 256, DECOUPLED = 512, NO_CORRECTION = 1024, MOMENTUM = 2048, NESTEROV = 4096,
    CPU_ONLY = 8192,   // sizes that the GPU does not promise: channels, features and head sizes that 8 does not divide
    BF16_GRAD = 16384, // a gradient that is accumulated in bf16
    ACT_GRAD = 32768,  // gradients of parameters in the type of the activations, instead of fp32
    ANY_ORDER = 65536, // sums need not be the same bits in every run
    NO_POSITIONS = 131072, // the optional wpe is not given
};

typedef struct {
    KernelShape s;
    DType act;         // element type of activations and weights
    bool exact;        // operands are not rounded: for finite differences of the references
    int n;
    Operand op[OPERANDS_MAX];
} KernelCase;

typedef struct {
    const char *name;
    void (*setup)(KernelCase *c);
    void (*reference)(KernelCase *c);
    void (*call)(KernelCase *c, bool backend, Stream s); // backend: the build's own kernel, else cpu::
    const KernelShape *shapes;                           // ends with B = 0
} Kernel;

// x as an element of that type holds it.
static double operand_round(int type, double x) {
    if (type == DTYPE_BF16) return (double)bf16_to_float(float_to_bf16((float)x));
    if (type == DTYPE_FP16) return (double)fp16_to_float(float_to_fp16((float)x));
    return type == DTYPE_FP32 ? (double)(float)x : x;
}
static int64_t operand_element_bytes(int type) {
    return type == OPERAND_DOUBLE ? 8 : type == OPERAND_INT32 ? 4 : dtype_bytes((DType)type);
}

// Adds an operand of shape (a), (a, b) or (a, b, d): 0 ends the list. Inputs are normal with that mean and deviation, and
// depend on the operand's name, not on its place, so that forward and backward cases of one shape see the same tensors.
static Operand *operand_add(KernelCase *c, const char *name, OperandRole role, int type, int64_t a, int64_t b, int64_t d, double mean, double deviation) {
    CHECK(c->n < OPERANDS_MAX, "operand %s", name);
    Operand *o = &c->op[c->n++];
    *o = {name, role, type, type, d ? 3 : b ? 2 : 1, {a, b ? b : 1, d ? d : 1}};
    o->n = o->shape[0] * o->shape[1] * o->shape[2];
    o->alias = -1;
    o->value = (double *)host_alloc((size_t)o->n * 8);
    o->want = (double *)host_alloc((size_t)o->n * 8);
    o->got = (double *)host_alloc((size_t)o->n * 8);
    for (int64_t i = 0; i < o->n; i++) {
        double x = role == ROLE_OUT ? (type == OPERAND_INT32 ? -1 : NAN) : mean + deviation * rng_normal(1234, text_hash(name), (uint64_t)i);
        o->value[i] = c->exact ? x : operand_round(type, x);
    }
    return o;
}

// The operand of that name, or null.
static Operand *operand_find(KernelCase *c, const char *name) {
    for (int i = 0; i < c->n; i++) if (strcmp(c->op[i].name, name) == 0) return &c->op[i];
    return NULL;
}
static double *value_of(KernelCase *c, const char *name) { Operand *o = operand_find(c, name); return o ? o->value : NULL; }
static double *want_of(KernelCase *c, const char *name) { Operand *o = operand_find(c, name); return o ? o->want : NULL; }
static int param_grad_type(const KernelCase *c) { return c->s.flags & ACT_GRAD ? (int)c->act : (int)DTYPE_FP32; }
static Tensor tensor_of(KernelCase *c, const char *name) {
    Operand *o = operand_find(c, name);
    return o ? tensor_make(o->memory, (DType)o->type, o->ndim, o->shape[0], o->shape[1], o->shape[2], 1) : tensor_none();
}
static const int32_t *ints_of(KernelCase *c, const char *name) { return (const int32_t *)operand_find(c, name)->memory; }
static void alias_with(KernelCase *c, const char *name, const char *other) {
    operand_find(c, name)->alias = (int)(operand_find(c, other) - c->op);
}

static KernelCase *case_make(const Kernel *k, KernelShape s, DType act, bool exact) {
    KernelCase *c = (KernelCase *)host_alloc(sizeof *c);
    c->s = s;
    c->act = act;
    c->exact = exact;
    k->setup(c);
    return c;
}
static void case_free(KernelCase *c) {
    for (int i = 0; i < c->n; i++) { free(c->op[i].value); free(c->op[i].want); free(c->op[i].got); }
    free(c);
}

// ---------------------------------------------------------------------------------------------------------------
// Running a case

static void operand_pack(const Operand *o, const double *values, void *bytes) {
    for (int64_t i = 0; i < o->n; i++) {
        if (o->type == OPERAND_DOUBLE) ((double *)bytes)[i] = values[i];
        else if (o->type == OPERAND_INT32) ((int32_t *)bytes)[i] = (int32_t)values[i];
        else dtype_store(bytes, (DType)o->type, i, (float)values[i]);
    }
}
static void operand_unpack(const Operand *o, const void *bytes, double *values) {
    for (int64_t i = 0; i < o->n; i++) {
        if (o->type == OPERAND_DOUBLE) values[i] = ((const double *)bytes)[i];
        else if (o->type == OPERAND_INT32) values[i] = ((const int32_t *)bytes)[i];
        else values[i] = (double)dtype_load(bytes, (DType)o->type, i);
    }
}

// Runs the kernel once and leaves all operands in `got`. The backend's kernels work in device memory, on a stream.
static void case_run(const Kernel *k, KernelCase *c, bool backend) {
    Stream s = stream_create();
    void *block[OPERANDS_MAX], *staging[OPERANDS_MAX];
    const int64_t shift = c->s.flags & OFFSET ? 1 : 0;
    for (int i = 0; i < c->n; i++) {
        Operand *o = &c->op[i];
        const int64_t size = operand_element_bytes(o->type), bytes = o->n * size;
        block[i] = NULL;
        staging[i] = pinned_malloc(bytes);
        if (o->alias >= 0) continue;
        block[i] = backend ? device_malloc(bytes + shift * size) : host_alloc((size_t)(bytes + shift * size));
        o->memory = (char *)block[i] + shift * size;
        operand_pack(o, o->value, staging[i]);
        if (backend) device_copy(o->memory, staging[i], bytes, COPY_TO_DEVICE, s);
        else memcpy(o->memory, staging[i], (size_t)bytes);
    }
    for (int i = 0; i < c->n; i++) if (c->op[i].alias >= 0) c->op[i].memory = c->op[c->op[i].alias].memory;
    k->call(c, backend, s);
    for (int i = 0; i < c->n; i++) {
        Operand *o = &c->op[i];
        const int64_t bytes = o->n * operand_element_bytes(o->type);
        if (backend) device_copy(staging[i], o->memory, bytes, COPY_TO_HOST, s);
        else memcpy(staging[i], o->memory, (size_t)bytes);
    }
    stream_sync(s);
    for (int i = 0; i < c->n; i++) {
        operand_unpack(&c->op[i], staging[i], c->op[i].got);
        pinned_free(staging[i]);
        if (backend) device_free(block[i]);
        else free(block[i]);
    }
    stream_destroy(s);
}

// Errors of one result: normalised mean square, worst element, and bias. The bias is the mean of the error taken in the
// direction of the value (truncation instead of rounding shows there); it must be below a tenth of the root of the NMSE
// bound. Asked of 16-bit results (in fp32 the rounding of a constant such as 1/sqrt(HS) is such a bias) of a thousand elements
// and more (with fewer, the mean of honest rounding errors is not small enough).
static void compare_operand(Test *t, const Kernel *k, const KernelCase *c, const Operand *o, const double *want, const KernelBound *bounds) {
    const KernelBound bound = bounds[o->precision < DTYPE_COUNT ? o->precision : DTYPE_FP32];
    double error = 0, power = 0, largest = 0, worst = 0, drift = 0;
    int64_t worst_at = 0;
    for (int64_t i = 0; i < o->n; i++) {
        const double d = o->got[i] - want[i];
        error += d * d;
        power += want[i] * want[i];
        drift += want[i] > 0 ? d : want[i] < 0 ? -d : 0;
        if (fabs(want[i]) > largest) largest = fabs(want[i]);
        if (!(fabs(d) <= worst)) { worst = fabs(d); worst_at = i; }
    }
    t->compared += o->n;
    const double nmse = power > 0 ? error / power : error, element = largest > 0 ? worst / largest : worst;
    const double bias = power > 0 && o->n >= 1000 && (o->type == DTYPE_BF16 || o->type == DTYPE_FP16) ? fabs(drift) / (double)o->n / sqrt(power / (double)o->n) / (0.1 * sqrt(bound.nmse)) : 0;
    if (!(nmse <= bound.nmse && element <= bound.element && bias <= 1)) {
        const KernelShape *s = &c->s;
        test_fail(t, "%s %s, B %d T %d C %d NH %d OC %d V %d/%d window %d flags %u: %s NMSE %.3g (bound %.3g), worst element %.3g of the largest (%.3g) at %" PRId64 ": %.9g, expected %.9g; bias %.2f of its bound",
                  k->name, dtype_name(c->act), (int)s->B, (int)s->T, (int)s->C, (int)s->NH, (int)s->OC, (int)s->V, (int)s->Vp, (int)s->window, s->flags, o->name, nmse, bound.nmse, element, bound.element, worst_at, o->got[worst_at], want[worst_at], bias);
    }
    t->worst = fmax(t->worst, fmax(fmax(nmse / bound.nmse, element / bound.element), bias));
}

// All results bit for bit (NaN included), as a copy has them.
static void compare_bits(Test *t, const Kernel *k, const KernelCase *c, double *const *copy, const char *when) {
    for (int i = 0; i < c->n; i++) {
        const Operand *o = &c->op[i];
        if (o->role == ROLE_IN) continue;
        t->compared += o->n;
        if (memcmp(o->got, copy[i], (size_t)o->n * 8) != 0) test_fail(t, "%s %s: %s differs in %s", k->name, dtype_name(c->act), o->name, when);
    }
}

// The values of all operands, kept aside.
static double **results_keep(const KernelCase *c) {
    double **kept = (double **)host_alloc(sizeof(double *) * OPERANDS_MAX);
    for (int i = 0; i < c->n; i++) {
        kept[i] = (double *)host_alloc((size_t)c->op[i].n * 8);
        memcpy(kept[i], c->op[i].got, (size_t)c->op[i].n * 8);
    }
    return kept;
}
static void results_free(const KernelCase *c, double **kept) {
    for (int i = 0; i < c->n; i++) free(kept[i]);
    free(kept);
}

// CPU kernel against the reference; then with 1, 2 and 3 threads, and twice over, the same bits.
static void kernel_test_cpu(Test *t, const Kernel *k) {
    const int threads = omp_get_max_threads();
    for (const KernelShape *s = k->shapes; s->B; s++)
        for (int act = 0; act < DTYPE_COUNT; act++) {
            KernelCase *c = case_make(k, *s, (DType)act, false);
            for (int i = 0; i < c->n; i++) memcpy(c->op[i].want, c->op[i].value, (size_t)c->op[i].n * 8);
            k->reference(c);
            omp_set_num_threads(1);
            case_run(k, c, false);
            for (int i = 0; i < c->n; i++) if (c->op[i].role != ROLE_IN) compare_operand(t, k, c, &c->op[i], c->op[i].want, cpu_bounds);
            double **first = results_keep(c);
            for (int n = 2; n <= 3; n++) {
                omp_set_num_threads(n);
                case_run(k, c, false);
                compare_bits(t, k, c, first, "another number of threads");
            }
            omp_set_num_threads(threads);
            results_free(c, first);
            case_free(c);
        }
}

#ifndef GPU_ROWS_MAX
#define GPU_ROWS_MAX INT32_MAX
#endif
// The build's kernel against its CPU twin; then again, the same bits.
static void kernel_test_gpu(Test *t, const Kernel *k) {
    if (!KERNELS_ON_GPU) { test_skip(t, "this build has no GPU kernels"); return; }
    for (const KernelShape *s = k->shapes; s->B; s++)
        for (int act = 0; act < DTYPE_COUNT; act++) {
            if (s->flags & CPU_ONLY || s->B * s->T > GPU_ROWS_MAX) continue;
            KernelCase *c = case_make(k, *s, (DType)act, false);
            case_run(k, c, false);
            double **twin = results_keep(c);
            case_run(k, c, true);
            for (int i = 0; i < c->n; i++) if (c->op[i].role != ROLE_IN) compare_operand(t, k, c, &c->op[i], twin[i], gpu_bounds);
            double **first = results_keep(c);
            case_run(k, c, true);
            compare_bits(t, k, c, first, "a second run");
            results_free(c, twin);
            results_free(c, first);
            case_free(c);
        }
}

#define KERNEL_CALL(kernel, ...)                                                                                       \
    do {                                                                                                               \
        if (backend) kernel(__VA_ARGS__);                                                                              \
        else cpu::kernel(__VA_ARGS__);                                                                                 \
    } while (0)
