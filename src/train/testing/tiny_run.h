#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "core/file/file.h"
#include "core/host_tensor.h"
#include "core/random.h"
#include "train/trainer/trainer.h"

namespace tessera::testing {

/// A folder that goes away with the test.
class TemporaryFolder {
 public:
  TemporaryFolder()
      : path_(std::filesystem::temp_directory_path() / unique_name("tessera-trainer-test-")) {
    std::filesystem::create_directories(path_);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

inline void write_words(const std::string& path) {
  const std::vector<std::string> words = {"the ", "cat ", "sat ",   "on ", "a ",
                                          "mat ", "and ", "slept ", ".\n"};
  Random random(1, 1);
  std::ofstream file(path);
  for (int i = 0; i < 6000; ++i) file << words[random.next_below(words.size())];
}

/// Settings of a model that steps in milliseconds on the host.
inline Settings tiny_settings(const TemporaryFolder& folder) {
  Settings settings;
  settings.model.hidden_size = 32;
  settings.model.num_layers = 2;
  settings.model.num_heads = 2;
  settings.model.moe = {.num_experts = 4, .top_k = 2, .inner_size = 32};
  settings.data.text = folder.file("text.txt");
  settings.data.sequence_length = 16;
  settings.train.steps = 8;
  settings.train.micro_batch = 2;
  settings.train.global_batch = 4;
  settings.schedule = {
      .kind = ScheduleKind::kCosine, .peak_lr = 1e-2, .num_steps = 8, .warmup_steps = 2};
  settings.run.folder = folder.file("run");
  settings.run.device = DeviceChoice::kCpu;
  if (!std::filesystem::exists(settings.data.text)) write_words(settings.data.text);
  return settings;
}

/// A run on one rank, continued where its folder has a checkpoint.
inline std::unique_ptr<Trainer> make_trainer(Settings settings) {
  TrainingData data = open_training_data(settings);
  auto trainer = std::make_unique<Trainer>(std::move(settings), std::move(data));
  trainer->resume("");
  return trainer;
}

/// The same bits in weights, expert biases and the optimizer's state, wherever they are.
inline void expect_same_state(Trainer& a, Trainer& b) {
  const auto compare = [](const std::vector<NamedSlice>& left,
                          const std::vector<NamedSlice>& right) {
    ASSERT_EQ(left.size(), right.size());
    for (size_t i = 0; i < left.size(); ++i) {
      const HostTensor one(left[i].tensor, HostTensor::Access::kRead);
      const HostTensor other(right[i].tensor, HostTensor::Access::kRead);
      const size_t bytes = left[i].tensor.num_bytes();
      EXPECT_EQ(std::memcmp(one.get().data, other.get().data, bytes), 0) << left[i].name;
    }
  };
  compare(a.state().owned_model(), b.state().owned_model());
  compare(a.state().owned_optimizer(), b.state().owned_optimizer());
}

}  // namespace tessera::testing
