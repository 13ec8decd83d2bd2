#include "ops/cuda/activation_math.cuh"
#include "ops/cuda/activation_shares.cuh"
#include "ops/cuda/fp8_rows.cuh"
#include "ops/cuda/short_kernel.cuh"

namespace tessera::cuda {
namespace {

using namespace activation;

struct Params {
  RowCount rows;
  int size;
  int64_t in_width;
  int64_t out_width;
  const void* in;
  const float* probs;
  void* out;
  Fp8Rows fp8;
};

template <bool kGated, typename Function, int kWidth>
__device__ __forceinline__ Floats<kWidth> activate(const Function& function,
                                                   const Floats<kWidth>& gate,
                                                   const Floats<kWidth>& up, float prob) {
  Floats<kWidth> x;
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    x[i] = kGated ? function.value(gate[i]) * function.other(up[i]) * prob
                  : function.value(gate[i]) * prob;
  return x;
}

/// Enough threads fit for one vector of each to keep the memory busy.
template <typename Function, bool kGated, bool kGivesFp8, typename T, int kWidth>
struct ActivationMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 8;
  struct Loaded {
    Pack<T, kWidth> gate;
    Pack<T, kWidth> up;
    float prob;
  };

  Function function;
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
    const auto act = activate<kGated>(function, to_floats(loaded.gate), up, loaded.prob);
    T* const to = static_cast<T*>(p.out) + row * p.out_width + vector * kWidth;
    if constexpr (kGivesFp8) {
      const auto rounded = to_bf16(act);
      cuda::store(to, rounded);
      store_fp8(p.fp8, row, static_cast<int>(vector) * kWidth, rounded);
    } else {
      cuda::store(to, act);
    }
  }
};

template <typename Function, bool kGated, typename T, int kWidth>
__global__ void __launch_bounds__(kShareThreads, kShareBlocks)
    activate_rows(const Function function, const __grid_constant__ Params p,
                  const __grid_constant__ SizedExperts experts, int row_warps) {
  wait_for_earlier();
  let_next_begin_if_short();
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
    store(out + column, activate<kGated>(function, to_floats(x), up, prob));
  });
}

}  // namespace

void launch_activation(const ActivationRows& call, const SizedExperts& experts, void* out,
                       const Fp8Rows& fp8, cudaStream_t stream) {
  if (call.rows.bound == 0) return;
  const Params params = {.rows = call.rows,
                         .size = static_cast<int>(call.size),
                         .in_width = call.in_width,
                         .out_width = call.out_width,
                         .in = call.in,
                         .probs = call.probs,
                         .out = out,
                         .fp8 = fp8};
  const bool vectors = has_whole_vectors(call, experts) && are_aligned(call.in, out);
  if (fp8.values != nullptr && !vectors) check(cudaErrorMisalignedAddress);
  with_activation(call.function, [&]<bool kGated>(auto function) {
    using Function = decltype(function);
    if (fp8.values != nullptr) {
      return launch_map(ActivationMap<Function, kGated, true, BFloat16, 8>{function, params},
                        call.rows, call.size / 8, stream);
    }
    with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
      if (experts.count == 0) {
        launch_map(ActivationMap<Function, kGated, false, T, kWidth>{function, params}, call.rows,
                   call.size / kWidth, stream);
      } else {
        const RowLaunch rows(call, kWidth);
        launch_early(activate_rows<Function, kGated, T, kWidth>, {rows.blocks, rows.threads},
                     stream, function, params, experts, rows.row_warps);
      }
    });
  });
}

}  // namespace tessera::cuda
