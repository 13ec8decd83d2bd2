#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <mutex>

#include "comm/planned_world.h"
#include "comm/thread/thread_world.h"
#include "core/file/file.h"
#include "train/setup/replica_groups.h"
#include "train/testing/layout_runs.h"
#include "train/trainer/trainer.h"

namespace tessera {
namespace {

/// Settings of a small run whose data and checkpoints go away with the test.
class FullSharding : public ::testing::Test {
 protected:
  FullSharding() : folder_(std::filesystem::temp_directory_path() / unique_name("tessera-full-")) {
    std::filesystem::create_directories(folder_);
    settings_ = testing::settings_for_layouts(folder_);
    settings_.run.folder = (folder_ / "run").string();
  }
  ~FullSharding() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path folder_;
  Settings settings_;
};

testing::NamedLayout full_layout(int64_t dp, int64_t ep = 1, int64_t pp = 1) {
  testing::NamedLayout layout = {.name = "full", .num_ranks = dp * pp, .parallel = {}};
  layout.parallel.layout.dp = dp;
  layout.parallel.layout.ep = ep;
  layout.parallel.layout.pp = pp;
  layout.shard.scope = ShardScope::kFull;
  return layout;
}

Settings on_layout(Settings settings, const testing::NamedLayout& layout) {
  settings.parallel = layout.parallel;
  settings.shard = layout.shard;
  return settings;
}

/// All weights of the model by name, from the ranks' owned parts.
std::map<std::string, std::vector<std::byte>> initial_weights(const Settings& settings,
                                                              const testing::NamedLayout& layout) {
  std::map<std::string, std::vector<std::byte>> whole;
  std::mutex mutex;
  run_thread_world(layout.num_ranks, [&](World& world) {
    const Settings own = on_layout(settings, layout);
    ModelState state(own, make_run_layout(own, world), world);
    state.initialize(7);
    const std::scoped_lock lock(mutex);
    for (const NamedSlice& part : state.owned_model()) {
      auto& bytes = whole[part.name];
      const Tensor all = {nullptr, part.tensor.dtype, part.slice.global};
      bytes.resize(all.num_bytes());
      copy_slice_into(part.slice, part.tensor, {bytes.data(), all.dtype, all.shape});
    }
  });
  return whole;
}

TEST_F(FullSharding, InitialWeightsAreThoseOfOneRankBitwise) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    settings_.train.precision = precision;
    const auto whole = initial_weights(settings_, {.name = "one", .num_ranks = 1, .parallel = {}});
    for (auto layout : {full_layout(3), full_layout(6, 2), full_layout(3, 1, 2)}) {
      EXPECT_EQ(initial_weights(settings_, layout), whole) << layout.num_ranks;
      layout.parallel.layout.tp = 2;
      layout.num_ranks *= 2;
      EXPECT_EQ(initial_weights(settings_, layout), whole) << layout.num_ranks << ", tp 2";
    }
  }
}

TEST_F(FullSharding, MemoryIsPredictedOnEveryRank) {
  settings_.train.global_batch = 12;
  auto hybrid = full_layout(4, 2);
  hybrid.shard.group = 2;
  auto compressed = full_layout(3, 1, 2);
  compressed.shard.compression = GradientCompression::kBf16;
  auto replicated = full_layout(4, 2);
  replicated.shard.scope = ShardScope::kNone;
  auto state = compressed;
  state.shard.scope = ShardScope::kState;
  state.shard.bucket_bytes = 20000;
  for (const auto& layout :
       {full_layout(2), full_layout(6, 2), hybrid, compressed, replicated, state}) {
    for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
      settings_.train.precision = precision;
      run_thread_world(layout.num_ranks, [&](World& world) {
        const Settings own = on_layout(settings_, layout);
        const RunLayout run = make_run_layout(own, world);
        EXPECT_EQ(ModelState(own, run, world).bytes(), ModelState::count_bytes(own, run));
      });
    }
  }
}

ModelState::Bytes predict(const Settings& settings, const testing::NamedLayout& layout,
                          int64_t rank) {
  const Settings own = on_layout(settings, layout);
  const auto world = make_planned_world(rank, layout.num_ranks);
  return ModelState::count_bytes(own, make_run_layout(own, *world));
}

/// Weights, gradients and state of n ranks are an n-th, but for rows that are not cut, and beside
/// them two buffers of the largest module for weights and for gradients.
TEST_F(FullSharding, MemoryFallsWithTheGroup) {
  settings_.model.hidden_size = 128;
  settings_.model.inner_size = 512;
  settings_.model.num_layers = 24;
  settings_.model.mtp_layers = 0;
  settings_.model.moe.num_experts = 0;
  settings_.model.mtp_layers = 0;
  settings_.train.global_batch = 64;
  const ModelState::Bytes whole = predict(settings_, full_layout(1), 0);
  int64_t largest = 0;  // of all layers, which are larger than the embedding
  for (const ParameterSpec& spec : list_parameters(settings_.model, DType::kF32))
    largest += spec.name.starts_with("layers.0.") ? align_up(4 * spec.shape.num_elements()) : 0;
  for (const int64_t dp : {2, 8, 32}) {
    for (const int64_t rank : {int64_t{0}, dp - 1}) {
      const ModelState::Bytes bytes = predict(settings_, full_layout(dp), rank);
      const auto near = [&](int64_t found, int64_t all) {
        const double share = static_cast<double>(all) / static_cast<double>(dp);
        // A bound between shares moves by at most half a row of each layer.
        EXPECT_NEAR(static_cast<double>(found), share, 0.05 * share) << dp << " rank " << rank;
      };
      near(bytes.weights - 2 * align_up(largest, 128), whole.weights);
      near(bytes.gradients - 2 * align_up(largest, 128), whole.gradients);
      near(bytes.optimizer, whole.optimizer);
    }
  }
  auto hybrid = full_layout(32);
  hybrid.shard.group = 8;
  EXPECT_EQ(predict(settings_, hybrid, 0), predict(settings_, full_layout(8), 0));
}

/// BF16: the losses follow those of one rank, and a run continued is the run unbroken.
TEST_F(FullSharding, Bf16RunsContinueBitwise) {
  settings_.train.precision = Precision::kBF16;
  for (const auto compression : {GradientCompression::kNone, GradientCompression::kBf16}) {
    auto layout = full_layout(3, 1, 2);
    layout.shard.compression = compression;
    settings_.run.folder = (folder_ / fmt::format("run{}", static_cast<int>(compression))).string();
    const testing::RunEnd one =
        testing::run_steps(settings_, {.name = "one", .num_ranks = 1, .parallel = {}}, 4, false);
    const testing::RunEnd whole = testing::run_steps(settings_, layout, 4, false);
    for (size_t i = 0; i < one.losses.size(); ++i)
      EXPECT_NEAR(whole.losses[i], one.losses[i], 0.02 * one.losses[i]);
    testing::run_steps(settings_, layout, 2, true);
    const testing::RunEnd continued = testing::run_steps(settings_, layout, 4, false);
    ASSERT_EQ(continued.losses.size(), 2);
    EXPECT_EQ(continued.losses[0], whole.losses[2]);
    EXPECT_EQ(continued.losses[1], whole.losses[3]);
    EXPECT_EQ(continued.weights, whole.weights);
  }
}

/// The first value of a weight that this rank holds, if any.
float* first_value(ModelState& state, const std::string& name) {
  for (const NamedSlice& held : state.optimizer().weight_slices(HeldPart::kHeld)) {
    if (held.name == name) return held.tensor.as<float>();
  }
  return nullptr;
}

/// The ranks that hold a weight's first value have a NaN there: the step is skipped everywhere,
/// nothing changes, and the next step updates.
void skip_a_step(const Settings& settings, const testing::NamedLayout& layout) {
  run_thread_world(layout.num_ranks, [&](World& world) {
    Settings own = on_layout(settings, layout);
    own.train.on_nonfinite = NonFinite::kSkip;
    TrainingData data = open_training_data(own);
    Trainer trainer(own, std::move(data), world);
    trainer.resume("");
    float* const value = first_value(trainer.state(), "final_norm.weight");
    const float good = value != nullptr ? *value : 0;
    if (value != nullptr) *value = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(trainer.step().skipped());
    if (value != nullptr) {
      EXPECT_TRUE(std::isnan(*value));
      *value = good;
    }
    EXPECT_FALSE(trainer.step().skipped());
    EXPECT_EQ(trainer.position().skipped_steps, 1);
  });
}

TEST_F(FullSharding, ANonFiniteStepIsSkippedEverywhere) {
  for (const auto& layout : {full_layout(3), full_layout(3, 1, 2)}) skip_a_step(settings_, layout);
}

/// Which program runs after how many gatherings have begun, whenever either changes.
using GatherTimes = std::vector<std::pair<std::string, int64_t>>;

TEST_F(FullSharding, TheNextModuleIsGatheredWhileOneIsUsed) {
  settings_.model.mtp_layers = 0;
  settings_.model.moe.num_experts = 0;
  settings_.model.tie_embeddings = false;
  settings_.model.mtp_layers = 0;
  settings_.train.global_batch = 2;
  run_thread_world(2, [&](World& world) {
    Settings own = on_layout(settings_, full_layout(2));
    TrainingData data = open_training_data(own);
    Trainer trainer(own, std::move(data), world);
    trainer.resume("");
    GatherTimes times;
    const auto count = [&](const NodeEvent& event) {
      const std::pair now(
          event.program.name(),
          world.statistics().count("dense_replicas_1.inner", CommKind::kAllGather).calls);
      if (times.empty() || times.back() != now) times.push_back(now);
    };
    trainer.step({.nodes = count});
    // Two buffers: while the last layer is used, there is room for the head's matrix alone, and its
    // norm follows. The head's and the embedding's matrices are not read backwards.
    const GatherTimes expected = {
        {"embedding", 2},     {"dense_layer", 3},          {"dense_layer", 4},       {"head", 5},
        {"head.backward", 7}, {"dense_layer.backward", 8}, {"embedding.backward", 8}};
    EXPECT_EQ(times, expected);
  });
}

TEST_F(FullSharding, ValidatesAsOneRankDoes) {
  settings_.data.validation_fraction = 0.2;
  const auto validate_on = [&](const testing::NamedLayout& layout) {
    double loss = 0;
    run_thread_world(layout.num_ranks, [&](World& world) {
      Settings own = on_layout(settings_, layout);
      TrainingData data = open_training_data(own);
      Trainer trainer(own, std::move(data), world);
      trainer.resume("");
      trainer.validate();
      trainer.step();
      const double after = trainer.validate();
      if (world.rank() == 0) loss = after;
    });
    return loss;
  };
  const double one = validate_on({.name = "one", .num_ranks = 1, .parallel = {}});
  ASSERT_GT(one, 0);
  for (const auto& layout : {full_layout(3), full_layout(2, 2), full_layout(2, 1, 2)})
    EXPECT_NEAR(validate_on(layout), one, 1e-5 * one);
}

/// On one rank nothing is shared out, and whoever reads weights finds them.
TEST_F(FullSharding, OfOneRankHoldsWeightsInPlace) {
  const Settings own = on_layout(settings_, full_layout(1));
  ModelState state(own);
  EXPECT_EQ(state.weights(), nullptr);
  EXPECT_TRUE(state.parameters().all().front().weight);
}

/// The members of a rank's inner group of each kind.
std::map<std::string, std::vector<int64_t>> inner_groups(const Settings& settings,
                                                         int64_t num_ranks, int64_t rank) {
  std::map<std::string, std::vector<int64_t>> result;
  const Layout layout(settings.parallel.layout, num_ranks);
  check_sharding(settings, layout);
  for (const ReplicaRanks& group : list_replica_ranks(settings, layout, rank)) {
    const int64_t place = std::ranges::find(group.ranks, rank) - group.ranks.begin();
    const auto first = group.ranks.begin() + place / group.inner * group.inner;
    result[group.name] = {first, first + group.inner};
  }
  return result;
}

using Ranks = std::vector<int64_t>;

TEST(ReplicaRanks, HybridSharesWithinDataParallelNeighbours) {
  Settings settings;
  settings.model.num_heads = 4;
  settings.parallel.layout = {.tp = 2, .dp = 4, .ep = 2, .pp = 2};
  settings.shard = {.scope = ShardScope::kFull, .group = 2};
  const auto groups = inner_groups(settings, 16, 5);
  EXPECT_EQ(groups.at("dense_replicas_1"), (Ranks{5, 7}));
  EXPECT_EQ(groups.at("dense_replicas_2"), (Ranks{4, 5, 6, 7}));
  EXPECT_EQ(groups.at("expert_replicas"), (Ranks{5, 7})) << "four replicas, two copies";
  EXPECT_EQ(groups.at("embedding_replicas"), (Ranks{5, 7})) << "within the stage";
  settings.parallel.layout.ep = 8;
  EXPECT_EQ(inner_groups(settings, 16, 5).at("expert_replicas"), (Ranks{5})) << "one copy";
}

TEST(ReplicaRanks, NodesAreNeighbouringRanks) {
  Settings settings;
  settings.model.num_heads = 4;
  settings.parallel.layout = {.tp = 2, .dp = 4, .ep = 2, .pp = 2};
  settings.shard.reduce_group = 4;
  const auto groups = inner_groups(settings, 16, 5);
  EXPECT_EQ(groups.at("dense_replicas_1"), (Ranks{5, 7}));
  EXPECT_EQ(groups.at("dense_replicas_2"), (Ranks{4, 5, 6, 7}));
  EXPECT_EQ(groups.at("embedding_replicas"), (Ranks{5, 7}));
  settings.shard.reduce_group = 1;
  EXPECT_EQ(inner_groups(settings, 16, 5).at("dense_replicas_2"), (Ranks{5}));
}

TEST(ReplicaRanks, InnerGroupsAreOfOneStage) {
  Settings settings;
  settings.parallel.layout = {.dp = 4, .pp = 2};
  settings.parallel.layout.dense_order = "pp-tp-cp-dp";
  settings.parallel.layout.expert_order = "pp-etp-ep-edp";
  settings.shard.reduce_group = 4;
  EXPECT_EQ(inner_groups(settings, 8, 0).at("embedding_replicas"), (Ranks{0, 2}));
  EXPECT_EQ(inner_groups(settings, 8, 7).at("embedding_replicas"), (Ranks{5, 7}));
  // Stages of four ranks: six neighbours hold all of the first, and halves of the second.
  settings.parallel.layout.dense_order = LayoutSpec().dense_order;
  settings.parallel.layout.expert_order = LayoutSpec().expert_order;
  settings.shard.reduce_group = 6;
  EXPECT_THROW(inner_groups(settings, 8, 0), UserError);
  settings.model.tie_embeddings = false;
  EXPECT_EQ(inner_groups(settings, 8, 0).at("dense_replicas_1"), (Ranks{0, 1, 2, 3}));
  EXPECT_EQ(inner_groups(settings, 8, 7).at("dense_replicas_1"), (Ranks{6, 7}));
}

void expect_refusal(const Settings& settings, int64_t num_ranks, const std::string& text) {
  try {
    inner_groups(settings, num_ranks, 0);
    FAIL() << "not refused: " << text;
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(ReplicaRanks, RefusesGroupsThatDoNotFitWithTheNearestThatDo) {
  Settings settings;
  settings.parallel.layout.dp = 6;
  settings.shard = {.scope = ShardScope::kFull, .group = 4};
  expect_refusal(settings, 6,
                 "optim.shard_group 4 does not divide the 6 data-parallel ranks; the nearest is 3 "
                 "or 6");
  settings.shard = {.scope = ShardScope::kState, .group = 3};
  expect_refusal(settings, 6, "optim.shard_group is 3, but it says how far optim.shard = \"full\"");
  settings.shard = {.scope = ShardScope::kFull, .reduce_group = 2};
  expect_refusal(settings, 6, "optim.reduce_group is 2, but with optim.shard = \"full\"");
  settings.shard = {.scope = ShardScope::kState, .reduce_group = 4};
  expect_refusal(settings, 6, "the nearest that fits is 2 or 3");
}

}  // namespace
}  // namespace tessera
