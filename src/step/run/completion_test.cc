// When a step's plan says that gradients are complete and that weights are needed.
#include <gtest/gtest.h>

#include <map>

#include "comm/planned_world.h"
#include "model/run/model_testing.h"
#include "step/build/build_step.h"
#include "step/check_plan.h"
#include "step/run/step_runner.h"

namespace tessera {
namespace {

using testing::TestBatch;
using testing::tiny_config;
using testing::tiny_shape;

struct CompletionCase {
  std::string name;
  bool tied = false;
  int64_t mtp_layers = 0;
  bool split_weights = false;
};

void PrintTo(const CompletionCase& c, std::ostream* out) {
  *out << c.name;
}

/// Buckets of one parameter each, which other ranks hold too, though they are not there: keeps what
/// a gradient is when its reduction begins.
class RecordedParameters final : public StepParameters {
 public:
  RecordedParameters(ParameterSet& parameters, const ReplicatedExchanges& exchanges)
      : parameters_(parameters), exchanges_(exchanges) {}

  void begin() override { parameters_.reset_gradients(); }
  void start(TaskAction action, int64_t unit) override {
    if (action != TaskAction::kReduceBucket) return;
    const size_t idx = exchanges_.buckets[unit].parameters[0];
    parameters_.settle_gradient(idx);
    EXPECT_TRUE(complete.emplace(idx, gradient(idx)).second);
  }
  void wait(TaskAction, int64_t) override {}
  void finish_gradients() override { parameters_.settle_gradients(); }
  StepResult judge(const StepInput&) override { return {.updated = true}; }
  void discard() override {}
  void update(int64_t, const StepInput&) override {}

  std::vector<float> gradient(size_t idx) const {
    const auto values = parameters_.all()[idx].grad.span<float>();
    return {values.begin(), values.end()};
  }

  std::map<size_t, std::vector<float>> complete;

 private:
  ParameterSet& parameters_;
  const ReplicatedExchanges& exchanges_;
};

class Completion : public ::testing::TestWithParam<CompletionCase> {
 protected:
  Completion()
      : config_(make_config()),
        parameters_(list_parameters(config_, DType::kF32), true),
        experts_(make_expert_states(config_)),
        model_(config_, tiny_shape(2, 6), {}, make_cpu_kernels(),
               {.in_flight = {kMicroBatches}, .split_weights = GetParam().split_weights}),
        world_(make_planned_world(0, 2)),
        pipeline_({make_single_communicator("pp"), make_single_communicator("pp_gradients")}) {
    parameters_.initialize(3);
    model_.bind(parameters_, experts_);
    const CommunicatorPtr replicas = world_->make_group("replicas", {0, 1});
    for (size_t i = 0; i < parameters_.all().size(); ++i) {
      const size_t idx = parameters_.all().size() - 1 - i;
      const int64_t bytes = parameters_.all()[idx].weight.num_bytes();
      exchanges_.buckets.push_back({.group = 0,
                                    .idx = static_cast<int64_t>(i),
                                    .parameters = {idx},
                                    .outer = replicas,
                                    .weight_bytes = bytes,
                                    .gradient_bytes = bytes,
                                    .reduced_bytes = bytes});
    }
  }

  static ModelConfig make_config() {
    ModelConfig config = tiny_config();
    config.tie_embeddings = GetParam().tied;
    config.mtp_layers = GetParam().mtp_layers;
    return config;
  }

  StepPlan build() const {
    const auto steps = make_pipeline_schedule({.kind = PipelineKind::kGpipe,
                                               .num_micro_batches = kMicroBatches,
                                               .split_weights = GetParam().split_weights})[0];
    return build_step({.programs = model_.programs(),
                       .parameters = parameters_,
                       .pipeline = pipeline_,
                       .steps = steps,
                       .world = make_single_communicator("world"),
                       .sharding = {.replicated = exchanges_}});
  }

  static constexpr int64_t kMicroBatches = 2;
  ModelConfig config_;
  ParameterSet parameters_;
  std::vector<ExpertState> experts_;
  TrainingModel model_;
  std::unique_ptr<World> world_;
  PipelinePlace pipeline_;
  ReplicatedExchanges exchanges_;
};

/// Every gradient is reduced once, and does not change any more.
TEST_P(Completion, GradientsAreCompleteWhenTheirReductionStarts) {
  const StepPlan plan = build();
  check_plan(plan);
  RecordedParameters recorded(parameters_, exchanges_);
  StepRunner runner(model_, pipeline_, recorded);
  TestBatch first(config_, 2, 6, 5);
  TestBatch second(config_, 2, 6, 6);
  GivenBatches given({first.view(), second.view()}, {.loss = 0.1F, .balance = 0.01F, .mtp = 0.1F});
  runner.run(plan, given);
  EXPECT_GT(given.result().loss, 0);
  ASSERT_EQ(recorded.complete.size(), parameters_.all().size());
  for (const auto& [idx, values] : recorded.complete)
    EXPECT_EQ(values, recorded.gradient(idx)) << parameters_.all()[idx].spec.name;
}

/// Each starts directly behind the last run that adds to it or to one in front of it.
TEST_P(Completion, ReductionsStartAsSoonAsTheyCan) {
  const StepPlan plan = build();
  std::map<BufferId, int32_t> last_runs;
  for (const TaskId id : plan.tasks.ids()) {
    if (plan.tasks[id].kind != TaskKind::kRun) continue;
    for (const BufferId buffer : plan.tasks[id].writes) last_runs[buffer] = number_of(id);
  }
  int32_t last_run = 0;
  size_t num_started = 0;
  for (const TaskId id : plan.tasks.ids()) {
    const Task& task = plan.tasks[id];
    if (task.action != TaskAction::kReduceBucket || task.phase != TaskPhase::kStart) continue;
    ++num_started;
    last_run = std::max(last_run, last_runs.at(task.writes[0]));
    EXPECT_GT(number_of(id), last_run) << task.name;
    for (int32_t at = last_run + 1; at < number_of(id); ++at)
      EXPECT_NE(plan.tasks[TaskId{at}].kind, TaskKind::kRun) << task.name;
  }
  EXPECT_EQ(num_started, parameters_.all().size());
}

/// The updated weights of a bucket are waited for in front of the first run that reads them.
TEST_P(Completion, WeightsAreWaitedForWhereTheyAreNeeded) {
  const StepPlan plan = build();
  std::map<BufferId, int32_t> waits, readers;
  for (const TaskId id : plan.tasks.ids()) {
    const Task& task = plan.tasks[id];
    if (task.action == TaskAction::kGatherBucket && task.phase == TaskPhase::kWait) {
      EXPECT_TRUE(waits.emplace(task.writes[0], number_of(id)).second);
    }
    if (task.kind != TaskKind::kRun) continue;
    for (const BufferId buffer : task.reads) readers.emplace(buffer, number_of(id));
  }
  EXPECT_EQ(waits.size(), parameters_.all().size());
  for (const auto& [buffer, wait] : waits) {
    ASSERT_TRUE(readers.contains(buffer));
    for (int32_t at = wait; at < readers[buffer]; ++at)
      EXPECT_NE(plan.tasks[TaskId{at}].kind, TaskKind::kRun);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Completion,
                         ::testing::Values(CompletionCase{"plain"}, CompletionCase{"tied", true},
                                           CompletionCase{"prediction", false, 2},
                                           CompletionCase{"tied_prediction", true, 1},
                                           CompletionCase{"split", false, 0, true},
                                           CompletionCase{"split_tied_prediction", true, 1, true}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
