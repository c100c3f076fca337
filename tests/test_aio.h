// test_aio.h - section "aio": files beside memory, by io_uring and by threads: what was written is read back, whatever the sizes, the
// options and the kernel's shortcomings; a failure names what failed.
#pragma once
#include "harness.h"
#include "dies.h"
#include "../runtime/aio.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static char aio_folder[64];
static const char *aio_test_folder(void) {
    if (!aio_folder[0]) {
        snprintf(aio_folder, sizeof aio_folder, "%s/aio-test-XXXXXX", getenv("TMPDIR") && strlen(getenv("TMPDIR")) < 40 ? getenv("TMPDIR") : "/tmp");
        if (!mkdtemp(aio_folder)) die(EXIT_CANTCREAT, "%s: %s", aio_folder, strerror(errno));
    }
    return aio_folder;
}
static void aio_test_end(void) {
    if (aio_folder[0]) rmdir(aio_folder);
    aio_folder[0] = 0;
}

static char *aio_buffer(int64_t bytes) {
    char *p = (char *)aligned_alloc(AIO_ALIGN, (size_t)round_up(max_i64(bytes, 1), AIO_ALIGN));
    CHECK(p, "no memory for %" PRId64 " bytes", bytes);
    memset(p, 0x5a, (size_t)round_up(max_i64(bytes, 1), AIO_ALIGN));
    return p;
}
static void aio_pattern(char *p, int64_t bytes, uint64_t seed) {
    for (int64_t i = 0; i < bytes; i += 8) {
        const uint64_t bits = rng_bits(seed, 1, (uint64_t)i);
        memcpy(p + i, &bits, (size_t)min_i64(8, bytes - i));
    }
}

enum { AIO_PARTS = 5 };
static const int64_t aio_sizes[AIO_PARTS] = {1, 511, 513, 4097, 28824000};

// Writes five ranges at once, reads them back in another order, then once more with both directions in flight.
static void aio_round_trip(Test *t, const AioOptions *o) {
    char why[AIO_WHY] = "";
    AioFile f;
    if (!aio_open(&f, aio_test_folder(), "the test", 64 << 20, why)) { test_fail(t, "%s", why); return; }
    Aio *a = aio_create(o);
    AioTransfer w[AIO_PARTS] = {}, r[AIO_PARTS] = {};
    char *out[AIO_PARTS], *in[AIO_PARTS];
    int64_t offset[AIO_PARTS], at = 3 * AIO_ALIGN;
    for (int i = 0; i < AIO_PARTS; i++) {
        out[i] = aio_buffer(aio_sizes[i]);
        in[i] = aio_buffer(aio_sizes[i]);
        aio_pattern(out[i], aio_sizes[i], (uint64_t)i);
        offset[i] = at;
        at += round_up(aio_sizes[i], AIO_ALIGN) + AIO_ALIGN;
        aio_write(a, &w[i], &f, out[i], offset[i], aio_sizes[i]);
    }
    for (int i = 0; i < AIO_PARTS; i++) expect_true(t, aio_wait(a, &w[i], why), "%s", why);
    for (int i = AIO_PARTS - 1; i >= 0; i--) aio_read(a, &r[i], &f, in[i], offset[i], aio_sizes[i]);
    for (int i = 0; i < AIO_PARTS; i++) {
        expect_true(t, aio_wait(a, &r[i], why), "%s", why);
        expect_same_bytes(t, "what was read back", in[i], out[i], aio_sizes[i]);
    }
    aio_pattern(out[4], aio_sizes[4], 99); // new contents for the largest, while another range is read
    aio_write(a, &w[4], &f, out[4], offset[4], aio_sizes[4]);
    memset(in[3], 0, (size_t)aio_sizes[3]);
    aio_read(a, &r[3], &f, in[3], offset[3], aio_sizes[3]);
    expect_true(t, aio_wait(a, &r[3], why) && aio_wait(a, &w[4], why), "%s", why);
    expect_same_bytes(t, "what was read beside a write", in[3], out[3], aio_sizes[3]);
    aio_read(a, &r[4], &f, in[4], offset[4], aio_sizes[4]);
    aio_read(a, &r[0], &f, in[0], 40 << 20, AIO_ALIGN);
    expect_true(t, aio_wait(a, &r[4], why) && aio_wait(a, &r[0], why), "%s", why);
    expect_same_bytes(t, "what was written anew", in[4], out[4], aio_sizes[4]);
    int64_t nonzero = 0;
    for (int64_t i = 0; i < AIO_ALIGN; i++) nonzero += in[0][i] != 0;
    expect_equal_i64(t, "bytes that nobody wrote and are not 0", nonzero, 0);
    aio_free(a);
    aio_close(&f);
    for (int i = 0; i < AIO_PARTS; i++) { free(out[i]); free(in[i]); }
}

static void test_aio_round_trips(Test *t) {
    static const AioOptions options[] = {
        {.block_size = 1 << 20, .queue_depth = 8, .intra_op_parallelism = 1, .overlap_events = true},
        {.block_size = 1 << 20, .queue_depth = 8, .intra_op_parallelism = 1, .single_submit = true},
        {.block_size = 300000, .queue_depth = 3, .intra_op_parallelism = 3, .overlap_events = true},
        {.block_size = 1, .queue_depth = 64, .intra_op_parallelism = 2, .single_submit = true, .overlap_events = true},
        {.block_size = 1 << 30, .queue_depth = 1, .intra_op_parallelism = 1},
    };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        for (int threads = 0; threads < 2; threads++) {
            AioOptions o = options[i];
            o.threads_only = threads;
            aio_round_trip(t, &o);
        }
    aio_test_end();
}

// A kernel that does less than it is asked to, or is interrupted: one request in three.
static int aio_short_hook(void *ctx, AioCall *call) {
    int64_t n = __atomic_add_fetch((int64_t *)ctx, 1, __ATOMIC_RELAXED);
    if (n % 7 == 0) return EINTR;
    if (n % 3 == 0) call->bytes = max_i64(call->bytes / 2 / AIO_ALIGN, 1) * AIO_ALIGN; // 0 would be the end of the file
    return 0;
}
static void test_aio_short(Test *t) {
    for (int threads = 0; threads < 2; threads++) {
        int64_t calls = 0;
        AioOptions o = {.block_size = 1 << 17, .queue_depth = 4, .intra_op_parallelism = 2, .overlap_events = true, .threads_only = threads == 1, .before = aio_short_hook, .ctx = &calls};
        aio_round_trip(t, &o);
        expect_true(t, calls > 1000, "only %" PRId64 " requests", calls);
    }
    aio_test_end();
}

// What fails at one place: the transfer over it fails, naming folder, file, call, offset and reason; the others do not.
static int aio_fail_hook(void *ctx, AioCall *call) {
    const AioCall *at = (const AioCall *)ctx;
    return call->write == at->write && call->offset <= at->offset && at->offset < call->offset + call->bytes ? (int)at->bytes : 0;
}
static void test_aio_failures(Test *t) {
    static const struct { bool write; int error; const char *reason; } rows[] = {{true, ENOSPC, "No space left on device"}, {true, EIO, "Input/output error"}, {false, EIO, "Input/output error"}};
    const int64_t bytes = 10 << 20;
    char *data = aio_buffer(bytes), why[AIO_WHY];
    aio_pattern(data, bytes, 5);
    for (int k = 0; k < 6; k++) {
        AioCall at = {rows[k / 2].write, 5 << 20, rows[k / 2].error};
        AioOptions o = {.block_size = 1 << 20, .queue_depth = 4, .intra_op_parallelism = 2, .overlap_events = true, .threads_only = k % 2 == 1, .before = aio_fail_hook, .ctx = &at};
        AioFile f;
        if (!aio_open(&f, aio_test_folder(), "the states of rank 7", 2 * bytes, why)) { test_fail(t, "%s", why); return; }
        Aio *a = aio_create(&o);
        AioTransfer bad = {}, good = {};
        if (at.write) {
            aio_write(a, &bad, &f, data, 0, bytes);
            aio_write(a, &good, &f, data, bytes, bytes);
        } else {
            aio_read(a, &bad, &f, data, 0, bytes);
            aio_read(a, &good, &f, data, bytes, bytes);
        }
        why[0] = 0;
        expect_true(t, !aio_wait(a, &bad, why), "a transfer over a bad place succeeded");
        expect_contains(t, "the message", why, aio_test_folder());
        expect_contains(t, "the message", why, "the states of rank 7");
        expect_contains(t, "the message", why, at.write ? "write of 1048576 bytes at offset 5242880" : "read of 1048576 bytes at offset 5242880");
        expect_contains(t, "the message", why, rows[k / 2].reason);
        expect_true(t, aio_wait(a, &good, why), "the transfer beside it: %s", why);
        aio_free(a);
        aio_close(&f);
    }
    free(data);
    aio_test_end();
}

// Folders that are not there, not writable, or too full: refused before anything is written.
static void test_aio_refusals(Test *t) {
    char why[AIO_WHY] = "";
    AioFile f;
    expect_true(t, !aio_open(&f, "/no/such/folder", "states", 1, why) && f.fd < 0, "a folder that is not there");
    expect_contains(t, "the message", why, "/no/such/folder, the file of states: create: No such file or directory");
    struct statvfs s;
    if (statvfs(aio_test_folder(), &s) == 0 && s.f_blocks > 0) {
        const int64_t bytes = (int64_t)s.f_bavail * (int64_t)s.f_frsize + ((int64_t)1 << 33);
        expect_true(t, !aio_open(&f, aio_test_folder(), "states", bytes, why), "%" PRId64 " bytes were found", bytes);
        expect_contains(t, "the message", why, "are free): No space left on device");
    }
    aio_test_end();
}

static int aio_descriptors(void) {
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}
static void aio_count_entry(void *ctx, const char *) { ++*(int *)ctx; }
// The files have no names, and nothing stays open.
static void test_aio_leaves_nothing(Test *t) {
    AioOptions o = {.block_size = 1 << 16, .queue_depth = 4, .intra_op_parallelism = 3, .overlap_events = true};
    char *data = aio_buffer(1 << 20), why[AIO_WHY] = "";
    const int before = aio_descriptors();
    for (int i = 0; i < 40; i++) {
        o.threads_only = i % 2;
        AioFile f;
        AioTransfer w = {};
        expect_true(t, aio_open(&f, aio_test_folder(), "states", 1 << 20, why), "%s", why);
        Aio *a = aio_create(&o);
        aio_write(a, &w, &f, data, 0, 1 << 20);
        expect_true(t, aio_wait(a, &w, why), "%s", why);
        int entries = 0, at = open(aio_test_folder(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        folder_each(at, aio_count_entry, &entries);
        close(at);
        expect_equal_i64(t, "files that the folder shows", entries, 0);
        aio_free(a);
        aio_close(&f);
        aio_close(&f);
    }
    expect_equal_i64(t, "open descriptors", aio_descriptors(), before);
    free(data);
    aio_test_end();
}

// A container that forbids io_uring.
static void aio_forbidden(void *arg) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 425, 0, 1), // io_uring_setup, the same number on all machines
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {4, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) _exit(99);
    message_rank = 0;
    Test t = {};
    aio_round_trip(&t, (const AioOptions *)arg);
    if (t.failures) die(EXIT_INTERNAL, "%s", t.message);
    _exit(0);
}
static void test_aio_forbidden(Test *t) {
    char text[DIES_TEXT_BYTES];
    AioOptions o = {.block_size = 1 << 20, .queue_depth = 8, .intra_op_parallelism = 1, .overlap_events = true};
    Aio *a = aio_create(&o);
    const bool uring = aio_is_uring(a);
    aio_free(a);
    int code = run_in_child(aio_forbidden, &o, text);
    if (code == 99 || !uring) { test_skip(t, "no io_uring here, or no filter for system calls"); return; }
    expect_equal_i64(t, text, code, 0);
    expect_contains(t, "the note", text, "no io_uring here: Operation not permitted");
    aio_test_end();
}

static const TestRow aio_tests[] = {
    {"round_trips", test_aio_round_trips}, {"short_transfers", test_aio_short}, {"failures", test_aio_failures}, {"refusals", test_aio_refusals},
    {"leaves_nothing", test_aio_leaves_nothing}, {"io_uring_forbidden", test_aio_forbidden}, {NULL, NULL},
};
