#!/usr/bin/env bash
# sizes.sh - lines of each file beside its budget, share of comments, and the longest functions. A report, not a gate:
# a file that passes 1.3 times its budget is marked, and the next change to it starts with a split.
set -euo pipefail
cd "$(dirname "$0")/.."

budget_of() {
    case $1 in
        train_gpt.cu | acts.cu | optimizer.cu) echo 400 ;;
        dsconfig*.h) echo 500 ;;
        model.cu) echo 1100 ;;
        tensor_parallel.cu | planner.cu | plan_*.cu) echo 350 ;;
        zero.cu) echo 800 ;;
        test_gpt.cu) echo 1500 ;;
        runtime/device_cpu.cpp) echo 250 ;;
        runtime/device_cuda.cpp) echo 400 ;;
        runtime/comm_*.cpp) echo 450 ;;
        runtime/grid.h) echo 120 ;;
        runtime/json.h | runtime/tensor.h | runtime/metrics.*) echo 300 ;;
        runtime/utils.h) echo 250 ;;
        runtime/dataloader.*) echo 350 ;;
        kernels/cpu/*) echo 200 ;;
        kernels/cuda/attention.cu | kernels/cuda/matmul.cu) echo 800 ;;
        kernels/cuda/*) echo 350 ;;
        tests/*) echo 1500 ;;
        *.h) echo 300 ;;
        *) echo 500 ;;
    esac
}

printf '%-36s %6s %6s %6s  %s\n' file lines budget used comments
total=0
over=0
while IFS= read -r file; do
    read -r lines comments < <(awk '/^[[:space:]]*(\/\/|\/\*|\*)/ || /[;{}] *\/\/ / { c++ } END { print NR, c + 0 }' "$file")
    budget=$(budget_of "$file")
    used=$((100 * lines / budget))
    mark=
    [ "$used" -gt 130 ] && { mark='  <- split before the next change'; over=$((over + 1)); }
    printf '%-36s %6d %6d %5d%%  %4d%%%s\n' "$file" "$lines" "$budget" "$used" $((lines ? 100 * comments / lines : 0)) "$mark"
    total=$((total + lines))
done < <(git ls-files -- '*.cu' '*.h' '*.cpp' '*.cuh')

echo
echo "longest functions (60 typical, 100 the limit):"
# A function starts at a line without indentation that ends in "{" and ends at the next "}" without indentation.
git ls-files -z -- '*.cu' '*.h' '*.cpp' '*.cuh' | xargs -0 awk '
    FNR == 1 { name = "" }
    /^[A-Za-z_].*\)[^;]*\{$/ { name = $0; sub(/\(.*/, "", name); sub(/.*[ *]/, "", name); start = FNR }
    /^\}/ && name != "" { print FNR - start + 1, FILENAME ":" start, name; name = "" }' | sort -rn | awk 'NR <= 8 { printf "%6d  %s %s\n", $1, $3, $2 }'
echo "sizes: $total lines, $over files over 1.3 times their budget"
