#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "model/run/model_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(ActivationOptions, ALimitOfZeroIsThePublishedOne) {
  ModelConfig config = testing::tiny_config();
  config.activation = Activation::kSwiGLUClamped;
  EXPECT_EQ(config.activation_function().limit, 10);
  config.activation = Activation::kSwiGLUOai;
  EXPECT_EQ(config.activation_function().limit, 7);
  config.swiglu_limit = 2.5;
  validate(config);
  EXPECT_EQ(config.activation_function().limit, 2.5F);
}

TEST(ActivationOptions, RefusesALimitThatNothingHas) {
  const auto refuse = [](Activation kind, double limit, const char* message) {
    ModelConfig config = testing::tiny_config();
    config.activation = kind;
    config.swiglu_limit = limit;
    EXPECT_THAT([&] { validate(config); }, ThrowsMessage<UserError>(HasSubstr(message)));
  };
  refuse(Activation::kSwiGLU, 10, "model.activation = \"swiglu\" clamps nothing");
  refuse(Activation::kSwiGLUOai, 1e-9, "model.swiglu_limit is 1e-09; it must be 0, or from");
  refuse(Activation::kSwiGLUClamped, 1e9, "model.swiglu_limit is 1000000000");
}

}  // namespace
}  // namespace tessera
