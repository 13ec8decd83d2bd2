#include "checkpoint/format/cover.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/random.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

int64_t below(Random& random, int64_t bound) {
  return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
}

Shape random_shape(Random& random) {
  std::vector<int64_t> dims;
  for (int64_t rank = below(random, 4); rank > 0; --rank) dims.push_back(below(random, 5));
  return Shape(dims);
}

Rectangle random_rectangle(Random& random, const Shape& global) {
  Rectangle rectangle = whole(global);
  for (int dim = 0; dim < global.rank(); ++dim) {
    if (below(random, 2) == 0) continue;
    rectangle.offset[dim] = below(random, global[dim] + 1);
    rectangle.shape[dim] = below(random, global[dim] - rectangle.offset[dim] + 1);
  }
  return rectangle;
}

/// How many pieces hold each element, in row-major order.
std::vector<int> count_holders(const Shape& global, const std::vector<TensorPiece>& pieces) {
  std::vector<int> counts;
  for (int64_t i = 0; i < global.num_elements(); ++i) {
    Rectangle element = whole(global);
    int64_t rest = i;
    for (int dim = global.rank() - 1; dim >= 0; --dim) {
      element.offset[dim] = rest % global[dim];
      element.shape[dim] = 1;
      rest /= global[dim];
    }
    counts.push_back(static_cast<int>(std::ranges::count_if(pieces, [&](const TensorPiece& piece) {
      return piece.rectangle.shape.num_elements() > 0 && contains(piece.rectangle, element);
    })));
  }
  return counts;
}

int64_t linear(const Shape& global, const Shape& index) {
  int64_t result = 0;
  for (int dim = 0; dim < global.rank(); ++dim) result = result * global[dim] + index[dim];
  return result;
}

TEST(Cover, AgreesWithCountingElementByElement) {
  Random random(1, 0);
  int num_exact = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const Shape global = random_shape(random);
    std::vector<TensorPiece> pieces;
    for (int64_t count = below(random, 5); count > 0; --count) {
      pieces.push_back({"file", "key", random_rectangle(random, global)});
    }
    const auto counts = count_holders(global, pieces);
    const bool exact = std::ranges::all_of(counts, [](int count) { return count == 1; });
    EXPECT_EQ(cover_defect(global, pieces).empty(), exact) << cover_defect(global, pieces);
    const auto hole = find_hole(global, pieces);
    const auto expected = std::ranges::find(counts, 0);
    ASSERT_EQ(hole.has_value(), expected != counts.end());
    if (hole) {
      EXPECT_EQ(linear(global, *hole), expected - counts.begin());
    }
    num_exact += exact ? 1 : 0;
  }
  EXPECT_GT(num_exact, 100);
}

TEST(Cover, NamesTheFilesOfOverlappingPieces) {
  const std::vector<TensorPiece> pieces = {{"a", "k", {Shape{0, 0}, Shape{2, 4}}},
                                           {"b", "k", {Shape{2, 0}, Shape{2, 4}}},
                                           {"c", "k", {Shape{3, 3}, Shape{1, 1}}}};
  EXPECT_THAT(cover_defect({4, 4}, pieces), HasSubstr("[2, 0] of shape [2, 4] in b and at [3, 3]"));
}

/// As of many ranks: found without comparing every piece with every other.
TEST(Cover, TakesManyPieces) {
  constexpr int64_t kCount = 100'000;
  std::vector<TensorPiece> pieces;
  for (int64_t row = 0; row < kCount; ++row) pieces.push_back({"f", "k", {Shape{row}, Shape{1}}});
  EXPECT_EQ(cover_defect({kCount}, pieces), "");
  pieces.pop_back();
  EXPECT_EQ(cover_defect({kCount}, pieces), "its pieces hold 99999 of 100000 elements");
}

}  // namespace
}  // namespace tessera
