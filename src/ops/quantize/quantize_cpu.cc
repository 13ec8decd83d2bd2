#include <algorithm>
#include <cmath>

#include "core/fp8.h"
#include "core/half.h"
#include "ops/half_rows.h"
#include "ops/quantize/quantize.h"
#include "ops/round_values/round_math.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// The elements of one scale: a part of y, which lies along rows, and where they come from.
struct ScaledPart {
  int64_t num_rows = 0;
  int64_t num_columns = 0;
  int64_t from = 0;  ///< the first one in x
  int64_t from_row = 0;
  int64_t from_column = 1;
  int64_t to = 0;  ///< and in y
  int64_t to_row = 0;
};

template <typename T>
float largest_magnitude(const T* x, const ScaledPart& part) {
  float amax = 0;
  for (int64_t row = 0; row < part.num_rows; ++row) {
    const T* const first = x + part.from + row * part.from_row;
    for (int64_t i = 0; i < part.num_columns; ++i)
      amax = std::fmax(amax, std::fabs(static_cast<float>(first[i * part.from_column])));
  }
  return amax;
}

template <typename T, typename Element>
float quantize_part(const T* x, const ScaledPart& part, Element* y) {
  const float scale =
      scale_of_block<Element>(largest_magnitude(x, part), /*unit=*/1, /*nested=*/false);
  const float factor = 1 / scale;
  for (int64_t row = 0; row < part.num_rows; ++row) {
    const T* const from = x + part.from + row * part.from_row;
    Element* const to = y + part.to + row * part.to_row;
    for (int64_t i = 0; i < part.num_columns; ++i)
      to[i] = Element(static_cast<float>(from[i * part.from_column]) * factor);
  }
  return scale;
}

/// Where the block of y that begins at `row` and `column` comes from.
ScaledPart find_part(const Quantize& op, const Tensor& x, const Shape& y, int64_t row,
                     int64_t column) {
  const int64_t x_columns = x.shape[1];
  ScaledPart part{.num_rows = std::min(op.block_rows(), y[0] - row),
                  .num_columns = std::min(op.block_columns(y[1]), y[1] - column),
                  .to = row * y[1] + column,
                  .to_row = y[1]};
  if (op.is_turned()) {
    const int64_t matrix = row / x_columns;
    part.from = (matrix * op.spec().turned_rows + column) * x_columns + row % x_columns;
    part.from_row = 1;
    part.from_column = x_columns;
  } else {
    part.from = part.to;
    part.from_row = x_columns;
  }
  return part;
}

template <typename T, typename Element>
void quantize_as(const Quantize& op, const Tensor& x, const Tensor& y) {
  if (y.num_elements() == 0) return;
  const int64_t rows = op.block_rows();
  const int64_t columns = op.block_columns(y.shape[1]);
  const int64_t across = (y.shape[1] + columns - 1) / columns;
  const int64_t num_parts = (y.shape[0] + rows - 1) / rows * across;
  auto* const scales = scales_of(y).as<float>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < num_parts; ++i) {
    const ScaledPart part = find_part(op, x, y.shape, i / across * rows, i % across * columns);
    scales[i] = quantize_part(x.as<T>(), part, y.as<Element>());
  }
}

void round_to_half(const Tensor& x, const Tensor& y) {
  constexpr int64_t kChunk = 4096;
  auto* const to = y.as<Half>();
  const int64_t count = y.num_elements();
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < count; first += kChunk) {
    const int64_t end = std::min(first + kChunk, count);
    if (x.dtype == DType::kF32) {
      to_halves(x.as<float>() + first, to + first, end - first);
    } else {
      for (int64_t i = first; i < end; ++i) to[i] = Half(static_cast<float>(x.as<Bf16>()[i]));
    }
  }
}

void quantize(const Quantize& op, const Args<Quantize>& args) {
  quantize_on_host(op, args.in(Quantize::kX), args.out(Quantize::kY));
}

}  // namespace

void quantize_on_host(const Quantize& op, const Tensor& x, const Tensor& y) {
  if (y.dtype == DType::kF16) return round_to_half(x, y);
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    op.spec().element == DType::kE4M3 ? quantize_as<T, E4m3>(op, x, y)
                                      : quantize_as<T, E5m2>(op, x, y);
  });
}

void add_quantize_cpu(KernelTable& table) {
  add_kernel<Quantize>(table, quantize, {.takes = takes_fp8});
}

}  // namespace tessera
