#!/usr/bin/env python3
"""Times the MoE layers of other libraries on one GPU, forward and backward, as hf_layer.py does that of transformers.

usage: moe_rivals.py liger|torchtitan|megablocks|megatron|sonicmoe qwen3|fine|mixtral [--runs 5] [--warmup 2] [--json]

liger:      Liger-Kernel's fused experts (Triton) behind transformers' router; tunes its kernels first, for minutes;
torchtitan: its MoE module, run without torch.compile;
megablocks: dMoE with grouped products (its sparse ones refuse Triton 3.2 and later);
megatron:   Megatron Core's MoELayer. Without Transformer Engine its experts run one by one;
sonicmoe:   SonicMoE's MoE (CUTLASS's Python language, Triton), less the balance loss of its forward. Needs a GPU, and
            compiles and tunes its kernels first, for minutes.
Softmax routing with the chosen probabilities scaled to sum 1, no losses of the router, BF16 weights and gradients. How
each is installed is in README.md beside this file. A library that is missing or fails ends the script with the reason.
"""
import argparse
import importlib.metadata
import os

import torch

import layer_timing


def liger(name, shape, arguments):
    if arguments.quick:
        os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = "0"
    from liger_kernel.transformers.swiglu import LigerExperts

    import hf_layer
    layer = hf_layer.make_layer(name, shape, "grouped_mm")
    layer.experts = LigerExperts(layer.experts.config)
    return layer, f"liger-kernel {importlib.metadata.version('liger-kernel')}{', untuned' if arguments.quick else ''}"


def torchtitan(_, shape, arguments):
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    experts = GroupedExperts.Config(dim=shape.hidden, hidden_dim=shape.inner, num_experts=shape.experts)
    dispatcher = LocalTokenDispatcher.Config(num_experts=shape.experts, top_k=shape.top_k)
    router = TokenChoiceTopKRouter.Config(
        num_experts=shape.experts, top_k=shape.top_k, score_func="softmax", route_norm=True,
        gate=Linear.Config(in_features=shape.hidden, out_features=shape.experts))
    layer = MoE.Config(num_experts=shape.experts, router=router, load_balance_coeff=None,
                       routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher)).build()
    return layer, f"torchtitan {importlib.metadata.version('torchtitan')}"


def megablocks(_, shape, arguments):
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    layer = dMoE(Arguments(
        hidden_size=shape.hidden, ffn_hidden_size=shape.inner, moe_num_experts=shape.experts, moe_top_k=shape.top_k,
        moe_normalize_expert_weights=1, moe_loss_weight=0.0, mlp_type="glu", mlp_impl="grouped", bias=False,
        return_bias=False, activation_fn=torch.nn.functional.silu, fp16=False, bf16=True, device=arguments.device))
    return layer, f"megablocks {importlib.metadata.version('megablocks')}, grouped"


def megatron(_, shape, arguments):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    try:
        import transformer_engine
        engine = transformer_engine.__version__
    except ImportError:
        engine = None
    torch.distributed.init_process_group("nccl" if arguments.device == "cuda" else "gloo", rank=0, world_size=1,
                                         store=torch.distributed.HashStore())
    parallel_state.initialize_model_parallel()
    if arguments.device == "cuda":
        model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=shape.hidden, num_attention_heads=shape.hidden // 128, ffn_hidden_size=shape.inner,
        moe_ffn_hidden_size=shape.inner, num_moe_experts=shape.experts, moe_router_topk=shape.top_k,
        moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0, moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=engine is not None, moe_permute_fusion=engine is not None, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, bias_activation_fusion=True, add_bias_linear=False, bf16=True,
        params_dtype=torch.bfloat16, gradient_accumulation_fusion=False,
        use_cpu_initialization=arguments.device == "cpu")
    build = get_moe_module_spec(use_te=engine is not None, num_experts=shape.experts,
                                moe_grouped_gemm=engine is not None)
    layer = build(config)
    layer.set_layer_number(1)
    how = f"Transformer Engine {engine}" if engine else "experts one by one"
    return layer, f"megatron-core {importlib.metadata.version('megatron-core')}, {how}"


def sonicmoe(_, shape, arguments):
    from sonicmoe import MoE, moe_TC_softmax_topk_layer
    from sonicmoe.enums import ActivationType

    class Layer(MoE):
        def forward(self, hidden):
            # MoE.forward's call; the softmax is that of the chosen logits, which is the scaled probabilities.
            out, _, _ = moe_TC_softmax_topk_layer(
                hidden.view(-1, self.hidden_size), self.router.weight, self.c_fc.weight.permute(1, 2, 0), None,
                self.c_proj.weight.permute(1, 2, 0), None, self.top_k, self.stream_id, self.activation_function)
            return out.view(hidden.shape)

    layer = Layer(num_experts=shape.experts, num_experts_per_tok=shape.top_k, hidden_size=shape.hidden,
                  intermediate_size=shape.inner, activation_function=ActivationType.SWIGLU, add_bias=False,
                  std=layer_timing.DEVIATION)
    versions = [importlib.metadata.version(package) for package in ("sonic-moe", "quack-kernels")]
    return layer, "sonic-moe {}, quack-kernels {}".format(*versions)


RIVALS = {rival.__name__: rival for rival in (liger, torchtitan, megablocks, megatron, sonicmoe)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rival", choices=RIVALS)
    parser.add_argument("shape", choices=layer_timing.SHAPES)
    parser.add_argument("--quick", action="store_true", help="without liger's tuning")
    layer_timing.add_arguments(parser)
    arguments = parser.parse_args()
    shape = layer_timing.SHAPES[arguments.shape]
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(arguments.device):
        layer, who = RIVALS[arguments.rival](arguments.shape, shape, arguments)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=layer_timing.DEVIATION)
        layer.train()
        hidden = torch.randn(1, arguments.tokens, shape.hidden).requires_grad_()

    def run(values):
        out = layer(values)
        return out[0] if isinstance(out, tuple) else out

    times, saved = layer_timing.time_layer(run, layer.named_parameters(), hidden, arguments)
    layer_timing.report(who, arguments.shape, shape, times, saved, arguments)


if __name__ == "__main__":
    main()
