#include "ops/cuda/context.h"
#include "ops/linear_cross_entropy/head_kernels.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/vocab_loss/vocab_loss.h"
#include "ops/vocab_loss/vocab_loss_kernels.h"

namespace tessera {
namespace {

using namespace cuda;

VocabParts parts_of(const KernelArgs& args, int64_t num_parts) {
  return {.lse = args.in(0).as<float>(),
          .label_logit = args.in(1).as<float>(),
          .labels = args.in(2).as<int32_t>(),
          .num_parts = static_cast<int>(num_parts),
          .num_tokens = args.in(2).shape[0],
          .ignored = kIgnoredLabel};
}

void vocab_loss(const Operator& op, const KernelArgs& args) {
  const VocabParts parts = parts_of(args, static_cast<const VocabLoss&>(op).num_parts());
  float* const token_loss = args.out(1).as<float>();
  launch_vocab_losses(parts, token_loss, stream_of(args));
  launch_sum_losses(token_loss, parts.num_tokens, nullptr, args.in(3).as<float>(),
                    args.out(0).as<float>(), stream_of(args));
}

void vocab_loss_backward(const Operator& op, const KernelArgs& args) {
  launch_vocab_loss_gradients(parts_of(args, static_cast<const VocabLossBackward&>(op).num_parts()),
                              {.scale = args.in(3).as<float>(),
                               .grad_loss = args.in(4).as<float>(),
                               .grad_lse = args.out(0).as<float>(),
                               .grad_label_logit = args.out(1).as<float>()},
                              stream_of(args));
}

}  // namespace

void add_vocab_loss_cuda(KernelTable& table) {
  table["vocab_loss"] = vocab_loss;
  table["vocab_loss_backward"] = vocab_loss_backward;
}

}  // namespace tessera
