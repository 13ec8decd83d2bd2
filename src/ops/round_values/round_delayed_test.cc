// RoundValues by scales that are given.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "core/fp8.h"
#include "ops/operands.h"
#include "ops/round_values/round_math.h"
#include "ops/round_values/round_values.h"
#include "ops/round_values/round_values_testing.h"
#include "ops/round_values/tally.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kPlaces = 4;

RoundValuesSpec delayed(NarrowNumber number = NarrowNumber::kE4M3) {
  return {.cast = {.number = number, .width = 0, .delayed = true}, .places = {2}, .tallies = true};
}

struct Rounded {
  std::vector<double> y;
  std::vector<double> tally;

  std::vector<int64_t> row(int64_t place) const {
    const auto begin = tally.begin() + place * kTallyColumns;
    return {begin, begin + kTallyColumns};
  }
};

int64_t bits_of(float value) {
  return word_of_float(value);
}

/// By the scale `scale` at place 2; others are 7.
Rounded round_by(const RoundValuesSpec& spec, const Tensor& x, float scale,
                 const std::vector<int64_t>& offsets = {}) {
  KernelTable table;
  add_round_values_cpu(table);
  std::vector<testing::TestInput> inputs = testing::round_inputs(spec, x, offsets);
  inputs.push_back(
      {testing::tensor_of({kPlaces}, {7, 7, scale, 7}), testing::Role::kConstant, "scales"});
  const RoundValues op(spec);
  const std::vector<OwnedTensor> outputs = testing::run_operator(op, table, inputs);
  Rounded result{testing::to_doubles(outputs[RoundValues::kY].get()), {}};
  if (spec.tallies) result.tally = testing::to_doubles(outputs[RoundValues::kTally].get());
  return result;
}

/// Value by value, as it is written down.
template <typename Number>
void check_against_plain(DType dtype, const Shape& shape, float scale, uint64_t seed) {
  Random random(seed, 1);
  const OwnedTensor x = testing::random_tensor(dtype, shape, random, 100.0);
  const NarrowNumber number =
      std::is_same_v<Number, E4m3> ? NarrowNumber::kE4M3 : NarrowNumber::kE5M2;
  const Rounded found = round_by(delayed(number), x.get(), scale);
  const std::vector<double> values = testing::to_doubles(x.get());
  float amax = 0;
  int64_t saturated = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const auto value = static_cast<float>(values[i]);
    amax = std::max(amax, std::abs(value));
    saturated += std::abs(value) > Number::kLargest * scale ? 1 : 0;
    ASSERT_EQ(found.y[i], static_cast<float>(Number(value / scale)) * scale) << value;
  }
  EXPECT_THAT(found.row(2), ElementsAre(bits_of(amax), x.get().num_elements(), saturated, 0));
  for (const int64_t place : {0, 1, 3}) EXPECT_THAT(found.row(place), ElementsAre(0, 0, 0, 0));
}

TEST(RoundDelayed, GivesWhatThePlainRuleGives) {
  uint64_t seed = 20;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape : {Shape{0, 8}, {3, 0}, {1, 1}, {1, 1025}, {7, 300}, {33, 512}}) {
      for (const float scale : {0x1p-3F, 1.0F, 0x1p-10F, 0x1p-20F, 0x1p12F}) {
        check_against_plain<E4m3>(dtype, shape, scale, ++seed);
        check_against_plain<E5m2>(dtype, shape, scale, ++seed);
      }
    }
  }
}

TEST(RoundDelayed, ValuesOfAnUnknownScaleStayAndAreSeen) {
  Random random(31, 1);
  const OwnedTensor x = testing::random_tensor(DType::kBF16, {5, 40}, random, 1e-6);
  const Rounded found = round_by(delayed(NarrowNumber::kE5M2), x.get(), 0);
  EXPECT_EQ(found.y, testing::to_doubles(x.get()));
  EXPECT_GT(found.row(2)[0], 0);
  EXPECT_EQ(found.row(2)[1], 200);
  EXPECT_EQ(found.row(2)[2], 0);
}

TEST(RoundDelayed, CountsForAllOperandsThatTheValuesAre) {
  RoundValuesSpec spec = delayed();
  spec.places = {2, 0, 3};
  const OwnedTensor x = testing::tensor_of({1, 4}, {449, -500, 448, 3});
  const Rounded found = round_by(spec, x.get(), 1);
  EXPECT_THAT(found.y, ElementsAre(448, -448, 448, 3));
  for (const int64_t place : spec.places)
    EXPECT_THAT(found.row(place), ElementsAre(bits_of(500), 4, 2, 0)) << place;
  EXPECT_THAT(found.row(1), ElementsAre(0, 0, 0, 0));
  spec.tallies = false;
  EXPECT_THAT(round_by(spec, x.get(), 1).y, ElementsAre(448, -448, 448, 3));
}

TEST(RoundDelayed, OverflowsWhereAsked) {
  RoundValuesSpec spec = delayed();
  spec.overflows = true;
  const OwnedTensor x = testing::tensor_of({2, 2}, {449, -500, 448, 3});
  const Rounded found = round_by(spec, x.get(), 1);
  EXPECT_TRUE(std::isnan(found.y[0]));
  EXPECT_TRUE(std::isnan(found.y[1]));
  EXPECT_EQ(found.y[2], 448);
  EXPECT_EQ(found.y[3], 3);
  EXPECT_THAT(found.row(2), ElementsAre(bits_of(500), 4, 2, 0));
}

TEST(RoundDelayed, WhatIsNotFiniteBecomesNaNAndIsNoLargestValue) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const OwnedTensor x = testing::tensor_of({1, 6}, {NAN, kInfinity, -kInfinity, 2, -3, 1e-40F});
  for (const float scale : {0.0F, 1.0F}) {
    const Rounded found = round_by(delayed(), x.get(), scale);
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(std::isnan(found.y[i]));
    EXPECT_EQ(found.y[3], 2);
    EXPECT_EQ(found.y[4], -3);
    EXPECT_THAT(found.row(2), ElementsAre(bits_of(3), 6, 0, 3));
  }
}

TEST(RoundDelayed, RowsOfNoExpertAreNotRead) {
  std::vector<float> values(24, 1000.0F);
  for (size_t i = 4; i < 16; ++i) values[i] = static_cast<float>(i);
  RoundValuesSpec spec = delayed();
  spec.offsets = true;
  const Rounded found = round_by(spec, testing::tensor_of({6, 4}, values).get(), 1, {1, 3, 3, 4});
  for (size_t i = 0; i < 24; ++i) EXPECT_EQ(std::isnan(found.y[i]), i < 4 || i >= 16) << i;
  EXPECT_THAT(found.row(2), ElementsAre(bits_of(15), 12, 0, 0));
}

/// A scale is the least power of two with which the largest value is a number, times the margin.
TEST(RoundDelayed, ScalesHaveRoomForTheLargestValue) {
  Random random(33, 1);
  for (int i = 0; i < 1000; ++i) {
    const auto amax = static_cast<float>(std::exp(10 * random.next_normal()));
    const float scale = scale_for(amax, kLargestE4m3, 0);
    EXPECT_GE(scale * kLargestE4m3, amax);
    EXPECT_LT(scale / 2 * kLargestE4m3, amax);
    EXPECT_EQ(scale_for(amax, kLargestE4m3, 3), 8 * scale);
  }
  EXPECT_EQ(scale_for(0, kLargestE4m3, 2), 0);
}

TEST(RoundDelayed, RefusesWhatItCannotDo) {
  const auto expect_refusal = [](const std::function<void(RoundValuesSpec&)>& change,
                                 const std::string& message) {
    RoundValuesSpec spec = delayed();
    change(spec);
    EXPECT_THAT([&] { make_round_values(spec); }, ThrowsMessage<UserError>(HasSubstr(message)));
  };
  expect_refusal([](auto& spec) { spec.places = {}; }, "1 to 8 places");
  expect_refusal([](auto& spec) { spec.places = {0, -1}; }, "1 to 8 places");
  expect_refusal([](auto& spec) { spec.places.resize(9); }, "1 to 8 places");
  expect_refusal([](auto& spec) { spec.cast.length = 16; }, "of all values");
  expect_refusal([](auto& spec) { spec.cast.delayed = false; }, "only delayed scales");
  const OperatorPtr op = make_round_values(delayed());
  const ValueType x{DType::kF32, {4, 4}};
  EXPECT_THROW(op->infer(std::vector<ValueType>{x}), UserError);
  EXPECT_THROW(op->infer(std::vector<ValueType>{x, {DType::kF32, {2}}}), UserError);
  EXPECT_THROW(op->infer(std::vector<ValueType>{x, {DType::kI64, {4}}}), UserError);
  EXPECT_EQ(op->infer(std::vector<ValueType>{x, {DType::kF32, {3}}}).back().shape,
            (Shape{3, kTallyColumns}));
}

}  // namespace
}  // namespace tessera
