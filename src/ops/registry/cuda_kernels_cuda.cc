#include "ops/registry/cuda_kernels.h"

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
#include "ops/grouped_matmul/grouped_matmul_cuda.h"
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
    add_activated_product_cuda,
    add_activation_cuda,
    add_adamw_cuda,
    add_add_bias_cuda,
    add_add_cuda,
    add_attention_cuda,
    add_attention_sink_cuda,
    add_balance_cuda,
    add_block_linear_cuda,
    add_bf16_sum_cuda,
    add_block_sparse_cuda,
    add_choose_token_cuda,
    add_collective_cuda,
    add_compress_windows_cuda,
    add_compress_windows_cached_cuda,
    add_cache_append_cuda,
    add_collapse_streams_cuda,
    add_deal_tokens_cuda,
    add_delta_gates_cuda,
    add_dequantize_cuda,
    add_destinations_cuda,
    add_dispatch_plan_cuda,
    add_embedding_cuda,
    add_expert_activation_cuda,
    add_expert_bias_cuda,
    add_expert_clones_cuda,
    add_expert_scale_cuda,
    add_gated_delta_cuda,
    add_gated_group_norm_cuda,
    add_gated_norm_cuda,
    add_grad_norm_cuda,
    add_grouped_matmul_cuda,
    add_hash_experts_cuda,
    add_index_topk_cuda,
    add_jitter_cuda,
    add_join_rows_cuda,
    add_kda_cuda,
    add_kda_gates_cuda,
    add_latent_cache_cuda,
    add_latent_heads_cuda,
    add_layer_norm_cuda,
    add_linear_cross_entropy_cuda,
    add_joined_linear_cuda,
    add_linear_cuda,
    add_max_logits_cuda,
    add_mix_streams_cuda,
    add_multiply_cuda,
    add_muon_cuda,
    add_newton_schulz_cuda,
    add_norm_rope_cuda,
    add_page_stash_cuda,
    add_paged_attention_cuda,
    add_permute_cuda,
    add_quantize_blocks_cuda,
    add_quantize_cuda,
    add_turn_blocks_cuda,
    add_quantize_tokens_cuda,
    add_repeat_heads_cuda,
    add_ring_attention_cuda,
    add_rmsnorm_cuda,
    add_rope_cuda,
    add_round_values_cuda,
    add_route_map_cuda,
    add_router_cuda,
    add_scaled_grouped_matmul_cuda,
    add_scaled_grouped_wgrad_cuda,
    add_scale_cuda,
    add_scale_by_cuda,
    add_scale_rows_cuda,
    add_short_conv_batch_cuda,
    add_short_conv_cuda,
    add_sigmoid_gate_cuda,
    add_sinkhorn_cuda,
    add_slot_experts_cuda,
    add_softcap_cuda,
    add_sparse_attention_cuda,
    add_sparse_mixer_cuda,
    add_spread_norm_cuda,
    add_ssd_scan_cuda,
    add_stream_logits_cuda,
    add_stream_weights_cuda,
    add_top_p_cuda,
    add_unit_norm_cuda,
    add_vocab_loss_cuda,
    add_window_choice_cuda,
    add_zero_experts_cuda,
};

}  // namespace

KernelTable make_cuda_kernels() {
  KernelTable table;
  for (const auto& add : kOperators) add(table);
  return table;
}

}  // namespace tessera
