// watch_fault.c - a library to be preloaded into MPI ranks that makes one of them fail at its n-th collective.
//
//     mpirun -x LD_PRELOAD=./watch_fault.so -x WATCH_FAULT=loop:2:300 ...     rank 2, at its 300th collective
//
// Actions: kill, stop, loop, exit, segv, abort, and
//     sleep:2:300:5      5 ms (else 50) at every collective from there on: a slow rank
//     term:2:0           SIGTERM to rank 2 by itself, before MPI is initialised
//     flip:2:300:64:8    in the first gather from there on with pieces of 64 bytes (0: of more than 256) that reaches byte 8, the lowest bit of
//                        that byte of what rank 2 receives is flipped
// The program needs no hook: MPI's profiling interface lets a library stand before any MPI function and call the real one.
#define _GNU_SOURCE
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int flip_bytes, flip_at; // of a flip that is due; 0 and -1: none

static void collective(void) {
    static char action[16];
    static int rank = -2, at, calls, bytes, place;
    if (rank == -2) {
        flip_at = -1;
        const char *text = getenv("WATCH_FAULT");
        if (!text || sscanf(text, "%15[a-z]:%d:%d:%d:%d", action, &rank, &at, &bytes, &place) < 3) rank = -1;
    }
    int self, ready;
    if (rank < 0 || PMPI_Initialized(&ready) != MPI_SUCCESS || !ready) return;
    PMPI_Comm_rank(MPI_COMM_WORLD, &self);
    if (self != rank || ++calls < at) return;
    struct timespec pause = {0, strcmp(action, "sleep") == 0 && bytes ? bytes * 1000000 : 50000000};
    if (strcmp(action, "sleep") == 0) nanosleep(&pause, NULL);
    if (calls > at) return;
    fprintf(stderr, "fault: %s at collective %d of rank %d\n", action, calls, rank);
    if (strcmp(action, "flip") == 0) flip_bytes = bytes, flip_at = place;
    if (strcmp(action, "kill") == 0) raise(SIGKILL);
    if (strcmp(action, "stop") == 0) raise(SIGSTOP);
    if (strcmp(action, "segv") == 0) raise(SIGSEGV);
    if (strcmp(action, "abort") == 0) abort();
    if (strcmp(action, "exit") == 0) _exit(0);
    while (strcmp(action, "loop") == 0) nanosleep(&pause, NULL);
}

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
    const char *text = getenv("WATCH_FAULT"), *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (text && rank && strncmp(text, "term:", 5) == 0 && atoi(text + 5) == atoi(rank)) raise(SIGTERM);
    return PMPI_Init_thread(argc, argv, required, provided);
}
int MPI_Allreduce(const void *in, void *out, int n, MPI_Datatype t, MPI_Op op, MPI_Comm c) {
    collective();
    return PMPI_Allreduce(in, out, n, t, op, c);
}
int MPI_Iallgather(const void *in, int n, MPI_Datatype t, void *out, int m, MPI_Datatype u, MPI_Comm c, MPI_Request *r) {
    collective();
    int result = PMPI_Iallgather(in, n, t, out, m, u, c, r), size, ranks;
    if (flip_at < 0) return result;
    PMPI_Type_size(u, &size);
    PMPI_Comm_size(c, &ranks);
    if (flip_bytes ? m * size != flip_bytes : m * size <= 256) return result;
    if (flip_at >= ranks * m * size) return result;
    PMPI_Wait(r, MPI_STATUS_IGNORE); // leaves a null request, which counts as done
    ((unsigned char *)out)[flip_at] ^= 1;
    flip_at = -1;
    return result;
}
int MPI_Ialltoall(const void *in, int n, MPI_Datatype t, void *out, int m, MPI_Datatype u, MPI_Comm c, MPI_Request *r) {
    collective();
    return PMPI_Ialltoall(in, n, t, out, m, u, c, r);
}
int MPI_Ibcast(void *x, int n, MPI_Datatype t, int root, MPI_Comm c, MPI_Request *r) {
    collective();
    return PMPI_Ibcast(x, n, t, root, c, r);
}
