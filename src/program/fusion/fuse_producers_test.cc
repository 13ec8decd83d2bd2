#include "program/fusion/fuse_producers.h"

#include <gtest/gtest.h>

#include "program/testing/expert_parts_testing.h"

namespace tessera {
namespace {

using testing::ExpertParts;
using testing::Names;

Names fused(const Program& program, std::vector<ValueId> kept = {}) {
  return testing::operators_of(fuse_producers(program, kept));
}

TEST(FuseProducers, AnActivationJoinsItsProduct) {
  ExpertParts parts;
  EXPECT_EQ(fused(parts.with_outputs({parts.activation(parts.product(), parts.offsets)})),
            (Names{"activated_product 1"}));
}

TEST(FuseProducers, WhatOthersReadOrKeepIsMade) {
  ExpertParts parts;
  const ValueId pre = parts.product();
  const ValueId act = parts.activation(pre, parts.offsets);
  const Program alone = parts.with_outputs({act});
  EXPECT_EQ(fused(alone, {pre}), (Names{"activated_product 2"}));
  EXPECT_EQ(fused(parts.with_outputs({act, pre})), (Names{"activated_product 2"}));
  const ValueId other = parts.twice(pre);
  EXPECT_EQ(fused(parts.with_outputs({act, other})), (Names{"activated_product 2", "add 1"}));
}

TEST(FuseProducers, NothingIsReadBeforeItIsMade) {
  ExpertParts parts;
  const ValueId pre = parts.product();
  const ValueId other = parts.twice(pre);
  const ValueId act = parts.activation(pre, parts.offsets);
  EXPECT_EQ(fused(parts.with_outputs({act, other})),
            (Names{"grouped_matmul 1", "add 1", "expert_activation 1"}));
}

TEST(FuseProducers, OtherRowsStayApart) {
  ExpertParts parts;
  EXPECT_EQ(fused(parts.with_outputs({parts.activation(parts.product(), parts.others)})),
            (Names{"grouped_matmul 1", "expert_activation 1"}));
}

TEST(FuseProducers, AnActivationsGradientJoinsTheProductBeforeIt) {
  ExpertParts parts;
  const ValueId pre = parts.kept_pre();
  const ValueId grad = parts.grad_of_act();
  const auto grads = parts.backward(grad, pre);
  const Program alone = parts.with_outputs(grads);
  EXPECT_EQ(fused(alone), (Names{"activation_grad_product 2"}));
  // The gradient that lies between them is not made.
  EXPECT_EQ(fused(alone, {grad}), (Names{"grouped_matmul 1", "expert_activation_backward 2"}));
}

}  // namespace
}  // namespace tessera
