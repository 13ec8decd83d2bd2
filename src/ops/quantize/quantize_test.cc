#include "ops/quantize/quantize.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "core/half.h"
#include "ops/quantize/quantize_testing.h"
#include "ops/round_values/round_values.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::quantize;
using testing::ScaledTensor;

const ScaleLayout kLayouts[] = {ScaleLayout::row(), ScaleLayout::block(1, 128),
                                ScaleLayout::block(128, 128), ScaleLayout::block(3, 5)};

/// What RoundValues makes of x, the same scales given as a cast.
OwnedTensor round_values(const Tensor& x, const QuantizeSpec& spec) {
  const bool by_row = spec.scale.kind == ScaleLayout::Kind::kRow;
  const auto number = spec.element == DType::kE4M3 ? NarrowNumber::kE4M3 : NarrowNumber::kE5M2;
  RoundValuesSpec rounding{.cast = {.number = number,
                                    .length = by_row ? 0 : spec.scale.columns,
                                    .width = by_row ? 1 : spec.scale.rows}};
  if (spec.turned_rows > 0) {
    rounding.sum_dim = 0;
    rounding.group_rows.assign(x.shape[0] / spec.turned_rows, spec.turned_rows);
  }
  const RoundValues op(rounding);
  OwnedTensor y(x.dtype, x.shape);
  KernelTable table;
  add_round_values_cpu(table);
  const std::vector<Tensor> outputs = {y.get()};
  table.find(RoundValues::kName)->second(op, {.inputs = std::span(&x, 1), .outputs = outputs});
  return y;
}

/// Each matrix of so many rows transposed.
std::vector<double> turn(const std::vector<double>& x, int64_t num_rows, int64_t num_columns) {
  std::vector<double> turned(x.size());
  for (int64_t i = 0; i < std::ssize(x); ++i) {
    const int64_t row = i / num_columns;
    const int64_t to_row = row / num_rows * num_columns + i % num_columns;
    turned[to_row * num_rows + row % num_rows] = x[i];
  }
  return turned;
}

TEST(Quantize, StandsForWhatRoundValuesGives) {
  Random random(3, 1);
  for (const ScaleLayout& layout : kLayouts) {
    for (const Shape& shape : {Shape{0, 16}, {1, 1}, {1, 128}, {5, 300}, {130, 257}, {3, 0}}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        for (const DType element : {DType::kE4M3, DType::kE5M2}) {
          const OwnedTensor x = testing::random_tensor(dtype, shape, random, 3.0);
          const QuantizeSpec spec{.element = element, .scale = layout};
          const ScaledTensor y = quantize(x.get(), spec);
          EXPECT_EQ(testing::values_of(y), testing::to_doubles(round_values(x.get(), spec).get()));
        }
      }
    }
  }
}

TEST(Quantize, TurnsMatrices) {
  Random random(4, 1);
  struct Case {
    int64_t matrices, rows, columns;
    ScaleLayout scale;
  };
  const ScaleLayout block = ScaleLayout::block(128, 128);
  for (const Case& c : {Case{1, 1, 1, ScaleLayout::row()},
                        {3, 5, 7, ScaleLayout::row()},
                        {2, 130, 128, block},
                        {3, 64, 256, block},
                        {0, 4, 128, block},
                        {2, 4, 6, ScaleLayout::block(3, 2)}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const OwnedTensor x =
          testing::random_tensor(dtype, {c.matrices * c.rows, c.columns}, random, 3.0);
      const QuantizeSpec spec{.scale = c.scale, .turned_rows = c.rows};
      const ScaledTensor y = quantize(x.get(), spec);
      EXPECT_EQ(y.tensor.shape, (Shape{c.matrices * c.columns, c.rows}));
      const OwnedTensor rounded = round_values(x.get(), spec);
      EXPECT_EQ(testing::values_of(y), turn(testing::to_doubles(rounded.get()), c.rows, c.columns));
    }
  }
}

TEST(Quantize, ScalesAreTheLeastPowersOfTwo) {
  const OwnedTensor x = testing::tensor_of({2, 3}, {0.5F, -0.25F, 0, -7, 3.5F, 1});
  const ScaledTensor y = quantize(x.get(), {.element = DType::kE5M2});
  EXPECT_EQ(y.scales(), (std::vector<float>{0x1p-16F, 0x1p-13F}));
  const auto* const codes = y.tensor.as<E5m2>();
  EXPECT_EQ(static_cast<float>(codes[0]), 32768);
  EXPECT_EQ(static_cast<float>(codes[1]), -16384);
  EXPECT_EQ(static_cast<float>(codes[3]), -57344);
}

TEST(Quantize, ZerosTinyNumbersAndNonFiniteOnes) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const OwnedTensor x = testing::tensor_of(
      {4, 2},
      {0, -0.0F, std::numeric_limits<float>::denorm_min(), 0, kInfinity, 2, std::nanf(""), 2});
  const ScaledTensor y = quantize(x.get(), {});
  EXPECT_EQ(y.scales()[0], 0x1p-108F);
  const std::vector<double> values = testing::values_of(y);
  EXPECT_EQ(values[0], 0);
  EXPECT_EQ(values[2], 0);
  EXPECT_FALSE(std::isfinite(values[4]));
  EXPECT_FALSE(std::isfinite(values[5]));  // of a block that overflowed nothing is left
  EXPECT_TRUE(std::isnan(values[6]));
  EXPECT_NEAR(values[7], 2, 0.1);
}

/// One by one, to nearest even, and to infinity.
TEST(Quantize, GivesHalves) {
  Random random(5, 1);
  for (const Shape& shape : {Shape{0, 16}, {1, 1}, {37, 130}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const OwnedTensor x = testing::random_tensor(dtype, shape, random, 30000);
      const ScaledTensor y = quantize(x.get(), half_spec());
      ASSERT_EQ(y.tensor.dtype, DType::kF16);
      const std::vector<double> values = testing::to_doubles(x.get());
      const std::vector<double> halves = testing::to_doubles(y.tensor);
      for (size_t i = 0; i < values.size(); ++i)
        EXPECT_EQ(halves[i], static_cast<float>(Half(static_cast<float>(values[i])))) << values[i];
    }
  }
}

TEST(Quantize, HalvesHaveNoScales) {
  EXPECT_THROW(make_quantize({.element = DType::kF16}), UserError);
  EXPECT_THROW(
      make_quantize({.element = DType::kF16, .scale = ScaleLayout::none(), .turned_rows = 4}),
      UserError);
  const ValueType ragged{DType::kF32, {6, 8}, 0, 3};
  EXPECT_EQ(make_quantize(half_spec())->infer(std::vector{ragged})[0],
            (ValueType{DType::kF16, {6, 8}, 0, 3}));
}

TEST(Quantize, RefusesWhatItCannotDo) {
  EXPECT_THROW(make_quantize({.element = DType::kBF16}), UserError);
  EXPECT_THROW(make_quantize({.scale = ScaleLayout::mx()}), UserError);
  const auto turned = [](const Shape& shape, const ScaleLayout& scale) {
    return make_quantize({.scale = scale, .turned_rows = 4})
        ->infer(std::vector<ValueType>{{.shape = shape}});
  };
  EXPECT_EQ(turned({8, 6}, ScaleLayout::block(2, 2))[0].shape, (Shape{12, 4}));
  EXPECT_THROW(turned({6, 6}, ScaleLayout::row()), UserError);
  EXPECT_THROW(turned({8, 5}, ScaleLayout::block(2, 2)), UserError);
  EXPECT_THROW(make_quantize({.turned_rows = -1}), UserError);
  const OperatorPtr blocks = make_quantize({.scale = ScaleLayout::block(2, 2)});
  const std::vector<ValueType> ragged = {
      {.shape = {4, 4}, .ragged_dim = 0, .extent = Extent(ValueId(7))}};
  EXPECT_THROW(blocks->infer(ragged), UserError);
  EXPECT_THROW(blocks->infer(std::vector<ValueType>{{.dtype = DType::kI32, .shape = {4, 4}}}),
               UserError);
}

/// Also of a part that begins and ends between blocks: what the whole matrix becomes there.
TEST(QuantizeBlocks, GivesWhatQuantizeDoesInPartsToo) {
  Random random(9, 1);
  for (const Shape& shape : {Shape{0, 16}, {1, 1}, {128, 256}, {300, 130}, {384, 128}}) {
    const OwnedTensor x = testing::random_tensor(DType::kF32, shape, random, 3.0);
    const ScaledTensor expected = quantize(x.get(), {.scale = ScaleLayout::block(128, 128)});
    const auto whole = testing::quantize_blocks(x.get());
    const auto* const bytes = static_cast<const uint8_t*>(whole.elements.get().data);
    EXPECT_EQ(std::vector<uint8_t>(bytes, bytes + shape.num_elements()), expected.elements());
    const auto scales = whole.scales.get().span<float>();
    EXPECT_EQ(std::vector<float>(scales.begin(), scales.end()), expected.scales());
    if (shape[0] < 256) continue;
    Tensor part = x.get();
    part.data = part.as<float>() + 128 * shape[1];
    part.shape[0] = 128;
    const auto found = testing::quantize_blocks(part);
    EXPECT_EQ(std::memcmp(found.elements.get().data, bytes + 128 * shape[1], 128 * shape[1]), 0);
    for (int64_t i = 0; i < found.scales.get().num_elements(); ++i)
      EXPECT_EQ(found.scales.get().as<float>()[i], scales[found.scales.get().num_elements() + i]);
  }
  EXPECT_THROW(QuantizeBlocks().infer(std::vector<ValueType>{{DType::kBF16, {128, 128}}}),
               UserError);
}

/// What is quantized and then turned is what is turned and then quantized.
TEST(TurnBlocks, GiveWhatQuantizeMakesOfTurnedMatrices) {
  Random random(13, 1);
  for (const auto& [shape, rows] :
       {std::pair(Shape{128, 128}, 128), std::pair(Shape{768, 384}, 256),
        std::pair(Shape{0, 128}, 128)}) {
    const OwnedTensor x = testing::random_tensor(DType::kBF16, shape, random, 3.0);
    const ScaleLayout blocks = ScaleLayout::block(128, 128);
    const ScaledTensor plain = quantize(x.get(), {.scale = blocks});
    const ScaledTensor found = testing::turn_blocks(plain.tensor, rows);
    const ScaledTensor expected = quantize(x.get(), {.scale = blocks, .turned_rows = rows});
    EXPECT_EQ(found.tensor.shape, expected.tensor.shape);
    EXPECT_EQ(found.elements(), expected.elements());
    EXPECT_EQ(found.scales(), expected.scales());
  }
  EXPECT_THROW(TurnBlocks(100), UserError);
}

}  // namespace
}  // namespace tessera
