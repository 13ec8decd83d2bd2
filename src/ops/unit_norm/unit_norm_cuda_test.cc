#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/unit_norm/unit_norm.h"

namespace tessera {
namespace {

class UnitNormCuda : public testing::GpuTest {};

TEST_F(UnitNormCuda, Shapes) {
  for (const int64_t size : {1, 5, 64, 256, 512}) {
    for (const int64_t tokens : {0, 1, 37}) {
      testing::check_operator_on_gpu(
          make_unit_norm(size, 1e-6),
          [&](DType dtype) {
            return testing::OperatorInputs{{"x"}, {{dtype, {tokens, 3 * size}}}};
          },
          {0}, cpu(), gpu());
    }
  }
}

TEST_F(UnitNormCuda, RaggedRows) {
  for (const int64_t extent : {0, 1, 77, 100}) {
    testing::check_ragged_operator_on_gpu(
        make_unit_norm(16, 1e-6),
        [&](DType dtype) {
          return testing::OperatorInputs{{"x"}, {testing::ragged_rows(dtype, {100, 64})}};
        },
        {0}, extent, cpu(), gpu());
  }
}

TEST_F(UnitNormCuda, TinyRows) {
  testing::check_operator_on_gpu(make_unit_norm(64, 1e-6),
                                 [](DType dtype) {
                                   return testing::OperatorInputs{{"x"}, {{dtype, {5, 192}}}};
                                 },
                                 {0}, cpu(), gpu(), {.once = true});
}

}  // namespace
}  // namespace tessera
