"""How rows of bench/evidence/papers are simulated: the command of each, by what its source says of model, layout and software."""
import functools
import json
import os
import pathlib
import re
import subprocess

from paper_software import HOPPER, NEW_MEGATRON, dispatch_of, exposed_of, memory_of, notes_of, software_of, source_of

DATA = pathlib.Path(__file__).parent / "papers"
HARDWARE = {"h100": "h100-ib", "h800": "h800-ib", "h200": "h200-ib", "b200": "b200-ib", "b300": "b300-ib", "gb200": "gb200-nvl72",
            "gb300": "gb300-nvl72"}
# Scales for each tensor, or for 32 neighbours on a GPU that multiplies such, cost what scales for each row do: as many passes over operands,
# of as many bytes but for the scales, and products of FP8.
FP8 = ["--train.precision=fp8", "--precision.recipe=rowwise"]
PRECISIONS = {"bf16": ["--train.precision=bf16"], "fp8-cs": FP8, "fp8-ds": FP8,
              "fp8-blockwise": ["--train.precision=fp8", "--precision.recipe=blockwise", "--precision.weight_gradients=false"]}
BLACKWELL_PRECISIONS = {"bf16": PRECISIONS["bf16"], "fp8-cs": FP8, "fp8-mx": FP8}
# Megatron's modules by the values of a layer here. "core_attn" runs attention again, also a fused kernel's, and "moe" all from router to combination
# (MoELayer.forward under tensor_parallel.checkpoint), of which the exchange back and the product before it are not computed again here.
RECOMPUTED = {"full": ["all"], "layernorm": ["attn_norm", "mlp_norm"], "moe_act": ["expert_act"], "mlp": ["mlp_pre", "mlp_act"],
              "mla_up_proj": ["k", "v", "q_rotated"], "moe": ["sent_in", "arrived_rows", "expert_in", "expert_pre",
                                                                              "expert_act", "moe.shared_pre", "moe.shared_act"],
              "shared_experts": ["moe.shared_pre", "moe.shared_act"], "core_attn": ["attn_out"]}
UNKNOWN = "which is no value of a layer"

def load_rows(only=""):
    rows = [row for name in ("papers.json", "recipes.json") for row in json.loads((DATA / name).read_text())]
    return [row for row in rows if only in row["id"]]


def load_models():
    return json.loads((DATA / "models.json").read_text())


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


# What Megatron-Bridge's recipes of DeepSeek-V3 and Kimi-K2 give stages where they say nothing, by stages in all (map_pp_vp_to_layout in its
# recipes/deepseek/deepseek_v3.py and recipes/kimi/kimi_k2.py).
LAYOUTS = {4: "Et*16|t*16|t*16|t*13{}L", 8: "Et*8|(t*8|)*6t*5{}L", 16: "Et*4|(t*4|)*14t{}L"}


# Models whose recipes count the embedding and the loss as layers (account_for_embedding_in_pipeline_split): their layers.
COUNT_ENDS = {"Qwen3-235B": 94, "Qwen3-235B-A22B": 94, "Llama3.1-405B": 126}


def even_layout(layers, parts):
    """Parts of as many layers each where the ends count as one, or nothing where that does not come out even."""
    if (layers + 2) % parts or parts < 2:
        return ""
    size = (layers + 2) // parts
    end = f"t*{size - 1}" if size > 1 else ""
    return f"E{end}|" + (f"(t*{size}|)*{parts - 2}" if parts > 2 else "") + f"{end}L"


def pipeline_layouts_of(row, model, chunks):
    """Layouts of the layers over stages, the source's own first: of the row's note, and of the recipe where that says nothing."""
    noted = re.search(r"(?:pp_layout|pipeline layout) (\S+?);?(?:\s|$)", row["note"] or "")
    if noted:
        yield re.sub(r"\((\w+)\)\*(\d+)\|?", r"(\1|)*\2", noted.group(1))
    parts = row["pp"] * chunks
    if source_of(row) in NEW_MEGATRON and row["model"].startswith(("DeepSeek-V3", "Kimi")) and parts in LAYOUTS:
        yield LAYOUTS[parts].format("m" if model["overrides"].get("model.mtp_layers") else "")
    if source_of(row) in NEW_MEGATRON and row["model"] in COUNT_ENDS:
        yield even_layout(COUNT_ENDS[row["model"]], parts)


def count_parts(layout):
    return re.sub(r"\(([^)]*)\)\*(\d+)", lambda match: match.group(1) * int(match.group(2)), layout).count("|") + 1


def cut_of(row, model, chunks):
    """Options of a pipeline with so many chunks a stage, laid out as its source says where that comes to as many."""
    options = []
    if chunks > 1:
        options += ["--parallel.pipeline_schedule=interleaved", f"--parallel.pipeline_chunks={chunks}"]
    layouts = [layout for layout in pipeline_layouts_of(row, model, chunks) if layout and count_parts(layout) == row["pp"] * chunks]
    if row["pp"] > 1 and layouts:
        options.append(f"--parallel.pipeline_layout={layouts[0]}")
    return options


def overrides_of(model):
    for key, value in model["overrides"].items():
        if isinstance(value, list):
            value = ",".join(str(item) for item in value)
        elif isinstance(value, bool):
            value = str(value).lower()
        yield f"--{key}={value}"


def unmasked_flops(row):
    """FLOPs of a token of Llama 2 7B as NeMo of 2024 counts them (flops_formulas.py): attention without its mask."""
    layers, hidden, inner, vocabulary = 32, 4096, 11008, 32000
    return layers * hidden**2 * (24 + (18 * inner + 12 * row["sequence_length"]) / hidden + 6 * vocabulary / (layers * hidden))


def measured_of(row):
    """Their TFLOPS of a device or tokens/s of all, and by which figure of ours that is judged."""
    measured = row["measured"]
    if "tokens_per_second" in measured:
        return measured["tokens_per_second"], "tokens_per_second"
    if "tokens_per_second_per_gpu" in measured:
        return measured["tokens_per_second_per_gpu"] * row["gpus"], "tokens_per_second"
    if "step_seconds" in measured and row["global_batch"]:
        return row["global_batch"] * row["sequence_length"] / measured["step_seconds"], "tokens_per_second"
    if "tflops" in measured and row["software"].startswith("NeMo 24") and row["model"] == "Llama2-7B":
        return measured["tflops"] * 1e12 * row["gpus"] / unmasked_flops(row), "tokens_per_second"
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


def stage_shares(found):
    """Of a simulated layout's busiest stage: the stage, and the shares of the step that it computes, waits for exchanges and idles."""
    stage = min(found["stages"], key=lambda one: one["idle_seconds"])
    return stage, {name: stage[f"{name}_seconds"] / found["step_seconds"] for name in ("computed", "exposed", "idle")}


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
        cut = (*memory_of(row, command), *cut_of(row, model, chunks), *software_of(row))
        found, why = run((*cut, *([f"--exposed={','.join(exposed)}"] if exposed else [])))
        if found is not None and (best is None or found["tflops"] > best[0]["tflops"]):
            best = (found, cut, chunks)
    if best is None:
        return {"row": row, "why": "refused: " + why}
    found, _, chunks = best
    hidden = run((*command, *cut_of(row, model, chunks), *dispatch_of(row)))[0]
    theirs, figure = measured_of(row)
    slowest, shares = stage_shares(found)
    return {"row": row, "theirs": theirs, "figure": figure, "ours": found[figure], "error": found[figure] / theirs - 1, "chunks": chunks,
            "hidden": hidden[figure] / theirs - 1, "memory": found["memory_bytes"], "step": found["step_seconds"],
            **shares, "exposed_by": slowest["exposed_by"], "computed_by": slowest["computed_by"],
            "host": slowest["host_seconds"] / found["step_seconds"], "copies": slowest["copy_seconds"] / found["step_seconds"]}


def explain_here(program, one, models):
    """The row's layout as this program runs it, with its own dispatcher and all that it hides."""
    command, _ = command_of(program, one["row"], models)
    return run((*command, *cut_of(one["row"], models[one["row"]["model"]], one["chunks"])))[0]


def search(program, row, models):
    """The best layout that `tessera plan` finds for the row's model, batch and GPUs."""
    command, _ = command_of(program, row, models)
    given = ("--parallel.", "--train.micro_batch", "--optim.shard", "--explain", "--without-limit", "--train.memory_limit", "--train.recompute")
    return run(tuple(option for option in command if not option.startswith(given)))[0]
