// comm_self.cpp - comm.h for a single rank, when neither MPI nor NCCL is there: collectives are copies.
#include "comm.h"
#include "launch.h"

CommWorld comm_start(void) {
    Launch launch = launch_read();
    message_rank = launch.rank;
    if (launch.world > 1) // each would train alone, all into the same folders
        die_alike(EXIT_CONFIG, "the launcher (%s) started %d ranks, but this binary was built without MPI or NCCL and runs one; install them "
                  "(make install-deps) and build again, or start one process", launch.launcher, launch.world);
    CommWorld w = {0, 1, 0, 1};
    return w;
}
void comm_finish(void) {}
void comm_set_timeout(double) {}

Group comm_group_create(const int *rank, int n, bool direct) {
    (void)rank, (void)direct;
    Group g = {n, 0, 0, false};
    return g;
}
void comm_group_free(Group *g) { g->size = 0; }

void *comm_malloc(Group, int64_t bytes) { return device_malloc(bytes); }
void comm_free(Group, void *p) { device_free(p); }

void comm_all_gather(Group g, void *full, const void *shard, int64_t n, DType t, Stream s) {
    CHECK(g.size == 1, "group of %d ranks", g.size);
    if (full != shard) device_copy(full, shard, n * dtype_bytes(t), COPY_ON_DEVICE, s);
}
void comm_reduce_scatter(Group g, void *shard, void *full, int64_t n, DType t, Stream s) { comm_all_gather(g, shard, full, n, t, s); }
void comm_all_to_all(Group g, void *parts, const void *full, int64_t n, DType t, Stream s) { comm_all_gather(g, parts, full, n, t, s); }
void comm_all_reduce(Group, void *, int64_t, DType, Stream) {}
void comm_all_reduce_double(Group, double *, int64_t, CommOp, Stream) {}
void comm_send(Group g, const void *, int64_t, int peer, Stream) { CHECK(false, "a send to rank %d in a group of %d", peer, g.size); }
void comm_receive(Group g, void *, int64_t, int peer, Stream) { CHECK(false, "a receive from rank %d in a group of %d", peer, g.size); }
void comm_broadcast(Group, void *, int64_t, int, Stream) {}
void comm_batch_begin(void) {}
void comm_batch_end(void) {}
void comm_host_broadcast(void *, int64_t, int) {}
void comm_host_all_reduce(double *, int, CommOp) {}
