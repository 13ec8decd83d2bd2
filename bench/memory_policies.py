#!/usr/bin/env python3
"""Memory and time of a step by what layers keep, recompute or offload, chosen by hand and for a limit: planned, and measured.

  bench/memory_policies.py build/tessera [--measure] [--case qwen3-8-layers,...] [--only keep,limit-recompute-all] [--markdown] [--list]

Without --measure nothing is trained and nothing is allocated: figures are those of `tessera inspect --memory`. With --device cuda they are
a GPU's, which need not be there, but the program must have been built with CUDA. A limit is the bytes of the choice by hand that it is
named after, or a share of the way from what recomputing everything takes to what keeping everything takes.

With --measure each policy also runs in a process of its own (`tessera bench`): a few whole steps on random tokens, with the memory in use
beside the prediction. On an H200 all cases take about four minutes; no run is begun after --seconds, and what is missing is named. One
rank, 4 x 4096 tokens in each of 4 micro-batches, BF16; see docs/train.md.
"""
import argparse
import json
import os
import subprocess
import sys
import time

LARGE = ["--model.vocab_size=32768", "--data.sequence_length=4096", "--train.precision=bf16", "--train.micro_batch=4",
         "--train.global_batch=16"]
CASES = {
    "qwen3-8-layers": ["--model.preset=qwen3-30b-a3b", "--model.num_layers=8", *LARGE],
    "mixtral-2-layers": ["--model.preset=mixtral-8x7b", "--model.num_layers=2", *LARGE],
    # 32 of 256 experts, so that weights and state of all layers fit one GPU.
    "deepseek-3-layers": ["--model.preset=deepseek-v3", "--model.num_layers=3", "--moe.first_dense_layers=1", "--moe.num_experts=32", *LARGE],
    "laptop": ["--model.preset=laptop", "--model.vocab_size=512", "--train.micro_batch=2", "--train.global_batch=4"],
}
DEFAULT_CASES = "qwen3-8-layers,mixtral-2-layers,deepseek-3-layers"
# MegaScale-MoE's choice, by the names that layers have here; those that a model has not are left out.
CHEAP = ["attn_norm", "mlp_norm", "expert_in", "expert_act", "q_rotated", "k_rotated"]
BY_HAND = {
    "keep": [],
    "recompute-act": ["--train.recompute=expert_act"],
    "recompute-norms-act": ["--train.recompute=attn_norm,mlp_norm,expert_act"],
    "recompute-cheap": ["--train.recompute=" + ",".join(CHEAP)],
    "recompute-all": ["--train.recompute=all"],
    "offload-all": ["--train.offload=all"],
    "recompute-offload-all": ["--train.recompute=all", "--train.offload=all"],
}
SHARES = [0.75, 0.5, 0.25]
PLANNED = [*BY_HAND, *(f"limit-{share}" for share in SHARES), "limit-recompute-norms-act", "limit-recompute-all"]
MEASURED = ["keep", "recompute-norms-act", "limit-recompute-norms-act", "recompute-all", "limit-recompute-all", "offload-all"]
GIB = 2**30


def call(command):
    """The JSON of a command, or why there is none."""
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        return None, done.stderr.strip()[-600:] or f"exit code {done.returncode}"
    return json.loads(done.stdout), ""


def inspect(program, arguments):
    """The planned figures; exits where the program refuses them."""
    found, why = call([program, "inspect", "--memory", "--json", *arguments])
    if found is None:
        sys.exit(f"memory_policies: inspect {' '.join(arguments)} failed: {why}")
    return found


def choices_of(found):
    """What was chosen, in a few words."""
    parts = [f"{verb} {', '.join(found[key])}" for verb, key in
             (("recompute", "train.recompute"), ("offload", "train.offload")) if found.get(key)]
    return "; ".join(parts)


class Case:
    """A model with the figures of its policies, each planned once."""

    def __init__(self, program, arguments):
        self.program, self.arguments, self.planned = program, arguments, {}

    def options(self, policy):
        """Those of the program for a policy."""
        if policy in BY_HAND:
            return [*BY_HAND[policy], "--train.memory_limit=none"]
        return [f"--train.memory_limit={self.limit(policy)}B"]

    def limit(self, policy):
        name = policy.removeprefix("limit-")
        if name in BY_HAND:
            return self.plan(name)["total"]
        most, least = self.plan("keep")["total"], self.plan("recompute-all")["total"]
        return int(least + float(name) * (most - least))

    def plan(self, policy):
        if policy not in self.planned:
            found = inspect(self.program, [*self.arguments, *self.options(policy)])
            if policy not in BY_HAND and found["total"] > self.limit(policy):
                sys.exit(f"memory_policies: {found['total']} bytes were chosen for a limit of {self.limit(policy)}")
            self.planned[policy] = found
        return self.planned[policy]

    def has(self, policy):
        """Whether the layers have the values that a choice by hand names: the program refuses others."""
        command = [self.program, "inspect", "--memory", "--json", *self.arguments, *BY_HAND.get(policy.removeprefix("limit-"), [])]
        return call(command)[0] is not None

    def measure(self, policy):
        """Figures of a run; a text where it ends with an error."""
        planned = self.plan(policy)
        options = self.options(policy)
        if policy not in BY_HAND:  # the choice that was planned, so that both columns are of one plan
            options = [f"--train.{key}={','.join(planned['train.' + key])}" for key in ("recompute", "offload") if planned["train." + key]]
            options.append("--train.memory_limit=none")
        found, why = call([self.program, "bench", "--json", "--steps-only", "--steps", "4", "--warmup", "2", *self.arguments, *options])
        return found if found is not None else why


def columns_of(planned, kept, measured, kept_measured):
    """The figures of a row."""
    row = [f"{planned['total'] / GIB:.2f}", f"{planned['saved activations'] / GIB:.2f}", f"{planned.get('offloaded', 0) / GIB:.2f}",
           f"{planned['pass_seconds'] * 1e3:.1f}", f"{planned['pass_seconds'] / kept['pass_seconds']:.3f}"]
    if measured is None:
        return row
    ratio = measured["median_seconds"] / kept_measured["median_seconds"] if kept_measured else float("nan")
    error = measured["memory_used"] / measured["memory_predicted"] - 1
    return [*row, f"{measured['memory_used'] / GIB:.2f}", f"{measured['memory_predicted'] / GIB:.2f}", f"{100 * error:+.2f} %",
            f"{measured['median_seconds'] * 1e3:.1f}", f"{ratio:.3f}"]


PLANNED_HEAD = ["GiB planned", "of it saved", "on the host", "ms of passes, estimated", "ratio"]
MEASURED_HEAD = ["GiB in use", "predicted", "error", "ms a step, measured", "ratio"]


def print_row(cells, markdown):
    if markdown:
        print(f"| {' | '.join(cells)} |", flush=True)
    else:
        print(f"{cells[0]:28}" + "".join(f"{cell:>12}" for cell in cells[1:-1]) + f"  {cells[-1]}", flush=True)


def print_head(case, measures, markdown):
    head = [case, *PLANNED_HEAD, *(MEASURED_HEAD if measures else []), "chosen"]
    if markdown:
        print()
        print_row(head, True)
        print(f"|{'---|' * len(head)}", flush=True)
    else:
        print(f"{case}: {', '.join(head[1:])}", flush=True)


def show(name, case, policies, options, deadline):
    """Prints a case's rows as they come; returns what was left out."""
    print_head(name, options.measure, options.markdown)
    kept, kept_measured, missing = case.plan("keep"), None, []
    for policy in policies:
        if not case.has(policy):
            missing.append(f"{name} {policy}: its layers do not have those values")
            continue
        planned, measured = case.plan(policy), None
        if options.measure:
            measured = case.measure(policy) if time.monotonic() < deadline else "no time was left"
            if isinstance(measured, str):
                missing.append(f"{name} {policy}: {measured}")
                measured = None
            if policy == "keep":
                kept_measured = measured
        cells = columns_of(planned, kept, measured, kept_measured)
        if options.measure and measured is None:
            cells += ["-"] * len(MEASURED_HEAD)
        print_row([policy, *cells, choices_of(planned) if policy not in BY_HAND else ""], options.markdown)
    return missing


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", default="build/tessera")
    parser.add_argument("--case", default=DEFAULT_CASES, help="separated by commas")
    parser.add_argument("--only", default="", help="policies, separated by commas")
    parser.add_argument("--measure", action="store_true", help="run each, too")
    parser.add_argument("--seconds", type=float, default=270, help="no run begins later")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rate", default="50", help="train.offload_rate, GB/s")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        print("cases: " + ", ".join(CASES) + "\npolicies: " + ", ".join(PLANNED))
        return
    cases = options.case.split(",")
    policies = options.only.split(",") if options.only else (MEASURED if options.measure else PLANNED)
    for unknown in [case for case in cases if case not in CASES] + [one for one in policies if one not in PLANNED]:
        sys.exit(f"memory_policies: there is no {unknown}, see --list")
    deadline, missing = time.monotonic() + options.seconds, []
    for name in cases:
        arguments = [*CASES[name], f"--run.device={options.device}", f"--train.offload_rate={options.rate}"]
        missing += show(name, Case(options.program, arguments), policies, options, deadline)
    for text in missing:
        print(f"missing: {text}", file=sys.stderr)


if __name__ == "__main__":
    main()
