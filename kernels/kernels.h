// kernels.h - the mathematics of the trainer, twice: namespace cpu (the oracle, and the laptop's backend) and, in CUDA
// builds, namespace cuda. Unqualified names mean the backend that was built; a caller that wants the CPU twin on
// purpose says cpu::. This is the only file that asks whether CUDA is there.
//
// To add a kernel: a prototype in kernel_list.h, an implementation in kernels/cpu/ and in kernels/cuda/, a row in
// tests/test_kernels.h. The Makefile finds new files by itself.
#pragma once
#include "../runtime/device.h"

// Elements that an optimizer updates; see kernel_list.h for the types. The first `decays` of them get weight decay.
enum { UPDATE_STATES_MAX = 2 };
typedef struct {
    Tensor param, master, grad, state[UPDATE_STATES_MAX]; // (n) each
    int64_t decays;
} UpdateRange;

// Hyper-parameters of one optimizer launch; see kernel_list.h for the formulas.
typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float bias_correction1, bias_correction2; // 1 - beta^t, or 1 when bias correction is off
    bool decoupled_decay;                     // AdamW; false adds weight_decay * w to the gradient (L2 form)
} AdamWArgs;

typedef struct {
    float lr, beta1, beta2, weight_decay;
} LionArgs;

typedef struct {
    float lr, momentum, dampening, weight_decay;
    bool nesterov;
    bool first_update; // the momentum buffer is empty: it becomes the gradient itself
} SgdArgs;

// What update_control decides about one update. Optimizers read it in the backend's memory, so that nobody waits for the host.
typedef struct {
    double grad_norm;   // of the mean gradient, before clipping
    double clip_factor; // in (0, 1]
    float grad_scale;   // every gradient is multiplied by this first: clip_factor / loss_scale
    int32_t apply;      // 0: the norm or the loss is not finite, and the update changes nothing
} UpdateControl;

namespace cpu {
#include "kernel_list.h"
// The optimizers' loops are compiled for several instruction sets, which give the same bits: 0 for any machine, then better
// ones; the best that this machine has is taken unless a test or a benchmark says which. -1: the best. Returns its name; null, and
// nothing changes, where the machine lacks it.
const char *update_path(int path);
}
#ifdef USE_CUDA
namespace cuda {
#include "kernel_list.h"
}
using namespace cuda;
#define KERNELS_ON_GPU 1
#else
using namespace cpu;
#define KERNELS_ON_GPU 0
#endif
