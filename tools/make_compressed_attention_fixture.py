#!/usr/bin/env python3
"""Makes the ground truth of model/run/compressed_attention_test.cc with transformers' DeepSeek-V4.

    tools/make_compressed_attention_fixture.py tests/data/compressed_attention.safetensors

Three layers of attention alone, of all kinds, between an embedding and a head: weights and their gradients under our
names ("grad." before those of gradients), tokens, labels and the mean loss of two sequences. Needs torch and
transformers 5.
"""
import pathlib
import sys

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention, DeepseekV4RMSNorm, DeepseekV4RotaryEmbedding)

LENGTH = 29
CONFIG = dict(vocab_size=37, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1, head_dim=12,
              q_lora_rank=10, o_groups=2, o_lora_rank=6, sliding_window=5, index_n_heads=6, index_head_dim=8, index_topk=3,
              partial_rotary_factor=4 / 12, rope_theta=100.0, compress_rope_theta=1000.0,
              layer_types=["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
              compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=6),
              rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16))
NAMES = {"q_a_proj.weight": "attn.q_down.weight", "q_a_norm.weight": "attn.q_latent_norm.weight",
         "q_b_proj.weight": "attn.q_up.weight", "kv_proj.weight": "attn.kv.weight", "kv_norm.weight": "attn.kv_norm.weight",
         "o_a_proj.weight": "attn.o_down.weight", "o_b_proj.weight": "attn.o_up.weight", "sinks": "attn.sinks",
         "compressor.kv_proj.weight": "compress.kv.weight", "compressor.gate_proj.weight": "compress.gate.weight",
         "compressor.position_bias": "compress.position_bias", "compressor.kv_norm.weight": "compress.norm.weight",
         "compressor.indexer.kv_proj.weight": "index.kv.weight", "compressor.indexer.gate_proj.weight": "index.gate.weight",
         "compressor.indexer.position_bias": "index.position_bias", "compressor.indexer.kv_norm.weight": "index.norm.weight",
         "compressor.indexer.q_b_proj.weight": "index.q.weight",
         "compressor.indexer.scorer.weights_proj.weight": "index.weights.weight"}


class Layers(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norms = nn.ModuleList(DeepseekV4RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in config.layer_types)
        self.attention = nn.ModuleList(DeepseekV4Attention(config, i) for i in range(config.num_hidden_layers))
        self.final_norm = DeepseekV4RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = DeepseekV4RotaryEmbedding(config)

    def forward(self, ids):
        x = self.embedding(ids)
        positions = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
        angles = {kind: self.rotary(x, position_ids=positions, layer_type=kind) for kind in ("main", "compress")}
        ago = positions[0][:, None] - positions[0][None, :]
        seen = (ago >= 0) & (ago < self.config.sliding_window)
        mask = torch.where(seen, 0.0, float("-inf"))[None, None].expand(ids.shape[0], -1, -1, -1)
        for norm, attention in zip(self.norms, self.attention):
            x = x + attention(norm(x), position_embeddings=angles, position_ids=positions, attention_mask=mask)[0]
        return self.head(self.final_norm(x))


def our_name(name):
    part, _, rest = name.partition(".")
    if part in ("norms", "attention"):
        layer, _, own = rest.partition(".")
        return f"layers.{layer}." + ("attn_norm.weight" if part == "norms" else NAMES[own])
    return name


def main(path):
    config = DeepseekV4Config(**CONFIG)
    config._attn_implementation = "eager"
    model = Layers(config).float().train()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.4 * noise)
    ids = torch.randint(0, config.vocab_size, (2, LENGTH), generator=generator)
    labels = torch.randint(0, config.vocab_size, (2, LENGTH), generator=generator)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    loss.backward()
    tensors = {"tokens": ids.flatten().int(), "labels": labels.flatten().int(), "loss": loss.detach().reshape(1)}
    for name, parameter in model.named_parameters():
        tensors[our_name(name)] = parameter.detach()
        if parameter.grad is not None:
            tensors["grad." + our_name(name)] = parameter.grad
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, pathlib.Path(path))


if __name__ == "__main__":
    main(sys.argv[1])
