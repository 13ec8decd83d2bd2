#include "ops/vocab_loss/vocab_loss.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

constexpr int32_t kIgnored = -100;
constexpr float kScale = 0.25F;

KernelTable kernels() {
  KernelTable table;
  add_vocab_loss_cpu(table);
  return table;
}

struct Case {
  int64_t parts, tokens;
};

/// Statistics of parts; where `with_empty`, the last part has no rows.
std::vector<TestInput> make_inputs(const Case& c, bool with_empty) {
  Random random(static_cast<uint64_t>(c.parts), static_cast<uint64_t>(c.tokens));
  std::vector<int32_t> labels;
  for (int64_t t = 0; t < c.tokens; ++t)
    labels.push_back(random.next_below(4) == 0 ? kIgnored : static_cast<int32_t>(t));
  std::vector<TestInput> inputs = list_inputs(
      TestInput{random_tensor(DType::kF32, {c.parts * c.tokens}, random, 2.0), Role::kValue, "lse"},
      TestInput{random_tensor(DType::kF32, {c.parts * c.tokens}, random), Role::kValue,
                "label_logit"},
      TestInput{tensor_of_i32({c.tokens}, labels), Role::kConstant, "labels"},
      TestInput{tensor_of({1}, {kScale}), Role::kConstant, "scale"});
  if (with_empty) {
    const auto lse = inputs[0].tensor.get().span<float>();
    std::fill(lse.end() - c.tokens, lse.end(), -std::numeric_limits<float>::infinity());
  }
  return inputs;
}

TEST(VocabLoss, JoinsTheParts) {
  for (const Case& c : {Case{1, 1}, Case{2, 0}, Case{3, 7}, Case{5, 40}}) {
    for (const bool with_empty : {false, true}) {
      if (with_empty && c.parts == 1) continue;
      const auto inputs = make_inputs(c, with_empty);
      const auto lse = to_doubles(inputs[0].tensor);
      const auto logits = to_doubles(inputs[1].tensor);
      const auto outputs = run_operator(*make_vocab_loss(c.parts), kernels(), inputs);
      double loss = 0;
      for (int64_t t = 0; t < c.tokens; ++t) {
        double sum = 0;
        double logit = 0;
        for (int64_t p = 0; p < c.parts; ++p) {
          sum += std::exp(lse[p * c.tokens + t]);
          logit += logits[p * c.tokens + t];
        }
        const bool ignored = inputs[2].tensor.get().as<int32_t>()[t] == kIgnored;
        const double expected = ignored ? 0.0 : std::log(sum) - logit;
        EXPECT_NEAR(outputs[1].get().as<float>()[t], expected, 1e-6 * (1 + std::abs(expected)));
        loss += kScale * expected;
      }
      EXPECT_NEAR(*outputs[0].get().as<float>(), loss, 1e-6 * (1 + std::abs(loss)));
    }
  }
}

TEST(VocabLoss, FiniteDifferences) {
  for (const Case& c : {Case{1, 3}, Case{4, 6}})
    check_gradients(make_vocab_loss(c.parts), kernels(), make_inputs(c, false), {.outputs = {0}});
}

TEST(VocabLoss, AnEmptyPartGetsNoGradientOfItsLse) {
  const Case c{3, 5};
  const auto inputs = make_inputs(c, true);
  std::vector<OwnedTensor> grad_outputs(2);
  grad_outputs[0] = tensor_of({1}, {1.0F});
  const auto grads = run_gradients(make_vocab_loss(c.parts), kernels(), inputs, grad_outputs);
  for (int64_t t = 0; t < c.tokens; ++t) {
    const bool ignored = inputs[2].tensor.get().as<int32_t>()[t] == kIgnored;
    EXPECT_EQ(grads[0].get().as<float>()[2 * c.tokens + t], 0.0F);
    EXPECT_EQ(grads[1].get().as<float>()[2 * c.tokens + t], ignored ? 0.0F : -kScale);
  }
}

TEST(VocabLoss, ShapeRule) {
  const ValueType flat{DType::kF32, {12}};
  const ValueType parts{DType::kF32, {3, 4}};
  const ValueType labels{DType::kI32, {4}};
  const ValueType scale{DType::kF32, {1}};
  const OperatorPtr op = make_vocab_loss(3);
  for (const ValueType& type : {flat, parts}) {
    const std::vector<ValueType> inputs = {type, type, labels, scale};
    EXPECT_EQ(op->infer(inputs), (std::vector<ValueType>{scale, {DType::kF32, {4}}}));
  }
  const auto refuses = [&](const std::vector<ValueType>& wrong) {
    EXPECT_THROW(op->infer(wrong), UserError);
  };
  refuses({flat, flat, labels});
  refuses({flat, parts, labels, scale});
  refuses({{DType::kF32, {13}}, {DType::kF32, {13}}, labels, scale});
  refuses({with_dtype(flat, DType::kBF16), with_dtype(flat, DType::kBF16), labels, scale});
  refuses({flat, flat, labels, {DType::kF32, {2}}});
  EXPECT_THROW(make_vocab_loss(0), UserError);
}

}  // namespace
}  // namespace tessera::testing
