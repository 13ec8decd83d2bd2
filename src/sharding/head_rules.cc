#include <fmt/format.h>

#include "ops/linear_cross_entropy/vocab_lse.h"
#include "sharding/rule_table.h"

namespace tessera::shard_rules {
namespace {

/// Token weights and bias, of which an operator may lack each.
std::string last_operands(const CrossEntropySpec& spec) {
  return fmt::format("{}{}", spec.weighted ? " f:t" : "", spec.biased ? " c:V" : "");
}

const CrossEntropySpec& head_spec(const AxisCall& call) {
  return dynamic_cast<const CrossEntropyOperator&>(call.op).spec();
}

}  // namespace

ShardStatesOf linear_cross_entropy(const AxisCall& call) {
  return follow(call, "x:tH w:VH l:t s!:" + last_operands(head_spec(call)) + " -> y+: o:t z:t");
}

ShardStatesOf linear_cross_entropy_backward(const AxisCall& call) {
  const CrossEntropySpec& spec = head_spec(call);
  return follow(call, "x:tH w:VH l:t s!: z:t g!:" + last_operands(spec) + " -> dx:tH=g dw:VH=g" +
                          (spec.biased ? " dc:V=g" : ""));
}

ShardStatesOf linear_cross_entropy_fused(const AxisCall& call) {
  const CrossEntropySpec& spec = head_spec(call);
  return follow(call, "x:tH w:VH l:t s!:" + last_operands(spec) + " -> y+: o:t dx:tH dw+:VH" +
                          (spec.biased ? " dc+:V" : ""));
}

ShardStatesOf vocab_lse_backward(const AxisCall& call) {
  const bool biased = dynamic_cast<const VocabLseOperator&>(call.op).spec().cut.biased;
  return follow(call, biased ? "x:tH w:vH l:t z:t g:t b:t c:v -> dx:tH=g+b dw:vH=g+b dc:v=g+b"
                             : "x:tH w:vH l:t z:t g:t b:t -> dx:tH=g+b dw:vH=g+b");
}

}  // namespace tessera::shard_rules
