#include "model/config/conv_options.h"

#include "ops/short_conv/short_conv.h"

namespace tessera {

void add_conv_options(ConfigSchema& schema, ConvConfig& conv) {
  schema.add("conv.size", &conv.size, "Tokens of the convolution of layers in model.conv_layers",
             between(1, ShortConv::kMaxTaps));
  schema.add("conv.bias", &conv.bias,
             "Biases of that convolution, and of the projections into the mixer and out of it");
}

}  // namespace tessera
