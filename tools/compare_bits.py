#!/usr/bin/env python3
"""Trains small models with two builds of the program and compares what they save, byte by byte.

  tools/compare_bits.py BEFORE/tessera build/tessera [--only moe] [--steps 6] [--device cpu|cuda] [--large] [--list]
      [--set KEY=VALUE ...]

Each case is a configuration: dense, MoE, block-sparse, latent attention, multi-token prediction, mixes of TP, CP, PP and EP,
full sharding, capacities. Both builds train it from the same seed on the same text; the weights and the optimizer's state of
the last checkpoint must then be the same bytes. What may differ is listed in MAY_DIFFER with the reason, and is then only
reported. The exit code is 1 where anything else differs. Cases of several ranks need mpirun. Keys that are set hold in all cases that
do not have their own.
"""
import argparse
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

# Cases in which this version gives other bits than the one before, by device: name -> why.
MAY_DIFFER = {
    "cpu": {},
    "cuda": {"block-sparse-bf16": "block-sparse products on wgmma sum their terms in another order than on mma.sync"},
}

MODEL = {
    "model.hidden_size": 64, "model.num_layers": 3, "model.num_heads": 4, "model.num_kv_heads": 2,
    "moe.num_experts": 8, "moe.top_k": 2, "moe.inner_size": 48, "data.sequence_length": 64,
    "train.micro_batch": 2, "train.global_batch": 8, "optim.learning_rate": 3e-3, "moe.z_loss_coefficient": 1e-3,
}
LATENT = {"model.attention": "latent", "model.num_kv_heads": 0, "latent.query_rank": 24, "latent.kv_rank": 32,
          "latent.nope_size": 16, "latent.rope_size": 8, "latent.value_size": 16}
SHARED = {"moe.shared_inner_size": 48, "moe.shared_gate": "true"}
DEEPSEEK = {**LATENT, "moe.score": "sigmoid", "moe.num_groups": 4, "moe.top_groups": 2, "moe.first_dense_layers": 1,
            "moe.bias_update_speed": 1e-3, "moe.shared_inner_size": 48, "model.mtp_layers": 1,
            "moe.balance_scope": "sequence"}


def case(ranks=1, **keys):
    """A case: keys with "__" for the dot."""
    return ranks, {name.replace("__", "."): value for name, value in keys.items()}


def join(one, **keys):
    ranks, settings = case(**keys)
    return ranks, {**one, **settings}


CASES = {
    "dense": case(moe__num_experts=0),
    "dense-window-bias": case(moe__num_experts=0, model__window=24, model__window_layers="[1]", model__qkv_bias="true",
                              model__mlp_bias="true", model__output_bias="true", model__tie_embeddings="false"),
    "moe": case(),
    "moe-bf16": case(train__precision="bf16"),
    "moe-qk-norm": case(model__qk_norm="head", model__activation="geglu"),
    "moe-recompute": case(train__recompute='["all"]'),
    "moe-gathers": case(moe__fuse_gather="always", moe__fuse_activation="true"),
    "moe-late-probability": case(moe__memory_efficient="false"),
    "moe-sizes": case(moe__num_experts=8, moe__inner_sizes="[16, 32, 48, 64, 16, 32, 48, 80]"),
    "moe-capacity": case(moe__capacity_factor=1.0, moe__pad_to_capacity="true"),
    "moe-capacity-position": case(moe__capacity_factor=0.75, moe__drop_policy="position"),
    "moe-shared": join(SHARED, moe__latent_size=32),
    "balance-sequence": case(moe__balance_scope="sequence"),
    "balance-global": case(moe__balance_scope="global_batch"),
    "balance-model": case(moe__balance_scope="model"),
    "block-sparse": case(moe__experts="block_sparse", moe__block_size=16),
    "block-sparse-bf16": case(moe__experts="block_sparse", moe__block_size=16, train__precision="bf16"),
    "latent": join(LATENT),
    "deepseek": join(DEEPSEEK),
    "deepseek-bf16": join(DEEPSEEK, train__precision="bf16"),
    "documents": case(data__packing="best_fit", data__split_documents="true"),
    "dp-2": case(2),
    "dp-2-bf16-gradients": case(2, optim__gradient_compression="bf16", optim__bucket_bytes=65536),
    "dp-2-unsharded": case(2, optim__shard="none"),
    "fsdp-2": case(2, optim__shard="full"),
    "fsdp-4-hybrid-ep": case(4, optim__shard="full", optim__shard_group=2, parallel__ep=2),
    "tp-2-ep-2": case(2, parallel__tp=2, parallel__ep=2),
    "cp-2-ring": case(2, parallel__cp=2),
    "cp-2-heads-ep": case(2, parallel__cp=2, parallel__context="all_to_all", parallel__ep=2),
    "ep-2-all-gather": case(2, parallel__ep=2, parallel__dispatcher="all_gather"),
    "ep-2-bounded": case(2, parallel__ep=2, parallel__dispatcher="all_to_all", parallel__exchange="bounded"),
    "etp-2": case(2, parallel__etp=2),
    "pp-2": case(2, parallel__pp=2, moe__balance_scope="model", model__num_layers=4),
    "pp-2-interleaved-split": case(2, parallel__pp=2, parallel__pipeline_schedule="interleaved", parallel__pipeline_chunks=2,
                                   model__num_layers=4),
    "pp-2-zero-bubble": case(2, parallel__pp=2, parallel__split_weights="true", model__num_layers=4),
    "pp-2-gpipe-mtp": join(DEEPSEEK, ranks=2, parallel__pp=2, parallel__pipeline_schedule="gpipe"),
    "tp-cp-pp-8": case(8, parallel__tp=2, parallel__cp=2, parallel__pp=2, parallel__ep=4, model__num_layers=4),
    "ulysses-tp-2-fsdp-4": case(4, parallel__tp=2, parallel__attention="ulysses", optim__shard="full"),
}


# With --large: experts on two ranks, so large that the rows that come and those that might differ by many pages of memory.
ROWS = {
    "model.hidden_size": 1024, "model.num_heads": 8, "moe.num_experts": 16, "moe.inner_size": 512,
    "data.sequence_length": 2048, "parallel.ep": 2, "train.precision": "bf16",
}
LARGE = {
    "rows": join(ROWS, ranks=2),
    "rows-f32": join(ROWS, ranks=2, train__precision="f32"),
    "rows-unbalanced": join(ROWS, ranks=2, model__init_deviation=0.2, moe__balance_coefficient=0),
    "rows-block-sparse": join(ROWS, ranks=2, moe__experts="block_sparse"),
    "rows-gathers": join(ROWS, ranks=2, moe__fuse_gather="always", moe__fuse_activation="true"),
    "rows-copies": join(ROWS, ranks=2, moe__fuse_gather="never"),
    "rows-recompute": join(ROWS, ranks=2, train__recompute='["all"]'),
    "rows-late-probability": join(ROWS, ranks=2, moe__memory_efficient="false"),
    "rows-bounded": join(ROWS, ranks=2, parallel__exchange="bounded"),
    "rows-latent": join(ROWS, ranks=2, moe__latent_size=512, moe__shared_inner_size=512),
    "rows-all-gather": join(ROWS, ranks=2, parallel__dispatcher="all_gather"),
}

def write_text(path):
    """Some 200 kB of lines that look like words, the same on each machine."""
    draw = random.Random(7)
    words = ["".join(draw.choice("etaoinshrdlu") for _ in range(draw.randint(2, 9))) for _ in range(800)]
    lines = (" ".join(draw.choice(words) for _ in range(draw.randint(4, 30))) for _ in range(2000))
    path.write_text("\n\n".join(lines), encoding="ascii")


def train(program, folder, text, ranks, settings, options):
    keys = {**MODEL, **settings, "data.text": text, "data.separator": "", "data.cache": folder.parent / "tokens",
            "train.steps": options.steps, "train.validation_interval": 0, "run.checkpoint_interval": 0,
            "run.report": "false", "run.tensorboard": "false", "run.seed": 11, "run.device": options.device,
            "run.folder": folder}
    command = [program, "train", *(f"--{key}={value}" for key, value in keys.items())]
    if ranks > 1:
        command += ["--ranks", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1" if ranks > 1 else "2", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{program} failed with {done.returncode}: {done.stderr.strip()[-400:]}")


def read_tensors(folder):
    """The bytes of each tensor of a checkpoint by file kind and name, whatever files hold them."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8:8 + size]).items():
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in entry["data_offsets"])
                tensors[path.name, name] = data[begin:end]
    return tensors


def newest(folder):
    return sorted((folder / "checkpoints").glob("step-*"))[-1]


def cases(options):
    return LARGE if options.large else CASES


def compare(name, scratch, text, options):
    """What differs between the two builds' checkpoints: None, or a sentence."""
    ranks, settings = cases(options)[name]
    settings = {**dict(given.split("=", 1) for given in options.set), **settings}
    found = []
    for which, program in (("before", options.before), ("after", options.after)):
        folder = scratch / name / which
        folder.parent.mkdir(exist_ok=True)
        train(program, folder, text, ranks, settings, options)
        found.append(read_tensors(newest(folder)))
    before, after = found
    if before.keys() != after.keys():
        return f"other tensors: {sorted(before.keys() ^ after.keys())[:3]}"
    different = [key for key in before if before[key] != after[key]]
    return f"{len(different)} of {len(before)} tensors, first {different[0][1]}" if different else None


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?")
    parser.add_argument("after", nargs="?")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--single", action="store_true", help="cases of one rank alone")
    parser.add_argument("--large", action="store_true", help="large layers of two ranks instead, for GPUs")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="such as moe.num_experts=40")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def main():
    options = parse()
    chosen = cases(options)
    names = [name for name in chosen if options.only in name and (not options.single or chosen[name][0] == 1)]
    if options.list:
        print("\n".join(names))
        return 0
    if not options.after or not names:
        sys.exit("compare_bits: name two programs, and cases that exist (--list)")
    failures = 0
    may_differ = MAY_DIFFER[options.device]
    with tempfile.TemporaryDirectory() as scratch:
        text = pathlib.Path(scratch) / "text.txt"
        write_text(text)
        for name in names:
            try:
                problem = compare(name, pathlib.Path(scratch), text, options)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                problem = str(error)
            allowed = problem is not None and name in may_differ
            failures += problem is not None and not allowed
            state = "equal" if problem is None else f"may differ ({may_differ[name]}): {problem}" if allowed else problem
            print(f"{name:24} {state}", flush=True)
    print(f"{len(names) - failures} of {len(names)} cases give the same bytes")
    return 1 if failures else 0


sys.exit(main())
