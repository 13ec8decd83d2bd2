#pragma once

#include <map>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "train/setup/settings.h"
#include "train/trainer/trainer.h"

namespace tessera {

/// A tensor of the whole model, gathered from the ranks that own its parts.
struct WholeTensor {
  Shape shape;
  std::vector<float> values;
};
using WholeTensors = std::map<std::string, WholeTensor>;

/// Adds a rank's parts. What nobody gathers stays no number, which agrees with nothing.
void gather_parts(const std::vector<NamedSlice>& slices, WholeTensors& whole);

/// What a run of a few steps leaves to be compared.
struct RunRecord {
  WholeTensors start;      ///< weights before the first step
  WholeTensors gradients;  ///< of the first step, summed over ranks, before clipping
  WholeTensors weights;    ///< after the last step
  WholeTensors biases;     ///< of experts, after the last step
  std::vector<StepOutcome> outcomes;
  std::vector<std::vector<std::vector<int64_t>>> loads;  ///< by step: assignments to each expert
  /// Weights and biases of which, after the last step, some rank's copy is not to the bit what the
  /// rank that owns the part has; sorted.
  std::vector<std::string> diverged;
  double seconds = 0;
};

/// Names of those of a rank's parts that are not what the whole tensors have there, once rounded to
/// the part's type.
std::vector<std::string> list_diverged(const std::vector<NamedSlice>& held, WholeTensors& whole);

/// Trains `steps` steps of these settings, which name a token file, in F32 on ranks that are
/// threads of this process.
RunRecord record_run(const Settings& settings, int64_t num_ranks, int64_t steps,
                     const DeviceChooser& choose = choose_host);

}  // namespace tessera
