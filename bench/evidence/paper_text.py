"""What the page of published throughputs says beside its figures: bench/evidence/papers.py writes it."""
import collections

HEAD = """# Published throughputs beside the simulator's

Made by `bench/evidence/papers.py build/tessera --searches --write docs/evidence/papers.md`; the rows, with their sources and quotations, are
in `bench/evidence/papers`, and what in the sources contradicts itself in `bench/evidence/papers/doubts.md`. "Simulated" is what `tessera plan
--explain` says of the row's model, layout and batch, run as its software runs it: with its dispatcher, and with nothing computed beside
exchanges that it does not hide (`--exposed`). "This program" is the error of the same where it hides what it can. Routing is taken as
balanced. Where sources give both tokens and TFLOPS, FLOPs of a token agree within 0.5 % for models of experts, at 131,072 tokens within
0.6 %; Nemotron's are 9 to 12 % more there, those of 2024's dense models 1 to 8 % (attention without its mask).
"""

CONSTANTS = """## What it rests on

Nothing is fitted to a row. All constants, each with its source:

| constant | value | from |
|---|---|---|
| rates of devices, memory and links | `configs/hardware/*.toml` | data sheets; 330 GB/s of NVLink's 450 and 43 of a card's 50, as NCCL reaches on H200s |
| microseconds of an exchange, for each doubling of ranks | 9 in a node, 16 between nodes | four H200s |
| share of a device that an exchange takes | 10 % | two H100s |
| operators' shares of the rates | `kernels.measured` of `h100-ib` | `tessera bench --calibrate` on one H100; other hardware is taken to reach the same shares |

What rows of one software have in common (`bench/evidence/paper_rows.py`), by what is published of it:

| software | run as | because |
|---|---|---|
| Megatron | all-to-all of tokens; with DeepEP or HybridEP once to each node, or to each rank of a node | the rows' notes; Parallel Folding, section 3.2 |
| Megatron without 1F1B overlap | experts' exchanges are exposed | "all-to-all blocks computation" (Megatron-Core MoE, figure 18) |
| Megatron with it | `train.schedule = "merged"` | the same work, section 4.2.3 |
| its full sharding in Parallel Folding | gathers and reductions are exposed, gradients travel in BF16 | "cannot be effectively overlapped" (section 4.2); PyTorch's FSDP reduces in the parameters' format |
| MegaScale-MoE | attention by all-to-all of heads, gradients travel in BF16 | sections 3.1 and 5 |
| Megatron-LM beside it, and its own baseline | exchanges of tensor parallelism and of experts are exposed | section 6.1, table 5 |
| Megatron where a source lists no recipe | overlap and dispatcher as for its model and GPU in table 17 of Megatron-Core MoE | the same authors |
| chunks of stages, where not said | one, or one for each layer, whichever is faster | the sources say that they tuned |
| FP8 by tensors, and by 32 neighbours on Blackwell | scales for rows; dense models keep products' inputs in FP8 | as many passes and bytes; Megatron-Core MoE, section 4.1.3 |

Exchanges by themselves are in table 7 of Megatron-Core MoE: all-to-alls of 8, 16, 32 and 64 H100s take 1.27, 5.77, 8.06 and 9.16 ms, here
1.27, 5.53, 8.27 and 9.66 ms (`src/sim/link_times_test.cc`).
"""


def layout_key(row):
    return tuple(str(row[key]) for key in ("hardware", "gpus", "model", "precision", "sequence_length", "tp", "cp", "pp", "virtual_stages", "ep", "fsdp"))


def spread_of(results):
    """By layout: the largest published figure of Megatron's recipes over the least."""
    figures = collections.defaultdict(list)
    for one in results:
        if one["figure"] == "tokens_per_second":
            figures[layout_key(one["row"])].append(one["theirs"])
    return {key: max(values) / min(values) for key, values in figures.items()}


DENSE = ("Llama2", "Llama3-70B", "Llama3-8B", "Llama3.1", "GPT-1", "GPT-3", "GPT-4", "GPT-7", "GPT3", "Nemotron-8B", "Nemotron-22B", "Nemotron-340B",
         "Qwen3-8B")
UNTIMED = ("Nemotron-3", "Qwen3-Next", "DeepSeek-V4")


def of_megascale(one):
    return "MegaScale-MoE" in one["row"]["source"]


def has_tp_baseline(one):
    return of_megascale(one) and one["row"]["cp"] == 1


def has_few_tokens(row):
    return row["global_batch"] <= (row["dp"] or 0) * (row["micro_batch"] or 1) and row["global_batch"] * row["sequence_length"] < 3e5


# What rows have in common that may explain their errors, the first that fits; and what does, as far as it is known.
CLASSES = [
    ("gpt-oss", lambda one, spread: one["row"]["model"].startswith("GPT-OSS"),
     "Not the layout: one layout's figure is 33,166 tokens/s a GPU in one release, 20,288 in the next (cuDNN, says the source). Attention with sinks is theirs."),
    ("MegaScale-MoE's baselines", lambda one, spread: has_tp_baseline(one),
     "Of one layout Megatron-LM has 151,000 tokens/s, MegaScale-MoE without overlap 213,000 (table 5): 1.41 are kernels (`torch.scatter_add`, section 3.2); against the latter the error is +19 %."),
    ("MegaScale-MoE", lambda one, spread: of_megascale(one),
     "A micro-batch of a stage takes 58 ms, 42 here, of which 4 % are exposed exchanges: computation. There attention and grouped products are a third of a layer's time (section 7)."),
    ("an untrained router's routing", lambda one, spread: (one["row"]["routing"] or "").startswith("natural"),
     "Balanced here. Forced to balance, the source's same layouts are 4 to 24 % faster."),
    ("steps of few tokens", lambda one, spread: has_few_tokens(one["row"]),
     "A micro-batch a rank, 2,048 to 8,192 tokens a GPU: the host's time for each kernel, which the clock does not have."),
    ("operators never timed on an H100", lambda one, spread: one["row"]["model"].startswith(UNTIMED),
     "Mamba-2, the gated delta rule, compressed attention, 22 of 512 experts a token: 70 to 75 % of the roofline, the scan as an H200 took."),
    ("figures that move by over 30 %", lambda one, spread: spread > 1.3,
     "Between releases of one software, with one layout: whole-iteration graphs, fused kernels, regressions."),
    ("offloading here", lambda one, spread: one["copies"] > 0.03,
     "This program takes more memory than there is, and waits for the host's: it keeps weights in BF16 and FP8, theirs in FP8."),
    ("dense models", lambda one, spread: one["row"]["model"].startswith(DENSE),
     "Above: FP8 on GB200s in 2025's releases, and sequences of 32,768 and more, of which 2024's pages give TFLOPS alone. Below: gradients and tensor parallelism, exposed here for up to 37 % of a step."),
    ("long sequences of experts", lambda one, spread: one["row"]["sequence_length"] > 8192,
     "Computation is 85 to 94 % of the step here, at 131,072 tokens most of it attention, for which theirs publish no times."),
    ("full sharding", lambda one, spread: one["row"]["fsdp"], "With nothing hidden; this program hides a third of the step."),
    ("experts over several nodes", lambda one, spread: (one["row"]["ep"] or 1) > 8 and not one["row"]["hardware"].startswith("gb"),
     "Once to each node, merged passes where the source has them."),
    ("GB200, GB300, B200, B300", lambda one, spread: "b" in one["row"]["hardware"], "An H100's shares of the rates: newer kernels reach more of them, older ones less."),
    ("64 experts, 8 a token, in EP 8", lambda one, spread: one["row"]["model"].endswith("G8T8"),
     "Exchanges are a fifth to three quarters of the step; what they take there beyond table 7's rates is not published."),
    ("experts cut by TP, no pipeline", lambda one, spread: (one["row"]["etp"] or 1) > 1 and (one["row"]["pp"] or 1) == 1,
     "Exchanges are half of the step; what is above 15 % has small products (64 experts cut in four)."),
    ("pipelines, experts within a node", lambda one, spread: (one["row"]["pp"] or 1) > 1 and (one["row"]["ep"] or 1) <= 8,
     "Of both signs. One is +82 % (Qwen3-235B in TP 4 on H100s), not explained."),
    ("others", lambda one, spread: True, "-"),
]


def class_of(one, spread):
    return next(name for name, fits, _ in CLASSES if fits(one, spread.get(layout_key(one["row"]), 1)))
