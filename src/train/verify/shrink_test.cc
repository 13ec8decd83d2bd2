#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include "core/testing/case_share.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

Settings settings_of(const Preset& preset) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  schema.load_preset(preset.name, preset.toml);
  settings.data.sequence_length = 64;
  settings.train.micro_batch = 1;
  settings.train.global_batch = 4;
  return settings;
}

/// Mixers, and layers that lack a part.
using Kinds = std::set<std::tuple<bool, bool, bool, bool, bool>>;

Kinds kinds_of(const ModelConfig& model) {
  Kinds kinds;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const LayerKind kind = model.layer_kind(layer);
    kinds.insert({kind.delta, kind.mamba, kind.conv, kind.no_mixer, kind.no_mlp});
  }
  return kinds;
}

TEST(Shrink, KeepsEveryPresetsKindsOfLayers) {
  for (const Preset& preset : presets()) {
    SCOPED_TRACE(preset.name);
    const Settings settings = settings_of(preset);
    const Settings small = shrink_for_verification(settings, 1);
    EXPECT_NO_THROW(validate(small.model));
    EXPECT_EQ(kinds_of(small.model), kinds_of(settings.model));
    if (!settings.model.has_states()) continue;
    EXPECT_LE(small.model.num_layers, 8);
    EXPECT_LE(count_parameters(small.model).total, 3'000'000);
  }
}

/// Models whose layers hand a state from token to token, over ranks that share sequences.
TEST(Shrink, HybridsAgreeWithOneRankOverSharedSequences) {
  std::vector<Preset> hybrids;
  for (const Preset& preset : presets())
    if (settings_of(preset).model.has_states()) hybrids.push_back(preset);
  EXPECT_GE(hybrids.size(), 6);
  for (const Preset& preset : testing::few_of_cases(hybrids)) {
    SCOPED_TRACE(preset.name);
    Settings settings = settings_of(preset);
    settings.parallel.layout.cp = 4;
    settings.parallel.context = ContextExchange::kHierarchical;
    settings.parallel.context_inner = 2;
    const Verification result =
        verify_layout({.settings = shrink_for_verification(settings, 4), .num_ranks = 4});
    EXPECT_TRUE(result.agrees()) << describe(result, true);
  }
}

}  // namespace
}  // namespace tessera
