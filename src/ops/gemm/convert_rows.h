#pragma once

#include <cstdint>

#include "core/half.h"

namespace tessera {

/// Rows that begin `stride` elements apart.
template <typename T>
struct RowsAt {
  T* data = nullptr;
  int64_t stride = 0;
};

/// Copy [rows, cols] on all threads, rounding to nearest even.
void widen_rows(RowsAt<const Bf16> from, RowsAt<float> to, int64_t rows, int64_t cols);
void widen_rows(RowsAt<const Half> from, RowsAt<float> to, int64_t rows, int64_t cols);
void narrow_rows(RowsAt<const float> from, RowsAt<Bf16> to, int64_t rows, int64_t cols);

}  // namespace tessera
