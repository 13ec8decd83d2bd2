// The gradient of the experts' matrices of E4M3 values along tokens, of which 128 share a scale:
// the tensor cores' sums of a stage, which has 128 tokens, are scaled and added up in F32. Scales
// come with a stage's values.
#include "ops/cuda/pipeline/turns.cuh"
#include "ops/scaled_grouped_wgrad/scaled_wgrad_tiles.cuh"

namespace tessera::cuda {
namespace wgrad {

/// Two sets of sums leave registers for no more.
constexpr int kBlockColumns = 192;

template <bool kAdds>
struct BlockScales : ScaledSchedule<kBlockColumns, false, kAdds> {
  using Base = ScaledSchedule<kBlockColumns, false, kAdds>;
  using typename Base::Cursor;
  using typename Base::Params;
  using typename Base::Stage;
  static constexpr bool kTakesTurns = true;
  /// Every warp of both blocks, since threads read scales.
  static constexpr int kReleases = 2 * 2 * kWarpgroup / 32;

  struct Scales {
    alignas(16) float narrow[Base::kBlockRows];
    alignas(16) float wide[kBlockColumns];
  };
  struct Shared {
    Stage stages[Base::kStages];
    Scales scales[Base::kStages];
    Barrier full[Base::kStages];
    Barrier empty[Base::kStages];
    Barrier begins[2];
    WorkQueue<DenseWork, 1> queue;
    int tile_begin[kMaxExperts + 1];
  };
  static_assert(sizeof(Shared) <= kMaxShared);

  /// Scales that there are of a stage's rows, or columns, which may end within a tile.
  static __device__ __forceinline__ uint32_t narrow_bytes(const Params& params,
                                                          const DenseWork& work) {
    return sizeof(float) * max(min(Base::kBlockRows, params.narrow_columns - work.row), 0);
  }
  static __device__ __forceinline__ uint32_t wide_bytes(const Params& params,
                                                        const DenseWork& work) {
    return sizeof(float) * min(kBlockColumns, params.num_columns - work.column);
  }
  static __device__ __forceinline__ uint32_t scale_bytes(const Params& params,
                                                         const DenseWork& work) {
    return narrow_bytes(params, work) + wide_bytes(params, work);
  }

  static __device__ __forceinline__ void load_scales(Scales& scales, const Params& params,
                                                     const DenseWork& work, int token,
                                                     Barrier* full) {
    const int64_t block = token / TokenOperands::kTokens;
    const uint32_t of_rows = narrow_bytes(params, work);
    if (of_rows > 0)
      load_bytes(scales.narrow, params.narrow_scales + block * params.narrow_columns + work.row,
                 of_rows, full);
    load_bytes(scales.wide, params.wide_scales + block * params.num_columns + work.column,
               wide_bytes(params, work), full);
  }

  using OwnTurns = Turns<3>;
  static __device__ void begin(int group) { OwnTurns::begin(group); }

  /// sum += d · rows · columns, of this thread's two rows; its columns' scales begin at `columns`.
  static __device__ __forceinline__ void add_scaled(float (&sum)[kBlockColumns / 2],
                                                    const float (&d)[kBlockColumns / 2],
                                                    const float* columns, float2 rows) {
#pragma unroll
    for (int j = 0; j < kBlockColumns / 8; ++j) {
      const float2 two = *reinterpret_cast<const float2*>(columns + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * j + i;
        sum[at] = fmaf(d[at] * (i < 2 ? rows.x : rows.y), i % 2 == 0 ? two.x : two.y, sum[at]);
      }
    }
  }

  static __device__ __forceinline__ void multiply(Shared& shared, const Params& params,
                                                  const DenseWork& work, int group,
                                                  Cursor& cursor) {
    using Product = TokenOperands::Product<kBlockColumns>;
    constexpr int kProducts = TokenOperands::kTokens / TokenOperands::kStep;
    constexpr TileMajor kMajor = TokenOperands::kMajor;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = group * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
    float sum[1][kBlockColumns / 2] = {};
    float d[kBlockColumns / 2];
    for (int s = 0; s < work.num_stages; ++s) {
      const Stage& stage = shared.stages[cursor.stage];
      const Scales& scales = shared.scales[cursor.stage];
      uint64_t narrow = describe_tile<kMajor>(stage.narrow[group], 0);
      uint64_t wide = describe_tile<kMajor>(stage.wide[0], 0);
      shared.full[cursor.stage].wait(cursor.parity);
      OwnTurns::wait(group);
      begin_products();
#pragma unroll
      for (int k = 0; k < kProducts; ++k) {
        Product::run(d, narrow, wide, k > 0);
        narrow += kNextReduction<kMajor>;
        wide += kNextReduction<kMajor>;
        if (k >= kProducts - 2) commit_products();
      }
      const float2 rows = {scales.narrow[row], scales.narrow[row + 8]};
      wait_products<1>();
      OwnTurns::give(1 - group);
      wait_products<0>();
      fence_values(d);
      add_scaled(sum[0], d, scales.wide + 2 * (lane % 4), rows);
      __syncwarp();
      if (lane < 2) shared.empty[cursor.stage].arrive_at(lane);
      cursor.advance();
    }
    lines::Before<Base::kGroupsAhead> before = {};
    if (kAdds) lines::load_first(place_of<BlockScales>(params, work, group), before);
    store<BlockScales, kBlockColumns>(params, work, group, sum, before, kAdds);
  }
};

}  // namespace wgrad

void launch_scaled_wgrad_blocks(const ScaledWgradParams& params, cudaStream_t stream) {
  params.accumulate ? wgrad::launch<wgrad::BlockScales<true>>(params, stream)
                    : wgrad::launch<wgrad::BlockScales<false>>(params, stream);
}

}  // namespace tessera::cuda
