#pragma once

#include "program/differentiate.h"

namespace tessera {

/// Keeps what a Quantize made of a value in the forward program in place of the value, where the
/// backward program does nothing with that but quantize it alike. The numbers do not change.
Backward keep_quantized(const Program& forward, const Backward& backward);

}  // namespace tessera
