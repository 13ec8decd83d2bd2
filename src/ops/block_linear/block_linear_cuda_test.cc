#include "ops/block_linear/block_linear.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class BlockLinearCuda : public testing::GpuTest {
 protected:
  void check(int64_t tokens, int64_t blocks, int64_t rows, int64_t columns, bool once = false) {
    for (const bool shared : {false, true}) {
      const int64_t all_rows = (shared ? 1 : blocks) * rows;
      testing::check_operator_on_gpu(
          make_block_linear(blocks, shared),
          [&](DType dtype) {
            return testing::OperatorInputs{
                {"x", "w"}, {{dtype, {tokens, blocks * columns}}, {dtype, {all_rows, columns}}}};
          },
          {0}, cpu(), gpu(), {.once = once});
    }
  }
};

TEST_F(BlockLinearCuda, Shapes) {
  check(0, 2, 8, 8);
  check(1, 1, 1, 1);
  check(37, 3, 5, 7);
  check(200, 8, 64, 128);
}

TEST_F(BlockLinearCuda, TinyBlocks) {
  check(5, 2, 8, 16, true);
}

}  // namespace
}  // namespace tessera
