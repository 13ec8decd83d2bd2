// The gradients of keys and values of heads of more elements than 128 (and than 192 with values of
// 128), on Hopper's tensor cores. The sums of 64 keys alone take half of an SM's registers, so that
// each of the two warpgroups that multiply makes one: the values' computes the probabilities and
// leaves them to the keys' in shared memory, which computes their gradients meanwhile.
#include "ops/attention/attention_tensor_key_grads.cuh"
#include "ops/cuda/short_kernel.cuh"

namespace tessera::cuda::attention {
namespace {

using key_grads::kPairs;
using key_grads::kQueries;
using key_grads::Mask;
using key_grads::Span;
using key_grads::Steps;

constexpr int kBlockRows = 64;
constexpr int kBlocksOfItem = kTensorBlock / kBlockRows;
constexpr int kSentBuffers = 2;
constexpr int kSendBarrier = 2;  // of the keys' warpgroup

template <int kDepth, int kDepthV>
struct Shared {
  static constexpr int kRows = kBlockRows;
  static constexpr int kStages = kDepth > 192 ? 2 : 3;
  struct Stage {
    Operand<kQueries, kDepth> q;
    Operand<kQueries, kDepthV> grad_o;
  };
  Operand<kRows, kDepth> k;
  Operand<kRows, kDepthV> v;
  Stage stages[kStages];
  Operand<64, 64> pairs[kSentBuffers];   // of keys by queries, on their way out
  float4 probs[kPairs / 4][kWarpgroup];  // as the threads of a warpgroup hold them
  float lse[kStages][kQueries];          // in units of log 2
  float delta[kStages][kQueries];
  Barrier rows_full;
  Barrier full[kStages];
  Barrier sums_full[kStages];  // of lse and delta
  Barrier empty[kStages];
  Barrier probs_full;
  Barrier probs_empty;

  __device__ void init() {
    rows_full.init(1);
    probs_full.init(kWarpgroup);
    probs_empty.init(kWarpgroup);
    for (int s = 0; s < kStages; ++s) {
      full[s].init(1);
      sums_full[s].init(32);
      empty[s].init(kConsumerThreads);
    }
    fence_barrier_init();
  }
};

/// What both warpgroups do alike with the stages, one after the other.
template <int kDepth, int kDepthV, bool kRing>
struct Stages {
  using Memory = Shared<kDepth, kDepthV>;
  Memory& shared;
  const TensorParams& params;
  const Task& task;
  Span span;  ///< of the queries in hand

  __device__ __forceinline__ int query_end() const { return kRing ? span.end : task.item.length; }
  __device__ __forceinline__ Mask mask() const {
    return {task.item.first, query_end(), params.heads.window};
  }

  /// Waits for a stage; what lies there after the sequence is made zero.
  __device__ __forceinline__ void wait(const RingCursor<Memory::kStages>& cursor, int query) {
    shared.full[cursor.stage].wait(cursor.parity);
    const int left = query_end() - query;
    if (left < kQueries) {
      shared.stages[cursor.stage].q.clear_from(left);
      shared.stages[cursor.stage].grad_o.clear_from(left);
      publish_cleared();
    }
  }

  /// Calls add(cursor, head, query) for each stage, and leaves it to the producer then.
  template <typename Add>
  __device__ __forceinline__ void run(const Add& add) {
    RingCursor<Memory::kStages> cursor;
    shared.rows_full.wait(0);
    for (int idx = 0; idx < key_grads::num_spans<kRing>(params); ++idx) {
      span = key_grads::span_at<kRing>(params, task.item, idx);
      const Steps steps(params, task, span, kBlockRows);
      for (int head = 0; head < steps.num_heads; ++head) {
        for (int tile = 0; tile < steps.num_tiles; ++tile) {
          const int query = (steps.first_tile + tile) * kQueries;
          wait(cursor, query);
          add(cursor, steps.first_head + head, query);
          shared.empty[cursor.stage].arrive();
          cursor.advance();
        }
      }
    }
  }

  /// Writes a gradient of the keys' or values', whose heads have `size` elements.
  template <int kColumns>
  __device__ __forceinline__ void store(void* to, const float (&grad)[kColumns / 2], float factor,
                                        int size) const {
    using Out = std::conditional_t<kRing, float, Value>;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = task.item.first + own_row() + half * 8;
      if (position >= task.item.length) continue;
      const int token = task.item.key_row + position;
      const int64_t key_row = kRing ? params.ring.gathered_row(token) : token;
      const int64_t row = key_row * params.heads.num_kv_heads + task.head;
      store_row<kColumns>(static_cast<Out*>(to) + row * size, grad, half, factor, size);
    }
  }
};

/// The warpgroup that sums up the values' gradients.
template <int kDepth, int kDepthV, bool kRing>
struct ValueSums {
  using Memory = Shared<kDepth, kDepthV>;
  Stages<kDepth, kDepthV, kRing> stages;
  uint32_t parity = 0;  ///< of the probabilities' turn
  float grad_v[kDepthV / 2];

  /// Leaves probabilities to the other warpgroup, when it has read those before.
  __device__ __forceinline__ void send(const float (&probs)[kPairs]) {
    stages.shared.probs_empty.wait(parity ^ 1);
    parity ^= 1;
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
#pragma unroll
    for (int i = 0; i < kPairs / 4; ++i)
      stages.shared.probs[i][thread] =
          make_float4(probs[4 * i], probs[4 * i + 1], probs[4 * i + 2], probs[4 * i + 3]);
    stages.shared.probs_full.arrive();
  }

  __device__ __forceinline__ void add(const RingCursor<Memory::kStages>& cursor, int query) {
    Memory& shared = stages.shared;
    auto& stage = shared.stages[cursor.stage];
    float scores[kPairs];
    uint32_t factors[kQueries / 16][4];
    begin_products();
    start_row_products(scores, shared.k, 0, stage.q);
    commit_products();
    wait_products<0>();
    fence_values(scores);
    shared.sums_full[cursor.stage].wait(cursor.parity);
    key_grads::finish_scores(scores, shared.lse[cursor.stage], stages.params.heads.scale * kLog2E);
    const Mask mask = stages.mask();
    if (mask.is_needed(query)) mask.apply(scores, query);
    send(scores);
    pack_values<kQueries>(scores, factors);
    begin_products();
    start_column_products<kQueries, kDepthV>(grad_v, factors, stage.grad_o);
    commit_products();
    wait_products<0>();
    fence_values(grad_v);
  }

  __device__ __forceinline__ void run() {
    clear_values(grad_v);
    stages.run([&](const auto& cursor, int, int query) { add(cursor, query); });
    stages.template store<kDepthV>(stages.params.grad_v, grad_v, 1,
                                   stages.params.heads.head_size_v);
  }
};

/// The warpgroup that sums up the keys' gradients.
template <int kDepth, int kDepthV, bool kRing>
struct KeySums {
  using Memory = Shared<kDepth, kDepthV>;
  Stages<kDepth, kDepthV, kRing> stages;
  int half;  ///< of the item's keys
  bool keeps_pairs;
  int turn = 0;
  uint32_t parity = 0;  ///< of the probabilities' turn
  float grad_k[kDepth / 2];

  /// The probabilities that the other warpgroup has computed.
  __device__ __forceinline__ void receive(float (&probs)[kPairs]) {
    stages.shared.probs_full.wait(parity);
    parity ^= 1;
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
#pragma unroll
    for (int i = 0; i < kPairs / 4; ++i) {
      const float4 four = stages.shared.probs[i][thread];
      probs[4 * i] = four.x;
      probs[4 * i + 1] = four.y;
      probs[4 * i + 2] = four.z;
      probs[4 * i + 3] = four.w;
    }
    stages.shared.probs_empty.arrive();
  }

  __device__ __forceinline__ void keep_pairs(const uint32_t (&factors)[kQueries / 16][4], int head,
                                             int query) {
    Value* const buffer = stages.shared.pairs[turn % kSentBuffers].tiles[0];
    ++turn;
    const PairTiles tiles(stages.params.pairs, stages.task.item, head);
    const int block = stages.task.item.first / kTensorBlock;
    key_grads::send_pairs<kSentBuffers>(tiles.at(block, half, query / 64), buffer, factors,
                                        kSendBarrier);
  }

  __device__ __forceinline__ void add(const RingCursor<Memory::kStages>& cursor, int head,
                                      int query) {
    Memory& shared = stages.shared;
    auto& stage = shared.stages[cursor.stage];
    float grads[kPairs];
    float probs[kPairs];
    uint32_t factors[kQueries / 16][4];
    begin_products();
    start_row_products(grads, shared.v, 0, stage.grad_o);
    commit_products();
    wait_products<0>();
    fence_values(grads);
    receive(probs);
    shared.sums_full[cursor.stage].wait(cursor.parity);
    key_grads::finish_grads(probs, grads, shared.delta[cursor.stage]);
    const Mask mask = stages.mask();
    if (mask.is_needed(query)) mask.apply(grads, query);
    pack_values<kQueries>(grads, factors);
    begin_products();
    start_column_products<kQueries, kDepth>(grad_k, factors, stage.q);
    commit_products();
    if constexpr (!kRing) {
      if (keeps_pairs) keep_pairs(factors, head, query);
    }
    wait_products<0>();
    fence_values(grad_k);
  }

  __device__ __forceinline__ void run() {
    clear_values(grad_k);
    stages.run([&](const auto& cursor, int head, int query) { add(cursor, head, query); });
    const Heads& heads = stages.params.heads;
    stages.template store<kDepth>(stages.params.grad_k, grad_k, heads.scale, heads.head_size);
    // Shared memory ends with the block.
    if (threadIdx.x % kWarpgroup == 0) wait_stores_read<0>();
  }
};

using Roles = WarpRoles<24, 240, kConsumers>;

template <int kDepth, int kDepthV, bool kRing>
__global__ void __launch_bounds__(kTensorThreads, 1)
    wide_key_grads_kernel(const __grid_constant__ TensorParams params) {
  wait_for_earlier();
  let_next_begin_if_short();
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kDepth, kDepthV>*>(memory);
  // Neighbouring blocks have the halves of an item, which read the same.
  const int half = static_cast<int>(blockIdx.x) % kBlocksOfItem;
  const int at = static_cast<int>(blockIdx.x) / kBlocksOfItem;
  if (at >= *params.num_items * params.pairs.num_kv_heads) return;
  Task task = key_grads::task_of(params, at);
  task.item.first += half * kBlockRows;
  if (task.item.first >= task.item.length) return;
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    Roles::begin_feeding();
    if (threadIdx.x < 32) key_grads::produce<kRing>(shared, params, task);
    return;
  }
  Roles::begin_multiplying();
  const Stages<kDepth, kDepthV, kRing> stages{shared, params, task};
  if (own_group() == 0) {
    ValueSums<kDepth, kDepthV, kRing> sums{stages};
    sums.run();
  } else {
    const bool keeps_pairs = params.pairs.tiles != nullptr && *params.pairs.fit != 0;
    KeySums<kDepth, kDepthV, kRing> sums{stages, half, keeps_pairs};
    sums.run();
  }
}

template <int kDepth, int kDepthV>
void launch(const TensorParams& params, cudaStream_t stream) {
  const auto kernel = params.ring.num_runs > 0 ? wide_key_grads_kernel<kDepth, kDepthV, true>
                                               : wide_key_grads_kernel<kDepth, kDepthV, false>;
  launch_tensor<Shared<kDepth, kDepthV>>(
      kernel, params, params.max_items * kBlocksOfItem * params.pairs.num_kv_heads, stream);
}

}  // namespace

void launch_wide_key_grads(const TensorParams& params, cudaStream_t stream) {
  with_head_sizes(params.heads.head_size, params.heads.head_size_v, [&]<int kDepth, int kDepthV>() {
    if constexpr (kDepth > 128) launch<kDepth, kDepthV>(params, stream);
  });
}

}  // namespace tessera::cuda::attention
