#include "optim/loss_scaler.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "core/error.h"

namespace tessera {
namespace {

void check_scale(double scale, std::string_view key, std::string_view others) {
  require(is_loss_scale(scale), "{} is {}; it must be a power of two from 1 to 2^64{}", key, scale,
          others);
}

}  // namespace

bool is_loss_scale(double scale) {
  int exponent = 0;
  return scale >= 1 && scale <= kLargestLossScale && std::frexp(scale, &exponent) == 0.5;
}

void validate(const LossScaling& scaling) {
  if (!scaling.is_dynamic())
    check_scale(scaling.constant, "precision.loss_scale",
                ", or 0 for one that follows the gradients");
  check_scale(scaling.initial, "precision.initial_loss_scale", "");
  check_scale(scaling.minimum, "precision.min_loss_scale", "");
  require(scaling.minimum <= scaling.initial,
          "precision.min_loss_scale is {}, above precision.initial_loss_scale {}; lower it, or "
          "raise the other",
          scaling.minimum, scaling.initial);
}

LossScaler::LossScaler(const LossScaling& scaling)
    : scaling_(scaling),
      state_{.scale = scaling.is_dynamic() ? scaling.initial : scaling.constant,
             .good_steps = 0,
             .tolerance = scaling.hysteresis} {}

void LossScaler::restore(const LossScaleState& state) {
  if (!is_dynamic()) return;
  state_ = {.scale = std::clamp(state.scale, scaling_.minimum, kLargestLossScale),
            .good_steps = std::min(state.good_steps, scaling_.window - 1),
            .tolerance = std::min(state.tolerance, scaling_.hysteresis)};
}

void LossScaler::update(bool finite) {
  if (!is_dynamic()) return;
  if (!finite) {
    state_.good_steps = 0;
    state_.tolerance = std::max<int64_t>(state_.tolerance - 1, 0);
    if (state_.tolerance == 0) state_.scale = std::max(state_.scale / 2, scaling_.minimum);
    return;
  }
  if (++state_.good_steps < scaling_.window) return;
  state_.good_steps = 0;
  state_.tolerance = scaling_.hysteresis;
  state_.scale = std::min(state_.scale * 2, kLargestLossScale);
}

}  // namespace tessera
