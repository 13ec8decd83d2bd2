#include "ops/zero_experts/zero_experts.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/zero_experts/zero_experts_testing.h"

namespace tessera {
namespace {

using testing::make_zero_expert_inputs;
using testing::zero_expert_cases;

KernelTable kernels() {
  KernelTable table;
  add_zero_experts_cpu(table);
  return table;
}

TEST(ZeroExperts, GiveTokensBackAndLeaveTheOthersForDispatch) {
  for (const auto& c : zero_expert_cases()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const auto inputs = make_zero_expert_inputs(c, dtype, 3);
      const auto out = testing::run_operator(ZeroExperts(c.spec), kernels(), inputs);
      const auto x = testing::to_doubles(inputs[0].tensor);
      const auto probs = testing::to_doubles(inputs[1].tensor);
      const auto experts = inputs[2].tensor.get().span<int32_t>();
      const auto y = testing::to_doubles(out[0]);
      const auto routed = out[1].get().span<int32_t>();
      ASSERT_EQ(routed.size(), experts.size());
      std::vector<double> weights(c.tokens);
      for (size_t i = 0; i < experts.size(); ++i) {
        const bool computes = experts[i] < c.spec.num_experts;
        EXPECT_EQ(routed[i], computes ? experts[i] : -1);
        if (!computes) weights[static_cast<int64_t>(i) / c.top_k] += probs[i];
      }
      for (size_t i = 0; i < y.size(); ++i) {
        const double expected = weights[static_cast<int64_t>(i) / c.width] * x[i];
        EXPECT_NEAR(y[i], expected,
                    (dtype == DType::kF32 ? 1e-6 : 4e-3) * (std::abs(expected) + 1));
      }
    }
  }
}

TEST(ZeroExperts, GradientsMatchFiniteDifferences) {
  for (const auto& c : zero_expert_cases())
    testing::check_gradients(make_zero_experts(c.spec), kernels(),
                             make_zero_expert_inputs(c, DType::kF32, 5));
}

TEST(ZeroExperts, RefuseWhatDoesNotFit) {
  EXPECT_THROW(make_zero_experts({.num_experts = 4, .zero_experts = 0}), UserError);
  EXPECT_THROW(make_zero_experts({.num_experts = 0, .zero_experts = 2}), UserError);
  const ZeroExperts op({.num_experts = 4, .zero_experts = 2});
  const ValueType x{DType::kF32, {3, 8}};
  const ValueType probs{DType::kF32, {3, 2}};
  const ValueType idx{DType::kI32, {3, 2}};
  const auto infer = [&](const std::vector<ValueType>& types) { return op.infer(types); };
  EXPECT_EQ(infer({x, probs, idx}).at(0), x);
  EXPECT_THROW(infer({x, probs, {DType::kI32, {4, 2}}}), UserError);
  EXPECT_THROW(infer({x, {DType::kF32, {3, 3}}, idx}), UserError);
  EXPECT_THROW(infer({{DType::kI64, {3, 8}}, probs, idx}), UserError);
}

}  // namespace
}  // namespace tessera
