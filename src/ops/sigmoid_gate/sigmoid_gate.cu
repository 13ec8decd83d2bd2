#include "ops/sigmoid_gate/sigmoid_gate_kernels.h"

#include "ops/cuda/activation_math.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

struct SigmoidFunction {
  template <typename T>
  using Logit = T;
  static __device__ __forceinline__ float value(float logit) { return sigmoid(logit); }
  /// `sum` is of gradients times values.
  static __device__ __forceinline__ float grad(float /*logit*/, float gate, float sum) {
    return sum * gate * (1.0F - gate);
  }
  /// The same of a gradient times the gate.
  static __device__ __forceinline__ float element_grad(float /*logit*/, float gate, float gated,
                                                       float /*grad*/, float value) {
    return gated * value * (1.0F - gate);
  }
};

struct SoftplusFunction {
  template <typename T>
  using Logit = T;
  static __device__ __forceinline__ float value(float logit) {
    return fmaxf(logit, 0.0F) + log1pf(expf(-fabsf(logit)));
  }
  static __device__ __forceinline__ float grad(float logit, float /*gate*/, float sum) {
    return sum * sigmoid(logit);
  }
  static __device__ __forceinline__ float element_grad(float logit, float /*gate*/, float /*gated*/,
                                                       float grad, float value) {
    return grad * value * sigmoid(logit);
  }
};

/// Factors of rows.
struct IdentityFunction {
  template <typename T>
  using Logit = float;
  static __device__ __forceinline__ float value(float logit) { return logit; }
  static __device__ __forceinline__ float grad(float /*logit*/, float /*gate*/, float sum) {
    return sum;
  }
};

template <typename Function, typename T, int kWidth>
struct SigmoidGateMap {
  using Logit = typename Function::template Logit<T>;
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 8;
  struct Loaded {
    Pack<T, kWidth> y;
    Logit logit;
  };

  int64_t width;
  const T* y;
  const Logit* logit;
  T* out;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    return {load_pack<kWidth>(y + row * width + vector * kWidth), logit[row]};
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    const float gate = Function::value(static_cast<float>(loaded.logit));
    Floats<kWidth> values = to_floats(loaded.y);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] *= gate;
    cuda::store(out + row * width + vector * kWidth, values);
  }
};

template <typename Function, typename T, int kWidth>
struct ElementGateMap {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 6;
  struct Loaded {
    Pack<T, kWidth> y;
    Pack<T, kWidth> logit;
  };

  int64_t width;
  const T* y;
  const T* logit;
  T* out;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const int64_t at = row * width + vector * kWidth;
    return {load_pack_once<kWidth>(y + at), load_pack_once<kWidth>(logit + at)};
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    Floats<kWidth> values = to_floats(loaded.y);
    const Floats<kWidth> logits = to_floats(loaded.logit);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] *= Function::value(logits[i]);
    store_once(out + row * width + vector * kWidth, values);
  }
};

template <typename Function, typename T, int kWidth>
struct ElementGateGradMap {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 5;
  struct Loaded {
    Pack<T, kWidth> y;
    Pack<T, kWidth> logit;
    Pack<T, kWidth> grad;
  };

  int64_t width;
  const T* y;
  const T* logit;
  const T* grad;
  T* grad_y;
  T* grad_logit;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const int64_t at = row * width + vector * kWidth;
    return {load_pack_once<kWidth>(y + at), load_pack_once<kWidth>(logit + at),
            load_pack_once<kWidth>(grad + at)};
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    const int64_t at = row * width + vector * kWidth;
    const Floats<kWidth> values = to_floats(loaded.y);
    Floats<kWidth> logits = to_floats(loaded.logit);
    Floats<kWidth> grads = to_floats(loaded.grad);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float gate = Function::value(logits[i]);
      const float grad = grads[i];
      grads[i] *= gate;
      logits[i] = Function::element_grad(logits[i], gate, grads[i], grad, values[i]);
    }
    store_once(grad_y + at, grads);
    store_once(grad_logit + at, logits);
  }
};

constexpr int kWarps = 8;
constexpr int kBatch = 4;

// A warp for each row, which loads up to kBatch vectors of both operands at once.
template <typename Function, typename T, int kWidth>
__global__ void __launch_bounds__(32 * kWarps)
    gate_rows_backward(RowCount rows, int width, const T* y,
                       const typename Function::template Logit<T>* logit, const T* grad, T* grad_y,
                       typename Function::template Logit<T>* grad_logit) {
  wait_for_earlier();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows.in_use()) return;
  const int64_t at = row * width;
  const float own_logit = static_cast<float>(logit[row]);
  const float gate = Function::value(own_logit);
  constexpr int kStep = 32 * kWidth;
  float dot = 0;
  for (int first = static_cast<int>(threadIdx.x) % 32 * kWidth; first < width;
       first += kBatch * kStep) {
    Pack<T, kWidth> values[kBatch];
    Pack<T, kWidth> grads[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int column = first + b * kStep;
      if (column >= width) continue;
      values[b] = load_pack<kWidth>(y + at + column);
      grads[b] = load_pack<kWidth>(grad + at + column);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int column = first + b * kStep;
      if (column >= width) continue;
      const Floats<kWidth> v = to_floats(values[b]);
      Floats<kWidth> g = to_floats(grads[b]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        dot += g[i] * v[i];
        g[i] *= gate;
      }
      store(grad_y + at + column, g);
    }
  }
  dot = sum_lanes(dot);
  if (threadIdx.x % 32 == 0)
    store(grad_logit + row, Floats<1>{Function::grad(own_logit, gate, dot)});
}

/// Calls run.operator()<Function>() with a function of logits.
template <typename Run>
void with_function(GateFunction function, Run run) {
  if (function == GateFunction::kSoftplus) return run.template operator()<SoftplusFunction>();
  run.template operator()<SigmoidFunction>();
}

template <typename Function>
void launch_element_gates(const SigmoidGateRows& call, void* out, cudaStream_t stream) {
  const bool vectors =
      are_whole_vectors(call.dtype, call.width) && are_aligned(call.y, call.logit, out);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(ElementGateMap<Function, T, kWidth>{call.width, static_cast<const T*>(call.y),
                                                   static_cast<const T*>(call.logit),
                                                   static_cast<T*>(out)},
               call.rows, call.width / kWidth, stream);
  });
}

template <typename Function>
void launch_element_gates_backward(const SigmoidGateRows& call, const SigmoidGateGrads& grads,
                                   cudaStream_t stream) {
  const bool vectors = are_whole_vectors(call.dtype, call.width) &&
                       are_aligned(call.y, call.logit, grads.grad, grads.grad_y, grads.grad_logit);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(ElementGateGradMap<Function, T, kWidth>{call.width, static_cast<const T*>(call.y),
                                                       static_cast<const T*>(call.logit),
                                                       static_cast<const T*>(grads.grad),
                                                       static_cast<T*>(grads.grad_y),
                                                       static_cast<T*>(grads.grad_logit)},
               call.rows, call.width / kWidth, stream);
  });
}

template <typename Function>
void launch_row_gates(const SigmoidGateRows& call, void* out, cudaStream_t stream) {
  const bool vectors = are_whole_vectors(call.dtype, call.width) && are_aligned(call.y, out);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    using Map = SigmoidGateMap<Function, T, kWidth>;
    launch_map(Map{call.width, static_cast<const T*>(call.y),
                   static_cast<const typename Map::Logit*>(call.logit), static_cast<T*>(out)},
               call.rows, call.width / kWidth, stream);
  });
}

template <typename Function>
void launch_row_gates_backward(const SigmoidGateRows& call, const SigmoidGateGrads& grads,
                               cudaStream_t stream) {
  if (call.rows.bound == 0) return;
  const bool vectors =
      are_whole_vectors(call.dtype, call.width) && are_aligned(call.y, grads.grad, grads.grad_y);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    using Logit = typename Function::template Logit<T>;
    const auto blocks = static_cast<unsigned>(divide_up(call.rows.bound, kWarps));
    launch_early(gate_rows_backward<Function, T, kWidth>, {blocks, 32 * kWarps}, stream, call.rows,
                 static_cast<int>(call.width), static_cast<const T*>(call.y),
                 static_cast<const Logit*>(call.logit), static_cast<const T*>(grads.grad),
                 static_cast<T*>(grads.grad_y), static_cast<Logit*>(grads.grad_logit));
  });
}

}  // namespace

void launch_sigmoid_gate(const SigmoidGateRows& call, void* out, cudaStream_t stream) {
  if (call.function == GateFunction::kIdentity)
    return launch_row_gates<IdentityFunction>(call, out, stream);
  with_function(call.function, [&]<typename Function>() {
    call.of_elements ? launch_element_gates<Function>(call, out, stream)
                     : launch_row_gates<Function>(call, out, stream);
  });
}

void launch_sigmoid_gate_backward(const SigmoidGateRows& call, const SigmoidGateGrads& grads,
                                  cudaStream_t stream) {
  if (call.function == GateFunction::kIdentity)
    return launch_row_gates_backward<IdentityFunction>(call, grads, stream);
  with_function(call.function, [&]<typename Function>() {
    call.of_elements ? launch_element_gates_backward<Function>(call, grads, stream)
                     : launch_row_gates_backward<Function>(call, grads, stream);
  });
}

}  // namespace tessera::cuda
