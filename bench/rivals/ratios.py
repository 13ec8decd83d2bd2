#!/usr/bin/env python3
"""Runs Tessera and its rivals by turns on one GPU and prints the table of ratios.

usage: ratios.py [--build build] [--only step,grouped,attention] [--json FILE]

step:       a training step of four micro-batches of 4 x 4096 tokens, `tessera bench` (FP32 master weights, moments and
            gradient sums) beside Hugging Face's (BF16 throughout, hf_step.py), and real routing beside forced balance;
grouped:    the grouped products of the experts beside torch._grouped_mm (grouped_mm.py);
attention:  beside cuDNN's through PyTorch (attention_torch.py).
Each program is a process of its own; a failure is told and its rows are left out.
"""
import argparse
import json
import math
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
STEPS = {
    "Qwen3-30B-A3B, 8 layers": ("qwen3", ["--model.preset=qwen3-30b-a3b", "--model.num_layers=8"], 2.0),
    "Mixtral 8x7B, 2 layers": ("mixtral", ["--model.preset=mixtral-8x7b", "--model.num_layers=2"], 1.35),
}
BATCH = ["--model.vocab_size=32768", "--data.sequence_length=4096", "--train.micro_batch=4", "--train.global_batch=16",
         "--train.precision=bf16"]


def run(command):
    """The standard output, or None after saying what failed."""
    print("+ " + " ".join(map(str, command)), file=sys.stderr, flush=True)
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(f"  ended with code {done.returncode}", file=sys.stderr)
        return None
    return done.stdout


def from_json(text):
    return json.loads(text) if text else None


def bench_step(build, shape, *more):
    return from_json(run([build / "tessera", "bench", "--json", *shape, *BATCH, *more]))


def step_rows(build):
    for name, (rival, shape, target) in STEPS.items():
        ours = bench_step(build, shape)
        theirs = from_json(run([sys.executable, HERE / "hf_step.py", rival, "--micro-batches", 4, "--json"]))
        balanced = bench_step(build, shape, "--moe.force_balanced=true")
        if ours and theirs:
            yield (f"step, {name}: tokens/s over Hugging Face's", ours["tokens_per_second"] / theirs["tokens_per_second"],
                   target, f"{ours['tokens_per_second']:.0f} of {theirs['tokens_per_second']:.0f}, "
                   f"{ours['tflops']:.0f} TFLOPS, {ours['memory_used'] / 1e9:.1f} GB")
        if ours and balanced:
            yield (f"step, {name}: dropless over forced balance", balanced["median_seconds"] / ours["median_seconds"],
                   0.95, f"{1e3 * ours['median_seconds']:.1f} ms and {1e3 * balanced['median_seconds']:.1f} ms")


def grouped_rows(build):
    text = run([sys.executable, HERE / "grouped_mm.py", build / "bench" / "libgrouped_cuda.so"]) or ""
    for product, mean, least in re.findall(r"^(\S+): geometric mean ([\d.]+) .*least ([\d.]+)", text, re.MULTILINE):
        yield f"grouped product {product} over torch._grouped_mm", float(mean), 1.10, f"least {least} (target 0.97)"


def attention_rows(build):
    text = run([sys.executable, HERE / "attention_torch.py", build / "bench" / "attention_cuda_bench"]) or ""
    ratios = {}
    for line in text.splitlines():
        entry = json.loads(line) if line.startswith("{") else {}
        for part, ratio in entry.get("over torch", {}).items():
            ratios.setdefault((entry["who"], part), []).append(ratio)
    for (who, part), values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        yield f"attention {part}, {who}, over PyTorch's", mean, None, f"least {min(values):.2f} of {len(values)} shapes"


PARTS = {"step": step_rows, "grouped": grouped_rows, "attention": attention_rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=HERE.parent.parent / "build")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas")
    parser.add_argument("--json", type=pathlib.Path, help="a file for the rows")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}")
    rows = [row for part in options.only.split(",") for row in PARTS[part](options.build)]
    print("| what | ratio | target | |\n|---|---|---|---|")
    for what, ratio, target, note in rows:
        print(f"| {what} | {ratio:.3f} | {'' if target is None else f'{target:.2f}'} | {note} |")
    if options.json:
        keys = ("what", "ratio", "target", "note")
        options.json.write_text(json.dumps([dict(zip(keys, row)) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
