// Runs of several ranks that release gradients, beside runs that keep them.
#include <gtest/gtest.h>

#include "comm/thread/thread_world.h"
#include "core/testing/case_share.h"
#include "train/testing/layout_runs.h"
#include "train/testing/random_layout.h"
#include "train/testing/shadow_devices.h"
#include "train/testing/tiny_run.h"

namespace tessera {
namespace {

using testing::NamedLayout;
using testing::RandomLayout;
using testing::RunEnd;
using testing::TemporaryFolder;

/// Steps that need nothing which released gradients lack, and whose sums come in their order: a
/// tied head's are all there before the first of the embedding, but for one that ranks share.
void let_release(Settings& settings) {
  settings.model.mtp_layers = 0;
  if (settings.parallel.layout.tp > 1) settings.model.tie_embeddings = false;
  settings.train.max_grad_norm = 0;
  settings.parallel.schedule = PipelineKind::kGpipe;
  settings.parallel.split_weights = false;
  settings.shard.scope = ShardScope::kState;
  settings.shard.group = 0;
}

bool has_one_stage(const RandomLayout& layout) {
  const ParallelSpec& parallel = layout.settings.parallel;
  return layout.num_ranks > 1 && parallel.layout.pp == 1 && parallel.chunks_per_stage == 1 &&
         parallel.pipeline_layout.empty();
}

/// As predicted.
void expect_memory(Settings settings, int64_t num_ranks) {
  run_thread_world(num_ranks, [&](World& world) {
    Settings own = settings;
    TrainingData data = open_training_data(own);
    Trainer trainer(own, std::move(data), world, choose_host);
    EXPECT_EQ(trainer.state().bytes(), trainer.prediction().state);
  });
}

/// Any tensor, expert, context and data parallelism, both optimizers, state on device and host.
TEST(ReleasedRanks, HaveTheBitsOfGradientsThatStay) {
  const TemporaryFolder folder;
  int num_cases = 0;
  for (uint64_t seed = 1401; seed < 1460 && num_cases < testing::share_of_count(14); ++seed) {
    RandomLayout layout = testing::draw_layout(seed, 6);
    if (!has_one_stage(layout)) continue;
    testing::prepare_run(layout, 2, folder.file(fmt::format("{}", seed)));
    Settings& settings = layout.settings;
    let_release(settings);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, testing::describe(layout)));
    NamedLayout named{"", layout.num_ranks, settings.parallel, settings.shard};
    const RunEnd kept = testing::run_steps(settings, named, 2, false);
    named.shard.release_gradients = true;
    testing::expect_same_end(testing::run_steps(settings, named, 2, false), kept);
    named.shard.state_on_host = true;
    testing::expect_same_end(testing::run_steps(settings, named, 2, false, testing::choose_shadow),
                             kept);
    settings.shard = named.shard;
    expect_memory(settings, layout.num_ranks);
    if (settings.optimizer_kind == OptimizerKind::kAdamW) {
      named.shard.updates_on_host = true;
      testing::expect_same_end(
          testing::run_steps(settings, named, 2, false, testing::choose_shadow), kept);
      settings.shard = named.shard;
      expect_memory(settings, layout.num_ranks);
    }
    ++num_cases;
  }
  EXPECT_GE(num_cases, testing::share_of_count(8));
}

TEST(ReleasedRanks, GoOnFromCheckpointsOfEither) {
  const TemporaryFolder folder;
  Settings settings = testing::settings_for_layouts(folder.file(""));
  let_release(settings);
  NamedLayout layout{.name = "ep", .num_ranks = 2};
  layout.parallel = settings.parallel;
  layout.parallel.layout.ep = 2;
  settings.run.folder = folder.file("whole");
  const RunEnd whole = testing::run_steps(settings, layout, 3, false);
  for (const bool first : {false, true}) {
    settings.run.folder = folder.file(first ? "released-first" : "kept-first");
    layout.shard.release_gradients = first;
    testing::run_steps(settings, layout, 2, true);
    layout.shard.release_gradients = !first;
    const RunEnd end = testing::run_steps(settings, layout, 3, false);
    EXPECT_EQ(end.losses.back(), whole.losses.back());
    EXPECT_EQ(end.weights, whole.weights);
  }
}

/// Layers' gradients take the memory of two layers, however many there are.
TEST(ReleasedRanks, HaveMemoryForTwoLayers) {
  const TemporaryFolder folder;
  Settings settings = testing::settings_for_layouts(folder.file(""));
  let_release(settings);
  settings.run.folder = folder.file("run");
  settings.model.num_layers = 8;
  const auto gradient_bytes = [&](bool releases) {
    settings.shard.release_gradients = releases;
    int64_t bytes = 0;
    run_thread_world(2, [&](World& world) {
      Settings own = settings;
      TrainingData data = open_training_data(own);
      Trainer trainer(own, std::move(data), world, choose_host);
      if (world.rank() == 0) bytes = trainer.state().parameters().bytes().gradients;
    });
    return bytes;
  };
  const int64_t kept = gradient_bytes(false);
  const int64_t released = gradient_bytes(true);
  settings.model.num_layers = 16;
  EXPECT_EQ(gradient_bytes(true), released);
  EXPECT_EQ(gradient_bytes(false) - kept, 4 * (kept - released) / 3);
}

}  // namespace
}  // namespace tessera
