#include "checkpoint/parts.h"

#include "core/error.h"

namespace tessera {
namespace {

Rectangle rectangle_of(const Slice& slice, const IndexRange& rows) {
  if (slice.global.rank() == 1) return {Shape{rows.begin}, Shape{rows.count}};
  return {Shape{rows.begin, slice.columns.begin}, Shape{rows.count, slice.columns.count}};
}

}  // namespace

std::vector<TensorPart> parts_of(const NamedSlice& slice) {
  const Tensor& tensor = slice.tensor;
  ensure(tensor.shape == slice.slice.shape(), "'{}': {} of shape {}, its tensor has {}", slice.name,
         slice.slice.to_string(), slice.slice.shape().to_string(), tensor.shape.to_string());
  auto* data = static_cast<std::byte*>(tensor.data);
  std::vector<TensorPart> parts;
  for (const IndexRange& rows : slice.slice.rows) {
    const Rectangle rectangle = rectangle_of(slice.slice, rows);
    const Tensor view{data, tensor.dtype, rectangle.shape, tensor.device};
    // A tensor without data and elements stays without data.
    if (data != nullptr) data += view.num_bytes();
    if (view.num_elements() > 0) parts.push_back({rectangle, view});
  }
  return parts;
}

std::vector<GivenTensor> whole_tensors(std::span<const NamedTensor> tensors) {
  std::vector<GivenTensor> given;
  for (const auto& [name, tensor] : tensors) {
    given.push_back({name, tensor.dtype, tensor.shape, {{whole(tensor.shape), tensor}}});
  }
  return given;
}

std::vector<GivenTensor> sliced_tensors(std::span<const NamedSlice> slices) {
  std::vector<GivenTensor> given;
  for (const NamedSlice& slice : slices) {
    given.push_back({slice.name, slice.tensor.dtype, slice.slice.global, parts_of(slice)});
  }
  return given;
}

}  // namespace tessera
