// A thread takes vectors of a token's decays, or one strength. Sums over tokens compute again what
// they add, which costs less than memory for it.
#include "ops/cuda/column_sums.cuh"
#include "ops/kda_gates/kda_gates_kernels.h"

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
struct KdaDecayMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 4;
  struct Loaded {
    Pack<T, kWidth> a;
    Floats<kWidth> bias;
  };

  KdaGateRows call;
  float* decay;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const int64_t column = vector * kWidth;
    return {load_pack<kWidth>(static_cast<const T*>(call.a) + row * call.width() + column),
            cuda::load<kWidth>(call.bias + column)};
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    const int64_t column = vector * kWidth;
    Floats<kWidth> steps = to_floats(loaded.a);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float rate = -expf(call.log_decay[(column + i) / call.size]);
      steps[i] = rate * softplus(steps[i] + loaded.bias[i]);
    }
    cuda::store(decay + row * call.width() + column, steps);
  }
};

template <typename T, int kWidth>
struct KdaDecayGradMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 4;
  struct Loaded {
    Pack<T, kWidth> a;
    Floats<kWidth> bias;
    Floats<kWidth> grad;
  };

  KdaGateRows call;
  const float* grad_decay;
  T* grad_a;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const int64_t column = vector * kWidth;
    const int64_t at = row * call.width() + column;
    return {load_pack<kWidth>(static_cast<const T*>(call.a) + at),
            cuda::load<kWidth>(call.bias + column), cuda::load<kWidth>(grad_decay + at)};
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    const int64_t column = vector * kWidth;
    Floats<kWidth> grads = to_floats(loaded.a);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float rate = -expf(call.log_decay[(column + i) / call.size]);
      grads[i] = loaded.grad[i] * rate * logistic(grads[i] + loaded.bias[i]);
    }
    cuda::store(grad_a + row * call.width() + column, grads);
  }
};

/// Strengths of heads, or with gradients those of b.
template <typename T, bool kGrads>
struct KdaStrengthMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 4;
  struct Loaded {
    float b;
    float grad;
  };

  int64_t heads;
  const T* b;
  const float* grad_beta;
  float* beta;
  T* grad_b;

  __device__ Loaded load(int64_t row, uint32_t head) const {
    const int64_t at = row * heads + head;
    return {cuda::load<1>(b + at)[0], kGrads ? grad_beta[at] : 0};
  }
  __device__ void store(int64_t row, uint32_t head, const Loaded& loaded) const {
    const int64_t at = row * heads + head;
    const float strength = logistic(loaded.b);
    if constexpr (kGrads) {
      cuda::store(grad_b + at, Floats<1>{{loaded.grad * strength * (1.0F - strength)}});
    } else {
      beta[at] = strength;
    }
  }
};

/// What tokens add to the gradient of dt_bias.
template <typename T>
struct KdaBiasTerms {
  struct Loaded {
    float value;
  };
  KdaGateRows call;
  const float* grad_decay;

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    const int64_t at = row * call.width() + column;
    const float step = cuda::load<1>(static_cast<const T*>(call.a) + at)[0] + call.bias[column];
    return {grad_decay[at] * -expf(call.log_decay[column / call.size]) * logistic(step)};
  }
  __device__ __forceinline__ void add(const Loaded& loaded, Floats<1>& sums) const {
    sums[0] += loaded.value;
  }
};

/// What tokens add to the sum over a column of the gradient times softplus(a + dt_bias), from which
/// that of A_log comes.
template <typename T>
struct KdaRateTerms {
  struct Loaded {
    float value;
  };
  KdaGateRows call;
  const float* grad_decay;

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    const int64_t at = row * call.width() + column;
    const float step = cuda::load<1>(static_cast<const T*>(call.a) + at)[0] + call.bias[column];
    return {grad_decay[at] * softplus(step)};
  }
  __device__ __forceinline__ void add(const Loaded& loaded, Floats<1>& sums) const {
    sums[0] += loaded.value;
  }
};

/// A warp adds up the columns of a head.
__global__ void __launch_bounds__(32)
    add_rates(KdaGateRows call, const float* of_columns, Accumulator log_decay) {
  wait_for_earlier();
  const int64_t head = blockIdx.x;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < call.size; i += 32) sum += of_columns[head * call.size + i];
  sum = -expf(call.log_decay[head]) * sum_lanes(sum);
  if (threadIdx.x != 0) return;
  log_decay.sums[head] = log_decay.sets ? sum : log_decay.sums[head] + sum;
}

template <typename T>
void add_weight_grads(const KdaGateRows& call, const KdaGateGrads& grads, cudaStream_t stream) {
  if (call.tokens == 0) return;
  const RowCount rows = {.bound = call.tokens};
  if (grads.bias.sums != nullptr) {
    launch_sum_columns<1>(KdaBiasTerms<T>{call, grads.decay}, rows, call.width(), grads.bias,
                          grads.partials, grads.num_sms, stream);
  }
  if (grads.log_decay.sums != nullptr) {
    launch_sum_columns<1>(KdaRateTerms<T>{call, grads.decay}, rows, call.width(),
                          {.sums = grads.rates, .sets = true}, grads.partials, grads.num_sms,
                          stream);
    launch_early(add_rates, {static_cast<unsigned>(call.heads), 32}, stream, call, grads.rates,
                 grads.log_decay);
  }
}

}  // namespace

void launch_kda_gates(const KdaGateRows& call, float* decay, float* beta, cudaStream_t stream) {
  const bool vectors =
      are_whole_vectors(call.dtype, call.width()) && are_aligned(call.a, call.bias, decay);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(KdaDecayMap<T, kWidth>{call, decay}, {.bound = call.tokens}, call.width() / kWidth,
               stream);
  });
  with_type(call.dtype, [&]<typename T>() {
    launch_map(
        KdaStrengthMap<T, false>{call.heads, static_cast<const T*>(call.b), nullptr, beta, nullptr},
        {.bound = call.tokens}, call.heads, stream);
  });
}

void launch_kda_gates_backward(const KdaGateRows& call, const KdaGateGrads& grads,
                               cudaStream_t stream) {
  const bool vectors = are_whole_vectors(call.dtype, call.width()) &&
                       are_aligned(call.a, call.bias, grads.decay, grads.a);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(KdaDecayGradMap<T, kWidth>{call, grads.decay, static_cast<T*>(grads.a)},
               {.bound = call.tokens}, call.width() / kWidth, stream);
  });
  with_type(call.dtype, [&]<typename T>() {
    launch_map(KdaStrengthMap<T, true>{call.heads, static_cast<const T*>(call.b), grads.beta,
                                       nullptr, static_cast<T*>(grads.b)},
               {.bound = call.tokens}, call.heads, stream);
    add_weight_grads<T>(call, grads, stream);
  });
}

}  // namespace tessera::cuda
