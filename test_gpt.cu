// test_gpt.cu - all tests, by section: ./test_gpt [section ...]; with no argument, everything. Run it in the project's folder.
//
// Each section lives in a file of tests/ and is a list of rows; a row is a function void(Test *) that calls expect_*
// (tests/harness.h). A row that compares nothing fails. That the tests can fail is shown by tests/teeth.py.
#define TESTING // train_gpt.cu without its main
#include "train_gpt.cu"
#include "tests/harness.h"
#include "tests/dies.h"
#include "tests/test_kernels.h"
#include "tests/test_data.h"
#include "tests/test_formats.h"
#include "tests/test_model.h"

static const TestSection test_sections[] = {
    {"kernels", kernel_tests},     {"data", data_tests},     {"formats", format_tests}, {"tables", table_tests},
    {"schedules", schedule_tests}, {"golden", golden_tests}, {"trainer", trainer_tests}, {"resume", resume_tests},
};

int main(int argc, char **argv) {
    descriptors_ensure();
    signal(SIGPIPE, SIG_IGN);
    device_init(0);
    int passed = 0, failed = 0, skipped = 0, picked = 0;
    for (size_t s = 0; s < sizeof test_sections / sizeof *test_sections; s++) {
        const TestSection *section = &test_sections[s];
        bool wanted = argc < 2;
        for (int i = 1; i < argc; i++) wanted |= strcmp(argv[i], section->name) == 0;
        if (!wanted) continue;
        picked++;
        for (const TestRow *row = section->row; row->name; row++) {
            Test t = {section->name, row->name, 0, 0, 0, false, ""};
            double start = clock_seconds();
            row->run(&t);
            if (!t.skipped && t.failures == 0 && t.compared == 0) test_fail(&t, "compared nothing");
            const char *verdict = t.skipped ? "skip" : t.failures ? "FAIL" : "ok";
            printf("%-4s %s/%s: %" PRId64 " values, worst %.2f of its bound, %.2f s%s%s\n", verdict, t.section, t.name, t.compared, t.worst, clock_seconds() - start, t.message[0] ? ": " : "", t.message);
            fflush(stdout);
            if (t.skipped) skipped++;
            else if (t.failures) failed++;
            else passed++;
        }
    }
    if (picked == 0) die(EXIT_CONFIG, "no such test section; the sections are listed in test_gpt.cu");
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed ? 1 : 0;
}
