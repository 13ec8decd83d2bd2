#!/usr/bin/env python3
"""Checks the low-rank adapters that Tessera writes with the library peft: PEFT loads the folder of `tessera convert
--adapters` onto the original model without missing or unexpected weights, and gives the logits of the model that `tessera
convert` merges and of Tessera itself.

    tools/check_peft.py --tessera build/tessera ORIGINAL...

For each ORIGINAL, a folder of Hugging Face, the script trains adapters for some steps. Needs torch, transformers, peft and
safetensors. Exit code 1 when anything differs.
"""

import argparse
import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import warnings

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

BATCH, LENGTH = 2, 48
TOLERANCE = 1e-5


def tessera(program, *arguments):
    subprocess.run([program, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def write_tokens(path, vocabulary):
    """A token file in Megatron's format: one document of int32."""
    tokens = torch.randint(0, vocabulary, (8192,), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    path.with_suffix(".bin").write_bytes(tokens.numpy().tobytes())
    index = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 4, 1, 2) + struct.pack("<iqqq", len(tokens), 0, 0, 1)
    path.with_suffix(".idx").write_bytes(index)


def train(program, original, scratch, targets):
    """A run with adapters that are far from 0, in scratch / "run"."""
    tessera(program, "convert", original, scratch / "own")
    write_tokens(scratch / "tokens", json.loads((original / "config.json").read_text())["vocab_size"])
    tessera(program, "train", f"--run.init_from={scratch / 'own'}", f"--run.folder={scratch / 'run'}",
            f"--data.tokens={scratch / 'tokens'}",
            "--data.sequence_length=16", "--train.micro_batch=2", "--train.global_batch=2", "--train.steps=20",
            "--optim.learning_rate=1e-2", "--optim.warmup_steps=2", "--lora.rank=4", "--lora.alpha=8",
            f"--lora.targets={targets}")


def load_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def load_adapted(original, adapters):
    """The original with the adapters; PEFT warns of keys that it misses."""
    model = load_model(original)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = peft.PeftModel.from_pretrained(model, adapters)
    problems = [str(w.message) for w in caught if "key" in str(w.message).lower()]
    if problems:
        raise SystemExit(f"{adapters}: peft says: {problems[0][:500]}")
    return adapted.eval()


def run(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def relative_error(a, b):
    return ((a - b).norm() / b.norm()).item()


def check(program, original, scratch, targets):
    train(program, original, scratch, targets)
    tessera(program, "convert", scratch / "run", scratch / "merged", "--like", original)
    tessera(program, "convert", scratch / "run", scratch / "adapters", "--adapters", "--like", original)
    plain = load_model(original)
    ids = torch.randint(0, plain.config.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    adapted = run(load_adapted(original, scratch / "adapters"), ids)
    merged = relative_error(run(load_model(scratch / "merged"), ids), adapted)
    save_file({"input_ids": ids}, scratch / "ids.safetensors")
    tessera(program, "eval", scratch / "run", "--input-ids", scratch / "ids.safetensors", "--logits",
            scratch / "logits.safetensors")
    own = relative_error(load_file(scratch / "logits.safetensors")["logits"], adapted)
    change = relative_error(run(plain, ids), adapted)
    ok = merged < TOLERANCE and own < TOLERANCE and change > 100 * TOLERANCE
    print(f"{original.name:24} beside peft's logits: the merged model {merged:.1e}, Tessera {own:.1e}, the original "
          f"{change:.1e}  {'ok' if ok else 'FAILED'}")
    return ok


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--tessera", default="build/tessera", help="the program")
    parser.add_argument("--targets", default='["attn"]', help="lora.targets of the run")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
    ok = True
    for folder in arguments.folders:
        with tempfile.TemporaryDirectory() as scratch:
            ok &= check(arguments.tessera, folder, pathlib.Path(scratch), arguments.targets)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
