#!/usr/bin/env python3
"""The grouped BF16 products of MoE layers beside PyTorch's (torch._grouped_mm), cold L2, by turns.

By turns in one process, since the GPU's clock follows its power: measured one after the other, whoever
ran on the cooler GPU was a tenth faster. PyTorch's gradients of weights are BF16, ours F32, written
(wgrad) or added to (wgrad+=). One JSON line for each shape and product; ratios above 1 are ours.

  bench/rivals/grouped_mm.py build/bench/libgrouped_cuda.so [--repeat 9]
"""
import argparse
import ctypes
import json
import math

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
WARMUPS = 2


class Problem(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_void_p), ("offsets", ctypes.c_void_p)] + [
        (name, ctypes.c_int64) for name in ("num_experts", "num_rows", "inner", "hidden")] + [("counter", ctypes.c_void_p)]


def split_rows(rows, experts, skewed):
    torch.manual_seed(5)
    logits = 0.5 * torch.randn(experts) if skewed else torch.zeros(experts)
    counts = (torch.softmax(logits, 0) * rows).long()
    counts[-1] += rows - counts.sum()
    return counts


def measure_by_turns(runs, flush, repeat):
    """The median milliseconds of each of `runs`."""
    times = {name: [] for name in runs}
    for _ in range(WARMUPS + repeat):
        for name, run in runs.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: sorted(all[WARMUPS:])[repeat // 2] for name, all in times.items()}


def make_runs(library, experts, rows, inner, hidden, counts):
    """By product: PyTorch's run and ours, and whether their results agree."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).cuda()
    begin = (torch.arange(experts + 1) * inner).to(torch.int32).cuda()
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    ends = offsets[1:].to(torch.int32)
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    wide, narrow, weight = make(rows, hidden), make(rows, inner), make(experts, inner, hidden)
    wide_out, narrow_out = torch.empty_like(wide), torch.empty_like(narrow)
    grad = torch.zeros(experts, inner, hidden, device="cuda")
    problem = Problem(begin.data_ptr(), offsets.data_ptr(), experts, rows, inner, hidden, counter.data_ptr())
    keep = (begin, offsets, counter)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    pointer = lambda tensor: ctypes.c_void_p(tensor.data_ptr())

    def rows_product(by_out, a, y):
        library.tessera_grouped_rows(ctypes.byref(problem), by_out, pointer(a), pointer(weight), pointer(y), stream)
        return y, keep

    def wgrad(accumulate):
        library.tessera_grouped_wgrad(ctypes.byref(problem), accumulate, pointer(narrow), pointer(wide),
                                      pointer(grad), stream)
        return grad, keep

    return {
        "by_out": (lambda: torch._grouped_mm(wide, weight.transpose(-2, -1), offs=ends),
                   {"by_out": lambda: rows_product(1, wide, narrow_out)}),
        "by_in": (lambda: torch._grouped_mm(narrow, weight, offs=ends),
                  {"by_in": lambda: rows_product(0, narrow, wide_out)}),
        "wgrad": (lambda: torch._grouped_mm(narrow.t(), wide, offs=ends),
                  {"wgrad": lambda: wgrad(0), "wgrad+=": lambda: wgrad(1)}),
    }


def check_agreement(name, theirs, ours):
    """Experts' blocks one at a time, to spare memory."""
    size = max(part.abs().max().item() for part in theirs)
    error = max((a.float() - b.float()).abs().max().item() for a, b in zip(theirs, ours))
    if not error <= 0.01 * size:
        raise SystemExit(f"{name}: results differ by {error} of {size}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    library = ctypes.CDLL(options.library)
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    ratios = {}
    for shape, experts, rows, inner, hidden in SHAPES:
        for skewed in (False, True):
            runs = make_runs(library, experts, rows, inner, hidden, split_rows(rows, experts, skewed))
            for product, (torch_run, own_runs) in runs.items():
                check_agreement(f"{shape} {product}", torch_run().split(1024), own_runs[product]()[0].split(1024))
                medians = measure_by_turns({"torch": torch_run, **own_runs}, flush, options.repeat)
                tflops = {name: round(2 * rows * inner * hidden / ms / 1e9, 1) for name, ms in medians.items()}
                print(json.dumps({"shape": shape, "skewed": skewed, "product": product, "tflops": tflops}), flush=True)
                for name in own_runs:
                    ratios.setdefault(name, []).append(medians["torch"] / medians[name])
            del runs, torch_run, own_runs
    for name, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        print(f"{name}: geometric mean {mean:.3f} of PyTorch's speed, least {min(values):.3f}, "
              f"greatest {max(values):.3f}")


if __name__ == "__main__":
    main()
