// Gradients of scaled FP8 values on a GPU against sums in F64 of the same values.
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "ops/grouped_matmul/grouped_cuda_testing.h"
#include "ops/scaled_grouped_wgrad/scaled_grouped_wgrad_cuda.h"
#include "ops/scaled_grouped_wgrad/scaled_wgrad_testing.h"
#include "ops/testing/gpu_test.h"

namespace tessera::cuda {
namespace {

using testing::ScaledWgradCase;
using testing::ScaledWgradData;

constexpr float kBefore = 2;
constexpr float kGuard = -7;
constexpr int64_t kGuardValues = 1024;

class ScaledWgradCuda : public testing::GpuTest {};

DeviceBuffer to_device(const Tensor& tensor) {
  DeviceBuffer buffer(std::max<int64_t>(tensor.num_bytes(), 16));
  if (tensor.num_bytes() > 0)
    check(cudaMemcpy(buffer.as<void>(), tensor.data, tensor.num_bytes(), cudaMemcpyHostToDevice));
  return buffer;
}

std::vector<float> run(const ScaledWgradCase& test, const ScaledWgradData& data, bool accumulate,
                       bool by_counter) {
  const DeviceBuffer narrow = to_device(data.narrow().codes.get());
  const DeviceBuffer narrow_scales = to_device(data.narrow().scales.get());
  const DeviceBuffer wide = to_device(data.wide().codes.get());
  const DeviceBuffer wide_scales = to_device(data.wide().scales.get());
  const DeviceBuffer offsets = cuda::to_device(data.offsets());
  const DeviceBuffer begins = cuda::to_device(ends<int>(test.sizes));
  const DeviceBuffer counter = cuda::to_device(std::vector<int>{0});
  std::vector<float> grad(test.total() * test.columns, accumulate ? kBefore : std::nanf(""));
  grad.insert(grad.end(), kGuardValues, kGuard);
  const DeviceBuffer device_grad = cuda::to_device(grad);
  scaled_wgrad({.experts = {.num_experts = static_cast<int>(test.sizes.size()),
                            .begin = begins.as<int>(),
                            .offsets = offsets.as<int64_t>(),
                            .wide = test.columns,
                            .largest = test.largest(),
                            .total = test.total()},
                .by_block = test.by_block,
                .num_tokens = test.num_tokens(),
                .narrow = narrow.as<void>(),
                .narrow_scales = narrow_scales.as<float>(),
                .wide = wide.as<void>(),
                .wide_scales = wide_scales.as<float>(),
                .grad = device_grad.as<float>(),
                .accumulate = accumulate,
                .counter = by_counter ? counter.as<int>() : nullptr},
               nullptr);
  check(cudaDeviceSynchronize());
  device_grad.copy_to(grad.data());
  for (int64_t i = 0; i < kGuardValues; ++i)
    EXPECT_EQ(grad[test.total() * test.columns + i], kGuard) << test.to_string();
  int left = -1;
  counter.copy_to(&left);
  EXPECT_EQ(left, 0);
  return grad;
}

/// FP8's sums have fewer digits: those of all tokens lose with each step, others are short.
double error_of(const ScaledWgradCase& test) {
  const auto most_tokens = static_cast<double>(std::ranges::max(test.tokens_of));
  return test.by_block ? 1e-3 : 2e-3 + 2e-6 * most_tokens;
}

void check_case(const ScaledWgradCase& test) {
  const ScaledWgradData data(test);
  for (const bool accumulate : {true, false}) {
    const std::vector<float> grad = run(test, data, accumulate, true);
    data.expect_gradient(grad, accumulate ? kBefore : 0, error_of(test));
    const std::vector<float> again = run(test, data, accumulate, false);
    for (size_t i = 0; i < grad.size(); ++i)
      ASSERT_EQ(grad[i], again[i]) << test.to_string() << " at " << i;
  }
}

TEST_F(ScaledWgradCuda, TinyExperts) {
  check_case({.sizes = {64, 64}, .tokens_of = {3, 130}, .columns = 128});
}

TEST_F(ScaledWgradCuda, TinyBlocks) {
  check_case({.sizes = {64, 64}, .tokens_of = {3, 130}, .columns = 128, .by_block = true});
}

TEST_F(ScaledWgradCuda, Experts) {
  for (const bool by_block : {false, true}) {
    check_case(
        {.sizes = {64, 208, 16}, .tokens_of = {3, 0, 9}, .columns = 144, .by_block = by_block});
    check_case({.sizes = {256, 256}, .tokens_of = {300, 1}, .columns = 512, .by_block = by_block});
    check_case({.sizes = std::vector<int64_t>(4, 384),
                .tokens_of = {17, 256, 0, 1029},
                .columns = 1040,
                .by_block = by_block});
    check_case({.sizes = {272}, .tokens_of = {777}, .columns = 16, .by_block = by_block});
  }
}

/// Those whose tiles are chosen otherwise, by rows: ping-pong and cooperative ones.
TEST_F(ScaledWgradCuda, ManyTokens) {
  for (const bool by_block : {false, true}) {
    check_case(
        {.sizes = {320, 320}, .tokens_of = {9000, 5001}, .columns = 400, .by_block = by_block});
    check_case({.sizes = std::vector<int64_t>(24, 512),
                .tokens_of = std::vector<int64_t>(24, 200),
                .columns = 768,
                .by_block = by_block});
  }
}

TEST_F(ScaledWgradCuda, RandomTokens) {
  Random random(12, 1);
  for (int i = 0; i < 24; ++i) check_case(testing::random_scaled_wgrad(random, 16, i % 2 == 1));
}

}  // namespace
}  // namespace tessera::cuda
