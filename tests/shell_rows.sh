# shell_rows.sh - the frame of the shell tests: rows, what they compare, and the tiny run that most of them start. Sourced.
#
# A row is a function row_NAME; it runs in a fresh folder that holds config.json and train.txt. A row that compared nothing
# fails; one that this machine cannot do says skip. The caller sets root (of the project), want (rows; none = all) and calls run_rows.

base=$(mktemp -d "${TMPDIR:-/tmp}/test_shell.XXXXXX")
trap 'cd / && chmod -R u+rwX -- "$base" 2>/dev/null; rm -rf -- "$base"' EXIT
started=() # processes of the row that is running, ended with it

source "$root/tests/shell_checks.sh"
# The last run's standard error holds this (a fixed text).
says() {
    compared=$((compared + 1))
    grep -aqF -- "$1" err || fail "standard error lacks '$1'; it is: $(head -c 400 err)"
}
says_not() {
    compared=$((compared + 1))
    ! grep -aqF -- "$1" err || fail "standard error holds '$1': $(head -c 400 err)"
}
prints() {
    compared=$((compared + 1))
    grep -aqF -- "$1" out || fail "standard output lacks '$1'; it ends: $(tail -c 300 out)"
}

# Losses and norms of a log, exactly as written, an update a line; of an update that was run twice, the later record.
curve() {
    python3 - "$1" <<'PY'
import json, sys
steps = {}
for line in open(sys.argv[1]):
    record = json.loads(line)
    if "loss" in record: steps[record["step"]] = (record["loss"], record["grad_norm"], record["lr"])
for step in sorted(steps): print(step, *(repr(x) for x in steps[step]))
PY
}
# Update records that a log has. Who starts again on an old log counts from what was there: a signal may else come before its handler.
logged_steps() { # LOG
    local n
    n=$(grep -ac '"grad_norm"' "$1" 2>/dev/null)
    echo "${n:-0}"
}
# Waits until the log has so many of them, or the process is gone.
wait_for_steps() { # LOG COUNT PID
    local i
    for ((i = 0; i < 1500; i++)); do
        [ "$(logged_steps "$1")" -ge "$2" ] && return 0
        kill -0 "$3" 2>/dev/null || return 1
        sleep 0.02
    done
    return 1
}

# A model that trains 12 updates in a moment; arguments are lines for the run section.
write_config() {
    cat >config.json <<JSON
{
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
    "train_gpt": {
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": 256},
        "data": {"train": "train.txt"},
        "run": {
            "steps": 12,
            "seq_len": 32,
            "seed": 7,
            "output_dir": "out_dir"
        }
    }
}
JSON
}
write_text() {
    local i
    for ((i = 0; i < 200; i++)); do echo "line $i: the cat sat on mat $((i * 7919 % 101)) and looked at bird $((i * 104729 % 89))."; done >train.txt
}

# Runs the rows of a file, or those in want; the last line is "N passed, N failed, N skipped".
run_rows() { # PREFIX FILE
    local name began elapsed pid
    [ ${#want[@]} -gt 0 ] || mapfile -t want < <(sed -nE 's/^row_([a-z_0-9]+)\(\).*/\1/p' "$2")
    for name in "${want[@]}"; do
        if ! declare -F "row_$name" >/dev/null; then echo "error: no row $name" >&2; exit 2; fi
        compared=0 problem='' skip_reason='' started=()
        began=$(date +%s%N)
        mkdir -- "$base/$name" && cd -- "$base/$name" || exit 1
        write_config
        write_text
        "row_$name" 2>noise
        for pid in "${started[@]}"; do kill -9 "$pid" 2>/dev/null && wait "$pid" 2>/dev/null; done
        cd "$base" && chmod -R u+rwX -- "$name" && rm -rf -- "$name"
        [ -z "$problem" ] && [ -z "$skip_reason" ] && [ "$compared" -eq 0 ] && problem="compared nothing"
        elapsed=$(awk -v ns=$(($(date +%s%N) - began)) 'BEGIN { printf "%.1f", ns / 1e9 }')
        if [ -n "$problem" ]; then failed=$((failed + 1)); echo "FAIL $1/$name: $compared checks, $elapsed s: $problem"
        elif [ -n "$skip_reason" ]; then skipped=$((skipped + 1)); echo "skip $1/$name: $skip_reason"
        else passed=$((passed + 1)); echo "ok   $1/$name: $compared checks, $elapsed s"; fi
    done
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
}
