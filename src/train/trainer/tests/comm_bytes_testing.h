#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <mutex>
#include <string>

#include "comm/thread/thread_world.h"
#include "core/file/file.h"
#include "data/token_file_writer.h"
#include "train/trainer/trainer.h"
#include "train/verify/verify.h"

/// What a training step sends, beside formulas. These are those of the papers for n ranks, four
/// where nothing else is said: with two, n - 1 and n / 2 are the same. Letters are theirs: b·s
/// tokens of the n ranks together, h their width, k = K.
namespace tessera::testing {

inline constexpr int64_t kF32 = 4;
inline constexpr int64_t kLayers = 2;
inline constexpr int64_t kHidden = 16;
inline constexpr int64_t kSequence = 16;
inline constexpr int64_t kMicroBatch = 2;
inline constexpr int64_t kTokens = kMicroBatch * kSequence;  // T, of a micro-batch

/// Bytes of a training step, by group and kind, summed over the ranks.
class StepBytes {
 public:
  StepBytes(Settings settings, int64_t num_ranks) {
    const std::filesystem::path folder =
        std::filesystem::temp_directory_path() / unique_name("tessera-bytes-test-");
    settings = without_data(std::move(settings));
    settings.data.tokens = (folder / "tokens").string();
    settings.run.folder = (folder / "run").string();
    TokenFileWriter writer(settings.data.tokens, settings.model.vocab_size);
    writer.append(std::vector<int32_t>(1000, 1));
    writer.end_document();
    writer.finish();
    std::mutex mutex;
    run_thread_world(num_ranks, [&](World& world) {
      Settings own = settings;
      TrainingData data = open_training_data(own);
      Trainer trainer(own, std::move(data), world);
      trainer.resume("");
      world.statistics().clear();
      trainer.step();
      trainer.state().wait_weights();
      const std::scoped_lock lock(mutex);
      for (const auto& [key, count] : world.statistics().counts()) bytes_[key] += count.bytes;
    });
    std::filesystem::remove_all(folder);
  }

  int64_t operator()(const std::string& group, CommKind kind) const {
    const auto found = bytes_.find({group, kind});
    return found == bytes_.end() ? 0 : found->second;
  }
  /// Of all groups whose names begin so.
  int64_t of_groups(const std::string& prefix, CommKind kind) const {
    int64_t total = 0;
    for (const auto& [key, bytes] : bytes_)
      total += key.first.starts_with(prefix) && key.second == kind ? bytes : 0;
    return total;
  }

 private:
  std::map<CommStatistics::Key, int64_t> bytes_;
};

inline Settings small_settings() {
  Settings settings;
  settings.model.vocab_size = 40;
  settings.model.hidden_size = kHidden;
  settings.model.num_layers = kLayers;
  settings.model.num_heads = 4;
  settings.model.num_kv_heads = 2;
  settings.model.head_size = 4;
  settings.model.inner_size = 24;
  settings.model.moe.num_experts = 0;
  settings.data.sequence_length = kSequence;
  settings.train.micro_batch = kMicroBatch;
  settings.train.global_batch = kMicroBatch;
  settings.train.steps = 2;
  settings.schedule.num_steps = 2;
  return settings;
}

}  // namespace tessera::testing
