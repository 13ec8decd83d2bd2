// Rows between tokens and experts. Work goes token by token in both directions, so that a token's
// own row moves once between memory and the SMs, however many experts take it: an
// expert's rows are far apart in time there, but each is long enough to move at full speed.
#include <cuda_bf16.h>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/short_kernel.cuh"
#include "ops/permute/permute_kernels.h"

namespace tessera::cuda {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanes;
/// Vectors of a row that a lane moves at a time.
constexpr int kAtOnce = 4;
/// Tokens whose rows a warp reads before it writes them, where each is written more than twice:
/// memory that turns from reading to writing less often is faster.
constexpr int kTokensAtOnce = 4;

__device__ __forceinline__ int64_t actual(const int64_t* extent, int64_t bound) {
  return extent == nullptr ? bound : *extent;
}

/// What is read and written at once: 16 bytes, or one value where rows are no multiple of that.
template <typename T, int kValues>
struct Vector;
template <>
struct Vector<float, 4> {
  using Raw = uint4;
  static __device__ __forceinline__ void unpack(const Raw& raw, float (&to)[4]) {
    to[0] = __uint_as_float(raw.x);
    to[1] = __uint_as_float(raw.y);
    to[2] = __uint_as_float(raw.z);
    to[3] = __uint_as_float(raw.w);
  }
  static __device__ __forceinline__ Raw pack(const float (&from)[4]) {
    return {__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
            __float_as_uint(from[3])};
  }
};
template <>
struct Vector<float, 1> {
  using Raw = uint32_t;
  static __device__ __forceinline__ void unpack(const Raw& raw, float (&to)[1]) {
    to[0] = __uint_as_float(raw);
  }
  static __device__ __forceinline__ Raw pack(const float (&from)[1]) {
    return __float_as_uint(from[0]);
  }
};
template <>
struct Vector<__nv_bfloat16, 8> {
  using Raw = uint4;
  static __device__ __forceinline__ void unpack_two(uint32_t word, float& low, float& high) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xFFFF0000U);
  }
  static __device__ __forceinline__ uint32_t pack_two(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
  static __device__ __forceinline__ void unpack(const Raw& raw, float (&to)[8]) {
    unpack_two(raw.x, to[0], to[1]);
    unpack_two(raw.y, to[2], to[3]);
    unpack_two(raw.z, to[4], to[5]);
    unpack_two(raw.w, to[6], to[7]);
  }
  static __device__ __forceinline__ Raw pack(const float (&from)[8]) {
    return {pack_two(from[0], from[1]), pack_two(from[2], from[3]), pack_two(from[4], from[5]),
            pack_two(from[6], from[7])};
  }
};
template <>
struct Vector<__nv_bfloat16, 1> {
  using Raw = uint16_t;
  static __device__ __forceinline__ void unpack(const Raw& raw, float (&to)[1]) {
    to[0] = __uint_as_float(static_cast<uint32_t>(raw) << 16);
  }
  static __device__ __forceinline__ Raw pack(const float (&from)[1]) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(from[0]));
  }
};

/// Writes zeros to the padding rows: each warp looks at 32 rows.
template <typename Raw>
__device__ __forceinline__ void clear_padding(const RowMaps& maps, int64_t vectors, void* rows,
                                              int64_t block) {
  const int lane = threadIdx.x % kLanes;
  const int64_t first = (block * kWarps + threadIdx.x / kLanes) * kLanes;
  const int64_t num_rows = actual(maps.row_extent, maps.num_rows);
  const int64_t mine = first + lane;
  unsigned padding = __ballot_sync(kAllLanes, mine < num_rows && maps.source_R[mine] < 0);
  while (padding != 0) {
    const int64_t row = first + __ffs(static_cast<int>(padding)) - 1;
    padding &= padding - 1;
    Raw* to = static_cast<Raw*>(rows) + row * vectors;
    for (int64_t v = lane; v < vectors; v += kLanes) to[v] = Raw{};
  }
}

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
unsigned padding_blocks(const RowMaps& maps) {
  return static_cast<unsigned>(divide_up(maps.num_rows, kThreads));
}

/// The first blocks copy: a warp reads kVectors · 32 vectors of kTokens tokens' rows, then writes
/// them to all of the tokens' rows. The others clear padding.
template <typename Raw, int kVectors, int kTokens>
__global__ void __launch_bounds__(kThreads)
    permute_rows(const PermuteRows p, int64_t vectors, int parts, unsigned copying_blocks) {
  wait_for_earlier();
  let_next_begin_if_short();
  if (blockIdx.x >= copying_blocks)
    return clear_padding<Raw>(p.maps, vectors, p.rows_RH, blockIdx.x - copying_blocks);
  const int lane = threadIdx.x % kLanes;
  const int64_t work = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  const int64_t token = work / parts * kTokens;
  const int64_t left = actual(p.maps.token_extent, p.maps.num_tokens) - token;
  const int64_t first = work % parts * (kVectors * kLanes) + lane;
  const Raw* x = static_cast<const Raw*>(p.x_TH) + token * vectors;
  Raw held[kTokens][kVectors];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (t < left && first + i * kLanes < vectors)
        held[t][i] = x[t * vectors + first + i * kLanes];
    }
  }
  const int32_t* row_of = p.maps.row_of_TK + token * p.maps.top_k;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t >= left) return;
    for (int k = 0; k < p.maps.top_k; ++k) {
      const int64_t row = row_of[t * p.maps.top_k + k];
      if (row < 0) continue;
      Raw* to = static_cast<Raw*>(p.rows_RH) + row * vectors;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (first + i * kLanes < vectors) __stcs(to + first + i * kLanes, held[t][i]);
      }
    }
  }
}

/// A lane makes kVectors vectors of a token's row, kRows rows at a time: it reads them all before
/// it adds the first.
template <typename T, int kValues, int kRows, int kVectors>
__global__ void __launch_bounds__(kThreads)
    combine_rows(const CombineRows p, int64_t vectors, int parts) {
  wait_for_earlier();
  let_next_begin_if_short();
  using Vec = Vector<T, kValues>;
  using Raw = typename Vec::Raw;
  const int64_t work = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  const int64_t token = work / parts;
  if (token >= actual(p.maps.token_extent, p.maps.num_tokens)) return;
  const int64_t at = work % parts * (kLanes * kVectors) + threadIdx.x % kLanes;
  const Raw* y = static_cast<const Raw*>(p.y_RH);
  const int32_t* row_of = p.maps.row_of_TK + token * p.maps.top_k;
  const float* probs = p.probs_TK == nullptr ? nullptr : p.probs_TK + token * p.maps.top_k;
  Raw addend[kVectors] = {};  // zeros
  if (p.addend_TH != nullptr) {
    const Raw* from = static_cast<const Raw*>(p.addend_TH) + token * vectors;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (at + v * kLanes < vectors) addend[v] = from[at + v * kLanes];
    }
  }
  float sums[kVectors][kValues] = {};
  for (int first = 0; first < p.maps.top_k; first += kRows) {
    Raw held[kRows][kVectors];
    bool there[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first + i < p.maps.top_k ? row_of[first + i] : -1;
      there[i] = row >= 0;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (there[i] && at + v * kLanes < vectors) held[i][v] = y[row * vectors + at + v * kLanes];
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (!there[i]) continue;
      const float prob = probs == nullptr ? 1.0F : probs[first + i];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float values[kValues];
        Vec::unpack(held[i][v], values);
#pragma unroll
        for (int j = 0; j < kValues; ++j) sums[v][j] = fmaf(values[j], prob, sums[v][j]);
      }
    }
  }
  Raw* out = static_cast<Raw*>(p.out_TH) + token * vectors;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float others[kValues];
    Vec::unpack(addend[v], others);
#pragma unroll
    for (int j = 0; j < kValues; ++j) sums[v][j] += others[j];
    if (at + v * kLanes < vectors) out[at + v * kLanes] = Vec::pack(sums[v]);
  }
}

__global__ void __launch_bounds__(kThreads) clear_row_of(const CombineBackward p) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < p.maps.num_tokens * p.maps.top_k) p.row_of_TK[i] = -1;
}

__global__ void __launch_bounds__(kThreads) invert_source(const CombineBackward p) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= actual(p.maps.row_extent, p.maps.num_rows)) return;
  const int32_t source = p.maps.source_R[row];
  if (source >= 0) p.row_of_TK[source] = static_cast<int32_t>(row);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

/// The first blocks take an assignment a warp: those of a token follow each other, so that its
/// gradient is read from memory once. The others clear padding.
template <typename T, int kValues>
__global__ void __launch_bounds__(kThreads)
    combine_backward(const CombineBackward p, int64_t vectors, unsigned copying_blocks) {
  wait_for_earlier();
  let_next_begin_if_short();
  using Vec = Vector<T, kValues>;
  using Raw = typename Vec::Raw;
  if (blockIdx.x >= copying_blocks)
    return clear_padding<Raw>(p.maps, vectors, p.grad_y_RH, blockIdx.x - copying_blocks);
  const int lane = threadIdx.x % kLanes;
  const int64_t assignment = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  const int64_t token = assignment / p.maps.top_k;
  if (token >= actual(p.maps.token_extent, p.maps.num_tokens)) return;
  const int64_t row = p.row_of_TK[assignment];
  if (row < 0) {
    if (lane == 0) p.grad_probs_TK[assignment] = 0;
    return;
  }
  const float prob = p.probs_TK[assignment];
  const Raw* grad = static_cast<const Raw*>(p.grad_TH) + token * vectors;
  const Raw* y = static_cast<const Raw*>(p.y_RH) + row * vectors;
  Raw* grad_y = static_cast<Raw*>(p.grad_y_RH) + row * vectors;
  float dot = 0;
  for (int64_t first = lane; first < vectors; first += kAtOnce * kLanes) {
    Raw held_y[kAtOnce], held_grad[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * kLanes >= vectors) continue;
      held_y[i] = y[first + i * kLanes];
      held_grad[i] = grad[first + i * kLanes];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * kLanes >= vectors) continue;
      float of_y[kValues], of_grad[kValues];
      Vec::unpack(held_y[i], of_y);
      Vec::unpack(held_grad[i], of_grad);
#pragma unroll
      for (int j = 0; j < kValues; ++j) {
        dot = fmaf(of_y[j], of_grad[j], dot);
        of_grad[j] *= prob;
      }
      grad_y[first + i * kLanes] = Vec::pack(of_grad);
    }
  }
  dot = warp_sum(dot);
  if (lane == 0) p.grad_probs_TK[assignment] = dot;
}

__global__ void __launch_bounds__(kThreads) gather_values(const GatherValues p) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= actual(p.extent, p.count) * p.per_row) return;
  const int32_t at = p.idx[i];
  p.to[i] = at < 0 ? 0.0F : p.from[at];
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % sizeof(uint4) == 0;
}

template <typename Raw, int kVectors, int kTokens>
void permute_with(const PermuteRows& p, int64_t vectors, cudaStream_t stream) {
  const auto parts = static_cast<int>(divide_up(vectors, kVectors * kLanes));
  const int64_t works = divide_up(p.maps.num_tokens, kTokens) * parts;
  const auto copying = static_cast<unsigned>(divide_up(works, kWarps));
  const unsigned blocks = copying + padding_blocks(p.maps);
  if (vectors == 0 || blocks == 0) return;
  launch_early(permute_rows<Raw, kVectors, kTokens>, {blocks, kThreads}, stream, p, vectors, parts,
               copying);
}

/// Takes 3 or 4 vectors a lane, whichever leaves fewer lanes idle.
template <typename Raw, int kTokens>
void permute_tokens(const PermuteRows& p, cudaStream_t stream) {
  const int64_t vectors = p.row_bytes / static_cast<int64_t>(sizeof(Raw));
  3 * divide_up(vectors, 3 * kLanes) < 4 * divide_up(vectors, 4 * kLanes)
      ? permute_with<Raw, 3, kTokens>(p, vectors, stream)
      : permute_with<Raw, 4, kTokens>(p, vectors, stream);
}

template <typename Raw>
void permute_by(const PermuteRows& p, cudaStream_t stream) {
  p.maps.top_k <= 2 ? permute_tokens<Raw, 1>(p, stream)
                    : permute_tokens<Raw, kTokensAtOnce>(p, stream);
}

template <typename T, int kValues, int kRows, int kVectors>
void combine_with(const CombineRows& p, cudaStream_t stream) {
  const int64_t vectors = p.width / kValues;
  const auto parts = static_cast<int>(divide_up(vectors, kLanes * kVectors));
  const auto blocks = static_cast<unsigned>(divide_up(p.maps.num_tokens * parts, kWarps));
  if (blocks == 0) return;
  launch_early(combine_rows<T, kValues, kRows, kVectors>, {blocks, kThreads}, stream, p, vectors,
               parts);
}

/// The fewer rows a token has, the more of each must be under way.
template <typename T, int kValues>
void combine_by(const CombineRows& p, cudaStream_t stream) {
  p.maps.top_k <= 2 ? combine_with<T, kValues, 2, 2>(p, stream)
                    : combine_with<T, kValues, 4, 2>(p, stream);
}

template <typename T, int kValues>
void backward_by(const CombineBackward& p, cudaStream_t stream) {
  const int64_t assignments = p.maps.num_tokens * p.maps.top_k;
  const auto copying = static_cast<unsigned>(divide_up(assignments, kWarps));
  const unsigned blocks = copying + padding_blocks(p.maps);
  if (blocks == 0) return;
  launch_early(combine_backward<T, kValues>, {blocks, kThreads}, stream, p, p.width / kValues,
               copying);
}

}  // namespace

void launch_permute(const PermuteRows& permute, cudaStream_t stream) {
  const bool aligned = is_aligned(permute.x_TH) && is_aligned(permute.rows_RH);
  if (aligned && permute.row_bytes % 16 == 0) return permute_by<uint4>(permute, stream);
  if (permute.row_bytes % 4 == 0) return permute_by<uint32_t>(permute, stream);
  permute_by<uint16_t>(permute, stream);
}

void launch_combine(const CombineRows& combine, cudaStream_t stream) {
  const bool aligned =
      is_aligned(combine.y_RH) && is_aligned(combine.addend_TH) && is_aligned(combine.out_TH);
  if (combine.type == RowType::kF32) {
    aligned&& combine.width % 4 == 0 ? combine_by<float, 4>(combine, stream)
                                     : combine_by<float, 1>(combine, stream);
  } else {
    aligned&& combine.width % 8 == 0 ? combine_by<__nv_bfloat16, 8>(combine, stream)
                                     : combine_by<__nv_bfloat16, 1>(combine, stream);
  }
}

void launch_combine_backward(const CombineBackward& p, cudaStream_t stream) {
  const auto blocks_for = [](int64_t count) {
    return static_cast<unsigned>(divide_up(count, kThreads));
  };
  const int64_t assignments = p.maps.num_tokens * p.maps.top_k;
  if (assignments > 0) launch_early(clear_row_of, {blocks_for(assignments), kThreads}, stream, p);
  if (p.maps.num_rows > 0)
    launch_early(invert_source, {blocks_for(p.maps.num_rows), kThreads}, stream, p);
  const bool aligned = is_aligned(p.grad_TH) && is_aligned(p.y_RH) && is_aligned(p.grad_y_RH);
  if (p.type == RowType::kF32) {
    aligned&& p.width % 4 == 0 ? backward_by<float, 4>(p, stream)
                               : backward_by<float, 1>(p, stream);
  } else {
    aligned&& p.width % 8 == 0 ? backward_by<__nv_bfloat16, 8>(p, stream)
                               : backward_by<__nv_bfloat16, 1>(p, stream);
  }
}

void launch_gather_values(const GatherValues& gather, cudaStream_t stream) {
  const int64_t count = gather.count * gather.per_row;
  if (count == 0) return;
  launch_early(gather_values, {static_cast<unsigned>(divide_up(count, kThreads)), kThreads}, stream,
               gather);
}

}  // namespace tessera::cuda
