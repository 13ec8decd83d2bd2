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

const CrossEntropySpec& cut_of(const Operator& op) {
  return static_cast<const CrossEntropyOperator&>(op).spec();
}

Head make_head(const Operator& op, const KernelArgs& args, bool makes_gradients) {
  return {args, cut_of(op), 0, args.in(1).shape[0], makes_gradients};
}

/// Calls run(rows) for every chunk, whose logits are there.
template <typename Run>
void for_each_chunk(const Head& head, const Run& run) {
  for (int64_t t = 0; t < head.cut().T; t += head.cut().chunk) run(head.multiply_logits(t));
}

void sum_losses(const KernelArgs& args) {
  const Tensor& token_loss = args.out(1);
  cuda::launch_sum_losses(token_loss.as<float>(), token_loss.shape[0], args.in_extent(0),
                          args.in(3).as<float>(), args.out(0).as<float>(), stream_of(args));
}

void forward(const Operator& op, const KernelArgs& args) {
  const Head head = make_head(op, args, false);
  const HeadLosses losses{.lse = args.out(2).as<float>(), .token_loss = args.out(1).as<float>()};
  for_each_chunk(
      head, [&](const HeadRows& rows) { cuda::launch_head_losses(rows, losses, stream_of(args)); });
  sum_losses(args);
}

void backward(const Operator& op, const KernelArgs& args) {
  const Head head = make_head(op, args, true);
  const HeadGradients gradients{.lse = args.in(4).as<float>(),
                                .scale = args.in(3).as<float>(),
                                .grad_loss = args.in(5).as<float>()};
  for_each_chunk(head, [&](const HeadRows& rows) {
    cuda::launch_head_gradients(rows, gradients, stream_of(args));
    head.multiply_gradients(rows, args.out(0), args.out(1));
  });
}

void fused(const Operator& op, const KernelArgs& args) {
  const Head head = make_head(op, args, true);
  const HeadLosses losses{.token_loss = args.out(1).as<float>()};
  const HeadGradients gradients{.scale = args.in(3).as<float>()};
  for_each_chunk(head, [&](const HeadRows& rows) {
    cuda::launch_head_fused(rows, losses, gradients, stream_of(args));
    head.multiply_gradients(rows, args.out(2), args.out(3));
  });
  sum_losses(args);
}

Head make_part(const Operator& op, const KernelArgs& args, bool makes_gradients) {
  const VocabLseSpec& spec = static_cast<const VocabLseOperator&>(op).spec();
  return {args, spec.cut, spec.first_row, spec.vocab_size, makes_gradients};
}

void vocab_lse(const Operator& op, const KernelArgs& args) {
  const Head head = make_part(op, args, false);
  const HeadLosses losses{.lse = args.out(0).as<float>(), .label_logit = args.out(1).as<float>()};
  for_each_chunk(
      head, [&](const HeadRows& rows) { cuda::launch_head_losses(rows, losses, stream_of(args)); });
}

void vocab_lse_backward(const Operator& op, const KernelArgs& args) {
  const Head head = make_part(op, args, true);
  const HeadGradients gradients{.lse = args.in(3).as<float>(),
                                .grad_lse = args.in(4).as<float>(),
                                .grad_label_logit = args.in(5).as<float>()};
  for_each_chunk(head, [&](const HeadRows& rows) {
    cuda::launch_head_gradients(rows, gradients, stream_of(args));
    head.multiply_gradients(rows, args.out(0), args.out(1));
  });
}

int64_t losses_workspace(const Operator& op, std::span<const ValueType> inputs) {
  return cuda::losses_scratch_bytes(inputs, cut_of(op));
}

int64_t gradients_workspace(const Operator& op, std::span<const ValueType> inputs) {
  return cuda::gradients_scratch_bytes(inputs, cut_of(op));
}

int64_t lse_workspace(const Operator& op, std::span<const ValueType> inputs) {
  return cuda::losses_scratch_bytes(inputs, static_cast<const VocabLseOperator&>(op).spec().cut);
}

int64_t lse_backward_workspace(const Operator& op, std::span<const ValueType> inputs) {
  return cuda::gradients_scratch_bytes(inputs, static_cast<const VocabLseOperator&>(op).spec().cut);
}

}  // namespace

void add_linear_cross_entropy_cuda(KernelTable& table) {
  table["linear_cross_entropy"] = {forward, losses_workspace};
  table["linear_cross_entropy_backward"] =
      Kernel(backward, gradients_workspace).setting_accumulators();
  table["linear_cross_entropy_fused"] = Kernel(fused, gradients_workspace).setting_accumulators();
  table["vocab_lse"] = {vocab_lse, lse_workspace};
  table["vocab_lse_backward"] =
      Kernel(vocab_lse_backward, lse_backward_workspace).setting_accumulators();
}

}  // namespace tessera
