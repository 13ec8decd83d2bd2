#include "ops/activation/activation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ops/dequantize/scaled_reader_testing.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

constexpr Activation kAllKinds[] = {
    Activation::kSwiGLU,   Activation::kGeGLU,     Activation::kGeGLUTanh,     Activation::kGelu,
    Activation::kGeluTanh, Activation::kSwiGLUOai, Activation::kSwiGLUClamped, Activation::kRelu2};

KernelTable kernels() {
  KernelTable table;
  add_activation_cpu(table);
  return table;
}

double function_of(Activation kind, double x) {
  switch (kind) {
    case Activation::kSwiGLU:
      return x / (1.0 + std::exp(-x));
    case Activation::kGeGLU:
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeGLUTanh:
    case Activation::kGeluTanh:
      return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kSwiGLUOai: {
      const double clamped = std::min(x, 7.0);
      return clamped / (1.0 + std::exp(-1.702 * clamped));
    }
    case Activation::kSwiGLUClamped:
      return std::min(x, 10.0) / (1.0 + std::exp(-std::min(x, 10.0)));
    case Activation::kRelu2:
      return std::pow(std::max(x, 0.0), 2);
  }
  return 0;
}

/// The other factor of a gated activation.
double other_of(Activation kind, double up) {
  if (kind == Activation::kSwiGLUClamped) return std::clamp(up, -10.0, 10.0);
  return kind == Activation::kSwiGLUOai ? std::clamp(up, -7.0, 7.0) + 1.0 : up;
}

/// Where a gated activation's inputs are clamped.
double limit_of(Activation kind) {
  if (kind == Activation::kSwiGLUClamped) return 10.0;
  return kind == Activation::kSwiGLUOai ? 7.0 : std::numeric_limits<double>::infinity();
}

double other_derivative_of(Activation kind, double up) {
  return std::abs(up) > limit_of(kind) ? 0.0 : 1.0;
}

/// By a central difference in double, whose error is about 1e-10; up to a clamp's border by the
/// function that goes on behind it.
double derivative_of(Activation kind, double x) {
  constexpr double kStep = 1e-5;
  if (std::isfinite(limit_of(kind))) {
    const double gain = kind == Activation::kSwiGLUOai ? 1.702 : 1.0;
    const auto unclamped = [&](double at) { return at / (1.0 + std::exp(-gain * at)); };
    return x > limit_of(kind) ? 0.0 : (unclamped(x + kStep) - unclamped(x - kStep)) / (2.0 * kStep);
  }
  return (function_of(kind, x + kStep) - function_of(kind, x - kStep)) / (2.0 * kStep);
}

struct Reference {
  std::vector<float> y, grad_x;

  Reference(Activation kind, const Tensor& input, const Tensor& grad) {
    const auto x = to_doubles(input);
    const auto g = to_doubles(grad);
    const size_t width = grad.shape.last();
    grad_x.resize(x.size());
    for (size_t i = 0; i < g.size(); ++i) {
      const size_t at = is_gated(kind) ? i / width * 2 * width + i % width : i;
      const double up = is_gated(kind) ? other_of(kind, x[at + width]) : 1.0;
      y.push_back(static_cast<float>(function_of(kind, x[at]) * up));
      grad_x[at] = static_cast<float>(derivative_of(kind, x[at]) * up * g[i]);
      if (!is_gated(kind)) continue;
      grad_x[at + width] = static_cast<float>(function_of(kind, x[at]) * g[i] *
                                              other_derivative_of(kind, x[at + width]));
    }
  }
};

void check_case(Activation kind, int64_t tokens, int64_t width, DType dtype) {
  SCOPED_TRACE(
      fmt::format("{} T {} F {} {}", activation_name(kind), tokens, width, dtype_name(dtype)));
  Random random(31, static_cast<uint64_t>(tokens * 1000 + width));
  const Shape x_shape{tokens, is_gated(kind) ? 2 * width : width};
  std::vector<TestInput> inputs;
  inputs.push_back({random_tensor(dtype, x_shape, random, 3.0), Role::kValue, "x"});
  std::vector<OwnedTensor> grad;
  grad.push_back(random_tensor(dtype, {tokens, width}, random));
  const Reference expected(kind, inputs[0].tensor, grad[0]);
  const double tolerance = dtype == DType::kF32 ? 2e-6 : 4e-3;
  const auto outputs = run_operator(*make_activation(kind), kernels(), inputs);
  expect_rows_near(outputs[0], tensor_of({tokens, width}, expected.y), tolerance, "y");
  const auto grads = run_gradients(make_activation(kind), kernels(), inputs, grad);
  expect_rows_near(grads[0], tensor_of(x_shape, expected.grad_x), tolerance, "grad x");
}

TEST(Activation, MatchesAReferenceInAllShapes) {
  const int64_t shapes[][2] = {{0, 4}, {1, 2}, {3, 5}, {9, 64}, {40, 77}};
  for (const Activation kind : kAllKinds) {
    for (const auto& [tokens, width] : shapes) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) check_case(kind, tokens, width, dtype);
    }
  }
}

TEST(Activation, GradientsAgainstFiniteDifferences) {
  for (const Activation kind : kAllKinds) {
    Random random(32, static_cast<uint64_t>(kind));
    std::vector<TestInput> inputs;
    inputs.push_back({random_tensor(DType::kF32, {4, 6}, random, 1.5), Role::kValue, "x"});
    check_gradients(make_activation(kind), kernels(), inputs);
  }
}

TEST(Activation, ShapeRule) {
  const ValueType x{DType::kBF16, {8, 12}, 0, 3};
  const ValueType types[] = {x};
  EXPECT_EQ(make_activation(Activation::kSwiGLU)->infer(types)[0], with_last_dim(x, 6));
  EXPECT_EQ(make_activation(Activation::kGelu)->infer(types)[0], x);
  EXPECT_EQ(make_activation(Activation::kGeGLU)->attributes(), "geglu");
  const auto refuses = [](const std::vector<ValueType>& wrong, const char* message) {
    EXPECT_THAT([&] { make_activation(Activation::kSwiGLU)->infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses({with_last_dim(x, 13)}, "activation: swiglu splits the features in two halves");
  refuses({with_dtype(x, DType::kI32)}, "activation: x must be f32 or bf16 [T, features]");
  refuses({x, x}, "activation: takes one input, got 2");
}

TEST(Activation, GradientsOfFp8AreThoseOfWhatItStandsFor) {
  Random random(8, 10);
  const Backend backend(kernels());
  for (const Activation kind : kAllKinds) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Shape& shape : {Shape{0, 16}, Shape{1, 2}, Shape{7, 300}}) {
        const OwnedTensor x = random_tensor(dtype, shape, random);
        const OwnedTensor grad =
            random_tensor(dtype, {shape[0], shape[1] / (is_gated(kind) ? 2 : 1)}, random);
        for (const QuantizeSpec& spec : scaled_reader_specs())
          expect_reads_scaled(ActivationBackward(kind), ActivationBackward::kX,
                              {x.get(), grad.get()}, spec, backend);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::testing
