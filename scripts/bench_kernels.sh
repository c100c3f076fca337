#!/bin/sh
# Times each kernel of the CUDA build at the sizes of a GPT (of GPT-2 124M), and adds up a training step:
#   scripts/bench_kernels.sh [B [T [L [NH [C]]]]]
# It builds what it needs in BUILD (build/cuda); BENCH_BUILD_ONLY=1 stops there.
set -eu
cd "$(dirname "$0")/.."
build=${BUILD:-build/cuda}
cxx=${CXX:-g++}
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
objects="$build/device_cuda.o"
for f in kernels/cpu/*.cpp; do objects="$objects $build/kernels_cpu_$(basename "$f" .cpp).o"; done
for f in kernels/cuda/*.cu; do objects="$objects $build/kernels_cuda_$(basename "$f" .cu).o"; done
# shellcheck disable=SC2086
make -s BACKEND=cuda BUILD="$build" $objects
# shellcheck disable=SC2086
"$cxx" -std=gnu++17 -O2 -Wall -Wextra -Wno-unused-function -Wno-missing-field-initializers -fopenmp -DUSE_CUDA tests/bench_kernels.cpp $objects \
    -L"$cuda/lib64" -Wl,-rpath,"$cuda/lib64" -lcublasLt -lcudart -o "$build/bench_kernels"
if [ "${BENCH_BUILD_ONLY:-}" != 1 ]; then "$build/bench_kernels" "$@"; fi
