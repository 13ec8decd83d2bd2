#pragma once

#include <functional>
#include <optional>

#include "train/setup/machine.h"

namespace tessera {

/// The rate that steps are compared with, in FLOP/s: the best of what large matrix products were
/// measured at and of what steps reached themselves. A step that beats what was measured shows that
/// the measurement was disturbed, so it is repeated.
class MatrixPeak {
 public:
  using Measure = std::function<double()>;

  /// `measured` is the first measurement, above 0. `measure` makes another; empty where none can be
  /// made.
  explicit MatrixPeak(double measured, Measure measure = {});

  /// What share of the peak a step at this rate has, 0..1. Measures again where the rate is higher
  /// than the peak, at most kMaxMeasurements times in all, so that a run is hardly delayed.
  double share_of(double rate);
  double value() const { return peak_; }

  static constexpr int kMaxMeasurements = 4;

 private:
  double peak_;
  Measure measure_;
  int num_measurements_ = 0;
};

/// The peak of a back end on which products were measured at this rate. On a GPU, without `meter`,
/// it is not measured again, since a large product may not fit beside the model.
MatrixPeak make_matrix_peak(double measured, const std::optional<MatrixPeakMeter>& meter);

}  // namespace tessera
