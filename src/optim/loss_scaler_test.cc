#include "optim/loss_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/error.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::vector<double> run(LossScaler& scaler, const std::vector<bool>& finite) {
  std::vector<double> scales;
  for (const bool one : finite) {
    scales.push_back(scaler.scale());
    scaler.update(one);
  }
  return scales;
}

/// Runs of torch.amp.GradScaler, made by tools/make_half_fixture.py.
TEST(LossScaler, HasTheScalesOfTorch) {
  std::ifstream file(std::filesystem::path(TESSERA_TEST_DATA) / "numerics" / "loss_scales.json");
  const auto runs = nlohmann::json::parse(file);
  ASSERT_GE(runs.size(), 4U);
  for (const auto& expected : runs) {
    LossScaler scaler({.initial = expected["initial"].get<double>(),
                       .window = expected["window"].get<int64_t>()});
    EXPECT_EQ(run(scaler, expected["finite"].get<std::vector<bool>>()),
              expected["scales"].get<std::vector<double>>());
  }
}

/// As Megatron-LM's DynamicGradScaler: good steps in between do not renew the patience, doubling
/// does.
TEST(LossScaler, HysteresisWaitsForSeveral) {
  LossScaler scaler({.initial = 64, .window = 2, .hysteresis = 2});
  EXPECT_THAT(run(scaler, {false, true, false, false, true, true, false, false, true}),
              ElementsAre(64, 64, 64, 32, 16, 16, 32, 32, 16));
}

TEST(LossScaler, StopsAtTheSmallest) {
  LossScaler scaler({.initial = 8, .minimum = 4, .hysteresis = 2});
  EXPECT_FALSE(scaler.is_exhausted());
  EXPECT_THAT(run(scaler, {false, false}), ElementsAre(8, 8));
  EXPECT_EQ(scaler.scale(), 4);
  EXPECT_TRUE(scaler.is_exhausted());
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 4);
}

TEST(LossScaler, DoesNotGrowWithoutEnd) {
  LossScaler scaler({.initial = kLargestLossScale, .window = 1});
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), kLargestLossScale);
}

TEST(LossScaler, AConstantStays) {
  LossScaler scaler({.constant = 128});
  scaler.update(false);
  scaler.restore({.scale = 4});
  EXPECT_EQ(scaler.scale(), 128);
}

/// A run that goes on has the scales of one that was not interrupted.
TEST(LossScaler, GoesOnWhereItStood) {
  const LossScaling scaling{.initial = 256, .window = 3, .hysteresis = 2};
  const std::vector<bool> finite = {true, false, true, true, false, true, true, true, false, false};
  for (size_t cut = 0; cut <= finite.size(); ++cut) {
    LossScaler whole(scaling);
    LossScaler first(scaling);
    LossScaler second(scaling);
    run(whole, finite);
    run(first, {finite.begin(), finite.begin() + static_cast<ptrdiff_t>(cut)});
    second.restore(first.state());
    run(second, {finite.begin() + static_cast<ptrdiff_t>(cut), finite.end()});
    EXPECT_EQ(second.state(), whole.state()) << cut;
  }
}

/// Options may have changed in between.
TEST(LossScaler, RestoresWhatTheOptionsAllow) {
  LossScaler scaler({.initial = 256, .minimum = 16, .window = 3, .hysteresis = 1});
  scaler.restore({.scale = 2, .good_steps = 100, .tolerance = 9});
  EXPECT_EQ(scaler.state(), (LossScaleState{.scale = 16, .good_steps = 2, .tolerance = 1}));
}

TEST(LossScaler, RefusesWhatIsNoScale) {
  const auto refuses = [](const LossScaling& scaling, const char* key) {
    EXPECT_THAT([&] { validate(scaling); }, ThrowsMessage<UserError>(HasSubstr(key)));
  };
  refuses({.constant = 1000}, "precision.loss_scale is 1000; it must be a power of two");
  refuses({.constant = 0.5}, "precision.loss_scale is 0.5");
  refuses({.initial = 3}, "precision.initial_loss_scale is 3");
  refuses({.initial = 0x1p65}, "precision.initial_loss_scale");
  refuses({.minimum = 0.5}, "precision.min_loss_scale is 0.5");
  refuses({.initial = 4, .minimum = 8}, "above precision.initial_loss_scale 4");
  validate(LossScaling{});
  validate(LossScaling{.constant = 1});
}

}  // namespace
}  // namespace tessera
