#include <type_traits>

#include "ops/adamw/adamw_kernels.h"
#include "ops/adamw/adamw_update.cuh"
#include "ops/adamw/moment_code.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/divider.h"
#include "ops/cuda/parts.cuh"
#include "ops/cuda/vector.cuh"

/// AdamW where a moment has scales: a warp updates a block of moments at a time, so that its
/// largest is known without memory between. Two blocks of a warp are under way at once.
namespace tessera::cuda {
namespace {

constexpr int kWarpSize = 32;
constexpr int kWarps = 8;
constexpr int kRowThreads = kWarps * kWarpSize;
constexpr int kLaneElements = static_cast<int>(kMomentBlock) / kWarpSize;
constexpr int kBlocksOfWarp = 2;
constexpr int kBlocksOfCta = kWarps * kBlocksOfWarp;
constexpr int kCtasOfSm = 3;  // for whose registers there must be room

/// A slice as the kernel sees it. Rows of whole blocks are seen as rows of one block each.
struct RowSlice {
  AdamWSlice elements;
  uint8_t* m_scale;
  uint8_t* v_scale;
  uint32_t columns;
  uint32_t num_blocks;
  Divider blocks_of_row;
};

struct RowList {
  static constexpr int kMax = 40;
  RowSlice slices[kMax];
  int first_cta[kMax + 1];
  int count;
  uint64_t vectors;  // bit i: elements of slice i can be moved four at a time
};
static_assert(sizeof(RowList) + sizeof(AdamWStep) <= 4096, "what a launch can take");

/// A moment that is kept as T, without scales.
template <typename T>
struct Unscaled {
  using Stored = T;
  static constexpr bool kScaled = false;
};
template <typename CodeType>
struct Scaled {
  using Code = CodeType;
  using Stored = typename Code::Code;
  static constexpr bool kScaled = true;
};

template <typename GradType, typename MasterType, typename FirstMoment, typename SecondMoment,
          bool kHasWeight>
struct KeptRows {
  using Grad = GradType;
  using Master = MasterType;
  using M = FirstMoment;
  using V = SecondMoment;
  static constexpr bool kWeight = kHasWeight;
};

/// The lane's elements of a block, which begins at element `first` and has `count`.
struct Place {
  int64_t first;
  uint32_t count;
  uint32_t lane;

  /// Of the lane's element i, from `first` on: neighbours, or every 32nd where they cannot be moved
  /// together.
  template <bool kVector>
  __device__ __forceinline__ uint32_t element(int i) const {
    return kVector ? lane * kLaneElements + i : lane + i * kWarpSize;
  }
  template <bool kVector>
  __device__ __forceinline__ bool has(int i) const {
    return element<kVector>(i) < count;
  }
};

__device__ __forceinline__ Place find_place(const RowSlice& slice, uint32_t block) {
  constexpr auto kSize = static_cast<uint32_t>(kMomentBlock);
  const uint32_t row = slice.blocks_of_row.quotient(block);
  const uint32_t column = (block - row * slice.blocks_of_row.divisor()) * kSize;
  return {static_cast<int64_t>(row) * slice.columns + column, min(kSize, slice.columns - column),
          threadIdx.x % kWarpSize};
}

template <typename T>
using LanePack = Pack<T, kLaneElements>;

/// Zeros for elements that the block does not have.
template <typename T, bool kVector>
__device__ __forceinline__ LanePack<T> load_lane(const void* memory, const Place& place) {
  const T* const from = static_cast<const T*>(memory) + place.first;
  LanePack<T> pack = {};
  if constexpr (kVector) {
    if (place.has<true>(0)) pack = load_pack<kLaneElements>(from + place.element<true>(0));
  } else {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if (place.has<false>(i)) pack.at[i] = from[place.element<false>(i)];
    }
  }
  return pack;
}

template <bool kVector, typename T>
__device__ __forceinline__ void store_lane(void* memory, const Place& place,
                                           const LanePack<T>& pack) {
  T* const to = static_cast<T*>(memory) + place.first;
  if constexpr (kVector) {
    if (place.has<true>(0)) store(to + place.element<true>(0), pack);
  } else {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if (place.has<false>(i)) to[place.element<false>(i)] = pack.at[i];
    }
  }
}

template <typename K>
struct LoadedBlock {
  LanePack<typename K::Grad> grad;
  LanePack<typename K::Master> master;
  LanePack<typename K::M::Stored> m;
  LanePack<typename K::V::Stored> v;
  LanePack<BFloat16> weight;
  uint8_t m_scale;
  uint8_t v_scale;
};

template <typename K, bool kVector>
__device__ __forceinline__ LoadedBlock<K> load_block(const RowSlice& slice, uint32_t block) {
  const Place place = find_place(slice, block);
  LoadedBlock<K> loaded = {};
  loaded.grad = load_lane<typename K::Grad, kVector>(slice.elements.grad, place);
  loaded.master = load_lane<typename K::Master, kVector>(slice.elements.master, place);
  loaded.m = load_lane<typename K::M::Stored, kVector>(slice.elements.m, place);
  loaded.v = load_lane<typename K::V::Stored, kVector>(slice.elements.v, place);
  if constexpr (kIsRemainder<typename K::Master>)
    loaded.weight = load_lane<BFloat16, kVector>(slice.elements.weight, place);
  if constexpr (K::M::kScaled) loaded.m_scale = slice.m_scale[block];
  if constexpr (K::V::kScaled) loaded.v_scale = slice.v_scale[block];
  return loaded;
}

template <typename Kind>
__device__ __forceinline__ Floats<kLaneElements> moments_of(
    const LanePack<typename Kind::Stored>& pack, uint8_t scale) {
  if constexpr (Kind::kScaled) {
    const uint32_t base = Kind::Code::base_of(scale);
    Floats<kLaneElements> moments;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) moments[i] = Kind::Code::decode(pack.at[i], base);
    return moments;
  } else {
    return to_floats(pack);
  }
}

/// Stores a block's moments, and its scale where there is one. All lanes must call: those without
/// elements with zeros.
template <typename Kind, bool kVector>
__device__ __forceinline__ void keep_moments(void* memory, uint8_t* scale, const Place& place,
                                             const Floats<kLaneElements>& moments,
                                             const uint32_t (&random)[kLaneElements],
                                             uint32_t (*bits)(uint32_t)) {
  LanePack<typename Kind::Stored> pack;
  if constexpr (Kind::kScaled) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i)
      largest = max(largest, __float_as_uint(moments[i]) & 0x7fffffffU);
    largest = __reduce_max_sync(0xffffffffU, largest);
    const uint8_t own = Kind::Code::scale_of(largest);
    const uint32_t base = Kind::Code::base_of(own);
    if (place.lane == 0) *scale = own;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i)
      pack.at[i] = Kind::Code::encode_stochastically(moments[i], base, bits(random[i]));
  } else if constexpr (std::is_same_v<typename Kind::Stored, float>) {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) pack.at[i] = moments[i];
  } else {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i)
      pack.at[i] =
          __ushort_as_bfloat16(round_stochastically(__float_as_uint(moments[i]), bits(random[i])));
  }
  store_lane<kVector>(memory, place, pack);
}

template <typename K, bool kVector>
__device__ __forceinline__ void update_block(const LoadedBlock<K>& loaded, const AdamWFactors& f,
                                             float grad_scale, const RowSlice& slice,
                                             uint32_t block) {
  const Place place = find_place(slice, block);
  Floats<kLaneElements> m = moments_of<typename K::M>(loaded.m, loaded.m_scale);
  Floats<kLaneElements> v = moments_of<typename K::V>(loaded.v, loaded.v_scale);
  uint32_t random[kLaneElements];
  LanePack<typename K::Master> masters;
  LanePack<BFloat16> weights;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const auto grad = static_cast<float>(loaded.grad.at[i]);
    float master = master_of(loaded.master.at[i], loaded.weight.at[i]);
    random[i] = rounding_bits(f.update, __float_as_uint(grad), __float_as_uint(m[i]),
                              __float_as_uint(v[i]), __float_as_uint(master));
    update_element(grad, grad_scale, f, master, m[i], v[i]);
    masters.at[i] = keep_master<typename K::Master>(master, random[i]);
    if constexpr (K::kWeight) weights.at[i] = __float2bfloat16_rn(master);
  }
  store_lane<kVector>(slice.elements.master, place, masters);
  if constexpr (K::kWeight) store_lane<kVector>(slice.elements.weight, place, weights);
  keep_moments<typename K::M, kVector>(slice.elements.m, slice.m_scale + block, place, m, random,
                                       first_moment_bits);
  keep_moments<typename K::V, kVector>(slice.elements.v, slice.v_scale + block, place, v, random,
                                       second_moment_bits);
}

template <typename K, bool kVector>
__device__ __forceinline__ void update_blocks(const RowSlice& slice, uint32_t first,
                                              const AdamWStep& step) {
  LoadedBlock<K> loaded[kBlocksOfWarp];
#pragma unroll
  for (int i = 0; i < kBlocksOfWarp; ++i) {
    if (first + i < slice.num_blocks) loaded[i] = load_block<K, kVector>(slice, first + i);
  }
  // What decides about the step is looked at here, where the loads above are under way already.
  const AdamWGradScale grad_scale = *step.grad_scale;
  if (grad_scale.found_inf != 0) return;
  const AdamWFactors factors = *step.factors;
#pragma unroll
  for (int i = 0; i < kBlocksOfWarp; ++i) {
    if (first + i < slice.num_blocks)
      update_block<K, kVector>(loaded[i], factors, grad_scale.scale, slice, first + i);
  }
}

template <typename K>
__global__ void __launch_bounds__(kRowThreads, kCtasOfSm)
    update_rows(const __grid_constant__ RowList list, const AdamWStep step) {
  wait_for_earlier();
  const int cta = static_cast<int>(blockIdx.x);
  const int slice_idx = find_part(list.first_cta, list.count, cta);
  const RowSlice& slice = list.slices[slice_idx];
  const uint32_t first = static_cast<uint32_t>(cta - list.first_cta[slice_idx]) * kBlocksOfCta +
                         threadIdx.x / kWarpSize * kBlocksOfWarp;
  if ((list.vectors >> slice_idx & 1) != 0) {
    update_blocks<K, true>(slice, first, step);
  } else {
    update_blocks<K, false>(slice, first, step);
  }
}

using RowKernel = void (*)(RowList, AdamWStep);

template <typename G, typename M, typename V>
RowKernel choose_rows_by_master(const AdamWRowsKind& kind) {
  switch (kind.master) {
    case DType::kU16:
      return update_rows<KeptRows<G, uint16_t, M, V, true>>;
    case DType::kU8:
      return update_rows<KeptRows<G, uint8_t, M, V, true>>;
    case DType::kBF16:
      return update_rows<KeptRows<G, BFloat16, M, V, false>>;
    default:
      return kind.has_weight ? update_rows<KeptRows<G, float, M, V, true>>
                             : update_rows<KeptRows<G, float, M, V, false>>;
  }
}

/// Calls run.operator()<how the moment is kept>().
template <typename Fp8, typename F16, typename Run>
void with_moment(MomentKind kind, const Run& run) {
  switch (kind) {
    case MomentKind::kFp8:
      return run.template operator()<Scaled<Fp8>>();
    case MomentKind::kF16:
      return run.template operator()<Scaled<F16>>();
    case MomentKind::kBF16:
      return run.template operator()<Unscaled<BFloat16>>();
    case MomentKind::kF32:
      return run.template operator()<Unscaled<float>>();
  }
}

RowKernel choose_rows_kernel(const AdamWRowsKind& kind) {
  RowKernel kernel = nullptr;
  with_type(kind.grad, [&]<typename G>() {
    with_moment<FirstMomentFp8, FirstMomentF16>(kind.m, [&]<typename M>() {
      with_moment<SecondMomentFp8, SecondMomentF16>(kind.v, [&]<typename V>() {
        if constexpr (M::kScaled || V::kScaled) kernel = choose_rows_by_master<G, M, V>(kind);
      });
    });
  });
  return kernel;
}

void launch_rows(RowKernel kernel, const AdamWStep& step, RowList& list, cudaStream_t stream) {
  const int ctas = list.first_cta[list.count];
  if (ctas > 0)
    launch_early(kernel, {static_cast<unsigned>(ctas), kRowThreads}, stream, list, step);
  list.count = 0;
  list.vectors = 0;
}

void append_rows(RowList& list, const AdamWRows& slice) {
  const bool whole = slice.columns % kMomentBlock == 0;
  const int64_t blocks_of_row = whole ? 1 : count_moment_blocks(slice.columns);
  const int64_t num_blocks = slice.rows * count_moment_blocks(slice.columns);
  if (num_blocks >= int64_t{1} << 31) check(cudaErrorInvalidValue);
  list.slices[list.count] = {.elements = slice.elements,
                             .m_scale = slice.m_scale,
                             .v_scale = slice.v_scale,
                             .columns = static_cast<uint32_t>(whole ? kMomentBlock : slice.columns),
                             .num_blocks = static_cast<uint32_t>(num_blocks),
                             .blocks_of_row = Divider(static_cast<uint32_t>(blocks_of_row))};
  list.first_cta[list.count + 1] =
      list.first_cta[list.count] + static_cast<int>(divide_up(num_blocks, kBlocksOfCta));
  const AdamWSlice& e = slice.elements;
  const bool vectors =
      slice.columns % kLaneElements == 0 && are_aligned(e.grad, e.master, e.m, e.v, e.weight);
  list.vectors |= uint64_t{vectors} << list.count;
  ++list.count;
}

}  // namespace

void launch_adamw_rows(const AdamWRowsKind& kind, const AdamWStep& step,
                       std::span<const AdamWRows> slices, cudaStream_t stream) {
  const RowKernel kernel = choose_rows_kernel(kind);
  RowList list = {};
  for (const AdamWRows& slice : slices) {
    if (slice.elements.count == 0) continue;
    if (list.count == RowList::kMax) launch_rows(kernel, step, list, stream);
    append_rows(list, slice);
  }
  launch_rows(kernel, step, list, stream);
}

}  // namespace tessera::cuda
