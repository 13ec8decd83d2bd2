// Attention's forward for large heads: a thread block takes 64 queries and goes over what they see,
// 32 keys at a time. Each warpgroup computes the scores of half of the elements, adds those that
// the other has, and sums up half of the values' elements; while one tile's scores become
// probabilities, the products of the tile before with its values run.
#include "ops/attention/large_heads.cuh"
#include "ops/attention/online_softmax.cuh"
#include "ops/cuda/short_kernel.cuh"

namespace tessera::cuda::large_heads {
namespace {

using attention::rescale;
using attention::Softmax;

// Of rows whose first tiles they do not see at all.
constexpr float kLeastScore = -1e30F;

template <int kDepth, bool kShared>
struct Shared {
  static constexpr int kStages = kShared ? 4 : 2;
  Operand<kRows, kDepth> q;
  KeyValueRows<kColumns, kDepth, kShared> stages[kStages];
  Swap swap;
  Unit unit;
  Barrier rows_full;
  Barrier rows_empty;
  Barrier full[kStages];
  Barrier empty[kStages];

  template <typename PlaceOf>
  __device__ __forceinline__ void copy_queries(const Params& params, int first,
                                               const PlaceOf& place_of) {
    copy_eight(q, first, params.q, params.heads.head_size, place_of);
  }
};

template <int kDepth, bool kShared>
struct Consumer {
  using Memory = Shared<kDepth, kShared>;
  Memory& shared;
  const Params& params;
  Softmax softmax;
  Unit unit;
  RingCursor<Memory::kStages> cursor;
  float o[kSum / 2];

  __device__ __forceinline__ void run() {
    for (uint32_t parity = 0;; parity ^= 1) {
      shared.rows_full.wait(parity);
      fence_shared_for_async();
      unit = shared.unit;
      if (unit.num_tiles < 0) return;
      clear_values(o);
      softmax.clear(kLeastScore);
      if (unit.num_tiles > 0) {
        run_tiles();
      } else {
        shared.rows_empty.arrive();
      }
      store();
    }
  }

  /// The present stage's, when it is there.
  __device__ __forceinline__ void start_scores(float (&scores)[kPairs]) {
    shared.full[cursor.stage].wait(cursor.parity);
    fence_shared_for_async();
    clear_values(scores);
    begin_products();
    start_half(scores, shared.q, shared.stages[cursor.stage].k);
    commit_products();
  }

  __device__ __forceinline__ void start_outputs(int stage, const Factors& probs) {
    begin_products();
    start_sum<kSum>(o, probs, shared.stages[stage].v(), own_group() * kSumTiles);
    commit_products();
  }

  /// Halves of scores become probabilities.
  __device__ __forceinline__ void finish_scores(float (&scores)[kPairs], int tile) {
    float other[kPairs];
    if (tile + 1 == unit.num_tiles) shared.rows_empty.arrive();
    shared.swap.run(scores, other);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) scores[i] += other[i];
    const int column = (unit.first_tile + tile) * kColumns;
    if (unit.is_masked(column, params.heads.window))
      unit.mask(scores, column, params.heads.window, -INFINITY);
    softmax.add(scores);
  }

  __device__ __forceinline__ void run_tiles() {
    float scores[kPairs];
    Factors probs;
    start_scores(scores);
    wait_products<0>();
    fence_values(scores);
    finish_scores(scores, 0);
    attention::pack_values<kColumns>(scores, probs);
    for (int tile = 1; tile < unit.num_tiles; ++tile) {
      const int before = cursor.stage;
      cursor.advance();
      start_scores(scores);
      start_outputs(before, probs);
      wait_products<1>();
      fence_values(scores);
      finish_scores(scores, tile);
      wait_products<0>();
      fence_values(o);
      shared.empty[before].arrive();
      rescale(o, softmax.rescale);
      attention::pack_values<kColumns>(scores, probs);
    }
    start_outputs(cursor.stage, probs);
    wait_products<0>();
    fence_values(o);
    shared.empty[cursor.stage].arrive();
    cursor.advance();
  }

  /// Queries that see nothing have zeros.
  __device__ __forceinline__ void store() const {
    const attention::Heads& heads = params.heads;
    const int first = own_group() * kSum;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.row_sum(half);
      const int row = own_row() + half * 8;
      if (!unit.has(row)) continue;
      Value* const to = static_cast<Value*>(params.o) +
                        int64_t{unit.place(heads, row)} * heads.head_size_v + first;
      store_row<kSum>(to, o, half, sum == 0 ? 0.0F : 1 / sum, heads.head_size_v - first);
      if (own_column() == 0 && own_group() == 0)
        params.lse[unit.place_of_sums(heads, row)] =
            sum == 0 ? 0.0F : softmax.max[half] * softmax.to_log2 * kLn2 + logf(sum);
    }
  }
};

template <int kDepth, bool kShared>
__global__ void __launch_bounds__(attention::kTensorThreads, 1)
    large_forward_kernel(const __grid_constant__ Params params) {
  wait_for_earlier();
  let_next_begin_if_short();
  run_units<Shared<kDepth, kShared>>(params, [&](Shared<kDepth, kShared>& shared) {
    Consumer<kDepth, kShared> consumer{shared, params, {params.heads.scale * kLog2E}};
    consumer.run();
  });
}

}  // namespace

bool fits(int64_t head_size, int64_t head_size_v) {
  return head_size % 8 == 0 && head_size_v % 8 == 0 && head_size <= kMostSize &&
         head_size_v <= kMostSizeV;
}

void launch_forward(const Params& params, cudaStream_t stream) {
  if (params.chosen != nullptr) launch_check_choice(params, stream);
  with_sizes(params, [&]<int kDepth, bool kShared>() {
    launch<Shared<kDepth, kShared>>(large_forward_kernel<kDepth, kShared>, params, params.num_sms,
                                    stream);
  });
}

}  // namespace tessera::cuda::large_heads
