#!/usr/bin/env bash
# check_hardening.sh - what SECURITY.md promises of the binary, read from the binary: scripts/check_hardening.sh build/cpu/train_gpt
#
# Position-independent, read-only relocations, no executable stack, stack protector, fortified libc calls; and in the
# debug information of every one of our object files the flags that leave no other trace. Then the imports: nothing
# that starts a program or a shell, loads code, makes guessable temporary names, or writes without a limit.
set -euo pipefail
binary=${1:?usage: scripts/check_hardening.sh BINARY}
failed=0
checked=0
expect() { # description, then a command that must succeed
    local what=$1
    shift
    checked=$((checked + 1))
    if ! "$@" >/dev/null; then
        echo "FAIL hardening: $what"
        failed=$((failed + 1))
    fi
}
has() { grep -qE -- "$1" <<<"$2"; }
lacks() { ! grep -qE -- "$1" <<<"$2"; }

[ -s "$binary" ] || { echo "error: $binary: not there; run make first" >&2; exit 1; }
header=$(readelf -hW -- "$binary")
segments=$(readelf -lW -- "$binary")
dynamic=$(readelf -dW -- "$binary")
# undefined symbols that this binary itself asks for, without their versions
imports=$(nm -D --undefined-only -- "$binary" | awk '{ sub(/@.*/, "", $NF); print $NF }' | sort -u)
producers=$(readelf --debug-dump=info -W -- "$binary" 2>/dev/null | grep -aE 'DW_AT_producer.*GNU C\+\+' || true)

expect "position-independent executable" has 'Type:.*DYN' "$header"
expect "position-independent executable (flag)" has 'FLAGS_1.*PIE' "$dynamic"
expect "relocations read-only" has 'GNU_RELRO' "$segments"
expect "all symbols bound at start (full RELRO)" has 'FLAGS_1.*NOW|BIND_NOW' "$dynamic"
expect "stack not executable" has 'GNU_STACK.* RW +0x' "$segments"
expect "no segment both writable and executable" lacks 'LOAD.* RWE ' "$segments"
expect "no relocation in code" lacks 'TEXTREL' "$dynamic"
expect "no library searched beside the user's files" lacks '(RPATH|RUNPATH).*\[([^/]|.*:[^/]|\])' "$dynamic"
expect "stack protector in use" has '^__stack_chk_fail$' "$imports"
expect "fortified libc calls in use" has '^__(v?snprintf|fprintf|memcpy|read|pread64|printf)_chk$' "$imports"
expect "debug information names the compiler's flags" test -n "$producers"
flags=(-fstack-protector-strong -fPIE)
for flag in -fstack-clash-protection -fcf-protection -ftrivial-auto-var-init=zero; do
    # asked for in the Makefile only if the compiler knows them
    if ${CXX:-g++} -Werror "$flag" -x c++ -c /dev/null -o /dev/null 2>/dev/null; then flags+=("$flag"); fi
done
for flag in "${flags[@]}"; do
    # (gcc expands -fcf-protection to -fcf-protection=full in some versions)
    expect "every object compiled with $flag" lacks . "$(grep -vE -- "$flag" <<<"$producers" || true)"
done

# Nothing in the whole binary starts a program, libraries that were linked in included.
for name in system popen fork vfork execl execlp execle execv execve execvp execvpe fexecve posix_spawn posix_spawnp wordexp gets mktemp tmpnam tempnam; do
    expect "imports $name, which is forbidden" lacks "^(__)?${name}(_chk)?\$" "$imports"
done
# Our own objects, besides, load no code and use none of the functions that have a bounded twin.
objects=$(find "$(dirname -- "$binary")" -maxdepth 1 -name '*.o' -not -name 'test_gpt.o' | sort)
expect "object files beside the binary" test -n "$objects"
while IFS= read -r object; do
    own=$(nm --undefined-only -- "$object" | awk '{ print $NF }')
    for name in dlopen dlmopen strcpy stpcpy strcat sprintf vsprintf; do
        expect "$object uses $name, which is forbidden" lacks "^(__)?${name}(_chk)?\$" "$own"
    done
done <<<"$objects"

echo "hardening of $binary: $((checked - failed)) of $checked checks hold"
[ "$failed" -eq 0 ]
