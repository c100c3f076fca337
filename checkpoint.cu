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
//
// The order of the calls of a save is the whole point; each says what a crash would do without it. The tests record these
// calls and try what is left after a crash at each of them, with any subset of the unsynced ones lost.
#pragma once
#include "checkpoint_format.cu"
#include "runtime/durable.h"

typedef struct {
    bool durable;
    int64_t bytes;       // written to the disk
    double seconds;
    char name[64];       // "step-00000100"
    char why[512];       // if not durable: file, call, offset, reason
    bool not_a_number;   // if not durable: because the state holds NaN, or an infinite weight; a disk has no part in it
} SaveResult;

typedef struct {
    IoHandle folder;     // save_dir
    int lock_fd;         // -1 where the file system knows no locks, or when reading only
    bool read_only;
    int failed_in_a_row; // saves, for callers that give up after some
    Io io;
    char path[CONFIG_PATH_MAX];
} CheckpointStore;

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
        if (r->tied_to >= 0) continue;
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
        die(EXIT_CHECKPOINT, "%s is a checkpoint of another model or optimizer (%d differences, listed above); give this run its configuration, or start anew with run.resume=none and another checkpoint.save_dir",
            where, differences);
}

// Hands all tensors to the run. The checkpoint was checked; what fails now was changed since.
static bool checkpoint_put(Checkpoint *c, const CheckpointTensors *t, const int *tensor_of, const int *kind_of) {
    int64_t largest = 0;
    for (int i = 0; i < c->n_tensors; i++) largest = max_i64(largest, c->tensor[i].numel);
    float *values = (float *)host_alloc((size_t)largest * 4);
    bool good = true;
    for (int k = 0; k < t->n_kinds && good; k++)
        for (int row = 0; row < t->table->n_rows && good; row++) {
            if (t->table->row[row].tied_to >= 0) continue;
            good = stored_tensor_read(c, (uint32_t)tensor_of[row], (uint32_t)kind_of[k], values);
            if (good) t->put(t->ctx, row, k, values);
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

// Reads and checks one checkpoint, and if it is good, fills the run from it. False: it is damaged, see c->why. Dies when it
// is sound but of another model.
static bool checkpoint_try(Checkpoint *c, int folder, const char *name, const char *where, TrainingState *state, const CheckpointTensors *t) {
    bool good = checkpoint_read(c, folder, name);
    if (good) {
        int *tensor_of = (int *)host_alloc(sizeof(int) * (size_t)t->table->n_rows), kind_of[CHECKPOINT_KINDS_MAX];
        checkpoint_match(c, t, where, tensor_of, kind_of);
        good = values_check(c);
        if (good) {
            ForeignVisit v = {c, 0, ""};
            if (folder_each(c->fd, foreign_visit, &v) && v.n) note("%s: %d foreign files ignored, such as %s", where, v.n, v.first);
            if (!checkpoint_put(c, t, tensor_of, kind_of)) die(EXIT_CHECKPOINT, "%s was changed while it was loaded: %s; start again", where, c->why);
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

// Fills the run from a checkpoint in folder `dir`. which: "auto" takes the newest good one by step (or dir itself, if it is
// a checkpoint); otherwise the name of one. Bad ones are named and skipped by "auto". Returns false when "auto" finds no
// checkpoint at all, good or bad. Dies (EXIT_CHECKPOINT) when there are only bad ones, when the one asked for is missing or
// bad, and when the one chosen belongs to another model or optimizer. loaded_name (room bytes) receives its name.
static bool checkpoint_load(const char *dir, const char *which, TrainingState *state, const CheckpointTensors *t, char *loaded_name, size_t room) {
    char shown[512], where[640], tag[160];
    text_escape(shown, sizeof shown, dir, strlen(dir));
    bool automatic = strcmp(which, "auto") == 0;
    if (!automatic && !tag_is_valid(which))
        die(EXIT_CHECKPOINT, "\"%s\" is no name of a checkpoint: letters, digits and . _ - only, at most %d of them, none of them first a dot",
            text_escape(tag, sizeof tag, which, strlen(which)), CHECKPOINT_NAME_MAX - 1);
    int folder = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC); // a link here is the user's wish
    if (folder < 0 && automatic && errno == ENOENT) return false;
    if (folder < 0) die(EXIT_CHECKPOINT, "%s: %s; no checkpoint can be read there", shown, strerror(errno));
    Checkpoint c;
    StepList steps;
    struct stat st;
    if (automatic && fstatat(folder, MANIFEST_FILE, &st, AT_SYMLINK_NOFOLLOW) == 0) { // dir is a checkpoint itself
        size_t end = strlen(dir), start;
        while (end > 1 && dir[end - 1] == '/') end--;
        for (start = end; start > 0 && dir[start - 1] != '/';) start--;
        text_escape(loaded_name, room, dir + start, end - start);
        if (!checkpoint_try(&c, folder, ".", shown, state, t)) die(EXIT_CHECKPOINT, "checkpoint %s cannot be loaded: %s", shown, c.why);
        checkpoint_free(&c);
        close(folder);
        return true;
    }
    if (!steps_list(folder, &steps)) die(EXIT_CHECKPOINT, "%s: cannot be listed: %s", shown, strerror(errno));
    bool loaded = false;
    char first_why[480] = "";
    if (!automatic) {
        snprintf(where, sizeof where, "%s/%s", shown, which);
        if (fstatat(folder, which, &st, AT_SYMLINK_NOFOLLOW) != 0) {
            char list[512] = "none";
            size_t used = 0;
            for (int i = 0; i < steps.n && used + 40 < sizeof list; i++) {
                char name[CHECKPOINT_NAME_MAX];
                step_name(name, steps.step[i]);
                used += (size_t)snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", used + 80 < sizeof list ? name : "...");
            }
            die(EXIT_CHECKPOINT, "checkpoint %s: %s; there are: %s", where, errno == ENOENT ? "is missing" : strerror(errno), list);
        }
        loaded = checkpoint_try(&c, folder, which, where, state, t);
        if (!loaded)
            die(EXIT_CHECKPOINT, "checkpoint %s cannot be loaded: %s; choose another with run.resume, or let run.resume=auto take the newest good one",
                where, c.why);
        snprintf(loaded_name, room, "%s", which);
        checkpoint_free(&c);
    }
    for (int i = 0; i < steps.n && !loaded; i++) {
        char name[CHECKPOINT_NAME_MAX];
        step_name(name, steps.step[i]);
        snprintf(where, sizeof where, "%s/%s", shown, name);
        if (i == 0) latest_compare(folder, steps.step[0], shown);
        loaded = checkpoint_try(&c, folder, name, where, state, t);
        if (loaded) snprintf(loaded_name, room, "%s", name);
        else {
            note("checkpoint %s is skipped: %s", where, c.why);
            if (!first_why[0]) snprintf(first_why, sizeof first_why, "%s: %s", name, c.why);
        }
        checkpoint_free(&c);
    }
    if (!loaded && steps.n)
        die(EXIT_CHECKPOINT, "%s: none of its %d checkpoints can be loaded (%s); bring one back from a copy, or start anew on purpose with run.resume=none",
            shown, steps.n, first_why);
    free(steps.step);
    close(folder);
    return loaded;
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

// Creates, locks, probes and sweeps the folder, or dies.
static void store_attach(CheckpointStore *s) {
    char shown[512], probe[64];
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
    // Permission bits do not tell whether a folder can be written to (read-only mounts, quotas): try it.
    snprintf(probe, sizeof probe, ".tmp-probe-%016" PRIx64, io_nonce());
    if (!io_mkdir(&s->io, &s->folder, probe) || !io_unlink(&s->io, &s->folder, probe, true))
        die(EXIT_CANTCREAT, "checkpoint.save_dir %s cannot be written to: %s; choose a folder that this user may write to", shown, s->io.why);
}

// Opens save_dir for a run that saves into it: creates it, takes its lock, removes leftovers of interrupted saves. Dies with
// EXIT_CONFIG when another run holds the lock, with EXIT_CANTCREAT when it cannot be created or written to. read_only:
// none of this, the folder must exist and checkpoint_save must not be called. io: the seam of the tests, or null.
static CheckpointStore *checkpoint_open_io(const char *save_dir, bool read_only, const Io *io) {
    CheckpointStore *s = (CheckpointStore *)host_alloc(sizeof *s);
    if (strlen(save_dir) >= sizeof s->path)
        die(EXIT_CONFIG, "checkpoint.save_dir has %zu bytes, more than %zu", strlen(save_dir), sizeof s->path - 1);
    if (!*save_dir) die(EXIT_CONFIG, "checkpoint.save_dir is empty; name a folder");
    strcpy(s->path, save_dir);
    s->read_only = read_only;
    if (io) s->io = *io;
    store_attach(s);
    return s;
}

static CheckpointStore *checkpoint_open(const char *save_dir, bool read_only) { return checkpoint_open_io(save_dir, read_only, NULL); }

static void checkpoint_close(CheckpointStore *s) {
    if (s->lock_fd >= 0) close(s->lock_fd); // drops the lock
    close(s->folder.fd);
    free(s);
}

// ---------------------------------------------------------------------------------------------------------------
// Writing

typedef struct {
    int64_t n_runs, data_bytes, file_bytes;
    int64_t largest; // elements of the largest tensor
} StoredShardPlan;

static StoredShardPlan stored_shard_plan(const CheckpointTensors *t) {
    StoredShardPlan p = {0, 0, 0, 0};
    for (int row = 0; row < t->table->n_rows; row++) {
        if (t->table->row[row].tied_to >= 0) continue;
        int64_t numel = param_numel(&t->table->row[row]);
        p.n_runs += t->n_kinds;
        p.data_bytes += numel * 4 * t->n_kinds;
        p.largest = max_i64(p.largest, numel);
    }
    p.file_bytes = stored_shard_file_bytes(p.data_bytes, p.n_runs);
    return p;
}

// Bytes on the disk of one checkpoint, the manifest estimated.
static int64_t checkpoint_bytes(const CheckpointTensors *t) { return stored_shard_plan(t).file_bytes + 4096 + 256 * (int64_t)t->table->n_rows; }

// Free bytes without which a save does not begin: a twentieth more, which the file system may take for itself, and 1 MiB.
static int64_t checkpoint_room(const CheckpointTensors *t) {
    int64_t bytes = checkpoint_bytes(t);
    return bytes + bytes / 20 + (1 << 20);
}

// Says so, once at the start of a run, when the checkpoints that it will keep do not fit on the disk.
static void checkpoint_space_note(CheckpointStore *s, const CheckpointTensors *t, int64_t num_checkpoints_to_keep) {
    int64_t free_bytes, bytes = checkpoint_bytes(t), kept = num_checkpoints_to_keep > 0 ? num_checkpoints_to_keep : 1;
    char shown[512];
    StepList l;
    if (s->read_only || !io_space(&s->io, &s->folder, &free_bytes) || !steps_list(s->folder.fd, &l)) return;
    int64_t more = max_i64(1, kept - l.n + 1); // one more than are kept exists while it is being written
    double needed = (double)(more - 1) * (double)bytes + (double)checkpoint_room(t);
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

// Writes header, values and table of the only rank's shard, which holds everything.
static bool stored_shard_write_contents(Io *io, const IoHandle *file, const TrainingState *state, const CheckpointTensors *t,
                                        const StoredShardPlan *plan, uint32_t *table_crc) {
    ShardHeader *h = (ShardHeader *)host_alloc(sizeof *h);
    memcpy(h->magic, SHARD_MAGIC, sizeof h->magic);
    h->version = CHECKPOINT_VERSION;
    h->byte_order = SHARD_BYTE_ORDER;
    h->step = state->step;
    h->rank = 0;
    h->world = 1;
    h->data_bytes = plan->data_bytes;
    h->n_runs = plan->n_runs;
    h->file_bytes = plan->file_bytes;
    h->crc = crc32c_extend(0, h, offsetof(ShardHeader, crc));
    bool good = io_write(io, file, h, sizeof *h, 0);
    free(h);
    int64_t table_bytes = plan->file_bytes - SHARD_ALIGN - plan->data_bytes, at = 0;
    unsigned char *table = (unsigned char *)host_alloc((size_t)table_bytes); // zeros up to the end of the file included
    ShardRun *run = (ShardRun *)table;
    uint32_t *piece_crc = (uint32_t *)(table + plan->n_runs * (int64_t)sizeof(ShardRun));
    float *values = (float *)host_alloc((size_t)plan->largest * 4);
    for (int kind = 0; kind < t->n_kinds && good; kind++) {
        uint32_t tensor = 0;
        for (int row = 0; row < t->table->n_rows && good; row++) {
            const ParamDesc *r = &t->table->row[row];
            if (r->tied_to >= 0) continue;
            int64_t numel = param_numel(r), bytes = numel * 4;
            t->get(t->ctx, row, kind, values);
            int64_t bad = first_bad_value(values, numel, kind);
            if (bad >= 0) {
                save_refused(io, file->name, "%s of tensor %s is %s at element %" PRId64 ": this state is not worth keeping",
                                    t->kind[kind], r->name, isnan(values[bad]) ? "NaN" : "infinite", bad);
                io->error = EDOM; // no system call's: see SaveResult.not_a_number
                good = false;
                break;
            }
            ShardRun record = {tensor++, (uint32_t)kind, 0, numel, at};
            *run++ = record;
            for (int64_t done = 0, n; done < bytes; done += n) { // before the write: a checksum of what was read back would certify damage
                n = min_i64(bytes - done, PIECE_BYTES - (at + done) % PIECE_BYTES);
                uint32_t *crc = &piece_crc[(at + done) / PIECE_BYTES];
                *crc = crc32c_extend(*crc, (char *)values + done, (size_t)n);
            }
            good = io_write(io, file, values, bytes, SHARD_ALIGN + at);
            at += bytes;
        }
    }
    *table_crc = crc32c_extend(0, table, (size_t)table_bytes);
    good = good && io_write(io, file, table, table_bytes, SHARD_ALIGN + plan->data_bytes);
    free(values);
    free(table);
    return good;
}

// Writes a file of the temporary folder so that it is on the disk, name and contents, when this returns true.
static bool file_finish(Io *io, const IoHandle *folder, IoHandle *file, bool good) {
    good = good && io_sync(io, file); // or the folder could get its final name before the contents are there
    if (good) good = io_close(io, file);
    else close(file->fd);
    return good && io_sync(io, folder); // the name is data of the folder
}

static bool stored_shard_write(Io *io, const IoHandle *folder, const TrainingState *state, const CheckpointTensors *t,
                               const StoredShardPlan *plan, ShardRecord *record) {
    IoHandle file;
    snprintf(record->file, sizeof record->file, "shard-%d.bin", 0);
    record->bytes = plan->file_bytes;
    if (!io_create(io, folder, record->file, &file)) return false;
    bool good = io_allocate(io, &file, plan->file_bytes) && stored_shard_write_contents(io, &file, state, t, plan, &record->table_crc);
    return file_finish(io, folder, &file, good);
}

static bool manifest_write(Io *io, const IoHandle *folder, const TrainingState *state, const CheckpointTensors *t, const ShardRecord *shard,
                           int n_shards, int64_t *bytes) {
    IoHandle file;
    char *text = manifest_compose(state, t, shard, n_shards, bytes);
    bool good = io_create(io, folder, MANIFEST_FILE, &file);
    if (good) good = file_finish(io, folder, &file, io_write(io, &file, text, *bytes, 0));
    free(text);
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

// Steps of a save up to the instant at which it is durable.
static bool save_durably(CheckpointStore *s, const TrainingState *state, const CheckpointTensors *t, const char *name, SaveResult *result) {
    Io *io = &s->io;
    StoredShardPlan plan = stored_shard_plan(t);
    int64_t free_bytes, needed = checkpoint_room(t);
    if (!io_space(io, &s->folder, &free_bytes)) return false;
    if (free_bytes < needed) return save_refused(io, name, "needs %" PRId64 " bytes, but only %" PRId64 " are free", needed, free_bytes);
    char temporary[128];
    snprintf(temporary, sizeof temporary, ".tmp-%s-%016" PRIx64, name, io_nonce());
    if (!io_mkdir(io, &s->folder, temporary)) return false;
    IoHandle folder;
    ShardRecord shard;
    int64_t manifest_bytes = 0;
    bool replaced = false, good = io_open_folder(io, &s->folder, temporary, &folder);
    if (good) {
        good = stored_shard_write(io, &folder, state, t, &plan, &shard) && manifest_write(io, &folder, state, t, &shard, 1, &manifest_bytes);
        close(folder.fd);
    }
    // When only the last fsync fails, the checkpoint has its name and stays: nobody knows, so nobody relies on it.
    good = good && save_publish(s, temporary, name, &replaced);
    result->bytes = plan.file_bytes + manifest_bytes;
    if (good && !replaced) return true;
    if (good || !replaced) { // what is under the temporary name is not needed, or of no use
        Io quiet = *io;
        struct stat st;
        if (fstatat(s->folder.fd, temporary, &st, AT_SYMLINK_NOFOLLOW) == 0) io_remove(&quiet, &s->folder, temporary);
    }
    return good;
}

// Saves the run as checkpoint step-N. When the result is durable, `latest` names it and older checkpoints beyond
// num_checkpoints_to_keep (0 = keep all) are gone, but never one of the keep_n_most_recent newest. Otherwise nothing that
// was there before has changed, `why` says what failed, and the caller warns and trains on (or ends, if it was the last save).
static SaveResult checkpoint_save(CheckpointStore *s, const TrainingState *state, const CheckpointTensors *t, int64_t keep_n_most_recent,
                                  int64_t num_checkpoints_to_keep) {
    SaveResult result;
    memset(&result, 0, sizeof result);
    CHECK(!s->read_only && state->step >= 0, "save at step %" PRId64, state->step);
    double start = clock_seconds();
    char shown[112];
    text_escape(shown, sizeof shown, s->path, strlen(s->path));
    step_name(result.name, state->step);
    struct stat st;
    if (fstat(s->folder.fd, &st) == 0 && st.st_nlink == 0) {
        note("checkpoint.save_dir %s was deleted while the run went on; it is made anew", shown);
        if (s->lock_fd >= 0) close(s->lock_fd);
        close(s->folder.fd);
        store_attach(s);
    }
    result.durable = save_durably(s, state, t, result.name, &result);
    s->failed_in_a_row = result.durable ? 0 : s->failed_in_a_row + 1;
    if (result.durable) {
        save_latest(s, result.name, shown);
        save_retention(s, state->step, keep_n_most_recent, num_checkpoints_to_keep, shown);
    } else {
        snprintf(result.why, sizeof result.why, "%s/%s", shown, s->io.why);
        result.not_a_number = s->io.error == EDOM;
    }
    result.seconds = clock_seconds() - start;
    return result;
}
