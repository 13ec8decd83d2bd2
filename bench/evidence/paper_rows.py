"""How rows of bench/evidence/papers are simulated: the command of each, by what its source says of model, layout and software."""
import functools
import json
import os
import pathlib
import re
import subprocess

DATA = pathlib.Path(__file__).parent / "papers"
HARDWARE = {"h100": "h100-ib", "h800": "h800-ib", "h200": "h200-ib", "b200": "b200-ib", "b300": "b300-ib", "gb200": "gb200-nvl72",
            "gb300": "gb300-nvl72"}
HOPPER = ("h100", "h200", "h800")
# Scales for each tensor, or for 32 neighbours on a GPU that multiplies such, cost what scales for each row do: as many passes over operands,
# of as many bytes but for the scales, and products of FP8.
FP8 = ["--train.precision=fp8", "--precision.recipe=rowwise"]
PRECISIONS = {"bf16": ["--train.precision=bf16"], "fp8-cs": FP8, "fp8-ds": FP8,
              "fp8-blockwise": ["--train.precision=fp8", "--precision.recipe=blockwise", "--precision.weight_gradients=false"]}
BLACKWELL_PRECISIONS = {"bf16": PRECISIONS["bf16"], "fp8-cs": FP8, "fp8-mx": FP8}
# Megatron's modules by the values of a layer here. Its core attention keeps scores only without a fused kernel.
RECOMPUTED = {"full": ["all"], "layernorm": ["attn_norm", "mlp_norm"], "moe_act": ["expert_act"], "mlp": ["mlp_pre", "mlp_act"],
              "mla_up_proj": ["k", "v", "q_rotated"], "moe": ["expert_in", "expert_pre", "expert_act"],
              "shared_experts": ["moe.shared_pre", "moe.shared_act"], "core_attn": []}
UNKNOWN = "which is no value of a layer"

# What exchanges of experts' tokens are called here, and those of weights and gradients.
TOKENS = ["ep", "experts", "etp"]
WEIGHTS = ["dense_replicas", "expert_replicas"]


def load_rows(only=""):
    rows = [row for name in ("papers.json", "recipes.json") for row in json.loads((DATA / name).read_text())]
    return [row for row in rows if only in row["id"]]


def load_models():
    return json.loads((DATA / "models.json").read_text())


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
    """What the row's software has recorded as CUDA graphs: a value of --graphs."""
    note = notes_of(row)
    if "cuda_graph_impl full_iteration" in note or "cuda_graph_impl local" in note:
        return "all"
    if "no cuda graphs" in note or "cuda_graph_impl none" in note:
        return "none"
    if "cuda_graph_impl transformer_engine" in note or "cuda graphs" in note:
        return "static"
    paper = source_of(row) in ("Megatron-Core MoE", "MoE-ModelZoo")
    return "static" if paper and any(row["model"].startswith(model) and row["hardware"] == hardware for model, hardware in GRAPHED) else "none"


def shares_of(row):
    """Shares of the rates that the software's kernels reach, where published or counted, by operators' names; 0 of what others' kernels do."""
    shares = {}
    if row["model"].startswith(LATENT):
        shares.update(attention_shares(row))
    if source_of(row) in ("Parallel Folding", "Megatron-LM") or "permute fusion off" in notes_of(row) or (source_of(row) == "MegaScale-MoE" and exposed_of(row)):
        shares |= {"permute": 0.3, "unpermute": 0.2}
    return shares


LATENT = ("DeepSeek", "Kimi", "Moonlight")
# Table 9 of Megatron-Core MoE: TFLOPS of cuDNN's attention with DeepSeek-V3's heads, forward and backward, at 4,096 and 16,384 tokens. The backward ones count five
# products for each two of forward; here the scores' second computation is not counted, so four.
ATTENTION = {"hopper": ((553, 422), (638, 523), 989), "blackwell": ((1324, 1083), (1698, 1298), 2500)}


def attention_shares(row):
    short, long, peak = ATTENTION["hopper" if row["hardware"] in HOPPER else "blackwell"]
    forward, backward = long if row["sequence_length"] > 8192 else short
    return {f"{kind}attention{end}": round(tflops / peak, 3) for kind in ("", "ring_")
            for end, tflops in (("", forward), ("_backward", 0.8 * backward))}


def stores_scores(row):
    """Whether attention had no fused kernel: of sinks until whole iterations were recorded, and in 26.06.01 ("known regression" of cuDNN)."""
    fused = ("cuda_graph_impl full_iteration" in notes_of(row) and "26.06.01" not in row["software"]) or "cuda_graph" not in notes_of(row) and row["precision"] != "bf16"
    return row["model"].startswith("GPT-OSS") and not fused


def software_of(row):
    """Options of how the row's software runs."""
    options = dispatcher_of(row) + (["--train.schedule=merged"] if merges(row) else [])
    options += [f"--graphs={graphs_of(row)}", f"--launch-us={os.environ.get('LAUNCH_US', '50')}"]
    if (row["ep"] or 1) == 1 and (row["tp"] or 1) > 1 and source_of(row) in ("Megatron-Bridge", "NeMo", "Megatron-LM"):
        options.append("--pipelined=tp")
    if stores_scores(row):
        options.append("--stored-scores")
    options += [f"--operator-share={name}={share}" for name, share in shares_of(row).items()]
    if row["fsdp"] and source_of(row) == "Parallel Folding":
        options.append("--optim.gradient_compression=bf16")  # PyTorch's FSDP reduces gradients in the parameters' format
    if source_of(row) == "MegaScale-MoE" and row["cp"] > 1:
        options += ["--optim.gradient_compression=bf16", "--parallel.context=all_to_all"]  # section 5; Ulysses
    return options


def precision_of(row):
    """Options of the row's format, or why there are none. Megatron keeps products' inputs in FP8 (Megatron-Core MoE, section 4.1.3). Here
    experts' tokens then travel so too, which theirs do not, so inputs are kept in BF16 where there are experts on other ranks."""
    precisions = PRECISIONS if row["hardware"] in HOPPER else BLACKWELL_PRECISIONS
    if row["precision"] not in precisions:
        return None, {"nvfp4": "products of four bits, which no operator here has", None: "a precision that the source does not say"}.get(
            row["precision"], "a precision without products of its own here")
    options = precisions[row["precision"]]
    return options + (["--precision.saved=fp8"] if options is FP8 and (row["ep"] or 1) == 1 else []), ""


def layout_of(row):
    """Overrides of the layout, or why there are none."""
    if row["tp"] is None or row["pp"] is None or (row["ep"] is None and row["is_moe"]):
        return None, "no layout"
    arguments = [f"--parallel.{axis}={row[axis] or 1}" for axis in ("tp", "cp", "pp", "ep", "etp")]
    if row["fsdp"]:
        arguments.append("--optim.shard=full")
    return arguments, ""


def chunks_of(row, layers):
    """Numbers of chunks that a stage may have: the source's, or one and as many as it has layers where the source does not say."""
    if row["pp"] == 1:
        return [1]
    if row["virtual_stages"]:
        return [row["virtual_stages"]]
    return [1] if layers % row["pp"] else sorted({1, layers // row["pp"]})


@functools.lru_cache
def layers_of(program, preset):
    done = subprocess.run([program, "train", "--print-config", f"--model.preset={preset}"], capture_output=True, text=True, check=True)
    return int(re.search(r"^num_layers\s*= (\d+)", done.stdout, re.MULTILINE).group(1))


def cut_of(row, chunks):
    """Options of a pipeline with so many chunks a stage, laid out as the row's note says where that comes to as many."""
    if chunks == 1:
        return []
    options = ["--parallel.pipeline_schedule=interleaved", f"--parallel.pipeline_chunks={chunks}"]
    noted = re.search(r"(?:pp_layout|pipeline layout) (\S+?);?(?:\s|$)", row["note"] or "")
    if noted:
        layout = re.sub(r"\((\w+)\)\*(\d+)\|?", r"(\1|)*\2", noted.group(1))
        whole = re.sub(r"\(([^)]*)\)\*(\d+)", lambda match: match.group(1) * int(match.group(2)), layout)
        if whole.count("|") + 1 == row["pp"] * chunks:
            options.append(f"--parallel.pipeline_layout={layout}")
    return options


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
    if "tflops" in measured and row["software"].startswith("NeMo 24") and row["model"].startswith("Llama2-7B"):
        per_token = 32 * 4096**2 * (24 + 18 * 11008 / 4096 + 12 * row["sequence_length"] / 4096 + 6 * 32000 / (32 * 4096))
        return measured["tflops"] * 1e12 * row["gpus"] / per_token, "tokens_per_second"
    if "tflops" in measured:
        return measured["tflops"], "tflops"
    if "mfu" in measured:
        return measured["mfu"] * (row["peak"] or 989.5), "tflops"
    return None, ""


def command_of(program, row, models):
    """The command that simulates a row, but for chunks of stages and the way its software runs; or None and why."""
    if "do not use" in (row["doubt"] or ""):
        return None, "another model's figures, by a slip of the source"
    model = models.get(row["model"])
    if not model or model["preset"] is None:
        return None, "a model that this program does not have"
    if row["hardware"] not in HARDWARE:
        return None, "hardware without a description"
    precision, why = precision_of(row)
    if precision is None:
        return None, why
    if measured_of(row)[0] is None:
        return None, "no throughput"
    if not row["global_batch"] or not row["sequence_length"]:
        return None, "no batch"
    layout, why = layout_of({**row, "is_moe": model["overrides"].get("moe.num_experts") != 0})
    if layout is None:
        return None, why
    routing = row["routing"] or ""
    recompute = [name for module in row["recompute"] or [] for name in RECOMPUTED.get(module, [])]
    return [program, "plan", "--explain", "--without-limit", "--json", "--gpus", str(row["gpus"]), "--hardware", HARDWARE[row["hardware"]],
            f"--model.preset={model['preset']}", *overrides_of(model), *precision,
            f"--data.sequence_length={row['sequence_length']}", f"--train.micro_batch={row['micro_batch'] or 1}",
            f"--train.global_batch={row['global_batch']}", *(["--moe.capacity_factor=1"] if "capacity factor 1" in routing else []),
            *layout, "--train.memory_limit=none",
            *([f"--train.recompute={','.join(recompute)}"] if recompute else [])], ""


@functools.lru_cache(maxsize=None)
def run(command):
    """The layout that a simulation tells, or why there is none: of a tuple of options, since releases of one software repeat layouts. Names
    that the model has no value of are left out."""
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={"OMP_NUM_THREADS": "1", **os.environ})
        if done.returncode == 0:
            return json.loads(done.stdout)["layouts"][0], ""
        if UNKNOWN not in done.stderr:
            return None, done.stderr.strip().removeprefix("tessera: ")
        name = done.stderr.split("'")[1]
        at = next(i for i, option in enumerate(command) if option.startswith("--train.recompute="))
        kept = [item for item in command[at].split("=", 1)[1].split(",") if item != name]
        command = command[:at] + ((f"--train.recompute={','.join(kept)}",) if kept else ()) + command[at + 1:]


def memory_of(row, command):
    """The command, where a source says what is computed again, without more than that: it fitted there."""
    if source_of(row) not in ("Megatron-Bridge", "MoE-ModelZoo", "Megatron-Core MoE"):
        return command
    return [option.replace("memory_limit=none", "memory_limit=100TiB") for option in command]


def simulate(program, row, models):
    """A row's figures: `ours` with what its software hides, `hidden` with what this program hides; or `why` there are none."""
    command, why = command_of(program, row, models)
    if command is None:
        return {"row": row, "why": why}
    best = None
    model = models[row["model"]]
    layers = model["overrides"].get("model.num_layers") or layers_of(program, model["preset"])
    exposed = exposed_of(row)
    for chunks in chunks_of(row, layers):
        cut = (*memory_of(row, command), *cut_of(row, chunks), *software_of(row))
        found, why = run((*cut, *([f"--exposed={','.join(exposed)}"] if exposed else [])))
        if found is not None and (best is None or found["tflops"] > best[0]["tflops"]):
            best = (found, cut, chunks)
    if best is None:
        return {"row": row, "why": "refused: " + why}
    found, cut, chunks = best
    hidden = run((*command, *cut_of(row, chunks), *dispatcher_of(row), *(["--train.schedule=merged"] if merges(row) else [])))[0]
    theirs, figure = measured_of(row)
    slowest = min(found["stages"], key=lambda stage: stage["idle_seconds"])
    return {"row": row, "theirs": theirs, "figure": figure, "ours": found[figure], "error": found[figure] / theirs - 1, "chunks": chunks,
            "hidden": hidden[figure] / theirs - 1, "memory": found["memory_bytes"], "step": found["step_seconds"],
            "exposed": slowest["exposed_seconds"] / found["step_seconds"], "idle": slowest["idle_seconds"] / found["step_seconds"],
            "exposed_by": slowest["exposed_by"], "computed_by": slowest["computed_by"], "host": slowest["host_seconds"] / found["step_seconds"], "computed": slowest["computed_seconds"] / found["step_seconds"],
            "copies": slowest["copy_seconds"] / found["step_seconds"]}


def explain_here(program, one, models):
    """The row's layout as this program runs it, with its own dispatcher and all that it hides."""
    command, _ = command_of(program, one["row"], models)
    return run((*command, *cut_of(one["row"], one["chunks"])))[0]


def search(program, row, models):
    """The best layout that `tessera plan` finds for the row's model, batch and GPUs."""
    command, _ = command_of(program, row, models)
    given = ("--parallel.", "--train.micro_batch", "--optim.shard", "--explain", "--without-limit", "--train.memory_limit", "--train.recompute")
    return run(tuple(option for option in command if not option.startswith(given)))[0]
