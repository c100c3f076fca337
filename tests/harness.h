// harness.h - the test frame: sections, rows, and the rule that no row may pass by comparing nothing.
//
// A test is a function void(Test *t). It calls the expect_* functions, each of which adds to the number of values
// compared; a test that compared none fails. test_gpt.cu runs the rows of all sections and ends with
// "N passed, N failed, N skipped".
#pragma once
#include "../runtime/tensor.h"

typedef struct {
    const char *section, *name;
    int64_t compared;      // values that an expect_* has looked at
    int64_t failures;
    double worst;          // largest error seen, in units of its bound (<= 1 passes)
    bool skipped;
    char message[512];     // the first failure
} Test;

PRINTF_LIKE(2, 3) static inline void test_fail(Test *t, const char *format, ...) {
    if (t->failures++ == 0) {
        va_list args;
        va_start(args, format);
        vsnprintf(t->message, sizeof t->message, format, args);
        va_end(args);
    }
}

PRINTF_LIKE(2, 3) static inline void test_skip(Test *t, const char *format, ...) {
    t->skipped = true;
    va_list args;
    va_start(args, format);
    vsnprintf(t->message, sizeof t->message, format, args);
    va_end(args);
}

// A condition; the format describes the values.
#define expect_true(t, cond, ...)                                                                                      \
    do {                                                                                                               \
        (t)->compared++;                                                                                               \
        if (!(cond)) test_fail(t, __VA_ARGS__);                                                                        \
    } while (0)

static inline void expect_equal_i64(Test *t, const char *what, int64_t got, int64_t want) {
    t->compared++;
    if (got != want) test_fail(t, "%s is %" PRId64 ", expected %" PRId64, what, got, want);
}

static inline void expect_equal_text(Test *t, const char *what, const char *got, const char *want) {
    t->compared++;
    if (strcmp(got, want) != 0) test_fail(t, "%s is \"%.160s\", expected \"%.160s\"", what, got, want);
}

static inline void expect_contains(Test *t, const char *what, const char *text, const char *part) {
    t->compared++;
    if (!strstr(text, part)) test_fail(t, "%s \"%.300s\" does not contain \"%.100s\"", what, text, part);
}

// |got - want| <= bound; NaN fails.
static inline void expect_near(Test *t, const char *what, double got, double want, double bound) {
    t->compared++;
    double error = fabs(got - want);
    if (!(error <= bound)) test_fail(t, "%s is %.9g, expected %.9g +- %.3g", what, got, want, bound);
    if (bound > 0 && error / bound > t->worst) t->worst = error / bound;
}

// Two arrays of n values: normalised mean squared error sum (got-want)^2 / sum want^2 at most nmse_bound, and no element
// further off than element_bound times the largest |want|. NaN fails.
static inline void expect_close_array(Test *t, const char *what, const float *got, const float *want, int64_t n, double nmse_bound, double element_bound) {
    double error = 0, power = 0, largest = 0, worst = 0;
    int64_t worst_at = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)got[i] - (double)want[i]);
        error += d * d;
        power += (double)want[i] * (double)want[i];
        if (fabs((double)want[i]) > largest) largest = fabs((double)want[i]);
        if (!(d <= worst)) { worst = d; worst_at = i; }
    }
    t->compared += n;
    double nmse = power > 0 ? error / power : error;
    if (!(nmse <= nmse_bound)) test_fail(t, "%s: NMSE %.3g over %" PRId64 " values, bound %.3g", what, nmse, n, nmse_bound);
    if (!(worst <= element_bound * largest)) test_fail(t, "%s[%" PRId64 "] is %.7g, expected %.7g (largest |value| %.3g, bound %.3g of it)", what, worst_at, got[worst_at], want[worst_at], largest, element_bound);
    if (nmse_bound > 0 && nmse / nmse_bound > t->worst) t->worst = nmse / nmse_bound;
    if (element_bound > 0 && largest > 0 && worst / (element_bound * largest) > t->worst) t->worst = worst / (element_bound * largest);
}

// Bit for bit.
static inline void expect_same_bytes(Test *t, const char *what, const void *got, const void *want, int64_t bytes) {
    t->compared += bytes;
    for (int64_t i = 0; i < bytes; i++)
        if (((const unsigned char *)got)[i] != ((const unsigned char *)want)[i]) { test_fail(t, "%s differs at byte %" PRId64 " of %" PRId64, what, i, bytes); return; }
}

typedef struct {
    const char *name;
    void (*run)(Test *t);
} TestRow;

typedef struct {
    const char *name;      // sections can be picked by name on the command line
    const TestRow *row;    // ends with a row whose name is null
} TestSection;
