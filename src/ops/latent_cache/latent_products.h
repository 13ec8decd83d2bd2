#pragma once

#include <cstdint>

#include "ops/gemm/gemm.h"
#include "ops/latent_cache/latent_cache.h"

namespace tessera {

/// The first head's product, and how far those of the next are from it, in elements.
struct LatentProducts {
  Gemm first;
  int64_t a_stride = 0;
  int64_t b_stride = 0;
  int64_t c_stride = 0;

  Gemm of_head(int64_t head) const {
    const int64_t size = dtype_size(first.input_type);
    Gemm product = first;
    product.a = static_cast<const std::byte*>(first.a) + head * a_stride * size;
    product.b = static_cast<const std::byte*>(first.b) + head * b_stride * size;
    product.c = static_cast<std::byte*>(first.c) + head * c_stride * size;
    return product;
  }
};

/// W_kᵀ q of each head.
inline LatentProducts query_products(const LatentCacheSpec& s, const Tensor& q, const Tensor& up,
                                     const Tensor& queries) {
  return {.first = {.m = q.shape[0],
                    .n = s.rank,
                    .k = s.nope_size,
                    .a = q.data,
                    .lda = q.shape[1],
                    .b = up.data,
                    .ldb = s.rank,
                    .c = queries.data,
                    .ldc = queries.shape[1],
                    .input_type = q.dtype,
                    .output_type = q.dtype},
          .a_stride = s.nope_size + s.rope_size,
          .b_stride = (s.nope_size + s.value_size) * s.rank,
          .c_stride = s.rank + s.rope_size};
}

/// W_v times what each head attended to.
inline LatentProducts output_products(const LatentCacheSpec& s, const Tensor& attended,
                                      const Tensor& up, const Tensor& o) {
  const int64_t size = dtype_size(attended.dtype);
  return {.first = {.transpose_b = true,
                    .m = attended.shape[0],
                    .n = s.value_size,
                    .k = s.rank,
                    .a = attended.data,
                    .lda = attended.shape[1],
                    .b = static_cast<const std::byte*>(up.data) + s.nope_size * s.rank * size,
                    .ldb = s.rank,
                    .c = o.data,
                    .ldc = o.shape[1],
                    .input_type = attended.dtype,
                    .output_type = attended.dtype},
          .a_stride = s.rank,
          .b_stride = (s.nope_size + s.value_size) * s.rank,
          .c_stride = s.value_size};
}

/// Columns of rows: where the first is, and how far it is to the next, in bytes.
struct ColumnRows {
  std::byte* first = nullptr;
  int64_t pitch = 0;

  /// Of each row of a tensor [rows, columns], `parts` equal parts, from an element on.
  static ColumnRows of(const Tensor& tensor, int64_t element, int64_t parts) {
    const int64_t size = dtype_size(tensor.dtype);
    return {static_cast<std::byte*>(tensor.data) + element * size, tensor.shape[1] / parts * size};
  }
};

}  // namespace tessera
