#include "optim/replicas.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "core/random.h"

namespace tessera {
namespace {

using testing::ElementsAre;

std::vector<Shape> random_shapes(Random& random) {
  std::vector<Shape> shapes(random.next_below(8));
  for (Shape& shape : shapes) {
    const auto rows = static_cast<int64_t>(random.next_below(20));
    const auto columns = static_cast<int64_t>(random.next_below(9));
    shape = random.next_below(3) == 0 ? Shape{rows} : Shape{rows, columns};
  }
  return shapes;
}

int64_t row_size(const Shape& shape) {
  return shape.rank() == 1 ? 1 : shape[1];
}

TEST(MakeBuckets, TakesParametersFromTheEndWhileTheyFit) {
  const std::vector<Shape> shapes = {{4}, {2, 2}, {100}, {1}, {3}, {0}};
  const std::vector<Bucket> buckets = make_buckets(shapes, 32, 2);
  ASSERT_EQ(buckets.size(), 3);
  EXPECT_EQ(buckets[0].parameters, (IndexRange{3, 3}));
  EXPECT_THAT(buckets[0].offsets, ElementsAre(0, 1, 4, 4));
  EXPECT_EQ(buckets[1].parameters, (IndexRange{2, 1}));
  EXPECT_EQ(buckets[2].parameters, (IndexRange{0, 2}));
  EXPECT_TRUE(make_buckets({}, 32, 2).empty());
}

TEST(MakeBuckets, BoundsAreTheNearestBeginningsOfRows) {
  // Rows begin at 0, 5, 10, 15, 20 and then at every element to 26.
  const std::vector<Shape> shapes = {{4, 5}, {6}};
  EXPECT_THAT(make_bucket(shapes, 2).bounds, ElementsAre(0, 15, 26));
  EXPECT_THAT(make_bucket(shapes, 4).bounds, ElementsAre(0, 5, 15, 20, 26));
  EXPECT_THAT(make_bucket(shapes, 1).bounds, ElementsAre(0, 26));
  const std::vector<Shape> one = {{1, 7}};
  EXPECT_THAT(make_bucket(one, 3).bounds, ElementsAre(0, 0, 7, 7));
}

TEST(MakeBuckets, SharesCoverEveryRowOnceAndAreBalanced) {
  Random random(11, 0);
  for (int trial = 0; trial < 300; ++trial) {
    const std::vector<Shape> shapes = random_shapes(random);
    const auto num_shares = static_cast<int64_t>(1 + random.next_below(6));
    std::vector<bool> seen(shapes.size());
    for (const Bucket& bucket :
         make_buckets(shapes, static_cast<int64_t>(random.next_below(600)), num_shares)) {
      int64_t largest_row = 0;
      for (int64_t k = 0; k < bucket.parameters.count; ++k) {
        const size_t idx = bucket.parameters.begin + k;
        EXPECT_FALSE(seen[idx]);
        seen[idx] = true;
        largest_row = std::max(largest_row, row_size(shapes[idx]));
        int64_t next_row = 0;
        for (int64_t share = 0; share < num_shares; ++share) {
          const IndexRange rows = share_rows(bucket, k, shapes[idx], share);
          EXPECT_TRUE(rows.count == 0 || rows.begin == next_row);
          next_row += rows.count;
        }
        EXPECT_EQ(next_row, shapes[idx][0]);
      }
      for (int64_t share = 0; share < num_shares; ++share)
        EXPECT_LE(bucket.elements(share).count, bucket.num_elements() / num_shares + largest_row);
      EXPECT_EQ(bucket.bounds.back(), bucket.num_elements());
    }
    EXPECT_TRUE(std::ranges::all_of(seen, std::identity()));
  }
}

TEST(MakeBuckets, AlignedParametersAreCutAtRowsToo) {
  Random random(12, 0);
  for (int trial = 0; trial < 200; ++trial) {
    const std::vector<Shape> shapes = random_shapes(random);
    const auto num_shares = static_cast<int64_t>(1 + random.next_below(6));
    const Bucket bucket = make_bucket(shapes, num_shares, 32);
    EXPECT_TRUE(std::ranges::is_sorted(bucket.bounds));
    EXPECT_EQ(bucket.bounds.back(), bucket.num_elements());
    for (size_t k = 0; k < shapes.size(); ++k) {
      EXPECT_EQ(bucket.offsets[k] % 32, 0);
      int64_t num_rows = 0;
      for (int64_t share = 0; share < num_shares; ++share) {
        const IndexRange rows = share_rows(bucket, k, shapes[k], share);
        num_rows += rows.count;
        if (rows.count == 0 || row_size(shapes[k]) == 0) continue;
        const int64_t first = bucket.offsets[k] + rows.begin * row_size(shapes[k]);
        EXPECT_GE(first, bucket.bounds[share]);
        EXPECT_LE(first + rows.count * row_size(shapes[k]), bucket.bounds[share + 1]);
      }
      EXPECT_EQ(num_rows, shapes[k][0]);
    }
  }
}

TEST(MakeBuckets, LargeCountsDoNotOverflow) {
  const std::vector<Shape> shapes = {{int64_t{1} << 40, 1 << 14}};
  const Bucket bucket = make_bucket(shapes, 1000);
  EXPECT_EQ(bucket.bounds[500], int64_t{1} << 53);
}

TEST(TakeRows, ViewsRows) {
  std::vector<float> values(12);
  std::iota(values.begin(), values.end(), 0.0F);
  const Tensor rows = take_rows(view(std::span(values), {4, 3}), {1, 2});
  EXPECT_EQ(rows.shape, (Shape{2, 3}));
  EXPECT_EQ(rows.as<float>()[0], 3.0F);
  EXPECT_EQ(take_rows({nullptr, DType::kF32, {4, 3}}, {1, 2}).data, nullptr);
}

}  // namespace
}  // namespace tessera
