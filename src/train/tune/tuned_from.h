#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "train/run/train_loop.h"

namespace tessera {

/// What a tuned run learns from beside its configuration, as hashes; "" for none.
struct TunedFrom {
  std::string examples;   ///< of the file of pairs or prompts
  std::string reference;  ///< of the checkpoint that the model is compared with

  bool operator==(const TunedFrom&) const = default;
};

/// Of the run's file of pairs or prompts; "" where it has none.
std::string hash_examples(const Settings& settings);
/// Of a checkpoint, by the hashes in its manifest; "" for an empty path.
std::string hash_checkpoint(const std::filesystem::path& checkpoint);

/// Keeps in a run's folder what it learns from. Of a run that continues, returns what the user
/// should know: what is no longer as it was when the run began.
std::vector<std::string> compare_tuned_from(const Settings& settings, bool continues,
                                            const TunedFrom& now);

/// The same, told by the run.
void note_tuned_from(TrainingRun& run, const TunedFrom& now);

}  // namespace tessera
