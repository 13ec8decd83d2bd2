#include "ops/attention_sink/attention_sink.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class AttentionSinkCuda : public testing::GpuTest {
 protected:
  void check(const AttentionSinkSpec& spec, int64_t tokens, int64_t size,
             testing::GpuCheck how = {}) const {
    SCOPED_TRACE(fmt::format("{} tokens, {} heads of {}", tokens, spec.num_heads, size));
    // Gradients of log-sum-exps are sums that may nearly vanish.
    how.tolerance_f32 = 1e-4;
    testing::check_operator_on_gpu(
        make_attention_sink(spec),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"x_o", "x_lse", "w_sinks"},
                  {{dtype, {tokens, spec.num_heads * size}},
                   {DType::kF32, {spec.num_heads, tokens}},
                   {DType::kF32, {spec.num_sinks}}}};
        },
        {0}, cpu(), gpu(), how);
  }
};

TEST_F(AttentionSinkCuda, Shapes) {
  for (const int64_t tokens : {0, 1, 45, 3000}) {
    for (const int64_t size : {1, 33, 64, 128}) {
      check({.num_heads = 1, .num_sinks = 1}, tokens, size);
      check({.num_heads = 7, .num_sinks = 7}, tokens, size);
    }
  }
  check({.num_heads = 64, .num_sinks = 64}, 2048, 64);
}

TEST_F(AttentionSinkCuda, SomeOfTheSinks) {
  check({.num_heads = 4, .num_sinks = 16, .first_head = 8}, 70, 64);
  check({.num_heads = 1, .num_sinks = 3, .first_head = 2}, 9, 40);
}

TEST_F(AttentionSinkCuda, TinyShape) {
  check({.num_heads = 3, .num_sinks = 3}, 11, 24, {.once = true});
}

}  // namespace
}  // namespace tessera
