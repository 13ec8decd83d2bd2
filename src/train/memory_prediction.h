#pragma once

#include <cstdint>

#include "train/model_state.h"

namespace tessera {

/// Bytes of one rank of a training run, known before any is taken: of the device's memory.
struct MemoryPrediction {
  /// In use before training: on the host code, libraries and their scratch, the data's index; on a
  /// GPU what its driver and other programs take.
  int64_t program = 0;
  int64_t data = 0;  ///< in the host's memory: what batches are read from, at most
  ModelState::Bytes state;
  ActivationBytes activations;
  int64_t total() const { return program + data + state.total() + activations.total(); }
};

/// What training will take, from what the device has in use now. REQUIRES that libraries are loaded
/// (a matrix product was measured) and that the model and its state are not yet bound or made.
/// `data_bytes` counts on the host alone. Throws UserError where a GPU has less.
MemoryPrediction predict_memory(const Settings& settings, const RunLayout& layout,
                                const TrainingModel& model, const Backend& backend,
                                int64_t data_bytes);

/// Refuses what does not fit a device of `device_bytes`, with what is asked for and what is free.
void require_memory(const MemoryPrediction& prediction, const std::string& device,
                    int64_t device_bytes);

}  // namespace tessera
