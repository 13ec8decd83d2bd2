#pragma once

#include <optional>
#include <unordered_map>

#include "core/elastic_memory.h"

namespace tessera {

/// The slabs of programs (see MemoryPlan), whose ragged values have addresses for their bounds, and
/// memory for the rows that came. Not thread-safe; one run at a time.
class ElasticSlabs {
 public:
  ElasticSlabs(ElasticMemory saved, ElasticMemory transient)
      : saved_(std::move(saved)), transient_(std::move(transient)) {}

  /// Whether some of it has no memory yet.
  bool is_by_page() const { return saved_.is_by_page() || transient_.is_by_page(); }
  const ElasticMemory& saved() const { return saved_; }
  const ElasticMemory& transient() const { return transient_; }
  /// Gives memory to bytes of either slab. Throws OutOfMemory.
  void commit(const std::byte* begin, int64_t num_bytes);
  /// For programs that run later: what an extent is, by its address, until it is noted again.
  void note_rows(const void* extent, int64_t rows) { rows_[extent] = rows; }
  std::optional<int64_t> find_rows(const void* extent) const;

 private:
  ElasticMemory saved_;
  ElasticMemory transient_;
  std::unordered_map<const void*, int64_t> rows_;
};

}  // namespace tessera
