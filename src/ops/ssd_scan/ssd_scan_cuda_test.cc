#include "ops/ssd_scan/ssd_scan.h"

#include <cmath>

#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

struct Case {
  SsdSpec spec;
  std::vector<int32_t> bounds;
  double step = 0;             ///< mean of dt
  bool gives_of_steps = true;  ///< whether dt has a gradient

  std::string to_string() const {
    return fmt::format("{} x {} heads, {} x {} states, {} tokens in {} sequences", spec.num_heads,
                       spec.head_size, spec.num_groups, spec.state_size, bounds.back(),
                       bounds.size() - 1);
  }
};

OwnedTensor random_around(const Shape& shape, Random& random, double mean) {
  OwnedTensor values = testing::random_tensor(DType::kF32, shape, random);
  for (int64_t i = 0; i < shape.num_elements(); ++i)
    values.get().as<float>()[i] += static_cast<float>(mean);
  return values;
}

class SsdScanCuda : public testing::GpuTest {
 protected:
  void check(const Case& c, testing::GpuCheck how = {}) const {
    SCOPED_TRACE(c.to_string());
    const int64_t tokens = c.bounds.back();
    Random random(5, 0);
    const OwnedTensor ends = testing::tensor_of_i32({std::ssize(c.bounds)}, c.bounds);
    const OwnedTensor dt = random_around({tokens, c.spec.num_heads}, random, c.step);
    const std::string name_of_dt = c.gives_of_steps ? "x_dt" : "dt";
    how.values = {{"cu_seqlens", ends}, {name_of_dt, dt}};
    // Gradients of steps are sums of later tokens' terms that may nearly vanish.
    how.tolerance_f32 = 3e-3;
    if (how.tolerance_bf16 == testing::GpuCheck{}.tolerance_bf16) how.tolerance_bf16 = 2e-2;
    testing::check_operator_on_gpu(
        make_ssd_scan(c.spec),
        [&](DType dtype) -> testing::OperatorInputs {
          const ValueType x{dtype, {tokens, c.spec.num_heads * c.spec.head_size}};
          const ValueType states{dtype, {tokens, c.spec.num_groups * c.spec.state_size}};
          const ValueType of_heads{DType::kF32, {c.spec.num_weights()}};
          return {{"x_x", name_of_dt, "x_b", "x_c", "w_a_log", "w_d", "w_dt_bias", "cu_seqlens"},
                  {x,
                   {dtype, {tokens, c.spec.num_heads}},
                   states,
                   states,
                   of_heads,
                   of_heads,
                   of_heads,
                   {DType::kI32, ends.get().shape}}};
        },
        {0}, cpu(), gpu(), how);
  }
};

TEST_F(SsdScanCuda, SmallSizes) {
  check({{1, 1, 4, 4}, {0, 0}});
  check({{4, 2, 5, 8}, {0, 3, 3, 4, 20}});
  check({{3, 1, 16, 17}, {0, 64, 129}});
  check({{2, 2, 33, 5}, {0, 63, 200}});
  check({{1, 1, 1, 3}, {0, 130}});
}

TEST_F(SsdScanCuda, SizesOfModels) {
  check({{4, 1, 64, 128}, {0, 128, 300}});
  check({{8, 2, 80, 128}, {0, 65, 66, 128, 300}});
  check({{4, 4, 64, 16}, {0, 700}});
  check({{2, 1, 128, 256}, {0, 150}});
}

TEST_F(SsdScanCuda, LargestSizes) {
  check({{1, 1, 512, 33}, {0, 70}});
  check({{1, 1, 40, 512}, {0, 3, 140}});
}

TEST_F(SsdScanCuda, ManyShortSequences) {
  std::vector<int32_t> bounds = {0};
  for (int i = 0; i < 60; ++i) bounds.push_back(bounds.back() + i % 9);
  for (int i = 0; i < 40; ++i) bounds.push_back(bounds.back());
  check({{4, 2, 64, 64}, bounds});
}

/// Where states are kept for long, half a unit in the last place of the operands moves a row of
/// dt's gradient by 4 to 9 % (docs/log.md).
TEST_F(SsdScanCuda, ShortAndLongSteps) {
  check({{4, 2, 64, 32}, {0, 90, 300}, 4});
  check({{4, 2, 64, 32}, {0, 90, 300}, -5, false});
  check({{4, 2, 64, 32}, {0, 90, 300}, -5}, {.tolerance_bf16 = 8e-2});
}

/// Chunks, tiles, slices, pairs of slices, blocks of heads and segments that are not full, and
/// sequences that begin at their borders.
TEST_F(SsdScanCuda, PartsThatAreNotFull) {
  check({{1, 1, 8, 8}, {0, 1}});
  check({{6, 1, 72, 72}, {0, 127, 128, 129, 256, 385}});
  check({{17, 1, 64, 64}, {0, 128, 256, 640}});
  check({{36, 2, 16, 128}, {0, 1, 511, 512, 1100}});
  check({{4, 1, 200, 40}, {0, 260}});
  check({{5, 5, 8, 16}, {0, 16, 48, 300}});
}

/// Blocks go through several chunks where there are more than they need for themselves.
TEST_F(SsdScanCuda, LongSegments) {
  check({{260, 1, 64, 64}, {0, 700, 1024, 1300}, -2}, {.dtypes = {DType::kBF16}});
}

TEST_F(SsdScanCuda, RandomSizes) {
  Random random(11, 0);
  const auto pick = [&](int64_t most) { return static_cast<int64_t>(random.next_below(most)); };
  for (int i = 0; i < 12; ++i) {
    const int64_t groups = 1 + pick(3);
    const SsdSpec spec{groups * (4 + pick(5)), groups, 8 * (1 + pick(17)), 8 * (1 + pick(16))};
    std::vector<int32_t> bounds = {0};
    for (int64_t s = pick(5); s >= 0; --s)
      bounds.push_back(bounds.back() + static_cast<int32_t>(pick(2) * pick(300)));
    check({spec, bounds});
  }
}

TEST_F(SsdScanCuda, KeepsStepsWithinTheirLimits) {
  for (SsdSpec spec : {SsdSpec{2, 1, 12, 20}, SsdSpec{4, 2, 16, 24}}) {
    spec.min_step = 0.4;
    spec.max_step = 1.1;
    check({spec, {0, 5, 140}});
  }
}

TEST_F(SsdScanCuda, SomeOfTheWeights) {
  check({{2, 1, 5, 8, 0, 0, 7, 5}, {0, 3, 140}});
  check({{4, 2, 64, 64, 0, 0, 16, 4}, {0, 90, 300}});
}

TEST_F(SsdScanCuda, TinyShape) {
  check({{2, 1, 4, 3}, {0, 3, 140}}, {.once = true});
  check({{2, 1, 4, 3, 0, 0, 5, 3}, {0, 3, 140}}, {.once = true});
  check({{2, 2, 64, 40}, {0, 66}}, {.once = true});
  check({{3, 1, 72, 72}, {0, 3, 3, 130}}, {.once = true});
}

/// Rows [begin, end) of a tensor [T, C].
Tensor rows_of(const Tensor& x, int64_t begin, int64_t end) {
  const int64_t bytes = x.shape[1] * dtype_size(x.dtype);
  return {static_cast<std::byte*>(x.data) + begin * bytes, x.dtype, {end - begin, x.shape[1]}};
}

TEST_F(SsdScanCuda, GoesOnFromStates) {
  for (const SsdSpec& spec : {SsdSpec{4, 2, 5, 8}, SsdSpec{2, 1, 64, 128}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      constexpr int64_t kTokens = 300;
      Random random(5, 0);
      const int64_t width = spec.num_heads * spec.head_size;
      std::vector<OwnedTensor> inputs;
      for (const int64_t columns : {width, spec.num_heads, spec.num_groups * spec.state_size,
                                    spec.num_groups * spec.state_size})
        inputs.push_back(testing::random_tensor(dtype, {kTokens, columns}, random));
      for (int i = 0; i < 3; ++i)
        inputs.push_back(testing::random_tensor(DType::kF32, {spec.num_heads}, random));
      std::vector<Tensor> host(inputs.begin(), inputs.end());
      const OwnedTensor ends = testing::tensor_of_i32({2}, {0, kTokens});
      host.push_back(ends);
      const OwnedTensor whole(dtype, {kTokens, width}, "y");
      testing::run_kernel(SsdScan(spec), cpu(), host, std::vector<Tensor>{whole});
      const auto expected = testing::to_doubles(whole);
      std::vector<OwnedTensor> on_gpu;
      for (const OwnedTensor& input : inputs) on_gpu.push_back(testing::copy_to(gpu(), input));
      const Shape shape = {spec.num_heads * spec.state_size, spec.head_size};
      const OwnedTensor states = testing::copy_to(
          gpu(), testing::tensor_of(shape, std::vector<float>(shape.num_elements(), NAN)));
      const std::vector<int64_t> steps = {0, 1, 2, 67, 290, kTokens};
      for (size_t i = 0; i + 1 < steps.size(); ++i) {
        std::vector<Tensor> in;
        for (int idx = 0; idx < 4; ++idx)
          in.push_back(rows_of(on_gpu[idx], steps[i], steps[i + 1]));
        for (int idx = 4; idx < 7; ++idx) in.push_back(on_gpu[idx]);
        const OwnedTensor start =
            testing::copy_to(gpu(), testing::tensor_of_i32({1}, {static_cast<int32_t>(steps[i])}));
        in.push_back(start);
        const OwnedTensor y(dtype, {steps[i + 1] - steps[i], width}, "y", gpu().device());
        testing::run_kernel(SsdScanCached(spec), gpu(), in, std::vector<Tensor>{y, states});
        const auto actual = testing::to_doubles(testing::copy_to_host(gpu(), y));
        for (size_t j = 0; j < actual.size(); ++j) {
          const double value = expected[steps[i] * width + j];
          ASSERT_NEAR(actual[j], value,
                      (dtype == DType::kF32 ? 1e-4 : 8e-3) * (1 + std::abs(value)))
              << fmt::format("{} from {}", j, steps[i]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
