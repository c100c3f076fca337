// dies.h - tests of the way out: run a function that must end in die(), and look at its exit code and its line.
//
// The function runs in a forked child, so that die() may leave the process. Invariants:
//   1. The child uses one OpenMP thread: the pool of threads does not survive fork(), and a parallel region that asked
//      for it would wait for ever. For the same reason the function may not touch a GPU that the parent has opened.
//   2. The child has DIES_SECONDS; a hang ends in SIGALRM and is reported as such, never as a hanging test.
//   3. Whatever happens in the child, it leaves by _exit: it never runs the rest of the test program.
#pragma once
#include "harness.h"
#ifdef _OPENMP
#include <omp.h>
#endif
#include <sys/wait.h>

enum { DIES_SECONDS = 60, DIES_TEXT_BYTES = 4096 };

// Runs fn(arg) in a child. Returns its exit code, 128 + n when signal n ended it, -1 when fn returned, -2 when no child
// could be made. `text` (DIES_TEXT_BYTES) receives what the child wrote to stderr, cut to the room.
static inline int run_in_child(void (*fn)(void *), void *arg, char *text) {
    int ends[2];
    text[0] = 0;
    if (pipe(ends) != 0) return -2;
    fflush(stdout); // or the child would print the parent's pending output a second time
    fflush(stderr);
    pid_t child = fork();
    if (child < 0) { close(ends[0]); close(ends[1]); return -2; }
    if (child == 0) {
        close(ends[0]);
        dup2(ends[1], STDERR_FILENO);
        close(ends[1]);
#ifdef _OPENMP
        omp_set_num_threads(1);
#endif
        alarm(DIES_SECONDS);
        fn(arg);
        fflush(stderr);
        _exit(123); // fn returned; no exit code of ours, and 127 and above mean something to shells
    }
    close(ends[1]);
    size_t used = 0;
    char more[512];
    for (;;) { // read to the end even when the room is full, or the child would block in write
        ssize_t n = read(ends[0], more, sizeof more);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        size_t take = (size_t)n < DIES_TEXT_BYTES - 1 - used ? (size_t)n : DIES_TEXT_BYTES - 1 - used;
        memcpy(text + used, more, take);
        used += take;
    }
    text[used] = 0;
    close(ends[0]);
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (WIFSIGNALED(status)) return 128 + WTERMSIG(status);
    return WEXITSTATUS(status) == 123 ? -1 : WEXITSTATUS(status);
}

// fn(arg) must end with this exit code, and the last line on stderr must be one "error: ..." that contains every one of
// the parts. Three or more values compared.
static inline void expect_dies_parts(Test *t, int code, const char *const *parts, int n_parts, void (*fn)(void *), void *arg) {
    char text[DIES_TEXT_BYTES];
    int got = run_in_child(fn, arg, text);
    size_t length = strlen(text);
    t->compared += 2 + n_parts;
    if (got == -1) { test_fail(t, "did not die; expected exit code %d and \"%.200s\"; stderr \"%.200s\"", code, n_parts ? parts[0] : "", text); return; }
    if (got != code) { test_fail(t, "exit code %d, expected %d; stderr \"%.300s\"", got, code, text); return; }
    if (length && text[length - 1] == '\n') text[--length] = 0;
    const char *last = strrchr(text, '\n');
    last = last ? last + 1 : text;
    if (strncmp(last, "error: ", 7) != 0) { test_fail(t, "the last line on stderr is no error line: \"%.300s\"", text); return; }
    for (int i = 0; i < n_parts; i++)
        if (!strstr(last, parts[i])) test_fail(t, "\"%.300s\" does not contain \"%.100s\"", last, parts[i]);
}

static inline void expect_dies(Test *t, int code, const char *part, void (*fn)(void *), void *arg) {
    expect_dies_parts(t, code, &part, 1, fn, arg);
}
