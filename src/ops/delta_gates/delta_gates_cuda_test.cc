#include "ops/delta_gates/delta_gates.h"

#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class DeltaGatesCuda : public testing::GpuTest {
 protected:
  void check(int64_t tokens, int64_t heads, testing::GpuCheck how = {}) const {
    SCOPED_TRACE(fmt::format("{} x {}", tokens, heads));
    how.tolerance_f32 = 1e-4;  // gradients of weights are sums that may nearly vanish
    testing::check_operator_on_gpu(
        make_delta_gates(),
        [&](DType dtype) -> testing::OperatorInputs {
          const ValueType gate{dtype, {tokens, heads}};
          const ValueType weight{DType::kF32, {heads}};
          return {{"x_a", "x_b", "w_log_decay", "w_bias"}, {gate, gate, weight, weight}};
        },
        {0, 1}, cpu(), gpu(), how);
  }
};

TEST_F(DeltaGatesCuda, Shapes) {
  for (const int64_t tokens : {0, 1, 77, 2500})
    for (const int64_t heads : {1, 5, 32, 72}) check(tokens, heads);
}

TEST_F(DeltaGatesCuda, LargeValues) {
  check(40, 16, {.deviation = 30});
}

TEST_F(DeltaGatesCuda, TinyShape) {
  check(9, 8, {.once = true});
  check(5, 3, {.once = true});
}

}  // namespace
}  // namespace tessera
