// The gradients of keys and values of large heads: a thread block takes 64 keys of one key-value
// head and goes over the queries that see them, 32 at a time. Either sum takes the registers of
// both warpgroups, so that the values' and the keys' are a kernel each.
#include <type_traits>

#include "ops/attention/large_heads.cuh"
#include "ops/cuda/short_kernel.cuh"

namespace tessera::cuda::large_heads {
namespace {

enum class Of { kValues, kKeys, kBoth };

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
  int per_outer;  ///< steps of a token, or of a head
  int num_steps;
  int64_t sums_row;  ///< of the rows of sums, the first key's; -1: the sums are the gradients
  Chunk chunk;       ///< where rows were chosen
  int first_head;    ///< else: of those the block goes over
  int query_row;     ///< else: of position 0
  int num_queries;   ///< else: positions from here on are not there
};

__device__ Block chosen_block(const Params& params, int idx) {
  const int group = params.heads.num_heads / params.heads.num_kv_heads;
  const Chunk chunk = params.choosers.chunks[idx / params.heads.num_kv_heads];
  const int kv_head = idx % params.heads.num_kv_heads;
  const int key_row = chunk.tile * kRows;
  const int parts = (group + kColumns - 1) / kColumns;
  const int64_t slot = int64_t{kv_head} * params.choosers.num_slots + chunk.slot;
  return {.kv_head = kv_head,
          .key_row = key_row,
          .num_keys = min(kRows, params.num_rows - key_row),
          .first_key = 0,
          .per_outer = parts,
          .num_steps = chunk.count * parts,
          .sums_row = chunk.slot < 0 ? -1 : slot * kRows,
          .chunk = chunk};
}

__device__ Block sequence_block(const Params& params, int idx) {
  const attention::Heads& heads = params.heads;
  const int group = heads.num_heads / heads.num_kv_heads;
  const int part = idx % params.num_parts;
  const int kv_head = idx / params.num_parts % heads.num_kv_heads;
  const Item item = params.items[idx / params.num_parts / heads.num_kv_heads];
  const int first_head = kv_head * group + group * part / params.num_parts;
  const int end_head = kv_head * group + group * (part + 1) / params.num_parts;
  // Keys that are first in their sequence are seen by most queries: the list's order reversed.
  const int first_key = item.num_after * kRows;
  const int key_row = item.key_row + first_key;
  const int end =
      heads.window == 0 ? item.length : min(item.length, first_key + kRows - 1 + heads.window);
  const int per_head = (end - first_key + kColumns - 1) / kColumns;
  return {.kv_head = kv_head,
          .key_row = key_row,
          .num_keys = min(kRows, item.length - first_key),
          .first_key = first_key,
          .per_outer = per_head,
          .num_steps = per_head * (end_head - first_head),
          .sums_row = params.num_parts == 1 ? -1 : int64_t{part} * params.num_rows + key_row,
          .chunk = {},
          .first_head = first_head,
          .query_row = item.query_row,
          .num_queries = item.length};
}

/// What a lane of the warpgroup that feeds has of a step's query.
struct Query {
  int place;  ///< among all heads of all tokens; -1: it is not there
  float lse;  ///< of the first warp
  float delta;
  Sight sight;
};

/// The queries of a block's steps.
struct Queries {
  const Params& params;
  const Block& block;

  /// The token of a step, or of its first query, which `at` needs. It is asked for a step ahead,
  /// since what else there is to be read lies where it says.
  __device__ __forceinline__ int token(int step) const {
    const int outer = step / block.per_outer;
    if (params.chosen == nullptr)
      return block.query_row + block.first_key + (step - outer * block.per_outer) * kColumns;
    const int64_t list = int64_t{block.chunk.tile} * params.heads.num_rows;
    return params.choosers.tokens[list + block.chunk.first + min(outer, block.chunk.count - 1)];
  }

  __device__ __forceinline__ Query at(int step, int token) const {
    const attention::Heads& heads = params.heads;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int outer = step / block.per_outer;
    const int inner = (step - outer * block.per_outer) * kColumns;
    Query query{.place = -1, .lse = INFINITY, .delta = 0};
    int head;
    bool is_there;
    if (params.chosen == nullptr) {
      head = block.first_head + outer;
      is_there = block.first_key + inner + lane < block.num_queries;
      query.sight = {~uint64_t{0}, block.first_key + inner};
      token += lane;
    } else {
      const int group = heads.num_heads / heads.num_kv_heads;
      head = block.kv_head * group + inner + lane;
      is_there = inner + lane < group;
      query.sight.query = kRows;  // behind all keys
      if (threadIdx.x == 0)
        query.sight.keys =
            params.choosers.masks[int64_t{block.chunk.tile} * heads.num_rows + token];
    }
    if (!is_there) return query;
    query.place = token * heads.num_heads + head;
    if (threadIdx.x < 32) {
      const int64_t sums = head * heads.num_rows + token;
      query.lse = params.lse[sums] * kLog2E;
      query.delta = params.delta[sums];
    }
    return query;
  }
};

/// By the warpgroup that feeds: each warp takes a quarter of the rows.
template <int kDepth, bool kShared, Of kOf>
struct Producer {
  using Memory = Shared<kDepth, kShared, kOf>;
  Memory& shared;
  const Params& params;
  const Block& block;

  __device__ void run() {
    copy_block();
    const Queries queries{params, block};
    RingCursor<Memory::kStages> cursor;
    int token = block.num_steps > 1 ? queries.token(1) : 0;
    Query next = block.num_steps > 0 ? queries.at(0, queries.token(0)) : Query{};
    for (int step = 0; step < block.num_steps; ++step) {
      const Query query = next;
      if (step + 1 < block.num_steps) next = queries.at(step + 1, token);
      if (step + 2 < block.num_steps) token = queries.token(step + 2);
      copy_step(query, cursor);
      cursor.advance();
    }
    wait_copies<0>();
  }

  __device__ void copy_block() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    for (int first = warp * 8; first < kRows; first += 8 * kFeedWarps) {
      const auto place = [&](int i) {
        return first + i < block.num_keys
                   ? (block.key_row + first + i) * params.heads.num_kv_heads + block.kv_head
                   : -1;
      };
      copy_eight(shared.k, first, params.k, params.heads.head_size, place);
      if constexpr (Memory::kHasValues)
        copy_eight(shared.values, first, params.v, params.heads.head_size_v, place);
    }
    arrive_when_copied(&shared.rows_full);
  }

  __device__ __forceinline__ void copy_step(const Query& query,
                                            const RingCursor<Memory::kStages>& cursor) {
    const int s = cursor.stage;
    const int first = static_cast<int>(threadIdx.x) / 32 * 8;
    const auto place = [&](int i) { return __shfl_sync(~0U, query.place, first + i); };
    shared.empty[s].wait(cursor.parity ^ 1);
    copy_eight(shared.stages[s].q, first, params.q, params.heads.head_size, place);
    copy_eight(shared.stages[s].grad_o, first, params.grad_o, params.heads.head_size_v, place);
    if (threadIdx.x < 32) {
      shared.lse[s][threadIdx.x] = query.lse;
      shared.delta[s][threadIdx.x] = query.delta;
    }
    if (threadIdx.x == 0) shared.sights[s] = query.sight;
    arrive_when_copied(&shared.full[s]);
    shared.full[s].arrive();
  }
};

template <int kDepth, bool kShared, Of kOf>
struct Consumer {
  using Memory = Shared<kDepth, kShared, kOf>;
  static constexpr int kSumDepth = kOf == Of::kValues ? kMostSizeV : kDepth;
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
    float probs[kPairs];
    float grads[kPairs];
    Factors of_values;
    Factors of_keys;
    if constexpr (kOf == Of::kValues) {
      multiply_halves(probs);
    } else {
      multiply_pairs(probs, grads);
    }
    if constexpr (kOf != Of::kKeys) attention::pack_values<kColumns>(probs, of_values);
    if constexpr (kOf != Of::kValues) {
      differentiate(probs, grads);
      attention::pack_values<kColumns>(grads, of_keys);
    }
    begin_products();
    if constexpr (kOf != Of::kKeys) sum.start(of_values, stage.grad_o);
    if constexpr (kOf != Of::kValues) sum.start(of_keys, stage.q);
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

  /// Probabilities and their gradients: the first warpgroup computes the ones, the other the
  /// others.
  __device__ __forceinline__ void multiply_pairs(float (&probs)[kPairs], float (&grads)[kPairs]) {
    const auto& stage = shared.stages[cursor.stage];
    const bool is_first = own_group() == 0;
    const uint64_t rows = is_first ? describe_rows(shared.k) : describe_rows(shared.v());
    const uint64_t columns = is_first ? describe_rows(stage.q) : describe_rows(stage.grad_o);
    float own[kPairs];
    float other[kPairs];
    multiply<kDepth>(own, rows, columns, describe_rows(shared.k), describe_rows(stage.q));
    if (is_first) finish_scores(own);
    shared.swap.run(own, other);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      probs[i] = is_first ? own[i] : other[i];
      grads[i] = is_first ? other[i] : own[i];
    }
  }

  /// Gradients of probabilities become those of what the keys are multiplied by.
  __device__ __forceinline__ void differentiate(const float (&probs)[kPairs],
                                                float (&grads)[kPairs]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int column = i / 4 * 8 + own_column() + i % 2;
      grads[i] = probs[i] * (grads[i] - shared.delta[cursor.stage][column]);
      if constexpr (kOf == Of::kBoth) grads[i] *= params.heads.scale;
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
    const int size = kOf == Of::kValues ? heads.head_size_v : heads.head_size;
    const float factor = kOf == Of::kKeys ? heads.scale : 1;
    void* const grad = kOf == Of::kValues ? params.grad_v : params.grad_k;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row() + half * 8;
      if (row >= block.num_keys) continue;
      const int64_t place = int64_t{block.key_row + row} * heads.num_kv_heads + block.kv_head;
      if (block.sums_row < 0) {
        sum.store(static_cast<Value*>(grad) + place * size, half, factor, size);
      } else if (params.chosen != nullptr) {
        sum.store(params.sums + (block.sums_row + row) * size, half, factor, size);
      } else {
        const int64_t at = (block.sums_row + row) * heads.num_kv_heads + block.kv_head;
        sum.store(params.sums + at * size, half, factor, size);
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
  const int count = is_chosen ? *params.choosers.num_chunks : *params.num_items * params.num_parts;
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

template <int kDepth, bool kShared, Of kOf>
void launch_sums(const Params& params, cudaStream_t stream) {
  const bool is_chosen = params.chosen != nullptr;
  const int64_t count = is_chosen ? num_key_tiles(params.num_rows) + kMoreBlocks
                                  : int64_t{params.max_items} * params.num_parts;
  launch<Shared<kDepth, kShared, kOf>>(large_key_grads_kernel<kDepth, kShared, kOf>, params,
                                       count * params.heads.num_kv_heads, stream);
  launch_add_sums(params, kOf == Of::kValues ? params.grad_v : params.grad_k,
                  kOf == Of::kValues ? params.heads.head_size_v : params.heads.head_size, stream);
}

}  // namespace

void launch_key_grads(const Params& params, cudaStream_t stream) {
  if (params.chosen != nullptr) launch_list_choosers(params, stream);
  with_sizes(params, [&]<int kDepth, bool kShared>() {
    if constexpr (kShared) {
      launch_sums<kDepth, kShared, Of::kBoth>(params, stream);
      const int64_t row_bytes = int64_t{params.heads.num_kv_heads} * params.heads.head_size * 2;
      check(cudaMemsetAsync(params.grad_v, 0, params.num_rows * row_bytes, stream));
    } else {
      launch_sums<kDepth, kShared, Of::kValues>(params, stream);
      launch_sums<kDepth, kShared, Of::kKeys>(params, stream);
    }
  });
}

}  // namespace tessera::cuda::large_heads
