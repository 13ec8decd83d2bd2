#include "ops/adamw/adamw_kernels.h"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 30;  // of a launch

template <int kWidth, bool kWeight>
struct AdamWMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 6;
  struct Loaded {
    Pack<float, kWidth> grad;
    Pack<float, kWidth> master;
    Pack<float, kWidth> m;
    Pack<float, kWidth> v;
  };

  AdamWFactors f;
  AdamWSlice slice;
  int64_t first;

  __device__ int64_t at(uint32_t vector) const {
    return first + static_cast<int64_t>(vector) * kWidth;
  }
  __device__ Loaded load(int64_t /*row*/, uint32_t vector) const {
    const int64_t i = at(vector);
    return {load_pack<kWidth>(slice.grad + i), load_pack<kWidth>(slice.master + i),
            load_pack<kWidth>(slice.m + i), load_pack<kWidth>(slice.v + i)};
  }
  __device__ void store(int64_t /*row*/, uint32_t vector, const Loaded& loaded) const {
    const int64_t begin = at(vector);
    Floats<kWidth> master = to_floats(loaded.master);
    Floats<kWidth> m = to_floats(loaded.m);
    Floats<kWidth> v = to_floats(loaded.v);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float g = loaded.grad.at[i] * f.grad_scale;
      m[i] += (g - m[i]) * f.new_m;
      v[i] = v[i] * f.old_v + f.new_v * g * g;
      const float denominator = sqrtf(v[i]) / f.sqrt_bias2 + f.eps;
      master[i] = master[i] * f.decay - f.step_size * (m[i] / denominator);
    }
    cuda::store(slice.master + begin, master);
    cuda::store(slice.m + begin, m);
    cuda::store(slice.v + begin, v);
    if constexpr (kWeight) cuda::store(static_cast<BFloat16*>(slice.weight) + begin, master);
  }
};

template <int kWidth>
void launch(const AdamWFactors& factors, const AdamWSlice& slice, int64_t first, int64_t end,
            cudaStream_t stream) {
  const int64_t vectors = std::min(end - first, kMaxElements) / kWidth;
  if (slice.weight != nullptr) {
    launch_map(AdamWMap<kWidth, true>{factors, slice, first}, {.bound = 1}, vectors, stream);
  } else {
    launch_map(AdamWMap<kWidth, false>{factors, slice, first}, {.bound = 1}, vectors, stream);
  }
  if (first + kMaxElements < end) launch<kWidth>(factors, slice, first + kMaxElements, end, stream);
}

}  // namespace

void launch_adamw(const AdamWFactors& factors, const AdamWSlice& slice, cudaStream_t stream) {
  constexpr int kWidth = kVectorWidth<float>;
  const bool aligned = are_aligned(slice.grad, slice.master, slice.m, slice.v, slice.weight);
  const int64_t whole = aligned ? slice.count / kWidth * kWidth : 0;
  launch<kWidth>(factors, slice, 0, whole, stream);
  launch<1>(factors, slice, whole, slice.count, stream);
}

}  // namespace tessera::cuda
