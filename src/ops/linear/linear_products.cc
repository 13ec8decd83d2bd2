#include "ops/linear/linear_products.h"

namespace tessera {

Gemm forward_product(const Tensor& x, const Tensor& weight) {
  return {.transpose_b = true,
          .m = x.shape[0],
          .n = weight.shape[0],
          .k = weight.shape[1],
          .a = x.data,
          .lda = weight.shape[1],
          .b = weight.data,
          .ldb = weight.shape[1],
          .ldc = weight.shape[0],
          .input_type = x.dtype,
          .output_type = product_dtype(x.dtype)};
}

Gemm input_grad_product(const Tensor& grad, const Tensor& weight) {
  return {.m = grad.shape[0],
          .n = weight.shape[1],
          .k = weight.shape[0],
          .a = grad.data,
          .lda = grad.shape[1],
          .b = weight.data,
          .ldb = weight.shape[1],
          .ldc = weight.shape[1],
          .input_type = grad.dtype,
          .output_type = product_dtype(grad.dtype)};
}

Gemm weight_grad_product(const Tensor& x, const Tensor& grad) {
  return {.transpose_a = true,
          .m = grad.shape[1],
          .n = x.shape[1],
          .k = x.shape[0],
          .a = grad.data,
          .lda = grad.shape[1],
          .b = x.data,
          .ldb = x.shape[1],
          .ldc = x.shape[1],
          .input_type = x.dtype,
          .output_type = DType::kF32};
}

}  // namespace tessera
