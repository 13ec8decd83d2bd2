#include "model/mixers/attention_blocks.h"

#include <gtest/gtest.h>

#include "comm/planned_world.h"
#include "model/layers/layer_program.h"
#include "model/run/model_testing.h"
#include "ops/rope/rope.h"

namespace tessera {
namespace {

/// By the names of what they give.
using Rotations = std::vector<std::vector<std::string>>;

Rotations rotations(const ModelConfig& config, const StageGroups& groups,
                    std::optional<CacheShape> cache = std::nullopt) {
  const ModelProgram layer = build_layer(config, {}, testing::tiny_shape(2, 4), groups, cache);
  Rotations results;
  for (const Node& node : layer.forward.nodes()) {
    if (dynamic_cast<const Rope*>(node.op.get()) == nullptr) continue;
    std::vector<std::string>& names = results.emplace_back();
    for (const ValueId id : node.outputs) names.push_back(layer.forward.value(id).name);
  }
  return results;
}

TEST(AttentionBlocks, OneOperatorRotatesQueriesAndKeys) {
  const Rotations both = {{"q_rotated", "k_rotated"}};
  EXPECT_EQ(rotations(testing::tiny_config(), single_rank_groups()), both);
  EXPECT_EQ(rotations(testing::tiny_config(), single_rank_groups(), CacheShape{8}), both);
}

TEST(AttentionBlocks, QueriesRotateAloneWhereTheyAreSentAway) {
  StageGroups groups = single_rank_groups();
  groups.heads = make_planned_world(0, 2)->make_world_group();
  EXPECT_EQ(rotations(testing::tiny_config(), groups), (Rotations{{"q_rotated"}, {"k_rotated"}}));
}

TEST(AttentionBlocks, PartsOfLatentHeadsRotateAlone) {
  ModelConfig config = testing::tiny_config();
  config.attention = AttentionKind::kLatent;
  config.num_kv_heads = 0;
  config.head_size = 0;
  config.latent = {.kv_rank = 6, .nope_size = 4, .rope_size = 2, .value_size = 5};
  EXPECT_EQ(rotations(config, single_rank_groups()), (Rotations{{"q_rotated"}, {"k_rotated"}}));
}

}  // namespace
}  // namespace tessera
