#include "ops/cuda/dependent_launch.cuh"
#include "ops/vocab_loss/vocab_loss_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

/// log Σ_p exp(lse_p) of a token, as the maximum and the logarithm of the rest. Of the parts' lse
/// one at least is finite.
struct Total {
  double maximum;
  double log_sum;
};

__device__ Total total_of(const VocabParts& parts, int64_t token) {
  Total total{-INFINITY, 0};
  for (int p = 0; p < parts.num_parts; ++p)
    total.maximum =
        fmax(total.maximum, static_cast<double>(parts.lse[p * parts.num_tokens + token]));
  double sum = 0;
  for (int p = 0; p < parts.num_parts; ++p)
    sum += exp(parts.lse[p * parts.num_tokens + token] - total.maximum);
  total.log_sum = log(sum);
  return total;
}

__global__ void __launch_bounds__(kThreads) losses_kernel(VocabParts parts, float* token_loss) {
  wait_for_earlier();
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token >= parts.num_tokens) return;
  if (parts.labels[token] == parts.ignored) {
    token_loss[token] = 0;
    return;
  }
  const Total total = total_of(parts, token);
  double logit = 0;
  for (int p = 0; p < parts.num_parts; ++p)
    logit += parts.label_logit[p * parts.num_tokens + token];
  token_loss[token] = static_cast<float>(total.maximum - logit + total.log_sum);
}

__global__ void __launch_bounds__(kThreads)
    gradients_kernel(VocabParts parts, VocabLossGradients gradients) {
  wait_for_earlier();
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token >= parts.num_tokens) return;
  const bool ignored = parts.labels[token] == parts.ignored;
  float coef = ignored ? 0.0F : *gradients.scale * *gradients.grad_loss;
  if (!ignored && gradients.token_weights != nullptr) coef *= gradients.token_weights[token];
  const Total total = ignored ? Total{0, 0} : total_of(parts, token);
  for (int p = 0; p < parts.num_parts; ++p) {
    const int64_t at = p * parts.num_tokens + token;
    const double share = ignored ? 0 : exp(parts.lse[at] - total.maximum - total.log_sum);
    gradients.grad_lse[at] = static_cast<float>(coef * share);
    gradients.grad_label_logit[at] = -coef;
  }
}

unsigned num_blocks(const VocabParts& parts) {
  return static_cast<unsigned>((parts.num_tokens + kThreads - 1) / kThreads);
}

}  // namespace

void launch_vocab_losses(const VocabParts& parts, float* token_loss, cudaStream_t stream) {
  if (parts.num_tokens == 0) return;
  launch_early(losses_kernel, {num_blocks(parts), kThreads}, stream, parts, token_loss);
}

void launch_vocab_loss_gradients(const VocabParts& parts, const VocabLossGradients& gradients,
                                 cudaStream_t stream) {
  if (parts.num_tokens == 0) return;
  launch_early(gradients_kernel, {num_blocks(parts), kThreads}, stream, parts, gradients);
}

}  // namespace tessera::cuda
