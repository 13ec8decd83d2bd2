#include "ops/sinkhorn/sinkhorn.h"
#include "ops/sinkhorn/sinkhorn_testing.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class SinkhornCuda : public testing::GpuTest {
 protected:
  std::vector<int32_t> run(const Backend& backend, const SinkhornSpec& spec,
                           const std::vector<Tensor>& inputs) const {
    const OwnedTensor empty(DType::kI32, {spec.tokens.count, spec.top_k});
    const OwnedTensor out = testing::copy_to(backend, empty);
    std::vector<OwnedTensor> memory;
    std::vector<Tensor> copies;
    for (const Tensor& input : inputs) memory.push_back(testing::copy_to(backend, input));
    for (const OwnedTensor& copy : memory) copies.push_back(copy);
    testing::run_kernel(Sinkhorn(spec), backend, copies, std::vector<Tensor>{out});
    const OwnedTensor back = testing::copy_to_host(backend, out);
    const auto idx = back.get().span<int32_t>();
    return {idx.begin(), idx.end()};
  }

  /// The CPU's choices, but for few that the rounding of exp decides.
  void check(int64_t tokens, int64_t experts, int64_t top_k, IndexRange own,
             bool training = true) const {
    SCOPED_TRACE(fmt::format("{} tokens, {} of {} experts", tokens, top_k, experts));
    const auto inputs = testing::make_sinkhorn_inputs(tokens, experts, 3, training);
    const std::vector<Tensor> tensors = {inputs[0].tensor, inputs[1].tensor};
    const SinkhornSpec spec{.top_k = top_k, .tokens = own};
    const auto expected = run(cpu(), spec, tensors);
    const auto found = run(gpu(), spec, tensors);
    ASSERT_EQ(found.size(), expected.size());
    size_t different = 0;
    for (size_t i = 0; i < found.size(); ++i) different += found[i] == expected[i] ? 0 : 1;
    EXPECT_LE(different, 2 + found.size() / 1000);
    if (!training) {
      EXPECT_EQ(different, 0U);
    }
    EXPECT_EQ(run(gpu(), spec, tensors), found) << "the same bits again";
  }
};

TEST_F(SinkhornCuda, Shapes) {
  check(0, 4, 2, {0, 0});
  check(1, 1, 1, {0, 1});
  check(70, 8, 2, {0, 70});
  check(70, 8, 2, {33, 20});
  check(33, 7, 7, {0, 33});
  check(1000, 128, 8, {0, 1000});
  check(100, 1024, 4, {50, 50});
  check(70, 8, 2, {0, 70}, false);
}

TEST_F(SinkhornCuda, TinyShape) {
  check(9, 5, 2, {2, 5});
}

}  // namespace
}  // namespace tessera
