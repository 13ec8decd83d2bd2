#include <type_traits>

#include "ops/adamw/adamw_update.cuh"
#include "ops/adamw/moment_code.h"
#include "ops/adamw/state_rounding.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/muon/muon_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 2;  // of a thread
constexpr int kMaxMatrices = 64;

template <typename Matrix>
struct MatrixList {
  Matrix at[kMaxMatrices];
};

/// Stores a value as T, BF16 rounded by these bits.
template <typename T>
__device__ __forceinline__ void keep(T* to, float value, uint32_t random) {
  if constexpr (std::is_same_v<T, float>) {
    *to = value;
  } else {
    *to = __ushort_as_bfloat16(round_stochastically(__float_as_uint(value), random));
  }
}

/// Calls run(first element) for each vector of kWidth of a matrix that is this thread's.
template <int kWidth, typename Run>
__device__ __forceinline__ void for_each_vector(int64_t elements, Run run) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t vector =
        (static_cast<int64_t>(blockIdx.x) * kVectors + i) * kThreads + threadIdx.x;
    if ((vector + 1) * kWidth <= elements) run(vector * kWidth);
  }
}

/// Each rounding is written out, as in AdamW's kernel.
template <typename M, typename U, int kWidth>
__global__ void __launch_bounds__(kThreads)
    average_list(const __grid_constant__ MatrixList<MuonGradient> list, const MuonStep step, U* u,
                 int64_t elements) {
  wait_for_earlier();
  const AdamWGradScale grad_scale = *step.grad_scale;
  if (grad_scale.found_inf != 0) return;
  const MuonFactors f = *step.factors;
  const MuonGradient matrix = list.at[blockIdx.y];
  M* const kept = static_cast<M*>(matrix.m);
  U* const to = u + blockIdx.y * elements;
  for_each_vector<kWidth>(elements, [&](int64_t first) {
    const Floats<kWidth> grad = load<kWidth>(matrix.grad + first);
    const Floats<kWidth> old = load<kWidth>(static_cast<const M*>(kept) + first);
    Pack<M, kWidth> averages;
    Floats<kWidth> result;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float g = __fmul_rn(grad[i], grad_scale.scale);
      const float m = __fmaf_rn(__fsub_rn(g, old[i]), f.new_m, old[i]);
      result[i] = __fmaf_rn(__fsub_rn(m, g), f.averaged, g);
      uint32_t random = 0;
      if constexpr (!std::is_same_v<M, float>)
        random = first_moment_bits(
            rounding_bits(f.update, __float_as_uint(grad[i]), __float_as_uint(old[i]), 0, 0));
      keep(averages.at + i, m, random);
    }
    store(kept + first, averages);
    store(to + first, result);
  });
}

constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kLaneElements = static_cast<int>(kMomentBlock) / kWarpSize;

/// Blocks of averages that share a scale: a warp has one, each lane every 32nd element.
struct ScaledRows {
  int64_t elements;  ///< of a matrix
  uint32_t columns;
  uint32_t blocks_of_row;
  uint32_t num_blocks;  ///< of a matrix
};

template <typename Code, typename U>
__global__ void __launch_bounds__(kThreads)
    average_scaled_list(const __grid_constant__ MatrixList<MuonScaledGradient> list,
                        const MuonStep step, U* u, const ScaledRows sizes) {
  wait_for_earlier();
  const AdamWGradScale grad_scale = *step.grad_scale;
  const uint32_t block = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  if (grad_scale.found_inf != 0 || block >= sizes.num_blocks) return;
  const MuonFactors f = *step.factors;
  const MuonScaledGradient matrix = list.at[blockIdx.y];
  const uint32_t row = block / sizes.blocks_of_row;
  const uint32_t column = (block - row * sizes.blocks_of_row) * static_cast<uint32_t>(kMomentBlock);
  const int64_t first = static_cast<int64_t>(row) * sizes.columns + column;
  const uint32_t count = min(static_cast<uint32_t>(kMomentBlock), sizes.columns - column);
  auto* const kept = static_cast<typename Code::Code*>(matrix.m) + first;
  U* const to = u + blockIdx.y * sizes.elements + first;
  const uint32_t old_base = Code::base_of(matrix.m_scale[block]);
  float averages[kLaneElements] = {};
  uint32_t random[kLaneElements] = {};
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const uint32_t at = threadIdx.x % kWarpSize + i * kWarpSize;
    if (at >= count) continue;
    const float grad = matrix.grad[first + at];
    const float old = Code::decode(kept[at], old_base);
    const float g = __fmul_rn(grad, grad_scale.scale);
    const float m = __fmaf_rn(__fsub_rn(g, old), f.new_m, old);
    to[at] = U(__fmaf_rn(__fsub_rn(m, g), f.averaged, g));
    averages[i] = m;
    random[i] = first_moment_bits(
        rounding_bits(f.update, __float_as_uint(grad), __float_as_uint(old), 0, 0));
    largest = max(largest, __float_as_uint(m) & 0x7fffffffU);
  }
  largest = __reduce_max_sync(0xffffffffU, largest);
  const uint8_t scale = Code::scale_of(largest);
  const uint32_t base = Code::base_of(scale);
  // All lanes have read the scale before: they have met above.
  if (threadIdx.x % kWarpSize == 0) matrix.m_scale[block] = scale;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const uint32_t at = threadIdx.x % kWarpSize + i * kWarpSize;
    if (at < count) kept[at] = Code::encode_stochastically(averages[i], base, random[i]);
  }
}

template <typename Master, bool kWeight, typename O, int kWidth>
__global__ void __launch_bounds__(kThreads)
    update_list(const __grid_constant__ MatrixList<MuonWeight> list, const MuonStep step,
                const O* o, int64_t elements) {
  constexpr bool kRemainder = kIsRemainder<Master>;
  constexpr bool kRandom = !std::is_same_v<Master, float> && !std::is_same_v<Master, uint16_t>;
  wait_for_earlier();
  if (step.grad_scale->found_inf != 0) return;
  const MuonFactors f = *step.factors;
  const MuonWeight matrix = list.at[blockIdx.y];
  Master* const masters = static_cast<Master*>(matrix.master);
  BFloat16* const weights = static_cast<BFloat16*>(matrix.weight);
  const O* const from = o + blockIdx.y * elements;
  for_each_vector<kWidth>(elements, [&](int64_t first) {
    const Floats<kWidth> orthogonal = load<kWidth>(from + first);
    Pack<Master, kWidth> master = load_pack<kWidth>(static_cast<const Master*>(masters) + first);
    Pack<BFloat16, kWidth> weight{};
    if constexpr (kRemainder)
      weight = load_pack<kWidth>(static_cast<const BFloat16*>(weights) + first);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float old = master_of(master.at[i], weight.at[i]);
      const float change = __fmul_rn(f.step_size, orthogonal[i]);
      float value = __fmaf_rn(old, f.decay, -change);
      uint32_t random = 0;
      if constexpr (kRandom)
        random =
            rounding_bits(f.update, __float_as_uint(orthogonal[i]), 0, 0, __float_as_uint(old));
      master.at[i] = keep_master<Master>(value, random);
      if constexpr (kWeight) weight.at[i] = __float2bfloat16_rn(value);
    }
    store(masters + first, master);
    if constexpr (kWeight) store(weights + first, weight);
  });
}

/// Calls launch(list, blocks, first element) for up to kMaxMatrices at a time, of `units` each, of
/// which a block has so many.
template <typename Matrix, typename Launch>
void for_each_list(std::span<const Matrix> matrices, int64_t elements, int64_t units,
                   int64_t of_block, Launch launch) {
  if (elements == 0) return;
  for (size_t first = 0; first < matrices.size(); first += kMaxMatrices) {
    const size_t count = std::min<size_t>(kMaxMatrices, matrices.size() - first);
    MatrixList<Matrix> list{};
    std::ranges::copy(matrices.subspan(first, count), list.at);
    launch(list,
           dim3(static_cast<unsigned>(divide_up(units, of_block)), static_cast<unsigned>(count)),
           static_cast<int64_t>(first) * elements);
  }
}

constexpr int kWidth = 8;  // of BF16 16 bytes

int64_t elements_of_block(int width) {
  return static_cast<int64_t>(kThreads) * kVectors * width;
}

template <typename Run>
void with_width(bool vectors, Run run) {
  vectors ? run.template operator()<kWidth>() : run.template operator()<1>();
}

template <typename Run>
void with_master(DType master, bool has_weight, Run run) {
  if (master == DType::kU16) return run.template operator()<uint16_t, true>();
  if (master == DType::kU8) return run.template operator()<uint8_t, true>();
  if (master == DType::kBF16) return run.template operator()<BFloat16, false>();
  has_weight ? run.template operator()<float, true>() : run.template operator()<float, false>();
}

}  // namespace

void launch_muon_momentum(DType m, DType u_type, const MuonStep& step,
                          std::span<const MuonGradient> matrices, void* u, int64_t elements,
                          cudaStream_t stream) {
  const bool vectors =
      elements % kWidth == 0 && are_aligned(u) &&
      std::ranges::all_of(matrices, [](const auto& x) { return are_aligned(x.grad, x.m); });
  with_type(m, [&]<typename M>() {
    with_type(u_type, [&]<typename U>() {
      with_width(vectors, [&]<int kVector>() {
        for_each_list(matrices, elements, elements, elements_of_block(kVector),
                      [&](const auto& list, dim3 blocks, int64_t at) {
                        launch_early(average_list<M, U, kVector>, {blocks, kThreads}, stream, list,
                                     step, static_cast<U*>(u) + at, elements);
                      });
      });
    });
  });
}

void launch_muon_scaled_momentum(MomentKind m, DType u_type, const MuonStep& step,
                                 std::span<const MuonScaledGradient> matrices, void* u,
                                 int64_t rows, int64_t columns, cudaStream_t stream) {
  const int64_t of_row = count_moment_blocks(columns);
  if (rows * of_row >= int64_t{1} << 31) check(cudaErrorInvalidValue);
  const ScaledRows sizes = {.elements = rows * columns,
                            .columns = static_cast<uint32_t>(columns),
                            .blocks_of_row = static_cast<uint32_t>(of_row),
                            .num_blocks = static_cast<uint32_t>(rows * of_row)};
  with_first_moment_code(m, [&]<typename Code>() {
    with_type(u_type, [&]<typename U>() {
      for_each_list(matrices, sizes.elements, sizes.num_blocks, kWarps,
                    [&](const auto& list, dim3 blocks, int64_t at) {
                      launch_early(average_scaled_list<Code, U>, {blocks, kThreads}, stream, list,
                                   step, static_cast<U*>(u) + at, sizes);
                    });
    });
  });
}

void launch_muon_update(DType master, bool has_weight, DType o_type, const MuonStep& step,
                        std::span<const MuonWeight> matrices, const void* o, int64_t elements,
                        cudaStream_t stream) {
  const bool vectors =
      elements % kWidth == 0 && are_aligned(o) &&
      std::ranges::all_of(matrices, [](const auto& x) { return are_aligned(x.master, x.weight); });
  with_type(o_type, [&]<typename O>() {
    with_master(master, has_weight, [&]<typename Master, bool kHasWeight>() {
      with_width(vectors, [&]<int kVector>() {
        for_each_list(matrices, elements, elements, elements_of_block(kVector),
                      [&](const auto& list, dim3 blocks, int64_t at) {
                        launch_early(update_list<Master, kHasWeight, O, kVector>,
                                     {blocks, kThreads}, stream, list, step,
                                     static_cast<const O*>(o) + at, elements);
                      });
      });
    });
  });
}

}  // namespace tessera::cuda
