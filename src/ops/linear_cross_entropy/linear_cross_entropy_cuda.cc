#include "ops/linear_cross_entropy/linear_cross_entropy.h"

#include "ops/cuda/context.h"
#include "ops/linear_cross_entropy/head_cuda.h"
#include "ops/linear_cross_entropy/vocab_lse.h"

namespace tessera {
namespace {

using cuda::Head;
using cuda::HeadGradients;
using cuda::HeadLosses;
using cuda::HeadRows;
using cuda::stream_of;
using cuda::VocabularyPart;

/// The whole vocabulary, or the part that a specification says, with its bias.
template <typename Op>
VocabularyPart with_bias(VocabularyPart part, const Args<Op>& args) {
  if (const Tensor* const bias = args.find_in(Op::kBias)) part.bias = bias->template as<float>();
  if constexpr (requires { Op::kGradBias; }) {
    const Tensor* const sums = args.find_out(Op::kGradBias);
    if (sums != nullptr && *sums) part.bias_gradient = sums->template as<float>();
  }
  return part;
}

template <typename Op>
Head make_head(const Op& op, const Args<Op>& args, bool makes_gradients) {
  const VocabularyPart whole{.vocab_size = args.in(Op::kWeight).shape[0]};
  return {args, op.spec(), with_bias(whole, args), makes_gradients};
}

/// Calls run(rows) for every chunk, whose logits are there.
template <typename Run>
void for_each_chunk(const Head& head, const Run& run) {
  for (int64_t t = 0; t < head.cut().T; t += head.cut().chunk) run(head.multiply_logits(t));
}

/// The weights of all tokens; null where each counts the same.
template <typename Op>
const float* weights_of(const Op& op, const Args<Op>& args) {
  return op.spec().weighted ? args.in(Op::kTokenWeights).template as<float>() : nullptr;
}

template <typename Op>
void sum_losses(const Op& op, const Args<Op>& args) {
  const Tensor& token_loss = args.out(Op::kTokenLoss);
  cuda::launch_sum_losses({.token_loss = token_loss.as<float>(),
                           .token_weights = weights_of(op, args),
                           .num_tokens = token_loss.shape[0],
                           .extent = args.in_extent(Op::kX),
                           .scale = args.in(Op::kScale).template as<float>(),
                           .loss = args.out(Op::kLoss).template as<float>()},
                          stream_of(args));
}

void forward(const LinearCrossEntropy& op, const Args<LinearCrossEntropy>& args) {
  const Head head = make_head(op, args, false);
  const HeadLosses losses{.lse = args.out(LinearCrossEntropy::kLse).as<float>(),
                          .token_loss = args.out(LinearCrossEntropy::kTokenLoss).as<float>()};
  for_each_chunk(
      head, [&](const HeadRows& rows) { cuda::launch_head_losses(rows, losses, stream_of(args)); });
  sum_losses(op, args);
}

void backward(const LinearCrossEntropyBackward& op, const Args<LinearCrossEntropyBackward>& args) {
  using Op = LinearCrossEntropyBackward;
  const Head head = make_head(op, args, true);
  const HeadGradients gradients{.lse = args.in(Op::kForwardLse).as<float>(),
                                .scale = args.in(Op::kScale).as<float>(),
                                .grad_loss = args.in(Op::kGradLoss).as<float>(),
                                .token_weights = weights_of(op, args)};
  for_each_chunk(head, [&](const HeadRows& rows) {
    cuda::launch_head_gradients(rows, gradients, stream_of(args));
    head.multiply_gradients(rows, args.out(Op::kGradX), args.out(Op::kGradWeight));
  });
}

void fused(const LinearCrossEntropyFused& op, const Args<LinearCrossEntropyFused>& args) {
  using Op = LinearCrossEntropyFused;
  const Head head = make_head(op, args, true);
  const HeadLosses losses{.token_loss = args.out(Op::kTokenLoss).as<float>()};
  const HeadGradients gradients{.scale = args.in(Op::kScale).as<float>(),
                                .token_weights = weights_of(op, args)};
  for_each_chunk(head, [&](const HeadRows& rows) {
    cuda::launch_head_fused(rows, losses, gradients, stream_of(args));
    head.multiply_gradients(rows, args.out(Op::kGradX), args.out(Op::kGradWeight));
  });
  sum_losses(op, args);
}

template <typename Op>
Head make_part(const Op& op, const Args<Op>& args, bool makes_gradients) {
  const VocabLseSpec& spec = op.spec();
  const VocabularyPart part{.first_row = spec.first_row, .vocab_size = spec.vocab_size};
  return {args, spec.cut, with_bias(part, args), makes_gradients};
}

void vocab_lse(const VocabLse& op, const Args<VocabLse>& args) {
  const Head head = make_part(op, args, false);
  const HeadLosses losses{.lse = args.out(VocabLse::kLse).as<float>(),
                          .label_logit = args.out(VocabLse::kLabelLogit).as<float>()};
  for_each_chunk(
      head, [&](const HeadRows& rows) { cuda::launch_head_losses(rows, losses, stream_of(args)); });
}

void vocab_lse_backward(const VocabLseBackward& op, const Args<VocabLseBackward>& args) {
  using Op = VocabLseBackward;
  const Head head = make_part(op, args, true);
  const HeadGradients gradients{.lse = args.in(Op::kForwardLse).as<float>(),
                                .grad_lse = args.in(Op::kGradLse).as<float>(),
                                .grad_label_logit = args.in(Op::kGradLabelLogit).as<float>()};
  for_each_chunk(head, [&](const HeadRows& rows) {
    cuda::launch_head_gradients(rows, gradients, stream_of(args));
    head.multiply_gradients(rows, args.out(Op::kGradX), args.out(Op::kGradWeight));
  });
}

int64_t losses_workspace(const CrossEntropyOperator& op, std::span<const ValueType> inputs) {
  return cuda::losses_scratch_bytes(inputs, op.spec());
}

int64_t gradients_workspace(const CrossEntropyOperator& op, std::span<const ValueType> inputs) {
  return cuda::gradients_scratch_bytes(inputs, op.spec());
}

int64_t lse_workspace(const VocabLse& op, std::span<const ValueType> inputs) {
  return cuda::losses_scratch_bytes(inputs, op.spec().cut);
}

int64_t lse_backward_workspace(const VocabLseBackward& op, std::span<const ValueType> inputs) {
  return cuda::gradients_scratch_bytes(inputs, op.spec().cut);
}

}  // namespace

void add_linear_cross_entropy_cuda(KernelTable& table) {
  add_kernel<LinearCrossEntropy>(table, forward, {.workspace = losses_workspace});
  add_kernel<LinearCrossEntropyBackward>(
      table, backward, {.workspace = gradients_workspace, .sets_accumulators = true});
  add_kernel<LinearCrossEntropyFused>(
      table, fused, {.workspace = gradients_workspace, .sets_accumulators = true});
  add_kernel<VocabLse>(table, vocab_lse, {.workspace = lse_workspace});
  add_kernel<VocabLseBackward>(table, vocab_lse_backward,
                               {.workspace = lse_backward_workspace, .sets_accumulators = true});
}

}  // namespace tessera
