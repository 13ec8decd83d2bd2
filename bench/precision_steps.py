#!/usr/bin/env python3
"""Steps by precision beside BF16's, in one run: train.precision = "fp8" with several recipes, and BF16 before and after.

  bench/precision_steps.py build/tessera [--case mixtral-2-layers,...] [--only bf16,rowwise,...] [--steps 4] [--rounds 1] [--markdown]
      [--list] [--profile NAME]

Each is a process of its own (`tessera bench --steps-only`) that times whole steps on random tokens, several in turn and the round repeated;
ratios are those of medians. --profile also prints one precision's time by operator. One GPU, 4 x 4096 tokens in each micro-batch.
"""
import argparse
import statistics
import sys

from memory_policies import call

LARGE = ["--model.vocab_size=32768", "--data.sequence_length=4096", "--train.micro_batch=4", "--train.global_batch=16"]
CASES = {
    "qwen3-8-layers": ["--model.preset=qwen3-30b-a3b", "--model.num_layers=8", *LARGE],
    "qwen3-4-layers": ["--model.preset=qwen3-30b-a3b", "--model.num_layers=4", *LARGE],  # fits 80 GB
    "mixtral-2-layers": ["--model.preset=mixtral-8x7b", "--model.num_layers=2", *LARGE],
    # 32 of 256 experts, so that weights and state of all layers fit one GPU.
    "deepseek-3-layers": ["--model.preset=deepseek-v3", "--model.num_layers=3", "--moe.first_dense_layers=1", "--moe.num_experts=32", *LARGE],
    "tiny": ["--model.preset=tiny"],
}
FP8 = ["--train.precision=fp8"]
BF16_GRADIENTS = "--precision.weight_gradients=false"
PRECISIONS = {
    "bf16": ["--train.precision=bf16"],
    "fp16": ["--train.precision=fp16"],
    "rowwise": [*FP8, "--precision.recipe=rowwise", BF16_GRADIENTS],
    "blockwise": [*FP8, "--precision.recipe=blockwise", BF16_GRADIENTS],
    "blockwise-primary": [*FP8, "--precision.recipe=blockwise", "--precision.primary_weights=fp8", BF16_GRADIENTS],
    "rowwise-experts": [*FP8, "--precision.recipe=rowwise", BF16_GRADIENTS, "--precision.plain=attn"],
    "rowwise-all": [*FP8, "--precision.recipe=rowwise"],
    "blockwise-all": [*FP8, "--precision.recipe=blockwise"],
    "rowwise-saved": [*FP8, "--precision.recipe=rowwise", "--precision.saved=fp8"],
    "rowwise-saved-gradients": [*FP8, "--precision.recipe=rowwise", "--precision.saved=fp8", BF16_GRADIENTS],
    "blockwise-saved-gradients": [*FP8, "--precision.recipe=blockwise", "--precision.saved=fp8", BF16_GRADIENTS],
    "rowwise-saved-all": [*FP8, "--precision.recipe=rowwise", "--precision.saved=fp8_all"],
    "blockwise-emulated": [*FP8, "--precision.recipe=blockwise", "--precision.emulate=true"],
    "mxfp8": [*FP8, "--precision.recipe=mxfp8"],
    "tensorwise": [*FP8, "--precision.recipe=tensorwise"],
    "tensorwise_delayed": [*FP8, "--precision.recipe=tensorwise_delayed"],
    "nvfp4": [*FP8, "--precision.recipe=nvfp4"],
}


def bench(program, arguments):
    command = [program, "bench", "--json", *arguments]
    found, why = call(command)
    if found is None:
        print(f"failed: {' '.join(command)}\n{why}", file=sys.stderr)
    return found


def time_case(program, case, names, options):
    """The step times of each precision, and what the first round found."""
    seconds, first = {name: [] for name in names}, {}
    order = names + (["bf16"] if "bf16" in names and len(names) > 1 else [])
    for _ in range(options.rounds):
        for name in order:
            found = bench(program, [*CASES[case], *PRECISIONS[name], "--steps-only", "--steps", str(options.steps)])
            if found is None:
                continue
            seconds[name] += found["seconds"]
            first.setdefault(name, found)
    return seconds, first


def print_case(case, seconds, first, markdown):
    base = statistics.median(seconds["bf16"]) if seconds.get("bf16") else None
    rows = []
    for name, times in seconds.items():
        if not times:
            rows.append([name, "failed", "", "", ""])
            continue
        median = statistics.median(times)
        spread = (max(times) - min(times)) / median
        rows.append([name, f"{1e3 * median:.1f} ms", f"{spread:.1%}", f"{base / median:.3f}" if base else "-",
                     f"{first[name]['memory_used'] / 2**30:.1f} GiB"])
    header = ["precision", "step", "spread", "of BF16's speed", "memory"]
    device = next((found["device"] for found in first.values()), "nothing ran")
    print(f"\n{case}, {device}")
    if markdown:
        print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in [header, *rows][1 if markdown else 0:]:
        print("| " + " | ".join(row) + " |" if markdown else f"{row[0]:20} {row[1]:>12} {row[2]:>8} {row[3]:>16} {row[4]:>12}")
    sys.stdout.flush()


def choose(text, known, what):
    names = text.split(",")
    for name in names:
        if name not in known:
            sys.exit(f"there is no {what} '{name}'; they are {', '.join(known)}")
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--case", default="mixtral-2-layers,qwen3-8-layers,deepseek-3-layers")
    parser.add_argument("--only", default="bf16,rowwise,blockwise,rowwise-all,blockwise-all,blockwise-emulated")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the cases and precisions, and end")
    parser.add_argument("--profile", help="this precision's time by operator as well")
    options = parser.parse_args()
    if options.list:
        print("cases: " + ", ".join(CASES) + "\nprecisions: " + ", ".join(PRECISIONS))
        return
    names = choose(options.only, PRECISIONS, "precision")
    for case in choose(options.case, CASES, "case"):
        print_case(case, *time_case(options.program, case, names, options), options.markdown)
        if not options.profile:
            continue
        found = bench(options.program, [*CASES[case], *PRECISIONS[options.profile], "--steps", "1"])
        for name, value in sorted((found or {"operators": {}})["operators"].items(), key=lambda item: -seconds_of(item[1])):
            print(f"  {name:40} {1e3 * seconds_of(value):9.2f} ms")


def seconds_of(operator):
    return operator if isinstance(operator, (int, float)) else operator["seconds"]


if __name__ == "__main__":
    main()
