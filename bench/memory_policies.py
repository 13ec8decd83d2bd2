#!/usr/bin/env python3
"""Prints memory and estimated time of a step by what layers keep, recompute or offload, chosen by hand and for a limit.

  bench/memory_policies.py build/tessera [--case qwen3-8-layers,...] [--device cuda] [--rate 50] [--markdown] [--list]

Nothing is trained and nothing is allocated: figures are those of `tessera inspect --memory`. With --device cuda they are a GPU's, which
need not be there, but the program must have been built with CUDA. Limits are shares of the way from what recomputing everything takes to
what keeping everything takes. See docs/train.md.
"""
import argparse
import json
import os
import subprocess
import sys

LARGE = ["--model.vocab_size=32768", "--data.sequence_length=4096", "--train.precision=bf16", "--train.micro_batch=4",
         "--train.global_batch=16"]
CASES = {
    "qwen3-8-layers": ["--model.preset=qwen3-30b-a3b", "--model.num_layers=8", *LARGE],
    "mixtral-2-layers": ["--model.preset=mixtral-8x7b", "--model.num_layers=2", *LARGE],
    "deepseek-3-layers": ["--model.preset=deepseek-v3", "--model.num_layers=3", "--moe.first_dense_layers=1", *LARGE],
}
BY_HAND = {
    "keep all": [],
    "recompute all": ["--train.recompute=all"],
    "recompute expert_act": ["--train.recompute=expert_act"],
    "recompute norms, activations": ["--train.recompute=attn_norm,mlp_norm,expert_act"],
    "offload all": ["--train.offload=all"],
    "recompute and offload all": ["--train.recompute=all", "--train.offload=all"],
}
SHARES = [0.75, 0.5, 0.25, 0]


def inspect(program, arguments):
    """The figures of one run; exits where the program refuses it."""
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    command = [program, "inspect", "--memory", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()[-900:]}")
    return json.loads(done.stdout)


def choices_of(found):
    """What was chosen, in a few words."""
    parts = [f"{verb} {', '.join(found[key])}" for verb, key in
             (("recompute", "train.recompute"), ("offload", "train.offload")) if found.get(key)]
    return "; ".join(parts)


def rows_of(program, arguments):
    """Name, figures and choice of each policy: those by hand, and the choice for each limit."""
    by_hand = {name: inspect(program, arguments + more) for name, more in BY_HAND.items()}
    rows = [(name, found, "") for name, found in by_hand.items()]
    most, least = by_hand["keep all"]["total"], by_hand["recompute all"]["total"]
    limits = [int(least + share * (most - least)) for share in SHARES]
    for limit in limits:
        found = inspect(program, [*arguments, f"--train.memory_limit={limit}B"])
        if found["total"] > limit:
            sys.exit(f"memory_policies: {found['total']} bytes were chosen for a limit of {limit}")
        rows.append((f"limit {limit / 2**30:.2f} GiB", found, choices_of(found)))
    return rows


def show(case, rows, markdown):
    kept = rows[0][1]["pass_seconds"]
    print(f"{case}" if not markdown else f"\n| {case} | GiB | of it saved | on the host | ms | ratio | chosen |\n|---|---|---|---|---|---|---|")
    for name, found, chosen in rows:
        figures = [f"{found['total'] / 2**30:.2f}", f"{found['saved activations'] / 2**30:.2f}",
                   f"{found.get('offloaded', 0) / 2**30:.2f}", f"{found['pass_seconds'] * 1e3:.1f}",
                   f"{found['pass_seconds'] / kept:.3f}"]
        if markdown:
            print(f"| {name} | {' | '.join(figures)} | {chosen} |")
        else:
            print(f"  {name:30}" + "".join(f"{figure:>11}" for figure in figures) + f"  {chosen}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", default="build/tessera")
    parser.add_argument("--case", default=",".join(CASES), help="separated by commas")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rate", default="50", help="train.offload_rate, GB/s")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        print("\n".join(CASES))
        return
    for case in options.case.split(","):
        if case not in CASES:
            sys.exit(f"memory_policies: unknown case {case}, see --list")
        arguments = [*CASES[case], f"--run.device={options.device}", f"--train.offload_rate={options.rate}"]
        show(case, rows_of(options.program, arguments), options.markdown)


if __name__ == "__main__":
    main()
