#include "program/fusion/join_expert_blocks.h"

#include <gtest/gtest.h>

#include "ops/block_sparse/layer_testing.h"
#include "ops/expert_bias/expert_bias.h"
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

/// A layer with biases behind its first products.
LayerValues build_biased_layer(const LayerCase& layer, Program& program, ValueId& bias) {
  LayerValues v = add_layer_inputs(layer, program);
  const int64_t block = layer.block_size;
  const auto topology = [&](const std::vector<int64_t>& sizes) {
    return program.add(make_block_topology({block, sizes, program.type(v.rows_RH).shape[0]}),
                       {v.offsets});
  };
  const auto t1 = topology(layer.first_sizes());
  const auto t2 = topology(layer.sizes);
  bias = program.add_weight("bias", {DType::kF32, {2 * layer.inner()}});
  const ValueId product =
      program.add1(make_block_sparse_fc1(block, layer.first_sizes()),
                   {v.rows_RH, v.w1, t1[0], t1[1], t1[2], t1[3], t1[4]}, "product");
  const ValueId pre =
      program.add1(make_expert_bias({.sizes = layer.first_sizes(), .block_size = block}),
                   {product, bias, v.offsets, t1[0]}, "pre");
  const ValueId act = program.add1(make_block_sparse_activation({layer.activation, block}),
                                   {pre, v.probs_R, t2[0], t2[1]}, "act");
  v.y_RH = program.add1(make_block_sparse_fc2(block, layer.sizes),
                        {act, v.w2, t2[0], t2[1], t2[2], t2[3], t2[4], v.probs_R}, "y");
  program.set_outputs({v.y_RH});
  return v;
}

TEST(JoinExpertBlocks, TakesBiasesAlong) {
  const LayerCase layer = layer_case({32, 32, 32});
  KernelTable kernels = testing::layer_kernels();
  add_expert_bias_cpu(kernels);
  std::vector<OwnedTensor> results;
  for (const bool join : {false, true}) {
    Program program("experts");
    ValueId bias;
    const LayerValues v = build_biased_layer(layer, program, bias);
    if (join) {
      program = join_expert_blocks(program);
      EXPECT_EQ(operators_of(program),
                (std::vector<std::string>{"grouped_matmul", "expert_bias", "expert_activation",
                                          "grouped_matmul"}));
    }
    ProgramRun run(program, {{v.y_RH}, {v.rows_RH, v.probs_R}}, kernels);
    Random random(5, 0);
    fill_inputs(layer, v, run, random);
    testing::copy_into(run.value(bias),
                       testing::random_tensor(DType::kF32, {2 * layer.inner()}, random));
    run.run_forward();
    run.run_backward();
    Tensor y = run.value(v.y_RH);
    y.shape[0] = layer.offsets().back();
    for (const Tensor& tensor : {y, run.grad(bias), run.grad(v.w2)}) {
      results.emplace_back(tensor.dtype, tensor.shape);
      testing::copy_into(results.back(), tensor);
    }
  }
  for (size_t i = 0; i < 3; ++i)
    testing::expect_rows_near(results[3 + i], results[i], 0x1.0p-8, fmt::format("result {}", i));
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
