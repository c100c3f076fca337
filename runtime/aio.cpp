// aio.cpp - see aio.h. Transfers wait in a list, oldest first; each thread takes requests from it.
//
// A short read or write is continued where it stopped. After an error the rest of the transfer is not begun any more; its
// other requests are waited for, since the kernel still writes into the buffer.
#include "aio.h"
#include "durable.h"
#include "thread.h"
#ifdef AIO_URING
#include <liburing.h>
#endif

enum { THREADS_MAX = 64, SHORT_MAX = 1000 };

// A piece of a transfer that one thread has taken.
typedef struct {
    AioTransfer *transfer; // null: a free place
    char *data;
    int64_t offset, bytes; // that are still to be moved
    int shorts;            // how often it came back unfinished
} AioRequest;

typedef struct {
    Aio *engine;
    pthread_t thread;
    AioRequest *request;   // (queue_depth), in flight; of one without io_uring
    int in_flight;
#ifdef AIO_URING
    struct io_uring ring;
#endif
} AioThread;

struct Aio {
    AioOptions opt;
    bool uring, ends;
    int n_threads;
    AioThread thread[THREADS_MAX];
    pthread_mutex_t lock;         // guards what follows, and the transfers in flight
    pthread_cond_t work, done;    // `first` or `ends` has changed; a transfer is finished
    AioTransfer *first, *last;    // with requests that nobody has taken
};

// ---------------------------------------------------------------------------------------------------------------
// Requests

// Takes the next request, if there is one. With `waits` not before there is one; then null means the end.
static bool request_take(Aio *a, AioRequest *r, bool waits) {
    pthread_mutex_lock(&a->lock);
    while (waits && !a->first && !a->ends) pthread_cond_wait(&a->work, &a->lock);
    AioTransfer *t = a->first;
    if (t) {
        r->transfer = t;
        r->data = t->data + t->started;
        r->offset = t->offset + t->started;
        r->bytes = min_i64(a->opt.block_size, t->bytes - t->started);
        r->shorts = 0;
        t->started += r->bytes;
        if (t->started == t->bytes) {
            a->first = t->next;
            if (!a->first) a->last = NULL;
        }
    }
    pthread_mutex_unlock(&a->lock);
    return t != NULL;
}

// Takes what a call answered: bytes moved, or -errno. True: the request is over, well or badly, and its place is free; false: the rest
// of it must be asked for again.
static bool request_answered(Aio *a, AioRequest *r, int64_t result) {
    AioTransfer *t = r->transfer;
    if (result == -EINTR || result == -EAGAIN) result = 0;
    else if (result == 0 && !t->write) result = -EIO; // the file ends too early
    int64_t moved = max_i64(result, 0) / AIO_ALIGN * AIO_ALIGN;
    if (result >= 0 && moved < r->bytes && r->shorts++ < SHORT_MAX) {
        pthread_mutex_lock(&a->lock);
        t->finished += moved;
        bool stops = t->error != 0;
        pthread_mutex_unlock(&a->lock);
        r->data += moved;
        r->offset += moved;
        r->bytes -= moved;
        if (!stops) return false;
        result = -ECANCELED;
    }
    pthread_mutex_lock(&a->lock);
    if (result < r->bytes && t->error == 0) {
        t->error = result < 0 ? (int)-result : EIO;
        t->error_offset = r->offset;
        t->error_bytes = r->bytes;
        for (AioTransfer **p = &a->first, *before = NULL; *p; before = *p, p = &(*p)->next) // nothing more of it is begun
            if (*p == t) {
                t->finished += t->bytes - t->started;
                t->started = t->bytes;
                if (a->last == t) a->last = before;
                *p = t->next;
                break;
            }
    }
    t->finished += r->bytes;
    if (t->finished == t->bytes) pthread_cond_broadcast(&a->done);
    pthread_mutex_unlock(&a->lock);
    r->transfer = NULL;
    return true;
}

// The hook's answer: bytes that may be asked for, or -errno.
static int64_t request_allowed(Aio *a, const AioRequest *r) {
    AioCall call = {r->transfer->write, r->offset, r->bytes};
    int refused = a->opt.before ? a->opt.before(a->opt.ctx, &call) : 0;
    return refused ? -refused : call.bytes;
}

// ---------------------------------------------------------------------------------------------------------------
// Threads

// One request after the other.
static void *thread_pread(void *arg) {
    AioThread *t = (AioThread *)arg;
    Aio *a = t->engine;
    AioRequest r = {};
    while (request_take(a, &r, true))
        for (;;) {
            int64_t n = request_allowed(a, &r);
            if (n > 0) {
                int fd = r.transfer->file->fd;
                n = r.transfer->write ? pwrite(fd, r.data, (size_t)n, r.offset) : pread(fd, r.data, (size_t)n, r.offset);
                if (n < 0) n = -errno;
            }
            if (request_answered(a, &r, n)) break;
        }
    return NULL;
}

#ifdef AIO_URING
// Hands a request to the ring; false: it was answered at once and is over.
static bool uring_prepare(AioThread *t, AioRequest *r) {
    Aio *a = t->engine;
    for (;;) {
        int64_t n = request_allowed(a, r);
        if (n > 0) {
            struct io_uring_sqe *e = io_uring_get_sqe(&t->ring);
            CHECK(e, "no room in a ring of %d with %d requests in flight", a->opt.queue_depth, t->in_flight);
            int fd = r->transfer->file->fd;
            if (r->transfer->write) io_uring_prep_write(e, fd, r->data, (unsigned)n, (uint64_t)r->offset);
            else io_uring_prep_read(e, fd, r->data, (unsigned)n, (uint64_t)r->offset);
            io_uring_sqe_set_data(e, r);
            t->in_flight++;
            return true;
        }
        if (request_answered(a, r, n)) return false;
    }
}

static void uring_submit(AioThread *t) {
    int n;
    do n = io_uring_submit(&t->ring);
    while (n == -EINTR || n == -EAGAIN || n == -EBUSY);
    if (n < 0) die(EXIT_IO, "io_uring_submit: %s", strerror(-n));
}

// Waits for a request in flight, and takes all answers that are there.
static void uring_reap(AioThread *t) {
    struct io_uring_cqe *c;
    int error = io_uring_wait_cqe(&t->ring, &c);
    if (error == -EINTR || error == -EAGAIN) return;
    if (error < 0) die(EXIT_IO, "io_uring_wait_cqe: %s", strerror(-error));
    do {
        AioRequest *r = (AioRequest *)io_uring_cqe_get_data(c);
        int64_t result = c->res;
        io_uring_cqe_seen(&t->ring, c);
        t->in_flight--;
        if (!request_answered(t->engine, r, result) && uring_prepare(t, r)) uring_submit(t);
    } while (io_uring_peek_cqe(&t->ring, &c) == 0);
}

// Fills the free places of the queue; waits for work when nothing is in flight. False: there is none, and will be none.
static bool uring_fill(AioThread *t) {
    Aio *a = t->engine;
    int prepared = 0;
    for (int i = 0; i < a->opt.queue_depth; i++) {
        AioRequest *r = &t->request[i];
        if (r->transfer) continue;
        bool idle = t->in_flight == 0;
        if (!request_take(a, r, idle)) {
            if (idle) return false;
            break;
        }
        if (uring_prepare(t, r)) prepared++;
        if (prepared && a->opt.single_submit) { uring_submit(t); prepared = 0; }
    }
    if (prepared) uring_submit(t);
    return true;
}

// A new transfer is noticed when a request is answered, or when none is in flight.
static void *thread_uring(void *arg) {
    AioThread *t = (AioThread *)arg;
    for (;;) {
        if ((t->engine->opt.overlap_events || t->in_flight == 0) && !uring_fill(t)) return NULL;
        if (t->in_flight > 0) uring_reap(t);
    }
}

// 0, or why this kernel or container has no io_uring that will do (Linux 5.6).
static int uring_open(AioThread *t) {
    int error = -io_uring_queue_init((unsigned)t->engine->opt.queue_depth, &t->ring, 0);
    if (error) return error;
    struct io_uring_probe *probe = io_uring_get_probe_ring(&t->ring);
    bool knows = probe && io_uring_opcode_supported(probe, IORING_OP_READ) && io_uring_opcode_supported(probe, IORING_OP_WRITE);
    io_uring_free_probe(probe);
    if (!knows) io_uring_queue_exit(&t->ring);
    return knows ? 0 : ENOSYS;
}
#endif

// One thread with a ring for each intra_op_parallelism. False with errno, and nothing is open, where there are no rings.
static bool uring_open_all(Aio *a) {
#ifdef AIO_URING
    for (int i = 0; i < a->n_threads; i++) {
        int error = uring_open(&a->thread[i]);
        if (!error) continue;
        while (--i >= 0) io_uring_queue_exit(&a->thread[i].ring);
        errno = error;
        return false;
    }
    return true;
#else
    (void)a;
    errno = 0; // the build has none
    return false;
#endif
}

static void *thread_main(void *arg) {
#ifdef AIO_URING
    if (((AioThread *)arg)->engine->uring) return thread_uring(arg);
#endif
    return thread_pread(arg);
}

Aio *aio_create(const AioOptions *o) {
    Aio *a = (Aio *)host_alloc(sizeof *a);
    a->opt = *o;
    a->opt.block_size = round_up(min_i64(max_i64(o->block_size, 1), 1 << 30), AIO_ALIGN);
    a->opt.queue_depth = (int)min_i64(max_i64(o->queue_depth, 1), 4096);
    a->n_threads = (int)min_i64(max_i64(o->intra_op_parallelism, 1), THREADS_MAX);
    pthread_mutex_init(&a->lock, NULL);
    pthread_cond_init(&a->work, NULL);
    pthread_cond_init(&a->done, NULL);
    for (int i = 0; i < THREADS_MAX; i++) a->thread[i].engine = a;
    a->uring = !o->threads_only && uring_open_all(a);
    if (!a->uring) {
        if (!o->threads_only) note("%s%s; offloaded states are read and written by threads instead", errno ? "no io_uring here: " : "this build is without io_uring (liburing-dev was not there)", errno ? strerror(errno) : "");
        a->n_threads = (int)min_i64((int64_t)a->n_threads * a->opt.queue_depth, THREADS_MAX);
    }
    for (int i = 0; i < a->n_threads; i++) {
        AioThread *t = &a->thread[i];
        t->request = (AioRequest *)host_alloc(sizeof(AioRequest) * (size_t)a->opt.queue_depth);
        int error = thread_start(&t->thread, thread_main, t);
        if (error) die(EXIT_IO, "no thread for reading and writing files: %s", strerror(error));
    }
    return a;
}

void aio_free(Aio *a) {
    pthread_mutex_lock(&a->lock);
    CHECK(!a->first, "an engine is freed while transfers wait");
    a->ends = true;
    pthread_cond_broadcast(&a->work);
    pthread_mutex_unlock(&a->lock);
    for (int i = 0; i < a->n_threads; i++) {
        pthread_join(a->thread[i].thread, NULL);
#ifdef AIO_URING
        if (a->uring) io_uring_queue_exit(&a->thread[i].ring);
#endif
        free(a->thread[i].request);
    }
    pthread_cond_destroy(&a->done);
    pthread_cond_destroy(&a->work);
    pthread_mutex_destroy(&a->lock);
    free(a);
}

bool aio_is_uring(const Aio *a) { return a->uring; }

// ---------------------------------------------------------------------------------------------------------------
// Files

// A file without a name in `folder`; -1 with errno.
static int open_unnamed(const char *folder, int flags) {
    int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return fd;
    int at = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC); // a file system that knows only files with names
    if (at < 0) return -1;
    char name[64];
    snprintf(name, sizeof name, ".offload-%016" PRIx64, io_nonce());
    fd = openat(at, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | flags, 0600);
    int error = errno;
    if (fd >= 0) unlinkat(at, name, 0);
    close(at);
    errno = error;
    return fd;
}

// From errno. Keeps errno.
PRINTF_LIKE(3, 4) static bool file_failed(const AioFile *f, char why[AIO_WHY], const char *format, ...) {
    int error = errno;
    char what[160], shown[300];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    snprintf(why, AIO_WHY, "%s, the file of %s: %s: %s", text_escape(shown, sizeof shown, f->folder, strlen(f->folder)), f->holds, what, strerror(error));
    errno = error;
    return false;
}

bool aio_open(AioFile *f, const char *folder, const char *holds, int64_t bytes, char why[AIO_WHY]) {
    memset(f, 0, sizeof *f);
    snprintf(f->folder, sizeof f->folder, "%s", folder);
    snprintf(f->holds, sizeof f->holds, "%s", holds);
    f->bytes = round_up(max_i64(bytes, 1), AIO_ALIGN);
    f->fd = open_unnamed(folder, O_DIRECT);
    if (f->fd < 0 && errno == EINVAL) {
        f->fd = open_unnamed(folder, 0);
        if (f->fd >= 0) note("%s: its file system keeps offloaded states in the page cache, too (no O_DIRECT)", f->folder);
    }
    if (f->fd < 0) return file_failed(f, why, "create");
    // First of all a question: to try would fill the disk for a moment, and others write to it, too.
    struct statvfs s;
    const bool known = fstatvfs(f->fd, &s) == 0 && s.f_blocks > 0;
    const double free_bytes = known ? (double)s.f_bavail * (double)s.f_frsize : 0;
    int result = known && free_bytes < (double)f->bytes ? -1 : 0;
    if (result != 0) errno = ENOSPC;
    else do result = fallocate(f->fd, 0, 0, f->bytes);
    while (result != 0 && errno == EINTR);
    if (result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) result = ftruncate(f->fd, f->bytes); // room is found, or not, when it is written
    struct stat st;
    if (result == 0 && fstat(f->fd, &st) == 0 && st.st_size == f->bytes) return true;
    if (result == 0) errno = EIO;
    file_failed(f, why, "room for %" PRId64 " bytes (%.2f GB; %.2f GB are free)", f->bytes, (double)f->bytes * 1e-9, free_bytes * 1e-9);
    int error = errno;
    aio_close(f);
    errno = error;
    return false;
}

void aio_close(AioFile *f) {
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
}

// ---------------------------------------------------------------------------------------------------------------
// Transfers

static void transfer_start(Aio *a, AioTransfer *t, const AioFile *f, bool write, void *data, int64_t offset, int64_t bytes) {
    CHECK(!t->file, "a transfer is started again before it was waited for");
    CHECK((uintptr_t)data % AIO_ALIGN == 0 && offset % AIO_ALIGN == 0, "transfer of %s: memory %p, offset %" PRId64, f->holds, data, offset);
    bytes = round_up(bytes, AIO_ALIGN);
    CHECK(offset >= 0 && bytes >= 0 && offset <= f->bytes - bytes, "transfer of %s: %" PRId64 " bytes at %" PRId64 " of %" PRId64, f->holds, bytes, offset, f->bytes);
    if (bytes == 0) return;
    memset(t, 0, sizeof *t);
    t->file = f;
    t->write = write;
    t->data = (char *)data;
    t->offset = offset;
    t->bytes = bytes;
    pthread_mutex_lock(&a->lock);
    *(a->last ? &a->last->next : &a->first) = t;
    a->last = t;
    pthread_cond_broadcast(&a->work);
    pthread_mutex_unlock(&a->lock);
}

void aio_read(Aio *a, AioTransfer *t, const AioFile *f, void *data, int64_t offset, int64_t bytes) { transfer_start(a, t, f, false, data, offset, bytes); }
void aio_write(Aio *a, AioTransfer *t, const AioFile *f, const void *data, int64_t offset, int64_t bytes) { transfer_start(a, t, f, true, (void *)data, offset, bytes); }

bool aio_wait(Aio *a, AioTransfer *t, char why[AIO_WHY]) {
    const AioFile *f = t->file;
    if (!f) return true;
    pthread_mutex_lock(&a->lock);
    while (t->finished < t->bytes) pthread_cond_wait(&a->done, &a->lock);
    pthread_mutex_unlock(&a->lock);
    t->file = NULL;
    if (t->error == 0) return true;
    errno = t->error;
    return file_failed(f, why, "%s of %" PRId64 " bytes at offset %" PRId64, t->write ? "write" : "read", t->error_bytes, t->error_offset);
}
