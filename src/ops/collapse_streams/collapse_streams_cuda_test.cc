#include "ops/collapse_streams/collapse_streams.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class CollapseStreamsCuda : public testing::GpuTest {
 protected:
  void check(int64_t tokens, int64_t streams, int64_t hidden, testing::GpuCheck how = {}) const {
    SCOPED_TRACE(fmt::format("{} x {} x {}", tokens, streams, hidden));
    how.tolerance_f32 = 5e-5;
    testing::check_operator_on_gpu(
        make_collapse_streams(),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"x", "x_pre"},
                  {{dtype, {tokens, streams * hidden}}, {DType::kF32, {tokens, streams}}}};
        },
        {0}, cpu(), gpu(), how);
  }
};

TEST_F(CollapseStreamsCuda, Shapes) {
  for (const int64_t tokens : {0, 1, 77}) {
    for (const int64_t streams : {1, 3, 4, 8}) {
      for (const int64_t hidden : {1, 37, 64, 2048}) check(tokens, streams, hidden);
    }
  }
}

TEST_F(CollapseStreamsCuda, TinyShape) {
  check(5, 4, 16, {.once = true});
  check(3, 2, 5, {.once = true});
}

}  // namespace
}  // namespace tessera
