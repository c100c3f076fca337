#!/usr/bin/env bash
# checkpoint_crash.sh - strikes a training run at system calls of its saves, then resumes: scripts/checkpoint_crash.sh BINARY [all]
#
# The run trains 6 updates, saves every 2 and keeps one checkpoint. For each kind of system call that a save makes, strace
# kills the program at its first, second, ... such call, or lets that call fail, until a run gets by unharmed. After each:
#   - the newest checkpoint that the log calls durable, or a newer one, is resumed from;
#   - the resumed run's losses are those of an undisturbed run, digit for digit;
#   - its last checkpoint is equal to that run's, byte for byte, and nothing else is left in the folder.
# Then kill -9 at random instants. Without "all", only every few calls of the most frequent kinds are struck (two minutes).
# The last line is "N passed, N failed, N skipped".
set -uo pipefail
binary=$(realpath -- "${1:?usage: scripts/checkpoint_crash.sh BINARY [all]}")
every=${2:-}
export LC_ALL=C.UTF-8 OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0
base=$(mktemp -d "${TMPDIR:-/tmp}/checkpoint_crash.XXXXXX")
trap 'cd / && rm -rf -- "$base"' EXIT
cd -- "$base" || exit 1
passed=0 failed=0

command -v strace >/dev/null && strace -o /dev/null true 2>/dev/null || { echo "no strace here"; echo "0 passed, 0 failed, 1 skipped"; exit 0; }

cat >config.json <<'JSON'
{
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "checkpoint": {"num_checkpoints_to_keep": 1},
    "train_gpt": {
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 256},
        "data": {"train": "train.txt"},
        "run": {"steps": 6, "seq_len": 16, "seed": 7, "output_dir": "out", "checkpoint_every": 2}
    }
}
JSON
for ((i = 0; i < 100; i++)); do echo "line $i: the cat sat on mat $((i * 7919 % 101))."; done >train.txt

# "step loss" of all updates in a log, the later record of an update that was run twice.
losses() { sed -nE 's/^\{"step":([0-9]+),"loss":([^,]+),"grad_norm":([^,]+),.*/\1 \2 \3/p' "$1" | tac | sort -snu -k1,1; }
# The largest step that the log calls durable, 0 if none.
acknowledged() { sed -nE 's/^\{"event":"checkpoint","at_step":([0-9]+),"durable":true.*/\1/p' "$1" 2>/dev/null | sort -n | tail -n 1 | grep . || echo 0; }

"$binary" -c config.json run.output_dir=whole >whole.out 2>&1 </dev/null || { cat whole.out; echo "0 passed, 1 failed, 0 skipped"; exit 1; }
losses whole/log.jsonl >whole.losses
whole=$(cd whole/checkpoints && ls -A | tr '\n' ' ')

# Resumes after whatever happened to the run in out/, and compares. $1 says what happened.
resume_and_compare() {
    local durable from code problem=''
    durable=$(acknowledged out/log.jsonl)
    timeout 60 "$binary" -c config.json >resume.out 2>resume.err </dev/null
    code=$?
    from=$(sed -nE 's/^resumed from step-0*([0-9]+):.*/\1/p' resume.out)
    losses out/log.jsonl >parts.losses
    if [ "$code" -ne 0 ]; then problem="exit code $code: $(tail -n 1 resume.err)"
    elif [ "${from:-0}" -lt "$durable" ]; then problem="resumed from step ${from:-0}, but step $durable was durable"
    elif grep -q 'is skipped' resume.err; then problem="a torn checkpoint had its final name: $(grep -m 1 'is skipped' resume.err)"
    elif ! cmp -s whole.losses parts.losses; then problem="other losses: $(diff whole.losses parts.losses | sed -n 2p)"
    elif ! diff -qr whole/checkpoints/step-00000006 out/checkpoints/step-00000006 >/dev/null; then problem="the last checkpoint differs"
    # an older checkpoint may be left when the end came between the last save and its deletion; it is complete
    elif [ "$(cd out/checkpoints && ls -A | grep -v 'step-0000000[24]' | tr '\n' ' ')" != "$whole" ]; then problem="left in the folder: $(ls -A out/checkpoints | tr '\n' ' ')"
    fi
    rm -rf out
    if [ -n "$problem" ]; then
        echo "FAIL $1: $problem"
        failed=$((failed + 1))
    else passed=$((passed + 1)); fi
}

# strike CALL WHAT STEP: strace's injection WHAT at every STEP-th CALL, from the first until a run is not struck.
strike() {
    local call=$1 what=$2 step=$3 n struck=0 code
    [ -n "$every" ] && step=1
    for ((n = 1; n < 2000; n += step)); do
        rm -rf out
        { timeout 60 strace -f -qq -o trace -e "trace=$call" -e "inject=$call:$what:when=$n" "$binary" -c config.json >out.out 2>out.err </dev/null; } 2>/dev/null
        code=$?
        grep -qE 'INJECTED|killed by SIGKILL' trace || break
        struck=$((struck + 1))
        case $what:$code in
            # a refused call: the run goes on, or cannot begin (73), or its last save failed (74)
            error=*:0 | error=*:73 | error=*:74 | signal=*:137) ;;
            *) echo "FAIL $call $what $n: exit code $code: $(tail -n 1 out.err)"; failed=$((failed + 1)) ;;
        esac
        resume_and_compare "$call $what at call $n"
    done
    [ "$struck" -gt 0 ] || { echo "FAIL $call: the program never made this call"; failed=$((failed + 1)); }
    echo "$call $what: struck $struck times"
}

for call in mkdirat fallocate fsync renameat renameat2 unlinkat; do strike "$call" signal=SIGKILL 1; done
for call in openat close; do strike "$call" signal=SIGKILL 6; done
strike pwrite64 signal=SIGKILL 19
strike write signal=SIGKILL 4
for call in mkdirat fallocate fsync renameat renameat2 unlinkat; do strike "$call" error=EIO 1; done
strike pwrite64 error=ENOSPC 23
strike pwrite64 error=EIO 29

random=25
[ -n "$every" ] && random=200
for ((i = 0; i < random; i++)); do
    rm -rf out
    "$binary" -c config.json >out.out 2>out.err </dev/null &
    pid=$!
    sleep "0.0$((RANDOM % 10))$((RANDOM % 10))"
    { kill -9 "$pid"; wait "$pid"; } 2>/dev/null
    resume_and_compare "kill -9 number $i"
done

echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
