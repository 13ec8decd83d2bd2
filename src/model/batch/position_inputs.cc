#include "model/batch/position_inputs.h"

#include <algorithm>
#include <cmath>

namespace tessera {

void fill_chunk_bounds(std::span<const int32_t> cu_seqlens, int64_t chunk,
                       std::span<int32_t> bounds) {
  size_t count = 0;
  const auto add = [&](int64_t bound) {
    ensure(count < bounds.size(), "more chunks of {} tokens than the {} expected", chunk,
           bounds.size() - 1);
    bounds[count++] = static_cast<int32_t>(bound);
  };
  add(cu_seqlens.front());
  for (size_t sequence = 1; sequence < cu_seqlens.size(); ++sequence) {
    const int64_t end = cu_seqlens[sequence];
    for (int64_t begin = cu_seqlens[sequence - 1]; begin < end; begin += chunk)
      add(std::min(begin + chunk, end));
  }
  std::fill(bounds.begin() + static_cast<std::ptrdiff_t>(count), bounds.end(), bounds[count - 1]);
}

float Temperatures::at(int32_t position) const {
  const float lengths =
      std::floor((static_cast<float>(position) + 1.0F) / static_cast<float>(length));
  return std::log1p(lengths) * static_cast<float>(scale) + 1.0F;
}

}  // namespace tessera
