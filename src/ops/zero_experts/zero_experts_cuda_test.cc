#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/zero_experts/zero_experts.h"
#include "ops/zero_experts/zero_experts_testing.h"

namespace tessera {
namespace {

class ZeroExpertsCuda : public testing::GpuTest {
 protected:
  /// Runs a kernel on both back ends; the outputs have the types of `outputs`.
  void check(const Operator& op, const std::vector<Tensor>& inputs,
             const std::vector<ValueType>& outputs, double tolerance) const {
    std::vector<OwnedTensor> memory;
    std::vector<Tensor> on_device;
    for (const Tensor& input : inputs) memory.push_back(testing::copy_to(gpu(), input));
    for (const OwnedTensor& copy : memory) on_device.push_back(copy);
    std::vector<OwnedTensor> expected;
    std::vector<OwnedTensor> found;
    std::vector<Tensor> host_out;
    std::vector<Tensor> device_out;
    for (const ValueType& type : outputs) {
      expected.emplace_back(type.dtype, type.shape);
      found.push_back(testing::copy_to(gpu(), expected.back()));
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      host_out.push_back(expected[i]);
      device_out.push_back(found[i]);
    }
    testing::run_kernel(op, cpu(), inputs, host_out);
    testing::run_kernel(op, gpu(), on_device, device_out);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const OwnedTensor back = testing::copy_to_host(gpu(), found[i]);
      const auto a = testing::to_doubles(back);
      const auto b = testing::to_doubles(expected[i]);
      for (size_t j = 0; j < a.size(); ++j)
        ASSERT_NEAR(a[j], b[j], tolerance * (1 + std::abs(b[j]))) << op.name() << " " << i;
    }
  }

  void check(const testing::ZeroExpertsCase& c, DType dtype) const {
    SCOPED_TRACE(fmt::format("{} {} x {}, K {}", dtype_name(dtype), c.tokens, c.width, c.top_k));
    const auto inputs = testing::make_zero_expert_inputs(c, dtype, 3);
    const ValueType x{dtype, {c.tokens, c.width}};
    const ValueType probs{DType::kF32, {c.tokens, c.top_k}};
    const double tolerance = dtype == DType::kF32 ? 1e-4 : 1e-2;
    std::vector<Tensor> tensors;
    for (const auto& input : inputs) tensors.push_back(input.tensor);
    check(ZeroExperts(c.spec), tensors, {x, {DType::kI32, probs.shape}}, tolerance);
    Random random(4, 0);
    const OwnedTensor grad = testing::random_tensor(dtype, x.shape, random);
    tensors.push_back(grad);
    check(ZeroExpertsBackward(c.spec), tensors, {x, probs}, tolerance);
  }
};

TEST_F(ZeroExpertsCuda, Shapes) {
  for (const auto& c : testing::zero_expert_cases()) {
    check(c, DType::kF32);
    check(c, DType::kBF16);
  }
}

TEST_F(ZeroExpertsCuda, TinyShape) {
  check({5, 24, 2, {3, 2}}, DType::kBF16);
}

}  // namespace
}  // namespace tessera
