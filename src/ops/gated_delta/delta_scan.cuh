#pragma once

#include "ops/cuda/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/pipeline/warp_roles.cuh"
#include "ops/gated_delta/delta_tiles.cuh"

/// The states of delta rules from chunk to chunk, and their gradients back, on tensor cores: a
/// block takes kColumns columns of values of a head of one sequence, whose state it keeps in
/// registers in F32 and in shared memory in BF16. One warpgroup feeds: the next chunk's operands
/// arrive while two work on one.
namespace tessera::cuda {

using ScanRoles = WarpRoles<40, 216, 2>;
constexpr int kScanWorkers = 2 * kWarpgroup;

/// Barriers of those that multiply; 0 is all threads'.
enum ScanBarrier : uint32_t { kWork = 1, kGroup };  // and the second group's

/// Whether each warpgroup has columns of values of its own.
template <int kColumns>
constexpr bool kIsWide = kColumns > kTileColumns;

enum class ScanKind {
  kOutputs,  // o, by queries
  kKeeps,    // for the backward pass, states and what tokens write
  kBack,     // gradients of states, and of what tokens write
};

template <int kRows, int kColumns>
struct NoMatrix {};
template <bool kIsThere, int kRows, int kColumns>
using MatrixIf =
    std::conditional_t<kIsThere, TiledMatrix<kRows, kColumns>, NoMatrix<kRows, kColumns>>;

/// What a scan reads and gives beside scratch memory. Where each element of a key has a decay, its
/// heads have keys of their own, q and k are those that the decays of earlier tokens of the chunk
/// leave of them, and rows' factors but for beta are 1.
struct ScanOperands {
  const void* q;
  const void* k;
  const void* values;  ///< v or, on the way back, the gradient of o
  void* results;       ///< o or the gradient of v
  float* states;       ///< F32 [N, Dk, Dv] of one sequence that go on, or null
  // With decays by element alone.
  const void* k_rest = nullptr;  ///< [T, N, Dk] k times what later tokens of the chunk leave
  const float* kept = nullptr;   ///< [chunks, N, Dk] of the state before in that behind
};

/// What of a chunk comes from global memory. v is the gradient of o on the way back.
template <int kKeySize, int kColumns, ScanKind kKind, bool kByElement>
struct ScanStage {
  static constexpr bool kHasQueries = kKind != ScanKind::kKeeps;
  TiledMatrix<kDeltaRows, kKeySize> k;
  MatrixIf<kHasQueries, kDeltaRows, kKeySize> q;
  TiledMatrix<kDeltaRows, kColumns> v;
  TiledMatrix<kDeltaRows, kDeltaRows> inverse;
  MatrixIf<kHasQueries, kDeltaRows, kDeltaRows> p_inverse;
  MatrixIf<kByElement, kDeltaRows, kKeySize> k_rest;
  alignas(16) DeltaFactors factors;
  alignas(16) float kept[kByElement ? kKeySize : 4];

  /// The keys by which tokens write.
  __device__ __forceinline__ const TiledMatrix<kDeltaRows, kKeySize>& writers() const {
    if constexpr (kByElement) {
      return k_rest;
    } else {
      return k;
    }
  }

  /// By the warpgroup that feeds.
  __device__ __forceinline__ void load(const FastPlace& at, const FastDelta& scratch,
                                       const ScanOperands& operands, int column) {
    const DeltaOperands& x = at.x;
    const int count = at.count();
    k.template copy_from<kWarpgroup>(bf16(operands.k) + at.key_at(), x.key_stride(), count);
    v.template copy_from<kWarpgroup>(bf16(operands.values) + at.value_at() + column,
                                     x.value_stride(), count);
    inverse.template copy_from<kWarpgroup>(bf16(scratch.inverse) + at.square_at(), kDeltaRows,
                                           kDeltaRows);
    if constexpr (kHasQueries) {
      q.template copy_from<kWarpgroup>(bf16(operands.q) + at.key_at(), x.key_stride(), count);
      p_inverse.template copy_from<kWarpgroup>(bf16(scratch.p_inverse) + at.square_at(), kDeltaRows,
                                               kDeltaRows);
    }
    copy_factors(&factors, scratch.factors + at.task());
    if constexpr (kByElement) {
      k_rest.template copy_from<kWarpgroup>(bf16(operands.k_rest) + at.key_at(), x.key_stride(),
                                            count);
      const int first = 4 * static_cast<int>(threadIdx.x);
      if (first < kKeySize)
        copy_async_or_zero(kept + first, operands.kept + at.task() * kKeySize + first, true);
    }
  }
};

template <int kKeySize, int kColumns, ScanKind kKind, bool kByElement>
struct ScanShared {
  ScanStage<kKeySize, kColumns, kKind, kByElement> stages[2];
  TiledMatrix<kKeySize, kColumns> state;
  TiledMatrix<kDeltaRows, kColumns> right;
  TiledMatrix<kDeltaRows, kColumns> written;
  Barrier full[2];
  Barrier empty[2];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < 2; ++i) {
      full[i].init(kWarpgroup);
      empty[i].init(kScanWorkers);
    }
    fence_barrier_init();
  }
};

/// A warpgroup's part of a state or its gradient: 64 rows or, where there are no more, columns.
/// Where there are no more of these either, the second has what the first has, and leaves it.
template <int kKeySize, int kColumns>
struct StateTile {
  static constexpr bool kByRows = kKeySize > kTileColumns;
  static constexpr int kOwnColumns = kByRows ? kColumns : kTileColumns;
  using Tile = GroupTile<kOwnColumns>;

  Tile tile;
  int row;
  int column;
  bool is_there;

  __device__ __forceinline__ explicit StateTile(int group)
      : row(kByRows ? group * kTileColumns : 0),
        column(kByRows || kColumns == kTileColumns ? 0 : group * kTileColumns),
        is_there(kByRows || kColumns > kTileColumns || group == 0) {}

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (float& sum : tile.sums) sum *= factor;
  }
  /// A row by its key element's factor.
  __device__ __forceinline__ void scale(const float* kept) {
    const float factors[2] = {kept[row + Tile::row(0)], kept[row + Tile::row(1)]};
    tile.for_each_pair([&](int h, int /*j*/, float& a, float& b) {
      a *= factors[h];
      b *= factors[h];
    });
  }
  /// Adds keysᵀ values.
  __device__ __forceinline__ void add(const TiledMatrix<kDeltaRows, kKeySize>& keys,
                                      const TiledMatrix<kDeltaRows, kColumns>& values) {
    tile.template add<kDeltaRows>(across(keys, row), across(values, column));
  }
  __device__ __forceinline__ void round_to(TiledMatrix<kKeySize, kColumns>& shared) {
    if (!is_there) return;
    const typename Tile::template Place<kKeySize> place;
    BFloat16* to = shared.values + row * kTileColumns;
    tile.for_each_pair([&](int h, int j, float a, float b) {
      store_pair(to + place.at(h, column / 8 + j), a, b);
    });
  }
  /// To BF16 [Dk, Dv].
  __device__ __forceinline__ void write_rounded(BFloat16* to, int64_t stride) const {
    if (is_there) tile.write(to + row * stride + column, stride, kTileColumns);
  }
  /// From and to F32 [Dk, Dv].
  __device__ __forceinline__ void read(const float* from, int64_t stride) {
    if (!is_there) return;
    tile.for_each_pair([&](int h, int j, float& a, float& b) {
      const float2 two = *reinterpret_cast<const float2*>(from + (row + Tile::row(h)) * stride +
                                                          column + Tile::column(j));
      a = two.x;
      b = two.y;
    });
  }
  __device__ __forceinline__ void write(float* to, int64_t stride) {
    if (!is_there) return;
    tile.for_each_pair([&](int h, int j, float a, float b) {
      *reinterpret_cast<float2*>(to + (row + Tile::row(h)) * stride + column + Tile::column(j)) = {
          a, b};
    });
  }
};

/// A block's way through a sequence.
struct ScanChunks {
  DeltaSequence sequence;
  int first;
  int count;  ///< 0: nothing to do

  __device__ __forceinline__ ScanChunks(const DeltaOperands& x, bool back)
      : sequence(x, static_cast<int>(blockIdx.x)), first(sequence.first_chunk()), count(0) {
    if (sequence.begin >= sequence.end) return;
    const int last = sequence.last_chunk();
    // Of one chunk alone another sequence may have both states.
    if (first == last && !(back ? sequence.has_last(last, x.tokens) : sequence.has_first(last)))
      return;
    count = last - first + 1;
    if (back) first = last;
  }
};

template <int kKeySize, int kColumns, ScanKind kKind, bool kByElement>
class Scan {
  static constexpr bool kIsBack = kKind == ScanKind::kBack;
  /// Whether a warpgroup has the rows of keys and the other those of queries, or each some columns.
  static constexpr bool kHasOutputs = kKind == ScanKind::kOutputs;
  static constexpr int kOwnColumns = kHasOutputs ? kColumns : kTileColumns;
  using Shared = ScanShared<kKeySize, kColumns, kKind, kByElement>;
  using Stage = ScanStage<kKeySize, kColumns, kKind, kByElement>;
  using State = StateTile<kKeySize, kColumns>;
  using Tile = GroupTile<kOwnColumns>;
  using Values = TiledMatrix<kDeltaRows, kColumns>;

 public:
  __device__ __forceinline__ Scan(const DeltaOperands& x, const FastDelta& scratch,
                                  const ScanOperands& operands, Shared& shared)
      : x_(x),
        scratch_(scratch),
        operands_(operands),
        shared_(shared),
        chunks_(x, kIsBack),
        head_(static_cast<int>(blockIdx.y)),
        first_column_(static_cast<int>(blockIdx.z) * kColumns) {}

  __device__ __forceinline__ void feed() const {
    for (int i = 0; i < chunks_.count; ++i) {
      shared_.empty[i % 2].wait(i / 2 % 2 ^ 1);
      shared_.stages[i % 2].load(place(i), scratch_, operands_, first_column_);
      arrive_when_copied(&shared_.full[i % 2]);
    }
    wait_copies<0>();
  }

  __device__ __forceinline__ void multiply(int group) const {
    if (chunks_.count == 0) return;
    State state(group);
    const int64_t states_at =
        static_cast<int64_t>(head_) * kKeySize * x_.value_size + first_column_;
    if (operands_.states != nullptr && *x_.start != 0)
      state.read(operands_.states + states_at, x_.value_size);
    state.round_to(shared_.state);
    fence_shared_for_async();
    sync_threads(kWork, kScanWorkers);
    for (int i = 0; i < chunks_.count; ++i) {
      Stage& stage = shared_.stages[i % 2];
      shared_.full[i % 2].wait(i / 2 % 2);
      fence_shared_for_async();
      const FastPlace at = place(i);
      if (!kHasOutputs && is_own(at))
        state.write_rounded(
            bf16(kIsBack ? scratch_.state_grads : scratch_.states) + at.state_at() + first_column_,
            x_.value_size);
      Tile tile;
      if constexpr (kIsBack) {
        run_back(stage, at, group);
      } else if constexpr (kHasOutputs) {
        run_outputs(tile, stage, group);
      } else {
        run_keeping(stage, at, group);
      }
      if constexpr (kByElement) {
        state.scale(stage.kept);
      } else {
        state.scale(stage.factors.kept);
      }
      fence_shared_for_async();
      sync_threads(kWork, kScanWorkers);
      begin(state.tile);
      if constexpr (kIsBack) {
        state.add(stage.q, stage.v);
        state.add(stage.k, shared_.written);
      } else {
        state.add(stage.writers(), shared_.written);
      }
      end(state.tile);
      shared_.empty[i % 2].arrive();
      state.round_to(shared_.state);
      if (kHasOutputs && group == 1 && is_own(at))
        tile.write(bf16(operands_.results) + at.value_at() + first_column_, x_.value_stride(),
                   at.count());
      fence_shared_for_async();
      sync_threads(kWork, kScanWorkers);
    }
    if (operands_.states != nullptr) state.write(operands_.states + states_at, x_.value_size);
  }

 private:
  __device__ __forceinline__ FastPlace place(int i) const {
    return {x_, kIsBack ? chunks_.first - i : chunks_.first + i, head_};
  }
  /// Whether what is found of the chunk is this sequence's.
  __device__ __forceinline__ bool is_own(const FastPlace& at) const {
    return kIsBack ? chunks_.sequence.has_last(at.chunk, x_.tokens)
                   : chunks_.sequence.has_first(at.chunk);
  }
  static __device__ __forceinline__ void scale_rows(Tile& tile, float first, float second) {
    tile.for_each_pair([&](int h, int /*j*/, float& a, float& b) {
      const float factor = h == 0 ? first : second;
      a *= factor;
      b *= factor;
    });
  }
  /// Calls give(row) for a thread's two rows, and multiplies these.
  template <typename Give>
  static __device__ __forceinline__ void scale_rows(Tile& tile, Give give) {
    scale_rows(tile, give(Tile::row(0)), give(Tile::row(1)));
  }

  /// Makes of the products of keys and state, in the tile, what tokens are to write but for what
  /// they write themselves: beta (v - exp(G) k S).
  static __device__ __forceinline__ void make_right(Tile& tile, const Stage& stage, int column,
                                                    Values& right) {
    const DeltaFactors& c = stage.factors;
    const typename Tile::template Place<kDeltaRows> place;
    const int rows[2] = {Tile::row(0), Tile::row(1)};
    const float betas[2] = {c.beta[rows[0]], c.beta[rows[1]]};
    const float reads[2] = {-betas[0] * c.reads[rows[0]] * c.k_inverse[rows[0]],
                            -betas[1] * c.reads[rows[1]] * c.k_inverse[rows[1]]};
    tile.for_each_pair([&](int h, int j, float a, float b) {
      const int element = place.at(h, column / 8 + j);
      const float2 value = load_pair(stage.v.values + element);
      store_pair(right.values + element, betas[h] * value.x + reads[h] * a,
                 betas[h] * value.y + reads[h] * b);
    });
  }
  static __device__ __forceinline__ void scale_writes(Tile& tile, const Stage& stage) {
    const DeltaFactors& c = stage.factors;
    scale_rows(tile, [&](int row) { return c.writes[row] * c.k_inverse[row]; });
  }

  /// The keys' group leaves what is written, the queries' has o.
  __device__ __forceinline__ void run_outputs(Tile& tile, const Stage& stage, int group) const {
    const DeltaFactors& c = stage.factors;
    begin(tile);
    tile.template add<kKeySize>(along(group == 0 ? stage.k : stage.q), across(shared_.state));
    end(tile);
    if (group == 0) {
      make_right(tile, stage, 0, shared_.right);
    }
    // The keys' sums begin anew. A branch would have the compiler wait for each product.
    const float query = group == 0 ? 0.0F : 1.0F;
    scale_rows(tile, [&](int row) { return query * c.reads[row] * c.q_inverse[row]; });
    fence_shared_for_async();
    sync_threads(kWork, kScanWorkers);
    begin(tile);
    tile.template add<kDeltaRows>(along(group == 0 ? stage.inverse : stage.p_inverse),
                                  across(shared_.right));
    end(tile);
    if (group != 0) return;
    scale_writes(tile, stage);
    tile.round_to(shared_.written);
  }

  /// Each group has columns of its own, or the second what the first has, and leaves it.
  static __device__ __forceinline__ int own_column(int group) {
    return kIsWide<kColumns> ? group * kTileColumns : 0;
  }

  /// Behind what the next product of the same columns reads.
  static __device__ __forceinline__ void meet_in_columns(int group) {
    fence_shared_for_async();
    kIsWide<kColumns> ? sync_threads(kGroup + group, kWarpgroup)
                      : sync_threads(kGroup, kScanWorkers);
  }

  __device__ __forceinline__ void run_keeping(const Stage& stage, const FastPlace& at,
                                              int group) const {
    const int column = own_column(group);
    const bool leaves = kIsWide<kColumns> || group == 0;
    Tile tile;
    begin(tile);
    tile.template add<kKeySize>(along(stage.k), across(shared_.state, column));
    end(tile);
    if (leaves) make_right(tile, stage, column, shared_.right);
    meet_in_columns(group);
    tile = {};
    begin(tile);
    tile.template add<kDeltaRows>(along(stage.inverse), across(shared_.right, column));
    end(tile);
    if (leaves && is_own(at))
      tile.write(bf16(scratch_.written) + at.value_at() + first_column_ + column, x_.value_stride(),
                 at.count());
    scale_writes(tile, stage);
    if (leaves) tile.round_to(shared_.written, column);
  }

  __device__ __forceinline__ void run_back(Stage& stage, const FastPlace& at, int group) const {
    const int column = own_column(group);
    const bool leaves = kIsWide<kColumns> || group == 0;
    const DeltaFactors& c = stage.factors;
    Tile tile;
    begin(tile);
    tile.template add<kKeySize>(along(stage.writers()), across(shared_.state, column));
    end(tile);
    scale_writes(tile, stage);
    if (leaves) tile.round_to(shared_.right, column);
    meet_in_columns(group);
    tile = {};
    begin(tile);
    tile.template add<kDeltaRows>(across(stage.p_inverse), across(stage.v, column));
    tile.template add<kDeltaRows>(across(stage.inverse), across(shared_.right, column));
    end(tile);
    const int64_t to = at.value_at() + first_column_ + column;
    const bool writes = leaves && is_own(at);
    if (writes) tile.write(bf16(scratch_.of_right) + to, x_.value_stride(), at.count());
    scale_rows(tile, [&](int row) { return c.beta[row]; });
    if (writes) tile.write(bf16(operands_.results) + to, x_.value_stride(), at.count());
    // Towards the state before: in place of the gradient of o, that is another factor of it.
    scale_rows(tile, [&](int row) { return -c.reads[row] * c.k_inverse[row]; });
    if (!leaves) return;
    tile.round_to(shared_.written, column);
    scale_values(stage.v, c, column);
  }
  static __device__ __forceinline__ void scale_values(Values& values, const DeltaFactors& c,
                                                      int column) {
    const typename Tile::template Place<kDeltaRows> place;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float factor = c.reads[Tile::row(h)] * c.q_inverse[Tile::row(h)];
#pragma unroll
      for (int j = 0; j < kOwnColumns / 8; ++j) {
        BFloat16* pair = values.values + place.at(h, column / 8 + j);
        const float2 two = load_pair(pair);
        store_pair(pair, factor * two.x, factor * two.y);
      }
    }
  }

  const DeltaOperands& x_;
  const FastDelta& scratch_;
  const ScanOperands& operands_;
  Shared& shared_;
  ScanChunks chunks_;
  int head_;
  int first_column_;
};

template <int kKeySize, int kColumns, ScanKind kKind, bool kByElement>
__global__ void __launch_bounds__(ScanRoles::kThreads, 1)
    scan_delta(const __grid_constant__ DeltaOperands x, const __grid_constant__ FastDelta scratch,
               const __grid_constant__ ScanOperands operands) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<ScanShared<kKeySize, kColumns, kKind, kByElement>*>(memory);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  wait_for_earlier();
  const Scan<kKeySize, kColumns, kKind, kByElement> scan(x, scratch, operands, shared);
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    ScanRoles::begin_feeding();
    scan.feed();
  } else {
    ScanRoles::begin_multiplying();
    scan.multiply(warpgroup - 1);
  }
}

template <int kKeySize, int kColumns, ScanKind kKind, bool kByElement>
void launch_scan(const DeltaOperands& x, const FastDelta& scratch, const ScanOperands& operands,
                 cudaStream_t stream) {
  constexpr int kBytes = sizeof(ScanShared<kKeySize, kColumns, kKind, kByElement>);
  static_assert(kBytes <= kMaxShared);
  const auto kernel = scan_delta<kKeySize, kColumns, kKind, kByElement>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const dim3 blocks(static_cast<unsigned>(std::max(x.num_sequences, 1)),
                    static_cast<unsigned>(x.heads), static_cast<unsigned>(x.value_size / kColumns));
  launch_early(kernel, {blocks, ScanRoles::kThreads, kBytes}, stream, x, scratch, operands);
}

}  // namespace tessera::cuda
