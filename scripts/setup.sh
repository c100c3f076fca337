#!/usr/bin/env bash
# setup.sh - sees to it that the tools named on the command line are there: scripts/setup.sh g++ python3 ...
#
# What is missing is installed through apt when this user may do so (root, or sudo that asks no password). Otherwise
# the one command to run is printed and the exit code is 1. Nothing but the distribution's own packages is installed.
set -euo pipefail

# Does the tool work? A g++ without the C library's headers, or a python3 without its standard library, does not.
works() {
    case $1 in
        g++) printf '#include <omp.h>\n#include <stdio.h>\n' | g++ -fopenmp -x c++ -fsyntax-only - 2>/dev/null ;;
        clang) # with libFuzzer and the sanitizers, which are packages of their own on some releases
            printf 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char *data, unsigned long n) { return n > 9 && data[0] == 1; }\n' |
                clang++ -fsanitize=fuzzer,address -x c++ -o /dev/null - 2>/dev/null ;;
        locales) [ -e /usr/share/i18n/locales/tr_TR ] ;;
        python3) python3 -c 'import argparse, json, unittest, urllib.request' 2>/dev/null ;;
        liburing) printf '#include <liburing.h>\n' | g++ -x c++ -fsyntax-only - 2>/dev/null ;;
        readelf) command -v readelf >/dev/null && command -v nm >/dev/null ;;
        *) command -v "$1" >/dev/null ;;
    esac
}

package_of() {
    case $1 in
        readelf) echo binutils ;;
        clang) echo clang libclang-rt-dev ;;
        liburing) echo liburing-dev ;;
        ip) echo iproute2 ;;
        mpicc) echo libopenmpi-dev openmpi-bin ;;
        ps | pgrep) echo procps ;;
        unshare | setpriv) echo util-linux ;;
        *) echo "$1" ;;
    esac
}

packages=()
missing=()
for tool in "$@"; do
    if ! works "$tool"; then
        missing+=("$tool")
        read -ra more < <(package_of "$tool")
        packages+=("${more[@]}")
    fi
done
[ ${#missing[@]} -eq 0 ] && exit 0

refuse() { # the one line, and out
    echo "error: missing: ${missing[*]}; $1" >&2
    exit 1
}

if ! command -v apt-get >/dev/null; then
    refuse "this is not a Debian or Ubuntu system: install them with its own package manager, then run make again"
fi
become=()
if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then become=(sudo -n)
    else refuse "run this, then make again:  sudo apt-get install -y ${packages[*]}"; fi
fi

apt() { "${become[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq "$@"; }
echo "missing: ${missing[*]}; installing ${packages[*]} through apt"
log=$(mktemp)
trap 'rm -f -- "$log"' EXIT
# The lists of packages on a fresh machine are empty or old: only then is it worth the time to fetch them.
if ! apt install -y --no-install-recommends "${packages[@]}" >"$log" 2>&1 </dev/null; then
    apt update >>"$log" 2>&1 </dev/null || true
    # Some releases have the sanitizers in another package, which clang itself needs: there this one is unknown.
    if ! apt install -y --no-install-recommends "${packages[@]}" >>"$log" 2>&1 </dev/null &&
        ! apt install -y --no-install-recommends "${packages[@]/#libclang-rt-dev/clang}" >>"$log" 2>&1 </dev/null; then
        tail -n 5 "$log" >&2
        refuse "apt could not install ${packages[*]} (its last lines are above); install them by hand, then run make again"
    fi
fi
for tool in "${missing[@]}"; do
    works "$tool" || { missing=("$tool"); refuse "it was installed, but does not work"; }
done
