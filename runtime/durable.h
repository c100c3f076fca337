// durable.h - the calls that change files and folders so that the change survives a crash, each behind one seam.
//
// Every function returns false on failure and leaves a text in Io.why that names file, call, offset and reason. EINTR and
// short writes are continued here; nothing else is ever tried again. After a failed fsync the kernel may have marked the
// lost pages clean, so that a second fsync would succeed and lie: the file is dead, its owner must give it up.
//
// Names are relative to folders that are held open, created with O_EXCL and never followed through links, so that nobody
// who can write into the folder can lead a write out of it.
//
// The seam: Io.before, if there is one, sees every call before it is made. Tests count calls, record them, end the process
// there, answer with an errno, or shorten a write. It is null in a training run.
#pragma once
#include "utils.h"
#include <dirent.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/statvfs.h>

typedef enum { IO_SPACE, IO_FOLDER, IO_OPEN, IO_CREATE, IO_ALLOCATE, IO_WRITE, IO_SYNC, IO_CLOSE, IO_RENAME, IO_UNLINK, IO_RMDIR } IoOp;
typedef enum { IO_RENAME_NEW, IO_RENAME_OVER, IO_RENAME_SWAP } IoRename; // `to` must not exist, is replaced, changes places

#define IO_NAME_MAX 256

// A call about to be made. Names are relative to the topmost folder, which is "".
typedef struct {
    IoOp op;
    IoRename rename;
    char name[IO_NAME_MAX], to[IO_NAME_MAX];
    const void *data;      // of writes
    int64_t offset, bytes; // of writes and allocations; the hook may lower the bytes of a write
} IoCall;

typedef struct {
    int (*before)(void *ctx, IoCall *call); // 0 = make the call, else the errno that it fails with
    void *ctx;
    int error;             // errno of the last failure, or what the caller says of its own
    char why[400];
} Io;

typedef struct {
    int fd;
    char name[IO_NAME_MAX]; // relative to the topmost folder
    bool direct;            // writes pass the page cache by, see io_direct
} IoHandle;

static inline const char *io_join(char dst[IO_NAME_MAX], const IoHandle *folder, const char *name) {
    int n = snprintf(dst, IO_NAME_MAX, "%s%s%s", folder->name, folder->name[0] ? "/" : "", name);
    CHECK(n < IO_NAME_MAX, "name %s too long", name);
    return dst;
}

// The hook's answer for a call: true = make it. Otherwise errno is set.
static inline bool io_enter(Io *io, IoCall *call) {
    int error = io->before ? io->before(io->ctx, call) : 0;
    errno = error;
    return error == 0;
}

// Notes the failure of a call from errno.
PRINTF_LIKE(3, 4) static inline bool io_failed(Io *io, const char *name, const char *format, ...) {
    io->error = errno;
    char what[128], shown[IO_NAME_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    snprintf(io->why, sizeof io->why, "%s: %s: %s", name[0] ? text_escape(shown, sizeof shown, name, strlen(name)) : "the folder itself",
             what, strerror(io->error));
    return false;
}

static inline bool io_mkdir(Io *io, const IoHandle *folder, const char *name) {
    IoCall call = {IO_FOLDER};
    io_join(call.name, folder, name);
    return (io_enter(io, &call) && mkdirat(folder->fd, name, 0777) == 0) || io_failed(io, call.name, "mkdir");
}

static inline bool io_open_folder(Io *io, const IoHandle *folder, const char *name, IoHandle *opened) {
    IoCall call = {IO_OPEN};
    io_join(call.name, folder, name);
    memcpy(opened->name, call.name, sizeof opened->name);
    opened->fd = -1;
    do opened->fd = io_enter(io, &call) ? openat(folder->fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
    while (opened->fd < 0 && errno == EINTR);
    return opened->fd >= 0 || io_failed(io, call.name, "open");
}

static inline bool io_create(Io *io, const IoHandle *folder, const char *name, IoHandle *file) {
    IoCall call = {IO_CREATE};
    io_join(call.name, folder, name);
    memcpy(file->name, call.name, sizeof file->name);
    file->direct = false;
    file->fd = -1;
    do file->fd = io_enter(io, &call) ? openat(folder->fd, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666) : -1;
    while (file->fd < 0 && errno == EINTR);
    return file->fd >= 0 || io_failed(io, call.name, "create");
}

// Finds a full disk before the first byte is written, where the file system can tell. Not posix_fallocate: where it
// cannot, that would write.
static inline bool io_allocate(Io *io, const IoHandle *file, int64_t bytes) {
    IoCall call = {IO_ALLOCATE};
    memcpy(call.name, file->name, sizeof call.name);
    call.bytes = bytes;
    int result;
    do result = io_enter(io, &call) ? fallocate(file->fd, 0, 0, bytes) : -1;
    while (result != 0 && errno == EINTR);
    return result == 0 || errno == EOPNOTSUPP || errno == ENOSYS || io_failed(io, file->name, "allocate %" PRId64 " bytes", bytes);
}

// Writes go past the page cache from now on, where the file system can: gigabytes that nobody will read soon would push everything
// else out of it. Memory, offsets and lengths should be multiples of 4096; what the file system does not take it gets the other way.
static inline void io_direct(IoHandle *file, bool direct) {
    int flags = fcntl(file->fd, F_GETFL);
    file->direct = flags >= 0 && fcntl(file->fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0 && direct;
}

static inline bool io_write(Io *io, IoHandle *file, const void *data, int64_t bytes, int64_t offset) {
    const char *p = (const char *)data;
    while (bytes > 0) {
        IoCall call = {IO_WRITE};
        memcpy(call.name, file->name, sizeof call.name);
        call.data = p;
        call.offset = offset;
        call.bytes = min_i64(bytes, 8 << 20);
        ssize_t n = io_enter(io, &call) ? pwrite(file->fd, p, (size_t)call.bytes, offset) : -1;
        if (n < 0 && errno == EINVAL && file->direct) { io_direct(file, false); continue; }
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n == 0) errno = EIO;
        if (n <= 0) return io_failed(io, file->name, "write of %" PRId64 " bytes at offset %" PRId64, call.bytes, offset);
        p += n; offset += n; bytes -= n;
    }
    return true;
}

static inline bool io_sync(Io *io, const IoHandle *handle) {
    IoCall call = {IO_SYNC};
    memcpy(call.name, handle->name, sizeof call.name);
    int result;
    do result = io_enter(io, &call) ? fsync(handle->fd) : -1;
    while (result != 0 && errno == EINTR);
    return result == 0 || io_failed(io, handle->name, "fsync");
}

// Network file systems and quotas report here. The descriptor is gone whatever the answer.
static inline bool io_close(Io *io, IoHandle *handle) {
    IoCall call = {IO_CLOSE};
    memcpy(call.name, handle->name, sizeof call.name);
    bool entered = io_enter(io, &call);
    int refused = errno, result = close(handle->fd);
    if (!entered) { errno = refused; result = -1; }
    handle->fd = -1;
    return result == 0 || errno == EINTR || io_failed(io, handle->name, "close");
}

// Renames within one folder. EINVAL: the file system does not know this kind of rename.
static inline bool io_rename(Io *io, const IoHandle *folder, const char *from, const char *to, IoRename kind) {
    IoCall call = {IO_RENAME, kind};
    io_join(call.name, folder, from);
    io_join(call.to, folder, to);
    unsigned flags = kind == IO_RENAME_NEW ? RENAME_NOREPLACE : kind == IO_RENAME_SWAP ? RENAME_EXCHANGE : 0;
    return (io_enter(io, &call) && renameat2(folder->fd, from, folder->fd, to, flags) == 0) || io_failed(io, call.name, "rename to %s", to);
}

static inline bool io_unlink(Io *io, const IoHandle *folder, const char *name, bool is_folder) {
    IoCall call = {is_folder ? IO_RMDIR : IO_UNLINK};
    io_join(call.name, folder, name);
    return (io_enter(io, &call) && unlinkat(folder->fd, name, is_folder ? AT_REMOVEDIR : 0) == 0) || io_failed(io, call.name, "remove");
}

// Bytes that this user may still write; INT64_MAX where the file system does not say.
static inline bool io_space(Io *io, const IoHandle *folder, int64_t *bytes) {
    IoCall call = {IO_SPACE};
    struct statvfs s;
    int result;
    do result = io_enter(io, &call) ? fstatvfs(folder->fd, &s) : -1;
    while (result != 0 && errno == EINTR);
    if (result != 0) return io_failed(io, folder->name, "fstatvfs");
    if (s.f_blocks == 0 || __builtin_mul_overflow((int64_t)s.f_bavail, (int64_t)s.f_frsize, bytes)) *bytes = INT64_MAX;
    return true;
}

// ---------------------------------------------------------------------------------------------------------------
// Folders

// Calls visit(ctx, name) for each entry but "." and "..". False with errno when the folder cannot be read.
static inline bool folder_each(int fd, void (*visit)(void *ctx, const char *name), void *ctx) {
    int again = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); // a position of its own
    DIR *d = again < 0 ? NULL : fdopendir(again);
    if (!d) { if (again >= 0) close(again); return false; }
    struct dirent *e;
    for (errno = 0; (e = readdir(d)); errno = 0)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) visit(ctx, e->d_name);
    int error = errno;
    closedir(d);
    errno = error;
    return error == 0;
}

typedef struct {
    Io *io;
    const IoHandle *folder;
    bool failed;
} RemoveVisit;

static inline void remove_visit(void *ctx, const char *name) {
    RemoveVisit *v = (RemoveVisit *)ctx;
    if (strlen(v->folder->name) + strlen(name) + 2 > IO_NAME_MAX || !io_unlink(v->io, v->folder, name, false)) v->failed = true;
}

// Removes an entry of `folder`: a file or link, or a folder that holds only such.
static inline bool io_remove(Io *io, const IoHandle *folder, const char *name) {
    struct stat st;
    if (fstatat(folder->fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0) return io_failed(io, name, "stat");
    if (!S_ISDIR(st.st_mode)) return io_unlink(io, folder, name, false);
    IoHandle inner;
    if (!io_open_folder(io, folder, name, &inner)) return false;
    RemoveVisit v = {io, &inner, false};
    bool read = folder_each(inner.fd, remove_visit, &v) || io_failed(io, inner.name, "read");
    close(inner.fd);
    return read && !v.failed && io_unlink(io, folder, name, true);
}

// A name that nobody can guess and no earlier run has used.
static inline uint64_t io_nonce(void) {
    uint64_t nonce = 0;
    if (getrandom(&nonce, sizeof nonce, 0) != (ssize_t)sizeof nonce)
        nonce = rng_bits((uint64_t)getpid(), (uint64_t)time(NULL), (uint64_t)(clock_seconds() * 1e9));
    return nonce;
}
