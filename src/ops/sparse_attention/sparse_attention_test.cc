#include "ops/sparse_attention/sparse_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <cstring>
#include <numeric>

#include "ops/attention/attention_reference.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_sparse_attention_cpu(table);
  return table;
}

OwnedTensor copy_of(const Tensor& tensor) {
  OwnedTensor copy(tensor.dtype, tensor.shape);
  if (tensor.num_bytes() > 0) std::memcpy(copy.get().data, tensor.data, tensor.num_bytes());
  return copy;
}

TestInput input(OwnedTensor tensor, const std::string& name, Role role = Role::kValue) {
  return {std::move(tensor), role, name};
}

using Choice = std::vector<std::vector<int32_t>>;

OwnedTensor tensor_of_choice(const Choice& choice, int64_t top_k) {
  std::vector<int32_t> rows;
  for (const auto& own : choice) {
    rows.insert(rows.end(), own.begin(), own.end());
    rows.resize(rows.size() + top_k - own.size(), -1);
  }
  return tensor_of_i32({std::ssize(choice), top_k}, rows);
}

/// All that tokens of packed sequences see.
Choice all_seen(const std::vector<int64_t>& lengths) {
  Choice choice;
  int32_t begin = 0;
  for (const int64_t length : lengths) {
    for (int64_t i = 0; i < length; ++i) {
      choice.emplace_back(i + 1);
      std::iota(choice.back().begin(), choice.back().end(), begin);
    }
    begin += static_cast<int32_t>(length);
  }
  return choice;
}

/// At most `top_k` of them, at random.
Choice some_seen(const std::vector<int64_t>& lengths, int64_t top_k, Random& random) {
  Choice choice = all_seen(lengths);
  for (auto& rows : choice) {
    while (std::ssize(rows) > top_k)
      rows.erase(rows.begin() + static_cast<int64_t>(random.next_below(rows.size())));
  }
  return choice;
}

AttentionSpec heads(int64_t num_heads, int64_t num_kv_heads, int64_t head_size,
                    int64_t head_size_v = 0) {
  return {.num_heads = num_heads,
          .num_kv_heads = num_kv_heads,
          .head_size = head_size,
          .head_size_v = head_size_v};
}

struct Problem {
  AttentionSpec spec;
  std::vector<TestInput> inputs;  ///< q, k, v, chosen
  OwnedTensor grad_o, grad_lse;

  Problem(const AttentionSpec& given, const Choice& choice, int64_t top_k,
          DType dtype = DType::kF32)
      : spec(SparseAttention(given).spec()) {
    Random random(3, 5);
    const int64_t tokens = std::ssize(choice);
    const auto make = [&](int64_t width) { return random_tensor(dtype, {tokens, width}, random); };
    inputs.push_back(input(make(spec.num_heads * spec.head_size), "q"));
    inputs.push_back(input(make(spec.num_kv_heads * spec.head_size), "k"));
    inputs.push_back(input(make(spec.num_kv_heads * spec.head_size_v), "v"));
    inputs.push_back(input(tensor_of_choice(choice, top_k), "chosen", Role::kConstant));
    grad_o = make(spec.num_heads * spec.head_size_v);
    grad_lse = random_tensor(DType::kF32, {spec.num_heads, tokens}, random);
  }

  std::vector<OwnedTensor> forward() const {
    return run_operator(SparseAttention(spec), kernels(), inputs);
  }
  std::vector<OwnedTensor> backward(const std::vector<OwnedTensor>& outputs) const {
    std::vector<TestInput> all;
    for (int i = 0; i < 3; ++i) all.push_back(input(copy_of(inputs[i].tensor), "qkv"));
    for (const OwnedTensor& output : outputs) all.push_back(input(copy_of(output), "output"));
    all.push_back(input(copy_of(grad_o), "grad_o"));
    all.push_back(input(copy_of(inputs[3].tensor), "chosen"));
    all.push_back(input(copy_of(grad_lse), "grad_lse"));
    return run_operator(SparseAttentionBackward(spec, true), kernels(), all);
  }
};

double norm(std::span<const double> values) {
  double sum = 0;
  for (const double x : values) sum += x * x;
  return std::sqrt(sum);
}

/// As attention's own test bounds rows of heads.
void expect_close(const Tensor& actual, const std::vector<double>& expected, int64_t head_size,
                  double tolerance, const std::string& what) {
  const std::vector<double> values = to_doubles(actual);
  ASSERT_EQ(values.size(), expected.size()) << what;
  const auto width = static_cast<size_t>(head_size);
  const double rows = static_cast<double>(values.size()) / static_cast<double>(width);
  const double typical = norm(expected) / std::sqrt(std::max(1.0, rows));
  for (size_t at = 0; at < values.size(); at += width) {
    std::vector<double> difference(width);
    for (size_t i = 0; i < width; ++i) difference[i] = values[at + i] - expected[at + i];
    EXPECT_LE(norm(difference),
              tolerance * (norm(std::span(expected).subspan(at, width)) + typical))
        << what << ", row " << at / width;
  }
}

/// Where all that is seen is chosen it is attention.
void expect_dense(const AttentionSpec& given, const std::vector<int64_t>& lengths,
                  double tolerance = 1e-5, DType dtype = DType::kF32) {
  SCOPED_TRACE(fmt::format("N={}/{} D={}/{} of {} sequences", given.num_heads, given.num_kv_heads,
                           given.head_size, given.head_size_v, lengths.size()));
  const int64_t longest = lengths.empty() ? 1 : *std::ranges::max_element(lengths);
  const Problem problem(given, all_seen(lengths), longest + 2, dtype);
  const AttentionSpec& spec = problem.spec;
  ReferenceAttention exact{.spec = spec,
                           .lengths = lengths,
                           .q = to_doubles(problem.inputs[0].tensor),
                           .k = to_doubles(problem.inputs[1].tensor),
                           .v = to_doubles(problem.inputs[2].tensor)};
  exact.run_forward();
  exact.run_backward(to_doubles(problem.grad_o), to_doubles(problem.grad_lse));
  const auto outputs = problem.forward();
  expect_close(outputs[0], exact.o, spec.head_size_v, tolerance / 5, "o");
  const auto lse = to_doubles(outputs[1]);
  for (size_t i = 0; i < lse.size(); ++i) EXPECT_NEAR(lse[i], exact.lse[i], tolerance) << i;
  const auto grads = problem.backward(outputs);
  expect_close(grads[0], exact.grad_q, spec.head_size, tolerance, "grad_q");
  expect_close(grads[1], exact.grad_k, spec.head_size, tolerance, "grad_k");
  expect_close(grads[2], exact.grad_v, spec.head_size_v, tolerance, "grad_v");
}

TEST(SparseAttention, IsAttentionWhereAllIsChosen) {
  for (const auto& lengths : std::vector<std::vector<int64_t>>{
           {}, {0}, {1}, {0, 1, 0, 2, 0}, {17}, {31, 32, 33}, {1, 70, 0, 7}}) {
    expect_dense(heads(2, 2, 16), lengths);
    expect_dense(heads(6, 2, 24, 10), lengths);
    expect_dense(heads(3, 1, 5, 33), lengths);
  }
  expect_dense(heads(2, 2, 48, 32), {40, 3}, 2e-2, DType::kBF16);
}

TEST(SparseAttention, GradientsMatchFiniteDifferences) {
  Random random(8, 1);
  for (const int64_t top_k : {1, 3, 4, 9}) {
    const Problem plain(heads(4, 2, 8), some_seen({5, 0, 11}, top_k, random), top_k);
    check_gradients(make_sparse_attention(plain.spec), kernels(), plain.inputs);
    const Problem other(heads(2, 2, 6, 10), some_seen({13, 1}, top_k, random), top_k);
    check_gradients(make_sparse_attention(other.spec), kernels(), other.inputs, {.outputs = {0}});
  }
}

/// Keys behind the tokens' own, such as those of compressed tokens.
TEST(SparseAttention, GradientsOfMoreKeysThanQueries) {
  Random random(8, 2);
  const Choice choice = {{}, {0, 6}, {1, 4, 5, 6}, {0, 1, 2, 3}};
  for (const int64_t rows : {7, 9}) {
    Problem problem(heads(4, 1, 6), choice, 4);
    for (const int idx : {1, 2})
      problem.inputs[idx].tensor = random_tensor(DType::kF32, {rows, 6}, random);
    check_gradients(make_sparse_attention(problem.spec), kernels(), problem.inputs);
  }
}

/// The choice decides: keys that are not chosen may be anything.
TEST(SparseAttention, OtherKeysDoNotMatter) {
  const Choice choice = {{0}, {0}, {0, 2}, {2, 3}};
  const Problem before(heads(2, 1, 8), choice, 2);
  Problem after(heads(2, 1, 8), choice, 2);
  for (const int idx : {1, 2}) {
    float* row = after.inputs[idx].tensor.get().as<float>() + 8;
    std::fill_n(row, 8, std::numeric_limits<float>::quiet_NaN());
  }
  const auto outputs = before.forward();
  const auto again = after.forward();
  for (size_t i = 0; i < 2; ++i) expect_bitwise_equal(again[i], outputs[i], "output");
  const auto grads = before.backward(outputs);
  const auto grads_again = after.backward(outputs);
  for (size_t i = 0; i < 3; ++i) expect_bitwise_equal(grads_again[i], grads[i], "gradient");
}

/// Keys in other rows, as pages have them, and fewer queries than keys give the same bits.
TEST(SparseAttention, RowsMayLieAnywhere) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Random random(9, 1);
    constexpr int64_t kTokens = 20;
    const Choice choice = some_seen({kTokens}, 7, random);
    const Problem packed(heads(4, 1, 24, 16), choice, 7, dtype);
    const auto expected = packed.forward();
    const auto moved = [](int32_t row) { return (row * 7 + 3) % 64; };
    Choice elsewhere = {choice.end() - 5, choice.end()};
    for (auto& rows : elsewhere) std::ranges::transform(rows, rows.begin(), moved);
    std::vector<TestInput> inputs;
    for (int i = 0; i < 3; ++i) {
      const Tensor& from = packed.inputs[i].tensor;
      const int64_t bytes = from.shape[1] * dtype_size(dtype);
      OwnedTensor to(dtype, {i == 0 ? 5 : 64, from.shape[1]});
      const auto* source = static_cast<const std::byte*>(from.data);
      auto* target = static_cast<std::byte*>(to.get().data);
      for (int32_t row = 0; row < kTokens; ++row) {
        if (i > 0) std::memcpy(target + moved(row) * bytes, source + row * bytes, bytes);
        if (i == 0 && row >= kTokens - 5)
          std::memcpy(target + (row - kTokens + 5) * bytes, source + row * bytes, bytes);
      }
      inputs.push_back(input(std::move(to), "moved"));
    }
    inputs.push_back(input(tensor_of_choice(elsewhere, 7), "chosen", Role::kConstant));
    const auto outputs = run_operator(SparseAttention(packed.spec), kernels(), inputs);
    const int64_t bytes = 5 * outputs[0].get().shape[1] * dtype_size(dtype);
    EXPECT_EQ(std::memcmp(outputs[0].get().data,
                          static_cast<const std::byte*>(expected[0].get().data) + 3 * bytes, bytes),
              0);
  }
}

TEST(SparseAttention, TokensWithoutKeysGiveZeros) {
  const Problem problem(heads(2, 1, 8), {{}, {1}}, 2);
  const auto outputs = problem.forward();
  for (int i = 0; i < 16; ++i) EXPECT_EQ(outputs[0].get().as<float>()[i], 0);
  EXPECT_EQ(outputs[1].get().as<float>()[0], 0);
  for (const OwnedTensor& grad : problem.backward(outputs)) {
    for (const double x : to_doubles(grad)) EXPECT_TRUE(std::isfinite(x));
  }
}

TEST(SparseAttention, SameBitsForAnyNumberOfThreads) {
  const int before = omp_get_max_threads();
  Random random(10, 1);
  const Problem problem(heads(4, 4, 32), some_seen({90, 3, 0, 50}, 16, random), 16);
  omp_set_num_threads(1);
  const auto outputs = problem.forward();
  const auto grads = problem.backward(outputs);
  omp_set_num_threads(3);
  const auto again = problem.forward();
  const auto grads_again = problem.backward(outputs);
  omp_set_num_threads(before);
  for (size_t i = 0; i < 2; ++i) expect_bitwise_equal(again[i], outputs[i], "output");
  for (size_t i = 0; i < 3; ++i) expect_bitwise_equal(grads_again[i], grads[i], "gradient");
}

TEST(SparseAttention, CountsTheChosen) {
  const auto flops = [](int64_t queries, int64_t keys, int64_t top_k, int64_t length) {
    const std::vector<ValueType> inputs = {{DType::kF32, {queries, 16}},
                                           {DType::kF32, {keys, 16}},
                                           {DType::kF32, {keys, 16}},
                                           {DType::kI32, {queries, top_k}}};
    AttentionSpec spec = heads(2, 2, 8);
    spec.sequence_length = length;
    const SparseAttention op(spec);
    return op.cost(inputs, op.infer(inputs)).flops;
  };
  constexpr double kPair = 2 * 2 * 16;
  EXPECT_EQ(flops(10, 10, 10, 0), kPair * 55);
  EXPECT_EQ(flops(10, 10, 4, 0), kPair * (10 + 6 * 4));
  EXPECT_EQ(flops(10, 10, 4, 5), kPair * 2 * (10 + 4));
  EXPECT_EQ(flops(1, 100, 4, 50), kPair * 4);
}

TEST(SparseAttention, CountsWindowsAndEntries) {
  const auto pairs = [](int64_t tokens, int64_t length, const SparseSight& sight) {
    const std::vector<ValueType> inputs = {{DType::kF32, {tokens, 16}},
                                           {DType::kF32, {tokens + 4, 16}},
                                           {DType::kF32, {tokens + 4, 16}},
                                           {DType::kI32, {tokens, 20}}};
    AttentionSpec spec = heads(2, 2, 8);
    spec.sequence_length = length;
    const SparseAttention op(spec, sight);
    return op.cost(inputs, op.infer(inputs)).flops / (2 * 2 * 16);
  };
  const auto counted = [](int64_t length, const SparseSight& sight) {
    int64_t count = 0;
    for (int64_t n = 1; n <= length; ++n)
      count += std::min(n, sight.window) + std::min(n / sight.rate, sight.entries);
    return static_cast<double>(count);
  };
  for (const SparseSight& sight : {SparseSight{.window = 3, .rate = 4, .entries = 100},
                                   SparseSight{.window = 5, .rate = 1, .entries = 2},
                                   SparseSight{.window = 100, .rate = 7, .entries = 3}}) {
    for (const int64_t length : {1, 3, 8, 30, 43}) {
      EXPECT_NEAR(pairs(length, 0, sight), counted(length, sight), 1e-6) << length;
      EXPECT_NEAR(pairs(4 * length, length, sight), 4 * counted(length, sight), 1e-6) << length;
    }
  }
}

TEST(SparseAttention, RefusesWhatDoesNotFit) {
  const Problem problem(heads(2, 1, 8), {{0}, {2}}, 1);
  EXPECT_THAT([&] { problem.forward(); },
              ::testing::ThrowsMessage<UserError>(::testing::HasSubstr("row 2 is chosen of 2")));
  AttentionSpec window = heads(2, 1, 8);
  window.window = 4;
  EXPECT_THROW(SparseAttention{window}, UserError);
  const ValueType q{DType::kF32, {3, 16}};
  const ValueType k{DType::kF32, {3, 8}};
  const ValueType chosen{DType::kI32, {2, 4}};
  EXPECT_THAT(
      [&] {
        SparseAttention(heads(2, 1, 8)).infer(std::vector{q, k, k, chosen});
      },
      ::testing::ThrowsMessage<UserError>(::testing::HasSubstr("expected i32 [3, K]")));
}

}  // namespace
}  // namespace tessera::testing
