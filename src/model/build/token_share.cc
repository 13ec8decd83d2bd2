#include "model/build/token_share.h"

#include <numeric>

namespace tessera {

TokenSharding token_sharding(const BatchShape& shape, const StageGroups& groups) {
  if (groups.policy.plans_contexts) {
    return {.row_length = shape.num_tokens, .ring = groups.ring->size(), .tp = groups.tp->size()};
  }
  const bool spread = groups.token_ranks() > 1;
  const int64_t length =
      spread && shape.sequence_length > 0 ? shape.sequence_length : shape.num_tokens;
  return {.num_rows = length > 0 ? shape.num_tokens / length : 0,
          .row_length = length,
          .ring = groups.ring->size(),
          .all_to_all = groups.policy.head_inner,
          .tp = groups.tp->size()};
}

TokenShare share_tokens(const BatchShape& shape, const StageGroups& groups) {
  TokenShare share;
  if (groups.token_ranks() == 1) {
    share.own.resize(shape.num_tokens);
    std::iota(share.own.begin(), share.own.end(), int64_t{0});
    share.group = share.own;
    share.is_whole = true;
    return share;
  }
  const TokenSharding sharding = token_sharding(shape, groups);
  check_token_sharding(sharding);
  const int64_t inner = groups.policy.replicated_attention
                            ? groups.heads->rank() / groups.tp->size()
                            : groups.heads->rank();
  for (int64_t t = 0; t < sharding.tp; ++t) {
    const auto tokens = local_tokens(sharding, groups.ring->rank(), inner, t);
    share.group.insert(share.group.end(), tokens.begin(), tokens.end());
    if (t == groups.tp->rank()) share.own = tokens;
  }
  return share;
}

ContextShare share_documents(std::span<const int32_t> cu_seqlens, std::span<const int32_t> segments,
                             const StageGroups& groups) {
  ContextShare share{.degree = groups.ring->size(), .place = groups.ring->rank()};
  const Zigzag deal{
      .row_length = std::ssize(segments), .ring = groups.ring->size(), .by_sequence = true};
  std::vector<int64_t>& group = share.tokens.group;
  deal.for_each_run(cu_seqlens, groups.ring->rank(), [&](const IndexRange& run) {
    for (int64_t token = run.begin; token < run.end(); ++token) group.push_back(token);
  });
  const int64_t count = std::ssize(group) / groups.tp->size();
  const auto first = group.begin() + groups.tp->rank() * count;
  share.tokens.own.assign(first, first + count);
  share.tokens.is_whole = groups.token_ranks() == 1;
  for (const int64_t token : share.tokens.own) share.segments.push_back(segments[token]);
  return share;
}

}  // namespace tessera
