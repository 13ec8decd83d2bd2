#include "core/tensor.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/format.h"

namespace tessera {

Shape::Shape(std::span<const int64_t> dims) : rank_(static_cast<int>(dims.size())) {
  ensure(dims.size() <= kMaxRank, "a tensor has at most {} dims, got {}", kMaxRank, dims.size());
  std::copy(dims.begin(), dims.end(), dims_.begin());
}

int64_t Shape::num_elements() const {
  const auto all = dims();
  return std::accumulate(all.begin(), all.end(), int64_t{1}, std::multiplies<>());
}

int64_t Shape::num_rows_before_last() const {
  const auto all = dims().first(rank_ - 1);
  return std::accumulate(all.begin(), all.end(), int64_t{1}, std::multiplies<>());
}

bool Shape::operator==(const Shape& other) const {
  return std::ranges::equal(dims(), other.dims());
}

std::string Shape::to_string() const {
  return fmt::format("[{}]", fmt::join(dims(), ", "));
}

int64_t Tensor::num_scaled_bytes() const {
  return Format(dtype, scale).num_bytes(shape);
}

}  // namespace tessera
