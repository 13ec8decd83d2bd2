#!/usr/bin/env python3
"""Training with paged stashing beside the same training with memory for the worst routing, alternately in one run.

  bench/stash.py build/tessera [--device cpu|cuda] [--ranks 2] [--only NAME,...] [--rounds 3] [--steps 8] [--json FILE] [-- MORE]

For each case and way: the median step, the memory that a rank uses and what was predicted, and how many steps were done again because
pages lacked. Sizes of exchanges stay on the devices in all of them ("direct" between GPUs, "bounded" between CPUs).
"""
import json
import pathlib
import statistics
import tempfile

from schedules import QWEN3, SMALL, in_turns, parse, run, run_cases, train_arguments

# Name: device, (sequences of a micro-batch, micro-batches of a step), and other options of `tessera train`.
CASES = {
    "qwen3-4-layers": ("cuda", (2, 4), [*QWEN3, "--model.num_layers=4", "--parallel.exchange=direct"]),
    "small": ("cpu", (1, 8), [*SMALL, "--parallel.exchange=bounded"]),
}
WAYS = {
    "worst": ["--moe.fuse_gather=never"],
    "stash": ["--train.stash=auto"],
    "stash-tight": ["--train.stash=auto", "--train.stash_factor=1.05"],
}
MIB = 2**20


def measure(program, name, options, folder):
    device, (micro_batch, micro_batches), more = CASES[name]
    common = [*train_arguments(options, folder, device, micro_batch, micro_batch * micro_batches * options.ranks),
              f"--parallel.ep={options.ranks}", "--parallel.dispatcher=deduplicated", *more, *options.more]
    found = {way: [] for way in WAYS}
    for way in in_turns(list(WAYS), options.rounds):
        with tempfile.TemporaryDirectory(dir=folder) as own:
            steps, _, _ = run(program, [*common, *WAYS[way]], pathlib.Path(own))
            lines = map(json.loads, (pathlib.Path(own) / "run" / "metrics.jsonl").read_text().splitlines())
            last = [line for line in lines if line.get("type") == "step"][-1]
        found[way].append((statistics.median(steps[2:]), last["memory_used"] / MIB, last["memory_predicted"] / MIB,
                           last.get("repeated_steps", 0)))
    return {way: dict(zip(("seconds", "used_mib", "predicted_mib", "repeated"), map(statistics.median, zip(*runs))))
            for way, runs in found.items()}


def show(name, ways):
    for way, row in ways.items():
        print(f"{name:20} {way:12} {1e3 * row['seconds']:7.1f} ms {row['seconds'] / ways['worst']['seconds']:9.3f} "
              f"{row['used_mib']:10.0f} {row['predicted_mib']:10.0f}  {row['repeated']:.0f}", flush=True)


def main():
    head = f"{'case':20} {'way':12} {'step':>10} {'of worst':>9} {'MiB used':>10} {'predicted':>10}  steps done again"
    run_cases(parse(__doc__, CASES), head, measure, show)


if __name__ == "__main__":
    main()
