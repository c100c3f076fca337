#!/usr/bin/env bash
# checkpoint_crash.sh - kills training runs in their saves and at random instants, then resumes:
#
#     scripts/checkpoint_crash.sh BINARY [some | all | long [K/N]]
#
# Struck runs train 6 updates, save every 2 and keep one checkpoint; they wait for their saves, or make them in the background. One of their
# ranks is killed before each of its calls of a save (tests/save_fault.c), or strace lets a call fail. After each strike one rank resumes:
#   - from the newest checkpoint that the log calls durable, or a newer one;
#   - the losses are those of an undisturbed run: digit for digit if one rank made both, else to 1e-7 of their value, and the norms to 2e-6
#     (ranks add in another order, which shows at 1e-8 and 2e-7 in these runs; a sample read twice shows at 1e-2);
#   - if one rank made both, its last checkpoint is equal to the undisturbed run's, byte for byte but for the configuration that it holds; and
#     nothing else is left in the folder.
# Then runs of mostly two ranks are killed at random instants, all ranks at once or one of them, and each time another number of ranks goes
# on. Without an argument some of the calls are struck, and 50 random kills made; with "all" each of them is, and 200 are; "long" makes 1000
# random kills and nothing else. The last line is "N passed, N failed, N skipped".
set -uo pipefail
root=$(realpath -- "$(dirname "$0")/..")
binary=$(realpath -- "${1:?usage: scripts/checkpoint_crash.sh BINARY [some | all | long [K/N]]}")
mode=${2:-some} share=${3:-1/1}
export LC_ALL=C.UTF-8 OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
case $mode in some) kills=50 ;; all) kills=200 ;; long) kills=1000 ;; *) echo "checkpoint_crash.sh: $mode is neither some, all nor long" >&2; exit 2 ;; esac
part=${share%/*} parts=${share#*/}
[[ $share =~ ^[1-9][0-9]?/[1-9][0-9]?$ && $part -le $parts ]] || { echo "checkpoint_crash.sh: $share is no part such as 2/8" >&2; exit 2; }
kills=$(((kills + parts - 1) / parts))
base=$(mktemp -d "${TMPDIR:-/tmp}/checkpoint_crash.XXXXXX")
running='' # the session of a run in the background
trap '[ -z "$running" ] || pkill -9 -s "$running"; cd / && rm -rf -- "$base"' EXIT
cd -- "$base" || exit 1
passed=0 failed=0 skipped=0

good() { passed=$((passed + 1)); }
bad() { echo "FAIL $1"; failed=$((failed + 1)); }
skip() { echo "skip $1"; skipped=$((skipped + 1)); }
finish() { echo "$passed passed, $failed failed, $skipped skipped"; [ "$failed" -eq 0 ]; exit; }
trap 'echo "ended early, after $SECONDS s"; finish' TERM

cat >config.json <<'JSON'
{
    "train_batch_size": 6,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
    "checkpoint": {"num_checkpoints_to_keep": 1},
    "train_gpt": {
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 256},
        "data": {"train": "train.txt", "shuffle": true},
        "run": {"steps": 6, "seq_len": 16, "seed": 7, "output_dir": "out", "checkpoint_every": 2}
    }
}
JSON
for ((i = 0; i < 100; i++)); do echo "line $i: the cat sat on mat $((i * 7919 % 101))."; done >train.txt

# ---------------------------------------------------------------------------------------------------------------------
# What a run has left

# "step loss norm" of all updates in a log, the later record of an update that was run twice.
losses() { sed -nE 's/^\{"step":([0-9]+),"loss":([^,]+),"grad_norm":([^,]+),.*/\1 \2 \3/p' "$1" | tac | sort -snu -k1,1; }
# What the manifest of a run's last checkpoint says before its configuration.
manifest() { sed '/^"config_ranks"/,$d' "$1/checkpoints/step-00000006/manifest.json"; }
# The largest step that the log calls durable, 0 if none.
acknowledged() { sed -nE 's/^\{"event":"checkpoint","at_step":([0-9]+),"durable":true.*/\1/p' "$1" 2>/dev/null | sort -n | tail -n 1 | grep . || echo 0; }
# Are the losses and norms of two lists the same? Prints the first that are not.
agree() {
    awk 'NR == FNR { loss[$1] = $2; norm[$1] = $3; n++; next }
         { n--; a = $2 - loss[$1]; b = $3 - norm[$1]; if (!($1 in loss) || a * a > 1e-14 * $2 * $2 || b * b > 4e-12 * $3 * $3) { print; exit } }
         END { if (n) print n " updates missing" }' "$1" "$2" | head -n 1
}

# The command of a run of so many ranks, with settings.
launch() { # RANKS SETTINGS...
    as=("$binary" -c config.json)
    [ "$1" -eq 1 ] || as=(mpirun -n "$1" "${as[@]}" zero_optimization.stage="$1")
    shift
    as+=("$@")
}

# What is wrong with what a resumed run has said; nothing if all is well. $1: the step that was durable. $2: 0 if the run may have been
# killed before it said where it resumes.
resumed_wrongly() {
    local from
    from=$(sed -nE 's/^resumed from step-0*([0-9]+):.*/\1/p' resume.out)
    if grep -q 'is skipped' resume.err; then echo "a torn checkpoint had its final name: $(grep -m 1 'is skipped' resume.err)"
    elif [ "$2" -ne 0 ] && [ "${from:-0}" -lt "$1" ]; then echo "resumed from step ${from:-0}, but step $1 was durable"
    fi
}

# One rank resumes after whatever happened to the run of $2 ranks in out/. $1 says what happened.
resume_and_compare() {
    local durable code problem
    durable=$(acknowledged out/log.jsonl)
    launch 1
    timeout 60 "${as[@]}" >resume.out 2>resume.err </dev/null
    code=$?
    problem=$(resumed_wrongly "$durable" 1)
    losses out/log.jsonl >parts.losses
    if [ "$code" -ne 0 ]; then problem="exit code $code: $(tail -n 1 resume.err)"
    elif [ -n "$problem" ]; then :
    elif [ "$2" -gt 1 ]; then
        problem=$(agree whole.losses parts.losses)
        problem=${problem:+other losses: $problem}
    elif ! cmp -s whole.losses parts.losses; then problem="other losses: $(diff whole.losses parts.losses | sed -n 2p)"
    elif ! diff -qr -x manifest.json whole/checkpoints/step-00000006 out/checkpoints/step-00000006 >/dev/null || ! cmp -s <(manifest whole) <(manifest out); then problem="the last checkpoint differs"
    fi
    # an older checkpoint may be left when the end came between the last save and its deletion; it is complete
    if [ -z "$problem" ] && [ "$(cd out/checkpoints && ls -A | grep -v 'step-0000000[24]' | tr '\n' ' ')" != "$whole" ]; then problem="left in the folder: $(ls -A out/checkpoints | tr '\n' ' ')"; fi
    rm -rf out
    if [ -n "$problem" ]; then bad "$1: $problem"; else good; fi
}

# ---------------------------------------------------------------------------------------------------------------------
# Strikes in saves

# Kills rank $2 of $1 ranks at every $4-th call of its saves, in the background or not ($3), until a run gets by unharmed.
kills_in_saves() { # RANKS RANK BACKGROUND STEP
    local n struck=0 step=$4 what code
    [ "$mode" = all ] && step=1
    for ((n = 1 + (part - 1) * step; n < 2000; n += parts * step)); do
        launch "$1" checkpoint.writer.decoupled="$3"
        rm -rf out
        { LD_PRELOAD=./save_fault.so SAVE_FAULT=$2:$n timeout 60 "${as[@]}" >out.out 2>out.err </dev/null; } 2>/dev/null
        code=$?
        what="rank $2 of $1, in the background: $3, $(grep -ao 'killed before.*' out.err)"
        grep -aq '^fault: ' out.err || break
        struck=$((struck + 1))
        case $code in
            137 | 75) ;; # of the launcher: killed, or a rank that has noticed was faster
            *) bad "$what: exit code $code: $(tail -n 1 out.err)" ;;
        esac
        resume_and_compare "$what" "$1"
    done
    [ "$code" -eq 0 ] || bad "$1 ranks, unharmed: exit code $code: $(tail -n 1 out.err)"
    [ "$struck" -gt $((parts == 1 ? 2 : 0)) ] || [ "$part" -gt 1 ] || bad "$1 ranks: the program makes no calls in its saves"
    echo "kill of rank $2 of $1, in the background: $3: struck $struck times, after $SECONDS s"
}

# strace's injection $2 at every $3-th call of one rank, from the first until a run is not struck.
strike() { # CALL WHAT STEP
    local call=$1 what=$2 step=$3 n struck=0 code
    [ "$mode" = all ] && step=1
    for ((n = 1 + (part - 1) * step; n < 2000; n += parts * step)); do
        launch 1
        rm -rf out
        { timeout 60 strace -f -qq -o trace -e "trace=$call" -e "inject=$call:$what:when=$n" "${as[@]}" >out.out 2>out.err </dev/null; } 2>/dev/null
        code=$?
        grep -qE 'INJECTED|killed by SIGKILL' trace || break
        struck=$((struck + 1))
        case $what:$code in
            # a refused call: the run goes on, or cannot begin (73), or its last save failed (74)
            error=*:0 | error=*:73 | error=*:74 | signal=*:137) ;;
            *) bad "$call $what $n: exit code $code: $(tail -n 1 out.err)" ;;
        esac
        resume_and_compare "$call $what at call $n" 1
    done
    [ "$struck" -gt 0 ] || [ "$part" -gt 1 ] || bad "$call: the program never made this call"
    echo "$call $what: struck $struck times, after $SECONDS s"
}

# ---------------------------------------------------------------------------------------------------------------------
# Kills at random instants

seed=${CRASH_SEED:-$$}
RANDOM=$((seed + part - 1)) # the parts draw numbers of their own
updates() {
    local n
    n=$(grep -ac '"grad_norm"' out/log.jsonl 2>/dev/null)
    echo "${n:-0}"
}
# Kills all processes of a session at once, or ($2) one of its ranks, and waits until all are gone: the next run needs the folder's lock.
kill_run() { # SESSION ONE?
    local i list one
    mapfile -t list < <(pgrep -s "$1")
    if [ -n "$2" ]; then
        mapfile -t one < <(pgrep -s "$1" -x "$(basename -- "$binary" | head -c 15)")
        [ ${#one[@]} -gt 0 ] && list=("${one[RANDOM % ${#one[@]}]}")
    fi
    kill -9 "${list[@]}" 2>/dev/null
    for ((i = 0; i < 300; i++)); do
        [ -n "$(pgrep -s "$1")" ] || break
        sleep 0.05
    done
    [ "$i" -lt 300 ] || bad "15 s after the kill there is still $(pgrep -a -s "$1" | head -n 1)"
    wait "$1" 2>/dev/null
}

# A run that is killed $1 times and then comes to its end, or sooner. Fails at most once. Adds the kills to $made.
made=0
random_chain() { # KILLS
    local layouts=(2 1 2 3) killed=0 k n pid durable until i problem='' told='' one
    rm -rf out
    for ((k = 0; k <= $1; k++)); do
        n=${layouts[k % 4]}
        durable=$(acknowledged out/log.jsonl)
        [ $((RANDOM % 2)) -eq 0 ] && background=true || background=false
        launch "$n" run.steps=300 run.checkpoint_every=3 checkpoint.writer.decoupled=$background
        until=$(($(updates) + RANDOM % 30)) one=
        [ $((RANDOM % 3)) -eq 0 ] && one=yes
        told+=" $n ranks (background: $background)"
        if [ "$k" -eq "$1" ]; then
            timeout 120 "${as[@]}" >resume.out 2>resume.err </dev/null || problem="exit code $?: $(tail -n 1 resume.err)"
        else
            setsid "${as[@]}" >resume.out 2>resume.err </dev/null &
            pid=$! running=$!
            if [ $((k % 5)) -ne 4 ]; then for ((i = 0; i < 1000 && $(updates) < until; i++)); do sleep 0.01; done; fi # else it has hardly begun
            sleep "0.0$((RANDOM % 5))$((RANDOM % 10))"
            if ! kill -0 "$pid" 2>/dev/null; then
                wait "$pid" || problem="exit code $? before the kill: $(tail -n 1 resume.err)"
                running=
                break
            fi
            kill_run "$pid" "$one"
            running=
            killed=$((killed + 1))
            told+=" until update $(updates)${one:+, one of them},"
        fi
        # the last one was not killed: it has said where it resumed
        [ -n "$problem" ] || problem=$(resumed_wrongly "$durable" "$([ "$k" -eq "$1" ] && echo 1 || grep -c 'resumed from' resume.out)")
        [ -z "$problem" ] || break
    done
    losses out/log.jsonl >parts.losses
    if [ -z "$problem" ]; then
        problem=$(agree long.losses parts.losses)
        problem=${problem:+other losses: $problem}
    fi
    if [ -n "$problem" ]; then bad "killed at random:$told: $problem"; else passed=$((passed + killed)); fi
    made=$((made + killed))
}

# ---------------------------------------------------------------------------------------------------------------------

several=yes
command -v mpirun >/dev/null && [[ $(ldd "$binary") == *libmpi* ]] || { several=''; skip "several ranks: this build has no MPI, or there is no mpirun"; }
traced=yes
command -v strace >/dev/null && strace -o /dev/null true 2>/dev/null || { traced=''; skip "strikes by strace: there is none here"; }
cc -shared -fPIC -O1 -Wall -Wextra "$root/tests/save_fault.c" -o save_fault.so -ldl || { bad "tests/save_fault.c does not compile"; finish; }

"$binary" -c config.json run.output_dir=whole >whole.out 2>&1 </dev/null || { cat whole.out; bad "the undisturbed run"; finish; }
losses whole/log.jsonl >whole.losses
whole=$(cd whole/checkpoints && ls -A | tr '\n' ' ')
"$binary" -c config.json run.output_dir=long run.steps=300 run.checkpoint_every=300 >whole.out 2>&1 </dev/null || { cat whole.out; bad "the undisturbed long run"; finish; }
losses long/log.jsonl >long.losses

if [ "$mode" != long ]; then
    kills_in_saves 1 0 false 5
    kills_in_saves 1 0 true 7
    if [ -n "$several" ]; then
        kills_in_saves 2 1 false 4
        kills_in_saves 2 1 true 5
        kills_in_saves 2 0 false 16
        kills_in_saves 2 0 true 19
        kills_in_saves 3 2 true 11
    fi
    if [ -n "$traced" ]; then # before the first save, too
        strike mkdirat signal=SIGKILL 1
        strike openat signal=SIGKILL 13
        strike write signal=SIGKILL 5
        for call in mkdirat fallocate renameat renameat2 unlinkat; do strike "$call" error=EIO 1; done
        strike fsync error=EIO 3
        strike pwrite64 error=ENOSPC 3
        strike pwrite64 error=EIO 4
    fi
fi
if [ -n "$several" ]; then
    echo "random kills, CRASH_SEED=$seed"
    while [ "$made" -lt "$kills" ] && [ "$failed" -lt 10 ]; do random_chain 5 2>noise; done
    echo "$made kills at random instants, after $SECONDS s"
fi
finish
