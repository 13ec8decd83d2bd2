#include "ops/grad_norm/grad_norm.h"

#include <gtest/gtest.h>
#include <omp.h>

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

TEST(SumOfSquares, RefusesOtherTypes) {
  const std::vector<ValueType> bf16 = {{.dtype = DType::kBF16, .shape = {4}}};
  const std::vector<ValueType> matrix = {{.dtype = DType::kF32, .shape = {4, 4}}};
  EXPECT_THROW(make_sum_of_squares()->infer(bf16), UserError);
  EXPECT_THROW(make_sum_of_squares()->infer(matrix), UserError);
}

}  // namespace
}  // namespace tessera
