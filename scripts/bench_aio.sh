#!/bin/sh
# The rate of offload to files beside dd's with O_DIRECT, by turns: scripts/bench_aio.sh FOLDER [GB]
# It builds what it needs in BUILD (build/bench); BENCH_BUILD_ONLY=1 stops there.
set -eu
cd "$(dirname "$0")/.."
build=${BUILD:-build/bench}
make -s BACKEND=cpu BUILD="$build" "$build/bench_aio"
if [ "${BENCH_BUILD_ONLY:-}" = 1 ]; then exit 0; fi
folder=${1:?usage: scripts/bench_aio.sh FOLDER [GB]}
gb=${2:-4}
file=$(mktemp "$folder/bench-aio-XXXXXX")
random=$(mktemp "$folder/bench-aio-XXXXXX")
trap 'rm -f -- "$file" "$random"' EXIT
head -c 67108864 /dev/urandom >"$random"
count=$((gb * 1000 / 64))
dd_both() {
    start=$(date +%s%N)
    for i in $(seq 0 $((count - 1))); do dd if="$random" of="$file" bs=64M count=1 seek="$i" oflag=direct conv=notrunc status=none; done
    middle=$(date +%s%N)
    dd if="$file" of=/dev/null bs=64M iflag=direct status=none
    end=$(date +%s%N)
    echo "dd: $((count * 67108864)) bytes, write $((count * 67108864 * 100 / (middle - start))), read $((count * 67108864 * 100 / (end - middle))) hundredths of GB/s"
}
dd_both
"$build/bench_aio" "$folder" "$gb" 67108864 1 1 1 # what dd does, in one program
"$build/bench_aio" "$folder" "$gb"
"$build/bench_aio" "$folder" "$gb" 1048576 32
"$build/bench_aio" "$folder" "$gb" 4194304 16 2
"$build/bench_aio" "$folder" "$gb" 1048576 8 1 1
dd_both
