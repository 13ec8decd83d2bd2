#include "ops/stream_weights/stream_weights.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class StreamWeightsCuda : public testing::GpuTest {
 protected:
  void check(const StreamWeightsSpec& spec, int64_t tokens, testing::GpuCheck how = {}) const {
    SCOPED_TRACE(fmt::format("{} tokens, {}", tokens, StreamWeights(spec).attributes()));
    how.dtypes = {DType::kF32};
    how.tolerance_f32 = 2e-4;  // gradients of weights are sums that may nearly vanish
    testing::check_operator_on_gpu(
        make_stream_weights(spec),
        [&](DType /*dtype*/) -> testing::OperatorInputs {
          return {{"x", "w_scale", "w_base"},
                  {{DType::kF32, {tokens, spec.logits()}},
                   {DType::kF32, {spec.scales()}},
                   {DType::kF32, {spec.logits()}}}};
        },
        spec.collapses ? std::vector<int>{0} : std::vector<int>{0, 1, 2}, cpu(), gpu(), how);
  }
};

TEST_F(StreamWeightsCuda, Shapes) {
  for (const int64_t tokens : {0, 1, 77, 3000}) {
    for (const int64_t streams : {1, 2, 3, 4, 5, 8}) {
      check({.streams = streams}, tokens);
      check({.streams = streams, .collapses = true}, tokens);
    }
  }
  check({.streams = 4, .iterations = 1, .eps = 0.1}, 100);
  check({.streams = 4, .iterations = 64}, 100);
}

TEST_F(StreamWeightsCuda, TinyShape) {
  check({.streams = 4, .iterations = 3}, 9, {.once = true});
  check({.streams = 3, .collapses = true}, 5, {.once = true});
}

}  // namespace
}  // namespace tessera
