#include <algorithm>
#include <cstring>

#include "ops/cpu_dispatch.h"
#include "ops/linear_cross_entropy/head.h"
#include "ops/linear_cross_entropy/vocab_lse.h"

namespace tessera {
namespace {

template <typename Op>
Head make_shard_head(const Op& op, const Args<Op>& args, const HeadNeeds& needs) {
  const VocabLseSpec& spec = op.spec();
  const Tensor* const bias = args.find_in(Op::kBias);
  return {args,
          HeadSizes(args.in(Op::kX).shape, args.in(Op::kWeight).shape, spec.cut),
          needs,
          {.first_row = spec.first_row,
           .vocab_size = spec.vocab_size,
           .bias = bias == nullptr ? nullptr : bias->template as<float>()}};
}

void vocab_lse(const VocabLse& op, const Args<VocabLse>& args) {
  const Head head = make_shard_head(op, args, forward_needs(args.in(VocabLse::kX).dtype));
  const HeadSizes& sizes = head.sizes();
  float* lse = args.out(VocabLse::kLse).as<float>();
  float* label_logit = args.out(VocabLse::kLabelLogit).as<float>();
  for (int64_t t = 0; t < sizes.T; t += sizes.chunk) {
    const HeadRange rows = head.chunk_at(t);
    std::fill_n(head.label_logits(), rows.count, 0.0F);
    for (int64_t v = 0; v < sizes.V; v += sizes.block) {
      head.multiply_logits(rows, head.block_at(v));
      head.exponentiate_block(rows, head.block_at(v));
    }
    for (int64_t row = 0; row < rows.count; ++row)
      lse[t + row] = static_cast<float>(head.join_blocks(row).lse());
    std::copy_n(head.label_logits(), rows.count, label_logit + t);
  }
}

void vocab_lse_backward(const VocabLseBackward& op, const Args<VocabLseBackward>& args) {
  using Op = VocabLseBackward;
  const Head head = make_shard_head(op, args, backward_needs(args.in(Op::kX).dtype));
  const HeadSizes& sizes = head.sizes();
  const Tensor& dx = args.out(Op::kGradX);
  if (sizes.V == 0) std::memset(dx.data, 0, dx.num_bytes());
  const float* lse = args.in(Op::kForwardLse).as<float>();
  const float* grad_lse = args.in(Op::kGradLse).as<float>();
  const float* grad_label_logit = args.in(Op::kGradLabelLogit).as<float>();
  const Tensor* const bias_sum = args.find_out(Op::kGradBias);
  const HeadWeightGradient weight{
      args.out(Op::kGradWeight), bias_sum == nullptr ? Tensor() : *bias_sum, args.set_accumulators};
  for (int64_t t = 0; t < sizes.T; t += sizes.chunk) {
    const HeadRange rows = head.chunk_at(t);
    const auto of_row = [=](int64_t row) {
      return RowGradient{lse[t + row], grad_lse[t + row], grad_label_logit[t + row]};
    };
    for (int64_t v = 0; v < sizes.V; v += sizes.block) {
      head.multiply_logits(rows, head.block_at(v));
      head.grad_from_logits(rows, head.block_at(v), of_row);
      head.multiply_gradients(rows, head.block_at(v), dx, weight);
    }
  }
}

int64_t vocab_lse_workspace(const VocabLse& op, std::span<const ValueType> inputs) {
  return head_workspace_bytes(inputs, op.spec().cut, forward_needs(inputs[VocabLse::kX].dtype));
}

int64_t vocab_lse_backward_workspace(const VocabLseBackward& op,
                                     std::span<const ValueType> inputs) {
  return head_workspace_bytes(inputs, op.spec().cut,
                              backward_needs(inputs[VocabLseBackward::kX].dtype));
}

}  // namespace

TESSERA_CPU_KERNELS(add_vocab_lse_cpu, table) {
  add_kernel<VocabLse>(table, vocab_lse, {.workspace = vocab_lse_workspace});
  add_kernel<VocabLseBackward>(
      table, vocab_lse_backward,
      {.workspace = vocab_lse_backward_workspace, .sets_accumulators = true});
}

}  // namespace tessera
