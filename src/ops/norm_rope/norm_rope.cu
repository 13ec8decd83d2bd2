// A group of lanes holds heads of one token in registers, in each lane the two vectors that turn
// together. Where a token has many heads, a block works its angles out once, in shared memory.
#include "ops/norm_rope/norm_rope_kernels.h"

#include <algorithm>

#include "ops/cuda/column_sums.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/ptx/async_copy.cuh"
#include "ops/cuda/short_kernel.cuh"
#include "ops/rope/rope_device.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = kNormRopeWidth;
constexpr int kBlocks = 4;        // of an SM
constexpr int kForwardHeads = 4;  // of an item, all under way at once
constexpr int kStages = 3;        // heads that a group's ring has room for
constexpr int kTableItems = 4;    // of a token, from which on a table of its angles pays

/// Of an item of the backward pass: more where its lanes work their angles out themselves.
template <bool kTable>
constexpr int kBackwardHeads = kTable ? 2 : 4;

/// An item is some of a token's heads. The groups of a block take consecutive items.
struct Items {
  Divider of_token;
  Divider pairs;   // of a head
  int max_tokens;  // whose items a block takes together

  Items(const RopeRows& rope, int item_heads, int groups)
      : of_token(static_cast<uint32_t>(divide_up(rope.num_heads, item_heads))),
        pairs(static_cast<uint32_t>(std::max(rope.num_pairs, 1))),
        max_tokens((groups - 1) / static_cast<int>(divide_up(rope.num_heads, item_heads)) + 2) {}
  /// Of a table of the tokens' angles.
  int64_t table_bytes(const RopeRows& rope) const {
    return int64_t{max_tokens} * rope.num_pairs * static_cast<int64_t>(sizeof(SinCos));
  }
};

/// The angles of the tokens that a block's items belong to, in shared memory: a lane's are read in
/// words of 16 bytes, which neighbouring lanes' follow.
struct Table {
  SinCos* turns;
  uint32_t first_token;
  int lanes;  // that turn vectors

  __device__ Table(SinCos* memory, const RopeRows& p, const Items& items, uint32_t first_item)
      : turns(memory),
        first_token(items.of_token.quotient(first_item)),
        lanes(p.num_pairs / kWidth) {}

  /// Fills in the angles of the tokens up to that of `last_item`.
  __device__ __forceinline__ void fill(const RopeRows& p, const Items& items, int64_t num_rows,
                                       uint32_t last_item) const {
    const uint32_t tokens = items.of_token.quotient(last_item) - first_token + 1;
    const uint32_t count = tokens * static_cast<uint32_t>(p.num_pairs);
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const uint32_t token = items.pairs.quotient(i);
      const int pair = static_cast<int>(i - token * items.pairs.divisor());
      if (first_token + token < num_rows)
        turns[token * p.num_pairs + place(pair)] = find_turn(p, first_token + token, pair);
    }
  }
  __device__ __forceinline__ void read(SinCos (&to)[kWidth], const RopeRows& p, uint32_t token,
                                       int pair) const {
    const SinCos* of_token = turns + (token - first_token) * p.num_pairs;
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const float4 two = *reinterpret_cast<const float4*>(of_token + place(pair + i));
      to[i] = {two.x, two.y};
      to[i + 1] = {two.z, two.w};
    }
  }

 private:
  __device__ __forceinline__ int place(int pair) const {
    const int within = pair % kWidth;
    return (within / 2 * lanes + pair / kWidth) * 2 + within % 2;
  }
};

/// What a lane holds of a head.
template <typename T>
struct Held {
  Pack<T, kWidth> first;
  Pack<T, kWidth> second;
};
template <typename T>
__device__ __forceinline__ Held<T> load_held(const T* head, const RopePlaces& at) {
  return {load_pack_once<kWidth>(head + at.first), load_pack_once<kWidth>(head + at.second)};
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

/// The heads of an item.
struct Work {
  uint32_t token;
  int64_t first_head;  // counted over all tokens
  int num_heads;       // 0 where there is no such token: its lanes still take part in sums
};
template <int kHeads>
__device__ __forceinline__ Work find_work(uint32_t item, const Items& items, int64_t num_rows,
                                          int num_heads) {
  const uint32_t token = items.of_token.quotient(item);
  const int first = static_cast<int>(item - token * items.of_token.divisor()) * kHeads;
  return {token, static_cast<int64_t>(token) * num_heads + first,
          token < num_rows ? min(kHeads, num_heads - first) : 0};
}

/// A lane's angles: of elements that do not turn 0. With a table all threads must call.
template <bool kTable>
__device__ __forceinline__ void find_own_turns(SinCos (&turns)[kWidth], const RopeRows& p,
                                               const Items& items, SinCos* memory,
                                               uint32_t first_item, uint32_t last_item,
                                               const Work& work, int pair) {
  const int64_t num_rows = p.rows.in_use();
#pragma unroll
  for (SinCos& turn : turns) turn = {0.0F, 1.0F};
  const bool turned = work.num_heads > 0 && pair >= 0;
  if constexpr (kTable) {
    const Table table(memory, p, items, first_item);
    table.fill(p, items, num_rows, last_item);
    __syncthreads();
    if (turned) table.read(turns, p, work.token, pair);
  } else {
    if (turned) find_turns(turns, p, work.token, pair);
  }
}

template <typename T, int kLanes, bool kTable>
__global__ void __launch_bounds__(kThreads, kBlocks)
    norm_rope_rows(const __grid_constant__ NormRopeRows p, const __grid_constant__ Items items) {
  wait_for_earlier();
  let_next_begin_if_short();
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int kHeads = kForwardHeads;
  constexpr int kGroups = kThreads / kLanes;
  constexpr int kHeadSize = 2 * kLanes * kWidth;
  constexpr float kScale = 1.0F / kHeadSize;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const uint32_t first_item = blockIdx.x * kGroups;
  const Work work = find_work<kHeads>(first_item + threadIdx.x / kLanes, items,
                                      p.rope.rows.in_use(), p.rope.num_heads);
  const RopePlaces at = rope_places<kWidth, false>(p.rope, lane);
  const T* x = static_cast<const T*>(p.rope.x) + work.first_head * kHeadSize;
  Held<T> held[kHeads];
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if (j < work.num_heads) held[j] = load_held(x + j * kHeadSize, at);
  }
  const Values weight(p.weight, at);
  SinCos turns[kWidth];
  find_own_turns<kTable>(turns, p.rope, items, reinterpret_cast<SinCos*>(memory), first_item,
                         first_item + kGroups - 1, work, at.pair);
  // The weight and the turn at once.
  Values cosine = weight;
  Values sine = weight;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    cosine.first[i] *= turns[i].cosine;
    cosine.second[i] *= turns[i].cosine;
    sine.first[i] *= turns[i].sine;
    sine.second[i] *= turns[i].sine;
  }
  T* y = static_cast<T*>(p.rope.y) + work.first_head * kHeadSize;
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    const Values v(held[j]);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += v.first[i] * v.first[i] + v.second[i] * v.second[i];
    sum = sum_lanes<kLanes>(sum);
    if (j >= work.num_heads) continue;
    const float rstd = rsqrtf(sum * kScale + p.eps);
    if (lane == 0) p.rstd[work.first_head + j] = rstd;
    Values turned;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      turned.first[i] = (v.first[i] * cosine.first[i] - v.second[i] * sine.second[i]) * rstd;
      turned.second[i] = (v.second[i] * cosine.second[i] + v.first[i] * sine.first[i]) * rstd;
    }
    turned.store_at(y + j * kHeadSize, at);
  }
}

/// Adds the groups' weight gradients in order and writes them to the block's partial sums; `memory`
/// is shared and has room for kWidth · 2 floats of every thread.
template <int kLanes>
__device__ __forceinline__ void write_weight_grads(const NormRopeBackwardRows& p, const Values& own,
                                                   void* memory) {
  constexpr int kHeadSize = 2 * kLanes * kWidth;
  auto* shared = reinterpret_cast<float(*)[kHeadSize]>(memory);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  float* to = shared[threadIdx.x / kLanes];
  __syncthreads();
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
    p.partials[blockIdx.x * kHeadSize + column] = total;
  }
}

/// Heads on their way to a thread: a ring of kStages in shared memory, of each x and the gradient.
template <typename T>
class Ring {
 public:
  using Vector = Pack<T, kWidth>;
  static constexpr int kBytes = kStages * 4 * kThreads * static_cast<int>(sizeof(Vector));

  __device__ explicit Ring(void* memory) : own_(static_cast<Vector*>(memory) + threadIdx.x) {}
  __device__ __forceinline__ void fetch(bool there, const T* x, const T* grad,
                                        const RopePlaces& at) {
    Vector* to = own_ + next_ * 4 * kThreads;
    if (there) {
      copy(to, x + at.first);
      copy(to + kThreads, x + at.second);
      copy(to + 2 * kThreads, grad + at.first);
      copy(to + 3 * kThreads, grad + at.second);
    }
    commit_copies();
    next_ = next_ + 1 == kStages ? 0 : next_ + 1;
  }
  /// The head fetched kStages - 1 before the last one.
  __device__ __forceinline__ void take(Held<T>& x, Held<T>& grad) {
    wait_copies<kStages - 1>();
    const Vector* from = own_ + oldest_ * 4 * kThreads;
    x = {from[0], from[kThreads]};
    grad = {from[2 * kThreads], from[3 * kThreads]};
    oldest_ = oldest_ + 1 == kStages ? 0 : oldest_ + 1;
  }

 private:
  static __device__ __forceinline__ void copy(Vector* to, const T* from) {
    copy_async(to, reinterpret_cast<const Vector*>(from));
  }

  Vector* own_;
  int next_ = 0;
  int oldest_ = 0;
};

/// Normalises a lane's part of x, adds its part of the weight's gradient, multiplies the weight
/// into g, and returns the sum of g · x.
__device__ __forceinline__ float weigh(Values& x, Values& g, float rstd, const Values& weight,
                                       Values& weight_grads) {
  float dot = 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    x.first[i] *= rstd;
    x.second[i] *= rstd;
    weight_grads.first[i] += g.first[i] * x.first[i];
    weight_grads.second[i] += g.second[i] * x.second[i];
    g.first[i] *= weight.first[i];
    g.second[i] *= weight.second[i];
    dot += g.first[i] * x.first[i] + g.second[i] * x.second[i];
  }
  return dot;
}

/// With g = the gradient turned back: as the norm's backward. Blocks take items in turn; a head is
/// fetched kStages - 1 heads ahead, the next item's first ones too.
template <typename T, int kLanes, bool kTable>
__global__ void __launch_bounds__(kThreads, kBlocks)
    norm_rope_backward_rows(const __grid_constant__ NormRopeBackwardRows p,
                            const __grid_constant__ Items items) {
  wait_for_earlier();
  constexpr int kAhead = kStages - 1;
  constexpr int kHeads = kBackwardHeads<kTable>;
  static_assert(kHeads % kAhead == 0);
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int kGroups = kThreads / kLanes;
  constexpr int kHeadSize = 2 * kLanes * kWidth;
  constexpr float kScale = 1.0F / kHeadSize;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t num_rows = p.rope.rows.in_use();
  const RopePlaces at = rope_places<kWidth, false>(p.rope, lane);
  const Values weight(p.weight, at);
  Values weight_grads;
  Ring<T> ring(memory);
  float rstds[kAhead];  // of the heads under way
  const auto fetch = [&](const Work& work, int j) {
    const bool there = j < work.num_heads;
    const int64_t head = work.first_head + j;
    ring.fetch(there, static_cast<const T*>(p.x) + head * kHeadSize,
               static_cast<const T*>(p.rope.x) + head * kHeadSize, at);
    rstds[j % kAhead] = there ? p.rstd[head] : 0.0F;
  };
  const auto num_items = static_cast<uint32_t>(num_rows) * items.of_token.divisor();
  const uint32_t step = gridDim.x * kGroups;
  uint32_t first_item = blockIdx.x * kGroups;
  Work work =
      find_work<kHeads>(first_item + threadIdx.x / kLanes, items, num_rows, p.rope.num_heads);
#pragma unroll
  for (int j = 0; j < kAhead; ++j) fetch(work, j);
  let_next_begin();
  // Two tables, so that one barrier is enough.
  auto* table = reinterpret_cast<SinCos*>(memory + Ring<T>::kBytes);
  auto* other_table = table + items.max_tokens * p.rope.num_pairs;
  for (; first_item < num_items; first_item += step) {
    const Work next = find_work<kHeads>(first_item + step + threadIdx.x / kLanes, items, num_rows,
                                        p.rope.num_heads);
    SinCos turns[kWidth];
    find_own_turns<kTable>(turns, p.rope, items, table, first_item, first_item + kGroups - 1, work,
                           at.pair);
    SinCos* const used = table;
    table = other_table;
    other_table = used;
    T* y = static_cast<T*>(p.rope.y) + work.first_head * kHeadSize;
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      const float rstd = rstds[j % kAhead];
      j + kAhead < kHeads ? fetch(work, j + kAhead) : fetch(next, j + kAhead - kHeads);
      Held<T> held, held_grad;
      ring.take(held, held_grad);
      const bool there = j < work.num_heads;
      Values x(held);
      Values g(held_grad);
      float dot = 0;
      if (there) {
        g.turn(turns);
        dot = weigh(x, g, rstd, weight, weight_grads);
      }
      const float mean = sum_lanes<kLanes>(dot) * kScale;
      if (!there) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        g.first[i] = rstd * (g.first[i] - x.first[i] * mean);
        g.second[i] = rstd * (g.second[i] - x.second[i] * mean);
      }
      g.store_at(y + j * kHeadSize, at);
    }
    work = next;
  }
  wait_copies<0>();
  if (p.grad_weight.sums != nullptr) write_weight_grads<kLanes>(p, weight_grads, memory);
}

/// Calls run.operator()<T, kLanes, kTable>() for the heads of a call.
template <typename Run>
void with_heads(const RopeRows& rope, int item_heads, Run run) {
  const int lanes = norm_rope_lanes(rope.head_size, rope.offset, rope.num_pairs, rope.interleaved);
  if (lanes == 0) check(cudaErrorInvalidValue);
  const bool table = divide_up(rope.num_heads, item_heads) >= kTableItems;
  const auto with_lanes = [&]<typename T, int kLanes>() {
    table ? run.template operator()<T, kLanes, true>()
          : run.template operator()<T, kLanes, false>();
  };
  with_vectors(rope.dtype, true, [&]<typename T, int /*kWidth*/>() {
    if (lanes == 4) with_lanes.template operator()<T, 4>();
    if (lanes == 8) with_lanes.template operator()<T, 8>();
    if (lanes == 16) with_lanes.template operator()<T, 16>();
    if (lanes == 32) with_lanes.template operator()<T, 32>();
  });
}

/// Blocks for all items of a call.
int64_t count_blocks(const RopeRows& rope, int item_heads, int groups) {
  const int64_t num_items = rope.rows.bound * divide_up(rope.num_heads, item_heads);
  if (num_items >= int64_t{1} << 30) check(cudaErrorInvalidValue);  // which 32 bits count
  return divide_up(num_items, groups);
}

}  // namespace

void launch_norm_rope(const NormRopeRows& call, cudaStream_t stream) {
  if (call.rope.rows.bound == 0) return;
  if (!are_aligned(call.rope.x, call.rope.y, call.weight)) check(cudaErrorMisalignedAddress);
  with_heads(call.rope, kForwardHeads, [&]<typename T, int kLanes, bool kTable>() {
    constexpr int kGroups = kThreads / kLanes;
    const Items items(call.rope, kForwardHeads, kGroups);
    const auto blocks = static_cast<unsigned>(count_blocks(call.rope, kForwardHeads, kGroups));
    const size_t shared_bytes = kTable ? items.table_bytes(call.rope) : 0;
    launch_early(norm_rope_rows<T, kLanes, kTable>, {blocks, kThreads, shared_bytes}, stream, call,
                 items);
  });
}

void launch_norm_rope_backward(const NormRopeBackwardRows& call, cudaStream_t stream) {
  if (call.rope.rows.bound == 0) return;
  if (!are_aligned(call.rope.x, call.rope.y, call.x, call.weight))
    check(cudaErrorMisalignedAddress);
  int64_t blocks = 0;
  with_heads(call.rope, kBackwardHeads<true>, [&]<typename T, int kLanes, bool kTable>() {
    constexpr int kGroups = kThreads / kLanes;
    constexpr int kHeads = kBackwardHeads<kTable>;
    const Items items(call.rope, kHeads, kGroups);
    const int64_t resident = std::min(kBlocks * call.num_sms, kMaxColumnPartials);
    blocks = std::min(count_blocks(call.rope, kHeads, kGroups), resident);
    const int64_t tables = kTable ? 2 * items.table_bytes(call.rope) : 0;
    const int64_t shared_bytes = Ring<T>::kBytes + tables;
    const auto kernel = norm_rope_backward_rows<T, kLanes, kTable>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)));
    const LaunchShape shape = {static_cast<unsigned>(blocks), kThreads,
                               static_cast<size_t>(shared_bytes)};
    launch_early(kernel, shape, stream, call, items);
  });
  if (call.grad_weight.sums != nullptr)
    launch_add_partials(call.grad_weight, call.partials, static_cast<int>(blocks),
                        call.rope.head_size, stream);
}

}  // namespace tessera::cuda
