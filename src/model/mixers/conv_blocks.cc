#include "model/mixers/conv_blocks.h"

#include "model/build/sequence_exchange.h"
#include "model/mixers/short_conv_block.h"
#include "ops/multiply/multiply.h"

namespace tessera {
namespace {

ValueId project(LayerBuilder& builder, const std::string& name, ValueId x) {
  const int64_t hidden = builder.config.hidden_size;
  return builder.column_linear("conv." + name, x, builder.head_rows({hidden, hidden}).slice, 1,
                               builder.config.conv.bias, "conv_" + name);
}

/// The convolution itself, without an activation; its channels are heads.
ValueId convolve(LayerBuilder& builder, ValueId x) {
  const ConvConfig& conv = builder.config.conv;
  const int64_t hidden = builder.config.hidden_size;
  const ValueId y = build_short_conv(builder,
                                     {.weight = "conv.conv",
                                      .num_heads = hidden,
                                      .taps = conv.size,
                                      .biased = conv.bias,
                                      .silu = false},
                                     x, "conv_out");
  return scatter_sequences(builder, y, hidden / builder.tp(), "conv_out");
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
