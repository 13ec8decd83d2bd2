#!/usr/bin/env python3
"""Kills or stops one rank of a training on GPUs and checks how the others end.

Two ranks train a small model with a GPU each. Some time after a save one of them gets SIGKILL, or SIGSTOP,
which leaves it silent. The run must end with an exit code other than 0 within the limit, the other rank must
say once what it waited for, or, where mpirun ends it before it can, mpirun or the program must say that a rank was killed; no rank's
process and no shared memory may outlive the run, and the same command must go on from the last checkpoint. Rounds take layouts in turn: experts exchanged in every way, sequences that are shared, full sharding, stages.

  tools/kill_gpu_rank.py build/tessera [--device cuda] [--seconds 30] [--signals KILL STOP] [--rounds 5] [--at-once 1]
      [--continue-every 1] [--seed 1]

With --device cpu the same is checked without GPUs. Needs mpirun. The exit code is 0 only where all is
well.
"""
import argparse
import collections
import concurrent.futures
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time

MESSAGE = re.compile(r"tessera: rank (\d+) waited [0-9.]+ s for \w+ -?\d+ of group \"[\w.]+\" .*")

LAUNCHER = re.compile(r"mpirun noticed that process rank \d .* exited on signal 9|tessera: a rank was ended by signal 9")

# What the ranks do beside computing.
LAYOUTS = {
    "experts": ["--parallel.ep=2"],
    "experts, direct": ["--parallel.ep=2", "--parallel.exchange=direct"],
    "experts, once a rank": ["--parallel.ep=2", "--parallel.exchange=direct", "--parallel.dispatcher=deduplicated"],
    "sequences": ["--parallel.cp=2", "--parallel.ep=2"],
    "full sharding": ["--optim.shard=full"],
    "stages": ["--parallel.pp=2"],
    "weights": ["--parallel.tp=2", "--parallel.etp=2"],
}
# Between processors there is no direct exchange.
ON_CPU = {"--parallel.exchange=direct": "--parallel.exchange=bounded"}


def write_text(path):
    with open(path, "w", encoding="ascii") as file:
        file.write("\n".join(f"line {i} says that {i} and {i + 1} make {2 * i + 1}." for i in range(3000)))


def find_ranks(folder):
    """Process ids of the ranks whose command line names the folder, by rank."""
    ranks = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
                if folder not in file.read():
                    continue
            with open(f"/proc/{pid}/environ", encoding="utf-8", errors="replace") as file:
                rank = re.search(r"OMPI_COMM_WORLD_RANK=(\d+)", file.read())
        except OSError:
            continue  # ended meanwhile, or another user's
        if rank:
            ranks[int(rank.group(1))] = int(pid)
    return ranks


class Run:
    """A training whose lines of output are counted as they come."""

    def __init__(self, command):
        self.lines = []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait_for(self, pattern, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            if any(re.search(pattern, line) for line in self.lines):
                return True
            time.sleep(0.05)
        return False

    def end(self, seconds):
        """The exit code; None where the run goes on."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None
        self.reader.join(5)
        return code


def strike(command, folder, name, limit, struck, delay):
    """Lets rank `struck` be struck `delay` seconds after a save; what went wrong, the seconds until the run had ended, and what was said."""
    run = Run(command)
    if not run.wait_for(r"^saved ", 90):
        run.end(0)
        return [f"no checkpoint was saved: {run.lines[-5:]}"], 0, []
    time.sleep(delay)
    ranks = find_ranks(folder)
    if sorted(ranks) != [0, 1]:
        run.end(0)
        return [f"expected ranks 0 and 1, found {sorted(ranks)}"], 0, []
    begin = time.monotonic()
    os.kill(ranks[struck], getattr(signal, f"SIG{name}"))
    code = run.end(limit)
    took = time.monotonic() - begin
    wrong = []
    if code is None:
        wrong.append(f"the run went on for {limit} s")
    elif code == 0:
        wrong.append("the run's exit code is 0")
    told = [line for line in run.lines if (found := MESSAGE.search(line)) and int(found.group(1)) != struck]
    told = told or [line for line in run.lines if LAUNCHER.search(line)]
    if len(told) != 1:
        said = told or [line for line in run.lines if not re.match(r" *\d+/", line)][-15:]
        wrong.append(f"rank {1 - struck} was to say once what it waited for, but:\n    " + "\n    ".join(said))
    left = find_ranks(folder)
    if left:
        wrong.append(f"ranks outlive the run: {left}")
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
    return wrong, took, told


def go_on(command, folder):
    """What goes wrong where the same command is given again, for a few steps more."""
    newest = sorted(os.listdir(f"{folder}/checkpoints"))[-1]
    step = int(re.search(r"(\d+)$", newest).group(1))
    run = Run([*command, f"--train.steps={step + 3}"])
    code = run.end(90)
    wrong = [] if code == 0 else [f"it does not go on, exit code {code}: {run.lines[-5:]}"]
    if not any(re.search(rf"continuing after step {step} ", line) for line in run.lines):
        wrong.append(f"it does not go on after step {step}")
    return wrong


def list_shared_memory():
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def find_mapped(names):
    """Those that a living process still uses, as another's programs may."""
    mapped = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            continue
        mapped |= {name for name in names if f"/dev/shm/{name}" in text}
    return mapped


def check(options, turn, name):
    """One run that loses a rank: what went wrong, and lines that say how it went."""
    draw = random.Random(f"{options.seed} {turn} {name}")
    layout, more = list(LAYOUTS.items())[turn % len(LAYOUTS)]
    if options.device == "cpu":
        more = [ON_CPU.get(option, option) for option in more]
    with tempfile.TemporaryDirectory() as scratch:
        write_text(f"{scratch}/text.txt")
        folder = f"{scratch}/run"
        command = [options.program, "train", "--ranks", "2", f"--run.device={options.device}",
                   f"--data.text={scratch}/text.txt", f"--data.cache={scratch}/tokens",
                   f"--run.folder={folder}", "--model.num_layers=2", "--model.hidden_size=128",
                   "--data.sequence_length=128", "--train.micro_batch=2", "--train.global_batch=4",
                   "--optim.schedule=constant", "--train.steps=100000",
                   "--train.validation_interval=0", "--run.checkpoint_interval=20",
                   "--run.log_interval=1", "--run.comm_timeout=10", *more]
        struck = draw.randrange(2)
        wrong, took, told = strike(command, folder, name, options.seconds, struck, draw.uniform(0.05, 0.6))
        if not wrong and turn % options.continue_every == 0:
            wrong = go_on(command, folder)
    head = f"SIG{name} to rank {struck}, {layout}: ended after {took:.1f} s"
    return wrong, [head, *(f"  {line}" for line in told), *(f"  FAILED: {text}" for text in wrong)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=30, help="in which the others must end")
    parser.add_argument("--signals", nargs="+", default=["KILL", "STOP"])
    parser.add_argument("--rounds", type=int, default=5, help="of each signal, each with the next layout")
    parser.add_argument("--at-once", type=int, default=1, help="runs beside one another, which share the GPUs")
    parser.add_argument("--continue-every", type=int, default=1, metavar="N", help="let runs go on in every Nth round alone")
    parser.add_argument("--seed", type=int, default=1, help="of the moments, and of which rank is struck")
    options = parser.parse_args()
    if shutil.which("mpirun") is None:
        raise SystemExit("kill_gpu_rank: mpirun is needed to start the ranks")
    before = list_shared_memory()
    ended = collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        checks = [pool.submit(check, options, turn, name)
                  for turn, name in itertools.product(range(options.rounds), options.signals)]
        for done in concurrent.futures.as_completed(checks):
            wrong, lines = done.result()
            ended["failed" if wrong else "well"] += 1
            print("\n".join(lines), flush=True)
    left = list_shared_memory() - before
    left -= find_mapped(left)
    if left:
        print(f"FAILED: shared memory outlives the runs: {sorted(left)[:5]}")
    print(f"{ended['well']} runs that lost a rank ended as they should, {ended['failed']} did not")
    raise SystemExit(1 if left or ended["failed"] else 0)


if __name__ == "__main__":
    main()
