// model.cu - architectures as data: parameter tables, and forward and backward of a unit.
#pragma once
#include "kernels/kernels.h"
#include "dsconfig.h"
#include "runtime/grid.h"

typedef enum { NORM_LAYERNORM } NormKind;
typedef enum { POSITION_LEARNED } PositionKind;
typedef enum { MLP_GELU_TANH } MlpKind;

// What makes one family of models different from another.
typedef struct {
    const char *name;     // model_type of Hugging Face's config.json
    NormKind norm;
    PositionKind position;
    MlpKind mlp;
    bool bias;            // linear layers carry a bias
} ArchSpec;

typedef enum { UNIT_EMBED, UNIT_BLOCK, UNIT_HEAD } UnitKind;
typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL } InitKind;

// One row of the table of parameters: everything that the trainer knows about a tensor of weights. Whatever concerns
// "all weights" (initialisation, decay, sharding, checkpoints, import and export) loops over these rows.
typedef struct {
    char name[64];        // key in checkpoints: "wte.weight", "h.3.attn.c_attn.bias"
    int unit;             // index into ParamTable.unit
    int ndim;             // 1 or 2
    int64_t shape[2];     // global: (OC, C) for a matrix, rows are output features; (C, 1) for a vector
    int64_t padded_rows;  // rows that the buffers hold, >= shape[0]; the rest stays zero (vocabulary)
    InitKind init;
    double std;           // of INIT_NORMAL
    bool decay;           // weight decay applies: matrices only
    bool hf_transposed;   // Hugging Face stores (C, OC)
    int tied_to;          // row that holds the storage, or -1: this row has its own
    int64_t offset;       // elements from the start of its unit's buffer
    int64_t numel;        // elements in the buffer, padded_rows * shape[1]; 0 if tied
} ParamDesc;

typedef struct {
    UnitKind kind;
    int first_row, n_rows;
    int64_t numel;        // padded sum of its rows: the length of its flat buffers
    int64_t decay_numel;  // rows with decay come first in the buffer: elements [0, decay_numel) decay
} UnitDesc;

typedef struct {
    int n_rows, n_units;
    ParamDesc *row;
    UnitDesc *unit;       // 0 = embedding, 1..L = blocks, L+1 = head
} ParamTable;
