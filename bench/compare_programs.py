#!/usr/bin/env python3
"""Times two builds of the program alternately in one run and prints the ratio of their medians.

  bench/compare_programs.py BEFORE/tessera build/tessera [--only laptop-cpu,...] [--rounds 3] [--list] [--json FILE]

Each round runs `tessera bench` of the one and then of the other build, so that a clock that drifts meets both. A ratio above
1 means that the second build is faster. GPU cases need a Hopper GPU and are named so. See docs/gpu.md for what bench prints.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

QWEN3 = ["--model.preset=qwen3-30b-a3b", "--model.vocab_size=32768", "--data.sequence_length=4096",
         "--train.precision=bf16"]
STEP = ["--train.micro_batch=4", "--train.global_batch=16"]
LAYER = ["--layer=moe", "--train.micro_batch=8"]
LAPTOP = ["--model.preset=laptop", "--model.vocab_size=8192"]
WORKSTATION = ["--model.preset=workstation", "--data.sequence_length=512", "--train.micro_batch=16",
               "--train.global_batch=16", "--steps", "3", "--warmup", "1", "--steps-only"]

# Name: whether it needs a GPU, and the options of `tessera bench`.
CASES = {
    "qwen3-8-layers-gpu": (True, [*QWEN3, *STEP, "--model.num_layers=8"]),
    "mixtral-2-layers-gpu": (True, ["--model.preset=mixtral-8x7b", *QWEN3[1:], *STEP, "--model.num_layers=2"]),
    "fine-grained-layer-gpu": (True, [*QWEN3, *LAYER, "--model.hidden_size=1536", "--moe.inner_size=256"]),
    "qwen3-layer-gpu": (True, [*QWEN3, *LAYER]),
    "laptop-gpu": (True, [*LAPTOP, "--train.precision=bf16", "--steps", "20"]),
    "laptop-cpu": (False, LAPTOP),
    "laptop-cpu-bf16": (False, [*LAPTOP, "--train.precision=bf16"]),
    "workstation-cpu": (False, WORKSTATION),
    "workstation-cpu-bf16": (False, [*WORKSTATION, "--train.precision=bf16"]),
    "tiny-cpu": (False, ["--model.preset=tiny", "--model.vocab_size=256", "--data.sequence_length=64", "--steps", "50"]),
    "moe-layer-cpu": (False, ["--layer=moe", *LAPTOP]),
}


def seconds(program, gpu, arguments):
    """The median of what one run of `tessera bench` times: a step, or a layer forward and backward."""
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    command = [program, "bench", "--json", f"--run.device={'cuda' if gpu else 'cpu'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()[-400:]}")
    found = json.loads(done.stdout)
    return found["median_seconds"] if "median_seconds" in found else sum(
        found[half]["median_seconds"] for half in ("forward", "backward"))


def compare(before, after, gpu, arguments, rounds):
    times = {before: [], after: []}
    for turn in range(rounds):
        for program in (before, after) if turn % 2 == 0 else (after, before):
            times[program].append(seconds(program, gpu, arguments))
    return times[before], times[after]


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?")
    parser.add_argument("after", nargs="?")
    parser.add_argument("--only", default="", help="names, separated by commas; default: all that the device has")
    parser.add_argument("--gpu", action="store_true", help="the cases of a GPU rather than those of the CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for all times")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def main():
    options = parse()
    names = [name for name in options.only.split(",") if name] or [
        name for name, (gpu, _) in CASES.items() if gpu == options.gpu]
    if options.list:
        print("\n".join(CASES))
        return
    unknown = [name for name in names if name not in CASES]
    if unknown or not options.after:
        sys.exit(f"compare_programs: unknown case {unknown[0]}, see --list" if unknown else
                 "compare_programs: name two programs")
    results = {}
    for name in names:
        gpu, arguments = CASES[name]
        before, after = compare(options.before, options.after, gpu, arguments, options.rounds)
        ratio = statistics.median(before) / statistics.median(after)
        results[name] = {"before": before, "after": after, "ratio": ratio}
        print(f"{name:24} {statistics.median(before) * 1e3:10.2f} ms {statistics.median(after) * 1e3:10.2f} ms"
              f"   {ratio:.3f}", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


main()
