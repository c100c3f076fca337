#!/usr/bin/env bash
# emulate_cuda.sh - the memory-bound kernels of kernels/cuda without a GPU: compiled for the CPU (tests/emulate_cuda) and run against
# their CPU twins. tests/emulate_cuda.sh [row of test_kernels.h ...]; ends with "N passed, N failed, N skipped".
#
# Products and attention, which are PTX for tensor cores, are only compiled (make BACKEND=cuda).
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/emulate
export LC_ALL=C.UTF-8 OMP_NUM_THREADS=1
emulated=(classifier elementwise embedding layernorm optimizer reductions)
sources=("${emulated[@]/#/kernels/cuda/}")
sources=("${sources[@]/%/.cu}")
objects=("${emulated[@]/#/$build/}")
objects=("${objects[@]/%/.o}")
twins=()
for source in kernels/cpu/*.cpp runtime/device_cpu.cpp; do
    name=${source#runtime/}
    name=${name//\//_}
    twins+=("build/cpu/${name%.cpp}.o")
done
mkdir -p "$build"

flags=(-std=gnu++17 -g -pthread -fopenmp -fno-exceptions -fno-rtti -fno-threadsafe-statics -fno-math-errno -DUSE_CUDA -Wall -Wextra -Wno-unused-function
    -Wno-missing-field-initializers -Werror)
sanitized=(-O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
# What nobody has written is no zero by luck; older compilers do not know how.
unwritten=-ftrivial-auto-var-init=pattern
if g++ -Werror $unwritten -x c++ -c /dev/null -o /dev/null 2>/dev/null; then sanitized+=("$unwritten"); fi
make --no-print-directory -s BACKEND=cpu WERROR=1 "${twins[@]}"
python3 tests/emulate_cuda/translate.py "$build" kernels/cuda/common.cuh "${sources[@]}"
{
    printf '%s\n' "-O2 -Wno-clobbered tests/emulate_cuda/emulator.cpp -o $build/emulator.o" "${sanitized[*]} tests/emulate_cuda/emulate.cpp -o $build/emulate.o"
    for name in "${emulated[@]}"; do
        echo "${sanitized[*]} $([ "$name" = optimizer ] && echo -ffp-contract=off) -Itests/emulate_cuda -Ikernels/cuda -x c++ $build/$name.cu -o $build/$name.o"
    done
} | xargs -P 2 -L 1 g++ "${flags[@]}" -c
g++ -pthread -fopenmp -fsanitize=address,undefined -Wl,--wrap=_Z13device_mallocl "${objects[@]}" "$build/emulator.o" "$build/emulate.o" "${twins[@]}" -o "$build/emulate" -lm
"$build/emulate" "$@"
