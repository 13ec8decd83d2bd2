#include "ops/gated_norm/gated_norm.h"

#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class GatedNormCuda : public testing::GpuTest {
 protected:
  void check(int64_t tokens, int64_t heads, int64_t size, testing::GpuCheck how = {},
             NormGate gate = NormGate::kSilu) const {
    SCOPED_TRACE(fmt::format("{} x {} of {}", tokens, heads, size));
    how.tolerance_f32 = 1e-4;  // gradients are sums that may nearly vanish
    testing::check_operator_on_gpu(
        make_gated_norm(1e-2, gate),
        [&](DType dtype) -> testing::OperatorInputs {
          const ValueType rows{dtype, {tokens, heads * size}};
          return {{"x_x", "x_z", "w"}, {rows, rows, {DType::kF32, {size}}}};
        },
        {0}, cpu(), gpu(), how);
  }
};

TEST_F(GatedNormCuda, Shapes) {
  for (const auto& [tokens, heads, size] : {std::array<int64_t, 3>{0, 2, 64},
                                            {1, 1, 5},
                                            {9, 3, 17},
                                            {33, 2, 64},
                                            {70, 5, 128},
                                            {3, 1, 1}})
    check(tokens, heads, size);
}

TEST_F(GatedNormCuda, EveryGroupOfLanes) {
  for (const int64_t size : {8, 16, 24, 32, 64, 96, 136, 256}) check(13, 3, size);
}

TEST_F(GatedNormCuda, LongHeads) {
  for (const int64_t size : {33, 101, 264, 520, 1000}) check(21, 2, size);
}

TEST_F(GatedNormCuda, SigmoidGates) {
  for (const int64_t size : {17, 64, 128, 520}) check(33, 2, size, {}, NormGate::kSigmoid);
}

TEST_F(GatedNormCuda, ManyRows) {
  check(3000, 4, 128);
}

TEST_F(GatedNormCuda, TinyShape) {
  check(5, 3, 64, {.once = true});
  check(3, 1, 300, {.once = true});
  check(3, 1, 35, {.once = true});
  check(5, 3, 64, {.once = true}, NormGate::kSigmoid);
}

}  // namespace
}  // namespace tessera
