#include "ops/stream_logits/stream_logits.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class StreamLogitsCuda : public testing::GpuTest {
 protected:
  void check(int64_t tokens, int64_t width, int64_t logits, testing::GpuCheck how = {}) const {
    SCOPED_TRACE(fmt::format("{} x {} to {}", tokens, width, logits));
    how.tolerance_f32 = 1e-4;  // gradients of weights are sums that may nearly vanish
    testing::check_operator_on_gpu(
        make_stream_logits(1e-6),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"x", "w"}, {{dtype, {tokens, width}}, {DType::kF32, {logits, width}}}};
        },
        {StreamLogits::kLogits}, cpu(), gpu(), how);
  }
};

TEST_F(StreamLogitsCuda, Shapes) {
  for (const int64_t tokens : {0, 1, 77, 600}) {
    for (const int64_t logits : {1, 4, 24, 80}) check(tokens, 40, logits);
  }
  check(130, 257, 8);
  check(300, 4096, 24);
}

TEST_F(StreamLogitsCuda, TinyShape) {
  check(9, 24, 8, {.once = true});
  check(5, 33, 3, {.once = true});
}

}  // namespace
}  // namespace tessera
