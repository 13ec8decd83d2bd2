#include "ops/add/add.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class AddCuda : public testing::GpuTest {};

TEST_F(AddCuda, Shapes) {
  for (const Shape& shape : {Shape{0}, Shape{1}, Shape{4096}, Shape{7, 33}, Shape{300, 2, 40}}) {
    testing::check_operator_on_gpu(
        make_add(),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"a", "b"}, {{dtype, shape}, {dtype, shape}}};
        },
        {}, cpu(), gpu());
  }
}

TEST_F(AddCuda, TinyShape) {
  testing::check_operator_on_gpu(make_add(),
                                 [](DType dtype) -> testing::OperatorInputs {
                                   return {{"a", "b"}, {{dtype, {37, 72}}, {dtype, {37, 72}}}};
                                 },
                                 {}, cpu(), gpu(), {.once = true});
}

TEST_F(AddCuda, RaggedRows) {
  for (const int64_t extent : {0, 1, 77, 100}) {
    for (const int64_t width : {64, 5}) {
      testing::check_ragged_operator_on_gpu(
          make_add(),
          [&](DType dtype) -> testing::OperatorInputs {
            const ValueType type = testing::ragged_rows(dtype, {100, width});
            return {{"a", "b"}, {type, type}};
          },
          {}, extent, cpu(), gpu());
    }
  }
}

TEST_F(AddCuda, RefusesRaggednessInside) {
  ValueType type{DType::kF32, {4, 6, 8}, 1, 0};
  const std::vector<ValueType> types = {type, type};
  EXPECT_THROW(gpu().workspace_bytes(*make_add(), types), UserError);
}

}  // namespace
}  // namespace tessera
