#!/usr/bin/env python3
"""The experts' products of FP8 beside PyTorch's (torch._scaled_grouped_mm, scales of rows) and our BF16 ones, by turns.

Each from a cold L2, in one process (see grouped_mm.py). PyTorch wants experts of multiples of 16 rows. Casts to FP8 are timed
apart, beside a copy that moves as many bytes. One JSON line for each shape; ratios above 1 are ours.

  bench/rivals/scaled_grouped_mm.py build/bench/libgrouped_cuda.so [--repeat 9]
"""
import argparse
import ctypes
import json
import math

import torch

from grouped_mm import Problem, measure_by_turns

# name, experts, rows, rows of an expert's matrix, reduction
SHAPES = [
    ("qwen fc1", 128, 131072, 1536, 2048),
    ("qwen fc2", 128, 131072, 2048, 768),
    ("mixtral fc1", 8, 32768, 28672, 4096),
    ("mixtral fc2", 8, 32768, 4096, 14336),
    ("dsv3 fc1", 32, 65536, 4096, 7168),
    ("dsv3 fc2", 32, 65536, 7168, 2048),
    ("fine fc1", 128, 262144, 512, 1536),
]
BLOCK = 128


def split_rows(rows, experts, skewed):
    torch.manual_seed(5)
    logits = 0.5 * torch.randn(experts) if skewed else torch.zeros(experts)
    counts = (torch.softmax(logits, 0) * rows / 16).long() * 16
    counts[-1] += rows - counts.sum()
    return counts


class Data:
    """Operands in BF16 and FP8, and all products of them."""

    def __init__(self, library, shape, counts):
        _, experts, rows, features, reduction = shape
        self.library, self.shape = library, shape
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).cuda()
        self.begin = (torch.arange(experts + 1) * features).to(torch.int32).cuda()
        self.counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.ends = self.offsets[1:].to(torch.int32)
        make = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)
        self.a, self.weight = make(rows, reduction), make(experts * features, reduction)
        self.y = torch.empty(rows, features, device="cuda", dtype=torch.bfloat16)
        self.problem = Problem(self.begin.data_ptr(), self.offsets.data_ptr(), experts, rows, features, reduction,
                               self.counter.data_ptr())
        self.stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.by_row = [self.quantize(x, 1, reduction) for x in (self.a, self.weight)]
        self.by_block = [self.quantize(self.a, 1, BLOCK), self.quantize(self.weight, BLOCK, BLOCK)]
        self.copied = torch.empty(rows * reduction * 3 // 2, device="cuda", dtype=torch.bfloat16)

    def quantize(self, x, rows, columns, into=None):
        if into is None:
            into = (torch.empty(x.shape, device="cuda", dtype=torch.float8_e4m3fn),
                    torch.empty(-(-x.shape[0] // rows), -(-x.shape[1] // columns), device="cuda"))
        self.library.tessera_quantize(ctypes.c_int64(x.shape[0]), ctypes.c_int64(x.shape[1]), ctypes.c_int64(rows),
                                      ctypes.c_int64(columns), *map(self.pointer, (x, *into)), self.stream)
        return into

    @staticmethod
    def pointer(tensor):
        return ctypes.c_void_p(tensor.data_ptr())

    def scaled(self, by_block):
        (a, a_scales), (weight, weight_scales) = self.by_block if by_block else self.by_row
        self.library.tessera_scaled_rows(ctypes.byref(self.problem), by_block,
                                         *map(self.pointer, (a, a_scales, weight, weight_scales, self.y)), self.stream)
        return self.y

    def bf16(self):
        self.library.tessera_grouped_rows(ctypes.byref(self.problem), 1, *map(self.pointer, (self.a, self.weight, self.y)),
                                          self.stream)
        return self.y

    def torch(self):
        (a, a_scales), (weight, weight_scales) = self.by_row
        _, experts, _, features, reduction = self.shape
        return torch._scaled_grouped_mm(a, weight.view(experts, features, reduction).transpose(-2, -1), a_scales.flatten(),
                                        weight_scales.view(experts, features), offs=self.ends,
                                        out_dtype=torch.bfloat16, use_fast_accum=True)

    def check(self):
        """Experts' blocks one at a time, to spare memory."""
        truth = self.bf16().clone()
        size = truth.float().pow(2).mean().sqrt().item()
        for name, run, most in (("torch", self.torch, 0.06), ("by row", lambda: self.scaled(0), 0.06),
                                ("by block", lambda: self.scaled(1), 0.06)):
            parts = zip(run().split(4096), truth.split(4096))
            error = math.sqrt(sum((a.float() - b.float()).pow(2).sum().item() for a, b in parts) / truth.numel()) / size
            if not error <= most:
                raise SystemExit(f"{self.shape[0]} {name}: results differ from BF16's by {error:.3f}")

    def copy(self):
        half = self.copied.numel() // 2
        self.copied[:half].copy_(self.copied[half:2 * half])

    def runs(self):
        a, (by_row, by_block) = self.a, (self.by_row[0], self.by_block[0])
        return {"torch": self.torch, "by row": lambda: self.scaled(0), "by block": lambda: self.scaled(1),
                "bf16": self.bf16, "quantize by row": lambda: self.quantize(a, 1, a.shape[1], by_row),
                "quantize by block": lambda: self.quantize(a, 1, BLOCK, by_block),
                "quantize weight": lambda: self.quantize(self.weight, BLOCK, BLOCK, self.by_block[1]),
                "copy": self.copy}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    library = ctypes.CDLL(options.library)
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    ratios = {}
    for shape in SHAPES:
        for skewed in (False, True):
            data = Data(library, shape, split_rows(shape[2], shape[1], skewed))
            data.check()
            medians = measure_by_turns(data.runs(), flush, options.repeat)
            flops = 2 * shape[2] * shape[3] * shape[4]
            tflops = {who: round(flops / medians[who] / 1e9) for who in ("torch", "by row", "by block", "bf16")}
            casts = {name: round(medians["copy"] / medians[name], 2) for name in ("quantize by row", "quantize by block")}
            print(json.dumps({"shape": shape[0], "skewed": skewed, "tflops": tflops, "of a copy": casts}), flush=True)
            for own in ("by row", "by block"):
                ratios.setdefault((own, "torch"), []).append(medians["torch"] / medians[own])
                ratios.setdefault((own, "our BF16"), []).append(medians["bf16"] / medians[own])
            del data
    for (own, rival), values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        print(f"{own}: geometric mean {mean:.3f} of the speed of {rival}, least {min(values):.3f}, "
              f"greatest {max(values):.3f}")


if __name__ == "__main__":
    main()
