#include "ops/repeat_heads/repeat_heads.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class RepeatHeadsCuda : public testing::GpuTest {
 protected:
  void check(const OperatorPtr& op, int64_t width, int64_t extent,
             const testing::GpuCheck& how = {}) const {
    SCOPED_TRACE(fmt::format("{} width {} rows {}", op->attributes(), width, extent));
    testing::check_ragged_operator_on_gpu(
        op,
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"x"}, {testing::ragged_rows(dtype, {50, width})}};
        },
        {0}, extent, cpu(), gpu(), how);
  }
};

TEST_F(RepeatHeadsCuda, CopiesAndSums) {
  for (const int64_t extent : {0, 1, 33, 50}) {
    check(make_repeat_heads(4, 2), 4 * 128, extent);
    check(make_repeat_heads(2, 11), 2 * 24, extent);
    check(make_repeat_heads(3, 3), 3 * 5, extent);
    check(make_repeat_heads(1, 1), 8, extent);
    check(make_sum_heads(2, 9), 18 * 64, extent);
  }
}

TEST_F(RepeatHeadsCuda, TinyHeads) {
  check(make_repeat_heads(2, 11), 2 * 24, 33, {.once = true});
}

}  // namespace
}  // namespace tessera
