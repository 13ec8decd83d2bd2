#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/write_part.h"
#include "core/file/file.h"

namespace tessera {

struct SaveJob {
  PartRequest part;
  std::string state;
  int64_t keep_last = 0;
};

/// What a rank gives to a save by several. Throws InternalError where a tensor has not its slice's
/// shape.
SaveJob make_job(const SliceSaveRequest& request, const Communicator& world);

/// One save, seen from one rank: stages of work on files, which any thread may do, each followed by
/// what the ranks do together. Rank 0 leads: it alone makes, renames and removes folders.
///
///   begin();
///   while (!finished()) end_stage([&] { work(); });
///
/// Not thread-safe: whoever works on another thread hands the object over and back. The world, and
/// the memory of the job's tensors, must outlive it.
class StagedSave {
 public:
  StagedSave(std::filesystem::path root, SaveJob job, Communicator& world);
  /// Removes what is unfinished, on rank 0.
  ~StagedSave();
  StagedSave(const StagedSave&) = delete;
  StagedSave& operator=(const StagedSave&) = delete;

  /// Collective: a folder of a temporary name.
  void begin();
  /// This rank's work of the stage. Does not communicate.
  void work();
  /// Collective: `worked` returns or throws what work() did. Where that threw on any rank, throws
  /// on all; then the save is over and nothing of it is left.
  void end_stage(const std::function<void()>& worked);
  bool finished() const { return stage_ == Stage::kDone; }
  SaveResult result() const { return {final_, warnings_, num_bytes_}; }

 private:
  enum class Stage : uint8_t { kWrite, kPublish, kDone };

  bool leads() const { return world_.rank() == 0; }
  void prepare();
  void write();
  void publish();
  void finish();
  void clean_up();
  void go_on();
  void remove_temporary();
  void abandon();
  void abandoning(const std::function<void()>& action);

  const std::filesystem::path root_;
  const SaveJob job_;
  const PartRequest& part_ = job_.part;
  Communicator& world_;
  const std::filesystem::path final_;
  std::filesystem::path temporary_;  ///< empty before there is one
  std::optional<FolderLock> lock_;
  Stage stage_ = Stage::kWrite;
  Manifest own_;                     ///< of what this rank wrote
  std::string text_;                 ///< the same for rank 0
  std::vector<std::string> others_;  ///< the texts of all, at rank 0
  std::vector<std::string> warnings_;
  int64_t num_bytes_ = 0;  ///< of all ranks' files, in the end
};

}  // namespace tessera
