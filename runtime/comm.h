// comm.h - ranks talking to each other: starting, groups, collectives on streams, and small exchanges between hosts.
//
// One implementation a binary, picked by the Makefile: comm_mpi.cpp (CPU backend), comm_nccl.cpp (CUDA backend),
// comm_self.cpp (either, without MPI or NCCL: one rank). A group of one rank is legal everywhere, and then every
// collective is a copy or nothing.
//
// Collectives on a stream are asynchronous: the call returns at once, and the result may be read, and the arguments may
// be written again, only by work that is ordered behind it (the same stream, stream_wait_event, stream_sync). They start
// when they are enqueued. Every rank of a group enqueues the same collectives on it in the same order. Two collectives
// may be in flight at once only if they are on different groups; comm_group_create may be called twice for the same ranks
// to have two channels.
//
// Sums are taken in fp32 (16-bit types: rounded once at the end; doubles: in double). comm_mpi adds in the order of the
// ranks, so that its results do not depend on message sizes.
#pragma once
#include "device.h"
#include "grid.h"

typedef struct {
    int rank, world;             // of the job
    int local_rank, local_world; // among the ranks of this host
} CommWorld;

typedef enum { COMM_SUM, COMM_MAX, COMM_MIN } CommOp;

// Joins the job that the launcher has started: mpirun, or RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT in the
// environment (torchrun, Slurm). Call once, before device_init and before any thread is made. Without a launcher: one rank.
CommWorld comm_start(void);
void comm_finish(void); // the normal end, on all ranks

// From now on the host waits at most so long for the other ranks in any one of these calls, and then ends with EXIT_PEER.
// 1800 s before. What a GPU's stream waits for is not the host's: the watch (watch.h) looks after that.
void comm_set_timeout(double seconds);

// The ranks of `rank[0..n)` (of the world, ascending), of which this one is a member. All ranks of the world make the same
// calls in the same order; a rank that is no member passes n = 0 and gets an empty group. One call may make several groups
// that have no rank in common. direct: exchange through each other's memory is wanted, and Group.direct says whether it is to
// be had. Call after device_init.
Group comm_group_create(const int *rank, int n, bool direct);
void comm_group_free(Group *g);

// Memory for what a group's collectives read and write: every rank of the group makes the same calls with the same sizes. In
// a direct group of GPUs, collectives that only move data, from such memory to such memory at the same place on each rank,
// are done by the GPUs' copy engines: they take no processor from the computation. Contents undefined; 256-byte aligned.
void *comm_malloc(Group g, int64_t bytes);
void comm_free(Group g, void *p); // before comm_group_free

// full[r*n .. (r+1)*n) = shard of rank r, n elements each. shard may be this rank's part of full.
void comm_all_gather(Group g, void *full, const void *shard, int64_t n, DType t, Stream s);

// shard = sum over ranks of their full[rank*n .. (rank+1)*n). shard may be this rank's part of full; the rest of full stays.
void comm_reduce_scatter(Group g, void *shard, void *full, int64_t n, DType t, Stream s);

// parts[r*n .. (r+1)*n) = full[rank*n .. (rank+1)*n) of rank r, n elements each: what each rank has for this one. With the sum
// of the parts it is a reduce_scatter, of which all but the sum moves without a processor. parts and full are apart.
void comm_all_to_all(Group g, void *parts, const void *full, int64_t n, DType t, Stream s);

// x = sum over ranks of their x, in place, n elements; doubles for the second.
void comm_all_reduce(Group g, void *x, int64_t n, DType t, Stream s);
void comm_all_reduce_double(Group g, double *x, int64_t n, CommOp op, Stream s);

// Bytes to the group's rank `peer`, and from it. A rank's sends to another are taken by that one's receives in the order in which they
// were enqueued. A send may last until its receive takes it, and holds up what comes behind it on its group or its stream: what may
// not wait for each other needs groups of its own (pipeline.cu says what this means). The watch, which compares what the ranks of a
// group have begun, understands groups of two ranks that use them in one direction. Not in a batch, and not to oneself.
void comm_send(Group g, const void *x, int64_t bytes, int peer, Stream s);
void comm_receive(Group g, void *x, int64_t bytes, int peer, Stream s);

// x of the group's rank `root` to all.
void comm_broadcast(Group g, void *x, int64_t bytes, int root, Stream s);

// Between these two, collectives are only collected; they start together at the end.
void comm_batch_begin(void);
void comm_batch_end(void);

// Host memory, blocking, over all ranks of the world, small amounts.
void comm_host_broadcast(void *x, int64_t bytes, int root);
void comm_host_all_reduce(double *x, int n, CommOp op);
