#!/usr/bin/env python3
"""What saves cost a training: runs without saves and with one every few steps, one run of each kind after the other in each round.

  bench/saves.py build/tessera text.txt [--steps 60] [--every 10] [--rounds 3] [--kinds none,background,waiting,peers] [--ranks N]
      [--json] [-- --model.hidden_size=256 ...]

Kinds: none; background, written while training goes on; waiting (run.background_save = false), streamed to the disk while it waits; peers,
without saves but with copies in the ranks' memory (checkpoint.peer_copy, two ranks and more). A step's time is the mean from the first
line of a step behind --skip steps to the last one, saves included; figures are the medians of the rounds. Below the table stands what the
runs themselves tell: how long training waited for saves, the bytes and rate of writing, and notes of what limits. What is limited by the
disk shows in 'background' as it does in 'waiting'. See docs/train.md.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

KINDS = ("none", "background", "waiting", "peers")


def options_of(kind, every):
    if kind in ("none", "peers"):
        peers = ["--checkpoint.peer_copy=true", f"--checkpoint.peer_interval={every}"] if kind == "peers" else []
        return ["--run.checkpoint_interval=0", *peers]
    return [f"--run.checkpoint_interval={every}", f"--run.background_save={str(kind == 'background').lower()}"]


def folder_bytes(folder):
    return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names)


def run(options, kind, folder):
    """Mean seconds of a step, what each save says of itself, and the notes of one run."""
    target = os.path.join(folder, kind)
    command = [options.program, "train", f"--data.text={options.text}", f"--run.folder={target}", f"--train.steps={options.steps}",
               "--run.log_interval=1", "--train.validation_interval=0", "--run.report=false", "--run.tensorboard=false",
               "--run.keep_last=1", *options_of(kind, options.every), *options.more]
    if options.ranks > 1:
        command += ["--ranks", str(options.ranks)]
    times, saves, notes = [], [], []
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            if step := re.match(rf" *(\d+)/{options.steps} ", line):
                if int(step.group(1)) > options.skip:
                    times.append(time.monotonic())
            elif found := re.search(r"written in ([0-9.e+-]+) s(?: while training waited|; training waited ([0-9.e+-]+) s)\)", line):
                saves.append({"written": float(found.group(1)), "waited": float(found.group(2) or found.group(1))})
            elif line.startswith(("note:", "warning:", "the state after")):
                notes.append(line.strip())
    if process.returncode != 0:
        sys.exit(f"exit code {process.returncode}: {' '.join(command)}")
    newest = [os.path.join(target, "checkpoints", name) for name in os.listdir(os.path.join(target, "checkpoints"))
              if name.startswith("step-")]
    size = folder_bytes(newest[0]) if newest else 0
    return {"seconds": (times[-1] - times[0]) / (len(times) - 1), "saves": saves, "bytes": size, "notes": notes}


def measure(options):
    runs = {kind: [] for kind in options.kinds}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            for kind in options.kinds:
                runs[kind].append(run(options, kind, folder))
    return {kind: summary(of_kind) for kind, of_kind in runs.items()}


def summary(runs):
    saves = [save for one in runs for save in one["saves"]]
    result = {"step_ms": 1e3 * statistics.median(one["seconds"] for one in runs), "bytes": runs[-1]["bytes"],
              "notes": sorted({note for one in runs for note in one["notes"]})}
    if saves:
        written = statistics.median(save["written"] for save in saves)
        result |= {"written_s": written, "rate_mib": runs[-1]["bytes"] / 2**20 / max(written, 1e-9),
                   "waited_s": statistics.median(save["waited"] for save in saves),
                   "most_waited_s": max(save["waited"] for save in saves)}
    return result


def show(results):
    base = results["none"]["step_ms"] if "none" in results else None
    for kind, result in results.items():
        cost = f"  {100 * (result['step_ms'] / base - 1):+7.2f} %" if base else ""
        print(f"{kind:10}  {result['step_ms']:10.2f} ms a step{cost}")
    for kind, result in results.items():
        if "written_s" in result:
            print(f"{kind}: {result['bytes'] / 2**20:.1f} MiB written in {result['written_s']:.3g} s, {result['rate_mib']:.0f} MiB/s; "
                  f"training waited {1e3 * result['waited_s']:.2f} ms for a save, {1e3 * result['most_waited_s']:.2f} ms at most")
        for note in result["notes"]:
            print(f"{kind}: {note}")


def parse(own):
    parser = argparse.ArgumentParser(description=__doc__, epilog="After --: options of train.",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("text")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--skip", type=int, default=1, help="first steps that do not count")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kinds", default="none,background,waiting", help="of " + ", ".join(KINDS))
    parser.add_argument("--folder", help="where checkpoints go; default: the system's temporary folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(own)
    options.kinds = options.kinds.split(",")
    if unknown := [kind for kind in options.kinds if kind not in KINDS]:
        parser.error(f"no kinds: {', '.join(unknown)}")
    if "peers" in options.kinds and options.ranks < 2:
        parser.error("peers needs --ranks 2 or more")
    return options


def main():
    own, more = sys.argv[1:], []
    if "--" in own:
        own, more = own[:own.index("--")], own[own.index("--") + 1:]
    options = parse(own)
    options.more = more
    results = measure(options)
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        show(results)


if __name__ == "__main__":
    main()
