// kernel_list.h - one prototype a kernel; included by kernels.h once for each backend (hence no include guard).
//
// Letters: B micro-batch, T sequence, C channels, NH heads, HS = C / NH, OC output channels, V vocabulary, Vp padded
// vocabulary, N = B*T rows. Activations, their gradients and weights share one dtype (fp32, bf16 or fp16), called
// "act" below; statistics, losses and parameter gradients are fp32 ("f32"). "grad" is the type of a parameter gradient that is
// f32 or act, by choice of the caller: computed in fp32 and, into act, rounded once.
//
// Rules that hold for all:
// - Parameter gradients (dw, db) are overwritten when `accumulate` is false and added to when it is true; activation
//   gradients are overwritten. A prototype that deviates says so.
// - Arguments may not alias unless the prototype allows it. Shapes are checked; a mismatch is a bug and ends the program.
// - Results do not depend on the number of threads: sums run in a fixed order.
// - Work goes to `stream`; a kernel never waits for the host.

// out[b,t,:] = wte[tokens[b,t] - first_token,:] + wpe[first_position + t,:].   out act (B,T,C); tokens int32 (B,T), each in [0,V); wte act
// (R,C): rows [first_token, first_token + R) of the vocabulary, and a token of another row adds 0; wpe act (P,C), P >= first_position + T, optional.
void embedding_forward(Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t V, int64_t first_token, int64_t first_position, Stream stream);

// dwte[v - first_token,:] (+)= sum of dout[b,t,:] over tokens[b,t] = v;  dwpe[first_position + t,:] (+)= sum over b of dout[b,t,:].
// dwte f32 (R,C), dwpe f32 (P,C), optional; dout act (B,T,C); the rest as in embedding_forward. Without accumulation, rows that nothing
// touches become 0. The flags are apart because a tied head has already written dwte.
void embedding_backward(Tensor dwte, Tensor dwpe, const int32_t *tokens, Tensor dout, int64_t V, int64_t first_token, int64_t first_position,
                        bool accumulate_wte, bool accumulate_wpe, Stream stream);

// Positions alone, for rows [first_row, first_row + N) of a (B*T,C): with t = (first_row + i) mod T,
// x[i,:] += wpe[first_position + t,:];  dwpe[first_position + t,:] (+)= sum over such i of dout[i,:].
// x, dout act (N,C); wpe act, dwpe f32 (P,C), P >= first_position + T. Without accumulation the other rows of dwpe become 0.
void position_forward(Tensor x, Tensor wpe, int64_t first_row, int64_t T, int64_t first_position, Stream stream);
void position_backward(Tensor dwpe, Tensor dout, int64_t first_row, int64_t T, int64_t first_position, bool accumulate, Stream stream);

// out = x + (delta + bias), rounded once: the sum that residual_layernorm_forward takes, without its norm. out, x, delta act (N,C); bias act
// (C), optional. out may alias x or delta.
void residual_forward(Tensor out, Tensor x, Tensor delta, Tensor bias, Stream stream);

// out = (x - mean) * rstd * w + b over the last dimension; rstd = 1/sqrt(variance + eps), variance biased, two passes.
// out, x act (N,C); mean, rstd f32 (N); w, b act (C).
void layernorm_forward(Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor w, Tensor b, float eps, Stream stream);

// residual = x + delta + bias (rounded to act), then layernorm_forward of residual. bias act (C), optional: of the linear layer that
// delta comes from. residual may alias x or delta.
void residual_layernorm_forward(Tensor residual, Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor delta, Tensor bias, Tensor w, Tensor b, float eps,
                                Stream stream);

// With n = (x - mean) * rstd and g = dout * w:  dx = dresidual + rstd * (g - mean_C(g) - n * mean_C(g * n));
// dw (+)= sum_N dout * n;  db (+)= sum_N dout;  sum_dresidual (+)= sum_N dresidual;  sum_dx (+)= sum_N dx.   dresidual act (N,C),
// optional, may alias dx. dw, db, sum_dresidual, sum_dx grad (C), alike, the latter two optional: the gradients of biases whose outputs
// went into the residual sum. C is at most layernorm_backward_channels_max(false): on a GPU up to 16,384, as a block's shared memory holds sums of
// them. With any = true it is the most that any GPU takes, for which none need be there.
int64_t layernorm_backward_channels_max(bool any);
void layernorm_backward(Tensor dx, Tensor dw, Tensor db, Tensor sum_dresidual, Tensor sum_dx, Tensor dout, Tensor x, Tensor w, Tensor mean, Tensor rstd,
                        Tensor dresidual, bool accumulate, Stream stream);

// out = inp @ w^T + bias + residual. If pre_gelu is given: pre_gelu = inp @ w^T + bias, out = gelu(pre_gelu), and residual is
// not given. out act (N,OC); inp act (N,C); w act (OC,C); bias act (OC), optional; residual, pre_gelu act (N,OC), optional.
// residual may alias out.
void linear_forward(Tensor out, Tensor inp, Tensor w, Tensor bias, Tensor residual, Tensor pre_gelu, Stream stream);

// The same with pre_gelu, but out = gelu of the rounded pre_gelu: bit for bit what gelu_forward makes of it.
void linear_gelu_forward(Tensor out, Tensor pre_gelu, Tensor inp, Tensor w, Tensor bias, Stream stream);

// dinp = dout @ w, times gelu'(pre_gelu) if pre_gelu is given;  sum_dinp (+)= sum_N dinp.   dinp act (N,C); dout act (N,OC); pre_gelu
// act (N,C), optional; sum_dinp grad (C), optional: the gradient of the bias in pre_gelu.
void linear_backward_input(Tensor dinp, Tensor sum_dinp, Tensor dout, Tensor w, Tensor pre_gelu, bool accumulate, Stream stream);

// dw (+)= dout^T @ inp;  dbias (+)= sum_N dout.   dw grad (OC,C); dbias grad (OC), optional; dout act (N,OC); inp act (N,C).
void linear_backward_weight(Tensor dw, Tensor dbias, Tensor dout, Tensor inp, bool accumulate, Stream stream);

// Whether the large ones among these products try several algorithms at the first call of a kind, for which the host waits
// (GPU only; on at first), and the file that keeps what they find for later runs (runtime/product_cache.h; "" = none, as at first). What
// they compute depends on neither, bit for bit.
void matmul_search(bool on, const char *cache_path);

// out = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the form of GPT-2 (Hendrycks and Gimpel 2016). out may alias x.
void gelu_forward(Tensor out, Tensor x, Stream stream);

// dx = dout * gelu'(x). dx may alias dout.
void gelu_backward(Tensor dx, Tensor dout, Tensor x, Stream stream);

// dbias (+)= sum_N dout.   dbias grad (OC); dout act (N,OC).
void bias_backward(Tensor dbias, Tensor dout, bool accumulate, Stream stream);

// Causal attention, streaming over keys (Milakov and Gimelshein 2018; Dao et al. 2022): the T x T matrix is never stored.
// out[b,t,h,:] = sum_{s<=t} softmax_s(q.k / sqrt(HS)) v. With a window > 0, over t-window < s <= t only: a query sees itself and
// the window-1 tokens before it (Beltagy et al. 2020, "Longformer"), and time is proportional to T * min(window, T); 0 means
// all, and so, bit for bit, does a window >= T.   out act (B,T,C); lse f32 (B,NH,T), the logarithm of the
// denominator (natural); qkv act (B,T,3C), q then k then v, each of NH heads of HS. HS: any on the CPU, a multiple of 8
// up to 128 on the GPU.
void attention_forward(Tensor out, Tensor lse, Tensor qkv, int NH, int64_t window, Stream stream);

// With P = exp(q.k/sqrt(HS) - lse), D = rowsum(dout * out):  dv = P^T dout,  dS = P * (dout v^T - D),
// dq = dS k / sqrt(HS),  dk = dS^T q / sqrt(HS).   dqkv act (B,T,3C). `deterministic` = false lets a GPU of compute capability
// 9.0 add up dq in whatever order its parts come: faster, and not the same bits in every call.
void attention_backward(Tensor dqkv, Tensor dout, Tensor qkv, Tensor out, Tensor lse, int NH, int64_t window, bool deterministic, Stream stream);

// losses[i] = logsumexp(logits[i,:V]) - logits[i,targets[i]]. If write_dlogits: logits[i,j] = (softmax_j - [j = target]) * dloss
// in place, and columns V..Vp-1 become 0; otherwise logits stay. logits act (N,Vp); losses f32 (N); targets int32 (N), in
// [0,V), or negative: no loss and no gradient for this row.
void classifier_forward_backward(Tensor logits, Tensor losses, const int32_t *targets, int64_t V, float dloss, bool write_dlogits, Stream stream);

// The same for a vocabulary whose columns lie in P parts, columns [first, first + W) here, in two steps between which the parts exchange
// three numbers a row. Of row i of these logits, columns below V only: statistics[i] = {the largest, the sum of exp(logit - largest),
// logits[i, targets[i] - first], or 0 where that is no column of this part}; {-FLT_MAX, 0, 0} where it has no column below V.
// logits act (N,W); statistics f32 (N,3); targets as above, of the whole vocabulary.
void classifier_statistics(Tensor statistics, Tensor logits, const int32_t *targets, int64_t V, int64_t first, Stream stream);

// Then, with the statistics of all parts, f32 (P,N,3): losses[i] as above, and, if write_dlogits, the gradient of these columns in place.
void classifier_from_statistics(Tensor logits, Tensor losses, Tensor statistics, const int32_t *targets, int64_t V, int64_t first, float dloss,
                                bool write_dlogits, Stream stream);

// out[j,i,:] = inp[i,j,:].   inp (n1,n2,inner), out (n2,n1,inner), any dtype, alike.
void swap_blocks(Tensor out, Tensor inp, Stream stream);

// *out (+)= sum of x, in double, in a fixed order. x f32; out is one double in the backend's memory.
void sum_to_double(double *out, Tensor x, bool accumulate, Stream stream);

// *out (+)= sum of the squares of the elements of n tensors x[0..n-1], n >= 1, in double, in a fixed order. NaN and infinity propagate.
// Each f32 or bf16; x itself is in the host's memory.
void sum_squares_to_double(double *out, const Tensor *x, int n, bool accumulate, Stream stream);

// *out (+)= sum of word[i] * (2 (first + i) + 1) modulo 2^64, over the 32-bit words (little-endian) of x's memory: a hash of which
// pieces can be added, first being the place of a piece in the whole. Any one flipped bit changes it, and so do any two: their
// terms are 2^a and 2^b times an odd number below 2^32. x any dtype, of whole words; first + words <= 2^31; out in the
// backend's memory. Exact, hence the same in any order.
void hash_words(uint64_t *out, Tensor x, int64_t first, bool accumulate, Stream stream);

// dst[i] = src[i], rounded to dst's dtype (nearest, ties to even). Any pair of dtypes; same number of elements.
void convert(Tensor dst, Tensor src, Stream stream);

// y[i] += x[i], added in fp32 and rounded once to y's dtype. Any pair of dtypes.
void add_inplace(Tensor y, Tensor x, Stream stream);

// y[i] (+)= sum of parts[p,i] over p, taken in fp32 in the order of p and rounded to parts' dtype. parts f32, bf16 or fp16 (P,n);
// y f32 or bf16 (n).
void sum_parts(Tensor y, Tensor parts, bool accumulate, Stream stream);

// t[i] = value.
void fill(Tensor t, float value, Stream stream);

// Decides an update from its sums, in double: grad_norm = sqrt(sum_squares) / loss_scale, rounded to fp32; clip_factor =
// gradient_clipping / grad_norm where gradient_clipping > 0 is passed, else 1; apply = both grad_norm and sum_loss are finite.
// All pointers are to the backend's memory; loss_scale > 0.
void update_control(UpdateControl *control, const double *sum_squares, const double *sum_loss, double loss_scale, double gradient_clipping, Stream stream);

// Optimizers, over `ranges` >= 0 ranges r[0], r[1], ... of which none overlaps another; r itself is in the host's memory. In each of them:
// the states are f32 (n), grad f32 or bf16 (n), w the master weight in fp32. master is f32 (n), and param act (n)
// gets it rounded: to bf16 with ties away from zero, to fp16 with ties to even; in fp32 training the two are the same memory.
// Or master is DTYPE_REMAINDER (n), and w is param, bf16 (n), joined with it (master_join in runtime/tensor.h); results are
// the same bit for bit. g = grad * control->grad_scale; wd = weight_decay for the first `decays` elements, and 0 for the rest. Nothing is
// written where control->apply is 0. control is in the backend's memory. What an element becomes does not depend on the ranges.

// AdamW (Loshchilov and Hutter 2019): [decoupled: w -= lr*wd*w, else g += wd*w]; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2;
// w -= lr * (m / bias_correction1) / (sqrt(v / bias_correction2) + eps).   m, v: state[0], state[1].
void adamw_update(const UpdateRange *r, int ranges, AdamWArgs args, const UpdateControl *control, Stream stream);

// Lion (Chen et al. 2023): w -= lr*wd*w; w -= lr * sign(b1 m + (1-b1) g); m = b2 m + (1-b2) g.   m: state[0].
void lion_update(const UpdateRange *r, int ranges, LionArgs args, const UpdateControl *control, Stream stream);

// SGD: g += wd*w; if momentum != 0: m = first_update ? g : momentum m + (1-dampening) g; g = nesterov ? g + momentum m : m;
// w -= lr g.   m: state[0], not given when momentum is 0.
void sgd_update(const UpdateRange *r, int ranges, SgdArgs args, const UpdateControl *control, Stream stream);

// Device memory, in bytes, that the kernels above keep for themselves when a model of these sizes trains: scratch of one stream.
// `rows` of C channels, and of F between the two layers of an MLP; attention of NH heads of HS over B samples of T tokens.
// At most; a kernel that wants more than it did is wrong here. Needs no device.
int64_t scratch_bytes(int64_t rows, int64_t C, int64_t F, int64_t B, int64_t T, int64_t NH, int64_t HS);

// Takes that much scratch now, so that it does not grow later: to give back the smaller piece would wait for the whole device.
void scratch_reserve(int64_t bytes, Stream stream);

// Gives a stream's scratch back, before the stream is destroyed. Nothing that uses it may still be under way.
void scratch_release(Stream stream);
