#pragma once

#include "step/run/layout_case.h"

namespace tessera::testing {

/// Layouts of each kind of mixer.
inline std::vector<LayoutCase> mixer_layouts() {
  using P = ParallelSpec;
  using M = ModelConfig;
  return {
      {"few_key_heads", 4, [](P& p) { p.layout.tp = 4; }},
      {"norms_of_all_heads", 2, [](P& p) { p.layout.tp = 2; },
       [](M& m) { m.qk_norm = QkNorm::kAll; }},
      {"latent_attention", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
       },
       [](M& m) {
         m.attention = AttentionKind::kLatent;
         m.num_kv_heads = 0;
         m.latent = {
             .query_rank = 12, .kv_rank = 10, .nope_size = 6, .rope_size = 4, .value_size = 5};
       }},
      {"chosen_keys", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
         p.layout.ep = 2;
       },
       [](M& m) {
         m.attention = AttentionKind::kLatent;
         m.num_kv_heads = 0;
         m.latent = {
             .query_rank = 12, .kv_rank = 10, .nope_size = 6, .rope_size = 4, .value_size = 5};
         m.index = {.top_k = 3, .num_heads = 9, .head_size = 6};
         m.mtp_layers = 1;
       }},
      {"compressed_attention_of_a_ring", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
       },
       [](M& m) {
         m.attention = AttentionKind::kCompressed;
         m.num_kv_heads = 0;
         m.window = 4;
         m.attention_sinks = true;
         m.compressed = {.query_rank = 7, .rope_size = 2, .output_groups = 2, .output_rank = 5};
       }},
      {"compressed_attention_of_exchanged_heads", 2,
       [](P& p) {
         p.layout.tp = 2;
         p.attention = AttentionParallel::kUlysses;
       },
       [](M& m) {
         m.attention = AttentionKind::kCompressed;
         m.num_kv_heads = 0;
         m.compressed = {.query_rank = 7, .rope_size = 2, .output_groups = 4, .output_rank = 5};
       }},
      {"compressed_tokens", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
         p.layout.ep = 2;
       },
       [](M& m) {
         m.attention = AttentionKind::kCompressed;
         m.num_kv_heads = 0;
         m.window = 3;
         m.attention_sinks = true;
         m.compressed = {.query_rank = 7,
                         .rope_size = 2,
                         .output_groups = 2,
                         .output_rank = 5,
                         .sparse_rate = 2,
                         .heavy_rate = 3,
                         .sparse_layers = {1},
                         .heavy_layers = {0}};
         m.index = {.top_k = 2, .num_heads = 9, .head_size = 6};
       },
       true},
      {"gated_delta", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         // Small queries and keys, made unit vectors, would turn far: long ones are rarely small.
         m.init_deviation = 0.7;
         m.delta_layers = {0};
         m.delta = {.num_key_heads = 2, .num_value_heads = 4, .key_size = 24, .value_size = 5};
       }},
      {"kimi_delta", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         m.init_deviation = 0.7;
         // Norms of what heads of 5 values give magnify its rounding.
         m.norm_eps = 0.01;
         m.delta_layers = {0};
         m.delta = {.kind = DeltaKind::kKimi,
                    .num_key_heads = 2,
                    .num_value_heads = 2,
                    .key_size = 24,
                    .value_size = 5};
         m.attention = AttentionKind::kLatent;
         m.num_kv_heads = 0;
         m.latent = {
             .query_rank = 0, .kv_rank = 10, .nope_size = 6, .rope_size = 4, .value_size = 5};
         m.rope.fraction = 0;
       }},
      {"mamba", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         m.mamba_layers = {0};
         m.mamba = {.num_heads = 4, .head_size = 6, .num_groups = 2, .state_size = 5};
       }},
      {"gated_convolution", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         m.init_deviation = 0.5;
         m.conv_layers = {0};
         m.conv = {.size = 3, .bias = true};
       }},
      {"windows_of_their_own_rotation", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
       },
       [](M& m) {
         m.window = 5;
         m.window_layers = {1};
         m.own_window_rope = true;
         m.rope.fraction = 0;
         m.window_rope = {.base = 100, .fraction = 0.5};
       }},
      {"chunks_and_temperatures", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         m.window = 5;
         m.window_kind = WindowKind::kChunked;
         m.window_layers = {1};
         m.own_window_rope = true;
         m.rope.fraction = 0;
         m.window_rope = {.base = 100, .interleaved = true};
         m.qk_norm = QkNorm::kL2;
         m.norm_after_rotation = true;
         m.temperature_scale = 0.5;
         m.temperature_length = 3;
       }},
  };
}

}  // namespace tessera::testing
