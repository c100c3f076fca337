#!/usr/bin/env bash
# one_gpu.sh - several ranks on one GPU: the sections of tests for ranks, and runs of the trainer, by a CUDA build over a stand-in for NCCL
# (tests/fake_nccl/one_gpu.cpp). What NCCL itself does is not tested; all that the GPU does in tensor, sequence and pipeline parallelism and
# ZeRO is. Needs a GPU, g++ and the CUDA toolkit.
#
#     tests/one_gpu.sh [BUILD_FOLDER [RANKS ... | build]]        default: build/cuda 2 4; build: only makes the stand-in, which needs no GPU
#
# SECTIONS: other sections of test_gpt. The last line says "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
build=$(realpath -- "${1:-build/cuda}")
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- 2 4
read -ra sections <<<"${SECTIONS:-comm parallel zero graphs recompute tensor stages combinations pipeline}"
export LC_ALL=C.UTF-8 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
cuda=$(readlink -f "${CUDA_HOME:-/usr/local/cuda}")
work=$(mktemp -d "${TMPDIR:-/tmp}/one_gpu.XXXXXX") || exit 1
trap 'rm -rf -- "$work"' EXIT

mkdir -p "$build/one_gpu"
if [ ! -e "$build/one_gpu/libnccl.so.2" ] || [ tests/fake_nccl/one_gpu.cpp -nt "$build/one_gpu/libnccl.so.2" ]; then
    g++ -std=gnu++17 -O1 -g -shared -fPIC -pthread -fno-exceptions -fno-rtti -Wall -Wextra -Wshadow -Werror -Wno-missing-field-initializers -Wno-unused-function -isystem "$cuda/include" \
        tests/fake_nccl/one_gpu.cpp -o "$build/one_gpu/libnccl.so.2" -L"$cuda/lib64" -lcudart || { echo "0 passed, 1 failed, 0 skipped"; exit 1; }
fi
[ "$1" != build ] || exit 0

passed=0 failed=0 skipped=0
for world in "$@"; do
    pids=() bad=0 start=$SECONDS
    port=$((20000 + RANDOM % 10000))
    for ((r = 0; r < world; r++)); do
        env LD_LIBRARY_PATH="$build/one_gpu:$cuda/lib64" RANK=$r WORLD_SIZE="$world" LOCAL_RANK=$r LOCAL_WORLD_SIZE="$world" MASTER_PORT=$port \
            timeout "${LIMIT:-900}" "$build/test_gpt" "${sections[@]}" >"$work/out.$r" 2>"$work/err.$r" </dev/null &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || bad=1; done
    grep -a '^FAIL' "$work/out.0"
    last=$(tail -n 1 "$work/out.0")
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped ]]; then
        passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2])) skipped=$((skipped + BASH_REMATCH[3]))
        [ "$bad" -eq 0 ] || [ "${BASH_REMATCH[2]}" -gt 0 ] || failed=$((failed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $world ranks did not come to their end; the last rows, and what they said:"
        tail -n 3 "$work/out.0"
        tail -q -n 2 "$work"/err.*
    fi
    echo "--- $world ranks: $last, $((SECONDS - start)) s"
    [ -z "${KEEP:-}" ] || cp "$work"/out.* "$work"/err.* "$KEEP"/
    rm -f -- "$work"/*
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
