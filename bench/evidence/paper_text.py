"""What the page of published throughputs says beside its figures: bench/evidence/papers.py writes it."""
import collections

HEAD = """# Published throughputs beside the simulator's

Made by `bench/evidence/papers.py build/tessera --searches FILE --write docs/evidence/papers.md`; the rows, with their sources and quotations, are
in `bench/evidence/papers`, and what in the sources contradicts itself in `bench/evidence/papers/doubts.md`. "Simulated" is what `tessera plan
--explain` says of the row's model, layout and batch, run as its software runs it: with its dispatcher, with nothing computed beside exchanges
that it does not hide (`--exposed`), with a host that launches what is in no CUDA graph (`--graphs`, `--launch-us`), and with its kernels where
they are known to differ. "This program" is the error of the same layout as this program runs it. Routing is taken as balanced. Where sources give both tokens and TFLOPS, FLOPs of a token agree within 0.5 % for models of experts, at 131,072 tokens within
0.6 %, and within 1.2 % for those with multi-token prediction; Nemotron-3-Nano's are 7 % more there, those of 2024's dense models 1 to 8 %
(attention without its mask).
"""

CONSTANTS = """## What it rests on

Nothing is fitted to a row; two constants are fitted to many. All constants, each with its source:

| constant | value | from |
|---|---|---|
| rates of devices, memory and links | `configs/hardware/*.toml` | data sheets; 330 GB/s of NVLink's 450 and 43 of a card's 50, as NCCL reaches on H200s |
| microseconds of an exchange, for each doubling of ranks | 9 in a node, 16 between nodes | four H200s |
| share of a device that an exchange takes | 10 % | two H100s |
| what products reach of a Blackwell's rates, over what they reach of an H100's | 3.4 TFLOPS of FP8's rate a watt: 0.76 of a B200's (1,000 W), 0.83 of a B300's (1,100), 0.82 of a GB200's (1,200), 0.95 of a GB300's (1,400) | fitted: to the 30 rows of Llama 3 8B and 70B (median of sizes 3.6 %); the 28 of 405B were not used (5.0 %). One at a time the best products reach 76, 75 and 72 % of the FP8 rates of a B200, a B300 and a GB200, an H100's 71 % (ml-engineering, "maximum achievable matmul FLOPS"): what power leaves of that in a long step is not published |
| the same of kernels that memory binds | 0.86 | cudnn-frontend's times of RMSNorm by three libraries (benchmark/norms, 33 MB and more): GB200s reach 0.85 and GB300s 0.87 of the share that an H200 does |
| microseconds of PyTorch's host for an operator in no graph | 75 | fitted to steps of small micro-batches: some ten kernels of 5 to 10 us |
| of one of these kernels, for each expert | 7.5 | a tenth of that |
| the same of this program, in a graph | 10, 0.6 | one H200 (docs/log.md) |
| operators' shares of the rates | `kernels.measured` of `h100-ib` | `tessera bench --calibrate` on one H100; other hardware is taken to reach the same shares |

What rows of one software have in common (`bench/evidence/paper_rows.py`), by what is published of it:

| software | run as | because |
|---|---|---|
| Megatron | all-to-all of tokens; with DeepEP or HybridEP once to each node, or to each rank of a node | the rows' notes; Parallel Folding, section 3.2 |
| Megatron without 1F1B overlap | experts' exchanges are exposed | "all-to-all blocks computation" (Megatron-Core MoE, figure 18) |
| Megatron with it | `train.schedule = "merged"` | the same work, section 4.2.3 |
| its full sharding in Parallel Folding | gathers and reductions are exposed, gradients travel in BF16 | "cannot be effectively overlapped" (section 4.2); PyTorch's FSDP reduces in the parameters' format |
| Megatron with TE's graphs | all but what depends on the routing is recorded; the host waits for the counts of each layer's tokens | Megatron-Core MoE, sections 4.3.6 and 4.3.7 |
| Megatron without graphs | nothing is recorded | its recipes; Megatron-Core MoE, appendix B.2, where a row says nothing |
| Megatron without whole graphs | its host multiplies and quantizes expert by expert | Megatron-Core MoE, sections 4.3.2 and 5.4.2 |
| Megatron's recipes | compute again what they say, and no more, whatever this program would take; "core_attn" attention, "moe" all of the experts' layer but the product and the exchange back | they fitted; Megatron-LM's `MoELayer` |
| recipes of DeepSeek-V3, Kimi-K2, Qwen3-235B and Llama 3.1 405B | stages as they cut them, embedding and loss counted as layers or by their table | `set_deepseek_v3_pipeline_model_parallel_layout`, `account_for_embedding_in_pipeline_split` |
| Nemotron-3-Super and DeepSeek-V4 | two and one layers of multi-token prediction | their recipes and models; FLOPs of a token |
| dense models' tensor parallelism there | travels piece by piece beside products in as many pieces | Megatron-LM's README, `--tp-comm-overlap` |
| cuDNN's attention on Blackwell, and of software since 2025-09 on Hopper | shares by device, length and format, in FP8 where recipes say so | cudnn-frontend, `benchmark/sdpa_benchmark_training/results`; of latent heads on Hopper table 9 of Megatron-Core MoE |
| output layers in FP8 | twice BF16's speed | recipes (`fp8_output_proj`) |
| rows of experts in FP8, where recipes do not pad the routing | are copied once more before and after the experts | Megatron-Core MoE, section 5.4.1 |
| mamba-ssm's scan | 0.124 of the roofline, its gradient as much | vllm-project/vllm, pull request 27299: 649 us forward on an H100 |
| permutation in Parallel Folding, Megatron-LM and MegaScale-MoE's baselines | a third and a fifth of the memory's rate, as bytes of PyTorch's own kernels are counted | MegaScale-MoE, section 3.2 |
| gpt-oss without whole graphs | adds the bias of its second product in F32, expert by expert | Megatron-LM's `TEGroupedMLP._apply_bias` |
| grouped products on Blackwell in whole graphs | include activations | Megatron-Core MoE, section 4.3.2; `use_transformer_engine_op_fuser` |
| NeMo's Llama 2 of 2024 | tokens are TFLOPS over FLOPs without attention's mask | its own FLOPs formulas |
| MegaScale-MoE | attention by all-to-all of heads, gradients travel in BF16 | sections 3.1 and 5 |
| Megatron-LM beside it, and its own baseline | exchanges of tensor parallelism and of experts are exposed | section 6.1, table 5 |
| Megatron where a source lists no recipe | overlap and dispatcher as for its model and GPU in table 17 of Megatron-Core MoE | the same authors |
| chunks of stages, where not said | one, or one for each layer, whichever is faster | the sources say that they tuned |
| FP8 by tensors, and by 32 neighbours on Blackwell | scales for rows; dense models keep products' inputs in FP8 | as many passes and bytes; Megatron-Core MoE, section 4.1.3 |

Exchanges by themselves are in table 7 of Megatron-Core MoE: all-to-alls of 8, 16, 32 and 64 H100s take 1.27, 5.77, 8.06 and 9.16 ms, here
1.27, 5.53, 8.27 and 9.66 ms (`src/sim/link_times_test.cc`).
HybridEP's calls of 16 and 64 H100s (DeepEP's README_Hybrid-EP: 4,096 tokens of 7,168 elements, top 8, bytes to each node) take 2.2 and 6.6 to
7.5 ms, its kernels alone 1.6 and 6.2; its two exchanges here, one after the other, 2.4 and 7.5.
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
     "In BF16 a third of the step is missing on every GPU, 4,096 tokens a sequence or 8,192: so it is no attention (cuDNN has sinks since 9.13.1). Throughput goes with the watts of a GPU. 26.06.01's regression is of a grouped product (cudnn-frontend, issue 256): +97 %."),
    ("MegaScale-MoE's baselines", lambda one, spread: has_tp_baseline(one),
     "Of one layout Megatron-LM has 151,000 tokens/s, MegaScale-MoE without overlap 213,000 (table 5): 1.41 are kernels, of which permutation is a tenth; against the latter the error is +12 %."),
    ("MegaScale-MoE", lambda one, spread: of_megascale(one),
     "A micro-batch of a stage takes 58 ms, 43 here, of which 4 % are exposed exchanges: computation. There attention and grouped products are a third of a layer's time, here 64 %; section 7 names waits within grouped products, unequal experts and late launches, without figures."),
    ("an untrained router's routing", lambda one, spread: (one["row"]["routing"] or "").startswith("natural"),
     "Balanced here. Forced to balance, the source's same layouts are 4 to 24 % faster."),
    ("steps of few tokens", lambda one, spread: has_few_tokens(one["row"]),
     "A micro-batch a rank, 2,048 to 8,192 tokens a GPU: half of the step is the host's here. Moonlight's would take 170 us an operator: recomputing an activation alone costs its host 0.35 ms a layer; its TP 2 is a known regression of 26.06."),
    ("operators never timed on an H100", lambda one, spread: one["row"]["model"].startswith(UNTIMED),
     "Gradients of mamba-ssm's scan, convolutions, compressed attention, gated delta rules, routers of 22 in 512: 70 to 75 % of the roofline where nothing is published. Super's rows with TP 2 (GB200s, +50 %; with TP 1 +30 %) have a known regression of 26.04 and 26.06 (Megatron-Bridge's known issues)."),
    ("figures that move by over 30 %", lambda one, spread: spread > 1.3,
     "Between releases of one software, with one layout: fused kernels, regressions. Experts in MXFP8 before 2026-06 are 20 to 40 % slower than after, with graphs or without: rows padded by kernels of their own are a third of that here."),
    ("offloading here", lambda one, spread: one["copies"] > 0.03,
     "This program takes more memory than there is, and waits for the host's: it keeps weights in BF16 and FP8, theirs in FP8."),
    ("dense models", lambda one, spread: one["row"]["model"].startswith(DENSE),
     "Above: sequences of 16,384 and more with 2024's attention, GPT models on H100s, whose products reach less than this program's. Below: tensor parallelism over 8 ranks, exposed for 27 % of a step."),
    ("long sequences of experts", lambda one, spread: one["row"]["sequence_length"] > 8192,
     "Attention around a ring takes what plain attention of its size does; theirs is up to 20 % faster on GB200s, as in table 9."),
    ("full sharding", lambda one, spread: one["row"]["fsdp"], "With nothing hidden; this program hides a third of the step. Below: theirs hides some."),
    ("experts over several nodes", lambda one, spread: (one["row"]["ep"] or 1) > 8 and not one["row"]["hardware"].startswith("gb"),
     "Once to each node, merged passes where the source has them."),
    ("GB200, GB300, B200, B300", lambda one, spread: "b" in one["row"]["hardware"], "An H100's shares of the rates, by watts: of both signs, models with large experts below (Qwen3-235B, DeepSeek-V3 on GB200s), Qwen3-30B above."),
    ("64 experts, 8 a token, in EP 8", lambda one, spread: one["row"]["model"].endswith("G8T8"),
     "Exchanges are a fifth to three quarters of the step; what they take there beyond table 7's rates is not published."),
    ("experts cut by TP, no pipeline", lambda one, spread: (one["row"]["etp"] or 1) > 1 and (one["row"]["pp"] or 1) == 1,
     "Exchanges are half of the step; what is above 15 % has small products (64 experts cut in four)."),
    ("pipelines, experts within a node", lambda one, spread: (one["row"]["pp"] or 1) > 1 and (one["row"]["ep"] or 1) <= 8,
     "Of both signs. One is +77 % (Qwen3-235B in TP 4 on H100s), not explained."),
    ("others", lambda one, spread: True, "-"),
]


def class_of(one, spread):
    return next(name for name, fits, _ in CLASSES if fits(one, spread.get(layout_key(one["row"]), 1)))
