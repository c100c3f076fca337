#!/usr/bin/env bash
# test_supervise.sh - scripts/supervise.sh with a stand-in program, then with the trainer under mpirun:
#     tests/test_supervise.sh [build/cpu/train_gpt] [row ...]
#
# The stand-in does at its n-th start what the n-th line of the file `plan` says, and leaves its arguments in `starts`. What this
# machine cannot do is skipped with its reason. The last line is "N passed, N failed, N skipped".
set -uo pipefail
root=$(realpath -- "$(dirname "$0")/..")
export LC_ALL=C.UTF-8 OMP_NUM_THREADS=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
unset DEEPSPEED_TIMEOUT WORLD_SIZE RANK LOCAL_RANK
trainer=''
if [ -f "${1:-}" ]; then trainer=$(realpath -- "$1"); shift; fi
want=("$@")
source "$root/tests/shell_rows.sh"

supervise=$root/scripts/supervise.sh

# ---------------------------------------------------------------------------------------------------------------------
# The stand-in

write_standin() {
    cat >"$1" <<'SH'
#!/usr/bin/env bash
# Lines of the plan: "exit N", "signal N", "wait" (for signals, which it writes down; SIGTERM and SIGUSR2 end it); before them
# "save N", "leave" (a process stays behind), "record" (the recorder says that a rank has ended).
output=${OUTPUT:-out}
for argument in "$@"; do
    if [ "$argument" = --check-config ]; then
        [ ! -e refuse ] || { echo "error: refused" >&2; exit 2; }
        [ -e silent ] || printf 'train_gpt.run.output_dir = "%s"   # file, line 2\ncheckpoint.save_dir = ""   # default\n' "${output//\"/\\\"}"
        exit 0
    fi
done
echo "$*" >>starts
mkdir -p "$output/flight" "$output/checkpoints"
[ ! -e "$output/flight/rank-0" ] || mv "$output/flight/rank-0" "$output/flight/rank-0.old"
head -c 4096 /dev/zero >"$output/flight/rank-0"
read -ra words < <(sed -n "$(wc -l <starts)p" plan)
set -- "${words[@]}"
while [ $# -gt 0 ]; do
    case $1 in
        save) mkdir -p "$output/checkpoints/step-$(printf %08d "$2")"; shift ;;
        leave) sleep 300 & echo $! >left ;;
        record) printf '\002' | dd of="$output/flight/rank-0" bs=1 seek=148 conv=notrunc status=none ;;
        exit) exit "$2" ;;
        signal) kill "-$2" $$; sleep 5 ;;
        wait)
            trap 'echo USR1 >>signals' USR1
            trap 'echo USR2 >>signals; [ -n "${SAVES_LONG:-}" ] || exit ${ENDS_WITH:-0}' USR2
            trap 'echo TERM >>signals; exit ${ENDS_WITH:-0}' TERM
            touch waits
            for ((i = 0; i < 600; i++)); do sleep 0.05; done ;;
        *) exit 99 ;;
    esac
    shift
done
SH
    chmod +x "$1"
}

# supervised CODE OPTIONS...: runs the stand-in by ./plan under supervision, which must end with the code.
supervised() {
    local wanted=$1 code
    shift
    write_standin standin
    rm -f starts
    timeout 60 "$supervise" "$@" ./standin -c config.json >out.txt 2>err </dev/null
    code=$?
    equal "exit code ($(tail -n 2 err | head -c 300))" "$code" "$wanted"
}
starts() { wc -l <starts; }
plan() { printf '%s\n' "$@" >plan; }
wait_for() { # FILE
    local i
    for ((i = 0; i < 300; i++)); do [ -e "$1" ] && return 0; sleep 0.05; done
    fail "$1 did not appear"
    return 1
}
# Starts the stand-in as ./$1 under supervision in the background, and waits until it waits. Leaves $pid. A shell cannot trap what was
# ignored when it began, as SIGHUP is under nohup, which the tests may run under.
in_background() {
    write_standin "$1"
    env --default-signal=HUP "$supervise" "./$1" -c config.json >out.txt 2>err </dev/null &
    pid=$!
    started+=("$pid")
    wait_for waits
}

row_codes_that_are_passed_on() {
    local code
    for code in 0 1 2 65 66 70 73 74 76 126 127; do
        plan "exit $code" "exit 0"
        supervised "$code"
        equal "starts after code $code" "$(starts)" 1
    done
}

row_restarts() {
    plan "exit 75" "signal 9" "save 5 signal 11" "save 6 exit 75" "exit 0"
    supervised 0
    equal "starts" "$(cat starts)" "-c config.json
-c config.json
-c config.json
-c config.json run.resume=auto --load_dir out/checkpoints --load_tag auto
-c config.json run.resume=auto --load_dir out/checkpoints --load_tag auto"
    says "code 137 (killed by signal 9); restart 2 of at most 3 without a new checkpoint"
    says "code 139 (killed by signal 11); restart 1 of at most 3 without a new checkpoint, the newest is step-00000005"
}

# Checkpoints of an earlier run are none of this one's.
row_checkpoints_of_an_earlier_run() {
    mkdir -p out/checkpoints/step-00000900
    plan "exit 75" "save 10 exit 75" "exit 0"
    supervised 0
    equal "starts" "$(cat starts)" "-c config.json
-c config.json
-c config.json run.resume=auto --load_dir out/checkpoints --load_tag auto"
}

# The command's own beginning counts until the run has a checkpoint.
row_command_with_a_beginning() {
    plan "exit 75" "save 5 exit 75" "exit 0"
    write_standin standin
    rm -f starts
    timeout 60 "$supervise" ./standin --load_tag step-00000004 -c config.json --load_dir=elsewhere >out.txt 2>err </dev/null
    equal "exit code" $? 0
    equal "starts" "$(cat starts)" "--load_tag step-00000004 -c config.json --load_dir=elsewhere
--load_tag step-00000004 -c config.json --load_dir=elsewhere
-c config.json run.resume=auto --load_dir out/checkpoints --load_tag auto"
}

row_gives_up() {
    plan "exit 75" "exit 75" "exit 75" "exit 75" "exit 0"
    supervised 75
    equal "starts" "$(starts)" 4
    says "given up: 3 restarts brought no new checkpoint in out/checkpoints"
    plan "exit 75" "exit 75" "exit 75" "save 1 exit 75" "exit 75" "exit 75" "signal 9" "exit 0"
    supervised 137
    equal "starts with a checkpoint in between" "$(starts)" 7
    plan "exit 75" "exit 0"
    supervised 75 -r 0
    equal "starts without restarts" "$(starts)" 1
}

row_signals_are_handed_on() {
    local pid
    plan "wait"
    in_background standin || return
    kill -USR1 "$pid"
    wait_for signals || return
    kill -TERM "$pid"
    wait "$pid"
    equal "exit code after SIGTERM" $? 0
    equal "signals" "$(tr '\n' ' ' <signals)" "USR1 TERM "
    rm -f waits signals starts
    in_background mpirun || return # which would kill its ranks a second after SIGTERM
    kill -TERM "$pid"
    wait "$pid"
    equal "exit code of mpirun" $? 0
    equal "signals to mpirun" "$(tr '\n' ' ' <signals)" "USR2 "
    says "the update at hand is finished and saved"
}

row_no_restart_after_a_stop() {
    local pid
    plan "wait" "exit 0"
    export ENDS_WITH=75
    in_background standin || return
    kill -HUP "$pid"
    wait "$pid"
    equal "exit code" $? 75
    equal "starts" "$(starts)" 1
    unset ENDS_WITH
}

row_second_signal() {
    local pid
    plan "wait"
    export SAVES_LONG=1
    in_background mpirun || return
    kill -TERM "$pid"
    wait_for signals || return
    expect "it waits for the save" kill -0 "$pid"
    kill -TERM "$pid"
    wait "$pid"
    equal "exit code" $? 0
    equal "signals" "$(tr '\n' ' ' <signals)" "USR2 TERM "
    unset SAVES_LONG
}

# The launcher stays although a rank has ended.
row_deadline() {
    plan "record wait" "exit 0"
    supervised 0 -d 1
    equal "starts" "$(starts)" 2
    says "standin is still there 1 s after a rank has ended; it is killed"
    plan "record exit 75" "record exit 2" # ends in time
    supervised 2 -d 20
    says_not "killed"
}

# What the recorders of an earlier start say is no end of a rank of this one.
row_recorders_of_an_earlier_start() {
    local pid
    mkdir -p out/flight
    printf '%148s\002%3999s' '' '' >out/flight/rank-7
    plan "wait"
    in_background standin || return
    sleep 3
    expect "it is left alone" kill -0 "$pid"
    kill -TERM "$pid"
    wait "$pid"
    equal "exit code" $? 0
}

row_nothing_is_left_behind() {
    plan "leave exit 75" "exit 0"
    supervised 0
    says "some processes of the run did not end; they are killed"
    expect "the process that stayed has ended" test -z "$(tr -d '\0' <"/proc/$(cat left)/cmdline" 2>/dev/null)"
}

row_names_of_folders() {
    export OUTPUT='a "folder" of runs'
    plan "save 1 exit 75" "exit 0"
    supervised 0
    expect "the checkpoints are found: $(tail -n 1 starts)" grep -qF -- '--load_dir a "folder" of runs/checkpoints' starts
    unset OUTPUT
}

row_refusals() {
    plan "exit 0"
    supervised 2 -x
    supervised 2 -r many
    says "is no number of restarts"
    timeout 20 "$supervise" 2>err
    equal "exit code without a command" $? 2
    says "no command"
    touch silent
    supervised 2
    says "does not tell its train_gpt.run.output_dir"
    touch refuse
    supervised 2
    says "error: refused"
    expect "nothing was started" test ! -e starts
}

# ---------------------------------------------------------------------------------------------------------------------
# The trainer

need_trainer() {
    if [ -z "$trainer" ]; then skip "no trainer is named"; return 1; fi
    if [[ $(ldd "$trainer") != *libmpi* ]] || ! command -v mpirun >/dev/null; then skip "this build has no MPI"; return 1; fi
}
descendants() {
    local child
    for child in $(pgrep -P "$1"); do echo "$child"; descendants "$child"; done
}
ranks() { for p in $(descendants "$pid"); do grep -qz '^OMPI_COMM_WORLD_RANK=' "/proc/$p/environ" 2>/dev/null && echo "$p"; done; }
# Starts two ranks under supervision in the background; leaves $pid, and waits for so many updates in the log.
train_in_background() { # UPDATES SETTINGS...
    local updates=$1
    shift
    "$supervise" mpirun -n 2 "$trainer" -c config.json zero_optimization.stage=2 "$@" >out 2>err </dev/null &
    pid=$!
    started+=("$pid")
    wait_for_steps out_dir/log.jsonl "$updates" "$pid" || fail "no updates: $(tail -n 3 err)"
}

row_trainer_is_killed_and_stopped() {
    need_trainer || return
    local pid
    mpirun -n 2 "$trainer" -c config.json zero_optimization.stage=2 run.steps=3000 run.output_dir=whole >out 2>err </dev/null
    equal "exit code of the undisturbed run" $? 0
    train_in_background 300 run.steps=3000 run.checkpoint_every=100
    kill -9 "$(ranks | head -n 1)"
    wait_for_steps out_dir/log.jsonl $(($(logged_steps out_dir/log.jsonl) + 500)) "$pid"
    kill -STOP "$(ranks | tail -n 1)" # the other finds out after 5 s
    wait "$pid"
    equal "exit code" $? 0
    says "code 137 (killed by signal 9); restart 1"
    says "code 75 (a rank is lost or hangs); restart 1"
    curve whole/log.jsonl >whole.curve
    curve out_dir/log.jsonl >parts.curve
    equal "updates" "$(wc -l <parts.curve)" 3000
    expect "the curve is the undisturbed run's: $(diff whole.curve parts.curve | head -n 3)" cmp whole.curve parts.curve
}

row_trainer_without_new_checkpoints() {
    need_trainer || return
    local pid i
    train_in_background 5 run.steps=1000000
    for ((i = 0; i < 100; i++)); do
        kill -0 "$pid" 2>/dev/null || break
        kill -9 "$(ranks | head -n 1)" 2>/dev/null
        sleep 0.5
    done
    kill -TERM "$pid" 2>/dev/null
    wait "$pid"
    equal "exit code" $? 137
    says "given up: 3 restarts brought no new checkpoint"
}

row_trainer_is_refused() {
    need_trainer || return
    timeout 60 "$supervise" mpirun -n 2 "$trainer" -c config.json bla=3 >out 2>err </dev/null
    equal "exit code of a bad key" $? 2
    timeout 60 "$supervise" mpirun -n 2 "$trainer" -c config.json data.train=none.txt >out 2>err </dev/null
    equal "exit code without data" $? 65
    says_not "restart"
}

row_trainer_is_told_to_stop() {
    need_trainer || return
    local pid
    train_in_background 20 run.steps=1000000
    kill -TERM "$pid"
    wait "$pid"
    equal "exit code" $? 0
    says_not "restart"
    prints "is finished, saving"
    expect "a checkpoint" compgen -G 'out_dir/checkpoints/step-*'
}

# A launcher that stays after its ranks are gone, as mpirun does when the network between its hosts is cut.
row_trainer_and_a_launcher_that_stays() {
    need_trainer || return
    local pid
    printf '%s\n' '#!/usr/bin/env bash' "$(command -v mpirun) \"\$@\"" 'code=$?' '[ $code -eq 0 ] || sleep 300' 'exit $code' >launcher
    chmod +x launcher
    "$supervise" -d 3 ./launcher -n 2 "$trainer" -c config.json run.steps=2000 run.checkpoint_every=100 >out 2>err </dev/null &
    pid=$!
    started+=("$pid")
    wait_for_steps out_dir/log.jsonl 300 "$pid"
    kill -9 "$(ranks | head -n 1)"
    wait "$pid"
    equal "exit code" $? 0
    says "launcher is still there 3 s after a rank has ended; it is killed"
    says "code 75 (a rank is lost or hangs); restart 1"
}

run_rows supervise "${BASH_SOURCE[0]}"
