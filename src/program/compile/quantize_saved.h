#pragma once

#include "program/differentiate.h"

namespace tessera {

/// Keeps in FP8, quantized by rows, what the backward program reads of the forward program's values
/// where it can read it so (ReadsScaledRows): inputs of activations whose results a Quantize takes,
/// which says how. The forward program reads the values as before, so its numbers stay as they are;
/// gradients are those at the rounded inputs, whichever values are recomputed. Sources:
/// DeepSeek-V3, section 3.3.3; MegaScale-MoE, section 5 (inputs of SwiGLU are cached in FP8).
void quantize_saved(Program& forward, Backward& backward);

/// Drops saved rows of FP8 that a Permute made of fewer, where less is kept then: the backward
/// program permutes them again. Exchanges are not repeated.
Backward permute_again(const Program& forward, const Backward& backward);

}  // namespace tessera
