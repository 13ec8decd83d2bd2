#pragma once

#include "core/tensor.h"
#include "ops/gemm/gemm.h"

/// The products of a dense layer with a weight [out, in], whose results are still to be placed.
namespace tessera {

/// x [T, in] · weightᵀ -> [T, out].
Gemm forward_product(const Tensor& x, const Tensor& weight);

/// grad [T, out] · weight -> [T, in].
Gemm input_grad_product(const Tensor& grad, const Tensor& weight);

/// gradᵀ · x [T, in] -> F32 [out, in].
Gemm weight_grad_product(const Tensor& x, const Tensor& grad);

}  // namespace tessera
