#pragma once

#include <cstddef>

#include "core/fp8.h"
#include "ops/scaled_rows.h"
#include "ops/simd.h"

namespace tessera {
inline namespace TESSERA_CPU_LEVEL {

/// Neighbours in a row of E4M3, from a column on; null, as a pointer to values may be.
struct ScaledRow {
  const E4m3* codes = nullptr;    ///< the row
  const float* scales = nullptr;  ///< of it
  int64_t columns_of_scale = 1;
  int64_t column = 0;

  ScaledRow operator+(int64_t more) const {
    return {codes, scales, columns_of_scale, column + more};
  }
  bool operator==(std::nullptr_t /*null*/) const { return codes == nullptr; }
};

/// The rows of a tensor of FP8.
class ScaledRowsOf {
 public:
  /// REQUIRES E4M3 [R, C] with scales of its rows.
  explicit ScaledRowsOf(const Tensor& rows)
      : codes_(rows.as<E4m3>()),
        scales_(row_scales_of(rows).as<float>()),
        width_(rows.shape[1]),
        columns_of_scale_(tessera::columns_of_scale(rows.scale, width_)) {}

  ScaledRow operator[](int64_t row) const {
    const int64_t across = (width_ + columns_of_scale_ - 1) / columns_of_scale_;
    return {codes_ + row * width_, scales_ + row * across, columns_of_scale_, 0};
  }

 private:
  const E4m3* codes_;
  const float* scales_;
  int64_t width_;
  int64_t columns_of_scale_;
};

/// Those of values.
template <typename T>
class ValueRowsOf {
 public:
  explicit ValueRowsOf(const Tensor& rows) : values_(rows.as<T>()), width_(rows.shape[1]) {}
  const T* operator[](int64_t row) const { return values_ + row * width_; }

 private:
  const T* values_;
  int64_t width_;
};

inline simd::Vec load(const ScaledRow& from, simd::Part part) {
  simd::Vec x{};
  int64_t scale = from.column / from.columns_of_scale;
  int64_t next = (scale + 1) * from.columns_of_scale;
  for (int64_t i = 0; i < part.count; ++i) {
    if (from.column + i == next) {
      ++scale;
      next += from.columns_of_scale;
    }
    x[i] = static_cast<float>(from.codes[from.column + i]) * from.scales[scale];
  }
  return x;
}
/// Codes take a quarter of the memory, and longer to convert.
inline void prefetch(const ScaledRow& /*from*/) {}
inline simd::Vec load(const ScaledRow& from, simd::Whole /*whole*/) {
  return load(from, simd::Part{simd::kLanes});
}

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera
