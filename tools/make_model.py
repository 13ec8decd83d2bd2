#!/usr/bin/env python3
"""Writes a Mixtral model with random weights as a Hugging Face folder, for measuring `tessera convert`.

    tools/make_model.py FOLDER [--gigabytes 5.5] [--dtype bf16] [--shard-gigabytes 2]

Needs numpy only. One block of random numbers is written again and again, so the disk is the limit.
"""

import argparse
import json
import os
import struct

import numpy as np

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, EXPERTS, VOCAB = 2048, 5632, 32, 8, 64, 8, 32000


def layer_tensors(layer):
    prefix = f"model.layers.{layer}."
    yield prefix + "input_layernorm.weight", [HIDDEN]
    yield prefix + "post_attention_layernorm.weight", [HIDDEN]
    yield prefix + "self_attn.q_proj.weight", [HEADS * HEAD, HIDDEN]
    yield prefix + "self_attn.k_proj.weight", [KV_HEADS * HEAD, HIDDEN]
    yield prefix + "self_attn.v_proj.weight", [KV_HEADS * HEAD, HIDDEN]
    yield prefix + "self_attn.o_proj.weight", [HIDDEN, HEADS * HEAD]
    yield prefix + "block_sparse_moe.gate.weight", [EXPERTS, HIDDEN]
    for expert in range(EXPERTS):
        name = f"{prefix}block_sparse_moe.experts.{expert}."
        yield name + "w1.weight", [INNER, HIDDEN]
        yield name + "w2.weight", [HIDDEN, INNER]
        yield name + "w3.weight", [INNER, HIDDEN]


def all_tensors(num_layers):
    yield "model.embed_tokens.weight", [VOCAB, HIDDEN]
    for layer in range(num_layers):
        yield from layer_tensors(layer)
    yield "model.norm.weight", [HIDDEN]
    yield "lm_head.weight", [VOCAB, HIDDEN]


def count(tensors):
    return sum(int(np.prod(shape)) for _, shape in tensors)


def random_block(dtype):
    """64 MiB of small normal numbers in the type's bytes."""
    values = np.random.default_rng(0).standard_normal(1 << 25, dtype=np.float32) * 0.02
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values[: 1 << 24].tobytes()


def write_file(path, tensors, dtype, block):
    size = 2 if dtype == "bf16" else 4
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors:
        end = offset + int(np.prod(shape)) * size
        header[name] = {"dtype": dtype.upper(), "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for begin in range(0, offset, len(block)):
            file.write(block[: min(len(block), offset - begin)])


def split(tensors, limit, size):
    shards, current, used = [], [], 0
    for tensor in tensors:
        num_bytes = int(np.prod(tensor[1])) * size
        if current and used + num_bytes > limit:
            shards.append(current)
            current, used = [], 0
        current.append(tensor)
        used += num_bytes
    return shards + [current]


def config(num_layers, dtype):
    return {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
        "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16" if dtype == "bf16" else "float32",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--gigabytes", type=float, default=5.5)
    parser.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
    parser.add_argument("--shard-gigabytes", type=float, default=2)
    arguments = parser.parse_args()
    size = 2 if arguments.dtype == "bf16" else 4
    per_layer = count(layer_tensors(0)) * size
    num_layers = max(1, round((arguments.gigabytes * 1e9 - 2 * VOCAB * HIDDEN * size) / per_layer))
    os.makedirs(arguments.folder)
    block = random_block(arguments.dtype)
    shards = split(list(all_tensors(num_layers)), arguments.shard_gigabytes * 1e9, size)
    weight_map = {}
    for i, tensors in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        write_file(os.path.join(arguments.folder, name), tensors, arguments.dtype, block)
        weight_map.update({tensor: name for tensor, _ in tensors})
    total = count(all_tensors(num_layers)) * size
    with open(os.path.join(arguments.folder, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file)
    with open(os.path.join(arguments.folder, "config.json"), "w") as file:
        json.dump(config(num_layers, arguments.dtype), file, indent=2)
    print(f"{arguments.folder}: {num_layers} layers, {total / 1e9:.2f} GB in {len(shards)} files")


if __name__ == "__main__":
    main()
