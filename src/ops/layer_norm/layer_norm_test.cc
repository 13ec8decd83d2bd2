#include "ops/layer_norm/layer_norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <omp.h>

#include <cmath>

#include "ops/testing/addend_check.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_layer_norm_cpu(table);
  return table;
}

TEST(LayerNorm, NormsEachRow) {
  constexpr double kEps = 1e-3;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape :
         {Shape{0, 4}, Shape{1, 1}, Shape{3, 5}, Shape{7, 16}, Shape{2, 131}}) {
      Random random(72, 1);
      const int64_t size = shape[1];
      const auto inputs = list_inputs(
          TestInput{random_tensor(dtype, shape, random, 2.0), Role::kConstant, "x"},
          TestInput{random_tensor(DType::kF32, {size}, random), Role::kConstant, "weight"},
          TestInput{random_tensor(DType::kF32, {size}, random), Role::kConstant, "bias"});
      const auto x = to_doubles(inputs[0].tensor);
      const auto weight = to_doubles(inputs[1].tensor);
      const auto bias = to_doubles(inputs[2].tensor);
      std::vector<float> expected(x.size());
      for (size_t begin = 0; begin < x.size(); begin += size) {
        double mean = 0;
        double squares = 0;
        for (int64_t i = 0; i < size; ++i) mean += x[begin + i] / static_cast<double>(size);
        for (int64_t i = 0; i < size; ++i) squares += std::pow(x[begin + i] - mean, 2);
        const double root = std::sqrt(squares / static_cast<double>(size) + kEps);
        for (int64_t i = 0; i < size; ++i)
          expected[begin + i] =
              static_cast<float>((x[begin + i] - mean) / root * weight[i] + bias[i]);
      }
      const auto outputs = run_operator(LayerNorm(kEps), kernels(), inputs);
      expect_rows_near(outputs[0], tensor_of(shape, expected), dtype == DType::kF32 ? 2e-6 : 4e-3,
                       shape.to_string());
    }
  }
}

std::vector<TestInput> make_inputs(const Shape& shape, DType dtype, Random& random) {
  return list_inputs(
      TestInput{random_tensor(dtype, shape, random), Role::kValue, "x"},
      TestInput{random_tensor(DType::kF32, {shape[1]}, random), Role::kWeight, "weight"},
      TestInput{random_tensor(DType::kF32, {shape[1]}, random), Role::kWeight, "bias"});
}

TEST(LayerNorm, GradientsAgainstFiniteDifferences) {
  for (const Shape& shape : {Shape{6, 9}, Shape{40, 5}, Shape{3, 64}}) {
    Random random(73, 1);
    check_gradients(make_layer_norm(1e-5), kernels(), make_inputs(shape, DType::kF32, random));
  }
}

/// By the definition in double: of BF16 operands too, rounded once.
TEST(LayerNorm, GradientsMatchTheDefinition) {
  constexpr double kEps = 1e-3;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape : {Shape{0, 4}, Shape{3, 5}, Shape{1100, 48}, Shape{2, 131}}) {
      Random random(74, static_cast<uint64_t>(shape[0]));
      const int64_t size = shape[1];
      const auto inputs = make_inputs(shape, dtype, random);
      std::vector<OwnedTensor> given(1);
      given[0] = random_tensor(dtype, shape, random);
      const auto x = to_doubles(inputs[0].tensor);
      const auto weight = to_doubles(inputs[1].tensor);
      const auto grad = to_doubles(given[0]);
      std::vector<float> of_x(x.size());
      std::vector<double> of_weight(size), of_bias(size);
      for (size_t begin = 0; begin < x.size(); begin += size) {
        double mean = 0, squares = 0, sum = 0, dot = 0;
        for (int64_t i = 0; i < size; ++i) mean += x[begin + i] / static_cast<double>(size);
        for (int64_t i = 0; i < size; ++i) squares += std::pow(x[begin + i] - mean, 2);
        const double root = std::sqrt(squares / static_cast<double>(size) + kEps);
        for (int64_t i = 0; i < size; ++i) {
          const double n = (x[begin + i] - mean) / root;
          of_weight[i] += grad[begin + i] * n;
          of_bias[i] += grad[begin + i];
          sum += grad[begin + i] * weight[i] / static_cast<double>(size);
          dot += grad[begin + i] * weight[i] * n / static_cast<double>(size);
        }
        for (int64_t i = 0; i < size; ++i)
          of_x[begin + i] = static_cast<float>(
              (grad[begin + i] * weight[i] - sum - (x[begin + i] - mean) / root * dot) / root);
      }
      const auto found = run_gradients(make_layer_norm(kEps), kernels(), inputs, given);
      const auto expect = [&](int idx, const Shape& of, const auto& values, double tolerance) {
        expect_rows_near(found[idx],
                         tensor_of(of, std::vector<float>(values.begin(), values.end())), tolerance,
                         shape.to_string());
      };
      expect(0, shape, of_x, dtype == DType::kF32 ? 4e-6 : 6e-3);
      expect(1, {size}, of_weight, 1e-5);
      expect(2, {size}, of_bias, 1e-5);
    }
  }
}

TEST(LayerNorm, BackwardAddsAnAddendBeforeRounding) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape : {Shape{0, 8}, Shape{1, 5}, Shape{17, 64}, Shape{200, 33}}) {
      SCOPED_TRACE(fmt::format("{} {}", dtype_name(dtype), shape.to_string()));
      Random random(75, static_cast<uint64_t>(shape[0]));
      auto inputs = make_inputs(shape, dtype, random);
      inputs[2] = {random_tensor(dtype, shape, random), Role::kConstant, "grad"};
      check_addend(LayerNormBackward(1e-5), kernels(), std::move(inputs));
    }
  }
}

TEST(LayerNorm, BitsDoNotDependOnThreads) {
  Random random(76, 1);
  const auto inputs = make_inputs({1500, 70}, DType::kF32, random);
  const int before = omp_get_max_threads();
  std::vector<std::vector<OwnedTensor>> results;
  for (const int threads : {1, 2, 3}) {
    omp_set_num_threads(threads);
    Random of_grad(77, 1);
    std::vector<OwnedTensor> given(1);
    given[0] = random_tensor(DType::kF32, {1500, 70}, of_grad);
    results.push_back(run_gradients(make_layer_norm(1e-5), kernels(), inputs, given));
  }
  omp_set_num_threads(before);
  for (const size_t run : {1, 2}) {
    for (const int input : {0, 1, 2})
      expect_bitwise_equal(results[run][input], results[0][input], "a gradient");
  }
}

TEST(LayerNorm, ShapeRule) {
  const ValueType x{DType::kBF16, {8, 12}, 0, 3};
  const ValueType vector{DType::kF32, {12}};
  EXPECT_EQ(make_layer_norm(0)->infer(std::vector{x, vector, vector})[0], x);
  const auto refuses = [](const std::vector<ValueType>& wrong, const char* message) {
    EXPECT_THAT([&] { LayerNorm(0).infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses({x}, "layer_norm: takes x, weight and bias, got 1 inputs");
  refuses({x, vector, with_dtype(vector, DType::kBF16)}, "weight and bias must be f32 [12]");
  refuses({with_dtype(x, DType::kI32), vector, vector}, "x must be f32 or bf16 [T, D]");
  EXPECT_THROW(make_layer_norm(-1), UserError);
}

}  // namespace
}  // namespace tessera::testing
