#pragma once

#include <vector>

#include "core/random.h"
#include "ops/collective/collective.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {

inline KernelTable collective_kernels() {
  KernelTable kernels;
  add_collective_cpu(kernels);
  return kernels;
}

/// Integers from -4 to 4 that any rank can make for any other.
inline std::vector<float> integers_of(int64_t rank, int64_t count, uint64_t seed) {
  Random random(seed, static_cast<uint64_t>(rank));
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i)
    values.push_back(static_cast<float>(random.next_below(9)) - 4.0F);
  return values;
}

inline OwnedTensor make_tensor(DType dtype, const Shape& shape, const std::vector<float>& values) {
  if (dtype == DType::kI32)
    return tensor_of_i32(shape, std::vector<int32_t>(values.begin(), values.end()));
  if (dtype == DType::kI64)
    return tensor_of_i64(shape, std::vector<int64_t>(values.begin(), values.end()));
  return tensor_of(shape, values, dtype);
}

/// Rows [begin, begin + count) of a matrix.
inline std::vector<float> rows_of(const std::vector<float>& matrix, int64_t width, int64_t begin,
                                  int64_t count) {
  const auto first = matrix.begin() + begin * width;
  return {first, first + count * width};
}

inline void append(std::vector<float>& to, const std::vector<float>& rows) {
  to.insert(to.end(), rows.begin(), rows.end());
}

inline void add_to(std::vector<float>& to, const std::vector<float>& rows) {
  for (size_t i = 0; i < to.size(); ++i) to[i] += rows[i];
}

/// One row of `width` elements, or a number where width is 0.
inline Shape shape_of_rows(int64_t rows, int64_t width) {
  return width == 0 ? Shape{rows} : Shape{rows, width};
}

}  // namespace tessera::testing
