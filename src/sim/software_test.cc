#include "sim/software.h"

#include <gtest/gtest.h>

#include "ops/attention/attention.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/linear/linear.h"

namespace tessera {
namespace {

constexpr double kMicro = 1e-6;

Hardware machine() {
  return {.f32_tflops = 1,
          .bf16_tflops = 10,
          .memory_gbs = 100,
          .launch_microseconds = 10,
          .graph_microseconds = 0.5,
          .product_share = 0.5,
          .memory_share = 0.25};
}

/// A product of all rows, and one of as many as an extent says.
Program two_products() {
  Program program;
  const ValueId weight = program.add_weight("weight", {DType::kF32, {16, 16}});
  const ValueId rows = program.add_input("rows", {DType::kI64, {1}});
  const ValueId all = program.add_input("all", {DType::kF32, {8, 16}});
  const ValueId some = program.add_input(
      "some", {.dtype = DType::kF32, .shape = {8, 16}, .ragged_dim = 0, .extent = rows});
  program.add1(make_linear(), {all, weight}, "static");
  program.add1(make_linear(), {some, weight}, "ragged");
  return program;
}

TEST(Software, HostsGiveWhatIsInNoGraphOneByOne) {
  const Program program = two_products();
  const auto seconds = [&](LaunchGraphs graphs, size_t node, std::optional<double> launch = {}) {
    return host_seconds({.graphs = graphs, .launch_microseconds = launch}, machine(), program,
                        program.nodes()[node]);
  };
  EXPECT_DOUBLE_EQ(seconds(LaunchGraphs::kAll, 0), 0.5 * kMicro);
  EXPECT_DOUBLE_EQ(seconds(LaunchGraphs::kAll, 1), 0.5 * kMicro);
  EXPECT_DOUBLE_EQ(seconds(LaunchGraphs::kStatic, 0), 0.5 * kMicro);
  EXPECT_DOUBLE_EQ(seconds(LaunchGraphs::kStatic, 1), 10 * kMicro);
  EXPECT_DOUBLE_EQ(seconds(LaunchGraphs::kNone, 0), 10 * kMicro);
  EXPECT_DOUBLE_EQ(seconds(LaunchGraphs::kNone, 1, 75), 75 * kMicro);
}

TEST(Software, HostsMayGiveProductsExpertByExpert) {
  Program program;
  const ValueId weight = program.add_weight("weight", {DType::kBF16, {64, 16}});
  const ValueId rows = program.add_input("rows", {DType::kI64, {1}});
  const ValueId offsets = program.add_input("offsets", {DType::kI64, {5}});
  const ValueId tokens = program.add_input(
      "tokens", {.dtype = DType::kBF16, .shape = {8, 16}, .ragged_dim = 0, .extent = rows});
  program.add1(make_grouped_matmul({.group_sizes = {16, 16, 16, 16}}), {tokens, weight, offsets},
               "product");
  program.add1(make_linear(), {tokens, weight}, "other");
  const auto seconds = [&](LaunchGraphs graphs, size_t node) {
    return host_seconds({.graphs = graphs, .expert_microseconds = 3}, machine(), program,
                        program.nodes()[node]);
  };
  EXPECT_DOUBLE_EQ(seconds(LaunchGraphs::kNone, 0), 22 * kMicro);
  EXPECT_DOUBLE_EQ(seconds(LaunchGraphs::kStatic, 0), 22 * kMicro);
  EXPECT_DOUBLE_EQ(seconds(LaunchGraphs::kAll, 0), 0.5 * kMicro);
  EXPECT_DOUBLE_EQ(seconds(LaunchGraphs::kNone, 1), 10 * kMicro);
}

TEST(Software, StoredScoresTakeTwoProductsAndPassesOverThem) {
  // 64 tokens in sequences of 32, two heads: 4,096 scores.
  const AttentionSpec spec{
      .num_heads = 2, .num_kv_heads = 1, .head_size = 16, .sequence_length = 32};
  const ValueType q{DType::kBF16, {64, 32}};
  const auto seconds = stored_scores_seconds({.op = make_attention(spec)}, q, machine());
  ASSERT_TRUE(seconds.has_value());
  EXPECT_NEAR(*seconds, 4096 * 2 * 32 / 5e12 + 4 * 4096 * 2 / 25e9, 1e-15);
  const auto backward =
      stored_scores_seconds({.op = make_attention_backward(spec, false)}, q, machine());
  ASSERT_TRUE(backward.has_value());
  EXPECT_NEAR(*backward, 2 * 4096 * 2 * 32 / 5e12 + 7 * 4096 * 2 / 25e9, 1e-15);
  EXPECT_FALSE(stored_scores_seconds({.op = make_linear()}, q, machine()).has_value());
}

TEST(Software, PiecesOfExchangesTravelBesideProducts) {
  EXPECT_DOUBLE_EQ(pipelined_seconds(4, 100, 4), 1);  // but one piece, which nothing is beside
  EXPECT_DOUBLE_EQ(pipelined_seconds(4, 2, 4), 2.5);
  EXPECT_DOUBLE_EQ(pipelined_seconds(4, 0, 4), 4);
}

TEST(Software, NothingIsInPiecesWithoutExchanges) {
  const Pieces pieces = find_pieces({.pipelined = {"tp"}}, two_products());
  EXPECT_EQ(pieces.of_node, (std::vector<int64_t>{1, 1}));
  EXPECT_TRUE(pieces.product_of.empty());
}

}  // namespace
}  // namespace tessera
