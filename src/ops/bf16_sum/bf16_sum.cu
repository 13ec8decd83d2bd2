#include <cuda_bf16.h>

#include <algorithm>

#include "ops/bf16_sum/bf16_sum_kernels.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1024;

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMaxBlocks));
}

__device__ int64_t first_index() {
  return int64_t{kThreads} * blockIdx.x + threadIdx.x;
}
__device__ int64_t index_step() {
  return int64_t{kThreads} * gridDim.x;
}

__global__ void __launch_bounds__(kThreads)
    round_values(const float* x, int64_t count, __nv_bfloat16* rounded) {
  wait_for_earlier();
  for (int64_t i = first_index(); i < count; i += index_step())
    rounded[i] = __float2bfloat16_rn(x[i]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sum_parts(const Bf16PartsSum s) {
  wait_for_earlier();
  const auto* const others = static_cast<const __nv_bfloat16*>(s.others);
  for (int64_t i = first_index(); i < s.count; i += index_step()) {
    const auto own_part = static_cast<float>(static_cast<const T*>(s.own_part)[i]);
    const float own = __bfloat162float(__float2bfloat16_rn(own_part));
    float sum = 0;
    for (int p = 0; p < s.num_parts; ++p) {
      const int64_t before = p < s.own ? p : p - 1;
      sum += p == s.own ? own : __bfloat162float(others[before * s.count + i]);
    }
    static_cast<T*>(s.sum)[i] = static_cast<T>(sum);
  }
}

template <int kWidth, bool kSets>
struct AddToBf16Map {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 4;
  struct Loaded {
    Pack<float, kWidth> x;
    Pack<BFloat16, kWidth> sum;
  };

  const float* x;
  BFloat16* sum;

  __device__ Loaded load(int64_t vector, uint32_t /*column*/) const {
    Loaded loaded = {};
    loaded.x = load_pack<kWidth>(x + vector * kWidth);
    if constexpr (!kSets) loaded.sum = load_pack<kWidth>(sum + vector * kWidth);
    return loaded;
  }
  __device__ void store(int64_t vector, uint32_t /*column*/, const Loaded& loaded) const {
    Floats<kWidth> total = to_floats(loaded.x);
    if constexpr (!kSets) {
      const Floats<kWidth> before = to_floats(loaded.sum);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) total[i] = before[i] + total[i];
    }
    cuda::store(sum + vector * kWidth, total);
  }
};

template <int kWidth, bool kSets>
void add_vectors(const Bf16Addition& call, cudaStream_t stream) {
  launch_map(AddToBf16Map<kWidth, kSets>{call.x, static_cast<BFloat16*>(call.sum)},
             {.bound = call.count / kWidth}, 1, stream);
}

}  // namespace

void launch_round_to_bf16(const float* x, int64_t count, void* rounded, cudaStream_t stream) {
  if (count == 0) return;
  launch_early(round_values, {blocks_for(count), kThreads}, stream, x, count,
               static_cast<__nv_bfloat16*>(rounded));
}

void launch_sum_bf16_parts(const Bf16PartsSum& call, cudaStream_t stream) {
  if (call.count == 0) return;
  with_type(call.dtype, [&]<typename T>() {
    launch_early(sum_parts<T>, {blocks_for(call.count), kThreads}, stream, call);
  });
}

void launch_add_to_bf16(const Bf16Addition& call, cudaStream_t stream) {
  constexpr int kWidth = kVectorWidth<BFloat16>;
  if (call.count % kWidth == 0 && are_aligned(call.x, call.sum))
    return call.sets ? add_vectors<kWidth, true>(call, stream)
                     : add_vectors<kWidth, false>(call, stream);
  call.sets ? add_vectors<1, true>(call, stream) : add_vectors<1, false>(call, stream);
}

}  // namespace tessera::cuda
