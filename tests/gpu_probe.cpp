// gpu_probe.cpp - what the way out costs on two GPUs: figures that docs/watchdog.md rests on, measured by tests/two_gpus.py.
//
//     gpu_probe exit | kill       time from _exit, or kill -9, of a rank whose collective spins, to its end and to a free GPU
//     gpu_probe abort             three communicators with collectives that spin, aborted in a group, on both ranks
//     gpu_probe abort_alone       the same on one rank only, while the other does nothing
//     gpu_probe abort_single      one after the other, the ranks in opposite orders
//     gpu_probe async             how long after kill -9 of the peer ncclCommGetAsyncError tells of it
//     gpu_probe write             what the two stream memory writes around each collective cost
//
// Two processes, one a GPU, each with 4 GiB on it and communicators of two ranks. One line a case: "case: what: figure".
// A rank that hangs says so after LIMIT_S seconds and leaves.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <errno.h>
#include <nccl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { COMMS = 3, LIMIT_S = 8 };

typedef struct {
    ncclUniqueId id[COMMS];
    volatile int ids_ready, ready, go; // ready: ranks that are set up
    volatile double start;             // of what is measured
} Shared;

static Shared *shared;
static const char *what;
static int rank;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static void sleep_ms(double ms) {
    struct timespec t = {(time_t)(ms / 1e3), (long)(1e6 * (ms - 1e3 * (double)(time_t)(ms / 1e3)))};
    nanosleep(&t, NULL);
}
static void say(const char *text, double ms) {
    if (ms < 1) printf("%s: %s: %.1f us\n", what, text, 1e3 * ms);
    else printf("%s: %s: %.1f ms\n", what, text, ms);
    fflush(stdout);
}

__attribute__((noreturn)) static void give_up(const char *call, const char *why) {
    printf("%s: rank %d: %s: %s\n", what, rank, call, why);
    fflush(stdout);
    _exit(1);
}
#define CUDA(call) do { cudaError_t e_ = (call); if (e_ != cudaSuccess) give_up(#call, cudaGetErrorString(e_)); } while (0)
#define NCCL(call) do { ncclResult_t r_ = (call); if (r_ != ncclSuccess && r_ != ncclInProgress) give_up(#call, ncclGetErrorString(r_)); } while (0)

static void on_limit(int) {
    static const char text[] = ": hangs, given up\n";
    ssize_t n = write(1, what, strlen(what));
    n = write(1, text, sizeof text - 1);
    (void)n;
    _exit(1);
}

// ---------------------------------------------------------------------------------------------------------------
// A rank

static ncclComm_t comm[COMMS];
static cudaStream_t stream[COMMS];
static float *data[COMMS];
static const size_t NUMEL = 16 << 20;

static void settle(ncclComm_t c) { // as comm_nccl.cpp: communicators are non-blocking
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) NCCL(ncclCommGetAsyncError(c, &state));
    NCCL(state);
}

static void all_reduce(int i, size_t n) {
    NCCL(ncclAllReduce(data[i], data[i], n, ncclFloat32, ncclSum, comm[i], stream[i]));
    settle(comm[i]);
}

static void set_up(void) {
    void *ballast;
    CUDA(cudaSetDevice(rank));
    CUDA(cudaMalloc(&ballast, (size_t)4 << 30));
    if (rank == 0) {
        for (int i = 0; i < COMMS; i++) NCCL(ncclGetUniqueId(&shared->id[i]));
        __atomic_store_n(&shared->ids_ready, 1, __ATOMIC_RELEASE);
    }
    while (!__atomic_load_n(&shared->ids_ready, __ATOMIC_ACQUIRE)) sleep_ms(1);
    for (int i = 0; i < COMMS; i++) {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        NCCL(ncclCommInitRankConfig(&comm[i], 2, shared->id[i], rank, &config));
        settle(comm[i]);
        CUDA(cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking));
        CUDA(cudaMalloc((void **)&data[i], NUMEL * 4));
        CUDA(cudaMemset(data[i], 0, NUMEL * 4));
        all_reduce(i, NUMEL);
        CUDA(cudaStreamSynchronize(stream[i]));
    }
    __atomic_add_fetch(&shared->ready, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&shared->ready, __ATOMIC_ACQUIRE) < 2) sleep_ms(1);
}

static void *abort_comms(void *) {
    const bool single = strcmp(what, "abort_single") == 0;
    double start = now();
    if (!single) NCCL(ncclGroupStart());
    for (int i = 0; i < COMMS; i++) NCCL(ncclCommAbort(comm[single && rank ? COMMS - 1 - i : i]));
    if (!single) NCCL(ncclGroupEnd());
    char text[64];
    snprintf(text, sizeof text, "rank %d, three communicators", rank);
    say(text, 1e3 * (now() - start));
    return NULL;
}

static void case_write(void) {
    enum { CALLS = 20000, REDUCES = 2000 };
    typedef int (*StreamWrite)(cudaStream_t, unsigned long long, uint64_t, unsigned);
    void *entry = NULL;
    cudaDriverEntryPointQueryResult found;
    CUDA(cudaGetDriverEntryPointByVersion("cuStreamWriteValue64", &entry, 12000, cudaEnableDefault, &found));
    StreamWrite stream_write = (StreamWrite)entry;
    if (!stream_write) give_up("cuStreamWriteValue64", "not there");
    uint64_t *pinned;
    cudaEvent_t begin, end;
    CUDA(cudaHostAlloc((void **)&pinned, 64, cudaHostAllocDefault));
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    for (int with = 0; with < 2; with++)
        for (int round = 0; round < 2; round++) { // the first one warms up
            CUDA(cudaStreamSynchronize(stream[0]));
            CUDA(cudaEventRecord(begin, stream[0]));
            double start = now();
            for (int i = 0; i < REDUCES; i++) {
                if (with) stream_write(stream[0], (unsigned long long)(uintptr_t)&pinned[0], (uint64_t)i, 0);
                all_reduce(0, 1 << 18); // 1 MiB
                if (with) stream_write(stream[0], (unsigned long long)(uintptr_t)&pinned[1], (uint64_t)i, 0);
            }
            double host = now() - start;
            CUDA(cudaEventRecord(end, stream[0]));
            CUDA(cudaEventSynchronize(end));
            float ms;
            CUDA(cudaEventElapsedTime(&ms, begin, end));
            if (rank || !round) continue;
            say(with ? "an all-reduce of 1 MiB with two writes, on the GPU" : "an all-reduce of 1 MiB, on the GPU", ms / REDUCES);
            say(with ? "the same, of the host's time" : "the same, of the host's time without writes", 1e3 * host / REDUCES);
        }
    if (rank) return;
    CUDA(cudaEventRecord(begin, stream[1]));
    double start = now();
    for (int i = 0; i < CALLS; i++) stream_write(stream[1], (unsigned long long)(uintptr_t)&pinned[0], (uint64_t)i, 0);
    double host = now() - start;
    CUDA(cudaEventRecord(end, stream[1]));
    CUDA(cudaEventSynchronize(end));
    float ms;
    CUDA(cudaEventElapsedTime(&ms, begin, end));
    printf("write: one write alone: %.2f us of the host's time, %.2f us on the GPU\n", 1e6 * host / CALLS, 1e3 * ms / CALLS);
}

static void case_async(void) { // rank 1 is killed by the parent meanwhile
    all_reduce(0, NUMEL); // rank 1 never comes
    double first = 0;
    while (first == 0 && (!shared->go || now() - shared->start < LIMIT_S - 1)) {
        ncclResult_t state;
        ncclResult_t asked = ncclCommGetAsyncError(comm[0], &state);
        if (asked != ncclSuccess || (state != ncclSuccess && state != ncclInProgress)) first = now();
        sleep_ms(0.5);
    }
    if (first > 0) say("the error is known after", 1e3 * (first - shared->start));
    else printf("async: no error within %d s\n", LIMIT_S - 1);
}

static void run_rank(void) {
    signal(SIGALRM, on_limit);
    alarm(60);
    set_up();
    alarm(0);
    if (strcmp(what, "write") == 0) { case_write(); return; }
    if (strcmp(what, "async") == 0 && rank == 0) { case_async(); return; }
    if (strcmp(what, "exit") == 0 || strcmp(what, "kill") == 0 || strcmp(what, "async") == 0) {
        if (rank == 0) all_reduce(0, NUMEL);
        while (!shared->go || rank == 1 || what[0] != 'e') sleep_ms(1);
        shared->start = now();
        _exit(0);
    }
    for (int i = 0; i < COMMS && rank == 0; i++) all_reduce(i, NUMEL); // rank 1 never comes
    while (!shared->go) sleep_ms(1);
    if (rank == 1 && strcmp(what, "abort_alone") == 0) for (;;) sleep_ms(100);
    alarm(LIMIT_S);
    pthread_t thread;
    if (pthread_create(&thread, NULL, abort_comms, NULL) != 0) give_up("pthread_create", strerror(errno));
    pthread_join(thread, NULL);
}

// ---------------------------------------------------------------------------------------------------------------
// The parent: no CUDA here

typedef struct {
    unsigned long long total, free, used;
} NvmlMemory;
static int (*nvml_memory)(void *device, NvmlMemory *m);
static void *nvml_device[2];

static void nvml_open(void) { // declared by hand, so that no header is needed
    void *lib = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    int (*init)(void) = lib ? (int (*)(void))dlsym(lib, "nvmlInit_v2") : NULL;
    int (*handle)(unsigned, void **) = lib ? (int (*)(unsigned, void **))dlsym(lib, "nvmlDeviceGetHandleByIndex_v2") : NULL;
    if (!init || init() != 0 || !handle || handle(0, &nvml_device[0]) != 0 || handle(1, &nvml_device[1]) != 0) return;
    nvml_memory = (int (*)(void *, NvmlMemory *))dlsym(lib, "nvmlDeviceGetMemoryInfo");
}
static double used_mib(int device) {
    NvmlMemory m;
    return nvml_memory && nvml_memory(nvml_device[device], &m) == 0 ? (double)m.used / 1048576 : -1;
}

// A process that begins now: until its first result from GPU 0.
static pid_t fresh_process(const char *text) {
    pid_t pid = fork();
    if (pid != 0) return pid;
    double start = now();
    int *x, y = 1;
    CUDA(cudaSetDevice(0));
    CUDA(cudaMalloc((void **)&x, 4));
    CUDA(cudaMemset(x, 0, 4));
    CUDA(cudaMemcpy(&y, x, 4, cudaMemcpyDeviceToHost));
    say(text, 1e3 * (now() - start));
    _exit(0);
}

int main(int argc, char **argv) {
    what = argc > 1 ? argv[1] : "";
    shared = (Shared *)mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED || argc != 2) return 2;
    nvml_open();
    bool spins = strcmp(what, "exit") == 0 || strcmp(what, "kill") == 0;
    if (spins) waitpid(fresh_process("a new process on the idle GPU has its first result after"), NULL, 0);
    double idle = used_mib(0);
    pid_t pid[2];
    for (int r = 0; r < 2; r++) {
        pid[r] = fork();
        if (pid[r] != 0) continue;
        rank = r;
        run_rank();
        fflush(stdout);
        _exit(0);
    }
    int status;
    double give_up_at = now() + 60;
    while (shared->ready < 2 && now() < give_up_at && waitpid(-1, &status, WNOHANG) == 0) sleep_ms(1);
    sleep_ms(500); // the collective spins
    pid_t victim = pid[strcmp(what, "async") == 0 ? 1 : 0], fresh = 0;
    if (strcmp(what, "kill") == 0 || strcmp(what, "async") == 0) {
        shared->start = now();
        kill(victim, SIGKILL);
    }
    shared->go = 1;
    if (spins) {
        fresh = fresh_process("a new process, begun at once, has its first result after");
        bool ended = false, freed = idle < 0;
        for (double until = now() + 10; now() < until && !(ended && freed);) {
            if (!ended && waitpid(victim, &status, WNOHANG) == victim) { ended = true; say("the process has ended after", 1e3 * (now() - shared->start)); }
            // the fresh process itself has a context of some 500 MiB there
            if (!freed && used_mib(0) < idle + 1500) { freed = true; say("its memory is free after", 1e3 * (now() - shared->start)); }
            sleep_ms(0.2);
        }
        if (!ended) printf("%s: the process has not ended within 10 s\n", what);
        if (!freed) printf("%s: its memory is not free within 10 s\n", what);
        waitpid(fresh, &status, 0);
        kill(pid[1], SIGKILL);
    }
    if (strcmp(what, "abort_alone") == 0) {
        waitpid(pid[0], &status, 0);
        kill(pid[1], SIGKILL);
    }
    while (waitpid(-1, &status, 0) > 0 || errno == EINTR) {}
    return 0;
}
