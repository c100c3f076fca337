// bench_aio.cpp - the rate at which offloaded states are written, read, and both at once, as an update does. Built and run by
// scripts/bench_aio.sh, beside dd with O_DIRECT. Random data; the file is past the page cache.
#include "../runtime/aio.h"

enum { BUFFERS = 4, BUFFER_BYTES = 64 << 20 };

typedef struct {
    Aio *a;
    AioFile f;
    char *data[2 * BUFFERS];
    AioTransfer t[2 * BUFFERS];
} Bench;

static void wait_for(Bench *b, int i) {
    char why[AIO_WHY];
    if (!aio_wait(b->a, &b->t[i], why)) die(EXIT_IO, "%s", why);
}

// GB/s of one pass over the file with BUFFERS transfers of each wanted direction in flight; both count when both are wanted.
static double pass(Bench *b, bool reads, bool writes) {
    const double start = clock_seconds();
    const int64_t n = b->f.bytes / BUFFER_BYTES;
    for (int64_t i = 0; i < n; i++) {
        const int r = (int)(i % BUFFERS), w = BUFFERS + r;
        wait_for(b, r);
        wait_for(b, w);
        if (reads) aio_read(b->a, &b->t[r], &b->f, b->data[r], i * BUFFER_BYTES, BUFFER_BYTES);
        if (writes) aio_write(b->a, &b->t[w], &b->f, b->data[w], (reads ? (i + n - BUFFERS) % n : i) * BUFFER_BYTES, BUFFER_BYTES); // behind the reads
    }
    for (int i = 0; i < 2 * BUFFERS; i++) wait_for(b, i);
    return (double)(n * BUFFER_BYTES) * (reads + writes) / (clock_seconds() - start) * 1e-9;
}

int main(int argc, char **argv) {
    if (argc < 3) die(EXIT_CONFIG, "usage: bench_aio FOLDER GB [block_size [queue_depth [intra_op_parallelism [1 = threads [passes]]]]]");
    static Bench bench;
    Bench *b = &bench;
    char why[AIO_WHY];
    AioOptions o = {.block_size = argc > 3 ? atoll(argv[3]) : 1 << 20, .queue_depth = argc > 4 ? atoi(argv[4]) : 8, .intra_op_parallelism = argc > 5 ? atoi(argv[5]) : 1,
                    .overlap_events = true, .threads_only = argc > 6 && atoi(argv[6]) == 1};
    const int64_t bytes = max_i64((int64_t)(atof(argv[2]) * 1e9) / BUFFER_BYTES, 2 * BUFFERS) * BUFFER_BYTES;
    if (!aio_open(&b->f, argv[1], "the benchmark", bytes, why)) die(EXIT_IO, "%s", why);
    b->a = aio_create(&o);
    for (int i = 0; i < 2 * BUFFERS; i++) {
        b->data[i] = (char *)aligned_alloc(AIO_ALIGN, BUFFER_BYTES);
        for (int64_t k = 0; k < BUFFER_BYTES; k += 8) {
            const uint64_t bits = rng_bits(1, (uint64_t)i, (uint64_t)k);
            memcpy(b->data[i] + k, &bits, 8);
        }
    }
    printf("%s, block_size %" PRId64 ", queue_depth %d, intra_op_parallelism %d, %.1f GB:", aio_is_uring(b->a) ? "io_uring" : "threads", o.block_size, o.queue_depth, o.intra_op_parallelism, (double)bytes * 1e-9);
    const int passes = argc > 7 ? atoi(argv[7]) : 3;
    pass(b, false, true);
    for (int k = 0; k < passes; k++) {
        const double w = pass(b, false, true), r = pass(b, true, false), both = pass(b, true, true);
        printf("  write %.2f read %.2f both %.2f", w, r, both);
    }
    printf(" GB/s\n");
    aio_free(b->a);
    aio_close(&b->f);
    return 0;
}
