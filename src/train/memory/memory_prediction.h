#pragma once

#include <cstdint>
#include <string>

#include "core/out_of_memory.h"
#include "train/memory/planned_rank.h"
#include "train/setup/device_overhead.h"
#include "train/state/model_state.h"

namespace tessera {

/// Bytes of one rank of a training run, known before any is taken: of the device's memory.
struct MemoryPrediction {
  /// In use before training: on the host what the program and its libraries hold
  /// (ProcessMemory::held), with their scratch; on a GPU what its driver and other programs take.
  int64_t program = 0;
  ModelState::Bytes state;
  ActivationBytes activations;
  DeviceOverhead overhead = {};  ///< of a GPU's memory, estimated
  /// In the host's memory: the copy of the state that saves in the background are written from.
  int64_t snapshot = 0;
  /// Likewise, in files in memory, and no part of the total: copies of ranks' states.
  int64_t peer_copies = 0;
  /// Where the worst routing does not fit a GPU: how many times the rows of balanced routing may
  /// come to every layer; 0 where it fits.
  double fitting_skew = 0;
  bool on_host = true;  ///< where the state is; a GPU's memory holds nothing of `beside`
  /// In the host's memory whatever the device is.
  int64_t beside() const { return snapshot + activations.offloaded + state.on_host; }
  int64_t total() const {
    return program + state.total() + activations.total() + overhead.total() +
           (on_host ? beside() : 0);
  }
};

/// Of the copy that saves are written from: 0 where no step has to go on beside one.
int64_t snapshot_bytes(const Settings& settings, const RunLayout& layout);

/// Whether this rank's machine, of whose memory `available` bytes are free, has room for what its
/// ranks still want there, snapshots included; false on all ranks where one of them finds none. All
/// ranks of `world` call.
bool has_room_for_snapshot(const MemoryPrediction& prediction, int64_t available,
                           Communicator& world);

/// What training will take, from what the device has in use now. REQUIRES that libraries are loaded
/// (a matrix product was measured) and that the model and its state are not yet bound or made.
/// Of `device_bytes` is a GPU (0: not known); see require_memory for one that has less.
MemoryPrediction predict_memory(const Settings& settings, const RunLayout& layout,
                                const TrainingModel& model, const Backend& backend,
                                int64_t device_bytes);

/// What the planned rank takes itself, in a process that has nothing yet.
MemoryPrediction predict_memory(const Settings& settings, const PlannedRank& rank);

/// Refuses what does not fit a device of `device_bytes`, with what is asked for and what is free.
void require_memory(const MemoryPrediction& prediction, const std::string& device,
                    int64_t device_bytes);

/// ", 100 MiB kernels, 1 GiB communication, 20 MiB CUDA graphs", as far as there are any.
std::string describe_overhead(const DeviceOverhead& overhead);

/// ", 100 MiB a copy to save", and where it is beside the total, on the host of a GPU; "" for none.
std::string describe_snapshot(const MemoryPrediction& prediction);

/// ", 2 GiB offloaded activations" and ", 90 GiB offloaded optimizer state", likewise.
std::string describe_offloaded(const MemoryPrediction& prediction);

/// ", 3 GiB more where routing is the worst", and by how much it may be unbalanced; "" where every
/// routing takes as much.
std::string describe_worst(const MemoryPrediction& prediction);

/// "120 GiB were predicted at the peak: ... weights, ...".
std::string describe(const MemoryPrediction& prediction);

/// work(), with the prediction added to the error where memory cannot be had after all.
template <typename Work>
auto with_prediction(const MemoryPrediction& prediction, const Work& work) {
  try {
    return work();
  } catch (const OutOfMemory& error) {
    throw OutOfMemory(fmt::format("{}; {}", error.what(), describe(prediction)));
  }
}

}  // namespace tessera
