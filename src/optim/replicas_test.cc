#include "optim/replicas.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "core/random.h"

namespace tessera {
namespace {

using testing::ElementsAre;

Bucket make_bucket(std::span<const CutTensor> tensors, int64_t num_shares, int64_t alignment = 1) {
  ShareLoads loads;
  return make_bucket(tensors, num_shares, alignment, loads);
}

std::vector<CutTensor> random_tensors(Random& random) {
  std::vector<CutTensor> tensors(random.next_below(8));
  for (CutTensor& tensor : tensors) {
    Shape& shape = tensor.shape;
    const auto rows = static_cast<int64_t>(random.next_below(20));
    const auto columns = static_cast<int64_t>(random.next_below(9));
    shape = random.next_below(3) == 0 ? Shape{rows} : Shape{rows, columns};
  }
  return tensors;
}

int64_t row_size(const Shape& shape) {
  return shape.rank() == 1 ? 1 : shape[1];
}

TEST(MakeBuckets, TakesParametersFromTheEndWhileTheyFit) {
  const std::vector<CutTensor> tensors = {{{4}}, {{2, 2}}, {{100}}, {{1}}, {{3}}, {{0}}};
  const std::vector<Bucket> buckets = make_buckets(tensors, 32, 2);
  ASSERT_EQ(buckets.size(), 3);
  EXPECT_EQ(buckets[0].parameters, (IndexRange{3, 3}));
  EXPECT_THAT(buckets[0].offsets, ElementsAre(0, 1, 4, 4));
  EXPECT_EQ(buckets[1].parameters, (IndexRange{2, 1}));
  EXPECT_EQ(buckets[2].parameters, (IndexRange{0, 2}));
  EXPECT_TRUE(make_buckets({}, 32, 2).empty());
}

TEST(MakeBuckets, BoundsAreTheNearestBeginningsOfRows) {
  // Rows begin at 0, 5, 10, 15, 20 and then at every element to 26.
  const std::vector<CutTensor> tensors = {{{4, 5}}, {{6}}};
  EXPECT_THAT(make_bucket(tensors, 2).bounds, ElementsAre(0, 15, 26));
  EXPECT_THAT(make_bucket(tensors, 4).bounds, ElementsAre(0, 5, 15, 20, 26));
  EXPECT_THAT(make_bucket(tensors, 1).bounds, ElementsAre(0, 26));
  const std::vector<CutTensor> one = {{{1, 7}}};
  EXPECT_THAT(make_bucket(one, 3).bounds, ElementsAre(0, 0, 7, 7));
}

TEST(MakeBuckets, RowsOfAUnitStayTogether) {
  // Rows of 2 may be cut behind the fourth, the eighth and the ninth.
  const std::vector<CutTensor> tensors = {{.shape = {9, 2}, .unit_rows = 4}, {.shape = {2}}};
  EXPECT_THAT(make_bucket(tensors, 2).bounds, ElementsAre(0, 8, 20));
  EXPECT_THAT(make_bucket(tensors, 3).bounds, ElementsAre(0, 8, 16, 20));
}

TEST(MakeBuckets, SharesCoverEveryRowOnceAndAreBalanced) {
  Random random(11, 0);
  for (int trial = 0; trial < 300; ++trial) {
    const std::vector<CutTensor> tensors = random_tensors(random);
    const auto num_shares = static_cast<int64_t>(1 + random.next_below(6));
    std::vector<bool> seen(tensors.size());
    for (const Bucket& bucket :
         make_buckets(tensors, static_cast<int64_t>(random.next_below(600)), num_shares)) {
      int64_t largest_row = 0;
      for (int64_t k = 0; k < bucket.parameters.count; ++k) {
        const size_t idx = bucket.parameters.begin + k;
        EXPECT_FALSE(seen[idx]);
        seen[idx] = true;
        largest_row = std::max(largest_row, row_size(tensors[idx].shape));
        int64_t next_row = 0;
        for (int64_t share = 0; share < num_shares; ++share) {
          const IndexRange rows = share_rows(bucket, k, tensors[idx].shape, share);
          EXPECT_TRUE(rows.count == 0 || rows.begin == next_row);
          next_row += rows.count;
        }
        EXPECT_EQ(next_row, tensors[idx].shape[0]);
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
    const std::vector<CutTensor> tensors = random_tensors(random);
    const auto num_shares = static_cast<int64_t>(1 + random.next_below(6));
    const Bucket bucket = make_bucket(tensors, num_shares, 32);
    EXPECT_TRUE(std::ranges::is_sorted(bucket.bounds));
    EXPECT_EQ(bucket.bounds.back(), bucket.num_elements());
    for (size_t k = 0; k < tensors.size(); ++k) {
      EXPECT_EQ(bucket.offsets[k] % 32, 0);
      int64_t num_rows = 0;
      for (int64_t share = 0; share < num_shares; ++share) {
        const IndexRange rows = share_rows(bucket, k, tensors[k].shape, share);
        num_rows += rows.count;
        if (rows.count == 0 || row_size(tensors[k].shape) == 0) continue;
        const int64_t first = bucket.offsets[k] + rows.begin * row_size(tensors[k].shape);
        EXPECT_GE(first, bucket.bounds[share]);
        EXPECT_LE(first + rows.count * row_size(tensors[k].shape), bucket.bounds[share + 1]);
      }
      EXPECT_EQ(num_rows, tensors[k].shape[0]);
    }
  }
}

TEST(MakeBuckets, MatricesAreNotCut) {
  // Matrices begin at 0, 8, 24 and 28; the vector's elements from 32 on.
  const std::vector<CutTensor> tensors = {{{8, 4}, {2, 4, 1, 1}}, {{8}}};
  EXPECT_THAT(make_bucket(tensors, 2).bounds, ElementsAre(0, 24, 40));
  EXPECT_THAT(make_bucket(tensors, 4).bounds, ElementsAre(0, 8, 24, 28, 40));
  Random random(13, 0);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<CutTensor> parts = random_tensors(random);
    for (CutTensor& tensor : parts) {
      for (int64_t rows = tensor.shape[0]; rows > 0; rows -= tensor.matrix_rows.back())
        tensor.matrix_rows.push_back(static_cast<int64_t>(1 + random.next_below(rows)));
    }
    const auto num_shares = static_cast<int64_t>(1 + random.next_below(6));
    for (const Bucket& bucket :
         make_buckets(parts, static_cast<int64_t>(random.next_below(600)), num_shares)) {
      EXPECT_TRUE(std::ranges::is_sorted(bucket.bounds));
      for (int64_t k = 0; k < bucket.parameters.count; ++k) {
        const CutTensor& tensor = parts[bucket.parameters.begin + k];
        std::vector<int64_t> joined;
        for (int64_t share = 0; share < num_shares; ++share) {
          const IndexRange rows = share_rows(bucket, k, tensor.shape, share);
          const auto own = take_matrices(tensor.matrix_rows, rows);
          EXPECT_EQ(std::accumulate(own.begin(), own.end(), int64_t{0}), rows.count);
          joined.insert(joined.end(), own.begin(), own.end());
        }
        EXPECT_EQ(joined, tensor.matrix_rows);
      }
    }
  }
}

TEST(MakeBuckets, MatricesOfBucketsEachGoToAllSharesInTurn) {
  // As a dense model's: each matrix fills a bucket.
  const std::vector<CutTensor> tensors(12, {{16, 16}, {16}});
  ShareLoads owned(4);
  for (const Bucket& bucket : make_buckets(tensors, 1, 4)) {
    for (int64_t share = 0; share < 4; ++share) owned[share] += bucket.elements(share).count;
  }
  EXPECT_THAT(owned, ElementsAre(768, 768, 768, 768));
}

TEST(MakeBuckets, LargeCountsDoNotOverflow) {
  const std::vector<CutTensor> tensors = {{{int64_t{1} << 40, 1 << 14}}};
  const Bucket bucket = make_bucket(tensors, 1000);
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
