#include <gmock/gmock.h>

#include "ops/adamw/bf16_grad_testing.h"

namespace tessera {
namespace {

Backend adamw_on_host() {
  KernelTable kernels;
  add_adamw_cpu(kernels);
  return kernels;
}

TEST(AdamWBf16Gradients, UpdateAsTheSameNumbersInF32) {
  for (const AdamWSpec& spec : testing::list_adamw_specs())
    testing::check_bf16_gradients(spec, testing::bf16_gradient_shapes(), adamw_on_host());
}

TEST(AdamWBf16Gradients, AreOfTheTypeThatTheOperatorSays) {
  const auto infer = [](bool bf16_grad, DType dtype) {
    const ValueType types[] = {{dtype, {4}}, {DType::kF32, {8}}, {DType::kF32, {2}}};
    return make_adamw({.bf16_grad = bf16_grad})->infer(types);
  };
  EXPECT_EQ(infer(true, DType::kBF16), infer(false, DType::kF32));
  EXPECT_THAT([&] { infer(true, DType::kF32); },
              ::testing::ThrowsMessage<UserError>(::testing::HasSubstr("grad must be bf16")));
  EXPECT_THAT([&] { infer(false, DType::kBF16); },
              ::testing::ThrowsMessage<UserError>(::testing::HasSubstr("grad must be f32")));
}

}  // namespace
}  // namespace tessera
