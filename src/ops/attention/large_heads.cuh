#pragma once

// What the kernels for large heads share: thread blocks of one warpgroup that copies rows and two
// that multiply, whose accumulators have the same 64 rows. They go over columns 32 at a time. A sum
// of 512 elements is each warpgroup's by half; what both need of a pair they swap in shared memory.
#include "ops/attention/attention_tensor.cuh"
#include "ops/attention/large_heads.h"
#include "ops/cuda/ptx/async_copy.cuh"

namespace tessera::cuda::large_heads {

using attention::clear_values;
using attention::Item;
using attention::kConsumerThreads;
using attention::Operand;
using attention::own_column;
using attention::own_group;
using attention::own_row;
using attention::store_row;
using attention::Value;

constexpr int kColumns = 32;
constexpr int kPairs = kRows * kColumns / kWarpgroup;  // of a thread
constexpr int kSum = kMostSizeV / 2;                   // a warpgroup's elements of a sum
constexpr int kSumTiles = kSum / 64;
constexpr int kTail = kMostSize - kMostSizeV;
constexpr int kSwapBarrier = 1;
constexpr int kFeedWarps = kWarpgroup / 32;

/// Rows of keys and values; the values may be the keys.
template <int kRowsOf, int kDepth, bool kShared>
struct KeyValueRows;
template <int kRowsOf, int kDepth>
struct KeyValueRows<kRowsOf, kDepth, false> {
  Operand<kRowsOf, kDepth> k;
  Operand<kRowsOf, kMostSizeV> values;
  __device__ __forceinline__ const Operand<kRowsOf, kMostSizeV>& v() const { return values; }
};
template <int kRowsOf>
struct KeyValueRows<kRowsOf, kMostSharedSize, true> {
  Operand<kRowsOf, kMostSharedSize> k;
  __device__ __forceinline__ const Operand<kRowsOf, kMostSharedSize>& v() const { return k; }
};

/// Starts to copy eight heads' rows of `size` elements to an operand's rows from `first` on, a
/// multiple of eight, by one warp. What is behind their elements becomes zero, and so does a row
/// whose place among the heads of all rows, place_of(i), is negative.
template <int kRowsOf, int kDepth, typename PlaceOf>
__device__ __forceinline__ void copy_eight(Operand<kRowsOf, kDepth>& to, int first,
                                           const void* from, int size, const PlaceOf& place_of) {
  constexpr int kTileBytes = Operand<kRowsOf, kDepth>::kTileBytes;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const char* const source = static_cast<const char*>(from) + lane * 16;
  const uint32_t at =
      shared_address(to.tiles[0]) + first * 128 + lane / 8 * kTileBytes + lane % 8 * 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int place = place_of(i);
    const char* const row = source + int64_t{max(place, 0)} * (2 * size);
#pragma unroll
    for (int chunk = 0; chunk < kDepth / 8; chunk += 32) {
      if (kDepth / 8 - chunk < 32 && lane >= kDepth / 8 - chunk) break;
      const bool is_there = place >= 0 && (chunk + lane) * 8 < size;
      copy_16_bytes((at ^ i * 16) + i * 128 + chunk / 8 * kTileBytes,
                    is_there ? row + chunk * 16 : static_cast<const char*>(from), is_there);
    }
  }
}

/// Copies keys, and values that are not the keys; lane i of each warp has the place of row i of 32.
template <int kRowsOf, int kDepth, bool kShared>
__device__ __forceinline__ void copy_keys(KeyValueRows<kRowsOf, kDepth, kShared>& to,
                                          const Params& params, int own_place) {
  static_assert(kColumns == 8 * kFeedWarps);
  const int first = static_cast<int>(threadIdx.x) / 32 * 8;
  const auto place = [&](int i) { return __shfl_sync(~0U, own_place, first + i); };
  copy_eight(to.k, first, params.k, params.heads.head_size, place);
  if constexpr (!kShared) copy_eight(to.values, first, params.v, params.heads.head_size_v, place);
}

/// What a descriptor of rows along the reduction grows by until its step of 16 elements.
template <int kRowsOf>
__device__ __forceinline__ constexpr uint64_t offset_of_step(int step) {
  return (step / 4 * (kRowsOf * 128) >> 4) + step % 4 * 2;
}

template <int kRowsOf, int kDepth>
__device__ __forceinline__ uint64_t describe_rows(const Operand<kRowsOf, kDepth>& rows) {
  return describe_tile<TileMajor::kReduction>(rows.tiles[0], 0);
}

__device__ __forceinline__ void add_step(float (&d)[kPairs], uint64_t a, uint64_t b) {
  constexpr TileMajor kMajor = TileMajor::kReduction;
  WarpgroupProduct<kColumns, kMajor, kMajor>::run(d, a, b, true);
}

/// d [64, 32] += this warpgroup's half, by elements, of rows · columns. Asynchronous.
template <int kDepth>
__device__ __forceinline__ void start_half(float (&d)[kPairs], const Operand<kRows, kDepth>& rows,
                                           const Operand<kColumns, kDepth>& columns) {
  constexpr int kSteps = kDepth / 32;
  const uint64_t a = describe_rows(rows);
  const uint64_t b = describe_rows(columns);
  const bool is_first = own_group() == 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    add_step(d, a + offset_of_step<kRows>(is_first ? step : kSteps + step),
             b + offset_of_step<kColumns>(is_first ? step : kSteps + step));
}

/// d += rows · columns of the first 512 elements, given their descriptors. Asynchronous.
__device__ __forceinline__ void start_main(float (&d)[kPairs], uint64_t rows, uint64_t columns) {
#pragma unroll
  for (int step = 0; step < kMostSizeV / 16; ++step)
    add_step(d, rows + offset_of_step<kRows>(step), columns + offset_of_step<kColumns>(step));
}
/// The same of those behind them.
__device__ __forceinline__ void start_tail(float (&d)[kPairs], uint64_t rows, uint64_t columns) {
#pragma unroll
  for (int step = kMostSizeV / 16; step < kMostSize / 16; ++step)
    add_step(d, rows + offset_of_step<kRows>(step), columns + offset_of_step<kColumns>(step));
}

/// d = rows · columns of the first 512 elements, given their descriptors; those behind them are
/// added in the first warpgroup alone, from `tail_rows` and `tail_columns`.
template <int kDepth>
__device__ __forceinline__ void multiply(float (&d)[kPairs], uint64_t rows, uint64_t columns,
                                         uint64_t tail_rows, uint64_t tail_columns) {
  float tail[kPairs];
  clear_values(d);
  if constexpr (kDepth > kMostSizeV) clear_values(tail);
  begin_products();
  start_main(d, rows, columns);
  if constexpr (kDepth > kMostSizeV) start_tail(tail, tail_rows, tail_columns);
  commit_products();
  wait_products<0>();
  fence_values(d);
  if constexpr (kDepth > kMostSizeV) {
    fence_values(tail);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) d[i] += own_group() == 0 ? tail[i] : 0;
  }
}

using Factors = uint32_t[kColumns / 16][4];

/// sum [64, kCount] += factors · the columns' elements from tile first_tile on. Asynchronous.
template <int kCount, int kDepth>
__device__ __forceinline__ void start_sum(float (&sum)[kCount / 2], const Factors& factors,
                                          const Operand<kColumns, kDepth>& columns,
                                          int first_tile) {
  constexpr TileMajor kMajor = TileMajor::kOther;
  uint64_t part =
      describe_tile<kMajor>(columns.tiles[first_tile], Operand<kColumns, kDepth>::kTileBytes);
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
    RegisterProduct<kCount, kMajor>::run(sum, factors[k], part, true);
    part += kNextReduction<kMajor>;
  }
}

/// A warpgroup's elements of a sum: half of the first 512, and all behind those, which both have.
template <int kDepth>
struct Sum {
  float main[kSum / 2];
  float tail[kDepth > kMostSizeV ? kTail / 2 : 1];

  __device__ __forceinline__ void clear() {
    clear_values(main);
    clear_values(tail);
  }
  __device__ __forceinline__ void start(const Factors& factors,
                                        const Operand<kColumns, kDepth>& columns) {
    start_sum<kSum>(main, factors, columns, own_group() * kSumTiles);
    if constexpr (kDepth > kMostSizeV) start_sum<kTail>(tail, factors, columns, kMostSizeV / 64);
  }
  __device__ __forceinline__ void fence() {
    fence_values(main);
    fence_values(tail);
  }
  /// Writes this warpgroup's part of row `half` of this thread, of `size` elements.
  template <typename T>
  __device__ __forceinline__ void store(T* to, int half, float factor, int size) const {
    const int first = own_group() * kSum;
    store_row<kSum>(to + first, main, half, factor, size - first);
    if constexpr (kDepth > kMostSizeV) {
      if (own_group() == 1)
        store_row<kTail>(to + kMostSizeV, tail, half, factor, size - kMostSizeV);
    }
  }
};

/// Where the two warpgroups leave pairs to each other.
struct Swap {
  float4 pairs[2][kPairs / 4][kWarpgroup];

  /// `other` becomes what the other warpgroup has of the same pairs.
  __device__ __forceinline__ void run(const float (&own)[kPairs], float (&other)[kPairs]) {
    const int group = own_group();
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    sync_threads(kSwapBarrier, kConsumerThreads);  // those of before have been read
#pragma unroll
    for (int i = 0; i < kPairs / 4; ++i)
      pairs[group][i][thread] =
          make_float4(own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]);
    sync_threads(kSwapBarrier, kConsumerThreads);
#pragma unroll
    for (int i = 0; i < kPairs / 4; ++i) {
      const float4 four = pairs[1 - group][i][thread];
      other[4 * i] = four.x;
      other[4 * i + 1] = four.y;
      other[4 * i + 2] = four.z;
      other[4 * i + 3] = four.w;
    }
  }
};

/// 64 queries of one key-value head, and what they see: of a token's heads where rows were chosen,
/// else of a sequence's tokens.
struct Unit {
  int token;  ///< of the first query
  int head;   ///< of the first query
  int kv_head;
  int begin;  ///< queries before it, and from `end` on, are not there
  int end;
  int first_tile;  ///< of 32 columns
  int num_tiles;   ///< -1: there are no more units
  int num_keys;    ///< columns from here on are not there
  int key_row;     ///< of column 0, where none were chosen
  int last;        ///< the last column that the first query sees
  int step;        ///< by how many columns each further query sees more

  /// The place of a query among all heads of all tokens.
  __device__ __forceinline__ int place(const attention::Heads& heads, int row) const {
    return token * heads.num_heads + head + row * (step == 0 ? 1 : heads.num_heads);
  }
  __device__ __forceinline__ int64_t place_of_sums(const attention::Heads& heads, int row) const {
    return head * heads.num_rows + token + row * (step == 0 ? heads.num_rows : 1);
  }
  __device__ __forceinline__ bool has(int row) const { return row >= begin && row < end; }

  /// Whether some of the queries do not see all of the columns from `column` on.
  __device__ __forceinline__ bool is_masked(int column, int window) const {
    return column + kColumns - 1 > last ||
           (window > 0 && last + (kRows - 1) * step - column >= window);
  }
  /// Makes pairs that are not visible `hidden`.
  __device__ __forceinline__ void mask(float (&pairs)[kPairs], int first_column, int window,
                                       float hidden) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int row_last = last + (own_row() + i / 2 % 2 * 8) * step;
      const int column = first_column + i / 4 * 8 + own_column() + i % 2;
      if (column > row_last || (window > 0 && row_last - column >= window)) pairs[i] = hidden;
    }
  }
};

/// How many of a token's rows stand before the first -1, by a warp.
__device__ inline int count_chosen(const int32_t* chosen, int top_k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int begin = 0;
  int end = top_k;
  while (begin < end) {
    const int step = (end - begin + 31) / 32;
    const int at = begin + lane * step;
    const int there = __popc(__ballot_sync(~0U, at < end && chosen[at] >= 0));
    if (there == 0) return begin;
    const int last = begin + (there - 1) * step;
    begin = last + 1;
    end = min(end, last + step);
  }
  return begin;
}

/// Units of so many queries of each token or, without a choice, of blocks of tokens.
struct Units {
  const Params& params;
  int group;  ///< query heads of a key-value head
  int parts;  ///< units of a group
  int count;

  __device__ explicit Units(const Params& of)
      : params(of),
        group(of.heads.num_heads / of.heads.num_kv_heads),
        parts((group + kRows - 1) / kRows),
        count(of.chosen == nullptr
                  ? *of.num_items * of.heads.num_heads
                  : static_cast<int>(of.heads.num_rows) * of.heads.num_kv_heads * parts) {}

  /// By a warp.
  __device__ Unit at(int idx) const { return params.chosen == nullptr ? block(idx) : token(idx); }

  /// The row of keys that stands in a column, or -1.
  __device__ int key_row(const Unit& unit, int column) const {
    if (column >= unit.num_keys) return -1;
    if (params.chosen == nullptr) return unit.key_row + column;
    return params.chosen[int64_t{unit.token} * params.top_k + column];
  }
  /// Its place among the heads of all rows of keys, or -1.
  __device__ int key_place(const Unit& unit, int column) const {
    const int row = key_row(unit, column);
    return row < 0 ? -1 : row * params.heads.num_kv_heads + unit.kv_head;
  }

 private:
  __device__ Unit block(int idx) const {
    const Item item = params.items[idx / params.heads.num_heads];
    const int head = idx % params.heads.num_heads;
    const int window = params.heads.window;
    const int end = min(item.first + kRows, item.length);
    const int first_tile = (window == 0 ? 0 : max(0, item.first - window + 1)) / kColumns;
    return {.token = item.query_row + item.first,
            .head = head,
            .kv_head = head / group,
            .begin = max(item.begin - item.first, 0),
            .end = end - item.first,
            .first_tile = first_tile,
            .num_tiles = (end + kColumns - 1) / kColumns - first_tile,
            .num_keys = item.length,
            .key_row = item.key_row,
            .last = item.first,
            .step = 1};
  }
  __device__ Unit token(int idx) const {
    const int at = idx / (params.heads.num_kv_heads * parts);
    const int kv_head = idx / parts % params.heads.num_kv_heads;
    const int first = idx % parts * kRows;
    const int count = count_chosen(params.chosen + int64_t{at} * params.top_k, params.top_k);
    return {.token = at,
            .head = kv_head * group + first,
            .kv_head = kv_head,
            .begin = 0,
            .end = min(kRows, group - first),
            .first_tile = 0,
            .num_tiles = (count + kColumns - 1) / kColumns,
            .num_keys = count,
            .key_row = 0,
            .last = count - 1,
            .step = 0};
  }
};

/// What the warpgroup that feeds does for kernels whose blocks take units one by one: hands each on
/// with its queries, and copies what it sees tile by tile. Each warp takes a quarter of the rows.
template <typename Shared>
struct UnitProducer {
  Shared& shared;
  const Params& params;
  RingCursor<Shared::kStages> cursor = {};

  __device__ void run() {
    const Units units(params);
    uint32_t parity = 0;
    for (int idx = static_cast<int>(blockIdx.x); idx < units.count;
         idx += static_cast<int>(gridDim.x)) {
      const Unit unit = units.at(idx);
      hand_on(unit, parity);
      feed(units, unit);
      parity ^= 1;
    }
    hand_on({.num_tiles = -1}, parity);
    wait_copies<0>();
  }

 private:
  /// When the queries of the unit before have been used.
  __device__ void hand_on(const Unit& unit, uint32_t parity) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    shared.rows_empty.wait(parity ^ 1);
    for (int first = warp * 8; first < kRows && unit.num_tiles > 0; first += 8 * kFeedWarps) {
      shared.copy_queries(params, first, [&](int i) {
        return unit.has(first + i) ? unit.place(params.heads, first + i) : -1;
      });
    }
    if (threadIdx.x == 0) shared.unit = unit;
    arrive_when_copied(&shared.rows_full);
    shared.rows_full.arrive();
  }

  __device__ void feed(const Units& units, const Unit& unit) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int next = units.key_place(unit, unit.first_tile * kColumns + lane);
    for (int t = 0; t < unit.num_tiles; ++t) {
      const int place = next;  // the next is under way while the stage's last users end
      next = units.key_place(unit, (unit.first_tile + t + 1) * kColumns + lane);
      const int s = cursor.stage;
      shared.empty[s].wait(cursor.parity ^ 1);
      copy_keys(shared.stages[s], params, place);
      arrive_when_copied(&shared.full[s]);
      cursor.advance();
    }
  }
};

/// The barriers that UnitProducer asks of a kernel's shared memory, by one thread.
template <typename Shared>
__device__ void init_unit_barriers(Shared& shared) {
  shared.rows_full.init(2 * kWarpgroup);
  shared.rows_empty.init(kConsumerThreads);
  for (int s = 0; s < Shared::kStages; ++s) {
    shared.full[s].init(kWarpgroup);
    shared.empty[s].init(kConsumerThreads);
  }
  fence_barrier_init();
}

using Roles = WarpRoles<40, 232, attention::kConsumers>;

/// A kernel whose blocks take units one by one: feeds them, and works on them by consume(shared).
template <typename Shared, typename Consume>
__device__ __forceinline__ void run_units(const Params& params, const Consume& consume) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) init_unit_barriers(shared);
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    Roles::begin_feeding();
    UnitProducer<Shared> producer{shared, params};
    producer.run();
  } else {
    Roles::begin_multiplying();
    consume(shared);
  }
}

/// Calls run.operator()<kDepth, kShared>() with the kernels' sizes that these heads need.
template <typename Run>
void with_sizes(const Params& params, const Run& run) {
  const bool shared = params.k == params.v && params.heads.head_size == params.heads.head_size_v &&
                      params.heads.head_size <= kMostSharedSize;
  shared ? run.template operator()<kMostSharedSize, true>()
         : run.template operator()<kMostSize, false>();
}

template <typename Shared, typename Kernel>
void launch(Kernel kernel, const Params& params, int64_t num_blocks, cudaStream_t stream) {
  static_assert(sizeof(Shared) <= kMaxShared);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  launch_early(kernel,
               {static_cast<unsigned>(num_blocks), attention::kTensorThreads, sizeof(Shared)},
               stream, params);
}

}  // namespace tessera::cuda::large_heads
