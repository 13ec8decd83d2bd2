#include "core/slice.h"
#include "ops/adamw/adamw.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

class AdamWCuda : public testing::GpuTest {
 protected:
  /// Four steps on both back ends from the same state, of slices of one tensor of each kind, give
  /// the same bits.
  void check(const std::vector<IndexRange>& slices, bool bf16_weight,
             const StateFormats& formats = {}) const {
    const AdamWSpec spec = {.weight_decay = 0.1, .bf16_weight = bf16_weight, .formats = formats};
    const OperatorPtr op = make_adamw(spec);
    SCOPED_TRACE(fmt::format("{} slices, the first of {} elements from {} on, weight {}, {}",
                             slices.size(), slices[0].count, slices[0].begin, bf16_weight,
                             op->attributes()));
    const int64_t size = slices.back().end() + 1;
    const std::vector<OwnedTensor> host = random_state(*op, size);
    std::vector<OwnedTensor> device;
    for (const OwnedTensor& tensor : host) device.push_back(testing::copy_to(gpu(), tensor));
    for (int64_t update = 1; update <= 4; ++update) {
      // The last update is left out.
      Step step{make_adamw_factors(spec, 1e-2, update), {0.7F, update == 4 ? 1.0F : 0.0F}};
      run(*op, cpu(), host, view_of(step.factors), view_of(step.grad_scale), slices);
      const OwnedTensor factors = testing::copy_to(gpu(), view_of(step.factors));
      const OwnedTensor grad_scale = testing::copy_to(gpu(), view_of(step.grad_scale));
      run(*op, gpu(), device, factors, grad_scale, slices);
    }
    // Also what lies between the slices, which no kernel touches.
    for (size_t i = 1; i < host.size(); ++i)
      testing::expect_bitwise_equal(testing::copy_to_host(gpu(), device[i]), host[i],
                                    fmt::format("output {}", i - 1));
  }

 private:
  struct Step {
    AdamWFactors factors;
    AdamWGradScale grad_scale;
  };
  /// The gradient, then the operator's outputs.
  static std::vector<OwnedTensor> random_state(const Operator& op, int64_t size) {
    Random random(static_cast<uint64_t>(size), 9);
    const ValueType grad{DType::kF32, {size}};
    std::vector<OwnedTensor> tensors;
    tensors.push_back(testing::random_tensor(DType::kF32, {size}, random, 1.0));
    for (const ValueType& type :
         op.infer(std::vector<ValueType>{grad, {DType::kF32, {8}}, {DType::kF32, {2}}})) {
      if (type.dtype == DType::kU16) {
        tensors.emplace_back(type.dtype, type.shape);
        for (uint16_t& x : tensors.back().get().span<uint16_t>())
          x = static_cast<uint16_t>(random.next_below(0x8000));
      } else if (type.dtype == DType::kU8) {
        tensors.emplace_back(type.dtype, type.shape);
        for (uint8_t& x : tensors.back().get().span<uint8_t>())
          x = static_cast<uint8_t>(random.next_below(0x80));
      } else {
        tensors.push_back(testing::random_tensor(type.dtype, {size}, random, 0.1));
      }
    }
    make_positive(tensors[1 + AdamW::kSecondMoment]);
    return tensors;
  }
  static void make_positive(const Tensor& tensor) {
    if (tensor.dtype == DType::kF32) {
      for (float& x : tensor.span<float>()) x = std::abs(x);
    } else {
      for (Bf16& x : tensor.span<Bf16>()) x = Bf16(std::abs(static_cast<float>(x)));
    }
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

TEST_F(AdamWCuda, FewerBits) {
  for (const MomentKind m : {MomentKind::kF32, MomentKind::kBF16}) {
    for (const MomentKind v : {MomentKind::kF32, MomentKind::kBF16}) {
      for (const MasterKind master :
           {MasterKind::kF32, MasterKind::kRemainder, MasterKind::kRemainder8, MasterKind::kNone}) {
        for (const bool bf16_weight : {false, true}) {
          const StateFormats formats = {m, v, master};
          check({{0, 5}, {8, 4096}, {4105, 100'003}}, bf16_weight, formats);
        }
      }
    }
  }
}

TEST_F(AdamWCuda, TinySlice) {
  check({{0, 1003}}, true);
}

TEST_F(AdamWCuda, TinyFewerBits) {
  constexpr MomentKind kBF16 = MomentKind::kBF16;
  check({{1, 1003}}, true, {kBF16, kBF16, MasterKind::kRemainder});
  check({{1, 1003}}, true, {kBF16, kBF16, MasterKind::kRemainder8});
  check({{0, 1003}}, true, {kBF16, kBF16, MasterKind::kNone});
}

}  // namespace
}  // namespace tessera
