// A group of lanes holds a head in registers, a vector in each. Heads too long for a warp's lanes
// are read twice, and the gradient of their weight is summed by a kernel of its own.
#include "ops/gated_norm/gated_norm_kernels.h"

#include <algorithm>

#include "ops/cuda/activation_math.cuh"
#include "ops/cuda/column_sums.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

struct GatedNormParams {
  GatedNormRows call;
  void* y;           ///< of the forward pass
  const void* grad;  ///< of the backward pass, as all below
  void* grad_x;
  void* grad_z;
  float* partials;    ///< [blocks, size], or null
  float* deviations;  ///< [rows]: 1 / deviation, for heads that are read twice
};

/// The gate that is not SiLU.
struct PlainGate {
  static __device__ __forceinline__ float value(float z) { return sigmoid(z); }
  static __device__ __forceinline__ Slope slope(float z) {
    const float s = sigmoid(z);
    return {s, s * (1.0F - s)};
  }
};

/// A vector's share of a head's sums and results.
template <typename Gate, int kWidth>
struct GatedVector {
  Floats<kWidth> x;
  Floats<kWidth> z;
  Floats<kWidth> weight;

  __device__ __forceinline__ float squares() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += x[i] * x[i];
    return sum;
  }
  __device__ __forceinline__ Floats<kWidth> output(float rstd) const {
    Floats<kWidth> y;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) y[i] = x[i] * rstd * weight[i] * Gate::value(z[i]);
    return y;
  }
  /// The sum of the normed x's gradient times x.
  __device__ __forceinline__ float dot(const Floats<kWidth>& grad) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += grad[i] * Gate::value(z[i]) * weight[i] * x[i];
    return sum;
  }
  __device__ __forceinline__ Floats<kWidth> grad_z(const Floats<kWidth>& grad, float rstd) const {
    Floats<kWidth> g;
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      g[i] = grad[i] * x[i] * rstd * weight[i] * Gate::slope(z[i]).derivative;
    return g;
  }
  /// `shift` is the dot product over the whole head times rstd² / size.
  __device__ __forceinline__ Floats<kWidth> grad_x(const Floats<kWidth>& grad, float rstd,
                                                   float shift) const {
    Floats<kWidth> g;
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      g[i] = (grad[i] * Gate::value(z[i]) * weight[i] - x[i] * shift) * rstd;
    return g;
  }
};

template <typename Gate, typename T, int kWidth>
__device__ __forceinline__ GatedVector<Gate, kWidth> load_gated(const GatedNormRows& call,
                                                                int64_t at, int64_t column) {
  return {load<kWidth>(static_cast<const T*>(call.x) + at + column),
          load<kWidth>(static_cast<const T*>(call.z) + at + column),
          load<kWidth>(call.weight + column)};
}

__device__ __forceinline__ float inverse_deviation(float squares, const GatedNormRows& call) {
  return 1.0F / sqrtf(squares / static_cast<float>(call.size) + call.eps);
}

template <typename Gate, typename T, int kWidth, int kLanes>
__global__ void __launch_bounds__(kThreads) gate_heads(const __grid_constant__ GatedNormParams p) {
  wait_for_earlier();
  const GatedNormRows& call = p.call;
  constexpr int kGroups = kThreads / kLanes;
  const int64_t column = static_cast<int64_t>(threadIdx.x) % kLanes * kWidth;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x / kLanes;
  const bool holds = column < call.size && row < call.rows;
  const int64_t at = row * call.size;
  GatedVector<Gate, kWidth> vector = {};
  if (holds) vector = load_gated<Gate, T, kWidth>(call, at, column);
  const float rstd = inverse_deviation(sum_lanes<kLanes>(vector.squares()), call);
  if (holds) store_once(static_cast<T*>(p.y) + at + column, vector.output(rstd));
}

template <typename Gate, typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    gate_long_heads(const __grid_constant__ GatedNormParams p) {
  wait_for_earlier();
  const GatedNormRows& call = p.call;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (row >= call.rows) return;
  const int64_t at = row * call.size;
  const int64_t first = static_cast<int64_t>(threadIdx.x) % 32 * kWidth;
  float squares = 0;
  for (int64_t column = first; column < call.size; column += 32 * kWidth)
    squares += load_gated<Gate, T, kWidth>(call, at, column).squares();
  const float rstd = inverse_deviation(sum_lanes(squares), call);
  for (int64_t column = first; column < call.size; column += 32 * kWidth) {
    store(static_cast<T*>(p.y) + at + column,
          load_gated<Gate, T, kWidth>(call, at, column).output(rstd));
  }
}

constexpr int kBackwardBlocks = 2;  // of an SM, for whose registers there must be room

/// What a thread reads of a head in the backward pass, as it lies in memory.
template <typename T, int kWidth>
struct GatedPacks {
  Pack<T, kWidth> x;
  Pack<T, kWidth> z;
  Pack<T, kWidth> grad;

  __device__ __forceinline__ void load(const GatedNormParams& p, int64_t at) {
    x = load_pack_once<kWidth>(static_cast<const T*>(p.call.x) + at);
    z = load_pack_once<kWidth>(static_cast<const T*>(p.call.z) + at);
    grad = load_pack_once<kWidth>(static_cast<const T*>(p.grad) + at);
  }
};

// The next head is on its way while one is worked on.
template <typename Gate, typename T, int kWidth, int kLanes>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks)
    gate_heads_backward(const __grid_constant__ GatedNormParams p) {
  wait_for_earlier();
  __shared__ float shared[kThreads * kWidth];
  const GatedNormRows& call = p.call;
  constexpr int kGroups = kThreads / kLanes;
  const int64_t column = static_cast<int64_t>(threadIdx.x) % kLanes * kWidth;
  const bool has_column = column < call.size;
  Floats<kWidth> weight = {};
  if (has_column) weight = load<kWidth>(call.weight + column);
  Floats<kWidth> sums = {};
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kGroups;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kGroups + group;
  GatedPacks<T, kWidth> next = {};
  if (has_column && row < call.rows) next.load(p, row * call.size + column);
  // All lanes of a warp go through the loop as often as its first group.
  for (; row - group < call.rows; row += step) {
    const bool holds = has_column && row < call.rows;
    const GatedVector<Gate, kWidth> vector = {to_floats(next.x), to_floats(next.z), weight};
    const Floats<kWidth> grad = to_floats(next.grad);
    if (has_column && row + step < call.rows) next.load(p, (row + step) * call.size + column);
    const float rstd = inverse_deviation(sum_lanes<kLanes>(vector.squares()), call);
    const float dot = sum_lanes<kLanes>(vector.dot(grad));
    if (!holds) continue;
    const int64_t at = row * call.size + column;
    const float shift = dot * rstd * rstd / static_cast<float>(call.size);
    store_once(static_cast<T*>(p.grad_x) + at, vector.grad_x(grad, rstd, shift));
    store_once(static_cast<T*>(p.grad_z) + at, vector.grad_z(grad, rstd));
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      sums[i] += grad[i] * Gate::value(vector.z[i]) * vector.x[i] * rstd;
  }
  if (p.partials == nullptr) return;
  write_block_sums(p.partials + blockIdx.x * call.size, static_cast<int>(call.size), sums, kLanes,
                   shared);
}

template <typename Gate, typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    gate_long_heads_backward(const __grid_constant__ GatedNormParams p) {
  wait_for_earlier();
  const GatedNormRows& call = p.call;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (row >= call.rows) return;
  const int64_t at = row * call.size;
  const T* grads = static_cast<const T*>(p.grad) + at;
  const int64_t first = static_cast<int64_t>(threadIdx.x) % 32 * kWidth;
  float squares = 0;
  float dot = 0;
  for (int64_t column = first; column < call.size; column += 32 * kWidth) {
    const GatedVector<Gate, kWidth> vector = load_gated<Gate, T, kWidth>(call, at, column);
    squares += vector.squares();
    dot += vector.dot(load<kWidth>(grads + column));
  }
  const float rstd = inverse_deviation(sum_lanes(squares), call);
  const float shift = sum_lanes(dot) * rstd * rstd / static_cast<float>(call.size);
  if (first == 0) p.deviations[row] = rstd;
  for (int64_t column = first; column < call.size; column += 32 * kWidth) {
    const GatedVector<Gate, kWidth> vector = load_gated<Gate, T, kWidth>(call, at, column);
    const Floats<kWidth> grad = load<kWidth>(grads + column);
    store(static_cast<T*>(p.grad_x) + at + column, vector.grad_x(grad, rstd, shift));
    store(static_cast<T*>(p.grad_z) + at + column, vector.grad_z(grad, rstd));
  }
}

/// What heads add to the gradient of the weight.
template <typename Gate, typename T, int kWidth>
struct GatedNormTerms {
  struct Loaded {
    Pack<T, kWidth> x;
    Pack<T, kWidth> z;
    Pack<T, kWidth> grad;
    float rstd;
  };

  int64_t size;
  const T* x;
  const T* z;
  const T* grad;
  const float* deviations;

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    const int64_t at = row * size + column;
    return {load_pack<kWidth>(x + at), load_pack<kWidth>(z + at), load_pack<kWidth>(grad + at),
            deviations[row]};
  }
  __device__ __forceinline__ void add(const Loaded& loaded, Floats<kWidth>& sums) const {
    const Floats<kWidth> values = to_floats(loaded.x);
    const Floats<kWidth> gates = to_floats(loaded.z);
    const Floats<kWidth> grads = to_floats(loaded.grad);
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      sums[i] += grads[i] * Gate::value(gates[i]) * values[i] * loaded.rstd;
  }
};

/// Calls run.operator()<kLanes>() with the least group for a head of so many vectors, at most 32.
template <typename Run>
void with_lanes(int64_t vectors, Run run) {
  if (vectors <= 4) return run.template operator()<4>();
  if (vectors <= 8) return run.template operator()<8>();
  if (vectors <= 16) return run.template operator()<16>();
  run.template operator()<32>();
}

unsigned long_blocks(const GatedNormRows& call) {
  return static_cast<unsigned>(divide_up(call.rows, kThreads / 32));
}

template <typename Gate, typename T, int kWidth>
void run_long_backward(GatedNormParams params, const GatedNormGrads& grads, cudaStream_t stream) {
  const GatedNormRows& call = params.call;
  params.deviations = grads.scratch + column_sums_bytes(call.size) / sizeof(float);
  launch_early(gate_long_heads_backward<Gate, T, kWidth>, {long_blocks(call), kThreads}, stream,
               params);
  if (grads.weight.sums == nullptr) return;
  launch_sum_columns<kWidth>(
      GatedNormTerms<Gate, T, kWidth>{call.size, static_cast<const T*>(call.x),
                                      static_cast<const T*>(call.z), static_cast<const T*>(grads.y),
                                      params.deviations},
      {.bound = call.rows}, call.size, grads.weight, grads.scratch, call.num_sms, stream);
}

template <typename Gate>
void run_forward(const GatedNormRows& call, void* y, cudaStream_t stream) {
  const bool vectors =
      are_whole_vectors(call.dtype, call.size) && are_aligned(call.x, call.z, call.weight, y);
  const GatedNormParams params = {.call = call, .y = y};
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    if (call.size > 32 * kWidth) {
      launch_early(gate_long_heads<Gate, T, kWidth>, {long_blocks(call), kThreads}, stream, params);
      return;
    }
    with_lanes(call.size / kWidth, [&]<int kLanes>() {
      const auto blocks = static_cast<unsigned>(divide_up(call.rows, kThreads / kLanes));
      launch_early(gate_heads<Gate, T, kWidth, kLanes>, {blocks, kThreads}, stream, params);
    });
  });
}

template <typename Gate>
void run_backward(const GatedNormRows& call, const GatedNormGrads& grads, cudaStream_t stream) {
  const bool vectors = are_whole_vectors(call.dtype, call.size) &&
                       are_aligned(call.x, call.z, call.weight, grads.y, grads.x, grads.z);
  const bool has_weight = grads.weight.sums != nullptr;
  const GatedNormParams params = {.call = call,
                                  .grad = grads.y,
                                  .grad_x = grads.x,
                                  .grad_z = grads.z,
                                  .partials = has_weight ? grads.scratch : nullptr};
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    if (call.size > 32 * kWidth) return run_long_backward<Gate, T, kWidth>(params, grads, stream);
    with_lanes(call.size / kWidth, [&]<int kLanes>() {
      const int64_t wanted = divide_up(call.rows, kThreads / kLanes);
      const int64_t blocks =
          std::min<int64_t>({wanted, kBackwardBlocks * call.num_sms, kMaxColumnPartials});
      launch_early(gate_heads_backward<Gate, T, kWidth, kLanes>,
                   {static_cast<unsigned>(blocks), kThreads}, stream, params);
      if (has_weight)
        launch_add_partials(grads.weight, grads.scratch, static_cast<int>(blocks), call.size,
                            stream);
    });
  });
}

}  // namespace

int64_t gated_norm_backward_bytes(int64_t rows, int64_t size) {
  return std::max(column_partials_bytes(size),
                  column_sums_bytes(size) + rows * static_cast<int64_t>(sizeof(float)));
}

void launch_gated_norm(const GatedNormRows& call, void* y, cudaStream_t stream) {
  if (call.rows == 0) return;
  call.sigmoid ? run_forward<PlainGate>(call, y, stream) : run_forward<Silu>(call, y, stream);
}

void launch_gated_norm_backward(const GatedNormRows& call, const GatedNormGrads& grads,
                                cudaStream_t stream) {
  if (call.rows == 0) return;
  call.sigmoid ? run_backward<PlainGate>(call, grads, stream)
               : run_backward<Silu>(call, grads, stream);
}

}  // namespace tessera::cuda
