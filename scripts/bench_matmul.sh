#!/bin/sh
# Compares the CPU's matrix products with OpenBLAS's sgemm on the same cores: scripts/bench_matmul.sh [threads]
# OpenBLAS is used if the compiler finds it (apt-get install libopenblas-dev). It picks its kernels by the processor, or by
# the variable OPENBLAS_CORETYPE; the first line of the output says which.
set -eu
cd "$(dirname "$0")/.."
threads=${1:-$(nproc)}
build=${BUILD:-build/bench}
cxx=${CXX:-g++}
objects=$(for f in kernels/cpu/*.cpp; do echo "$build/kernels_cpu_$(basename "$f" .cpp).o"; done)
# shellcheck disable=SC2086
make -s BACKEND=cpu BUILD="$build" $objects "$build/device_cpu.o"
blas=
if echo '#include <cblas.h>' | "$cxx" -x c++ -c - -o /dev/null 2>/dev/null; then blas="-DWITH_OPENBLAS -lopenblas"; fi
# shellcheck disable=SC2086
"$cxx" -std=gnu++17 -O2 -fopenmp tests/bench_matmul.cpp $objects "$build/device_cpu.o" $blas -o "$build/bench_matmul"
OMP_NUM_THREADS=$threads OPENBLAS_NUM_THREADS=$threads "$build/bench_matmul"
