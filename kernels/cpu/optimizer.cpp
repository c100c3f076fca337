// optimizer.cpp - whether and how much: update_control; then AdamW, Lion and SGD on flat buffers. The formulas are in
// kernel_list.h. Rules see masters in fp32, however they are stored.
//
// An update reads and writes 28 bytes an element and computes little: the memory's rate is all there is to reach, and the
// CPU is where updates of offloaded states run. So each loop below is written once, in plain C that compilers vectorise, and
// compiled three times: for AVX-512, for AVX2, and for whatever the rest of the program is built for. Which one runs is found
// at run time, since a binary that travels is built for less than most machines have.
//
// All paths give the same bits, and so does the CUDA twin: additions, products, quotients and roots are those of IEEE 754, each
// rounded once and in the order written. The Makefile sees to it that no compiler fuses a product and a sum here.
#include "rows.h"

namespace cpu {

enum { UPDATE_BLOCK = 2048 }; // elements: a thread's unit of work; its pieces of all arrays fit the first-level cache

void update_control(UpdateControl *control, const double *sum_squares, const double *sum_loss, double loss_scale, double gradient_clipping, Stream stream) {
    KERNEL_WRITES(stream, control);
    KERNEL_READS(stream, sum_squares, sum_loss);
    UpdateControl c = {};
    c.grad_norm = (float)(sqrt(*sum_squares) / loss_scale);
    c.apply = isfinite(c.grad_norm) && isfinite(*sum_loss);
    c.clip_factor = c.apply && gradient_clipping > 0 && c.grad_norm > gradient_clipping ? gradient_clipping / c.grad_norm : 1;
    c.grad_scale = (float)(c.clip_factor / loss_scale);
    *control = c;
}

static void update_check(const char *kernel, const UpdateRange &r, int states) {
    const int64_t n = tensor_numel(r.master);
    CHECK(tensor_numel(r.param) == n, "%s: param has %" PRId64 " elements, master %" PRId64, kernel, tensor_numel(r.param), n);
    CHECK(r.param.dtype != DTYPE_FP32 || r.param.data == r.master.data, "%s: fp32 param must be the master itself", kernel);
    CHECK(r.decays >= 0 && r.decays <= n, "%s: %" PRId64 " of %" PRId64 " elements decay", kernel, r.decays, n);
    if (r.master.dtype == DTYPE_REMAINDER) check_act(kernel, "param of a split master", r.param, 1, n, DTYPE_BF16);
    else check_f32(kernel, "master", r.master, 1, n);
    check_grad(kernel, "grad", r.grad, n);
    for (int i = 0; i < states; i++) check_f32(kernel, "state", r.state[i], 1, n);
}

// ---------------------------------------------------------------------------------------------------------------
// Rules: a step of each on one element. `w` is the fp32 master, `g` the scaled gradient, `m` and `v` the states.

template <bool decoupled> struct AdamWRule {
    AdamWArgs a;
    enum { STATES = 2 };
    inline __attribute__((always_inline)) float step(float w, float g, float &m, float &v) const {
        if (!decoupled) g += a.weight_decay * w;
        const float decayed = decoupled ? w - a.lr * a.weight_decay * w : w;
        m = a.beta1 * m + (1.0f - a.beta1) * g;
        v = a.beta2 * v + (1.0f - a.beta2) * g * g;
        return decayed - a.lr * (m / a.bias_correction1) / (sqrtf(v / a.bias_correction2) + a.eps);
    }
};

struct LionRule {
    LionArgs a;
    enum { STATES = 1 };
    inline __attribute__((always_inline)) float step(float w, float g, float &m, float &) const {
        const float direction = a.beta1 * m + (1.0f - a.beta1) * g, sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : direction; // NaN stays NaN
        m = a.beta2 * m + (1.0f - a.beta2) * g;
        return w - a.lr * a.weight_decay * w - a.lr * sign;
    }
};

template <bool momentum> struct SgdRule {
    SgdArgs a;
    enum { STATES = momentum };
    inline __attribute__((always_inline)) float step(float w, float g, float &m, float &) const {
        g += a.weight_decay * w;
        if (momentum) {
            const float more = a.momentum * m + (1.0f - a.dampening) * g;
            m = a.first_update ? g : more; // a buffer that is still empty may hold NaN
            g = a.nesterov ? g + a.momentum * m : m;
        }
        return w - a.lr * g;
    }
};

// ---------------------------------------------------------------------------------------------------------------
// The loop over a block, for each way in which masters and gradients are stored

// What an update changes and reads, from some element on. Unused ones are null.
typedef struct {
    float *w;                     // masters in fp32, or
    uint16_t *weight, *remainder; // in halves
    float *m, *v;
    const void *grad;
    float grad_scale;
} UpdateBlock;

struct GradFp32 { static inline __attribute__((always_inline)) float load(const void *p, int64_t i) { return ((const float *)p)[i]; } };
struct GradBf16 { static inline __attribute__((always_inline)) float load(const void *p, int64_t i) { return bf16_to_float(((const uint16_t *)p)[i]); } };

template <bool split, class Grad, class Rule> static inline __attribute__((always_inline)) void update_loop(const UpdateBlock &b, int64_t n, const Rule &rule_of_block) {
    const Rule rule = rule_of_block; // copies, which no store below can change
    float *const w = b.w, *const ms = b.m, *const vs = b.v, grad_scale = b.grad_scale;
    uint16_t *const weight = b.weight, *const remainder = b.remainder;
    const void *const grad = b.grad;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) {
        float m = Rule::STATES > 0 ? ms[i] : 0.0f, v = Rule::STATES > 1 ? vs[i] : 0.0f;
        const float before = split ? master_join(weight[i], remainder[i]) : w[i];
        const float after = rule.step(before, Grad::load(grad, i) * grad_scale, m, v);
        if (Rule::STATES > 0) ms[i] = m;
        if (Rule::STATES > 1) vs[i] = v;
        if (split) {
            weight[i] = master_to_bf16(after);
            remainder[i] = master_remainder(after);
        } else w[i] = after;
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Paths

#define UPDATE_PATH(name, attributes)                                                                                                      \
    template <bool split, class Grad, class Rule> attributes static void update_##name(const UpdateBlock &b, int64_t n, const Rule &rule) { \
        update_loop<split, Grad>(b, n, rule);                                                                                              \
    }
UPDATE_PATH(plain, )
#ifdef __x86_64__
UPDATE_PATH(avx2, __attribute__((target("avx2,prefer-vector-width=256"))))
UPDATE_PATH(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))))
#endif

static const char *const update_path_names[] = {"plain", "AVX2", "AVX-512"}; // by path

static bool update_path_works(int path) {
#ifdef __x86_64__
    if (path == 1) return __builtin_cpu_supports("avx2");
    if (path == 2) return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return path == 0;
}

static int update_path_best(void) {
    int path = 2;
    while (!update_path_works(path)) path--;
    return path;
}
static int update_path_taken = -1; // private state of this file; -1: the best, not yet found

const char *update_path(int path) {
    if (path >= (int)(sizeof update_path_names / sizeof *update_path_names) || (path >= 0 && !update_path_works(path))) return NULL;
    update_path_taken = path >= 0 ? path : update_path_best();
    return update_path_names[update_path_taken];
}

template <bool split, class Grad, class Rule> static void update_block(const UpdateBlock &b, int64_t n, const Rule &rule) {
#ifdef __x86_64__
    if (update_path_taken == 2) return update_avx512<split, Grad>(b, n, rule);
    if (update_path_taken == 1) return update_avx2<split, Grad>(b, n, rule);
#endif
    update_plain<split, Grad>(b, n, rule);
}

// Elements [from, to) of a range: blocks of all arrays, shared out to the threads in runs. Gradients and weights in fp16, and bf16 weights
// beside whole masters, pass through a row in the first-level cache.
template <class Rule> static void update_blocks(const UpdateRange &r, int64_t from, int64_t to, float grad_scale, const Rule &rule) {
    if (update_path_taken < 0) update_path(-1);
    const Tensor param = r.param, master = r.master, grad = r.grad, m = r.state[0], v = r.state[1];
    const bool split = master.dtype == DTYPE_REMAINDER;
#pragma omp parallel for schedule(static) if (to - from > PARALLEL_MIN)
    for (int64_t at = from; at < to; at += UPDATE_BLOCK) {
        const int64_t k = min_i64(UPDATE_BLOCK, to - at);
        UNINITIALIZED float scratch[UPDATE_BLOCK];
        UpdateBlock b;
        b.w = split ? NULL : (float *)master.data + at;
        b.weight = split ? (uint16_t *)param.data + at : NULL;
        b.remainder = split ? (uint16_t *)master.data + at : NULL;
        b.m = Rule::STATES > 0 ? (float *)m.data + at : NULL;
        b.v = Rule::STATES > 1 ? (float *)v.data + at : NULL;
        b.grad = grad.dtype == DTYPE_BF16 ? (const void *)((const uint16_t *)grad.data + at) : row_load(grad, at, k, scratch);
        b.grad_scale = grad_scale;
        if (grad.dtype == DTYPE_BF16) split ? update_block<true, GradBf16>(b, k, rule) : update_block<false, GradBf16>(b, k, rule);
        else split ? update_block<true, GradFp32>(b, k, rule) : update_block<false, GradFp32>(b, k, rule);
        if (split) continue;
        if (param.dtype == DTYPE_BF16) for (int64_t i = 0; i < k; i++) ((uint16_t *)param.data)[at + i] = master_to_bf16(b.w[i]);
        else row_store(param, at, k, b.w);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The kernels

// Both parts of each range: that which decays, and that which does not.
template <class Rule> static void update_ranges(const char *kernel, const UpdateRange *r, int ranges, const UpdateControl *control, Stream stream, const Rule &rule) {
    KERNEL_READS(stream, control);
    Rule rest = rule;
    rest.a.weight_decay = 0;
    for (int k = 0; k < ranges; k++) {
        UpdateRange x = r[k];
        if (tensor_numel(x.master) == 0) continue; // a rank's part of a unit may be none: it has no memory
        KERNEL_WRITES(stream, x.param, x.master);
        for (int i = 0; i < Rule::STATES; i++) KERNEL_WRITES(stream, x.state[i]);
        KERNEL_READS(stream, x.grad);
        update_check(kernel, x, Rule::STATES);
        if (!control->apply) continue;
        update_blocks(x, 0, x.decays, control->grad_scale, rule);
        update_blocks(x, x.decays, tensor_numel(x.master), control->grad_scale, rest);
    }
}

void adamw_update(const UpdateRange *r, int ranges, AdamWArgs args, const UpdateControl *control, Stream stream) {
    if (args.decoupled_decay) update_ranges("adamw_update", r, ranges, control, stream, AdamWRule<true>{args});
    else update_ranges("adamw_update", r, ranges, control, stream, AdamWRule<false>{args});
}

void lion_update(const UpdateRange *r, int ranges, LionArgs args, const UpdateControl *control, Stream stream) {
    update_ranges("lion_update", r, ranges, control, stream, LionRule{args});
}

void sgd_update(const UpdateRange *r, int ranges, SgdArgs args, const UpdateControl *control, Stream stream) {
    if (args.momentum != 0) update_ranges("sgd_update", r, ranges, control, stream, SgdRule<true>{args});
    else update_ranges("sgd_update", r, ranges, control, stream, SgdRule<false>{args});
}

} // namespace cpu
