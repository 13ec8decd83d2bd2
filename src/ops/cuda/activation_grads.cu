#include "ops/cuda/activation_grads.cuh"

namespace tessera::cuda {

void launch_activation_backward(const ActivationRows& call, const SizedExperts& experts,
                                const ActivationGrads& grads, cudaStream_t stream) {
  if (call.rows.bound == 0) return;
  const auto values = [&]<typename T>() {
    return activation::ValueRows<T>{static_cast<const T*>(call.in), call.in_width};
  };
  activation::launch_grads(call, experts, grads, /*vectors=*/true, values, stream);
}

}  // namespace tessera::cuda
