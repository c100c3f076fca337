// tensor_parallel.cu - the pairs by which a unit's forward and backward talk to the ranks that compute it together.
//
// Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM"). tp ranks share every matrix of a block: a rank has some of the attention's
// heads, some of the MLP's inner channels, some of the vocabulary. The first matrix of a pair is split by its outputs and the
// second by its inputs, so that what lies between them never leaves the rank; the second one's outputs are summands of the result.
// What is left, norms and residual sums, concerns each token by itself: there a rank has some of the tokens (Korthikanti et al. 2022).
// Of the N = B*T rows of a micro-batch, rank r has rows [r N/tp, (r+1) N/tp), and two conjugate collectives change sides:
//
//      own rows, C channels                      all rows, C/tp or F/tp channels                        own rows
//     [ norm ] --tp_gather_rows--> [ qkv | attention | projection ] --tp_scatter_sum--> [ sum, norm ] --tp_gather_rows--> [ MLP ] ...
//
// Backward is the mirror: the gradient of a gather is a sum that is scattered, and the gradient of that sum is a gather. Norms, the
// biases that are added to the sum, and positions are held by all tp ranks, each of which sees its own rows only: their gradients
// are summands as well, and zero.cu adds them up. With one rank every pair is the identity.
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
//  2. All collectives here run on the compute stream, in the order of the program, which is the same on all ranks of a group.
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

// This rank's rows of all.
static Tensor tp_own_rows(Group tp, Tensor whole) {
    const int64_t rows = (whole.ndim == 1 ? tensor_numel(whole) : tensor_rows(whole)) / tp.size;
    return tp.size == 1 ? whole : tensor_piece(whole, tp.rank * rows, rows);
}

// All ranks' rows, in `room`.
static Tensor tp_gather_rows(Group tp, Tensor room, Tensor rows, Stream s) {
    if (tp.size == 1) return rows;
    CHECK(tensor_numel(room) == tp.size * tensor_numel(rows), "room for %" PRId64 " elements, of %d times %" PRId64, tensor_numel(room), tp.size, tensor_numel(rows));
    comm_all_gather(tp, room.data, rows.data, tensor_numel(rows), rows.dtype, s);
    return room;
}

// This rank's rows of the sum over the ranks of `whole`, in `rows`, which may be its part of `whole`. The other rows are lost.
static Tensor tp_scatter_sum(Group tp, Tensor rows, Tensor whole, Stream s) {
    if (tp.size == 1) return whole;
    CHECK(tensor_numel(whole) == tp.size * tensor_numel(rows), "%d times %" PRId64 " elements from %" PRId64, tp.size, tensor_numel(rows), tensor_numel(whole));
    comm_reduce_scatter(tp, rows.data, whole.data, tensor_numel(rows), rows.dtype, s);
    return rows;
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
static void tp_embedding_forward(Group tp, Tensor x, const TokenBatch *b, Tensor wte, Tensor wpe, Tensor room, Stream s) {
    if (tp.size == 1) {
        embedding_forward(token_rows(b, x), b->token, wte, wpe, b->V, 0, b->first_position, s);
        return;
    }
    embedding_forward(token_rows(b, room), b->token, wte, tensor_none(), b->V, tp.rank * tensor_rows(wte), 0, s);
    tp_scatter_sum(tp, x, room, s);
    position_forward(x, wpe, tp.rank * tensor_rows(x), b->T, b->first_position, s);
}

static void tp_embedding_backward(Group tp, Tensor dwte, Tensor dwpe, const TokenBatch *b, Tensor dx, bool accumulate_wte, bool accumulate_wpe, Tensor room, Stream s) {
    if (tp.size == 1) {
        embedding_backward(dwte, dwpe, b->token, token_rows(b, dx), b->V, 0, b->first_position, accumulate_wte, accumulate_wpe, s);
        return;
    }
    Tensor whole = tp_gather_rows(tp, room, dx, s);
    embedding_backward(dwte, tensor_none(), b->token, token_rows(b, whole), b->V, tp.rank * tensor_rows(dwte), 0, accumulate_wte, false, s);
    position_backward(dwpe, dx, tp.rank * tensor_rows(dx), b->T, b->first_position, accumulate_wpe, s);
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
