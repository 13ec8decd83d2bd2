#!/usr/bin/env python3
"""Times training steps with and without offloaded activations, alternately, and prints time and memory of each.

  bench/offload.py build/tessera [--case qwen3-8-layers-gpu] [--offload all,...] [--rate 50] [--rounds 3] [--json FILE] [--list]

Each variant of --offload is one value of train.offload, its entries joined by "+" ("all@0-3", "expert_pre+attn_out"). A time above 1
means that the variant is slower than keeping everything. GPU cases need a Hopper GPU. See docs/train.md.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

# Name: whether it needs a GPU, the options of `tessera bench`, and variants of train.offload.
CASES = {
    "qwen3-8-layers-gpu": (True, ["--model.preset=qwen3-30b-a3b", "--model.vocab_size=32768", "--model.num_layers=8",
                                  "--data.sequence_length=4096", "--train.precision=bf16", "--train.micro_batch=4",
                                  "--train.global_batch=16"], "all,all@0-3"),
    "mixtral-2-layers-gpu": (True, ["--model.preset=mixtral-8x7b", "--model.vocab_size=32768", "--model.num_layers=2",
                                    "--data.sequence_length=4096", "--train.precision=bf16", "--train.micro_batch=4",
                                    "--train.global_batch=16"], "all"),
    "tiny-cpu": (False, ["--model.preset=tiny", "--model.vocab_size=256", "--model.num_layers=8",
                         "--data.sequence_length=64"], "all,all@0-3"),
}


def bench(program, gpu, arguments, more):
    """What `tessera bench --json` says of one run."""
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    command = [program, "bench", "--json", f"--run.device={'cuda' if gpu else 'cpu'}", *arguments, *more]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()[-600:]}")
    return json.loads(done.stdout)


def options_of(variant, rate):
    if not variant:
        return []
    return [f"--train.offload={json.dumps(variant.split('+'))}", f"--train.offload_rate={rate}"]


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", default="build/tessera")
    parser.add_argument("--case", default="qwen3-8-layers-gpu")
    parser.add_argument("--offload", help="variants, separated by commas; default: those of the case")
    parser.add_argument("--rate", default="50", help="train.offload_rate, GB/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def main():
    options = parse()
    if options.list:
        print("\n".join(CASES))
        return
    if options.case not in CASES:
        sys.exit(f"offload: unknown case {options.case}, see --list")
    gpu, arguments, variants = CASES[options.case]
    names = ["", *(options.offload or variants).split(",")]
    results = {name: [] for name in names}
    for turn in range(options.rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            results[name].append(bench(options.program, gpu, arguments, options_of(name, options.rate)))
    medians = {name: statistics.median(run["median_seconds"] for run in runs) for name, runs in results.items()}
    gibibyte = 2**30
    print(f"{'train.offload':20} {'ms a step':>10} {'ratio':>7} {'device GiB':>11} {'predicted':>10} {'saved':>8} {'on the host':>12}")
    for name, runs in results.items():
        last = runs[-1]
        print(f"{name or 'nothing':20} {medians[name] * 1e3:10.2f} {medians[name] / medians['']:7.4f}"
              f" {last['memory_used'] / gibibyte:11.3f} {last['memory_predicted'] / gibibyte:10.3f}"
              f" {last['saved_bytes'] / gibibyte:8.3f} {last['offloaded_bytes'] / gibibyte:12.3f}", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


main()
