#pragma once

#include <cstdint>

#include "ops/cpu_dispatch.h"
#include "ops/simd.h"

namespace tessera {
inline namespace TESSERA_CPU_LEVEL {

/// A matrix whose element (i, p) is data[i · row + p · col].
struct SmallMatrix {
  const float* data;
  int64_t row;
  int64_t col;
};

/// Rows i to i + kRows of c [.., n] += a [.., p] · b [p, n], b and c dense.
template <int kRows>
inline void add_product_rows(float* c, const SmallMatrix& a, const float* b, int64_t n, int64_t p) {
  simd::for_each_vector(n, [&](int64_t j, auto lanes) {
    simd::Vec sums[kRows];
    for (int r = 0; r < kRows; ++r) sums[r] = simd::load(c + r * n + j, lanes);
    for (int64_t k = 0; k < p; ++k) {
      const simd::Vec row = simd::load(b + k * n + j, lanes);
      for (int r = 0; r < kRows; ++r) sums[r] += a.data[r * a.row + k * a.col] * row;
    }
    for (int r = 0; r < kRows; ++r) simd::store(c + r * n + j, sums[r], lanes);
  });
}

/// c [m, n] += a [m, p] · b [p, n], b and c dense: for matrices that caches hold.
inline void add_small_product(float* c, SmallMatrix a, const float* b, int64_t m, int64_t n,
                              int64_t p) {
  int64_t i = 0;
  for (; i + 8 <= m; i += 8, a.data += 8 * a.row) add_product_rows<8>(c + i * n, a, b, n, p);
  for (; i < m; ++i, a.data += a.row) add_product_rows<1>(c + i * n, a, b, n, p);
}

/// to [cols, rows] is from [rows, cols] turned.
inline void turn_matrix(float* to, const float* from, int64_t rows, int64_t cols) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) to[j * rows + i] = from[i * cols + j];
  }
}

inline float dot_rows(const float* a, const float* b, int64_t n) {
  simd::Vec sum{};
  simd::for_each_vector(n, [&](int64_t i, auto lanes) {
    sum += simd::load(a + i, lanes) * simd::load(b + i, lanes);
  });
  return simd::sum(sum);
}

/// to += factor · from.
inline void add_scaled_row(float* to, float factor, const float* from, int64_t n) {
  simd::for_each_vector(n, [&](int64_t i, auto lanes) {
    simd::store(to + i, simd::load(to + i, lanes) + factor * simd::load(from + i, lanes), lanes);
  });
}

inline void scale_small_row(float* to, float factor, const float* from, int64_t n) {
  simd::for_each_vector(n, [&](int64_t i, auto lanes) {
    simd::store(to + i, factor * simd::load(from + i, lanes), lanes);
  });
}

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera
