#!/usr/bin/env python3
"""Causal attention of PyTorch with cuDNN, or FlashAttention where that refuses, in the shapes and the form of bench/attention_cuda_bench.cc.

  bench/rivals/attention_torch.py [build/bench/attention_cuda_bench]

One JSON line a shape: median TFLOPS of forward and backward. Given the program of the other, runs it
too and prints ours over PyTorch's: one process after the other on an idle GPU, so a few percent may
be the clock's. --deterministic asks PyTorch for deterministic algorithms.
"""
import argparse
import json
import subprocess

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# name, batch, length, heads, key-value heads, size of a query's head, of a value's
SHAPES = [
    ("qwen3-30b-a3b 4x4096", 4, 4096, 32, 4, 128, 128),
    ("mixtral 2x4096", 2, 4096, 32, 8, 128, 128),
    ("mixtral 1x16384", 1, 16384, 32, 8, 128, 128),
    ("mla 1x4096", 1, 4096, 128, 128, 192, 128),
    ("d64 4x4096", 4, 4096, 32, 8, 64, 64),
    ("qwen3-next 4x4096", 4, 4096, 16, 2, 256, 256),
]
WARMUPS, REPEATS = 3, 15


def median_ms(run):
    times = []
    for _ in range(WARMUPS + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[WARMUPS:])[REPEATS // 2]


def measure(batch, length, heads, kv_heads, size, size_v):
    def make(count, width):  # as the projections give it: [batch, length, heads, size]
        values = torch.randn(batch, length, count, width, device="cuda", dtype=torch.bfloat16)
        return values.transpose(1, 2).requires_grad_()

    q, k, v = make(heads, size), make(kv_heads, size), make(kv_heads, size_v)
    attend = lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

    def measure_with(backend):
        with sdpa_kernel(backend):
            o = attend()
            grad_o = torch.randn_like(o)
            return median_ms(attend), median_ms(
                lambda: torch.autograd.grad(o, (q, k, v), grad_o, retain_graph=True))

    try:
        who, (forward, backward) = "torch", measure_with(SDPBackend.CUDNN_ATTENTION)
    except RuntimeError:
        who, (forward, backward) = "torch flash", measure_with(SDPBackend.FLASH_ATTENTION)
    flops = batch * heads * (length * (length + 1)) * (size + size_v)
    return {"who": who, "forward": round(flops / forward / 1e9, 1),
            "backward": round(2 * flops / backward / 1e9, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", nargs="?")
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(options.deterministic)
    theirs = {}
    for name, *shape in SHAPES:
        theirs[name] = measure(*shape)
        print(json.dumps({"shape": name} | theirs[name]), flush=True)
        torch.cuda.empty_cache()
    if options.ours:
        lines = subprocess.run([options.ours], check=True, stdout=subprocess.PIPE, text=True).stdout
        for ours in map(json.loads, lines.splitlines()):
            print(json.dumps(ours))
            if ours["shape"] in theirs:
                ratios = {way: round(ours[way] / theirs[ours["shape"]][way], 3) for way in ("forward", "backward")}
                print(json.dumps({"shape": ours["shape"], "who": ours["who"], "over torch": ratios}))


if __name__ == "__main__":
    main()
