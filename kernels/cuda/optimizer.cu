// optimizer.cu - whether and how much: update_control; then AdamW, Lion and SGD over flat arrays: one read and one write of
// each state.
//
// param and master may be the same memory (fp32 training), so neither is marked as unaliased; each thread writes the
// same value to both.
#include "common.cuh"

enum { UPDATE_THREADS = 256 };

// One thread: the ranks agree on the sums, so each decides alike. Division and root are those of IEEE 754, as on the host.
__global__ void update_control_kernel(UpdateControl *control, const double *sum_squares, const double *sum_loss, double loss_scale, double gradient_clipping) {
    UpdateControl c;
    c.grad_norm = (float)(sqrt(*sum_squares) / loss_scale);
    c.apply = isfinite(c.grad_norm) && isfinite(*sum_loss);
    c.clip_factor = c.apply && gradient_clipping > 0 && c.grad_norm > gradient_clipping ? gradient_clipping / c.grad_norm : 1;
    c.grad_scale = (float)(c.clip_factor / loss_scale);
    *control = c;
}

void cuda::update_control(UpdateControl *control, const double *sum_squares, const double *sum_loss, double loss_scale, double gradient_clipping, Stream stream) {
    update_control_kernel<<<1, 1, 0, (cudaStream_t)stream>>>(control, sum_squares, sum_loss, loss_scale, gradient_clipping);
    launch_check();
}

// A step of each rule on one element; `w` is the fp32 master.
struct AdamWRule {
    AdamWArgs a;
    float *m, *v;
    template <int W> struct State { Vec<float, W> m, v; };
    template <int W> __device__ State<W> load(int64_t at) const { return {vec_load<W>(m + at), vec_load<W>(v + at)}; }
    template <int W> __device__ void store(int64_t at, State<W> s) const { vec_store<W>(m + at, s.m); vec_store<W>(v + at, s.v); }
    template <int W> __device__ float step(State<W> &s, int i, float w, float g) const {
        if (a.decoupled_decay) w -= a.lr * a.weight_decay * w;
        else g += a.weight_decay * w;
        float mi = a.beta1 * s.m.v[i] + (1.0f - a.beta1) * g;
        float vi = a.beta2 * s.v.v[i] + (1.0f - a.beta2) * g * g;
        s.m.v[i] = mi;
        s.v.v[i] = vi;
        return w - a.lr * (mi / a.bias_correction1) / (sqrtf(vi / a.bias_correction2) + a.eps);
    }
};

struct LionRule {
    LionArgs a;
    float *m;
    template <int W> struct State { Vec<float, W> m; };
    template <int W> __device__ State<W> load(int64_t at) const { return {vec_load<W>(m + at)}; }
    template <int W> __device__ void store(int64_t at, State<W> s) const { vec_store<W>(m + at, s.m); }
    template <int W> __device__ float step(State<W> &s, int i, float w, float g) const {
        float c = a.beta1 * s.m.v[i] + (1.0f - a.beta1) * g;
        w -= a.lr * a.weight_decay * w;
        w -= a.lr * (c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c); // sign(NaN) is NaN
        s.m.v[i] = a.beta2 * s.m.v[i] + (1.0f - a.beta2) * g;
        return w;
    }
};

struct SgdRule {
    SgdArgs a;
    float *m; // null when momentum is 0
    template <int W> struct State { Vec<float, W> m; };
    template <int W> __device__ State<W> load(int64_t at) const {
        State<W> s;
        if (m && !a.first_update) s.m = vec_load<W>(m + at);
        else for (int i = 0; i < W; i++) s.m.v[i] = 0;
        return s;
    }
    template <int W> __device__ void store(int64_t at, State<W> s) const { if (m) vec_store<W>(m + at, s.m); }
    template <int W> __device__ float step(State<W> &s, int i, float w, float g) const {
        g += a.weight_decay * w;
        if (m) {
            float mi = a.first_update ? g : a.momentum * s.m.v[i] + (1.0f - a.dampening) * g;
            s.m.v[i] = mi;
            g = a.nesterov ? g + a.momentum * mi : mi;
        }
        return w - a.lr * g;
    }
};

// Masters in fp32, and the weights rounded from them; T is the weights' type.
template <typename T> struct WholeMaster {
    T *param;
    float *master;
    template <int W> __device__ Vec<float, W> load(int64_t at) const { return vec_load<W>(master + at); }
    template <int W> __device__ void store(int64_t at, Vec<float, W> w) const {
        Vec<T, W> p;
#pragma unroll
        for (int i = 0; i < W; i++) p.set(i, w.v[i]);
        vec_store<W>(master + at, w);
        vec_store<W>(param + at, p);
    }
};

// master_to_bf16 and master_remainder of runtime/tensor.h, side by side.
struct MasterHalves {
    uint16_t weight, remainder;
    __device__ explicit MasterHalves(float master) {
        const uint32_t u = __float_as_uint(master);
        const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
        weight = (uint16_t)(nan ? (u >> 16 & 0x8000u) | 0x7fc0u : (u + 0x8000u) >> 16);
        remainder = (uint16_t)(nan ? 0 : u);
    }
};

template <> struct WholeMaster<__nv_bfloat16> {
    uint16_t *param;
    float *master;
    template <int W> __device__ Vec<float, W> load(int64_t at) const { return vec_load<W>(master + at); }
    template <int W> __device__ void store(int64_t at, Vec<float, W> w) const {
        Vec<uint16_t, W> p;
#pragma unroll
        for (int i = 0; i < W; i++) p.v[i] = MasterHalves(w.v[i]).weight;
        vec_store<W>(master + at, w);
        vec_store<W>(param + at, p);
    }
};

// Masters as a bf16 weight and a remainder.
struct SplitMaster {
    uint16_t *param, *remainder;
    template <int W> __device__ Vec<float, W> load(int64_t at) const {
        Vec<uint16_t, W> p = vec_load<W>(param + at), r = vec_load<W>(remainder + at);
        Vec<float, W> w;
#pragma unroll
        for (int i = 0; i < W; i++) w.v[i] = __uint_as_float(((uint32_t)p.v[i] << 16) + (uint32_t)(int32_t)(int16_t)r.v[i]);
        return w;
    }
    template <int W> __device__ void store(int64_t at, Vec<float, W> w) const {
        Vec<uint16_t, W> p, r;
#pragma unroll
        for (int i = 0; i < W; i++) {
            const MasterHalves halves(w.v[i]);
            p.v[i] = halves.weight;
            r.v[i] = halves.remainder;
        }
        vec_store<W>(param + at, p);
        vec_store<W>(remainder + at, r);
    }
};

template <typename Master, typename G, int W, typename Rule>
__device__ static inline void update_elements(const Master &master, const G *grad, int64_t at, float grad_scale, const Rule &rule) {
    Vec<float, W> w = master.template load<W>(at);
    Vec<G, W> g = vec_load<W>(grad + at);
    typename Rule::template State<W> state = rule.template load<W>(at);
#pragma unroll
    for (int i = 0; i < W; i++) w.v[i] = rule.template step<W>(state, i, w.v[i], g.at(i) * grad_scale);
    rule.template store<W>(at, state);
    master.template store<W>(at, w);
}

template <typename Master, typename G, int W, typename Rule>
__global__ void __launch_bounds__(UPDATE_THREADS) update_kernel(Master master, const G *grad, int64_t n, const UpdateControl *control, Rule rule) {
    if (!control->apply) return;
    const float grad_scale = control->grad_scale;
    int64_t at = ((int64_t)blockIdx.x * UPDATE_THREADS + threadIdx.x) * W;
    if (at + W <= n) update_elements<Master, G, W>(master, grad, at, grad_scale, rule);
    else for (; at < n; at++) update_elements<Master, G, 1>(master, grad, at, grad_scale, rule);
}

// `aligned`: all arrays allow vectors.
template <typename Master, typename Rule>
static void update_launch_with(Master master, Tensor grad, bool aligned, Rule rule, const UpdateControl *control, Stream stream) {
    const int64_t n = tensor_numel(grad);
    GRAD_SWITCH(grad.dtype, WIDTH_SWITCH(aligned, 4,
        update_kernel<Master, floatG, W, Rule><<<grid_blocks(ceil_div(n, UPDATE_THREADS * W)), UPDATE_THREADS, 0, (cudaStream_t)stream>>>(
            master, elements<const floatG>(grad), n, control, rule)));
    launch_check();
}

// `aligned`: the states allow vectors.
template <typename Rule>
static void update_launch(const char *kernel, Tensor param, Tensor master, Tensor grad, bool aligned, Rule rule, const UpdateControl *control, Stream stream) {
    const int64_t n = tensor_numel(param);
    check_shape(kernel, "master", master, 1, n);
    check_shape(kernel, "grad", grad, 1, n);
    if (n == 0) return;
    aligned = aligned && is_aligned(param.data, 16) && is_aligned(master.data, 16) && is_aligned(grad.data, 16);
    if (master.dtype == DTYPE_REMAINDER) {
        check_act(kernel, "param of a split master", param, 1, n, DTYPE_BF16);
        update_launch_with(SplitMaster{elements<uint16_t>(param), elements<uint16_t>(master)}, grad, aligned, rule, control, stream);
        return;
    }
    check_f32(kernel, "master", master, 1, n);
    switch (param.dtype) {
    case DTYPE_FP32: update_launch_with(WholeMaster<float>{elements<float>(param), elements<float>(master)}, grad, aligned, rule, control, stream); break;
    case DTYPE_BF16: update_launch_with(WholeMaster<__nv_bfloat16>{elements<uint16_t>(param), elements<float>(master)}, grad, aligned, rule, control, stream); break;
    case DTYPE_FP16: update_launch_with(WholeMaster<__half>{elements<__half>(param), elements<float>(master)}, grad, aligned, rule, control, stream); break;
    default: CHECK(false, "%s: param is %s", kernel, dtype_name(param.dtype));
    }
}

void cuda::adamw_update(Tensor param, Tensor master, Tensor grad, Tensor m, Tensor v, AdamWArgs args, const UpdateControl *control, Stream stream) {
    check_f32("adamw_update", "m", m, 1, tensor_numel(param));
    check_f32("adamw_update", "v", v, 1, tensor_numel(param));
    AdamWRule rule = {args, elements<float>(m), elements<float>(v)};
    update_launch("adamw_update", param, master, grad, is_aligned(m.data, 16) && is_aligned(v.data, 16), rule, control, stream);
}

void cuda::lion_update(Tensor param, Tensor master, Tensor grad, Tensor m, LionArgs args, const UpdateControl *control, Stream stream) {
    check_f32("lion_update", "m", m, 1, tensor_numel(param));
    LionRule rule = {args, elements<float>(m)};
    update_launch("lion_update", param, master, grad, is_aligned(m.data, 16), rule, control, stream);
}

void cuda::sgd_update(Tensor param, Tensor master, Tensor grad, Tensor momentum_buffer, SgdArgs args, const UpdateControl *control, Stream stream) {
    const bool has_momentum = args.momentum != 0.0f;
    if (has_momentum) check_f32("sgd_update", "momentum_buffer", momentum_buffer, 1, tensor_numel(param));
    SgdRule rule = {args, has_momentum ? elements<float>(momentum_buffer) : NULL};
    update_launch("sgd_update", param, master, grad, !has_momentum || is_aligned(momentum_buffer.data, 16), rule, control, stream);
}
