#!/usr/bin/env python3
"""Trains one model on a text with each way of keeping gradients and the optimizer's state, and compares their validation losses.

  bench/state_formats.py build/tessera --data.text=text.txt --train.steps=2000 [option of `tessera train`...]
                         [--seeds 2] [--jobs 1] [--only NAME,...] [--json FILE]

Runs of different seeds may go on at a time (--jobs), on a GPU that has room for them. Each format starts from the same seeds and sees the same tokens as F32 state. Prints, by format, bytes of state for an
element of a BF16 weight (scales and gradients apart), the mean validation loss at the end, its gap to that of F32 state with the
standard error over the seeds, and the time of a step. "remainder" computes what F32 state does but for single roundings
of a last digit: its gap shows what chance alone makes of one. docs/log.md says what was measured.
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

# Name: bytes for an element beside a BF16 weight and its gradient, and the options.
FORMATS = {
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


def train(program, options, folder):
    """The validation losses of a run by step, and the median time of its steps."""
    command = [program, "train", *options, f"--run.folder={folder}", "--run.checkpoint_interval=0",
               "--train.precision=bf16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["type"] == "validation"]
    seconds = [record["step_seconds"] for record in records if record["type"] == "step"]
    return losses[-1], statistics.median(seconds)


def train_seed(program, options, seed):
    with tempfile.TemporaryDirectory(prefix="tessera-state-") as folder:
        return train(program, [*options, f"--run.seed={seed}"], pathlib.Path(folder) / "run")


def measure(arguments, options):
    results = {}
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for name, (num_bytes, format_options) in FORMATS.items():
            if arguments.only and name != "f32" and name not in arguments.only.split(","):
                continue
            runs = [pool.submit(train_seed, arguments.program, [*options, *format_options], seed)
                    for seed in range(1, arguments.seeds + 1)]
            losses, seconds = zip(*(run.result() for run in runs))
            results[name] = {"bytes": num_bytes, "losses": losses, "step_seconds": statistics.median(seconds)}
            print_row(name, results)
    return results


def print_row(name, results):
    result, plain = results[name], results["f32"]
    gaps = [100 * (loss / other - 1) for loss, other in zip(result["losses"], plain["losses"])]
    error = statistics.stdev(gaps) / len(gaps)**0.5 if len(gaps) > 1 else 0
    print(f"{name:28} {result['bytes']:5d} {statistics.mean(result['losses']):9.4f} {statistics.mean(gaps):+8.3f} % "
          f"+- {error:.3f} {1000 * result['step_seconds']:8.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only")
    parser.add_argument("--json")
    arguments, options = parser.parse_known_args()
    print(f"{'state':28} {'bytes':>5} {'loss':>9} {'gap to f32':>18} {'ms':>8}")
    try:
        results = measure(arguments, options)
    except RuntimeError as error:
        sys.exit(str(error))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
