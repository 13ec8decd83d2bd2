#!/usr/bin/env python3
"""Times training with merged passes beside the same training with passes one behind the other, alternately in one run.

  bench/schedules.py build/tessera [--device cpu|cuda] [--ranks 2] [--only NAME,...] [--rounds 3] [--steps 8] [--json FILE]

For each case and schedule: the median step, the ratio as built / merged (above 1: merging is faster), and the time of
exchanges that nothing hides, from the program's own trace: of the exchanges of experts' tokens, or of all, the time in which
their rank computes nothing, as a share of the traced steps.
"""
import argparse
import array
import json
import os
import pathlib
import random
import statistics
import struct
import subprocess
import sys
import tempfile

QWEN3 = ["--model.preset=qwen3-30b-a3b", "--model.vocab_size=4096", "--data.sequence_length=4096", "--train.precision=bf16"]
SMALL = ["--model.vocab_size=1024", "--model.hidden_size=256", "--model.num_layers=4", "--model.num_heads=8",
         "--moe.num_experts=8", "--moe.top_k=2", "--moe.inner_size=512", "--data.sequence_length=256"]


# Name: device, degrees, (sequences of a micro-batch, micro-batches of a step), and other options of `tessera train`.
CASES = {
    "qwen3-4-layers-ep": ("cuda", {"ep": "all"}, (2, 6), [*QWEN3, "--model.num_layers=4"]),
    "qwen3-4-layers-ep-micro-batch-1": ("cuda", {"ep": "all"}, (1, 8), [*QWEN3, "--model.num_layers=4"]),
    "fine-grained-ep": ("cuda", {"ep": "all"}, (2, 6), [
        *QWEN3, "--model.num_layers=4", "--model.hidden_size=1536", "--moe.inner_size=256"]),
    "qwen3-4-layers-pp": ("cuda", {"pp": 2}, (1, 8), [*QWEN3, "--model.num_layers=4"]),
    "small-ep": ("cpu", {"ep": "all"}, (1, 8), SMALL),
    "small-pp-ep": ("cpu", {"pp": 2, "ep": "rest"}, (1, 8), SMALL),
}
SCHEDULES = ("as_built", "merged")
# The groups in which experts' tokens are exchanged: along EP, or ETP and EP at once; hierarchically between nodes and within.
TOKEN_GROUPS = ("ep", "etp", "experts", "ep_nodes", "ep_inner", "experts_inner")


def write_tokens(prefix, count=2_000_000, vocabulary=1024):
    """A token file (Megatron's PREFIX.bin and PREFIX.idx) of one document. As in `tessera bench` tokens are random: text of few letters
    would leave half of many experts without rows."""
    unsigned_16 = 8  # the format's code
    draw = random.Random(1)
    tokens = array.array("H", (draw.randrange(vocabulary) for _ in range(count)))
    pathlib.Path(f"{prefix}.bin").write_bytes(tokens.tobytes())
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, unsigned_16, 1, 2)
    pathlib.Path(f"{prefix}.idx").write_bytes(head + struct.pack("<iqqq", count, 0, 0, 1))


def degrees(asked, ranks):
    """The keys of a layout, and the ranks that share the batch."""
    pp = asked.get("pp", 1)
    keys = [f"--parallel.pp={pp}"]
    if "ep" in asked:
        keys.append(f"--parallel.ep={ranks // pp}")
    return keys, ranks // pp


def environment():
    """OMP_NUM_THREADS is the caller's affair."""
    return {"OMP_WAIT_POLICY": "passive", **os.environ}


def run(program, arguments, folder):
    """One training: the seconds of its steps, its trace, and what it printed."""
    trace = folder / "trace.json"
    command = [program, "train", *arguments, f"--run.folder={folder / 'run'}", "--trace", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()[-800:]}")
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line["step_seconds"] for line in map(json.loads, lines) if line.get("type") == "step"]
    return steps, json.loads(trace.read_text())["traceEvents"], done.stdout


def covered(spans):
    """Disjoint spans with the same union, in order."""
    result = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1][1] = max(result[-1][1], end)
        else:
            result.append([begin, end])
    return result


def length(spans):
    return sum(end - begin for begin, end in spans)


def outside(spans, others):
    """The length of what is in `spans` and not in `others`, both disjoint and in order."""
    both = 0
    first = 0
    for begin, end in spans:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        at = first
        while at < len(others) and others[at][0] < end:
            both += min(end, others[at][1]) - max(begin, others[at][0])
            at += 1
    return length(spans) - both


def exposed_shares(events):
    """Of the traced steps' time, all ranks together: (exchanges of experts' tokens, all exchanges) that nothing hides."""
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans = {}
    for event in events:
        if event["ph"] != "X":
            continue
        row = rows[event["pid"], event["tid"]]
        if row == "tasks" or (row == "computation" and event["name"].startswith("wait")):
            continue
        kind = row if row in ("steps", "computation") else "tokens" if row.split()[0] in TOKEN_GROUPS else "other"
        spans.setdefault((event["pid"], kind), []).append((event["ts"], event["ts"] + event["dur"]))
    ranks = {rank for rank, _ in spans}
    of = {key: covered(found) for key, found in spans.items()}
    total = sum(length(of[rank, "steps"]) for rank in ranks)
    tokens = everything = 0
    for rank in ranks:
        computing = of[rank, "computation"]
        mine = of.get((rank, "tokens"), [])
        tokens += outside(mine, computing)
        everything += outside(covered([tuple(span) for span in mine + of.get((rank, "other"), [])]), computing)
    return tokens / total, everything / total


def train_arguments(options, folder, device, micro_batch, global_batch):
    """Of a training that is only to be timed."""
    return [f"--run.device={device}", "--ranks", str(options.ranks), f"--data.tokens={folder / 'tokens'}",
            f"--train.micro_batch={micro_batch}", f"--train.global_batch={global_batch}", f"--train.steps={options.steps}",
            "--train.validation_interval=0", "--data.validation_fraction=0", "--run.save=false", "--run.resume=never",
            "--run.report=false", "--run.tensorboard=false", "--run.log_interval=1"]


def in_turns(ways, rounds):
    """Each of the ways once a round, every other round backwards."""
    for turn in range(rounds):
        yield from ways if turn % 2 == 0 else list(reversed(ways))


def measure(program, name, options, folder):
    device, asked, (micro_batch, micro_batches), more = CASES[name]
    layout, sharing = degrees(asked, options.ranks)
    common = [*train_arguments(options, folder, device, micro_batch, micro_batch * micro_batches * sharing), *layout, *more, *options.more]
    seconds = {schedule: [] for schedule in SCHEDULES}
    shares = {schedule: [] for schedule in SCHEDULES}
    for schedule in in_turns(SCHEDULES, options.rounds):
        with tempfile.TemporaryDirectory(dir=folder) as own:
            steps, events, _ = run(program, [*common, f"--train.schedule={schedule}"], pathlib.Path(own))
        seconds[schedule].append(statistics.median(steps[2:]))
        shares[schedule].append(exposed_shares(events))
    return {schedule: {
        "seconds": statistics.median(seconds[schedule]), "all_seconds": seconds[schedule],
        "exposed_tokens": statistics.median(share[0] for share in shares[schedule]),
        "exposed": statistics.median(share[1] for share in shares[schedule])} for schedule in SCHEDULES}


def parse(description, cases):
    """The command line of a bench of trainings; the first entry of a case is its device."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("more", nargs="*", help="further options of `tessera train`, behind --")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="names, separated by commas; default: all of the device")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", help="also write the figures to a file")
    options = parser.parse_args()
    known = [name for name, case in cases.items() if case[0] == options.device]
    options.names = options.only.split(",") if options.only else known
    unknown = set(options.names) - set(cases)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    if options.steps < 4:
        parser.error("--steps: at least 4, of which two are not counted")
    return options


def run_cases(options, head, measure_case, show):
    """Prints `head` and, by show(name, figures), each case as it was measured; writes all figures where --json says."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        write_tokens(folder / "tokens")
        print(head, flush=True)
        for name in options.names:
            found[name] = measure_case(options.program, name, options, folder)
            show(name, found[name])
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1), encoding="ascii")


def show(name, result):
    before, after = (result[schedule] for schedule in SCHEDULES)
    print(f"{name:34} {1e3 * before['seconds']:7.1f} ms {1e3 * after['seconds']:7.1f} ms "
          f"{before['seconds'] / after['seconds']:6.3f}  {100 * before['exposed_tokens']:.1f} -> "
          f"{100 * after['exposed_tokens']:.1f}, {100 * before['exposed']:.1f} -> {100 * after['exposed']:.1f}", flush=True)


def main():
    head = f"{'case':34} {'as built':>10} {'merged':>10} {'ratio':>6}  exposed: tokens, all exchanges (% of a step)"
    run_cases(parse(__doc__, CASES), head, measure, show)


if __name__ == "__main__":
    main()
