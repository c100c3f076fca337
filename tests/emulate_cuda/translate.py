#!/usr/bin/env python3
"""translate.py - CUDA sources of kernels/cuda as C++ for emulator.h:  translate.py FOLDER FILE...

Line by line, so that messages of the compiler and the sanitizers name lines of the originals. What is replaced:

    kernel<<<blocks, threads, bytes, stream>>>(x)   kernel ^ Launch(blocks, threads, bytes, stream)(x)
    __shared__ T a[N];                              a static array, filled with garbage when a block begins
    extern __shared__ T a[];                        a pointer to the block's dynamic shared memory
    __launch_bounds__(N) name(...) {                the bound is checked when a thread begins
    asm("instruction" : outputs : inputs)           a call of the function that emulator.h has for the instruction

A PTX instruction that is not in the table below ends the translation.
"""
import os
import re
import sys

PTX = {
    "bar.sync %0, %1;": "ptx_bar_sync",
    "cp.async.cg.shared.global [%0], [%1], 16, %2;": "ptx_cp_async",
    "cp.async.commit_group;": "ptx_cp_async_commit",
    "cp.async.wait_all;": "ptx_cp_async_wait_all",
    "cp.async.wait_group %0;": "ptx_cp_async_wait",
    "ex2.approx.ftz.f32 %0, %1;": "ptx_ex2",
    "rcp.approx.ftz.f32 %0, %1;": "ptx_rcp",
}


def split_outside(text, at=","):
    """Splits at the commas, or colons, that lie in no brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == at and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def operand(text):
    """The expression of "constraint"(expression)."""
    return re.fullmatch(r'\s*"[^"]*"\s*\((.*)\)\s*', text).group(1)


def assembler(match):
    instruction, rest = match.group(1), match.group(2)
    if instruction not in PTX:
        sys.exit(f"translate.py: no function for the instruction {instruction}")
    fields = split_outside(rest, ":")[1:] + ["", ""]  # outputs, inputs, what else changes
    outputs, inputs = ([operand(o) for o in split_outside(f) if o.strip()] for f in fields[:2])
    return "".join(f"{o} = " for o in outputs) + f"{PTX[instruction]}({', '.join(inputs)});"


def shared(match):
    names = [re.match(r"\s*(?:.*[\s*])?(\w+)\s*\[", d).group(1) for d in split_outside(match.group(2))]
    return f"{match.group(1)}static {match.group(2)};" + "".join(f" SHARED_GARBAGE({n});" for n in names)


def translate(text):
    text = re.sub(r"^#include <cuda_(bf16|fp16|runtime)\.h>", '#include "emulator.h"', text, flags=re.M)
    text = re.sub(r"^#pragma unroll.*", "", text, flags=re.M)
    text = re.sub(r"<<<", " ^ Launch(", text).replace(">>>(", ")(")
    text = re.sub(r"extern __shared__ __align__\(\d+\) (.*?) ?(\w+)\[\];", r"\1 *const \2 = (\1 *)shared_dynamic();", text)
    text = re.sub(r"(^\s*)__shared__ ([^;]*);", shared, text, flags=re.M)
    text = re.sub(r'asm(?: volatile)?\s*\("([^"]*)"(.*)\);', assembler, text)
    text = re.sub(r"__launch_bounds__\(((?:[^()]|\([^()]*\))*)\)(\s*\w+\([^{]*\{)", r"\2 LAUNCH_BOUND(\1);", text)
    return text


def main():
    folder, files = sys.argv[1], sys.argv[2:]
    os.makedirs(folder, exist_ok=True)
    for name in files:
        with open(name, encoding="utf-8") as f:
            text = translate(f.read())
        with open(os.path.join(folder, os.path.basename(name)), "w", encoding="utf-8") as f:
            f.write(f'#line 1 "{name}"\n' + text)


main()
