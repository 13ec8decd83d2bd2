#include "program/fuse_repeats.h"

#include <gtest/gtest.h>

#include "ops/add/add.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "program/fuse_producers.h"

namespace tessera {
namespace {

constexpr int64_t kRows = 6;
constexpr int64_t kWidth = 10;
constexpr int64_t kSize = 4;
const std::vector<int64_t> kSizes = {kSize, kSize};

/// What a backward pass that makes the experts' activation again begins with.
struct Parts {
  Program program{"experts"};
  ValueId dy, pre, fc2, offsets, others, probs;

  Parts() {
    dy = program.add_input("dy", {DType::kF32, {kRows, kWidth}});
    pre = program.add_input("pre", {DType::kF32, {kRows, 2 * kSize}});
    fc2 = program.add_weight("fc2", {DType::kF32, {2 * kSize, kWidth}});
    offsets = program.add_input("offsets", {DType::kI64, {3}});
    others = program.add_input("other_offsets", {DType::kI64, {3}});
    probs = program.add_input("probs", {DType::kF32, {kRows}});
  }

  ValueId activation(ValueId by, bool apply_prob = true) {
    const std::vector<ValueId> inputs =
        apply_prob ? std::vector<ValueId>{pre, probs, by} : std::vector<ValueId>{pre, by};
    return program.add1(make_expert_activation({.expert_sizes = kSizes, .apply_prob = apply_prob}),
                        inputs, "act");
  }
  ValueId grad_of_act() {
    return program.add1(make_grouped_matmul({kSizes, GroupedSide::kOut}), {dy, fc2, offsets},
                        "grad_act");
  }
  std::vector<ValueId> backward(ValueId grad) {
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

using Names = std::vector<std::string>;

/// The operators, each with how many values it gives.
Names operators_of(const Program& program) {
  Names names;
  for (const Node& node : program.nodes())
    names.push_back(fmt::format("{} {}", node.op->name(), node.outputs.size()));
  return names;
}

TEST(FuseRepeats, AnActivationThatIsMadeAgainComesWithItsGradient) {
  Parts parts;
  const ValueId act = parts.activation(parts.offsets);
  const ValueId read = parts.twice(act);
  std::vector<ValueId> outputs = parts.backward(parts.grad_of_act());
  outputs.push_back(read);
  const Program result = fuse_repeats(parts.with_outputs(outputs));
  EXPECT_EQ(operators_of(result),
            (Names{"grouped_matmul 1", "expert_activation_backward 3", "add 1"}));
  EXPECT_EQ(result.nodes()[1].outputs, (std::vector<ValueId>{outputs[0], outputs[1], act}));
}

TEST(FuseRepeats, ItMayStandBehindTheGradient) {
  Parts parts;
  std::vector<ValueId> outputs = parts.backward(parts.grad_of_act());
  outputs.push_back(parts.twice(parts.activation(parts.offsets)));
  EXPECT_EQ(operators_of(fuse_repeats(parts.with_outputs(outputs))),
            (Names{"grouped_matmul 1", "expert_activation_backward 3", "add 1"}));
}

TEST(FuseRepeats, ItComesWithTheProductThatComputesItsGradient) {
  Parts parts;
  const ValueId read = parts.twice(parts.activation(parts.offsets));
  std::vector<ValueId> outputs = parts.backward(parts.grad_of_act());
  outputs.push_back(read);
  const Program joined = fuse_producers(parts.with_outputs(outputs));
  EXPECT_EQ(operators_of(joined),
            (Names{"expert_activation 1", "add 1", "activation_grad_product 2"}));
  EXPECT_EQ(operators_of(fuse_repeats(joined)), (Names{"activation_grad_product 3", "add 1"}));
}

TEST(FuseRepeats, WhatTheGradientWaitsForStays) {
  Parts parts;
  const ValueId grad = parts.twice(parts.activation(parts.offsets));
  const Names names = {"expert_activation 1", "add 1", "expert_activation_backward 2"};
  EXPECT_EQ(operators_of(fuse_repeats(parts.with_outputs(parts.backward(grad)))), names);
}

TEST(FuseRepeats, OtherActivationsStay) {
  for (const bool same_rows : {false, true}) {
    Parts parts;
    const ValueId act = parts.activation(same_rows ? parts.offsets : parts.others, !same_rows);
    std::vector<ValueId> outputs = parts.backward(parts.grad_of_act());
    outputs.push_back(act);
    EXPECT_EQ(operators_of(fuse_repeats(parts.with_outputs(outputs))),
              (Names{"expert_activation 1", "grouped_matmul 1", "expert_activation_backward 2"}));
  }
}

TEST(FuseRepeats, OneActivationIsEnough) {
  Parts parts;
  const ValueId first = parts.activation(parts.offsets);
  const ValueId second = parts.activation(parts.offsets);
  std::vector<ValueId> outputs = parts.backward(parts.grad_of_act());
  outputs.insert(outputs.end(), {first, second});
  EXPECT_EQ(operators_of(fuse_repeats(parts.with_outputs(outputs))),
            (Names{"expert_activation 1", "grouped_matmul 1", "expert_activation_backward 3"}));
}

}  // namespace
}  // namespace tessera
