#pragma once

namespace tessera {

/// What one step of AdamW multiplies by, worked out in double from the step's parameters.
struct AdamWFactors {
  float grad_scale;
  float decay;
  float new_m;
  float old_v;
  float new_v;
  float sqrt_bias2;
  float eps;
  float step_size;
};

}  // namespace tessera
