#include "sim/kernel_times.h"

#include <gtest/gtest.h>

#include "core/format.h"

namespace tessera {
namespace {

/// 10 TFLOPS in BF16 and 100 GB/s.
Hardware machine() {
  Hardware hardware{.name = "machine",
                    .f32_tflops = 5,
                    .bf16_tflops = 10,
                    .memory_gbs = 100,
                    .product_share = 0.5,
                    .memory_share = 0.25};
  // Half of the rate of products, a quarter, and four fifths of the memory's.
  hardware.measured = {format_sample({"linear", "bf16", 1e12, 1e8, 0.2}),
                       format_sample({"linear", "bf16", 1e10, 1e7, 0.004}),
                       format_sample({"rms_norm", "bf16", 1e6, 1e9, 0.0125})};
  return hardware;
}

TEST(KernelTimes, AreThoseThatWereMeasured) {
  const KernelTimes times(machine());
  EXPECT_NEAR(times.seconds("linear", "bf16", {.flops = 1e12, .bytes = 1e8}), 0.2, 1e-6);
  EXPECT_NEAR(times.seconds("linear", "bf16", {.flops = 1e10, .bytes = 1e7}), 0.004, 1e-8);
  EXPECT_NEAR(times.seconds("rms_norm", "bf16", {.flops = 1e6, .bytes = 1e9}), 0.0125, 1e-7);
}

TEST(KernelTimes, BetweenMeasuredOnesReachSharesBetween) {
  const KernelTimes times(machine());
  double last = 0.25;
  for (const double size : {2e10, 5e10, 1e11, 3e11, 8e11}) {
    const Cost cost{.flops = size, .bytes = 1e7 * std::pow(size / 1e10, 0.5)};
    const double share = times.roofline("bf16", cost) / times.seconds("linear", "bf16", cost);
    EXPECT_GT(share, last) << size;
    EXPECT_LT(share, 0.5) << size;
    last = share;
  }
}

TEST(KernelTimes, OfOneSampleKeepItsShare) {
  const KernelTimes times(machine());
  EXPECT_NEAR(times.seconds("rms_norm", "bf16", {.flops = 1e6, .bytes = 4e9}), 0.05, 1e-6);
}

TEST(KernelTimes, OfWhatWasNotMeasuredAreSharesOfTheRates) {
  const KernelTimes times(machine());
  EXPECT_NEAR(times.seconds("attention", "bf16", {.flops = 1e12, .bytes = 1e6}), 0.2, 1e-9);
  EXPECT_NEAR(times.seconds("linear", "f32", {.flops = 1e12, .bytes = 1e6}), 0.4, 1e-9);
  EXPECT_NEAR(times.seconds("softmax", "bf16", {.flops = 1e6, .bytes = 1e9}), 0.04, 1e-9);
}

TEST(KernelTimes, OfGivenSharesAreThose) {
  const KernelTimes times(machine(), {{"linear", 0.25}, {"softmax", 0}});
  EXPECT_NEAR(times.seconds("linear", "bf16", {.flops = 1e12, .bytes = 1e8}), 0.4, 1e-9);
  EXPECT_EQ(times.seconds("softmax", "bf16", {.flops = 1e6, .bytes = 1e9}), 0);
  EXPECT_NEAR(times.seconds("rms_norm", "bf16", {.flops = 1e6, .bytes = 1e9}), 0.0125, 1e-7);
}

TEST(KernelTimes, AttentionAroundARingTakesWhatPlainOneOfItsSizeDoes) {
  Hardware hardware = machine();
  hardware.measured.push_back(format_sample({"attention", "bf16", 1e12, 1e8, 0.4}));
  const KernelTimes times(hardware);
  EXPECT_NEAR(times.seconds("ring_attention", "bf16", {.flops = 2e12, .bytes = 1e8}), 0.8, 1e-9);
}

TEST(KernelTimes, JoinedProductsTakeWhatOneOfTheirSizeDoes) {
  const KernelTimes times(machine());
  EXPECT_NEAR(times.seconds("joined_linear", "bf16", {.flops = 1e12, .bytes = 1e8}), 0.2, 1e-6);
  EXPECT_NEAR(times.seconds("joined_softmax", "bf16", {.flops = 1e6, .bytes = 1e9}), 0.04, 1e-9);
}

TEST(KernelTimes, OfSmallCallsHaveALeast) {
  Hardware hardware = machine();
  hardware.measured.push_back(format_sample({"permute", "bf16", 0, 1e6, 1.5e-5}));
  const KernelTimes times(hardware);
  EXPECT_GE(times.seconds("permute", "bf16", {.flops = 0, .bytes = 1}), 2e-6);
}

TEST(KernelTimes, OfOneMachineScaleWithTheRatesOfAnother) {
  const Hardware measured = load_hardware("h100-ib");
  Hardware faster = measured;
  faster.measured.clear();
  faster.like = "h100-ib";
  faster.memory_gbs *= 2;
  faster.bf16_tflops *= 2;
  const Cost cost{.flops = 1e12, .bytes = 1e9};
  EXPECT_NEAR(KernelTimes(faster).seconds("linear", "bf16", cost),
              KernelTimes(measured).seconds("linear", "bf16", cost) / 2, 1e-9);
}

}  // namespace
}  // namespace tessera
