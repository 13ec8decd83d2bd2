#include "model/config/lora.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "core/error.h"
#include "core/saturating.h"
#include "core/text/names.h"
#include "model/config/config.h"
#include "model/config/limits.h"

namespace tessera {
namespace {

constexpr std::string_view kAll = "all";

/// A matrix that each of some layers has, or that each of their experts has.
struct AdaptableMatrix {
  std::string name;
  Saturating width = 0;  ///< in + out, of all experts together
  int64_t num_layers = 0;
  bool experts = false;
};

/// Lists them kind by kind.
class MatrixList {
 public:
  explicit MatrixList(const ModelConfig& config) : config_(config) {
    for (int64_t layer = 0; layer < config.num_layers; ++layer) {
      const LayerKind kind = config.layer_kind(layer);
      if (kind.attends()) ++num_attention_;
      if (kind.delta) ++num_delta_;
      if (kind.conv) ++num_conv_;
      if (!kind.no_mlp) ++(kind.moe ? num_moe_ : num_dense_);
    }
  }

  std::vector<AdaptableMatrix> list() {
    if (num_attention_ > 0) add_any_attention();
    if (num_delta_ > 0) add_delta();
    if (num_conv_ > 0) add_conv();
    if (num_dense_ > 0) add_mlp("mlp", config_.dense_inner_size(), num_dense_);
    if (num_moe_ > 0) add_moe();
    return std::move(matrices_);
  }

 private:
  void add(std::string name, int64_t in, int64_t out, int64_t num_layers) {
    matrices_.push_back({std::move(name), Saturating(in) + out, num_layers});
  }

  void add_any_attention() {
    if (config_.is_latent()) return add_latent_attention();
    config_.is_compressed() ? add_compressed_attention() : add_attention();
  }

  void add_attention() {
    const int64_t hidden = config_.hidden_size;
    const int64_t queries = config_.num_heads * config_.head_dim();
    const int64_t values = config_.num_heads * config_.value_dim();
    add("attn.q", hidden, queries, num_attention_);
    add("attn.k", hidden, config_.kv_heads() * config_.head_dim(), num_attention_);
    add("attn.v", hidden, config_.kv_heads() * config_.value_dim(), num_attention_);
    if (config_.attention_gate) add("attn.gate", hidden, config_.gate_width(), num_attention_);
    add("attn.o", values, hidden, num_attention_);
  }

  void add_latent_attention() {
    const int64_t hidden = config_.hidden_size;
    const LatentConfig& latent = config_.latent;
    const int64_t queries = config_.num_heads * config_.head_dim();
    if (latent.query_rank > 0) {
      add("attn.q_down", hidden, latent.query_rank, num_attention_);
      add("attn.q_up", latent.query_rank, queries, num_attention_);
    } else {
      add("attn.q", hidden, queries, num_attention_);
    }
    add("attn.kv_down", hidden, latent.kv_rank, num_attention_);
    add("attn.k_rope", hidden, latent.rope_size, num_attention_);
    add("attn.o", config_.num_heads * config_.value_dim(), hidden, num_attention_);
  }

  /// Without what compresses tokens, and the block-diagonal projection of groups of heads.
  void add_compressed_attention() {
    const int64_t hidden = config_.hidden_size;
    const CompressedConfig& compressed = config_.compressed;
    add("attn.q_down", hidden, compressed.query_rank, num_attention_);
    add("attn.q_up", compressed.query_rank, config_.num_heads * config_.head_dim(), num_attention_);
    add("attn.kv", hidden, config_.head_dim(), num_attention_);
    add("attn.o_up", compressed.output_groups * compressed.output_rank, hidden, num_attention_);
  }

  void add_delta() {
    const int64_t hidden = config_.hidden_size;
    const DeltaConfig& delta = config_.delta;
    add("delta.q", hidden, delta.keys(), num_delta_);
    add("delta.k", hidden, delta.keys(), num_delta_);
    add("delta.v", hidden, delta.values(), num_delta_);
    if (!delta.is_kimi()) add("delta.z", hidden, delta.values(), num_delta_);
    add("delta.o", delta.values(), hidden, num_delta_);
  }

  void add_conv() {
    const int64_t hidden = config_.hidden_size;
    for (const char* name : {"conv.b", "conv.c", "conv.x", "conv.o"})
      add(name, hidden, hidden, num_conv_);
  }

  std::string first_matrix(const std::string& of) const {
    return of + (config_.is_gated() ? ".gate_up" : ".up");
  }
  int64_t first_rows(int64_t inner_size) const { return (config_.is_gated() ? 2 : 1) * inner_size; }

  void add_mlp(const std::string& name, int64_t inner_size, int64_t num_layers) {
    add(first_matrix(name), config_.hidden_size, first_rows(inner_size), num_layers);
    add(name + ".down", inner_size, config_.hidden_size, num_layers);
  }

  void add_moe() {
    const MoeConfig& moe = config_.moe;
    AdaptableMatrix first{first_matrix("moe.experts"), 0, num_moe_, true};
    AdaptableMatrix second{"moe.experts.down", 0, num_moe_, true};
    for (const int64_t size : moe.expert_sizes()) {
      first.width += Saturating(config_.expert_width()) + first_rows(size);
      second.width += Saturating(size) + config_.expert_width();
    }
    matrices_.push_back(std::move(first));
    matrices_.push_back(std::move(second));
    if (moe.shared_inner_size > 0) add_mlp("moe.shared", moe.shared_inner_size, num_moe_);
    if (moe.latent_size > 0) {
      add("moe.latent_down", config_.hidden_size, moe.latent_size, num_moe_);
      add("moe.latent_up", moe.latent_size, config_.hidden_size, num_moe_);
    }
  }

  const ModelConfig& config_;
  int64_t num_attention_ = 0, num_delta_ = 0, num_conv_ = 0, num_dense_ = 0, num_moe_ = 0;
  std::vector<AdaptableMatrix> matrices_;
};

bool is_target(const LoraConfig& lora, std::string_view matrix) {
  return std::ranges::any_of(lora.targets, [&](const std::string& target) {
    return target == kAll || matrix == target ||
           (matrix.starts_with(target) && matrix.substr(target.size()).starts_with('.'));
  });
}

/// What a target may say: "all", "moe", "moe.experts", "moe.experts.down".
std::vector<std::string> target_names(const ModelConfig& config) {
  std::set<std::string> names = {std::string(kAll)};
  for (std::string name : adaptable_matrices(config)) {
    names.insert(name);
    for (size_t dot = name.rfind('.'); dot != std::string::npos; dot = name.rfind('.')) {
      name.resize(dot);
      names.insert(name);
    }
  }
  return {names.begin(), names.end()};
}

void validate_targets(const ModelConfig& config) {
  require(!config.lora.targets.empty(),
          "lora.targets is empty, so that nothing would be trained; name matrices, or \"all\"");
  const std::vector<std::string> names = target_names(config);
  for (const std::string& target : config.lora.targets) {
    require(target != "attn.kv_up",
            "lora.targets names 'attn.kv_up', which has no adapters: where latents are cached, "
            "generation reads the matrix itself; name others of \"attn\"");
    require(std::ranges::binary_search(names, target),
            "lora.targets names '{}', which is no matrix of this model's "
            "layers that may have adapters{}",
            target, did_you_mean(target, names));
  }
}

}  // namespace

double LoraConfig::scale() const {
  const auto r = static_cast<double>(rank);
  return alpha / (rank_stabilized ? std::sqrt(r) : r);
}

std::vector<std::string> adaptable_matrices(const ModelConfig& config) {
  std::vector<std::string> names;
  for (const AdaptableMatrix& matrix : MatrixList(config).list()) names.push_back(matrix.name);
  return names;
}

bool is_adapted(const ModelConfig& config, std::string_view matrix) {
  if (!config.lora.is_on() || !is_target(config.lora, matrix)) return false;
  const auto names = adaptable_matrices(config);
  return std::ranges::find(names, matrix) != names.end();
}

AdapterCount count_adapters(const ModelConfig& config) {
  if (!config.lora.is_on()) return {};
  Saturating total = 0;
  Saturating active = 0;
  for (const AdaptableMatrix& matrix : MatrixList(config).list()) {
    if (!is_target(config.lora, matrix.name)) continue;
    const Saturating weights = matrix.width * config.lora.rank * matrix.num_layers;
    total += weights;
    active += matrix.experts ? weights * config.moe.top_k / config.moe.router_outputs() : weights;
  }
  return {total.value(), active.value()};
}

void add_lora_options(ConfigSchema& schema, LoraConfig& lora) {
  schema.add("lora.rank", &lora.rank,
             "Rank of low-rank adapters (LoRA) beside matrices of layers, which are then all that "
             "is trained; 0: no adapters. On a GPU multiples of 8 are fast",
             between(0, kMaxWidth));
  schema.add("lora.alpha", &lora.alpha, "What adapters add is multiplied by alpha / rank",
             above(0));
  schema.add("lora.rank_stabilized", &lora.rank_stabilized,
             "Multiply it by alpha / sqrt(rank) instead (rsLoRA)");
  schema.add("lora.targets", &lora.targets,
             "Matrices with adapters: \"all\", or names such as \"attn.q\", \"attn\", \"mlp\", "
             "\"moe.experts\", \"moe.shared\", \"delta\"");
}

void validate_lora(const ModelConfig& config) {
  const LoraConfig& lora = config.lora;
  if (!lora.is_on()) {
    const LoraConfig off;
    const bool is_set =
        lora.alpha != off.alpha || lora.rank_stabilized || lora.targets != off.targets;
    require(!is_set,
            "[lora] is set, but lora.rank is 0, so that there are no adapters; set lora.rank, such "
            "as 16, or leave [lora] out");
    return;
  }
  validate_targets(config);
  require(config.window_kv_heads == 0 && config.window_heads == 0 && config.window_head_size == 0,
          "lora.rank is {}, but layers with a window have heads of their own (model.window_heads, "
          "model.window_kv_heads, model.window_head_size), and adapters of attention are of one "
          "size in all layers; leave one of them out",
          lora.rank);
  require(!config.keys_as_values,
          "lora.rank is {}, but with model.keys_as_values not all layers have the matrices that "
          "adapters are beside; leave one of them out",
          lora.rank);
  require(
      config.mtp_layers == 0,
      "lora.rank is {}, but model.mtp_layers is {}: multi-token prediction has no adapters; set "
      "model.mtp_layers = 0, which leaves its layers out",
      lora.rank, config.mtp_layers);
  const std::string first = config.is_gated() ? "moe.experts.gate_up" : "moe.experts.up";
  const bool experts = is_adapted(config, first) || is_adapted(config, "moe.experts.down");
  require(!experts || config.moe.experts == ExpertPath::kGrouped,
          "lora.targets has adapters for experts, but moe.experts is \"block_sparse\", whose "
          "products have none; set moe.experts = \"grouped\", or name other targets");
}

}  // namespace tessera
