#!/usr/bin/env python3
"""Where the time of an update goes: the kernels of a run on a GPU, by CUPTI, as a Markdown table.

  scripts/profile.py [--updates 3] [--skip 4] ./train_gpt -c FILE [key=value ...]

The command is run with scripts/kernel_trace.c inside (compiled here against the CUDA toolkit), which costs about 1 % of its rate. An update
ends with the kernel update_control; one process, so no mpirun in the command; the table is the mean of `updates` updates behind the first `skip`. Parts are sums over kernels, so that
parts of several streams may add up to more than the update; "idle" is the time in which no kernel ran. With --trace a trace is read that
was written before, and nothing is run.
"""
import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
UPDATE_ENDS = "update_control_kernel"
# First match names the part; the library's products come first, since their names tell of epilogues.
PARTS = [
    ("products", r"nvjet|cutlass|gemm|xmma|splitK|matmul"),
    ("attention forward", r"attention_forward"),
    ("attention backward", r"attention_"),
    ("LayerNorm and residual", r"layernorm|residual_forward"),
    ("classifier", r"classifier"),
    ("GELU by itself", r"gelu"),
    ("gradients of biases", r"bias_partial|columns_reduce"),
    ("embedding", r"embedding|position|token_|sort_input|Radix|radix"),
    ("optimizer", r"update_kernel|update_control"),
    ("norm of the gradient", r"sum_partial|sum_final"),
    ("copies", r"^copy|memcpy|memset|fill_kernel|convert_kernel"),
]


def build(folder):
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    cupti = os.path.join(cuda, "extras", "CUPTI")
    library = os.path.join(folder, "kernel_trace.so")
    command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-o", library, os.path.join(HERE, "kernel_trace.c")]
    for base in (cuda, cupti):
        command += ["-I" + os.path.join(base, "include"), "-L" + os.path.join(base, "lib64"), "-Wl,-rpath," + os.path.join(base, "lib64")]
    subprocess.run(command + ["-lcupti"], check=True)
    return library


def short(name):
    """A kernel's name as a reader knows it: without its arguments, and the library's without its hash."""
    done = subprocess.run(["c++filt", name], stdout=subprocess.PIPE, text=True).stdout.strip() if name.startswith("_Z") else name
    done = re.sub(r"^void |\(anonymous namespace\)::|\(.*$", "", done)
    return done[:90]


def updates_of(lines):
    """The kernels of whole updates: a list for each, of (start, end, name), cut behind every UPDATE_ENDS."""
    rows = sorted((int(start), int(end), name) for _, start, end, name in (line.rstrip("\n").split("\t") for line in lines))
    updates, this = [], []
    for row in rows:
        this.append(row)
        if UPDATE_ENDS in row[2]:
            updates.append(this)
            this = []
    return updates


def busy(rows):
    """ns in which at least one of the kernels ran (rows sorted by start)."""
    total, until = 0, 0
    for start, end, _ in rows:
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def part_of(name):
    return next((part for part, pattern in PARTS if re.search(pattern, name)), "other")


def table(updates, kernels):
    n = len(updates)
    # From one update's last kernel to the next's: what lies between two updates belongs to the second.
    whole = (updates[-1][-1][1] - updates[0][-1][1]) / (n - 1) / 1e6
    counted = updates[1:]
    by_name = collections.defaultdict(lambda: [0, 0])
    for rows in counted:
        for start, end, name in rows:
            by_name[name][0] += 1
            by_name[name][1] += end - start
    by_part = collections.defaultdict(float)
    for name, (_, ns) in by_name.items():
        by_part[part_of(name)] += ns / (n - 1) / 1e6
    every = [row for rows in counted for row in rows]
    idle = whole - busy(every) / (n - 1) / 1e6
    print(f"An update takes {whole:.3f} ms (mean of {n - 1}), {len(every) / (n - 1):.0f} kernels and copies.\n")
    print("| part | ms | share |\n|---|---|---|")
    for part, ms in sorted(by_part.items(), key=lambda item: -item[1]):
        print(f"| {part} | {ms:.3f} | {100 * ms / whole:.1f} % |")
    print(f"| idle | {idle:.3f} | {100 * idle / whole:.1f} % |\n")
    print("| kernel | times | us each | ms |\n|---|---|---|---|")
    for name, (times, ns) in sorted(by_name.items(), key=lambda item: -item[1][1])[:kernels]:
        print(f"| {short(name)} | {times / (n - 1):.0f} | {ns / times / 1e3:.1f} | {ns / (n - 1) / 1e6:.3f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--skip", type=int, default=4)
    parser.add_argument("--kernels", type=int, default=25, help="rows of the second table")
    parser.add_argument("--trace", help="a file written before by kernel_trace.c")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    a = parser.parse_args()
    if bool(a.trace) == bool(a.command):
        parser.error("give a command, or --trace FILE")
    with tempfile.TemporaryDirectory() as folder:
        trace = a.trace or os.path.join(folder, "trace.tsv")
        if a.command:
            environment = dict(os.environ, CUDA_INJECTION64_PATH=build(folder), KERNEL_TRACE=trace)
            code = subprocess.run(a.command, env=environment, stdout=sys.stderr).returncode
            if code != 0:
                sys.exit(f"error: {a.command[0]}: exit code {code}")
        with open(trace, encoding="utf-8") as file:
            updates = updates_of(file)
    if len(updates) < a.skip + a.updates + 1:
        sys.exit(f"error: the trace has {len(updates)} updates; {a.skip + a.updates + 1} are needed: raise run.steps, or lower --skip and --updates")
    table(updates[a.skip:a.skip + a.updates + 1], a.kernels)


if __name__ == "__main__":
    main()
