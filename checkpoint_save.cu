// checkpoint_save.cu - writing a checkpoint: the shard of each rank, the three steps of a save, and the same in the background.
//
// A part of checkpoint.cu, which includes it last.
#pragma once

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
    return bytes + tables + world * (2 * SHARD_ALIGN + 128) + 16384 + 256 * (int64_t)t->table->n_rows;
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
        note("checkpoint.save_dir %s: a checkpoint takes %.1f MB, and %" PRId64 " more of them will be written before one goes, which with a reserve needs %.1f MB, but only %.1f MB are free: saves will fail then, and the third in a row ends the run",
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
    const KeptRange *k = &s->copy.range[kind * t->table->n_rows + row];
    t->kept_get(t->ctx, row, kind, k->numel, s->copy.memory + k->at, k->before + first - from, n, values);
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

// Rank 0: the newest complete checkpoint of the folder, of whichever run. False if there is none.
static bool checkpoint_newest(const CheckpointStore *s, char name[CHECKPOINT_NAME_MAX]) {
    StepList l;
    bool found = false;
    if (!steps_list(s->folder.fd, &l)) return false;
    for (int i = 0; i < l.n && !found; i++) {
        step_name(name, l.step[i]);
        found = checkpoint_looks_complete(s->folder.fd, name);
    }
    free(l.step);
    return found;
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
    s->copy.memory = (char *)pinned_region_malloc(max_i64(1, s->copy.bytes), s->copy.bytes, &s->copy.pinned);
    s->copy.range = (KeptRange *)host_alloc(sizeof(KeptRange) * (size_t)(t->n_kinds * t->table->n_rows));
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

// The rows of a unit of which this rank saves a range, in the order in which the unit's buffer has them. Returns how many there are.
static int stored_rows_of_unit(const CheckpointTensors *t, const UnitDesc *u, int row[ROLES_MAX]) {
    int n = 0;
    int64_t first, last;
    for (int i = u->first_row; i < u->first_row + u->n_rows; i++) {
        if (!stored_range(t, i, &first, &last)) continue;
        int k = n++;
        for (; k > 0 && t->table->row[row[k - 1]].offset > t->table->row[i].offset; k--) row[k] = row[k - 1];
        row[k] = i;
    }
    return n;
}

// Begins to copy one kind of a unit's values to byte `at` of the copy, and returns where the next ones go. Ranges that meet in the unit's
// buffer are one copy: a GPU's stream has room for about a thousand, and whoever begins another one waits for the first.
static int64_t keep_unit(CheckpointStore *s, const CheckpointTensors *t, const UnitDesc *u, int kind, int64_t at) {
    int row[ROLES_MAX], n = stored_rows_of_unit(t, u, row);
    for (int i = 0, next; i < n; i = next) {
        int64_t begin = 0, end = 0, numel = 0, first, last;
        for (next = i; next < n; next++) {
            const int64_t place = t->table->row[row[next]].offset;
            stored_range(t, row[next], &first, &last);
            if (next == i) begin = first;
            else if (place + first != end) break;
            s->copy.range[kind * t->table->n_rows + row[next]] = {at, 0, numel};
            numel += last - first;
            end = place + last;
        }
        for (int k = i; k < next; k++) s->copy.range[kind * t->table->n_rows + row[k]].numel = numel;
        t->keep(t->ctx, row[i], kind, begin, numel, s->copy.memory + at);
        at += numel * 4;
    }
    return at;
}

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
            for (int u = 0; u < t->table->n_units; u++) at = keep_unit(s, t, &t->table->unit[u], kind, at);
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
