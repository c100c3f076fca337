// emulate.cpp - the rows of test_kernels.h whose kernels emulator.h can run: each kernel's cases twice, against its CPU twin and bit for
// bit against itself. emulate [row ...] runs some.
#define GPU_ROWS_MAX 1000 // of a case: threads of the emulator take microseconds, not nanoseconds
#include "../test_kernels.h"

// What lies in fresh memory shows: as a float it is NaN. Fibers are not leaks, and have one stack each.
extern "C" const char *__asan_default_options(void);
extern "C" const char *__asan_default_options(void) { return "detect_leaks=0:detect_stack_use_after_return=0:malloc_fill_byte=255:max_malloc_fill_size=1000000000"; }

// The kernels themselves, and the rows that run the build's own beside the CPU's; not products and attention (emulator.cpp).
static bool row_emulated(const char *name) {
    static const char *const others[] = {"sum_squares_special", "gradients_in_16_bits", "update_control", "hash_words", "split_updates", "convert_special", "classifier_special"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) if (strcmp(name, others[i]) == 0) return true;
    return strncmp(name, "gpu_", 4) == 0 && !strstr(name, "linear") && !strstr(name, "attention");
}

int main(int argc, char **argv) {
    int passed = 0, failed = 0;
    device_init(0);
    for (const TestRow *row = kernel_tests; row->name; row++) {
        bool wanted = argc < 2 && row_emulated(row->name);
        for (int i = 1; i < argc; i++) wanted |= strcmp(argv[i], row->name) == 0;
        if (!wanted) continue;
        Test t = {"emulate", row->name, 0, 0, 0, false, ""};
        const double start = clock_seconds();
        row->run(&t);
        if (t.failures == 0 && t.compared == 0) test_fail(&t, "compared nothing");
        printf("%-4s emulate/%s: %" PRId64 " values, worst %.2f of its bound, %.2f s%s%s\n", t.failures ? "FAIL" : "ok", t.name, t.compared, t.worst, clock_seconds() - start, t.message[0] ? ": " : "", t.message);
        fflush(stdout);
        failed += t.failures > 0;
        passed += t.failures == 0;
    }
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed > 0 || passed == 0;
}
