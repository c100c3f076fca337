#!/bin/sh
# The rate at which a save in the background writes, beside dd's with O_DIRECT, by turns: scripts/bench_save.sh FOLDER [GB]
# The folder must have room for two checkpoints of so many GB. It builds what it needs in BUILD (build/bench); BENCH_BUILD_ONLY=1 stops there.
set -eu
cd "$(dirname "$0")/.."
build=${BUILD:-build/bench}
make -s BACKEND=cpu BUILD="$build" "$build/bench_save"
if [ "${BENCH_BUILD_ONLY:-}" = 1 ]; then exit 0; fi
folder=${1:?usage: scripts/bench_save.sh FOLDER [GB]}
gb=${2:-4}
saves=$(mktemp -d "$folder/bench-save-XXXXXX")
trap 'rm -rf -- "$saves"' EXIT
for block in 8 64 8 64; do
    echo "dd, $block MiB at a time: $(dd if=/dev/zero of="$saves/dd" bs=${block}M count=$((gb * 1000 / block)) oflag=direct conv=fsync 2>&1 | tail -n 1)"
    rm -f -- "$saves/dd"
    "$build/bench_save" "$saves/checkpoints" "$gb" 2
done
