#include <gtest/gtest.h>

#include "ops/short_conv/batch_testing.h"

namespace tessera {
namespace {

using testing::ConvBatchCase;
using testing::run_in_passes;

Backend backend() {
  KernelTable table;
  add_short_conv_cpu(table);
  add_short_conv_batch_cpu(table);
  return Backend(std::move(table));
}

TEST(ShortConvBatch, IsTheConvolutionHoweverSequencesAreCutBitByBit) {
  for (const auto& [channels, taps] :
       {std::pair<int64_t, int64_t>{1, 1}, {7, 4}, {130, 4}, {20, 16}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const ShortConvSpec spec{.biased = channels % 2 == 0, .silu = taps != 16};
      const ConvBatchCase c({5, 40, 0, 1, 9}, channels, taps, dtype, backend(), spec);
      const ShortConvBatch op(c.batch.num_slots(), spec);
      const std::vector<double> out = run_in_passes(op, backend(), c.batch, 1);
      ASSERT_EQ(out.size(), c.expected.size());
      for (size_t i = 0; i < out.size(); ++i) {
        ASSERT_NEAR(out[i], c.expected[i],
                    (dtype == DType::kF32 ? 1e-6 : 8e-3) * (1 + std::abs(c.expected[i])))
            << i;
      }
      EXPECT_EQ(run_in_passes(op, backend(), c.batch, 2), out);
      EXPECT_EQ(run_in_passes(op, backend(), c.batch, 3), out);
    }
  }
}

TEST(ShortConvBatch, RefusesTypesThatDoNotFit) {
  const ShortConvBatch op(2);
  const ValueType x{DType::kF32, {5, 3}};
  const ValueType weight{DType::kF32, {3, 4}};
  const ValueType bounds{DType::kI32, {3}};
  const ValueType each{DType::kI32, {2}};
  EXPECT_NO_THROW(op.infer(std::vector<ValueType>{x, weight, bounds, each, each}));
  const ValueType narrow{DType::kF32, {2, 4}};
  const ValueType long_taps{DType::kF32, {3, 17}};
  const ValueType one{DType::kI32, {1}};
  EXPECT_THROW(op.infer(std::vector<ValueType>{x, narrow, bounds, each, each}), UserError);
  EXPECT_THROW(op.infer(std::vector<ValueType>{x, long_taps, bounds, each, each}), UserError);
  EXPECT_THROW(op.infer(std::vector<ValueType>{x, weight, bounds, each, one}), UserError);
  EXPECT_THROW(op.infer(std::vector<ValueType>{x, weight, bounds, each}), UserError);
  const ShortConvBatch biased(2, {.biased = true});
  const ValueType bias{DType::kF32, {3}};
  EXPECT_NO_THROW(biased.infer(std::vector<ValueType>{x, weight, bounds, each, each, bias}));
  EXPECT_THROW(biased.infer(std::vector<ValueType>{x, weight, bounds, each, each}), UserError);
  EXPECT_THROW(biased.infer(std::vector<ValueType>{x, weight, bounds, each, each, narrow}),
               UserError);
}

}  // namespace
}  // namespace tessera
