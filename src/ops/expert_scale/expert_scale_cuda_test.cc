#include "ops/expert_scale/expert_scale.h"
#include "ops/expert_scale/expert_scale_testing.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class ExpertScaleCuda : public testing::GpuTest {
 protected:
  void expect_near(const Tensor& on_device, const Tensor& expected) const {
    const OwnedTensor back = testing::copy_to_host(gpu(), on_device);
    const auto a = testing::to_doubles(back);
    const auto b = testing::to_doubles(expected);
    for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-5 * (1 + std::abs(b[i])));
  }

  /// Runs a kernel on both back ends, on outputs that begin at zero.
  void check(const Operator& op, const std::vector<Tensor>& inputs,
             const std::vector<Shape>& outputs) const {
    std::vector<OwnedTensor> memory;
    std::vector<OwnedTensor> expected;
    std::vector<OwnedTensor> found;
    std::vector<Tensor> on_device;
    std::vector<Tensor> host_out;
    std::vector<Tensor> device_out;
    for (const Tensor& input : inputs) memory.push_back(testing::copy_to(gpu(), input));
    for (const OwnedTensor& copy : memory) on_device.push_back(copy);
    for (const Shape& shape : outputs) {
      expected.push_back(testing::tensor_of(shape, std::vector<float>(shape.num_elements(), 0.0F)));
      found.push_back(testing::copy_to(gpu(), expected.back()));
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      host_out.push_back(expected[i]);
      device_out.push_back(found[i]);
    }
    testing::run_kernel(op, cpu(), inputs, host_out);
    testing::run_kernel(op, gpu(), on_device, device_out);
    for (size_t i = 0; i < outputs.size(); ++i) expect_near(found[i], expected[i]);
  }

  /// Forward and backward.
  void check_case(const testing::ExpertScaleCase& c) const {
    SCOPED_TRACE(fmt::format("{} tokens, K {}, E {}", c.tokens, c.top_k, c.experts));
    const auto inputs = testing::make_expert_scale_inputs(c, 3);
    std::vector<Tensor> tensors;
    for (const auto& input : inputs) tensors.push_back(input.tensor);
    const Shape choices{c.tokens, c.top_k};
    check(ExpertScale(), tensors, {choices});
    Random random(4, 0);
    const OwnedTensor grad = testing::random_tensor(DType::kF32, choices, random);
    tensors.push_back(grad);
    check(ExpertScaleBackward(), tensors, {choices, {c.experts}});
  }
};

TEST_F(ExpertScaleCuda, Cases) {
  for (const auto& c : testing::kExpertScaleCases) check_case(c);
}

TEST_F(ExpertScaleCuda, TinyChoices) {
  check_case({.tokens = 9, .top_k = 2, .experts = 5});
}

}  // namespace
}  // namespace tessera
