#!/usr/bin/env bash
# fuzz.sh - runs every parser under libFuzzer with the address and undefined-behaviour sanitizers:
#
#     scripts/fuzz.sh [SECONDS] [target ...]      SECONDS for each target (60); targets are names such as config
#
# A target is tests/fuzz_NAME.cpp; its seeds are the files of tests/NAME, where that folder exists. What it learns stays in
# build/fuzz/corpus_NAME, so that a later run goes on from there. A finding is kept in build/fuzz and makes the script fail:
# turn it into a test before the fix. The last line is "N passed, N failed, N skipped", one for each target.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
seconds=${1:-60}
shift
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "fuzz.sh: $seconds is no number of seconds" >&2; exit 2; }
export LC_ALL=C.UTF-8
# Sanitizer settings of the caller would change what counts as a finding.
unset ASAN_OPTIONS UBSAN_OPTIONS

passed=0 failed=0
targets=("$@")
if [ ${#targets[@]} -eq 0 ]; then for file in tests/fuzz_*.cpp; do file=${file#tests/fuzz_}; targets+=("${file%.cpp}"); done; fi

compiler=$(command -v clang++ || compgen -c clang++- | sort -Vr | head -n 1)
[ -n "$compiler" ] || { echo "fuzz.sh: clang++ is not installed; scripts/setup.sh clang installs it" >&2; exit 2; }
mkdir -p build/fuzz

# One target: builds it and runs it. Its line says how it went; the code is that of failure.
fuzz() { # NAME
    local name=$1 source=tests/fuzz_$1.cpp binary=build/fuzz/fuzz_$1 corpus=build/fuzz/corpus_$1 log=build/fuzz/$1.log
    local folders length code runs covered
    if [ ! -f "$source" ]; then echo "FAIL fuzz $name: there is no $source"; return 1; fi
    mkdir -p "$corpus"
    if ! "$compiler" -std=gnu++17 -g -O1 -pthread -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Wno-unused-function "$source" -o "$binary" >"$log" 2>&1; then
        echo "FAIL fuzz $name: does not compile
$(head -n 20 "$log")" # at once: other targets write as well
        return 1
    fi
    folders=("$corpus")
    [ -d "tests/$name" ] && folders+=("tests/$name")
    # The list of options in a target's own head comment may set other limits on the length of an input.
    length=$(sed -nE 's/^\/\/.*-max_len=([0-9]+).*/\1/p' "$source" | head -n 1)
    "$binary" -max_total_time="$seconds" -max_len="${length:-4096}" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 -artifact_prefix="build/fuzz/$name-" "${folders[@]}" >"$log" 2>&1
    code=$?
    runs=$(sed -nE 's/^stat::number_of_executed_units: *([0-9]+)/\1/p' "$log")
    covered=$(grep -aoE 'cov: [0-9]+ ft: [0-9]+' "$log" | tail -n 1)
    if [ "$code" -eq 0 ] && [ "${runs:-0}" -gt 0 ]; then
        echo "ok   fuzz $name: $runs inputs in $seconds s, ${covered:-no coverage}"
        return 0
    fi
    echo "FAIL fuzz $name: exit code $code after ${runs:-0} inputs; the input is in build/fuzz, the end of $log is:
$(tail -n 40 "$log")"
    return 1
}

# As many at a time as there are processors: each target has one thread.
running=0
reap() {
    if wait -n; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    running=$((running - 1))
}
for name in "${targets[@]}"; do
    [ "$running" -lt "$(nproc)" ] || reap
    fuzz "$name" &
    running=$((running + 1))
done
while [ "$running" -gt 0 ]; do reap; done
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
