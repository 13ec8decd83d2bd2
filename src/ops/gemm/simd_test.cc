#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/process/cpu_level.h"
#include "core/random.h"
#include "ops/activation_kind.h"
#include "ops/gemm/testing/vector_functions.h"

namespace tessera::testing {
namespace {

std::vector<float> run(VectorFunction function, const std::vector<float>& x) {
  std::vector<float> y(x.size());
  apply_vectors(function, x, y.data());
  return y;
}

float run(VectorFunction function, float x) {
  return run(function, std::vector{x})[0];
}

TEST(Simd, ExpIsAccurateWhereTheResultIsNormal) {
  std::vector<float> x;
  for (int64_t i = 0; i <= 2'000'000; ++i) {
    x.push_back(static_cast<float>(-87.0 + 175.0 * static_cast<double>(i) / 2e6));
  }
  const std::vector<float> y = run(VectorFunction::kExp, x);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    worst = std::max(worst, std::abs(y[i] / std::exp(static_cast<double>(x[i])) - 1.0));
  }
  EXPECT_LE(worst, 2e-7);
  RecordProperty("worst", std::to_string(worst * 1e9));
}

TEST(Simd, ExpAtItsBounds) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const auto exp = [](float x) { return run(VectorFunction::kExp, x); };
  EXPECT_EQ(exp(0.0F), 1.0F);
  EXPECT_EQ(exp(-kInf), 0.0F);
  EXPECT_EQ(exp(-1e30F), 0.0F);
  EXPECT_EQ(exp(kInf), kInf);
  EXPECT_EQ(exp(88.73F), kInf);
  EXPECT_LT(exp(88.72F), kInf);
  EXPECT_TRUE(std::isnan(exp(std::numeric_limits<float>::quiet_NaN())));
  for (const float x : {-88.0F, -95.0F, -103.0F}) {  // denormal results, to their own spacing
    EXPECT_NEAR(exp(x), std::exp(static_cast<double>(x)), 2e-45);
  }
}

TEST(Simd, ReciprocalsOfAllDigitsAreRoundedAsDivisions) {
  constexpr uint32_t kMantissas = 1U << 23U;
  std::vector<float> x(kMantissas);
  for (const float power : {1.0F, 2.0F, 0x1p64F, 0x1p125F}) {
    for (uint32_t i = 0; i < kMantissas; ++i)
      x[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(power) + i);
    const std::vector<float> y = run(VectorFunction::kReciprocal, x);
    for (uint32_t i = 0; i < kMantissas; ++i) ASSERT_EQ(y[i], 1.0F / x[i]) << x[i];
  }
}

TEST(Simd, ReciprocalAtItsBounds) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const auto reciprocal = [](float x) { return run(VectorFunction::kReciprocal, x); };
  EXPECT_EQ(reciprocal(0x1p126F), 0x1p-126F);
  EXPECT_EQ(reciprocal(kInf), 0.0F);
  EXPECT_NEAR(reciprocal(3e38F), 0.0F, 0x1p-126F);
  EXPECT_TRUE(std::isnan(reciprocal(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Simd, SinCosOfSmallAndLargeAngles) {
  Random random(5, 1);
  std::vector<float> x = {0.0F};
  for (int64_t i = 0; i < 400'000; ++i) {
    const double scale = i % 4 == 0 ? 1e8 : i % 4 == 1 ? 1e5 : i % 4 == 2 ? 10.0 : 1e-3;
    x.push_back(static_cast<float>((2.0 * random.next_uniform() - 1.0) * scale));
  }
  const std::vector<float> sine = run(VectorFunction::kSine, x);
  const std::vector<float> cosine = run(VectorFunction::kCosine, x);
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_NEAR(sine[i], std::sin(static_cast<double>(x[i])), 1.5e-7) << x[i];
    ASSERT_NEAR(cosine[i], std::cos(static_cast<double>(x[i])), 1.5e-7) << x[i];
  }
  EXPECT_EQ(sine[0], 0.0F);
  EXPECT_EQ(cosine[0], 1.0F);
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
  std::vector<Bf16> narrow(values.size());
  narrow_vectors(values, narrow.data());
  std::vector<float> wide(values.size());
  widen_vectors(narrow, wide.data());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(narrow[i].bits, Bf16(values[i]).bits) << values[i];
    EXPECT_EQ(std::bit_cast<uint32_t>(wide[i]), uint32_t{narrow[i].bits} << 16);
  }
}

template <typename T, typename Sum, typename Apply>
void check_parts(const Sum& sum, const Apply& apply_to) {
  for (int64_t count = 0; count <= 2 * vector_lanes() + 1; ++count) {
    std::vector<T> from(count), to(static_cast<size_t>(count) + 1, T(-5.0F));
    for (int64_t i = 0; i < count; ++i) from[i] = T(static_cast<float>(i));
    const int64_t expected = count * (count - 1) / 2;
    EXPECT_EQ(sum(from), static_cast<float>(expected));
    apply_to(VectorFunction::kAddOne, from, to.data());
    for (int64_t i = 0; i < count; ++i) {
      EXPECT_EQ(static_cast<float>(to[i]), static_cast<float>(i + 1));
    }
    EXPECT_EQ(static_cast<float>(to.back()), -5.0F);
  }
}

TEST(Simd, PartsOfVectors) {
  check_parts<float>(sum_vectors, apply_vectors);
  check_parts<Bf16>(sum_bf16_vectors, apply_bf16_vectors);
}

TEST(Simd, SumAndMax) {
  const int lanes = vector_lanes();
  std::vector<float> x;
  for (int i = 0; i < lanes; ++i) x.push_back(static_cast<float>((i * 7) % lanes) - 20.0F);
  EXPECT_EQ(max_vector(x.data()), static_cast<float>(lanes - 1) - 20.0F);
  const int expected = lanes * (lanes - 1) / 2 - 20 * lanes;
  EXPECT_EQ(sum_vector(x.data()), static_cast<float>(expected));
}

TEST(Simd, VectorsAreThoseOfTheLevelInUse) {
  const bool wide = cpu_level() >= CpuLevel::kAvx512 && is_cpu_level_built(CpuLevel::kAvx512);
  EXPECT_EQ(vector_lanes(), wide ? 16 : 8);
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

struct Functions {
  VectorFunction value;
  VectorFunction derivative;
};
constexpr Functions kSiluFunctions = {VectorFunction::kSilu, VectorFunction::kSiluSlope};
constexpr Functions kGeluFunctions = {VectorFunction::kGelu, VectorFunction::kGeluSlope};
constexpr Functions kGeluTanhFunctions = {VectorFunction::kGeluTanh,
                                          VectorFunction::kGeluTanhSlope};

/// The value is compared relative to |x|, which bounds it, and to `scale` · |value| in the tail,
/// where the function is exponentially small.
void check_function(const Functions& functions, Reference (*reference)(double),
                    double tail_tolerance) {
  std::vector<float> x;
  for (int64_t i = -200'000; i <= 200'000; ++i) x.push_back(static_cast<float>(i) * 1e-4F);
  const std::vector<float> value = run(functions.value, x);
  const std::vector<float> derivative = run(functions.derivative, x);
  std::vector<float> alone(x.size());
  apply_values(functions.value, x, alone.data());
  for (size_t i = 0; i < x.size(); ++i) {
    const Reference expected = reference(x[i]);
    ASSERT_EQ(alone[i], value[i]) << x[i];
    ASSERT_NEAR(value[i], expected.value, 2e-7 * std::abs(x[i])) << x[i];
    ASSERT_NEAR(derivative[i], expected.derivative, 2e-6) << x[i];
    if (std::abs(expected.value) > 1e-30) {
      ASSERT_NEAR(value[i] / expected.value, 1.0, tail_tolerance) << x[i];
    }
  }
}

TEST(ActivationMath, MatchesDoubleReferences) {
  check_function(kSiluFunctions, silu, 2e-6);
  check_function(kGeluFunctions, gelu, 1e-5);
  // tanh's own reference loses the tail to cancellation below about 1e-16.
  check_function(kGeluTanhFunctions, gelu_tanh, 1.0);
}

TEST(ActivationMath, LargeInputs) {
  for (const Functions& functions : {kSiluFunctions, kGeluFunctions, kGeluTanhFunctions}) {
    for (const float x : {50.0F, 1e4F, 1e15F}) {
      EXPECT_EQ(run(functions.value, x), x);
      EXPECT_EQ(run(functions.derivative, x), 1.0F);
      EXPECT_NEAR(run(functions.value, -x), 0.0F, 1e-18);
      EXPECT_NEAR(run(functions.derivative, -x), 0.0F, 1e-18);
    }
  }
}

TEST(ActivationMath, Kinds) {
  EXPECT_TRUE(is_gated(Activation::kGeGLUTanh));
  EXPECT_FALSE(is_gated(Activation::kGelu));
  EXPECT_EQ(activation_name(Activation::kGeGLU), "geglu");
}

}  // namespace
}  // namespace tessera::testing
