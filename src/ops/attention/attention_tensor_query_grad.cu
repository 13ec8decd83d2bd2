// The launches of the gradient of attention's queries.
#include "ops/attention/attention_tensor_query_grad.cuh"
#include "ops/cuda/short_kernel.cuh"

namespace tessera::cuda::attention {
namespace {

using query_grad::Shared;

using Roles = WarpRoles<24, 240, kConsumers>;

template <int kDepth, int kDepthV>
__global__ void __launch_bounds__(kTensorThreads, 1)
    query_grad_kernel(const __grid_constant__ TensorParams params) {
  wait_for_earlier();
  let_next_begin_if_short();
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kDepth, kDepthV>*>(memory);
  if (params.pairs.tiles != nullptr && *params.pairs.fit != 0) return;  // they are summed up
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    Roles::begin_feeding();
    query_grad::feed(shared, params, 0);
  } else {
    Roles::begin_multiplying();
    query_grad::multiply(shared, params);
  }
}

template <int kDepth, int kDepthV>
void launch(const TensorParams& params, cudaStream_t stream) {
  launch_tensor<Shared<kDepth, kDepthV>>(query_grad_kernel<kDepth, kDepthV>, params, params.num_sms,
                                         stream);
}

}  // namespace

void launch_tensor_query_grad(const TensorParams& params, cudaStream_t stream) {
  with_head_sizes(params.heads.head_size, params.heads.head_size_v,
                  [&]<int kDepth, int kDepthV>() { launch<kDepth, kDepthV>(params, stream); });
}

}  // namespace tessera::cuda::attention
