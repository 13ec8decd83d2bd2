#pragma once

// The gradients of attention's keys and values on Hopper's tensor cores: each thread block takes
// 128 keys of one key-value head and goes over the queries that see them, 64 at a time, of one
// query head after the other. Pairs are computed with keys along the rows, so that they are the
// left operands of the sums as they come. With a ring, where a rank has some of the queries alone,
// these are gone over run by run. For larger heads: attention_wide_key_grads.cu.
#include <type_traits>

#include "ops/attention/attention_tensor.cuh"

namespace tessera::cuda::attention::key_grads {

constexpr int kRows = kTensorBlock;
constexpr int kQueries = 64;
constexpr int kPairs = kQueries / 2;  // of a thread
constexpr int kPairBuffers = 2;
constexpr int kPairBarrier = 2;  // and 3: of each warpgroup that multiplies

template <int kDepth, int kDepthV>
struct Shared {
  static constexpr int kRows = key_grads::kRows;
  static constexpr int kStages = 3;
  struct Stage {
    Operand<kQueries, kDepth> q;
    Operand<kQueries, kDepthV> grad_o;
  };
  Operand<kRows, kDepth> k;
  Operand<kRows, kDepthV> v;
  Stage stages[kStages];
  Operand<64, 64> pairs[kConsumers][kPairBuffers];  // of keys by queries, on their way out
  float lse[kStages][kQueries];                     // in units of log 2
  float delta[kStages][kQueries];
  Barrier rows_full;
  Barrier full[kStages];
  Barrier sums_full[kStages];  // of lse and delta
  Barrier empty[kStages];

  __device__ void init() {
    rows_full.init(1);
    for (int s = 0; s < kStages; ++s) {
      full[s].init(1);
      sums_full[s].init(32);
      empty[s].init(kConsumerThreads);
    }
    fence_barrier_init();
  }
};

/// Queries of a sequence in neighbouring rows.
struct Span {
  int row;  ///< of position 0
  int begin;
  int end;
};

template <bool kRing>
__device__ __forceinline__ int num_spans(const TensorParams& params) {
  return kRing ? params.ring.num_runs : 1;
}

/// The queries of an item's sequence that are there: with a ring those of one run.
template <bool kRing>
__device__ __forceinline__ Span span_at(const TensorParams& params, const Item& item, int idx) {
  if constexpr (!kRing) return {item.query_row, 0, item.length};
  const int run_begin = params.ring.run_begin(idx) - item.key_row;  // a position
  return {idx * params.ring.chunk - run_begin, max(run_begin, 0),
          min(run_begin + params.ring.chunk, item.length)};
}

/// The query tiles of a span that see a block of `rows` keys, for each head of the group one after
/// the other.
struct Steps {
  int first_tile;
  int num_tiles;
  int first_head;
  int num_heads;

  __device__ Steps(const TensorParams& params, const Task& task, const Span& span, int rows) {
    const Item& item = task.item;
    const int window = params.heads.window;
    const int begin = max(item.first, span.begin);
    const int end = window == 0 ? span.end : min(span.end, item.first + rows - 1 + window);
    first_tile = begin / kQueries;
    num_tiles = begin < end ? (end + kQueries - 1) / kQueries - first_tile : 0;
    num_heads = params.heads.num_heads / params.heads.num_kv_heads;
    first_head = task.head * num_heads;
  }
};

/// A lane's part of the lse and delta of a stage's queries, on their way to shared memory.
struct Sums {
  static constexpr int kOfLane = kQueries / 32;
  float lse[kOfLane];
  float delta[kOfLane];

  /// `first` is where those of the head and the sequence's position 0 lie. All loads are under way
  /// before the first value is waited for.
  __device__ __forceinline__ void load(const TensorParams& params, int64_t first, const Span& span,
                                       int query) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int position = query + static_cast<int>(threadIdx.x) + i * 32;
      const bool valid = position >= span.begin && position < span.end;
      lse[i] = valid ? params.lse[first + position] : INFINITY;
      delta[i] = valid ? params.delta[first + position] : 0;
    }
  }
  __device__ __forceinline__ void store(float (&to_lse)[kQueries],
                                        float (&to_delta)[kQueries]) const {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      to_lse[threadIdx.x + i * 32] = lse[i] * kLog2E;
      to_delta[threadIdx.x + i * 32] = delta[i];
    }
  }
};

/// The queries of one span, by one warp.
template <typename Shared>
__device__ __forceinline__ void produce_span(Shared& shared, const TensorParams& params,
                                             const Task& task, const Span& span,
                                             RingCursor<Shared::kStages>& cursor) {
  const Steps steps(params, task, span, Shared::kRows);
  for (int h = 0; h < steps.num_heads; ++h) {
    const int head = steps.first_head + h;
    const int64_t head_sums = head * params.heads.num_rows + span.row;
    for (int t = 0; t < steps.num_tiles; ++t) {
      const int s = cursor.stage;
      const int query = (steps.first_tile + t) * kQueries;
      Sums sums;  // loaded while the stage's last users end
      sums.load(params, head_sums, span, query);
      shared.empty[s].wait(cursor.parity ^ 1);
      if (threadIdx.x == 0) {
        shared.full[s].arrive_and_expect(sizeof(shared.stages[s]));
        shared.stages[s].q.load(&params.q, head, span.row + query, &shared.full[s]);
        shared.stages[s].grad_o.load(&params.grad_o, head, span.row + query, &shared.full[s]);
      }
      sums.store(shared.lse[s], shared.delta[s]);
      shared.sums_full[s].arrive();
      cursor.advance();
    }
  }
}

/// One warp.
template <bool kRing, typename Shared>
__device__ void produce(Shared& shared, const TensorParams& params, const Task& task) {
  const Item& item = task.item;
  if (threadIdx.x == 0) {
    const int row = item.key_row + item.first;
    shared.rows_full.arrive_and_expect(sizeof(shared.k) + sizeof(shared.v));
    shared.k.load(&params.k, task.head, row, &shared.rows_full);
    shared.v.load(&params.v, task.head, row, &shared.rows_full);
  }
  RingCursor<Shared::kStages> cursor;
  for (int idx = 0; idx < num_spans<kRing>(params); ++idx)
    produce_span(shared, params, task, span_at<kRing>(params, item, idx), cursor);
}

/// Scores become probabilities, by the queries' lse in units of log 2.
__device__ __forceinline__ void finish_scores(float (&scores)[kPairs], const float (&lse)[kQueries],
                                              float to_log2) {
#pragma unroll
  for (int j = 0; j < kPairs / 4; ++j) {
    const float2 sums = *reinterpret_cast<const float2*>(&lse[j * 8 + own_column()]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const at = &scores[4 * j + 2 * half];
      at[0] = fast_exp2(fmaf(at[0], to_log2, -sums.x));
      at[1] = fast_exp2(fmaf(at[1], to_log2, -sums.y));
    }
  }
}

/// Probabilities' gradients become those of the scores.
__device__ __forceinline__ void finish_grads(const float (&probs)[kPairs], float (&grads)[kPairs],
                                             const float (&delta)[kQueries]) {
#pragma unroll
  for (int j = 0; j < kPairs / 4; ++j) {
    const float2 sums = *reinterpret_cast<const float2*>(&delta[j * 8 + own_column()]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * j + 2 * half;
      grads[at] = probs[at] * (grads[at] - sums.x);
      grads[at + 1] = probs[at + 1] * (grads[at + 1] - sums.y);
    }
  }
}

/// Which pairs of 64 keys by a tile of queries are visible.
struct Mask {
  int first_key;
  int query_end;
  int window;

  /// Whether some of the queries from `query` on do not see all keys.
  __device__ __forceinline__ bool is_needed(int query) const {
    return query < first_key + 63 || query + kQueries > query_end ||
           (window > 0 && query + kQueries - 1 - first_key >= window);
  }
  /// Makes those that are not visible zero.
  __device__ __forceinline__ void apply(float (&pairs)[kPairs], int first_query) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int key = first_key + own_row() + i / 2 % 2 * 8;
      const int query = first_query + i / 4 * 8 + own_column() + i % 2;
      if (key > query || query >= query_end || (window > 0 && query - key >= window)) pairs[i] = 0;
    }
  }
};

/// Sends the factors of 64 keys' gradients, by way of a tile of shared memory, to the kept pairs
/// for the sum of the queries' gradients. By a warpgroup, with a barrier of its own.
template <int kBuffers>
__device__ __forceinline__ void send_pairs(Value* kept, Value* buffer,
                                           const uint32_t (&factors)[kQueries / 16][4],
                                           int barrier) {
  const bool leader = threadIdx.x % kWarpgroup == 0;
  if (leader) wait_stores_read<kBuffers - 1>();
  sync_threads(barrier, kWarpgroup);
  store_fragments(buffer, factors);
  fence_shared_for_async();
  sync_threads(barrier, kWarpgroup);
  if (!leader) return;
  store_bytes(kept, buffer, kPairTileBytes);
  commit_stores();
}

template <int kDepth, int kDepthV, bool kRing>
struct Consumer {
  /// Whether there are registers for a stage's factors beside the next stage's pairs.
  static constexpr bool kOverlaps = kDepth <= 64 && kDepthV <= 64 && !kRing;
  using Memory = Shared<kDepth, kDepthV>;
  Memory& shared;
  const TensorParams& params;
  const Task& task;
  bool keeps_pairs;
  int turn = 0;
  Span span;  ///< of the queries in hand
  float grad_k[kDepth / 2];
  float grad_v[kDepthV / 2];

  __device__ __forceinline__ int query_end() const { return kRing ? span.end : task.item.length; }
  __device__ __forceinline__ int first_key() const { return task.item.first + own_group() * 64; }
  __device__ __forceinline__ Mask mask() const {
    return {first_key(), query_end(), params.heads.window};
  }
  __device__ __forceinline__ float to_log2() const { return params.heads.scale * kLog2E; }

  /// Waits for a stage; what lies there after the sequence is made zero.
  __device__ __forceinline__ void wait_stage(const RingCursor<Memory::kStages>& cursor, int query) {
    shared.full[cursor.stage].wait(cursor.parity);
    const int left = query_end() - query;
    if (left < kQueries) {
      shared.stages[cursor.stage].q.clear_from(left);
      shared.stages[cursor.stage].grad_o.clear_from(left);
      publish_cleared();
    }
  }

  /// Leaves the factors of the keys' gradients for the sum of the queries'.
  __device__ __forceinline__ void keep_pairs(const uint32_t (&factors)[kQueries / 16][4], int head,
                                             int query) {
    const int group = own_group();
    Value* const buffer = shared.pairs[group][turn % kPairBuffers].tiles[0];
    ++turn;
    const PairTiles tiles(params.pairs, task.item, head);
    send_pairs<kPairBuffers>(tiles.at(task.item.first / kRows, group, query / 64), buffer, factors,
                             kPairBarrier + group);
  }

  /// The products of a stage. The other warpgroup's keep the tensor cores busy while this one
  /// computes factors: to start the next stage's before takes registers that there are not.
  __device__ __forceinline__ void add_stage(const RingCursor<Memory::kStages>& cursor, int head,
                                            int query) {
    const int s = cursor.stage;
    auto& stage = shared.stages[s];
    float scores[kPairs];
    float grads[kPairs];
    uint32_t factors[kQueries / 16][4];
    uint32_t key_factors[kQueries / 16][4];
    begin_products();
    start_row_products(scores, shared.k, own_group() * 64, stage.q);
    start_row_products(grads, shared.v, own_group() * 64, stage.grad_o);
    commit_products();
    wait_products<0>();
    fence_values(scores);
    fence_values(grads);
    const bool masked = mask().is_needed(query);
    shared.sums_full[s].wait(cursor.parity);
    finish_scores(scores, shared.lse[s], to_log2());
    if (masked) mask().apply(scores, query);
    pack_values<kQueries>(scores, factors);
    finish_grads(scores, grads, shared.delta[s]);
    if (masked) mask().apply(grads, query);
    pack_values<kQueries>(grads, key_factors);
    begin_products();
    start_column_products<kQueries, kDepthV>(grad_v, factors, stage.grad_o);
    start_column_products<kQueries, kDepth>(grad_k, key_factors, stage.q);
    commit_products();
    if constexpr (!kRing) {
      if (keeps_pairs) keep_pairs(key_factors, head, query);
    }
    wait_products<0>();
    fence_values(grad_k);
    fence_values(grad_v);
    // Every thread that has read the sums: racecheck does not follow one that arrives for its warp.
    shared.empty[s].arrive();
  }

  __device__ __forceinline__ void start_pairs(int stage, float (&scores)[kPairs],
                                              float (&grads)[kPairs]) {
    begin_products();
    start_row_products(scores, shared.k, own_group() * 64, shared.stages[stage].q);
    start_row_products(grads, shared.v, own_group() * 64, shared.stages[stage].grad_o);
    commit_products();
  }
  __device__ __forceinline__ void start_sums(int stage, const uint32_t (&factors)[kQueries / 16][4],
                                             const uint32_t (&key_factors)[kQueries / 16][4]) {
    begin_products();
    start_column_products<kQueries, kDepthV>(grad_v, factors, shared.stages[stage].grad_o);
    start_column_products<kQueries, kDepth>(grad_k, key_factors, shared.stages[stage].q);
    commit_products();
  }
  /// The products' results become factors of the values' and the keys' gradients.
  __device__ __forceinline__ void finish_pairs(const RingCursor<Memory::kStages>& cursor, int query,
                                               float (&scores)[kPairs],
                                               float (&grads)[kPairs]) const {
    const int s = cursor.stage;
    const bool masked = mask().is_needed(query);
    shared.sums_full[s].wait(cursor.parity);
    finish_scores(scores, shared.lse[s], to_log2());
    if (masked) mask().apply(scores, query);
    finish_grads(scores, grads, shared.delta[s]);
    if (masked) mask().apply(grads, query);
  }
  /// After the sums of a stage.
  __device__ __forceinline__ void release_stage(int stage) {
    fence_values(grad_k);
    fence_values(grad_v);
    shared.empty[stage].arrive();
  }

  /// All stages: while one's factors are computed, the sums of the stage before run. A block of
  /// keys is seen by one tile of queries at least.
  __device__ __forceinline__ void add_overlapping() {
    const Steps steps(params, task, span, kRows);
    RingCursor<Memory::kStages> cursor;
    float scores[kPairs];
    float grads[kPairs];
    uint32_t factors[kQueries / 16][4];
    uint32_t key_factors[kQueries / 16][4];
    int query = steps.first_tile * kQueries;
    wait_stage(cursor, query);
    start_pairs(cursor.stage, scores, grads);
    wait_products<0>();
    fence_values(scores);
    fence_values(grads);
    finish_pairs(cursor, query, scores, grads);
    pack_values<kQueries>(scores, factors);
    pack_values<kQueries>(grads, key_factors);
    if (keeps_pairs) keep_pairs(key_factors, steps.first_head, query);
    for (int step = 1; step < steps.num_heads * steps.num_tiles; ++step) {
      const int before = cursor.stage;
      cursor.advance();
      query = (steps.first_tile + step % steps.num_tiles) * kQueries;
      wait_stage(cursor, query);
      start_pairs(cursor.stage, scores, grads);
      start_sums(before, factors, key_factors);
      wait_products<1>();
      fence_values(scores);
      fence_values(grads);
      finish_pairs(cursor, query, scores, grads);
      wait_products<0>();
      release_stage(before);
      pack_values<kQueries>(scores, factors);
      pack_values<kQueries>(grads, key_factors);
      if (keeps_pairs) keep_pairs(key_factors, steps.first_head + step / steps.num_tiles, query);
    }
    start_sums(cursor.stage, factors, key_factors);
    wait_products<0>();
    release_stage(cursor.stage);
  }

  __device__ __forceinline__ void add_one_by_one() {
    RingCursor<Memory::kStages> cursor;
    for (int idx = 0; idx < num_spans<kRing>(params); ++idx) {
      span = span_at<kRing>(params, task.item, idx);
      const Steps steps(params, task, span, kRows);
      for (int head = 0; head < steps.num_heads; ++head) {
        for (int tile = 0; tile < steps.num_tiles; ++tile) {
          const int query = (steps.first_tile + tile) * kQueries;
          wait_stage(cursor, query);
          add_stage(cursor, steps.first_head + head, query);
          cursor.advance();
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    clear_values(grad_k);
    clear_values(grad_v);
    shared.rows_full.wait(0);
    if constexpr (kOverlaps) {
      span = span_at<kRing>(params, task.item, 0);
      add_overlapping();
    } else {
      add_one_by_one();
    }
    store();
    if (threadIdx.x % kWarpgroup == 0) wait_stores_read<0>();  // shared memory ends with the block
  }

  __device__ __forceinline__ void store() const {
    using Out = std::conditional_t<kRing, float, Value>;
    const Heads& heads = params.heads;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = first_key() + own_row() + half * 8;
      if (position >= task.item.length) continue;
      const int token = task.item.key_row + position;
      const int64_t key_row = kRing ? params.ring.gathered_row(token) : token;
      const int64_t row = key_row * heads.num_kv_heads + task.head;
      store_row<kDepth>(static_cast<Out*>(params.grad_k) + row * heads.head_size, grad_k, half,
                        heads.scale, heads.head_size);
      store_row<kDepthV>(static_cast<Out*>(params.grad_v) + row * heads.head_size_v, grad_v, half,
                         1, heads.head_size_v);
    }
  }
};

/// The item and the key-value head of a thread block; there must be as many. Where few query heads
/// share a key-value head, blocks that run at a time have few heads, and thus read the same
/// queries.
__device__ inline Task task_of(const TensorParams& params, int block) {
  const int items = *params.num_items;
  const int num_heads = params.pairs.num_kv_heads;
  const bool shares = params.heads.num_heads >= kSharing * params.heads.num_kv_heads;
  const int at_once = shares ? num_heads : (params.num_sms + items - 1) / items;
  const int first_head = block / (items * at_once) * at_once;
  const int rest = block - first_head * items;
  const int heads = min(at_once, num_heads - first_head);
  Task task{params.items[rest / heads], params.pairs.first_kv_head + first_head + rest % heads};
  // Keys that are first in their sequence are seen by most queries: the list's order reversed.
  task.item.first = task.item.num_after * kTensorBlock;
  return task;
}

template <bool kRing, int kDepth, int kDepthV>
__device__ __forceinline__ void feed(Shared<kDepth, kDepthV>& shared, const TensorParams& params,
                                     const Task& task) {
  if (threadIdx.x < 32) produce<kRing>(shared, params, task);
}

template <bool kRing, int kDepth, int kDepthV>
__device__ __forceinline__ void multiply(Shared<kDepth, kDepthV>& shared,
                                         const TensorParams& params, const Task& task) {
  const bool keeps_pairs = params.pairs.tiles != nullptr && *params.pairs.fit != 0;
  Consumer<kDepth, kDepthV, kRing> consumer{shared, params, task, keeps_pairs};
  consumer.run();
}

}  // namespace tessera::cuda::attention::key_grads
