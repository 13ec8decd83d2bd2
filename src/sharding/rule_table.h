#pragma once

#include <string_view>

#include "sharding/operator_rules.h"

/// Rules of operators by more than their names.
namespace tessera::shard_rules {

using Function = ShardStatesOf (*)(const AxisCall& call);

[[noreturn]] inline void fault(const char* message) {
  throw ShardFault(message);
}
ShardStatesOf follow(const AxisCall& call, std::string_view rule);
ShardStatesOf follow(const AxisCall& call, std::string_view rule,
                     std::span<const ShardState> inputs);
/// `follow` where tokens read those before them in their sequences.
ShardStatesOf follow_sequences(const AxisCall& call, int bounds, std::string_view rule);
/// `follow` of what reads other tokens of the sequences, which positions tell apart.
ShardStatesOf follow_positions(const AxisCall& call, std::string_view rule);

// Exchanges.
ShardStatesOf all_gather(const AxisCall& call);
ShardStatesOf reduce_scatter(const AxisCall& call);
ShardStatesOf all_reduce(const AxisCall& call);
ShardStatesOf all_to_all(const AxisCall& call);
ShardStatesOf all_to_all_v(const AxisCall& call);
ShardStatesOf gather_heads(const AxisCall& call);
ShardStatesOf scatter_heads(const AxisCall& call);

// Routed rows.
ShardStatesOf route_map(const AxisCall& call);
ShardStatesOf capacity_limit(const AxisCall& call);
ShardStatesOf sinkhorn(const AxisCall& call);
ShardStatesOf dispatch_plan(const AxisCall& call);
ShardStatesOf clone_plan(const AxisCall& call);
ShardStatesOf clone_weights(const AxisCall& call);
ShardStatesOf return_clones(const AxisCall& call);
ShardStatesOf add_clones(const AxisCall& call);
ShardStatesOf permute(const AxisCall& call);
ShardStatesOf permute_choices(const AxisCall& call);
ShardStatesOf unpermute(const AxisCall& call);
ShardStatesOf unpermute_weighted(const AxisCall& call);
ShardStatesOf unpermute_weighted_backward(const AxisCall& call);
ShardStatesOf grouped_matmul(const AxisCall& call);
ShardStatesOf grouped_matmul_wgrad(const AxisCall& call);
ShardStatesOf quantize_tokens(const AxisCall& call);
ShardStatesOf expert_bias(const AxisCall& call);
ShardStatesOf expert_bias_backward(const AxisCall& call);
ShardStatesOf expert_activation(const AxisCall& call);
ShardStatesOf expert_activation_backward(const AxisCall& call);
ShardStatesOf activated_product(const AxisCall& call);
ShardStatesOf activation_grad_product(const AxisCall& call);
ShardStatesOf block_sparse_product(const AxisCall& call);

// Attention.
ShardStatesOf attention(const AxisCall& call);
ShardStatesOf attention_backward(const AxisCall& call);
ShardStatesOf max_logits(const AxisCall& call);
ShardStatesOf index_topk(const AxisCall& call);
ShardStatesOf index_topk_entries(const AxisCall& call);
ShardStatesOf compress_windows(const AxisCall& call);
ShardStatesOf compress_windows_backward(const AxisCall& call);
ShardStatesOf window_choice(const AxisCall& call);
ShardStatesOf sparse_attention(const AxisCall& call);
ShardStatesOf sparse_attention_backward(const AxisCall& call);
ShardStatesOf attention_sink(const AxisCall& call);
ShardStatesOf attention_sink_backward(const AxisCall& call);

// The head.
ShardStatesOf linear_cross_entropy(const AxisCall& call);
ShardStatesOf linear_cross_entropy_backward(const AxisCall& call);
ShardStatesOf linear_cross_entropy_fused(const AxisCall& call);
ShardStatesOf vocab_lse_backward(const AxisCall& call);

// Delta rules and state-space scan.
ShardStatesOf deal_tokens(const AxisCall& call);
ShardStatesOf short_conv(const AxisCall& call);
ShardStatesOf short_conv_backward(const AxisCall& call);
ShardStatesOf gated_delta(const AxisCall& call);
ShardStatesOf ssd_scan(const AxisCall& call);
ShardStatesOf ssd_scan_backward(const AxisCall& call);

}  // namespace tessera::shard_rules
