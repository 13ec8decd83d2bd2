#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/config.h"
#include "ops/activation/activation.h"
#include "ops/route_map/route_map.h"
#include "ops/router/router.h"

namespace tessera {

enum class ExpertPath { kGrouped, kBlockSparse };

/// The Mixture-of-Experts part of a model. `num_experts` 0 makes every layer dense.
struct MoeConfig {
  int64_t num_experts = 8;
  int64_t top_k = 2;
  int64_t inner_size = 1024;
  /// One inner size per expert; empty: all have `inner_size`.
  std::vector<int64_t> inner_sizes;
  int64_t first_dense_layers = 0;
  /// Every n-th layer (after the dense ones) has experts.
  int64_t every = 1;
  ExpertPath experts = ExpertPath::kGrouped;
  int64_t block_size = 128;
  /// Probability before FC2 (its gradient from the saved pre-activation) instead of after it.
  bool memory_efficient = true;

  ScoreFunction score = ScoreFunction::kSoftmax;
  ScoreOrder score_order = ScoreOrder::kBeforeTopK;
  bool normalize_top_k = true;
  double score_scale = 1.0;
  int64_t num_groups = 1;
  int64_t top_groups = 1;
  GroupScore group_score = GroupScore::kTopTwoSum;
  /// Routes round-robin instead of by score, for measuring with perfect balance.
  bool force_balanced = false;

  double balance_coefficient = 0.01;
  BalanceScope balance_scope = BalanceScope::kMicroBatch;
  double z_loss_coefficient = 0.0;
  /// Auxiliary-loss-free balancing (DeepSeek-V3): a bias on the scores, for the choice only, moved
  /// by `bias_update_speed` a step. 0 switches it off.
  double bias_update_speed = 0.0;

  /// 0: dropless. Otherwise each expert takes at most ceil(T·K/E · factor) assignments.
  double capacity_factor = 0.0;
  bool pad_to_capacity = false;
  DropPolicy drop_policy = DropPolicy::kProbs;

  int64_t shared_inner_size = 0;
  bool shared_gate = false;

  bool has_expert_bias() const { return bias_update_speed > 0; }
  /// F_e of every expert.
  std::vector<int64_t> expert_sizes() const;
};

/// A decoder-only, pre-norm language model.
struct ModelConfig {
  int64_t vocab_size = 0;  ///< 0: the tokenizer's, rounded up to a multiple of 64
  int64_t hidden_size = 256;
  int64_t num_layers = 4;
  int64_t num_heads = 4;
  int64_t num_kv_heads = 0;  ///< 0: as many as num_heads
  int64_t head_size = 0;     ///< 0: hidden_size / num_heads
  int64_t inner_size = 0;  ///< of dense layers; 0: 4 · hidden_size, rounded for gated activations
  int64_t window = 0;      ///< sliding attention window; 0: none
  Activation activation = Activation::kSwiGLU;
  double norm_eps = 1e-5;
  double rope_base = 10000.0;
  bool tie_embeddings = true;
  double init_deviation = 0.02;
  MoeConfig moe;

  int64_t kv_heads() const { return num_kv_heads > 0 ? num_kv_heads : num_heads; }
  int64_t head_dim() const { return head_size > 0 ? head_size : hidden_size / num_heads; }
  int64_t dense_inner_size() const;
  bool is_gated() const {
    return activation == Activation::kSwiGLU || activation == Activation::kGeGLU;
  }
  bool is_moe_layer(int64_t layer) const;
  int64_t num_moe_layers() const;
};

/// Binds every "model.*" and "moe.*" key.
void add_model_options(ConfigSchema& schema, ModelConfig& config);

/// Refuses impossible combinations with the arithmetic that fails and what to do. `vocab_size` must
/// be resolved.
void validate(const ModelConfig& config);

/// Published and laptop-sized shapes, as TOML for ConfigSchema::load_preset.
struct Preset {
  std::string name;
  std::string description;
  std::string toml;
};
const std::vector<Preset>& presets();
/// Throws UserError with the nearest name where there is none.
const Preset& find_preset(const std::string& name);

/// Weights of the whole model, and those that one token meets (embedding table counted in neither
/// sense of FLOPs but in both counts; of the routed experts top_k).
struct ParameterCount {
  int64_t total = 0;
  int64_t active = 0;
};
ParameterCount count_parameters(const ModelConfig& config);

}  // namespace tessera
