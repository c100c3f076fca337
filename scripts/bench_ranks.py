#!/usr/bin/env python3
"""What several GPUs reach together, by parallel axis, beside one GPU by itself in the same call.

  scripts/bench_ranks.py                       all sections on two GPUs
  scripts/bench_ranks.py pipeline --ranks 4    some of: zero pipeline tensor sequence
  scripts/bench_ranks.py --small --backend cpu a toy model, to see that all of it runs; the rates say nothing

zero      gpt2-1558M, T = 1024, 4 micro-batches of 16: ZeRO stages 0 to 3
pipeline  gpt2-1558M, T = 1024, 8 micro-batches of 8: the schedules, with the ideal bubble and the one that was measured
tensor    gpt3-6.7B, T = 2048, gradients in bf16: ranks share the matrices of micro-batches that are as many times larger;
          with rows that travel in 1, 2 and 4 pieces
sequence  1.7 billion parameters with 24 heads of 64 (gpt2-1558M's 25 cannot be shared out), T = 65,536, whole blocks recomputed: ranks
          share the tokens (Ulysses)

"Share" is the rate of all ranks over that of one GPU times the ranks. --plan says instead, without a device, what --plan says of each run:
whether it fits. Random tokens; a row is the median of the updates after the first three; no checkpoints. The
output is Markdown. BUILD names the build folder (build/BACKEND), which is built first unless BENCH_BUILT=1; MPIRUN the launcher.
"""
import argparse
import json
import os
import re
import statistics
import tempfile

from bench import ROOT, median_update, run, stop, write_tokens

WARM_UP = 3
TINY = {"model.preset": "null", "model.n_layer": 8, "model.n_head": 4, "model.n_embd": 64, "model.vocab_size": 256, "model.n_positions": 64, "run.seq_len": 64}
BF16_GRADIENTS = {"data_types.grad_accum_dtype": "bf16", "zero_optimization.stage": 2, "activation_checkpointing.policy": "gelu"}


def section(name, n):
    """Settings of all runs of the section, those of one GPU, and a list of (title, settings) for n ranks."""
    if name == "zero":
        return ({"model.preset": "gpt2-1558M", "run.seq_len": 1024, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 4}, {},
                [(f"stage {stage}", {"zero_optimization.stage": stage}) for stage in range(4)])
    if name == "pipeline":
        return ({"model.preset": "gpt2-1558M", "run.seq_len": 1024, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 8}, {},
                [(schedule, {"pipeline_model_parallel_size": n, "pipeline_schedule": schedule}) for schedule in ("GPipe", "1F1B", "Interleaved", "ZB-H1", "ZB-V")])
    if name == "tensor":
        return ({"model.preset": "gpt3-6.7B", "model.n_positions": 2048, "run.seq_len": 2048, "gradient_accumulation_steps": 2, **BF16_GRADIENTS},
                {"train_micro_batch_size_per_gpu": 4},
                [(f"tensor {n}, rows in {pieces}", {"tensor_model_parallel_size": n, "run.tensor_parallel_pieces": pieces, "train_micro_batch_size_per_gpu": 4 * n})
                 for pieces in (1, 2, 4)])
    return ({"model.preset": "gpt2-1558M", "model.n_layer": 54, "model.n_head": 24, "model.n_embd": 1536, "model.n_positions": 65536, "run.seq_len": 65536, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
             "activation_checkpointing.policy": "block"}, {},
            [(f"sequence {n}", {"sequence_parallel_size": n, "zero_optimization.stage": 1})])


def command(binary, folder, settings, updates):
    """The program with its settings; the file goes into the folder."""
    config = os.path.join(folder, "config.json")
    with open(config, "w", encoding="utf-8") as file:
        json.dump({"gradient_clipping": 1.0, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
                   "train_gpt": {"data": {"train": os.path.join(folder, "tokens.bin")},
                                 "run": {"steps": updates, "eval_every": 0, "resume": "none", "checkpoint_at_end": False, "output_dir": os.path.join(folder, "out")}}}, file)
    return [binary, "-c", config] + [f"{key}={value}" for key, value in settings.items()]


def measure(binary, folder, ranks, settings, updates):
    """The median update's record of log.jsonl, the ideal bubble and the memory as the run printed them."""
    out = os.path.join(folder, "out")
    launcher = os.environ.get("MPIRUN", "mpirun --bind-to none").split() + ["-n", str(ranks)] if ranks > 1 else []
    said = run(launcher + command(binary, folder, settings, updates), cwd=folder)
    record, records = median_update(out, updates, WARM_UP)
    ideal, memory = re.search(r"ideal bubble ([0-9.]+) %", said), re.search(r"^memory: at most ([0-9.,]+) MiB", said, re.M)
    record["ideal"] = ideal and float(ideal[1])
    record["memory"] = memory[1] if memory else "unknown"
    if record["ideal"] is not None:
        record["bubble"] = statistics.median(r["bubble"] for r in records if "bubble" in r)
    return record


def small(settings):
    """The same layout for a toy model and a fourth of the samples."""
    micro = settings.get("train_micro_batch_size_per_gpu")
    return {**settings, **TINY, **({"train_micro_batch_size_per_gpu": max(1, micro // 4)} if micro else {})}


def print_row(title, ranks, r, alone):
    share = f"{100 * r['tokens_per_s'] / (ranks * alone['tokens_per_s']):.1f} %" if ranks > 1 else ""
    bubble = f"{r['ideal']:.1f} / {100 * r['bubble']:.1f} %" if r["ideal"] is not None else ""
    print(f"| {title} | {r['step_ms']:.1f} | {r['tokens_per_s']:,.0f} | {r['tflops']:.3g} | {share} | {bubble} | {r['memory']} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help="zero pipeline tensor sequence, or key=value for the trainer")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--updates", type=int, default=9)
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a toy model")
    parser.add_argument("--plan", action="store_true", help="plans instead of measurements")
    args = parser.parse_intermixed_args()
    extra = dict(s.split("=", 1) for s in args.sections if "=" in s)
    names = [s for s in args.sections if "=" not in s] or ["zero", "pipeline", "tensor", "sequence"]
    for name in names:
        if name not in ("zero", "pipeline", "tensor", "sequence"):
            stop(f"{name}: there is no such section; give some of zero pipeline tensor sequence")
    if args.ranks < 2:
        stop(f"--ranks {args.ranks}: give two or more; scripts/bench.py is for one GPU")

    build = os.environ.get("BUILD", "build/" + args.backend)
    if os.environ.get("BENCH_BUILT") != "1":
        run(["make", "-s", f"-j{os.cpu_count()}", f"BACKEND={args.backend}", f"BUILD={build}", "binaries"], cwd=ROOT)
    binary = os.path.join(ROOT, build, "train_gpt")
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(os.path.join(folder, "tokens.bin"), 1 << 20, 256 if args.small else 50257)
        for name in names:
            common, one, layouts = section(name, args.ranks)
            shape = small if args.small else dict
            trials = [("one by itself", 1, {**shape({**common, **one}), **extra})]
            trials += [(title, args.ranks, {**shape({**common, **settings}), **extra}) for title, settings in layouts]
            print(f"\n{name}, {args.ranks} ranks\n", flush=True)
            if args.plan:
                for title, ranks, settings in trials:
                    print(title + "\n\n" + run(command(binary, folder, settings, args.updates) + ["--plan", str(ranks), "--device-memory", "139"], cwd=folder), flush=True)
                continue
            print("| | ms an update | tokens/s | TFLOP/s a rank | share | bubble, ideal / measured | MiB a rank |\n|---|---|---|---|---|---|---|", flush=True)
            alone = None
            for title, ranks, settings in trials:
                r = measure(binary, folder, ranks, settings, args.updates)
                alone = alone or r
                print_row(title, ranks, r, alone)


main()
