#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "core/file/file.h"
#include "hf/online_export.h"
#include "train/run/train_loop.h"
#include "train/tune/held_weights.h"
#include "train/tune/vllm_server.h"

namespace tessera {

/// Throws UserError where rl.export_to is a folder of checkpoints, of this run or another: both
/// kinds of folders have the same names.
void check_version_folder(const Settings& settings);

/// Where versions of weights are: folders `step-00000012`, each of Hugging Face with a file more
/// that tells the step. They appear complete and go at once, so that a reader sees whole versions
/// alone. A lock keeps other runs out.
class VersionFolder {
 public:
  /// Makes the folder. Throws UserError where another run writes there.
  explicit VersionFolder(const std::filesystem::path& folder);

  /// The versions that are there, the newest first.
  std::vector<std::filesystem::path> list() const;
  /// Where that of a step is, or is to be.
  std::filesystem::path path_of(int64_t step) const;
  /// The file more, by name.
  static std::map<std::string, std::string> files_of(int64_t step);
  /// Removes versions from a step on, which are of another run or of steps that are done again.
  void remove_from(int64_t step);
  /// Removes all but the newest.
  void keep_newest(int64_t count);

 private:
  void remove(const std::filesystem::path& version);

  std::filesystem::path folder_;  ///< absolute
  FolderLock lock_;
};

/// The server of rl.vllm_url.
struct ExportServer {
  std::optional<VllmServer> server;  ///< nothing: none is named
  std::string note;                  ///< what was found there
};

/// Asks the server, before a run is begun. Where it does not answer as vLLM does that is an error,
/// or with rl.export_failure = "go_on" a note.
ExportServer find_server(const WeightExportSettings& settings);

/// Hands the weights of a run over, as rl.export_to and rl.vllm_url say. Only reads the weights.
class WeightExports {
 public:
  /// Refuses models that Hugging Face's families do not express, and takes the memory for copies of
  /// a GPU's weights. The run must outlive this.
  WeightExports(TrainingRun& run, ExportServer server);

  /// Before a step: hands over the weights that it begins with, where that is due. Returns what the
  /// step's record tells of it.
  std::vector<NamedNumber> before_step();
  /// After the last step.
  void finish(std::ostream& out);

 private:
  void show_start();
  /// What went wrong; empty: nothing.
  std::string hand_over(int64_t step);
  [[noreturn]] void stop_for(const std::string& failure);

  TrainingRun& run_;
  Trainer& trainer_;
  const WeightExportSettings& settings_;
  ExportServer server_;
  VersionFolder versions_;
  HeldWeights weights_;
  OnlineExport writer_;
  std::optional<int64_t> last_step_;  ///< of the newest version
};

}  // namespace tessera
