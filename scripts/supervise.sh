#!/usr/bin/env bash
# supervise.sh - keeps a training run going: starts it, and starts it again when that may help.
#
#     scripts/supervise.sh [-r RESTARTS] [-d SECONDS] mpirun -n 8 ./train_gpt -c ds_config.json [key=value ...]
#
# The command must end with train_gpt's own arguments. Only exit code 75 (a rank is lost or hangs) and death by a signal are
# answered by a restart, from the newest good checkpoint that this run has saved; every other code is passed on. After RESTARTS
# (3) restarts in a row that brought no new checkpoint the code of the last one is passed on, too.
#
# Open MPI's mpirun does not always end with its ranks (after a network cut between hosts it stays for ever). So once the
# flight recorder of any rank says that it has ended, the launcher has SECONDS (30) before it is killed, and that is a 75.
#
# Signals are handed on. SIGUSR1 saves. SIGTERM, SIGINT, SIGHUP and SIGUSR2 mean stop: the first one finishes the update,
# saves and ends with 0 (mpirun and srun get SIGUSR2, since mpirun kills its ranks a second after SIGTERM), the second one
# ends at once. Nothing is restarted after a stop.
set -uo pipefail

say() { printf 'supervise: %s\n' "$1" >&2; }
usage() { say "$1; usage: scripts/supervise.sh [-r RESTARTS] [-d SECONDS] COMMAND, which ends with train_gpt's arguments"; exit 2; }

restarts=3 deadline=30
while getopts 'r:d:' option; do
    case $option in
        r) restarts=$OPTARG ;;
        d) deadline=$OPTARG ;;
        *) usage "unknown option" ;;
    esac
done
shift $((OPTIND - 1))
[[ $restarts =~ ^[0-9]{1,6}$ ]] || usage "-r $restarts is no number of restarts"
[[ $deadline =~ ^[0-9]{1,6}$ ]] || usage "-d $deadline is no number of seconds"
[ $# -gt 0 ] || usage "no command"
command=("$@")

# ---------------------------------------------------------------------------------------------------------------------
# What the run's folders hold

# The value of a key in the table that --check-config prints, without the quotes and escapes of JSON.
setting() {
    local value
    value=$(sed -nE "s/^$1 = \"(.*)\" +# .*/\1/p" <<<"$table")
    printf '%b' "${value//\\\"/\"}" # %b leaves the backslash before a quote
}

# The checkpoint written last. A folder with such a name is complete: it gets it when all is on disk.
newest_checkpoint() { stat -c '%.Y %i %n' -- "$checkpoints"/step-* 2>/dev/null | sort -n | tail -n 1; }

recorders() { stat -c '%i %n' -- "$output"/flight/rank-* 2>/dev/null; }
# Has a rank of this start ended? Each makes a recorder when it starts; the word at offset 148 tells how it ended.
a_rank_has_ended() { # inodes of the recorders of earlier starts
    local inode recorder end
    while read -r inode recorder; do
        [[ " $1 " != *" $inode "* ]] || continue
        end=$(od -An -tu4 -j148 -N4 -- "$recorder" 2>/dev/null)
        [ "${end:-0}" -ne 0 ] && return 0
    done < <(recorders)
    return 1
}

# ---------------------------------------------------------------------------------------------------------------------
# One start

stopping=0 # stop signals so far
pid=''     # of the command, which leads a session of its own: a terminal's Ctrl-C reaches only this script

hand_on() { [ -n "$pid" ] && kill "-$1" "$pid" 2>/dev/null; return 0; }
stop() {
    stopping=$((stopping + 1))
    if [ "$stopping" -gt 1 ]; then
        say "stopping at once"
        hand_on TERM
    else
        say "stopping: the update at hand is finished and saved; a second signal ends the run at once"
        hand_on "$gentle"
    fi
}

# The processes of a session that still live.
session() {
    local stat fields
    for stat in /proc/[0-9]*/stat; do
        { read -r fields <"$stat"; } 2>/dev/null || continue # it is gone
        read -ra fields <<<"${fields##*) }" # state, parent, group, session
        [ "${fields[3]}" = "$1" ] && [ "${fields[0]}" != Z ] && echo "${stat//[^0-9]/}"
    done
}
kill_session() {
    local left
    mapfile -t left < <(session "$1")
    [ ${#left[@]} -eq 0 ] || kill -9 "${left[@]}" 2>/dev/null
}

# What is left of a session after its leader is gone gets a few seconds to leave by itself: a rank notices that its
# launcher is gone. The next start would be refused while a rank of this one holds the folder.
sweep() {
    local i
    for ((i = 0; i < 50; i++)); do
        [ -n "$(session "$1")" ] || return 0
        sleep 0.1
    done
    say "some processes of the run did not end; they are killed"
    kill_session "$1"
    sleep 0.5
}

# Runs a command to its end, and sets $code.
run() {
    local earlier ended='' tick
    earlier=$(recorders | cut -d ' ' -f 1 | tr '\n' ' ')
    setsid "$@" </dev/null &
    pid=$!
    [ "$stopping" -eq 0 ] || hand_on TERM # it came while nothing ran
    code=''
    while [ -z "$code" ]; do
        sleep 1 &
        tick=$!
        wait -n "$pid" "$tick" 2>/dev/null # a signal that is handed on ends this wait, too
        kill "$tick" 2>/dev/null
        if ! kill -0 "$pid" 2>/dev/null; then
            wait "$pid" 2>/dev/null
            code=$?
        elif [ -z "$ended" ]; then
            a_rank_has_ended "$earlier" && ended=$SECONDS
        elif [ $((SECONDS - ended)) -ge "$deadline" ]; then
            say "${1##*/} is still there $deadline s after a rank has ended; it is killed"
            kill_session "$pid"
            wait "$pid" 2>/dev/null
            code=75
        fi
    done
    sweep "$pid"
    pid=''
}

# ---------------------------------------------------------------------------------------------------------------------
# All starts

gentle=TERM
for word in "${command[@]}"; do
    case ${word##*/} in mpirun | mpiexec | orterun | srun) gentle=USR2 ;; esac
done

table=$("${command[@]}" --check-config </dev/null) || exit # which has said why
output=$(setting train_gpt.run.output_dir)
checkpoints=$(setting checkpoint.save_dir)
[ -n "$checkpoints" ] || checkpoints=$output/checkpoints
[ -n "$output" ] || { say "the command with --check-config does not tell its train_gpt.run.output_dir; it must end with train_gpt's arguments"; exit 2; }

trap stop TERM INT HUP USR2
trap 'hand_on USR1' USR1

# Takes out of the command what says where the run begins, so that it can be said anew.
drop_beginning() {
    local word kept=() value_follows=0
    for word in "${command[@]}"; do
        if [ "$value_follows" -eq 1 ]; then value_follows=0; continue; fi
        case $word in
            --load_dir | --load_tag) value_follows=1 ;;
            --load_dir=* | --load_tag=*) ;;
            *) kept+=("$word") ;;
        esac
    done
    command=("${kept[@]}")
}

first=$(newest_checkpoint)
before=$first
in_vain=0 # restarts since the last new checkpoint
resume=()
while :; do
    run "${command[@]}" "${resume[@]}"
    newest=$(newest_checkpoint)
    [ "$newest" = "$before" ] || in_vain=0
    before=$newest
    if [ "$code" -eq 75 ]; then what="a rank is lost or hangs"
    elif [ "$code" -gt 128 ] && [ "$code" -le 192 ]; then what="killed by signal $((code - 128))"
    else exit "$code"; fi
    [ "$stopping" -eq 0 ] || exit "$code"
    if [ "$in_vain" -ge "$restarts" ]; then
        say "code $code ($what); given up: $restarts restarts brought no new checkpoint in $checkpoints"
        exit "$code"
    fi
    in_vain=$((in_vain + 1))
    # Before its first checkpoint the run begins as it was told to begin; afterwards it goes on from its own, wherever it began.
    if [ "$newest" != "$first" ]; then
        resume=(run.resume=auto --load_dir "$checkpoints" --load_tag auto)
        drop_beginning
    fi
    say "code $code ($what); restart $in_vain of at most $restarts without a new checkpoint${newest:+, the newest is ${newest##*/}}"
done
