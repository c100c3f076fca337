// hopper.cuh - what the kernels for compute capability 9.0 are built from: barriers in shared memory, the copy engine for
// tiles (TMA) and the asynchronous matrix product of a warpgroup (wgmma). PTX ISA, "mbarrier", "cp.async.bulk.tensor",
// "wgmma.mma_async"; CUDA driver API, "Tensor Map Object Management".
//
// Roles. A warpgroup is four warps, 128 threads. One warpgroup of a block is the producer: one of its threads tells the
// copy engine which tiles to fetch. The others are consumers: they multiply. A ring of stages in shared memory lies
// between them, each with two barriers: `full` (the copy has arrived) and `empty` (everybody has read it).
//
// A tile in shared memory has rows of 64 16-bit elements, 128 bytes; wider ones are several of these side by side, one
// after another in memory ("panels"). Within a panel, 16-byte piece c (0..7) of row r lies at
//
//     r * 128 + ((c ^ (r % 8)) * 16)                  a panel starts at a multiple of 1024 bytes
//
//            bytes   0   16   32   48   64   80   96  112         the 128-byte swizzle: rows and columns of pieces can
//     row 0          0    1    2    3    4    5    6    7         both be read without two of them lying in the same
//     row 1          1    0    3    2    5    4    7    6         banks. The copy engine writes this order, wgmma reads
//     row 2          2    3    0    1    6    7    4    5         it, and both see plain rows and columns.
//     ...
//     row 7          7    6    5    4    3    2    1    0
//
// Everything below is compiled for sm_90a only; kernels enclose their bodies in #ifdef HOPPER_CODE. The host asks
// hopper_available() before it launches them.
#pragma once
#include "common.cuh"
#include <cuda.h>
#include <cudaTypedefs.h>
#include <type_traits>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER_CODE
#endif

enum { WARPGROUP = 128, PANEL_COLUMNS = 64, PANEL_ROW_BYTES = 128 };

// ---------------------------------------------------------------------------------------------------------------
// Host side

// Whether this build has code for compute capability 9.0 (the Makefile says so) and the current device runs it.
static inline bool hopper_available(void) {
#ifdef BUILD_SM_90A
    static int major = 0;
    if (major == 0) {
        int device;
        cudaCheck(cudaGetDevice(&device));
        cudaCheck(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    }
    return major == 9;
#else
    return false;
#endif
}

// Describes a 4-dimensional tensor of 16-bit elements to the copy engine, and the box that one copy moves, in the layout
// drawn above: box[0] is 64. Sizes and boxes are in elements, fastest dimension first; strides, of dimensions 1 to 3, as
// well, and the fastest has stride 1. Addresses and strides must be multiples of 16 bytes. What a box has outside the tensor
// is read as 0 and not written; a box that is read may start at a negative place, one that is written may not. The map goes
// to the kernel by value, as a const __grid_constant__ parameter.
static inline CUtensorMap tensor_map_make(Tensor t, int64_t offset, const int64_t (&size)[4], const int64_t (&stride)[3], const int (&box)[4]) {
    static PFN_cuTensorMapEncodeTiled_v12000 encode = NULL;
    if (encode == NULL) { // from the driver, which nothing else here links against
        cudaDriverEntryPointQueryResult found;
        cudaCheck(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000, cudaEnableDefault, &found));
        CHECK(found == cudaDriverEntryPointSuccess, "the driver lacks cuTensorMapEncodeTiled");
    }
    CHECK(box[0] == PANEL_COLUMNS && (t.dtype == DTYPE_BF16 || t.dtype == DTYPE_FP16), "tensor_map_make: box of %d, dtype %d", box[0], (int)t.dtype);
    cuuint64_t sizes[4], strides[3];
    cuuint32_t boxes[4], steps[4] = {1, 1, 1, 1};
    for (int i = 0; i < 4; i++) sizes[i] = (cuuint64_t)size[i], boxes[i] = (cuuint32_t)box[i];
    for (int i = 0; i < 3; i++) strides[i] = (cuuint64_t)stride[i] * 2;
    CUtensorMap map;
    const CUresult result = encode(&map, t.dtype == DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                                   (char *)t.data + offset * 2, sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: error %d", (int)result);
    return map;
}

// ---------------------------------------------------------------------------------------------------------------
// Barriers in shared memory. A barrier counts arrivals and bytes; when both are complete, its phase ends and the next one
// begins. Phases are numbered 0, 1, 2, ...; a waiter names the parity of the phase whose end it waits for. The phase
// "before the first" counts as ended: waiting for parity 1 on a fresh barrier returns at once.

__device__ static inline uint32_t shared_word(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// By one thread, before anybody uses it; then barrier_init_done() by that thread and __syncthreads() by all.
__device__ static inline void barrier_init(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_word(barrier)), "r"(arrivals) : "memory");
}
__device__ static inline void barrier_init_done(void) { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ static inline void barrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_word(barrier)) : "memory");
}
// One arrival, and `bytes` more that copies will bring in this phase.
__device__ static inline void barrier_arrive_expect(uint64_t *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_word(barrier)), "r"(bytes) : "memory");
}
__device__ static inline bool barrier_try(uint64_t *barrier, uint32_t parity) {
    uint32_t ended;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(ended) : "r"(shared_word(barrier)), "r"(parity) : "memory");
    return ended != 0;
}
__device__ static inline void barrier_wait(uint64_t *barrier, uint32_t parity) {
    while (!barrier_try(barrier, parity)) {}
}

// Where a ring of stages stands: which one is next, and the parity of its `full` barrier's phase. The consumer waits for
// full[stage] with `parity`; the producer waits for empty[stage] with parity ^ 1, the phase before, which for the first
// round is the one that counts as ended.
struct Ring {
    int stage;
    uint32_t parity;
};
template <int STAGES> __device__ static inline void ring_next(Ring &r) {
    if (++r.stage == STAGES) {
        r.stage = 0;
        r.parity ^= 1;
    }
}

// Barriers among `threads` threads of a block, numbers 1 to 15 (0 is __syncthreads): sync waits, arrive does not.
__device__ static inline void named_sync(int number, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory"); }
__device__ static inline void named_arrive(int number, int threads) { asm volatile("bar.arrive %0, %1;" :: "r"(number), "r"(threads) : "memory"); }

// Gives registers back to the block, or takes them: every warp of the warpgroup, with the same REGISTERS, a multiple of 8.
template <int REGISTERS> __device__ static inline void registers_decrease(void) { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS)); }
template <int REGISTERS> __device__ static inline void registers_increase(void) { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS)); }

// ---------------------------------------------------------------------------------------------------------------
// Copies by the copy engine, each started by one thread

__device__ static inline void tensor_map_prefetch(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"((uint64_t)map) : "memory");
}

// Box at (c0, c1, c2, c3) of the tensor to shared memory; its bytes count at the barrier.
__device__ static inline void tile_fetch(void *dst, const CUtensorMap *map, int c0, int c1, int c2, int c3, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 :: "r"(shared_word(dst)), "l"((uint64_t)map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_word(barrier)) : "memory");
}

// `bytes` of global memory to shared memory, a multiple of 16, both addresses aligned to 16; they count at the barrier.
__device__ static inline void bytes_fetch(void *dst, const void *src, int bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_word(dst)), "l"((uint64_t)__cvta_generic_to_global(src)), "r"(bytes), "r"(shared_word(barrier)) : "memory");
}

// Shared memory to the box at (c0, c1, c2, c3). Threads that wrote the tile call shared_written() before the barrier that
// tells the storing thread.
__device__ static inline void tile_store(const CUtensorMap *map, const void *src, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
                 :: "l"((uint64_t)map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_word(src)) : "memory");
}

// dst[i] += src[i] for `bytes` of floats in global memory, a multiple of 16, both addresses aligned to 16. In which order
// several such sums reach an element is not defined.
__device__ static inline void floats_add(float *dst, const float *src, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :: "l"((uint64_t)__cvta_generic_to_global(dst)), "r"(shared_word(src)), "r"(bytes) : "memory");
}

// Stores and sums of this thread: closes a group; waits until at most PENDING groups have not been read from shared memory,
// or have not been written.
__device__ static inline void store_commit(void) { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING> __device__ static inline void store_wait_read(void) { asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PENDING) : "memory"); }
template <int PENDING> __device__ static inline void store_wait(void) { asm volatile("cp.async.bulk.wait_group %0;" :: "n"(PENDING) : "memory"); }

// Makes what this thread wrote to shared memory visible to the copy engine and to wgmma.
__device__ static inline void shared_written(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Address of 16-byte piece `piece` (0..7) of a row of a panel.
__device__ static inline char *panel_piece(void *panel, int row, int piece) {
    return (char *)panel + row * PANEL_ROW_BYTES + ((piece ^ (row & 7)) << 4);
}

// Stores four 8 x 8 blocks, the reverse of ldmatrix: lane l gives the address of row l % 8 of block l / 8.
__device__ static inline void stmatrix_x4(void *p, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(shared_word(p)), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}
__device__ static inline void stmatrix_x4_trans(void *p, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(shared_word(p)), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

// ---------------------------------------------------------------------------------------------------------------
// Products. A warpgroup computes D (64 x N, fp32, in registers) (+)= A (64 x 16) B (16 x N), N = 32, 64, 80, 96, 128.
//
// Warp w has rows 16 w .. + 15 of D; with g = lane / 4, t = lane % 4 and n = 0 .. N/8 - 1, as mma.sync m16n8k16 (attention.cuh):
//
//     d[4 n + 0, 1] = (16 w + g, 8 n + 2 t + 0, 1)      d[4 n + 2, 3] = (16 w + g + 8, 8 n + 2 t + 0, 1)
//
// B comes from shared memory, A too or from registers (a[0..3] as in mma.sync: two neighbouring n of a D, rounded).
// An operand in shared memory is given by a descriptor, and is read in one of two ways:
//
//   K-major: k runs along the rows of the panels, as in S = Q K^T, where both are (sequence, head size) and k is the head
//            size. wgmma_rows(panel) covers columns 0..15; each step of 16 columns adds 32 bytes, and the next panel follows
//            after four. Rows of the operand (M or N) are rows of the panel.
//   MN-major: k runs down the rows, as V in O = P V, where V is (sequence, head size) and k is the sequence.
//            wgmma_columns(panel, bytes of a panel) covers rows 0..15; each step of 16 rows adds 2048 bytes. Columns of the operand
//            (M or N) are columns of the panels.

// bits 0-13 address, 16-29 "leading" and 32-45 "stride" offset, each in units of 16 bytes; 62-63 = 1, the 128-byte swizzle.
__device__ static inline uint64_t wgmma_descriptor(const void *p, int leading, int stride) {
    return (uint64_t)((shared_word(p) & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 | 1ull << 62;
}
// The swizzle repeats every 8 rows of 128 bytes: that is the stride. K-major ignores the leading offset.
__device__ static inline uint64_t wgmma_rows(const void *panel) { return wgmma_descriptor(panel, 16, 8 * PANEL_ROW_BYTES); }
// The next 64 columns are in the next panel: the leading offset. The next 8 rows are a stride away.
__device__ static inline uint64_t wgmma_columns(const void *panel, int panel_bytes) { return wgmma_descriptor(panel, panel_bytes, 8 * PANEL_ROW_BYTES); }
// The same operand, `bytes` further on.
__device__ static inline uint64_t wgmma_advance(uint64_t descriptor, int bytes) { return descriptor + (uint64_t)(bytes >> 4); }

// Between a change of registers by anything else and the wgmma that reads them.
__device__ static inline void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of products; waits until at most PENDING groups are unfinished.
__device__ static inline void wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ static inline void wgmma_wait(void) { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory"); }

// The compiler does not know that a product is still under way: these keep it from moving work on the registers across this
// point. Needed after the wait, before results are used, and before the fence, after operands were computed.
template <int N> __device__ static inline void wgmma_hold(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}
template <int K> __device__ static inline void wgmma_hold(uint32_t (&a)[K][4]) {
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a[k][i]) :: "memory");
}

// wgmma<T, A_MN, B_MN>(d, a, b, add): d = a b, plus d if `add`. N follows from d. MN says which operands are MN-major.
#define WGMMA_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_D_32 WGMMA_D8(0), WGMMA_D8(8)
#define WGMMA_D_64 WGMMA_D_32, WGMMA_D8(16), WGMMA_D8(24)
#define WGMMA_D_80 WGMMA_D_64, WGMMA_D8(32)
#define WGMMA_D_96 WGMMA_D_80, WGMMA_D8(40)
#define WGMMA_D_128 WGMMA_D_96, WGMMA_D8(48), WGMMA_D8(56)
#define WGMMA_NAMES_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_NAMES_64 WGMMA_NAMES_32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_NAMES_80 WGMMA_NAMES_64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_NAMES_96 WGMMA_NAMES_80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_NAMES_128 WGMMA_NAMES_96 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// i0 to i6: the numbers of the operands that follow d's.
#define WGMMA_SHARED(N, TYPE, i0, i1, i2, i3, i4)                                                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_NAMES_##N                  \
                 "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";\n}"                                              \
                 : WGMMA_D_##N : "l"(a), "l"(b), "r"((int)add), "n"((int)A_MN), "n"((int)B_MN))
#define WGMMA_REGISTERS(N, TYPE, i0, i1, i2, i3, i4, i5, i6)                                                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_NAMES_##N                  \
                 "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 ";\n}"                        \
                 : WGMMA_D_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"((int)B_MN))
#define WGMMA_DEFINE(N, i0, i1, i2, i3, i4, i5, i6)                                                                    \
    template <typename T, bool A_MN, bool B_MN>                                                                        \
    __device__ static inline void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {                         \
        if constexpr (std::is_same<T, __half>::value) WGMMA_SHARED(N, "f16", i0, i1, i2, i3, i4);                      \
        else WGMMA_SHARED(N, "bf16", i0, i1, i2, i3, i4);                                                              \
    }                                                                                                                  \
    template <typename T, bool B_MN>                                                                                   \
    __device__ static inline void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add) {             \
        if constexpr (std::is_same<T, __half>::value) WGMMA_REGISTERS(N, "f16", i0, i1, i2, i3, i4, i5, i6);           \
        else WGMMA_REGISTERS(N, "bf16", i0, i1, i2, i3, i4, i5, i6);                                                   \
    }
WGMMA_DEFINE(32, 16, 17, 18, 19, 20, 21, 22)
WGMMA_DEFINE(64, 32, 33, 34, 35, 36, 37, 38)
WGMMA_DEFINE(80, 40, 41, 42, 43, 44, 45, 46)
WGMMA_DEFINE(96, 48, 49, 50, 51, 52, 53, 54)
WGMMA_DEFINE(128, 64, 65, 66, 67, 68, 69, 70)

// wgmma_begin<T, A_MN, B_MN>(d, a, b): d = a b, N = 64 or 128. As wgmma without `add`, but for the compiler d begins here: nothing
// has to hold it before.
#define WGMMA_BEGIN_D8(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), "=f"(d[i + 6]), "=f"(d[i + 7])
#define WGMMA_BEGIN_64 WGMMA_BEGIN_D8(0), WGMMA_BEGIN_D8(8), WGMMA_BEGIN_D8(16), WGMMA_BEGIN_D8(24)
#define WGMMA_BEGIN_128 WGMMA_BEGIN_64, WGMMA_BEGIN_D8(32), WGMMA_BEGIN_D8(40), WGMMA_BEGIN_D8(48), WGMMA_BEGIN_D8(56)
#define WGMMA_BEGIN(N, TYPE, i0, i1, i2, i3)                                                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_NAMES_##N                  \
                 "}, %" #i0 ", %" #i1 ", 0, 1, 1, %" #i2 ", %" #i3 ";"                                                 \
                 : WGMMA_BEGIN_##N : "l"(a), "l"(b), "n"((int)A_MN), "n"((int)B_MN))
#define WGMMA_BEGIN_DEFINE(N, i0, i1, i2, i3)                                                                          \
    template <typename T, bool A_MN, bool B_MN> __device__ static inline void wgmma_begin(float (&d)[N / 2], uint64_t a, uint64_t b) { \
        if constexpr (std::is_same<T, __half>::value) WGMMA_BEGIN(N, "f16", i0, i1, i2, i3);                           \
        else WGMMA_BEGIN(N, "bf16", i0, i1, i2, i3);                                                                   \
    }
WGMMA_BEGIN_DEFINE(64, 32, 33, 34, 35)
WGMMA_BEGIN_DEFINE(128, 64, 65, 66, 67)
