// The gradients of keys and values of large heads: a thread block takes 64 keys of one key-value
// head and goes over the queries that see them, 32 at a time. Either sum takes the registers of
// both warpgroups, so that the values' and the keys' are a kernel each.
#include <type_traits>

#include "ops/attention/large_heads.cuh"
#include "ops/cuda/short_kernel.cuh"

namespace tessera::cuda::large_heads {
namespace {

enum class Of { kValues, kKeys };

/// Which of the block's keys the queries of a step see.
struct Sight {
  uint64_t keys;  ///< a bit for each
  int query;      ///< position of the step's first query
};

template <int kDepth, bool kShared, Of kOf>
struct Shared {
  static constexpr bool kHasValues = kOf == Of::kKeys && !kShared;
  static constexpr int kStages = kHasValues ? 1 : 2;
  struct Stage {
    Operand<kColumns, kDepth> q;
    Operand<kColumns, kMostSizeV> grad_o;
  };
  Operand<kRows, kDepth> k;
  struct Nothing {};
  std::conditional_t<kHasValues, Operand<kRows, kMostSizeV>, Nothing> values;
  alignas(1024) Stage stages[kStages];
  Swap swap;
  float lse[kStages][kColumns];  // in units of log 2; infinite: the query is not there
  float delta[kStages][kColumns];
  Sight sights[kStages];
  Barrier rows_full;
  Barrier full[kStages];
  Barrier empty[kStages];

  __device__ __forceinline__ const auto& v() const {
    if constexpr (kHasValues) {
      return values;
    } else {
      return k;
    }
  }
  __device__ void init() {
    rows_full.init(kWarpgroup);
    for (int s = 0; s < kStages; ++s) {
      full[s].init(2 * kWarpgroup);
      empty[s].init(kConsumerThreads);
    }
    fence_barrier_init();
  }
};

/// 64 neighbouring rows of keys, and the steps over the queries that see them: 32 of one token's
/// heads where rows were chosen, else of a head's tokens.
struct Block {
  int kv_head;
  int key_row;
  int num_keys;   ///< that there are
  int first_key;  ///< a position; 0 where rows were chosen
  int per_head;   ///< steps of a head, or parts of a token's heads
  int num_steps;
  int slot;         ///< for the sums; -1: they are the gradients
  Chunk chunk;      ///< where rows were chosen
  int first_query;  ///< else: a position, a multiple of 32
  int query_row;    ///< else: of position 0
  int num_queries;  ///< else: positions from here on are not there
};

__device__ Block chosen_block(const Params& params, int idx) {
  const int group = params.heads.num_heads / params.heads.num_kv_heads;
  const Chunk chunk = params.choosers.chunks[idx / params.heads.num_kv_heads];
  const int key_row = chunk.tile * kRows;
  const int parts = (group + kColumns - 1) / kColumns;
  return {.kv_head = idx % params.heads.num_kv_heads,
          .key_row = key_row,
          .num_keys = min(kRows, params.num_rows - key_row),
          .first_key = 0,
          .per_head = parts,
          .num_steps = chunk.count * parts,
          .slot = chunk.slot,
          .chunk = chunk};
}

__device__ Block sequence_block(const Params& params, int idx) {
  const int group = params.heads.num_heads / params.heads.num_kv_heads;
  const Item item = params.items[idx / params.heads.num_kv_heads];
  // Keys that are first in their sequence are seen by most queries: the list's order reversed.
  const int first_key = item.num_after * kRows;
  const int window = params.heads.window;
  const int end = window == 0 ? item.length : min(item.length, first_key + kRows - 1 + window);
  const int per_head = (end - first_key + kColumns - 1) / kColumns;
  return {.kv_head = idx % params.heads.num_kv_heads,
          .key_row = item.key_row + first_key,
          .num_keys = min(kRows, item.length - first_key),
          .first_key = first_key,
          .per_head = per_head,
          .num_steps = per_head * group,
          .slot = -1,
          .chunk = {},
          .first_query = first_key,
          .query_row = item.query_row,
          .num_queries = item.length};
}

/// A step's query of this lane: its place among all heads of all tokens, -1 if it is not there, and
/// that of its sums.
struct Query {
  int place;
  int64_t place_of_sums;
};

__device__ __forceinline__ Query make_query(const attention::Heads& heads, int token, int head,
                                            bool is_there) {
  return {is_there ? token * heads.num_heads + head : -1, head * heads.num_rows + token};
}

__device__ Query query_at(const Params& params, const Block& block, int step, Sight& sight) {
  const attention::Heads& heads = params.heads;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = heads.num_heads / heads.num_kv_heads;
  const int outer = step / block.per_head;
  const int inner = step % block.per_head;
  if (params.chosen == nullptr) {
    const int query = block.first_query + inner * kColumns;
    sight = {~uint64_t{0}, query};
    return make_query(heads, block.query_row + query + lane, block.kv_head * group + outer,
                      query + lane < block.num_queries);
  }
  const Choosers& choosers = params.choosers;
  const int64_t list = int64_t{block.chunk.tile} * heads.num_rows;
  const int token = choosers.tokens[list + block.chunk.first + outer];
  const int in_group = inner * kColumns + lane;
  sight = {choosers.masks[list + token], kRows};
  return make_query(heads, token, block.kv_head * group + in_group, in_group < group);
}

/// By the warpgroup that feeds: each warp takes a quarter of the rows.
template <int kDepth, bool kShared, Of kOf>
struct Producer {
  using Memory = Shared<kDepth, kShared, kOf>;
  Memory& shared;
  const Params& params;
  const Block& block;

  __device__ void run() {
    copy_block();
    RingCursor<Memory::kStages> cursor;
    for (int step = 0; step < block.num_steps; ++step) {
      copy_step(step, cursor);
      cursor.advance();
    }
    wait_copies<0>();
  }

  __device__ void copy_block() {
    constexpr int kOfWarp = kRows / kFeedWarps;
    const int first = static_cast<int>(threadIdx.x) / 32 * kOfWarp;
    for (int row = first; row < first + kOfWarp; ++row) {
      const int key_row = block.key_row + row;
      const int place =
          row < block.num_keys ? key_row * params.heads.num_kv_heads + block.kv_head : -1;
      copy_row(shared.k, row, params.k, place, params.heads.head_size);
      if constexpr (Memory::kHasValues)
        copy_row(shared.values, row, params.v, place, params.heads.head_size_v);
    }
    arrive_when_copied(&shared.rows_full);
  }

  __device__ void copy_step(int step, const RingCursor<Memory::kStages>& cursor) {
    constexpr int kOfWarp = kColumns / kFeedWarps;
    const int s = cursor.stage;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    Sight sight;
    const Query query = query_at(params, block, step, sight);
    const bool is_there = query.place >= 0;
    const float lse = is_there ? params.lse[query.place_of_sums] * kLog2E : INFINITY;
    const float delta = is_there ? params.delta[query.place_of_sums] : 0;
    shared.empty[s].wait(cursor.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
      const int row = warp * kOfWarp + i;
      const int place = __shfl_sync(~0U, query.place, row);
      copy_row(shared.stages[s].q, row, params.q, place, params.heads.head_size);
      copy_row(shared.stages[s].grad_o, row, params.grad_o, place, params.heads.head_size_v);
    }
    if (warp == 0) {
      shared.lse[s][lane] = lse;
      shared.delta[s][lane] = delta;
      if (lane == 0) shared.sights[s] = sight;
    }
    arrive_when_copied(&shared.full[s]);
    shared.full[s].arrive();
  }
};

template <int kDepth, bool kShared, Of kOf>
struct Consumer {
  using Memory = Shared<kDepth, kShared, kOf>;
  static constexpr int kSumDepth = kOf == Of::kKeys ? kDepth : kMostSizeV;
  Memory& shared;
  const Params& params;
  const Block& block;
  RingCursor<Memory::kStages> cursor;
  Sum<kSumDepth> sum;

  __device__ __forceinline__ void run() {
    sum.clear();
    shared.rows_full.wait(0);
    fence_shared_for_async();
    for (int step = 0; step < block.num_steps; ++step) {
      shared.full[cursor.stage].wait(cursor.parity);
      fence_shared_for_async();
      add_stage();
      shared.empty[cursor.stage].arrive();
      cursor.advance();
    }
    store();
  }

  __device__ __forceinline__ void add_stage() {
    const auto& stage = shared.stages[cursor.stage];
    float pairs[kPairs];
    Factors factors;
    if constexpr (kOf == Of::kKeys) {
      multiply_pairs(pairs);
      differentiate(pairs);
    } else {
      multiply_halves(pairs);
    }
    attention::pack_values<kColumns>(pairs, factors);
    begin_products();
    if constexpr (kOf == Of::kKeys) {
      sum.start(factors, stage.q);
    } else {
      sum.start(factors, stage.grad_o);
    }
    commit_products();
    wait_products<0>();
    sum.fence();
  }

  /// Probabilities of all pairs, by both warpgroups.
  __device__ __forceinline__ void multiply_halves(float (&pairs)[kPairs]) {
    float other[kPairs];
    clear_values(pairs);
    begin_products();
    start_half(pairs, shared.k, shared.stages[cursor.stage].q);
    commit_products();
    wait_products<0>();
    fence_values(pairs);
    shared.swap.run(pairs, other);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] += other[i];
    finish_scores(pairs);
  }

  /// The first warpgroup's pairs are scores, the other's the gradients of probabilities.
  __device__ __forceinline__ void multiply_pairs(float (&pairs)[kPairs]) {
    const auto& stage = shared.stages[cursor.stage];
    const bool is_first = own_group() == 0;
    const uint64_t rows = is_first ? describe_rows(shared.k) : describe_rows(shared.v());
    const uint64_t columns = is_first ? describe_rows(stage.q) : describe_rows(stage.grad_o);
    float tail[kPairs];
    clear_values(pairs);
    if constexpr (kDepth > kMostSizeV) clear_values(tail);
    begin_products();
    start_main(pairs, rows, columns);
    if constexpr (kDepth > kMostSizeV)
      start_tail(tail, describe_rows(shared.k), describe_rows(stage.q));
    commit_products();
    wait_products<0>();
    fence_values(pairs);
    if constexpr (kDepth > kMostSizeV) {
      fence_values(tail);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) pairs[i] += is_first ? tail[i] : 0;
    }
  }

  /// Pairs of both warpgroups become gradients of the scores.
  __device__ __forceinline__ void differentiate(float (&pairs)[kPairs]) {
    const bool is_first = own_group() == 0;
    float other[kPairs];
    if (is_first) finish_scores(pairs);
    shared.swap.run(pairs, other);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float prob = is_first ? pairs[i] : other[i];
      const float grad = is_first ? other[i] : pairs[i];
      const int column = i / 4 * 8 + own_column() + i % 2;
      pairs[i] = prob * (grad - shared.delta[cursor.stage][column]);
    }
  }

  /// Scores of keys by queries become probabilities, those that are not visible zero.
  __device__ __forceinline__ void finish_scores(float (&scores)[kPairs]) const {
    const int s = cursor.stage;
    const float to_log2 = params.heads.scale * kLog2E;
    const int window = params.heads.window;
    const Sight sight = shared.sights[s];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int key = own_row() + i / 2 % 2 * 8;
      const int column = i / 4 * 8 + own_column() + i % 2;
      const int behind = sight.query + column - (block.first_key + key);
      const bool is_seen =
          (sight.keys >> key & 1) != 0 && behind >= 0 && (window == 0 || behind < window);
      const float prob = fast_exp2(fmaf(scores[i], to_log2, -shared.lse[s][column]));
      scores[i] = is_seen ? prob : 0;
    }
  }

  __device__ __forceinline__ void store() const {
    const attention::Heads& heads = params.heads;
    const int size = kOf == Of::kKeys ? heads.head_size : heads.head_size_v;
    const float factor = kOf == Of::kKeys ? heads.scale : 1;
    void* const grad = kOf == Of::kKeys ? params.grad_k : params.grad_v;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row() + half * 8;
      if (row >= block.num_keys) continue;
      if (block.slot >= 0) {
        const int64_t slot = int64_t{block.kv_head} * params.choosers.num_slots + block.slot;
        sum.store(params.choosers.sums + (slot * kRows + row) * size, half, 1.0F, size);
      } else {
        const int64_t place = int64_t{block.key_row + row} * heads.num_kv_heads + block.kv_head;
        sum.store(static_cast<Value*>(grad) + place * size, half, factor, size);
      }
    }
  }
};

template <int kDepth, bool kShared, Of kOf>
__global__ void __launch_bounds__(attention::kTensorThreads, 1)
    large_key_grads_kernel(const __grid_constant__ Params params) {
  wait_for_earlier();
  let_next_begin_if_short();
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kDepth, kShared, kOf>*>(memory);
  const int idx = static_cast<int>(blockIdx.x);
  const bool is_chosen = params.chosen != nullptr;
  const int count = is_chosen ? *params.choosers.num_chunks : *params.num_items;
  if (idx >= count * params.heads.num_kv_heads) return;
  const Block block = is_chosen ? chosen_block(params, idx) : sequence_block(params, idx);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    Roles::begin_feeding();
    Producer<kDepth, kShared, kOf> producer{shared, params, block};
    producer.run();
  } else {
    Roles::begin_multiplying();
    Consumer<kDepth, kShared, kOf> consumer{shared, params, block};
    consumer.run();
  }
}

template <Of kOf>
void launch_sums(const Params& params, cudaStream_t stream) {
  const int64_t count =
      params.chosen != nullptr ? num_key_tiles(params.num_rows) + kMoreBlocks : params.max_items;
  with_sizes(params, [&]<int kDepth, bool kShared>() {
    launch<Shared<kDepth, kShared, kOf>>(large_key_grads_kernel<kDepth, kShared, kOf>, params,
                                         count * params.heads.num_kv_heads, stream);
  });
}

}  // namespace

void launch_key_grads(const Params& params, cudaStream_t stream) {
  const bool is_chosen = params.chosen != nullptr;
  if (is_chosen) launch_list_choosers(params, stream);
  launch_sums<Of::kValues>(params, stream);
  if (is_chosen) launch_add_slots(params, params.grad_v, params.heads.head_size_v, 1, stream);
  launch_sums<Of::kKeys>(params, stream);
  if (is_chosen)
    launch_add_slots(params, params.grad_k, params.heads.head_size, params.heads.scale, stream);
}

}  // namespace tessera::cuda::large_heads
