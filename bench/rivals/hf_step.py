#!/usr/bin/env python3
"""Times Hugging Face's training step of a MoE on one GPU, beside `tessera bench` on the same machine.

usage: hf_step.py qwen3|mixtral [--micro-batches 4] [--steps 3] [--json]

Shapes are those of Qwen3-30B-A3B with 8 layers or of Mixtral 8x7B with 2, vocabulary 32,768, micro-batches of
4 x 4096 random tokens. Everything is BF16: weights, gradients, AdamW's moments (fused); experts by grouped_mm,
attention by SDPA, no router loss. Prints tokens/s, TFLOPS by this count (6 FLOPs per active
parameter but the embedding table, plus causal attention) and the peak of allocated memory.
"""
import argparse
import json
import time

import torch
import transformers


def make_config(name):
    common = dict(vocab_size=32768, attn_implementation="sdpa", use_cache=False)
    if name == "qwen3":
        return transformers.Qwen3MoeConfig(
            hidden_size=2048, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
            num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, intermediate_size=6144,
            norm_topk_prob=True, tie_word_embeddings=False, rope_theta=1e6, **common)
    return transformers.MixtralConfig(
        hidden_size=4096, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        num_local_experts=8, num_experts_per_tok=2, intermediate_size=14336, tie_word_embeddings=False,
        rope_theta=1e6, **common)


def active_parameters(config, model):
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    count = 0
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            continue
        routed = ".experts." in name
        count += parameter.numel() * (config.num_experts_per_tok / experts if routed else 1)
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=["qwen3", "mixtral"])
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    config = make_config(arguments.shape)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    try:
        model.set_experts_implementation("grouped_mm")
    except AttributeError:
        model.config._experts_implementation = "grouped_mm"
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    sequence = 4096
    batches = [torch.randint(0, 32768, (4, sequence), device="cuda") for _ in range(arguments.micro_batches)]

    def step():
        for batch in batches:
            loss = model(input_ids=batch, labels=batch).loss / len(batches)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    times = []
    for _ in range(arguments.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    median = sorted(times)[len(times) // 2]
    tokens = 4 * sequence * arguments.micro_batches
    heads = config.num_attention_heads * config.head_dim
    flops = tokens * (6 * active_parameters(config, model) + 6 * config.num_hidden_layers * sequence * heads)
    result = {
        "who": f"transformers {transformers.__version__}", "shape": arguments.shape,
        "micro_batches": arguments.micro_batches, "seconds": median, "tokens_per_second": tokens / median,
        "tflops": flops / median / 1e12, "peak_bytes": torch.cuda.max_memory_allocated()}
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"{result['who']}, {arguments.shape}, {arguments.micro_batches} micro-batches: {1e3 * median:.1f} ms a "
              f"step, {result['tokens_per_second']:.0f} tokens/s, {result['tflops']:.1f} TFLOPS, "
              f"peak {result['peak_bytes'] / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
