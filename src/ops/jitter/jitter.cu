#include "ops/cuda/vector.cuh"
#include "ops/jitter/jitter_factors.h"
#include "ops/jitter/jitter_kernels.h"
#include "ops/noise.h"

namespace tessera::cuda {
namespace {

template <typename T, int kWidth>
struct JitterMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 6;
  struct Loaded {
    Pack<T, kWidth> x;
    int64_t token;
  };

  int64_t width;
  const int64_t* token_numbers;
  const int32_t* noise;
  const T* x;
  T* y;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    return {load_pack<kWidth>(x + row * width + vector * kWidth), token_numbers[row]};
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    const auto low = static_cast<uint32_t>(noise[kNoiseKeyLow]);
    const auto high = static_cast<uint32_t>(noise[kNoiseKeyHigh]);
    const float eps = __int_as_float(noise[kNoiseSize]);
    Floats<kWidth> values = to_floats(loaded.x);
    const uint32_t first = vector * kWidth;
    if (eps != 0) {
#pragma unroll
      for (uint32_t i = 0; i < kWidth; i += kJitterColumns) {
        const PhiloxWords words =
            jitter_words(low, high, loaded.token, (first + i) / kJitterColumns);
#pragma unroll
        for (uint32_t k = 0; k < kJitterColumns; ++k) {
          if constexpr (kWidth == 1) {
            if (first % kJitterColumns == k) values[0] *= jitter_factor(words.of[k], eps);
          } else {
            values[i + k] *= jitter_factor(words.of[k], eps);
          }
        }
      }
    }
    cuda::store(y + row * width + first, values);
  }
};

}  // namespace

void launch_jitter(const JitteredRows& call, cudaStream_t stream) {
  const bool vectors = are_whole_vectors(call.dtype, call.width) && are_aligned(call.x, call.y);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(JitterMap<T, kWidth>{call.width, call.token_numbers, call.noise,
                                    static_cast<const T*>(call.x), static_cast<T*>(call.y)},
               call.rows, call.width / kWidth, stream);
  });
}

}  // namespace tessera::cuda
