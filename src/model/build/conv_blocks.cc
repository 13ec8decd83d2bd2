#include "model/build/conv_blocks.h"

#include "ops/multiply/multiply.h"
#include "ops/short_conv/short_conv.h"
#include "ops/short_conv/short_conv_batch.h"

namespace tessera {
namespace {

ValueId project(LayerBuilder& builder, const std::string& name, ValueId x) {
  const int64_t hidden = builder.config.hidden_size;
  return builder.column_linear("conv." + name, x, builder.head_rows({hidden, hidden}).slice, 1,
                               builder.config.conv.bias, "conv_" + name);
}

/// The convolution itself, without an activation.
ValueId convolve(LayerBuilder& builder, ValueId x) {
  const ConvConfig& conv = builder.config.conv;
  const int64_t hidden = builder.config.hidden_size;
  const ValueId weight =
      builder.f32_weight("conv.conv.weight", builder.head_rows({hidden, conv.size}));
  Program& program = builder.program();
  std::vector<ValueId> inputs = {x, weight};
  if (builder.has_slots()) {
    builder.add_slots(inputs);
  } else {
    inputs.push_back(builder.port(builder.cache ? Port::kStart : Port::kCuSeqlens));
  }
  if (conv.bias)
    inputs.push_back(builder.f32_weight("conv.conv.bias", builder.head_rows({hidden})));
  const ShortConvSpec spec{.biased = conv.bias, .silu = false};
  if (!builder.cache) return program.add1(make_short_conv(spec), inputs, "conv_out");
  const OperatorPtr goes_on = builder.has_slots()
                                  ? make_short_conv_batch(builder.cache->num_slots, spec)
                                  : make_short_conv_cached(spec);
  return program.add(goes_on, inputs, {"conv_out"}, {builder.port(Port::kValueConvState)})[0];
}

}  // namespace

ValueId build_conv(LayerBuilder& builder, ValueId normed) {
  const ValueId gathered = builder.gather_tokens(normed, "conv_in");
  const ValueId before = project(builder, "b", gathered);
  const ValueId after = project(builder, "c", gathered);
  const ValueId x = project(builder, "x", gathered);
  Program& program = builder.program();
  const ValueId gated = program.add1(make_multiply(), {x, before}, "conv_gated_in");
  const ValueId y = program.add1(make_multiply(), {convolve(builder, gated), after}, "conv_gated");
  const int64_t hidden = builder.config.hidden_size;
  return builder.row_linear("conv.o", y, hidden, hidden, builder.config.conv.bias,
                            "conv_projected");
}

}  // namespace tessera
