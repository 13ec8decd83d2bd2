#!/usr/bin/env python3
"""Times Hugging Face's training step of the preset "workstation" on the CPU, beside `tessera bench` on the same machine.

usage: hf_cpu_step.py [--dtype f32|bf16] [--experts grouped_mm|eager] [--steps 3] [--sequences 16]

Mixtral's architecture in the preset's shapes (hidden 512, 8 layers, 8 experts, top-2, inner size 1024, vocabulary
32,768), random sequences of 512 tokens. BF16: weights, gradients and AdamW's moments in BF16. Prints tokens/s.
"""
import argparse
import time

import torch
import transformers


def make_model(dtype, experts):
    config = transformers.MixtralConfig(
        vocab_size=32768, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=1024, num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=False,
        max_position_embeddings=512, attn_implementation="sdpa", use_cache=False)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    try:
        model.set_experts_implementation(experts)
    except AttributeError:
        model.config._experts_implementation = experts
    return model.train()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--experts", choices=["grouped_mm", "eager"], default="grouped_mm")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=16)
    arguments = parser.parse_args()
    dtype = torch.float32 if arguments.dtype == "f32" else torch.bfloat16
    model = make_model(dtype, arguments.experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 32768, (arguments.sequences, 512))

    def step():
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    times = []
    for _ in range(arguments.steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    median = sorted(times)[len(times) // 2]
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
          f"{arguments.dtype}, {arguments.experts}: {tokens.numel() / median:.0f} tokens/s, {1e3 * median:.0f} ms")


if __name__ == "__main__":
    main()
