#!/usr/bin/env python3
"""Times training with each dispatcher of experts' tokens, alternately in one run.

  bench/dispatchers.py [--device cpu|cuda] [--ranks 2] [--only NAME,...] [--rounds 3] [--steps 8] [--json FILE] build/tessera [-- MORE]

For each case and dispatcher: the median step, the MiB that a step's exchanges of experts' tokens move (all ranks together; what stays on
a rank is not counted), and the share of the traced steps in which these exchanges go on and their rank computes nothing. Hierarchical
dispatch takes half of the ranks for a node, so it needs four at least.
"""
import pathlib
import re
import statistics
import tempfile

from schedules import QWEN3, SMALL, TOKEN_GROUPS, exposed_shares, in_turns, parse, run, run_cases, train_arguments

MIXTRAL = ["--model.preset=mixtral-8x7b", "--model.vocab_size=4096", "--model.num_layers=2", "--data.sequence_length=4096",
           "--train.precision=bf16"]
# Name: device, sequences of a micro-batch, and other options of `tessera train`.
CASES = {
    "mixtral-2-layers": ("cuda", 2, MIXTRAL),
    "qwen3-4-layers": ("cuda", 2, [*QWEN3, "--model.num_layers=4"]),
    "small": ("cpu", 1, SMALL),
    "small-top-6-of-64": ("cpu", 1, [*SMALL, "--moe.num_experts=64", "--moe.top_k=6", "--moe.inner_size=64"]),
}
UNITS = {"B": 2**-20, "KiB": 2**-10, "MiB": 1.0, "GiB": 2.0**10}


def dispatchers(ranks, device):
    ways = {name: [f"--parallel.dispatcher={name}"] for name in ("all_to_all", "all_gather", "deduplicated")}
    if ranks >= 4:
        ways["hierarchical"] = ["--parallel.dispatcher=hierarchical", f"--parallel.dispatch_inner={ranks // 2}"]
    if device == "cuda":
        direct = {f"{name}, direct": [*way, "--parallel.exchange=direct"] for name, way in ways.items() if name != "all_gather"}
        ways |= direct
    return ways


def token_mib(output):
    """Of the lines that say what a step sent."""
    total = 0.0
    for group, amount, unit in re.findall(r"^  (\w+) +\w+ +([\d.]+) (\w+) in \d+ calls$", output, re.M):
        if group in TOKEN_GROUPS:
            total += float(amount) * UNITS[unit]
    return total


def measure(program, name, options, folder):
    device, micro_batch, more = CASES[name]
    common = [*train_arguments(options, folder, device, micro_batch, 4 * micro_batch * options.ranks), f"--parallel.ep={options.ranks}", *more,
              *options.more]
    ways = dispatchers(options.ranks, device)
    found = {way: [] for way in ways}
    for way in in_turns(list(ways), options.rounds):
        with tempfile.TemporaryDirectory(dir=folder) as own:
            steps, events, output = run(program, [*common, *ways[way]], pathlib.Path(own))
        found[way].append((statistics.median(steps[2:]), token_mib(output), exposed_shares(events)[0]))
    return {way: dict(zip(("seconds", "mib", "exposed"), map(statistics.median, zip(*runs)))) for way, runs in found.items()}


def show(name, ways):
    for way, of in ways.items():
        print(f"{name:20} {way:22} {1e3 * of['seconds']:7.1f} ms {of['mib']:9.1f} MiB  {100 * of['exposed']:.1f}", flush=True)


def main():
    head = f"{'case':20} {'dispatcher':22} {'step':>10} {'tokens sent':>13}  exposed (% of a step)"
    run_cases(parse(__doc__, CASES), head, measure, show)


if __name__ == "__main__":
    main()
