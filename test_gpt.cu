// test_gpt.cu - all tests, by section: ./test_gpt [section or section/row ...]; with no argument, everything but "hang", whose rows
// must end the job. Run it in the project's folder.
//
// Each section lives in a file of tests/ and is a list of rows; a row is a function void(Test *) that calls expect_*
// (tests/harness.h). A row that compares nothing fails. That the tests can fail is shown by tests/teeth.py.
#define TESTING // train_gpt.cu without its main
#include "tests/trace.h"
#include "train_gpt.cu"
static CommWorld test_world; // the ranks that run the tests
#include "tests/harness.h"
#include "tests/dies.h"
#include "tests/test_kernels.h"
#include "tests/test_data.h"
#include "tests/test_products.h"
#include "tests/test_formats.h"
#include "tests/test_saves.h"
#include "tests/test_shards.h"
#include "tests/test_layouts.h"
#include "tests/test_config.h"
#include "tests/test_model.h"
#include "tests/test_pipeline.h"
#include "tests/test_parallel.h"
#include "tests/test_zero.h"
#include "tests/test_graphs.h"
#include "tests/test_offload.h"
#include "tests/test_recompute.h"
#include "tests/test_tensor.h"
#include "tests/test_stages.h"
#include "tests/test_comm.h"
#include "tests/test_rendezvous.h"
#include "tests/test_aio.h"
#include "tests/test_nvme.h"
#include "tests/test_combinations.h"
#include "tests/test_plan.h"

static const TestSection test_sections[] = {
    {"config", config_tests},   {"kernels", kernel_tests},       {"data", data_tests},     {"products", product_tests}, {"formats", format_tests},
    {"tables", table_tests},    {"schedules", schedule_tests},   {"pipeline", pipeline_tests}, {"golden", golden_tests}, {"trainer", trainer_tests},
    {"resume", resume_tests},   {"checkpoint", checkpoint_tests}, {"shards", shards_tests}, {"layouts", layouts_tests}, {"parallel", parallel_tests}, {"zero", zero_tests}, {"stages", stages_tests},
    {"graphs", graph_tests},    {"offload", offload_tests},   {"recompute", recompute_tests}, {"tensor", tensor_tests}, {"comm", comm_tests},       {"rendezvous", rendezvous_tests},
    {"aio", aio_tests},         {"nvme", nvme_tests},         {"plan", plan_tests},
    {"combinations", combination_tests}, {"hang", hang_tests}, {"hang", differs_tests},
};

// Whether the command line names this row, or its section.
static bool row_wanted(int argc, char **argv, const TestSection *section, const TestRow *row) {
    char name[160];
    snprintf(name, sizeof name, "%s/%s", section->name, row->name);
    for (int i = 1; i < argc; i++) if (strcmp(argv[i], section->name) == 0 || strcmp(argv[i], name) == 0) return true;
    return argc < 2 && strcmp(section->name, "hang") != 0;
}

// All ranks run the same rows; a failure on any of them fails the row, and rank 0 tells.
int main(int argc, char **argv) {
    descriptors_ensure();
    signal(SIGPIPE, SIG_IGN);
    test_world = comm_start();
    device_init(test_world.local_rank);
    bool tells = test_world.rank == 0;
    int passed = 0, failed = 0, skipped = 0, picked = 0;
    for (size_t s = 0; s < sizeof test_sections / sizeof *test_sections; s++) {
        const TestSection *section = &test_sections[s];
        for (const TestRow *row = section->row; row->name; row++) {
            if (!row_wanted(argc, argv, section, row)) continue;
            picked++;
            Test t = {section->name, row->name, 0, 0, 0, false, ""};
            double start = clock_seconds();
            row->run(&t);
            if (!t.skipped && t.failures == 0 && t.compared == 0) test_fail(&t, "compared nothing");
            if (t.failures && !tells) fprintf(stderr, "rank %d: %s/%s: %s\n", test_world.rank, t.section, t.name, t.message);
            double failures = (double)t.failures;
            comm_host_all_reduce(&failures, 1, COMM_SUM);
            const char *verdict = failures > 0 ? "FAIL" : t.skipped ? "skip" : "ok";
            if (tells)
                printf("%-4s %s/%s: %" PRId64 " values, worst %.2f of its bound, %.2f s%s%s\n", verdict, t.section, t.name, t.compared, t.worst, clock_seconds() - start, t.message[0] ? ": " : "", t.message);
            fflush(stdout);
            if (failures > 0) failed++;
            else if (t.skipped) skipped++;
            else passed++;
        }
    }
    if (picked == 0) die(EXIT_CONFIG, "no such test section or row; the sections are listed in test_gpt.cu");
    if (tells) printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    comm_finish();
    return failed ? 1 : 0;
}
