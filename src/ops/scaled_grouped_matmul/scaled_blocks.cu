// y = a · W_eᵀ of each expert's tokens, of E4M3 values whose blocks of 128 along the reduction have
// scales: the tensor cores' sums of a stage, which is such a block, are scaled and added up in F32.
#include "ops/cuda/pipeline/turns.cuh"
#include "ops/scaled_grouped_matmul/scaled_tiles.cuh"

namespace tessera::cuda {
namespace grouped {

/// Two sets of sums leave no registers in which results could wait: they are stored at once, while
/// the other warpgroup multiplies.
constexpr int kBlockTokens = 192;

using BlockTurns = Turns<3>;  // barriers behind those of stores

struct WriteScaledBlocks : WritesScaled<WriteScaledBlocks, kBlockTokens> {
  static constexpr bool kFeeds = true;

  struct Store {
    Value tiles[2][kBlockTokens * 64];  // of each warpgroup that multiplies
    alignas(16) float scales[kStages][kBlockTokens];
  };
  static __device__ void init(Store& /*memory*/) {}
  static __device__ void begin(int group) { BlockTurns::begin(group); }

  // No results are kept for later: what the pipeline asks of them is empty.
  struct Kept {};
  static constexpr int kSteps = 1;
  template <int kColumns>
  static __device__ void keep(Kept& /*kept*/, const float (&/*d*/)[kColumns / 2], int /*half*/) {}
  static __device__ void begin_store(Store& /*memory*/, const Params& /*params*/, Kept& /*kept*/,
                                     const Place& /*place*/, int /*group*/) {}
  static __device__ void store_step(Store& /*memory*/, const Params& /*params*/, Kept& /*kept*/,
                                    const Place& /*place*/, int /*step*/, int /*group*/) {}

  /// Where a token's scale lies: those that a thread multiplies by (WarpgroupProduct's columns
  /// 8 j + 2 (t % 4) + i) stand side by side for two j.
  static __device__ __forceinline__ int place_of_scale(int token) {
    return token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
  }

  /// Of all stages of a tile's features, which lie in one block of the weight; null where there are
  /// none.
  static __device__ __forceinline__ const float* weight_scales(const Params& params,
                                                               const Work& work) {
    if (work.feature >= work.num_features) return nullptr;
    const int block = (work.weight_row + work.feature) / kFeatures;
    return params.weight_scales + static_cast<int64_t>(block) * params.num_blocks;
  }

  /// Brings the products of both scales, of a stage's values, to where they are added up.
  static __device__ void feed(Shared<WriteScaledBlocks>& shared, const Params& params,
                              uint32_t rank, int warp) {
    constexpr int kFeeders = kFeedWarps * 32;
    constexpr int kOwn = kBlockTokens / kFeeders;
    const int lane = warp * 32 + static_cast<int>(threadIdx.x) % 32;
    Cursor cursor;
    uint32_t turn = 0;
    for (;;) {
      const Work work = own_part<WriteScaledBlocks>(shared.queue.take_in_warp(turn), rank);
      if (work.expert < 0) return;
      const float* const of_weight = weight_scales(params, work);
      const float* of_token[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int token = lane + i * kFeeders;
        of_token[i] =
            token < work.num_rows && of_weight != nullptr
                ? params.a_scales + static_cast<int64_t>(work.row + token) * params.num_blocks
                : nullptr;
      }
      const auto load = [&](float(&scales)[kOwn], int stage) {
        const float weight = of_weight == nullptr ? 0.0F : of_weight[stage];
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
          scales[i] = of_token[i] == nullptr ? 0.0F : of_token[i][stage] * weight;
      };
      float next[kOwn];
      load(next, 0);
      for (int s = 0; s < work.num_stages; ++s) {
        float scales[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) scales[i] = next[i];
        if (s + 1 < work.num_stages) load(next, s + 1);
        shared.empty[cursor.stage].wait(cursor.parity ^ 1);
        float* const to = shared.store.scales[cursor.stage];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) to[place_of_scale(lane + i * kFeeders)] = scales[i];
        shared.full[cursor.stage].arrive();
        cursor.advance();
      }
    }
  }

  /// sum += d · scales, of which the first four come before the products end.
  template <int kColumns>
  static __device__ __forceinline__ void add_scaled(float (&sum)[kColumns / 2],
                                                    const float (&d)[kColumns / 2],
                                                    const float* scales, float4 four) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 2) {
      const float4 next =
          j + 2 < kColumns / 8 ? *reinterpret_cast<const float4*>(scales + 8 * (j + 2)) : float4{};
      const float own[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int at = 4 * j + i;
        if (at < kColumns / 2) sum[at] = fmaf(d[at], own[i / 4 * 2 + i % 2], sum[at]);
      }
      four = next;
    }
  }

  /// Rounds a tile's results and stores them.
  template <int kColumns>
  static __device__ __forceinline__ void store(Store& memory, const Params& params,
                                               const float (&sum)[kColumns / 2], const Place& place,
                                               int group) {
    constexpr int kRounded = (kColumns + 15) / 16 * 16;
    uint32_t packed[kRounded / 4] = {};
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
      packed[i] = reinterpret_cast<const uint32_t&>(two);
    }
    const bool leader = threadIdx.x % kWarpgroup == 0;
    Value* const tile = memory.tiles[group];
    if (leader) wait_stores_read<0>();
    sync_threads(1 + group, kWarpgroup);
    fill_store<kRounded>(tile, packed);
    fence_shared_for_async();
    sync_threads(1 + group, kWarpgroup);
    for (int first = 0; first < place.num_rows; first += kStoreTokens)
      store_rows(params, place, tile + first * 64, first);
    if (leader) commit_stores();
  }

  template <int kColumns>
  static __device__ __forceinline__ void multiply(Shared<WriteScaledBlocks>& shared,
                                                  const Params& params, int num_stages, int group,
                                                  Cursor& cursor, Kept& /*kept*/) {
    using Product = WarpgroupProductE4m3<kColumns>;
    float sum[kColumns / 2] = {};
    float d[kColumns / 2];
    constexpr int kProducts = kBlock / Operands::kProductReduction;
    for (int s = 0; s < num_stages; ++s) {
      const auto& stage = shared.stages[cursor.stage];
      uint64_t weight = describe_tile<TileMajor::kReduction>(stage.weight + group * 64 * kBlock, 0);
      uint64_t tokens = describe_tile<TileMajor::kReduction>(stage.tokens, 0);
      const float* const scales = shared.store.scales[cursor.stage] + 4 * (read_thread() % 4);
      shared.full[cursor.stage].wait(cursor.parity);
      BlockTurns::wait(group);
      begin_products();
#pragma unroll
      for (int k = 0; k < kProducts; ++k) {
        Product::run(d, weight, tokens, k > 0);
        weight += kNextReduction<TileMajor::kReduction>;
        tokens += kNextReduction<TileMajor::kReduction>;
        if (k >= kProducts - 2) commit_products();
      }
      const float4 first_scales = *reinterpret_cast<const float4*>(scales);
      wait_products<1>();
      BlockTurns::give(1 - group);
      wait_products<0>();
      fence_values(d);
      add_scaled<kColumns>(sum, d, scales, first_scales);
      release(shared, cursor.stage);
      cursor.advance();
    }
    const Place own = place(read_place(own_places(shared).tile), group);
    store<kColumns>(shared.store, params, sum, own, group);
  }

 private:
  static constexpr int kBlock = Operands::kReduction;
};

}  // namespace grouped

void launch_scaled_blocks(const ScaledRowsParams& params, cudaStream_t stream) {
  grouped::launch<grouped::WriteScaledBlocks>(params, stream);
}

}  // namespace tessera::cuda
