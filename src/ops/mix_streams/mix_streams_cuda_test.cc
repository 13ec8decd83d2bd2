#include "ops/mix_streams/mix_streams.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class MixStreamsCuda : public testing::GpuTest {
 protected:
  void check(int64_t tokens, int64_t streams, int64_t hidden, testing::GpuCheck how = {}) const {
    SCOPED_TRACE(fmt::format("{} x {} x {}", tokens, streams, hidden));
    how.tolerance_f32 = 5e-5;
    testing::check_operator_on_gpu(
        make_mix_streams(),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"x", "x_given", "x_post", "x_comb"},
                  {{dtype, {tokens, streams * hidden}},
                   {dtype, {tokens, hidden}},
                   {DType::kF32, {tokens, streams}},
                   {DType::kF32, {tokens, streams * streams}}}};
        },
        {0}, cpu(), gpu(), how);
  }
};

TEST_F(MixStreamsCuda, Shapes) {
  for (const int64_t tokens : {0, 1, 77}) {
    for (const int64_t streams : {1, 2, 3, 4, 5, 8}) {
      for (const int64_t hidden : {1, 37, 64, 2048}) check(tokens, streams, hidden);
    }
  }
}

TEST_F(MixStreamsCuda, TinyShape) {
  check(5, 4, 16, {.once = true});
  check(3, 2, 5, {.once = true});
}

}  // namespace
}  // namespace tessera
