#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/shm/shm_link.h"
#include "comm/shm/shm_segment.h"

namespace tessera {

/// The links of a rank to those of its machine; its transport, channels and exchanges share it.
class ShmMesh {
 public:
  explicit ShmMesh(int64_t num_ranks) : entries_(num_ranks) {}

  /// How many channels were made with a rank: the number of the next.
  uint32_t& num_channels(int64_t rank) { return entries_[rank].num_channels; }
  /// Joins a rank: `own` is this rank's segment.
  void add(int64_t rank, int64_t own_rank, ShmSegment theirs, PeerMemory memory);
  /// What the links write to.
  void set_own(ShmSegment own) { own_ = std::move(own); }
  ShmSegment& own() { return own_; }

  /// Null where a rank is not within reach.
  ShmLink* link(int64_t rank) const { return entries_[rank].link.get(); }
  void progress();
  /// Afterwards no memory of a transfer is touched, and the others take nothing of this rank's.
  void give_up();
  bool gave_up() const { return gave_up_; }

 private:
  struct Entry {
    uint32_t num_channels = 0;
    ShmSegment theirs;
    std::unique_ptr<ShmLink> link;
  };

  ShmSegment own_;
  std::vector<Entry> entries_;  ///< by rank
  std::vector<ShmLink*> links_;
  bool gave_up_ = false;
};

}  // namespace tessera
