#include "ops/layer_norm/layer_norm.h"

#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class LayerNormCuda : public testing::GpuTest {
 protected:
  void check(int64_t tokens, int64_t size, const testing::GpuCheck& how = {}) const {
    testing::check_operator_on_gpu(
        make_layer_norm(1e-6),
        [&](DType dtype) {
          return testing::OperatorInputs{
              {"a", "weight", "bias"},
              {{dtype, {tokens, size}}, {DType::kF32, {size}}, {DType::kF32, {size}}}};
        },
        {}, cpu(), gpu(), how);
  }
};

TEST_F(LayerNormCuda, Shapes) {
  for (const int64_t size : {5, 64, 128, 131}) {
    for (const int64_t tokens : {0, 1, 37}) check(tokens, size);
  }
}

TEST_F(LayerNormCuda, TinyRows) {
  check(5, 48, {.once = true});
}

}  // namespace
}  // namespace tessera
