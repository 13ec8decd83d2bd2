#include "hf/config/phi_json.h"

#include <nlohmann/json.hpp>

#include "core/error.h"

namespace tessera {

using nlohmann::json;

void read_phi(const ConfigJson& config, ModelConfig& model) {
  if (!config.family().phimoe) return;
  model.norm = NormKind::kLayer;
  model.head_bias = config.flag("lm_head_bias");
  MoeConfig& moe = model.moe;
  require(moe.top_k == 2, "{}: 'num_experts_per_tok' is {}, and transformers' router takes 2",
          config.where(), moe.top_k);
  moe.normalize_top_k = false;
  moe.sparse_mixer = config.positive("router_jitter_noise");
  require(moe.sparse_mixer < 1, "{}: 'router_jitter_noise' is {}; it must be below 1",
          config.where(), moe.sparse_mixer);
}

void write_phi(const Family& family, const ModelConfig& model, json& values) {
  if (!family.phimoe) return;
  const MoeConfig& moe = model.moe;
  values["lm_head_bias"] = model.head_bias;
  values["router_jitter_noise"] = moe.sparse_mixer;
  values["input_jitter_noise"] = moe.jitter_experts ? moe.router_jitter : 0.0;
  if (model.rope.scaling == RopeScaling::kLongRope)
    values["original_max_position_embeddings"] = model.rope.original_length;
}

}  // namespace tessera
