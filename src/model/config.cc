#include "model/config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "core/error.h"

namespace tessera {
namespace {

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

void add_shape_options(ConfigSchema& schema, ModelConfig& config) {
  schema.add("model.vocab_size", &config.vocab_size,
             "Vocabulary; 0 takes the tokenizer's, rounded up to a multiple of 64", at_least(0));
  schema.add("model.hidden_size", &config.hidden_size, "Width of the residual stream", at_least(1));
  schema.add("model.num_layers", &config.num_layers, "Decoder layers", at_least(1));
  schema.add("model.num_heads", &config.num_heads, "Query heads", at_least(1));
  schema.add("model.num_kv_heads", &config.num_kv_heads,
             "Key and value heads; 0: as many as query heads", at_least(0));
  schema.add("model.head_size", &config.head_size, "Size of a head; 0: hidden_size / num_heads",
             at_least(0));
  schema.add("model.inner_size", &config.inner_size,
             "Inner size of dense layers; 0: 4 times hidden_size, two thirds of that when gated",
             at_least(0));
  schema.add("model.window", &config.window, "Sliding attention window in tokens; 0: none",
             at_least(0));
  schema.add_enum("model.activation", &config.activation,
                  {{"swiglu", Activation::kSwiGLU},
                   {"geglu", Activation::kGeGLU},
                   {"gelu", Activation::kGelu},
                   {"gelu_tanh", Activation::kGeluTanh}},
                  "Activation of dense layers and experts");
  schema.add("model.norm_eps", &config.norm_eps, "Epsilon of RMSNorm", above(0));
  schema.add("model.rope_base", &config.rope_base, "Base of the rotary embedding", above(1));
  schema.add("model.tie_embeddings", &config.tie_embeddings, "One table for embedding and head");
  schema.add("model.init_deviation", &config.init_deviation,
             "Standard deviation of initial weights", above(0));
}

void add_expert_options(ConfigSchema& schema, MoeConfig& moe) {
  schema.add("moe.num_experts", &moe.num_experts, "Routed experts of a layer; 0: dense layers only",
             at_least(0));
  schema.add("moe.top_k", &moe.top_k, "Experts that a token goes to", at_least(1));
  schema.add("moe.inner_size", &moe.inner_size, "Inner size of an expert", at_least(1));
  schema.add("moe.inner_sizes", &moe.inner_sizes,
             "Inner size of each expert where they differ; empty: inner_size", at_least(1));
  schema.add("moe.first_dense_layers", &moe.first_dense_layers, "Leading layers without experts",
             at_least(0));
  schema.add("moe.every", &moe.every, "Every n-th layer after those has experts", at_least(1));
  schema.add_enum(
      "moe.experts", &moe.experts,
      {{"grouped", ExpertPath::kGrouped}, {"block_sparse", ExpertPath::kBlockSparse}},
      "Implementation of the experts: grouped products, or block-sparse products as in MegaBlocks");
  schema.add("moe.block_size", &moe.block_size, "Block of block_sparse: 8, 16, 32, 64 or 128",
             at_least(1));
  schema.add("moe.memory_efficient", &moe.memory_efficient,
             "Apply the probability before FC2, so that expert outputs need not be kept (grouped "
             "experts)");
  schema.add("moe.capacity_factor", &moe.capacity_factor,
             "0: dropless; otherwise an expert takes at most ceil(T*K/E * factor) assignments",
             at_least(0));
  schema.add("moe.pad_to_capacity", &moe.pad_to_capacity, "Pad each expert's rows to its capacity");
  schema.add_enum("moe.drop_policy", &moe.drop_policy,
                  {{"probability", DropPolicy::kProbs}, {"position", DropPolicy::kPosition}},
                  "Which assignments a full expert drops: the least probable or the last");
  schema.add("moe.shared_inner_size", &moe.shared_inner_size,
             "Inner size of the shared expert; 0: none", at_least(0));
  schema.add("moe.shared_gate", &moe.shared_gate,
             "Gate the shared expert by a sigmoid of the token");
}

void add_router_options(ConfigSchema& schema, MoeConfig& moe) {
  schema.add_enum("moe.score", &moe.score,
                  {{"softmax", ScoreFunction::kSoftmax}, {"sigmoid", ScoreFunction::kSigmoid}},
                  "Router scores");
  schema.add_enum(
      "moe.score_order", &moe.score_order,
      {{"before_top_k", ScoreOrder::kBeforeTopK}, {"after_top_k", ScoreOrder::kAfterTopK}},
      "Softmax over all experts before the choice, or over the chosen after it");
  schema.add("moe.normalize_top_k", &moe.normalize_top_k, "Scale the chosen scores to sum 1");
  schema.add("moe.score_scale", &moe.score_scale, "Factor on the probabilities", above(0));
  schema.add("moe.num_groups", &moe.num_groups,
             "Groups of experts for group-limited choice; 1: none", at_least(1));
  schema.add("moe.top_groups", &moe.top_groups, "Groups that a token may choose from", at_least(1));
  schema.add_enum(
      "moe.group_score", &moe.group_score,
      {{"max", GroupScore::kMax}, {"top_two_sum", GroupScore::kTopTwoSum}},
      "Score of a group: its best expert (DeepSeek-V2) or the sum of its best two (V3)");
  schema.add("moe.force_balanced", &moe.force_balanced,
             "Route round-robin, for measuring with perfect balance");
  schema.add("moe.balance_coefficient", &moe.balance_coefficient,
             "Weight of the load-balancing loss", at_least(0));
  schema.add_enum("moe.balance_scope", &moe.balance_scope,
                  {{"micro_batch", BalanceScope::kMicroBatch},
                   {"sequence", BalanceScope::kSequence},
                   {"global_batch", BalanceScope::kGlobalBatch}},
                  "Tokens over which balance is asked for");
  schema.add("moe.z_loss_coefficient", &moe.z_loss_coefficient, "Weight of the router's z-loss",
             at_least(0));
  schema.add("moe.bias_update_speed", &moe.bias_update_speed,
             "Balancing without a loss: change of the expert bias a step; 0: off", at_least(0));
}

void validate_attention(const ModelConfig& config) {
  require(config.head_size > 0 || config.hidden_size % config.num_heads == 0,
          "model.hidden_size {} is not divisible by model.num_heads {}; choose a divisor or set "
          "model.head_size",
          config.hidden_size, config.num_heads);
  require(config.head_dim() % 2 == 0,
          "the head size {} is odd, and rotary embedding pairs its halves; make it even",
          config.head_dim());
  require(config.num_heads % config.kv_heads() == 0,
          "model.num_heads {} is not a multiple of model.num_kv_heads {}; every KV head serves the "
          "same number of "
          "query heads",
          config.num_heads, config.kv_heads());
}

void validate_groups(const MoeConfig& moe) {
  require(moe.num_experts % moe.num_groups == 0,
          "moe.num_experts {} is not divisible by moe.num_groups {}", moe.num_experts,
          moe.num_groups);
  require(moe.top_groups <= moe.num_groups, "moe.top_groups {} exceeds moe.num_groups {}",
          moe.top_groups, moe.num_groups);
  const int64_t reachable = moe.num_experts / moe.num_groups * moe.top_groups;
  require(moe.top_k <= reachable,
          "moe.top_k {} exceeds the {} experts of the {} groups that a token may choose from",
          moe.top_k, reachable, moe.top_groups);
}

void validate_block_sparse(const MoeConfig& moe) {
  constexpr std::array kBlockSizes = {8, 16, 32, 64, 128};
  require(std::ranges::find(kBlockSizes, moe.block_size) != kBlockSizes.end(),
          "moe.block_size {} is not supported; choose one of {}", moe.block_size,
          fmt::join(kBlockSizes, ", "));
  for (const int64_t size : moe.expert_sizes()) {
    require(size % moe.block_size == 0,
            "expert inner size {} is not a multiple of moe.block_size {}, which moe.experts = "
            "\"block_sparse\" needs; "
            "the nearest are {} and {}",
            size, moe.block_size, size / moe.block_size * moe.block_size,
            round_up(size, moe.block_size));
  }
  require(moe.memory_efficient,
          "moe.experts = \"block_sparse\" applies the probability before FC2; moe.memory_efficient "
          "= false works with "
          "\"grouped\" only");
}

void validate_experts(const MoeConfig& moe) {
  require(moe.top_k <= moe.num_experts, "moe.top_k {} exceeds moe.num_experts {}", moe.top_k,
          moe.num_experts);
  require(
      moe.inner_sizes.empty() || static_cast<int64_t>(moe.inner_sizes.size()) == moe.num_experts,
      "moe.inner_sizes lists {} sizes for {} experts", moe.inner_sizes.size(), moe.num_experts);
  require(moe.score_order == ScoreOrder::kBeforeTopK || moe.score == ScoreFunction::kSoftmax,
          "moe.score_order = \"after_top_k\" needs moe.score = \"softmax\"");
  require(!moe.pad_to_capacity || moe.capacity_factor > 0,
          "moe.pad_to_capacity needs a moe.capacity_factor above 0; 1.0 is the expected load");
  require(!moe.shared_gate || moe.shared_inner_size > 0,
          "moe.shared_gate needs a moe.shared_inner_size above 0");
  validate_groups(moe);
  if (moe.experts == ExpertPath::kBlockSparse) validate_block_sparse(moe);
}

}  // namespace

std::vector<int64_t> MoeConfig::expert_sizes() const {
  if (!inner_sizes.empty()) return inner_sizes;
  return std::vector<int64_t>(static_cast<size_t>(num_experts), inner_size);
}

int64_t ModelConfig::dense_inner_size() const {
  if (inner_size > 0) return inner_size;
  return is_gated() ? round_up(8 * hidden_size / 3, 64) : 4 * hidden_size;
}

bool ModelConfig::is_moe_layer(int64_t layer) const {
  if (moe.num_experts == 0 || layer < moe.first_dense_layers) return false;
  return (layer - moe.first_dense_layers) % moe.every == moe.every - 1;
}

int64_t ModelConfig::num_moe_layers() const {
  int64_t count = 0;
  for (int64_t layer = 0; layer < num_layers; ++layer) count += is_moe_layer(layer) ? 1 : 0;
  return count;
}

void add_model_options(ConfigSchema& schema, ModelConfig& config) {
  add_shape_options(schema, config);
  add_expert_options(schema, config.moe);
  add_router_options(schema, config.moe);
}

void validate(const ModelConfig& config) {
  require(config.vocab_size > 0, "model.vocab_size is not set and no tokenizer gives it");
  validate_attention(config);
  if (config.moe.num_experts > 0) validate_experts(config.moe);
}

ParameterCount count_parameters(const ModelConfig& config) {
  const int64_t h = config.hidden_size;
  const int64_t width = config.is_gated() ? 3 : 2;
  const int64_t heads = config.num_heads * config.head_dim();
  const int64_t kv = config.kv_heads() * config.head_dim();
  const int64_t tables = (config.tie_embeddings ? 1 : 2) * config.vocab_size * h;
  const int64_t attention = 2 * h * heads + 2 * h * kv + 2 * h;
  const auto sizes = config.moe.expert_sizes();
  const int64_t all_experts = std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) * width * h;
  const int64_t shared =
      config.moe.shared_inner_size * width * h + (config.moe.shared_gate ? h : 0);
  const int64_t router = config.moe.num_experts * h;

  ParameterCount count{tables + h, tables + h};
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const bool moe = config.is_moe_layer(layer);
    const int64_t dense = config.dense_inner_size() * width * h;
    count.total += attention + (moe ? all_experts + shared + router : dense);
    count.active +=
        attention +
        (moe ? all_experts * config.moe.top_k / config.moe.num_experts + shared + router : dense);
  }
  return count;
}

}  // namespace tessera
