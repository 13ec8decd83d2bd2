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

}  // namespace

void launch_grouped_wgrad(const GroupedWgradParams& params, cudaStream_t stream) {
  if (params.source != nullptr) return launch<kCooperativeColumns, false, true>(params, stream);
  switch (choose_tiles(params)) {
    case WgradTiles::kCooperative:
      return launch<kCooperativeColumns, false>(params, stream);
    case WgradTiles::kPingPong:
      return launch<kPingPongColumns, true>(params, stream);
    case WgradTiles::kAddsHere:
      return launch<kPingPongColumnsToAddHere, true>(params, stream);
  }
}

}  // namespace tessera::cuda
