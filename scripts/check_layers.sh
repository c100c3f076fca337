#!/usr/bin/env bash
# check_layers.sh - who may include whom: every #include "..." must point to a lower layer.
#
# The table is the house's plan; a new file needs a line here, which is the moment to ask where it belongs. Within one
# layer only the pairs of `beside` are allowed. Kernels include kernel headers, tests include everything. USE_CUDA is
# asked for in kernels/kernels.h alone, and host files never hold a kernel launch.
set -euo pipefail
cd "$(dirname "$0")/.."

layers='
9 test_gpt.cu
8 train_gpt.cu
7 trainer.cu trainer_agree.cu trainer_tell.cu evaluate.cu inspect.cu
6 checkpoint_format.cu checkpoint_load.cu checkpoint_save.cu checkpoint.cu huggingface.cu huggingface_import.cu huggingface_export.cu planner.cu plan_time.cu plan_report.cu
5 pipeline.cu optimizer.cu replicas.cu
4 zero.cu zero_setup.cu zero_tensors.cu offload.cu offload_files.cu acts.cu
3 model.cu tensor_parallel.cu
2 kernels/kernels.h kernels/kernel_list.h runtime/graphs.h runtime/comm.h runtime/groups.h runtime/agree.h runtime/star.h runtime/rendezvous.h runtime/shards.h runtime/dataloader.h runtime/metrics.h runtime/tokenizer.h runtime/safetensors.h
1 dsconfig_keys.h dsconfig_read.h dsconfig_rules.h dsconfig_command.h dsconfig.h runtime/device.h runtime/aio.h runtime/memory.h runtime/host_memory.h runtime/device_cpu.h runtime/device_races.h runtime/durable.h runtime/watch.h runtime/flight.h runtime/watch_state.h runtime/watch_exit.h runtime/watch_peers.h runtime/watch_progress.h
0 runtime/utils.h runtime/thread.h runtime/tensor.h runtime/json.h runtime/grid.h runtime/crc32c.h runtime/unicode.h runtime/launch.h runtime/product_cache.h
'
# utils.h lies below everything
beside='
runtime/grid.h>runtime/tensor.h runtime/product_cache.h>runtime/crc32c.h kernels/kernels.h>kernels/kernel_list.h
runtime/device_cpu.h>runtime/device.h runtime/device_races.h>runtime/device.h runtime/flight.h>runtime/watch.h
runtime/watch_state.h>runtime/watch.h runtime/watch_state.h>runtime/flight.h runtime/watch_exit.h>runtime/watch_state.h
runtime/watch_peers.h>runtime/watch_exit.h runtime/watch_progress.h>runtime/watch_state.h
runtime/star.h>runtime/comm.h runtime/agree.h>runtime/comm.h runtime/groups.h>runtime/comm.h runtime/rendezvous.h>runtime/star.h runtime/dataloader.h>runtime/shards.h
dsconfig.h>dsconfig_keys.h dsconfig.h>dsconfig_read.h dsconfig.h>dsconfig_rules.h dsconfig.h>dsconfig_command.h checkpoint.cu>checkpoint_format.cu checkpoint.cu>checkpoint_load.cu checkpoint.cu>checkpoint_save.cu
zero.cu>offload.cu offload.cu>offload_files.cu huggingface.cu>huggingface_import.cu huggingface.cu>huggingface_export.cu zero.cu>zero_setup.cu zero.cu>zero_tensors.cu planner.cu>huggingface.cu plan_time.cu>planner.cu plan_report.cu>plan_time.cu trainer.cu>trainer_agree.cu trainer.cu>trainer_tell.cu evaluate.cu>trainer.cu model.cu>tensor_parallel.cu
'

declare -A layer_of
while read -r number files; do
    for file in $files; do layer_of[$file]=$number; done
done <<<"$layers"

problems=0
edges=0
problem() { echo "FAIL layers: $1"; problems=$((problems + 1)); }

while IFS= read -r file; do
    case $file in
        kernels/cpu/* | kernels/cuda/*) kind=kernel ;;
        tests/* | test_gpt.cu) kind="test" ;;
        runtime/*.cpp) kind=backend ;;
        *) kind=chapter ;;
    esac
    if [ $kind = chapter ] && [ -z "${layer_of[$file]:-}" ]; then
        problem "$file is not in the table of scripts/check_layers.sh: give it a layer"
        continue
    fi
    while IFS=: read -r line include; do
        edges=$((edges + 1))
        target=$(realpath -m --relative-to=. -- "$(dirname -- "$file")/$include")
        if [ ! -e "$target" ]; then problem "$file:$line: includes $include, which is not there"; continue; fi
        case $kind in
            test) continue ;;
            kernel)
                case $target in
                    "$(dirname -- "$file")"/* | kernels/kernels.h | kernels/kernel_list.h | runtime/utils.h | runtime/tensor.h | runtime/device.h | runtime/device_cpu.h | runtime/product_cache.h) continue ;;
                esac
                problem "$file:$line: a kernel may include kernels.h, its folder's headers and runtime's utils, tensor, device and product_cache, not $target" ;;
            backend)
                [[ $target == runtime/*.h ]] && continue
                problem "$file:$line: includes $target, which is not in runtime/" ;;
            chapter)
                if [ -z "${layer_of[$target]:-}" ]; then problem "$file:$line: $target has no layer in scripts/check_layers.sh"; continue; fi
                if [ "${layer_of[$target]}" -lt "${layer_of[$file]}" ]; then continue; fi
                [ "$target" = runtime/utils.h ] && continue
                if grep -qF -- " $file>$target " <<<" ${beside//$'\n'/ } "; then continue; fi
                problem "$file:$line: layer ${layer_of[$file]} includes $target of layer ${layer_of[$target]}" ;;
        esac
    done < <(sed -nE 's/^[[:space:]]*#[[:space:]]*include[[:space:]]+"([^"]+)".*/\1/;T;=;p' "$file" | paste -d: - -)
    if [ $kind = chapter ]; then
        if [ "$file" != kernels/kernels.h ] && grep -nE '^[[:space:]]*#.*USE_CUDA' "$file" >/dev/null; then problem "$file: asks for USE_CUDA; only kernels/kernels.h may"; fi
        if grep -nE '<<<' "$file" >/dev/null; then problem "$file: holds a kernel launch; those belong to kernels/cuda"; fi
    fi
done < <(git ls-files --cached --others --exclude-standard -- '*.cu' '*.h' '*.cpp' '*.cuh' 2>/dev/null || find . -name '*.cu' -o -name '*.h' -o -name '*.cpp' -o -name '*.cuh' | sed 's|^\./||')

echo "layers: $edges includes checked, $problems problems"
[ "$edges" -gt 0 ] && [ "$problems" -eq 0 ]
