// nccl_ranks.cpp - the rows of test_comm.h alone, for tests/test_nccl.sh: nccl_ranks [row to leave out ...]
#include "../runtime/comm.h"
static CommWorld test_world;
#include "dies.h"
#include "test_comm.h"

int main(int argc, char **argv) {
    test_world = comm_start();
    message_rank = test_world.rank;
    device_init(0);
    int passed = 0, failed = 0, skipped = 0;
    for (const TestRow *row = comm_tests; row->name; row++) {
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
    comm_finish();
    return failed ? 1 : 0;
}
