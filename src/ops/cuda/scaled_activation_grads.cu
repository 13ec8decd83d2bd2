// Gradients of activations whose inputs were kept in FP8.
#include "ops/cuda/activation_grads.cuh"
#include "ops/cuda/fp8_values.cuh"

namespace tessera::cuda {
namespace {

/// As E4M3 with scales; a vector has one.
template <typename T>
struct ScaledRows {
  using Value = T;
  template <int kWidth>
  struct Loaded {
    Pack<uint8_t, kWidth> codes;
    float scale;
  };

  const uint8_t* codes;
  const float* scales;
  int64_t width;
  int64_t scales_of_row;
  Divider columns_of_scale;

  template <int kWidth>
  __device__ __forceinline__ Loaded<kWidth> load(int64_t row, int column) const {
    return {load_pack<kWidth>(codes + row * width + column),
            scales[row * scales_of_row + columns_of_scale.quotient(static_cast<uint32_t>(column))]};
  }
  template <int kWidth>
  static __device__ __forceinline__ Floats<kWidth> values(const Loaded<kWidth>& loaded) {
    return from_fp8</*kE4m3=*/true>(loaded.codes, loaded.scale);
  }
};

}  // namespace

void launch_scaled_activation_backward(const ActivationRows& call, const RowScales& scales,
                                       const SizedExperts& experts, const ActivationGrads& grads,
                                       cudaStream_t stream) {
  if (call.rows.bound == 0) return;
  const auto rows = [&]<typename T>() {
    return ScaledRows<T>{static_cast<const uint8_t*>(call.in), scales.scales, call.in_width,
                         divide_up(call.in_width, scales.columns_of_scale),
                         Divider(static_cast<uint32_t>(scales.columns_of_scale))};
  };
  activation::launch_grads(call, experts, grads,
                           are_whole_vectors(call.dtype, scales.columns_of_scale), rows, stream);
}

}  // namespace tessera::cuda
