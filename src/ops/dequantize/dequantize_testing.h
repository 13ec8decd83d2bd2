#pragma once

#include <vector>

#include "ops/dequantize/dequantize.h"
#include "ops/quantize/quantize_testing.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {

/// Those of rows that Dequantize takes.
inline std::vector<QuantizeSpec> row_specs() {
  std::vector<QuantizeSpec> specs;
  for (const DType element : {DType::kE4M3, DType::kE5M2}) {
    for (const ScaleLayout& scale :
         {ScaleLayout::row(), ScaleLayout::block(1, 128), ScaleLayout::block(1, 5)})
      specs.push_back({.element = element, .scale = scale});
  }
  return specs;
}

/// All.
inline std::vector<QuantizeSpec> dequantized_specs() {
  std::vector<QuantizeSpec> specs = row_specs();
  for (const ScaleLayout& scale : {ScaleLayout::block(128, 128), ScaleLayout::block(3, 5)})
    specs.push_back({.scale = scale});
  return specs;
}

/// By the CPU's kernel.
inline OwnedTensor dequantize(const Tensor& x, DType dtype) {
  const Dequantize op(dtype);
  OwnedTensor y(dtype, x.shape);
  KernelTable table;
  add_dequantize_cpu(table);
  const std::vector<Tensor> outputs = {y.get()};
  table.find(Dequantize::kName)->second(op, {.inputs = std::span(&x, 1), .outputs = outputs});
  return y;
}

}  // namespace tessera::testing
