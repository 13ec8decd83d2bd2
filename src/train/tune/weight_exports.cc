#include "train/tune/weight_exports.h"

#include <algorithm>

#include "checkpoint/layout.h"
#include "core/error.h"
#include "core/memory.h"
#include "core/process/stopwatch.h"
#include "train/state/checkpointing.h"
#include "train/tune/export_request.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kVersionFile = "tessera_version.json";
constexpr const char* kTemporary = ".tmp-";

}  // namespace

void check_version_folder(const Settings& settings) {
  const fs::path folder = settings.rl.exports.folder;
  if (folder.empty()) return;
  require(
      fs::weakly_canonical(folder) != fs::weakly_canonical(checkpoint_folder(settings.run.folder)),
      "rl.export_to {} is where the run has its checkpoints; choose a folder of its own",
      folder.string());
  if (!path_exists(folder)) return;
  for (const StepFolder& found : list_step_folders(folder)) {
    require(!path_exists(found.path / kManifestFile),
            "rl.export_to {} holds checkpoints of a run, such as {}; choose a folder of its own",
            folder.string(), found.path.filename().string());
  }
}

VersionFolder::VersionFolder(const fs::path& folder)
    : folder_((make_folder(folder), fs::absolute(folder).lexically_normal())), lock_(folder_) {
  // Of killed runs: with the lock, nobody writes them.
  for (const char* prefix : {kTemporary, kTrashPrefix}) {
    for (const fs::path& left : list_prefixed(folder_, prefix)) remove_path(left);
  }
}

std::vector<fs::path> VersionFolder::list() const {
  std::vector<fs::path> versions;
  for (const StepFolder& found : list_step_folders(folder_)) {
    if (path_exists(found.path / kVersionFile)) versions.push_back(found.path);
  }
  return versions;
}

fs::path VersionFolder::path_of(int64_t step) const {
  return folder_ / step_folder_name(step);
}

std::map<std::string, std::string> VersionFolder::files_of(int64_t step) {
  return {{kVersionFile, fmt::format("{{\"step\": {}}}\n", step)}};
}

void VersionFolder::remove_from(int64_t step) {
  for (const fs::path& version : list()) {
    if (parse_step_folder(version.filename().string()).value_or(0) >= step) remove(version);
  }
}

void VersionFolder::keep_newest(int64_t count) {
  const std::vector<fs::path> versions = list();
  for (size_t i = static_cast<size_t>(count); i < versions.size(); ++i) remove(versions[i]);
}

/// Under another name first: a reader finds all of a version or nothing.
void VersionFolder::remove(const fs::path& version) {
  const fs::path trash = folder_ / unique_name(kTrashPrefix);
  rename_path(version, trash);
  remove_path(trash);
}

ExportServer find_server(const WeightExportSettings& settings) {
  ExportServer found;
  if (settings.vllm_url.empty()) return found;
  found.server.emplace(settings);
  try {
    found.note =
        fmt::format("vLLM at {} has {} worker(s)", settings.vllm_url, found.server->find_workers());
  } catch (const UserError& error) {
    if (settings.on_failure == ExportFailure::kStop) throw;
    found.note = error.what();
  }
  return found;
}

WeightExports::WeightExports(TrainingRun& run, ExportServer server)
    : run_(run),
      trainer_(run.trainer()),
      settings_(trainer_.settings().rl.exports),
      server_(std::move(server)),
      versions_(settings_.folder),
      weights_(trainer_),
      writer_(request_export(trainer_.settings()), weights_.shapes()) {
  versions_.remove_from(trainer_.position().step);
  show_start();
}

void WeightExports::show_start() {
  std::string copies;
  if (weights_.num_bytes() > 0)
    copies = fmt::format(", by way of {} of the host's memory", format_bytes(weights_.num_bytes()));
  run_.note(fmt::format("note: weights go to {}: {}, {} tensors of {} a version{}",
                        settings_.folder, writer_.model_type(), writer_.num_tensors(),
                        format_bytes(writer_.num_bytes()), copies));
  for (const std::string& note : writer_.notes()) run_.note("note: in exported weights, " + note);
  if (!server_.note.empty()) run_.note("note: " + server_.note);
}

std::string WeightExports::hand_over(int64_t step) {
  try {
    const fs::path target = versions_.path_of(step);
    if (last_step_ != step) {
      writer_.write(target, weights_.take(), VersionFolder::files_of(step));
      last_step_ = step;
      versions_.keep_newest(settings_.keep_last);
    }
    if (server_.server) server_.server->load(target, target.filename().string());
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

std::vector<NamedNumber> WeightExports::before_step() {
  const int64_t step = trainer_.position().step;
  if (last_step_ && step % settings_.interval != 0) return {};
  const auto start = std::chrono::steady_clock::now();
  const std::string failure = hand_over(step);
  const double seconds = seconds_since(start);
  if (!failure.empty() && settings_.on_failure == ExportFailure::kStop) stop_for(failure);
  if (!failure.empty()) {
    run_.note(
        fmt::format("note: the weights of step {} could not be handed over: {}", step, failure));
  }
  return {{"export_seconds", seconds}, {"export_failed", failure.empty() ? 0.0 : 1.0}};
}

/// With a checkpoint of the step that the run stops at, where it can continue there.
void WeightExports::stop_for(const std::string& failure) {
  const int64_t step = trainer_.position().step;
  const bool saves = step > 0 && step % trainer_.settings().rl.updates == 0;
  if (saves) run_.save();
  user_error(
      "the weights of step {} could not be handed over: {}. {}; rl.export_failure = "
      "\"go_on\" trains on without",
      step, failure,
      saves ? "The run is saved, and the same command continues" : "The last checkpoint is whole");
}

void WeightExports::finish(std::ostream& out) {
  const int64_t step = trainer_.position().step;
  if (last_step_ == step) return;
  const std::string failure = hand_over(step);
  require(failure.empty() || settings_.on_failure == ExportFailure::kGoOn,
          "the run is done and saved, but the weights of step {} could not be handed over: {}",
          step, failure);
  if (!failure.empty()) {
    out << fmt::format("note: the weights of step {} could not be handed over: {}\n", step,
                       failure);
  } else {
    out << "weights: " << versions_.path_of(step).string() << "\n";
  }
}

}  // namespace tessera
