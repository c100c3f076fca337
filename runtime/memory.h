// memory.h - what device memory is for: bytes by kind, as a plan expects them and as a run counts them.
#pragma once
#include "utils.h"

typedef enum {
    MEMORY_WEIGHTS,          // of the model, in its type: what this rank keeps of them
    MEMORY_MASTERS,          // what the optimizer updates beside 16-bit weights: fp32 masters, or what bf16 weights lack of them
    MEMORY_GRADIENTS,
    MEMORY_OPTIMIZER_STATES,
    MEMORY_BUFFERS,          // whole units in flight between ranks, and room for tensors on their way in or out
    MEMORY_ACTIVATIONS,
    MEMORY_SCRATCH,          // of kernels and sums
    MEMORY_KINDS,
} MemoryKind;

static const char *const memory_names[MEMORY_KINDS] = {"weights", "masters", "gradients", "optimizer_states", "buffers", "activations", "scratch"};

typedef struct {
    int64_t bytes[MEMORY_KINDS];
} MemoryUse;

static inline int64_t memory_total(const MemoryUse *m) {
    int64_t total = 0;
    for (int k = 0; k < MEMORY_KINDS; k++) total += m->bytes[k];
    return total;
}
