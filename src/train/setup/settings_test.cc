#include "train/setup/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Settings, NumbersOfLayersAreRefusedWhereAllWeightsAreSpread) {
  Settings settings;
  settings.data.tokens = "tokens";
  settings.schedule.num_steps = settings.train.steps;
  settings.shard.scope = ShardScope::kFull;
  EXPECT_NO_THROW(validate(settings));
  settings.model.layer_scalars = true;
  EXPECT_THAT([&] { validate(settings); },
              ThrowsMessage<UserError>(HasSubstr("model.layer_scalars are not trained")));
  settings.shard.scope = ShardScope::kState;
  EXPECT_NO_THROW(validate(settings));
}

TEST(Settings, IndexersAreNeitherSpreadNorClipped) {
  Settings settings;
  settings.data.tokens = "tokens";
  settings.schedule.num_steps = settings.train.steps;
  settings.model.index.top_k = 16;
  EXPECT_NO_THROW(validate(settings));
  settings.qk_clip = 100;
  EXPECT_THAT([&] { validate(settings); },
              ThrowsMessage<UserError>(HasSubstr("tokens see some keys alone")));
  settings.qk_clip = 0;
  settings.shard.scope = ShardScope::kFull;
  EXPECT_THAT([&] { validate(settings); },
              ThrowsMessage<UserError>(HasSubstr("whose indexer is not trained")));
}

TEST(Settings, CompressedAttentionIsNotClipped) {
  Settings settings;
  settings.data.tokens = "tokens";
  settings.schedule.num_steps = settings.train.steps;
  settings.model.attention = AttentionKind::kCompressed;
  settings.qk_clip = 100;
  EXPECT_THAT([&] { validate(settings); },
              ThrowsMessage<UserError>(HasSubstr("whose queries and keys are normed behind them")));
  settings.qk_clip = 0;
  EXPECT_NO_THROW(validate(settings));
}

}  // namespace
}  // namespace tessera
