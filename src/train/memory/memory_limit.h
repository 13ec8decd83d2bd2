#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "train/setup/run_layout.h"

namespace tessera {

/// What each rank may take, as `inspect --memory` counts it.
struct MemoryLimit {
  int64_t bytes = 0;  ///< of its device
  /// Of the host's memory what a rank may have with activations there.
  int64_t host_bytes = std::numeric_limits<int64_t>::max();
  /// Where train.memory_limit is "auto": the device that has no more. Then a choice is made only
  /// where it must be, and leaves `spare` for what no prediction knows and room for routing that is
  /// not balanced.
  std::string device = {};
  int64_t spare = 0;

  bool is_of_device() const { return !device.empty(); }
};

/// How many times the rows of balanced routing a choice for a device leaves room for.
constexpr double kExpectedSkew = 1.25;

/// What train.memory_limit says in bytes; nothing for "auto" and "none".
std::optional<MemoryLimit> given_limit(const TrainSettings& train);

/// Whether what does not fit the device is recomputed or offloaded without being asked for: on GPUs
/// with train.memory_limit "auto", unless the configuration says itself what is. On the CPU not:
/// other programs and ranks share its memory, which cannot be told apart from what is free.
bool chooses_for_device(const TrainSettings& train, const Backend& backend);

/// A limit for a run that is planned, of which `num_here` ranks have a device of that many bytes
/// each on this machine.
MemoryLimit limit_of_device(const std::string& device, int64_t device_bytes, int64_t num_here);

/// The bytes that this rank may take of a device of `device_bytes`, from what is in use of it now:
/// by other programs, the driver, libraries and groups of NCCL that are made.
int64_t find_room(const Settings& settings, const RunLayout& layout, const TrainingModel& model,
                  const Backend& backend, int64_t device_bytes);

/// The limit that all ranks keep to where one of them does not fit its device as it is: the least
/// room that one has; nothing where all fit. The same on all ranks, who all call.
std::optional<MemoryLimit> find_lacking(bool fits, int64_t room, const Device& device,
                                        int64_t device_bytes, Communicator& world);

}  // namespace tessera
