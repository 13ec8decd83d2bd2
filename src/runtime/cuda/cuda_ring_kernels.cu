#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "ops/cuda/check.h"
#include "runtime/cuda/cuda_ring_flow.cuh"

namespace tessera::cuda {
namespace {

constexpr int kUnroll = 8;

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

/// Whether all lanes may go on.
__device__ __forceinline__ bool agree(bool ok) {
  return __all_sync(kAllLanes, ok) != 0;
}

/// Puts the channel's chunks for all other ranks into their memory, once there is room; to the
/// ranks behind this one in order.
template <typename Word>
__device__ bool send_turn(const Channel& c, const std::byte* from, int64_t turn, int lane) {
  for (int i = 1; i < c.ring.size; ++i) {
    const int to = (c.ring.rank + i) % c.ring.size;
    const Stretch& part = c.plan.send[to];
    if (!c.has(part, turn)) continue;
    const uint64_t chunk = c.chunk_to(to, turn);
    if (!agree(lane != 0 || c.wait_for_room(to, chunk))) return false;
    copy_words<Word>(from + part.offset + c.begin(part, turn), c.slot(to, c.ring.rank, chunk),
                     c.size(part, turn), lane);
    __syncwarp();
    if (lane != 0) continue;
    fence_system();
    c.tell_put(to, chunk);
  }
  return true;
}

/// Takes the channel's chunks of all other ranks out of this one's memory; of those before it in
/// order.
template <typename Word>
__device__ bool receive_turn(const Channel& c, std::byte* to, int64_t turn, int lane) {
  for (int i = 1; i < c.ring.size; ++i) {
    const int from = (c.ring.rank + c.ring.size - i) % c.ring.size;
    const Stretch& part = c.plan.receive[from];
    if (!c.has(part, turn)) continue;
    const uint64_t chunk = c.chunk_from(from, turn);
    if (!agree(lane != 0 || c.wait_for_chunk(from, chunk))) return false;
    copy_words<Word>(c.slot(c.ring.rank, from, chunk), to + part.offset + c.begin(part, turn),
                     c.size(part, turn), lane);
    __syncwarp();
    if (lane == 0) c.tell_taken(from, chunk);
  }
  return true;
}

/// Sends all that goes through the channel; every lane of the warp calls it. Where words are whole
/// vectors TMA moves them.
template <typename Word>
__device__ bool send_all(const Channel& c, Flow& flow, const std::byte* from) {
  const auto lane = static_cast<int>(threadIdx.x % kWarp);
  if constexpr (sizeof(Word) == sizeof(uint4)) {
    return agree(lane != 0 || send_pieces(c, flow, from));
  } else {
    const int64_t turns = c.turns();
    for (int64_t turn = 0; turn < turns; ++turn) {
      if (!send_turn<Word>(c, from, turn, lane)) return false;
    }
    return true;
  }
}

/// As send_all.
template <typename Word>
__device__ bool receive_all(const Channel& c, Flow& flow, std::byte* to) {
  const auto lane = static_cast<int>(threadIdx.x % kWarp);
  if constexpr (sizeof(Word) == sizeof(uint4)) {
    return agree(lane != 0 || receive_pieces(c, flow, to));
  } else {
    const int64_t turns = c.turns();
    for (int64_t turn = 0; turn < turns; ++turn) {
      if (!receive_turn<Word>(c, to, turn, lane)) return false;
    }
    return true;
  }
}

/// Blocks behind those of the ring copy what a rank has for itself.
template <typename Word>
__device__ void copy_own(const std::byte* from, std::byte* to, int64_t num_bytes) {
  constexpr int kStretch = kUnroll * kWarp * static_cast<int>(sizeof(Word));
  constexpr int64_t kWarpsOfBlock = kRingThreads / kWarp;
  const int64_t warp = (blockIdx.x - kRingBlocks) * kWarpsOfBlock + threadIdx.x / kWarp;
  for (int64_t at = warp * kStretch; at < num_bytes; at += kOwnBlocks * kWarpsOfBlock * kStretch)
    copy_words<Word>(from + at, to + at, static_cast<int>(min(num_bytes - at, int64_t{kStretch})),
                     static_cast<int>(threadIdx.x % kWarp));
}

/// Those of the warps that send or receive.
__device__ __forceinline__ void begin_flows(std::byte* shared) {
  if (ring_role() != RingRole::kTell && threadIdx.x % kWarp == 0)
    reinterpret_cast<Flow*>(shared)[threadIdx.x / kWarp].begin();
}

/// A block of the ring: `receive` does what receiving warps do, and is false where the host gave
/// up.
template <typename Word, typename Receive>
__device__ __forceinline__ void run_ring(const RingView& ring, const RingPlan& plan,
                                         std::byte* shared, const std::byte* from,
                                         const Receive& receive) {
  auto* const flows = reinterpret_cast<Flow*>(shared);
  const auto lane = static_cast<int>(threadIdx.x % kWarp);
  const RingRole role = ring_role();
  if (role == RingRole::kTell) {
    if (sizeof(Word) < sizeof(uint4)) return;
    const bool has_channel = lane < kRingWarps;
    const int index = has_channel ? lane : 0;
    tell_chunks(Channel(ring, plan, true, index), flows[index], has_channel);
    return;
  }
  const auto index = static_cast<int>(threadIdx.x / kWarp % kRingWarps);
  const Channel channel(ring, plan, role == RingRole::kSend, index);
  Flow& flow = flows[threadIdx.x / kWarp];
  if (role == RingRole::kSend ? send_all<Word>(channel, flow, from) : receive(channel, flow))
    channel.end(lane);
}

__device__ void plan_all_to_all(const RingView& ring, const RingAllToAll& e, RingPlan& plan) {
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
__global__ void __launch_bounds__(kRingThreads, 1)
    ring_all_to_all(const __grid_constant__ RingView ring,
                    const __grid_constant__ RingAllToAll exchange) {
  __shared__ RingPlan plan;
  extern __shared__ __align__(128) std::byte shared[];
  if (threadIdx.x == 0) plan_all_to_all(ring, exchange, plan);
  begin_flows(shared);
  __syncthreads();
  const auto* const from = static_cast<const std::byte*>(exchange.from);
  auto* const to = static_cast<std::byte*>(exchange.to);
  if (blockIdx.x >= kRingBlocks) {
    const Stretch& own = plan.receive[ring.rank];
    const std::byte* const own_from = from + plan.send[ring.rank].offset;
    if (own_from != to + own.offset) copy_own<Word>(own_from, to + own.offset, own.num_bytes);
    return;
  }
  run_ring<Word>(ring, plan, shared, from, [&](const Channel& channel, Flow& flow) {
    return receive_all<Word>(channel, flow, to);
  });
}

/// Adds up the own values and those in the slots of the other ranks, in the order of the ranks.
template <typename Value, typename Word>
__device__ void add_chunk(const Channel& c, const std::byte* own, std::byte* out, int num_bytes,
                          int64_t turn) {
  const auto lane = static_cast<int>(threadIdx.x % kWarp);
  constexpr int kWidth = static_cast<int>(sizeof(Word) / sizeof(Value));
  constexpr int kTogether = 4;
  const int count = num_bytes / static_cast<int>(sizeof(Word));
  for (int first = lane; first < count; first += kTogether * kWarp) {
    float sums[kTogether][kWidth] = {};
    for (int r = 0; r < c.ring.size; ++r) {
      const auto* const part = reinterpret_cast<const Word*>(
          r == c.ring.rank ? own : c.slot(c.ring.rank, r, c.chunk_from(r, turn)));
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
__device__ bool sum_turn(const Channel& c, const std::byte* own, std::byte* out, int64_t turn) {
  const auto lane = static_cast<int>(threadIdx.x % kWarp);
  const Stretch& part = c.plan.receive[c.ring.rank];
  if (!c.has(part, turn)) return true;
  const bool watches = lane < c.ring.size && lane != c.ring.rank;
  if (!agree(!watches || c.wait_for_chunk(lane, c.chunk_from(lane, turn)))) return false;
  add_chunk<Value, Word>(c, own + c.begin(part, turn), out + c.begin(part, turn),
                         c.size(part, turn), turn);
  __syncwarp();
  if (watches) c.tell_taken(lane, c.chunk_from(lane, turn));
  return true;
}

template <typename Value, typename Word>
__device__ bool sum_all(const Channel& c, const std::byte* own, std::byte* out) {
  const int64_t turns = c.turns();
  for (int64_t turn = 0; turn < turns; ++turn) {
    if (!sum_turn<Value, Word>(c, own, out, turn)) return false;
  }
  return true;
}

template <typename Value, typename Word>
__global__ void __launch_bounds__(kRingThreads, 1)
    ring_sum(const __grid_constant__ RingView ring, const __grid_constant__ RingSum sum) {
  __shared__ RingPlan plan;
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
  begin_flows(shared);
  __syncthreads();
  const auto* const from = static_cast<const std::byte*>(sum.from);
  auto* const to = static_cast<std::byte*>(sum.to);
  const std::byte* const own = from + plan.send[ring.rank].offset;
  run_ring<Word>(ring, plan, shared, from, [&](const Channel& channel, Flow&) {
    return sum_all<Value, Word>(channel, own, to);
  });
}

bool divide_all(int64_t unit, const void* from, const void* to, const int64_t* sizes, int count) {
  const auto fits = [&](int64_t value) { return value % unit == 0; };
  return fits(static_cast<int64_t>(reinterpret_cast<uintptr_t>(from))) &&
         fits(static_cast<int64_t>(reinterpret_cast<uintptr_t>(to))) &&
         std::all_of(sizes, sizes + count, fits);
}

template <typename Exchange>
void launch(void (*kernel)(RingView, Exchange), int num_blocks, const RingView& ring,
            const Exchange& exchange, cudaStream_t stream) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kFlowBytes));
  kernel<<<num_blocks, kRingThreads, kFlowBytes, stream>>>(ring, exchange);
  check(cudaGetLastError());
}

}  // namespace

void launch_ring_all_to_all(const RingView& ring, const RingAllToAll& exchange,
                            cudaStream_t stream) {
  constexpr int kBlocks = kRingBlocks + kOwnBlocks;
  if (exchange.row_bytes == 0) return;
  const auto fits = [&](int64_t unit) {
    return divide_all(unit, exchange.from, exchange.to, &exchange.row_bytes, 1);
  };
  if (fits(sizeof(uint4))) return launch(ring_all_to_all<uint4>, kBlocks, ring, exchange, stream);
  if (fits(sizeof(uint32_t)))
    return launch(ring_all_to_all<uint32_t>, kBlocks, ring, exchange, stream);
  launch(ring_all_to_all<uint8_t>, kBlocks, ring, exchange, stream);
}

void launch_ring_sum(const RingView& ring, const RingSum& sum, cudaStream_t stream) {
  const int64_t in_vector = static_cast<int64_t>(sizeof(uint4)) / (sum.is_f32 ? 4 : 2);
  const bool vectors =
      divide_all(static_cast<int64_t>(sizeof(uint4)), sum.from, sum.to, nullptr, 0) &&
      divide_all(in_vector, nullptr, nullptr, sum.counts, ring.size);
  if (sum.is_f32)
    return launch(vectors ? ring_sum<float, uint4> : ring_sum<float, uint32_t>, kRingBlocks, ring,
                  sum, stream);
  launch(vectors ? ring_sum<__nv_bfloat16, uint4> : ring_sum<__nv_bfloat16, uint16_t>, kRingBlocks,
         ring, sum, stream);
}

}  // namespace tessera::cuda
