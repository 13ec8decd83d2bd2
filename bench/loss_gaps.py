#!/usr/bin/env python3
"""Trains one model on a text in several ways and compares their validation losses.

  bench/loss_gaps.py FAMILY build/tessera --data.text=text.txt --train.steps=2000 [option of `tessera train`...]
                     [--seeds 2] [--jobs 1] [--only NAME,...] [--json FILE]

FAMILY is "state", ways of keeping gradients and the optimizer's state beside F32 state, or "precision", recipes of rounding what
products read beside BF16. Each way starts from the same seeds and sees the same tokens. Prints, by way, the mean validation loss at
the end, its gap to the first way with the standard error over the seeds, and the time of a step; for state also the bytes for an
element of a BF16 weight (scales and gradients apart). Ways that differ by single roundings ("remainder", "rounding elsewhere") show
what chance alone makes of a gap. Runs of different seeds may go on at a time (--jobs). docs/log.md says what was measured.
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
RECIPES = ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]
FAMILIES = {
    "state": {name: (str(size), [*BF16, *options]) for name, (size, options) in STATE.items()},
    "precision": {
        "bf16": ("", BF16),
        "f32": ("", ["--train.precision=f32"]),
        "rounding elsewhere": ("", [*BF16, "--optim.master=remainder"]),
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
    results = {}
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for name, (num_bytes, own_options) in ways.items():
            if arguments.only and name != first and name not in arguments.only.split(","):
                continue
            runs = [pool.submit(train_seed, arguments.program, [*options, *own_options], seed)
                    for seed in range(1, arguments.seeds + 1)]
            losses, seconds = zip(*(run.result() for run in runs))
            results[name] = {"bytes": num_bytes, "losses": losses, "step_seconds": statistics.median(seconds)}
            print_row(name, results[name], results[first]["losses"])
    return results


def print_row(name, result, plain):
    gaps = [100 * (loss / other - 1) for loss, other in zip(result["losses"], plain)]
    error = statistics.stdev(gaps) / len(gaps)**0.5 if len(gaps) > 1 else 0
    print(f"{name:28} {result['bytes']:>5} {statistics.mean(result['losses']):9.4f} {statistics.mean(gaps):+8.3f} % "
          f"+- {error:.3f} {1000 * result['step_seconds']:8.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("program")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only")
    parser.add_argument("--json")
    arguments, options = parser.parse_known_args()
    print(f"{arguments.family:28} {'bytes':>5} {'loss':>9} {'gap':>18} {'ms':>8}")
    try:
        results = measure(arguments, options)
    except RuntimeError as error:
        sys.exit(str(error))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
