#include "ops/short_conv/batch_testing.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class ShortConvBatchCuda : public testing::GpuTest {
 protected:
  void check(const std::vector<int64_t>& lengths, int64_t channels, int64_t taps,
             DType dtype) const {
    SCOPED_TRACE(fmt::format("{} channels, {} taps, {}", channels, taps, dtype_name(dtype)));
    const ShortConvSpec spec{.biased = channels % 2 == 0, .silu = taps != 3};
    const testing::ConvBatchCase c(lengths, channels, taps, dtype, cpu(), spec);
    const ShortConvBatch op(c.batch.num_slots(), spec);
    const std::vector<double> out = testing::run_in_passes(op, gpu(), c.batch, 1);
    ASSERT_EQ(out.size(), c.expected.size());
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_NEAR(out[i], c.expected[i],
                  (dtype == DType::kF32 ? 1e-5 : 8e-3) * (1 + std::abs(c.expected[i])))
          << i;
    }
    EXPECT_EQ(testing::run_in_passes(op, gpu(), c.batch, 2), out);
  }
};

TEST_F(ShortConvBatchCuda, IsTheConvolutionHoweverSequencesAreCut) {
  for (const auto& [channels, taps] :
       {std::pair<int64_t, int64_t>{1, 1}, {7, 4}, {130, 4}, {1000, 3}, {20, 16}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16})
      check({5, 40, 0, 1, 9}, channels, taps, dtype);
  }
}

TEST_F(ShortConvBatchCuda, TinySequences) {
  check({3, 0, 2}, 9, 4, DType::kBF16);
}

}  // namespace
}  // namespace tessera
