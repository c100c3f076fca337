// matmul.cu - matrix products through cuBLASLt, with bias, GELU and residual in the epilogue where it offers them.
//
// cuBLASLt thinks in columns: a row-major matrix (rows, columns) is its column-major matrix (columns, rows) with leading
// dimension `columns`. So every product here is written as the transpose of what kernel_list.h says:
//
//     out  (N,OC) = inp (N,C) w^T       out^T  (OC,N) = w    (stored C,OC: transposed)  inp^T  (C,N)
//     dinp (N,C)  = dout (N,OC) w       dinp^T (C,N)  = w^T  (stored C,OC)              dout^T (OC,N)
//     dw   (OC,C) = dout^T inp          dw^T   (C,OC) = inp^T (stored C,N)              dout   (stored OC,N: transposed)
//
// The algorithm is chosen once a kind of product (a Plan) and kept. cuBLASLt's heuristic names candidates, the one it
// thinks best first; for large products they are timed, on the very operands of the first call, and the fastest is taken
// among those that give the bits of the first. So the choice may differ from run to run, and results do not.
// Products are accumulated in fp32; fp32 ones are true fp32, without TF32. Where cuBLASLt has no algorithm (odd sizes,
// odd addresses) a plain kernel does the work.
#include "common.cuh"
#include <cublasLt.h>

#define cublasCheck(call) cublas_check((call), __FILE__, __LINE__)

static void cublas_check(cublasStatus_t status, const char *file, int line) {
    if (status != CUBLAS_STATUS_SUCCESS)
        die(EXIT_INTERNAL, "%s:%d: cuBLASLt status %d, %s", file, line, (int)status, cublasLtGetStatusString(status));
}

static const int64_t WORKSPACE_BYTES = 32 << 20; // what NVIDIA recommends for Hopper

// ---------------------------------------------------------------------------------------------------------------
// Plans

typedef struct {
    int64_t m, n, k;             // D is (m, n), column-major
    int trans_a, trans_b;
    int type_in, type_out;       // DType of A and B, of C and D
    int epilogue;                // cublasLtEpilogue_t
    int has_c;                   // C is read (beta = 1)
    int align_a, align_b, align_c, align_d, align_bias, align_aux; // bytes, a power of two up to 256
    int unused;                  // so that there is no padding: keys are compared as bytes
} PlanKey;

typedef struct {
    PlanKey key;
    bool usable;                 // false: cuBLASLt has nothing for this
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, d; // C is laid out as D
    cublasLtMatmulAlgo_t algo;
} Plan;

enum { CANDIDATES_MAX = 16, SEARCH_ROUNDS = 5 };
static const double SEARCH_FLOPS_MIN = 1e10;   // smaller products take less time than their launch
static const double SEARCH_SECONDS_MAX = 10;   // of the whole program; later plans take the first candidate

static cublasLtHandle_t handle;
static Plan *plans;
static int n_plans, plans_room;
static bool search_on = true;

void cuda::matmul_search(bool on) { search_on = on; }

static int address_alignment(const void *p) {
    uintptr_t lowest = (uintptr_t)p & (~(uintptr_t)p + 1);
    return lowest == 0 || lowest > 256 ? 256 : (int)lowest;
}

static cudaDataType_t cuda_type(int dtype) { return dtype == DTYPE_FP32 ? CUDA_R_32F : dtype == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_16F; }

static void op_set(cublasLtMatmulDesc_t op, cublasLtMatmulDescAttributes_t what, const void *value, size_t bytes) {
    cublasCheck(cublasLtMatmulDescSetAttribute(op, what, value, bytes));
}

// The addresses that an epilogue works on; aux is (m, n) with leading dimension m.
static void plan_set_pointers(const Plan *p, const void *bias, const void *aux) {
    if (bias) op_set(p->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
    if (aux) op_set(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux, sizeof aux);
}

// Makes a plan with the heuristic's first choice. Stores it and the others in `candidates`, and returns how many.
static int plan_make(Plan *p, const PlanKey *key, const void *bias, const void *aux, cublasLtMatmulAlgo_t candidates[CANDIDATES_MAX]) {
    memset(p, 0, sizeof *p);
    p->key = *key;
    cudaDataType_t in = cuda_type(key->type_in), out = cuda_type(key->type_out);
    cublasCheck(cublasLtMatmulDescCreate(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublasOperation_t op_a = key->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = key->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)key->epilogue;
    op_set(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a);
    op_set(p->op, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b);
    op_set(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    if (bias) op_set(p->op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &out, sizeof out);
    if (aux) op_set(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &key->m, sizeof key->m);
    plan_set_pointers(p, bias, aux);

    uint64_t rows_a = (uint64_t)(key->trans_a ? key->k : key->m), columns_a = (uint64_t)(key->trans_a ? key->m : key->k);
    uint64_t rows_b = (uint64_t)(key->trans_b ? key->n : key->k), columns_b = (uint64_t)(key->trans_b ? key->k : key->n);
    cublasCheck(cublasLtMatrixLayoutCreate(&p->a, in, rows_a, columns_a, (int64_t)rows_a));
    cublasCheck(cublasLtMatrixLayoutCreate(&p->b, in, rows_b, columns_b, (int64_t)rows_b));
    cublasCheck(cublasLtMatrixLayoutCreate(&p->d, out, (uint64_t)key->m, (uint64_t)key->n, key->m));

    cublasLtMatmulPreference_t preference;
    size_t workspace = (size_t)WORKSPACE_BYTES;
    // A split of k is added up in fp32: never rounded to 16 bits on the way, never in the order of arrival.
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    uint32_t align_a = (uint32_t)key->align_a, align_b = (uint32_t)key->align_b, align_c = (uint32_t)key->align_c, align_d = (uint32_t)key->align_d;
    cublasCheck(cublasLtMatmulPreferenceCreate(&preference));
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction, sizeof reduction));
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align_a, sizeof align_a));
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align_b, sizeof align_b));
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align_c, sizeof align_c));
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align_d, sizeof align_d));
    cublasLtMatmulHeuristicResult_t found[CANDIDATES_MAX];
    int n_found = 0, n = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, p->op, p->a, p->b, p->d, p->d, preference, CANDIDATES_MAX, found, &n_found);
    cublasCheck(cublasLtMatmulPreferenceDestroy(preference));
    if (status != CUBLAS_STATUS_SUCCESS && status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE) cublasCheck(status);
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < n_found; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS && found[i].workspaceSize <= workspace) candidates[n++] = found[i].algo;
    p->usable = n > 0;
    if (n > 0) p->algo = candidates[0];
    return n;
}

static Plan *plan_find(const PlanKey *key) {
    for (int i = 0; i < n_plans; i++) if (memcmp(&plans[i].key, key, sizeof *key) == 0) return &plans[i];
    return NULL;
}

// Room for one more plan.
static Plan *plan_add(void) {
    if (!handle) cublasCheck(cublasLtCreate(&handle));
    if (n_plans == plans_room) {
        int room = plans_room ? 2 * plans_room : 64;
        Plan *larger = (Plan *)host_alloc(sizeof(Plan) * (size_t)room);
        if (n_plans) memcpy(larger, plans, sizeof(Plan) * (size_t)n_plans);
        free(plans);
        plans = larger;
        plans_room = room;
    }
    return &plans[n_plans++];
}

// One product, column-major and dense: d = epilogue(op(a) op(b) + c). c may be d, or null for none; bias has the type of
// d; false, and nothing done, where cuBLASLt cannot.
typedef struct {
    void *d;
    const void *a, *b, *c, *bias;
    void *aux;
    int64_t m, n, k;
    bool trans_a, trans_b;
    DType type_in, type_out;
    cublasLtEpilogue_t epilogue;
} Product;

static cublasStatus_t plan_run(const Plan *plan, const cublasLtMatmulAlgo_t *algo, const Product *p, void *d, Stream stream) {
    float alpha = 1.0f, beta = p->c ? 1.0f : 0.0f;
    void *workspace = scratch_get(WORKSPACE_BYTES, stream);
    return cublasLtMatmul(handle, plan->op, &alpha, p->a, plan->a, p->b, plan->b, &beta, p->c ? p->c : d, plan->d, d, plan->d,
                          algo, workspace, (size_t)WORKSPACE_BYTES, (cudaStream_t)stream);
}

// ---------------------------------------------------------------------------------------------------------------
// The search

// The bits of a result in one number; the host waits.
static uint64_t result_hash(const void *d, int64_t bytes, Stream stream) {
    uint64_t *hash = (uint64_t *)scratch_get(WORKSPACE_BYTES, stream), got; // the product no longer needs its workspace
    cuda::hash_words(hash, tensor1((void *)d, DTYPE_FP32, bytes / 4), 0, false, stream);
    cudaCheck(cudaMemcpyAsync(&got, hash, sizeof got, cudaMemcpyDeviceToHost, (cudaStream_t)stream));
    stream_sync(stream);
    return got;
}

// Puts the fastest of n candidates into the plan: the median of a few rounds, in which all take turns, so that a clock that
// drifts is fair to all. A result that may not be overwritten yet (it is also an operand) goes to memory of its own; if
// there is none to spare, the first candidate stays.
static void plan_search(Plan *plan, const cublasLtMatmulAlgo_t *candidates, int n, const Product *p, Stream stream) {
    static double seconds;
    const int64_t bytes = p->m * p->n * dtype_bytes(p->type_out);
    if (n < 2 || 2.0 * (double)p->m * (double)p->n * (double)p->k < SEARCH_FLOPS_MIN || seconds > SEARCH_SECONDS_MAX) return;
    if (bytes % 4 != 0 || bytes / 4 > INT32_MAX || !is_aligned(p->d, 16)) return; // results are compared by hash_words
    const bool apart = p->c == p->d;
    const double start = clock_seconds();
    void *d = p->d;
    // By device_malloc it would count in the run's need, and its lack would end it. In the stream's order, because cudaFree waits for
    // the whole device, also for a receive that another stage of a pipeline answers only when this one has gone on.
    if (apart && cudaMallocAsync(&d, (size_t)bytes, (cudaStream_t)stream) != cudaSuccess) {
        cudaGetLastError(); // forgotten
        return;
    }
    double ms[CANDIDATES_MAX][SEARCH_ROUNDS];
    bool same[CANDIDATES_MAX];
    int best = -1;
    uint64_t want = 0;
    for (int i = 0; i < n; i++) { // also warms up
        same[i] = false;
        if (plan_run(plan, &candidates[i], p, d, stream) != CUBLAS_STATUS_SUCCESS) continue; // the heuristic promised too much
        const uint64_t bits = result_hash(d, bytes, stream);
        if (best < 0) best = i, want = bits;
        same[i] = bits == want;
    }
    Event from = event_create(), to = event_create();
    for (int round = 0; round < SEARCH_ROUNDS; round++)
        for (int i = 0; i < n; i++) {
            if (!same[i]) continue;
            event_record(from, stream);
            cublasCheck(plan_run(plan, &candidates[i], p, d, stream));
            event_record(to, stream);
            event_sync(to);
            double at = event_elapsed_ms(from, to);
            int k = round; // sorted by insertion
            for (; k > 0 && ms[i][k - 1] > at; k--) ms[i][k] = ms[i][k - 1];
            ms[i][k] = at;
        }
    for (int i = 0; i < n; i++) if (same[i] && ms[i][SEARCH_ROUNDS / 2] < ms[best][SEARCH_ROUNDS / 2]) best = i;
    if (best >= 0) plan->algo = candidates[best];
    event_destroy(from);
    event_destroy(to);
    if (apart) cudaCheck(cudaFreeAsync(d, (cudaStream_t)stream));
    seconds += clock_seconds() - start;
}

static bool product_by_library(const Product *p, Stream stream) {
    // Its fused epilogues want vectors: of the bias, and of each column of aux.
    if (p->bias && !is_aligned(p->bias, 16)) return false;
    if (p->aux && (!is_aligned(p->aux, 16) || p->m % 8 != 0)) return false;
    PlanKey key;
    memset(&key, 0, sizeof key);
    key.m = p->m; key.n = p->n; key.k = p->k;
    key.trans_a = p->trans_a; key.trans_b = p->trans_b;
    key.type_in = p->type_in; key.type_out = p->type_out;
    key.epilogue = (int)p->epilogue;
    key.has_c = p->c != NULL;
    key.align_a = address_alignment(p->a); key.align_b = address_alignment(p->b);
    key.align_d = address_alignment(p->d); key.align_c = p->c ? address_alignment(p->c) : key.align_d;
    key.align_bias = address_alignment(p->bias); key.align_aux = address_alignment(p->aux);
    Plan *plan = plan_find(&key);
    if (!plan) {
        cublasLtMatmulAlgo_t candidates[CANDIDATES_MAX];
        plan = plan_add();
        const int n = plan_make(plan, &key, p->bias, p->aux, candidates);
        if (search_on) plan_search(plan, candidates, n, p, stream);
    }
    if (!plan->usable) return false;
    plan_set_pointers(plan, p->bias, p->aux);
    cublasStatus_t status = plan_run(plan, &plan->algo, p, p->d, stream);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) { // the heuristic promised too much
        plan->usable = false;
        return false;
    }
    cublasCheck(status);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------
// The plain kernel: any size, any address, any of the three forms

enum { PLAIN_TILE = 16 };

// d[i,j] = sum_k a(i,k) b(j,k) + bias[j] + c[i,j], row-major (rows, columns); a and b by strides. c may be d.
template <typename T, typename D>
__global__ void __launch_bounds__(PLAIN_TILE * PLAIN_TILE)
plain_matmul_kernel(D *d, const T *a, int64_t a_row, int64_t a_k, const T *b, int64_t b_row, int64_t b_k, const T *bias, const D *c,
                    int64_t rows, int64_t columns, int64_t K) {
    __shared__ float tile_a[PLAIN_TILE][PLAIN_TILE + 1], tile_b[PLAIN_TILE][PLAIN_TILE + 1];
    int x = threadIdx.x % PLAIN_TILE, y = threadIdx.x / PLAIN_TILE;
    int64_t column_tiles = (columns + PLAIN_TILE - 1) / PLAIN_TILE;
    int64_t i0 = blockIdx.x / column_tiles * PLAIN_TILE, j0 = blockIdx.x % column_tiles * PLAIN_TILE;
    float sum = 0;
    for (int64_t k0 = 0; k0 < K; k0 += PLAIN_TILE) {
        tile_a[y][x] = i0 + y < rows && k0 + x < K ? to_float(a[(i0 + y) * a_row + (k0 + x) * a_k]) : 0.0f;
        tile_b[y][x] = j0 + y < columns && k0 + x < K ? to_float(b[(j0 + y) * b_row + (k0 + x) * b_k]) : 0.0f;
        __syncthreads(); // the tiles are full
        for (int k = 0; k < PLAIN_TILE; k++) sum += tile_a[y][k] * tile_b[x][k];
        __syncthreads(); // all have read them
    }
    int64_t i = i0 + y, j = j0 + x;
    if (i >= rows || j >= columns) return;
    if (bias) sum += to_float(bias[j]);
    if (c) sum += to_float(c[i * columns + j]);
    d[i * columns + j] = from_float<D>(sum);
}

// The same product as product_by_library, without its GELU epilogues. The transpose of a column-major (m, n) is a
// row-major (n, m): rows run over op(b), columns over op(a).
static void product_by_plain_kernel(const Product *p, Stream stream) {
    const int64_t rows = p->n, columns = p->m;
    const unsigned blocks = grid_blocks(ceil_div(rows, PLAIN_TILE) * ceil_div(columns, PLAIN_TILE));
    int64_t row_stride = p->trans_b ? 1 : p->k, row_k = p->trans_b ? p->n : 1;       // op(b)(k, row)
    int64_t column_stride = p->trans_a ? p->k : 1, column_k = p->trans_a ? 1 : p->m; // op(a)(column, k)
    cudaStream_t s = (cudaStream_t)stream;
    FLOATX_SWITCH(p->type_in, {
        const floatX *a = (const floatX *)p->a, *b = (const floatX *)p->b, *bias = (const floatX *)p->bias;
        if (p->type_out == p->type_in)
            plain_matmul_kernel<floatX, floatX><<<blocks, PLAIN_TILE * PLAIN_TILE, 0, s>>>(
                (floatX *)p->d, b, row_stride, row_k, a, column_stride, column_k, bias, (const floatX *)p->c, rows, columns, p->k);
        else
            plain_matmul_kernel<floatX, float><<<blocks, PLAIN_TILE * PLAIN_TILE, 0, s>>>(
                (float *)p->d, b, row_stride, row_k, a, column_stride, column_k, bias, (const float *)p->c, rows, columns, p->k);
    });
    launch_check();
}

static void product(const Product *p, Stream stream) {
    if (p->m == 0 || p->n == 0) return;
    if (!product_by_library(p, stream)) product_by_plain_kernel(p, stream);
}

// ---------------------------------------------------------------------------------------------------------------
// The linear layer

void cuda::linear_forward(Tensor out, Tensor inp, Tensor w, Tensor bias, Tensor residual, Tensor pre_gelu, Stream stream) {
    const char *const kernel = "linear_forward";
    const int64_t N = tensor_rows(inp), C = tensor_columns(inp), OC = tensor_columns(out);
    check_act(kernel, "out", out, N, OC, inp.dtype);
    check_act(kernel, "w", w, OC, C, inp.dtype);
    if (bias.data) check_act(kernel, "bias", bias, 1, OC, inp.dtype);
    if (residual.data) check_act(kernel, "residual", residual, N, OC, inp.dtype);
    if (pre_gelu.data) check_act(kernel, "pre_gelu", pre_gelu, N, OC, inp.dtype);
    CHECK(!residual.data || !pre_gelu.data, "linear_forward: both residual and pre_gelu are given");
    Product p = {};
    p.d = out.data; p.a = w.data; p.b = inp.data; p.c = residual.data; p.bias = bias.data;
    p.m = OC; p.n = N; p.k = C;
    p.trans_a = true;
    p.type_in = inp.dtype; p.type_out = out.dtype;
    p.epilogue = bias.data ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    if (!pre_gelu.data) { product(&p, stream); return; }
    if (inp.dtype != DTYPE_FP32) {
        Product fused = p;
        fused.aux = pre_gelu.data;
        fused.epilogue = bias.data ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
        if (product_by_library(&fused, stream)) return;
    }
    p.d = pre_gelu.data;
    product(&p, stream);
    gelu_forward(out, pre_gelu, stream);
}

// With GELU' in its epilogue a product takes 1.1 to 1.9 times as long as without, less than a kernel of its own would add; but at
// these sizes (355M, 32 samples) twice as long, as if the library had no good algorithm there (docs/benchmarks.md). A rule rather than a
// search: the two ways round differently, and the bits of a run must not depend on what a search finds.
enum { GELU_APART_ROWS = 32768, GELU_APART_DEPTH = 1024 };

void cuda::linear_backward_input(Tensor dinp, Tensor sum_dinp, Tensor dout, Tensor w, Tensor pre_gelu, bool accumulate, Stream stream) {
    const char *const kernel = "linear_backward_input";
    const int64_t N = tensor_rows(dout), OC = tensor_columns(dout), C = tensor_columns(dinp);
    check_act(kernel, "dinp", dinp, N, C, dout.dtype);
    check_act(kernel, "w", w, OC, C, dout.dtype);
    if (pre_gelu.data) check_act(kernel, "pre_gelu", pre_gelu, N, C, dout.dtype);
    if (sum_dinp.data) check_weight_grad(kernel, "sum_dinp", sum_dinp, 1, C, dout.dtype);
    Product p = {};
    p.d = dinp.data; p.a = w.data; p.b = dout.data;
    p.m = C; p.n = N; p.k = OC;
    p.type_in = dout.dtype; p.type_out = dinp.dtype;
    p.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    Product fused = p;
    fused.aux = pre_gelu.data;
    fused.epilogue = CUBLASLT_EPILOGUE_DGELU;
    const bool try_fused = pre_gelu.data && dout.dtype != DTYPE_FP32 && !(N == GELU_APART_ROWS && OC == GELU_APART_DEPTH);
    if (!try_fused || !product_by_library(&fused, stream)) {
        product(&p, stream);
        if (pre_gelu.data) gelu_backward(dinp, dinp, pre_gelu, stream);
    }
    if (sum_dinp.data) bias_backward(sum_dinp, dinp, accumulate, stream);
}

void cuda::linear_backward_weight(Tensor dw, Tensor dbias, Tensor dout, Tensor inp, bool accumulate, Stream stream) {
    const char *const kernel = "linear_backward_weight";
    const int64_t N = tensor_rows(dout), OC = tensor_columns(dout), C = tensor_columns(inp);
    check_act(kernel, "inp", inp, N, C, dout.dtype);
    check_weight_grad(kernel, "dw", dw, OC, C, dout.dtype);
    Product p = {};
    p.d = dw.data; p.a = inp.data; p.b = dout.data; p.c = accumulate ? dw.data : NULL;
    p.m = C; p.n = OC; p.k = N;
    p.trans_b = true;
    p.type_in = dout.dtype; p.type_out = dw.dtype;
    p.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    product(&p, stream);
    if (dbias.data) bias_backward(dbias, dout, accumulate, stream);
}
