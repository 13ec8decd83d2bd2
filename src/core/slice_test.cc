#include "core/slice.h"

#include <gtest/gtest.h>

#include <numeric>

#include "core/random.h"

namespace tessera {
namespace {

std::vector<int32_t> iota(int64_t count) {
  std::vector<int32_t> values(count);
  std::iota(values.begin(), values.end(), 0);
  return values;
}

TEST(Slice, RowsAreTakenOneBelowTheOther) {
  auto whole = iota(12);
  const Slice slice = Slice::of_rows({6, 2}, {{4, 1}, {1, 2}});
  std::vector<int32_t> local(6);
  copy_slice_from(slice, view(std::span(whole), {6, 2}), view(std::span(local), {3, 2}));
  EXPECT_EQ(local, (std::vector<int32_t>{8, 9, 2, 3, 4, 5}));
  EXPECT_EQ(slice.take_rows(1, 1), Slice::of_rows({6, 2}, {{1, 1}}));
  EXPECT_EQ(slice.take_rows(3, 0).num_rows(), 0);
}

TEST(Slice, ColumnsComeBackWhereTheyWere) {
  auto whole = iota(12);
  const Slice slice = Slice::of_columns({3, 4}, {1, 2}).take_rows(1, 2);
  std::vector<int32_t> local(4);
  copy_slice_from(slice, view(std::span(whole), {3, 4}), view(std::span(local), {2, 2}));
  EXPECT_EQ(local, (std::vector<int32_t>{5, 6, 9, 10}));
  std::vector<int32_t> back(12, -1);
  copy_slice_into(slice, view(std::span(local), {2, 2}), view(std::span(back), {3, 4}));
  EXPECT_EQ(back, (std::vector<int32_t>{-1, -1, -1, -1, -1, 5, 6, -1, -1, 9, 10, -1}));
}

TEST(Slice, NeighbouringRangesAreOne) {
  EXPECT_TRUE(Slice::of_rows({5, 2}, {{0, 2}, {2, 0}, {2, 3}}).is_whole());
  EXPECT_FALSE(Slice::of_rows({5}, {{2, 3}, {0, 2}}).is_whole());
}

TEST(Slice, RandomCutsCoverTheWhole) {
  Random random(5, 1);
  for (int round = 0; round < 200; ++round) {
    const auto rows = static_cast<int64_t>(random.next_below(9));
    const auto columns = static_cast<int64_t>(1 + random.next_below(5));
    const auto parts = static_cast<int64_t>(1 + random.next_below(4));
    const Slice all = Slice::whole({rows, columns});
    auto whole = iota(rows * columns);
    std::vector<int32_t> back(whole.size(), -1);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = rows * part / parts;
      const Slice slice = all.take_rows(begin, rows * (part + 1) / parts - begin);
      std::vector<int32_t> local(slice.shape().num_elements());
      copy_slice_from(slice, view(std::span(whole), all.global),
                      view(std::span(local), slice.shape()));
      copy_slice_into(slice, view(std::span(local), slice.shape()),
                      view(std::span(back), all.global));
    }
    EXPECT_EQ(back, whole);
  }
}

TEST(Slice, OutOfRangeIsRefused) {
  EXPECT_THROW(Slice::of_rows({4, 2}, {{3, 2}}), InternalError);
  EXPECT_THROW(Slice::of_columns({4}, {0, 1}), InternalError);
  EXPECT_THROW(Slice::whole({4}).take_rows(3, 2), InternalError);
}

}  // namespace
}  // namespace tessera
