#include "model/weights/parameters.h"

#include <gtest/gtest.h>

#include "core/testing/host_like_device.h"
#include "model/run/model_testing.h"

namespace tessera {
namespace {

/// The host's memory as if the host could not reach it.
class OtherDevice final : public testing::HostLikeDevice {
 public:
  std::string name() const override { return "other"; }
  bool is_host() const override { return false; }
};

TEST(ParameterSet, TensorsSayWhoseMemoryTheyAre) {
  OtherDevice other;
  const auto specs = list_parameters(testing::tiny_config(), DType::kBF16);
  const ParameterSet there(specs, /*with_gradients=*/true, other);
  const ParameterSet here(specs, /*with_gradients=*/true);
  for (size_t i = 0; i < specs.size(); ++i) {
    EXPECT_EQ(there.all()[i].weight.device, &other) << specs[i].name;
    EXPECT_EQ(there.all()[i].grad.device, &other) << specs[i].name;
    EXPECT_EQ(here.all()[i].weight.device, nullptr) << specs[i].name;
    EXPECT_EQ(here.all()[i].grad.device, nullptr) << specs[i].name;
  }
}

TEST(ParameterSet, GradientsThatNobodyAddedToAreZeroWhenSettled) {
  ParameterSet set(list_parameters(testing::tiny_config(), DType::kF32), /*with_gradients=*/true);
  for (const ModelParameter& parameter : set.all()) parameter.grad.as<float>()[0] = 1;
  set.reset_gradients();
  EXPECT_TRUE(set.begin_gradient(0));
  EXPECT_FALSE(set.begin_gradient(0));
  set.settle_gradients();
  EXPECT_EQ(set.all()[0].grad.as<float>()[0], 1);
  for (size_t i = 1; i < set.all().size(); ++i)
    EXPECT_EQ(set.all()[i].grad.as<float>()[0], 0) << set.all()[i].spec.name;
}

}  // namespace
}  // namespace tessera
