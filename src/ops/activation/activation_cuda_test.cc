#include "ops/activation/activation.h"
#include "ops/dequantize/scaled_reader_testing.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

constexpr ActivationFunction kFunctions[] = {
    Activation::kSwiGLU,
    Activation::kGeGLU,
    Activation::kGeGLUTanh,
    Activation::kSwiGLUOai,
    {Activation::kSwiGLUOai, 0.75},
    Activation::kSwiGLUClamped,
    {Activation::kSwiGLUClamped, 1.25},
    Activation::kGelu,
    Activation::kGeluTanh,
    Activation::kRelu2,
};

class ActivationCuda : public testing::GpuTest {
 protected:
  void check_scaled(const ActivationFunction& function, const Shape& x_shape) const {
    Random random(6, 9);
    const int64_t width = x_shape[1] / (is_gated(function.kind) ? 2 : 1);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const OwnedTensor x = testing::random_tensor(dtype, x_shape, random);
      const OwnedTensor grad = testing::random_tensor(dtype, {x_shape[0], width}, random);
      for (const QuantizeSpec& spec : testing::scaled_reader_specs())
        testing::expect_reads_scaled(ActivationBackward(function), ActivationBackward::kX,
                                     {x.get(), grad.get()}, spec, gpu());
    }
  }
};

TEST_F(ActivationCuda, AllKinds) {
  for (const ActivationFunction& function : kFunctions) {
    SCOPED_TRACE(to_string(function));
    for (const Shape& shape : {Shape{0, 16}, Shape{1, 16}, Shape{50, 1552}, Shape{19, 26}}) {
      testing::check_operator_on_gpu(make_activation(function),
                                     [&](DType dtype) -> testing::OperatorInputs {
                                       return {{"x"}, {{dtype, shape}}};
                                     },
                                     {0}, cpu(), gpu(), {.deviation = 4.0});
    }
  }
}

TEST_F(ActivationCuda, GradientsOfFp8AreThoseOfWhatItStandsFor) {
  for (const ActivationFunction& function : kFunctions) {
    SCOPED_TRACE(to_string(function));
    for (const Shape& shape : {Shape{0, 16}, Shape{1, 16}, Shape{50, 1552}, Shape{19, 26}})
      check_scaled(function, shape);
  }
}

TEST_F(ActivationCuda, TinyRowsOfFp8) {
  check_scaled(Activation::kSwiGLU, {9, 2 * 264});
  check_scaled({Activation::kSwiGLUClamped, 1.25}, {9, 2 * 264});
}

TEST_F(ActivationCuda, TinyRows) {
  for (const ActivationFunction& function :
       {ActivationFunction(Activation::kSwiGLU), ActivationFunction(Activation::kSwiGLUOai, 0.75)})
    testing::check_operator_on_gpu(make_activation(function),
                                   [](DType dtype) -> testing::OperatorInputs {
                                     return {{"x"}, {{dtype, {9, 2 * 264}}}};
                                   },
                                   {0}, cpu(), gpu(), {.once = true});
}

TEST_F(ActivationCuda, RaggedRows) {
  for (const int64_t extent : {0, 1, 37}) {
    testing::check_ragged_operator_on_gpu(
        make_activation(Activation::kSwiGLU),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"x"}, {testing::ragged_rows(dtype, {40, 96})}};
        },
        {0}, extent, cpu(), gpu());
  }
}

}  // namespace
}  // namespace tessera
