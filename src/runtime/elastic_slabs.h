#pragma once

#include <optional>
#include <unordered_map>

#include "core/pages/elastic_memory.h"

namespace tessera {

/// The slabs of programs (see MemoryPlan), whose ragged values have addresses for their bounds, and
/// memory for the rows that came. What is there when keep() is called stays; what comes later is
/// given back when others need memory and nobody needs it, which is known of a program's transient
/// values behind its run, and of saved ones when they are left. Both slabs together then take about
/// as much as the most that was needed at one time, though it is needed here in one step and there
/// in the next. Not thread-safe; one run at a time.
class ElasticSlabs {
 public:
  ElasticSlabs(ElasticMemory saved, ElasticMemory transient, Device& device)
      : saved_(std::move(saved)), transient_(std::move(transient)), device_(device) {}

  /// Whether some of it has no memory yet.
  bool is_by_page() const { return saved_.is_by_page() || transient_.is_by_page(); }
  const ElasticMemory& saved() const { return saved_; }
  const ElasticMemory& transient() const { return transient_; }
  /// Gives memory to bytes of either slab, which are needed from now on. It comes from the device,
  /// up to kRoom beside what is kept or as much as was needed at one time before, whichever is
  /// more; then, as where the device has none, what nobody needs is given back first, for which the
  /// device's work is waited for. Throws OutOfMemory.
  void commit(const std::byte* begin, int64_t num_bytes);
  static constexpr double kRoom = 0.125;  ///< of what is kept
  /// What has memory now is what every step needs.
  void keep();
  /// Nobody reads these bytes of the saved slab any more, but work that the device was given.
  void leave(const std::byte* begin, int64_t num_bytes);
  /// Nobody reads anything saved, or these bytes of the transient slab, any more.
  void leave_saved() { leave(saved_.data(), saved_.num_bytes()); }
  void leave_transient(const std::byte* begin, int64_t num_bytes);
  /// Bytes of memory in both slabs: now, the most at any time, and what was ever given back.
  int64_t committed_bytes() const {
    return saved_.committed_bytes() + transient_.committed_bytes();
  }
  int64_t peak_bytes() const { return peak_; }
  int64_t given_back_bytes() const { return given_back_; }
  /// For programs that run later: what an extent is, by its address, until it is noted again.
  void note_rows(const void* extent, int64_t rows) { rows_[extent] = rows; }
  std::optional<int64_t> find_rows(const void* extent) const;

 private:
  void give(ElasticMemory& slab, const ElasticMemory::Piece& piece);
  bool give_back(int64_t num_bytes);

  ElasticMemory saved_;
  ElasticMemory transient_;
  Device& device_;
  int64_t now_ = 0;
  int64_t limit_ = 0;  // up to which memory comes from the device while some is idle
  int64_t peak_ = 0;
  int64_t given_back_ = 0;
  std::unordered_map<const void*, int64_t> rows_;
};

}  // namespace tessera
