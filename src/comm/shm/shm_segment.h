#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "core/file/file.h"

namespace tessera {

/// What two processes tell one another through memory that both have mapped: entries in the order
/// in which they were pushed. One of them pushes, the other takes; neither waits. All zeros is an
/// empty ring.
template <typename T, int64_t kSlots>
class ShmRing {
 public:
  /// False where it is full. What was written before is seen by who takes the entry.
  bool push(const T& entry) {
    const uint64_t at = pushed_.load(std::memory_order_relaxed);
    if (at - taken_.load(std::memory_order_acquire) == kSlots) return false;
    slots_[at % kSlots] = entry;
    pushed_.store(at + 1, std::memory_order_release);
    return true;
  }
  /// False where there is none.
  bool take(T& entry) {
    const uint64_t at = taken_.load(std::memory_order_relaxed);
    if (at == pushed_.load(std::memory_order_acquire)) return false;
    entry = slots_[at % kSlots];
    taken_.store(at + 1, std::memory_order_release);
    return true;
  }

 private:
  static_assert(std::atomic<uint64_t>::is_always_lock_free, "others share its memory");
  static constexpr size_t kLine = 64;
  alignas(kLine) std::atomic<uint64_t> pushed_;
  alignas(kLine) std::atomic<uint64_t> taken_;
  alignas(kLine) std::array<T, kSlots> slots_;
};

/// Whom a message is for.
struct ShmEnvelope {
  uint32_t channel = 0;  ///< counts the groups that both ranks are in
  uint32_t tag = 0;
  uint64_t group = 0;  ///< a hash of the group, which must be the same on both sides

  bool matches(const ShmEnvelope& other) const {
    return channel == other.channel && tag == other.tag;
  }
};

/// A message that can be fetched from its sender's memory until the sender is told that it was.
struct ShmOffer {
  ShmEnvelope envelope;
  uint64_t id = 0;
  uint64_t address = 0;  ///< in the sender's address space
  int64_t bytes = 0;
};

/// What a rank tells one other.
struct ShmLane {
  static constexpr int64_t kSlots = 64;
  ShmRing<ShmOffer, kSlots> offers;
  ShmRing<uint64_t, kSlots> fetched;  ///< ids of the other's offers, of which as many are out
};

/// A rank's part of what the ranks of a machine share: written by that rank alone, but for how far
/// others have taken. It is in memory without a name (memfd), which the system takes back with the
/// last process that has it, however that ends; others open it through /proc.
class ShmSegment {
 public:
  struct Header {
    uint64_t token;                 ///< a random number that tells this segment from any other
    std::atomic<uint32_t> gave_up;  ///< what the rank's offers name may be gone
  };

  /// Nothing mapped.
  ShmSegment() = default;
  /// This rank's own. Throws UserError.
  explicit ShmSegment(int64_t num_ranks);
  /// That of another process, whose descriptor of it is `descriptor`; empty where it cannot be
  /// opened or has another token.
  static ShmSegment open(int64_t pid, int descriptor, int64_t num_ranks, uint64_t token);
  ShmSegment(ShmSegment&& other) noexcept { swap(other); }
  ShmSegment& operator=(ShmSegment&& other) noexcept {
    swap(other);
    return *this;
  }
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;
  ~ShmSegment();

  explicit operator bool() const { return memory_ != nullptr; }
  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  /// What its rank tells this one.
  ShmLane& lane_to(int64_t rank) const;
  int descriptor() const { return file_.get(); }
  /// Once all have opened it.
  void close_file() { file_.reset(); }

 private:
  void map(int64_t num_ranks);
  void swap(ShmSegment& other) noexcept;

  FileDescriptor file_;
  std::byte* memory_ = nullptr;
  int64_t bytes_ = 0;
};

/// Opens what another process has open, by its descriptor there; an invalid one where the system
/// does not let it.
FileDescriptor open_of_process(int64_t pid, int descriptor);

}  // namespace tessera
