#include "train/state/initial_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "comm/thread/thread_world.h"
#include "core/file/file.h"
#include "core/testing/case_share.h"
#include "train/testing/layout_runs.h"
#include "train/trainer/trainer.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::NamedLayout;

const NamedLayout kOneRank = {.name = "one", .num_ranks = 1, .parallel = {}};

/// Whole tensors by name: weights, expert biases, moments and masters.
using Tensors = std::map<std::string, std::vector<std::byte>>;

void gather(const std::vector<NamedSlice>& parts, Tensors& whole) {
  for (const NamedSlice& part : parts) {
    auto& bytes = whole[part.name];
    const Tensor all = {nullptr, part.tensor.dtype, part.slice.global};
    bytes.resize(all.num_bytes());
    copy_slice_into(part.slice, part.tensor, {bytes.data(), all.dtype, all.shape});
  }
}

/// What a run begins with.
struct Start {
  Tensors tensors;
  std::vector<std::string> notes;
};

/// Runs that start from another's weights, with as many layers of multi-token prediction as they
/// like.
class InitialPrediction : public ::testing::Test {
 protected:
  InitialPrediction()
      : folder_(std::filesystem::temp_directory_path() / unique_name("tessera-start-")) {
    std::filesystem::create_directories(folder_);
    settings_ = testing::settings_for_layouts(folder_);
  }
  ~InitialPrediction() override { std::filesystem::remove_all(folder_); }

  Settings settings(int64_t mtp_layers, const std::string& run) const {
    Settings result = settings_;
    result.model.mtp_layers = mtp_layers;
    result.run.folder = (folder_ / run).string();
    return result;
  }

  /// A run of two steps with its checkpoint.
  std::string train(int64_t mtp_layers) const {
    const Settings run = settings(mtp_layers, fmt::format("source-{}", mtp_layers));
    testing::run_steps(run, kOneRank, 2, /*save=*/true);
    return run.run.folder;
  }

  /// A new run's beginning on that layout; `from` may be empty.
  Start start(int64_t mtp_layers, const std::string& from, const NamedLayout& layout) const {
    Settings run = settings(mtp_layers, unique_name("new-"));
    run.run.init_from = from;
    run.run.seed = 5;
    run.parallel = layout.parallel;
    run.shard = layout.shard;
    Start result;
    std::mutex mutex;
    run_thread_world(layout.num_ranks, [&](World& world) {
      Settings own = run;
      TrainingData data = open_training_data(own);
      Trainer trainer(std::move(own), std::move(data), world);
      trainer.resume("");
      const std::scoped_lock lock(mutex);
      gather(trainer.state().owned_model(), result.tensors);
      gather(trainer.state().owned_optimizer(), result.tensors);
      if (world.rank() == 0) result.notes = trainer.initial_notes();
    });
    return result;
  }

  std::filesystem::path folder_;
  Settings settings_;
};

/// Of the layers that `mine` and `other` should share, every tensor is the same.
void expect_same(const Tensors& mine, const Tensors& other, bool of_layer(const std::string&)) {
  int64_t compared = 0;
  for (const auto& [name, bytes] : mine) {
    if (!of_layer(name)) continue;
    EXPECT_EQ(bytes, other.at(name)) << name;
    ++compared;
  }
  EXPECT_GT(compared, 5);
}

bool is_of_decoder(const std::string& name) {
  return !is_mtp_parameter(name);
}
bool is_of_first_prediction(const std::string& name) {
  return mtp_layer_of(name) == "0";
}
bool is_of_second_prediction(const std::string& name) {
  return mtp_layer_of(name) == "1";
}

TEST_F(InitialPrediction, IsAddedWithFreshWeights) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    settings_.train.precision = precision;
    const std::string from = train(0);
    const Start started = start(1, from, kOneRank);
    expect_same(started.tensors, start(0, from, kOneRank).tensors, is_of_decoder);
    expect_same(started.tensors, start(1, "", kOneRank).tensors, is_of_first_prediction);
    EXPECT_THAT(started.notes, ElementsAre(HasSubstr("1 layer of multi-token prediction not in")));
    std::filesystem::remove_all(from);
  }
}

/// Of every section that says something of a model.
TEST_F(InitialPrediction, TheWholeModelIsTakenFromTheCheckpoint) {
  ModelConfig& model = settings_.model;
  model.num_layers = 4;
  model.delta_layers = {0};
  model.delta = {.kind = DeltaKind::kKimi,
                 .num_key_heads = 2,
                 .num_value_heads = 2,
                 .key_size = 4,
                 .value_size = 6};
  model.conv_layers = {1};
  model.conv = {.size = 2, .bias = true};
  model.window = 5;
  model.window_layers = {2};
  model.own_window_rope = true;
  model.window_rope.base = 500;
  Settings run = settings(0, "own");
  TrainingData data = open_training_data(run);
  Trainer trainer(run, std::move(data));
  trainer.resume("");
  trainer.save(make_schema(run).to_toml());
  Settings next;
  next.run.init_from = run.run.folder;
  ConfigSchema schema = make_schema(next);
  load_initial_model(schema, next);
  const auto options_of = [](ModelConfig config) {
    ConfigSchema options;
    add_model_options(options, config);
    return options.to_toml();
  };
  EXPECT_EQ(options_of(next.model), options_of(run.model));
}

TEST_F(InitialPrediction, IsLeftOut) {
  const std::string from = train(2);
  const Start whole = start(2, from, kOneRank);
  EXPECT_THAT(whole.notes, IsEmpty());
  const Start none = start(0, from, kOneRank);
  expect_same(none.tensors, whole.tensors, is_of_decoder);
  EXPECT_THAT(none.notes, ElementsAre(HasSubstr("2 layers of multi-token prediction of the")));
  for (const auto& [name, bytes] : none.tensors) EXPECT_FALSE(is_mtp_parameter(name)) << name;
}

TEST_F(InitialPrediction, KeepsTheLayersThatBothHave) {
  const std::string from = train(1);
  const Start started = start(2, from, kOneRank);
  expect_same(started.tensors, start(1, from, kOneRank).tensors, is_of_first_prediction);
  expect_same(started.tensors, start(2, "", kOneRank).tensors, is_of_second_prediction);
}

TEST_F(InitialPrediction, IsTheSameInAnyLayout) {
  const auto layouts = testing::share_of_cases(testing::layouts_for_checkpoints(), 1);
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    settings_.train.precision = precision;
    const std::string without = train(0);
    const std::string with = train(1);
    const Start added = start(1, without, kOneRank);
    const Start left_out = start(0, with, kOneRank);
    for (const NamedLayout& layout : layouts) {
      SCOPED_TRACE(layout.name);
      EXPECT_EQ(start(1, without, layout).tensors, added.tensors);
      EXPECT_EQ(start(0, with, layout).tensors, left_out.tensors);
    }
    std::filesystem::remove_all(without);
    std::filesystem::remove_all(with);
  }
}

/// A layer that both have must have the same tensors in both.
TEST_F(InitialPrediction, RefusesALayerOfAnotherKind) {
  const std::string from = train(1);
  settings_.model.qk_norm = QkNorm::kHead;
  try {
    start(1, from, kOneRank);
    ADD_FAILURE() << "it loaded";
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr("missing in the checkpoint: layers.0.attn.k_norm.weight"));
    EXPECT_THAT(error.what(), HasSubstr("mtp.0.attn.k_norm.weight"));
  }
}

/// Nothing trains it; a run that goes on has one.
TEST(InitialWeights, RunsDoNotBeginWithARandomIndexer) {
  Settings settings;
  check_trained_indexer(settings);
  settings.model.index.top_k = 4;
  EXPECT_THAT([&] { check_trained_indexer(settings); },
              ::testing::ThrowsMessage<UserError>(HasSubstr("nothing trains an indexer")));
  settings.run.init_from = "trained";
  check_trained_indexer(settings);
}

}  // namespace
}  // namespace tessera
