#include <type_traits>

#include "ops/adamw/adamw_kernels.h"
#include "ops/adamw/adamw_update.cuh"
#include "ops/adamw/state_rounding.h"
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

/// How a slice is kept: the types of AdamW's gradients and outputs.
template <typename GradType, typename MasterType, typename FirstMoment, typename SecondMoment,
          bool kHasWeight>
struct Kept {
  using Grad = GradType;
  using Master = MasterType;
  using M = FirstMoment;
  using V = SecondMoment;
  static constexpr bool kWeight = kHasWeight;
  static constexpr bool kRemainder = kIsRemainder<Master>;
  static constexpr bool kRandom = std::is_same_v<Master, BFloat16> ||
                                  std::is_same_v<Master, uint8_t> || !std::is_same_v<M, float> ||
                                  !std::is_same_v<V, float>;
};

struct Nothing {};

template <typename K, int kWidth>
struct Loaded {
  Pack<typename K::Grad, kWidth> grad;
  Pack<typename K::Master, kWidth> master;
  Pack<typename K::M, kWidth> m;
  Pack<typename K::V, kWidth> v;
  std::conditional_t<K::kRemainder, Pack<BFloat16, kWidth>, Nothing> weight;
};

template <int kWidth, typename T>
__device__ __forceinline__ Pack<T, kWidth> load_from(const void* memory, int64_t first) {
  return load_pack<kWidth>(static_cast<const T*>(memory) + first);
}

template <typename K, int kWidth>
__device__ __forceinline__ Loaded<K, kWidth> load_elements(const AdamWSlice& slice, int64_t first) {
  Loaded<K, kWidth> loaded{load_from<kWidth, typename K::Grad>(slice.grad, first),
                           load_from<kWidth, typename K::Master>(slice.master, first),
                           load_from<kWidth, typename K::M>(slice.m, first),
                           load_from<kWidth, typename K::V>(slice.v, first),
                           {}};
  if constexpr (K::kRemainder) loaded.weight = load_from<kWidth, BFloat16>(slice.weight, first);
  return loaded;
}

/// Stores values as T, those of BF16 rounded by these bits of each element's.
template <typename T, int kWidth>
__device__ __forceinline__ void keep(void* memory, int64_t first, const Floats<kWidth>& values,
                                     const uint32_t (&random)[kWidth], uint32_t (*bits)(uint32_t)) {
  T* const to = static_cast<T*>(memory) + first;
  if constexpr (std::is_same_v<T, float>) {
    store(to, values);
  } else {
    Pack<BFloat16, kWidth> pack;
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      pack.at[i] =
          __ushort_as_bfloat16(round_stochastically(__float_as_uint(values[i]), bits(random[i])));
    store(to, pack);
  }
}

template <typename K, int kWidth>
__device__ __forceinline__ void keep_masters(const AdamWSlice& slice, int64_t first,
                                             Floats<kWidth>& master,
                                             const uint32_t (&random)[kWidth]) {
  Pack<typename K::Master, kWidth> kept;
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    kept.at[i] = keep_master<typename K::Master>(master[i], random[i]);
  store(static_cast<typename K::Master*>(slice.master) + first, kept);
  if constexpr (K::kWeight) store(static_cast<BFloat16*>(slice.weight) + first, master);
}

template <typename K, int kWidth>
__device__ __forceinline__ void update(const Loaded<K, kWidth>& loaded, const AdamWFactors& f,
                                       float grad_scale, const AdamWSlice& slice, int64_t first) {
  Floats<kWidth> master;
  Floats<kWidth> m = to_floats(loaded.m);
  Floats<kWidth> v = to_floats(loaded.v);
  uint32_t random[kWidth] = {};
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const auto grad = static_cast<float>(loaded.grad.at[i]);
    if constexpr (K::kRemainder) {
      master[i] = master_of(loaded.master.at[i], loaded.weight.at[i]);
    } else {
      master[i] = static_cast<float>(loaded.master.at[i]);
    }
    if constexpr (K::kRandom)
      random[i] = rounding_bits(f.update, __float_as_uint(grad), __float_as_uint(m[i]),
                                __float_as_uint(v[i]), __float_as_uint(master[i]));
    update_element(grad, grad_scale, f, master[i], m[i], v[i]);
  }
  keep_masters<K>(slice, first, master, random);
  keep<typename K::M>(slice.m, first, m, random, first_moment_bits);
  keep<typename K::V>(slice.v, first, v, random, second_moment_bits);
}

template <typename K>
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
    Loaded<K, kListWidth> loaded[kListVectors];
#pragma unroll
    for (int i = 0; i < kListVectors; ++i)
      loaded[i] = load_elements<K, kListWidth>(slice, first + i * kListStep);
    // What decides about the step is looked at here, where the loads above are under way already.
    const AdamWGradScale grad_scale = *step.grad_scale;
    if (grad_scale.found_inf != 0) return;
    const AdamWFactors factors = *step.factors;
#pragma unroll
    for (int i = 0; i < kListVectors; ++i)
      update(loaded[i], factors, grad_scale.scale, slice, first + i * kListStep);
    return;
  }
  if (step.grad_scale->found_inf != 0) return;
  for (int i = 0; i < kListVectors; ++i) {
    const int64_t begin = first + i * kListStep;
    for (int64_t at = begin; at < min(begin + kListWidth, slice.count); ++at)
      update(load_elements<K, 1>(slice, at), *step.factors, step.grad_scale->scale, slice, at);
  }
}

using ListKernel = void (*)(SliceList, AdamWStep);

template <typename G, typename M, typename V>
ListKernel choose_by_master(const AdamWKind& kind) {
  switch (kind.master) {
    case DType::kU16:
      return update_list<Kept<G, uint16_t, M, V, true>>;
    case DType::kU8:
      return update_list<Kept<G, uint8_t, M, V, true>>;
    case DType::kBF16:
      return update_list<Kept<G, BFloat16, M, V, false>>;
    default:
      return kind.has_weight ? update_list<Kept<G, float, M, V, true>>
                             : update_list<Kept<G, float, M, V, false>>;
  }
}

ListKernel choose_kernel(const AdamWKind& kind) {
  ListKernel kernel = nullptr;
  with_type(kind.grad, [&]<typename G>() {
    with_type(kind.m, [&]<typename M>() {
      with_type(kind.v, [&]<typename V>() { kernel = choose_by_master<G, M, V>(kind); });
    });
  });
  return kernel;
}

void launch_list(ListKernel kernel, const AdamWStep& step, SliceList& list, cudaStream_t stream) {
  const int blocks = list.first_block[list.count];
  if (blocks > 0)
    launch_early(kernel, {static_cast<unsigned>(blocks), kListThreads}, stream, list, step);
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

void launch_adamw(const AdamWKind& kind, const AdamWStep& step, std::span<const AdamWSlice> slices,
                  cudaStream_t stream) {
  const ListKernel kernel = choose_kernel(kind);
  SliceList list = {};
  for (const AdamWSlice& slice : slices) {
    if (slice.count == 0) continue;
    if (list.count == SliceList::kMax) launch_list(kernel, step, list, stream);
    append(list, slice);
  }
  launch_list(kernel, step, list, stream);
}

}  // namespace tessera::cuda
