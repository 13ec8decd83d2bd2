#pragma once

// The gradient of attention's queries on Hopper's tensor cores: each thread block takes 128 queries
// of one head and goes over the keys they see, 64 at a time and the last first.
#include "ops/attention/attention_tensor.cuh"

namespace tessera::cuda::attention::query_grad {

constexpr int kRows = kTensorBlock;
constexpr int kKeys = 64;
constexpr int kPairs = kKeys / 2;  // of a thread

template <int kDepth, int kDepthV>
struct Shared {
  /// Whether there is room for the next tile's pairs before the sum of one's own.
  static constexpr bool kOverlaps = true;
  static constexpr int kStages = 3;
  struct Stage {
    Operand<kKeys, kDepth> k;
    Operand<kKeys, kDepthV> v;
  };
  Operand<kRows, kDepth> q;
  Operand<kRows, kDepthV> grad_o;
  Stage stages[kStages];
  Task task;  ///< whose rows are there; every thread that has read it frees the rows
  Barrier rows_full;
  Barrier rows_empty;
  Barrier full[kStages];
  Barrier empty[kStages];

  __device__ void init() {
    rows_full.init(1);
    rows_empty.init(kConsumerThreads);
    for (int s = 0; s < kStages; ++s) {
      full[s].init(1);
      empty[s].init(kConsumerWarps);
    }
    fence_barrier_init();
  }
  __device__ Operand<kKeys, kDepth>& k(int stage) { return stages[stage].k; }
  __device__ Operand<kKeys, kDepthV>& v(int stage) { return stages[stage].v; }
  __device__ void wait(const RingCursor<kStages>& cursor) {
    full[cursor.stage].wait(cursor.parity);
  }

  __device__ void load(const TensorParams& params, int kv_head, int row,
                       RingCursor<kStages>& cursor) {
    auto& stage = stages[cursor.stage];
    Barrier* const to = &full[cursor.stage];
    empty[cursor.stage].wait(cursor.parity ^ 1);
    to->arrive_and_expect(sizeof(stage));
    stage.k.load(&params.k, kv_head, row, to);
    stage.v.load(&params.v, kv_head, row, to);
    cursor.advance();
  }
};

/// Of heads so large that there is room for two tiles of keys and one of values, which are read
/// first: the next come while the keys are still in use.
template <>
struct Shared<256, 256> {
  static constexpr bool kOverlaps = false;
  static constexpr int kStages = 2;
  Operand<kRows, 256> q;
  Operand<kRows, 256> grad_o;
  Operand<kKeys, 256> keys[kStages];
  Operand<kKeys, 256> values;
  Task task;
  Barrier rows_full;
  Barrier rows_empty;
  Barrier full[kStages];  // of keys
  Barrier empty[kStages];
  Barrier values_full;
  Barrier values_empty;

  __device__ void init() {
    rows_full.init(1);
    rows_empty.init(kConsumerThreads);
    values_full.init(1);
    values_empty.init(kConsumerWarps);
    for (int s = 0; s < kStages; ++s) {
      full[s].init(1);
      empty[s].init(kConsumerWarps);
    }
    fence_barrier_init();
  }
  __device__ Operand<kKeys, 256>& k(int stage) { return keys[stage]; }
  __device__ Operand<kKeys, 256>& v(int /*stage*/) { return values; }
  /// The values' turns are as many as those of both stages of keys.
  static __device__ uint32_t values_parity(const RingCursor<kStages>& cursor) {
    return cursor.stage;
  }
  __device__ void wait(const RingCursor<kStages>& cursor) {
    values_full.wait(values_parity(cursor));
    full[cursor.stage].wait(cursor.parity);
  }

  __device__ void load(const TensorParams& params, int kv_head, int row,
                       RingCursor<kStages>& cursor) {
    const int s = cursor.stage;
    empty[s].wait(cursor.parity ^ 1);
    full[s].arrive_and_expect(sizeof(keys[s]));
    keys[s].load(&params.k, kv_head, row, &full[s]);
    values_empty.wait(values_parity(cursor) ^ 1);
    values_full.arrive_and_expect(sizeof(values));
    values.load(&params.v, kv_head, row, &values_full);
    cursor.advance();
  }
};

/// Tiles of keys that a block of queries sees.
struct Range {
  int first;
  int last;
};
__device__ inline Range seen_tiles(const Item& item, int window) {
  const int begin = window == 0 ? 0 : max(0, item.first - window + 1);
  return {begin / kKeys, (min(item.first + kRows, item.length) - 1) / kKeys};
}

template <typename Shared>
__device__ void produce(Shared& shared, const TensorParams& params, int first_block) {
  const Heads& heads = params.heads;
  TaskLoop tasks{params, heads.num_heads, first_block};
  Task task;
  RingCursor<Shared::kStages> cursor;
  uint32_t parity = 0;
  for (; tasks.next(task); parity ^= 1) {
    const Item& item = task.item;
    const int kv_head = task.head / (heads.num_heads / heads.num_kv_heads);
    const Range tiles = seen_tiles(item, heads.window);
    const int query_row = item.query_row + item.first;
    shared.rows_empty.wait(parity ^ 1);
    shared.task = task;
    shared.rows_full.arrive_and_expect(sizeof(shared.q) + sizeof(shared.grad_o));
    shared.q.load(&params.q, task.head, query_row, &shared.rows_full);
    shared.grad_o.load(&params.grad_o, task.head, query_row, &shared.rows_full);
    for (int tile = tiles.last; tile >= tiles.first; --tile)
      shared.load(params, kv_head, item.key_row + tile * kKeys, cursor);
  }
  shared.rows_empty.wait(parity ^ 1);
  shared.task.head = -1;
  shared.rows_full.arrive();
}

template <int kDepth, int kDepthV>
struct Consumer {
  using Memory = Shared<kDepth, kDepthV>;
  Memory& shared;
  const TensorParams& params;
  Task task;
  RingCursor<Memory::kStages> cursor;
  float grad_q[kDepth / 2];
  float lse[2];  // of this thread's rows, in units of log 2
  float delta[2];

  __device__ __forceinline__ int first_query() const { return task.item.first + own_group() * 64; }

  __device__ __forceinline__ void load_sums() {
    const int64_t head_sums = task.head * params.heads.num_rows + task.item.query_row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = first_query() + own_row() + half * 8;
      const bool valid = position >= task.item.begin && position < task.item.length;
      lse[half] = valid ? params.lse[head_sums + position] * kLog2E : 0;
      delta[half] = valid ? params.delta[head_sums + position] : 0;
    }
  }

  /// Scores become probabilities; those not visible zero.
  __device__ __forceinline__ void finish_scores(float (&scores)[kPairs]) const {
    const float to_log2 = params.heads.scale * kLog2E;
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      scores[i] = fast_exp2(fmaf(scores[i], to_log2, -lse[i / 2 % 2]));
  }
  __device__ __forceinline__ void finish_grads(const float (&probs)[kPairs],
                                               float (&grads)[kPairs]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) grads[i] = probs[i] * (grads[i] - delta[i / 2 % 2]);
  }
  __device__ __forceinline__ void mask(float (&grads)[kPairs], int first_key) const {
    const int window = params.heads.window;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int row = first_query() + own_row() + i / 2 % 2 * 8;
      const int key = first_key + i / 4 * 8 + own_column() + i % 2;
      if (key > row || (window > 0 && row - key >= window)) grads[i] = 0;
    }
  }

  /// Waits for a stage; keys after the sequence's last are made zero.
  __device__ __forceinline__ void wait_stage(int tile) {
    shared.wait(cursor);
    const int left = task.item.length - tile * kKeys;
    if (left < kKeys) {
      shared.k(cursor.stage).clear_from(left);
      publish_cleared();
    }
  }

  __device__ __forceinline__ void start_pairs(int stage, float (&scores)[kPairs],
                                              float (&grads)[kPairs]) {
    begin_products();
    start_row_products(scores, shared.q, own_group() * 64, shared.k(stage));
    start_row_products(grads, shared.grad_o, own_group() * 64, shared.v(stage));
    commit_products();
  }

  /// The products' results become factors of the keys, in grads.
  __device__ __forceinline__ void finish_pairs(int tile, float (&scores)[kPairs],
                                               float (&grads)[kPairs]) const {
    const int window = params.heads.window;
    const int key = tile * kKeys;
    finish_scores(scores);
    finish_grads(scores, grads);
    if (key + kKeys - 1 > first_query() || (window > 0 && first_query() + 63 - key >= window))
      mask(grads, key);
  }

  __device__ __forceinline__ void start_sum(int stage, const uint32_t (&factors)[kKeys / 16][4]) {
    begin_products();
    start_column_products<kKeys, kDepth>(grad_q, factors, shared.k(stage));
    commit_products();
  }

  __device__ __forceinline__ void run() {
    for (uint32_t parity = 0;; parity ^= 1) {
      shared.rows_full.wait(parity);
      task = shared.task;
      if (task.head < 0) return;
      run_task();
    }
  }

  __device__ __forceinline__ void run_task() {
    const Range tiles = seen_tiles(task.item, params.heads.window);
    clear_values(grad_q);
    load_sums();
    if constexpr (Memory::kOverlaps) {
      add_overlapping(tiles);
    } else {
      add_one_by_one(tiles);
    }
    store();
  }

  /// While one tile's factors are computed, the products of the tile before run.
  __device__ __forceinline__ void add_overlapping(const Range& tiles) {
    float scores[kPairs];
    float grads[kPairs];
    uint32_t factors[kKeys / 16][4];
    wait_stage(tiles.last);
    start_pairs(cursor.stage, scores, grads);
    wait_products<0>();
    fence_values(scores);
    fence_values(grads);
    if (tiles.last == tiles.first) shared.rows_empty.arrive();
    finish_pairs(tiles.last, scores, grads);
    pack_values<kKeys>(grads, factors);
    for (int tile = tiles.last - 1; tile >= tiles.first; --tile) {
      const int before = cursor.stage;
      cursor.advance();
      wait_stage(tile);
      start_pairs(cursor.stage, scores, grads);
      start_sum(before, factors);
      wait_products<1>();
      fence_values(scores);
      fence_values(grads);
      if (tile == tiles.first) shared.rows_empty.arrive();
      finish_pairs(tile, scores, grads);
      wait_products<0>();
      fence_values(grad_q);
      release(shared.empty[before]);
      pack_values<kKeys>(grads, factors);
    }
    start_sum(cursor.stage, factors);
    wait_products<0>();
    fence_values(grad_q);
    release(shared.empty[cursor.stage]);
    cursor.advance();
  }

  __device__ __forceinline__ void add_one_by_one(const Range& tiles) {
    for (int tile = tiles.last; tile >= tiles.first; --tile) {
      float scores[kPairs];
      float grads[kPairs];
      uint32_t factors[kKeys / 16][4];
      wait_stage(tile);
      start_pairs(cursor.stage, scores, grads);
      wait_products<0>();
      fence_values(scores);
      fence_values(grads);
      release(shared.values_empty);
      if (tile == tiles.first) shared.rows_empty.arrive();
      finish_pairs(tile, scores, grads);
      pack_values<kKeys>(grads, factors);
      start_sum(cursor.stage, factors);
      wait_products<0>();
      fence_values(grad_q);
      release(shared.empty[cursor.stage]);
      cursor.advance();
    }
  }

  __device__ __forceinline__ void store() const {
    const Heads& heads = params.heads;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = first_query() + own_row() + half * 8;
      if (position < task.item.begin || position >= task.item.length) continue;
      const int64_t row = int64_t{task.item.query_row} + position;
      Value* const to = static_cast<Value*>(params.grad_q) +
                        (row * heads.num_heads + task.head) * heads.head_size;
      store_row<kDepth>(to, grad_q, half, heads.scale, heads.head_size);
    }
  }
};

/// For thread blocks from first_block on, which share the tasks.
template <int kDepth, int kDepthV>
__device__ __forceinline__ void feed(Shared<kDepth, kDepthV>& shared, const TensorParams& params,
                                     int first_block) {
  if (threadIdx.x == 0) produce(shared, params, first_block);
}

template <int kDepth, int kDepthV>
__device__ __forceinline__ void multiply(Shared<kDepth, kDepthV>& shared,
                                         const TensorParams& params) {
  Consumer<kDepth, kDepthV> consumer{shared, params};
  consumer.run();
}

}  // namespace tessera::cuda::attention::query_grad
