#include "ops/block_sparse/topology.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "core/error.h"
#include "core/random.h"
#include "ops/block_sparse/block_topology.h"
#include "ops/block_sparse/stripes.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<uint8_t> random_mask(int64_t rows, int64_t cols, double density, Random& random) {
  std::vector<uint8_t> mask(rows * cols);
  for (uint8_t& there : mask) there = random.next_uniform() < density ? 1 : 0;
  return mask;
}

/// The mask that a topology stands for, read by rows, with each block's place in CSR order + 1.
std::vector<int> blocks_by_rows(const TopologyView& topology) {
  std::vector<int> places(topology.num_block_rows() * topology.num_block_cols(), 0);
  for (int64_t row = 0; row < topology.num_block_rows(); ++row) {
    for (int64_t i = 0; i < topology.row_width(row); ++i) {
      const size_t block = topology.row_offsets[row] + i;
      EXPECT_EQ(topology.row_indices[block], row);
      const int64_t at = row * topology.num_block_cols() + topology.col_indices[block];
      places[at] = static_cast<int>(block) + 1;
    }
  }
  return places;
}

/// The same read by columns, through the transpose indices.
std::vector<int> blocks_by_cols(const TopologyView& topology) {
  std::vector<int> places(topology.num_block_rows() * topology.num_block_cols(), 0);
  for (int64_t col = 0; col < topology.num_block_cols(); ++col) {
    const size_t start = topology.col_offsets[col];
    const size_t end = topology.col_offsets[col + 1];
    for (size_t i = start; i < end; ++i) {
      const size_t block = topology.transpose_indices[i];
      EXPECT_EQ(topology.col_indices[block], col);
      const int64_t at = topology.row_indices[block] * topology.num_block_cols() + col;
      places[at] = static_cast<int>(block) + 1;
    }
  }
  return places;
}

/// Marks every block that the stripes of a walk cover with its element offset in storage + 1, and
/// expects each block to be covered once.
std::vector<int64_t> offsets_by_stripes(const TopologyView& topology, WalkOrder order) {
  const int64_t cols = topology.num_block_cols();
  std::vector<int64_t> offsets(topology.num_block_rows() * cols, 0);
  const bool rows_first = order == WalkOrder::kRows;
  const auto mark = [&](const Stripe& stripe, const Rectangle& rectangle, int64_t a, int64_t b) {
    const int64_t down = rows_first ? a - stripe.first : b - rectangle.cross_first;
    const int64_t right = rows_first ? b - rectangle.cross_first : a - stripe.first;
    int64_t& offset = offsets[rows_first ? a * cols + b : b * cols + a];
    EXPECT_EQ(offset, 0) << "covered twice";
    offset = rectangle.offset + (down * rectangle.ld + right) * topology.block_size + 1;
  };
  for_each_stripe(topology, order, [&](const Stripe& stripe) {
    for_each_rectangle(topology, stripe, [&](const Rectangle& rectangle) {
      for (int64_t a = stripe.first; a < stripe.last; ++a) {
        for (int64_t b = rectangle.cross_first; b < rectangle.cross_last; ++b) {
          mark(stripe, rectangle, a, b);
        }
      }
    });
  });
  return offsets;
}

/// What offsets_by_stripes must give, from the documented storage alone.
std::vector<int64_t> offsets_by_definition(const TopologyView& topology) {
  std::vector<int64_t> offsets(topology.num_block_rows() * topology.num_block_cols(), 0);
  const int64_t size = topology.block_size;
  for (int64_t row = 0; row < topology.num_block_rows(); ++row) {
    const int64_t start = topology.row_offsets[row];
    for (int64_t i = 0; i < topology.row_width(row); ++i) {
      const int64_t col = topology.col_indices[start + i];
      offsets[row * topology.num_block_cols() + col] = start * size * size + i * size + 1;
    }
  }
  return offsets;
}

std::vector<int> expected_places(const std::vector<uint8_t>& mask) {
  std::vector<int> places(mask.size(), 0);
  int next = 1;
  for (size_t i = 0; i < mask.size(); ++i) {
    if (mask[i] != 0) places[i] = next++;
  }
  return places;
}

// Figure 5 of the paper: blocks A to E of a 5 x 4 matrix, in column order A C B E D.
TEST(Topology, ReproducesFigure5OfMegaBlocks) {
  const std::vector<uint8_t> mask = {1, 0, 0, 0,   // A
                                     0, 0, 1, 0,   // B
                                     1, 0, 0, 1,   // C D
                                     0, 0, 0, 0,   //
                                     0, 0, 1, 0};  // E
  const BlockTopology topology = make_mask_topology(mask, 5, 4, 128);
  EXPECT_THAT(topology.col_indices, ElementsAre(0, 2, 0, 3, 2));
  EXPECT_THAT(topology.row_indices, ElementsAre(0, 1, 2, 2, 4));
  EXPECT_THAT(topology.row_offsets, ElementsAre(0, 1, 2, 4, 4, 5));
  EXPECT_THAT(topology.col_offsets, ElementsAre(0, 2, 2, 4, 5));
  EXPECT_THAT(topology.transpose_indices, ElementsAre(0, 2, 1, 4, 3));
}

TEST(Topology, MasksComeBackByRowsAndByColumns) {
  Random random(11, 0);
  for (const auto& [rows, cols] : {std::pair{0, 0}, {0, 5}, {5, 0}, {1, 1}, {7, 4}, {6, 13}}) {
    for (const double density : {0.0, 0.2, 0.6, 1.0}) {
      const auto mask = random_mask(rows, cols, density, random);
      const BlockTopology topology = make_mask_topology(mask, rows, cols, 16);
      EXPECT_EQ(blocks_by_rows(topology.view()), expected_places(mask));
      EXPECT_EQ(blocks_by_cols(topology.view()), expected_places(mask));
    }
  }
}

TEST(Topology, StripesCoverEveryBlockOnceWhereItIsStored) {
  Random random(12, 0);
  for (int round = 0; round < 60; ++round) {
    const auto rows = static_cast<int64_t>(random.next_below(9));
    const auto cols = static_cast<int64_t>(random.next_below(9));
    const auto mask = random_mask(rows, cols, random.next_uniform() * 1.2, random);
    const BlockTopology topology = make_mask_topology(mask, rows, cols, 8);
    const auto expected = offsets_by_definition(topology.view());
    EXPECT_EQ(offsets_by_stripes(topology.view(), WalkOrder::kRows), expected);
    EXPECT_EQ(offsets_by_stripes(topology.view(), WalkOrder::kCols), expected);
  }
}

TEST(Topology, AnExpertIsOneRectangleInBothOrders) {
  const std::vector<int64_t> offsets = {0, 64, 64, 80, 176};
  const std::vector<int64_t> sizes = {48, 16, 80, 16};
  const BlockTopology topology = make_expert_topology(offsets, sizes, 16);
  for (const WalkOrder order : {WalkOrder::kRows, WalkOrder::kCols}) {
    int num_rectangles = 0;
    for_each_stripe(topology.view(), order, [&](const Stripe& stripe) {
      for_each_rectangle(topology.view(), stripe, [&](const Rectangle&) { ++num_rectangles; });
    });
    EXPECT_EQ(num_rectangles, 3);
  }
}

TEST(Topology, ExpertsAreTheBlockDiagonalMask) {
  const std::vector<int64_t> offsets = {0, 16, 16, 48};
  const std::vector<int64_t> sizes = {8, 24, 16};
  const BlockTopology experts = make_expert_topology(offsets, sizes, 8);
  std::vector<uint8_t> mask(6 * 6, 0);
  for (const int at : {0 * 6 + 0, 1 * 6 + 0}) mask[at] = 1;
  for (size_t row = 2; row < 6; ++row) mask[row * 6 + 4] = mask[row * 6 + 5] = 1;
  const BlockTopology expected = make_mask_topology(mask, 6, 6, 8);
  EXPECT_EQ(experts.row_offsets, expected.row_offsets);
  EXPECT_EQ(experts.col_indices, expected.col_indices);
  EXPECT_EQ(experts.row_indices, expected.row_indices);
  EXPECT_EQ(experts.col_offsets, expected.col_offsets);
  EXPECT_EQ(experts.transpose_indices, expected.transpose_indices);
}

TEST(Topology, RefusesWhatDoesNotFitTheBlockSize) {
  const auto message = [](auto&& body) {
    try {
      body();
    } catch (const UserError& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(message([] {
                make_block_topology({48, {96}, 96});
              }),
              HasSubstr("block size 48 is not supported; use 8, 16, 32, 64 or 128"));
  EXPECT_THAT(message([] {
                make_block_topology({128, {256, 1000}, 1024});
              }),
              HasSubstr("expert 1 has inner size 1000: the block-sparse path needs multiples of "
                        "the block size 128; the nearest is 1024"));
  EXPECT_THAT(message([] { make_block_topology({128, {0}, 1024}); }), HasSubstr("nearest is 128"));
  const std::vector<int64_t> ragged = {0, 12};
  const std::vector<int64_t> sizes = {8};
  EXPECT_THROW(make_expert_topology(ragged, sizes, 8), InternalError);
}

TEST(BlockTopologyOp, EqualsTheHostFunctionAndPadsRowOffsets) {
  KernelTable kernels;
  add_block_topology_cpu(kernels);
  const std::vector<int64_t> offsets = {0, 32, 32, 48};
  const std::vector<int64_t> sizes = {16, 48, 32};
  const BlockTopology expected = make_expert_topology(offsets, sizes, 16);
  const auto op = make_block_topology({16, sizes, 100});
  std::vector<testing::TestInput> inputs;
  inputs.push_back({testing::tensor_of_i64({4}, offsets), testing::Role::kConstant, "offsets"});
  const auto outputs = testing::run_operator(*op, kernels, inputs);
  const auto values = [&](size_t output) {
    const auto span = outputs[output].get().span<int32_t>();
    return std::vector<int32_t>(span.begin(), span.end());
  };
  EXPECT_THAT(values(0), ElementsAre(0, 1, 2, 4, 4, 4, 4));
  EXPECT_EQ(values(1), expected.col_indices);
  EXPECT_EQ(values(2), expected.row_indices);
  EXPECT_EQ(values(3), expected.col_offsets);
  EXPECT_EQ(values(4), expected.transpose_indices);
  EXPECT_EQ(*outputs[5].get().as<int64_t>(), 4);
}

}  // namespace
}  // namespace tessera
