// pipeline.cu - what happens in one update, as a program: a list of instructions that train_step executes in order.
//
// A generator gives the order of forward and backward passes; one pass then adds the loads (and, with several stages,
// the sends and receives). With one stage and accumulation n the program is
//
//     LOAD 0  FWD 0  BWD 0  LOAD 1  FWD 1  BWD 1  ...  LOAD n-1  FWD n-1  BWD n-1
//
// so that one slot of activations is enough. A pipeline of one stage is the shortest program, not another code path.
// pipeline_validate proves what the executor relies on. Read next: optimizer.cu.
#pragma once
#include "runtime/utils.h"

typedef enum { OP_LOAD, OP_FWD, OP_BWD } Op;

typedef struct {
    Op op;
    int mb;    // micro-batch of this update, from 0
    int chunk; // part of the model: which units; there is one chunk a stage
} Instr;

typedef struct {
    Instr *prog;
    int n;
    int n_micro_batches;
    int n_slots; // micro-batches in flight at once
} Pipeline;

// Every micro-batch is loaded, then goes forward, then backward, each exactly once; no more than n_slots are in flight.
// Returns null, or what is wrong.
static const char *pipeline_validate(const Pipeline *p) {
    const char *wrong = NULL;
    int *state = (int *)host_alloc(sizeof(int) * (size_t)p->n_micro_batches); // 0 new, 1 loaded, 2 forward done, 3 done
    int in_flight = 0, done = 0;
    for (int i = 0; i < p->n && !wrong; i++) {
        Instr in = p->prog[i];
        if (in.mb < 0 || in.mb >= p->n_micro_batches) wrong = "micro-batch out of range";
        else if (in.chunk != 0) wrong = "chunk out of range";
        else if (state[in.mb] != (in.op == OP_LOAD ? 0 : in.op == OP_FWD ? 1 : 2)) wrong = "a micro-batch is loaded, run forward and run backward in another order";
        else {
            state[in.mb]++;
            if (in.op == OP_LOAD && ++in_flight > p->n_slots) wrong = "more micro-batches in flight than slots";
            if (in.op == OP_BWD) in_flight--, done++;
        }
    }
    if (!wrong && done != p->n_micro_batches) wrong = "a micro-batch has no backward pass";
    free(state);
    return wrong;
}

// Micro-batches in flight at once: with one stage each goes backward before the next is loaded.
static int pipeline_n_slots(void) { return 1; }

static void pipeline_init(Pipeline *p, int n_micro_batches) {
    memset(p, 0, sizeof *p);
    p->n_micro_batches = n_micro_batches;
    p->n_slots = pipeline_n_slots();
    p->prog = (Instr *)host_alloc(sizeof(Instr) * (size_t)n_micro_batches * 3);
    for (int mb = 0; mb < n_micro_batches; mb++) {
        static const Op ops[] = {OP_LOAD, OP_FWD, OP_BWD};
        for (int k = 0; k < 3; k++) {
            Instr in = {ops[k], mb, 0};
            p->prog[p->n++] = in;
        }
    }
    const char *wrong = pipeline_validate(p);
    CHECK(!wrong, "%s", wrong);
}

static void pipeline_free(Pipeline *p) { free(p->prog); }
