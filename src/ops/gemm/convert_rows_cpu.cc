#include "ops/gemm/convert_rows.h"

#include "ops/cpu_dispatch.h"
#include "ops/half_rows.h"
#include "ops/simd.h"

namespace tessera {
namespace {

template <typename From, typename To>
void convert_rows(RowsAt<From> from, RowsAt<To> to, int64_t rows, int64_t cols) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    simd::convert(to.data + row * to.stride, from.data + row * from.stride, cols);
  }
}

}  // namespace

TESSERA_LEVELED(void, widen_rows,
                (RowsAt<const Bf16> from, RowsAt<float> to, int64_t rows, int64_t cols),
                (from, to, rows, cols)) {
  convert_rows(from, to, rows, cols);
}

TESSERA_LEVELED(void, widen_rows,
                (RowsAt<const Half> from, RowsAt<float> to, int64_t rows, int64_t cols),
                (from, to, rows, cols)) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row)
    to_floats(from.data + row * from.stride, to.data + row * to.stride, cols);
}

TESSERA_LEVELED(void, narrow_rows,
                (RowsAt<const float> from, RowsAt<Bf16> to, int64_t rows, int64_t cols),
                (from, to, rows, cols)) {
  convert_rows(from, to, rows, cols);
}

}  // namespace tessera
