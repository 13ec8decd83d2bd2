#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

/// Exchanges between GPUs that address one another's memory, as kernels: what a rank sends to
/// another goes through a ring of chunks in the other's memory, written by the sender's SMs and
/// taken out by the receiver's, both in one kernel. A ring has many channels, each of which a warp
/// fills and another empties, so that the time that a chunk takes to be seen is hidden by others. A
/// warp of its own tells of chunks that are there: the fence before it waits for all that is under
/// way between the GPUs. No size needs to be known to the host.
namespace tessera::cuda {

inline constexpr int kMaxRingRanks = 16;
inline constexpr int kRingBlocks = 16;
inline constexpr int kOwnBlocks = 8;  ///< beside them, for what a rank has for itself
inline constexpr int kRingWarps = 8;  ///< of a block that send, and as many that receive
inline constexpr int kRingChannels = kRingBlocks * kRingWarps;
inline constexpr int kRingSlots = 4;  ///< chunks of a channel that may wait to be taken
inline constexpr int kRingChunk = 12 << 10;

/// Memory of the host that both sides see while a kernel waits for other ranks.
struct RingStatus {
  /// By the host: kernels end as soon as they see it, with their work undone.
  int abort = 0;
  /// By a kernel: 1 + the place of a rank that it has waited for over a second; 0: none.
  int waits_for = 0;
};

/// What one rank of a group knows of the memory of all. Numbers of chunks count from the group's
/// beginning on and are never set back.
struct RingView {
  int rank = 0;
  int size = 1;
  /// Of each rank, as this one addresses it: chunks [source][channel][slot], and, by the rank that
  /// counts, [rank][channel]: how many chunks it has put there, and how many of those that were put
  /// into its own memory by this one it has taken out.
  std::byte* chunks[kMaxRingRanks] = {};
  uint64_t* put[kMaxRingRanks] = {};
  uint64_t* taken[kMaxRingRanks] = {};
  /// This rank's own counts at the end of the last kernel: [other rank][channel].
  uint64_t* sent = nullptr;
  uint64_t* received = nullptr;
  RingStatus* status = nullptr;
};

/// Bytes of each part of a rank's memory.
constexpr size_t ring_chunk_bytes(int num_ranks) {
  return size_t{kRingChunk} * kRingSlots * kRingChannels * num_ranks;
}
constexpr size_t ring_count_bytes(int num_ranks) {
  return sizeof(uint64_t) * kRingChannels * num_ranks;
}

/// send_rows[i] rows of `from` to rank i and receive_rows[i] from it, each in the order of the
/// ranks without gaps. Counts are those here or, where the pointers are not null, on the device.
/// Where it `gathers`, every rank gets the same rows of `from`, which may be this rank's place of
/// `to`.
struct RingAllToAll {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t row_bytes = 0;
  bool gathers = false;
  int64_t send_rows[kMaxRingRanks] = {};
  int64_t receive_rows[kMaxRingRanks] = {};
  const int64_t* device_send_rows = nullptr;
  const int64_t* device_receive_rows = nullptr;
};
void launch_ring_all_to_all(const RingView& ring, const RingAllToAll& exchange,
                            cudaStream_t stream);

/// counts[i] values of `from`, BF16 or F32, are for rank i, in the order of the ranks without gaps:
/// each gets the sum of all ranks', in F32 in their order, rounded once. `to` may be this rank's
/// part of `from`.
struct RingSum {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t counts[kMaxRingRanks] = {};
  bool is_f32 = false;
};
void launch_ring_sum(const RingView& ring, const RingSum& sum, cudaStream_t stream);

}  // namespace tessera::cuda
