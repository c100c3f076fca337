// checkpoint.cu - saving a run so that it can be killed at any instant, and going on from there.
//
//     save_dir/.lock             held by the run that writes here
//     save_dir/latest            a hint for people: the name of the newest checkpoint
//     save_dir/step-00000100/    a checkpoint (see checkpoint_format.cu)
//     save_dir/.tmp-*            one that is being written      .trash-*  one that is being deleted
//
// Invariants:
//  1. A folder called step-N is complete, now and after any crash: it is filled under a temporary name, every file and
//     folder in it is fsynced, and only then renamed.
//  2. SaveResult.durable means that it survives a kill of everything and a loss of power at the next instant.
//  3. From the first durable save on, some durable checkpoint exists at every instant: older ones go only after that.
//  4. No name outside save_dir is touched, and no link inside it is followed.
//  5. Loading repairs nothing and writes nothing. Nothing reaches the model before the whole checkpoint was checked.
//  6. A checkpoint with a NaN in it is neither written nor loaded.
//  7. All ranks come to the same answer: a save is durable for all or for none, and all load the same checkpoint. Whatever
//     goes wrong on one of them goes wrong for all, and the message names that one.
//
// Rank 0 makes, publishes and deletes folders, and writes the manifest; each rank writes a file of what it owns, and reads
// what it needs. They meet (peers_meet) where one must know how the others fared: before rank 0 lets the manifest say that
// their files are there, and before anything reaches the model.
//
// A save has three steps, at whose ends all ranks meet: rank 0 makes the folder; every rank writes its shard; rank 0 writes the
// manifest and publishes. In the background (checkpoint_begin) the second is made by a thread of every rank, from a copy of
// what the rank owns, and the third by a thread of rank 0, while training goes on:
//
//     main      | meet, copy | update | update |  ...  | meet | update |  ...  | meet
//     writers              | write, fsync                    | manifest, rename
//
// The copy is made beside the next update, which may compute, but not change what is still being copied. The ranks' main threads
// alone talk to each other. They meet when all writers are done, which the ranks find out together (checkpoint_ready) by a
// sum that each update makes anyway. At most one save is on its way.
//
// The order of the calls of a save is the whole point; each says what a crash would do without it. The tests record these
// calls and try what is left after a crash at each of them, with any subset of the unsynced ones lost.
#pragma once
#include "checkpoint_format.cu"
#include "runtime/device.h"
#include "runtime/durable.h"
#include "runtime/thread.h"

enum {
    SLICE_NUMEL = 2 << 20,   // values on their way from a file to the run: 8 MiB
    STREAM_BYTES = 8 << 20,  // of a shard that are written at once; a multiple of SHARD_ALIGN
};

typedef struct {
    bool durable;
    int64_t step;
    int64_t bytes;       // written to the disk
    double seconds;      // from its begin to its end
    double stall_seconds; // of these the caller waited so long: all of them, unless in the background
    double write_seconds; // in which the slowest rank wrote and synced its shard
    char name[64];       // "step-00000100"
    char why[800];       // if not durable: rank and host where there are several, file, call, offset, reason
    bool not_a_number;   // if not durable: because the state holds NaN, or an infinite weight; a disk has no part in it
} SaveResult;

// The ranks of a run. All of them call, with the same arguments, what takes or holds this.
typedef struct {
    int rank, world;
    // all[r] = what rank r gave as `mine`, on every rank; some hundred bytes each. Null: there is only this one.
    void (*gather)(void *ctx, const void *mine, int64_t bytes, void *all);
    void *ctx;
} CheckpointPeers;

static const CheckpointPeers checkpoint_alone = {0, 1, NULL, NULL};

// What a rank tells the others where they meet.
typedef struct {
    int32_t good, error; // Io.error, if not good
    uint32_t crc;
    int64_t bytes;
    double seconds;
    char name[CHECKPOINT_NAME_MAX + 32]; // of a checkpoint, or of its temporary folder
    char host[64];
    char why[720];
} PeerWord;

// What this rank writes.
typedef struct {
    int64_t n_runs, data_bytes, file_bytes;
} StoredShardPlan;

typedef enum { SAVE_NONE, SAVE_COPYING, SAVE_WRITING, SAVE_PUBLISHING } SavePhase;

// The save that is on its way, or was the last one.
typedef struct {
    SavePhase phase;
    TrainingState state;
    CheckpointTensors tensors;
    StoredShardPlan plan;
    int64_t keep_n_most_recent, num_checkpoints_to_keep;
    SaveResult result;
    double start;
    PeerWord word, *all; // of this rank, for the next meeting; of all, at the last one
    pthread_t writer;    // makes the phase's step, in the background
    bool copied;         // what is written comes from SaveCopy
    bool writes;         // it has been started, and not been joined
    int done;            // it is at its end; atomic
    bool good;           // the step was
    int64_t manifest_bytes;
} SaveJob;

// Room for the copy of what this rank owns: null where saves are not made in the background.
typedef struct {
    char *memory;
    int64_t bytes;
    bool pinned;
    int64_t *at;         // of row and kind [kind * n_rows + row]: where its values are
} SaveCopy;

typedef struct {
    IoHandle folder;     // save_dir, where rank 0 holds it open
    CheckpointPeers peers;
    int lock_fd;         // -1 where the file system knows no locks, or when reading only
    bool read_only;
    int failed_in_a_row; // saves, for callers that give up after some
    SaveJob job;
    SaveCopy copy;
    Io io;
    char path[CONFIG_PATH_MAX];
} CheckpointStore;

// ---------------------------------------------------------------------------------------------------------------
// Ranks

// Every rank's word, in `all`. Afterwards `mine` holds the name that rank 0 gave. Returns the first rank whose word is not
// good, or -1.
static int peers_hear(const CheckpointPeers *p, PeerWord *mine, PeerWord *all) {
    char host[sizeof mine->host] = "";
    gethostname(host, sizeof host - 1);
    text_escape(mine->host, sizeof mine->host, host, strlen(host));
    if (p->gather) p->gather(p->ctx, mine, sizeof *mine, all);
    else all[0] = *mine;
    memcpy(mine->name, all[0].name, sizeof mine->name);
    for (int r = 0; r < p->world; r++) if (!all[r].good) return r;
    return -1;
}

// The same, for a yes or no: are all words good? If not, `why` (room bytes) says whose is not, and what that rank found.
static bool peers_meet(const CheckpointPeers *p, PeerWord *mine, PeerWord *all, char *why, size_t room) {
    int bad = peers_hear(p, mine, all);
    if (bad < 0) return true;
    int n = p->world > 1 ? snprintf(why, room, "rank %d on host %s: ", bad, all[bad].host) : 0;
    snprintf(why + n, room - (size_t)n, "%s", all[bad].why);
    return false;
}

static PeerWord *peers_words(const CheckpointPeers *p) { return (PeerWord *)host_alloc(sizeof(PeerWord) * (size_t)p->world); }

// ---------------------------------------------------------------------------------------------------------------
// Loading

// The steps of the checkpoints in a folder, newest first.
typedef struct {
    int64_t *step;
    int n, room;
} StepList;

static void step_visit(void *ctx, const char *name) {
    StepList *l = (StepList *)ctx;
    int64_t step = step_of_name(name);
    if (step < 0) return;
    if (l->n == l->room) {
        l->room = l->room ? 2 * l->room : 16;
        l->step = (int64_t *)realloc(l->step, sizeof(int64_t) * (size_t)l->room);
        if (!l->step) die(EXIT_INTERNAL, "out of host memory while listing %d checkpoints", l->n);
    }
    l->step[l->n++] = step;
}

static int step_newer_first(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

static bool steps_list(int fd, StepList *l) { // false with errno
    memset(l, 0, sizeof *l);
    if (!folder_each(fd, step_visit, l)) return false;
    if (l->n) qsort(l->step, (size_t)l->n, sizeof *l->step, step_newer_first);
    return true;
}

static const char *shape_text(char dst[64], int ndim, const int64_t *shape) {
    if (ndim == 1) snprintf(dst, 64, "(%" PRId64 ")", shape[0]);
    else snprintf(dst, 64, "(%" PRId64 ", %" PRId64 ")", shape[0], shape[1]);
    return dst;
}

// Counts a difference between checkpoint and run, and prints the first ones.
PRINTF_LIKE(2, 3) static void difference(int *n, const char *format, ...) {
    enum { PRINTED = 40 };
    char line[256];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (++*n <= PRINTED) note("%s", line);
    if (*n == PRINTED + 1) note("... and more");
}

static int stored_tensor_find(const Checkpoint *c, const char *name, int hint) { // lists are mostly in the same order
    if (hint < c->n_tensors && strcmp(c->tensor[hint].name, name) == 0) return hint;
    for (int i = 0; i < c->n_tensors; i++) if (strcmp(c->tensor[i].name, name) == 0) return i;
    return -1;
}

// Lists every difference between the checkpoint and the run, then dies if there are any. tensor_of[row] and kind_of[kind]
// receive the places in the checkpoint.
static void checkpoint_match(const Checkpoint *c, const CheckpointTensors *t, const char *where, int *tensor_of, int *kind_of) {
    int differences = 0, found = 0;
    for (int i = 0; i < MODEL_NUMBERS; i++) {
        int64_t stored = *number_of(&c->model, &model_numbers[i]), wanted = *number_of(t->model, &model_numbers[i]);
        if (stored != wanted)
            difference(&differences, "%s is %" PRId64 " in the checkpoint, %" PRId64 " in this run", model_numbers[i].name, stored, wanted);
    }
    if (c->model.layer_norm_epsilon != t->model->layer_norm_epsilon)
        difference(&differences, "layer_norm_epsilon is %g in the checkpoint, %g in this run", c->model.layer_norm_epsilon,
                   t->model->layer_norm_epsilon);
    if (c->model.tie_word_embeddings != t->model->tie_word_embeddings)
        difference(&differences, "tie_word_embeddings is %d in the checkpoint, %d in this run", c->model.tie_word_embeddings,
                   t->model->tie_word_embeddings);
    bool *used = (bool *)host_alloc((size_t)c->n_tensors);
    for (int row = 0; row < t->table->n_rows; row++) {
        const ParamDesc *r = &t->table->row[row];
        if (r->tied_to >= 0) { tensor_of[row] = tensor_of[r->tied_to]; continue; }
        char stored[64], wanted[64];
        int n = tensor_of[row] = stored_tensor_find(c, r->name, found++);
        if (n < 0) { difference(&differences, "%s: not in the checkpoint", r->name); continue; }
        used[n] = true;
        const StoredTensor *s = &c->tensor[n];
        if (s->ndim != r->ndim || s->shape[0] != r->shape[0] || s->shape[1] != r->shape[1])
            difference(&differences, "%s: %s in the checkpoint, %s in this run", r->name, shape_text(stored, s->ndim, s->shape),
                       shape_text(wanted, r->ndim, r->shape));
    }
    for (int i = 0; i < c->n_tensors; i++) if (!used[i]) difference(&differences, "%s: in the checkpoint, not in this run", c->tensor[i].name);
    free(used);
    bool kind_used[CHECKPOINT_KINDS_MAX] = {false};
    for (int k = 0; k < t->n_kinds; k++) {
        kind_of[k] = -1;
        for (int i = 0; i < c->n_kinds; i++) if (strcmp(c->kind[i], t->kind[k]) == 0) { kind_of[k] = i; kind_used[i] = true; }
        if (kind_of[k] < 0) difference(&differences, "optimizer state %s: not in the checkpoint", t->kind[k]);
    }
    for (int i = 0; i < c->n_kinds; i++)
        if (!kind_used[i] && t->get)
            difference(&differences, "optimizer state %s: in the checkpoint, not used by this run's optimizer", c->kind[i]);
    if (differences)
        die_told(EXIT_CHECKPOINT, "%s is a checkpoint of another model or optimizer (%d differences, listed above); give this run its configuration, or start anew with run.resume=none and another checkpoint.save_dir",
            where, differences);
}

// Hands the run what this rank needs of all tensors. The checkpoint was checked; what fails now was changed since.
static bool checkpoint_put(Checkpoint *c, const CheckpointTensors *t, const int *tensor_of, const int *kind_of) {
    float *values = (float *)host_alloc((size_t)SLICE_NUMEL * 4);
    bool good = true;
    for (int k = 0; k < t->n_kinds && good; k++)
        for (int row = 0; row < t->table->n_rows && good; row++) {
            const ParamDesc *r = &t->table->row[row];
            ParamRun run[PARAM_RUNS_MAX];
            int64_t first, last;
            if (r->numel == 0) continue; // not here
            t->needed(t->ctx, row, &first, &last);
            for (int64_t n; first < last && good; first += n) {
                n = min_i64(last - first, SLICE_NUMEL);
                good = stored_values_read(c, tensor_of[row], kind_of[k], run, param_runs(r, t->table->tp_rank, first, first + n, run), values);
                if (good) t->put(t->ctx, row, k, first, n, values);
            }
        }
    free(values);
    return good;
}

typedef struct {
    const Checkpoint *c;
    int n;
    char first[64];
} ForeignVisit;

static void foreign_visit(void *ctx, const char *name) {
    ForeignVisit *v = (ForeignVisit *)ctx;
    if (strcmp(name, MANIFEST_FILE) == 0) return;
    for (int i = 0; i < v->c->n_shards; i++) if (strcmp(name, v->c->shard[i].file) == 0) return;
    if (v->n++ == 0) text_escape(v->first, sizeof v->first, name, strlen(name));
}

// Is a step of loading good on all ranks, and is it the same checkpoint that they see? If not, c->why says where not.
static bool load_meet(Checkpoint *c, const CheckpointPeers *p, bool good) {
    PeerWord word, *all = peers_words(p);
    char why[sizeof c->why];
    memset(&word, 0, sizeof word);
    word.good = good;
    word.crc = c->manifest_crc;
    snprintf(word.why, sizeof word.why, "%s", c->why);
    good = peers_meet(p, &word, all, why, sizeof why);
    if (!good) memcpy(c->why, why, sizeof why);
    for (int r = 1; r < p->world && good; r++)
        if (all[r].crc != all[0].crc)
            good = checkpoint_bad(c, "rank %d on host %s sees another checkpoint under this name than rank 0 on host %s; all hosts must see the same folder", r,
                                  all[r].host, all[0].host);
    free(all);
    return good;
}

// Reads and checks one checkpoint, and if it is good, fills the run from it. Each rank checks its part of all values. False:
// it is damaged, see c->why. Dies when it is sound but of another model.
static bool checkpoint_try(Checkpoint *c, const CheckpointPeers *p, int folder, const char *name, const char *where, TrainingState *state,
                           const CheckpointTensors *t) {
    bool good = load_meet(c, p, checkpoint_read(c, folder, name));
    if (good) {
        int *tensor_of = (int *)host_alloc(sizeof(int) * (size_t)t->table->n_rows), kind_of[CHECKPOINT_KINDS_MAX];
        checkpoint_match(c, t, where, tensor_of, kind_of);
        good = load_meet(c, p, values_check(c, p->rank, p->world));
        if (good) {
            ForeignVisit v = {c, 0, ""};
            if (p->rank == 0 && folder_each(c->fd, foreign_visit, &v) && v.n) note("%s: %d foreign files ignored, such as %s", where, v.n, v.first);
            if (!load_meet(c, p, checkpoint_put(c, t, tensor_of, kind_of)))
                die_told(EXIT_CHECKPOINT, "%s was changed while it was loaded: %s; start again", where, c->why);
            *state = c->state;
        }
        free(tensor_of);
    }
    return good;
}

// `latest` is a hint for people; a word when it names a newer checkpoint than the folder holds.
static void latest_compare(int folder, int64_t newest, const char *shown) {
    char text[CHECKPOINT_NAME_MAX] = "";
    int fd = openat(folder, "latest", O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return;
    text[strcspn(text, "\n")] = 0;
    if (step_of_name(text) > newest) note("%s/latest names %s, which is not there", shown, text);
}

// The last component of a path, escaped: the name of a checkpoint that was given as a folder.
static void path_last(char *dst, size_t room, const char *path) {
    size_t end = strlen(path), start;
    while (end > 1 && path[end - 1] == '/') end--;
    for (start = end; start > 0 && path[start - 1] != '/';) start--;
    text_escape(dst, room, path + start, end - start);
}

typedef struct {
    char (*name)[CHECKPOINT_NAME_MAX]; // "." stands for the folder itself
    int n;
} LoadCandidates;

// Rank 0's part of the choice: the checkpoints to be tried, in this order. False with a reason in `why` (room bytes).
static bool load_candidates(LoadCandidates *l, int folder, const char *which, const char *shown, char *why, size_t room) {
    struct stat st;
    StepList steps;
    bool automatic = strcmp(which, "auto") == 0, itself = automatic && fstatat(folder, MANIFEST_FILE, &st, AT_SYMLINK_NOFOLLOW) == 0;
    bool missing = !automatic && fstatat(folder, which, &st, AT_SYMLINK_NOFOLLOW) != 0;
    int error = errno;
    if (!steps_list(folder, &steps)) {
        snprintf(why, room, "%s: cannot be listed: %s", shown, strerror(errno));
        return false;
    }
    l->n = itself || !automatic ? 1 : steps.n;
    l->name = (char (*)[CHECKPOINT_NAME_MAX])host_alloc((size_t)l->n * sizeof *l->name);
    for (int i = 0; i < l->n; i++) {
        if (itself || !automatic) snprintf(l->name[i], sizeof *l->name, "%.63s", itself ? "." : which); // a valid tag fits
        else step_name(l->name[i], steps.step[i]);
    }
    if (automatic && !itself && steps.n) latest_compare(folder, steps.step[0], shown);
    if (missing) {
        size_t used = (size_t)snprintf(why, room, "checkpoint %s/%s: %s; there are: %s", shown, which, error == ENOENT ? "is missing" : strerror(error), steps.n ? "" : "none");
        for (int i = 0; i < steps.n && used + 80 < room; i++) {
            char name[CHECKPOINT_NAME_MAX];
            step_name(name, steps.step[i]);
            used += (size_t)snprintf(why + used, room - used, "%s%s", i ? ", " : "", i < 20 ? name : "...");
            if (i == 20) break;
        }
    }
    free(steps.step);
    return !missing;
}

// Fills the run from a checkpoint in folder `dir`. which: "auto" takes the newest good one by step (or dir itself, if it is
// a checkpoint); otherwise the name of one. Bad ones are named and skipped by "auto". Returns false when "auto" finds no
// checkpoint at all, good or bad. Dies (EXIT_CHECKPOINT) when there are only bad ones, when the one asked for is missing or
// bad, and when the one chosen belongs to another model or optimizer. loaded_name (room bytes) receives its name. Rank 0
// says what is tried, and all ranks try it together.
static bool checkpoint_load(const CheckpointPeers *p, const char *dir, const char *which, TrainingState *state, const CheckpointTensors *t,
                            char *loaded_name, size_t room) {
    char shown[512], where[640], tag[160], why[1200] = "";
    text_escape(shown, sizeof shown, dir, strlen(dir));
    bool automatic = strcmp(which, "auto") == 0, loaded = false, itself = false;
    if (!automatic && !tag_is_valid(which))
        die_told(EXIT_CHECKPOINT, "\"%s\" is no name of a checkpoint: letters, digits and . _ - only, at most %d of them, none of them first a dot",
                 text_escape(tag, sizeof tag, which, strlen(which)), CHECKPOINT_NAME_MAX - 1);
    int folder = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC); // a link here is the user's wish
    int open_error = errno, bad = 0;
    LoadCandidates candidates = {NULL, 0};
    PeerWord word, *all = peers_words(p);
    memset(&word, 0, sizeof word);
    word.good = true;
    if (p->rank == 0 && folder >= 0) word.good = load_candidates(&candidates, folder, which, shown, why, sizeof why);
    else if (p->rank == 0 && !(automatic && open_error == ENOENT)) {
        snprintf(why, sizeof why, "%s: %s; no checkpoint can be read there", shown, strerror(open_error));
        word.good = false;
    }
    for (int i = 0; !loaded; i++) {
        snprintf(word.name, sizeof word.name, "%s", i < candidates.n ? candidates.name[i] : "");
        if (peers_hear(p, &word, all) >= 0) die_told(EXIT_CHECKPOINT, "%s", why);
        if (!word.name[0]) break;
        Checkpoint c;
        itself = strcmp(word.name, ".") == 0;
        snprintf(where, sizeof where, "%s%s%s", shown, itself ? "" : "/", itself ? "" : word.name);
        loaded = checkpoint_try(&c, p, folder, word.name, where, state, t);
        if (loaded && itself) path_last(loaded_name, room, dir);
        else if (loaded) snprintf(loaded_name, room, "%s", word.name);
        else {
            if (automatic && !itself) note("checkpoint %s is skipped: %s", where, c.why);
            if (bad++ == 0) snprintf(why, sizeof why, itself || !automatic ? "%s" : "%s: %s", itself || !automatic ? c.why : word.name, c.why);
        }
        checkpoint_free(&c);
    }
    free(all);
    free(candidates.name);
    if (folder >= 0) close(folder);
    if (loaded || bad == 0) return loaded;
    if (itself) die_told(EXIT_CHECKPOINT, "checkpoint %s cannot be loaded: %s", shown, why);
    if (!automatic)
        die_told(EXIT_CHECKPOINT, "checkpoint %s cannot be loaded: %s; choose another with run.resume, or let run.resume=auto take the newest good one", where, why);
    die_told(EXIT_CHECKPOINT, "%s: none of its %d checkpoints can be loaded (%s); bring one back from a copy, or start anew on purpose with run.resume=none",
             shown, bad, why);
}

// ---------------------------------------------------------------------------------------------------------------
// The folder and its lock

// Makes a folder and whatever is missing above it. The name of a new folder is data of the folder above, so those are
// fsynced; also the ones that were there, since whoever made them may have done it a moment ago. A failure of that is told
// and borne: some of them may be other people's.
static void store_make_folders(CheckpointStore *s, const char *shown) {
    char part[CONFIG_PATH_MAX];
    const char *path = s->path;
    IoHandle above = {open(path[0] == '/' ? "/" : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), ".."};
    for (size_t i = 0; path[i]; i++) {
        part[i] = path[i];
        bool last = path[i + 1] == 0;
        if ((path[i] != '/' && !last) || (path[i] == '/' && i == 0)) continue;
        part[i + last] = 0;
        if (mkdir(part, 0777) != 0 && errno != EEXIST && errno != EISDIR) {
            struct stat st; // mkdir may refuse a folder that exists before it looks (read-only, no permission)
            int error = errno;
            if (stat(part, &st) != 0) die(EXIT_CANTCREAT, "checkpoint.save_dir %s: cannot create it: %s", shown, strerror(error));
        }
        if (above.fd >= 0 && !io_sync(&s->io, &above)) note("checkpoint.save_dir %s: fsync of a folder above it failed: %s", shown, s->io.why);
        if (above.fd >= 0) close(above.fd);
        above.fd = open(part, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        part[i] = path[i];
    }
    if (above.fd >= 0) close(above.fd);
}

// One run writes into a folder: two would delete each other's checkpoints. The kernel drops the lock when the process ends,
// however it ends.
static void store_lock(CheckpointStore *s, const char *shown) {
    s->lock_fd = openat(s->folder.fd, ".lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (s->lock_fd < 0) {
        struct stat st;
        int error = errno;
        char owner[64] = "";
        if (fstatat(s->folder.fd, ".lock", &st, AT_SYMLINK_NOFOLLOW) == 0)
            snprintf(owner, sizeof owner, " (it belongs to user %u)", (unsigned)st.st_uid);
        die(EXIT_CANTCREAT, "checkpoint.save_dir %s: cannot open its file .lock for writing%s: %s; choose a folder that this user may write to",
            shown, owner, error == ELOOP ? "it is a symbolic link" : strerror(error));
    }
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (fcntl(s->lock_fd, F_OFD_SETLK, &lock) == 0) {
        char host[128] = "", text[192];
        gethostname(host, sizeof host - 1);
        int n = snprintf(text, sizeof text, "pid %ld on host %s\n", (long)getpid(), host);
        if (ftruncate(s->lock_fd, 0) != 0 || pwrite(s->lock_fd, text, (size_t)n, 0) != n)
            note("checkpoint.save_dir %s: this process's name could not be written into its file .lock; it is locked all the same", shown);
        return;
    }
    if (errno != EAGAIN && errno != EACCES) {
        note("checkpoint.save_dir %s: this file system has no locks (%s): make sure that no other run writes there", shown, strerror(errno));
        return;
    }
    char text[192] = "", holder[256];
    ssize_t n = pread(s->lock_fd, text, sizeof text - 1, 0);
    if (n < 0) n = 0;
    text_escape(holder, sizeof holder, text, strcspn(text, "\n"));
    die(EXIT_CONFIG, "checkpoint.save_dir %s is in use by another run (%s); stop that run or let it end, or give this one another checkpoint.save_dir",
        shown, holder[0] ? holder : "which has not said its name yet");
}

typedef struct {
    CheckpointStore *s;
    int removed, left;
    char first_why[400];
} SweepVisit;

static void sweep_visit(void *ctx, const char *name) {
    SweepVisit *v = (SweepVisit *)ctx;
    if (strncmp(name, ".tmp-", 5) != 0 && strncmp(name, ".trash-", 7) != 0 && strncmp(name, ".latest-", 8) != 0) return;
    if (io_remove(&v->s->io, &v->s->folder, name)) v->removed++;
    else if (v->left++ == 0) snprintf(v->first_why, sizeof v->first_why, "%s", v->s->io.why);
}

// Removes what interrupted saves left behind. The fsync first: a .trash-* folder may have been renamed a moment ago by a
// process that died, and a loss of power after this could bring back its final name with the contents gone.
static void store_sweep(CheckpointStore *s, const char *shown) {
    SweepVisit v = {s, 0, 0, ""};
    if (!io_sync(&s->io, &s->folder)) { note("checkpoint.save_dir %s: leftovers are not removed: %s", shown, s->io.why); return; }
    if (!folder_each(s->folder.fd, sweep_visit, &v)) note("checkpoint.save_dir %s: cannot be listed: %s", shown, strerror(errno));
    if (v.removed) note("checkpoint.save_dir %s: %d leftovers of interrupted saves removed", shown, v.removed);
    if (v.left) note("checkpoint.save_dir %s: %d leftovers of interrupted saves could not be removed: %s", shown, v.left, v.first_why);
}

// Rank 0 creates, locks and sweeps the folder, or dies.
static void store_attach(CheckpointStore *s) {
    char shown[512];
    text_escape(shown, sizeof shown, s->path, strlen(s->path));
    if (!s->read_only) store_make_folders(s, shown);
    s->folder.name[0] = 0;
    s->lock_fd = -1;
    s->folder.fd = open(s->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC); // a link here is the user's wish
    if (s->folder.fd < 0)
        die(s->read_only ? EXIT_CHECKPOINT : EXIT_CANTCREAT, "checkpoint.save_dir %s: %s", shown,
            errno == ENOTDIR ? "is not a folder" : strerror(errno));
    if (s->read_only) return;
    store_lock(s, shown);
    store_sweep(s, shown);
}

// Opens what rank 0 calls `name` in save_dir, as this rank sees it. The path is walked each time, since rank 0 may have made
// the folder anew.
static bool store_open_shared(CheckpointStore *s, const char *name, IoHandle *folder) {
    IoHandle above = {s->peers.rank == 0 ? s->folder.fd : open(s->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), ""};
    if (above.fd < 0) return io_failed(&s->io, "", "open");
    bool good = io_open_folder(&s->io, &above, name, folder);
    if (!good && s->io.error == ENOENT) snprintf(s->io.why, sizeof s->io.why, "%s: is not there; all hosts must see the folder that rank 0 writes to", name);
    if (s->peers.rank > 0) close(above.fd);
    return good;
}

// Can each rank write into the folder? Found out at the start, not at the first save. Permission bits do not tell (read-only
// mounts, quotas, hosts that see another folder under this path), so all ranks try it. Dies if one cannot.
static void store_meet(CheckpointStore *s) {
    PeerWord word, *all = peers_words(&s->peers);
    char shown[512], why[800], file[32];
    IoHandle folder, probe;
    text_escape(shown, sizeof shown, s->path, strlen(s->path));
    memset(&word, 0, sizeof word);
    if (s->peers.rank == 0) snprintf(word.name, sizeof word.name, ".tmp-probe-%016" PRIx64, io_nonce());
    word.good = s->peers.rank > 0 || io_mkdir(&s->io, &s->folder, word.name);
    bool good = peers_hear(&s->peers, &word, all) < 0 && store_open_shared(s, word.name, &folder);
    snprintf(file, sizeof file, "rank-%d", s->peers.rank);
    if (good) {
        good = io_create(&s->io, &folder, file, &probe);
        good = good && io_close(&s->io, &probe) && io_unlink(&s->io, &folder, file, false);
        close(folder.fd);
    }
    word.good = good;
    if (!good) snprintf(word.why, sizeof word.why, "%s", s->io.why);
    good = peers_meet(&s->peers, &word, all, why, sizeof why);
    if (s->peers.rank == 0) {
        Io quiet = s->io;
        io_remove(&quiet, &s->folder, word.name);
    }
    free(all);
    if (!good)
        die_told(EXIT_CANTCREAT, "checkpoint.save_dir %s cannot be written to: %s; choose a folder that %sthis user may write to", shown, why,
                 s->peers.world > 1 ? "all hosts see and " : "");
}

// Opens save_dir for a run that saves into it: creates it, takes its lock, removes leftovers of interrupted saves. Dies with
// EXIT_CONFIG when another run holds the lock, with EXIT_CANTCREAT when it cannot be created or written to. read_only:
// none of this, the folder must exist and checkpoint_save must not be called. io: the seam of the tests, or null.
static CheckpointStore *checkpoint_open_io(const CheckpointPeers *p, const char *save_dir, bool read_only, const Io *io) {
    CheckpointStore *s = (CheckpointStore *)host_alloc(sizeof *s);
    if (strlen(save_dir) >= sizeof s->path)
        die_told(EXIT_CONFIG, "checkpoint.save_dir has %zu bytes, more than %zu", strlen(save_dir), sizeof s->path - 1);
    if (!*save_dir) die_told(EXIT_CONFIG, "checkpoint.save_dir is empty; name a folder");
    strcpy(s->path, save_dir);
    s->peers = *p;
    s->read_only = read_only;
    s->folder.fd = s->lock_fd = -1;
    if (io) s->io = *io;
    if (p->rank == 0) store_attach(s);
    if (!read_only) store_meet(s);
    return s;
}

static CheckpointStore *checkpoint_open(const CheckpointPeers *p, const char *save_dir, bool read_only) { return checkpoint_open_io(p, save_dir, read_only, NULL); }

static void checkpoint_close(CheckpointStore *s) {
    CHECK(s->job.phase == SAVE_NONE, "a save is on its way");
    pinned_region_free(s->copy.memory, s->copy.bytes, s->copy.pinned);
    free(s->copy.at);
    if (s->lock_fd >= 0) close(s->lock_fd); // drops the lock
    if (s->folder.fd >= 0) close(s->folder.fd);
    free(s);
}

// ---------------------------------------------------------------------------------------------------------------
// Writing

// The range of its part of a row that this rank saves. False if there is none.
static bool stored_range(const CheckpointTensors *t, int row, int64_t *first, int64_t *last) {
    if (t->table->row[row].tied_to >= 0 || t->table->row[row].numel == 0) return false;
    t->owned(t->ctx, row, first, last);
    return *first < *last;
}

static StoredShardPlan stored_shard_plan(const CheckpointTensors *t) {
    StoredShardPlan p = {0, 0, 0};
    for (int row = 0; row < t->table->n_rows; row++) {
        ParamRun run[PARAM_RUNS_MAX];
        int64_t first, last;
        if (!stored_range(t, row, &first, &last)) continue;
        p.n_runs += t->n_kinds * param_runs(&t->table->row[row], t->table->tp_rank, first, last, run);
        p.data_bytes += (last - first) * 4 * t->n_kinds;
    }
    p.file_bytes = stored_shard_file_bytes(CHECKPOINT_VERSION, p.data_bytes, p.n_runs);
    return p;
}

// Bytes on the disk of one checkpoint, at most; the manifest estimated.
static int64_t checkpoint_bytes(const CheckpointTensors *t, int world) {
    int64_t runs = 0, bytes = 0;
    for (int row = 0; row < t->table->n_rows; row++) {
        const ParamDesc *r = &t->table->row[row];
        if (r->tied_to >= 0) continue;
        runs += t->n_kinds * (t->table->tp > 1 && r->split != SPLIT_NONE ? PARAM_RUNS_MAX : 1);
        bytes += param_numel(r) * 4 * t->n_kinds;
    }
    int64_t tables = stored_shard_table_bytes(CHECKPOINT_VERSION, bytes, runs * world) + 4 * world; // a run cut at every rank; a short piece each
    return bytes + tables + world * (2 * SHARD_ALIGN + 128) + 4096 + 256 * (int64_t)t->table->n_rows;
}

// Free bytes without which a save does not begin: a twentieth more, which the file system may take for itself, and 1 MiB.
static int64_t checkpoint_room(const CheckpointTensors *t, int world) {
    int64_t bytes = checkpoint_bytes(t, world);
    return bytes + bytes / 20 + (1 << 20);
}

// Says so, once at the start of a run, when the checkpoints that it will keep do not fit on the disk.
static void checkpoint_space_note(CheckpointStore *s, const CheckpointTensors *t, int64_t num_checkpoints_to_keep) {
    int64_t free_bytes, bytes = checkpoint_bytes(t, s->peers.world), kept = num_checkpoints_to_keep > 0 ? num_checkpoints_to_keep : 1;
    char shown[512];
    StepList l;
    if (s->read_only || s->peers.rank > 0 || !io_space(&s->io, &s->folder, &free_bytes) || !steps_list(s->folder.fd, &l)) return;
    int64_t more = max_i64(1, kept - l.n + 1); // one more than are kept exists while it is being written
    double needed = (double)(more - 1) * (double)bytes + (double)checkpoint_room(t, s->peers.world);
    if (needed > (double)free_bytes)
        note("checkpoint.save_dir %s: a checkpoint takes %.1f MB, and %" PRId64 " more of them will be written before one goes, which with a reserve needs %.1f MB, but only %.1f MB are free: saves will fail then, and training will go on without them",
             text_escape(shown, sizeof shown, s->path, strlen(s->path)), (double)bytes / 1e6, more, needed / 1e6, (double)free_bytes / 1e6);
    free(l.step);
}

static bool save_refused(Io *io, const char *name, const char *format, ...) PRINTF_LIKE(3, 4);
static bool save_refused(Io *io, const char *name, const char *format, ...) {
    char what[300];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    io->error = 0;
    snprintf(io->why, sizeof io->why, "%s: %s", name, what);
    return false;
}

// A shard is written from front to back, in buffers of STREAM_BYTES. While one is filled, a thread writes the other.
typedef struct {
    Io *io;
    IoHandle *file;
    char *buffer[2];
    int64_t room, used;      // bytes: of each, and of the one that is being filled
    int64_t at;              // where that one goes
    int filling;
    bool threaded;           // a shard that fits one buffer needs no thread
    pthread_t thread;
    // Shared with the thread, under the lock.
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t writing;         // bytes of the other buffer that are being written, to `from` on
    int64_t from;
    bool good, ends;
} ShardStream;

static void *stream_thread(void *stream) {
    ShardStream *w = (ShardStream *)stream;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (!w->writing && !w->ends) pthread_cond_wait(&w->changed, &w->lock);
        if (!w->writing) break;
        const char *data = w->buffer[1 - w->filling];
        pthread_mutex_unlock(&w->lock);
        bool good = io_write(w->io, w->file, data, w->writing, w->from);
        pthread_mutex_lock(&w->lock);
        w->good &= good;
        w->writing = 0;
        pthread_cond_broadcast(&w->changed);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

static void stream_open(ShardStream *w, Io *io, IoHandle *file, int64_t bytes) {
    memset(w, 0, sizeof *w);
    w->io = io;
    w->file = file;
    w->good = true;
    w->threaded = bytes > STREAM_BYTES;
    w->room = min_i64(bytes, STREAM_BYTES);
    for (int i = 0; i < 1 + w->threaded; i++)
        if (posix_memalign((void **)&w->buffer[i], SHARD_ALIGN, (size_t)w->room) != 0) die(EXIT_INTERNAL, "out of host memory for a buffer of %" PRId64 " bytes", w->room);
    io_direct(file, true);
    if (!w->threaded) return;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    int error = thread_start(&w->thread, stream_thread, w);
    if (error) die(EXIT_INTERNAL, "no thread for the writer of checkpoints: %s", strerror(error));
}

// The buffer that was filled leaves, when the one before it is written. False if something could not be.
static bool stream_flush(ShardStream *w) {
    bool good;
    if (!w->threaded) good = w->good = w->good && io_write(w->io, w->file, w->buffer[0], w->used, w->at);
    else {
        pthread_mutex_lock(&w->lock);
        while (w->writing) pthread_cond_wait(&w->changed, &w->lock);
        good = w->good;
        if (good) {
            w->filling = 1 - w->filling;
            w->writing = w->used;
            w->from = w->at;
        }
        pthread_cond_broadcast(&w->changed);
        pthread_mutex_unlock(&w->lock);
    }
    w->at += w->used;
    w->used = 0;
    return good;
}

// Where the next bytes are to be put, at most *bytes (never 0), and that so many were.
static void *stream_room(ShardStream *w, int64_t *bytes) {
    *bytes = w->room - w->used;
    return w->buffer[w->filling] + w->used;
}
static bool stream_filled(ShardStream *w, int64_t bytes) {
    w->used += bytes;
    return w->used < w->room || stream_flush(w);
}

static bool stream_put(ShardStream *w, const void *data, int64_t bytes) {
    for (int64_t room, n; bytes > 0; bytes -= n, data = (const char *)data + n) {
        void *to = stream_room(w, &room);
        n = min_i64(room, bytes);
        memcpy(to, data, (size_t)n);
        if (!stream_filled(w, n)) return false;
    }
    return true;
}

// The rest leaves, if it is good; true when all of it has been written.
static bool stream_close(ShardStream *w, bool good) {
    if (good && w->used > 0) stream_flush(w);
    if (w->threaded) {
        pthread_mutex_lock(&w->lock);
        w->ends = true;
        pthread_cond_broadcast(&w->changed);
        pthread_mutex_unlock(&w->lock);
        pthread_join(w->thread, NULL);
        pthread_mutex_destroy(&w->lock);
        pthread_cond_destroy(&w->changed);
    }
    free(w->buffer[0]);
    free(w->buffer[1]);
    return good && w->good;
}

// Adds n values, behind the `at` bytes of values that are there, to the checksums of their pieces. Before they are written: a checksum
// of what was read back would certify damage.
static void stored_slice_sum(const float *values, int64_t n, int64_t at, uint32_t *piece_crc) {
    for (int64_t done = 0, part; done < n * 4; done += part) {
        part = min_i64(n * 4 - done, PIECE_BYTES - (at + done) % PIECE_BYTES);
        uint32_t *crc = &piece_crc[(at + done) / PIECE_BYTES];
        *crc = crc32c_extend(*crc, (const char *)values + done, (size_t)part);
    }
}

// n values of what is saved, from `first` on: as they are, or out of the copy.
static void save_values(CheckpointStore *s, int row, int kind, int64_t first, int64_t n, float *values) {
    const CheckpointTensors *t = &s->job.tensors;
    int64_t from, to;
    if (!s->job.copied) { t->get(t->ctx, row, kind, first, n, values); return; }
    stored_range(t, row, &from, &to);
    t->kept_get(t->ctx, row, kind, to - from, s->copy.memory + s->copy.at[kind * t->table->n_rows + row], first - from, n, values);
}

// A value that may not be kept, if there is one.
typedef struct {
    bool found, not_a_number;
    int row, kind;
    int64_t element;
} BadValue;

// Writes elements [first, last) of a row's part, behind the `at` bytes of values that are there.
static bool stored_range_write(CheckpointStore *s, ShardStream *out, int row, int kind, int64_t first, int64_t last, int64_t at, uint32_t *piece_crc, BadValue *bad) {
    const ParamDesc *r = &s->job.tensors.table->row[row];
    for (int64_t n, room; first < last; first += n, at += n * 4) {
        float *values = (float *)stream_room(out, &room);
        n = min_i64(last - first, room / 4);
        save_values(s, row, kind, first, n, values);
        int64_t i = first_bad_value(values, n, kind);
        if (i >= 0) {
            ParamRun run[PARAM_RUNS_MAX];
            param_runs(r, s->job.tensors.table->tp_rank, first + i, first + i + 1, run);
            *bad = {true, (bool)isnan(values[i]), row, kind, run[0].global_offset};
            return false;
        }
        stored_slice_sum(values, n, at, piece_crc);
        if (!stream_filled(out, n * 4)) return false;
    }
    return true;
}

// Writes header, values and table of this rank's shard.
static bool stored_shard_write_contents(CheckpointStore *s, IoHandle *file) {
    Io *io = &s->io;
    const CheckpointPeers *p = &s->peers;
    const TrainingState *state = &s->job.state;
    const CheckpointTensors *t = &s->job.tensors;
    const StoredShardPlan *plan = &s->job.plan;
    ShardHeader *h = (ShardHeader *)host_alloc(sizeof *h);
    memcpy(h->magic, SHARD_MAGIC, sizeof h->magic);
    h->version = CHECKPOINT_VERSION;
    h->byte_order = SHARD_BYTE_ORDER;
    h->step = state->step;
    h->rank = p->rank;
    h->world = p->world;
    h->data_bytes = plan->data_bytes;
    h->n_runs = plan->n_runs;
    h->file_bytes = plan->file_bytes;
    h->crc = crc32c_extend(0, h, offsetof(ShardHeader, crc));
    ShardStream out;
    BadValue bad = {};
    stream_open(&out, io, file, plan->file_bytes);
    bool good = stream_put(&out, h, sizeof *h);
    free(h);
    int64_t table_bytes = plan->file_bytes - SHARD_ALIGN - plan->data_bytes, at = 0;
    unsigned char *table = (unsigned char *)host_alloc((size_t)table_bytes); // zeros up to the end of the file included
    ShardRun *entry = (ShardRun *)table;
    uint32_t *piece_crc = (uint32_t *)(table + plan->n_runs * (int64_t)sizeof(ShardRun));
    for (int kind = 0; kind < t->n_kinds && good; kind++) {
        uint32_t tensor = 0;
        for (int row = 0; row < t->table->n_rows && good; row++) {
            const ParamDesc *r = &t->table->row[row];
            ParamRun run[PARAM_RUNS_MAX];
            int64_t first, last;
            if (r->tied_to >= 0) continue;
            const uint32_t number = tensor++; // the same on all ranks, whatever they hold
            if (!stored_range(t, row, &first, &last)) continue;
            int n_runs = param_runs(r, t->table->tp_rank, first, last, run);
            for (int i = 0; i < n_runs; i++)
                *entry++ = {number, (uint32_t)kind, run[i].global_offset, run[i].numel, run[i].count, run[i].stride, at + (run[i].local_first - first) * 4};
            good = stored_range_write(s, &out, row, kind, first, last, at, piece_crc, &bad);
            at += (last - first) * 4;
        }
    }
    s->job.word.crc = crc32c_extend(0, table, (size_t)table_bytes);
    good = stream_close(&out, good && stream_put(&out, table, table_bytes));
    free(table);
    if (bad.found) { // now that nobody else tells s->io anything
        save_refused(io, file->name, "%s of tensor %s is %s at element %" PRId64 ": this state is not worth keeping",
                     t->kind[bad.kind], t->table->row[bad.row].name, bad.not_a_number ? "NaN" : "infinite", bad.element);
        io->error = EDOM; // no system call's: see SaveResult.not_a_number
    }
    return good;
}

// Writes a file of the temporary folder so that it is on the disk, name and contents, when this returns true.
static bool file_finish(Io *io, const IoHandle *folder, IoHandle *file, bool good) {
    good = good && io_sync(io, file); // or the folder could get its final name before the contents are there
    if (good) good = io_close(io, file);
    else close(file->fd);
    return good && io_sync(io, folder); // the name is data of the folder
}

static void shard_name(char dst[32], int rank) { snprintf(dst, 32, "shard-%d.bin", rank); }

// This rank's file in the temporary folder. SaveJob.word then has the checksum that answers for it.
static bool stored_shard_write(CheckpointStore *s) {
    IoHandle folder, file;
    char name[32];
    shard_name(name, s->peers.rank);
    if (!store_open_shared(s, s->job.word.name, &folder)) return false;
    bool good = io_create(&s->io, &folder, name, &file);
    if (good) {
        good = io_allocate(&s->io, &file, s->job.plan.file_bytes) && stored_shard_write_contents(s, &file);
        good = file_finish(&s->io, &folder, &file, good);
    }
    close(folder.fd);
    return good;
}

// The manifest, from what the ranks said about their files.
static bool manifest_write(CheckpointStore *s, const char *temporary, const TrainingState *state, const CheckpointTensors *t, const PeerWord *all, int64_t *bytes) {
    IoHandle folder, file;
    if (!io_open_folder(&s->io, &s->folder, temporary, &folder)) return false;
    ShardRecord *shard = (ShardRecord *)host_alloc(sizeof *shard * (size_t)s->peers.world);
    for (int r = 0; r < s->peers.world; r++) {
        shard_name(shard[r].file, r);
        shard[r].bytes = all[r].bytes;
        shard[r].table_crc = all[r].crc;
    }
    char *text = manifest_compose(state, t, shard, s->peers.world, bytes);
    bool good = io_create(&s->io, &folder, MANIFEST_FILE, &file);
    if (good) good = file_finish(&s->io, &folder, &file, io_write(&s->io, &file, text, *bytes, 0));
    free(text);
    free(shard);
    close(folder.fd);
    return good;
}

// Gives the finished folder its final name. *replaced: an older checkpoint of that name now has the temporary one.
static bool save_publish(CheckpointStore *s, const char *temporary, const char *name, bool *replaced) {
    Io *io = &s->io;
    struct stat st;
    *replaced = false;
    // NEW, since a plain rename would replace an empty folder that happens to be there.
    if (!io_rename(io, &s->folder, temporary, name, IO_RENAME_NEW)) {
        bool unknown = io->error == EINVAL || io->error == ENOSYS, exists = fstatat(s->folder.fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0;
        if (io->error != EEXIST && !unknown) return false;
        if (!exists) { // this file system cannot refuse to replace; the lock says that nobody else will make the name now
            if (!io_rename(io, &s->folder, temporary, name, IO_RENAME_OVER)) return false;
        } else if (io_rename(io, &s->folder, temporary, name, IO_RENAME_SWAP)) { // this step was saved before: at no instant is it missing
            *replaced = true;
        } else {
            if (io->error != EINVAL && io->error != ENOSYS) return false;
            if (checkpoint_looks_complete(s->folder.fd, name))
                return save_refused(io, name, "exists already, and this file system cannot exchange two folders in one step; move it away, or choose another checkpoint.save_dir");
            char trash[128];
            snprintf(trash, sizeof trash, ".trash-%s-%016" PRIx64, name, io_nonce());
            if (!io_rename(io, &s->folder, name, trash, IO_RENAME_OVER) || !io_rename(io, &s->folder, temporary, name, IO_RENAME_OVER)) return false;
        }
    }
    return io_sync(io, &s->folder); // the rename itself is not on the disk before this
}

// `latest` for people and scripts, by a rename: written in place it could be seen empty. Only a hint, so only a warning.
static void save_latest(CheckpointStore *s, const char *name, const char *shown) {
    Io *io = &s->io;
    IoHandle file;
    char temporary[64], text[CHECKPOINT_NAME_MAX + 2];
    snprintf(temporary, sizeof temporary, ".latest-%016" PRIx64, io_nonce());
    int n = snprintf(text, sizeof text, "%s\n", name);
    bool good = io_create(io, &s->folder, temporary, &file);
    if (good) {
        good = io_write(io, &file, text, n, 0) && io_sync(io, &file);
        if (good) good = io_close(io, &file);
        else close(file.fd);
        good = good && io_rename(io, &s->folder, temporary, "latest", IO_RENAME_OVER) && io_sync(io, &s->folder);
        if (!good) unlinkat(s->folder.fd, temporary, 0);
    }
    if (!good) note("checkpoint %s/%s is safe, but %s/latest could not be updated: %s", shown, name, shown, io->why);
}

// Deletes the oldest complete checkpoints beyond `ceiling` (0 = none), never one of the newest `floor`, never one that is
// not older than `step`, never one that is damaged: that is left to the user.
static void save_retention(CheckpointStore *s, int64_t step, int64_t floor, int64_t ceiling, const char *shown) {
    StepList l;
    Io *io = &s->io;
    if (ceiling <= 0) return;
    if (!steps_list(s->folder.fd, &l)) { note("%s: old checkpoints are kept: %s", shown, strerror(errno)); return; }
    int64_t complete = 0;
    for (int i = 0; i < l.n; i++) {
        char name[CHECKPOINT_NAME_MAX], trash[128];
        step_name(name, l.step[i]);
        if (!checkpoint_looks_complete(s->folder.fd, name)) continue;
        complete++;
        if (complete <= max_i64(floor, ceiling) || l.step[i] >= step) continue;
        snprintf(trash, sizeof trash, ".trash-%s-%016" PRIx64, name, io_nonce());
        // The fsync between: without it a crash can keep the final name and lose the contents.
        if (!io_rename(io, &s->folder, name, trash, IO_RENAME_OVER) || !io_sync(io, &s->folder) || !io_remove(io, &s->folder, trash))
            note("%s: checkpoint %s could not be removed: %s", shown, name, io->why);
    }
    free(l.step);
}

// Rank 0's first step: room, and a folder under a name that nobody can guess.
static bool save_begin(CheckpointStore *s, const CheckpointTensors *t, const char *name, char *temporary, size_t room) {
    Io *io = &s->io;
    int64_t free_bytes, needed = checkpoint_room(t, s->peers.world);
    if (!io_space(io, &s->folder, &free_bytes)) return false;
    if (free_bytes < needed) return save_refused(io, name, "needs %" PRId64 " bytes, but only %" PRId64 " are free", needed, free_bytes);
    snprintf(temporary, room, ".tmp-%s-%016" PRIx64, name, io_nonce());
    return io_mkdir(io, &s->folder, temporary);
}

// Rank 0's last step, when all shards are on the disk (`good`) or one is not; all: what the ranks said about them.
static bool save_end(CheckpointStore *s, bool good, const TrainingState *state, const CheckpointTensors *t, const char *temporary, const char *name,
                     const PeerWord *all, int64_t *manifest_bytes) {
    bool replaced = false;
    // When only the last fsync fails, the checkpoint has its name and stays: nobody knows, so nobody relies on it.
    good = good && manifest_write(s, temporary, state, t, all, manifest_bytes) && save_publish(s, temporary, name, &replaced);
    if (good && !replaced) return true;
    if (good || !replaced) { // what is under the temporary name is not needed, or of no use
        Io quiet = s->io;
        struct stat st;
        if (fstatat(s->folder.fd, temporary, &st, AT_SYMLINK_NOFOLLOW) == 0) io_remove(&quiet, &s->folder, temporary);
    }
    return good;
}

// ---------------------------------------------------------------------------------------------------------------
// A save, step by step

// Was a step of the save good on all ranks? If not, the result says where not, with file, call and reason.
static bool save_meet(CheckpointStore *s, bool good, PeerWord *all) {
    SaveJob *j = &s->job;
    char shown[112];
    j->word.good = good;
    j->word.error = s->io.error;
    if (!good) snprintf(j->word.why, sizeof j->word.why, "%s/%s", text_escape(shown, sizeof shown, s->path, strlen(s->path)), s->io.why);
    good = peers_meet(&s->peers, &j->word, all, j->result.why, sizeof j->result.why);
    for (int r = 0; r < s->peers.world; r++) j->result.not_a_number |= !all[r].good && all[r].error == EDOM;
    return good;
}

static void save_end_job(CheckpointStore *s, bool durable) {
    SaveJob *j = &s->job;
    j->result.durable = durable;
    s->failed_in_a_row = durable ? 0 : s->failed_in_a_row + 1;
    j->result.seconds = clock_seconds() - j->start;
    j->phase = SAVE_NONE;
    free(j->all);
    j->all = NULL;
}

// First step. True if there is a folder to write into.
static bool save_start(CheckpointStore *s, const TrainingState *state, const CheckpointTensors *t, int64_t keep_n_most_recent, int64_t num_checkpoints_to_keep) {
    SaveJob *j = &s->job;
    CHECK(!s->read_only && state->step >= 0 && j->phase == SAVE_NONE, "save at step %" PRId64 ", phase %d", state->step, (int)j->phase);
    memset(j, 0, sizeof *j);
    j->start = clock_seconds();
    j->state = *state;
    j->tensors = *t;
    j->plan = stored_shard_plan(t);
    j->keep_n_most_recent = keep_n_most_recent;
    j->num_checkpoints_to_keep = num_checkpoints_to_keep;
    j->result.step = state->step;
    j->all = peers_words(&s->peers);
    step_name(j->result.name, state->step);
    struct stat st;
    if (s->peers.rank == 0 && fstat(s->folder.fd, &st) == 0 && st.st_nlink == 0) {
        char shown[112];
        note("checkpoint.save_dir %s was deleted while the run went on; it is made anew", text_escape(shown, sizeof shown, s->path, strlen(s->path)));
        if (s->lock_fd >= 0) close(s->lock_fd);
        close(s->folder.fd);
        store_attach(s);
    }
    if (save_meet(s, s->peers.rank > 0 || save_begin(s, t, j->result.name, j->word.name, sizeof j->word.name), j->all)) return true;
    save_end_job(s, false);
    return false;
}

// What this rank does of the second step, and of the third. Needs no other rank.
static void save_work(CheckpointStore *s) {
    SaveJob *j = &s->job;
    if (j->phase == SAVE_WRITING) {
        double start = clock_seconds();
        j->good = stored_shard_write(s);
        j->word.bytes = j->plan.file_bytes;
        j->word.seconds = clock_seconds() - start;
    } else if (s->peers.rank > 0) j->good = true;
    else {
        char shown[112];
        text_escape(shown, sizeof shown, s->path, strlen(s->path));
        j->good = save_end(s, true, &j->state, &j->tensors, j->word.name, j->result.name, j->all, &j->manifest_bytes);
        j->word.bytes = j->manifest_bytes;
        if (!j->good) return;
        Io told = s->io; // what follows changes neither the answer nor its reason
        save_latest(s, j->result.name, shown);
        save_retention(s, j->state.step, j->keep_n_most_recent, j->num_checkpoints_to_keep, shown);
        s->io = told;
    }
}

// All ranks, when they have done their work of a step: on to the next, or to the end.
static void save_go_on(CheckpointStore *s) {
    SaveJob *j = &s->job;
    bool good = save_meet(s, j->good, j->all);
    if (j->phase == SAVE_PUBLISHING) {
        j->result.bytes += j->all[0].bytes;
        save_end_job(s, good);
        return;
    }
    for (int r = 0; r < s->peers.world; r++) {
        j->result.bytes += j->all[r].bytes;
        j->result.write_seconds = fmax(j->result.write_seconds, j->all[r].seconds);
    }
    j->phase = SAVE_PUBLISHING;
    if (good) return;
    if (s->peers.rank == 0) save_end(s, false, &j->state, &j->tensors, j->word.name, j->result.name, j->all, &j->manifest_bytes);
    save_end_job(s, false);
}

// Saves the run as checkpoint step-N. When the result is durable, `latest` names it and older checkpoints beyond
// num_checkpoints_to_keep (0 = keep all) are gone, but never one of the keep_n_most_recent newest. Otherwise nothing that
// was there before has changed, `why` says what failed, and the caller warns and trains on (or ends, if it was the last save).
// The result is the same on all ranks, but for its times.
static SaveResult checkpoint_save(CheckpointStore *s, const TrainingState *state, const CheckpointTensors *t, int64_t keep_n_most_recent,
                                  int64_t num_checkpoints_to_keep) {
    SaveJob *j = &s->job;
    if (save_start(s, state, t, keep_n_most_recent, num_checkpoints_to_keep))
        for (j->phase = SAVE_WRITING; j->phase; save_go_on(s)) save_work(s);
    j->result.stall_seconds = j->result.seconds;
    return j->result;
}

// ---------------------------------------------------------------------------------------------------------------
// The same in the background

// Host memory for it: what this rank writes, without the tables.
static void checkpoint_copy_alloc(CheckpointStore *s, const CheckpointTensors *t) {
    s->copy.bytes = stored_shard_plan(t).data_bytes;
    s->copy.pinned = true;
    s->copy.memory = (char *)pinned_region_malloc(max_i64(1, s->copy.bytes), &s->copy.pinned);
    s->copy.at = (int64_t *)host_alloc(sizeof(int64_t) * (size_t)(t->n_kinds * t->table->n_rows));
}

static void *save_thread(void *store) {
    CheckpointStore *s = (CheckpointStore *)store;
    save_work(s);
    __atomic_store_n(&s->job.done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void save_work_begin(CheckpointStore *s) {
    SaveJob *j = &s->job;
    j->done = 0;
    int error = thread_start(&j->writer, save_thread, s);
    if (error) die(EXIT_INTERNAL, "no thread for the writer of checkpoints: %s", strerror(error));
    j->writes = true;
}

static void save_work_end(CheckpointStore *s) {
    if (s->job.writes) pthread_join(s->job.writer, NULL);
    s->job.writes = false;
}

static bool checkpoint_saving(const CheckpointStore *s) { return s->job.phase != SAVE_NONE; }

// Begins a save in the background; checkpoint_saving tells whether one is on its way afterwards. What is saved may change only behind
// what `keep` has begun, until checkpoint_copied has returned.
static void checkpoint_begin(CheckpointStore *s, const TrainingState *state, const CheckpointTensors *t, int64_t keep_n_most_recent, int64_t num_checkpoints_to_keep) {
    SaveJob *j = &s->job;
    int64_t at = 0;
    if (save_start(s, state, t, keep_n_most_recent, num_checkpoints_to_keep)) {
        CHECK(j->plan.data_bytes <= s->copy.bytes, "a copy of %" PRId64 " bytes, room for %" PRId64, j->plan.data_bytes, s->copy.bytes);
        j->phase = SAVE_COPYING;
        j->copied = true;
        for (int kind = 0; kind < t->n_kinds; kind++)
            for (int row = 0; row < t->table->n_rows; row++) {
                int64_t first, last;
                if (!stored_range(t, row, &first, &last)) continue;
                s->copy.at[kind * t->table->n_rows + row] = at;
                t->keep(t->ctx, row, kind, first, last - first, s->copy.memory + at);
                at += (last - first) * 4;
            }
    }
    j->result.stall_seconds += clock_seconds() - j->start;
}

// The main thread, after the first update behind the copy, or before: the copy is complete, and the writer begins.
static void checkpoint_copied(CheckpointStore *s) {
    SaveJob *j = &s->job;
    if (j->phase != SAVE_COPYING) return;
    double start = clock_seconds();
    j->tensors.keep_end(j->tensors.ctx);
    j->phase = SAVE_WRITING;
    save_work_begin(s);
    j->result.stall_seconds += clock_seconds() - start;
}

// Has this rank done its part of the step? It may then call checkpoint_go_on, as soon as this is true of all.
static bool checkpoint_ready(const CheckpointStore *s) { return s->job.phase >= SAVE_WRITING && __atomic_load_n(&s->job.done, __ATOMIC_ACQUIRE); }

// All ranks: waits for the writers, meets, and begins what comes next. True when that was the end: SaveJob.result says which.
static bool checkpoint_go_on(CheckpointStore *s) {
    SaveJob *j = &s->job;
    double start = clock_seconds();
    save_work_end(s);
    save_go_on(s);
    if (j->phase == SAVE_PUBLISHING) save_work_begin(s);
    j->result.stall_seconds += clock_seconds() - start;
    return j->phase == SAVE_NONE;
}

// All ranks: brings the save to its end, which they wait for.
static void checkpoint_finish(CheckpointStore *s) {
    checkpoint_copied(s);
    while (checkpoint_saving(s)) checkpoint_go_on(s);
}
