// y = a · W_eᵀ of each expert's tokens, of E4M3 values whose blocks of 128 along the reduction have
// scales: the tensor cores' sums of a stage, which is such a block, are scaled and added up in F32.
#include "ops/scaled_grouped_matmul/scaled_tiles.cuh"

namespace tessera::cuda {
namespace {

using namespace grouped;

/// Two sets of sums leave registers for half of the tokens that other products have.
constexpr int kBlockTokens = kMaxTokens / 2;

struct WriteScaledBlocks : WritesScaled<WriteScaledBlocks, kBlockTokens> {
  using Base = WritesScaled<WriteScaledBlocks, kBlockTokens>;
  static constexpr bool kFeeds = true;

  /// The scales of the tokens of a stage lie beside what is kept of results.
  struct Store : Base::Store {
    float scales[kStages][kBlockTokens];
  };

  static __device__ void feed(Shared<WriteScaledBlocks>& shared, const Params& params,
                              uint32_t /*rank*/, int warp) {
    constexpr int kFeeders = kFeedWarps * 32;
    const int lane = warp * 32 + static_cast<int>(threadIdx.x) % 32;
    Cursor cursor;
    uint32_t turn = 0;
    for (;;) {
      const Work work = shared.queue.take_in_warp(turn);
      if (work.expert < 0) return;
      const float* const from =
          params.a_scales + static_cast<int64_t>(work.row + lane) * params.num_blocks;
      for (int s = 0; s < work.num_stages; ++s) {
        shared.empty[cursor.stage].wait(cursor.parity ^ 1);
        float* const to = shared.store.scales[cursor.stage];
#pragma unroll
        for (int token = lane; token < kBlockTokens; token += kFeeders) {
          const bool is_there = token < work.num_rows;
          copy_4_bytes(shared_address(to + token),
                       is_there ? from + (token - lane) * params.num_blocks + s : params.a_scales,
                       is_there);
        }
        arrive_when_copied(&shared.full[cursor.stage]);
        cursor.advance();
      }
    }
  }

  /// Of all stages of the tile's features, which lie in one block of the weight.
  static __device__ __forceinline__ const float* weight_scales(const Params& params,
                                                               const Place& tile, int weight_row) {
    if (tile.feature >= tile.num_features) return params.weight_scales;  // of no result
    const int block = (weight_row + tile.feature) / kFeatures;
    return params.weight_scales + static_cast<int64_t>(block) * params.num_blocks;
  }

  /// sum += d · (scale of the token · scale of the weight).
  template <int kColumns>
  static __device__ __forceinline__ void add_scaled(float (&sum)[kColumns / 2],
                                                    const float (&d)[kColumns / 2],
                                                    const float* token_scales, float of_weight) {
    const float* const own = token_scales + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float2 tokens = *reinterpret_cast<const float2*>(own + 8 * j);
      const float scales[2] = {tokens.x * of_weight, tokens.y * of_weight};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum[4 * j + i] = fmaf(d[4 * j + i], scales[i % 2], sum[4 * j + i]);
    }
  }

  template <int kColumns>
  static __device__ __forceinline__ void multiply(Shared<WriteScaledBlocks>& shared,
                                                  const Params& params, int num_stages, int group,
                                                  Cursor& cursor, Kept& kept) {
    using Product = WarpgroupProductE4m3<kColumns>;
    const float* const of_weight =
        weight_scales(params, read_place(own_places(shared).tile), own_places(shared).weight_row);
    float sum[kColumns / 2] = {};
    float d[kColumns / 2];
    for (int s = 0; s < num_stages; ++s) {
      const auto& stage = shared.stages[cursor.stage];
      uint64_t weight = describe_tile<TileMajor::kReduction>(stage.weight + group * 64 * kBlock, 0);
      uint64_t tokens = describe_tile<TileMajor::kReduction>(stage.tokens, 0);
      const float scale = of_weight[s];
      shared.full[cursor.stage].wait(cursor.parity);
      begin_products();
#pragma unroll
      for (int k = 0; k < kBlock / Operands::kProductReduction; ++k) {
        Product::run(d, weight, tokens, k > 0);
        weight += kNextReduction<TileMajor::kReduction>;
        tokens += kNextReduction<TileMajor::kReduction>;
      }
      commit_products();
      if (s < kSteps) grouped::store_step(shared, params, kept, s, group);
      wait_products<0>();
      fence_values(d);
      add_scaled<kColumns>(sum, d, shared.store.scales[cursor.stage], scale);
      release(shared, cursor.stage);
      cursor.advance();
    }
    store_all(shared, params, kept, num_stages, group);
    keep<kColumns>(kept, sum, 0);
    WarpPlaces& places = own_places(shared);
    write_place(places.kept, place(read_place(places.tile), group));
  }

 private:
  static constexpr int kBlock = Operands::kReduction;
};

}  // namespace

void launch_scaled_blocks(const ScaledRowsParams& params, cudaStream_t stream) {
  launch<WriteScaledBlocks>(params, stream);
}

}  // namespace tessera::cuda
