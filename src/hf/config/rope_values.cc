#include "hf/config/rope_values.h"

#include <algorithm>
#include <array>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/text/names.h"

namespace tessera {
namespace {

using nlohmann::json;

struct ScalingName {
  std::string_view name;
  RopeScaling scaling;
};
constexpr std::array<ScalingName, 6> kScalings = {{{"default", RopeScaling::kNone},
                                                   {"linear", RopeScaling::kLinear},
                                                   {"dynamic", RopeScaling::kDynamic},
                                                   {"yarn", RopeScaling::kYarn},
                                                   {"llama3", RopeScaling::kLlama3},
                                                   {"longrope", RopeScaling::kLongRope}}};

/// Every key of rope parameters; one that a type does not read has no effect in transformers.
/// Those of mrope say which pairs turn by an image's rows and columns; of text all turn alike.
const std::vector<std::string> kKnownKeys = {"rope_theta",
                                             "rope_type",
                                             "type",
                                             "partial_rotary_factor",
                                             "factor",
                                             "original_max_position_embeddings",
                                             "attention_factor",
                                             "beta_fast",
                                             "beta_slow",
                                             "truncate",
                                             "mscale",
                                             "mscale_all_dim",
                                             "low_freq_factor",
                                             "alpha",
                                             "high_freq_factor",
                                             "short_factor",
                                             "long_factor",
                                             "short_mscale",
                                             "long_mscale",
                                             "mrope_section",
                                             "mrope_interleaved"};

constexpr std::string_view kProportional = "proportional";

}  // namespace

std::string_view rope_type_name(RopeScaling scaling) {
  for (const ScalingName& known : kScalings) {
    if (known.scaling == scaling) return known.name;
  }
  throw InternalError("an unknown way to stretch rotations");
}

RopeValues::RopeValues(json values, std::string where, const Family& family)
    : values_(std::move(values)),
      where_(std::move(where)),
      takes_proportional_(family.gemma),
      takes_long_(family.phimoe) {
  require(values_.is_object(), "{} must be an object, found {}", where_,
          quote_for_message(values_.dump()));
  for (const auto& [key, value] : values_.items()) {
    require(std::ranges::find(kKnownKeys, key) != kKnownKeys.end(),
            "{}: the key {} is not supported{}", where_, quote_for_message(key),
            did_you_mean(key, kKnownKeys));
  }
  require(family.base_alpha || !has("alpha"),
          "{}: 'alpha' is not supported for model type '{}', where transformers ignores it", where_,
          family.model_type);
}

double RopeValues::number(const char* key) const {
  require(has(key) && values_[key].is_number(), "{}: '{}' must be a number, found {}", where_, key,
          values_.contains(key) ? quote_for_message(values_[key].dump()) : "none");
  return values_[key].get<double>();
}

double RopeValues::positive(const char* key) const {
  const double found = number(key);
  require(found > 0, "{}: '{}' must be above 0, found {}", where_, key, found);
  return found;
}

std::vector<double> RopeValues::positives(const char* key) const {
  require(has(key) && values_[key].is_array(), "{}: '{}' must be a list of numbers, found {}",
          where_, key, values_.contains(key) ? quote_for_message(values_[key].dump()) : "none");
  std::vector<double> list;
  for (const json& value : values_[key]) {
    require(value.is_number() && value.get<double>() > 0,
            "{}: '{}' must have numbers above 0, found {}", where_, key,
            quote_for_message(value.dump()));
    list.push_back(value.get<double>());
  }
  return list;
}

bool RopeValues::flag(const char* key, bool otherwise) const {
  if (!has(key)) return otherwise;
  require(values_[key].is_boolean(), "{}: '{}' must be true or false", where_, key);
  return values_[key].get<bool>();
}

bool RopeValues::is_proportional() const {
  return takes_proportional_ && type() == kProportional;
}

std::string RopeValues::type() const {
  const char* key = has("rope_type") ? "rope_type" : "type";
  return has(key) ? json_text(values_[key], key, where_) : "default";
}

/// Of Phi, whose amplitudes transformers takes with every type but the default.
RopeScaling RopeValues::long_scaling(const std::string& name) const {
  for (const RopeScaling known : {RopeScaling::kNone, RopeScaling::kLongRope}) {
    if (name == rope_type_name(known)) return known;
  }
  user_error("{}: the rope type {} is not supported; supported are default and longrope", where_,
             quote_for_message(name));
}

RopeScaling RopeValues::scaling() const {
  const std::string name = type();
  if (is_proportional())
    return number("factor", 1) == 1 ? RopeScaling::kNone : RopeScaling::kLinear;
  if (takes_long_) return long_scaling(name);
  for (const ScalingName& known : kScalings) {
    if (name == known.name && known.scaling != RopeScaling::kLongRope) return known.scaling;
  }
  user_error(
      "{}: the rope type {} is not supported; supported are default, linear, dynamic, "
      "yarn{} llama3{}",
      where_, quote_for_message(name), takes_proportional_ ? "," : " and",
      takes_proportional_ ? " and proportional" : "");
}

}  // namespace tessera
