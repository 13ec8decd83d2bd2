#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "ops/cuda/column_sums.h"

namespace tessera::cuda {

/// The logits of a chunk of tokens, and the tokens' labels. `stride` is a multiple of 4 and at
/// least num_columns; values in between may be read and written, but count for nothing.
struct HeadRows {
  float* logits = nullptr;  ///< [num_rows, stride]
  int64_t num_rows = 0;
  int64_t num_columns = 0;  ///< rows of the vocabulary that are here, 0 to 2^30
  int64_t stride = 0;
  int64_t first_token = 0;          ///< of the chunk
  const int64_t* extent = nullptr;  ///< how many tokens there are, on the GPU; null: all
  const int32_t* labels = nullptr;  ///< of all tokens
  int64_t first_column = 0;         ///< of the whole vocabulary
  int64_t vocab_size = 0;
  int32_t ignored = 0;          ///< the label of a token without one
  const float* bias = nullptr;  ///< of the columns that are here, F32 [num_columns]; null: none
  float softcap = 0;          ///< c: logits are c · tanh(sum / c) of product and bias; 0: the sums
  DType dtype = DType::kF32;  ///< the type of x and of the gradients
};

/// Makes products into logits: adds the bias, where there is one, and caps the sum.
void launch_head_finish(const HeadRows& rows, cudaStream_t stream);

/// What is found of each token, indexed over all tokens; null where it is not wanted. A token whose
/// label is outside the whole vocabulary and not `ignored` gets a NaN loss and label_logit.
struct HeadLosses {
  float* lse = nullptr;
  float* token_loss = nullptr;
  float* label_logit = nullptr;  ///< 0 where the label is not here
};
void launch_head_losses(const HeadRows& rows, const HeadLosses& losses, cudaStream_t stream);

/// What gradients of logits are made of: exp(logit - lse) · coef, and at_label more at the label;
/// NaN for a label that is none. Either coef = scale · grad_loss · token_weight and at_label =
/// -coef, but 0 for ignored tokens; or coef = grad_lse[token] and at_label =
/// grad_label_logit[token].
struct HeadGradients {
  const float* lse = nullptr;            ///< of all tokens; not read where the losses are found too
  const float* scale = nullptr;          ///< one value
  const float* grad_loss = nullptr;      ///< one value; null: 1
  const float* token_weights = nullptr;  ///< of all tokens; null: 1 each
  const float* grad_lse = nullptr;       ///< of all tokens; null: the first rule
  const float* grad_label_logit = nullptr;
};
/// Replaces the logits by their gradients, where bf16 as BF16 values at the beginning of each row;
/// those of tokens beyond the extent are 0.
void launch_head_gradients(const HeadRows& rows, const HeadGradients& gradients,
                           cudaStream_t stream);
/// Both in one run over the logits.
void launch_head_fused(const HeadRows& rows, const HeadLosses& losses,
                       const HeadGradients& gradients, cudaStream_t stream);

/// Adds the sums over a chunk's rows of the logits' gradients, which stand in their place, to the
/// accumulator [num_columns]; `partials` has column_sums_bytes(num_columns).
void launch_head_bias_gradient(const HeadRows& rows, Accumulator accumulator, float* partials,
                               int num_sms, cudaStream_t stream);

/// *loss = *scale · Σ token_weight · token_loss, summed in double in an order given by the number
/// of tokens.
struct LossSum {
  const float* token_loss = nullptr;
  const float* token_weights = nullptr;  ///< null: 1 each
  int64_t num_tokens = 0;
  const int64_t* extent = nullptr;  ///< as HeadRows'
  const float* scale = nullptr;
  float* loss = nullptr;
};
void launch_sum_losses(const LossSum& sum, cudaStream_t stream);

/// Copies rows first_token and following of a matrix; those beyond the extent become zero.
struct HeadCopy {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t row_bytes = 0;  ///< even
  int64_t num_rows = 0;
  int64_t first_token = 0;
  const int64_t* extent = nullptr;
};
void launch_copy_rows(const HeadCopy& copy, cudaStream_t stream);

}  // namespace tessera::cuda
