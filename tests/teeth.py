#!/usr/bin/env python3
"""Proves that the tests can fail: plants one bug at a time in a copy of the tree, and demands that a section of
./test_gpt notices. Usage: tests/teeth.py [number ...]; without numbers, all bugs. Closes with "N passed, N failed".
tests/teeth.py places only looks whether each bug could be planted.

A bug is (file, text, replacement, section, what it is); a section with "@N" runs on N ranks. The text must occur exactly once in its file, so that a bug
whose place has moved is reported instead of silently not planted.
"""
import concurrent.futures
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time

BUGS = [
    ("runtime/product_cache.h", " && memcmp(again, text, length) == 0;", ";", "products",
     "a damaged line of the products' cache counts"),
    ("runtime/product_cache.h", "l->machine.library == machine->library && ", "", "products",
     "an algorithm of another version of the library is taken"),
    ("runtime/product_cache.h", "    product_cache_read(c);\n    product_put(c, &l);", "    product_put(c, &l);", "products",
     "a rank's algorithms are written over those that another has found"),
    ("runtime/product_cache.h", "rename(temporary, c->path) == 0", "rename(c->path, temporary) == 0", "products",
     "the cache's new file never gets its name"),
    ("zero.cu", "g.accumulate[role] = z->grad_written[storage];", "g.accumulate[role] = false;", "golden",
     "micro-batches overwrite each other's gradients"),
    ("zero.cu", "z->grad_written[table->row[i].storage] = true; // its owner", "z->grad_written[i] = true; // its owner", "golden",
     "the embedding overwrites the gradient of the tied head"),
    ("zero_tensors.cu", "if (!s->param_on_host) device_copy((char *)zero_updated_param(z, s) + from * element, weight, n * element, COPY_TO_DEVICE, z->stream);", "", "golden",
     "masters are written without their 16-bit copy"),
    ("runtime/tensor.h", "(u + 0x8000u) >> 16);", "(u + 0x7fffu + (u >> 16 & 1)) >> 16);", "kernels",
     "masters are rounded to even, and ties lose their remainder"),
    ("kernels/cpu/optimizer.cpp", "remainder[i] = master_remainder(after);", "remainder[i] = 0;", "kernels",
     "an update forgets what the weight lacks of its master"),
    ("runtime/utils.h", "((quarter + 1) & 2) << 62", "(quarter & 2) << 62", "tables/standard normal",
     "a quarter of the circle has the wrong sign"),
    ("zero_tensors.cu", "zero_read_array(z, s, s->master, s->update_on_host, DTYPE_BF16,", "zero_read_array(z, s, zero_updated_param(z, s), s->param_on_host, DTYPE_BF16,", "trainer",
     "masters are read without their remainders"),
    ("kernels/cpu/optimizer.cpp", "(float)(c.clip_factor / loss_scale)", "(float)c.clip_factor", "kernels",
     "the loss scale is not divided out"),
    ("optimizer.cu", "{schedule_lr(cfg, o->applied_updates), {0, 0}", "{schedule_lr(cfg, (int64_t)state->step), {0, 0}", "trainer",
     "skipped updates move the schedule"),
    ("optimizer.cu", "r.decays = zero_decay_border(z, unit);", "r.decays = u->update_numel;", "trainer",
     "biases and norms decay"),
    ("kernels/cpu/optimizer.cpp", "isfinite(c.grad_norm) && isfinite(*sum_loss)", "isfinite(*sum_loss)", "trainer",
     "an infinite gradient is applied"),
    ("kernels/cpu/optimizer.cpp", "if (!control->apply) continue;", "", "trainer",
     "a skipped update changes weights and states"),
    ("optimizer.cu", "event_sync(o->decided); // and", "// and", "trainer",
     "the host does not wait for the decision"),
    ("optimizer.cu", "if (s->hysteresis_left > 1) s->hysteresis_left--;", "if (s->hysteresis_left > 0) s->hysteresis_left--;", "schedules",
     "one overflow too many is forgiven"),
    ("optimizer.cu", "if (i < N) return c->warmup_min_lr + span", "if (i <= N) return c->warmup_min_lr + span", "schedules",
     "the ramp is one update too long"),
    ("model.cu", "residual_std = 0.02 / sqrt(2.0 * (double)L);", "residual_std = 0.02;", "tables",
     "residual projections start too large"),
    ("model.cu", "a->targets + first, m->V, a->dloss", "a->targets + first, m->Vp, a->dloss", "trainer",
     "the padded vocabulary takes part in the softmax"),
    ("model.cu", "a->targets + first, m->V", "a->targets, m->V", "trainer",
     "every piece of the head has the targets of the first"),
    ("model.cu", "g->accumulate[HEAD_W] || first > 0", "g->accumulate[HEAD_W]", "trainer",
     "the pieces of the head overwrite each other's gradients"),
    ("model.cu", "act[ACT_LN_2_MEAN], act[ACT_LN_2_RSTD], dout, g->accumulate", "act[ACT_LN_2_MEAN], act[ACT_LN_2_RSTD], none, g->accumulate", "golden",
     "the residual path loses its gradient"),
    ("model.cu", "if (pass == 1) unit->decay_numel = at;", "if (pass == 2) unit->decay_numel = at;", "tables",
     "the border of weight decay is wrong"),
    ("pipeline.cu", "ahead = p->n_stages - 1 - p->stage, late", "ahead = p->n_stages - p->stage, late", "pipeline",
     "1F1B keeps one micro-batch more than it needs"),
    ("acts.cu", "a->pending[(s->mb % l->n_pending * m->table.n_units", "a->pending[(0 * m->table.n_units", "stages@2",
     "micro-batches between the two phases of backward overwrite each other's gradients"),
    ("zero.cu", "if (!(param_phase(table->unit[unit].kind, table->row[i].role) & phases)) continue;", "", "stages@2",
     "gradients of weights are added to although nobody has written them yet"),
    ("trainer.cu", "cfg->model.tie_word_embeddings ? stage[last] : 0", "0", "stages@2",
     "a tied table on two stages has no group to sum its gradients"),
    ("pipeline.cu", "if (a.in.op != send) return false;", "if (a.in.op != send) from->moved[out]++;", "pipeline",
     "sends overtake each other on one channel, and nothing ever stands still"),
    ("pipeline.cu", "if (s->issued[in.chunk * s->p->n_micro_batches + before] != run_done(s, in.chunk, before)) return false;", "", "pipeline",
     "a slot is used again while it is being sent"),
    ("train_gpt.cu", "t->samples += t->cfg->batch.train_batch_size;", "t->samples += 1;", "golden",
     "updates read overlapping samples"),
    ("trainer.cu", "c.n_kinds = 1 + t->zero.n_states;", "c.n_kinds = 1;", "resume",
     "checkpoints lack the moments"),
    ("evaluate.cu", "t->opt.applied_updates = s.applied_updates;", "t->opt.applied_updates = 0;", "resume",
     "a resumed run begins its schedule afresh"),
    ("evaluate.cu", "t->samples = s.tokens / cfg->run.seq_len;", "t->samples = 0;", "resume",
     "a resumed run reads its data from the start"),
    ("checkpoint_format.cu", "s->run->data_offset + from * 4", "s->run->data_offset", "shards",
     "every range of a run is read from the run's start"),
    ("checkpoint_format.cu", "both.columns == stored->columns && both.columns == wanted->columns", "both.columns == stored->columns", "layouts",
     "columns go where whole rows would"),
    ("checkpoint_format.cu", "if (step[last].row != b->row)", "if (step[last].row > b->row)", "layouts",
     "elements that no shard holds are not missed"),
    ("checkpoint_save.cu", "if (!s->job.copied) { t->get", "if (true) { t->get", "shards",
     "the background writes what the run has become, not the copy"),
    ("optimizer.cu", "    zero_update_waits(z);\n", "", "resume",
     "an update does not wait for the copy of what it changes"),
    ("checkpoint_save.cu", "    while (w->writing) pthread_cond_wait(&w->changed, &w->lock);\n        good = w->good;", "    good = w->good;", "layouts",
     "a buffer is filled while it is written"),
    ("checkpoint_save.cu", "k->before + first - from, n, values);", "first - from, n, values);", "checkpoint/copies",
     "every row of a unit is written with the values of its first"),
    ("checkpoint_save.cu", "else if (place + first != end) break;", "else break;", "checkpoint/copies",
     "each row is a copy of its own"),
    ("checkpoint_save.cu", "if (r->tied_to >= 0) continue;\n            const uint32_t number", "if (r->tied_to >= 0 || r->numel == 0) continue;\n            const uint32_t number", "layouts",
     "each stage numbers its own tensors"),
    ("checkpoint.cu", "for (int r = 0; r < p->world; r++) if (!all[r].good) return r;", "", "shards",
     "what goes wrong on one rank is not heard by the others"),
    ("zero_tensors.cu", "start = shard * z->gather_group.rank;", "start = 0;", "parallel@2",
     "every rank saves the first part of each unit"),
    ("checkpoint_save.cu", "max_i64(floor, ceiling)", "ceiling", "checkpoint",
     "retention removes protected checkpoints"),
    ("kernels/cpu/attention.cpp", "j < visible", "j <= visible", "kernels",
     "attention sees one token of the future"),
    ("Makefile", "UNFUSED := -ffp-contract=off", "UNFUSED := -ffp-contract=fast", "kernels",
     "products and sums of the update are fused where the processor can"),
    ("kernels/cpu/optimizer.cpp", "control->grad_scale, rest);", "control->grad_scale, rule);", "kernels/cpu_lion",
     "what does not decay decays"),
    ("kernels/cpu/optimizer.cpp", "m = a.first_update ? g : more;", "m = more;", "kernels",
     "the first update reads an empty momentum buffer"),
    ("offload.cu", "    offload_close_unit(o);\n    for", "    for", "nvme",
     "what was written into the open unit is lost when the next update begins"),
    ("offload.cu", "r = {bytes[f], filed_total", "r = {0, filed_total", "nvme",
     "all pieces of an update have one place in the file"),
    ("offload.cu", "if (b->unit >= 0 && o->unit[b->unit].updates) b->unit = -1;", "", "nvme",
     "weights that were read ahead outlive their update"),
    ("runtime/aio.cpp", "r->data += moved;", "r->data += r->bytes;", "aio",
     "a short transfer goes on at the wrong place in memory"),
    ("runtime/aio.cpp", "while (t->finished < t->bytes) pthread_cond_wait", "if (t->finished < t->bytes) pthread_cond_wait", "aio",
     "whoever waits for one transfer takes the end of another for it"),
    ("kernels/cpu/layernorm.cpp", "ds[c] += (double)d;", "ds[c] += (double)r;", "kernels/cpu_layernorm_backward",
     "the sum of what a norm's backward writes leaves out the norm's own share"),
    ("model.cu", "g->t[BLOCK_FCPROJ_B], g->t[BLOCK_PROJ_B], block_summed", "g->t[BLOCK_PROJ_B], g->t[BLOCK_FCPROJ_B], block_summed", "golden",
     "two biases exchange their gradients"),
    ("kernels/cpu/reduce.cpp", "accumulate || k > 0, block_sum_squares", "accumulate, block_sum_squares", "kernels/cpu_sum_squares",
     "the norm is that of the last unit"),
    ("kernels/cpu/attention.cpp", "t + r - s + 1 - h->window", "t + r - s - h->window", "kernels/cpu_attention_backward",
     "attention's backward sees one token beyond the window"),
    ("model.cu", "block_heads(m), m->c.attention_window_size, s)", "block_heads(m), 0, s)", "parallel",
     "the model's forward has no window"),
    ("kernels/cpu/embedding.cpp", "n == 0 && accumulate)", "n == 0)", "kernels",
     "tokens that do not occur keep their old gradient"),
    ("kernels/cpu/optimizer.cpp", "sqrtf(v / a.bias_correction2) + a.eps", "sqrtf(v / a.bias_correction2 + a.eps)", "kernels",
     "epsilon is added inside the root"),
    ("zero.cu", "stream_wait_event(z->reduce_stream, z->computed); // the gradients are written", "", "parallel@2",
     "a reduction starts before the gradients are written"),
    ("zero.cu", "if (s->status == UNIT_GATHERING) stream_wait_event(z->stream, s->gathered);", "", "parallel@2",
     "a unit computes before its weights have arrived"),
    ("zero.cu", "if (!each && z->reduce_group.size == 1) { zero_grad_is_final(z, unit, z->stream); return; } // the shard is the whole", "return;", "parallel@2",
     "gradients are not reduced"),
    ("zero.cu", "{ return zero_shards_grads(z) && s->shard_written; }", "{ return false; }", "parallel@2",
     "a micro-batch overwrites the sum of the earlier ones"),
    ("optimizer.cu", "shards[n] = zero_counted(z, u);", "shards[n] = zero_grad_part(z, u, 0, z->unit[u].update_numel);", "parallel@2",
     "elements that every rank holds count twice in the norm"),
    ("zero_setup.cu", "kept + numel <= l->opt.model_persistence_threshold / l->ranks", "kept + numel <= l->opt.model_persistence_threshold", "zero@2",
     "the cap on elements that stay whole counts one rank only"),
    ("zero.cu", "zero_shards_params(z) ? z->opt.prefetch_bucket_size : z->opt.allgather_bucket_size", "z->opt.prefetch_bucket_size", "zero@2",
     "stages 1 and 2 look ahead by stage 3's key"),
    ("zero.cu", "comm_all_reduce(z->reduce_group, s->wire, s->whole,", "comm_all_reduce(z->reduce_group, s->wire, s->shard_numel,", "zero@2",
     "an all-reduce sums the first shard only"),
    ("zero.cu", "at += s->whole * dtype_bytes(wire);", "", "zero@2",
     "the 16-bit gradients of a bucket lie upon each other"),
    ("zero.cu", "if (wire != DTYPE_FP32) convert(tensor1(s->grad, DTYPE_FP32, s->whole)", "if (false) convert(tensor1(s->grad, DTYPE_FP32, s->whole)", "zero@2",
     "stage 0 updates from what it has sent instead of the sum"),
    ("zero_setup.cu", "opt.prescale_gradients ? 1 : gather_group.size / opt.gradient_predivide_factor", "1", "zero@2",
     "gradients are always divided before their sum"),
    ("huggingface_import.cu", "        put(ctx, i, values);", "        put(ctx, i, values);\n        values = (float *)host_alloc((size_t)most * sizeof(float));", "parallel/import streams@2",
     "an import keeps every tensor that it has read"),
    ("zero_tensors.cu", "            zero_tensor_write(z, a.row, (StateKind)a.kind, values);\n        }\n        free(values);", "            zero_tensor_write(z, a.row, (StateKind)a.kind, values);\n        }", "parallel/import streams@2",
     "a rank keeps every tensor that rank 0 has imported"),
    ("zero.cu", "event_record(s->reduced, z->reduce_stream);", "", "parallel@2",
     "the embedding's gradient is written again before its sum has left"),
    ("optimizer.cu", "o->scaler.scale * z->divisor", "o->scaler.scale", "zero@2",
     "what was not divided before the sum is not divided after it"),
    ("evaluate.cu", "if (!cfg->zero.load_from_fp32_weights)", "if (false)", "zero",
     "masters are never taken from the weights"),
    ("dsconfig_rules.h", "if (z->stage >= 2 && z->reduce_scatter && z->prescale_gradients)", "if (false)", "config",
     "prescale_gradients is taken where DeepSpeed refuses it"),
    ("runtime/comm_mpi.cpp", "(uint32_t)tag << 16 | (uint32_t)rank[0]", "(uint32_t)tag << 16", "comm@4",
     "groups of disjoint ranks have one number in the watch's records"),
    ("train_gpt.cu", "first = t->samples + (mb * D + t->grid.coord.dp) * B;", "first = t->samples + mb * D * B;", "parallel@2",
     "all ranks read the same samples"),
    ("runtime/agree.h", "ranks * q == s * s;", "ranks * q >= s * s;", "parallel",
     "ranks that hold different things pass for equal"),
    ("kernels/cpu/reduce.cpp", "(uint32_t)(2 * (first + i) + 1)", "(uint32_t)(2 * i + 1)", "kernels",
     "the hash of a part does not know its place"),
    ("replicas.cu", "majority = 2 * best_same > world;", "majority = 2 * best_same >= world;", "parallel",
     "half of the ranks pass for a majority"),
    ("zero_setup.cu", "(layout_staging_in_parts(&l) ? 0 : l.staging_numel * 4);", "0;", "parallel@2",
     "the plan forgets the way out"),
    ("acts.cu", "slot = acts_tokens_bytes(l) + acts_targets_bytes(l) + acts_dx_bytes(l),", "slot = acts_tokens_bytes(l) + acts_targets_bytes(l),", "parallel",
     "the plan forgets the gradient of the residual stream"),
    ("zero.cu", "    zero_await_update(z, unit);\n    s->updating", "    s->updating", "offload",
     "a unit computes before the CPU has updated it"),
    ("zero.cu", "stream_wait_event(z->gather_stream, z->offload.unit[unit].returned);", "stream_wait_event(z->gather_stream, z->offload.unit[unit].returned);\n    z->unit[unit].updating = false;", "nvme@3",
     "what a rank has saved decides which weights it gathers ahead"),
    ("offload.cu", "if (o->n_pieces > 0) stream_sync(o->out);", "", "offload",
     "the CPU updates by gradients that have not arrived"),
    ("zero.cu", "if (z->unit[u].updating) return;", "", "offload@2",
     "weights are gathered before the CPU has updated them"),
    ("zero.cu", "if (z->unit[u].dedicated) z->unit[u].version = z->version", "z->unit[u].version = z->version", "offload",
     "blocks in the buffers pass for current after an update"),
    ("zero_tensors.cu", "zero_await_update(z, r->unit);\n    offload_open_unit(&z->offload, r->unit, false);\n    if (kind == STATE_MASTER && master_dtype", "offload_open_unit(&z->offload, r->unit, false);\n    if (kind == STATE_MASTER && master_dtype", "offload",
     "a checkpoint reads what the CPU is updating"),
    ("zero_setup.cu", "bytes[MEMORY_OPTIMIZER_STATES] += l.n_states * u->state_bytes;", "bytes[MEMORY_OPTIMIZER_STATES] += u->state_bytes;", "tables",
     "the plan counts one state of AdamW"),
    ("zero.cu", "sum_parts(sum, parts, into_shard && zero_sum_adds(z, s), z->reduce_stream);", "sum_parts(sum, parts, false, z->reduce_stream);", "parallel@2",
     "an exchange forgets the sums of earlier micro-batches"),
    ("checkpoint_save.cu", "io->error = EDOM; // no system call's", "// no system call's", "checkpoint",
     "a NaN among the weights passes for a failure of the disk"),
    ("zero.cu", "stored->offset * dtype_bytes(owner->grad_dtype);", "stored->offset * 4;", "zero@2",
     "gradients that are written in 16 bits lie twice as far apart"),
    ("zero_setup.cu", "l->grad_buffer_bytes = block * dtype_bytes(block_grad);", "l->grad_buffer_bytes = block * 4;", "zero@2",
     "gradients that are written in 16 bits have room as if in 32"),
    ("zero.cu", "comm_all_to_all(z->reduce_group, z->parts, s->wire, s->shard_numel,", "if (false) comm_all_to_all(z->reduce_group, z->parts, s->wire, s->shard_numel,", "parallel@2",
     "an exchange never starts"),
    ("runtime/graphs.h", "if (e->frees != device_frees()) {", "if (e->frees < 0) {", "graphs",
     "graphs outlive the memory whose addresses they hold"),
    ("runtime/graphs.h", "if (c->entry[i].used < e->used) e = &c->entry[i];", "if (c->entry[i].used > e->used) e = &c->entry[i];", "graphs",
     "the newest graph makes room"),
    ("model.cu", "if (g) j.g = *g;", "if (g) memcpy(j.g.t, g->t, sizeof g->t);", "graphs",
     "a graph does not know whether it adds to a gradient"),
    ("acts.cu", "stream_wait_event(a->copies, a->computed);", "", "recompute",
     "a checkpoint leaves for the host before it is computed"),
    ("acts.cu", "stream_wait_event(a->model->stream, b->copied);", "", "recompute",
     "a checkpoint is overwritten while it leaves for the host"),
    ("acts.cu", "stream_wait_event(a->model->stream, checkpoint_buffer(a, segment)->copied);", "", "recompute",
     "a segment computes before its checkpoint is back"),
    ("acts.cu", "return (s - a->slot) * a->layout.n_segments + segment;", "return segment;", "recompute",
     "a micro-batch takes the checkpoint of another for its own"),
    ("acts.cu", "for (int u = first; u < last; u++) visit[n++] = {u, ACTS_AGAIN};", "", "recompute",
     "blocks inside a segment do not go forward again"),
    ("model.cu", "again || act_descs[role].recomputed_from <= a->recompute;", "again || act_descs[role].recomputed_from < a->recompute;", "recompute",
     "the last step of the ladder is not computed again"),
    ("acts.cu", "shared = acts_n_buffers(l) * acts_stream_bytes(l), slot", "shared = 0, slot", "recompute",
     "the plan forgets the buffers of checkpoints on the host"),
    ("kernels/cpu/classifier.cpp", "at_target += (double)s[3 * N * p + 2];", "at_target = (double)s[3 * N * p + 2];", "kernels/cpu_classifier_parts",
     "the target's logit is sought in the last part of the vocabulary only"),
    ("kernels/cpu/classifier.cpp", "exp((double)s[3 * N * p] - (double)largest)", "1", "kernels/cpu_classifier_parts",
     "sums of parts are added as if all parts had one largest logit"),
    ("kernels/cpu/embedding.cpp", "if (row >= 0 && row < rows) start[row + 1]++;", "if (row >= 0 && row < rows && first_token == 0) start[row + 1]++;", "kernels/cpu_embedding_backward",
     "only the first part of the vocabulary counts its tokens"),
    ("kernels/cpu/embedding.cpp", "(t - first_row % T + T) % T : N", "t : N", "kernels/cpu_position_backward",
     "positions of a part of the rows are counted from its first"),
    ("plan_time.cu", "bool twice = z->opt.stage == 0 || !z->opt.reduce_scatter;", "bool twice = !z->opt.reduce_scatter;", "plan/bytes of a run@2",
     "stage 0 is planned without the way of its sums to everybody"),
    ("plan_time.cu", "1 - (passes - 1) / passes * s->zero.n_param_pool / turns;", "1 - s->zero.n_param_pool / turns;", "plan/bytes of a run@2",
     "the first pass of an update finds its blocks there"),
    ("offload.cu", "return array == HOST_WEIGHT || array == HOST_GRAD;", "return array == HOST_WEIGHT;", "offload/bytes",
     "gradients come to memory that is not pinned"),
    ("plan_report.cu", "if (found.bytes > table->room || ", "if (", "plan/proposals",
     "what does not fit is proposed"),
    ("plan_time.cu", "(n - plan_micro_batches(cfg)) * slowest,", "0,", "plan/bubbles",
     "micro-batches that are not simulated take no time"),
    ("tensor_parallel.cu", "    comm_reduce_scatter(tp, own.data, tp_piece(o, whole, j).data, tensor_numel(own), own.dtype, s);\n", "", "tensor/against one rank, accumulation, not tied@2",
     "each rank takes its own summand for the sum"),
    ("zero.cu", "if (z->tp_group.size > 1 && tensor_numel(same) > 0) comm_all_reduce(z->tp_group,", "if (false) comm_all_reduce(z->tp_group,", "tensor/against one rank, accumulation, not tied@2",
     "gradients of what all tensor-parallel ranks hold are not added up"),
    ("zero.cu", "if (z->model->table.tp_rank > 0) to = min_i64(to, d->split_numel);", "", "tensor/against one rank, accumulation, not tied@2",
     "what all tensor-parallel ranks hold counts once for each in the norm"),
    ("tensor_parallel.cu", "swap_blocks(tensor3(out.data, t, B, sp.size, sample), tensor3(room.data, t, sp.size, B, sample), s);", "swap_blocks(tensor3(out.data, t, sp.size, B, sample), tensor3(room.data, t, B, sp.size, sample), s);", "tensor/against one rank, accumulation, not tied@2",
     "the samples of several ranks are put together in the wrong order"),
    ("model.cu", "m->V, m->sp.rank * a->T};", "m->V, 0};", "tensor/against one rank, accumulation, not tied@2",
     "every part of a sample begins at position 0"),
    ("model.cu", "return tp_own_rows(m->tp, a->act[ACT_LOSSES]);", "return a->act[ACT_LOSSES];", "tensor/against one rank, accumulation, not tied@2",
     "every tensor-parallel rank counts all losses"),
    ("acts.cu", "return role == ACT_DQKV ? 0 : first;", "return 0;", "stages@2",
     "two gradients that wait for the second phase of backward lie in one place"),
    ("pipeline.cu", "fmax(from->idle_from[out], to->idle_from[in])", "0", "pipeline/messages",
     "messages on one channel overtake each other"),
    ("plan_time.cu", "* n / plan_micro_batches(p->cfg);", "* (n > 0);", "plan/messages between stages",
     "micro-batches that are not simulated wait for no message"),
    ("tensor_parallel.cu", "    if (o->stream) stream_wait_event(s, o->gathered[j]);", "    (void)o, (void)j, (void)s;", "tensor/pieces change no bit of a product@2",
     "a product reads a piece that has not come"),
    ("tensor_parallel.cu", "    if (o->stream) stream_wait_event(s, o->summed);", "    (void)o, (void)s;", "tensor/pieces change no bit of a product@2",
     "a norm reads a sum that is still under way"),
    ("tensor_parallel.cu", "    stream_wait_event(o->stream, o->computed);", "", "tensor/pieces change no bit of a product@2",
     "a piece is sent before it is computed"),
    ("tensor_parallel.cu", "return (j * tp.size + tp.rank) * rows;", "return (j + tp.rank) * rows;", "tensor/pieces change no bit of a product@2",
     "pieces of a rank's rows are looked for one behind the other"),
]


def run(command, folder):
    with open(os.path.join(folder, "log"), "ab") as out:
        return subprocess.run(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode


def places(root):
    """The number of bugs whose place has moved; says which."""
    moved = 0
    for number, (name, text, _, _, what) in enumerate(BUGS, 1):
        found = open(os.path.join(root, name)).read().count(text)
        if found != 1:
            moved += 1
            print(f"FAIL teeth: the place of bug {number} ({what}) in {name} occurs {found} times: bring tests/teeth.py up to date")
    print(f"teeth: {len(BUGS)} places looked for, {moved} problems")
    return moved


# Host code is compiled without optimisation, which makes up for the time that it then takes; the kernels are not.
BINARY = "build/teeth/test_gpt"
BUILD = ["make", "-s", "BACKEND=cpu", "DEBUG=1", "HOST_OPT=-O0", "BUILD=build/teeth", BINARY]


def plant(number, copy):
    """Plants one bug in a copy of the tree that is built, and takes it out again. Says whether the tests have noticed."""
    name, text, replacement, section, _ = BUGS[number - 1]
    path = os.path.join(copy, name)
    source = open(path).read()
    if source.count(text) != 1:
        return f"FAIL its place in {name} occurs {source.count(text)} times: bring tests/teeth.py up to date"
    open(path, "w").write(source.replace(text, replacement))
    if run(BUILD, copy) != 0:
        verdict = "FAIL it does not compile: bring tests/teeth.py up to date"
    else:
        # A crash is noticed, too; only a section that passes has no teeth.
        name_of, _, ranks = section.partition("@")
        command = (["timeout", "120", "mpirun", "-n", ranks] if ranks else []) + [BINARY, name_of]
        verdict = ("ok   noticed by" if run(command, copy) != 0 else "FAIL not noticed by") + f" section {section}"
    open(path, "w").write(source)
    return verdict


def main():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.argv[1:] == ["places"]:
        sys.exit(places(root) > 0)
    picked = [int(a) for a in sys.argv[1:]] or range(1, len(BUGS) + 1)
    files = subprocess.run(["git", "-C", root, "ls-files", "-z"], capture_output=True, check=True).stdout.decode().split("\0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_rmaps_base_oversubscribe="1")
    with tempfile.TemporaryDirectory() as folder:
        first = os.path.join(folder, "0")
        for name in filter(None, files):
            if os.path.isfile(os.path.join(root, name)):
                os.makedirs(os.path.join(first, os.path.dirname(name)), exist_ok=True)
                shutil.copy2(os.path.join(root, name), os.path.join(first, name))
        if run(BUILD + ["-j2"], first) != 0:
            sys.stdout.write(open(os.path.join(first, "log"), errors="replace").read())
            sys.exit("FAIL: the tree itself does not build")
        # Two bugs at a time, each in a copy of its own: the compiler has one thread.
        copies = queue.SimpleQueue()
        copies.put(first)
        copies.put(shutil.copytree(first, os.path.join(folder, "1")))

        def tried(number):
            start, copy = time.monotonic(), copies.get()
            try:
                verdict = plant(number, copy)
            finally:
                copies.put(copy) # the other one waits for it, whatever happened
            print(f"{verdict}: {number}. {BUGS[number - 1][4]} ({time.monotonic() - start:.1f} s)", flush=True)
            return verdict.startswith("ok")

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            good = list(pool.map(tried, picked))
    print(f"{sum(good)} passed, {len(good) - sum(good)} failed, 0 skipped")
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
