#include "ops/cuda/context.h"
#include "ops/linear_cross_entropy/head_kernels.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/vocab_loss/vocab_loss.h"
#include "ops/vocab_loss/vocab_loss_kernels.h"

namespace tessera {
namespace {

using namespace cuda;

template <typename Op>
VocabParts parts_of(const Args<Op>& args, int64_t num_parts) {
  return {.lse = args.in(Op::kLse).template as<float>(),
          .label_logit = args.in(Op::kLabelLogit).template as<float>(),
          .labels = args.in(Op::kLabels).template as<int32_t>(),
          .num_parts = static_cast<int>(num_parts),
          .num_tokens = args.in(Op::kLabels).shape[0],
          .ignored = kIgnoredLabel};
}

/// Null where each token counts the same.
template <typename Op>
const float* weights_of(const Op& op, const Args<Op>& args) {
  return op.weighted() ? args.in(Op::kTokenWeights).template as<float>() : nullptr;
}

void vocab_loss(const VocabLoss& op, const Args<VocabLoss>& args) {
  const VocabParts parts = parts_of(args, op.num_parts());
  float* const token_loss = args.out(VocabLoss::kTokenLoss).as<float>();
  launch_vocab_losses(parts, token_loss, stream_of(args));
  launch_sum_losses({.token_loss = token_loss,
                     .token_weights = weights_of(op, args),
                     .num_tokens = parts.num_tokens,
                     .scale = args.in(VocabLoss::kScale).as<float>(),
                     .loss = args.out(VocabLoss::kLoss).as<float>()},
                    stream_of(args));
}

void vocab_loss_backward(const VocabLossBackward& op, const Args<VocabLossBackward>& args) {
  using Op = VocabLossBackward;
  launch_vocab_loss_gradients(parts_of(args, op.num_parts()),
                              {.scale = args.in(Op::kScale).as<float>(),
                               .grad_loss = args.in(Op::kGradLoss).as<float>(),
                               .token_weights = weights_of(op, args),
                               .grad_lse = args.out(Op::kGradLse).as<float>(),
                               .grad_label_logit = args.out(Op::kGradLabelLogit).as<float>()},
                              stream_of(args));
}

}  // namespace

void add_vocab_loss_cuda(KernelTable& table) {
  add_kernel<VocabLoss>(table, vocab_loss);
  add_kernel<VocabLossBackward>(table, vocab_loss_backward);
}

}  // namespace tessera
