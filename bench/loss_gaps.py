#!/usr/bin/env python3
"""Trains one model on a text in several ways and compares their validation losses.

  bench/loss_gaps.py FAMILY build/tessera --data.text=text.txt --train.steps=2000 [option of `tessera train`...]
                     [--seeds 2] [--first-seed 1] [--jobs 1] [--only NAME,...] [--json FILE]

FAMILY is "state", ways of keeping gradients and the optimizer's state beside F32 state, or "precision", recipes of rounding what
products read beside BF16. Each way starts from the same seeds and sees the same tokens. Prints, by way, the mean validation loss at
the end, its gap to the first way with the standard error over the seeds, and the time of a step; for state also the bytes for an
element of a BF16 weight (scales and gradients apart). Ways that differ by single roundings ("remainder", "rounding elsewhere") show
what chance alone makes of a gap. Runs go on at a time (--jobs), all ways of the first seed before those of the second; then steps take
longer. The first run has the text to itself, to make tokens of it. --json is written after every run, so that it also has the results of
a measurement that is stopped; --first-seed goes on where it was. docs/log.md, docs/evidence/precision.md and docs/evidence/state.md say
what was measured.
"""
import argparse
import concurrent.futures
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile


def moments(first, second):
    return [f"--optim.first_moment={first}", f"--optim.second_moment={second}"]


NARROW = moments("bf16", "bf16")
GRADIENTS = ["--optim.gradients=bf16"]
BF16 = ["--train.precision=bf16"]

# Name: bytes for an element beside a BF16 weight and its gradient, and the options.
STATE = {
    "f32": (12, []),
    "first moment": (10, NARROW[:1]),
    "moments": (8, NARROW),
    "remainder": (10, ["--optim.master=remainder"]),
    "moments+remainder": (6, [*NARROW, "--optim.master=remainder"]),
    "moments+none": (4, [*NARROW, "--optim.master=none"]),
    "fp8": (6, moments("fp8", "fp8")),
    "fp8+remainder8": (3, [*moments("fp8", "fp8"), "--optim.master=remainder8"]),
    "fp8+none": (2, [*moments("fp8", "fp8"), "--optim.master=none"]),
    "remainder8": (9, ["--optim.master=remainder8"]),
    "f16": (8, moments("f16", "f16")),
    "gradients": (12, GRADIENTS),
    "gradients+moments+remainder": (6, [*GRADIENTS, *NARROW, "--optim.master=remainder"]),
}
RECIPES = ["rowwise", "blockwise", "tensorwise", "tensorwise_delayed", "mxfp8", "nvfp4"]
BF16_GRADIENTS = {f"{recipe}+bf16 gradients": ["--precision.weight_gradients=false", f"--precision.recipe={recipe}"]
                  for recipe in ("rowwise", "blockwise")}
FAMILIES = {
    "state": {name: (str(size), [*BF16, *options]) for name, (size, options) in STATE.items()},
    "precision": {
        "bf16": ("", BF16),
        "f32": ("", ["--train.precision=f32"]),
        "fp16": ("", ["--train.precision=fp16"]),
        "fp16 unscaled": ("", ["--train.precision=fp16", "--precision.loss_scale=1"]),
        "rounding elsewhere": ("", [*BF16, "--optim.master=remainder"]),
        **{name: ("", ["--train.precision=fp8", *options]) for name, options in BF16_GRADIENTS.items()},
        **{recipe: ("", ["--train.precision=fp8", f"--precision.recipe={recipe}"]) for recipe in RECIPES},
    },
}


def train(program, options, folder):
    """The validation losses of a run by step, and the median time of its steps."""
    command = [program, "train", *options, f"--run.folder={folder}", "--run.checkpoint_interval=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["type"] == "validation"]
    seconds = [record["step_seconds"] for record in records if record["type"] == "step"]
    return losses[-1], statistics.median(seconds)


def train_seed(program, options, seed):
    with tempfile.TemporaryDirectory(prefix="tessera-losses-") as folder:
        return train(program, [*options, f"--run.seed={seed}"], pathlib.Path(folder) / "run")


def measure(arguments, options):
    ways = FAMILIES[arguments.family]
    first = next(iter(ways))
    chosen = [name for name in ways if not arguments.only or name == first or name in arguments.only.split(",")]
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    results = {name: {"bytes": ways[name][0], "losses": {}, "step_seconds": []} for name in chosen}
    runs = [(name, seed) for seed in seeds for name in chosen]

    def run(name, seed):
        try:
            loss, step_seconds = train_seed(arguments.program, [*options, *ways[name][1]], seed)
        except RuntimeError as error:
            print(f"{name}, seed {seed}: {error}", file=sys.stderr, flush=True)
            return
        results[name]["losses"][seed] = loss
        results[name]["step_seconds"].append(step_seconds)
        if arguments.json:
            pathlib.Path(arguments.json).write_text(json.dumps(results, indent=1))

    run(*runs[0])
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for done in [pool.submit(run, *which) for which in runs[1:]]:
            done.result()
    for name in chosen:
        print_row(name, results[name], results[first]["losses"])
    return all(len(result["losses"]) == len(seeds) for result in results.values())


def print_row(name, result, plain):
    losses = result["losses"]
    gaps = [100 * (losses[seed] / plain[seed] - 1) for seed in sorted(losses) if seed in plain]
    if not gaps:
        print(f"{name:28} failed")
        return
    error = statistics.stdev(gaps) / len(gaps)**0.5 if len(gaps) > 1 else 0
    print(f"{name:28} {result['bytes']:>5} {statistics.mean(losses.values()):9.4f} {statistics.mean(gaps):+8.3f} % "
          f"+- {error:.3f} {1000 * statistics.median(result['step_seconds']):8.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("program")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only")
    parser.add_argument("--json")
    arguments, options = parser.parse_known_args()
    print(f"{arguments.family:28} {'bytes':>5} {'loss':>9} {'gap':>18} {'ms':>8}")
    return 0 if measure(arguments, options) else 1


if __name__ == "__main__":
    sys.exit(main())
