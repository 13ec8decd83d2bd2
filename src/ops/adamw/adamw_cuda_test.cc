#include "ops/adamw/adamw.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

class AdamWCuda : public testing::GpuTest {
 protected:
  /// Three steps on both back ends from the same state; `skip` elements lie before the slice.
  void check(int64_t count, int64_t skip, bool bf16_weight) const {
    SCOPED_TRACE(fmt::format("{} elements from {} on, weight {}", count, skip, bf16_weight));
    const AdamWSpec spec = {.weight_decay = 0.1, .bf16_weight = bf16_weight};
    const OperatorPtr op = make_adamw(spec);
    Random random(static_cast<uint64_t>(count), 9);
    std::vector<OwnedTensor> host, device;
    for (int i = 0; i < 5; ++i) {
      host.push_back(testing::random_tensor(i < 4 ? DType::kF32 : DType::kBF16, {skip + count},
                                            random, i == 0 ? 1.0 : 0.1));
      if (i == 3) make_positive(host.back());
      device.push_back(testing::copy_to(gpu(), host.back()));
    }
    for (int64_t update = 1; update <= 3; ++update) {
      std::array<float, 4> params = adamw_step_params(spec, 1e-2, update, 0.5);
      run(*op, cpu(), host, params, skip);
      run(*op, gpu(), device, params, skip);
    }
    for (size_t i = 1; i < (bf16_weight ? 5U : 4U); ++i) expect_near(host[i], device[i], i);
  }

 private:
  static void make_positive(const Tensor& tensor) {
    for (float& x : tensor.span<float>()) x = std::abs(x);
  }
  static Tensor after(const Tensor& tensor, int64_t skip) {
    return {static_cast<std::byte*>(tensor.data) + skip * dtype_size(tensor.dtype),
            tensor.dtype,
            {tensor.num_elements() - skip}};
  }
  static void run(const Operator& op, const Backend& backend,
                  const std::vector<OwnedTensor>& tensors, std::array<float, 4>& params,
                  int64_t skip) {
    const Tensor inputs[] = {after(tensors[0], skip), view(std::span<float>(params), {4})};
    const Tensor outputs[] = {after(tensors[1], skip), after(tensors[2], skip),
                              after(tensors[3], skip), after(tensors[4], skip)};
    testing::run_kernel(
        op, backend, inputs,
        std::span(outputs, static_cast<const AdamW&>(op).spec().bf16_weight ? 4 : 3));
  }
  void expect_near(const Tensor& host, const Tensor& device, size_t which) const {
    const OwnedTensor copy = testing::copy_to_host(gpu(), device);
    const std::vector<double> actual = testing::to_doubles(copy);
    const std::vector<double> expected = testing::to_doubles(host);
    const double tolerance = host.dtype == DType::kBF16 ? 8e-3 : 2e-6;
    for (size_t i = 0; i < expected.size(); ++i)
      ASSERT_NEAR(actual[i], expected[i], tolerance * std::abs(expected[i]) + 1e-8)
          << "output " << which - 1 << ", element " << i;
  }
};

TEST_F(AdamWCuda, Sizes) {
  for (const bool bf16_weight : {false, true}) {
    for (const int64_t count : {0, 1, 3, 4, 2048, 100'003}) check(count, 0, bf16_weight);
    check(1001, 1, bf16_weight);
  }
}

TEST_F(AdamWCuda, TinySlice) {
  check(1003, 0, true);
}

}  // namespace
}  // namespace tessera
