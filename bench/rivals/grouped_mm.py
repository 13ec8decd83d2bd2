#!/usr/bin/env python3
"""The grouped BF16 products of MoE layers beside PyTorch's (torch._grouped_mm) and CUTLASS's, cold L2, alternately.

Alternately in one process, since the GPU's clock follows its power: measured one after the other, whoever
ran on the cooler GPU was a tenth faster. PyTorch's gradients of weights are BF16, ours F32, written
(wgrad) or added to (wgrad+=), and so are CUTLASS's. One JSON line for each shape and product; ratios above 1 are ours.
CUTLASS's products are timed without their set-up, with each schedule and order of tiles that cutlass/ builds; the best
for each cell counts.

  bench/rivals/grouped_mm.py build/bench/libgrouped_cuda.so [--cutlass build/bench/libgrouped_cutlass.so] [--repeat 9]
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
# Name, schedule and swizzle of CUTLASS's variants.
CUTLASS = [("cutlass cooperative", 0, 1), ("cutlass cooperative/8", 0, 8), ("cutlass pingpong", 1, 1),
           ("cutlass pingpong/8", 1, 8)]


class Problem(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_void_p), ("offsets", ctypes.c_void_p)] + [
        (name, ctypes.c_int64) for name in ("num_experts", "num_rows", "inner", "hidden")] + [("counter", ctypes.c_void_p)]


class CutlassProblem(ctypes.Structure):
    _fields_ = ([("offsets", ctypes.POINTER(ctypes.c_int64))] +
                [(name, ctypes.c_int64) for name in ("num_experts", "inner", "hidden")] +
                [(name, ctypes.c_void_p) for name in ("a", "b", "y")] +
                [(name, ctypes.c_int) for name in ("schedule", "swizzle", "accumulate")])


class CutlassProduct:
    """One of CUTLASS's products of given matrices, set up once."""

    def __init__(self, library, product, problem):
        self.library = library
        self.handle = library.cutlass_grouped_make(product, ctypes.byref(problem))
        if not self.handle:
            raise SystemExit("CUTLASS's product cannot be set up")

    def __call__(self):
        if self.library.cutlass_grouped_run(self.handle, torch.cuda.current_stream().cuda_stream):
            raise SystemExit("CUTLASS's product failed")

    def __del__(self):
        self.library.cutlass_grouped_free(self.handle)


def load_cutlass(path):
    library = ctypes.CDLL(path)
    library.cutlass_grouped_make.restype = ctypes.c_void_p
    library.cutlass_grouped_make.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.cutlass_grouped_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.cutlass_grouped_free.argtypes = [ctypes.c_void_p]
    return library


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


def make_runs(library, cutlass, experts, rows, inner, hidden, counts):
    """By product: PyTorch's run, ours and CUTLASS's; all but PyTorch's give their result's tensor."""
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

    ends_on_host = (ctypes.c_int64 * (experts + 1))(*offsets.tolist())

    def cutlass_runs(product, a, b, y, accumulate=0):
        runs = {}
        for name, schedule, swizzle in CUTLASS if cutlass else ():
            problem = CutlassProblem(ends_on_host, experts, inner, hidden, a.data_ptr(), b.data_ptr(), y.data_ptr(),
                                     schedule, swizzle, accumulate)
            run = CutlassProduct(cutlass, product, problem)
            runs[name + "+=" * accumulate] = lambda run=run: (run(), y)[1]
        return runs

    def rows_product(by_out, a, y):
        library.tessera_grouped_rows(ctypes.byref(problem), by_out, pointer(a), pointer(weight), pointer(y), stream)
        return y

    def wgrad(accumulate):
        library.tessera_grouped_wgrad(ctypes.byref(problem), accumulate, pointer(narrow), pointer(wide),
                                      pointer(grad), stream)
        return grad

    return {
        "by_out": (lambda: torch._grouped_mm(wide, weight.transpose(-2, -1), offs=ends),
                   {"by_out": lambda: rows_product(1, wide, narrow_out)}, cutlass_runs(0, wide, weight, narrow_out)),
        "by_in": (lambda: torch._grouped_mm(narrow, weight, offs=ends),
                  {"by_in": lambda: rows_product(0, narrow, wide_out)}, cutlass_runs(1, narrow, weight, wide_out)),
        "wgrad": (lambda: torch._grouped_mm(narrow.t(), wide, offs=ends),
                  {"wgrad": lambda: wgrad(0), "wgrad+=": lambda: wgrad(1)},
                  {**cutlass_runs(2, narrow, wide, grad), **cutlass_runs(2, narrow, wide, grad, 1)}),
    }, keep


def check_agreement(name, theirs, ours):
    """Runs both. Experts' blocks one at a time, to spare memory."""
    ours().zero_()
    theirs, ours = theirs().split(1024), ours().split(1024)
    size = max(part.abs().max().item() for part in theirs)
    error = max((a.float() - b.float()).abs().max().item() for a, b in zip(theirs, ours))
    if not error <= 0.01 * size:
        raise SystemExit(f"{name}: results differ by {error} of {size}")


def best_of_cutlass(medians, name):
    """The least time of the variants that do what our product `name` does; None where there are none."""
    added = name.endswith("+=")
    return min((ms for other, ms in medians.items() if other.startswith("cutlass") and other.endswith("+=") == added),
               default=None)


def measure_shape(shape, skewed, products, flush, repeat):
    """Prints a line for each product; yields rival, our product and the ratio."""
    (name, experts, rows, inner, hidden), (runs, _) = shape, products
    for product, (torch_run, own_runs, cutlass_runs) in runs.items():
        for other, run in {product: own_runs[product], **cutlass_runs}.items():
            check_agreement(f"{name} {product}, {other}", torch_run, run)
        medians = measure_by_turns({"torch": torch_run, **own_runs, **cutlass_runs}, flush, repeat)
        tflops = {who: round(2 * rows * inner * hidden / ms / 1e9, 1) for who, ms in medians.items()}
        print(json.dumps({"shape": name, "skewed": skewed, "product": product, "tflops": tflops}), flush=True)
        for own in own_runs:
            yield "PyTorch", own, medians["torch"] / medians[own]
            best = best_of_cutlass(medians, own)
            if best:
                yield "CUTLASS", own, best / medians[own]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--cutlass", metavar="LIBRARY", help="as bench/rivals/cutlass makes it")
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    library = ctypes.CDLL(options.library)
    cutlass = load_cutlass(options.cutlass) if options.cutlass else None
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    ratios = {}
    for shape in SHAPES:
        for skewed in (False, True):
            products = make_runs(library, cutlass, *shape[1:], split_rows(shape[2], shape[1], skewed))
            for rival, product, ratio in measure_shape(shape, skewed, products, flush, options.repeat):
                ratios.setdefault((rival, product), []).append(ratio)
            del products
    for (rival, product), values in sorted(ratios.items(), key=lambda entry: entry[0][0], reverse=True):
        mean = math.exp(sum(map(math.log, values)) / len(values))
        print(f"{product}: geometric mean {mean:.3f} of {rival}'s speed, least {min(values):.3f}, "
              f"greatest {max(values):.3f}")


if __name__ == "__main__":
    main()
