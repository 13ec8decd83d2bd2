#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "core/random.h"
#include "core/testing/case_share.h"
#include "model/run/slab_bytes.h"
#include "step/build/reorder_plan.h"
#include "step/check_plan.h"
#include "step/simulate_plan.h"
#include "step/step_memory.h"
#include "train/memory/planned_rank.h"
#include "train/testing/random_layout.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

using testing::RandomLayout;

std::vector<StepPlan> plan_ranks(const RandomLayout& layout) {
  std::vector<StepPlan> plans;
  for (int64_t rank = 0; rank < layout.num_ranks; ++rank) {
    plans.push_back(plan_step(layout.settings, plan_rank(layout.settings, rank, layout.num_ranks)));
  }
  return plans;
}

/// The plans of all ranks of random layouts, with their optimizers, fit together.
TEST(PlannedStep, RanksOfRandomLayoutsFitTogether) {
  constexpr uint64_t kLayouts = testing::share_of_count(25);
  for (uint64_t seed = 0; seed < kLayouts; ++seed) {
    RandomLayout layout = testing::draw_layout(seed, 8);
    SCOPED_TRACE(testing::describe(layout));
    EXPECT_NO_THROW(check_ranks(plan_ranks(layout)));
    testing::merge_passes(layout.settings);
    EXPECT_NO_THROW(check_ranks(plan_ranks(layout))) << "merged";
  }
}

/// What takes part in an exchange or a message.
std::vector<size_t> list_meetings(const StepPlan& plan) {
  std::vector<size_t> meetings;
  for (const TaskId id : plan.tasks.ids()) {
    const Task& task = plan.tasks[id];
    if (communicates(plan.lanes[task.lane]) || !task.inside.empty())
      meetings.push_back(static_cast<size_t>(number_of(id)));
  }
  return meetings;
}

/// One of a rank's meetings comes earlier, in front of another.
StepPlan bring_forward(const StepPlan& plan, Random& random) {
  const std::vector<size_t> meetings = list_meetings(plan);
  std::vector<TaskId> order = plan.tasks.ids();
  if (meetings.size() < 2) return plan;
  const size_t to = random.next_below(meetings.size() - 1);
  const size_t most = std::min<size_t>(meetings.size() - to - 1, 4);
  const size_t from = to + 1 + random.next_below(most);
  std::rotate(order.begin() + static_cast<ptrdiff_t>(meetings[to]),
              order.begin() + static_cast<ptrdiff_t>(meetings[from]),
              order.begin() + static_cast<ptrdiff_t>(meetings[from]) + 1);
  return reorder(plan, order);
}

template <typename Run>
bool fails(const Run& run) {
  try {
    run();
    return false;
  } catch (const InternalError&) {
    return true;
  }
}

/// Mutants by which ranks wait forever on the clock are all found without it.
TEST(PlannedStep, WhatWouldWaitForeverIsFound) {
  Random random(7, 0);
  int num_stuck = 0;
  for (uint64_t seed = 0; seed < testing::few_of_count<uint64_t>(36); ++seed) {
    RandomLayout layout = testing::draw_layout(seed, 8);
    if (seed % 2 == 0) testing::merge_passes(layout.settings);
    SCOPED_TRACE(testing::describe(layout));
    const std::vector<StepPlan> plans = plan_ranks(layout);
    EXPECT_NO_THROW(simulate_plans(plans, estimated_rates(true)));
    constexpr int kMutants = 12;
    for (int i = 0; i < kMutants; ++i) {
      std::vector<StepPlan> mutants = plans;
      StepPlan& one = mutants[random.next_below(mutants.size())];
      one = bring_forward(one, random);
      if (!fails([&] { simulate_plans(mutants, estimated_rates(true)); })) continue;
      ++num_stuck;
      EXPECT_TRUE(fails([&] { check_ranks(mutants); })) << "rank " << one.rank;
    }
  }
  RecordProperty("stuck", num_stuck);
  EXPECT_GT(num_stuck, testing::few_of_count(10));
}

/// Slabs are what a training run takes for them.
TEST(PlannedStep, CountsTheMemoryThatTrainingTakes) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const RandomLayout layout = testing::draw_layout(seed, 4);
    SCOPED_TRACE(testing::describe(layout));
    const PlannedRank rank = plan_rank(layout.settings, 0, layout.num_ranks);
    const StepMemory memory = find_step_memory(plan_step(layout.settings, rank));
    const ActivationBytes expected = rank.model.activation_bytes();
    const SlabBytes most = bound_slab_bytes(rank.model.programs(), rank.model.placement());
    EXPECT_EQ(most.total(), expected.saved + expected.transient + expected.worst);
    const auto slabs = [&](Purpose purpose) { return memory.purposes[number_of(purpose)].slabs; };
    EXPECT_EQ(align_up(slabs(Purpose::kSaved), kSlabAlignment), most.saved);
    EXPECT_EQ(slabs(Purpose::kWorking), align_up(most.transient));
    // Gradients that nobody gives or takes have a stream all the same.
    EXPECT_LE(slabs(Purpose::kHidden), expected.hidden);
  }
}

Settings small_layers() {
  Settings settings = without_data({});
  settings.model.vocab_size = 64;
  settings.model.hidden_size = 64;
  settings.model.num_layers = 5;
  settings.model.moe = {.num_experts = 4, .top_k = 2, .inner_size = 64};
  settings.data.sequence_length = 64;
  settings.run.device = DeviceChoice::kCpu;
  return settings;
}

/// Layers' gradients in turn, and state from the host.
StepPlan plan_released(bool state_on_host, int64_t rank = 0, int64_t num_ranks = 1) {
  Settings settings = small_layers();
  settings.train.max_grad_norm = 0;
  settings.train.micro_batch = settings.train.global_batch / 4;
  settings.shard.release_gradients = true;
  settings.shard.state_on_host = state_on_host;
  settings.train.micro_batch /= num_ranks;
  return plan_step(settings, plan_rank(settings, rank, num_ranks));
}

std::vector<TaskId> find_all(const StepPlan& plan, TaskAction action, TaskPhase phase) {
  std::vector<TaskId> found;
  for (const TaskId id : plan.tasks.ids()) {
    if (plan.tasks[id].action == action && plan.tasks[id].phase == phase) found.push_back(id);
  }
  return found;
}

/// The plan in which the task comes where `to` is.
StepPlan move_task(const StepPlan& plan, TaskId task, TaskId to) {
  std::vector<TaskId> order = plan.tasks.ids();
  const auto from = order.begin() + number_of(task);
  const auto target = order.begin() + number_of(to);
  if (from < target) {
    std::rotate(from, from + 1, target + 1);
  } else {
    std::rotate(target, from, from + 1);
  }
  return reorder(plan, order);
}

TEST(ReleasedStep, UpdatesALayerBeforeTheNextHasGradients) {
  const StepPlan plan = plan_released(false);
  check_plan(plan);
  const auto updates = find_all(plan, TaskAction::kUpdate, TaskPhase::kWhole);
  const auto runs = find_all(plan, TaskAction::kRunProgram, TaskPhase::kWhole);
  ASSERT_EQ(updates.size(), 7);  // head, layers, embedding
  for (size_t i = 1; i + 2 < updates.size(); ++i) {
    const auto next = std::ranges::upper_bound(runs, updates[i]);
    ASSERT_NE(next, runs.end());
    EXPECT_LT(*(next + 3), updates[i + 1]);  // all micro-batches of the layer
    EXPECT_GT(*(next + 4), updates[i + 1]);
    // The next layer would write where this one's gradients are.
    EXPECT_THROW(check_plan(move_task(plan, updates[i], *next)), InternalError);
    // Gradients come first.
    EXPECT_THROW(check_plan(move_task(plan, updates[i], runs.front())), InternalError);
  }
  EXPECT_LT(updates.back(), find_all(plan, TaskAction::kJudge, TaskPhase::kStart).at(0));
}

/// A layer is reduced while the next one's gradients come, and updated before the next but one's
/// do, on all ranks alike.
TEST(ReleasedStep, ReducesALayerBesideTheNext) {
  std::vector<StepPlan> plans;
  for (int64_t rank = 0; rank < 2; ++rank) plans.push_back(plan_released(false, rank, 2));
  EXPECT_NO_THROW(check_ranks(plans));
  const StepPlan& plan = plans.front();
  const auto starts = find_all(plan, TaskAction::kReduceBucket, TaskPhase::kStart);
  const auto waits = find_all(plan, TaskAction::kReduceBucket, TaskPhase::kWait);
  const auto updates = find_all(plan, TaskAction::kUpdate, TaskPhase::kWhole);
  const auto runs = find_all(plan, TaskAction::kRunProgram, TaskPhase::kWhole);
  ASSERT_EQ(starts.size(), updates.size());
  ASSERT_EQ(waits.size(), updates.size());
  int num_beside = 0;
  for (size_t i = 0; i < updates.size(); ++i) {
    EXPECT_LT(starts[i], waits[i]);
    EXPECT_LT(waits[i], updates[i]);
    num_beside +=
        std::ranges::any_of(runs, [&](TaskId run) { return starts[i] < run && run < waits[i]; });
    EXPECT_THROW(check_plan(move_task(plan, updates[i], waits[i])), InternalError);
  }
  EXPECT_GE(num_beside, 4);
  // New weights travel behind all sums, for which they share communicators.
  const auto gathers = find_all(plan, TaskAction::kGatherBucket, TaskPhase::kStart);
  ASSERT_EQ(gathers.size(), updates.size());
  EXPECT_GT(gathers.front(), waits.back());
}

TEST(ReleasedStep, BringsStateFromTheHostBesideTheRuns) {
  const StepPlan plan = plan_released(true);
  check_plan(plan);
  const auto updates = find_all(plan, TaskAction::kUpdate, TaskPhase::kWhole);
  for (const TaskAction action : {TaskAction::kLoadState, TaskAction::kStoreState}) {
    const auto starts = find_all(plan, action, TaskPhase::kStart);
    const auto waits = find_all(plan, action, TaskPhase::kWait);
    ASSERT_EQ(starts.size(), updates.size());
    ASSERT_EQ(waits.size(), updates.size());
    for (size_t i = 0; i < starts.size(); ++i) {
      const bool loads = action == TaskAction::kLoadState;
      EXPECT_THROW(check_plan(move_task(plan, starts[i], loads ? waits[i] : TaskId{0})),
                   InternalError);
      EXPECT_THROW(check_plan(move_task(plan, waits[i], loads ? updates[i] : TaskId{0})),
                   InternalError);
    }
  }
  // A layer's run between the start of its load and the update.
  const auto loads = find_all(plan, TaskAction::kLoadState, TaskPhase::kStart);
  const auto runs = find_all(plan, TaskAction::kRunProgram, TaskPhase::kWhole);
  for (size_t i = 0; i < loads.size(); ++i) {
    EXPECT_GE(
        std::ranges::count_if(runs, [&](TaskId run) { return loads[i] < run && run < updates[i]; }),
        1);
  }
}

/// Buckets that the host updates; two micro-batches of small layers.
StepPlan plan_on_host(bool releases, int64_t rank = 0, int64_t num_ranks = 1) {
  Settings settings = small_layers();
  settings.train.precision = Precision::kBF16;
  settings.train.max_grad_norm = releases ? 0 : 1;
  settings.train.micro_batch = settings.train.global_batch / 2 / num_ranks;
  settings.shard.release_gradients = releases;
  settings.shard.bucket_bytes = 1 << 16;
  settings.shard.state_on_host = settings.shard.updates_on_host = true;
  return plan_step(settings, plan_rank(settings, rank, num_ranks));
}

constexpr TaskAction kHostUpdate[] = {TaskAction::kStoreGradients, TaskAction::kUpdate,
                                      TaskAction::kLoadWeights};

/// Each bucket's gradients go, then it is updated, then its weights come back, on lanes of their
/// own, and nothing of the state travels.
TEST(HostUpdateStep, SendsGradientsAndTakesWeights) {
  for (const bool releases : {false, true}) {
    const StepPlan plan = plan_on_host(releases);
    check_plan(plan);
    std::array<std::vector<TaskId>, 3> starts;
    for (size_t i = 0; i < starts.size(); ++i) {
      starts[i] = find_all(plan, kHostUpdate[i], TaskPhase::kStart);
      EXPECT_EQ(find_all(plan, kHostUpdate[i], TaskPhase::kWait).size(), starts[i].size());
    }
    ASSERT_GT(starts[0].size(), 5);
    ASSERT_EQ(starts[1].size(), starts[0].size());
    ASSERT_EQ(starts[2].size(), starts[0].size());
    int64_t to_host = 0, from_host = 0, state = 0;
    for (size_t i = 0; i < starts[0].size(); ++i) {
      const auto& [store, update, load] =
          std::tuple(plan.tasks[starts[0][i]], plan.tasks[starts[1][i]], plan.tasks[starts[2][i]]);
      EXPECT_EQ(update.after, std::vector{starts[0][i]});
      EXPECT_EQ(load.after, std::vector{starts[1][i]});
      EXPECT_EQ(plan.lanes[store.lane].kind, LaneKind::kStores);
      EXPECT_EQ(plan.lanes[update.lane].kind, LaneKind::kHostUpdates);
      EXPECT_EQ(plan.lanes[load.lane].kind, LaneKind::kReloads);
      for (const BufferId buffer : update.writes)
        EXPECT_EQ(plan.storages[plan.buffers[buffer].storage].home, Home::kHost);
      to_host += store.bytes;
      from_host += load.bytes;
      state += update.bytes / 2;
    }
    // Gradients in F32 and weights in BF16, of which norms and routers are F32 and their own
    // masters, which go too; moments and masters stay.
    EXPECT_LT(to_host, 1.05 * state / 3);
    EXPECT_LT(from_host, 1.05 * state / 6);
    EXPECT_TRUE(find_all(plan, TaskAction::kLoadState, TaskPhase::kStart).empty());
    // A window is taken again when it is left.
    for (size_t i = 2; i < starts[0].size(); ++i) {
      const Task& store = plan.tasks[starts[0][i]];
      const auto same_window = std::find_if(starts[2].rbegin(), starts[2].rend(), [&](TaskId load) {
        return load < starts[0][i] && plan.tasks[load].subject.unit % 2 == store.subject.unit % 2;
      });
      if (same_window == starts[2].rend()) continue;
      EXPECT_NE(std::ranges::find(store.after, *same_window), store.after.end());
    }
  }
}

/// The next step's passes begin while the host updates: each waits for the weights that it reads.
TEST(HostUpdateStep, GoesOnBesideTheNextStepsPasses) {
  const StepPlan plan = plan_on_host(false);
  const auto runs = find_all(plan, TaskAction::kRunProgram, TaskPhase::kWhole);
  const auto waits = find_all(plan, TaskAction::kLoadWeights, TaskPhase::kWait);
  const auto starts = find_all(plan, TaskAction::kLoadWeights, TaskPhase::kStart);
  EXPECT_LT(runs.back(), starts.front());
  EXPECT_LT(waits.front(), runs.front());
  int num_behind = 0;
  for (const TaskId wait : waits) {
    EXPECT_GT(*plan.tasks[wait].started_by, wait);
    num_behind += wait > runs[2] ? 1 : 0;
    // Its first reader comes before it then.
    const auto reader = std::ranges::upper_bound(runs, wait);
    ASSERT_NE(reader, runs.end());
    EXPECT_THROW(check_plan(move_task(plan, wait, *reader)), InternalError);
  }
  EXPECT_GE(num_behind, 2);
  // Gradients are overwritten when they have left.
  for (const TaskId wait : find_all(plan, TaskAction::kStoreGradients, TaskPhase::kWait))
    EXPECT_THROW(check_plan(move_task(plan, wait, runs.back())), InternalError);
}

/// A layer's gradients leave beside the passes, and the next ones wait for that alone.
TEST(HostUpdateStep, ReleasesGradientsWhenTheyHaveLeft) {
  const StepPlan plan = plan_on_host(true);
  const auto runs = find_all(plan, TaskAction::kRunProgram, TaskPhase::kWhole);
  const auto stores = find_all(plan, TaskAction::kStoreGradients, TaskPhase::kStart);
  const auto loads = find_all(plan, TaskAction::kLoadWeights, TaskPhase::kWait);
  int num_beside = 0;
  for (const TaskId wait : find_all(plan, TaskAction::kStoreGradients, TaskPhase::kWait)) {
    const TaskId start = *plan.tasks[wait].started_by;
    if (start > wait) continue;
    const auto next = std::ranges::upper_bound(runs, wait);
    if (next == runs.end()) continue;
    ++num_beside;
    EXPECT_THROW(check_plan(move_task(plan, wait, *next)), InternalError);
  }
  EXPECT_GE(num_beside, 3);
  EXPECT_LT(stores.front(), runs.back());
  for (const TaskId wait : loads) EXPECT_GT(*plan.tasks[wait].started_by, wait);
}

/// Of several ranks each bucket is gathered when its weights are there, in one order.
TEST(HostUpdateStep, GathersWeightsThatCameBack) {
  for (const bool releases : {false, true}) {
    std::vector<StepPlan> plans;
    for (int64_t rank = 0; rank < 2; ++rank) plans.push_back(plan_on_host(releases, rank, 2));
    EXPECT_NO_THROW(check_ranks(plans));
    const StepPlan& plan = plans.front();
    const auto gathers = find_all(plan, TaskAction::kGatherBucket, TaskPhase::kStart);
    const auto waits = find_all(plan, TaskAction::kLoadWeights, TaskPhase::kWait);
    const auto starts = find_all(plan, TaskAction::kStoreGradients, TaskPhase::kStart);
    ASSERT_EQ(gathers.size(), starts.size());
    ASSERT_EQ(waits.size(), starts.size());
    EXPECT_LT(starts.back(), gathers.front());
    for (size_t i = 0; i < gathers.size(); ++i)
      EXPECT_THROW(check_plan(move_task(plan, waits[i], gathers[i])), InternalError);
  }
}

}  // namespace
}  // namespace tessera
