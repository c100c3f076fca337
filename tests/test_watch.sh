#!/usr/bin/env bash
# test_watch.sh - ranks that die, stop, loop, come late or never, and links that break:
#     tests/test_watch.sh [long] [build/cpu/train_gpt] [row ...]
#
# Drives tests/watch_ranks.cpp, a trainer without a model: forked ranks (no MPI needed), the same under mpirun, two hosts
# made of network namespaces, and the trainer if it is named. Each row states who is named, with which code everybody leaves, and within which time;
# a row that compared nothing fails, and what this machine cannot do is skipped with its reason. Times are the promises of
# docs/watchdog.md. On a machine that others use as well one of them may be missed for no fault of ours: a row that
# missed only a time is tried up to three times. "long": more repetitions, and the limits as they are by default.
# The last line is "N passed, N failed, N skipped".
set -uo pipefail
root=$(realpath -- "$(dirname "$0")/..")
export LC_ALL=C.UTF-8 OMP_NUM_THREADS=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
unset OMPI_COMM_WORLD_RANK RANK SLURM_PROCID

long=0
if [ "${1:-}" = long ]; then long=1; shift; fi
trainer=''
if [ -f "${1:-}" ]; then trainer=$(realpath -- "$1"); shift; fi # a copy of it is run: it may be built anew meanwhile
want=("$@")
base=$(mktemp -d "${TMPDIR:-/tmp}/test_watch.XXXXXX")
namespaces=()
cleanup() {
    local n
    for n in "${namespaces[@]}"; do ip netns del "$n" 2>/dev/null; done
    cd / && umount "$base"/*/small 2>/dev/null
    rm -rf -- "$base"
}
trap cleanup EXIT
begin=$SECONDS
if [ -n "$trainer" ]; then cp -- "$trainer" "$base/train_gpt" && trainer=$base/train_gpt; fi

# ---------------------------------------------------------------------------------------------------------------------
# The frame

source "$root/tests/shell_checks.sh"
late='' figures=''
says() { # RUN TEXT: its standard error holds this
    compared=$((compared + 1))
    grep -aqF -- "$2" "$1/err" || fail "standard error of $1 lacks '$2'; it is: $(grep -a '^error' "$1/err" | head -c 400)"
}
lines() { # RUN N: so many errors are reported
    equal "number of error lines of $1 ($(grep -a '^error' "$1/err" | head -c 300))" "$(grep -ac '^error: ' "$1/err")" "$2"
}
within() { # RUN MS: time from the fault to the end of the others
    local ms
    ms=$(sed -nE 's/.*gone_ms=(-?[0-9]+).*/\1/p' "$1/out")
    compared=$((compared + 1))
    if [ -z "$ms" ] || [ "$ms" -lt 0 ]; then fail "$1 measured no time: $(head -c 200 "$1/out")"
    elif [ "$ms" -gt "$2" ]; then late="gone after $ms ms, promised $2"
    fi
    times+=("${ms:-0}")
}
codes() { # RUN CODES
    equal "codes of $1 ($(grep -a '^error' "$1/err" | head -n 1 | head -c 300))" "$(sed -nE 's/.*codes=([0-9,-]+).*/\1/p' "$1/out")" "$2"
}

# Starts watch_ranks with forked ranks in a folder of its own; collect waits for it.
declare -A pid_of
times=()
spawn() { # RUN SETTINGS...
    local run=$1
    shift
    rm -rf -- "$run"
    mkdir -- "$run"
    (cd "$run" && exec timeout -k 5 150 "$base/ranks" flight=flight "$@" >out 2>err </dev/null) &
    pid_of[$run]=$!
}
collect() {
    local run
    for run in "$@"; do wait "${pid_of[$run]}" 2>/dev/null; done
}
once() { spawn "$@" && collect "$1"; }

spread() { # of times: "median 12, longest 30 ms"
    printf '%s\n' "${times[@]}" | sort -n | awk '{ x[NR] = $1 } END { printf "median %d, longest %d ms (%d)", x[int((NR + 1) / 2)], x[NR], NR }'
}

row() { # NAME: runs the function of that name
    local name=$1 w start=$SECONDS
    if [ ${#want[@]} -gt 0 ]; then
        for w in "${want[@]}"; do [ "$w" = "$name" ] && break; done
        [ "$w" = "$name" ] || return 0
    fi
    for _ in 1 2 3; do
        compared=0 problem='' late='' skip_reason='' figures='' times=()
        mkdir -p "$base/$name" && cd "$base/$name" || exit 1
        "$name"
        cd "$base" || exit 1
        if [ -z "$late" ] || [ -n "$problem" ]; then break; fi
    done
    if [ -n "$late" ]; then fail "$late, three times"; fi
    if [ -n "$skip_reason" ]; then echo "skip $name: $skip_reason"; skipped=$((skipped + 1)); return; fi
    [ "$compared" -eq 0 ] && fail "compared nothing"
    [ ${#times[@]} -gt 0 ] && figures="; gone: $(spread)"
    if [ -n "$problem" ]; then echo "FAIL $name: $problem"; failed=$((failed + 1))
    else echo "ok   $name: $compared compared$figures; $((SECONDS - start)) s"; passed=$((passed + 1)); fi
}

# ---------------------------------------------------------------------------------------------------------------------
# Ends that are none

normal_ends() { # no false alarm at the end, whoever is last
    local i n=$((long ? 500 : 100))
    for i in $(seq "$n"); do
        once end ranks=4 steps=$((i % 7)) work_ms=1
        codes end 0,0,0,0
        equal "bytes on standard error of run $i ($(head -c 200 end/err))" "$(wc -c <end/err)" 0
        [ -n "$problem" ] && return
    done
}
late_end() { # three ranks have finished, the fourth works on, in an announced phase
    once end ranks=4 steps=20 target=2 fault=late_end late_end_ms=3000 floor=1
    codes end 0,0,0,0
    lines end 0
}
disturbances() { # a rank stopped for 2 s, again and again; all of them for longer than the limit of silence; a long phase
    local n=$((long ? 10 : 4)) r
    for r in 0 3; do spawn "rank$r" ranks=4 steps=1000000 work_ms=2 signal=STOPCONT target=$r times="$n" cont_ms=2000 after_ms=300; done
    spawn all ranks=4 steps=1000000 signal=STOPALL cont_ms=8000 after_ms=300 floor=2 # Ctrl-Z, a laptop that sleeps
    spawn evaluation ranks=4 steps=60 evaluate_ms=5000 floor=1 first=1               # five times the limit, announced
    for r in rank0 rank3 all evaluation; do
        collect $r
        codes $r 0,0,0,0
        lines $r 0
    done
    for r in 0 3; do expect "deadlines of rank $r were moved at each stop" grep -qE "lateness=($n|[0-9]{2,})\$" "rank$r/out"; done
}
slow_rank() { # named, never killed
    once run ranks=4 steps=200 work_ms=12 target=2 fault=slow at_step=30
    codes run 0,0,0,0
    lines run 0
    says run "note: rank 2 on"
    equal "ranks noted as slow" "$(grep -c '^note: rank' run/err)" 1
    local ratio
    ratio=$(sed -nE 's/.* ([0-9.]+) times the median.*/\1/p' run/err)
    compared=$((compared + 1))
    awk -v r="$ratio" 'BEGIN { exit !(r > 1.3 && r < 3) }' || fail "ratio of a rank that takes twice as long is $ratio"
}
under_load() { # eight busy loops beside the ranks
    local i busy=()
    for i in 1 2 3 4 5 6 7 8; do timeout 60 sh -c 'while :; do :; done' & busy+=($!); done
    once run ranks=4 steps=1500 work_ms=2 floor=5
    spawn stop ranks=4 steps=100000 signal=STOP target=1
    collect stop
    kill "${busy[@]}" 2>/dev/null
    wait "${busy[@]}" 2>/dev/null
    codes run 0,0,0,0
    lines run 0
    codes stop 75,75,75,75
    within stop 8000
}
one_rank() { # recorder and ceiling, no sockets
    spawn run ranks=1 steps=300 work_ms=5
    sleep 0.7
    local pid
    pid=$(pgrep -P "$(pgrep -P "${pid_of[run]}" -x ranks)" -x ranks)
    equal "sockets of a single rank" "$(find "/proc/$pid/fd" -lname 'socket:*' 2>/dev/null | wc -l)" 0
    expect "it has a recorder" test -s run/flight/rank-0
    collect run
    codes run 0
    lines run 0
    once loop ranks=1 target=0 fault=loop ceiling=1.5
    codes loop 75
    within loop 3000
    says loop "error: rank 0 on"
    says loop "makes no progress"
}

# ---------------------------------------------------------------------------------------------------------------------
# Faults of processes

kill_any() { # kill -9 of any rank at any instant
    local i r n=$((long ? 500 : 30)) codes=("137,75,75,75" "75,137,75,75" "75,75,137,75" "75,75,75,137")
    for i in $(seq "$n"); do
        r=$((RANDOM % 4))
        once run ranks=4 steps=100000 signal=KILL target=$r after_ms=$((RANDOM % 700)) gpu=$((i % 2))
        codes run "${codes[r]}"
        within run 1000
        lines run 1
        says run "error: rank $r on"
        says run "is gone"
        [ -n "$problem" ] && return
    done
}
launcher_dies() { # kill -9 of the parent of all: none trains on
    spawn run ranks=3 steps=1000000 launcher=1
    local parent pids i left
    for i in $(seq 100); do [ "$(find run/flight -name 'rank-?' 2>/dev/null | wc -l)" -eq 3 ] && break; sleep 0.05; done
    parent=$(pgrep -P "${pid_of[run]}" -x ranks)
    pids=$(pgrep -P "$parent")
    equal "ranks" "$(wc -w <<<"$pids")" 3
    kill -9 "$parent"
    local start=$EPOCHREALTIME ms
    for i in $(seq 200); do
        left=0
        for p in $pids; do grep -qs '^State:.[^ZX]' "/proc/$p/status" && left=$((left + 1)); done
        [ $left -eq 0 ] && break
        sleep 0.02
    done
    ms=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%d", 1e3 * (b - a) }')
    equal "ranks that are left" "$left" 0
    if [ "$ms" -gt 1500 ]; then late="gone after $ms ms, promised 1500"; fi
    times+=("$ms")
    collect run
    says run "error: the launcher (pid $parent on"
    lines run 1
}
where_it_died() { # the recorder of the dead rank says where it was
    once run ranks=4 target=2 fault=kill at_step=57
    says run "it was at step 57, micro-batch 0, forward, outside collectives"
    once two ranks=4 target=3 fault=kill_inside at_step=41
    says two "it was at step 41, micro-batch 0, backward, in all_reduce 42 of unit 5 (4096 bytes)"
}
stop_each() { # the process, or its beat thread alone
    local r frozen=''
    for r in 0 1 2 3; do spawn "rank$r" ranks=4 steps=100000 signal=STOP target=$r after_ms=$((300 + 37 * r)); done
    if grep -qE '^[01]$' /proc/sys/kernel/yama/ptrace_scope 2>/dev/null || [ ! -e /proc/sys/kernel/yama/ptrace_scope ]; then frozen='0 2'; fi
    for r in $frozen; do spawn "frozen$r" ranks=4 steps=100000 signal=FREEZE target="$r"; done
    for r in 0 1 2 3; do
        collect "rank$r"
        codes "rank$r" 75,75,75,75 # the stopped rank too, once it is woken
        within "rank$r" 8000
        lines "rank$r" 1
        says "rank$r" "error: rank $r on"
        says "rank$r" "has been silent for"
    done
    for r in $frozen; do
        collect "frozen$r"
        codes "frozen$r" "$([ "$r" = 0 ] && echo 137,75,75,75 || echo 75,75,137,75)"
        within "frozen$r" 8000
        says "frozen$r" "error: rank $r on"
    done
}
loop_each() { # one rank computes for ever
    local r limit=$((long ? 10 : 2))
    for r in 0 1 2 3; do spawn "rank$r" ranks=4 steps=100000 fault=loop target=$r at_step=$((100 + 10 * r)) floor=$limit gpu=$((r % 2)); done
    for r in 0 1 2 3; do
        collect "rank$r"
        codes "rank$r" 75,75,75,75
        within "rank$r" $((1000 * limit + 1000))
        lines "rank$r" 1
        says "rank$r" "error: rank $r on"
        says "rank$r" "makes no progress"
        says "rank$r" "it was at step $((100 + 10 * r)), micro-batch 0, forward"
        says "rank$r" "others wait for it in all_reduce $((101 + 10 * r)) of unit"
    done
}
stuck_otherwise() {
    spawn network ranks=4 steps=1000 fault=network floor=1.5
    spawn order ranks=4 steps=1000 fault=order target=1 floor=1.5
    spawn ceiling ranks=4 steps=1000 fault=loop target=3 ceiling=2
    spawn first ranks=4 steps=1000 fault=loop target=2 at_step=0 first=3 floor=1
    spawn announced ranks=4 steps=1000 fault=stuck_evaluation target=1 floor=1
    collect network order ceiling first announced
    codes network 75,75,75,75
    within network 2500
    says network "error: communication is stuck: all ranks have entered all_reduce 11 of unit 10 (4096 bytes) at step 10"
    codes order 75,75,75,75
    within order 2500
    says order "error: rank 1 on"
    says order "in broadcast 1"
    says order "others wait for it in all_reduce"
    codes ceiling 75,75,75,75
    within ceiling 3000
    says ceiling "error: rank 3 on"
    codes first 75,75,75,75
    within first 4000
    says first "error: rank 2 on"
    codes announced 75,75,75,75
    within announced 4000
    says announced "error: rank 1 on"
    says announced "evaluation"
}
leaves_early() { # _exit(0) in mid-run
    once rank0 ranks=4 target=0 fault=exit
    once rank3 ranks=4 target=3 fault=exit
    codes rank0 0,75,75,75
    codes rank3 75,75,75,0
    within rank0 1000
    within rank3 1000
    says rank0 "error: rank 0 on"
    says rank3 "error: rank 3 on"
    lines rank3 1
}
crashes() {
    local r name
    if [[ ${CXXFLAGS:-} == *sanitize=address* ]]; then skip "AddressSanitizer has handlers of its own"; return; fi
    for r in 0 2; do
        for name in segv abort; do
            once run ranks=4 target=$r fault=$name
            codes run "$([ $name = segv ] && c=139 || c=134; [ $r = 0 ] && echo "$c,75,75,75" || echo "75,75,$c,75")"
            within run 1000
            lines run 1
            says run "error: rank $r on"
            says run "crashed by SIG"
            expect "a backtrace follows" grep -q '(+0x[0-9a-f]*)\[0x' run/err
        done
    done
}
own_error() { # a rank that ends through die: all leave with its code, and nobody calls it lost
    local r
    for r in 0 2; do
        once run ranks=4 target=$r fault=die
        codes run 74,74,74,74
        within run 1000
        lines run 1
        says run "error: cannot write shard 7: No space left on device"
    done
}
crash_at_the_end() { # in a library's thread, when all is done: MPI_Finalize does that now and then
    if [[ ${CXXFLAGS:-} == *sanitize=address* ]]; then skip "AddressSanitizer has handlers of its own"; return; fi
    local r
    for r in 0 2; do spawn "rank$r" ranks=4 steps=20 target=$r fault=end_crash; done # the main thread waits for it
    for r in 0 2; do
        collect "rank$r"
        codes "rank$r" 0,0,0,0
        lines "rank$r" 0
        says "rank$r" "note: rank $r: a thread of a library crashed (SIGSEGV) after all work was done"
    done
    if [ -x "$base/mpi_ranks" ]; then
        under_mpirun run steps=20 target=2 fault=end_crash late_end_ms=5
        mpi_code run 0
        lines run 0
    fi
}
never_ends() { # goodbye is said, but the process stays
    once run ranks=3 steps=5 target=1 fault=no_end end=1
    codes run 0,75,0
    says run "its process did not end within"
}
full_pipe() { # nobody reads standard error
    mkfifo pipe
    # shellcheck disable=SC2217
    sleep 20 <pipe &
    local reader=$!
    exec 8>pipe
    head -c 65536 /dev/zero >&8
    mkdir -p run
    (cd run && exec timeout -k 5 30 "$base/ranks" ranks=4 target=1 fault=kill flight=flight >out 2>&8 </dev/null)
    exec 8>&-
    kill $reader 2>/dev/null
    wait $reader 2>/dev/null
    : >run/err
    codes run 75,137,75,75
    within run 1000
    rm -f pipe
}

# ---------------------------------------------------------------------------------------------------------------------
# The start, and who else may come

missing_rank() {
    spawn absent ranks=4 target=2 late_ms=20000 start=2
    spawn hub ranks=4 target=0 late_ms=20000 start=2
    spawn twice ranks=4 target=2 claim=1
    spawn plan ranks=2 fault=disarmed start=0.5 # starts no job: nobody is missing
    collect absent hub twice plan
    codes plan 0,0
    codes absent 75,75,75,75
    says absent "error: rank 2 has not come within 2.0 s"
    codes hub 75,75,75,75
    says twice "says that it is rank 1 of 4, and so does"
    expect "two ranks of one number are refused with code 2 on all who came" grep -qE 'codes=2,2,2,(2|75) ' twice/out
}
strangers() { # 150 of them: silent, random, wrong nonce, half a message, wrong length
    rm -rf run
    spawn run ranks=4 steps=300 work_ms=5 target=2 late_ms=4000
    python3 - run/port >guests <<'PY'
import os, socket, struct, sys, time
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read().endswith("\n"): time.sleep(0.01)
port = int(open(sys.argv[1]).read())
guests = []
def head(size, kind): return struct.pack("<IHH", 0x74616562, size, kind)
for i in range(150):
    s = socket.create_connection(("127.0.0.1", port), 5)
    try:
        s.sendall([b"", os.urandom(300), head(112, 1) + os.urandom(104), head(112, 1) + b"x" * 20, head(65535, 4)][i % 5] or b"")
    except OSError: pass
    guests.append(s)
time.sleep(2.8)
closed = 0
for s in guests:
    s.setblocking(False)
    try: closed += s.recv(1) == b""
    except BlockingIOError: pass
    except OSError: closed += 1
print("closed", closed)
time.sleep(2)
try: socket.create_connection(("127.0.0.1", port), 5); print("open")
except OSError: print("refused")
PY
    collect run
    equal "strangers shown the door within 2.8 s, and the port afterwards" "$(tr '\n' ' ' <guests)" "closed 150 refused "
    codes run 0,0,0,0
    lines run 0
}
garbage() { # from a rank, over its own connection
    once run ranks=4 target=2 fault=garbage steps=100000
    codes run 75,75,75,75
    within run 1000
    says run "error: rank 2 on"
    says run "sent bytes that are no beat"
}
descriptors() { # none is inherited by a program that the process would start
    spawn run ranks=3 steps=400 work_ms=5
    sleep 0.8
    local parent p fd n=0
    parent=$(pgrep -P "${pid_of[run]}" -x ranks)
    for p in $(pgrep -P "$parent"); do
        for fd in /proc/"$p"/fd/*; do
            case $(readlink "$fd" 2>/dev/null) in socket:* | *eventfd*) ;; *) continue ;; esac
            n=$((n + 1))
            expect "$fd is closed on exec" grep -qE '^flags:.*2[0-7]{6}$' "/proc/$p/fdinfo/${fd##*/}"
        done
    done
    expect "sockets and wake-ups were seen ($n)" test "$n" -ge 7
    collect run
}

# ---------------------------------------------------------------------------------------------------------------------
# The recorder

recorder() {
    once run ranks=4 target=2 fault=kill_inside at_step=41
    "$base/ranks" --flight run/flight >printed 2>&1
    equal "exit code of --flight" $? 0
    local text
    for text in "4 of 4 ranks" "rank 2 on" "verdict: rank 2 on" "group 7" "rank 2: queued 42, started 42, done 41; last: all_reduce of unit 5" "rank 2 step 41.0 backward   enters 42 of group 7"; do
        expect "--flight prints '$text'" grep -qF -- "$text" printed
    done
    equal "size of a ring" "$(stat -c %s run/flight/rank-2)" $((4096 + 4096 * 64))
    # a restart keeps the evidence of the crash before it
    (cd run && "$base/ranks" ranks=3 flight=flight steps=5 >out 2>err)
    "$base/ranks" --flight run/flight >printed 2>&1
    expect "the start before is shown" grep -qF "the start before: 4 of 4 ranks" printed
    expect "the present start is shown" grep -qF "run/flight: 3 of 3 ranks" printed
    expect "the verdict before is shown" grep -qF "verdict: rank 2 on" printed
    # 4,096 records and more: the ring holds the newest
    (cd run && "$base/ranks" ranks=2 flight=flight steps=3000 work_ms=0 >out 2>err)
    "$base/ranks" --flight run/flight >printed 2>&1
    expect "the newest records are shown" grep -qF "leaves 3000 of group 7" printed
}
bad_recorders() { # files are not believed
    once run ranks=2 steps=5
    local what bad=0
    for what in truncated empty random magic world fifo link; do
        rm -rf bad && cp -r run/flight bad && rm -f bad/*.old
        case $what in
            truncated) truncate -s 100000 bad/rank-0 ;;
            empty) : >bad/rank-0 ;;
            random) head -c 266240 /dev/urandom >bad/rank-0 ;;
            magic) printf 'x' | dd of=bad/rank-0 conv=notrunc status=none ;;
            world) printf '\377\377\377\177' | dd of=bad/rank-0 bs=1 seek=20 conv=notrunc status=none ;;
            fifo) rm bad/rank-0 && mkfifo bad/rank-0 ;;
            link) rm bad/rank-0 && ln -s /etc/passwd bad/rank-0 ;;
        esac
        timeout 10 "$base/ranks" --flight bad >printed 2>noted
        equal "exit code with a $what recorder" $? 0
        expect "a $what recorder is left out with a note" grep -qE 'note: bad/rank-0: .*left out' noted
        expect "the other recorder is printed" grep -q '^rank 1 on' printed
        [ -n "$problem" ] && bad=1
    done
    python3 - "$base/ranks" <<'PY' || bad=1
import os, random, shutil, subprocess, sys
random.seed(7)
good = open("run/flight/rank-0", "rb").read()
for i in range(60):  # a good head, random contents
    b = bytearray(good)
    for k in range(random.choice([1, 50, 5000])): b[random.randrange(28, len(b))] = random.randrange(256)
    for k in range(random.choice([0, 300])): b[4096 + random.randrange(64 * 30)] = random.randrange(256)
    open("bad/rank-1", "wb").write(good)
    os.path.lexists("bad/rank-0") and os.unlink("bad/rank-0")
    open("bad/rank-0", "wb").write(b)
    r = subprocess.run([sys.argv[1], "--flight", "bad"], capture_output=True, timeout=20)
    if r.returncode not in (0, 65) or b"\x1b" in r.stdout: sys.exit("a spoilt recorder: code %d" % r.returncode)
PY
    equal "spoilt recorders that did harm" $bad 0
    "$base/ranks" --flight /nowhere >printed 2>noted
    equal "exit code without recorders" $? 65
}
no_recorder() { # without its folder, or without room, the rest works on
    mkdir -p run && : >run/file
    (cd run && "$base/ranks" ranks=3 steps=20 flight=file/flight target=1 fault=kill >out 2>err)
    codes run 75,137,75
    says run "no flight recorder there"
    mkdir -p small
    if mount -t tmpfs -o size=300k tmpfs small 2>/dev/null; then
        (cd run && "$base/ranks" ranks=3 steps=20 flight=../small/flight >out 2>err)
        umount small
        codes run 0,0,0
        says run "No space left on device"
    fi
}

# ---------------------------------------------------------------------------------------------------------------------
# Two hosts

make_hosts() { # two namespaces, one cable
    local n=w$$
    if [ ${#namespaces[@]} -gt 0 ]; then return 0; fi
    if [ "$(id -u)" -ne 0 ] || ! command -v ip >/dev/null || ! ip netns add "${n}a" 2>/dev/null; then skip "no network namespaces here"; return 1; fi
    namespaces=("${n}a" "${n}b")
    ip netns add "${n}b"
    if ! ip link add "${n}va" netns "${n}a" type veth peer name "${n}vb" netns "${n}b"; then skip "no veth here"; return 1; fi
    local x
    for x in a b; do
        ip -n "$n$x" link set lo up
        ip -n "$n$x" addr add "10.77.0.$([ $x = a ] && echo 1 || echo 2)/24" dev "${n}v$x"
        ip -n "$n$x" link set "${n}v$x" up
    done
}
link_down() { # for good: both sides leave by themselves
    make_hosts || return
    local n=w$$
    once run ranks=4 netns="${n}a,${n}b" steps=100000 after_ms=600 command="ip -n ${n}b link set ${n}vb down"
    ip -n "${n}b" link set "${n}vb" up
    codes run 75,75,75,75
    within run 8000
    expect "one of the ranks beyond the cut is named ($(grep -a '^error' run/err | head -c 200))" grep -qE '^error: rank [13] on' run/err
    says run "error: rank 0 on"
    lines run 2
}
link_blinks() { # 2 s at a time
    make_hosts || return
    local n=w$$ repeat=$((long ? 10 : 3))
    once run ranks=4 netns="${n}a,${n}b" steps=1000000 after_ms=300 blink=1 \
        command="for i in \$(seq $repeat); do ip -n ${n}b link set ${n}vb down; sleep 2; ip -n ${n}b link set ${n}vb up; sleep 1; done"
    codes run 0,0,0,0
    lines run 0
}
ports_exhausted() { # none is left for the ranks' connections
    make_hosts || return
    local n=w$$ taken
    ip netns exec "${n}a" sh -c 'echo "40000 40001" >/proc/sys/net/ipv4/ip_local_port_range' 2>/dev/null || { skip "the range of ports cannot be set here"; return; }
    ip netns exec "${n}a" python3 -c '
import socket, time
s = []
for port in (40000, 40001):
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "127.0.0.1")):
        x = socket.socket(family)
        try: x.bind((host, port)); x.listen()
        except OSError: pass
        s.append(x)
time.sleep(60)' &
    taken=$!
    sleep 0.5
    once run ranks=3 netns="${n}a" steps=10 start=2
    kill $taken
    wait $taken 2>/dev/null
    ip netns exec "${n}a" sh -c 'echo "32768 60999" >/proc/sys/net/ipv4/ip_local_port_range'
    codes run 75,75,75
    says run "cannot open a port for the other ranks: Address already in use"
    says run "net.ipv4.ip_local_port_range"
}
no_network() { # not even a loopback: one rank trains, several say why they cannot
    if ! unshare -n true 2>/dev/null; then skip "no network namespaces here"; return; fi
    rm -rf run && mkdir run
    (cd run && unshare -n "$base/ranks" ranks=1 steps=20 flight=flight >out 2>err </dev/null)
    codes run 0
    (cd run && unshare -n timeout 20 "$base/ranks" ranks=3 steps=20 start=2 flight=flight >out 2>err </dev/null)
    codes run 75,75,75
    expect "the reason: $(grep -a '^error' run/err | head -n 1 | head -c 200)" grep -qE 'loopback|unreachable|cannot reach' run/err
    if [ -n "$trainer" ]; then
        (cd run && head -c 20000 "$root/zero.cu" >text.txt && unshare -n timeout 30 "$trainer" train_batch_size=2 model.n_layer=1 model.n_head=2 model.n_embd=32 model.n_positions=32 \
            data.train=text.txt run.steps=3 run.output_dir=alone >out 2>err </dev/null)
        equal "exit code of the trainer alone without a network" $? 0
    fi
}
link_loses() { # one packet in twenty
    make_hosts || return
    local n=w$$
    if ip netns exec "${n}b" tc qdisc add dev "${n}vb" root netem loss 5% 2>/dev/null; then
        once run ranks=6 netns="${n}a,${n}b" steps=2500
        ip netns exec "${n}b" tc qdisc del dev "${n}vb" root
    elif command -v iptables >/dev/null && ip netns exec "${n}b" iptables -A INPUT -m statistic --mode random --probability 0.05 -j DROP 2>/dev/null; then
        once run ranks=6 netns="${n}a,${n}b" steps=2500
        ip netns exec "${n}b" iptables -F INPUT
    else skip "neither netem nor iptables' statistic here"; return
    fi
    codes run 0,0,0,0,0,0
    lines run 0
}
link_reset() { # a connection is killed in the network
    make_hosts || return
    local n=w$$
    once run ranks=4 netns="${n}a,${n}b" steps=100000 after_ms=600 command="ip netns exec ${n}a ss -K dst 10.77.0.2"
    if grep -qi 'not supported\|not permitted' run/err || [ ! -s run/out ]; then skip "no ss -K here"; return; fi
    codes run 75,75,75,75
    within run 1000
}
slow_link() {
    make_hosts || return
    local n=w$$
    if ! ip netns exec "${n}b" tc qdisc add dev "${n}vb" root tbf rate 256kbit burst 4kb latency 400ms 2>/dev/null; then skip "no tc tbf here"; return; fi
    once run ranks=6 netns="${n}a,${n}b" steps=2500
    ip netns exec "${n}b" tc qdisc del dev "${n}vb" root
    codes run 0,0,0,0,0,0
    lines run 0
}

# ---------------------------------------------------------------------------------------------------------------------
# Under mpirun

# Runs it with faults of its own; the code, and when the last rank and mpirun ended after the first rank's end. The
# process numbers come from the recorders.
under_mpirun() { # RUN SETTINGS...
    local run=$1
    shift
    if [ ! -x "$base/mpi_ranks" ]; then skip "no mpicxx and mpirun here"; return 1; fi
    rm -rf -- "$run"
    mkdir -- "$run"
    mpirun_times "$run" flight 4 "$base/mpi_ranks" flight=flight "$@"
}
# IN_PHASE="SIGNAL:PHASE:WHOM" sends a signal as soon as the recorder of a rank says that it is in that phase: to that rank, to all
# ranks, or to mpirun (rank 0's phase then).
mpirun_times() { # RUN RECORDERS RANKS COMMAND...
    local run=$1
    shift
    (cd "$run" && python3 - "$@" >out 2>err <<'PY'
import os, signal, struct, subprocess, sys, time
folder, ranks, extra = sys.argv[1], int(sys.argv[2]), os.environ.get("MPIRUN_EXTRA", "").split()
number, phase, whom = (os.environ.get("IN_PHASE") or "::").split(":")
names = ["start", "load", "data", "forward", "backward", "update", "evaluation", "sampling", "save", "end"]
p = subprocess.Popen(["mpirun", "-n", sys.argv[2]] + extra + sys.argv[3:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
pids, gone, sent = {}, {}, 0
def send_if_there(): # spins through the phases, some of which are short
    global sent
    try: head = open(f"{folder}/rank-{whom if whom.isdigit() else 0}", "rb").read(148)
    except OSError: return
    if len(head) < 148 or names[min(9, struct.unpack_from("<I", head, 144)[0])] != phase: return
    if whom == "all" and len(pids) < ranks: return
    for pid in [p.pid] if whom == "mpirun" else pids.values() if whom == "all" else [struct.unpack_from("<i", head, 24)[0]]: os.kill(pid, getattr(signal, "SIG" + number))
    sent = time.time()
def lives(pid):
    try: return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError: return False
end = time.time() + 60
while p.poll() is None and time.time() < end:
    for r in range(ranks):
        if r not in pids:
            try:
                pid = struct.unpack_from("<i", open(f"{folder}/rank-{r}", "rb").read(28), 24)[0]
                if pid: pids[r] = pid
            except (OSError, struct.error): pass
        elif r not in gone and not lives(pids[r]): gone[r] = time.time()
    if phase and not sent:
        send_if_there()
        if time.time() > end - 52: break # missed on a busy machine
    else: time.sleep(0.003)
if p.poll() is None:
    p.kill()
    p.wait()
    if phase and not sent:
        print(f"no rank was seen in phase {phase}", file=sys.stderr)
        for pid in pids.values():
            if lives(pid): os.kill(pid, signal.SIGKILL)
now = time.time()
for r in pids: gone.setdefault(r, now)
first = min(gone.values(), default=now)
while any(lives(pid) for pid in pids.values()) and time.time() < now + (3 if whom == "mpirun" else 1): time.sleep(0.01)
left = sum(lives(pid) for pid in pids.values())
if whom == "mpirun" and number == "KILL": first, gone[0] = now, time.time()
print(f"code={p.returncode} gone_ms={1e3 * (max(gone.values(), default=now) - first):.0f} mpirun_ms={1e3 * (now - first):.0f} left={left}")
PY
    )
    equal "processes left a second after mpirun by $*" "$(sed -nE 's/.*left=([0-9]+).*/\1/p' "$run/out")" 0
}
mpi_code() { equal "exit code of mpirun in $1 ($(grep -aA12 '^error' "$1/err" | head -c 1500))" "$(sed -nE 's/^code=([0-9-]+).*/\1/p' "$1/out")" "$2"; }

mpi_normal() {
    local i n=$((long ? 50 : 5))
    for i in $(seq "$n"); do
        under_mpirun run steps=20 || return
        mpi_code run 0
        lines run 0
    done
}
mpi_faults() { # the time runs from the first rank's end to the last's
    local i r n=$((long ? 50 : 6))
    for i in $(seq "$n"); do
        r=$((RANDOM % 4))
        under_mpirun run steps=100000 fault=kill target=$r at_step=$((RANDOM % 300)) || return
        mpi_code run 137
        within run 1000
        says run "error: rank $r on"
    done
    under_mpirun run steps=1000 fault=segv target=1 at_step=200
    mpi_code run 139
    within run 1000
    under_mpirun run steps=1000 fault=die target=1 at_step=200
    mpi_code run 74
    lines run 1
    within run 1000
    under_mpirun run steps=1000 fault=exit target=2 at_step=200 # mpirun itself gives 1 here: it has seen that end first
    says run "error: rank 2 on"
    within run 1000
    under_mpirun run steps=1000 fault=loop target=3 at_step=200 floor=2
    mpi_code run 75
    says run "error: rank 3 on"
    under_mpirun run steps=1000 fault=before_init target=2 start=2
    mpi_code run 75
    says run "for all ranks to start"
}
mpi_stop() {
    local r
    for r in 0 $([ $long = 1 ] && echo 2); do
        under_mpirun "rank$r" steps=100000 fault=stop target="$r" at_step=200 || return
        mpi_code "rank$r" 75
        lines "rank$r" 1
        says "rank$r" "error: rank $r on"
        says "rank$r" "has been silent"
    done
}
mpi_shim() { # inside MPI, by a library that stands before it
    if [ ! -e "$base/fault.so" ]; then skip "no mpicc and mpirun here"; return; fi
    MPIRUN_EXTRA="-x LD_PRELOAD=$base/fault.so -x WATCH_FAULT=kill:1:150" under_mpirun run steps=1000 || return
    mpi_code run 137
    within run 1000
    says run "fault: kill at collective 150 of rank 1"
    says run "error: rank 1 on"
    says run "it was at step 149, micro-batch 0, backward, in all_reduce 150"
}
mpi_two_hosts() { # mpirun's ranks on both sides of a cut: they leave, mpirun itself does not (the supervisor ends it)
    if [ ! -x "$base/mpi_ranks" ]; then skip "no mpicxx and mpirun here"; return; fi
    make_hosts || return
    local n=w$$ start pids left i
    cat >agent <<AGENT
#!/bin/sh
shift
exec ip netns exec ${n}b unshare -u sh -c "hostname nodeb; \$*"
AGENT
    chmod +x agent
    rm -rf run && mkdir run
    (cd run && WATCH_HOSTS=1 exec setsid ip netns exec "${n}a" unshare -u sh -c "hostname nodea; exec timeout -k 1 40 mpirun -x WATCH_HOSTS -n 4 --map-by node --host nodea:2,10.77.0.2:2 \
        --mca plm_rsh_agent '$base/mpi_two_hosts/agent' --mca btl tcp,self --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24 \
        '$base/mpi_ranks' flight='$base/mpi_two_hosts/run/flight' steps=100000 >out 2>err </dev/null") &
    local job=$!
    disown
    for i in $(seq 150); do [ "$(find run/flight -name 'rank-?' 2>/dev/null | wc -l)" -eq 4 ] && break; sleep 0.1; done
    sleep 1
    pids=$(python3 - run/flight <<'PY'
import glob, struct, sys
print(*[struct.unpack_from("<i", open(f, "rb").read(28), 24)[0] for f in sorted(glob.glob(sys.argv[1] + "/rank-?"))])
PY
    )
    equal "ranks that started ($(tail -n 3 run/err | head -c 300))" "$(wc -w <<<"$pids")" 4
    start=$(date +%s%N)
    ip -n "${n}b" link set "${n}vb" down
    for i in $(seq 200); do
        left=0
        for p in $pids; do grep -qs '^State:.[^ZX]' "/proc/$p/status" && left=$((left + 1)); done
        [ $left -eq 0 ] && break
        sleep 0.05
    done
    local ms=$((($(date +%s%N) - start) / 1000000))
    equal "ranks that are left after the cut" "$left" 0
    if [ $ms -gt 8000 ]; then late="gone after $ms ms, promised 8000"; fi
    times+=("$ms")
    for p in $(pgrep -g "$job" 2>/dev/null) $job; do kill -9 "$p" 2>/dev/null; done
    for p in $(ip netns pids "${n}a") $(ip netns pids "${n}b"); do kill -9 "$p" 2>/dev/null; done
    ip -n "${n}b" link set "${n}vb" up
    says run "error: rank"
}

# ---------------------------------------------------------------------------------------------------------------------
# The trainer itself

# Starts a small training run of three ranks in run/, with a fault at the n-th collective of a rank.
train() { # FAULT OVERRIDES...
    local fault=$1
    shift
    if [ -z "$trainer" ]; then skip "no trainer named"; return 1; fi
    if [ ! -e "$base/fault.so" ] || ! grep -q libmpi <<<"$(ldd "$trainer")"; then skip "no MPI here, or not in the trainer"; return 1; fi
    if [ ! -e run/ds.json ]; then
        mkdir -p run
        head -c 20000 "$root/zero.cu" >run/text.txt # any text will do
        cat >run/ds.json <<'JSON'
{"train_batch_size": 6, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "gradient_clipping": 1,
 "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
 "train_gpt": {"model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 256, "n_positions": 32}, "data": {"train": "text.txt"},
  "run": {"steps": 60, "checkpoint_every": 10, "output_dir": "saved"}}}
JSON
    fi
    rm -rf run/saved/flight
    MPIRUN_EXTRA="-x LD_PRELOAD=$base/fault.so -x WATCH_FAULT=$fault" mpirun_times run saved/flight 3 "$trainer" -c ds.json "$@"
}
in_phase() { # SIGNAL PHASE WHOM FAULT OVERRIDES...: until the phase was met
    local what=$1:$2:$3
    shift 3
    for _ in 1 2 3 4 5; do
        IN_PHASE=$what train "$@" || return 1
        grep -q 'no rank was seen in phase' run/err || return 0
    done
    fail "$what: the phase was never met"
}
trainer_ends() { # normally, over and over
    local i
    for i in $(seq $((long ? 50 : 5))); do
        rm -rf run
        train none run.steps=10 || return
        mpi_code run 0
        lines run 0
    done
}
trainer_dies() { # and goes on where it was
    local i r n
    for i in $(seq $((long ? 30 : 4))); do
        r=$((RANDOM % 3)) n=$((50 + RANDOM % 700)) # a whole run has some 800
        rm -rf run
        train "kill:$r:$n" || return
        [ -n "$problem" ] && return
        mpi_code run 137
        within run 1000
        says run "error: rank $r on"
        lines run 1
        [ -n "$problem" ] && return
    done
    "$trainer" --flight run/saved/flight >printed 2>&1
    expect "--flight tells the verdict" grep -q "^verdict: rank $r on" printed
    train none
    mpi_code run 0
    lines run 0
}
trainer_hangs() {
    rm -rf run
    train stop:0:300 || return
    mpi_code run 75
    says run "error: rank 0 on"
    says run "has been silent"
    rm -rf run/saved
    train loop:2:300 zero_optimization.timeout=2
    mpi_code run 75
    lines run 1
    rm -rf run/saved
    train segv:1:300
    mpi_code run 139
    within run 1000
    lines run 1
}

trainer_dies_in_phase() { # kill -9 of one rank in each phase, of all while they save, and of mpirun; the last state goes on
    local r=0 phase
    rm -rf run
    for phase in data forward backward update evaluation sampling save load; do
        in_phase KILL $phase $r none run.steps=100000 run.checkpoint_every=2 data.val=text.txt run.eval_every=3 run.eval_batches=2 run.sample_every=3 run.sample_tokens=20 || return
        mpi_code run 137
        within run 1000
        lines run 1
        says run "error: rank $r on"
        if [ -n "$problem" ]; then problem="in phase $phase: $problem"; return; fi
        r=$(((r + 1) % 3))
    done
    in_phase KILL save all none run.steps=100000 run.checkpoint_every=2
    mpi_code run 137
    in_phase KILL forward mpirun none run.steps=100000 run.checkpoint_every=2
    mpi_code run -9
    within run 2000
    train none run.steps=1
    mpi_code run 0
    says run "is reached already"
}
trainer_is_signalled() { # one rank, or mpirun, in any phase: all stop after the same update, with a checkpoint of it
    local r=0 phase
    for phase in forward update evaluation save load; do
        [ $phase = load ] || rm -rf run
        in_phase TERM $phase $r none run.steps=100000 run.checkpoint_every=4 data.val=text.txt run.eval_every=3 run.eval_batches=2 || return
        mpi_code run 0
        lines run 0
        stopped_well
        if [ -n "$problem" ]; then problem="in phase $phase: $problem"; return; fi
        r=$(((r + 1) % 3))
    done
    rm -rf run
    train term:1:0 run.steps=100000 # before MPI_Init returns
    mpi_code run 0
    stopped_well
    rm -rf run
    in_phase USR1 forward mpirun none run.checkpoint_every=0 # save, and go on
    mpi_code run 0
    expect "a checkpoint in mid-run" grep -qE '"event":"checkpoint","at_step":([1-9]|[1-5][0-9]),' run/saved/log.jsonl
    expect "the run goes on to its end" grep -q '"event":"done","at_step":60' run/saved/log.jsonl
    rm -rf run
    in_phase USR2 forward mpirun none run.steps=100000 # save, and stop
    mpi_code run 0
    stopped_well
}
stopped_well() { # the newest checkpoint is of the update after which it stopped
    local at newest
    at=$(sed -nE 's/.*"event":"stopped","at_step":([0-9]+),.*/\1/p' run/saved/log.jsonl | tail -n 1)
    newest=$(find run/saved/checkpoints -maxdepth 1 -name 'step-*' | sed 's/.*step-//' | sort -n | tail -n 1)
    equal "step of the newest checkpoint" "$((10#${newest:--1}))" "${at:-not stopped}"
}
trainer_is_slow() { # one rank sleeps 5 ms in each collective: named, not ended
    rm -rf run
    train sleep:1:20:5 zero_optimization.stage=0 run.steps=80 || return
    mpi_code run 0
    lines run 0
    says run "note: rank 1 on"
    equal "ranks noted as slow" "$(grep -c '^note: rank' run/err)" 1
}
trainer_stops_in_save() { # rank 0 for good, in a save: found by the others, and earlier checkpoints are whole
    rm -rf run
    in_phase STOP save 0 none run.steps=100000 run.checkpoint_every=2 || return
    mpi_code run 75
    says run "error: rank 0 on"
    says run "has been silent"
    train none run.steps=1
    mpi_code run 0
}
trainer_in_a_pipe() { # whose reader goes away: mpirun may end the job, but nothing is torn and nobody stays
    rm -rf run
    train none run.steps=2 || return
    local start=$SECONDS
    (cd run && timeout -k 5 30 mpirun -n 3 "$trainer" -c ds.json run.steps=100000 run.checkpoint_every=3 2>err </dev/null | head -n 1 >out)
    expect "it ends within 30 s ($((SECONDS - start)))" test $((SECONDS - start)) -lt 30
    sleep 1.2
    equal "processes left" "$(pgrep -fc "^$trainer -c ds.json")" 0
    train none run.steps=1
    mpi_code run 0
}
trainer_second_run() { # on the same folder: refused, and the recorders of the first are left alone
    rm -rf run
    train none run.steps=2 || return
    (cd run && exec mpirun -n 3 "$trainer" -c ds.json run.steps=1000000 >first_out 2>first_err </dev/null) &
    local job=$! i before first
    for i in $(seq 200); do grep -qs '"step":1[0-9]' run/saved/log.jsonl && break; sleep 0.05; done
    before=$(cd run/saved/flight && stat -c '%n %i' rank-*)
    (cd run && timeout 60 mpirun -n 3 "$trainer" -c ds.json >out 2>err </dev/null)
    equal "exit code of the second run" $? 2
    lines run 1
    says run "is in use by another run (pid"
    equal "recorders afterwards" "$(cd run/saved/flight && stat -c '%n %i' rank-*)" "$before"
    expect "the first run lives" kill -0 $job
    kill -USR2 $job
    wait $job
    first=$?
    equal "exit code of the first run ($(head -c 300 run/first_err))" $first 0
}

disagreement() { # one rank is told a loss (the second of an update's SUM_COUNT = 8 sums) that differs in its last bits: named, and nothing is saved
    local every at newest
    for every in 0 1; do # found by the next update's sums; before a save
        rm -rf run
        train flip:1:300:64:9 run.checkpoint_every=$every || return
        mpi_code run 76
        lines run 1
        says run "the ranks no longer hold the same: loss of the update before is"
        says run "on rank 1 and"
        says run "on the other 2; no checkpoint was written from this state"
        at=$(sed -nE 's/^error: step ([0-9]+): .*/\1/p' run/err)
        newest=$(find run/saved/checkpoints -maxdepth 1 -name 'step-*' | sed 's/.*step-0*//' | sort -n | tail -n 1)
        expect "the newest checkpoint ($newest) is from before the update that went wrong ($at)" test "${newest:-0}" -lt "${at:-0}"
    done
}
replicas() { # one bit of one rank's weights, or (stage 0) of the gradient that it is told, for the letter e
    local stage
    for stage in 0 1 2 3; do
        rm -rf run
        train flip:2:300:0:12949 zero_optimization.stage=$stage run.replica_check_every=1 run.checkpoint_every=0 || return
        mpi_code run 76
        lines run 1
        says run "the ranks hold different weights: "
        says run "differs on rank 2 from the other 2"
    done
    rm -rf run
    train flip:2:300:0:12949 zero_optimization.stage=2 run.checkpoint_every=0 # nobody else would notice
    mpi_code run 0
    rm -rf run
    train none zero_optimization.stage=2 run.replica_check_every=1
    mpi_code run 0
    lines run 0
}

# ---------------------------------------------------------------------------------------------------------------------
# What is tested, built as the trainer is

flags="-std=gnu++17 -pthread -fno-exceptions -fno-rtti -O2 -g -Wall -Wextra -Wshadow -Wno-missing-field-initializers -Wno-unused-function -fPIE ${CXXFLAGS:-}"
sources="$root/tests/watch_ranks.cpp $root/runtime/watch.cpp $root/runtime/flight.cpp"
# shellcheck disable=SC2086
if ! ${CXX:-g++} $flags $sources -o "$base/ranks"; then
    echo "FAIL build: tests/watch_ranks.cpp does not compile"
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
fi
if command -v mpicxx >/dev/null && command -v mpirun >/dev/null; then
    # shellcheck disable=SC2086
    mpicxx $flags -DWITH_MPI $sources -o "$base/mpi_ranks" && mpicc -shared -fPIC -O1 -Wall -Wextra "$root/tests/watch_fault.c" -o "$base/fault.so"
fi

for name in normal_ends late_end disturbances slow_rank under_load one_rank \
    kill_any launcher_dies where_it_died stop_each loop_each stuck_otherwise leaves_early crashes own_error crash_at_the_end never_ends full_pipe \
    missing_rank strangers garbage descriptors recorder bad_recorders no_recorder link_down link_blinks link_reset slow_link link_loses ports_exhausted no_network \
    mpi_normal mpi_faults mpi_stop mpi_shim mpi_two_hosts trainer_ends trainer_dies trainer_hangs trainer_dies_in_phase trainer_is_signalled \
    trainer_is_slow trainer_stops_in_save trainer_in_a_pipe trainer_second_run disagreement replicas; do
    row "$name"
done
echo "$((SECONDS - begin)) s"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
