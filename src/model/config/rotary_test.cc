#include "model/config/rotary.h"

#include <gtest/gtest.h>

#include <cmath>

namespace tessera {
namespace {

/// Frequencies of heads of 16 and amplitudes as transformers 5.17 computes them
/// (modeling_rope_utils.py).
struct Case {
  const char* name;
  RopeConfig rope;
  int64_t sequence_length;
  std::vector<float> frequencies;
  double amplitude;
};

/// 64 tokens of 256.
RopeConfig long_rope(double short_mscale, double long_mscale) {
  return {.scaling = RopeScaling::kLongRope,
          .factor = 4,
          .original_length = 64,
          .short_factors = {1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0},
          .long_factors = {1.1, 1.5, 2.25, 4.0, 7.5, 12.0, 20.0, 31.0},
          .short_mscale = short_mscale,
          .long_mscale = long_mscale};
}

std::vector<Case> cases() {
  return {
      {"linear",
       {.scaling = RopeScaling::kLinear, .factor = 4},
       64,
       {0.25F, 0.079056941F, 0.0250000004F, 0.00790569466F, 0.00249999994F, 0.000790569466F,
        0.000250000012F, 7.90569466e-05F},
       1},
      {"dynamic within",
       {.scaling = RopeScaling::kDynamic, .factor = 4, .max_length = 128},
       100,
       {1.0F, 0.316227764F, 0.100000001F, 0.0316227786F, 0.00999999978F, 0.00316227786F,
        0.00100000005F, 0.000316227786F},
       1},
      {"dynamic beyond",
       {.scaling = RopeScaling::kDynamic, .factor = 4, .max_length = 128},
       300,
       {1.0F, 0.242702499F, 0.05890451F, 0.0142962709F, 0.00346974074F, 0.000842114794F,
        0.000204383367F, 4.96043576e-05F},
       1},
      {"yarn",
       {.scaling = RopeScaling::kYarn, .factor = 4, .original_length = 32},
       64,
       {1.0F, 0.197642356F, 0.0250000004F, 0.00790569466F, 0.00249999994F, 0.000790569466F,
        0.000250000012F, 7.90569466e-05F},
       1.13862944},
      {"yarn with mscale",
       {.scaling = RopeScaling::kYarn,
        .factor = 40,
        .original_length = 64,
        .beta_fast = 16,
        .beta_slow = 2,
        .truncate = false,
        .mscale = 1.0,
        .mscale_all_dims = 0.7},
       64,
       {1.0F, 0.0981689841F, 0.00249999994F, 0.000790569466F, 0.000250000012F, 7.90569466e-05F,
        2.49999994e-05F, 7.90569447e-06F},
       1.08795461},
      {"yarn with a given factor",
       {.base = 1e6,
        .scaling = RopeScaling::kYarn,
        .factor = 8,
        .original_length = 4096,
        .attention_factor = 0.5},
       64,
       {1.0F, 0.177827939F, 0.0223994683F, 0.00234308885F, 0.000125000006F, 2.22284925e-05F,
        3.95284678e-06F, 7.02926684e-07F},
       0.5},
      {"llama3",
       {.scaling = RopeScaling::kLlama3,
        .factor = 8,
        .original_length = 64,
        .low_frequency_factor = 1,
        .high_frequency_factor = 4},
       64,
       {1.0F, 0.244384587F, 0.0130422562F, 0.00395284733F, 0.00124999997F, 0.000395284733F,
        0.000125000006F, 3.95284733e-05F},
       1},
      {"longrope within",
       long_rope(1.25, 0),
       64,
       {1.0F, 0.301169306F, 0.0909090936F, 0.0252982229F, 0.00666666683F, 0.00158113893F,
        0.00039999999F, 0.000105409257F},
       1.25},
      {"longrope beyond",
       long_rope(1.25, 0),
       65,
       {0.909090877F, 0.210818499F, 0.0444444455F, 0.00790569466F, 0.00133333332F, 0.000263523165F,
        4.99999987e-05F, 1.02008962e-05F},
       1.1547005383792517},
  };
}

TEST(Rotary, AgreesWithTransformers) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const auto found = inverse_frequencies(c.rope, 16, c.sequence_length);
    ASSERT_EQ(found.size(), c.frequencies.size());
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_NEAR(found[i] / c.frequencies[i], 1.0, 1e-6) << "pair " << i;
    EXPECT_NEAR(rotary_amplitude(c.rope, c.sequence_length), c.amplitude, 1e-8);
  }
}

TEST(Rotary, ProportionalPairsAreOfWholeHeads) {
  const RopeConfig rope = {.base = 500,
                           .fraction = 0.3,
                           .proportional = true,
                           .scaling = RopeScaling::kLinear,
                           .factor = 2};
  const auto whole = default_inverse_frequencies(16, 500);
  const auto found = inverse_frequencies(rope, 16, 64);
  ASSERT_EQ(found.size(), whole.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_EQ(found[i], i < 2 ? whole[i] / 2 : 0) << i;
  ModelConfig config;
  config.head_size = 16;
  config.rope = rope;
  EXPECT_EQ(config.rotary_dim(), 16);
  config.rope.fraction = 0;
  EXPECT_EQ(config.rotary_dim(), 0);
}

TEST(Rotary, LatentAttentionScalesItsScoresByMscale) {
  ModelConfig config;
  config.attention = AttentionKind::kLatent;
  config.latent = {.nope_size = 128, .rope_size = 64};
  EXPECT_EQ(config.attention_scale(), 0);
  config.rope.scaling = RopeScaling::kYarn;
  config.rope.factor = 40;
  config.rope.mscale_all_dims = 1;
  const double scale = 0.1 * std::log(40.0) + 1;
  EXPECT_NEAR(config.attention_scale(), scale * scale / std::sqrt(192.0), 1e-12);
  config.attention_multiplier = 0.25;
  EXPECT_NEAR(config.attention_scale(), scale * scale * 0.25, 1e-12);
  config.attention = AttentionKind::kStandard;
  EXPECT_EQ(config.attention_scale(), 0.25);
  config.attention_multiplier = 0;
  EXPECT_EQ(config.attention_scale(), 0);
}

}  // namespace
}  // namespace tessera
