#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "ops/simd.h"

namespace tessera {

/// Lanes past the end of a row are set to `fill`.
inline simd::Vec fill_rest(simd::Vec x, simd::Whole /*whole*/, float /*fill*/) {
  return x;
}
inline simd::Vec fill_rest(simd::Vec x, simd::Part part, float fill) {
  for (int64_t i = part.count; i < simd::kLanes; ++i) x[i] = fill;
  return x;
}

/// The maximum of a row; NaN elements may be passed over.
inline float row_max(const float* row, int64_t n) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  constexpr int kAtOnce = 4;  // so that vectors do not wait for one another
  simd::Vec best[kAtOnce];
  std::ranges::fill(best, simd::broadcast(kLowest));
  int64_t first = 0;
  for (; first + kAtOnce * simd::kLanes <= n; first += kAtOnce * simd::kLanes) {
    for (int j = 0; j < kAtOnce; ++j)
      best[j] = simd::max(best[j], simd::load(row + first + j * simd::kLanes));
  }
  simd::for_each_vector(n - first, [&](int64_t i, auto lanes) {
    best[0] = simd::max(best[0], fill_rest(simd::load(row + first + i, lanes), lanes, kLowest));
  });
  return simd::max(simd::max(simd::max(best[0], best[1]), simd::max(best[2], best[3])));
}

/// row = exp(row - maximum); returns the sum. NaN elements make the sum NaN.
inline float exponentiate(float* row, int64_t n, float maximum) {
  simd::Vec total{};
  simd::for_each_vector(n, [&](int64_t i, auto lanes) {
    const simd::Vec e = simd::exp(simd::load(row + i, lanes) - maximum);
    simd::store(row + i, e, lanes);
    total += fill_rest(e, lanes, 0.0F);
  });
  return simd::sum(total);
}

/// to = map(from), element by element; `to` may be `from`.
template <typename To, typename Map>
void map_row(To* to, const float* from, int64_t n, const Map& map) {
  simd::for_each_vector(n, [&](int64_t i, auto lanes) {
    simd::store(to + i, map(simd::load(from + i, lanes)), lanes);
  });
}

}  // namespace tessera
