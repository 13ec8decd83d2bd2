#!/usr/bin/env python3
"""Steps of training on CPU ranks of this machine, beside what the simulator predicts for them.

  bench/plan_ranks.py build/tessera [--ranks 2] [--hardware FILE] [--case NAME,...] [--steps 8] [--markdown] [--write FILE]

Without --hardware, operators are timed first (`tessera bench --calibrate`, with as many threads as a rank will have), and exchanges
between as many ranks (build/tests/comm_bench); --write keeps that description. Each case is then trained, and its median step
compared with `tessera plan --explain`, which is told what came to experts in that run (--routing). Where there are more ranks than
processors, they share these: the description then says how many there are (node.processors), and has exchanges between as many ranks.
"""
import argparse
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile

HARDWARE = pathlib.Path(__file__).resolve().parent.parent / "configs" / "hardware"
MODEL = ["--model.vocab_size=1024", "--model.hidden_size=256", "--model.num_heads=8", "--data.sequence_length=256",
         "--train.micro_batch=2", "--train.global_batch=16"]
EXPERTS = ["--moe.num_experts=8", "--moe.top_k=2", "--moe.inner_size=512"]
DENSE = ["--moe.num_experts=0", "--model.inner_size=1024"]
# Options of `tessera train`; RANKS stands for the number of ranks.
CASES = {
    "dp": EXPERTS,
    "dp, dense": DENSE,
    "dp, fully sharded": [*EXPERTS, "--optim.shard=full"],
    "ep": [*EXPERTS, "--parallel.ep=RANKS"],
    "ep, bf16": [*EXPERTS, "--parallel.ep=RANKS", "--train.precision=bf16"],
    "ep, all recomputed": [*EXPERTS, "--parallel.ep=RANKS", "--train.recompute=all"],
    "ep, merged": [*EXPERTS, "--parallel.ep=RANKS", "--train.schedule=merged", "--train.micro_batch=1"],
    "tp": [*EXPERTS, "--parallel.tp=RANKS"],
    "tp, dense": [*DENSE, "--parallel.tp=RANKS"],
    "cp": [*EXPERTS, "--parallel.cp=RANKS"],
    "pp": [*EXPERTS, "--parallel.pp=RANKS"],
    "pp, 2 chunks": [*EXPERTS, "--parallel.pp=RANKS", "--parallel.pipeline_schedule=interleaved", "--parallel.pipeline_chunks=2"],
}


def call(command, environment):
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed: {done.stderr.strip()[-800:]}")
    return done.stdout


def measure_links(options, environment):
    """Microseconds of a short exchange, and GB/s of long ones: what fits all-gathers, reduce-scatters and all-to-alls best."""
    bench = pathlib.Path(options.program).parent / "tests" / "comm_bench"
    text = call(["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(options.ranks), str(bench)], environment)
    short, rates = [], []
    for line in text.splitlines():
        size = int(line.split()[0])
        for name in ("all_gather", "reduce_scatter", "all_to_all"):
            micro, gbs = map(float, re.search(name + r" +([\d.]+) us +([\d.]+) GB/s", line).groups())
            if size <= 4096:
                short.append(micro)
            elif size >= 1 << 18:
                rates.append(gbs)
    return statistics.median(short), statistics.median(rates)


def describe_machine(options, environment, folder):
    """A hardware file of this machine, with a device for each rank."""
    path = folder / "machine.toml"
    if options.hardware:
        known = HARDWARE / f"{options.hardware}.toml"
        path.write_text((known if known.exists() else pathlib.Path(options.hardware)).read_text(encoding="utf-8"), encoding="utf-8")
    else:
        call([options.program, "bench", "--calibrate", str(path), "--run.device=cpu"], environment)
    text = path.read_text(encoding="utf-8")
    if options.hardware and re.search(rf"^devices = {options.ranks}$", text, re.M):
        return options.hardware
    micro, gbs = measure_links(options, environment)
    processors = min(options.ranks, len(os.sched_getaffinity(0)))
    for key, value in (("devices", options.ranks), ("processors", processors), ("node_us", micro), ("node_gbs", gbs)):
        text = re.sub(rf"^{key} = .*", f"{key} = {value}", text, flags=re.M)
    path.write_text(text, encoding="utf-8")
    if options.write:
        pathlib.Path(options.write).write_text(text, encoding="utf-8")
    return str(path)


def measure(options, name, hardware, environment, folder):
    """Seconds of a step, measured and predicted."""
    case = [option.replace("RANKS", str(options.ranks)) for option in CASES[name]]
    keys = {option.split("=")[0] for option in case}
    arguments = [option for option in MODEL if option.split("=")[0] not in keys] + [f"--model.num_layers={2 * options.ranks}"] + case
    with tempfile.TemporaryDirectory(dir=folder) as run:
        call([options.program, "train", "--ranks", str(options.ranks), "--run.device=cpu", *arguments, f"--run.folder={run}/run",
              f"--data.text={folder / 'text.txt'}", f"--data.cache={folder / 'tokens'}", f"--train.steps={options.steps}",
              "--train.validation_interval=0", "--data.validation_fraction=0", "--run.save=false", "--run.report=false",
              "--run.tensorboard=false"], environment)
        lines = map(json.loads, (pathlib.Path(run) / "run" / "metrics.jsonl").read_text().splitlines())
        seconds = [line["step_seconds"] for line in lines if line.get("type") == "step"]
        routing = ["--routing", f"{run}/run"] if "--moe.num_experts=0" not in case else []
        plan = json.loads(call([options.program, "plan", "--explain", "--without-limit", "--json", "--gpus", str(options.ranks),
                                "--hardware", hardware, *routing, *arguments], environment))
    return statistics.median(seconds[2:]), plan["layouts"][0]["step_seconds"]


def write_text(path):
    draw = random.Random(1)
    words = ["".join(draw.choice("abcdefghij") for _ in range(draw.randint(2, 9))) for _ in range(2000)]
    path.write_text(" ".join(draw.choice(words) for _ in range(200000)), encoding="ascii")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hardware", help="a description that was written before")
    parser.add_argument("--case", default=",".join(CASES).replace(", ", "; "), help="names, separated by commas (with ; for a comma in one)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--write", help="file for the description of this machine")
    options = parser.parse_args()
    options.names = [name.replace("; ", ", ") for name in options.case.split(",")]
    unknown = set(options.names) - set(CASES)
    if unknown:
        parser.error(f"no such case: {'; '.join(sorted(unknown))}; there are {'; '.join(CASES)}")
    return options


def main():
    options = parse()
    threads = max(len(os.sched_getaffinity(0)) // options.ranks, 1)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    errors = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        write_text(folder / "text.txt")
        hardware = describe_machine(options, environment, folder)
        if options.markdown:
            print(f"| {options.ranks} ranks | measured | predicted | error |\n|---|---|---|---|")
        for name in options.names:
            measured, predicted = measure(options, name, hardware, environment, folder)
            errors.append(abs(predicted / measured - 1))
            cells = [f"{1e3 * measured:.1f} ms", f"{1e3 * predicted:.1f} ms", f"{predicted / measured - 1:+.1%}"]
            print("| " + " | ".join([name, *cells]) + " |" if options.markdown else f"{name:24}" + "".join(f"{cell:>12}" for cell in cells), flush=True)
    print(f"\n{options.ranks} ranks: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
