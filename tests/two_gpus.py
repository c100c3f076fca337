#!/usr/bin/env python3
"""two_gpus.py - the watch, the way out and the launchers on a machine with two GPUs, where no CI comes:

    tests/two_gpus.py BUILD_FOLDER [probe | launchers | faults ...]

probe: tests/gpu_probe.cpp's cases. launchers: the same tiny run by mpirun, torchrun, `python -m torch.distributed.run` and the
variables of srun; losses equal bit for bit. faults: one of two ranks of the trainer is killed, stopped, loops, or its GPU waits
for ever (tests/nccl_fault.c); who is named, and when everybody is gone. A table comes last, then "N passed, N failed, N skipped".

BUILD_FOLDER holds a CUDA build of train_gpt; gpu_probe and nccl_fault.so are built beside it unless they are there.
"""
import json, os, shutil, signal, struct, subprocess, sys, tempfile, time

here = os.path.dirname(os.path.abspath(__file__))
passed = failed = skipped = 0
table = []

MPIRUN = ["mpirun", "--bind-to", "none", "-n", "2"]
ENVIRONMENT = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "SLURM_PROCID"):
    ENVIRONMENT.pop(name, None)


def verdict(name, wrong):
    global passed, failed
    if wrong:
        failed += 1
        print(f"FAIL {name}: {wrong}", flush=True)
    else:
        passed += 1
        print(f"ok   {name}", flush=True)


def figure(text):
    table.append(text)
    print("     " + text, flush=True)


def skip(name, why):
    global skipped
    skipped += 1
    print(f"skip {name}: {why}", flush=True)


def build(folder):
    """gpu_probe and nccl_fault.so, for those who come with a build folder alone."""
    cuda = os.path.realpath("/usr/local/cuda")
    if not os.path.exists(f"{folder}/gpu_probe"):
        subprocess.run(["g++", "-std=gnu++17", "-O2", "-pthread", "-isystem", f"{cuda}/include", f"{here}/gpu_probe.cpp", "-o", f"{folder}/gpu_probe",
                        f"-L{cuda}/lib64", "-lnccl", "-lcudart", "-ldl"], check=True)
    if not os.path.exists(f"{folder}/nccl_fault.so"):
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", f"{here}/nccl_fault.c", "-o", f"{folder}/nccl_fault.so", "-ldl"], check=True)


def probe(folder):
    for case, extra in (("exit", {}), ("kill", {}), ("abort", {}), ("abort_alone", {}), ("abort_single", {}), ("async", {}),
                        ("async", {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}), ("write", {})):
        name = case + (" over sockets" if extra else "")
        try:
            r = subprocess.run([f"{folder}/gpu_probe", case], env=dict(ENVIRONMENT, NCCL_NVLS_ENABLE="0", **extra), capture_output=True, text=True, timeout=40)
            lines = [line for line in r.stdout.splitlines() if line.startswith(case)]
            for line in lines:
                figure("probe, " + line.replace(case, name, 1))
            verdict(f"probe {name}", "" if lines else f"no figure; {r.stderr[-300:]}")
        except subprocess.TimeoutExpired:
            verdict(f"probe {name}", "still running after 40 s")


CONFIG = {
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "train_gpt": {"model": {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 256, "n_positions": 128}, "data": {"train": "text.txt"},
                  "run": {"steps": 20, "output_dir": "out", "eval_every": 0}},
}


def run_folder(base, name):
    folder = os.path.join(base, name)
    os.makedirs(folder)
    with open(f"{folder}/ds.json", "w") as f:
        json.dump(CONFIG, f)
    shutil.copy(f"{base}/text.txt", folder)
    return folder


def losses(folder):
    steps = {}
    try:
        for line in open(f"{folder}/out/log.jsonl"):
            record = json.loads(line)
            if "step" in record:
                steps[record["step"]] = (record["loss"], record["grad_norm"])
    except (OSError, ValueError):
        pass
    return [steps[k] for k in sorted(steps)]


def launchers(folder, base):
    program = [os.path.abspath(f"{folder}/train_gpt"), "-c", "ds.json"]
    srun = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4242", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node1"}
    ways = [("mpirun", MPIRUN + program, [{}]),
            ("torchrun", ["torchrun", "--no-python", "--nproc-per-node", "2"] + program, [{}]),
            ("torch.distributed.run", [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"] + program, [{}]),
            ("srun's variables", program, [dict(srun, SLURM_PROCID=str(r), SLURM_LOCALID=str(r)) for r in (0, 1)])]
    want = None
    for name, command, extras in ways:
        if not shutil.which(command[0]):
            skip(f"launcher {name}", f"no {command[0]} here")
            continue
        at = run_folder(base, "launch-" + name.split()[0].replace(".", "-"))
        start = time.time()
        jobs = [subprocess.Popen(command, cwd=at, env=dict(ENVIRONMENT, **extra), stdin=subprocess.DEVNULL, stdout=open(f"{at}/out{i}.txt", "w"),
                                 stderr=open(f"{at}/err{i}.txt", "w")) for i, extra in enumerate(extras)]
        try:
            codes = [job.wait(timeout=60) for job in jobs]
        except subprocess.TimeoutExpired:
            for job in jobs:
                job.kill()
            verdict(f"launcher {name}", "still running after 60 s")
            continue
        got = losses(at)
        told = next((line for line in open(f"{at}/err0.txt") if "ranks on" in line), "").strip()
        wrong = ""
        if any(codes) or len(got) != 20:
            wrong = f"codes {codes}, {len(got)} updates; {open(f'{at}/err0.txt').read()[-600:]}"
        elif "2 ranks" not in told:
            wrong = f"not two ranks: {told}"
        elif want and got != want:
            wrong = f"losses differ from mpirun's, at update {next(i for i in range(20) if got[i] != want[i])}"
        want = want or got
        verdict(f"launcher {name}", wrong)
        figure(f"launcher {name}: {time.time() - start:.1f} s for 20 updates, last loss {got[-1][0] if got else '-'}; {told}")


def pids_of(folder):
    pids = []
    for r in (0, 1):
        try:
            pid = struct.unpack_from("<i", open(f"{folder}/out/flight/rank-{r}", "rb").read(28), 24)[0]
        except (OSError, struct.error):
            return []
        if pid == 0:
            return []
        pids.append(pid)
    return pids


def lives(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def fault(folder, base, name, victim, number, text, seconds, action=""):
    """One run of two ranks. number: the signal; 0: what the preloaded library does. seconds: until all are gone."""
    at = run_folder(base, "fault-" + name.replace(" ", "-"))
    program = [os.path.abspath(f"{folder}/train_gpt"), "-c", "ds.json", "run.steps=1000000"]
    command = MPIRUN + program
    if action:
        command = MPIRUN + ["-x", f"LD_PRELOAD={os.path.abspath(folder)}/nccl_fault.so", "-x", f"WATCH_FAULT={action}:{victim}:3000"] + program
    start = time.time()
    job = subprocess.Popen(command, cwd=at, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=open(f"{at}/out.txt", "w"), stderr=open(f"{at}/err.txt", "w"))
    told = lambda: open(f"{at}/err.txt", errors="replace").read()
    began = 0
    while not began and job.poll() is None and time.time() < start + 40:
        pids = pids_of(at)
        if action and "fault:" in told():
            began = time.time()
        elif not action and len(pids) == 2 and len(losses(at)) >= 30:
            os.kill(job.pid if victim is None else pids[victim], number)
            began = time.time()
        time.sleep(0.005)
    gone = {}
    while (job.poll() is None or (victim is None and any(map(lives, pids)))) and began and time.time() < began + 45:
        for pid in pids:
            if pid not in gone and not lives(pid):
                gone[pid] = time.time()
        time.sleep(0.002)
    ended = time.time()
    for pid in pids:
        gone.setdefault(pid, ended)
    if job.poll() is None:
        for pid in pids + [job.pid]:
            if lives(pid):
                os.kill(pid, signal.SIGKILL)
        job.wait()
        verdict(f"fault {name}", f"the job did not {'end' if began else 'begin'}; {told()[-600:]}")
        return
    line = next((l.strip() for l in told().splitlines() if l.startswith("error: ")), "")
    last = max(gone.values()) - began if began else -1
    survivor = gone.get(pids[1 - (victim or 0)], 0) - began if len(pids) == 2 else -1
    wrong = ""
    if not began:
        wrong = f"ended by itself with {job.returncode}: {told()[-600:]}"
    elif victim is not None and (text not in line or f"rank {victim}" not in line): # mpirun takes the ranks' lines with it
        wrong = f"the verdict is: {line[:300]}"
    elif last > seconds:
        wrong = f"gone after {last:.2f} s, promised {seconds}"
    verdict(f"fault {name}", wrong)
    figure(f"fault {name}: began {began - start:.1f} s after the start, survivor gone {survivor:.2f} s, all {last:.2f} s, mpirun {ended - began:.2f} s later, code {job.returncode}; {line[:260]}")


def faults(folder, base):
    if not shutil.which("mpirun"):
        skip("faults", "no mpirun here")
        return
    for victim in (0, 1):
        fault(folder, base, f"kill -9 of rank {victim}", victim, signal.SIGKILL, "is gone", 1.5)
    fault(folder, base, "kill -9 of mpirun", None, signal.SIGKILL, "the launcher", 1.5)
    fault(folder, base, "SIGSTOP of rank 1", 1, signal.SIGSTOP, "has been silent", 8)
    fault(folder, base, "SIGSTOP of rank 0", 0, signal.SIGSTOP, "has been silent", 9)
    fault(folder, base, "endless loop of rank 1", 1, 0, "makes no progress", 12, "loop")
    fault(folder, base, "GPU of rank 1 waits for ever", 1, 0, "makes no progress", 12, "gpu")


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    folder, parts = sys.argv[1], sys.argv[2:] or ["probe", "launchers", "faults"]
    build(folder)
    base = tempfile.mkdtemp(prefix="two_gpus.")
    with open(f"{base}/text.txt", "w") as f:
        f.write("the quick brown fox jumps over the lazy dog, and so it goes on. " * 2000)
    start = time.time()
    for part in parts:
        {"probe": lambda: probe(folder), "launchers": lambda: launchers(folder, base), "faults": lambda: faults(folder, base)}[part]()
        print(f"--- {part}: {time.time() - start:.0f} s", flush=True)
    print("\n".join(table))
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    shutil.rmtree(base, ignore_errors=True)
    sys.exit(1 if failed or not passed else 0)


if __name__ == "__main__":
    main()
