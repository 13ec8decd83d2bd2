// The gradient of queries of large heads: a thread block takes 64 queries and goes over what they
// see, 32 keys at a time. One warpgroup computes the probabilities, the other their gradients; each
// sums up half of the queries' elements.
#include "ops/attention/large_heads.cuh"
#include "ops/cuda/short_kernel.cuh"

namespace tessera::cuda::large_heads {
namespace {

template <int kDepth, bool kShared>
struct Shared {
  static constexpr int kStages = kShared ? 2 : 1;
  Operand<kRows, kDepth> q;
  Operand<kRows, kMostSizeV> grad_o;
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
    copy_eight(grad_o, first, params.grad_o, params.heads.head_size_v, place_of);
  }
};

template <int kDepth, bool kShared>
struct Consumer {
  using Memory = Shared<kDepth, kShared>;
  Memory& shared;
  const Params& params;
  Unit unit;
  RingCursor<Memory::kStages> cursor;
  float lse[2];  ///< of this thread's rows, in units of log 2
  float delta[2];
  Sum<kDepth> grad_q;

  __device__ __forceinline__ void run() {
    for (uint32_t parity = 0;; parity ^= 1) {
      shared.rows_full.wait(parity);
      fence_shared_for_async();
      unit = shared.unit;
      if (unit.num_tiles < 0) return;
      grad_q.clear();
      load_sums();
      for (int tile = 0; tile < unit.num_tiles; ++tile) add_tile(tile);
      if (unit.num_tiles == 0) shared.rows_empty.arrive();
      store();
    }
  }

  __device__ __forceinline__ void load_sums() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row() + half * 8;
      const int64_t place = unit.place_of_sums(params.heads, row);
      lse[half] = unit.has(row) ? params.lse[place] * kLog2E : INFINITY;
      delta[half] = unit.has(row) ? params.delta[place] : 0;
    }
  }

  /// Scores become probabilities.
  __device__ __forceinline__ void finish_scores(float (&scores)[kPairs], int tile) const {
    const float to_log2 = params.heads.scale * kLog2E;
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      scores[i] = fast_exp2(fmaf(scores[i], to_log2, -lse[i / 2 % 2]));
    const int column = (unit.first_tile + tile) * kColumns;
    if (unit.is_masked(column, params.heads.window))
      unit.mask(scores, column, params.heads.window, 0);
  }

  __device__ __forceinline__ void add_tile(int tile) {
    float own[kPairs];
    float other[kPairs];
    Factors factors;
    shared.full[cursor.stage].wait(cursor.parity);
    fence_shared_for_async();
    // The first warpgroup's pairs are scores, the other's the gradients of probabilities.
    const bool is_first = own_group() == 0;
    const auto& stage = shared.stages[cursor.stage];
    const uint64_t rows = is_first ? describe_rows(shared.q) : describe_rows(shared.grad_o);
    const uint64_t columns = is_first ? describe_rows(stage.k) : describe_rows(stage.v());
    multiply<kDepth>(own, rows, columns, describe_rows(shared.q), describe_rows(stage.k));
    if (tile + 1 == unit.num_tiles) shared.rows_empty.arrive();
    if (is_first) finish_scores(own, tile);
    shared.swap.run(own, other);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float prob = is_first ? own[i] : other[i];
      const float grad = is_first ? other[i] : own[i];
      own[i] = prob * (grad - delta[i / 2 % 2]);
    }
    attention::pack_values<kColumns>(own, factors);
    begin_products();
    grad_q.start(factors, stage.k);
    commit_products();
    wait_products<0>();
    grad_q.fence();
    shared.empty[cursor.stage].arrive();
    cursor.advance();
  }

  __device__ __forceinline__ void store() const {
    const attention::Heads& heads = params.heads;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row() + half * 8;
      if (!unit.has(row)) continue;
      Value* const to =
          static_cast<Value*>(params.grad_q) + int64_t{unit.place(heads, row)} * heads.head_size;
      grad_q.store(to, half, heads.scale, heads.head_size);
    }
  }
};

template <int kDepth, bool kShared>
__global__ void __launch_bounds__(attention::kTensorThreads, 1)
    large_query_grad_kernel(const __grid_constant__ Params params) {
  wait_for_earlier();
  let_next_begin_if_short();
  run_units<Shared<kDepth, kShared>>(params, [&](Shared<kDepth, kShared>& shared) {
    Consumer<kDepth, kShared> consumer{shared, params};
    consumer.run();
  });
}

}  // namespace

void launch_query_grad(const Params& params, cudaStream_t stream) {
  with_sizes(params, [&]<int kDepth, bool kShared>() {
    launch<Shared<kDepth, kShared>>(large_query_grad_kernel<kDepth, kShared>, params,
                                    params.num_sms, stream);
  });
}

}  // namespace tessera::cuda::large_heads
