#include "comm/shm/shm_mesh.h"

#include <utility>

namespace tessera {

void ShmMesh::add(int64_t rank, int64_t own_rank, ShmSegment theirs, PeerMemory memory) {
  Entry& entry = entries_[rank];
  entry.theirs = std::move(theirs);
  const ShmLink::Lanes lanes = {&own_.lane_to(rank), &entry.theirs.lane_to(own_rank),
                                &entry.theirs.header()};
  entry.link = std::make_unique<ShmLink>(rank, lanes, std::move(memory));
  links_.push_back(entry.link.get());
}

void ShmMesh::progress() {
  if (gave_up_) return;
  for (ShmLink* link : links_) link->progress();
}

void ShmMesh::give_up() {
  if (!std::exchange(gave_up_, true) && own_)
    own_.header().gave_up.store(1, std::memory_order_seq_cst);
}

}  // namespace tessera
