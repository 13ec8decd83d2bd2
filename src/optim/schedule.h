#pragma once

#include <cstdint>

namespace tessera {

enum class ScheduleKind {
  kConstant,
  kCosine,  ///< half a cosine from the peak to the minimum
  kLinear,  ///< a line from the peak to the minimum
  kWsd,     ///< warm-up, stable, decay: the peak until the last `decay_fraction` of the steps
};

/// How the WSD schedule falls over its decay.
enum class DecayShape {
  kLinear,
  kOneMinusSqrt,  ///< 1 - sqrt(progress), as in Hägele et al., "Scaling Laws and Compute-Optimal
                  ///< Training", 2024
};

/// A learning-rate schedule over `num_steps` steps. The first `warmup_steps` rise in a line: step
/// i, counted from 0, has peak_lr · (i + 1) / warmup_steps, so that no step is lost at rate 0 and
/// the last of them has the peak. Then step i has progress (i - start) / (num_steps - start), where
/// start is the end of the warm-up, or of the stable part for kWsd: the first step of a decay has
/// the peak, and min_lr_ratio · peak_lr would be reached at step num_steps. Later steps stay at
/// that minimum.
struct ScheduleSpec {
  ScheduleKind kind = ScheduleKind::kCosine;
  double peak_lr = 1e-3;
  int64_t num_steps = 0;
  int64_t warmup_steps = 0;
  double min_lr_ratio = 0.1;
  double decay_fraction = 0.2;
  DecayShape decay_shape = DecayShape::kLinear;
};

/// Throws UserError where the numbers do not fit together.
void validate(const ScheduleSpec& spec);

/// The learning rate of step `step_idx`, counted from 0. REQUIRES: validate(spec) passed and
/// step_idx >= 0.
double learning_rate(const ScheduleSpec& spec, int64_t step_idx);

/// The steps of a WSD schedule's decay: decay_fraction · num_steps, rounded, at least 1.
int64_t decay_steps(const ScheduleSpec& spec);

}  // namespace tessera
