#!/usr/bin/env python3
"""Runs Tessera and its rivals alternately on one GPU and prints the table of ratios.

usage: ratios.py [--build build] [--only step,layer,rivals,memory,grouped,block_sparse,attention,kernels]
                 [--shapes qwen3,fine,mixtral,dmoe_small] [--json FILE]

step:       a training step of four micro-batches of 4 x 4096 tokens, `tessera bench` (FP32 master weights, moments and
            gradient sums) beside Hugging Face's (BF16 throughout, hf_step.py), and real routing beside forced balance;
layer:      a whole MoE layer, forward and backward, of 32,768 tokens beside Hugging Face's (hf_layer.py);
rivals:     the same beside what else is installed, and which of it is not (moe_rivals.py);
memory:     what a layer keeps for its backward pass, beside the formula of MegaScale-MoE (section 4.1), for the values
            that it names as cheap to compute again, and what that costs a step;
grouped:    the grouped products of the experts beside torch._grouped_mm, and beside CUTLASS's where the build has them
            (grouped_mm.py);
block_sparse: an MoE layer with block-sparse experts beside the same with grouped ones, by time, and each block-sparse
            product beside the grouped one of the same rows and beside a large dense product;
attention:  beside cuDNN's through PyTorch (attention_torch.py);
kernels:    each kernel's share of its ceiling in the same run: a copy's bandwidth, or a large product's rate.
A target is the least that is wanted. Each program is a process of its own; a failure is told and its rows are left out.
"""
import argparse
import functools
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
# name: hf_layer.py's name, ours, least over Hugging Face's, least TFLOPS forward and backward
LAYERS = {
    "Qwen3-30B-A3B": ("qwen3", ["--model.preset=qwen3-30b-a3b"], 1.5, 500, 500),
    "fine-grained": ("fine", ["--model.preset=qwen3-30b-a3b", "--model.hidden_size=1536", "--moe.inner_size=256"],
                     None, 420, 450),
    "Mixtral 8x7B": ("mixtral", ["--model.preset=mixtral-8x7b"], None, None, None),
}
# The layers of MegaBlocks' own models besides; name: short name, ours.
SPARSE_LAYERS = {name: entry[:2] for name, entry in LAYERS.items() if entry[0] != "fine"}
SPARSE_LAYERS["dMoE-Small"] = ("dmoe_small", ["--model.preset=megablocks-small"])
SPARSE_TARGETS = {128: 0.95, 64: 0.85}  # by block size, least of the grouped products' speed
LAYER_BATCH = ["--model.vocab_size=32768", "--data.sequence_length=4096", "--train.micro_batch=8",
               "--train.precision=bf16"]
# Everything is kept.
KEEPING = ("--moe.memory_efficient=false", "--moe.fuse_gather=never")
# Values that kernels bound by memory make, and from which others that must be kept for that.
CHEAP = {"attn_norm": "hidden_mid", "mlp_norm": "hidden_mid", "q_rotated": "q", "k_rotated": "k",
         "expert_in": "hidden_mid", "expert_act": "expert_pre"}
LARGEST_CHEAP = ["expert_in"]  # T K rows of tokens
BATCH = ["--model.vocab_size=32768", "--data.sequence_length=4096", "--train.micro_batch=4", "--train.global_batch=16",
         "--train.precision=bf16"]


def run(command):
    """The standard output, or None after saying what failed."""
    print("+ " + " ".join(map(str, command)), file=sys.stderr, flush=True)
    try:
        done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    except OSError as error:
        print(f"  {error}", file=sys.stderr)
        return None
    if done.returncode != 0:
        print(f"  ended with code {done.returncode}", file=sys.stderr)
        return None
    return done.stdout


def from_json(text):
    return json.loads(text) if text else None


def bench_step(build, shape, *more):
    return from_json(run([build / "tessera", "bench", "--json", *shape, *BATCH, *more]))


def of_shapes(table, shapes):
    """The entries of STEPS or LAYERS whose short names are asked for."""
    return ((name, entry) for name, entry in table.items() if entry[0] in shapes)


def step_rows(build, options):
    for name, (rival, shape, target) in of_shapes(STEPS, options.shapes):
        ours = bench_step(build, shape)
        theirs = from_json(run([sys.executable, HERE / "hf_step.py", rival, "--micro-batches", 4, "--json"]))
        if ours and theirs:
            yield (f"step, {name}: tokens/s over Hugging Face's", ours["tokens_per_second"] / theirs["tokens_per_second"],
                   target, f"{ours['tokens_per_second']:.0f} of {theirs['tokens_per_second']:.0f}, "
                   f"{ours['tflops']:.0f} TFLOPS, {ours['memory_used'] / 1e9:.1f} GB")
        balanced = bench_step(build, shape, "--moe.force_balanced=true")
        if ours and balanced:
            yield (f"step, {name}: dropless over forced balance", balanced["median_seconds"] / ours["median_seconds"],
                   0.95, f"{1e3 * ours['median_seconds']:.1f} ms and {1e3 * balanced['median_seconds']:.1f} ms")


def bench_moe_layer(build, shape, *more):
    return from_json(run([build / "tessera", "bench", "--layer=moe", "--json", *shape, *LAYER_BATCH, *more]))


@functools.cache
def bench_layer(build, layer):
    return bench_moe_layer(build, LAYERS[layer][1])


def seconds(layer):
    return layer["forward"]["median_seconds"] + layer["backward"]["median_seconds"]


def compare_layers(layer, ours, theirs, target):
    """The row of a layer beside a rival's."""
    times = [1e3 * run[part]["median_seconds"] for run in (ours, theirs) for part in ("forward", "backward")]
    return (f"MoE layer, {layer}: forward + backward over {theirs['who']}'s", seconds(theirs) / seconds(ours), target,
            "ms forward and backward: {:.2f} and {:.2f}, theirs {:.2f} and {:.2f}".format(*times))


def layer_rows(build, options):
    for layer, (rival, _, over_rival, *tflops) in of_shapes(LAYERS, options.shapes):
        ours = bench_layer(build, layer)
        theirs = from_json(run([sys.executable, HERE / "hf_layer.py", rival, "--json"]))
        if ours and theirs:
            yield compare_layers(layer, ours, theirs, over_rival)
        for part, least in zip(("forward", "backward"), tflops if ours else ()):
            yield (f"MoE layer, {layer}: TFLOPS {part}", ours[part]["tflops"], least,
                   f"of {ours['matrix_peak_tflops']:.0f} of a large product")


def rivals_rows(build, options):
    for layer, (shape, *_) in of_shapes(LAYERS, options.shapes):
        for name in options.rivals:
            theirs = from_json(run([sys.executable, HERE / "moe_rivals.py", name, shape, "--json"]))
            ours = bench_layer(build, layer)
            if ours and theirs:
                yield compare_layers(layer, ours, theirs, None)


def kept_bytes(build, shape, *more):
    """What one MoE layer keeps for its backward pass: what the third of them adds."""
    totals = []
    for layers in (2, 3):
        memory = from_json(run([build / "tessera", "inspect", "--memory", "--json", *shape, *BATCH,
                                f"--model.num_layers={layers}", "--run.device=cuda", *more]))
        if memory is None:
            return None
        totals.append(memory["saved activations"] + memory["hidden states"])
    return totals[1] - totals[0]


def formula_bytes(build, shape):
    """MegaScale-MoE's sums for all activations of a layer and for those that it keeps, in BF16, on one GPU; its queries
    are as wide as the hidden state, here they are `wide` times that."""
    text = run([build / "tessera", "inspect", "--program", *shape, *BATCH, "--model.num_layers=1", "--run.device=cuda"])
    if text is None:
        return None
    dim = lambda pattern: [int(size) for size in re.search(pattern, text).groups()]
    tokens, hidden = dim(r":hidden \w+ \[(\d+), (\d+)\]")
    wide, narrow = dim(r":q \w+ \[\d+, (\d+)\]")[0] / hidden, dim(r":k \w+ \[\d+, (\d+)\]")[0] / hidden
    top_k, inner = dim(r":probs \w+ \[\d+, (\d+)\]")[0], dim(r":expert_act \w+ \[[^,]*, (\d+)\]")[0] / hidden
    everything = 2 + 2 * top_k + 3 * top_k * inner + 7 + 5 * wide + 5 * narrow
    kept = 2 * top_k * inner + 2 + 2 * wide + 2 * narrow
    return 2 * tokens * hidden * everything, 2 * tokens * hidden * kept


def cheap_values(build, shape):
    """Those of CHEAP that a layer keeps unless told otherwise."""
    text = run([build / "tessera", "inspect", "--program", *shape, *BATCH, "--model.num_layers=1", "--run.device=cuda"])
    kept = set(re.findall(r"%\d+:(\S+) \w+ \[[^\]]*\] \*", text or ""))
    return [name for name, source in CHEAP.items() if {name, source} <= kept]


def memory_rows(build, options):
    for name, (_, shape, _) in of_shapes(STEPS, options.shapes):
        again = "--train.recompute=" + json.dumps(cheap_values(build, shape))
        largest = "--train.recompute=" + json.dumps(LARGEST_CHEAP)
        plain, late, chosen, few = (kept_bytes(build, shape, *more)
                                    for more in ((), KEEPING, (again,), (largest,)))
        formulas = formula_bytes(build, shape)
        if None in (plain, late, chosen, few, formulas):
            continue
        everything, kept = formulas
        gib = lambda size: f"{size / 2**30:.3f} GiB"
        yield (f"memory, {name}: part of a layer's activations by the papers' formula that is not kept",
               1 - chosen / everything, 0.45, f"{gib(chosen)} kept of {gib(everything)}; by the formula {gib(kept)}")
        yield (f"memory, {name}: the same of what the backward pass without any choice needs", 1 - chosen / late, None,
               f"of {gib(late)}; with the probability early and nothing computed again {gib(plain)}")
        yield f"memory, {name}: the papers' formula over what is kept", kept / chosen, 0.98, ""
        yield (f"memory, {name}: not kept with the largest cheap value alone computed again", 1 - few / everything, 0.45,
               f"{gib(few)} kept")
        steps = [bench_step(build, shape, *more) for more in (KEEPING, (), (largest,), (again,))]
        for what, step in zip(("the probability early", "the largest cheap value computed again",
                               "cheap values computed again"), steps[1:]):
            if step and steps[0]:
                yield (f"memory, {name}: step time of keeping everything over that with {what}",
                       steps[0]["median_seconds"] / step["median_seconds"], 0.995,
                       f"{1e3 * steps[0]['median_seconds']:.1f} and {1e3 * step['median_seconds']:.1f} ms, "
                       f"{steps[0]['memory_used'] / 1e9:.1f} and {step['memory_used'] / 1e9:.1f} GB in use")


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def best_of_cutlass(tflops, product):
    """The highest rate of the variants that do the same; None where there are none."""
    added = product.endswith("+=")
    return max((rate for name, rate in tflops.items() if name.startswith("cutlass") and name.endswith("+=") == added),
               default=None)


def grouped_rows(build, _):
    cutlass = build / "bench" / "libgrouped_cutlass.so"
    text = run([sys.executable, HERE / "grouped_mm.py", build / "bench" / "libgrouped_cuda.so",
                *(["--cutlass", cutlass] if cutlass.exists() else [])]) or ""
    rates, ratios, over_cutlass = {}, {}, {}
    for line in text.splitlines():
        entry = json.loads(line) if line.startswith("{") else {}
        tflops = entry.get("tflops", {})
        for product, rate in tflops.items():
            if product == "torch" or product.startswith("cutlass"):
                continue
            rates.setdefault(product, {}).setdefault(entry["shape"], {})[entry["skewed"]] = rate
            ratios.setdefault(product, []).append(rate / tflops["torch"])
            best = best_of_cutlass(tflops, product)
            if best:
                over_cutlass.setdefault(product, []).append(rate / best)
    cells = [ratio for product, values in ratios.items() if product != "wgrad+=" for ratio in values]
    if cells:
        yield (f"grouped products over torch._grouped_mm, geometric mean of {len(cells)} cells", geometric_mean(cells),
               1.10, "")
        yield "  the least of them", min(cells), 0.97, f"{sum(ratio < 0.97 for ratio in cells)} are below 0.97"
    for product, values in ratios.items():
        skewed = [rate[True] / rate[False] for rate in rates[product].values() if len(rate) == 2]
        yield f"grouped product {product} over torch._grouped_mm", geometric_mean(values), None, f"least {min(values):.3f}"
        if skewed:
            yield (f"grouped product {product}, skewed routing over balanced", geometric_mean(skewed), 0.95,
                   f"least {min(skewed):.3f}")
    for product, values in over_cutlass.items():
        yield (f"grouped product {product} over CUTLASS's best of each cell", geometric_mean(values), None,
               f"least {min(values):.3f}")


def sparse_layer_rows(build, options):
    for layer, (_, shape) in of_shapes(SPARSE_LAYERS, options.shapes):
        grouped = bench_moe_layer(build, shape, "--moe.experts=grouped")
        for block, least in SPARSE_TARGETS.items():
            sparse = bench_moe_layer(build, shape, "--moe.experts=block_sparse", f"--moe.block_size={block}")
            for part in ("forward", "backward") if sparse and grouped else ():
                times = [1e3 * which[part]["median_seconds"] for which in (sparse, grouped)]
                yield (f"MoE layer, {layer}, blocks of {block}: grouped {part} time over block-sparse",
                       times[1] / times[0], least, "{:.2f} ms, grouped {:.2f} ms".format(*times))


def block_sparse_rows(build, options):
    yield from sparse_layer_rows(build, options)
    shapes = [shape for _, (shape, _) in of_shapes(SPARSE_LAYERS, options.shapes)]
    text = run([build / "bench" / "block_sparse_cuda_bench", *shapes]) if shapes else None
    for at in map(json.loads, (text or "").splitlines()):
        yield ("product {product}, {shape}, blocks of {block}: over the grouped one".format(**at),
               at["tflops"] / at["grouped"], SPARSE_TARGETS[at["block"]],
               "{:.0f} TFLOPS, {:.3f} of a large product".format(at["tflops"], at["tflops"] / at["large"]))


def attention_rows(build, _):
    text = run([sys.executable, HERE / "attention_torch.py", build / "bench" / "attention_cuda_bench"]) or ""
    ratios = {}
    for line in text.splitlines():
        entry = json.loads(line) if line.startswith("{") else {}
        for part, ratio in entry.get("over torch", {}).items():
            ratios.setdefault((entry["who"], part), []).append(ratio)
    for (who, part), values in ratios.items():
        yield f"attention {part}, {who}, over PyTorch's", geometric_mean(values), None, f"least {min(values):.2f} of {len(values)} shapes"


def kernels_rows(build, _):
    for program, ceiling, least in (("elementwise_cuda_bench", "a copy's bandwidth", 0.85),
                                    ("routing_cuda_bench", "a copy's bandwidth", 0.85),
                                    ("products_cuda_bench", "a large product's rate", None)):
        shape = ""
        for line in (run([build / "bench" / program]) or "").splitlines():
            heading = re.match(r"T \d.*", line)
            shape = f" ({heading[0]})" if heading else shape
            found = re.match(r" *(\S.*?)  +(.*?) +([\d.]+) %( of a copy)?$", line)
            if found:
                note = re.sub(r"^([\d.]+) +(\d+)$", r"\1 us, \2 GB/s", found[2])
                yield f"kernel {found[1]}{shape}, share of {ceiling}", float(found[3]) / 100, least, " ".join(note.split())


PARTS = {"step": step_rows, "layer": layer_rows, "rivals": rivals_rows, "memory": memory_rows, "grouped": grouped_rows,
         "block_sparse": block_sparse_rows, "attention": attention_rows, "kernels": kernels_rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=HERE.parent.parent / "build")
    names = lambda text: text.split(",")
    shapes = [entry[0] for entry in {**LAYERS, **SPARSE_LAYERS}.values()]
    parser.add_argument("--only", type=names, default=list(PARTS), help="parts, by commas")
    parser.add_argument("--shapes", type=names, default=shapes, help="of steps and layers, by commas")
    parser.add_argument("--rivals", type=names, default=["torchtitan", "megablocks", "megatron", "liger", "sonicmoe"],
                        help="of moe_rivals.py, by commas")
    parser.add_argument("--json", type=pathlib.Path, help="a file for the rows")
    options = parser.parse_args()
    for what, found, known in (("parts", options.only, PARTS), ("shapes", options.shapes, shapes)):
        if set(found) - set(known):
            parser.error(f"unknown {what} {sorted(set(found) - set(known))}; there are {', '.join(known)}")
    rows = []
    print("| what | measured | target | |\n|---|---|---|---|")
    for part in options.only:
        for row in PARTS[part](options.build, options):
            what, measured, target, note = row
            print(f"| {what} | {measured:.4g} | {'' if target is None else f'{target:.4g}'} | {note} |", flush=True)
            rows.append(row)
    if options.json:
        keys = ("what", "measured", "target", "note")
        options.json.write_text(json.dumps([dict(zip(keys, row)) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
