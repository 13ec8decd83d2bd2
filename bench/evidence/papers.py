#!/usr/bin/env python3
"""Published training throughputs beside what the simulator says of this program on the same layout: the page docs/evidence/papers.md.

  bench/evidence/papers.py build/tessera [--write docs/evidence/papers.md] [--only TEXT] [--jobs N] [--json FILE]

Rows are in bench/evidence/papers: papers.json from the papers, recipes.json from the repositories of Megatron-Bridge, NeMo and Megatron-LM,
models.json says how this program names the models. Each row is one `tessera plan --explain`. No constant is fitted to any row. Rows without
a model, layout or precision that this program has, or without a throughput, are left out and counted.
"""
import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import statistics
import subprocess
import sys

DATA = pathlib.Path(__file__).parent / "papers"
HARDWARE = {"h100": "h100-ib", "h800": "h800-ib", "h200": "h200-ib", "gb200": "gb200-nvl72"}
# Recipes with FP8 products of their own on Hopper: scales for each tensor are nearest to those for each row.
PRECISIONS = {"bf16": ["--train.precision=bf16"],
              "fp8-cs": ["--train.precision=fp8", "--precision.recipe=rowwise"],
              "fp8-ds": ["--train.precision=fp8", "--precision.recipe=rowwise"],
              "fp8-blockwise": ["--train.precision=fp8", "--precision.recipe=blockwise", "--precision.weight_gradients=false"]}
# Megatron's modules by the values of a layer here. Its core attention keeps scores only without a fused kernel.
RECOMPUTED = {"full": ["all"], "layernorm": ["attn_norm", "mlp_norm"], "moe_act": ["expert_act"], "mlp": ["mlp_pre", "mlp_act"],
              "mla_up_proj": ["k", "v", "q_rotated"], "moe": ["expert_in", "expert_pre", "expert_act"],
              "shared_experts": ["moe.shared_pre", "moe.shared_act"], "core_attn": []}
UNKNOWN = "which is no value of a layer"


def layout_of(row):
    """Overrides of the layout, or why there are none."""
    if row["tp"] is None or row["pp"] is None or row["ep"] is None:
        return None, "no layout"
    arguments = [f"--parallel.{axis}={row[axis] or 1}" for axis in ("tp", "cp", "pp", "ep", "etp")]
    chunks = row["virtual_stages"] or 1
    if chunks > 1 and row["pp"] > 1:
        arguments += ["--parallel.pipeline_schedule=interleaved", f"--parallel.pipeline_chunks={chunks}"]
    if row["fsdp"]:
        arguments.append("--optim.shard=full")
    return arguments, ""


def overrides_of(model):
    for key, value in model["overrides"].items():
        if isinstance(value, list):
            value = ",".join(str(item) for item in value)
        elif isinstance(value, bool):
            value = str(value).lower()
        yield f"--{key}={value}"


def measured_of(row):
    """Their TFLOPS of a device or tokens/s of all, and by which figure of ours that is judged."""
    measured = row["measured"]
    if "tokens_per_second" in measured:
        return measured["tokens_per_second"], "tokens_per_second"
    if "tokens_per_second_per_gpu" in measured:
        return measured["tokens_per_second_per_gpu"] * row["gpus"], "tokens_per_second"
    if "step_seconds" in measured and row["global_batch"]:
        return row["global_batch"] * row["sequence_length"] / measured["step_seconds"], "tokens_per_second"
    if "tflops" in measured:
        return measured["tflops"], "tflops"
    if "mfu" in measured:
        return measured["mfu"] * (row["peak"] or 989.5), "tflops"
    return None, ""


def command_of(program, row, models):
    """The command that simulates a row, or None and why."""
    model = models.get(row["model"])
    if not model or model["preset"] is None:
        return None, "a model that this program does not have"
    if row["hardware"] not in HARDWARE:
        return None, "hardware without a description"
    if row["precision"] not in PRECISIONS or (row["precision"] != "bf16" and row["hardware"] not in ("h100", "h200", "h800")):
        return None, "a precision without products of its own here"
    if measured_of(row)[0] is None:
        return None, "no throughput"
    if not row["global_batch"] or not row["sequence_length"]:
        return None, "no batch"
    layout, why = layout_of(row)
    if layout is None:
        return None, why
    routing = row["routing"] or ""
    recompute = [name for module in row["recompute"] or [] for name in RECOMPUTED.get(module, [])]
    return [program, "plan", "--explain", "--without-limit", "--json", "--gpus", str(row["gpus"]), "--hardware", HARDWARE[row["hardware"]],
            f"--model.preset={model['preset']}", *overrides_of(model), *PRECISIONS[row["precision"]],
            f"--data.sequence_length={row['sequence_length']}", f"--train.micro_batch={row['micro_batch'] or 1}",
            f"--train.global_batch={row['global_batch']}", *(["--moe.capacity_factor=1"] if "capacity factor 1" in routing else []),
            *layout, "--train.memory_limit=none", *([f"--train.recompute={','.join(recompute)}"] if recompute else [])], ""


def run(command):
    """The JSON of a simulation, or why there is none. Names that the model has no value of are left out."""
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={"OMP_NUM_THREADS": "1", **os.environ})
        if done.returncode == 0:
            return json.loads(done.stdout)["layouts"][0], ""
        if UNKNOWN not in done.stderr:
            return None, done.stderr.strip().removeprefix("tessera: ")
        name = done.stderr.split("'")[1]
        kept = [item for item in command[-1].split("=", 1)[1].split(",") if item != name]
        command = command[:-1] + ([f"--train.recompute={','.join(kept)}"] if kept else [])


def simulate(program, row, models):
    command, why = command_of(program, row, models)
    if command is None:
        return {"row": row, "why": why}
    found, why = run(command)
    if found is None:
        return {"row": row, "why": "refused: " + why}
    theirs, figure = measured_of(row)
    slowest = min(found["stages"], key=lambda stage: stage["idle_seconds"])
    return {"row": row, "theirs": theirs, "figure": figure, "ours": found[figure], "error": found[figure] / theirs - 1,
            "memory": found["memory_bytes"], "exposed": slowest["exposed_seconds"] / found["step_seconds"],
            "idle": slowest["idle_seconds"] / found["step_seconds"]}


def describe_layout(row):
    parts = [f"{axis.upper()} {row[axis]}" for axis in ("tp", "cp", "pp", "ep", "etp") if (row[axis] or 1) > 1]
    if (row["virtual_stages"] or 1) > 1:
        parts.append(f"VP {row['virtual_stages']}")
    if row["fsdp"]:
        parts.append("FSDP")
    return ", ".join(parts) or "DP"


def compare_rankings(results):
    """Of rows that a source compares with each other: pairs that differ by over 5 %, and in how many ours agree."""
    groups = collections.defaultdict(list)
    for one in results:
        if one["row"]["ranking_group"]:
            groups[one["row"]["ranking_group"]].append(one)
    pairs = agreed = best = counted = 0
    for group in groups.values():
        if len(group) < 2:
            continue
        counted += 1
        best += max(group, key=lambda one: one["theirs"]) is max(group, key=lambda one: one["ours"])
        for i, first in enumerate(group):
            for second in group[i + 1:]:
                ratio = first["theirs"] / second["theirs"]
                if first["figure"] != second["figure"] or 1 / 1.05 < ratio < 1.05:
                    continue
                pairs += 1
                agreed += (ratio > 1) == (first["ours"] > second["ours"])
    return {"groups": counted, "best": best, "pairs": pairs, "agreed": agreed}


def summarise(name, results):
    errors = [one["error"] for one in results]
    if not errors:
        return f"| {name} | 0 | | | |"
    scale = statistics.median([1 + error for error in errors])
    within = sum(abs((1 + error) / scale - 1) <= 0.15 for error in errors)
    return (f"| {name} | {len(errors)} | {statistics.median(errors):+.0%} | {statistics.median([abs(error) for error in errors]):.0%} | "
            f"{sum(abs(error) <= 0.15 for error in errors)} | {within} |")


HEAD = """# Published throughputs beside the simulator's

Made by `bench/evidence/papers.py build/tessera --write docs/evidence/papers.md`; the rows, with their sources and quotations, are in
`bench/evidence/papers`, and what in the sources contradicts itself in `bench/evidence/papers/doubts.md`. "Ours" is what `tessera plan
--explain` says of *this program* on the row's model, layout and batch with the hardware's published rates and the operators' times of
`kernels.measured`; nothing is fitted to a row. An error therefore holds what the simulator gets wrong, what their software does otherwise
(kernels, overlap, drops, padding), and what the source does not say (micro-batches, recomputation, uneven pipelines are often missing).
Routing is taken as balanced.
"""


# What rows have in common that may explain their errors, the first that fits; and what does, as far as it is known.
CLASSES = [
    ("gpt-oss", lambda row: row["model"].startswith("GPT-OSS"), "The model is an approximation: no attention sinks, no biases of experts."),
    ("MegaScale-MoE", lambda row: "MegaScale" in row["source"],
     "Ours on the clock is 27 to 43 % faster than its own system, and 85 to 91 % faster than its baseline; not explained."),
    ("experts over several nodes", lambda row: (row["ep"] or 1) > 8 and row["hardware"] in ("h100", "h800"),
     "Ours sends a token once for each rank of its experts, and half of the step is exposed; theirs (DeepEP) once for each node."),
    ("full sharding", lambda row: row["fsdp"], "Ours hides the gathering of weights under computation; theirs seems not to."),
    ("small steps", lambda row: row["global_batch"] * row["sequence_length"] < 1e5,
     "16,384 tokens a step on 8 GPUs: the host's time, which the clock does not have, and an untrained router's routing."),
    ("experts cut by TP, no pipeline", lambda row: (row["etp"] or 1) > 1 and (row["pp"] or 1) == 1, "Not explained."),
    ("pipelines, experts within a node", lambda row: (row["pp"] or 1) > 1 and (row["ep"] or 1) <= 8, "Errors of both signs; Qwen3-235B's are the largest."),
    ("others", lambda row: True, "-"),
]


def class_of(row):
    return next(name for name, fits, _ in CLASSES if fits(row))


def list_classes(results):
    lines = ["| rows with | number | median error | within 15 % | what explains it |", "|---|---|---|---|---|"]
    for name, _, why in CLASSES:
        errors = [one["error"] for one in results if class_of(one["row"]) == name]
        if errors:
            lines.append(f"| {name} | {len(errors)} | {statistics.median(errors):+.0%} | {sum(abs(error) <= 0.15 for error in errors)} | {why} |")
    return lines


def source_of(row):
    source = row["source"]
    for key, name in (("Parallel Folding", "Parallel Folding"), ("Megatron-Core MoE", "Megatron-Core MoE"), ("MegaScale", "MegaScale-MoE"),
                      ("Bridge", "Megatron-Bridge"), ("ModelZoo", "MoE-ModelZoo"), ("NeMo", "NeMo"), ("Megatron-LM", "Megatron-LM")):
        if key.lower() in source.lower():
            return name
    return "others"


def write_page(results, left_out):
    lines = [HEAD]
    lines += ["| source | rows | median | median of sizes | within 15 % | within 15 % of the source's own median |", "|---|---|---|---|---|---|"]
    by_source = collections.defaultdict(list)
    for one in results:
        by_source[source_of(one["row"]) + ", " + one["row"]["hardware"].upper() + ", " + ("BF16" if one["row"]["precision"] == "bf16" else "FP8")].append(one)
    lines += [summarise(name, by_source[name]) for name in sorted(by_source)] + [summarise("all", results)]
    ranks = compare_rankings(results)
    lines += ["", f"Of {ranks['groups']} groups of layouts that a source compares, ours has the same best in {ranks['best']}; of {ranks['pairs']} pairs that "
              f"differ by over 5 %, the same order in {ranks['agreed']}.", "", *list_classes(results), "", "Left out:", ""]
    lines += [f"- {count} rows: {why}" for why, count in collections.Counter(one["why"] for one in left_out if not one["why"].startswith("refused")).most_common()]
    lines += ["", "| row | model | GPUs | layout | theirs | ours | error | exposed | idle | memory |", "|---|---|---|---|---|---|---|---|---|---|"]
    for one in results:
        row = one["row"]
        unit = "TFLOPS" if one["figure"] == "tflops" else "tokens/s"
        lines.append(f"| {row['id']} | {row['model']} | {row['gpus']} {row['hardware'].upper()} | {describe_layout(row)} | {one['theirs']:,.0f} {unit} | "
                     f"{one['ours']:,.0f} | {one['error']:+.0%} | {one['exposed']:.0%} | {one['idle']:.0%} | {one['memory'] / 2**30:.0f} GiB |")
    refused = [one for one in left_out if one["why"].startswith("refused")]
    if refused:
        lines += ["", "Refused by this program:", "", "| row | why |", "|---|---|"]
        lines += [f"| {one['row']['id']} | {one['why'].removeprefix('refused: ').replace('|', '/')} |" for one in refused]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--write", help="the page")
    parser.add_argument("--only", default="", help="rows whose id has this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    rows = [row for name in ("papers.json", "recipes.json") for row in json.loads((DATA / name).read_text()) if options.only in row["id"]]
    models = json.loads((DATA / "models.json").read_text())
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(lambda row: simulate(options.program, row, models), rows))
    results = [one for one in found if "error" in one]
    left_out = [one for one in found if "error" not in one]
    page = write_page(results, left_out)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1))
    if options.write:
        pathlib.Path(options.write).write_text(page)
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main()
