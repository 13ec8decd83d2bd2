#include "model/build/block_program.h"

#include "model/build/attention_blocks.h"
#include "model/build/mlp_blocks.h"
#include "model/build/moe_blocks.h"

namespace tessera {
namespace {

ValueId add_block(LayerBuilder& builder, LayerBlock block, ValueId normed) {
  switch (block) {
    case LayerBlock::kAttention:
      return build_attention(builder, normed, std::nullopt);
    case LayerBlock::kMlp:
      return build_mlp(builder, "mlp", normed, builder.config.dense_inner_size());
    case LayerBlock::kMoe:
      break;
  }
  // In a layer attention has added this input.
  if (builder.config.moe.balance_scope == BalanceTokens::kSequence)
    builder.layer.cu_seqlens =
        builder.program().add_input("cu_seqlens", {DType::kI32, {builder.shape.max_sequences + 1}});
  return build_moe(builder, normed);
}

}  // namespace

LayerProgram build_block(const ModelConfig& config, LayerBlock block, LayerKind kind,
                         const BatchShape& shape, const StageGroups& groups) {
  ensure(block == LayerBlock::kAttention || kind.moe == (block == LayerBlock::kMoe),
         "a {} has no such block", layer_kind_name(kind));
  LayerProgram layer{.forward = Program("block")};
  LayerBuilder builder{config, kind, shape, groups, layer};
  layer.hidden = layer.forward.add_input(
      "hidden", {shape.dtype, {own_tokens(shape, groups), config.hidden_size}});
  layer.hidden_out = add_block(builder, block, layer.hidden);
  std::vector<ValueId> outputs = {layer.hidden_out};
  for (const ValueId value : {layer.balance_loss, layer.z_loss, layer.score_means, layer.counts,
                              layer.dropped, layer.counts_so_far}) {
    if (value >= 0) outputs.push_back(value);
  }
  layer.forward.set_outputs(std::move(outputs));
  return layer;
}

}  // namespace tessera
