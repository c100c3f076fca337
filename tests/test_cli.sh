#!/usr/bin/env bash
# test_cli.sh - the program as its user meets it: tests/test_cli.sh build/cpu/train_gpt [row ...]
#
# Each row runs the binary in a fresh folder and compares exit code, messages and files. A row that compared nothing
# fails. What this machine cannot do (namespaces, strace, foreign locales) is skipped with its reason. The last line is
# "N passed, N failed, N skipped".
set -uo pipefail
binary=$(realpath -- "${1:?usage: tests/test_cli.sh BINARY [row ...]}")
shift
root=$(realpath -- "$(dirname "$0")/..")
export LC_ALL=C.UTF-8 OMP_NUM_THREADS=1 # tiny models: threads only wait for each other
unset DEEPSPEED_TIMEOUT WORLD_SIZE RANK LOCAL_RANK
sanitized=$(grep -aqF __asan_init -- "$binary" && echo yes) # the sanitizer has its own demands on memory

want=("$@")
source "$root/tests/shell_rows.sh"

# Runs the binary with a deadline; standard output and error go to files, the exit code to $code.
run() {
    timeout --kill-after=5 60 "$binary" "$@" >out 2>err </dev/null
    code=$?
    if [ "$code" -ge 132 ] && [ "$code" -le 139 ]; then fail "crashed with code $code: $(tail -c 300 err)"; fi
}
# run, and the exit code
run_expect() {
    local wanted=$1
    shift
    run "$@"
    compared=$((compared + 1))
    if [ "$code" -ne "$wanted" ]; then
        fail "exit code $code, expected $wanted: $(tail -n 3 err | head -c 400)"
        return 1
    fi
}
# A refusal: this code, at least one line "...: what; what to do", nothing that looks like a crash, and no output folder.
refuses() {
    run_expect "$@"
    compared=$((compared + 1))
    [ -s err ] || fail "no message"
    expect "no output folder is made by a refusal" test ! -e out_dir
}
# Two checkpoints of equal states, which other settings wrote: all but the configurations is equal.
same_checkpoint() { # WHAT A B
    expect "$1" diff -r -x manifest.json "$2" "$3"
    equal "$1: manifests" "$(sed '/^"config_ranks"/,$d' "$2/manifest.json")" "$(sed '/^"config_ranks"/,$d' "$3/manifest.json")"
}
# For rows that start ranks.
need_mpirun() {
    if ! command -v mpirun >/dev/null || [[ $(ldd "$binary") != *libmpi* ]]; then skip "this build has no MPI, or there is no mpirun"; return 1; fi
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
}
# A shard of 16-bit tokens in llm.c's format: NAME HEADER_COUNT TOKEN...
write_shard() {
    python3 - "$@" <<'PY'
import struct, sys
name, count, tokens = sys.argv[1], int(sys.argv[2]), [int(t) for t in sys.argv[3:]]
header = struct.pack("<256i", 20240520, 1, count, *([0] * 253))
open(name, "wb").write(header + struct.pack(f"<{len(tokens)}H", *tokens))
PY
}

# ---------------------------------------------------------------------------------------------------------------------
# Rows

row_trains_and_logs() {
    run_expect 0 -c config.json || return
    expect "log" test -s out_dir/log.jsonl
    python3 - <<'PY' >verdict 2>&1
import json, math
records = [json.loads(line, parse_constant=lambda name: 1 / 0) for line in open("out_dir/log.jsonl")]
updates = [r for r in records if "loss" in r]
assert [r["step"] for r in updates] == list(range(12)), "steps"
for r in updates:
    for key in ("loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens", "step_ms", "tokens_per_s", "tflops", "mfu"): assert key in r, key
    assert r["tokens"] == (r["step"] + 1) * 4 * 32, "tokens"
assert abs(updates[0]["loss"] - math.log(256)) < 0.2, f"first loss {updates[0]['loss']}"
assert updates[-1]["loss"] < updates[0]["loss"] - 0.05, f"last loss {updates[-1]['loss']}"
assert records[-1].get("event") == "done", records[-1]
memory = [r for r in records if r.get("event") == "memory"]
assert len(memory) == 2 and memory[-1]["at_step"] == 12, memory
kinds = ("weights", "masters", "gradients", "optimizer_states", "buffers", "activations", "scratch")
assert sum(memory[-1][k] for k in kinds) == memory[-1]["planned"], memory
assert 0.98 * memory[-1]["planned"] <= memory[-1]["peak"] <= 1.02 * memory[-1]["planned"], memory
print("good")
PY
    equal "the log" "$(cat verdict | tail -n 1)" good
}

row_activation_checkpointing() {
    run_expect 0 -c config.json || return
    mv out_dir kept
    run_expect 0 -c config.json activation_checkpointing.cpu_checkpointing=true activation_checkpointing.profile=true model.n_layer=2 || return
    equal "losses and norms" "$(curve out_dir/log.jsonl)" "$(curve kept/log.jsonl)"
    prints "block, 2 segments in host memory: saves"
    python3 - <<'PY' >verdict 2>&1
import json
few, kept = ([json.loads(line) for line in open(f"{d}/log.jsonl")] for d in ("out_dir", "kept"))
activations = [[r["activations"] for r in log if r.get("event") == "memory"][-1] for log in (few, kept)]
assert activations[0] < activations[1], activations
times = [r for r in few if r.get("event") == "checkpoints"]
assert [r["at_step"] for r in times] == list(range(1, 13)), times
for r in times: assert r["first"] == 0 and len(r["forward_ms"]) == len(r["backward_ms"]) == 2 and min(r["forward_ms"] + r["backward_ms"]) > 0, r
assert not [r for r in kept if r.get("event") == "checkpoints"]
print("good")
PY
    equal "the log" "$(cat verdict | tail -n 1)" good
}

# gradient_allreduce_op = sum is over the ranks that have other samples: those that share tokens, or matrices, do not count.
row_gradient_sum() {
    need_mpirun || return
    local layout n=0
    for layout in "1 gradient_allreduce_op=mean" "2 gradient_allreduce_op=sum" "4 gradient_allreduce_op=sum sequence_parallel_size=2" "4 gradient_allreduce_op=sum tensor_model_parallel_size=2"; do
        n=$((n + 1))
        ASAN_OPTIONS=detect_leaks=0 timeout 60 mpirun -n ${layout%% *} "$binary" -c config.json run.steps=1 ${layout#* } run.output_dir=run_$n >out 2>err </dev/null || { fail "$layout: $(tail -n 3 err)"; return; }
        expect "$layout: twice the mean on two data-parallel ranks" python3 - "run_$n" <<'PY'
import json, sys
norm = lambda folder: [r for r in map(json.loads, open(f"{folder}/log.jsonl")) if "grad_norm" in r][0]["grad_norm"]
wanted = norm("run_1") * (1 if sys.argv[1] == "run_1" else 2)
assert abs(norm(sys.argv[1]) - wanted) < 1e-4 * wanted, (norm(sys.argv[1]), wanted)
PY
    done
}

# A model so narrow that all of a rank's shard is the same on the other ranks of tensor parallelism, which count it: it adds nothing to the norm.
row_rank_that_counts_nothing() {
    need_mpirun || return
    local common=(-c config.json model.n_embd=4 model.n_head=2 model.n_positions=128 run.steps=4 gradient_clipping=0.1)
    run_expect 0 "${common[@]}" || return
    ASAN_OPTIONS=detect_leaks=0 timeout 60 mpirun -n 4 "$binary" "${common[@]}" tensor_model_parallel_size=2 zero_optimization.stage=1 run.output_dir=shared >out 2>err </dev/null
    equal "mpirun's exit code" $? 0
    python3 - <<'PY' >verdict 2>&1
import json
one, four = ([(r["loss"], r["grad_norm"]) for r in map(json.loads, open(f"{d}/log.jsonl")) if "grad_norm" in r] for d in ("out_dir", "shared"))
assert len(one) == len(four) == 4, (one, four)
for a, b in zip(one, four):
    for x, y in zip(a, b): assert abs(x - y) < 1e-4 * x, (one, four)
print("good")
PY
    equal "losses and norms of one rank" "$(tail -n 1 verdict)" good
}

# Two stages go half the way, one rank goes on: the curve of one rank that goes all of it. Samples and evaluations on the way.
row_pipeline() {
    need_mpirun || return
    local common=(-c config.json model.tie_word_embeddings=false gradient_accumulation_steps=4 data.val=train.txt run.eval_every=3 run.eval_batches=2 run.sample_every=3 run.sample_tokens=9)
    run_expect 0 "${common[@]}" || return
    mv out_dir kept
    ASAN_OPTIONS=detect_leaks=0 timeout --kill-after=5 60 mpirun -n 2 "$binary" "${common[@]}" pipeline_model_parallel_size=2 pipeline_schedule=zb-h1 run.steps=6 wall_clock_breakdown=true >out 2>err </dev/null
    equal "mpirun's exit code" $? 0
    prints "2 stages of 1 chunk, ZB-H1; ideal bubble"
    prints "in MiB saved for more operations on stage 1, which needs most: norms"
    prints "waiting for other stages"
    python3 - <<'PY' >verdict 2>&1
import json
log = [json.loads(line) for line in open("out_dir/log.jsonl")]
steps = [r for r in log if "step" in r]
assert len(steps) == 6 and all(r["wait_ms"] > 0 for r in steps) and "bubble" not in steps[0] and all(0 < r["bubble"] < 1 for r in steps[1:]), steps
assert not any("bubble" in json.loads(line) for line in open("kept/log.jsonl"))
losses = [[r["val_loss"] for r in map(json.loads, open(f"{d}/log.jsonl")) if r.get("event") == "eval"] for d in ("out_dir", "kept")]
assert losses[0] == losses[1][:len(losses[0])] and len(losses[0]) == 3, losses
print("good")
PY
    equal "the log" "$(cat verdict | tail -n 1)" good
    run_expect 0 "${common[@]}" || return
    equal "losses and norms" "$(curve out_dir/log.jsonl)" "$(curve kept/log.jsonl)"
}

row_check_config_is_quiet() {
    run_expect 0 -c config.json --check-config || return
    prints "train_batch_size"
    prints "gradient_clipping"
    expect "--check-config writes nothing" test ! -e out_dir
    run_expect 0 --help-config || return
    prints "zero_optimization"
    prints "train_micro_batch_size_per_gpu"
    run_expect 0 --help || return
    prints "--check-config"
    run_expect 0 --version || return
}

row_plan() {
    local memory=0.02 # GiB, too little for the model below; a GPU's context has 1, and scratch 32 MiB
    [[ $(ldd "$binary") != *libcud* ]] || memory=1.045
    run_expect 0 -c config.json --plan || return
    prints "34688 parameters; fp32, AdamW, ZeRO stage 0, 32 tokens a sample"
    expect "--plan writes nothing" test ! -e out_dir
    rm train.txt # nor does it read data
    run_expect 0 -c config.json --plan 1,2,4,64 train_micro_batch_size_per_gpu=1 zero_optimization.stage=3 model.n_embd=256 --device-memory 0.0005 || return
    equal "rows" "$(grep -acE '^ +[0-9]+ +1 +[0-9]+ +[0-9]+[* ] ' out)" 4
    prints "too much"
    equal "what each of 4 ranks holds, beside the first" "$(awk '/too much/ && $1 == 1 {one = $7} /too much/ && $1 == 4 {print (one / $7 > 3.9 && one / $7 < 4.1)}' out)" 1
    prints "that a rank sends or copies in an update"
    prints "no time is estimated"
    prints "nothing was found that fits on 64 ranks"
    run_expect 2 -c config.json --plan 1,3 || return # the one that can be is printed
    says "3 ranks: config.json:2: train_batch_size = 4: cannot be divided"
    prints "      3 refused"
    equal "the row of one rank" "$(grep -acE '^ +1 +4 +1 +4 ' out)" 1
    run_expect 0 -c config.json --plan 4 bf16.enabled=true tensor_model_parallel_size=2 pipeline_model_parallel_size=2 train_batch_size=8 train_micro_batch_size_per_gpu=2 || return
    prints "tensor 2 x pipeline 2 (1F1B)"
    equal "stages" "$(grep -ac 'stage [01], 1 blocks' out)" 2
    prints "estimated, not measured"
    equal "axes whose messages cost time" "$(grep -acE '^ +tensor +pipeline$' out)" 1
    prints "1F1B with 4 micro-batches, if F"
    prints "activation checkpointing of a micro-batch of 2 on stage 0, which needs most"
    local schedule
    for schedule in GPipe 1F1B Interleaved ZB-H1 ZB-V; do # what docs/pipeline.md shows is what is printed
        run_expect 0 -c config.json --plan 3 model.n_layer=6 pipeline_model_parallel_size=3 pipeline_schedule=$schedule train_batch_size=6 train_micro_batch_size_per_gpu=1 || return
        sed -n '/ micro-batches, if F/,/^activation/{/^stage/s/^/    /p;/^  micro-/s/^/    /p;/^  chunk/s/^/    /p}' out >drawing
        expect "$schedule is drawn" test -s drawing
        equal "the drawing of $schedule in docs/pipeline.md" "$(python3 -c 'import sys; print(open("drawing").read() in open(sys.argv[1]).read())' "$root/docs/pipeline.md")" True
    done
    run_expect 0 -c config.json --plan 2 bf16.enabled=true model.n_embd=256 train_batch_size=4 train_micro_batch_size_per_gpu=2 --device-memory "$memory" || return
    prints "what would fit on 2 ranks"
    # shellcheck disable=SC2046
    run_expect 0 -c config.json --plan 2 bf16.enabled=true model.n_embd=256 train_batch_size=4 train_micro_batch_size_per_gpu=2 --device-memory "$memory" $(grep -am1 -A2 'what would fit' out | tail -n1) || return
    prints "  fits" # what it proposed
    local host together # of one rank, and of two on the same host
    run_expect 0 -c config.json --plan 2 model.n_embd=256 train_batch_size=4 train_micro_batch_size_per_gpu=2 zero_optimization.stage=1 zero_optimization.offload_optimizer.device=cpu --device-memory 2 --host-memory 1 || return
    prints "  fits"
    host=$(awk '$1 == 2 && NF > 12 {print $13}' out)
    together=$(awk -v mib="$host" 'BEGIN {printf "%.6f", 2 * mib / 1024}')
    run_expect 0 -c config.json --plan 2 model.n_embd=256 train_batch_size=4 train_micro_batch_size_per_gpu=2 zero_optimization.stage=1 zero_optimization.offload_optimizer.device=cpu --device-memory 2 \
        --host-memory "$(awk -v gib="$together" 'BEGIN {print gib - 1 / 1024}')" || return
    equal "MiB that two ranks lack of their host" "$(sed -n 's/.*  \([0-9.]*\) too much for the host.*/\1/p' out | head -n1 | awk '{print ($1 > 0.98 && $1 < 1.02)}')" 1
    prints "nothing was found that fits on 2 ranks"
    refuses 2 -c config.json --plan 3
    refuses 2 -c config.json --plan 1,2 run.stepz=1
}

# A plan for GPUs knows what they do not train, and what sums of a very wide inner layer take, whether one is here or not.
row_plan_of_a_wide_model() {
    local gpu=(-c config.json --plan 8 model.n_head=160 zero_optimization.stage=3 train_batch_size=8 train_micro_batch_size_per_gpu=1)
    if [[ $(ldd "$binary") != *libcud* ]]; then skip "the CPU takes any width"; return; fi
    refuses 2 "${gpu[@]}" model.n_embd=20480
    says "train_gpt.model.n_embd = 20480: LayerNorm's backward pass takes at most "
    refuses 2 "${gpu[@]}" model.n_embd=20480 --device-memory 140
    says "train_gpt.model.n_embd = 20480: LayerNorm's backward pass takes at most 16384 channels on any GPU; lower n_embd"
    run_expect 0 "${gpu[@]}" model.n_embd=10240 --device-memory 140
    run_expect 0 -c config.json --plan 1 bf16.enabled=true model.n_embd=64 model.n_inner=131072 train_batch_size=512 --device-memory 140
    equal "GiB of scratch: 4 bytes for each of 131072 columns and 128 of 16384 rows" "$(awk '/GiB of memory a rank/ {getline; getline; print $11}' out)" 0.06
}

row_too_large_for_memory() {
    refuses 2 -c config.json model.n_layer=1000 model.n_embd=8192
    says "out of memory: a rank needs 1"
    says "lower train_micro_batch_size_per_gpu"
    # too little data, or a tokenizer that is no file, is said before memory is looked at
    refuses 65 -c config.json model.n_layer=1000 model.n_embd=8192 train_batch_size=100000 train_micro_batch_size_per_gpu=1
    says "but one update of 100000 samples of 32 tokens needs 3200001; give more data, or lower the batch"
    refuses 65 -c config.json model.n_layer=1000 model.n_embd=8192 data.tokenizer=nowhere
    says "nowhere"
}

# The settings guide's mixed offload, on a folder that is there: the same curve as without, and nothing is left behind.
row_weights_in_a_file() {
    mkdir nvme
    run_expect 0 -c config.json run.steps=6 zero_optimization.stage=3 run.output_dir=plain || return
    run_expect 0 -c config.json run.steps=6 run.output_dir=filed zero_optimization.stage=3 zero_optimization.offload_optimizer.device=cpu zero_optimization.offload_optimizer.pin_memory=true \
        zero_optimization.offload_param.device=nvme zero_optimization.offload_param.nvme_path=nvme zero_optimization.offload_param.buffer_count=4 zero_optimization.offload_param.max_in_cpu=0 \
        zero_optimization.stage3_param_persistence_threshold=0 zero_optimization.reduce_bucket_size=50000000 zero_optimization.stage3_prefetch_bucket_size=30000000 || return
    prints "a rank of weights in nvme, by"
    equal "the curve" "$(curve filed/log.jsonl)" "$(curve plain/log.jsonl)"
    equal "what is left in the folder" "$(ls -A nvme)" ""
    refuses 2 -c config.json zero_optimization.stage=3 zero_optimization.offload_param.device=nvme zero_optimization.offload_param.nvme_path=nvme zero_optimization.offload_param.max_in_cpu=0 \
        zero_optimization.stage3_param_persistence_threshold=0 zero_optimization.offload_param.buffer_size=1000
    says "zero_optimization.offload_param.buffer_size = 1000: a buffer takes a rank's shard of a block"
}

# What is to be offloaded must fit into what the process may have of the host: here an address space of 1 GB.
row_too_large_for_host_memory() {
    if [ -n "$sanitized" ] || [[ $(ldd "$binary") == *libcud* ]]; then skip "this build's libraries need more addresses"; return; fi
    (ulimit -v 1000000 && exec timeout 60 "$binary" -c config.json model.n_layer=18 model.n_embd=512 model.n_head=8 run.output_dir=host zero_optimization.stage=1 \
        zero_optimization.offload_optimizer.device=cpu >out 2>err </dev/null)
    equal "exit code" $? 2
    says "out of host memory: 1 rank of a host needs"
    says "optimizer states"
    says "lower zero_optimization.offload_optimizer.ratio"
}

# mpirun calls a rank that leaves without MPI's own goodbye a crash.
row_early_ends_under_mpirun() {
    local arguments
    need_mpirun || return
    for arguments in --help --version "-c config.json --check-config" "-c config.json --plan"; do
        # shellcheck disable=SC2086
        ASAN_OPTIONS=detect_leaks=0 timeout --kill-after=5 60 mpirun -n 2 "$binary" $arguments >out 2>err </dev/null # MPI keeps what it allocates
        equal "mpirun's exit code after $arguments" $? 0
    done
    equal "ranks that print" "$(grep -ac ' parameters; ' out)" 1
    prints "      2      2      1       4  "
}

# Where only another rank than 0 has something to refuse, that rank says it.
row_refusal_of_one_rank() {
    need_mpirun || return
    local second says
    while IFS='|' read -r second says; do
        # shellcheck disable=SC2086
        ASAN_OPTIONS=detect_leaks=0 timeout --kill-after=5 60 mpirun -n 1 "$binary" -c config.json : -n 1 "$binary" $second >out 2>err </dev/null
        equal "mpirun's exit code with $second" $? 2
        equal "lines of rank 1 that say \"$says\"" "$(grep -ac "rank 1: .*$says" err)" 1
    done <<<'-c missing.json|missing.json
-c config.json zero_optimization.stage=9|zero_optimization.stage
-c config.json --bogus|--bogus'
}

# Ranks that were given different settings learn which, and who has what.
row_configurations_that_differ() {
    need_mpirun || return
    local ranks=(env ASAN_OPTIONS=detect_leaks=0 timeout --kill-after=5 60 mpirun -n 1 "$binary" -c config.json train_batch_size=6 :)
    "${ranks[@]}" -n 1 "$binary" -c config.json train_batch_size=6 optimizer.params.lr=2e-3 run.output_dir=elsewhere : -n 1 "$binary" -c config.json train_batch_size=6 >out 2>err </dev/null
    equal "mpirun's exit code" $? 2
    says 'have different configurations: optimizer.params.lr is 0.002 on rank 1 and 0.001 on the other 2; train_gpt.run.output_dir is "elsewhere" on rank 1 and "out_dir" on the other 2; give all'
    equal "lines that say so" "$(grep -ac 'different configurations' err)" 1
    "${ranks[@]}" -n 1 "$binary" -c config.json train_batch_size=6 optimizer.type=SGD >out 2>err </dev/null
    equal "mpirun's exit code" $? 2
    says 'optimizer.type is "AdamW" on rank 0, "SGD" on rank 1; '
    says 'optimizer.params.eps is 1e-08 on rank 0, without a value on rank 1; '
    sed 's/1e-3/0.001/' config.json >same.json # said in other words, it is the same
    "${ranks[@]}" -n 1 "$binary" -c same.json train_batch_size=6 run.steps=12 >out 2>err </dev/null
    equal "mpirun's exit code with equal values" $? 0
}

# A checkpoint is known by its name, however it is reached, and under a name that somebody gave it.
row_inspect_by_other_names() {
    run_expect 0 -c config.json run.steps=6 run.checkpoint_every=2 || return
    cd out_dir/checkpoints || return
    mkdir ../model-step-00000006 && mv step-00000004 best
    run_expect 0 --inspect ../..//out_dir//
    equal "checkpoints told" "$(grep -v '^ ' out | tr '\n' ' ')" "../..//out_dir/checkpoints/step-00000006 ../..//out_dir/checkpoints/step-00000002 ../..//out_dir/checkpoints/best "
    run_expect 0 --inspect best/
    equal "the only one" "$(head -n 2 out | tr '\n' ' ')" "best   step           4 (4 updates applied, 0 skipped) "
    rm -r step-00000002 && mv step-00000006 step-00000002
    local path
    for path in . step-00000002 step-00000002/ step-00000002/. ../checkpoints/step-00000002//; do
        run_expect 66 --inspect $path
        says "is damaged: manifest.json: is of step 6, not of the step in the folder's name; if somebody renamed the folder, name it step-00000006" || break
        run_expect 66 --inspect-config $path
    done
    rm step-00000002/manifest.json
    for path in step-00000002 step-00000002/ step-00000002/.; do
        run_expect 66 --inspect $path
        says 'is damaged: manifest.json: is missing'
    done
    rm -r step-00000002
    run_expect 66 --inspect-config .
    says "error: --inspect-config .: no checkpoint in this folder is named by its step; name the one that is meant, such as ./best"
    run_expect 0 --inspect-config best/
    prints '"steps": 6'
}

# Ranks that were started for different things end at once, and all that is asked of folders is told once.
row_requests_that_differ() {
    need_mpirun || return
    local second asked ranks=(env ASAN_OPTIONS=detect_leaks=0 timeout --kill-after=5 30 mpirun -n 2 "$binary" -c config.json :)
    while IFS='|' read -r second asked; do
        # shellcheck disable=SC2086
        "${ranks[@]}" -n 1 "$binary" $second >out 2>err </dev/null
        equal "mpirun's exit code with $second" $? 2
        says "error: the ranks were not started alike: what they are asked for is $asked on rank 2 and training on the other 2; give all of them the same command line"
        equal "lines that say so with $second" "$(grep -ac 'not started alike' err)" 1
    done <<'END'
-c config.json --export there|--export there
-c config.json --generate=once|--generate once
-c config.json --plan 1,2|--plan
-c config.json --check-config|--check-config
--help|--help
--inspect .|--inspect .
--inspect-config .|--inspect-config .
--flight .|--flight .
END
    expect "nothing was begun" test ! -e out_dir -a ! -e there
    ASAN_OPTIONS=detect_leaks=0 mpirun -n 1 "$binary" -c config.json --generate once : -n 1 "$binary" -c config.json --generate twice >out 2>err </dev/null
    equal "mpirun's exit code with two prompts" $? 2
    says '--generate once on rank 0, --generate twice on rank 1;'
    run_expect 0 -c config.json || return
    ASAN_OPTIONS=detect_leaks=0 mpirun -n 2 "$binary" --inspect out_dir >out 2>err </dev/null
    equal "mpirun's exit code" $? 0
    equal "checkpoints told" "$(grep -c 'checksums      all match' out)" 1
    ASAN_OPTIONS=detect_leaks=0 mpirun -n 2 bash -c '"$0" --version && "$0" --inspect out_dir; exit $?' "$binary" >out 2>err </dev/null
    equal "mpirun's exit code of two commands a rank" $? 0
}

# The ranks of mpirun cut into the axes that the file names: the losses of one rank, and a text.
row_tensor_and_sequence_parallel() {
    need_mpirun || return
    local losses=() degrees
    run_expect 0 -c config.json run.steps=3 run.output_dir=one model.n_head=4 || return
    losses=("$(grep -ao '"loss":[0-9.]*' one/log.jsonl | cut -c1-12)")
    for degrees in "tensor_model_parallel_size=2 2" "sequence_parallel_size=2 2" "tensor_model_parallel_size=2 sequence_parallel_size=2 4"; do
        # shellcheck disable=SC2086
        ASAN_OPTIONS=detect_leaks=0 timeout --kill-after=5 120 mpirun -n ${degrees##* } "$binary" -c config.json run.steps=3 run.output_dir=several model.n_head=4 run.resume=none \
            run.sample_every=3 run.sample_tokens=8 ${degrees% *} >out 2>err </dev/null
        equal "mpirun's exit code with $degrees" $? 0
        prints "parallelism"
        equal "losses with $degrees" "$(grep -ao '"loss":[0-9.]*' several/log.jsonl | cut -c1-12)" "${losses[0]}"
        rm -r several
    done
    refuses 2 -c config.json tensor_model_parallel_size=2
    says "cannot be divided"
    run_expect 0 -c config.json --plan 4 tensor_model_parallel_size=2 sequence_parallel_size=2 model.n_head=4
}

# The settings guides' examples of parallelism, their sizes brought down to 8 ranks and a small model, train as one rank does.
row_examples_of_the_guides() {
    if [ -n "$sanitized" ]; then skip "eight sanitized ranks take long; fewer are in other rows"; return; fi
    need_mpirun || return
    local small=(model.preset=null model.n_layer=4 model.n_head=4 model.n_embd=32 model.n_positions=32 model.vocab_size=256 data.train=train.txt run.seq_len=32 run.steps=2 optimizer.type=AdamW optimizer.params.lr=1e-3)
    local one=(tensor_model_parallel_size=1 pipeline_model_parallel_size=1 zero_optimization.stage=0)
    local files=(t06-hybrid t08-parallel-python t12-175B t13-sequence) ranks=(8 8 8 2) batch=(32 32 32 1) i
    local changes=("" "" "train_batch_size=32 gradient_accumulation_steps=4 tensor_model_parallel_size=2 pipeline_model_parallel_size=2" "sequence_parallel.attention_window_size=8")
    for i in 0 1 2 3; do
        # shellcheck disable=SC2086
        ASAN_OPTIONS=detect_leaks=0 timeout --kill-after=5 120 mpirun -n "${ranks[i]}" "$binary" -c "$root/tests/config/${files[i]}.json" "${small[@]}" ${changes[i]} run.output_dir="several$i" >out 2>err </dev/null
        equal "mpirun's exit code with ${files[i]}" $? 0
        # shellcheck disable=SC2086
        run_expect 0 -c "$root/tests/config/${files[i]}.json" "${small[@]}" ${changes[i]} "${one[@]}" zero_optimization.offload_optimizer.device=none zero_optimization.offload_param.device=none \
            sequence_parallel.enabled=false train_batch_size="${batch[i]}" run.output_dir="one$i" || return
        python3 - "several$i" "one$i" <<'PY' >verdict 2>&1
import json, sys
several, one = ([r["loss"] for r in map(json.loads, open(f"{d}/log.jsonl")) if "loss" in r] for d in sys.argv[1:])
assert len(several) == len(one) == 2 and all(abs(a - b) < 2e-3 * b for a, b in zip(several, one)), (several, one)
print("good")
PY
        equal "losses of ${files[i]}" "$(tail -n 1 verdict)" good
    done
}

# One run through six layouts, each of which goes on from the checkpoint of the one before: the curve of one rank. Then the model leaves
# and comes back under another layout, byte for byte, and writes the same text.
row_resume_through_layouts() {
    if [ -n "$sanitized" ]; then skip "eight sanitized ranks take long; fewer are in other rows"; return; fi
    need_mpirun || return
    export ASAN_OPTIONS=detect_leaks=0
    local common=(-c config.json train_batch_size=16 gradient_accumulation_steps=4 model.n_layer=4 model.n_head=4) split="tensor_model_parallel_size=2 pipeline_model_parallel_size=2" at=0 layout
    run_expect 0 "${common[@]}" run.output_dir=one run.steps=12 || return
    for layout in "4 $split zero_optimization.stage=1" "8 $split pipeline_schedule=zb-v zero_optimization.stage=3" "1" "4 tensor_model_parallel_size=4" \
        "4 sequence_parallel_size=2 pipeline_model_parallel_size=2 checkpoint.writer.decoupled=true" "3 pipeline_model_parallel_size=3 zero_optimization.stage=2"; do
        at=$((at + 2))
        # shellcheck disable=SC2086
        timeout --kill-after=5 120 mpirun -n ${layout%% *} "$binary" "${common[@]}" run.steps=$at $([[ $layout == *" "* ]] && echo "${layout#* }") >out 2>err </dev/null
        equal "mpirun's exit code with $layout" $? 0
        [[ $layout != *zb-v* ]] || prints "whole until the last micro-batch, since backward is split: "
    done
    python3 - <<'PY' >verdict 2>&1
import json
several, one = ([r["loss"] for r in map(json.loads, open(f"{d}/log.jsonl")) if "loss" in r] for d in ("out_dir", "one"))
assert len(several) == len(one) == 12 and all(abs(a - b) < 1e-5 * b for a, b in zip(several, one)), (several, one)
print("good")
PY
    equal "the losses" "$(tail -n 1 verdict)" good
    run_expect 0 "${common[@]}" --export whole || return
    # shellcheck disable=SC2086
    timeout --kill-after=5 120 mpirun -n 4 "$binary" "${common[@]}" --export parts $split >out 2>err </dev/null
    equal "mpirun's exit code of the export" $? 0
    expect "the same weights from two layouts" cmp whole/model.safetensors parts/model.safetensors
    # shellcheck disable=SC2086
    timeout --kill-after=5 120 mpirun -n 4 "$binary" "${common[@]}" model.init_from=whole run.output_dir=again run.steps=0 $split >out 2>err </dev/null
    equal "mpirun's exit code of the import" $? 0
    run_expect 0 "${common[@]}" run.output_dir=again --export back || return
    expect "the same weights after an import by parts" cmp whole/model.safetensors back/model.safetensors
    run_expect 0 "${common[@]}" --generate "line" run.sample_tokens=30 || return
    mv out text
    # shellcheck disable=SC2086
    timeout --kill-after=5 120 mpirun -n 4 "$binary" "${common[@]}" --generate "line" run.sample_tokens=30 $split >out 2>err </dev/null
    expect "the same text" cmp out text
}

row_misspelt_key() {
    sed -i 's/"gradient_clipping"/"gradient_cliping"/' config.json
    refuses 2 -c config.json
    says "config.json:4"
    says "gradient_cliping"
    says "gradient_clipping" # the suggestion
}

row_duplicate_key() {
    sed -i 's/"gradient_clipping": 1.0,/"gradient_clipping": 1.0,\n    "gradient_clipping": 0.5,/' config.json
    refuses 2 -c config.json
    says "gradient_clipping"
    says "config.json:5"
    says "4" # the other line
}

row_all_problems_at_once() {
    sed -i 's/"gradient_clipping": 1.0/"gradient_clipping": "much", "fp61": {"enabled": true}/; s/"lr": 1e-3/"lr": -1, "bettas": [0.9, 0.95]/' config.json
    refuses 2 -c config.json
    says "gradient_clipping"
    says "fp61"
    says "bettas"
    says "lr"
}

row_not_built_yet() {
    refuses 2 -c config.json zero_optimization.stage=3 zero_optimization.zero_quantized_weights=true
    says "not built yet"
}

row_command_line() {
    refuses 2 -c config.json run.steps=
    refuses 2 -c config.json run.stepz=5
    says "run.steps"
    refuses 2 -c config.json run.steps=five
    refuses 2 -c config.json --no-such-switch
    says "--no-such-switch"
    refuses 2 -c
    refuses 2 -c missing.json
    says "missing.json"
    refuses 2 -c /tmp
    refuses 2 -c /dev/zero
    mkfifo fifo
    refuses 2 -c fifo
    : >empty.json
    refuses 2 -c empty.json
    run_expect 0 -c config.json run.steps=2 || return
    equal "updates under an override" "$(grep -c grad_norm out_dir/log.jsonl)" 2
}

# A configuration that ends anywhere is refused, and never crashes the reader.
row_config_cut_anywhere() {
    local n size
    size=$(stat -c %s config.json)
    for ((n = 0; n < size - 2; n += 3)); do
        head -c "$n" config.json >cut.json
        run_expect 2 -c cut.json --check-config
    done
}

row_escapes_in_messages() {
    printf '{"train_batch_size": 4, "\033[2Jgrad%%n%%s\\u001b[31m": 1}\n' >bad.json
    refuses 2 -c bad.json
    expect "no escape byte reaches the terminal" bash -c '! grep -aq $'"'\033'"' err'
    refuses 65 -c config.json $'data.train=\033]0;x\007'
    expect "no escape byte reaches the terminal" bash -c '! grep -aq $'"'\033'"' err'
}

row_missing_data() {
    refuses 65 -c config.json data.train=nowhere.txt
    says "nowhere.txt"
    refuses 65 -c config.json 'data.train=no_*_such.bin'
    says 'no_*_such.bin'
    : >empty.txt
    refuses 65 -c config.json data.train=empty.txt
    says "empty.txt"
    mkdir folder.txt
    refuses 65 -c config.json data.train=folder.txt
    mkfifo pipe.txt
    refuses 65 -c config.json data.train=pipe.txt
    ln -s loop.txt loop.txt
    refuses 65 -c config.json data.train=loop.txt
    printf 'ten bytes.' >short.txt
    refuses 65 -c config.json data.val=short.txt
    says 'train_gpt.data.val: "short.txt" has 10 tokens in 1 file, but evaluation by one sample of 32 tokens needs 33; give more data, or lower train_gpt.run.seq_len'
    refuses 65 -c config.json data.train=short.txt train_batch_size=1
    says 'train_gpt.data.train: "short.txt" has 10 tokens in 1 file, but one update of 1 samples of 32 tokens needs 33; give more data, or lower the batch or train_gpt.run.seq_len'
}

row_cut_shard() {
    write_shard good.bin 1500 $(seq 1 1500 | awk '{ print $1 % 256 }')
    run_expect 0 -c config.json data.train=good.bin run.steps=1 || return
    rm -rf out_dir
    head -c 2001 good.bin >cut.bin
    refuses 65 -c config.json data.train=cut.bin
    says "cut.bin"
    head -c 700 good.bin >header.bin
    refuses 65 -c config.json data.train=header.bin
    says "header.bin"
    (head -c 1024 good.bin; head -c 1500 /dev/zero; echo) >long.bin
    refuses 65 -c config.json data.train=long.bin
    (echo "not a shard at all"; head -c 4000 /dev/zero) >magic.bin
    refuses 65 -c config.json data.train=magic.bin
    says "magic.bin"
}

row_token_out_of_range() {
    write_shard bad.bin 1500 $(seq 1 1500 | awk '{ print $1 == 1234 ? 50000 : $1 % 256 }')
    refuses 65 -c config.json data.train=bad.bin
    says "bad.bin"
    says "50000"
    says "256"
    says $((1024 + 1233 * 2)) # offset in the file
}

row_output_cannot_be_made() {
    echo "precious" >in_the_way
    run_expect 73 -c config.json run.output_dir=in_the_way
    says "in_the_way"
    equal "the file in the way" "$(cat in_the_way)" precious
    run_expect 73 -c config.json run.output_dir=in_the_way/deeper
    says "in_the_way"
}

row_no_permission_to_write() {
    local as=() program=$binary
    mkdir readonly
    if [ "$(id -u)" -eq 0 ]; then
        command -v setpriv >/dev/null || { skip "no setpriv"; return; }
        as=(setpriv --reuid=65534 --regid=65534 --clear-groups)
        chmod 755 "$base" . && cp -- "$binary" program && chmod 755 program # the build folder may be out of another user's reach
        "${as[@]}" test -r config.json && "${as[@]}" test -x program || { skip "another user cannot reach $PWD"; return; }
        program=$PWD/program
    fi
    chmod 555 readonly
    "${as[@]}" timeout 60 "$program" -c "$PWD/config.json" data.train="$PWD/train.txt" run.output_dir="$PWD/readonly/out" >out 2>err </dev/null
    equal "exit code" $? 73
    says "readonly"
    "${as[@]}" timeout 60 "$program" -c "$PWD/config.json" data.train="$PWD/train.txt" run.output_dir="$PWD/readonly" >out 2>err </dev/null
    equal "exit code" $? 73
    says "readonly"
}

row_read_only_file_system() {
    mkdir mounted
    unshare -m true 2>/dev/null || { skip "no mount namespaces here"; return; }
    unshare -m bash -c 'mount -t tmpfs none mounted && mount -o remount,ro mounted && exec "$0" -c config.json run.output_dir=mounted/out' "$binary" >out 2>err </dev/null
    equal "exit code" $? 73
    says "mounted"
}

# Too little room for a checkpoint: one line, code 73 or 74, and no half-written checkpoint under a final name.
row_full_disk() {
    mkdir mounted
    unshare -m true 2>/dev/null || { skip "no mount namespaces here"; return; }
    unshare -m bash -c 'mount -t tmpfs -o size=64k none mounted && "$0" -c config.json run.output_dir=mounted; echo $? >code; find mounted -type f >files; mkdir kept; cp -r mounted/. kept/' "$binary" >out 2>err </dev/null
    expect "exit code $(cat code) is 73 or 74" grep -qxE '73|74' code
    says "free"
    says "; mend that and start again, as there is none here yet"
    equal "checkpoints under a final name" "$(find kept -path '*step-*' | wc -l)" 0
    unshare -m bash -c 'mount -t tmpfs -o size=64k none mounted && exec "$0" -c config.json checkpoint.save_dir=mounted run.checkpoint_every=2' "$binary" >out 2>err </dev/null
    equal "exit code after three failures" $? 74
    says "note: the checkpoint of step 4 could not be saved: mounted/step-00000004: needs "
    says "; there is none yet, training goes on"
    says "error: three checkpoints in a row could not be saved, the last one of step 6: mounted/step-00000006: needs "
    says "; mend that and start again, as there is none here yet"
    expect "the log is whole lines of JSON" python3 -c 'import json; [json.loads(l) for l in open("kept/log.jsonl")]'
}

# A disk that is full after the first checkpoint: that one stays as it is, training goes on, a line and a record of the log say what was not
# saved, and without its last checkpoint the run has not ended well, also where that one was due anyway.
row_disk_full_in_mid_run() {
    local mode code
    unshare -m true 2>/dev/null || { skip "no mount namespaces here"; return; }
    mkdir mounted
    for mode in false true; do
        rm -rf out_dir
        unshare -m bash -c 'mount -t tmpfs -o size=1700k none mounted && "$@"; echo $? >code; ls mounted >listing; "$1" --inspect mounted >inspected' - \
            "$binary" -c config.json checkpoint.save_dir=mounted run.checkpoint_every=4 checkpoint.writer.decoupled=$mode >out 2>err </dev/null
        equal "exit code" "$(cat code)" 74
        says "the checkpoint of step 8 could not be saved: mounted/step-00000008: needs "
        says "earlier ones are intact, training goes on"
        says "error: the last checkpoint, of step 12, could not be saved"
        says "; mend that and resume from step-00000004"
        equal "checkpoints" "$(grep step- listing)" step-00000004
        equal "good ones" "$(grep -c 'checksums      all match' inspected)" 1
        equal "updates" "$(logged_steps out_dir/log.jsonl)" 12
        expect "the record of step 4" grep -q '"event":"checkpoint","at_step":4,"durable":true' out_dir/log.jsonl
        expect "the record of step 8" grep -q '"event":"checkpoint","at_step":8,"durable":false' out_dir/log.jsonl
    done
}

# Half a record at the end of the log, as a crash or a full disk leaves it, does not spoil the next one.
row_torn_log() {
    mkdir out_dir
    printf '{"step":1}\n{"step":2,"lo' >out_dir/log.jsonl
    timeout 60 "$binary" -c config.json >out 2>err </dev/null
    equal "exit code" $? 0
    expect "the log is lines of JSON, the whole record among them" python3 -c 'import json; r = [json.loads(l) for l in open("out_dir/log.jsonl")]; assert r[0] == {"step": 1} and r[1]["event"] == "start", r[:2]'
}

row_streams_closed() {
    timeout 60 "$binary" -c config.json <&- >&- 2>&-
    equal "exit code with all streams closed" $? 0
    expect "log" grep -q '"done"' out_dir/log.jsonl
    expect "log holds nothing but records" python3 -c 'import json; [json.loads(l) for l in open("out_dir/log.jsonl")]'
    rm -rf out_dir
    timeout 60 "$binary" -c config.json </dev/null >&- 2>err
    equal "exit code with standard output closed" $? 0
    rm -rf out_dir
    timeout 60 "$binary" -c config.json run.output_dir=out_dir run.sample_every=6 run.sample_tokens=9 </dev/null >/dev/full 2>err
    equal "exit code with standard output full" $? 0
    equal "lines that say so" "$(grep -c 'note: standard output: No space left on device: what is printed is lost' err)" 1
    expect "log" grep -q '"done"' out_dir/log.jsonl
}

row_reader_goes_away() {
    (timeout 60 "$binary" -c config.json 2>err </dev/null; echo $? >code) | head -n 1 >out
    equal "exit code after the pipe's reader left" "$(cat code)" 0
    expect "log" grep -q '"done"' out_dir/log.jsonl
}

# The signal, the update at hand, a save (also in a run that shall leave none at its end), exit code 0; then the rest of the run, equal bit for bit to a run never stopped.
row_sigterm_saves_and_resume_is_bitwise() {
    local pid signal
    run_expect 0 -c config.json run.steps=1500 run.output_dir=whole || return
    curve whole/log.jsonl >whole.curve
    equal "updates of the whole run" "$(wc -l <whole.curve)" 1500
    for signal in TERM INT; do
        rm -rf out_dir
        # (started from a shell without job control, background processes ignore SIGINT unless told otherwise)
        python3 -c 'import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])' \
            "$binary" -c config.json run.steps=1500 run.checkpoint_at_end=false >out 2>err </dev/null &
        pid=$!
        started+=("$pid")
        wait_for_steps out_dir/log.jsonl 50 "$pid"
        kill -s "$signal" "$pid"
        wait "$pid"
        equal "exit code after SIG$signal" $? 0
        prints "saving"
        expect "it stopped early ($(grep -c grad_norm out_dir/log.jsonl) updates)" test "$(grep -c grad_norm out_dir/log.jsonl)" -lt 1500
        run_expect 0 -c config.json run.steps=1500
        curve out_dir/log.jsonl >parts.curve
        expect "curve after SIG$signal and resume: $(diff whole.curve parts.curve | head -n 3)" cmp whole.curve parts.curve
        expect "weights after SIG$signal and resume are those of the whole run" same_weights whole out_dir
    done
}
# The newest checkpoints of two runs hold equal state files.
same_weights() {
    local a b file n=0
    a=$(newest_checkpoint "$1") b=$(newest_checkpoint "$2")
    for file in "$a"/shard-*.bin; do
        [ -s "$file" ] || return 1
        cmp -s -- "$file" "$b/${file##*/}" || return 1
        n=$((n + 1))
    done
    [ "$n" -gt 0 ]
}
newest_checkpoint() { find "$1/checkpoints" -mindepth 1 -maxdepth 1 -type d -not -name '.*' | sort -V | tail -n 1; }

row_checkpoint_every() {
    run_expect 0 -c config.json run.steps=12 run.output_dir=whole || return
    curve whole/log.jsonl >whole.curve
    run_expect 0 -c config.json run.steps=12 run.checkpoint_every=5 || return
    equal "checkpoints (after 5, 10 and 12 updates)" "$(find out_dir/checkpoints -mindepth 1 -maxdepth 1 -type d | wc -l)" 3
    curve out_dir/log.jsonl >parts.curve
    expect "saving changes nothing" cmp whole.curve parts.curve
    run_expect 0 -c config.json run.steps=12 run.checkpoint_at_end=false run.output_dir=measured || return
    curve measured/log.jsonl >measured.curve
    expect "nor does not saving" cmp whole.curve measured.curve
    equal "checkpoints of a run that shall leave none" "$(find measured -name 'step-*' | wc -l)" 0
}

# kill -9 at any instant: the next start goes on from the newest whole checkpoint and ends on the same curve.
row_kill_and_resume() {
    local pid i before
    run_expect 0 -c config.json run.steps=60 run.output_dir=whole || return
    curve whole/log.jsonl >whole.curve
    for i in 4 5 8 13; do # updates after its start
        before=$(logged_steps out_dir/log.jsonl)
        "$binary" -c config.json run.steps=60 run.checkpoint_every=2 >out 2>err </dev/null &
        pid=$!
        started+=("$pid")
        wait_for_steps out_dir/log.jsonl $((before + i)) "$pid"
        kill -9 "$pid" 2>/dev/null
        wait "$pid" 2>/dev/null
    done
    run_expect 0 -c config.json run.steps=60 run.checkpoint_every=2 || return
    curve out_dir/log.jsonl >parts.curve
    expect "curve after four kills: $(diff whole.curve parts.curve | head -n 3)" cmp whole.curve parts.curve
    expect "weights after four kills" same_weights whole out_dir
    equal "unfinished files left behind" "$(find out_dir -name '.*' -mindepth 1 -not -name '.lock' | wc -l)" 0
}

# Written in the background, checkpoints and curve are those of a run that waits for each of them; and so they are after kills.
row_background_saves() {
    local pid i tag before
    run_expect 0 -c config.json run.steps=60 run.checkpoint_every=7 run.output_dir=whole || return
    curve whole/log.jsonl >whole.curve
    run_expect 0 -c config.json run.steps=60 run.checkpoint_every=7 checkpoint.writer.decoupled=true || return
    curve out_dir/log.jsonl >parts.curve
    expect "saving changes nothing" cmp whole.curve parts.curve
    for tag in step-00000007 step-00000056 step-00000060; do same_checkpoint "$tag is the same" "whole/checkpoints/$tag" "out_dir/checkpoints/$tag"; done
    equal "durable saves" "$(grep -c '"event":"checkpoint","at_step":[0-9]*,"durable":true,"bytes":[0-9]*,"seconds":[0-9.]*,"stall_ms":[0-9.]*,"write_mb_s":[0-9.]*}' out_dir/log.jsonl)" 9
    prints 's of which training waited'
    # one save after each update: they wait for each other
    run_expect 0 -c config.json run.steps=12 run.checkpoint_every=1 checkpoint.async_save=true run.output_dir=often || return
    equal "durable saves, one an update" "$(grep -c '"event":"checkpoint","at_step":[0-9]*,"durable":true' often/log.jsonl)" 12
    says 'waits for that of step'
    rm -rf out_dir
    for i in 5 7 9 8 9; do # updates after its start
        before=$(logged_steps out_dir/log.jsonl)
        "$binary" -c config.json run.steps=60 run.checkpoint_every=2 checkpoint.writer.decoupled=true >out 2>err </dev/null &
        pid=$!
        started+=("$pid")
        wait_for_steps out_dir/log.jsonl $((before + i)) "$pid"
        kill -9 "$pid" 2>/dev/null
        wait "$pid" 2>/dev/null
    done
    # a signal: what is on its way is brought to its end, and the last save follows
    before=$(logged_steps out_dir/log.jsonl)
    "$binary" -c config.json run.steps=60 run.checkpoint_every=2 checkpoint.writer.decoupled=true >out 2>err </dev/null &
    pid=$!
    started+=("$pid")
    wait_for_steps out_dir/log.jsonl $((before + 3)) "$pid"
    kill -TERM "$pid" 2>/dev/null
    wait "$pid"
    equal "exit code after SIGTERM" $? 0
    run_expect 0 -c config.json run.steps=60 run.checkpoint_every=2 checkpoint.writer.decoupled=true || return
    curve out_dir/log.jsonl >parts.curve
    expect "curve after five kills and a signal: $(diff whole.curve parts.curve | head -n 3)" cmp whole.curve parts.curve
    expect "weights after five kills and a signal" same_weights whole out_dir
    equal "unfinished files left behind" "$(find out_dir -name '.*' -mindepth 1 -not -name '.lock' | wc -l)" 0
}

# No host memory left for the copy: said at the start, and saves are as right as if nobody had asked for the background. The kernel's
# word on memory is covered by one that leaves 64 KiB.
row_background_saves_without_memory() {
    unshare -m true 2>/dev/null || { skip "no mount namespaces here"; return; }
    run_expect 0 -c config.json run.checkpoint_every=5 run.output_dir=whole || return
    sed -E 's/^(MemAvailable: +)[0-9]+/\164/' /proc/meminfo >meminfo
    equal "what the kernel is made to say" "$(sed -nE 's/^MemAvailable: +//p' meminfo)" "64 kB"
    unshare -m bash -c 'mount --bind meminfo /proc/meminfo && exec "$0" "$@"' "$binary" -c config.json run.checkpoint_every=5 checkpoint.writer.decoupled=true >out 2>err </dev/null
    equal "exit code" $? 0
    says "checkpoint.writer.decoupled = true: the copies that it writes from take 0.00 GiB of host memory a rank"
    says "training waits for its checkpoints instead"
    expect "no save is made in the background" bash -c '! grep -q "of which training waited" out'
    equal "durable saves" "$(grep -c '"event":"checkpoint","at_step":[0-9]*,"durable":true' out_dir/log.jsonl)" 3
    expect "the same checkpoints" diff -r -x .lock -x manifest.json whole/checkpoints out_dir/checkpoints
    for tag in step-00000005 step-00000010 step-00000012; do same_checkpoint "$tag is the same" "whole/checkpoints/$tag" "out_dir/checkpoints/$tag"; done
    equal "the curve" "$(curve out_dir/log.jsonl)" "$(curve whole/log.jsonl)"
    run_expect 0 -c config.json run.checkpoint_every=5 checkpoint.writer.decoupled=true run.output_dir=roomy || return # and here there is
    says_not "training waits for its checkpoints"
    prints "of which training waited"
}

# Stopped right before, at and behind an epoch's end, then killed three times, each time more than an epoch farther: every update has read what
# that of an undisturbed run has. 66 samples in an order of their own each epoch, 4 an update: every other epoch ends inside an update.
row_resume_over_the_ends_of_epochs() {
    local ranks=(1) n pid stop before i as=()
    if [ -z "$sanitized" ] && command -v mpirun >/dev/null && [[ $(ldd "$binary") == *libmpi* ]]; then ranks=(1 2); fi
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
    head -c 2120 train.txt >short.txt
    for n in "${ranks[@]}"; do
        [ "$n" -eq 1 ] || as=(mpirun -n "$n")
        as+=("$binary" -c config.json data.train=short.txt data.shuffle=true zero_optimization.stage=$((n - 1)))
        timeout --kill-after=5 120 "${as[@]}" run.steps=400 run.output_dir="whole_$n" >out 2>err </dev/null
        equal "exit code of the undisturbed run, $n ranks" $? 0
        prints "66 samples an epoch"
        curve "whole_$n/log.jsonl" >whole.curve
        for stop in 16 33 50; do
            timeout --kill-after=5 120 "${as[@]}" run.steps=$stop >out 2>err </dev/null
            equal "exit code of the part that ends at $stop, $n ranks" $? 0
        done
        prints "resumed from step-00000033"
        for ((i = 0; i < 3; i++)); do
            before=$(grep -c '"grad_norm"' out_dir/log.jsonl)
            setsid "${as[@]}" run.steps=400 run.checkpoint_every=7 >out 2>err </dev/null &
            pid=$!
            started+=("$pid")
            wait_for_steps out_dir/log.jsonl $((before + 40)) "$pid"
            kill_session "$pid"
            expect "killed before the end" test "$(curve out_dir/log.jsonl | tail -n 1 | cut -d ' ' -f 1)" -lt 399
            prints "resumed from step-"
        done
        timeout --kill-after=5 120 "${as[@]}" run.steps=400 run.checkpoint_every=7 >out 2>err </dev/null
        equal "exit code of the last part, $n ranks" $? 0
        curve out_dir/log.jsonl >parts.curve
        equal "updates" "$(wc -l <parts.curve)" 400
        expect "curve of $n ranks after six resumes: $(diff whole.curve parts.curve | head -n 3)" cmp whole.curve parts.curve
        expect "weights of $n ranks after six resumes" same_weights "whole_$n" out_dir
        rm -rf out_dir
        as=()
    done
}
# kill -9 of a launcher that leads a session, and of all its ranks; returns when they are gone.
kill_session() {
    local i
    for ((i = 0; i < 200; i++)); do
        # shellcheck disable=SC2046
        kill -9 $(pgrep -s "$1") 2>/dev/null || break
        sleep 0.02
    done
    wait "$1" 2>/dev/null
}

row_second_signal_leaves_at_once() {
    "$binary" -c config.json run.steps=100000 model.n_embd=256 >out 2>err </dev/null &
    local pid=$! start
    started+=("$pid")
    wait_for_steps out_dir/log.jsonl 1 "$pid"
    start=$SECONDS
    kill -TERM "$pid"
    kill -TERM "$pid"
    sleep 0.1
    kill -TERM "$pid" 2>/dev/null
    wait "$pid"
    code=$?
    expect "exit code $code is 143 (at once) or 0 (the save was faster)" test "$code" -eq 143 -o "$code" -eq 0
    expect "within 5 s" test $((SECONDS - start)) -le 5
}

# --inspect tells a good checkpoint from a damaged one, and needs no configuration.
row_inspect() {
    run -c config.json run.steps=4 run.checkpoint_every=2
    equal "exit code of training" "$code" 0
    run --inspect out_dir
    equal "exit code" "$code" 0
    expect "both checkpoints are told, the newest first" test "$(grep -c '^out_dir/checkpoints/step-' out)" -eq 2 -a "$(sed -nE '1s/.*step-0*//p' out)" = 4
    equal "what the checksums say" "$(grep -c 'checksums      all match' out)" 2
    expect "the step" grep -q '^  step           4 (4 updates applied, 0 skipped)$' out
    expect "kinds" grep -q 'of each: master, exp_avg, exp_avg_sq (fp32)$' out
    expect "the configuration" grep -qF '  config         here (--inspect-config prints it)' out
    local shard=out_dir/checkpoints/step-00000002/shard-0.bin
    run --inspect out_dir/checkpoints/step-00000002
    equal "exit code for one" "$code" 0
    printf '\x55' | dd of="$shard" bs=1 seek=5000 conv=notrunc 2>/dev/null
    run --inspect out_dir/checkpoints
    equal "exit code with one damaged" "$code" 66
    equal "good ones" "$(grep -c 'checksums      all match' out)" 1
    says 'checkpoint out_dir/checkpoints/step-00000002 is damaged: shard-0.bin: the checksum of bytes 4096 to'
    rm "$shard"
    run --inspect out_dir/checkpoints/step-00000002
    equal "exit code without a shard" "$code" 66
    says 'shard-0.bin: is missing'
    run --inspect nowhere
    equal "exit code without a folder" "$code" 66
    run --inspect .
    equal "exit code without a checkpoint" "$code" 66
    says 'there is no checkpoint in this folder'
}

row_second_run_is_refused() {
    "$binary" -c config.json run.steps=100000 >out 2>/dev/null </dev/null &
    local pid=$!
    started+=("$pid")
    wait_for_steps out_dir/log.jsonl 2 "$pid"
    run -c config.json run.steps=100000
    expect "exit code $code of the second run is 2 or 73" test "$code" -eq 2 -o "$code" -eq 73
    says "$pid"
    expect "the first run lives" kill -0 "$pid"
    kill -TERM "$pid"
    wait "$pid"
    equal "exit code of the first" $? 0
}

# A signal does not wait for the end of an evaluation: what was trained is saved, and the evaluation is left out.
row_signal_in_evaluation() {
    local i start
    for ((i = 0; i < 500; i++)); do cat train.txt; done >val.txt
    "$binary" -c config.json data.val=val.txt run.eval_every=5 run.eval_batches=1 run.steps=5 >out 2>err </dev/null # its own checkpoint: step 5
    "$binary" -c config.json data.val=val.txt run.eval_every=5 run.eval_batches=0 run.steps=100000 >out 2>err </dev/null &
    local pid=$!
    started+=("$pid")
    for ((i = 0; i < 500; i++)); do grep -q 'resumed from' out && break; sleep 0.02; done
    sleep 0.3
    expect "the evaluation takes its time" kill -0 "$pid"
    start=$SECONDS
    kill -TERM "$pid"
    wait "$pid"
    equal "exit code" $? 0
    expect "within 3 s" test $((SECONDS - start)) -le 3
    equal "updates after the first five" "$(grep -c '"grad_norm"' out_dir/log.jsonl)" 5
    expect "it says that it stopped" grep -q '"event":"stopped","at_step":5' out_dir/log.jsonl
    run_expect 0 -c config.json run.steps=6
    prints "resumed from step-00000005"
}

# What was asked to be printed and cannot be is an error, unless who asked has gone away.
row_standard_output_that_is_full() {
    if [ ! -c /dev/full ]; then skip "there is no /dev/full"; return; fi
    run_expect 0 -c config.json run.steps=1 || return
    local asked
    while read -r asked; do
        # shellcheck disable=SC2086
        "$binary" $asked >/dev/full 2>err </dev/null
        equal "exit code of $asked" $? 74
        says "error: standard output: No space left on device"
    done <<'END'
--inspect out_dir
--inspect-config out_dir
-c config.json --generate once
-c config.json --plan
-c config.json --check-config
--help-config
END
    (exec 3> >(:); sleep 0.3; "$binary" --help-config >&3 2>err) # to a reader that is not there
    equal "exit code without a reader" $? 0
    equal "what is said then" "$(cat err)" ""
}

# What shapes the training and is not what the checkpoint was made with is said when going on.
row_settings_changed() {
    run_expect 0 -c config.json
    run_expect 0 -c config.json run.steps=14
    says_not "was trained with"
    run_expect 0 -c config.json run.steps=16 train_batch_size=8 run.seq_len=16 optimizer.params.lr=1e-4
    says "checkpoint step-00000014 was trained with train_batch_size 4 (now 8), optimizer.params.lr 0.001 (now 0.0001), train_gpt.run.seq_len 32 (now 16); from here on"
    run_expect 0 --inspect out_dir/checkpoints/step-00000016
    prints "tokens         2048, 128 samples of the data" # 14 x 4 samples of 32 tokens are 112 of 16, behind which 2 x 8 follow
    run_expect 0 -c config.json run.steps=18 train_batch_size=8 run.seq_len=16 optimizer.params.lr=1e-4 gradient_clipping=0.5 data.shuffle=true
    says "checkpoint step-00000016 was trained with gradient_clipping 1 (now 0.5), train_gpt.data.shuffle false (now true); from here on"
    says_not "train_batch_size"
    run_expect 0 -c config.json run.steps=20 train_batch_size=8 run.seq_len=16 optimizer.params.lr=1e-4 gradient_clipping=0.5 data.shuffle=true gradient_accumulation_steps=2
    says "checkpoint step-00000018 was trained with gradient_accumulation_steps 1 (now 2); from here on"
    run_expect 0 -c config.json run.steps=22 train_batch_size=8 run.seq_len=16 optimizer.params.lr=1e-4 gradient_clipping=0.5 data.shuffle=true \
        sequence_parallel.attention_window_size=8
    says "checkpoint step-00000020 was trained with sequence_parallel.attention_window_size none (now 8); from here on" # the micro-batches follow from the batch again
    prints "each token sees itself and the 7 before it"
    local many=(optimizer.params.weight_decay=0.12345678901234567 optimizer.params.eps=1.2345678901234567e-8 optimizer.params.betas='[0.91234567890123456, 0.95123456789012345]' gradient_allreduce_op=sum)
    run_expect 0 -c config.json run.steps=24 "${many[@]}"
    says "gradient_allreduce_op mean (now sum)"
}

# The same settings in other words, or on another number of ranks, are no change.
row_settings_in_other_words() {
    run_expect 0 -c config.json run.steps=4 train_micro_batch_size_per_gpu=1 scheduler.type=WarmupLR || return
    local type
    for type in adamw Adam; do
        run_expect 0 -c config.json run.steps=5 train_micro_batch_size_per_gpu=1 optimizer.type=$type scheduler.type=warmuplr || return
        says_not "was trained with"
        prints "resumed from step-0000000"
    done
    run_expect 0 -c config.json run.steps=6 train_micro_batch_size_per_gpu=1 scheduler.type=WarmupLR optimizer.type=adam optimizer.params.adam_w_mode=false || return
    says 'was trained with optimizer.type "AdamW" (now "Adam"), optimizer.params.adam_w_mode true (now false); from here on'
    need_mpirun || return
    local ranks=(env ASAN_OPTIONS=detect_leaks=0 timeout --kill-after=5 60 mpirun)
    "${ranks[@]}" -n 2 "$binary" -c config.json run.steps=7 train_micro_batch_size_per_gpu=1 scheduler.type=WarmupLR optimizer.type=Adam optimizer.params.adam_w_mode=false >out 2>err </dev/null
    equal "exit code on two ranks" $? 0
    says_not "was trained with"
    prints "= 2 micro-batches of 1"
    "${ranks[@]}" -n 1 "$binary" -c config.json run.output_dir=spelt run.steps=1 optimizer.type=sgd model.preset=GPT2-124m model.n_layer=1 : \
        -n 1 "$binary" -c config.json run.output_dir=spelt run.steps=1 optimizer.type=SGD model.preset=gpt2-124M model.n_layer=1 >out 2>err </dev/null
    equal "exit code of ranks that spell it otherwise" $? 0
}

# The configuration that a checkpoint holds can be given back, and means the same.
row_inspect_config() {
    local settings=(run.sample_prompt='a "b" \ c' train_micro_batch_size_per_gpu=2 run.steps=2)
    run_expect 0 -c config.json "${settings[@]}" || return
    run_expect 0 --inspect-config out_dir || return
    mv out again.json
    expect "it is JSON" python3 -c 'import json; c = json.load(open("again.json")); assert c["train_gpt"]["run"]["steps"] == 2 and c["gradient_accumulation_steps"] == 2'
    run_expect 0 -c config.json "${settings[@]}" --check-config
    sed 's/ *# .*//' out >before
    run_expect 0 -c again.json --check-config
    equal "values of the two" "$(diff before <(sed 's/ *# .*//' out))" ""
    equal "notes of the second" "$(cat err)" ""
    run_expect 0 -c config.json run.steps=2 run.output_dir=other zero_optimization.stage=1 zero_optimization.offload_optimizer.device=cpu optimizer.type=Lion || return
    run_expect 0 --inspect-config other || return
    mv out other.json
    run_expect 0 -c other.json --check-config
    says_not "has no effect"
    run_expect 0 -c again.json run.steps=4
    says_not "was trained with"
    run_expect 0 --inspect-config out_dir # the newest
    expect "the newest one's" grep -qF '"steps": 4' out
    run_expect 66 --inspect-config "$root/tests/checkpoint_version_1"
    says "holds no configuration: an earlier build wrote it"
    run_expect 0 --inspect "$root/tests/checkpoint_version_1"
    prints "  config         none: an earlier build wrote this checkpoint"
    sed -i 's/"steps": 2/"steps": 3/' out_dir/checkpoints/step-00000002/manifest.json
    run_expect 66 --inspect-config out_dir/checkpoints/step-00000002
    says "is damaged: manifest.json: its checksum"
}

# Ranks that are given different tags: rank 0's is taken, or nothing is loaded.
row_tag_validation() {
    need_mpirun || return
    local first second what common
    run_expect 0 -c config.json run.steps=4 run.checkpoint_every=2 run.output_dir=given || return
    while read -r first second what; do
        common=(-c config.json run.steps=3 --load_dir given/checkpoints "checkpoint.tag_validation=$what" "run.output_dir=with_$what")
        ASAN_OPTIONS=detect_leaks=0 timeout --kill-after=5 60 mpirun -n 1 "$binary" "${common[@]}" --load_tag "$first" : -n 1 "$binary" "${common[@]}" --load_tag "$second" >out 2>err </dev/null
        code=$?
        if [ "$what" = Fail ]; then
            equal "exit code" "$code" 2
            says 'the ranks name different checkpoints: --load_tag is "step-00000002" on rank 0, "step-00000004" on rank 1; give all'
            continue
        fi
        equal "exit code with $what" "$code" 0
        prints "resumed from step-00000002"
        if [ "$what" = Warn ]; then says 'name different checkpoints: --load_tag is "step-00000002" on rank 0, "step-00000004" on rank 1; all take'; else says_not "name different"; fi
    done <<'END'
step-00000002 step-00000004 Warn
step-00000002 step-00000004 Fail
step-00000002 none Ignore
END
}

# Where a run looks for a checkpoint when it is told: a folder of them, or one of them; what is not there ends it, and is named.
row_load_path() {
    run_expect 0 -c config.json run.checkpoint_every=4 run.output_dir=first || return
    local form
    for form in checkpoint.load_path=first/checkpoints "--load_dir first/checkpoints" checkpoint.load_path=first/checkpoints/step-00000012; do
        rm -rf out_dir
        run_expect 0 -c config.json run.steps=14 $form
        prints "resumed from step-00000012"
        expect "$form: it saves into its own folder" test -d out_dir/checkpoints/step-00000014 -a ! -e first/checkpoints/step-00000014
    done
    for form in checkpoint.load_path=first/checkpoints/step-00000004 "--load_dir first/checkpoints/step-00000004" "--load_dir first/checkpoints --load_tag step-00000004" "run.resume=step-00000004 checkpoint.load_path=first/checkpoints"; do
        rm -rf out_dir
        run_expect 0 -c config.json run.steps=5 $form
        prints "resumed from step-00000004"
    done
    rm -rf out_dir
    for form in checkpoint.load_path=first "--load_dir first/" "--load_dir first --load_tag step-00000004"; do # a run's output folder
        run_expect 0 -c config.json run.steps=12 $form run.output_dir=outer || return
        prints "resumed from step-000000"
        rm -rf outer
    done
    run_expect 66 -c config.json checkpoint.load_path=nowhere
    says "checkpoint.load_path = nowhere: No such file or directory; name a folder with checkpoints"
    mkdir empty
    run_expect 66 -c config.json --load_dir empty
    says "--load_dir = empty: there is no checkpoint in this folder"
    run_expect 66 -c config.json --load_dir first/checkpoints --load_tag step-00000005
    says "checkpoint first/checkpoints/step-00000005: is missing; there are: step-00000012, step-00000008, step-00000004"
    printf x | dd of=first/checkpoints/step-00000012/shard-0.bin bs=1 seek=5000 conv=notrunc 2>/dev/null
    run_expect 66 -c config.json --load_dir first/checkpoints --load_tag step-00000012
    says "cannot be loaded: shard-0.bin: the checksum of bytes"
    expect "nothing was trained" test "$(logged_steps out_dir/log.jsonl)" -eq 0
}

# A checkpoint that somebody renamed is none that auto takes, and none that it passes by in silence.
row_renamed_checkpoint() {
    local renamed=out_dir/checkpoints/best
    run_expect 0 -c config.json run.steps=2 || return
    mv out_dir/checkpoints/step-00000002 "$renamed"
    run_expect 0 -c config.json run.steps=1 run.checkpoint_at_end=false || return
    says "no checkpoint in out_dir/checkpoints is named by its step, as auto wants it, and the run begins without one; --load_tag best takes the one of that name"
    run_expect 66 -c config.json --generate line
    says "error: out_dir/checkpoints: no checkpoint in this folder is named by its step; name the one that is meant, such as --load_tag best"
    run_expect 66 -c config.json --load_dir out_dir/checkpoints
    says "error: --load_dir = out_dir/checkpoints: no checkpoint in this folder is named by its step; name the one that is meant, such as --load_tag best"
    run_expect 66 -c config.json checkpoint.load_path=out_dir/checkpoints run.output_dir=other
    says "error: checkpoint.load_path = out_dir/checkpoints: no checkpoint in this folder is named by its step"
    run_expect 66 -c config.json --load_dir out_dir
    says "error: --load_dir = out_dir/checkpoints: no checkpoint in this folder is named by its step; name the one that is meant, such as --load_tag best"
    run_expect 0 -c config.json --load_dir out_dir --load_tag best --generate line
    run_expect 66 -c config.json --load_tag worst
    says "checkpoint out_dir/checkpoints/worst: is missing; there are: best"
    run_expect 0 -c config.json run.steps=4 --load_tag best || return
    prints "resumed from best: step 2"
    run_expect 0 -c config.json run.steps=5 || return
    prints "resumed from step-00000004"
    says_not "named by its step"
}

# stage3_gather_16bit_weights_on_model_save: the model at the end, whole, as --export writes it.
row_gathered_model() {
    need_mpirun || return
    local ranks=(env ASAN_OPTIONS=detect_leaks=0 timeout --kill-after=5 60 mpirun -n 2 "$binary" -c config.json zero_optimization.stage=3 bf16.enabled=true)
    "${ranks[@]}" >out 2>err </dev/null
    equal "exit code without it" $? 0
    expect "no model" test -z "$(compgen -G 'out_dir/model*')"
    rm -rf out_dir
    "${ranks[@]}" zero_optimization.stage3_gather_16bit_weights_on_model_save=true >out 2>err </dev/null
    equal "exit code" $? 0
    prints "exported to out_dir/model-step-00000012"
    run_expect 0 -c config.json bf16.enabled=true --export exported || return
    expect "it is the last checkpoint's" diff -r exported out_dir/model-step-00000012
    "${ranks[@]}" zero_optimization.stage3_gather_16bit_weights_on_model_save=true >out 2>err </dev/null
    equal "exit code when it is there" $? 0
    expect "nothing is moved" test ! -e out_dir/model-step-00000012.1
    "${ranks[@]}" zero_optimization.stage3_gather_16bit_weights_on_model_save=true run.resume=none optimizer.params.lr=0.05 >out 2>err </dev/null
    equal "exit code after another training" $? 0
    says "out_dir/model-step-00000012 was there from another training: now it is out_dir/model-step-00000012.1"
    expect "the earlier model is kept" diff -r exported out_dir/model-step-00000012.1
    expect "the other one is written" test -f out_dir/model-step-00000012/config.json
    expect "and differs" test -n "$(diff -rq exported out_dir/model-step-00000012)"
    "${ranks[@]}" zero_optimization.stage3_gather_16bit_weights_on_model_save=true zero_optimization.stage=2 run.steps=13 >out 2>err </dev/null
    equal "exit code of stage 2" $? 0
    says "gather_16bit_weights_on_model_save"
    expect "no model of stage 2" test ! -e out_dir/model-step-00000013
}

# zero_checkpoint false: one file, whoever owns what, and training goes on from it as from one of all ranks.
row_zero_checkpoint_false() {
    need_mpirun || return
    local layout ranks
    for layout in zero_optimization.stage=3 "tensor_model_parallel_size=2 zero_optimization.stage=1" "pipeline_model_parallel_size=2 gradient_accumulation_steps=2"; do
        rm -rf whole parts
        ranks=(env ASAN_OPTIONS=detect_leaks=0 timeout --kill-after=5 60 mpirun -n 2 "$binary" -c config.json $layout)
        "${ranks[@]}" run.output_dir=whole run.checkpoint_every=6 >out 2>err </dev/null || fail "$layout: $(tail -n 2 err)"
        "${ranks[@]}" run.output_dir=parts run.steps=6 checkpoint.zero_checkpoint=false checkpoint.writer.decoupled=true >out 2>err </dev/null || fail "$layout: $(tail -n 2 err)"
        says "checkpoint.writer.decoupled = true: has no effect: with checkpoint.zero_checkpoint = false"
        equal "$layout: files" "$(ls parts/checkpoints/step-00000006)" "manifest.json
shard-0.bin"
        equal "$layout: files of all ranks" "$(find whole/checkpoints/step-00000006 -name 'shard-*' | wc -l)" 2
        "${ranks[@]}" run.output_dir=parts checkpoint.zero_checkpoint=false >out 2>err </dev/null || fail "$layout: $(tail -n 2 err)"
        prints "resumed from step-00000006"
        says_not "was trained with"
        equal "$layout: the curve" "$(curve parts/log.jsonl)" "$(curve whole/log.jsonl)"
        run_expect 0 --inspect parts || return
        equal "$layout: checksums" "$(grep -c 'checksums      all match' out)" 2
    done
    unshare -m true 2>/dev/null || return # what fails on rank 0 is known to all: they go on, and end
    mkdir small
    unshare -m bash -c 'mount -t tmpfs -o size=64k none small && exec "$@"' - "${ranks[@]}" checkpoint.save_dir=small run.output_dir=limited checkpoint.zero_checkpoint=false run.checkpoint_every=4 run.steps=6 >out 2>err </dev/null
    equal "exit code with no room" $? 74
    says "the checkpoint of step 4 could not be saved: "
    says "the last checkpoint, of step 6, could not be saved: "
    equal "updates" "$(logged_steps limited/log.jsonl)" 6
}

row_every_checkpoint_broken() {
    local file
    run_expect 0 -c config.json run.checkpoint_every=6 || return
    find out_dir/checkpoints -type f -size +0 | while read -r file; do head -c 40 "$file" >"cut" && cat "cut" >"$file"; done
    run_expect 66 -c config.json run.steps=20
    equal "records in the log" "$(grep -c grad_norm out_dir/log.jsonl)" 12
}

row_newest_checkpoint_broken() {
    local file newest
    run_expect 0 -c config.json run.checkpoint_every=6 || return
    newest=$(newest_checkpoint out_dir)
    [ -n "$newest" ] || { fail "no checkpoint"; return; }
    for file in "$newest"/*; do head -c $(($(stat -c %s "$file") - 1)) "$file" >"cut" && cat "cut" >"$file"; done
    run_expect 0 -c config.json run.steps=14 || return
    says "$(basename -- "$newest")"
    equal "first update of the second run" "$(sed -n 's/^{"step":\([0-9]*\),.*/\1/p' out_dir/log.jsonl | sed -n 13p)" 6
}

row_checkpoint_of_another_model() {
    run_expect 0 -c config.json || return
    run -c config.json model.n_embd=64 run.steps=20
    expect "exit code $code is 2 or 66" test "$code" -eq 2 -o "$code" -eq 66
    says "n_embd"
}

row_numbers_that_run_away() {
    run_expect 76 -c config.json optimizer.params.lr=1e30 gradient_clipping=0
    says "step"
    # The loss was finite, and what the update made of the weights is not: no checkpoint holds that, and no disk is to blame.
    run_expect 76 -c config.json optimizer.params.lr=3e38 optimizer.params.weight_decay=100 run.steps=1 run.output_dir=infinite
    says "the checkpoint of step 1 was not saved"
    says "; start again, as there is none here yet, with a lower learning rate or other data"
    says_not "mend that"
}

row_generate_and_export() {
    run_expect 0 -c config.json || return
    run_expect 0 -c config.json --generate "line" || return
    expect "a sample" test "$(wc -c <out)" -ge 20
    cp out first_sample
    run_expect 0 -c config.json --generate "line" || return
    expect "sampling is a function of the seed" cmp out first_sample
    # a configuration for other ranks than those that read
    local eight=(train_batch_size=16 train_micro_batch_size_per_gpu=2 gradient_accumulation_steps=2)
    run_expect 0 -c config.json "${eight[@]}" --generate "line" || return
    says "note: --generate: the configuration's batch is not for 1 rank, and left out"
    expect "the same sample, whatever the batch" cmp out first_sample
    run_expect 0 -c config.json "${eight[@]}" tensor_model_parallel_size=2 pipeline.stages=2 data_parallel_size=4 --generate "line" || return
    says "note: --generate: the configuration's batch and degrees of parallelism are not for 1 rank, and left out"
    expect "the same sample, whatever the layout" cmp out first_sample
    run_expect 2 -c config.json "${eight[@]}" model.n_head=3 --generate "line" # what is wrong for any number of ranks is refused as ever
    says "n_head = 3"
    says "train_batch_size = 16: is not"
    run_expect 0 -c config.json --export exported || return
    expect "config.json" python3 -c 'import json; c = json.load(open("exported/config.json")); assert c["model_type"] == "gpt2" and c["n_embd"] == 32 and c["n_layer"] == 2, c'
    expect "weights" test -s exported/model.safetensors
    run_expect 0 -c config.json sequence_parallel.attention_window_size=8 --export windowed || return
    says "a GPT-2 folder cannot say this"
    sed '/"model":/d' config.json >bare.json # what the folder says is known only when it is read
    run_expect 2 -c bare.json model.init_from=exported pipeline_model_parallel_size=4 --plan 4 || return
    says "is more than the model's 2 layers"
    # an exported model is a starting point whose first loss is near the last one, not near log(256)
    run_expect 0 -c config.json model.init_from=exported run.output_dir=tuned run.steps=1 || return
    expect "first loss of the fine-tuned run" python3 -c '
import json
last = [json.loads(l) for l in open("out_dir/log.jsonl")]; last = [r["loss"] for r in last if "loss" in r][-1]
first = [json.loads(l) for l in open("tuned/log.jsonl")]; first = [r["loss"] for r in first if "loss" in r][0]
assert first < last + 0.3, (first, last)'
}

row_pid_1() {
    unshare -pf --mount-proc true 2>/dev/null || { skip "no process namespaces here"; return; }
    unshare -pf --mount-proc --kill-child "$binary" -c config.json run.steps=100000 >out 2>err </dev/null &
    local outer=$! inner
    started+=("$outer")
    wait_for_steps out_dir/log.jsonl 2 "$outer"
    inner=$(cat "/proc/$outer/task/$outer/children" 2>/dev/null | awk '{ print $1 }')
    [ -n "$inner" ] || { skip "the kernel does not tell children"; kill -9 "$outer"; return; }
    kill -TERM "$inner"
    wait "$outer"
    equal "exit code as process 1" $? 0
    expect "a checkpoint" test -n "$(newest_checkpoint out_dir)"
}

# One execve, whatever the strings say; and no file outside the folder is opened for writing.
row_nothing_is_executed() {
    command -v strace >/dev/null && strace -o /dev/null true 2>/dev/null || { skip "no strace here"; return; }
    local key value n=0
    for value in '$(touch pwned)' '`touch pwned`' '; touch pwned' '| touch pwned' $'\ntouch pwned\n'; do
        for key in run.output_dir run.resume run.sample_prompt model.init_from model.preset data.train data.val data.tokenizer checkpoint.save_dir; do
            n=$((n + 1))
            case $n in *1 | *5) ;; *) timeout 60 "$binary" -c config.json run.steps=1 "$key=$value" >out 2>err </dev/null; continue ;; esac
            ASAN_OPTIONS=detect_leaks=0 timeout 60 strace -f -qq -e trace=execve,execveat -o trace "$binary" -c config.json run.steps=1 "$key=$value" >out 2>err </dev/null
            equal "execve calls with $key=$value" "$(grep -cE 'execve(at)?\(' trace)" 1
        done
    done
    expect "nothing was run" test ! -e pwned
}

row_writes_only_below_output_dir() {
    command -v strace >/dev/null && strace -o /dev/null true 2>/dev/null || { skip "no strace here"; return; }
    ASAN_OPTIONS=detect_leaks=0 timeout 60 strace -f -qq -e trace=openat,open,creat,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat -o trace "$binary" -c config.json run.steps=2 >out 2>err </dev/null
    equal "exit code" $? 0
    expect "files were written" grep -qE 'O_CREAT' trace
    equal "written outside" "$(grep -E 'O_WRONLY|O_RDWR|O_CREAT|mkdir|rename|unlink' trace | grep -vE '"out_dir|AT_FDCWD, "\.?/?out_dir|openat\([0-9]+|(rename|unlink|mkdir)at2?\([0-9]+|"/dev/(null|tty)"|ENOENT' | head -n 3)" ""
    expect "links are not followed where files are made" bash -c '! grep -E "O_CREAT" trace | grep -v O_NOFOLLOW | grep -vq O_EXCL'
    equal "descriptors without CLOEXEC" "$(grep -E 'openat\(' trace | grep -vE 'O_CLOEXEC|= -1' | head -n 2)" ""
}

# Numbers are read and written alike where the decimal point is a comma and where i has a dotted capital.
row_locales() {
    local dir=$PWD/locales name n=0
    run_expect 0 -c config.json run.output_dir=plain || return
    mkdir "$dir"
    for name in de_DE tr_TR; do
        if localedef -i "$name" -f UTF-8 "$dir/$name.UTF-8" 2>/dev/null || [ -d "$dir/$name.UTF-8" ]; then
            n=$((n + 1))
            LOCPATH=$dir LC_ALL=$name.UTF-8 timeout 60 "$binary" -c config.json run.output_dir="$name" >out 2>err </dev/null
            equal "exit code in $name" $? 0
            curve plain/log.jsonl >a && curve "$name/log.jsonl" >b
            expect "curve in $name" cmp a b
        fi
    done
    [ "$n" -eq 2 ] || skip "no source of German and Turkish locales here"
}

row_hostile_environment() {
    local setting
    run_expect 0 -c config.json run.output_dir=plain || return
    curve plain/log.jsonl >a
    for setting in $([ -n "$sanitized" ] || echo OMP_NUM_THREADS=1000000000) OMP_NUM_THREADS=2 OMP_NUM_THREADS=3 OMP_NUM_THREADS=-1 OMP_NUM_THREADS=junk DEEPSPEED_TIMEOUT=x LC_NUMERIC=junk TMPDIR=/nonexistent MALLOC_PERTURB_=165 GOMP_CPU_AFFINITY=junk; do
        rm -rf out_dir
        env "$setting" timeout 60 "$binary" -c config.json >out 2>err </dev/null
        code=$?
        case $code in
            0) curve out_dir/log.jsonl >b; expect "curve under $setting" cmp a b ;;
            2) says "${setting%%=*}" ;;
            *) fail "exit code $code under $setting: $(tail -n 2 err)" ;;
        esac
        compared=$((compared + 1))
    done
    rm -rf out_dir
    env -i "$binary" -c config.json >out 2>err </dev/null
    equal "exit code with an empty environment" $? 0
}

row_limits() {
    (ulimit -n 32 && exec timeout 60 "$binary" -c config.json run.output_dir=files >out 2>err </dev/null)
    equal "exit code with 32 descriptors" $? 0
    # The environment lies on the stack: this one is of a known size, whatever this machine's is. 64 KiB are enough beside it.
    [ -n "$sanitized" ] || (ulimit -s 256 && exec env -i PATH="$PATH" LC_ALL=C.UTF-8 OMP_NUM_THREADS=1 BALLAST="$(printf '%102400s' '')" timeout 60 "$binary" -c config.json run.output_dir=stack >out 2>err </dev/null)
    equal "exit code with a stack of 256 KiB, 100 KiB of which the environment takes" $? 0
    (ulimit -f 8 && exec timeout 60 "$binary" -c config.json run.output_dir=size >out 2>err </dev/null)
    code=$?
    expect "exit code $code with a limit on file size is 73 or 74" test "$code" -eq 73 -o "$code" -eq 74
    says "File too large"
    (umask 077 && exec timeout 60 "$binary" -c config.json run.output_dir=private >out 2>err </dev/null)
    equal "files that others may read under umask 077" "$(find private -perm /077 | wc -l)" 0
}

# The wait for a rank that does not come has an end, without the watch's help.
row_rank_that_does_not_come() {
    local build began took
    build=$(dirname -- "$binary")
    if [ ! -e "$build/comm_mpi.o" ] || ! command -v mpirun >/dev/null; then skip "this build has no MPI"; return; fi
    began=$(date +%s%N)
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 timeout 60 mpirun -n 3 "$build/test_gpt" hang >out 2>err </dev/null
    equal "exit code" $? 75
    took=$((($(date +%s%N) - began) / 1000000))
    expect "the end comes after $took ms, and not before its time" test "$took" -gt 1500 -a "$took" -lt 15000
    says "all_reduce (place 0 in a group of 3) did not end within 1.5 s (zero_optimization.timeout)"
}

# Ranks that differ in a size: a fault of the program, on which nothing is to start again as after the loss of a rank.
row_sizes_that_differ() {
    local build what
    build=$(dirname -- "$binary")
    need_mpirun || return
    for what in broadcast all_gather reduce_scatter all_reduce message; do
        ASAN_OPTIONS=detect_leaks=0 timeout 60 mpirun -n 3 "$build/test_gpt" "hang/sizes of $what" >out 2>err </dev/null
        equal "$what: exit code" $? 70
        says "message truncated; the ranks differ in a size, or the call is wrong: this is a bug in train_gpt, please report it with this line"
        says_not "probably gone"
    done
}

row_differences_after_loading() {
    need_mpirun || return
    ASAN_OPTIONS=detect_leaks=0 timeout 60 mpirun -n 3 "$(dirname -- "$binary")/test_gpt" "hang/state that differs after loading" >out 2>err </dev/null
    equal "exit code" $? 76
    says "error: step 0: the ranks no longer hold the same: digest of the configuration is 1 on rank 2 and 0 on the other 2"
    says_not "nobody noticed"
    ASAN_OPTIONS=detect_leaks=0 timeout 60 mpirun -n 3 "$(dirname -- "$binary")/test_gpt" "hang/weights that differ after loading" >out 2>err </dev/null
    equal "exit code" $? 76
    says "error: step 0: the ranks hold different weights: "
    says "differs on rank 2 from the other 2"
    says_not "nobody noticed"
}

# Without MPI and NCCL ranks would train alone, all into the same folder.
row_ranks_without_mpi() {
    local build
    build=$(dirname -- "$binary")
    if [ ! -e "$build/comm_mpi.o" ] || [ -n "$sanitized" ]; then skip "this build has other objects"; return; fi
    "${CXX:-g++}" -std=gnu++17 -fopenmp -fPIE -fno-exceptions -fno-rtti "$root/runtime/comm_self.cpp" "$build"/{train_gpt,device_cpu,watch,flight}.o \
        "$build"/aio_*.o "$build"/kernels_cpu_*.o -pthread -pie $([ -e "$build/aio_uring.o" ] && echo -luring) -lm -o alone >out 2>err
    equal "exit code of the compiler" $? 0
    binary=./alone run_expect 0 -c config.json run.output_dir=alone_dir
    export RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2
    binary=./alone refuses 2 -c config.json
    unset RANK WORLD_SIZE LOCAL_WORLD_SIZE
    says "started 2 ranks, but this binary was built without MPI or NCCL"
}

# The bill of materials names each library that the loader will look for, with the version that this machine has of it.
row_sbom() {
    "$root/scripts/sbom.py" "$binary" >sbom.json 2>err
    equal "exit code" $? 0
    compared=$((compared + 1))
    python3 - "$binary" >diff 2>&1 <<'PY' || fail "$(tail -n 1 diff)"
import hashlib, json, subprocess, sys
bom = json.load(open("sbom.json"))
run = lambda *command: subprocess.run(command, capture_output=True, text=True, check=True).stdout
needed = sorted(line.split("[")[1].rstrip("]\n") for line in run("readelf", "-d", sys.argv[1]).splitlines() if "(NEEDED)" in line)
of = {c["properties"][0]["value"]: c for c in bom["components"]}
assert sorted(f for f, c in of.items() if c["properties"][1]["value"] == "dynamic") == needed, (sorted(of), needed)
assert of["libc.so.6"]["version"] == run("getconf", "GNU_LIBC_VERSION").split()[1], of["libc.so.6"]
gomp = [c for f, c in of.items() if f.startswith("libgomp")]
assert len(gomp) == 1 and gomp[0]["version"].split(".")[0] == run("g++", "-dumpversion").strip().split(".")[0], gomp
assert all(c["version"] and c["licenses"] for c in of.values())
program = bom["metadata"]["component"]
assert program["hashes"][0]["content"] == hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest() and program["version"], program
assert bom["bomFormat"] == "CycloneDX" and bom["specVersion"] == "1.5"
PY
    # What it does not know is not left out in silence.
    g++ -shared -fPIC -x c++ - -o libother.so <<<'int other(void) { return 0; }' && g++ -x c++ - -Wl,--no-as-needed -L. -lother -o other <<<'int main(void) { return 0; }'
    "$root/scripts/sbom.py" ./other >out 2>err
    equal "exit code with an unknown library" $? 1
    says "libother.so is linked, and scripts/sbom.py does not know it"
}

# The benchmark of several GPUs goes through, at toy size; what it prints are rates of nothing.
row_bench_ranks() {
    if [ -n "$sanitized" ]; then skip "a benchmark"; return; fi
    need_mpirun || return
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 BENCH_BUILT=1
    BUILD=$(dirname -- "$binary") timeout 200 "$root/scripts/bench_ranks.py" --small --backend cpu --updates 4 tensor sequence pipeline >out 2>err
    equal "exit code" $? 0
    equal "rows of one rank" "$(grep -cE '^\| one by itself \| [0-9.]+ \| [0-9,]+ \| [0-9.e-]+ \|  \|  \| [0-9.]+ \|$' out)" 3
    equal "rows of two" "$(grep -cE '^\| (tensor 2, rows in [124]|sequence 2) \| [0-9.]+ \| [0-9,]+ \| [0-9.e-]+ \| [0-9.]+ % \|  \| [0-9.]+ \|$' out)" 4
    equal "rows of pipelines" "$(grep -cE '^\| [A-Za-z0-9-]+ \| .* % \| [0-9.]+ / -?[0-9.]+ % \| [0-9.]+ \|$' out)" 5
    # what it would run on GPUs is no layout that is refused
    BUILD=$(dirname -- "$binary") timeout 100 "$root/scripts/bench_ranks.py" --plan --backend cpu >out 2>err
    equal "exit code of the plans" $? 0
    equal "plans" "$(grep -c 'too much$' out) too large of $(grep -c '^ *ranks  micro' out)" "0 too large of 17"
    "$root/scripts/bench_ranks.py" --ranks 1 >out 2>err
    equal "exit code for one rank" $? 2
    says "give two or more"
}

row_sizes_that_overflow() {
    refuses 2 -c config.json model.n_embd=1099511627776
    refuses 2 -c config.json train_batch_size=4611686018427387904
    refuses 2 -c config.json train_batch_size=10000000 train_micro_batch_size_per_gpu=1
    says "gradient_accumulation_steps = 10000000: comes to 10000000, which is more than 1000000"
    refuses 2 -c config.json model.n_inner=1
    refuses 2 -c config.json model.n_embd=1 model.n_head=1
    refuses 2 -c config.json run.steps=99999999999999999999
    refuses 2 -c config.json run.logits_bytes=9223372036854775807
    refuses 2 -c config.json run.eval_batches=9223372036854775807
    refuses 2 -c config.json zero_optimization.timeout=9223372036854775807
    refuses 2 -c config.json zero_optimization.offload_optimizer.buffer_count=9223372036854775807
    refuses 2 -c config.json zero_optimization.offload_param.buffer_count=9223372036854775807
    refuses 2 -c config.json model.n_head=3
}

run_rows cli "$root/tests/test_cli.sh"
