// scratch.cu - scratch memory of the CUDA backend, one piece a stream.
#include "common.cuh"

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

void *scratch_get(int64_t bytes, Stream stream) {
    CHECK(stream, "null stream");
    Scratch *s = NULL;
    for (int i = 0; i < n_scratch; i++) if (scratch[i].stream == stream) s = &scratch[i];
    if (!s) {
        if (n_scratch == SCRATCH_MAX) { // entries of destroyed streams; the rest come back when they are asked for
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
        s->bytes = round_up(max_i64(bytes, SCRATCH_BYTES_MIN), 1 << 20);
        s->data = device_malloc(s->bytes);
    }
    return s->data;
}
