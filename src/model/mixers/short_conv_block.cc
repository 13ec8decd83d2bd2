#include "model/mixers/short_conv_block.h"

#include "model/build/sequence_exchange.h"
#include "ops/short_conv/short_conv.h"
#include "ops/short_conv/short_conv_batch.h"

namespace tessera {
namespace {

/// Of the rank's own heads among those of its weights.
ShortConvSpec conv_spec(const LayerBuilder& builder, const ShortConvBlock& block) {
  ShortConvSpec spec{.biased = block.biased, .silu = block.silu};
  if (sequence_parts(builder.groups) == 1) return spec;
  const int64_t heads = block.num_heads / builder.tp();
  spec.all_channels = heads * block.head_size;
  spec.first_channel = sequence_heads(builder.groups, heads).begin * block.head_size;
  return spec;
}

}  // namespace

ValueId build_short_conv(LayerBuilder& builder, const ShortConvBlock& block, ValueId x,
                         const std::string& result) {
  const int64_t width = block.num_heads * block.head_size;
  const ValueId gathered =
      gather_sequences(builder, x, block.num_heads / builder.tp(), result + "_in");
  std::vector<ValueId> inputs = {
      gathered,
      builder.f32_weight(block.weight + ".weight", builder.head_rows({width, block.taps}))};
  if (builder.has_slots()) {
    builder.add_slots(inputs);
  } else {
    inputs.push_back(builder.port(builder.cache ? Port::kStart : Port::kCuSeqlens));
  }
  if (block.biased)
    inputs.push_back(builder.f32_weight(block.weight + ".bias", builder.head_rows({width})));
  const ShortConvSpec spec = conv_spec(builder, block);
  Program& program = builder.program();
  if (!builder.cache) return program.add1(make_short_conv(spec), inputs, result);
  const OperatorPtr goes_on = builder.has_slots()
                                  ? make_short_conv_batch(builder.cache->num_slots, spec)
                                  : make_short_conv_cached(spec);
  return program.add(goes_on, inputs, {result}, {builder.port(block.state)})[0];
}

}  // namespace tessera
