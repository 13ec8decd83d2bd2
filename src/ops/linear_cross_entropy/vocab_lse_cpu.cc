#include <algorithm>
#include <cstring>

#include "ops/cpu_dispatch.h"
#include "ops/linear_cross_entropy/head.h"
#include "ops/linear_cross_entropy/vocab_lse.h"

namespace tessera {
namespace {

Head make_shard_head(const Operator& op, const KernelArgs& args, const HeadNeeds& needs) {
  const VocabLseSpec& spec = static_cast<const VocabLseOperator&>(op).spec();
  return {args,
          HeadSizes(args.in(0).shape, args.in(1).shape, spec.cut),
          needs,
          {.first_row = spec.first_row, .vocab_size = spec.vocab_size}};
}

void vocab_lse(const Operator& op, const KernelArgs& args) {
  const Head head = make_shard_head(op, args, forward_needs(args.in(0).dtype));
  const HeadSizes& sizes = head.sizes();
  float* lse = args.out(0).as<float>();
  float* label_logit = args.out(1).as<float>();
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

void vocab_lse_backward(const Operator& op, const KernelArgs& args) {
  const Head head = make_shard_head(op, args, backward_needs(args.in(0).dtype));
  const HeadSizes& sizes = head.sizes();
  const Tensor& dx = args.out(0);
  if (sizes.V == 0) std::memset(dx.data, 0, static_cast<size_t>(dx.num_bytes()));
  const float* lse = args.in(3).as<float>();
  const float* grad_lse = args.in(4).as<float>();
  const float* grad_label_logit = args.in(5).as<float>();
  for (int64_t t = 0; t < sizes.T; t += sizes.chunk) {
    const HeadRange rows = head.chunk_at(t);
    const auto of_row = [=](int64_t row) {
      return RowGradient{lse[t + row], grad_lse[t + row], grad_label_logit[t + row]};
    };
    for (int64_t v = 0; v < sizes.V; v += sizes.block) {
      head.multiply_logits(rows, head.block_at(v));
      head.grad_from_logits(rows, head.block_at(v), of_row);
      head.multiply_gradients(rows, head.block_at(v), dx, {args.out(1), args.set_accumulators});
    }
  }
}

}  // namespace

TESSERA_CPU_KERNELS(add_vocab_lse_cpu, table) {
  table["vocab_lse"] = vocab_lse;
  table["vocab_lse_backward"] = Kernel(vocab_lse_backward).setting_accumulators();
}

}  // namespace tessera
