// groups.h - the groups of a grid: who shares what with whom.
//
// One rank's place in the grid (grid.h) makes it a member of
//
//     gather, reduce  the ranks that hold the same weights: dp x sp, as two channels (zero.cu)
//     tp, tp_grads    those that share each matrix, for activations on the way and for gradients beside them (tensor_parallel.cu)
//     sp              those that share each sequence
//     twin            the two stages of the pipeline that hold a tied table, if there are two
//     job             all
//
// and what has no neighbours along an axis is a group of one, in which every collective is the identity.
#pragma once
#include "comm.h"

typedef struct {
    ProcessGrid grid;
    Group gather, reduce, tp, tp_grads, sp, twin, job;
} GridGroups;

// The ranks whose coordinates are this one's but along the axes that are marked (1). Without any along them: a group of one.
static inline Group group_along(const ProcessGrid *g, GridAxes along, bool always, bool direct) {
    GridAxes c = g->coord, n = {along.pp ? g->size.pp : 1, along.dp ? g->size.dp : 1, along.sp ? g->size.sp : 1, along.tp ? g->size.tp : 1};
    int size = n.pp * n.dp * n.sp * n.tp;
    Group alone = {1, 0, 0, false};
    if (size == 1 && !always) return alone;
    int *rank = (int *)host_alloc(sizeof(int) * (size_t)size);
    for (int i = 0; i < size; i++) {
        GridAxes k = grid_coords(i, n);
        if (along.pp) c.pp = k.pp;
        if (along.dp) c.dp = k.dp;
        if (along.sp) c.sp = k.sp;
        if (along.tp) c.tp = k.tp;
        rank[i] = g->first_rank + grid_rank(c, g->size);
    }
    Group made = comm_group_create(rank, size, direct);
    free(rank);
    return made;
}

// The ranks of two stages at this one's other coordinates; an empty group for ranks of other stages.
static inline Group group_of_stages(const ProcessGrid *g, int first, int second) {
    GridAxes a = g->coord, b = g->coord;
    a.pp = first;
    b.pp = second;
    int rank[2] = {g->first_rank + grid_rank(a, g->size), g->first_rank + grid_rank(b, g->size)};
    return comm_group_create(rank, g->coord.pp == first || g->coord.pp == second ? 2 : 0, false);
}

// All ranks of the job come here. twins: the stages that hold a tied table; the same one twice if there is no such pair. direct: of gather
// and reduce, see comm_group_create.
static inline GridGroups groups_create(ProcessGrid grid, int twin_first, int twin_second, bool direct) {
    const GridAxes zero = {0, 1, 1, 0}, tp = {0, 0, 0, 1}, sp = {0, 0, 1, 0}, all = {1, 1, 1, 1};
    GridGroups g;
    memset(&g, 0, sizeof g);
    g.grid = grid;
    g.gather = group_along(&grid, zero, true, direct);
    g.reduce = group_along(&grid, zero, true, direct);
    g.tp = group_along(&grid, tp, false, false);
    g.tp_grads = group_along(&grid, tp, false, false);
    g.sp = group_along(&grid, sp, false, false);
    if (twin_first < twin_second) g.twin = group_of_stages(&grid, twin_first, twin_second);
    g.job = grid.zero_size == grid.world ? g.reduce : group_along(&grid, all, false, false);
    return g;
}

static inline void groups_free(GridGroups *g) {
    if (g->grid.zero_size < g->grid.world) comm_group_free(&g->job);
    if (g->twin.size > 1) comm_group_free(&g->twin);
    if (g->sp.size > 1) comm_group_free(&g->sp);
    if (g->tp.size > 1) {
        comm_group_free(&g->tp);
        comm_group_free(&g->tp_grads);
    }
    comm_group_free(&g->gather);
    comm_group_free(&g->reduce);
}
