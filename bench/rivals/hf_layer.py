#!/usr/bin/env python3
"""Times Hugging Face's MoE layer on one GPU, forward and backward, beside `tessera bench --layer=moe`.

usage: hf_layer.py qwen3|fine|mixtral [--tokens 32768] [--experts grouped_mm] [--runs 5] [--warmup 2] [--json]

qwen3: the layer of Qwen3-30B-A3B (128 experts, 8 per token, inner size 768, hidden size 2048); fine: the same with 256
and 1536; mixtral: that of Mixtral 8x7B (8, 2, 14336, 4096). Router and experts, BF16, no losses of the router; random
weights and hidden states. The backward pass gives the gradients of the hidden states and of all weights, in BF16. As
with ours, each pass begins with an empty cache and a host that waits, and ends when the GPU is done. FLOPs: those of
the router's and the experts' products, twice as many backward.
"""
import argparse
import json
import time

import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

# name: class, experts, experts of a token, inner size of an expert, hidden size
SHAPES = {
    "qwen3": (Qwen3MoeSparseMoeBlock, 128, 8, 768, 2048),
    "fine": (Qwen3MoeSparseMoeBlock, 128, 8, 256, 1536),
    "mixtral": (MixtralSparseMoeBlock, 8, 2, 14336, 4096),
}
FLUSH_BYTES = 256 << 20


def make_layer(block, experts, top_k, inner, hidden, implementation):
    common = dict(hidden_size=hidden, num_experts_per_tok=top_k, experts_implementation=implementation)
    if block is Qwen3MoeSparseMoeBlock:
        config = transformers.Qwen3MoeConfig(num_experts=experts, moe_intermediate_size=inner, norm_topk_prob=True,
                                             **common)
    else:
        config = transformers.MixtralConfig(num_local_experts=experts, intermediate_size=inner, **common)
    layer = block(config)
    if layer.experts.config._experts_implementation != implementation:
        raise SystemExit(f"the experts run as {layer.experts.config._experts_implementation}, not {implementation}")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return layer.train()


def median(values):
    return sorted(values)[len(values) // 2]


class Stopwatch:
    """Seconds of a pass from an empty cache, with the GPU done before and after."""

    def __init__(self, device):
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def time(self, run):
        self.flush.zero_()
        self.wait()
        start = time.perf_counter()
        result = run()
        self.wait()
        return time.perf_counter() - start, result


def expert_load(layer, hidden):
    """Assignments of the busiest expert over the mean."""
    with torch.no_grad():
        chosen = layer.gate(hidden)[2].flatten()
    counts = torch.bincount(chosen, minlength=layer.experts.num_experts)
    return counts.max().item() * counts.numel() / counts.sum().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--experts", default="grouped_mm", help="transformers' implementation of the experts")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device = arguments.device
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    block, experts, top_k, inner, width = SHAPES[arguments.shape]
    with torch.device(device):
        layer = make_layer(block, experts, top_k, inner, width, arguments.experts)
        hidden = torch.randn(1, arguments.tokens, width).requires_grad_()
        grad = torch.randn(1, arguments.tokens, width)
    stopwatch = Stopwatch(device)
    in_use = torch.cuda.memory_allocated if device == "cuda" else lambda: 0
    times = {"forward": [], "backward": []}
    for run in range(arguments.warmup + arguments.runs):
        before = in_use()
        forward, out = stopwatch.time(lambda: layer(hidden))
        saved = in_use() - before - out.numel() * out.element_size()
        backward, _ = stopwatch.time(lambda: out.backward(grad))
        hidden.grad = None
        layer.zero_grad(set_to_none=True)
        if run >= arguments.warmup:
            times["forward"].append(forward)
            times["backward"].append(backward)
    flops = 2 * arguments.tokens * width * (3 * top_k * inner + experts)
    result = {"who": f"transformers {transformers.__version__}, {arguments.experts}", "shape": arguments.shape,
              "tokens": arguments.tokens, "saved_bytes": saved, "load": expert_load(layer, hidden.squeeze(0))}
    for name, factor in (("forward", 1), ("backward", 2)):
        seconds = median(times[name])
        result[name] = {"seconds": sorted(times[name]), "median_seconds": seconds, "flops": factor * flops,
                        "tflops": factor * flops / seconds / 1e12}
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{result['who']}, {arguments.shape}, {arguments.tokens} tokens, the largest load {result['load']:.2f} of the "
          f"mean, {saved / 2**20:.0f} MiB kept for the backward pass")
    for name in times:
        print(f"{name:8} {1e3 * result[name]['median_seconds']:9.3f} ms, {result[name]['tflops']:.1f} TFLOPS")


if __name__ == "__main__":
    main()
