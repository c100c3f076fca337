#!/usr/bin/env python3
"""Makes a golden run: a small GPT-2 trained by PyTorch and transformers, for the trainer to reproduce.

    python3 data/golden/make_golden.py OUT --text FILE [--n_layer 3 --n_head 4 --n_embd 64 --vocab 256 --seq 64
                                                        --micro 4 --accumulation 2 --steps 20 --seed 1 ...]

OUT receives config.json and model.safetensors (a Hugging Face folder with the initial weights), tokens.bin (the text's
bytes modulo the vocabulary, as an llm.c shard), expected.json (loss, gradient norm before clipping and lr of every
update, in fp32 and fp64), and the logits of the first micro-batch, the gradients of update 0 and the final weights as
safetensors. Everything runs on the CPU. Needs torch, transformers, safetensors and numpy.
"""
import argparse
import copy
import json
import math
import os

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

TOKEN_MAGIC, TOKEN_VERSION = 20240520, 1


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--text", required=True)
    sizes = dict(n_layer=3, n_head=4, n_embd=64, vocab=256, seq=64, micro=4, accumulation=2, steps=20, seed=1, warmup=5, total=20)
    for name, value in sizes.items():
        parser.add_argument("--" + name, type=int, default=value)
    for name, value in dict(lr=1e-3, weight_decay=0.1, clip=1.0).items():
        parser.add_argument("--" + name, type=float, default=value)
    return parser.parse_args()


def learning_rate(a, step):
    """Linear from lr/warmup to lr, then a cosine to a tenth of it at `total`."""
    if step < a.warmup:
        return a.lr * (step + 1) / a.warmup
    share = min(1.0, (step - a.warmup) / max(1, a.total - a.warmup))
    return a.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def micro_batch(a, tokens, step, m):
    first = (step * a.accumulation + m) * a.micro * a.seq
    window = tokens[first : first + a.micro * a.seq + 1]
    return window[:-1].view(a.micro, a.seq), window[1:].view(a.micro, a.seq)


def named(tensors):
    return {name: t.detach().float().contiguous() for name, t in tensors if t is not None}


def train(a, initial, tokens, dtype, save):
    model = copy.deepcopy(initial).to(dtype)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": a.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=(0.9, 0.95), eps=1e-8)
    rows = []
    for step in range(a.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(a, step)
        optimizer.zero_grad()
        mean = 0.0
        for m in range(a.accumulation):
            x, y = micro_batch(a, tokens, step, m)
            logits = model(x).logits
            if save and step == 0 and m == 0:
                save_file({"logits": logits.detach().contiguous()}, os.path.join(a.out, "logits0.safetensors"))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()) / a.accumulation
            loss.backward()
            mean += loss.item()
        if save and step == 0:
            save_file(named((n, p.grad) for n, p in model.named_parameters()), os.path.join(a.out, "grads0.safetensors"))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), a.clip).item()
        optimizer.step()
        rows.append((mean, norm))
    if save:
        save_file(named(model.named_parameters()), os.path.join(a.out, "final.safetensors"))
    return rows


def main():
    a = arguments()
    os.makedirs(a.out, exist_ok=True)
    torch.manual_seed(a.seed)
    torch.use_deterministic_algorithms(True)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=a.vocab, n_positions=a.seq, n_embd=a.n_embd, n_layer=a.n_layer, n_head=a.n_head,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:  # off their trivial initial values, so that a mistake in a norm or a bias shows
                p.add_(0.05 * torch.randn_like(p))
    model.save_pretrained(a.out, safe_serialization=True)
    need = a.steps * a.accumulation * a.micro * a.seq + 1
    with open(a.text, "rb") as f:
        data = np.frombuffer(f.read(need + 4096), dtype=np.uint8).astype(np.uint16) % a.vocab
    if len(data) < need:
        raise SystemExit(f"{a.text}: {len(data)} bytes, but the run reads {need}")
    header = np.zeros(256, np.int32)
    header[:3] = (TOKEN_MAGIC, TOKEN_VERSION, len(data))
    with open(os.path.join(a.out, "tokens.bin"), "wb") as f:
        f.write(header.tobytes() + data.tobytes())
    tokens = torch.from_numpy(data.astype(np.int64))
    fp32 = train(a, model, tokens, torch.float32, True)
    fp64 = train(a, model, tokens, torch.float64, False)
    steps = [dict(step=i, loss=p[0], grad_norm=p[1], lr=learning_rate(a, i), loss_f64=q[0], grad_norm_f64=q[1]) for i, (p, q) in enumerate(zip(fp32, fp64))]
    settings = {k: v for k, v in vars(a).items() if k not in ("out", "text")}
    with open(os.path.join(a.out, "expected.json"), "w") as f:
        json.dump({"settings": settings, "steps": steps}, f, indent=1)
    print(f"{a.out}: loss {fp32[0][0]:.6f} to {fp32[-1][0]:.6f}")


main()
