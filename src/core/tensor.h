#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "core/dtype.h"
#include "core/error.h"
#include "core/scale_layout.h"

namespace tessera {

/// Extents of a tensor, outermost first; at most kMaxRank of them.
class Shape {
 public:
  static constexpr int kMaxRank = 5;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}
  explicit Shape(std::span<const int64_t> dims);

  int rank() const { return rank_; }
  int64_t operator[](int dim) const { return dims_[dim]; }
  int64_t& operator[](int dim) { return dims_[dim]; }
  /// The product of the extents; 1 for rank 0.
  int64_t num_elements() const;
  /// The product of all extents but the last: the rows when the last dim is seen as a row. 1 for
  /// rank 0.
  int64_t num_rows() const { return rank_ == 0 ? 1 : num_rows_before_last(); }
  int64_t last() const { return rank_ == 0 ? 1 : dims_[rank_ - 1]; }
  std::span<const int64_t> dims() const { return std::span(dims_).first(rank_); }
  bool operator==(const Shape& other) const;
  /// "[2, 3]".
  std::string to_string() const;

 private:
  int64_t num_rows_before_last() const;

  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

class Device;

/// A view of dense row-major elements; it owns nothing. A view whose data is null stands for "not
/// wanted".
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;
  Device* device = nullptr;  ///< whose memory it is, where the host does not reach it; else null
  ScaleLayout scale = {};    ///< of its format (core/format.h)

  explicit operator bool() const { return data != nullptr; }
  int64_t num_elements() const { return shape.num_elements(); }
  /// Scales included.
  int64_t num_bytes() const {
    return scale.is_scaled() ? num_scaled_bytes() : num_elements() * dtype_size(dtype);
  }

  /// The elements as T. Throws InternalError when T is not the element type.
  template <typename T>
  T* as() const {
    ensure(DTypeOf<T>::value == dtype, "tensor of type {} read as {}", dtype_name(dtype),
           dtype_name(DTypeOf<T>::value));
    return static_cast<T*>(data);
  }
  template <typename T>
  std::span<T> span() const {
    return {as<T>(), static_cast<size_t>(num_elements())};
  }

 private:
  int64_t num_scaled_bytes() const;
};

/// A tensor under the name by which checkpoints and optimizers know it.
struct NamedTensor {
  std::string name;
  Tensor tensor;
};

/// A view of a vector's elements, for tests and small host data.
template <typename T>
Tensor view(std::span<T> elements, const Shape& shape) {
  ensure(shape.num_elements() == static_cast<int64_t>(elements.size()),
         "view: {} elements for shape {}", elements.size(), shape.to_string());
  return {elements.data(), DTypeOf<T>::value, shape};
}

}  // namespace tessera
