#include "ops/short_conv/short_conv.h"

#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

class ShortConvCuda : public testing::GpuTest {
 protected:
  void check(int64_t channels, int64_t taps, const std::vector<int32_t>& bounds,
             testing::GpuCheck how = {}, ShortConvSpec spec = {}) const {
    SCOPED_TRACE(fmt::format("{} channels, {} taps, {} tokens", channels, taps, bounds.back()));
    const OwnedTensor ends = testing::tensor_of_i32({std::ssize(bounds)}, bounds);
    how.values = {{"cu_seqlens", ends}};
    how.tolerance_f32 = 1e-4;  // gradients are sums that may nearly vanish
    const int64_t rows = spec.all_channels > 0 ? spec.all_channels : channels;
    testing::check_operator_on_gpu(
        make_short_conv(spec),
        [&](DType dtype) -> testing::OperatorInputs {
          testing::OperatorInputs inputs = {{"x", "w", "cu_seqlens"},
                                            {{dtype, {bounds.back(), channels}},
                                             {DType::kF32, {rows, taps}},
                                             {DType::kI32, ends.get().shape}}};
          if (spec.biased) {
            inputs.names.emplace_back("w_bias");
            inputs.types.push_back({DType::kF32, {rows}});
          }
          return inputs;
        },
        {0}, cpu(), gpu(), how);
  }
};

TEST_F(ShortConvCuda, Shapes) {
  check(5, 4, {0, 0});
  check(3, 4, {0, 1});
  check(17, 4, {0, 3, 3, 4, 20});
  check(264, 4, {0, 15, 16, 17, 33, 100});
  check(1032, 4, {0, 1, 2, 3, 4, 5, 70, 70, 70});
  check(130, 2, {0, 7, 9});
  check(64, 1, {0, 6});
  check(72, 3, {0, 64});
}

TEST_F(ShortConvCuda, Biases) {
  check(5, 4, {0, 0}, {}, {.biased = true});
  check(17, 4, {0, 3, 3, 4, 20}, {}, {.biased = true});
  check(264, 4, {0, 15, 16, 17, 33, 100}, {}, {.biased = true});
  check(70, 16, {0, 5, 40}, {}, {.biased = true});
}

TEST_F(ShortConvCuda, WithoutActivation) {
  check(5, 4, {0, 0}, {}, {.silu = false});
  check(17, 3, {0, 3, 3, 4, 20}, {}, {.silu = false});
  check(264, 3, {0, 15, 16, 17, 33, 100}, {}, {.biased = true, .silu = false});
  check(70, 16, {0, 5, 40}, {}, {.silu = false});
}

TEST_F(ShortConvCuda, SomeOfTheWeightsChannels) {
  check(17, 3, {0, 3, 3, 4, 20}, {}, {.all_channels = 51, .first_channel = 17});
  check(264, 4, {0, 15, 16, 17, 33, 100}, {},
        {.biased = true, .all_channels = 528, .first_channel = 264});
}

TEST_F(ShortConvCuda, ManyTaps) {
  check(70, 16, {0, 5, 40});
  check(16, 5, {0, 100, 101});
}

TEST_F(ShortConvCuda, ManyTokens) {
  check(40, 4, {0, 3000, 3001, 9000});
}

TEST_F(ShortConvCuda, TinyShape) {
  check(24, 4, {0, 3, 21}, {.once = true});
  check(3, 6, {0, 5, 9}, {.once = true});
  check(24, 3, {0, 3, 21}, {.once = true}, {.silu = false});
  check(8, 4, {0, 3, 21}, {.once = true}, {.biased = true, .all_channels = 24, .first_channel = 8});
}

TEST_F(ShortConvCuda, GoesOnFromAState) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t taps : {1, 2, 4, 7}) {
      constexpr int64_t kChannels = 70;
      constexpr int64_t kTokens = 12;
      Random random(3, 0);
      const OwnedTensor x = testing::random_tensor(dtype, {kTokens, kChannels}, random);
      const OwnedTensor weight = testing::random_tensor(DType::kF32, {kChannels, taps}, random);
      const OwnedTensor bias = testing::random_tensor(DType::kF32, {kChannels}, random);
      const ShortConvSpec spec{.biased = taps == 4, .silu = taps != 2};
      const OwnedTensor ends = testing::tensor_of_i32({2}, {0, kTokens});
      const OwnedTensor whole(dtype, {kTokens, kChannels}, "y");
      std::vector<Tensor> of_all = {x, weight, ends};
      if (spec.biased) of_all.push_back(bias);
      testing::run_kernel(ShortConv(spec), cpu(), of_all, std::vector<Tensor>{whole});
      const OwnedTensor bias_on_gpu = testing::copy_to(gpu(), bias);
      const OwnedTensor on_gpu = testing::copy_to(gpu(), x);
      const OwnedTensor weight_on_gpu = testing::copy_to(gpu(), weight);
      const OwnedTensor garbage(dtype, {taps, kChannels});
      std::memset(garbage.get().data, 0xFF, garbage.get().num_bytes());  // NaN
      const OwnedTensor state = testing::copy_to(gpu(), garbage);
      const std::vector<int64_t> steps = {0, 1, 2, 7, 8, kTokens};
      for (size_t i = 0; i + 1 < steps.size(); ++i) {
        const int64_t count = steps[i + 1] - steps[i];
        const int64_t bytes = kChannels * dtype_size(dtype);
        const Tensor rows{static_cast<std::byte*>(on_gpu.get().data) + steps[i] * bytes,
                          dtype,
                          {count, kChannels}};
        const OwnedTensor start =
            testing::copy_to(gpu(), testing::tensor_of_i32({1}, {static_cast<int32_t>(steps[i])}));
        const OwnedTensor y(dtype, {count, kChannels}, "y", gpu().device());
        std::vector<Tensor> in = {rows, weight_on_gpu, start};
        if (spec.biased) in.push_back(bias_on_gpu);
        testing::run_kernel(ShortConvCached(spec), gpu(), in, std::vector<Tensor>{y, state});
        const auto actual = testing::to_doubles(testing::copy_to_host(gpu(), y));
        const auto expected = testing::to_doubles(whole);
        for (size_t j = 0; j < actual.size(); ++j) {
          const double value = expected[steps[i] * kChannels + j];
          ASSERT_NEAR(actual[j], value,
                      (dtype == DType::kF32 ? 2e-6 : 8e-3) * (1 + std::abs(value)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
