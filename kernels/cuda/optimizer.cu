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

template <typename T, typename G, int W, typename Rule>
__device__ static inline void update_elements(T *param, float *master, const G *grad, int64_t at, float grad_scale, const Rule &rule) {
    Vec<float, W> w = vec_load<W>(master + at);
    Vec<G, W> g = vec_load<W>(grad + at);
    typename Rule::template State<W> state = rule.template load<W>(at);
    Vec<T, W> p;
#pragma unroll
    for (int i = 0; i < W; i++) {
        w.v[i] = rule.template step<W>(state, i, w.v[i], g.at(i) * grad_scale);
        p.set(i, w.v[i]);
    }
    rule.template store<W>(at, state);
    vec_store<W>(master + at, w);
    vec_store<W>(param + at, p);
}

template <typename T, typename G, int W, typename Rule>
__global__ void __launch_bounds__(UPDATE_THREADS) update_kernel(T *param, float *master, const G *grad, int64_t n, const UpdateControl *control, Rule rule) {
    if (!control->apply) return;
    const float grad_scale = control->grad_scale;
    int64_t at = ((int64_t)blockIdx.x * UPDATE_THREADS + threadIdx.x) * W;
    if (at + W <= n) update_elements<T, G, W>(param, master, grad, at, grad_scale, rule);
    else for (; at < n; at++) update_elements<T, G, 1>(param, master, grad, at, grad_scale, rule);
}

// `aligned`: the states allow vectors.
template <typename Rule>
static void update_launch(const char *kernel, Tensor param, Tensor master, Tensor grad, bool aligned, Rule rule, const UpdateControl *control, Stream stream) {
    const int64_t n = tensor_numel(param);
    const cudaStream_t s = (cudaStream_t)stream;
    check_f32(kernel, "master", master, 1, n);
    check_shape(kernel, "grad", grad, 1, n);
    if (n == 0) return;
    aligned = aligned && is_aligned(param.data, 16) && is_aligned(master.data, 16) && is_aligned(grad.data, 16);
    FLOATX_SWITCH(param.dtype, GRAD_SWITCH(grad.dtype, WIDTH_SWITCH(aligned, 4,
        update_kernel<floatX, floatG, W><<<grid_blocks(ceil_div(n, UPDATE_THREADS * W)), UPDATE_THREADS, 0, s>>>(
            elements<floatX>(param), elements<float>(master), elements<const floatG>(grad), n, control, rule))));
    launch_check();
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
