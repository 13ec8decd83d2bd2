#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "core/host_tensor.h"
#include "core/slice.h"
#include "model/run/model_testing.h"
#include "step/build/build_step.h"
#include "step/build/place_saved.h"
#include "step/run/layout_cases.h"
#include "step/run/step_runner.h"

/// A step of a whole model spread over ranks, for tests that compare it with that on one rank.
namespace tessera::testing {

/// What a step gives: losses of all ranks together, and gradients of whole weights, summed over the
/// ranks that hold them.
struct StepResult {
  MicroBatchResult losses;
  std::map<std::string, OwnedTensor> gradients;
};

inline void add_to(const Tensor& sum, const Tensor& part) {
  const auto to = sum.span<float>();
  std::ranges::transform(to, part.span<float>(), to.begin(), std::plus<>());
}

/// One rank's step.
class LayoutStep {
 public:
  static constexpr int64_t kMicroBatches = 4;  ///< of all ranks together
  static constexpr int64_t kSequences = 2;
  static constexpr int64_t kLength = 16;
  static constexpr int64_t kFirstDocument = 5;  ///< tokens of a row's, where it has two

  LayoutStep(const LayoutCase& c, DType dtype, World& world, const Backend& backend)
      : backend_(backend), config_(tiny_config()) {
    c.change(config_);
    config_.moe.fuse_gather = c.gathers;
    config_.moe.fuse_activation = c.fuse_activations;
    ParallelSpec parallel;
    c.spread(parallel);
    const Layout layout(parallel.layout, world.size());
    const PipelineLayout pipeline = make_pipeline_layout(parallel, config_.layer_counts());
    const int64_t stage = layout.coordinate(world.rank(), Axis::kPp);
    ModelPart part{.groups = join_stage_groups(world, layout, parallel),
                   .split_weights = parallel.split_weights};
    for (int64_t i = stage; i < std::ssize(pipeline.chunks); i += pipeline.num_stages)
      part.chunks.push_back(pipeline.chunks[i]);
    const auto along = layout.group(world.rank(), Axis::kPp);
    const PipelinePlace place{.activations = world.make_group("pp", along),
                              .gradients = world.make_group("pp_gradients", along),
                              .num_chunks = pipeline.chunks_per_stage()};
    const int64_t data_ranks = part.groups.dp->size();
    const auto steps = make_pipeline_schedule(
        pipeline_spec(parallel, pipeline, kMicroBatches / data_ranks))[stage];
    part.in_flight = count_in_flight(steps, place.num_chunks);
    for (int64_t g = part.groups.dp->rank(); g < kMicroBatches; g += data_ranks) {
      batches_.emplace_back(config_, kSequences, kLength, static_cast<uint64_t>(g));
      if (c.documents) batches_.back().split_rows(kLength, kFirstDocument);
      noise_.push_back({.training = true, .key = 9, .first_token = g * kSequences * kLength});
    }

    parameters_ = std::make_unique<ParameterSet>(
        list_parameters(config_, dtype, part.groups, part.chunks), true, backend.device());
    parameters_->initialize(3);
    fill_adapters(*parameters_);
    experts_ = make_expert_states(config_, backend.device());
    SavedPolicy policy{.offload = {.entries = parse_offload(c.offload)}};
    if (c.stash) policy.stash = StashPolicy{.factor = 1, .page_rows = 1};
    if (c.recompute) policy.recompute = parse_recompute({"all"});
    BatchShape shape = tiny_shape(kSequences, kLength, dtype);
    if (c.documents) shape.max_sequences = 2 * kSequences;
    shape.trains = true;
    model_ = std::make_unique<TrainingModel>(config_, shape, policy, backend, std::move(part));
    model_->place(place_saved(model_->programs(), steps));
    model_->bind(*parameters_, experts_);
    if (StashPool* const pool = model_->stash()) pool->grow(model_->placement().stash.most);
    plan_ = build_step({.programs = model_->programs(),
                        .parameters = *parameters_,
                        .pipeline = place,
                        .steps = steps,
                        .world = world.make_world_group(),
                        .placement = &model_->placement()});
    local_ = std::make_unique<LocalParameters>(*parameters_);
    runner_ = std::make_unique<StepRunner>(*model_, place, *local_);
  }

  MicroBatchResult run() {
    std::vector<MicroBatch> views;
    for (size_t i = 0; i < batches_.size(); ++i) {
      views.push_back(batches_[i].view());
      views.back().noise = noise_[i];
    }
    constexpr float kShare = 1.0F / kMicroBatches;
    GivenBatches given(std::move(views), {.loss = kShare / 30,
                                          .balance = 0.05F * kShare,
                                          .z_loss = 0.01F * kShare,
                                          .mtp = 0.3F * kShare / 30});
    runner_->run(plan_, given);
    parameters_->settle_gradients();
    backend_.device().synchronize();
    return given.result();
  }

  const TrainingModel& model() const { return *model_; }
  ParameterSet& parameters() const { return *parameters_; }

  /// Adds this rank's parts to the whole gradients.
  void add_gradients(std::map<std::string, OwnedTensor>& whole) const {
    for (const ModelParameter& parameter : parameters_->all()) {
      if (parameter.is_frozen()) continue;
      const Slice& slice = parameter.spec.placement.slice;
      const HostTensor part(parameter.grad, HostTensor::Access::kRead);
      OwnedTensor expanded(DType::kF32, slice.global);
      copy_slice_into(slice, part.get(), expanded);
      add_to(whole.try_emplace(parameter.spec.name, DType::kF32, slice.global).first->second,
             expanded);
    }
  }

 private:
  Backend backend_;
  ModelConfig config_;
  std::vector<TestBatch> batches_;
  std::vector<RouterNoise> noise_;
  std::unique_ptr<ParameterSet> parameters_;
  std::vector<ExpertState> experts_;
  std::unique_ptr<TrainingModel> model_;
  StepPlan plan_;
  std::unique_ptr<LocalParameters> local_;
  std::unique_ptr<StepRunner> runner_;
};

/// Calls a function with each rank's world and where its programs run.
using RunLayoutRanks =
    std::function<void(int64_t num_ranks, const std::function<void(World&, const Backend&)>& body)>;

/// A step over c.num_ranks ranks; twice, to the same bits.
inline StepResult run_layout(const LayoutCase& c, DType dtype, const RunLayoutRanks& run_ranks) {
  std::vector<StepResult> of_ranks(c.num_ranks);
  run_ranks(c.num_ranks, [&](World& world, const Backend& backend) {
    LayoutStep step(c, dtype, world, backend);
    std::map<std::string, OwnedTensor> first;
    step.run();
    step.add_gradients(first);
    StepResult& own = of_ranks[world.rank()];
    own.losses = step.run();
    step.add_gradients(own.gradients);
    for (const auto& [name, gradient] : first) {
      EXPECT_TRUE(std::ranges::equal(gradient.get().span<float>(),
                                     own.gradients.at(name).get().span<float>()))
          << name << " differs from run to run on rank " << world.rank();
    }
  });
  StepResult result;
  for (const StepResult& own : of_ranks) {
    result.losses += own.losses;
    for (const auto& [name, gradient] : own.gradients)
      add_to(result.gradients.try_emplace(name, DType::kF32, gradient.get().shape).first->second,
             gradient);
  }
  return result;
}

inline float largest(const Tensor& tensor) {
  float most = 0;
  for (const float value : tensor.span<float>()) most = std::max(most, std::abs(value));
  return most;
}

inline void expect_losses_near(const MicroBatchResult& found, const MicroBatchResult& expected,
                               double tolerance) {
  EXPECT_NEAR(found.loss, expected.loss, tolerance * expected.loss);
  EXPECT_NEAR(found.mtp_loss, expected.mtp_loss, tolerance * expected.mtp_loss);
  EXPECT_NEAR(found.balance_loss, expected.balance_loss, tolerance * expected.balance_loss);
  EXPECT_NEAR(found.z_loss, expected.z_loss, tolerance * expected.z_loss);
}

/// Losses, and every gradient by its largest element (or a thousandth of the largest of all).
inline void expect_same_step(const StepResult& found, const StepResult& expected,
                             double tolerance) {
  expect_losses_near(found.losses, expected.losses, tolerance);
  EXPECT_EQ(found.losses.dropped, expected.losses.dropped);
  float most = 0;
  for (const auto& [name, gradient] : expected.gradients) most = std::max(most, largest(gradient));
  ASSERT_EQ(found.gradients.size(), expected.gradients.size());
  for (const auto& [name, gradient] : expected.gradients) {
    const auto other = found.gradients.at(name).get().span<float>();
    const auto whole = gradient.get().span<float>();
    double error = 0;
    for (size_t i = 0; i < whole.size(); ++i) {
      const double off = std::abs(other[i] - whole[i]);
      error = std::isnan(off) ? INFINITY : std::max(error, off);
    }
    EXPECT_LE(error, tolerance * std::max(largest(gradient), 1e-3F * most)) << name;
  }
}

/// What waited in pages comes back as it was. Layouts whose weights' gradients are apart have none.
inline void expect_stash_changes_nothing(LayoutCase c, const RunLayoutRanks& run_ranks) {
  ParallelSpec parallel;
  c.spread(parallel);
  if (parallel.split_weights) return;
  c.gathers = GatherFusion::kNever;
  const StepResult kept = run_layout(c, DType::kF32, run_ranks);
  c.stash = true;
  expect_same_step(run_layout(c, DType::kF32, run_ranks), kept, 0);
}

/// The model of `c` on one rank.
inline LayoutCase on_one_rank(LayoutCase c) {
  c.num_ranks = 1;
  c.spread = [](ParallelSpec&) {};
  return c;
}

}  // namespace tessera::testing
