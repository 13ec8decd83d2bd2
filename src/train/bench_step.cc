#include "train/bench_step.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "core/random.h"
#include "core/stopwatch.h"
#include "train/device_choice.h"
#include "train/loss_scales.h"
#include "train/machine.h"
#include "train/trainer.h"
#include "train/verify.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

/// Sequences of random tokens, each with a random label.
class RandomTokens {
 public:
  RandomTokens(const BatchShape& shape, int64_t vocab_size, uint64_t seed) : cu_seqlens_{0} {
    Random random(seed, 1);
    const auto draw = [&] {
      return static_cast<int32_t>(random.next_below(static_cast<uint64_t>(vocab_size)));
    };
    for (int64_t i = 0; i < shape.num_tokens; ++i) {
      tokens_.push_back(draw());
      labels_.push_back(draw());
      positions_.push_back(static_cast<int32_t>(i % shape.sequence_length));
      if ((i + 1) % shape.sequence_length == 0) cu_seqlens_.push_back(static_cast<int32_t>(i + 1));
    }
  }
  MicroBatch view() {
    const auto make = [](std::vector<int32_t>& ids) {
      return tessera::view(std::span(ids), {std::ssize(ids)});
    };
    return {make(tokens_), make(labels_), make(positions_), make(cu_seqlens_)};
  }

 private:
  std::vector<int32_t> tokens_, labels_, positions_, cu_seqlens_;
};

/// A model that trains on random tokens.
class StepBench {
 public:
  explicit StepBench(const Settings& settings)
      : settings_(settings),
        world_(make_single_world()),
        backend_(choose_backend(settings)),
        peak_(measure_matrix_peak(backend_, settings.train.dtype())),
        layout_(make_run_layout(settings, *world_)),
        model_(settings.model, batch_shape(settings), settings.train.recompute, backend_,
               layout_.part),
        batches_(make_batches(settings)),
        prediction_(predict_memory(settings, layout_, model_, backend_, /*data_bytes=*/0)),
        state_(settings, layout_, *world_, backend_) {
    state_.initialize(static_cast<uint64_t>(settings.run.seed));
    model_.bind(state_.parameters(), state_.experts(), state_.weights());
    executor_.emplace(model_, layout_.pipeline, layout_.steps);
  }

  /// Returns the seconds of a step.
  double step(const NodeObserver& observer, double* update_seconds = nullptr) {
    const auto start = Clock::now();
    state_.begin_step();
    model_.begin_step();
    std::vector<MicroBatch> micro_batches;
    for (RandomTokens& tokens : batches_) micro_batches.push_back(tokens.view());
    executor_->run(micro_batches, loss_scales(settings_, tokens_of_step()), observer,
                   state_.hooks());
    const auto update = Clock::now();
    state_.update({.step_idx = step_idx_++,
                   .lr = kLearningRate,
                   .max_grad_norm = settings_.train.max_grad_norm});
    if (settings_.model.moe.has_expert_bias())
      update_expert_biases(state_.experts(), settings_.model.moe.bias_update_speed);
    backend_.device().synchronize();
    if (update_seconds != nullptr) *update_seconds = seconds_since(update);
    return seconds_since(start);
  }

  StepBenchResult describe() const {
    const auto num_batches = static_cast<double>(settings_.train.num_micro_batches());
    StepBenchResult result{
        .device = backend_.is_host() ? describe_machine() : backend_.device().name(),
        .tokens = tokens_of_step(),
        .flops = model_.model_flops() * num_batches,
        .matrix_peak = peak_,
        .memory_used = backend_.device().used_bytes(),
        .memory_predicted = prediction_.total()};
    for (const ModelParameter& parameter : state_.parameters().all())
      result.parameters += parameter.weight.num_elements();
    return result;
  }

 private:
  /// So low that the weights stay what they are.
  static constexpr double kLearningRate = 1e-5;

  static std::vector<RandomTokens> make_batches(const Settings& settings) {
    std::vector<RandomTokens> batches;
    for (int64_t i = 0; i < settings.train.num_micro_batches(); ++i)
      batches.emplace_back(batch_shape(settings), settings.model.vocab_size,
                           static_cast<uint64_t>(i));
    return batches;
  }
  int64_t tokens_of_step() const {
    return model_.batch_shape().num_tokens * settings_.train.num_micro_batches();
  }

  const Settings& settings_;
  std::unique_ptr<World> world_;
  Backend backend_;
  double peak_;
  RunLayout layout_;
  TrainingModel model_;
  std::vector<RandomTokens> batches_;
  MemoryPrediction prediction_;
  ModelState state_;
  std::optional<PipelineExecutor> executor_;
  int64_t step_idx_ = 0;
};

}  // namespace

StepBenchResult bench_step(const StepBenchRequest& request) {
  require(request.steps > 0 && request.warmup >= 0,
          "bench: {} steps after {} to warm up; at least one and none", request.steps,
          request.warmup);
  Settings checked = without_data(request.settings);
  checked.data.tokens = "random tokens, in place of data";
  validate(checked);
  check_sized_model(checked, 1);
  StepBench bench(request.settings);
  for (int64_t i = 0; i < request.warmup; ++i) bench.step({});
  std::vector<double> seconds;
  for (int64_t i = 0; i < request.steps; ++i) seconds.push_back(bench.step({}));
  std::map<std::string, double> operators;
  const NodeObserver trace = request.trace != nullptr ? request.trace->observer() : NodeObserver();
  double update = 0;
  bench.step(
      [&](const NodeEvent& event) {
        operators[std::string(event.node.op->name())] += event.seconds();
        if (trace) trace(event);
      },
      &update);
  StepBenchResult result = bench.describe();
  std::ranges::sort(seconds);
  result.seconds = std::move(seconds);
  result.operators = std::move(operators);
  result.operators["(gradient norm, AdamW)"] = update;
  return result;
}

}  // namespace tessera
