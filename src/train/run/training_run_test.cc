#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <sstream>

#include "train/infer/loaded_model.h"
#include "train/run/train_loop.h"
#include "train/testing/tiny_run.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// A run in a folder of its own.
class TrainingRunTest : public ::testing::Test {
 protected:
  TrainRequest request(const std::string& name) const {
    TrainRequest request{
        .settings = testing::tiny_settings(folder_), .config_toml = "", .terminal = {}};
    request.settings.run.folder = folder_.file(name);
    request.settings.run.report = false;
    request.settings.train.validation_interval = 3;
    request.config_toml = make_schema(request.settings).to_toml();
    return request;
  }
  std::unique_ptr<TrainingRun> open(const TrainRequest& request) {
    return std::make_unique<TrainingRun>(request, *world_, out_);
  }
  /// The batches that the run's data gives in its next step.
  static std::vector<Batch> next_batches(Trainer& trainer) {
    std::vector<Batch> batches(trainer.settings().train.num_micro_batches());
    for (size_t i = 0; i < batches.size(); ++i) {
      trainer.data().train->fetch(trainer.position().step, static_cast<int64_t>(i), batches[i]);
    }
    return batches;
  }
  static std::string message_of(const std::function<void()>& action) {
    try {
      action();
    } catch (const UserError& error) {
      return error.what();
    }
    return "nothing was refused";
  }

  testing::TemporaryFolder folder_;
  std::unique_ptr<World> world_ = make_single_world();
  std::ostringstream out_;
};

TEST_F(TrainingRunTest, StepsGiveTheBitsOfTheLoop) {
  const TrainRequest whole = request("whole");
  EXPECT_EQ(train(whole, *world_, out_), 0);
  const auto run = open(request("steps"));
  int64_t validations = 0;
  while (!run->is_done()) validations += run->step().validation_loss ? 1 : 0;
  EXPECT_EQ(validations, 2);
  EXPECT_THAT(message_of([&] { run->step(); }), HasSubstr("all 8 steps"));
  run->end();
  TrainRequest again = whole;
  again.settings.run.resume = ResumeMode::kRequired;
  const auto trained = open(again);
  testing::expect_same_state(run->trainer(), trained->trainer());
}

TEST_F(TrainingRunTest, EndsBeforeTheLastStepAndContinues) {
  const auto whole = open(request("whole"));
  while (!whole->is_done()) whole->step();
  const auto first = open(request("parts"));
  for (int i = 0; i < 3; ++i) first->step();
  EXPECT_THAT(message_of([&] { open(request("parts")); }), HasSubstr("in use"));
  EXPECT_FALSE(first->has_ended());
  first->end();
  EXPECT_TRUE(first->has_ended());
  EXPECT_THAT(message_of([&] { first->step(); }), HasSubstr("has ended"));
  const auto second = open(request("parts"));  // the folder is free
  EXPECT_EQ(second->trainer().position().step, 3);
  while (!second->is_done()) second->step();
  testing::expect_same_state(whole->trainer(), second->trainer());
}

TEST_F(TrainingRunTest, GivenBatchesGiveTheBitsOfTheData) {
  const auto data = open(request("data"));
  TrainRequest bare = request("given");
  bare.settings.data.text = "";
  bare.given_batches = true;
  const auto given = open(bare);
  EXPECT_EQ(given->trainer().data().train, nullptr);
  while (!data->is_done()) {
    given->trainer().give_batches(next_batches(data->trainer()));
    const StepRecord expected = data->step();
    const StepRecord found = given->step();
    EXPECT_EQ(found.loss, expected.loss);
    EXPECT_EQ(found.tokens_seen, expected.tokens_seen);
    EXPECT_TRUE(found.validation_loss == std::nullopt || std::isnan(*found.validation_loss));
  }
  testing::expect_same_state(data->trainer(), given->trainer());
  given->end();
}

TEST_F(TrainingRunTest, RefusesBatchesOfOtherSizes) {
  const auto run = open(request("run"));
  std::vector<Batch> batches = next_batches(run->trainer());
  const auto give = [&] { run->trainer().give_batches(batches); };
  batches.back().cu_seqlens = {0, 3, 16, 32};
  EXPECT_THAT(message_of(give), HasSubstr("at most 2 stretches, found 3"));
  batches.back().tokens.pop_back();
  EXPECT_THAT(message_of(give), HasSubstr("has 32 tokens"));
  batches.pop_back();
  EXPECT_THAT(message_of(give), HasSubstr("takes 2 micro-batches, found 1"));
  EXPECT_FALSE(run->has_ended());
  EXPECT_EQ(run->step().step, 1);  // of its data
}

TEST_F(TrainingRunTest, AnErrorEndsTheRun) {
  TrainRequest wild = request("wild");
  wild.settings.schedule.peak_lr = 1e30;
  const auto run = open(wild);
  EXPECT_THROW(while (!run->is_done()) run->step(), TrainingStopped);
  EXPECT_TRUE(run->has_ended());
  EXPECT_THAT(message_of([&] { run->save(); }), HasSubstr("has ended"));
  open(wild);  // the folder is free
}

TEST_F(TrainingRunTest, NewModelsStartAsTrainingsDo) {
  const auto run = open(request("run"));
  LoadedModel model(run->trainer().settings());
  EXPECT_TRUE(model.path().empty());
  for (const ModelParameter& parameter : run->trainer().state().parameters().all()) {
    const Tensor other = model.parameters().find(parameter.spec.name).weight;
    EXPECT_EQ(std::memcmp(parameter.weight.data, other.data, other.num_bytes()), 0);
  }
  Settings continued = run->trainer().settings();
  continued.run.init_from = "elsewhere";
  EXPECT_THAT(message_of([&] { LoadedModel refused(continued); }), HasSubstr("elsewhere"));
}

}  // namespace
}  // namespace tessera
