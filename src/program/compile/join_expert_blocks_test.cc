#include "program/compile/join_expert_blocks.h"

#include <gtest/gtest.h>

#include "ops/block_sparse/layer_testing.h"
#include "ops/permute/permute.h"
#include "ops/route_map/route_map.h"

namespace tessera {
namespace {

using testing::LayerCase;
using testing::LayerValues;
using testing::ProgramRun;

LayerCase layer_case(std::vector<int64_t> sizes, DType dtype = DType::kBF16) {
  return {.dtype = dtype, .block_size = 16, .sizes = std::move(sizes), .rows = {20, 0, 7}};
}

std::vector<std::string> operators_of(const Program& program) {
  std::vector<std::string> names;
  for (const Node& node : program.nodes()) names.emplace_back(node.op->name());
  return names;
}

TEST(JoinExpertBlocks, ExpertsOfOneSizeAreGrouped) {
  Program program("experts");
  const LayerValues v = build_block_sparse_layer(layer_case({32, 32, 32}), program);
  const Program joined = join_expert_blocks(program);
  EXPECT_EQ(operators_of(joined),
            (std::vector<std::string>{"grouped_matmul", "expert_activation", "grouped_matmul"}));
  EXPECT_EQ(joined.type(v.y_RH).shape, program.type(v.y_RH).shape);
  EXPECT_EQ(joined.outputs(), program.outputs());
  EXPECT_EQ(joined.type(joined.find("pre")).shape, (Shape{layer_case({}).max_rows(), 64}));
}

TEST(JoinExpertBlocks, RowsAreNotPaddedToBlocksThatAreNone) {
  constexpr int64_t kTokens = 24;
  const LayerCase layer = layer_case({32, 32, 32});
  Program program("experts");
  const ValueId x = program.add_input("x", {DType::kBF16, {kTokens, layer.hidden}});
  const ValueId chosen = program.add_input("chosen", {DType::kI32, {kTokens, 1}});
  const ValueId probs = program.add_input("probs", {DType::kF32, {kTokens, 1}});
  const auto map = program.add(make_route_map({.num_experts = 3, .alignment = 16}), {chosen});
  const ValueId source = map[RouteMapOutput::kSourceR];
  const ValueId row_of = map[RouteMapOutput::kRowOfTK];
  LayerValues v{.offsets = map[RouteMapOutput::kOffsets]};
  v.rows_RH = program.add1(make_permute(), {x, source, row_of}, "rows");
  v.probs_R = program.add1(make_permute_probs(), {probs, source, row_of}, "row_probs");
  v.w1 = program.add_weight("w1", {DType::kBF16, {2 * layer.inner(), layer.hidden}});
  v.w2 = program.add_weight("w2", {DType::kBF16, {layer.inner(), layer.hidden}});
  v.y_RH = add_block_sparse_experts(layer, v, program);
  program.set_outputs({program.add1(make_unpermute(), {v.y_RH, row_of, source}, "y")});
  const Program joined = join_expert_blocks(program);
  EXPECT_GT(program.type(v.rows_RH).shape[0], kTokens);
  EXPECT_EQ(joined.type(v.rows_RH).shape[0], kTokens);
  EXPECT_EQ(joined.type(v.y_RH).shape[0], kTokens);
}

TEST(JoinExpertBlocks, OthersStay) {
  for (const LayerCase& layer : {layer_case({32, 16, 32}), layer_case({32, 32, 32}, DType::kF32)}) {
    Program program("experts");
    build_block_sparse_layer(layer, program);
    EXPECT_EQ(operators_of(join_expert_blocks(program)), operators_of(program));
  }
}

TEST(JoinExpertBlocks, WhatOthersReadStays) {
  Program program("experts");
  const LayerValues v = build_block_sparse_layer(layer_case({32, 32, 32}), program);
  program.set_outputs({v.y_RH, program.find("act")});
  EXPECT_EQ(operators_of(join_expert_blocks(program)), operators_of(program));
}

/// Forward and backward, of a program or of what it becomes.
struct LayerRun {
  LayerValues values;
  ProgramRun run;
};

LayerRun run_layer(const LayerCase& layer, bool join) {
  Program program("experts");
  const LayerValues v = build_block_sparse_layer(layer, program);
  if (join) program = join_expert_blocks(program);
  LayerRun result{
      v, ProgramRun(program, {{v.y_RH}, {v.rows_RH, v.probs_R}}, testing::layer_kernels())};
  Random random(3, 0);
  fill_inputs(layer, v, result.run, random);
  result.run.run_forward();
  result.run.run_backward();
  return result;
}

TEST(JoinExpertBlocks, GivesTheSame) {
  const LayerCase layer = layer_case({32, 32, 32});
  const LayerRun blocks = run_layer(layer, false);
  const LayerRun joined = run_layer(layer, true);
  const auto compare = [&](Tensor actual, Tensor expected, bool by_rows, const char* what) {
    if (by_rows) actual.shape[0] = expected.shape[0] = layer.offsets().back();
    testing::expect_rows_near(actual, expected, 0x1.0p-8, what);
  };
  const LayerValues& v = blocks.values;
  compare(joined.run.value(v.y_RH), blocks.run.value(v.y_RH), true, "output");
  compare(joined.run.grad(v.rows_RH), blocks.run.grad(v.rows_RH), true, "gradient of rows");
  compare(joined.run.grad(v.probs_R), blocks.run.grad(v.probs_R), true, "of probabilities");
  compare(joined.run.grad(v.w1), blocks.run.grad(v.w1), false, "of w1");
  compare(joined.run.grad(v.w2), blocks.run.grad(v.w2), false, "of w2");
}

}  // namespace
}  // namespace tessera
