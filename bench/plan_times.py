#!/usr/bin/env python3
"""Steps as the simulator predicts them, beside the same steps measured: time and memory of one device.

  bench/plan_times.py build/tessera --hardware FILE [--case "NAME;..."] [--device cuda] [--steps 4] [--seconds S] [--markdown] [--json FILE] [--list]

FILE is one of `tessera bench --calibrate FILE` for this machine, or the name of hardware that comes with the program. Each case is a process
of its own (`tessera bench --steps-only --hardware FILE`). The operators of "known" cases are among those that a calibration times, in steps
of more layers and micro-batches; "new" cases are of other models, or of other numbers of tokens.
"""
import argparse
import itertools
import json
import statistics
import sys
import time

from memory_policies import call


def model(preset, *more, sequence=4096, batch=2, micro_batches=2):
    return [f"--model.preset={preset}", "--model.vocab_size=32768", f"--data.sequence_length={sequence}", f"--train.micro_batch={batch}",
            f"--train.global_batch={batch * micro_batches}", "--train.precision=bf16", *more]


def layers(count):
    return f"--model.num_layers={count}"


DENSE = "--moe.num_experts=0"
FP8 = ["--train.precision=fp8"]
ROWWISE, BLOCKWISE = [*FP8, "--precision.recipe=rowwise"], [*FP8, "--precision.recipe=blockwise", "--precision.weight_gradients=false"]
ONE_DENSE = "--moe.first_dense_layers=1"
KNOWN = {
    "mixtral, 2 layers": model("mixtral-8x7b", layers(2), batch=4),
    "mixtral, 2 layers, all recomputed": model("mixtral-8x7b", layers(2), "--train.recompute=all", batch=4),
    "mixtral, 2 layers, rowwise FP8": model("mixtral-8x7b", layers(2), *ROWWISE, batch=4),
    "qwen3-30b, 4 layers": model("qwen3-30b-a3b", layers(4), batch=4),
    "qwen3-30b, 4 layers, all recomputed": model("qwen3-30b-a3b", layers(4), "--train.recompute=all", batch=4),
    "qwen3-30b, 8 layers, 16 experts, offload": model("qwen3-30b-a3b", layers(8), "--moe.num_experts=16", "--train.offload=all", batch=4),
    "qwen3-30b, 4 layers, blockwise FP8": model("qwen3-30b-a3b", layers(4), *BLOCKWISE, batch=4),
    "qwen3-30b, 2 layers, 32k": model("qwen3-30b-a3b", layers(2), sequence=32768, batch=1, micro_batches=1),
    "deepseek-v2-lite, 4 layers": model("deepseek-v2-lite", layers(4), batch=4),
    "deepseek-v3, 3 layers, 16 experts": model("deepseek-v3", layers(3), ONE_DENSE, "--moe.num_experts=16", "--moe.num_groups=1", "--moe.top_groups=1"),
    "dense 4096, 4 layers": model("mixtral-8x7b", layers(4), DENSE, "--model.inner_size=14336", batch=2),
    "dense 8192, 1 layer, 8k": model("mixtral-8x7b", layers(1), DENSE, "--model.hidden_size=8192", "--model.num_heads=64", "--model.inner_size=28672",
                                     sequence=8192, batch=1),
}
NEW = {
    "qwen3-30b, 4 layers, one sequence": model("qwen3-30b-a3b", layers(4), batch=1, micro_batches=4),
    "phi-3.5-moe, 2 layers": model("phi-3.5-moe", layers(2), batch=4),
    "phi-3.5-moe, 2 layers, rowwise FP8": model("phi-3.5-moe", layers(2), *ROWWISE, batch=4),
    "deepseekmoe-16b, 4 layers": model("deepseekmoe-16b", layers(4), batch=4),
    "deepseekmoe-16b, 8 layers, 16 experts, offload": model("deepseekmoe-16b", layers(8), "--moe.num_experts=16", "--train.offload=all", batch=4),
    "hunyuan-large, 2 layers, 4 experts": model("hunyuan-large", layers(2), "--moe.num_experts=4"),
    "qwen2-57b, 1 layer, 2k": model("qwen2-57b-a14b", layers(1), sequence=2048, batch=6),
    "mixtral, 2 layers, 16k": model("mixtral-8x7b", layers(2), sequence=16384, batch=1),
    "3072 wide, 64 experts, 3 layers": model("qwen3-30b-a3b", layers(3), "--model.hidden_size=3072", "--moe.num_experts=64", "--moe.top_k=4",
                                             "--moe.inner_size=1536", batch=3),
    "deepseek-v3, 2 layers, 12 experts, 2k": model("deepseek-v3", layers(2), ONE_DENSE, "--moe.num_experts=12", "--moe.num_groups=1",
                                                   "--moe.top_groups=1", sequence=2048, batch=3),
    "deepseek-v3, 2 layers, blockwise FP8": model("deepseek-v3", layers(2), ONE_DENSE, "--moe.num_experts=16", "--moe.num_groups=1",
                                                  "--moe.top_groups=1", *BLOCKWISE, batch=1, micro_batches=4),
    "dense 5120, 3 layers": model("mixtral-8x7b", layers(3), DENSE, "--model.hidden_size=5120", "--model.num_heads=40", "--model.inner_size=13824", batch=3),
    "dense 2048, 16 layers, all recomputed": model("mixtral-8x7b", layers(16), DENSE, "--model.hidden_size=2048", "--model.num_heads=16",
                                                   "--model.inner_size=5632", "--train.recompute=all", batch=4),
    "megablocks-medium, 4 layers": model("megablocks-medium", layers(4), sequence=1024, batch=6),
    "8 experts of 2048, 64k": model("qwen3-30b-a3b", layers(1), "--moe.num_experts=8", "--moe.top_k=2", "--moe.inner_size=2048", sequence=65536, batch=1,
                                    micro_batches=1),
}
HOST = {
    "laptop": ["--model.preset=laptop", "--model.vocab_size=512", "--train.precision=f32"],
    "laptop, BF16": ["--model.preset=laptop", "--model.vocab_size=512", "--train.precision=bf16"],
    "laptop, long": ["--model.preset=laptop", "--model.vocab_size=512", "--train.precision=f32", "--data.sequence_length=512"],
    "laptop, 12 wide experts": ["--model.preset=laptop", "--model.vocab_size=1024", "--train.precision=f32", "--moe.num_experts=12", "--moe.inner_size=384"],
    "tiny": ["--model.preset=tiny", "--model.vocab_size=256", "--train.precision=f32"],
}


def measure(options, arguments):
    command = [options.program, "bench", "--steps-only", "--json", "--steps", str(options.steps), "--hardware", options.hardware,
               f"--run.device={options.device}", *arguments]
    found, why = call(command)
    if found is None:
        print(f"failed: {' '.join(command)}\n{why}", file=sys.stderr)
        return None
    seconds = found["median_seconds"]
    return {"device": found["device"], "seconds": seconds, "predicted": found["predicted_seconds"],
            "error": found["predicted_seconds"] / seconds - 1, "memory": found["memory_used"],
            "memory_error": found["memory_predicted"] / found["memory_used"] - 1}


def print_table(kind, rows, markdown):
    print(f"\n{kind}" if not markdown else "")
    header = [f"{kind} shapes", "measured", "predicted", "error", "memory", "error of memory"]
    if markdown:
        print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for name, row in rows.items():
        cells = [name, f"{1e3 * row['seconds']:.1f} ms", f"{1e3 * row['predicted']:.1f} ms", f"{row['error']:+.1%}",
                 f"{row['memory'] / 2**30:.2f} GiB", f"{row['memory_error']:+.2%}"]
        print("| " + " | ".join(cells) + " |" if markdown else f"{cells[0]:44}" + "".join(f"{cell:>14}" for cell in cells[1:]))
    if not rows:
        return
    errors = sorted(abs(row["error"]) for row in rows.values())
    memory = max(abs(row["memory_error"]) for row in rows.values())
    print(f"\n{kind}: median error {statistics.median(errors):.1%}, largest {errors[-1]:.1%}; largest of memory {memory:.2%}")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--hardware")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--case", help="these alone")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1e9, help="no case is begun after")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--list", action="store_true", help="print the cases, and end")
    options = parser.parse_args()
    kinds = {"known": KNOWN, "new": NEW} if options.device == "cuda" else {"host": HOST}
    if options.list:
        for kind, cases in kinds.items():
            print(f"{kind}: " + "; ".join(cases))
        return
    if not options.hardware:
        parser.error("--hardware is missing: a file of `tessera bench --calibrate FILE`, or a name")
    wanted = options.case.split(";") if options.case else None
    found = {kind: {} for kind in kinds}
    # Of all kinds in turn, so that a run that is cut short has some of each.
    order = [pair for group in itertools.zip_longest(*([(kind, name) for name in cases] for kind, cases in kinds.items())) for pair in group if pair]
    begin = time.monotonic()
    for kind, name in order:
        if wanted is not None and name not in wanted:
            continue
        if time.monotonic() - begin > options.seconds:
            print(f"no time for {name}", file=sys.stderr)
            continue
        start = time.monotonic()
        row = measure(options, kinds[kind][name])
        if row:
            found[kind][name] = row
            print(f"{kind:6} {name:44} {1e3 * row['seconds']:9.1f} ms, predicted {row['error']:+.1%}; {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(found, file, indent=1)
    for kind, rows in found.items():
        print_table(kind, rows, options.markdown)


if __name__ == "__main__":
    main()
