#!/usr/bin/env bash
# test_nccl.sh - runtime/comm_nccl.cpp without a GPU: the rows of test_comm.h over a stand-in for NCCL (tests/fake_nccl), then
# the ways in which NCCL fails. tests/test_nccl.sh [BUILD_FOLDER [full]]; ends with "N passed, N failed, N skipped".
#
# What is built is the CPU backend with comm_nccl.cpp instead of MPI; ranks start as torchrun starts them, by RANK and
# WORLD_SIZE. With `full` the whole program is built as well and trains over several ranks (section "parallel").
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
build=${1:-build/cpu-nccl}
full=${2:-}
export LC_ALL=C.UTF-8 OMP_NUM_THREADS=1
passed=0 failed=0
work=$(mktemp -d "${TMPDIR:-/tmp}/test_nccl.XXXXXX") || exit 1
trap 'rm -rf -- "$work"' EXIT

build_all() {
    mkdir -p "$build"
    local objects=() flags=(-std=gnu++17 -g -O1 -fPIE -pthread -fopenmp -fno-exceptions -fno-rtti -Wall -Wextra -Wshadow -Wno-missing-field-initializers -Wno-unused-function -Werror) source
    for source in kernels/cpu/*.cpp; do objects+=("$build/kernels_cpu_$(basename "$source" .cpp).o"); done
    objects+=("$build/device_cpu.o" "$build/comm_nccl.o" "$build/watch.o" "$build/flight.o")
    g++ "${flags[@]}" -c tests/fake_nccl/fake_nccl.cpp -o "$build/fake_nccl.o" &&
        make --no-print-directory -s BUILD="$build" BACKEND=cpu COMM=nccl COMM_LIBS="$PWD/$build/fake_nccl.o" \
            CXXFLAGS="${CXXFLAGS:-} -isystem tests/fake_nccl -DGROUP_SECONDS=3" "${objects[@]}" ${full:+binaries} &&
        g++ "${flags[@]}" tests/nccl_ranks.cpp "${objects[@]}" "$build/fake_nccl.o" -o "$build/nccl_ranks" -lm
}
build_all || { echo "FAIL nccl: cannot be built"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }

pass() { passed=$((passed + 1)); echo "ok   nccl/$1"; }
fail() { failed=$((failed + 1)); echo "FAIL nccl/$1: $2"; head -c 600 "$work"/err.* 2>/dev/null; }

# Runs all ranks of a world: ranks WORLD [VARIABLE=value ...] -- command. Exit codes in code[rank], seconds in took.
ranks() {
    local world=$1 r pids=() start=$EPOCHREALTIME
    local settings=()
    shift
    while [ "$1" != -- ]; do settings+=("$1"); shift; done
    shift
    rm -f -- "$work"/*
    port=$((20000 + RANDOM % 10000)) code=()
    for ((r = 0; r < world; r++)); do
        env "${settings[@]}" RANK=$r WORLD_SIZE="$world" LOCAL_RANK=$r LOCAL_WORLD_SIZE="$world" MASTER_PORT=$port \
            timeout 600 "$@" >"$work/out.$r" 2>"$work/err.$r" </dev/null &
        pids+=($!)
    done
    for ((r = 0; r < world; r++)); do
        wait "${pids[r]}"
        code[r]=$?
    done
    took=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { print b - a }')
}

# All ranks end with 0, and rank 0 has run at least this many rows.
works() { # name rows world settings... -- command
    local name=$1 rows=$2 r bad=
    shift 2
    ranks "$@"
    for r in "${!code[@]}"; do [ "${code[r]}" -eq 0 ] || bad+=" rank $r ended with ${code[r]};"; done
    local ran
    ran=$(sed -nE 's/^([0-9]+) passed, 0 failed, .*/\1/p' "$work/out.0")
    [ "${ran:-0}" -ge "$rows" ] || bad+=" ${ran:-no} rows passed, expected $rows; $(grep -a '^FAIL' "$work/out.0" | head -n 3)"
    if [ -z "$bad" ]; then pass "$name: $ran rows"; else fail "$name" "$bad"; fi
}

# All ranks end with this code within so many seconds, and one of the first lines of stderr has the text.
ends() { # name code seconds text world settings... -- command
    local name=$1 want=$2 limit=$3 text=$4 r bad=
    shift 4
    ranks "$@"
    for r in "${!code[@]}"; do [ "${code[r]}" -eq "$want" ] || bad+=" rank $r ended with ${code[r]}, expected $want;"; done
    awk -v a="$took" -v b="$limit" 'BEGIN { exit !(a < b) }' || bad+=" it took $took s, limit $limit;"
    grep -aqF -- "$text" "$work"/err.* || bad+=" nobody said \"$text\";"
    if [ -z "$bad" ]; then pass "$name: $took s"; else fail "$name" "$bad"; fi
}

# Ranks that use two groups in opposite orders need a GPU's streams, or MPI: the stand-in does one collective after the other.
program="$build/nccl_ranks"
works "1 rank" 16 1 -- "$program"
for world in 2 3 4 8; do works "$world ranks" 15 "$world" -- "$program" opposite_orders; done
works "3 ranks, no memory to be registered" 15 3 FAKE_NCCL=nowindow -- "$program" opposite_orders
works "3 ranks, one of which cannot register memory" 15 3 FAKE_NCCL=nowindow_here FAKE_RANK=1 -- "$program" opposite_orders
works "3 ranks and their beats" 15 3 WATCH=1 -- "$program" opposite_orders
[ -z "$full" ] || for world in 2 4; do works "training, $world ranks" 5 "$world" -- "$build/test_gpt" parallel zero; done

ends "more ranks than GPUs" 2 5 "local rank 2 of 4 on this host, which shows 2 GPUs" 4 FAKE_GPUS=2 -- "$program"
ends "a communicator that never gets ready" 75 8 "NCCL's ncclCommInitRankConfig (place 1 in a group of 3) did not get through within 3 s" 3 FAKE_NCCL=init FAKE_RANK=1 -- "$program"
ends "a use that NCCL refuses" 2 5 "NCCL's ncclAllGather failed (place 0 in a group of 2): invalid usage: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000;" 2 FAKE_NCCL=usage -- "$program"
ends "an error in NCCL's threads, while the rank hangs" 75 6 "remote process exited or there was a network error: NET/IB: Got completion from peer with status=12;" 3 FAKE_NCCL=async -- "$program"
ends "a rank that is gone, while the others hang" 75 2.5 "error: rank 1 (host " 3 FAKE_NCCL=lost FAKE_RANK=1 -- "$program"
ends "a rank that is gone, with beats" 75 2.5 "rank 1" 3 WATCH=1 FAKE_NCCL=lost FAKE_RANK=1 -- "$program"

ends "a rank that does not come" 75 10 "did not get through within 2 s" 3 HANG=1 -- "$program"

echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
