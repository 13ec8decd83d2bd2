#include "model/batch_inputs.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "parallel/token_sharding.h"

namespace tessera {
namespace {

bool rotates_own_tokens(const StageGroups& groups) {
  return groups.replicated_attention || groups.tp->size() == 1;
}

void check_array(const Tensor& array, int64_t size, std::string_view what) {
  ensure(array.dtype == DType::kI32 && array.shape == Shape{size},
         "batch {} is {} {}, expected i32 [{}]", what, dtype_name(array.dtype),
         array.shape.to_string(), size);
}

void take(const Tensor& from, const std::vector<int64_t>& idx, const MirroredTensor& to) {
  const int32_t* source = from.as<int32_t>();
  std::ranges::transform(idx, to.get().as<int32_t>(), [&](int64_t i) { return source[i]; });
}

void set_scalar(const MirroredTensor& tensor, float value) {
  *tensor.get().as<float>() = value;
  tensor.upload();
}

}  // namespace

TokenSharding token_sharding(const BatchShape& shape, const StageGroups& groups) {
  const bool spread = groups.token_ranks() > 1;
  const int64_t length =
      spread && shape.sequence_length > 0 ? shape.sequence_length : shape.num_tokens;
  return {.num_rows = length > 0 ? shape.num_tokens / length : 0,
          .row_length = length,
          .ring = groups.ring->size(),
          .all_to_all = groups.head_inner,
          .tp = groups.tp->size()};
}

TokenShare share_tokens(const BatchShape& shape, const StageGroups& groups) {
  TokenShare share;
  if (groups.token_ranks() == 1) {
    share.own.resize(static_cast<size_t>(shape.num_tokens));
    std::iota(share.own.begin(), share.own.end(), int64_t{0});
    share.group = share.own;
    return share;
  }
  const TokenSharding sharding = token_sharding(shape, groups);
  check_token_sharding(sharding);
  const int64_t inner =
      groups.replicated_attention ? groups.heads->rank() / groups.tp->size() : groups.heads->rank();
  for (int64_t t = 0; t < sharding.tp; ++t) {
    const auto tokens = local_tokens(sharding, groups.ring->rank(), inner, t);
    share.group.insert(share.group.end(), tokens.begin(), tokens.end());
    if (t == groups.tp->rank()) share.own = tokens;
  }
  return share;
}

BatchInputs::BatchInputs(const BatchShape& shape, const StageGroups& groups, const MoeConfig& moe,
                         Device& device)
    : tokens(DType::kI32, {group_tokens(shape, groups)}, device),
      labels(DType::kI32, {own_tokens(shape, groups)}, device),
      gathered_labels(DType::kI32, {group_tokens(shape, groups)}, device),
      positions(
          DType::kI32,
          {rotates_own_tokens(groups) ? own_tokens(shape, groups) : group_tokens(shape, groups)},
          device),
      cu_seqlens(DType::kI32, {shape.max_sequences + 1}, device),
      segments(DType::kI32, {own_tokens(shape, groups)}, device),
      token_order(DType::kI32, {shape.num_tokens}, device),
      loss_scale(DType::kF32, {1}, device),
      grad_loss(DType::kF32, {1}, device),
      grad_balance(DType::kF32, {1}, device),
      grad_score_means(DType::kF32, {moe.num_experts}, device),
      grad_z_loss(DType::kF32, {1}, device),
      loss(DType::kF32, {1}, "the loss", device, MemoryKind::kShared),
      token_loss(DType::kF32, {own_tokens(shape, groups)}, "losses of tokens", device),
      segments_are_sequences_(moe.balance_scope == BalanceTokens::kSequence) {
  set_scalar(grad_loss, 1);
  int32_t* order = token_order.get().as<int32_t>();
  const TokenSharding sharding = token_sharding(shape, groups);
  for (int64_t place = 0; place < sharding.ring; ++place) {
    for (const int64_t token : ring_tokens(sharding, place)) *order++ = static_cast<int32_t>(token);
  }
  token_order.upload();
  segments.upload();
}

int64_t BatchInputs::count_bytes(const BatchShape& shape, const StageGroups& groups) {
  const int64_t own = own_tokens(shape, groups);
  const int64_t group = group_tokens(shape, groups);
  const int64_t rotated = rotates_own_tokens(groups) ? own : group;
  return (2 * group + 3 * own + rotated + shape.num_tokens + shape.max_sequences + 1) *
         dtype_size(DType::kI32);
}

void BatchInputs::load(const MicroBatch& batch, const TokenShare& share) {
  const auto total = static_cast<int64_t>(batch.tokens.num_elements());
  for (const auto& [array, what] :
       {std::pair{batch.tokens, "tokens"}, std::pair{batch.labels, "labels"},
        std::pair{batch.positions, "positions"}})
    check_array(array, total, what);
  check_array(batch.cu_seqlens, cu_seqlens.get().num_elements(), "cu_seqlens");
  take(batch.tokens, share.group, tokens);
  take(batch.labels, share.own, labels);
  take(batch.labels, share.group, gathered_labels);
  take(batch.positions,
       positions.get().num_elements() == std::ssize(share.own) ? share.own : share.group,
       positions);
  std::ranges::copy(batch.cu_seqlens.span<int32_t>(), cu_seqlens.get().as<int32_t>());

  for (const MirroredTensor* given : {&tokens, &labels, &gathered_labels, &positions, &cu_seqlens})
    given->upload();

  if (!segments_are_sequences_) return;
  const auto ends = batch.cu_seqlens.span<int32_t>();
  for (size_t i = 0; i < share.own.size(); ++i) {
    const auto after = std::ranges::upper_bound(ends, static_cast<int32_t>(share.own[i]));
    segments.get().as<int32_t>()[i] = static_cast<int32_t>(after - ends.begin() - 1);
  }
  segments.upload();
}

void BatchInputs::set_scales(const LossScales& scales, int64_t token_ranks) {
  set_scalar(loss_scale, scales.loss);
  set_scalar(grad_balance, scales.balance);
  // Of the mean over all tokens, each rank has its share.
  set_scalar(grad_z_loss, scales.z_loss / static_cast<float>(token_ranks));
}

}  // namespace tessera
