#include "ops/grouped_matmul/grouped_tile_model.h"

#include <gtest/gtest.h>

#include <vector>

namespace tessera::cuda {
namespace {

TilePrediction predict(const std::vector<int64_t>& rows_of, int64_t features, int num_clusters,
                       int max_rows = kGroupedMaxRows) {
  std::vector<TiledExpert> experts;
  for (const int64_t rows : rows_of)
    experts.push_back({.rows = rows, .features = features, .reduction = 1000});
  return predict_tiles(experts, max_rows, num_clusters);
}

TEST(GroupedTiles, CoverAllRowsAndNoneIsEmpty) {
  for (const int max_rows : {32, 96, 128, 136, 256}) {
    for (int rows = 1; rows < 5000; ++rows) {
      const int num_tiles = num_row_tiles(rows, max_rows);
      const int height = tile_rows(rows, num_tiles);
      ASSERT_LE(height, max_rows) << rows;
      ASSERT_GE(num_tiles * height, rows) << "of at most " << max_rows;
      ASSERT_LT((num_tiles - 1) * height, rows) << "of at most " << max_rows;
    }
  }
  EXPECT_EQ(num_row_tiles(0), 0);
}

TEST(GroupedTiles, ColumnsAreThoseThatProductsHave) {
  for (int rows = 1; rows <= kGroupedMaxRows; ++rows) {
    const int columns = product_columns(rows);
    ASSERT_GE(columns, rows);
    ASSERT_LE(columns, kGroupedMaxRows);
    ASSERT_EQ(columns % (columns <= 128 ? 32 : 8), 0);
  }
}

/// What the second block has is no more than the first's.
TEST(GroupedTiles, HalvesOfGatheredRowsAreInTheirColumns) {
  for (int rows = 1; rows <= kGroupedMaxRows; ++rows) {
    const int first = first_half_rows(rows);
    ASSERT_GE(2 * first, rows);
    ASSERT_LT(2 * first, rows + 16);
    ASSERT_EQ(first % 8, 0);
    const int columns = gathered_columns(rows);
    ASSERT_GE(columns, 2 * first);
    ASSERT_LE(columns, kGroupedMaxRows);
    ASSERT_EQ(columns % (columns <= 192 ? 64 : 16), 0);
  }
}

TEST(GroupedTiles, GatheredTilesArePaddedByHalves) {
  const auto padding = [](int64_t rows, bool gathered) {
    const TiledExpert expert{.rows = rows, .features = 256, .reduction = 64};
    return predict_tiles({&expert, 1}, kGroupedMaxRows, 1, gathered).padding;
  };
  for (const int64_t rows : {64, 128, 192, 224, 240, 256}) EXPECT_EQ(padding(rows, true), 0);
  EXPECT_DOUBLE_EQ(padding(136, true), 1 - 136.0 / 192);
  EXPECT_EQ(padding(136, false), 0);
}

TEST(GroupedTiles, NothingTakesNoTime) {
  for (const std::vector<int64_t>& rows_of : {std::vector<int64_t>{}, {0, 0}}) {
    const TilePrediction none = predict(rows_of, 512, 4);
    EXPECT_EQ(none.num_tiles, 0);
    EXPECT_EQ(none.cycles, 0);
    EXPECT_EQ(none.padding, 0);
    EXPECT_EQ(none.idle, 0);
  }
}

TEST(GroupedTiles, ClustersShareTiles) {
  const TilePrediction one = predict({256}, 256, 1);
  EXPECT_EQ(one.num_tiles, 1);
  EXPECT_EQ(one.padding, 0);
  EXPECT_EQ(one.idle, 0);
  const TilePrediction three = predict({256, 0, 512}, 256, 2);
  EXPECT_EQ(three.num_tiles, 3);
  EXPECT_DOUBLE_EQ(three.cycles, 2 * one.cycles);
  EXPECT_DOUBLE_EQ(three.idle, 0.25);
  EXPECT_DOUBLE_EQ(predict({256, 0, 512}, 512, 6).cycles, one.cycles);
}

TEST(GroupedTiles, PaddingCountsRowsAndFeatures) {
  EXPECT_DOUBLE_EQ(predict({1}, 256, 1).padding, 1 - 1.0 / 32);
  EXPECT_DOUBLE_EQ(predict({256}, 128, 1).padding, 0.5);
}

TEST(GroupedTiles, ExpertsMayDifferInSize) {
  const std::vector<TiledExpert> experts = {{.rows = 64, .features = 512, .reduction = 640},
                                            {.rows = 200, .features = 256, .reduction = 64}};
  const TilePrediction both = predict_tiles(experts, kGroupedMaxRows, 1);
  EXPECT_EQ(both.num_tiles, 3);
  EXPECT_EQ(both.tallest, 200);
  EXPECT_EQ(both.padding, 0);
  const auto alone = [&](size_t expert) {
    return predict_tiles(std::span(experts).subspan(expert, 1), kGroupedMaxRows, 1).cycles;
  };
  EXPECT_DOUBLE_EQ(both.cycles, alone(0) + alone(1));
  EXPECT_GT(alone(0), 2 * alone(1)) << "two tiles of ten times the reduction";
}

TEST(GroupedTiles, SmallerTilesCostMoreWhereThereAreMany) {
  const std::vector<int64_t> rows_of(128, 2048);
  EXPECT_LT(predict(rows_of, 1536, 66).cycles, predict(rows_of, 1536, 66, 192).cycles);
}

}  // namespace
}  // namespace tessera::cuda
