#include <algorithm>
#include <cmath>

#include "core/fp8.h"
#include "ops/quantize/quantize.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// The elements of one scale: rows [first_row, end_row) and columns [first, end) of a matrix.
struct ScaledPart {
  int64_t first_row = 0;
  int64_t end_row = 0;
  int64_t first = 0;
  int64_t end = 0;
  int64_t stride = 0;
};

template <typename T>
float largest_magnitude(const T* x, const ScaledPart& part) {
  float amax = Quantize::kSmallestAmax;
  for (int64_t row = part.first_row; row < part.end_row; ++row) {
    for (int64_t i = part.first; i < part.end; ++i)
      amax = std::fmax(amax, std::fabs(static_cast<float>(x[row * part.stride + i])));
  }
  return amax;
}

template <typename T, typename Element>
float quantize_part(const T* x, const ScaledPart& part, float largest, Element* y) {
  const float amax = largest_magnitude(x, part);
  const float factor = largest / amax;
  for (int64_t row = part.first_row; row < part.end_row; ++row) {
    for (int64_t i = row * part.stride + part.first; i < row * part.stride + part.end; ++i)
      y[i] = Element(static_cast<float>(x[i]) * factor);
  }
  return amax / largest;
}

template <typename T, typename Element>
void quantize_as(const Quantize& op, const Tensor& x, const Tensor& y) {
  const int64_t num_rows = x.shape[0];
  const int64_t num_columns = x.shape[1];
  if (num_rows == 0 || num_columns == 0) return;
  const int64_t rows = op.block_rows();
  const int64_t columns = op.block_columns(num_columns);
  const int64_t across = (num_columns + columns - 1) / columns;
  const int64_t num_parts = (num_rows + rows - 1) / rows * across;
  auto* const scales = scales_of(y).as<float>();
  const float largest = largest_of(op.spec().element);
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < num_parts; ++i) {
    const int64_t row = i / across * rows;
    const int64_t column = i % across * columns;
    scales[i] = quantize_part(x.as<T>(),
                              {.first_row = row,
                               .end_row = std::min(row + rows, num_rows),
                               .first = column,
                               .end = std::min(column + columns, num_columns),
                               .stride = num_columns},
                              largest, y.as<Element>());
  }
}

void quantize(const Quantize& op, const Args<Quantize>& args) {
  const Tensor& x = args.in(Quantize::kX);
  const Tensor& y = args.out(Quantize::kY);
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    op.spec().element == DType::kE4M3 ? quantize_as<T, E4m3>(op, x, y)
                                      : quantize_as<T, E5m2>(op, x, y);
  });
}

}  // namespace

void add_quantize_cpu(KernelTable& table) {
  add_kernel<Quantize>(table, quantize, {.takes = takes_fp8});
}

}  // namespace tessera
