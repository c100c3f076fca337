#!/usr/bin/env bash
# test.sh - runs all tests of one build folder: scripts/test.sh build/cpu [suite ...]
#
# Suites: c (test_gpt), ranks (test_gpt's sections for several ranks under mpirun -n 2, 3, 4 and 8), python (tests/test_*.py), cli
# (tests/test_cli.sh); all of them unless named. A suite that ends
# without its closing line counts as one failure. The last line is the sum: "N passed, N failed, N skipped".
set -uo pipefail
build=${1:?usage: scripts/test.sh BUILD_FOLDER [suite ...]}
shift
suites=" ${*:-c ranks python cli} "
cd "$(dirname "$0")/.." || exit 1
# A test must not depend on the language of whoever runs it, nor leave anything but its verdict.
export LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1

passed=0 failed=0 skipped=0
output=$(mktemp)
trap 'rm -f -- "$output"' EXIT

add() { passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3)); }

# The suite's own closing line, and its exit code, which must agree with it.
run_suite() { # name command...
    local name=$1 code start=$SECONDS line
    shift
    echo "--- $name"
    "$@" </dev/null 2>&1 | tee -- "$output"
    code=${PIPESTATUS[0]}
    line=$(grep -aE '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$output" | tail -n 1)
    if [[ $line =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
        add "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" "${BASH_REMATCH[3]}"
        if [ "$code" -ne 0 ] && [ "${BASH_REMATCH[2]}" -eq 0 ]; then echo "FAIL $name: exit code $code after no failure"; add 0 1 0; fi
    else
        echo "FAIL $name: ended with exit code $code and no closing line"
        add 0 1 0
    fi
    echo "--- $name: $((SECONDS - start)) s"
}

# unittest closes with "Ran N tests", then OK or FAILED with counts in parentheses.
run_python() {
    local start=$SECONDS code ran bad=0 skip=0 last
    echo "--- python"
    python3 -m unittest -v tests/test_*.py </dev/null 2>&1 | tee -- "$output"
    code=${PIPESTATUS[0]}
    ran=$(sed -nE 's/^Ran ([0-9]+) tests? in .*/\1/p' "$output" | tail -n 1)
    last=$(grep -aE '^(OK|FAILED)( \(.*\))?$' "$output" | tail -n 1)
    for word in failures errors 'unexpected successes'; do
        [[ $last =~ (^|[ \(])$word=([0-9]+) ]] && bad=$((bad + BASH_REMATCH[2]))
    done
    [[ $last =~ skipped=([0-9]+) ]] && skip=${BASH_REMATCH[1]}
    if [ -z "$ran" ] || [ "$ran" -eq 0 ] || { [ "$code" -ne 0 ] && [ "$bad" -eq 0 ]; }; then
        echo "FAIL python: ended with exit code $code after ${ran:-no} tests"
        ran=$((${ran:-0} + 1)) bad=$((bad + 1))
    fi
    local good=$((ran - bad - skip)) # a test with several failing sub-tests counts more than once in bad
    add $((good > 0 ? good : 0)) "$bad" "$skip"
    echo "--- python: $((SECONDS - start)) s"
}

[[ $suites == *" c "* ]] && run_suite test_gpt "$build/test_gpt"
# Numbers of ranks that this build can have here: any over MPI, one a GPU over NCCL, one alone over comm_self.o.
rank_counts() {
    local n gpus
    command -v mpirun >/dev/null || return
    if [ -e "$build/comm_mpi.o" ]; then echo 2 3 4 8; fi
    if [ -e "$build/comm_nccl.o" ]; then
        gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
        for n in 2 3 4 8; do if [ "$n" -le "$gpus" ]; then echo "$n"; fi; done
    fi
}
run_ranks() {
    local n counts sections
    counts=$(rank_counts)
    if [ -z "$counts" ]; then
        echo "--- ranks: skipped, this build has no MPI, or there are no two GPUs"
        add 0 0 3
        return
    fi
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 OMP_NUM_THREADS=1
    for n in $counts; do
        sections=(comm parallel zero graphs recompute tensor stages combinations "plan/bytes of a run" "plan/split by tensors and sequences" "plan/stages of a run")
        if [ "$n" -eq 8 ] && [ -e "$build/comm_mpi.o" ]; then sections=(combinations); fi # the rows that need eight; on two cores all would take long
        [[ $n -eq 8 && $build == *debug* ]] || run_suite "$n ranks" timeout 900 mpirun -n "$n" "$build/test_gpt" "${sections[@]}"
    done
    unset OMP_NUM_THREADS
}

[[ $suites == *" ranks "* ]] && run_ranks
[[ $suites == *" python "* ]] && run_python
[[ $suites == *" cli "* ]] && run_suite command-line tests/test_cli.sh "$build/train_gpt"

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
