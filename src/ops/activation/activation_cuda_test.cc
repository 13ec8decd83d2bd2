#include "ops/activation/activation.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

constexpr Activation kKinds[] = {Activation::kSwiGLU,    Activation::kGeGLU, Activation::kGeGLUTanh,
                                 Activation::kSwiGLUOai, Activation::kGelu,  Activation::kGeluTanh};

class ActivationCuda : public testing::GpuTest {};

TEST_F(ActivationCuda, AllKinds) {
  for (const Activation kind : kKinds) {
    SCOPED_TRACE(activation_name(kind));
    for (const Shape& shape : {Shape{0, 16}, Shape{1, 16}, Shape{50, 1552}, Shape{19, 26}}) {
      testing::check_operator_on_gpu(make_activation(kind),
                                     [&](DType dtype) -> testing::OperatorInputs {
                                       return {{"x"}, {{dtype, shape}}};
                                     },
                                     {0}, cpu(), gpu(), {.deviation = 4.0});
    }
  }
}

TEST_F(ActivationCuda, TinyRows) {
  testing::check_operator_on_gpu(make_activation(Activation::kSwiGLU),
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
