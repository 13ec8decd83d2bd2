#include "step/build/build_step.h"

#include <gtest/gtest.h>

#include "comm/planned_world.h"
#include "model/run/model_testing.h"
#include "parallel/options.h"
#include "step/build/place_saved.h"
#include "step/build/reorder_plan.h"
#include "step/check_plan.h"
#include "step/step_memory.h"

namespace tessera {
namespace {

using testing::tiny_config;
using testing::tiny_shape;

struct ScheduleCase {
  PipelineKind kind = PipelineKind::kOneFOneB;
  int64_t num_stages = 1;
  int64_t num_chunks = 1;
  int64_t num_micro_batches = 1;
  bool split = false;
  bool model_balance = false;
  int64_t mtp_layers = 0;
  double offload_rate = 0;  ///< GB/s; 0: nothing is offloaded
  bool merged = false;
};

std::string name_of(const ScheduleCase& c) {
  return fmt::format("{}_{}x{}_{}{}{}{}{}{}",
                     c.kind == PipelineKind::kGpipe      ? "gpipe"
                     : c.kind == PipelineKind::kOneFOneB ? "one_f_one_b"
                                                         : "interleaved",
                     c.num_stages, c.num_chunks, c.num_micro_batches, c.split ? "_split" : "",
                     c.model_balance ? "_balance" : "", c.mtp_layers > 0 ? "_mtp" : "",
                     c.offload_rate == 0  ? ""
                     : c.offload_rate > 1 ? "_offload"
                                          : "_slow_offload",
                     c.merged ? "_merged" : "");
}
void PrintTo(const ScheduleCase& c, std::ostream* out) {
  *out << name_of(c);
}

std::vector<ScheduleCase> all_cases() {
  std::vector<ScheduleCase> cases;
  for (const int64_t stages : {1, 2, 3}) {
    for (const int64_t micro_batches : {1, 2, 5}) {
      for (const bool split : {false, true}) {
        cases.push_back({PipelineKind::kGpipe, stages, 1, micro_batches, split});
        cases.push_back({PipelineKind::kOneFOneB, stages, 1, micro_batches, split});
        for (const int64_t chunks : {1, 2})
          cases.push_back({PipelineKind::kInterleaved, stages, chunks, micro_batches, split});
      }
    }
  }
  for (const int64_t stages : {1, 2, 3}) {
    for (const int64_t micro_batches : {1, 2, 7}) {
      for (const int64_t chunks : {1, 2}) {
        cases.push_back({PipelineKind::kInterleaved, stages, chunks, micro_batches, false,
                         /*model_balance=*/stages == 2, /*mtp_layers=*/chunks - 1, 0,
                         /*merged=*/true});
      }
    }
  }
  cases.push_back({PipelineKind::kOneFOneB, 2, 1, 3, false, true});
  cases.push_back({PipelineKind::kInterleaved, 2, 2, 4, true, true, 1});
  for (const double rate : {50.0, 0.3}) {
    for (const int64_t micro_batches : {1, 4}) {
      cases.push_back({PipelineKind::kGpipe, 2, 1, micro_batches, false, false, 0, rate});
      cases.push_back({PipelineKind::kOneFOneB, 1, 1, micro_batches, false, false, 1, rate});
      cases.push_back({PipelineKind::kOneFOneB, 3, 1, micro_batches, true, true, 0, rate});
      cases.push_back({PipelineKind::kInterleaved, 2, 2, micro_batches, true, false, 1, rate});
    }
  }
  return cases;
}

/// The plans of all ranks of a pipeline.
class PipelinePlans : public ::testing::Test {
 protected:
  ModelConfig config() const {
    const ScheduleCase& c = case_;
    ModelConfig config = tiny_config();
    config.num_layers = c.num_stages * c.num_chunks * (c.offload_rate > 0 ? 4 : 1);
    config.mtp_layers = c.mtp_layers;
    if (c.model_balance) config.moe.balance_scope = BalanceTokens::kModel;
    return config;
  }
  PipelineSpec spec() const {
    const ScheduleCase& c = case_;
    return {c.kind, c.num_stages, c.num_chunks, c.num_micro_batches, c.split, c.merged};
  }

  enum class What : uint8_t { kStep, kEvaluation, kStepOfSlabs };

  StepPlan build(int64_t stage, What what = What::kStep) {
    const ScheduleCase& c = case_;
    const auto world = make_planned_world(stage, c.num_stages);
    ParallelSpec parallel;
    parallel.layout.pp = c.num_stages;
    const Layout layout(parallel.layout, c.num_stages);
    const PipelineLayout pipeline =
        even_pipeline_layout(c.num_stages, c.num_chunks, config().layer_counts());
    ModelPart part{.groups = join_stage_groups(*world, layout, parallel),
                   .split_weights = c.split,
                   .merges_passes = c.merged};
    for (size_t i = stage; i < pipeline.chunks.size(); i += static_cast<size_t>(c.num_stages))
      part.chunks.push_back(pipeline.chunks[i]);
    const auto ranks = layout.group(stage, Axis::kPp);
    const PipelinePlace place{.activations = world->make_group("pp", ranks),
                              .gradients = world->make_group("pp_gradients", ranks),
                              .num_chunks = c.num_chunks};
    const auto steps = make_pipeline_schedule(spec())[stage];
    part.in_flight = count_in_flight(steps, c.num_chunks);
    const auto parameters = ParameterSet::without_memory(
        list_parameters(config(), DType::kF32, part.groups, part.chunks));
    SavedPolicy policy;
    if (c.offload_rate > 0)
      policy.offload = {.entries = parse_offload({"all"}), .link_bytes = c.offload_rate * 1e9};
    TrainingModel model(config(), tiny_shape(1, 4), policy, make_cpu_kernels(), part);
    in_line_.push_back(model.placement().num_bytes);
    model.place(place_saved(model.programs(), steps));
    placed_.push_back(model.placement().num_bytes);
    const StepRequest request{
        .programs = model.programs(),
        .parameters = parameters,
        .pipeline = place,
        .steps = steps,
        .world = world->make_world_group(),
        .placement = what == What::kStepOfSlabs ? nullptr : &model.placement()};
    return what == What::kEvaluation ? build_evaluation(request) : build_step(request);
  }
  std::vector<StepPlan> build_all(What what = What::kStep) {
    std::vector<StepPlan> plans;
    for (int64_t stage = 0; stage < case_.num_stages; ++stage) plans.push_back(build(stage, what));
    return plans;
  }

  ScheduleCase case_;
  std::vector<int64_t> in_line_, placed_;  // bytes that passes save, by plan built
};

class BuildStep : public PipelinePlans, public ::testing::WithParamInterface<ScheduleCase> {
 protected:
  BuildStep() { case_ = GetParam(); }
};

/// The passes whose programs a plan runs, each once; those that are merged in the order in which
/// they begin.
std::vector<PipelineStep> passes_of(const StepPlan& plan, bool merged) {
  std::vector<PipelineStep> passes;
  for (const Task& task : plan.tasks) {
    if (task.kind != TaskKind::kRun) continue;
    const PassDirection direction = task.subject.program.direction;
    const PipelineStep step{direction == PassDirection::kForward    ? PipelinePass::kForward
                            : direction == PassDirection::kBackward ? PipelinePass::kBackward
                                                                    : PipelinePass::kWeight,
                            task.subject.chunk, task.subject.micro_batch};
    const bool is_known = merged ? std::ranges::find(passes, step) != passes.end()
                                 : !passes.empty() && passes.back() == step;
    if (!is_known) passes.push_back(step);
  }
  return passes;
}

/// Of any numbers of stages, chunks and micro-batches, also such as do not divide each other.
TEST_F(PipelinePlans, NoStageWaitsForever) {
  for (const int64_t stages : {2, 3, 4}) {
    for (const int64_t chunks : {1, 2, 3, 4}) {
      for (const int64_t micro_batches : {1, 3, 4, 5, 6, 7, 9, 10}) {
        for (const auto& [split, merged] :
             {std::pair{false, false}, {true, false}, {false, true}}) {
          case_ = {PipelineKind::kInterleaved, stages, chunks, micro_batches, split};
          case_.merged = merged;
          case_.model_balance = micro_batches % 2 == 0;
          SCOPED_TRACE(name_of(case_));
          EXPECT_NO_THROW(check_ranks(build_all()));
        }
      }
    }
  }
}

TEST_P(BuildStep, KeepsTheScheduleAndIsRight) {
  const std::vector<StepPlan> plans = build_all();
  check_ranks(plans);
  const auto schedule = make_pipeline_schedule(spec());
  for (size_t stage = 0; stage < plans.size(); ++stage) {
    std::vector<PipelineStep> expected = schedule[stage];
    for (PipelineStep& step : expected) step.merged = false;
    const std::vector<PipelineStep> passes = passes_of(plans[stage], GetParam().merged);
    if (GetParam().merged) {
      EXPECT_TRUE(std::ranges::is_permutation(passes, expected)) << "stage " << stage;
    } else {
      EXPECT_EQ(passes, expected) << "stage " << stage;
    }
  }
}

TEST_P(BuildStep, EvaluationsAreRight) {
  const std::vector<StepPlan> plans = build_all(What::kEvaluation);
  check_ranks(plans);
  for (const StepPlan& plan : plans) {
    for (const Task& task : plan.tasks) {
      if (task.kind == TaskKind::kRun) {
        EXPECT_EQ(task.subject.program.direction, PassDirection::kForward);
      }
    }
  }
}

/// A receive is under way during the run before the one that reads it, wherever its buffer is free
/// then: always where it is a gradient, which nothing else used since the micro-batch's forward
/// pass.
TEST_P(BuildStep, ReceivesArePostedARunAhead) {
  for (const StepPlan& plan : build_all()) {
    for (const TaskId id : plan.tasks.ids()) {
      const Task& task = plan.tasks[id];
      if (task.kind != TaskKind::kReceive || task.phase != TaskPhase::kWait ||
          task.action != TaskAction::kBackwardMessage)
        continue;
      int runs = 0;
      for (auto at = number_of(*task.started_by); at < number_of(id); ++at)
        runs += plan.tasks[TaskId{at}].kind == TaskKind::kRun ? 1 : 0;
      EXPECT_EQ(runs, 1) << task.name;
    }
  }
}

TEST_P(BuildStep, PlacementByLifetimeNeedsNoMoreThanSlabs) {
  for (const StepPlan& plan : build_all(What::kStepOfSlabs)) {
    const StepMemory memory = find_step_memory(plan);
    EXPECT_GE(memory.placed, memory.most);
    EXPECT_LE(memory.placed, memory.slabs);
  }
}

/// What is kept for weight gradients that are apart takes room that one micro-batch after the other
/// uses.
TEST_P(BuildStep, SlabsShareMemory) {
  const ScheduleCase& c = GetParam();
  build_all();
  for (size_t i = 0; i < placed_.size(); ++i) EXPECT_LE(placed_[i], in_line_[i]);
  if (c.split && c.num_micro_batches == 5) {
    EXPECT_LT(placed_[0], in_line_[0]);
  }
}

std::vector<TaskId> find_all(const StepPlan& plan, TaskAction action, TaskPhase phase) {
  std::vector<TaskId> found;
  for (const TaskId id : plan.tasks.ids()) {
    if (plan.tasks[id].action == action && plan.tasks[id].phase == phase) found.push_back(id);
  }
  return found;
}

/// What is stored comes back, once; other runs go on meanwhile.
TEST_P(BuildStep, CopiesGoOnBesideRuns) {
  const auto runs_between = [](const StepPlan& plan, TaskId from, TaskId to) {
    int runs = 0;
    for (auto at = number_of(from); at < number_of(to); ++at)
      runs += plan.tasks[TaskId{at}].kind == TaskKind::kRun ? 1 : 0;
    return runs;
  };
  size_t num_stores = 0;
  for (const StepPlan& plan : build_all()) {
    const auto stores = find_all(plan, TaskAction::kStore, TaskPhase::kStart);
    num_stores += stores.size();
    EXPECT_EQ(find_all(plan, TaskAction::kReload, TaskPhase::kStart).size(), stores.size());
    for (const TaskAction action : {TaskAction::kStore, TaskAction::kReload}) {
      for (const TaskId wait : find_all(plan, action, TaskPhase::kWait))
        EXPECT_GE(runs_between(plan, *plan.tasks[wait].started_by, wait), 1)
            << plan.tasks[wait].name;
    }
  }
  if (GetParam().offload_rate == 0) {
    EXPECT_EQ(num_stores, 0);
  }
  if (GetParam().offload_rate == 50) {
    EXPECT_GT(num_stores, 0);
  }
}

/// A copy that is begun before what it reads is there, or waited for too late, is found.
TEST_P(BuildStep, CopiesInAWrongOrderAreFound) {
  if (GetParam().offload_rate != 50) return;
  for (const StepPlan& plan : build_all()) {
    for (const TaskAction action : {TaskAction::kStore, TaskAction::kReload}) {
      for (const TaskId start : find_all(plan, action, TaskPhase::kStart)) {
        std::vector<TaskId> order = plan.tasks.ids();
        const auto begin = order.begin() + number_of(start);
        std::rotate(order.begin(), begin, begin + 1);
        EXPECT_THROW(check_plan(reorder(plan, order)), InternalError) << plan.tasks[start].name;
      }
      for (const TaskId wait : find_all(plan, action, TaskPhase::kWait)) {
        std::vector<TaskId> order = plan.tasks.ids();
        const auto begin = order.begin() + number_of(wait);
        std::rotate(begin, begin + 1, order.end());
        EXPECT_THROW(check_plan(reorder(plan, order)), InternalError) << plan.tasks[wait].name;
      }
    }
  }
}

/// The plan of one rank that updates, with a bucket for each parameter.
StepPlan build_alone() {
  const ModelConfig config = tiny_config();
  const auto parameters = ParameterSet::without_memory(list_parameters(config, DType::kF32));
  TrainingModel model(config, tiny_shape(1, 4), {}, make_cpu_kernels());
  const CommunicatorPtr alone = make_single_communicator("replicas");
  ReplicatedExchanges exchanges;
  for (size_t i = 0; i < parameters.all().size(); ++i) {
    const int64_t bytes = parameters.all()[i].weight.num_bytes();
    exchanges.buckets.push_back({.group = 0,
                                 .idx = static_cast<int64_t>(i),
                                 .parameters = {i},
                                 .outer = alone,
                                 .inner = nullptr,
                                 .weight_bytes = bytes,
                                 .gradient_bytes = bytes,
                                 .reduced_bytes = bytes,
                                 .state_bytes = 2 * bytes});
  }
  return build_step({.programs = model.programs(),
                     .parameters = parameters,
                     .pipeline = {.activations = make_single_communicator("pp"),
                                  .gradients = make_single_communicator("pp_gradients"),
                                  .num_chunks = 1},
                     .steps = make_pipeline_schedule({PipelineKind::kOneFOneB, 1, 1, 2, false})[0],
                     .world = make_single_communicator("world"),
                     .sharding = {.replicated = exchanges}});
}

TaskId find(const StepPlan& plan, TaskAction action, TaskPhase phase) {
  for (const TaskId id : plan.tasks.ids()) {
    if (plan.tasks[id].action == action && plan.tasks[id].phase == phase) return id;
  }
  return plan.tasks.next();
}

/// The host learns what comes of a step when its device has been given all of it.
TEST(BuildStepAlone, TheDeviceUpdatesBeforeTheHostKnows) {
  const StepPlan plan = build_alone();
  check_plan(plan);
  const TaskId start = find(plan, TaskAction::kJudge, TaskPhase::kStart);
  const TaskId known = find(plan, TaskAction::kJudge, TaskPhase::kWait);
  EXPECT_LT(known, find(plan, TaskAction::kCollect, TaskPhase::kWhole));
  int num_updates = 0;
  for (const TaskId id : plan.tasks.ids()) {
    const Task& task = plan.tasks[id];
    if (task.action != TaskAction::kUpdate) continue;
    ++num_updates;
    EXPECT_FALSE(task.only_on_update);
    EXPECT_LT(start, id);
    EXPECT_LT(id, known);
  }
  EXPECT_EQ(num_updates, std::ssize(list_parameters(tiny_config(), DType::kF32)));
}

/// An update that comes before the clipping is found.
TEST(BuildStepAlone, UpdatesFollowTheClipping) {
  const StepPlan plan = build_alone();
  const TaskId judge = find(plan, TaskAction::kJudge, TaskPhase::kStart);
  const TaskId first = find(plan, TaskAction::kUpdate, TaskPhase::kWhole);
  std::vector<TaskId> order;
  for (const TaskId id : plan.tasks.ids()) {
    if (id == judge) order.push_back(first);
    if (id != first) order.push_back(id);
  }
  EXPECT_THROW(check_plan(reorder(plan, order)), InternalError);
}

INSTANTIATE_TEST_SUITE_P(All, BuildStep, ::testing::ValuesIn(all_cases()),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace tessera
