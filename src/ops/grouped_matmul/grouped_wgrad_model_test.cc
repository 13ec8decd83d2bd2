#include "ops/grouped_matmul/grouped_wgrad_model.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "ops/grouped_matmul/grouped_tile_model.h"

namespace tessera::cuda {
namespace {

constexpr WgradTiles kCooperative{256, false};
constexpr WgradTiles kPingPong{192, true};
constexpr WgradTiles kAddsHere{128, true};

/// Of layers with BF16 experts: FC1 (gate and up) has twice the inner size as its rows.
struct Layer {
  int64_t num_experts;
  int64_t tokens;  // of an expert
  int64_t inner;
  int64_t hidden;
};
constexpr Layer kQwen3{128, 2048, 768, 2048};
constexpr Layer kMixtral{8, 4096, 14336, 4096};
constexpr Layer kFineGrained{128, 2048, 256, 1536};

WgradShape shape_of(const Layer& layer, bool fc1, bool accumulate, bool gathered = false) {
  return {.num_experts = layer.num_experts,
          .tokens = layer.tokens,
          .rows = fc1 ? 2 * layer.inner : layer.inner,
          .columns = layer.hidden,
          .accumulate = accumulate,
          .gathered = gathered};
}

void expect_both(const Layer& layer, bool accumulate, const WgradTiles& tiles) {
  for (const bool fc1 : {true, false}) {
    const WgradTiles chosen = choose_wgrad_tiles(shape_of(layer, fc1, accumulate), kModelClusters);
    EXPECT_EQ(chosen, tiles) << (fc1 ? "FC1, " : "FC2, ") << chosen.columns << " columns";
  }
}

TEST(WgradTiles, MeasuredLayersTakeTheFastest) {
  for (const bool accumulate : {false, true}) {
    expect_both(kQwen3, accumulate, kPingPong);
    expect_both(kFineGrained, accumulate, kPingPong);
  }
  expect_both(kMixtral, false, kCooperative);
  expect_both(kMixtral, true, kPingPong);
}

/// As measured with 128 experts: with few tokens results are the bound, with many the operands.
TEST(WgradTiles, DependOnTheTokensOfAnExpert) {
  Layer layer = kQwen3;
  for (const int64_t tokens : {64, 512, 704}) {
    layer.tokens = tokens;
    expect_both(layer, false, kPingPong);
    expect_both(layer, true, kAddsHere);
  }
  for (const int64_t tokens : {768, 1024, 2560}) {
    layer.tokens = tokens;
    expect_both(layer, false, kPingPong);
    expect_both(layer, true, kPingPong);
  }
  layer.tokens = 4096;
  expect_both(layer, false, kCooperative);
  expect_both(layer, true, kPingPong);
  layer.tokens = 8192;
  expect_both(layer, true, kCooperative);
}

TEST(WgradTiles, GatheredRowsOfLargeLayersTakeTheLargest) {
  for (const Layer& layer : {kQwen3, kMixtral, kFineGrained}) {
    for (const bool fc1 : {true, false}) {
      for (const bool accumulate : {false, true})
        EXPECT_EQ(choose_wgrad_tiles(shape_of(layer, fc1, accumulate, true), kModelClusters),
                  kCooperative);
    }
  }
}

TEST(WgradTiles, ChosenAreCandidates) {
  for (const bool gathered : {false, true}) {
    for (const bool accumulate : {false, true}) {
      const auto candidates = wgrad_candidates(gathered, accumulate);
      for (const int64_t size : {1, 64, 200, 384, 5000}) {
        const WgradShape shape{.num_experts = 3,
                               .tokens = size,
                               .rows = size,
                               .columns = size,
                               .accumulate = accumulate,
                               .gathered = gathered};
        for (const int num_clusters : {1, 66})
          EXPECT_TRUE(std::ranges::count(candidates, choose_wgrad_tiles(shape, num_clusters)) == 1);
      }
    }
  }
}

TEST(WgradTiles, WavesCount) {
  WgradShape shape{.num_experts = 8, .tokens = 512, .rows = 256, .columns = 256};
  const double one = predict_wgrad(shape, kCooperative, 8);
  EXPECT_GT(one, 8 * stage_cycles(256));
  EXPECT_DOUBLE_EQ(predict_wgrad(shape, kCooperative, 66), one);
  EXPECT_DOUBLE_EQ(predict_wgrad(shape, kCooperative, 7), 2 * one);
  EXPECT_DOUBLE_EQ(predict_wgrad(shape, kCooperative, 1), 8 * one);
  shape.rows = 257;
  EXPECT_DOUBLE_EQ(predict_wgrad(shape, kCooperative, 8), 2 * one);
  shape.num_experts = 0;
  EXPECT_EQ(predict_wgrad(shape, kCooperative, 8), 0);
}

TEST(WgradTiles, AddingTakesLongerThanWriting) {
  WgradShape shape{.num_experts = 8, .tokens = 256, .rows = 256, .columns = 768};
  WgradShape added = shape;
  added.accumulate = true;
  for (const WgradTiles& tiles : {kCooperative, kPingPong})
    EXPECT_GT(predict_wgrad(added, tiles, 8), predict_wgrad(shape, tiles, 8));
}

}  // namespace
}  // namespace tessera::cuda
