#include "ops/activation/activation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ops/dequantize/scaled_reader_testing.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

/// Clamped ones also with limits that most inputs are above.
constexpr ActivationFunction kAllFunctions[] = {
    Activation::kSwiGLU,        Activation::kGeGLU,
    Activation::kGeGLUTanh,     Activation::kGelu,
    Activation::kGeluTanh,      Activation::kRelu2,
    Activation::kSwiGLUOai,     {Activation::kSwiGLUOai, 0.75},
    Activation::kSwiGLUClamped, {Activation::kSwiGLUClamped, 1.25},
};

KernelTable kernels() {
  KernelTable table;
  add_activation_cpu(table);
  return table;
}

/// Where a gated activation's inputs are clamped.
double limit_of(const ActivationFunction& function) {
  return is_clamped(function.kind) ? function.limit : std::numeric_limits<double>::infinity();
}

double function_of(const ActivationFunction& function, double x) {
  switch (function.kind) {
    case Activation::kSwiGLU:
      return x / (1.0 + std::exp(-x));
    case Activation::kGeGLU:
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeGLUTanh:
    case Activation::kGeluTanh:
      return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kSwiGLUOai: {
      const double clamped = std::min(x, limit_of(function));
      return clamped / (1.0 + std::exp(-1.702 * clamped));
    }
    case Activation::kSwiGLUClamped: {
      const double clamped = std::min(x, limit_of(function));
      return clamped / (1.0 + std::exp(-clamped));
    }
    case Activation::kRelu2:
      return std::pow(std::max(x, 0.0), 2);
  }
  return 0;
}

/// The other factor of a gated activation.
double other_of(const ActivationFunction& function, double up) {
  const double limit = limit_of(function);
  return std::clamp(up, -limit, limit) + (function.kind == Activation::kSwiGLUOai ? 1.0 : 0.0);
}

double other_derivative_of(const ActivationFunction& function, double up) {
  return std::abs(up) > limit_of(function) ? 0.0 : 1.0;
}

/// By a central difference in double, whose error is about 1e-10; up to a clamp's border by the
/// function that goes on behind it.
double derivative_of(const ActivationFunction& function, double x) {
  constexpr double kStep = 1e-5;
  if (std::isfinite(limit_of(function))) {
    const double gain = function.kind == Activation::kSwiGLUOai ? 1.702 : 1.0;
    const auto unclamped = [&](double at) { return at / (1.0 + std::exp(-gain * at)); };
    return x > limit_of(function) ? 0.0
                                  : (unclamped(x + kStep) - unclamped(x - kStep)) / (2.0 * kStep);
  }
  return (function_of(function, x + kStep) - function_of(function, x - kStep)) / (2.0 * kStep);
}

struct Reference {
  std::vector<float> y, grad_x;

  Reference(const ActivationFunction& function, const Tensor& input, const Tensor& grad) {
    const auto x = to_doubles(input);
    const auto g = to_doubles(grad);
    const size_t width = grad.shape.last();
    grad_x.resize(x.size());
    for (size_t i = 0; i < g.size(); ++i) {
      const size_t at = is_gated(function.kind) ? i / width * 2 * width + i % width : i;
      const double up = is_gated(function.kind) ? other_of(function, x[at + width]) : 1.0;
      y.push_back(static_cast<float>(function_of(function, x[at]) * up));
      grad_x[at] = static_cast<float>(derivative_of(function, x[at]) * up * g[i]);
      if (!is_gated(function.kind)) continue;
      grad_x[at + width] = static_cast<float>(function_of(function, x[at]) * g[i] *
                                              other_derivative_of(function, x[at + width]));
    }
  }
};

void check_case(const ActivationFunction& function, int64_t tokens, int64_t width, DType dtype) {
  SCOPED_TRACE(
      fmt::format("{} T {} F {} {}", to_string(function), tokens, width, dtype_name(dtype)));
  Random random(31, static_cast<uint64_t>(tokens * 1000 + width));
  const Shape x_shape{tokens, is_gated(function.kind) ? 2 * width : width};
  std::vector<TestInput> inputs;
  inputs.push_back({random_tensor(dtype, x_shape, random, 3.0), Role::kValue, "x"});
  std::vector<OwnedTensor> grad;
  grad.push_back(random_tensor(dtype, {tokens, width}, random));
  const Reference expected(function, inputs[0].tensor, grad[0]);
  const double tolerance = dtype == DType::kF32 ? 2e-6 : 4e-3;
  const auto outputs = run_operator(*make_activation(function), kernels(), inputs);
  expect_rows_near(outputs[0], tensor_of({tokens, width}, expected.y), tolerance, "y");
  const auto grads = run_gradients(make_activation(function), kernels(), inputs, grad);
  expect_rows_near(grads[0], tensor_of(x_shape, expected.grad_x), tolerance, "grad x");
}

TEST(Activation, MatchesAReferenceInAllShapes) {
  const int64_t shapes[][2] = {{0, 4}, {1, 2}, {3, 5}, {9, 64}, {40, 77}};
  for (const ActivationFunction& function : kAllFunctions) {
    for (const auto& [tokens, width] : shapes) {
      for (const DType dtype : {DType::kF32, DType::kBF16})
        check_case(function, tokens, width, dtype);
    }
  }
}

TEST(Activation, GradientsAgainstFiniteDifferences) {
  for (const ActivationFunction& function : kAllFunctions) {
    Random random(32, static_cast<uint64_t>(function.kind));
    std::vector<TestInput> inputs;
    inputs.push_back({random_tensor(DType::kF32, {4, 6}, random, 1.5), Role::kValue, "x"});
    check_gradients(make_activation(function), kernels(), inputs);
  }
}

TEST(Activation, ShapeRule) {
  const ValueType x{DType::kBF16, {8, 12}, 0, 3};
  const ValueType types[] = {x};
  EXPECT_EQ(make_activation(Activation::kSwiGLU)->infer(types)[0], with_last_dim(x, 6));
  EXPECT_EQ(make_activation(Activation::kGelu)->infer(types)[0], x);
  EXPECT_EQ(make_activation(Activation::kGeGLU)->attributes(), "geglu");
  EXPECT_EQ(make_activation({Activation::kSwiGLUClamped, 2.5})->attributes(),
            "swiglu_clamped limit=2.5");
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
  for (const ActivationFunction& function : kAllFunctions) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Shape& shape : {Shape{0, 16}, Shape{1, 2}, Shape{7, 300}}) {
        const OwnedTensor x = random_tensor(dtype, shape, random);
        const OwnedTensor grad =
            random_tensor(dtype, {shape[0], shape[1] / (is_gated(function.kind) ? 2 : 1)}, random);
        for (const QuantizeSpec& spec : scaled_reader_specs())
          expect_reads_scaled(ActivationBackward(function), ActivationBackward::kX,
                              {x.get(), grad.get()}, spec, backend);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::testing
