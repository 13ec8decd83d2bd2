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
  const auto run = [&](const std::vector<int32_t>& bounds, const std::vector<int32_t>& lengths,
                       const std::vector<int32_t>& slots) {
    const OwnedTensor given[] = {testing::tensor_of_i32({std::ssize(bounds)}, bounds),
                                 testing::tensor_of_i32({std::ssize(lengths)}, lengths),
                                 testing::tensor_of_i32({std::ssize(slots)}, slots)};
    std::vector<Tensor> in = c.batch.rows;
    in.insert(in.end(), std::begin(given), std::end(given));
    const OwnedTensor o(DType::kF32, {8, 3}, "o");
    const OwnedTensor states(DType::kF32, c.batch.state.shape, "states");
    testing::run_kernel(KdaBatch(spec, 3), backend(), in, std::vector<Tensor>{o, states});
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
