#include "ops/add_bias/add_bias.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/narrow_gpu.h"

namespace tessera {
namespace {

class AddBiasCuda : public testing::GpuTest {};

TEST_F(AddBiasCuda, Shapes) {
  for (const int64_t rows : {0, 1, 37, 2500}) {
    for (const int64_t width : {1, 8, 33, 320, 4104}) {
      SCOPED_TRACE(fmt::format("{} x {}", rows, width));
      testing::check_operator_on_gpu(
          make_add_bias(),
          [&](DType dtype) -> testing::OperatorInputs {
            return {{"x", "w"}, {{dtype, {rows, width}}, {DType::kF32, {width}}}};
          },
          {0}, cpu(), gpu(), {.seed = static_cast<uint64_t>(rows)});
    }
  }
}

TEST_F(AddBiasCuda, TinyShape) {
  testing::check_operator_on_gpu(make_add_bias(),
                                 [](DType dtype) -> testing::OperatorInputs {
                                   return {{"x", "w"}, {{dtype, {533, 72}}, {DType::kF32, {72}}}};
                                 },
                                 {0}, cpu(), testing::make_narrow_gpu(), {.once = true});
}

TEST_F(AddBiasCuda, RaggedRows) {
  for (const int64_t extent : {0, 1, 77, 100}) {
    testing::check_ragged_operator_on_gpu(
        make_add_bias(),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"x", "w"}, {testing::ragged_rows(dtype, {100, 72}), {DType::kF32, {72}}}};
        },
        {0}, extent, cpu(), gpu());
  }
}

}  // namespace
}  // namespace tessera
