#pragma once

#include <cstdint>

#include "ops/cuda/ptx/bulk_copy.cuh"
#include "runtime/cuda/cuda_ring_channel.cuh"

/// Chunks of whole vectors move by TMA: one thread of a warp has several pieces of them under way,
/// some to shared memory and some from there, and counts tell of whole chunks.
namespace tessera::cuda {

inline constexpr int kPiece = 6 << 10;
inline constexpr int kStages = 2;
inline constexpr int kAhead = 1;  ///< pieces on their way to shared memory

/// Shared memory of a warp that sends or receives.
struct Flow {
  Barrier landed[kStages];
  uint32_t chunks_put;  ///< of those that it sends, in order, how many are where they go
  alignas(128) std::byte pieces[kStages][kPiece];

  __device__ void begin() {
    for (Barrier& barrier : landed) barrier.init(1);
    fence_barrier_init();
    chunks_put = 0;
  }
  /// Piece `idx` of all; that of kStages before must have been stored.
  __device__ __forceinline__ void load(int64_t idx, const std::byte* from, int num_bytes) {
    wait_stores_read<kStages - kAhead>();
    Barrier& barrier = landed[idx % kStages];
    barrier.arrive_and_expect(static_cast<uint32_t>(num_bytes));
    load_bytes(pieces[idx % kStages], from, static_cast<uint32_t>(num_bytes), &barrier);
  }
  __device__ __forceinline__ void wait(int64_t idx) {
    landed[idx % kStages].wait(static_cast<uint32_t>(idx / kStages % 2));
  }
  __device__ __forceinline__ void store(int64_t idx, std::byte* to, int num_bytes) {
    store_bytes(to, pieces[idx % kStages], static_cast<uint32_t>(num_bytes));
    commit_stores();
  }
};
inline constexpr int kFlowBytes = 2 * kRingWarps * static_cast<int>(sizeof(Flow));

inline constexpr uint32_t kGivenUp = 0xffffffff;  ///< in chunks_put: who sends has ended early

__device__ __forceinline__ void set_chunks_put(Flow& flow, uint32_t count) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_address(&flow.chunks_put)),
               "r"(count)
               : "memory");
}
__device__ __forceinline__ uint32_t get_chunks_put(Flow& flow) {
  uint32_t count;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
               : "=r"(count)
               : "r"(shared_address(&flow.chunks_put))
               : "memory");
  return count;
}

/// Until all but the last kPending of the stores that this thread gave TMA are where they go.
template <int kPending>
__device__ __forceinline__ void wait_stores_done() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

/// The pieces that go through a channel, in the order in which both sides take them: turn by turn,
/// of those for, or from, the ranks behind this one, or before it.
class Pieces {
 public:
  __device__ explicit Pieces(const Channel& channel) : channel_(channel), turns_(channel.turns()) {
    go_on();
  }

  __device__ __forceinline__ bool is_valid() const { return turn_ < turns_; }
  __device__ __forceinline__ bool begins_chunk() const { return at_ == 0; }
  __device__ __forceinline__ bool ends_chunk() const { return at_ + kPiece >= chunk_; }
  __device__ __forceinline__ int peer() const {
    const int size = channel_.ring.size;
    return (channel_.ring.rank + (channel_.sends ? step_ : size - step_)) % size;
  }
  __device__ __forceinline__ int64_t turn() const { return turn_; }
  /// Where the piece begins, in its chunk and among all that this rank sends or receives.
  __device__ __forceinline__ int in_chunk() const { return at_; }
  __device__ __forceinline__ int64_t offset() const {
    return part().offset + channel_.begin(part(), turn_) + at_;
  }
  __device__ __forceinline__ int num_bytes() const { return min(kPiece, chunk_ - at_); }

  __device__ __forceinline__ void next() {
    at_ += kPiece;
    if (at_ >= chunk_) go_on();
  }
  __device__ __forceinline__ void next_chunk() { go_on(); }

 private:
  __device__ __forceinline__ const Stretch& part() const {
    return channel_.sends ? channel_.plan.send[peer()] : channel_.plan.receive[peer()];
  }
  /// To the next chunk that there is.
  __device__ void go_on() {
    at_ = 0;
    do {
      if (++step_ >= channel_.ring.size) {
        step_ = 0;
        if (++turn_ >= turns_) return;
      }
    } while (step_ == 0 || !channel_.has(part(), turn_));
    chunk_ = channel_.size(part(), turn_);
  }

  const Channel& channel_;
  int64_t turns_;
  int step_ = 0;
  int64_t turn_ = 0;
  int at_ = 0;
  int chunk_ = 0;
};

/// Counts the chunks that are where they go. Of each it knows a few pieces later, so that these
/// need not wait.
class PutCounter {
 public:
  __device__ explicit PutCounter(Flow& flow) : flow_(flow) {}

  /// Behind each piece.
  __device__ __forceinline__ void stored(bool ends_chunk) {
    if (pending_ && ++pieces_behind_ == kLag) {
      wait_stores_done<kLag>();
      count();
    }
    if (!ends_chunk) return;
    if (pending_) {
      wait_stores_done<1>();
      count();
    }
    pending_ = true;
    pieces_behind_ = 0;
  }
  __device__ __forceinline__ void finish() {
    wait_stores_done<0>();
    if (pending_) count();
  }

 private:
  static constexpr int kLag = 2;
  __device__ __forceinline__ void count() {
    set_chunks_put(flow_, ++count_);
    pending_ = false;
  }

  Flow& flow_;
  uint32_t count_ = 0;
  bool pending_ = false;
  int pieces_behind_ = 0;
};

/// A lane for each channel of the block tells the other ranks of the chunks that came there. It is
/// not done by who sends them, since the fence before it takes long.
__device__ inline void tell_chunks(const Channel& channel, Flow& flow, bool has_channel) {
  Pieces chunk(channel);
  uint32_t told = 0;
  while (true) {
    const bool left = has_channel && chunk.is_valid() && told != kGivenUp;
    if (__ballot_sync(kAllLanes, left) == 0) return;
    const uint32_t put = left ? get_chunks_put(flow) : told;
    if (__ballot_sync(kAllLanes, put > told) == 0) continue;
    fence_system();
    if (put == kGivenUp) told = kGivenUp;
    for (; told < put; ++told, chunk.next_chunk())
      channel.tell_put(chunk.peer(), channel.chunk_to(chunk.peer(), chunk.turn()));
    __syncwarp();
  }
}

/// One thread puts the channel's chunks into the memory of the other ranks, once there is room;
/// false where the host gave up.
__device__ inline bool send_pieces(const Channel& channel, Flow& flow, const std::byte* from) {
  Pieces load(channel);
  Pieces store(channel);
  PutCounter put(flow);
  int64_t loaded = 0;
  bool ok = true;
  for (int64_t idx = 0; ok && store.is_valid(); ++idx, store.next()) {
    for (; load.is_valid() && loaded - idx < kAhead; ++loaded, load.next())
      flow.load(loaded, from + load.offset(), load.num_bytes());
    flow.wait(idx);
    const uint64_t chunk = channel.chunk_to(store.peer(), store.turn());
    if (store.begins_chunk() && !channel.has_room(store.peer(), chunk)) {
      put.finish();  // so that the receiver can take them
      ok = channel.wait_for_room(store.peer(), chunk);
      if (!ok) break;
    }
    flow.store(idx, channel.slot(store.peer(), channel.ring.rank, chunk) + store.in_chunk(),
               store.num_bytes());
    put.stored(store.ends_chunk());
  }
  put.finish();
  if (!ok) set_chunks_put(flow, kGivenUp);
  return ok;
}

/// One thread takes the channel's chunks out of this rank's memory; false where the host gave up.
__device__ inline bool receive_pieces(const Channel& channel, Flow& flow, std::byte* to) {
  Pieces load(channel);
  Pieces store(channel);
  int64_t loaded = 0;
  bool ok = true;
  for (int64_t idx = 0; ok && store.is_valid(); ++idx, store.next()) {
    for (; load.is_valid() && loaded - idx < kAhead; ++loaded, load.next()) {
      const uint64_t chunk = channel.chunk_from(load.peer(), load.turn());
      if (load.begins_chunk() && !channel.is_there(load.peer(), chunk)) {
        if (loaded > idx) break;  // something else can be done meanwhile
        ok = channel.wait_for_chunk(load.peer(), chunk);
        if (!ok) break;
      }
      // What another rank wrote was seen by an ordinary read.
      asm volatile("fence.proxy.async.global;" ::: "memory");
      flow.load(loaded, channel.slot(channel.ring.rank, load.peer(), chunk) + load.in_chunk(),
                load.num_bytes());
    }
    if (!ok) break;
    flow.wait(idx);
    if (store.ends_chunk())
      channel.tell_taken(store.peer(), channel.chunk_from(store.peer(), store.turn()));
    flow.store(idx, to + store.offset(), store.num_bytes());
  }
  wait_stores_done<0>();
  return ok;
}

}  // namespace tessera::cuda
