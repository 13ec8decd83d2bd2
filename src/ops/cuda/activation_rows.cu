// Where all rows have one size and nothing is summed up over a row, every thread takes a vector.
// Otherwise some of a block's warps share a row, and each of their threads takes a vector at a time
// too: that leaves registers for enough threads to keep the memory busy.
#include "ops/cuda/activation_rows.h"

#include <algorithm>

#include "ops/cuda/activation_math.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 8;  // of a block, at most
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocks = 5;  // of an SM

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

/// What a warp takes: of its row each `warps`-th piece of 32 vectors, the first one with number
/// `piece`.
struct Share {
  int64_t row;
  int piece;
  int warps;

  __device__ __forceinline__ explicit Share(int row_warps) : warps(row_warps) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int block_rows = static_cast<int>(blockDim.x) / 32 / warps;
    row = static_cast<int64_t>(blockIdx.x) * block_rows + warp / warps;
    piece = warp % warps;
  }
  /// Calls use(column) for the first column of each of the thread's vectors.
  template <int kWidth, typename Use>
  __device__ __forceinline__ void for_columns(int size, Use use) const {
    constexpr int kPiece = 32 * kWidth;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int column = piece * kPiece + lane * kWidth; column < size; column += warps * kPiece)
      use(column);
  }
};

template <typename Function, bool kGated, int kWidth>
__device__ __forceinline__ Floats<kWidth> activate(const Floats<kWidth>& gate,
                                                   const Floats<kWidth>& up, float prob) {
  Floats<kWidth> x;
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    x[i] = kGated ? Function::value(gate[i]) * Function::other(up[i]) * prob
                  : Function::value(gate[i]) * prob;
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

/// Turns gate and up into their gradients, finds the activation, which costs registers where it is
/// used, and returns the gradient of the prob.
template <typename Function, bool kGated, int kWidth>
__device__ __forceinline__ float differentiate(Floats<kWidth>& gate, Floats<kWidth>& up,
                                               const Floats<kWidth>& grad, float prob,
                                               Floats<kWidth>& act) {
  float dot = 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const Slope slope = Function::slope(gate[i]);
    const float other = kGated ? Function::other(up[i]) : 1.0F;
    dot += slope.value * other * grad[i];
    act[i] = slope.value * other * prob;
    const float g = grad[i] * prob;
    gate[i] = g * other * slope.derivative;
    up[i] = Function::other_grad(up[i], g * slope.value);
  }
  return dot;
}

/// Without the gradient of the probs.
template <typename Function, bool kGated, bool kGivesAct, typename T, int kWidth>
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
    if constexpr (kGivesAct)
      cuda::store(static_cast<T*>(p.act) + row * p.out_width + vector * kWidth, act);
  }
};

template <typename Function, bool kGated, typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocks)
    activate_rows(const __grid_constant__ Params p, const __grid_constant__ SizedExperts experts,
                  int row_warps) {
  wait_for_earlier();
  const Share share(row_warps);
  if (share.row >= p.rows.in_use()) return;
  const int size = size_of(share.row, p.size, experts);
  const T* gate = static_cast<const T*>(p.in) + share.row * p.in_width;
  T* out = static_cast<T*>(p.out) + share.row * p.out_width;
  const float prob = p.probs == nullptr ? 1.0F : p.probs[share.row];
  share.for_columns<kWidth>(size, [&](int column) {
    const auto x = load_pack<kWidth>(gate + column);
    Floats<kWidth> up = {};
    if constexpr (kGated) up = to_floats(load_pack<kWidth>(gate + size + column));
    store(out + column, activate<Function, kGated>(to_floats(x), up, prob));
  });
}

/// A warp's part of the gradient of its row's prob.
template <typename Function, bool kGated, bool kGivesAct, typename T, int kWidth>
__device__ __forceinline__ float differentiate_row(const Params& p, const SizedExperts& experts,
                                                   const Share& share) {
  const int size = size_of(share.row, p.size, experts);
  const T* gate = static_cast<const T*>(p.in) + share.row * p.in_width;
  const T* grad = static_cast<const T*>(p.grad) + share.row * p.out_width;
  T* grad_gate = static_cast<T*>(p.out) + share.row * p.in_width;
  T* act = static_cast<T*>(p.act) + share.row * p.out_width;
  const float prob = p.probs == nullptr ? 1.0F : p.probs[share.row];
  float dot = 0;
  share.for_columns<kWidth>(size, [&](int column) {
    const auto gates = load_pack<kWidth>(gate + column);
    Pack<T, kWidth> ups;
    if constexpr (kGated) ups = load_pack<kWidth>(gate + size + column);
    const auto grads = load_pack<kWidth>(grad + column);
    Floats<kWidth> x = to_floats(gates);
    Floats<kWidth> up = {};
    if constexpr (kGated) up = to_floats(ups);
    Floats<kWidth> value;
    dot += differentiate<Function, kGated>(x, up, to_floats(grads), prob, value);
    store(grad_gate + column, x);
    if constexpr (kGated) store(grad_gate + size + column, up);
    if constexpr (kGivesAct) store(act + column, value);
  });
  return sum_lanes(dot);
}

template <typename Function, bool kGated, bool kGivesAct, typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocks)
    differentiate_rows(const __grid_constant__ Params p,
                       const __grid_constant__ SizedExperts experts, int row_warps) {
  wait_for_earlier();
  __shared__ float dots[kWarps];
  const Share share(row_warps);
  const bool holds = share.row < p.rows.in_use();
  const float dot =
      holds ? differentiate_row<Function, kGated, kGivesAct, T, kWidth>(p, experts, share) : 0.0F;
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

/// The launch of a kernel whose warps share rows.
struct RowLaunch {
  int row_warps;
  unsigned blocks;
  unsigned threads;

  RowLaunch(const ActivationRows& call, int width)
      : row_warps(
            static_cast<int>(std::clamp<int64_t>(divide_up(call.size, 32 * width), 1, kWarps))) {
    const int block_rows = kWarps / row_warps;
    blocks = static_cast<unsigned>(divide_up(call.rows.bound, block_rows));
    threads = static_cast<unsigned>(32 * row_warps * block_rows);
  }
};

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
        const RowLaunch rows(call, kWidth);
        launch_early(activate_rows<Function, kGated, T, kWidth>, {rows.blocks, rows.threads},
                     stream, params, experts, rows.row_warps);
      }
    });
  });
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
  const auto launch = [&]<typename Function, bool kGated, bool kGivesAct>() {
    with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
      if (experts.count == 0 && grads.grad_probs == nullptr) {
        launch_map(ActivationBackwardMap<Function, kGated, kGivesAct, T, kWidth>{params}, call.rows,
                   call.size / kWidth, stream);
      } else {
        const RowLaunch rows(call, kWidth);
        launch_early(differentiate_rows<Function, kGated, kGivesAct, T, kWidth>,
                     {rows.blocks, rows.threads}, stream, params, experts, rows.row_warps);
      }
    });
  };
  with_activation(call.kind, [&]<typename Function, bool kGated>() {
    grads.act == nullptr ? launch.template operator()<Function, kGated, false>()
                         : launch.template operator()<Function, kGated, true>();
  });
}

}  // namespace tessera::cuda
