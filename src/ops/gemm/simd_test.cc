#include "ops/simd.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "core/random.h"
#include "ops/activation_math.h"

namespace tessera {
namespace {

using simd::Vec;

float first_lane(const std::function<Vec(Vec)>& f, float x) {
  return f(simd::broadcast(x))[0];
}

TEST(Simd, ExpIsAccurateWhereTheResultIsNormal) {
  double worst = 0;
  for (int64_t i = 0; i <= 2'000'000; ++i) {
    const auto x = static_cast<float>(-87.0 + 175.0 * static_cast<double>(i) / 2e6);
    const double expected = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::abs(first_lane(simd::exp, x) / expected - 1.0));
  }
  EXPECT_LE(worst, 2e-7);
  RecordProperty("worst", std::to_string(worst * 1e9));
}

TEST(Simd, ExpAtItsBounds) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(first_lane(simd::exp, 0.0F), 1.0F);
  EXPECT_EQ(first_lane(simd::exp, -kInf), 0.0F);
  EXPECT_EQ(first_lane(simd::exp, -1e30F), 0.0F);
  EXPECT_EQ(first_lane(simd::exp, kInf), kInf);
  EXPECT_EQ(first_lane(simd::exp, 88.73F), kInf);
  EXPECT_LT(first_lane(simd::exp, 88.72F), kInf);
  EXPECT_TRUE(std::isnan(first_lane(simd::exp, std::numeric_limits<float>::quiet_NaN())));
  for (const float x : {-88.0F, -95.0F, -103.0F}) {  // denormal results, to their own spacing
    EXPECT_NEAR(first_lane(simd::exp, x), std::exp(static_cast<double>(x)), 2e-45);
  }
}

TEST(Simd, SinCosOfSmallAndLargeAngles) {
  Random random(5, 1);
  for (int64_t i = 0; i < 400'000; ++i) {
    const double scale = i % 4 == 0 ? 1e8 : i % 4 == 1 ? 1e5 : i % 4 == 2 ? 10.0 : 1e-3;
    const auto x = static_cast<float>((2.0 * random.next_uniform() - 1.0) * scale);
    const simd::SinCos turn = simd::sincos(simd::broadcast(x));
    ASSERT_NEAR(turn.sine[0], std::sin(static_cast<double>(x)), 1.5e-7) << x;
    ASSERT_NEAR(turn.cosine[0], std::cos(static_cast<double>(x)), 1.5e-7) << x;
  }
  EXPECT_EQ(simd::sincos(Vec{}).sine[0], 0.0F);
  EXPECT_EQ(simd::sincos(Vec{}).cosine[0], 1.0F);
}

TEST(Simd, Bf16StoresRoundAsBf16Does) {
  Random random(3, 1);
  std::vector<float> values = {0.0F,
                               -0.0F,
                               1.00390625F,
                               1.01171875F,
                               3.4e38F,
                               1e-40F,
                               std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::quiet_NaN(),
                               std::bit_cast<float>(0x7f800001U)};
  while (values.size() < 4099) {
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random.next_u64())));
  }
  const auto count = static_cast<int64_t>(values.size());
  std::vector<Bf16> narrow(values.size());
  simd::convert(narrow.data(), values.data(), count);
  std::vector<float> wide(values.size());
  simd::convert(wide.data(), narrow.data(), count);
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(narrow[i].bits, Bf16(values[i]).bits) << values[i];
    EXPECT_EQ(std::bit_cast<uint32_t>(wide[i]), uint32_t{narrow[i].bits} << 16);
  }
}

template <typename T>
void check_parts() {
  for (int64_t count = 0; count <= 2 * simd::kLanes + 1; ++count) {
    std::vector<T> from(static_cast<size_t>(count)), to(static_cast<size_t>(count) + 1, T(-5.0F));
    for (int64_t i = 0; i < count; ++i) from[static_cast<size_t>(i)] = T(static_cast<float>(i));
    float total = 0;
    simd::for_each_vector(count, [&](int64_t i, auto lanes) {
      const Vec x = simd::load(from.data() + i, lanes);
      total += simd::sum(x);
      simd::store(to.data() + i, x + 1.0F, lanes);
    });
    EXPECT_EQ(total, static_cast<float>(count * (count - 1) / 2));
    for (int64_t i = 0; i < count; ++i) {
      EXPECT_EQ(static_cast<float>(to[static_cast<size_t>(i)]), static_cast<float>(i + 1));
    }
    EXPECT_EQ(static_cast<float>(to.back()), -5.0F);
  }
}

TEST(Simd, PartsOfVectors) {
  check_parts<float>();
  check_parts<Bf16>();
}

TEST(Simd, SumAndMax) {
  Vec x{};
  for (int i = 0; i < simd::kLanes; ++i) x[i] = static_cast<float>((i * 7) % simd::kLanes) - 20.0F;
  EXPECT_EQ(simd::max(x), static_cast<float>(simd::kLanes - 1) - 20.0F);
  EXPECT_EQ(simd::sum(x),
            static_cast<float>(simd::kLanes * (simd::kLanes - 1) / 2 - 20 * simd::kLanes));
  EXPECT_EQ(simd::max(x, simd::broadcast(-18.0F))[0], -18.0F);
  EXPECT_EQ(simd::min(x, simd::broadcast(-18.0F))[0], -20.0F);
}

struct Reference {
  double value;
  double derivative;
};

Reference silu(double x) {
  const double s = 1.0 / (1.0 + std::exp(-x));
  return {x * s, s + x * s * (1.0 - s)};
}
Reference gelu(double x) {
  const double phi = 0.5 * std::erfc(-x / std::sqrt(2.0));
  return {x * phi, phi + x * std::exp(-0.5 * x * x) / std::sqrt(2.0 * M_PI)};
}
Reference gelu_tanh(double x) {
  const double c = std::sqrt(2.0 / M_PI);
  const double t = std::tanh(c * (x + 0.044715 * x * x * x));
  return {0.5 * x * (1.0 + t),
          0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * x * x)};
}

/// The value is compared relative to |x|, which bounds it, and to `scale` · |value| in the tail,
/// where the function is exponentially small.
template <typename Function>
void check_function(Function /*function*/, Reference (*reference)(double), double tail_tolerance) {
  for (int64_t i = -200'000; i <= 200'000; ++i) {
    const float x = static_cast<float>(i) * 1e-4F;
    const Reference expected = reference(x);
    const Slope slope = Function::slope(simd::broadcast(x));
    ASSERT_EQ(Function::value(simd::broadcast(x))[0], slope.value[0]) << x;
    ASSERT_NEAR(slope.value[0], expected.value, 2e-7 * std::abs(x)) << x;
    ASSERT_NEAR(slope.derivative[0], expected.derivative, 2e-6) << x;
    if (std::abs(expected.value) > 1e-30) {
      ASSERT_NEAR(slope.value[0] / expected.value, 1.0, tail_tolerance) << x;
    }
  }
}

TEST(ActivationMath, MatchesDoubleReferences) {
  check_function(Silu{}, silu, 2e-6);
  check_function(Gelu{}, gelu, 1e-5);
  // tanh's own reference loses the tail to cancellation below about 1e-16.
  check_function(GeluTanh{}, gelu_tanh, 1.0);
}

TEST(ActivationMath, LargeInputs) {
  const auto at = [](auto function, float x) {
    return decltype(function)::slope(simd::broadcast(x));
  };
  for (const float x : {50.0F, 1e4F, 1e15F}) {
    for (const Slope& slope : {at(Silu{}, x), at(Gelu{}, x), at(GeluTanh{}, x)}) {
      EXPECT_EQ(slope.value[0], x);
      EXPECT_EQ(slope.derivative[0], 1.0F);
    }
    for (const Slope& slope : {at(Silu{}, -x), at(Gelu{}, -x), at(GeluTanh{}, -x)}) {
      EXPECT_NEAR(slope.value[0], 0.0F, 1e-18);
      EXPECT_NEAR(slope.derivative[0], 0.0F, 1e-18);
    }
  }
}

TEST(ActivationMath, KindsAndFunctions) {
  const auto is_silu = [](Activation kind) {
    bool result = false;
    with_activation(kind, [&](auto f) { result = std::is_same_v<decltype(f), Silu>; });
    return result;
  };
  EXPECT_TRUE(is_silu(Activation::kSwiGLU));
  EXPECT_FALSE(is_silu(Activation::kGeGLU));
  EXPECT_TRUE(is_gated(Activation::kGeGLUTanh));
  EXPECT_FALSE(is_gated(Activation::kGelu));
  EXPECT_EQ(activation_name(Activation::kGeGLU), "geglu");
}

}  // namespace
}  // namespace tessera
