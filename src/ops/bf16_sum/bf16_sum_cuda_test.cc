#include "ops/bf16_sum/bf16_sum.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

class Bf16SumCuda : public testing::GpuTest {
 protected:
  /// The same bits as on the host.
  void check(const Operator& op, const std::vector<Tensor>& inputs, DType dtype,
             const Shape& shape) {
    const OwnedTensor expected(dtype, shape);
    const Tensor host_out = expected;
    testing::run_kernel(op, cpu(), inputs, std::span(&host_out, 1));
    std::vector<OwnedTensor> copies;
    std::vector<Tensor> on_gpu;
    for (const Tensor& input : inputs) copies.push_back(testing::copy_to(gpu(), input));
    for (const OwnedTensor& copy : copies) on_gpu.push_back(copy);
    const OwnedTensor found(dtype, shape, "a result", gpu().device());
    const Tensor out = found;
    testing::run_kernel(op, gpu(), on_gpu, std::span(&out, 1));
    const OwnedTensor back = testing::copy_to_host(gpu(), found);
    EXPECT_EQ(std::memcmp(back.get().data, expected.get().data,
                          static_cast<size_t>(expected.get().num_bytes())),
              0);
  }
};

TEST_F(Bf16SumCuda, RoundsAsTheHostDoes) {
  Random random(3, 1);
  for (const int64_t count : {0, 1, 255, 256, 300'001}) {
    SCOPED_TRACE(count);
    const OwnedTensor x = testing::random_tensor(DType::kF32, {count}, random);
    check(*make_round_to_bf16(), {x}, DType::kBF16, {count});
  }
}

TEST_F(Bf16SumCuda, TinyParts) {
  Random random(3, 3);
  const OwnedTensor parts = testing::random_tensor(DType::kBF16, {3, 257}, random);
  const OwnedTensor own_part = testing::random_tensor(DType::kF32, {257}, random);
  check(*make_round_to_bf16(), {own_part}, DType::kBF16, {257});
  check(*make_sum_bf16_parts(1), {parts, own_part}, DType::kF32, {257});
}

TEST_F(Bf16SumCuda, SumsInTheOrderOfTheParts) {
  Random random(3, 2);
  for (const int64_t count : {0, 1, 257, 300'001}) {
    for (int64_t own = 0; own < 4; ++own) {
      SCOPED_TRACE(fmt::format("{} values, part {}", count, own));
      const OwnedTensor parts = testing::random_tensor(DType::kBF16, {3, count}, random);
      const OwnedTensor own_part = testing::random_tensor(DType::kF32, {count}, random);
      check(*make_sum_bf16_parts(own), {parts, own_part}, DType::kF32, {count});
      const OwnedTensor narrow = testing::random_tensor(DType::kBF16, {count}, random);
      check(*make_sum_bf16_parts(own), {parts, narrow}, DType::kBF16, {count});
    }
  }
}

/// Both as the first summand and as a further one, in vectors and one by one.
TEST_F(Bf16SumCuda, TinyAdditionsToBf16) {
  Random random(3, 4);
  for (const int64_t count : {0, 1, 257, 4096, 300'001}) {
    for (const bool sets : {false, true}) {
      SCOPED_TRACE(fmt::format("{} values, sets {}", count, sets));
      const OwnedTensor x = testing::random_tensor(DType::kF32, {count}, random);
      const OwnedTensor before = testing::random_tensor(DType::kBF16, {count}, random);
      const OwnedTensor expected(DType::kBF16, {count});
      std::memcpy(expected.get().data, before.get().data,
                  static_cast<size_t>(before.get().num_bytes()));
      const OwnedTensor x_on_gpu = testing::copy_to(gpu(), x);
      const OwnedTensor found = testing::copy_to(gpu(), before);
      const auto add = [&](const Backend& backend, const Tensor& from, const Tensor& to) {
        backend.kernel (*make_add_to_bf16())(*make_add_to_bf16(), {.inputs = std::span(&from, 1),
                                                                   .outputs = std::span(&to, 1),
                                                                   .context = backend.context(),
                                                                   .set_accumulators = sets});
      };
      add(cpu(), x, expected);
      add(gpu(), x_on_gpu, found);
      const OwnedTensor back = testing::copy_to_host(gpu(), found);
      EXPECT_EQ(std::memcmp(back.get().data, expected.get().data,
                            static_cast<size_t>(expected.get().num_bytes())),
                0);
    }
  }
}

}  // namespace
}  // namespace tessera
