#include "ops/linear_cross_entropy/head_workspace.h"

#include <algorithm>

namespace tessera {

HeadSizes::HeadSizes(const Shape& x, const Shape& weight, const CrossEntropySpec& spec)
    : T(x[0]),
      H(x[1]),
      V(weight[0]),
      chunk(std::min(spec.chunk_tokens, T)),
      block(std::max<int64_t>(std::min(spec.block_vocab, V), 1)),
      softcap(spec.softcap) {}

HeadWorkspace::HeadWorkspace(const HeadSizes& sizes, const HeadNeeds& needs) {
  const auto take = [this](bool wanted, int64_t num_elements, DType dtype) {
    const int64_t offset = num_bytes;
    if (wanted) num_bytes += align_up(num_elements * dtype_size(dtype));
    return offset;
  };
  const bool narrow = needs.gradients && is_low_precision(needs.type);
  const bool by_parts = needs.num_parts > 0;
  const int64_t num_sums = by_parts ? std::min(needs.num_parts, sizes.num_blocks()) : 1;
  const int64_t columns = needs.all_blocks ? sizes.V : sizes.block;
  logits = take(true, sizes.chunk * columns, DType::kF32);
  block_max = take(needs.statistics, sizes.chunk * sizes.num_blocks(), DType::kF32);
  block_sum = take(needs.statistics, sizes.chunk * sizes.num_blocks(), DType::kF32);
  label_logit = take(needs.statistics, sizes.chunk, DType::kF32);
  lse = take(needs.statistics, sizes.chunk, DType::kF32);
  grad_logits = take(narrow && !by_parts, sizes.chunk * sizes.block, DType::kBF16);
  dx = take(narrow || by_parts, num_sums * sizes.chunk * sizes.H, DType::kF32);
}

int64_t head_workspace_bytes(std::span<const ValueType> inputs, const CrossEntropySpec& spec,
                             const HeadNeeds& needs) {
  const HeadSizes sizes(inputs[HeadOperands::kX].shape, inputs[HeadOperands::kWeight].shape, spec);
  return HeadWorkspace(sizes, needs).num_bytes;
}

HeadNeeds forward_needs(DType type) {
  return {.statistics = true, .type = type};
}

HeadNeeds backward_needs(DType type) {
  return {.gradients = true, .type = type};
}

HeadNeeds fused_needs(DType type, const CrossEntropySpec& spec) {
  return {.all_blocks = true,
          .statistics = true,
          .gradients = true,
          .num_parts = spec.parts ? spec.parts->num_parts : 0,
          .type = type};
}

HeadSizes fused_sizes(const Shape& x, const Shape& weight, const CrossEntropySpec& spec) {
  CrossEntropySpec own = spec;
  if (spec.parts) {
    own.chunk_tokens = spec.parts->chunk_tokens;
    own.block_vocab = spec.parts->block_vocab;
  }
  return {x, weight, own};
}

}  // namespace tessera
