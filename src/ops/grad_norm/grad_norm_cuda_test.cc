#include "ops/grad_norm/grad_norm.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

class GradNormCuda : public testing::GpuTest {};

TEST_F(GradNormCuda, Sizes) {
  for (const int64_t count : {0, 1, 3, 16383, 16384, 16385, 1'000'003}) {
    SCOPED_TRACE(count);
    testing::check_operator_on_gpu(make_sum_of_squares(),
                                   [&](DType) -> testing::OperatorInputs {
                                     return {{"a"}, {{DType::kF32, {count}}}};
                                   },
                                   {}, cpu(), gpu(),
                                   {.tolerance_f32 = 1e-13, .dtypes = {DType::kF32}});
  }
}

/// More tensors than a launch takes, among them some that are launched alone, and empty ones.
TEST_F(GradNormCuda, ManyTensors) {
  Random random(7, 1);
  testing::OperatorInputs inputs;
  for (int i = 0; i < 600; ++i) {
    const int64_t size = i % 199 == 5
                             ? 4'200'000 + i
                             : static_cast<int64_t>(random.next_below(i % 7 == 0 ? 40'000 : 40));
    inputs.names.push_back(fmt::format("x{}", i));
    inputs.types.push_back({DType::kF32, {size}});
  }
  testing::check_operator_on_gpu(make_sum_of_squares(), [&](DType) { return inputs; }, {}, cpu(),
                                 gpu(), {.tolerance_f32 = 1e-13, .dtypes = {DType::kF32}});
}

/// BF16 and F32 by turns, in lists and alone, and from places where no vector can start.
TEST_F(GradNormCuda, MixedTypes) {
  Random random(7, 2);
  std::vector<OwnedTensor> on_host, on_gpu;
  std::vector<Tensor> host, device;
  for (int i = 0; i < 300; ++i) {
    const int64_t size =
        i % 97 == 5 ? 4'300'000 + i : static_cast<int64_t>(random.next_below(40'000));
    const DType dtype = i / 3 % 2 == 0 ? DType::kBF16 : DType::kF32;
    on_host.push_back(testing::random_tensor(dtype, {size + 1}, random));
    on_gpu.push_back(testing::copy_to(gpu(), on_host.back()));
    const int64_t skipped = i % 5 == 0 ? 1 : 0;
    const auto part = [&](const Tensor& tensor) {
      return Tensor{static_cast<std::byte*>(tensor.data) + skipped * dtype_size(dtype),
                    dtype,
                    {size},
                    tensor.device};
    };
    host.push_back(part(on_host.back()));
    device.push_back(part(on_gpu.back()));
  }
  const OwnedTensor expected(DType::kF64, {300});
  const OwnedTensor sums(DType::kF64, {300}, "sums", gpu().device());
  const Tensor outputs[] = {expected, sums};
  testing::run_kernel(*make_sum_of_squares(), cpu(), host, std::span(outputs, 1));
  testing::run_kernel(*make_sum_of_squares(), gpu(), device, std::span(outputs + 1, 1));
  const OwnedTensor found = testing::copy_to_host(gpu(), sums);
  for (int i = 0; i < 300; ++i) {
    const double sum = expected.get().as<double>()[i];
    EXPECT_NEAR(found.get().as<double>()[i], sum, 1e-12 * sum) << i;
  }
}

TEST_F(GradNormCuda, TinySize) {
  testing::check_operator_on_gpu(make_sum_of_squares(),
                                 [](DType) -> testing::OperatorInputs {
                                   return {{"a"}, {{DType::kF32, {16393}}}};
                                 },
                                 {}, cpu(), gpu(),
                                 {.tolerance_f32 = 1e-13, .dtypes = {DType::kF32}, .once = true});
}

TEST_F(GradNormCuda, IntoMemoryOfTheHost) {
  Random random(3, 3);
  const OwnedTensor x = testing::random_tensor(DType::kF32, {40'001}, random);
  const OwnedTensor on_gpu = testing::copy_to(gpu(), x);
  const OwnedTensor sum(DType::kF64, {1}, "a sum", gpu().device(), MemoryKind::kShared);
  // From the second element on, which no vector can start at.
  const Tensor whole = on_gpu;
  const Tensor rest = {whole.as<float>() + 1, DType::kF32, {40'000}};
  const Tensor result = sum;
  testing::run_kernel(*make_sum_of_squares(), gpu(), std::span(&rest, 1), std::span(&result, 1));
  double expected = 0;
  for (int64_t i = 1; i < 40'001; ++i)
    expected += static_cast<double>(x.get().as<float>()[i]) * x.get().as<float>()[i];
  EXPECT_NEAR(*result.as<double>(), expected, 1e-12 * expected);
}

/// The host's bits, from any number of sums and losses.
TEST_F(GradNormCuda, ClipsAsTheHostDoes) {
  Random random(11, 2);
  for (int round = 0; round < 200; ++round) {
    const auto draw = [&] { return std::exp(20 * (random.next_uniform() - 0.5)); };
    std::vector<double> sums(random.next_below(round % 10 == 0 ? 3000 : 40));
    for (double& sum : sums) sum = draw();
    if (round % 20 == 7 && !sums.empty()) sums.back() = INFINITY;
    std::vector<double> limits = {draw(), round % 5 == 0 ? 0 : draw()};
    std::vector<float> losses(random.next_below(round % 9 == 0 ? 900 : 8), 1.0F);
    if (round % 15 == 4 && !losses.empty()) losses[random.next_below(losses.size())] = NAN;
    std::vector<Tensor> host = {view(std::span(sums), {std::ssize(sums)}),
                                view(std::span(limits), {2})};
    for (float& loss : losses) host.push_back(view(std::span(&loss, 1), {1}));
    std::vector<OwnedTensor> own;
    std::vector<Tensor> device;
    for (const Tensor& tensor : host)
      device.push_back(own.emplace_back(testing::copy_to(gpu(), tensor)));
    const OwnedTensor norms[] = {OwnedTensor(DType::kF64, {2}),
                                 OwnedTensor(DType::kF64, {2}, "a test", gpu().device())};
    const OwnedTensor scales[] = {OwnedTensor(DType::kF32, {2}),
                                  OwnedTensor(DType::kF32, {2}, "a test", gpu().device())};
    const Tensor on_host[] = {norms[0], scales[0]};
    const Tensor on_device[] = {norms[1], scales[1]};
    testing::run_kernel(*make_grad_clip(), cpu(), host, on_host);
    testing::run_kernel(*make_grad_clip(), gpu(), device, on_device);
    const OwnedTensor norm = testing::copy_to_host(gpu(), norms[1]);
    const OwnedTensor scale = testing::copy_to_host(gpu(), scales[1]);
    for (size_t i = 0; i < 2; ++i) {
      const auto bits = [](auto value) { return std::isnan(value) ? -1.0 : double(value); };
      ASSERT_EQ(bits(norm.get().as<double>()[i]), bits(on_host[0].as<double>()[i])) << round;
      ASSERT_EQ(bits(scale.get().as<float>()[i]), bits(on_host[1].as<float>()[i])) << round;
    }
  }
}

TEST_F(GradNormCuda, NanStaysNan) {
  std::vector<float> values(50'000, 1.0F);
  values[49'999] = NAN;
  const OwnedTensor x = testing::copy_to(gpu(), testing::tensor_of({50'000}, values));
  const OwnedTensor sum(DType::kF64, {1}, "a sum", gpu().device());
  const Tensor input = x;
  const Tensor output = sum;
  testing::run_kernel(*make_sum_of_squares(), gpu(), std::span(&input, 1), std::span(&output, 1));
  EXPECT_TRUE(std::isnan(*testing::copy_to_host(gpu(), output).get().as<double>()));
}

}  // namespace
}  // namespace tessera
