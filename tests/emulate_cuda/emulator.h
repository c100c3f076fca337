// emulator.h - what the memory-bound kernels of kernels/cuda use of CUDA, for a host compiler: each kernel runs on the CPU, thread
// by thread, under AddressSanitizer and UndefinedBehaviorSanitizer.
//
// A thread of a block is a fiber, which runs until it waits (at a barrier, or for the other lanes of its warp in a shuffle) or ends.
// Threads and blocks run in an order that each launch picks anew; asynchronous copies happen at once or when they are waited for,
// likewise. Two runs of a kernel that lacks a barrier therefore tend to give different bits, and shared memory holds garbage where a
// thread reads what another has not yet written.
//
// What is found: addresses outside an allocation or not aligned for the vector that is moved, launches that a GPU refuses,
// lanes missing from a shuffle, barriers that not all reach, reads of what nobody wrote, races that an order shows. What is not: two
// threads at truly the same time, the order in which one thread's stores become visible to another, time, and anything of
// the tensor cores.
#pragma once
#include "../../kernels/kernels.h"
#include <float.h>
#include <math.h>

// ---------------------------------------------------------------------------------------------------------------
// The language

#define __device__
#define __global__
#define __grid_constant__
#define __align__(n) alignas(n)

struct uint3 { unsigned x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
extern uint3 threadIdx, blockIdx, blockDim, gridDim;

struct __nv_bfloat16 { uint16_t bits; };
struct __half { uint16_t bits; };
static inline float __bfloat162float(__nv_bfloat16 x) { return bf16_to_float(x.bits); }
static inline float __half2float(__half x) { return fp16_to_float(x.bits); }
static inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {float_to_bf16(x)}; }
static inline __half __float2half_rn(float x) { return {float_to_fp16(x)}; }

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline uint32_t __float_as_uint(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float __uint_as_float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
static inline unsigned long long atomicAdd(unsigned long long *p, unsigned long long x) { const unsigned long long old = *p; *p += x; return old; }

// ---------------------------------------------------------------------------------------------------------------
// Threads that wait for each other

// Barrier `id` of the block, for `threads` threads; 0: for all that have not ended.
void barrier_wait(int id, int threads);
static inline void __syncthreads(void) { barrier_wait(0, 0); }

// Every lane gives 8 bytes; returns those of all. `line`: where, which must be the same for all lanes.
const uint64_t *warp_exchange(unsigned mask, uint64_t mine, int line);
template <typename T> static inline T warp_shuffle_xor(unsigned mask, T x, int offset, int line) {
    static_assert(sizeof(T) <= 8, "what a lane gives");
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    bits = warp_exchange(mask, bits, line)[(threadIdx.x % 32) ^ (unsigned)offset];
    memcpy(&x, &bits, sizeof x);
    return x;
}
#define __shfl_xor_sync(mask, x, offset) warp_shuffle_xor(mask, x, offset, __LINE__)
unsigned warp_ballot(unsigned mask, bool vote, int line);
#define __ballot_sync(mask, vote) warp_ballot(mask, vote, __LINE__)
static inline void __syncwarp(void) { warp_exchange(~0u, 0, 0); }

// ---------------------------------------------------------------------------------------------------------------
// Shared memory. That of a kernel is static, since one block runs at a time.

void *shared_dynamic(void);
extern uint64_t blocks_begun;
#define SHARED_GARBAGE(name)                                                                                           \
    do {                                                                                                               \
        static uint64_t seen;                                                                                          \
        if (seen != blocks_begun) memset(name, 0xff, sizeof name);                                                     \
        seen = blocks_begun;                                                                                           \
    } while (0)
void launch_bound_check(int most);
#define LAUNCH_BOUND(most) launch_bound_check(most)

static inline size_t __cvta_generic_to_shared(const void *p) { return (size_t)((const char *)p - (const char *)shared_dynamic()); }
void ptx_cp_async(uint32_t to, const void *from, int bytes);
void ptx_cp_async_commit(void);
void ptx_cp_async_wait(int groups); // that may still be on their way
static inline void ptx_cp_async_wait_all(void) { ptx_cp_async_commit(); ptx_cp_async_wait(0); }
static inline void ptx_bar_sync(int id, int threads) { barrier_wait(id, threads); }
static inline float ptx_ex2(float x) { const float y = exp2f(x); return y < FLT_MIN ? 0.0f : y; }
static inline float ptx_rcp(float x) { const float y = 1.0f / x; return fabsf(y) < FLT_MIN ? 0.0f : y; }

// ---------------------------------------------------------------------------------------------------------------
// Launches

void launch_run(const void *kernel, unsigned blocks, unsigned threads, size_t shared, void (*thread)(const void *), const void *args);

template <typename F> struct PendingLaunch { F run; };
struct Launch {
    unsigned blocks, threads;
    size_t shared;
    Launch(unsigned blocks_, unsigned threads_, size_t shared_, void *) : blocks(blocks_), threads(threads_), shared(shared_) {}
    template <typename... A> auto operator()(A... args) const {
        const Launch l = *this;
        auto run = [=](auto kernel) {
            auto thread = [=] { kernel(args...); };
            launch_run((const void *)kernel, l.blocks, l.threads, l.shared, [](const void *t) { (*(const decltype(thread) *)t)(); }, &thread);
        };
        return PendingLaunch<decltype(run)>{run};
    }
};
template <typename F, typename... P> static inline void operator^(void (*kernel)(P...), PendingLaunch<F> launch) { launch.run(kernel); }

// ---------------------------------------------------------------------------------------------------------------
// The runtime's functions

typedef enum { cudaSuccess, cudaErrorInvalidValue, cudaErrorInvalidConfiguration = 9 } cudaError_t;
typedef enum { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin } cudaDeviceAttr;
typedef enum { cudaFuncAttributeMaxDynamicSharedMemorySize } cudaFuncAttribute;
typedef void *cudaStream_t;

cudaError_t cudaGetLastError(void);
static inline const char *cudaGetErrorString(cudaError_t error) { return error == cudaErrorInvalidConfiguration ? "invalid configuration argument" : "invalid argument"; }
static inline cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMemsetAsync(void *p, int byte, size_t bytes, cudaStream_t s);
cudaError_t shared_allow(const void *kernel, int bytes);
template <typename K> static inline cudaError_t cudaFuncSetAttribute(K kernel, cudaFuncAttribute, int bytes) { return shared_allow((const void *)kernel, bytes); }
template <typename K> static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, K, int, size_t) { *blocks = 2; return cudaSuccess; }
