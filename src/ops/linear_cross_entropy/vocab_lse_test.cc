#include "ops/linear_cross_entropy/vocab_lse.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::Role;
using testing::TestInput;

struct Case {
  int64_t T, H;
  int64_t first_row, num_rows, vocab_size;
  CrossEntropySpec cut;
  DType dtype = DType::kF32;

  VocabLseSpec spec() const { return {first_row, vocab_size, cut}; }
};

KernelTable kernels() {
  KernelTable table;
  add_linear_cross_entropy_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(const Case& c) {
  Random random(static_cast<uint64_t>(c.T), static_cast<uint64_t>(c.vocab_size));
  std::vector<int32_t> labels;
  for (int64_t t = 0; t < c.T; ++t) {
    const auto label = static_cast<int32_t>(random.next_below(static_cast<uint64_t>(c.vocab_size)));
    labels.push_back(random.next_below(4) == 0 ? kIgnoredLabel : label);
  }
  return testing::list_inputs(
      TestInput{testing::random_tensor(c.dtype, {c.T, c.H}, random), Role::kValue, "x"},
      TestInput{testing::random_tensor(c.dtype, {c.num_rows, c.H}, random, 0.7), Role::kWeight,
                "weight"},
      TestInput{testing::tensor_of_i32({c.T}, labels), Role::kConstant, "labels"});
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    all.push_back({0, 4, 0, 7, 7, {}, dtype});
    all.push_back({1, 1, 3, 1, 5, {}, dtype});
    all.push_back({7, 16, 20, 33, 60, {3, 10}, dtype});
    all.push_back({33, 31, 0, 257, 1000, {32, 64}, dtype});
    all.push_back({20, 8, 743, 257, 1000, {}, dtype});
    all.push_back({9, 5, 40, 0, 100, {4, 4}, dtype});
    all.push_back({20, 8, 743, 257, 1000, {.softcap = 4}, dtype});
  }
  return all;
}

/// The logits of one token, in double.
std::vector<double> logits_of(const Case& c, const std::vector<TestInput>& inputs, int64_t token) {
  const std::vector<double> x = testing::to_doubles(inputs[0].tensor);
  const std::vector<double> weight = testing::to_doubles(inputs[1].tensor);
  std::vector<double> logits(c.num_rows);
  for (int64_t v = 0; v < c.num_rows; ++v) {
    for (int64_t h = 0; h < c.H; ++h) logits[v] += x[token * c.H + h] * weight[v * c.H + h];
    if (c.cut.softcap > 0) logits[v] = c.cut.softcap * std::tanh(logits[v] / c.cut.softcap);
  }
  return logits;
}

TEST(VocabLse, MatchesTheDefinition) {
  for (const Case& c : cases()) {
    const std::vector<TestInput> inputs = make_inputs(c);
    const auto outputs = testing::run_operator(*make_vocab_lse(c.spec()), kernels(), inputs);
    const auto labels = inputs[2].tensor.get().span<int32_t>();
    for (int64_t t = 0; t < c.T; ++t) {
      const std::vector<double> logits = logits_of(c, inputs, t);
      double sum = 0;
      for (const double logit : logits) sum += std::exp(logit);
      const double lse = outputs[0].get().as<float>()[t];
      if (c.num_rows == 0) {
        EXPECT_EQ(lse, -std::numeric_limits<double>::infinity());
      } else {
        EXPECT_NEAR(lse, std::log(sum), 3e-6 * (1 + std::abs(std::log(sum))));
      }
      const int64_t row = labels[t] - c.first_row;
      const bool is_here = labels[t] >= 0 && row >= 0 && row < c.num_rows;
      const double logit = is_here ? logits[row] : 0.0;
      EXPECT_NEAR(outputs[1].get().as<float>()[t], logit, 3e-6 * (1 + std::abs(logit)));
    }
  }
}

TEST(VocabLse, FiniteDifferences) {
  for (const Case& c : {Case{6, 5, 4, 9, 20, {4, 4}}, Case{1, 3, 0, 2, 2, {}},
                        Case{9, 4, 10, 40, 50, {3, 16}}, Case{9, 4, 10, 40, 50, {.softcap = 2}}}) {
    testing::check_gradients(make_vocab_lse(c.spec()), kernels(), make_inputs(c));
  }
}

TEST(VocabLse, NoRowsGiveNoGradient) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Case c{5, 8, 3, 0, 10, {}, dtype};
    std::vector<TestInput> inputs = make_inputs(c);
    inputs.push_back(
        {testing::tensor_of({5}, std::vector<float>(5, -INFINITY)), Role::kConstant, "lse"});
    inputs.push_back(
        {testing::tensor_of({5}, std::vector<float>(5, 0.0F)), Role::kConstant, "grad_lse"});
    inputs.push_back(
        {testing::tensor_of({5}, std::vector<float>(5, 1.0F)), Role::kConstant, "grad_label"});
    const auto grads = testing::run_operator(VocabLseBackward(c.spec()), kernels(), inputs);
    for (const double grad : testing::to_doubles(grads[0])) EXPECT_EQ(grad, 0.0);
  }
}

TEST(VocabLse, RefusesLabelsOutsideTheWholeVocabulary) {
  const Case c{3, 4, 5, 5, 20, {}};
  for (const int32_t bad : {20, -1, -101}) {
    std::vector<TestInput> inputs = make_inputs(c);
    inputs[2].tensor = testing::tensor_of_i32({3}, {19, bad, kIgnoredLabel});
    EXPECT_THAT([&] { testing::run_operator(*make_vocab_lse(c.spec()), kernels(), inputs); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(
                    fmt::format("token 1 is {}, outside the vocabulary of 20", bad))));
  }
}

TEST(VocabLse, ShapeRule) {
  const ValueType x{DType::kBF16, {6, 4}};
  const ValueType weight{DType::kBF16, {10, 4}};
  const ValueType labels{DType::kI32, {6}};
  const OperatorPtr op = make_vocab_lse({.first_row = 5, .vocab_size = 15});
  const std::vector<ValueType> inputs = {x, weight, labels};
  const std::vector<ValueType> outputs = op->infer(inputs);
  EXPECT_EQ(outputs, (std::vector<ValueType>(2, {DType::kF32, {6}})));
  EXPECT_EQ(op->cost(inputs, outputs).flops, 2.0 * 6 * 4 * 10);
  EXPECT_EQ(op->attributes(), fmt::format("first_row=5 vocab=15 chunk_tokens=512 block_vocab={}",
                                          CrossEntropySpec::default_block_vocab()));
  const auto refuses = [&](size_t idx, const ValueType& type) {
    std::vector<ValueType> wrong = inputs;
    wrong[idx] = type;
    EXPECT_THROW(op->infer(wrong), UserError) << type.to_string();
  };
  refuses(0, with_last_dim(x, 5));
  refuses(1, {DType::kBF16, {11, 4}});
  refuses(1, with_dtype(weight, DType::kF32));
  refuses(2, {DType::kI32, {5}});
  EXPECT_THROW(make_vocab_lse({.first_row = 3, .vocab_size = 2}), UserError);
  EXPECT_THROW(make_vocab_lse({.first_row = 0, .vocab_size = 0}), UserError);
  EXPECT_THROW(make_vocab_lse({.vocab_size = 4, .cut = {.chunk_tokens = 0}}), UserError);
}

}  // namespace
}  // namespace tessera
