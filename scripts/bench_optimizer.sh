#!/bin/sh
# Times the updates that the CPU makes (of offloaded states, and of the CPU backend) beside the rate of its memory:
#   scripts/bench_optimizer.sh [threads [parameters [repeats [1 = huge pages]]]]
# It builds what it needs in BUILD (build/bench); BENCH_BUILD_ONLY=1 stops there.
set -eu
cd "$(dirname "$0")/.."
threads=${1:-$(nproc)}
[ $# -eq 0 ] || shift
build=${BUILD:-build/bench}
make -s BACKEND=cpu BUILD="$build" "$build/kernels_cpu_optimizer.o" "$build/device_cpu.o"
"${CXX:-g++}" -std=gnu++17 -O3 -march="${CPU_ARCH:-native}" -Wall -Wextra -Wno-unused-function -Wno-missing-field-initializers -fopenmp tests/bench_optimizer.cpp \
    "$build/kernels_cpu_optimizer.o" "$build/device_cpu.o" -o "$build/bench_optimizer"
if [ "${BENCH_BUILD_ONLY:-}" != 1 ]; then OMP_NUM_THREADS=$threads OMP_PROC_BIND=${OMP_PROC_BIND:-spread} "$build/bench_optimizer" "$@"; fi
