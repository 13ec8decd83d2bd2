#include "program/fuse_producers.h"

#include <gtest/gtest.h>

#include "ops/add/add.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/grouped_matmul/grouped_matmul.h"

namespace tessera {
namespace {

constexpr int64_t kRows = 6;
constexpr int64_t kWidth = 10;
constexpr int64_t kSize = 4;
const std::vector<int64_t> kSizes = {kSize, kSize};

/// Experts' products and activations.
struct Parts {
  Program program{"experts"};
  ValueId a, fc1, fc2, offsets, others, probs;

  Parts() {
    a = program.add_input("a", {DType::kF32, {kRows, kWidth}});
    fc1 = program.add_weight("fc1", {DType::kF32, {4 * kSize, kWidth}});
    fc2 = program.add_weight("fc2", {DType::kF32, {2 * kSize, kWidth}});
    offsets = program.add_input("offsets", {DType::kI64, {3}});
    others = program.add_input("other_offsets", {DType::kI64, {3}});
    probs = program.add_input("probs", {DType::kF32, {kRows}});
  }

  ValueId product() {
    return program.add1(make_grouped_matmul({{2 * kSize, 2 * kSize}, GroupedSide::kOut}),
                        {a, fc1, offsets}, "pre");
  }
  ValueId activation(ValueId pre, ValueId by) {
    return program.add1(make_expert_activation({.expert_sizes = kSizes, .apply_prob = true}),
                        {pre, probs, by}, "act");
  }
  ValueId grad_of_act() {
    return program.add1(make_grouped_matmul({kSizes, GroupedSide::kOut}), {a, fc2, offsets},
                        "grad_act");
  }
  std::vector<ValueId> backward(ValueId grad, ValueId pre) {
    const ExpertActivation forward({.expert_sizes = kSizes, .apply_prob = true});
    return program.add(std::make_shared<ExpertActivationBackward>(forward),
                       {grad, pre, probs, offsets}, {"grad_pre", "grad_probs"});
  }
  /// Something that reads a value.
  ValueId twice(ValueId id) { return program.add1(make_add(), {id, id}, "twice"); }

  Program with_outputs(std::vector<ValueId> outputs) {
    program.set_outputs(std::move(outputs));
    return program;
  }
};

/// The operators, each with how many values it gives.
std::vector<std::string> fused(const Program& program, std::vector<ValueId> kept = {}) {
  std::vector<std::string> names;
  const Program result = fuse_producers(program, kept);
  for (const Node& node : result.nodes())
    names.push_back(fmt::format("{} {}", node.op->name(), node.outputs.size()));
  return names;
}

using Names = std::vector<std::string>;

TEST(FuseProducers, AnActivationJoinsItsProduct) {
  Parts parts;
  EXPECT_EQ(fused(parts.with_outputs({parts.activation(parts.product(), parts.offsets)})),
            (Names{"activated_product 1"}));
}

TEST(FuseProducers, WhatOthersReadOrKeepIsMade) {
  Parts parts;
  const ValueId pre = parts.product();
  const ValueId act = parts.activation(pre, parts.offsets);
  const Program alone = parts.with_outputs({act});
  EXPECT_EQ(fused(alone, {pre}), (Names{"activated_product 2"}));
  EXPECT_EQ(fused(parts.with_outputs({act, pre})), (Names{"activated_product 2"}));
  const ValueId other = parts.twice(pre);
  EXPECT_EQ(fused(parts.with_outputs({act, other})), (Names{"activated_product 2", "add 1"}));
}

TEST(FuseProducers, NothingIsReadBeforeItIsMade) {
  Parts parts;
  const ValueId pre = parts.product();
  const ValueId other = parts.twice(pre);
  const ValueId act = parts.activation(pre, parts.offsets);
  EXPECT_EQ(fused(parts.with_outputs({act, other})),
            (Names{"grouped_matmul 1", "add 1", "expert_activation 1"}));
}

TEST(FuseProducers, OtherRowsStayApart) {
  Parts parts;
  EXPECT_EQ(fused(parts.with_outputs({parts.activation(parts.product(), parts.others)})),
            (Names{"grouped_matmul 1", "expert_activation 1"}));
}

TEST(FuseProducers, AnActivationsGradientJoinsTheProductBeforeIt) {
  Parts parts;
  const ValueId pre = parts.program.add_input("pre", {DType::kF32, {kRows, 2 * kSize}});
  const ValueId grad = parts.grad_of_act();
  const auto grads = parts.backward(grad, pre);
  const Program alone = parts.with_outputs(grads);
  EXPECT_EQ(fused(alone), (Names{"activation_grad_product 2"}));
  // The gradient that lies between them is not made.
  EXPECT_EQ(fused(alone, {grad}), (Names{"grouped_matmul 1", "expert_activation_backward 2"}));
}

}  // namespace
}  // namespace tessera
