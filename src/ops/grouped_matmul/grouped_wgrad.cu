// The gradient of the experts' matrices of grouped products.
#include "ops/grouped_matmul/grouped_wgrad.cuh"

namespace tessera::cuda {
namespace {

using namespace wgrad;

template <int kTileColumns, bool kPingPong, bool kGathers = false>
void launch(const GroupedWgradParams& params, cudaStream_t stream) {
  params.accumulate
      ? wgrad::launch<Schedule<kTileColumns, kPingPong, true, kGathers>>(params, stream)
      : wgrad::launch<Schedule<kTileColumns, kPingPong, false, kGathers>>(params, stream);
}

void launch_in_order(const GroupedWgradParams& params, const WgradTiles& tiles,
                     cudaStream_t stream) {
  switch (tiles.columns) {
    case 256:
      return launch<256, false>(params, stream);
    case 192:
      return launch<192, true>(params, stream);
    default:
      return wgrad::launch<Schedule<128, true, true, false>>(params, stream);
  }
}

}  // namespace

void launch_grouped_wgrad(const GroupedWgradParams& params, cudaStream_t stream) {
  const WgradTiles tiles = choose_wgrad_tiles({.num_experts = params.num_experts,
                                               .tokens = params.num_rows / params.num_experts,
                                               .rows = params.weight_rows / params.num_experts,
                                               .columns = params.num_columns,
                                               .accumulate = params.accumulate,
                                               .gathered = params.source != nullptr},
                                              num_clusters());
  params.source != nullptr ? launch<256, false, true>(params, stream)
                           : launch_in_order(params, tiles, stream);
}

}  // namespace tessera::cuda
