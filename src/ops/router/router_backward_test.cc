#include <gtest/gtest.h>

#include <algorithm>

#include "ops/router/router_testing.h"
#include "ops/testing/addend_check.h"

namespace tessera {
namespace {

namespace router = testing::router;
using router::Case;
using router::kernels;
using router::make_case;
using router::make_inputs;
using router::published_specs;
using testing::Role;
using testing::TestInput;

TEST(RouterBackward, GradientsOfProbsAndLosses) {
  Random random(21, 0);
  uint64_t seed = 100;
  for (const RouterSpec& spec : published_specs()) {
    for (const BalanceScope scope : router::kScopes) {
      Case c = make_case(spec, scope, 11, random);
      c.spec.force_balanced = true;  // a step across a tie would change the choice
      SCOPED_TRACE(make_router(c.spec)->attributes());
      Random values(++seed, 0);
      const auto inputs = make_inputs(c, values);
      for (const std::vector<int>& outputs :
           {std::vector<int>{RouterOutput::kProbs}, std::vector<int>{RouterOutput::kBalanceLoss},
            std::vector<int>{RouterOutput::kZLoss}, std::vector<int>{RouterOutput::kScoreMeans},
            std::vector<int>{RouterOutput::kLogits},
            std::vector<int>{RouterOutput::kProbs, RouterOutput::kBalanceLoss, RouterOutput::kZLoss,
                             RouterOutput::kScoreMeans, RouterOutput::kLogits}}) {
        testing::check_gradients(make_router(c.spec), kernels(), inputs,
                                 {.outputs = outputs, .max_probes = 24});
      }
    }
  }
}

TEST(RouterBackward, GradientsOfAReplayedChoice) {
  Random random(22, 0);
  for (const RouterSpec& spec : published_specs()) {
    Case c = make_case(spec, BalanceScope::kSequence, 11, random);
    c.spec.replay = true;
    for (int64_t i = 0; i < c.num_tokens * spec.top_k; ++i)
      c.replayed.push_back(static_cast<int32_t>((i * 3 + i / spec.top_k) % spec.num_experts));
    SCOPED_TRACE(make_router(c.spec)->attributes());
    Random values(7, 0);
    testing::check_gradients(
        make_router(c.spec), kernels(), make_inputs(c, values),
        {.outputs = {RouterOutput::kProbs, RouterOutput::kBalanceLoss}, .max_probes = 24});
  }
}

TEST(RouterBackward, PaddingHasNoGradient) {
  Random random(23, 0);
  Case c = make_case(published_specs()[2], BalanceScope::kMicroBatch, 11, random);
  c.spec.padding = true;
  c.spec.force_balanced = true;
  c.segments = {0, 0, -1, 0, 1, 1, -1, -1, 1, 1, -1};
  Random values(8, 0);
  const auto inputs = make_inputs(c, values);
  testing::check_gradients(
      make_router(c.spec), kernels(), inputs,
      {.outputs = {RouterOutput::kProbs, RouterOutput::kZLoss, RouterOutput::kScoreMeans},
       .max_probes = 24});
  std::vector<OwnedTensor> grads(7);
  grads[RouterOutput::kZLoss] = testing::tensor_of({1}, {1.0F});
  const auto found = testing::run_gradients(make_router(c.spec), kernels(), inputs, grads);
  const auto dx = testing::to_doubles(found[0]);
  for (size_t t = 0; t < c.segments.size(); ++t)
    EXPECT_EQ(dx[t * router::kHidden] == 0, c.segments[t] < 0) << t;
}

TEST(RouterBackward, Bf16GradientsAreThoseOfTheWidenedInputs) {
  Random random(31, 0);
  Case c = make_case(published_specs()[4], BalanceScope::kMicroBatch, 700, random);
  Case wide = c;
  c.dtype = DType::kBF16;
  Random values(9, 0);
  const auto inputs = make_inputs(c, values);
  auto wide_inputs = make_inputs(wide, values);
  const auto copy = [&](size_t i) {
    const auto from = testing::to_doubles(inputs[i].tensor);
    std::ranges::copy(from, wide_inputs[i].tensor.get().span<float>().begin());
  };
  copy(0);
  copy(1);
  const auto gradients = [&](const Case& which, const std::vector<TestInput>& in) {
    std::vector<OwnedTensor> grads(7);
    Random noise(3, 3);
    grads[0] = testing::random_tensor(DType::kF32, {700, c.spec.top_k}, noise);
    grads[4] = testing::tensor_of({1}, {1.0F});
    return testing::run_gradients(make_router(which.spec), kernels(), in, grads);
  };
  const auto narrow = gradients(c, inputs);
  const auto expected = gradients(wide, wide_inputs);
  testing::expect_rows_near(narrow[0], expected[0], 4e-3, "dx");
  testing::expect_rows_near(narrow[1], expected[1], 1e-5, "dweight");
}

TEST(RouterBackward, AddsAnAddendBeforeRounding) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t num_tokens : {0, 1, 70, 700}) {
      SCOPED_TRACE(fmt::format("T={} {}", num_tokens, dtype_name(dtype)));
      const Case c{
          .spec = {.num_experts = 6, .top_k = 2}, .num_tokens = num_tokens, .dtype = dtype};
      Random random(41, static_cast<uint64_t>(num_tokens));
      auto inputs = make_inputs(c, random);
      const auto add_random = [&](const Shape& shape, const char* name) {
        inputs.push_back(
            {testing::random_tensor(DType::kF32, shape, random), Role::kConstant, name});
      };
      add_random({num_tokens, 6}, "logits");
      std::vector<int32_t> chosen;
      for (int64_t t = 0; t < num_tokens; ++t)
        chosen.insert(chosen.end(), {static_cast<int32_t>(t % 6), static_cast<int32_t>(5 - t % 6)});
      inputs.push_back(
          {testing::tensor_of_i32({num_tokens, 2}, chosen), Role::kConstant, "expert_idx"});
      add_random({num_tokens, 2}, "grad_probs");
      testing::check_addend(RouterBackward(c.spec, {.probs = true}), kernels(), std::move(inputs));
    }
  }
}

}  // namespace
}  // namespace tessera
