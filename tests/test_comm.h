// test_comm.h - tests of comm.h: every collective on every kind of group, against what the ranks must find.
//
// Each rank runs all rows; ./test_gpt comm is one rank, mpirun -n N ./test_gpt comm are N. Data is a function of (rank,
// element), so that every rank computes by itself what the others gave. Small integers make sums exact in every type and
// comparison bitwise; the rows on the order of sums use values whose sum depends on it. test_world: the program's main.
#pragma once
#include "../kernels/kernels.h"
#include "../runtime/comm.h"
#include "../runtime/watch.h"
#include "dies.h"
#if defined(DEBUG) && !KERNELS_ON_GPU
#include "../runtime/device_cpu.h"
#define COMM_STRICT 1
#else
#define COMM_STRICT 0
#endif

static const int64_t comm_sizes[] = {0, 1, 2, 7, 1021, 100003};
enum { COMM_SIZES = sizeof comm_sizes / sizeof *comm_sizes, COMM_RANKS_MAX = 64, COMM_GROUPS_MAX = 16 };

// ---------------------------------------------------------------------------------------------------------------
// Groups

typedef struct {
    const char *name;
    int n, rank[COMM_RANKS_MAX]; // members, in the world
    Group group;                 // empty where this rank is no member
} TestGroup;

typedef struct {
    int n;
    TestGroup at[COMM_GROUPS_MAX];
} TestGroups;

// The ranks first, first + step, ... of the world, at most `most` of them. All ranks call this in the same order.
static void test_group_add(TestGroups *all, const char *name, int first, int step, int most) {
    TestGroup *g = &all->at[all->n++];
    bool member = false;
    CHECK(all->n <= COMM_GROUPS_MAX && test_world.world <= COMM_RANKS_MAX, "%d groups, %d ranks", all->n, test_world.world);
    g->name = name;
    g->n = 0;
    for (int r = first; r < test_world.world && g->n < most; r += step) {
        member |= r == test_world.rank;
        g->rank[g->n++] = r;
    }
    g->group = comm_group_create(g->rank, member ? g->n : 0, true);
}

// World, lower and upper half, even and odd ranks, windows of three that overlap, every rank alone.
static void test_groups_make(TestGroups *all) {
    const int world = test_world.world, half = (world + 1) / 2;
    all->n = 0;
    test_group_add(all, "world", 0, 1, world);
    test_group_add(all, "lower half", 0, 1, half);
    test_group_add(all, "upper half", half, 1, world);
    test_group_add(all, "even", 0, 2, world);
    test_group_add(all, "odd", 1, 2, world);
    for (int first = 0; first + 1 < world && first < 4; first++) test_group_add(all, "window", first, 1, 3);
    for (int r = 0; r < world && r < 4; r++) test_group_add(all, "alone", r, 1, 1);
}

static void test_groups_free(TestGroups *all) {
    for (int i = 0; i < all->n; i++) comm_group_free(&all->at[i].group);
}

// ---------------------------------------------------------------------------------------------------------------
// Data

// Between -5 and 5: sums over up to 50 ranks are exact even in bf16.
static float comm_integer(int rank, int64_t i, int64_t salt) { return (float)((i * 7 + rank * 13 + salt * 5) % 11 - 5); }

// Values of very different sizes, already rounded to t: adding them in another order gives other bits.
static float comm_wild(int rank, int64_t i, DType t) {
    const uint64_t random = rng_bits(1234, (uint64_t)rank, (uint64_t)i);
    const float x = ((float)(random & 0xffffff) - 0x1p23f) * (float)(1 << (random >> 24) % 12) * 0x1p-20f;
    uint32_t bits = 0;
    dtype_store(&bits, t, 0, x);
    return dtype_load(&bits, t, 0);
}

// A device buffer of `bytes`, between two guards that nobody may touch.
enum { COMM_GUARD = 64 };

typedef struct {
    char *block, *at; // on the device
    int64_t bytes;
} CommBuffer;

static CommBuffer comm_buffer(int64_t bytes, Stream s) {
    CommBuffer b = {(char *)device_malloc(bytes + 2 * COMM_GUARD), NULL, bytes};
    b.at = b.block + COMM_GUARD;
    device_memset(b.block, 0x5a, bytes + 2 * COMM_GUARD, s);
    return b;
}

static void comm_buffer_write(CommBuffer b, int64_t offset, const void *values, int64_t bytes, Stream s) {
    device_copy(b.at + offset, values, bytes, COPY_TO_DEVICE, s);
    stream_sync(s);
}

// Compares with `want` bit for bit, guards too, and frees the buffer. want null: only the guards.
static void comm_buffer_expect(Test *t, const char *what, CommBuffer b, const void *want, Stream s) {
    char *got = (char *)host_alloc((size_t)(b.bytes + 2 * COMM_GUARD)), guard[COMM_GUARD];
    memset(guard, 0x5a, sizeof guard);
    device_copy(got, b.block, b.bytes + 2 * COMM_GUARD, COPY_TO_HOST, s);
    stream_sync(s);
    expect_same_bytes(t, "the memory before a result", got, guard, COMM_GUARD);
    if (want) expect_same_bytes(t, what, got + COMM_GUARD, want, b.bytes);
    expect_same_bytes(t, "the memory behind a result", got + COMM_GUARD + b.bytes, guard, COMM_GUARD);
    free(got);
    device_free(b.block);
}

// n elements of type t on the host.
static void *comm_host_values(int64_t n, DType t) { return host_alloc((size_t)(n * dtype_bytes(t))); }

// Memory of comm_malloc, large enough to be reached by other ranks: what a direct group moves, many times over, is what was sent,
// and what is sent again at once is not mixed with what came before.
static void test_direct(Test *t) {
    TestGroups all;
    Stream s = stream_create();
    test_groups_make(&all);
    Group g = all.at[0].group; // the world
    const int64_t n = (3 << 20) / 4 + 64, whole = n * g.size; // more than one page a part
    float *full = (float *)comm_malloc(g, whole * 4), *parts = (float *)comm_malloc(g, whole * 4), *shard = (float *)comm_malloc(g, n * 4);
    float *host = (float *)host_alloc((size_t)whole * 4);
    expect_true(t, (uintptr_t)full % 256 == 0 && (uintptr_t)shard % 256 == 0, "memory at %p and %p", (void *)full, (void *)shard);
    for (int turn = 0; turn < 5; turn++) {
        for (int64_t i = 0; i < whole; i++) host[i] = comm_integer(g.rank, i, turn);
        device_copy(full, host, whole * 4, COPY_TO_DEVICE, s);
        stream_sync(s);
        comm_all_to_all(g, parts, full, n, DTYPE_FP32, s);
        device_copy(shard, parts, n * 4, COPY_ON_DEVICE, s); // the part of rank 0
        comm_all_gather(g, full, shard, n, DTYPE_FP32, s);
        device_copy(host, full, whole * 4, COPY_TO_HOST, s);
        stream_sync(s);
        int64_t wrong = 0;
        for (int64_t i = 0; i < whole; i++) wrong += host[i] != comm_integer(0, i, turn);
        expect_true(t, wrong == 0, "turn %d: %" PRId64 " of %" PRId64 " elements are not what rank 0 gave away", turn, wrong, whole);
    }
    free(host);
    comm_free(g, full);
    comm_free(g, parts);
    comm_free(g, shard);
    test_groups_free(&all);
    stream_destroy(s);
}

// ---------------------------------------------------------------------------------------------------------------
// Each collective, with exact data. In place: the shard is this rank's part of the whole.

static void try_all_gather(Test *t, const TestGroup *g, int64_t n, DType type, bool in_place, Stream s) {
    const int64_t bytes = n * dtype_bytes(type), at = g->group.rank * bytes;
    char *mine = (char *)comm_host_values(n, type), *want = (char *)comm_host_values(n * g->n, type);
    for (int r = 0; r < g->n; r++)
        for (int64_t i = 0; i < n; i++) dtype_store(want, type, r * n + i, comm_integer(g->rank[r], i, n));
    memcpy(mine, want + at, (size_t)bytes);
    CommBuffer full = comm_buffer(bytes * g->n, s), shard = comm_buffer(bytes, s);
    comm_buffer_write(in_place ? full : shard, in_place ? at : 0, mine, bytes, s);
    comm_all_gather(g->group, full.at, in_place ? full.at + at : shard.at, n, type, s);
    char what[160];
    snprintf(what, sizeof what, "all_gather of %" PRId64 " %s over %s (%d ranks)%s", n, dtype_name(type), g->name, g->n, in_place ? ", in place" : "");
    comm_buffer_expect(t, what, full, want, s);
    comm_buffer_expect(t, "the shard that was given", shard, in_place ? NULL : mine, s);
    free(mine);
    free(want);
}

static void try_reduce_scatter(Test *t, const TestGroup *g, int64_t n, DType type, bool in_place, Stream s) {
    const int64_t bytes = n * dtype_bytes(type), at = g->group.rank * bytes;
    char *mine = (char *)comm_host_values(n * g->n, type), *want = (char *)comm_host_values(n, type);
    for (int64_t i = 0; i < n * g->n; i++) dtype_store(mine, type, i, comm_integer(test_world.rank, i, n));
    for (int64_t i = 0; i < n; i++) {
        float sum = 0;
        for (int r = 0; r < g->n; r++) sum += comm_integer(g->rank[r], g->group.rank * n + i, n);
        dtype_store(want, type, i, sum);
    }
    CommBuffer full = comm_buffer(bytes * g->n, s), shard = comm_buffer(bytes, s);
    comm_buffer_write(full, 0, mine, bytes * g->n, s);
    comm_reduce_scatter(g->group, in_place ? full.at + at : shard.at, full.at, n, type, s);
    char what[160];
    snprintf(what, sizeof what, "reduce_scatter of %" PRId64 " %s over %s (%d ranks)%s", n, dtype_name(type), g->name, g->n, in_place ? ", in place" : "");
    if (in_place) memcpy(mine + at, want, (size_t)bytes); // the rest stays
    comm_buffer_expect(t, what, full, mine, s);
    comm_buffer_expect(t, what, shard, in_place ? NULL : want, s);
    free(mine);
    free(want);
}

static void try_all_to_all(Test *t, const TestGroup *g, int64_t n, DType type, Stream s) {
    const int64_t bytes = n * g->n * dtype_bytes(type);
    char *mine = (char *)comm_host_values(n * g->n, type), *want = (char *)comm_host_values(n * g->n, type);
    for (int64_t i = 0; i < n * g->n; i++) {
        dtype_store(mine, type, i, comm_integer(test_world.rank, i, n));
        dtype_store(want, type, i, comm_integer(g->rank[i / n], g->group.rank * n + i % n, n));
    }
    CommBuffer full = comm_buffer(bytes, s), parts = comm_buffer(bytes, s);
    comm_buffer_write(full, 0, mine, bytes, s);
    comm_all_to_all(g->group, parts.at, full.at, n, type, s);
    char what[160];
    snprintf(what, sizeof what, "all_to_all of %" PRId64 " %s over %s (%d ranks)", n, dtype_name(type), g->name, g->n);
    comm_buffer_expect(t, what, parts, want, s);
    comm_buffer_expect(t, "what was given", full, mine, s);
    free(mine);
    free(want);
}

static void try_all_reduce(Test *t, const TestGroup *g, int64_t n, DType type, Stream s) {
    char *mine = (char *)comm_host_values(n, type), *want = (char *)comm_host_values(n, type);
    for (int64_t i = 0; i < n; i++) {
        float sum = 0;
        for (int r = 0; r < g->n; r++) sum += comm_integer(g->rank[r], i, n);
        dtype_store(want, type, i, sum);
        dtype_store(mine, type, i, comm_integer(test_world.rank, i, n));
    }
    CommBuffer x = comm_buffer(n * dtype_bytes(type), s);
    comm_buffer_write(x, 0, mine, n * dtype_bytes(type), s);
    comm_all_reduce(g->group, x.at, n, type, s);
    char what[160];
    snprintf(what, sizeof what, "all_reduce of %" PRId64 " %s over %s (%d ranks)", n, dtype_name(type), g->name, g->n);
    comm_buffer_expect(t, what, x, want, s);
    free(mine);
    free(want);
}

static void try_all_reduce_double(Test *t, const TestGroup *g, int64_t n, CommOp op, Stream s) {
    double *mine = (double *)host_alloc((size_t)n * 8), *want = (double *)host_alloc((size_t)n * 8);
    for (int64_t i = 0; i < n; i++) {
        want[i] = (double)comm_integer(g->rank[0], i, n) * 0x1p40 + 1; // needs more than fp32 has
        for (int r = 1; r < g->n; r++) {
            const double x = (double)comm_integer(g->rank[r], i, n) * 0x1p40 + 1;
            want[i] = op == COMM_SUM ? want[i] + x : op == COMM_MAX ? fmax(want[i], x) : fmin(want[i], x);
        }
        mine[i] = (double)comm_integer(test_world.rank, i, n) * 0x1p40 + 1;
    }
    CommBuffer x = comm_buffer(n * 8, s);
    comm_buffer_write(x, 0, mine, n * 8, s);
    comm_all_reduce_double(g->group, (double *)x.at, n, op, s);
    char what[160];
    snprintf(what, sizeof what, "all_reduce_double (%s) of %" PRId64 " over %s (%d ranks)", op == COMM_SUM ? "sum" : op == COMM_MAX ? "max" : "min", n, g->name, g->n);
    comm_buffer_expect(t, what, x, want, s);
    free(mine);
    free(want);
}

static void try_broadcast(Test *t, const TestGroup *g, int64_t bytes, int root, Stream s) {
    char *want = (char *)host_alloc((size_t)bytes);
    for (int64_t i = 0; i < bytes; i++) want[i] = (char)(i * 31 + g->rank[root] * 7 + 1);
    CommBuffer x = comm_buffer(bytes, s);
    if (g->group.rank == root) comm_buffer_write(x, 0, want, bytes, s);
    comm_broadcast(g->group, x.at, bytes, root, s);
    char what[160];
    snprintf(what, sizeof what, "broadcast of %" PRId64 " bytes from %d over %s (%d ranks)", bytes, root, g->name, g->n);
    comm_buffer_expect(t, what, x, want, s);
    free(want);
}

// Runs fn for every group that this rank is a member of, in every size.
static void each_group_and_size(Test *t, void (*fn)(Test *t, const TestGroup *g, int64_t n, Stream s)) {
    TestGroups all;
    Stream s = stream_create();
    test_groups_make(&all);
    for (int i = 0; i < all.n; i++)
        for (int k = 0; k < COMM_SIZES && all.at[i].group.size > 0; k++) fn(t, &all.at[i], comm_sizes[k], s);
    test_groups_free(&all);
    stream_destroy(s);
}

static void case_all_gather(Test *t, const TestGroup *g, int64_t n, Stream s) {
    for (int type = 0; type < DTYPE_COUNT; type++)
        for (int in_place = 0; in_place < 2; in_place++) try_all_gather(t, g, n, (DType)type, in_place, s);
}
static void case_reduce_scatter(Test *t, const TestGroup *g, int64_t n, Stream s) {
    for (int type = 0; type < DTYPE_COUNT; type++)
        for (int in_place = 0; in_place < 2; in_place++) try_reduce_scatter(t, g, n, (DType)type, in_place, s);
}
static void case_all_to_all(Test *t, const TestGroup *g, int64_t n, Stream s) {
    for (int type = 0; type < DTYPE_COUNT; type++) try_all_to_all(t, g, n, (DType)type, s);
}
static void case_all_reduce(Test *t, const TestGroup *g, int64_t n, Stream s) {
    for (int type = 0; type < DTYPE_COUNT; type++) try_all_reduce(t, g, n, (DType)type, s);
}
static void case_all_reduce_double(Test *t, const TestGroup *g, int64_t n, Stream s) {
    for (int op = COMM_SUM; op <= COMM_MIN; op++) try_all_reduce_double(t, g, n, (CommOp)op, s);
}
static void case_broadcast(Test *t, const TestGroup *g, int64_t n, Stream s) {
    for (int root = 0; root < g->n; root++) try_broadcast(t, g, n, root, s);
}
static void test_all_gather(Test *t) { each_group_and_size(t, case_all_gather); }
static void test_reduce_scatter(Test *t) { each_group_and_size(t, case_reduce_scatter); }
static void test_all_to_all(Test *t) { each_group_and_size(t, case_all_to_all); }
static void test_all_reduce(Test *t) { each_group_and_size(t, case_all_reduce); }
static void test_all_reduce_double(Test *t) { each_group_and_size(t, case_all_reduce_double); }
static void test_broadcast(Test *t) { each_group_and_size(t, case_broadcast); }

static void test_groups(Test *t) {
    TestGroups all;
    test_groups_make(&all);
    for (int i = 0; i < all.n; i++) {
        const TestGroup *g = &all.at[i];
        int place = -1;
        for (int r = 0; r < g->n; r++)
            if (g->rank[r] == test_world.rank) place = r;
        expect_equal_i64(t, "the size of a group", g->group.size, place < 0 ? 0 : g->n);
        if (place >= 0) expect_equal_i64(t, "this rank's place in a group", g->group.rank, place);
    }
    test_groups_free(&all);
    for (int i = 0; i < all.n; i++) expect_equal_i64(t, "the size of a freed group", all.at[i].group.size, 0);
}

// One call may make several groups that have no rank in common. Each is a group of its own: other sums, and other numbers in
// the watch's records, by which the hub decides who waits for whom.
static void test_disjoint_groups(Test *t) {
    const int world = test_world.world, half = (world + 1) / 2;
    const bool low = test_world.rank < half;
    int rank[COMM_RANKS_MAX], n = 0;
    for (int r = low ? 0 : half; r < (low ? half : world); r++) rank[n++] = r;
    Stream s = stream_create();
    for (int round = 0; round < 3; round++) {
        uint32_t before[WATCH_CHANNELS];
        for (int c = 0; c < WATCH_CHANNELS; c++) before[c] = watch_channel_group(c);
        Group g = comm_group_create(rank, n, true);
        TestGroup mine = {"half of the world", n, {0}, g};
        memcpy(mine.rank, rank, sizeof rank);
        expect_equal_i64(t, "ranks of the half", g.size, n);
        double least[2] = {1e18, 1e18}, most[2] = {-1e18, -1e18}; // of the numbers of each half's new group
        for (int c = 0; c < WATCH_CHANNELS && n > 1; c++)
            if (watch_channel_group(c) != before[c]) least[!low] = most[!low] = watch_channel_group(c);
        comm_host_all_reduce(least, 2, COMM_MIN);
        comm_host_all_reduce(most, 2, COMM_MAX);
        for (int k = 0; k < 2; k++)
            expect_true(t, (k ? world - half : half) <= 1 || least[k] == most[k], "the members of one group give it the numbers %g to %g", least[k], most[k]);
        if (world - half > 1) expect_true(t, least[0] != least[1], "two groups have the number %g", least[0]);
        for (int k = 0; k < COMM_SIZES; k++) try_all_reduce(t, &mine, comm_sizes[k], DTYPE_FP32, s);
        comm_group_free(&g);
    }
    stream_destroy(s);
}

// ---------------------------------------------------------------------------------------------------------------
// Sums in the order of the ranks, on the CPU backend: bit for bit, for messages of every size, reduced or scattered.

static void case_rank_order(Test *t, const TestGroup *g, int64_t n, Stream s) {
    for (int d = 0; d < DTYPE_COUNT; d++) {
        const DType type = (DType)d;
        const int64_t whole = n * g->n;
        char *mine = (char *)comm_host_values(whole, type), *want = (char *)comm_host_values(whole, type);
        for (int64_t i = 0; i < whole; i++) {
            float sum = comm_wild(g->rank[0], i, type);
            for (int r = 1; r < g->n; r++) sum += comm_wild(g->rank[r], i, type);
            dtype_store(want, type, i, sum);
            dtype_store(mine, type, i, comm_wild(test_world.rank, i, type));
        }
        CommBuffer x = comm_buffer(whole * dtype_bytes(type), s), full = comm_buffer(whole * dtype_bytes(type), s), shard = comm_buffer(n * dtype_bytes(type), s);
        comm_buffer_write(x, 0, mine, whole * dtype_bytes(type), s);
        comm_buffer_write(full, 0, mine, whole * dtype_bytes(type), s);
        comm_all_reduce(g->group, x.at, whole, type, s);
        comm_reduce_scatter(g->group, shard.at, full.at, n, type, s);
        comm_buffer_expect(t, "an all_reduce of values whose order matters", x, want, s);
        comm_buffer_expect(t, "a reduce_scatter of values whose order matters", shard, want + g->group.rank * n * dtype_bytes(type), s);
        comm_buffer_expect(t, "the whole", full, NULL, s);
        free(mine);
        free(want);
    }
}

static void test_rank_order(Test *t) {
    if (device_info().is_gpu) { test_skip(t, "the order of sums is promised on the CPU only"); return; }
    each_group_and_size(t, case_rank_order);
    int differ = 0; // the values can tell: added from the last rank to the first, many sums are others
    for (int64_t i = 0; i < 1000; i++) {
        const float a = comm_wild(0, i, DTYPE_FP32), b = comm_wild(1, i, DTYPE_FP32), c = comm_wild(2, i, DTYPE_FP32);
        differ += a + b + c != c + b + a;
    }
    expect_true(t, differ > 100, "only %d of 1000 sums depend on the order", differ);
}

// A group of all ranks; each call makes another channel between them.
static Group comm_world_group(void) {
    int rank[COMM_RANKS_MAX];
    for (int r = 0; r < test_world.world; r++) rank[r] = r;
    return comm_group_create(rank, test_world.world, true);
}

// 16-bit sums are taken in fp32 and rounded once: 256 + 1 + 1 in bf16 steps would stay 256, 2048 + 1 + 1 in fp16 steps 2048.
static void test_rounded_once(Test *t) {
    Group g = comm_world_group();
    Stream s = stream_create();
    for (int d = DTYPE_BF16; d <= DTYPE_FP16; d++) {
        const float large = d == DTYPE_BF16 ? 256 : 2048;
        uint16_t x, want;
        dtype_store(&x, (DType)d, 0, test_world.rank == 0 ? large : 1.0f);
        dtype_store(&want, (DType)d, 0, large + (float)(test_world.world - 1));
        CommBuffer b = comm_buffer(2, s);
        comm_buffer_write(b, 0, &x, 2, s);
        comm_all_reduce(g, b.at, 1, (DType)d, s);
        comm_buffer_expect(t, "a 16-bit sum", b, &want, s);
    }
    stream_destroy(s);
    comm_group_free(&g);
}

// NaN and infinity of one rank reach all of them.
static void test_not_finite(Test *t) {
    Group g = comm_world_group();
    Stream s = stream_create();
    const int last = test_world.world - 1;
    float x[2] = {test_world.rank == last ? NAN : 1, test_world.rank == last ? INFINITY : 1}, got[2];
    double y[2] = {test_world.rank == last ? NAN : 1, test_world.rank == last ? INFINITY : 1}, seen[2];
    CommBuffer a = comm_buffer(sizeof x, s), b = comm_buffer(sizeof y, s);
    comm_buffer_write(a, 0, x, sizeof x, s);
    comm_buffer_write(b, 0, y, sizeof y, s);
    comm_all_reduce(g, a.at, 2, DTYPE_FP32, s);
    comm_all_reduce_double(g, (double *)b.at, 2, COMM_MAX, s);
    device_copy(got, a.at, sizeof got, COPY_TO_HOST, s);
    device_copy(seen, b.at, sizeof seen, COPY_TO_HOST, s);
    stream_sync(s);
    expect_true(t, isnan(got[0]) && isinf(got[1]), "NaN and infinity became %g and %g", (double)got[0], (double)got[1]);
    expect_true(t, isinf(seen[1]), "the largest of infinity and 1 became %g", seen[1]);
    if (!device_info().is_gpu) expect_true(t, isnan(seen[0]), "the largest of NaN and 1 became %g", seen[0]); // NCCL promises nothing here
    comm_buffer_expect(t, "", a, NULL, s);
    comm_buffer_expect(t, "", b, NULL, s);
    stream_destroy(s);
    comm_group_free(&g);
}

// ---------------------------------------------------------------------------------------------------------------
// Order

// Forty collectives on one stream before anybody waits, of sizes around and above those of one exchange.
static void test_many_in_flight(Test *t) {
    enum { MANY = 40 };
    Group g = comm_world_group();
    Stream s = stream_create();
    CommBuffer x[MANY];
    for (int k = 0; k < MANY; k++) {
        const int64_t n = 1 + k * 3001;
        float *mine = (float *)comm_host_values(n, DTYPE_FP32);
        for (int64_t i = 0; i < n; i++) mine[i] = comm_integer(test_world.rank, i, k);
        x[k] = comm_buffer(n * 4, s);
        comm_buffer_write(x[k], 0, mine, n * 4, s);
        free(mine);
    }
    for (int k = 0; k < MANY; k++) {
        if (k % 4 == 3) comm_broadcast(g, x[k].at, x[k].bytes, k % test_world.world, s);
        else comm_all_reduce(g, x[k].at, x[k].bytes / 4, DTYPE_FP32, s);
    }
    for (int k = MANY - 1; k >= 0; k--) {
        const int64_t n = x[k].bytes / 4;
        float *want = (float *)comm_host_values(n, DTYPE_FP32);
        for (int64_t i = 0; i < n; i++) {
            if (k % 4 == 3) want[i] = comm_integer(k % test_world.world, i, k);
            else for (int r = 0; r < test_world.world; r++) want[i] += comm_integer(r, i, k);
        }
        comm_buffer_expect(t, "one of many", x[k], want, s);
        free(want);
    }
    stream_destroy(s);
    comm_group_free(&g);
}

// Work on one stream sees the results of the work before it, without any wait: sum, gather of the sum's shards, sum again.
static void test_chain(Test *t) {
    const int64_t sizes[] = {3, 50021};
    Group g = comm_world_group();
    Stream s = stream_create();
    for (int k = 0; k < 2; k++) {
        const int64_t n = sizes[k], whole = n * g.size;
        float *mine = (float *)comm_host_values(whole, DTYPE_FP32), *want = (float *)comm_host_values(whole, DTYPE_FP32);
        for (int64_t i = 0; i < whole; i++) {
            mine[i] = comm_integer(test_world.rank, i, 0);
            for (int r = 0; r < g.size; r++) want[i] += comm_integer(r, i, 0);
            want[i] *= (float)g.size;
        }
        CommBuffer x = comm_buffer(whole * 4, s), y = comm_buffer(whole * 4, s);
        comm_buffer_write(x, 0, mine, whole * 4, s);
        comm_reduce_scatter(g, x.at + g.rank * n * 4, x.at, n, DTYPE_FP32, s);
        comm_all_gather(g, x.at, x.at + g.rank * n * 4, n, DTYPE_FP32, s);
        comm_all_reduce(g, x.at, whole, DTYPE_FP32, s);
        convert(tensor1(y.at, DTYPE_FP32, whole), tensor1(x.at, DTYPE_FP32, whole), s); // a kernel is work like any other
        comm_broadcast(g, x.at, whole * 4, 0, s);
        comm_buffer_expect(t, "a sum of gathered sums", x, want, s);
        comm_buffer_expect(t, "a kernel's copy of it", y, want, s);
        free(mine);
        free(want);
    }
    stream_destroy(s);
    comm_group_free(&g);
}

// An event covers what was enqueued before it was recorded; a second stream that waits for it sees that.
static void test_event(Test *t) {
    const int64_t n = 30011;
    Group g = comm_world_group(), h = comm_world_group();
    Stream a = stream_create(), b = stream_create();
    Event e = event_create(), f = event_create();
    float *mine = (float *)comm_host_values(n, DTYPE_FP32), *want = (float *)comm_host_values(n, DTYPE_FP32), *got = (float *)comm_host_values(n, DTYPE_FP32);
    for (int64_t i = 0; i < n; i++) {
        mine[i] = comm_integer(test_world.rank, i, 1);
        for (int r = 0; r < g.size; r++) want[i] += comm_integer(r, i, 1);
    }
    CommBuffer x = comm_buffer(n * 4, a), y = comm_buffer(n * 4, a);
    comm_buffer_write(x, 0, mine, n * 4, a);
    comm_buffer_write(y, 0, mine, n * 4, a);
    stream_wait_event(b, e); // never recorded: nothing to wait for
    event_record(e, a);
    comm_all_reduce(g, x.at, n, DTYPE_FP32, a);
    event_record(f, a);
    comm_all_reduce(g, y.at, n, DTYPE_FP32, a);
    stream_wait_event(b, f);
    device_copy(got, x.at, n * 4, COPY_TO_HOST, b);
    stream_sync(b);
    expect_same_bytes(t, "what a stream sees after an event", got, want, n * 4);
    expect_true(t, event_elapsed_ms(e, f) >= 0, "%g ms between two events", event_elapsed_ms(e, f));
    event_record(e, a); // an event may be recorded again, and outlive its stream
    stream_sync(a);
    comm_buffer_expect(t, "the first sum", x, want, b);
    comm_buffer_expect(t, "the second sum", y, want, b);
    stream_destroy(a);
    event_sync(e);
    event_destroy(e);
    event_destroy(f);
    stream_destroy(b);
    comm_group_free(&g);
    comm_group_free(&h);
    free(mine);
    free(want);
    free(got);
}

// Overlapping groups, each on a stream of its own; even ranks start and await them upwards, odd ranks downwards, with a
// blocking exchange between hosts in the middle.
static void test_opposite_orders(Test *t) {
    if (device_info().is_gpu) { test_skip(t, "NCCL wants one order of its groups on all ranks"); return; }
    const int64_t sizes[] = {5, 120011};
    for (int round = 0; round < 4; round++) {
        const int64_t n = sizes[round / 2];
        TestGroups all;
        CommBuffer x[COMM_GROUPS_MAX];
        Stream s[COMM_GROUPS_MAX];
        test_groups_make(&all);
        float *values = (float *)comm_host_values(n, DTYPE_FP32);
        for (int64_t i = 0; i < n; i++) values[i] = comm_integer(test_world.rank, i, round);
        for (int k = 0; k < all.n; k++) {
            s[k] = stream_create();
            x[k] = comm_buffer(n * 4, s[k]);
            comm_buffer_write(x[k], 0, values, n * 4, s[k]);
        }
        for (int k = 0; k < all.n; k++) {
            const int j = test_world.rank % 2 ? all.n - 1 - k : k;
            if (all.at[j].group.size > 0) comm_all_reduce(all.at[j].group, x[j].at, n, DTYPE_FP32, s[j]);
        }
        double ranks = 1;
        if (test_world.rank % 2) stream_sync(s[0]); // the others are still to come to their waits, by way of the hosts' exchange
        comm_host_all_reduce(&ranks, 1, COMM_SUM);
        expect_equal_i64(t, "the number of ranks", (int64_t)ranks, test_world.world);
        for (int k = 0; k < all.n; k++) {
            const int j = (test_world.rank + round) % 2 ? all.n - 1 - k : k;
            for (int64_t i = 0; i < n; i++) {
                values[i] = all.at[j].group.size > 0 ? 0 : comm_integer(test_world.rank, i, round);
                for (int r = 0; r < all.at[j].n && all.at[j].group.size > 0; r++) values[i] += comm_integer(all.at[j].rank[r], i, round);
            }
            comm_buffer_expect(t, all.at[j].name, x[j], values, s[j]);
        }
        for (int k = 0; k < all.n; k++) stream_destroy(s[k]);
        test_groups_free(&all);
        free(values);
    }
}

// Ranks that wait at different places: some between two sums on one channel, some only behind both.
static void test_uneven_waits(Test *t) {
    const int64_t sizes[] = {5, 120011};
    Group g = comm_world_group();
    Stream s = stream_create();
    for (int round = 0; round < 8; round++) {
        const int64_t n = sizes[round % 2];
        CommBuffer x[3];
        float *values = (float *)comm_host_values(n, DTYPE_FP32);
        for (int k = 0; k < 3; k++) {
            for (int64_t i = 0; i < n; i++) values[i] = comm_integer(test_world.rank, i, k);
            x[k] = comm_buffer(n * 4, s);
            comm_buffer_write(x[k], 0, values, n * 4, s);
        }
        for (int k = 0; k < 3; k++) {
            comm_all_reduce(g, x[k].at, n, DTYPE_FP32, s);
            if ((test_world.rank + round / 2) % 3 == k) stream_sync(s);
        }
        for (int k = 0; k < 3; k++) {
            memset(values, 0, (size_t)n * 4);
            for (int r = 0; r < g.size; r++)
                for (int64_t i = 0; i < n; i++) values[i] += comm_integer(r, i, k);
            comm_buffer_expect(t, "a sum", x[k], values, s);
        }
        free(values);
    }
    stream_destroy(s);
    comm_group_free(&g);
}

static void test_batch(Test *t) {
    enum { MANY = 5 };
    Group g = comm_world_group();
    Stream s = stream_create();
    CommBuffer x[MANY];
    for (int k = 0; k < MANY; k++) {
        float mine = comm_integer(test_world.rank, 0, k);
        x[k] = comm_buffer(4, s);
        comm_buffer_write(x[k], 0, &mine, 4, s);
    }
    comm_batch_begin();
    for (int k = 0; k < MANY; k++) comm_all_reduce(g, x[k].at, 1, DTYPE_FP32, s);
    comm_batch_end();
    for (int k = 0; k < MANY; k++) {
        float want = 0;
        for (int r = 0; r < test_world.world; r++) want += comm_integer(r, 0, k);
        comm_buffer_expect(t, "one of a batch", x[k], &want, s);
    }
    stream_destroy(s);
    comm_group_free(&g);
}

// ---------------------------------------------------------------------------------------------------------------
// Messages

static void fill_message(char *x, int64_t bytes, int from, int to, int64_t salt) {
    for (int64_t i = 0; i < bytes; i++) x[i] = (char)(i * 29 + from * 7 + to * 3 + salt * 11 + 1);
}

// Each rank of each group to each other one, in sizes of every kind, zero bytes among them.
static void case_messages(Test *t, const TestGroup *g, int64_t bytes, Stream s) {
    char *want = (char *)host_alloc((size_t)bytes);
    for (int from = 0; from < g->n; from++)
        for (int to = 0; to < g->n; to++) {
            if (from == to || (g->group.rank != from && g->group.rank != to)) continue;
            char what[160];
            CommBuffer x = comm_buffer(bytes, s);
            fill_message(want, bytes, g->rank[from], g->rank[to], bytes);
            if (g->group.rank == from) {
                comm_buffer_write(x, 0, want, bytes, s);
                comm_send(g->group, x.at, bytes, to, s);
            } else comm_receive(g->group, x.at, bytes, from, s);
            snprintf(what, sizeof what, "a message of %" PRId64 " bytes from %d to %d of %s (%d ranks)", bytes, from, to, g->name, g->n);
            comm_buffer_expect(t, what, x, want, s);
        }
    if (g->n == 1) expect_equal_i64(t, "ranks", g->group.size, 1);
    free(want);
}
static void test_message_pairs(Test *t) { each_group_and_size(t, case_messages); }

// As a pipeline does it: numbers go from rank to rank, each adds its own; the next are on their way before the first have arrived, in both
// directions at once. A link is a group of two ranks for one direction; each rank has a stream for each of its links.
enum { RELAY_ROUNDS = 12 };

typedef struct {
    Group out, in;      // empty where there is no neighbour
    Stream send, receive, work;
    float *x[RELAY_ROUNDS];
} Relay;

// Numbers go from the rank `first` to the rank at the other end, upwards or downwards.
static Relay relay_make(int step) {
    Relay r;
    memset(&r, 0, sizeof r);
    for (int low = 0; low + 1 < test_world.world; low++) {
        int pair[2] = {low, low + 1}, me = test_world.rank, from = step > 0 ? low : low + 1;
        bool member = me == low || me == low + 1;
        Group g = comm_group_create(pair, member ? 2 : 0, false);
        if (member) *(me == from ? &r.out : &r.in) = g;
    }
    r.send = stream_create();
    r.receive = stream_create();
    r.work = stream_create();
    for (int k = 0; k < RELAY_ROUNDS; k++) r.x[k] = (float *)device_malloc((1 + k * 5000) * 4);
    return r;
}

static void relay_round(Relay *r, int k, int step) {
    const int64_t n = 1 + k * 5000;
    Event e = event_create();
    Tensor x = tensor1(r->x[k], DTYPE_FP32, n);
    if (r->in.size) comm_receive(r->in, x.data, n * 4, 1 - r->in.rank, r->receive);
    event_record(e, r->receive);
    stream_wait_event(r->work, e);
    if (!r->in.size) fill(x, (float)k, r->work);
    float *host = (float *)host_alloc((size_t)n * 4); // adds this rank's number; no kernel here adds a constant
    device_copy(host, x.data, n * 4, COPY_TO_HOST, r->work);
    stream_sync(r->work);
    for (int64_t i = 0; i < n; i++) host[i] += (float)(test_world.rank + 1) * (float)step;
    device_copy(x.data, host, n * 4, COPY_TO_DEVICE, r->work);
    stream_sync(r->work);
    event_record(e, r->work);
    stream_wait_event(r->send, e);
    if (r->out.size) comm_send(r->out, x.data, n * 4, 1 - r->out.rank, r->send);
    event_destroy(e);
    free(host);
}

static void relay_end(Test *t, Relay *r, int step) {
    int world = test_world.world, sum = 0;
    for (int q = step > 0 ? 0 : world - 1; q != test_world.rank + step; q += step) sum += (q + 1) * step;
    stream_sync(r->send);
    for (int k = 0; k < RELAY_ROUNDS; k++) {
        const int64_t n = 1 + k * 5000;
        float *got = (float *)host_alloc((size_t)n * 4);
        device_copy(got, r->x[k], n * 4, COPY_TO_HOST, r->work);
        stream_sync(r->work);
        for (int64_t i = 0; i < n; i++) expect_true(t, got[i] == (float)(k + sum), "round %d, element %" PRId64 " is %g, expected %d", k, i, (double)got[i], k + sum);
        free(got);
        device_free(r->x[k]);
    }
    stream_destroy(r->send);
    stream_destroy(r->receive);
    stream_destroy(r->work);
    comm_group_free(&r->out);
    comm_group_free(&r->in);
}

static void test_relay(Test *t) {
    Relay up = relay_make(1), down = relay_make(-1);
    for (int k = 0; k < RELAY_ROUNDS; k++) {
        relay_round(&up, k, 1);
        relay_round(&down, k, -1);
    }
    relay_end(t, &up, 1);
    relay_end(t, &down, -1);
}

// ---------------------------------------------------------------------------------------------------------------
// What the CPU backend does in DEBUG to those who forget to wait (runtime/device_cpu.h)

#if COMM_STRICT
// Results are delivered as late as the rules allow: memory reads as NaN until then.
static void test_forgotten_wait(Test *t) {
    if (test_world.world == 1) { test_skip(t, "one rank waits for nobody"); return; }
    const int64_t sizes[] = {1, 1021, 100003};
    Group g = comm_world_group();
    Stream s = stream_create();
    for (int k = 0; k < 3; k++)
        for (int kind = 0; kind < 4; kind++) {
            const int64_t n = sizes[k], whole = n * g.size, mine = g.rank * n;
            float *ones = (float *)comm_host_values(whole, DTYPE_FP32);
            CommBuffer full = comm_buffer(whole * 4, s), shard = comm_buffer(n * 4, s);
            for (int64_t i = 0; i < whole; i++) ones[i] = 1;
            comm_buffer_write(full, 0, ones, whole * 4, s);
            comm_buffer_write(shard, 0, ones, n * 4, s);
            if (kind == 0) comm_all_gather(g, full.at, shard.at, n, DTYPE_FP32, s);
            else if (kind == 1) comm_reduce_scatter(g, full.at + mine * 4, full.at, n, DTYPE_FP32, s);
            else if (kind == 2) comm_all_reduce(g, full.at, whole, DTYPE_FP32, s);
            else comm_broadcast(g, full.at, whole * 4, 0, s);
            const float *seen = (const float *)device_cpu_address(full.at);
            const bool given = kind == 3 && g.rank == 0; // a broadcast changes nothing where it starts
            for (int64_t i = 0; i < whole; i++)
                expect_true(t, given || (kind == 1 && (i < mine || i >= mine + n)) ? seen[i] == 1 : isnan(seen[i]),
                            "kind %d, element %" PRId64 " of %" PRId64 " reads %g before the wait", kind, i, n, (double)seen[i]);
            stream_sync(s);
            const float want = kind == 1 || kind == 2 ? (float)g.size : 1;
            for (int64_t i = kind == 1 ? mine : 0; i < (kind == 1 ? mine + n : whole); i++)
                expect_true(t, seen[i] == want, "kind %d, element %" PRId64 " reads %g after the wait, expected %g", kind, i, (double)seen[i], (double)want);
            comm_buffer_expect(t, "", full, NULL, s);
            comm_buffer_expect(t, "", shard, NULL, s);
            free(ones);
        }
    stream_destroy(s);
    comm_group_free(&g);
}

// What is received reads as NaN until it is waited for. A send lasts until its receive begins, however small it is.
static void test_forgotten_message(Test *t) {
    if (test_world.world == 1) { test_skip(t, "one rank has nobody to write to"); return; }
    Group g = comm_world_group();
    Stream s = stream_create();
    const bool sends = g.rank == 0, receives = g.rank == g.size - 1;
    float one = 1;
    CommBuffer x = comm_buffer(4, s);
    const float *seen = (const float *)device_cpu_address(x.at);
    comm_buffer_write(x, 0, &one, 4, s);
    const double start = clock_seconds();
    double together = 0;
    comm_host_all_reduce(&together, 1, COMM_SUM);
    if (sends) {
        comm_send(g, x.at, 4, g.size - 1, s);
        expect_true(t, *seen == 1, "what is sent reads %g", (double)*seen);
        stream_sync(s);
        expect_true(t, clock_seconds() - start > 0.2, "a send that nobody received ended after %g s", clock_seconds() - start);
    }
    if (receives) {
        usleep(300000);
        comm_receive(g, x.at, 4, 0, s);
        expect_true(t, isnan(*seen), "what is received reads %g before the wait", (double)*seen);
        stream_sync(s);
        expect_true(t, *seen == 1, "what was received reads %g", (double)*seen);
    }
    comm_buffer_expect(t, "the message", x, &one, s);
    stream_destroy(s);
    comm_group_free(&g);
}

enum { STRICT_ELEMENTS = 1000 };

typedef struct {
    Stream a, b, c;
    Event e;
    Tensor w, x, y, z; // x is written on stream a by an all_gather from y, which is in flight: a child may not wait for it
    float *host;    // (STRICT_ELEMENTS)
} Strict;

static void strict_copy_reads(void *p) { Strict *s = (Strict *)p; device_copy(s->host, s->x.data, 4, COPY_TO_HOST, s->b); }
static void strict_kernel_reads(void *p) { Strict *s = (Strict *)p; convert(s->z, s->x, s->b); }
static void strict_kernel_writes(void *p) { Strict *s = (Strict *)p; fill(s->x, 1, s->b); }
static void strict_source_written(void *p) { Strict *s = (Strict *)p; fill(s->y, 1, s->b); }
static void strict_early_event(void *p) { Strict *s = (Strict *)p; stream_wait_event(s->b, s->e); convert(s->z, s->x, s->b); }
static void strict_late_argument(void *p) { // a collective must not start before the kernels that make its argument
    Strict *s = (Strict *)p;
    fill(s->z, 1, s->b);
    Group one = {1, 0, -1, false};
    comm_all_gather(one, s->w.data, s->z.data, 1, DTYPE_FP32, s->c);
}
static void strict_host_reads(void *p) { *((Strict *)p)->host = *(const float *)((Strict *)p)->z.data; }
static void strict_host_memory(void *p) { Strict *s = (Strict *)p; device_copy(s->host, s->host + 1, 4, COPY_ON_DEVICE, s->b); }
static void strict_host_writes_early(void *p) {
    Strict *s = (Strict *)p;
    device_copy(s->z.data, s->host, 4, COPY_TO_DEVICE, s->b);
    s->host[0] += 1;
    stream_sync(s->b);
}

static void test_missing_waits(Test *t) {
    Group g = comm_world_group();
    Strict s = {stream_create(), stream_create(), stream_create(), event_create(), tensor_none(), tensor_none(), tensor_none(), tensor_none(),
                (float *)host_alloc(STRICT_ELEMENTS * 4)};
    const int64_t n = STRICT_ELEMENTS;
    s.w = tensor1(device_malloc(n * 4), DTYPE_FP32, n);
    s.x = tensor1(device_malloc(n * g.size * 4), DTYPE_FP32, n);
    s.y = tensor1(device_malloc(n * 4), DTYPE_FP32, n);
    s.z = tensor1(device_malloc(n * 4), DTYPE_FP32, n);
    fill(s.y, 2, s.a);
    event_record(s.e, s.a);
    comm_all_gather(g, s.x.data, s.y.data, n, DTYPE_FP32, s.a);
    expect_dies(t, EXIT_INTERNAL, "missing wait: device_copy reads memory", strict_copy_reads, &s);
    expect_dies(t, EXIT_INTERNAL, "missing wait: convert reads memory", strict_kernel_reads, &s);
    expect_dies(t, EXIT_INTERNAL, "missing wait: fill writes memory", strict_kernel_writes, &s);
    expect_dies(t, EXIT_INTERNAL, "missing wait: fill writes memory", strict_source_written, &s);
    expect_dies(t, EXIT_INTERNAL, "missing wait: convert reads memory", strict_early_event, &s);
    expect_dies(t, EXIT_INTERNAL, "that fill writes on another stream", strict_late_argument, &s);
    expect_dies(t, EXIT_INTERNAL, "copy kind 2", strict_host_memory, &s);
    expect_dies(t, EXIT_INTERNAL, "host memory were written before the copy", strict_host_writes_early, &s);
    char text[DIES_TEXT_BYTES];
    const int code = run_in_child(strict_host_reads, &s, text);
    expect_true(t, code > 0 && code != 123, "the host read device memory and went on (%d)", code);

    // With the waits it is right: an event, an event handed on through a third stream, the host.
    event_record(s.e, s.a);
    stream_wait_event(s.c, s.e);
    event_record(s.e, s.c);
    stream_wait_event(s.b, s.e);
    convert(s.z, s.x, s.b);
    device_copy(s.host, s.z.data, n * 4, COPY_TO_HOST, s.b);
    expect_true(t, isnan(s.host[0]), "the host sees %g before it waits", (double)s.host[0]);
    event_record(s.e, s.b);
    event_sync(s.e);
    for (int64_t i = 0; i < n; i++) expect_true(t, s.host[i] == 2, "element %" PRId64 " is %g", i, (double)s.host[i]);
    stream_sync(s.b);
    fill(s.x, 3, s.c);
    stream_destroy(s.c);
    stream_destroy(s.a);
    stream_destroy(s.b);
    event_destroy(s.e);
    device_free(s.w.data);
    device_free(s.x.data);
    device_free(s.y.data);
    device_free(s.z.data);
    free(s.host);
    comm_group_free(&g);
}
#else
static void test_forgotten_message(Test *t) { test_skip(t, "only the CPU backend with DEBUG=1 hides results"); }
static void test_forgotten_wait(Test *t) { test_skip(t, "only the CPU backend with DEBUG=1 hides results"); }
static void test_missing_waits(Test *t) { test_skip(t, "only the CPU backend with DEBUG=1 looks for missing waits"); }
#endif

// ---------------------------------------------------------------------------------------------------------------
// Between hosts

static void test_host(Test *t) {
    const int world = test_world.world, rank = test_world.rank;
    for (int root = 0; root < world; root++)
        for (int k = 0; k < COMM_SIZES; k++) {
            const int64_t n = comm_sizes[k];
            char *x = (char *)host_alloc((size_t)n), *want = (char *)host_alloc((size_t)n);
            for (int64_t i = 0; i < n; i++) {
                want[i] = (char)(i * 3 + root + 1);
                x[i] = rank == root ? want[i] : 0;
            }
            comm_host_broadcast(x, n, root);
            expect_same_bytes(t, "a broadcast between hosts", x, want, n);
            free(x);
            free(want);
        }
    double sum[3] = {(double)rank, 1, 0x1p60 * (rank == 0)}, most[2] = {(double)rank, (double)-rank}, least[2] = {(double)rank, (double)-rank};
    comm_host_all_reduce(sum, 3, COMM_SUM);
    comm_host_all_reduce(most, 2, COMM_MAX);
    comm_host_all_reduce(least, 2, COMM_MIN);
    expect_true(t, sum[0] == world * (world - 1) / 2 && sum[1] == world && sum[2] == 0x1p60, "sums %g %g %g", sum[0], sum[1], sum[2]);
    expect_true(t, most[0] == world - 1 && most[1] == 0 && least[0] == 0 && least[1] == 1 - world, "largest %g %g, smallest %g %g", most[0], most[1], least[0], least[1]);
    expect_true(t, rank >= 0 && rank < world && test_world.local_rank >= 0 && test_world.local_rank < test_world.local_world && test_world.local_world <= world,
                "rank %d of %d, on this host %d of %d", rank, world, test_world.local_rank, test_world.local_world);
}

// ---------------------------------------------------------------------------------------------------------------
// A rank that does not come. tests/test_cli.sh and tests/test_nccl.sh run this and look at the end.

static void test_hang(Test *t) {
    Group g = comm_world_group();
    Stream s = stream_create();
    CommBuffer x = comm_buffer(4, s);
    comm_set_timeout(1.5);
    if (test_world.rank == test_world.world - 1) sleep(20);
    else {
        double one = 1;
        comm_all_reduce(g, x.at, 1, DTYPE_FP32, s);
        if (!device_info().is_gpu) stream_sync(s); // a GPU's streams are the watch's affair
        comm_host_all_reduce(&one, 1, COMM_SUM);
    }
    expect_true(t, false, "nobody noticed that a rank did not come");
}

// The last rank wants seven elements, the others five: whoever gets more than it waits for ends the job. tests/test_cli.sh runs this.
typedef void SizedCollective(Group g, float *to, float *from, int64_t n, Stream s);

static void sized_broadcast(Group g, float *to, float *, int64_t n, Stream s) { comm_broadcast(g, to, 4 * n, g.size - 1, s); }
static void sized_all_gather(Group g, float *to, float *from, int64_t n, Stream s) { comm_all_gather(g, to, from, n, DTYPE_FP32, s); }
static void sized_reduce_scatter(Group g, float *to, float *from, int64_t n, Stream s) { comm_reduce_scatter(g, to, from, n, DTYPE_FP32, s); }
static void sized_all_reduce(Group g, float *to, float *, int64_t n, Stream s) { comm_all_reduce(g, to, n, DTYPE_FP32, s); }
static void sized_message(Group g, float *to, float *, int64_t n, Stream s) {
    if (g.rank == g.size - 1) comm_send(g, to, 4 * n, 0, s);
    if (g.rank == 0) comm_receive(g, to, 4 * n, g.size - 1, s);
}

static void sizes_differ(Test *t, SizedCollective *collective) {
    Group g = comm_world_group();
    Stream s = stream_create();
    CommBuffer to = comm_buffer(1 << 10, s), from = comm_buffer(1 << 10, s);
    double one = 1;
    comm_set_timeout(5);
    collective(g, (float *)to.at, (float *)from.at, g.rank == g.size - 1 ? 7 : 5, s);
    stream_sync(s);
    comm_host_all_reduce(&one, 1, COMM_SUM);
    expect_true(t, false, "nobody noticed that the sizes differ");
}
static void test_sizes_broadcast(Test *t) { sizes_differ(t, sized_broadcast); }
static void test_sizes_all_gather(Test *t) { sizes_differ(t, sized_all_gather); }
static void test_sizes_reduce_scatter(Test *t) { sizes_differ(t, sized_reduce_scatter); }
static void test_sizes_all_reduce(Test *t) { sizes_differ(t, sized_all_reduce); }
static void test_sizes_message(Test *t) { sizes_differ(t, sized_message); }

static const TestRow hang_tests[] = {
    {"a rank that does not come", test_hang}, {"sizes of broadcast", test_sizes_broadcast}, {"sizes of all_gather", test_sizes_all_gather}, {"sizes of reduce_scatter", test_sizes_reduce_scatter},
    {"sizes of all_reduce", test_sizes_all_reduce}, {"sizes of message", test_sizes_message}, {NULL, NULL},
};

static const TestRow comm_tests[] = {
    {"groups", test_groups},
    {"disjoint_groups", test_disjoint_groups},
    {"all_gather", test_all_gather},
    {"reduce_scatter", test_reduce_scatter},
    {"all_to_all", test_all_to_all},
    {"direct", test_direct},
    {"all_reduce", test_all_reduce},
    {"all_reduce_double", test_all_reduce_double},
    {"broadcast", test_broadcast},
    {"rank_order", test_rank_order},
    {"rounded_once", test_rounded_once},
    {"not_finite", test_not_finite},
    {"many_in_flight", test_many_in_flight},
    {"chain", test_chain},
    {"event", test_event},
    {"opposite_orders", test_opposite_orders},
    {"uneven_waits", test_uneven_waits},
    {"batch", test_batch},
    {"messages", test_message_pairs},
    {"relay", test_relay},
    {"forgotten_wait", test_forgotten_wait},
    {"forgotten_message", test_forgotten_message},
    {"missing_waits", test_missing_waits},
    {"host", test_host},
    {NULL, NULL},
};
