#!/usr/bin/env python3
"""Builds, checks and measures: the trainer's rate for GPT-2 models on one GPU, and each kernel's share of its limit.

  scripts/bench.py                         all of docs/benchmarks.md's first section
  scripts/bench.py 124M:64 1558M:16        models and micro-batches
  scripts/bench.py 124M:64 --parts none run.matmul_search=false
                                           the program alone, with settings as on train_gpt's command line
  scripts/bench.py --parts only            the kernels alone

The program trains on random tokens (the rate does not depend on them); a row is the median of the updates after the
first four. Kernels run on random data larger than the cache; see tests/bench_kernels.cpp. The output is Markdown.
BUILD names the build folder (build/cuda), which is built first unless BENCH_BUILT=1.
"""
import argparse
import array
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile

SIZES = {"124M": (12, 12, 768), "355M": (24, 16, 1024), "774M": (36, 20, 1280), "1558M": (48, 25, 1600)}  # blocks, heads, channels
DEFAULT = ["124M:64", "355M:32", "774M:16", "1558M:16"]
WARM_UP = 4
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def stop(text):
    print("error: " + text, file=sys.stderr)
    sys.exit(2)


def run(command, **more):
    """The command's output; ends the program with its last lines when it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", **more)
    if done.returncode != 0:
        stop(f"{' '.join(command)}: exit code {done.returncode}\n" + "\n".join(done.stdout.splitlines()[-15:]))
    return done.stdout


def write_tokens(path, n, vocab_size=50257):
    """Random tokens in the format of data.train: a header of 256 int32, then uint16."""
    source = random.Random(1)
    header = array.array("i", [0] * 256)
    header[0], header[1], header[2] = 20240520, 1, n
    tokens = array.array("H", (source.randrange(vocab_size) for _ in range(n)))
    if sys.byteorder == "big":
        header.byteswap()
        tokens.byteswap()
    with open(path, "wb") as file:
        file.write(header.tobytes() + tokens.tobytes())


def median_update(out, updates, warm_up):
    """The log's record of the update of median time, and all records behind the first ones; the folder goes."""
    with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as file:
        records = [r for r in map(json.loads, file) if "step" in r][warm_up:]
    run(["rm", "-rf", out])
    if not records:
        stop(f"--updates {updates}: more than {warm_up} are needed")
    middle = statistics.median_low([r["step_ms"] for r in records])
    return next(r for r in records if r["step_ms"] == middle), records


def measure_program(build, folder, model, micro, updates, settings):
    """Median milliseconds, tokens/s, TFLOP/s and share of peak (null if unknown) of the updates after the warm-up."""
    config = os.path.join(folder, "config.json")
    out = os.path.join(folder, f"out-{model}")
    with open(config, "w", encoding="utf-8") as file:
        json.dump({"train_batch_size": micro, "train_micro_batch_size_per_gpu": micro, "gradient_clipping": 1.0, "bf16": {"enabled": True},
                   "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
                   "train_gpt": {"model": {"preset": "gpt2-" + model}, "data": {"train": os.path.join(folder, "tokens.bin")},
                                 "run": {"steps": updates, "seq_len": 1024, "output_dir": out, "eval_every": 0, "resume": "none", "checkpoint_at_end": False}}}, file)
    run([os.path.join(build, "train_gpt"), "-c", config, *settings], cwd=ROOT)
    return median_update(out, updates, WARM_UP)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="MODEL:MICRO_BATCH, or key=value for the trainer")
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--parts", choices=["all", "none", "only"], default="all", help="the kernels' tables")
    parser.add_argument("--unchecked", action="store_true", help="skips the tests of the kernels")
    args = parser.parse_intermixed_args()
    settings = [m for m in args.models if "=" in m]
    models = []
    for name in [m for m in args.models if "=" not in m] or DEFAULT:
        model, _, micro = name.partition(":")
        if model not in SIZES or not micro.isdigit() or int(micro) < 1:
            stop(f"{name}: give MODEL:MICRO_BATCH with a model of {', '.join(SIZES)}, as in 124M:64")
        models.append((model, int(micro)))

    build = os.environ.get("BUILD", "build/cuda")
    if os.environ.get("BENCH_BUILT") != "1":
        run(["make", "-s", f"-j{os.cpu_count()}", "BACKEND=cuda", f"BUILD={build}", "binaries"], cwd=ROOT)
        run(["scripts/bench_kernels.sh"], cwd=ROOT, env={**os.environ, "BUILD": build, "BENCH_BUILD_ONLY": "1"})
    build = os.path.join(ROOT, build)
    if not args.unchecked:
        print("kernels against the CPU's: " + run([os.path.join(build, "test_gpt"), "kernels"], cwd=ROOT).splitlines()[-1] + "\n", flush=True)

    if args.parts != "only":
        print("| model | micro-batch | ms an update | tokens/s | TFLOP/s | share of peak |\n|---|---|---|---|---|---|")
        with tempfile.TemporaryDirectory() as folder:
            write_tokens(os.path.join(folder, "tokens.bin"), 1 << 19)
            for model, micro in models:
                r = measure_program(build, folder, model, micro, args.updates, settings)
                share = f"{100 * r['mfu']:.1f} %" if r["mfu"] is not None else "unknown"
                print(f"| {model} | {micro} | {r['step_ms']:.2f} | {r['tokens_per_s']:,.0f} | {r['tflops']:.1f} | {share} |", flush=True)
    if args.parts != "none":
        for model, micro in models:
            blocks, heads, channels = SIZES[model]
            print(f"\n{model}, micro-batch {micro}:\n")
            sizes = [str(n) for n in (micro, 1024, blocks, heads, channels)]
            print("\n".join("    " + line for line in run([os.path.join(build, "bench_kernels"), *sizes]).splitlines()), flush=True)


if __name__ == "__main__":
    main()
