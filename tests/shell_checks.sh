# shell_checks.sh - what a row of the shell tests says of what it compared. Sourced, by shell_rows.sh and test_watch.sh.
passed=0 failed=0 skipped=0
compared=0 problem='' skip_reason='' # of the row that is running

fail() { # WHAT: the first is what the row fails with
    [ -n "$problem" ] || problem=$1
}
skip() { skip_reason=$1; }
expect() { # DESCRIPTION COMMAND...: the command must succeed
    local what=$1
    shift
    compared=$((compared + 1))
    "$@" >/dev/null 2>&1 || fail "$what"
}
equal() { # WHAT GOT WANT
    compared=$((compared + 1))
    [ "$2" = "$3" ] || fail "$1 is '${2:0:200}', expected '$3'"
}
