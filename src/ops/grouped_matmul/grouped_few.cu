// Grouped products of few rows, as decoding has them: each expert's matrix is read once, past the
// tensor cores, by all threads at once. A block takes some columns of the s-th of the experts that
// have rows.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/few_rows.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/grouped_matmul/grouped_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kWidth = kVectorWidth<BFloat16>;
constexpr int kRows = 4;  // of an expert, whose sums a thread has at once

/// An expert with rows, or one of none.
struct FewRows {
  int expert = -1;
  int64_t begin = 0;
  int64_t end = 0;
};

/// By a block of kWarps warps: the expert of its number among those that have rows.
template <int kWarps>
__device__ __forceinline__ FewRows find_rows(const PlainRowsParams& p, int number) {
  __shared__ FewRows found;
  __shared__ int filled[kWarps];
  const auto thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kLanes;
  const int warp = thread / kLanes;
  if (thread == 0) found = {};
  for (int first = 0; first < p.num_experts; first += kWarps * kLanes) {
    const int e = first + thread;
    const int64_t begin = e < p.num_experts ? p.offsets[e] : 0;
    const int64_t end = e < p.num_experts ? p.offsets[e + 1] : 0;
    const unsigned own = __ballot_sync(~0U, end > begin);
    if (lane == 0) filled[warp] = __popc(own);
    __syncthreads();
    int before = __popc(own & ((1U << lane) - 1));
    int all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      before += w < warp ? filled[w] : 0;
      all += filled[w];
    }
    if (end > begin && before == number) found = {e, begin, end};
    __syncthreads();
    number -= all;
    if (number < 0) break;
  }
  return found;
}

/// As many rows from `row` on as are taken at once.
__device__ __forceinline__ int count_rows(const FewRows& rows, int64_t row) {
  const int64_t left = rows.end - row;
  return static_cast<int>(left < kRows ? left : kRows);
}

constexpr int kWarpsByOut = 8;
constexpr int kColumnsOfWarp = 4;
constexpr int kColumnsByOut = kWarpsByOut * kColumnsOfWarp;

/// Row r of `a`, or of what is gathered from it; null: zeros.
__device__ __forceinline__ const BFloat16* find_row(const PlainRowsParams& p, int64_t row) {
  const auto* a = static_cast<const BFloat16*>(p.a);
  if (p.source == nullptr) return a + row * p.wide;
  const int source = p.source[row];
  return source < 0 ? nullptr : a + source / p.top_k * p.wide;
}

/// y = a · Wᵀ.
__global__ void __launch_bounds__(kWarpsByOut* kLanes) few_rows_by_out(const PlainRowsParams p) {
  wait_for_earlier();
  let_next_begin();
  const FewRows rows = find_rows<kWarpsByOut>(p, static_cast<int>(blockIdx.y));
  if (rows.expert < 0) return;
  const int64_t column =
      int64_t{blockIdx.x} * kColumnsByOut + threadIdx.x / kLanes * kColumnsOfWarp;
  if (column >= p.largest) return;
  const BFloat16* weight =
      static_cast<const BFloat16*>(p.weight) + (p.block_begin[rows.expert] + column) * p.wide;
  for (int64_t row = rows.begin; row < rows.end; row += kRows) {
    const int count = count_rows(rows, row);
    const BFloat16* given[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) given[r] = r < count ? find_row(p, row + r) : nullptr;
    float sums[kRows][kColumnsOfWarp];
    multiply_few_rows(given, weight, p.wide, sums);
    auto* y = static_cast<BFloat16*>(p.y) + row * p.largest + column;
    if (threadIdx.x % kLanes != 0) continue;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Floats<kColumnsOfWarp> all;
#pragma unroll
      for (int c = 0; c < kColumnsOfWarp; ++c) all[c] = sums[r][c];
      if (r < count) store(y + r * p.largest, all);
    }
  }
}

constexpr int kReductionByIn = 1536;  ///< values of `a` that shared memory has

/// How a block's threads share columns of W, kLanes to a row, and the reduction.
template <int kThreads_, int kLanes_>
struct ByIn {
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kLanes = kLanes_;
  static constexpr int kColumns = kLanes * kWidth;
  static constexpr int kSlices = kThreads / kLanes;
};
using ByInOfFew = ByIn<512, 8>;  ///< so many blocks that few experts keep the GPU busy
using ByInOfMany = ByIn<256, 16>;
constexpr int64_t kFewExperts = 16;

/// y = a · W: a thread has eight neighbouring columns of every n-th row of W.
template <typename How>
__global__ void __launch_bounds__(How::kThreads, 2) few_rows_by_in(const PlainRowsParams p) {
  wait_for_earlier();
  let_next_begin();
  __shared__ float a_values[kRows][kReductionByIn];
  __shared__ float partial[How::kWarps][kRows][How::kColumns];
  const FewRows rows = find_rows<How::kWarps>(p, static_cast<int>(blockIdx.y));
  if (rows.expert < 0) return;
  const auto thread = static_cast<int>(threadIdx.x);
  const int slice = thread / How::kLanes;
  const int own = thread % How::kLanes * kWidth;
  const int64_t column = int64_t{blockIdx.x} * How::kColumns;
  const bool there = column + own < p.wide;
  const auto* weight =
      static_cast<const BFloat16*>(p.weight) + p.block_begin[rows.expert] * p.wide + column + own;
  const auto* a = static_cast<const BFloat16*>(p.a);
  for (int64_t row = rows.begin; row < rows.end; row += kRows) {
    const int count = count_rows(rows, row);
    float sums[kRows][kWidth] = {};
    for (int64_t first = 0; first < p.largest; first += kReductionByIn) {
      const int64_t rest = p.largest - first;
      const int length = static_cast<int>(rest < kReductionByIn ? rest : kReductionByIn);
      __syncthreads();
      for (int r = 0; r < count; ++r) {
        for (int i = thread; i < length; i += How::kThreads)
          a_values[r][i] = load<1>(a + (row + r) * p.largest + first + i)[0];
      }
      __syncthreads();
      if (!there) continue;
#pragma unroll 6
      for (int i = slice; i < length; i += How::kSlices) {
        const Floats<kWidth> w = to_floats(load_pack_once<kWidth>(weight + (first + i) * p.wide));
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (r >= count) continue;
          const float value = a_values[r][i];
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sums[r][j] += value * w[j];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= count) continue;
#pragma unroll
      for (float& sum : sums[r]) {
#pragma unroll
        for (int step = How::kLanes; step < kLanes; step *= 2)
          sum += __shfl_xor_sync(~0U, sum, step);
      }
    }
    if (thread % kLanes < How::kLanes) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) partial[thread / kLanes][r][own + j] = sums[r][j];
      }
    }
    __syncthreads();
    for (int i = thread; i < count * How::kColumns; i += How::kThreads) {
      const int r = i / How::kColumns;
      const int c = i % How::kColumns;
      if (column + c >= p.wide) continue;
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < How::kWarps; ++warp) sum += partial[warp][r][c];
      store(static_cast<BFloat16*>(p.y) + (row + r) * p.wide + column + c, Floats<1>{{sum}});
    }
  }
}

template <typename How>
void launch_by_in(const PlainRowsParams& p, unsigned experts, cudaStream_t stream) {
  const auto columns = static_cast<unsigned>(divide_up(p.wide, How::kColumns));
  launch_early(few_rows_by_in<How>, {{columns, experts}, How::kThreads}, stream, p);
}

}  // namespace

void launch_few_rows(const PlainRowsParams& p, bool by_out, cudaStream_t stream) {
  const auto experts = static_cast<unsigned>(
      p.num_rows < p.num_experts ? p.num_rows : static_cast<int64_t>(p.num_experts));
  if (!by_out) {
    return experts <= kFewExperts ? launch_by_in<ByInOfFew>(p, experts, stream)
                                  : launch_by_in<ByInOfMany>(p, experts, stream);
  }
  const auto columns = static_cast<unsigned>(divide_up(p.largest, kColumnsByOut));
  launch_early(few_rows_by_out, {{columns, experts}, kWarpsByOut * kLanes}, stream, p);
}

}  // namespace tessera::cuda
