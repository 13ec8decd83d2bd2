#include "hf/config/rope_json.h"

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "hf/config/rope_values.h"
#include "model/config/rotary.h"

namespace tessera {
namespace {

using nlohmann::json;

/// Parameters by type of layer are taken where all types have the same.
json join_layer_types(const json& parameters, std::string_view where) {
  json joined;
  for (const char* type : {"full_attention", "sliding_attention"}) {
    if (!parameters.contains(type) || parameters[type].is_null()) continue;
    require(joined.is_null() || joined == parameters[type],
            "{}: rope parameters that differ by type of layer are not supported", where);
    joined = parameters[type];
  }
  if (joined.is_null()) return parameters;
  for (const auto& [key, value] : parameters.items()) {
    require(key == "full_attention" || key == "sliding_attention",
            "{}: {} stands beside rope parameters by type of layer", where, quote_for_message(key));
  }
  return joined;
}

constexpr const char* kFullType = "full_attention";
constexpr const char* kWindowType = "sliding_attention";

/// What the file says of one type of layer.
RopeValues rope_of_type(const ConfigJson& config, const char* type) {
  for (const char* key : {"rope_scaling", "original_max_position_embeddings"}) {
    require(config.is_null(key),
            "{}: '{}' is not read by transformers where rope_parameters are by type of layer; "
            "leave it out",
            config.where(), key);
  }
  const json& all = config.value("rope_parameters");
  const std::string where = fmt::format("{}: rope_parameters: {}", config.where(), type);
  require(all.is_object() && all.contains(type) && all[type].is_object(),
          "{} is missing; rope_parameters need an object for each type of layer", where);
  for (const auto& [key, value] : all.items()) {
    require(key == kFullType || key == kWindowType,
            "{}: {} stands beside rope parameters by type of layer", config.where(),
            quote_for_message(key));
  }
  const RopeValues json(all[type], where, config.family());
  require(json.scaling() == RopeScaling::kNone || json.has("partial_rotary_factor") ||
              config.is_null("partial_rotary_factor"),
          "{}: 'partial_rotary_factor' is missing, for which transformers takes 1 where the "
          "rotation is scaled; say what it is",
          where);
  require(json.flag("truncate", true),
          "{}: 'truncate' is false, which transformers does not read by type of layer; leave it "
          "out",
          where);
  return json;
}

RopeValues rope_object(const ConfigJson& config) {
  const json& scaling = config.value("rope_scaling");
  const bool use_scaling = !scaling.is_null() && !scaling.empty();
  const char* key = use_scaling ? "rope_scaling" : "rope_parameters";
  const std::string where = config.where() + ": " + key;
  const json& given = config.value(key);
  if (given.is_null()) return {json::object(), where, config.family()};
  if (!given.is_object()) return {given, where, config.family()};
  return {join_layer_types(given, where), where, config.family()};
}

int64_t to_length(const RopeValues& rope, const char* key) {
  constexpr double kMax = 1e9;
  const double value = rope.number(key);
  require(value >= 1 && value <= kMax && value == static_cast<double>(static_cast<int64_t>(value)),
          "{}: '{}' must be a whole number of tokens, found {}", rope.where(), key, value);
  return static_cast<int64_t>(value);
}

/// The context before stretching: a key beside the parameters wins over the one within.
int64_t original_length(const ConfigJson& config, const RopeValues& rope) {
  if (!config.is_null("original_max_position_embeddings")) {
    return config.size("original_max_position_embeddings");
  }
  constexpr const char* kKey = "original_max_position_embeddings";
  return rope.has(kKey) ? to_length(rope, kKey) : config.size("max_position_embeddings");
}

void read_yarn(const ConfigJson& config, const RopeValues& json, RopeConfig& rope) {
  rope.original_length = original_length(config, json);
  if (!json.has("factor")) {
    rope.factor = static_cast<double>(config.size("max_position_embeddings")) /
                  static_cast<double>(rope.original_length);
  }
  if (json.has("attention_factor")) rope.attention_factor = json.positive("attention_factor");
  // transformers takes 0 for "not given".
  if (json.number("beta_fast", 0) != 0) rope.beta_fast = json.positive("beta_fast");
  if (json.number("beta_slow", 0) != 0) rope.beta_slow = json.positive("beta_slow");
  rope.truncate = json.flag("truncate", true);
  if (json.number("mscale", 0) != 0) rope.mscale = json.positive("mscale");
  if (json.number("mscale_all_dim", 0) != 0) rope.mscale_all_dims = json.positive("mscale_all_dim");
}

void read_llama3(const ConfigJson& config, const RopeValues& json, RopeConfig& rope) {
  rope.original_length = original_length(config, json);
  rope.low_frequency_factor = json.positive("low_freq_factor");
  rope.high_frequency_factor = json.positive("high_freq_factor");
}

void read_long_rope(const ConfigJson& config, const RopeValues& json, RopeConfig& rope) {
  rope.original_length = original_length(config, json);
  rope.short_factors = json.positives("short_factor");
  rope.long_factors = json.positives("long_factor");
  rope.short_mscale = json.positive("short_mscale");
  rope.long_mscale = json.positive("long_mscale");
}

double read_base(const ConfigJson& config, const RopeValues& json) {
  constexpr double kDefault = 10000.0;
  double base = config.is_null("rope_theta") ? kDefault : config.number("rope_theta");
  base = json.number("rope_theta", base);
  require(base > 1, "{}: 'rope_theta' must be above 1, found {}", json.where(), base);
  return base;
}

/// Elements of a head of standard attention.
double head_size(const ConfigJson& config) {
  const int64_t size = config.is_null("head_dim")
                           ? config.size("hidden_size") / config.size("num_attention_heads")
                           : config.size("head_dim");
  return static_cast<double>(size);
}

/// Hunyuan's fixed "NTK-aware" stretch of the base, which its files call dynamic though it does not
/// depend on the sequence's length.
bool has_alpha(const RopeValues& json) {
  return json.scaling() == RopeScaling::kDynamic && json.number("alpha", 0) != 0;
}

double stretched_base(const ConfigJson& config, const RopeValues& json, double base) {
  const double alpha = json.positive("alpha");
  const double size = head_size(config);
  require(size > 2, "{}: 'alpha' needs heads of more than 2 elements", json.where());
  const double stretched = base * std::pow(alpha, size / (size - 2));
  require(std::isfinite(stretched) && stretched > 1,
          "{}: 'alpha' {} makes {} of the base {}; it must be above 1", json.where(), alpha,
          stretched, base);
  return stretched;
}

double read_fraction(const ConfigJson& config, const RopeValues& json) {
  const bool supported = config.family().has_key("partial_rotary_factor") || json.is_proportional();
  double fraction = 1.0;
  if (supported && !config.is_null("partial_rotary_factor")) {
    fraction = config.number("partial_rotary_factor");
  } else if (!config.is_null("rotary_dim")) {
    fraction = static_cast<double>(config.size("rotary_dim")) / head_size(config);
  }
  fraction = json.number("partial_rotary_factor", fraction);
  require(fraction > 0 && fraction <= 1, "{}: 'partial_rotary_factor' must be in (0, 1], found {}",
          json.where(), fraction);
  require(supported || fraction == 1.0,
          "{}: 'partial_rotary_factor' is {}, which model type '{}' does not have; only 1 is "
          "supported",
          json.where(), fraction, config.family().model_type);
  return fraction;
}

bool is_interleaved(const ConfigJson& config) {
  const bool optional = config.family().has_key("rope_interleave");
  return optional ? config.is_null("rope_interleave") || config.flag("rope_interleave")
                  : config.family().interleaved;
}

RopeConfig read_one(const ConfigJson& config, const RopeValues& json) {
  RopeConfig rope;
  rope.base = read_base(config, json);
  rope.fraction = read_fraction(config, json);
  rope.interleaved = is_interleaved(config);
  rope.proportional = json.is_proportional() && rope.fraction < 1;
  if (has_alpha(json)) {
    rope.base = stretched_base(config, json, rope.base);
    return rope;
  }
  rope.scaling = json.scaling();
  if (rope.scaling == RopeScaling::kNone) return rope;
  if (rope.scaling == RopeScaling::kLongRope) {
    read_long_rope(config, json, rope);
    return rope;
  }
  if (rope.scaling != RopeScaling::kYarn || json.has("factor")) rope.factor = json.number("factor");
  if (rope.scaling == RopeScaling::kDynamic)
    rope.max_length = config.size("max_position_embeddings");
  if (rope.scaling == RopeScaling::kYarn) read_yarn(config, json, rope);
  if (rope.scaling == RopeScaling::kLlama3) read_llama3(config, json, rope);
  require(rope.factor >= 1, "{}: 'factor' must be at least 1, found {}", json.where(), rope.factor);
  require(rope.scaling == RopeScaling::kYarn || json.number("mscale_all_dim", 0) == 0,
          "{}: 'mscale_all_dim' is supported with the rope type yarn only", json.where());
  return rope;
}

/// Gives layers with a window, and those without, a rotation.
void set_ropes(ModelConfig& model, const RopeConfig& of_windows, const RopeConfig& of_others) {
  const bool all = model.window > 0 && model.window_layers.empty();
  model.rope = all ? of_windows : of_others;
  model.own_window_rope = model.window > 0 && !all && of_windows != of_others;
  if (model.own_window_rope) model.window_rope = of_windows;
}

/// Gives layers the bases of a list, or where there is none all `rope`.
void set_listed_ropes(const ConfigJson& config, const RopeConfig& rope, ModelConfig& model) {
  constexpr const char* kKey = "layer_rope_theta";
  if (config.is_null(kKey)) return set_ropes(model, rope, rope);
  const json& list = config.value(kKey);
  require(list.is_array() && std::cmp_equal(list.size(), model.num_layers),
          "{}: '{}' must be a list of one number for each of the {} layers", config.where(), kKey,
          model.num_layers);
  std::array<std::optional<double>, 2> bases;  // of layers without a window, and with
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const json& found = list[layer];
    require(found.is_number() && found.get<double>() >= 0,
            "{}: '{}' must have numbers of at least 0, found {}", config.where(), kKey,
            quote_for_message(found.dump()));
    std::optional<double>& base = bases.at(model.has_window(layer) ? 1 : 0);
    require(!base || *base == found.get<double>(),
            "{}: '{}' has {} and {} in layers of one type, which must be alike", config.where(),
            kKey, base.value_or(0), found.get<double>());
    base = found.get<double>();
  }
  const auto with_base = [&](std::optional<double> base) {
    RopeConfig own = rope;
    own.base = base.value_or(rope.base);
    return own.base == 0 ? RopeConfig{.fraction = 0} : own;
  };
  set_ropes(model, with_base(bases[1]), with_base(bases[0]));
}

constexpr const char* kMainType = "main";
constexpr const char* kCompressType = "compress";

/// Rotated elements of a head, as transformers counts them.
int64_t rotated_elements(const ConfigJson& config, double share) {
  return static_cast<int64_t>(head_size(config) * share);
}

/// One of DeepSeek-V4's two objects of rope parameters.
RopeConfig read_rope_of(const ConfigJson& config, const char* type, int64_t rotated) {
  const json& all = config.value("rope_parameters");
  const RopeValues json(all[type], fmt::format("{}: rope_parameters: {}", config.where(), type),
                        config.family());
  const double share = json.number("partial_rotary_factor", 1.0);
  require(rotated_elements(config, share) == rotated,
          "{}: 'partial_rotary_factor' is {}, by which {} elements of a head would be rotated, and "
          "{} are by that of the model",
          json.where(), share, rotated_elements(config, share), rotated);
  require(json.flag("truncate", true),
          "{}: 'truncate' is false, which is not supported here; leave it out", json.where());
  RopeConfig rope = read_one(config, json);
  rope.fraction = 1;  // of the elements that [compressed] says
  return rope;
}

/// The rotation of older files: scaled where tokens are compressed alone, its amplitude 1.
RopeConfig read_flat_rope(const ConfigJson& config, bool compressed) {
  RopeConfig rope{.base = config.number(compressed ? "compress_rope_theta" : "rope_theta"),
                  .interleaved = true};
  if (compressed) {
    const RopeValues json = rope_object(config);
    const double base = rope.base;
    rope = read_one(config, json);
    rope.base = base;
    if (rope.scaling == RopeScaling::kYarn && !json.has("attention_factor"))
      rope.attention_factor = 1;
  }
  rope.fraction = 1;
  require(rope.base > 1, "{}: a base of rotations is {}; it must be above 1", config.where(),
          rope.base);
  return rope;
}

void read_compressed_ropes(const ConfigJson& config, ModelConfig& model) {
  const json& given = config.value("rope_parameters");
  const bool apart = given.is_object() && given.contains(kMainType) &&
                     given.contains(kCompressType) && given[kMainType].is_object() &&
                     given[kCompressType].is_object();
  if (!apart) {
    model.rope = read_flat_rope(config, false);
    model.compressed_rope = read_flat_rope(config, true);
    return;
  }
  model.rope = read_rope_of(config, kMainType, model.compressed.rope_size);
  model.compressed_rope = read_rope_of(config, kCompressType, model.compressed.rope_size);
}

/// What rotates layers with compressed tokens says nothing where there are none.
void read_v4_ropes(const ConfigJson& config, ModelConfig& model) {
  read_compressed_ropes(config, model);
  if (!model.compressed.has_entries()) model.compressed_rope = {};
}

}  // namespace

double rotated_share(const ModelConfig& model) {
  return static_cast<double>(model.compressed.rope_size) / static_cast<double>(model.head_dim());
}

json write_compressed_ropes(const ModelConfig& model, const Family& family) {
  json types = {{kMainType, write_rope(model.rope, family)},
                {kCompressType, write_rope(model.compressed_rope, family)}};
  for (json& type : types) {
    type.erase("truncate");
    type["partial_rotary_factor"] = rotated_share(model);
  }
  return types;
}

void read_rope(const ConfigJson& config, ModelConfig& model) {
  if (config.family().rope == RopeRule::kByLayerType) {
    const auto read = [&](const char* type) {
      return read_one(config, rope_of_type(config, type));
    };
    const bool all = model.window > 0 && model.window_layers.empty();
    const RopeConfig others = read(all ? kWindowType : kFullType);
    set_ropes(model, model.window > 0 && !all ? read(kWindowType) : others, others);
    return;
  }
  const RopeRule rule = config.family().rope;
  if (rule == RopeRule::kByCompression) return read_v4_ropes(config, model);
  if (rule == RopeRule::kNever) {
    model.rope = {.fraction = 0};
    return;
  }
  require(
      rule != RopeRule::kWindowsOnly || !config.is_null("sliding_window"),
      "{}: 'sliding_window' is null, which would leave layers with a rotation without a window; "
      "give their window",
      config.where());
  const RopeConfig rope = read_one(config, rope_object(config));
  if (rule == RopeRule::kByLayer) return set_listed_ropes(config, rope, model);
  const bool in_windows = rule == RopeRule::kChunksAlone || rule == RopeRule::kWindowsOnly ||
                          (rule == RopeRule::kWindowsAlone && !config.is_null("sliding_window"));
  set_ropes(model, rope, in_windows ? RopeConfig{.fraction = 0} : rope);
}

json write_rope(const RopeConfig& rope, const Family& family) {
  json values = {{"rope_theta", rope.base}};
  values["rope_type"] = rope_type_name(rope.scaling);
  if (family.gemma && rope.proportional) values["rope_type"] = "proportional";
  if (family.has_key("partial_rotary_factor") || (family.gemma && rope.proportional))
    values["partial_rotary_factor"] = rope.fraction;
  if (rope.scaling == RopeScaling::kNone) return values;
  if (rope.scaling == RopeScaling::kLongRope) {
    values.update({{"original_max_position_embeddings", rope.original_length},
                   {"short_factor", rope.short_factors},
                   {"long_factor", rope.long_factors},
                   {"short_mscale", rotary_amplitude(rope, rope.original_length)},
                   {"long_mscale", rotary_amplitude(rope, rope.original_length + 1)}});
    return values;
  }
  values["factor"] = rope.factor;
  if (rope.original_length > 0) {
    values["original_max_position_embeddings"] = rope.original_length;
  }
  if (rope.scaling == RopeScaling::kYarn) {
    values["beta_fast"] = rope.beta_fast;
    values["beta_slow"] = rope.beta_slow;
    values["truncate"] = rope.truncate;
    if (rope.attention_factor > 0) values["attention_factor"] = rope.attention_factor;
    if (rope.mscale > 0) values["mscale"] = rope.mscale;
    if (rope.mscale_all_dims > 0) values["mscale_all_dim"] = rope.mscale_all_dims;
  }
  if (rope.scaling == RopeScaling::kLlama3) {
    values["low_freq_factor"] = rope.low_frequency_factor;
    values["high_freq_factor"] = rope.high_frequency_factor;
  }
  return values;
}

json write_ropes_by_type(const ModelConfig& model, const Family& family) {
  json types = {{kFullType, write_rope(model.of_layer({}).rope, family)},
                {kWindowType, write_rope(model.of_layer({.window = true}).rope, family)}};
  for (json& type : types) type.erase("truncate");
  return types;
}

}  // namespace tessera
