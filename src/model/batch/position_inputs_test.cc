#include "model/batch/position_inputs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace tessera {
namespace {

using ::testing::ElementsAre;

TEST(PositionInputs, ChunksBeginWithTheirSequences) {
  const std::vector<int32_t> cu_seqlens = {0, 5, 5, 8, 8};
  std::vector<int32_t> bounds(4 + 8 / 2 + 1);
  fill_chunk_bounds(cu_seqlens, 2, bounds);
  EXPECT_THAT(bounds, ElementsAre(0, 2, 4, 5, 7, 8, 8, 8, 8));
  fill_chunk_bounds(cu_seqlens, 100, bounds);
  EXPECT_THAT(bounds, ElementsAre(0, 5, 8, 8, 8, 8, 8, 8, 8));
}

/// The port's size is enough for any sequences.
TEST(PositionInputs, AsManyChunksAsThereMayBe) {
  const ModelConfig config = {.window = 3, .window_kind = WindowKind::kChunked};
  const BatchShape shape = {.num_tokens = 10, .max_sequences = 4};
  const StageGroups groups = single_rank_groups();
  const PortContext context{.config = config, .shape = shape, .groups = groups};
  std::vector<int32_t> bounds(port_type(Port::kChunkBounds, context).shape[0]);
  fill_chunk_bounds(std::vector<int32_t>{0, 1, 2, 6, 10}, 3, bounds);
  EXPECT_THAT(bounds, ElementsAre(0, 1, 2, 5, 6, 9, 10, 10));
}

TEST(PositionInputs, TemperaturesGrowWithPositions) {
  const Temperatures rule(ModelConfig{.temperature_scale = 0.5, .temperature_length = 4});
  for (int32_t position = 0; position < 3; ++position) EXPECT_EQ(rule.at(position), 1.0F);
  for (int32_t position = 3; position < 7; ++position)
    EXPECT_FLOAT_EQ(rule.at(position), 1.0F + 0.5F * std::log(2.0F));
  EXPECT_FLOAT_EQ(rule.at(7), 1.0F + 0.5F * std::log(3.0F));
}

}  // namespace
}  // namespace tessera
