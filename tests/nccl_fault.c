// nccl_fault.c - watch_fault.c for GPU ranks: a library to be preloaded that makes one rank fail at its n-th collective.
//
//     LD_PRELOAD=./nccl_fault.so WATCH_FAULT=gpu:1:500 ...     rank 1, at its 500th collective
//
// Actions: kill, stop, loop (the host computes for ever), gpu (behind that collective the GPU's stream waits for ever, while
// the host goes on until it waits for the stream). The rank is the launcher's: OMPI_COMM_WORLD_RANK or RANK.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void *Comm, *Stream;

static volatile uint64_t *never; // stays 0

static char action[16];

// Counts; true when the call at hand is the one.
static int is_due(void) {
    static int target = -2, at, calls;
    if (target == -2) {
        const char *text = getenv("WATCH_FAULT"), *rank = getenv("OMPI_COMM_WORLD_RANK");
        if (!rank) rank = getenv("RANK");
        if (!text || !rank || sscanf(text, "%15[a-z]:%d:%d", action, &target, &at) != 3 || atoi(rank) != target) target = -1;
    }
    return target >= 0 && ++calls == at;
}

static void before(int due) {
    if (!due) return;
    fprintf(stderr, "fault: %s\n", action);
    if (strcmp(action, "kill") == 0) raise(SIGKILL);
    if (strcmp(action, "stop") == 0) raise(SIGSTOP);
    while (strcmp(action, "loop") == 0) usleep(1000);
}

static void after(int due, Stream s) {
    if (!due || strcmp(action, "gpu") != 0) return;
    int (*alloc)(void **, size_t, unsigned) = (int (*)(void **, size_t, unsigned))dlsym(RTLD_DEFAULT, "cudaHostAlloc");
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*wait)(Stream, unsigned long long, uint64_t, unsigned) =
        driver ? (int (*)(Stream, unsigned long long, uint64_t, unsigned))dlsym(driver, "cuStreamWaitValue64_v2") : NULL;
    if (!alloc || !wait || alloc((void **)&never, 8, 0) != 0) { fprintf(stderr, "fault: no stream wait here\n"); return; }
    *never = 0;
    int error = wait(s, (unsigned long long)(uintptr_t)never, 1, 0); // until it is 1 or more
    if (error) fprintf(stderr, "fault: cuStreamWaitValue64 says %d\n", error);
}

#define REAL(name, type) ((type)dlsym(RTLD_NEXT, name))

int ncclAllGather(const void *in, void *out, size_t n, int t, Comm c, Stream s) {
    int due = is_due();
    before(due);
    int result = REAL("ncclAllGather", int (*)(const void *, void *, size_t, int, Comm, Stream))(in, out, n, t, c, s);
    after(due, s);
    return result;
}
int ncclAlltoAll(const void *in, void *out, size_t n, int t, Comm c, Stream s) {
    int due = is_due();
    before(due);
    int result = REAL("ncclAlltoAll", int (*)(const void *, void *, size_t, int, Comm, Stream))(in, out, n, t, c, s);
    after(due, s);
    return result;
}
int ncclReduceScatter(const void *in, void *out, size_t n, int t, int op, Comm c, Stream s) {
    int due = is_due();
    before(due);
    int result = REAL("ncclReduceScatter", int (*)(const void *, void *, size_t, int, int, Comm, Stream))(in, out, n, t, op, c, s);
    after(due, s);
    return result;
}
int ncclAllReduce(const void *in, void *out, size_t n, int t, int op, Comm c, Stream s) {
    int due = is_due();
    before(due);
    int result = REAL("ncclAllReduce", int (*)(const void *, void *, size_t, int, int, Comm, Stream))(in, out, n, t, op, c, s);
    after(due, s);
    return result;
}
