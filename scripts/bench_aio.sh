#!/bin/sh
# The rate of offload to files beside dd's with O_DIRECT, and fio's where it is there, by turns: scripts/bench_aio.sh FOLDER [GB]
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
# What bench_aio does, by fio: bytes of a request, requests in flight.
fio_all() {
    command -v fio >/dev/null || return 0
    printf 'fio, block_size %s, queue_depth %s:' "$1" "$2"
    for rw in write read rw; do
        bytes=$((count * 67108864))
        [ $rw = rw ] && bytes=$((2 * bytes))
        fio --name=bench --filename="$file" --size=$((count * 67108864)) --io_size=$bytes --rw=$rw --bs="$1" --iodepth="$2" --ioengine=io_uring --direct=1 --minimal |
            awk -F';' -v what=$rw '{printf "  %s %.2f", what == "rw" ? "both" : what, ($7 + $48) * 1024e-9}' # KiB/s read and written
    done
    echo ' GB/s'
}
dd_both
"$build/bench_aio" "$folder" "$gb" 67108864 1 1 1 # what dd does, in one program
fio_all 1048576 8
"$build/bench_aio" "$folder" "$gb"
"$build/bench_aio" "$folder" "$gb" 1048576 32
"$build/bench_aio" "$folder" "$gb" 4194304 16 2
fio_all 16777216 8
"$build/bench_aio" "$folder" "$gb" 16777216 8
"$build/bench_aio" "$folder" "$gb" 1048576 8 1 1
dd_both
