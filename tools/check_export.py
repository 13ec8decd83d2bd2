#!/usr/bin/env python3
"""Checks Tessera's exports with the library transformers: the folder that `tessera convert` made of a checkpoint loads
without missing or unexpected weights, its tensors are those of the original folder bit for bit, and its logits are those
of the original and of Tessera itself.

    tools/check_export.py --tessera build/tessera ORIGINAL...

For each ORIGINAL, a folder of Hugging Face, the script converts it to a checkpoint and back, and compares. Needs torch,
transformers and safetensors. With --export the arguments are already exported folders, which are loaded and run only.
Exit code 1 when anything differs.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

BATCH, LENGTH = 2, 48


def load_model(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(problem):
            raise SystemExit(f"{folder}: transformers reports {problem}: {sorted(info[problem])[:10]}")
    return model.eval()


def run(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def tensors_of(folder):
    tensors = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def same_bits(a, b):
    if a.keys() != b.keys():
        print("  names differ:", sorted(a.keys() ^ b.keys())[:10])
        return False
    wrong = [n for n in a if a[n].dtype != b[n].dtype or not torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8))]
    if wrong:
        print("  tensors differ:", wrong[:10])
    return not wrong


def relative_error(a, b):
    return ((a - b).norm() / b.norm()).item()


def tessera(program, *arguments):
    subprocess.run([program, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def check(program, original, scratch, shard_size):
    tessera(program, "convert", original, scratch / "own", "--shard-size", shard_size)
    tessera(program, "convert", scratch / "own", scratch / "back", "--shard-size", shard_size)
    tessera(program, "convert", scratch / "own", scratch / "fused", "--experts", "fused")
    bits = same_bits(tensors_of(scratch / "back"), tensors_of(original))
    first = load_model(original)
    vocabulary = first.config.vocab_size
    ids = torch.randint(0, vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = run(first, ids)
    logits_equal = torch.equal(run(load_model(scratch / "back"), ids), expected)
    fused_equal = torch.equal(run(load_model(scratch / "fused"), ids), expected)
    save_file({"input_ids": ids}, scratch / "ids.safetensors")
    tessera(program, "eval", scratch / "own", "--input-ids", scratch / "ids.safetensors", "--logits",
            scratch / "logits.safetensors")
    error = relative_error(load_file(scratch / "logits.safetensors")["logits"], expected)
    ok = bits and logits_equal and fused_equal and error < 1e-4
    print(f"{original.name:28} weights {'equal' if bits else 'DIFFER':6}  logits of the export "
          f"{'equal' if logits_equal else 'DIFFER':6}  fused {'equal' if fused_equal else 'DIFFER':6}  "
          f"Tessera's logits {error:.1e}  {'ok' if ok else 'FAILED'}")
    return ok


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--tessera", default="build/tessera", help="the program")
    parser.add_argument("--shard-size", default="100000", help="bytes of a file, small so that there are several")
    parser.add_argument("--export", action="store_true", help="only load and run exported folders")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    ok = True
    for folder in arguments.folders:
        if arguments.export:
            logits = run(load_model(folder), torch.arange(8)[None])
            print(f"{folder.name:28} loads; logits {tuple(logits.shape)}, norm {logits.norm().item():.6g}")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            ok &= check(arguments.tessera, folder, pathlib.Path(scratch), arguments.shard_size)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
