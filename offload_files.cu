// offload_files.cu - the pieces of what lives in files: how they are laid out, read ahead, and written back behind the update.
//
// A part of offload.cu, which includes it after its types.
#pragma once

// ---------------------------------------------------------------------------------------------------------------
// The files. Pieces and their buffers belong to the worker while that updates, else to the launching thread.

// Arrays begin at multiples of this, for the sake of vectors.
static int64_t filed_bytes(int64_t numel, int64_t element) { return round_up(numel * element, 64); }

// Bytes of what a file holds of `numel` elements in a row. filed: bytes of an element.
static int64_t filed_total(int64_t numel, const int64_t filed[HOST_ARRAYS], FileKind file) {
    int64_t bytes = 0;
    for (int k = 0; k < HOST_ARRAYS; k++) if (array_file(k) == file) bytes += filed_bytes(numel, filed[k]);
    return round_up(bytes, AIO_ALIGN);
}

static int64_t offload_piece_numel(int64_t sub_group_size) {
    return sub_group_size > 0 ? min_i64(sub_group_size, OFFLOAD_PIECE_NUMEL) : (int64_t)OFFLOAD_PIECE_NUMEL;
}

// A unit of `numel` elements is to find room as well.
static void file_room_add(FileRoom *r, int64_t numel, int64_t piece_numel, const int64_t filed[HOST_ARRAYS]) {
    int64_t piece = min_i64(numel, piece_numel);
    r->piece = max_i64(r->piece, filed_total(piece, filed, FILE_UPDATE) + filed_total(piece, filed, FILE_WEIGHTS));
    r->view = max_i64(r->view, filed_total(numel, filed, FILE_UPDATE) + filed_total(numel, filed, FILE_WEIGHTS));
    if (filed[HOST_WEIGHT] == 0) return;
    int64_t pieces = ceil_div(numel, piece_numel) + 1; // the border of decay may make one more
    r->weights = max_i64(r->weights, round_up(numel * filed[HOST_WEIGHT], AIO_ALIGN) + pieces * AIO_ALIGN);
    r->weights_numel = max_i64(r->weights_numel, numel);
}
static int64_t file_room_bytes(const FileRoom *r, const OffloadFiling *f) { return f->buffer_count * r->piece + r->view + f->weight_buffer_count * r->weights; }

// Waits for a transfer's end. What fails is lost with the run; checkpoints are elsewhere.
static void transfer_wait(Offload *o, AioTransfer *t, FileKind file) {
    char why[AIO_WHY];
    if (!aio_wait(o->aio, t, why))
        die(EXIT_IO, "%s; the run ends, and its last checkpoint is as good as it was: look at that disk, or name another folder by zero_optimization.%s.nvme_path", why, file_sections[file]);
}

static PieceBuffer *piece_buffer(Offload *o, int piece) { return &o->buffer[piece % o->filing.buffer_count]; }

// Waits until a buffer's last transfers have ended.
static void buffer_wait(Offload *o, PieceBuffer *b) {
    for (int f = 0; f < OFFLOAD_FILES; f++) transfer_wait(o, &b->transfer[f], (FileKind)f);
}

// Where in its buffer lies what a file has of a piece.
static char *piece_part(Offload *o, int i, int file) { return piece_buffer(o, i)->data + (file == FILE_UPDATE ? 0 : o->piece[i].range[FILE_UPDATE].bytes); }

static void piece_read(Offload *o, int i) {
    PieceBuffer *b = piece_buffer(o, i);
    const FileRange *r = o->piece[i].range;
    buffer_wait(o, b);
    for (int f = 0; f < OFFLOAD_FILES; f++) if (r[f].bytes > 0) aio_read(o->aio, &b->transfer[f], &o->file[f], piece_part(o, i, f), r[f].offset, r[f].bytes);
}
static void piece_write(Offload *o, int i) {
    PieceBuffer *b = piece_buffer(o, i);
    const FileRange *r = o->piece[i].range;
    for (int f = 0; f < OFFLOAD_FILES; f++) if (r[f].bytes > 0) aio_write(o->aio, &b->transfer[f], &o->file[f], piece_part(o, i, f), r[f].offset, r[f].bytes);
}

// The arrays of a piece; filed ones in its buffer.
static PieceArrays piece_arrays(Offload *o, int i) {
    const OffloadPiece *p = &o->piece[i];
    const HostUnit *u = &o->unit[p->unit];
    char *filed[OFFLOAD_FILES] = {};
    for (int f = 0; f < OFFLOAD_FILES && o->aio; f++) filed[f] = piece_part(o, i, f);
    PieceArrays a;
    memset(&a, 0, sizeof a);
    for (int k = 0; k < HOST_ARRAYS; k++) {
        FileKind f = array_file(k);
        if (u->filed[k]) a.at[k] = filed[f], filed[f] += filed_bytes(p->numel, u->element[k]);
        else if (u->array[k]) a.at[k] = u->array[k] + p->from * u->element[k];
    }
    if (u->array[HOST_MASTER] == u->array[HOST_WEIGHT]) a.at[HOST_MASTER] = a.at[HOST_WEIGHT]; // in fp32
    return a;
}

// Copies the filed arrays of a piece from its buffer to the view, or back.
static void piece_view(Offload *o, int i, bool to_buffer) {
    const OffloadPiece *p = &o->piece[i];
    const HostUnit *u = &o->unit[p->unit];
    PieceArrays a = piece_arrays(o, i);
    for (int k = 0; k < HOST_ARRAYS; k++) {
        if (!u->filed[k]) continue;
        char *seen = u->array[k] + p->from * u->element[k];
        memcpy(to_buffer ? a.at[k] : seen, to_buffer ? seen : a.at[k], (size_t)(p->numel * u->element[k]));
    }
}

// What was written into the open unit is in the files; no unit is open.
static void offload_close_unit(Offload *o) {
    if (o->viewed < 0) return;
    const HostUnit *u = &o->unit[o->viewed];
    for (int i = u->first; i < u->end && o->view_written; i++) {
        buffer_wait(o, piece_buffer(o, i));
        piece_view(o, i, true);
        piece_write(o, i);
    }
    for (int i = 0; i < o->filing.buffer_count; i++) buffer_wait(o, &o->buffer[i]);
    o->viewed = -1;
    o->view_written = false;
}

// The unit's weights lie in the file.
static FileRange weights_range(const Offload *o, int unit) {
    const FileRange *first = &o->piece[o->unit[unit].first].range[FILE_WEIGHTS], *last = &o->piece[o->unit[unit].end - 1].range[FILE_WEIGHTS];
    FileRange r = {first->offset, last->offset + last->bytes - first->offset};
    return r;
}

// Copies from and to a buffer have been made, and what they have changed is on its way to the file.
static void weights_settle(Offload *o, WeightBuffer *b) {
    event_sync(b->copied);
    if (!b->changed) return;
    FileRange r = weights_range(o, b->unit);
    aio_write(o->aio, &b->transfer, &o->file[FILE_WEIGHTS], b->data, r.offset, r.bytes);
    b->changed = false;
}

static void offload_wait(Offload *o, int unit);

// Between updates, for whose end it waits: the filed arrays of a unit are where HostUnit.array says, until another is opened, the next update begins or
// weights come from the file. writes: they will be changed.
static void offload_open_unit(Offload *o, int unit, bool writes) {
    const HostUnit *u = &o->unit[unit];
    bool filed = false;
    for (int k = 0; k < HOST_ARRAYS; k++) filed |= u->filed[k];
    if (!filed) return;
    offload_wait(o, -1); // the worker may be at later units, and the buffers are its own
    for (int i = 0; i < o->n_weights; i++) {
        WeightBuffer *b = &o->weights[i];
        if (b->unit != unit) continue;
        weights_settle(o, b);
        transfer_wait(o, &b->transfer, FILE_WEIGHTS);
        if (writes) b->unit = -1; // invariant 5
    }
    if (o->viewed != unit) {
        offload_close_unit(o);
        int n = o->filing.buffer_count;
        for (int i = u->first; i < u->end + n; i++) { // n reads are in flight
            if (i - n >= u->first) {
                buffer_wait(o, piece_buffer(o, i - n));
                piece_view(o, i - n, false);
            }
            if (i < u->end) piece_read(o, i);
        }
        o->viewed = unit;
        watch_tick();
    }
    o->view_written |= writes;
}
