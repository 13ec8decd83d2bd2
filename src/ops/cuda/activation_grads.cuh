#pragma once

#include "ops/cuda/activation_math.cuh"
#include "ops/cuda/activation_shares.cuh"
#include "ops/cuda/fp8_rows.cuh"

/// Gradients of activations, of which Pre says how gates and ups lie in memory: it loads kWidth of
/// them, and turns these into values.
namespace tessera::cuda::activation {

/// As values of type T.
template <typename T>
struct ValueRows {
  using Value = T;
  template <int kWidth>
  using Loaded = Pack<T, kWidth>;

  const T* values_at;
  int64_t width;

  template <int kWidth>
  __device__ __forceinline__ Loaded<kWidth> load(int64_t row, int column) const {
    return load_pack<kWidth>(values_at + row * width + column);
  }
  template <int kWidth>
  static __device__ __forceinline__ Floats<kWidth> values(const Pack<T, kWidth>& loaded) {
    return to_floats(loaded);
  }
};

template <typename Pre>
struct GradParams {
  Pre pre;
  RowCount rows;
  int size;
  int64_t in_width;
  int64_t out_width;
  const float* probs;
  const void* grad;
  void* grad_in;
  float* grad_probs;
  void* act;  ///< the activation, beside the gradient; or null
  Fp8Rows fp8;
};

/// What is given beside the gradient.
enum class Beside { kNothing, kAct, kFp8 };

/// The gradient of gates or ups, `column` columns from the row's first one.
template <Beside kBeside, typename Pre, int kWidth>
__device__ __forceinline__ void store_grad(const GradParams<Pre>& p, int64_t row, int column,
                                           const Floats<kWidth>& grad) {
  using T = typename Pre::Value;
  T* const to = static_cast<T*>(p.grad_in) + row * p.in_width + column;
  if constexpr (kBeside == Beside::kFp8) {
    const auto rounded = to_bf16(grad);
    cuda::store(to, rounded);
    store_fp8(p.fp8, row, column, rounded);
  } else {
    cuda::store(to, grad);
  }
}

/// Turns gate and up into their gradients, finds the activation, which costs registers where it is
/// used, and returns the gradient of the prob.
template <bool kGated, typename Function, int kWidth>
__device__ __forceinline__ float differentiate(const Function& function, Floats<kWidth>& gate,
                                               Floats<kWidth>& up, const Floats<kWidth>& grad,
                                               float prob, Floats<kWidth>& act) {
  float dot = 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const Slope slope = function.slope(gate[i]);
    const float other = kGated ? function.other(up[i]) : 1.0F;
    dot += slope.value * other * grad[i];
    act[i] = slope.value * other * prob;
    const float g = grad[i] * prob;
    gate[i] = g * other * slope.derivative;
    up[i] = function.other_grad(up[i], g * slope.value);
  }
  return dot;
}

/// Without the gradient of the probs.
template <typename Function, bool kGated, Beside kBeside, typename Pre, int kWidth>
struct ActivationGradMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 6;
  using T = typename Pre::Value;
  struct Loaded {
    typename Pre::template Loaded<kWidth> gate;
    typename Pre::template Loaded<kWidth> up;
    Pack<T, kWidth> grad;
    float prob;
  };

  Function function;
  GradParams<Pre> p;

  __device__ __forceinline__ Loaded load(int64_t row, uint32_t vector) const {
    Loaded loaded;
    loaded.gate = p.pre.template load<kWidth>(row, static_cast<int>(vector) * kWidth);
    if constexpr (kGated)
      loaded.up = p.pre.template load<kWidth>(row, p.size + static_cast<int>(vector) * kWidth);
    loaded.grad =
        load_pack<kWidth>(static_cast<const T*>(p.grad) + row * p.out_width + vector * kWidth);
    loaded.prob = p.probs == nullptr ? 1.0F : p.probs[row];
    return loaded;
  }
  __device__ __forceinline__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    const int column = static_cast<int>(vector) * kWidth;
    Floats<kWidth> gate = Pre::values(loaded.gate);
    Floats<kWidth> up = {};
    if constexpr (kGated) up = Pre::values(loaded.up);
    Floats<kWidth> act;
    differentiate<kGated>(function, gate, up, to_floats(loaded.grad), loaded.prob, act);
    store_grad<kBeside>(p, row, column, gate);
    if constexpr (kGated) store_grad<kBeside>(p, row, p.size + column, up);
    if constexpr (kBeside == Beside::kAct)
      cuda::store(static_cast<T*>(p.act) + row * p.out_width + column, act);
  }
};

/// A warp's part of the gradient of its row's prob.
template <typename Function, bool kGated, Beside kBeside, typename Pre, int kWidth>
__device__ __forceinline__ float differentiate_row(const Function& function,
                                                   const GradParams<Pre>& p,
                                                   const SizedExperts& experts,
                                                   const Share& share) {
  using T = typename Pre::Value;
  const int size = size_of(share.row, p.size, experts);
  const T* grad = static_cast<const T*>(p.grad) + share.row * p.out_width;
  T* act = static_cast<T*>(p.act) + share.row * p.out_width;
  const float prob = p.probs == nullptr ? 1.0F : p.probs[share.row];
  float dot = 0;
  share.for_columns<kWidth>(size, [&](int column) {
    const auto gates = p.pre.template load<kWidth>(share.row, column);
    typename Pre::template Loaded<kWidth> ups;
    if constexpr (kGated) ups = p.pre.template load<kWidth>(share.row, size + column);
    const auto grads = load_pack<kWidth>(grad + column);
    Floats<kWidth> x = Pre::values(gates);
    Floats<kWidth> up = {};
    if constexpr (kGated) up = Pre::values(ups);
    Floats<kWidth> value;
    dot += differentiate<kGated>(function, x, up, to_floats(grads), prob, value);
    store_grad<kBeside>(p, share.row, column, x);
    if constexpr (kGated) store_grad<kBeside>(p, share.row, size + column, up);
    if constexpr (kBeside == Beside::kAct) store(act + column, value);
  });
  return sum_lanes(dot);
}

template <typename Function, bool kGated, Beside kBeside, typename Pre, int kWidth>
__global__ void __launch_bounds__(kShareThreads, kShareBlocks)
    differentiate_rows(const Function function, const __grid_constant__ GradParams<Pre> p,
                       const __grid_constant__ SizedExperts experts, int row_warps) {
  wait_for_earlier();
  __shared__ float dots[kShareWarps];
  const Share share(row_warps);
  const bool holds = share.row < p.rows.in_use();
  const float dot =
      holds ? differentiate_row<Function, kGated, kBeside, Pre, kWidth>(function, p, experts, share)
            : 0.0F;
  if (p.grad_probs == nullptr) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const bool first = threadIdx.x % 32 == 0;
  if (first) dots[warp] = dot;
  __syncthreads();
  if (!holds || !first || share.piece != 0) return;
  float total = dot;
  for (int i = 1; i < share.warps; ++i) total += dots[warp + i];
  p.grad_probs[share.row] = total;
}

template <bool kGated, Beside kBeside, int kWidth, typename Function, typename Pre>
void launch_grads_of(const Function& function, const ActivationRows& call,
                     const SizedExperts& experts, const GradParams<Pre>& params,
                     cudaStream_t stream) {
  if (experts.count == 0 && params.grad_probs == nullptr) {
    launch_map(ActivationGradMap<Function, kGated, kBeside, Pre, kWidth>{function, params},
               call.rows, call.size / kWidth, stream);
  } else {
    const RowLaunch rows(call, kWidth);
    launch_early(differentiate_rows<Function, kGated, kBeside, Pre, kWidth>,
                 {rows.blocks, rows.threads}, stream, function, params, experts, rows.row_warps);
  }
}

/// launch_activation_backward of rows that lie as make_pre.operator()<T>() says of the type T of
/// gradients; `vectors`: whether that allows whole ones.
template <typename MakePre>
void launch_grads(const ActivationRows& call, const SizedExperts& experts,
                  const ActivationGrads& grads, bool vectors, MakePre make_pre,
                  cudaStream_t stream) {
  vectors = vectors && has_whole_vectors(call, experts) &&
            are_aligned(call.in, grads.grad, grads.grad_in, grads.act);
  if (grads.fp8.values != nullptr && !vectors) check(cudaErrorMisalignedAddress);
  with_activation(call.function, [&]<bool kGated>(auto function) {
    with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
      const auto pre = make_pre.template operator()<T>();
      const GradParams<std::remove_const_t<decltype(pre)>> params = {
          .pre = pre,
          .rows = call.rows,
          .size = static_cast<int>(call.size),
          .in_width = call.in_width,
          .out_width = call.out_width,
          .probs = call.probs,
          .grad = grads.grad,
          .grad_in = grads.grad_in,
          .grad_probs = grads.grad_probs,
          .act = grads.act,
          .fp8 = grads.fp8};
      if constexpr (std::is_same_v<T, BFloat16> && kWidth == 8) {
        if (grads.fp8.values != nullptr)
          return launch_grads_of<kGated, Beside::kFp8, 8>(function, call, experts, params, stream);
      }
      grads.act == nullptr
          ? launch_grads_of<kGated, Beside::kNothing, kWidth>(function, call, experts, params,
                                                              stream)
          : launch_grads_of<kGated, Beside::kAct, kWidth>(function, call, experts, params, stream);
    });
  });
}

}  // namespace tessera::cuda::activation
