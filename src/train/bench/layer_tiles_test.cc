#include "train/bench/layer_tiles.h"

#include <gmock/gmock.h>

#include <numeric>

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Eight experts of 96, gated, for 600 assignments.
Settings small_settings() {
  Settings settings;
  settings.train.precision = Precision::kBF16;
  settings.model.vocab_size = 64;
  settings.model.hidden_size = 64;
  settings.model.num_layers = 2;
  settings.model.num_heads = 2;
  settings.model.moe = {.num_experts = 8, .top_k = 2, .inner_size = 96};
  settings.data.sequence_length = 100;
  settings.train.micro_batch = 3;
  return settings;
}

std::string find_error(const Settings& settings) {
  try {
    predict_layer_tiles(settings);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(LayerTiles, AreThoseOfTheFourProducts) {
  Settings settings = small_settings();
  settings.model.moe.first_dense_layers = 1;
  const LayerTiles tiles = predict_layer_tiles(settings);
  EXPECT_EQ(tiles.tokens, 300);
  EXPECT_THAT(tiles.rows_of, Each(75));
  std::vector<std::string> names;
  for (const ProductTiles& product : tiles.products) {
    names.push_back(product.name);
    const bool first = product.name.starts_with("FC1");
    const int64_t size = first ? 192 : 96;  // gate and up
    EXPECT_EQ(product.expert_sizes, fmt::format("8x{}", size));
    EXPECT_EQ(product.width, 64);
    EXPECT_EQ(product.by_rows, first != product.name.ends_with("gradient"));
    EXPECT_EQ(product.flops, 2.0 * 600 * static_cast<double>(size) * 64);
    ASSERT_EQ(product.choices.size(), cuda::kTileHeights.size());
    const ProductTiles::Choice& taken = product.choices[0];
    EXPECT_EQ(taken.max_rows, cuda::kGroupedMaxRows);
    EXPECT_EQ(taken.tiles.num_tiles, 8);  // 256 features each
    EXPECT_EQ(taken.tiles.tallest, 96);
    const double features = product.by_rows ? static_cast<double>(size) : 64;
    EXPECT_DOUBLE_EQ(taken.tiles.padding, 1 - 75 * features / (96 * 256));
    EXPECT_GT(taken.seconds, 1e-6);
    ASSERT_EQ(product.gathered.has_value(), product.by_rows);
    if (product.by_rows) {
      EXPECT_EQ(product.gathered->tiles.tallest, 128);  // halves of 40 and 35, 64 columns each
      EXPECT_GT(product.gathered->seconds, taken.seconds);
    }
    EXPECT_EQ(product.choices.back().max_rows, 64);
    EXPECT_EQ(product.choices.back().tiles.num_tiles, 16);
  }
  EXPECT_THAT(names, ElementsAre("FC1", "FC2", "FC2 data gradient", "FC1 data gradient"));
}

TEST(LayerTiles, RowsAreBalancedAndWithinTheCapacity) {
  Settings settings = small_settings();
  MoeConfig& moe = settings.model.moe;
  settings.data.sequence_length = 101;
  const auto rows_of = [&] { return predict_layer_tiles(settings).rows_of; };
  EXPECT_THAT(rows_of(), ElementsAre(76, 76, 76, 76, 76, 76, 75, 75));
  moe.capacity_factor = 0.5;  // of 75.75
  EXPECT_THAT(rows_of(), Each(38));
  moe.capacity_group_size = 2;
  EXPECT_THAT(rows_of(), Each(38));
  moe.capacity_group_size = 1;
  moe.capacity_factor = 1.5;
  const std::vector<int64_t> rows = rows_of();
  EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), int64_t{0}), 606);
  moe.pad_to_capacity = true;
  EXPECT_THAT(rows_of(), Each(114));
}

TEST(LayerTiles, ExpertsThatTheKernelsDoNotTakeHaveNone) {
  Settings settings = small_settings();
  settings.model.moe.inner_size = 100;  // FC1's 200 are a multiple of 8
  for (const ProductTiles& product : predict_layer_tiles(settings).products)
    EXPECT_EQ(product.choices.empty(), product.name.starts_with("FC2")) << product.name;
  settings.model.moe.num_experts = 1024;
  for (const ProductTiles& product : predict_layer_tiles(settings).products)
    EXPECT_THAT(product.choices, IsEmpty()) << product.name;
  settings = small_settings();
  settings.model.moe.num_experts = 2;
  settings.model.moe.inner_sizes = {72, 144};  // 72 ends within a stage of a reduction
  for (const ProductTiles& product : predict_layer_tiles(settings).products)
    EXPECT_EQ(product.choices.empty(), !product.by_rows) << product.name;
}

TEST(LayerTiles, WhatHasNoneIsRefused) {
  Settings settings = small_settings();
  settings.run.device = DeviceChoice::kCpu;
  EXPECT_THAT(find_error(settings), HasSubstr("run.device"));
  settings = small_settings();
  settings.train.precision = Precision::kF32;
  EXPECT_THAT(find_error(settings), HasSubstr("train.precision = \"bf16\""));
  settings = small_settings();
  settings.model.moe.experts = ExpertPath::kBlockSparse;
  EXPECT_THAT(find_error(settings), HasSubstr("moe.experts = \"grouped\""));
  settings = small_settings();
  settings.model.moe.first_dense_layers = 2;
  EXPECT_THAT(find_error(settings), HasSubstr("none of the model's 2 layers"));
}

}  // namespace
}  // namespace tessera
