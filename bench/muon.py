#!/usr/bin/env python3
"""Trains one model on a text with AdamW and with Muon, and compares how many steps each takes.

  bench/muon.py build/tessera --data.text=text.txt --train.steps=2000 --train.validation_interval=50 [option of `tessera train`...]
                [--seeds 3] [--rates 1e-3,2e-3,4e-3] [--muon-rates 4e-3,8e-3,16e-3] [--json FILE]

Each optimizer is run at each of its learning rates, with the same seeds and tokens. Prints, for each of them and each rate, the
mean validation loss at the end, its standard deviation over the seeds, and the median time of a step; then, for the best
rate of each, the first validated step at which Muon's loss is at or below AdamW's last, seed by seed: with less than
the whole of the steps Muon needs fewer for the same loss. The schedule is that of the whole run in both, so a run of as
many steps as Muon needs, whose learning rate would have come down by then, would end lower still. docs/log.md says what
was measured.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

OPTIMIZERS = ("adamw", "muon")


def train(program, options, folder):
    """The validation losses of a run, as pairs of step and loss, and the median time of its steps."""
    command = [program, "train", *options, f"--run.folder={folder}", "--run.checkpoint_interval=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [(record["step"], record["loss"]) for record in records if record["type"] == "validation"]
    seconds = [record["step_seconds"] for record in records if record["type"] == "step"]
    return losses, statistics.median(seconds)


def measure(arguments, options, optimizer, rate):
    curves, seconds = [], []
    for seed in range(1, arguments.seeds + 1):
        with tempfile.TemporaryDirectory(prefix="tessera-muon-") as folder:
            own = [f"--optim.name={optimizer}", f"--optim.learning_rate={rate}", f"--run.seed={seed}"]
            losses, step = train(arguments.program, [*options, *own], pathlib.Path(folder) / "run")
        curves.append(losses)
        seconds.append(step)
    last = [curve[-1][1] for curve in curves]
    deviation = statistics.stdev(last) if len(last) > 1 else 0
    result = {"optimizer": optimizer, "rate": rate, "loss": statistics.mean(last), "deviation": deviation,
              "curves": curves, "step_seconds": statistics.median(seconds)}
    print(f"{optimizer:8} {rate:>8} {result['loss']:9.4f} +- {deviation:.4f} {1000 * result['step_seconds']:9.2f}", flush=True)
    return result


def steps_to(curve, loss):
    return next((step for step, value in curve if value <= loss), None)


def compare(results):
    best = {name: min((r for r in results if r["optimizer"] == name), key=lambda r: r["loss"]) for name in OPTIMIZERS}
    for seed, (adamw, muon) in enumerate(zip(best["adamw"]["curves"], best["muon"]["curves"]), start=1):
        last_step, last_loss = adamw[-1]
        reached = steps_to(muon, last_loss)
        share = "never" if reached is None else f"step {reached}, {100 * reached / last_step:.0f} % of the steps"
        print(f"seed {seed}: AdamW ends at {last_loss:.4f} after step {last_step}; Muon is there at {share}, and ends at "
              f"{muon[-1][1]:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", default="1e-3,2e-3,4e-3")
    parser.add_argument("--muon-rates", default="4e-3,8e-3,16e-3")
    parser.add_argument("--json")
    arguments, options = parser.parse_known_args()
    print(f"{'':8} {'rate':>8} {'loss':>9} {'':9} {'ms':>9}")
    rates = {"adamw": arguments.rates, "muon": arguments.muon_rates}
    results = [measure(arguments, options, name, rate) for name in OPTIMIZERS for rate in rates[name].split(",")]
    compare(results)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
