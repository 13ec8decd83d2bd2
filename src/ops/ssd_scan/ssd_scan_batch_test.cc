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
  testing::expect_refusals(SsdScanBatch(spec, 3), backend(), c.batch);
}

}  // namespace
}  // namespace tessera
