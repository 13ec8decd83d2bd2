#!/usr/bin/env python3
"""What saves cost a training: runs without saves and with one every few steps, written in the background or waited for,
one run of each kind after the other. Prints the median step times' ratio, and how long training waited for a save.

    tools/measure_saves.py build/tessera text.txt --steps 60 --every 10 --rounds 3 -- --model.hidden_size=256
"""
import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

KINDS = ("none", "background", "waiting")


def options_of(kind, every):
    if kind == "none":
        return ["--run.checkpoint_interval=0"]
    return [f"--run.checkpoint_interval={every}", f"--run.background_save={str(kind == 'background').lower()}"]


def run(options, kind, folder):
    """Mean seconds of a step after the first, and how long training waited for each save."""
    command = [options.program, "train", f"--data.text={options.text}", f"--run.folder={os.path.join(folder, kind)}",
               f"--train.steps={options.steps}", "--run.log_interval=1", "--train.validation_interval=0",
               "--run.report=false", "--run.tensorboard=false", *options_of(kind, options.every), *options.more]
    times, waits = [], []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if re.match(rf" *\d+/{options.steps} ", line):
                times.append(time.monotonic())
            found = re.search(r"training waited ([0-9.e+-]+) s\)", line)
            if found:
                waits.append(float(found.group(1)))
    if process.returncode != 0:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}")
    return (times[-1] - times[0]) / (len(times) - 1), waits


def main():
    parser = argparse.ArgumentParser(description=__doc__, epilog="After --: options of train.", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("text")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    own, more = sys.argv[1:], []
    if "--" in own:
        own, more = own[:own.index("--")], own[own.index("--") + 1:]
    options = parser.parse_args(own)
    options.more = more
    seconds, waits = {kind: [] for kind in KINDS}, []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for kind in KINDS:
                mean, waited = run(options, kind, folder)
                seconds[kind].append(mean)
                waits += waited
    base = statistics.median(seconds["none"])
    for kind in KINDS:
        mean = statistics.median(seconds[kind])
        print(f"{kind:10}  {mean * 1e3:9.2f} ms a step  {100 * (mean / base - 1):+.2f} %")
    if waits:
        print(f"training waited {statistics.median(waits) * 1e3:.2f} ms for a save in the background (median), "
              f"{max(waits) * 1e3:.2f} ms at most")


if __name__ == "__main__":
    main()
