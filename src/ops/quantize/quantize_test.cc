#include "ops/quantize/quantize.h"

#include <gtest/gtest.h>

#include <limits>

#include "ops/quantize/quantize_testing.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::quantize;
using testing::ScaledTensor;

const ScaleLayout kLayouts[] = {ScaleLayout::row(), ScaleLayout::block(1, 128),
                                ScaleLayout::block(128, 128), ScaleLayout::block(3, 5)};

/// The largest of each scale's elements, found element by element.
std::vector<float> largest_by_scale(const std::vector<double>& x, const Shape& shape,
                                    const ScaleLayout& layout) {
  const bool by_row = layout.kind == ScaleLayout::Kind::kRow;
  const int64_t rows = by_row ? 1 : layout.rows;
  const int64_t columns = by_row ? std::max<int64_t>(shape[1], 1) : layout.columns;
  const int64_t across = (shape[1] + columns - 1) / columns;
  std::vector<float> largest((shape[0] + rows - 1) / rows * across, 0);
  for (int64_t i = 0; i < shape.num_elements(); ++i) {
    float& own = largest[i / shape[1] / rows * across + i % shape[1] / columns];
    own = std::max(own, static_cast<float>(std::abs(x[i])));
  }
  return largest;
}

TEST(Quantize, ScalesAndElementsOfRandomShapes) {
  Random random(3, 1);
  for (const ScaleLayout& layout : kLayouts) {
    for (const Shape& shape : {Shape{0, 16}, {1, 1}, {1, 128}, {5, 300}, {130, 257}, {3, 0}}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const OwnedTensor x = testing::random_tensor(dtype, shape, random, 3.0);
        const ScaledTensor y = quantize(x.get(), {.scale = layout});
        const std::vector<double> expected = testing::to_doubles(x.get());
        const std::vector<float> largest = largest_by_scale(expected, shape, layout);
        const std::vector<float> scales = y.scales();
        if (shape.num_elements() == 0) continue;
        ASSERT_EQ(scales.size(), largest.size());
        for (size_t i = 0; i < scales.size(); ++i) EXPECT_EQ(scales[i], largest[i] / 448.0F);
        const std::vector<double> found = testing::values_of(y);
        // Half of the last of three digits, or of the smallest number.
        for (size_t i = 0; i < found.size(); ++i)
          EXPECT_NEAR(found[i], expected[i], std::abs(expected[i]) / 15.9 + 4e-5);
      }
    }
  }
}

TEST(Quantize, LargestElementsBecomeTheLargestNumbers) {
  const OwnedTensor x = testing::tensor_of({2, 3}, {0.5F, -0.25F, 0, -7, 3.5F, 1});
  const ScaledTensor y = quantize(x.get(), {.element = DType::kE5M2});
  EXPECT_EQ(y.scales(), (std::vector<float>{0.5F / 57344, 7.0F / 57344}));
  const auto* const codes = y.tensor.as<E5m2>();
  EXPECT_EQ(static_cast<float>(codes[0]), 57344);
  EXPECT_EQ(static_cast<float>(codes[1]), -28672);
  EXPECT_EQ(static_cast<float>(codes[3]), -57344);
}

TEST(Quantize, ZerosTinyNumbersAndNonFiniteOnes) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const OwnedTensor x = testing::tensor_of(
      {4, 2},
      {0, -0.0F, std::numeric_limits<float>::denorm_min(), 0, kInfinity, 2, std::nanf(""), 2});
  const ScaledTensor y = quantize(x.get(), {});
  EXPECT_EQ(y.scales()[0], Quantize::kSmallestAmax / 448.0F);
  const std::vector<double> values = testing::values_of(y);
  EXPECT_EQ(values[0], 0);
  EXPECT_EQ(values[2], 0);
  EXPECT_FALSE(std::isfinite(values[4]));
  EXPECT_FALSE(std::isfinite(values[5]));  // of a block that overflowed nothing is left
  EXPECT_TRUE(std::isnan(values[6]));
  EXPECT_NEAR(values[7], 2, 0.1);
}

TEST(Quantize, RefusesWhatItCannotDo) {
  EXPECT_THROW(make_quantize({.element = DType::kBF16}), UserError);
  EXPECT_THROW(make_quantize({.scale = ScaleLayout::mx()}), UserError);
  const OperatorPtr blocks = make_quantize({.scale = ScaleLayout::block(2, 2)});
  const std::vector<ValueType> ragged = {
      {.shape = {4, 4}, .ragged_dim = 0, .extent = Extent(ValueId(7))}};
  EXPECT_THROW(blocks->infer(ragged), UserError);
  EXPECT_THROW(blocks->infer(std::vector<ValueType>{{.dtype = DType::kI32, .shape = {4, 4}}}),
               UserError);
}

}  // namespace
}  // namespace tessera
