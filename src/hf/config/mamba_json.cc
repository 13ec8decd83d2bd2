#include "hf/config/mamba_json.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "model/config/limits.h"
#include "ops/short_conv/short_conv.h"

namespace tessera {
namespace {

using nlohmann::json;

/// How transformers writes an infinite number.
const json& infinity() {
  static const json value = {{"__float__", "Infinity"}};
  return value;
}

/// The limits of steps, of which the upper one may be infinite.
void read_step_limit(const ConfigJson& config, MambaConfig& mamba) {
  const json& limit = config.value("time_step_limit");
  if (limit.is_null()) return;
  const auto is_limit = [](const json& x) { return x.is_number() && x.get<double>() >= 0; };
  require(limit.is_array() && limit.size() == 2 && is_limit(limit[0]) &&
              (limit[1] == infinity() || is_limit(limit[1])),
          "{}: 'time_step_limit' is {}; expected a least and a largest step, which may be "
          "{{\"__float__\": \"Infinity\"}}",
          config.where(), quote_for_message(limit.dump()));
  mamba.min_step = limit[0].get<double>();
  if (limit[1] == infinity()) return;
  mamba.max_step = limit[1].get<double>();
  require(mamba.max_step > 0, "{}: 'time_step_limit' leaves no step above 0", config.where());
}

json write_step_limit(const MambaConfig& mamba) {
  json most = mamba.max_step > 0 ? json(mamba.max_step) : infinity();
  return json::array({mamba.min_step, std::move(most)});
}

/// Granite's: "mamba" and "attention", which transformers also calls "linear_attention" and
/// "full_attention".
void read_granite_layers(const ConfigJson& config, ModelConfig& model) {
  const json& types = config.value("layer_types");
  require(types.is_null() || (types.is_array() && std::cmp_equal(types.size(), model.num_layers)),
          "{}: 'layer_types' must be a list of one type for each of the {} layers", config.where(),
          model.num_layers);
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const std::string& type =
        types.is_null() ? std::string("mamba")
                        : json_text(types[layer], "a type in layer_types", config.where());
    const bool is_mamba = type == "mamba" || type == "linear_attention";
    require(is_mamba || type == "attention" || type == "full_attention",
            "{}: the layer type {} is not supported; supported are mamba and attention",
            config.where(), quote_for_message(type));
    if (is_mamba) model.mamba_layers.push_back(layer);
  }
}

void read_granite_heads(const ConfigJson& config, ModelConfig& model) {
  MambaConfig& mamba = model.mamba;
  const int64_t inner = config.bounded("mamba_expand", 1, kMaxWidth) * model.hidden_size;
  mamba.num_heads = config.bounded("mamba_n_heads", 1, kMaxHeads);
  const bool derived = config.value("mamba_d_head") == "auto";
  mamba.head_size = derived ? std::max<int64_t>(inner / mamba.num_heads, 1)
                            : config.bounded("mamba_d_head", 1, kMaxWidth);
  require(mamba.inner() == inner,
          "{}: mamba_n_heads {} of {} make {}, and mamba_expand times hidden_size is {}",
          config.where(), mamba.num_heads, mamba.head_size, mamba.inner(), inner);
  mamba.num_groups = config.bounded("mamba_n_groups", 1, kMaxHeads);
  mamba.state_size = config.bounded("mamba_d_state", 1, kMaxWidth);
  mamba.conv_size = config.bounded("mamba_d_conv", 1, ShortConv::kMaxTaps);
  mamba.conv_bias = config.flag("mamba_conv_bias");
  mamba.proj_bias = config.flag("mamba_proj_bias");
  read_step_limit(config, mamba);
}

void read_granite(const ConfigJson& config, ModelConfig& model) {
  require(model.activation == Activation::kSwiGLU,
          "{}: 'hidden_act' is {}; only silu is supported here, of the short convolutions too",
          config.where(), quote_for_message(config.text("hidden_act")));
  read_granite_layers(config, model);
  read_granite_heads(config, model);
  const json& positions = config.value("position_embedding_type");
  require(positions.is_null() || positions == "nope" || positions == "rope",
          "{}: 'position_embedding_type' is {}; supported are rope, nope and null", config.where(),
          quote_for_message(positions.dump()));
  if (positions != "rope") model.rope = {.fraction = 0};
  const int64_t shared = config.bounded("shared_intermediate_size", 1, kMaxWidth);
  // Without experts the shared one is the MLP.
  if (model.moe.num_experts == 0) model.inner_size = shared;
}

void write_granite(const ModelConfig& model, json& values) {
  const MambaConfig& mamba = model.mamba;
  json types = json::array();
  for (int64_t layer = 0; layer < model.num_layers; ++layer)
    types.push_back(model.is_mamba_layer(layer) ? "mamba" : "attention");
  values["layer_types"] = std::move(types);
  if (!model.mamba_layers.empty()) {
    values["mamba_expand"] = mamba.inner() / model.hidden_size;
    values["mamba_n_heads"] = mamba.num_heads;
    values["mamba_d_head"] = mamba.head_size;
    values["mamba_n_groups"] = mamba.num_groups;
    values["mamba_d_state"] = mamba.state_size;
    values["mamba_d_conv"] = mamba.conv_size;
    values["mamba_conv_bias"] = mamba.conv_bias;
    values["mamba_proj_bias"] = mamba.proj_bias;
    values["time_step_limit"] = write_step_limit(mamba);
  } else {
    // transformers checks the sizes even where no layer has them.
    values["mamba_n_heads"] = 1;
  }
  values["position_embedding_type"] = model.rotary_dim() > 0 ? "rope" : "nope";
  if (model.num_moe_layers() == 0) values["shared_intermediate_size"] = model.dense_inner_size();
}

/// A layer of Nemotron-H: what it is alone.
enum class NemotronLayer : char { kMamba = 'M', kAttention = '*', kMlp = '-', kExperts = 'E' };

NemotronLayer nemotron_layer(const std::string& type, const ConfigJson& config) {
  if (type == "mamba" || type == "linear_attention" || type == "M") return NemotronLayer::kMamba;
  if (type == "attention" || type == "full_attention" || type == "*")
    return NemotronLayer::kAttention;
  if (type == "mlp" || type == "-") return NemotronLayer::kMlp;
  require(type == "moe" || type == "E",
          "{}: the layer type {} is not supported; supported are mamba (M), attention (*), mlp (-) "
          "and moe (E)",
          config.where(), quote_for_message(type));
  return NemotronLayer::kExperts;
}

/// By a list, or a text of one letter for each.
std::vector<NemotronLayer> nemotron_layers(const ConfigJson& config) {
  std::vector<NemotronLayer> layers;
  if (config.is_null("layers_block_type")) {
    for (const char letter : config.text("hybrid_override_pattern"))
      layers.push_back(nemotron_layer(std::string(1, letter), config));
  } else {
    const json& types = config.value("layers_block_type");
    require(types.is_array(), "{}: 'layers_block_type' must be a list", config.where());
    for (const json& type : types)
      layers.push_back(
          nemotron_layer(json_text(type, "a type in layers_block_type", config.where()), config));
  }
  require(!layers.empty() && std::cmp_less_equal(layers.size(), kMaxLayers),
          "{}: a list of {} layers; from 1 to {} are supported", config.where(), layers.size(),
          kMaxLayers);
  require(config.is_null("num_hidden_layers") ||
              std::cmp_equal(config.size("num_hidden_layers"), layers.size()),
          "{}: 'num_hidden_layers' is {}, and {} layers are listed", config.where(),
          config.value("num_hidden_layers").dump(), layers.size());
  return layers;
}

void read_nemotron(const ConfigJson& config, ModelConfig& model) {
  const auto layers = nemotron_layers(config);
  bool has_experts = false;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const NemotronLayer type = layers[layer];
    const bool mixes = type == NemotronLayer::kMamba || type == NemotronLayer::kAttention;
    (mixes ? model.layers_without_mlp : model.layers_without_mixer).push_back(layer);
    if (type == NemotronLayer::kMamba) model.mamba_layers.push_back(layer);
    if (type == NemotronLayer::kMlp) model.moe.dense_layers.push_back(layer);
    has_experts |= type == NemotronLayer::kExperts;
  }
  if (!has_experts) model.moe = {.num_experts = 0};
  model.mamba = {.num_heads = config.bounded("mamba_num_heads", 1, kMaxHeads),
                 .head_size = config.bounded("mamba_head_dim", 1, kMaxWidth),
                 .num_groups = config.bounded("n_groups", 1, kMaxHeads),
                 .state_size = config.bounded("ssm_state_size", 1, kMaxWidth),
                 .conv_size = config.bounded("conv_kernel", 1, ShortConv::kMaxTaps),
                 .conv_bias = config.flag("use_conv_bias"),
                 .proj_bias = config.flag("use_bias"),
                 .min_step = config.number("time_step_min")};
  require(model.mamba.min_step >= 0, "{}: 'time_step_min' is below 0", config.where());
  if (has_experts && !config.is_null("moe_latent_size")) {
    model.moe.latent_size = config.bounded("moe_latent_size", 1, kMaxWidth);
    require(!model.mlp_bias,
            "{}: 'mlp_bias' with a 'moe_latent_size' means projections with biases, which are not "
            "supported",
            config.where());
  }
  model.rope = {.fraction = 0};
  model.padding_token = -1;  // its embedding is trained as all others
}

void write_nemotron(const ModelConfig& model, json& values) {
  json types = json::array();
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (model.has_mixer(layer)) {
      types.push_back(model.is_mamba_layer(layer) ? "mamba" : "attention");
    } else {
      types.push_back(model.is_moe_layer(layer) ? "moe" : "mlp");
    }
  }
  values["layers_block_type"] = std::move(types);
  values.erase("hybrid_override_pattern");
  values["num_hidden_layers"] = model.num_layers;
  values["pad_token_id"] = nullptr;
  if (model.num_moe_layers() > 0) {
    values["moe_shared_expert_intermediate_size"] = model.moe.shared_inner_size;
    values["moe_latent_size"] = model.moe.latent_size > 0 ? json(model.moe.latent_size) : json();
  }
  if (model.mamba_layers.empty()) return;
  const MambaConfig& mamba = model.mamba;
  values["mamba_num_heads"] = mamba.num_heads;
  values["mamba_head_dim"] = mamba.head_size;
  values["n_groups"] = mamba.num_groups;
  values["ssm_state_size"] = mamba.state_size;
  values["conv_kernel"] = mamba.conv_size;
  values["use_conv_bias"] = mamba.conv_bias;
  values["use_bias"] = mamba.proj_bias;
  values["time_step_min"] = mamba.min_step;
}

}  // namespace

int64_t count_mamba_layers(const ConfigJson& config) {
  return std::ssize(nemotron_layers(config));
}

void read_mamba(const ConfigJson& config, ModelConfig& model) {
  if (config.family().mamba == MambaRule::kGranite) read_granite(config, model);
  if (config.family().mamba == MambaRule::kNemotron) read_nemotron(config, model);
}

void write_mamba(const Family& family, const ModelConfig& model, json& values) {
  if (family.mamba == MambaRule::kGranite) write_granite(model, values);
  if (family.mamba == MambaRule::kNemotron) write_nemotron(model, values);
}

}  // namespace tessera
