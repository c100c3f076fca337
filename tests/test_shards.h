// test_shards.h - checkpoints that several ranks save and load together.
//
// The ranks are threads of this process, each with a fake run and a store of its own, that meet in shards_gather. A rank can be
// given faults of its own (CkptFaults), or end for good at any of its calls: then the others go on until they would wait for it,
// as under the watch, which ends them there.
#pragma once
#include "test_saves.h"
#include <pthread.h>

enum { SHARDS_WORLD_MAX = 8 };

// What the ranks share.
typedef struct {
    int world;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int arrived;          // at the meeting that comes next
    int64_t round;        // meetings that are over
    int ended;            // ranks that will meet nobody any more
    bool dead;            // one of them ended where it should not
    PeerWord given[SHARDS_WORLD_MAX], heard[SHARDS_WORLD_MAX];
    CrashLog *log;        // of the calls of all ranks, in their order; null = none
} ShardsJob;

typedef struct ShardsRank {
    ShardsJob *job;
    int rank;
    CheckpointPeers peers;
    FakeRun *run;
    CkptFaults faults;
    bool ends;            // at the call that is struck, instead of an error
    const char *folder;   // as this rank sees it
    bool background;      // saves so, and has other values before the writer begins
    int64_t steps[4];     // to save
    int n_steps;
    int64_t *acknowledged; // shared with the parent process: the last step that rank 0 knows to be durable
    SaveResult result;    // of the last save
    char name[64];        // of what was loaded; "" = nothing
} ShardsRank;

// This rank will not come to a meeting again. The process ends when that is true of all.
__attribute__((noreturn)) static void shards_end(ShardsJob *j) {
    pthread_mutex_lock(&j->lock);
    j->dead = true;
    if (++j->ended == j->world) _exit(7);
    pthread_cond_broadcast(&j->changed);
    for (;;) pthread_cond_wait(&j->changed, &j->lock);
}

static void shards_gather(void *ctx, const void *mine, int64_t bytes, void *all) {
    ShardsRank *r = (ShardsRank *)ctx;
    ShardsJob *j = r->job;
    CHECK(bytes == (int64_t)sizeof(PeerWord), "a word of %" PRId64 " bytes", bytes);
    pthread_mutex_lock(&j->lock);
    int64_t round = j->round;
    memcpy(&j->given[r->rank], mine, sizeof(PeerWord));
    if (++j->arrived == j->world) {
        memcpy(j->heard, j->given, sizeof j->heard);
        j->arrived = 0;
        j->round++;
        pthread_cond_broadcast(&j->changed);
    }
    while (j->round == round && !j->dead) pthread_cond_wait(&j->changed, &j->lock);
    bool over = j->round > round;
    if (over) memcpy(all, j->heard, sizeof(PeerWord) * (size_t)j->world);
    pthread_mutex_unlock(&j->lock);
    if (!over) shards_end(j);
}

static int shards_before(void *ctx, IoCall *call) {
    ShardsRank *r = (ShardsRank *)ctx;
    if (r->job->log) {
        pthread_mutex_lock(&r->job->lock);
        int answer = crash_record(r->job->log, call);
        pthread_mutex_unlock(&r->job->lock);
        return answer;
    }
    if (r->ends && r->faults.calls + 1 == r->faults.at) shards_end(r->job);
    return ckpt_faults_before(&r->faults, call);
}

// N ranks with the runs of a model that are given to them.
static ShardsRank *shards_make_runs(FakeRun *const *run, int world, const char *folder) {
    ShardsJob *j = (ShardsJob *)host_alloc(sizeof *j);
    ShardsRank *rank = (ShardsRank *)host_alloc(sizeof *rank * (size_t)world);
    j->world = world;
    pthread_mutex_init(&j->lock, NULL);
    pthread_cond_init(&j->changed, NULL);
    for (int r = 0; r < world; r++) {
        rank[r].job = j;
        rank[r].rank = r;
        CheckpointPeers p = {r, world, shards_gather, &rank[r]};
        rank[r].peers = p;
        rank[r].run = run[r];
        rank[r].run->rank = r;
        rank[r].run->world = world;
        rank[r].folder = folder;
    }
    return rank;
}

static ShardsRank *shards_make(ModelConfig m, int n_kinds, int world, const char *folder) {
    FakeRun *run[SHARDS_WORLD_MAX] = {NULL};
    for (int r = 0; r < world; r++) run[r] = fake_make(m, n_kinds, 1);
    return shards_make_runs(run, world, folder);
}

static void shards_free(ShardsRank *rank) {
    for (int r = 0; r < rank->job->world; r++) fake_free(rank[r].run);
    free(rank->job);
    free(rank);
}

// Spoils a tensor of a run, but for elements [first, last) of its part of the row.
static void shards_spoil(FakeRun *f, int kind, int row, int64_t first, int64_t last) {
    int64_t numel = param_numel(&f->table.row[row]), n = max_i64(0, last - first);
    float *kept = (float *)host_alloc((size_t)(n + 1) * 4), *value = f->value[kind][row];
    fake_copy(f, row, first, n, value, kept, true);
    for (int64_t i = 0; i < numel; i++) value[i] = NAN;
    fake_copy(f, row, first, n, value, kept, false);
    free(kept);
}

// The run holds the values of a step, spoilt where it does not own them.
static void shards_fill(FakeRun *f, int64_t step) {
    fake_fill(f, step);
    for (int k = 0; k < f->n_kinds; k++)
        for (int row = 0; row < f->table.n_rows; row++) {
            int64_t first = 0, last = 0;
            if (f->table.row[row].tied_to < 0 && f->table.row[row].numel > 0) fake_owned(f, row, &first, &last);
            shards_spoil(f, k, row, first, last);
        }
}

// The run is spoilt as soon as the copy is made. The ranks find out together when all writers are done, as they do by the sums of updates;
// saves of even steps are waited for instead.
static SaveResult shards_save_background(ShardsRank *r, CheckpointStore *s) {
    PeerWord word, *all = peers_words(&r->peers);
    memset(&word, 0, sizeof word);
    if (!s->copy.memory) checkpoint_copy_alloc(s, &r->run->tensors);
    checkpoint_begin(s, &r->run->state, &r->run->tensors, 0, 1);
    bool waits = r->run->state.step % 2 == 0;
    checkpoint_copied(s);
    for (int k = 0; k < r->run->n_kinds; k++) for (int row = 0; row < r->run->table.n_rows; row++) shards_spoil(r->run, k, row, 0, 0);
    if (waits) checkpoint_finish(s);
    for (bool over = waits || !checkpoint_saving(s); !over; ) {
        word.good = checkpoint_ready(s);
        if (peers_hear(&r->peers, &word, all) < 0) over = checkpoint_go_on(s);
        else usleep(100);
    }
    free(all);
    return s->job.result;
}

static void *shards_save_thread(void *arg) {
    ShardsRank *r = (ShardsRank *)arg;
    Io io = {shards_before, r};
    CheckpointStore *s = checkpoint_open_io(&r->peers, r->folder, false, &io);
    for (int i = 0; i < r->n_steps; i++) {
        shards_fill(r->run, r->steps[i]);
        r->result = r->background ? shards_save_background(r, s) : checkpoint_save(s, &r->run->state, &r->run->tensors, 0, 1);
        if (r->rank == 0 && r->result.durable && r->acknowledged) *r->acknowledged = r->steps[i];
    }
    checkpoint_close(s);
    pthread_mutex_lock(&r->job->lock);
    if (++r->job->ended == r->job->world && r->job->dead) _exit(7);
    pthread_mutex_unlock(&r->job->lock);
    return NULL;
}

static void *shards_load_thread(void *arg) {
    ShardsRank *r = (ShardsRank *)arg;
    r->name[0] = 0;
    if (!fake_load(r->run, &r->peers, r->folder, "auto", r->name, sizeof r->name)) r->name[0] = 0;
    return NULL;
}

static void shards_together(ShardsRank *rank, void *(*thread)(void *)) {
    pthread_t id[SHARDS_WORLD_MAX];
    rank->job->ended = 0;
    for (int r = 0; r < rank->job->world; r++) CHECK(pthread_create(&id[r], NULL, thread, &rank[r]) == 0, "no thread");
    for (int r = 0; r < rank->job->world; r++) pthread_join(id[r], NULL);
}

static void shards_save(ShardsRank *rank, int n, int64_t a, int64_t b) {
    for (int r = 0; r < rank->job->world; r++) rank[r].n_steps = n, rank[r].steps[0] = a, rank[r].steps[1] = b;
    shards_together(rank, shards_save_thread);
}

// All load; every rank must then hold `step`, in what it owns or whole. What was printed comes back in *c.
static void shards_expect_loaded(Test *t, const char *what, ShardsRank *rank, bool needs_owned, int64_t step, CkptCaptured *c) {
    char name[CHECKPOINT_NAME_MAX];
    step_name(name, step);
    for (int r = 0; r < rank->job->world; r++) {
        rank[r].run->needs_owned = needs_owned;
        shards_fill(rank[r].run, 99);
    }
    ckpt_capture_begin(c);
    shards_together(rank, shards_load_thread);
    ckpt_capture_end(c);
    for (int r = 0; r < rank->job->world; r++) {
        FakeRun *f = rank[r].run, *whole = fake_make(f->model, f->n_kinds, step);
        expect_true(t, strcmp(rank[r].name, name) == 0, "%s: rank %d loaded \"%s\", expected %s", what, r, rank[r].name, name);
        expect_true(t, f->state.tokens == step * 1000 && f->state.step == step, "%s: state of step %" PRId64, what, f->state.step);
        for (int k = 0; k < f->n_kinds; k++)
            for (int row = 0; row < f->table.n_rows; row++) {
                const ParamDesc *d = &f->table.row[row];
                int64_t first = 0, last = 0;
                if (d->numel > 0) fake_needed(f, row, &first, &last);
                float *want = (float *)host_alloc((size_t)param_numel(d) * 4); // what it did not ask for is still what it was
                for (int64_t i = 0; i < param_numel(d); i++) want[i] = NAN;
                float *part = (float *)host_alloc((size_t)(max_i64(0, last - first) + 1) * 4);
                fake_copy(f, row, first, last - first, whole->value[k][d->tied_to >= 0 ? d->tied_to : row], part, true);
                fake_copy(f, row, first, last - first, want, part, false);
                expect_same_bytes(t, what, f->value[k][row], want, param_numel(d) * 4);
                free(want);
                free(part);
            }
        fake_free(whole);
    }
}

// Any number of ranks reads what any other number wrote, each only what it needs; and writing it again gives the same files.
static void test_shards_round_trip(Test *t) {
    static const int worlds[] = {1, 2, 3, 5};
    CkptCaptured c;
    for (int w = 0; w < 4; w++) { // the second time in the background
        CkptPath folder, again, path;
        ckpt_folder_fast(folder);
        ShardsRank *rank = shards_make(fake_model(1, 8, 5), 2, worlds[w], folder);
        shards_save(rank, 2, 4, 5);
        for (int r = 0; r < worlds[w]; r++) {
            expect_true(t, rank[r].result.durable && rank[r].result.bytes == rank[0].result.bytes, "rank %d: %s", r, rank[r].result.why);
            expect_true(t, rank[r].result.bytes <= checkpoint_bytes(&rank[r].run->tensors, worlds[w]), "more bytes than foreseen");
        }
        expect_true(t, !ckpt_exists(folder, "step-00000004") && ckpt_verdict(folder, "step-00000005") == NULL, "not as it should be");
        expect_equal_i64(t, "files", ckpt_count(ckpt_join(path, folder, "step-00000005"), ckpt_count_visit), worlds[w] + 1);
        for (int v = 0; v < 4; v++)
            for (int owned = 0; owned < 2; owned++) {
                char what[64];
                snprintf(what, sizeof what, "%d ranks to %d", worlds[w], worlds[v]);
                ShardsRank *reader = shards_make(fake_model(1, 8, 5), 2, worlds[v], folder);
                shards_expect_loaded(t, what, reader, owned, 5, &c);
                expect_equal_text(t, "printed", c.text, "");
                shards_free(reader);
            }
        ckpt_folder_fast(again);
        for (int r = 0; r < worlds[w]; r++) rank[r].folder = again, rank[r].background = true;
        shards_save(rank, 1, 5, 0);
        for (int r = -1; r < worlds[w]; r++) {
            char name[64];
            int64_t bytes[2];
            if (r < 0) snprintf(name, sizeof name, "step-00000005/manifest.json");
            else snprintf(name, sizeof name, "step-00000005/shard-%d.bin", r);
            char *a = ckpt_slurp(ckpt_join(path, folder, name), &bytes[0]), *b = ckpt_slurp(ckpt_join(path, again, name), &bytes[1]);
            expect_equal_i64(t, "bytes of equal saves", bytes[1], bytes[0]);
            expect_same_bytes(t, name, b, a, min_i64(bytes[0], bytes[1]));
            free(a);
            free(b);
        }
        shards_free(rank);
        ckpt_remove(folder);
        ckpt_remove(again);
    }
}

static int64_t shards_bytes_read(void) { // by this process so far; -1: unknown
    char text[512], *at;
    int fd = open("/proc/self/io", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (n <= 0) return -1;
    text[n] = 0;
    at = strstr(text, "rchar:");
    return at ? strtoll(at + 6, NULL, 10) : -1;
}

// In the layout of the save the ranks together read all values twice: once to check them, once to take them.
static void test_shards_bytes_read(Test *t) {
    enum { WORLD = 4 };
    CkptPath folder;
    CkptCaptured c;
    ckpt_folder_fast(folder);
    ShardsRank *rank = shards_make(fake_model(2, 128, 5003), 2, WORLD, folder);
    shards_save(rank, 1, 5, 0);
    double total = (double)rank[0].result.bytes;
    for (int owned = 0; owned < 2; owned++) {
        for (int r = 0; r < WORLD; r++) rank[r].run->needs_owned = owned;
        int64_t before = shards_bytes_read();
        ckpt_capture_begin(&c);
        shards_together(rank, shards_load_thread);
        ckpt_capture_end(&c);
        double times = (double)(shards_bytes_read() - before) / total;
        if (before < 0) { test_skip(t, "no /proc/self/io"); break; }
        double want = owned ? 2 : 1 + WORLD; // at stage 0 all need everything
        expect_true(t, times > 0.95 * want && times < 1.25 * want + 0.3, "%d ranks that need %s read %.2f times the checkpoint, expected about %g", WORLD, owned ? "their part" : "all", times, want);
    }
    shards_free(rank);
    ckpt_remove(folder);
}

// One rank's call fails, for every call of every rank and two errors: no rank's save is durable, all name that rank, nothing is left
// behind, the older checkpoint loads, and the next save works.
static void test_shards_fail_one_rank(Test *t) {
    enum { WORLD = 3 };
    static const int errors[] = {ENOSPC, EIO};
    CkptCaptured c;
    int64_t struck = 0;
    for (int victim = 0; victim < WORLD; victim++)
        for (int e = 0; e < 4; e++) { // two errors, and in the background or not
            bool over = false;
            for (int64_t k = 1; !over; k++) {
                CkptPath folder;
                char who[32];
                ckpt_folder_fast(folder);
                ShardsRank *rank = shards_make(fake_model(1, 8, 5), 1, WORLD, folder);
                shards_save(rank, 1, 1, 0);
                for (int r = 0; r < WORLD; r++) rank[r].faults.calls = 0;
                shards_save(rank, 0, 0, 0);
                int64_t start = rank[victim].faults.calls; // what opening the store takes
                for (int r = 0; r < WORLD; r++) rank[r].faults.calls = rank[r].faults.top_sync = 0;
                rank[victim].faults.at = start + k;
                rank[victim].faults.error = errors[e % 2];
                for (int r = 0; r < WORLD; r++) rank[r].background = e >= 2;
                ckpt_capture_begin(&c);
                shards_save(rank, 1, 2, 0);
                ckpt_capture_end(&c);
                over = rank[victim].faults.calls < start + k || (victim == 0 && rank[0].result.durable); // what follows is one rank's affair
                struck += !over;
                snprintf(who, sizeof who, "rank %d on host ", victim);
                for (int r = 0; r < WORLD; r++) {
                    const SaveResult *s = &rank[r].result;
                    expect_true(t, s->durable == over && !s->not_a_number, "call %" PRId64 " of rank %d, rank %d: durable %d", k, victim, r, s->durable);
                    if (!over) expect_true(t, strncmp(s->why, who, strlen(who)) == 0 && strstr(s->why, strerror(errors[e % 2])) && strstr(s->why, folder), "call %" PRId64 " of rank %d, rank %d: \"%s\"", k, victim, r, s->why);
                    rank[r].faults.at = 0;
                }
                bool published = ckpt_exists(folder, "step-00000002"); // only the last fsync failed
                if (!over && !published) expect_equal_i64(t, "left behind", ckpt_count(folder, ckpt_hidden_visit), 0);
                shards_expect_loaded(t, "after a failed save", rank, victim % 2, published ? 2 : 1, &c);
                shards_save(rank, 1, 3, 0);
                expect_true(t, rank[victim].result.durable, "the next save fails: %s", rank[victim].result.why);
                shards_expect_loaded(t, "after the next save", rank, false, 3, &c);
                expect_equal_i64(t, "leftovers", ckpt_count(folder, ckpt_hidden_visit), 0);
                shards_free(rank);
                ckpt_remove(folder);
            }
        }
    expect_true(t, struck > 4 * (15 + 2 * 7), "only %" PRId64 " calls struck", struck);
}

typedef struct {
    CkptPath folder;
    int64_t *acknowledged;
    int victim;
    int64_t at;
    bool background;
} ShardsKilled;

static void shards_killed_run(void *arg) {
    ShardsKilled *k = (ShardsKilled *)arg;
    ShardsRank *rank = shards_make(fake_model(1, 8, 5), 1, 2, k->folder);
    rank[0].acknowledged = k->acknowledged;
    rank[k->victim].ends = true;
    rank[k->victim].faults.at = k->at;
    for (int r = 0; r < 2; r++) rank[r].background = k->background;
    shards_save(rank, 2, 1, 2);
}

// One rank ends at its k-th call, for every k of a start and two saves; the others end where they would wait for it. What was
// acknowledged loads, nothing torn has a final name, and the next start cleans up.
static void test_shards_stop_one_rank(Test *t) {
    CkptCaptured c;
    int64_t *acknowledged = (int64_t *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), stops = 0;
    CHECK(acknowledged != MAP_FAILED, "mmap");
    for (int way = 0; way < 4; way++)
        for (int64_t k = 1;; k += way < 2 ? 1 : 2) { // in the background the calls are the same
            const int victim = way % 2;
            ShardsKilled killed;
            char text[DIES_TEXT_BYTES];
            memset(&killed, 0, sizeof killed);
            ckpt_folder_fast(killed.folder);
            killed.acknowledged = acknowledged;
            killed.victim = victim;
            killed.background = way >= 2;
            killed.at = k;
            *acknowledged = 0;
            int code = run_in_child(shards_killed_run, &killed, text);
            expect_true(t, code == 7 || code == -1, "exit code %d: %s", code, text);
            const char *torn = ckpt_torn(killed.folder);
            expect_true(t, torn == NULL, "rank %d ends at call %" PRId64 ": a torn checkpoint has its final name: %s", victim, k, torn ? torn : "");
            ShardsRank *rank = shards_make(fake_model(1, 8, 5), 1, 3, killed.folder);
            bool any = ckpt_exists(killed.folder, "step-00000001") || ckpt_exists(killed.folder, "step-00000002");
            expect_true(t, any || *acknowledged == 0, "rank %d ends at call %" PRId64 ": step %" PRId64 " was durable and is gone", victim, k, *acknowledged);
            if (any && !torn) {
                int64_t newest = ckpt_exists(killed.folder, "step-00000002") ? 2 : 1;
                expect_true(t, newest >= *acknowledged, "step %" PRId64 " was durable", *acknowledged);
                shards_expect_loaded(t, "after a rank ended", rank, false, newest, &c);
            }
            ckpt_capture_begin(&c);
            shards_save(rank, 1, 3, 0);
            ckpt_capture_end(&c);
            expect_true(t, rank[1].result.durable, "the next run cannot save: %s", rank[1].result.why);
            expect_equal_i64(t, "leftovers", ckpt_count(killed.folder, ckpt_hidden_visit), 0);
            shards_free(rank);
            ckpt_remove(killed.folder);
            stops += code == 7;
            if (code == -1) break;
        }
    expect_true(t, stops > 90, "only %" PRId64 " stops", stops);
    munmap(acknowledged, 4096);
}

// A value that is no number on one rank refuses the save on all, and is not taken for a fault of the disk.
static void test_shards_not_finite(Test *t) {
    enum { WORLD = 3 };
    CkptPath folder;
    ckpt_folder_fast(folder);
    ShardsRank *rank = shards_make(fake_model(1, 8, 5), 1, WORLD, folder);
    for (int r = 0; r < WORLD; r++) rank[r].run->poison_row = 0, rank[r].run->poison = NAN;
    for (int way = 0; way < 2; way++) {
        for (int r = 0; r < WORLD; r++) rank[r].background = way;
        shards_save(rank, 1, 1 + way, 0);
        for (int r = 0; r < WORLD; r++) {
            expect_true(t, !rank[r].result.durable && rank[r].result.not_a_number, "rank %d: durable %d, not_a_number %d", r, rank[r].result.durable, rank[r].result.not_a_number);
            expect_contains(t, "why", rank[r].result.why, "rank 1 on host "); // it owns the middle of row 0
            expect_contains(t, "why", rank[r].result.why, "shard-1.bin: master of tensor wte.weight is NaN at element 20");
        }
    }
    shards_free(rank);
    ckpt_remove(folder);
}

static void shards_copy(const char *from, const char *to) {
    int64_t bytes;
    char *text = ckpt_slurp(from, &bytes);
    ckpt_spill(to, text, bytes);
    free(text);
}

// Damage of every kind in the newest checkpoint, in any file: all ranks, also of other numbers, take the older one.
static void test_shards_damage(Test *t) {
    enum { WORLD = 3, FLIPS = 40 };
    CkptPath folder, other, newest, path, with, aside;
    CkptCaptured c;
    ckpt_folder_fast(folder);
    ckpt_folder_fast(other);
    ShardsRank *rank = shards_make(fake_model(1, 8, 5), 2, WORLD, folder), *foreign = shards_make(fake_model(1, 8, 5), 2, WORLD, other), *reader[3];
    static const int readers[] = {3, 1, 2};
    for (int i = 0; i < 3; i++) reader[i] = shards_make(fake_model(1, 8, 5), 2, readers[i], folder);
    shards_save(rank, 1, 5, 0);
    ckpt_join(path, folder, "step-00000005"); // out of retention's way
    CHECK(rename(path, ckpt_join(aside, other, "step-00000005")) == 0, "rename");
    shards_save(rank, 1, 6, 0);
    CHECK(rename(aside, path) == 0, "rename");
    ckpt_join(newest, folder, "step-00000006");
    for (int i = 0; i < 3; i++) shards_expect_loaded(t, "undamaged", reader[i], true, 6, &c);
    // one bit, all over each file
    for (int file = -1; file < WORLD; file++) {
        char name[32];
        int64_t bytes;
        if (file < 0) snprintf(name, sizeof name, MANIFEST_FILE);
        else shard_name(name, file);
        char *good = ckpt_slurp(ckpt_join(path, newest, name), &bytes);
        for (int k = 0; k < FLIPS; k++) {
            int64_t at = k < 4 ? (k < 2 ? k * 8 : bytes - 1 - (k - 2)) : (int64_t)(rng_uniform(3, (uint64_t)(file + 1), (uint64_t)k) * (double)bytes);
            char what[96];
            snprintf(what, sizeof what, "%s: a bit of byte %" PRId64, name, at);
            good[at] ^= (char)(1 << k % 8);
            ckpt_spill(path, good, bytes);
            good[at] ^= (char)(1 << k % 8);
            shards_expect_loaded(t, what, reader[k % 3], k % 2, 5, &c);
            expect_contains(t, what, c.text, "step-00000006 is skipped: ");
            expect_contains(t, what, c.text, name);
        }
        ckpt_spill(path, good, bytes);
        free(good);
    }
    // two shards exchanged; one missing; one cut; one of another run, of the same step, rank and size
    shards_save(foreign, 1, 7, 0);
    for (int harm = 0; harm < 5; harm++) {
        CkptPath a, b;
        ckpt_join(a, newest, "shard-0.bin");
        ckpt_join(b, newest, "shard-2.bin");
        ckpt_join(path, newest, "shard-1.bin");
        ckpt_join(aside, other, "kept");
        shards_copy(path, aside);
        int64_t bytes;
        char *whole = ckpt_slurp(path, &bytes);
        switch (harm) {
        case 0: CHECK(rename(a, ckpt_join(with, other, "x")) == 0 && rename(b, a) == 0 && rename(with, b) == 0, "rename"); break;
        case 1: CHECK(unlink(path) == 0, "unlink"); break;
        case 2: ckpt_spill(path, whole, bytes - 1); break;
        case 3: shards_copy(ckpt_join(with, other, "step-00000007/shard-1.bin"), path); break;
        case 4: { // the foreign one with the step of this one
            char *strange = ckpt_slurp(ckpt_join(with, other, "step-00000007/shard-1.bin"), &bytes);
            ShardHeader *h = (ShardHeader *)strange;
            h->step = 6;
            h->crc = crc32c_extend(0, h, offsetof(ShardHeader, crc));
            ckpt_spill(path, strange, bytes);
            free(strange);
        }
        }
        static const char *const says[] = {"shard-0.bin: belongs to rank 2", "shard-1.bin: is missing", "shard-1.bin: has ", "shard-1.bin: belongs to rank 1 of 3 at step 7", "shard-1.bin: the checksum of its table"};
        for (int i = 0; i < 3; i++) {
            shards_expect_loaded(t, says[harm], reader[i], i % 2, 5, &c);
            if (!(harm == 0 && strstr(c.text, "shard-0.bin: has "))) expect_contains(t, "note", c.text, says[harm]); // shards of unlike sizes
        }
        if (harm == 0) CHECK(rename(a, with) == 0 && rename(b, a) == 0 && rename(with, b) == 0, "rename");
        shards_copy(aside, path);
        free(whole);
    }
    for (int i = 0; i < 3; i++) shards_expect_loaded(t, "mended", reader[i], true, 6, &c);
    for (int i = 0; i < 3; i++) shards_free(reader[i]);
    shards_free(rank);
    shards_free(foreign);
    ckpt_remove(folder);
    ckpt_remove(other);
}

typedef struct {
    const char *folder, *elsewhere;
    bool loads;
} ShardsApart;

static void shards_apart_run(void *arg) {
    ShardsApart *a = (ShardsApart *)arg;
    ShardsRank *rank = shards_make(fake_model(1, 8, 5), 1, 3, a->folder);
    rank[2].folder = a->elsewhere;
    rank[0].n_steps = rank[1].n_steps = rank[2].n_steps = 0;
    shards_together(rank, a->loads ? shards_load_thread : shards_save_thread);
}

// A host that sees no such folder, or another one, is named: at the start, and when loading.
static void test_shards_hosts_apart(Test *t) {
    CkptPath folder, other, missing;
    CkptCaptured c;
    ckpt_folder_fast(folder);
    ckpt_folder_fast(other);
    ckpt_join(missing, folder, "nowhere");
    ShardsRank *rank = shards_make(fake_model(1, 8, 5), 1, 3, folder);
    shards_save(rank, 1, 5, 0);
    ShardsApart a = {folder, missing, false};
    const char *const start[] = {"cannot be written to: rank 2 on host ", "all hosts see"};
    expect_dies_parts(t, EXIT_CANTCREAT, start, 2, shards_apart_run, &a); // no folder
    a.elsewhere = other;
    expect_dies_parts(t, EXIT_CANTCREAT, start, 2, shards_apart_run, &a); // another folder
    a.loads = true;
    a.elsewhere = missing;
    const char *const load[] = {"rank 2 on host ", "cannot be opened"};
    expect_dies_parts(t, EXIT_CHECKPOINT, load, 2, shards_apart_run, &a);
    // the same name, other contents: neither is loaded
    ShardsRank *two = shards_make(fake_model(1, 8, 5), 1, 2, other); // of two ranks
    shards_save(two, 1, 5, 0);
    a.elsewhere = other;
    const char *const differ[] = {"rank 2 on host ", "sees another checkpoint under this name"};
    expect_dies_parts(t, EXIT_CHECKPOINT, differ, 2, shards_apart_run, &a);
    shards_expect_loaded(t, "seen by all", rank, false, 5, &c);
    shards_free(two);
    shards_free(rank);
    ckpt_remove(folder);
    ckpt_remove(other);
}

// Loss of power at any call of three saves by two ranks, one of them repeated; and writers that are worse, which must be noticed.
static void shards_crash_model(Test *t, bool background) {
    enum { WORLD = 2 };
    static const Mutant mutants[] = {MUTANT_NONE, MUTANT_NO_SHARD_SYNC, MUTANT_NO_FOLDER_SYNC, MUTANT_PUBLISH_BEFORE_MANIFEST, MUTANT_NOT_WAITED};
    CkptPath folder;
    CkptCaptured c;
    ckpt_folder_fast(folder);
    CrashLog *log = (CrashLog *)host_alloc(sizeof *log);
    snprintf(log->root, sizeof log->root, "%s", folder);
    ShardsRank *rank = shards_make(fake_model(1, 4, 3), 1, WORLD, folder);
    ckpt_capture_begin(&c);
    shards_save(rank, 0, 0, 0);
    rank->job->log = log;
    for (int r = 0; r < WORLD; r++) rank[r].background = background;
    static const int64_t steps[] = {1, 2, 2, 3};
    for (int i = 0; i < 4; i++) {
        int made = log->n, published = -1;
        shards_save(rank, 1, steps[i], 0);
        expect_true(t, rank[0].result.durable && rank[1].result.durable, "save %d: %s", i, rank[0].result.why);
        for (int k = made; k < log->n; k++) if (crash_publishes(&log->op[k])) published = k;
        if (published < 0) continue;
        crash_mark(log, LOG_ACK, steps[i]);
        LogOp ack = log->op[log->n - 1];
        memmove(&log->op[published + 3], &log->op[published + 2], sizeof(LogOp) * (size_t)(log->n - 3 - published));
        log->op[published + 2] = ack;
    }
    ckpt_capture_end(&c);
    for (size_t i = 0; i < sizeof mutants / sizeof *mutants && t->failures == 0; i++) crash_try_mutant(t, log, mutants[i], "/shard-1.bin");
    crash_log_free(log);
    shards_free(rank);
    ckpt_remove(folder);
}

static void test_shards_crash_model(Test *t) { shards_crash_model(t, false); }
static void test_shards_crash_background(Test *t) { shards_crash_model(t, true); }

static const TestRow shards_tests[] = {
    {"round_trip", test_shards_round_trip}, {"bytes_read", test_shards_bytes_read}, {"fail_one_rank", test_shards_fail_one_rank},
    {"stop_one_rank", test_shards_stop_one_rank}, {"not_finite", test_shards_not_finite}, {"damage", test_shards_damage},
    {"hosts_apart", test_shards_hosts_apart}, {"crash_model", test_shards_crash_model}, {"crash_background", test_shards_crash_background}, {NULL, NULL},
};
