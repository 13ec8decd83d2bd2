#include "train/memory/layer_options.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <set>

#include "ops/registry/cpu_kernels.h"
#include "train/state/model_state.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

class Options : public ::testing::Test {
 protected:
  static Settings make_settings() {
    Settings settings = without_data({});
    settings.model.vocab_size = 64;
    settings.model.hidden_size = 32;
    settings.model.num_layers = 3;
    settings.model.moe = {.num_experts = 4, .top_k = 2, .inner_size = 48};
    settings.model.moe.first_dense_layers = 1;
    settings.data.sequence_length = 40;
    return settings;
  }

  LayerProgramKey key(int64_t layer) const { return trial_.programs().key_of(layer); }

  const Settings settings_ = make_settings();
  const PlannedRank rank_ = plan_rank(settings_, 0, 1, make_cpu_kernels(), batch_shape(settings_));
  const PolicyTrial trial_{settings_, rank_, {}};
};

TEST_F(Options, NamesAreThoseThatMayRunTwice) {
  std::set<std::string> names;
  for (const auto& group : find_droppable(trial_, key(1))) names.insert(group.begin(), group.end());
  for (const char* name : {"attn_norm", "expert_pre", "expert_act", "attn_out"})
    EXPECT_TRUE(names.contains(name)) << name;
  EXPECT_FALSE(names.contains("expert_idx")) << "routing decisions";
  EXPECT_FALSE(names.contains("attn_norm.rstd")) << "a 32nd of its node's bytes";
  LayerProgramKey offloading = key(1);
  offloading.offloaded = {"expert_pre"};
  for (const auto& group : find_droppable(trial_, offloading))
    EXPECT_THAT(group, ::testing::Not(::testing::Contains("expert_pre")));
}

/// What is listed is what the compiler makes of it, and nothing beats another.
TEST_F(Options, AreThoseThatNothingBeats) {
  for (const int64_t layer : {0, 1}) {
    const std::vector<LayerOption> options = find_layer_options(trial_, key(layer));
    ASSERT_GT(options.size(), 3);
    EXPECT_TRUE(options[0].names.empty());
    for (size_t i = 0; i < options.size(); ++i) {
      LayerProgramKey own = key(layer);
      own.recomputed = options[i].names;
      const LayerCost cost = trial_.judge_layer(own);
      EXPECT_EQ(cost.bytes, options[i].cost.bytes);
      EXPECT_EQ(cost.seconds, options[i].cost.seconds);
      for (size_t j = 1; j < options.size(); ++j) {
        const LayerCost& other = options[j].cost;
        const bool beats = other.bytes < cost.bytes && other.transient < cost.transient &&
                           other.seconds < cost.seconds;
        EXPECT_FALSE(beats) << i << " " << j;
      }
    }
    LayerProgramKey all = key(layer);
    all.recomputed = {"all"};
    const auto least =
        std::ranges::min(options, {}, [](const LayerOption& option) { return option.cost.bytes; });
    EXPECT_LE(least.cost.bytes, trial_.judge_layer(all).bytes);
  }
}

TEST_F(Options, AreTakenByPriceWithinALimit) {
  const std::vector<LayerOption> options = find_layer_options(trial_, key(1));
  std::set<int64_t> limits = {INT64_MAX};
  for (const LayerOption& option : options) limits.insert(option.cost.transient);
  for (const int64_t limit : limits) {
    const std::vector<size_t> order = order_options(options, limit);
    if (options[0].cost.transient > limit) {
      EXPECT_TRUE(order.empty());
      continue;
    }
    ASSERT_EQ(order.front(), 0);
    double price = 0;
    for (size_t i = 1; i < order.size(); ++i) {
      const LayerCost& from = options[order[i - 1]].cost;
      const LayerCost& to = options[order[i]].cost;
      EXPECT_LE(to.transient, limit);
      EXPECT_LT(to.bytes, from.bytes);
      const double own = (to.seconds - from.seconds) / static_cast<double>(from.bytes - to.bytes);
      EXPECT_GE(own, price * (1 - 1e-9)) << "the cheapest first";
      price = own;
    }
  }
}

}  // namespace
}  // namespace tessera
