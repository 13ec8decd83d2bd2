#!/usr/bin/env python3
"""Times Hugging Face's MoE layer on one GPU, forward and backward, beside `tessera bench --layer=moe`.

usage: hf_layer.py qwen3|fine|mixtral [--tokens 32768] [--experts grouped_mm] [--runs 5] [--warmup 2] [--json]

qwen3: the layer of Qwen3-30B-A3B (128 experts, 8 per token, inner size 768, hidden size 2048); fine: the same with 256
and 1536; mixtral: that of Mixtral 8x7B (8, 2, 14336, 4096). Router and experts, weights and gradients in BF16, no
losses of the router; random weights and hidden states. layer_timing.py says what is timed and counted.
"""
import argparse

import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import layer_timing


def make_layer(name, shape, implementation):
    common = dict(hidden_size=shape.hidden, num_experts_per_tok=shape.top_k, experts_implementation=implementation)
    if name == "mixtral":
        layer = MixtralSparseMoeBlock(transformers.MixtralConfig(
            num_local_experts=shape.experts, intermediate_size=shape.inner, **common))
    else:
        layer = Qwen3MoeSparseMoeBlock(transformers.Qwen3MoeConfig(
            num_experts=shape.experts, moe_intermediate_size=shape.inner, norm_topk_prob=True, **common))
    if layer.experts.config._experts_implementation != implementation:
        raise SystemExit(f"the experts run as {layer.experts.config._experts_implementation}, not {implementation}")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=layer_timing.DEVIATION)
    return layer.train()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=layer_timing.SHAPES)
    parser.add_argument("--experts", default="grouped_mm", help="transformers' implementation of the experts")
    layer_timing.add_arguments(parser)
    arguments = parser.parse_args()
    shape = layer_timing.SHAPES[arguments.shape]
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(arguments.device):
        layer = make_layer(arguments.shape, shape, arguments.experts)
        hidden = torch.randn(1, arguments.tokens, shape.hidden).requires_grad_()
    times, saved = layer_timing.time_layer(layer, layer.named_parameters(), hidden, arguments)
    with torch.no_grad():
        load = layer_timing.expert_load(layer.gate(hidden.view(-1, shape.hidden))[2], shape.experts)
    layer_timing.report(f"transformers {transformers.__version__}, {arguments.experts}", arguments.shape, shape, times,
                        saved, arguments, largest_load=load)


if __name__ == "__main__":
    main()
