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
// Parts: checkpoint_load.cu, checkpoint_save.cu.
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

// Where the copy has this rank's range of a row: in a stretch of ranges that were copied together, behind `before` values of others.
typedef struct {
    int64_t at;          // byte of SaveCopy.memory at which the stretch begins
    int64_t numel, before;
} KeptRange;

// Room for the copy of what this rank owns: null where saves are not made in the background.
typedef struct {
    char *memory;
    int64_t bytes;
    bool pinned;
    KeptRange *range;    // of row and kind [kind * n_rows + row]
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

#include "checkpoint_load.cu"

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
    free(s->copy.range);
    if (s->lock_fd >= 0) close(s->lock_fd); // drops the lock
    if (s->folder.fd >= 0) close(s->folder.fd);
    free(s);
}

#include "checkpoint_save.cu"
