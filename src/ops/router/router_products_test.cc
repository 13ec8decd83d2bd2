#include <gtest/gtest.h>
#include <omp.h>

#include "ops/router/router_testing.h"

namespace tessera {
namespace {

using testing::Role;
using testing::TestInput;

struct Sizes {
  int64_t num_tokens, hidden_size, num_experts;
};

/// Fewer and more experts than a block of tokens makes by itself, and whole and part vectors,
/// tiles, blocks and chunks.
constexpr Sizes kSizes[] = {{1, 1, 1},     {3, 24, 5},    {9, 16, 8},   {70, 48, 9},
                            {64, 200, 16}, {130, 64, 31}, {65, 33, 32}, {70, 40, 33},
                            {600, 24, 40}, {8300, 20, 3}};

OwnedTensor random_tensor(DType dtype, const Shape& shape, uint64_t seed) {
  Random random(seed, static_cast<uint64_t>(shape.num_elements()));
  return testing::random_tensor(dtype, shape, random);
}

/// Runs `check` for all sizes and both types.
template <typename Check>
void for_all_sizes(const Check& check) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Sizes& s : kSizes) {
      SCOPED_TRACE(fmt::format("{} T={} H={} E={}", dtype_name(dtype), s.num_tokens, s.hidden_size,
                               s.num_experts));
      check(dtype, s);
    }
  }
}

/// a [m, k] · b [k, n] in double, of elements that lie as the strides say.
struct Matrix {
  const std::vector<double>& values;
  int64_t row_stride, col_stride;
  double at(int64_t row, int64_t col) const { return values[row * row_stride + col * col_stride]; }
};
OwnedTensor multiply(const Matrix& a, const Matrix& b, int64_t m, int64_t n, int64_t k) {
  OwnedTensor result(DType::kF32, {m, n});
  for (int64_t row = 0; row < m; ++row) {
    for (int64_t col = 0; col < n; ++col) {
      double sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += a.at(row, i) * b.at(i, col);
      result.get().as<float>()[row * n + col] = static_cast<float>(sum);
    }
  }
  return result;
}

TEST(RouterProducts, LogitsOfFewAndOfManyExperts) {
  for_all_sizes([](DType dtype, const Sizes& s) {
    const auto inputs = testing::list_inputs(
        TestInput{random_tensor(dtype, {s.num_tokens, s.hidden_size}, 1), Role::kValue, "x"},
        TestInput{random_tensor(DType::kF32, {s.num_experts, s.hidden_size}, 2), Role::kWeight,
                  "weight"});
    const auto outputs = testing::run_operator(*make_router({.num_experts = s.num_experts}),
                                               testing::router::kernels(), inputs);
    const auto x = testing::to_doubles(inputs[0].tensor);
    const auto weight = testing::to_doubles(inputs[1].tensor);
    const OwnedTensor expected = multiply({x, s.hidden_size, 1}, {weight, 1, s.hidden_size},
                                          s.num_tokens, s.num_experts, s.hidden_size);
    testing::expect_rows_near(outputs[Router::kLogits], expected, 2e-5,
                              "logits");  // a row may cancel
  });
}

std::vector<TestInput> backward_inputs(DType dtype, const Sizes& s) {
  std::vector<int32_t> chosen(s.num_tokens);
  for (int64_t t = 0; t < s.num_tokens; ++t) chosen[t] = static_cast<int32_t>(t % s.num_experts);
  return testing::list_inputs(
      TestInput{random_tensor(dtype, {s.num_tokens, s.hidden_size}, 1), Role::kValue, "x"},
      TestInput{random_tensor(DType::kF32, {s.num_experts, s.hidden_size}, 2), Role::kWeight,
                "weight"},
      TestInput{random_tensor(DType::kF32, {s.num_tokens, s.num_experts}, 3), Role::kConstant,
                "logits"},
      TestInput{testing::tensor_of_i32({s.num_tokens, 1}, chosen), Role::kConstant, "expert_idx"},
      TestInput{random_tensor(DType::kF32, {s.num_tokens, s.num_experts}, 4), Role::kConstant,
                "grad_logits"},
      TestInput{random_tensor(dtype, {s.num_tokens, s.hidden_size}, 5), Role::kConstant, "addend"});
}

std::vector<OwnedTensor> run_backward(const Sizes& s, const std::vector<TestInput>& inputs,
                                      bool x = true, bool weight = true) {
  const RouterGradients gradients{.logits = true, .x = x, .weight = weight, .addend = true};
  return testing::run_operator(RouterBackward({.num_experts = s.num_experts}, gradients),
                               testing::router::kernels(), inputs);
}

/// With gradients of the logits alone these are all that reaches the products.
TEST(RouterProducts, GradientsOfFewAndOfManyExperts) {
  for_all_sizes([](DType dtype, const Sizes& s) {
    const auto inputs = backward_inputs(dtype, s);
    const auto outputs = run_backward(s, inputs);
    const auto x = testing::to_doubles(inputs[0].tensor);
    const auto weight = testing::to_doubles(inputs[1].tensor);
    const auto grad = testing::to_doubles(inputs[4].tensor);
    const auto addend = testing::to_doubles(inputs[5].tensor);
    OwnedTensor dx = multiply({grad, s.num_experts, 1}, {weight, s.hidden_size, 1}, s.num_tokens,
                              s.hidden_size, s.num_experts);
    const auto sums = dx.get().span<float>();
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += static_cast<float>(addend[i]);
    testing::expect_rows_near(outputs[0], dx, dtype == DType::kF32 ? 2e-6 : 8e-3, "dx");
    const OwnedTensor dweight = multiply({grad, 1, s.num_experts}, {x, s.hidden_size, 1},
                                         s.num_experts, s.hidden_size, s.num_tokens);
    testing::expect_rows_near(outputs[1], dweight, 5e-6, "dweight");
  });
}

TEST(RouterProducts, EitherGradientAlone) {
  for (const int64_t num_experts : {8, 40}) {
    const Sizes s{150, 48, num_experts};
    const auto inputs = backward_inputs(DType::kBF16, s);
    const auto both = run_backward(s, inputs);
    const auto x = run_backward(s, inputs, true, false);
    const auto weight = run_backward(s, inputs, false, true);
    ASSERT_EQ(x.size(), 1U);
    ASSERT_EQ(weight.size(), 1U);
    testing::expect_bitwise_equal(x[0], both[0], "dx");
    testing::expect_bitwise_equal(weight[0], both[1], "dweight");
  }
}

TEST(RouterProducts, SumsDoNotDependOnTheThreads) {
  const int before = omp_get_max_threads();
  for (const Sizes& s : {Sizes{700, 48, 8}, Sizes{9000, 16, 32}}) {
    const auto inputs = backward_inputs(DType::kBF16, s);
    omp_set_num_threads(1);
    const auto alone = run_backward(s, inputs);
    omp_set_num_threads(3);
    const auto together = run_backward(s, inputs);
    for (size_t i = 0; i < alone.size(); ++i)
      testing::expect_bitwise_equal(together[i], alone[i], fmt::format("output {}", i));
  }
  omp_set_num_threads(before);
}

}  // namespace
}  // namespace tessera
