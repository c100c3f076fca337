#!/usr/bin/env python3
"""Checks an exported model folder with the libraries that everybody reads such folders with.

    scripts/check_export.py EXPORTED                    loads with transformers: no name missing, unexpected or of another shape
    scripts/check_export.py EXPORTED --original FOLDER  and the logits equal those of the folder that the model came from
    scripts/check_export.py EXPORTED --logits FILE --tokens FILE
                                                        and they equal stored ones: safetensors with "logits" (B, T, V), and an
                                                        llm.c token file whose first B samples of T tokens they belong to
    scripts/check_export.py --format-only EXPORTED      files, headers, index and sizes only: needs just safetensors and numpy

Prints what was compared and the largest difference. Exit code: 0 all well, 1 a check failed, 77 a library is missing.
"""
import argparse
import json
import os
import sys

failures = 0


def check(good, what):
    global failures
    print(("ok    " if good else "FAIL  ") + what)
    failures += not good


def need(module):
    try:
        return __import__(module)
    except ImportError:
        print(f"skipped: this Python has no {module}; pip install {module}")
        sys.exit(77)


def weight_files(folder):
    """Names of the weight files, and the index's map of tensors to them (None without an index)."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(index):
        return ["model.safetensors"], None
    with open(index, encoding="utf-8") as f:
        text = json.load(f)
    return sorted(set(text["weight_map"].values())), text


def check_format(folder):
    safetensors = need("safetensors")
    need("numpy")
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    files, index = weight_files(folder)
    shapes, types, total, read = {}, set(), 0, 0
    width = {"F32": 4, "F16": 2, "BF16": 2}
    for name in files:
        with safetensors.safe_open(os.path.join(folder, name), framework="numpy") as f:
            check((f.metadata() or {}).get("format") == "pt", f'{name}: metadata says format "pt"')
            for key in f.keys():
                part = f.get_slice(key)
                shape, kind = list(part.get_shape()), str(part.get_dtype())
                size = 1
                for n in shape:
                    size *= n
                if key in shapes:
                    check(False, f"{key} is in two files")
                shapes[key] = shape
                types.add(kind)
                total += size * width.get(kind, 0)
                if index and index["weight_map"].get(key) != name:
                    check(False, f"the index does not place {key} in {name}")
                if kind != "BF16":  # numpy has no bfloat16
                    values = f.get_tensor(key)
                    read += values.size
                    if not (list(values.shape) == shape and (values == values).all()):
                        check(False, f"{key}: values")
    if index:
        check(index["metadata"]["total_size"] == total, f"total_size is {total}")
        check(set(index["weight_map"]) == set(shapes), "the index lists every tensor and no other")
    wanted_type = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[config["torch_dtype"]]
    check(config["dtype"] == config["torch_dtype"] and types == {wanted_type}, f"every tensor has the type {config['dtype']}")
    check(shapes == expected_shapes(config), f"{len(shapes)} tensors have the names and shapes of config.json; {read} values read")


def expected_shapes(c):
    """GPT-2's tensors by config.json; linear layers are [in, out]."""
    C, F = c["n_embd"], c["n_inner"] or 4 * c["n_embd"]
    shapes = {"transformer.wte.weight": [c["vocab_size"], C], "transformer.wpe.weight": [c["n_positions"], C]}
    for layer in range(c["n_layer"]):
        h = f"transformer.h.{layer}."
        for norm in "ln_1", "ln_2":
            shapes[f"{h}{norm}.weight"] = shapes[f"{h}{norm}.bias"] = [C]
        for linear, a, b in ("attn.c_attn", C, 3 * C), ("attn.c_proj", C, C), ("mlp.c_fc", C, F), ("mlp.c_proj", F, C):
            shapes[f"{h}{linear}.weight"] = [a, b]
            shapes[f"{h}{linear}.bias"] = [b]
    shapes["transformer.ln_f.weight"] = shapes["transformer.ln_f.bias"] = [C]
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [c["vocab_size"], C]
    return shapes


def load(folder, torch, transformers):
    """The model in fp32 on the CPU, and what the loader says of names."""
    major = int(transformers.__version__.split(".")[0])
    kind = {"dtype" if major >= 5 else "torch_dtype": torch.float32}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, local_files_only=True, **kind)
    return model.eval(), info


def compare(torch, got, want, tolerance, what):
    difference = (got - want).abs().max().item()
    scale = want.abs().max().item()
    check(difference <= tolerance * scale, f"{what}: {got.numel()} logits, largest difference {difference:.3g} ({difference / scale:.3g} of the largest logit {scale:.4g}, bound {tolerance:g})")


def check_model(args):
    torch = need("torch")
    transformers = need("transformers")
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    model, info = load(args.exported, torch, transformers)
    for kind in "missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs":
        found = list(info.get(kind) or [])
        check(not found, f"{kind}: {found if found else 'none'}")
    config = model.config
    print(f"      {sum(p.numel() for p in model.parameters())} parameters; tied: {model.lm_head.weight is model.transformer.wte.weight}")
    check((model.lm_head.weight is model.transformer.wte.weight) == config.tie_word_embeddings, "head and embedding are tied as config.json says")
    for name in "bos_token_id", "eos_token_id":
        value = getattr(config, name)
        check(value is None or 0 <= value < config.vocab_size, f"{name} = {value} is a token, or none")
    with torch.no_grad():
        if args.original:
            original, _ = load(args.original, torch, transformers)
            T = min(config.n_positions, 256)
            tokens = torch.randint(0, config.vocab_size, (2, T), generator=torch.Generator().manual_seed(1))
            compare(torch, model(tokens).logits, original(tokens).logits, args.tolerance, f"against {args.original}")
        if args.logits:
            from safetensors.torch import load_file
            import numpy
            want = load_file(args.logits)["logits"].float()
            B, T, V = want.shape
            header = numpy.fromfile(args.tokens, dtype="<i4", count=256)
            tokens = numpy.fromfile(args.tokens, dtype="<u2" if header[0] == 20240520 else "<u4", offset=1024, count=B * T).astype("int64")
            compare(torch, model(torch.from_numpy(tokens.reshape(B, T))).logits, want, args.tolerance, f"against {args.logits}")
        start = torch.zeros((1, 1), dtype=torch.long)
        out = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=4, do_sample=False, pad_token_id=0)
        check(out.shape[1] >= 2, f"generate() gives tokens: {out[0].tolist()}")


def main():
    parser = argparse.ArgumentParser(description="Checks an exported model folder.")
    parser.add_argument("exported", help="the folder that --export wrote")
    parser.add_argument("--original", help="the folder that the model came from: logits must be equal")
    parser.add_argument("--logits", help='a safetensors file with "logits" (B, T, V)')
    parser.add_argument("--tokens", help="the token file that the stored logits belong to")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest difference, as a share of the largest logit (1e-5)")
    parser.add_argument("--format-only", action="store_true", help="do not load the model")
    args = parser.parse_args()
    if bool(args.logits) != bool(args.tokens):
        parser.error("--logits and --tokens go together")
    check_format(args.exported)
    if not args.format_only:
        check_model(args)
    print("all well" if failures == 0 else f"{failures} checks failed")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
