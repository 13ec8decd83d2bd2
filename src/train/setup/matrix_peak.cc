#include "train/setup/matrix_peak.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace tessera {

MatrixPeak::MatrixPeak(double measured, Measure measure)
    : peak_(measured), measure_(std::move(measure)) {
  ensure(measured > 0, "matrix products were measured at {} FLOP/s", measured);
}

double MatrixPeak::share_of(double rate) {
  if (rate > peak_ && measure_ && num_measurements_ < kMaxMeasurements) {
    ++num_measurements_;
    peak_ = std::max(peak_, measure_());
  }
  peak_ = std::max(peak_, rate);
  return rate / peak_;
}

MatrixPeak make_matrix_peak(double measured, const std::optional<MatrixPeakMeter>& meter) {
  if (!meter) return MatrixPeak(measured);
  return MatrixPeak(measured, [meter = *meter] { return meter.measure(); });
}

}  // namespace tessera
