#include "optim/exchange/gradient_reducer.h"

#include <gtest/gtest.h>

#include <numeric>

#include "comm/thread/thread_world.h"
#include "core/random.h"
#include "optim/replicas.h"

namespace tessera {
namespace {

/// Gradients of all ranks, by rank and parameter.
using Bf16Gradients = std::vector<std::vector<std::vector<Bf16>>>;

Bf16Gradients random_gradients(int64_t num_ranks, const std::vector<Shape>& shapes) {
  Bf16Gradients all(num_ranks);
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    for (size_t p = 0; p < shapes.size(); ++p) {
      std::vector<float> values(shapes[p].num_elements());
      fill_normal(values, 3, mix(static_cast<uint64_t>(rank), p), 1.0F);
      std::vector<Bf16>& grad = all[rank].emplace_back();
      for (const float value : values) grad.emplace_back(value);
    }
  }
  return all;
}

/// Sums in F32 in the order of the ranks, rounded once.
std::vector<Bf16> sum_of(const Bf16Gradients& all, size_t parameter) {
  std::vector<Bf16> sum;
  for (size_t i = 0; i < all[0][parameter].size(); ++i) {
    float total = 0;
    for (const auto& rank : all) total += rank[parameter][i];
    sum.emplace_back(total);
  }
  return sum;
}

/// Each rank's rows are the sums, for two steps.
void check_reduction(int64_t num_ranks, int64_t bucket_bytes, int64_t piece_bytes,
                     GradientCompression compression) {
  SCOPED_TRACE(
      fmt::format("{} ranks, buckets of {}, pieces of {}", num_ranks, bucket_bytes, piece_bytes));
  const std::vector<Shape> shapes = {{7, 5}, {1, 3}, {0, 4}, {64, 33}, {9}, {130, 2}};
  std::vector<CutTensor> cut;
  for (const Shape& shape : shapes) cut.push_back({shape});
  const std::vector<Bucket> buckets = make_buckets(cut, bucket_bytes, num_ranks);
  const Bf16Gradients all = random_gradients(num_ranks, shapes);
  std::vector<int64_t> ranks(num_ranks);
  std::iota(ranks.begin(), ranks.end(), 0);
  run_thread_world(num_ranks, [&](World& world) {
    const ReplicaGroup group{.outer = world.make_group("all", ranks)};
    auto own = all[world.rank()];
    std::vector<Tensor> grads;
    for (size_t p = 0; p < shapes.size(); ++p)
      grads.push_back({own[p].data(), DType::kBF16, shapes[p]});
    const ReductionOptions options{.compression = compression, .piece_bytes = piece_bytes};
    GradientReducer reducer(group, buckets, grads, options);
    EXPECT_EQ(reducer.staging_bytes(),
              GradientReducer::count_staging(group, buckets, grads, options, optimizer_on_host()));
    for (int step = 0; step < 2; ++step) {
      for (size_t p = 0; p < shapes.size(); ++p) own[p] = all[world.rank()][p];
      for (size_t p = shapes.size(); p-- > 0;) reducer.ready(p);
      reducer.finish();
      for (const Bucket& bucket : buckets) {
        for (int64_t k = 0; k < bucket.parameters.count; ++k) {
          const size_t p = bucket.parameters.begin + k;
          const IndexRange rows = share_rows(bucket, k, shapes[p], world.rank());
          const std::vector<Bf16> sum = sum_of(all, p);
          const int64_t width = shapes[p].num_elements() / std::max<int64_t>(shapes[p][0], 1);
          for (int64_t i = rows.begin * width; i < rows.end() * width; ++i)
            ASSERT_EQ(own[p][i].bits, sum[i].bits) << "parameter " << p << ", element " << i;
        }
      }
    }
  });
}

TEST(GradientReducer, SumsBf16InF32AndRoundsOnce) {
  for (const int64_t num_ranks : {1, 2, 3, 5}) {
    for (const int64_t bucket_bytes : {1, 400, 1 << 20}) {
      for (const int64_t piece_bytes : {2, 64, 1 << 20})
        check_reduction(num_ranks, bucket_bytes, piece_bytes, GradientCompression::kNone);
    }
  }
  check_reduction(3, 400, 64, GradientCompression::kBf16);
}

}  // namespace
}  // namespace tessera
