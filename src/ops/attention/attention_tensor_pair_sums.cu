// The gradient of attention's queries from kept pairs, on Hopper's tensor cores: each thread block
// takes 128 queries of one head and adds up the keys they see, 64 at a time, by the factors that
// the kernel of the keys' gradients left.
#include "ops/attention/attention_tensor.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/short_kernel.cuh"

namespace tessera::cuda::attention {
namespace {

constexpr int kRows = kTensorBlock;
constexpr int kKeys = 64;

template <int kDepth>
struct Shared {
  static constexpr int kStages = kDepth > 192 ? 4 : kDepth > 128 ? 5 : 6;
  struct Stage {
    Operand<kKeys, kDepth> k;
    Operand<kKeys, 64> pairs[kConsumers];  // of keys by each warpgroup's queries
  };
  Stage stages[kStages];
  Barrier full[kStages];
  Barrier empty[kStages];

  __device__ void init() {
    for (int s = 0; s < kStages; ++s) {
      full[s].init(1);
      empty[s].init(kConsumerWarps);
    }
    fence_barrier_init();
  }
};

/// The heads of the chunk one after the other, each with all items, the longest first.
struct Tasks {
  const TensorParams& params;
  int group = params.heads.num_heads / params.heads.num_kv_heads;
  TaskLoop loop{params, params.pairs.num_kv_heads* group};

  __device__ bool next(Task& task) {
    if (!loop.next(task)) return false;
    task.head += params.pairs.first_kv_head * group;
    return true;
  }
};

/// Whether a warpgroup's 64 queries from `query` on see some of the 64 keys from `key` on.
__device__ __forceinline__ bool sees(const TensorParams& params, const Item& item, int query,
                                     int key) {
  const int window = params.heads.window;
  return query < item.length && key <= query + 63 &&
         (window == 0 || query - (key + kKeys - 1) < window);
}

struct Range {
  int first;
  int last;
};
__device__ Range seen_tiles(const Item& item, int window) {
  const int begin = window == 0 ? 0 : max(0, item.first - window + 1);
  return {begin / kKeys, (min(item.first + kRows, item.length) - 1) / kKeys};
}

template <int kDepth>
__device__ void produce(Shared<kDepth>& shared, const TensorParams& params) {
  Tasks tasks{params};
  Task task;
  RingCursor<Shared<kDepth>::kStages> cursor;
  while (tasks.next(task)) {
    const Item& item = task.item;
    const int kv_head = task.head / tasks.group;
    const PairTiles pairs(params.pairs, item, task.head);
    const Range tiles = seen_tiles(item, params.heads.window);
    for (int tile = tiles.first; tile <= tiles.last; ++tile) {
      auto& stage = shared.stages[cursor.stage];
      Barrier* const full = &shared.full[cursor.stage];
      const int key = tile * kKeys;
      uint32_t num_bytes = sizeof(stage.k);
      for (int g = 0; g < kConsumers; ++g)
        num_bytes += sees(params, item, item.first + g * 64, key) ? kPairTileBytes : 0;
      shared.empty[cursor.stage].wait(cursor.parity ^ 1);
      full->arrive_and_expect(num_bytes);
      stage.k.load(&params.k, kv_head, item.key_row + key, full);
      for (int g = 0; g < kConsumers; ++g) {
        const int query = item.first + g * 64;
        if (sees(params, item, query, key))
          load_bytes(stage.pairs[g].tiles[0], pairs.at(tile / 2, tile % 2, query / 64),
                     kPairTileBytes, full);
      }
      cursor.advance();
    }
  }
}

template <int kDepth>
struct Consumer {
  using Memory = Shared<kDepth>;
  using Product = WarpgroupProduct<kDepth, TileMajor::kOther, TileMajor::kOther>;
  Memory& shared;
  const TensorParams& params;
  Task task;
  RingCursor<Memory::kStages> cursor;
  float grad_q[kDepth / 2];

  __device__ __forceinline__ int first_query() const { return task.item.first + own_group() * 64; }

  __device__ __forceinline__ void wait_stage(int tile) {
    shared.full[cursor.stage].wait(cursor.parity);
    const int left = task.item.length - tile * kKeys;
    if (left < kKeys) {
      shared.stages[cursor.stage].k.clear_from(left);
      publish_cleared();
    }
  }

  __device__ __forceinline__ void add_tile() {
    auto& stage = shared.stages[cursor.stage];
    uint64_t pairs = describe_tile<TileMajor::kOther>(stage.pairs[own_group()].tiles[0], 0);
    uint64_t keys =
        describe_tile<TileMajor::kOther>(stage.k.tiles[0], Operand<kKeys, kDepth>::kTileBytes);
    begin_products();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      Product::run(grad_q, pairs, keys, true);
      pairs += kNextReduction<TileMajor::kOther>;
      keys += kNextReduction<TileMajor::kOther>;
    }
    commit_products();
  }

  /// A stage goes back when the products of the next one have been started.
  __device__ __forceinline__ void run_task() {
    const Range tiles = seen_tiles(task.item, params.heads.window);
    clear_values(grad_q);
    int last = -1;
    for (int tile = tiles.first; tile <= tiles.last; ++tile) {
      wait_stage(tile);
      if (sees(params, task.item, first_query(), tile * kKeys)) add_tile();
      wait_products<1>();
      if (last >= 0) release(shared.empty[last]);
      last = cursor.stage;
      cursor.advance();
    }
    wait_products<0>();
    fence_values(grad_q);
    release(shared.empty[last]);
    store();
  }

  __device__ __forceinline__ void run() {
    Tasks tasks{params};
    while (tasks.next(task)) run_task();
  }

  __device__ __forceinline__ void store() const {
    const Heads& heads = params.heads;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = first_query() + own_row() + half * 8;
      if (position >= task.item.length) continue;
      const int64_t row = int64_t{task.item.query_row} + position;
      Value* const to = static_cast<Value*>(params.grad_q) +
                        (row * heads.num_heads + task.head) * heads.head_size;
      store_row<kDepth>(to, grad_q, half, heads.scale, heads.head_size);
    }
  }
};

using Roles = WarpRoles<72, 216, kConsumers>;

template <int kDepth>
__global__ void __launch_bounds__(kTensorThreads, 1)
    pair_sums_kernel(const __grid_constant__ TensorParams params) {
  wait_for_earlier();
  let_next_begin_if_short();
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kDepth>*>(memory);
  if (*params.pairs.fit == 0) return;
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    Roles::begin_feeding();
    if (threadIdx.x == 0) produce(shared, params);
  } else {
    Roles::begin_multiplying();
    Consumer<kDepth> consumer{shared, params};
    consumer.run();
  }
}

template <int kDepth>
void launch(const TensorParams& params, cudaStream_t stream) {
  launch_tensor<Shared<kDepth>>(pair_sums_kernel<kDepth>, params, params.num_sms, stream);
}

}  // namespace

void launch_tensor_pair_sums(const TensorParams& params, cudaStream_t stream) {
  with_head_sizes(params.heads.head_size, 0,
                  [&]<int kDepth, int kDepthV>() { launch<kDepth>(params, stream); });
}

}  // namespace tessera::cuda::attention
