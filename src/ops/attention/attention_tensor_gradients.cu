// The gradients of attention's keys, values and queries by one launch, for shapes whose blocks of
// keys leave most of the GPU idle: the first thread blocks take the keys', the others the queries'.
#include "ops/attention/attention_tensor_key_grads.cuh"
#include "ops/attention/attention_tensor_query_grad.cuh"
#include "ops/cuda/short_kernel.cuh"

namespace tessera::cuda::attention {
namespace {

template <int kDepth, int kDepthV>
union Shared {
  key_grads::Shared<kDepth, kDepthV> keys;
  query_grad::Shared<kDepth, kDepthV> queries;
};

using Roles = WarpRoles<24, 240, kConsumers>;

template <int kDepth, int kDepthV>
__device__ __forceinline__ void find_key_grads(key_grads::Shared<kDepth, kDepthV>& shared,
                                               const TensorParams& params) {
  const Task task = key_grads::task_of(params, static_cast<int>(blockIdx.x));
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    Roles::begin_feeding();
    key_grads::feed<false>(shared, params, task);
  } else {
    Roles::begin_multiplying();
    key_grads::multiply<false>(shared, params, task);
  }
}

template <int kDepth, int kDepthV>
__device__ __forceinline__ void find_query_grad(query_grad::Shared<kDepth, kDepthV>& shared,
                                                const TensorParams& params, int first_block) {
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    Roles::begin_feeding();
    query_grad::feed(shared, params, first_block);
  } else {
    Roles::begin_multiplying();
    query_grad::multiply(shared, params);
  }
}

template <int kDepth, int kDepthV>
__global__ void __launch_bounds__(kTensorThreads, 1)
    gradients_kernel(const __grid_constant__ TensorParams params) {
  wait_for_earlier();
  let_next_begin_if_short();
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kDepth, kDepthV>*>(memory);
  const int num_key_tasks = *params.num_items * params.pairs.num_kv_heads;
  if (static_cast<int>(blockIdx.x) < num_key_tasks) {
    find_key_grads(shared.keys, params);
  } else {
    find_query_grad(shared.queries, params, num_key_tasks);
  }
}

}  // namespace

bool tensor_gradients_share(const TensorParams& params) {
  // With more blocks of keys, too few others are left to have the queries' done by their end.
  const int64_t most_key_tasks = int64_t{params.max_items} * params.heads.num_kv_heads;
  return params.pairs.tiles == nullptr && params.ring.num_runs == 0 &&
         params.heads.head_size <= 64 && params.heads.head_size_v <= 64 &&
         2 * most_key_tasks <= params.num_sms;
}

void launch_tensor_gradients(const TensorParams& params, cudaStream_t stream) {
  launch_tensor<Shared<64, 64>>(gradients_kernel<64, 64>, params, params.num_sms, stream);
}

}  // namespace tessera::cuda::attention
