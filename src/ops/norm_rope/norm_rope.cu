// A group of lanes holds heads of one token in registers, in each lane the two vectors that turn
// together, and works out the token's angles once.
#include "ops/norm_rope/norm_rope_kernels.h"

#include <algorithm>

#include "ops/cuda/column_sums.h"
#include "ops/rope/rope_device.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = kNormRopeWidth;
constexpr int kHeads = 4;          // of a group for one token
constexpr int kBackwardHeads = 2;  // that are under way at a time
constexpr int kForwardBlocks = 3;  // of a multiprocessor
constexpr int kBackwardBlocks = 2;

/// What a lane holds of a head.
template <typename T>
struct Held {
  Pack<T, kWidth> first;
  Pack<T, kWidth> second;
};
template <typename T>
__device__ __forceinline__ Held<T> load_held(const void* x, int64_t head, const RopePlaces& at) {
  const T* from = static_cast<const T*>(x) + head;
  return {load_pack<kWidth>(from + at.first), load_pack<kWidth>(from + at.second)};
}

/// The same in F32.
struct Values {
  Floats<kWidth> first;
  Floats<kWidth> second;

  template <typename T>
  __device__ explicit Values(const Held<T>& held)
      : first(to_floats(held.first)), second(to_floats(held.second)) {}
  __device__ Values(const float* from, const RopePlaces& at)
      : first(load<kWidth>(from + at.first)), second(load<kWidth>(from + at.second)) {}
  __device__ Values() : first{}, second{} {}

  __device__ __forceinline__ void turn(const SinCos (&turns)[kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float a = first[i];
      const float b = second[i];
      first[i] = a * turns[i].cosine - b * turns[i].sine;
      second[i] = b * turns[i].cosine + a * turns[i].sine;
    }
  }
  template <typename T>
  __device__ __forceinline__ void store_at(T* to, const RopePlaces& at) const {
    store(to + at.first, first);
    store(to + at.second, second);
  }
};

/// Some heads of a token: blockIdx.y says which.
struct Work {
  int64_t first_head;  // counted over all tokens
  int num_heads;       // 0 where there is no such token: its lanes still take part in sums
};
__device__ __forceinline__ Work find_work(int64_t row, int64_t num_rows, int num_heads) {
  const int first = static_cast<int>(blockIdx.y) * kHeads;
  return {row * num_heads + first, row < num_rows ? min(kHeads, num_heads - first) : 0};
}

template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads, kForwardBlocks)
    norm_rope_rows(const __grid_constant__ NormRopeRows p) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const Work work = find_work(row, p.rope.rows.in_use(), p.rope.num_heads);
  const RopePlaces at = rope_places<kWidth, false>(p.rope, lane);
  constexpr float kScale = 1.0F / (2 * kLanes * kWidth);
  Held<T> held[kHeads];
  float sums[kHeads] = {};
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if (j < work.num_heads)
      held[j] = load_held<T>(p.rope.x, (work.first_head + j) * p.rope.head_size, at);
  }
  const Values weight(p.weight, at);
  SinCos turns[kWidth];
  if (work.num_heads > 0 && at.pair >= 0) find_turns(turns, p.rope, row, at.pair);
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if (j >= work.num_heads) continue;
    const Values x(held[j]);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums[j] += x.first[i] * x.first[i] + x.second[i] * x.second[i];
  }
#pragma unroll
  for (int j = 0; j < kHeads; ++j) sums[j] = sum_lanes<kLanes>(sums[j]);
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if (j >= work.num_heads) continue;
    const int64_t head = work.first_head + j;
    const float rstd = rsqrtf(sums[j] * kScale + p.eps);
    if (lane == 0) p.rstd[head] = rstd;
    Values x(held[j]);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      x.first[i] = x.first[i] * rstd * weight.first[i];
      x.second[i] = x.second[i] * rstd * weight.second[i];
    }
    if (at.pair >= 0) x.turn(turns);
    x.store_at(static_cast<T*>(p.rope.y) + head * p.rope.head_size, at);
  }
}

/// Adds the groups' weight gradients in order and writes them to the block's partial sums.
template <int kLanes>
__device__ __forceinline__ void write_weight_grads(const NormRopeBackwardRows& p,
                                                   const Values& own) {
  constexpr int kHeadSize = 2 * kLanes * kWidth;
  __shared__ float shared[kThreads / kLanes][kHeadSize];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  float* to = shared[threadIdx.x / kLanes];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    to[lane * kWidth + i] = own.first[i];
    to[(kLanes + lane) * kWidth + i] = own.second[i];
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < kHeadSize; c += kThreads) {
    float total = 0;
    for (int group = 0; group < kThreads / kLanes; ++group) total += shared[group][c];
    const int vector = c / kWidth;
    const RopePlaces at = rope_places<kWidth, false>(p.rope, vector % kLanes);
    const int column = (vector < kLanes ? at.first : at.second) + c % kWidth;
    p.partials[(blockIdx.y * gridDim.x + blockIdx.x) * kHeadSize + column] = total;
  }
}

/// With g = the gradient turned back: as the norm's backward.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks)
    norm_rope_backward_rows(const __grid_constant__ NormRopeBackwardRows p) {
  constexpr int kBatch = kBackwardHeads;
  constexpr int kGroups = kThreads / kLanes;
  constexpr float kScale = 1.0F / (2 * kLanes * kWidth);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t num_rows = p.rope.rows.in_use();
  const RopePlaces at = rope_places<kWidth, false>(p.rope, lane);
  const Values weight(p.weight, at);
  Values weight_grads;
  for (int64_t start = static_cast<int64_t>(blockIdx.x) * kGroups; start < num_rows;
       start += static_cast<int64_t>(gridDim.x) * kGroups) {
    const int64_t row = start + threadIdx.x / kLanes;
    const Work work = find_work(row, num_rows, p.rope.num_heads);
    SinCos turns[kWidth];
    if (work.num_heads > 0 && at.pair >= 0) find_turns(turns, p.rope, row, at.pair);
#pragma unroll
    for (int first = 0; first < kHeads; first += kBatch) {
      Held<T> held[kBatch];
      Held<T> held_grads[kBatch];
      float rstd[kBatch];
      float dots[kBatch] = {};
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j >= work.num_heads) continue;
        const int64_t head = work.first_head + first + j;
        held[j] = load_held<T>(p.x, head * p.rope.head_size, at);
        held_grads[j] = load_held<T>(p.rope.x, head * p.rope.head_size, at);
        rstd[j] = p.rstd[head];
      }
      Values grads[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j >= work.num_heads) continue;
        const Values x(held[j]);
        grads[j] = Values(held_grads[j]);
        if (at.pair >= 0) grads[j].turn(turns);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float of_first = grads[j].first[i] * (x.first[i] * rstd[j]);
          const float of_second = grads[j].second[i] * (x.second[i] * rstd[j]);
          weight_grads.first[i] += of_first;
          weight_grads.second[i] += of_second;
          dots[j] += of_first * weight.first[i] + of_second * weight.second[i];
        }
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) dots[j] = sum_lanes<kLanes>(dots[j]);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j >= work.num_heads) continue;
        const float mean = dots[j] * kScale;
        const Values x(held[j]);
        Values g = grads[j];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          g.first[i] = rstd[j] * (g.first[i] * weight.first[i] - x.first[i] * rstd[j] * mean);
          g.second[i] = rstd[j] * (g.second[i] * weight.second[i] - x.second[i] * rstd[j] * mean);
        }
        const int64_t head = work.first_head + first + j;
        g.store_at(static_cast<T*>(p.rope.y) + head * p.rope.head_size, at);
      }
    }
  }
  if (p.grad_weight != nullptr) write_weight_grads<kLanes>(p, weight_grads);
}

/// Calls run.operator()<T, kLanes>() for the heads of a call.
template <typename Run>
void with_heads(const RopeRows& rope, Run run) {
  const int lanes = norm_rope_lanes(rope.head_size, rope.offset, rope.num_pairs, rope.interleaved);
  if (lanes == 0) check(cudaErrorInvalidValue);
  with_vectors(rope.dtype, true, [&]<typename T, int /*kWidth*/>() {
    if (lanes == 4) run.template operator()<T, 4>();
    if (lanes == 8) run.template operator()<T, 8>();
    if (lanes == 16) run.template operator()<T, 16>();
    if (lanes == 32) run.template operator()<T, 32>();
  });
  check(cudaGetLastError());
}

}  // namespace

void launch_norm_rope(const NormRopeRows& call, cudaStream_t stream) {
  if (call.rope.rows.bound == 0) return;
  if (!are_aligned(call.rope.x, call.rope.y, call.weight)) check(cudaErrorMisalignedAddress);
  const auto parts = static_cast<unsigned>(divide_up(call.rope.num_heads, kHeads));
  with_heads(call.rope, [&]<typename T, int kLanes>() {
    const auto blocks = static_cast<unsigned>(divide_up(call.rope.rows.bound, kThreads / kLanes));
    norm_rope_rows<T, kLanes><<<dim3(blocks, parts), kThreads, 0, stream>>>(call);
  });
}

void launch_norm_rope_backward(const NormRopeBackwardRows& call, cudaStream_t stream) {
  if (call.rope.rows.bound == 0) return;
  if (!are_aligned(call.rope.x, call.rope.y, call.x, call.weight))
    check(cudaErrorMisalignedAddress);
  const int64_t parts = divide_up(call.rope.num_heads, kHeads);
  const int64_t resident = std::min(kBackwardBlocks * call.num_sms, kMaxColumnPartials);
  if (parts > kMaxColumnPartials) check(cudaErrorInvalidValue);
  int64_t blocks = 0;
  with_heads(call.rope, [&]<typename T, int kLanes>() {
    const int64_t wanted = divide_up(call.rope.rows.bound, kThreads / kLanes);
    blocks = std::min(wanted, std::max<int64_t>(resident / parts, 1));
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(parts));
    norm_rope_backward_rows<T, kLanes><<<grid, kThreads, 0, stream>>>(call);
  });
  if (call.grad_weight != nullptr)
    launch_add_partials(call.grad_weight, call.partials, static_cast<int>(blocks * parts),
                        call.rope.head_size, stream);
}

}  // namespace tessera::cuda
