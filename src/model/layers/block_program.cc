#include "model/layers/block_program.h"

#include "model/experts/mlp_blocks.h"
#include "model/experts/moe_blocks.h"
#include "model/layers/layer_program.h"
#include "model/mixers/delta_blocks.h"

namespace tessera {
namespace {

ValueId add_block(LayerBuilder& builder, LayerBlock block, ValueId normed) {
  switch (block) {
    case LayerBlock::kAttention:
      return build_mixer(builder, normed);
    case LayerBlock::kMlp:
      return build_mlp(builder, "mlp", normed, builder.config.dense_inner_size());
    case LayerBlock::kMoe:
      break;
  }
  return build_moe(builder, normed, normed);
}

}  // namespace

ModelProgram build_block(const ModelConfig& config, LayerBlock block, LayerKind kind,
                         const BatchShape& shape, const StageGroups& groups) {
  const bool has_block = block == LayerBlock::kAttention
                             ? !kind.no_mixer
                             : !kind.no_mlp && kind.moe == (block == LayerBlock::kMoe);
  ensure(has_block, "a {} has no such block", layer_kind_name(kind));
  ModelProgram result{.forward = Program("block")};
  ModelConfig own = config.of_layer(kind);
  own.residual_streams = 1;  // what a block reads of them
  LayerBuilder builder{own, kind, shape, groups, result};
  const ValueId out = add_block(builder, block, builder.port(Port::kHidden));
  result.ports.set(Port::kHiddenOut, out);
  set_port_outputs(result.forward, result.ports);
  return result;
}

}  // namespace tessera
