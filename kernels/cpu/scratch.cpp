// scratch.cpp - the CPU's kernels take what they need for a call from the heap, and give it back.
#include "../kernels.h"

int64_t cpu::scratch_bytes(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t) { return 0; }
void cpu::scratch_reserve(int64_t, Stream) {}
void cpu::scratch_release(Stream) {}
