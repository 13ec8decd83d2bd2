// The launches of the gradients of attention's keys and values.
#include "ops/attention/attention_tensor_key_grads.cuh"
#include "ops/cuda/short_kernel.cuh"

namespace tessera::cuda::attention {
namespace {

using key_grads::Shared;

using Roles = WarpRoles<24, 240, kConsumers>;

template <int kDepth, int kDepthV, bool kRing>
__global__ void __launch_bounds__(kTensorThreads, 1)
    key_grads_kernel(const __grid_constant__ TensorParams params) {
  wait_for_earlier();
  let_next_begin_if_short();
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kDepth, kDepthV>*>(memory);
  // One task each: to go through several takes registers that there are not.
  const auto block = static_cast<int>(blockIdx.x);
  if (block >= *params.num_items * params.pairs.num_kv_heads) return;
  const Task task = key_grads::task_of(params, block);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    Roles::begin_feeding();
    key_grads::feed<kRing>(shared, params, task);
  } else {
    Roles::begin_multiplying();
    key_grads::multiply<kRing>(shared, params, task);
  }
}

template <int kDepth, int kDepthV>
void launch(const TensorParams& params, cudaStream_t stream) {
  const auto kernel = params.ring.num_runs > 0 ? key_grads_kernel<kDepth, kDepthV, true>
                                               : key_grads_kernel<kDepth, kDepthV, false>;
  launch_tensor<Shared<kDepth, kDepthV>>(kernel, params,
                                         params.max_items * params.pairs.num_kv_heads, stream);
}

}  // namespace

void launch_tensor_key_grads(const TensorParams& params, cudaStream_t stream) {
  with_head_sizes(params.heads.head_size, params.heads.head_size_v, [&]<int kDepth, int kDepthV>() {
    if constexpr (kDepth > 128) {
      launch_wide_key_grads(params, stream);
    } else {
      launch<kDepth, kDepthV>(params, stream);
    }
  });
}

}  // namespace tessera::cuda::attention
