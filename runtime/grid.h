// grid.h - which rank is where: pure arithmetic on the axes pipeline (pp), data (dp), sequence (sp) and tensor (tp).
//
// tp runs fastest, then sp, dp, and pp slowest, so that neighbours in tensor parallelism are neighbours on a host.
// A planner can ask for any rank of any world; nothing here talks to anybody.
#pragma once
#include "utils.h"

typedef struct {
    int pp, dp, sp, tp; // as sizes: all >= 1; as coordinates: 0 <= x < size
} GridAxes;

// The ranks that share something. A handle for comm.h; size 1 means that every collective is the identity.
typedef struct {
    int size, rank; // rank is this process's place in the group
    int channel;    // which communicator of comm.h's implementation carries it
    bool direct;    // its ranks reach each other's memory, see comm_malloc
} Group;

typedef struct {
    int world, rank;
    int first_rank; // of the job: 0, unless a grid is smaller than the job (tests run one-rank trainers beside others)
    GridAxes size, coord;
    int zero_size, zero_rank; // dp x sp: the ranks that hold the same weights and share optimizer states, gradients, parameters
} ProcessGrid;

// The rank at these coordinates.
static inline int grid_rank(GridAxes c, GridAxes size) { return ((c.pp * size.dp + c.dp) * size.sp + c.sp) * size.tp + c.tp; }

static inline GridAxes grid_coords(int rank, GridAxes size) {
    GridAxes c;
    c.tp = rank % size.tp;
    c.sp = rank / size.tp % size.sp;
    c.dp = rank / (size.tp * size.sp) % size.dp;
    c.pp = rank / (size.tp * size.sp * size.dp);
    return c;
}

static inline ProcessGrid grid_make(int rank, GridAxes size) {
    ProcessGrid g;
    g.world = size.pp * size.dp * size.sp * size.tp;
    g.rank = rank;
    g.first_rank = 0;
    g.size = size;
    g.coord = grid_coords(rank, size);
    g.zero_size = size.dp * size.sp;
    g.zero_rank = g.coord.dp * size.sp + g.coord.sp;
    return g;
}
