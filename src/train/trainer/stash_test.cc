// Runs whose rows wait in pages of a stash, beside runs with memory for the worst routing.
#include <gmock/gmock.h>

#include <cmath>
#include <mutex>

#include "comm/thread/thread_world.h"
#include "core/out_of_memory.h"
#include "core/testing/case_share.h"
#include "ops/registry/cpu_kernels.h"
#include "step/check_plan.h"
#include "step/step_memory.h"
#include "train/memory/planned_rank.h"
#include "train/testing/layout_runs.h"
#include "train/testing/random_layout.h"
#include "train/testing/shadow_devices.h"
#include "train/testing/tiny_run.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::NamedLayout;
using testing::RunEnd;
using testing::TemporaryFolder;

ParallelSpec bounded(int64_t dp, int64_t pp, int64_t ep) {
  ParallelSpec parallel;
  parallel.layout.dp = dp;
  parallel.layout.pp = pp;
  parallel.layout.ep = ep;
  parallel.dispatcher = DispatcherRequest::kAllToAll;
  parallel.exchange = ExchangeSizes::kBounded;
  return parallel;
}

/// Each with exchanges whose rows the host does not learn.
std::vector<NamedLayout> layouts() {
  std::vector<NamedLayout> all = {
      {"ep2", 2, bounded(2, 1, 2)},         {"ep4", 4, bounded(4, 1, 4)},
      {"pp2ep2", 4, bounded(2, 2, 2)},      {"deduplicated", 2, bounded(2, 1, 2)},
      {"interleaved", 4, bounded(2, 2, 2)}, {"ep2etp2", 4, bounded(2, 1, 2)},
      {"full", 2, bounded(2, 1, 2)}};
  all[3].parallel.dispatcher = DispatcherRequest::kDeduplicated;
  all[4].parallel.schedule = PipelineKind::kInterleaved;
  all[4].parallel.chunks_per_stage = 2;
  all[5].parallel.layout.tp = 2;
  all[5].parallel.layout.etp = 2;
  all[6].shard.scope = ShardScope::kFull;
  return all;
}

/// A model with prediction and expert biases whose layers save rows of several kinds.
Settings settings_in(const TemporaryFolder& folder) {
  Settings settings = testing::settings_for_layouts(folder.file(""));
  settings.model.num_layers = 4;
  settings.model.moe.num_experts = 8;
  settings.train.global_batch = 8;
  settings.run.resume = ResumeMode::kNever;
  settings.run.folder = folder.file("run");
  settings.train.stash_page = 1;
  return settings;
}

Settings stashed(Settings settings, double factor = 1.25) {
  settings.train.stash = StashMode::kAuto;
  settings.train.stash_factor = factor;
  return settings;
}

/// A run whose steps were perhaps done again.
struct StashedRun {
  RunEnd end;
  std::vector<int64_t> repeats;  ///< by step, the same on all ranks
  int64_t grown_pages = 0;       ///< of all ranks together
};

StashedRun run_stashed(Settings settings, const NamedLayout& layout, int64_t steps,
                       const DeviceChooser& choose = choose_host, bool validates = false) {
  settings.parallel = layout.parallel;
  settings.shard = layout.shard;
  StashedRun run;
  WholeTensors whole;
  std::mutex mutex;
  run_thread_world(layout.num_ranks, [&](World& world) {
    Settings own = settings;
    TrainingData data = open_training_data(own);
    Trainer trainer(own, std::move(data), world, choose);
    trainer.resume("");
    const StashPool* const pool = trainer.model().stash();
    const int64_t planned = pool == nullptr ? 0 : trainer.model().placement().stash.planned;
    std::vector<int64_t> repeats;
    while (trainer.position().step < steps) {
      if (validates) trainer.validate();
      const StepOutcome outcome = trainer.step();
      repeats.push_back(outcome.repeats);
      if (world.rank() == 0) run.end.losses.push_back(outcome.loss);
    }
    trainer.state().wait_weights();
    const std::scoped_lock lock(mutex);
    gather_parts(trainer.state().owned_model(), whole);
    if (pool != nullptr) run.grown_pages += pool->num_pages() - planned;
    if (run.repeats.empty()) run.repeats = repeats;
    EXPECT_EQ(run.repeats, repeats) << "rank " << world.rank();
  });
  for (const auto& [name, tensor] : whole)
    run.end.weights.insert(run.end.weights.end(), tensor.values.begin(), tensor.values.end());
  return run;
}

class Stash : public ::testing::TestWithParam<NamedLayout> {
 protected:
  const TemporaryFolder folder_;
};

/// Also where the host does not reach the memory.
TEST_P(Stash, GivesTheBitsOfMemoryForTheWorst) {
  const Settings settings = settings_in(folder_);
  const RunEnd kept = testing::run_steps(settings, GetParam(), 3, false);
  const StashedRun run = run_stashed(stashed(settings, 8), GetParam(), 3);
  testing::expect_same_end(run.end, kept);
  EXPECT_THAT(run.repeats, ::testing::Each(0)) << "there is room for the worst";
  EXPECT_EQ(run.grown_pages, 0);
  testing::expect_same_end(
      run_stashed(stashed(settings, 8), GetParam(), 3, testing::choose_shadow).end, kept);
}

/// No step is made of what found no room, and none is left out.
TEST_P(Stash, StepsWithoutRoomAreDoneAgain) {
  const Settings settings = settings_in(folder_);
  const RunEnd kept = testing::run_steps(settings, GetParam(), 3, false);
  for (const DeviceChooser& choose :
       {DeviceChooser(choose_host), DeviceChooser(testing::choose_shadow)}) {
    const StashedRun run = run_stashed(stashed(settings, 1), GetParam(), 3, choose);
    testing::expect_same_end(run.end, kept);
    EXPECT_EQ(run.repeats.front(), 1) << "what lacked is known at once";
    EXPECT_GT(run.grown_pages, 0);
  }
}

TEST_P(Stash, ValidationsLeaveAllPagesFree) {
  const Settings settings = settings_in(folder_);
  const RunEnd kept = testing::run_steps(settings, GetParam(), 2, false);
  const StashedRun run =
      run_stashed(stashed(settings), GetParam(), 2, choose_host, /*validates=*/true);
  testing::expect_same_end(run.end, kept);
}

TEST_P(Stash, GoesWithRecomputationOffloadingAndMergedPasses) {
  Settings settings = settings_in(folder_);
  const RunEnd kept = testing::run_steps(settings, GetParam(), 2, false);
  settings = stashed(settings);
  const auto check = [&](const Settings& one, const char* what) {
    SCOPED_TRACE(what);
    testing::expect_same_end(run_stashed(one, GetParam(), 2).end, kept);
    testing::expect_same_end(run_stashed(one, GetParam(), 2, testing::choose_shadow).end, kept);
  };
  Settings recomputed = settings;
  recomputed.train.recompute = {"expert_act", "mlp_norm"};
  check(recomputed, "recompute");
  Settings offloaded = settings;
  offloaded.train.offload = {"expert_pre@0-2", "attn_out"};
  check(offloaded, "offload");
  if (GetParam().shard.scope == ShardScope::kFull) return;
  Settings merged = settings;
  merged.train.schedule = "merged";
  check(merged, "merged");
}

INSTANTIATE_TEST_SUITE_P(All, Stash, ::testing::ValuesIn(testing::share_of_cases(layouts(), 0)),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
