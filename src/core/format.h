#pragma once

#include <string>
#include <vector>

#include "core/scale_layout.h"
#include "core/tensor.h"

namespace tessera {

/// The scales that a tensor of a format carries, all of one kind.
struct ScaleTensor {
  DType dtype = DType::kF32;  ///< U8 for E8M0 and E4M3
  Shape shape;
  int64_t offset = 0;  ///< bytes from the tensor's first element

  int64_t num_bytes() const { return shape.num_elements() * dtype_size(dtype); }
};

/// How values are stored: an element type and how elements share scales. A tensor of a scaled
/// format is its elements and behind them its scales, each part aligned like a value of its own
/// (align_up), so memory plans, copies and exchanges need to know no more than the bytes.
struct Format {
  DType element = DType::kF32;
  ScaleLayout scale = {};

  Format() = default;
  /// Elements without scales.
  Format(DType dtype) : element(dtype) {}
  Format(DType dtype, const ScaleLayout& layout) : element(dtype), scale(layout) {}

  /// "bf16", "u8 mx", "u8 block 128x128".
  std::string name() const;
  /// What a tensor of this shape carries beside its elements; none without scales.
  std::vector<ScaleTensor> scales(const Shape& shape) const;
  /// Bytes of a tensor of this shape, its scales included.
  int64_t num_bytes(const Shape& shape) const;
  bool operator==(const Format&) const = default;
};

/// The scales number `idx` of Format::scales as a tensor of their own. Throws InternalError where
/// there are none.
Tensor scales_of(const Tensor& tensor, size_t idx = 0);

}  // namespace tessera
