#include "ops/compress_windows/cached_testing.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class CompressWindowsCachedCuda : public testing::GpuTest {
 protected:
  void check(const CompressSpec& spec, const std::vector<int64_t>& lengths, int64_t size,
             DType dtype, KeptRows kept) const {
    const testing::CachedCompression c(spec, lengths, size, dtype);
    const auto found = c.in_passes(gpu(), kept, 1);
    const auto expected = c.packed(cpu());
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_NEAR(found[i], expected[i],
                  (dtype == DType::kF32 ? 5e-6 : 8e-3) * (1 + std::abs(expected[i])))
          << i;
    }
    EXPECT_EQ(c.in_passes(gpu(), kept, 2), found);
  }
};

TEST_F(CompressWindowsCachedCuda, PassesGiveTheEntriesOfPackedSequences) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    check({.rate = 4}, {5, 90, 0, 1, 23}, 130, dtype, KeptRows::kPaged);
    check({.rate = 3, .overlaps = true}, {5, 90, 0, 1, 23}, 130, dtype, KeptRows::kPaged);
    check({.rate = 4, .overlaps = true}, {90}, 8, dtype, KeptRows::kCached);
  }
}

TEST_F(CompressWindowsCachedCuda, TinyPasses) {
  check({.rate = 2, .overlaps = true}, {5, 3}, 6, DType::kF32, KeptRows::kPaged);
}

}  // namespace
}  // namespace tessera
