#include "ops/ssd_scan/batch_testing.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class SsdScanBatchCuda : public testing::GpuTest {
 protected:
  void check(const SsdSpec& spec, const std::vector<int64_t>& lengths, DType dtype) const {
    SCOPED_TRACE(fmt::format("{} heads of {} in {} groups, states of {}, {}", spec.num_heads,
                             spec.head_size, spec.num_groups, spec.state_size, dtype_name(dtype)));
    const testing::SsdBatchCase c(spec, lengths, dtype, cpu());
    const SsdScanBatch op(spec, c.batch.num_slots());
    const std::vector<double> out = testing::run_in_passes(op, gpu(), c.batch, 1);
    ASSERT_EQ(out.size(), c.expected.size());
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_NEAR(out[i], c.expected[i],
                  (dtype == DType::kF32 ? 2e-5 : 8e-3) * (1 + std::abs(c.expected[i])))
          << i;
    }
    EXPECT_EQ(testing::run_in_passes(op, gpu(), c.batch, 2), out);
  }
};

TEST_F(SsdScanBatchCuda, IsTheScanHoweverSequencesAreCut) {
  const SsdSpec specs[] = {{1, 1, 4, 3},     {4, 2, 5, 8},    {3, 1, 70, 17, 0.01, 0.5},
                           {4, 1, 64, 128},  {2, 2, 100, 33}, {2, 1, 130, 300},
                           {1, 1, 512, 512}, {2, 1, 16, 256}};
  for (const SsdSpec& spec : specs) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) check(spec, {5, 70, 0, 1, 9}, dtype);
  }
}

TEST_F(SsdScanBatchCuda, TinySequences) {
  check({2, 1, 9, 33}, {3, 0, 2}, DType::kF32);
}

TEST_F(SsdScanBatchCuda, RefusesStatesThatItDoesNotHold) {
  EXPECT_THROW(check({1, 1, 4, 513}, {2}, DType::kF32), UserError);
}

}  // namespace
}  // namespace tessera
