#!/usr/bin/env python3
"""Times training with each dispatcher of experts' tokens, alternately in one run.

  bench/dispatchers.py build/tessera [--device cpu|cuda] [--ranks 2] [--only NAME,...] [--rounds 3] [--steps 8] [--json FILE] [-- MORE]

For each case and dispatcher: the median step, the MiB that a step's exchanges of experts' tokens move (all ranks together; what stays on
a rank is not counted), and the share of the traced steps in which these exchanges go on and their rank computes nothing. Hierarchical
dispatch takes half of the ranks for a node, so it needs four at least.
"""
import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from schedules import QWEN3, SMALL, TOKEN_GROUPS, environment, exposed_shares, write_text

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


def dispatchers(ranks):
    plain = {name: [f"--parallel.dispatcher={name}"] for name in ("all_to_all", "all_gather", "deduplicated")}
    if ranks < 4:
        return plain
    return {**plain, "hierarchical": ["--parallel.dispatcher=hierarchical", f"--parallel.dispatch_inner={ranks // 2}"]}


def token_mib(output):
    """Of the lines that say what a step sent."""
    total = 0.0
    for group, amount, unit in re.findall(r"^  (\w+) +\w+ +([\d.]+) (\w+) in \d+ calls$", output, re.M):
        if group in TOKEN_GROUPS:
            total += float(amount) * UNITS[unit]
    return total


def run(program, arguments, folder):
    """One training: the seconds of its steps, its trace, and what a step sent."""
    trace = folder / "trace.json"
    command = [program, "train", *arguments, f"--run.folder={folder / 'run'}", "--trace", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()[-800:]}")
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line["step_seconds"] for line in map(json.loads, lines) if line.get("type") == "step"]
    return steps, json.loads(trace.read_text())["traceEvents"], token_mib(done.stdout)


def measure(program, name, options, folder):
    device, micro_batch, more = CASES[name]
    common = [f"--run.device={device}", "--ranks", str(options.ranks), f"--parallel.ep={options.ranks}", *more,
              f"--data.text={folder / 'text.txt'}", f"--data.cache={folder / 'tokens'}", f"--train.micro_batch={micro_batch}",
              f"--train.global_batch={4 * micro_batch * options.ranks}", f"--train.steps={options.steps}", "--train.validation_interval=0",
              "--data.validation_fraction=0", "--run.checkpoint_interval=0", "--run.resume=never", "--run.report=false",
              "--run.tensorboard=false", "--run.log_interval=1", *options.more]
    ways = dispatchers(options.ranks)
    found = {way: [] for way in ways}
    for turn in range(options.rounds):
        for way in ways if turn % 2 == 0 else reversed(ways):
            with tempfile.TemporaryDirectory(dir=folder) as own:
                steps, events, mib = run(program, [*common, *ways[way]], pathlib.Path(own))
            found[way].append((statistics.median(steps[2:]), mib, exposed_shares(events)[0]))
    return {way: dict(zip(("seconds", "mib", "exposed"), map(statistics.median, zip(*runs)))) for way, runs in found.items()}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("more", nargs="*", help="further options of `tessera train`, behind --")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="names, separated by commas; default: all of the device")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", help="also write the figures to a file")
    options = parser.parse_args()
    options.names = options.only.split(",") if options.only else [name for name, case in CASES.items() if case[0] == options.device]
    unknown = set(options.names) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if options.steps < 4:
        parser.error("--steps: at least 4, of which two are not counted")
    return options


def main():
    options = parse()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        write_text(folder / "text.txt")
        print(f"{'case':20} {'dispatcher':14} {'step':>10} {'tokens sent':>13}  exposed (% of a step)")
        for name in options.names:
            found[name] = measure(options.program, name, options, folder)
            for way, of in found[name].items():
                print(f"{name:20} {way:14} {1e3 * of['seconds']:7.1f} ms {of['mib']:9.1f} MiB  {100 * of['exposed']:.1f}", flush=True)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1), encoding="ascii")


if __name__ == "__main__":
    main()
