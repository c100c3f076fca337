// emulator.cpp - fibers, launches and what else emulator.h declares; and the kernels that are not emulated.
#include "emulator.h"
#include <ucontext.h>

uint3 threadIdx, blockIdx, blockDim, gridDim;
uint64_t blocks_begun;

// An H200's, but for the number of multiprocessors: with few, blocks have several pieces of work each.
enum { MULTIPROCESSORS = 3, SHARED_BYTES_OPTIN = 227 * 1024, SHARED_BYTES = 48 * 1024, THREADS_MAX = 1024, BARRIERS = 16, STACK_BYTES = 64 * 1024 };

// ---------------------------------------------------------------------------------------------------------------
// Threads

typedef struct {
    uint32_t to;
    const void *from;
    int bytes, group;
} Copy;
enum { COPIES_MAX = 4096 };

typedef struct {
    void *at[5];             // where it left off
    char *stack;             // null: not yet begun, or ended
    bool ended;
    const uint32_t *waits;   // until this number has changed; null: for nothing
    uint32_t waits_from;
    Copy *copy;              // on their way, oldest first
    int copies, group;       // copies; the group that is being filled
} Thread;

typedef struct {
    uint32_t turn;
    int arrived;
} Barrier;

typedef struct {
    uint32_t turn;
    unsigned arrived, ended; // lanes
    int line;
    uint64_t given[2][32];   // of this turn and the one before, which a lane may not have read yet
} Warp;

static Thread thread[THREADS_MAX];
static Barrier barrier[BARRIERS];
static Warp warp[THREADS_MAX / 32];
static void *scheduler[5];
static int running, alive;
static char *free_stack[THREADS_MAX];
static int free_stacks;
static void (*thread_call)(const void *);
static const void *thread_args;
static char *dynamic_shared;
static bool copies_late; // of this launch: copies happen when they are waited for
static uint64_t launches;

// Leaves the thread, until thread_run comes back to it. This file is compiled without the sanitizers, which must not see such
// jumps; and the compiler wants a jump in another function than its target.
static __attribute__((noipa)) void jump(void **to) { __builtin_longjmp(to, 1); }
static __attribute__((noipa)) void thread_leave(Thread *t) {
    if (__builtin_setjmp(t->at) == 0) jump(scheduler);
}

static void thread_wait(const uint32_t *turn) {
    Thread *t = &thread[running];
    t->waits = turn;
    t->waits_from = *turn;
    thread_leave(t);
}

static void barrier_settle(Barrier *b, int threads) {
    if (b->arrived == 0 || b->arrived < threads) return;
    b->arrived = 0;
    b->turn++;
}

void barrier_wait(int id, int threads) {
    CHECK(id >= 0 && id < BARRIERS && threads % 32 == 0 && threads <= (int)blockDim.x, "barrier %d of %d threads", id, threads);
    Barrier *b = &barrier[id];
    const uint32_t turn = b->turn;
    b->arrived++;
    barrier_settle(b, threads ? threads : alive);
    if (b->turn == turn) thread_wait(&b->turn);
}

const uint64_t *warp_exchange(unsigned mask, uint64_t mine, int line) {
    Warp *w = &warp[running / 32];
    const uint32_t turn = w->turn;
    CHECK(mask == ~0u, "lanes %08x: the emulator knows whole warps only", mask);
    CHECK(w->ended == 0, "line %d: lanes %08x have ended, and thread %d waits for them", line, w->ended, running);
    CHECK(w->arrived == 0 || w->line == line, "lanes of a warp meet at lines %d and %d", w->line, line);
    w->line = line;
    w->given[turn % 2][running % 32] = mine;
    w->arrived |= 1u << running % 32;
    if (w->arrived == ~0u) {
        w->arrived = 0;
        w->turn++;
    } else thread_wait(&w->turn);
    return w->given[turn % 2];
}

unsigned warp_ballot(unsigned mask, bool vote, int line) {
    const uint64_t *votes = warp_exchange(mask, vote, line);
    unsigned all = 0;
    for (int i = 0; i < 32; i++) all |= (unsigned)votes[i] << i;
    return all;
}

static void thread_end(Thread *t) {
    ptx_cp_async_wait_all();
    t->ended = true;
    alive--;
    Warp *w = &warp[running / 32];
    w->ended |= 1u << running % 32;
    CHECK(w->arrived == 0, "thread %d ends while lanes %08x of its warp wait for it at line %d", running, w->arrived, w->line);
    barrier_settle(&barrier[0], alive);
}

// The first function on a thread's stack.
static void thread_begin(void) {
    thread_call(thread_args);
    thread_end(&thread[running]);
    thread_leave(&thread[running]);
}

static void thread_start(Thread *t) {
    ucontext_t context, here;
    t->stack = free_stacks ? free_stack[--free_stacks] : (char *)host_alloc(STACK_BYTES);
    getcontext(&context);
    context.uc_stack.ss_sp = t->stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = NULL;
    makecontext(&context, thread_begin, 0);
    swapcontext(&here, &context);
}

// Runs a thread until it waits or ends.
static __attribute__((noipa)) void thread_run(int i) {
    Thread *t = &thread[i];
    running = i;
    threadIdx = {(unsigned)i, 0, 0};
    t->waits = NULL;
    if (__builtin_setjmp(scheduler) == 0) {
        if (t->stack) jump(t->at);
        thread_start(t);
    }
    t = &thread[running];
    if (t->ended) {
        free_stack[free_stacks++] = t->stack;
        t->stack = NULL;
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Copies to shared memory

static void copy_do(const Copy *c) {
    char *to = dynamic_shared + (int32_t)c->to;
    CHECK(((uintptr_t)to | (uintptr_t)c->from) % 16 == 0, "cp.async from %p to %p: not aligned", c->from, (void *)to);
    memset(to, 0, 16);
    memcpy(to, c->from, (size_t)c->bytes);
}

void ptx_cp_async(uint32_t to, const void *from, int bytes) {
    Thread *t = &thread[running];
    if (!t->copy) t->copy = (Copy *)host_alloc(sizeof(Copy) * COPIES_MAX);
    CHECK(t->copies < COPIES_MAX, "%d copies on their way", t->copies);
    t->copy[t->copies] = {to, from, bytes, t->group};
    if (copies_late) t->copies++;
    else copy_do(&t->copy[t->copies]);
}

void ptx_cp_async_commit(void) { thread[running].group++; }

void ptx_cp_async_wait(int groups) {
    Thread *t = &thread[running];
    int done = 0;
    while (done < t->copies && t->copy[done].group < t->group - groups) copy_do(&t->copy[done++]);
    t->copies -= done;
    if (done && t->copies) memmove(t->copy, t->copy + done, sizeof(Copy) * (size_t)t->copies);
}

// ---------------------------------------------------------------------------------------------------------------
// Launches

static cudaError_t last_error;
static struct { const void *kernel; int bytes; } allowed[256];
static int n_allowed;

cudaError_t cudaGetLastError(void) {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t shared_allow(const void *kernel, int bytes) {
    int i = 0;
    while (i < n_allowed && allowed[i].kernel != kernel) i++;
    CHECK(i < 256, "%d kernels", i);
    allowed[i] = {kernel, bytes};
    if (i == n_allowed) n_allowed++;
    return bytes <= SHARED_BYTES_OPTIN ? cudaSuccess : cudaErrorInvalidValue;
}

static size_t shared_most(const void *kernel) {
    for (int i = 0; i < n_allowed; i++) if (allowed[i].kernel == kernel) return (size_t)max(allowed[i].bytes, SHARED_BYTES);
    return SHARED_BYTES;
}

void *shared_dynamic(void) { return dynamic_shared; }
void launch_bound_check(int most) { CHECK((int)blockDim.x <= most, "%u threads of a kernel bound to %d", blockDim.x, most); }

// The i-th of n in the order of this launch.
static unsigned in_order(unsigned i, unsigned n, uint64_t order) {
    return order % 4 == 0 ? i : order % 4 == 1 ? n - 1 - i : (unsigned)((i * (order % 4 == 2 ? 1 : n - 1) + order % n) % n);
}

static void block_run(size_t shared, uint64_t order) {
    const int threads = (int)blockDim.x;
    blocks_begun++;
    memset(barrier, 0, sizeof barrier);
    memset(warp, 0, sizeof warp);
    memset(dynamic_shared, 0xff, shared);
    alive = threads;
    for (int i = 0; i < threads; i++) {
        thread[i].ended = false;
        thread[i].waits = NULL;
        thread[i].copies = thread[i].group = 0;
    }
    for (int i = threads; i % 32; i++) warp[i / 32].ended |= 1u << i % 32;
    while (alive > 0) {
        bool progress = false;
        for (unsigned k = 0; k < (unsigned)threads; k++) {
            const int i = (int)in_order(k, (unsigned)threads, order);
            Thread *t = &thread[i];
            if (t->ended || (t->waits && *t->waits == t->waits_from)) continue;
            thread_run(i);
            progress = true;
        }
        CHECK(progress, "block %u: %d threads wait for what never comes", blockIdx.x, alive);
    }
    for (int i = 0; i < BARRIERS; i++) CHECK(barrier[i].arrived == 0, "block %u ends with threads at barrier %d", blockIdx.x, i);
}

void launch_run(const void *kernel, unsigned blocks, unsigned threads, size_t shared, void (*call)(const void *), const void *args) {
    if (blocks == 0 || blocks > INT32_MAX || threads == 0 || threads > THREADS_MAX || shared > shared_most(kernel)) {
        last_error = shared > shared_most(kernel) ? cudaErrorInvalidValue : cudaErrorInvalidConfiguration;
        return;
    }
    const uint64_t order = rng_bits(4711, 0, launches++);
    copies_late = order >> 20 & 1;
    thread_call = call;
    thread_args = args;
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    if (posix_memalign((void **)&dynamic_shared, 128, shared ? shared : 1)) die(EXIT_INTERNAL, "no memory");
    for (unsigned b = 0; b < blocks; b++) {
        blockIdx = {in_order(b, blocks, order >> 8), 0, 0};
        block_run(shared, order >> 32);
    }
    free(dynamic_shared);
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrMultiProcessorCount ? MULTIPROCESSORS : SHARED_BYTES_OPTIN;
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *p, int byte, size_t bytes, cudaStream_t s) {
    device_memset(p, byte, (int64_t)bytes, s);
    return cudaSuccess;
}

// The linker puts this in the way of device_malloc, which rounds up: what lies behind the bytes asked for may not be touched.
extern "C" void __asan_poison_memory_region(void const volatile *p, size_t bytes);
void *device_malloc_rounded(int64_t bytes) __asm__("__real__Z13device_mallocl");
void *device_malloc_exact(int64_t bytes) __asm__("__wrap__Z13device_mallocl");
void *device_malloc_exact(int64_t bytes) {
    void *p = device_malloc_rounded(bytes);
    __asan_poison_memory_region((char *)p + bytes, (size_t)(round_up(bytes, 256) - bytes));
    return p;
}

// ---------------------------------------------------------------------------------------------------------------
// In place of scratch.cu and sort.cu: a piece of exactly the size asked for, and a sort that leaves garbage where the toolkit's may.

void *scratch_get(int64_t bytes, Stream stream) {
    static void *piece;
    (void)stream;
    device_free(piece); // a launcher that asks twice uses the first no more
    piece = device_malloc(bytes);
    device_memset(piece, 0xff, bytes, stream);
    return piece;
}

cudaError_t sort_pairs(void *temporary, size_t *temporary_bytes, const int32_t *keys, int32_t *keys_sorted, const int32_t *values, int32_t *values_sorted, int n,
                       int key_bits, cudaStream_t stream);
cudaError_t sort_pairs(void *temporary, size_t *temporary_bytes, const int32_t *keys, int32_t *keys_sorted, const int32_t *values, int32_t *values_sorted, int n,
                       int key_bits, cudaStream_t stream) {
    const size_t bytes = (size_t)n * 8 + 256;
    if (!temporary) { *temporary_bytes = bytes; return cudaSuccess; }
    CHECK(*temporary_bytes >= bytes, "a sort with %zu bytes of %zu", *temporary_bytes, bytes);
    cudaMemsetAsync(temporary, 0xff, bytes, stream);
    const int32_t mask = (int32_t)((1ll << key_bits) - 1);
    int32_t *order = (int32_t *)host_alloc((size_t)(n + 1) * 8), *other = order + n;
    for (int i = 0; i < n; i++) order[i] = i;
    for (int bit = 0; bit < key_bits; bit++) { // by one bit at a time, stable
        int to = 0;
        for (int digit = 0; digit < 2; digit++)
            for (int i = 0; i < n; i++) if (((keys[order[i]] & mask) >> bit & 1) == digit) other[to++] = order[i];
        int32_t *swap = order;
        order = other, other = swap;
    }
    for (int i = 0; i < n; i++) {
        keys_sorted[i] = keys[order[i]];
        values_sorted[i] = values[order[i]];
    }
    free(order < other ? order : other);
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------
// Not emulated: products and attention, which are the tensor cores'. The CPU's own stand in for them, so that whole models run.

void cuda::matmul_search(bool on, const char *cache_path) { cpu::matmul_search(on, cache_path); }
void cuda::linear_gelu_forward(Tensor out, Tensor pre_gelu, Tensor inp, Tensor w, Tensor bias, Stream stream) {
    cpu::linear_forward(pre_gelu, inp, w, bias, tensor_none(), tensor_none(), stream);
    cuda::gelu_forward(out, pre_gelu, stream);
}
void cuda::linear_forward(Tensor out, Tensor inp, Tensor w, Tensor bias, Tensor residual, Tensor pre_gelu, Stream stream) {
    cpu::linear_forward(out, inp, w, bias, residual, pre_gelu, stream);
}
void cuda::linear_backward_input(Tensor dinp, Tensor sum_dinp, Tensor dout, Tensor w, Tensor pre_gelu, bool accumulate, Stream stream) {
    cpu::linear_backward_input(dinp, sum_dinp, dout, w, pre_gelu, accumulate, stream);
}
void cuda::linear_backward_weight(Tensor dw, Tensor dbias, Tensor dout, Tensor inp, bool accumulate, Stream stream) {
    cpu::linear_backward_weight(dw, dbias, dout, inp, accumulate, stream);
}
void cuda::attention_forward(Tensor out, Tensor lse, Tensor qkv, int NH, int64_t window, Stream stream) { cpu::attention_forward(out, lse, qkv, NH, window, stream); }
void cuda::attention_backward(Tensor dqkv, Tensor dout, Tensor qkv, Tensor out, Tensor lse, int NH, int64_t window, bool deterministic, Stream stream) {
    cpu::attention_backward(dqkv, dout, qkv, out, lse, NH, window, deterministic, stream);
}
int64_t cuda::scratch_bytes(int64_t rows, int64_t C, int64_t F, int64_t B, int64_t T, int64_t NH, int64_t HS) { return cpu::scratch_bytes(rows, C, F, B, T, NH, HS); }
void cuda::scratch_reserve(int64_t, Stream) {}
void cuda::scratch_release(Stream) {}
