#pragma once

#include <cstdint>

#include "train/setup/run_layout.h"

namespace tessera {

/// Bytes of a GPU's memory that a run takes beside what it plans: those of kernels, which CUDA
/// loads when they are first called, of NCCL's communicators with the buffers that sums of BF16 go
/// through, and of CUDA graphs. All are estimates from measured figures; 0 on the host.
struct DeviceOverhead {
  int64_t kernels = 0;
  int64_t communication = 0;
  int64_t graphs = 0;
  int64_t total() const { return kernels + communication + graphs; }
};

/// Whether steps are short enough to be recorded as a whole, where nothing in them needs the host:
/// a rank alone, which updates on its device, and not so many operators that they would take much
/// memory.
bool records_whole_steps(const Settings& settings, const RunLayout& layout,
                         const TrainingModel& model);

/// All that a run will take in a process that has called no kernels but those of matrix products;
/// of a layout whose groups NCCL has made already, what comes on top.
DeviceOverhead predict_overhead(const Settings& settings, const RunLayout& layout,
                                const TrainingModel& model, const Backend& backend,
                                bool groups_are_made = false);

}  // namespace tessera
