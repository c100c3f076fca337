// tensor_parallel.cu - the pairs by which a unit's forward and backward talk to the ranks that compute it together.
//
// Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM"). tp ranks share every matrix of a block: a rank has some of the attention's
// heads, some of the MLP's inner channels, some of the vocabulary. The first matrix of a pair is split by its outputs and the
// second by its inputs, so that what lies between them never leaves the rank; the second one's outputs are summands of the result.
// What is left, norms and residual sums, concerns each token by itself: there a rank has some of the tokens (Korthikanti et al. 2022).
// Of the N = B*T rows of a micro-batch, each rank has N/tp, and two conjugate collectives change sides:
//
//      own rows, C channels                      all rows, C/tp or F/tp channels                        own rows
//     [ norm ] --tp_gather_rows--> [ qkv | attention | projection ] --tp_scatter_sum--> [ sum, norm ] --tp_gather_rows--> [ MLP ] ...
//
// Backward is the mirror: the gradient of a gather is a sum that is scattered, and the gradient of that sum is a gather. Norms, the
// biases that are added to the sum, and positions are held by all tp ranks, each of which sees its own rows only: their gradients
// are summands as well, and zero.cu adds them up. With one rank every pair is the identity.
//
// So that these messages hide behind the products beside them, the N rows are P pieces of N/P consecutive rows, and each rank has the same
// part of every piece: of piece j, rank r has rows [j N/P + r N/P/tp, j N/P + (r+1) N/P/tp). It keeps them one piece behind the other, and what
// concerns a token by itself does not care which ones they are. Gathered, a piece is consecutive rows in their natural order, so that it can
// be multiplied when it has come, while the next one travels; and a piece of a product can be summed while the next one is computed:
//
//     computation    [ norm ]          [ qkv 0 ][ qkv 1 ] ... [ projection 0 ][ projection 1 ]         [ norm ]
//     beside it               [ gather 0 ][ gather 1 ]                        [ sum 0 ]       [ sum 1 ]
//
// With one piece (run.tensor_parallel_pieces) rank r has rows [r N/tp, (r+1) N/tp), and the computation waits for every message.
//
// The vocabulary: a rank looks up the tokens whose rows it has, and finds zeros for the others; the sum is exact. Of the logits it
// computes its columns, and the ranks exchange three numbers a row (classifier_statistics): no rank ever holds all logits.
//
// Sequence parallelism (Jacobs et al. 2023, "DeepSpeed Ulysses"). sp ranks share every sample: rank r has its tokens
// [r T/sp, (r+1) T/sp), with the weights of all heads, and everything but attention goes on as if the others did not exist. Around attention
// two exchanges change what is split, tokens or heads, so that each rank sees whole samples, for 1/sp of the heads:
//
//     seq_to_heads:  (B, T/sp, all heads) -> (B, T, heads/sp)         heads_to_seq: back
//
// The ranks that share a sample hold the same weights: for ZeRO they are like any others.
//
// Invariants:
//  1. What a pair returns is where the result lies: an argument itself where nothing is to be done.
//  2. All collectives here are enqueued in the order of the program, which is the same on all ranks of a group: with one piece on the
//     compute stream, with several those of rows on a stream of their own, which the compute stream has waited for wherever a unit ends.
// Read next: model.cu.
#pragma once
#include "kernels/kernels.h"
#include "runtime/comm.h"

// Rows [first, first + rows) of (N,C) or (N).
static Tensor tensor_piece(Tensor t, int64_t first, int64_t rows) {
    const int64_t columns = t.ndim == 1 ? 1 : tensor_columns(t);
    char *data = (char *)t.data + first * columns * dtype_bytes(t.dtype);
    return t.ndim == 1 ? tensor1(data, t.dtype, rows) : tensor2(data, t.dtype, rows, columns);
}

// ---------------------------------------------------------------------------------------------------------------
// Rows

enum { TP_PIECES_MAX = 16 };

// How rows travel beside the computation.
typedef struct {
    int pieces;
    Stream stream;                 // theirs; null with one piece: the computation's
    Event computed;                // hands over what the computation has made
    Event gathered[TP_PIECES_MAX]; // a piece of all rows has come
    Event summed;                  // all pieces of the sum have
} TpOverlap;

static void tp_overlap_init(TpOverlap *o, int pieces) {
    CHECK(pieces >= 1 && pieces <= TP_PIECES_MAX, "%d pieces", pieces);
    memset(o, 0, sizeof *o);
    o->pieces = pieces;
    if (pieces == 1) return;
    o->stream = stream_create_urgent();
    o->computed = event_create();
    o->summed = event_create();
    for (int j = 0; j < pieces; j++) o->gathered[j] = event_create();
}

static void tp_overlap_free(TpOverlap *o) {
    if (!o->stream) return;
    stream_destroy(o->stream);
    event_destroy(o->computed);
    event_destroy(o->summed);
    for (int j = 0; j < o->pieces; j++) event_destroy(o->gathered[j]);
}

// Piece j of rows, of all or of this rank's own; of what is not given, nothing.
static Tensor tp_piece(const TpOverlap *o, Tensor t, int j) {
    const int64_t rows = t.ndim == 0 ? 0 : (t.ndim == 1 ? tensor_numel(t) : tensor_rows(t)) / o->pieces;
    return o->pieces == 1 || rows == 0 ? t : tensor_piece(t, j * rows, rows);
}

// This rank's part of all rows, if each has consecutive ones: with one piece, its own rows.
static Tensor tp_own_rows(Group tp, Tensor whole) {
    const int64_t rows = (whole.ndim == 1 ? tensor_numel(whole) : tensor_rows(whole)) / tp.size;
    return tp.size == 1 ? whole : tensor_piece(whole, tp.rank * rows, rows);
}

// Where piece j of this rank's own rows, so many, begins among all.
static int64_t tp_first_row(Group tp, int64_t rows, int j) { return (j * tp.size + tp.rank) * rows; }

// The stream for a message of what the computation has made so far.
static Stream tp_beside(const TpOverlap *o, Stream s) {
    if (!o->stream) return s;
    event_record(o->computed, s);
    stream_wait_event(o->stream, o->computed);
    return o->stream;
}

// All ranks' rows begin to come, in `room`. Before a piece of what this returns is read, tp_gathered waits for it.
static Tensor tp_gather_begin(Group tp, const TpOverlap *o, Tensor room, Tensor rows, Stream s) {
    if (tp.size == 1) return rows;
    CHECK(tensor_numel(room) == tp.size * tensor_numel(rows), "room for %" PRId64 " elements, of %d times %" PRId64, tensor_numel(room), tp.size, tensor_numel(rows));
    s = tp_beside(o, s);
    for (int j = 0; j < o->pieces; j++) {
        const Tensor own = tp_piece(o, rows, j);
        comm_all_gather(tp, tp_piece(o, room, j).data, own.data, tensor_numel(own), own.dtype, s);
        if (o->stream) event_record(o->gathered[j], s);
    }
    return room;
}

// The computation goes on when piece j of what is gathered has come, and all before it.
static void tp_gathered(const TpOverlap *o, int j, Stream s) {
    if (o->stream) stream_wait_event(s, o->gathered[j]);
}

// The sum over the ranks of piece j of `whole` begins, for this rank's rows of it, in piece j of `rows`; with one piece these may be its part of
// `whole`, with several they are apart. The other rows are lost. Before any piece is read, and before `whole` is written, tp_summed waits for all.
static void tp_scatter_begin(Group tp, const TpOverlap *o, Tensor rows, Tensor whole, int j, Stream s) {
    if (tp.size == 1) return;
    CHECK(tensor_numel(whole) == tp.size * tensor_numel(rows), "%d times %" PRId64 " elements from %" PRId64, tp.size, tensor_numel(rows), tensor_numel(whole));
    const Tensor own = tp_piece(o, rows, j);
    s = tp_beside(o, s);
    comm_reduce_scatter(tp, own.data, tp_piece(o, whole, j).data, tensor_numel(own), own.dtype, s);
    if (o->stream && j == o->pieces - 1) event_record(o->summed, s);
}

static void tp_summed(const TpOverlap *o, Stream s) {
    if (o->stream) stream_wait_event(s, o->summed);
}

// Both at once, where no product is at hand to hide them.
static Tensor tp_gather_rows(Group tp, const TpOverlap *o, Tensor room, Tensor rows, Stream s) {
    Tensor all = tp_gather_begin(tp, o, room, rows, s);
    tp_gathered(o, o->pieces - 1, s);
    return all;
}

static void tp_scatter_sum(Group tp, const TpOverlap *o, Tensor rows, Tensor whole, Stream s) {
    for (int j = 0; j < o->pieces; j++) tp_scatter_begin(tp, o, rows, whole, j, s);
    tp_summed(o, s);
}

// ---------------------------------------------------------------------------------------------------------------
// The vocabulary

// Tokens of a micro-batch, (B,T), each in [0,V), at positions first_position + t.
typedef struct {
    const int32_t *token;
    int64_t B, T, V, first_position;
} TokenBatch;

static Tensor token_rows(const TokenBatch *b, Tensor t) { return tensor3(t.data, t.dtype, b->B, b->T, tensor_columns(t)); }

// x = wte of the tokens + wpe of their positions, own rows. room: all rows; with one rank it is not needed.
static void tp_embedding_forward(Group tp, const TpOverlap *o, Tensor x, const TokenBatch *b, Tensor wte, Tensor wpe, Tensor room, Stream s) {
    if (tp.size == 1) {
        embedding_forward(token_rows(b, x), b->token, wte, wpe, b->V, 0, b->first_position, s);
        return;
    }
    embedding_forward(token_rows(b, room), b->token, wte, tensor_none(), b->V, tp.rank * tensor_rows(wte), 0, s);
    tp_scatter_sum(tp, o, x, room, s);
    for (int j = 0; j < o->pieces; j++) {
        const Tensor piece = tp_piece(o, x, j);
        position_forward(piece, wpe, tp_first_row(tp, tensor_rows(piece), j), b->T, b->first_position, s);
    }
}

static void tp_embedding_backward(Group tp, const TpOverlap *o, Tensor dwte, Tensor dwpe, const TokenBatch *b, Tensor dx, bool accumulate_wte, bool accumulate_wpe, Tensor room, Stream s) {
    if (tp.size == 1) {
        embedding_backward(dwte, dwpe, b->token, token_rows(b, dx), b->V, 0, b->first_position, accumulate_wte, accumulate_wpe, s);
        return;
    }
    Tensor whole = tp_gather_rows(tp, o, room, dx, s);
    embedding_backward(dwte, tensor_none(), b->token, token_rows(b, whole), b->V, tp.rank * tensor_rows(dwte), 0, accumulate_wte, false, s);
    for (int j = 0; j < o->pieces; j++) {
        const Tensor piece = tp_piece(o, dx, j);
        position_backward(dwpe, piece, tp_first_row(tp, tensor_rows(piece), j), b->T, b->first_position, accumulate_wpe || j > 0, s);
    }
}

// classifier_forward_backward of logits whose columns the ranks share. losses: the same on all of them. room: fp32, (tp, rows, 3) and more.
static void tp_classifier(Group tp, Tensor logits, Tensor losses, const int32_t *targets, int64_t V, float dloss, bool write_dlogits, Tensor room, Stream s) {
    if (tp.size == 1) {
        classifier_forward_backward(logits, losses, targets, V, dloss, write_dlogits, s);
        return;
    }
    const int64_t rows = tensor_rows(logits), first = tp.rank * tensor_columns(logits);
    Tensor all = tensor3(room.data, DTYPE_FP32, tp.size, rows, 3), own = tensor2((float *)room.data + tp.rank * rows * 3, DTYPE_FP32, rows, 3);
    CHECK(tensor_numel(all) <= tensor_numel(room), "statistics of %" PRId64 " rows in room for %" PRId64 " numbers", rows, tensor_numel(room));
    classifier_statistics(own, logits, targets, V, first, s);
    comm_all_gather(tp, all.data, own.data, tensor_numel(own), DTYPE_FP32, s);
    classifier_from_statistics(logits, losses, all, targets, V, first, dloss, write_dlogits, s);
}

// ---------------------------------------------------------------------------------------------------------------
// Heads and sequences. A row of `sections` parts (q, k and v: 3) has in each of them all heads, or this rank's: blocks of `inner`
// channels are what moves. Ranks are sent what lies together in memory, so blocks change places before and after:
//
//     (B, T/sp, sections, sp, inner) --swap--> (sp, B, T/sp, sections, inner) --all_to_all--> the same of all tokens, own heads --swap--> (B, sp, T/sp, sections, inner)

// seq (B*T/sp, columns) -> out (B, T, columns/sp). room: as large; may be seq, which is lost then.
static Tensor seq_to_heads(Group sp, Tensor out, Tensor seq, int64_t B, int sections, Tensor room, Stream s) {
    if (sp.size == 1) return seq;
    const int64_t rows = tensor_rows(seq), inner = tensor_columns(seq) / (sections * sp.size), each = rows * sections * inner, sample = each / B;
    const DType t = seq.dtype;
    CHECK(tensor_numel(out) == tensor_numel(seq) && tensor_columns(seq) % (sections * sp.size) == 0, "%" PRId64 " columns of %d sections for %d ranks", tensor_columns(seq), sections, sp.size);
    swap_blocks(tensor3(out.data, t, sp.size, rows * sections, inner), tensor3(seq.data, t, rows * sections, sp.size, inner), s);
    comm_all_to_all(sp, room.data, out.data, each, t, s);
    swap_blocks(tensor3(out.data, t, B, sp.size, sample), tensor3(room.data, t, sp.size, B, sample), s);
    return out;
}

// heads (B, T, columns/sp) -> out (B*T/sp, columns). room: as large; may be heads, which are lost then.
static Tensor heads_to_seq(Group sp, Tensor out, Tensor heads, int64_t B, int sections, Tensor room, Stream s) {
    if (sp.size == 1) return heads;
    const int64_t rows = tensor_rows(out), inner = tensor_columns(out) / (sections * sp.size), each = rows * sections * inner, sample = each / B;
    const DType t = heads.dtype;
    CHECK(tensor_numel(out) == tensor_numel(heads) && tensor_columns(out) % (sections * sp.size) == 0, "%" PRId64 " columns of %d sections for %d ranks", tensor_columns(out), sections, sp.size);
    swap_blocks(tensor3(out.data, t, sp.size, B, sample), tensor3(heads.data, t, B, sp.size, sample), s);
    comm_all_to_all(sp, room.data, out.data, each, t, s);
    swap_blocks(tensor3(out.data, t, rows * sections, sp.size, inner), tensor3(room.data, t, sp.size, rows * sections, inner), s);
    return out;
}
