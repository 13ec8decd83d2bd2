// The gradient of FC2's input, grad · W_eᵀ, and what it gives behind the activation: the gradients
// of gate, up and probability, and the activation itself again. Beside each of the first
// stages of the next tile's products the gradients of 32 tokens take the place of their gates and
// ups, which TMA has fetched, and leave, and it fetches the next.
#include "ops/cuda/activation_math.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/expert_activation/activated_product_kernels.h"
#include "ops/expert_activation/activated_store.cuh"
#include "ops/grouped_matmul/grouped_pipeline.cuh"
#include "ops/grouped_matmul/grouped_store.cuh"

namespace tessera::cuda {
namespace {

using namespace grouped;

constexpr int kOwnFeatures = 64;  // of a warpgroup
constexpr int kPieceTokens = 16;  // that a warp works on at once, with 16 features
constexpr int kPieceFeatures = kProbPartialFeatures;

// More leave too few registers for what is done with the results.
constexpr int kGradTileTokens = 192;

struct KeptGrads : KeptTile<kGradTileTokens> {
  uint32_t parity;  // of the fetched tiles' barrier
};

/// Adds up, over the features, each token's sums of one piece: in, this thread's of tokens 8 e + 2
/// (lane % 4) + i in dots[e][i]; out, that of token piece_token(lane). Lanes that differ in bit 2
/// alone hold the same.
__device__ __forceinline__ float sum_piece(const float (&dots)[2][2], int lane) {
  const bool upper_eight = (lane & 16) != 0;
  float two[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float own = upper_eight ? dots[1][i] : dots[0][i];
    const float other = upper_eight ? dots[0][i] : dots[1][i];
    two[i] = own + __shfl_xor_sync(~0u, other, 16);
  }
  const bool second = (lane & 8) != 0;
  const float own = second ? two[1] : two[0];
  const float other = second ? two[0] : two[1];
  const float sum = own + __shfl_xor_sync(~0u, other, 8);
  return sum + __shfl_xor_sync(~0u, sum, 4);
}
__device__ __forceinline__ int piece_token(int lane) {
  return lane / 16 * 8 + lane % 4 * 2 + lane / 8 % 2;
}

struct WriteGradients {
  using Params = ActivationGradParams;
  using Kept = KeptGrads;
  static constexpr int kTileTokens = kGradTileTokens;
  static constexpr int kBoxTokens = kActivatedBoxTokens;
  static constexpr bool kGathers = false;
  static constexpr SparsePart kSparse = SparsePart::kNone;
  static constexpr bool kLongSteps = true;
  using Operands = Bf16Operands;
  static constexpr TileMajor kWeightMajor = TileMajor::kReduction;
  static constexpr int kSteps = kTileTokens / kStoreTokens;

  using Tiles = ActivatedTiles<kOwnFeatures>;
  struct Store {
    Tiles tiles[2][2];  // of each warpgroup that multiplies
    Barrier fetched[2];
  };
  static __device__ void init(Store& memory) {
    for (Barrier& barrier : memory.fetched) barrier.init(1);
  }

  static __device__ int features(const Params& params, int expert) {
    return params.block_begin[expert + 1] - params.block_begin[expert];
  }
  static __device__ int reduction(const Params& params, int /*expert*/) { return params.wide; }

  static __device__ void load_weight(Value* tile, const Params& params, const Work& work, int k,
                                     Barrier* full) {
    load_box(tile, &params.weight, {k, work.weight_row + work.feature}, full);
  }

  static __device__ __forceinline__ Place place(Place tile, int group) {
    tile.feature += group * kOwnFeatures;
    if (tile.feature >= tile.num_features) tile.num_rows = 0;
    return tile;
  }

  template <int kColumns>
  static __device__ __forceinline__ void keep(Kept& kept, const float (&d)[kColumns / 2],
                                              int /*half*/) {
    keep_tile<kColumns>(kept, d);
  }

  static __device__ __forceinline__ void begin_store(Store& memory, const Params& params,
                                                     Kept& kept, const Place& place, int group) {
    kept.prob = load_prob(params.probs, place, 0);
    sync_threads(1 + group, kWarpgroup);  // all have stored what TMA does not
    if (is_leader() && place.num_rows > 0) {
      wait_stores_read<0>();
      fetch(memory.tiles[group][0], params, place, 0, &memory.fetched[group]);
    }
  }

  static __device__ __forceinline__ void store_step(Store& memory, const Params& params, Kept& kept,
                                                    const Place& place, int step, int group) {
    const int first = step * kStoreTokens;
    if (first >= place.num_rows) return;
    Barrier* const fetched = &memory.fetched[group];
    Tiles& tiles = memory.tiles[group][step % 2];
    fetched->wait(kept.parity);
    kept.parity ^= 1;
#pragma unroll
    for (int piece = 0; piece < kStoreTokens / kPieceTokens; ++piece)
      differentiate_piece(tiles, params, kept, place, first, piece);
    fence_shared_for_async();
    sync_threads(1 + group, kWarpgroup);
    store(tiles, params, place, first);
    const int next = first + kStoreTokens;
    if (is_leader()) {
      commit_stores();
      wait_stores_read<1>();
      if (next < place.num_rows)
        fetch(memory.tiles[group][(step + 1) % 2], params, place, next, fetched);
    }
    kept.prob = load_prob(params.probs, place, next);
    drop_stored<kStoreTokens>(kept);
  }

 private:
  static __device__ __forceinline__ void fetch(Tiles& tiles, const Params& params,
                                               const Place& place, int first, Barrier* fetched) {
    fetched->arrive_and_expect(sizeof(tiles.gate) + sizeof(tiles.up));
    load_box(tiles.gate, &params.pre_map, {place.feature, place.row + first}, fetched);
    load_box(tiles.up, &params.pre_map, {place.num_features + place.feature, place.row + first},
             fetched);
  }

  static __device__ __forceinline__ void store(const Tiles& tiles, const Params& params,
                                               const Place& place, int first) {
    TilePlace to = {.row = place.row + first,
                    .num_rows = place.num_rows - first,
                    .column = place.feature,
                    .num_columns = place.num_features - place.feature};
    if (params.act != nullptr)
      store_tile<kOwnFeatures>(&params.act_map, static_cast<Value*>(params.act), place.num_features,
                               tiles.act, to);
    Value* const grad = static_cast<Value*>(params.y);
    store_tile<kOwnFeatures>(&params.y_map, grad, params.y_columns, tiles.gate, to);
    to.column += place.num_features;
    store_tile<kOwnFeatures>(&params.y_map, grad, params.y_columns, tiles.up, to);
  }

  /// By a warp, of its 16 features.
  static __device__ __forceinline__ void differentiate_piece(Tiles& tiles, const Params& params,
                                                             const Kept& kept, const Place& place,
                                                             int first, int piece) {
    const int lane = read_lane();
    const int warp = read_warp();
    const int token = piece * kPieceTokens + lane / 16 * 8 + lane % 8;
    const int at =
        token * kOwnFeatures + swizzled_chunk<kOwnFeatures>(warp * 2 + lane / 8 % 2, token) * 8;
    const int features_left = place.num_features - place.feature - warp * kPieceFeatures;
    uint32_t gates[4];
    uint32_t ups[4];
    uint32_t acts[4];
    load_matrices(gates, tiles.gate + at);
    load_matrices(ups, tiles.up + at);
    float dots[2][2] = {};
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const float2 prob = probs_of(kept.prob, lane, 2 * piece + eight);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 2 * eight + half;
        const float2 dot =
            differentiate(gates[i], ups[i], acts[i], kept.packed[4 * piece + i], prob);
        if (half * 8 < features_left) {
          dots[eight][0] += dot.x;
          dots[eight][1] += dot.y;
        }
      }
    }
    store_matrices(tiles.gate + at, gates[0], gates[1], gates[2], gates[3]);
    store_matrices(tiles.up + at, ups[0], ups[1], ups[2], ups[3]);
    if (params.act != nullptr) store_matrices(tiles.act + at, acts[0], acts[1], acts[2], acts[3]);
    if (params.prob_partials == nullptr) return;
    const float sum = sum_piece(dots, lane);
    const int row = first + piece * kPieceTokens + piece_token(lane);
    if (features_left > 0 && (lane & 4) == 0 && row < place.num_rows) {
      const int64_t partial = place.feature / kPieceFeatures + warp;
      params.prob_partials[partial * params.num_rows + place.row + row] = sum;
    }
  }

  /// Of one feature of two tokens: turns gate and up into their gradients, gives the activation,
  /// and returns the products with the gradient.
  static __device__ __forceinline__ float2 differentiate(uint32_t& gates, uint32_t& ups,
                                                         uint32_t& acts, uint32_t grads,
                                                         float2 prob) {
    const float2 gate = unpack(gates);
    const float2 up = unpack(ups);
    const float2 grad = unpack(grads);
    const Slope x = Silu::slope(gate.x);
    const Slope y = Silu::slope(gate.y);
    const float2 scaled = {grad.x * prob.x, grad.y * prob.y};
    gates = pack(scaled.x * up.x * x.derivative, scaled.y * up.y * y.derivative);
    ups = pack(scaled.x * x.value, scaled.y * y.value);
    acts = pack(x.value * up.x * prob.x, y.value * up.y * prob.y);
    return {x.value * up.x * grad.x, y.value * up.y * grad.y};
  }
};

constexpr int kSumRows = 32;
constexpr int kSumParts = 8;

/// A block sums kSumRows rows: thread (part, row) every kSumParts-th partial sum.
__global__ void __launch_bounds__(kSumRows* kSumParts) sum_probs(ProbSums sums) {
  wait_for_earlier();
  __shared__ float parts[kSumParts][kSumRows];
  const int lane = threadIdx.x % kSumRows;
  const int part = threadIdx.x / kSumRows;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kSumRows + lane;
  const bool is_used = row < *sums.num_rows_in_use;
  float sum = 0;
  if (is_used) {
#pragma unroll 8
    for (int i = part; i < sums.num_partials; i += kSumParts)
      sum += sums.partials[i * sums.num_rows + row];
  }
  parts[part][lane] = sum;
  __syncthreads();
  if (part != 0 || !is_used) return;
  for (int i = 1; i < kSumParts; ++i) sum += parts[i][lane];
  sums.grad_probs[row] = sum;
}

}  // namespace

void launch_activation_grad(const ActivationGradParams& params, cudaStream_t stream) {
  launch<WriteGradients>(params, stream);
}

void launch_prob_sums(const ProbSums& sums, cudaStream_t stream) {
  if (sums.num_rows == 0) return;
  const auto blocks = static_cast<unsigned>((sums.num_rows + kSumRows - 1) / kSumRows);
  launch_early(sum_probs, {blocks, kSumRows * kSumParts}, stream, sums);
}

}  // namespace tessera::cuda
