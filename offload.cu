// offload.cu - homes of what does not fit on the device: host memory, from which the CPU makes the update itself.
//
// Of the 16 bytes that a parameter takes in training (zero.cu), AdamW's states and the master are 10, and they are needed once an
// update, for some ten operations each. Moving them to the GPU for that would be 20 bytes of traffic a parameter. So the work
// goes where they are (ZeRO-Offload, Ren et al. 2021): the gradient comes to the host (4 or 2 bytes), the CPU updates, and the 16-bit
// weight goes back (2 bytes). The CPU reads and writes some 28 bytes a parameter for it, and its memory is the limit:
// at 150 GB/s 5 billion parameters a second, where a GPU makes 150. All art lies in hiding that, without changing a bit:
//
//     compute  | backward of the last micro-batch: 3 2 1 0 | decide |  0  |  1  |  2  |  3  | ... the other micro-batches
//     out      |              grad 3 | grad 2 | grad 1 | grad 0 |
//     worker   |                                                   | 0 | 1 | 2 | 3 |
//     in       |                                                      | 0 | 1 | 2 | 3 |
//
//  - A gradient leaves as soon as its sum over the ranks is final (offload_take_gradient), behind the backward pass of the units
//    before it.
//  - The update waits for one thing, the decision (UpdateControl): the norm of all gradients scales every one of them, and where
//    it is not finite nothing may change. One could update at once, as if no clipping were needed, and take it back where it
//    was. But an update cannot be inverted exactly in floating point, so the old values would have to be kept, which is more memory
//    and traffic than anything else here; and runs clip most when they are young and nobody wants to find out whether they differ.
//  - From there on a worker, one thread with a team of its own, walks over the units in the order in which the next forward pass
//    needs them, in pieces of a few million elements, and each piece's weights go back at once. zero_fetch waits for its own
//    unit only. So the device computes the first units while the CPU updates the later ones, and what shows is the time by which
//    the CPU is slower than one forward pass.
//  - What shows can be made less by `ratio`, the share of the elements that are offloaded at all. What is not offloaded is what
//    the next forward pass needs first: updated on the device in no time, it gives the CPU a start.
//
// The worker sees host memory only. Streams, events and copies belong to the thread that launches everything else: it sends back
// what is done whenever it asks for a unit (offload_wait), so nobody needs a lock on the device, and no order of work on it depends
// on luck.
//
// Per element that is offloaded the host keeps (HostArray)
//
//                  weight     master          states    gradient
//     fp32         4          the weight      4 each    4
//     bf16         2          2 (remainder)   4 each    4, or 2 with grad_accum_dtype bf16
//     fp16         2          4               4 each    4, or 2
//
// in one region, which is made and touched once, and pinned as far as copies from and to the device reach: weights and gradients lie first in
// it, with the buffers of files before them. The weight is a mirror of the device's: what the CPU computes there goes back as it is.
//
// The weights of stage 3 can live there, too (offload_param). Then the mirror is their only home: to gather a unit is to copy this rank's
// shard to its place in the whole buffer, and the other ranks' with it; the look-ahead of zero.cu hides both, and with one
// rank the copy alone. What the CPU has updated need not go back to the device before somebody wants it.
//
// A home is where a unit's arrays stay between updates. Masters (beside 16-bit weights) and states, 10 of the 16 bytes above in bf16, may
// have theirs in a file (ZeRO-Infinity, Rajbhandari et al. 2021; runtime/aio.h); weights and gradients come from and go to the device, and
// stay in memory. In the file the arrays of a piece lie behind each other, so that a piece is one read and one write:
//
//     file    | master, states of piece 0 | master, states of piece 1 | ...          each at a multiple of AIO_ALIGN
//     worker       update 0    |    update 1    |    update 2    |                  with pipeline_read and pipeline_write
//     file     read 1 | read 2 | write 0 read 3 | write 1 read 4 |
//
// Buffers take turns: piece i has buffer i modulo buffer_count, from its read to the end of its write. A disk is a hundred times
// slower than memory, so its rate is the update's: 20 bytes a parameter of AdamW in bf16. offload_piece_begin and offload_piece_end are
// the places of the worker that know; between updates whoever wants to see a unit's arrays opens it (offload_open_unit).
//
// The weights may live in a file of their own, too. What the CPU updates of them passes through the worker with the piece. What a pass
// gathers comes by whole shards of units through other buffers (WeightBuffer), which the launching thread fills ahead of the gathers:
//
//     file     read 3 | read 4 | read 5 | ...           as far ahead of the cursor as there are buffers
//     gather          | copy 3 | copy 4 | ...           from the buffer to the device, and the other ranks' shards with it
//     compute                  |   3    |   4    | ...
//
// A buffer is filled anew only after the copy from it. That the launching thread waits for, so it is never ahead of the device by more
// buffers than there are; the last that were copied are not among those to be filled, or the device would run out of work.
//
// Invariants:
//  1. Between offload_update_begin and the return of offload_wait for a unit, its arrays belong to the worker: whoever reads
//     or writes them, or the device's weights, waits first.
//  2. Pieces are updated, and sent back, in the order of their list: what waits for a unit waits for all before it, too.
//  3. The worker reads gradients and overwrites mirrors only after all copies of the update before have arrived.
//  4. A range of a file is read only after the last write of it has ended. Pieces of the worker go through the same buffer both ways. Of
//     weights in a file, a piece counts as updated when its write has ended, and whoever else writes them waits for that.
//  5. What a WeightBuffer has of a unit is what its file has: where that changes, it is forgotten (weights_forget).
//  6. An update is the same whoever makes it, element by element: where the arithmetic is the same (fp32, or the CPU backend) so are all bits.
// Read next: zero.cu.
#pragma once
#include "model.cu"
#include "runtime/aio.h"
#include "runtime/memory.h"
#include "runtime/thread.h"
#include "runtime/watch.h"
#include <omp.h>

enum { OFFLOAD_STATES_MAX = UPDATE_STATES_MAX };

// The files of a rank: masters and states, for updates; and weights, for every pass.
typedef enum { FILE_UPDATE, FILE_WEIGHTS, OFFLOAD_FILES } FileKind;

static const char *const file_holds[OFFLOAD_FILES] = {"optimizer states and masters", "weights"};
static const char *const file_sections[OFFLOAD_FILES] = {"offload_optimizer", "offload_param"}; // of the configuration

// What the host may hold of a unit.
typedef enum { HOST_WEIGHT, HOST_MASTER, HOST_STATE_0, HOST_STATE_1, HOST_GRAD, HOST_ARRAYS } HostArray;

// By HostArray: what each is for.
static const MemoryKind host_array_kinds[HOST_ARRAYS] = {MEMORY_WEIGHTS, MEMORY_MASTERS, MEMORY_OPTIMIZER_STATES, MEMORY_OPTIMIZER_STATES, MEMORY_GRADIENTS};

// Elements of a piece at most: few enough that the first of a unit is on its way back while the last is still computed, and enough
// that each thread of a team has its millisecond of work.
enum { OFFLOAD_PIECE_NUMEL = 4 << 20 };

// Pieces in memory at once where only weights are filed.
enum { OFFLOAD_BUFFERS = 4 };

// The file that an array lies in, if it lies in one.
static FileKind array_file(int array) { return array == HOST_WEIGHT ? FILE_WEIGHTS : FILE_UPDATE; }

typedef struct {
    char *array[HOST_ARRAYS];  // of all elements of the unit that this rank updates; null: there is none. Filed ones: only while the unit is open
    int64_t element[HOST_ARRAYS]; // bytes of one
    bool filed[HOST_ARRAYS];   // its home is a file
    int64_t numel;
    bool updates;              // by the CPU
    int first, end;            // its first piece, and the one after its last
    char *device_weight;       // where the updated weights go; null: they stay
    Event returned;            // recorded on Offload.in behind the last of them
} HostUnit;

typedef struct {
    int64_t offset, bytes;
} FileRange;

// Elements [from, from + numel) of what this rank updates of a unit.
typedef struct {
    int unit;
    int64_t from, numel;
    bool decays;               // by weight decay: all of its elements, or none
    FileRange range[OFFLOAD_FILES]; // of its filed arrays
} OffloadPiece;

// The arrays of a piece, each from its first element on.
typedef struct {
    void *at[HOST_ARRAYS];
} PieceArrays;

// Updates a piece, in the worker's thread.
typedef void (*OffloadUpdate)(void *context, const OffloadPiece *p, const PieceArrays *arrays);

// How arrays are kept in files; zero_optimization.offload_optimizer, offload_param and aio.
typedef struct {
    bool used[OFFLOAD_FILES];
    const char *folder[OFFLOAD_FILES];
    bool makes_folder[OFFLOAD_FILES]; // and the ones above it, if it is not there
    int buffer_count;          // of pieces
    bool pipeline_read, pipeline_write;
    int weight_buffer_count;
    int64_t weight_buffer_numel; // elements of one at most
    int64_t weights_in_memory; // elements whose weights stay in host memory
    AioOptions aio;
} OffloadFiling;

// Host memory that files take beside the disk: what their largest parts need, bytes.
typedef struct {
    int64_t piece;             // the filed arrays of a piece
    int64_t view;              // those of a unit
    int64_t weights;           // the weights of a unit, its pieces at multiples of AIO_ALIGN
    int64_t weights_numel;     // their elements
} FileRoom;

// The filed arrays of a piece, in memory: what the one file has of it, and behind that what the other has.
typedef struct {
    char *data;
    AioTransfer transfer[OFFLOAD_FILES]; // its reads, or its writes
} PieceBuffer;

// The weights of a unit on their way from a file to the device, or back: as they lie in the file.
typedef struct {
    char *data;
    AioTransfer transfer;      // its read, or its write
    int unit;                  // whose they are, or will be when the transfer has ended; -1: nobody's
    bool ahead;                // nobody has asked for them yet
    bool changed;              // by a copy from the device, and not written yet
    Event copied;              // behind the last copy from or to it
} WeightBuffer;

typedef struct {
    int n_units;
    HostUnit *unit;            // by unit
    OffloadFiling filing;
    int64_t piece_numel;       // elements of a piece at most
    AioFile file[OFFLOAD_FILES];
    Aio *aio;                  // null: nothing is filed
    FileRoom room;             // of buffers and view
    PieceBuffer *buffer;       // (filing.buffer_count)
    int reads;                 // pieces of this update whose read has begun
    char *view;                // the filed arrays of the unit that is open
    int viewed;                // it; -1: none
    bool view_written;         // it is to be written back
    int n_weights, next_weights; // buffers, 0 if no weights are filed; the one that is filled next
    WeightBuffer *weights;
    char *region;              // all arrays of all units
    int64_t bytes, travels;    // of it, and of its first part, which copies from and to the device reach
    bool pinned;               // that part
    Stream out, in;            // gradients to the host, weights back
    Event ordered;             // orders `out` behind another stream: recorded, and at once waited for
    OffloadPiece *piece;
    int n_pieces;
    int first_updated;         // the first that the CPU updates; those before it are of units in a file
    int sent;                  // pieces whose weights are on their way back; n_pieces between updates
    OffloadUpdate update;
    void *context;
    // Shared with the worker, under the lock.
    pthread_t worker;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int done;                  // pieces that are updated, and where their weights are filed, written; n_pieces: nothing to do
    bool ends;
} Offload;

#include "offload_files.cu"

// ---------------------------------------------------------------------------------------------------------------
// Setting up

// Moves what a file is for from the one table of bytes an element to the other. Gradients stay in memory.
static void host_elements_file(int64_t element[HOST_ARRAYS], int64_t filed[HOST_ARRAYS], FileKind file) {
    for (int k = 0; k < HOST_GRAD; k++)
        if (array_file(k) == file) filed[k] = element[k], element[k] = 0;
}

// Is it copied to the device, or from there?
static bool array_travels(int array) { return array == HOST_WEIGHT || array == HOST_GRAD; }

// Bytes of one element of each array of a unit in host memory: with the update here all of them, else the weight alone.
static void host_elements(int64_t element[HOST_ARRAYS], DType weight, int n_states, DType grad, bool updates) {
    memset(element, 0, sizeof(int64_t) * HOST_ARRAYS);
    element[HOST_WEIGHT] = dtype_bytes(weight);
    if (!updates) return;
    if (weight != DTYPE_FP32) element[HOST_MASTER] = weight == DTYPE_BF16 ? 2 : 4; // an fp32 weight is its own master
    for (int i = 0; i < n_states; i++) element[HOST_STATE_0 + i] = 4;
    element[HOST_GRAD] = dtype_bytes(grad);
}

// sub_group_size: elements of a piece at most, 0 for as many as are good.
static void offload_init(Offload *o, int n_units, OffloadFiling filing, int64_t sub_group_size) {
    memset(o, 0, sizeof *o);
    o->n_units = n_units;
    o->filing = filing;
    o->piece_numel = offload_piece_numel(sub_group_size);
    o->viewed = -1;
    for (int f = 0; f < OFFLOAD_FILES; f++) o->file[f].fd = -1;
    o->unit = (HostUnit *)host_alloc(sizeof(HostUnit) * (size_t)n_units);
}

// Gives a unit room for `numel` elements. Units are added in the order in which a forward pass needs them. filed: bytes of an element
// of what the files hold.
static void offload_add_unit(Offload *o, int unit, int64_t numel, const int64_t element[HOST_ARRAYS], const int64_t filed[HOST_ARRAYS]) {
    HostUnit *u = &o->unit[unit];
    u->numel = numel;
    u->updates = element[HOST_GRAD] > 0;
    for (int i = 0; i < HOST_ARRAYS; i++) {
        u->filed[i] = filed[i] > 0;
        u->element[i] = element[i] + filed[i]; // one of them is 0
        o->bytes += numel * element[i];
        if (array_travels(i)) o->travels += numel * element[i];
    }
    file_room_add(&o->room, numel, o->piece_numel, filed);
}

// Cuts a unit into pieces of one kind of decay each, of at most piece_numel elements. `border`: elements before it decay.
// Returns how many there are; into `piece` unless that is null.
static int offload_cut(OffloadPiece *piece, int unit, int64_t numel, int64_t border, int64_t piece_numel) {
    int n = 0;
    for (int64_t from = 0; from < numel; n++) {
        int64_t until = from < border ? border : numel, end = min_i64(until, from + piece_numel);
        OffloadPiece p = {unit, from, end - from, from < border, {}};
        if (piece) piece[n] = p;
        from = end;
    }
    return n;
}

static void *offload_work(void *offload);

// A file as long as the pieces' arrays in it. Where each lies there is known.
static void offload_make_file(Offload *o, FileKind f, int64_t bytes) {
    const char *folder = o->filing.folder[f];
    char why[AIO_WHY], path[4200];
    for (size_t n = 1; o->filing.makes_folder[f] && n < sizeof path; n++) { // "out", then "out/nvme"; what fails here fails below
        snprintf(path, n + 1, "%s", folder);
        if (folder[n] == '/' || !folder[n]) mkdir(path, 0777);
        if (!folder[n]) break;
    }
    if (!aio_open(&o->file[f], folder, file_holds[f], bytes, why))
        die(errno == ENOSPC || errno == EDQUOT || errno == EIO ? EXIT_IO : EXIT_CANTCREAT, "%s; make room there, or name another folder by zero_optimization.%s.nvme_path", why, file_sections[f]);
}

// The files and their engine. at: memory for buffers and view (FileRoom).
static void offload_start_files(Offload *o, char *at) {
    int64_t bytes[OFFLOAD_FILES] = {};
    for (int i = 0; i < o->n_pieces; i++)
        for (int f = 0; f < OFFLOAD_FILES; f++) {
            const HostUnit *u = &o->unit[o->piece[i].unit];
            int64_t filed[HOST_ARRAYS];
            for (int k = 0; k < HOST_ARRAYS; k++) filed[k] = u->filed[k] ? u->element[k] : 0;
            FileRange r = {bytes[f], filed_total(o->piece[i].numel, filed, (FileKind)f)};
            o->piece[i].range[f] = r;
            bytes[f] += r.bytes;
        }
    for (int f = 0; f < OFFLOAD_FILES; f++) if (bytes[f] > 0) offload_make_file(o, (FileKind)f, bytes[f]);
    o->aio = aio_create(&o->filing.aio);
    o->buffer = (PieceBuffer *)host_alloc(sizeof(PieceBuffer) * (size_t)o->filing.buffer_count);
    for (int i = 0; i < o->filing.buffer_count; i++, at += o->room.piece) o->buffer[i].data = at;
    o->n_weights = o->room.weights > 0 ? o->filing.weight_buffer_count : 0;
    o->weights = (WeightBuffer *)host_alloc(sizeof(WeightBuffer) * (size_t)max_i64(1, o->n_weights));
    for (int i = 0; i < o->n_weights; i++, at += o->room.weights) {
        o->weights[i].data = at;
        o->weights[i].unit = -1;
        o->weights[i].copied = event_create();
        event_record(o->weights[i].copied, o->in);
    }
    for (int i = 0; i < o->n_units; i++) { // wherever a unit is open, its arrays lie there
        HostUnit *u = &o->unit[i];
        char *array = at;
        for (int k = 0; k < HOST_ARRAYS; k++)
            if (u->filed[k]) u->array[k] = array, array += filed_bytes(u->numel, u->element[k]);
    }
}

// Cuts all units into pieces. border: by unit, how many of its elements decay.
static void offload_cut_units(Offload *o, const int64_t *border) {
    for (int pass = 0; pass < 2; pass++) {
        o->n_pieces = 0;
        o->first_updated = -1;
        for (int i = 0; i < o->n_units; i++) {
            HostUnit *u = &o->unit[i];
            u->first = o->n_pieces;
            if (u->updates && o->first_updated < 0) o->first_updated = o->n_pieces;
            if (u->updates || u->filed[HOST_WEIGHT]) o->n_pieces += offload_cut(pass ? o->piece + o->n_pieces : NULL, i, u->numel, border[i], o->piece_numel);
            u->end = o->n_pieces;
            CHECK(u->updates || u->first == u->end || o->first_updated < 0, "unit %d is updated on the device, and one before it is not", i);
        }
        if (o->first_updated < 0) o->first_updated = o->n_pieces;
        if (pass == 0) o->piece = (OffloadPiece *)host_alloc(sizeof(OffloadPiece) * (size_t)max_i64(1, o->n_pieces));
    }
    o->done = o->sent = o->n_pieces;
}

// All units are added: makes the memory, the files, and the worker if it has work. border: by unit, how many of its elements decay. pin: wanted.
static void offload_start(Offload *o, const int64_t *border, bool pin) {
    int64_t room = file_room_bytes(&o->room, &o->filing);
    if (o->room.view > 0) o->bytes += room, o->travels += room;
    if (o->bytes == 0) return;
    o->pinned = pin;
    o->region = (char *)pinned_region_malloc(o->bytes, o->travels, &o->pinned);
    if (pin && !o->pinned) note("%.2f GiB of host memory cannot be pinned (see ulimit -l): offload goes on without, and its copies hold up the device", (double)o->travels / (1 << 30));
    o->out = stream_create();
    o->in = stream_create();
    o->ordered = event_create();
    offload_cut_units(o, border);
    if (o->room.view > 0) offload_start_files(o, o->region); // first of all, for its alignment
    char *next[2] = {o->region + o->travels, o->region + (o->room.view > 0 ? room : 0)}; // of what stays, and of what travels
    for (int i = 0; i < o->n_units; i++) {
        HostUnit *u = &o->unit[i];
        if (u->numel == 0) continue;
        u->returned = event_create();
        for (int k = 0; k < HOST_ARRAYS; k++) {
            if (u->element[k] == 0 || u->filed[k]) continue;
            u->array[k] = next[array_travels(k)];
            next[array_travels(k)] += u->numel * u->element[k];
        }
        if (u->element[HOST_MASTER] == 0) u->array[HOST_MASTER] = u->array[HOST_WEIGHT], u->element[HOST_MASTER] = u->element[HOST_WEIGHT];
    }
    if (o->n_pieces == 0) return;
    pthread_mutex_init(&o->lock, NULL);
    pthread_cond_init(&o->changed, NULL);
    int error = pthread_create(&o->worker, NULL, offload_work, o);
    CHECK(error == 0, "no thread for the update on the CPU: %s", strerror(error));
}

static void offload_free(Offload *o) {
    if (o->n_pieces > 0) {
        pthread_mutex_lock(&o->lock);
        o->ends = true;
        pthread_cond_broadcast(&o->changed);
        pthread_mutex_unlock(&o->lock);
        pthread_join(o->worker, NULL);
        pthread_mutex_destroy(&o->lock);
        pthread_cond_destroy(&o->changed);
    }
    if (o->aio) {
        for (int i = 0; i < o->filing.buffer_count; i++) buffer_wait(o, &o->buffer[i]);
        for (int i = 0; i < o->n_weights; i++) {
            weights_settle(o, &o->weights[i]);
            transfer_wait(o, &o->weights[i].transfer, FILE_WEIGHTS);
            event_destroy(o->weights[i].copied);
        }
        aio_free(o->aio);
        for (int f = 0; f < OFFLOAD_FILES; f++) aio_close(&o->file[f]);
        free(o->buffer);
        free(o->weights);
    }
    if (o->bytes > 0) {
        stream_sync(o->out);
        stream_sync(o->in);
        for (int i = 0; i < o->n_units; i++) if (o->unit[i].returned) event_destroy(o->unit[i].returned);
        event_destroy(o->ordered);
        stream_destroy(o->out);
        stream_destroy(o->in);
        pinned_region_free(o->region, o->bytes, o->pinned);
    }
    free(o->piece);
    free(o->unit);
}

// ---------------------------------------------------------------------------------------------------------------
// The worker

// The arrays of a piece. Filed ones come from the file: with pipeline_read, so do as many pieces after this one as leave
// a buffer for this one and one for the last, which is being written.
static PieceArrays offload_piece_begin(Offload *o, int i) {
    if (o->aio) {
        int until = (int)min_i64(o->n_pieces, i + 1 + (o->filing.pipeline_read ? o->filing.buffer_count - 2 : 0));
        for (; o->reads < until; o->reads++) piece_read(o, o->reads);
        buffer_wait(o, piece_buffer(o, i));
    }
    return piece_arrays(o, i);
}

static void offload_piece_end(Offload *o, int i) {
    if (!o->aio) return;
    piece_write(o, i);
    if (!o->filing.pipeline_write) buffer_wait(o, piece_buffer(o, i));
}

// Waits until the weights of the pieces from `from` to `until` are where a gather looks for them.
static void offload_weights_written(Offload *o, int from, int until) {
    for (int i = from; i < until && o->n_weights > 0; i++) transfer_wait(o, &piece_buffer(o, i)->transfer[FILE_WEIGHTS], FILE_WEIGHTS);
}

// Threads of the worker's team. One core stays with whoever launches.
static int offload_threads(void) { return (int)max_i64(1, device_info().threads - 1); }

static void *offload_work(void *offload) {
    Offload *o = (Offload *)offload;
    int next = o->first_updated;
    omp_set_num_threads(offload_threads());
    pthread_mutex_lock(&o->lock);
    while (!o->ends) {
        if (o->done == o->n_pieces) {
            next = o->first_updated;
            pthread_cond_wait(&o->changed, &o->lock);
            continue;
        }
        int done = o->done;
        pthread_mutex_unlock(&o->lock);
        PieceArrays arrays = offload_piece_begin(o, next);
        o->update(o->context, &o->piece[next], &arrays);
        offload_piece_end(o, next++);
        int until = o->n_weights > 0 && next < o->n_pieces ? next - 1 : next; // a write has the time of the next update
        offload_weights_written(o, done, until);
        pthread_mutex_lock(&o->lock);
        o->done = until;
        pthread_cond_broadcast(&o->changed);
    }
    pthread_mutex_unlock(&o->lock);
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------
// One update, from the launching thread

// What this rank updates of a unit's gradient is final on stream s: it leaves for the host.
static void offload_take_gradient(Offload *o, int unit, const void *grad, Stream s) {
    const HostUnit *u = &o->unit[unit];
    event_record(o->ordered, s);
    stream_wait_event(o->out, o->ordered);
    device_copy(u->array[HOST_GRAD], grad, u->numel * u->element[HOST_GRAD], COPY_TO_HOST, o->out);
}

// The host waits for the gradients that are on their way. The device's may be written again.
static void offload_take_gradients_end(Offload *o) {
    if (o->n_pieces > 0) stream_sync(o->out);
}

// The worker begins the update, and calls update(context, ...) for each piece. Both stay valid until offload_wait has returned for all.
static void offload_update_begin(Offload *o, OffloadUpdate update, void *context) {
    if (o->n_pieces == 0) return;
    CHECK(o->sent == o->n_pieces, "%d of %d pieces of the last update are on their way back", o->sent, o->n_pieces);
    stream_sync(o->in); // invariant 3
    offload_close_unit(o);
    for (int i = 0; i < o->n_weights; i++) {
        WeightBuffer *b = &o->weights[i];
        b->ahead = false;
        if (b->unit >= 0 && o->unit[b->unit].updates) b->unit = -1; // invariant 5
    }
    o->reads = o->first_updated;
    pthread_mutex_lock(&o->lock);
    o->update = update;
    o->context = context;
    o->done = o->sent = o->first_updated;
    pthread_cond_broadcast(&o->changed);
    pthread_mutex_unlock(&o->lock);
}

// Enqueues the way back of the pieces before `until`, which are updated.
static void offload_send(Offload *o, int until) {
    for (; o->sent < until; o->sent++) {
        const OffloadPiece *p = &o->piece[o->sent];
        const HostUnit *u = &o->unit[p->unit];
        int64_t element = u->element[HOST_WEIGHT];
        if (u->device_weight) device_copy(u->device_weight + p->from * element, u->array[HOST_WEIGHT] + p->from * element, p->numel * element, COPY_TO_DEVICE, o->in);
        if (o->sent + 1 == u->end) event_record(u->returned, o->in);
    }
}

// The host waits until the worker has updated a unit (-1: all), and the way back of its weights is enqueued: whoever uses
// them on a stream waits for HostUnit.returned there. On the way everything that is done is sent back.
static void offload_wait(Offload *o, int unit) {
    if (o->n_pieces == 0) return;
    int until = unit < 0 ? o->n_pieces : o->unit[unit].end;
    pthread_mutex_lock(&o->lock);
    for (;;) {
        int done = o->done;
        if (o->sent < done) {
            pthread_mutex_unlock(&o->lock);
            offload_send(o, done);
            watch_tick(); // a slow update is no hang; one that stands still is
            pthread_mutex_lock(&o->lock);
        } else if (o->sent >= until) break;
        else pthread_cond_wait(&o->changed, &o->lock);
    }
    pthread_mutex_unlock(&o->lock);
}

// ---------------------------------------------------------------------------------------------------------------
// Weights that live here, to the device and back, from the launching thread

static WeightBuffer *weights_find(Offload *o, int unit) {
    for (int i = 0; i < o->n_weights; i++) if (o->weights[i].unit == unit) return &o->weights[i];
    return NULL;
}

// Begins to read a unit's weights into the buffer whose turn it is.
static WeightBuffer *weights_read(Offload *o, int unit) {
    WeightBuffer *b = &o->weights[o->next_weights];
    FileRange r = weights_range(o, unit);
    o->next_weights = (o->next_weights + 1) % o->n_weights;
    offload_close_unit(o); // it may be this one
    weights_settle(o, b);
    transfer_wait(o, &b->transfer, FILE_WEIGHTS);
    b->unit = unit;
    b->ahead = true;
    aio_read(o->aio, &b->transfer, &o->file[FILE_WEIGHTS], b->data, r.offset, r.bytes);
    return b;
}

// A unit will be gathered soon: if its weights come from a file they are read now. False: there is no buffer, or the CPU still updates
// them; what comes later in the order of the gathers is not to be read before them.
static bool offload_read_ahead(Offload *o, int unit) {
    const HostUnit *u = &o->unit[unit];
    int n_ahead = 0;
    WeightBuffer *b = weights_find(o, unit);
    if (b) b->ahead = true; // it stays
    if (!u->filed[HOST_WEIGHT] || b) return true;
    for (int i = 0; i < o->n_weights; i++) n_ahead += o->weights[i].ahead;
    if (n_ahead >= max_i64(1, o->n_weights - 2) || o->weights[o->next_weights].ahead) return false;
    pthread_mutex_lock(&o->lock);
    bool updated = o->done >= u->end;
    pthread_mutex_unlock(&o->lock);
    if (updated) weights_read(o, unit);
    return updated;
}

// The buffer that has a unit's weights, as the file has them.
static WeightBuffer *weights_ready(Offload *o, int unit) {
    WeightBuffer *b = weights_find(o, unit);
    if (!b) b = weights_read(o, unit);
    transfer_wait(o, &b->transfer, FILE_WEIGHTS);
    b->ahead = false;
    return b;
}

// Copies a unit's weights to the device.
static void offload_fetch_weights(Offload *o, int unit, void *to, Stream s) {
    const HostUnit *u = &o->unit[unit];
    int64_t element = u->element[HOST_WEIGHT];
    if (!u->filed[HOST_WEIGHT]) { device_copy(to, u->array[HOST_WEIGHT], u->numel * element, COPY_TO_DEVICE, s); return; }
    WeightBuffer *b = weights_ready(o, unit);
    const char *at = b->data;
    for (int i = u->first; i < u->end; i++) {
        const OffloadPiece *p = &o->piece[i];
        device_copy((char *)to + p->from * element, at, p->numel * element, COPY_TO_DEVICE, s);
        at += p->range[FILE_WEIGHTS].bytes;
    }
    event_record(b->copied, s);
}

// The device has updated a unit's weights: they go back. A file gets them when the next unit's are on their way, or when somebody asks.
static void offload_store_weights(Offload *o, int unit, const void *from, Stream s) {
    const HostUnit *u = &o->unit[unit];
    int64_t element = u->element[HOST_WEIGHT];
    if (!u->filed[HOST_WEIGHT]) { device_copy(u->array[HOST_WEIGHT], from, u->numel * element, COPY_TO_HOST, s); return; }
    for (int i = 0; i < o->n_weights; i++) if (o->weights[i].changed) weights_settle(o, &o->weights[i]);
    WeightBuffer *b = weights_ready(o, unit);
    char *at = b->data;
    for (int i = u->first; i < u->end; i++) {
        const OffloadPiece *p = &o->piece[i];
        device_copy(at, (const char *)from + p->from * element, p->numel * element, COPY_TO_HOST, s);
        at += p->range[FILE_WEIGHTS].bytes;
    }
    event_record(b->copied, s);
    b->changed = true;
}
