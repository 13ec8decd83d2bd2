#pragma once

#include <memory>
#include <optional>
#include <string>

#include "core/dtype.h"
#include "ops/backend.h"

namespace tessera {

class PeakProducts;

/// The rate of large matrix products of this type on all threads, in FLOP/s: the best of several
/// shapes and runs, some tenths of a second in all. What utilisation is measured against.
double measure_matrix_peak(DType dtype);
/// The same within a run: of smaller products, whose memory stays from one measurement to the next,
/// so that a prediction counts it as in use before.
class MatrixPeakMeter {
 public:
  /// Makes each kind of product that a step may make once, too: libraries compile a kernel when it
  /// is first asked for, and threads keep scratch memory.
  explicit MatrixPeakMeter(DType dtype);
  double measure() const;

 private:
  std::shared_ptr<const PeakProducts> products_;
};

/// Of the host; a GPU has none.
std::optional<MatrixPeakMeter> make_peak_meter(const Backend& backend, DType dtype);

/// The same on a back end's device: of 8192 cubed in BF16, 4096 cubed in F32, the best of ten.
double measure_matrix_peak(const Backend& backend, DType dtype);

/// "AMD EPYC, 2 threads, 23.4 GiB".
std::string describe_machine();

/// What the network calls it.
std::string machine_name();

/// Bytes of memory of this machine.
int64_t machine_memory();

/// Bytes of memory that programs may still take, as Linux estimates them (MemAvailable).
int64_t available_memory();

}  // namespace tessera
