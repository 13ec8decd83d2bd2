#include "model/build/sequence_exchange.h"

#include <algorithm>

#include "model/build/token_share.h"
#include "ops/collective/head_exchange.h"
#include "ops/deal_tokens/deal_tokens.h"
#include "ops/repeat_heads/repeat_heads.h"

namespace tessera {

int64_t sequence_parts(const StageGroups& groups) {
  return groups.token_ranks() / groups.tp->size();
}

IndexRange sequence_heads(const StageGroups& groups, int64_t num_heads) {
  const int64_t parts = sequence_parts(groups);
  if (parts == 1) return {0, num_heads};
  // Heads go to the ranks of a place in the ring first, then to the places.
  const int64_t part = groups.heads->rank() * groups.ring->size() + groups.ring->rank();
  return {part * num_heads / parts, std::max<int64_t>(num_heads / parts, 1)};
}

ValueId gather_sequences(LayerBuilder& builder, ValueId x, int64_t num_heads,
                         const std::string& name) {
  const StageGroups& groups = builder.groups;
  const int64_t parts = sequence_parts(groups);
  if (parts == 1) return x;
  Program& program = builder.program();
  if (num_heads < parts) {
    x = program.add1(make_repeat_heads(num_heads, parts / num_heads), {x}, name + "_repeated");
    num_heads = parts;
  }
  const int64_t inner = groups.heads->size();
  if (inner > 1) {
    const std::string result = name + (inner < parts ? "_of_place" : "_of_all_tokens");
    x = program.add1(make_gather_heads(groups.heads, num_heads), {x}, result);
  }
  if (groups.ring->size() == 1) return x;
  x = program.add1(make_gather_heads(groups.ring, num_heads / inner), {x}, name + "_of_ring");
  const Zigzag deal = token_sharding(builder.shape, groups).zigzag();
  return program.add1(make_collect_tokens(deal), {x}, name + "_of_all_tokens");
}

ValueId scatter_sequences(LayerBuilder& builder, ValueId x, int64_t num_heads,
                          const std::string& name) {
  const StageGroups& groups = builder.groups;
  const int64_t inner = groups.heads->size();
  Program& program = builder.program();
  if (groups.ring->size() > 1) {
    const Zigzag deal = token_sharding(builder.shape, groups).zigzag();
    x = program.add1(make_deal_tokens(deal), {x}, name + "_of_ring");
    const std::string result = name + (inner > 1 ? "_of_place" : "_of_own_tokens");
    x = program.add1(make_scatter_heads(groups.ring, num_heads / inner), {x}, result);
  }
  if (inner == 1) return x;
  return program.add1(make_scatter_heads(groups.heads, num_heads), {x}, name + "_of_own_tokens");
}

}  // namespace tessera
