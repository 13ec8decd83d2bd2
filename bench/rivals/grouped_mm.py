#!/usr/bin/env python3
"""Times PyTorch's grouped BF16 product (torch._grouped_mm) on the shapes of MoE layers, cold L2.

  bench/rivals/grouped_mm.py [--repeat 10]
"""
import argparse
import json

import torch

# name, experts, rows, inner size (rows of an expert's matrix), hidden size
SHAPES = [
    ("mixtral fc1", 8, 16384, 28672, 4096),
    ("mixtral fc2", 8, 16384, 14336, 4096),
    ("qwen fc1", 128, 65536, 1536, 2048),
    ("qwen fc2", 128, 65536, 768, 2048),
    ("dsv3 fc1", 32, 65536, 4096, 7168),
    ("dsv3 fc2", 32, 65536, 2048, 7168),
]


def split_rows(rows, experts, skewed):
    torch.manual_seed(5)
    share = torch.softmax(0.5 * torch.randn(experts), 0) if skewed else torch.full((experts,), 1 / experts)
    counts = (share * rows).long()
    counts[-1] += rows - counts.sum()
    return counts


def median_ms(run, flush, repeat):
    times = []
    for _ in range(repeat + 3):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[3:])[repeat // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args()
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for name, experts, rows, inner, hidden in SHAPES:
        for skewed in (False, True):
            counts = split_rows(rows, experts, skewed)
            ends = counts.cumsum(0).to(torch.int32).cuda()
            wide = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
            narrow = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
            weight = torch.randn(experts, inner, hidden, device="cuda", dtype=torch.bfloat16)
            products = {
                "by_out": lambda: torch._grouped_mm(wide, weight.transpose(-2, -1), offs=ends),
                "by_in": lambda: torch._grouped_mm(narrow, weight, offs=ends),
                "wgrad": lambda: torch._grouped_mm(narrow.t(), wide, offs=ends),
            }
            flops = 2 * rows * inner * hidden
            result = {"shape": name, "skewed": skewed}
            for product, run in products.items():
                ms = median_ms(run, flush, options.repeat)
                result[product] = {"ms": round(ms, 4), "tflops": round(flops / ms / 1e9, 1)}
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
