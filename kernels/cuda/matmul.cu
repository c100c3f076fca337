// matmul.cu - matrix products through cuBLASLt, with bias, GELU and residual in the epilogue where it offers them.
//
// cuBLASLt thinks in columns: a row-major matrix (rows, columns) is its column-major matrix (columns, rows) with leading
// dimension `columns`. So every product here is written as the transpose of what kernel_list.h says:
//
//     out  (N,OC) = inp (N,C) w^T       out^T  (OC,N) = w    (stored C,OC: transposed)  inp^T  (C,N)
//     dinp (N,C)  = dout (N,OC) w       dinp^T (C,N)  = w^T  (stored C,OC)              dout^T (OC,N)
//     dw   (OC,C) = dout^T inp          dw^T   (C,OC) = inp^T (stored C,N)              dout   (stored OC,N: transposed)
//
// The algorithm is chosen once a kind of product (a Plan) and kept. cuBLASLt's heuristic names candidates, the one it thinks best first, and
// matmul_hopper.cu is one more; for large products they and others are timed, on the very operands of the first call, and the fastest is
// taken among those that give the bits of the first. So the choice may differ from run to run, and results do not. It is kept in a file for
// later runs.
// Products are accumulated in fp32; fp32 ones are true fp32, without TF32. Where cuBLASLt has no algorithm (odd sizes,
// odd addresses) a plain kernel does the work.
#include "../../runtime/product_cache.h"
#include "matmul_hopper.cuh"
#include <cublasLt.h>
#include <initializer_list>

#define cublasCheck(call) cublas_check((call), __FILE__, __LINE__)

static void cublas_check(cublasStatus_t status, const char *file, int line) {
    if (status != CUBLAS_STATUS_SUCCESS)
        die(EXIT_INTERNAL, "%s:%d: cuBLASLt status %d, %s", file, line, (int)status, cublasLtGetStatusString(status));
}

static const int64_t WORKSPACE_BYTES = 32 << 20; // what NVIDIA recommends for Hopper

// ---------------------------------------------------------------------------------------------------------------
// Plans

typedef struct { // of one type, so that there is no padding: keys are compared as bytes, and written as numbers
    int64_t m, n, k;             // D is (m, n), column-major
    int64_t trans_a, trans_b;
    int64_t type_in, type_out;   // DType of A and B, of C and D
    int64_t epilogue;            // cublasLtEpilogue_t
    int64_t has_c;               // C is read (beta = 1)
    int64_t align_a, align_b, align_c, align_d, align_bias, align_aux; // bytes, a power of two up to 256
} PlanKey;
static_assert(sizeof(PlanKey) == PRODUCT_KEY * sizeof(int64_t), "a line of the cache holds a key");
static_assert(sizeof(cublasLtMatmulAlgo_t) == PRODUCT_ALGO * sizeof(uint64_t), "and an algorithm");

typedef struct {
    PlanKey key;
    bool usable;                 // false: there is no algorithm for this
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, d; // C is laid out as D
    cublasLtMatmulAlgo_t algo;
} Plan;

enum { HEURISTIC_MAX = 16, NAMED_MAX = HEURISTIC_MAX + 1, CANDIDATES_MAX = 8192, FINALISTS = 6, FINAL_ROUNDS = 4 };
static const double SEARCH_FLOPS_MIN = 1e10;   // smaller products take less time than their launch
static const double SEARCH_SECONDS_MAX = 60;   // of the whole program; later plans take the first candidate
static const double SCREEN_SECONDS = 0.7;      // of one product
static const double FINAL_WARM_MS = 8, FINAL_MS = 22; // untimed and timed, of one candidate in one round
static const size_t WIDE_FREE_BYTES = (size_t)1 << 30;

static cublasLtHandle_t handle;
static Plan *plans;
static int n_plans, plans_room;
static bool search_on = true;
static ProductCache cache;       // what earlier runs found

void cuda::matmul_search(bool on, const char *cache_path) {
    int driver = 0;
    search_on = on;
    cudaCheck(cudaDriverGetVersion(&driver));
    product_cache_open(&cache, on ? cache_path : "", product_machine(device_info().name, driver, (int64_t)cublasLtGetVersion()));
}

static int address_alignment(const void *p) {
    uintptr_t lowest = (uintptr_t)p & (~(uintptr_t)p + 1);
    return lowest == 0 || lowest > 256 ? 256 : (int)lowest;
}

static cudaDataType_t cuda_type(int64_t dtype) { return dtype == DTYPE_FP32 ? CUDA_R_32F : dtype == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_16F; }

static void op_set(cublasLtMatmulDesc_t op, cublasLtMatmulDescAttributes_t what, const void *value, size_t bytes) {
    cublasCheck(cublasLtMatmulDescSetAttribute(op, what, value, bytes));
}

// The addresses that an epilogue works on; aux is (m, n) with leading dimension m.
static void plan_set_pointers(const Plan *p, const void *bias, const void *aux) {
    if (bias) op_set(p->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
    if (aux) op_set(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux, sizeof aux);
}

// Makes a plan with the heuristic's first choice. Stores it and the others in `candidates`, and returns how many.
static int plan_make(Plan *p, const PlanKey *key, const void *bias, const void *aux, cublasLtMatmulAlgo_t candidates[NAMED_MAX]) {
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
    cublasLtMatmulHeuristicResult_t found[HEURISTIC_MAX];
    int n_found = 0, n = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, p->op, p->a, p->b, p->d, p->d, preference, HEURISTIC_MAX, found, &n_found);
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

// An algorithm of zeros stands for our own kernels, which are for compute capability 9.0 (matmul_hopper.cu).
static const cublasLtMatmulAlgo_t own_algorithm = {};

static bool is_own(const cublasLtMatmulAlgo_t *algo) { return memcmp(algo, &own_algorithm, sizeof *algo) == 0; }

static bool own_fits(const Product *p) {
    for (const void *address : {p->a, p->b, p->c, p->bias, (const void *)p->d}) if (!is_aligned(address, 16)) return false;
    return p->type_in == p->type_out && !p->trans_b && (!p->c || p->trans_a) && (p->epilogue == CUBLASLT_EPILOGUE_DEFAULT || p->epilogue == CUBLASLT_EPILOGUE_BIAS) &&
           matmul_hopper_fits(p->type_in, p->n, p->m, p->k);
}

static void own_run(const Product *p, void *d, Stream stream) {
    const Tensor b = p->trans_a ? tensor2((void *)p->a, p->type_in, p->m, p->k) : tensor2((void *)p->a, p->type_in, p->k, p->m);
    const Tensor bias = p->bias ? tensor1((void *)p->bias, p->type_in, p->m) : tensor_none();
    const Tensor c = p->c ? tensor2((void *)p->c, p->type_in, p->n, p->m) : tensor_none();
    matmul_hopper(p->c ? MATMUL_RESIDUAL : MATMUL_BIAS, tensor2(d, p->type_out, p->n, p->m), tensor2((void *)p->b, p->type_in, p->n, p->k), b, !p->trans_a, bias, c, NULL, stream);
}

static cublasStatus_t plan_run(const Plan *plan, const cublasLtMatmulAlgo_t *algo, const Product *p, void *d, Stream stream) {
    if (is_own(algo)) {
        own_run(p, d, stream);
        return CUBLAS_STATUS_SUCCESS;
    }
    float alpha = 1.0f, beta = p->c ? 1.0f : 0.0f;
    void *workspace = scratch_get(WORKSPACE_BYTES, stream);
    return cublasLtMatmul(handle, plan->op, &alpha, p->a, plan->a, p->b, plan->b, &beta, p->c ? p->c : d, plan->d, d, plan->d,
                          algo, workspace, (size_t)WORKSPACE_BYTES, (cudaStream_t)stream);
}

// ---------------------------------------------------------------------------------------------------------------
// The search
//
//   named       ours where it fits, first if it has something to finish, else last; what cuBLASLt's heuristic names, at most 16, the one it
//               thinks best first. The bits of the first are the bits of the product
//   wide        the library's first kind of kernel with other tiles, clusters, orders and options, those that promise most first
//   screening   one call of each, as long as there is time
//   finals      the fastest of those that give the first's bits, each for tens of milliseconds, by turns, on a hot GPU
//
// The finals are there because products run into the limit of power: the clock falls by a quarter, and what counts is then how much work
// an algorithm does for its energy, which a brief call on a cool GPU does not show (docs/benchmarks.md).

typedef struct {
    cublasLtMatmulAlgo_t algo;
    double cost; // in work of the processors, for the order of screening
    double ms;
} Candidate;

static int candidate_by_cost(const void *a, const void *b) {
    const double x = ((const Candidate *)a)->cost, y = ((const Candidate *)b)->cost;
    return (x > y) - (x < y);
}

static int candidate_by_ms(const void *a, const void *b) {
    const double x = ((const Candidate *)a)->ms, y = ((const Candidate *)b)->ms;
    return (x > y) - (x < y);
}

// Tiles of D that won somewhere, and their neighbours. Older libraries do not name them; there the heuristic's list has to do.
static const struct {
    int id, m, n;
} wide_tiles[] = {
#if CUBLAS_VERSION >= 130000
#define TILE(m, n) {CUBLASLT_MATMUL_TILE_##m##x##n, m, n}
    TILE(64, 256), TILE(64, 264), TILE(64, 280), TILE(64, 328), TILE(96, 128), TILE(96, 256), TILE(128, 96), TILE(128, 112), TILE(128, 120),
    TILE(128, 128), TILE(128, 136), TILE(128, 144), TILE(128, 152), TILE(128, 160), TILE(128, 168), TILE(128, 176), TILE(128, 184), TILE(128, 192),
    TILE(128, 200), TILE(128, 208), TILE(128, 224), TILE(128, 240), TILE(128, 256), TILE(128, 280), TILE(136, 128), TILE(136, 256), TILE(144, 128),
    TILE(152, 128), TILE(160, 128), TILE(160, 192), TILE(160, 256), TILE(168, 128), TILE(176, 128), TILE(176, 192), TILE(176, 256), TILE(184, 128), TILE(192, 88),
    TILE(192, 96), TILE(192, 104), TILE(192, 112), TILE(192, 128), TILE(192, 176), TILE(192, 192), TILE(208, 128), TILE(208, 192), TILE(240, 128),
    TILE(256, 64), TILE(256, 80), TILE(256, 96), TILE(256, 104), TILE(256, 112), TILE(256, 120), TILE(256, 128), TILE(256, 136), TILE(256, 152),
    TILE(256, 168), TILE(256, 176), TILE(320, 64), TILE(320, 128), TILE(384, 64), TILE(384, 96), TILE(384, 112),
#undef TILE
#endif
    {0, 0, 0},
};

// The attribute of an algorithm as a number; 0 where it has none.
static int64_t algo_get(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t what, size_t bytes) {
    int64_t value = 0; // little endian
    size_t written;
    return cublasLtMatmulAlgoConfigGetAttribute(algo, what, &value, bytes, &written) == CUBLAS_STATUS_SUCCESS ? value : 0;
}

static bool algo_set(cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t what, int64_t value, size_t bytes) {
    return cublasLtMatmulAlgoConfigSetAttribute(algo, what, &value, bytes) == CUBLAS_STATUS_SUCCESS;
}

// Whether the library would run it in our workspace, or it is ours.
static bool plan_accepts(const Plan *plan, const Product *p, const cublasLtMatmulAlgo_t *algo) {
    cublasLtMatmulHeuristicResult_t result;
    return is_own(algo) ? own_fits(p) : cublasLtMatmulAlgoCheck(handle, plan->op, plan->a, plan->b, plan->d, plan->d, algo, &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= (size_t)WORKSPACE_BYTES;
}

// Adds to a list of n what has the kernel family and split of k of `first`, cheapest first; returns the new number. The cost of tiles is
// that of whole waves over the processors, and more where a tile's edges are long for its area, since operands enter over the edges.
static int plan_widen(const Plan *plan, const Product *p, const cublasLtMatmulAlgo_t *first, Candidate *list, int n) {
    static const struct { cublasLtClusterShape_t shape; double cost; } clusters[] = {
        {CUBLASLT_CLUSTER_SHAPE_2x1x1, 1.00}, {CUBLASLT_CLUSTER_SHAPE_1x2x1, 1.00}, {CUBLASLT_CLUSTER_SHAPE_1x1x1, 1.01},
        {CUBLASLT_CLUSTER_SHAPE_2x2x1, 1.03}, {CUBLASLT_CLUSTER_SHAPE_2x4x1, 1.03}};
    const cudaDataType_t in = cuda_type(plan->key.type_in), out = cuda_type(plan->key.type_out);
    const int64_t splits = algo_get(first, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4);
    cublasLtMatmulAlgo_t base;
    if (cublasLtMatmulAlgoInit(handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, in, in, out, out, (int)algo_get(first, CUBLASLT_ALGO_CONFIG_ID, 4), &base) != CUBLAS_STATUS_SUCCESS) return n;
    if (!algo_set(&base, CUBLASLT_ALGO_CONFIG_STAGES_ID, algo_get(first, CUBLASLT_ALGO_CONFIG_STAGES_ID, 4), 4) ||
        !algo_set(&base, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, splits, 4) ||
        !algo_set(&base, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, algo_get(first, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4), 4) ||
        !algo_set(&base, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, algo_get(first, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2), 2)) return n;
    int32_t options = 0;
    size_t written;
    if (cublasLtMatmulAlgoCapGetAttribute(&base, CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX, &options, sizeof options, &written) != CUBLAS_STATUS_SUCCESS) options = 0;
    const int from = n;
    for (int t = 0; wide_tiles[t].id; t++) {
        const int64_t m = wide_tiles[t].m, width = wide_tiles[t].n;
        const int64_t tiles = ceil_div(plan->key.m, m) * ceil_div(plan->key.n, width) * max_i64(splits, 1);
        const double cost = (double)ceil_div(tiles, sm_count()) * (double)(m * width + 8 * (m + width));
        for (int64_t option = 0; option <= min_i64(options, 7); option++)
            for (size_t c = 0; c < sizeof clusters / sizeof *clusters; c++)
                for (int64_t swizzle = 0; swizzle < 2 && n < CANDIDATES_MAX; swizzle++) {
                    Candidate *x = &list[n];
                    x->algo = base;
                    x->cost = cost * clusters[c].cost;
                    n += algo_set(&x->algo, CUBLASLT_ALGO_CONFIG_TILE_ID, wide_tiles[t].id, 4) && algo_set(&x->algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, option, 4) &&
                         algo_set(&x->algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, clusters[c].shape, 2) &&
                         algo_set(&x->algo, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, swizzle, 4) && plan_accepts(plan, p, &x->algo);
                }
    }
    qsort(list + from, (size_t)(n - from), sizeof *list, candidate_by_cost);
    return n;
}

// The bits of an algorithm's result in one number, over memory that holds another; the host waits. False where it does not run.
static bool plan_hash(const Plan *plan, const cublasLtMatmulAlgo_t *algo, const Product *p, void *d, int64_t bytes, uint64_t *got, Stream stream) {
    cudaCheck(cudaMemsetAsync(d, 0xff, (size_t)bytes, (cudaStream_t)stream)); // NaNs
    if (plan_run(plan, algo, p, d, stream) != CUBLAS_STATUS_SUCCESS) return false;
    uint64_t *hash = (uint64_t *)scratch_get(WORKSPACE_BYTES, stream); // the product no longer needs its workspace
    cuda::hash_words(hash, tensor1(d, DTYPE_FP32, bytes / 4), 0, false, stream);
    cudaCheck(cudaMemcpyAsync(got, hash, sizeof *got, cudaMemcpyDeviceToHost, (cudaStream_t)stream));
    stream_sync(stream);
    return true;
}

// Milliseconds of one of `calls` in a row; the host waits.
static double plan_ms(const Plan *plan, const cublasLtMatmulAlgo_t *algo, const Product *p, void *d, int calls, Stream stream) {
    static Event from, to;
    if (!from) from = event_create(), to = event_create();
    event_record(from, stream);
    for (int i = 0; i < calls; i++) cublasCheck(plan_run(plan, algo, p, d, stream));
    event_record(to, stream);
    event_sync(to);
    return event_elapsed_ms(from, to) / calls;
}

// Whether the bits of a result tell algorithms apart, by three places: not where all is NaN, as after an overflow, or 0. The host waits.
static bool bits_tell(const void *d, int64_t bytes, DType type, Stream stream) {
    enum { SAMPLE = 4096 };
    const int64_t size = min_i64(bytes, SAMPLE), elements = size / dtype_bytes(type);
    for (int64_t at : {(int64_t)0, (bytes - size) / 2 / SAMPLE * SAMPLE, (bytes - size) / SAMPLE * SAMPLE}) {
        alignas(16) char sample[SAMPLE];
        device_copy(sample, (const char *)d + at, size, COPY_TO_HOST, stream);
        stream_sync(stream);
        for (int64_t i = 0; i < elements; i++) {
            const double x = dtype_load(sample, type, i);
            if (isfinite(x) && x != 0) return true;
        }
    }
    return false;
}

// Puts the fastest of the list into plan->algo: n of it are named, the rest found here. `want` are the bits that it must give.
// False where memory was too short for the rest: with more of it another may win.
static bool plan_compete(Plan *plan, Candidate *list, int n, uint64_t want, const Product *p, void *d, int64_t bytes, Stream stream) {
    static bool told;
    const double start = clock_seconds();
    size_t free_bytes = 0, total;
    if (!told) note("looking for the fastest algorithm of each large matrix product, one to two seconds each%s%s (train_gpt.run.matmul_cache, .matmul_search)", cache.path[0] ? "; what is found is kept in " : "", cache.shown);
    told = true;
    cudaCheck(cudaMemGetInfo(&free_bytes, &total));
    const int named = n;
    const bool wide = free_bytes > WIDE_FREE_BYTES;
    const int library = is_own(&list[0].algo); // where the library's begin
    if (wide && library < n) n = plan_widen(plan, p, &list[library].algo, list, n); // every kernel tried takes some
    int screened = 0;
    for (; screened < n && (screened < named || clock_seconds() - start < SCREEN_SECONDS); screened++) {
        Candidate *x = &list[screened];
        x->ms = plan_run(plan, &x->algo, p, d, stream) == CUBLAS_STATUS_SUCCESS ? plan_ms(plan, &x->algo, p, d, 1, stream) : INFINITY; // the first call loads the kernel
    }
    qsort(list, (size_t)screened, sizeof *list, candidate_by_ms);
    int finalist[FINALISTS], n_finalists = 0;
    for (int i = 0; i < screened && n_finalists < FINALISTS && list[i].ms < INFINITY; i++) {
        uint64_t bits;
        if (plan_hash(plan, &list[i].algo, p, d, bytes, &bits, stream) && bits == want) finalist[n_finalists++] = i;
    }
    double ms[FINALISTS] = {};
    for (int round = 0; round < FINAL_ROUNDS; round++)
        for (int k = 0; k < n_finalists; k++) {
            const int turn = round % 2 ? n_finalists - 1 - k : k; // to and fro, so that a clock that falls is fair to all
            const Candidate *x = &list[finalist[turn]];
            plan_ms(plan, &x->algo, p, d, (int)(FINAL_WARM_MS * (k ? 1 : 3) / x->ms) + 1, stream);
            ms[turn] += plan_ms(plan, &x->algo, p, d, (int)(FINAL_MS / x->ms) + 1, stream);
        }
    int best = 0;
    for (int k = 1; k < n_finalists; k++) if (ms[k] < ms[best]) best = k;
    if (n_finalists) plan->algo = list[finalist[best]].algo;
    return wide;
}

// Finds the fastest algorithm for a plan with n named candidates: in the file of earlier runs, else by trying. A result that
// may not be overwritten yet (it is also an operand) goes to memory of its own; if there is none to spare, the first candidate stays.
static void plan_search(Plan *plan, const cublasLtMatmulAlgo_t *candidates, int n, const Product *p, Stream stream) {
    static double seconds;
    const int64_t bytes = p->m * p->n * dtype_bytes(p->type_out);
    if (n < 1 || 2.0 * (double)p->m * (double)p->n * (double)p->k < SEARCH_FLOPS_MIN) return;
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
    uint64_t want = 0, bits = 0;
    int first = 0;
    while (first < n && !plan_hash(plan, &candidates[first], p, d, bytes, &want, stream)) first++; // the heuristic promises too much at times
    if (first < n) plan->algo = candidates[first];
    if (first < n && bits_tell(d, bytes, p->type_out, stream)) {
        const uint64_t *stored = product_cache_find(&cache, (const int64_t *)&plan->key);
        cublasLtMatmulAlgo_t known;
        if (stored) memcpy(&known, stored, sizeof known);
        if (stored && plan_accepts(plan, p, &known) && plan_hash(plan, &known, p, d, bytes, &bits, stream) && bits == want) plan->algo = known;
        else if (seconds < SEARCH_SECONDS_MAX) {
            Candidate *list = (Candidate *)host_alloc(sizeof(Candidate) * CANDIDATES_MAX);
            for (int i = first; i < n; i++) list[i - first].algo = candidates[i];
            const bool final = plan_compete(plan, list, n - first, want, p, d, bytes, stream);
            free(list);
            if (final) product_cache_store(&cache, (const int64_t *)&plan->key, (const uint64_t *)&plan->algo);
        }
    }
    if (apart) cudaCheck(cudaFreeAsync(d, (cudaStream_t)stream));
    seconds += clock_seconds() - start;
}

// By the library, or by ours where it is the same product.
static bool product_by_plan(const Product *p, Stream stream) {
    // Its fused epilogues want vectors: of the bias, and of each column of aux.
    if (p->bias && !is_aligned(p->bias, 16)) return false;
    if (p->aux && (!is_aligned(p->aux, 16) || p->m % 8 != 0)) return false;
    PlanKey key;
    memset(&key, 0, sizeof key);
    key.m = p->m; key.n = p->n; key.k = p->k;
    key.trans_a = p->trans_a; key.trans_b = p->trans_b;
    key.type_in = p->type_in; key.type_out = p->type_out;
    key.epilogue = p->epilogue;
    key.has_c = p->c != NULL;
    key.align_a = address_alignment(p->a); key.align_b = address_alignment(p->b);
    key.align_d = address_alignment(p->d); key.align_c = p->c ? address_alignment(p->c) : key.align_d;
    key.align_bias = address_alignment(p->bias); key.align_aux = address_alignment(p->aux);
    Plan *plan = plan_find(&key);
    if (!plan) {
        cublasLtMatmulAlgo_t candidates[NAMED_MAX];
        plan = plan_add();
        int n = plan_make(plan, &key, p->bias, p->aux, candidates);
        if (own_fits(p)) {
            if (p->bias) memmove(candidates + 1, candidates, sizeof *candidates * (size_t)n);
            candidates[p->bias ? 0 : n] = own_algorithm;
            plan->algo = candidates[0];
            plan->usable = true;
            n++;
        }
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

// The same product as product_by_plan, without its GELU epilogues. The transpose of a column-major (m, n) is a
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
    if (!product_by_plan(p, stream)) product_by_plain_kernel(p, stream);
}

// ---------------------------------------------------------------------------------------------------------------
// The linear layer. Where our own products have bits of their own, those with GELU, which product is whose depends on its sizes alone.

// N x OC outputs of depth C.
static bool hopper_takes(int64_t N, int64_t OC, int64_t C, std::initializer_list<Tensor> operands) {
    for (Tensor t : operands) if (!is_aligned(t.data, 16)) return false;
    return matmul_hopper_fits(operands.begin()->dtype, N, OC, C);
}

void cuda::linear_forward(Tensor out, Tensor inp, Tensor w, Tensor bias, Tensor residual, Tensor pre_gelu, Stream stream) {
    const char *const kernel = "linear_forward";
    const int64_t N = tensor_rows(inp), C = tensor_columns(inp), OC = tensor_columns(out);
    check_act(kernel, "out", out, N, OC, inp.dtype);
    check_act(kernel, "w", w, OC, C, inp.dtype);
    if (bias.data) check_act(kernel, "bias", bias, 1, OC, inp.dtype);
    if (residual.data) check_act(kernel, "residual", residual, N, OC, inp.dtype);
    if (pre_gelu.data) check_act(kernel, "pre_gelu", pre_gelu, N, OC, inp.dtype);
    CHECK(!residual.data || !pre_gelu.data, "linear_forward: both residual and pre_gelu are given");
    if (pre_gelu.data && hopper_takes(N, OC, C, {out, inp, w, bias, pre_gelu})) {
        matmul_hopper(MATMUL_GELU, out, inp, w, false, bias, pre_gelu, NULL, stream);
        return;
    }
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
        if (product_by_plan(&fused, stream)) return;
    }
    p.d = pre_gelu.data;
    product(&p, stream);
    gelu_forward(out, pre_gelu, stream);
}

void cuda::linear_gelu_forward(Tensor out, Tensor pre_gelu, Tensor inp, Tensor w, Tensor bias, Stream stream) {
    if (hopper_takes(tensor_rows(inp), tensor_columns(out), tensor_columns(inp), {out, inp, w, bias, pre_gelu})) { // which rounds before GELU
        linear_forward(out, inp, w, bias, tensor_none(), pre_gelu, stream);
        return;
    }
    linear_forward(pre_gelu, inp, w, bias, tensor_none(), tensor_none(), stream);
    gelu_forward(out, pre_gelu, stream);
}

void cuda::linear_backward_input(Tensor dinp, Tensor sum_dinp, Tensor dout, Tensor w, Tensor pre_gelu, bool accumulate, Stream stream) {
    const char *const kernel = "linear_backward_input";
    const int64_t N = tensor_rows(dout), OC = tensor_columns(dout), C = tensor_columns(dinp);
    check_act(kernel, "dinp", dinp, N, C, dout.dtype);
    check_act(kernel, "w", w, OC, C, dout.dtype);
    if (pre_gelu.data) check_act(kernel, "pre_gelu", pre_gelu, N, C, dout.dtype);
    if (sum_dinp.data) check_weight_grad(kernel, "sum_dinp", sum_dinp, 1, C, dout.dtype);
    if (pre_gelu.data && hopper_takes(N, C, OC, {dinp, dout, w, pre_gelu})) {
        const int64_t partials = matmul_hopper_partials(N);
        float *partial = sum_dinp.data ? (float *)scratch_get(partials * C * (int64_t)sizeof(float), stream) : NULL;
        matmul_hopper(MATMUL_GELU_BACKWARD, dinp, dout, w, true, tensor_none(), pre_gelu, partial, stream);
        if (partial) columns_reduce({sum_dinp}, 1, partial, (int)partials, C, accumulate, (cudaStream_t)stream);
        return;
    }
    Product p = {};
    p.d = dinp.data; p.a = w.data; p.b = dout.data;
    p.m = C; p.n = N; p.k = OC;
    p.type_in = dout.dtype; p.type_out = dinp.dtype;
    p.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    Product fused = p;
    fused.aux = pre_gelu.data;
    fused.epilogue = CUBLASLT_EPILOGUE_DGELU;
    const bool try_fused = pre_gelu.data && dout.dtype != DTYPE_FP32;
    if (!try_fused || !product_by_plan(&fused, stream)) {
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
