#include "ops/sigmoid_gate/sigmoid_gate.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class SigmoidGateCuda : public testing::GpuTest {};

TEST_F(SigmoidGateCuda, Shapes) {
  // The logit's gradient is a sum that may nearly vanish, hence the tolerance.
  for (const int64_t rows : {0, 1, 100}) {
    for (const int64_t width : {1, 33, 2056}) {
      SCOPED_TRACE(fmt::format("{} x {}", rows, width));
      testing::check_operator_on_gpu(
          make_sigmoid_gate(),
          [&](DType dtype) -> testing::OperatorInputs {
            return {{"x_y", "x_logit"}, {{dtype, {rows, width}}, {dtype, {rows, 1}}}};
          },
          {0}, cpu(), gpu(), {.tolerance_f32 = 1e-4});
    }
  }
}

TEST_F(SigmoidGateCuda, GatesElements) {
  for (const int64_t rows : {0, 1, 100}) {
    for (const int64_t width : {2, 33, 264}) {
      SCOPED_TRACE(fmt::format("{} x {}", rows, width));
      testing::check_operator_on_gpu(
          make_sigmoid_gate(),
          [&](DType dtype) -> testing::OperatorInputs {
            return {{"x_y", "x_logit"}, {{dtype, {rows, width}}, {dtype, {rows, width}}}};
          },
          {0}, cpu(), gpu(), {.tolerance_f32 = 1e-4});
    }
  }
}

TEST_F(SigmoidGateCuda, GatesHeads) {
  for (const GateFunction function : {GateFunction::kSigmoid, GateFunction::kSoftplus}) {
    for (const int64_t rows : {0, 1, 100}) {
      for (const auto& [heads, size] :
           {std::pair<int64_t, int64_t>{4, 16}, {3, 5}, {6, 1}, {1, 40}, {2, 128}}) {
        SCOPED_TRACE(fmt::format("{} x {} x {}", rows, heads, size));
        testing::check_operator_on_gpu(
            make_sigmoid_gate({.function = function, .of_heads = true}),
            [&](DType dtype) -> testing::OperatorInputs {
              return {{"x_y", "x_logit"}, {{dtype, {rows, heads * size}}, {dtype, {rows, heads}}}};
            },
            {0}, cpu(), gpu(), {.tolerance_f32 = 1e-4});
      }
    }
  }
}

TEST_F(SigmoidGateCuda, TinyShapeOfHeads) {
  testing::check_operator_on_gpu(
      make_sigmoid_gate({.function = GateFunction::kSoftplus, .of_heads = true}),
      [](DType dtype) -> testing::OperatorInputs {
        return {{"x_y", "x_logit"}, {{dtype, {11, 264}}, {dtype, {11, 3}}}};
      },
      {0}, cpu(), gpu(), {.tolerance_f32 = 1e-4, .once = true});
}

TEST_F(SigmoidGateCuda, TinyShape) {
  testing::check_operator_on_gpu(
      make_sigmoid_gate(),
      [](DType dtype) -> testing::OperatorInputs {
        return {{"x_y", "x_logit"}, {{dtype, {11, 264}}, {dtype, {11, 1}}}};
      },
      {0}, cpu(), gpu(), {.tolerance_f32 = 1e-4, .once = true});
}

TEST_F(SigmoidGateCuda, TinyShapeOfElements) {
  testing::check_operator_on_gpu(
      make_sigmoid_gate(),
      [](DType dtype) -> testing::OperatorInputs {
        return {{"x_y", "x_logit"}, {{dtype, {11, 264}}, {dtype, {11, 264}}}};
      },
      {0}, cpu(), gpu(), {.tolerance_f32 = 1e-4, .once = true});
}

TEST_F(SigmoidGateCuda, RaggedRowsOfElements) {
  for (const int64_t extent : {0, 1, 37}) {
    testing::check_ragged_operator_on_gpu(
        make_sigmoid_gate(),
        [&](DType dtype) -> testing::OperatorInputs {
          const ValueType rows = testing::ragged_rows(dtype, {40, 96});
          return {{"x_y", "x_logit"}, {rows, rows}};
        },
        {0}, extent, cpu(), gpu());
  }
}

TEST_F(SigmoidGateCuda, FactorsOfRows) {
  const OperatorPtr op = make_sigmoid_gate({.function = GateFunction::kIdentity});
  for (const auto& [rows, width] :
       {std::pair<int64_t, int64_t>{0, 5}, {1, 1}, {9, 33}, {70, 264}, {300, 2048}}) {
    testing::check_operator_on_gpu(
        op,
        [rows = rows, width = width](DType dtype) -> testing::OperatorInputs {
          return {{"x_y", "x_logit"}, {{dtype, {rows, width}}, {DType::kF32, {rows}}}};
        },
        {0}, cpu(), gpu(), {.tolerance_f32 = 1e-4});
  }
  for (const int64_t extent : {0, 1, 37}) {
    testing::check_ragged_operator_on_gpu(
        op,
        [](DType dtype) -> testing::OperatorInputs {
          return {{"x_y", "x_logit"},
                  {testing::ragged_rows(dtype, {40, 96}), testing::ragged_rows(DType::kF32, {40})}};
        },
        {0}, extent, cpu(), gpu());
  }
}

TEST_F(SigmoidGateCuda, RaggedRows) {
  for (const int64_t extent : {0, 1, 37}) {
    testing::check_ragged_operator_on_gpu(
        make_sigmoid_gate(),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"x_y", "x_logit"},
                  {testing::ragged_rows(dtype, {40, 96}), testing::ragged_rows(dtype, {40, 1})}};
        },
        {0}, extent, cpu(), gpu());
  }
}

}  // namespace
}  // namespace tessera
