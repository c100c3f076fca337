// crash_model.h - what a disk may hold after a loss of power at any instant, computed from the calls that were made.
//
// The calls of runtime/durable.h are recorded at its seam. Each changes either a folder's entries or a file's bytes, and is
// volatile until a fsync of that folder or file covers it. After a crash, everything that was covered is there; of the
// volatile changes any subset may be. That is harsher than any real file system, and allowed by POSIX (Pillai et al. 2014,
// "All file systems are not created equal", found 60 faults in 11 mature systems this way).
//
// The log can be changed before it is replayed (a fsync dropped, a rename moved): a test of the test, which must then find
// states that break the promises.
#pragma once
#include "../runtime/durable.h"
#include "harness.h"

enum { LOG_MAX = 1024, NODES_MAX = 256, ENTRIES_MAX = 64, LOG_ACK = 100, LOG_START };

// One call, or LOG_ACK: from here on `step` counts as safe; or LOG_START: the program starts again.
typedef struct {
    int op;                // IoOp, LOG_ACK or LOG_START
    IoRename rename;
    char name[IO_NAME_MAX], to[IO_NAME_MAX];
    unsigned char *data;   // copy of what was written
    int64_t offset, bytes;
    int64_t step;
} LogOp;

typedef struct {
    int n;
    LogOp op[LOG_MAX];
    bool fail_trash_sync;  // the fsync after the next rename to .trash-* fails with EIO
    char root[512];        // the topmost folder
} CrashLog;

static int crash_record(void *ctx, IoCall *call) {
    CrashLog *l = (CrashLog *)ctx;
    const LogOp *before = l->n ? &l->op[l->n - 1] : NULL;
    if (l->fail_trash_sync && call->op == IO_SYNC && before && before->op == IO_RENAME && strncmp(before->to, ".trash-", 7) == 0) {
        l->fail_trash_sync = false;
        return EIO;
    }
    if (call->op == IO_SPACE || call->op == IO_OPEN || call->op == IO_CLOSE || strncmp(call->name, "..", 3) == 0) return 0;
    if (call->op == IO_RENAME && call->rename == IO_RENAME_NEW) { // will be refused, so it changes nothing
        char path[1024];
        struct stat st;
        snprintf(path, sizeof path, "%s/%s", l->root, call->to);
        if (lstat(path, &st) == 0) return 0;
    }
    CHECK(l->n < LOG_MAX, "log full");
    if (call->op == IO_WRITE) call->bytes = min_i64(call->bytes, 4096); // so that a file is more than one write
    LogOp *o = &l->op[l->n++];
    memset(o, 0, sizeof *o);
    o->op = call->op;
    o->rename = call->rename;
    memcpy(o->name, call->name, sizeof o->name);
    memcpy(o->to, call->to, sizeof o->to);
    o->offset = call->offset;
    o->bytes = call->bytes;
    if (call->op == IO_WRITE || call->op == IO_ALLOCATE) o->data = (unsigned char *)host_alloc((size_t)call->bytes);
    if (call->op == IO_WRITE) memcpy(o->data, call->data, (size_t)call->bytes);
    return 0;
}

static void crash_mark(CrashLog *l, int mark, int64_t step) {
    CHECK(l->n < LOG_MAX, "log full");
    memset(&l->op[l->n], 0, sizeof l->op[0]);
    l->op[l->n].op = mark;
    l->op[l->n++].step = step;
}

static void crash_log_free(CrashLog *l) {
    for (int i = 0; i < l->n; i++) free(l->op[i].data);
    free(l);
}

// What a call does, with names resolved to nodes: node 0 is the topmost folder.
typedef enum { DO_NOTHING, DO_ENTRY, DO_DATA, DO_SYNC, DO_ACK } EffectKind;
typedef struct {
    EffectKind kind;
    int node;                        // whose entries or bytes; what a sync covers
    char name[2][IO_NAME_MAX];       // entries that change, at most two
    int target[2];                   // the node that they name from now on; -1 = no longer there; -2 = not used
    const LogOp *op;
} Effect;

typedef struct {
    int n_nodes, n_known;
    bool is_folder[NODES_MAX];
    char known[NODES_MAX][IO_NAME_MAX]; // path -> node, as whoever holds it open sees it
    int known_node[NODES_MAX];
} CrashNames;

static int *crash_known(CrashNames *names, const char *path) { // the newest meaning; added as -1 if new
    for (int i = names->n_known - 1; i >= 0; i--) if (strcmp(names->known[i], path) == 0) return &names->known_node[i];
    CHECK(names->n_known < NODES_MAX, "too many names");
    snprintf(names->known[names->n_known], IO_NAME_MAX, "%s", path);
    names->known_node[names->n_known] = -1;
    return &names->known_node[names->n_known++];
}

// The folder of a path, and its last component.
static int crash_parent(CrashNames *names, const char *path, const char **last) {
    const char *slash = strrchr(path, '/');
    *last = slash ? slash + 1 : path;
    if (!slash) return 0;
    char folder[IO_NAME_MAX];
    snprintf(folder, sizeof folder, "%.*s", (int)(slash - path), path);
    int node = *crash_known(names, folder);
    CHECK(node > 0, "log names %s before it is made", path);
    return node;
}

static void crash_entry(Effect *e, int which, const char *name, int target) {
    snprintf(e->name[which], IO_NAME_MAX, "%s", name);
    e->target[which] = target;
}

// Translates a log; effect has room for as many.
static void crash_compile(const LogOp *op, int n, Effect *effect, bool *is_folder) {
    CrashNames *names = (CrashNames *)host_alloc(sizeof *names);
    *crash_known(names, "") = 0;
    names->is_folder[0] = true;
    names->n_nodes = 1;
    for (int i = 0; i < n; i++) {
        const LogOp *o = &op[i];
        Effect *e = &effect[i];
        const char *last, *to;
        memset(e, 0, sizeof *e);
        e->op = o;
        e->target[0] = e->target[1] = -2;
        switch (o->op) {
        case IO_FOLDER:
        case IO_CREATE:
            e->kind = DO_ENTRY;
            e->node = crash_parent(names, o->name, &last);
            CHECK(names->n_nodes < NODES_MAX, "too many nodes");
            names->is_folder[names->n_nodes] = o->op == IO_FOLDER;
            *crash_known(names, o->name) = names->n_nodes;
            crash_entry(e, 0, last, names->n_nodes++);
            break;
        case IO_ALLOCATE:
        case IO_WRITE:
            e->kind = DO_DATA;
            e->node = *crash_known(names, o->name);
            break;
        case IO_SYNC:
            e->kind = DO_SYNC;
            e->node = *crash_known(names, o->name);
            break;
        case IO_RENAME: {
            e->kind = DO_ENTRY;
            e->node = crash_parent(names, o->name, &last);
            crash_parent(names, o->to, &to);
            int from = *crash_known(names, o->name), old = *crash_known(names, o->to);
            crash_entry(e, 0, to, from);
            crash_entry(e, 1, last, o->rename == IO_RENAME_SWAP ? old : -1);
            *crash_known(names, o->to) = from;
            if (o->rename == IO_RENAME_SWAP) *crash_known(names, o->name) = old;
            break;
        }
        case IO_UNLINK:
        case IO_RMDIR:
            e->kind = DO_ENTRY;
            e->node = crash_parent(names, o->name, &last);
            crash_entry(e, 0, last, -1);
            break;
        case LOG_ACK: e->kind = DO_ACK; break;
        case LOG_START: break;
        default: CHECK(false, "operation %d in the log", o->op);
        }
        CHECK(e->node >= 0, "log uses %s before it is made", o->name);
    }
    memcpy(is_folder, names->is_folder, sizeof names->is_folder);
    free(names);
}

// The effects before `cut` that may or may not have reached the disk.
static int crash_volatile(const Effect *effect, int cut, int *list) {
    int n = 0;
    for (int i = 0; i < cut; i++) {
        if (effect[i].kind != DO_ENTRY && effect[i].kind != DO_DATA) continue;
        bool covered = false;
        for (int k = i + 1; k < cut && !covered; k++) covered = effect[k].kind == DO_SYNC && effect[k].node == effect[i].node;
        if (!covered) list[n++] = i;
    }
    return n;
}

typedef struct {
    int folder, node;
    char name[IO_NAME_MAX];
} CrashEntry;

// Builds in the empty folder `root` what the disk holds when the effects i < cut with !lost[i] reached it.
static void crash_build(const char *root, const Effect *effect, int cut, const bool *lost, const bool *is_folder) {
    CrashEntry entry[ENTRIES_MAX];
    int n = 0;
    for (int i = 0; i < cut; i++) {
        if (effect[i].kind != DO_ENTRY || lost[i]) continue;
        for (int w = 0; w < 2; w++) {
            if (effect[i].target[w] == -2) continue;
            int at = 0;
            while (at < n && (entry[at].folder != effect[i].node || strcmp(entry[at].name, effect[i].name[w]) != 0)) at++;
            if (effect[i].target[w] < 0) { if (at < n) entry[at] = entry[--n]; continue; }
            CHECK(at < ENTRIES_MAX, "too many entries");
            entry[at].folder = effect[i].node;
            entry[at].node = effect[i].target[w];
            snprintf(entry[at].name, IO_NAME_MAX, "%s", effect[i].name[w]);
            if (at == n) n++;
        }
    }
    for (int k = 0; k < n; k++) { // two levels: the topmost folder, and folders of files
        if (entry[k].folder != 0 || !is_folder[entry[k].node]) continue;
        char path[1024];
        snprintf(path, sizeof path, "%s/%s", root, entry[k].name);
        CHECK(mkdir(path, 0777) == 0, "mkdir %s: %s", path, strerror(errno));
    }
    for (int k = 0; k < n; k++) {
        if (is_folder[entry[k].node]) continue;
        for (int f = -1; f < n; f++) { // a folder can have two names for an instant that no fsync has ended
            if (f < 0 ? entry[k].folder != 0 : entry[f].folder != 0 || entry[f].node != entry[k].folder) continue;
            char path[1024];
            snprintf(path, sizeof path, "%s/%s%s%s", root, f < 0 ? "" : entry[f].name, f < 0 ? "" : "/", entry[k].name);
            static unsigned char text[1 << 16];
            int64_t length = 0;
            for (int i = 0; i < cut; i++) {
                const LogOp *o = effect[i].op;
                if (effect[i].kind != DO_DATA || effect[i].node != entry[k].node || lost[i]) continue;
                CHECK(o->offset + o->bytes <= (int64_t)sizeof text, "file %s too large for this model", path);
                if (o->offset > length) memset(text + length, 0, (size_t)(o->offset - length));
                memcpy(text + o->offset, o->data, (size_t)o->bytes);
                length = max_i64(length, o->offset + o->bytes);
            }
            int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
            CHECK(fd >= 0 && file_write_all(fd, text, length), "write %s: %s", path, strerror(errno));
            close(fd);
        }
    }
}

// Calls visit for every crash state: at each cut all subsets of the volatile effects if they are at most 2^exhaustive, else
// none, all, each one alone lost or kept, and `samples` random ones. `acknowledged` is the last step counted as safe. Ends
// early when visit returns false. Returns the number of states.
static int64_t crash_each(const Effect *effect, int n, int exhaustive, int samples,
                          bool (*visit)(void *ctx, int cut, const bool *lost, int64_t acknowledged), void *ctx) {
    int64_t states = 0, acknowledged = 0;
    bool *lost = (bool *)host_alloc((size_t)n + 1);
    int *list = (int *)host_alloc(sizeof(int) * (size_t)(n + 1));
    bool go_on = true;
    for (int cut = 0; cut <= n && go_on; cut++) {
        if (cut > 0 && effect[cut - 1].kind == DO_ACK) acknowledged = effect[cut - 1].op->step;
        int v = crash_volatile(effect, cut, list);
        int64_t subsets = v <= exhaustive ? (int64_t)1 << v : 2 + 2 * v + samples;
        for (int64_t s = 0; s < subsets && go_on; s++) {
            for (int i = 0; i < v; i++) {
                bool gone;
                if (v <= exhaustive) gone = s >> i & 1;
                else if (s < 2) gone = s == 1;
                else if (s < 2 + 2 * v) gone = ((s - 2) / 2 == i) == ((s & 1) == 0);
                else gone = rng_bits((uint64_t)cut, (uint64_t)s, (uint64_t)i) & 1;
                lost[list[i]] = gone;
            }
            go_on = visit(ctx, cut, lost, acknowledged);
            states++;
        }
        for (int i = 0; i < v; i++) lost[list[i]] = false;
    }
    free(lost);
    free(list);
    return states;
}
