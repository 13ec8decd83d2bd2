#pragma once

#include <cstdint>

#include "runtime/cuda/cuda_ring_kernels.h"

/// What the kernels of a ring share: counts that ranks wait for, and whose bytes go through which
/// channel.
namespace tessera::cuda {

inline constexpr int kWarp = 32;
/// Warps that send, as many that receive, and one that tells of what was sent.
inline constexpr int kRingThreads = (2 * kRingWarps + 1) * kWarp;
inline constexpr unsigned kAllLanes = 0xffffffff;

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed(uint64_t* address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

/// What this thread knows to be done is done for all who see what it stores from now on. Under load
/// it takes microseconds.
__device__ __forceinline__ void fence_system() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

__device__ __forceinline__ uint64_t now() {
  uint64_t nanoseconds;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}

/// Until `count`, which rank `of` advances, has come to `wanted`; false where the host gave up.
__device__ inline bool wait_for(const uint64_t* count, uint64_t wanted, int of,
                                RingStatus* status) {
  constexpr uint64_t kSecond = 1'000'000'000;
  if (load_acquire(count) >= wanted) return true;
  const uint64_t begin = now();
  bool told = false;
  for (int turn = 1; load_acquire(count) < wanted; ++turn) {
    if (turn % 1024 != 0) continue;
    if (*static_cast<volatile int*>(&status->abort) != 0) return false;
    if (!told && now() - begin > kSecond) {
      *static_cast<volatile int*>(&status->waits_for) = of + 1;
      told = true;
    }
  }
  if (told) *static_cast<volatile int*>(&status->waits_for) = 0;
  return true;
}

/// Bytes of a chunk of so many that go from one rank to another: both sides find the same.
__device__ __forceinline__ int chunk_of(int64_t num_bytes) {
  constexpr int64_t kLeast = 512;
  constexpr int64_t kGrain = 128;
  const int64_t even = (num_bytes + kRingChannels - 1) / kRingChannels;
  const int64_t whole = (even + kGrain - 1) / kGrain * kGrain;
  return static_cast<int>(min(max(whole, kLeast), int64_t{kRingChunk}));
}

/// A stretch of memory whose chunks the channels take in turn.
struct Stretch {
  int64_t offset;
  int64_t num_bytes;
  int chunk;

  __device__ void set(int64_t at, int64_t bytes) {
    offset = at;
    num_bytes = bytes;
    chunk = chunk_of(bytes);
  }
  __device__ __forceinline__ int64_t turns(int channel) const {
    const int64_t all = (num_bytes + chunk - 1) / chunk;
    return all <= channel ? 0 : (all - channel - 1) / kRingChannels + 1;
  }
};

/// What a block keeps of an exchange.
struct RingPlan {
  Stretch send[kMaxRingRanks];
  Stretch receive[kMaxRingRanks];
};

/// What a warp of a block does.
enum class RingRole { kSend, kReceive, kTell };

__device__ __forceinline__ RingRole ring_role() {
  const auto warp = static_cast<int>(threadIdx.x / kWarp);
  return warp < kRingWarps       ? RingRole::kSend
         : warp < 2 * kRingWarps ? RingRole::kReceive
                                 : RingRole::kTell;
}

/// One end of a channel.
struct Channel {
  const RingView& ring;
  const RingPlan& plan;
  bool sends;
  int number;

  /// Of those of this block, number `index`.
  __device__ Channel(const RingView& ring, const RingPlan& plan, bool sends, int index)
      : ring(ring),
        plan(plan),
        sends(sends),
        number(static_cast<int>(blockIdx.x) * kRingWarps + index) {}

  __device__ __forceinline__ int64_t place(int rank) const {
    return int64_t{rank} * kRingChannels + number;
  }
  __device__ __forceinline__ std::byte* slot(int owner, int source, uint64_t chunk) const {
    const int64_t idx = place(source) * kRingSlots + static_cast<int64_t>(chunk % kRingSlots);
    return ring.chunks[owner] + idx * kRingChunk;
  }
  /// Of this channel's chunk number `turn`.
  __device__ __forceinline__ bool has(const Stretch& part, int64_t turn) const {
    return begin(part, turn) < part.num_bytes;
  }
  __device__ __forceinline__ int64_t begin(const Stretch& part, int64_t turn) const {
    return (turn * kRingChannels + number) * part.chunk;
  }
  __device__ __forceinline__ int size(const Stretch& part, int64_t turn) const {
    return static_cast<int>(min(part.num_bytes - begin(part, turn), int64_t{part.chunk}));
  }
  __device__ int64_t turns() const {
    int64_t most = 0;
    for (int r = 0; r < ring.size; ++r)
      most = max(most, (sends ? plan.send[r] : plan.receive[r]).turns(number));
    return most;
  }
  /// Of all exchanges, the number of what goes to, or comes from, a rank in this turn.
  __device__ __forceinline__ uint64_t chunk_to(int rank, int64_t turn) const {
    return ring.sent[place(rank)] + turn;
  }
  __device__ __forceinline__ uint64_t chunk_from(int rank, int64_t turn) const {
    return ring.received[place(rank)] + turn;
  }

  // Counts, as a rank that sends and one that receives see and advance them.

  __device__ __forceinline__ bool wait_for_room(int to, uint64_t chunk) const {
    return wait_for(ring.taken[ring.rank] + place(to), taken_before(chunk), to, ring.status);
  }
  __device__ __forceinline__ bool has_room(int to, uint64_t chunk) const {
    return load_acquire(ring.taken[ring.rank] + place(to)) >= taken_before(chunk);
  }
  /// REQUIRES a fence_system() behind the chunk.
  __device__ __forceinline__ void tell_put(int to, uint64_t chunk) const {
    store_relaxed(ring.put[to] + place(ring.rank), chunk + 1);
  }
  __device__ __forceinline__ bool wait_for_chunk(int from, uint64_t chunk) const {
    return wait_for(ring.put[ring.rank] + place(from), chunk + 1, from, ring.status);
  }
  __device__ __forceinline__ bool is_there(int from, uint64_t chunk) const {
    return load_acquire(ring.put[ring.rank] + place(from)) > chunk;
  }
  /// REQUIRES that all of the chunk was read, which no later store of this thread can overtake.
  __device__ __forceinline__ void tell_taken(int from, uint64_t chunk) const {
    store_relaxed(ring.taken[from] + place(ring.rank), chunk + 1);
  }

  /// Keeps the channel's counts of what goes to or comes from a rank for the next kernel. A sender
  /// waits until all that it sent has been taken, so that nobody touches this rank's memory between
  /// kernels.
  __device__ void end(int other) const {
    if (other >= ring.size || other == ring.rank) return;
    if (!sends) {
      ring.received[place(other)] += plan.receive[other].turns(number);
      return;
    }
    const uint64_t sent = ring.sent[place(other)] + plan.send[other].turns(number);
    wait_for(ring.taken[ring.rank] + place(other), sent, other, ring.status);
    ring.sent[place(other)] = sent;
  }

 private:
  static __device__ __forceinline__ uint64_t taken_before(uint64_t chunk) {
    return chunk < kRingSlots ? 0 : chunk + 1 - kRingSlots;
  }
};

}  // namespace tessera::cuda
