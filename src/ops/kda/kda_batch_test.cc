#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/kda/batch_testing.h"

namespace tessera {
namespace {

using testing::KdaBatchCase;
using testing::run_in_passes;

Backend backend() {
  KernelTable table;
  add_kda_cpu(table);
  return Backend(std::move(table));
}

TEST(KdaBatch, IsTheRuleHoweverSequencesAreCutBitByBit) {
  const KdaSpec specs[] = {{1, 4, 3}, {4, 8, 5}, {3, 17, 16}};
  for (const KdaSpec& spec : specs) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const KdaBatchCase c(spec, {5, 70, 0, 1, 9}, dtype, backend());
      const KdaBatch op(spec, c.batch.num_slots());
      const std::vector<double> out = run_in_passes(op, backend(), c.batch, 1);
      ASSERT_EQ(out.size(), c.expected.size());
      for (size_t i = 0; i < out.size(); ++i) {
        ASSERT_NEAR(out[i], c.expected[i],
                    (dtype == DType::kF32 ? 5e-6 : 4e-3) * (1 + std::abs(c.expected[i])))
            << i;
      }
      EXPECT_EQ(run_in_passes(op, backend(), c.batch, 2), out);
      EXPECT_EQ(run_in_passes(op, backend(), c.batch, 3), out);
    }
  }
}

TEST(KdaBatch, RefusesWhatDoesNotFit) {
  const KdaSpec spec{1, 4, 3};
  const KdaBatchCase c(spec, {5, 3}, DType::kF32, backend());
  testing::expect_refusals(KdaBatch(spec, 3), backend(), c.batch);
}

}  // namespace
}  // namespace tessera
