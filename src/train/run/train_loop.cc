#include "train/run/train_loop.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "checkpoint/together.h"
#include "comm/error.h"
#include "core/file/file.h"
#include "core/file/output_path.h"
#include "core/process/stopwatch.h"
#include "train/metrics/writer.h"
#include "train/plan/simulated_step.h"
#include "train/run/open_run.h"
#include "train/run/run_keeper.h"
#include "train/run/run_lock.h"
#include "train/run/run_sample.h"
#include "train/run/run_saver.h"
#include "train/run/step_recorder.h"
#include "train/run/step_traffic.h"
#include "train/run/stop_signal.h"
#include "train/run/trace.h"
#include "train/run/wait_report.h"
#include "train/setup/machine.h"
#include "train/setup/matrix_peak.h"
#include "train/state/initial_weights.h"
#include "train/trainer/step_tallies.h"
#include "train/trainer/trainer.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

/// Whether a run comes to its end, or will be continued.
enum class RunEnd : uint8_t { kDone, kStopped };

constexpr const char* kLeftCopies =
    "note: copies of ranks' states that an earlier start of the run left in memory were removed, "
    "since checkpoint.peer_copy is false";

/// The loop around a Trainer: records, validations, checkpoints, signals. Every rank has one; rank
/// 0's has the lock of the run's folder and the writer.
class TrainLoop {
 public:
  TrainLoop(Trainer& trainer, World& world, const TrainRequest& request, RunLock* lock,
            RunWriter* writer, MatrixPeak peak)
      : trainer_(trainer),
        world_(world),
        settings_(trainer.settings()),
        request_(request),
        statistics_(world.statistics()),
        keeper_(trainer, request.config_toml, lock, writer),
        saver_(trainer, keeper_, writer),
        writer_(writer),
        recorder_(trainer, std::move(peak)) {}

  /// To the last step, or to a signal.
  void run() {
    const StopSignal signal;
    guard([&] { run_steps(signal); });
    close();
  }

  /// Before all else.
  void begin() {
    recorder_.begin();
    // A state from the ranks' memory may be older than any checkpoint.
    keeper_.expect_checkpoints(recorder_.first_step() > 0 &&
                               path_exists(checkpoint_folder(settings_.run.folder)));
  }

  /// One step and what is due after it, between begin() and end().
  StepRecord step(std::vector<NamedNumber> objective) {
    StepRecord record;
    guard([&] {
      objective_ = std::move(objective);
      if (keeper_.agree(0) == RunEvent::kSaveAgain) save_again();
      record = run_step();
      saver_.go_on();
    });
    return record;
  }

  void save() {
    guard([&] { saver_.save_now(); });
  }

  double validate_now() {
    double loss = 0;
    guard([&] { loss = validate(); });
    return loss;
  }

  void end(RunEnd how) {
    guard([&] {
      end_training(how);
      show_traffic();
    });
    close();
  }

  void note(const std::string& text) {
    if (writer_ != nullptr) writer_->note(text);
  }

 private:
  /// What must be done before an error leaves the run.
  void guard(const std::function<void()>& action) {
    try {
      action();
    } catch (const UserError& error) {
      if (trainer_.layout().num_ranks() == 1 ||
          dynamic_cast<const TrainingStopped*>(&error) != nullptr)
        settle_quietly();
      finish_writer_quietly();
      throw;
    }
  }

  void close() {
    trainer_.remove_peer_copies();
    if (writer_ != nullptr) writer_->finish();
  }

  void run_steps(const StopSignal& signal) {
    int64_t event = keeper_.agree(signal.received());
    while (trainer_.position().step < settings_.train.steps && !RunEvent::ends_training(event)) {
      if (event == RunEvent::kSaveAgain) save_again();
      run_step();
      saver_.go_on();
      event = keeper_.agree(signal.received());
    }
    const int64_t stop = RunEvent::signal(event);
    end_training(stop == 0 ? RunEnd::kDone : RunEnd::kStopped);
    show_traffic();
    if (stop == 0) return;
    note(describe_stop(stop, trainer_.position().step, settings_.run.save));
  }

  void end_training(RunEnd how) {
    if (how == RunEnd::kDone) {
      finish();
    } else if (settings_.run.save) {
      saver_.save_now();
    }
    if (keeper_.look_again() == RunEvent::kSaveAgain) save_again();
  }

  void save_again() {
    note(
        fmt::format("warning: {} was removed while the run went on, with all earlier checkpoints; "
                    "saving anew what is in memory",
                    checkpoint_folder(settings_.run.folder).string()));
    saver_.save_again();
  }

  /// What the ranks sent one another.
  void show_traffic() {
    if (trainer_.layout().num_ranks() == 1 || traffic_.num_steps() == 0) return;
    const auto totals = sum_over_ranks(traffic_, *trainer_.layout().world);
    note(describe_traffic(totals, traffic_.num_steps()));
  }

  /// For a run that fails on all ranks alike, whose last save may be under way.
  void settle_quietly() {
    try {
      saver_.settle();
    } catch (const UserError& error) {
      note(fmt::format("warning: {}", error.what()));
    }
  }

  /// For a run that failed: its report helps to see why, but must not hide the reason.
  void finish_writer_quietly() {
    try {
      if (writer_ != nullptr) writer_->finish();
    } catch (const UserError& error) {
      note(fmt::format("warning: {}", error.what()));
    }
  }

  /// Starts the trace with the second step (the first one compiles kernels) and writes it.
  void update_trace() {
    if (request_.trace.empty()) return;
    const int64_t done = trainer_.position().step - recorder_.first_step();
    if (done == 1) {
      trainer_.agree(0);  // so that all ranks count from the same moment
      trace_.emplace(Clock::now());
      trace_->watch(world_.statistics());
    }
    if (trace_ &&
        (done == 1 + request_.trace_steps || trainer_.position().step == settings_.train.steps)) {
      trainer_.state().wait_weights();            // so that the host's last updates are known
      trainer_.backend().device().synchronize();  // which tells of the last update
      write_trace(*trace_, request_.trace, *trainer_.layout().world);
      note(fmt::format("trace: {}", request_.trace));
      report_waits(done - 1);
      trace_.reset();
    }
  }

  /// Who was waited for while the trace was taken.
  void report_waits(int64_t num_steps) {
    const RunLayout& layout = trainer_.layout();
    if (layout.num_ranks() == 1) return;
    RankWaits own =
        collect_waits(layout.rank(), trace_->communications(), trace_->origin(),
                      list_group_ranks(settings_, layout), !trainer_.backend().device().is_host());
    own.machine = machine_name();
    const WaitReport report = gather_waits(own, *layout.world);
    note(describe(report, layout.num_ranks(), num_steps));
    const std::string why = explain(report, recorder_.expert_loads(), layout.layout);
    if (!why.empty()) note(why);
    waits_ = {.num_ranks = layout.num_ranks(),
              .num_steps = num_steps,
              .seconds = report.total(),
              .for_ranks = {},
              .why = why};
    for (const WaitReport::Culprit& culprit : report.culprits)
      waits_->for_ranks.push_back({culprit.rank, culprit.seconds});
  }

  StepRecord run_step() {
    const StepTraffic::Counts sent_before = statistics_.counts();
    const Device& device = trainer_.backend().device();
    const double waited_before = device.waited_seconds();
    const auto start = Clock::now();
    const StepOutcome outcome =
        trace_ ? trainer_.step({.nodes = trace_->observer(), .tasks = trace_->task_observer()},
                               trace_->update_observer())
               : trainer_.step();
    if (trace_) trace_->add("step", start, Clock::now());
    const double seconds = seconds_since(start);
    const double waited = device.waited_seconds() - waited_before;
    traffic_.add_step(sent_before, statistics_.counts());
    update_trace();
    StepRecord record = recorder_.record(outcome, seconds);
    record.waits = std::exchange(waits_, std::nullopt);
    add_objective(std::exchange(objective_, {}), record);
    if (!device.is_host()) record.host_seconds = seconds - waited;
    keeper_.tell([&] { writer_->record(record); });
    note_zero_gradient(outcome);
    const int64_t step = trainer_.position().step;
    if (is_due(settings_.train.validation_interval)) record.validation_loss = validate();
    if (settings_.run.save && is_due(settings_.run.checkpoint_interval) &&
        step < settings_.train.steps)
      saver_.save_between_steps();
    if (trainer_.copies_to_peers() && is_due(settings_.peer.interval) &&
        step < settings_.train.steps)
      saver_.copy_to_peers();
    return record;
  }

  bool is_due(int64_t interval) const {
    return interval > 0 && trainer_.position().step % interval == 0;
  }

  void finish() {
    if (validated_step_ != trainer_.position().step) validate();
    if (settings_.run.save && recorder_.first_step() < settings_.train.steps) saver_.save_now();
    if (trainer_.data().files.size() > 1) {
      note(trainer_.data().describe_samples(trainer_.position().step));
    }
    on_first_rank(*trainer_.layout().world,
                  [&](const std::function<void()>& alive) { write_sample(alive); });
  }

  double validate() {
    const auto start = Clock::now();
    const double loss = trainer_.validate();
    validated_step_ = trainer_.position().step;
    if (!trainer_.data().validation) return loss;
    refuse_nonfinite_validation(loss);
    keeper_.tell([&] {
      writer_->validation({.step = validated_step_,
                           .tokens_seen = trainer_.position().tokens_seen,
                           .loss = loss,
                           .seconds = seconds_since(start)});
    });
    return loss;
  }

  /// As for a step's loss. All ranks have the same.
  void refuse_nonfinite_validation(double loss) const {
    if (std::isfinite(loss) || settings_.train.on_nonfinite == NonFinite::kSkip) return;
    throw TrainingStopped(fmt::format(
        "step {}: the validation loss is {}, though the training loss was finite; nothing was "
        "saved "
        "since the last checkpoint, which is whole. Lower optim.learning_rate, or set "
        "train.on_nonfinite = \"skip\" to go on",
        trainer_.position().step, loss));
  }

  /// Once a run, the first time that all gradients are exactly 0: nothing can be learnt from them.
  void note_zero_gradient(const StepOutcome& outcome) {
    if (noted_zero_gradient_ || outcome.skipped() || outcome.update.grad_norm != 0) return;
    noted_zero_gradient_ = true;
    note(
        fmt::format("warning: the gradient norm is exactly 0 in step {}: only weight decay changes "
                    "the weights; "
                    "look at model.init_deviation and the data",
                    trainer_.position().step));
  }

  /// A text of the trained model, for the report, by rank 0.
  void write_sample(const std::function<void()>& alive) {
    if (trainer_.data().tokenizer == nullptr || settings_.data.text.empty()) return;
    try {
      const RunSample sample = sample_text(trainer_, alive);
      writer_->set_sample(sample.prompt, sample.text);
    } catch (const CommError&) {
      throw;
    } catch (const UserError& error) {
      note(fmt::format("warning: no sample of text: {}", error.what()));
    }
  }

  Trainer& trainer_;
  World& world_;
  const Settings& settings_;
  const TrainRequest& request_;
  const CommStatistics& statistics_;  ///< this rank's
  StepTraffic traffic_;
  RunKeeper keeper_;
  RunSaver saver_;
  RunWriter* writer_;
  StepRecorder recorder_;
  int64_t validated_step_ = -1;
  bool noted_zero_gradient_ = false;
  std::optional<TraceRecorder> trace_;
  std::vector<NamedNumber> objective_;  ///< of the step under way
  std::optional<TracedWaits> waits_;    ///< of a trace, until they are recorded
};

}  // namespace

/// In the order in which all is opened.
struct TrainingRun::Parts {
  Parts(const TrainRequest& given, World& world, std::ostream& out) : request(given) {
    const CommunicatorPtr all = world.make_world_group();
    Settings settings = request.settings;
    request.given_batches ? validate_without_data(settings) : tessera::validate(settings);
    // Of several ranks each would choose for all; the trainers do that once.
    const bool chooses = given_limit(settings.train) && world.size() > 1;
    check_model(settings, world.size(), chooses ? FitCheck::kNone : FitCheck::kMachine);
    together(*all, [&] {
      if (world.rank() != 0) return;
      lock.emplace(settings.run.folder);
      if (!request.trace.empty()) check_output_path("--trace", request.trace);
    });
    const bool left_copies = !settings.peer.copy && PeerCopies::remove_left(settings, *all);
    check_devices(settings, world);
    TrainingData data = request.given_batches ? prepare_without_data(settings)
                                              : open_data_together(settings, request, *all, out);
    // Measured first, so that the memory prediction starts from a process whose libraries are
    // loaded and have what scratch memory they keep.
    const double peak = measure_matrix_peak(settings.train.dtype());
    const MatrixPeakMeter meter(settings.train.dtype());
    trainer.emplace(std::move(settings), std::move(data), world);
    const auto resumed = trainer->resume(request.config_toml);
    if (!resumed) check_trained_indexer(trainer->settings());
    together(*all, [&] {
      if (world.rank() != 0) return;
      writer = open_writer(*trainer, request, resumed, *lock, out);
      if (left_copies) writer->note(kLeftCopies);
    });
    loop.emplace(*trainer, trainer->world(), request, lock ? &*lock : nullptr, writer.get(),
                 trainer->backend().is_host() ? make_matrix_peak(peak, meter)
                                              : make_matrix_peak(trainer->device_peak(), {}));
  }

  /// Calls what a run does between its begin and its end. An error is the end too.
  template <typename Action>
  auto act(const Action& action) {
    require(loop.has_value(), "the run in {} has ended", request.settings.run.folder);
    try {
      return action(*loop);
    } catch (...) {
      leave();
      throw;
    }
  }

  /// Others may have the folder.
  void leave() {
    loop.reset();
    writer.reset();
    lock.reset();
  }

  const TrainRequest request;
  std::optional<RunLock> lock;  ///< rank 0's, for all
  std::optional<Trainer> trainer;
  std::unique_ptr<RunWriter> writer;  ///< rank 0's
  std::optional<TrainLoop> loop;
};

TrainingRun::TrainingRun(const TrainRequest& request, World& world, std::ostream& out)
    : parts_(std::make_unique<Parts>(request, world, out)) {
  parts_->loop->begin();
}

TrainingRun::~TrainingRun() = default;

Trainer& TrainingRun::trainer() {
  return *parts_->trainer;
}

bool TrainingRun::is_done() const {
  return parts_->trainer->position().step >= parts_->trainer->settings().train.steps;
}

bool TrainingRun::has_ended() const {
  return !parts_->loop.has_value();
}

StepRecord TrainingRun::step(std::vector<NamedNumber> objective) {
  require(!is_done(), "all {} steps of train.steps are done", parts_->trainer->position().step);
  return parts_->act([&](TrainLoop& loop) { return loop.step(std::move(objective)); });
}

void TrainingRun::note(const std::string& text) {
  parts_->act([&](TrainLoop& loop) { loop.note(text); });
}

double TrainingRun::validate() {
  return parts_->act([](TrainLoop& loop) { return loop.validate_now(); });
}

void TrainingRun::save() {
  parts_->act([](TrainLoop& loop) { loop.save(); });
}

void TrainingRun::end() {
  const RunEnd how = is_done() ? RunEnd::kDone : RunEnd::kStopped;
  parts_->act([how](TrainLoop& loop) { loop.end(how); });
  parts_->leave();
}

void TrainingRun::run() {
  parts_->loop->run();
}

std::filesystem::path TrainingRun::report_path() const {
  const bool written = parts_->writer && parts_->trainer->settings().run.report;
  return written ? parts_->writer->report_path() : std::filesystem::path();
}

int train(const TrainRequest& request, World& world, std::ostream& out) {
  TrainingRun run(request, world, out);
  run.run();
  const std::filesystem::path report = run.report_path();
  if (!report.empty()) out << "report: " << report.string() << "\n";
  return 0;
}

}  // namespace tessera
