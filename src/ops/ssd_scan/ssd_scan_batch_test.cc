#include <gtest/gtest.h>

#include "ops/ssd_scan/batch_testing.h"

namespace tessera {
namespace {

using testing::run_in_passes;
using testing::SsdBatchCase;

Backend backend() {
  KernelTable table;
  add_ssd_scan_cpu(table);
  return Backend(std::move(table));
}

/// The scan on the CPU goes token by token as well.
TEST(SsdScanBatch, IsTheScanHoweverSequencesAreCutBitByBit) {
  const SsdSpec specs[] = {{1, 1, 4, 3}, {4, 2, 5, 8}, {3, 1, 17, 16, 0.01, 0.5}};
  for (const SsdSpec& spec : specs) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const SsdBatchCase c(spec, {5, 70, 0, 1, 9}, dtype, backend());
      const SsdScanBatch op(spec, c.batch.num_slots());
      for (const uint64_t seed : {1, 2, 3})
        EXPECT_EQ(run_in_passes(op, backend(), c.batch, seed), c.expected) << seed;
    }
  }
}

TEST(SsdScanBatch, RefusesWhatDoesNotFit) {
  const SsdSpec spec{1, 1, 3, 4};
  const SsdBatchCase c(spec, {5, 3}, DType::kF32, backend());
  const auto run = [&](const std::vector<int32_t>& bounds, const std::vector<int32_t>& lengths,
                       const std::vector<int32_t>& slots) {
    const OwnedTensor given[] = {testing::tensor_of_i32({std::ssize(bounds)}, bounds),
                                 testing::tensor_of_i32({std::ssize(lengths)}, lengths),
                                 testing::tensor_of_i32({std::ssize(slots)}, slots)};
    std::vector<Tensor> in = c.batch.rows;
    in.insert(in.end(), c.batch.fixed.begin(), c.batch.fixed.end());
    in.insert(in.end(), std::begin(given), std::end(given));
    const OwnedTensor y(DType::kF32, {8, 3}, "y");
    const OwnedTensor states(DType::kF32, c.batch.state.shape, "states");
    testing::run_kernel(SsdScanBatch(spec, 3), backend(), in, std::vector<Tensor>{y, states});
  };
  EXPECT_NO_THROW(run({0, 5, 8}, {5, 3}, {0, 2}));
  EXPECT_THROW(run({0, 5, 9}, {5, 4}, {0, 2}), UserError) << "more rows than there are";
  EXPECT_THROW(run({0, 5, 4}, {5, 4}, {0, 2}), UserError) << "falling bounds";
  EXPECT_THROW(run({0, 5, 8}, {4, 3}, {0, 2}), UserError) << "shorter than its new tokens";
  EXPECT_THROW(run({0, 5, 8}, {5, 3}, {0, 3}), UserError) << "no such slot";
  EXPECT_THROW(run({0, 5, 8}, {5, 3}, {-1, 0}), UserError);
}

}  // namespace
}  // namespace tessera
