// optimizer.cu - whether and how much: update_control; then AdamW, Lion and SGD over flat arrays: one read and one write of
// each state, one launch for all ranges of a kind.
//
// param and master may be the same memory (fp32 training), so neither is marked as unaliased; each thread writes the
// same value to both.
#include "common.cuh"

enum { UPDATE_THREADS = 256, UPDATE_VECTOR = 4, UPDATE_BLOCK = UPDATE_THREADS * UPDATE_VECTOR }; // elements of a thread at once, and of a block

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

// A step of each rule on one element; `w` is the fp32 master, `decay` the weight decay of this element. The states m and v are those of the
// block's range.
struct AdamWRule {
    AdamWArgs a;
    float *m, *v;
    template <int W> struct State { Vec<float, W> m, v; };
    template <int W> __device__ State<W> load(int64_t at) const { return {vec_load<W>(m + at), vec_load<W>(v + at)}; }
    template <int W> __device__ void store(int64_t at, State<W> s) const { vec_store<W>(m + at, s.m); vec_store<W>(v + at, s.v); }
    template <int W> __device__ float step(State<W> &s, int i, float w, float g, float decay) const {
        if (a.decoupled_decay) w -= a.lr * decay * w;
        else g += decay * w;
        float mi = a.beta1 * s.m.v[i] + (1.0f - a.beta1) * g;
        float vi = a.beta2 * s.v.v[i] + (1.0f - a.beta2) * g * g;
        s.m.v[i] = mi;
        s.v.v[i] = vi;
        return w - a.lr * (mi / a.bias_correction1) / (sqrtf(vi / a.bias_correction2) + a.eps);
    }
};

struct LionRule {
    LionArgs a;
    float *m, *v; // v: none
    template <int W> struct State { Vec<float, W> m; };
    template <int W> __device__ State<W> load(int64_t at) const { return {vec_load<W>(m + at)}; }
    template <int W> __device__ void store(int64_t at, State<W> s) const { vec_store<W>(m + at, s.m); }
    template <int W> __device__ float step(State<W> &s, int i, float w, float g, float decay) const {
        float c = a.beta1 * s.m.v[i] + (1.0f - a.beta1) * g;
        w -= a.lr * decay * w;
        w -= a.lr * (c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c); // sign(NaN) is NaN
        s.m.v[i] = a.beta2 * s.m.v[i] + (1.0f - a.beta2) * g;
        return w;
    }
};

struct SgdRule {
    SgdArgs a;
    float *m, *v; // m: null when momentum is 0; v: none
    template <int W> struct State { Vec<float, W> m; };
    template <int W> __device__ State<W> load(int64_t at) const {
        State<W> s;
        if (m && !a.first_update) s.m = vec_load<W>(m + at);
        else for (int i = 0; i < W; i++) s.m.v[i] = 0;
        return s;
    }
    template <int W> __device__ void store(int64_t at, State<W> s) const { if (m) vec_store<W>(m + at, s.m); }
    template <int W> __device__ float step(State<W> &s, int i, float w, float g, float decay) const {
        g += decay * w;
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
    __device__ WholeMaster(void *p, void *w) : param((T *)p), master((float *)w) {}
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
    __device__ WholeMaster(void *p, void *w) : param((uint16_t *)p), master((float *)w) {}
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
    __device__ SplitMaster(void *p, void *w) : param((uint16_t *)p), remainder((uint16_t *)w) {}
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

// What one launch updates: up to so many ranges of the same types. Range k has the blocks from first_block[k] on.
enum { UPDATE_RANGES = 64 };
struct UpdateList {
    void *param[UPDATE_RANGES], *master[UPDATE_RANGES], *grad[UPDATE_RANGES], *m[UPDATE_RANGES], *v[UPDATE_RANGES];
    int64_t n[UPDATE_RANGES], decays[UPDATE_RANGES];
    unsigned first_block[UPDATE_RANGES];
    bool aligned[UPDATE_RANGES]; // all arrays allow vectors
    int ranges;
};

template <typename Master, typename G, int W, typename Rule>
__device__ static inline void update_elements(const Master &master, const G *grad, int64_t at, int64_t decays, float grad_scale, const Rule &rule) {
    Vec<float, W> w = master.template load<W>(at);
    Vec<G, W> g = vec_load<W>(grad + at);
    typename Rule::template State<W> state = rule.template load<W>(at);
#pragma unroll
    for (int i = 0; i < W; i++) w.v[i] = rule.template step<W>(state, i, w.v[i], g.at(i) * grad_scale, at + i < decays ? rule.a.weight_decay : 0.0f);
    rule.template store<W>(at, state);
    master.template store<W>(at, w);
}

template <typename Master, typename G, typename Rule>
__global__ void __launch_bounds__(UPDATE_THREADS) update_kernel(const __grid_constant__ UpdateList list, const UpdateControl *control, Rule rule) {
    if (!control->apply) return;
    const float grad_scale = control->grad_scale;
    int k = 0; // the last range that does not begin behind this block
    for (int step = UPDATE_RANGES / 2; step > 0; step /= 2)
        if (k + step < list.ranges && list.first_block[k + step] <= blockIdx.x) k += step;
    const Master master(list.param[k], list.master[k]);
    const G *grad = (const G *)list.grad[k];
    rule.m = (float *)list.m[k];
    rule.v = (float *)list.v[k];
    const int64_t n = list.n[k], decays = list.decays[k], first = (int64_t)(blockIdx.x - list.first_block[k]) * UPDATE_BLOCK;
    if (list.aligned[k] && first + UPDATE_BLOCK <= n)
        update_elements<Master, G, UPDATE_VECTOR>(master, grad, first + threadIdx.x * UPDATE_VECTOR, decays, grad_scale, rule);
    else
        for (int64_t at = first + threadIdx.x; at < n && at < first + UPDATE_BLOCK; at += UPDATE_THREADS)
            update_elements<Master, G, 1>(master, grad, at, decays, grad_scale, rule);
}

template <typename Master, typename Rule>
static void update_launch_with(const UpdateList &list, int64_t blocks, DType grad, Rule rule, const UpdateControl *control, Stream stream) {
    GRAD_SWITCH(grad, (update_kernel<Master, floatG, Rule><<<grid_blocks(blocks), UPDATE_THREADS, 0, (cudaStream_t)stream>>>(list, control, rule)));
    launch_check();
}

// The first of these ranges and as many after it as one launch takes; returns how many.
template <typename Rule>
static int update_launch(const char *kernel, const UpdateRange *r, int ranges, int states, Rule rule, const UpdateControl *control, Stream stream) {
    const DType param = r[0].param.dtype, master = r[0].master.dtype, grad = r[0].grad.dtype;
    UpdateList list = {};
    int64_t blocks = 0;
    int taken = 0;
    for (; taken < ranges && list.ranges < UPDATE_RANGES; taken++) {
        const UpdateRange &x = r[taken];
        const int64_t n = tensor_numel(x.param);
        if (x.param.dtype != param || x.master.dtype != master || x.grad.dtype != grad) break;
        if (n == 0) continue; // a rank's part of a unit may be none: it has no memory
        check_act(kernel, "master", x.master, 1, n, master == DTYPE_REMAINDER ? DTYPE_REMAINDER : DTYPE_FP32);
        check_shape(kernel, "grad", x.grad, 1, n);
        CHECK(x.decays >= 0 && x.decays <= n, "%s: %" PRId64 " of %" PRId64 " elements decay", kernel, x.decays, n);
        const int k = list.ranges++;
        list.param[k] = x.param.data;
        list.master[k] = x.master.data;
        list.grad[k] = x.grad.data;
        list.aligned[k] = is_aligned(x.param.data, 16) && is_aligned(x.master.data, 16) && is_aligned(x.grad.data, 16);
        for (int i = 0; i < states; i++) {
            check_f32(kernel, "state", x.state[i], 1, n);
            (i == 0 ? list.m : list.v)[k] = x.state[i].data;
            list.aligned[k] = list.aligned[k] && is_aligned(x.state[i].data, 16);
        }
        list.n[k] = n;
        list.decays[k] = x.decays;
        list.first_block[k] = (unsigned)blocks;
        blocks += ceil_div(n, UPDATE_BLOCK);
    }
    if (blocks == 0) return taken;
    if (master == DTYPE_REMAINDER) {
        CHECK(param == DTYPE_BF16, "%s: param of a split master is %s", kernel, dtype_name(param));
        update_launch_with<SplitMaster>(list, blocks, grad, rule, control, stream);
        return taken;
    }
    switch (param) {
    case DTYPE_FP32: update_launch_with<WholeMaster<float>>(list, blocks, grad, rule, control, stream); break;
    case DTYPE_BF16: update_launch_with<WholeMaster<__nv_bfloat16>>(list, blocks, grad, rule, control, stream); break;
    case DTYPE_FP16: update_launch_with<WholeMaster<__half>>(list, blocks, grad, rule, control, stream); break;
    default: CHECK(false, "%s: param is %s", kernel, dtype_name(param));
    }
    return taken;
}

template <typename Rule>
static void update_all(const char *kernel, const UpdateRange *r, int ranges, int states, Rule rule, const UpdateControl *control, Stream stream) {
    for (int k = 0; k < ranges;) k += update_launch(kernel, r + k, ranges - k, states, rule, control, stream);
}

void cuda::adamw_update(const UpdateRange *r, int ranges, AdamWArgs args, const UpdateControl *control, Stream stream) {
    update_all("adamw_update", r, ranges, 2, AdamWRule{args, NULL, NULL}, control, stream);
}

void cuda::lion_update(const UpdateRange *r, int ranges, LionArgs args, const UpdateControl *control, Stream stream) {
    update_all("lion_update", r, ranges, 1, LionRule{args, NULL, NULL}, control, stream);
}

void cuda::sgd_update(const UpdateRange *r, int ranges, SgdArgs args, const UpdateControl *control, Stream stream) {
    update_all("sgd_update", r, ranges, args.momentum != 0.0f, SgdRule{args, NULL, NULL}, control, stream);
}
