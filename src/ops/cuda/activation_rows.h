#pragma once

#include <cuda_runtime.h>

#include "core/dtype.h"
#include "ops/activation_kind.h"
#include "ops/cuda/fp8_rows.h"
#include "ops/cuda/rows.h"

/// The activation of dense and of routed rows; ops/activation and ops/expert_activation say what
/// it computes.
namespace tessera::cuda {

constexpr int kMaxSizedExperts = 1024;

/// The experts whose rows follow one another, where their sizes differ.
struct SizedExperts {
  int count = 0;                     ///< 0: all rows have one size
  const int64_t* offsets = nullptr;  ///< I64 [count + 1], of their rows
  int sizes[kMaxSizedExperts];
};

/// What forward and backward have in common. A row of the input has `size` gate columns, followed
/// by as many others where the activation is gated, and `in_width` columns in all; one of the
/// result has `out_width`.
struct ActivationRows {
  ActivationFunction function;
  DType dtype;
  RowCount rows;
  int64_t size;  ///< of every row; the largest where they differ
  int64_t in_width;
  int64_t out_width;
  const void* in;
  const float* probs;  ///< [rows], or null: 1
};

/// out = act(in) · prob, and the same as FP8 where that has an address; then rows have one size, a
/// multiple of 128, and addresses are multiples of 16 bytes.
void launch_activation(const ActivationRows& call, const SizedExperts& experts, void* out,
                       const Fp8Rows& fp8, cudaStream_t stream);

/// grad_in, from grad [rows, out_width], and, unless they are null, grad_probs [rows] = Σ act(in) ·
/// grad and launch_activation's result act [rows, out_width], with the same bits. Without act
/// grad_in is given as FP8 too, where that has an address, as launch_activation does.
struct ActivationGrads {
  const void* grad;
  void* grad_in;
  float* grad_probs;
  void* act = nullptr;
  Fp8Rows fp8 = {};
};
void launch_activation_backward(const ActivationRows& call, const SizedExperts& experts,
                                const ActivationGrads& grads, cudaStream_t stream);

/// The scales of rows of E4M3: one for so many neighbours of a row (columns_of_scale in
/// ops/scaled_rows.h).
struct RowScales {
  const float* scales;
  int64_t columns_of_scale;
};
/// The same, bit by bit, where `in` is E4M3 that stands for values of call.dtype.
void launch_scaled_activation_backward(const ActivationRows& call, const RowScales& scales,
                                       const SizedExperts& experts, const ActivationGrads& grads,
                                       cudaStream_t stream);

}  // namespace tessera::cuda
