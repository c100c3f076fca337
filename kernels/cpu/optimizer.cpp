// optimizer.cpp - whether and how much: update_control; then AdamW, Lion and SGD on flat buffers. The formulas are in
// kernel_list.h. Rules see masters in fp32, however they are stored.
#include "rows.h"

namespace cpu {

#define UPDATE_BLOCK 4096 // elements

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

// Checks the arguments of an update; returns the elements that it is to change.
static int64_t update_numel(const char *kernel, Tensor param, Tensor master, Tensor grad, Tensor state1, Tensor state2, const UpdateControl *control) {
    const int64_t n = tensor_numel(master);
    CHECK(tensor_numel(param) == n, "%s: param has %" PRId64 " elements, master %" PRId64, kernel, tensor_numel(param), n);
    CHECK(param.dtype != DTYPE_FP32 || param.data == master.data, "%s: fp32 param must be the master itself", kernel);
    if (master.dtype == DTYPE_REMAINDER) check_act(kernel, "param of a split master", param, 1, n, DTYPE_BF16);
    else check_f32(kernel, "master", master, 1, n);
    check_grad(kernel, "grad", grad, n);
    if (state1.data) check_f32(kernel, "first state", state1, 1, n);
    if (state2.data) check_f32(kernel, "second state", state2, 1, n);
    return control->apply ? n : 0;
}

// Masters at .. at+n-1: the tensor's own memory, or joined into scratch.
static float *masters_load(Tensor param, Tensor master, int64_t at, int64_t n, float *__restrict scratch) {
    if (master.dtype == DTYPE_FP32) return (float *)master.data + at;
    const uint16_t *weight = (const uint16_t *)param.data + at, *remainder = (const uint16_t *)master.data + at;
    for (int64_t i = 0; i < n; i++) scratch[i] = master_join(weight[i], remainder[i]);
    return scratch;
}

static void masters_store(Tensor param, Tensor master, int64_t at, int64_t n, const float *__restrict w) {
    if (param.dtype != DTYPE_BF16) { row_store(param, at, n, w); return; }
    uint16_t *weight = (uint16_t *)param.data + at, *remainder = (uint16_t *)master.data + at;
    for (int64_t i = 0; i < n; i++) weight[i] = master_to_bf16(w[i]);
    if (master.dtype == DTYPE_REMAINDER) for (int64_t i = 0; i < n; i++) remainder[i] = master_remainder(w[i]);
}

static void adamw_block(float *__restrict w, const float *__restrict grad, float *__restrict m, float *__restrict v, int64_t n, AdamWArgs a, float grad_scale) {
    const float decay = a.decoupled_decay ? a.lr * a.weight_decay : 0.0f, l2 = a.decoupled_decay ? 0.0f : a.weight_decay;
    for (int64_t i = 0; i < n; i++) {
        const float g = grad[i] * grad_scale + l2 * w[i], decayed = w[i] - decay * w[i];
        m[i] = a.beta1 * m[i] + (1.0f - a.beta1) * g;
        v[i] = a.beta2 * v[i] + (1.0f - a.beta2) * g * g;
        w[i] = decayed - a.lr * (m[i] / a.bias_correction1) / (sqrtf(v[i] / a.bias_correction2) + a.eps);
    }
}

void adamw_update(Tensor param, Tensor master, Tensor grad, Tensor m, Tensor v, AdamWArgs args, const UpdateControl *control, Stream stream) {
    KERNEL_WRITES(stream, param, master, m, v);
    KERNEL_READS(stream, grad, control);
    const int64_t n = update_numel("adamw_update", param, master, grad, m, v, control);
#pragma omp parallel for if (n > PARALLEL_MIN)
    for (int64_t at = 0; at < n; at += UPDATE_BLOCK) {
        const int64_t k = min_i64(UPDATE_BLOCK, n - at);
        UNINITIALIZED float scratch[UPDATE_BLOCK], joined[UPDATE_BLOCK];
        const float *g = row_load(grad, at, k, scratch);
        float *w = masters_load(param, master, at, k, joined);
        adamw_block(w, g, (float *)m.data + at, (float *)v.data + at, k, args, control->grad_scale);
        masters_store(param, master, at, k, w);
    }
}

static void lion_block(float *__restrict w, const float *__restrict grad, float *__restrict m, int64_t n, LionArgs a, float grad_scale) {
    for (int64_t i = 0; i < n; i++) {
        const float g = grad[i] * grad_scale, direction = a.beta1 * m[i] + (1.0f - a.beta1) * g;
        const float sign = (direction > 0.0f ? 1.0f : 0.0f) - (direction < 0.0f ? 1.0f : 0.0f);
        w[i] = w[i] - a.lr * a.weight_decay * w[i] - a.lr * sign;
        m[i] = a.beta2 * m[i] + (1.0f - a.beta2) * g;
    }
}

void lion_update(Tensor param, Tensor master, Tensor grad, Tensor m, LionArgs args, const UpdateControl *control, Stream stream) {
    KERNEL_WRITES(stream, param, master, m);
    KERNEL_READS(stream, grad, control);
    const int64_t n = update_numel("lion_update", param, master, grad, m, tensor_none(), control);
#pragma omp parallel for if (n > PARALLEL_MIN)
    for (int64_t at = 0; at < n; at += UPDATE_BLOCK) {
        const int64_t k = min_i64(UPDATE_BLOCK, n - at);
        UNINITIALIZED float scratch[UPDATE_BLOCK], joined[UPDATE_BLOCK];
        const float *g = row_load(grad, at, k, scratch);
        float *w = masters_load(param, master, at, k, joined);
        lion_block(w, g, (float *)m.data + at, k, args, control->grad_scale);
        masters_store(param, master, at, k, w);
    }
}

static void sgd_block(float *__restrict w, const float *__restrict grad, float *__restrict momentum, int64_t n, SgdArgs a, float grad_scale) {
    // m = keep m + take g covers the first update as well, but a buffer that is still empty may hold NaN: hence the choice below
    const float keep = a.momentum, take = a.first_update ? 1.0f : 1.0f - a.dampening;
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * grad_scale + a.weight_decay * w[i];
        const float m = (a.first_update ? 0.0f : keep * momentum[i]) + take * g;
        momentum[i] = m;
        g = a.nesterov ? g + a.momentum * m : m;
        w[i] -= a.lr * g;
    }
}

static void sgd_block_plain(float *__restrict w, const float *__restrict grad, int64_t n, SgdArgs a, float grad_scale) {
    for (int64_t i = 0; i < n; i++) w[i] -= a.lr * (grad[i] * grad_scale + a.weight_decay * w[i]);
}

void sgd_update(Tensor param, Tensor master, Tensor grad, Tensor momentum_buffer, SgdArgs args, const UpdateControl *control, Stream stream) {
    KERNEL_WRITES(stream, param, master, momentum_buffer);
    KERNEL_READS(stream, grad, control);
    const int64_t n = update_numel("sgd_update", param, master, grad, momentum_buffer, tensor_none(), control);
    CHECK((args.momentum != 0) == (momentum_buffer.data != NULL), "sgd_update: momentum %g, buffer %p", (double)args.momentum, momentum_buffer.data);
#pragma omp parallel for if (n > PARALLEL_MIN)
    for (int64_t at = 0; at < n; at += UPDATE_BLOCK) {
        const int64_t k = min_i64(UPDATE_BLOCK, n - at);
        UNINITIALIZED float scratch[UPDATE_BLOCK], joined[UPDATE_BLOCK];
        const float *g = row_load(grad, at, k, scratch);
        float *w = masters_load(param, master, at, k, joined);
        if (momentum_buffer.data) sgd_block(w, g, (float *)momentum_buffer.data + at, k, args, control->grad_scale);
        else sgd_block_plain(w, g, k, args, control->grad_scale);
        masters_store(param, master, at, k, w);
    }
}

} // namespace cpu
