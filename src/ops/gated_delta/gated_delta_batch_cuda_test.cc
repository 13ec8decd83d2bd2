#include "ops/gated_delta/batch_testing.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class GatedDeltaBatchCuda : public testing::GpuTest {
 protected:
  void check(const GatedDeltaSpec& spec, const std::vector<int64_t>& lengths, DType dtype) const {
    SCOPED_TRACE(fmt::format("{} x {} keys, {} x {} values, {}", spec.num_key_heads, spec.key_size,
                             spec.num_value_heads, spec.value_size, dtype_name(dtype)));
    const testing::DeltaBatchCase c(spec, lengths, dtype, cpu());
    const GatedDeltaBatch op(spec, c.batch.num_slots());
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

TEST_F(GatedDeltaBatchCuda, IsTheRuleHoweverSequencesAreCut) {
  const GatedDeltaSpec specs[] = {{1, 1, 4, 3},     {2, 4, 8, 5},     {1, 3, 17, 70},
                                  {2, 4, 128, 128}, {1, 2, 130, 100}, {1, 1, 256, 64}};
  for (const GatedDeltaSpec& spec : specs) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) check(spec, {5, 70, 0, 1, 9}, dtype);
  }
}

TEST_F(GatedDeltaBatchCuda, TinySequences) {
  check({1, 2, 33, 9}, {3, 0, 2}, DType::kF32);
}

TEST_F(GatedDeltaBatchCuda, RefusesKeysThatItDoesNotHold) {
  EXPECT_THROW(check({1, 1, 257, 4}, {2}, DType::kF32), UserError);
}

}  // namespace
}  // namespace tessera
