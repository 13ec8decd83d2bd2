#include "ops/rmsnorm/rmsnorm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>

#include "ops/testing/addend_check.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

constexpr double kEps = 1e-5;

KernelTable kernels() {
  KernelTable table;
  add_rmsnorm_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(const Shape& shape, DType dtype, Random& random) {
  std::vector<TestInput> inputs;
  inputs.push_back({random_tensor(dtype, shape, random), Role::kValue, "x"});
  inputs.push_back({random_tensor(DType::kF32, {shape.last()}, random), Role::kWeight, "weight"});
  return inputs;
}

/// Plain loops in double; the gradient through the definition, one derivative at a time.
struct Reference {
  std::vector<float> y, rstd, grad_x, grad_weight;

  Reference(const std::vector<TestInput>& inputs, const Tensor& grad) {
    const auto x = to_doubles(inputs[0].tensor);
    const auto weight = to_doubles(inputs[1].tensor);
    const auto g = to_doubles(grad);
    const size_t hidden = weight.size();
    std::vector<double> weight_sums(hidden, 0.0);
    for (size_t begin = 0; begin < x.size(); begin += hidden) {
      double squares = 0, dot = 0;
      for (size_t i = 0; i < hidden; ++i) squares += x[begin + i] * x[begin + i];
      const double r = 1.0 / std::sqrt(squares / static_cast<double>(hidden) + kEps);
      rstd.push_back(static_cast<float>(r));
      for (size_t i = 0; i < hidden; ++i) {
        y.push_back(static_cast<float>(x[begin + i] * r * weight[i]));
        dot += g[begin + i] * weight[i] * x[begin + i];
        weight_sums[i] += g[begin + i] * x[begin + i] * r;
      }
      for (size_t i = 0; i < hidden; ++i) {
        const double through_rstd = x[begin + i] * r * r * r * dot / static_cast<double>(hidden);
        grad_x.push_back(static_cast<float>(r * weight[i] * g[begin + i] - through_rstd));
      }
    }
    grad_weight.assign(weight_sums.begin(), weight_sums.end());
  }
};

std::vector<OwnedTensor> run_backward(const std::vector<TestInput>& inputs,
                                      const OwnedTensor& grad) {
  std::vector<OwnedTensor> grads(2);
  grads[0] = OwnedTensor(grad.get().dtype, grad.get().shape);
  std::copy_n(static_cast<const std::byte*>(grad.get().data), grad.get().num_bytes(),
              static_cast<std::byte*>(grads[0].get().data));
  return run_gradients(make_rmsnorm(kEps), kernels(), inputs, grads);
}

/// A copy of the same elements in another shape.
OwnedTensor reshaped(const Tensor& from, const Shape& shape) {
  OwnedTensor result(from.dtype, shape);
  std::copy_n(static_cast<const std::byte*>(from.data), from.num_bytes(),
              static_cast<std::byte*>(result.get().data));
  return result;
}

void check_case(const Shape& shape, DType dtype) {
  SCOPED_TRACE(fmt::format("{} {}", dtype_name(dtype), shape.to_string()));
  Random random(11, static_cast<uint64_t>(shape.num_elements()));
  const auto inputs = make_inputs(shape, dtype, random);
  const OwnedTensor grad = random_tensor(dtype, shape, random);
  const Reference expected(inputs, grad);
  const double tolerance = dtype == DType::kF32 ? 2e-6 : 4e-3;
  const auto outputs = run_operator(*make_rmsnorm(kEps), kernels(), inputs);
  expect_rows_near(outputs[0], tensor_of(shape, expected.y), tolerance, "y");
  const Shape rows(shape.dims().first(shape.rank() - 1));
  EXPECT_EQ(outputs[1].get().shape, rows);
  expect_rows_near(outputs[1], tensor_of(rows, expected.rstd), 1e-6, "rstd");
  const auto grads = run_backward(inputs, grad);
  // One feature gives x · rstd = 1 up to eps, and a gradient that cancels to almost nothing.
  if (shape.last() > 1) {
    expect_rows_near(grads[0], tensor_of(shape, expected.grad_x), 2 * tolerance, "grad x");
  }
  expect_rows_near(grads[1], tensor_of({shape.last()}, expected.grad_weight), 5e-6, "grad weight");
}

TEST(RmsNorm, MatchesAReferenceInAllShapes) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape : {Shape{0, 8}, Shape{1, 1}, Shape{3, 5}, Shape{17, 64}, Shape{200, 33},
                               Shape{1100, 48}, Shape{2, 3, 16}, Shape{3, 0, 7}}) {
      check_case(shape, dtype);
    }
  }
}

TEST(RmsNorm, HeadsOfARowAreRowsOfTheirOwn) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t tokens : {0, 1, 19}) {
      Random random(14, static_cast<uint64_t>(tokens));
      auto by_head = make_inputs({tokens * 3, 20}, dtype, random);
      const OwnedTensor grad = random_tensor(dtype, {tokens * 3, 20}, random);
      const auto expected = run_operator(*make_rmsnorm(kEps), kernels(), by_head);
      const auto expected_grads = run_backward(by_head, grad);
      by_head[0].tensor = reshaped(by_head[0].tensor, {tokens, 60});
      const auto outputs = run_operator(*make_rmsnorm(kEps), kernels(), by_head);
      EXPECT_EQ(outputs[0].get().shape, (Shape{tokens, 60}));
      EXPECT_EQ(outputs[1].get().shape, (Shape{tokens, 3}));
      const auto grads = run_backward(by_head, reshaped(grad, {tokens, 60}));
      expect_bitwise_equal(reshaped(outputs[0], {tokens * 3, 20}), expected[0], "y");
      expect_bitwise_equal(reshaped(grads[0], {tokens * 3, 20}), expected_grads[0], "grad x");
      expect_bitwise_equal(grads[1], expected_grads[1], "grad weight");
    }
  }
}

TEST(RmsNorm, GradientsAgainstFiniteDifferences) {
  Random random(12, 1);
  check_gradients(make_rmsnorm(kEps), kernels(), make_inputs({6, 9}, DType::kF32, random),
                  {.outputs = {0}});
}

TEST(RmsNorm, BackwardAddsAnAddendBeforeRounding) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape : {Shape{0, 8}, Shape{1, 5}, Shape{17, 64}, Shape{200, 33}}) {
      SCOPED_TRACE(fmt::format("{} {}", dtype_name(dtype), shape.to_string()));
      Random random(15, static_cast<uint64_t>(shape[0]));
      auto inputs = make_inputs(shape, dtype, random);
      inputs.push_back({random_tensor(DType::kF32, {shape[0]}, random), Role::kConstant, "rstd"});
      inputs.push_back({random_tensor(dtype, shape, random), Role::kConstant, "grad"});
      check_addend(RmsNormBackward(), kernels(), std::move(inputs));
    }
  }
}

TEST(RmsNorm, ZeroRowsStayFinite) {
  std::vector<TestInput> inputs;
  inputs.push_back({tensor_of({1, 3}, {0, 0, 0}), Role::kValue, "x"});
  inputs.push_back({tensor_of({3}, {1, 2, 3}), Role::kWeight, "weight"});
  const auto outputs = run_operator(*make_rmsnorm(kEps), kernels(), inputs);
  expect_bitwise_equal(outputs[0], inputs[0].tensor, "y of a zero row");
}

TEST(RmsNorm, BitsDoNotDependOnThreads) {
  Random random(13, 1);
  const auto inputs = make_inputs({1500, 70}, DType::kF32, random);
  const OwnedTensor grad = random_tensor(DType::kF32, {1500, 70}, random);
  const int before = omp_get_max_threads();
  std::vector<std::vector<OwnedTensor>> results;
  for (const int threads : {1, 2, 3}) {
    omp_set_num_threads(threads);
    results.push_back(run_backward(inputs, grad));
  }
  omp_set_num_threads(before);
  for (const size_t run : {1, 2}) {
    expect_bitwise_equal(results[run][0], results[0][0], "grad x");
    expect_bitwise_equal(results[run][1], results[0][1], "grad weight");
  }
}

TEST(RmsNorm, ShapeRule) {
  const auto op = make_rmsnorm(kEps);
  const ValueType x{DType::kBF16, {8, 16}, 0, 3};
  const ValueType weight{DType::kF32, {16}};
  const ValueType types[] = {x, weight};
  EXPECT_EQ(op->infer(types)[0], x);
  EXPECT_EQ(op->infer(types)[1], (ValueType{DType::kF32, {8}, 0, 3}));
  EXPECT_EQ(op->attributes(), "eps=1e-05");
  const auto refuses = [&](const std::vector<ValueType>& wrong, const char* message) {
    EXPECT_THAT([&] { op->infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses({x, with_dtype(weight, DType::kBF16)}, "rmsnorm: the weight must be f32 [16]");
  refuses({x, {DType::kF32, {15}}},
          "rmsnorm: the weight must be f32 [16], or of a divisor's size, got f32 [15]");
  refuses({weight, weight}, "rmsnorm: x must be f32 or bf16 of at least two dims");
  refuses({x}, "rmsnorm: takes x and weight, got 1 inputs");
  EXPECT_THROW(make_rmsnorm(-1.0), UserError);
}

}  // namespace
}  // namespace tessera::testing
