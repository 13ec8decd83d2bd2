#include "ops/scale_by/scale_by.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class ScaleByCuda : public testing::GpuTest {};

testing::OperatorInputs operands(const ValueType& type) {
  return {{"x", "factor"}, {type, {DType::kF32, {1}}}};
}

TEST_F(ScaleByCuda, Shapes) {
  for (const Shape& shape : {Shape{0}, Shape{1}, Shape{4096}, Shape{7, 33}, Shape{300, 2, 40}}) {
    testing::check_operator_on_gpu(
        make_scale_by(),
        [&](DType dtype) {
          return operands({dtype, shape});
        },
        {0}, cpu(), gpu());
  }
}

TEST_F(ScaleByCuda, RaggedRows) {
  for (const int64_t extent : {0, 1, 77, 100}) {
    for (const int64_t width : {64, 5}) {
      testing::check_ragged_operator_on_gpu(
          make_scale_by(),
          [&](DType dtype) {
            return operands(testing::ragged_rows(dtype, {100, width}));
          },
          {0}, extent, cpu(), gpu());
    }
  }
}

TEST_F(ScaleByCuda, TinyRows) {
  testing::check_operator_on_gpu(make_scale_by(),
                                 [](DType dtype) {
                                   return operands({dtype, {7, 33}});
                                 },
                                 {0}, cpu(), gpu(), {.once = true});
}

}  // namespace
}  // namespace tessera
