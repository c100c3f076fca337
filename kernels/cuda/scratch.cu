// scratch.cu - scratch memory of the CUDA backend, one piece a stream.
#include "attention.cuh"
#include "hopper.cuh"
#include "matmul_hopper.cuh"

// Large enough for what cuBLASLt wants and for most partial sums, so that growing is rare.
static const int64_t SCRATCH_BYTES_MIN = 32 << 20;

typedef struct {
    Stream stream;
    void *data;
    int64_t bytes;
} Scratch;

enum { SCRATCH_MAX = 64 };
static Scratch scratch[SCRATCH_MAX];
static int n_scratch;

static int64_t piece_bytes(int64_t bytes) { return round_up(max_i64(bytes, SCRATCH_BYTES_MIN), 1 << 20); }

// The largest of what the launchers ask for; the number of multiprocessors counts where they size their grids by it.
int64_t cuda::scratch_bytes(int64_t rows, int64_t C, int64_t F, int64_t B, int64_t T, int64_t NH, int64_t HS) {
    const int64_t f32 = (int64_t)sizeof(float);
    int devices = 0;
    const bool present = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
    const int64_t sms = present ? sm_count() : 132; // without a device: an H200's
    cudaGetLastError(); // forgotten
    // Compute capability 9.0 asks for more than the other kernels.
    const bool hopper = !present || hopper_available();
    const int64_t attention_backward = hopper ? attention_backward_hopper_scratch(B * NH, T, HS, sms) : B * T * NH * f32;
    const int64_t gelu_backward = hopper ? matmul_hopper_partials(rows) * F * f32 : 0;
    const int64_t layernorm_backward = sms * 4 * COLUMN_SUMS * C * f32;
    // Up to four lists of tokens, sums of chunks of 32 tokens, and the sort, which keeps a second copy of keys and values.
    const int64_t embedding_backward = 4 * rows * 4 + rows / 32 * 2 * C * f32 + 9 * rows + (1 << 20);
    return piece_bytes(max_i64(max_i64(attention_backward, layernorm_backward), max_i64(embedding_backward, gelu_backward)));
}

void cuda::scratch_reserve(int64_t bytes, Stream stream) { scratch_get(bytes, stream); }

void cuda::scratch_release(Stream stream) {
    for (int i = 0; i < n_scratch; i++)
        if (scratch[i].stream == stream) {
            device_free(scratch[i].data);
            scratch[i] = scratch[--n_scratch];
            return;
        }
}

void *scratch_get(int64_t bytes, Stream stream) {
    CHECK(stream, "null stream");
    Scratch *s = NULL;
    for (int i = 0; i < n_scratch; i++) if (scratch[i].stream == stream) s = &scratch[i];
    if (!s) {
        if (n_scratch == SCRATCH_MAX) { // most are of streams that were destroyed; the rest come back when they are asked for
            cudaCheck(cudaDeviceSynchronize());
            for (int i = 0; i < n_scratch; i++) device_free(scratch[i].data);
            n_scratch = 0;
        }
        s = &scratch[n_scratch++];
        s->stream = stream;
        s->data = NULL;
        s->bytes = 0;
    }
    if (s->bytes < bytes || !s->data) {
        if (s->data) {
            stream_sync(stream); // kernels that were enqueued before may still use the old piece
            device_free(s->data);
        }
        s->bytes = piece_bytes(bytes);
        s->data = device_malloc(s->bytes);
    }
    return s->data;
}
