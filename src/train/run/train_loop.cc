#include "train/run/train_loop.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>

#include "checkpoint/together.h"
#include "comm/error.h"
#include "core/file/file.h"
#include "core/memory.h"
#include "core/process/stopwatch.h"
#include "model/build/moe_blocks.h"
#include "train/infer/generate.h"
#include "train/infer/loaded_model.h"
#include "train/metrics/writer.h"
#include "train/run/describe_run.h"
#include "train/run/run_keeper.h"
#include "train/run/run_lock.h"
#include "train/run/run_saver.h"
#include "train/run/step_traffic.h"
#include "train/run/stop_signal.h"
#include "train/run/trace.h"
#include "train/run/wait_report.h"
#include "train/setup/machine.h"
#include "train/setup/matrix_peak.h"
#include "train/trainer/step_tallies.h"
#include "train/trainer/trainer.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kLeftCopies =
    "note: copies of ranks' states that an earlier start of the run left in memory were removed, "
    "since checkpoint.peer_copy is false";

TrainingData open_data(Settings& settings, std::ostream& out, const Terminal& terminal,
                       const std::function<void()>& alive) {
  ProgressBar bar(out, terminal, "tokenizing");
  return open_training_data(settings, [&](const PrepareProgress& progress) {
    alive();
    const auto total = static_cast<double>(std::max<int64_t>(progress.bytes_total, 1));
    bar.update(static_cast<double>(progress.bytes_done) / total, format_bytes(progress.bytes_done));
  });
}

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
        peak_(std::move(peak)) {}

  void run() {
    const StopSignal signal;
    started_ = Clock::now();
    first_step_ = trainer_.position().step;
    try {
      run_steps(signal);
    } catch (const UserError& error) {
      if (trainer_.layout().num_ranks() == 1 ||
          dynamic_cast<const TrainingStopped*>(&error) != nullptr)
        settle_quietly();
      finish_writer_quietly();
      throw;
    }
    trainer_.remove_peer_copies();
    if (writer_ != nullptr) writer_->finish();
  }

 private:
  void run_steps(const StopSignal& signal) {
    // A state from the ranks' memory may be older than any checkpoint.
    keeper_.expect_checkpoints(first_step_ > 0 &&
                               path_exists(checkpoint_folder(settings_.run.folder)));
    int64_t event = keeper_.agree(signal.received());
    while (trainer_.position().step < settings_.train.steps && !RunEvent::ends_training(event)) {
      if (event == RunEvent::kSaveAgain) save_again();
      run_step();
      saver_.go_on();
      event = keeper_.agree(signal.received());
    }
    const int64_t stop = RunEvent::signal(event);
    if (stop == 0) {
      finish();
    } else {
      saver_.save_now();
    }
    if (keeper_.look_again() == RunEvent::kSaveAgain) save_again();
    show_traffic();
    if (stop == 0) return;
    note(fmt::format("stopped by signal {} after step {}; the same command continues", stop,
                     trainer_.position().step));
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

  void note(const std::string& text) {
    if (writer_ != nullptr) writer_->note(text);
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
    const int64_t done = trainer_.position().step - first_step_;
    if (done == 1) {
      trainer_.agree(0);  // so that all ranks count from the same moment
      trace_.emplace(Clock::now());
      trace_->watch(world_.statistics());
    }
    if (trace_ &&
        (done == 1 + request_.trace_steps || trainer_.position().step == settings_.train.steps)) {
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
    const std::string why = explain(report, list_expert_loads(), layout.layout);
    if (!why.empty()) note(why);
    waits_ = {.num_ranks = layout.num_ranks(),
              .num_steps = num_steps,
              .seconds = report.total(),
              .for_ranks = {},
              .why = why};
    for (const WaitReport::Culprit& culprit : report.culprits)
      waits_->for_ranks.push_back({culprit.rank, culprit.seconds});
  }

  void run_step() {
    const StepTraffic::Counts sent_before = statistics_.counts();
    const auto start = Clock::now();
    const StepOutcome outcome =
        trace_ ? trainer_.step({.nodes = trace_->observer(), .tasks = trace_->task_observer()},
                               trace_->update_observer())
               : trainer_.step();
    if (trace_) trace_->add("step", start, Clock::now());
    const double seconds = seconds_since(start);
    traffic_.add_step(sent_before, statistics_.counts());
    update_trace();
    keeper_.tell([&] { writer_->record(make_record(outcome, seconds)); });
    note_zero_gradient(outcome);
    const int64_t step = trainer_.position().step;
    if (is_due(settings_.train.validation_interval)) validate();
    if (is_due(settings_.run.checkpoint_interval) && step < settings_.train.steps)
      saver_.save_between_steps();
    if (trainer_.copies_to_peers() && is_due(settings_.peer.interval) &&
        step < settings_.train.steps)
      saver_.copy_to_peers();
  }

  bool is_due(int64_t interval) const {
    return interval > 0 && trainer_.position().step % interval == 0;
  }

  void finish() {
    if (validated_step_ != trainer_.position().step) validate();
    if (first_step_ < settings_.train.steps) saver_.save_now();
    if (trainer_.data().files.size() > 1) {
      note(trainer_.data().describe_samples(trainer_.position().step));
    }
    on_first_rank(*trainer_.layout().world,
                  [&](const std::function<void()>& alive) { write_sample(alive); });
  }

  void validate() {
    const auto start = Clock::now();
    const double loss = trainer_.validate();
    validated_step_ = trainer_.position().step;
    if (!trainer_.data().validation) return;
    refuse_nonfinite_validation(loss);
    keeper_.tell([&] {
      writer_->validation({.step = validated_step_,
                           .tokens_seen = trainer_.position().tokens_seen,
                           .loss = loss,
                           .seconds = seconds_since(start)});
    });
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

  /// A text of the trained model, for the report, by rank 0. Of several ranks none has the whole
  /// model, so it is read from the run's last checkpoint.
  void write_sample(const std::function<void()>& alive) {
    if (trainer_.data().tokenizer == nullptr || settings_.data.text.empty()) return;
    try {
      if (trainer_.layout().num_ranks() == 1) {
        sample_from(trainer_.backend(), trainer_.state().parameters(), trainer_.state().experts(),
                    alive);
        return;
      }
      check_sample_memory();
      LoadedModel model(settings_.run.folder, DeviceChoice::kCpu);
      sample_from(model.backend(), model.parameters(), model.experts(), alive);
    } catch (const CommError&) {
      throw;
    } catch (const UserError& error) {
      note(fmt::format("warning: no sample of text: {}", error.what()));
    }
  }

  std::vector<ParameterSpec> sampled_parameters() const {
    return list_parameters(without_prediction(settings_.model), settings_.train.dtype());
  }

  void sample_from(const Backend& backend, ParameterSet& parameters,
                   std::vector<ExpertState>& experts, const std::function<void()>& alive) {
    Generator generator(settings_.model, settings_.train.dtype(), backend, parameters, experts);
    const GenerateOptions options{.max_tokens = 300, .temperature = 0.8, .top_p = 0.95, .seed = 1};
    const std::string prompt = "The ";
    const Generated generated =
        generator.generate_text(*trainer_.data().tokenizer, prompt, options,
                                [&](const GeneratedToken& /*token*/) { alive(); });
    writer_->set_sample(prompt, generated.text);
  }

  /// Ranks share the machine's memory: a sample is not worth more than half of what is left.
  void check_sample_memory() const {
    const int64_t needed = ParameterSet::count_bytes(sampled_parameters(), false).weights;
    require(
        needed <= available_memory() / 2,
        "the whole model takes {}, more than half of the {} left; `tessera generate` writes one",
        format_bytes(needed), format_bytes(available_memory()));
  }

  StepRecord make_record(const StepOutcome& outcome, double seconds) {
    const RunPosition& position = trainer_.position();
    most_memory_ = std::max(most_memory_, trainer_.backend().device().used_bytes());
    StepRecord record{
        .step = position.step,
        .total_steps = settings_.train.steps,
        .tokens_seen = position.tokens_seen,
        .loss = outcome.loss,
        .grad_norm = outcome.update.grad_norm,
        .learning_rate = learning_rate(settings_.schedule, position.step - 1),
        .clip_factor = outcome.update.clip_factor,
        .step_seconds = seconds,
        .tokens_per_second = static_cast<double>(outcome.num_tokens) / seconds,
        .model_flops = trainer_.step_flops(),
        .utilisation = peak_.share_of(trainer_.step_flops() / seconds /
                                      static_cast<double>(trainer_.layout().num_ranks())),
        .memory_used = most_memory_,
        .memory_predicted = trainer_.prediction().total(),
        .dropped_tokens = outcome.dropped,
        .skipped_steps = position.skipped_steps};
    const double mean_seconds =
        seconds_since(started_) / static_cast<double>(position.step - first_step_);
    record.eta_seconds = mean_seconds * static_cast<double>(settings_.train.steps - position.step);
    if (settings_.model.mtp_layers > 0) record.mtp_loss = outcome.mtp_loss;
    if (settings_.qk_clip > 0) {
      record.max_logit = outcome.max_logit;
      record.clipped_heads = outcome.clipped_heads;
    }
    add_expert_record(outcome, record);
    add_roundings(outcome.roundings, record);
    record.waits = std::exchange(waits_, std::nullopt);
    return record;
  }

  void add_expert_record(const StepOutcome& outcome, StepRecord& record) const {
    if (settings_.model.num_moe_layers() == 0) return;
    record.balance_loss = outcome.balance_loss;
    if (settings_.model.moe.z_loss_coefficient > 0) record.z_loss = outcome.z_loss;
    record.expert_load = list_expert_loads();
  }

  /// Of the last step.
  std::vector<ExpertLoad> list_expert_loads() const {
    std::vector<ExpertLoad> list;
    if (settings_.model.num_moe_layers() == 0) return list;
    auto loads = trainer_.expert_loads();
    size_t next = 0;
    for (int64_t layer = 0; layer < settings_.model.all_layers(); ++layer) {
      if (settings_.model.is_moe_layer(layer)) list.push_back({layer, std::move(loads[next++])});
    }
    return list;
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
  MatrixPeak peak_;  ///< of one rank
  Clock::time_point started_;
  int64_t first_step_ = 0;
  int64_t validated_step_ = -1;
  int64_t most_memory_ = 0;
  bool noted_zero_gradient_ = false;
  std::optional<TraceRecorder> trace_;
  std::optional<TracedWaits> waits_;  ///< of a trace, until they are recorded
};

RunWriterOptions writer_options(const Settings& settings, const TrainRequest& request,
                                const std::optional<ResumedRun>& resumed) {
  RunWriterOptions options{
      .folder = settings.run.folder,
      .tensorboard = settings.run.tensorboard,
      .report = settings.run.report,
      .console = {.every = settings.run.log_interval, .terminal = request.terminal}};
  if (resumed) {
    options.resume_after = resumed->position.step;
    options.resume_tokens = resumed->position.tokens_seen;
  }
  return options;
}

/// Rank 0 tokenizes, which may take longer than ranks wait for one another otherwise, and the
/// others find its files.
TrainingData open_data_together(Settings& settings, const TrainRequest& request,
                                Communicator& world, std::ostream& out) {
  std::optional<TrainingData> data;
  on_first_rank(world, [&](const std::function<void()>& alive) {
    data = open_data(settings, out, request.terminal, alive);
  });
  together(world, [&] {
    if (world.rank() != 0) data = open_training_data(settings);
  });
  return std::move(*data);
}

/// The degrees of the layout, and how tokens reach experts.
std::string describe_ranks(const Trainer& trainer) {
  std::string text = describe_degrees(trainer.layout().layout);
  const ModelConfig& model = trainer.settings().model;
  if (model.num_moe_layers() > 0) {
    text += fmt::format("\ndispatcher {}",
                        choose_dispatcher(model, trainer.layout().part.groups).to_string());
  }
  return text;
}

/// What was chosen, for somebody who wants it in a configuration.
void write_choice(const Trainer& trainer) {
  const std::optional<PolicyChoice>& choice = trainer.policy_choice();
  if (!choice || choice->entries.empty()) return;
  replace_file(std::filesystem::path(trainer.settings().run.folder) / "memory.toml",
               write_toml(*choice));
}

std::unique_ptr<RunWriter> open_writer(const Trainer& trainer, const TrainRequest& request,
                                       const std::optional<ResumedRun>& resumed,
                                       const RunLock& lock, std::ostream& out) {
  const Settings& settings = trainer.settings();
  RunInfo info{
      .title = std::filesystem::path(settings.run.folder).filename().string(),
      .started = format_local_time(),
      .machine = describe_machine(),
      .tokenizer = describe_data(trainer.data()),
      .model_summary = describe_model(settings, trainer.prediction(), trainer.backend().is_host()),
      .config_text = request.config_toml};
  out << info.model_summary << "\n" << info.tokenizer << "\n";
  if (trainer.schedule_choice()) out << describe(*trainer.schedule_choice()) << "\n";
  if (trainer.policy_choice()) out << describe(*trainer.policy_choice()) << "\n";
  if (!trainer.processors().empty()) out << trainer.processors() << "\n";
  if (trainer.layout().num_ranks() > 1) out << describe_ranks(trainer) << "\n";
  auto writer =
      std::make_unique<RunWriter>(out, writer_options(settings, request, resumed), std::move(info));
  write_choice(trainer);
  if (!lock.note().empty()) writer->note("note: " + lock.note());
  for (const std::string& note : trainer.initial_notes()) writer->note("note: " + note);
  if (!resumed) return writer;
  if (!resumed->skipped.empty()) {
    const std::string skipped = describe_skipped(resumed->skipped, resumed->path);
    // Where standard output goes to a file, the loss of steps must not go unseen.
    std::cerr << "tessera: note: " << skipped << "; it is continued\n";
    writer->note("note: " + skipped + "; later ones are set aside as damaged-*, not removed");
  }
  for (const std::string& note : resumed->notes) writer->note("note: " + note);
  const int64_t step = resumed->position.step;
  writer->note(step < settings.train.steps
                   ? fmt::format("continuing after step {} of {}", step, settings.train.steps)
                   : fmt::format("nothing to train: all {} steps are done; more of train.steps "
                                 "goes on from here",
                                 step));
  return writer;
}

}  // namespace

int train(const TrainRequest& request, World& world, std::ostream& out) {
  const CommunicatorPtr all = world.make_world_group();
  Settings settings = request.settings;
  validate(settings);
  // Of several ranks each would choose for all; the trainers do that once.
  const bool chooses = given_limit(settings.train) && world.size() > 1;
  check_model(settings, world.size(), chooses ? FitCheck::kNone : FitCheck::kMachine);
  std::optional<RunLock> lock;  // rank 0's, for all
  together(*all, [&] {
    if (world.rank() != 0) return;
    lock.emplace(settings.run.folder);
    if (!request.trace.empty()) check_trace_file(request.trace);
  });
  const bool left_copies = !settings.peer.copy && PeerCopies::remove_left(settings, *all);
  check_devices(settings, world);
  TrainingData data = open_data_together(settings, request, *all, out);
  // Measured first, so that the memory prediction starts from a process whose libraries are loaded.
  const double peak = measure_matrix_peak(settings.train.dtype());
  Trainer trainer(std::move(settings), std::move(data), world);
  const auto resumed = trainer.resume(request.config_toml);
  std::unique_ptr<RunWriter> writer;
  together(*all, [&] {
    if (world.rank() != 0) return;
    writer = open_writer(trainer, request, resumed, *lock, out);
    if (left_copies) writer->note(kLeftCopies);
  });
  const double device_peak = trainer.backend().is_host() ? peak : trainer.device_peak();
  TrainLoop(trainer, trainer.world(), request, lock ? &*lock : nullptr, writer.get(),
            make_matrix_peak(trainer.backend(), trainer.settings().train.dtype(), device_peak))
      .run();
  if (writer && trainer.settings().run.report)
    out << "report: " << writer->report_path().string() << "\n";
  return 0;
}

}  // namespace tessera
