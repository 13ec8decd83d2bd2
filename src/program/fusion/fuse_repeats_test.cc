#include "program/fusion/fuse_repeats.h"

#include <gtest/gtest.h>

#include "program/fusion/fuse_producers.h"
#include "program/testing/expert_parts_testing.h"

namespace tessera {
namespace {

using testing::ExpertParts;
using testing::Names;
using testing::operators_of;

TEST(FuseRepeats, AnActivationThatIsMadeAgainComesWithItsGradient) {
  ExpertParts parts;
  const ValueId pre = parts.kept_pre();
  const ValueId act = parts.activation(pre, parts.offsets);
  const ValueId read = parts.twice(act);
  std::vector<ValueId> outputs = parts.backward(parts.grad_of_act(), pre);
  outputs.push_back(read);
  const Program result = fuse_repeats(parts.with_outputs(outputs));
  EXPECT_EQ(operators_of(result),
            (Names{"grouped_matmul 1", "expert_activation_backward 3", "add 1"}));
  EXPECT_EQ(result.nodes()[1].outputs, (std::vector<ValueId>{outputs[0], outputs[1], act}));
}

TEST(FuseRepeats, ItMayStandBehindTheGradient) {
  ExpertParts parts;
  const ValueId pre = parts.kept_pre();
  std::vector<ValueId> outputs = parts.backward(parts.grad_of_act(), pre);
  outputs.push_back(parts.twice(parts.activation(pre, parts.offsets)));
  EXPECT_EQ(operators_of(fuse_repeats(parts.with_outputs(outputs))),
            (Names{"grouped_matmul 1", "expert_activation_backward 3", "add 1"}));
}

TEST(FuseRepeats, ItComesWithTheProductThatComputesItsGradient) {
  ExpertParts parts;
  const ValueId pre = parts.kept_pre();
  const ValueId read = parts.twice(parts.activation(pre, parts.offsets));
  std::vector<ValueId> outputs = parts.backward(parts.grad_of_act(), pre);
  outputs.push_back(read);
  const Program joined = fuse_producers(parts.with_outputs(outputs));
  EXPECT_EQ(operators_of(joined),
            (Names{"expert_activation 1", "add 1", "activation_grad_product 2"}));
  EXPECT_EQ(operators_of(fuse_repeats(joined)), (Names{"activation_grad_product 3", "add 1"}));
}

TEST(FuseRepeats, WhatTheGradientWaitsForStays) {
  ExpertParts parts;
  const ValueId pre = parts.kept_pre();
  const ValueId grad = parts.twice(parts.activation(pre, parts.offsets));
  const Names names = {"expert_activation 1", "add 1", "expert_activation_backward 2"};
  EXPECT_EQ(operators_of(fuse_repeats(parts.with_outputs(parts.backward(grad, pre)))), names);
}

TEST(FuseRepeats, OtherActivationsStay) {
  for (const bool same_rows : {false, true}) {
    ExpertParts parts;
    const ValueId pre = parts.kept_pre();
    const ValueId act = parts.activation(pre, same_rows ? parts.offsets : parts.others, !same_rows);
    std::vector<ValueId> outputs = parts.backward(parts.grad_of_act(), pre);
    outputs.push_back(act);
    EXPECT_EQ(operators_of(fuse_repeats(parts.with_outputs(outputs))),
              (Names{"expert_activation 1", "grouped_matmul 1", "expert_activation_backward 2"}));
  }
}

TEST(FuseRepeats, OneActivationIsEnough) {
  ExpertParts parts;
  const ValueId pre = parts.kept_pre();
  const ValueId first = parts.activation(pre, parts.offsets);
  const ValueId second = parts.activation(pre, parts.offsets);
  std::vector<ValueId> outputs = parts.backward(parts.grad_of_act(), pre);
  outputs.insert(outputs.end(), {first, second});
  EXPECT_EQ(operators_of(fuse_repeats(parts.with_outputs(outputs))),
            (Names{"expert_activation 1", "grouped_matmul 1", "expert_activation_backward 3"}));
}

}  // namespace
}  // namespace tessera
