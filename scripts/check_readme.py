#!/usr/bin/env python3
"""Compares what the manuals say with what is there: scripts/check_readme.py build/cpu/train_gpt

Make targets, files, links, configuration keys, switches, exit codes and log fields that README.md, SECURITY.md and docs/
name must exist; exit codes and log fields must also all be named. Example configurations must be accepted.
"""
import glob
import os
import re
import subprocess
import sys

problems = []
checked = 0


def check(good, text):
    global checked
    checked += 1
    if not good:
        problems.append(text)


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def run(*command):
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    return result.returncode, result.stdout, result.stderr


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: scripts/check_readme.py BINARY")
    binary = os.path.abspath(sys.argv[1])
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    manuals = ["README.md", "SECURITY.md"] + sorted(glob.glob("docs/*.md"))
    makefile = read("Makefile")
    code, keys, _ = run(binary, "--help-config")
    check(code == 0, f"--help-config ends with {code}")
    code, switches, _ = run(binary, "--help")
    check(code == 0, f"--help ends with {code}")
    known = set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)+|\b[a-z_]{4,}\b", keys))
    top = set(re.findall(r"^\s*\"?([a-z_0-9]+)[\s.\":]", keys, re.M)) | {k.split(".")[0] for k in known}

    for manual in manuals:
        text = read(manual)
        for target in re.findall(r"\bmake ([a-z][a-z-]+)", "\n".join(re.findall(r"`[^`]*`|^    .*$", text, re.M))):
            check(re.search(rf"^{re.escape(target)}:", makefile, re.M), f"{manual}: make {target}: no such target")
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in link:
                check(os.path.exists(os.path.join(os.path.dirname(manual), link)), f"{manual}: link to {link}: not there")
        for path in re.findall(r"(?<![\w/.*])(?:scripts|tests|kernels|runtime|docs|data)/[\w./-]+\.(?:sh|py|cu|h|cpp|json|md)\b", text):
            check(os.path.exists(path), f"{manual}: {path}: not there")
        for name in re.findall(r"(?<![\w/.*])[a-z_]+\.cu\b", text):
            check(os.path.exists(name), f"{manual}: {name}: not there")
        ours = [re.sub(r"^.*(?=\./train_gpt)|#.*$", "", line) for line in text.split("\n") if "train_gpt" in line or "`--" in line] # not the launcher's
        for switch in re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(ours)):
            if f"`{switch}=" in text or "prepare.py " + switch in text:
                continue  # of another program: --signal=... of Slurm
            check(switch in switches, f"{manual}: {switch}: not in --help")
        for key in re.findall(r"`((?:[a-z_0-9]+\.)+[a-z_0-9]+)`", text):
            if not os.path.exists(key) and key.split(".")[0] in top and not re.search(r"\.(h|cu|sh|py|md|json|jsonl|safetensors)$", key):
                check(key in known or "train_gpt." + key in known, f"{manual}: {key}: not in --help-config")
        # overrides in commands
        for key in re.findall(r"\s((?:[a-z_0-9]+\.)+[a-z_0-9]+)=", text):
            check(key in known or "train_gpt." + key in known, f"{manual}: {key}=...: not in --help-config")

    # the README's key table: every key of its first column
    for row in re.findall(r"^\| (`[^|]*) \|", read("README.md"), re.M):
        for key in re.findall(r"`([a-z_0-9.]+)`", row):
            check(key in known or "train_gpt." + key in known, f"README.md: key {key}: not in --help-config")

    operations = read("docs/operations.md")
    codes = dict((int(n), name) for name, n in re.findall(r"(EXIT_[A-Z]+) = (\d+),", read("runtime/utils.h")))
    told = {int(n) for n in re.findall(r"^\| (\d+) \|", operations, re.M)}
    for number, name in codes.items():
        check(number in told, f"docs/operations.md: exit code {number} ({name}) is missing")
    for number in told:
        check(number in codes, f"docs/operations.md: exit code {number} is not in runtime/utils.h")

    fields = set(re.findall(r"[{,]\\\"([a-z_]+)\\\":", read("runtime/metrics.h")))
    check(len(fields) >= 10, "runtime/metrics.h: no log fields found by this script")
    section = operations[operations.index("## The step log"):]
    section = section[:section.index("Other records")]
    explained = {f for row in re.findall(r"^\| (`[^|]*) \|", section, re.M) for f in re.findall(r"`([a-z_]+)`", row)}
    for field in sorted(fields ^ explained):
        check(False, f"docs/operations.md and runtime/metrics.h: log field {field} is only in one of them")
    check(True, "")

    for example in sorted(glob.glob("scripts/examples/*.json")):
        code, _, err = run(binary, "-c", example, "--check-config")
        check(code == 0, f"{example}: --check-config ends with {code}: {err.strip()[:300]}")

    for problem in problems:
        print("FAIL manuals: " + problem)
    print(f"manuals: {checked} statements checked, {len(problems)} problems")
    sys.exit(1 if problems or checked < 50 else 0)


if __name__ == "__main__":
    main()
