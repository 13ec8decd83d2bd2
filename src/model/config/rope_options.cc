#include "model/config/rope_options.h"

#include "core/error.h"
#include "model/config/limits.h"

namespace tessera {
namespace {

/// Refuses factors that are not of every pair of so many.
void validate_long_rope(const RopeConfig& rope, int64_t num_pairs, std::string_view section) {
  require(rope.original_length > 1,
          "{0}.scaling = \"longrope\" needs {0}.original_length above 1, found {1}", section,
          rope.original_length);
  const auto check = [&](const std::vector<double>& factors, const char* key) {
    require(std::ssize(factors) == num_pairs,
            "{0}.scaling = \"longrope\" needs {0}.{1} of {2} numbers, one for each pair of rotated "
            "elements; it has {3}",
            section, key, num_pairs, factors.size());
  };
  check(rope.short_factors, "short_factors");
  check(rope.long_factors, "long_factors");
}

/// Refuses one rotation, of which `config.rope` is that of `section`.
void validate_section(const ModelConfig& config, std::string_view section) {
  const RopeConfig& rope = config.rope;
  const int64_t size = config.rotary_dim();
  require(!config.is_latent() || rope.fraction == 1.0 || rope.fraction == 0.0,
          "{}.fraction {} does not go with model.attention = \"latent\", which rotates "
          "latent.rope_size elements of a head, or with 0 none; set latent.rope_size",
          section, rope.fraction);
  require(!rope.proportional || !config.is_latent(),
          "{}.proportional does not go with model.attention = \"latent\"; leave it out", section);
  require(!config.is_compressed() || rope.fraction == 1.0 || rope.fraction == 0.0,
          "{}.fraction {} does not go with model.attention = \"compressed\", which rotates "
          "compressed.rope_size elements of a head, or with 0 none; set compressed.rope_size",
          section, rope.fraction);
  require(!rope.proportional || !config.is_compressed(),
          "{}.proportional does not go with model.attention = \"compressed\"; leave it out",
          section);
  require(!rope.proportional || rope.scaling == RopeScaling::kNone ||
              rope.scaling == RopeScaling::kLinear,
          "{0}.proportional turns pairs of whole heads, which {0}.scaling stretches by \"linear\" "
          "alone; set that, or leave one of them out",
          section);
  if (rope.fraction == 0) {
    require(rope.scaling == RopeScaling::kNone,
            "{0}.scaling stretches the rotation, which {0}.fraction 0 takes away; leave it out",
            section);
    return;
  }
  require(size > 0 && size % 2 == 0,
          "{} elements of a head are rotated ([{}]), and the rotary embedding turns pairs; make "
          "that an even number above 0",
          size, section);
  const auto needs = [&](RopeScaling scaling, const char* name, int64_t value, const char* key) {
    require(rope.scaling != scaling || value > 0, "{0}.scaling = \"{1}\" needs {0}.{2} above 0",
            section, name, key);
  };
  needs(RopeScaling::kDynamic, "dynamic", rope.max_length, "max_length");
  needs(RopeScaling::kYarn, "yarn", rope.original_length, "original_length");
  needs(RopeScaling::kLlama3, "llama3", rope.original_length, "original_length");
  if (rope.scaling == RopeScaling::kLongRope) validate_long_rope(rope, size / 2, section);
  require(rope.scaling != RopeScaling::kDynamic || size > 2,
          "{}.scaling = \"dynamic\" needs more than 2 rotated elements a head", section);
  require(rope.scaling != RopeScaling::kLlama3 ||
              rope.high_frequency_factor >= rope.low_frequency_factor,
          "{0}.high_frequency_factor {1} must be at least {0}.low_frequency_factor {2}", section,
          rope.high_frequency_factor, rope.low_frequency_factor);
}

}  // namespace

void add_rope_options(ConfigSchema& schema, RopeConfig& rope, std::string_view section) {
  const auto key = [&](std::string_view name) { return fmt::format("{}.{}", section, name); };
  schema.add(key("base"), &rope.base, "Base of the rotary embedding", above(1));
  schema.add(key("fraction"), &rope.fraction,
             "Share of a head that is rotated, its first elements; 0: nothing is, and attention "
             "sees no positions",
             between(0, 1));
  schema.add(key("interleaved"), &rope.interleaved,
             "Rotate neighbouring elements as pairs, not the two halves");
  schema.add(key("proportional"), &rope.proportional,
             "The fraction of a head's pairs that would turn fastest were all rotated is, as in "
             "Gemma 4: halves of the pairs lie half a head apart");
  schema.add_enum(key("scaling"), &rope.scaling,
                  {{"none", RopeScaling::kNone},
                   {"linear", RopeScaling::kLinear},
                   {"dynamic", RopeScaling::kDynamic},
                   {"yarn", RopeScaling::kYarn},
                   {"llama3", RopeScaling::kLlama3},
                   {"longrope", RopeScaling::kLongRope}},
                  "How the rotation is stretched to longer contexts");
  schema.add(key("factor"), &rope.factor, "By how much it is stretched", at_least(1));
  schema.add(key("max_length"), &rope.max_length,
             "dynamic: sequences beyond this length change the base", between(0, kMaxLength));
  schema.add(key("original_length"), &rope.original_length,
             "yarn, llama3, longrope: context that the model was trained for first",
             between(0, kMaxLength));
  schema.add(key("beta_fast"), &rope.beta_fast,
             "yarn: frequencies with more turns in that context stay", above(0));
  schema.add(key("beta_slow"), &rope.beta_slow,
             "yarn: frequencies with fewer turns are divided by the factor", above(0));
  schema.add(key("truncate"), &rope.truncate, "yarn: whole indices as borders of the ramp");
  schema.add(key("attention_factor"), &rope.attention_factor,
             "yarn: amplitude of rotated elements; 0: 0.1 ln(factor) + 1, or by mscale",
             at_least(0));
  schema.add(key("mscale"), &rope.mscale, "yarn: DeepSeek's mscale; 0: none", at_least(0));
  schema.add(key("mscale_all_dims"), &rope.mscale_all_dims,
             "yarn: DeepSeek's mscale_all_dim; 0: none", at_least(0));
  schema.add(key("low_frequency_factor"), &rope.low_frequency_factor,
             "llama3: original context over the longest wavelength that is interpolated", above(0));
  schema.add(key("high_frequency_factor"), &rope.high_frequency_factor,
             "llama3: original context over the shortest wavelength that is interpolated",
             above(0));
  schema.add(key("short_factors"), &rope.short_factors,
             "longrope: what the frequency of each pair is divided by where no sequence is longer "
             "than original_length",
             {.min = kMinMultiplier, .max = kMaxMultiplier});
  schema.add(key("long_factors"), &rope.long_factors, "longrope: the same where one may be longer",
             {.min = kMinMultiplier, .max = kMaxMultiplier});
  schema.add(key("short_mscale"), &rope.short_mscale,
             "longrope: amplitude of rotated elements where no sequence is longer than "
             "original_length; 0: sqrt(1 + ln(factor) / ln(original_length))",
             between(0, kMaxMultiplier));
  schema.add(key("long_mscale"), &rope.long_mscale, "longrope: the same where one may be longer",
             between(0, kMaxMultiplier));
}

void validate_rope(const ModelConfig& config) {
  validate_section(config.of_layer({}), "rope");
  const ModelConfig windows = config.of_layer({.window = true});
  if (config.own_window_rope) {
    validate_section(windows, "window_rope");
  } else if (config.window_head_size > 0) {
    validate_section(windows, "rope");
  }
  if (config.compressed.has_entries()) {
    validate_section(config.of_layer({.compression = Compression::kHeavy}), "compressed_rope");
  } else {
    require(config.compressed_rope == RopeConfig{},
            "[compressed_rope] is of layers with compressed tokens, and there are none; list some "
            "in compressed.sparse_layers or compressed.heavy_layers, or leave it out");
  }
}

}  // namespace tessera
