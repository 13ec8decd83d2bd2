#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "model/run/model_testing.h"

namespace tessera::testing {

struct Case {
  std::string name;
  ModelConfig config;
};

inline void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

template <typename Change>
Case make_case(std::string name, Change change) {
  Case result{std::move(name), tiny_config()};
  change(result.config);
  return result;
}

/// Compressed attention to a window alone.
inline void make_compressed(ModelConfig& config) {
  config.attention = AttentionKind::kCompressed;
  config.num_kv_heads = 0;
  config.head_size = 6;
  config.window = 2;
  config.attention_sinks = true;
  config.rope.interleaved = true;
  config.compressed = {.query_rank = 7,
                       .rope_size = 4,
                       .output_groups = 2,
                       .output_rank = 5,
                       .sparse_rate = 2,
                       .heavy_rate = 3};
}

/// Of gradient_cases (gradient_cases.h) those of attention and of other mixers.
inline std::vector<Case> mixer_gradient_cases() {
  return {
      make_case("window",
                [](ModelConfig& c) {
                  c.window = 3;
                  c.moe.num_experts = 0;
                }),
      make_case("window_in_some_layers",
                [](ModelConfig& c) {
                  c.num_layers = 3;
                  c.window = 2;
                  c.window_layers = {0, 2};
                  c.moe.dense_layers = {2};
                }),
      make_case("attention_sinks",
                [](ModelConfig& c) {
                  c.attention_sinks = true;
                  c.window = 3;
                  c.window_layers = {1};
                }),
      make_case("latent_attention_sinks",
                [](ModelConfig& c) {
                  c.attention_sinks = true;
                  c.attention = AttentionKind::kLatent;
                  c.num_kv_heads = 0;
                  c.latent = {.kv_rank = 6, .nope_size = 4, .rope_size = 2, .value_size = 5};
                }),
      make_case(
          "chosen_keys",
          [](ModelConfig& c) {
            c.attention = AttentionKind::kLatent;
            c.num_kv_heads = 0;
            c.latent = {
                .query_rank = 5, .kv_rank = 6, .nope_size = 3, .rope_size = 2, .value_size = 5};
            c.index = {.top_k = 3, .num_heads = 9, .head_size = 4};
            c.rope.interleaved = true;
            c.qkv_bias = true;
          }),
      make_case(
          "chosen_keys_of_predicted_tokens",
          [](ModelConfig& c) {
            c.mtp_layers = 1;
            c.attention_sinks = true;
            c.attention = AttentionKind::kLatent;
            c.num_kv_heads = 0;
            c.latent = {
                .query_rank = 7, .kv_rank = 6, .nope_size = 4, .rope_size = 4, .value_size = 4};
            c.index = {.top_k = 4, .num_heads = 8, .head_size = 6, .interleaved = true};
            c.moe.top_k = c.moe.num_experts;  // no step flips a choice
          }),
      make_case(
          "all_keys_chosen",
          [](ModelConfig& c) {
            c.attention = AttentionKind::kLatent;
            c.num_kv_heads = 0;
            c.latent = {
                .query_rank = 5, .kv_rank = 6, .nope_size = 3, .rope_size = 2, .value_size = 5};
            c.index = {.top_k = 6, .num_heads = 2, .head_size = 4};
          }),
      make_case("compressed_attention_without_compressed_tokens",
                [](ModelConfig& c) {
                  make_compressed(c);
                  c.moe.num_experts = 0;
                }),
      make_case("compressed_attention_to_all",
                [](ModelConfig& c) {
                  make_compressed(c);
                  c.window = 0;
                  c.attention_sinks = false;
                  c.moe.num_experts = 0;
                  c.rope.fraction = 0;
                }),
      make_case("heavily_compressed_tokens",
                [](ModelConfig& c) {
                  make_compressed(c);
                  c.compressed.heavy_layers = {0, 1};
                  c.compressed_rope = {.base = 50, .interleaved = true};
                  c.moe.num_experts = 0;
                }),
      make_case("chosen_compressed_tokens",
                [](ModelConfig& c) {
                  make_compressed(c);
                  c.compressed.sparse_layers = {1};
                  c.index = {.top_k = 1, .num_heads = 9, .head_size = 6};
                  c.moe.num_experts = 0;
                }),
      make_case("all_compressed_tokens_of_predicted_tokens",
                [](ModelConfig& c) {
                  make_compressed(c);
                  c.compressed.sparse_layers = {1};
                  c.compressed.heavy_layers = {0};
                  c.compressed_rope.fraction = 0;
                  c.index = {.top_k = 3, .num_heads = 2, .head_size = 6};
                  c.attention_sinks = false;
                  c.mtp_layers = 1;
                  c.moe.top_k = c.moe.num_experts;  // no step flips a choice
                }),
      make_case("head_norm", [](ModelConfig& c) { c.qk_norm = QkNorm::kHead; }),
      make_case("all_heads_norm",
                [](ModelConfig& c) {
                  c.qk_norm = QkNorm::kAll;
                  c.rope.fraction = 0.5;
                }),
      make_case("head_norm_after_rotation",
                [](ModelConfig& c) {
                  c.qk_norm = QkNorm::kHead;
                  c.norm_after_rotation = true;
                }),
      make_case("all_heads_norm_after_rotation",
                [](ModelConfig& c) {
                  c.qk_norm = QkNorm::kAll;
                  c.norm_after_rotation = true;
                  c.rope.interleaved = true;
                }),
      make_case("attention_gate",
                [](ModelConfig& c) {
                  c.attention_gate = true;
                  c.qkv_bias = true;
                }),
      make_case("gated_delta",
                [](ModelConfig& c) {
                  // Small queries and keys, which become unit vectors, would turn far at a step.
                  c.init_deviation = 0.7;
                  c.delta_layers = {0};
                  c.delta = {.num_key_heads = 2,
                             .num_value_heads = 4,
                             .key_size = 6,
                             .value_size = 5,
                             .conv_size = 3};
                  c.attention_gate = true;
                }),
      make_case(
          "kimi_delta",
          [](ModelConfig& c) {
            c.init_deviation = 0.7;
            c.delta_layers = {0};
            c.delta = {.kind = DeltaKind::kKimi,
                       .num_key_heads = 2,
                       .num_value_heads = 2,
                       .key_size = 6,
                       .value_size = 5,
                       .conv_size = 3};
            c.attention = AttentionKind::kLatent;
            c.num_kv_heads = 0;
            c.latent = {
                .query_rank = 0, .kv_rank = 6, .nope_size = 3, .rope_size = 2, .value_size = 5};
            c.rope.fraction = 0;
          }),
      make_case("gated_delta_of_predicted_tokens",
                [](ModelConfig& c) {
                  c.mtp_layers = 1;
                  c.init_deviation = 0.7;
                  c.delta_layers = {0, 1};
                  c.delta = {
                      .num_key_heads = 2, .num_value_heads = 2, .key_size = 4, .value_size = 3};
                }),
      make_case("mamba",
                [](ModelConfig& c) {
                  c.init_deviation = 0.3;
                  c.mamba_layers = {0};
                  c.mamba = {.num_heads = 4,
                             .head_size = 5,
                             .num_groups = 2,
                             .state_size = 6,
                             .conv_size = 3,
                             .proj_bias = true};
                  c.rope.fraction = 0;
                }),
      make_case("mamba_alone_and_experts_alone",
                [](ModelConfig& c) {
                  c.init_deviation = 0.3;
                  c.num_layers = 4;
                  c.mamba_layers = {0, 3};
                  c.layers_without_mlp = {0, 2};
                  c.layers_without_mixer = {1};
                  c.mamba = {.num_heads = 2, .head_size = 4, .state_size = 3, .conv_bias = false};
                  c.activation = Activation::kRelu2;
                }),
      make_case("gated_convolution",
                [](ModelConfig& c) {
                  c.init_deviation = 0.5;
                  c.conv_layers = {0};
                  c.conv = {.size = 3, .bias = true};
                }),
      make_case("gated_convolution_of_predicted_tokens",
                [](ModelConfig& c) {
                  c.mtp_layers = 1;
                  c.init_deviation = 0.5;
                  c.conv_layers = {1};
                  c.conv = {.size = 1};
                }),
      make_case("windows_of_their_own_rotation",
                [](ModelConfig& c) {
                  c.qk_norm = QkNorm::kHead;
                  c.window = 3;
                  c.window_layers = {1};
                  c.own_window_rope = true;
                  c.window_rope = {.base = 50, .interleaved = true};
                  c.rope.fraction = 0;
                }),
      make_case("windows_of_their_own_heads",
                [](ModelConfig& c) {
                  c.window = 3;
                  c.window_layers = {1};
                  c.window_heads = 2;
                  c.window_kv_heads = 1;
                  c.window_sinks = true;
                  c.value_size = 3;
                  c.value_multiplier = 0.7;
                  c.attention_gate = true;
                }),
      make_case("chunks_and_temperatures",
                [](ModelConfig& c) {
                  c.qk_norm = QkNorm::kL2;
                  c.norm_after_rotation = true;
                  c.window = 3;
                  c.window_kind = WindowKind::kChunked;
                  c.window_layers = {1};
                  c.own_window_rope = true;
                  c.window_rope = {.base = 50, .interleaved = true};
                  c.rope.fraction = 0;
                  c.temperature_scale = 0.5;
                  c.temperature_length = 2;
                }),
      make_case("keys_as_values",
                [](ModelConfig& c) {
                  c.qk_norm = QkNorm::kHead;
                  c.keys_as_values = true;
                  c.value_norm = true;
                  c.attention_multiplier = 1;
                  c.rope.proportional = true;
                  c.rope.fraction = 0.5;
                }),
      make_case("windows_of_their_own_head_size",
                [](ModelConfig& c) {
                  c.window = 3;
                  c.window_layers = {0};
                  c.window_head_size = 6;
                  c.window_kv_heads = 4;
                  c.keys_as_values = true;
                  c.value_norm = true;
                  c.value_multiplier = 0.5;
                }),
      make_case("softplus_gates",
                [](ModelConfig& c) {
                  c.attention_gate = true;
                  c.gate_function = AttentionGate::kSoftplus;
                }),
      make_case("softplus_gates_of_heads",
                [](ModelConfig& c) {
                  c.attention_gate = true;
                  c.gate_function = AttentionGate::kSoftplusOfHeads;
                  c.window = 3;
                  c.window_layers = {1};
                  c.window_heads = 6;
                }),
      make_case("plain_norms_of_windows_of_their_own_head_size",
                [](ModelConfig& c) {
                  c.qk_norm = QkNorm::kL2;
                  c.window = 3;
                  c.window_layers = {0};
                  c.window_head_size = 6;
                }),
  };
}

}  // namespace tessera::testing
