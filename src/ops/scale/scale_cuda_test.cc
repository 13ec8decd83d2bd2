#include "ops/scale/scale.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class ScaleCuda : public testing::GpuTest {};

testing::OperatorInputs scale_inputs(const ValueType& type, bool addend) {
  if (!addend) return {{"x"}, {type}};
  return {{"x", "addend"}, {type, type}};
}

TEST_F(ScaleCuda, Shapes) {
  for (const bool addend : {false, true}) {
    for (const Shape& shape : {Shape{0}, Shape{1}, Shape{4096}, Shape{7, 33}, Shape{300, 2, 40}}) {
      testing::check_operator_on_gpu(
          std::make_shared<Scale>(0.22, addend),
          [&](DType dtype) {
            return scale_inputs({dtype, shape}, addend);
          },
          {}, cpu(), gpu());
    }
  }
}

TEST_F(ScaleCuda, TinyShape) {
  testing::check_operator_on_gpu(std::make_shared<Scale>(12.0, true),
                                 [](DType dtype) {
                                   return scale_inputs({dtype, {37, 72}}, true);
                                 },
                                 {}, cpu(), gpu(), {.once = true});
}

TEST_F(ScaleCuda, RaggedRows) {
  for (const int64_t extent : {0, 1, 77, 100}) {
    for (const int64_t width : {64, 5}) {
      testing::check_ragged_operator_on_gpu(
          std::make_shared<Scale>(-1.5, true),
          [&](DType dtype) {
            return scale_inputs(testing::ragged_rows(dtype, {100, width}), true);
          },
          {}, extent, cpu(), gpu());
    }
  }
}

TEST_F(ScaleCuda, RefusesRaggednessInside) {
  const std::vector<ValueType> types = {{DType::kF32, {4, 6, 8}, 1, 0}};
  EXPECT_THROW(gpu().workspace_bytes(*make_scale(2), types), UserError);
}

}  // namespace
}  // namespace tessera
