#include "runtime/elastic_slabs.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "core/error.h"
#include "core/memory.h"

namespace tessera {
namespace {

// What is given back beside what is wanted, so that the device is seldom waited for.
constexpr int64_t kMoreShare = 64;

}  // namespace

void ElasticSlabs::keep() {
  saved_.keep();
  transient_.keep();
  limit_ = committed_bytes() + static_cast<int64_t>(kRoom * static_cast<double>(committed_bytes()));
}

void ElasticSlabs::commit(const std::byte* begin, int64_t num_bytes) {
  if (num_bytes == 0) return;
  for (ElasticMemory* slab : {&saved_, &transient_}) {
    if (!slab->contains(begin)) continue;
    const int64_t offset = begin - slab->data();
    for (const ElasticMemory::Piece& piece : slab->need(offset, offset + num_bytes))
      give(*slab, piece);
    return;
  }
  throw InternalError("memory was asked for at an address of neither slab");
}

void ElasticSlabs::give(ElasticMemory& slab, const ElasticMemory::Piece& piece) {
  const int64_t over = committed_bytes() + piece.num_bytes() - limit_;
  if (over > 0) give_back(over + limit_ / kMoreShare);
  while (!slab.give(piece)) {
    if (!give_back(piece.num_bytes())) slab.refuse(piece.num_bytes());
  }
  peak_ = std::max(peak_, committed_bytes());
  limit_ = std::max(limit_, committed_bytes());
}

/// Gives so many bytes back, or all that nobody needs, what was left first before the others:
/// layers go backward in the opposite order, so it is what is needed last. False where nothing is.
bool ElasticSlabs::give_back(int64_t num_bytes) {
  if (saved_.idle_bytes() + transient_.idle_bytes() == 0) return false;
  struct Idle {
    ElasticMemory* slab;
    ElasticMemory::Piece piece;
  };
  std::vector<Idle> idle;
  for (ElasticMemory* slab : {&saved_, &transient_}) {
    for (const ElasticMemory::Piece& piece : slab->idle()) idle.push_back({slab, piece});
  }
  if (idle.empty()) return false;
  std::ranges::stable_sort(idle, {}, [](const Idle& one) { return one.piece.left_at; });
  const std::unique_ptr<DeviceEvent> all_work = device_.make_event();
  all_work->record();
  all_work->synchronize();
  int64_t left = num_bytes;
  for (const Idle& one : idle) {
    if (left <= 0) break;
    one.slab->take_back(one.piece);
    left -= one.piece.num_bytes();
    given_back_ += one.piece.num_bytes();
  }
  return true;
}

void ElasticSlabs::leave(const std::byte* begin, int64_t num_bytes) {
  if (num_bytes == 0) return;
  ensure(saved_.contains(begin), "memory was left at an address that is not of the saved slab");
  const int64_t offset = begin - saved_.data();
  saved_.leave(offset, offset + num_bytes, ++now_);
}

void ElasticSlabs::leave_transient(const std::byte* begin, int64_t num_bytes) {
  if (num_bytes == 0 || !transient_.is_by_page()) return;
  ensure(transient_.contains(begin),
         "memory was left at an address that is not of the transient slab");
  const int64_t offset = begin - transient_.data();
  // The last page, too: working memories share none.
  const int64_t end =
      std::min(align_up(offset + num_bytes, device_.page_bytes()), transient_.num_bytes());
  transient_.leave(offset, end, ++now_);
}

std::optional<int64_t> ElasticSlabs::find_rows(const void* extent) const {
  const auto found = rows_.find(extent);
  return found == rows_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace tessera
