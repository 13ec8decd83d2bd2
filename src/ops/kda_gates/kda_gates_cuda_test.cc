#include "ops/kda_gates/kda_gates.h"

#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class KdaGatesCuda : public testing::GpuTest {
 protected:
  void check(int64_t tokens, int64_t heads, int64_t size, testing::GpuCheck how = {}) const {
    SCOPED_TRACE(fmt::format("{} x {} x {}", tokens, heads, size));
    how.tolerance_f32 = 1e-4;  // gradients of weights are sums that may nearly vanish
    testing::check_operator_on_gpu(
        make_kda_gates(),
        [&](DType dtype) -> testing::OperatorInputs {
          const ValueType decays{dtype, {tokens, heads * size}};
          const ValueType strengths{dtype, {tokens, heads}};
          return {{"x_a", "x_b", "w_log_decay", "w_bias"},
                  {decays, strengths, {DType::kF32, {heads}}, {DType::kF32, {heads * size}}}};
        },
        {0, 1}, cpu(), gpu(), how);
  }
};

TEST_F(KdaGatesCuda, Shapes) {
  for (const int64_t tokens : {0, 1, 77, 600}) {
    for (const int64_t heads : {1, 5, 32}) {
      for (const int64_t size : {1, 3, 16}) check(tokens, heads, size);
    }
  }
  check(300, 32, 128);
}

TEST_F(KdaGatesCuda, LargeValues) {
  check(40, 4, 16, {.deviation = 30});
}

TEST_F(KdaGatesCuda, TinyShape) {
  check(9, 2, 8, {.once = true});
  check(5, 3, 3, {.once = true});
}

}  // namespace
}  // namespace tessera
