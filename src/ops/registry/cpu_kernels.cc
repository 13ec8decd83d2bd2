#include "ops/registry/cpu_kernels.h"

#include "ops/activation/activation.h"
#include "ops/adamw/adamw.h"
#include "ops/add/add.h"
#include "ops/add_bias/add_bias.h"
#include "ops/attention/attention.h"
#include "ops/attention_sink/attention_sink.h"
#include "ops/balance/balance.h"
#include "ops/bf16_sum/bf16_sum.h"
#include "ops/block_linear/block_linear.h"
#include "ops/block_sparse/block_sparse.h"
#include "ops/cache_append/cache_append.h"
#include "ops/choose_token/choose_token.h"
#include "ops/collapse_streams/collapse_streams.h"
#include "ops/collective/collective.h"
#include "ops/compress_windows/compress_cached.h"
#include "ops/compress_windows/compress_windows.h"
#include "ops/deal_tokens/deal_tokens.h"
#include "ops/delta_gates/delta_gates.h"
#include "ops/dequantize/dequantize.h"
#include "ops/destinations/destinations.h"
#include "ops/dispatch_plan/dispatch_plan.h"
#include "ops/embedding/embedding.h"
#include "ops/expert_activation/activated_product.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/expert_bias/expert_bias.h"
#include "ops/expert_clones/clone_plan.h"
#include "ops/expert_scale/expert_scale.h"
#include "ops/gated_delta/gated_delta.h"
#include "ops/gated_norm/gated_group_norm.h"
#include "ops/gated_norm/gated_norm.h"
#include "ops/grad_norm/grad_norm.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/hash_experts/hash_experts.h"
#include "ops/index_topk/index_topk.h"
#include "ops/jitter/jitter.h"
#include "ops/join_rows/join_rows.h"
#include "ops/kda/kda.h"
#include "ops/kda_gates/kda_gates.h"
#include "ops/latent_cache/latent_cache.h"
#include "ops/latent_heads/latent_heads.h"
#include "ops/layer_norm/layer_norm.h"
#include "ops/linear/joined_linear.h"
#include "ops/linear/linear.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/max_logits/max_logits.h"
#include "ops/mix_streams/mix_streams.h"
#include "ops/multiply/multiply.h"
#include "ops/muon/muon.h"
#include "ops/newton_schulz/newton_schulz.h"
#include "ops/norm_rope/norm_rope.h"
#include "ops/page_stash/page_stash.h"
#include "ops/paged_attention/paged_attention.h"
#include "ops/permute/permute.h"
#include "ops/quantize/quantize.h"
#include "ops/quantize/quantize_blocks.h"
#include "ops/quantize/turn_blocks.h"
#include "ops/quantize_tokens/quantize_tokens.h"
#include "ops/repeat_heads/repeat_heads.h"
#include "ops/ring_attention/ring_attention.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"
#include "ops/round_values/round_values.h"
#include "ops/route_map/route_map.h"
#include "ops/router/router.h"
#include "ops/scale/scale.h"
#include "ops/scale_by/scale_by.h"
#include "ops/scale_rows/scale_rows.h"
#include "ops/scaled_grouped_matmul/scaled_grouped_matmul.h"
#include "ops/scaled_grouped_wgrad/scaled_grouped_wgrad.h"
#include "ops/short_conv/short_conv.h"
#include "ops/short_conv/short_conv_batch.h"
#include "ops/sigmoid_gate/sigmoid_gate.h"
#include "ops/sinkhorn/sinkhorn.h"
#include "ops/slot_experts/slot_experts.h"
#include "ops/softcap/softcap.h"
#include "ops/sparse_attention/sparse_attention.h"
#include "ops/sparse_mixer/sparse_mixer.h"
#include "ops/spread_norm/spread_norm.h"
#include "ops/ssd_scan/ssd_scan.h"
#include "ops/stream_logits/stream_logits.h"
#include "ops/stream_weights/stream_weights.h"
#include "ops/top_p/top_p.h"
#include "ops/unit_norm/unit_norm.h"
#include "ops/vocab_loss/vocab_loss.h"
#include "ops/window_choice/window_choice.h"
#include "ops/zero_experts/zero_experts.h"

namespace tessera {
namespace {

constexpr void (*kOperators[])(KernelTable&) = {
    add_activated_product_cpu,
    add_activation_cpu,
    add_adamw_cpu,
    add_add_cpu,
    add_add_bias_cpu,
    add_attention_cpu,
    add_attention_sink_cpu,
    add_balance_cpu,
    add_block_linear_cpu,
    add_bf16_sum_cpu,
    add_block_sparse_cpu,
    add_cache_append_cpu,
    add_choose_token_cpu,
    add_collective_cpu,
    add_collapse_streams_cpu,
    add_compress_windows_cpu,
    add_compress_windows_cached_cpu,
    add_deal_tokens_cpu,
    add_delta_gates_cpu,
    add_dequantize_cpu,
    add_destinations_cpu,
    add_dispatch_plan_cpu,
    add_embedding_cpu,
    add_expert_activation_cpu,
    add_expert_bias_cpu,
    add_expert_clones_cpu,
    add_expert_scale_cpu,
    add_gated_delta_cpu,
    add_gated_group_norm_cpu,
    add_gated_norm_cpu,
    add_grad_norm_cpu,
    add_grouped_matmul_cpu,
    add_hash_experts_cpu,
    add_index_topk_cpu,
    add_jitter_cpu,
    add_join_rows_cpu,
    add_kda_cpu,
    add_kda_gates_cpu,
    add_latent_cache_cpu,
    add_latent_heads_cpu,
    add_layer_norm_cpu,
    add_joined_linear_cpu,
    add_linear_cpu,
    add_linear_cross_entropy_cpu,
    add_max_logits_cpu,
    add_mix_streams_cpu,
    add_multiply_cpu,
    add_muon_cpu,
    add_newton_schulz_cpu,
    add_norm_rope_cpu,
    add_page_stash_cpu,
    add_paged_attention_cpu,
    add_permute_cpu,
    add_quantize_blocks_cpu,
    add_quantize_cpu,
    add_turn_blocks_cpu,
    add_quantize_tokens_cpu,
    add_repeat_heads_cpu,
    add_ring_attention_cpu,
    add_rmsnorm_cpu,
    add_rope_cpu,
    add_round_values_cpu,
    add_route_map_cpu,
    add_router_cpu,
    add_scaled_grouped_matmul_cpu,
    add_scaled_grouped_wgrad_cpu,
    add_scale_cpu,
    add_scale_by_cpu,
    add_scale_rows_cpu,
    add_short_conv_batch_cpu,
    add_short_conv_cpu,
    add_sigmoid_gate_cpu,
    add_sinkhorn_cpu,
    add_slot_experts_cpu,
    add_softcap_cpu,
    add_sparse_attention_cpu,
    add_sparse_mixer_cpu,
    add_spread_norm_cpu,
    add_ssd_scan_cpu,
    add_stream_logits_cpu,
    add_stream_weights_cpu,
    add_top_p_cpu,
    add_unit_norm_cpu,
    add_vocab_loss_cpu,
    add_window_choice_cpu,
    add_zero_experts_cpu,
};

}  // namespace

KernelTable make_cpu_kernels() {
  KernelTable table;
  for (const auto& add : kOperators) add(table);
  return table;
}

KernelTable make_cpu_kernels_of_rows() {
  KernelTable table = make_cpu_kernels();
  add_grouped_matmul_of_rows_cpu(table);
  add_linear_of_rows_cpu(table);
  add_block_linear_of_rows_cpu(table);
  add_router_of_rows_cpu(table);
  return table;
}

}  // namespace tessera
