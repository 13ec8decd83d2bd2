#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "comm/thread/thread_world.h"
#include "train/metrics/jsonl.h"
#include "train/run/run_record.h"
#include "train/testing/tiny_run.h"
#include "train/tune/tune_run.h"

namespace tessera::testing {

/// A tiny model without data, and runs of it.
class TuneRunTest : public ::testing::Test {
 protected:
  Settings settings(const std::string& run) const {
    Settings settings = tiny_settings(folder_);
    settings.data.text.clear();
    settings.data.sequence_length = 24;
    settings.model.moe.balance_coefficient = 0;
    settings.run.folder = folder_.file(run);
    settings.run.report = settings.run.tensorboard = false;
    settings.train.validation_interval = 0;
    settings.schedule.warmup_steps = 0;
    return settings;
  }
  Settings rl_settings(const std::string& run) const {
    Settings own = settings(run);
    own.train.objective = Objective::kGrpo;
    own.rl.task = "digits";
    own.rl.max_tokens = 8;
    own.rl.group_size = 4;
    own.train.micro_batch = 4;
    own.train.global_batch = 8;
    own.train.steps = own.schedule.num_steps = 4;
    return own;
  }
  Settings dpo_settings(const std::string& run) const {
    Settings own = settings(run);
    own.train.objective = Objective::kDpo;
    own.dpo.pairs = folder_.file("pairs.jsonl");
    std::ofstream file(own.dpo.pairs);
    for (const char* prompt : {"one", "two", "three", ""})
      file << "{\"prompt\": \"" << prompt << "\", \"chosen\": \"yes\", \"rejected\": \"no no\"}\n";
    return own;
  }

  TrainRequest request(Settings settings) const {
    TrainRequest request{
        .settings = std::move(settings), .config_toml = "", .terminal = {}, .given_batches = true};
    request.config_toml = make_schema(request.settings).to_toml();
    return request;
  }
  /// The steps' records of a whole run.
  std::vector<StepRecord> run(const Settings& settings) {
    const auto tune =
        settings.train.objective == Objective::kDpo ? train_on_preferences : train_on_rewards;
    tune(request(settings), *world_, out_);
    std::vector<StepRecord> records;
    const MetricsVisitor visitor{.step = [&](const StepRecord& r) { records.push_back(r); }};
    read_metrics(settings.run.folder + "/metrics.jsonl", visitor);
    return records;
  }
  std::string refusal(const Settings& settings) {
    try {
      run(settings);
    } catch (const UserError& error) {
      return error.what();
    }
    return "nothing was refused";
  }
  std::unique_ptr<Trainer> open(Settings settings) const {
    TrainingData data = prepare_without_data(settings);
    auto trainer = std::make_unique<Trainer>(std::move(settings), std::move(data));
    trainer->resume("");
    return trainer;
  }
  static double number(const StepRecord& record, const std::string& name) {
    for (const NamedNumber& one : record.objective) {
      if (one.name == name) return one.value;
    }
    ADD_FAILURE() << "no " << name;
    return 0;
  }

  TemporaryFolder folder_;
  std::unique_ptr<World> world_ = make_single_world();
  std::ostringstream out_;
};

}  // namespace tessera::testing
