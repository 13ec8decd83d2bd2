#include "ops/adamw/adamw_kernels.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/parts.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

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
constexpr int kListVectors = 2;  // of a thread, loaded before the first is used
constexpr int kListStep = kListThreads * kListWidth;
constexpr int kListBlock = kListVectors * kListStep;
constexpr int kBlocksOfSm = 4;  // for whose registers there must be room

template <int kWidth>
struct Loaded {
  Pack<float, kWidth> grad;
  Pack<float, kWidth> master;
  Pack<float, kWidth> m;
  Pack<float, kWidth> v;
};

template <int kWidth>
__device__ __forceinline__ Loaded<kWidth> load_elements(const AdamWSlice& slice, int64_t first) {
  return {load_pack<kWidth>(slice.grad + first), load_pack<kWidth>(slice.master + first),
          load_pack<kWidth>(slice.m + first), load_pack<kWidth>(slice.v + first)};
}

/// Each rounding is written out: the compiler would join products and sums otherwise in each
/// kernel, and a parameter's bits would depend on how ranks and launches cut it.
template <int kWidth, bool kWeight>
__device__ __forceinline__ void update(const Loaded<kWidth>& loaded, const AdamWFactors& f,
                                       float grad_scale, const AdamWSlice& slice, int64_t first) {
  Floats<kWidth> master = to_floats(loaded.master);
  Floats<kWidth> m = to_floats(loaded.m);
  Floats<kWidth> v = to_floats(loaded.v);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float grad = loaded.grad.at[i];
    const float g = __fmul_rn(grad, grad_scale);
    m[i] = __fmaf_rn(__fmaf_rn(grad, grad_scale, -m[i]), f.new_m, m[i]);
    v[i] = __fmaf_rn(g, __fmul_rn(f.new_v, g), __fmul_rn(v[i], f.old_v));
    const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v[i]), f.sqrt_bias2), f.eps);
    const float change = __fmul_rn(f.step_size, __fdiv_rn(m[i], denominator));
    master[i] = __fmaf_rn(master[i], f.decay, -change);
  }
  store(slice.master + first, master);
  store(slice.m + first, m);
  store(slice.v + first, v);
  if constexpr (kWeight) store(static_cast<BFloat16*>(slice.weight) + first, master);
}

template <bool kWeight>
__global__ void __launch_bounds__(kListThreads, kBlocksOfSm)
    update_list(const __grid_constant__ SliceList list, const AdamWStep step) {
  wait_for_earlier();
  const int block = static_cast<int>(blockIdx.x);
  const int slice_idx = find_part(list.first_block, list.count, block);
  const AdamWSlice slice = list.slices[slice_idx];
  const int64_t first = static_cast<int64_t>(block - list.first_block[slice_idx]) * kListBlock +
                        static_cast<int64_t>(threadIdx.x) * kListWidth;
  const bool aligned = (list.aligned >> slice_idx & 1) != 0;
  if (aligned && first + kListBlock - kListStep + kListWidth <= slice.count) {
    Loaded<kListWidth> loaded[kListVectors];
#pragma unroll
    for (int i = 0; i < kListVectors; ++i)
      loaded[i] = load_elements<kListWidth>(slice, first + i * kListStep);
    // What decides about the step is looked at here, where the loads above are under way already.
    const AdamWGradScale grad_scale = *step.grad_scale;
    if (grad_scale.found_inf != 0) return;
    const AdamWFactors factors = *step.factors;
#pragma unroll
    for (int i = 0; i < kListVectors; ++i)
      update<kListWidth, kWeight>(loaded[i], factors, grad_scale.scale, slice,
                                  first + i * kListStep);
    return;
  }
  if (step.grad_scale->found_inf != 0) return;
  for (int i = 0; i < kListVectors; ++i) {
    const int64_t begin = first + i * kListStep;
    for (int64_t at = begin; at < min(begin + kListWidth, slice.count); ++at)
      update<1, kWeight>(load_elements<1>(slice, at), *step.factors, step.grad_scale->scale, slice,
                         at);
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

}  // namespace

void launch_adamw(const AdamWStep& step, std::span<const AdamWSlice> slices, cudaStream_t stream) {
  SliceList list = {};
  for (const AdamWSlice& slice : slices) {
    if (slice.count == 0) continue;
    if (list.count == SliceList::kMax) launch_list(step, list, stream);
    append(list, slice);
  }
  launch_list(step, list, stream);
}

}  // namespace tessera::cuda
