#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"

namespace tessera {
namespace {

int64_t decay_start(const ScheduleSpec& spec) {
  return spec.kind == ScheduleKind::kWsd ? spec.num_steps - decay_steps(spec) : spec.warmup_steps;
}

/// From 1 at progress 0 to 0 at progress 1.
double height(const ScheduleSpec& spec, double progress) {
  switch (spec.kind) {
    case ScheduleKind::kConstant:
      return 1.0;
    case ScheduleKind::kCosine:
      return 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
    case ScheduleKind::kLinear:
      return 1.0 - progress;
    case ScheduleKind::kWsd:
      return 1.0 - (spec.decay_shape == DecayShape::kLinear ? progress : std::sqrt(progress));
  }
  throw InternalError("unknown schedule kind");
}

void validate_wsd(const ScheduleSpec& spec) {
  require(spec.decay_fraction > 0.0 && spec.decay_fraction <= 1.0,
          "schedule: decay_fraction must be above 0 and at most 1, got {}", spec.decay_fraction);
  const int64_t decay = decay_steps(spec);
  require(
      spec.warmup_steps <= spec.num_steps - decay,
      "schedule: {} warm-up steps and {} decay steps ({} of {}) do not fit into {} steps; lower "
      "warmup_steps or decay_fraction",
      spec.warmup_steps, decay, spec.decay_fraction, spec.num_steps, spec.num_steps);
}

}  // namespace

int64_t decay_steps(const ScheduleSpec& spec) {
  const double steps = spec.decay_fraction * static_cast<double>(spec.num_steps);
  return std::max<int64_t>(1, std::llround(steps));
}

void validate(const ScheduleSpec& spec) {
  require(std::isfinite(spec.peak_lr) && spec.peak_lr >= 0.0,
          "schedule: the learning rate must be finite and at least 0, got {}", spec.peak_lr);
  require(spec.num_steps >= 1, "schedule: the number of steps must be at least 1, got {}",
          spec.num_steps);
  require(spec.warmup_steps >= 0 && spec.warmup_steps <= spec.num_steps,
          "schedule: warmup_steps must be from 0 to the number of steps, {}, got {}",
          spec.num_steps, spec.warmup_steps);
  require(spec.min_lr_ratio >= 0.0 && spec.min_lr_ratio <= 1.0,
          "schedule: min_lr_ratio must be from 0 to 1, got {}", spec.min_lr_ratio);
  if (spec.kind == ScheduleKind::kWsd) validate_wsd(spec);
}

double learning_rate(const ScheduleSpec& spec, int64_t step_idx) {
  ensure(step_idx >= 0, "schedule: step {} is negative", step_idx);
  if (step_idx < spec.warmup_steps) {
    return spec.peak_lr * static_cast<double>(step_idx + 1) /
           static_cast<double>(spec.warmup_steps);
  }
  const int64_t start = decay_start(spec);
  if (step_idx < start) return spec.peak_lr;
  const auto span = static_cast<double>(std::max<int64_t>(1, spec.num_steps - start));
  const double progress = std::min(1.0, static_cast<double>(step_idx - start) / span);
  const double minimum = spec.kind == ScheduleKind::kConstant ? 1.0 : spec.min_lr_ratio;
  return spec.peak_lr * (minimum + (1.0 - minimum) * height(spec, progress));
}

}  // namespace tessera
