#pragma once

#include <cstdint>

namespace tessera {

/// By what losses are multiplied before the backward pass, so that gradients in F16 do not
/// underflow. Scales are powers of two, so that dividing by them again is exact.
struct LossScaling {
  double constant = 0;  ///< a scale that stays; 0: it follows the gradients
  double initial = 65536;
  double minimum = 1;
  int64_t window = 2000;   ///< steps in a row with finite gradients after which it doubles
  int64_t hysteresis = 1;  ///< steps without, since it last doubled, from which on it is halved

  bool is_dynamic() const { return constant == 0; }
};

/// Scales do not grow beyond this: losses times it are numbers of F32.
inline constexpr double kLargestLossScale = 0x1p64;

/// Whether it is a power of two from 1 to kLargestLossScale.
bool is_loss_scale(double scale);

/// Throws UserError, naming the keys, for scales that are no powers of two from 1 to
/// kLargestLossScale, and an initial one below the minimum.
void validate(const LossScaling& scaling);

/// Where a dynamic scale stands, as a checkpoint holds it.
struct LossScaleState {
  double scale = 1;
  int64_t good_steps = 0;  ///< in a row, since the scale last changed
  int64_t tolerance = 1;   ///< steps that have to fail until the scale is halved

  bool operator==(const LossScaleState&) const = default;
};

/// The scale of a run, step by step. Sources: torch.amp.GradScaler (a hysteresis of 1), and
/// DynamicGradScaler of Megatron-LM (megatron/core/optimizer/grad_scaler.py).
class LossScaler {
 public:
  /// REQUIRES validate(scaling).
  explicit LossScaler(const LossScaling& scaling);

  bool is_dynamic() const { return scaling_.is_dynamic(); }
  double scale() const { return state_.scale; }
  const LossScaleState& state() const { return state_; }
  /// Goes on from there; a constant scale stays as it is. What the options no longer allow becomes
  /// the nearest that they do.
  void restore(const LossScaleState& state);
  /// Whether a step that fails now leaves the scale where it is for good.
  bool is_exhausted() const { return state_.scale <= scaling_.minimum && state_.tolerance <= 1; }
  /// After a step with this scale, whose gradients were all finite or not.
  void update(bool finite);

 private:
  LossScaling scaling_;
  LossScaleState state_;
};

}  // namespace tessera
