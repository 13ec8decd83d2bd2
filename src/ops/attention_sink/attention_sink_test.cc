#include "ops/attention_sink/attention_sink.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/attention/attention.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_attention_sink_cpu(table);
  add_attention_cpu(table);
  return table;
}

struct SinkCase {
  AttentionSinkSpec spec;
  int64_t num_tokens;
  int64_t head_size;
};

std::vector<SinkCase> sink_cases() {
  return {{{.num_heads = 1, .num_sinks = 1}, 1, 1},
          {{.num_heads = 3, .num_sinks = 3}, 0, 8},
          {{.num_heads = 3, .num_sinks = 3}, 17, 7},
          {{.num_heads = 2, .num_sinks = 8, .first_head = 4}, 40, 33},
          {{.num_heads = 4, .num_sinks = 4}, 130, 16}};
}

std::vector<TestInput> make_inputs(const SinkCase& c, DType dtype, Random& random) {
  const AttentionSinkSpec& s = c.spec;
  return list_inputs(
      TestInput{random_tensor(dtype, {c.num_tokens, s.num_heads * c.head_size}, random),
                Role::kValue, "o"},
      TestInput{random_tensor(DType::kF32, {s.num_heads, c.num_tokens}, random, 2.0), Role::kValue,
                "lse"},
      TestInput{random_tensor(DType::kF32, {s.num_sinks}, random), Role::kWeight, "sinks"});
}

TEST(AttentionSink, IsThePlainFormula) {
  Random random(1, 2);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const SinkCase& c : sink_cases()) {
      const auto inputs = make_inputs(c, dtype, random);
      const auto o = to_doubles(inputs[0].tensor);
      const auto lse = to_doubles(inputs[1].tensor);
      const auto sinks = to_doubles(inputs[2].tensor);
      std::vector<float> expected;
      for (size_t i = 0; i < o.size(); ++i) {
        const auto head = static_cast<int64_t>(i) / c.head_size % c.spec.num_heads;
        const auto token = static_cast<int64_t>(i) / c.head_size / c.spec.num_heads;
        const double distance = sinks[c.spec.first_head + head] - lse[head * c.num_tokens + token];
        expected.push_back(static_cast<float>(o[i] / (1 + std::exp(distance))));
      }
      const auto y = run_operator(*make_attention_sink(c.spec), kernels(), inputs);
      expect_rows_near(y[0], tensor_of(inputs[0].tensor.get().shape, expected),
                       dtype == DType::kF32 ? 1e-6 : 4e-3, "y");
    }
  }
}

TEST(AttentionSink, Gradients) {
  Random random(3, 4);
  for (const SinkCase& c : sink_cases())
    check_gradients(make_attention_sink(c.spec), kernels(), make_inputs(c, DType::kF32, random));
}

/// A sink whose logit is far below all others takes nothing, one far above all; neither overflows.
TEST(AttentionSink, Extremes) {
  const auto run = [](float sink) {
    const auto inputs = list_inputs(TestInput{tensor_of({1, 2}, {3, -4}), Role::kValue, "o"},
                                    TestInput{tensor_of({1, 1}, {1}), Role::kValue, "lse"},
                                    TestInput{tensor_of({1}, {sink}), Role::kWeight, "sinks"});
    return to_doubles(
        run_operator(*make_attention_sink({.num_heads = 1, .num_sinks = 1}), kernels(), inputs)[0]);
  };
  EXPECT_EQ(run(-1000), (std::vector<double>{3, -4}));
  EXPECT_EQ(run(1000), (std::vector<double>{0, 0}));
}

/// Behind attention it is a softmax over the keys and one logit more, whose value is zero.
TEST(AttentionSink, IsOneLogitMoreInTheSoftmax) {
  constexpr int64_t kTokens = 9;
  constexpr int64_t kSize = 5;
  Random random(5, 6);
  const auto inputs = list_inputs(
      TestInput{random_tensor(DType::kF32, {kTokens, kSize}, random), Role::kConstant, "q"},
      TestInput{random_tensor(DType::kF32, {kTokens, kSize}, random), Role::kConstant, "k"},
      TestInput{random_tensor(DType::kF32, {kTokens, kSize}, random), Role::kConstant, "v"},
      TestInput{tensor_of_i32({2}, {0, kTokens}), Role::kConstant, "cu_seqlens"});
  auto attended = run_operator(
      *make_attention({.num_heads = 1, .num_kv_heads = 1, .head_size = kSize, .scale = 1.0}),
      kernels(), inputs);
  const float sink = 0.7F;
  const auto with_sink = list_inputs(TestInput{std::move(attended[0]), Role::kConstant, "o"},
                                     TestInput{std::move(attended[1]), Role::kConstant, "lse"},
                                     TestInput{tensor_of({1}, {sink}), Role::kConstant, "sinks"});
  const auto y =
      run_operator(*make_attention_sink({.num_heads = 1, .num_sinks = 1}), kernels(), with_sink);
  const auto q = to_doubles(inputs[0].tensor);
  const auto k = to_doubles(inputs[1].tensor);
  const auto v = to_doubles(inputs[2].tensor);
  std::vector<float> expected;
  for (int64_t t = 0; t < kTokens; ++t) {
    double sum = std::exp(static_cast<double>(sink));
    std::vector<double> row(kSize);
    for (int64_t j = 0; j <= t; ++j) {
      double score = 0;
      for (int64_t d = 0; d < kSize; ++d) score += q[t * kSize + d] * k[j * kSize + d];
      sum += std::exp(score);
      for (int64_t d = 0; d < kSize; ++d) row[d] += std::exp(score) * v[j * kSize + d];
    }
    for (const double value : row) expected.push_back(static_cast<float>(value / sum));
  }
  expect_rows_near(y[0], tensor_of({kTokens, kSize}, expected), 2e-6, "attention with a sink");
}

TEST(AttentionSink, RefusesWhatDoesNotFit) {
  EXPECT_THROW(make_attention_sink({.num_heads = 2, .num_sinks = 3, .first_head = 2}), UserError);
  const OperatorPtr op = make_attention_sink({.num_heads = 2, .num_sinks = 2});
  const ValueType o{DType::kBF16, {5, 8}};
  const ValueType lse{DType::kF32, {2, 5}};
  const ValueType sinks{DType::kF32, {2}};
  EXPECT_EQ(op->infer(std::vector{o, lse, sinks}), std::vector{o});
  const auto refuses = [&](const std::vector<ValueType>& wrong) {
    EXPECT_THROW(op->infer(wrong), UserError);
  };
  refuses({o, lse});
  refuses({{DType::kBF16, {5, 7}}, lse, sinks});
  refuses({o, {DType::kF32, {5, 2}}, sinks});
  refuses({o, lse, {DType::kF32, {3}}});
}

}  // namespace
}  // namespace tessera::testing
