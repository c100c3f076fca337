// device_cuda.cpp - device.h on an NVIDIA GPU, through the CUDA runtime.
//
// Compiled by the host compiler: there is no device code here. Streams are non-blocking ones, so that nothing waits for
// CUDA's legacy default stream by accident.
#include "device.h"
#include "host_memory.h"
#include <cuda_runtime.h>
#include <omp.h>

#define cudaCheck(call) cuda_check((call), __FILE__, __LINE__)

static void cuda_check(cudaError_t error, const char *file, int line) {
    if (error != cudaSuccess) die(EXIT_INTERNAL, "%s:%d: CUDA error %d, %s", file, line, (int)error, cudaGetErrorString(error));
}

static DeviceInfo info;

// ---------------------------------------------------------------------------------------------------------------
// The device

static DeviceInfo device_of(const cudaDeviceProp *properties) {
    DeviceInfo d;
    memset(&d, 0, sizeof d);
    text_escape(d.name, sizeof d.name, properties->name, strlen(properties->name));
    d.is_gpu = true;
    d.compute_capability = properties->major * 10 + properties->minor;
    d.memory_bytes = (int64_t)properties->totalGlobalMem;
    return d;
}

bool device_probe(int index, DeviceInfo *found) {
    int count = 0;
    cudaDeviceProp properties;
    memset(found, 0, sizeof *found);
    if (cudaGetDeviceCount(&count) != cudaSuccess || index < 0 || index >= count || cudaGetDeviceProperties(&properties, index) != cudaSuccess) {
        cudaGetLastError(); // forgotten
        return false;
    }
    *found = device_of(&properties);
    return true;
}

void device_init(int index) {
    int driver = 0, runtime = 0, count = 0;
    cudaCheck(cudaRuntimeGetVersion(&runtime));
    if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
    if (driver == 0)
        die(EXIT_CONFIG, "no NVIDIA driver found, and this program was built for CUDA %d.%d; install the driver, or build with `make BACKEND=cpu`",
            runtime / 1000, runtime % 1000 / 10);
    cudaError_t error = cudaGetDeviceCount(&count);
    // Within a major version an older driver may serve a newer runtime; the runtime itself knows where it may not.
    if (error == cudaErrorInsufficientDriver || driver / 1000 < runtime / 1000)
        die(EXIT_CONFIG, "the NVIDIA driver supports CUDA %d.%d, this program was built for CUDA %d.%d; update the driver, or build with an older toolkit or `make BACKEND=cpu`",
            driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0))
        die(EXIT_CONFIG, "the NVIDIA driver (CUDA %d.%d) shows no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES, or build with `make BACKEND=cpu`",
            driver / 1000, driver % 1000 / 10);
    if (error != cudaSuccess)
        die(EXIT_CONFIG, "the GPUs cannot be listed: CUDA error %d, %s (driver CUDA %d.%d, runtime %d.%d)", (int)error, cudaGetErrorString(error),
            driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (index < 0 || index >= count)
        die(EXIT_CONFIG, "GPU %d was asked for, and this host shows %d; start fewer processes on it, or check CUDA_VISIBLE_DEVICES", index, count);

    cudaDeviceProp properties;
    cudaCheck(cudaGetDeviceProperties(&properties, index));
    if (properties.major < 8) {
        char name[256];
        die(EXIT_CONFIG, "GPU %d, %s, has compute capability %d.%d, and 8.0 (A100, RTX 30) is the least that will do; build with `make BACKEND=cpu`",
            index, text_escape(name, sizeof name, properties.name, strlen(properties.name)), properties.major, properties.minor);
    }
    cudaCheck(cudaSetDevice(index));
    error = cudaFree(NULL); // makes the context now, where a failure can be explained
    if (error != cudaSuccess)
        die(EXIT_CONFIG, "GPU %d cannot be used: CUDA error %d, %s; is another process holding it, or its memory?", index, (int)error, cudaGetErrorString(error));

    info = device_of(&properties);
    info.driver_version = driver;
    info.runtime_version = runtime;
    info.threads = (int)min_i64(omp_get_max_threads(), 4 * (int64_t)omp_get_num_procs()); // a slip in OMP_NUM_THREADS must not end in libgomp's memory
    omp_set_num_threads(info.threads);
}

DeviceInfo device_info(void) { return info; }

// ---------------------------------------------------------------------------------------------------------------
// Memory. CUDA does not say how large a piece is when it comes back, so a list remembers.

typedef struct {
    void *data;
    int64_t bytes;
} Piece;

static Piece *pieces;
static int64_t n_pieces, pieces_room, allocated_bytes, peak_bytes, frees;

void *device_malloc(int64_t bytes) {
    void *p = NULL;
    CHECK(bytes >= 0, "%" PRId64 " bytes", bytes);
    cudaError_t error = cudaMalloc(&p, (size_t)max_i64(bytes, 1)); // aligned to 256 bytes at least
    if (error == cudaErrorMemoryAllocation)
        die(EXIT_CONFIG, "out of GPU memory: %.1f MB asked for, %.1f MB in use by this process, %.1f MB free of %.1f MB; lower the micro-batch, the sequence length or the model",
            (double)bytes * 1e-6, (double)allocated_bytes * 1e-6, (double)device_free_bytes() * 1e-6, (double)info.memory_bytes * 1e-6);
    cudaCheck(error);
    if (n_pieces == pieces_room) {
        int64_t room = pieces_room ? 2 * pieces_room : 256;
        Piece *larger = (Piece *)host_alloc((size_t)room * sizeof(Piece));
        if (n_pieces) memcpy(larger, pieces, (size_t)n_pieces * sizeof(Piece));
        free(pieces);
        pieces = larger;
        pieces_room = room;
    }
    pieces[n_pieces].data = p;
    pieces[n_pieces++].bytes = bytes;
    device_count(bytes);
    return p;
}

void device_free(void *p) {
    if (!p) return;
    for (int64_t i = n_pieces; i-- > 0;) { // what was allocated last is often freed first
        if (pieces[i].data != p) continue;
        allocated_bytes -= pieces[i].bytes;
        pieces[i] = pieces[--n_pieces];
        frees++;
        cudaCheck(cudaFree(p));
        return;
    }
    CHECK(false, "%p did not come from device_malloc", p);
}

void *pinned_malloc(int64_t bytes) {
    void *p = NULL;
    CHECK(bytes >= 0, "%" PRId64 " bytes", bytes);
    cudaError_t error = cudaHostAlloc(&p, (size_t)max_i64(bytes, 1), cudaHostAllocPortable);
    if (error == cudaErrorMemoryAllocation) die(EXIT_CONFIG, "%.1f MB of pinned host memory cannot be had; lower the batch size, or raise the limit on locked memory", (double)bytes * 1e-6);
    cudaCheck(error);
    return p;
}

void pinned_free(void *p) {
    if (p) cudaCheck(cudaFreeHost(p));
}

// cudaHostAlloc would make the pages with one thread.
void *pinned_region_malloc(int64_t bytes, int64_t pinned_bytes, bool *pin) {
    void *p = host_pages_malloc(bytes);
    *pin = *pin && pinned_bytes > 0;
    if (*pin && cudaHostRegister(p, (size_t)pinned_bytes, cudaHostRegisterPortable) != cudaSuccess) {
        cudaGetLastError(); // forgotten
        *pin = false;
    }
    return p;
}

void pinned_region_free(void *p, int64_t bytes, bool pinned) {
    if (!p) return;
    if (pinned && bytes > 0) cudaCheck(cudaHostUnregister(p));
    munmap(p, (size_t)max_i64(bytes, 1));
}

int64_t device_allocated_bytes(void) { return allocated_bytes; }
int64_t device_peak_bytes(void) { return peak_bytes; }
int64_t device_frees(void) { return frees; }
void device_peak_reset(void) { peak_bytes = allocated_bytes; }
void device_count(int64_t bytes) {
    allocated_bytes += bytes;
    peak_bytes = max_i64(peak_bytes, allocated_bytes);
}

int64_t device_free_bytes(void) {
    size_t free_bytes = 0, total = 0;
    cudaCheck(cudaMemGetInfo(&free_bytes, &total));
    return (int64_t)free_bytes;
}

// ---------------------------------------------------------------------------------------------------------------
// Streams and events

Stream stream_create(void) {
    cudaStream_t s;
    cudaCheck(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return (Stream)s;
}

Stream stream_create_urgent(void) {
    int least, greatest;
    cudaStream_t s;
    cudaCheck(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaCheck(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, greatest));
    return (Stream)s;
}

void stream_destroy(Stream s) { cudaCheck(cudaStreamDestroy((cudaStream_t)s)); }
void stream_sync(Stream s) { cudaCheck(cudaStreamSynchronize((cudaStream_t)s)); }
void stream_wait_event(Stream s, Event e) { cudaCheck(cudaStreamWaitEvent((cudaStream_t)s, (cudaEvent_t)e, 0)); }

Event event_create(void) {
    cudaEvent_t e;
    cudaCheck(cudaEventCreate(&e));
    return (Event)e;
}

void event_destroy(Event e) { cudaCheck(cudaEventDestroy((cudaEvent_t)e)); }
void event_record(Event e, Stream s) { cudaCheck(cudaEventRecord((cudaEvent_t)e, (cudaStream_t)s)); }
void event_sync(Event e) { cudaCheck(cudaEventSynchronize((cudaEvent_t)e)); }

double event_elapsed_ms(Event from, Event to) {
    float ms = 0;
    cudaCheck(cudaEventElapsedTime(&ms, (cudaEvent_t)from, (cudaEvent_t)to));
    return ms;
}

// ---------------------------------------------------------------------------------------------------------------
// Copies

void device_copy(void *dst, const void *src, int64_t bytes, CopyKind kind, Stream s) {
    if (bytes == 0) return;
    enum cudaMemcpyKind cuda_kind = kind == COPY_TO_DEVICE ? cudaMemcpyHostToDevice : kind == COPY_TO_HOST ? cudaMemcpyDeviceToHost : cudaMemcpyDeviceToDevice;
    cudaCheck(cudaMemcpyAsync(dst, src, (size_t)bytes, cuda_kind, (cudaStream_t)s));
}

void device_memset(void *p, int byte, int64_t bytes, Stream s) {
    if (bytes) cudaCheck(cudaMemsetAsync(p, byte, (size_t)bytes, (cudaStream_t)s));
}

// ---------------------------------------------------------------------------------------------------------------
// Graphs: what the job enqueues is captured, and instantiated as it is.

Graph graph_record(DeviceJob job, const void *args, int64_t bytes, Stream s) {
    (void)bytes; // kernels' arguments are copied when they are captured
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    // Of this thread alone: others (watch, data) may call CUDA meanwhile.
    cudaCheck(cudaStreamBeginCapture((cudaStream_t)s, cudaStreamCaptureModeThreadLocal));
    job(args);
    cudaCheck(cudaStreamEndCapture((cudaStream_t)s, &graph));
    cudaCheck(cudaGraphInstantiate(&exec, graph, 0));
    cudaCheck(cudaGraphDestroy(graph));
    return (Graph)exec;
}

void graph_launch(Graph g, Stream s) { cudaCheck(cudaGraphLaunch((cudaGraphExec_t)g, (cudaStream_t)s)); }

void graph_free(Graph g) {
    if (g) cudaCheck(cudaGraphExecDestroy((cudaGraphExec_t)g));
}
