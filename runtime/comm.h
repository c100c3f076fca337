// comm.h - collectives between the ranks of a Group. This build has groups of one rank only, for which every collective
// is the identity; callers are written for any size, and a larger group is refused when the grid is made.
#pragma once
#include "device.h"
#include "grid.h"

// The grid of this process: one rank. The configuration has refused every other world before.
static ProcessGrid comm_init(void) {
    GridAxes size = {1, 1, 1, 1};
    return grid_make(0, size);
}

// full[r*n .. (r+1)*n) = shard of rank r, n elements each. shard may be this rank's part of full.
static void comm_all_gather(Group g, void *full, const void *shard, int64_t n, DType t, Stream s) {
    CHECK(g.size == 1, "group of %d ranks", g.size);
    if (full != shard) device_copy(full, shard, n * dtype_bytes(t), COPY_ON_DEVICE, s);
}

// shard = sum over ranks of their full[rank*n .. (rank+1)*n). shard may be this rank's part of full.
static void comm_reduce_scatter(Group g, void *shard, const void *full, int64_t n, DType t, Stream s) {
    CHECK(g.size == 1, "group of %d ranks", g.size);
    if (full != shard) device_copy(shard, full, n * dtype_bytes(t), COPY_ON_DEVICE, s);
}

// Sums n doubles over the ranks, in place, in the backend's memory.
static void comm_all_reduce_double(Group g, double *x, int64_t n, Stream s) {
    CHECK(g.size == 1, "group of %d ranks", g.size);
    (void)x, (void)n, (void)s;
}
