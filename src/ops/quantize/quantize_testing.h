#pragma once

#include <cmath>
#include <vector>

#include "core/fp8.h"
#include "core/memory.h"
#include "ops/operator.h"
#include "ops/quantize/quantize.h"
#include "ops/quantize/quantize_blocks.h"
#include "ops/quantize/turn_blocks.h"

/// Tensors of FP8 with scales, for tests.
namespace tessera::testing {

/// A tensor of a format and its memory, which begins as bytes that stand for nothing.
struct ScaledTensor {
  explicit ScaledTensor(const ValueType& type)
      : buffer(type.num_bytes(), "a scaled tensor"),
        tensor(buffer.tensor(0, type.dtype, type.shape)) {
    std::fill_n(buffer.data(), type.num_bytes(), std::byte{0xff});
    tensor.scale = type.scale;
  }

  /// The bytes, without what fills up the elements'.
  std::vector<uint8_t> elements() const {
    const auto* const first = static_cast<const uint8_t*>(tensor.data);
    return {first, first + tensor.num_elements()};
  }
  std::vector<float> scales() const {
    const auto all = scales_of(tensor).span<float>();
    return {all.begin(), all.end()};
  }

  Buffer buffer;
  Tensor tensor;
};

inline ValueType type_of(const Tensor& tensor) {
  return {.dtype = tensor.dtype, .shape = tensor.shape, .scale = tensor.scale};
}

/// By the CPU's kernel.
inline ScaledTensor quantize(const Tensor& x, const QuantizeSpec& spec) {
  const Quantize op(spec);
  const std::vector<ValueType> inputs = {type_of(x)};
  ScaledTensor y(op.infer(inputs)[Quantize::kY]);
  KernelTable table;
  add_quantize_cpu(table);
  const std::vector<Tensor> outputs = {y.tensor};
  table.find(Quantize::kName)->second(op, {.inputs = std::span(&x, 1), .outputs = outputs});
  return y;
}

/// What QuantizeBlocks gives, by the CPU's kernel.
struct QuantizedBlocks {
  OwnedTensor elements;
  OwnedTensor scales;
};

inline QuantizedBlocks quantize_blocks(const Tensor& x) {
  const QuantizeBlocks op;
  QuantizedBlocks found{OwnedTensor(DType::kE4M3, x.shape),
                        OwnedTensor(DType::kF32, shape_of_block_scales(x.shape))};
  KernelTable table;
  add_quantize_blocks_cpu(table);
  const std::vector<Tensor> outputs = {found.elements, found.scales};
  table.find(QuantizeBlocks::kName)->second(op, {.inputs = std::span(&x, 1), .outputs = outputs});
  return found;
}

/// What TurnBlocks gives, likewise.
inline ScaledTensor turn_blocks(const Tensor& x, int64_t matrix_rows) {
  const TurnBlocks op(matrix_rows);
  const std::vector<ValueType> inputs = {type_of(x)};
  ScaledTensor y(op.infer(inputs)[TurnBlocks::kY]);
  KernelTable table;
  add_turn_blocks_cpu(table);
  const std::vector<Tensor> outputs = {y.tensor};
  table.find(TurnBlocks::kName)->second(op, {.inputs = std::span(&x, 1), .outputs = outputs});
  return y;
}

/// What the elements stand for.
inline std::vector<double> values_of(const ScaledTensor& scaled) {
  const Tensor& tensor = scaled.tensor;
  const bool by_row = tensor.scale.kind == ScaleLayout::Kind::kRow;
  const int64_t columns = tensor.shape[1];
  const int64_t across = by_row ? 1 : (columns + tensor.scale.columns - 1) / tensor.scale.columns;
  const std::vector<float> scales = scaled.scales();
  std::vector<double> values;
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    const int64_t row = i / columns;
    const int64_t at =
        by_row ? row : row / tensor.scale.rows * across + i % columns / tensor.scale.columns;
    const float element =
        tensor.dtype == DType::kE4M3 ? float{tensor.as<E4m3>()[i]} : float{tensor.as<E5m2>()[i]};
    values.push_back(static_cast<double>(element) * scales[at]);
  }
  return values;
}

}  // namespace tessera::testing
