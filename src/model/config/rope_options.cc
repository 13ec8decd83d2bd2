#include "model/config/rope_options.h"

#include "core/error.h"
#include "model/config/limits.h"

namespace tessera {

void add_rope_options(ConfigSchema& schema, RopeConfig& rope) {
  schema.add("rope.base", &rope.base, "Base of the rotary embedding", above(1));
  schema.add("rope.fraction", &rope.fraction,
             "Share of a head that is rotated, its first elements; 0: nothing is, and attention "
             "sees no positions",
             between(0, 1));
  schema.add("rope.interleaved", &rope.interleaved,
             "Rotate neighbouring elements as pairs, not the two halves");
  schema.add_enum("rope.scaling", &rope.scaling,
                  {{"none", RopeScaling::kNone},
                   {"linear", RopeScaling::kLinear},
                   {"dynamic", RopeScaling::kDynamic},
                   {"yarn", RopeScaling::kYarn},
                   {"llama3", RopeScaling::kLlama3}},
                  "How the rotation is stretched to longer contexts");
  schema.add("rope.factor", &rope.factor, "By how much it is stretched", at_least(1));
  schema.add("rope.max_length", &rope.max_length,
             "dynamic: sequences beyond this length change the base", between(0, kMaxLength));
  schema.add("rope.original_length", &rope.original_length,
             "yarn, llama3: context that the model was trained for first", between(0, kMaxLength));
  schema.add("rope.beta_fast", &rope.beta_fast,
             "yarn: frequencies with more turns in that context stay", above(0));
  schema.add("rope.beta_slow", &rope.beta_slow,
             "yarn: frequencies with fewer turns are divided by the factor", above(0));
  schema.add("rope.truncate", &rope.truncate, "yarn: whole indices as borders of the ramp");
  schema.add("rope.attention_factor", &rope.attention_factor,
             "yarn: amplitude of rotated elements; 0: 0.1 ln(factor) + 1, or by mscale",
             at_least(0));
  schema.add("rope.mscale", &rope.mscale, "yarn: DeepSeek's mscale; 0: none", at_least(0));
  schema.add("rope.mscale_all_dims", &rope.mscale_all_dims,
             "yarn: DeepSeek's mscale_all_dim; 0: none", at_least(0));
  schema.add("rope.low_frequency_factor", &rope.low_frequency_factor,
             "llama3: original context over the longest wavelength that is interpolated", above(0));
  schema.add("rope.high_frequency_factor", &rope.high_frequency_factor,
             "llama3: original context over the shortest wavelength that is interpolated",
             above(0));
}

void validate_rope(const ModelConfig& config) {
  const RopeConfig& rope = config.rope;
  const int64_t size = config.rotary_dim();
  if (rope.fraction == 0 && !config.is_latent()) {
    require(rope.scaling == RopeScaling::kNone,
            "rope.scaling stretches the rotation, which rope.fraction 0 takes away; leave it out");
    return;
  }
  require(size > 0 && size % 2 == 0,
          "{} elements of a head are rotated, and the rotary embedding turns pairs; make that an "
          "even number above 0",
          size);
  const auto needs = [&](RopeScaling scaling, const char* name, int64_t value, const char* key) {
    require(rope.scaling != scaling || value > 0, "rope.scaling = \"{}\" needs {} above 0", name,
            key);
  };
  needs(RopeScaling::kDynamic, "dynamic", rope.max_length, "rope.max_length");
  needs(RopeScaling::kYarn, "yarn", rope.original_length, "rope.original_length");
  needs(RopeScaling::kLlama3, "llama3", rope.original_length, "rope.original_length");
  require(rope.scaling != RopeScaling::kDynamic || size > 2,
          "rope.scaling = \"dynamic\" needs more than 2 rotated elements a head");
  require(rope.scaling != RopeScaling::kLlama3 ||
              rope.high_frequency_factor > rope.low_frequency_factor,
          "rope.high_frequency_factor {} must be above rope.low_frequency_factor {}",
          rope.high_frequency_factor, rope.low_frequency_factor);
}

}  // namespace tessera
