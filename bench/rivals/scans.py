#!/usr/bin/env python3
"""The chunked scans of linear attention of two libraries of Triton kernels, in the shapes of our benches.

  bench/rivals/scans.py [--delta build/bench/delta_cuda_bench] [--ssd build/bench/ssd_cuda_bench] [--only NAME]

The gated delta rule and Kimi Delta Attention of flash-linear-attention, and Mamba-2's scan of mamba-ssm, of which `mamba_ssm/ops` and
`mamba_ssm/utils` in a folder of PYTHONPATH are enough. One line an operator: median microseconds of theirs, and where our program is given,
of ours and ours over theirs in speed. Both run on an idle GPU, one after the other. Backward is what autograd's gradient takes, with what
forward kept: ours keeps the inputs alone.
"""
import argparse
import subprocess

import torch

SEQUENCES, LENGTH = 4, 4096
WARMUPS, REPEATS = 3, 15


def median_us(run):
    times = []
    for _ in range(WARMUPS + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times[WARMUPS:])[REPEATS // 2]


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(SEQUENCES, LENGTH, *shape, device="cuda", dtype=dtype)


def time_both(scan, inputs):
    """Of the scan, and of all its gradients, or why these cannot be had."""
    inputs = [x.requires_grad_() for x in inputs]
    out = scan(*inputs)
    grad = torch.randn_like(out)
    forward = median_us(lambda: scan(*inputs))
    try:
        return forward, median_us(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True))
    except Exception as error:  # one library refuses versions of Triton that compile its gradients wrongly
        return forward, str(error)


def decays(*shape):
    return -0.2 * torch.rand(SEQUENCES, LENGTH, *shape, device="cuda")


def gated_delta():
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    inputs = [random(16, 128), random(16, 128), random(32, 128), decays(32), torch.rand(SEQUENCES, LENGTH, 32, device="cuda")]
    return time_both(lambda *x: chunk_gated_delta_rule(*x, use_qk_l2norm_in_kernel=True)[0], inputs)


def kimi_delta():
    from fla.ops.kda import chunk_kda
    inputs = [random(32, 128), random(32, 128), random(32, 128), decays(32, 128), torch.rand(SEQUENCES, LENGTH, 32, device="cuda")]
    return time_both(lambda *x: chunk_kda(*x, use_qk_l2norm_in_kernel=True)[0], inputs)


def mamba(heads, groups):
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    of_heads = [torch.randn(heads, device="cuda") for _ in range(3)]

    def scan(x, dt, b, c, a_log, d, bias):
        return mamba_chunk_scan_combined(x, dt, -torch.exp(a_log), b, c, 256, D=d, dt_bias=bias, dt_softplus=True)

    return time_both(scan, [random(heads, 64), random(heads), random(groups, 128), random(groups, 128), *of_heads])


# Name, the bench that has its like and the line there, and what runs it.
CASES = [
    ("gated_delta", "delta", "gated_delta", 0, gated_delta),
    ("kda", "delta", "kda", 0, kimi_delta),
    ("ssd_scan, granite-4.0-h-small", "ssd", "ssd_scan", 0, lambda: mamba(128, 1)),
    ("ssd_scan, nemotron-3-nano", "ssd", "ssd_scan", 1, lambda: mamba(64, 8)),
]


def ours(program, name, number):
    """Microseconds, forward and backward, in the program's lines that begin with the name."""
    lines = subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    found = lambda word: [float(line.split()[1]) for line in lines if line.split()[:1] == [word]][number]
    return found(name), found(name + "_backward")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for bench in ("delta", "ssd"):
        parser.add_argument("--" + bench, metavar="PROGRAM")
    parser.add_argument("--only", default="", help="part of an operator's name")
    options = vars(parser.parse_args())
    for name, bench, line, number, run in CASES:
        if options["only"] not in name:
            continue
        try:
            theirs = run()
        except Exception as error:  # a library that is missing, or refuses the machine
            print(f"{name}: theirs did not run: {error}".splitlines()[0], flush=True)
            continue
        own = ours(options[bench], line, number) if options[bench] else (None, None)
        for way, their, our in zip(("forward", "backward"), theirs, own):
            if isinstance(their, str):
                print(f"{name}, {way}: theirs did not run: {their.splitlines()[0]}", flush=True)
                continue
            beside = f", ours {our:.1f} us, {their / our:.2f} times as fast" if our else ""
            print(f"{name}, {way}: theirs {their:.1f} us{beside}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
