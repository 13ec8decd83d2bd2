#include "ops/grad_norm/grad_norm.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <array>
#include <cmath>
#include <limits>

#include "core/memory.h"
#include "core/random.h"

namespace tessera {
namespace {

std::vector<double> run_all(std::vector<std::vector<float>> xs) {
  const OperatorPtr op = make_sum_of_squares();
  KernelTable kernels;
  add_grad_norm_cpu(kernels);
  std::vector<Tensor> inputs;
  std::vector<ValueType> types;
  for (std::vector<float>& x : xs) {
    inputs.push_back(view(std::span(x), {static_cast<int64_t>(x.size())}));
    types.push_back({.dtype = DType::kF32, .shape = inputs.back().shape});
  }
  const Buffer workspace(SumOfSquares::workspace_bytes(types), "a test");
  const OwnedTensor output(DType::kF64, {std::ssize(xs)});
  const Tensor outputs[] = {output};
  kernels.at("sum_of_squares")(
      *op, {.inputs = inputs, .outputs = outputs, .workspace = workspace.bytes()});
  const auto sums = output.get().span<double>();
  return {sums.begin(), sums.end()};
}

double run(const std::vector<float>& x) {
  return run_all({x})[0];
}

std::vector<float> random_values(int64_t n, uint64_t seed) {
  Random random(seed, 7);
  std::vector<float> x(n);
  for (float& value : x) value = static_cast<float>(random.next_normal());
  return x;
}

TEST(SumOfSquares, MatchesLongDouble) {
  for (const int64_t n : {0, 1, 7, 31, 32, 33, 1000, 16383, 16384, 16385, 100003}) {
    const std::vector<float> x = random_values(n, static_cast<uint64_t>(n));
    long double expected = 0;
    for (const float value : x) expected += static_cast<long double>(value) * value;
    EXPECT_NEAR(run(x), static_cast<double>(expected), 1e-13 * static_cast<double>(expected)) << n;
  }
}

TEST(SumOfSquares, EveryElementCounts) {
  for (const size_t n : {1, 33, 100, 16390}) {
    for (size_t i = 0; i<n; i += n> 1000 ? 97 : 1) {
      std::vector<float> x(n, 0.0F);
      x[i] = 3.0F;
      EXPECT_EQ(run(x), 9.0) << "element " << i << " of " << n;
    }
  }
}

TEST(SumOfSquares, OfSeveralTensorsAreThoseOfEach) {
  std::vector<std::vector<float>> xs;
  std::vector<double> expected;
  for (const int64_t n : {40000, 0, 1, 16385}) {
    xs.push_back(random_values(n, static_cast<uint64_t>(n)));
    expected.push_back(run(xs.back()));
  }
  EXPECT_EQ(run_all(xs), expected);
}

/// BF16 values give the bits of the same numbers in F32, beside tensors of those.
TEST(SumOfSquares, OfBf16IsThatOfTheSameNumbersInF32) {
  for (const int64_t n : {0, 1, 7, 33, 16384, 16391, 100003}) {
    std::vector<float> x = random_values(n, static_cast<uint64_t>(n));
    std::vector<Bf16> narrow;
    for (float& value : x) {
      narrow.emplace_back(value);
      value = narrow.back();
    }
    std::vector<float> other = random_values(40, 5);
    const std::vector<double> expected = run_all({x, other});
    const Tensor inputs[] = {{narrow.data(), DType::kBF16, {n}}, view(std::span(other), {40})};
    const ValueType types[] = {{DType::kBF16, {n}}, {DType::kF32, {40}}};
    const Buffer workspace(SumOfSquares::workspace_bytes(types), "a test");
    std::vector<double> sums(2);
    const Tensor output = view(std::span(sums), {2});
    KernelTable kernels;
    add_grad_norm_cpu(kernels);
    kernels.at("sum_of_squares")(
        *make_sum_of_squares(),
        {.inputs = inputs, .outputs = std::span(&output, 1), .workspace = workspace.bytes()});
    EXPECT_EQ(sums, expected) << n;
  }
}

TEST(SumOfSquares, DoesNotDependOnThreads) {
  const std::vector<float> x = random_values(300001, 3);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const double serial = run(x);
  for (const int count : {2, 3, 5}) {
    omp_set_num_threads(count);
    EXPECT_EQ(run(x), serial) << count << " threads";
  }
  omp_set_num_threads(threads);
}

TEST(SumOfSquares, LargeFiniteValuesDoNotOverflow) {
  const double largest = std::numeric_limits<float>::max();
  EXPECT_EQ(run({static_cast<float>(largest), 0.0F}), largest * largest);
}

TEST(SumOfSquares, NanAndInfinityShow) {
  for (const size_t position : {0, 20000, 40000}) {
    std::vector<float> x = random_values(40001, 5);
    x[position] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(std::isnan(run(x)));
    x[position] = -std::numeric_limits<float>::infinity();
    EXPECT_TRUE(std::isinf(run(x)));
  }
}

struct Clip {
  double norm, factor;
  float scale, found_inf;
};

Clip clip(std::vector<double> sums, double grad_scale, double max_norm,
          std::vector<float> losses = {}) {
  KernelTable kernels;
  add_grad_norm_cpu(kernels);
  std::array<double, 2> limits = {grad_scale, max_norm};
  std::vector<Tensor> inputs = {view(std::span(sums), {std::ssize(sums)}),
                                view(std::span<double>(limits), {2})};
  for (float& loss : losses) inputs.push_back(view(std::span(&loss, 1), {1}));
  std::array<double, 2> norm = {-1, -1};
  std::array<float, 2> scale = {-1, -1};
  const Tensor outputs[] = {view(std::span<double>(norm), {2}), view(std::span<float>(scale), {2})};
  kernels.at("grad_clip")(*make_grad_clip(),
                          {.inputs = inputs, .outputs = outputs, .workspace = {}});
  return {norm[0], norm[1], scale[0], scale[1]};
}

TEST(GradClip, ClipsToTheLargestNorm) {
  const Clip above = clip({9, 16}, 2, 5);
  EXPECT_EQ(above.norm, 10);
  EXPECT_EQ(above.factor, 5 / (10 + 1e-6));
  EXPECT_EQ(above.scale, static_cast<float>(2 * above.factor));
  EXPECT_EQ(above.found_inf, 0);
  EXPECT_EQ(clip({9, 16}, 1, 0).factor, 1);
  EXPECT_EQ(clip({9, 16}, -1, 100).scale, -1);
  EXPECT_EQ(clip({}, 0.5, 1, {1, 2}).norm, 0);
  EXPECT_EQ(clip({}, 0.5, 1, {1, 2}).scale, 0.5F);
}

TEST(GradClip, FindsWhatIsNotFinite) {
  const double infinity = std::numeric_limits<double>::infinity();
  const Clip of_norm = clip({1, infinity}, 1, 1, {0});
  EXPECT_EQ(of_norm.norm, infinity);
  EXPECT_EQ(of_norm.factor, 1);
  EXPECT_EQ(of_norm.found_inf, 1);
  EXPECT_TRUE(std::isnan(clip({std::nan(""), 1}, 1, 1).norm));
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    const Clip of_loss = clip({4}, 1, 1, {1, bad, 2});
    EXPECT_TRUE(std::isnan(of_loss.norm));
    EXPECT_EQ(of_loss.found_inf, 1);
    EXPECT_EQ(of_loss.factor, 1);
  }
}

TEST(GradClip, RefusesOtherTypes) {
  const ValueType sums = {.dtype = DType::kF64, .shape = {3}};
  const ValueType limits = {.dtype = DType::kF64, .shape = {2}};
  const ValueType loss = {.dtype = DType::kF32, .shape = {1}};
  EXPECT_EQ(make_grad_clip()->infer(std::vector{sums, limits, loss, loss}).size(), 2U);
  EXPECT_THROW(make_grad_clip()->infer(std::vector{sums}), UserError);
  EXPECT_THROW(make_grad_clip()->infer(std::vector{loss, limits}), UserError);
  EXPECT_THROW(make_grad_clip()->infer(std::vector{sums, sums}), UserError);
  EXPECT_THROW(make_grad_clip()->infer(std::vector{sums, limits, limits}), UserError);
}

TEST(SumOfSquares, RefusesOtherTypes) {
  const std::vector<ValueType> f64 = {{.dtype = DType::kF64, .shape = {4}}};
  const std::vector<ValueType> matrix = {{.dtype = DType::kF32, .shape = {4, 4}}};
  EXPECT_THROW(make_sum_of_squares()->infer(f64), UserError);
  EXPECT_THROW(make_sum_of_squares()->infer(matrix), UserError);
}

}  // namespace
}  // namespace tessera
