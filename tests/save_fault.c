// save_fault.c - a library to be preloaded that kills a rank at the n-th system call of its saves.
//
//     LD_PRELOAD=./save_fault.so SAVE_FAULT=1:40 mpirun -n 2 ...     rank 1, right before its 40th call
//
// Counted are the calls that saves are made of, of all threads, from the first that names a temporary folder of a checkpoint on. A run
// that makes fewer of them goes on to its end.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int strike; // 0: never
static atomic_int calls;

__attribute__((constructor)) static void read_wish(void) {
    const char *text = getenv("SAVE_FAULT"), *self = getenv("OMPI_COMM_WORLD_RANK");
    int rank, at;
    if (text && sscanf(text, "%d:%d", &rank, &at) == 2 && rank == (self ? atoi(self) : 0)) strike = at;
}

static void count(const char *call, const char *name) {
    if (!strike || (calls == 0 && strncmp(name, ".tmp-step-", 10) != 0)) return;
    if (atomic_fetch_add(&calls, 1) + 1 != strike) return;
    dprintf(2, "fault: killed before call %d, %s %s\n", strike, call, name);
    kill(getpid(), SIGKILL);
    for (;;) pause(); // until the signal has arrived
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int openat(int folder, const char *name, int flags, ...) {
    va_list args;
    va_start(args, flags);
    mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    count("openat", name);
    return REAL(openat)(folder, name, flags, mode);
}
int mkdirat(int folder, const char *name, mode_t mode) { count("mkdirat", name); return REAL(mkdirat)(folder, name, mode); }
int unlinkat(int folder, const char *name, int flags) { count("unlinkat", name); return REAL(unlinkat)(folder, name, flags); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { count("renameat2", from); return REAL(renameat2)(a, from, b, to, flags); }
int fallocate(int fd, int mode, off_t from, off_t bytes) { count("fallocate", ""); return REAL(fallocate)(fd, mode, from, bytes); }
ssize_t pwrite(int fd, const void *data, size_t bytes, off_t at) { count("pwrite", ""); return REAL(pwrite)(fd, data, bytes, at); }
int fsync(int fd) { count("fsync", ""); return REAL(fsync)(fd); }
int close(int fd) { count("close", ""); return REAL(close)(fd); }
