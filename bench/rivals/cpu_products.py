#!/usr/bin/env python3
"""Times PyTorch's and NumPy's matrix products on the CPU in the shapes of bench/gemm_bench.cc, to read beside it.

usage: cpu_products.py [rounds]

Needs torch and numpy; prints GFLOPS, the median of the rounds, on as many threads as OMP_NUM_THREADS says.
"""
import sys
import time

import numpy
import torch

CASES = [  # name, m, n, k, A is transposed, B is transposed
    ("square 1024, A Bt", 1024, 1024, 1024, False, True),
    ("square 2048, A Bt", 2048, 2048, 2048, False, True),
    ("square 4096, A Bt", 4096, 4096, 4096, False, True),
    ("square 4096, A B", 4096, 4096, 4096, False, False),
    ("attention, forward", 8192, 512, 512, False, True),
    ("attention, to inputs", 8192, 512, 512, False, False),
    ("attention, to weights", 512, 512, 8192, True, False),
    ("experts FC1, one expert", 2048, 2048, 512, False, True),
    ("head, logits", 2048, 32768, 512, False, True),
    ("head, to inputs", 2048, 512, 32768, False, False),
    ("head, to weights", 32768, 512, 2048, True, False),
]


def median_seconds(run, rounds):
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[rounds // 2]


def torch_run(m, n, k, transpose_a, transpose_b, dtype):
    a = torch.randn((k, m) if transpose_a else (m, k)).to(dtype)
    b = torch.randn((n, k) if transpose_b else (k, n)).to(dtype)
    a = a.t() if transpose_a else a
    b = b.t() if transpose_b else b
    out = torch.empty((m, n), dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def numpy_run(m, n, k, transpose_a, transpose_b):
    a = numpy.random.randn(*((k, m) if transpose_a else (m, k))).astype(numpy.float32)
    b = numpy.random.randn(*((n, k) if transpose_b else (k, n))).astype(numpy.float32)
    a = a.T if transpose_a else a
    b = b.T if transpose_b else b
    out = numpy.empty((m, n), dtype=numpy.float32)
    return lambda: numpy.matmul(a, b, out=out)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    print(f"{torch.get_num_threads()} threads, GFLOPS{'torch f32':>20}{'torch bf16':>12}{'numpy f32':>12}")
    for name, m, n, k, transpose_a, transpose_b in CASES:
        runs = [torch_run(m, n, k, transpose_a, transpose_b, torch.float32),
                torch_run(m, n, k, transpose_a, transpose_b, torch.bfloat16),
                numpy_run(m, n, k, transpose_a, transpose_b)]
        rates = [2e-9 * m * n * k / median_seconds(run, rounds) for run in runs]
        print(f"{name:<28}" + "".join(f"{rate:>12.0f}" for rate in rates), flush=True)


if __name__ == "__main__":
    main()
