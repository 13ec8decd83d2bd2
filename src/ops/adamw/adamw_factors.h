#pragma once

#include <cstdint>

namespace tessera {

/// What one step of AdamW multiplies by, worked out in double: the operator's input `factors`.
struct alignas(16) AdamWFactors {
  float decay;
  float new_m;
  float old_v;
  float new_v;
  float sqrt_bias2;
  float eps;
  float step_size;
  uint32_t update;  ///< its number, for what is rounded stochastically
};

/// What gradients are multiplied by, and whether the step is left out: the operator's input
/// `grad_scale`, which GradClip makes.
struct alignas(8) AdamWGradScale {
  float scale;
  float found_inf;  ///< not 0: nothing is updated
};

}  // namespace tessera
