#pragma once

#include <cstddef>
#include <cstdint>

#include "core/tensor.h"
#include "ops/gemm/gemm.h"

/// The products of a block-diagonal layer (BlockLinear) with a weight [G·R, C], or of a shared one
/// [R, C]: then the blocks of all rows are the rows of one product.
namespace tessera {

/// Rows [T, G·C] as [T·G, C], as which they lie in memory too.
inline Tensor blocks_as_rows(const Tensor& rows, int64_t num_blocks) {
  Tensor view = rows;
  view.shape = {rows.shape[0] * num_blocks, rows.shape[1] / num_blocks};
  return view;
}

/// An operator's blocks as products take them.
template <typename Op>
class Blocks {
 public:
  explicit Blocks(const Op& op) : count_(op.num_blocks()), shared_(op.shared()) {}
  int64_t count() const { return shared_ ? 1 : count_; }
  Tensor of(const Tensor& rows) const { return shared_ ? blocks_as_rows(rows, count_) : rows; }

 private:
  int64_t count_;
  bool shared_;
};

/// The first block's product, and how far those of the next are from it, in elements.
struct BlockProducts {
  Gemm first;
  int64_t count = 1;
  int64_t a_stride = 0;
  int64_t b_stride = 0;
  int64_t c_stride = 0;

  Gemm of_block(int64_t block) const {
    Gemm product = first;
    const int64_t in = dtype_size(first.input_type);
    product.a = static_cast<const std::byte*>(first.a) + block * a_stride * in;
    product.b = static_cast<const std::byte*>(first.b) + block * b_stride * in;
    product.c = static_cast<std::byte*>(first.c) + block * c_stride * dtype_size(first.output_type);
    return product;
  }
};

/// x [T, G·C] by blocks · weightᵀ -> y [T, G·R].
inline BlockProducts block_products(const Tensor& x, const Tensor& weight, const Tensor& y,
                                    int64_t num_blocks) {
  const int64_t rows = weight.shape[0] / num_blocks;
  const int64_t columns = weight.shape[1];
  return {.first = {.transpose_b = true,
                    .m = x.shape[0],
                    .n = rows,
                    .k = columns,
                    .a = x.data,
                    .lda = x.shape[1],
                    .b = weight.data,
                    .ldb = columns,
                    .c = y.data,
                    .ldc = y.shape[1],
                    .input_type = x.dtype,
                    .output_type = x.dtype},
          .count = num_blocks,
          .a_stride = columns,
          .b_stride = rows * columns,
          .c_stride = rows};
}

/// grad [T, G·R] by blocks · weight -> [T, G·C].
inline BlockProducts block_input_grads(const Tensor& grad, const Tensor& weight,
                                       const Tensor& grad_x, int64_t num_blocks) {
  const int64_t rows = weight.shape[0] / num_blocks;
  const int64_t columns = weight.shape[1];
  return {.first = {.m = grad.shape[0],
                    .n = columns,
                    .k = rows,
                    .a = grad.data,
                    .lda = grad.shape[1],
                    .b = weight.data,
                    .ldb = columns,
                    .c = grad_x.data,
                    .ldc = grad_x.shape[1],
                    .input_type = grad.dtype,
                    .output_type = grad.dtype},
          .count = num_blocks,
          .a_stride = rows,
          .b_stride = rows * columns,
          .c_stride = columns};
}

/// Of each block gradᵀ · x -> F32 [G·R, C].
inline BlockProducts block_weight_grads(const Tensor& x, const Tensor& grad, const Tensor& sum,
                                        int64_t num_blocks, bool accumulate) {
  const int64_t rows = grad.shape[1] / num_blocks;
  const int64_t columns = x.shape[1] / num_blocks;
  return {.first = {.transpose_a = true,
                    .m = rows,
                    .n = columns,
                    .k = x.shape[0],
                    .a = grad.data,
                    .lda = grad.shape[1],
                    .b = x.data,
                    .ldb = x.shape[1],
                    .c = sum.data,
                    .ldc = columns,
                    .input_type = x.dtype,
                    .output_type = DType::kF32,
                    .accumulate = accumulate},
          .count = num_blocks,
          .a_stride = rows,
          .b_stride = columns,
          .c_stride = rows * columns};
}

}  // namespace tessera
