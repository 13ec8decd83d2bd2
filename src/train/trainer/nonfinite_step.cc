#include "train/trainer/nonfinite_step.h"

#include <fmt/format.h>

#include <cmath>

namespace tessera {
namespace {

[[noreturn]] void refuse_smallest_scale(int64_t step, double scale) {
  throw TrainingStopped(fmt::format(
      "step {}: gradients are NaN or infinite with a loss scale of {}, the smallest "
      "(precision.min_loss_scale); nothing was updated. Lower optim.learning_rate, leave products "
      "in F32 (precision.plain), or set train.precision = \"bf16\"; with train.on_nonfinite = "
      "\"skip\" training goes on, and leaves such steps out. The last checkpoint is whole",
      step, scale));
}

}  // namespace

void refuse_nonfinite(const Settings& settings, int64_t steps_done,
                      const std::optional<LossScaler>& scaler, const StepOutcome& outcome) {
  const bool bad = !std::isfinite(outcome.loss) || outcome.skipped();
  if (!bad || settings.train.on_nonfinite == NonFinite::kSkip) return;
  if (scaler && scaler->is_dynamic() && std::isfinite(outcome.loss)) {
    if (!scaler->is_exhausted()) return;
    refuse_smallest_scale(steps_done + 1, scaler->scale());
  }
  throw TrainingStopped(fmt::format(
      "step {}: the loss is {} and the gradient norm {}; {}. Lower "
      "optim.learning_rate, set "
      "train.max_grad_norm, or set train.on_nonfinite = \"skip\" to leave such steps out; the last "
      "checkpoint is whole",
      steps_done + 1, outcome.loss, outcome.update.grad_norm,
      settings.shard.release_gradients ? "layers with finite gradients were updated, others not"
                                       : "nothing was updated"));
}

std::optional<LossScaleState> saved_state(const std::optional<LossScaler>& scaler) {
  return scaler && scaler->is_dynamic() ? std::optional(scaler->state()) : std::nullopt;
}

}  // namespace tessera
