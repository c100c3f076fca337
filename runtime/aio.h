// aio.h - files beside memory: where a rank keeps what it does not need now (offload to NVMe), read and written in the background.
//
// A transfer moves a range of a file from or to a buffer. It is cut into requests of block_size bytes, which threads of the engine
// hand to the kernel, queue_depth at a time, by io_uring (Axboe 2019); past the page cache (O_DIRECT) where the file system
// can, or the states of a model would push everything else out of memory. Where the kernel, the container or the build has no
// io_uring, more threads do the same by pread and pwrite, and a note says so.
//
// The files have no names (O_TMPFILE; elsewhere a random name that is unlinked at once). So nothing is left behind however a run
// ends, nobody else's file can be meant, and runs that share a folder do not meet. They are as long as they will ever be from
// the start, so that a disk that is too full shows then. They are no checkpoints: what they hold ends with the run.
//
// Any thread may start transfers and wait for its own. Failures come back as false with a text in `why` that names folder, what the
// file holds, call, offset and reason; the file's owner then gives up the run.
#pragma once
#include "utils.h"

enum { AIO_ALIGN = 4096, AIO_WHY = 640 }; // bytes: buffers, offsets and lengths are multiples of the first, whatever the disk's sectors

// A request that is about to be made. A test's hook may lower `bytes`, as a kernel may.
typedef struct {
    bool write;
    int64_t offset, bytes;
} AioCall;

typedef struct {
    int64_t block_size;       // bytes of a request; rounded up to AIO_ALIGN
    int queue_depth;          // requests that a thread has in flight
    int intra_op_parallelism; // threads among which the requests of a transfer are shared
    bool single_submit;       // one system call a request, instead of one for all that fit the queue
    bool overlap_events;      // refill the queue while requests are in flight; false: when all of them are done
    bool threads_only;        // no io_uring even where there is one
    int (*before)(void *ctx, AioCall *call); // null, but in tests: sees each request, from any thread; 0, or the errno that it fails with
    void *ctx;
} AioOptions;

typedef struct Aio Aio;

typedef struct {
    int fd;                   // -1: closed
    int64_t bytes;            // multiple of AIO_ALIGN
    char folder[256], holds[64]; // for messages
} AioFile;

// A transfer in flight; it and its buffer stay where they are until aio_wait.
typedef struct AioTransfer {
    const AioFile *file;      // null: none in flight
    bool write;
    char *data;
    int64_t offset, bytes;    // multiples of AIO_ALIGN
    int64_t started, finished; // bytes: handed out as requests; done
    int error;                // errno of the first request that failed
    int64_t error_offset, error_bytes;
    struct AioTransfer *next;
} AioTransfer;

// Starts the engine's threads. Never null.
Aio *aio_create(const AioOptions *o);
void aio_free(Aio *a); // no transfer may be in flight
bool aio_is_uring(const Aio *a);

// Makes a file of `bytes` (rounded up to AIO_ALIGN; reading what was never written gives zeros) in `folder`, which must exist. `holds`
// says what will be in it.
bool aio_open(AioFile *f, const char *folder, const char *holds, int64_t bytes, char why[AIO_WHY]);
void aio_close(AioFile *f); // and it is gone; a closed one may be closed again

// Starts a transfer of bytes [offset, offset + bytes) of the file. offset and data are multiples of AIO_ALIGN, and the buffer and
// the file have room for `bytes` rounded up to it. Transfers that are in flight together may happen in any order.
void aio_read(Aio *a, AioTransfer *t, const AioFile *f, void *data, int64_t offset, int64_t bytes);
void aio_write(Aio *a, AioTransfer *t, const AioFile *f, const void *data, int64_t offset, int64_t bytes);
// Waits for it; at once if none is in flight.
bool aio_wait(Aio *a, AioTransfer *t, char why[AIO_WHY]);
