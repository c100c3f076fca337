// checkpoint_load.cu - which checkpoint, whether it is whole, and the model's tensors out of files that other ranks wrote under another layout.
//
// A part of checkpoint.cu, which includes it after its types and the ranks' meetings.
#pragma once

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

// What a folder holds: checkpoints by step, newest first, and those that somebody gave other names, in the order of the alphabet.
typedef struct {
    int folder;
    StepList steps;
    char (*named)[CHECKPOINT_NAME_MAX];
    int n_named;
} CheckpointList;

static void named_visit(void *ctx, const char *name) {
    CheckpointList *l = (CheckpointList *)ctx;
    char manifest[CHECKPOINT_NAME_MAX + 32];
    struct stat st;
    if (!tag_is_valid(name) || step_of_name(name) >= 0) return;
    snprintf(manifest, sizeof manifest, "%s/" MANIFEST_FILE, name);
    if (fstatat(l->folder, manifest, &st, AT_SYMLINK_NOFOLLOW) != 0) return;
    l->named = (char (*)[CHECKPOINT_NAME_MAX])realloc(l->named, sizeof *l->named * (size_t)(l->n_named + 1));
    if (!l->named) die(EXIT_INTERNAL, "out of host memory while listing %d checkpoints", l->n_named);
    snprintf(l->named[l->n_named++], CHECKPOINT_NAME_MAX, "%s", name);
}

static int names_compare(const void *a, const void *b) { return strcmp((const char *)a, (const char *)b); }

static bool checkpoints_list(CheckpointList *l) { // false with errno
    if (!steps_list(l->folder, &l->steps) || !folder_each(l->folder, named_visit, l)) return false;
    if (l->n_named) qsort(l->named, (size_t)l->n_named, sizeof *l->named, names_compare);
    return true;
}

static void checkpoints_name(const CheckpointList *l, int i, char name[CHECKPOINT_NAME_MAX]) {
    if (i < l->steps.n) step_name(name, l->steps.step[i]);
    else snprintf(name, CHECKPOINT_NAME_MAX, "%s", l->named[i - l->steps.n]);
}

static void checkpoints_free(CheckpointList *l) {
    free(l->steps.step);
    free(l->named);
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
            c->state.config = NULL; // it has been handed on
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
    CheckpointList have = {folder, {}, NULL, 0};
    bool automatic = strcmp(which, "auto") == 0, itself = automatic && fstatat(folder, MANIFEST_FILE, &st, AT_SYMLINK_NOFOLLOW) == 0;
    bool missing = !automatic && fstatat(folder, which, &st, AT_SYMLINK_NOFOLLOW) != 0;
    int error = errno;
    if (!checkpoints_list(&have)) {
        snprintf(why, room, "%s: cannot be listed: %s", shown, strerror(errno));
        return false;
    }
    l->n = itself || !automatic ? 1 : have.steps.n;
    l->name = (char (*)[CHECKPOINT_NAME_MAX])host_alloc((size_t)l->n * sizeof *l->name);
    for (int i = 0; i < l->n; i++) {
        if (itself || !automatic) snprintf(l->name[i], sizeof *l->name, "%.63s", itself ? "." : which); // a valid tag fits
        else step_name(l->name[i], have.steps.step[i]);
    }
    if (automatic && !itself && have.steps.n) latest_compare(folder, have.steps.step[0], shown);
    if (missing) {
        const int n = have.steps.n + have.n_named;
        size_t used = (size_t)snprintf(why, room, "checkpoint %s/%s: %s; there are: %s", shown, which, error == ENOENT ? "is missing" : strerror(error), n ? "" : "none");
        for (int i = 0; i < n && used + 80 < room; i++) {
            char name[CHECKPOINT_NAME_MAX];
            checkpoints_name(&have, i, name);
            used += (size_t)snprintf(why + used, room - used, "%s%s", i ? ", " : "", i < 20 ? name : "...");
            if (i == 20) break;
        }
    }
    checkpoints_free(&have);
    return !missing;
}

// The first of a folder's checkpoints that "auto" does not see, as its name is not that of its step; "" if there is none.
static void checkpoint_renamed(const char *dir, char name[CHECKPOINT_NAME_MAX]) {
    CheckpointList l = {open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC), {}, NULL, 0};
    name[0] = 0;
    if (l.folder < 0) return;
    if (checkpoints_list(&l) && l.n_named) snprintf(name, CHECKPOINT_NAME_MAX, "%s", l.named[0]);
    checkpoints_free(&l);
    close(l.folder);
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
