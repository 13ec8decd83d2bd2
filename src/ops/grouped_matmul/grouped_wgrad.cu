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
  if (params.source != nullptr) {
    launch<kCooperativeColumns, false, true>(params, stream);
  } else if (is_cooperative(params)) {
    launch<kCooperativeColumns, false>(params, stream);
  } else if (params.accumulate && rows_of_expert(params) < kStagesToAddThere * kTokens) {
    launch<kPingPongColumnsToAddHere, true>(params, stream);
  } else {
    launch<kPingPongColumns, true>(params, stream);
  }
}

}  // namespace tessera::cuda
