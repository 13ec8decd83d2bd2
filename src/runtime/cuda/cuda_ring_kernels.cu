#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "ops/cuda/check.h"
#include "ops/cuda/ptx/bulk_copy.cuh"
#include "runtime/cuda/cuda_ring_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 2 * kRingWarps * kWarp;
constexpr int kUnroll = 8;
constexpr unsigned kAllLanes = 0xffffffff;
constexpr uint64_t kSecond = 1'000'000'000;

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t now() {
  uint64_t nanoseconds;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}

/// Until `count`, which rank `of` advances, has come to `wanted`; false where the host gave up.
__device__ bool wait_for(const uint64_t* count, uint64_t wanted, int of, RingStatus* status) {
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

template <typename Word>
__device__ __forceinline__ void copy_words(const std::byte* from, std::byte* to, int num_bytes,
                                           int lane) {
  const auto* const source = reinterpret_cast<const Word*>(from);
  auto* const target = reinterpret_cast<Word*>(to);
  const int count = num_bytes / static_cast<int>(sizeof(Word));
  int i = lane;
  for (; i + (kUnroll - 1) * kWarp < count; i += kUnroll * kWarp) {
    Word words[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) words[u] = __ldcg(source + i + u * kWarp);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) target[i + u * kWarp] = words[u];
  }
  for (; i < count; i += kWarp) target[i] = __ldcg(source + i);
}

/// Until what this thread gave TMA to store is where it goes.
__device__ __forceinline__ void wait_stores_done() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/// Shared memory of a warp, through which TMA moves a chunk.
struct Stage {
  Barrier landed;
  alignas(128) std::byte chunk[kRingChunk];
};
constexpr int kSharedBytes = 2 * kRingWarps * static_cast<int>(sizeof(Stage));

/// Moves a warp's chunks, one at a time: by TMA where they are of whole vectors, else through
/// registers.
template <typename Word>
class Mover {
 public:
  __device__ Mover(Stage& stage, int lane) : stage_(stage), lane_(lane) {
    if (lane == 0) {
      stage_.landed.init(1);
      fence_barrier_init();
    }
    __syncwarp();
  }
  /// Begins to fetch what store() then puts elsewhere.
  __device__ __forceinline__ void fetch(const std::byte* from, int num_bytes) const {
    if (!kByTma || lane_ != 0) return;
    // What another rank wrote was seen by an ordinary read.
    asm volatile("fence.proxy.async.global;" ::: "memory");
    stage_.landed.arrive_and_expect(static_cast<uint32_t>(num_bytes));
    load_bytes(stage_.chunk, from, static_cast<uint32_t>(num_bytes), &stage_.landed);
  }
  /// Returns when all of it is there.
  __device__ __forceinline__ void store(const std::byte* from, std::byte* to, int num_bytes) {
    if constexpr (kByTma) {
      if (lane_ == 0) {
        stage_.landed.wait(parity_);
        store_bytes(to, stage_.chunk, static_cast<uint32_t>(num_bytes));
        commit_stores();
        wait_stores_done();
      }
      parity_ ^= 1;
    } else {
      copy_words<Word>(from, to, num_bytes, lane_);
    }
    __syncwarp();
  }

 private:
  static constexpr bool kByTma = sizeof(Word) == 16;
  Stage& stage_;
  int lane_;
  uint32_t parity_ = 0;
};

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
struct Plan {
  Stretch send[kMaxRingRanks];
  Stretch receive[kMaxRingRanks];
};

/// A warp that sends, or receives, what goes through one channel.
template <typename Word>
struct Worker {
  const RingView& ring;
  const Plan& plan;
  bool sends;
  int channel;
  int lane;
  Mover<Word> mover;

  __device__ Worker(const RingView& ring, const Plan& plan, Stage* stages)
      : ring(ring),
        plan(plan),
        sends(threadIdx.x < kRingWarps * kWarp),
        channel(static_cast<int>(blockIdx.x * kRingWarps + threadIdx.x / kWarp % kRingWarps)),
        lane(static_cast<int>(threadIdx.x % kWarp)),
        mover(stages[threadIdx.x / kWarp], lane) {}

  __device__ __forceinline__ int64_t place(int rank) const {
    return int64_t{rank} * kRingChannels + channel;
  }
  __device__ __forceinline__ std::byte* slot(int owner, int source, uint64_t number) const {
    const int64_t idx = place(source) * kRingSlots + static_cast<int64_t>(number % kRingSlots);
    return ring.chunks[owner] + idx * kRingChunk;
  }
  /// Of this channel's chunk number `turn`.
  __device__ __forceinline__ bool has(const Stretch& part, int64_t turn) const {
    return begin(part, turn) < part.num_bytes;
  }
  __device__ __forceinline__ int64_t begin(const Stretch& part, int64_t turn) const {
    return (turn * kRingChannels + channel) * part.chunk;
  }
  __device__ __forceinline__ int size(const Stretch& part, int64_t turn) const {
    return static_cast<int>(min(part.num_bytes - begin(part, turn), int64_t{part.chunk}));
  }
  __device__ int64_t turns() const {
    int64_t most = 0;
    for (int r = 0; r < ring.size; ++r)
      most = max(most, (sends ? plan.send[r] : plan.receive[r]).turns(channel));
    return most;
  }
  /// Whether all lanes may go on.
  __device__ __forceinline__ bool agree(bool ok) const { return __all_sync(kAllLanes, ok) != 0; }
};

/// Puts the channel's chunks for all other ranks into their memory, once there is room; to the
/// ranks behind this one in order.
template <typename Word>
__device__ bool send_turn(Worker<Word>& w, const std::byte* from, int64_t turn) {
  for (int i = 1; i < w.ring.size; ++i) {
    const int to = (w.ring.rank + i) % w.ring.size;
    const Stretch& part = w.plan.send[to];
    if (!w.has(part, turn)) continue;
    const uint64_t number = w.ring.sent[w.place(to)] + turn;
    const uint64_t room = number < kRingSlots ? 0 : number + 1 - kRingSlots;
    const std::byte* const chunk = from + part.offset + w.begin(part, turn);
    w.mover.fetch(chunk, w.size(part, turn));
    bool ok = true;
    if (w.lane == 0)
      ok = wait_for(w.ring.taken[w.ring.rank] + w.place(to), room, to, w.ring.status);
    if (!w.agree(ok)) return false;
    w.mover.store(chunk, w.slot(to, w.ring.rank, number), w.size(part, turn));
    if (w.lane == 0) store_release(w.ring.put[to] + w.place(w.ring.rank), number + 1);
  }
  return true;
}

/// Takes the channel's chunks of all other ranks out of this one's memory; of those before it in
/// order.
template <typename Word>
__device__ bool receive_turn(Worker<Word>& w, std::byte* to, int64_t turn) {
  for (int i = 1; i < w.ring.size; ++i) {
    const int from = (w.ring.rank + w.ring.size - i) % w.ring.size;
    const Stretch& part = w.plan.receive[from];
    if (!w.has(part, turn)) continue;
    const uint64_t number = w.ring.received[w.place(from)] + turn;
    bool ok = true;
    if (w.lane == 0)
      ok = wait_for(w.ring.put[w.ring.rank] + w.place(from), number + 1, from, w.ring.status);
    if (!w.agree(ok)) return false;
    const std::byte* const chunk = w.slot(w.ring.rank, from, number);
    w.mover.fetch(chunk, w.size(part, turn));
    w.mover.store(chunk, to + part.offset + w.begin(part, turn), w.size(part, turn));
    if (w.lane == 0) store_release(w.ring.taken[from] + w.place(w.ring.rank), number + 1);
  }
  return true;
}

/// Keeps the channel's counts for the next kernel. A sender waits until all that it sent has been
/// taken, so that nobody touches this rank's memory between kernels.
template <typename Word>
__device__ void end_channel(const Worker<Word>& w) {
  const int other = w.lane;
  if (other >= w.ring.size || other == w.ring.rank) return;
  if (!w.sends) {
    w.ring.received[w.place(other)] += w.plan.receive[other].turns(w.channel);
    return;
  }
  const uint64_t sent = w.ring.sent[w.place(other)] + w.plan.send[other].turns(w.channel);
  wait_for(w.ring.taken[w.ring.rank] + w.place(other), sent, other, w.ring.status);
  w.ring.sent[w.place(other)] = sent;
}

__device__ void plan_all_to_all(const RingView& ring, const RingAllToAll& e, Plan& plan) {
  int64_t sent = 0;
  int64_t received = 0;
  for (int r = 0; r < ring.size; ++r) {
    const int64_t send = e.device_send_rows == nullptr ? e.send_rows[r] : e.device_send_rows[r];
    const int64_t receive =
        e.device_receive_rows == nullptr ? e.receive_rows[r] : e.device_receive_rows[r];
    plan.send[r].set(e.gathers ? 0 : sent * e.row_bytes, send * e.row_bytes);
    plan.receive[r].set(received * e.row_bytes, receive * e.row_bytes);
    sent += send;
    received += receive;
  }
}

template <typename Word>
__global__ void __launch_bounds__(kThreads, 1)
    ring_all_to_all(const __grid_constant__ RingView ring,
                    const __grid_constant__ RingAllToAll exchange) {
  __shared__ Plan plan;
  extern __shared__ __align__(128) std::byte shared[];
  if (threadIdx.x == 0) plan_all_to_all(ring, exchange, plan);
  __syncthreads();
  Worker<Word> w(ring, plan, reinterpret_cast<Stage*>(shared));
  const auto* const from = static_cast<const std::byte*>(exchange.from);
  auto* const to = static_cast<std::byte*>(exchange.to);
  const Stretch& own = plan.receive[ring.rank];
  const std::byte* const own_from = from + plan.send[ring.rank].offset;
  const bool moves_own = own_from != to + own.offset;
  const int64_t turns = w.turns();
  for (int64_t turn = 0; turn < turns; ++turn) {
    if (w.sends) {
      if (!send_turn(w, from, turn)) return;
      continue;
    }
    if (moves_own && w.has(own, turn)) {
      const std::byte* const chunk = own_from + w.begin(own, turn);
      w.mover.fetch(chunk, w.size(own, turn));
      w.mover.store(chunk, to + own.offset + w.begin(own, turn), w.size(own, turn));
    }
    if (!receive_turn(w, to, turn)) return;
  }
  end_channel(w);
}

/// Adds up the own values and those in the slots of the other ranks, in the order of the ranks.
template <typename Value, typename Word>
__device__ void add_chunk(const Worker<Word>& w, const std::byte* own, std::byte* out,
                          int num_bytes, int64_t turn) {
  constexpr int kWidth = static_cast<int>(sizeof(Word) / sizeof(Value));
  constexpr int kTogether = 4;
  const int count = num_bytes / static_cast<int>(sizeof(Word));
  for (int first = w.lane; first < count; first += kTogether * kWarp) {
    float sums[kTogether][kWidth] = {};
    for (int r = 0; r < w.ring.size; ++r) {
      const auto* const part = reinterpret_cast<const Word*>(
          r == w.ring.rank ? own : w.slot(w.ring.rank, r, w.ring.received[w.place(r)] + turn));
      Word words[kTogether] = {};
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
        if (first + u * kWarp < count) words[u] = __ldcg(part + first + u * kWarp);
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const auto* const values = reinterpret_cast<const Value*>(&words[u]);
#pragma unroll
        for (int v = 0; v < kWidth; ++v) sums[u][v] += static_cast<float>(values[v]);
      }
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (first + u * kWarp >= count) break;
      Word word;
      auto* const values = reinterpret_cast<Value*>(&word);
#pragma unroll
      for (int v = 0; v < kWidth; ++v) values[v] = static_cast<Value>(sums[u][v]);
      reinterpret_cast<Word*>(out)[first + u * kWarp] = word;
    }
  }
}

template <typename Value, typename Word>
__device__ bool sum_turn(const Worker<Word>& w, const std::byte* own, std::byte* out,
                         int64_t turn) {
  const Stretch& part = w.plan.receive[w.ring.rank];
  if (!w.has(part, turn)) return true;
  const bool watches = w.lane < w.ring.size && w.lane != w.ring.rank;
  const uint64_t number = watches ? w.ring.received[w.place(w.lane)] + turn : 0;
  bool ok = true;
  if (watches)
    ok = wait_for(w.ring.put[w.ring.rank] + w.place(w.lane), number + 1, w.lane, w.ring.status);
  if (!w.agree(ok)) return false;
  add_chunk<Value>(w, own + w.begin(part, turn), out + w.begin(part, turn), w.size(part, turn),
                   turn);
  __syncwarp();
  if (watches) store_release(w.ring.taken[w.lane] + w.place(w.ring.rank), number + 1);
  return true;
}

template <typename Value, typename Word>
__global__ void __launch_bounds__(kThreads, 1)
    ring_sum(const __grid_constant__ RingView ring, const __grid_constant__ RingSum sum) {
  __shared__ Plan plan;
  extern __shared__ __align__(128) std::byte shared[];
  if (threadIdx.x == 0) {
    constexpr auto kBytes = static_cast<int64_t>(sizeof(Value));
    int64_t before = 0;
    for (int r = 0; r < ring.size; ++r) {
      plan.send[r].set(before, sum.counts[r] * kBytes);
      plan.receive[r].set(0, sum.counts[ring.rank] * kBytes);
      before += sum.counts[r] * kBytes;
    }
  }
  __syncthreads();
  Worker<Word> w(ring, plan, reinterpret_cast<Stage*>(shared));
  const auto* const from = static_cast<const std::byte*>(sum.from);
  auto* const to = static_cast<std::byte*>(sum.to);
  const std::byte* const own = from + plan.send[ring.rank].offset;
  const int64_t turns = w.turns();
  for (int64_t turn = 0; turn < turns; ++turn) {
    if (!(w.sends ? send_turn(w, from, turn) : sum_turn<Value>(w, own, to, turn))) return;
  }
  end_channel(w);
}

bool divide_all(int64_t unit, const void* from, const void* to, const int64_t* sizes, int count) {
  const auto fits = [&](int64_t value) { return value % unit == 0; };
  return fits(static_cast<int64_t>(reinterpret_cast<uintptr_t>(from))) &&
         fits(static_cast<int64_t>(reinterpret_cast<uintptr_t>(to))) &&
         std::all_of(sizes, sizes + count, fits);
}

template <typename Exchange>
void launch(void (*kernel)(RingView, Exchange), const RingView& ring, const Exchange& exchange,
            cudaStream_t stream) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  kernel<<<kRingBlocks, kThreads, kSharedBytes, stream>>>(ring, exchange);
  check(cudaGetLastError());
}

}  // namespace

void launch_ring_all_to_all(const RingView& ring, const RingAllToAll& exchange,
                            cudaStream_t stream) {
  if (exchange.row_bytes == 0) return;
  const auto fits = [&](int64_t unit) {
    return divide_all(unit, exchange.from, exchange.to, &exchange.row_bytes, 1);
  };
  if (fits(sizeof(uint4))) return launch(ring_all_to_all<uint4>, ring, exchange, stream);
  if (fits(sizeof(uint32_t))) return launch(ring_all_to_all<uint32_t>, ring, exchange, stream);
  launch(ring_all_to_all<uint8_t>, ring, exchange, stream);
}

void launch_ring_sum(const RingView& ring, const RingSum& sum, cudaStream_t stream) {
  const int64_t in_vector = static_cast<int64_t>(sizeof(uint4)) / (sum.is_f32 ? 4 : 2);
  const bool vectors =
      divide_all(static_cast<int64_t>(sizeof(uint4)), sum.from, sum.to, nullptr, 0) &&
      divide_all(in_vector, nullptr, nullptr, sum.counts, ring.size);
  if (sum.is_f32)
    return launch(vectors ? ring_sum<float, uint4> : ring_sum<float, uint32_t>, ring, sum, stream);
  launch(vectors ? ring_sum<__nv_bfloat16, uint4> : ring_sum<__nv_bfloat16, uint16_t>, ring, sum,
         stream);
}

}  // namespace tessera::cuda
