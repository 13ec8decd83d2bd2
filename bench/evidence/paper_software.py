"""How the software of rows of bench/evidence/papers runs a step, by what is published of it: options of `tessera plan --explain`."""

from paper_kernels import HOPPER, attention_shares, scan_shares

# What exchanges of experts' tokens are called here, and those of weights and gradients.
TOKENS = ["ep", "experts", "etp"]
WEIGHTS = ["dense_replicas", "expert_replicas"]


def source_of(row):
    source = row["source"]
    for key, name in (("Parallel Folding", "Parallel Folding"), ("Megatron-Core MoE", "Megatron-Core MoE"), ("MegaScale", "MegaScale-MoE"),
                      ("Bridge", "Megatron-Bridge"), ("ModelZoo", "MoE-ModelZoo"), ("NeMo", "NeMo"), ("Megatron-LM", "Megatron-LM")):
        if key.lower() in source.lower():
            return name
    return "others"


def notes_of(row):
    return (row["note"] or "").lower()


# What has 1F1B overlap and dispatchers that send a token once to each rank or node; others came before them.
NEW_MEGATRON = ("Megatron-Bridge", "MoE-ModelZoo", "Megatron-Core MoE")
# Where a source lists neither: table 17 of Megatron-Core MoE has DeepEP or HybridEP throughout, and 1F1B overlap for these.
OVERLAPPED = {("DeepSeek-V3", "h100"), ("DeepSeek-V3", "gb300"), ("Qwen3-235B", "h100"), ("Qwen3-235B", "gb200"), ("Qwen3-235B", "gb300")}


def lists_recipe(row):
    """Whether the row's note has what its recipe sets, so that what it lacks is not set."""
    return any(word in notes_of(row) for word in ("moe_flex_dispatcher_backend", "cuda_graph_impl", "moe_a2a_overlap"))


def merges(row):
    """Whether exchanges of one micro-batch's tokens are hidden under another's computation."""
    note = notes_of(row)
    if row["fsdp"] or "no 1f1b" in note or "overlap off" in note or "no overlap" in note:
        return False
    if "1f1b" in note or "moe_a2a_overlap true" in note or "ep overlap on" in note:
        return True
    said = lists_recipe(row) or "deepep" in note or "hybridep" in note or source_of(row) not in NEW_MEGATRON
    return not said and any(row["model"].startswith(model) and row["hardware"] == hardware for model, hardware in OVERLAPPED)


def dispatcher_of(row):
    """What carries tokens to experts: what the source says, or what its software has where that is not set."""
    ranks = row["ep"] or 1
    if ranks == 1 or source_of(row) == "MegaScale-MoE":
        return []
    note = notes_of(row)
    once = "deepep" in note or "hybridep" in note or (source_of(row) in NEW_MEGATRON and not lists_recipe(row))
    if "all-to-all dispatcher" in note or not once:
        return ["--parallel.dispatcher=all_to_all"]
    in_node = max((64 if row["hardware"].startswith("gb") else 8) // (row["etp"] or 1), 1)
    if ranks > in_node > 1:
        return ["--parallel.dispatcher=hierarchical", f"--parallel.dispatch_inner={in_node}"]
    return ["--parallel.dispatcher=deduplicated"]


def exposed_of(row):
    """Groups of ranks beside whose exchanges the row's software computes nothing, by what is published of it.

    Megatron: without its 1F1B overlap "all-to-all blocks computation" (Megatron-Core MoE, figure 18). Its full sharding of 2025:
    "communication of parameters and gradients cannot be effectively overlapped" (Parallel Folding, section 4.2). MegaScale-MoE says that it
    hides what its baseline, Megatron-LM, does not (section 6.1).
    """
    if source_of(row) == "MegaScale-MoE":
        note = notes_of(row)
        if "megatron" in row["software"].lower() or "baseline: tp" in note:
            return TOKENS + ["tp"]
        return TOKENS + ["heads"] if "(1) with" in note else []
    exposed = [] if merges(row) or (row["ep"] or 1) * (row["etp"] or 1) == 1 else list(TOKENS)
    if row["fsdp"] and source_of(row) == "Parallel Folding":
        exposed += WEIGHTS
    return exposed


# What Megatron-Core MoE's appendix B.2 says of graphs, where a row's note says nothing.
GRAPHED = {("DeepSeek-V3", "gb200"), ("DeepSeek-V3", "gb300"), ("Qwen3-235B", "h100"), ("Qwen3-235B", "gb200"), ("Qwen3-235B", "gb300")}


def graphs_of(row):
    """What the row's software has recorded as CUDA graphs: a value of --graphs. Megatron's partial graphs have attention, router and what comes
    before the dispatch, so all whose shapes do not depend on the routing (Megatron-Core MoE, section 4.3.6)."""
    note = notes_of(row)
    if "cuda_graph_impl full_iteration" in note or "cuda_graph_impl local" in note:
        return "all"
    if "no cuda graphs" in note or "cuda_graph_impl none" in note:
        return "none"
    if "cuda_graph_impl transformer_engine" in note or "cuda graphs" in note:
        return "static"
    paper = source_of(row) in ("Megatron-Core MoE", "MoE-ModelZoo")
    return "static" if paper and any(row["model"].startswith(model) and row["hardware"] == hardware for model, hardware in GRAPHED) else "none"


# Microseconds of PyTorch's host for one operator here outside of graphs, which is some ten kernels there of 5 to 10 us. Fitted, to steps of
# 4,096 tokens a micro-batch and less without graphs.
LAUNCH_US = 75
# Of one of these kernels. Transformer Engine multiplies and quantizes expert by expert where no graph has all of a step: "individual cuBLASLt GEMMs
# into multiple CUDA streams" (Megatron-Core MoE, section 4.3.2), "a naive way is to apply the quantization kernel to them one by one" (5.4.2).
LAUNCH_EXPERT_US = 7.5

# Bytes that the kernels move here over those of PyTorch's own, where permutation is not fused ("torch.scatter_add and torch.gather", MegaScale-MoE,
# section 3.2): of K rows a token, gathered and then sorted by expert; multiplied by probabilities, put back in order and added.
UNFUSED = {"permute": 0.3, "unpermute": 0.2}
# Where rows of experts are copied once more to be padded, before and after: "explicit padding and unpadding kernels introduce non-negligible
# overheads", what fuses them "avoids one pass of global memory read and write" (Megatron-Core MoE, section 5.4.1).
PADDED = {"permute": 0.4, "unpermute": 0.4}
# gpt-oss's bias of the second product, which Megatron-LM adds expert by expert in F32 (TEGroupedMLP._apply_bias) and joins: bytes of both biases
# here over those, 81 of 35 a row forward and 127 of 17 backward, at three quarters of the memory's rate.
F32_BIAS = {"expert_bias": 0.32, "expert_bias_backward": 0.1}


# The head's products in FP8 (fp8_output_proj): twice what BF16's reach of their rate on an H100.
FP8_HEAD = 1.2


def is_newest(row):
    """Whether grouped products on Blackwell do the activation behind them, and what is quantized for the next ("under development" in
    Megatron-Core MoE, section 4.3.2): where the whole iteration is recorded, which needs such (use_transformer_engine_op_fuser)."""
    return "full_iteration" in notes_of(row) and row["precision"] == "fp8-mx"


def pads_rows(row):
    """Whether FP8's rows of experts are padded by kernels of their own: recipes that do not set moe_router_padding_for_quantization, as
    Nemotron-3-Super's and gpt-oss's do, and have no whole graph."""
    return (source_of(row) == "Megatron-Bridge" and row["precision"].startswith("fp8") and not is_newest(row) and (row["ep"] or 1) > 1 and
            not row["model"].startswith(("Nemotron-3-Super", "GPT-OSS", "DeepSeek-V4")))


def shares_of(row):
    """Shares of the rates that the software's kernels reach, where published or counted, by operators' names; 0 of what others' kernels do."""
    note = notes_of(row)
    shares = attention_shares(row, "fp8_dot_product_attention true" in note, source_of(row) in NEW_MEGATRON) | scan_shares(row)
    if "fp8_output_proj true" in note:
        shares["linear_cross_entropy_fused"] = FP8_HEAD
    before_fusion = source_of(row) in ("Parallel Folding", "Megatron-LM") or "permute fusion off" in note
    if before_fusion or (source_of(row) == "MegaScale-MoE" and exposed_of(row)):
        shares |= UNFUSED
    if pads_rows(row):
        shares |= PADDED
    if row["model"].startswith("GPT-OSS") and not is_newest(row):
        shares |= F32_BIAS
    if is_newest(row):
        shares |= {"expert_activation": 0, "expert_activation_backward": 0, "quantize_tokens": 1}
    return shares


def pipelines_tp(row):
    """Whether exchanges of tensor parallelism travel piece by piece beside products: --tp-comm-overlap in Megatron-LM's README, tp_comm_overlap in
    the recipes of dense models."""
    return (row["ep"] or 1) == 1 and (row["tp"] or 1) > 1 and source_of(row) in ("Megatron-Bridge", "NeMo", "Megatron-LM")


def dispatch_of(row):
    """Options of how tokens go to experts."""
    return dispatcher_of(row) + (["--train.schedule=merged"] if merges(row) else [])


def software_of(row):
    """Options of how the row's software runs."""
    options = dispatch_of(row) + [f"--graphs={graphs_of(row)}", f"--launch-us={LAUNCH_US}", f"--launch-expert-us={LAUNCH_EXPERT_US}"]
    options += [f"--operator-share={name}={share}" for name, share in shares_of(row).items()]
    if pipelines_tp(row):
        options.append("--pipelined=tp")
    if row["fsdp"] and source_of(row) == "Parallel Folding":
        options.append("--optim.gradient_compression=bf16")  # PyTorch's FSDP reduces gradients in the parameters' format
    if source_of(row) == "MegaScale-MoE" and row["cp"] > 1:
        options += ["--optim.gradient_compression=bf16", "--parallel.context=all_to_all"]  # section 5; Ulysses
    return options


def memory_of(row, command):
    """The command, where a source says what is computed again, without more than that: it fitted there."""
    if source_of(row) not in ("Megatron-Bridge", "MoE-ModelZoo", "Megatron-Core MoE"):
        return command
    return [option.replace("memory_limit=none", "memory_limit=100TiB") for option in command]
