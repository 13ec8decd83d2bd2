#include "train/bench/bench_step.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "core/process/helper_thread.h"
#include "core/process/stopwatch.h"
#include "core/random.h"
#include "step/build/place_saved.h"
#include "train/setup/device_choice.h"
#include "train/setup/device_overhead.h"
#include "train/setup/loss_scales.h"
#include "train/setup/machine.h"
#include "train/setup/matrix_peak.h"
#include "train/setup/size_check.h"
#include "train/trainer/trainer.h"
#include "train/verify/verify.h"

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

/// What timing an operator on a GPU takes itself: the time between two marks with nothing between
/// them, behind enough work that the host is ahead.
double measure_mark_seconds(Device& device) {
  constexpr int kMarks = 65;
  constexpr int64_t kBytes = int64_t{64} << 20;
  const Buffer work(kBytes, "measuring the cost of timing", device);
  for (int i = 0; i < 32; ++i) device.zero(work.data(), kBytes);
  std::vector<double> seconds;
  Device::Mark last = device.mark();
  for (int i = 1; i < kMarks; ++i) {
    const Device::Mark next = device.mark();
    device.when_known(last, next, [&](Device::Time begin, Device::Time end) {
      seconds.push_back(std::chrono::duration<double>(end - begin).count());
    });
    last = next;
  }
  device.synchronize();
  std::ranges::sort(seconds);
  return median_of_sorted(seconds);
}

/// The same micro-batches for each step, which are there; what is done with them ahead is done as
/// in training.
class RandomFeed final : public StepFeed {
 public:
  RandomFeed(std::vector<RandomTokens> batches, const LossScales& scales)
      : tokens_(std::move(batches)), scales_(scales) {
    for (RandomTokens& tokens : tokens_) views_.push_back(tokens.view());
  }

  void begin() {
    thread_.wait();
    began_with_read_ = std::exchange(has_read_, false);
  }
  const MicroBatch& micro_batch(int64_t idx) const { return views_.at(idx); }
  const LossScales& scales() const { return scales_; }

  void read_ahead(Use use) override {
    has_read_ = true;
    thread_.give([this, use = std::move(use)] { use(views_, scales_); });
  }
  bool began_with_read() const override { return began_with_read_; }

 private:
  std::vector<RandomTokens> tokens_;
  std::vector<MicroBatch> views_;
  LossScales scales_;
  bool has_read_ = false;
  bool began_with_read_ = false;
  HelperThread thread_;  // last: it uses the others
};

class BenchedStep final : public StepHost {
 public:
  BenchedStep(RandomFeed& feed, StepInput input) : feed_(feed), input_(std::move(input)) {}
  void begin() override { feed_.begin(); }
  const MicroBatch& micro_batch(int64_t idx) override { return feed_.micro_batch(idx); }
  const LossScales& scales() override { return feed_.scales(); }
  bool share(const MicroBatchResult& /*own*/) override { return true; }
  StepInput update_input() override { return input_; }

 private:
  RandomFeed& feed_;
  StepInput input_;
};

/// A model that trains on random tokens.
class StepBench {
 public:
  explicit StepBench(const Settings& settings)
      : settings_(settings),
        world_(make_single_world()),
        backend_(choose_backend(settings)),
        peak_(make_matrix_peak(measure_matrix_peak(backend_, settings.train.dtype()),
                               make_peak_meter(backend_, settings.train.dtype()))),
        mark_seconds_(backend_.is_host() ? 0 : measure_mark_seconds(backend_.device())),
        layout_(make_run_layout(settings, *world_)),
        choice_(choose()),
        model_(settings_.model, batch_shape(settings_), settings_.train.saved_policy(), backend_,
               layout_.part),
        prediction_(place_and_predict()),
        state_(settings_, layout_, *world_, backend_) {
    state_.initialize(static_cast<uint64_t>(settings.run.seed));
    model_.bind(state_.parameters(), state_.experts(), state_.weights());
    plan_ = build_step(request_step(settings_, layout_, model_, state_.parameters()));
    runner_.emplace(model_, layout_.pipeline, state_.step_parameters());
    feed_.emplace(make_batches(settings_),
                  loss_scales(settings_, settings_.train.num_micro_batches(), tokens_of_step()));
    steps_.emplace(*runner_, plan_, records_whole_steps(settings_, layout_, model_), &*feed_);
  }

  /// Returns the seconds of a step. A GPU may still be updating then: of consecutive steps each has
  /// the end of the one before.
  double step(const NodeObserver& observer = {}, const UpdateObserver& update_observer = {}) {
    Device& device = backend_.device();
    const int64_t waits = device.num_waits();
    const double waited = device.waited_seconds();
    const auto start = Clock::now();
    BenchedStep host(*feed_, {.step_idx = step_idx_++,
                              .lr = kLearningRate,
                              .max_grad_norm = settings_.train.max_grad_norm,
                              .observer = update_observer});
    steps_->run(host, {.nodes = observer});
    if (settings_.model.moe.has_expert_bias())
      update_expert_biases(state_.experts(), settings_.model.moe.bias_update_speed);
    num_waits_ = device.num_waits() - waits;
    host_seconds_ = seconds_since(start) - (device.waited_seconds() - waited);
    if (update_observer) state_.wait_weights();
    device.synchronize();
    return seconds_since(start);
  }

  bool is_on_gpu() const { return !backend_.is_host(); }
  /// Of the last step, without its waits for the GPU.
  double host_seconds() const { return host_seconds_; }
  /// What timing an operator takes itself.
  double mark_seconds() const { return mark_seconds_; }

  /// Of a step with or without graphs, the median of a few; what is to be recorded has been after
  /// two steps.
  LaunchCost measure_launches(GraphMode mode) {
    constexpr int kSteps = 5;
    RunControl& control = backend_.control();
    const GraphMode before = std::exchange(control.graphs, mode);
    while (step_idx_ < 2) step();
    control.waits_before_programs = true;
    std::vector<double> seconds;
    for (int i = 0; i < kSteps; ++i) {
      control.num_operators = control.num_operations = 0;
      control.seconds = 0;
      step();
      seconds.push_back(control.seconds);
    }
    control.waits_before_programs = false;
    control.graphs = before;
    std::ranges::sort(seconds);
    return {control.num_operators, control.num_operations, median_of_sorted(seconds)};
  }
  GpuFeed describe_feed() {
    GpuFeed feed{.num_waits = num_waits_};
    const GraphMode mode = backend_.control().graphs;
    if (mode != GraphMode::kOff) feed.graphs = measure_launches(mode);
    feed.one_by_one = measure_launches(GraphMode::kOff);
    feed.why_no_graph = backend_.control().why_not_recorded;
    return feed;
  }

  /// `best_seconds` is what the fastest step took.
  StepBenchResult describe(double best_seconds) {
    const auto num_batches = static_cast<double>(settings_.train.num_micro_batches());
    const int64_t memory_used = backend_.device().used_bytes();  // before measuring takes some
    peak_.share_of(model_.model_flops() * num_batches / best_seconds);
    StepBenchResult result{
        .device = backend_.is_host() ? describe_machine() : backend_.device().name(),
        .tokens = tokens_of_step(),
        .flops = model_.model_flops() * num_batches,
        .matrix_peak = peak_.value(),
        .memory_used = memory_used,
        .memory_predicted = prediction_.total(),
        .saved_bytes = prediction_.activations.saved,
        .offloaded_bytes = prediction_.activations.offloaded,
        .mark_seconds = mark_seconds_,
        .choice = choice_};
    for (const Task& task : plan_.tasks) {
      if (task.action == TaskAction::kUpdate) result.update_bytes += task.bytes;
    }
    for (const ModelParameter& parameter : state_.parameters().all())
      result.parameters += parameter.weight.num_elements();
    return result;
  }

 private:
  /// So low that the weights stay what they are.
  static constexpr double kLearningRate = 1e-5;

  int64_t device_memory() const { return backend_.is_host() ? 0 : gpu_memory(); }

  /// What a run would compute again or offload, put into the settings.
  std::optional<PolicyChoice> choose() {
    const BatchShape shape = batch_shape(settings_);
    auto limit = given_limit(settings_.train);
    if (chooses_for_device(settings_.train, backend_) && device_memory() > 0) {
      const PlannedRank kept = plan_rank(settings_, 0, 1, backend_, shape);
      const MemoryPrediction prediction =
          predict_memory(settings_, kept.layout, kept.model, backend_, device_memory());
      limit = find_lacking(prediction.total() <= device_memory(),
                           find_room(settings_, kept.layout, kept.model, backend_, device_memory()),
                           backend_.device(), device_memory(), *layout_.world);
    }
    if (!limit) return std::nullopt;
    PolicyChoice choice = choose_policy(settings_, 1, backend_, shape, *limit);
    apply(choice, settings_.train);
    return choice;
  }

  MemoryPrediction place_and_predict() {
    model_.place(place_saved(model_.programs(), layout_.steps));
    MemoryPrediction prediction =
        predict_memory(settings_, layout_, model_, backend_, device_memory());
    if (device_memory() > 0) require_memory(prediction, backend_.device().name(), device_memory());
    return prediction;
  }

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

  Settings settings_;
  std::unique_ptr<World> world_;
  Backend backend_;
  MatrixPeak peak_;
  double mark_seconds_;
  RunLayout layout_;
  std::optional<PolicyChoice> choice_;
  TrainingModel model_;
  MemoryPrediction prediction_;
  ModelState state_;
  StepPlan plan_;
  std::optional<StepRunner> runner_;
  std::optional<RecordedSteps> steps_;
  std::optional<RandomFeed> feed_;  // behind the steps, which its thread uses
  int64_t step_idx_ = 0;
  int64_t num_waits_ = 0;
  double host_seconds_ = 0;
};

/// Times the operators of a step one by one.
class OperatorTimes {
 public:
  void add(std::string_view name, Device::Time begin, Device::Time end) {
    by_name_[std::string(name)] += seconds(end - begin);
    intervals_.emplace_back(begin, end);
  }
  const std::map<std::string, double>& by_name() const { return by_name_; }
  /// The share of the time from the first to the last in which none ran, where a mark before and
  /// one after each took `mark_seconds` themselves.
  double idle_share(double mark_seconds) {
    std::ranges::sort(intervals_);
    double idle = 0;
    double busy = 0;
    for (size_t i = 0; i < intervals_.size(); ++i) {
      const auto& [begin, end] = intervals_[i];
      busy += std::max(seconds(end - begin) - mark_seconds, 0.0);
      if (i > 0) idle += std::max(seconds(begin - intervals_[i - 1].second) - mark_seconds, 0.0);
    }
    return idle + busy > 0 ? idle / (idle + busy) : 0;
  }

 private:
  static double seconds(Device::Time::duration duration) {
    return std::chrono::duration<double>(duration).count();
  }

  std::map<std::string, double> by_name_;
  std::vector<std::pair<Device::Time, Device::Time>> intervals_;
};

OperatorTimes time_operators(StepBench& bench, TraceRecorder* trace,
                             const NodeObserver& operators) {
  OperatorTimes times;
  const NodeObserver node_trace = trace != nullptr ? trace->observer() : NodeObserver();
  const UpdateObserver update_trace =
      trace != nullptr ? trace->update_observer() : UpdateObserver();
  bench.step(
      [&](const NodeEvent& event) {
        times.add(event.node.op->name(), event.begin, event.end);
        if (node_trace) node_trace(event);
        if (operators) operators(event);
      },
      [&](std::string_view name, Device::Time begin, Device::Time end) {
        times.add(name, begin, end);
        if (update_trace) update_trace(name, begin, end);
      });
  return times;
}

}  // namespace

StepBenchResult bench_step(const StepBenchRequest& request) {
  check_bench_runs(request.steps, request.warmup);
  Settings checked = without_data(request.settings);
  checked.data.tokens = "random tokens, in place of data";
  validate(checked);
  check_sized_model(checked, 1);
  StepBench bench(request.settings);
  for (int64_t i = 0; i < request.warmup; ++i) bench.step();
  std::vector<double> seconds, of_host;
  for (int64_t i = 0; i < request.steps; ++i) {
    seconds.push_back(bench.step());
    of_host.push_back(bench.host_seconds());
  }
  std::ranges::sort(seconds);
  std::ranges::sort(of_host);
  StepBenchResult result = bench.describe(seconds.front());
  result.seconds = std::move(seconds);
  if (request.steps_only) return result;
  if (bench.is_on_gpu()) {
    result.gpu = bench.describe_feed();
    result.gpu->host_seconds = median_of_sorted(of_host);
  }
  OperatorTimes operators = time_operators(bench, request.trace, request.operators);
  result.operators = operators.by_name();
  if (result.gpu) result.gpu->idle_share = operators.idle_share(bench.mark_seconds());
  return result;
}

}  // namespace tessera
