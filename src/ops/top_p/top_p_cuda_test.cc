#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/top_p/top_p.h"
#include "ops/top_p/top_p_testing.h"

namespace tessera {
namespace {

class TopPCuda : public testing::GpuTest {
 protected:
  /// The CPU's choices and counts, and its probabilities up to rounding.
  void check(const testing::TopPCase& c) const {
    SCOPED_TRACE(fmt::format("{} tokens, K {}, {}", c.tokens, c.top_k, c.spec.share));
    const auto inputs = testing::make_top_p_inputs(c, 3);
    const OwnedTensor probs = testing::copy_to(gpu(), inputs[0].tensor);
    const OwnedTensor idx = testing::copy_to(gpu(), inputs[1].tensor);
    const Shape shape = {c.tokens, c.top_k};
    const std::vector<Tensor> on_host = {inputs[0].tensor, inputs[1].tensor};
    const std::vector<Tensor> on_device = {probs, idx};
    const OwnedTensor host_probs(DType::kF32, shape);
    const OwnedTensor host_idx(DType::kI32, shape);
    const OwnedTensor host_counts(DType::kF32, {c.spec.num_experts});
    const OwnedTensor device_probs = testing::copy_to(gpu(), host_probs);
    const OwnedTensor device_idx = testing::copy_to(gpu(), host_idx);
    const OwnedTensor device_counts = testing::copy_to(gpu(), host_counts);
    testing::run_kernel(TopP(c.spec), cpu(), on_host,
                        std::vector<Tensor>{host_probs, host_idx, host_counts});
    testing::run_kernel(TopP(c.spec), gpu(), on_device,
                        std::vector<Tensor>{device_probs, device_idx, device_counts});
    expect_near(device_probs, host_probs);
    testing::expect_bitwise_equal(testing::copy_to_host(gpu(), device_idx), host_idx, "kept");
    testing::expect_bitwise_equal(testing::copy_to_host(gpu(), device_counts), host_counts,
                                  "counts");
    check_backward(c, inputs[0].tensor, host_idx);
  }

  void check_backward(const testing::TopPCase& c, const Tensor& probs, const Tensor& kept) const {
    Random random(5, 0);
    const OwnedTensor grad = testing::random_tensor(DType::kF32, probs.shape, random);
    const OwnedTensor expected(DType::kF32, probs.shape);
    const OwnedTensor found = testing::copy_to(gpu(), expected);
    const OwnedTensor copies[] = {testing::copy_to(gpu(), probs), testing::copy_to(gpu(), kept),
                                  testing::copy_to(gpu(), grad)};
    testing::run_kernel(TopPBackward(c.spec), cpu(), std::vector<Tensor>{probs, kept, grad},
                        std::vector<Tensor>{expected});
    testing::run_kernel(TopPBackward(c.spec), gpu(),
                        std::vector<Tensor>{copies[0], copies[1], copies[2]},
                        std::vector<Tensor>{found});
    expect_near(found, expected);
  }

  void expect_near(const Tensor& on_device, const Tensor& expected) const {
    const OwnedTensor back = testing::copy_to_host(gpu(), on_device);
    const auto a = testing::to_doubles(back);
    const auto b = testing::to_doubles(expected);
    for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-5 * (1 + std::abs(b[i])));
  }
};

TEST_F(TopPCuda, Cases) {
  for (const auto& c : testing::top_p_cases()) check(c);
}

TEST_F(TopPCuda, TinyShape) {
  check({5, 3, {4, 0.6, true}});
}

}  // namespace
}  // namespace tessera
