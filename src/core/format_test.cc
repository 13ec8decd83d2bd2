#include "core/format.h"

#include <gtest/gtest.h>

#include "core/memory.h"

namespace tessera {
namespace {

TEST(Format, WithoutScalesIsItsElements) {
  const Format bf16 = DType::kBF16;
  EXPECT_EQ(bf16.name(), "bf16");
  EXPECT_TRUE(bf16.scales({3, 5}).empty());
  EXPECT_EQ(bf16.num_bytes({3, 5}), 30);
  EXPECT_EQ(bf16.num_bytes({0, 5}), 0);
  EXPECT_EQ(bf16, Format(DType::kBF16, ScaleLayout::none()));
  EXPECT_FALSE(bf16 == Format(DType::kBF16, ScaleLayout::row()));
}

struct Case {
  ScaleLayout scale;
  const char* name;
  Shape shape;
  std::vector<Shape> scales;
};

TEST(Format, CarriesTheScalesOfItsLayout) {
  const std::vector<Case> cases = {
      {ScaleLayout::tensor(), "u8 tensor", {7, 3}, {{1}}},
      {ScaleLayout::row(), "u8 row", {2, 7, 3}, {{14}}},
      {ScaleLayout::block(128, 64), "u8 block 128x64", {129, 64}, {{2, 1}}},
      {ScaleLayout::block(2, 2), "u8 block 2x2", {0, 5}, {{0, 3}}},
      {ScaleLayout::mx(), "u8 mx", {3, 33}, {{3, 2}}},
      {ScaleLayout::mx(), "u8 mx", {3, 32}, {{3, 1}}},
      {ScaleLayout::nv(), "u8 nv", {2, 5, 17}, {{2, 5, 2}, {1}}},
  };
  for (const Case& c : cases) {
    const Format format(DType::kU8, c.scale);
    EXPECT_EQ(format.name(), c.name);
    const auto scales = format.scales(c.shape);
    ASSERT_EQ(scales.size(), c.scales.size()) << c.name;
    int64_t end = c.shape.num_elements();
    for (size_t i = 0; i < scales.size(); ++i) {
      EXPECT_EQ(scales[i].shape, c.scales[i]) << c.name;
      EXPECT_EQ(scales[i].offset, align_up(end)) << c.name;
      end = scales[i].offset + scales[i].num_bytes();
    }
    EXPECT_EQ(format.num_bytes(c.shape), end) << c.name;
  }
}

TEST(Format, ScalesLieBehindTheElements) {
  const Format format(DType::kU8, ScaleLayout::nv());
  const Shape shape{2, 40};
  const Buffer buffer(format.num_bytes(shape), "a test");
  const Tensor tensor{buffer.data(), format.element, shape, nullptr, format.scale};
  EXPECT_EQ(tensor.num_bytes(), buffer.num_bytes());
  const Tensor blocks = scales_of(tensor);
  EXPECT_EQ(blocks.shape, (Shape{2, 3}));
  EXPECT_EQ(static_cast<std::byte*>(blocks.data), buffer.data() + align_up(80));
  EXPECT_EQ(*scales_of(tensor, 1).as<float>(), 0);
  EXPECT_THROW(scales_of(tensor, 2), InternalError);
  EXPECT_THROW(ScaleLayout::block(0, 1), InternalError);
}

TEST(ElementTypes, SayWhatTheyAreFor) {
  EXPECT_TRUE(is_storage(DType::kF32) && is_storage(DType::kBF16));
  EXPECT_FALSE(is_storage(DType::kF16) || is_storage(DType::kI32));
  EXPECT_TRUE(is_low_precision(DType::kBF16));
  EXPECT_FALSE(is_low_precision(DType::kF32));
}

}  // namespace
}  // namespace tessera
