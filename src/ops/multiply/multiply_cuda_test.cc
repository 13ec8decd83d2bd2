#include "ops/multiply/multiply.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class MultiplyCuda : public testing::GpuTest {};

testing::OperatorInputs operands(const ValueType& type) {
  return {{"a", "b"}, {type, type}};
}

TEST_F(MultiplyCuda, Shapes) {
  for (const Shape& shape : {Shape{0}, Shape{1}, Shape{4096}, Shape{7, 33}, Shape{300, 2, 40}}) {
    testing::check_operator_on_gpu(
        make_multiply(),
        [&](DType dtype) {
          return operands({dtype, shape});
        },
        {}, cpu(), gpu());
  }
}

TEST_F(MultiplyCuda, TinyShape) {
  testing::check_operator_on_gpu(make_multiply(),
                                 [](DType dtype) {
                                   return operands({dtype, {37, 72}});
                                 },
                                 {}, cpu(), gpu(), {.once = true});
}

TEST_F(MultiplyCuda, RaggedRows) {
  for (const int64_t extent : {0, 1, 77, 100}) {
    for (const int64_t width : {64, 5}) {
      testing::check_ragged_operator_on_gpu(
          make_multiply(),
          [&](DType dtype) {
            return operands(testing::ragged_rows(dtype, {100, width}));
          },
          {}, extent, cpu(), gpu());
    }
  }
}

}  // namespace
}  // namespace tessera
