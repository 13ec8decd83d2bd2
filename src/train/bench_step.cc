#include "train/bench_step.h"

#include <algorithm>
#include <chrono>

#include "core/memory.h"
#include "core/random.h"
#include "core/stopwatch.h"
#include "train/device_choice.h"
#include "train/machine.h"
#include "train/model_state.h"

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

BatchShape batch_shape(const Settings& settings) {
  return {.num_tokens = settings.train.micro_batch * settings.data.sequence_length,
          .max_sequences = settings.train.micro_batch,
          .sequence_length = settings.data.sequence_length,
          .dtype = settings.train.dtype()};
}

/// A model that trains on random tokens.
class StepBench {
 public:
  explicit StepBench(const Settings& settings)
      : settings_(settings),
        world_(make_single_world()),
        backend_(choose_backend(settings, 1)),
        peak_(measure_matrix_peak(backend_, settings.train.dtype())),
        layout_(make_run_layout(settings, *world_)),
        model_(settings.model, batch_shape(settings), settings.train.recompute, backend_,
               layout_.part),
        predicted_(backend_.device().used_bytes() +
                   ModelState::count_bytes(settings, layout_).total() +
                   model_.activation_bytes().total()),
        state_(settings, layout_, *world_, backend_) {
    state_.initialize(static_cast<uint64_t>(settings.run.seed));
    model_.bind(state_.parameters(), state_.experts());
    for (int64_t i = 0; i < settings.train.num_micro_batches(); ++i)
      batches_.emplace_back(model_.batch_shape(), settings.model.vocab_size,
                            static_cast<uint64_t>(i));
  }

  /// Returns the seconds of a step.
  double step(const NodeObserver& observer, double* update_seconds = nullptr) {
    const auto start = Clock::now();
    state_.begin_step();
    model_.begin_step();
    const double share = 1.0 / static_cast<double>(tokens_of_step());
    const LossScales scales{.loss = static_cast<float>(share), .balance = 0.001F};
    for (RandomTokens& tokens : batches_) model_.run(tokens.view(), scales, observer);
    const auto update = Clock::now();
    state_.update({.step_idx = step_idx_++, .lr = 1e-5, .max_grad_norm = 1.0});
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
        .memory_predicted = predicted_};
    for (const ModelParameter& parameter : state_.parameters().all())
      result.parameters += parameter.weight.num_elements();
    return result;
  }

 private:
  int64_t tokens_of_step() const {
    return model_.batch_shape().num_tokens * settings_.train.num_micro_batches();
  }

  const Settings& settings_;
  std::unique_ptr<World> world_;
  Backend backend_;
  double peak_;
  RunLayout layout_;
  TrainingModel model_;
  int64_t predicted_;
  ModelState state_;
  std::vector<RandomTokens> batches_;
  int64_t step_idx_ = 0;
};

}  // namespace

StepBenchResult bench_step(const StepBenchRequest& request) {
  require(request.steps > 0 && request.warmup >= 0,
          "bench: {} steps after {} to warm up; at least one and none", request.steps,
          request.warmup);
  Settings checked = request.settings;
  checked.data.tokens = "random tokens, in place of data";
  validate(checked);
  validate(checked.model);
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
