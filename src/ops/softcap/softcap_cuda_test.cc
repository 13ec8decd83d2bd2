#include "ops/softcap/softcap.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class SoftcapCuda : public testing::GpuTest {};

testing::OperatorInputs operands(const ValueType& type) {
  return {{"x"}, {type}};
}

TEST_F(SoftcapCuda, Shapes) {
  for (const Shape& shape : {Shape{0}, Shape{1}, Shape{4096}, Shape{7, 33}, Shape{300, 2, 40}}) {
    testing::check_operator_on_gpu(
        make_softcap(3.0),
        [&](DType dtype) {
          return operands({dtype, shape});
        },
        {}, cpu(), gpu());
  }
}

TEST_F(SoftcapCuda, RaggedRows) {
  for (const int64_t extent : {0, 1, 77, 100}) {
    for (const int64_t width : {64, 5}) {
      testing::check_ragged_operator_on_gpu(
          make_softcap(3.0),
          [&](DType dtype) {
            return operands(testing::ragged_rows(dtype, {100, width}));
          },
          {}, extent, cpu(), gpu());
    }
  }
}

TEST_F(SoftcapCuda, TinyRows) {
  testing::check_operator_on_gpu(make_softcap(3.0),
                                 [](DType dtype) {
                                   return operands({dtype, {7, 33}});
                                 },
                                 {}, cpu(), gpu(), {.once = true});
}

}  // namespace
}  // namespace tessera
