#pragma once

namespace tessera {

/// The words, I32, of what routers' random numbers depend on beside their tokens: of a step and a
/// layer.
enum NoiseWord : int {
  kNoiseKeyLow,
  kNoiseKeyHigh,
  kNoiseSize,      ///< eps, the bits of an F32 number
  kNoiseTraining,  ///< 1 in training, else 0
  kNumNoiseWords
};

}  // namespace tessera
