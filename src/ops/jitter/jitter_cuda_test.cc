#include "ops/jitter/jitter.h"
#include "ops/jitter/jitter_testing.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class JitterCuda : public testing::GpuTest {
 protected:
  /// The CPU's bits.
  void check(DType dtype, int64_t rows, int64_t width, float eps) const {
    SCOPED_TRACE(fmt::format("{} {} x {}, eps {}", dtype_name(dtype), rows, width, eps));
    const auto inputs =
        testing::make_jitter_inputs(dtype, testing::make_token_numbers(rows), width, eps, 3);
    const OperatorPtr op = make_jitter();
    std::vector<Tensor> on_host;
    std::vector<OwnedTensor> copies;
    std::vector<Tensor> on_device;
    for (const testing::TestInput& input : inputs) {
      on_host.push_back(input.tensor);
      copies.push_back(testing::copy_to(gpu(), input.tensor));
    }
    for (const OwnedTensor& copy : copies) on_device.push_back(copy);
    const OwnedTensor expected(dtype, {rows, width});
    const OwnedTensor found = testing::copy_to(gpu(), expected);
    const Tensor host_out = expected;
    const Tensor device_out = found;
    testing::run_kernel(*op, cpu(), on_host, std::span(&host_out, 1));
    testing::run_kernel(*op, gpu(), on_device, std::span(&device_out, 1));
    testing::expect_bitwise_equal(testing::copy_to_host(gpu(), found), expected, "y");
  }
};

TEST_F(JitterCuda, Shapes) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t rows : {0, 1, 100}) {
      for (const int64_t width : {1, 33, 34, 2056}) {
        check(dtype, rows, width, 0.01F);
        check(dtype, rows, width, 0);
      }
    }
  }
}

TEST_F(JitterCuda, TinyShape) {
  check(DType::kBF16, 5, 24, 0.3F);
}

}  // namespace
}  // namespace tessera
