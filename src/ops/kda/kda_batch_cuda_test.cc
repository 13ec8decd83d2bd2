#include "ops/kda/batch_testing.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class KdaBatchCuda : public testing::GpuTest {
 protected:
  void check(const KdaSpec& spec, const std::vector<int64_t>& lengths, DType dtype) const {
    SCOPED_TRACE(fmt::format("{} heads, keys of {}, values of {}, {}", spec.num_heads,
                             spec.key_size, spec.value_size, dtype_name(dtype)));
    const testing::KdaBatchCase c(spec, lengths, dtype, cpu());
    const KdaBatch op(spec, c.batch.num_slots());
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

TEST_F(KdaBatchCuda, IsTheRuleHoweverSequencesAreCut) {
  const KdaSpec specs[] = {{1, 4, 3},     {4, 8, 5},     {3, 17, 70},
                           {4, 128, 128}, {2, 130, 100}, {1, 256, 64}};
  for (const KdaSpec& spec : specs) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) check(spec, {5, 70, 0, 1, 9}, dtype);
  }
}

TEST_F(KdaBatchCuda, TinySequences) {
  check({2, 33, 9}, {3, 0, 2}, DType::kF32);
}

TEST_F(KdaBatchCuda, RefusesKeysThatItDoesNotHold) {
  EXPECT_THROW(check({1, 257, 4}, {2}, DType::kF32), UserError);
}

}  // namespace
}  // namespace tessera
