#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "train/testing/layout_runs.h"
#include "train/testing/tiny_run.h"

/// Small runs in FP16.
namespace tessera::testing {

class HalfPrecision : public ::testing::Test {
 protected:
  Settings fp16(const std::string& run = "run") const {
    Settings settings = tiny_settings(folder_);
    settings.train.precision = Precision::kFp16;
    settings.run.folder = folder_.file(run);
    return settings;
  }
  Settings of_layouts(const std::string& run) const {
    Settings settings = settings_for_layouts(folder_.file(""));
    settings.train.precision = Precision::kFp16;
    settings.run.folder = folder_.file(run);
    return settings;
  }
  std::unique_ptr<Trainer> run(const Settings& settings, int64_t steps = 8) const {
    validate(settings);
    auto trainer = make_trainer(settings);
    while (trainer->position().step < steps) {
      const StepOutcome outcome = trainer->step();
      losses_.push_back(outcome.loss);
      norms_.push_back(outcome.update.grad_norm);
    }
    return trainer;
  }
  std::vector<double> take_losses() const {
    norms_.clear();
    return std::exchange(losses_, {});
  }
  static std::string to_toml(Settings settings) { return make_schema(settings).to_toml(); }
  static void save(Trainer& trainer) { trainer.save(to_toml(trainer.settings())); }

  const TemporaryFolder folder_;
  mutable std::vector<double> losses_, norms_;
};

/// All weights and the optimizer's state.
inline std::vector<float> state_of(Trainer& trainer) {
  std::vector<float> values;
  for (const auto& slices : {trainer.state().owned_model(), trainer.state().owned_optimizer()}) {
    for (const NamedSlice& slice : slices) {
      if (slice.tensor.dtype != DType::kF32) continue;
      const auto own = slice.tensor.span<float>();
      values.insert(values.end(), own.begin(), own.end());
    }
  }
  return values;
}

/// Of a weight's first moment: its gradient, after one step, but for a factor.
inline std::vector<float> moments_of(Trainer& trainer, const std::string& weight) {
  for (const NamedSlice& slice : trainer.state().owned_optimizer()) {
    if (slice.name != weight + ".m") continue;
    const auto own = slice.tensor.span<float>();
    return {own.begin(), own.end()};
  }
  ADD_FAILURE() << "no state of " << weight;
  return {};
}

inline double distance(const std::vector<float>& found, const std::vector<float>& expected) {
  double difference = 0;
  double size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(static_cast<double>(found.at(i)) - expected[i], 2);
    size += std::pow(static_cast<double>(expected[i]), 2);
  }
  return std::sqrt(difference / size);
}

inline constexpr const char* kProduct = "layers.0.attn.o.weight";

}  // namespace tessera::testing
