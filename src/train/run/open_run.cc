#include "train/run/open_run.h"

#include <algorithm>
#include <iostream>

#include "checkpoint/together.h"
#include "core/file/file.h"
#include "core/memory.h"
#include "model/experts/moe_blocks.h"
#include "train/run/describe_run.h"
#include "train/setup/machine.h"

namespace tessera {
namespace {

TrainingData open_data(Settings& settings, const TrainRequest& request, std::ostream& out,
                       const std::function<void()>& alive) {
  ProgressBar bar(out, request.terminal, "tokenizing");
  const auto show = [&](const PrepareProgress& progress) {
    alive();
    const auto total = static_cast<double>(std::max<int64_t>(progress.bytes_total, 1));
    bar.update(static_cast<double>(progress.bytes_done) / total, format_bytes(progress.bytes_done));
  };
  return open_training_data(settings, show, request.pause);
}

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

/// The degrees of the layout, and how tokens reach experts.
std::string describe_ranks(const Trainer& trainer) {
  std::string text = describe_degrees(trainer.layout().layout);
  const ModelConfig& model = trainer.settings().model;
  if (model.num_moe_layers() > 0) {
    text +=
        fmt::format("\ndispatcher {}", describe_dispatcher(model, trainer.layout().part.groups));
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

}  // namespace

TrainingData open_data_together(Settings& settings, const TrainRequest& request,
                                Communicator& world, std::ostream& out) {
  std::optional<TrainingData> data;
  on_first_rank(world, [&](const std::function<void()>& alive) {
    data = open_data(settings, request, out, alive);
  });
  together(world, [&] {
    if (world.rank() != 0) data = open_training_data(settings);
  });
  return std::move(*data);
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
  for (const std::string& note : find_data_notes(settings, trainer.data()))
    writer->note("note: " + note);
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

}  // namespace tessera
