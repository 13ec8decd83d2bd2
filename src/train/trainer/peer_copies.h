#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/peer/peer_store.h"
#include "train/setup/run_layout.h"
#include "train/state/checkpointing.h"

namespace tessera {

/// A run's copies of its ranks' states in memory (checkpoint.peer_copy): where they are kept, whose
/// they are and what room they need. All ranks construct it and call the same functions in the same
/// order. A file in the run's folder has the run's mark as long as there may be copies; without it
/// copies that are found are of a run that is gone.
class PeerCopies {
 public:
  /// `part_bytes`: of what this rank holds, at most. Removes the copies of runs on this machine
  /// whose folders are gone. Throws UserError where there is one rank, where the folder is not in
  /// memory or not this user's, and where some machine has no room.
  PeerCopies(const Settings& settings, const RunLayout& layout, int64_t part_bytes);

  /// Of a rank that holds `own` and whose neighbour holds `other`: two generations of both.
  static int64_t count_bytes(int64_t own, int64_t other) { return 2 * (own + other); }
  /// Bytes of this machine's memory that this rank's files take, at most.
  int64_t num_bytes() const { return num_bytes_; }
  /// What the user should know.
  const std::vector<std::string>& notes() const { return notes_; }

  /// The store, once the state is there.
  PeerStore& open(const ModelState& state);
  /// After the store's find(), for a run that goes on after `step`: of a newer state in memory that
  /// cannot be its own.
  std::optional<std::string> describe_unused(int64_t step) const;
  /// Copies the state to both places. Throws UserError where that failed on some rank.
  void save(const SavedRun& run, const ModelState& state);
  /// At the normal end of a run: nothing is left.
  void remove();

  /// Removes what an earlier start of the run has left, where this one is to keep no copies; true
  /// where there was something. All ranks call.
  static bool remove_left(const Settings& settings, Communicator& world);

 private:
  void find_machines();
  void find_shift();
  void check_room(int64_t part_bytes);
  void mark();

  Communicator& world_;
  std::filesystem::path mark_file_;
  PeerPlace place_;
  int64_t num_bytes_ = 0;
  std::vector<std::string> notes_;
  std::unique_ptr<PeerStore> store_;
};

}  // namespace tessera
