// nccl_ranks.cpp - the rows of test_comm.h alone, for tests/test_nccl.sh: nccl_ranks [row to leave out ...]
//
// With WATCH in the environment the ranks' beats go along, and must find nothing to complain of. With HANG a rank does not come.
#include "../runtime/comm.h"
#include "../runtime/watch.h"
static CommWorld test_world;
#include "dies.h"
#include "test_comm.h"

extern int64_t fake_stream_writes; // what the streams have written for the watch

static void beats_start(void) {
    WatchJob job;
    WatchAddress address;
    memset(&job, 0, sizeof job);
    memset(&address, 0, sizeof address);
    job.rank = test_world.rank;
    job.world = test_world.world;
    job.one_host = true;
    job.limits = watch_default_limits(60);
    watch_prepare(&job, &address);
    comm_host_broadcast(&address, sizeof address, 0);
    watch_start(&address);
}

int main(int argc, char **argv) {
    bool beats = getenv("WATCH") != NULL;
    if (beats) watch_arm(60);
    test_world = comm_start();
    message_rank = test_world.rank;
    if (beats) beats_start();
    device_init(0);
    int passed = 0, failed = 0, skipped = 0;
    for (const TestRow *row = getenv("HANG") ? hang_tests : comm_tests; row->name; row++) {
        bool left_out = false;
        for (int i = 1; i < argc; i++) left_out |= strcmp(argv[i], row->name) == 0;
        if (left_out) continue;
        Test t = {"comm", row->name, 0, 0, 0, false, ""};
        row->run(&t);
        if (!t.skipped && t.failures == 0 && t.compared == 0) test_fail(&t, "compared nothing");
        if (t.failures) fprintf(stderr, "rank %d: %s: %s\n", test_world.rank, t.name, t.message);
        double failures = (double)t.failures;
        comm_host_all_reduce(&failures, 1, COMM_SUM);
        if (failures > 0) failed++;
        else if (t.skipped) skipped++;
        else passed++;
    }
    if (test_world.rank == 0) printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    if (test_world.world > 1 && fake_stream_writes < 500) {
        fprintf(stderr, "rank %d: streams have written %" PRId64 " numbers for the watch\n", test_world.rank, fake_stream_writes);
        failed++;
    }
    comm_finish();
    if (beats) watch_goodbye();
    return failed ? 1 : 0;
}
