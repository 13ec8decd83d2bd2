#include <algorithm>

#include "core/format.h"
#include "core/fp8.h"
#include "ops/dequantize/dequantize.h"
#include "ops/scaled_rows.h"
#include "ops/storage.h"

namespace tessera {
namespace {

template <typename Element, typename T>
void dequantize_as(const Tensor& x, const Tensor& y) {
  const int64_t num_columns = x.shape[1];
  const int64_t each = columns_of_scale(x.scale, num_columns);
  const int64_t across = (num_columns + each - 1) / each;
  const auto* const scales = scales_of(x).as<float>();
  const auto* const from = x.as<Element>();
  auto* const to = y.as<T>();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < x.shape[0]; ++row) {
    for (int64_t part = 0; part < across; ++part) {
      const float scale = scales[row / x.scale.rows * across + part];
      const int64_t end = row * num_columns + std::min((part + 1) * each, num_columns);
      for (int64_t i = row * num_columns + part * each; i < end; ++i)
        to[i] = T(static_cast<float>(from[i]) * scale);
    }
  }
}

void dequantize(const Dequantize& /*op*/, const Args<Dequantize>& args) {
  const Tensor& x = args.in(Dequantize::kX);
  const Tensor& y = args.out(Dequantize::kY);
  if (x.num_elements() == 0) return;
  with_storage(y.dtype, [&](auto storage) {
    using T = decltype(storage);
    x.dtype == DType::kE4M3 ? dequantize_as<E4m3, T>(x, y) : dequantize_as<E5m2, T>(x, y);
  });
}

}  // namespace

void add_dequantize_cpu(KernelTable& table) {
  add_kernel<Dequantize>(table, dequantize, {.takes = takes_dequantized});
}

}  // namespace tessera
