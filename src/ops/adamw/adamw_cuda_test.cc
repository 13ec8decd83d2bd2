#include "core/slice.h"
#include "ops/adamw/adamw.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

class AdamWCuda : public testing::GpuTest {
 protected:
  /// Four steps on both back ends from the same state, of slices of one tensor of each kind.
  void check(const std::vector<IndexRange>& slices, bool bf16_weight) const {
    SCOPED_TRACE(fmt::format("{} slices, the first of {} elements from {} on, weight {}",
                             slices.size(), slices[0].count, slices[0].begin, bf16_weight));
    const AdamWSpec spec = {.weight_decay = 0.1, .bf16_weight = bf16_weight};
    const OperatorPtr op = make_adamw(spec);
    const int64_t size = slices.back().end() + 1;
    Random random(static_cast<uint64_t>(size), 9);
    std::vector<OwnedTensor> host, device;
    for (int i = 0; i < 5; ++i) {
      host.push_back(testing::random_tensor(i < 4 ? DType::kF32 : DType::kBF16, {size}, random,
                                            i == 0 ? 1.0 : 0.1));
      if (i == 3) make_positive(host.back());
      device.push_back(testing::copy_to(gpu(), host.back()));
    }
    for (int64_t update = 1; update <= 4; ++update) {
      // The last update is left out.
      Step step{make_adamw_factors(spec, 1e-2, update), {0.5F, update == 4 ? 1.0F : 0.0F}};
      run(*op, cpu(), host, view_of(step.factors), view_of(step.grad_scale), slices);
      const OwnedTensor factors = testing::copy_to(gpu(), view_of(step.factors));
      const OwnedTensor grad_scale = testing::copy_to(gpu(), view_of(step.grad_scale));
      run(*op, gpu(), device, factors, grad_scale, slices);
    }
    // Also what lies between the slices, which no kernel touches.
    for (size_t i = 1; i < 5; ++i) expect_near(host[i], device[i], i);
  }

 private:
  struct Step {
    AdamWFactors factors;
    AdamWGradScale grad_scale;
  };
  static void make_positive(const Tensor& tensor) {
    for (float& x : tensor.span<float>()) x = std::abs(x);
  }
  static Tensor part(const Tensor& tensor, IndexRange range) {
    return {static_cast<std::byte*>(tensor.data) + range.begin * dtype_size(tensor.dtype),
            tensor.dtype,
            {range.count}};
  }
  static void run(const Operator& op, const Backend& backend,
                  const std::vector<OwnedTensor>& tensors, const Tensor& factors,
                  const Tensor& grad_scale, const std::vector<IndexRange>& slices) {
    std::vector<Tensor> inputs, outputs;
    for (const IndexRange& slice : slices) {
      inputs.push_back(part(tensors[0], slice));
      for (size_t i = 0; i < static_cast<const AdamW&>(op).num_outputs(); ++i)
        outputs.push_back(part(tensors[i + 1], slice));
    }
    inputs.push_back(factors);
    inputs.push_back(grad_scale);
    testing::run_kernel(op, backend, inputs, outputs);
  }
  void expect_near(const Tensor& host, const Tensor& device, size_t which) const {
    const OwnedTensor copy = testing::copy_to_host(gpu(), device);
    const std::vector<double> actual = testing::to_doubles(copy);
    const std::vector<double> expected = testing::to_doubles(host);
    const double tolerance = host.dtype == DType::kBF16 ? 8e-3 : 2e-6;
    // Weights of 0.1 that an update brings near 0 keep the rounding of what they were.
    for (size_t i = 0; i < expected.size(); ++i)
      ASSERT_NEAR(actual[i], expected[i], tolerance * std::abs(expected[i]) + 4e-8)
          << "output " << which - 1 << ", element " << i;
  }
};

TEST_F(AdamWCuda, Sizes) {
  for (const bool bf16_weight : {false, true}) {
    for (const int64_t count : {0, 1, 3, 4, 2048, 100'003, 1'100'003})
      check({{0, count}}, bf16_weight);
    check({{1, 1001}}, bf16_weight);
    check({{1, 1'100'003}}, bf16_weight);
  }
}

/// More slices than a launch takes, among them some that are launched alone, with gaps between.
TEST_F(AdamWCuda, ManySlices) {
  Random random(5, 5);
  std::vector<IndexRange> slices;
  int64_t begin = 0;
  for (int i = 0; i < 150; ++i) {
    const auto small = static_cast<int64_t>(random.next_below(i % 5 == 0 ? 9000 : 30));
    const int64_t count = i % 61 == 9 ? 1'050'000 + i : small;
    slices.push_back({begin, count});
    const int64_t next = begin + count + 1;
    begin = i % 3 == 0 ? next : align_up(next);
  }
  for (const bool bf16_weight : {false, true}) check(slices, bf16_weight);
}

TEST_F(AdamWCuda, TinySlice) {
  check({{0, 1003}}, true);
}

}  // namespace
}  // namespace tessera
