#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "model/weights/rounding_history.h"
#include "train/setup/device_choice.h"
#include "train/setup/settings.h"

namespace tessera {
class Trainer;
}  // namespace tessera

namespace tessera::testing {

/// A layout by name, with the ranks that it takes.
struct NamedLayout {
  std::string name;
  int64_t num_ranks = 1;
  ParallelSpec parallel;
  ShardSettings shard = {};
};

/// Layouts that have little in common: each axis alone, folded and combined.
std::vector<NamedLayout> layouts_for_checkpoints();

/// Writes random documents to settings.data.tokens, unless they are there.
void write_tokens(const Settings& settings);

/// A small MoE model that all of them can run, with expert biases, shared experts, a tied head and
/// multi-token prediction.
/// Its tokens are in `folder`, where they are made if need be.
Settings settings_for_layouts(const std::filesystem::path& folder);

/// What a run leaves.
struct RunEnd {
  std::vector<double> losses;  ///< of the steps that it ran
  std::vector<float> weights;  ///< of all parameters, whole, by name
  /// With delayed scales: rank 0's history, layer by layer; the same on all ranks.
  std::vector<float> roundings = {};
};

std::vector<float> list_roundings(const RoundingHistory& history);

/// Opens the run in settings.run.folder on that layout, ranks being threads, lets each use its
/// trainer, and returns all parameters, whole, by name.
std::vector<float> run_ranks(Settings settings, const NamedLayout& layout,
                             const DeviceChooser& choose,
                             const std::function<void(Trainer&, int64_t rank)>& use);

/// Continues the run in settings.run.folder (or starts it) up to `steps` steps on that layout,
/// ranks being threads; saves at the end where `save`.
RunEnd run_steps(Settings settings, const NamedLayout& layout, int64_t steps, bool save,
                 const DeviceChooser& choose = choose_host);

/// Alike to the bit.
void expect_same_end(const RunEnd& found, const RunEnd& expected);

}  // namespace tessera::testing
