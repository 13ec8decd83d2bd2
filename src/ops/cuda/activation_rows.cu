// Where all rows have one size and nothing is summed up over a row, every thread takes a vector.
// Otherwise a warp takes a row and loads up to kBatch vectors of every operand before it uses the
// first.
#include "ops/cuda/activation_rows.h"

#include <algorithm>

#include "ops/cuda/activation_math.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBatch = 3;

struct Params {
  RowCount rows;
  int size;
  int64_t in_width;
  int64_t out_width;
  const void* in;
  const float* probs;
  const void* grad;
  void* out;  ///< the result, or the gradient of the input
  float* grad_probs;
  void* act;  ///< the result, beside the gradient; or null
};

/// The gate columns of a row.
__device__ __forceinline__ int size_of(int64_t row, int size, const SizedExperts& experts) {
  if (experts.count == 0) return size;
  int low = 0;
  int high = experts.count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (experts.offsets[middle + 1] <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return experts.sizes[low];
}

__device__ __forceinline__ int64_t own_row() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
}

/// Calls load(slot, column) for up to kBatch vectors of a row, then use(slot, column) for each.
template <int kWidth, typename Load, typename Use>
__device__ __forceinline__ void for_each_batch(int size, Load load, Use use) {
  constexpr int kStep = 32 * kWidth;
  for (int first = static_cast<int>(threadIdx.x) % 32 * kWidth; first < size;
       first += kBatch * kStep) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (first + b * kStep < size) load(b, first + b * kStep);
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (first + b * kStep < size) use(b, first + b * kStep);
  }
}

template <typename Function, bool kGated, int kWidth>
__device__ __forceinline__ Floats<kWidth> activate(const Floats<kWidth>& gate,
                                                   const Floats<kWidth>& up, float prob) {
  Floats<kWidth> x;
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    x[i] = kGated ? Function::value(gate[i]) * up[i] * prob : Function::value(gate[i]) * prob;
  return x;
}

/// Enough threads fit for one vector of each to keep the memory busy.
template <typename Function, bool kGated, typename T, int kWidth>
struct ActivationMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 8;
  struct Loaded {
    Pack<T, kWidth> gate;
    Pack<T, kWidth> up;
    float prob;
  };

  Params p;

  __device__ __forceinline__ Loaded load(int64_t row, uint32_t vector) const {
    const T* gate = static_cast<const T*>(p.in) + row * p.in_width + vector * kWidth;
    Loaded loaded;
    loaded.gate = load_pack<kWidth>(gate);
    if constexpr (kGated) loaded.up = load_pack<kWidth>(gate + p.size);
    loaded.prob = p.probs == nullptr ? 1.0F : p.probs[row];
    return loaded;
  }
  __device__ __forceinline__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    Floats<kWidth> up = {};
    if constexpr (kGated) up = to_floats(loaded.up);
    cuda::store(static_cast<T*>(p.out) + row * p.out_width + vector * kWidth,
                activate<Function, kGated>(to_floats(loaded.gate), up, loaded.prob));
  }
};

/// Turns gate and up into their gradients, finds the activation and returns the gradient of the
/// prob.
template <typename Function, bool kGated, int kWidth>
__device__ __forceinline__ float differentiate(Floats<kWidth>& gate, Floats<kWidth>& up,
                                               const Floats<kWidth>& grad, float prob,
                                               Floats<kWidth>& act) {
  float dot = 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const Slope slope = Function::slope(gate[i]);
    const float other = kGated ? up[i] : 1.0F;
    dot += slope.value * other * grad[i];
    act[i] = slope.value * other * prob;
    const float g = grad[i] * prob;
    gate[i] = g * other * slope.derivative;
    up[i] = g * slope.value;
  }
  return dot;
}

/// Without the gradient of the probs.
template <typename Function, bool kGated, typename T, int kWidth>
struct ActivationBackwardMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 6;
  struct Loaded {
    Pack<T, kWidth> gate;
    Pack<T, kWidth> up;
    Pack<T, kWidth> grad;
    float prob;
  };

  Params p;

  __device__ __forceinline__ Loaded load(int64_t row, uint32_t vector) const {
    const T* gate = static_cast<const T*>(p.in) + row * p.in_width + vector * kWidth;
    Loaded loaded;
    loaded.gate = load_pack<kWidth>(gate);
    if constexpr (kGated) loaded.up = load_pack<kWidth>(gate + p.size);
    loaded.grad =
        load_pack<kWidth>(static_cast<const T*>(p.grad) + row * p.out_width + vector * kWidth);
    loaded.prob = p.probs == nullptr ? 1.0F : p.probs[row];
    return loaded;
  }
  __device__ __forceinline__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    T* grad_gate = static_cast<T*>(p.out) + row * p.in_width + vector * kWidth;
    Floats<kWidth> gate = to_floats(loaded.gate);
    Floats<kWidth> up = {};
    if constexpr (kGated) up = to_floats(loaded.up);
    Floats<kWidth> act;
    differentiate<Function, kGated>(gate, up, to_floats(loaded.grad), loaded.prob, act);
    cuda::store(grad_gate, gate);
    if constexpr (kGated) cuda::store(grad_gate + p.size, up);
    if (p.act != nullptr)
      cuda::store(static_cast<T*>(p.act) + row * p.out_width + vector * kWidth, act);
  }
};

template <typename Function, bool kGated, typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    activate_rows(const __grid_constant__ Params p, const __grid_constant__ SizedExperts experts) {
  const int64_t row = own_row();
  if (row >= p.rows.in_use()) return;
  const int size = size_of(row, p.size, experts);
  const T* gate = static_cast<const T*>(p.in) + row * p.in_width;
  T* out = static_cast<T*>(p.out) + row * p.out_width;
  const float prob = p.probs == nullptr ? 1.0F : p.probs[row];
  Pack<T, kWidth> gates[kBatch];
  Pack<T, kWidth> ups[kBatch];
  for_each_batch<kWidth>(
      size,
      [&](int slot, int column) {
        gates[slot] = load_pack<kWidth>(gate + column);
        if constexpr (kGated) ups[slot] = load_pack<kWidth>(gate + size + column);
      },
      [&](int slot, int column) {
        Floats<kWidth> up = {};
        if constexpr (kGated) up = to_floats(ups[slot]);
        store(out + column, activate<Function, kGated>(to_floats(gates[slot]), up, prob));
      });
}

template <typename Function, bool kGated, typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    differentiate_rows(const __grid_constant__ Params p,
                       const __grid_constant__ SizedExperts experts) {
  const int64_t row = own_row();
  if (row >= p.rows.in_use()) return;
  const int size = size_of(row, p.size, experts);
  const T* gate = static_cast<const T*>(p.in) + row * p.in_width;
  const T* grad = static_cast<const T*>(p.grad) + row * p.out_width;
  T* grad_gate = static_cast<T*>(p.out) + row * p.in_width;
  T* act = p.act == nullptr ? nullptr : static_cast<T*>(p.act) + row * p.out_width;
  const float prob = p.probs == nullptr ? 1.0F : p.probs[row];
  Pack<T, kWidth> gates[kBatch];
  Pack<T, kWidth> ups[kBatch];
  Pack<T, kWidth> grads[kBatch];
  float dot = 0;
  for_each_batch<kWidth>(
      size,
      [&](int slot, int column) {
        gates[slot] = load_pack<kWidth>(gate + column);
        if constexpr (kGated) ups[slot] = load_pack<kWidth>(gate + size + column);
        grads[slot] = load_pack<kWidth>(grad + column);
      },
      [&](int slot, int column) {
        Floats<kWidth> x = to_floats(gates[slot]);
        Floats<kWidth> up = {};
        if constexpr (kGated) up = to_floats(ups[slot]);
        Floats<kWidth> value;
        dot += differentiate<Function, kGated>(x, up, to_floats(grads[slot]), prob, value);
        store(grad_gate + column, x);
        if constexpr (kGated) store(grad_gate + size + column, up);
        if (act != nullptr) store(act + column, value);
      });
  if (p.grad_probs == nullptr) return;
  dot = sum_lanes(dot);
  if (threadIdx.x % 32 == 0) p.grad_probs[row] = dot;
}

bool has_whole_vectors(const ActivationRows& call, const SizedExperts& experts) {
  const bool equal = are_whole_vectors(call.dtype, call.size, call.in_width, call.out_width);
  return equal && std::all_of(experts.sizes, experts.sizes + experts.count,
                              [&](int size) { return are_whole_vectors(call.dtype, size); });
}

Params make_params(const ActivationRows& call) {
  Params params = {};
  params.rows = call.rows;
  params.size = static_cast<int>(call.size);
  params.in_width = call.in_width;
  params.out_width = call.out_width;
  params.in = call.in;
  params.probs = call.probs;
  return params;
}

unsigned num_blocks(const ActivationRows& call) {
  return static_cast<unsigned>(divide_up(call.rows.bound, kWarps));
}

}  // namespace

void launch_activation(const ActivationRows& call, const SizedExperts& experts, void* out,
                       cudaStream_t stream) {
  if (call.rows.bound == 0) return;
  Params params = make_params(call);
  params.out = out;
  const bool vectors = has_whole_vectors(call, experts) && are_aligned(call.in, out);
  with_activation(call.kind, [&]<typename Function, bool kGated>() {
    with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
      if (experts.count == 0) {
        launch_map(ActivationMap<Function, kGated, T, kWidth>{params}, call.rows,
                   call.size / kWidth, stream);
      } else {
        activate_rows<Function, kGated, T, kWidth>
            <<<num_blocks(call), kThreads, 0, stream>>>(params, experts);
      }
    });
  });
  check(cudaGetLastError());
}

void launch_activation_backward(const ActivationRows& call, const SizedExperts& experts,
                                const ActivationGrads& grads, cudaStream_t stream) {
  if (call.rows.bound == 0) return;
  Params params = make_params(call);
  params.grad = grads.grad;
  params.out = grads.grad_in;
  params.grad_probs = grads.grad_probs;
  params.act = grads.act;
  const bool vectors = has_whole_vectors(call, experts) &&
                       are_aligned(call.in, grads.grad, grads.grad_in, grads.act);
  with_activation(call.kind, [&]<typename Function, bool kGated>() {
    with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
      if (experts.count == 0 && grads.grad_probs == nullptr) {
        launch_map(ActivationBackwardMap<Function, kGated, T, kWidth>{params}, call.rows,
                   call.size / kWidth, stream);
      } else {
        differentiate_rows<Function, kGated, T, kWidth>
            <<<num_blocks(call), kThreads, 0, stream>>>(params, experts);
      }
    });
  });
  check(cudaGetLastError());
}

}  // namespace tessera::cuda
