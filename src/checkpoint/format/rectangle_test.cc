#include "checkpoint/format/rectangle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <map>
#include <vector>

#include "core/random.h"

namespace tessera {
namespace {

int64_t below(Random& random, int64_t bound) {
  return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
}

Shape random_shape(Random& random, int rank, int64_t most) {
  std::vector<int64_t> dims;
  for (int dim = 0; dim < rank; ++dim) dims.push_back(below(random, most + 1));
  return Shape(dims);
}

Rectangle random_part(Random& random, const Rectangle& of) {
  Rectangle part = of;
  for (int dim = 0; dim < of.shape.rank(); ++dim) {
    const int64_t begin = below(random, of.shape[dim] + 1);
    part.offset[dim] = of.offset[dim] + begin;
    part.shape[dim] = below(random, of.shape[dim] - begin + 1);
  }
  return part;
}

/// All indices of a rectangle in row-major order: the plain reference of what copying means.
std::vector<std::vector<int64_t>> indices(const Rectangle& rectangle) {
  std::vector<std::vector<int64_t>> all = {{}};
  for (int dim = 0; dim < rectangle.shape.rank(); ++dim) {
    std::vector<std::vector<int64_t>> longer;
    for (const auto& prefix : all) {
      for (int64_t i = 0; i < rectangle.shape[dim]; ++i) {
        longer.push_back(prefix);
        longer.back().push_back(rectangle.offset[dim] + i);
      }
    }
    all = std::move(longer);
  }
  return all;
}

template <typename T>
std::map<std::vector<int64_t>, T> by_index(const Rectangle& rectangle,
                                           const std::vector<T>& elements) {
  std::map<std::vector<int64_t>, T> result;
  size_t i = 0;
  for (const auto& index : indices(rectangle)) result[index] = elements[i++];
  return result;
}

TEST(Rectangle, IntersectionIsTheCommonIndices) {
  Random random(3, 0);
  for (int trial = 0; trial < 500; ++trial) {
    const int rank = static_cast<int>(random.next_below(4));
    const Rectangle all = whole(random_shape(random, rank, 5));
    const Rectangle a = random_part(random, all);
    const Rectangle b = random_part(random, all);
    std::vector<std::vector<int64_t>> common;
    std::ranges::set_intersection(indices(a), indices(b), std::back_inserter(common));
    const auto both = intersect(a, b);
    EXPECT_EQ(both ? indices(*both) : std::vector<std::vector<int64_t>>(), common);
  }
}

TEST(Rectangle, ContainsResistsOverflow) {
  const Rectangle outer = whole(Shape{4});
  EXPECT_TRUE(contains(outer, {Shape{4}, Shape{0}}));
  EXPECT_FALSE(contains(outer, {Shape{5}, Shape{0}}));
  EXPECT_FALSE(contains(outer, {Shape{-1}, Shape{2}}));
  EXPECT_FALSE(contains(outer, {Shape{INT64_MAX}, Shape{INT64_MAX}}));
  EXPECT_FALSE(contains(outer, {Shape{0, 0}, Shape{1}}));
  EXPECT_FALSE(contains(outer, {Shape{}, Shape{}}));
}

TEST(Rectangle, CopiesExactlyThePart) {
  Random random(4, 0);
  for (int trial = 0; trial < 500; ++trial) {
    const int rank = static_cast<int>(random.next_below(5));
    const Rectangle all = whole(random_shape(random, rank, 5));
    const Rectangle from = random_part(random, all);
    const Rectangle to = random_part(random, all);
    const auto part = intersect(from, to);
    if (!part) continue;
    std::vector<int32_t> source(from.shape.num_elements());
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<int32_t>(i);
    std::vector<int32_t> target(to.shape.num_elements(), -1);
    copy_rectangle(*part, {reinterpret_cast<std::byte*>(source.data()), DType::kI32, from},
                   {reinterpret_cast<std::byte*>(target.data()), DType::kI32, to});
    const auto expected = by_index(from, source);
    for (const auto& [index, value] : by_index(to, target)) {
      const auto found = expected.find(index);
      EXPECT_EQ(value, found == expected.end() ? -1 : found->second);
    }
  }
}

TEST(Rectangle, ConvertsFloatsFromUnalignedBytes) {
  const std::vector<float> values = {1.0F, -2.5F, 3.1415927F, INFINITY, 0.0F, -1e-40F};
  const auto count = static_cast<int64_t>(values.size());
  const Rectangle all = whole(Shape{count});
  std::vector<std::byte> unaligned(values.size() * 4 + 1);
  std::memcpy(unaligned.data() + 1, values.data(), values.size() * 4);
  std::vector<Bf16> narrow(values.size());
  copy_rectangle(all, {unaligned.data() + 1, DType::kF32, all},
                 {reinterpret_cast<std::byte*>(narrow.data()), DType::kBF16, all});
  std::vector<float> wide(values.size());
  copy_rectangle(all, {reinterpret_cast<std::byte*>(narrow.data()), DType::kBF16, all},
                 {reinterpret_cast<std::byte*>(wide.data()), DType::kF32, all});
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(wide[i], float(Bf16(values[i])));
}

}  // namespace
}  // namespace tessera
