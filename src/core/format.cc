#include "core/format.h"

#include "core/memory.h"

namespace tessera {
namespace {

int64_t ceil_div(int64_t count, int64_t by) {
  return (count + by - 1) / by;
}

/// The first dims of `shape`, its last one cut into parts of `columns`.
Shape parts_of_rows(const Shape& shape, int64_t columns) {
  Shape parts = shape;
  if (parts.rank() > 0) parts[parts.rank() - 1] = ceil_div(shape.last(), columns);
  return parts;
}

/// Shapes and types, without offsets.
std::vector<ScaleTensor> scale_tensors(const ScaleLayout& scale, const Shape& shape) {
  using Kind = ScaleLayout::Kind;
  switch (scale.kind) {
    case Kind::kNone:
      return {};
    case Kind::kTensor:
      return {{DType::kF32, {1}}};
    case Kind::kRow:
      return {{DType::kF32, {shape.num_rows()}}};
    case Kind::kBlock:
      return {{DType::kF32,
               {ceil_div(shape.num_rows(), scale.rows), ceil_div(shape.last(), scale.columns)}}};
    case Kind::kMx:
      return {{DType::kU8, parts_of_rows(shape, scale.columns)}};
    case Kind::kNv:
      return {{DType::kU8, parts_of_rows(shape, scale.columns)}, {DType::kF32, {1}}};
  }
  throw InternalError("unknown scale layout");
}

}  // namespace

ScaleLayout ScaleLayout::block(int32_t rows, int32_t columns) {
  ensure(rows >= 1 && columns >= 1, "blocks of {} x {} elements share no scale", rows, columns);
  return {Kind::kBlock, rows, columns};
}

std::string ScaleLayout::to_string() const {
  switch (kind) {
    case Kind::kNone:
      return "";
    case Kind::kTensor:
      return "tensor";
    case Kind::kRow:
      return "row";
    case Kind::kBlock:
      return fmt::format("block {}x{}", rows, columns);
    case Kind::kMx:
      return "mx";
    case Kind::kNv:
      return "nv";
  }
  throw InternalError("unknown scale layout");
}

std::string Format::name() const {
  std::string text(dtype_name(element));
  return scale.is_scaled() ? text + " " + scale.to_string() : text;
}

std::vector<ScaleTensor> Format::scales(const Shape& shape) const {
  std::vector<ScaleTensor> result = scale_tensors(scale, shape);
  int64_t offset = align_up(shape.num_elements() * dtype_size(element));
  for (ScaleTensor& scales : result) {
    scales.offset = offset;
    offset += align_up(scales.num_bytes());
  }
  return result;
}

int64_t Format::num_bytes(const Shape& shape) const {
  if (!scale.is_scaled()) return shape.num_elements() * dtype_size(element);
  const ScaleTensor last = scales(shape).back();
  return last.offset + last.num_bytes();
}

Tensor scales_of(const Tensor& tensor, size_t idx) {
  const std::vector<ScaleTensor> all = Format(tensor.dtype, tensor.scale).scales(tensor.shape);
  ensure(idx < all.size(), "a tensor of format {} has no scales number {}",
         Format(tensor.dtype, tensor.scale).name(), idx);
  auto* first = static_cast<std::byte*>(tensor.data);
  return {first + all[idx].offset, all[idx].dtype, all[idx].shape, tensor.device};
}

}  // namespace tessera
