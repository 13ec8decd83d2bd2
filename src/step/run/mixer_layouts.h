#pragma once

#include "step/run/layout_case.h"

namespace tessera::testing {

/// Small queries and keys, made unit vectors, would turn far: long ones are rarely small.
inline void make_gated_delta(ModelConfig& m) {
  m.init_deviation = 0.7;
  m.delta_layers = {0};
  m.delta = {.num_key_heads = 2, .num_value_heads = 4, .key_size = 24, .value_size = 5};
}

/// Norms of what heads of 5 values give magnify its rounding.
inline void make_kimi_delta(ModelConfig& m) {
  m.init_deviation = 0.7;
  m.norm_eps = 0.01;
  m.delta_layers = {0};
  m.delta = {.kind = DeltaKind::kKimi,
             .num_key_heads = 2,
             .num_value_heads = 2,
             .key_size = 24,
             .value_size = 5};
  m.attention = AttentionKind::kLatent;
  m.num_kv_heads = 0;
  m.latent = {.query_rank = 0, .kv_rank = 10, .nope_size = 6, .rope_size = 4, .value_size = 5};
  m.rope.fraction = 0;
}

inline void make_mamba(ModelConfig& m) {
  m.mamba_layers = {0};
  m.mamba = {.num_heads = 4, .head_size = 6, .num_groups = 2, .state_size = 5};
}

inline void make_gated_convolution(ModelConfig& m) {
  m.init_deviation = 0.5;
  m.conv_layers = {0};
  m.conv = {.size = 3, .bias = true};
}

/// Mixers that hand a state from token to token, over ranks that share sequences.
inline std::vector<LayoutCase> shared_sequence_layouts() {
  using P = ParallelSpec;
  using M = ModelConfig;
  return {
      {"gated_delta_cp", 4,
       [](P& p) {
         p.layout.cp = 2;
         p.layout.pp = 2;
       },
       make_gated_delta},
      // Four value heads over as many ranks, the two of keys twice.
      {.name = "gated_delta_cp_hierarchical_documents",
       .num_ranks = 4,
       .spread =
           [](P& p) {
             p.layout.cp = 4;
             p.context = ContextExchange::kHierarchical;
             p.context_inner = 2;
           },
       .change = make_gated_delta,
       .documents = true},
      {"gated_delta_cp_adapters", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.ep = 4;
       },
       [](M& m) {
         make_gated_delta(m);
         m.lora = {.rank = 3, .alpha = 5};
       }},
      {"kimi_delta_cp", 2, [](P& p) { p.layout.cp = 2; }, make_kimi_delta, true},
      // Both heads of a tensor-parallel rank are of one group.
      {.name = "mamba_tp_cp_documents",
       .num_ranks = 4,
       .spread =
           [](P& p) {
             p.layout.tp = 2;
             p.layout.cp = 2;
           },
       .change = make_mamba,
       .documents = true},
      {"mamba_cp_all_to_all", 4,
       [](P& p) {
         p.layout.cp = 2;
         p.layout.ep = 2;
         p.context = ContextExchange::kAllToAll;
       },
       make_mamba},
      {.name = "gated_convolution_cp_documents",
       .num_ranks = 4,
       .spread =
           [](P& p) {
             p.layout.tp = 2;
             p.layout.cp = 2;
           },
       .change = make_gated_convolution,
       .documents = true},
  };
}

/// Plain and latent attention.
inline std::vector<LayoutCase> attention_layouts() {
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
  };
}

/// Attention to compressed tokens.
inline std::vector<LayoutCase> compressed_layouts() {
  using P = ParallelSpec;
  using M = ModelConfig;
  return {
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
  };
}

/// Mixers that hand a state from token to token.
inline std::vector<LayoutCase> scan_layouts() {
  using P = ParallelSpec;
  return {
      {"gated_delta", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
       },
       make_gated_delta},
      {"kimi_delta", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
       },
       make_kimi_delta},
      {"mamba", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
       },
       make_mamba},
      {"gated_convolution", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
       },
       make_gated_convolution},
  };
}

/// Attention within windows and chunks.
inline std::vector<LayoutCase> window_layouts() {
  using P = ParallelSpec;
  using M = ModelConfig;
  return {
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

/// Layouts of each kind of mixer.
inline std::vector<LayoutCase> mixer_layouts() {
  std::vector<LayoutCase> all;
  for (auto& layouts :
       {attention_layouts(), compressed_layouts(), scan_layouts(), window_layouts()})
    all.insert(all.end(), layouts.begin(), layouts.end());
  return all;
}

}  // namespace tessera::testing
