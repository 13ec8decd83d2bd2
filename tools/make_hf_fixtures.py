#!/usr/bin/env python3
"""Makes ground truth for tests with transformers and PyTorch, one folder a case, in the layout of tests/data/hf.

    tools/make_hf_fixtures.py OUTPUT [CASE ...]
    tools/make_hf_fixtures.py --bf16 FOLDER ...

Each folder holds config.json and model.safetensors as transformers writes them, grads.safetensors (gradients of the
loss under the same names) and io.safetensors: input_ids, logits, loss, aux_loss where there is one, and twelve AdamW
steps (traj_input_ids, traj_loss, traj_grad_norm, traj_lr, traj_final_logits). With --bf16, the errors that a run of an
existing folder's model in BF16 makes against its io.safetensors and grads.safetensors go to bf16.safetensors: of every
row of logits and of each gradient tensor. Needs torch and transformers 5.
"""
import copy
import json
import math
import pathlib
import re
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

from hf_prediction import attach_predictions, copied_tables, has_predictions, prediction_loss

SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=40, max_position_embeddings=256, pad_token_id=None, bos_token_id=None, eos_token_id=None)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
LATENT = dict(kv_lora_rank=12, q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=10,
              num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1)
NEMOTRON = dict(vocab_size=64, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=12, intermediate_size=40,
                max_position_embeddings=256, pad_token_id=None, bos_token_id=None, eos_token_id=None, layer_norm_epsilon=1e-3,
                mamba_num_heads=4, mamba_head_dim=6, n_groups=2, ssm_state_size=5, chunk_size=16, conv_kernel=3,
                moe_intermediate_size=16, moe_shared_expert_intermediate_size=20, num_experts_per_tok=2)
PHIMOE = dict({**SMALL, "intermediate_size": 16}, num_local_experts=6, num_experts_per_tok=2)
DEEPSEEK_V4 = dict(vocab_size=64, hidden_size=32, num_attention_heads=4, head_dim=12, max_position_embeddings=256,
                   pad_token_id=None, bos_token_id=None, eos_token_id=None, num_experts_per_tok=2, moe_intermediate_size=16,
                   q_lora_rank=20, o_groups=2, o_lora_rank=10, sliding_window=5, index_n_heads=6, index_head_dim=8, index_topk=2)

CASES = {
    "glm4_moe": ("Glm4Moe", dict(SMALL, **EXPERTS, head_dim=16, n_routed_experts=8, n_shared_experts=1, n_group=2,
                                 topk_group=1, first_k_dense_replace=1, routed_scaling_factor=1.5, use_qk_norm=True,
                                 attention_bias=True)),
    "deepseek_v2_groups_yarn": ("DeepseekV2", dict(
        SMALL, **EXPERTS, **{**LATENT, "q_lora_rank": 20}, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        routed_scaling_factor=3.0, attention_bias=True,
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, mscale=0.7, mscale_all_dim=0.5,
                             beta_fast=16, beta_slow=2, original_max_position_embeddings=12))),
    "deepseek_v3_halves_yarn": ("DeepseekV3", dict(
        SMALL, **EXPERTS, **LATENT, n_group=2, topk_group=1, rope_interleave=False, norm_topk_prob=False,
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, mscale=1.0, mscale_all_dim=1.0,
                             original_max_position_embeddings=16))),
    "deepseek_v3_mtp": ("DeepseekV3", dict(
        SMALL, **EXPERTS, **LATENT, n_group=2, topk_group=1, num_nextn_predict_layers=2)),
    "deepseek_v32_mtp": ("DeepseekV32", dict(
        SMALL, **EXPERTS, **{**LATENT, "q_lora_rank": 20}, n_group=2, topk_group=1, index_topk=7, index_head_dim=12,
        index_n_heads=10, mlp_layer_types=["dense", "sparse"], num_nextn_predict_layers=1)),
    # Sequences of 24 tokens are longer than what is chosen, twice; pages and caches of tests are, too.
    "deepseek_v32": ("DeepseekV32", dict(
        SMALL, **EXPERTS, **{**LATENT, "q_lora_rank": 20}, num_hidden_layers=3, n_group=2, topk_group=1,
        index_topk=7, index_head_dim=12, index_n_heads=10, mlp_layer_types=["dense", "sparse", "dense"],
        attention_bias=True,
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, mscale=1.0, mscale_all_dim=1.0,
                             original_max_position_embeddings=16))),
    "glm_moe_dsa": ("GlmMoeDsa", dict(
        SMALL, **EXPERTS, **{**LATENT, "q_lora_rank": 20}, n_group=1, topk_group=1, routed_scaling_factor=1.8,
        index_topk=5, index_head_dim=8, index_n_heads=12)),
    "glm4_moe_mtp": ("Glm4Moe", dict(SMALL, **EXPERTS, head_dim=16, n_routed_experts=8, n_shared_experts=1, n_group=1,
                                     topk_group=1, first_k_dense_replace=1, use_qk_norm=True)),
    "qwen3_next_mtp": ("Qwen3Next", dict(
        SMALL, **EXPERTS, head_dim=8, num_experts=6, shared_expert_intermediate_size=16, linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=6, linear_value_head_dim=8, linear_conv_kernel_dim=2,
        tie_word_embeddings=False, layer_types=["linear_attention", "full_attention"],
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))),
    "qwen2_moe_sparse_step": ("Qwen2Moe", dict(
        SMALL, **EXPERTS, num_experts=6, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3],
        shared_expert_intermediate_size=24, norm_topk_prob=True, qkv_bias=False, output_router_logits=True,
        router_aux_loss_coef=0.05, use_sliding_window=True, sliding_window=7, max_window_layers=3)),
    "qwen3_window": ("Qwen3", dict(SMALL, head_dim=12, attention_bias=True, tie_word_embeddings=False,
                                   use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "mixtral_window_gelu": ("Mixtral", dict(SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=9,
                                            tie_word_embeddings=True, hidden_act="gelu")),
    "gpt_oss": ("GptOss", dict(
        {**SMALL, "intermediate_size": 32}, head_dim=16, num_local_experts=6, num_experts_per_tok=2, sliding_window=7,
        output_router_logits=True, router_aux_loss_coef=0.05,
        rope_parameters=dict(rope_type="yarn", rope_theta=150000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0,
                             truncate=False, original_max_position_embeddings=16))),
    "kimi_k2": ("DeepseekV3", dict(
        SMALL, **EXPERTS, **{**LATENT, "q_lora_rank": 20}, n_group=1, topk_group=1, routed_scaling_factor=2.827,
        rope_parameters=dict(rope_type="yarn", rope_theta=50000.0, factor=32.0, mscale=1.0, mscale_all_dim=1.0,
                             beta_fast=1.0, beta_slow=1.0, original_max_position_embeddings=16))),
    "dots1": ("Dots1", dict(
        SMALL, **EXPERTS, head_dim=12, n_routed_experts=8, n_shared_experts=2, n_group=2, topk_group=1,
        num_hidden_layers=3, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.5,
        attention_bias=True, sliding_window=6, max_window_layers=2)),
    "solar_open": ("SolarOpen", dict(
        {k: v for k, v in SMALL.items() if k != "intermediate_size"}, **EXPERTS, head_dim=12, n_routed_experts=8,
        n_shared_experts=2, n_group=2, topk_group=1, routed_scaling_factor=1.3, attention_bias=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "minimax_m2": ("MiniMaxM2", dict(
        {**SMALL, "intermediate_size": 16}, head_dim=12, num_local_experts=6, num_experts_per_tok=2,
        rope_parameters=dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5))),
    "ernie4_5_moe": ("Ernie4_5_Moe", dict(
        SMALL, num_hidden_layers=4, moe_num_experts=8, moe_k=2, moe_intermediate_size=16, moe_num_shared_experts=2,
        moe_layer_start_index=1, moe_layer_end_index=2, tie_word_embeddings=True)),
    "hunyuan_v1_moe": ("HunYuanMoEV1", dict(
        {**SMALL, "intermediate_size": 24}, head_dim=12, num_experts=6, moe_topk=2, attention_bias=True,
        rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, alpha=50.0, factor=1.0))),
    "glm4_moe_lite": ("Glm4MoeLite", dict(
        SMALL, **EXPERTS, **{**LATENT, "q_lora_rank": 20, "first_k_dense_replace": 1}, num_hidden_layers=3, n_group=2,
        topk_group=1, routed_scaling_factor=1.8, mlp_layer_types=["dense", "sparse", "dense"])),
    "granitemoe": ("GraniteMoe", dict(
        {**SMALL, "intermediate_size": 16}, num_local_experts=6, num_experts_per_tok=2, embedding_multiplier=12.0,
        logits_scaling=6.0, residual_multiplier=0.22, attention_multiplier=0.2, output_router_logits=True,
        router_aux_loss_coef=0.05, tie_word_embeddings=True, attention_bias=True)),
    "granitemoeshared": ("GraniteMoeShared", dict(
        {**SMALL, "intermediate_size": 16}, num_local_experts=6, num_experts_per_tok=3, shared_intermediate_size=20,
        embedding_multiplier=3.0, logits_scaling=0.5, residual_multiplier=0.6, attention_multiplier=0.5)),
    "granitemoe_swa": ("GraniteMoeSWA", dict(
        {**SMALL, "intermediate_size": 16}, num_hidden_layers=3, num_local_experts=6, num_experts_per_tok=2,
        shared_intermediate_size=20, embedding_multiplier=3.0, logits_scaling=0.5, residual_multiplier=0.6,
        attention_multiplier=0.5, attention_bias=True, sliding_window=6,
        layer_rope_theta=[0, 500.0, 500.0], rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=3.0))),
    "hy_v3": ("HYV3", dict(
        SMALL, **EXPERTS, head_dim=12, num_experts=8, num_shared_experts=2, router_scaling_factor=1.7,
        attention_bias=True, mlp_bias=True)),
    # With a small epsilon twelve steps in F32 differ from those in F64 by more than the tests allow.
    "qwen3_next": ("Qwen3Next", dict(
        SMALL, **EXPERTS, num_hidden_layers=3, rms_norm_eps=1e-3, head_dim=16, num_experts=8, shared_expert_intermediate_size=24,
        norm_topk_prob=True, output_router_logits=True, router_aux_loss_coef=0.05, attention_bias=True,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=10,
        linear_conv_kernel_dim=4, tie_word_embeddings=False, mlp_only_layers=[1],
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25))),
    "qwen3_next_listed": ("Qwen3Next", dict(
        SMALL, **EXPERTS, num_hidden_layers=3, head_dim=8, num_experts=6, shared_expert_intermediate_size=16,
        norm_topk_prob=False, linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=8,
        linear_value_head_dim=4, linear_conv_kernel_dim=2, tie_word_embeddings=True,
        layer_types=["full_attention", "linear_attention", "full_attention"],
        rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5))),
    "qwen3_5_moe_text": ("Qwen3_5Moe", dict(
        SMALL, **EXPERTS, num_hidden_layers=3, rms_norm_eps=1e-3, head_dim=16, num_experts=4, shared_expert_intermediate_size=24,
        output_router_logits=True, router_aux_loss_coef=0.05, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=6, linear_value_head_dim=10, linear_conv_kernel_dim=4, tie_word_embeddings=True,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25, mrope_interleaved=True,
                             mrope_section=[1, 1, 0]))),
    "qwen3_5_text": ("Qwen3_5", dict(
        SMALL, num_hidden_layers=4, rms_norm_eps=1e-3, head_dim=8, attention_bias=True, linear_num_key_heads=3,
        linear_num_value_heads=3, linear_key_head_dim=8, linear_value_head_dim=4, linear_conv_kernel_dim=2,
        rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5))),
    "granitemoehybrid": ("GraniteMoeHybrid", dict(
        {**SMALL, "intermediate_size": 16}, num_hidden_layers=3, num_local_experts=4, num_experts_per_tok=2,
        rms_norm_eps=1e-3, shared_intermediate_size=20, embedding_multiplier=3.0, logits_scaling=2.0,
        residual_multiplier=0.6, attention_multiplier=0.2, output_router_logits=True, router_aux_loss_coef=0.05,
        tie_word_embeddings=True, layer_types=["linear_attention", "full_attention", "linear_attention"],
        mamba_expand=1, mamba_n_heads=4, mamba_n_groups=2, mamba_d_state=6, mamba_chunk_size=16,
        time_step_limit=(0.5, 0.9))),
    "granitemoehybrid_dense": ("GraniteMoeHybrid", dict(
        SMALL, num_local_experts=0, shared_intermediate_size=24, position_embedding_type="rope", attention_bias=True,
        layer_types=["full_attention", "linear_attention"], mamba_n_heads=4, mamba_d_state=10, mamba_d_conv=3,
        mamba_expand=1, mamba_proj_bias=True, mamba_conv_bias=False)),
    "nemotron_h": ("NemotronH", dict(
        NEMOTRON, layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
        n_routed_experts=4, n_group=2, topk_group=1, routed_scaling_factor=2.5, time_step_min=0.6)),
    "nemotron_h_latent": ("NemotronH", dict(
        NEMOTRON, layers_block_type=["moe", "linear_attention", "full_attention"], n_routed_experts=6, moe_latent_size=12,
        norm_topk_prob=False, use_bias=True, use_conv_bias=False, mlp_hidden_act="gelu")),
    "exaone_moe": ("ExaoneMoe", dict(
        SMALL, **EXPERTS, num_hidden_layers=3, head_dim=12, sliding_window=6, rms_norm_eps=1e-3, num_experts=8,
        num_shared_experts=2, n_group=2, topk_group=1, routed_scaling_factor=1.7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["sparse", "dense", "sparse"],
        rope_parameters=dict(rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=32))),
    "mellum": ("Mellum", dict(
        SMALL, **EXPERTS, num_hidden_layers=3, head_dim=12, sliding_window=5, num_experts=6, norm_topk_prob=True,
        attention_bias=True, output_router_logits=True, router_aux_loss_coef=0.05,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["sparse", "sparse", "dense"],
        rope_parameters=dict(
            full_attention=dict(rope_type="yarn", rope_theta=500000.0, factor=4.0, original_max_position_embeddings=16),
            sliding_attention=dict(rope_type="default", rope_theta=100.0)))),
    "mimo_v2_flash": ("MiMoV2Flash", dict(
        SMALL, **EXPERTS, num_hidden_layers=3, head_dim=12, v_head_dim=10, sliding_window=6, n_routed_experts=6,
        n_group=2, topk_group=1, routed_scaling_factor=1.3, attention_bias=True,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=50000.0, partial_rotary_factor=0.334),
            sliding_attention=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5)))),
    "laguna": ("Laguna", dict(
        SMALL, **EXPERTS, num_hidden_layers=3, rms_norm_eps=1e-3, head_dim=12, sliding_window=6, num_experts=6,
        num_attention_heads_per_layer=[4, 6, 6], shared_expert_intermediate_size=20, moe_routed_scaling_factor=1.4,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_type="yarn", rope_theta=50000.0, factor=4.0, partial_rotary_factor=0.5,
                                original_max_position_embeddings=16),
            sliding_attention=dict(rope_type="default", rope_theta=100.0)))),
    "laguna_elements": ("Laguna", dict(
        SMALL, **EXPERTS, num_hidden_layers=2, rms_norm_eps=1e-3, head_dim=8, gating="per-element", num_experts=4,
        shared_expert_intermediate_size=16, mlp_layer_types=["sparse", "sparse"], tie_word_embeddings=True)),
    "gemma4_text": ("Gemma4", dict(
        SMALL, num_hidden_layers=3, rms_norm_eps=1e-3, head_dim=8, global_head_dim=16, num_global_key_value_heads=1,
        attention_k_eq_v=True, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=16,
        hidden_size_per_layer_input=0, sliding_window=6, final_logit_softcapping=8.0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_type="proportional", rope_theta=500.0, partial_rotary_factor=0.25),
            sliding_attention=dict(rope_type="default", rope_theta=100.0)))),
    "gemma4_text_values": ("Gemma4", dict(
        {**SMALL, "pad_token_id": 5}, num_hidden_layers=3, rms_norm_eps=1e-3, head_dim=12, enable_moe_block=True, num_experts=4,
        top_k_experts=3, moe_intermediate_size=16, hidden_size_per_layer_input=0, sliding_window=5, attention_bias=True,
        hidden_activation="silu", tie_word_embeddings=False,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        per_layer_config={0: dict(head_dim=8, num_key_value_heads=1), 2: dict(head_dim=8, num_key_value_heads=1)},
        rope_parameters=dict(
            full_attention=dict(rope_type="proportional", rope_theta=500.0, partial_rotary_factor=0.5, factor=2.0),
            sliding_attention=dict(rope_type="linear", rope_theta=100.0, factor=3.0)))),
    "gemma4_text_dense": ("Gemma4", dict(
        SMALL, num_hidden_layers=2, rms_norm_eps=1e-3, head_dim=8, global_head_dim=8, attention_k_eq_v=True,
        hidden_size_per_layer_input=0, sliding_window=7, final_logit_softcapping=30.0,
        layer_types=["sliding_attention", "full_attention"])),
    "afmoe": ("Afmoe", dict(
        SMALL, **EXPERTS, num_hidden_layers=4, rms_norm_eps=1e-3, head_dim=12, num_experts=8, num_shared_experts=2,
        num_dense_layers=1, route_scale=1.6, sliding_window=7, global_attn_every_n_layers=3, mup_enabled=True)),
    "kimi_linear": ("KimiLinear", dict(
        SMALL, **EXPERTS, **{k: v for k, v in LATENT.items() if k not in ("n_routed_experts", "first_k_dense_replace")},
        num_hidden_layers=4, rms_norm_eps=1e-3, num_local_experts=8, n_group=2, topk_group=1, routed_scaling_factor=1.4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "dense"], linear_head_dim=6, linear_num_heads=4,
        linear_conv_kernel_dim=3)),
    "kimi_linear_queries": ("KimiLinear", dict(
        SMALL, **EXPERTS, **{k: v for k, v in LATENT.items() if k not in ("n_routed_experts", "first_k_dense_replace", "q_lora_rank")},
        q_lora_rank=20, num_hidden_layers=2, rms_norm_eps=1e-3, num_local_experts=6, norm_topk_prob=False,
        layer_types=["full_attention", "linear_attention"], mlp_layer_types=["sparse", "dense"], linear_head_dim=16,
        linear_num_heads=2, attention_bias=True)),
    "lfm2_moe": ("Lfm2Moe", dict(
        SMALL, **EXPERTS, num_hidden_layers=4, norm_eps=1e-3, num_experts=6, num_dense_layers=1, routed_scaling_factor=1.4,
        layer_types=["conv", "full_attention", "conv", "conv"], rope_parameters=dict(rope_type="default", rope_theta=1000.0))),
    "lfm2_moe_biases": ("Lfm2Moe", dict(
        SMALL, **EXPERTS, num_hidden_layers=3, norm_eps=1e-3, num_experts=4, num_dense_layers=0, use_expert_bias=False,
        norm_topk_prob=False, conv_bias=True, conv_L_cache=4, head_dim=12, tie_word_embeddings=False,
        layer_types=["full_attention", "conv", "full_attention"])),
    "llama4": ("Llama4", dict(
        {**SMALL, "intermediate_size": 16}, num_hidden_layers=4, head_dim=12, rms_norm_eps=1e-3, intermediate_size_mlp=40,
        num_local_experts=4, num_experts_per_tok=1, moe_layers=[1, 2], no_rope_layers=[1, 0, 1, 1], attention_chunk_size=7,
        floor_scale=4, attn_scale=0.4,
        rope_parameters=dict(rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=32))),
    "llama4_top2": ("Llama4", dict(
        {**SMALL, "intermediate_size": 16}, num_hidden_layers=4, head_dim=8, intermediate_size_mlp=24, num_local_experts=6,
        num_experts_per_tok=2, interleave_moe_layer_step=2, attention_chunk_size=8, use_qk_norm=False,
        attn_temperature_tuning=False, attention_bias=True, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1000.0))),
    # Of sequences of 24 tokens an indexer chooses 2 of 6 entries; gates and others of some experts are clamped.
    "deepseek_v4": ("DeepseekV4", dict(
        DEEPSEEK_V4, num_hidden_layers=4, rms_norm_eps=1e-3, hc_mult=3, hc_sinkhorn_iters=4, hc_eps=1e-3,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                     "compressed_sparse_attention"],
        mlp_layer_types=["hash_moe", "moe", "hash_moe", "moe"], n_routed_experts=6, routed_scaling_factor=1.4,
        compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=7), partial_rotary_factor=0.5,
        rope_parameters=dict(
            main=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5),
            compress=dict(rope_type="yarn", rope_theta=2000.0, partial_rotary_factor=0.5, factor=4.0,
                          attention_factor=1.0, original_max_position_embeddings=16)))),
    "deepseek_v4_mtp": ("DeepseekV4", dict(
        DEEPSEEK_V4, num_hidden_layers=2, rms_norm_eps=1e-3, hc_mult=3, hc_sinkhorn_iters=4, hc_eps=1e-3,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"], mlp_layer_types=["hash_moe", "moe"],
        compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=7), n_routed_experts=6,
        partial_rotary_factor=0.5, num_nextn_predict_layers=2)),
    # By the names of older files.
    "deepseek_v4_older": ("DeepseekV4", dict(
        DEEPSEEK_V4, num_hidden_layers=2, rms_norm_eps=1e-3, hc_mult=2, compress_ratios=[4, 0], compress_rate_csa=3, num_hash_layers=1,
        qk_rope_head_dim=6, n_routed_experts=4, scoring_func="sigmoid", swiglu_limit=1.5)),
    # Sequences of 24 tokens are within one's original context, and beyond the other's.
    "phimoe": ("Phimoe", dict(
        PHIMOE, num_hidden_layers=3, rms_norm_eps=1e-3, attention_bias=True, lm_head_bias=True, sliding_window=9,
        router_jitter_noise=0.2, output_router_logits=True, router_aux_loss_coef=0.05,
        rope_parameters=dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.25, 1.5, 3.0],
                             long_factor=[1.5, 3.0, 9.0, 30.0], short_mscale=1.2, long_mscale=1.4,
                             original_max_position_embeddings=32))),
    "phimoe_long": ("Phimoe", dict(
        PHIMOE, router_jitter_noise=0.01, tie_word_embeddings=True, hidden_act="gelu",
        rope_parameters=dict(rope_type="longrope", rope_theta=500.0, short_factor=[1.0, 1.25, 1.5, 3.0],
                             long_factor=[1.5, 3.0, 9.0, 30.0], short_mscale=1.2, long_mscale=1.4,
                             original_max_position_embeddings=16))),
    "llama_dynamic_bias": ("Llama", dict(SMALL, **{"max_position_embeddings": 10}, attention_bias=True, mlp_bias=True,
                                         rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0))),
    "llama_linear": ("Llama", dict(SMALL, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh",
                                   rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=3.0))),
}

# Families of other names than transformers' class has.
PUBLISHED_TYPES = {"kimi_k2": "kimi_k2"}

# Seeds of cases whose own, made of their names, let an indexer choose between scores that are next to equal.
SEEDS = {"deepseek_v32": 24, "deepseek_v32_mtp": 224, "glm_moe_dsa": 8}
LEAST_GAP = 2e-4

# Families that draw experts in training, whose truth is that of evaluation.
EVALUATED = ("Phimoe",)

# Layers of multi-token prediction (hf_prediction.py), whose mean loss enters the loss times this.
PREDICTIONS = {"deepseek_v3_mtp": 2, "deepseek_v32_mtp": 1, "deepseek_v4_mtp": 2, "glm4_moe_mtp": 1, "qwen3_next_mtp": 1}
PREDICTION_WEIGHT = 0.3


def learning_rate(step, steps, warmup=3, peak=3e-3, floor=0.1):
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def is_centred_norm(model, name):
    centred = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text")
    return model.config.model_type in centred and "norm" in name and "linear_attn" not in name


def randomize(model, generator):
    for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
        if "inv_freq" in name or name.endswith("embed_scale"):
            continue
        if name.endswith("tid2eid"):  # distinct experts for each token id
            count = model.config.n_routed_experts
            tensor.data = torch.stack([torch.randperm(count, generator=generator)[:tensor.shape[1]] for _ in tensor])
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if is_centred_norm(model, name):  # whose 1 + weight is exact in F32
            tensor.data = (0.1 * noise * 256).round() / 256 + 0.0
        elif "conv1d" in name or name.endswith("conv.conv.weight"):
            tensor.data = 0.5 * noise
        elif name.endswith("norm.bias"):
            tensor.data = 0.3 * noise
        elif "norm" in name or name.endswith("layer_scalar"):
            tensor.data = 1 + 0.1 * noise
        elif name.endswith(("router.scale", "per_expert_scale", "_hc.scale", "hc_head.hc_scale")):
            tensor.data = 1 + 0.3 * noise
        elif name.endswith("embed_tokens.weight"):
            tensor.data = 0.5 * noise
        elif name.endswith(("gate_up_proj_bias", "sinks")):  # so that some gates are clamped
            tensor.data = (3.0 if name.endswith("bias") else 1.0) * noise
        elif name.endswith(("position_bias", "_hc.base", "hc_base")):
            tensor.data = 0.5 * noise
        elif model.config.model_type == "deepseek_v4" and name.endswith("experts.gate_up_proj"):
            tensor.data = 0.12 * noise
            tensor.data[0] *= 6  # so that some gates are clamped
        else:
            tensor.data = (0.03 if name.endswith(("correction_bias", "expert_bias")) else 0.12) * noise


def tell_length(model, length):
    """Phi's rotation of sequences of so many tokens: transformers 5.17 chooses amplitudes by their length but leaves it
    out where it chooses factors, unlike earlier versions and the code published with the model."""
    rotary = getattr(model.model, "rotary_emb", None)
    if model.config.model_type == "phimoe" and rotary.rope_type == "longrope":
        find = rotary.rope_init_fn
        rotary.rope_init_fn = lambda config, device=None: find(config, device, seq_len=length)


def freeze_indexers(model):
    """Their choice has no gradient, so nothing trains them, and weight decay alone is not to shrink them."""
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            parameter.requires_grad_(False)


class ChoiceGaps:
    """By how much what indexers choose is better than what they do not, relative to the largest score of a token: where
    that is next to nothing, as of scores that ReLU made zero, two programs may choose differently."""

    def __init__(self):
        self.least = math.inf

    def __enter__(self):
        self.topk = torch.Tensor.topk
        gaps = self

        def topk(scores, k, dim=-1, **options):
            if scores.dim() == 3 and scores.shape[1] == scores.shape[2]:
                gaps.note(scores.detach(), k)
            return gaps.topk(scores, k, dim=dim, **options)

        torch.Tensor.topk = topk
        return self

    def __exit__(self, *_):
        torch.Tensor.topk = self.topk

    def note(self, scores, k):
        if scores.shape[-1] <= k:
            return
        best = scores.sort(-1, descending=True).values[:, k:]  # of tokens that see more
        largest = torch.where(best > torch.finfo(best.dtype).min / 2, best.abs(), 0).amax(-1)
        self.least = min(self.least, ((best[..., k - 1] - best[..., k]) / largest).min().item())


def find_loss(model, ids):
    """The loss that is trained, and the model's own output."""
    output = model(input_ids=ids, labels=ids)
    if not has_predictions(model):
        return output.loss, output
    return output.loss + PREDICTION_WEIGHT * prediction_loss(model, ids), output


def save_gradients(model, folder, file="grads.safetensors"):
    """Through a model whose weights are the gradients, so that the names are those of the published layout."""
    carrier = copy.deepcopy(model)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in carrier.named_parameters():
        grad = gradients[name]
        parameter.data = torch.zeros_like(parameter) if grad is None else grad.clone()
        parameter.grad = None
    for name, buffer in carrier.named_buffers():
        if name.endswith(("correction_bias", "expert_bias", "layer_scalar", "tid2eid")):
            buffer.zero_()
    carrier.save_pretrained(folder / "grads")
    (folder / "grads" / "model.safetensors").rename(folder / file)
    for leftover in (folder / "grads").iterdir():
        leftover.unlink()
    (folder / "grads").rmdir()


def train(model, batches):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # What norms of 1 + weight decay to depends on how they are kept.
    centred = [p for name, p in model.named_parameters() if is_centred_norm(model, name)]
    decayed = [p for p in trained if not any(p is other for other in centred)]
    groups = [{"params": decayed}] + ([{"params": centred, "weight_decay": 0.0}] if centred else [])
    optimizer = torch.optim.AdamW(groups, lr=0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses, norms, rates = [], [], []
    for step, ids in enumerate(batches):
        rates.append(learning_rate(step, len(batches)))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1]
        optimizer.zero_grad(set_to_none=False)
        loss, _ = find_loss(model, ids)
        loss.backward()
        for parameter in trained:  # an expert without tokens is decayed all the same
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norms.append(torch.nn.utils.clip_grad_norm_(trained, 1.0))
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(norms), torch.tensor(rates, dtype=torch.float64)


def copy_tables(path, names):
    if names:
        tensors = load_file(path)
        tensors |= {name: tensors[original].clone() for name, original in names.items()}
        save_file(tensors, path, metadata={"format": "pt"})


def name_dense_published(path):
    """Dense MLPs of Kimi Linear, which transformers 5.17 writes by the name of MoE layers, by that of published files."""
    tensors = {re.sub(r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.", name): tensor
               for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def name_stream_heads(path):
    """Weights of the head's streams in layers of multi-token prediction, by their published names."""
    tensors = {re.sub(r"^(mtp\.\d+)\.hc_head\.hc_", r"\1.hc_head_", name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def name_published(path, model_type):
    config = json.loads(path.read_text())
    config["model_type"] = model_type
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def name_older(path, options):
    """The keys that published files have where transformers writes others."""
    config = json.loads(path.read_text())
    for key in ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor", "rope_parameters"):
        del config[key]
    for key in ("compress_ratios", "compress_rate_csa", "num_hash_layers", "qk_rope_head_dim"):
        config[key] = options[key]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make(case, root):
    family, options = CASES[case]
    config_class = getattr(transformers, family + "TextConfig", None) or getattr(transformers, family + "Config")
    config = config_class(**options)
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(SEEDS.get(case, sum(case.encode())))
    model = getattr(transformers, family + "ForCausalLM")(config).float().train(family not in EVALUATED)
    tell_length(model, 24)
    if case in PREDICTIONS:
        attach_predictions(model, PREDICTIONS[case])
    randomize(model, generator)
    freeze_indexers(model)
    model.tie_weights()
    folder = root / case
    folder.mkdir(parents=True, exist_ok=True)
    ids = torch.randint(0, config.vocab_size, (2, 24), generator=generator)
    batches = torch.randint(0, config.vocab_size, (12, 2, 24), generator=generator)
    model.save_pretrained(folder)
    copy_tables(folder / "model.safetensors", copied_tables(model))
    if case in PUBLISHED_TYPES:
        name_published(folder / "config.json", PUBLISHED_TYPES[case])
    if case == "deepseek_v4_older":
        name_older(folder / "config.json", options)
    loss, output = find_loss(model, ids)
    loss.backward()
    save_gradients(model, folder)
    if family == "DeepseekV4" and case in PREDICTIONS:
        for file in ("model.safetensors", "grads.safetensors"):
            name_stream_heads(folder / file)
    if family == "KimiLinear":
        for file in ("model.safetensors", "grads.safetensors"):
            name_dense_published(folder / file)
    results = {"input_ids": ids, "logits": output.logits.detach(), "loss": loss.detach().reshape(1)}
    if getattr(output, "aux_loss", None) is not None:
        results["aux_loss"] = output.aux_loss.detach().reshape(1)
    losses, norms, rates = train(model, batches)
    final = model(input_ids=ids).logits.detach()
    results |= {"traj_input_ids": batches, "traj_loss": losses, "traj_grad_norm": norms, "traj_lr": rates,
                "traj_final_logits": final}
    save_file({k: v.contiguous() for k, v in results.items()}, folder / "io.safetensors")
    print(f"{case}: loss {results['loss'].item():.4f}, last {losses[-1].item():.4f}")


def relative_errors(actual, expected):
    return torch.stack([(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(actual, expected)]).float()


def measure_bf16(folder):
    truth = load_file(folder / "io.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    ids = truth["input_ids"]
    tell_length(model, ids.shape[1])
    output = model.train(model.config.model_type not in [name.lower() for name in EVALUATED])(input_ids=ids, labels=ids)
    output.loss.backward()
    save_gradients(model, folder, "grads_bf16.safetensors")
    actual, expected = load_file(folder / "grads_bf16.safetensors"), load_file(folder / "grads.safetensors")
    (folder / "grads_bf16.safetensors").unlink()
    width = truth["logits"].shape[-1]
    names = [name for name in sorted(expected) if expected[name].any()]
    errors = {"logits": relative_errors(output.logits.detach().reshape(-1, width), truth["logits"].reshape(-1, width)),
              "gradients": relative_errors([actual[n] for n in names], [expected[n] for n in names])}
    save_file(errors, folder / "bf16.safetensors")
    print(f"{folder.name}: median errors of logits {errors['logits'].median().item():.2e}, "
          f"gradients {errors['gradients'].median().item():.2e}")


def main():
    if sys.argv[1] == "--bf16":
        for folder in sys.argv[2:]:
            measure_bf16(pathlib.Path(folder))
        return
    root = pathlib.Path(sys.argv[1])
    for case in sys.argv[2:] or CASES:
        with ChoiceGaps() as gaps:
            make(case, root)
        assert gaps.least > LEAST_GAP, f"{case}: an indexer's choice may depend on rounding ({gaps.least:.1e}); see SEEDS"


if __name__ == "__main__":
    main()
