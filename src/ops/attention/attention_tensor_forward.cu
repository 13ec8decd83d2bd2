// Attention's forward on Hopper's tensor cores: each thread block takes 128 queries of one head and
// goes over the keys they see, 128 at a time (64 of heads so large that registers ask for it) and
// the last first. While one tile's scores become probabilities, the products of the tile before
// with its values run (after Shah et al., FlashAttention-3, 2024).
#include "ops/attention/attention_sequence_list.cuh"
#include "ops/attention/attention_tensor.cuh"
#include "ops/attention/online_softmax.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/short_kernel.cuh"

namespace tessera::cuda::attention {
namespace {

constexpr int kRows = kTensorBlock;
constexpr int kStages = 2;
constexpr int kOwnItems = 64;  // the longest list that a thread block makes for itself

template <int kDepth, int kDepthV>
struct Shared {
  static constexpr int kKeys = kDepthV > 128 ? 64 : 128;
  Operand<kRows, kDepth> q;
  Operand<kKeys, kDepth> k[kStages];
  Operand<kKeys, kDepthV> v[kStages];
  Task task;  ///< whose queries are there
  Barrier q_full;
  Barrier q_empty;
  Barrier k_full[kStages];
  Barrier k_empty[kStages];
  Barrier v_full[kStages];
  Barrier v_empty[kStages];
  int num_items;
  Item items[kOwnItems];

  /// By all threads.
  __device__ void list(SequenceList sequences) {
    sequences.list.num_items = &num_items;
    sequences.list.items = items;
    sequences.list.first_pairs = nullptr;
    list_few_sequences(sequences);
  }
  template <bool kOwnList>
  __device__ TaskLoop tasks(const TensorParams& params) const {
    TaskLoop tasks{params, params.heads.num_heads};
    if constexpr (kOwnList) {
      tasks.num_items = &num_items;
      tasks.items = items;
    }
    return tasks;
  }

  __device__ void init() {
    q_full.init(1);
    q_empty.init(kConsumerThreads);
    for (int s = 0; s < kStages; ++s) {
      k_full[s].init(1);
      v_full[s].init(1);
      k_empty[s].init(kConsumerWarps);
      v_empty[s].init(kConsumerWarps);
    }
    fence_barrier_init();
  }
};

/// Tiles of keys that a block of queries sees.
struct Range {
  int first;
  int last;
};
template <int kKeys>
__device__ Range seen_tiles(const Item& item, int window) {
  const int begin = window == 0 ? 0 : max(0, item.first - window + 1);
  const int last = kKeys == kRows ? item.first : min(item.first + kRows, item.length) - 1;
  return {begin / kKeys, last / kKeys};
}

template <bool kOwnList, typename Shared>
__device__ void produce(Shared& shared, const TensorParams& params) {
  constexpr int kKeys = Shared::kKeys;
  const Heads& heads = params.heads;
  TaskLoop tasks = shared.template tasks<kOwnList>(params);
  Task task;
  RingCursor<kStages> cursor;
  uint32_t parity = 0;
  for (; tasks.next(task); parity ^= 1) {
    const Item& item = task.item;
    const int kv_head = task.head / (heads.num_heads / heads.num_kv_heads);
    const Range tiles = seen_tiles<kKeys>(item, heads.window);
    shared.q_empty.wait(parity ^ 1);
    shared.task = task;
    shared.q_full.arrive_and_expect(sizeof(shared.q));
    shared.q.load(&params.q, task.head, item.query_row + item.first, &shared.q_full);
    for (int tile = tiles.last; tile >= tiles.first; --tile) {
      const int s = cursor.stage;
      const int row = item.key_row + tile * kKeys;
      shared.k_empty[s].wait(cursor.parity ^ 1);
      shared.k_full[s].arrive_and_expect(sizeof(shared.k[s]));
      shared.k[s].load(&params.k, kv_head, row, &shared.k_full[s]);
      shared.v_empty[s].wait(cursor.parity ^ 1);
      shared.v_full[s].arrive_and_expect(sizeof(shared.v[s]));
      shared.v[s].load(&params.v, kv_head, row, &shared.v_full[s]);
      cursor.advance();
    }
  }
  shared.q_empty.wait(parity ^ 1);
  shared.task.head = -1;
  shared.q_full.arrive();
}

/// Makes scores that are not visible minus infinity; `query` is the position of this thread's first
/// row.
template <int kScores>
__device__ __forceinline__ void mask(float (&scores)[kScores], int query, int first_key,
                                     int window) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int row = query + i / 2 % 2 * 8;
    const int key = first_key + i / 4 * 8 + own_column() + i % 2;
    if (key > row || (window > 0 && row - key >= window)) scores[i] = -INFINITY;
  }
}

template <int kDepth, int kDepthV>
struct Consumer {
  static constexpr int kKeys = Shared<kDepth, kDepthV>::kKeys;
  static constexpr int kScores = kKeys / 2;  // of a thread
  Shared<kDepth, kDepthV>& shared;
  const TensorParams& params;
  Softmax softmax;
  Task task;
  RingCursor<kStages> keys;
  RingCursor<kStages> values;
  float o[kDepthV / 2];

  __device__ __forceinline__ int first_query() const { return task.item.first + own_group() * 64; }

  __device__ __forceinline__ void start_scores(float (&scores)[kScores], int stage) {
    begin_products();
    start_row_products(scores, shared.q, own_group() * 64, shared.k[stage]);
    commit_products();
  }

  /// Waits for a tile's values; those of the sequence's last are made to end with it.
  __device__ __forceinline__ void wait_values(int tile) {
    shared.v_full[values.stage].wait(values.parity);
    const int left = task.item.length - tile * kKeys;
    if (left < kKeys) {
      shared.v[values.stage].clear_from(left);
      publish_cleared();
    }
  }

  __device__ __forceinline__ void finish_scores(float (&scores)[kScores], int tile) {
    const int window = params.heads.window;
    const int key = tile * kKeys;
    if (key + kKeys - 1 > first_query() || (window > 0 && first_query() + 63 - key >= window))
      mask(scores, first_query() + own_row(), key, window);
    softmax.add(scores);
  }

  __device__ __forceinline__ void run() {
    for (uint32_t parity = 0;; parity ^= 1) {
      shared.q_full.wait(parity);
      task = shared.task;
      if (task.head < 0) return;
      run_task();
    }
  }

  /// After a tile's scores; the last use of the queries frees them too.
  __device__ __forceinline__ void release_keys(bool is_last_use) {
    release(shared.k_empty[keys.stage]);
    // Every thread that has read the task: racecheck does not follow one that arrives for its warp.
    if (is_last_use) shared.q_empty.arrive();
    keys.advance();
  }

  /// This warpgroup's first tile has a key that each of its queries sees; the last one of all may
  /// have the other's alone.
  __device__ __forceinline__ Range own_tiles() {
    Range tiles = seen_tiles<kKeys>(task.item, params.heads.window);
    if constexpr (kKeys < kRows) {
      if (first_query() / kKeys < tiles.last) {
        shared.k_full[keys.stage].wait(keys.parity);
        release_keys(false);
        wait_values(tiles.last);
        release_values();
        --tiles.last;
      }
    }
    return tiles;
  }

  __device__ __forceinline__ void run_task() {
    const Range tiles = own_tiles();
    float scores[kScores];
    uint32_t probs[kKeys / 16][4];
    clear_values(o);
    softmax.clear();
    shared.k_full[keys.stage].wait(keys.parity);
    start_scores(scores, keys.stage);
    wait_products<0>();
    fence_values(scores);
    release_keys(tiles.last == tiles.first);
    finish_scores(scores, tiles.last);
    pack_values<kKeys>(scores, probs);
    for (int tile = tiles.last - 1; tile >= tiles.first; --tile) {
      shared.k_full[keys.stage].wait(keys.parity);
      start_scores(scores, keys.stage);
      wait_values(tile + 1);
      begin_products();
      start_column_products<kKeys, kDepthV>(o, probs, shared.v[values.stage]);
      commit_products();
      wait_products<1>();
      fence_values(scores);
      release_keys(tile == tiles.first);
      finish_scores(scores, tile);
      wait_products<0>();
      fence_values(o);
      release_values();
      rescale(o, softmax.rescale);
      pack_values<kKeys>(scores, probs);
    }
    wait_values(tiles.first);
    begin_products();
    start_column_products<kKeys, kDepthV>(o, probs, shared.v[values.stage]);
    commit_products();
    wait_products<0>();
    fence_values(o);
    release_values();
    store();
  }

  __device__ __forceinline__ void release_values() {
    release(shared.v_empty[values.stage]);
    values.advance();
  }

  __device__ __forceinline__ void store() {
    const Heads& heads = params.heads;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.row_sum(half);
      const int position = first_query() + own_row() + half * 8;
      if (position < task.item.begin || position >= task.item.length) continue;
      const int64_t row = int64_t{task.item.query_row} + position;
      Value* const to =
          static_cast<Value*>(params.o) + (row * heads.num_heads + task.head) * heads.head_size_v;
      store_row<kDepthV>(to, o, half, 1 / sum, heads.head_size_v);
      if (own_column() == 0)
        params.lse[task.head * heads.num_rows + row] =
            softmax.max[half] * softmax.to_log2 * kLn2 + logf(sum);
    }
  }
};

using Roles = WarpRoles<24, 240, kConsumers>;

template <int kDepth, int kDepthV, bool kOwnList>
__global__ void __launch_bounds__(kTensorThreads, 1)
    forward_kernel(const __grid_constant__ TensorParams params) {
  wait_for_earlier();
  let_next_begin_if_short();
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kDepth, kDepthV>*>(memory);
  if (threadIdx.x == 0) shared.init();
  if constexpr (kOwnList) shared.list(params.to_list);
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    Roles::begin_feeding();
    if (threadIdx.x == 0) produce<kOwnList>(shared, params);
  } else {
    Roles::begin_multiplying();
    Consumer<kDepth, kDepthV> consumer{shared, params, {params.heads.scale * kLog2E}};
    consumer.run();
  }
}

template <int kDepth, int kDepthV>
void launch(const TensorParams& params, cudaStream_t stream) {
  const auto kernel = params.to_list.cu_seqlens != nullptr ? forward_kernel<kDepth, kDepthV, true>
                                                           : forward_kernel<kDepth, kDepthV, false>;
  launch_tensor<Shared<kDepth, kDepthV>>(kernel, params, params.num_sms, stream);
}

}  // namespace

bool tensor_fits(int head_size, int head_size_v) {
  return head_size % 8 == 0 && head_size_v % 8 == 0 && head_size <= 256 && head_size_v <= 256;
}

bool tensor_forward_lists(const SequenceList& sequences) {
  return sequences.num_sequences <= kFewSequences && sequences.list.capacity <= kOwnItems;
}

void launch_tensor_forward(const TensorParams& params, cudaStream_t stream) {
  with_head_sizes(params.heads.head_size, params.heads.head_size_v,
                  [&]<int kDepth, int kDepthV>() { launch<kDepth, kDepthV>(params, stream); });
}

}  // namespace tessera::cuda::attention
