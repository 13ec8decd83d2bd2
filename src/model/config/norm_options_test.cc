#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "model/config/config_testing.h"
#include "model/run/model_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

template <typename Change>
void expect_refused_of_norms(Change change, const char* message) {
  ModelConfig config = testing::tiny_config();
  change(config);
  EXPECT_THAT([&] { validate(config); }, ThrowsMessage<UserError>(HasSubstr(message)));
}

ModelConfig mixing_config() {
  ModelConfig config = testing::tiny_config();
  config.moe.sparse_mixer = 0.1;
  config.moe.normalize_top_k = false;
  return config;
}

TEST(NormOptions, BiasesAreCounted) {
  ModelConfig config = testing::tiny_config();
  const auto expect_more = [&](const ModelConfig& changed, int64_t more) {
    validate(changed);
    EXPECT_EQ(count_parameters(changed).total, testing::count_listed(changed));
    EXPECT_EQ(count_parameters(changed).total - count_parameters(config).total, more);
  };
  ModelConfig changed = config;
  changed.norm = NormKind::kLayer;
  expect_more(changed, (2 * config.num_layers + 1) * config.hidden_size);
  changed.head_bias = true;
  expect_more(changed, (2 * config.num_layers + 1) * config.hidden_size + config.vocab_size);
  config.moe.shared_inner_size = 8;
  config.moe.separate_norms = config.post_norms = true;
  config.mtp_layers = 1;
  changed = config;
  changed.norm = NormKind::kLayer;
  expect_more(changed, (7 * config.all_layers() + 1 + 3) * config.hidden_size);
}

TEST(NormOptions, RefusesWhatDoesNotGoTogether) {
  expect_refused_of_norms(
      [](ModelConfig& c) {
        c.norm = NormKind::kLayer;
        c.mtp_layers = 1;
        c.mtp_normed = true;
      },
      "model.norm is \"layer\"");
  expect_refused_of_norms(
      [](ModelConfig& c) {
        c.head_bias = true;
        c.mtp_layers = 2;
      },
      "model.mtp_layers 2 have heads");
  expect_refused_of_norms([](ModelConfig& c) { c.norm_after_rotation = true; },
                          "model.qk_norm is \"none\"");
}

TEST(SparseMixerOptions, RefusesOtherProbabilitiesAndChoices) {
  validate(mixing_config());
  expect_refused_of_norms([](ModelConfig& c) { c.moe.draw_experts = true; },
                          "moe.sparse_mixer, which is 0");
  const auto expect_refused = [](void (*change)(MoeConfig&), const char* message) {
    expect_refused_of_norms(
        [&](ModelConfig& c) {
          c = mixing_config();
          change(c.moe);
        },
        message);
  };
  expect_refused([](MoeConfig& m) { m.score = ScoreFunction::kSigmoid; },
                 "moe.sparse_mixer with moe.score");
  expect_refused([](MoeConfig& m) { m.score_order = ScoreOrder::kAfterTopK; }, "moe.score_order");
  expect_refused([](MoeConfig& m) { m.normalize_top_k = true; }, "set moe.normalize_top_k = false");
  expect_refused([](MoeConfig& m) { m.score_scale = 2; }, "moe.sparse_mixer with moe.score_scale");
  expect_refused([](MoeConfig& m) { m.routing = Routing::kExpertChoice; },
                 "moe.sparse_mixer with moe.routing");
  expect_refused([](MoeConfig& m) { m.routing = Routing::kSinkhorn; },
                 "moe.sparse_mixer with moe.routing");
  expect_refused([](MoeConfig& m) { m.bias_update_speed = 0.1; },
                 "moe.sparse_mixer with moe.expert_bias");
  expect_refused(
      [](MoeConfig& m) {
        m.num_groups = 2;
        m.top_groups = 1;
      },
      "moe.sparse_mixer with moe.top_groups");
  expect_refused([](MoeConfig& m) { m.top_p = 0.5; }, "moe.sparse_mixer with moe.top_p");
  expect_refused([](MoeConfig& m) { m.hash_layers = {0}; },
                 "moe.sparse_mixer with moe.hash_layers");
}

TEST(LongRopeOptions, RefusesFactorsThatAreNotOfEveryPair) {
  const auto expect_refused = [](void (*change)(RopeConfig&), const char* message) {
    expect_refused_of_norms(
        [&](ModelConfig& c) {
          c.rope.scaling = RopeScaling::kLongRope;
          c.rope.original_length = 8;
          c.rope.short_factors = c.rope.long_factors = std::vector<double>(c.rotary_dim() / 2, 1.5);
          validate(c);
          change(c.rope);
        },
        message);
  };
  expect_refused([](RopeConfig& r) { r.original_length = 1; }, "rope.original_length above 1");
  expect_refused([](RopeConfig& r) { r.short_factors.pop_back(); }, "rope.short_factors of");
  expect_refused([](RopeConfig& r) { r.long_factors.clear(); }, "it has 0");
}

}  // namespace
}  // namespace tessera
