#!/usr/bin/env python3
"""What several local ranks cost over one: CPU seconds of a training step, and time to the first step.

The model is that of bench/step_bench (hidden 512, 8 layers, 8 experts, top-2), on random text, data
parallel with experts spread over the ranks (TP 1, EP = DP = ranks). Steps are timed by the difference
of a longer and a shorter run, so that starting and ending do not count. The time from launch to the
first step is taken with sequences of 16 tokens, whose step itself takes little.

  tools/measure_ranks.py build/tessera [--ranks 8] [--steps 3] [--repeat 3]
"""
import argparse
import os
import random
import statistics
import subprocess
import tempfile
import time

MODEL = ["--model.vocab_size=32768", "--model.hidden_size=512", "--model.num_layers=8",
         "--model.num_heads=8", "--moe.num_experts=8", "--moe.top_k=2", "--moe.inner_size=1024"]


def write_text(path):
    draw = random.Random(1)
    words = ["".join(draw.choice("abcdefghij") for _ in range(draw.randint(2, 9))) for _ in range(2000)]
    with open(path, "w", encoding="ascii") as file:
        file.write(" ".join(draw.choice(words) for _ in range(60000)))


def run(arguments, folder, steps):
    """Runs a training and returns its CPU seconds and the seconds to the end of its first step."""
    command = arguments + [f"--run.folder={folder}", f"--train.steps={steps}"]
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    first = None
    for line in process.stdout:
        if first is None and line.strip().startswith("1/"):
            first = time.monotonic() - start
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{' '.join(command)} failed with status {status}")
    return usage.ru_utime + usage.ru_stime, first


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        write_text(f"{scratch}/text.txt")
        common = [options.program, "train", *MODEL, f"--data.text={scratch}/text.txt",
                  f"--data.cache={scratch}/tokens", "--data.sequence_length=512",
                  "--train.micro_batch=1", f"--train.global_batch={options.ranks}",
                  "--train.validation_interval=0", "--data.validation_fraction=0",
                  "--run.save=false", "--run.report=false", "--run.tensorboard=false",
                  "--run.log_interval=1"]
        ranks = ["--ranks", str(options.ranks), f"--parallel.ep={options.ranks}"]
        names = {"1 rank": [], f"{options.ranks} ranks": ranks}
        seconds = {name: [] for name in names}
        firsts = {name: [] for name in names}
        launches = {name: [] for name in names}
        for round_idx in range(options.repeat):
            for name, extra in names.items():
                arguments = common + extra
                short, first = run(arguments, f"{scratch}/{name}-{round_idx}-short", 1)
                long, _ = run(arguments, f"{scratch}/{name}-{round_idx}-long", 1 + options.steps)
                seconds[name].append((long - short) / options.steps)
                firsts[name].append(first)
                small = arguments + ["--data.sequence_length=16"]
                launches[name].append(run(small, f"{scratch}/{name}-{round_idx}-small", 1)[1])
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        for name, median in medians.items():
            print(f"{name}: {median:.2f} CPU seconds a step, done with the first step after "
                  f"{statistics.median(firsts[name]):.1f} s, with one of 16 tokens a sequence after "
                  f"{statistics.median(launches[name]):.1f} s")
        one, many = medians.values()
        print(f"ratio {many / one:.2f}")


if __name__ == "__main__":
    main()
