#pragma once

#include <span>
#include <string>
#include <vector>

#include "checkpoint/format/rectangle.h"
#include "core/slice.h"
#include "core/tensor.h"

namespace tessera {

/// Some elements of a global tensor, dense in memory: `tensor` has rectangle.shape.
struct TensorPart {
  Rectangle rectangle;
  Tensor tensor;
};

/// A slice's ranges of rows, one part each: views, since the local rows of a range lie together.
/// Throws InternalError where the tensor has not the slice's shape.
std::vector<TensorPart> parts_of(const NamedSlice& slice);

/// What one rank gives of a global tensor, perhaps nothing.
struct GivenTensor {
  std::string name;
  DType dtype = DType::kF32;
  Shape global;
  std::vector<TensorPart> parts;
};

std::vector<GivenTensor> whole_tensors(std::span<const NamedTensor> tensors);
std::vector<GivenTensor> sliced_tensors(std::span<const NamedSlice> slices);

}  // namespace tessera
