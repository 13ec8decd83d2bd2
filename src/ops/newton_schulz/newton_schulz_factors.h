#pragma once

namespace tessera {

/// What the CPU's and the GPU's kernels share.
struct NewtonSchulzFactors {
  // Of the polynomial, by Jordan and others.
  static constexpr float kA = 3.4445F;
  static constexpr float kB = -4.7750F;
  static constexpr float kC = 2.0315F;
  static constexpr double kEps = 1e-7;  ///< beside the norm
  static constexpr int kSums = 16;      ///< parts of a matrix's sum of squares on a GPU
};

}  // namespace tessera
