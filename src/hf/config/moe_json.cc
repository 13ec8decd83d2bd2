#include "hf/config/moe_json.h"

#include <nlohmann/json.hpp>
#include <set>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "hf/config/config_json.h"
#include "model/config/limits.h"

namespace tessera {
namespace {

using nlohmann::json;

/// Makes the layers without experts those for which `is_dense` holds.
template <typename Predicate>
void set_dense_layers(ModelConfig& model, Predicate is_dense) {
  MoeConfig& moe = model.moe;
  moe.first_dense_layers = 0;
  while (moe.first_dense_layers < model.num_layers && is_dense(moe.first_dense_layers))
    ++moe.first_dense_layers;
  for (int64_t layer = moe.first_dense_layers; layer < model.num_layers; ++layer) {
    if (is_dense(layer)) moe.dense_layers.push_back(layer);
  }
}

/// By a list of one type for each layer; without it, the first layers are dense.
void read_mlp_types(const ConfigJson& config, ModelConfig& model) {
  if (config.is_null("mlp_layer_types")) {
    const Family& family = config.family();
    const int64_t first = family.has_key("first_k_dense_replace")
                              ? config.bounded("first_k_dense_replace", 0, kMaxLayers)
                              : family.first_dense;
    set_dense_layers(model, [=](int64_t layer) { return layer < first; });
    return;
  }
  const json& types = config.value("mlp_layer_types");
  require(types.is_array() && std::cmp_equal(types.size(), model.num_layers),
          "{}: 'mlp_layer_types' must be a list of one type for each of the {} layers",
          config.where(), model.num_layers);
  for (const json& type : types) {
    require(type == "dense" || type == "sparse",
            "{}: the type {} in mlp_layer_types is not supported; supported are dense and sparse",
            config.where(), quote_for_message(type.dump()));
  }
  set_dense_layers(model, [&](int64_t layer) { return types[layer] == "dense"; });
}

/// ERNIE's rule: every n-th layer counted from the first of all, of those from a start to an end.
void read_moe_range(const ConfigJson& config, ModelConfig& model) {
  const int64_t start = config.bounded("moe_layer_start_index", 0, kMaxLayers);
  const int64_t interval = config.bounded("moe_layer_interval", 1, kMaxLayers);
  const bool to_last =
      config.is_null("moe_layer_end_index") || config.value("moe_layer_end_index") == -1;
  const int64_t end =
      to_last ? model.num_layers - 1 : config.bounded("moe_layer_end_index", 0, kMaxLayers);
  set_dense_layers(model, [=](int64_t layer) {
    return (layer + 1) % interval != 0 || layer < start || layer > end;
  });
}

/// Llama 4's rule: layers of a list, else every n-th.
void read_listed_experts(const ConfigJson& config, ModelConfig& model) {
  const int64_t step = config.bounded("interleave_moe_layer_step", 1, kMaxLayers);
  const json& list = config.value("moe_layers");
  require(list.is_null() || list.is_array(), "{}: 'moe_layers' must be a list or null, found {}",
          config.where(), quote_for_message(list.dump()));
  std::set<int64_t> layers;
  for (const json& layer : list)
    layers.insert(json_size(layer, "a layer of moe_layers", config.where()));
  set_dense_layers(model, [&](int64_t layer) {
    return list.is_null() ? (layer + 1) % step != 0 : !layers.contains(layer);
  });
}

void read_dense_layers(const ConfigJson& config, ModelConfig& model) {
  const Family& family = config.family();
  MoeConfig& moe = model.moe;
  if (family.deepseek_v4) return;  // all layers have experts
  if (family.has_key("mlp_layer_types")) return read_mlp_types(config, model);
  if (family.has_key("moe_layer_start_index")) return read_moe_range(config, model);
  if (family.has_key("moe_layers")) return read_listed_experts(config, model);
  if (family.has_key("first_k_dense_replace")) {
    moe.first_dense_layers = config.bounded("first_k_dense_replace", 0, kMaxLayers);
  }
  if (family.has_key("decoder_sparse_step"))
    moe.every = config.bounded("decoder_sparse_step", 1, kMaxLayers);
  if (!family.has_key("mlp_only_layers") || config.is_null("mlp_only_layers")) return;
  const json& layers = config.value("mlp_only_layers");
  require(layers.is_array(), "{}: 'mlp_only_layers' must be a list", config.where());
  for (const json& layer : layers) {
    const int64_t index = json_size(layer, "a layer of mlp_only_layers", config.where());
    if (index < model.num_layers) moe.dense_layers.push_back(index);
  }
}

void read_groups(const ConfigJson& config, MoeConfig& moe) {
  moe.num_groups = config.bounded("n_group", 1, kMaxExperts);
  moe.top_groups = config.bounded("topk_group", 1, kMaxExperts);
}

void read_group_max(const ConfigJson& config, MoeConfig& moe, std::vector<std::string>& notes) {
  moe.normalize_top_k = false;
  moe.group_score = GroupScore::kMax;
  if (!config.is_null("norm_topk_prob") && config.flag("norm_topk_prob")) {
    notes.push_back(
        fmt::format("norm_topk_prob is true, but transformers' {} never normalizes; "
                    "neither does this model",
                    config.family().model_type));
  }
  const std::string& method = config.text("topk_method");
  if (method == "greedy") return;
  require(method == "group_limited_greedy",
          "{}: 'topk_method' is {}; supported are greedy and group_limited_greedy", config.where(),
          quote_for_message(method));
  read_groups(config, moe);
}

/// DeepSeek-V4's: probabilities sum to 1 whatever `norm_topk_prob` says.
void read_scores(const ConfigJson& config, MoeConfig& moe) {
  const std::string& name = config.text("scoring_func");
  moe.normalize_top_k = true;
  for (const ScoreFunction score :
       {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
    if (name != score_name(score)) continue;
    moe.score = score;
    return;
  }
  user_error("{}: 'scoring_func' is {}; supported are softmax, sigmoid and sqrtsoftplus",
             config.where(), quote_for_message(name));
}

void read_router(const ConfigJson& config, MoeConfig& moe, std::vector<std::string>& notes) {
  const Family& family = config.family();
  moe.score = ScoreFunction::kSoftmax;
  moe.score_order = ScoreOrder::kBeforeTopK;
  moe.normalize_top_k = !family.has_key("norm_topk_prob") || config.flag("norm_topk_prob");
  if (!config.is_null("routed_scaling_factor")) {
    moe.score_scale = config.positive("routed_scaling_factor");
  }
  if (family.router == RouterRule::kGroupMax) read_group_max(config, moe, notes);
  moe.expert_bias = family.has_correction_bias() &&
                    (!family.has_key("use_expert_bias") || config.flag("use_expert_bias"));
  if (family.router == RouterRule::kBiasedScores) read_scores(config, moe);
  if (family.router == RouterRule::kInputSigmoid) {
    moe.score = ScoreFunction::kSigmoid;
    moe.normalize_top_k = false;
    moe.probs_on_input = true;
  }
  if (family.router == RouterRule::kBiasedSigmoid) {
    moe.score = ScoreFunction::kSigmoid;
    moe.group_score = GroupScore::kTopTwoSum;
    const bool one_group = config.is_null("n_group") && config.is_null("topk_group");
    if (!one_group) read_groups(config, moe);
  }
}

/// Hugging Face's balancing loss compares experts over all layers together and is top_k times ours.
void read_balance(const ConfigJson& config, MoeConfig& moe) {
  moe.balance_coefficient = 0;
  if (!config.family().has_key("router_aux_loss_coef") || !config.flag("output_router_logits")) {
    return;
  }
  moe.balance_scope = BalanceTokens::kModel;
  moe.balance_coefficient = config.number("router_aux_loss_coef") * static_cast<double>(moe.top_k);
  require(moe.balance_coefficient >= 0, "{}: 'router_aux_loss_coef' is below 0", config.where());
}

/// Mixtral's code multiplies the tokens in place, so that experts read them jittered too. Phi's
/// does so by another name, and twice, which is not repeated here: the factors are noise.
void read_jitter(const ConfigJson& config, MoeConfig& moe) {
  const char* key = config.family().phimoe ? "input_jitter_noise" : "router_jitter_noise";
  if (!config.family().has_key(key) || config.is_null(key)) return;
  moe.router_jitter = config.number(key);
  require(moe.router_jitter >= 0 && moe.router_jitter < 1,
          "{}: '{}' is {}; it must be at least 0 and below 1", config.where(), key,
          moe.router_jitter);
  moe.jitter_experts = moe.router_jitter > 0;
}

void read_shared(const ConfigJson& config, MoeConfig& moe) {
  const Family& family = config.family();
  if (family.has_key("n_shared_experts")) {
    const int64_t least = family.router == RouterRule::kBiasedSoftmax ? 0 : 1;
    moe.shared_inner_size = config.bounded("n_shared_experts", least, kMaxWidth) * moe.inner_size;
    require(moe.shared_inner_size <= kMaxWidth,
            "{}: '{}' of inner size {} make one of {}; at most {} is supported", config.where(),
            config.spelled("n_shared_experts"), moe.inner_size, moe.shared_inner_size, kMaxWidth);
  }
  if (family.one_shared) moe.shared_inner_size = moe.inner_size;
  if (family.has_key("shared_intermediate_size"))
    moe.shared_inner_size = config.bounded("shared_intermediate_size", 0, kMaxWidth);
  if (family.has_key("moe_shared_expert_intermediate_size"))
    moe.shared_inner_size = config.bounded("moe_shared_expert_intermediate_size", 1, kMaxWidth);
  if (family.has_key("shared_expert_intermediate_size")) {
    moe.shared_inner_size = config.bounded("shared_expert_intermediate_size", 1, kMaxWidth);
    moe.shared_gate = true;
  }
}

}  // namespace

void read_moe(const ConfigJson& config, ModelConfig& model, std::vector<std::string>& notes) {
  const Family& family = config.family();
  MoeConfig& moe = model.moe;
  if (family.has_key("enable_moe_block") && !config.flag("enable_moe_block")) return;
  const bool alternating = family.expert_tensors == ExpertTensors::kAlternating;
  moe.num_experts =
      config.bounded(canonical_key(family, "num_experts"), alternating ? 1 : 0, kMaxExperts);
  if (moe.num_experts == 0) return;
  moe.mlp_bias = moe.router_bias = alternating;
  moe.top_k = config.bounded("num_experts_per_tok", 1, kMaxExperts);
  const bool own_size = family.has_key("moe_intermediate_size");
  moe.inner_size =
      config.bounded(own_size ? "moe_intermediate_size" : "intermediate_size", 1, kMaxWidth);
  read_dense_layers(config, model);
  read_shared(config, moe);
  read_router(config, moe, notes);
  read_balance(config, moe);
  read_jitter(config, moe);
}

}  // namespace tessera
