#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"

namespace tessera {

// Each rank's newest state, twice in memory: in files in a RAM-backed folder of its own machine,
// and in such files of another rank, its neighbour. A run whose ranks were lost finds in them a
// state that is newer than what is on the disk, though a rank's machine was lost too.
//
//   <root>/rank-00001/own-step-00000120/         the part of rank 1
//                     of-00000-step-00000120/    a copy of the part of rank 0
//
// A part is complete as a checkpoint is: manifest, hashes of all files, COMPLETE. While one is
// made, the one before it stays, so that a kill at any moment leaves a whole set.

/// Where a run keeps it.
struct PeerPlace {
  std::filesystem::path root;  ///< the run's folder in this machine's memory
  std::string run;             ///< the run's mark, which no other run of the same root has
  int64_t shift = 1;           ///< the copy of rank r is at rank r + shift
  /// The machines of all ranks, by whatever number.
  std::vector<int64_t> machines;
  uint64_t layout = 0;  ///< a hash of what this rank holds: a part of another is not its own
};

/// What one rank gives.
struct PeerSave {
  int64_t step = 0;
  std::span<const NamedSlice> model = {};
  std::span<const NamedSlice> optimizer = {};
  std::string state = "{}";  ///< as SaveRequest's
};

/// All functions but those that say otherwise are collective: all ranks return or all throw.
class PeerStore {
 public:
  /// The world, of several ranks, must outlive it.
  PeerStore(PeerPlace place, Communicator& world);

  /// Writes this rank's part and gives it to the neighbour; then removes what is older. Throws
  /// UserError where that cannot be done on some rank; what was complete before is left.
  void save(const PeerSave& request);

  /// The part of this rank in the newest step of which all ranks' parts are somewhere; nothing
  /// where there is none. Its hashes were compared. A rank that finds its own nowhere on its
  /// machine is given it by one that has it.
  std::optional<CheckpointReader> find();

  /// After find(): the newest step of which a rank saw a part of this run that other ranks held, or
  /// otherwise than now; -1: none. The same on all ranks, not collective.
  int64_t other_step() const { return other_step_; }

  /// Removes this rank's folder, and the run's where it is the last.
  void remove();

  /// Not collective: bytes of the run's files in this machine's memory.
  static int64_t bytes_in(const std::filesystem::path& root);

 private:
  /// A complete part on this rank's machine.
  struct SeenPart {
    int64_t rank = 0;
    int64_t step = 0;
    std::filesystem::path folder;
  };
  /// For a step: which rank has the part of which.
  struct Plan {
    int64_t step = -1;  ///< none
    std::vector<int64_t> givers;
  };

  std::filesystem::path own_folder() const;
  std::filesystem::path folder_of(int64_t rank) const;
  std::string state_text(const std::string& state) const;
  void write_own(const PeerSave& request, const std::filesystem::path& folder) const;
  void publish(int64_t step);
  std::vector<SeenPart> list_parts(const std::vector<int64_t>& layouts);
  Plan choose(const std::vector<SeenPart>& parts) const;
  void drop_damaged(const Plan& plan, std::vector<SeenPart>& parts, bool& dropped) const;
  void bring(const Plan& plan, const std::vector<SeenPart>& parts) const;

  PeerPlace place_;
  Communicator& world_;
  int64_t other_step_ = -1;
};

}  // namespace tessera
