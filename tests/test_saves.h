// test_saves.h - the folder of checkpoints, and saves that fail or end at any of their calls: tests of checkpoint.cu and runtime/durable.h.
//
// Faults (CkptFaults) enter through the seam of runtime/durable.h, and so does the recorder of crash_model.h.
#pragma once
#include "crash_model.h"
#include "test_checkpoint.h"
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

// ---------------------------------------------------------------------------------------------------------------
// The folder: lock, sweep, retention, permissions

typedef struct {
    const char *folder;
} CkptOpenCall;
static void ckpt_open_call(void *arg) { checkpoint_open(&checkpoint_alone, ((CkptOpenCall *)arg)->folder, false); }

static void test_checkpoint_lock(Test *t) {
    CkptPath folder, deep;
    char pid[64];
    ckpt_folder(folder);
    ckpt_join(deep, folder, "a/b//c/");
    CheckpointStore *s = checkpoint_open(&checkpoint_alone, deep, false); // makes the whole path
    expect_true(t, ckpt_exists(folder, "a/b/c/.lock"), "no lock file");
    snprintf(pid, sizeof pid, "pid %ld on host ", (long)getpid());
    CkptOpenCall call = {deep};
    const char *const parts[] = {"in use by another run", pid};
    expect_dies_parts(t, EXIT_CONFIG, parts, 2, ckpt_open_call, &call);
    checkpoint_close(s);
    char text[DIES_TEXT_BYTES];
    expect_equal_i64(t, "after close", run_in_child(ckpt_open_call, &call, text), -1); // opens, and leaves with the lock held
    s = checkpoint_open(&checkpoint_alone, deep, false);                                                  // gone with that process
    checkpoint_close(s);
    // whatever an earlier holder left in the file is shown escaped
    CkptPath path;
    ckpt_spill(ckpt_join(path, deep, ".lock"), "pid\x1b[31m\nmore", 13);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    CHECK(fcntl(fd, F_OFD_SETLK, &lock) == 0, "lock");
    expect_dies(t, EXIT_CONFIG, "(pid\\x1b[31m)", ckpt_open_call, &call);
    close(fd);
    // a lock file that is a link is not followed
    CkptPath elsewhere;
    CHECK(unlink(path) == 0 && symlink(ckpt_join(elsewhere, folder, "target"), path) == 0, "symlink");
    expect_dies(t, EXIT_CANTCREAT, "symbolic link", ckpt_open_call, &call);
    expect_true(t, !ckpt_exists(folder, "target"), "the link was followed");
    ckpt_remove(folder);
}

static int ckpt_count_above(void *ctx, IoCall *call) {
    *(int *)ctx += call->op == IO_SYNC && strcmp(call->name, "..") == 0;
    return call->op == IO_SYNC && strcmp(call->name, "..") == 0 && *(int *)ctx == 2 ? EIO : 0;
}

// The name of save_dir is data of the folder above, and so on up: each is fsynced. One that cannot be is told, and borne.
static void test_checkpoint_folders_above(Test *t) {
    CkptPath folder, deep;
    CkptCaptured c;
    ckpt_folder(folder);
    ckpt_join(deep, folder, "a/b/c");
    int above = 0, levels = 0;
    for (const char *p = deep; *p; p++) levels += *p == '/';
    Io io = {ckpt_count_above, &above};
    ckpt_capture_begin(&c);
    checkpoint_close(checkpoint_open_io(&checkpoint_alone, deep, false, &io));
    ckpt_capture_end(&c);
    expect_equal_i64(t, "fsyncs of folders above", above, levels);
    expect_contains(t, "note", c.text, "fsync of a folder above it failed");
    ckpt_remove(folder);
}

// Whoever keeps more checkpoints than the disk holds is told at the start.
static void test_checkpoint_space_note(Test *t) {
    CkptPath folder;
    CkptCaptured c;
    ckpt_folder(folder);
    FakeRun *f = fake_make(fake_model(1, 8, 5), 1, 1);
    CheckpointStore *s = checkpoint_open(&checkpoint_alone, folder, false);
    ckpt_capture_begin(&c);
    checkpoint_space_note(s, &f->tensors, 3);
    ckpt_capture_end(&c);
    expect_equal_text(t, "note with room", c.text, "");
    ckpt_capture_begin(&c);
    checkpoint_space_note(s, &f->tensors, (int64_t)1 << 40);
    ckpt_capture_end(&c);
    expect_contains(t, "note without room", c.text, "a checkpoint takes 0.0 MB, and 1099511627777 more");
    checkpoint_close(s);
    fake_free(f);
    ckpt_remove(folder);
}

static void test_checkpoint_cannot_create(Test *t) {
    CkptPath folder, path;
    ckpt_folder(folder);
    ckpt_spill(ckpt_join(path, folder, "file"), "x", 1);
    CkptPath below;
    CkptOpenCall rows[] = {{path}, {ckpt_join(below, path, "sub")}, {"/proc/no/such/place"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) expect_dies(t, EXIT_CANTCREAT, "checkpoint.save_dir", ckpt_open_call, &rows[i]);
    CkptOpenCall empty = {""};
    expect_dies(t, EXIT_CONFIG, "is empty", ckpt_open_call, &empty);
    CkptPath odd; // a name that needs escaping works, and is escaped in messages
    CheckpointStore *s = checkpoint_open(&checkpoint_alone, ckpt_join(odd, folder, "a b'\"\n\xff"), false);
    CkptOpenCall again = {odd};
    expect_dies(t, EXIT_CONFIG, "a b'\"\\x0a\\xff", ckpt_open_call, &again);
    checkpoint_close(s);
    if (geteuid() != 0) { // permissions mean nothing to root
        CHECK(chmod(folder, 0555) == 0, "chmod");
        CkptOpenCall closed = {folder};
        expect_dies(t, EXIT_CANTCREAT, "Permission denied", ckpt_open_call, &closed);
        CHECK(chmod(folder, 0755) == 0, "chmod");
    }
    ckpt_remove(folder);
}

static void test_checkpoint_sweep(Test *t) {
    CkptPath folder, path, inner;
    CkptCaptured c;
    ckpt_folder(folder);
    const int64_t steps[] = {5};
    FakeRun *f = fake_make(fake_model(1, 8, 5), 1, 1);
    ckpt_save_steps(folder, f, steps, 1);
    for (int i = 0; i < 100; i++) {
        char name[64];
        snprintf(name, sizeof name, i % 3 == 0 ? ".tmp-step-%08d-1" : i % 3 == 1 ? ".trash-step-%08d-1" : ".latest-%d", i);
        if (i % 3 == 2) { ckpt_spill(ckpt_join(path, folder, name), "x", 1); continue; }
        CHECK(mkdir(ckpt_join(path, folder, name), 0777) == 0, "mkdir");
        ckpt_spill(ckpt_join(inner, path, "shard-0.bin"), "x", 1);
        CHECK(symlink("../step-00000005", ckpt_join(inner, path, "link")) == 0, "symlink"); // removed, not followed
    }
    CHECK(symlink("step-00000005", ckpt_join(path, folder, ".tmp-link")) == 0, "symlink");
    ckpt_spill(ckpt_join(path, folder, "mine.txt"), "x", 1);
    // a reader touches nothing
    checkpoint_close(checkpoint_open(&checkpoint_alone, folder, true));
    expect_equal_i64(t, "entries after a reader", ckpt_count(folder, ckpt_count_visit), 105);
    ckpt_capture_begin(&c);
    checkpoint_close(checkpoint_open(&checkpoint_alone, folder, false));
    ckpt_capture_end(&c);
    expect_contains(t, "note", c.text, "101 leftovers of interrupted saves removed");
    expect_equal_i64(t, "entries", ckpt_count(folder, ckpt_count_visit), 4); // .lock latest mine.txt step-00000005
    expect_true(t, ckpt_verdict(folder, "step-00000005") == NULL, "the sweep followed a link");
    fake_free(f);
    ckpt_remove(folder);
}

static void test_checkpoint_retention(Test *t) {
    static const struct { int64_t floor, ceiling; const char *left; } row[] = {
        {0, 0, "1 2 3 4 5 6"}, {2, 0, "1 2 3 4 5 6"}, {0, 1, "6"}, {0, 3, "4 5 6"}, {1, 3, "4 5 6"}, {3, 3, "4 5 6"}, {2, 10, "1 2 3 4 5 6"}, {5, 2, "2 3 4 5 6"},
    };
    FakeRun *f = fake_make(fake_model(1, 8, 5), 1, 1);
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        CkptPath folder;
        ckpt_folder_fast(folder);
        CheckpointStore *s = checkpoint_open(&checkpoint_alone, folder, false);
        for (int step = 1; step <= 6; step++) {
            fake_fill(f, step);
            SaveResult r = checkpoint_save(s, &f->state, &f->tensors, row[i].floor, row[i].ceiling);
            expect_true(t, r.durable, "%s", r.why);
        }
        checkpoint_close(s);
        char left[64] = "";
        for (int step = 1; step <= 6; step++) {
            char name[64];
            snprintf(name, sizeof name, "step-%08d", step);
            if (ckpt_exists(folder, name)) snprintf(left + strlen(left), sizeof left - strlen(left), "%s%d", left[0] ? " " : "", step);
        }
        expect_equal_text(t, "left", left, row[i].left);
        expect_equal_i64(t, "leftovers", ckpt_count(folder, ckpt_hidden_visit), 0);
        ckpt_remove(folder);
    }
    // A damaged one is neither counted nor deleted; one that is newer than the save (the run was taken back) stays, and
    // the one just saved stays, although it is the oldest.
    CkptPath folder, path;
    ckpt_folder_fast(folder);
    const int64_t steps[] = {10, 20, 30, 40};
    ckpt_save_steps(folder, f, steps, 4);
    ckpt_harm(ckpt_join(path, folder, "step-00000040/manifest.json"), CKPT_HARM_CUT_1);
    CheckpointStore *s = checkpoint_open(&checkpoint_alone, folder, false);
    fake_fill(f, 25);
    SaveResult r = checkpoint_save(s, &f->state, &f->tensors, 1, 1);
    expect_true(t, r.durable, "%s", r.why);
    expect_true(t, !ckpt_exists(folder, "step-00000010") && !ckpt_exists(folder, "step-00000020") && ckpt_exists(folder, "step-00000025") &&
                ckpt_exists(folder, "step-00000030") && ckpt_exists(folder, "step-00000040"), "wrong ones kept");
    fake_fill(f, 50);
    r = checkpoint_save(s, &f->state, &f->tensors, 0, 2);
    expect_true(t, r.durable && !ckpt_exists(folder, "step-00000025") && ckpt_exists(folder, "step-00000030") &&
                ckpt_exists(folder, "step-00000040") && ckpt_exists(folder, "step-00000050"), "wrong ones kept");
    checkpoint_close(s);
    ckpt_remove(folder);
    fake_free(f);
}

// The folder is deleted while the run goes on: the next save makes it anew, locked.
static void test_checkpoint_folder_deleted(Test *t) {
    CkptPath folder, deep;
    CkptCaptured c;
    ckpt_folder(folder);
    ckpt_join(deep, folder, "a/b");
    FakeRun *f = fake_make(fake_model(1, 8, 5), 1, 1);
    CheckpointStore *s = checkpoint_open(&checkpoint_alone, deep, false);
    CkptPath a;
    ckpt_remove(ckpt_join(a, folder, "a"));
    fake_fill(f, 4);
    ckpt_capture_begin(&c);
    SaveResult r = checkpoint_save(s, &f->state, &f->tensors, 0, 0);
    ckpt_capture_end(&c);
    expect_true(t, r.durable && strstr(c.text, "was deleted"), "%s %s", r.why, c.text);
    expect_true(t, ckpt_verdict(deep, "step-00000004") == NULL, "not good");
    CkptOpenCall call = {deep};
    expect_dies(t, EXIT_CONFIG, "in use by another run", ckpt_open_call, &call);
    checkpoint_close(s);
    fake_free(f);
    ckpt_remove(folder);
}

// ---------------------------------------------------------------------------------------------------------------
// CkptFaults at every call

typedef struct {
    int64_t calls, at;  // calls so far; the one that is struck, from 1; 0 = none
    int error;          // errno of the struck call; 0 = the process ends there
    int64_t top_sync;   // number of the first fsync of the topmost folder; 0 = none yet
    bool storm;         // every call first meets EINTR, every write is short
    bool again;         // of the storm: this call's EINTR was given
    bool no_flags;      // a file system that knows no renameat2 flags
    bool long_writes;   // otherwise no write is longer than 4096 bytes, so that there is more than one
} CkptFaults;

static int ckpt_faults_before(void *ctx, IoCall *call) {
    CkptFaults *f = (CkptFaults *)ctx;
    if (f->storm) {
        bool can = call->op != IO_FOLDER && call->op != IO_CLOSE && call->op != IO_RENAME && call->op != IO_UNLINK && call->op != IO_RMDIR;
        if (can && !f->again) { f->again = true; return EINTR; }
        f->again = false;
        if (call->op == IO_WRITE && call->bytes > 7 && call->bytes <= 4096) call->bytes = 7;
    }
    if (call->op == IO_WRITE && !f->long_writes) call->bytes = min_i64(call->bytes, 4096);
    if (f->no_flags && call->op == IO_RENAME && call->rename != IO_RENAME_OVER) return EINVAL;
    f->calls++;
    if (call->op == IO_SYNC && !call->name[0] && f->top_sync == 0) f->top_sync = f->calls;
    if (f->calls != f->at) return 0;
    if (f->error == 0) _exit(7);
    return f->error;
}

// For every call of a save and every error: what was saved before still loads, nothing torn has a final name, no space is
// lost, and the next save works. The save under test replaces one of the same step in half of the cases.
static void test_checkpoint_fail_every_call(Test *t) {
    static const int errors[] = {ENOSPC, EIO, EDQUOT};
    FakeRun *f = fake_make(fake_model(1, 8, 5), 1, 1), *g = fake_make(fake_model(1, 8, 5), 1, 1);
    CkptCaptured c;
    int64_t struck = 0, not_durable = 0, durable_at = 0; // the call that makes a save durable
    for (int same_step = 0; same_step < 2; same_step++)
        for (size_t e = 0; e < sizeof errors / sizeof *errors; e++)
            for (int64_t k = 0;; k++) { // 0: nothing is struck, to see where the save becomes durable
                CkptPath folder;
                ckpt_folder_fast(folder);
                CkptFaults faults = {0};
                Io io = {ckpt_faults_before, &faults};
                CheckpointStore *s = checkpoint_open_io(&checkpoint_alone, folder, false, &io);
                for (int step = 1; step <= 2; step++) {
                    fake_fill(f, step);
                    CHECK(checkpoint_save(s, &f->state, &f->tensors, 0, 2).durable, "save %d", step);
                }
                int64_t third = same_step ? 2 : 3;
                fake_fill(f, 3);
                f->state.step = third;
                faults.calls = faults.top_sync = 0;
                faults.at = k;
                faults.error = errors[e];
                ckpt_capture_begin(&c);
                SaveResult r = checkpoint_save(s, &f->state, &f->tensors, 0, 2);
                ckpt_capture_end(&c);
                bool over = faults.calls < k; // the save makes fewer calls than that: all were struck
                faults.at = 0;
                if (k == 0) { over = false; durable_at = faults.top_sync; }
                else struck += !over;
                not_durable += !r.durable;
                expect_true(t, r.durable == (k == 0 || k > durable_at), "call %" PRId64 " of %" PRId64 ": durable %d", k, durable_at, r.durable);
                // a failure leaves nothing behind, unless it is the removal that failed, or unknown what is on the disk
                if (!r.durable && k != durable_at) expect_equal_i64(t, "left behind", ckpt_count(folder, ckpt_hidden_visit), 0);
                expect_true(t, r.durable ? r.why[0] == 0 : strstr(r.why, strerror(errors[e])) != NULL && strstr(r.why, folder),
                            "call %" PRId64 ": durable %d, why \"%s\"", k, r.durable, r.why);
                const char *name = ckpt_load_quietly(folder, "auto", g, &c);
                bool new_one = strcmp(name, "step-00000003") == 0 || (same_step && g->state.tokens == 3000);
                expect_true(t, name[0] && c.text[0] == 0, "call %" PRId64 ": loaded \"%s\", noted \"%s\"", k, name, c.text);
                expect_true(t, r.durable ? new_one : true, "call %" PRId64 ": durable, but %s was loaded", k, name);
                g->state.step = g->state.tokens / 1000;
                expect_true(t, fake_holds(t, g, new_one ? 3 : 2), "call %" PRId64 ": wrong values", k);
                expect_true(t, s->failed_in_a_row == !r.durable, "%d failures in a row", s->failed_in_a_row);
                // and on
                fake_fill(f, 4);
                SaveResult next = checkpoint_save(s, &f->state, &f->tensors, 0, 2);
                expect_true(t, next.durable, "call %" PRId64 ": the next save fails: %s", k, next.why);
                checkpoint_close(s);
                ckpt_capture_begin(&c);
                checkpoint_close(checkpoint_open(&checkpoint_alone, folder, false));
                ckpt_capture_end(&c);
                expect_equal_i64(t, "leftovers", ckpt_count(folder, ckpt_hidden_visit), 0);
                expect_equal_text(t, "chosen", ckpt_load_quietly(folder, "auto", g, &c), "step-00000004");
                expect_true(t, fake_holds(t, g, 4), "call %" PRId64 ": wrong values at the end", k);
                ckpt_remove(folder);
                if (over) break;
            }
    expect_true(t, struck > 150 && not_durable > 100 && not_durable < struck, "%" PRId64 " calls struck, %" PRId64 " saves failed", struck,
                not_durable);
    fake_free(f);
    fake_free(g);
}

// The first folder with a final name that holds no good checkpoint, and why; null = there is none. (Loading would die if all
// were torn, and the test with it.)
static const char *ckpt_torn(const char *folder) {
    StepList steps;
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(fd >= 0 && steps_list(fd, &steps), "%s: %s", folder, strerror(errno));
    close(fd);
    const char *why = NULL;
    for (int i = 0; i < steps.n && !why; i++) {
        char name[CHECKPOINT_NAME_MAX];
        step_name(name, steps.step[i]);
        why = ckpt_verdict(folder, name);
    }
    free(steps.step);
    return why;
}

typedef struct {
    CkptPath folder;
    CkptFaults faults;
    int64_t *acknowledged; // shared with the parent: the last step whose save was durable
    int64_t saves;
} CkptKilledRun;

static void ckpt_killed_run(void *arg) {
    CkptKilledRun *r = (CkptKilledRun *)arg;
    FakeRun *f = fake_make(fake_model(1, 8, 5), 1, 1);
    Io io = {ckpt_faults_before, &r->faults};
    CheckpointStore *s = checkpoint_open_io(&checkpoint_alone, r->folder, false, &io);
    for (int64_t step = 1; step <= r->saves; step++) {
        fake_fill(f, step);
        if (checkpoint_save(s, &f->state, &f->tensors, 0, 1).durable) *r->acknowledged = step;
    }
}

// The process ends at its k-th call, for every k of a start and three saves with one checkpoint kept: the acknowledged one
// loads, or a newer one, with the right values; the next start cleans up.
static void test_checkpoint_stop_at_every_call(Test *t) {
    FakeRun *g = fake_make(fake_model(1, 8, 5), 1, 1);
    CkptCaptured c;
    int64_t *acknowledged = (int64_t *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(acknowledged != MAP_FAILED, "mmap");
    int64_t stops = 0;
    for (int64_t k = 1;; k++) {
        CkptKilledRun r;
        memset(&r, 0, sizeof r);
        ckpt_folder_fast(r.folder);
        r.faults.at = k;
        r.saves = 3;
        r.acknowledged = acknowledged;
        *acknowledged = 0;
        char text[DIES_TEXT_BYTES];
        int code = run_in_child(ckpt_killed_run, &r, text);
        expect_true(t, code == 7 || code == -1, "exit code %d: %s", code, text);
        const char *torn = ckpt_torn(r.folder);
        expect_true(t, torn == NULL, "stop at call %" PRId64 ": a torn checkpoint has its final name: %s", k, torn ? torn : "");
        const char *name = torn ? "" : ckpt_load_quietly(r.folder, "auto", g, &c);
        int64_t got = name[0] ? g->state.step : 0;
        expect_true(t, got >= *acknowledged, "stop at call %" PRId64 ": step %" PRId64 " acknowledged, \"%s\" loaded", k, *acknowledged, name);
        if (got) expect_true(t, fake_holds(t, g, got), "stop at call %" PRId64 ": wrong values", k);
        ckpt_capture_begin(&c);
        checkpoint_close(checkpoint_open(&checkpoint_alone, r.folder, false));
        ckpt_capture_end(&c);
        expect_equal_i64(t, "leftovers", ckpt_count(r.folder, ckpt_hidden_visit), 0);
        ckpt_remove(r.folder);
        stops += code == 7;
        if (code == -1) break;
    }
    expect_true(t, stops > 90, "only %" PRId64 " stops", stops);
    munmap(acknowledged, 4096);
    fake_free(g);
}

// A shard of several buffers, which a thread writes: with each of its writes failing in turn the save fails, and says where; the next
// one works, and holds every value.
static void test_checkpoint_long_shard(Test *t) {
    FakeRun *f = fake_make(fake_model(1, 24, 240001), 1, 1);
    CkptPath folder;
    CkptCaptured c;
    char where[64];
    int64_t bytes = stored_shard_plan(&f->tensors).file_bytes;
    ckpt_folder_fast(folder);
    for (int64_t at = 0; at < bytes + STREAM_BYTES; at += STREAM_BYTES) {
        CkptFaults faults = {0};
        faults.long_writes = true;
        Io io = {ckpt_faults_before, &faults};
        CheckpointStore *s = checkpoint_open_io(&checkpoint_alone, folder, false, &io);
        faults.calls = 0;
        faults.at = 6 + at / STREAM_BYTES; // behind room, folder, folder, file and allocation
        faults.error = EIO;
        SaveResult r = checkpoint_save(s, &f->state, &f->tensors, 0, 1);
        snprintf(where, sizeof where, at < bytes ? "bytes at offset %" PRId64 ": " : "fsync: ", at);
        expect_true(t, !r.durable && strstr(r.why, where) && strstr(r.why, strerror(EIO)), "write at %" PRId64 ": durable %d, %s", at, r.durable, r.why);
        expect_equal_i64(t, "left behind", ckpt_count(folder, ckpt_hidden_visit), 0);
        checkpoint_close(s);
    }
    f->poison_row = 1, f->poison = NAN; // found while a buffer is being written
    CheckpointStore *s = checkpoint_open(&checkpoint_alone, folder, false);
    SaveResult r = checkpoint_save(s, &f->state, &f->tensors, 0, 1);
    expect_true(t, !r.durable && r.not_a_number && strstr(r.why, "wpe.weight is NaN"), "durable %d: %s", r.durable, r.why);
    f->poison_row = -1;
    r = checkpoint_save(s, &f->state, &f->tensors, 0, 1);
    checkpoint_close(s);
    expect_true(t, r.durable, "%s", r.why);
    fake_fill(f, 9);
    expect_equal_text(t, "chosen", ckpt_load_quietly(folder, "auto", f, &c), "step-00000001");
    expect_true(t, fake_holds(t, f, 1), "values differ");
    ckpt_remove(folder);
    fake_free(f);
}

// Behind a save in the background the run goes on. Rows that meet in their unit's buffer leave it in one copy, the others one by one; the
// checkpoint holds what the run held either way.
static void test_checkpoint_copies(Test *t) {
    const struct {
        ModelConfig m;
        bool meet;
    } cases[] = {{fake_model(2, 64, 128), true}, {fake_model(2, 6, 5), false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        FakeRun *f = fake_make(cases[i].m, 3, 7), *g = fake_make(cases[i].m, 3, 99);
        CkptPath folder;
        CkptCaptured c;
        ckpt_folder_fast(folder);
        CheckpointStore *s = checkpoint_open(&checkpoint_alone, folder, false);
        checkpoint_copy_alloc(s, &f->tensors);
        checkpoint_begin(s, &f->state, &f->tensors, 0, 1);
        checkpoint_copied(s);
        fake_fill(f, 8);
        checkpoint_finish(s);
        expect_true(t, s->job.result.durable, "%s", s->job.result.why);
        expect_equal_i64(t, "copies", f->copies, f->n_kinds * (cases[i].meet ? f->table.n_units : f->table.n_rows - 1)); // a row is tied
        checkpoint_close(s);
        expect_equal_text(t, "chosen", ckpt_load_quietly(folder, "auto", g, &c), "step-00000007");
        expect_true(t, fake_holds(t, g, 7), "values differ");
        ckpt_remove(folder);
        fake_free(f);
        fake_free(g);
    }
}

// Interrupted calls and short writes change nothing; neither does a file system without renameat2's flags, except that a
// complete checkpoint of the same step is then kept and the save refused.
static void test_checkpoint_odd_file_systems(Test *t) {
    CkptPath folder, path;
    FakeRun *f = fake_make(fake_model(1, 16, 37), 2, 1);
    CkptCaptured c;
    ckpt_folder(folder);
    CkptFaults storm = {0};
    storm.storm = true;
    Io io = {ckpt_faults_before, &storm};
    CheckpointStore *s = checkpoint_open_io(&checkpoint_alone, folder, false, &io);
    fake_fill(f, 5);
    SaveResult r = checkpoint_save(s, &f->state, &f->tensors, 0, 0);
    checkpoint_close(s);
    expect_true(t, r.durable && storm.calls > 500, "durable %d after %" PRId64 " calls: %s", r.durable, storm.calls, r.why);
    fake_fill(f, 9);
    expect_equal_text(t, "chosen", ckpt_load_quietly(folder, "auto", f, &c), "step-00000005");
    expect_true(t, fake_holds(t, f, 5), "values differ");
    CkptFaults plain = {0};
    plain.no_flags = true;
    Io plain_io = {ckpt_faults_before, &plain};
    s = checkpoint_open_io(&checkpoint_alone, folder, false, &plain_io);
    fake_fill(f, 6);
    r = checkpoint_save(s, &f->state, &f->tensors, 0, 0);
    expect_true(t, r.durable, "%s", r.why);
    r = checkpoint_save(s, &f->state, &f->tensors, 0, 0);
    expect_true(t, !r.durable && strstr(r.why, "exists already"), "durable %d: %s", r.durable, r.why);
    expect_true(t, ckpt_verdict(folder, "step-00000006") == NULL, "the old one was harmed");
    ckpt_harm(ckpt_join(path, folder, "step-00000006/shard-0.bin"), CKPT_HARM_CUT_1); // a broken one makes way
    r = checkpoint_save(s, &f->state, &f->tensors, 0, 0);
    expect_true(t, r.durable && ckpt_verdict(folder, "step-00000006") == NULL, "durable %d: %s", r.durable, r.why);
    checkpoint_close(s);
    ckpt_capture_begin(&c);
    checkpoint_close(checkpoint_open(&checkpoint_alone, folder, false));
    ckpt_capture_end(&c);
    expect_equal_i64(t, "leftovers", ckpt_count(folder, ckpt_hidden_visit), 0);
    ckpt_remove(folder);
    fake_free(f);
}

static int ckpt_no_allocate(void *ctx, IoCall *call) { (void)ctx; return call->op == IO_ALLOCATE ? EOPNOTSUPP : 0; }

static void ckpt_limited_save(void *arg) {
    struct rlimit limit = {6000, 6000}; // in the middle of the shard: the write is short, and the next one refused
    FakeRun *f = fake_make(fake_model(1, 8, 5), 1, 1);
    Io io = {ckpt_no_allocate, NULL};
    CheckpointStore *s = checkpoint_open_io(&checkpoint_alone, (const char *)arg, false, &io);
    signal(SIGXFSZ, SIG_IGN);
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit");
    fake_fill(f, 2);
    SaveResult r = checkpoint_save(s, &f->state, &f->tensors, 0, 1);
    if (r.durable) die(EXIT_OK, "taken for durable");
    die(EXIT_IO, "%s", r.why);
}

// A limit on the size of files: a short write, then EFBIG.
static void test_checkpoint_file_size_limit(Test *t) {
    CkptPath folder;
    ckpt_folder(folder);
    FakeRun *f = fake_make(fake_model(1, 8, 5), 1, 1);
    const int64_t steps[] = {1};
    ckpt_save_steps(folder, f, steps, 1);
    const char *const parts[] = {"shard-0.bin: write of ", "offset 6000: File too large"};
    expect_dies_parts(t, EXIT_IO, parts, 2, ckpt_limited_save, folder);
    expect_true(t, ckpt_verdict(folder, "step-00000001") == NULL && !ckpt_exists(folder, "step-00000002"), "the old one was harmed, or the new one published");
    expect_equal_i64(t, "left behind", ckpt_count(folder, ckpt_hidden_visit), 0);
    fake_free(f);
    ckpt_remove(folder);
}

static int ckpt_no_space(void *ctx, IoCall *call) {
    if (call->op != IO_SPACE) *(int *)ctx += call->op == IO_FOLDER;
    return 0;
}

// Too little room is seen before anything is written.
static void test_checkpoint_space(Test *t) {
    CkptPath folder;
    ckpt_folder(folder);
    FakeRun *f = fake_make(fake_model(1, 8, 5), 1, 1);
    const int64_t steps[] = {1};
    ckpt_save_steps(folder, f, steps, 1);
    int folders = 0;
    Io io = {ckpt_no_space, &folders};
    CheckpointStore *s = checkpoint_open_io(&checkpoint_alone, folder, false, &io);
    // a model whose checkpoint no disk of today can hold: 2^44 rows; get must never be called
    ModelConfig m = fake_model(1, 8, 5);
    ParamTable huge = f->table;
    huge.row = (ParamDesc *)host_alloc(sizeof(ParamDesc) * (size_t)huge.n_rows);
    memcpy(huge.row, f->table.row, sizeof(ParamDesc) * (size_t)huge.n_rows);
    huge.row[0].shape[0] = (int64_t)1 << 44;
    CheckpointTensors tensors = f->tensors;
    tensors.table = &huge;
    tensors.model = &m;
    folders = 0;
    SaveResult r = checkpoint_save(s, &f->state, &tensors, 0, 0);
    expect_true(t, !r.durable && folders == 0, "durable %d, %d folders made", r.durable, folders);
    expect_contains(t, "why", r.why, "are free");
    expect_true(t, !r.not_a_number, "a full disk counts as NaN");
    char needed[64]; // the start foresees what the save asks for
    CkptCaptured c;
    snprintf(needed, sizeof needed, "needs %" PRId64 " bytes, but", checkpoint_room(&tensors, 1));
    expect_contains(t, "why", r.why, needed);
    ckpt_capture_begin(&c);
    checkpoint_space_note(s, &tensors, 1);
    ckpt_capture_end(&c);
    snprintf(needed, sizeof needed, "with a reserve needs %.1f MB, but", (double)checkpoint_room(&tensors, 1) / 1e6);
    expect_contains(t, "note", c.text, needed);
    expect_true(t, ckpt_verdict(folder, "step-00000001") == NULL, "the old one was harmed");
    checkpoint_close(s);
    free(huge.row);
    fake_free(f);
    ckpt_remove(folder);
}

// ---------------------------------------------------------------------------------------------------------------
// Loss of power: every state that the disk may hold, over the calls that the real writer makes (see crash_model.h)

typedef struct {
    const Effect *effect;
    const bool *is_folder;
    CkptPath root;
    int64_t lost, torn, latest;    // states that break a promise
    bool until_broken;             // one such is enough
    int64_t seen;                  // different states
    int64_t hash[1 << 16];         // of states seen, with their verdicts; 0 = free
    signed char newest[1 << 16];   // tokens / 1000 of the newest good checkpoint
    bool is_torn[1 << 16], bad_latest[1 << 16];
    char first[512];
} CrashCheck;

// Looks at the folder as it is now.
static void crash_verdict(CrashCheck *c, int slot) {
    StepList steps;
    int fd = open(c->root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(fd >= 0 && steps_list(fd, &steps), "%s: %s", c->root, strerror(errno));
    char latest[64] = "";
    int hint = openat(fd, "latest", O_RDONLY | O_CLOEXEC);
    bool latest_good = hint < 0;
    if (hint >= 0) { ssize_t n = read(hint, latest, sizeof latest - 1); latest[n > 0 ? n : 0] = 0; close(hint); }
    latest[strcspn(latest, "\n")] = 0;
    for (int i = 0; i < steps.n; i++) {
        char name[CHECKPOINT_NAME_MAX];
        Checkpoint k;
        step_name(name, steps.step[i]);
        bool good = checkpoint_read(&k, fd, name) && values_check(&k, 0, 1);
        if (!good) {
            c->is_torn[slot] = true;
            if (!c->first[0]) snprintf(c->first, sizeof c->first, "%s: %s", name, k.why);
        } else {
            if (!c->newest[slot]) c->newest[slot] = (signed char)(k.state.tokens / 1000);
            if (strcmp(latest, name) == 0) latest_good = true;
        }
        checkpoint_free(&k);
    }
    c->bad_latest[slot] = !latest_good;
    free(steps.step);
    close(fd);
}

static bool crash_visit(void *ctx, int cut, const bool *lost, int64_t acknowledged) {
    CrashCheck *c = (CrashCheck *)ctx;
    uint64_t h = 1;
    for (int i = 0; i < cut; i++) if ((c->effect[i].kind == DO_ENTRY || c->effect[i].kind == DO_DATA) && !lost[i]) h = rng_mix(h ^ (uint64_t)i);
    int slot = (int)(h & 0xffff);
    while (c->hash[slot] && c->hash[slot] != (int64_t)h) slot = (slot + 1) & 0xffff;
    if (!c->hash[slot]) {
        CHECK(++c->seen < 60000, "too many states");
        c->hash[slot] = (int64_t)h;
        crash_build(c->root, c->effect, cut, lost, c->is_folder);
        crash_verdict(c, slot);
        ckpt_remove(c->root);
        CHECK(mkdir(c->root, 0700) == 0, "mkdir %s: %s", c->root, strerror(errno));
    }
    c->lost += c->newest[slot] < acknowledged;
    c->torn += c->is_torn[slot];
    c->latest += c->bad_latest[slot];
    return !c->until_broken || c->lost + c->torn + c->latest == 0;
}

typedef enum {
    MUTANT_NONE, MUTANT_NO_SHARD_SYNC, MUTANT_NO_MANIFEST_SYNC, MUTANT_NO_FOLDER_SYNC, MUTANT_NO_PUBLISH_SYNC, MUTANT_NO_TRASH_SYNC, MUTANT_NO_SWEEP_SYNC,
    MUTANT_PUBLISH_BEFORE_MANIFEST, MUTANT_EARLY_ACK, MUTANT_DELETE_FIRST, MUTANT_LATEST_IN_PLACE, MUTANT_NO_LATEST_SYNC, MUTANT_REPLACE_BY_DELETING, MUTANT_NOT_WAITED, MUTANTS,
} Mutant;

static const char *const mutant_names[MUTANTS] = {
    "none", "no fsync of shards", "no fsync of manifests", "no fsync of the temporary folder", "no fsync of save_dir after publishing, and no latest", "no fsync between trash and unlink",
    "no fsync before the sweep", "published before the manifest", "acknowledged before the rename", "old one deleted before the new one is published", "latest written in place",
    "no fsync of the new latest", "old one of the same step deleted before the rename",
    "published before another rank's shard is there",
};

static bool crash_ends_with(const char *text, const char *end) { return strlen(text) >= strlen(end) &&
                                                                strcmp(text + strlen(text) - strlen(end), end) == 0; }
static bool crash_publishes(const LogOp *o) { return o->op == IO_RENAME && strncmp(o->to, "step-", 5) == 0; }
static bool crash_trashes(const LogOp *o) { return o->op == IO_RENAME && strncmp(o->to, ".trash-", 7) == 0; }
static bool crash_removes(const LogOp *o) { return o->op == IO_UNLINK || o->op == IO_RMDIR; }
static bool crash_is_latest(const LogOp *o) { return strncmp(o->name, ".latest-", 8) == 0; }

// The recorded log as a worse writer would have made it; shard: the end of the name of the one that suffers. Returns its length.
// The operations are shared with the log.
static int crash_mutate(const CrashLog *l, Mutant mutant, const char *shard, LogOp *out) {
    int n = 0;
    for (int i = 0; i < l->n; i++) {
        const LogOp *o = &l->op[i], *before = i ? &l->op[i - 1] : NULL;
        bool sync = o->op == IO_SYNC, top_sync = sync && !o->name[0];
        if (mutant == MUTANT_NO_SHARD_SYNC && sync && crash_ends_with(o->name, shard)) continue;
        if (mutant == MUTANT_NOT_WAITED && crash_ends_with(o->name, shard)) continue;
        if (mutant == MUTANT_NOT_WAITED && o->op == LOG_ACK) { // the shard's own calls come now
            out[n++] = *o;
            int from = i;
            while (from > 0 && l->op[from - 1].op != LOG_ACK) from--;
            for (int k = from; k < i; k++) if (crash_ends_with(l->op[k].name, shard)) out[n++] = l->op[k];
            continue;
        }
        if (mutant == MUTANT_NO_MANIFEST_SYNC && sync && crash_ends_with(o->name, "/manifest.json")) continue;
        if (mutant == MUTANT_NO_FOLDER_SYNC && sync && strncmp(o->name, ".tmp-step", 9) == 0 && !strchr(o->name, '/')) continue;
        if (mutant == MUTANT_NO_PUBLISH_SYNC && ((top_sync && before && (crash_publishes(before) || crash_is_latest(before))) ||
                                                 crash_is_latest(o))) continue;
        if (mutant == MUTANT_NO_TRASH_SYNC && top_sync && before && crash_trashes(before)) continue;
        if (mutant == MUTANT_NO_SWEEP_SYNC && top_sync && before && before->op == LOG_START) continue;
        if (mutant == MUTANT_LATEST_IN_PLACE && crash_is_latest(o)) { // create, write, fsync, rename, and the fsync of the folder stays
            LogOp plain = *o;
            snprintf(plain.name, sizeof plain.name, "latest");
            if (o->op == IO_RENAME) continue;
            out[n++] = plain;
            continue;
        }
        if (mutant == MUTANT_NO_LATEST_SYNC && sync && crash_is_latest(o)) continue;
        if (mutant == MUTANT_PUBLISH_BEFORE_MANIFEST && o->op == IO_CREATE && crash_ends_with(o->name, "/manifest.json"))
            for (int k = i; k < l->n; k++) if (crash_publishes(&l->op[k])) { out[n++] = l->op[k]; out[n++] = l->op[k + 1]; break; } // with its fsync
        if (mutant == MUTANT_PUBLISH_BEFORE_MANIFEST && (crash_publishes(o) || (top_sync && before && crash_publishes(before)))) continue;
        if (mutant == MUTANT_EARLY_ACK && crash_publishes(o))
            for (int k = i; k < l->n; k++) if (l->op[k].op == LOG_ACK) { out[n++] = l->op[k]; break; }
        if (mutant == MUTANT_EARLY_ACK && o->op == LOG_ACK) continue;
        if (mutant == MUTANT_DELETE_FIRST && crash_publishes(o) && o->rename == IO_RENAME_NEW) { // trash, fsync and removal of this save come first
            for (int k = i; k < l->n && !(k > i && crash_publishes(&l->op[k])); k++)
                if (crash_trashes(&l->op[k]))
                    for (int m = k; m < l->n && (m == k || l->op[m].op == IO_SYNC || crash_removes(&l->op[m])); m++) out[n++] = l->op[m];
        }
        if (mutant == MUTANT_DELETE_FIRST && (crash_trashes(o) || (top_sync && before && crash_trashes(before)) || (crash_removes(o) &&
                strncmp(o->name, ".trash-", 7) == 0))) continue;
        if (mutant == MUTANT_REPLACE_BY_DELETING && crash_publishes(o) && o->rename == IO_RENAME_SWAP) {
            LogOp aside = *o, over = *o;
            snprintf(aside.name, sizeof aside.name, "%s", o->to);
            snprintf(aside.to, sizeof aside.to, ".trash-x");
            aside.rename = over.rename = IO_RENAME_OVER;
            out[n++] = aside;
            out[n++] = l->op[i + 1]; // fsync of save_dir
            out[n++] = over;
            continue;
        }
        if (mutant == MUTANT_REPLACE_BY_DELETING && crash_removes(o) && strncmp(o->name, ".tmp-step", 9) == 0) continue;
        out[n++] = *o;
        CHECK(n < LOG_MAX - 64, "log full");
    }
    return n;
}

// Saves of steps 1, 2, 2 again with other values, 3 and 4, one kept; the folder's fsync after the first trash-rename fails,
// so that a trash is left behind for the sweep of a second start. Values and tokens tell the saves apart.
static void crash_scenario(Test *t, CrashLog *log, const char *folder) {
    static const int64_t steps[] = {1, 2, 2, 3, 4};
    FakeRun *f = fake_make(fake_model(1, 4, 3), 1, 1);
    Io io = {crash_record, log};
    CkptCaptured c;
    ckpt_capture_begin(&c);
    CheckpointStore *s = checkpoint_open_io(&checkpoint_alone, folder, false, &io);
    log->n = 0; // the start in an empty folder is of no interest
    for (int i = 0; i < 5; i++) {
        if (i == 2) {
            checkpoint_close(s);
            crash_mark(log, LOG_START, 0);
            s = checkpoint_open_io(&checkpoint_alone, folder, false, &io);
        }
        fake_fill(f, i + 1);
        f->state.step = steps[i];
        log->fail_trash_sync = i == 1;
        int made = log->n, published = -1;
        SaveResult r = checkpoint_save(s, &f->state, &f->tensors, 0, 1);
        expect_true(t, r.durable, "save %d: %s", i, r.why);
        for (int k = made; k < log->n; k++) if (crash_publishes(&log->op[k])) published = k;
        // acknowledged when the call returns; here, as soon as it is durable, which is stricter
        if (published < 0) continue;
        int at = published + 1 + (published + 1 < log->n && log->op[published + 1].op == IO_SYNC);
        crash_mark(log, LOG_ACK, i + 1);
        LogOp ack = log->op[log->n - 1];
        memmove(&log->op[at + 1], &log->op[at], sizeof(LogOp) * (size_t)(log->n - 1 - at));
        log->op[at] = ack;
    }
    checkpoint_close(s);
    ckpt_capture_end(&c);
    fake_free(f);
}

// Every crash of a log as the mutant would have made it: without one, no state may break a promise; with one, some must.
static void crash_try_mutant(Test *t, const CrashLog *log, Mutant mutant, const char *shard) {
    LogOp *op = (LogOp *)host_alloc(sizeof(LogOp) * LOG_MAX);
    Effect *effect = (Effect *)host_alloc(sizeof(Effect) * LOG_MAX);
    CrashCheck *c = (CrashCheck *)host_alloc(sizeof *c);
    bool is_folder[NODES_MAX];
    ckpt_folder_fast(c->root);
    int n = crash_mutate(log, mutant, shard, op);
    crash_compile(op, n, effect, is_folder);
    c->effect = effect;
    c->is_folder = is_folder;
    c->until_broken = mutant != MUTANT_NONE;
    int64_t states = crash_each(effect, n, 6, 20, crash_visit, c), broken = c->lost + c->torn + c->latest;
    t->compared += states;
    if (mutant == MUTANT_NONE) {
        expect_true(t, broken == 0, "of %" PRId64 " states, %" PRId64 " lost an acknowledged save, %" PRId64 " hold a torn one, %" PRId64 " have a bad latest; %s",
                    states, c->lost, c->torn, c->latest, c->first);
        expect_true(t, c->seen > 1000, "only %" PRId64 " different states", c->seen);
    } else expect_true(t, broken > 0, "the test has no teeth: \"%s\" was not noticed in %" PRId64 " states", mutant_names[mutant], states);
    if (getenv("TEST_VERBOSE"))
        printf("     %-60s %6" PRId64 " states, %5" PRId64 " different: %" PRId64 " lost, %" PRId64 " torn, %" PRId64 " latest\n",
               mutant_names[mutant], states, c->seen, c->lost, c->torn, c->latest);
    ckpt_remove(c->root);
    free(c);
    free(op);
    free(effect);
}

static void test_checkpoint_crash_model(Test *t) {
    CkptPath folder;
    ckpt_folder_fast(folder);
    CrashLog *log = (CrashLog *)host_alloc(sizeof *log);
    snprintf(log->root, sizeof log->root, "%s", folder);
    crash_scenario(t, log, folder);
    for (int mutant = 0; mutant < MUTANT_NOT_WAITED && t->failures == 0; mutant++) // mutants of a writer that is wrong itself say nothing
        crash_try_mutant(t, log, (Mutant)mutant, "/shard-0.bin");
    crash_log_free(log);
    ckpt_remove(folder);
}

static const TestRow checkpoint_tests[] = {
    {"crc32c", test_checkpoint_crc32c},
    {"round_trip", test_checkpoint_round_trip},
    {"manifest_text", test_checkpoint_manifest_text},
    {"bit_flips", test_checkpoint_bit_flips},
    {"flips_name_tensors", test_checkpoint_flips_name_tensors},
    {"damaged_files", test_checkpoint_damaged_files},
    {"choice", test_checkpoint_choice},
    {"latest", test_checkpoint_latest},
    {"all_broken", test_checkpoint_all_broken},
    {"forged_manifest", test_checkpoint_forged_manifest},
    {"forged_shard", test_checkpoint_forged_shard},
    {"not_finite", test_checkpoint_not_finite},
    {"many_shards", test_checkpoint_many_shards},
    {"mismatch", test_checkpoint_mismatch},
    {"many_layers", test_checkpoint_many_layers},
    {"lock", test_checkpoint_lock},
    {"folders_above", test_checkpoint_folders_above},
    {"space_note", test_checkpoint_space_note},
    {"cannot_create", test_checkpoint_cannot_create},
    {"sweep", test_checkpoint_sweep},
    {"retention", test_checkpoint_retention},
    {"folder_deleted", test_checkpoint_folder_deleted},
    {"fail_every_call", test_checkpoint_fail_every_call},
    {"stop_at_every_call", test_checkpoint_stop_at_every_call},
    {"long_shard", test_checkpoint_long_shard}, {"copies", test_checkpoint_copies}, {"odd_file_systems", test_checkpoint_odd_file_systems},
    {"file_size_limit", test_checkpoint_file_size_limit},
    {"space", test_checkpoint_space},
    {"crash_model", test_checkpoint_crash_model},
    {NULL, NULL},
};
