#!/usr/bin/env python3
"""Dynamic context parallelism beside fixed degrees, on documents whose lengths have a heavy tail (log-normal).

  bench/dynamic_cp.py build/tessera [--ranks 2] [--rounds 3] [--steps 6] [--simulate-only] [--json FILE]

Simulated: `tessera inspect --contexts` for some hardware, ranks and models: the median over steps of fixed over dynamic.
Measured: `tessera train` on CPU ranks of this machine, the fixed degrees and the dynamic one by turns, on the same documents and
with the same tokens a step, the first step of each run left out: the steps' least times of all rounds, and the median of the
rounds' ratios. Ratios above 1: dynamic is faster.
"""
import argparse
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

DATA = ["--data.tokenizer=byte", "--data.packing=best_fit", "--data.split_documents=true", "--data.validation_fraction=0"]
SMALL = ["--model.vocab_size=320", "--model.hidden_size=64", "--model.num_layers=2", "--model.num_heads=4",
         "--model.num_kv_heads=4", "--moe.num_experts=4", "--moe.top_k=1", "--moe.inner_size=64",
         "--moe.balance_scope=sequence"]
QWEN3 = ["--model.preset=qwen3-30b-a3b", "--moe.balance_scope=sequence", "--train.precision=bf16"]

# Simulated. Name: hardware, ranks, options, (tokens of a sequence, cp, sequences of a step), (median, sigma) of lengths.
SIMULATED = {
    "qwen3-64k-h100-ib": ("h100-ib", 64, [*QWEN3, "--parallel.ep=8", "--optim.shard=state"], (65536, 8, 64), (2000, 1.6)),
    "qwen3-128k-h100-ib": ("h100-ib", 128, [*QWEN3, "--parallel.ep=8"], (131072, 16, 64), (3000, 1.6)),
    "qwen3-64k-h100-ib-no-ep": ("h100-ib", 64, QWEN3, (65536, 8, 64), (2000, 1.6)),
    "small-cp-2-dp-2-epyc-core": ("epyc-core", 4, [*SMALL, "--parallel.ep=4"], (8192, 2, 16), (200, 1.8)),
    "small-cp-4-epyc-core": ("epyc-core", 4, [*SMALL, "--parallel.ep=4"], (8192, 4, 16), (200, 1.8)),
}
# Measured likewise, on CPU ranks; the last are the degrees that it is compared with. Ranks that share cores wait for one another
# at no cost, so there should be as many cores.
MEASURED = {
    "spread-experts": ([*SMALL, "--parallel.ep=RANKS"], (8192, 1, 8), (300, 1.5), (1, 2)),
}


def write_documents(program, folder, tokens, longest, median, sigma):
    """A token file of random letters, in documents of a log-normal number of tokens."""
    draw = random.Random(7)
    prefix = folder / f"documents-{longest}-{median}-{sigma}"
    if pathlib.Path(f"{prefix}.bin").exists():
        return prefix
    text = folder / "documents.jsonl"
    letters = "".join(draw.choice("abcdefgh ") for _ in range(longest))
    total = 0
    with text.open("w") as file:
        while total < tokens:
            length = min(max(int(draw.lognormvariate(math.log(median), sigma)), 2), longest)
            at = draw.randrange(longest - length + 1)
            file.write(json.dumps({"text": letters[at:at + length - 1]}) + "\n")
            total += length
    command = [program, "tokenize", str(text), "--tokenizer", "byte", "--output", str(prefix)]
    run_checked(command)
    return prefix


def run_checked(command):
    environment = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()[-800:]}")
    return done.stdout


def keys_of(shape, ranks, prefix, steps):
    length, cp, batch = shape
    return [*DATA, f"--data.tokens={prefix}", f"--data.sequence_length={length}", f"--parallel.cp={cp}",
            f"--train.global_batch={batch}", f"--train.micro_batch={1}", f"--train.steps={steps}", "--optim.warmup_steps=0",
            f"--parallel.dp={ranks // cp}"]


def simulate(program, folder, name):
    hardware, ranks, options, shape, (median, sigma) = SIMULATED[name]
    length, _, batch = shape
    prefix = write_documents(program, folder, 8 * length * batch, length, median, sigma)
    command = [program, "inspect", "--contexts", "--json", "--hardware", hardware, "--ranks", str(ranks), *options,
               *keys_of(shape, ranks, prefix, 8)]
    steps = json.loads(run_checked(command))
    ratios = [step["ratio"] for step in steps]
    result = {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
              "fixed_seconds": statistics.median(step["fixed"]["seconds"] for step in steps),
              "dynamic_seconds": statistics.median(step["dynamic"]["seconds"] for step in steps)}
    print(f"{name:<28} simulated: fixed cp {shape[1]} {result['fixed_seconds']:.3g} s, dynamic "
          f"{result['dynamic_seconds']:.3g} s, ratio {result['ratio']:.2f} ({result['least']:.2f} to {result['most']:.2f})",
          flush=True)
    return result


def train(program, folder, keys, ranks):
    run = pathlib.Path(tempfile.mkdtemp(dir=folder))
    arguments = [program, "train", "--ranks", str(ranks), "--model.init_deviation=0.02", *keys, f"--run.folder={run}",
                 "--run.resume=never", "--run.save=false", "--run.device=cpu", "--run.report=false"]
    run_checked(arguments)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if line.get("type") == "step"]
    return [line["step_seconds"] for line in steps][1:], steps[-1]["loss"]


def least(rounds):
    """The steps of a run, each as fast as in any round: other work on the machine only ever adds."""
    return sum(min(of_step) for of_step in zip(*rounds))


def measure(program, folder, name, ranks, rounds, steps):
    options, shape, (median, sigma), fixed = MEASURED[name]
    options = [option.replace("RANKS", str(ranks)) for option in options]
    length, cp, batch = shape
    prefix = write_documents(program, folder, (steps + 1) * length * batch, length, median, sigma)
    ways = {f"cp {degree}": keys_of((length, degree, batch), ranks, prefix, steps) for degree in fixed}
    ways["dynamic"] = [*keys_of(shape, ranks, prefix, steps), "--parallel.dynamic_cp=true"]
    rounds_of = {way: [] for way in ways}
    losses = {}
    for _ in range(rounds):
        for way, keys in ways.items():
            found, losses[way] = train(program, folder, [*options, *keys], ranks)
            rounds_of[way].append(found)
    result = {"rounds": rounds_of, "losses": losses, "ratios": {}}
    for way in ways:
        if way == "dynamic":
            continue
        ratios = [sum(a) / sum(b) for a, b in zip(rounds_of[way], rounds_of["dynamic"])]
        best = least(rounds_of[way]) / least(rounds_of["dynamic"])
        result["ratios"][way] = {"median": statistics.median(ratios), "rounds": ratios, "undisturbed": best}
        print(f"{name:<28} measured, {ranks} ranks: {way} {least(rounds_of[way]):.2f} s, dynamic "
              f"{least(rounds_of['dynamic']):.2f} s, ratio {best:.2f}; by rounds {statistics.median(ratios):.2f} "
              f"({min(ratios):.2f} to {max(ratios):.2f}); losses {losses[way]:.5f}, {losses['dynamic']:.5f}", flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--simulate-only", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    program = str(pathlib.Path(arguments.program).resolve())
    chosen = [name for name in arguments.only.split(",") if name]
    results = {"simulated": {}, "measured": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in SIMULATED:
            if not chosen or name in chosen:
                results["simulated"][name] = simulate(program, pathlib.Path(folder), name)
        for name in MEASURED:
            if not arguments.simulate_only and (not chosen or name in chosen):
                results["measured"][name] = measure(program, pathlib.Path(folder), name, arguments.ranks, arguments.rounds,
                                                    arguments.steps)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
