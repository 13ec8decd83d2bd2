#include "ops/attention/attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <limits>
#include <numeric>

#include "ops/attention/attention_reference.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::expect_bitwise_equal;
using testing::random_tensor;
using testing::ReferenceAttention;
using testing::Role;
using testing::TestInput;
using testing::to_doubles;

KernelTable kernels() {
  KernelTable table;
  add_attention_cpu(table);
  return table;
}

struct Case {
  AttentionSpec spec;
  std::vector<int64_t> lengths;
  DType dtype = DType::kF32;
  double deviation = 1.0;

  int64_t num_tokens() const { return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}); }
  std::string to_string() const {
    std::string text =
        fmt::format("N={}/{} D={}/{} window={} {} lengths", spec.num_heads, spec.num_kv_heads,
                    spec.head_size, spec.head_size_v, spec.window, dtype_name(dtype));
    for (const int64_t length : lengths) text += fmt::format(" {}", length);
    return text;
  }
};

std::vector<int32_t> cumulative(const std::vector<int64_t>& lengths) {
  std::vector<int32_t> ends = {0};
  for (const int64_t length : lengths) ends.push_back(ends.back() + static_cast<int32_t>(length));
  return ends;
}

OwnedTensor copy_tensor(const Tensor& tensor) {
  OwnedTensor copy(tensor.dtype, tensor.shape);
  std::memcpy(copy.get().data, tensor.data, tensor.num_bytes());
  return copy;
}

TestInput input(OwnedTensor tensor, const std::string& name, Role role = Role::kValue) {
  return {std::move(tensor), role, name};
}

/// A case with its random inputs and its expected results.
struct Problem {
  OperatorPtr op;
  std::vector<TestInput> inputs;  ///< q, k, v, cu_seqlens
  OwnedTensor grad_o;
  OwnedTensor grad_lse;
  ReferenceAttention exact;

  explicit Problem(const Case& test, uint64_t seed = 1) : op(make_attention(test.spec)) {
    const AttentionSpec& spec = static_cast<const Attention&>(*op).spec();
    Random random(seed, 7);
    const int64_t tokens = test.num_tokens();
    const auto make = [&](int64_t width, double deviation) {
      return random_tensor(test.dtype, {tokens, width}, random, deviation);
    };
    inputs.push_back(input(make(spec.num_heads * spec.head_size, test.deviation), "q"));
    inputs.push_back(input(make(spec.num_kv_heads * spec.head_size, test.deviation), "k"));
    inputs.push_back(input(make(spec.num_kv_heads * spec.head_size_v, 1.0), "v"));
    const std::vector<int32_t> ends = cumulative(test.lengths);
    inputs.push_back(input(testing::tensor_of_i32({static_cast<int64_t>(ends.size())}, ends),
                           "cu_seqlens", Role::kConstant));
    grad_o = make(spec.num_heads * spec.head_size_v, 1.0);
    grad_lse = random_tensor(DType::kF32, {spec.num_heads, tokens}, random);
    exact = {.spec = spec,
             .lengths = test.lengths,
             .q = to_doubles(inputs[0].tensor),
             .k = to_doubles(inputs[1].tensor),
             .v = to_doubles(inputs[2].tensor)};
  }

  std::vector<OwnedTensor> forward() const { return testing::run_operator(*op, kernels(), inputs); }

  /// The backward operator alone, given the forward's results; with the gradient of lse.
  std::vector<OwnedTensor> backward(const std::vector<OwnedTensor>& outputs) const {
    std::vector<TestInput> all;
    for (int i = 0; i < 3; ++i) all.push_back(input(copy_tensor(inputs[i].tensor), "qkv"));
    for (const OwnedTensor& output : outputs) all.push_back(input(copy_tensor(output), "output"));
    all.push_back(input(copy_tensor(grad_o), "grad_o"));
    all.push_back(input(copy_tensor(inputs[3].tensor), "cu_seqlens"));
    all.push_back(input(copy_tensor(grad_lse), "grad_lse"));
    const auto& spec = static_cast<const Attention&>(*op).spec();
    return testing::run_operator(*make_attention_backward(spec, true), kernels(), all);
  }
};

double norm(std::span<const double> values) {
  double sum = 0;
  for (const double x : values) sum += x * x;
  return std::sqrt(sum);
}

/// Each row of each head errs at most `tolerance` of its norm. Gradients of queries nearly cancel
/// in some rows; therefore the root mean square of all rows' norms counts too, once.
void expect_close(const Tensor& actual, const std::vector<double>& expected, int64_t head_size,
                  double tolerance, const std::string& what) {
  const size_t width = head_size;
  const std::vector<double> values = to_doubles(actual);
  ASSERT_EQ(values.size(), expected.size()) << what;
  const double num_rows = static_cast<double>(values.size()) / static_cast<double>(head_size);
  const double typical = norm(expected) / std::sqrt(std::max(1.0, num_rows));
  for (size_t at = 0; at < values.size(); at += width) {
    std::vector<double> difference(width);
    for (size_t i = 0; i < width; ++i) difference[i] = values[at + i] - expected[at + i];
    const double size = norm(std::span(expected).subspan(at, width)) + typical;
    EXPECT_LE(norm(difference), tolerance * size) << what << ", row " << at / width;
  }
}

void expect_matches_reference(const Case& test) {
  SCOPED_TRACE(test.to_string());
  Problem problem(test);
  const AttentionSpec& spec = problem.exact.spec;
  const auto outputs = problem.forward();
  problem.exact.run_forward();
  expect_close(outputs[0], problem.exact.o, spec.head_size_v, 2e-6, "o");
  ASSERT_EQ(outputs[1].get().shape, (Shape{spec.num_heads, test.num_tokens()}));
  const auto lse = to_doubles(outputs[1]);
  for (size_t i = 0; i < lse.size(); ++i) EXPECT_NEAR(lse[i], problem.exact.lse[i], 1e-5) << i;
  const auto grads = problem.backward(outputs);
  problem.exact.run_backward(to_doubles(problem.grad_o), to_doubles(problem.grad_lse));
  expect_close(grads[0], problem.exact.grad_q, spec.head_size, 1e-5, "grad_q");
  expect_close(grads[1], problem.exact.grad_k, spec.head_size, 1e-5, "grad_k");
  expect_close(grads[2], problem.exact.grad_v, spec.head_size_v, 1e-5, "grad_v");
}

AttentionSpec heads(int64_t num_heads, int64_t num_kv_heads, int64_t head_size,
                    int64_t head_size_v = 0, int64_t window = 0) {
  return {.num_heads = num_heads,
          .num_kv_heads = num_kv_heads,
          .head_size = head_size,
          .head_size_v = head_size_v,
          .window = window};
}

TEST(AttentionTest, HeadSizes) {
  for (const int64_t size : {1, 8, 16, 24, 32, 33, 64, 80, 128}) {
    expect_matches_reference({heads(2, 1, size), {37, 140}});
  }
}

TEST(AttentionTest, GroupedHeads) {
  for (const int64_t group : {1, 2, 3, 4, 8}) {
    expect_matches_reference({heads(2 * group, 2, 16), {5, 131, 64}});
  }
  expect_matches_reference({heads(100, 1, 8), {3, 20}});
}

TEST(AttentionTest, ValuesOfAnotherSize) {
  expect_matches_reference({heads(4, 2, 24, 40), {150}});
  expect_matches_reference({heads(2, 2, 64, 16), {90, 3}});
  expect_matches_reference({heads(2, 1, 5, 129), {50}});
}

TEST(AttentionTest, Lengths) {
  for (const auto& lengths : std::vector<std::vector<int64_t>>{{},
                                                               {0},
                                                               {1},
                                                               {0, 1, 0, 2, 0},
                                                               {95, 96, 97},
                                                               {191, 192, 193},
                                                               {127, 128, 129},
                                                               {1, 300, 0, 7},
                                                               {257}}) {
    expect_matches_reference({heads(2, 2, 16), lengths});
    expect_matches_reference({heads(3, 1, 16), lengths});
  }
}

TEST(AttentionTest, Windows) {
  for (const int64_t window : {1, 2, 31, 32, 100, 128, 129, 1000}) {
    expect_matches_reference({heads(2, 1, 16, 0, window), {300, 1, 33}});
  }
}

TEST(AttentionTest, RandomCases) {
  Random random(3, 11);
  for (int i = 0; i < 40; ++i) {
    const auto draw = [&](int64_t bound) {
      return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
    };
    const int64_t kv_heads = 1 + draw(3);
    AttentionSpec spec = heads(kv_heads * (1 + draw(5)), kv_heads, 1 + draw(70), draw(70));
    if (draw(2) == 0) spec.window = 1 + draw(200);
    if (draw(3) == 0) spec.scale = 0.01 + random.next_uniform();
    std::vector<int64_t> lengths(draw(4));
    for (int64_t& length : lengths) length = draw(2) == 0 ? draw(5) : draw(200);
    expect_matches_reference({spec, lengths});
  }
}

TEST(AttentionTest, LargeScoresStayFinite) {
  const Case test{heads(2, 1, 32), {200}, DType::kF32, 60.0};
  Problem problem(test);
  const auto outputs = problem.forward();
  problem.exact.run_forward();
  expect_close(outputs[0], problem.exact.o, 32, 2e-2, "o");
  for (const OwnedTensor& grad : problem.backward(outputs)) {
    EXPECT_THAT(to_doubles(grad),
                ::testing::Each(::testing::Truly([](double x) { return std::isfinite(x); })));
  }
}

TEST(AttentionTest, ScoresFarBelowZeroStayFinite) {
  Problem problem({heads(1, 1, 16), {40}});
  for (float& x : problem.inputs[0].tensor.get().span<float>()) x = 100.0F;
  for (float& x : problem.inputs[1].tensor.get().span<float>()) x = -100.0F;
  const auto outputs = problem.forward();
  for (int64_t i = 0; i < 40; ++i) {
    EXPECT_NEAR(outputs[1].get().as<float>()[i], -40000.0 + std::log(i + 1.0), 0.02);
  }
}

TEST(AttentionTest, NanReachesOnlyTheQueriesThatSeeIt) {
  Problem problem({heads(1, 1, 16), {40, 10}});
  problem.inputs[1].tensor.get().as<float>()[20 * 16] = std::numeric_limits<float>::quiet_NaN();
  const auto o = to_doubles(problem.forward()[0]);
  for (size_t i = 0; i < 50; ++i) EXPECT_EQ(std::isnan(o[i * 16]), i >= 20 && i < 40) << i;
}

TEST(AttentionTest, KeysOfOtherSequencesDoNotMatter) {
  Problem problem({heads(2, 1, 16), {70, 50}});
  const auto before = problem.forward();
  const auto k = problem.inputs[1].tensor.get().span<float>();
  for (size_t i = 0; i < size_t{70} * 16; ++i) k[i] = 3.0F;
  const auto after = problem.forward();
  const size_t row = size_t{2} * 16;
  EXPECT_EQ(std::memcmp(before[0].get().as<float>() + 70 * row,
                        after[0].get().as<float>() + 70 * row, 50 * row * sizeof(float)),
            0);
}

/// Each row errs at most twice what a naive computation errs that rounds where BF16 must.
void expect_at_most_twice(const Tensor& actual, const std::vector<double>& naive,
                          const std::vector<double>& exact, const std::string& what) {
  const auto values = to_doubles(actual);
  const size_t width = actual.shape.last();
  for (size_t row = 0; row * width < values.size(); ++row) {
    double error = 0;
    double naive_error = 0;
    double norm = 0;
    for (size_t i = row * width; i < (row + 1) * width; ++i) {
      error += (values[i] - exact[i]) * (values[i] - exact[i]);
      naive_error += (naive[i] - exact[i]) * (naive[i] - exact[i]);
      norm += exact[i] * exact[i];
    }
    // Half a unit of BF16 on top, for rows that the naive computation happens to hit exactly.
    EXPECT_LE(std::sqrt(error), 2 * std::sqrt(naive_error) + std::sqrt(norm) / 512)
        << what << ", row " << row;
  }
}

TEST(AttentionTest, Bf16ErrsAtMostTwiceTheNaiveError) {
  for (const Case& test : {Case{heads(2, 2, 64), {130, 1, 0, 70}, DType::kBF16},
                           Case{heads(4, 1, 33, 17), {150}, DType::kBF16},
                           Case{heads(6, 2, 80, 0, 50), {120, 99}, DType::kBF16}}) {
    SCOPED_TRACE(test.to_string());
    Problem problem(test);
    ReferenceAttention naive = problem.exact;
    naive.round = testing::round_bf16;
    naive.run_forward();
    problem.exact.run_forward();
    const auto outputs = problem.forward();
    expect_at_most_twice(outputs[0], naive.o, problem.exact.o, "o");
    const auto grads = problem.backward(outputs);
    const auto grad_o = to_doubles(problem.grad_o);
    const auto grad_lse = to_doubles(problem.grad_lse);
    naive.run_backward(grad_o, grad_lse);
    problem.exact.run_backward(grad_o, grad_lse);
    expect_at_most_twice(grads[0], naive.grad_q, problem.exact.grad_q, "grad_q");
    expect_at_most_twice(grads[1], naive.grad_k, problem.exact.grad_k, "grad_k");
    expect_at_most_twice(grads[2], naive.grad_v, problem.exact.grad_v, "grad_v");
  }
}

TEST(AttentionTest, SameBitsForAnyNumberOfThreads) {
  const int before = omp_get_max_threads();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Problem problem({heads(4, 2, 32), {200, 3, 0, 150}, dtype});
    omp_set_num_threads(1);
    const auto outputs = problem.forward();
    const auto grads = problem.backward(outputs);
    for (const int threads : {2, 5}) {
      omp_set_num_threads(threads);
      const auto again = problem.forward();
      const auto grads_again = problem.backward(outputs);
      for (size_t i = 0; i < 2; ++i) expect_bitwise_equal(again[i], outputs[i], "output");
      for (size_t i = 0; i < 3; ++i) expect_bitwise_equal(grads_again[i], grads[i], "gradient");
    }
  }
  omp_set_num_threads(before);
}

TEST(AttentionTest, GradientsMatchFiniteDifferences) {
  const Problem plain({heads(4, 2, 8), {5, 0, 9}});
  testing::check_gradients(plain.op, kernels(), plain.inputs);
  const Problem other({heads(2, 1, 6, 10, 4), {11, 1}});
  testing::check_gradients(other.op, kernels(), other.inputs);
}

TEST(AttentionTest, GradientOfTheOutputAlone) {
  const Problem problem({heads(2, 1, 8), {12}});
  testing::check_gradients(problem.op, kernels(), problem.inputs, {.outputs = {0}});
}

TEST(AttentionTest, RefusesBadLengths) {
  const auto run = [](const std::vector<int32_t>& ends) {
    Problem problem({heads(1, 1, 8), {4, 4}});
    problem.inputs[3].tensor = testing::tensor_of_i32({static_cast<int64_t>(ends.size())}, ends);
    problem.forward();
  };
  const auto message = [&](const std::vector<int32_t>& ends) -> std::string {
    try {
      run(ends);
    } catch (const UserError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(message({1, 4, 8}), ::testing::HasSubstr("starts at 1"));
  EXPECT_THAT(message({0, 4, 7}), ::testing::HasSubstr("ends at 7"));
  EXPECT_THAT(message({0, 4, 9}), ::testing::HasSubstr("ends at 9"));
  EXPECT_THAT(message({0, 6, 2, 8}), ::testing::HasSubstr("falls from 6 to 2"));
  EXPECT_EQ(message({0, 0, 8, 8}), "accepted");
}

TEST(AttentionTest, RefusesBadSpecs) {
  EXPECT_THROW(make_attention(heads(6, 4, 8)), UserError);
  EXPECT_THROW(make_attention(heads(0, 1, 8)), UserError);
  EXPECT_THROW(make_attention(heads(2, 0, 8)), UserError);
  EXPECT_THROW(make_attention(heads(2, 1, 0)), UserError);
  EXPECT_THROW(make_attention(heads(2, 1, 8, -1)), UserError);
  EXPECT_THROW(make_attention(heads(2, 1, 8, 0, -5)), UserError);
  EXPECT_THROW(make_attention({.scale = -1}), UserError);
  EXPECT_THROW(make_attention({.scale = std::numeric_limits<double>::quiet_NaN()}), UserError);
  EXPECT_THROW(make_attention({.sequence_length = -1}), UserError);
}

TEST(AttentionTest, RefusesShapesThatDoNotFit) {
  const OperatorPtr op = make_attention(heads(4, 2, 8, 16));
  const ValueType q{DType::kF32, {10, 32}};
  const ValueType k{DType::kF32, {10, 16}};
  const ValueType v{DType::kF32, {10, 32}};
  const ValueType ends{DType::kI32, {3}};
  const auto infer = [&](const std::vector<ValueType>& inputs) { return op->infer(inputs); };
  EXPECT_EQ(infer({q, k, v, ends})[0].shape, (Shape{10, 64}));
  EXPECT_THROW(infer({q, k, v}), UserError);
  EXPECT_THROW(infer({k, k, v, ends}), UserError);
  EXPECT_THROW(infer({q, q, v, ends}), UserError);
  EXPECT_THROW(infer({q, k, k, ends}), UserError);
  EXPECT_THROW(infer({q, with_dtype(k, DType::kBF16), v, ends}), UserError);
  EXPECT_THROW(infer({with_dtype(q, DType::kI32), k, v, ends}), UserError);
  EXPECT_THROW(infer({q, {DType::kF32, {9, 16}}, {DType::kF32, {9, 32}}, ends}), UserError);
  EXPECT_THROW(infer({q, k, v, with_dtype(ends, DType::kI64)}), UserError);
  EXPECT_THROW(infer({q, k, v, {DType::kI32, {0}}}), UserError);
}

TEST(AttentionTest, CostCountsVisiblePairs) {
  const auto flops = [](AttentionSpec spec) {
    const std::vector<ValueType> in = {{DType::kF32, {12, 16}},
                                       {DType::kF32, {12, 8}},
                                       {DType::kF32, {12, 4}},
                                       {DType::kI32, {4}}};
    const OperatorPtr op = make_attention(spec);
    return op->cost(in, op->infer(in)).flops;
  };
  AttentionSpec spec = heads(2, 1, 8, 4);
  EXPECT_EQ(flops(spec), 2.0 * (8 + 4) * 2 * (12 * 13 / 2));
  spec.sequence_length = 4;
  EXPECT_EQ(flops(spec), 2.0 * (8 + 4) * 2 * 3 * (4 * 5 / 2));
  spec.window = 2;
  EXPECT_EQ(flops(spec), 2.0 * (8 + 4) * 2 * 3 * (1 + 2 + 2 + 2));
}

}  // namespace
}  // namespace tessera
