#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

/// The statistics of num_tokens tokens over all parts of a vocabulary: element p · num_tokens + t
/// is that of part p and token t.
struct VocabParts {
  const float* lse;
  const float* label_logit;
  const int32_t* labels;
  int num_parts;
  int64_t num_tokens;
  int32_t ignored;
};

/// token_loss [T], 0 for ignored tokens.
void launch_vocab_losses(const VocabParts& parts, float* token_loss, cudaStream_t stream);

struct VocabLossGradients {
  const float* scale;
  const float* grad_loss;
  const float* token_weights;  ///< null: 1 each
  float* grad_lse;             ///< both in the order of the statistics; 0 for ignored tokens
  float* grad_label_logit;
};
void launch_vocab_loss_gradients(const VocabParts& parts, const VocabLossGradients& gradients,
                                 cudaStream_t stream);

}  // namespace tessera::cuda
