#include "ops/round_values/round_values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>

#include "core/fp8.h"
#include "ops/round_values/round_math.h"
#include "ops/round_values/round_values_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

OwnedTensor round_by(const RoundValuesSpec& spec, const Tensor& x,
                     const std::vector<int64_t>& offsets = {}) {
  KernelTable table;
  add_round_values_cpu(table);
  const auto inputs = testing::round_inputs(spec, x, offsets);
  return std::move(testing::run_operator(RoundValues(spec), table, inputs)[RoundValues::kY]);
}

std::vector<float> read_values(const std::string& name) {
  std::ifstream file(
      std::filesystem::path(TESSERA_TEST_DATA) / "numerics/rounded" / (name + ".bin"),
      std::ios::binary);
  std::vector<float> values(37 * 50);
  file.read(reinterpret_cast<char*>(values.data()), std::ssize(values) * 4);
  EXPECT_TRUE(file) << name;
  return values;
}

struct Case {
  std::string name;
  CastSpec cast;
  int sum_dim = 1;
};

/// By numpy and ml_dtypes; in both storage types, since the values are BF16's.
TEST(RoundValues, GivesWhatOthersGive) {
  const std::vector<Case> cases = {
      {"block_1x16", {.length = 16}},
      {"block_16x1", {.length = 16}, 0},
      {"block_16x1", {.length = 1, .width = 16}},
      {"block_8x8", {.length = 8, .width = 8}},
      {"block_1x32_e5m2", {.number = NarrowNumber::kE5M2, .length = 32}},
      {"row", {}},
      {"tensor_e5m2", {.number = NarrowNumber::kE5M2, .width = 0}},
      {"nested_1x16", {.number = NarrowNumber::kE2M1, .length = 16, .nested = true}},
      {"nested_16x16", {.number = NarrowNumber::kE2M1, .length = 16, .width = 16, .nested = true}},
      {"groups_block_16x1", {.length = 16}, 0},
      {"groups_nested_16x1", {.number = NarrowNumber::kE2M1, .length = 16, .nested = true}, 0},
  };
  for (const Case& test : cases) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(test.name);
      const OwnedTensor x = testing::tensor_of({37, 50}, read_values("x"), dtype);
      const OwnedTensor expected = testing::tensor_of({37, 50}, read_values(test.name), dtype);
      RoundValuesSpec spec{.cast = test.cast, .sum_dim = test.sum_dim};
      if (!test.name.starts_with("groups")) {
        testing::expect_bitwise_equal(round_by(spec, x.get()).get(), expected.get(), test.name);
        continue;
      }
      spec.group_rows = {5, 0, 32};
      testing::expect_bitwise_equal(round_by(spec, x.get()).get(), expected.get(), test.name);
      spec = {.cast = test.cast, .sum_dim = test.sum_dim, .offsets = true};
      testing::expect_bitwise_equal(round_by(spec, x.get(), {0, 5, 5, 37}).get(), expected.get(),
                                    test.name);
    }
  }
}

/// Whatever the shape: to within half of the last digit, of the largest value's block for the
/// smallest; and what is rounded stays as it is when it is rounded again.
TEST(RoundValues, IsNearAndStaysThere) {
  Random random(11, 1);
  for (const Shape& shape : {Shape{0, 16}, {3, 0}, {1, 1}, {1, 129}, {5, 300}, {130, 257}}) {
    for (const int sum_dim : {0, 1}) {
      for (const CastSpec& cast :
           {CastSpec{}, CastSpec{.length = 128}, CastSpec{.length = 128, .width = 128},
            CastSpec{.width = 0}, CastSpec{.length = 32}}) {
        const OwnedTensor x = testing::random_tensor(DType::kF32, shape, random, 3.0);
        const RoundValuesSpec spec{.cast = cast, .sum_dim = sum_dim};
        const OwnedTensor y = round_by(spec, x.get());
        const std::vector<double> before = testing::to_doubles(x.get());
        const std::vector<double> after = testing::to_doubles(y.get());
        for (size_t i = 0; i < before.size(); ++i)
          ASSERT_NEAR(after[i], before[i], std::abs(before[i]) / 15.9 + 1e-4) << cast.to_string();
        testing::expect_bitwise_equal(round_by(spec, y.get()).get(), y.get(), cast.to_string());
      }
    }
  }
}

/// Products of matrices that were turned alike are those of the matrices, but for the rounding.
TEST(RoundValues, RotationsKeepProducts) {
  Random random(12, 1);
  const CastSpec turned{.number = NarrowNumber::kE4M3, .length = 16, .rotated = true};
  for (const int64_t count : {1, 7, 16, 29, 64}) {
    for (const int sum_dim : {0, 1}) {
      const Shape shape = sum_dim == 1 ? Shape{3, count} : Shape{count, 3};
      const OwnedTensor x = testing::random_tensor(DType::kF32, shape, random);
      const OwnedTensor y = testing::random_tensor(DType::kF32, shape, random);
      const RoundValuesSpec spec{.cast = turned, .sum_dim = sum_dim};
      const auto product = [&](const Tensor& a, const Tensor& b) {
        const std::vector<double> left = testing::to_doubles(a);
        const std::vector<double> right = testing::to_doubles(b);
        double sum = 0;
        for (size_t i = 0; i < left.size(); ++i) sum += left[i] * right[i];
        return sum;
      };
      EXPECT_NEAR(product(round_by(spec, x.get()).get(), round_by(spec, y.get()).get()),
                  product(x.get(), y.get()), 0.1 * std::sqrt(3.0 * static_cast<double>(count)));
    }
  }
}

/// An outlier is spread over its neighbours.
TEST(RoundValues, RotationsSpreadOutliers) {
  std::vector<float> values(16, 0.0F);
  values[3] = 8;
  const CastSpec turned{.length = 16, .rotated = true};
  for (const int sum_dim : {0, 1}) {
    const Shape shape = sum_dim == 1 ? Shape{1, 16} : Shape{16, 1};
    const OwnedTensor y =
        round_by({.cast = turned, .sum_dim = sum_dim}, testing::tensor_of(shape, values).get());
    for (const double value : testing::to_doubles(y.get())) EXPECT_EQ(std::abs(value), 2);
  }
}

/// The arithmetic without branches is that of the types.
template <typename Number>
void check_numbers() {
  Random random(14, 1);
  for (uint32_t bits = 0; bits < 0x10000U; ++bits) {
    for (const uint32_t word :
         {bits << 16, bits << 16 | static_cast<uint32_t>(random.next_below(65536))}) {
      const auto value = std::bit_cast<float>(word);
      const auto expected = static_cast<float>(Number(value));
      const float found = round_nearest<Number>(value);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(found));
      } else {
        EXPECT_EQ(std::bit_cast<uint32_t>(found), std::bit_cast<uint32_t>(expected)) << value;
      }
      if (expected == value) {
        EXPECT_EQ(round_up_as_often<Number>(value, 0), value);
      }
    }
  }
}

TEST(RoundValues, NumbersAreThoseOfTheTypes) {
  check_numbers<E4m3>();
  check_numbers<E5m2>();
  check_numbers<E2m1>();
}

/// The mean of what stochastic rounding gives is the value; what is exact stays.
TEST(RoundValues, StochasticRoundingIsRightOnAverage) {
  for (const NarrowNumber number :
       {NarrowNumber::kE4M3, NarrowNumber::kE5M2, NarrowNumber::kE2M1}) {
    const CastSpec cast{.number = number, .width = 0, .stochastic = true};
    const float largest = largest_of(number);
    for (const float share : {0.03F, 0.3F, 0.71F, 0.9F}) {
      std::vector<float> values(20000, share * largest);
      values[0] = largest;
      const OwnedTensor x = testing::tensor_of({std::ssize(values), 1}, values);
      const std::vector<double> found =
          testing::to_doubles(round_by({.cast = cast}, x.get()).get());
      EXPECT_EQ(found[0], largest);
      double sum = 0;
      for (size_t i = 1; i < found.size(); ++i) sum += found[i];
      // A step is a third of the value at most, or half of the least for E2M1.
      EXPECT_NEAR(sum / static_cast<double>(found.size() - 1) / largest, share, 0.005);
    }
  }
}

TEST(RoundValues, ZerosTinyNumbersAndNonFiniteOnes) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const OwnedTensor x = testing::tensor_of(
      {4, 2}, {0, -0.0F, std::numeric_limits<float>::denorm_min(), 0, kInfinity, 2, NAN, 2});
  for (const bool nested : {false, true}) {
    const std::vector<double> y =
        testing::to_doubles(round_by({.cast = {.length = 2, .nested = nested}}, x.get()).get());
    EXPECT_EQ(y[0], 0);
    EXPECT_TRUE(std::signbit(y[1]));
    EXPECT_EQ(y[2], 0);
    EXPECT_TRUE(std::isnan(y[4]));
    EXPECT_TRUE(std::isnan(y[5]));
    EXPECT_TRUE(std::isnan(y[6]));
    EXPECT_EQ(std::isnan(y[7]), false);
  }
}

/// The largest numbers there are, and beside them those that a nested scale is too small for.
TEST(RoundValues, HugeNumbers) {
  const OwnedTensor x = testing::tensor_of({2, 2}, {3e38F, -1e38F, 1e-3F, -1e-3F});
  for (const bool nested : {false, true}) {
    const std::vector<double> y =
        testing::to_doubles(round_by({.cast = {.length = 2, .nested = nested}}, x.get()).get());
    EXPECT_NEAR(y[0] / 3e38, 1, 0.1);
    EXPECT_NEAR(y[1] / -1e38, 1, 0.1);
    EXPECT_NEAR(y[2], nested ? 0 : 1e-3, 1e-4);
    EXPECT_TRUE(std::signbit(y[3]));
  }
}

TEST(RoundValues, RowsOutsideOfGroupsAreNotWritten) {
  Random random(13, 1);
  const OwnedTensor x = testing::random_tensor(DType::kF32, {6, 4}, random);
  const std::vector<double> y = testing::to_doubles(
      round_by({.cast = {}, .sum_dim = 0, .offsets = true}, x.get(), {1, 3, 4}).get());
  for (int64_t i = 0; i < 24; ++i) EXPECT_EQ(std::isnan(y[i]), i < 4 || i >= 16) << i;
}

TEST(RoundValues, RefusesWhatItCannotDo) {
  EXPECT_THAT([] { make_round_values({.cast = {.length = 32, .rotated = true}}); },
              ThrowsMessage<UserError>(HasSubstr("rotated are 16 neighbours")));
  EXPECT_THROW(make_round_values({.cast = {.length = -1}}), UserError);
  EXPECT_THROW(make_round_values({.sum_dim = 2}), UserError);
  EXPECT_THROW(make_round_values({.group_rows = {2}, .offsets = true}), UserError);
  const OperatorPtr groups = make_round_values({.group_rows = {2, 2}});
  EXPECT_THROW(groups->infer(std::vector<ValueType>{{.shape = {5, 4}}}), UserError);
  EXPECT_THROW(groups->infer(std::vector<ValueType>{{.dtype = DType::kI32, .shape = {4, 4}}}),
               UserError);
}

}  // namespace
}  // namespace tessera
