#include "ops/page_stash/page_stash_testing.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class PageStashCuda : public testing::GpuTest {};

TEST_F(PageStashCuda, LeavesWhatTheHostLeaves) {
  testing::check_stash(gpu(), cpu());
}

TEST_F(PageStashCuda, TinyPool) {
  OwnedTensor value(DType::kF32, {9, 5});
  std::ranges::fill(value.get().span<float>(), 3.0F);
  std::vector<OwnedTensor> values;
  values.push_back(std::move(value));
  const auto found = testing::stash_and_reload(gpu(), {7, 32}, values, {6});
  EXPECT_EQ(found.values[0].get().span<float>()[29], 3.0F);
  EXPECT_EQ(found.values[0].get().span<float>()[30], 0.0F);
}

}  // namespace
}  // namespace tessera
