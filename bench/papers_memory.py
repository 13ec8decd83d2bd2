#!/usr/bin/env python3
"""Computes tables 3, 4 and 5 of "Scalable Training of Mixture-of-Experts Models with Megatron Core" as Tessera plans the same runs.

  bench/papers_memory.py build/tessera [--write docs/evidence/memory.md]

Nothing is trained and no GPU is needed, but the program must have been built with CUDA: every figure of ours is one of
`tessera inspect --memory --json`. GB are 10^9 bytes, as in the paper. Without --write the page goes to standard output.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys

GB = 1e9
STATE = ["weights", "gradients", "optimizer"]
ACTIVATIONS = ["saved activations", "hidden states", "working memory", "inputs"]

COMMON = ["--run.device=cuda", "--train.precision=bf16", "--data.sequence_length=4096", "--train.micro_batch=1", "--train.memory_limit=none",
          "--parallel.pipeline_schedule=interleaved"]
DEEPSEEK_MODEL = ["--model.preset=deepseek-v3", "--model.mtp_layers=1"]
# 61 layers and one of multi-token prediction in 16 chunks.
DEEPSEEK_PP4 = [*COMMON, *DEEPSEEK_MODEL, "--ranks=256", "--train.global_batch=8192", "--parallel.pp=4", "--parallel.ep=64",
                "--parallel.pipeline_chunks=4", "--parallel.pipeline_layout=Et*3|(tttt|)*14ttmL"]
# The same in 32 chunks. Each expert gets its share at most: what is offloaded has its bounds.
DEEPSEEK_PP8 = [*COMMON, *DEEPSEEK_MODEL, "--ranks=256", "--train.global_batch=4096", "--parallel.pp=8", "--parallel.ep=32",
                "--parallel.pipeline_chunks=4", "--parallel.pipeline_layout=Et*2|(tt|)*29tm|L", "--moe.capacity_factor=1"]
QWEN = [*COMMON, "--model.preset=qwen3-30b-a3b", "--model.num_layers=94", "--model.hidden_size=4096", "--model.num_heads=64",
        "--moe.inner_size=1536", "--ranks=256", "--train.global_batch=8192", "--parallel.pp=4", "--parallel.pipeline_chunks=12",
        "--parallel.pipeline_layout=Et|(tt|)*46tL", "--moe.capacity_factor=1"]


class Planner:
    """Runs of the program, each once."""

    def __init__(self, program):
        self.program, self.known = program, {}

    def text(self, arguments):
        """What `tessera inspect` prints; exits where it is refused."""
        command = [self.program, "inspect", *arguments]
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            sys.exit(f"papers_memory: {' '.join(command)} failed: {done.stderr.strip()[-900:]}")
        return done.stdout

    def stages(self, arguments):
        """Bytes by component of the first rank of each pipeline stage."""
        key = tuple(arguments)
        if key not in self.known:
            found = json.loads(self.text(["--memory", "--json", *arguments]))
            self.known[key] = found if isinstance(found, list) else [found]
        return self.known[key]

    def most(self, arguments, parts):
        """The stage that takes the most of these components, and its bytes."""
        sums = [sum(stage[part] for part in parts) for stage in self.stages(arguments)]
        return max(range(len(sums)), key=sums.__getitem__), max(sums)

    def slowest(self, arguments):
        """Estimated seconds of a step's passes, of the stage that takes the longest."""
        return max(stage["pass_seconds"] for stage in self.stages(arguments))


def gigabytes(number):
    return f"{number / GB:.1f} GB"


def table(head, rows):
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)])


def in_flight(saved, passes):
    """The mean of stages' saved bytes, of which only the share that passes in flight need is counted."""
    return sum(one * alive / places for one, (alive, places) in zip(saved, passes)) / len(passes)


def components(planner, passes):
    """Table 3: a row for each component, with all stages; ratios are of their mean."""
    stages = planner.stages(DEEPSEEK_PP4)
    unused = sum(stage["saved activations"] for stage in stages) / len(stages) - in_flight(
        [stage["saved activations"] for stage in stages], passes)
    theirs = [("weights and gradients", ["weights", "gradients"], 36.4), ("main weights and optimizer states", ["optimizer"], 32.1),
              ("activations", ACTIVATIONS, 131.0), ("total", [*STATE, *ACTIVATIONS], 199.5)]
    rows = []
    for name, parts, paper in theirs:
        own = [sum(stage[part] for part in parts) for stage in stages]
        mean = sum(own) / len(own)
        alone = mean - unused if "saved activations" in parts else mean
        rows.append([name, f"{paper:.1f} GB", *(gigabytes(one) for one in own), f"{mean / GB / paper:.2f}", f"{alone / GB / paper:.2f}"])
    return table(["component", "theirs", *(f"stage {i}" for i in range(len(stages))), "mean / theirs", "in flight alone"], rows)


def savings(planner, passes):
    """Table 4, and section 4.1.2's permutation: what each technique takes off the saved activations."""
    kept = planner.stages(DEEPSEEK_PP4)
    rows = []
    for name, options, paper in [
            ("MLA up-projection", "--train.recompute=q_rotated,k,v", 30.4),
            ("activation function", "--train.recompute=expert_act,moe.shared_act,mlp_act", 3.8),
            ("layer norms", "--train.recompute=attn_norm,mlp_norm", 8.2),
            ("all three", "--train.recompute=q_rotated,k,v,expert_act,moe.shared_act,mlp_act,attn_norm,mlp_norm", 42.4),
            ("memory-efficient permutation", "--moe.memory_efficient=false", 26.3)]:
        other = planner.stages([*DEEPSEEK_PP4, options])
        saved = [abs(a["saved activations"] - b["saved activations"]) for a, b in zip(kept, other)]
        mean, alone = sum(saved) / len(saved), in_flight(saved, passes)
        option = options.removeprefix("--")
        rows.append([name, f"`{option}`" + (" beside the default" if "memory_efficient" in option else ""), f"{paper:.1f} GB",
                     *(gigabytes(one) for one in saved), f"{mean / GB / paper:.2f}", f"{alone / GB / paper:.2f}"])
    return table(["technique", "here", "theirs", *(f"stage {i}" for i in range(len(kept))), "mean / theirs", "in flight alone"], rows)


def offloading(planner):
    """Table 5: the stage that takes the most, without what NCCL and CUDA take; times are of passes, by estimate."""
    whole = [*STATE, *ACTIVATIONS]
    rows = []

    def add(name, before, after, paper_before, paper_after, paper_time):
        stage, least = planner.most(before, whole)
        _, most = planner.most(after, whole)
        on_host = planner.stages(after)[stage].get("offloaded", 0)
        slower = planner.slowest(after) / planner.slowest(before)
        rows.append([name, f"{paper_before} to {paper_after} GB, {100 * (paper_after / paper_before - 1):+.1f} %", paper_time,
                     f"{gigabytes(least)} to {gigabytes(most)}, {100 * (most / least - 1):+.1f} %", f"{100 * (1 / slower - 1):+.1f} %",
                     gigabytes(on_host)])

    for names in ("q_rotated", "attn_out,q_rotated", "all"):
        add(f"DeepSeek-V3, `train.offload={names}`", DEEPSEEK_PP8, [*DEEPSEEK_PP8, f"--train.offload={names}"], 169, 151, "-1.6 %")
    before = [*QWEN, "--parallel.tp=2", "--parallel.ep=16"]
    for names in ("attn_out,q_rotated", "all"):
        add(f"Qwen3-235B, TP 2 and EP 16 to TP 1, EP 64, `train.offload={names}`", before,
            [*QWEN, "--parallel.tp=1", "--parallel.ep=64", f"--train.offload={names}"], 172, 175, "+15.0 %")
    return table(["run", "theirs, GB200, MXFP8", "throughput", "ours, BF16", "passes by estimate", "on the host"], rows)


def stage_passes(planner, arguments):
    """Of each stage, the most chunks' passes in flight at once, and the sum of each chunk's own most."""
    found = []
    for line in planner.text(["--schedule", *arguments]).splitlines():
        words = line.split()
        if words[:1] != ["stage"]:
            continue
        now, most, in_all = {}, {}, 0
        for step in words[2:]:
            chunk = step[1:].split(".")[0]
            now[chunk] = now.get(chunk, 0) + {"F": 1, "B": -1}[step[0]]
            most[chunk] = max(most.get(chunk, 0), now[chunk])
            in_all = max(in_all, sum(now.values()))
        found.append((in_all, sum(most.values())))
    return found


def deepseek_numbers():
    """What explanations take from DeepSeek-V3's shapes: parameters of a rank's MoE layer with 4 experts, bytes of a micro-batch."""
    hidden, heads, tokens, inner = 7168, 128, 4096, 2048
    query, value, rank_q, rank_kv, rope = 192, 128, 1536, 512, 64
    experts = 4 * 3 * hidden * inner
    attention = (hidden * (rank_q + rank_kv + rope) + rank_q * heads * query + rank_kv * heads * (query - rope + value) +
                 heads * value * hidden)
    others = attention + 256 * hidden + 3 * hidden * inner
    rows = 8 * tokens
    return {"layers_state": f"{15 * 6 * (experts + others) / GB:.1f} and {15 * (12 * experts + 12 / 64 * others) / GB:.1f} GB",
            "embedding": gigabytes(6 * 129280 * hidden),
            "qkv": f"{2 * tokens * heads * (2 * query + value) / GB:.2f} GB",
            "act": f"{2 * rows * inner / GB:.2f} GB", "expert_out": f"{2 * rows * hidden / GB:.2f} GB",
            "norms": f"{2 * 2 * tokens * hidden / GB:.2f} GB"}


def join_numbers(numbers):
    words = [str(number) for number in numbers]
    return f"{', '.join(words[:-1])} and {words[-1]}"


PAGE = """# Memory beside a paper's

What Tessera plans for runs whose memory "Scalable Training of Mixture-of-Experts Models with Megatron Core" reports. Nothing was
trained: ours are the figures of `tessera inspect --memory`, which the peaks of runs match within 3 %. `bench/papers_memory.py`
prints all of this page. GB are 10^9 bytes, as there. A stage's figures are those of its first rank, without what NCCL and CUDA graphs
take, which the paper does not count.

## Table 3: by component

DeepSeek-V3 with one layer of multi-token prediction, BF16, 4,096 tokens in a micro-batch, 256 GPUs: TP 1, PP 4, EP 64, 4 chunks
in a stage. The paper does not say where layers are nor whose figures these are; here it is `Et*3|(tttt|)*14ttmL`.

{components}

- Weights, gradients and optimizer: theirs are those of 15 MoE layers without embedding and head, which come to {layers_state}
  at 6 bytes for a parameter and 12 for its state, of all but the experts shared by 64 ranks. Stages here have 15 or 16 layers, the
  first and last also the embedding or the head, {embedding} each.
- Activations: at the most {alive} chunks' passes are in flight in the four stages, with Megatron Core's interleaved 1F1B as with
  ours. But each place of a chunk keeps its address for a whole step, and the most of each chunk's own passes add up to {places}. That, and
  not what a layer keeps, is the difference: the last column has memory for what is in flight alone.

## Table 4: by technique

What each takes off the saved activations of that run.

{savings}

The last column again counts what is in flight alone. For a layer and micro-batch:

- Up-projection: queries, keys and values, {qkv}, are computed again from the latent values.
- Activation function: the routed experts' alone are {act}, for {alive_layers} layers' passes in stage 0 more than the paper's
  figure. Which part Megatron Core would keep in any case, it does not say.
- Layer norms: those in front of attention and experts, {norms}.
- Permutation: without the option each expert's output rows are kept, {expert_out}.

## Table 5: offloading

Theirs keep MXFP8, ours BF16. Here experts have a capacity of their balanced share (`moe.capacity_factor=1`), since values that are
offloaded have memory, and are copied, at their bounds: without a capacity those of the worst routing. The figures are of the stage that takes
the most. DeepSeek-V3: TP 1, PP 8, EP 32, 4 chunks in a stage, `Et*2|(tt|)*29tm|L`. Qwen3-235B: PP 4 and 12 chunks, as in the paper's
table 20; table 5 does not say.

{offloading}

- DeepSeek-V3: `all` offloads whatever can be back in time, several times what they do; some names alone save about as much as theirs
  for less time. Estimates have each stage's own passes, not what it waits for others.
- Qwen3-235B: with TP 2 ours keep half of a layer's values on either rank, so there is less before, and offloading has to bring
  more away to come back to that. How the paper's 172 GB divide, and their PP, is not said. The estimate leaves out much of what
  smaller TP saves on a cluster, so passes become hardly shorter.
"""


def write_page(planner):
    passes = stage_passes(planner, DEEPSEEK_PP4)
    numbers = deepseek_numbers()
    return PAGE.format(components=components(planner, passes), savings=savings(planner, passes), offloading=offloading(planner),
                       alive=join_numbers(alive for alive, _ in passes), places=join_numbers(places for _, places in passes),
                       alive_layers=4 * passes[0][0], **numbers)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", default="build/tessera")
    parser.add_argument("--write", type=pathlib.Path, help="a file for the page")
    options = parser.parse_args()
    page = write_page(Planner(options.program))
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(page)
    else:
        print(page, end="")


if __name__ == "__main__":
    main()
