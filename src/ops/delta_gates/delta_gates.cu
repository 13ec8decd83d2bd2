// A thread takes vectors of heads of a token. Sums over tokens compute again what they add, which
// costs less than memory for it.
#include "ops/cuda/column_sums.cuh"
#include "ops/delta_gates/delta_gates_kernels.h"

namespace tessera::cuda {
namespace {

__device__ __forceinline__ float logistic(float x) {
  return 1.0F / (1.0F + expf(-x));
}

/// log(1 + e^x), without overflow.
__device__ __forceinline__ float softplus(float x) {
  return fmaxf(x, 0.0F) + log1pf(expf(-fabsf(x)));
}

template <typename T, int kWidth>
struct DeltaGateMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 4;
  struct Loaded {
    Pack<T, kWidth> a;
    Pack<T, kWidth> b;
    Floats<kWidth> log_decay;
    Floats<kWidth> bias;
  };

  int64_t heads;
  const T* a;
  const T* b;
  const float* log_decay;
  const float* bias;
  float* decay;
  float* beta;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const int64_t head = vector * kWidth;
    const int64_t at = row * heads + head;
    return {load_pack<kWidth>(a + at), load_pack<kWidth>(b + at),
            cuda::load<kWidth>(log_decay + head), cuda::load<kWidth>(bias + head)};
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    const int64_t at = row * heads + vector * kWidth;
    Floats<kWidth> steps = to_floats(loaded.a);
    Floats<kWidth> strengths = to_floats(loaded.b);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      steps[i] = -expf(loaded.log_decay[i]) * softplus(steps[i] + loaded.bias[i]);
      strengths[i] = logistic(strengths[i]);
    }
    cuda::store(decay + at, steps);
    cuda::store(beta + at, strengths);
  }
};

template <typename T, int kWidth>
struct DeltaGateGradMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 4;
  struct Loaded {
    Pack<T, kWidth> a;
    Pack<T, kWidth> b;
    Floats<kWidth> log_decay;
    Floats<kWidth> bias;
    Floats<kWidth> grad_decay;
    Floats<kWidth> grad_beta;
  };

  int64_t heads;
  const T* a;
  const T* b;
  const float* log_decay;
  const float* bias;
  const float* grad_decay;
  const float* grad_beta;
  T* grad_a;
  T* grad_b;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const int64_t head = vector * kWidth;
    const int64_t at = row * heads + head;
    return {load_pack<kWidth>(a + at),
            load_pack<kWidth>(b + at),
            cuda::load<kWidth>(log_decay + head),
            cuda::load<kWidth>(bias + head),
            cuda::load<kWidth>(grad_decay + at),
            cuda::load<kWidth>(grad_beta + at)};
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    const int64_t at = row * heads + vector * kWidth;
    Floats<kWidth> of_a = to_floats(loaded.a);
    Floats<kWidth> of_b = to_floats(loaded.b);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      of_a[i] =
          loaded.grad_decay[i] * -expf(loaded.log_decay[i]) * logistic(of_a[i] + loaded.bias[i]);
      const float strength = logistic(of_b[i]);
      of_b[i] = loaded.grad_beta[i] * strength * (1.0F - strength);
    }
    cuda::store(grad_a + at, of_a);
    cuda::store(grad_b + at, of_b);
  }
};

/// What tokens add to the gradient of A_log, or to that of dt_bias.
template <typename T, bool kOfBias>
struct DeltaGateTerms {
  struct Loaded {
    float value;
  };

  int64_t heads;
  const T* a;
  const float* log_decay;
  const float* bias;
  const float* grad_decay;

  __device__ __forceinline__ Loaded load(int64_t row, int64_t head) const {
    const int64_t at = row * heads + head;
    const float step = static_cast<float>(a[at]) + bias[head];
    return {grad_decay[at] * -expf(log_decay[head]) * (kOfBias ? logistic(step) : softplus(step))};
  }
  __device__ __forceinline__ void add(const Loaded& loaded, Floats<1>& sums) const {
    sums[0] += loaded.value;
  }
};

template <typename T, bool kOfBias>
void add_weight_grads(const DeltaGateRows& call, const DeltaGateGrads& grads,
                      const Accumulator& accumulator, cudaStream_t stream) {
  if (accumulator.sums == nullptr) return;
  launch_sum_columns<1>(DeltaGateTerms<T, kOfBias>{call.heads, static_cast<const T*>(call.a),
                                                   call.log_decay, call.bias, grads.decay},
                        {.bound = call.tokens}, call.heads, accumulator, grads.partials,
                        grads.num_sms, stream);
}

}  // namespace

void launch_delta_gates(const DeltaGateRows& call, float* decay, float* beta, cudaStream_t stream) {
  const bool vectors = are_whole_vectors(call.dtype, call.heads) &&
                       are_aligned(call.a, call.b, call.log_decay, call.bias, decay, beta);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(DeltaGateMap<T, kWidth>{call.heads, static_cast<const T*>(call.a),
                                       static_cast<const T*>(call.b), call.log_decay, call.bias,
                                       decay, beta},
               {.bound = call.tokens}, call.heads / kWidth, stream);
  });
}

void launch_delta_gates_backward(const DeltaGateRows& call, const DeltaGateGrads& grads,
                                 cudaStream_t stream) {
  const bool vectors =
      are_whole_vectors(call.dtype, call.heads) &&
      are_aligned(call.a, call.b, call.log_decay, call.bias, grads.decay, grads.beta) &&
      are_aligned(grads.a, grads.b);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(DeltaGateGradMap<T, kWidth>{call.heads, static_cast<const T*>(call.a),
                                           static_cast<const T*>(call.b), call.log_decay, call.bias,
                                           grads.decay, grads.beta, static_cast<T*>(grads.a),
                                           static_cast<T*>(grads.b)},
               {.bound = call.tokens}, call.heads / kWidth, stream);
  });
  with_type(call.dtype, [&]<typename T>() {
    add_weight_grads<T, false>(call, grads, grads.log_decay, stream);
    add_weight_grads<T, true>(call, grads, grads.bias, stream);
  });
}

}  // namespace tessera::cuda
