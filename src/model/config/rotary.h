#pragma once

#include "model/config/config.h"
#include "ops/rope/rope.h"

namespace tessera {

/// How far each pair of elements turns from one token to the next, for sequences of
/// `sequence_length` tokens, which matters to the dynamic scaling and to longrope alone:
///   linear   every frequency divided by the factor (Chen et al., "Position interpolation", 2023)
///   dynamic  a base that grows with the length beyond max_length (NTK-aware, bloc97, 2023)
///   yarn     the slow frequencies divided, the fast ones kept, a ramp between (Peng et al.,
///   "YaRN",
///            2023, section 3.2)
///   llama3   the same with borders by wavelength (Llama 3.1)
///   longrope each frequency divided by a factor of its own, one of two lists (Ding et al.,
///            "LongRoPE", 2024)
std::vector<float> inverse_frequencies(const RopeConfig& rope, int64_t rotary_dim,
                                       int64_t sequence_length);

/// What rotated elements are multiplied by: YaRN's attention factor, longrope's mscale for such
/// sequences, else 1.
double rotary_amplitude(const RopeConfig& rope, int64_t sequence_length);

/// YaRN's 0.1 · weight · ln(factor) + 1, and 1 where nothing is stretched.
double yarn_scale(double factor, double weight);

}  // namespace tessera
