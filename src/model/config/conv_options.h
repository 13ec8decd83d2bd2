#pragma once

#include "model/config/config.h"

namespace tessera {

/// Binds the keys of [conv].
void add_conv_options(ConfigSchema& schema, ConvConfig& conv);

}  // namespace tessera
