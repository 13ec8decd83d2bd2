#include "ops/adamw/adamw_kernels.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/parts.cuh"
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

  AdamWStep step;
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
  /// What decides about the step is looked at here, where the loads above are under way already.
  /// Each rounding is written out: the compiler would join products and sums otherwise in each
  /// kernel, and a parameter's bits would depend on how ranks and launches cut it.
  __device__ void store(int64_t /*row*/, uint32_t vector, const Loaded& loaded) const {
    const AdamWGradScale grad_scale = *step.grad_scale;
    if (grad_scale.found_inf != 0) return;
    const AdamWFactors f = *step.factors;
    const int64_t begin = at(vector);
    Floats<kWidth> master = to_floats(loaded.master);
    Floats<kWidth> m = to_floats(loaded.m);
    Floats<kWidth> v = to_floats(loaded.v);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float grad = loaded.grad.at[i];
      const float g = __fmul_rn(grad, grad_scale.scale);
      m[i] = __fmaf_rn(__fmaf_rn(grad, grad_scale.scale, -m[i]), f.new_m, m[i]);
      v[i] = __fmaf_rn(g, __fmul_rn(f.new_v, g), __fmul_rn(v[i], f.old_v));
      const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v[i]), f.sqrt_bias2), f.eps);
      const float change = __fmul_rn(f.step_size, __fdiv_rn(m[i], denominator));
      master[i] = __fmaf_rn(master[i], f.decay, -change);
    }
    cuda::store(slice.master + begin, master);
    cuda::store(slice.m + begin, m);
    cuda::store(slice.v + begin, v);
    if constexpr (kWeight) cuda::store(static_cast<BFloat16*>(slice.weight) + begin, master);
  }
};

/// Slices whose blocks of kListBlock elements one launch takes.
struct SliceList {
  static constexpr int kMax = 64;
  AdamWSlice slices[kMax];
  int first_block[kMax + 1];
  int count;
  uint64_t aligned;  // bit i: slice i begins where vectors can
};

constexpr int kListThreads = 256;
constexpr int kListWidth = kVectorWidth<float>;
constexpr int kListBlock = kListThreads * kListWidth;
constexpr int64_t kListedElements = int64_t{1} << 20;  // above: longer than a launch takes, alone

template <int kWidth, bool kWeight>
__device__ __forceinline__ void update_vector(const AdamWStep& step, const AdamWSlice& slice,
                                              int64_t first) {
  const AdamWMap<kWidth, kWeight> map{step, slice, first};
  map.store(0, 0, map.load(0, 0));
}

template <bool kWeight>
__global__ void __launch_bounds__(kListThreads)
    update_list(const __grid_constant__ SliceList list, const AdamWStep step) {
  wait_for_earlier();
  const int block = static_cast<int>(blockIdx.x);
  const int i = find_part(list.first_block, list.count, block);
  const AdamWSlice slice = list.slices[i];
  const int64_t first = static_cast<int64_t>(block - list.first_block[i]) * kListBlock +
                        static_cast<int64_t>(threadIdx.x) * kListWidth;
  if (first + kListWidth <= slice.count && (list.aligned >> i & 1) != 0) {
    update_vector<kListWidth, kWeight>(step, slice, first);
  } else {
    for (int64_t at = first; at < min(first + kListWidth, slice.count); ++at)
      update_vector<1, kWeight>(step, slice, at);
  }
}

void launch_list(const AdamWStep& step, SliceList& list, cudaStream_t stream) {
  const int blocks = list.first_block[list.count];
  if (blocks > 0) {
    const auto kernel = list.slices[0].weight != nullptr ? update_list<true> : update_list<false>;
    launch_early(kernel, {static_cast<unsigned>(blocks), kListThreads}, stream, list, step);
  }
  list.count = 0;
  list.aligned = 0;
}

bool is_aligned(const AdamWSlice& slice) {
  return are_aligned(slice.grad, slice.master, slice.m, slice.v, slice.weight);
}

void append(SliceList& list, const AdamWSlice& slice) {
  const int blocks = static_cast<int>(divide_up(slice.count, kListBlock));
  list.slices[list.count] = slice;
  list.first_block[list.count + 1] = list.first_block[list.count] + blocks;
  list.aligned |= uint64_t{is_aligned(slice)} << list.count;
  ++list.count;
}

template <int kWidth>
void launch(const AdamWStep& step, const AdamWSlice& slice, int64_t first, int64_t end,
            cudaStream_t stream) {
  const int64_t vectors = std::min(end - first, kMaxElements) / kWidth;
  if (slice.weight != nullptr) {
    launch_map(AdamWMap<kWidth, true>{step, slice, first}, {.bound = 1}, vectors, stream);
  } else {
    launch_map(AdamWMap<kWidth, false>{step, slice, first}, {.bound = 1}, vectors, stream);
  }
  if (first + kMaxElements < end) launch<kWidth>(step, slice, first + kMaxElements, end, stream);
}

void launch_alone(const AdamWStep& step, const AdamWSlice& slice, cudaStream_t stream) {
  constexpr int kWidth = kVectorWidth<float>;
  const int64_t whole = is_aligned(slice) ? slice.count / kWidth * kWidth : 0;
  launch<kWidth>(step, slice, 0, whole, stream);
  launch<1>(step, slice, whole, slice.count, stream);
}

}  // namespace

void launch_adamw(const AdamWStep& step, std::span<const AdamWSlice> slices, cudaStream_t stream) {
  SliceList list = {};
  for (const AdamWSlice& slice : slices) {
    if (slice.count > kListedElements) {
      launch_alone(step, slice, stream);
      continue;
    }
    if (slice.count == 0) continue;
    if (list.count == SliceList::kMax) launch_list(step, list, stream);
    append(list, slice);
  }
  launch_list(step, list, stream);
}

}  // namespace tessera::cuda
